//! Notifications to the service manager: sd_notify(3), datagrams to the socket that NOTIFY_SOCKET names.
//!
//! Asks for time while a start takes long; sends READY once serving, RELOADING, STOPPING once draining, a status
//! line, and WATCHDOG. WATCHDOG=1 is sent only after every shard and core has responded, so that the service
//! manager restarts a daemon with a stuck part. Failures are logged and never stop or delay the daemon; without
//! NOTIFY_SOCKET nothing is sent. No socket activation, no AF_VSOCK.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringfetch_engine::engine::{BackendStatus, Engine};
use tokio::net::UnixDatagram;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::lifecycle::{Lifecycle, Reloading};
use crate::reconfigure::{LastReload, Reconfigurer};

/// Timeout of sending a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// How often status and liveness are checked, unless the watchdog needs it more often.
const PERIOD_MAX: Duration = Duration::from_secs(5);
/// How soon a stuck part is checked again.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Time for the shutdown after the drain: ending threads, unmapping memory.
const EXIT_GRACE: Duration = Duration::from_secs(5);
/// Longest status text in bytes; `systemctl status` shows one line.
const STATUS_BYTES_MAX: usize = 512;

/// Notifies the service manager.
#[derive(Debug)]
pub struct Notifier {
    address: SocketAddr,
    /// The watchdog's timeout.
    watchdog: Option<Duration>,
    /// Whether the last message failed, so that this is logged once.
    send_failed: AtomicBool,
}

impl Notifier {
    /// For the service manager that started this process, if it set NOTIFY_SOCKET. Logs invalid variables.
    pub fn from_environment() -> Option<Self> {
        Self::from_variables(|name| std::env::var_os(name), std::process::id())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>, pid: u32) -> Option<Self> {
        let socket = variable("NOTIFY_SOCKET").filter(|socket| !socket.is_empty())?;
        let address = address(&socket)
            .inspect_err(|error| {
                tracing::warn!(
                    ?socket,
                    %error,
                    "NOTIFY_SOCKET is not a usable socket: the service manager is not notified (allowed: \
                     an absolute path, or @ and an abstract name)"
                );
            })
            .ok()?;
        let interval =
            variable("WATCHDOG_USEC").filter(|_| is_ours(variable("WATCHDOG_PID").as_deref(), pid));
        let watchdog = interval.and_then(|text| {
            let parsed = text
                .to_str()
                .and_then(|text| text.parse().ok())
                .filter(|usec| *usec > 0);
            if parsed.is_none() {
                tracing::warn!(
                    value = ?text,
                    "WATCHDOG_USEC is not a number of microseconds: WATCHDOG=1 is not sent"
                );
            }
            parsed.map(Duration::from_micros)
        });
        Some(Self {
            address,
            watchdog,
            send_failed: AtomicBool::new(false),
        })
    }

    /// Asks for this much time from now on, for a start that waits for a step.
    pub(crate) async fn start_takes_long(&self, step: &str, patience: Duration) {
        let (patience, status) = (patience.as_micros(), one_line(&format!("starting: {step}")));
        self.send(&format!("EXTEND_TIMEOUT_USEC={patience}\nSTATUS={status}\n"))
            .await;
    }

    /// Sends READY, then status and watchdog messages, and STOPPING once the daemon drains; then ends.
    ///
    /// # Cancel safety
    /// Dropping the future stops notifications.
    pub async fn run(self: Arc<Self>, engine: Engine, lifecycle: Lifecycle, reconfigurer: Reconfigurer) {
        let reloading = lifecycle.subscribe_reloading();
        let status = describe(&engine.backend(), reconfigurer.last_reload());
        self.send(&format!("READY=1\nSTATUS={status}\n")).await;
        tokio::select! {
            () = lifecycle.leaving() => {}
            () = self.report(&engine, &reconfigurer, reloading, status) => {}
        }
        // A drain may take as long as configured, even if the service manager's timeout is shorter.
        let patience = (reconfigurer.lame_duck() + reconfigurer.drain_timeout() + EXIT_GRACE).as_micros();
        let why = lifecycle
            .failure()
            .map_or_else(String::new, |reason| format!(": {reason}"));
        let status = one_line(&format!("draining{why}"));
        self.send(&format!(
            "STOPPING=1\nEXTEND_TIMEOUT_USEC={patience}\nSTATUS={status}\n"
        ))
        .await;
    }

