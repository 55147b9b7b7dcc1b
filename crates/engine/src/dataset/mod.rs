//! Datasets: files opened once, with their shape, alignment and identity.
//!
//! An open [`Dataset`] never changes, except for the descriptors that an objects dataset caches.
//! `DatasetSpec` and `KindSpec` say what to open; `open`, `layout` (vectors), `objects` and `listing` open
//! it; `file`, `identity` and `direct` handle one file. Backends read, and `geometry` does item arithmetic.

mod direct;
mod directory;
mod file;
mod held_file;
mod identity;
mod layout;
mod listing;
mod npy;
mod objects;
mod open;
mod open_error;
mod openers;
mod reaper;
mod trial;

pub(crate) use direct::ALIGNMENT_MAX;
pub use file::OpenFile;
pub(crate) use file::bytes_before;
pub(crate) use held_file::HeldFile;
pub use objects::{IN_FLIGHT_DESCRIPTORS_MAX, close_cached_objects, free_descriptors};
pub use open_error::is_refused_by_host;

use crate::config::DirectIo;
use crate::error::ReadError;
use crate::geometry::{Extent, FileSpan};
use openers::OPENERS;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;

/// Longest block of a dataset, bytes.
pub const BLOCK_BYTES_MAX: u32 = 256 << 20;
/// Most elements of a vector: far above any embedding, far below what would overflow a `u32` of bytes.
pub const DIM_MAX: u32 = 1 << 20;

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
    /// The upper half of an IEEE 754 binary32, little-endian.
    Bf16,
    /// IEEE 754 binary64, little-endian.
    F64,
}

impl Dtype {
    /// Every element type.
    pub const ALL: [Self; 7] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::F64,
        Self::U8,
        Self::I8,
        Self::I32,
    ];

    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F64 => 8,
            Self::U8 | Self::I8 => 1,
        }
    }

    /// The name in YAML and responses: `f32`, `f16`, `bf16`, `f64`, `u8`, `i8`, `i32`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::I32 => "i32",
            Self::Bf16 => "bf16",
            Self::F64 => "f64",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How vectors are stored in their file.
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

impl Layout {
    /// Every layout.
    pub const ALL: [Self; 8] = [
        Self::Raw,
        Self::Fvecs,
        Self::Bvecs,
        Self::Ivecs,
        Self::Npy,
        Self::Fbin,
        Self::U8bin,
        Self::I8bin,
    ];

    /// The name in YAML and responses: `raw`, `fvecs`, `bvecs`, `ivecs`, `npy`, `fbin`, `u8bin`, `i8bin`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Fvecs => "fvecs",
            Self::Bvecs => "bvecs",
            Self::Ivecs => "ivecs",
            Self::Npy => "npy",
            Self::Fbin => "fbin",
            Self::U8bin => "u8bin",
            Self::I8bin => "i8bin",
        }
    }

    /// The element type that the layout itself fixes; `None` for raw and npy.
    pub const fn fixed_dtype(self) -> Option<Dtype> {
        match self {
            Self::Fvecs | Self::Fbin => Some(Dtype::F32),
            Self::Bvecs | Self::U8bin => Some(Dtype::U8),
            Self::I8bin => Some(Dtype::I8),
            Self::Ivecs => Some(Dtype::I32),
            Self::Raw | Self::Npy => None,
        }
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
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
        /// How they are stored in the file.
        layout: Layout,
        /// Elements per vector; needed for raw, checked against the file otherwise.
        dim: Option<u32>,
        /// Element type; needed for raw, checked against the file otherwise.
        dtype: Option<Dtype>,
        /// Bytes before the first vector; raw only.
        header_bytes: u64,
    },
    /// A directory of files.
    Objects {
        /// Most descriptors kept open; an object that is read directly takes two. Requests in flight may hold
        /// [`IN_FLIGHT_DESCRIPTORS_MAX`] more.
        max_open_files: usize,
        /// How long a cached descriptor is trusted before its name is looked up again.
        revalidate: Duration,
    },
}

impl KindSpec {
    /// Blocks that take up all of the files.
    pub const fn blocks(block_bytes: u32) -> Self {
        Self::Blocks {
            block_bytes,
            partial_tail: PartialTail::Refuse,
        }
    }

    /// Vectors that are nothing but their elements, one after the other.
    pub const fn raw_vectors(dim: u32, dtype: Dtype, header_bytes: u64) -> Self {
        Self::Vectors {
            layout: Layout::Raw,
            dim: Some(dim),
            dtype: Some(dtype),
            header_bytes,
        }
    }

