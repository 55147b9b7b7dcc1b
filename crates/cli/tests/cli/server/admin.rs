//! What the fake daemon answers to operators.

use super::{Server, datasets};
use ringfetch_proto::v1 as wire;
use tonic::Status;

impl Server {
    pub(super) fn get_status(self, _: wire::GetStatusRequest) -> Result<wire::GetStatusResponse, Status> {
        let dataset_status = |dataset| wire::DatasetStatus {
            dataset: Some(dataset),
            read_path: Some(wire::ReadPath {
                backend: wire::Backend::Mmap.into(),
                requested: wire::Backend::Uring.into(),
                direct_io_reason: "a mapping never is".into(),
                ..Default::default()
            }),
            files: 1,
            ..Default::default()
        };
        let shard = wire::ShardStatus {
            backend: wire::Backend::Uring.into(),
            routed: true,
            queue_depth: 128,
            stalled: 9,
            device_reads_total: 12_345,
            ..Default::default()
        };
        Ok(wire::GetStatusResponse {
            version: "1.2.3".into(),
            uptime_ms: 3_723_456,
            state: "serving".into(),
            backend: wire::Backend::Mmap.into(),
            requested: wire::Backend::Uring.into(),
            reason: "seccomp forbids io_uring".into(),
            fallback: true,
            cores: 2,
            memory_budget_bytes: 256 << 20,
            memory_in_use_bytes: 1 << 20,
            shards: vec![shard],
            datasets: datasets().into_iter().map(dataset_status).collect(),
            reads_per_second: 91_234.5,
            read_bytes_per_second: 373.7e6,
            rates_window_ms: 1000,
            reads_total: 1_234_567,
            read_errors_total: 8,
            latency_p50_us: 500.0,
            latency_p99_us: 20_000.0,
            latency_p999_us: 50_000.0,
            last_reload: Some(wire::LastReload {
                problem: "engine.bakend: is not a key here".into(),
                ..Default::default()
            }),
        })
    }

    pub(super) fn set_log_level(
        self,
        request: wire::SetLogLevelRequest,
    ) -> Result<wire::SetLogLevelResponse, Status> {
        if request.filter == "wrong=filter" {
            return Err(Status::invalid_argument("filter: does not parse"));
        }
        // As the daemon answers on another of its ports.
        if request.filter == "elsewhere" {
            return Err(Status::unimplemented("no such service; this port has another"));
        }
        let previous = "info".into();
        Ok(wire::SetLogLevelResponse { previous })
    }

    pub(super) fn set_backend(
        self,
        request: wire::SetBackendRequest,
    ) -> Result<wire::SetBackendResponse, Status> {
        match (request.backend(), request.dataset.as_deref()) {
            (wire::Backend::Uring, _) => Err(Status::failed_precondition(
                "backend uring: seccomp forbids io_uring",
            )),
            (_, Some("nothing")) => Err(Status::not_found("dataset: there is no dataset \"nothing\"")),
            (backend, dataset) => Ok(wire::SetBackendResponse {
                previous: wire::Backend::Mmap.into(),
                backend: backend.into(),
                reason: "asked for at run time".into(),
                datasets_with_own: dataset.map_or(vec!["vectors".into()], |_| Vec::new()),
            }),
        }
    }

    pub(super) fn clear_backend(
        self,
        _: wire::ClearBackendRequest,
    ) -> Result<wire::ClearBackendResponse, Status> {
        let (previous, backend) = (wire::Backend::Pread.into(), wire::Backend::Mmap.into());
        let reason = "asked for by name".into();
        Ok(wire::ClearBackendResponse {
            previous,
            backend,
            reason,
        })
    }

    pub(super) fn reload(self, _: wire::ReloadRequest) -> Result<wire::ReloadResponse, Status> {
        if self.0.overloaded {
            return Err(Status::invalid_argument("engine.bakend: is not a key here"));
        }
        let change = |key: &str, before: &str, after: &str| {
            let [key, before, after] = [key, before, after].map(str::to_owned);
            wire::ConfigChange { key, before, after }
        };
        Ok(wire::ReloadResponse {
            applied: vec![change("limits.connections", "4096", "100")],
            needs_restart: vec![change("engine.cores", "2", "4")],
            datasets_added: vec!["new".into()],
            datasets_removed: vec!["old".into()],
            datasets_unchanged: vec!["blocks".into(), "vectors".into()],
            ..Default::default()
        })
    }
}
