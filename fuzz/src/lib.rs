//! Code shared by the targets: three small datasets behind the daemon's two services, their contents, and
//! requests as text.

#![forbid(unsafe_code)]

pub mod certificate;
pub mod check;
pub mod grpc;
pub mod items;
pub mod principals;
pub mod request;
pub mod scores;
pub mod socket;

use bytes::{Buf as _, Bytes};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, Dtype, KindSpec, Layout, PartialTail};
use ringfetch_engine::engine::Engine;
use ringfetch_server::config::Limits;
use ringfetch_server::fetch::Fetcher;
use ringfetch_server::lifecycle::Lifecycle;
use ringfetch_server::rpc_metrics::RpcMetrics;
use std::future::Future;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt as _;

/// Bytes of a block of dataset `b`, which has 41 of them.
pub const BLOCK_BYTES: usize = 100;
/// Bytes of a vector of dataset `v`, which has 37 of them after a header of 20 bytes.
pub const VECTOR_BYTES: usize = 16;
/// Where vector 0 begins.
pub const VECTORS_FROM: usize = 20;
/// Most items per request: few, so that inputs reach the limit.
pub const ITEMS_MAX: u32 = 24;
/// Longest data of a response.
pub const RESPONSE_BYTES: u64 = 8192;
/// Longest request: short for the same reason.
pub const REQUEST_BYTES: u32 = 1024;

/// Datasets `b` (blocks), `v` (vectors) and `o` (objects) behind both services.
pub struct World {
    /// The file of `b`.
    pub blocks: Vec<u8>,
    /// The file of `v`.
    pub vectors: Vec<u8>,
    /// The objects of `o`.
    pub objects: [(&'static str, Vec<u8>); 3],
    pub engine: Engine,
    pub limits: Limits,
    pub fetcher: Fetcher,
    pub lifecycle: Lifecycle,
    pub registry: prometheus::Registry,
    pub rpc: RpcMetrics,
    pub http: axum::Router,
    pub grpc: axum::Router,
    runtime: Runtime,
    _directory: TempDir,
}

/// The world of this process.
pub static WORLD: LazyLock<World> = LazyLock::new(World::new);

fn data(length: usize, seed: usize) -> Vec<u8> {
    (0..length)
        .map(|i| ((i * 7 + i / 251 + seed) % 256) as u8)
        .collect()
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let blocks = data(41 * BLOCK_BYTES, 0);
        let vectors = data(VECTORS_FROM + 37 * VECTOR_BYTES, 3);
        let objects = [
            ("one", data(1000, 1)),
            ("deep/two", data(77, 2)),
            ("empty", Vec::new()),
        ];
        std::fs::write(path("blocks"), &blocks).unwrap();
        std::fs::write(path("vectors"), &vectors).unwrap();
        std::fs::create_dir_all(path("objects/deep")).unwrap();
        for (name, bytes) in &objects {
            std::fs::write(path("objects").join(name), bytes).unwrap();
        }
        let kinds = [
            (
                "b",
                "blocks",
                KindSpec::Blocks {
                    block_bytes: BLOCK_BYTES as u32,
                    partial_tail: PartialTail::Refuse,
                },
            ),
            (
                "v",
                "vectors",
                KindSpec::Vectors {
                    layout: Layout::Raw,
                    dim: Some(4),
                    dtype: Some(Dtype::F32),
                    header_bytes: VECTORS_FROM as u64,
                },
            ),
            (
                "o",
                "objects",
                KindSpec::Objects {
                    max_open_files: 8,
                    revalidate: Duration::from_secs(1),
                },
            ),
        ];
        let datasets = kinds.map(|(name, file, kind)| {
            let spec = DatasetSpec {
                name: name.to_owned(),
                paths: vec![path(file)],
                kind,
                direct_io: DirectIo::Off,
            };
            Arc::new(Dataset::open(&spec).unwrap())
        });
        let mut config = EngineConfig {
            backend: BackendKind::Pread,
            pin: false,
            memory_budget_bytes: 32 << 20,
            ..EngineConfig::default()
        };
        config.pread.threads = 2;
        let limits = Limits {
            items_per_request: ITEMS_MAX,
            response_bytes: RESPONSE_BYTES,
            request_bytes: REQUEST_BYTES,
            request_memory_bytes: 64 << 20,
            deadline: Some(Duration::from_secs(60)),
            requests_in_flight: 256,
            requests_per_connection: 64,
            stream_requests_in_flight: 8,
            connections: 64,
            http_ranges: 8,
        };
        let engine = Engine::start(&config).unwrap();
        let fetcher = Fetcher::new(engine.clone(), datasets.to_vec(), limits);
        let (lifecycle, registry) = (Lifecycle::new(), prometheus::Registry::new());
        lifecycle.start_serving();
        let rpc = RpcMetrics::new(&registry).unwrap();
        let http = ringfetch_server::http::service(
            fetcher.clone(),
            lifecycle.clone(),
            rpc.clone(),
            registry.clone(),
        );
        let grpc = ringfetch_server::grpc::service(fetcher.clone(), lifecycle.clone(), rpc.clone());
        Self {
            blocks,
            vectors,
            objects,
            engine,
            limits,
            fetcher,
            lifecycle,
            registry,
            rpc,
            http,
            grpc,
            runtime: Builder::new_current_thread().enable_all().build().unwrap(),
            _directory: directory,
        }
    }

    /// Runs a future on the world's runtime. libFuzzer's timeout detects one that does not end.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Sends a request to the HTTP service, without a socket.
    pub fn over_http(&self, request: Request<Bytes>) -> Answer {
        let request = request.map(|body| axum::body::Body::new(Full::new(body)));
        self.block_on(async {
            Answer::of(self.http.clone().oneshot(request).await.unwrap())
                .await
                .unwrap()
        })
    }

    /// The bytes of `/v1/datasets/{dataset}/bytes`.
    pub fn address_space(&self, dataset: &str) -> Option<&[u8]> {
        match dataset {
            "b" => Some(&self.blocks),
            "v" => Some(&self.vectors),
            _ => None,
        }
    }

    /// A block's bytes, if there is such a block.
    pub fn block(&self, index: u64) -> Option<&[u8]> {
        part(
            &self.blocks,
            index.checked_mul(BLOCK_BYTES as u64)?,
            BLOCK_BYTES as u64,
        )
    }

    /// A vector's bytes, if there is such a vector.
    pub fn vector(&self, id: u64) -> Option<&[u8]> {
        part(
            &self.vectors[VECTORS_FROM..],
            id.checked_mul(VECTOR_BYTES as u64)?,
            VECTOR_BYTES as u64,
        )
    }

    /// An object's bytes.
    pub fn object(&self, name: &str) -> Option<&[u8]> {
        self.objects
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, bytes)| &bytes[..])
    }

    /// A part of an object, to its end if `length` is 0; `None` if it is not inside.
    pub fn object_part(&self, name: &str, offset: u64, length: u64) -> Option<&[u8]> {
        let bytes = self.object(name)?;
        match length {
            0 => bytes.get(usize::try_from(offset).ok()?..),
            length => part(bytes, offset, length),
        }
    }
}

