//! The engine's counters. Each shard writes its own, on its own cache lines, with plain loads and stores; a scrape adds
//! them up. Counting therefore costs the hot path no shared cache line and no locked instruction.
//!
//! Names and labels are a contract (docs/OPERATIONS, DESIGN). Labels are closed sets: never an offset, a client, a path.

use crate::config::BackendKind;
use crate::engine::{BackendStatus, Totals};
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Upper bounds of the duration histograms, nanoseconds: 1-2-5 from 1 us to 10 s (TRAPS 27: the library's default
/// begins at 5 ms, far above a device).
const DURATION_BOUNDS_NS: [u64; 22] = [
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
    10_000_000_000,
];

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
    /// One a bound; values above the last are only in `count`.
    buckets: [AtomicU64; N],
    count: AtomicU64,
    sum: AtomicU64,
}

impl<const N: usize> LocalHistogram<N> {
    fn new(bounds: &'static [u64; N]) -> Self {
        Self {
            bounds,
            buckets: [const { AtomicU64::new(0) }; N],
            count: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }

    /// Records `times` observations of one value.
    pub(crate) fn observe(&self, value: u64, times: u64) {
        let index = self.bounds.partition_point(|bound| *bound < value);
        if let Some(bucket) = self.buckets.get(index) {
            add(bucket, times);
        }
        add(&self.count, times);
        add(&self.sum, value.saturating_mul(times));
    }

    fn merge_into(&self, total: &mut HistogramTotal) {
        total.buckets.resize(N, 0);
        for (sum, bucket) in total.buckets.iter_mut().zip(&self.buckets) {
            *sum += bucket.load(Ordering::Relaxed);
        }
        total.count += self.count.load(Ordering::Relaxed);
        total.sum += self.sum.load(Ordering::Relaxed);
    }
}

/// Duration in whole nanoseconds, saturating.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[derive(Debug, Default)]
struct HistogramTotal {
    buckets: Vec<u64>,
    count: u64,
    sum: u64,
}

/// Results of a read, the closed set of the `result` label: `ReadError::label` and these two.
pub(crate) const RESULT_OK: &str = "ok";
/// The caller gave up before the answer.
pub(crate) const RESULT_ABANDONED: &str = "abandoned";

/// Reads of one dataset on one shard.
#[derive(Debug)]
pub(crate) struct DatasetCounters {
    dataset: String,
    backend: BackendKind,
    pub(crate) ok: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Off the hot path, so a lock and a map do.
    failed: Mutex<HashMap<&'static str, u64>>,
}

impl DatasetCounters {
    pub(crate) fn count_ok(&self, reads: u64, bytes: u64) {
        add(&self.ok, reads);
        add(&self.bytes, bytes);
    }

    pub(crate) fn count_failed(&self, label: &'static str, reads: u64) {
        if reads > 0 {
            *self
                .failed
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(label)
                .or_default() += reads;
        }
    }
}

/// One shard's counters. Only the shard's thread writes, except where noted.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ShardMetrics {
    pub(crate) shard: u32,
    pub(crate) backend: BackendKind,
    pub(crate) queue_depth: u32,
    pub(crate) in_flight: AtomicU32,
    /// Reads accepted and not started. Submitters add, the shard subtracts.
    pub(crate) queued: AtomicI64,
    pub(crate) device_reads: AtomicU64,
    pub(crate) device_bytes: AtomicU64,
    pub(crate) resident_reads: AtomicU64,
    pub(crate) submissions: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) depth_seen: LocalHistogram<14>,
    pub(crate) batch_items: LocalHistogram<14>,
    pub(crate) queue_time: LocalHistogram<22>,
    pub(crate) device_time: LocalHistogram<22>,
    pub(crate) total_time: LocalHistogram<22>,
    datasets: Mutex<Vec<(u64, Arc<DatasetCounters>)>>,
}

