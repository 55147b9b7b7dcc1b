//! The file system: passes names and attributes of the source through, and hands reads to the device.
//!
//! Inode numbers are the source's own, so that a file keeps its identity while the kernel forgets it and
//! looks it up again. Attributes are never cached: a truncated or replaced file is seen at once.

use crate::device::Device;
use crate::parameters::CONCURRENCY_MAX;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, Request,
};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// `O_DIRECT` of the open flags, from rustix for every architecture.
const DIRECT: u32 = rustix::fs::OFlags::DIRECT.bits();

/// A file or directory that the kernel knows.
struct Node {
    path: PathBuf,
    lookups: u64,
}

enum Open {
    File {
        file: Arc<File>,
        /// Opened past the page cache, so that each read is the reader's own.
        direct: bool,
    },
    Directory(Vec<(u64, FileType, OsString)>),
}

/// The file system of one mount.
pub(crate) struct Passthrough {
    device: Arc<Device>,
    root: PathBuf,
    root_device: u64,
    /// The only visible name, if the source is a file.
    only: Option<OsString>,
    nodes: Mutex<HashMap<u64, Node>>,
    opened: Mutex<HashMap<u64, Arc<Open>>>,
    next_handle: AtomicU64,
}

impl Passthrough {
    /// Shows `source`, a directory or a regular file, both with a canonical path.
    pub(crate) fn new(source: &Path, device: Arc<Device>) -> io::Result<Self> {
        let metadata = fs::metadata(source)?;
        let (root, only) = if metadata.is_dir() {
            (source.to_path_buf(), None)
        } else if metadata.is_file() {
            let parts = source.parent().zip(source.file_name());
            let (parent, name) = parts.ok_or(io::ErrorKind::InvalidInput)?;
            (parent.to_path_buf(), Some(name.to_owned()))
        } else {
            return Err(io::Error::other("neither a regular file nor a directory"));
        };
        Ok(Self {
            device,
            root,
            root_device: metadata.dev(),
            only,
            nodes: Mutex::new(HashMap::new()),
            opened: Mutex::new(HashMap::new()),
            next_handle: AtomicU64::new(1),
        })
    }

    fn path_of(&self, inode: INodeNo) -> io::Result<PathBuf> {
        if inode == INodeNo::ROOT {
            return Ok(self.root.clone());
        }
        let nodes = lock(&self.nodes);
        let node = nodes.get(&inode.0).ok_or(rustix::io::Errno::STALE)?;
        Ok(node.path.clone())
    }

    fn child(&self, parent: INodeNo, name: &OsStr) -> io::Result<(PathBuf, Metadata)> {
        let hidden = parent == INodeNo::ROOT && self.only.as_deref().is_some_and(|only| only != name);
        if hidden {
            return Err(rustix::io::Errno::NOENT.into());
        }
        let path = self.path_of(parent)?.join(name);
        let metadata = fs::symlink_metadata(&path)?;
        if kind(&metadata).is_none() || metadata.dev() != self.root_device {
            return Err(rustix::io::Errno::NOENT.into());
        }
        Ok((path, metadata))
    }

    fn enter(&self, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let (path, metadata) = self.child(parent, name)?;
        let attributes = attributes(inode_of(&metadata), &metadata);
        let mut nodes = lock(&self.nodes);
        let node = nodes.entry(attributes.ino.0).or_insert_with(|| Node {
            path: PathBuf::new(),
            lookups: 0,
        });
        node.path = path;
        node.lookups = node.lookups.saturating_add(1);
        Ok(attributes)
    }

    fn stat(&self, inode: INodeNo, handle: Option<FileHandle>) -> io::Result<FileAttr> {
        if let Some(Open::File { file, .. }) = handle.and_then(|handle| self.open_at(handle)).as_deref() {
            return Ok(attributes(inode.0, &file.metadata()?));
        }
        let metadata = fs::symlink_metadata(self.path_of(inode)?)?;
        if inode != INodeNo::ROOT && inode_of(&metadata) != inode.0 {
            // Another file has taken the name.
            return Err(rustix::io::Errno::STALE.into());
        }
        Ok(attributes(inode.0, &metadata))
    }

