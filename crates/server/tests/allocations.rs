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
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// Set in the child: where the server listens.
const SERVER: &str = "RINGFETCH_ALLOCATIONS_SERVER";
const TEST: &str = "one_read_allocates_little";

const WARM_UP: u64 = 300;
const READS: u64 = 1000;
/// Half an allocation more than there are now.
const ALLOCATIONS_MAX: f64 = 8.6;

#[test]
#[ignore = "needs io_uring"]
fn one_read_allocates_little() {
    // Scenario: a client sends requests for one block, one at a time, over one connection. Expectation: the
    // whole server, from socket to ring and back, makes a known number of allocations for each.
    // `allocations.json`, for dhat's viewer (https://nnethercote.github.io/dh_view/dh_view.html), shows
    // where.
    if let Ok(url) = std::env::var(SERVER) {
        return client(url);
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (served, address) = runtime.block_on(async { serve() });
    let mut child = ClientProcess::start(&format!("http://{address}"));
    child.reads(WARM_UP);
    let report = concat!(env!("CARGO_TARGET_TMPDIR"), "/allocations.json");
    let profiler = dhat::Profiler::builder()
        .file_name(report)
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
        each <= ALLOCATIONS_MAX,
        "{each} allocations for each read, at most {ALLOCATIONS_MAX} expected: see {report}"
    );
    eprintln!("{each} allocations for each read");
}

/// One core with a ring, and one dataset of blocks.
fn serve() -> (impl Sized, std::net::SocketAddr) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let spec = DatasetSpec::new("b", path, KindSpec::blocks(4096), DirectIo::Preferred);
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
    let bound = bind("grpc.listen", "127.0.0.1:0".parse().unwrap()).unwrap();
    let address = bound.address();
    let port = Port {
        transport: "grpc",
        bound,
        http2_only: true,
        router: ringfetch_server::grpc::service(fetcher.clone(), lifecycle.clone(), rpc.clone()),
        fast_path: Some(ringfetch_server::grpc::fast_path(
            fetcher.clone(),
            lifecycle.clone(),
            rpc.clone(),
        )),
        hosts: None,
        tls: None,
        access: None,
        role: Role::Data,
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
fn client(url: String) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        let client = Client::builder(url).connect().await.unwrap();
        for line in std::io::stdin().lock().lines() {
            for number in 0..line.unwrap().parse::<u64>().unwrap() {
                let blocks = client.fetch_blocks("b", &[number * 7 % 256]).await.unwrap();
                assert_eq!(blocks.iter().count(), 1);
            }
            // Not to stdout, which the test harness of the child shares.
            eprintln!();
        }
    });
}

/// The child process. Driving it allocates nothing in its parent.
struct ClientProcess {
    child: Child,
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStderr>,
}

impl ClientProcess {
    fn start(url: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--ignored", "--nocapture"])
            .env(SERVER, url)
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