impl ShardMetrics {
    pub(crate) fn new(shard: u32, backend: BackendKind, queue_depth: u32) -> Arc<Self> {
        Arc::new(Self {
            shard,
            backend,
            queue_depth,
            in_flight: AtomicU32::new(0),
            queued: AtomicI64::new(0),
            device_reads: AtomicU64::new(0),
            device_bytes: AtomicU64::new(0),
            resident_reads: AtomicU64::new(0),
            submissions: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            depth_seen: LocalHistogram::new(&COUNT_BOUNDS),
            batch_items: LocalHistogram::new(&COUNT_BOUNDS),
            queue_time: LocalHistogram::new(&DURATION_BOUNDS_NS),
            device_time: LocalHistogram::new(&DURATION_BOUNDS_NS),
            total_time: LocalHistogram::new(&DURATION_BOUNDS_NS),
            datasets: Mutex::new(Vec::new()),
        })
    }

    /// The counters of a dataset on this shard; made at its first read here.
    pub(crate) fn dataset(&self, id: u64, name: &str) -> Arc<DatasetCounters> {
        let mut datasets = self.datasets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = datasets.iter().find(|(known, _)| *known == id) {
            return Arc::clone(known);
        }
        let made = Arc::new(DatasetCounters {
            dataset: name.to_owned(),
            backend: self.backend,
            ok: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failed: Mutex::new(HashMap::new()),
        });
        datasets.push((id, Arc::clone(&made)));
        made
    }

    pub(crate) fn count_submission(&self, submissions: u32) {
        add(&self.submissions, u64::from(submissions));
    }

    pub(crate) fn count_resident_read(&self) {
        add(&self.resident_reads, 1);
    }

    pub(crate) fn count_device_read(&self, bytes: u32) {
        add(&self.device_reads, 1);
        add(&self.device_bytes, u64::from(bytes));
    }
}

/// Sums over shards, for the status answer.
pub(crate) fn totals(shards: &[Arc<ShardMetrics>]) -> Totals {
    let mut totals = Totals {
        reads: 0,
        read_errors: 0,
        read_bytes: 0,
        total_seconds: Vec::new(),
    };
    let mut time = HistogramTotal::default();
    for shard in shards {
        shard.total_time.merge_into(&mut time);
        for (_, dataset) in shard
            .datasets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            let failed: u64 = dataset
                .failed
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .values()
                .sum();
            totals.reads += dataset.ok.load(Ordering::Relaxed) + failed;
            totals.read_errors += failed;
            totals.read_bytes += dataset.bytes.load(Ordering::Relaxed);
        }
    }
    let mut cumulative = 0;
    for (bound, count) in DURATION_BOUNDS_NS.iter().zip(&time.buckets) {
        cumulative += count;
        totals.total_seconds.push((seconds(*bound), cumulative));
    }
    totals.total_seconds.push((f64::INFINITY, time.count));
    totals
}

#[expect(clippy::cast_precision_loss, reason = "53 bits of nanoseconds are 104 days")]
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus counts in f64")]
fn float(value: u64) -> f64 {
    value as f64
}

/// Adds the shards up at each scrape.
pub(crate) struct EngineCollector {
    pub(crate) shards: Vec<Arc<ShardMetrics>>,
    pub(crate) backend: BackendStatus,
    pub(crate) descriptions: Vec<Desc>,
}

const HELP: [(&str, &str); 14] = [
    ("ringfetch_reads_total", "Items answered, by result."),
    ("ringfetch_read_bytes_total", "Bytes of items answered."),
    (
        "ringfetch_read_duration_seconds",
        "Time of a read: waiting in the queue, on the device, and in total from acceptance to answer.",
    ),
    ("ringfetch_in_flight_reads", "Reads submitted and not completed."),
    (
        "ringfetch_queue_depth",
        "Reads in flight seen at each submission, itself included.",
    ),
    (
        "ringfetch_queue_depth_limit",
        "The most reads a shard keeps in flight.",
    ),
    ("ringfetch_queued_reads", "Reads accepted and not submitted."),
    ("ringfetch_batch_items", "Items of each batch."),
    (
        "ringfetch_device_reads_total",
        "Reads sent to the device, after merging and splitting.",
    ),
    (
        "ringfetch_device_read_bytes_total",
        "Bytes asked of the device, after merging and alignment.",
    ),
    (
        "ringfetch_resident_reads_total",
        "Reads copied from the page cache by backend auto instead of being sent to the device.",
    ),
    (
        "ringfetch_submissions_total",
        "System calls that submitted reads.",
    ),
    (
        "ringfetch_shard_failures_total",
        "Shards that stopped because of a defect; the log says which.",
    ),
    (
        "ringfetch_backend_info",
        "1, with the backend in use, the one asked for, and why.",
    ),
];

