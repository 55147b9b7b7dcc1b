//! What the bytes of pattern data ought to be, and how many of those that came are not. Only the place of the first
//! wrong byte is worked out.

use ringfetch_client::Dtype;
use ringfetch_engine::dataset::Dtype as EngineDtype;
use ringfetch_pattern as pattern;

/// Bytes that are not the pattern's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Position of the first in what was checked.
    pub(crate) at: usize,
    pub(crate) expected: u8,
    pub(crate) got: u8,
    /// How many there are.
    pub(crate) count: u64,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "expected 0x{:02x}, got 0x{:02x}", self.expected, self.got)
    }
}

/// Compares with the stream of `seed` from `offset`. Allocates only when something is wrong.
pub(crate) fn check_stream(seed: u64, offset: u64, data: &[u8]) -> Option<Wrong> {
    pattern::first_difference(seed, offset, data)?;
    let mut expected = vec![0; data.len()];
    pattern::fill(seed, offset, &mut expected);
    compare(&expected, data)
}

/// Compares with the elements of `seed` from number `first_element` on; `scratch` is kept for the next time.
pub(crate) fn check_elements(
    seed: u64,
    dtype: Dtype,
    first_element: u64,
    data: &[u8],
    scratch: &mut Vec<u8>,
) -> Option<Wrong> {
    scratch.resize(data.len(), 0);
    pattern::fill_elements(seed, engine_dtype(dtype), first_element, scratch);
    if scratch.as_slice() == data {
        None
    } else {
        compare(scratch, data)
    }
}

/// The seed of one object's bytes.
pub(crate) fn object_seed(seed: u64, name: &str) -> u64 {
    pattern::object_seed(seed, name)
}

fn compare(expected: &[u8], got: &[u8]) -> Option<Wrong> {
    let mut differences = expected
        .iter()
        .zip(got)
        .enumerate()
        .filter(|(_, (expected, got))| expected != got);
    let (at, (&expected, &got)) = differences.next()?;
    let more = differences.count();
    Some(Wrong {
        at,
        expected,
        got,
        count: u64::try_from(more).unwrap_or(u64::MAX).saturating_add(1),
    })
}

/// The engine's word for the client's type: the two crates know nothing of each other.
pub(crate) fn engine_dtype(dtype: Dtype) -> EngineDtype {
    match dtype {
        Dtype::F32 => EngineDtype::F32,
        Dtype::F16 => EngineDtype::F16,
        Dtype::U8 => EngineDtype::U8,
        Dtype::I8 => EngineDtype::I8,
        Dtype::I32 => EngineDtype::I32,
        Dtype::Bf16 => EngineDtype::Bf16,
        Dtype::F64 => EngineDtype::F64,
        // One of a later client: its bytes are not the pattern's, and are told to be wrong.
        _ => EngineDtype::U8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_wrong_byte_is_named_and_all_are_counted() {
        // Scenario: 9000 bytes of the stream from offset 5, right, and with bytes 4500 and 8999 flipped; ten f32
        // elements from number 3, right, and with byte 17 flipped.
        // Expected: nothing; the first place with both values, and how many.
        let mut data = vec![0; 9000];
        pattern::fill(7, 5, &mut data);
        assert_eq!(check_stream(7, 5, &data), None);
        let right = data[4500];
        data[4500] ^= 1;
        data[8999] ^= 1;
        let want = Wrong {
            at: 4500,
            expected: right,
            got: right ^ 1,
            count: 2,
        };
        assert_eq!(check_stream(7, 5, &data), Some(want));

        let (mut data, mut scratch) = (vec![0; 40], Vec::new());
        pattern::fill_elements(7, EngineDtype::F32, 3, &mut data);
        assert_eq!(check_elements(7, Dtype::F32, 3, &data, &mut scratch), None);
        data[17] ^= 0xff;
        assert_eq!(
            check_elements(7, Dtype::F32, 3, &data, &mut scratch).map(|wrong| (wrong.at, wrong.count)),
            Some((17, 1))
        );
    }
}
