//! The exported metrics: counters of the shards, summed at each scrape, and the backends of datasets.
//!
//! Names and labels are public (docs/METRICS.md). Labels are closed sets: never an offset, a client or a
//! path.

use super::{COUNT_BOUNDS, DatasetCounters, RESULT_OK, RESULTS_OF_FAULTS, ReadTotals, ShardMetrics, totals};
use crate::engine::{BackendStatus, Totals};
use crate::routing::RoutingTable;
use crate::series::{Catalog, HistogramTotal, Scrape, float};
use crate::sync::lock;
use arc_swap::ArcSwap;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

/// The input of a scrape. Updated when shards start, or a dataset is introduced.
#[derive(Debug, Default)]
pub(crate) struct MetricsRegistry {
    shards: Mutex<Vec<Arc<ShardMetrics>>>,
    /// Counters of reads that cores make themselves; each has the number of a shard of its backend.
    cores: Mutex<Vec<Arc<ShardMetrics>>>,
    /// The names of the datasets that are served.
    datasets: Mutex<BTreeSet<String>>,
    retired: Mutex<Retired>,
    /// Reads of datasets whose counters were dropped, kept for the totals.
    dropped: Mutex<ReadTotals>,
}

/// Datasets that are no longer served.
#[derive(Debug, Default)]
struct Retired {
    /// Those that still have counters, or may get them again: a request that has found the dataset may not be read yet.
    names: BTreeSet<String>,
    /// No request holds any of them.
    are_closed: bool,
}

impl MetricsRegistry {
    pub(crate) fn add_shards(&self, shards: impl IntoIterator<Item = Arc<ShardMetrics>>) {
        lock(&self.shards).extend(shards);
    }

    /// Adds the counters of the requests that a core answers itself.
    pub(crate) fn add_core(&self, core: Arc<ShardMetrics>) {
        lock(&self.cores).push(core);
    }

    /// The counters of shards and cores.
    fn all(&self) -> Vec<Arc<ShardMetrics>> {
        let mut all = self.shards();
        all.extend_from_slice(&lock(&self.cores));
        all
    }

