//! Compares bytes with the pattern: position of the first wrong one, and how many are wrong.

use ringfetch_client::Dtype;
use ringfetch_engine::dataset::Dtype as EngineDtype;
use ringfetch_pattern as pattern;

/// Bytes that differ from the pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// Position of the first wrong byte in the checked bytes.
    pub(crate) at: usize,
    pub(crate) expected: u8,
    pub(crate) got: u8,
    /// Number of wrong bytes.
    pub(crate) count: u64,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "expected 0x{:02x}, got 0x{:02x}", self.expected, self.got)
    }
}

/// Compares with the stream of `seed` from `offset`. Allocates only if something is wrong.
pub(crate) fn check_stream(seed: u64, offset: u64, data: &[u8]) -> Option<Mismatch> {
    pattern::first_difference(seed, offset, data)?;
    let mut expected = vec![0; data.len()];
    pattern::fill(seed, offset, &mut expected);
    compare(&expected, data)
}

/// Compares with the elements of `seed` starting at number `first_element`; `scratch` is reused.
pub(crate) fn check_elements(
    seed: u64,
    dtype: Dtype,
    first_element: u64,
    data: &[u8],
    scratch: &mut Vec<u8>,
) -> Option<Mismatch> {
    scratch.resize(data.len(), 0);
    pattern::fill_elements(seed, engine_dtype(dtype), first_element, scratch);
    // Comparing slices is faster than comparing bytes, and almost always enough.
    if scratch.as_slice() == data {
        None
    } else {
        compare(scratch, data)
    }
}

fn compare(expected: &[u8], got: &[u8]) -> Option<Mismatch> {
    let pairs = expected.iter().zip(got).enumerate();
    let mut differences = pairs.filter(|(_, (expected, got))| expected != got);
    let (at, (&expected, &got)) = differences.next()?;
    let count = 1 + differences.count() as u64;
    Some(Mismatch {
        at,
        expected,
        got,
        count,
    })
}

/// The engine's equivalent of the client's type, by name: neither crate depends on the other.
pub(crate) fn engine_dtype(dtype: Dtype) -> EngineDtype {
    let same = |engine: &EngineDtype| engine.as_str() == dtype.as_str();
    // A type of a later client: its bytes are not the pattern's, and are reported as wrong.
    EngineDtype::ALL.into_iter().find(same).unwrap_or(EngineDtype::U8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_wrong_byte_is_named_and_all_are_counted() {
        let mut data = vec![0; 9000];
        pattern::fill(7, 5, &mut data);
        assert_eq!(check_stream(7, 5, &data), None);
        let (at, expected, got, count) = (4500, data[4500], data[4500] ^ 1, 2);
        data[4500] ^= 1;
        data[8999] ^= 1;
        assert_eq!(
            check_stream(7, 5, &data),
            Some(Mismatch {
                at,
                expected,
                got,
                count
            })
        );

        let (mut data, mut scratch) = (vec![0; 40], Vec::new());
        pattern::fill_elements(7, EngineDtype::F32, 3, &mut data);
        assert_eq!(check_elements(7, Dtype::F32, 3, &data, &mut scratch), None);
        data[17] ^= 0xff;
        let wrong = check_elements(7, Dtype::F32, 3, &data, &mut scratch).unwrap();
        assert_eq!((wrong.at, wrong.count), (17, 1));
    }
}
