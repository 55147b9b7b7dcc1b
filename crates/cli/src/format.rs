//! Bytes and numbers as text: hex dumps, vectors in lines.

use ringfetch_client::Dtype;
use std::fmt::Write as _;
use std::io::{self, Write};

/// What a line of a dump shows.
pub(crate) const DUMP_LINE_BYTES: usize = 16;

/// A dump like `xxd`'s: 16 bytes per line with their offset, counted from `base`, and as ASCII.
pub(crate) fn hex_dump(out: &mut dyn Write, base: u64, bytes: &[u8]) -> io::Result<()> {
    let mut offset = base;
    for line in bytes.chunks(DUMP_LINE_BYTES) {
        let mut hex = String::with_capacity(40);
        for (i, byte) in line.iter().enumerate() {
            if i > 0 && i.is_multiple_of(2) {
                hex.push(' ');
            }
            let _ = write!(hex, "{byte:02x}");
        }
        let shown = |&byte: &u8| {
            if byte == b' ' || byte.is_ascii_graphic() {
                char::from(byte)
            } else {
                '.'
            }
        };
        let ascii: String = line.iter().map(shown).collect();
        writeln!(out, "{offset:08x}: {hex:<39}  {ascii}")?;
        offset = offset.saturating_add(16);
    }
    Ok(())
}

pub(crate) fn hex_word(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The elements of one vector, each as the shortest text that reads back as the same number.
pub(crate) fn elements(dtype: Dtype, bytes: &[u8]) -> Vec<String> {
    match dtype {
        Dtype::F32 => texts(bytes, f32::from_le_bytes),
        Dtype::F16 => texts(bytes, half::f16::from_le_bytes),
        Dtype::Bf16 => texts(bytes, half::bf16::from_le_bytes),
        Dtype::F64 => texts(bytes, f64::from_le_bytes),
        Dtype::U8 => texts(bytes, u8::from_le_bytes),
        Dtype::I8 => texts(bytes, i8::from_le_bytes),
        Dtype::I32 => texts(bytes, i32::from_le_bytes),
        _ => vec![hex_word(bytes)],
    }
}

fn texts<const N: usize, T: ToString>(bytes: &[u8], element: impl Fn([u8; N]) -> T) -> Vec<String> {
    let elements = bytes.as_chunks().0.iter();
    elements.map(|bytes| element(*bytes).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_looks_like_xxds() {
        // As `xxd` and `xxd -o 496` print them.
        let mut out = Vec::new();
        hex_dump(&mut out, 0, b"Hello, ring!\n\x00\xff~ end").unwrap();
        hex_dump(&mut out, 0x1f0, b"odd").unwrap();
        let want = "\
            00000000: 4865 6c6c 6f2c 2072 696e 6721 0a00 ff7e  Hello, ring!...~\n\
            00000010: 2065 6e64                                 end\n\
            000001f0: 6f64 64                                  odd\n";
        assert_eq!(String::from_utf8(out).unwrap(), want);
    }

    #[test]
    fn elements_are_numbers() {
        let f32s = [0.1f32, -2.0].map(f32::to_le_bytes);
        let f64s = [0.1f64, -2.0].map(f64::to_le_bytes);
        let f16s = [0.5, -2.0].map(|x| half::f16::from_f32(x).to_le_bytes());
        let i32s = [7i32, -2].map(i32::to_le_bytes);
        assert_eq!(elements(Dtype::F32, f32s.as_flattened()), ["0.1", "-2"]);
        assert_eq!(elements(Dtype::F64, f64s.as_flattened()), ["0.1", "-2"]);
        assert_eq!(elements(Dtype::F16, f16s.as_flattened()), ["0.5", "-2"]);
        assert_eq!(elements(Dtype::Bf16, &[0, 0x3f, 0, 0xc0]), ["0.5", "-2"]);
        assert_eq!(elements(Dtype::I32, i32s.as_flattened()), ["7", "-2"]);
        assert_eq!(elements(Dtype::U8, &[7, 254]), ["7", "254"]);
        assert_eq!(elements(Dtype::I8, &[7, 254]), ["7", "-2"]);
    }
}
