//! Small requests answered by the core that submits them, when a mapping's backend serves their dataset and the page cache has
//! their bytes: the way to a shard's thread and back takes longer than such a read.
//!
//! Copied by preadv2(2) with RWF_NOWAIT, which neither waits for a device nor faults, so that a network thread stays free
//! even if a page is evicted meanwhile. What it does not bring completely (not resident, truncated, a file system that
//! always waits) goes to a shard, which finds the cause. A file of which hardly anything was resident lately is tried once in
//! 16 reads, as `auto` asks.

use crate::backend::residency::{Residency, ResidencyHistories, pread_no_wait};
use crate::batch::{Batch, Fetched, Lengths, Times};
use crate::buffer::Arena;
use crate::config::BackendKind;
use crate::dataset::Dataset;
use crate::metrics::{DatasetCounters, ShardMetrics, nanoseconds};
use crate::share::Share;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// Longest item. Copying more is worth a thread of its own.
const BYTES_MAX: u32 = 16 << 10;

/// One core's. Aligned, so that cores share no cache line (128: x86 fetches lines in pairs).
#[repr(align(128))]
pub(crate) struct CoreReads(Mutex<State>);

struct State {
    metrics: Arc<ShardMetrics>,
    histories: ResidencyHistories,
    /// Of each dataset read here, by its id.
    counters: Vec<(u64, Weak<Dataset>, Arc<DatasetCounters>)>,
}

impl CoreReads {
    /// `metrics`: not those of a shard, which only its thread may write to.
    pub(crate) fn new(metrics: Arc<ShardMetrics>) -> Self {
        Self(Mutex::new(State {
            metrics,
            histories: ResidencyHistories::default(),
            counters: Vec::new(),
        }))
    }

    /// Reads a batch of one small item, if that is possible without waiting.
    pub(crate) fn fetch(
        &self,
        batch: &Batch,
        arena: &Arena,
        share: Option<&Arc<Share>>,
        deadline: Option<Instant>,
    ) -> Option<Fetched> {
        let ([_], [segment]) = (batch.items.as_slice(), batch.segments.as_slice()) else {
            return None;
        };
        let length = segment.length;
        let accepted = Instant::now();
        if length > BYTES_MAX || deadline.is_some_and(|deadline| deadline <= accepted) {
            return None;
        }
        let file = batch.file(segment.file)?;
        let mut state = self.lock();
        let history = state.histories.of(file.id)?;
        if history.guess() == Residency::Cold {
            return None;
        }
        // A refusal is for the usual way to give.
        let mut buffer = arena.reserve(length.into(), share).ok()?;
        let place = buffer.place(0, length as usize);
        // SAFETY: the buffer is ours alone, `place` has checked the length, and the call has ended when it returns.
        let read = unsafe { pread_no_wait(file, segment.offset, place, length) };
        let is_whole = read == Ok(length);
        history.learn(is_whole);
        if !is_whole {
            return None;
        }
        let total_ns = nanoseconds(accepted.elapsed());
        state.count(batch.dataset(), length, total_ns);
        drop(state);
        buffer.set_visible(0..length as usize);
        Some(Fetched {
            data: buffer.into_bytes(),
            lengths: Lengths::of(&batch.items),
            errors: Vec::new(),
            times: Times {
                queue_ns: 0,
                total_ns,
            },
        })
    }

