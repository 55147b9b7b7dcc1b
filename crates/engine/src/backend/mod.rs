//! A backend makes one attempt at a read: fill this memory from that place. It may return short. Continuation,
//! end-of-file rules, errno mapping and metrics are in `shard`, once for all backends.

use crate::dataset::{HeldFile, OpenFile};
use crate::shard::IN_FLIGHT_BYTES_MAX;
use residency::Residency;
use std::sync::Arc;
use std::task::{Context, Poll};

/// One attempt at one read.
///
/// The memory at `destination` belongs to the shard that started the attempt. It stays allocated, and only the backend
/// accesses it, until the attempt is reported as finished; the shard upholds that (it leaks the memory rather than free
/// it earlier).
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    /// Chosen by the shard, below [`Backend::slots`], and returned in [`Completion`]. Unique among attempts in flight.
    pub(crate) slot: u32,
    /// What to read from. The attempt holds it, so the descriptor cannot be closed and reused under it.
    pub(crate) file: HeldFile,
    /// Whether to bypass the page cache. Offset, length and memory are then aligned as the file requires.
    pub(crate) direct: bool,
    /// Whether backend `auto` may copy it from the page cache instead.
    pub(crate) may_copy: bool,
    /// What is known about the residency of its bytes.
    pub(crate) residency: Residency,
    /// File offset.
    pub(crate) offset: u64,
    /// Where to put the bytes.
    pub(crate) destination: *mut u8,
    /// How many.
    pub(crate) length: u32,
}

/// A finished attempt: bytes read (0 is end of file), or errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) slot: u32,
    pub(crate) result: Result<u32, i32>,
}

/// Where an attempt's bytes come from, as far as the backend knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadSource {
    /// From the device, or wherever the kernel finds them.
    Device,
    /// From the page cache, by a copy.
    PageCache,
}

/// Makes attempts. A shard drives exactly one backend, from one thread; it never has more attempts in flight than
/// [`Backend::slots`].
pub(crate) trait Backend {
    /// Introduces files that will be read often and stay open until they are forgotten: those of a dataset's
    /// address space. Returns those that are to be forgotten, by [`OpenFile`]'s `id`.
    fn introduce(&mut self, files: &[Arc<OpenFile>]) -> Vec<u64> {
        let _ = files;
        Vec::new()
    }

    /// Forgets such files: they will not be read again.
    fn forget(&mut self, files: &[u64]) {
        let _ = files;
    }

    /// Announces reads that are about to be started to the kernel. A hint: may do nothing.
    fn announce(&mut self, attempts: &[Attempt]) {
        let _ = attempts;
    }

    /// Bytes in flight beyond which the shard starts no further read.
    fn in_flight_bytes_max(&self) -> u64 {
        IN_FLIGHT_BYTES_MAX
    }

    /// Most reads in flight, up to `depth`, while several callers have reads: a new caller's read waits at
    /// the device behind all of them, even if its turn comes first. A quarter of the depth costs a fast
    /// device a fifth of its reads, since it idles until the core's next turn (ADR 0013).
    fn shared_depth(&self, depth: u32) -> u32 {
        depth.div_ceil(2)
    }

    /// Slots for reads in flight: more than `depth` if a read that does not end needs nothing else of the backend, so that
    /// others can be made beside it.
    fn slots(&self, depth: u32) -> u32 {
        depth
    }

    /// Whether reads in flight may be shared. False if each is a copy from the page cache, which reads every
    /// page only once anyway.
    fn shares(&self) -> bool {
        true
    }

    /// Limits the bytes copied on the calling thread in one `poll_completions`; the last read may exceed the
    /// limit.
    fn bound_copies(&mut self, bytes: u64) {
        let _ = bytes;
    }

    /// Bytes that this backend has copied on the calling thread since the last call.
    fn take_copied(&mut self) -> u64 {
        0
    }

    /// Starts an attempt. A blocking backend makes it in a later `poll_completions`.
    fn start(&mut self, attempt: Attempt) -> ReadSource;

    /// Submits every started attempt to the kernel (or the pool). Returns the number of submissions (system
    /// calls).
    fn flush(&mut self) -> u32;

    /// Appends every finished attempt to `finished`. `Pending` if there is none: the task is then woken when
    /// one finishes. Attempts may finish in any order, each exactly once.
    fn poll_completions(&mut self, cx: &mut Context<'_>, finished: &mut Vec<Completion>) -> Poll<()>;
}

pub(crate) mod auto;
mod handoff;
mod lengths;
pub(crate) mod map;
pub(crate) mod mmap;
pub(crate) mod pread;
pub mod probe;
mod ready;
pub(crate) mod residency;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
#[cfg(test)]
mod trait_suite;
pub(crate) mod uring;
