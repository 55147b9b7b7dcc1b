//! The engine's counters. Each shard writes its own, on its own cache lines, with plain loads and stores; a
//! scrape sums them. So counting costs the hot path no shared cache line and no locked instruction.
//!
//! A shard on a ring serves `uring` and `auto`, and counts each separately. Names and labels, in `collector`,
//! are a contract.

mod collector;

pub(crate) use collector::{EngineCollector, MetricsRegistry};

use crate::config::BackendKind;
use crate::engine::Totals;
use crate::planned_batch::PlannedBatch;
use crate::series::{DURATION_BOUNDS_NS, HistogramTotal, float};
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Upper bounds of the counting histograms (queue depth, batch items): powers of two.
const COUNT_BOUNDS: [u64; 14] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];

/// Adds to a counter that only this thread writes.
fn add(counter: &AtomicU64, value: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(value),
        Ordering::Relaxed,
    );
}

/// A histogram written by one thread.
#[derive(Debug)]
pub(crate) struct LocalHistogram<const N: usize> {
    bounds: &'static [u64; N],
    /// One per bound.
    buckets: [AtomicU64; N],
    /// Values above the last bound. There is no count beside the buckets: read while this thread writes, it would
    /// differ from their sum, and a difference of the two (the slow reads of deploy/prometheus/rules.yml) would fall.
    above: AtomicU64,
    sum: AtomicU64,
}

impl<const N: usize> LocalHistogram<N> {
    fn new(bounds: &'static [u64; N]) -> Self {
        Self {
            bounds,
            buckets: [const { AtomicU64::new(0) }; N],
            above: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }

    /// Records `times` observations of one value.
    pub(crate) fn observe(&self, value: u64, times: u64) {
        let index = self.bounds.partition_point(|bound| *bound < value);
        add(self.buckets.get(index).unwrap_or(&self.above), times);
        add(&self.sum, value.saturating_mul(times));
    }

    /// Records one observation for each value from `first` to `last`.
    pub(crate) fn observe_each(&self, first: u64, last: u64) {
        let Some(more) = last.checked_sub(first) else {
            return;
        };
        let mut from = first;
        for (bound, bucket) in self.bounds.iter().zip(&self.buckets) {
            if *bound >= from {
                let end = last.min(*bound);
                add(bucket, end - from + 1);
                from = end + 1;
                if from > last {
                    break;
                }
            }
        }
        if from <= last {
            add(&self.above, last - from + 1);
        }
        add(&self.sum, (more + 1) * (first + last) / 2);
    }

    pub(crate) fn merge_into(&self, total: &mut HistogramTotal) {
        total.buckets.resize(N, 0);
        for (sum, bucket) in total.buckets.iter_mut().zip(&self.buckets) {
            let count = bucket.load(Ordering::Relaxed);
            *sum += count;
            total.count += count;
        }
        total.count += self.above.load(Ordering::Relaxed);
        total.sum += self.sum.load(Ordering::Relaxed);
    }
}

/// Duration in whole nanoseconds, saturating.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Reads that took longer miss the latency objective: `ringfetch:slow_reads:total` in deploy/prometheus/rules.yml.
const SLOW_NS: u64 = 50_000_000;

/// Results of a read, the closed set of the `result` label: `ReadError::label` and these two.
pub(crate) const RESULT_OK: &str = "ok";
/// The caller dropped the ticket before the reply.
pub(crate) const RESULT_ABANDONED: &str = "abandoned";
/// Failures by the service's fault, as deploy/prometheus/rules.yml counts them.
pub(crate) const RESULTS_OF_FAULTS: [&str; 6] = [
    "deadline",
    "device_error",
    "engine_failed",
    "overloaded",
    "truncated",
    "unreadable",
];

/// Reads of one dataset on one shard.
#[derive(Debug)]
pub(crate) struct DatasetCounters {
    dataset: String,
    backend: BackendKind,
    pub(crate) ok: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) total_time: LocalHistogram<22>,
    /// Not on the hot path, so a lock and a map are fine.
    failed: Mutex<HashMap<&'static str, u64>>,
}

impl DatasetCounters {
    pub(crate) fn count_ok(&self, reads: u64, bytes: u64) {
        add(&self.ok, reads);
        add(&self.bytes, bytes);
    }

