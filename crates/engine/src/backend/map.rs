//! A read-only shared mapping of a whole file, and copies out of it that survive truncation and device errors.
//!
//! Invariants: the mapping covers the file's length at open and never changes; it lives as long as its
//! `OpenFile` (in the file's backend slot), which every attempt holds; Rust never references its bytes,
//! because other processes may write to the file: they leave it only through [`Mapping::copy_out`]. A copy
//! blocks its thread on a cold page, so a mapping belongs on a shard's own thread (TRAPS 18).

pub(crate) mod guard;

use crate::dataset::OpenFile;
use guard::Faulted;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// `vm.max_map_count` where it cannot be read: the kernel's default.
const MAPPINGS_DEFAULT: u64 = 65_530;

/// Pages whose state is queried by one call: those of a region of `residency`.
const STATES_AT_ONCE: usize = 512;

/// Files mapped by this process.
static MAPPED: AtomicU64 = AtomicU64::new(0);

/// A mapped file. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain shared memory, never referenced, only copied from; no part of it belongs to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` offers copies out of it and its addresses, nothing that changes it.
unsafe impl Sync for Mapping {}

/// A file that was refused for want of memory or of mappings is tried again after this long.
const TRIED_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// The mapping in a file's slot, or why there was none at first.
struct Attached(Result<Mapping, Refused>);

struct Refused {
    errno: i32,
    /// The last try.
    tried: Mutex<Instant>,
    /// Made by a later one.
    mapping: OnceLock<Mapping>,
}