    /// Sends WATCHDOG while all shards and cores respond, and reports reloads and changes of the status.
    /// Never ends.
    async fn report(
        &self,
        engine: &Engine,
        reconfigurer: &Reconfigurer,
        mut reloading: watch::Receiver<Reloading>,
        mut said: String,
    ) {
        // Half of the timeout, as sd_watchdog_enabled(3) advises; the other half is for checking.
        let period = self
            .watchdog
            .map_or(PERIOD_MAX, |watchdog| PERIOD_MAX.min(watchdog / 2));
        let (mut next, mut announced, mut stuck) = (Instant::now() + period, false, None);
        let mut serving = said.clone();
        loop {
            let mut message = String::new();
            tokio::select! {
                changed = reloading.changed() => {
                    if changed.is_err() {
                        // The lifecycle is gone.
                        return std::future::pending().await;
                    }
                    let now = *reloading.borrow_and_update();
                    announced = now.is_running();
                    // At its end, too: its begin may have been skipped, and systemd waits for a reload that began after its
                    // signal.
                    self.send(&format!("RELOADING=1\nMONOTONIC_USEC={}\n", now.begun_usec)).await;
                    if !announced {
                        message.push_str("READY=1\n");
                    }
                }
                () = tokio::time::sleep_until(next) => {
                    let alive = self.ask(engine).await;
                    if alive.is_ok() && self.watchdog.is_some() {
                        message.push_str("WATCHDOG=1\n");
                    }
                    log_liveness(&alive, &stuck);
                    stuck = alive.err();
                    next = Instant::now() + if stuck.is_some() { period.min(RETRY_MAX) } else { period };
                }
            }
            // The status after a reload is sent with its READY, not before.
            if !announced && !reloading.has_changed().unwrap_or(false) {
                serving = describe(&engine.backend(), reconfigurer.last_reload());
            }
            let status = match &stuck {
                None => serving.clone(),
                Some(part) => format!("{part} does not respond"),
            };
            if status != said {
                message.push_str(&format!("STATUS={status}\n"));
                said = status;
            }
            if !message.is_empty() {
                self.send(&message).await;
            }
        }
    }

    /// Checks all shards and cores if there is a watchdog; an error names the part that does not respond.
    async fn ask(&self, engine: &Engine) -> Result<(), String> {
        let Some(watchdog) = self.watchdog else {
            return Ok(());
        };
        let within = watchdog / 4;
        engine
            .signs_of_life(within)
            .await
            .map_err(|shard| format!("shard {shard}"))?;
        // Shards may have their own threads, so check the cores too.
        let until = Instant::now() + within;
        let mut answers = Vec::new();
        for core in 0..engine.core_count() {
            let (reply, answer) = oneshot::channel();
            // A core that has stopped drops the reply.
            engine.spawn_on(core, move || async move {
                let _asked = reply.send(());
            });
            answers.push(answer);
        }
        for (core, answer) in answers.into_iter().enumerate() {
            match tokio::time::timeout_at(until, answer).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Err(format!("core {core}")),
            }
        }
        Ok(())
    }

    async fn send(&self, message: &str) {
        let sent = tokio::time::timeout(SEND_TIMEOUT, self.try_send(message))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let had_failed = self.send_failed.swap(sent.is_err(), Ordering::Relaxed);
        if let (Err(error), false) = (sent, had_failed) {
            tracing::warn!(
                address = ?self.address,
                %error,
                "the service manager cannot be notified (NOTIFY_SOCKET)"
            );
        }
    }

    /// Opens a socket for each message, as libsystemd does: the service manager may have created its socket
    /// again.
    async fn try_send(&self, message: &str) -> io::Result<()> {
        let socket = std::os::unix::net::UnixDatagram::unbound()?;
        socket.connect_addr(&self.address)?;
        socket.set_nonblocking(true)?;
        UnixDatagram::from_std(socket)?.send(message.as_bytes()).await?;
        Ok(())
    }
}

