//! Blocking `pread` on a pool of threads: the baseline.
//!
//! Invariants: an attempt is one `pread`, made once and reported once, EINTR included; attempts started
//! before the backend is dropped are all made, since drop joins the threads. The queue holds only what the
//! shard has in flight, so the queue depth bounds it. Attempts have no order.

use super::handoff::Handoff;
use super::{Attempt, Backend, Completion, ReadSource};
use crate::shard::IN_FLIGHT_BYTES_MAX;
use std::io;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;

/// Bytes in flight per thread, on average: 16 MiB for 64 threads.
const THREAD_BYTES: u64 = 256 << 10;

/// Makes an attempt with one `pread`, by the direct descriptor if the attempt is direct and the file has one.
///
/// # Errors
/// errno of the call.
///
/// # Safety
/// As [`Attempt`] promises: `destination` has `length` bytes, which nobody else touches until the attempt is
/// reported.
pub(super) unsafe fn pread_attempt(attempt: &Attempt) -> Result<u32, i32> {
    let file = &attempt.file;
    let fd = if attempt.direct { file.direct_fd() } else { None };
    let destination = attempt.destination.cast::<MaybeUninit<u8>>();
    // SAFETY: valid and exclusive by the caller's promise; `MaybeUninit` need not be initialised.
    let memory = unsafe { std::slice::from_raw_parts_mut(destination, attempt.length as usize) };
    let read = match rustix::io::pread(fd.unwrap_or_else(|| file.buffered_fd()), memory, attempt.offset) {
        // `pread` never reads more than requested.
        Ok((read, _)) => u32::try_from(read.len()).unwrap_or(attempt.length),
        Err(errno) => return Err(errno.raw_os_error()),
    };
    file.kept(attempt.offset, read, fd.is_some())
}

/// See the module.
#[derive(Debug)]
pub(crate) struct PreadBackend {
    pool: Arc<Handoff<SendAttempt, Completion>>,
    threads: Vec<JoinHandle<()>>,
    /// Started but not passed to the pool: takes the lock once per flush, not once per attempt.
    started: Vec<SendAttempt>,
}

/// An attempt for a thread of the pool.
#[derive(Debug)]
struct SendAttempt(Attempt);

// SAFETY: the pointer is what keeps `Attempt` from being Send. Its memory belongs to the attempt alone until it is
// reported (see `Attempt`), on whichever thread it is made; the file's reference is Send.
unsafe impl Send for SendAttempt {}

impl PreadBackend {
    /// Starts the threads, `rf-pread-0` and on; at least one.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(crate) fn new(threads: u32) -> io::Result<Self> {
        Self::with(threads, pread_attempt)
    }

    fn with(threads: u32, make: unsafe fn(&Attempt) -> Result<u32, i32>) -> io::Result<Self> {
        let mut backend = Self {
            pool: Arc::new(Handoff::new()),
            threads: Vec::new(),
            started: Vec::new(),
        };
        for number in 0..threads.max(1) {
            let pool = Arc::clone(&backend.pool);
            // On failure dropping `backend` ends the threads that were started.
            let thread = std::thread::Builder::new()
                .name(format!("rf-pread-{number}"))
                .spawn(move || {
                    // An attempt that is never reported would wait forever: the shard fails (`cores::supervise`).
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| serve(&pool, make))) {
                        pool.report_panic(panic);
                    }
                })?;
            backend.threads.push(thread);
        }
        Ok(backend)
    }
}

/// The loop of a pool thread, until the queue is closed and empty.
fn serve(pool: &Handoff<SendAttempt, Completion>, make: unsafe fn(&Attempt) -> Result<u32, i32>) {
    while let Some(SendAttempt(attempt)) = pool.next() {
        // SAFETY: the shard keeps the memory until we report the attempt, below.
        let result = unsafe { make(&attempt) };
        let slot = attempt.slot;
        // Before the report: after it the caller may rely on the file being released.
        drop(attempt);
        pool.report(Completion { slot, result });
    }
}

impl Backend for PreadBackend {
    fn shared_depth(&self, depth: u32) -> u32 {
        // One read per thread: the threads are there for a slow disk.
        depth
    }

    fn in_flight_bytes_max(&self) -> u64 {
        // One shard has all threads; the default bound would leave most of them idle when reads are long.
        IN_FLIGHT_BYTES_MAX.max(self.threads.len() as u64 * THREAD_BYTES)
    }

