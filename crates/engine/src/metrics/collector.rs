//! The exported metrics: counters of the shards, summed at each scrape, and the backends of datasets.
//!
//! Names and labels are public (docs/METRICS.md). Labels are closed sets: never an offset, a client or a
//! path.

use super::{COUNT_BOUNDS, DatasetCounters, RESULT_OK, ReadTotals, ShardMetrics, totals};
use crate::engine::{BackendStatus, Totals};
use crate::routing::RoutingTable;
use crate::series::{DURATION_BOUNDS_NS, Family, HistogramTotal, float};
use arc_swap::ArcSwap;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{MetricFamily, MetricType};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

/// The input of a scrape. Updated when shards start, or a dataset is introduced.
#[derive(Debug, Default)]
pub(crate) struct MetricsRegistry {
    shards: RwLock<Vec<Arc<ShardMetrics>>>,
    /// Counters of reads that cores make themselves; each has the number of a shard of its backend.
    cores: RwLock<Vec<Arc<ShardMetrics>>>,
    /// The names of the datasets that are served.
    datasets: Mutex<BTreeSet<String>>,
    /// Datasets that are no longer served but still have counters.
    retired: Mutex<BTreeSet<String>>,
    /// Reads of datasets whose counters were dropped, kept for the totals.
    dropped: Mutex<ReadTotals>,
}

impl MetricsRegistry {
    pub(crate) fn add_shards(&self, shards: impl IntoIterator<Item = Arc<ShardMetrics>>) {
        self.shards
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(shards);
    }

    /// Adds the counters of the requests that a core answers itself.
    pub(crate) fn add_core(&self, core: Arc<ShardMetrics>) {
        self.cores
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(core);
    }

    /// The counters of shards and cores.
    fn all(&self) -> Vec<Arc<ShardMetrics>> {
        let mut all = self.shards();
        all.extend_from_slice(&self.cores.read().unwrap_or_else(PoisonError::into_inner));
        all
    }

    /// How many shards there are.
    pub(crate) fn shard_count(&self) -> u32 {
        u32::try_from(self.shards().len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn shards(&self) -> Vec<Arc<ShardMetrics>> {
        self.shards.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn totals(&self) -> Totals {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        self.drop_unused(&mut dropped);
        totals(&self.all(), *dropped)
    }

    /// Drops the counters of retired datasets without readers, on all shards at once: a sum without one
    /// shard's part would look like a restarted counter.
    fn drop_unused(&self, dropped: &mut ReadTotals) {
        let served = self.datasets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|dataset| !served.contains(dataset));
        if retired.is_empty() {
            return;
        }
        let shards = self.all();
        let mut counters: Vec<_> = shards
            .iter()
            .map(|shard| shard.datasets.lock().unwrap_or_else(PoisonError::into_inner))
            .collect();
        let is_used = |counters: &Arc<DatasetCounters>| {
            // A shard holds the counters of a dataset from its first read until the sweep.
            !retired.contains(&counters.dataset) || Arc::strong_count(counters) > 1
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
        retired.retain(|dataset| used.contains(dataset));
    }

    /// Introduces a dataset; keeps its counters if it is known.
    pub(crate) fn introduce(&self, dataset: &str) {
        self.datasets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(dataset.to_owned());
    }

    pub(crate) fn forget(&self, dataset: &str) {
        // Both at once: a scrape in between would take it for one that is served again.
        let mut served = self.datasets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        served.remove(dataset);
        retired.insert(dataset.to_owned());
    }

    /// The names of the known datasets.
    pub(crate) fn datasets(&self) -> Vec<String> {
        let datasets = self.datasets.lock().unwrap_or_else(PoisonError::into_inner);
        datasets.iter().cloned().collect()
    }
}

/// Sums the shards at each scrape.
pub(crate) struct EngineCollector {
    metrics: Arc<MetricsRegistry>,
    /// Weak, since routes keep shards running.
    routes: Weak<ArcSwap<RoutingTable>>,
    descriptions: Vec<Desc>,
}

const HELP: [(&str, &str); 17] = [
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
    ("ringfetch_in_flight_reads", "Reads submitted and not completed."),
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
        let descriptions = HELP
            .iter()
            .map(|(name, help)| Desc::new((*name).to_owned(), (*help).to_owned(), Vec::new(), HashMap::new()))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            metrics,
            routes,
            descriptions,
        })
    }
}