    pub(crate) fn count_failed(&self, label: &'static str, reads: u64) {
        if reads > 0 {
            *lock(&self.failed).entry(label).or_default() += reads;
        }
    }

    /// Counts reads for which nobody waits any more. Those that were slow by then are timed, so that a disk that is slower than
    /// the patience of clients burns a budget; how long the others would have taken is not known.
    pub(crate) fn count_given_up(&self, batch: &PlannedBatch, metrics: &ShardMetrics, now: Instant) {
        let count = batch.items.len() as u64;
        let result = batch.given_up(now);
        self.count_failed(result, count);
        let waited_ns = nanoseconds(now.saturating_duration_since(batch.accepted));
        // Past their deadline they have failed, which burns the other budget.
        if result == RESULT_ABANDONED && waited_ns > SLOW_NS {
            metrics
                .per_backend(batch.backend)
                .total_time
                .observe(waited_ns, count);
            self.total_time.observe(waited_ns, count);
        }
    }

    #[cfg(test)]
    pub(crate) fn failed(&self, label: &str) -> u64 {
        lock(&self.failed).get(label).copied().unwrap_or(0)
    }
}

/// What a shard counts for reads served by one backend.
#[derive(Debug)]
pub(crate) struct PerBackend {
    pub(crate) backend: BackendKind,
    /// Whether the backend was ever chosen: only then are its series exported.
    shown: AtomicBool,
    pub(crate) queue_time: LocalHistogram<22>,
    pub(crate) device_time: LocalHistogram<22>,
    pub(crate) total_time: LocalHistogram<22>,
}

impl PerBackend {
    fn new(backend: BackendKind) -> Self {
        Self {
            backend,
            shown: AtomicBool::new(false),
            queue_time: LocalHistogram::new(&DURATION_BOUNDS_NS),
            device_time: LocalHistogram::new(&DURATION_BOUNDS_NS),
            total_time: LocalHistogram::new(&DURATION_BOUNDS_NS),
        }
    }
}

/// One shard's counters. Only the shard's thread writes, except where noted.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ShardMetrics {
    pub(crate) shard: u32,
    pub(crate) queue_depth: u32,
    /// The current limit of reads in flight: less than `queue_depth` while several callers share it.
    pub(crate) depth_limit: AtomicU32,
    /// The backends that it serves; a batch says which of them reads it.
    backends: [PerBackend; 2],
    /// Reads in flight, and how many of them have stalled on disks that hang.
    pub(crate) in_flight: AtomicU32,
    pub(crate) stalled: AtomicU32,
    /// Reads accepted and not started, with those that have joined another one and wait for its bytes. Submitters add, the shard
    /// subtracts, and adds the reads into which a failed one is split.
    pub(crate) queued: AtomicI64,
    pub(crate) device_reads: AtomicU64,
    pub(crate) device_bytes: AtomicU64,
    pub(crate) resident_reads: AtomicU64,
    pub(crate) joined_reads: AtomicU64,
    pub(crate) submissions: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) depth_seen: LocalHistogram<14>,
    pub(crate) batch_items: LocalHistogram<14>,
    datasets: Mutex<Vec<Arc<DatasetCounters>>>,
}

impl ShardMetrics {
    /// Counters of a shard that serves `backend`, and if it has a ring also the other backend that a ring
    /// serves.
    pub(crate) fn new(shard: u32, backend: BackendKind, queue_depth: u32) -> Arc<Self> {
        let backends = if backend.uses_ring() {
            [BackendKind::Uring, BackendKind::Auto]
        } else {
            [backend, backend]
        };
        Arc::new(Self {
            shard,
            queue_depth,
            depth_limit: AtomicU32::new(queue_depth),
            backends: backends.map(PerBackend::new),
            in_flight: AtomicU32::new(0),
            stalled: AtomicU32::new(0),
            queued: AtomicI64::new(0),
            device_reads: AtomicU64::new(0),
            device_bytes: AtomicU64::new(0),
            resident_reads: AtomicU64::new(0),
            joined_reads: AtomicU64::new(0),
            submissions: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            depth_seen: LocalHistogram::new(&COUNT_BOUNDS),
            batch_items: LocalHistogram::new(&COUNT_BOUNDS),
            datasets: Mutex::new(Vec::new()),
        })
    }

