//! Timeouts of connections, checked once per tick for all connections of a core.
//!
//! There are no timers per connection or request, which cost a system call each (ADR 0012): a core with
//! connections checks their counters (`progress`) once per tick, so a timeout is precise to one tick. They count `running_time`.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;
use tokio::time::Instant;

use super::close::{CloseCounters, CloseDecision, CloseReason};
use super::connection_limits::ConnectionLimits;
use super::progress::{PREFACE, Progress};
use super::running_time;
use super::stalls::{StallDetector, is_over};
use crate::caller::CallerKey;
use crate::config::Timeouts;

/// Bounds of a tick, which is a quarter of the shortest timeout.
const TICK_MIN: Duration = Duration::from_millis(10);
const TICK_MAX: Duration = Duration::from_secs(1);
/// A connection that is shutting down and idle is finished after this time.
const GOODBYE: Duration = Duration::from_secs(2);
/// Requests that a client may cancel per second, beyond those that it may have open at once, unless most of its requests complete.
const CANCELLED_PER_S_MAX: u64 = 1000;

/// State of an exchange between ticks.
#[derive(Debug, Default)]
pub(super) struct ExchangeStalls {
    body: StallDetector,
    send: StallDetector,
}

/// State of a connection between ticks.
#[derive(Debug)]
pub(super) struct TimeoutTracker {
    opened: Instant,
    last: Instant,
    /// Spread over a fifth of the age, so that connections opened together do not close together.
    age_permille: u32,
    /// When a head began, as far as was seen.
    head: Option<Instant>,
    /// HTTP/2's list of headers that is incomplete, and since when.
    list: Option<(u32, Instant)>,
    /// When the connection became idle, and the number of its requests by then.
    idle: Option<(Instant, u64)>,
    send: StallDetector,
    cancelled: u64,
    begun: u64,
    /// Cancelled requests beyond [`CANCELLED_PER_S_MAX`], and how many are no flood: when deadlines pass together, a client
    /// cancels all that are open at once.
    cancelled_beyond: u64,
    cancelled_beyond_max: u64,
    leaving: Option<(Instant, CloseReason)>,
    quiet: Option<Instant>,
}

/// The result of a check.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CheckResult {
    decision: Option<CloseDecision>,
    /// Requests aborted because their bodies stalled.
    stalled_bodies: u32,
}

impl TimeoutTracker {
    /// Tracks a new connection; `salt` spreads the ages of connections opened together, `cancelled_max` requests may be
    /// cancelled at once.
    pub(super) fn new(salt: u64, cancelled_max: usize) -> Self {
        let now = running_time::now();
        // 900 to 1099, well spread for consecutive numbers.
        let spread = u32::try_from(salt.wrapping_mul(0x9e37_79b9) % 200).unwrap_or_default();
        Self {
            opened: now,
            last: now,
            age_permille: 900 + spread,
            head: None,
            list: None,
            idle: None,
            send: StallDetector::default(),
            cancelled: 0,
            begun: 0,
            cancelled_beyond: 0,
            cancelled_beyond_max: cancelled_max as u64,
            leaving: None,
            quiet: None,
        }
    }

