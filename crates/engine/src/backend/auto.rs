//! Backend `auto`: copies what the page cache holds, and reads the rest through the ring.
//!
//! A resident 4 KiB page costs 0.5 us through a mapping and 1.3 us through a ring; querying residency
//! (cachestat(2), kernel 6.5) costs 0.3 to 1 us (MEASURED). So regions that were found completely resident are not
//! queried for some seconds (`residency`), and a cold file is queried less often while it stays cold. What was
//! queried and is not resident is read through the page cache, so that it is resident the next time: a partly warm
//! file warms up as under a mapping; of a cold file one read in 16 fills the cache, which is enough for what is
//! read often.
//! Invariant: no copy waits for the device, since it would stop a network thread, except for a page that was evicted
//! within seconds of being found resident (ADR 0009). A page that is still being read counts as resident. So bytes are
//! copied from the mapping only if their region was completely resident some seconds ago and the thread has not faulted
//! since. Others are copied by preadv2(2) with RWF_NOWAIT, which never waits; where the file system cannot (tmpfs,
//! FUSE), from the mapping if mincore(2) says that each page is up to date. What is not copied goes to the ring.

use super::mmap::{MmapBackend, copy_mapped, is_up_to_date, kept_of_copy};
use super::residency::{
    Residency, ResidencyHistories, Tick, is_known_resident, missed, pread_no_wait_unchecked, trusted, watch,
};
use super::uring::UringBackend;
use super::{Attempt, Backend, Completion, ReadSource};
use crate::dataset::OpenFile;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Most queries of whole regions, 20 to 50 us each, between two looks at other work.
const REGION_QUERIES_MAX: u32 = 2;

/// See the module. Every shard on a ring has this backend: each attempt says whether it may be copied, so one
/// ring serves both `uring` and `auto`, and switching between them is free.
pub(crate) struct AutoBackend {
    ring: UringBackend,
    copies: MmapBackend,
    histories: ResidencyHistories,
    /// Queries of whole regions left in this turn.
    region_queries: u32,
    /// The time of this launch.
    now: Tick,
}

impl AutoBackend {
    pub(crate) fn new(ring: UringBackend) -> Self {
        Self {
            ring,
            copies: MmapBackend::copying(|attempt| {
                let is_trusted = attempt.residency == Residency::Trusted;
                // SAFETY: as the caller promises.
                unsafe {
                    copy(
                        &attempt.file,
                        attempt.offset,
                        attempt.destination,
                        attempt.length,
                        is_trusted,
                    )
                }
            }),
            histories: ResidencyHistories::default(),
            region_queries: REGION_QUERIES_MAX,
            now: Tick::now(),
        }
    }
}

/// Copies bytes, of which those before the end of the file count, if that does not wait for the device, as far as is known.
///
/// # Safety
/// `destination` has `length` bytes, which nobody else touches.
unsafe fn copy(
    file: &OpenFile,
    offset: u64,
    destination: *mut u8,
    length: u32,
    is_trusted: bool,
) -> Option<u32> {
    if is_trusted {
        // SAFETY: as the caller promises.
        let copied = unsafe { copy_mapped(file, offset, destination, length) };
        if copied.is_some() {
            return copied;
        }
        // They may have been evicted since, and preadv2 would start a read, which waits if the device's queue is full.
        if !is_known_resident(file, offset, length) {
            return None;
        }
    }
    // SAFETY: as the caller promises.
    match unsafe { pread_no_wait_unchecked(file, offset, destination, length) } {
        Ok(bytes) => {
            // Fewer before the end of the file: the next page is not there yet, or the file was truncated.
            let wanted = file.length_bytes().saturating_sub(offset).min(length.into());
            (u64::from(bytes) >= wanted).then_some(bytes)
        }
        // SAFETY: as the caller promises.
        Err(libc::EOPNOTSUPP) if is_up_to_date(file, offset, length) => unsafe {
            copy_mapped(file, offset, destination, length)
        },
        Err(_) => None,
    }
}

