//! The shape of a vectors dataset: taken from the file where the layout describes itself, checked against what the
//! configuration says, and against the file's length to the byte.

use super::file::OpenFile;
use super::open::Blame;
use super::{Dtype, Kind, Layout, OpenError};
use std::path::PathBuf;

/// Most elements a vector may have; far above any embedding, far below what would overflow a `u32` of bytes.
const DIM_MAX: u32 = 1_000_000;

/// A vectors dataset as configured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) layout: Layout,
    pub(super) dim: Option<u32>,
    pub(super) dtype: Option<Dtype>,
    pub(super) header_bytes: u64,
}

pub(super) fn read_shape(
    wanted: Wanted,
    files: &[OpenFile],
    paths: &[PathBuf],
    length_bytes: u64,
    blame: Blame<'_>,
) -> Result<Kind, OpenError> {
    let _ = paths;
    match wanted.layout {
        Layout::Raw => raw(wanted, files.len(), length_bytes, blame),
        Layout::Fvecs
        | Layout::Bvecs
        | Layout::Ivecs
        | Layout::Npy
        | Layout::Fbin
        | Layout::U8bin
        | Layout::I8bin => Err(blame.field("layout", "later")),
    }
}

/// Elements only, after `header_bytes`: 1000 bytes with a header of 40 and vectors of 96 bytes hold (1000 - 40) / 96 =
/// 10 vectors.
fn raw(wanted: Wanted, files: usize, length_bytes: u64, blame: Blame<'_>) -> Result<Kind, OpenError> {
    let dim = wanted
        .dim
        .ok_or_else(|| blame.field("dim", "is missing: layout raw does not say it"))?;
    let dtype = wanted
        .dtype
        .ok_or_else(|| blame.field("dtype", "is missing: layout raw does not say it"))?;
    let vector_bytes = vector_bytes(dim, dtype, blame)?;
    if files > 1 && wanted.header_bytes > 0 {
        return Err(blame.field(
            "header_bytes",
            "several files form one address space only without headers: set header_bytes: 0, or name one file",
        ));
    }
    let Some(data_bytes) = length_bytes.checked_sub(wanted.header_bytes) else {
        return Err(blame.field(
            "header_bytes",
            format!(
                "{} bytes of header do not fit {length_bytes} bytes: set a smaller one",
                wanted.header_bytes
            ),
        ));
    };
    let stride_bytes = u64::from(vector_bytes);
    if data_bytes % stride_bytes != 0 {
        return Err(blame.field(
            "dim",
            format!(
                "{data_bytes} bytes of data are no multiple of {stride_bytes} (dim {dim} of {dtype}): {} bytes \
                 remain; correct dim, dtype or header_bytes",
                data_bytes % stride_bytes
            ),
        ));
    }
    let count = data_bytes / stride_bytes;
    if count == 0 {
        return Err(blame.field("path", "holds no vectors: write some first"));
    }
    Ok(Kind::Vectors {
        layout: wanted.layout,
        dim,
        dtype,
        vector_bytes,
        stride_bytes,
        base_offset: wanted.header_bytes,
        count,
    })
}

fn vector_bytes(dim: u32, dtype: Dtype, blame: Blame<'_>) -> Result<u32, OpenError> {
    if dim == 0 || dim > DIM_MAX {
        return Err(blame.field("dim", format!("is {dim}: a vector has 1 to {DIM_MAX} elements")));
    }
    Ok(dim * dtype.bytes())
}
