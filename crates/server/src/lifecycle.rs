//! The daemon's state (starting, serving, draining), read by readiness, the transports and the admin service.
//!
//! The state only moves forward. A signal or a failure of the engine starts draining. A `watch` channel
//! announces changes; another one announces reloads to the service manager.

use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ringfetch_engine::engine::Engine;
use ringfetch_engine::sync::lock;
use rustix::time::{ClockId, clock_gettime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::time::MissedTickBehavior;

use crate::fetch::Fetcher;
use crate::listener::DrainingPort;
use crate::sd_notify::Notifier;

/// The state of the daemon. It only moves down this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Not ready yet.
    Starting,
    /// Ready.
    Serving,
    /// Not ready, but requests are still served: a load balancer has time to notice.
    LameDuck,
    /// Accepted requests are completed; new ones are refused, except probes, metrics and the admin service.
    Draining,
    /// All requests are completed; the rest is closed.
    Ended,
}

impl State {
    /// The word in responses and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::LameDuck | Self::Draining | Self::Ended => "draining",
        }
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The daemon's state. Clones share it.
#[derive(Debug, Clone)]
pub struct Lifecycle {
    state: watch::Sender<State>,
    reloading: watch::Sender<Reloading>,
    failure: Arc<OnceLock<String>>,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self::new()
    }
}

impl Lifecycle {
    /// A daemon that is starting.
    pub fn new() -> Self {
        Self {
            state: watch::Sender::new(State::Starting),
            reloading: watch::Sender::new(Reloading::default()),
            failure: Arc::new(OnceLock::new()),
        }
    }

    /// The state now.
    pub fn state(&self) -> State {
        *self.state.borrow()
    }

    /// A receiver of later changes; it may skip states that were superseded.
    pub fn subscribe(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// A receiver of the reloads that run; it may skip some.
    pub fn subscribe_reloading(&self) -> watch::Receiver<Reloading> {
        self.reloading.subscribe()
    }

    /// Announces that a reload is running, until the guard is dropped.
    pub fn start_reloading(&self) -> ReloadGuard<'_> {
        self.reloading.send_modify(|reloading| {
            reloading.begun_usec = monotonic_usec();
            reloading.running += 1;
        });
        ReloadGuard { lifecycle: self }
    }

    /// Moves to serving. Does nothing once draining.
    pub fn start_serving(&self) {
        self.advance(State::Serving);
    }

    /// Moves to draining.
    pub fn start_draining(&self) {
        self.advance(State::Draining);
    }

    /// Moves to draining because of a failure: the process will exit with an error. The first reason is kept.
    pub fn fail(&self, reason: impl Into<String>) {
        let reason = reason.into();
        tracing::error!(reason, "the daemon cannot continue");
        let _first_counts = self.failure.set(reason);
        self.start_draining();
    }

    /// The reason of the failure, if any.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Resolves once readiness has ended.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn leaving(&self) {
        self.reached(State::LameDuck).await;
    }

    /// Resolves once the daemon drains.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn draining(&self) {
        self.reached(State::Draining).await;
    }

    /// Resolves once this state is reached.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub(crate) async fn reached(&self, least: State) {
        // The sender lives in `self`, so the channel cannot be closed.
        let mut state = self.subscribe();
        let _never_closed = state.wait_for(|state| *state >= least).await;
    }

    fn advance(&self, next: State) {
        self.state.send_if_modified(|state| {
            let forward = *state < next;
            if forward {
                *state = next;
            }
            forward
        });
    }
}

/// The reloads that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reloading {
    /// When the last one began, CLOCK_MONOTONIC in microseconds, by which systemd identifies it.
    pub begun_usec: i64,
    /// How many run: one, and those that could not even begin.
    running: u32,
}

impl Reloading {
    /// Whether one runs.
    pub fn is_running(self) -> bool {
        self.running > 0
    }
}

fn monotonic_usec() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec
        .saturating_mul(1_000_000)
        .saturating_add(now.tv_nsec / 1000)
}

/// A reload is running while this exists.
#[derive(Debug)]
pub struct ReloadGuard<'a> {
    lifecycle: &'a Lifecycle,
}