    /// Reads in flight that have not stalled.
    pub(crate) fn moving(&self) -> u32 {
        let stalled = self.stalled.load(Ordering::Relaxed);
        self.in_flight.load(Ordering::Relaxed).saturating_sub(stalled)
    }

    /// Reads that are accepted and not started.
    pub(crate) fn queued(&self) -> u64 {
        let queued = self.queued.load(Ordering::Relaxed);
        debug_assert!(queued >= 0, "{queued} reads are queued");
        u64::try_from(queued).unwrap_or(0)
    }

    /// The counters of a backend; the first ones for a backend that this shard does not serve.
    pub(crate) fn per_backend(&self, backend: BackendKind) -> &PerBackend {
        let [first, second] = &self.backends;
        if second.backend == backend && first.backend != backend {
            second
        } else {
            first
        }
    }

    /// Exports a backend's series from now on.
    pub(crate) fn show(&self, backend: BackendKind) {
        self.per_backend(backend).shown.store(true, Ordering::Relaxed);
    }

    /// The counters of a dataset's reads by one backend on this shard, created on first use. A dataset that
    /// is reopened continues its counters.
    pub(crate) fn dataset(&self, name: &str, backend: BackendKind) -> Arc<DatasetCounters> {
        let mut datasets = lock(&self.datasets);
        let known = datasets
            .iter()
            .find(|known| known.backend == backend && known.dataset == name);
        if let Some(known) = known {
            return Arc::clone(known);
        }
        let made = Arc::new(DatasetCounters {
            dataset: name.to_owned(),
            backend,
            ok: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            total_time: LocalHistogram::new(&DURATION_BOUNDS_NS),
            failed: Mutex::new(HashMap::new()),
        });
        datasets.push(Arc::clone(&made));
        made
    }

    pub(crate) fn count_submission(&self, submissions: u32) {
        add(&self.submissions, u64::from(submissions));
    }

    pub(crate) fn count_joined_reads(&self, reads: u64) {
        add(&self.joined_reads, reads);
    }

    pub(crate) fn count_resident_reads(&self, reads: u64) {
        add(&self.resident_reads, reads);
    }

    pub(crate) fn count_device_reads(&self, reads: u64, bytes: u64) {
        add(&self.device_reads, reads);
        add(&self.device_bytes, bytes);
    }
}

/// Finished reads that are not counted yet. Reads that start together often finish together, and so took the
/// same time; observing each would cost more than reading it from memory.
#[derive(Debug, Default)]
pub(crate) struct DeviceTimes(Option<(BackendKind, Instant, u64, u64)>);

impl DeviceTimes {
    /// Adds a read that was started at `started` and finished at `now`, which must be the same for all until
    /// [`DeviceTimes::tell`].
    pub(crate) fn add(
        &mut self,
        backend: BackendKind,
        started: Instant,
        now: Instant,
        metrics: &ShardMetrics,
    ) {
        match &mut self.0 {
            Some((of, since, _, reads)) if *of == backend && *since == started => *reads += 1,
            Some(_) | None => {
                self.tell(metrics);
                let took = nanoseconds(now.saturating_duration_since(started));
                self.0 = Some((backend, started, took, 1));
            }
        }
    }

    /// Counts the reads that are not counted yet.
    pub(crate) fn tell(&mut self, metrics: &ShardMetrics) {
        if let Some((backend, _, took, reads)) = self.0.take() {
            metrics.per_backend(backend).device_time.observe(took, reads);
        }
    }
}

/// Totals of reads, over datasets and backends.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReadTotals {
    reads: u64,
    errors: u64,
    bytes: u64,
}

impl ReadTotals {
    pub(crate) fn add(&mut self, counters: &DatasetCounters) {
        let failed = lock(&counters.failed);
        let failed: u64 = failed.values().sum();
        self.reads += counters.ok.load(Ordering::Relaxed) + failed;
        self.errors += failed;
        self.bytes += counters.bytes.load(Ordering::Relaxed);
    }
}

