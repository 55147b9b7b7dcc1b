//! One open file: its descriptors, and its length and identity as of its open.
//!
//! A file is read through `buffered` or, if it supports O_DIRECT, past the page cache through `direct`: two
//! open file descriptions of the same inode, since the second is opened through the first and not by name.
//! Both are closed together, when the last reference is dropped. Backends borrow the descriptors for their
//! reads.

use super::direct::{self, Alignment};
use super::identity::{Identity, etag_of};
use super::{reaper, trial};
use crate::config::DirectIo;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, ioctl, opcode};
use std::any::Any;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::OwnedSemaphorePermit;

/// One open file or block device. Reads own a reference, so that a descriptor is never closed under them.
#[derive(Debug)]
pub struct OpenFile {
    /// Unique in this process, never reused: the key for caches.
    pub(crate) id: u64,
    /// The same for all that have this version of the file open: they share its page cache.
    pub(crate) pages: u64,
    /// State that a backend attaches to the file (a mapping, a registration); dropped with it.
    pub(crate) attached: OnceLock<Box<dyn Any + Send + Sync>>,
    /// Present until the drop.
    buffered: ManuallyDrop<File>,
    direct: Option<File>,
    /// What its descriptors take from a budget while they are open.
    permit: Option<OwnedSemaphorePermit>,
    alignment: Alignment,
    /// See [`direct::excludes_truncation`].
    direct_excludes_truncation: bool,
    is_block_device: bool,
    identity: Identity,
    etag: String,
}

/// Why a path cannot be opened as a file.
#[derive(Debug)]
pub(super) enum FileError {
    /// The open, or a query of the open file, failed.
    Open(io::Error),
    /// It is neither a regular file nor a block device, but this.
    NotAFile(&'static str),
    /// Direct I/O is required and this file refuses it, for this reason.
    DirectRefused(String),
    /// The first block cannot be read.
    TrialRead(io::Error),
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> Self {
        Self::Open(error)
    }
}

impl From<Errno> for FileError {
    fn from(errno: Errno) -> Self {
        Self::Open(errno.into())
    }
}

/// What may be opened as a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Accept {
    /// Regular files and block devices.
    FilesAndDevices,
    FilesOnly,
}

/// How to open a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenOptions {
    pub(super) accept: Accept,
    pub(super) direct_io: DirectIo,
    /// A device on which a trial was already made, and its result: no further trial there.
    pub(super) tried: Option<(u64, Alignment)>,
}

/// Flags of every open. NONBLOCK: a fifo must not hang the opener; it is cleared once the file is known to be
/// one to read.
pub(super) const OPEN_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// No read may end beyond this (read(2): EINVAL).
const FILE_BYTES_MAX: u64 = i64::MAX.cast_unsigned();

/// Its entries lead to the open files themselves, whatever their names lead to now (proc_pid_fd(5)).
const OWN_DESCRIPTORS: &str = "/proc/self/fd";

impl Drop for OpenFile {
    fn drop(&mut self) {
        // SAFETY: only this takes `buffered`, and nothing uses the value after its drop.
        let buffered = unsafe { ManuallyDrop::take(&mut self.buffered) };
        // In this order: the mapping, the descriptors, then the permit that they were charged to.
        let remains = (
            self.attached.take(),
            buffered,
            self.direct.take(),
            self.permit.take(),
        );
        reaper::drop_later(Box::new(remains));
    }
}

/// `BLKGETSIZE64` of linux/fs.h.
const BLOCK_DEVICE_BYTES: Opcode = opcode::read::<u64>(0x12, 114);

/// The size of a block device now. lseek(2) tells it too, but locks the device's inode.
fn device_bytes(device: impl AsFd) -> Result<u64, Errno> {
    // SAFETY: the request writes a u64.
    let request = unsafe { Getter::<BLOCK_DEVICE_BYTES, u64>::new() };
    // SAFETY: as above; other files refuse it.
    unsafe { ioctl(device, request) }
}