    /// Files below a directory.
    pub const fn objects(max_open_files: usize, revalidate: Duration) -> Self {
        Self::Objects {
            max_open_files,
            revalidate,
        }
    }
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

impl DatasetSpec {
    /// A dataset in one file, or of one directory.
    pub fn new(name: &str, path: impl Into<PathBuf>, kind: KindSpec, direct_io: DirectIo) -> Self {
        Self {
            name: name.to_owned(),
            paths: vec![path.into()],
            kind,
            direct_io,
        }
    }
}

/// Why a dataset cannot be opened. The message names the path, the field and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("dataset {dataset}: {field}: {problem}")]
pub struct OpenError {
    /// The dataset's name.
    pub dataset: String,
    /// The configuration field to look at: `path`, `dim`, `dtype`, `block_bytes`, `direct_io`, ...
    pub field: &'static str,
    /// What is wrong and how to fix it.
    pub problem: String,
    /// Whether the system refuses what it takes to open it (file descriptors, memory): the configuration may be right.
    pub is_refused_by_host: bool,
}

/// What a dataset is, once open.
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
        /// How they are stored in the file.
        layout: Layout,
        /// Elements per vector.
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

impl Kind {
    /// What turns an index into bytes, and their meaning, as numbers that are equal only for equal shapes. The format of
    /// the file is not part of them: it changes nothing else.
    fn layout_words(self) -> Vec<u64> {
        match self {
            Self::Blocks { block_bytes, count } => vec![u64::from(block_bytes), count],
            Self::Vectors {
                layout: _,
                dim,
                dtype,
                vector_bytes: _,
                stride_bytes,
                base_offset,
                count,
            } => {
                let mut name = [0; 8];
                for (byte, of_name) in name.iter_mut().zip(dtype.as_str().bytes()) {
                    *byte = of_name;
                }
                let dtype = u64::from_le_bytes(name);
                vec![u64::from(dim), dtype, stride_bytes, base_offset, count]
            }
            Self::Objects => Vec::new(),
        }
    }
}

/// Whether a file is read past the page cache, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectFacts {
    /// Whether backends that support O_DIRECT use it.
    pub direct: bool,
    /// Why.
    pub reason: String,
    /// What direct reads must be aligned to: offset and length.
    pub offset_alignment_bytes: u32,
    /// What a direct read's memory must be aligned to.
    pub memory_alignment_bytes: u32,
}

/// A name and length in an objects dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectEntry {
    /// Relative to the directory, `/` between the parts.
    pub name: String,
    /// Bytes.
    pub length_bytes: u64,
}

/// An open dataset. Clones share it; it is closed when the last is dropped. Who holds an `Arc` of a clone counts its
/// references on that clone's cache line: with a clone for each core, requests on different cores do not write to the same.
/// Aligned, so that no two share a line (128: x86 fetches lines in pairs).
#[derive(Debug, Clone)]
#[repr(align(128))]
pub struct Dataset(Arc<OpenDataset>);

/// Shows whether a dataset is still open, without keeping it open.
#[derive(Debug, Clone)]
pub struct WeakDataset(Weak<OpenDataset>);

impl WeakDataset {
    /// Whether anybody holds the dataset.
    pub fn is_open(&self) -> bool {
        self.0.strong_count() > 0
    }
}

#[derive(Debug)]
struct OpenDataset {
    id: u64,
    spec: DatasetSpec,
    kind: Kind,
    files: Vec<Arc<OpenFile>>,
    span: FileSpan,
    /// At most the span's length: less if a partial tail is ignored.
    length_bytes: u64,
    direct: DirectFacts,
    etag: String,
    /// The devices that its files are on, or its directory, and the disk of each.
    disks: Vec<(u64, u64)>,
    objects: Option<objects::Objects>,
}

impl OpenDataset {
    /// Opens an object on a thread for that. The permit belongs to the open, not to the caller, who may leave before it
    /// ends.
    async fn open_object(
        self: Arc<Self>,
        name: String,
        permit: OwnedSemaphorePermit,
    ) -> Result<Arc<OpenFile>, ReadError> {
        let opened = name.clone();
        let opening = OPENERS.run(move || {
            let _permit = permit;
            match &self.objects {
                Some(objects) => objects.look_up(&opened),
                None => Err(ReadError::ObjectNotFound { name: opened }),
            }
        });
        match opening {
            Ok(opening) => opening.await.unwrap_or(Err(ReadError::ShardFailed)),
            // No thread: as if the system had refused the open itself.
            Err(error) => Err(ReadError::ObjectUnreadable {
                name,
                errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
            }),
        }
    }
}

impl Drop for OpenDataset {
    fn drop(&mut self) {
        // The reaper closes files one by one; a dataset or its cache may hold a million, so drop them there as well.
        let files = std::mem::take(&mut self.files);
        reaper::drop_later(Box::new((files, self.objects.take())));
    }
}

impl Dataset {
    /// Opens every file, fixes lengths and identity, probes alignment and direct I/O.
    ///
    /// # Errors
    /// The problems, with the field to look at.
    pub fn open(spec: &DatasetSpec) -> Result<Self, OpenError> {
        // The next dataset needs the descriptors of one that did not open.
        let opened = open::open(spec).inspect_err(|_| reaper::settle());
        opened.map(|opened| Self(Arc::new(opened)))
    }

    /// Does not keep it open.
    pub fn downgrade(&self) -> WeakDataset {
        WeakDataset(Arc::downgrade(&self.0))
    }

    /// Unique in this process, never reused: the key for caches.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Name in requests.
    pub fn name(&self) -> &str {
        &self.0.spec.name
    }

    /// What it is.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The specification it was opened from.
    pub fn spec(&self) -> &DatasetSpec {
        &self.0.spec
    }

