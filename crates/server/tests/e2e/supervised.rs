//! The daemon under a service manager, as far as sd_notify(3) goes: a datagram socket plays systemd's.
//! Threads are stopped with ptrace(2), one at a time, which the parent of a process may do.

use crate::commands::demo;
use crate::daemon::{Daemon, PATIENCE, Setup, backends_and_auto, eventually, eventually_async};
use crate::data::plain_blocks;
use crate::reload::{reload, reloads};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fs, thread};

/// The watchdog's timeout: the daemon sends a message at least once a second.
const WATCHDOG: Duration = Duration::from_secs(2);

/// Nothing more is told after this long.
const SILENCE: Duration = Duration::from_millis(500);

/// A thread of the daemon, stopped until this is dropped.
struct Stopped {
    /// Dropped to resume the thread.
    hold: Option<mpsc::Sender<()>>,
    tracer: Option<thread::JoinHandle<()>>,
}

impl Stopped {
    /// The daemon's thread of this name.
    fn thread(daemon: &Daemon, name: &str) -> Self {
        let tasks = format!("/proc/{}/task", daemon.pid().as_raw_nonzero());
        let mut tasks = fs::read_dir(tasks)
            .expect("threads")
            .map(|task| task.expect("a thread"));
        let is_named = |task: &fs::DirEntry| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
        };
        let task = tasks.find(is_named).unwrap_or_else(|| panic!("no thread {name}"));
        let task = task.file_name().to_str().and_then(|name| name.parse().ok());
        let task = nix::unistd::Pid::from_raw(task.expect("a thread's number"));
        let (hold, held) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        // Only the tracing thread can resume the thread that it traces.
        let tracer = thread::spawn(move || {
            tell.send(stop(task)).expect("the test waits");
            // Until the other end is dropped.
            let _dropped = held.recv();
            // It may have ended.
            let _detached = ptrace::detach(task, None);
        });
        let stopped = told.recv().expect("the tracer tells");
        stopped.expect("ptrace of a child of one's own must be allowed (kernel.yama.ptrace_scope is 2 or 3)");
        Self {
            hold: Some(hold),
            tracer: Some(tracer),
        }
    }
}

fn stop(task: nix::unistd::Pid) -> nix::Result<()> {
    ptrace::seize(task, ptrace::Options::empty())?;
    ptrace::interrupt(task)?;
    waitpid(task, Some(WaitPidFlag::__WALL))?;
    Ok(())
}

impl Drop for Stopped {
    fn drop(&mut self) {
        drop(self.hold.take());
        if let Some(tracer) = self.tracer.take() {
            let _ended = tracer.join();
        }
    }
}

/// The service manager's end of the socket.
pub(crate) struct Manager(UnixDatagram);

impl Manager {
    /// Listens in the setup's directory, and sets NOTIFY_SOCKET.
    pub(crate) fn beside(setup: Setup) -> (Self, Setup) {
        let path = setup.path("notify");
        let socket =
            UnixDatagram::bind(&path).expect("a socket's path has at most 107 bytes: TMPDIR must be short");
        let setup = setup.variable("NOTIFY_SOCKET", path.to_str().expect("a path"));
        (Self(socket), setup)
    }

    /// The next message's lines, if one arrives in time.
    pub(crate) fn hears(&self, within: Duration) -> Option<Vec<String>> {
        let mut buffer = [0; 4096];
        self.0.set_read_timeout(Some(within)).expect("a timeout");
        let length = self.0.recv(&mut buffer).ok()?;
        let text = std::str::from_utf8(&buffer[..length]).expect("UTF-8");
        Some(text.lines().map(str::to_owned).collect())
    }

    /// Waits for a message with a line that begins like this; returns it, and the number of watchdog messages
    /// before it.
    fn waits_for(&self, beginning: &str) -> (Vec<String>, usize) {
        let mut beats = 0;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "within {PATIENCE:?}: {beginning}");
            let Some(lines) = self.hears(left) else { continue };
            if lines.iter().any(|line| line.starts_with(beginning)) {
                return (lines, beats);
            }
            beats += usize::from(lines.contains(&"WATCHDOG=1".to_owned()));
        }
    }

    /// Number of watchdog messages within a time.
    fn beats(&self, within: Duration) -> usize {
        let deadline = Instant::now() + within;
        let mut beats = 0;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return beats;
            }
            let lines = self.hears(left).unwrap_or_default();
            beats += usize::from(lines.contains(&"WATCHDOG=1".to_owned()));
        }
    }
}

