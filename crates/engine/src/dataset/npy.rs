//! The header of a `.npy` file: magic, version, length, then a Python dict literal padded to where the data
//! begin. Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>, versions 1.0, 2.0
//! and 3.0.
//!
//! Parsed by hand: the dict has three known keys, and the crates that read it bring array types along.
//! Accepts only two-dimensional arrays in C order with an element type that is served.

use super::Dtype;

/// Longest header read. NumPy writes 118 bytes for two dimensions, and by default refuses more than 10 000
/// itself.
const HEADER_BYTES_MAX: u64 = 65_536;

const MAGIC: &[u8] = b"\x93NUMPY";

/// A two-dimensional array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Array {
    pub(super) dtype: Dtype,
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// Where row 0 begins.
    pub(super) data_offset: u64,
}

/// What is wrong with a header, and the configuration field to look at.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) field: &'static str,
    pub(super) problem: String,
}

fn bad(problem: impl Into<String>) -> Problem {
    Problem {
        field: "path",
        problem: problem.into(),
    }
}

fn truncated(length_bytes: u64) -> Problem {
    bad(format!(
        "is truncated: its .npy header does not end within its {length_bytes} bytes; copy or save the file again"
    ))
}

/// Position of the dict (offset, length), from the first bytes of the file: 12, or fewer if the file is
/// shorter.
pub(super) fn dict_place(start: &[u8], file_bytes: u64) -> Result<(u64, u64), Problem> {
    if !start.starts_with(MAGIC) {
        return Err(if MAGIC.starts_with(start) {
            truncated(file_bytes)
        } else {
            bad("does not begin with the magic of .npy: name a file that numpy.save made, or another layout")
        });
    }
    // Bytes 6 and 7 are the version; the length follows, 2 bytes in version 1 and 4 from version 2 on.
    let (offset, length) = match (start.get(6), start.get(8..10), start.get(8..12)) {
        (Some(1), Some(&[a, b]), _) => (10, u64::from(u16::from_le_bytes([a, b]))),
        (Some(2 | 3), _, Some(&[a, b, c, d])) => (12, u64::from(u32::from_le_bytes([a, b, c, d]))),
        (None | Some(1..=3), _, _) => return Err(truncated(file_bytes)),
        (Some(version), _, _) => {
            return Err(bad(format!(
                "has .npy format version {version}; versions 1, 2 and 3 are read"
            )));
        }
    };
    if length > HEADER_BYTES_MAX {
        return Err(bad(format!(
            "has a .npy header of {length} bytes, and at most {HEADER_BYTES_MAX} are read: save the file again"
        )));
    }
    if offset + length > file_bytes {
        return Err(truncated(file_bytes));
    }
    Ok((offset, length))
}

/// The array that a dict describes. NumPy has no bfloat16: in the file its elements are two bytes without a
/// type, and only `wanted` says what they are.
pub(super) fn array(dict: &[u8], data_offset: u64, wanted: Option<Dtype>) -> Result<Array, Problem> {
    let fields = std::str::from_utf8(dict).ok().and_then(Fields::parse);
    let Some(Fields {
        descr: Some(descr),
        fortran_order: Some(fortran_order),
        shape: Some(shape),
    }) = fields
    else {
        return Err(bad(
            "has a .npy header that is not {'descr': ..., 'fortran_order': ..., 'shape': ...}: save it again",
        ));
    };
    let dtype = dtype_of(descr, wanted)?;
    if fortran_order {
        return Err(bad(
            "is in Fortran order, where a vector is not contiguous: save numpy.ascontiguousarray(array)",
        ));
    }
    let [rows, columns] = shape[..] else {
        return Err(bad(format!(
            "has {} dimension(s), shape {shape:?}: vectors are an array of two, (vectors, elements)",
            shape.len()
        )));
    };
    Ok(Array {
        dtype,
        rows,
        columns,
        data_offset,
    })
}