impl OpenFile {
    /// Opens one regular file or block device by its path.
    ///
    /// # Errors
    /// errno of the open; `InvalidInput` if it is not a regular file or block device, or if direct I/O is
    /// required and refused.
    pub fn open(path: impl AsRef<Path>, direct_io: DirectIo) -> io::Result<Self> {
        let options = OpenOptions {
            accept: Accept::FilesAndDevices,
            direct_io,
            tried: None,
        };
        match Self::open_path(path.as_ref(), options) {
            Ok((file, _)) => Ok(file),
            Err(FileError::Open(error) | FileError::TrialRead(error)) => Err(error),
            Err(FileError::NotAFile(found)) => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("is {found}, not a file"),
            )),
            Err(FileError::DirectRefused(reason)) => Err(io::Error::new(io::ErrorKind::InvalidInput, reason)),
        }
    }

    /// As [`OpenFile::open`]; also returns the reason if direct I/O was preferred and the file refuses it.
    pub(super) fn open_path(path: &Path, options: OpenOptions) -> Result<(Self, Option<String>), FileError> {
        let opened = rustix::io::retry_on_intr(|| rustix::fs::open(path, OPEN_FLAGS, Mode::empty()));
        let descriptor = match opened {
            Err(Errno::AGAIN) => open_leased(path)?,
            opened => opened?,
        };
        Self::from_descriptor(descriptor, options)
    }

    /// As [`OpenFile::open_path`], from a descriptor opened with [`OPEN_FLAGS`].
    pub(super) fn from_descriptor(
        descriptor: OwnedFd,
        options: OpenOptions,
    ) -> Result<(Self, Option<String>), FileError> {
        let mut file = Self::buffered_only(descriptor, options.accept)?;
        if options.direct_io == DirectIo::Off || file.length_bytes() == 0 {
            return Ok((file, None));
        }
        match file.add_direct(options.tried)? {
            Err(reason) if options.direct_io == DirectIo::Required => Err(FileError::DirectRefused(reason)),
            added => Ok((file, added.err())),
        }
    }

    fn buffered_only(descriptor: OwnedFd, accept: Accept) -> Result<Self, FileError> {
        let found = rustix::fs::fstat(&descriptor)?;
        let kind = FileType::from_raw_mode(found.st_mode);
        let is_block_device = kind == FileType::BlockDevice && accept == Accept::FilesAndDevices;
        if kind != FileType::RegularFile && !is_block_device {
            return Err(FileError::NotAFile(describe(kind)));
        }
        clear_nonblock(&descriptor)?;
        // Reads are random: without this hint, the kernel takes a read next to resident pages for part of a
        // sequence and reads ahead, up to the device's limit. Nothing is lost if it is ignored.
        let _hint = rustix::fs::fadvise(&descriptor, 0, None, rustix::fs::Advice::Random);
        let identity = Identity::of(&descriptor)?;
        Ok(Self {
            id: next_id(),
            pages: identity.pages(is_block_device),
            attached: OnceLock::new(),
            buffered: ManuallyDrop::new(File::from(descriptor)),
            direct: None,
            permit: None,
            alignment: Alignment::NONE,
            direct_excludes_truncation: false,
            is_block_device,
            identity,
            etag: etag_of([identity], &[]),
        })
    }

    /// Adds the descriptor for direct reads; `Ok(Err)` is the reason why there is none.
    fn add_direct(&mut self, tried: Option<(u64, Alignment)>) -> Result<Result<(), String>, FileError> {
        if self.length_bytes() > FILE_BYTES_MAX - u64::from(direct::ALIGNMENT_MAX) {
            return Ok(Err(
                "it is nearly as long as files may be: a whole last sector would end beyond that".to_owned(),
            ));
        }
        let descriptor = match reopen(&*self.buffered, OFlags::DIRECT) {
            Ok(descriptor) => descriptor,
            Err(errno) if direct::is_refusal(&errno.into()) => return Ok(Err(refusal(errno.into()))),
            Err(Errno::NOENT) if !Path::new(OWN_DESCRIPTORS).exists() => {
                return Ok(Err(format!(
                    "it is opened through {OWN_DESCRIPTORS}: mount /proc"
                )));
            }
            Err(errno) => return Err(errno.into()),
        };
        let file = File::from(descriptor);
        let alignment = match direct::alignment(&file, self.is_block_device) {
            Ok(alignment) => alignment,
            Err(reason) => return Ok(Err(reason)),
        };
        let alignment = match tried.filter(|(dev, _)| *dev == self.identity.dev()) {
            Some((_, found)) => alignment.coarser(found),
            None => {
                let mut reads = trial::Descriptors {
                    direct: &file,
                    buffered: &self.buffered,
                };
                match trial::find(&mut reads, alignment).map_err(FileError::TrialRead)? {
                    Ok(found) => found,
                    Err(reason) => return Ok(Err(reason)),
                }
            }
        };
        self.direct_excludes_truncation = direct::excludes_truncation(&file, self.is_block_device, alignment);
        self.direct = Some(file);
        self.alignment = alignment;
        Ok(Ok(()))
    }

    /// Drops the direct descriptor: another file of the dataset has none.
    pub(super) fn drop_direct(&mut self) {
        self.direct = None;
        self.alignment = Alignment::NONE;
    }

    /// As if direct reads of it had this alignment, whatever its file system has. For tests of what depends on it.
    #[cfg(test)]
    pub(super) fn assume_direct(&mut self, bytes: u32) {
        self.direct = Some(self.buffered.try_clone().expect("a descriptor"));
        self.alignment = Alignment {
            offset_bytes: bytes,
            memory_bytes: bytes,
            ..Alignment::NONE
        };
    }

    /// As if it were on this device. For tests of what depends on it.
    #[cfg(test)]
    pub(super) fn assume_device(&mut self, number: u64) {
        self.identity = self.identity.on_device(number);
    }

    /// Charges its descriptors to a budget until they are closed.
    pub(super) fn charge(&mut self, permit: OwnedSemaphorePermit) {
        self.permit = Some(permit);
    }

    /// Length at open.
    pub fn length_bytes(&self) -> u64 {
        self.identity.length_bytes()
    }

    /// Strong entity tag (a digest of device, inode, length, mtime), unquoted. A block device has no mtime
    /// that follows its content: its tag is valid only while the device is not written to.
    pub fn etag(&self) -> &str {
        &self.etag
    }

    /// Whether its length and modification time are those of the open, as far as this host knows: does not
    /// query a server or FUSE daemon, which might take as long as a read.
    pub fn is_unchanged(&self) -> bool {
        if self.is_block_device {
            return true;
        }
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        match rustix::fs::statx(&*self.buffered, c"", flags, StatxFlags::SIZE | StatxFlags::MTIME) {
            Ok(found) => {
                let mtime = found.stx_mtime;
                self.identity
                    .has_content_of(found.stx_size, mtime.tv_sec, mtime.tv_nsec)
            }
            // As in `known_length`.
            Err(Errno::NOSYS | Errno::PERM) => {
                Identity::of(&*self.buffered).is_ok_and(|now| now == self.identity)
            }
            Err(_) => false,
        }
    }

    /// Descriptor for reads through the page cache.
    pub(crate) fn buffered_fd(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }

    /// Descriptor for reads past the page cache, aligned to [`Self::offset_alignment`] and
    /// [`Self::memory_alignment`].
    pub(crate) fn direct_fd(&self) -> Option<BorrowedFd<'_>> {
        self.direct.as_ref().map(AsFd::as_fd)
    }

    /// What offset and length of a read must be multiples of; 1 without a direct descriptor.
    pub(crate) fn offset_alignment(&self) -> u32 {
        self.alignment.offset_bytes
    }

    /// What a read's memory must be a multiple of; 1 without a direct descriptor.
    pub(crate) fn memory_alignment(&self) -> u32 {
        self.alignment.memory_bytes
    }

    /// Length now as the file's server reports it, which might take as long as a read.
    ///
    /// # Errors
    /// errno of fstat.
    fn current_length(&self) -> Result<u64, i32> {
        let metadata = self.buffered.metadata();
        metadata
            .map(|found| found.len())
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// How many of `bytes` that a read from `offset` returned belong to the file; does not wait. A read
    /// through the page cache checks the file's end before it copies, and truncation zeroes the pages behind
    /// the new end before it removes them, so a concurrent read may return zeros (seen on ext4, kernel 6.18).
    /// The end is moved before that (`truncate_setsize`), so checking it afterwards is enough: of 4096 bytes
    /// from 8192 in a file that now ends at 10000, 1808 count. XFS zeroes first (`iomap_truncate_page` in
    /// `xfs_setattr_size`), which a copy from a mapping may see for some microseconds. Direct reads are
    /// checked if the file system may serve them from the page cache too. A device is not truncated: a read of it is
    /// bounded by its end, unless it is a copy from a mapping.
    ///
    /// # Errors
    /// errno of statx.
    pub(crate) fn kept(&self, offset: u64, bytes: u32, is_direct: bool) -> Result<u32, i32> {
        if self.keeps_all(is_direct) {
            return Ok(bytes);
        }
        bytes_before(self.known_length(), offset, bytes)
    }

    /// Whether all bytes that a read returned belong to the file: see [`Self::kept`].
    pub(crate) fn keeps_all(&self, is_direct: bool) -> bool {
        self.is_block_device || (is_direct && self.direct_excludes_truncation)
    }

    /// Whether the file ends at `offset` or before. `waits`: query the server or FUSE daemon, which might
    /// take as long as a read; otherwise use what this host knows. A device ends where it did at its open: one that
    /// has become shorter has failed.
    ///
    /// # Errors
    /// errno of fstat or statx.
    pub(crate) fn ends_by(&self, offset: u64, waits: bool) -> Result<bool, i32> {
        let end = if self.is_block_device {
            Ok(self.identity.length_bytes())
        } else if waits {
            self.current_length()
        } else {
            self.known_length()
        };
        Ok(bytes_before(end, offset, 1)? == 0)
    }

    /// Length now as far as this host knows: does not query a server or FUSE daemon, which might take as long
    /// as a read (but 9p without a cache does: `v9fs_vfs_getattr_dotl` ignores the flag, Linux 6.18). That is enough to
    /// recognize zeros, since they come from this host's page cache.
    pub(crate) fn known_length(&self) -> Result<u64, i32> {
        if self.is_block_device {
            // A device may become shorter: a loop device, a partition, a logical volume.
            let end = device_bytes(&*self.buffered);
            return end
                .map(|end| end.min(self.identity.length_bytes()))
                .map_err(Errno::raw_os_error);
        }
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        match rustix::fs::statx(&*self.buffered, c"", flags, StatxFlags::SIZE) {
            Ok(found) => Ok(found.stx_size),
            // Kernels before 4.11, and equally old seccomp filters.
            Err(Errno::NOSYS | Errno::PERM) => self.current_length(),
            Err(errno) => Err(errno.raw_os_error()),
        }
    }

    pub(crate) fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    pub(super) fn buffered(&self) -> &File {
        &self.buffered
    }

    pub(super) fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether its descriptor still leads to it: a server may have given the file another handle, by which alone it can be read.
    /// May take as long as a read.
    pub(super) fn is_reachable(&self) -> bool {
        Identity::of(&*self.buffered).is_ok_and(|now| now == self.identity)
    }

    pub(super) fn alignment(&self) -> Alignment {
        self.alignment
    }
}

