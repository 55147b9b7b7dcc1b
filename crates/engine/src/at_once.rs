//! Answers small requests on the core that submits them, when `mmap` or `auto` serves their dataset and the
//! page cache holds their bytes. A round trip to a shard, even one on the same core, takes longer than such a
//! read.
//!
//! `mmap` copies by preadv2(2) with RWF_NOWAIT, which does not fault, so the network thread stays free even if a page is
//! evicted meanwhile. `auto` copies as its shard would: what is trusted, from the mapping. Both ask first what is resident: a
//! preadv2 that misses starts the read it was asked about, and waits if the device's queue is full. Whatever is not copied
//! completely (not resident, truncated, a file system that always waits, a kernel that does not tell what is resident) goes to a
//! shard, which determines the cause. A file of which hardly anything was resident lately is tried once in 16 reads.

use crate::backend::auto::copy_at_once;
use crate::backend::residency::{
    Residency, ResidencyHistories, Tick, is_known_resident, missed, pread_no_wait,
};
use crate::batch::{Batch, Fetched, Lengths, Segment, Times};
use crate::buffer::Arena;
use crate::config::BackendKind;
use crate::dataset::{Dataset, OpenFile, WeakDataset};
use crate::metrics::{DatasetCounters, ShardMetrics, nanoseconds};
use crate::share::Share;
use crate::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Instant;

/// Longest item with `mmap`: a longer copy is worth going to a thread of its own.
const BYTES_MAX: u32 = 16 << 10;

/// Longest item with `auto`, whose shard is on the same thread.
const SAME_THREAD_BYTES_MAX: u32 = 64 << 10;

/// How often a sweep looks whether the core has ended its copy.
const SWEEP_ATTEMPTS: u32 = 100;

/// State of one core. Aligned, so that cores share no cache line (128: x86 fetches lines in pairs).
#[repr(align(128))]
pub(crate) struct CoreReads(Mutex<State>);

struct State {
    metrics: Arc<ShardMetrics>,
    histories: ResidencyHistories,
    /// Counters of each dataset read here, with its id.
    counters: Vec<(u64, WeakDataset, Arc<DatasetCounters>)>,
}

impl CoreReads {
    /// `metrics` must not belong to a shard: only the shard's thread may write to those.
    pub(crate) fn new(metrics: Arc<ShardMetrics>) -> Self {
        Self(Mutex::new(State {
            metrics,
            histories: ResidencyHistories::default(),
            counters: Vec::new(),
        }))
    }

    /// Reads a batch of one small item, if that is possible without waiting.
    ///
    /// # Errors
    /// What is known about the bytes, for the shard that then reads them.
    pub(crate) fn fetch(
        &self,
        batch: &Batch,
        backend: BackendKind,
        arena: &Arena,
        share: Option<&Arc<Share>>,
        deadline: Option<Instant>,
    ) -> Result<Fetched, Residency> {
        // Checked first: the shards of a ring have this state for `auto` alone.
        let bytes_max = match backend {
            BackendKind::Mmap => BYTES_MAX,
            BackendKind::Auto => SAME_THREAD_BYTES_MAX,
            BackendKind::Uring | BackendKind::Pread | BackendKind::Sim => return Err(Residency::Ask),
        };
        let ([_], [segment]) = (batch.items.as_slice(), batch.segments.as_slice()) else {
            return Err(Residency::Ask);
        };
        let length = segment.length;
        let accepted = Instant::now();
        if length > bytes_max || deadline.is_some_and(|deadline| deadline <= accepted) {
            return Err(Residency::Ask);
        }
        let file = batch.file(segment.file).ok_or(Residency::Ask)?;
        let mut state = self.lock();
        let now = (backend == BackendKind::Auto).then(Tick::now);
        let known = state.residency(file, segment, now);
        if !matches!(known, Residency::Trusted | Residency::Resident) {
            return Err(known);
        }
        // The usual path reports the refusal.
        let mut buffer = arena.reserve(length.into(), share).map_err(|_| Residency::Ask)?;
        let place = buffer.place(0, length as usize);
        let copied = if let Some(now) = now {
            let is_trusted = known == Residency::Trusted;
            // SAFETY: the buffer is ours alone, `place` has checked the length, and the call has ended when it returns.
            unsafe { copy_at_once(file, segment.offset, place, length, is_trusted, now) }
        } else {
            // SAFETY: as above.
            unsafe { pread_no_wait(file, segment.offset, place, length) }
        };
        let is_whole = copied == Ok(length);
        if now.is_none() {
            state.learn(file, is_whole);
        } else if !is_whole {
            missed(file, segment.offset, length);
        }
        if !is_whole {
            return Err(Residency::Missing);
        }
        buffer.set_visible(0..length as usize);
        let total_ns = nanoseconds(accepted.elapsed());
        state.count(batch.dataset(), backend, length, total_ns);
        drop(state);
        Ok(Fetched {
            data: buffer.into_bytes(),
            lengths: Lengths::of(&batch.items),
            errors: Vec::new(),
            times: Times {
                queue_ns: 0,
                total_ns,
            },
        })
    }

