//! A slow, faulty, counting disk for tests: a read-only FUSE pass-through of one file or directory.
//!
//! # What it does
//! Every read waits for one of [`Parameters::concurrency`] slots, takes a latency that the parameters set, and may
//! fail or come back short. Parameters can change while the disk is mounted. The disk counts and records the reads
//! that reach it, so a test can say how many device reads a request cost without trusting the server's own metrics.
//!
//! ```no_run
//! # fn example() -> Result<(), slowdisk::Error> {
//! use slowdisk::{Parameters, SlowDisk};
//! use std::path::Path;
//! use std::time::Duration;
//!
//! let parameters = Parameters { latency: Duration::from_millis(2), concurrency: 64, ..Parameters::default() };
//! let disk = SlowDisk::mount(Path::new("data.bin"), Path::new("mnt"), &parameters)?;
//! // Read `disk.path()`: buffered, with O_DIRECT, through io_uring, through a mapping.
//! disk.set(|parameters| parameters.error_probability = 0.1)?;
//! disk.hold(); // reads arrive and none is answered ...
//! disk.wait_until(Duration::from_secs(5), |reads| reads.arrived >= 1);
//! disk.release(); // ... until now
//! println!("{:?}", disk.reads());
//! # Ok(()) } // unmounts on drop, also while a panic unwinds
//! ```
//!
//! # What the kernel does
//! - An `O_DIRECT` read reaches the disk as it is, split at 1 MiB (`fs.fuse.max_pages_limit`). Direct reads through
//!   io_uring are asynchronous; up to 65,535 may be in flight, so the kernel's background limit is above any queue
//!   depth.
//! - Buffered reads and page faults reach the disk as the page cache asks for them, in whole pages and with its
//!   readahead. Opening a file keeps its cached pages.
//! - Short reads are injected only into direct reads, and reach the reader as they are: a file opened with `O_DIRECT`
//!   bypasses the page cache entirely (`FOPEN_DIRECT_IO`). The kernel takes a short buffered read for the end of the
//!   file and cuts the file's length.
//!
//! # What it does not do
//! Look-ups and attributes are answered at once. Symbolic links and other file systems below the source are not
//! shown. The time that the source itself takes is added to the latency: keep the source in the page cache, where a
//! read of 4 KiB costs a few microseconds.
//!
//! A process that is killed leaves its mount behind; `umount -l` removes it.
#![forbid(unsafe_code)]

mod counts;
mod device;
mod error;
mod faults;
mod mount;
mod parameters;
mod passthrough;
mod schedule;

pub use counts::{Outcome, ReadRecord, Reads};
pub use error::Error;
pub use mount::SlowDisk;
pub use parameters::Parameters;
