//! The admin service: what the daemon does now, and what changes it while it serves. Stands on a port of its own, with
//! health and reflection beside it.
//!
//! Rates are over the last few seconds, from samples that a task takes once a second for as long as the service
//! lives. Deliberately absent: anything that reads data.

mod change;

use crate::fetch::Fetcher;
use crate::grpc::{self, describe};
use crate::lifecycle::Lifecycle;
use crate::live::Live;
use crate::rpc_metrics::RpcMetrics;
use crate::status::ERROR_DOMAIN;
use crate::telemetry::Telemetry;
use ringfetch_engine::engine::{ShardStatus, Totals};
use ringfetch_proto::v1;
use ringfetch_proto::v1::admin_service_server::{AdminService, AdminServiceServer};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tonic::service::RoutesBuilder;
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// Services on the admin port that health and reflection know.
const SERVICES: &[&str] = &["ringfetch.v1.AdminService"];

/// Between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Samples kept: rates are over the last five seconds once the daemon has run that long.
const SAMPLES_MAX: usize = 5;
/// Longest log filter, bytes.
const FILTER_BYTES_MAX: usize = 4096;

/// Everything the admin port serves.
pub fn service(
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    telemetry: Telemetry,
    rpc: RpcMetrics,
    live: Live,
) -> axum::Router {
    let admin = Admin::new(fetcher, lifecycle.clone(), telemetry, live);
    let mut routes = RoutesBuilder::default();
    routes.add_service(
        AdminServiceServer::new(admin)
            .max_decoding_message_size(64 << 10)
            .max_encoding_message_size(usize::MAX),
    );
    grpc::finish(routes, lifecycle, rpc, SERVICES)
}

#[derive(Debug)]
struct Admin {
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    telemetry: Telemetry,
    live: Live,
    started: Instant,
    samples: Arc<Mutex<Samples>>,
    sampling: AtomicBool,
}

impl Admin {
    fn new(fetcher: Fetcher, lifecycle: Lifecycle, telemetry: Telemetry, live: Live) -> Self {
        let started = Instant::now();
        let mut samples = Samples::default();
        samples.push(Sample::of(started, &fetcher.engine().totals()));
        let admin = Self {
            fetcher,
            lifecycle,
            telemetry,
            live,
            started,
            samples: Arc::new(Mutex::new(samples)),
            sampling: AtomicBool::new(false),
        };
        admin.keep_sampling();
        admin
    }

    /// Starts the task that samples, once, as soon as there is a runtime. It ends with the service.
    fn keep_sampling(&self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        if self.sampling.swap(true, Ordering::Relaxed) {
            return;
        }
        let (samples, engine) = (Arc::downgrade(&self.samples), self.fetcher.engine().clone());
        runtime.spawn(async move {
            let mut ticks = tokio::time::interval(SAMPLE_INTERVAL);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let Some(samples) = samples.upgrade() else { return };
                let sample = Sample::of(Instant::now(), &engine.totals());
                samples
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(sample);
            }
        });
    }
}

/// What was counted at one moment.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    reads: u64,
    bytes: u64,
}

impl Sample {
    fn of(at: Instant, totals: &Totals) -> Self {
        Self {
            at,
            reads: totals.reads,
            bytes: totals.read_bytes,
        }
    }
}

/// The last few samples, oldest first.
#[derive(Debug, Default)]
struct Samples(VecDeque<Sample>);

#[derive(Debug, Default, PartialEq)]
struct Rates {
    reads_per_second: f64,
    bytes_per_second: f64,
    window_ms: u32,
}

impl Samples {
    fn push(&mut self, sample: Sample) {
        if self.0.len() == SAMPLES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    /// Rates from the oldest sample until `now`.
    fn rates(&self, now: Sample) -> Rates {
        let Some(oldest) = self.0.front() else {
            return Rates::default();
        };
        let window = now.at.saturating_duration_since(oldest.at);
        if window.is_zero() {
            return Rates::default();
        }
        let per_second = |now: u64, then: u64| as_f64(now.saturating_sub(then)) / window.as_secs_f64();
        Rates {
            reads_per_second: per_second(now.reads, oldest.reads),
            bytes_per_second: per_second(now.bytes, oldest.bytes),
            window_ms: u32::try_from(window.as_millis()).unwrap_or(u32::MAX),
        }
    }
}

/// The upper bound, in microseconds, of the bucket that a quantile falls into: of a histogram of (upper bound in
/// seconds, how many at or below it). 0 when nothing was counted; infinite when it is beyond the last finite bound.
fn quantile_us(buckets: &[(f64, u64)], quantile: f64) -> f64 {
    let total = buckets.last().map_or(0, |(_, count)| *count);
    if total == 0 {
        return 0.0;
    }
    let rank = as_f64(total) * quantile;
    let bucket = buckets.iter().find(|(_, count)| as_f64(*count) >= rank);
    bucket.map_or(f64::INFINITY, |(bound, _)| bound * 1e6)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "rates and ranks need no more than 53 bits"
)]
fn as_f64(count: u64) -> f64 {
    count as f64
}

