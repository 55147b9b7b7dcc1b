//! The inner parts of a daemon without its ports: three datasets, an engine, and the two routers.

use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
use ringfetch_engine::dataset::{DatasetSpec, KindSpec, Layout, PartialTail};
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
use ringfetch_server::{admin, grpc};
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) const BLOCK_BYTES: usize = 1000;
pub(crate) const BLOCKS: usize = 50;
pub(crate) const DIM: usize = 3;
pub(crate) const VECTORS: usize = 20;

/// Everything that a test needs; its files are removed with it.
pub(crate) struct Served {
    pub(crate) fetcher: Fetcher,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) registry: prometheus::Registry,
    /// What the public port serves.
    pub(crate) router: axum::Router,
    /// What the admin port serves.
    pub(crate) admin: axum::Router,
    /// The file of the blocks dataset.
    pub(crate) blocks: Vec<u8>,
    directory: tempfile::TempDir,
}

/// Serves datasets `blocks`, `vectors` (.fvecs) and `objects` (`one`, `deep/two`, `empty`).
pub(crate) fn serve(limits: Limits) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let blocks = (0..BLOCKS * BLOCK_BYTES)
        .map(|at| u8::try_from(at * 7 % 251).unwrap())
        .collect::<Vec<_>>();
    std::fs::write(path.join("blocks"), &blocks).unwrap();
    std::fs::write(path.join("vectors.fvecs"), fvecs()).unwrap();
    write_objects(&path.join("objects"));

    let block_bytes = u32::try_from(BLOCK_BYTES).unwrap();
    let specs = [
        (
            "blocks",
            "blocks",
            KindSpec::Blocks {
                block_bytes,
                partial_tail: PartialTail::Refuse,
            },
        ),
        (
            "vectors",
            "vectors.fvecs",
            KindSpec::Vectors {
                layout: Layout::Fvecs,
                dim: None,
                dtype: None,
                header_bytes: 0,
            },
        ),
        (
            "objects",
            "objects",
            KindSpec::Objects {
                max_open_files: 16,
                revalidate: Duration::from_secs(1),
            },
        ),
    ];
    let specs = specs
        .into_iter()
        .map(|(name, file, kind)| DatasetSpec {
            name: name.to_owned(),
            paths: vec![path.join(file)],
            kind,
            direct_io: DirectIo::Off,
        })
        .collect::<Vec<_>>();
    let catalogue = Catalogue::open(&specs).unwrap();

    let config = EngineConfig {
        backend: BackendKind::Pread,
        pin: false,
        memory_budget_bytes: 64 << 20,
        ..EngineConfig::default()
    };
    // Starting waits for the engine's threads, which must not block a runtime's thread.
    let engine = std::thread::spawn(move || Engine::start(&config))
        .join()
        .unwrap()
        .unwrap();
    let fetcher = Fetcher::new(engine, catalogue.datasets(), limits);
    let lifecycle = Lifecycle::new();
    lifecycle.start_serving();
    let log = LogConfig {
        filter: "info".to_owned(),
        format: LogFormat::Text,
    };
    let (telemetry, _subscriber) = Telemetry::detached(&log).unwrap();
    let registry = prometheus::Registry::new();
    fetcher.register_metrics(&registry).unwrap();
    let rpc = RpcMetrics::new(&registry).unwrap();
    let router = grpc::service(fetcher.clone(), lifecycle.clone(), rpc.clone());
    let inputs = Inputs {
        base: Base::Demo(path.to_owned()),
        environment: Vec::new(),
        flags: Vec::new(),
    };
    let reconfigurer = Reconfigurer::new(ReconfigurerParts {
        loaded: load(&inputs).unwrap(),
        inputs,
        catalogue,
        fetcher: fetcher.clone(),
        lifecycle: lifecycle.clone(),
        telemetry: telemetry.clone(),
        connection_limits: ConnectionLimits::new(&limits, 1 << 20),
        tls: None,
        access_log: None,
        access: None,
    })
    .unwrap();
    let admin = admin::service(fetcher.clone(), lifecycle.clone(), telemetry, rpc, reconfigurer);
    Served {
        fetcher,
        lifecycle,
        registry,
        router,
        admin,
        blocks,
        directory,
    }
}

/// Vector `id` is `id`, `id + 0.5`, `id + 1`; each after its dimension.
fn fvecs() -> Vec<u8> {
    let mut bytes = Vec::new();
    for id in 0..VECTORS {
        bytes.extend(u32::try_from(DIM).unwrap().to_le_bytes());
        bytes.extend(vector(id));
    }
    bytes
}

/// The elements of a vector as they are served.
pub(crate) fn vector(id: usize) -> Vec<u8> {
    let first = f32::from(u16::try_from(id).unwrap());
    [first, first + 0.5, first + 1.0]
        .iter()
        .flat_map(|element| element.to_le_bytes())
        .collect()
}

fn write_objects(directory: &Path) {
    std::fs::create_dir_all(directory.join("deep")).unwrap();
    std::fs::write(directory.join("one"), b"first object").unwrap();
    std::fs::write(directory.join("deep/two"), b"second").unwrap();
    std::fs::write(directory.join("empty"), b"").unwrap();
}

impl Served {
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn fetch(&self) -> FetchServiceClient<axum::Router> {
        FetchServiceClient::new(self.router.clone()).max_decoding_message_size(64 << 20)
    }

    pub(crate) fn datasets(&self) -> DatasetServiceClient<axum::Router> {
        DatasetServiceClient::new(self.router.clone())
    }

    /// A block's bytes.
    pub(crate) fn block(&self, index: usize) -> &[u8] {
        &self.blocks[index * BLOCK_BYTES..][..BLOCK_BYTES]
    }

    /// Whether the scrape has this line.
    pub(crate) fn scraped(&self, line: &str) -> bool {
        let text = prometheus::TextEncoder::new()
            .encode_to_string(&self.registry.gather())
            .unwrap();
        text.lines().any(|found| found == line)
    }

    /// Waits until the scrape has this line.
    pub(crate) async fn await_scraped(&self, line: &str) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.scraped(line) {
            assert!(Instant::now() < deadline, "{line} was never scraped");
            tokio::task::yield_now().await;
        }
    }
}