/// A path, or a name in the abstract namespace after `@` (unix(7)).
fn address(socket: &OsStr) -> io::Result<SocketAddr> {
    match socket.as_bytes() {
        [b'/', ..] => SocketAddr::from_pathname(socket),
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Whether the watchdog applies to this process, as it does without WATCHDOG_PID.
fn is_ours(watched: Option<&OsStr>, pid: u32) -> bool {
    watched.is_none_or(|watched| watched.to_str().and_then(|text| text.parse().ok()) == Some(pid))
}

/// Logs when a part stops responding, and when all respond again.
fn log_liveness(alive: &Result<(), String>, stuck: &Option<String>) {
    match (alive, stuck) {
        (Err(part), before) if before.as_ref() != Some(part) => {
            tracing::error!(
                part,
                "a part of the engine does not respond; withholding the watchdog message"
            );
        }
        (Ok(()), Some(_)) => tracing::info!("all parts of the engine respond again"),
        (Ok(()) | Err(_), _) => {}
    }
}

fn describe(backend: &BackendStatus, last_reload: Option<LastReload>) -> String {
    let BackendStatus {
        backend: running,
        requested,
        reason,
    } = backend;
    let in_place = if backend.is_fallback() {
        format!(" in place of {requested}")
    } else {
        String::new()
    };
    let reload = match last_reload.map(|last| last.result) {
        Some(Err(problem)) => format!("the last reload was refused: {problem}; "),
        Some(Ok(waiting)) if !waiting.is_empty() => {
            format!("{} changed settings need a restart; ", waiting.len())
        }
        Some(Ok(_)) | None => String::new(),
    };
    one_line(&format!("{reload}serving on {running}{in_place}: {reason}"))
}

/// Removes line breaks: one in a message would start the next assignment.
fn one_line(text: &str) -> String {
    let mut line = text.replace(char::is_control, " ");
    line.truncate(line.floor_char_boundary(STATUS_BYTES_MAX));
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::tell_of_long_start;
    use crate::reconfigure::ConfigChange;
    use ringfetch_engine::config::BackendKind;
    use ringfetch_engine::sync::lock;
    use std::sync::Mutex;

    const PID: u32 = 4711;

    fn found(variables: &[(&str, &str)]) -> Option<Notifier> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        };
        Notifier::from_variables(variable, PID)
    }

    #[test]
    fn only_a_socket_that_can_be_meant_is_taken() {
        // Scenario: no variable, an empty one, a path, an abstract name, and addresses that sd_notify(3) does
        // not define or we do not support. Expectation: a notifier for the path and the name, and for nothing
        // else.
        assert!(found(&[]).is_none());
        assert!(found(&[("WATCHDOG_USEC", "1000000")]).is_none());
        for (socket, taken) in [
            ("", false),
            ("/run/systemd/notify", true),
            ("@/org/example/notify", true),
            ("run/notify", false),
            ("vsock:2:1234", false),
        ] {
            assert_eq!(found(&[("NOTIFY_SOCKET", socket)]).is_some(), taken, "{socket}");
        }
        let long = format!("/{}", "x".repeat(200));
        assert!(
            found(&[("NOTIFY_SOCKET", &long)]).is_none(),
            "longer than sun_path"
        );
    }

    #[test]
    fn a_watchdog_is_fed_by_whom_it_watches() {
        // Scenario: an interval for this process, for any process, for another process, and invalid
        // intervals. Expectation: the first two count.
        let socket = ("NOTIFY_SOCKET", "/run/notify");
        let watchdog = |more: &[(&str, &str)]| {
            let variables: Vec<_> = [socket].iter().chain(more).copied().collect();
            found(&variables).expect("a supervisor").watchdog
        };
        let interval = ("WATCHDOG_USEC", "90000000");
        let seconds = Duration::from_secs(90);
        assert_eq!(watchdog(&[interval, ("WATCHDOG_PID", "4711")]), Some(seconds));
        assert_eq!(watchdog(&[interval]), Some(seconds));
        assert_eq!(watchdog(&[interval, ("WATCHDOG_PID", "1")]), None);
        assert_eq!(watchdog(&[interval, ("WATCHDOG_PID", "")]), None);
        for none in ["0", "-1", "soon", ""] {
            assert_eq!(watchdog(&[("WATCHDOG_USEC", none)]), None, "{none:?}");
        }
        assert_eq!(watchdog(&[]), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_start_asks_for_time() {
        // Scenario: a start that waits for one step, and later for another one. Expectation: the service manager is asked for time
        // again and again, each time for longer than until the next time, and told what the start waits for.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let notifier = found(&[("NOTIFY_SOCKET", path.to_str().unwrap())]).unwrap();
        let step = Arc::new(Mutex::new("one\nstep".to_owned()));
        let telling = tell_of_long_start(Arc::clone(&step), Some(Arc::new(notifier)));
        let heard = async {
            let mut before = Instant::now();
            for status in ["one step", "another", "another"] {
                let mut buffer = [0; 512];
                let length = manager.recv(&mut buffer).await.unwrap();
                let text = std::str::from_utf8(&buffer[..length]).unwrap();
                let (time, said) = text.split_once('\n').unwrap();
                let usec = time
                    .strip_prefix("EXTEND_TIMEOUT_USEC=")
                    .unwrap()
                    .parse()
                    .unwrap();
                assert!(before.elapsed() < Duration::from_micros(usec), "{text}");
                assert_eq!(said, format!("STATUS=starting: {status}\n"));
                before = Instant::now();
                *lock(&step) = "another".to_owned();
            }
        };
        tokio::select! {
            () = heard => {}
            () = telling => {}
        }
    }

    #[test]
    fn a_status_is_one_line_that_says_backend_and_why() {
        // Scenario: the requested backend, a fallback, a refused reload, and a reason with line breaks that
        // is far too long. Expectation: one line each, cut between characters.
        let status = |requested, reason: &str, reload: Option<Result<Vec<ConfigChange>, String>>| {
            let backend = BackendStatus {
                backend: BackendKind::Mmap,
                requested,
                reason: reason.to_owned(),
            };
            let at = std::time::SystemTime::UNIX_EPOCH;
            describe(&backend, reload.map(|result| LastReload { at, result }))
        };
        let asked = BackendKind::Mmap;
        assert_eq!(status(asked, "asked for", None), "serving on mmap: asked for");
        assert_eq!(
            status(BackendKind::Uring, "seccomp\nREADY=1", Some(Ok(Vec::new()))),
            "serving on mmap in place of uring: seccomp READY=1"
        );
        assert_eq!(
            status(asked, "asked for", Some(Err("a key\nis wrong".to_owned()))),
            "the last reload was refused: a key is wrong; serving on mmap: asked for"
        );
        let long = status(asked, &"\u{e9}".repeat(1000), None);
        assert!((500..=STATUS_BYTES_MAX).contains(&long.len()), "{}", long.len());
    }
}
