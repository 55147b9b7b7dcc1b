//! Test data: bytes as a pure function of (seed, offset), so that any reader can check any byte.
//!
//! The stream is little-endian 64-bit words; word `i` (bytes `8 i .. 8 i + 8`) is SplitMix64's output function of
//! `seed + (i + 1) x 0x9E3779B97F4A7C15` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
//! OOPSLA 2014). For vectors of floats the raw stream would hold NaNs: [`fill_elements`] maps it to [-1, 1).
//! Nothing here depends on the machine: no libm, no native byte order. Writing files is in `write`.

#![forbid(unsafe_code)]

mod write;

pub use write::{
    Progress, abandon_partial_files, npy_header, remove_partial_files, write_blocks, write_objects,
    write_vectors,
};

use ringfetch_engine::dataset::Dtype;

/// 2^64 divided by the golden ratio: SplitMix64's increment.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Word `index` of the stream.
fn word(seed: u64, index: u64) -> u64 {
    mixed(seed.wrapping_add(index.wrapping_add(1).wrapping_mul(GAMMA)))
}

/// SplitMix64's output function: every bit depends on every bit.
pub fn mixed(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fills `out` with the stream's bytes from `offset`.
pub fn fill(seed: u64, offset: u64, out: &mut [u8]) {
    let mut index = offset / 8;
    let mut rest = out;
    // Offset 13 is byte 5 of word 1: its last 3 bytes come first.
    let skip = (offset % 8) as usize;
    if skip > 0 {
        let bytes = word(seed, index).to_le_bytes();
        let tail = bytes.get(skip..).unwrap_or_default();
        let (head, after) = rest.split_at_mut(tail.len().min(rest.len()));
        head.copy_from_slice(tail.get(..head.len()).unwrap_or_default());
        rest = after;
        index = index.wrapping_add(1);
    }
    let mut words = rest.chunks_exact_mut(8);
    for place in &mut words {
        place.copy_from_slice(&word(seed, index).to_le_bytes());
        index = index.wrapping_add(1);
    }
    let last = words.into_remainder();
    let bytes = word(seed, index).to_le_bytes();
    last.copy_from_slice(bytes.get(..last.len()).unwrap_or_default());
}

/// Index of the first byte of `data` that differs from the stream at `offset`.
pub fn first_difference(seed: u64, offset: u64, data: &[u8]) -> Option<usize> {
    let mut expected = [0u8; 4096];
    let mut start = 0usize;
    for part in data.chunks(expected.len()) {
        let expected = expected.get_mut(..part.len()).unwrap_or_default();
        fill(seed, offset.wrapping_add(start as u64), expected);
        if part != expected {
            return part
                .iter()
                .zip(&*expected)
                .position(|(found, wanted)| found != wanted)
                .map(|at| start + at);
        }
        start += part.len();
    }
    None
}

/// Fills `out` with elements from number `first_element` on, little-endian. u8 and i8: the stream's bytes; floats:
/// the word of that number, mapped to [-1, 1); i32: its low 31 bits. Room for a part of an element gets its first bytes.
pub fn fill_elements(seed: u64, dtype: Dtype, first_element: u64, out: &mut [u8]) {
    match dtype {
        Dtype::U8 | Dtype::I8 => fill(seed, first_element, out),
        Dtype::F32 => fill_words(seed, first_element, out, |word| f32_of(word).to_le_bytes()),
        Dtype::F16 => fill_words(seed, first_element, out, |word| f16_of(word).to_le_bytes()),
        Dtype::Bf16 => fill_words(seed, first_element, out, |word| bf16_of(word).to_le_bytes()),
        Dtype::F64 => fill_words(seed, first_element, out, |word| f64_of(word).to_le_bytes()),
        Dtype::I32 => fill_words(seed, first_element, out, |word| i32_of(word).to_le_bytes()),
    }
}

fn fill_words<const N: usize>(seed: u64, first: u64, out: &mut [u8], element: impl Fn(u64) -> [u8; N]) {
    let mut index = first;
    let mut places = out.chunks_exact_mut(N);
    for place in &mut places {
        place.copy_from_slice(&element(word(seed, index)));
        index = index.wrapping_add(1);
    }
    let last = places.into_remainder();
    last.copy_from_slice(element(word(seed, index)).get(..last.len()).unwrap_or_default());
}

/// The top 24 bits, as many as an f32 holds exactly: 0 is -1.0, 2^23 is 0.0, 2^24 - 1 is 1 - 2^-23.
fn f32_of(word: u64) -> f32 {
    ((word >> 40) as f32) / 8_388_608.0 - 1.0
}

/// The top 11 bits, as many as an f16 holds exactly: 0 is -1.0, 1024 is 0.0, 2047 is 1 - 2^-10.
fn f16_of(word: u64) -> half::f16 {
    half::f16::from_f32(((word >> 53) as f32) / 1024.0 - 1.0)
}

/// The top 8 bits, as many as a bf16 holds exactly: 0 is -1.0, 128 is 0.0, 255 is 1 - 2^-7.
fn bf16_of(word: u64) -> half::bf16 {
    half::bf16::from_f32(((word >> 56) as f32) / 128.0 - 1.0)
}

/// The top 53 bits, as many as an f64 holds exactly: 0 is -1.0, 2^52 is 0.0, 2^53 - 1 is 1 - 2^-52.
fn f64_of(word: u64) -> f64 {
    ((word >> 11) as f64) / 4_503_599_627_370_496.0 - 1.0
}

fn i32_of(word: u64) -> i32 {
    // 31 bits always fit.
    i32::try_from(word & 0x7fff_ffff).unwrap_or(0)
}

/// The seed of one object's stream: FNV-1a of its name over the dataset's seed (64 bits; the seed's eight bytes,
/// little-endian, then the name's).
pub fn object_seed(seed: u64, name: &str) -> u64 {
    let bytes = seed.to_le_bytes().into_iter().chain(name.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The name of object number `index` of a made directory: `shard-NN/object-NNNNNN`, 100 objects a folder. Number 12 345
/// is `shard-123/object-012345`.
pub fn object_name(index: u64) -> String {
    format!("shard-{:02}/object-{index:06}", index / 100)
}

/// The length of object number `index` of a made directory: log-uniform in `min..=max` by the seed, except that the
/// first is empty and the second has one byte. A `min` of 0 counts as 1, a `max` below `min` as `min`.
pub fn object_length(seed: u64, index: u64, min: u64, max: u64) -> u64 {
    if index < 2 {
        return index;
    }
    let min = min.max(1);
    let max = max.max(min);
    // min x ratio^u with u from the top 32 bits of a word: u = 0.101 in binary is ratio^(1/2) x ratio^(1/8).
    // Square roots and products are exact to the last bit on every machine; powf is not.
    let drawn = word(seed, index);
    let mut root = (max as f64 + 1.0) / min as f64;
    let mut length = min as f64;
    for bit in (32..64).rev() {
        root = root.sqrt();
        if drawn >> bit & 1 == 1 {
            length *= root;
        }
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive, and a cast of a float saturates"
    )]
    let whole = length as u64;
    whole.clamp(min, max)
}

#[cfg(test)]
mod tests;
