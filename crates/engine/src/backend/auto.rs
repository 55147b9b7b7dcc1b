//! Backend `auto`: copies what the page cache holds from a mapping, and reads the rest through the ring.
//!
//! A resident 4 KiB page costs 0.5 us through a mapping and 1.3 us through a ring; querying residency
//! (cachestat(2), kernel 6.5) costs 0.3 to 1 us (MEASURED). So regions that were found completely resident are not
//! queried for some seconds (`residency`), and a cold file is queried less often while it stays cold. What was
//! queried and is not resident is read through the page cache, so that it is resident the next time: a partly warm
//! file warms up as under a mapping; of a cold file one read in 16 fills the cache, which is enough for what is
//! read often.
//! A page that is still being read counts as resident. So ranges that a read is filling (`fills`) are copied
//! with preadv2(2) and RWF_NOWAIT, which never waits; what it cannot copy goes to the ring.
//! Invariant: bytes are copied from the mapping only if they were resident a moment ago, or if their region
//! was completely resident some seconds ago and the thread has not faulted since. So a network thread hardly
//! ever faults.

mod fills;

use super::mmap::{MmapBackend, copy_mapped};
use super::residency::{Residency, ResidencyHistories, Tick, ask, missed, pread_no_wait, trusted};
use super::uring::UringBackend;
use super::{Attempt, Backend, Completion, ReadSource};
use crate::dataset::OpenFile;
use fills::Fills;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Most queries of whole regions, 20 us each, between two looks at other work.
const REGION_QUERIES_MAX: u32 = 2;

/// See the module. Every shard on a ring has this backend: each attempt says whether it may be copied, so one
/// ring serves both `uring` and `auto`, and switching between them is free.
pub(crate) struct AutoBackend {
    ring: UringBackend,
    mapped: MmapBackend,
    histories: ResidencyHistories,
    /// Queries of whole regions left in this turn.
    region_queries: u32,
    /// The time of this launch.
    now: Tick,
    fills: Fills,
    /// Copied without waiting, and not yet reported.
    read_at_once: Vec<Completion>,
    copied: u64,
}

impl AutoBackend {
    pub(crate) fn new(ring: UringBackend, queue_depth: u32) -> Self {
        Self {
            fills: Fills::new(ring.slots(queue_depth)),
            ring,
            read_at_once: Vec::new(),
            copied: 0,
            // Resident pages need no announcement.
            mapped: MmapBackend::new(false),
            histories: ResidencyHistories::default(),
            region_queries: REGION_QUERIES_MAX,
            now: Tick::now(),
        }
    }

    /// Whether an attempt's bytes are resident; `None` if they were not queried.
    fn is_resident(&mut self, attempt: &Attempt) -> Option<bool> {
        match attempt.residency {
            Residency::Missing => return Some(false),
            Residency::Cold => return None,
            Residency::Ask => {}
        }
        let (file, now) = (&attempt.file, self.now);
        if trusted(file, attempt.offset, attempt.length, now) {
            return Some(true);
        }
        let history = self.histories.of(file.id)?;
        if history.guess() == Residency::Cold {
            return None;
        }
        let resident = ask(
            file,
            attempt.offset,
            attempt.length,
            now,
            &mut self.region_queries,
        );
        history.learn(resident);
        Some(resident)
    }

    /// Copies an attempt's bytes if that does not wait for the device.
    fn read_at_once(&mut self, attempt: &Attempt) -> bool {
        let wanted = attempt
            .file
            .length_bytes()
            .saturating_sub(attempt.offset)
            .min(u64::from(attempt.length));
        // SAFETY: the shard keeps the attempt's memory for us until it is reported.
        let read =
            unsafe { pread_no_wait(&attempt.file, attempt.offset, attempt.destination, attempt.length) };
        match read {
            // A short count before the end of the file: the next page was not resident. A truncated file
            // takes the slow path too.
            Ok(bytes) if u64::from(bytes) == wanted => {
                self.copied += wanted;
                self.read_at_once.push(Completion {
                    slot: attempt.slot,
                    result: Ok(bytes),
                });
                true
            }
            // EAGAIN: it is being read. EOPNOTSUPP: the file system always waits.
            Ok(_) | Err(_) => {
                missed(&attempt.file, attempt.offset, attempt.length);
                false
            }
        }
    }
}