    /// Forgets the datasets without other users, unless the core copies for longer than a copy takes: a disk that hangs may hold
    /// it for ever. Then the next call does.
    pub(crate) fn sweep(&self) {
        for _ in 0..SWEEP_ATTEMPTS {
            let mut state = match self.0.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    std::thread::yield_now();
                    continue;
                }
            };
            return state.counters.retain(|(_, dataset, _)| dataset.is_open());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    /// What is known about the residency of a segment's bytes, after a query if it is worth one. `now`: for `auto`.
    fn residency(&mut self, file: &OpenFile, segment: &Segment, now: Option<Tick>) -> Residency {
        let (offset, length) = (segment.offset, segment.length);
        if let Some(now) = now {
            return self.histories.known(file, offset, length, now, &mut 1);
        }
        let Some(history) = self.histories.of(file.id) else {
            return Residency::Cold;
        };
        if history.guess() == Residency::Cold {
            return Residency::Cold;
        }
        if is_known_resident(file, offset, length) {
            // It counts as a hit once it is copied.
            return Residency::Resident;
        }
        history.learn(false);
        Residency::Missing
    }

    fn learn(&mut self, file: &OpenFile, hit: bool) {
        if let Some(history) = self.histories.of(file.id) {
            history.learn(hit);
        }
    }

