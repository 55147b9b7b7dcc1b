//! The daemon's status, as JSON (`http::status`, for the page at `/` and scripts without Prometheus) and as a gRPC message
//! (`admin`).
//!
//! Counters only grow and histograms are cumulative, so clients compute rates and quantiles between two
//! polls. The counters are those of `/metrics`, gathered by the same code.

use crate::fetch::{DatasetInfo, Fetcher, StorageInfo, backend_word};
use crate::lifecycle::State;
use prometheus::Registry;
use prometheus::proto::{LabelPair, Metric, MetricFamily};
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::engine::{BackendStatus, ShardStatus};
use ringfetch_engine::series::float;
use serde::Serialize;
use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};
use utoipa::ToSchema;

/// The daemon's current status. Counters are of this process: they begin at 0 when `started_unix_ms` changes.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Status)]
pub(crate) struct StatusView {
    /// Version of the daemon.
    pub(crate) version: &'static str,
    /// `starting`, `serving` or `draining`.
    pub(crate) state: &'static str,
    /// When it was started: milliseconds since 1970, by its clock. A new value means a new process.
    pub(crate) started_unix_ms: u64,
    /// When these figures were taken: milliseconds since its start, by a monotonic clock. Divide by
    /// differences of this one.
    pub(crate) uptime_ms: u64,
    /// Which backend serves datasets that have none of their own.
    pub(crate) backend: BackendView,
    /// Network threads.
    pub(crate) cores: u64,
    /// Response memory.
    pub(crate) memory: MemoryView,
    /// Sums over all datasets.
    pub(crate) totals: TotalsView,
    /// Time of a read from acceptance to its result.
    pub(crate) read_duration: DurationView,
    /// Every shard, by number.
    pub(crate) shards: Vec<ShardView>,
    /// Every dataset, by name.
    pub(crate) datasets: Vec<DatasetStatusView>,
}

/// A backend and why it is that one.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = BackendInUse)]
pub(crate) struct BackendView {
    /// The one in use: `uring`, `mmap`, `auto` or `pread`.
    #[serde(serialize_with = "backend_word")]
    #[schema(value_type = String)]
    pub(crate) backend: BackendKind,
    /// The requested one.
    #[serde(serialize_with = "backend_word")]
    #[schema(value_type = String)]
    pub(crate) requested: BackendKind,
    /// Whether `backend` differs from `requested`.
    pub(crate) fallback: bool,
    /// The reason for the choice, in a sentence.
    pub(crate) reason: String,
}

/// Response memory, from disk to socket.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Memory)]
pub(crate) struct MemoryView {
    /// Bytes in use.
    pub(crate) in_use_bytes: u64,
    /// Budget in bytes.
    pub(crate) budget_bytes: u64,
}

/// Counters over all datasets.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Totals)]
pub(crate) struct TotalsView {
    /// Items answered, errors included.
    pub(crate) reads_total: u64,
    /// Items answered with an error.
    pub(crate) read_errors_total: u64,
    /// Bytes answered.
    pub(crate) read_bytes_total: u64,
    /// Requests refused because of a limit, or because it drains.
    pub(crate) rejected_total: u64,
}

/// A cumulative histogram of durations.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DurationHistogram)]
pub(crate) struct DurationView {
    /// Reads observed.
    pub(crate) count: u64,
    /// By upper bound, ascending; the last has none.
    pub(crate) buckets: Vec<BucketView>,
}

/// A bucket of a cumulative histogram.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DurationBucket)]
pub(crate) struct BucketView {
    /// Upper bound, microseconds, inclusive. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) le_us: Option<f64>,
    /// Reads that took at most this long.
    pub(crate) count: u64,
}

/// A shard: one thread that reads, with its queue.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Shard)]
pub(crate) struct ShardView {
    /// Its number.
    pub(crate) shard: u32,
    /// The backend that it serves; the shard of a ring reports `uring`, and also serves `auto`.
    #[serde(serialize_with = "backend_word")]
    #[schema(value_type = String)]
    pub(crate) backend: BackendKind,
    /// Whether any dataset is read here: after a switch the shards of the backend before stay, idle.
    pub(crate) routed: bool,
    /// Reads submitted and not completed, now, without stalled ones.
    pub(crate) in_flight: u32,
    /// Reads, now, that their disk has not completed for 3 s while others waited for room: it hangs, or is far too slow.
    pub(crate) stalled: u32,
    /// Reads accepted and not submitted, now.
    pub(crate) queued: u64,
    /// The limit of `in_flight`.
    pub(crate) queue_depth: u32,
    /// Reads sent to the device, after merging and splitting.
    pub(crate) device_reads_total: u64,
    /// System calls that submitted reads.
    pub(crate) submissions_total: u64,
    /// The reads in flight that each submission saw, itself included. The difference of `sum` by that of `count` is the
    /// mean depth.
    pub(crate) depth_seen: DepthView,
}