/// Copies resident bytes; waits for the device only if they are evicted meanwhile.
///
/// # Errors
/// errno of preadv2 or statx; EFAULT: the mapping does not have them.
///
/// # Safety
/// `destination` has `length` bytes, which nobody else touches.
pub(crate) unsafe fn copy_resident(
    file: &OpenFile,
    offset: u64,
    destination: *mut u8,
    length: u32,
) -> Result<u32, i32> {
    if fills::is_filling(file.id, offset, length) {
        // SAFETY: as the caller promises.
        return unsafe { pread_no_wait(file, offset, destination, length) };
    }
    let last = file.length_bytes().saturating_sub(1);
    let is_end_resident = trusted(file, last, 1, Tick::now()) && !fills::is_filling(file.id, last, 1);
    // SAFETY: as the caller promises.
    unsafe { copy_mapped(file, offset, destination, length, is_end_resident) }
}

impl Backend for AutoBackend {
    fn slots(&self, depth: u32) -> u32 {
        self.ring.slots(depth)
    }

    fn introduce(&mut self, files: &[Arc<OpenFile>]) {
        self.ring.introduce(files);
    }

    fn forget(&mut self, files: &[u64]) {
        self.ring.forget(files);
    }

    fn announce(&mut self, _attempts: &[Attempt]) {
        self.now = Tick::now();
    }

    fn start(&mut self, attempt: Attempt) -> ReadSource {
        let resident = if attempt.may_copy {
            self.is_resident(&attempt)
        } else {
            None
        };
        let fills = match resident {
            Some(true) if !fills::is_filling(attempt.file.id, attempt.offset, attempt.length) => {
                self.mapped.start(attempt);
                return ReadSource::PageCache;
            }
            Some(true) if self.read_at_once(&attempt) => return ReadSource::PageCache,
            Some(_) => true,
            None => attempt.may_copy && !attempt.direct,
        };
        if !fills {
            return self.ring.start(attempt);
        }
        self.fills
            .begin(attempt.slot, attempt.file.id, attempt.offset, attempt.length);
        self.ring.start(Attempt {
            direct: false,
            ..attempt
        })
    }

    fn flush(&mut self) -> u32 {
        self.ring.flush()
    }

    fn poll_completions(&mut self, cx: &mut Context<'_>, finished: &mut Vec<Completion>) -> Poll<()> {
        self.region_queries = REGION_QUERIES_MAX;
        let copied = self.mapped.poll_completions(cx, finished);
        let from_ring = finished.len();
        let read = self.ring.poll_completions(cx, finished);
        for finished in finished.get(from_ring..).unwrap_or_default() {
            self.fills.end(finished.slot);
        }
        let at_once = !self.read_at_once.is_empty();
        finished.append(&mut self.read_at_once);
        if at_once || copied.is_ready() {
            Poll::Ready(())
        } else {
            read
        }
    }

    fn bound_copies(&mut self, bytes: u64) {
        self.mapped.bound_copies(bytes);
    }

    fn take_copied(&mut self) -> u64 {
        std::mem::take(&mut self.copied) + self.mapped.take_copied()
    }
}

#[cfg(test)]
mod tests {
    use super::super::residency::{resident, trust};
    use super::*;
    use crate::backend::uring::RingRuntime;
    use crate::config::DirectIo;
    use crate::dataset::OpenFile;
    use crate::dataset::tests::file_on_disk;
    use rustix::fs::{Advice, fadvise};

    const PAGE: u32 = 4096;

    /// A file of 32 MiB of sevens, of which the page cache has only what is before `offset`.
    fn evicted_from(offset: u64) -> (tempfile::NamedTempFile, Arc<OpenFile>) {
        let file = file_on_disk();
        std::fs::write(file.path(), vec![7_u8; 32 << 20]).unwrap();
        rustix::fs::fsync(file.as_file()).unwrap();
        fadvise(file.as_file(), offset, None, Advice::DontNeed).unwrap();
        let open = Arc::new(OpenFile::open(file.path(), DirectIo::Preferred).unwrap());
        (file, open)
    }

