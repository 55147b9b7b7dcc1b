//! Internals for the micro-benchmarks (`crates/pieces`) and the fuzz targets: no logic, and not a public API. Not
//! behind a feature, with which everything above this crate would be compiled once more.

use crate::batch::Batch;
use crate::config::{BackendKind, PlanConfig};
use crate::metrics::{EngineCollector, MetricsRegistry, ShardMetrics};
use crate::plan::{self, PlanRules};
use prometheus::core::Collector as _;
use std::sync::{Arc, Weak};

/// Plans a batch as a uring shard does with the default settings: returns the number of device reads.
pub fn plan_reads(batch: &Batch) -> usize {
    let rules = PlanRules {
        direct: true,
        merge: true,
        merge_gap_bytes: 0,
        max_read_bytes: 1 << 20,
    };
    plan::plan(batch, rules).reads.len()
}

/// Plans a batch and executes the plan on the contents of its files. Returns where item 0 begins, and the
/// response's bytes.
///
/// # Panics
/// The plan breaks a rule that devices or the shard rely on.
pub fn plan_and_execute(
    batch: &Batch,
    direct: bool,
    merge: bool,
    config: &PlanConfig,
    files: &[&[u8]],
) -> (usize, Vec<u8>) {
    let rules = PlanRules {
        direct,
        merge,
        merge_gap_bytes: config.merge_gap_bytes,
        max_read_bytes: config.max_read_bytes,
    };
    let planned = plan::plan(batch, rules);
    (planned.lead_bytes as usize, plan::model::execute(&planned, files))
}

/// The counters of two shards and the collector that adds them up.
pub struct Counters {
    shards: Vec<Arc<ShardMetrics>>,
    collector: EngineCollector,
}

impl std::fmt::Debug for Counters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counters").finish_non_exhaustive()
    }
}

impl Counters {
    /// Counters that have counted one read of one dataset each.
    ///
    /// # Errors
    /// A metric's name is invalid.
    pub fn new() -> Result<Self, prometheus::Error> {
        let backend = BackendKind::Uring;
        let shards: Vec<_> = (0..2)
            .map(|shard| ShardMetrics::new(shard, backend, 128))
            .collect();
        let metrics = Arc::new(MetricsRegistry::default());
        metrics.add_shards(shards.iter().map(Arc::clone));
        let collector = EngineCollector::new(metrics, Weak::new())?;
        let counters = Self { shards, collector };
        counters.count_batch(1);
        for shard in &counters.shards {
            shard.show(backend);
            shard.dataset("data", backend).count_ok(1, 4096);
        }
        Ok(counters)
    }

    /// Counts what a shard counts for one batch of `items` single reads, with latencies that fill different
    /// buckets.
    pub fn count_batch(&self, items: u32) {
        for shard in self.shards.iter().take(1) {
            let per_backend = shard.per_backend(BackendKind::Uring);
            shard.batch_items.observe(u64::from(items), 1);
            per_backend.queue_time.observe(10_000, u64::from(items));
            shard.depth_seen.observe_each(1, u64::from(items));
            shard.count_device_reads(u64::from(items), 4096 * u64::from(items));
            // Four finish at a time.
            for group in 0..u64::from(items / 4) {
                per_backend.device_time.observe(40_000 + group * 40_000, 4);
            }
            shard.count_submission(items / 4);
            per_backend.total_time.observe(1_000_000, u64::from(items));
        }
    }

    /// Scrapes; returns the number of metric families.
    pub fn collect(&self) -> usize {
        self.collector.collect().len()
    }
}
