//! One `ringfetchd` process: configured, started, observed, stopped. No process outlives its test: a daemon
//! that is still running when its value is dropped is killed, by its own process id.

use crate::access::lines;
use crate::seccomp::without_io_uring;
use crate::tls::{Authority, Door, with_tls};
use crate::wire;
use adversary::Process;
use ringfetch_engine::probe::{UringRefusal, probe};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process, setrlimit, waitid,
};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};

/// Runs a command as an ordinary user.
pub(crate) const AS_NOBODY: [&str; 6] = [
    "setpriv",
    "--reuid",
    "65534",
    "--regid",
    "65534",
    "--clear-groups",
];

/// Free ports, as text for a configuration file.
pub(crate) const LISTEN: &str =
    "grpc: {listen: 127.0.0.1:0}\nhttp: {listen: 127.0.0.1:0}\nadmin: {listen: 127.0.0.1:0}\n";

/// Every backend that this host allows, without `auto`, which chooses between two of them. What concerns only
/// io_uring has its own test, with `#[ignore = "needs io_uring"]`.
pub(crate) fn backends() -> &'static [&'static str] {
    static REFUSED: LazyLock<Option<UringRefusal>> = LazyLock::new(|| probe().err());
    match &*REFUSED {
        None => &["uring", "mmap", "pread"],
        Some(refusal) if refusal.may_fall_back() => &["pread", "mmap"],
        // No ring is possible, as with a filter.
        Some(UringRefusal::Memlock { limit_bytes: Some(0) }) => &["pread", "mmap"],
        // Without it nothing would be tested on a ring, and nobody would notice.
        Some(refusal) => panic!("no test of io_uring can run: {refusal}"),
    }
}

/// Checks the limit of open files that docs/ARCHITECTURE.md ("Tests") requires, and raises a lower one if allowed.
fn can_open_enough_files() {
    const NEEDED: u64 = 1024;
    static ALLOWED: LazyLock<u64> = LazyLock::new(|| {
        let limit = getrlimit(Resource::Nofile);
        let [current, maximum] = [limit.current, limit.maximum].map(|files| files.unwrap_or(u64::MAX));
        if current >= NEEDED {
            return current;
        }
        let current = Some(maximum.min(NEEDED));
        setrlimit(Resource::Nofile, Rlimit { current, ..limit })
            .expect("up to its maximum, it may be raised");
        maximum.min(NEEDED)
    });
    assert!(
        *ALLOWED >= NEEDED,
        "the tests need {NEEDED} open files, and {} are allowed: raise the limit (`ulimit -n`)",
        *ALLOWED
    );
}

/// [`backends`], and `auto` where io_uring is available.
pub(crate) fn backends_and_auto() -> Vec<&'static str> {
    let uring = backends().iter().filter(|backend| **backend == "uring");
    backends().iter().copied().chain(uring.map(|_| "auto")).collect()
}

/// A setup on each of [`backends_and_auto`], and one over TLS whose clients need a token.
pub(crate) fn setups() -> impl Iterator<Item = Setup> {
    let plain = backends_and_auto().into_iter().map(Setup::new);
    plain.chain([Setup::new(any_backend()).over_tls().with_token()])
}

/// A backend, for tests where the choice does not matter.
pub(crate) fn any_backend() -> &'static str {
    backends()[0]
}