    /// How many shards there are.
    pub(crate) fn shard_count(&self) -> u32 {
        u32::try_from(self.shards().len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn shards(&self) -> Vec<Arc<ShardMetrics>> {
        lock(&self.shards).clone()
    }

    pub(crate) fn totals(&self) -> Totals {
        let mut dropped = lock(&self.dropped);
        self.drop_unused(&mut dropped);
        totals(&self.all(), *dropped)
    }

    /// Drops the counters of retired datasets without readers, on all shards at once: a sum without one
    /// shard's part would look like a restarted counter.
    fn drop_unused(&self, dropped: &mut ReadTotals) {
        let served = lock(&self.datasets);
        let mut retired = lock(&self.retired);
        let Retired { names, are_closed } = &mut *retired;
        names.retain(|dataset| !served.contains(dataset));
        if names.is_empty() {
            return;
        }
        let shards = self.all();
        let mut counters: Vec<_> = shards.iter().map(|shard| lock(&shard.datasets)).collect();
        let is_used = |counters: &Arc<DatasetCounters>| {
            // A shard holds the counters of a dataset from its first read until the sweep.
            !names.contains(&counters.dataset) || Arc::strong_count(counters) > 1
        };
        let used: BTreeSet<String> = counters
            .iter()
            .flat_map(|counters| counters.iter())
            .filter(|counters| is_used(counters))
            .map(|counters| counters.dataset.clone())
            .collect();
        for counters in &mut counters {
            counters.retain(|counters| {
                let keeps = used.contains(&counters.dataset);
                if !keeps {
                    dropped.add(counters);
                }
                keeps
            });
        }
        if *are_closed {
            names.retain(|dataset| used.contains(dataset));
        }
    }

    /// Introduces a dataset; keeps its counters if it is known.
    pub(crate) fn introduce(&self, dataset: &str) {
        lock(&self.datasets).insert(dataset.to_owned());
    }

    pub(crate) fn forget(&self, dataset: &str) {
        // Both at once: a scrape in between would take it for one that is served again.
        let mut served = lock(&self.datasets);
        let mut retired = lock(&self.retired);
        served.remove(dataset);
        retired.names.insert(dataset.to_owned());
        retired.are_closed = false;
    }

    /// No request holds a dataset that was forgotten.
    pub(crate) fn forgotten_are_closed(&self) {
        lock(&self.retired).are_closed = true;
    }

    /// The names of the known datasets.
    pub(crate) fn datasets(&self) -> Vec<String> {
        let datasets = lock(&self.datasets);
        datasets.iter().cloned().collect()
    }
}

/// Sums the shards at each scrape.
pub(crate) struct EngineCollector {
    metrics: Arc<MetricsRegistry>,
    /// Weak, since routes keep shards running.
    routes: Weak<ArcSwap<RoutingTable>>,
    catalog: Catalog,
}

const METRICS: [(&str, &str); 18] = [
    ("ringfetch_reads_total", "Items answered, by result."),
    ("ringfetch_read_bytes_total", "Bytes of items answered."),
    (
        "ringfetch_read_duration_seconds",
        "Time of a read: waiting in the queue, on the device, and in total from acceptance to answer.",
    ),
    (
        "ringfetch_dataset_read_duration_seconds",
        "Time of a read of a dataset, from acceptance to answer.",
    ),
    (
        "ringfetch_in_flight_reads",
        "Reads submitted and not completed, without stalled ones.",
    ),
    (
        "ringfetch_stalled_reads",
        "Reads that their disk has not completed for 3 s while others waited for room.",
    ),
    (
        "ringfetch_queue_depth",
        "Reads in flight seen at each submission, itself included.",
    ),
    (
        "ringfetch_queue_depth_limit",
        "The most reads a shard keeps in flight.",
    ),
    (
        "ringfetch_queued_reads",
        "Reads accepted and not submitted; one that joined another counts until that one is over.",
    ),
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
        "Reads copied from the page cache without waiting: by backend auto, and of small requests with mmap.",
    ),
    (
        "ringfetch_joined_reads_total",
        "Reads served by a read of the same bytes that was in flight already.",
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
        "1, with the backend in use, the requested one, and the reason.",
    ),
    (
        "ringfetch_dataset_backend_info",
        "1, with the backend that serves a dataset, the requested one, and the reason.",
    ),
];

impl EngineCollector {
    pub(crate) fn new(
        metrics: Arc<MetricsRegistry>,
        routes: Weak<ArcSwap<RoutingTable>>,
    ) -> Result<Self, prometheus::Error> {
        Ok(Self {
            metrics,
            routes,
            catalog: Catalog::new(&METRICS)?,
        })
    }
}

impl Collector for EngineCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.catalog.descriptions()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut dropped = lock(&self.metrics.dropped);
        self.metrics.drop_unused(&mut dropped);
        drop(dropped);
        let mut scrape = self.catalog.scrape();
        let all = self.metrics.all();
        for shard in &self.metrics.shards() {
            add_shard(&mut scrape, shard, &all);
        }
        add_reads(&mut scrape, &all);
        if let Some(routes) = self.routes.upgrade() {
            let routes = routes.load();
            let common = labels(&routes.common.status);
            scrape.gauge("ringfetch_backend_info", &common, 1.0);
            for dataset in self.metrics.datasets() {
                let [backend, requested, reason] = labels(&routes.of(&dataset).status);
                let labels = [("dataset", dataset.as_str()), backend, requested, reason];
                scrape.gauge("ringfetch_dataset_backend_info", &labels, 1.0);
            }
        }
        scrape.finish()
    }
}