/// How many of `bytes` from `offset` are before the file's `end`: of 4096 from 8192 with an end of 10000,
/// 1808.
pub(crate) fn bytes_before(end: Result<u64, i32>, offset: u64, bytes: u32) -> Result<u32, i32> {
    let left = u32::try_from(end?.saturating_sub(offset));
    Ok(left.map_or(bytes, |left| left.min(bytes)))
}

/// A number that is unique in this process.
pub(super) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// With O_NONBLOCK, io_uring returns EAGAIN for a read that would block, instead of waiting (io_uring/rw.c,
/// REQ_F_NOWAIT), so no file keeps the flag.
fn clear_nonblock(descriptor: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(descriptor)?;
    rustix::fs::fcntl_setfl(descriptor, flags - OFlags::NONBLOCK)
}

/// Opens a regular file for which another program has a write lease (Samba, an NFS server's delegation): waits until that program
/// has given it up, or the kernel has taken it (`fs.lease-break-time`).
fn open_leased(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::io::retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))?;
    if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::RegularFile {
        return Err(Errno::AGAIN);
    }
    tracing::info!(path = %path.display(), "waiting for the program that has a lease on this file");
    // Without /proc it cannot be waited for.
    reopen(&found, OFlags::empty()).map_err(|errno| {
        if errno == Errno::NOENT {
            Errno::AGAIN
        } else {
            errno
        }
    })
}

