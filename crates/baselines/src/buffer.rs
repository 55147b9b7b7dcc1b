//! Page-aligned memory, as O_DIRECT requires.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

const PAGE_BYTES: usize = 4096;
/// From this size on, memory comes from the kernel and returns to it at once: an allocator would keep some of
/// it, in addition to the next step's.
const MAPPED_BYTES_MIN: usize = 128 << 10;

/// Zeroed memory that begins on a page boundary.
#[derive(Debug)]
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
    /// Its number among a ring's registered buffers.
    pub(crate) registered: Option<u16>,
}

impl Buffer {
    /// A new buffer; its length is rounded up to whole pages, at least one.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn zeroed(length: usize) -> io::Result<Self> {
        let refused = || io::Error::from(io::ErrorKind::OutOfMemory);
        let length = length
            .max(1)
            .checked_next_multiple_of(PAGE_BYTES)
            .ok_or_else(refused)?;
        let layout = Layout::from_size_align(length, PAGE_BYTES).map_err(|_| refused())?;
        let start = if length < MAPPED_BYTES_MIN {
            // SAFETY: the layout has at least one page.
            unsafe { alloc_zeroed(layout) }
        } else {
            let (access, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            // SAFETY: new memory, at an address that the kernel chooses.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
            if start == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            start.cast()
        };
        Ok(Self {
            start: NonNull::new(start).ok_or_else(refused)?,
            layout,
            registered: None,
        })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this layout, zeroed, and only this value refers to it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let (start, length) = (self.start.as_ptr(), self.layout.size());
        if length < MAPPED_BYTES_MIN {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(start, self.layout) };
        } else {
            // SAFETY: mapped with this length, and unmapped once.
            let _unmapped = unsafe { libc::munmap(start.cast(), length) };
        }
    }
}

// SAFETY: it owns its memory, as a boxed slice does.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Buffer {}