    fn names_work(&self) -> io::Result<()> {
        match self.device.parameters().names_errno {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn list(&self, inode: INodeNo) -> io::Result<Vec<(u64, FileType, OsString)>> {
        let mut entries = vec![
            (inode.0, FileType::Directory, OsString::from(".")),
            (inode.0, FileType::Directory, "..".into()),
        ];
        for entry in fs::read_dir(self.path_of(inode)?)? {
            let name = entry?.file_name();
            // Entries that `lookup` would refuse are not listed.
            if let Ok((_, metadata)) = self.child(inode, &name)
                && let Some(kind) = kind(&metadata)
            {
                entries.push((inode_of(&metadata), kind, name));
            }
        }
        Ok(entries)
    }

    fn keep(&self, open: Open) -> FileHandle {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        lock(&self.opened).insert(handle, Arc::new(open));
        FileHandle(handle)
    }

    fn open_at(&self, handle: FileHandle) -> Option<Arc<Open>> {
        lock(&self.opened).get(&handle.0).cloned()
    }
}

impl Filesystem for Passthrough {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let missing = |what| io::Error::other(format!("the kernel's FUSE lacks {what}"));
        // Otherwise a direct read through io_uring would block the kernel's worker thread.
        config
            .add_capabilities(InitFlags::FUSE_ASYNC_DIO)
            .map_err(|_| missing("asynchronous direct I/O"))?;
        config
            .add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP)
            .map_err(|_| missing("mappings of direct files"))?;
        let background = u16::try_from(CONCURRENCY_MAX).unwrap_or(u16::MAX);
        config
            .set_max_background(background)
            .map_err(|_| missing("a background limit"))?;
        config
            .set_congestion_threshold(background)
            .map_err(|_| missing("a congestion threshold"))?;
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.names_work().and_then(|()| self.enter(parent, name)) {
            Ok(attributes) => {
                let generation = Generation(self.device.parameters().generation);
                reply.entry(&Duration::ZERO, &attributes, generation);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn forget(&self, _: &Request, inode: INodeNo, lookups: u64) {
        let mut nodes = lock(&self.nodes);
        if let Some(node) = nodes.get_mut(&inode.0) {
            node.lookups = node.lookups.saturating_sub(lookups);
            if node.lookups == 0 {
                nodes.remove(&inode.0);
            }
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.stat(inode, handle) {
            Ok(attributes) => self.device.attributes(reply, attributes),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, asked: OpenFlags, reply: ReplyOpen) {
        let mut flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
        let direct = u32::from_ne_bytes(asked.0.to_ne_bytes()) & DIRECT != 0;
        if direct {
            // O_DIRECT alone is not enough: the kernel continues a short direct read through the page cache, and takes
            // a second short one for the end of the file.
            flags |= FopenFlags::FOPEN_DIRECT_IO;
        }
        match self
            .names_work()
            .and_then(|()| self.path_of(inode))
            .and_then(File::open)
        {
            Ok(file) => reply.opened(
                self.keep(Open::File {
                    file: Arc::new(file),
                    direct,
                }),
                flags,
            ),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let open = self.open_at(handle);
        let Some(Open::File { file, direct }) = open.as_deref() else {
            return reply.error(Errno::EBADF);
        };
        if self.device.parameters().loses_replaced && self.stat(inode, None).is_err() {
            return reply.error(Errno::ESTALE);
        }
        // A page fault or a read ahead goes through the page cache, whatever the open; only the kernel's direct reads
        // have an owner (`fuse_send_read`). A short reply to the others would show zeros up to the end of the file.
        let direct = *direct && owner.is_some();
        self.device
            .arrive(Arc::clone(file), (offset, size), direct, reply);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.opened).remove(&handle.0);
        reply.ok();
    }

    fn opendir(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.list(inode) {
            Ok(entries) => reply.opened(self.keep(Open::Directory(entries)), FopenFlags::empty()),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let open = self.open_at(handle);
        let Some(Open::Directory(entries)) = open.as_deref() else {
            return reply.error(Errno::EBADF);
        };
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for ((inode, kind, name), next) in entries.iter().zip(1_u64..).skip(skip) {
            if reply.add(INodeNo(*inode), next, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        lock(&self.opened).remove(&handle.0);
        reply.ok();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(0))
}

/// The source's number, except that 1 is FUSE's root.
fn inode_of(metadata: &Metadata) -> u64 {
    if metadata.ino() == INodeNo::ROOT.0 {
        u64::MAX
    } else {
        metadata.ino()
    }
}

/// Regular files and directories; nothing else is shown.
fn kind(metadata: &Metadata) -> Option<FileType> {
    if metadata.is_file() {
        Some(FileType::RegularFile)
    } else if metadata.is_dir() {
        Some(FileType::Directory)
    } else {
        None
    }
}

fn attributes(inode: u64, metadata: &Metadata) -> FileAttr {
    let at = |time: io::Result<SystemTime>| time.unwrap_or(SystemTime::UNIX_EPOCH);
    let changed = u64::try_from(metadata.ctime()).ok().map(Duration::from_secs);
    let changed_nanos = u64::try_from(metadata.ctime_nsec()).unwrap_or(0);
    let changed = changed
        .unwrap_or_default()
        .saturating_add(Duration::from_nanos(changed_nanos));
    let narrow = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    FileAttr {
        ino: INodeNo(inode),
        size: metadata.size(),
        blocks: metadata.blocks(),
        atime: at(metadata.accessed()),
        mtime: at(metadata.modified()),
        ctime: SystemTime::UNIX_EPOCH
            .checked_add(changed)
            .unwrap_or(SystemTime::UNIX_EPOCH),
        crtime: SystemTime::UNIX_EPOCH,
        kind: kind(metadata).unwrap_or(FileType::RegularFile),
        perm: u16::try_from(metadata.mode() & 0o7777).unwrap_or(0),
        nlink: narrow(metadata.nlink()),
        uid: metadata.uid(),
        gid: metadata.gid(),
        rdev: 0,
        blksize: narrow(metadata.blksize()),
        flags: 0,
    }
}