    fn count(&mut self, dataset: &Dataset, backend: BackendKind, length: u32, total_ns: u64) {
        let metrics = &self.metrics;
        let found = self.counters.iter().find(|(id, ..)| *id == dataset.id());
        let count = |counters: &DatasetCounters| {
            counters.count_ok(1, length.into());
            counters.total_time.observe(total_ns, 1);
        };
        match found {
            Some((_, _, counters)) => count(counters),
            None => {
                metrics.show(backend);
                let counters = metrics.dataset(dataset.name(), backend);
                count(&counters);
                self.counters.push((dataset.id(), dataset.downgrade(), counters));
            }
        }
        metrics.batch_items.observe(1, 1);
        metrics.count_resident_reads(1);
        metrics.per_backend(backend).total_time.observe(total_ns, 1);
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the files are small")]
mod tests {
    use super::*;
    use crate::backend::residency::{forget_faults, trust, trusted};
    use crate::config::DirectIo;
    use crate::dataset::tests::file_on_disk;
    use crate::dataset::{DatasetSpec, KindSpec};
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
    use std::time::Duration;

    const BLOCKS: u64 = 64;

    fn dataset(path: &std::path::Path) -> Arc<Dataset> {
        let spec = DatasetSpec::new("blocks", path, KindSpec::blocks(4096), DirectIo::Off);
        Arc::new(Dataset::open(&spec).unwrap())
    }

    /// A core's reads, and their backend.
    type Reads = (CoreReads, BackendKind);

    fn each_backend() -> impl Iterator<Item = Reads> {
        [BackendKind::Mmap, BackendKind::Auto]
            .into_iter()
            .map(|backend| (CoreReads::new(ShardMetrics::new(0, backend, 0)), backend))
    }

    fn file() -> (tempfile::NamedTempFile, Vec<u8>) {
        let file = file_on_disk();
        let bytes: Vec<u8> = (0..BLOCKS * 4096).map(|at| (at / 4096 + at) as u8).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        (file, bytes)
    }

    fn ask(reads: &Reads, dataset: &Arc<Dataset>, ranges: &[(u64, u64)]) -> Option<Fetched> {
        let mut batch = Batch::new(Arc::clone(dataset), ranges.len());
        for (offset, length) in ranges {
            batch.push_range(*offset, *length);
        }
        let arena = Arena::new(1 << 20, 1).unwrap();
        reads.0.fetch(&batch, reads.1, &arena, None, None).ok()
    }

    /// Fetches a range until it is answered: the kernel may have evicted a page, or be writing it.
    fn answered(reads: &Reads, dataset: &Arc<Dataset>, path: &std::path::Path, range: (u64, u64)) -> Fetched {
        let found = (0..1000).find_map(|_| {
            drop(std::fs::read(path).unwrap());
            ask(reads, dataset, &[range])
        });
        found.expect("resident")
    }

    #[test]
    fn one_small_resident_item_is_answered_at_once_and_counted() {
        // Blocks and unaligned ranges are answered with their bytes. Several items, a long one, one past the
        // end and one whose deadline has passed are left to a shard.
        let (file, bytes) = file();
        for reads in each_backend() {
            let dataset = dataset(file.path());
            let longest = if reads.1 == BackendKind::Auto {
                65_536
            } else {
                16_384
            };
            for (offset, length) in [
                (0, 4096),
                (4096, 4096),
                (5, 1),
                (4000, 9000),
                (BLOCKS * 4096 - 7, 7),
                (1, longest),
            ] {
                let fetched = answered(&reads, &dataset, file.path(), (offset, length));
                let range = offset as usize..(offset + length) as usize;
                assert!(fetched.data == bytes[range] && fetched.errors.is_empty());
            }
            assert!(ask(&reads, &dataset, &[(0, 4096), (4096, 4096)]).is_none());
            assert!(ask(&reads, &dataset, &[(0, longest + 1)]).is_none());
            assert!(ask(&reads, &dataset, &[(BLOCKS * 4096, 1)]).is_none());
            let mut late = Batch::new(Arc::clone(&dataset), 1);
            late.push_block(1);
            let arena = Arena::new(1 << 20, 1).unwrap();
            let deadline = Some(Instant::now());
            assert!(reads.0.fetch(&late, reads.1, &arena, None, deadline).is_err());
            let state = reads.0.lock();
            assert_eq!(state.counters.len(), 1);
            assert_eq!(
                state.counters[0].2.ok.load(std::sync::atomic::Ordering::Relaxed),
                6
            );
            drop(state);
            drop((late, dataset));
            reads.0.sweep();
            assert!(reads.0.lock().counters.is_empty());
        }
    }

    #[test]
    fn a_core_that_waits_for_a_disk_holds_up_no_sweep() {
        // Scenario: a core copies a page that was evicted, and its disk hangs; meanwhile another thread, which also ends the
        // daemon, sweeps. Expectation: that thread goes on.
        let (reads, _) = each_backend().next().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let copying = reads.lock();
            scope.spawn(|| {
                reads.sweep();
                tell.send(()).unwrap();
            });
            let is_swept = told.recv_timeout(Duration::from_secs(20));
            drop(copying);
            is_swept.unwrap();
        });
    }

    #[test]
    fn what_was_cut_off_is_left_to_a_shard() {
        // The file loses its second half: ranges in it, or reaching into it, are not answered here; the
        // others are.
        for reads in each_backend() {
            let (file, bytes) = file();
            let dataset = dataset(file.path());
            file.as_file().set_len(BLOCKS * 2048 + 100).unwrap();
            let half = BLOCKS * 2048;
            assert!(ask(&reads, &dataset, &[(half, 4096)]).is_none());
            assert!(ask(&reads, &dataset, &[(half + 8192, 4096)]).is_none());
            let fetched = answered(&reads, &dataset, file.path(), (half, 100));
            assert!(fetched.data == bytes[half as usize..half as usize + 100]);
        }
    }