fn add_shard(scrape: &mut Scrape<'_>, shard: &ShardMetrics, all: &[Arc<ShardMetrics>]) {
    let number = shard.shard.to_string();
    let labels = [("shard", number.as_str())];
    let stalled = shard.stalled.load(Ordering::Relaxed);
    scrape.gauge("ringfetch_in_flight_reads", &labels, f64::from(shard.moving()));
    scrape.gauge("ringfetch_stalled_reads", &labels, f64::from(stalled));
    let limit = shard.depth_limit.load(Ordering::Relaxed);
    scrape.gauge("ringfetch_queue_depth_limit", &labels, f64::from(limit));
    scrape.gauge("ringfetch_queued_reads", &labels, float(shard.queued()));
    let mut depth = HistogramTotal::default();
    shard.depth_seen.merge_into(&mut depth);
    scrape.histogram("ringfetch_queue_depth", &labels, &depth, &COUNT_BOUNDS, 1.0);
    let same = all.iter().filter(|counted| counted.shard == shard.shard);
    let resident = same.map(|counted| counted.resident_reads.load(Ordering::Relaxed));
    scrape.counter("ringfetch_resident_reads_total", &labels, resident.sum());
    for (name, counter) in [
        ("ringfetch_device_reads_total", &shard.device_reads),
        ("ringfetch_device_read_bytes_total", &shard.device_bytes),
        ("ringfetch_joined_reads_total", &shard.joined_reads),
        ("ringfetch_submissions_total", &shard.submissions),
        ("ringfetch_shard_failures_total", &shard.failures),
    ] {
        scrape.counter(name, &labels, counter.load(Ordering::Relaxed));
    }
}

/// Adds the series of reads, summed over shards and cores.
fn add_reads(scrape: &mut Scrape<'_>, all: &[Arc<ShardMetrics>]) {
    let mut results: BTreeMap<(String, &str, &str), u64> = BTreeMap::new();
    let mut bytes: BTreeMap<(String, &str), u64> = BTreeMap::new();
    let mut stages: BTreeMap<(&str, &str), HistogramTotal> = BTreeMap::new();
    let mut times: BTreeMap<String, HistogramTotal> = BTreeMap::new();
    let mut batches = HistogramTotal::default();
    for shard in all {
        shard.batch_items.merge_into(&mut batches);
        for per_backend in &shard.backends {
            if !per_backend.shown.load(Ordering::Relaxed) {
                continue;
            }
            for (stage, time) in [
                ("queue", &per_backend.queue_time),
                ("device", &per_backend.device_time),
                ("total", &per_backend.total_time),
            ] {
                time.merge_into(stages.entry((per_backend.backend.as_str(), stage)).or_default());
            }
        }
        for dataset in lock(&shard.datasets).iter() {
            let backend = dataset.backend.as_str();
            let name = || dataset.dataset.clone();
            *results.entry((name(), backend, RESULT_OK)).or_default() += dataset.ok.load(Ordering::Relaxed);
            for (result, count) in lock(&dataset.failed).iter() {
                *results.entry((name(), backend, result)).or_default() += count;
            }
            dataset.total_time.merge_into(times.entry(name()).or_default());
            *bytes.entry((name(), backend)).or_default() += dataset.bytes.load(Ordering::Relaxed);
        }
    }
    // From 0 on, since a rate over a counter that appears with the first failure misses it. 1,000 datasets have 33,000 series
    // of reads with these, and 27,000 without.
    for (dataset, backend) in bytes.keys() {
        for result in RESULTS_OF_FAULTS {
            results.entry((dataset.clone(), *backend, result)).or_default();
        }
    }
    for ((dataset, backend, result), count) in &results {
        let labels = [
            ("dataset", dataset.as_str()),
            ("backend", backend),
            ("result", result),
        ];
        scrape.counter("ringfetch_reads_total", &labels, *count);
    }
    for ((dataset, backend), count) in &bytes {
        let labels = [("dataset", dataset.as_str()), ("backend", backend)];
        scrape.counter("ringfetch_read_bytes_total", &labels, *count);
    }
    for ((backend, stage), total) in &stages {
        let labels = [("backend", *backend), ("stage", stage)];
        scrape.durations("ringfetch_read_duration_seconds", &labels, total);
    }
    for (dataset, total) in &times {
        scrape.durations(
            "ringfetch_dataset_read_duration_seconds",
            &[("dataset", dataset)],
            total,
        );
    }
    scrape.histogram("ringfetch_batch_items", &[], &batches, &COUNT_BOUNDS, 1.0);
}