/// For anything that should happen at once, on a machine that is busy with other tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for a condition, up to a deadline; the panic names what did not happen.
pub(crate) fn eventually<T>(what: &str, within: Duration, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "within {within:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// [`eventually`] for a condition that is checked over the network.
pub(crate) async fn eventually_async<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(Instant::now() < deadline, "within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

type Disturb = Box<dyn Fn(&Daemon)>;

/// The configuration of a future daemon, in its own directory on a real disk.
pub(crate) struct Setup {
    directory: tempfile::TempDir,
    datasets: String,
    set: Vec<String>,
    variables: Vec<(String, String)>,
    through: Vec<String>,
    io_uring_errno: Option<u32>,
    whole: Option<String>,
    disturb: Option<Disturb>,
    /// TLS on all ports, with doors without TLS in front of them.
    authority: Option<Authority>,
    has_token: bool,
}

impl Setup {
    /// Two cores, 32 MiB, free ports; no datasets yet.
    pub(crate) fn new(backend: &str) -> Self {
        can_open_enough_files();
        let directory = tempfile::tempdir().expect("a directory");
        let setup = Self {
            directory,
            datasets: String::new(),
            set: Vec::new(),
            variables: Vec::new(),
            through: Vec::new(),
            io_uring_errno: None,
            whole: None,
            disturb: None,
            authority: None,
            has_token: false,
        };
        setup
            .set("engine.backend", backend)
            // A test meant for uring must not pass on mmap.
            .set("engine.on_unavailable", "fail")
            .set("engine.cores", "2")
            .set("engine.memory_budget", "32MiB")
            // Hundreds of daemons are stopped here, and no load balancer has to notice.
            .set("shutdown.lame_duck_ms", "0")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file into the directory, creating its parents.
    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::write(&path, bytes).expect("a file");
        path
    }

    /// Adds a dataset, from the lines of its entry. Paths are relative to the directory.
    pub(crate) fn dataset(mut self, lines: &[&str]) -> Self {
        for (index, line) in lines.iter().enumerate() {
            let lead = if index == 0 { "  - " } else { "    " };
            self.datasets.push_str(&format!("{lead}{line}\n"));
        }
        self
    }

    /// Sets a key; the last value wins.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Self {
        let prefix = format!("{key}=");
        self.set.retain(|setting| !setting.starts_with(&prefix));
        self.set.push(prefix + value);
        self
    }

    /// Sets a variable of the daemon's environment, which is otherwise empty.
    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the whole configuration file, in place of everything set or added before.
    pub(crate) fn whole(mut self, text: &str) -> Self {
        self.set.clear();
        self.whole = Some(text.to_owned());
        self
    }

    /// TLS on all ports; clients without TLS still reach them, through doors that add it.
    pub(crate) fn over_tls(self) -> Self {
        let authority = Authority::new();
        let mut setup = with_tls(self, &authority.pair("daemon"));
        setup.authority = Some(authority);
        setup
    }

    /// Serves only clients with [`wire::TOKEN`], which the clients of `wire` send.
    pub(crate) fn with_token(mut self) -> Self {
        let principals = lines(&[("tests", wire::TOKEN, "*,@admin")]);
        self.file("principals", principals.as_bytes());
        self.has_token = true;
        self.set("access.principals", "principals")
    }

    /// Calls `disturb` again and again until it is ready.
    pub(crate) fn disturbed(mut self, disturb: impl Fn(&Daemon) + 'static) -> Self {
        self.disturb = Some(Box::new(disturb));
        self
    }

    /// Starts the daemon through a command that finally replaces itself with its arguments.
    pub(crate) fn through(mut self, command: &[&str]) -> Self {
        self.through = command.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Starts the daemon where the kernel returns this errno for io_uring_setup.
    pub(crate) fn without_io_uring(mut self, errno: u32) -> Self {
        self.io_uring_errno = Some(errno);
        self
    }

    /// Makes the directory and the daemon's binary readable for everyone: for daemons of another user.
    pub(crate) fn open_to_all(self) -> Self {
        use std::os::unix::fs::PermissionsExt as _;
        let all = fs::Permissions::from_mode(0o777);
        fs::set_permissions(self.directory.path(), all).expect("chmod");
        let binary = self.path("ringfetchd");
        // Copied by another process: a child of another test would inherit a descriptor that this process has
        // open for writing, and the kernel does not execute a file that is open for writing.
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_ringfetchd"))
            .arg(&binary)
            .status();
        assert!(copied.expect("cp").success(), "a copy of the binary");
        self
    }

    /// Writes the configuration file, as an operator would.
    fn write_configuration(&self) {
        let text = match &self.whole {
            Some(text) => text.clone(),
            None => LISTEN.to_owned() + "datasets:\n" + &self.datasets,
        };
        self.file("ringfetchd.yaml", text.as_bytes());
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let own = self.path("ringfetchd");
        let binary = if own.exists() {
            own
        } else {
            PathBuf::from(env!("CARGO_BIN_EXE_ringfetchd"))
        };
        let mut command = match self.through.split_first() {
            None => Command::new(binary),
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(binary);
                command
            }
        };
        command.arg("--config").arg(self.path("ringfetchd.yaml"));
        for setting in &self.set {
            command.args(["--set", setting]);
        }
        command.args(arguments);
        // Variables of the developer's shell must not affect a test.
        command.env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    fn spawn(&self, arguments: &[&str]) -> Child {
        self.write_configuration();
        let mut command = self.command(arguments);
        let child = match self.io_uring_errno {
            None => command.spawn(),
            Some(errno) => without_io_uring(errno, || command.spawn()),
        };
        child.expect("the daemon, or what it is started through")
    }

    /// Starts the daemon and waits until it is ready.
    pub(crate) fn start(self) -> Daemon {
        self.start_or_refused()
            .unwrap_or_else(|refused| panic!("the daemon ended with {:?}:\n{}", refused.code, refused.said))
    }

    /// Starts the daemon and waits until it is ready, or has ended.
    pub(crate) fn start_or_refused(self) -> Result<Daemon, Refused> {
        let file = self.path("addresses.json");
        let child = self.spawn(&["--addresses-file", file.to_str().expect("a path")]);
        let mut daemon = Daemon::watch(child, self);
        let text = eventually("the daemon is ready or ends", PATIENCE, || {
            if let Some(status) = daemon.child.try_wait().expect("wait") {
                return Some(Err(status.code()));
            }
            if let Some(disturb) = &daemon.setup.disturb {
                disturb(&daemon);
            }
            fs::read_to_string(&file).ok().map(Ok)
        });
        let text = match text {
            Ok(text) => text,
            Err(code) => {
                return Err(Refused {
                    code,
                    said: daemon.last_words(),
                });
            }
        };
        let addresses: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let address = |name: &str| match addresses[name].as_str() {
            None if name == "admin" && addresses[name].is_null() => NOWHERE,
            text => text.expect("an address").parse().expect("an address"),
        };
        let mut through = |name: &str| match &daemon.setup.authority {
            None => address(name),
            Some(authority) => {
                let door = Door::open(address(name), authority, name != "http");
                daemon.doors.push(door.0);
                door.1
            }
        };
        (daemon.grpc, daemon.http, daemon.admin) = (through("grpc"), through("http"), through("admin"));
        if daemon.setup.has_token {
            wire::guard(daemon.addresses(), true);
        }
        Ok(daemon)
    }

    /// Runs the daemon to its end, which must be an error: its exit code and its output.
    pub(crate) fn refused(&self) -> Refused {
        self.run(&[])
    }

    /// Runs one of the daemon's other commands to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Refused {
        let mut child = self.spawn(arguments);
        let mut stderr = child.stderr.take().expect("a pipe");
        let said = thread::spawn(move || {
            let mut text = String::new();
            std::io::Read::read_to_string(&mut stderr, &mut text).expect("UTF-8");
            text
        });
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait().expect("wait") {
                break status;
            }
            if Instant::now() > deadline {
                child.kill().expect("kill");
                child.wait().expect("wait");
                panic!("it runs on:\n{}", said.join().expect("stderr"));
            }
            thread::sleep(Duration::from_millis(5));
        };
        Refused {
            code: status.code(),
            said: said.join().expect("stderr"),
        }
    }
}