/// Copies bytes that were found resident, without waiting for any that are still on their way. `is_trusted`: of trusted
/// regions; then it waits for the device only if they were evicted meanwhile.
///
/// # Errors
/// errno of statx; EAGAIN: they cannot be copied without waiting.
///
/// # Safety
/// `destination` has `length` bytes, which nobody else touches.
pub(crate) unsafe fn copy_at_once(
    file: &OpenFile,
    offset: u64,
    destination: *mut u8,
    length: u32,
    is_trusted: bool,
    now: Tick,
) -> Result<u32, i32> {
    let copied = || {
        // SAFETY: as the caller promises.
        let copied = unsafe { copy(file, offset, destination, length, is_trusted) };
        let copied = copied.ok_or(libc::EAGAIN)?;
        // Without a system call if the last page is trusted. It may have been evicted, too.
        let last = file.length_bytes().saturating_sub(1);
        kept_of_copy(file, offset, copied, trusted(file, last, 1, now))
    };
    if is_trusted { watch(copied) } else { copied() }
}

impl Backend for AutoBackend {
    fn slots(&self, depth: u32) -> u32 {
        self.ring.slots(depth)
    }

    fn introduce(&mut self, files: &[Arc<OpenFile>]) -> Vec<u64> {
        self.ring.introduce(files)
    }

    fn forget(&mut self, files: &[u64]) {
        self.ring.forget(files);
    }

    fn announce(&mut self, _attempts: &[Attempt]) {
        self.now = Tick::now();
    }

    fn start(&mut self, mut attempt: Attempt) -> ReadSource {
        if attempt.may_copy {
            if attempt.residency == Residency::Ask {
                attempt.residency = self.histories.known(
                    &attempt.file,
                    attempt.offset,
                    attempt.length,
                    self.now,
                    &mut self.region_queries,
                );
            }
            match attempt.residency {
                Residency::Trusted | Residency::Resident => {
                    // Not yet: what is copied in a turn has a bound.
                    self.copies.start(attempt);
                    return ReadSource::PageCache;
                }
                Residency::Missing => attempt.direct = false,
                Residency::Cold | Residency::Ask => {}
            }
        }
        self.ring.start(attempt)
    }

    fn flush(&mut self) -> u32 {
        self.ring.flush()
    }

    fn poll_completions(&mut self, cx: &mut Context<'_>, finished: &mut Vec<Completion>) -> Poll<()> {
        self.region_queries = REGION_QUERIES_MAX;
        let copied = if self.copies.is_waiting() {
            watch(|| self.copies.poll_completions(cx, finished))
        } else {
            self.copies.poll_completions(cx, finished)
        };
        while let Some(attempt) = self.copies.take_uncopied() {
            missed(&attempt.file, attempt.offset, attempt.length);
            self.ring.start(Attempt {
                direct: false,
                ..attempt
            });
        }
        // Wakes the task for what was started above, so that it is flushed.
        let read = self.ring.poll_completions(cx, finished);
        if copied.is_ready() { copied } else { read }
    }

    fn bound_copies(&mut self, bytes: u64) {
        self.copies.bound_copies(bytes);
    }

    fn take_copied(&mut self) -> u64 {
        self.copies.take_copied()
    }
}

#[cfg(test)]
mod tests {
    use super::super::residency::{evict, forget_faults, resident, trust};
    use super::super::trait_suite::WAIT;
    use super::*;
    use crate::backend::uring::RingRuntime;
    use crate::config::DirectIo;
    use crate::dataset::tests::file_on_disk;
    use crate::dataset::{HeldFile, OpenFile};
    use slowdisk::{Parameters, SlowDisk};
    use std::task::Waker;

    const PAGE: u32 = 4096;

    /// A file of 32 MiB of sevens, of which the page cache has only what is before `offset`.
    fn evicted_from(offset: u64) -> (tempfile::NamedTempFile, Arc<OpenFile>) {
        let file = file_on_disk();
        std::fs::write(file.path(), vec![7_u8; 32 << 20]).unwrap();
        let open = Arc::new(OpenFile::open(file.path(), DirectIo::Preferred).unwrap());
        evict(&open, offset);
        (file, open)
    }