fn usec(duration: Duration) -> String {
    duration.as_micros().to_string()
}

/// The daemon's stderr as its service manager connects it to the journal.
fn with_journal(setup: Setup) -> Setup {
    let script = r#"export JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2); exec "$0" "$@""#;
    setup.through(&["sh", "-c", script])
}

#[test]
fn the_journal_gets_the_priority_of_each_line() {
    // Scenario: stderr is the journal, or another stream has its place; a daemon that logs a warning and an error; one that does not
    // start. Expectation: each line for the journal begins with its priority, which journald takes off; others do not.
    let setup = || plain_blocks(Setup::new("mmap"), 1).0;
    let daemon = with_journal(setup().variable("NOTIFY_SOCKET", "nowhere")).start();
    assert!(daemon.logged(&["\"started\""]).starts_with("<6>{"));
    assert!(daemon.logged(&["\"WARN\"", "NOTIFY_SOCKET"]).starts_with("<4>{"));
    daemon.rewrite("a: [");
    daemon.signal(Signal::HUP);
    assert!(daemon.logged(&["\"ERROR\"", "YAML"]).starts_with("<3>{"));
    let daemon = setup().variable("JOURNAL_STREAM", "8:1").start();
    assert!(daemon.logged(&["\"started\""]).starts_with('{'));
    let refused = Setup::new("mmap").set("grpc.listen", "nowhere").set("engin", "1");
    let refused = with_journal(refused).refused();
    assert!(refused.said.lines().count() > 1, "{}", refused.said);
    assert!(
        refused.said.lines().all(|line| line.starts_with("<3>")),
        "{}",
        refused.said
    );
}

#[tokio::test]
async fn ready_is_told_once_every_port_answers() {
    // Scenario: a daemon with NOTIFY_SOCKET and no watchdog, on every backend; on READY a client connects to
    // all three ports at once. Expectation: they accept the connections; the status names backend and reason;
    // no watchdog messages, which were not requested; SIGTERM sends STOPPING with the drain's time, and the
    // exit code is 0.
    for backend in backends_and_auto() {
        let (setup, _) = plain_blocks(Setup::new(backend), 16);
        let (manager, setup) = Manager::beside(setup.set("shutdown.drain_timeout_ms", "20000"));
        let addresses = setup.path("addresses.json");
        let listening = thread::spawn(move || {
            let (ready, _) = manager.waits_for("READY=1");
            let text = fs::read_to_string(addresses).expect("ready, and no addresses");
            let addresses: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            for name in ["grpc", "http", "admin"] {
                let address = addresses[name].as_str().expect("an address");
                TcpStream::connect(address).unwrap_or_else(|error| panic!("ready, but {name}: {error}"));
            }
            (manager, ready)
        });
        let daemon = setup.start();
        let (manager, ready) = listening.join().expect("the listener");
        let begins = format!("STATUS=serving on {backend}: ");
        assert!(ready.iter().any(|line| line.starts_with(&begins)), "{ready:?}");
        assert!(daemon.http_client().get("/readyz").await.status == 200);
        daemon.stop().await;
        let (last, beats) = manager.waits_for("STOPPING=1");
        assert_eq!(beats, 0, "{backend}");
        assert!(
            last.contains(&"EXTEND_TIMEOUT_USEC=25000000".to_owned()),
            "{last:?}"
        );
        assert!(last.contains(&"STATUS=draining".to_owned()), "{last:?}");
        assert_eq!(
            manager.hears(Duration::from_millis(1)),
            None,
            "STOPPING is the last word"
        );
    }
}

#[tokio::test]
async fn the_watchdog_is_fed_by_the_shards_of_mmap() {
    the_watchdog_notices("mmap", "rf-shard-1", "shard 1").await;
}

#[tokio::test]
async fn the_watchdog_is_fed_by_the_shards_of_pread() {
    the_watchdog_notices("pread", "rf-shard-0", "shard 0").await;
}

#[tokio::test]
async fn the_watchdog_is_fed_by_the_cores() {
    the_watchdog_notices("mmap", "rf-core-0", "core 0").await;
}

#[tokio::test]
#[ignore = "needs io_uring"]
async fn the_watchdog_is_fed_by_the_shards_on_the_cores() {
    the_watchdog_notices("uring", "rf-core-1", "shard 1").await;
}

