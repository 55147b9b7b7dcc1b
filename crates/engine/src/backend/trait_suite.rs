//! One small suite over every backend that needs no ring, at the level of the trait: what an attempt returns at and
//! past the end of a file. Through the engine the contract suite tests everything else.

use super::mmap::MmapBackend;
use super::pread::PreadBackend;
use super::residency::Residency;
use super::sim::{SimBackend, SimControl};
use super::{Attempt, Backend, Completion};
use crate::config::DirectIo;
use crate::dataset::{HeldFile, OpenFile};
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// Longest wait for anything.
pub(super) const WAIT: Duration = Duration::from_secs(20);

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A waker that unparks the calling thread.
pub(super) fn unpark_waker() -> Waker {
    Waker::from(Arc::new(Unpark(std::thread::current())))
}

/// A file of pattern bytes, none of them 0, at a path that exists as long as the first value.
pub(super) struct Sample {
    pub(super) named: tempfile::NamedTempFile,
    pub(super) file: Arc<OpenFile>,
    pub(super) bytes: Vec<u8>,
}

impl Sample {
    pub(super) fn new(length: usize) -> Self {
        let bytes: Vec<u8> = (0..length as u64)
            .map(|offset| {
                u8::try_from(offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 57).expect("7 bits") | 0x80
            })
            .collect();
        let mut named = tempfile::NamedTempFile::new().expect("temporary file");
        named.write_all(&bytes).expect("write");
        let file = Arc::new(OpenFile::open(named.path(), DirectIo::Preferred).expect("open"));
        Self { named, file, bytes }
    }

    /// The file again, writable.
    fn writable(&self) -> &File {
        self.named.as_file()
    }
}

/// A read of a test; its memory lives until the read is reported.
pub(super) struct Read {
    pub(super) offset: u64,
    pub(super) memory: Vec<u8>,
    pub(super) result: Option<Result<u32, i32>>,
}

impl Read {
    pub(super) fn new(offset: u64, length: usize) -> Self {
        Self {
            offset,
            memory: vec![0xEE; length],
            result: None,
        }
    }

    pub(super) fn attempt(&mut self, slot: usize, file: &Arc<OpenFile>) -> Attempt {
        Attempt {
            slot: u32::try_from(slot).expect("few"),
            file: HeldFile::from(file),
            direct: false,
            may_copy: true,
            residency: Residency::Ask,
            offset: self.offset,
            destination: self.memory.as_mut_ptr(),
            length: u32::try_from(self.memory.len()).expect("short"),
        }
    }
}

/// Makes all reads at once, and waits until each is reported, exactly once.
pub(super) fn make_all(backend: &mut impl Backend, file: &Arc<OpenFile>, reads: &mut [Read]) -> u32 {
    let attempts: Vec<Attempt> = reads
        .iter_mut()
        .enumerate()
        .map(|(slot, read)| read.attempt(slot, file))
        .collect();
    backend.announce(&attempts);
    for attempt in attempts {
        let _route = backend.start(attempt);
    }
    let submissions = backend.flush();
    collect(backend, reads, reads.len());
    submissions
}

/// Waits for `count` reports.
pub(super) fn collect(backend: &mut impl Backend, reads: &mut [Read], count: usize) -> Vec<Completion> {
    let waker = unpark_waker();
    let mut cx = Context::from_waker(&waker);
    let deadline = Instant::now() + WAIT;
    let mut all = Vec::new();
    while all.len() < count {
        let before = all.len();
        match backend.poll_completions(&mut cx, &mut all) {
            Poll::Ready(()) => assert!(all.len() > before, "ready with nothing"),
            Poll::Pending => {
                assert_eq!(all.len(), before, "pending with something");
                let left = deadline.saturating_duration_since(Instant::now());
                assert!(!left.is_zero(), "{} of {count} reported", all.len());
                std::thread::park_timeout(left);
            }
        }
    }
    for Completion { slot, result } in &all {
        let read = &mut reads[*slot as usize];
        assert_eq!(read.result.replace(*result), None, "slot {slot} reported twice");
    }
    all
}

fn one(backend: &mut impl Backend, file: &Arc<OpenFile>, offset: u64, length: usize) -> Result<Vec<u8>, i32> {
    let mut reads = [Read::new(offset, length)];
    make_all(backend, file, &mut reads);
    let [
        Read {
            mut memory, result, ..
        },
    ] = reads;
    memory.truncate(result.expect("reported")? as usize);
    Ok(memory)
}

