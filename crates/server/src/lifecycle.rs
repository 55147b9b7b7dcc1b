//! Starting, serving, draining: one state that readiness, the transports and the admin service read, and what moves it.
//!
//! The state only goes forward. Draining begins with a signal or with a failure of the engine, and tells everybody
//! through one `watch` channel. Whether the configuration is being read again goes through another, for whoever
//! supervises the process. Deliberately absent: restarts in place, and pausing.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ringfetch_engine::engine::Engine;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::door::Fetcher;
use crate::listener::Remaining;

/// What the daemon is doing. It only moves down this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Not ready yet.
    Starting,
    /// Ready.
    Serving,
    /// Not ready any more, but requests are still served: a load balancer has time to notice.
    LameDuck,
    /// What was accepted is answered, nothing new is, except probes, metrics and the admin service.
    Draining,
    /// Everything is answered: what is still open is closed.
    Ended,
}

impl State {
    /// The word in answers and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::LameDuck => "lame_duck",
            Self::Draining | Self::Ended => "draining",
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
    reloading: watch::Sender<bool>,
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
            reloading: watch::Sender::new(false),
            failure: Arc::new(OnceLock::new()),
        }
    }

    /// The state now.
    pub fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Whether requests are welcome.
    pub fn is_ready(&self) -> bool {
        self.state() == State::Serving
    }

    /// A receiver that sees every later change; the latest state counts, earlier ones may be skipped.
    pub fn subscribe(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Whether the configuration is being read again: a receiver that sees every later change, the latest counts.
    pub fn subscribe_reloading(&self) -> watch::Receiver<bool> {
        self.reloading.subscribe()
    }

    /// Tells that the configuration is being read again, until the guard is dropped.
    pub fn start_reloading(&self) -> Reloading<'_> {
        self.reloading.send_replace(true);
        Reloading { lifecycle: self }
    }

    /// Moves on to serving. Does nothing once it drains.
    pub fn start_serving(&self) {
        self.advance(State::Serving);
    }

    /// Ends readiness; requests are still served.
    pub fn start_lame_duck(&self) {
        self.advance(State::LameDuck);
    }

    /// Moves on to draining.
    pub fn start_draining(&self) {
        self.advance(State::Draining);
    }

    /// Ends what a drain leaves open.
    pub fn end(&self) {
        self.advance(State::Ended);
    }

    /// Moves on to draining because something broke: the process will end with an error. The first reason counts.
    pub fn fail(&self, reason: impl Into<String>) {
        let reason = reason.into();
        tracing::error!(reason, "the daemon cannot continue");
        let _first_counts = self.failure.set(reason);
        self.start_draining();
    }

    /// Why it broke, if it did.
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

    /// Resolves once it drains.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn draining(&self) {
        self.reached(State::Draining).await;
    }

    /// Resolves once it is as far as this.
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

/// While this lives, the configuration is being read again.
#[derive(Debug)]
pub struct Reloading<'a> {
    lifecycle: &'a Lifecycle,
}

impl Drop for Reloading<'_> {
    fn drop(&mut self) {
        self.lifecycle.reloading.send_replace(false);
    }
}

/// Exit code of a process that a second signal ended: 128 + SIGINT, as shells say it.
const EXIT_SECOND_SIGNAL: i32 = 130;

/// SIGTERM and SIGINT, caught from the moment this is made.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Takes the signals' default action away. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn install() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Drains on the first signal, after `lame_duck` without readiness, and ends the process at once on the second.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the signals without effect.
    pub async fn obey(mut self, lifecycle: Lifecycle, lame_duck: impl Fn() -> Duration) {
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
            lifecycle.start_lame_duck();
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
            "second signal: ending at once, requests in flight are cut off"
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

/// SIGHUP, caught from the moment this is made. Those that come while one is acted upon count as one.
#[derive(Debug)]
pub struct Hangups {
    hangup: Signal,
}

impl Hangups {
    /// Takes the signal's default action away, which ends the process. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn install() -> std::io::Result<Self> {
        let hangup = signal(SignalKind::hangup())?;
        Ok(Self { hangup })
    }

    /// The next one; `None` when there can be no more.
    ///
    /// # Cancel safety
    /// Dropping the future loses none.
    pub async fn next(&mut self) -> Option<()> {
        self.hangup.recv().await
    }
}