    /// Checks the counters; called once per tick.
    pub(super) fn check(&mut self, times: &Timeouts, progress: &Progress) -> CheckResult {
        let now = running_time::now();
        let tick = now - std::mem::replace(&mut self.last, now);
        let (mut stalled_bodies, mut stalls_here) = (0, false);
        progress.each_exchange(|exchange, marks| {
            let waits = exchange.waits_for_body();
            let received = exchange.received_bytes();
            if marks
                .body
                .lasts(now, waits, received, times.body_bytes_min, times.body)
            {
                exchange.stall();
                stalled_bodies += 1;
            }
            let sent = exchange.sent_bytes();
            stalls_here |= marks
                .send
                .lasts(now, exchange.owes(), sent, times.send_bytes_min, times.send);
        });
        let written = progress.written_bytes();
        let stalls = self
            .send
            .lasts(now, progress.owes(), written, times.send_bytes_min, times.send);
        let is_old = is_over(now - self.opened, times.connection_age * self.age_permille / 1000);
        if is_old && let Some(leaving @ (_, CloseReason::Idle)) = &mut self.leaving {
            *leaving = (now, CloseReason::Age);
        }
        let waits = match self.leaving {
            Some((since, reason)) => self.leave(now, since, reason, times, progress),
            None if is_old => Some(CloseDecision::GoAway(CloseReason::Age)),
            None if progress.must_leave() => Some(CloseDecision::GoAway(CloseReason::Memory)),
            None if progress.begun() == 0 => self.greet(now, times, progress),
            None => self.next(now, times, progress),
        };
        let close = |closes: bool, reason| closes.then_some(CloseDecision::Close(reason));
        let decision = close(self.floods(tick, progress), CloseReason::Flood)
            .or(close(stalls, CloseReason::Send))
            .or(close(self.list_is_late(now, times, progress), CloseReason::Head))
            .or(waits)
            // Other requests continue: the connection ends when they complete, or when its grace period is over.
            .or((stalls_here && self.leaving.is_none()).then_some(CloseDecision::GoAway(CloseReason::Send)));
        if let (Some(CloseDecision::GoAway(reason)), None) = (decision, self.leaving) {
            self.leaving = Some((now, reason));
        }
        CheckResult {
            decision,
            stalled_bodies,
        }
    }

    /// Whether a list of headers has been incomplete for too long, whatever else is open: h2 keeps it, up to 48 KiB.
    fn list_is_late(&mut self, now: Instant, times: &Timeouts, progress: &Progress) -> bool {
        let open = progress.frames.open_list();
        if self.list.map(|(list, _)| list) != open {
            self.list = open.map(|list| (list, now));
        }
        self.list
            .is_some_and(|(_, since)| is_over(now - since, times.head))
    }

    fn floods(&mut self, tick: Duration, progress: &Progress) -> bool {
        progress.allow_more(tick);
        let (cancelled, begun) = (progress.cancelled(), progress.begun());
        let more = cancelled - self.cancelled;
        let others = (begun - self.begun).saturating_sub(more);
        (self.cancelled, self.begun) = (cancelled, begun);
        let allowed = u64::try_from(tick.as_millis())
            .unwrap_or(u64::MAX)
            .saturating_mul(CANCELLED_PER_S_MAX)
            / 1000;
        self.cancelled_beyond = if more > others {
            (self.cancelled_beyond + more).saturating_sub(allowed)
        } else {
            0
        };
        self.cancelled_beyond > self.cancelled_beyond_max
    }

    /// During a graceful shutdown.
    fn leave(
        &mut self,
        now: Instant,
        since: Instant,
        reason: CloseReason,
        times: &Timeouts,
        progress: &Progress,
    ) -> Option<CloseDecision> {
        let is_quiet = progress.is_quiet();
        // An idle connection has nothing in flight: what its client has yet to receive of an answer is waited for when it closes.
        if is_over(now - since, times.connection_age_grace) && !(is_quiet && reason == CloseReason::Idle) {
            return Some(CloseDecision::Close(reason));
        }
        // Whoever is about to end by itself has had time to. The rest is for the answers.
        if is_over(now - since, times.connection_age_grace / 2) {
            progress.each_exchange(|exchange, _| exchange.leave());
        }
        if is_quiet {
            let quiet = *self.quiet.get_or_insert(now);
            // An HTTP/1 client learns of the close only with its next response.
            let patience = if progress.closes_by_response() {
                times.idle
            } else {
                GOODBYE
            };
            if is_over(now - quiet, patience) {
                return Some(CloseDecision::Finish(reason));
            }
        } else {
            self.quiet = None;
        }
        None
    }

    /// Before the first request.
    fn greet(&mut self, now: Instant, times: &Timeouts, progress: &Progress) -> Option<CloseDecision> {
        if progress.read_bytes() < PREFACE.len() as u64 {
            return is_over(now - self.opened, times.handshake)
                .then_some(CloseDecision::Close(CloseReason::Handshake));
        }
        let begins = *self.head.get_or_insert(now);
        let late = is_over(now - begins, times.head);
        late.then_some(if progress.is_http2() {
            CloseDecision::GoAway(CloseReason::Head)
        } else {
            CloseDecision::Close(CloseReason::Head)
        })
    }