fn end_of_file_is_short(backend: &mut impl Backend) {
    // Scenario: reads that cross the end, begin at it, lie past it, or begin where no file can. Expectation:
    // the bytes there are; then 0; an offset beyond 2^63 gives 0 or EINVAL, never bytes.
    let sample = Sample::new(10_000);
    assert_eq!(
        one(backend, &sample.file, 9_990, 100).expect("read"),
        sample.bytes[9_990..]
    );
    assert_eq!(one(backend, &sample.file, 10_000, 100), Ok(vec![]));
    assert_eq!(one(backend, &sample.file, 50_000, 100), Ok(vec![]));
    assert!([Ok(vec![]), Err(libc::EINVAL)].contains(&one(backend, &sample.file, u64::MAX - 50, 100)));
}

fn an_empty_file_has_no_bytes(backend: &mut impl Backend) {
    // Scenario: a file of length 0. Expectation: 0 bytes, no error.
    let sample = Sample::new(0);
    assert_eq!(one(backend, &sample.file, 0, 100), Ok(vec![]));
}

fn truncation_is_short(backend: &mut impl Backend) {
    // Scenario: a file is read, truncated in the middle of a page, then to nothing, then grown again.
    // Expectation: bytes before the truncation, none after it, and zeros where it grew: what pread returns
    // each time.
    let page = rustix::param::page_size();
    let sample = Sample::new(8 * page);
    let file = &sample.file;
    assert_eq!(one(backend, file, 0, 8 * page).expect("read"), sample.bytes);
    let cut = 2 * page + page / 2;
    sample.writable().set_len(cut as u64).expect("truncate");
    assert_eq!(
        one(backend, file, 0, page).expect("before the cut"),
        sample.bytes[..page]
    );
    assert_eq!(
        one(backend, file, 2 * page as u64, page).expect("across it"),
        sample.bytes[2 * page..cut]
    );
    assert_eq!(one(backend, file, cut as u64, 10), Ok(vec![]), "in the cut page");
    assert_eq!(
        one(backend, file, 5 * page as u64, page),
        Ok(vec![]),
        "a lost page"
    );
    assert_eq!(
        one(backend, file, 0, 8 * page).expect("all of it"),
        sample.bytes[..cut]
    );
    sample.writable().set_len(0).expect("truncate");
    assert_eq!(one(backend, file, 0, page), Ok(vec![]));
    sample.writable().set_len(page as u64).expect("extend");
    assert_eq!(one(backend, file, 0, page), Ok(vec![0; page]));
}

fn truncation_in_flight_is_never_wrong_bytes(backend: &mut impl Backend) {
    // Scenario: batches of reads while another thread truncates the file at a random place. Expectation:
    // every byte reported is the file's; reads before that place get all of their bytes.
    let page = rustix::param::page_size();
    for _ in 0..30 {
        let sample = Sample::new(64 * page);
        let cut = fastrand::usize(1..64 * page);
        std::thread::scope(|scope| {
            scope.spawn(|| sample.writable().set_len(cut as u64).expect("truncate"));
            for _ in 0..4 {
                let mut reads: Vec<Read> = (0..63)
                    .map(|number| Read::new((number * page + 100) as u64, page))
                    .collect();
                make_all(backend, &sample.file, &mut reads);
                for read in &reads {
                    let start = usize::try_from(read.offset).expect("small");
                    let count = read.result.expect("reported").expect("no error") as usize;
                    assert!(
                        read.memory[..count] == sample.bytes[start..start + count],
                        "cut {cut} at {start}"
                    );
                    assert!(
                        count == page || start + count >= cut,
                        "cut {cut}, but {count} bytes at {start}"
                    );
                }
            }
        });
    }
}

fn an_idle_backend_is_pending(backend: &mut impl Backend) {
    // Scenario: nothing was started. Expectation: `Pending`, nothing reported, nothing submitted.
    let mut finished = Vec::new();
    let mut cx = Context::from_waker(Waker::noop());
    assert_eq!(backend.poll_completions(&mut cx, &mut finished), Poll::Pending);
    assert!(finished.is_empty());
    assert_eq!(backend.flush(), 0);
}

macro_rules! suite {
    ($($module:ident: $backend:expr;)*) => {
        $(mod $module {
            use super::*;
            suite!(@cases $backend;
                end_of_file_is_short, an_empty_file_has_no_bytes, truncation_is_short,
                truncation_in_flight_is_never_wrong_bytes, an_idle_backend_is_pending);
        })*
    };
    // Scenario and expectation: see the functions of these names above.
    (@cases $backend:expr; $($case:ident),*) => {
        $(#[test]
        fn $case() {
            // See above.
            super::$case(&mut $backend);
        })*
    };
}

suite! {
    mmap_announced: MmapBackend::new(true);
    mmap_plain: MmapBackend::new(false);
    pread_one_thread: PreadBackend::new(1).expect("a thread");
    pread_pool: PreadBackend::new(8).expect("threads");
    sim: SimBackend::new(&SimControl::from_environment());
}
