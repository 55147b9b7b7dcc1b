//! Writes pattern data to files. A file is written under a temporary name and renamed when it is complete. A run that
//! is stopped leaves no partial file, even while a write hangs ([`abandon_partial_files`]); one that is killed does, which the
//! caller's next run removes by [`remove_partial_files`].

use super::{fill, fill_elements, object_length, object_name, object_seed};
use ringfetch_engine::dataset::{Dtype, Layout};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Ends of the temporary names.
const PARTIAL_PREFIX: &str = ".ringfetch-";
const PARTIAL_SUFFIX: &str = ".partial";
const CHUNK_BYTES: usize = 1 << 20;
/// More than runs that begin at the same time may remove.
const CREATE_ATTEMPTS: u32 = 10;

/// Called with the bytes written so far from time to time; returning false stops the writing.
pub type Progress<'a> = &'a mut dyn FnMut(u64) -> bool;

/// Writes a file of `length_bytes` of the stream.
///
/// # Errors
/// errno of the writing; `Interrupted` if `progress` stopped it.
pub fn write_blocks(path: &Path, seed: u64, length_bytes: u64, progress: Progress<'_>) -> io::Result<()> {
    let mut out = Output::create(path, length_bytes, 0, progress)?;
    out.stream(seed, length_bytes)?;
    out.finish(Durable::Yes).map(|_| ())
}

/// Writes `count` vectors of `dim` elements in a layout (its own header or per-record headers included). Element
/// number `e` of vector `v` is element `v x dim + e` of [`fill_elements`].
///
/// # Errors
/// As [`write_blocks`]; `InvalidInput` if the layout fixes another dtype, or cannot represent this shape.
pub fn write_vectors(
    path: &Path,
    seed: u64,
    layout: Layout,
    dtype: Dtype,
    dim: u32,
    count: u64,
    progress: Progress<'_>,
) -> io::Result<()> {
    if let Some(fixed) = layout.fixed_dtype().filter(|&fixed| fixed != dtype) {
        return Err(invalid(format!("layout {layout} holds {fixed}, not {dtype}")));
    }
    if dim == 0 {
        return Err(invalid("a vector has at least 1 element: set dim".to_owned()));
    }
    let too_large = || {
        invalid(format!(
            "{count} vectors of {dim} {dtype} do not fit a file of layout {layout}"
        ))
    };
    let header = header(layout, dtype, dim, count).ok_or_else(too_large)?;
    let vector_bytes = u64::from(dim)
        .checked_mul(u64::from(dtype.bytes()))
        .ok_or_else(too_large)?;
    let dim_bytes = match layout {
        Layout::Fvecs | Layout::Bvecs | Layout::Ivecs => i32::try_from(dim)
            .map_err(|_| too_large())?
            .to_le_bytes()
            .to_vec(),
        Layout::Raw | Layout::Npy | Layout::Fbin | Layout::U8bin | Layout::I8bin => Vec::new(),
    };
    // 3 vectors of 100 f32 as .fvecs: 3 x (4 + 400) = 1212 bytes; as .fbin: 8 + 3 x 400 = 1208.
    let record_bytes = vector_bytes + dim_bytes.len() as u64;
    let length_bytes = count
        .checked_mul(record_bytes)
        .and_then(|data| data.checked_add(header.len() as u64))
        .ok_or_else(too_large)?;
    let mut out = Output::create(path, length_bytes, 0, progress)?;
    out.push(&header)?;
    if dim_bytes.is_empty() {
        out.elements(seed, dtype, 0, count * u64::from(dim))?;
    } else {
        for vector in 0..count {
            out.push(&dim_bytes)?;
            out.elements(seed, dtype, vector * u64::from(dim), u64::from(dim))?;
        }
    }
    out.finish(Durable::Yes).map(|_| ())
}