fn shard(status: ShardStatus) -> v1::ShardStatus {
    v1::ShardStatus {
        shard: status.shard,
        in_flight: status.in_flight,
        queued: status.queued,
        queue_depth: status.queue_depth,
        device_reads_total: status.device_reads_total,
        submissions_total: status.submissions_total,
        backend: describe::backend(status.backend).into(),
        routed: status.routed,
    }
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn get_status(
        &self,
        _: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        self.keep_sampling();
        let engine = self.fetcher.engine();
        let backend = engine.backend();
        let totals = engine.totals();
        let now = Sample::of(Instant::now(), &totals);
        let rates = self
            .samples
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .rates(now);
        let (memory_in_use_bytes, memory_budget_bytes) = engine.memory();
        let datasets = self.fetcher.describe_all();
        Ok(Response::new(v1::GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            state: self.lifecycle.state().as_str().to_owned(),
            backend: describe::backend(backend.backend).into(),
            requested: describe::backend(backend.requested).into(),
            fallback: backend.is_fallback(),
            cores: u32::try_from(engine.core_count()).unwrap_or(u32::MAX),
            memory_budget_bytes,
            memory_in_use_bytes,
            shards: engine.shards().into_iter().map(shard).collect(),
            datasets: datasets.into_iter().map(describe::dataset).collect(),
            reason: backend.reason,
            reads_per_second: rates.reads_per_second,
            read_bytes_per_second: rates.bytes_per_second,
            rates_window_ms: rates.window_ms,
            reads_total: totals.reads,
            read_errors_total: totals.read_errors,
            latency_p50_us: quantile_us(&totals.total_seconds, 0.5),
            latency_p99_us: quantile_us(&totals.total_seconds, 0.99),
            latency_p999_us: quantile_us(&totals.total_seconds, 0.999),
            last_reload: self.live.last_reload().map(change::last_reload),
        }))
    }

    async fn set_log_level(
        &self,
        request: Request<v1::SetLogLevelRequest>,
    ) -> Result<Response<v1::SetLogLevelResponse>, Status> {
        let filter = request.into_inner().filter;
        let result = if filter.len() > FILTER_BYTES_MAX {
            Err(format!(
                "the filter has {} bytes, and one may have {FILTER_BYTES_MAX}",
                filter.len()
            ))
        } else if filter.trim().is_empty() {
            Err("the filter is empty: write one like info or warn,ringfetch_engine=debug".to_owned())
        } else {
            self.telemetry.set_filter(&filter)
        };
        match result {
            Ok(previous) => {
                tracing::info!(filter, previous, "log filter replaced");
                Ok(Response::new(v1::SetLogLevelResponse { previous }))
            }
            Err(problem) => Err(invalid_filter(&problem)),
        }
    }

    async fn set_backend(
        &self,
        request: Request<v1::SetBackendRequest>,
    ) -> Result<Response<v1::SetBackendResponse>, Status> {
        let request = request.into_inner();
        change::set_backend(&self.live, request).await.map(Response::new)
    }

    async fn clear_backend(
        &self,
        request: Request<v1::ClearBackendRequest>,
    ) -> Result<Response<v1::ClearBackendResponse>, Status> {
        let request = request.into_inner();
        change::clear_backend(&self.live, request)
            .await
            .map(Response::new)
    }

    async fn reload(&self, _: Request<v1::ReloadRequest>) -> Result<Response<v1::ReloadResponse>, Status> {
        change::reload(&self.live).await.map(Response::new)
    }
}

fn invalid_filter(problem: &str) -> Status {
    let message = crate::status::message_of(&format_args!("filter: {problem}"));
    let mut details = ErrorDetails::with_bad_request_violation("filter", message.clone());
    details.set_error_info("MALFORMED", ERROR_DOMAIN, HashMap::new());
    Status::with_error_details(Code::InvalidArgument, message, details)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_upper_bounds() {
        // A hundred reads: 50 within 1 us, 49 more within 10 us, one beyond every bound.
        let buckets = [(1e-6, 50), (1e-5, 99), (f64::INFINITY, 100)];
        let close = |found: f64, expected: f64| (found - expected).abs() < 1e-9;
        assert!(close(quantile_us(&buckets, 0.5), 1.0));
        assert!(close(quantile_us(&buckets, 0.99), 10.0));
        assert!(quantile_us(&buckets, 0.999).is_infinite());
        assert!(close(quantile_us(&[(1e-6, 0), (f64::INFINITY, 0)], 0.5), 0.0));
        assert!(close(quantile_us(&[], 0.5), 0.0));
    }

    #[test]
    fn rates_are_over_the_samples_that_are_kept() {
        // One sample a second, 100 reads a second for ten seconds: the rate is 100 over the window that is kept.
        let start = Instant::now();
        let sample = |second: u64| Sample {
            at: start + Duration::from_secs(second),
            reads: second * 100,
            bytes: second * 4096,
        };
        let mut samples = Samples::default();
        assert_eq!(samples.rates(sample(0)), Rates::default());
        (0..10).for_each(|second| samples.push(sample(second)));
        let rates = samples.rates(sample(10));
        assert_eq!(rates.window_ms, 5000);
        assert!((rates.reads_per_second - 100.0).abs() < 1e-9);
        assert!((rates.bytes_per_second - 4096.0).abs() < 1e-9);
    }
}