/// Scenario: a watchdog of two seconds; then one thread with a shard is stopped while all others run, and
/// resumed later. Expectation: watchdog messages while all is well; none while one shard is stuck, whatever
/// the others do, but a status and a log line that name it; watchdog messages again afterwards.
async fn the_watchdog_notices(backend: &str, thread: &str, part: &str) {
    let (setup, _) = plain_blocks(Setup::new(backend), 16);
    let (manager, setup) = Manager::beside(setup);
    let daemon = setup.variable("WATCHDOG_USEC", &usec(WATCHDOG)).start();
    manager.waits_for("WATCHDOG=1");
    manager.waits_for("WATCHDOG=1");
    let stopped = Stopped::thread(&daemon, thread);
    // What was sent before.
    while manager.hears(Duration::from_millis(1)).is_some() {}
    let (_, before) = manager.waits_for(&format!("STATUS={part} does not respond"));
    // One may already have been on its way.
    assert!(before <= 1, "{before} after {thread} was stopped");
    daemon.logged(&["ERROR", "does not respond", part]);
    assert_eq!(manager.beats(WATCHDOG * 2), 0, "{thread} is stopped");
    drop(stopped);
    manager.waits_for("STATUS=serving on ");
    manager.waits_for("WATCHDOG=1");
    daemon.logged(&["INFO", "respond again"]);
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_reload_is_told_from_its_beginning_to_its_end() {
    // Scenario: SIGHUP with an unchanged configuration, with an invalid one, and with a valid one again.
    // Expectation: each time RELOADING with the time at which it began, not before the signal, then READY;
    // the status reports the invalid one, and no longer after the valid one.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 16);
    let (manager, setup) = Manager::beside(setup);
    let daemon = setup.start();
    manager.waits_for("READY=1");
    let file = daemon.path("ringfetchd.yaml");
    let good = fs::read_to_string(&file).expect("the configuration");
    let bad = format!("{good}nonsense: 1\n");
    for (text, status) in [
        (&good, None),
        (&bad, Some("STATUS=the last reload was refused: ")),
        (&good, Some("STATUS=serving on mmap: ")),
    ] {
        fs::write(&file, text).expect("a file");
        let before = now_usec();
        daemon.signal(Signal::HUP);
        let (lines, _) = manager.waits_for("RELOADING=1");
        assert!(begun_at(&lines) >= Some(before), "{lines:?}: {before}");
        let (lines, _) = manager.waits_for("READY=1");
        let said = lines.iter().find(|line| line.starts_with("STATUS="));
        match status {
            None => assert_eq!(said, None, "nothing has changed"),
            Some(begins) => assert!(said.is_some_and(|line| line.starts_with(begins)), "{said:?}"),
        }
    }
    daemon.stop().await;
}

#[tokio::test]
async fn only_the_process_that_the_watchdog_names_feeds_it() {
    // Scenario: WATCHDOG_PID names the daemon, or another process. Expectation: watchdog messages only in the
    // first case; READY in both.
    for (pid, fed) in [("$$", true), ("1", false)] {
        let (setup, _) = plain_blocks(Setup::new("mmap"), 16);
        let (manager, setup) = Manager::beside(setup);
        // The shell keeps its process id when it replaces itself.
        let shell = format!("WATCHDOG_PID={pid} exec \"$@\"");
        let daemon = setup
            .variable("WATCHDOG_USEC", &usec(WATCHDOG))
            .through(&["sh", "-c", &shell, "sh"])
            .start();
        manager.waits_for("READY=1");
        if fed {
            manager.waits_for("WATCHDOG=1");
        } else {
            assert_eq!(manager.beats(WATCHDOG * 2), 0);
        }
        daemon.stop().await;
    }
}

#[tokio::test]
async fn an_abstract_socket_is_a_socket_too() {
    // Scenario: NOTIFY_SOCKET names an abstract socket, as inside some containers. Expectation: READY
    // arrives.
    let name = format!("ringfetch-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a name");
    let manager = Manager(UnixDatagram::bind_addr(&address).expect("a socket"));
    let (setup, _) = plain_blocks(Setup::new("mmap"), 16);
    let daemon = setup.variable("NOTIFY_SOCKET", &format!("@{name}")).start();
    manager.waits_for("READY=1");
    daemon.stop().await;
}

#[tokio::test]
async fn nobody_to_tell_is_no_reason_not_to_serve() {
    // Scenario: NOTIFY_SOCKET unset; a path without a listener; not an address; a socket that is full, since
    // it is not read. Expectation: the daemon serves and stops with 0 each time, with one warning that names
    // the variable in all cases but the first.
    fn full(setup: Setup) -> (Option<Manager>, Setup) {
        let (manager, setup) = Manager::beside(setup);
        let path = setup.path("notify");
        let sender = UnixDatagram::unbound().expect("a socket");
        sender.set_nonblocking(true).expect("fcntl");
        eventually("the socket is full", PATIENCE, || {
            sender.send_to(b"x", &path).err().map(drop)
        });
        (Some(manager), setup)
    }
    fn named(setup: Setup, socket: &str) -> (Option<Manager>, Setup) {
        // Many messages, of which only the first failure is logged.
        let setup = setup.variable("WATCHDOG_USEC", &usec(WATCHDOG / 20));
        (None, setup.variable("NOTIFY_SOCKET", socket))
    }
    type Prepare = fn(Setup) -> (Option<Manager>, Setup);
    let cases: [(&str, Prepare, usize); 4] = [
        ("unset", |setup| (None, setup), 0),
        ("nobody", |setup| named(setup, "/nonexistent/notify"), 1),
        ("nonsense", |setup| named(setup, "nonsense"), 1),
        ("full", full, 1),
    ];
    for (case, prepare, warnings) in cases {
        let (setup, _) = plain_blocks(Setup::new("mmap"), 16);
        let (_manager, setup) = prepare(setup);
        let daemon = setup.start();
        if warnings > 0 {
            daemon.logged(&["WARN", "NOTIFY_SOCKET"]);
        }
        daemon.assert_serves("blocks").await;
        let said = daemon.log().iter().filter(|line| line.contains("WARN")).count();
        assert_eq!(said, warnings, "{case}: {:?}", daemon.log());
        daemon.stop().await;
    }
}

/// CLOCK_MONOTONIC in microseconds.
fn now_usec() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000 + now.tv_nsec / 1000
}

