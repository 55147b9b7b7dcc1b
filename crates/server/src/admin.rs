//! The admin service: reports what the daemon does, and changes it while it serves. It has its own port, with
//! health and reflection.
//!
//! Rates are over the last few seconds, from samples that a task takes once a second while the service exists.

mod change;

use crate::daemon_status::{DatasetStatusView, ShardView, StatusCollector, StatusView};
use crate::fetch::{Fetcher, StorageInfo};
use crate::gathering::Gathering;
use crate::grpc::{self, convert};
use crate::lifecycle::{Lifecycle, State};
use crate::reconfigure::Reconfigurer;
use crate::rpc_metrics::RpcMetrics;
use crate::telemetry::Telemetry;
use ringfetch_engine::engine::{Engine, Totals};
use ringfetch_engine::series::float;
use ringfetch_engine::sync::lock;
use ringfetch_proto::v1;
use ringfetch_proto::v1::admin_service_server::{AdminService, AdminServiceServer};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

/// Services on the admin port that health and reflection list.
pub(crate) const SERVICES: &[&str] = &["ringfetch.v1.AdminService"];

/// Time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Samples kept: rates are over the last five seconds once the daemon has run that long.
const SAMPLES_MAX: usize = 5;
/// Longest log filter in bytes.
const FILTER_BYTES_MAX: usize = 4096;

/// Everything that the admin port serves. Must be called inside a runtime.
pub fn service(
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    telemetry: Telemetry,
    rpc: RpcMetrics,
    reconfigurer: Reconfigurer,
) -> axum::Router {
    let admin = Admin::new(fetcher.clone(), lifecycle.clone(), telemetry, reconfigurer);
    let mut routes = RoutesBuilder::default();
    routes.add_service(AdminServiceServer::new(admin).max_encoding_message_size(usize::MAX));
    grpc::finish(routes, fetcher, lifecycle, rpc, SERVICES, State::Ended)
}

#[derive(Debug)]
struct Admin {
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    telemetry: Telemetry,
    reconfigurer: Reconfigurer,
    collector: Arc<StatusCollector>,
    statuses: Gathering<(v1::GetStatusResponse, Sample)>,
    samples: Arc<Mutex<Samples>>,
}

impl Admin {
    fn new(fetcher: Fetcher, lifecycle: Lifecycle, telemetry: Telemetry, reconfigurer: Reconfigurer) -> Self {
        let mut samples = Samples::default();
        samples.push(Sample::of(Instant::now(), &fetcher.engine().totals()));
        let samples = Arc::new(Mutex::new(samples));
        tokio::spawn(keep_sampling(Arc::downgrade(&samples), fetcher.engine().clone()));
        Self {
            collector: Arc::new(StatusCollector::of(&fetcher)),
            statuses: Gathering::new(Duration::ZERO),
            fetcher,
            lifecycle,
            telemetry,
            reconfigurer,
            samples,
        }
    }
}

/// Takes samples until the service ends.
async fn keep_sampling(samples: Weak<Mutex<Samples>>, engine: Engine) {
    let mut ticks = tokio::time::interval(SAMPLE_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(samples) = samples.upgrade() else { return };
        let sample = Sample::of(Instant::now(), &engine.totals());
        lock(&samples).push(sample);
    }
}

/// Counters at one moment.
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

    /// Rates between the oldest sample and `now`.
    fn rates(&self, now: Sample) -> Rates {
        let Some(oldest) = self.0.front() else {
            return Rates::default();
        };
        let window = now.at.saturating_duration_since(oldest.at);
        if window.is_zero() {
            return Rates::default();
        }
        let per_second = |now: u64, then: u64| float(now.saturating_sub(then)) / window.as_secs_f64();
        Rates {
            reads_per_second: per_second(now.reads, oldest.reads),
            bytes_per_second: per_second(now.bytes, oldest.bytes),
            window_ms: u32::try_from(window.as_millis()).unwrap_or(u32::MAX),
        }
    }
}

fn shard(shard: ShardView) -> v1::ShardStatus {
    v1::ShardStatus {
        shard: shard.shard,
        in_flight: shard.in_flight,
        stalled: shard.stalled,
        queued: shard.queued,
        queue_depth: shard.queue_depth,
        device_reads_total: shard.device_reads_total,
        submissions_total: shard.submissions_total,
        backend: convert::backend(shard.backend).into(),
        routed: shard.routed,
    }
}

