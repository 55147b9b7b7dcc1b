//! The shape of a vectors dataset: read from the file if the layout describes itself, checked against the
//! configuration, and against the file's length to the byte.

use super::file::OpenFile;
use super::open_error::ErrorContext;
use super::{DIM_MAX, Dtype, Kind, Layout, OpenError, npy};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Most records whose dimension is compared with the first one's: evenly spread, the last one among them. On a slow disk
/// each is a read of 10 ms.
const SAMPLES_MAX: u64 = 63;

/// A vectors dataset as configured.
#[derive(Debug, Clone, Copy)]
pub(super) struct VectorSpec {
    pub(super) layout: Layout,
    pub(super) dim: Option<u32>,
    pub(super) dtype: Option<Dtype>,
    pub(super) header_bytes: u64,
}

/// The shape of the vectors in `files`, which have `length_bytes` in total.
pub(super) fn read_shape(
    wanted: VectorSpec,
    files: &[OpenFile],
    paths: &[PathBuf],
    length_bytes: u64,
    context: ErrorContext<'_>,
) -> Result<Kind, OpenError> {
    if wanted.layout == Layout::Raw {
        return raw(wanted, files.len(), length_bytes, context);
    }
    if wanted.header_bytes != 0 {
        return Err(context.field(
            "header_bytes",
            format!(
                "is for layout raw; {} says itself where its vectors begin: leave it out",
                wanted.layout
            ),
        ));
    }
    let ([file], [path]) = (files, paths) else {
        return Err(context.field(
            "path",
            format!(
                "names {} files, and a dataset of layout {} is one file (only layout raw may have several): make a dataset \
                 of each",
                files.len(),
                wanted.layout
            ),
        ));
    };
    let source = VectorFile {
        wanted,
        file,
        path,
        length_bytes,
        context,
    };
    match wanted.layout {
        Layout::Raw => raw(wanted, files.len(), length_bytes, context),
        Layout::Fvecs => source.records(Dtype::F32),
        Layout::Bvecs => source.records(Dtype::U8),
        Layout::Ivecs => source.records(Dtype::I32),
        Layout::Fbin => source.counted(Dtype::F32),
        Layout::U8bin => source.counted(Dtype::U8),
        Layout::I8bin => source.counted(Dtype::I8),
        Layout::Npy => source.npy(),
    }
}