impl Collector for EngineCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        use MetricType::{COUNTER, GAUGE, HISTOGRAM};
        let mut dropped = self
            .metrics
            .dropped
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.metrics.drop_unused(&mut dropped);
        drop(dropped);
        let family = |name, kind| {
            let help = HELP.iter().find(|(known, _)| *known == name);
            Family::new(name, help.map_or("", |(_, help)| help), kind)
        };
        let mut reads = family("ringfetch_reads_total", COUNTER);
        let mut bytes = family("ringfetch_read_bytes_total", COUNTER);
        let mut duration = family("ringfetch_read_duration_seconds", HISTOGRAM);
        let mut dataset_duration = family("ringfetch_dataset_read_duration_seconds", HISTOGRAM);
        let mut in_flight = family("ringfetch_in_flight_reads", GAUGE);
        let mut depth = family("ringfetch_queue_depth", HISTOGRAM);
        let mut limit = family("ringfetch_queue_depth_limit", GAUGE);
        let mut queued = family("ringfetch_queued_reads", GAUGE);
        let mut items = family("ringfetch_batch_items", HISTOGRAM);
        let mut device_reads = family("ringfetch_device_reads_total", COUNTER);
        let mut device_bytes = family("ringfetch_device_read_bytes_total", COUNTER);
        let mut resident = family("ringfetch_resident_reads_total", COUNTER);
        let mut joined = family("ringfetch_joined_reads_total", COUNTER);
        let mut submissions = family("ringfetch_submissions_total", COUNTER);
        let mut failures = family("ringfetch_shard_failures_total", COUNTER);
        let mut info = family("ringfetch_backend_info", GAUGE);
        let mut dataset_info = family("ringfetch_dataset_backend_info", GAUGE);

        let mut by_result: BTreeMap<(String, BackendKindOrd, &str), u64> = BTreeMap::new();
        let mut by_dataset: BTreeMap<(String, BackendKindOrd), u64> = BTreeMap::new();
        let mut stages: BTreeMap<(BackendKindOrd, &str), HistogramTotal> = BTreeMap::new();
        let mut times: BTreeMap<String, HistogramTotal> = BTreeMap::new();
        let mut batches = HistogramTotal::default();
        let all = self.metrics.all();
        for shard in &self.metrics.shards() {
            let number = shard.shard.to_string();
            let labels = [("shard", number.as_str())];
            in_flight.gauge(&labels, f64::from(shard.in_flight.load(Ordering::Relaxed)));
            limit.gauge(&labels, f64::from(shard.depth_limit.load(Ordering::Relaxed)));
            let waiting = u64::try_from(shard.queued.load(Ordering::Relaxed)).unwrap_or(0);
            queued.gauge(&labels, float(waiting));
            let mut seen = HistogramTotal::default();
            shard.depth_seen.merge_into(&mut seen);
            depth.histogram(&labels, &seen, &COUNT_BOUNDS, 1.0);
            device_reads.counter(&labels, shard.device_reads.load(Ordering::Relaxed));
            device_bytes.counter(&labels, shard.device_bytes.load(Ordering::Relaxed));
            let same = all.iter().filter(|counted| counted.shard == shard.shard);
            let copied = same.map(|counted| counted.resident_reads.load(Ordering::Relaxed));
            resident.counter(&labels, copied.sum());
            joined.counter(&labels, shard.joined_reads.load(Ordering::Relaxed));
            submissions.counter(&labels, shard.submissions.load(Ordering::Relaxed));
            failures.counter(&labels, shard.failures.load(Ordering::Relaxed));
        }
        for shard in &all {
            shard.batch_items.merge_into(&mut batches);
            for per_backend in shard
                .backends
                .iter()
                .filter(|per_backend| per_backend.shown.load(Ordering::Relaxed))
            {
                let backend = BackendKindOrd(per_backend.backend.as_str());
                let of = |stage| (backend, stage);
                per_backend
                    .queue_time
                    .merge_into(stages.entry(of("queue")).or_default());
                per_backend
                    .device_time
                    .merge_into(stages.entry(of("device")).or_default());
                per_backend
                    .total_time
                    .merge_into(stages.entry(of("total")).or_default());
            }
            for dataset in shard
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
                dataset
                    .total_time
                    .merge_into(times.entry(name.clone()).or_default());
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
                1e9,
            );
        }
        for (dataset, total) in &times {
            dataset_duration.histogram(&[("dataset", dataset)], total, &DURATION_BOUNDS_NS, 1e9);
        }
        items.histogram(&[], &batches, &COUNT_BOUNDS, 1.0);
        if let Some(routes) = self.routes.upgrade() {
            let routes = routes.load();
            info.gauge(&labels(&routes.common.status), 1.0);
            for dataset in self.metrics.datasets() {
                let [backend, requested, reason] = labels(&routes.of(&dataset).status);
                dataset_info.gauge(&[("dataset", &dataset), backend, requested, reason], 1.0);
            }
        }
        [
            reads,
            bytes,
            duration,
            dataset_duration,
            in_flight,
            depth,
            limit,
            queued,
            items,
            device_reads,
            device_bytes,
            resident,
            joined,
            submissions,
            failures,
            info,
            dataset_info,
        ]
        .into_iter()
        .filter_map(Family::finish)
        .collect()
    }
}

/// A backend's name as an ordered map key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct BackendKindOrd(&'static str);

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
            }
        });
        let totals = registry.totals();
        assert_eq!((totals.reads, totals.read_bytes), (DATASETS, 7 * DATASETS));
        assert_eq!(shard.datasets.lock().unwrap().len(), 0);
    }
}