    /// A direct read of a page, which may be copied.
    fn page(file: &Arc<OpenFile>, slot: u32, offset: u64, destination: *mut u8) -> Attempt {
        Attempt {
            slot,
            file: HeldFile::from(file),
            direct: true,
            may_copy: true,
            residency: Residency::Ask,
            offset,
            destination,
            length: PAGE,
        }
    }

    /// Waits until this thread no longer trusts a file, which it notices at the next tick.
    fn await_distrust(file: &OpenFile) {
        while trusted(file, 0, 4096, Tick::now()) {
            std::thread::yield_now();
        }
    }

    /// A hundred reads of a trusted file at once, more than are copied in one go; the pages of the last four were evicted.
    /// Expectation: their faults are noticed too, and end the trust in all files. (Four: the ring that was tried before this one
    /// is taken down meanwhile, which may hide one of them.)
    #[test]
    #[ignore = "needs io_uring"]
    fn a_fault_behind_many_copies_ends_the_trust() {
        let (_file, open) = evicted_from(16 << 20);
        let ring = RingRuntime::new(128).unwrap();
        ring.block_on(async {
            let mut backend = AutoBackend::new(ring.handle().backend(128));
            trust(&open);
            let mut memory = vec![0_u8; 128 * PAGE as usize];
            forget_faults();
            let mut offsets: Vec<u64> = (0..96).map(|number| number * u64::from(PAGE)).collect();
            offsets.extend((24..28).map(|number| number << 20));
            for (slot, offset) in (0_u32..).zip(offsets) {
                let route = backend.start(page(
                    &open,
                    slot,
                    offset,
                    memory[(slot * PAGE) as usize..].as_mut_ptr(),
                ));
                assert_eq!(route, ReadSource::PageCache);
            }
            let mut finished = Vec::new();
            while finished.len() < 100 {
                std::future::poll_fn(|cx| backend.poll_completions(cx, &mut finished)).await;
            }
            assert!(finished.iter().all(|finished| finished.result == Ok(PAGE)));
            await_distrust(&open);
            trust(&open);
            assert!(!trusted(&open, 0, PAGE, Tick::now()), "for some seconds");
        });
    }

    /// Eight reads through the ring are in flight, whose completions hide from the kernel's count that a copy faulted, or the
    /// look at the file's last page that follows it. Expectation: the first such fault ends the thread's trust, in a shard and
    /// beside it.
    #[test]
    #[ignore = "needs io_uring"]
    fn a_fault_beside_reads_in_flight_ends_the_trust() {
        let faults = |missing_from: u64, offset: u64, is_at_once: bool| {
            let (_file, open) = evicted_from(missing_from);
            let ring = RingRuntime::new(16).unwrap();
            ring.block_on(async {
                let mut backend = AutoBackend::new(ring.handle().backend(16));
                trust(&open);
                assert!(trusted(&open, 0, PAGE, Tick::now()));
                let mut memory = vec![0_u8; 10 * PAGE as usize];
                let start = memory.as_ptr().align_offset(PAGE as usize);
                let memory = &mut memory[start..];
                for slot in 0..8_u32 {
                    let place = memory[(slot * PAGE) as usize..].as_mut_ptr();
                    let read = page(&open, slot, u64::from(slot + 1) << 21, place);
                    backend.start(Attempt {
                        may_copy: false,
                        ..read
                    });
                }
                backend.flush();
                let place = memory[8 * PAGE as usize..].as_mut_ptr();
                if is_at_once {
                    // SAFETY: the place is a page of ours.
                    let copied = unsafe { copy_at_once(&open, offset, place, PAGE, true, Tick::now()) };
                    assert_eq!(copied, Ok(PAGE));
                    finish(&mut backend, memory, 8).await;
                } else {
                    forget_faults();
                    assert_eq!(
                        backend.start(page(&open, 8, offset, place)),
                        ReadSource::PageCache
                    );
                    finish(&mut backend, memory, 9).await;
                }
                trust(&open);
                let is_trusted = trusted(&open, 0, PAGE, Tick::now());
                assert!(!is_trusted, "{missing_from}, at once: {is_at_once}");
            });
        };
        for (missing_from, offset, is_at_once) in
            [(0, 24 << 20, false), (0, 24 << 20, true), (28 << 20, 0, true)]
        {
            let thread = std::thread::spawn(move || faults(missing_from, offset, is_at_once));
            thread.join().unwrap();
        }
    }