impl Drop for ReloadGuard<'_> {
    fn drop(&mut self) {
        self.lifecycle
            .reloading
            .send_modify(|reloading| reloading.running -= 1);
    }
}

/// Exit code after a second signal: 128 + SIGINT, as in shells.
const EXIT_SECOND_SIGNAL: i32 = 130;

/// SIGTERM and SIGINT, caught from creation.
#[derive(Debug)]
pub struct ShutdownSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl ShutdownSignals {
    /// Replaces the signals' default action. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn install() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// On the first signal, ends readiness and drains after `lame_duck`; on the second, exits at once.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the signals without effect.
    pub async fn drain_on_signal(mut self, lifecycle: Lifecycle, lame_duck: impl Fn() -> Duration) {
        let first = self.next().await;
        let lame_duck = lame_duck();
        let lame_duck_ms = u64::try_from(lame_duck.as_millis()).unwrap_or(u64::MAX);
        tracing::info!(
            signal = first,
            lame_duck_ms,
            "draining; a second signal ends the process at once"
        );
        if lame_duck.is_zero() {
            lifecycle.start_draining();
        } else {
            lifecycle.advance(State::LameDuck);
        }
        let draining_at_its_time = async {
            tokio::time::sleep(lame_duck).await;
            lifecycle.start_draining();
            std::future::pending().await
        };
        let second = tokio::select! {
            second = self.next() => second,
            never = draining_at_its_time => never,
        };
        tracing::warn!(
            signal = second,
            "second signal: ending at once, requests in flight are aborted"
        );
        std::process::exit(EXIT_SECOND_SIGNAL);
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Ends the process on SIGTERM or SIGINT from now on, with a shell's exit code for it: 143 or 130. As process 1 of a container it
/// would otherwise ignore them, and could only be killed.
///
/// # Errors
/// Errors of the kernel.
pub fn end_on_signal() -> std::io::Result<()> {
    let watch = async |mut signals: ShutdownSignals| {
        let code = if signals.next().await == "SIGINT" {
            130
        } else {
            143
        };
        std::process::exit(code);
    };
    on_a_thread("rf-signals", watch)?.map(drop)
}

/// Replaces the signals' default action, and watches for them on a thread of its own. The inner error: there is none.
fn on_a_thread<W>(name: &str, watch: W) -> std::io::Result<std::io::Result<JoinHandle<()>>>
where
    W: AsyncFnOnce(ShutdownSignals) + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let signals = {
        let _inside = runtime.enter();
        ShutdownSignals::install()?
    };
    let thread = std::thread::Builder::new().name(name.to_owned());
    Ok(thread.spawn(move || runtime.block_on(watch(signals))))
}

/// A start that takes longer is logged again and again, with the step that it is at.
const LONG_START: Duration = Duration::from_secs(5);
/// The service manager is asked for this much time, each time: a few of these messages may be late.
const LONG_START_PATIENCE: Duration = Duration::from_secs(30);

/// Ends the process on SIGTERM or SIGINT until it is dropped: before the daemon serves there is nothing to drain. As
/// process 1 of a container it would otherwise ignore them, and could only be killed. Logs what a long start waits for, and asks
/// the service manager for time, which would otherwise kill it.
#[derive(Debug)]
pub struct EndWhileStarting {
    step: Arc<Mutex<String>>,
    until: Option<oneshot::Sender<()>>,
    watch: Option<JoinHandle<()>>,
}

impl EndWhileStarting {
    /// Replaces the signals' default action. On a thread of its own, because starting blocks.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn watch(notifier: Option<Arc<Notifier>>) -> std::io::Result<Self> {
        let (until, started) = oneshot::channel();
        let step = Arc::new(Mutex::new(String::new()));
        let long_start = tell_of_long_start(Arc::clone(&step), notifier);
        // A signal that came before the end of the start is seen by then: this thread may not have run since.
        let started = async move {
            let _dropped = started.await;
            tokio::task::yield_now().await;
        };
        let watch = async move |mut signals: ShutdownSignals| {
            tokio::select! {
                biased;
                signal = signals.next() => {
                    tracing::info!(signal, "ending before it serves");
                    std::process::exit(0);
                }
                () = started => {}
                () = long_start => {}
            }
        };
        // Where there is no thread for it, there is none for a core either, and the start fails.
        Ok(Self {
            step,
            until: Some(until),
            watch: on_a_thread("rf-start", watch)?.ok(),
        })
    }