/// Writes `count` objects below `directory`: number `i` is `object_length(seed, i, ..)` bytes of the stream of
/// `object_seed(seed, object_name(i))`.
///
/// # Errors
/// As [`write_blocks`]. Completed objects remain.
pub fn write_objects(
    directory: &Path,
    seed: u64,
    count: u64,
    length_min: u64,
    length_max: u64,
    progress: Progress<'_>,
) -> io::Result<()> {
    let mut written = 0;
    for index in 0..count {
        let name = object_name(index);
        let path = directory.join(&name);
        if index % 100 == 0
            && let Some(folder) = path.parent()
        {
            fs::create_dir_all(folder)?;
        }
        let length_bytes = object_length(seed, index, length_min, length_max);
        let mut out = Output::create(&path, length_bytes, written, &mut *progress)?;
        out.stream(object_seed(seed, &name), length_bytes)?;
        // Syncing thousands of small files would take thousands of device flushes.
        written = out.finish(Durable::No)?;
    }
    Ok(())
}

/// Removes the partial files in a directory that no process is writing: those of runs that were killed. Whatever
/// cannot be removed stays.
pub fn remove_partial_files(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        // Its writer holds the lock. Held until it is removed, so that one who has just made it does not get it meanwhile.
        if is_partial(&path)
            && let Ok(file) = File::open(&path)
            && file.try_lock().is_ok()
        {
            let _removed = fs::remove_file(path);
            drop(file);
        }
    }
}

/// Removes the partial files that this process has open, for one that ends while a write hangs. May hang itself.
pub fn abandon_partial_files() {
    for descriptor in fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        if let Ok(path) = fs::read_link(descriptor.path())
            && is_partial(&path)
        {
            let _removed = fs::remove_file(path);
        }
    }
}

fn is_partial(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(PARTIAL_PREFIX) && name.ends_with(PARTIAL_SUFFIX))
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, problem)
}

/// The bytes before the first record; `None` if the layout's integers cannot represent them.
fn header(layout: Layout, dtype: Dtype, dim: u32, count: u64) -> Option<Vec<u8>> {
    match layout {
        Layout::Raw | Layout::Fvecs | Layout::Bvecs | Layout::Ivecs => Some(Vec::new()),
        Layout::Npy => Some(npy_header(dtype, dim, count)),
        Layout::Fbin | Layout::U8bin | Layout::I8bin => {
            let count = u32::try_from(count).ok()?;
            Some([count.to_le_bytes(), dim.to_le_bytes()].concat())
        }
    }
}

/// The header of a .npy file of `count` rows: format version 1.0, as numpy.save writes it. The dict is padded with spaces and ends in a newline, so that the data
/// begin at a multiple of 64 (`ARRAY_ALIGN` of numpy/lib/format.py).
pub fn npy_header(dtype: Dtype, dim: u32, count: u64) -> Vec<u8> {
    let descr = match dtype {
        Dtype::F32 => "<f4",
        Dtype::F16 => "<f2",
        Dtype::U8 => "|u1",
        Dtype::I8 => "|i1",
        Dtype::I32 => "<i4",
        // As numpy.save writes `ml_dtypes.bfloat16`: NumPy has no name for it.
        Dtype::Bf16 => "<V2",
        Dtype::F64 => "<f8",
    };
    let mut dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({count}, {dim}), }}");
    // 10 bytes of magic, version and length, then 59 of dict and 1 of newline make 70: 58 spaces fill them up to 128.
    while !(10 + dict.len() + 1).is_multiple_of(64) {
        dict.push(' ');
    }
    dict.push('\n');
    // Two numbers of at most 20 digits: far below 65 536.
    let length = u16::try_from(dict.len()).unwrap_or(u16::MAX);
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend_from_slice(&length.to_le_bytes());
    header.extend_from_slice(dict.as_bytes());
    header
}

/// Whether a finished file must survive a loss of power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Durable {
    Yes,
    No,
}

/// A file being written: has a temporary name until `finish`, and is removed if dropped before.
struct Output<'a> {
    file: NamedTempFile,
    path: PathBuf,
    buffer: Vec<u8>,
    /// Bytes written, including earlier files of the same run.
    written: u64,
    progress: Progress<'a>,
}