impl EngineCollector {
    pub(crate) fn new(
        shards: Vec<Arc<ShardMetrics>>,
        backend: BackendStatus,
    ) -> Result<Self, prometheus::Error> {
        let descriptions = HELP
            .iter()
            .map(|(name, help)| Desc::new((*name).to_owned(), (*help).to_owned(), Vec::new(), HashMap::new()))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            shards,
            backend,
            descriptions,
        })
    }
}

struct Family(MetricFamily);

impl Family {
    fn new(name: &str, kind: MetricType) -> Self {
        let help = HELP
            .iter()
            .find(|(known, _)| *known == name)
            .map_or("", |(_, help)| help);
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        Self(family)
    }

    fn push(&mut self, labels: &[(&str, &str)], fill: impl FnOnce(&mut Metric)) {
        let labels = labels
            .iter()
            .map(|(name, value)| {
                let mut pair = LabelPair::default();
                pair.set_name((*name).to_owned());
                pair.set_value((*value).to_owned());
                pair
            })
            .collect();
        let mut metric = Metric::from_label(labels);
        fill(&mut metric);
        self.0.mut_metric().push(metric);
    }

    fn counter(&mut self, labels: &[(&str, &str)], value: u64) {
        self.push(labels, |metric| {
            let mut counter = Counter::default();
            counter.set_value(float(value));
            metric.set_counter(counter);
        });
    }

    fn gauge(&mut self, labels: &[(&str, &str)], value: f64) {
        self.push(labels, |metric| {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        });
    }

    fn histogram(&mut self, labels: &[(&str, &str)], total: &HistogramTotal, bounds: &[u64], scale: f64) {
        self.push(labels, |metric| {
            let mut histogram = Histogram::default();
            let mut cumulative = 0;
            let buckets = bounds.iter().zip(&total.buckets).map(|(bound, count)| {
                cumulative += count;
                let mut bucket = Bucket::default();
                bucket.set_upper_bound(float(*bound) * scale);
                bucket.set_cumulative_count(cumulative);
                bucket
            });
            histogram.set_bucket(buckets.collect());
            histogram.set_sample_count(total.count);
            histogram.set_sample_sum(float(total.sum) * scale);
            metric.set_histogram(histogram);
        });
    }
}

