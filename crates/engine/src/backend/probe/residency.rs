//! How much of a file the page cache holds, for examining a dataset; the backend `auto` queries this per read.

use crate::backend::residency::cached_pages;
use std::io;
use std::os::fd::AsFd;

/// Pages of the first `length_bytes` of a file (or block device) that the page cache holds, by cachestat(2).
///
/// # Errors
/// ENOSYS: a kernel before 6.5, or a seccomp filter. EPERM: the kernel reports residency only to a file's owner, or to
/// a caller who may write to it.
pub fn resident_pages(file: impl AsFd, length_bytes: u64) -> io::Result<u64> {
    if length_bytes == 0 {
        // For cachestat a length of 0 means everything to the end.
        return Ok(0);
    }
    cached_pages(file.as_fd(), 0, length_bytes).map_err(io::Error::from_raw_os_error)
}