    #[test]
    fn where_the_page_cache_cannot_be_queried_a_shard_reads() {
        // cachestat(2) is refused, as by an old kernel or a container's filter, or because the file is another user's.
        // Resident blocks are left to a shard: a read that does not wait would start those that are missing.
        const SYS_CACHESTAT: i64 = 451;
        let (file, _) = file();
        for (errno, reads) in [libc::EPERM, libc::ENOSYS]
            .into_iter()
            .flat_map(|errno| each_backend().map(move |reads| (errno, reads)))
        {
            let dataset = dataset(file.path());
            answered(&reads, &dataset, file.path(), (0, 4096));
            let filter = SeccompFilter::new(
                [(SYS_CACHESTAT, Vec::new())].into(),
                SeccompAction::Allow,
                SeccompAction::Errno(errno.unsigned_abs()),
                std::env::consts::ARCH.try_into().unwrap(),
            );
            let program: BpfProgram = filter.unwrap().try_into().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    apply_filter(&program).unwrap();
                    for block in 1..16 {
                        assert!(ask(&reads, &dataset, &[(block * 4096, 4096)]).is_none());
                    }
                });
            });
        }
    }

    #[test]
    fn what_is_read_often_is_not_asked_about() {
        // Eight reads of a file that was just written. Expectation: the ninth is trusted, and so is every
        // other read in its region.
        let (file, _) = file();
        let reads = each_backend().find(|reads| reads.1 == BackendKind::Auto).unwrap();
        let dataset = dataset(file.path());
        let open = &dataset.files()[0];
        for block in 0..8 {
            assert!(!trusted(open, 0, 4096, Tick::now()), "{block}");
            assert!(ask(&reads, &dataset, &[(block * 4096, 4096)]).is_some());
        }
        forget_faults();
        let now = Tick::now();
        assert!(trusted(open, 0, 4096, now) && trusted(open, BLOCKS * 4096 - 1, 1, now));
        assert!(ask(&reads, &dataset, &[(20 * 4096, 4096)]).is_some());
    }

    #[test]
    fn what_was_cut_off_a_trusted_file_is_left_to_a_shard() {
        // As above, but `auto` does not query this file: its mapping faults, or reads zeros past the new end.
        let (file, bytes) = file();
        let reads = each_backend().find(|reads| reads.1 == BackendKind::Auto).unwrap();
        let dataset = dataset(file.path());
        trust(&dataset.files()[0]);
        assert!(ask(&reads, &dataset, &[(BLOCKS * 4096 - 4096, 4096)]).is_some());
        let half = BLOCKS * 2048;
        file.as_file().set_len(half + 100).unwrap();
        for cut in [BLOCKS * 4096 - 4096, half + 4096, half + 90, half] {
            assert!(ask(&reads, &dataset, &[(cut, 4096)]).is_none(), "{cut}");
        }
        let fetched = ask(&reads, &dataset, &[(half - 4000, 4100)]).unwrap();
        assert!(fetched.data == bytes[half as usize - 4000..half as usize + 100]);
    }

    #[test]
    fn a_truncation_beside_copies_of_a_trusted_file_leaves_no_zeros() {
        // Blocks are read one by one while another thread truncates the file at random. Every answer has the
        // file's bytes.
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..100 {
            let (file, bytes) = file();
            let reads = each_backend().find(|reads| reads.1 == BackendKind::Auto).unwrap();
            let dataset = dataset(file.path());
            trust(&dataset.files()[0]);
            let cut = random.u64(1..BLOCKS * 4096);
            let near = cut / 4096 * 4096;
            std::thread::scope(|scope| {
                let cutting = scope.spawn(|| file.as_file().set_len(cut).unwrap());
                let mut is_cut = false;
                while !is_cut {
                    is_cut = cutting.is_finished();
                    if let Some(fetched) = ask(&reads, &dataset, &[(near, 4096)]) {
                        let range = near as usize..near as usize + 4096;
                        assert!(fetched.data == bytes[range], "cut at {cut}");
                    }
                }
                assert!(ask(&reads, &dataset, &[(near, 4096)]).is_none());
            });
        }
    }

    #[test]
    fn a_cold_file_is_hardly_ever_tried() {
        // After many misses one read in 16 is tried; once those hit, every read is tried again.
        let (file, _) = file();
        for reads in each_backend() {
            let dataset = dataset(file.path());
            let mut state = reads.0.lock();
            let id = dataset.files()[0].id;
            for _ in 0..1000 {
                state.histories.of(id).unwrap().learn(false);
            }
            let history = state.histories.of(id).unwrap();
            let tried = (0..160).filter(|_| history.guess() != Residency::Cold).count();
            assert_eq!(tried, 10);
            drop(state);
            let answered = (0..1000)
                .filter(|_| ask(&reads, &dataset, &[(0, 4096)]).is_some())
                .count();
            assert!(answered > 900, "{answered}");
        }
    }
}
