//! Starting, serving, draining: one state that readiness, the transports and the admin service read, and what moves it.
//!
//! The state only goes forward. Draining begins with a signal or with a failure of the engine, and tells everybody
//! through one `watch` channel. Deliberately absent: restarts in place, and pausing.

use std::sync::{Arc, OnceLock};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// What the daemon is doing. It only moves down this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Not ready yet.
    Starting,
    /// Ready.
    Serving,
    /// Not ready any more: what was accepted is answered, nothing new is.
    Draining,
}

impl State {
    /// The word in answers and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Draining => "draining",
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

    /// Moves on to serving. Does nothing once it drains.
    pub fn start_serving(&self) {
        self.advance(State::Serving);
    }

    /// Moves on to draining.
    pub fn start_draining(&self) {
        self.advance(State::Draining);
    }

    /// Moves on to draining because something broke: the process will end with an error. The first reason counts.
    pub fn fail(&self, reason: impl Into<String>) {
        let reason = reason.into();
        tracing::error!(reason, "the daemon cannot go on");
        let _first_counts = self.failure.set(reason);
        self.start_draining();
    }

    /// Why it broke, if it did.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Resolves once it drains.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn draining(&self) {
        // The sender lives in `self`, so the channel cannot be closed.
        let mut state = self.subscribe();
        let _never_closed = state.wait_for(|state| *state == State::Draining).await;
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

/// Exit code of a process that a second signal ended: 128 + SIGINT, as shells say it.
const EXIT_SECOND_SIGNAL: i32 = 130;

/// Drains on the first SIGTERM or SIGINT and ends the process at once on the second.
///
/// # Errors
/// The signal handlers cannot be installed.
///
/// # Cancel safety
/// Dropping the future leaves the signals without effect (their default action stays replaced).
pub async fn drain_on_signals(lifecycle: Lifecycle) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut next = async || {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    };
    let first = next().await;
    tracing::info!(
        signal = first,
        "draining; a second signal ends the process at once"
    );
    lifecycle.start_draining();
    let second = next().await;
    tracing::warn!(
        signal = second,
        "second signal: ending at once, requests in flight are cut off"
    );
    std::process::exit(EXIT_SECOND_SIGNAL);
}

#[cfg(test)]
mod tests {
    use super::*;

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
        lifecycle.start_draining();
        lifecycle.start_serving();
        assert_eq!(
            (lifecycle.state(), lifecycle.is_ready()),
            (State::Draining, false)
        );
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
