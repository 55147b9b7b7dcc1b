//! The inner parts of a daemon without its ports: three small datasets, an engine, the services, and requests
//! to them.

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use http::{Method, Request, header};
use http_body_util::BodyExt as _;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
use ringfetch_engine::dataset::{DatasetSpec, Dtype, KindSpec};
use ringfetch_engine::engine::Engine;
use ringfetch_proto::v1::dataset_service_client::DatasetServiceClient;
use ringfetch_proto::v1::fetch_service_client::FetchServiceClient;
use ringfetch_server::catalogue::Catalogue;
use ringfetch_server::config::{Base, Inputs, Limits, LogConfig, LogFormat, load};
use ringfetch_server::fetch::Fetcher;
use ringfetch_server::lifecycle::Lifecycle;
use ringfetch_server::listener::ConnectionLimits;
use ringfetch_server::reconfigure::{Reconfigurer, ReconfigurerParts};
use ringfetch_server::rpc_metrics::RpcMetrics;
use ringfetch_server::telemetry::Telemetry;
use ringfetch_server::{admin, grpc, http as mirror};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tower::ServiceExt as _;

pub(crate) const MIB: usize = 1 << 20;
/// Five windows and three blocks.
pub(crate) const BLOCKS_BYTES: usize = 5 * MIB + 3 * 4096;

/// The limits of [`Served::new`].
pub(crate) const LIMITS: Limits = Limits {
    items_per_request: 4096,
    response_bytes: 4 * MIB as u64,
    request_bytes: 1 << 16,
    request_memory_bytes: 64 << 20,
    deadline: None,
    requests_in_flight: 64,
    requests_per_connection: 64,
    stream_requests_in_flight: 8,
    connections: 8,
    http_ranges: 8,
};

pub(crate) struct Served {
    _directory: TempDir,
    pub(crate) engine: Engine,
    pub(crate) fetcher: Fetcher,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) registry: prometheus::Registry,
    /// What the gRPC port serves.
    pub(crate) grpc: Router,
    /// What the admin port serves.
    pub(crate) admin: Router,
    router: Router,
}

pub(crate) fn data(length: usize, seed: usize) -> Vec<u8> {
    (0..length)
        .map(|i| u8::try_from((i * 7 + i / 251 + seed) % 256).unwrap())
        .collect()
}

/// Writes the files, and opens them as `b` (blocks), `v` (vectors of four elements) and `o` (objects).
fn catalogue(directory: &Path) -> Catalogue {
    let path = |name: &str| directory.join(name);
    std::fs::write(path("blocks"), data(BLOCKS_BYTES, 0)).unwrap();
    let vectors: Vec<u8> = (0..400_u16).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    std::fs::write(path("vectors"), vectors).unwrap();
    std::fs::create_dir_all(path("objects/a")).unwrap();
    std::fs::write(path("objects/a/long"), data(5 * MIB + 17, 1)).unwrap();
    std::fs::write(path("objects/one"), b"x").unwrap();
    std::fs::write(path("objects/empty"), b"").unwrap();
    let objects = KindSpec::objects(8, Duration::ZERO);
    let datasets = [
        ("b", "blocks", KindSpec::blocks(4096)),
        ("v", "vectors", KindSpec::raw_vectors(4, Dtype::F32, 0)),
        ("o", "objects", objects),
    ];
    let specs = datasets.map(|(name, file, kind)| DatasetSpec::new(name, path(file), kind, DirectIo::Off));
    Catalogue::open(&specs).unwrap()
}

impl Served {
    pub(crate) fn new() -> Self {
        Self::with(LIMITS)
    }

    pub(crate) fn with(limits: Limits) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let catalogue = catalogue(directory.path());
        let config = EngineConfig {
            backend: BackendKind::Pread,
            pin: false,
            memory_budget_bytes: 8 * MIB as u64,
            ..EngineConfig::default()
        };
        // Starting blocks until the threads exist, so not on the test's runtime.
        let engine = std::thread::spawn(move || Engine::start(&config).unwrap())
            .join()
            .unwrap();
        let fetcher = Fetcher::new(engine.clone(), catalogue.datasets(), limits);
        let lifecycle = Lifecycle::new();
        let registry = prometheus::Registry::new();
        fetcher.register_metrics(&registry).unwrap();
        let rpc = RpcMetrics::new(&registry).unwrap();
        let log = LogConfig {
            filter: "info".to_owned(),
            format: LogFormat::Text,
        };
        let (telemetry, _subscriber) = Telemetry::detached(&log).unwrap();
        let inputs = Inputs {
            base: Base::Demo(directory.path().to_owned()),
            environment: Vec::new(),
            flags: Vec::new(),
        };
        let loaded = load(&inputs).unwrap();
        let parts = ReconfigurerParts {
            inputs,
            fetcher: fetcher.clone(),
            lifecycle: lifecycle.clone(),
            telemetry: telemetry.clone(),
            connection_limits: ConnectionLimits::new(&limits, MIB as u64),
            tls: None,
            access_log: None,
            access: None,
        };
        let reconfigurer = Reconfigurer::new(parts, loaded, catalogue).unwrap();
        Self {
            grpc: grpc::service(fetcher.clone(), lifecycle.clone(), rpc.clone()),
            admin: admin::service(
                fetcher.clone(),
                lifecycle.clone(),
                telemetry,
                rpc.clone(),
                reconfigurer,
            ),
            router: mirror::service(fetcher.clone(), lifecycle.clone(), rpc, registry.clone()),
            _directory: directory,
            engine,
            fetcher,
            lifecycle,
            registry,
        }
    }

    /// A gRPC client of FetchService.
    pub(crate) fn fetch(&self) -> FetchServiceClient<Router> {
        FetchServiceClient::new(self.grpc.clone())
    }

    /// A gRPC client of DatasetService.
    pub(crate) fn datasets(&self) -> DatasetServiceClient<Router> {
        DatasetServiceClient::new(self.grpc.clone())
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str, headers: &[(header::HeaderName, &str)]) -> Response {
        self.send(request(Method::GET, path, headers, Body::empty()))
            .await
    }

    pub(crate) async fn post(&self, path: &str, accept: &str, body: Value) -> Response {
        let headers = [
            (header::CONTENT_TYPE, "application/json"),
            (header::ACCEPT, accept),
        ];
        self.send(request(
            Method::POST,
            path,
            &headers,
            Body::from(body.to_string()),
        ))
        .await
    }

    pub(crate) async fn stop(self) {
        let report = self.engine.drain(Instant::now() + Duration::from_secs(10)).await;
        assert_eq!(report.abandoned_reads, 0);
    }
}

pub(crate) fn request(
    method: Method,
    path: &str,
    headers: &[(header::HeaderName, &str)],
    body: Body,
) -> Request<Body> {
    let builder = Request::builder()
        .method(method)
        .uri(format!("/v1/datasets/{path}"));
    headers
        .iter()
        .fold(builder, |builder, (name, value)| builder.header(name, *value))
        .body(body)
        .unwrap()
}

pub(crate) async fn bytes_of(response: Response) -> Vec<u8> {
    response.into_body().collect().await.unwrap().to_bytes().to_vec()
}

pub(crate) async fn json_of(response: Response) -> Value {
    serde_json::from_slice(&bytes_of(response).await).unwrap()
}

pub(crate) fn text(response: &Response, name: impl AsRef<str>) -> String {
    response
        .headers()
        .get(name.as_ref())
        .map_or(String::new(), |value| value.to_str().unwrap().to_owned())
}