fn dtype_of(descr: &str, wanted: Option<Dtype>) -> Result<Dtype, Problem> {
    let wrong = |problem: String| {
        Err(Problem {
            field: "dtype",
            problem,
        })
    };
    let (order, kind) = match descr.as_bytes() {
        [order @ (b'<' | b'>' | b'|' | b'='), kind @ ..] => (*order, kind),
        kind => (b'|', kind),
    };
    let dtype = match kind {
        // A single byte has no byte order.
        b"u1" => return Ok(Dtype::U8),
        b"i1" => return Ok(Dtype::I8),
        // What numpy.save writes for `ml_dtypes.bfloat16`.
        b"V2" if wanted == Some(Dtype::Bf16) => return Ok(Dtype::Bf16),
        b"V2" => {
            return wrong(format!(
                "the file holds '{descr}', elements of two bytes without a type: if they are bfloat16, set dtype: bf16"
            ));
        }
        b"f4" => Dtype::F32,
        b"f2" => Dtype::F16,
        b"f8" => Dtype::F64,
        b"i4" => Dtype::I32,
        _ => {
            return wrong(format!(
                "the file holds '{descr}', and f32, f16, bf16, f64, u8, i8 and i32 are served: save array.astype('<f4')"
            ));
        }
    };
    match order {
        b'<' => Ok(dtype),
        b'>' => wrong(format!(
            "the file holds '{descr}', big-endian, and only little-endian is served: save array.astype('<{}')",
            String::from_utf8_lossy(kind)
        )),
        _ => wrong(format!(
            "the file holds '{descr}' without a byte order: save array.astype('<f4')"
        )),
    }
}

/// The values of the dict; `None` for a missing key.
#[derive(Debug, Default)]
struct Fields<'a> {
    descr: Option<&'a str>,
    fortran_order: Option<bool>,
    shape: Option<Vec<u64>>,
}

impl<'a> Fields<'a> {
    /// `None` if this is not a dict literal with these keys.
    fn parse(text: &'a str) -> Option<Self> {
        let mut fields = Self::default();
        let mut literal = Literal { rest: text };
        literal.eat("{").then_some(())?;
        while !literal.eat("}") {
            let key = literal.string()?;
            literal.eat(":").then_some(())?;
            match key {
                "descr" => fields.descr = Some(literal.string_or_list()?),
                "fortran_order" => fields.fortran_order = Some(literal.boolean()?),
                "shape" => fields.shape = Some(literal.tuple()?),
                _ => return None,
            }
            if !literal.eat(",") {
                literal.eat("}").then_some(())?;
                break;
            }
        }
        literal.rest.trim_ascii().is_empty().then_some(fields)
    }
}

/// The unparsed rest of a Python literal.
struct Literal<'a> {
    rest: &'a str,
}

impl<'a> Literal<'a> {
    fn eat(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_ascii_start();
        let after = rest.strip_prefix(token);
        self.rest = after.unwrap_or(rest);
        after.is_some()
    }