fn dataset(status: DatasetStatusView) -> v1::DatasetStatus {
    let StorageInfo {
        path,
        files,
        stride_bytes,
        base_offset,
    } = status.storage;
    v1::DatasetStatus {
        dataset: Some(convert::dataset(status.dataset)),
        read_path: Some(convert::read_path(path)),
        files: u32::try_from(files).unwrap_or(u32::MAX),
        stride_bytes: stride_bytes.unwrap_or(0),
        base_offset: base_offset.unwrap_or(0),
        reads_total: status.reads_total,
        read_errors_total: status.read_errors_total,
        read_bytes_total: status.read_bytes_total,
    }
}

/// A status without rates and reloads.
fn status(taken: StatusView) -> v1::GetStatusResponse {
    v1::GetStatusResponse {
        version: taken.version.to_owned(),
        uptime_ms: taken.uptime_ms,
        state: taken.state.to_owned(),
        backend: convert::backend(taken.backend.backend).into(),
        requested: convert::backend(taken.backend.requested).into(),
        fallback: taken.backend.fallback,
        reason: taken.backend.reason,
        cores: u32::try_from(taken.cores).unwrap_or(u32::MAX),
        memory_budget_bytes: taken.memory.budget_bytes,
        memory_in_use_bytes: taken.memory.in_use_bytes,
        shards: taken.shards.into_iter().map(shard).collect(),
        datasets: taken.datasets.into_iter().map(dataset).collect(),
        reads_total: taken.totals.reads_total,
        read_errors_total: taken.totals.read_errors_total,
        latency_p50_us: taken.read_duration.quantile_us(0.5),
        latency_p99_us: taken.read_duration.quantile_us(0.99),
        latency_p999_us: taken.read_duration.quantile_us(0.999),
        ..Default::default()
    }
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn get_status(
        &self,
        _: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        let (collector, fetcher) = (Arc::clone(&self.collector), self.fetcher.clone());
        let lifecycle = self.lifecycle.clone();
        let gather = move || {
            let taken = collector.collect(&fetcher, lifecycle.state());
            let now = Sample {
                at: Instant::now(),
                reads: taken.totals.reads_total,
                bytes: taken.totals.read_bytes_total,
            };
            (status(taken), now)
        };
        let gathered = self.statuses.get(|_| true, gather).await;
        let (mut status, now) = gathered.map_err(Status::internal)?;
        let rates = lock(&self.samples).rates(now);
        status.reads_per_second = rates.reads_per_second;
        status.read_bytes_per_second = rates.bytes_per_second;
        status.rates_window_ms = rates.window_ms;
        status.last_reload = self.reconfigurer.last_reload().map(change::last_reload);
        Ok(Response::new(status))
    }

    async fn set_log_level(
        &self,
        request: Request<v1::SetLogLevelRequest>,
    ) -> Result<Response<v1::SetLogLevelResponse>, Status> {
        let filter = request.into_inner().filter;
        let result = if filter.len() > FILTER_BYTES_MAX {
            Err(format!(
                "the filter has {} bytes; the limit is {FILTER_BYTES_MAX}",
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
            Err(problem) => Err(change::malformed("filter", &problem)),
        }
    }

    async fn set_backend(
        &self,
        request: Request<v1::SetBackendRequest>,
    ) -> Result<Response<v1::SetBackendResponse>, Status> {
        let request = request.into_inner();
        change::set_backend(&self.reconfigurer, request)
            .await
            .map(Response::new)
    }

    async fn clear_backend(
        &self,
        request: Request<v1::ClearBackendRequest>,
    ) -> Result<Response<v1::ClearBackendResponse>, Status> {
        let request = request.into_inner();
        change::clear_backend(&self.reconfigurer, request)
            .await
            .map(Response::new)
    }

    async fn reload(&self, _: Request<v1::ReloadRequest>) -> Result<Response<v1::ReloadResponse>, Status> {
        change::reload(&self.reconfigurer).await.map(Response::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_over_the_samples_that_are_kept() {
        // One sample and 100 reads a second, for ten seconds: the rate is 100 over the window that is kept.
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