    /// Names the step that begins.
    pub fn begins(&self, step: String) {
        *lock(&self.step) = step;
    }
}

/// Tells the log and the service manager that a start takes long, and the step that it is at. Never ends.
pub(crate) async fn tell_of_long_start(step: Arc<Mutex<String>>, notifier: Option<Arc<Notifier>>) {
    loop {
        tokio::time::sleep(LONG_START).await;
        let step = lock(&step).clone();
        tracing::warn!(step, "the start takes long; see step");
        if let Some(notifier) = &notifier {
            notifier.start_takes_long(&step, LONG_START_PATIENCE).await;
        }
    }
}

impl Drop for EndWhileStarting {
    /// Waits for the thread, which would otherwise end a daemon that already serves, as long as it is not scheduled.
    fn drop(&mut self) {
        drop(self.until.take());
        if let Some(watch) = self.watch.take() {
            // An error means that it panicked, which was reported then.
            let _ = watch.join();
        }
    }
}

/// Catches SIGXFSZ, which by default ends a process whose log reaches the longest file that it may write (RLIMIT_FSIZE).
/// The write then fails with EFBIG, as on a full disk. Must be called inside a tokio runtime.
///
/// # Errors
/// Errors of the kernel.
pub fn survive_file_size_limit() -> std::io::Result<()> {
    // The handler stays.
    signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw())).map(drop)
}

/// How often the cores are checked, and the reads that wait.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Fails the daemon if a shard has failed or a core has stopped: it would return errors until restarted. Ends
/// when the daemon drains.
///
/// # Cancel safety
/// Dropping the future has no effect.
pub async fn watch_engine(engine: Engine, lifecycle: Lifecycle) {
    let mut ticks = tokio::time::interval(HEARTBEAT);
    loop {
        tokio::select! {
            () = lifecycle.draining() => return,
            () = engine.failed() => return lifecycle.fail("a shard of the engine has failed"),
            _ = ticks.tick() => {}
        }
        for core in 0..engine.core_count() {
            if !engine.spawn_on(core, async || {}) {
                lifecycle.fail(format!("core {core} has stopped"));
            }
        }
    }
}

/// Lets the engine look after reads that wait, also in a drain. Never ends.
///
/// # Cancel safety
/// Dropping the future has no effect.
pub async fn tend_engine(engine: Engine) {
    let mut ticks = tokio::time::interval(HEARTBEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        engine.tend();
    }
}

/// Time at the end of a drain for probes, metrics and the admin service to complete their last responses.
const FAREWELL: Duration = Duration::from_millis(500);

/// What a drain had to abort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainOutcome {
    /// Connections whose client had not received all of its answers.
    pub connections: usize,
    /// Reads that did not complete.
    pub reads: u64,
}

impl DrainOutcome {
    /// Whether nothing was aborted.
    pub fn is_clean(self) -> bool {
        self.connections == 0 && self.reads == 0
    }
}