    /// Between requests.
    fn next(&mut self, now: Instant, times: &Timeouts, progress: &Progress) -> Option<CloseDecision> {
        let begun = progress.begun();
        let is_idle = progress.is_quiet();
        if !is_idle || self.idle.is_none_or(|(_, before)| before != begun) {
            (self.idle, self.head) = (None, None);
        }
        if !is_idle {
            return None;
        }
        let (since, _) = *self.idle.get_or_insert((now, begun));
        // With HTTP/2 these bytes may be pings; an incomplete list of headers is looked for above.
        if !progress.is_http2() && progress.head_bytes() > 0 {
            let begins = *self.head.get_or_insert(now);
            if is_over(now - begins, times.head) {
                return Some(CloseDecision::Close(CloseReason::Head));
            }
        }
        is_over(now - since, times.idle).then_some(CloseDecision::GoAway(CloseReason::Idle))
    }
}

/// A connection that its core checks.
struct WatchedConnection {
    watch: TimeoutTracker,
    progress: Arc<Progress>,
    close_counters: Arc<CloseCounters>,
    caller: CallerKey,
}

/// The connections of a core.
#[derive(Default)]
struct CoreConnections {
    watched: Slab<WatchedConnection>,
    ticks: bool,
}

thread_local! {
    static CORE: RefCell<CoreConnections> = RefCell::default();
}

/// While this exists, the calling core checks a connection. Created and dropped on that core.
#[derive(Debug)]
pub(super) struct WatchGuard {
    key: usize,
}

impl WatchGuard {
    /// Starts checking a connection.
    pub(super) fn start(
        watch: TimeoutTracker,
        progress: &Arc<Progress>,
        close_counters: &Arc<CloseCounters>,
        caller: CallerKey,
        connection_limits: &ConnectionLimits,
    ) -> Self {
        CORE.with_borrow_mut(|core| {
            let key = core.watched.insert(WatchedConnection {
                watch,
                progress: Arc::clone(progress),
                close_counters: Arc::clone(close_counters),
                caller,
            });
            if !std::mem::replace(&mut core.ticks, true) {
                tokio::spawn(tick(connection_limits.clone()));
            }
            Self { key }
        })
    }
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        // At the end of the thread the connections are already gone.
        let _gone = CORE.try_with(|core| {
            if let Ok(mut core) = core.try_borrow_mut() {
                core.watched.try_remove(self.key);
            }
        });
    }
}

/// The time between two checks.
fn period(times: &Timeouts) -> Duration {
    let limits = [
        times.handshake,
        times.head,
        times.body,
        times.send,
        times.idle,
        times.connection_age,
        times.connection_age_grace,
    ];
    let shortest = limits.into_iter().filter(|limit| !limit.is_zero()).min();
    shortest.map_or(TICK_MAX, |shortest| (shortest / 4).clamp(TICK_MIN, TICK_MAX))
}

/// Counts the buffers that h2 may keep for this core's connections; returns whether some connections have to be closed.
fn count_buffers() -> bool {
    CORE.with_borrow(|core| {
        let mut is_due = false;
        for (_, watched) in &core.watched {
            is_due |= watched.progress.is_http2() && watched.progress.count_buffers();
        }
        is_due
    })
}

/// Checks all connections of a core periodically, while it has any.
async fn tick(connection_limits: ConnectionLimits) {
    loop {
        let times = connection_limits.timeouts();
        running_time::tick(period(&times)).await;
        connection_limits.reclaim_kept(count_buffers());
        let goes_on = CORE.with_borrow_mut(|core| {
            for (_, watched) in &mut core.watched {
                let CheckResult {
                    decision,
                    stalled_bodies,
                } = watched.watch.check(&times, &watched.progress);
                for _ in 0..stalled_bodies {
                    watched.close_counters.count(CloseReason::Body, watched.caller);
                }
                if let Some(decision) = decision {
                    watched.progress.decide(decision);
                }
            }
            if core.watched.is_empty() {
                core.watched.shrink_to_fit();
                core.ticks = false;
            }
            core.ticks
        });
        if !goes_on {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