/// Reads in flight as submissions saw them.
#[derive(Debug, Clone, Copy, Default, Serialize, ToSchema)]
#[schema(as = DepthSeen)]
pub(crate) struct DepthView {
    /// Of all observations.
    pub(crate) sum: f64,
    /// Observations.
    pub(crate) count: u64,
}

/// A dataset: what it is, how it is read, and how often.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DatasetFigures)]
pub(crate) struct DatasetStatusView {
    #[serde(flatten)]
    pub(crate) dataset: DatasetInfo,
    #[serde(flatten)]
    pub(crate) storage: StorageInfo,
    /// Items answered, errors included.
    pub(crate) reads_total: u64,
    /// Items answered with an error.
    pub(crate) read_errors_total: u64,
    /// Bytes answered.
    pub(crate) read_bytes_total: u64,
}

impl From<BackendStatus> for BackendView {
    fn from(status: BackendStatus) -> Self {
        Self {
            backend: status.backend,
            requested: status.requested,
            fallback: status.is_fallback(),
            reason: status.reason,
        }
    }
}

impl ShardView {
    fn new(status: &ShardStatus, counters: &Counters) -> Self {
        Self {
            shard: status.shard,
            backend: status.backend,
            routed: status.routed,
            in_flight: status.in_flight,
            stalled: status.stalled,
            queued: status.queued,
            queue_depth: status.queue_depth,
            device_reads_total: status.device_reads_total,
            submissions_total: status.submissions_total,
            depth_seen: counters.depth_seen(&status.shard.to_string()),
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct DatasetCounters {
    reads: u64,
    errors: u64,
    bytes: u64,
}

/// The engine's metrics and the refusals at one moment, as in `/metrics`.
struct Counters(Vec<MetricFamily>);

impl Counters {
    fn of(&self, family: &str) -> impl Iterator<Item = &Metric> {
        let found = self.0.iter().find(|one| one.name() == family);
        found.into_iter().flat_map(MetricFamily::get_metric)
    }

    /// Before routing, only what is no mistake of the client's.
    fn rejected(&self) -> u64 {
        let is_limit =
            |metric: &&Metric| matches!(label(metric, "reason"), "memory" | "services" | "draining");
        let before_routing = self.of("ringfetch_requests_refused_total").filter(is_limit);
        self.of("ringfetch_rejected_total")
            .chain(before_routing)
            .map(value)
            .sum()
    }

    /// By dataset name, summed over backends and results. In one pass: there may be many datasets, each with
    /// many series.
    fn by_dataset(&self) -> HashMap<&str, DatasetCounters> {
        let mut found: HashMap<&str, DatasetCounters> = HashMap::new();
        for metric in self.of("ringfetch_reads_total") {
            let counters = found.entry(label(metric, "dataset")).or_default();
            counters.reads += value(metric);
            if label(metric, "result") != "ok" {
                counters.errors += value(metric);
            }
        }
        for metric in self.of("ringfetch_read_bytes_total") {
            found.entry(label(metric, "dataset")).or_default().bytes += value(metric);
        }
        found
    }

    fn depth_seen(&self, shard: &str) -> DepthView {
        let of_shard = |metric: &&Metric| label(metric, "shard") == shard;
        self.of("ringfetch_queue_depth")
            .filter(of_shard)
            .map(Metric::get_histogram)
            .fold(DepthView::default(), |total, one| DepthView {
                sum: total.sum + one.get_sample_sum(),
                count: total.count + one.get_sample_count(),
            })
    }
}

/// The value of a label; empty if there is no such label.
fn label<'a>(metric: &'a Metric, name: &str) -> &'a str {
    let labels = metric.get_label();
    labels
        .iter()
        .find(|label| label.name() == name)
        .map_or("", LabelPair::value)
}

fn value(metric: &Metric) -> u64 {
    count(metric.get_counter().get_value())
}

/// A counter's value as an integer.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counters are whole and not negative, and the cast saturates"
)]
fn count(value: f64) -> u64 {
    value as u64
}

impl DurationView {
    /// The upper bound, in microseconds, of the bucket that a quantile falls into: 0 if nothing was counted,
    /// infinite beyond the last finite bound.
    pub(crate) fn quantile_us(&self, quantile: f64) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        let rank = float(self.count) * quantile;
        let bucket = self.buckets.iter().find(|bucket| float(bucket.count) >= rank);
        bucket.and_then(|bucket| bucket.le_us).unwrap_or(f64::INFINITY)
    }
}