impl Collector for EngineCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        use MetricType::{COUNTER, GAUGE, HISTOGRAM};
        let mut reads = Family::new("ringfetch_reads_total", COUNTER);
        let mut bytes = Family::new("ringfetch_read_bytes_total", COUNTER);
        let mut duration = Family::new("ringfetch_read_duration_seconds", HISTOGRAM);
        let mut in_flight = Family::new("ringfetch_in_flight_reads", GAUGE);
        let mut depth = Family::new("ringfetch_queue_depth", HISTOGRAM);
        let mut limit = Family::new("ringfetch_queue_depth_limit", GAUGE);
        let mut queued = Family::new("ringfetch_queued_reads", GAUGE);
        let mut items = Family::new("ringfetch_batch_items", HISTOGRAM);
        let mut device_reads = Family::new("ringfetch_device_reads_total", COUNTER);
        let mut device_bytes = Family::new("ringfetch_device_read_bytes_total", COUNTER);
        let mut resident = Family::new("ringfetch_resident_reads_total", COUNTER);
        let mut submissions = Family::new("ringfetch_submissions_total", COUNTER);
        let mut failures = Family::new("ringfetch_shard_failures_total", COUNTER);
        let mut info = Family::new("ringfetch_backend_info", GAUGE);

        let mut by_result: BTreeMap<(String, BackendKindOrd, &str), u64> = BTreeMap::new();
        let mut by_dataset: BTreeMap<(String, BackendKindOrd), u64> = BTreeMap::new();
        let mut stages: BTreeMap<(BackendKindOrd, &str), HistogramTotal> = BTreeMap::new();
        let mut batches = HistogramTotal::default();
        for shard in &self.shards {
            let backend = BackendKindOrd(shard.backend.as_str());
            let number = shard.shard.to_string();
            let labels = [("shard", number.as_str())];
            in_flight.gauge(&labels, f64::from(shard.in_flight.load(Ordering::Relaxed)));
            limit.gauge(&labels, f64::from(shard.queue_depth));
            let waiting = u64::try_from(shard.queued.load(Ordering::Relaxed)).unwrap_or(0);
            queued.gauge(&labels, float(waiting));
            let mut seen = HistogramTotal::default();
            shard.depth_seen.merge_into(&mut seen);
            depth.histogram(&labels, &seen, &COUNT_BOUNDS, 1.0);
            device_reads.counter(&labels, shard.device_reads.load(Ordering::Relaxed));
            device_bytes.counter(&labels, shard.device_bytes.load(Ordering::Relaxed));
            resident.counter(&labels, shard.resident_reads.load(Ordering::Relaxed));
            submissions.counter(&labels, shard.submissions.load(Ordering::Relaxed));
            failures.counter(&labels, shard.failures.load(Ordering::Relaxed));
            shard.batch_items.merge_into(&mut batches);
            shard
                .queue_time
                .merge_into(stages.entry((backend, "queue")).or_default());
            shard
                .device_time
                .merge_into(stages.entry((backend, "device")).or_default());
            shard
                .total_time
                .merge_into(stages.entry((backend, "total")).or_default());
            for (_, dataset) in shard
                .datasets
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .iter()
            {
                let backend = BackendKindOrd(dataset.backend.as_str());
                let name = dataset.dataset.clone();
                *by_result.entry((name.clone(), backend, RESULT_OK)).or_default() +=
                    dataset.ok.load(Ordering::Relaxed);
                for (label, count) in dataset
                    .failed
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .iter()
                {
                    *by_result.entry((name.clone(), backend, label)).or_default() += count;
                }
                *by_dataset.entry((name, backend)).or_default() += dataset.bytes.load(Ordering::Relaxed);
            }
        }
        for ((dataset, backend, result), count) in &by_result {
            reads.counter(
                &[("dataset", dataset), ("backend", backend.0), ("result", result)],
                *count,
            );
        }
        for ((dataset, backend), count) in &by_dataset {
            bytes.counter(&[("dataset", dataset), ("backend", backend.0)], *count);
        }
        for ((backend, stage), total) in &stages {
            duration.histogram(
                &[("backend", backend.0), ("stage", stage)],
                total,
                &DURATION_BOUNDS_NS,
                1e-9,
            );
        }
        items.histogram(&[], &batches, &COUNT_BOUNDS, 1.0);
        info.gauge(
            &[
                ("backend", self.backend.backend.as_str()),
                ("requested", self.backend.requested.as_str()),
                ("reason", &self.backend.reason),
            ],
            1.0,
        );
        [
            reads,
            bytes,
            duration,
            in_flight,
            depth,
            limit,
            queued,
            items,
            device_reads,
            device_bytes,
            resident,
            submissions,
            failures,
            info,
        ]
        .into_iter()
        .map(|family| family.0)
        .filter(|family| !family.get_metric().is_empty())
        .collect()
    }
}

/// A backend's word, ordered, as a map key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct BackendKindOrd(&'static str);