/// Sums over shards, for the status; `read` starts with the reads whose counters were dropped.
pub(crate) fn totals(shards: &[Arc<ShardMetrics>], mut read: ReadTotals) -> Totals {
    let mut time = HistogramTotal::default();
    for shard in shards {
        for per_backend in &shard.backends {
            per_backend.total_time.merge_into(&mut time);
        }
        for dataset in lock(&shard.datasets).iter() {
            read.add(dataset);
        }
    }
    let mut totals = Totals {
        reads: read.reads,
        read_errors: read.errors,
        read_bytes: read.bytes,
        total_seconds: Vec::new(),
    };
    let mut cumulative = 0;
    for (bound, count) in DURATION_BOUNDS_NS.iter().zip(&time.buckets) {
        cumulative += count;
        totals.total_seconds.push((float(*bound) / 1e9, cumulative));
    }
    totals.total_seconds.push((f64::INFINITY, time.count));
    totals
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_values_at_once_are_each_of_them() {
        // Scenario: ranges of one to thousands of values, within and above the bounds, against one
        // observation per value. Expectation: the same histogram; an empty range adds nothing.
        let (at_once, each) = (
            LocalHistogram::new(&COUNT_BOUNDS),
            LocalHistogram::new(&COUNT_BOUNDS),
        );
        for (first, last) in [
            (1, 1),
            (3, 9),
            (0, 0),
            (5, 4),
            (64, 129),
            (8000, 9001),
            (9000, 9002),
            (1, 64),
        ] {
            at_once.observe_each(first, last);
            (first..=last).for_each(|value| each.observe(value, 1));
        }
        let told = |histogram: &LocalHistogram<14>| {
            let mut total = HistogramTotal::default();
            histogram.merge_into(&mut total);
            (total.buckets, total.count, total.sum)
        };
        assert_eq!(told(&at_once), told(&each));
    }

    #[test]
    fn a_histogram_read_while_it_is_written_agrees_with_itself() {
        // Scenario: small values are recorded without a pause while the histogram is read. Expectation: each time
        // the count is the sum of the buckets: nothing seems to lie above the highest bound. (The count of slow
        // reads is such a difference, and Prometheus would take its falling for a restart.)
        let histogram = LocalHistogram::new(&COUNT_BOUNDS);
        let written = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..5_000_000).for_each(|_| histogram.observe(1, 64));
                written.store(true, Ordering::Relaxed);
            });
            while !written.load(Ordering::Relaxed) {
                let mut total = HistogramTotal::default();
                histogram.merge_into(&mut total);
                assert_eq!(total.count, total.buckets.iter().sum::<u64>());
            }
        });
    }

    #[test]
    fn reads_that_took_the_same_time_are_counted_together_and_all() {
        // Scenario: reads of two starts and two backends, in runs and mixed. Expectation: each is counted
        // with its own time, under its own backend.
        let metrics = ShardMetrics::new(0, BackendKind::Uring, 8);
        let now = Instant::now();
        let (long, short) = (now - Duration::from_micros(300), now - Duration::from_micros(30));
        let mut times = DeviceTimes::default();
        let (uring, auto) = (BackendKind::Uring, BackendKind::Auto);
        for (backend, started) in [
            (uring, long),
            (uring, long),
            (auto, long),
            (uring, short),
            (uring, short),
            (uring, long),
        ] {
            times.add(backend, started, now, &metrics);
        }
        times.tell(&metrics);
        times.tell(&metrics);
        let told = |backend| {
            let mut total = HistogramTotal::default();
            metrics.per_backend(backend).device_time.merge_into(&mut total);
            (total.count, total.sum)
        };
        assert_eq!(told(uring), (5, 3 * 300_000 + 2 * 30_000));
        assert_eq!(told(auto), (1, 300_000));
    }

    #[test]
    fn slow_reads_are_those_that_miss_the_latency_objective() {
        // Scenario: the rule that counts slow reads. Expectation: it and this module mean the same duration, and the
        // histogram has a bucket that ends there.
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/prometheus/rules.yml");
        let rules = std::fs::read_to_string(path).unwrap();
        let (_, rule) = rules
            .split_once("- record: ringfetch:slow_reads:total\n")
            .unwrap();
        let (_, rest) = rule.split_once("le=\"").unwrap();
        let (seconds, _) = rest.split_once('"').unwrap();
        let bound = Duration::from_secs_f64(seconds.parse().unwrap());
        assert_eq!(nanoseconds(bound), SLOW_NS);
        assert!(DURATION_BOUNDS_NS.contains(&SLOW_NS));
    }
}
