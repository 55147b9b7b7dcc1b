//! The daemon's lifecycle as an operator sees it: ports, readiness, signals, exit codes. Runs the real
//! binary.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use ringfetch_pattern as pattern;
use rustix::process::{Pid, Signal, kill_process};

/// Longest wait for anything; far more than a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(60);
const SEED: u64 = 7;
/// More than fits in the socket buffers of a client that does not read.
const DATASET_BYTES: u64 = 64 << 20;
const ANSWER_BYTES: u64 = 16 << 20;

/// Polls until there is a result.
fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = poll() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfetchd"));
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RINGFETCH") {
            command.env_remove(name);
        }
    }
    command
}

/// A running daemon over one blocks dataset, on free ports; killed when dropped.
struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
    grpc: SocketAddr,
    http: SocketAddr,
}

impl Daemon {
    fn start(backend: &str, drain_timeout_ms: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        pattern::write_blocks(&at("a.bin"), SEED, DATASET_BYTES, &mut |_| true).unwrap();
        let config = format!(
            "grpc: {{ listen: 127.0.0.1:0 }}\nhttp: {{ listen: 127.0.0.1:0 }}\nadmin: {{ listen: off }}\n\
             engine: {{ backend: {backend} }}\nshutdown: {{ lame_duck_ms: 0, drain_timeout_ms: {drain_timeout_ms} }}\n\
             datasets: [{{ name: a, kind: blocks, path: a.bin, block_bytes: 4096 }}]\n"
        );
        std::fs::write(at("config.yaml"), config).unwrap();
        let (file, addresses) = (at("config.yaml"), at("addresses.json"));
        let arguments = [
            "--config",
            file.to_str().unwrap(),
            "--addresses-file",
            addresses.to_str().unwrap(),
        ];
        let log = std::fs::File::create(at("log")).unwrap();
        let mut child = command(&arguments)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let text = wait_for("the addresses", || {
            assert!(
                child.try_wait().unwrap().is_none(),
                "{}",
                std::fs::read_to_string(at("log")).unwrap()
            );
            std::fs::read_to_string(&addresses).ok()
        });
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(json["admin"].is_null(), "{text}");
        let address = |key: &str| json[key].as_str().unwrap().parse().unwrap();
        Self {
            child,
            grpc: address("grpc"),
            http: address("http"),
            directory,
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    fn config(&self) -> PathBuf {
        self.directory.path().join("config.yaml")
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until the daemon drains: then the gRPC port is closed, and the HTTP port serves only probes.
    fn drains(&self) {
        wait_for("the gRPC port to be closed", || {
            TcpStream::connect(self.grpc).err()
        });
    }

    fn end(&mut self) -> ExitStatus {
        let Self { child, .. } = self;
        wait_for("the daemon's end", || child.try_wait().unwrap())
    }

    /// Sends a request and leaves the response unread.
    fn ask(&self, path: &str, headers: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.http).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n").unwrap();
        stream
    }

    fn get(&self, path: &str) -> (String, Vec<u8>) {
        let mut answer = Vec::new();
        self.ask(path, "connection: close\r\n")
            .read_to_end(&mut answer)
            .unwrap();
        let end = answer
            .windows(4)
            .position(|window| window == b"\r\n\r\n")
            .unwrap()
            + 4;
        (
            String::from_utf8(answer[..end].to_vec()).unwrap(),
            answer[end..].to_vec(),
        )
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _may_have_ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

#[test]
fn a_signal_drains_and_exits_zero() {
    // Scenario: each backend and each signal, with idle connections: one kept alive after a response, and one
    // on each port that has sent nothing. Expectation: ready, with the right bytes, before the signal; exit 0
    // after it, without waiting for anyone; the log says where the daemon listened and that it drained.
    for (backend, signal) in [
        ("uring", Signal::TERM),
        ("mmap", Signal::INT),
        ("pread", Signal::TERM),
    ] {
        let mut daemon = Daemon::start(backend, 30_000);
        let health = command(&["healthcheck", "--http-listen", &daemon.http.to_string()])
            .output()
            .unwrap();
        assert!(
            health.status.success(),
            "{}",
            String::from_utf8_lossy(&health.stderr)
        );
        let (head, block) = daemon.get("/v1/datasets/a/blocks/7");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert_eq!(
            (block.len(), pattern::first_difference(SEED, 7 * 4096, &block)),
            (4096, None)
        );

        let mut kept = daemon.ask("/livez", "");
        let mut first = [0; 12];
        kept.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        let _silent = [daemon.http, daemon.grpc].map(|address| TcpStream::connect(address).unwrap());
        wait_for("the open connections to be counted", || {
            let (_, metrics) = daemon.get("/metrics");
            let metrics = String::from_utf8(metrics).unwrap();
            let counted = |line: &str| metrics.lines().any(|other| other == line);
            // HTTP has three: kept alive, silent, and the one of this request.
            (counted("ringfetch_connections{transport=\"http\"} 3")
                && counted("ringfetch_connections{transport=\"grpc\"} 1"))
            .then_some(())
        });

        let started = Instant::now();
        daemon.signal(signal);
        assert_eq!(daemon.end().code(), Some(0), "{}", daemon.log());
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "idle connections were waited for"
        );
        let log = daemon.log();
        assert!(
            log.contains(&format!("\"address\":\"{}\"", daemon.http)) && log.contains("\"drained\""),
            "{log}"
        );
    }
}

#[test]
fn an_answer_in_flight_is_finished_first() {
    // Scenario: the client has begun to read a large response when the signal arrives. Expectation: new
    // connections are refused on gRPC, and get no data on HTTP; the response is complete and correct; exit 0.
    let mut daemon = Daemon::start("uring", 60_000);
    let mut stream = daemon.ask(
        "/v1/datasets/a/bytes",
        &format!("range: bytes=0-{}\r\n", ANSWER_BYTES - 1),
    );
    let mut answer = vec![0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, b"HTTP/1.1 206");
    daemon.signal(Signal::TERM);
    daemon.drains();
    let (head, _) = daemon.get("/v1/datasets/a/blocks/0");
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    assert!(daemon.get("/livez").0.starts_with("HTTP/1.1 200"));
    assert!(daemon.child.try_wait().unwrap().is_none(), "{}", daemon.log());
    stream.read_to_end(&mut answer).unwrap();
    let end = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .unwrap()
        + 4;
    assert_eq!(u64::try_from(answer.len() - end).unwrap(), ANSWER_BYTES);
    assert_eq!(pattern::first_difference(SEED, 0, &answer[end..]), None);
    assert_eq!(daemon.end().code(), Some(0), "{}", daemon.log());
}

#[test]
fn a_client_that_does_not_read_is_cut_off_at_the_deadline() {
    // Scenario: a client reads only the beginning of a large response; a short drain timeout. Expectation:
    // exit 1 soon after the timeout, and a line that names the key and what was aborted.
    let mut daemon = Daemon::start("uring", 300);
    let mut stream = daemon.ask("/v1/datasets/a/bytes", "");
    stream.read_exact(&mut [0; 12]).unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().code(), Some(1), "{}", daemon.log());
    let log = daemon.log();
    assert!(
        log.contains("shutdown.drain_timeout_ms (300) passed with 1 connections open"),
        "{log}"
    );
}

#[test]
fn a_second_signal_ends_at_once() {
    // Scenario: as above, with a long timeout and a second signal. Expectation: exit 130 long before the
    // timeout.
    let mut daemon = Daemon::start("uring", 600_000);
    let mut stream = daemon.ask("/v1/datasets/a/bytes", "");
    stream.read_exact(&mut [0; 12]).unwrap();
    daemon.signal(Signal::TERM);
    daemon.drains();
    daemon.signal(Signal::INT);
    assert_eq!(daemon.end().code(), Some(130), "{}", daemon.log());
}

fn outcome(daemon: &Daemon, arguments: &[&str]) -> (Output, String) {
    let config = daemon.config();
    let mut all = vec!["--config", config.to_str().unwrap()];
    all.extend(arguments);
    let output = command(&all).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, complaint)
}

#[test]
fn a_port_in_use_names_its_key_and_the_remedy() {
    // Scenario: a second daemon on ports that are in use, by a daemon and by another program. Expectation:
    // exit 3, with the key, the address and the flag; the first daemon continues.
    let daemon = Daemon::start("mmap", 10_000);
    let (output, complaint) = outcome(&daemon, &["--grpc-listen", &daemon.grpc.to_string()]);
    assert_eq!(output.status.code(), Some(3), "{complaint}");
    let expected = format!("grpc.listen: cannot listen on {}", daemon.grpc);
    assert!(
        complaint.contains(&expected) && complaint.contains("--grpc-listen 127.0.0.1:0"),
        "{complaint}"
    );

    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = stranger.local_addr().unwrap();
    let (output, complaint) = outcome(&daemon, &["--set", &format!("admin.listen={address}")]);
    assert_eq!(output.status.code(), Some(3), "{complaint}");
    assert!(
        complaint.contains(&format!("admin.listen: cannot listen on {address}")),
        "{complaint}"
    );
    assert!(
        complaint.contains("--set admin.listen=127.0.0.1:0"),
        "{complaint}"
    );

    assert!(daemon.get("/readyz").0.starts_with("HTTP/1.1 200"));
}

#[test]
fn a_missing_file_is_a_mistake_of_the_configuration() {
    // Scenario: the dataset's file is missing at the next start. Expectation: exit 2, and the message names
    // dataset and path.
    let daemon = Daemon::start("mmap", 10_000);
    std::fs::remove_file(daemon.directory.path().join("a.bin")).unwrap();
    let (output, complaint) = outcome(&daemon, &[]);
    assert_eq!(output.status.code(), Some(2), "{complaint}");
    assert!(
        complaint.contains("dataset a: path") && complaint.contains("a.bin"),
        "{complaint}"
    );
}

#[test]
fn a_configuration_that_became_invalid_makes_no_running_daemon_unhealthy() {
    // Scenario: the file of a serving daemon gets a misspelled key and an invalid word; then that daemon
    // stops. Expectation: healthcheck reaches the daemon by the address in the file or on the command line,
    // and reports the mistakes in the file; once the daemon is gone, it exits with 1 and the same report.
    let mut daemon = Daemon::start("mmap", 10_000);
    let address = daemon.http.to_string();
    let valid = std::fs::read_to_string(daemon.config()).unwrap();
    let with_address = valid.replace(
        "http: { listen: 127.0.0.1:0",
        &format!("http: {{ hots: [a], listen: \"{address}\""),
    );
    assert_ne!(valid, with_address);
    for (broken, mistake, by_flag) in [
        (valid.clone() + "engin: {}\n", "engin", true),
        ("a: [".to_owned(), "YAML", true),
        (with_address, "hots", false),
    ] {
        std::fs::write(daemon.config(), broken).unwrap();
        let flag = ["healthcheck", "--http-listen", &address];
        let (output, complaint) = outcome(&daemon, if by_flag { &flag } else { &flag[..1] });
        let line = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(0), "{line}{complaint}");
        assert!(line.starts_with("ready: ") && line.contains(mistake), "{line}");
    }
    std::fs::write(daemon.config(), valid + "engin: {}\n").unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.end().code(), Some(0), "{}", daemon.log());
    let (output, complaint) = outcome(&daemon, &["healthcheck", "--http-listen", &address]);
    assert_eq!(output.status.code(), Some(1), "{complaint}");
    assert!(complaint.contains("engin"), "{complaint}");
}