    fn start(&mut self, attempt: Attempt) -> ReadSource {
        self.started.push(SendAttempt(attempt));
        ReadSource::Device
    }

    fn flush(&mut self) -> u32 {
        let count = self.started.len();
        if count == 0 {
            return 0;
        }
        self.pool.submit(self.started.drain(..), self.threads.len());
        // Each attempt is a system call of its own.
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn poll_completions(&mut self, cx: &mut Context<'_>, finished: &mut Vec<Completion>) -> Poll<()> {
        self.pool.poll_results(cx, finished)
    }
}

impl Drop for PreadBackend {
    fn drop(&mut self) {
        self.flush();
        self.pool.close();
        for thread in self.threads.drain(..) {
            let _ended = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::trait_suite::{Read, Sample, make_all};
    use super::*;
    use crate::config::DirectIo;
    use crate::dataset::OpenFile;

    #[test]
    fn attempts_outlive_no_backend() {
        // Scenario: a backend is dropped with started attempts, some of them never flushed. Expectation: when
        // the drop returns, every one was made and nothing holds the file.
        let sample = Sample::new(200_000);
        let mut reads: Vec<Read> = (0..200).map(|number| Read::new(number * 1000, 1000)).collect();
        let mut backend = PreadBackend::new(3).expect("threads");
        for (slot, read) in reads.iter_mut().enumerate() {
            let attempt = read.attempt(slot, &sample.file);
            backend.start(attempt);
            if slot == 100 {
                assert_eq!(backend.flush(), 101);
            }
        }
        drop(backend);
        assert_eq!(Arc::strong_count(&sample.file), 1);
        for read in &reads {
            let start = usize::try_from(read.offset).expect("small");
            assert!(read.memory == sample.bytes[start..start + 1000], "offset {start}");
        }
    }

    #[test]
    fn a_direct_attempt_reads_the_same_bytes() {
        // Scenario: an aligned direct read, of a file that supports it and of one without a direct
        // descriptor. Expectation: the file's bytes from both.
        let sample = Sample::new(16_384);
        let buffered = Arc::new(OpenFile::open(sample.named.path(), DirectIo::Off).expect("open"));
        sample.named.as_file().sync_all().expect("sync");
        let mut backend = PreadBackend::new(1).expect("a thread");
        for file in [&sample.file, &buffered] {
            let mut read = Read::new(4096, 3 * 4096);
            let start = read.memory.as_ptr().align_offset(4096);
            let attempt = Attempt {
                direct: true,
                destination: read.memory[start..].as_mut_ptr(),
                length: 4096,
                ..read.attempt(0, file)
            };
            // SAFETY: aligned, inside `read.memory` (3 * 4096 bytes hold an aligned 4096), and ours alone.
            assert_eq!(unsafe { pread_attempt(&attempt) }, Ok(4096));
            assert!(read.memory[start..start + 4096] == sample.bytes[4096..8192]);
        }
        assert_eq!(
            make_all(
                &mut backend,
                &sample.file,
                &mut [Read::new(0, 1), Read::new(1, 1)]
            ),
            2
        );
    }

    #[test]
    fn a_panic_in_a_thread_is_one_of_the_shard() {
        // Scenario: one of two threads panics in an attempt, as with a defect. Expectation: the shard's next poll panics
        // too, instead of waiting for a completion that never comes; `cores::supervise` reports that.
        unsafe fn defect(attempt: &Attempt) -> Result<u32, i32> {
            assert!(attempt.offset != 1, "a defect");
            Ok(attempt.length)
        }
        let sample = Sample::new(10);
        let mut backend = PreadBackend::with(2, defect).expect("threads");
        let mut reads = [Read::new(0, 1), Read::new(1, 1)];
        let made = AssertUnwindSafe(|| make_all(&mut backend, &sample.file, &mut reads));
        let panic = catch_unwind(made).expect_err("a panic");
        assert_eq!(panic.downcast_ref(), Some(&"a defect"));
    }

    #[test]
    fn an_errno_comes_back_as_it_is() {
        // Scenario: an attempt past the largest offset. Expectation: EINVAL, as from pread itself.
        let sample = Sample::new(10);
        let mut read = Read::new(u64::MAX, 1);
        let attempt = read.attempt(0, &sample.file);
        // SAFETY: the memory is `read`'s own and lives across the call.
        assert_eq!(unsafe { pread_attempt(&attempt) }, Err(libc::EINVAL));
    }
}