fn labels(status: &BackendStatus) -> [(&'static str, &str); 3] {
    [
        ("backend", status.backend.as_str()),
        ("requested", status.requested.as_str()),
        ("reason", &status.reason),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BackendKind;

    #[test]
    fn a_dataset_that_is_retired_during_a_scrape_is_dropped() {
        // Scenario: datasets come, are read and go, one after the other, while the totals are asked for without a
        // pause. Expectation: at the end none has counters, and the totals have the reads of all of them.
        const DATASETS: u64 = 20_000;
        let registry = MetricsRegistry::default();
        let shard = ShardMetrics::new(0, BackendKind::Pread, 1);
        registry.add_shards([Arc::clone(&shard)]);
        std::thread::scope(|scope| {
            let served = scope.spawn(|| {
                for number in 0..DATASETS {
                    let name = number.to_string();
                    registry.introduce(&name);
                    shard.dataset(&name, BackendKind::Pread).count_ok(1, 7);
                    registry.forget(&name);
                }
            });
            while !served.is_finished() {
                registry.totals();
                registry.forgotten_are_closed();
            }
        });
        let totals = registry.totals();
        assert_eq!((totals.reads, totals.read_bytes), (DATASETS, 7 * DATASETS));
        assert_eq!(shard.datasets.lock().unwrap().len(), 0);
    }

    #[test]
    fn a_failure_is_counted_from_0_on() {
        // Scenario: a dataset is introduced; then reads of it fail, some by the client's fault. Expectation: each result that the
        // alerts count has a series with 0 before, and the one that occurs continues; others appear when they occur.
        let registry = Arc::new(MetricsRegistry::default());
        let shards = [0, 1].map(|shard| ShardMetrics::new(shard, BackendKind::Pread, 1));
        registry.add_shards(shards.iter().map(Arc::clone));
        let counters = shards
            .each_ref()
            .map(|shard| shard.dataset("d", BackendKind::Pread));
        let collector = EngineCollector::new(registry, Weak::new()).unwrap();
        let results = || {
            let families = collector.collect();
            let reads = families
                .iter()
                .find(|family| family.name() == "ringfetch_reads_total");
            let counted = |metric: &prometheus::proto::Metric| {
                let labels = metric.get_label();
                let result = labels.iter().find(|label| label.name() == "result").unwrap();
                (
                    result.value().to_owned(),
                    metric.get_counter().get_value().to_string(),
                )
            };
            let counted: BTreeMap<_, _> = reads.unwrap().get_metric().iter().map(counted).collect();
            counted
        };
        let of = |counts: &[(&str, &str)]| {
            let counts = counts
                .iter()
                .map(|(result, count)| ((*result).to_owned(), (*count).to_owned()));
            counts.collect::<BTreeMap<_, _>>()
        };
        let from_0 = of(&[
            ("deadline", "0"),
            ("device_error", "0"),
            ("engine_failed", "0"),
            ("ok", "0"),
            ("overloaded", "0"),
            ("truncated", "0"),
            ("unreadable", "0"),
        ]);
        assert_eq!(results(), from_0);
        counters[1].count_failed("truncated", 1);
        counters[0].count_failed("not_found", 2);
        let mut then = from_0;
        then.extend(of(&[("truncated", "1"), ("not_found", "2")]));
        assert_eq!(results(), then);
    }

    #[test]
    fn a_read_that_begins_after_its_dataset_is_retired_leaves_no_counters() {
        // Scenario: a dataset is retired and its counters are dropped; then a request that has found it before is read.
        // Expectation: its counters are dropped again, and the totals have the read; its name goes once it is closed.
        let registry = MetricsRegistry::default();
        let shard = ShardMetrics::new(0, BackendKind::Pread, 1);
        registry.add_shards([Arc::clone(&shard)]);
        registry.introduce("d");
        registry.forget("d");
        registry.totals();
        shard.dataset("d", BackendKind::Pread).count_ok(1, 7);
        assert_eq!(registry.totals().reads, 1);
        assert_eq!(shard.datasets.lock().unwrap().len(), 0);
        registry.forgotten_are_closed();
        registry.totals();
        assert!(registry.retired.lock().unwrap().names.is_empty());
    }
}