/// Histogram buckets, with bounds rounded to whole nanoseconds: 2e-5 s is 20 us, not 20.000000000000004.
fn buckets(total_seconds: &[(f64, u64)]) -> Vec<BucketView> {
    let le_us = |bound: f64| (bound * 1e9).round() / 1e3;
    let view = |&(bound, count): &(f64, u64)| BucketView {
        le_us: bound.is_finite().then(|| le_us(bound)),
        count,
    };
    total_seconds.iter().map(view).collect()
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[derive(Debug)]
pub(crate) struct StatusCollector {
    started: Instant,
    started_unix_ms: u64,
    /// Has only what is needed here: the process's metrics would read several files in /proc each time.
    registry: Registry,
}

impl StatusCollector {
    /// For a daemon that is starting.
    pub(crate) fn of(fetcher: &Fetcher) -> Self {
        let registry = Registry::new();
        let registered = fetcher.engine().register_metrics(&registry);
        // The registry is new, so the names are free.
        if let Err(error) = registered.and_then(|()| fetcher.register_metrics(&registry)) {
            tracing::warn!(%error, "the status has no counters of its datasets");
        }
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            started: Instant::now(),
            started_unix_ms: milliseconds(unix.unwrap_or_default()),
            registry,
        }
    }

    pub(crate) fn collect(&self, fetcher: &Fetcher, state: State) -> StatusView {
        let now = Instant::now();
        let engine = fetcher.engine();
        let counters = Counters(self.registry.gather());
        let by_dataset = counters.by_dataset();
        let figures_of = |(dataset, storage): (DatasetInfo, StorageInfo)| {
            let counted = by_dataset.get(dataset.name.as_str()).copied().unwrap_or_default();
            DatasetStatusView {
                dataset,
                storage,
                reads_total: counted.reads,
                read_errors_total: counted.errors,
                read_bytes_total: counted.bytes,
            }
        };
        let totals = engine.totals();
        let (in_use_bytes, budget_bytes) = engine.memory();
        StatusView {
            version: env!("CARGO_PKG_VERSION"),
            state: state.as_str(),
            started_unix_ms: self.started_unix_ms,
            uptime_ms: milliseconds(now.saturating_duration_since(self.started)),
            backend: engine.backend().into(),
            cores: u64::try_from(engine.core_count()).unwrap_or(u64::MAX),
            memory: MemoryView {
                in_use_bytes,
                budget_bytes,
            },
            totals: TotalsView {
                reads_total: totals.reads,
                read_errors_total: totals.read_errors,
                read_bytes_total: totals.read_bytes,
                rejected_total: counters.rejected(),
            },
            read_duration: DurationView {
                count: totals.total_seconds.last().map_or(0, |(_, count)| *count),
                buckets: buckets(&totals.total_seconds),
            },
            shards: engine
                .shards()
                .iter()
                .map(|shard| ShardView::new(shard, &counters))
                .collect(),
            datasets: fetcher.describe_all().into_iter().map(figures_of).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_upper_bounds() {
        // A hundred reads: 50 within 1 us, 49 more within 10 us, one beyond every bound.
        let of = |totals: &[(f64, u64)]| DurationView {
            count: totals.last().map_or(0, |(_, count)| *count),
            buckets: buckets(totals),
        };
        let view = of(&[(1e-6, 50), (1e-5, 99), (f64::INFINITY, 100)]);
        let close = |found: f64, expected: f64| (found - expected).abs() < 1e-9;
        assert!(close(view.quantile_us(0.5), 1.0));
        assert!(close(view.quantile_us(0.99), 10.0));
        assert!(view.quantile_us(0.999).is_infinite());
        assert!(close(of(&[(1e-6, 0), (f64::INFINITY, 0)]).quantile_us(0.5), 0.0));
        assert!(close(of(&[]).quantile_us(0.5), 0.0));
    }

    #[test]
    fn bounds_are_round_and_the_last_is_absent() {
        // Bounds in seconds, as the engine has them: microseconds without the errors of binary fractions.
        // JSON has no infinity, so that member is left out.
        let totals = [(1e-6, 1), (2e-5, 2), (5e-4, 3), (10.0, 4), (f64::INFINITY, 5)];
        let text = serde_json::to_string(&buckets(&totals)).unwrap();
        assert_eq!(
            text,
            r#"[{"le_us":1.0,"count":1},{"le_us":20.0,"count":2},{"le_us":500.0,"count":3},{"le_us":10000000.0,"count":4},{"count":5}]"#
        );
    }
}
