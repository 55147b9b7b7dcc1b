//! What is served: files opened once, their shape, their alignment, their identity.

use crate::config::DirectIo;
use crate::error::ReadError;
use crate::geometry::Extent;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Element type of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 binary32, little-endian.
    F32,
    /// IEEE 754 binary16, little-endian.
    F16,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// 32-bit signed, little-endian (`.ivecs`).
    I32,
}

/// How vectors lie in their file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Elements only, after `header_bytes`.
    Raw,
    /// Each vector preceded by its dimension as i32; f32 elements.
    Fvecs,
    /// Each vector preceded by its dimension as i32; u8 elements.
    Bvecs,
    /// Each vector preceded by its dimension as i32; i32 elements.
    Ivecs,
    /// NumPy: shape and dtype in the header.
    Npy,
    /// Count and dimension as u32, then f32 elements.
    Fbin,
    /// Count and dimension as u32, then u8 elements.
    U8bin,
    /// Count and dimension as u32, then i8 elements.
    I8bin,
}

/// What to do with bytes after the last whole block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartialTail {
    /// The dataset does not open.
    Refuse,
    /// They are not served.
    Ignore,
}

/// What a dataset is, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KindSpec {
    /// Fixed-size blocks.
    Blocks {
        /// Bytes of a block; at least 1.
        block_bytes: u32,
        /// See [`PartialTail`].
        partial_tail: PartialTail,
    },
    /// Vectors.
    Vectors {
        /// How they lie in the file.
        layout: Layout,
        /// Elements a vector; needed for raw, checked against the file elsewhere.
        dim: Option<u32>,
        /// Element type; needed for raw, checked against the file elsewhere.
        dtype: Option<Dtype>,
        /// Bytes before the first vector; raw only.
        header_bytes: u64,
    },
    /// A directory of files.
    Objects {
        /// Most descriptors kept open.
        max_open_files: usize,
        /// How long a cached descriptor is trusted before its name is looked up again.
        revalidate: Duration,
    },
}

/// A dataset as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetSpec {
    /// Name in requests: `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`.
    pub name: String,
    /// Files or block devices that form one address space, in order; for objects one directory.
    pub paths: Vec<PathBuf>,
    /// What it is.
    pub kind: KindSpec,
    /// Whether reads bypass the page cache.
    pub direct_io: DirectIo,
}

/// Why a dataset cannot be opened. The message names the path, the field and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("dataset {dataset}: {field}: {problem}")]
pub struct OpenError {
    /// The dataset's name.
    pub dataset: String,
    /// The configuration field to look at: `path`, `dim`, `dtype`, `block_bytes`, `direct_io`, ...
    pub field: &'static str,
    /// What is wrong and what would mend it.
    pub problem: String,
}

/// What a dataset is, as found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Fixed-size blocks.
    Blocks {
        /// Bytes of a block.
        block_bytes: u32,
        /// Blocks.
        count: u64,
    },
    /// Vectors.
    Vectors {
        /// How they lie in the file.
        layout: Layout,
        /// Elements a vector.
        dim: u32,
        /// Element type.
        dtype: Dtype,
        /// Bytes of one vector's elements.
        vector_bytes: u32,
        /// Distance between two vectors.
        stride_bytes: u64,
        /// Where vector 0's elements begin.
        base_offset: u64,
        /// Vectors.
        count: u64,
    },
    /// A directory of files.
    Objects,
}

/// How a file is read without the page cache, or why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectFacts {
    /// Whether O_DIRECT is used by the backends that can.
    pub direct: bool,
    /// Why.
    pub reason: String,
    /// What direct reads must be aligned to: offset and length.
    pub offset_alignment_bytes: u32,
    /// What a direct read's memory must be aligned to.
    pub memory_alignment_bytes: u32,
}

/// One open file or block device. Reads own a reference, so that a descriptor is never closed under them.
#[derive(Debug)]
pub struct OpenFile {}

/// A name and length in an objects dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectEntry {
    /// Relative to the directory, `/` between the parts.
    pub name: String,
    /// Bytes.
    pub length_bytes: u64,
}

/// An open dataset.
#[derive(Debug)]
pub struct Dataset {}

impl Dataset {
    /// Opens every file, fixes lengths and identity, probes alignment and direct I/O.
    ///
    /// # Errors
    /// The first thing wrong, with the field to look at.
    pub fn open(spec: &DatasetSpec) -> Result<Self, OpenError> {
        let _ = spec;
        todo!()
    }
    /// Name in requests.
    pub fn name(&self) -> &str {
        todo!()
    }
    /// What it is.
    pub fn kind(&self) -> Kind {
        todo!()
    }
    /// The specification it was opened from.
    pub fn spec(&self) -> &DatasetSpec {
        todo!()
    }
    /// Length of the address space; 0 for objects.
    pub fn length_bytes(&self) -> u64 {
        todo!()
    }
    /// The files of the address space, in order; empty for objects.
    pub fn files(&self) -> &[Arc<OpenFile>] {
        todo!()
    }
    /// How its files are read.
    pub fn direct(&self) -> &DirectFacts {
        todo!()
    }
    /// Strong entity tag of the address space (device, inode, length, mtime of every file), unquoted.
    pub fn etag(&self) -> &str {
        todo!()
    }
    /// Opens an object, from the descriptor cache or by openat2 beneath the directory. A cache hit does not block;
    /// a miss opens on the blocking pool. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// `ObjectNameInvalid`, `ObjectNotFound`, `ObjectUnreadable`.
    pub async fn object(self: &Arc<Self>, name: &str) -> Result<Arc<OpenFile>, ReadError> {
        let _ = name;
        todo!()
    }
    /// Up to `limit` objects after the name `after`, in byte order of names. Walks the directory: blocking.
    ///
    /// # Errors
    /// errno of the walk.
    pub fn list_objects(&self, after: &str, limit: usize) -> std::io::Result<Vec<ObjectEntry>> {
        let _ = (after, limit);
        todo!()
    }
}

impl OpenFile {
    /// Length at open.
    pub fn length_bytes(&self) -> u64 {
        todo!()
    }
    /// Strong entity tag (device, inode, length, mtime), unquoted.
    pub fn etag(&self) -> &str {
        todo!()
    }
    /// The part of a file that an extent of the address space falls on.
    pub fn whole(&self) -> Extent {
        Extent { offset: 0, length: self.length_bytes() }
    }
}