impl<'a> Output<'a> {
    fn create(path: &Path, length_bytes: u64, written: u64, progress: Progress<'a>) -> io::Result<Self> {
        let named = path.file_name().zip(path.parent());
        let (_, parent) = named.ok_or_else(|| invalid(format!("{} names no file", path.display())))?;
        // A bare name has an empty parent.
        let parent = Path::new(".").join(parent);
        let file = create_locked(&parent)?;
        reserve(file.as_file(), length_bytes)?;
        let buffer =
            Vec::with_capacity(CHUNK_BYTES.min(usize::try_from(length_bytes).unwrap_or(CHUNK_BYTES)));
        Ok(Self {
            file,
            path: path.to_owned(),
            buffer,
            written,
            progress,
        })
    }

    fn stream(&mut self, seed: u64, length_bytes: u64) -> io::Result<()> {
        self.generate(length_bytes, |offset, room| fill(seed, offset, room))
    }

    fn elements(&mut self, seed: u64, dtype: Dtype, first: u64, count: u64) -> io::Result<()> {
        let element_bytes = u64::from(dtype.bytes());
        self.generate(count * element_bytes, |offset, room| {
            fill_elements(seed, dtype, first + offset / element_bytes, room);
        })
    }

    /// Appends `length_bytes` made by `fill`, given the offset of each piece. Pieces begin at multiples of 8.
    fn generate(&mut self, length_bytes: u64, fill: impl Fn(u64, &mut [u8])) -> io::Result<()> {
        let mut made = 0;
        while made < length_bytes {
            if CHUNK_BYTES - self.buffer.len() < 8 {
                self.flush()?;
            }
            let room = (CHUNK_BYTES - self.buffer.len()) / 8 * 8;
            let piece = room.min(usize::try_from(length_bytes - made).unwrap_or(room));
            let start = self.buffer.len();
            self.buffer.resize(start + piece, 0);
            fill(made, self.buffer.get_mut(start..).unwrap_or_default());
            made += piece as u64;
        }
        Ok(())
    }

    fn push(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.buffer.len() + bytes.len() > CHUNK_BYTES {
            self.flush()?;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_file_mut().write_all(&self.buffer)?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        if (self.progress)(self.written) {
            return Ok(());
        }
        Err(io::Error::new(
            ErrorKind::Interrupted,
            format!("stopped; {} was not made", self.path.display()),
        ))
    }

    /// Gives the file its name. Returns the bytes written so far.
    fn finish(mut self, durable: Durable) -> io::Result<u64> {
        self.flush()?;
        if durable == Durable::Yes {
            self.file.as_file().sync_all()?;
        }
        self.file.persist(&self.path)?;
        Ok(self.written)
    }
}

/// Makes a partial file, whose lock says that it is being written. Where locks do not work, nobody else gets it either.
fn create_locked(parent: &Path) -> io::Result<NamedTempFile> {
    for _ in 0..CREATE_ATTEMPTS {
        let file = tempfile::Builder::new()
            .prefix(PARTIAL_PREFIX)
            .suffix(PARTIAL_SUFFIX)
            // Opened here, since errors of tempfile name its file, which the caller did not choose.
            .make_in(parent, |path| File::create_new(path))?;
        // Until it is locked, another run takes it for one of a killed run.
        let is_taken = matches!(file.as_file().try_lock(), Err(TryLockError::WouldBlock));
        if !is_taken && file.path().exists() {
            return Ok(file);
        }
    }
    Err(io::Error::other("other runs have removed it"))
}

/// Reserves all space at once: one extent if the file system can, and a full disk is noticed early.
fn reserve(file: &File, length_bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;
    if length_bytes == 0 {
        return Ok(());
    }
    // off_t: the kernel calls a longer one invalid, as it calls a file system invalid that cannot reserve.
    if i64::try_from(length_bytes).is_err() {
        return Err(Errno::FBIG.into());
    }
    match rustix::io::retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, length_bytes)) {
        Err(errno @ (Errno::NOSPC | Errno::FBIG | Errno::DQUOT)) => Err(errno.into()),
        // The file system may not support it.
        Ok(()) | Err(_) => Ok(()),
    }
}