    /// Forgets the datasets without other users.
    pub(crate) fn sweep(&self) {
        self.lock()
            .counters
            .retain(|(_, dataset, _)| dataset.strong_count() > 0);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn count(&mut self, dataset: &Arc<Dataset>, length: u32, total_ns: u64) {
        let metrics = &self.metrics;
        let found = self.counters.iter().find(|(id, ..)| *id == dataset.id());
        let count = |counters: &DatasetCounters| {
            counters.count_ok(1, length.into());
            counters.total_time.observe(total_ns, 1);
        };
        match found {
            Some((_, _, counters)) => count(counters),
            None => {
                let counters = metrics.dataset(dataset.name(), BackendKind::Mmap);
                count(&counters);
                self.counters
                    .push((dataset.id(), Arc::downgrade(dataset), counters));
            }
        }
        metrics.batch_items.observe(1, 1);
        metrics.count_resident_reads(1);
        metrics
            .per_backend(BackendKind::Mmap)
            .total_time
            .observe(total_ns, 1);
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the files are small")]
mod tests {
    use super::*;
    use crate::config::DirectIo;
    use crate::dataset::{DatasetSpec, KindSpec, PartialTail};

    const BLOCKS: u64 = 64;

    fn dataset(path: &std::path::Path) -> Arc<Dataset> {
        let spec = DatasetSpec {
            name: "blocks".to_owned(),
            paths: vec![path.to_owned()],
            kind: KindSpec::Blocks {
                block_bytes: 4096,
                partial_tail: PartialTail::Refuse,
            },
            direct_io: DirectIo::Off,
        };
        Arc::new(Dataset::open(&spec).unwrap())
    }

    fn reads() -> CoreReads {
        CoreReads::new(ShardMetrics::new(0, BackendKind::Mmap, 0))
    }

    /// A file below the target directory: on tmpfs nothing is ever evicted.
    fn file() -> (tempfile::NamedTempFile, Vec<u8>) {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let bytes: Vec<u8> = (0..BLOCKS * 4096).map(|at| (at / 4096 + at) as u8).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        (file, bytes)
    }

    fn ask(reads: &CoreReads, dataset: &Arc<Dataset>, ranges: &[(u64, u64)]) -> Option<Fetched> {
        let mut batch = Batch::new(Arc::clone(dataset), ranges.len());
        for (offset, length) in ranges {
            batch.push_range(*offset, *length);
        }
        let arena = Arena::new(1 << 20).unwrap();
        reads.fetch(&batch, &arena, None, None)
    }

    /// The same of a range that the page cache has, or gets: the kernel may have taken a page away, or be writing it.
    fn answered(
        reads: &CoreReads,
        dataset: &Arc<Dataset>,
        path: &std::path::Path,
        range: (u64, u64),
    ) -> Fetched {
        let found = (0..1000).find_map(|_| {
            drop(std::fs::read(path).unwrap());
            ask(reads, dataset, &[range])
        });
        found.expect("resident")
    }

    #[test]
    fn one_small_resident_item_is_answered_at_once_and_counted() {
        // Blocks, and ranges that begin and end anywhere: their bytes. Several items, a long one, one outside, and one
        // whose deadline has passed: left to a shard.
        let (file, bytes) = file();
        let (dataset, reads) = (dataset(file.path()), reads());
        for (offset, length) in [
            (0, 4096),
            (4096, 4096),
            (5, 1),
            (4000, 9000),
            (BLOCKS * 4096 - 7, 7),
        ] {
            let fetched = answered(&reads, &dataset, file.path(), (offset, length));
            let range = offset as usize..(offset + length) as usize;
            assert!(fetched.data == bytes[range] && fetched.errors.is_empty());
        }
        assert!(ask(&reads, &dataset, &[(0, 4096), (4096, 4096)]).is_none());
        assert!(ask(&reads, &dataset, &[(0, 16_385)]).is_none());
        assert!(ask(&reads, &dataset, &[(BLOCKS * 4096, 1)]).is_none());
        let mut late = Batch::new(Arc::clone(&dataset), 1);
        late.push_block(1);
        let arena = Arena::new(1 << 20).unwrap();
        let deadline = Some(Instant::now());
        assert!(reads.fetch(&late, &arena, None, deadline).is_none());
        let state = reads.lock();
        assert_eq!(state.counters.len(), 1);
        assert_eq!(
            state.counters[0].2.ok.load(std::sync::atomic::Ordering::Relaxed),
            5
        );
        drop(state);
        drop((late, dataset));
        reads.sweep();
        assert!(reads.lock().counters.is_empty());
    }

    #[test]
    fn what_was_cut_off_is_left_to_a_shard() {
        // The file loses its second half: what lies there, or reaches into it, is not answered here; the rest is.
        let (file, bytes) = file();
        let (dataset, reads) = (dataset(file.path()), reads());
        file.as_file().set_len(BLOCKS * 2048 + 100).unwrap();
        let half = BLOCKS * 2048;
        assert!(ask(&reads, &dataset, &[(half, 4096)]).is_none());
        assert!(ask(&reads, &dataset, &[(half + 8192, 4096)]).is_none());
        let fetched = answered(&reads, &dataset, file.path(), (half, 100));
        assert!(fetched.data == bytes[half as usize..half as usize + 100]);
    }

    #[test]
    fn a_cold_file_is_hardly_ever_tried() {
        // After many misses one read in 16 is tried; once those find their bytes, every read is again.
        let (file, _) = file();
        let (dataset, reads) = (dataset(file.path()), reads());
        let mut state = reads.lock();
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