/// When the reload began that a message tells of.
fn begun_at(lines: &[String]) -> Option<i64> {
    let at = lines.iter().find_map(|line| line.strip_prefix("MONOTONIC_USEC="));
    at.map(|at| at.parse().expect("a number"))
}

/// Waits for a reload that began at this time or later, and for its end.
fn told_since(manager: &Manager, begun: i64) {
    while begun_at(&manager.waits_for("RELOADING=1").0).expect("a time") < begun {}
    manager.waits_for("READY=1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_on_the_heels_of_another_is_told() {
    // Scenario: SIGHUP between calls to reload, again and again. Expectation: each time RELOADING with a time after the
    // signal, then READY: systemd waits for both.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 16);
    let (manager, setup) = Manager::beside(setup);
    let daemon = setup.start();
    manager.waits_for("READY=1");
    for _ in 0..30 {
        let mut begun = 0;
        let signal = async {
            reload(&daemon).await.expect("a reload");
            begun = now_usec();
            daemon.signal(Signal::HUP);
        };
        let _busy = tokio::join!(reload(&daemon), reload(&daemon), signal);
        told_since(&manager, begun);
    }
    daemon.stop().await;
}

#[tokio::test]
async fn the_end_of_an_earlier_reload_is_not_that_of_a_signal() {
    // Scenario: SIGHUP while a reload that was called waits for a file. Expectation: of the reloads that began after the
    // signal, as systemd is told, one end is told: that of its own.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 16);
    let (manager, setup) = Manager::beside(setup);
    let daemon = setup.start();
    reload(&daemon).await.expect("a reload, and a thread for files");
    let file_thread = Stopped::thread(&daemon, "rf-change-file");
    let before = now_usec();
    let signal = async {
        // What is told late of the first reload is not taken for it.
        let waits = |lines: Vec<String>| begun_at(&lines) >= Some(before);
        while !manager.hears(Duration::from_millis(1)).is_some_and(waits) {
            tokio::task::yield_now().await;
        }
        let signalled = now_usec();
        daemon.signal(Signal::HUP);
        drop(file_thread);
        signalled
    };
    let (called, signalled) = tokio::join!(reload(&daemon), signal);
    called.expect("a reload");
    eventually_async("three reloads", async || {
        (reloads(&daemon, "ok").await == 3).then_some(())
    })
    .await;
    told_since(&manager, signalled);
    while let Some(lines) = manager.hears(SILENCE) {
        assert!(!lines.contains(&"READY=1".to_owned()), "a second end: {lines:?}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_reload_that_is_refused_at_once_is_told() {
    // Scenario: SIGHUP to the demo, which has no file to read again. Expectation: RELOADING and READY.
    let (manager, setup) = Manager::beside(demo());
    let daemon = setup.start();
    manager.waits_for("READY=1");
    let begun = now_usec();
    daemon.signal(Signal::HUP);
    told_since(&manager, begun);
    daemon.stop().await;
}
