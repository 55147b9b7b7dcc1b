//! `GET /v1/status`: what the daemon does now, in figures that the page at `/` draws and that scripts without Prometheus
//! read.
//!
//! Counters only grow and histograms are cumulative, so whoever polls computes rates and quantiles between two answers;
//! the daemon keeps no window for anybody. The answer is made at most once in [`FRESH`], however many ask: its cost does
//! not grow with the number of open pages. Counters are those of `/metrics`, gathered by the same code. Deliberately
//! absent: rates, and anything that a client has to be trusted for.

use super::App;
use crate::fetch::{DatasetInfo, Fetcher};
use crate::lifecycle::State as Life;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use prometheus::Registry;
use prometheus::proto::{LabelPair, Metric, MetricFamily};
use ringfetch_engine::engine::{BackendStatus, ShardStatus};
use serde::Serialize;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use utoipa::ToSchema;

/// An answer is given to everybody who asks within this time.
const FRESH: Duration = Duration::from_millis(200);

/// What the daemon does now. Counters are of this process: they begin at 0 when `started_unix_ms` changes.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Status)]
struct StatusView {
    /// Version of the daemon.
    version: &'static str,
    /// `starting`, `serving` or `draining`.
    state: &'static str,
    /// When it was started: milliseconds since 1970, by its clock. Another value is another process.
    started_unix_ms: u64,
    /// When these figures were taken: milliseconds since its start, by a clock that only goes forward. Divide by
    /// differences of this one.
    uptime_ms: u64,
    /// Which backend serves datasets that have none of their own.
    backend: BackendView,
    /// Network threads.
    cores: u64,
    /// Memory of answers.
    memory: MemoryView,
    /// Sums over all datasets.
    totals: TotalsView,
    /// Time of a read from acceptance to its answer.
    read_duration: DurationView,
    /// Every shard, by number.
    shards: Vec<ShardView>,
    /// Every dataset, by name.
    datasets: Vec<DatasetFigures>,
}

/// A backend and why it is that one.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = BackendInUse)]
struct BackendView {
    /// The one in use: `uring`, `mmap`, `auto` or `pread`.
    backend: &'static str,
    /// The one that the configuration asked for.
    requested: &'static str,
    /// Whether these differ.
    fallback: bool,
    /// What decided it, in a sentence.
    reason: String,
}

/// Memory of answers, from disk to socket.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Memory)]
struct MemoryView {
    /// Bytes in use.
    in_use_bytes: u64,
    /// Bytes there are.
    budget_bytes: u64,
}

/// Counters over all datasets.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Totals)]
struct TotalsView {
    /// Items answered, errors included.
    reads_total: u64,
    /// Items answered with an error.
    read_errors_total: u64,
    /// Bytes answered.
    read_bytes_total: u64,
    /// Requests refused because of a limit, or because it drains.
    rejected_total: u64,
}

/// A cumulative histogram of durations.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DurationHistogram)]
struct DurationView {
    /// Reads observed.
    count: u64,
    /// By upper bound, ascending; the last has none.
    buckets: Vec<BucketView>,
}

/// A bucket of a cumulative histogram.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DurationBucket)]
struct BucketView {
    /// Upper bound, microseconds, inclusive. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    le_us: Option<f64>,
    /// Reads that took at most this long.
    count: u64,
}

/// A shard: one thread that reads, with its queue.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Shard)]
struct ShardView {
    /// Its number.
    shard: u32,
    /// The backend that it serves; a ring's shard says `uring` and serves `auto` too.
    backend: &'static str,
    /// Whether any dataset is read here: after a switch the shards of the backend before stay, idle.
    routed: bool,
    /// Reads submitted and not completed, now.
    in_flight: u32,
    /// Reads accepted and not submitted, now.
    queued: u64,
    /// The limit of `in_flight`.
    queue_depth: u32,
    /// Reads sent to the device, after merging and splitting.
    device_reads_total: u64,
    /// System calls that submitted reads.
    submissions_total: u64,
    /// The reads in flight that each submission saw, itself included. The difference of `sum` by that of `count` is the
    /// mean depth.
    depth_seen: DepthView,
}

/// Reads in flight as submissions saw them.
#[derive(Debug, Clone, Copy, Default, Serialize, ToSchema)]
#[schema(as = DepthSeen)]
struct DepthView {
    /// Of all observations.
    sum: f64,
    /// Observations.
    count: u64,
}

/// A dataset's counters, and how it is read.
#[derive(Debug, Serialize, ToSchema)]
struct DatasetFigures {
    /// Its name.
    name: String,
    /// `blocks`, `vectors` or `objects`.
    kind: &'static str,
    /// Length of its address space; 0 for objects.
    length_bytes: u64,
    /// Blocks or vectors; 0 for objects, which are not counted.
    count: u64,
    #[serde(flatten)]
    backend: BackendView,
    /// Whether reads bypass the page cache.
    direct_io: bool,
    /// Why.
    direct_io_reason: String,
    /// Items answered, errors included.
    reads_total: u64,
    /// Items answered with an error.
    read_errors_total: u64,
    /// Bytes answered.
    read_bytes_total: u64,
}

impl From<BackendStatus> for BackendView {
    fn from(status: BackendStatus) -> Self {
        Self {
            backend: status.backend.as_str(),
            requested: status.requested.as_str(),
            fallback: status.is_fallback(),
            reason: status.reason,
        }
    }
}

