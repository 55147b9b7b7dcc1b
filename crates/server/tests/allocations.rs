//! Counts the server's allocations for a request of one read, so that they do not creep back.
//!
//! Client and server must not share an allocator, so the client is a child process that runs this test's own
//! binary.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

use ringfetch_client::Client;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
use ringfetch_engine::engine::Engine;
use ringfetch_server::config::Limits;
use ringfetch_server::fetch::Fetcher;
use ringfetch_server::lifecycle::Lifecycle;
use ringfetch_server::listener::{ConnectionLimits, CorePool, Listener, Port, Role, bind};
use ringfetch_server::rpc_metrics::RpcMetrics;
use ringfetch_server::{grpc, http};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// Set in the child: where the server listens.
const SERVER: &str = "RINGFETCH_ALLOCATIONS_SERVER";

const WARM_UP: u64 = 300;
const READS: u64 = 1000;
const BLOCK_BYTES: u32 = 4096;

// Each limit is half an allocation more than there are now.

#[test]
#[ignore = "needs io_uring"]
fn one_read_allocates_little() {
    check("one_read_allocates_little", Way::Call, 8.6);
}

#[test]
#[ignore = "needs io_uring"]
fn one_read_of_a_stream_allocates_little() {
    check("one_read_of_a_stream_allocates_little", Way::Stream, 3.6);
}

#[test]
#[ignore = "needs io_uring"]
fn one_read_over_http_allocates_little() {
    check("one_read_over_http_allocates_little", Way::Http, 6.6);
}

/// How a block is read.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// By a call of its own.
    Call,
    /// In a FetchStream.
    Stream,
    /// By a GET over HTTP/1.1.
    Http,
}

/// Scenario: a client sends requests for one block, one at a time, over one connection. Expectation: the whole server, from
/// socket to ring and back, makes at most `allocations_max` allocations for each. A file named after the test, for dhat's
/// viewer (<https://nnethercote.github.io/dh_view/dh_view.html>), shows where.
fn check(test: &str, way: Way, allocations_max: f64) {
    /// dhat counts what the whole process allocates.
    static ALONE: Mutex<()> = Mutex::new(());
    if let Ok(address) = std::env::var(SERVER) {
        return client(way, address.parse().unwrap());
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (served, address) = runtime.block_on(async { serve(way) });
    let mut child = ClientProcess::start(test, address);
    child.reads(WARM_UP);
    let report = format!("{}/{test}.json", env!("CARGO_TARGET_TMPDIR"));
    let profiler = dhat::Profiler::builder()
        .file_name(&report)
        .trim_backtraces(Some(40))
        .build();
    child.reads(READS);
    let blocks = dhat::HeapStats::get().total_blocks;
    drop(profiler);
    drop(child);
    drop(served);
    #[expect(clippy::cast_precision_loss, reason = "small counts")]
    let each = blocks as f64 / READS as f64;
    assert!(
        each <= allocations_max,
        "{each} allocations for each read, at most {allocations_max} expected: see {report}"
    );
    eprintln!("{each} allocations for each read");
}

/// One core with a ring, and one dataset of blocks.
fn serve(way: Way) -> (impl Sized, SocketAddr) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let spec = DatasetSpec::new("b", path, KindSpec::blocks(BLOCK_BYTES), DirectIo::Preferred);
    let dataset = Arc::new(Dataset::open(&spec).unwrap());
    let config = EngineConfig {
        backend: BackendKind::Uring,
        cores: 1,
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
    let bound = bind("listen", "127.0.0.1:0".parse().unwrap()).unwrap();
    let address = bound.address();
    let (router, fast_path) = if way == Way::Http {
        let router = http::service(fetcher.clone(), lifecycle.clone(), rpc.clone(), registry.clone());
        (router, http::fast_path(fetcher.clone(), rpc.clone()))
    } else {
        let router = grpc::service(fetcher.clone(), lifecycle.clone(), rpc.clone());
        let fast_path = grpc::fast_path(fetcher.clone(), lifecycle.clone(), rpc.clone());
        (router, fast_path)
    };
    let port = Port {
        transport: if way == Way::Http { "http" } else { "grpc" },
        bound,
        http2_only: way != Way::Http,
        router,
        fast_path: Some(fast_path),
        hosts: None,
        tls: None,
        access: None,
        role: if way == Way::Http {
            Role::DataAndProbes(http::is_operation)
        } else {
            Role::Data
        },
        recorder: None,
        rpc,
    };
    let cores = CorePool::new(&fetcher, &registry).unwrap();
    let connection_limits = ConnectionLimits::new(&limits, engine.config().connection_bytes);
    let listener = Listener::open_port(port, &cores, &connection_limits, &lifecycle).unwrap();
    let serving = tokio::spawn(listener.serve());
    ((directory, engine, lifecycle, serving), address)
}

/// Runs in the child: for each line with a number, makes that many reads and prints an empty line.
fn client(way: Way, address: SocketAddr) {
    if way == Way::Http {
        let mut connection = BufReader::new(TcpStream::connect(address).unwrap());
        return for_each_number(|index| get_block(&mut connection, index));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.unwrap();
    let client = Client::builder(format!("http://{address}"));
    let client = runtime.block_on(client.connect()).unwrap();
    if way == Way::Call {
        return for_each_number(|index| {
            let blocks = runtime.block_on(client.fetch_blocks("b", &[index])).unwrap();
            assert_eq!(blocks.iter().count(), 1);
        });
    }
    let _inside = runtime.enter();
    let stream = client.stream();
    for_each_number(|index| {
        let blocks = runtime.block_on(stream.fetch_blocks("b", &[index])).unwrap();
        assert_eq!(blocks.iter().count(), 1);
    });
}

fn for_each_number(mut read: impl FnMut(u64)) {
    for line in std::io::stdin().lock().lines() {
        (0..line.unwrap().parse().unwrap()).for_each(|number: u64| read(number * 7 % 256));
        // Not to stdout, which the test harness of the child shares.
        eprintln!();
    }
}

fn get_block(connection: &mut BufReader<TcpStream>, index: u64) {
    let request = format!("GET /v1/datasets/b/blocks/{index} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    connection.get_mut().write_all(request.as_bytes()).unwrap();
    let mut line = String::new();
    connection.read_line(&mut line).unwrap();
    assert_eq!(line, "HTTP/1.1 200 OK\r\n");
    while line != "\r\n" {
        line.clear();
        connection.read_line(&mut line).unwrap();
    }
    connection.read_exact(&mut [0; BLOCK_BYTES as usize]).unwrap();
}

/// The child process. Driving it allocates nothing in its parent.
struct ClientProcess {
    child: Child,
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStderr>,
}

impl ClientProcess {
    fn start(test: &str, address: SocketAddr) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env(SERVER, address.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (ask, answers) = (child.stdin.take(), BufReader::new(child.stderr.take().unwrap()));
        Self { child, ask, answers }
    }

    fn reads(&mut self, count: u64) {
        writeln!(self.ask.as_mut().unwrap(), "{count}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer, "\n", "the client failed");
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        drop(self.ask.take());
        self.child.wait().unwrap();
    }
}