/// Shuts down in order: refuses new requests, waits for connections, closes operators' ports, completes
/// reads. Takes at most `timeout`; connections get nine tenths of it, so that reads of aborted ones can
/// complete.
///
/// # Cancel safety
/// Do not drop the future before it completes: reads may be in flight.
pub async fn drain(
    fetcher: &Fetcher,
    lifecycle: &Lifecycle,
    ports: Vec<DrainingPort>,
    timeout: Duration,
) -> DrainOutcome {
    let started = Instant::now();
    lifecycle.start_draining();
    let all_closed = async {
        for port in &ports {
            port.closed().await;
        }
    };
    let in_time = tokio::time::timeout(timeout - timeout / 10, all_closed)
        .await
        .is_ok();
    let connections = if in_time {
        0
    } else {
        ports.iter().map(DrainingPort::unanswered).sum()
    };
    // Not earlier: a long HTTP response consists of many fetches, which must not be refused. Connections that
    // are shutting down accept no new requests.
    fetcher.start_draining();
    // The cores, which also serve operators, end with the engine.
    lifecycle.advance(State::Ended);
    let all_closed = join_all(ports.into_iter().map(DrainingPort::all_closed));
    let _closed_or_cut_off = tokio::time::timeout(FAREWELL.min(timeout / 20), all_closed).await;
    let report = fetcher.engine().drain(started + timeout).await;
    DrainOutcome {
        connections,
        reads: report.abandoned_reads,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_engine::batch::Batch;
    use ringfetch_engine::config::{DirectIo, EngineConfig};
    use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
    use ringfetch_engine::engine::SubmitOptions;
    use ringfetch_engine::error::ReadError;
    use ringfetch_engine::sim::{Fault, FaultPlan, SimControl};

    #[test]
    fn the_state_only_goes_forward() {
        // Scenario: every transition in turn, then one back. Expectation: no way back.
        let lifecycle = Lifecycle::new();
        assert_eq!(lifecycle.state(), State::Starting);
        lifecycle.start_serving();
        assert_eq!(lifecycle.state(), State::Serving);
        lifecycle.advance(State::LameDuck);
        assert_eq!(lifecycle.state(), State::LameDuck);
        lifecycle.start_draining();
        lifecycle.start_serving();
        lifecycle.advance(State::LameDuck);
        assert_eq!(lifecycle.state(), State::Draining);
    }

    #[tokio::test]
    async fn a_running_reload_is_announced() {
        // Scenario: a reload begins; another one begins and ends meanwhile; the first one ends. Expectation: a subscriber sees
        // each change, with the time of the last begin; the state does not change.
        let lifecycle = Lifecycle::new();
        lifecycle.start_serving();
        let mut reloading = lifecycle.subscribe_reloading();
        let mut next = async || {
            reloading.changed().await.expect("a change");
            *reloading.borrow_and_update()
        };
        let first = lifecycle.start_reloading();
        let begun = next().await;
        assert!(begun.is_running() && begun.begun_usec > 0);
        let second = lifecycle.start_reloading();
        let both = next().await;
        assert!(both.is_running() && both.begun_usec >= begun.begun_usec);
        drop(second);
        let left = next().await;
        assert!(left.is_running());
        drop(first);
        let ended = next().await;
        assert!(!ended.is_running());
        assert_eq!(
            (left.begun_usec, ended.begun_usec),
            (both.begun_usec, both.begun_usec)
        );
        assert_eq!(lifecycle.state(), State::Serving);
    }

    #[tokio::test]
    async fn a_shard_that_fails_ends_the_daemon() {
        // Scenario: the engine's only shard panics on a read, as with a defect. Expectation: the daemon
        // drains at once, with that as the reason.
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("blocks");
        std::fs::write(&path, [7; 4096]).expect("a file");
        let spec = DatasetSpec::new("b", path, KindSpec::blocks(4096), DirectIo::Off);
        let dataset = Arc::new(Dataset::open(&spec).expect("a dataset"));
        let control = SimControl::from_environment();
        control.set_faults(FaultPlan::script(&[Fault::Panic]));
        let engine = Engine::start_sim(&EngineConfig::default(), &control).expect("an engine");
        let lifecycle = Lifecycle::new();
        let watch = tokio::spawn(watch_engine(engine.clone(), lifecycle.clone()));
        let mut batch = Batch::new(dataset, 1);
        batch.push_block(0);
        let ticket = engine.submit(batch, SubmitOptions::default()).expect("accepted");
        assert_eq!(ticket.await.expect_err("it panicked"), ReadError::ShardFailed);
        watch.await.expect("the watch");
        assert_eq!(lifecycle.failure(), Some("a shard of the engine has failed"));
        assert_eq!(lifecycle.state(), State::Draining);
    }

    #[tokio::test]
    async fn a_failure_drains_and_its_first_reason_counts() {
        // Scenario: two failures on clones, one waiter. Expectation: the waiter wakes; the first reason is kept.
        let lifecycle = Lifecycle::new();
        let waiter = tokio::spawn({
            let lifecycle = lifecycle.clone();
            async move { lifecycle.draining().await }
        });
        lifecycle.clone().fail("core 1 has stopped");
        lifecycle.fail("core 0 has stopped");
        waiter.await.expect("the waiter");
        assert_eq!(lifecycle.failure(), Some("core 1 has stopped"));
    }
}