    /// A direct read of a page, which may be copied.
    fn page(file: &Arc<OpenFile>, slot: u32, offset: u64, destination: *mut u8) -> Attempt {
        Attempt {
            slot,
            file: Arc::clone(file),
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

    /// A hundred reads of a trusted file at once, more than are copied in one go; the last one's page was
    /// evicted. Its fault is noticed too, and ends the trust in all files.
    #[test]
    #[ignore = "needs io_uring"]
    fn a_fault_behind_many_copies_ends_the_trust() {
        let (_file, open) = evicted_from(16 << 20);
        let ring = RingRuntime::new(128).unwrap();
        ring.block_on(async {
            let mut backend = AutoBackend::new(ring.handle().backend(128), 128);
            trust(&open);
            let mut memory = vec![0_u8; 128 * PAGE as usize];
            let mut offsets: Vec<u64> = (0..99).map(|number| number * u64::from(PAGE)).collect();
            offsets.push(24 << 20);
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

    /// A resident page in a range that another shard is filling is copied without the mapping. A missing one
    /// goes to the ring although its region was trusted, and ends that trust. (The question alone starts its
    /// read, which a quick disk may end before the answer: so several are tried.)
    #[test]
    #[ignore = "needs io_uring"]
    fn where_the_cache_is_being_filled_nothing_waits() {
        let missing: Vec<u64> = (9..16).map(|region| (region << 21) + (1 << 20)).collect();
        let (_file, open) = evicted_from(16 << 20);
        let ring = RingRuntime::new(8).unwrap();
        ring.block_on(async {
            let mut backend = AutoBackend::new(ring.handle().backend(8), 8);
            let mut other = Fills::new(8);
            for (slot, offset) in (0..).zip([0].iter().chain(&missing)) {
                other.begin(slot, open.id, *offset, PAGE);
            }
            trust(&open);
            let mut memory = vec![0_u8; 8 * PAGE as usize];
            let mut slots = memory.chunks_mut(PAGE as usize).zip(0_u32..);
            let mut start = |backend: &mut AutoBackend, offset: u64| {
                let (memory, slot) = slots.next().unwrap();
                backend.start(page(&open, slot, offset, memory.as_mut_ptr()))
            };
            assert_eq!(start(&mut backend, 0), ReadSource::PageCache);
            let copied = |offset: &u64| start(&mut backend, *offset) == ReadSource::PageCache;
            let copied = missing.iter().copied().take_while(copied).count();
            let missed = *missing.get(copied).expect("one was not resident");
            assert_eq!(backend.take_copied(), (1 + copied as u64) * u64::from(PAGE));
            // Of the same tick, so that this thread counts its faults no more.
            let now = backend.now;
            assert!(trusted(&open, 0, PAGE, now) && !trusted(&open, missed, PAGE, now));
            backend.flush();
            let started = copied + 2;
            let mut finished = Vec::new();
            while finished.len() < started {
                std::future::poll_fn(|cx| backend.poll_completions(cx, &mut finished)).await;
            }
            assert!(finished.iter().all(|finished| finished.result == Ok(PAGE)));
            drop(other);
            assert!(!fills::is_filling(open.id, 0, 32 << 20), "its own fill is over");
            assert!(memory.iter().take(started * PAGE as usize).all(|byte| *byte == 7));
        });
    }

    /// Reads that miss fill the page cache while the file is unknown; once the file has stayed cold, one in
    /// 16 does. (Pages of 4 KiB at distances that no readahead bridges.)
    #[test]
    #[ignore = "needs io_uring"]
    fn what_was_missed_is_resident_the_next_time() {
        let (file, open) = evicted_from(0);
        let ring = RingRuntime::new(8).unwrap();
        let found = ring.block_on(async {
            let mut backend = AutoBackend::new(ring.handle().backend(8), 8);
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
            // Trusted, but evicted: the bytes are right, and the fault ends the trust.
            trust(&open);
            fadvise(file.as_file(), 0, None, Advice::DontNeed).unwrap();
            let unasked = read(&mut backend, 25 << 20).await;
            await_distrust(&open);
            (first, second, unasked)
        });
        assert_eq!(
            found,
            (ReadSource::Device, ReadSource::PageCache, ReadSource::PageCache)
        );
    }
}
