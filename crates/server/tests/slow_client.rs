//! A client that does not read, on a real connection: the data that it requested must stay on the disk, not
//! pile up in memory.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, PartialTail};
use ringfetch_engine::engine::Engine;
use ringfetch_server::config::Limits;
use ringfetch_server::fetch::Fetcher;
use ringfetch_server::lifecycle::Lifecycle;
use ringfetch_server::listener::{ConnectionLimits, CorePool, Listener, Port, Role, bind};
use ringfetch_server::rpc_metrics::RpcMetrics;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

const DATASET_BYTES: u64 = 96 << 20;
/// Two windows, what the kernel buffers for a connection (tcp_wmem's 4 MiB, a small receive buffer), and
/// slack.
const HELD_BYTES_MAX: u64 = 16 << 20;
const DEADLINE: Duration = Duration::from_secs(30);

async fn open(address: SocketAddr, receive_bytes: u32, path: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(receive_bytes).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

async fn read_all(mut stream: TcpStream) -> u64 {
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    loop {
        match stream.read(&mut buffer).await.unwrap() {
            0 => return total,
            read => total += u64::try_from(read).unwrap(),
        }
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_two_windows() {
    // 96 MiB are requested and not read, while another client sends one request after the other: reads stop
    // at what the windows and the kernel hold, the other client is served, and once the response is read it
    // is complete.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(DATASET_BYTES)
        .unwrap();
    let spec = DatasetSpec {
        name: "b".to_owned(),
        paths: vec![path],
        kind: KindSpec::Blocks {
            block_bytes: 4096,
            partial_tail: PartialTail::Refuse,
        },
        direct_io: DirectIo::Off,
    };
    let dataset = Arc::new(Dataset::open(&spec).unwrap());
    let config = EngineConfig {
        backend: BackendKind::Pread,
        pin: false,
        ..EngineConfig::default()
    };
    // Starting blocks until the threads exist, so not on the test's runtime.
    let engine = std::thread::spawn(move || Engine::start(&config).unwrap())
        .join()
        .unwrap();
    let limits = Limits::default();
    let fetcher = Fetcher::new(engine.clone(), vec![dataset], limits);
    let (lifecycle, registry) = (Lifecycle::new(), prometheus::Registry::new());
    let rpc = RpcMetrics::new(&registry).unwrap();
    let fast_path = ringfetch_server::http::fast_path(fetcher.clone(), rpc.clone());
    let router = ringfetch_server::http::service(fetcher.clone(), lifecycle.clone(), rpc, registry.clone());
    let bound = bind("http.listen", "127.0.0.1:0".parse().unwrap()).unwrap();
    let address = bound.address();
    let cores = CorePool::new(engine.clone(), fetcher.callers().clone(), &registry).unwrap();
    let port = Port {
        transport: "http",
        bound,
        http2_only: false,
        router,
        fast_path: Some(fast_path),
        hosts: None,
        tls: None,
        access: None,
        role: Role::Data,
        recorder: None,
    };
    let connection_limits = ConnectionLimits::new(&limits, engine.config().connection_bytes);
    let listener = Listener::open_port(port, &cores, &connection_limits, &lifecycle).unwrap();
    let serving = tokio::spawn(listener.serve());

    let slow = open(address, 64 << 10, "/v1/datasets/b/bytes").await;
    slow.readable().await.unwrap();
    // Each probe runs on the core of the slow connection; after many in a row without a further read, it has
    // stopped.
    let give_up = Instant::now() + DEADLINE;
    let (mut before, mut unchanged) = (0, 0);
    while unchanged < 200 {
        assert!(
            Instant::now() < give_up,
            "reads never stop: {before} bytes so far"
        );
        assert!(read_all(open(address, 64 << 10, "/livez").await).await > 0);
        let now = engine.totals().read_bytes;
        unchanged = if now == before { unchanged + 1 } else { 0 };
        before = now;
    }
    assert!(
        before > 0 && before <= HELD_BYTES_MAX,
        "{before} bytes were read for a client that takes none"
    );

    let received = tokio::time::timeout(DEADLINE, read_all(slow)).await.unwrap();
    assert!(
        received > DATASET_BYTES && received < DATASET_BYTES + 1024,
        "{received} bytes with the head"
    );
    assert_eq!(engine.totals().read_bytes, DATASET_BYTES);
    lifecycle.start_draining();
    let remaining = serving.await.unwrap();
    tokio::time::timeout(DEADLINE, remaining.closed()).await.unwrap();
    assert_eq!(engine.drain(Instant::now() + DEADLINE).await.abandoned_reads, 0);
}