/// `length` bytes from `offset`, at least one, if they are all there.
pub fn part(bytes: &[u8], offset: u64, length: u64) -> Option<&[u8]> {
    let end = usize::try_from(offset.checked_add(length)?).ok()?;
    bytes
        .get(usize::try_from(offset).ok()?..end)
        .filter(|part| !part.is_empty())
}

/// A whole response.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: HeaderMap,
}

impl Answer {
    /// Reads a response to its end.
    pub async fn of<B>(response: Response<B>) -> Result<Self, B::Error>
    where
        B: http_body::Body,
    {
        let (parts, body) = response.into_parts();
        let mut body = std::pin::pin!(body);
        let (mut bytes, mut trailers) = (Vec::new(), HeaderMap::new());
        // Not collected: a long text makes its next piece only when one before it has been dropped.
        while let Some(frame) = body.frame().await {
            match frame?.into_data() {
                Ok(mut data) => {
                    while data.has_remaining() {
                        let chunk = data.chunk();
                        bytes.extend_from_slice(chunk);
                        let length = chunk.len();
                        data.advance(length);
                    }
                }
                Err(frame) => trailers = frame.into_trailers().unwrap_or_default(),
            }
        }
        Ok(Self {
            status: parts.status,
            headers: parts.headers,
            body: bytes.into(),
            trailers,
        })
    }

    /// A header's text; empty if it is absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }
}