/// Elements only, after `header_bytes`: 1000 bytes with a header of 40 and vectors of 96 bytes hold (1000 - 40) / 96 =
/// 10 vectors.
fn raw(
    wanted: VectorSpec,
    files: usize,
    length_bytes: u64,
    context: ErrorContext<'_>,
) -> Result<Kind, OpenError> {
    let dim = wanted
        .dim
        .ok_or_else(|| context.field("dim", "is missing: layout raw does not say it"))?;
    let dtype = wanted
        .dtype
        .ok_or_else(|| context.field("dtype", "is missing: layout raw does not say it"))?;
    let vector_bytes = vector_bytes(dim, dtype, context)?;
    if files > 1 && wanted.header_bytes > 0 {
        return Err(context.field(
            "header_bytes",
            "several files form one address space only without headers: set header_bytes: 0, or name one file",
        ));
    }
    let Some(data_bytes) = length_bytes.checked_sub(wanted.header_bytes) else {
        return Err(context.field(
            "header_bytes",
            format!(
                "{} bytes of header do not fit {length_bytes} bytes: set a smaller one",
                wanted.header_bytes
            ),
        ));
    };
    let stride_bytes = u64::from(vector_bytes);
    if data_bytes % stride_bytes != 0 {
        return Err(context.field(
            "dim",
            format!(
                "{data_bytes} bytes of data are not a multiple of {stride_bytes} (dim {dim} of {dtype}): {} bytes \
                 remain; correct dim, dtype or header_bytes",
                data_bytes % stride_bytes
            ),
        ));
    }
    let count = data_bytes / stride_bytes;
    if count == 0 {
        return Err(context.field("path", "holds no vectors: write some first"));
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

fn vector_bytes(dim: u32, dtype: Dtype, context: ErrorContext<'_>) -> Result<u32, OpenError> {
    if dim == 0 || dim > DIM_MAX {
        return Err(context.field("dim", format!("is {dim}: a vector has 1 to {DIM_MAX} elements")));
    }
    // At most 2^20 x 8 bytes: 8 MiB.
    Ok(dim * dtype.bytes())
}

/// A file whose layout describes itself.
struct VectorFile<'a> {
    wanted: VectorSpec,
    file: &'a OpenFile,
    path: &'a Path,
    length_bytes: u64,
    context: ErrorContext<'a>,
}

impl VectorFile<'_> {
    /// `.fvecs` and the like: each vector preceded by its dimension as i32. 100 dimensions of f32 make a
    /// stride of 4 + 400 bytes with the elements 4 bytes in.
    fn records(&self, dtype: Dtype) -> Result<Kind, OpenError> {
        self.check_dtype(dtype)?;
        let dim = self.dim_of(i64::from(self.read_i32(0)?), "its first record")?;
        let vector_bytes = dim * dtype.bytes();
        let stride_bytes = 4 + u64::from(vector_bytes);
        let count = self.length_bytes / stride_bytes;
        let remainder = self.length_bytes % stride_bytes;
        if remainder != 0 {
            return Err(self.bad(format!(
                "has {} bytes, not a multiple of {stride_bytes} (4 bytes of dimension, then {dim} of {dtype}): \
                 {remainder} bytes remain after {count} vectors; it is cut off, or of another layout",
                self.length_bytes
            )));
        }
        // Worked, 1000 records: numbers 15, 31, 47, ..., 999; of 5 records 1, 2, 3 and 4. In two parts, since the product
        // of both may exceed 64 bits.
        let last = count.saturating_sub(1);
        let samples = last.min(SAMPLES_MAX);
        for sample in 1..=samples {
            let record = last / samples * sample + last % samples * sample / samples;
            let offset = record.saturating_mul(stride_bytes);
            let found = self.read_i32(offset)?;
            if i64::from(found) != i64::from(dim) {
                return Err(self.bad(format!(
                    "begins with a vector of dimension {dim} and has {found} at byte {offset}, where the dimension of \
                     vector {record} should be: every vector must have the same, or it is of another layout"
                )));
            }
        }
        self.kind(Shape {
            dim,
            dtype,
            stride_bytes,
            base_offset: 4,
            count,
        })
    }

    /// `.fbin` and the like: count and dimension as u32, then the elements, to the last byte of the file.
    fn counted(&self, dtype: Dtype) -> Result<Kind, OpenError> {
        self.check_dtype(dtype)?;
        let count = u64::from(self.read_i32(0)?.cast_unsigned());
        let dim = self.dim_of(i64::from(self.read_i32(4)?.cast_unsigned()), "its header")?;
        self.exact(8, count, dim, dtype)
    }

    fn npy(&self) -> Result<Kind, OpenError> {
        let problem = |found: npy::Problem| match found.field {
            "path" => self.bad(found.problem),
            field => self
                .context
                .field(field, format!("{}: {}", self.path.display(), found.problem)),
        };
        let start = self.read(0, self.length_bytes.min(12))?;
        let (offset, length) = npy::dict_place(&start, self.length_bytes).map_err(problem)?;
        let array =
            npy::array(&self.read(offset, length)?, offset + length, self.wanted.dtype).map_err(problem)?;
        self.check_dtype(array.dtype)?;
        let dim = self.dim_of(i64::try_from(array.columns).unwrap_or(i64::MAX), "its header")?;
        self.exact(array.data_offset, array.rows, dim, array.dtype)
    }

    /// A header of `base_offset` bytes, then `count` vectors, then the end of the file: 8 + 3 x 400 = 1208 bytes.
    fn exact(&self, base_offset: u64, count: u64, dim: u32, dtype: Dtype) -> Result<Kind, OpenError> {
        let stride_bytes = u64::from(dim * dtype.bytes());
        let expected = count
            .checked_mul(stride_bytes)
            .and_then(|data| data.checked_add(base_offset));
        if expected != Some(self.length_bytes) {
            let expected = expected.map_or_else(|| "more than 2^64".to_owned(), |bytes| bytes.to_string());
            return Err(self.bad(format!(
                "has {} bytes, and its header ({count} vectors of {dim} {dtype}) wants {expected}: it is cut off, or \
                 of another layout",
                self.length_bytes
            )));
        }
        if count == 0 {
            return Err(self.bad("holds no vectors: write some first".to_owned()));
        }
        self.kind(Shape {
            dim,
            dtype,
            stride_bytes,
            base_offset,
            count,
        })
    }

    fn kind(&self, shape: Shape) -> Result<Kind, OpenError> {
        let Shape {
            dim,
            dtype,
            stride_bytes,
            base_offset,
            count,
        } = shape;
        let vector_bytes = vector_bytes(dim, dtype, self.context)?;
        Ok(Kind::Vectors {
            layout: self.wanted.layout,
            dim,
            dtype,
            vector_bytes,
            stride_bytes,
            base_offset,
            count,
        })
    }

    /// A dimension found in the file, if it is within bounds and does not contradict the configuration.
    fn dim_of(&self, found: i64, place: &str) -> Result<u32, OpenError> {
        let dim = u32::try_from(found).ok().filter(|dim| (1..=DIM_MAX).contains(dim)).ok_or_else(|| {
            self.bad(format!(
                "has dimension {found} in {place}, and 1 to {DIM_MAX} are possible: is it really of layout {}?",
                self.wanted.layout
            ))
        })?;
        match self.wanted.dim {
            Some(wanted) if wanted != dim => Err(self.context.field(
                "dim",
                format!(
                    "is {wanted}, but {} says {dim}: set dim: {dim}, or leave it out",
                    self.path.display()
                ),
            )),
            Some(_) | None => Ok(dim),
        }
    }

    fn check_dtype(&self, found: Dtype) -> Result<(), OpenError> {
        match self.wanted.dtype {
            Some(wanted) if wanted != found => Err(self.context.field(
                "dtype",
                format!(
                    "is {wanted}, but {} (layout {}) holds {found}: set dtype: {found}, or leave it out",
                    self.path.display(),
                    self.wanted.layout
                ),
            )),
            Some(_) | None => Ok(()),
        }
    }

    fn read_i32(&self, offset: u64) -> Result<i32, OpenError> {
        let bytes = self.read(offset, 4)?;
        Ok(bytes.first_chunk().copied().map_or(0, i32::from_le_bytes))
    }

    /// Reads exactly `length` bytes; a file that ends earlier is reported as truncated.
    fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, OpenError> {
        if offset
            .checked_add(length)
            .is_none_or(|end| end > self.length_bytes)
        {
            return Err(self.bad(format!(
                "has {} bytes, too few for a file of layout {}: it is cut off, or of another layout",
                self.length_bytes, self.wanted.layout
            )));
        }
        let mut bytes = vec![0u8; usize::try_from(length).unwrap_or(0)];
        self.file
            .buffered()
            .read_exact_at(&mut bytes, offset)
            .map_err(|error| {
                if error.kind() == ErrorKind::UnexpectedEof {
                    let remedy = "write the new file next to it, and rename it into place";
                    return self.bad(format!("was truncated while it was opened: {remedy}"));
                }
                self.bad(format!("cannot be read: {error}; check the device"))
            })?;
        Ok(bytes)
    }

    fn bad(&self, problem: String) -> OpenError {
        self.context
            .field("path", format!("{} {problem}", self.path.display()))
    }
}

/// A shape that fits its file.
struct Shape {
    dim: u32,
    dtype: Dtype,
    stride_bytes: u64,
    base_offset: u64,
    count: u64,
}
