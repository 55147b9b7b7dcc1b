//! How much of a file the page cache holds, for who examines a dataset: what the backend `auto` asks read by read.

use crate::backend::auto::cached_pages;
use std::io;
use std::os::fd::AsFd;

/// Pages of the first `length_bytes` of a file (or block device) that the page cache holds, by cachestat(2).
///
/// # Errors
/// ENOSYS: a kernel before 6.5, or a seccomp filter. EPERM: on kernels that keep one user's cache from another's eyes,
/// a file that is neither the caller's own nor writable for the caller.
pub fn resident_pages(file: impl AsFd, length_bytes: u64) -> io::Result<u64> {
    if length_bytes == 0 {
        // To cachestat a length of 0 is everything to the end.
        return Ok(0);
    }
    cached_pages(file.as_fd(), 0, length_bytes).map_err(io::Error::from_raw_os_error)
}