#[test]
fn the_demo_can_be_made_without_serving_it() {
    // Scenario: `make-demo` into a new directory, twice. Expectation: exit 0 with the three datasets, and
    // nothing written the second time.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("demo");
    let make = || {
        command(&["make-demo", "--demo-dir", path.to_str().unwrap()])
            .output()
            .unwrap()
    };
    assert_eq!(make().status.code(), Some(0));
    let written = || {
        std::fs::metadata(path.join("blocks.bin"))
            .unwrap()
            .modified()
            .unwrap()
    };
    let first = written();
    assert!(path.join("vectors.npy").is_file() && path.join("objects").is_dir());
    assert_eq!(make().status.code(), Some(0));
    assert_eq!(written(), first);
}

#[test]
fn who_had_connected_and_not_spoken_is_told_of_the_drain() {
    // Scenario: connections that are silent until SIGTERM, and send a request right after it. Expectation:
    // each gets a response, 503 or the data; none is reset; exit 0.
    let mut daemon = Daemon::start("mmap", 10_000);
    let mut silent: Vec<TcpStream> = (0..16)
        .map(|_| TcpStream::connect(daemon.http).unwrap())
        .collect();
    daemon.signal(Signal::TERM);
    daemon.drains();
    for stream in &mut silent {
        let request = "GET /v1/datasets/a/bytes HTTP/1.1\r\nhost: localhost\r\nrange: bytes=0-9\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
    }
    for stream in &mut silent {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let whole = head.starts_with("HTTP/1.1 206") && !body.is_empty();
        assert!(whole || head.starts_with("HTTP/1.1 503"), "{answer:?}");
    }
    drop(silent);
    assert_eq!(daemon.end().code(), Some(0), "{}", daemon.log());
}