/// How often the cores are asked whether they live.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// Fails the daemon when one of the engine's shards has failed or one of its cores has stopped: what is left would
/// answer errors for ever, and its supervisor can start it anew. Ends when it drains.
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

/// At the end of a drain: how long probes, metrics and the admin service have to finish their last answers.
const FAREWELL: Duration = Duration::from_millis(500);

/// What a drain had to cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// Connections that were still open.
    pub connections: usize,
    /// Reads that did not complete.
    pub reads: u64,
}

impl Drained {
    /// Whether nothing was cut off.
    pub fn is_clean(self) -> bool {
        self.connections == 0 && self.reads == 0
    }
}

/// Ends everything in order: no new requests, connections finish, operators' ports close, reads complete. Takes at most `timeout`, of which
/// connections get nine tenths, so that reads of those cut off can still complete.
///
/// # Cancel safety
/// Do not drop the future before it is done: reads may be in flight.
pub async fn drain(
    fetcher: &Fetcher,
    lifecycle: &Lifecycle,
    ports: Vec<Remaining>,
    timeout: Duration,
) -> Drained {
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
        ports.iter().map(Remaining::open).sum()
    };
    // Not earlier: a long HTTP answer is made of many fetches, and the rest of them must not be refused. New requests
    // end with the connections, which take none once they shut down.
    fetcher.start_draining();
    // The cores, on which operators are answered too, end with the engine.
    lifecycle.end();
    let all_closed = join_all(ports.into_iter().map(Remaining::all_closed));
    let _closed_or_cut_off = tokio::time::timeout(FAREWELL.min(timeout / 20), all_closed).await;
    let report = fetcher.engine().drain(started + timeout).await;
    Drained {
        connections,
        reads: report.abandoned_reads,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_engine::batch::Batch;
    use ringfetch_engine::config::{DirectIo, EngineConfig};
    use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, PartialTail};
    use ringfetch_engine::engine::SubmitOptions;
    use ringfetch_engine::error::ReadError;
    use ringfetch_engine::sim::{Fault, FaultPlan, SimControl};

    #[test]
    fn the_state_only_goes_forward() {
        // Scenario: every move in turn, then one back. Expectation: readiness only while serving; no way back.
        let lifecycle = Lifecycle::new();
        assert_eq!(
            (lifecycle.state(), lifecycle.is_ready()),
            (State::Starting, false)
        );
        lifecycle.start_serving();
        assert_eq!((lifecycle.state(), lifecycle.is_ready()), (State::Serving, true));
        lifecycle.start_lame_duck();
        assert_eq!(
            (lifecycle.state(), lifecycle.is_ready()),
            (State::LameDuck, false)
        );
        lifecycle.start_draining();
        lifecycle.start_serving();
        lifecycle.start_lame_duck();
        assert_eq!(
            (lifecycle.state(), lifecycle.is_ready()),
            (State::Draining, false)
        );
    }

    #[tokio::test]
    async fn a_reload_is_told_while_it_lasts() {
        // Scenario: a reload begins and ends, in a daemon that somebody supervises. Expectation: both are seen, and the
        // state is not touched.
        let lifecycle = Lifecycle::new();
        lifecycle.start_serving();
        let mut reloading = lifecycle.subscribe_reloading();
        assert!(!*reloading.borrow_and_update());
        let under_way = lifecycle.start_reloading();
        reloading.changed().await.expect("a change");
        assert!(*reloading.borrow_and_update() && lifecycle.is_ready());
        drop(under_way);
        reloading.changed().await.expect("a change");
        assert!(!*reloading.borrow_and_update() && lifecycle.is_ready());
    }

    #[tokio::test]
    async fn a_shard_that_fails_ends_the_daemon() {
        // Scenario: the engine's only shard panics over a read, as a defect would make it. Expectation: the daemon drains
        // with that as its reason, at once.
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("blocks");
        std::fs::write(&path, [7; 4096]).expect("a file");
        let spec = DatasetSpec {
            name: "b".to_owned(),
            paths: vec![path],
            kind: KindSpec::Blocks {
                block_bytes: 4096,
                partial_tail: PartialTail::Refuse,
            },
            direct_io: DirectIo::Off,
        };
        let dataset = Arc::new(Dataset::open(&spec).expect("a dataset"));
        let control = SimControl::from_environment();
        control.set_faults(FaultPlan {
            script: vec![Fault::Panic],
            ..FaultPlan::default()
        });
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