    fn until(&mut self, token: &str) -> Option<&'a str> {
        let (before, after) = self.rest.split_once(token)?;
        self.rest = after;
        Some(before)
    }

    fn string(&mut self) -> Option<&'a str> {
        if self.eat("'") {
            self.until("'")
        } else if self.eat("\"") {
            self.until("\"")
        } else {
            None
        }
    }

    /// A structured dtype is a list of tuples: kept as text, for the message.
    fn string_or_list(&mut self) -> Option<&'a str> {
        if self.eat("[") {
            self.until("]")
        } else {
            self.string()
        }
    }

    fn boolean(&mut self) -> Option<bool> {
        if self.eat("True") {
            Some(true)
        } else {
            self.eat("False").then_some(false)
        }
    }

    fn tuple(&mut self) -> Option<Vec<u64>> {
        self.eat("(").then_some(())?;
        let inside = self.until(")")?;
        let mut numbers: Vec<&str> = inside.split(',').map(str::trim_ascii).collect();
        if numbers.last() == Some(&"") {
            numbers.pop();
        }
        // Python 2 wrote long integers with an L.
        numbers
            .into_iter()
            .map(|number| number.strip_suffix('L').unwrap_or(number).parse().ok())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(dict: &str) -> Result<Array, Problem> {
        array(dict.as_bytes(), 128, None)
    }

    /// Headers written by numpy 1 and 2, Python 2 and other writers are understood, with any order and
    /// quotes.
    #[test]
    fn headers_as_written() {
        let expected = Array {
            dtype: Dtype::F32,
            rows: 3,
            columns: 4,
            data_offset: 128,
        };
        for dict in [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }          \n",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4L)}\n",
            "{\"shape\":(3,4,),\"fortran_order\":False,\"descr\":\"<f4\"}",
        ] {
            assert_eq!(parse(dict), Ok(expected), "{dict}");
        }
        for (descr, dtype) in [
            ("<f2", Dtype::F16),
            ("|u1", Dtype::U8),
            ("|i1", Dtype::I8),
            ("<u1", Dtype::U8),
            ("<i4", Dtype::I32),
            ("<f8", Dtype::F64),
        ] {
            let found = parse(&format!(
                "{{'descr': '{descr}', 'fortran_order': False, 'shape': (0, 9), }}"
            ))
            .unwrap();
            assert_eq!((found.dtype, found.rows, found.columns), (dtype, 0, 9));
        }
    }

    /// Two bytes without a type are bfloat16 if the configuration says so, whatever order is written; nothing
    /// else is.
    #[test]
    fn bfloat16_is_named_by_the_configuration() {
        for descr in ["<V2", "|V2"] {
            let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (3, 4), }}");
            let found = array(dict.as_bytes(), 128, Some(Dtype::Bf16)).unwrap();
            assert_eq!(found.dtype, Dtype::Bf16);
            let refused = array(dict.as_bytes(), 128, Some(Dtype::F16)).unwrap_err();
            assert!(refused.problem.contains("set dtype: bf16"), "{refused:?}");
        }
        let floats = b"{'descr': '<f2', 'fortran_order': False, 'shape': (3, 4), }";
        assert_eq!(array(floats, 128, Some(Dtype::Bf16)).unwrap().dtype, Dtype::F16);
    }

    /// Each array that cannot be served is refused with its own reason and remedy.
    #[test]
    fn arrays_that_are_not_vectors() {
        for (descr, order, shape, field, part) in [
            (">f4", "False", "(3, 4)", "dtype", "big-endian"),
            ("<f16", "False", "(3, 4)", "dtype", "astype"),
            (">f8", "False", "(3, 4)", "dtype", "big-endian"),
            ("<V2", "False", "(3, 4)", "dtype", "set dtype: bf16"),
            ("|V4", "False", "(3, 4)", "dtype", "astype"),
            ("O", "False", "(3, 4)", "dtype", "astype"),
            ("=f4", "False", "(3, 4)", "dtype", "byte order"),
            ("<f4", "True", "(3, 4)", "path", "ascontiguousarray"),
            ("<f4", "False", "(3,)", "path", "1 dimension(s)"),
            ("<f4", "False", "()", "path", "0 dimension(s)"),
            ("<f4", "False", "(3, 4, 5)", "path", "[3, 4, 5]"),
        ] {
            let dict = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
            let problem = parse(&dict).unwrap_err();
            assert_eq!(problem.field, field, "{dict}: {problem:?}");
            assert!(problem.problem.contains(part), "{dict}: {problem:?}");
        }
        let problem =
            parse("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (3, 4), }").unwrap_err();
        assert_eq!(problem.field, "dtype");
        for dict in [
            "",
            "{",
            "{}",
            "[]",
            "{'descr': '<f4'}",
            "{'descr' '<f4'}",
            "{'x': 1}",
            "{'shape': (-1, 2)}",
        ] {
            assert!(
                parse(dict).unwrap_err().problem.contains("save it again"),
                "{dict}"
            );
        }
    }

    /// Magic, version and length: a cut-off file is called truncated, another format is named as such.
    #[test]
    fn places() {
        assert_eq!(dict_place(b"\x93NUMPY\x01\x00\x76\x00", 128), Ok((10, 118)));
        assert_eq!(
            dict_place(b"\x93NUMPY\x02\x00\x74\x00\x00\x00", 128),
            Ok((12, 116))
        );
        for (start, file_bytes, part) in [
            (&b"\x93NUM"[..], 4, "truncated"),
            (b"\x93NUMPY", 6, "truncated"),
            (b"\x93NUMPY\x01\x00\x76", 9, "truncated"),
            (b"\x93NUMPY\x01\x00\x76\x00", 127, "truncated"),
            (b"\x93NUMPY\x03\x00\x76\x00", 10, "truncated"),
            (b"\x93NUMPY\x03\x00\xff\xff\xff\xff", 1 << 40, "at most"),
            (b"\x93NUMPY\x09\x00\x76\x00", 128, "version 9"),
            (b"PK\x03\x04", 400, "magic"),
        ] {
            let problem = dict_place(start, file_bytes).unwrap_err();
            assert!(problem.problem.contains(part), "{start:?}: {problem:?}");
        }
    }

    proptest! {
        /// Any bytes at all: a result, never a panic.
        #[test]
        fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..90) {
            let _ = dict_place(&bytes, bytes.len() as u64);
            let _ = array(&bytes, 0, Some(Dtype::Bf16));
            let good = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }      ";
            let mut spoilt = good.to_vec();
            spoilt.truncate(cut);
            spoilt.extend_from_slice(&bytes);
            let _ = array(&spoilt, 0, None);
        }
    }
}
