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
mod tests {
    use super::super::close;
    use super::super::progress::{ConnectionEvent, SeenEvents};
    use super::*;
    use std::task::Poll;

    const HEAD: &[u8] = b"GET /v1/datasets HTTP/1.1\r\n";

    /// Checks once a second, at most this many times, until there is a decision; returns when, and which.
    async fn until_decided(
        watch: &mut TimeoutTracker,
        times: &Timeouts,
        progress: &Progress,
        most: u64,
    ) -> Option<(u64, CloseDecision)> {
        for second in 1..=most {
            tokio::time::advance(Duration::from_secs(1)).await;
            if let Some(decision) = watch.check(times, progress).decision {
                return Some((second, decision));
            }
        }
        None
    }

    fn times() -> Timeouts {
        let seconds = Duration::from_secs;
        Timeouts {
            handshake: seconds(5),
            head: seconds(10),
            body: seconds(20),
            body_bytes_min: 100,
            send: seconds(20),
            send_bytes_min: 100,
            idle: seconds(50),
            connection_age: seconds(1000),
            connection_age_grace: seconds(30),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_does_not_begin_is_closed() {
        // Scenario: 23 bytes; an HTTP/1 head that stays incomplete; a preface without a request. Expectation:
        // closed with reason handshake; closed with reason head; closed gracefully with reason head.
        let mut watch = TimeoutTracker::new(0, 256);
        let progress = Progress::default();
        progress.read(&PREFACE[..23]);
        let decided = until_decided(&mut watch, &times(), &progress, 60).await;
        assert_eq!(decided, Some((5, CloseDecision::Close(CloseReason::Handshake))));
        for (bytes, decision) in [
            (HEAD, CloseDecision::Close(CloseReason::Head)),
            (PREFACE, CloseDecision::GoAway(CloseReason::Head)),
        ] {
            let mut watch = TimeoutTracker::new(0, 256);
            let progress = Progress::default();
            progress.read(bytes);
            let decided = until_decided(&mut watch, &times(), &progress, 60).await;
            assert_eq!(decided, Some((11, decision)));
        }
        // Without timeouts, never.
        let off = Timeouts {
            handshake: Duration::ZERO,
            ..times()
        };
        let mut watch = TimeoutTracker::new(0, 256);
        assert_eq!(
            until_decided(&mut watch, &off, &Progress::default(), 800).await,
            None
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_head_has_its_own_time_and_an_idle_connection_another() {
        // Scenario: a request every six seconds, the half of whose head arrives that much earlier, then nothing; the same, then
        // half a head. Expectation: closed gracefully, then finished; closed at once.
        let progress = Arc::new(Progress::default());
        progress.read(HEAD);
        let mut watch = TimeoutTracker::new(0, 256);
        for _ in 0..10 {
            drop(progress.open(true));
            progress.read(HEAD);
            assert_eq!(until_decided(&mut watch, &times(), &progress, 6).await, None);
        }
        drop(progress.open(true));
        let decided = until_decided(&mut watch, &times(), &progress, 60).await;
        assert_eq!(decided, Some((51, CloseDecision::GoAway(CloseReason::Idle))));
        let decided = until_decided(&mut watch, &times(), &progress, 60).await;
        assert_eq!(decided, Some((3, CloseDecision::Finish(CloseReason::Idle))));

        let mut watch = TimeoutTracker::new(0, 256);
        assert_eq!(until_decided(&mut watch, &times(), &progress, 5).await, None);
        progress.read(HEAD);
        let decided = until_decided(&mut watch, &times(), &progress, 60).await;
        assert_eq!(decided, Some((11, CloseDecision::Close(CloseReason::Head))));
    }

    #[tokio::test(start_paused = true)]
    async fn who_receives_the_end_of_an_answer_is_not_cut_off_for_being_idle() {
        // Scenario: a connection is idle for long; its last answer is written, but the client takes its time to receive it.
        // Expectation: it is finished, which waits for the client, and closed only for its age.
        let progress = Arc::new(Progress::default());
        progress.read(HEAD);
        let mut watch = TimeoutTracker::new(0, 256);
        drop(progress.open(true));
        progress.set_unreceived(true);
        let idle = CloseDecision::GoAway(CloseReason::Idle);
        assert_eq!(
            until_decided(&mut watch, &times(), &progress, 60).await,
            Some((51, idle))
        );
        let mut since = 51;
        let close = loop {
            match until_decided(&mut watch, &times(), &progress, 2000).await {
                Some((more, CloseDecision::Finish(_))) => since += more,
                decided => break decided,
            }
        };
        assert_eq!(close, Some((1, CloseDecision::Close(CloseReason::Age))));
        assert!((929..1130).contains(&since), "{since}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_brings_no_data_begins_no_head() {
        // Scenario: after a request over TLS, a record without data. Expectation: the connection is idle.
        let progress = Arc::new(Progress::default());
        progress.read(HEAD);
        let mut watch = TimeoutTracker::new(0, 256);
        drop(progress.open(true));
        progress.received(26);
        let decided = until_decided(&mut watch, &times(), &progress, 60).await;
        assert_eq!(decided, Some((51, CloseDecision::GoAway(CloseReason::Idle))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_must_bring_bytes_and_a_stream_may_pause() {
        // Scenario: a body that arrives at 10 bytes a second; one at 4; one whose response has begun.
        // Expectation: only the second is aborted.
        for (bytes_per_s, has_answer, stalls) in [(10, false, false), (4, false, true), (0, true, false)] {
            let progress = Arc::new(Progress::default());
            progress.read(HEAD);
            let mut watch = TimeoutTracker::new(0, 256);
            let exchange = progress.open(false);
            if has_answer {
                exchange.mark_answered();
            }
            let mut stalled = 0;
            for _ in 0..60 {
                tokio::time::advance(Duration::from_secs(1)).await;
                exchange.received(bytes_per_s);
                std::future::poll_fn(|cx| {
                    exchange.await_body(cx);
                    Poll::Ready(())
                })
                .await;
                let look = watch.check(&times(), &progress);
                assert_eq!(look.decision, None);
                stalled += look.stalled_bodies;
            }
            assert_eq!((stalled, exchange.is_stalled()), (u32::from(stalls), stalls));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_must_be_taken() {
        // Scenario: a response that is read at 10 bytes a second; at 4; at 4 next to another one that is read
        // fast; a blocked socket. Expectation: continues; closed; closed gracefully, then at once after the
        // grace period; closed.
        for (bytes_per_s, fast, expected) in [
            (10, 0, None),
            (4, 0, Some((21, CloseDecision::Close(CloseReason::Send)))),
            (4, 1000, Some((21, CloseDecision::GoAway(CloseReason::Send)))),
        ] {
            let progress = Arc::new(Progress::default());
            progress.read(PREFACE);
            let mut watch = TimeoutTracker::new(0, 256);
            let (slow, other) = (progress.open(true), progress.open(true));
            slow.produced(1 << 20);
            other.produced(if fast > 0 { 1 << 20 } else { 0 });
            let mut decided = Vec::new();
            for second in 1..=60 {
                tokio::time::advance(Duration::from_secs(1)).await;
                slow.sent(bytes_per_s);
                other.sent(fast);
                progress.wrote(&Poll::Ready(Ok::<_, ()>(bytes_per_s + fast)));
                decided.extend(
                    watch
                        .check(&times(), &progress)
                        .decision
                        .map(|decision| (second, decision)),
                );
            }
            assert_eq!(decided.first().copied(), expected, "{decided:?}");
            if fast > 0 {
                assert_eq!(
                    decided.get(1),
                    Some(&(51, CloseDecision::Close(CloseReason::Send)))
                );
            }
        }
        let progress = Arc::new(Progress::default());
        progress.read(PREFACE);
        let _open = progress.open(true);
        progress.wrote(&Poll::<Result<usize, ()>>::Pending);
        let mut watch = TimeoutTracker::new(0, 256);
        let decided = until_decided(&mut watch, &times(), &progress, 60).await;
        assert_eq!(decided, Some((21, CloseDecision::Close(CloseReason::Send))));
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_connection_leaves_and_gets_its_grace() {
        // Scenario: connections with a request that never ends. Expectation: each is closed gracefully at a
        // slightly different age, its request is told so after half of the grace period, and it is closed at once after
        // all of it.
        let mut ages = Vec::new();
        for salt in 0..20 {
            let progress = Arc::new(Progress::default());
            progress.read(HEAD);
            let mut watch = TimeoutTracker::new(salt, 256);
            let stream = progress.open(true);
            let (age, decision) = until_decided(&mut watch, &times(), &progress, 1200)
                .await
                .unwrap();
            assert_eq!(decision, CloseDecision::GoAway(CloseReason::Age));
            assert!((900..1101).contains(&age), "{age}");
            ages.push(age);
            for is_leaving in [false, true] {
                assert_eq!(until_decided(&mut watch, &times(), &progress, 14).await, None);
                assert_eq!(stream.is_leaving(), is_leaving);
            }
            let decided = until_decided(&mut watch, &times(), &progress, 60).await;
            assert_eq!(decided, Some((2, CloseDecision::Close(CloseReason::Age))));
        }
        ages.sort_unstable();
        ages.dedup();
        assert!(ages.len() > 10, "{ages:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_connection_of_http1_may_ask_again_until_it_is_idle() {
        // Scenario: a connection that becomes too old, sends one more request, takes ten seconds to read the response, and then
        // sends nothing, with HTTP/1 and with HTTP/2. Expectation: closed after the idle timeout, and soon after the response.
        let times = Timeouts {
            connection_age_grace: Duration::from_secs(300),
            ..times()
        };
        for (beginning, seconds) in [(HEAD, 51), (PREFACE, 3)] {
            let progress = Arc::new(Progress::default());
            progress.read(beginning);
            let mut watch = TimeoutTracker::new(0, 256);
            let request = progress.open(true);
            let (_, decision) = until_decided(&mut watch, &times, &progress, 1200).await.unwrap();
            assert_eq!(decision, CloseDecision::GoAway(CloseReason::Age));
            progress.decide(decision);
            drop(request);
            assert_eq!(until_decided(&mut watch, &times, &progress, 1).await, None);
            let request = progress.open(true);
            assert_eq!(until_decided(&mut watch, &times, &progress, 100).await, None);
            drop(request);
            progress.wrote(&Poll::<Result<usize, ()>>::Pending);
            assert_eq!(until_decided(&mut watch, &times, &progress, 10).await, None);
            progress.wrote(&Poll::Ready(Ok::<_, ()>(1)));
            let decided = until_decided(&mut watch, &times, &progress, 60).await;
            assert_eq!(decided, Some((seconds, CloseDecision::Finish(CloseReason::Age))));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_core_checks_connections_as_long_as_it_has_any() {
        // Scenario: a connection that sends nothing; then none; then another one that sends nothing. Expectation: both are told
        // to close after their time, and nothing is kept of them.
        let caller = CallerKey::of([192, 0, 2, 1].into());
        let registry = prometheus::Registry::new();
        let counters = CloseCounters::new(&close::metric(&registry).unwrap(), "grpc");
        let limits = ConnectionLimits::new(&crate::config::Limits::default(), 4096);
        limits.set_timeouts(&times());
        for _ in 0..2 {
            let (progress, mut seen) = (Arc::new(Progress::default()), SeenEvents::default());
            let guard = WatchGuard::start(TimeoutTracker::new(0, 256), &progress, &counters, caller, &limits);
            let event = std::future::poll_fn(|cx| progress.poll_event(cx, &mut seen));
            let event = tokio::time::timeout(times().head, event).await;
            let close = CloseDecision::Close(CloseReason::Handshake);
            assert_eq!(event, Ok(ConnectionEvent::Close(close)));
            drop(guard);
            tokio::time::sleep(2 * TICK_MAX).await;
            assert!(CORE.with_borrow(|core| core.watched.is_empty()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_requests_that_may_be_open_may_be_cancelled_at_once() {
        // Scenario: ticks of 75 ms, in the first of which a client cancels the 256 requests that it may have open, as when
        // their deadlines pass; the same again and again. Expectation: only the latter is a flood.
        let progress = Arc::new(Progress::default());
        progress.read(PREFACE);
        let mut watch = TimeoutTracker::new(0, 256);
        let mut tick = async || {
            (0..256).for_each(|_| drop(progress.open(true)));
            tokio::time::advance(Duration::from_millis(75)).await;
            watch.check(&times(), &progress).decision
        };
        assert_eq!(tick().await, None);
        assert_eq!(tick().await, Some(CloseDecision::Close(CloseReason::Flood)));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_are_given_up_by_the_thousand_are_a_flood() {
        // Scenario: 500 cancelled requests a second; 5000 requests, half of them answered; 5000 cancelled; for three seconds.
        // Expectation: only the last is a flood.
        for (given_up, answered, expected) in [
            (500, 0, None),
            (2500, 2500, None),
            (5000, 0, Some(CloseDecision::Close(CloseReason::Flood))),
        ] {
            let progress = Arc::new(Progress::default());
            progress.read(PREFACE);
            let mut watch = TimeoutTracker::new(0, 256);
            for _ in 0..3 {
                (0..given_up).for_each(|_| drop(progress.open(true)));
                (0..answered).for_each(|_| progress.open(true).mark_answered());
                tokio::time::advance(Duration::from_secs(1)).await;
                assert_eq!(watch.check(&times(), &progress).decision, expected, "{given_up}");
            }
        }
    }
}