    /// Polls until so many attempts are reported; each has read a page of sevens.
    async fn finish(backend: &mut AutoBackend, memory: &[u8], count: usize) {
        let mut finished = Vec::new();
        while finished.len() < count {
            backend.flush();
            std::future::poll_fn(|cx| backend.poll_completions(cx, &mut finished)).await;
        }
        assert!(finished.iter().all(|finished| finished.result == Ok(PAGE)));
        assert!(memory.iter().take(count * PAGE as usize).all(|byte| *byte == 7));
    }

    /// A file cannot be mapped, its disk answers nothing, and a page that is missing was trusted. Expectation: the thread does
    /// not wait for it; once the disk answers, the page is read.
    #[test]
    #[ignore = "needs root, /dev/fuse and io_uring"]
    fn a_file_without_a_mapping_stops_no_thread() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source");
        std::fs::write(&source, vec![7_u8; 1 << 20]).unwrap();
        let disk = SlowDisk::mount(&source, &directory.path().join("disk"), &Parameters::default()).unwrap();
        let open = Arc::new(OpenFile::open(disk.path(), DirectIo::Off).unwrap());
        open.attached.set(Box::new("taken")).unwrap();
        disk.hold();
        let (polled, is_polled) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            let ring = RingRuntime::new(8).unwrap();
            ring.block_on(async {
                let mut backend = AutoBackend::new(ring.handle().backend(8));
                trust(&open);
                let mut memory = vec![0_u8; PAGE as usize];
                backend.start(page(&open, 0, 8 * u64::from(PAGE), memory.as_mut_ptr()));
                let mut cx = Context::from_waker(Waker::noop());
                let found = backend.poll_completions(&mut cx, &mut Vec::new());
                polled.send(found).unwrap();
                finish(&mut backend, &memory, 1).await;
            });
        });
        let found = is_polled.recv_timeout(WAIT);
        disk.release();
        assert_eq!(found, Ok(Poll::Pending));
        reader.join().unwrap();
    }

    /// Reads that miss fill the page cache while the file is unknown; once the file has stayed cold, one in
    /// 16 does. (Pages of 4 KiB at distances that no readahead bridges.)
    #[test]
    #[ignore = "needs io_uring"]
    fn what_was_missed_is_resident_the_next_time() {
        let (_file, open) = evicted_from(0);
        let ring = RingRuntime::new(8).unwrap();
        let found = ring.block_on(async {
            let mut backend = AutoBackend::new(ring.handle().backend(8));
            let mut memory = vec![0_u8; 2 * PAGE as usize];
            let start = memory.as_ptr().align_offset(PAGE as usize);
            let mut read = async |backend: &mut AutoBackend, offset: u64| {
                let attempt = page(&open, 0, offset, memory[start..].as_mut_ptr());
                backend.announce(&[]);
                let route = backend.start(attempt);
                backend.flush();
                let mut finished = Vec::new();
                std::future::poll_fn(|cx| backend.poll_completions(cx, &mut finished)).await;
                assert_eq!(finished.pop().map(|finished| finished.result), Some(Ok(PAGE)));
                assert!(finished.is_empty());
                route
            };
            let first = read(&mut backend, 1 << 20).await;
            let second = read(&mut backend, 1 << 20).await;
            for history in &mut backend.histories.0 {
                history.hits_per_mille = 0;
            }
            for number in 0..16_u64 {
                read(&mut backend, (2 << 20) + number * (1 << 20)).await;
            }
            let filled = (0..16_u64).filter(|number| resident(&open, (2 << 20) + number * (1 << 20), PAGE));
            assert_eq!(filled.count(), 1);
            // Trusted, but evicted: the bytes are right.
            trust(&open);
            evict(&open, 24 << 20);
            forget_faults();
            let unasked = read(&mut backend, 25 << 20).await;
            (first, second, unasked)
        });
        assert_eq!(
            found,
            (ReadSource::Device, ReadSource::PageCache, ReadSource::PageCache)
        );
    }
}
