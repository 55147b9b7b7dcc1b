//! Self-describing data: bytes as a pure function of (seed, offset), so that any reader can check any byte.
//!
//! The stream is little-endian 64-bit words; word `i` (bytes `8 i .. 8 i + 8`) is SplitMix64's output function of
//! `seed + (i + 1) x 0x9E3779B97F4A7C15` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
//! For f32 and f16 vectors the raw stream would hold NaNs; `fill_f32` and `fill_f16` map it to [-1, 1).

use crate::dataset::{Dtype, Layout};
use std::path::Path;

/// Fills `out` with the stream's bytes from `offset`.
pub fn fill(seed: u64, offset: u64, out: &mut [u8]) {
    let _ = (seed, offset, out);
    todo!()
}

/// Index of the first byte of `data` that differs from the stream at `offset`.
pub fn first_difference(seed: u64, offset: u64, data: &[u8]) -> Option<usize> {
    let _ = (seed, offset, data);
    todo!()
}

/// Fills `out` with elements from number `first_element` on, little-endian. u8 and i8: the stream's bytes; f32, f16:
/// the word of that number, mapped to [-1, 1); i32: its low 31 bits.
pub fn fill_elements(seed: u64, dtype: Dtype, first_element: u64, out: &mut [u8]) {
    let _ = (seed, dtype, first_element, out);
    todo!()
}

/// The seed of one object's stream: FNV-1a of its name over the dataset's seed.
pub fn object_seed(seed: u64, name: &str) -> u64 {
    let _ = (seed, name);
    todo!()
}

/// Called with bytes written so far, now and then; returning false stops the writing.
pub type Progress<'a> = &'a mut dyn FnMut(u64) -> bool;

/// Writes a file of `length_bytes` of the stream.
///
/// # Errors
/// errno of the writing; `Interrupted` when `progress` said to stop.
pub fn write_blocks(path: &Path, seed: u64, length_bytes: u64, progress: Progress<'_>) -> std::io::Result<()> {
    let _ = (path, seed, length_bytes, progress);
    todo!()
}

/// Writes `count` vectors of `dim` elements in a layout (its own header or per-record headers included).
///
/// # Errors
/// As [`write_blocks`]; `InvalidInput` when the layout fixes another dtype.
pub fn write_vectors(
    path: &Path,
    seed: u64,
    layout: Layout,
    dtype: Dtype,
    dim: u32,
    count: u64,
    progress: Progress<'_>,
) -> std::io::Result<()> {
    let _ = (path, seed, layout, dtype, dim, count, progress);
    todo!()
}

/// The name of object number `index` of a made directory: `shard-NN/object-NNNNNN`, 100 objects a folder.
pub fn object_name(index: u64) -> String {
    let _ = index;
    todo!()
}

/// The length of object number `index` of a made directory: log-uniform in `min..=max` by the seed, except that the
/// first is empty and the second has one byte.
pub fn object_length(seed: u64, index: u64, min: u64, max: u64) -> u64 {
    let _ = (seed, index, min, max);
    todo!()
}

/// Writes `count` objects below `directory`.
///
/// # Errors
/// As [`write_blocks`].
pub fn write_objects(
    directory: &Path,
    seed: u64,
    count: u64,
    length_min: u64,
    length_max: u64,
    progress: Progress<'_>,
) -> std::io::Result<()> {
    let _ = (directory, seed, count, length_min, length_max, progress);
    todo!()
}
