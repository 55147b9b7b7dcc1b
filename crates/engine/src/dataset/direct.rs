//! The alignment at which a file supports O_DIRECT, as the kernel announces it through statx. `trial` checks
//! that.
//!
//! A refusal (EINVAL, EOPNOTSUPP, no usable alignment) is a result. Running out of descriptors, or a device
//! error, is an error: it must never silently make a dataset buffered. `open` decides for a whole dataset.

use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsFd;

/// If statx does not tell: the page size, a multiple of every sector size in use.
const ALIGNMENT_ASSUMED: u32 = 4096;

/// Response memory and the longest read are multiples of this (see `EngineConfig`), so nothing coarser is
/// possible.
pub(crate) const ALIGNMENT_MAX: u32 = 4096;

/// `f_type` of tmpfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// `f_type` of ext4 (and of ext2 and ext3, which its driver mounts) and of XFS (statfs(2)).
const EXT4_MAGIC: u64 = 0xEF53;
const XFS_MAGIC: u64 = 0x5846_5342;

/// [`Alignment::source`] if the kernel announces it.
const FROM_STATX: &str = "from statx";

/// What direct reads of a file must be aligned to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Alignment {
    pub(super) offset_bytes: u32,
    pub(super) memory_bytes: u32,
    /// Where the figures come from.
    pub(super) source: &'static str,
    /// A memory alignment that was announced and failed its trial, and how.
    pub(super) disproved: Option<(u32, Misread)>,
}

impl Alignment {
    /// Buffered reads need none.
    pub(super) const NONE: Self = Self {
        offset_bytes: 1,
        memory_bytes: 1,
        source: "",
        disproved: None,
    };

    /// The coarser of both, with the first one's source.
    pub(super) fn coarser(self, other: Self) -> Self {
        Self {
            offset_bytes: self.offset_bytes.max(other.offset_bytes),
            memory_bytes: self.memory_bytes.max(other.memory_bytes),
            source: self.source,
            disproved: self.disproved.or(other.disproved),
        }
    }
}

/// What was wrong with a direct read that was tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Misread {
    /// The kernel refused the memory's alignment.
    Refused,
    /// Other bytes than a buffered read returns.
    WrongBytes,
    /// Bytes outside of the destination changed.
    OverwroteNeighbours,
}

impl std::fmt::Display for Misread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Refused => "is refused",
            Self::WrongBytes => "gets wrong bytes",
            Self::OverwroteNeighbours => "has the bytes around it overwritten",
        })
    }
}

/// The alignment that the kernel announces for a file open with O_DIRECT; `Err` is the reason of a refusal.
pub(super) fn alignment(file: &File, is_block_device: bool) -> Result<Alignment, String> {
    let told = statx_alignment(file, is_block_device)?;
    let found = match told {
        Some(found) => found,
        None if is_block_device => {
            let sector = rustix::fs::ioctl_blksszget(file).unwrap_or(ALIGNMENT_ASSUMED);
            Alignment {
                offset_bytes: sector,
                memory_bytes: sector,
                source: "from the device's sector size",
                disproved: None,
            }
        }
        None => Alignment {
            offset_bytes: ALIGNMENT_ASSUMED,
            memory_bytes: ALIGNMENT_ASSUMED,
            source: "assumed (statx does not say)",
            disproved: None,
        },
    };
    let usable = |bytes: u32| bytes.is_power_of_two() && bytes <= ALIGNMENT_MAX;
    if usable(found.offset_bytes) && usable(found.memory_bytes) {
        Ok(found)
    } else {
        Err(format!(
            "it needs {}-byte offsets and {}-byte memory, {}; powers of two up to {ALIGNMENT_MAX} can be kept",
            found.offset_bytes, found.memory_bytes, found.source
        ))
    }
}

/// STATX_DIOALIGN, kernel >= 6.1 (statx(2)): both values are 0 if the file does not support direct I/O. For a
/// block device 0 says nothing: kernels before 6.11 report the file system that holds the device node.
fn statx_alignment(file: &File, is_block_device: bool) -> Result<Option<Alignment>, String> {
    let Ok(found) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(None);
    };
    if found.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(None);
    }
    match (found.stx_dio_offset_align, found.stx_dio_mem_align) {
        (0, _) | (_, 0) if is_block_device => Ok(None),
        (0, _) | (_, 0) => Err("statx reports none".to_owned()),
        (offset_bytes, memory_bytes) => Ok(Some(Alignment {
            offset_bytes,
            memory_bytes,
            source: FROM_STATX,
            disproved: None,
        })),
    }
}

/// Whether an errno means "no O_DIRECT on this file", as opposed to a failure.
pub(super) fn is_refusal(error: &std::io::Error) -> bool {
    let refused = [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOTSUP].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|errno| refused.contains(&errno))
}

/// Whether direct reads of a file and its truncation exclude each other. Elsewhere a direct read may be
/// served from the page cache, and then finds zeros while the file is being truncated (Btrfs with
/// compression, kernel 6.18: 2 of 37,766 reads of 1 MiB; ext4 and XFS none).
///
/// ext4 and XFS hold the inode's lock during a direct read. ext4 falls back to the page cache for some files
/// (encrypted, verity, journalled data), but statx reports that these do not support direct I/O. Devices are
/// not truncated.
pub(super) fn excludes_truncation(file: &File, is_block_device: bool, alignment: Alignment) -> bool {
    let locks = || {
        let found = rustix::fs::fstatfs(file).ok()?;
        let magic = u64::try_from(found.f_type).ok()?;
        Some(matches!(magic, EXT4_MAGIC | XFS_MAGIC))
    };
    is_block_device || (alignment.source == FROM_STATX && locks().unwrap_or(false))
}

/// Whether a file is in memory: a "direct" read of it measures no device.
pub(super) fn is_on_tmpfs(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| u64::try_from(found.f_type) == Ok(TMPFS_MAGIC))
}