impl Mapping {
    /// Maps the first `length_bytes` of a file. Length 0 maps nothing, and every copy is then of 0 bytes.
    ///
    /// # Errors
    /// errno of `sigaction` for the guard, or of `mmap` (ENODEV: the file system cannot map; ENOMEM: no
    /// address space, or too many mappings for `vm.max_map_count`).
    pub(crate) fn new(fd: BorrowedFd<'_>, length_bytes: u64) -> Result<Self, i32> {
        guard::install()?;
        // A length beyond the address space fails as mmap itself would.
        let length = usize::try_from(length_bytes).map_err(|_| libc::ENOMEM)?;
        if length == 0 {
            return Ok(Self {
                base: NonNull::dangling(),
                length,
            });
        }
        count_mapped()?;
        // SAFETY: no fixed address, so no existing mapping is replaced; the memory is never referenced by Rust.
        let mapped = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ,
                MapFlags::SHARED,
                fd,
                0,
            )
        };
        let base = mapped.map(|base| NonNull::new(base.cast::<u8>()));
        let Ok(Some(base)) = base else {
            MAPPED.fetch_sub(1, Ordering::Relaxed);
            return Err(base.map_or_else(rustix::io::Errno::raw_os_error, |_| libc::ENOMEM));
        };
        let mapping = Self { base, length };
        // Without this advice a single random read fetched 7 MB (MEASURED). Failure is harmless.
        // SAFETY: exactly the range mapped above; the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast::<c_void>(), length, Advice::Random) };
        Ok(mapping)
    }

    /// The mapping of an open file, made at the first call, or at a later one if there was no memory for it.
    ///
    /// # Errors
    /// errno as from [`Mapping::new`]; EBUSY if another backend has the file's slot.
    pub(crate) fn of(file: &OpenFile) -> Result<&Self, i32> {
        let slot = file.attached.get_or_init(|| {
            let mapped = Self::new(file.buffered_fd(), file.length_bytes());
            Box::new(Attached(mapped.map_err(Refused::now)))
        });
        match slot.downcast_ref::<Attached>() {
            Some(Attached(Ok(mapping))) => Ok(mapping),
            Some(Attached(Err(refused))) => refused.mapping(file),
            None => Err(libc::EBUSY),
        }
    }

    /// Copies up to `length` bytes from `offset`, fewer where the mapping ends. Returns the number copied.
    ///
    /// Bytes between the current end of the file and the end of its last page read as zeros without a fault:
    /// compare with the file's length *after* the copy.
    ///
    /// # Errors
    /// `Faulted`: a page is missing, or its device failed. `pread` tells which.
    ///
    /// # Safety
    /// `destination` is valid for writes of `length` bytes that nobody else uses meanwhile.
    pub(crate) unsafe fn copy_out(
        &self,
        offset: u64,
        destination: *mut u8,
        length: u32,
    ) -> Result<u32, Faulted> {
        let Some((start, length)) = self.clamp(offset, length) else {
            return Ok(0);
        };
        // SAFETY: `clamp` keeps start + length inside the mapping.
        let source = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: source as above, destination by the caller; a private buffer and a fresh mapping do not overlap;
        // `new` has installed the guard.
        unsafe { guard::copy_guarded(destination, source, length as usize) }?;
        Ok(length)
    }

    /// Whether bytes just copied from before `end` are certainly not zeros of a truncation, as far as can be
    /// seen without a system call; false if they may be. Touches the last page, which blocks if it is not
    /// resident.
    ///
    /// A truncation sets the new length, unmaps the pages behind it on all CPUs, and only then zeroes the
    /// rest of the new last page (`truncate_pagecache`; ext4, Btrfs, tmpfs, Linux 6.18). So while the
    /// mapping's last page can be read, no earlier one was zeroed. Worked: in a mapping of 10,000 bytes, page
    /// 2 (from 8192 on) vouches for pages 0 and 1; nothing vouches for page 2 itself.
    pub(crate) fn is_untruncated_before(&self, end: u64) -> bool {
        let Some(last) = self.length.checked_sub(1) else {
            return false;
        };
        if end > (last - last % rustix::param::page_size()) as u64 {
            return false;
        }
        // The copy must load before this does, also where TLBs are flushed without an interrupt (INVLPGB).
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 CPU has the instruction.
        unsafe {
            core::arch::x86_64::_mm_lfence();
        }
        let mut byte = 0_u8;
        // SAFETY: one byte, for one byte; `copy_out` keeps inside the mapping.
        unsafe { self.copy_out(last as u64, &raw mut byte, 1) }.is_ok()
    }

    /// Whether every page that holds these bytes is in memory and up to date (mincore(2)); false if unknown. To a process that
    /// neither owns the file nor may write to it the kernel says yes.
    pub(crate) fn is_up_to_date(&self, offset: u64, length: u32) -> bool {
        let Some((first, end)) = self.pages(offset, length) else {
            return false;
        };
        let page = rustix::param::page_size();
        let mut states = [0_u8; STATES_AT_ONCE];
        (first..end).step_by(STATES_AT_ONCE * page).all(|from| {
            let pages = ((end - from) / page).min(STATES_AT_ONCE);
            let address = std::ptr::with_exposed_provenance_mut(from);
            // SAFETY: the call only reads the state of pages; `states` has a byte for each of them.
            let result = unsafe { libc::mincore(address, pages * page, states.as_mut_ptr()) };
            // The other bits are reserved.
            result == 0 && states.iter().take(pages).all(|state| state & 1 == 1)
        })
    }

    /// Makes the CPU look up the page at `offset` and load its first bytes while it copies others: in a large
    /// mapping neither its translation nor its bytes are cached, and a copy of one block would wait for both.
    /// A hint, which never faults.
    pub(crate) fn prefetch(&self, offset: u64) {
        #[cfg(target_arch = "x86_64")]
        if let Some((start, _)) = self.clamp(offset, 1) {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let address = self.base.as_ptr().wrapping_add(start).cast::<i8>();
            // SAFETY: every x86-64 CPU has the instruction, and it accepts any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    /// The whole pages, as addresses (first, one past the last), that hold `length` bytes from `offset`;
    /// `None` if the mapping holds none of them. With 4096-byte pages, 100 bytes from 4090 lie on pages 0 and
    /// 1: 0..8192.
    pub(crate) fn pages(&self, offset: u64, length: u32) -> Option<(usize, usize)> {
        let (start, length) = self.clamp(offset, length)?;
        let page = rustix::param::page_size();
        let base = self.base.as_ptr().addr();
        let first = start - start % page;
        let end = (start + length as usize).next_multiple_of(page);
        Some((base + first, base + end))
    }

    /// The part of an extent that is mapped; `None` for no bytes.
    fn clamp(&self, offset: u64, length: u32) -> Option<(usize, u32)> {
        let start = usize::try_from(offset).ok()?;
        let left = self.length.checked_sub(start)?;
        let length = u32::try_from(left).map_or(length, |left| length.min(left));
        (length > 0).then_some((start, length))
    }
}

impl Refused {
    fn now(errno: i32) -> Self {
        Self {
            errno,
            tried: Mutex::new(Instant::now()),
            mapping: OnceLock::new(),
        }
    }

    /// The mapping, if a later try has made it or this one does. A file of blocks stays open for as long as the daemon runs, and
    /// `vm.max_map_count` may have been raised.
    fn mapping(&self, file: &OpenFile) -> Result<&Mapping, i32> {
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        if !matches!(self.errno, libc::ENOMEM | libc::EAGAIN) {
            return Err(self.errno);
        }
        // Another thread is trying.
        let Ok(mut tried) = self.tried.try_lock() else {
            return Err(self.errno);
        };
        if tried.elapsed() < TRIED_AGAIN_AFTER {
            return Err(self.errno);
        }
        *tried = Instant::now();
        let mapping = Mapping::new(file.buffered_fd(), file.length_bytes())?;
        Ok(self.mapping.get_or_init(|| mapping))
    }
}

/// Counts one file more, of at most seven eighths of the mappings that a process may have. Without a mapping left for a
/// stack no thread starts, and the allocator that gets none for its heap ends the process.
///
/// # Errors
/// ENOMEM.
fn count_mapped() -> Result<(), i32> {
    static MOST: AtomicU64 = AtomicU64::new(0);
    let before = MAPPED.fetch_add(1, Ordering::Relaxed);
    if before < MOST.load(Ordering::Relaxed) {
        return Ok(());
    }
    // Not known yet, or perhaps raised meanwhile.
    let limit = ringfetch_host::View::real().number("proc/sys/vm/max_map_count");
    let most = limit.unwrap_or(MAPPINGS_DEFAULT) / 8 * 7;
    MOST.store(most, Ordering::Relaxed);
    if before < most {
        return Ok(());
    }
    MAPPED.fetch_sub(1, Ordering::Relaxed);
    Err(libc::ENOMEM)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: exactly the range that `new` mapped; nobody holds an address into it, since every copy borrows
            // the mapping.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.length) };
            MAPPED.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