/// A run that has ended by itself.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) code: Option<i32>,
    pub(crate) said: String,
}

impl Refused {
    /// Fails unless it ended with this code and its output contains all of these.
    pub(crate) fn with(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.said);
        for part in parts {
            assert!(self.said.contains(part), "{part:?} is not in:\n{}", self.said);
        }
        assert!(!self.said.contains("panicked"), "{}", self.said);
    }
}

pub(crate) struct Daemon {
    child: Child,
    setup: Setup,
    log: Arc<Mutex<Vec<String>>>,
    /// Reads the log until its end.
    reader: Option<thread::JoinHandle<()>>,
    doors: Vec<Door>,
    pub(crate) grpc: SocketAddr,
    pub(crate) http: SocketAddr,
    /// Port 0 if it is off.
    pub(crate) admin: SocketAddr,
}

const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

impl Daemon {
    fn watch(mut child: Child, setup: Setup) -> Self {
        let stderr = child.stderr.take().expect("a pipe");
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&log);
        // Ends with the pipe, so with the daemon.
        let reader = thread::spawn(move || {
            for line in std::io::BufRead::lines(std::io::BufReader::new(stderr)).map_while(Result::ok) {
                lines.lock().expect("the log").push(line);
            }
        });
        Self {
            child,
            setup,
            log,
            reader: Some(reader),
            doors: Vec::new(),
            grpc: NOWHERE,
            http: NOWHERE,
            admin: NOWHERE,
        }
    }

    fn addresses(&self) -> [SocketAddr; 3] {
        [self.grpc, self.http, self.admin]
    }

    /// A path in the daemon's directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.setup.path(name)
    }

    /// Replaces the configuration file atomically.
    pub(crate) fn rewrite(&self, text: &str) {
        let next = self.setup.file("ringfetchd.yaml.next", text.as_bytes());
        fs::rename(next, self.path("ringfetchd.yaml")).expect("a rename");
    }

    /// Runs one of the daemon's other commands, with its configuration file as it is now.
    pub(crate) fn command(&self, arguments: &[&str]) -> Output {
        let mut command = self.setup.command(arguments);
        command.stdout(Stdio::piped()).output().expect("the command")
    }

    /// Number of files that the daemon has open.
    pub(crate) fn open_files(&self) -> usize {
        let directory = format!("/proc/{}/fd", self.pid().as_raw_nonzero());
        fs::read_dir(directory).expect("the process").count()
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn resident_mib(&self) -> f64 {
        let process = Process::new(self.child.id()).expect("it runs");
        process.usage().expect("it runs").resident_mib
    }

    /// The lines logged so far.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().expect("the log").clone()
    }

    /// Everything that it logged; it must have ended.
    fn last_words(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the log's reader");
        }
        self.log().join("\n")
    }

    /// Waits for a line in the log that has all of these.
    pub(crate) fn logged(&self, parts: &[&str]) -> String {
        eventually(&format!("a line with {parts:?} in the log"), PATIENCE, || {
            let has_all = |line: &String| parts.iter().all(|part| line.contains(part));
            self.log().into_iter().find(has_all)
        })
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the daemon is there");
    }

    /// Stops it by SIGSTOP, and waits until none of its threads runs; `false`: it has ended. SIGCONT resumes it.
    pub(crate) fn pause(&self) -> bool {
        self.signal(Signal::STOP);
        // An error: there is no child that could stop.
        let stopped = waitid(WaitId::Pid(self.pid()), WaitIdOptions::STOPPED);
        stopped.is_ok_and(|status| status.is_some_and(|status| status.stopped()))
    }

    /// Whether it is running.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }

    /// Waits for its end. Asynchronous, so that it blocks no client's task: a client that does not see the
    /// daemon's GOAWAY keeps it from draining.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        eventually_async("the daemon ends", async || child.try_wait().expect("wait")).await
    }

    /// Waits for its end, which must have this exit code.
    pub(crate) async fn ends_with(&mut self, code: i32) {
        let status = self.ended().await;
        assert_eq!(status.code(), Some(code), "{}", self.log().join("\n"));
    }

    /// Ends it as an operator would: SIGTERM, a drain, exit code 0.
    pub(crate) async fn stop(mut self) {
        assert!(self.is_alive(), "it died:\n{}", self.log().join("\n"));
        self.signal(Signal::TERM);
        let status = self.ended().await;
        let log = self.last_words();
        assert_eq!(status.code(), Some(0), "{status}:\n{log}");
    }
}

impl Drop for Daemon {
    /// Ends it, and fails if it has panicked: the daemon survives a panic of a request or of a thread.
    fn drop(&mut self) {
        // Other daemons may get these ports.
        if self.setup.has_token {
            wire::guard(self.addresses(), false);
        }
        // Mostly it is already gone.
        let _gone = self.child.kill();
        let _gone = self.child.wait();
        if thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log().join("\n"));
            return;
        }
        let log = self.last_words();
        assert!(!log.contains("panicked"), "{log}");
    }
}