impl ShardView {
    fn new(status: &ShardStatus, counters: &Counters) -> Self {
        Self {
            shard: status.shard,
            backend: status.backend.as_str(),
            routed: status.routed,
            in_flight: status.in_flight,
            queued: status.queued,
            queue_depth: status.queue_depth,
            device_reads_total: status.device_reads_total,
            submissions_total: status.submissions_total,
            depth_seen: counters.depth_seen(&status.shard.to_string()),
        }
    }
}

impl DatasetFigures {
    fn new(info: DatasetInfo, counters: DatasetCounters) -> Self {
        let path = info.read_path;
        Self {
            name: info.name,
            kind: info.kind,
            length_bytes: info.length_bytes,
            count: info.count,
            backend: BackendView {
                backend: path.backend.as_str(),
                requested: path.requested.as_str(),
                fallback: path.backend != path.requested,
                reason: path.reason,
            },
            direct_io: path.direct_io,
            direct_io_reason: path.direct_io_reason,
            reads_total: counters.reads,
            read_errors_total: counters.errors,
            read_bytes_total: counters.bytes,
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct DatasetCounters {
    reads: u64,
    errors: u64,
    bytes: u64,
}

/// What `/metrics` shows of the engine and of refusals, at one moment.
struct Counters(Vec<MetricFamily>);

impl Counters {
    fn of(&self, family: &str) -> impl Iterator<Item = &Metric> {
        let found = self.0.iter().find(|one| one.name() == family);
        found.into_iter().flat_map(MetricFamily::get_metric)
    }

    fn rejected(&self) -> u64 {
        self.of("ringfetch_rejected_total").map(value).sum()
    }

    /// By name, over backends and results. In one pass: there may be many datasets, each with many series.
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

/// A counter's value as what it was before it became a metric.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counters are whole and not negative, and the cast saturates"
)]
fn count(value: f64) -> u64 {
    value as u64
}

/// Histogram buckets with bounds in whole nanoseconds again: 2e-5 s is 20 us, not 20.000000000000004.
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

#[derive(Debug, Clone)]
struct Taken {
    at: Instant,
    state: Life,
    body: Bytes,
}

/// Takes the figures, and keeps the latest.
#[derive(Debug)]
pub(super) struct Figures {
    started: Instant,
    started_unix_ms: u64,
    /// Only what is needed here: scraping the process as well would read several files of /proc a second.
    registry: Registry,
    latest: Mutex<Option<Taken>>,
}

impl Figures {
    /// Of a daemon that starts now.
    pub(super) fn of(fetcher: &Fetcher) -> Self {
        let registry = Registry::new();
        let registered = fetcher.engine().register_metrics(&registry);
        // The names are free: the registry is new, and the daemon's own has them all.
        if let Err(error) = registered.and_then(|()| fetcher.register_metrics(&registry)) {
            tracing::warn!(%error, "/v1/status has no figures of its datasets");
        }
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            started: Instant::now(),
            started_unix_ms: milliseconds(unix.unwrap_or_default()),
            registry,
            latest: Mutex::new(None),
        }
    }

    /// The answer: the latest if it is fresh. Two callers may both make one; neither waits for the other.
    fn answer(&self, app: &App) -> Bytes {
        let (now, state) = (Instant::now(), app.lifecycle.state());
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let fresh = |taken: &Taken| taken.state == state && now.saturating_duration_since(taken.at) < FRESH;
        if let Some(taken) = latest.filter(fresh) {
            return taken.body;
        }
        let view = self.take(&app.fetcher, now, state);
        // Strings and finite numbers only: it cannot fail.
        let body = Bytes::from(serde_json::to_vec(&view).unwrap_or_default());
        let taken = Taken {
            at: now,
            state,
            body: body.clone(),
        };
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(taken);
        body
    }

    fn take(&self, fetcher: &Fetcher, now: Instant, state: Life) -> StatusView {
        let engine = fetcher.engine();
        let counters = Counters(self.registry.gather());
        let by_dataset = counters.by_dataset();
        let figures_of = |info: DatasetInfo| {
            let counted = by_dataset.get(info.name.as_str()).copied();
            DatasetFigures::new(info, counted.unwrap_or_default())
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

/// What the daemon does now: counters since its start, and the state of its shards. Poll it to get rates; the page at `/`
/// does. Figures may be 200 ms old, `uptime_ms` says exactly when they were taken. Numbers beyond 2^53 lose their last
/// digits in JavaScript.
#[utoipa::path(get, path = "/v1/status", tag = "operation", operation_id = "GetStatus",
    responses((status = 200, description = "The figures, also while it starts or drains.", body = StatusView)))]
pub(super) async fn status(State(app): State<Arc<App>>) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ),
    ];
    (headers, app.figures.answer(&app)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_round_and_the_last_is_absent() {
        // Bounds in seconds as the engine has them: microseconds without the dirt of binary fractions; infinity is no
        // number in JSON, so the member is left out.
        let totals = [(1e-6, 1), (2e-5, 2), (5e-4, 3), (10.0, 4), (f64::INFINITY, 5)];
        let text = serde_json::to_string(&buckets(&totals)).unwrap();
        assert_eq!(
            text,
            r#"[{"le_us":1.0,"count":1},{"le_us":20.0,"count":2},{"le_us":500.0,"count":3},{"le_us":10000000.0,"count":4},{"count":5}]"#
        );
    }
}
