//! Whether, and at which alignment, a file takes O_DIRECT: asked with statx, then tried with a real read.
//!
//! A refusal (EINVAL, EOPNOTSUPP, no usable alignment) is an answer; running out of descriptors or a device error is
//! an error, never silently a buffered dataset. Absent: the decision for a whole dataset, which its opener takes.

use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

/// Where statx does not say: the page size, a multiple of every sector size in use.
const ALIGNMENT_ASSUMED: u32 = 4096;

/// Response memory and the longest read are multiples of this (see `EngineConfig`), so nothing coarser can be kept.
const ALIGNMENT_MAX: u32 = 4096;

/// `f_type` of tmpfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// What direct reads of a file must be aligned to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Alignment {
    pub(super) offset_bytes: u32,
    pub(super) memory_bytes: u32,
    /// Who says so.
    pub(super) source: &'static str,
}

impl Alignment {
    /// Buffered reads need none.
    pub(super) const NONE: Self = Self {
        offset_bytes: 1,
        memory_bytes: 1,
        source: "",
    };

    /// The coarser of both, with the first one's source.
    pub(super) fn coarser(self, other: Self) -> Self {
        Self {
            offset_bytes: self.offset_bytes.max(other.offset_bytes),
            memory_bytes: self.memory_bytes.max(other.memory_bytes),
            source: self.source,
        }
    }
}

/// The kernel's word on a file that is open with O_DIRECT; `Err` is the reason of a refusal.
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
            }
        }
        None => Alignment {
            offset_bytes: ALIGNMENT_ASSUMED,
            memory_bytes: ALIGNMENT_ASSUMED,
            source: "assumed (statx does not say)",
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

/// STATX_DIOALIGN, kernel >= 6.1 (statx(2)): both values are 0 where the file takes no direct I/O. For a block device
/// a 0 says nothing: kernels before 6.11 answer for the file system that holds the device node.
fn statx_alignment(file: &File, is_block_device: bool) -> Result<Option<Alignment>, String> {
    let Ok(found) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(None);
    };
    if found.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(None);
    }
    match (found.stx_dio_offset_align, found.stx_dio_mem_align) {
        (0, _) | (_, 0) if is_block_device => Ok(None),
        (0, _) | (_, 0) => Err("statx says that it takes none".to_owned()),
        (offset_bytes, memory_bytes) => Ok(Some(Alignment {
            offset_bytes,
            memory_bytes,
            source: "from statx",
        })),
    }
}

/// Reads one aligned block at offset 0 past the page cache, into memory that is aligned to exactly what was told and
/// no better, so that a wrong figure shows here and not in a reader's answer.
pub(super) fn trial_read(direct: &File, alignment: Alignment) -> std::io::Result<()> {
    let (block, memory) = (alignment.offset_bytes as usize, alignment.memory_bytes as usize);
    let mut room = vec![0u8; block + 3 * memory];
    // With memory = 512: the next multiple of 1024, plus 512, is a multiple of 512 and not of 1024.
    let start = room.as_ptr().align_offset(2 * memory).saturating_add(memory);
    let Some(place) = room.get_mut(start..start.saturating_add(block)) else {
        return Ok(());
    };
    loop {
        match direct.read_at(place, 0) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            result => return result.map(|_| ()),
        }
    }
}

/// Whether an errno means "this file takes no O_DIRECT", as opposed to a failure.
pub(super) fn is_refusal(error: &std::io::Error) -> bool {
    let refused = [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOTSUP].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|errno| refused.contains(&errno))
}

/// Whether a file lives in memory: a "direct" read of it measures no device.
pub(super) fn is_on_tmpfs(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| u64::try_from(found.f_type) == Ok(TMPFS_MAGIC))
}
