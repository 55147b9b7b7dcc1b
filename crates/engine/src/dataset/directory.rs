//! Resolves names beneath one directory, and never outside it: the kernel (openat2, RESOLVE_BENEATH) refuses
//! `..`, absolute names and links that leave it; the text is not examined.
//!
//! If openat2 is unavailable (kernel < 5.6, or an older seccomp filter), each part is opened in turn without
//! following links: then no link works at all, inside or not.

use super::file::{FileError, OPEN_FLAGS, describe};
use super::identity::Identity;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// openat2 returns EAGAIN if a rename beneath the directory raced with a `..` of a link (openat2(2)).
const RACED_ATTEMPTS: u32 = 32;

/// A directory whose files may be opened by name.
#[derive(Debug)]
pub(super) struct Directory {
    root: OwnedFd,
    resolver: Resolver,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resolver {
    Openat2,
    Walk,
}

impl Directory {
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let root = rustix::io::retry_on_intr(|| rustix::fs::open(path, OPEN_FLAGS, Mode::empty()))?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&root)?.st_mode);
        if kind != FileType::Directory {
            return Err(FileError::NotAFile(describe(kind)));
        }
        // One real attempt: a filter may return EPERM or ENOSYS on any kernel version.
        let mut directory = Self {
            root,
            resolver: Resolver::Openat2,
        };
        match directory.open_beneath(".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC) {
            Ok(_) => {}
            Err(Errno::NOSYS | Errno::PERM | Errno::TOOBIG | Errno::INVAL) => {
                tracing::warn!(
                    path = %path.display(),
                    "openat2 is unavailable: symbolic links in this objects directory are not followed"
                );
                directory.resolver = Resolver::Walk;
            }
            Err(errno) => return Err(errno.into()),
        }
        Ok(directory)
    }

    #[cfg(test)]
    pub(super) fn with_resolver(mut self, resolver: Resolver) -> Self {
        self.resolver = resolver;
        self
    }

    pub(super) fn identity(&self) -> Result<Identity, Errno> {
        Identity::of(&self.root)
    }

    /// Device, inode and mount. What is mounted below a directory belongs to its mount: a file system that is unmounted and
    /// mounted again is the same while it is in use, and has nothing mounted below by the old way. The mount is 0 before
    /// Linux 5.8.
    pub(super) fn place(&self) -> Result<(u64, u64, u64), Errno> {
        let found = rustix::fs::fstat(&self.root)?;
        let mount = rustix::fs::statx(&self.root, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID);
        let known = mount
            .ok()
            .filter(|mount| mount.stx_mask & StatxFlags::MNT_ID.bits() != 0);
        Ok((
            found.st_dev,
            found.st_ino,
            known.map_or(0, |mount| mount.stx_mnt_id),
        ))
    }

    /// Opens an object to read it; whoever opens its descriptor finds out whether it is a file.
    pub(super) fn open_object(&self, name: &str) -> Result<OwnedFd, FileError> {
        self.open_beneath(name, OPEN_FLAGS).map_err(|errno| match errno {
            // A socket, or a node without its device; or else the file system has lost its own.
            Errno::NXIO | Errno::NODEV => match self.stat_beneath(name) {
                Ok((FileType::RegularFile, _)) => errno.into(),
                Ok((kind, _)) => FileError::NotAFile(describe(kind)),
                Err(errno) => errno.into(),
            },
            errno => errno.into(),
        })
    }

    /// Opens the target of a relative name. `.` is the directory itself.
    pub(super) fn open_beneath(&self, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        match self.resolver {
            Resolver::Openat2 => self.open_resolved(name, flags),
            Resolver::Walk => self.open_walking(name, flags),
        }
    }

    fn open_resolved(&self, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut left = RACED_ATTEMPTS;
        loop {
            match rustix::fs::openat2(&self.root, name, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) if left > 0 => left -= 1,
                result => return result,
            }
        }
    }

    fn open_walking(&self, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let step = |at: BorrowedFd<'_>, part: &str, flags: OFlags| {
            if part == ".." {
                return Err(Errno::XDEV);
            }
            rustix::io::retry_on_intr(|| {
                rustix::fs::openat(at, part, flags | OFlags::NOFOLLOW, Mode::empty())
            })
        };
        let between = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at: Option<OwnedFd> = None;
        let mut rest = name;
        while let Some((part, after)) = rest.split_once('/') {
            let here = at.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
            at = Some(step(here, part, between)?);
            rest = after;
        }
        let last = step(at.as_ref().map_or(self.root.as_fd(), AsFd::as_fd), rest, flags)?;
        // With O_PATH, NOFOLLOW opens the link itself.
        if FileType::from_raw_mode(rustix::fs::fstat(&last)?.st_mode) == FileType::Symlink {
            return Err(Errno::LOOP);
        }
        Ok(last)
    }

    /// Type and length in bytes of a name's target.
    pub(super) fn stat_beneath(&self, name: &str) -> Result<(FileType, u64), Errno> {
        let descriptor = self.open_beneath(name, OFlags::PATH | OFlags::CLOEXEC)?;
        let found = rustix::fs::fstat(&descriptor)?;
        Ok((
            FileType::from_raw_mode(found.st_mode),
            u64::try_from(found.st_size).unwrap_or(0),
        ))
    }

    /// The entries of a directory beneath it; the name ends in `/`, or is empty for the directory itself. A
    /// link in the last part is not followed.
    pub(super) fn read_beneath(&self, prefix: &str) -> Result<Dir, Errno> {
        let name = prefix.strip_suffix('/').unwrap_or(".");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Dir::new(self.open_beneath(name, flags)?)
    }
}

/// Whether an errno means that the daemon has no permission.
pub(super) fn is_forbidden(errno: Errno) -> bool {
    matches!(errno, Errno::ACCESS | Errno::PERM)
}

/// Whether an errno means that no descriptor is left, which says nothing about the file.
pub(super) fn is_out_of_descriptors(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE)
}

/// Whether an errno means that there is no such file inside the directory, for whatever cause: nothing there,
/// a file used as a directory, a link that leaves or loops, an impossible name.
pub(super) fn is_absent(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::NOENT | Errno::NOTDIR | Errno::XDEV | Errno::LOOP | Errno::NAMETOOLONG | Errno::ISDIR
    )
}