    /// Blocks or vectors; 0 for objects.
    pub fn count(&self) -> u64 {
        match self.0.kind {
            Kind::Blocks { count, .. } | Kind::Vectors { count, .. } => count,
            Kind::Objects => 0,
        }
    }

    /// Length of the address space; 0 for objects.
    pub fn length_bytes(&self) -> u64 {
        self.0.length_bytes
    }

    /// The files of the address space, in order; empty for objects.
    pub fn files(&self) -> &[Arc<OpenFile>] {
        &self.0.files
    }

    /// Calls `out` with (file index, extent in that file) for each file that `extent` of the address space
    /// overlaps.
    pub(crate) fn locate(&self, extent: Extent, out: &mut impl FnMut(usize, Extent)) {
        self.0.span.locate(extent, out);
    }

    /// How its files are read.
    pub fn direct(&self) -> &DirectFacts {
        &self.0.direct
    }

    /// The numbers of the devices that its files are on, or its directory (`st_dev`; of a block device, `st_rdev`).
    pub fn devices(&self) -> impl Iterator<Item = u64> {
        self.0.disks.iter().map(|(device, _)| *device)
    }

    /// The disk that one of its files is on, or one of its objects: they have a queue in common. It is known as the device
    /// number of a disk below the file's device, or as that device's where there is none (network file systems).
    pub(crate) fn disk_of(&self, file: &OpenFile) -> u64 {
        let device = file.identity().dev();
        let disk = self.0.disks.iter().find(|(known, _)| *known == device);
        disk.map_or(device, |(_, disk)| *disk)
    }

    /// The dataset, which nobody else holds, as if its files were on these disks.
    #[cfg(test)]
    pub(crate) fn on_disks(mut self, numbers: &[u64]) -> Self {
        let opened = Arc::get_mut(&mut self.0).expect("only one");
        for (file, number) in opened.files.iter_mut().zip(numbers) {
            Arc::get_mut(file).expect("only one").assume_device(*number);
        }
        self
    }

    /// Strong entity tag of the address space (a digest of device, inode, length and mtime of every file, and of
    /// how its blocks or vectors lie in them), unquoted. For objects, whose files have tags of their own, that of the directory.
    pub fn etag(&self) -> &str {
        &self.0.etag
    }

    /// Opens an object, from the descriptor cache or by openat2 beneath the directory. A cache hit does not
    /// block; a miss opens it on a thread for that. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// `ObjectNameInvalid`, `ObjectNotFound`, `ObjectUnreadable`; `Overloaded` if requests hold as many
    /// objects as may be open.
    ///
    /// # Cancel safety
    /// An open in progress continues and its file is cached; nothing is lost.
    pub async fn object(&self, name: &str) -> Result<Arc<OpenFile>, ReadError> {
        let Some(objects) = &self.0.objects else {
            return Err(ReadError::ObjectNotFound {
                name: name.to_owned(),
            });
        };
        objects::check_name(name)?;
        if let Some(file) = objects.cached(name) {
            return Ok(file);
        }
        let (dataset, name) = (Arc::clone(&self.0), name.to_owned());
        if let Ok(permit) = Arc::clone(&objects.opens).try_acquire_owned() {
            return dataset.open_object(name, permit).await;
        }
        let opens = Arc::clone(&objects.opens);
        // In a task: a permit goes to who waited longest, polled or not, and the future of a response that its client does
        // not read is not polled.
        let mut waiting = JoinSet::new();
        waiting.spawn(async move {
            let permit = opens.acquire_owned().await.map_err(|_| ReadError::ShardFailed)?;
            dataset.open_object(name, permit).await
        });
        let opened = waiting.join_next().await;
        opened.and_then(Result::ok).unwrap_or(Err(ReadError::ShardFailed))
    }

    /// Forgets an object's cached descriptor, so that the next request opens its name anew: for an object
    /// that was found to be truncated.
    pub fn forget_object(&self, name: &str) {
        if let Some(objects) = &self.0.objects {
            objects.forget(name);
        }
    }

    /// Up to `limit` objects after the name `after`, in byte order of names. Walks the directory: blocking.
    ///
    /// # Errors
    /// errno of the walk; ECANCELED once `is_wanted` returns false, which the walk calls at each entry.
    pub fn list_objects(
        &self,
        after: &str,
        limit: usize,
        is_wanted: &dyn Fn() -> bool,
    ) -> std::io::Result<Vec<ObjectEntry>> {
        match &self.0.objects {
            Some(objects) => Ok(objects.list(after, limit, is_wanted)?),
            None => Ok(Vec::new()),
        }
    }
}

#[cfg(test)]
impl Dataset {
    /// As if direct reads of its files had this alignment. Before anybody else refers to them.
    pub(crate) fn assume_direct(mut self, bytes: u32) -> Self {
        let open = Arc::get_mut(&mut self.0).expect("the only reference");
        for file in &mut open.files {
            Arc::get_mut(file)
                .expect("the only reference")
                .assume_direct(bytes);
        }
        self
    }
}

#[cfg(test)]
pub(crate) mod tests;