/// Opens the file of a descriptor again. By name it could be another file by now.
fn reopen(descriptor: impl AsFd, further: OFlags) -> Result<OwnedFd, Errno> {
    let path = format!("{OWN_DESCRIPTORS}/{}", descriptor.as_fd().as_raw_fd());
    // Known to be a file or device to read, so that opening it needs no NONBLOCK.
    let flags = OPEN_FLAGS.difference(OFlags::NONBLOCK) | further;
    rustix::io::retry_on_intr(|| rustix::fs::open(&path, flags, Mode::empty()))
}

fn refusal(error: io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::INVAL) => "EINVAL".to_owned(),
        Some(_) | None => error.to_string(),
    }
}

/// A file type in words.
pub(super) fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a fifo",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Unknown => "of an unknown kind",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs direct I/O"]
    fn both_descriptors_are_of_one_file_whatever_its_name_leads_to() {
        // Scenario: the name is another file's, or nobody's, before the direct descriptor is opened.
        // Expectation: direct reads see the file that was opened.
        let program = std::env::current_exe().unwrap();
        let directory = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = directory.path().join("file");
        let next = directory.path().join("next");
        let options = OpenOptions {
            accept: Accept::FilesOnly,
            direct_io: DirectIo::Required,
            tried: None,
        };
        for replaced in [true, false] {
            std::fs::write(&path, [1; 4096]).unwrap();
            let descriptor = rustix::fs::open(&path, OPEN_FLAGS, Mode::empty()).unwrap();
            if replaced {
                std::fs::write(&next, [2; 4096]).unwrap();
                std::fs::rename(&next, &path).unwrap();
            } else {
                std::fs::remove_file(&path).unwrap();
            }
            let (file, _) = OpenFile::from_descriptor(descriptor, options).unwrap();
            let inode = |fd| rustix::fs::fstat(fd).unwrap().st_ino;
            assert_eq!(inode(file.direct_fd().unwrap()), inode(file.buffered_fd()));
            assert_eq!(Identity::of(file.buffered_fd()).unwrap(), file.identity);
        }
    }

    #[test]
    fn a_file_whose_last_sector_cannot_be_read_whole_is_not_read_directly() {
        // Scenario: a sparse file as long as one may be, on tmpfs. Expectation: no direct reads, of which the last one would fail
        // with EINVAL.
        let sparse = rustix::fs::memfd_create(c"sparse", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&sparse, FILE_BYTES_MAX).unwrap();
        let path = format!("{OWN_DESCRIPTORS}/{}", sparse.as_raw_fd());
        let file = OpenFile::open(path, DirectIo::Preferred).unwrap();
        assert_eq!(file.length_bytes(), FILE_BYTES_MAX);
        assert!(file.direct_fd().is_none());
    }
}
