//! When a request may start, when its latency begins, and whether it is measured.
//!
//! A closed loop starts the next request as soon as a slot is free. An open loop has a schedule of arrivals
//! that is independent of the answers: a request's latency begins at its arrival, even if all slots were busy
//! then, so that every request that a stall would have delayed shows it (no coordinated omission). Invariant:
//! every arrival of the measured window is either sent or counted as missed. What is left of the warm-up when
//! the window begins is dropped: a rate that cannot be met would fill the window with it.

use crate::alarm::Alarm;
use crate::approximate;
use crate::schedule::{Arrivals, Profile, Ramp, Schedule, Spacing};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// After an error a slot waits at least this long: a server that refuses at once must not be flooded, and
/// measuring refusals is pointless. Only in a closed loop; in an open one the rate is the bound.
const ERROR_PAUSE: Duration = Duration::from_millis(10);
/// How long after the window arrivals that found no slot are still sent. Later ones are missed.
const GRACE: Duration = Duration::from_millis(100);
/// How often a slot that waits for an arrival checks whether the run was stopped, or another thread has sent the last
/// request.
const STOP_CHECK: Duration = Duration::from_millis(100);
/// Arrivals closer than this are sent together: a timer system call and a socket system call per request cost
/// as much CPU as everything else, on a machine that the server may share (ADR 0012). A request waits at most
/// this long for later ones, its latency begins at its own arrival, and the report shows the lateness.
/// [`Queue::take`] decides.
const TOGETHER: Duration = Duration::from_micros(100);

/// The clock of one measurement, shared by all slots of all threads.
#[derive(Debug)]
pub struct Pacer {
    begin: Instant,
    measure_from: Instant,
    until: Option<Instant>,
    /// Requests still to be measured.
    left: Option<AtomicU64>,
    /// Requests to measure, if not for a time.
    count: Option<u64>,
    /// When the run was stopped.
    stopped: OnceLock<Instant>,
    /// Stops it, for those who do not know this pacer.
    stop: Arc<AtomicBool>,
    /// For an open loop.
    open: Option<(Profile, Arrivals)>,
    /// Arrivals of the window that were never sent.
    missed: AtomicU64,
}

/// Permission to send one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permit {
    /// When its latency begins: now, or at its arrival in an open loop.
    pub start: Instant,
    /// Whether it is inside the measured window.
    pub measured: bool,
    /// Whether it arrived when all slots were busy.
    pub late: bool,
}

impl Pacer {
    /// Warms up from `begin`, then measures for a time or for a number of requests. `open`: how requests
    /// arrive.
    pub fn new(
        begin: Instant,
        warmup: Duration,
        window: Result<Duration, u64>,
        open: Option<(Ramp, Arrivals)>,
    ) -> Self {
        let measure_from = begin + warmup;
        let window_s = window.ok().map(|window| window.as_secs_f64());
        let profile = |ramp| Profile::new(warmup.as_secs_f64(), ramp, window_s);
        Self {
            begin,
            measure_from,
            until: window.ok().and_then(|window| measure_from.checked_add(window)),
            left: window.err().map(AtomicU64::new),
            count: window.err(),
            stopped: OnceLock::new(),
            stop: Arc::default(),
            open: open.map(|(ramp, arrivals)| (profile(ramp), arrivals)),
            missed: AtomicU64::new(0),
        }
    }

    /// The same, which `stop` stops, too.
    #[must_use]
    pub fn ended_by(self, stop: Arc<AtomicBool>) -> Self {
        Self { stop, ..self }
    }

    /// Ends the run now; requests in flight are awaited.
    pub fn stop(&self) {
        let _ = self.stopped.set(Instant::now());
    }

    /// Whether it was stopped.
    pub fn is_stopped(&self) -> bool {
        if self.stop.load(Ordering::Relaxed) {
            self.stop();
        }
        self.stopped.get().is_some()
    }

    /// When the warm-up begins.
    pub fn begin(&self) -> Instant {
        self.begin
    }

    /// When the measured window begins.
    pub fn measure_from(&self) -> Instant {
        self.measure_from
    }

    /// When the window ended or will end: at its end, or when it was stopped. `None` yet for a number of
    /// requests.
    pub fn end(&self) -> Option<Instant> {
        [self.until, self.stopped.get().copied()]
            .into_iter()
            .flatten()
            .min()
    }

    /// How long requests arrive in the window of an open loop: until its end, or until the last of a number of requests
    /// is due. `None`: unknown.
    pub fn arriving(&self) -> Option<Duration> {
        let window = self
            .end()
            .map(|end| end.saturating_duration_since(self.measure_from));
        // A number of requests arrives at a constant rate.
        let counted = self.count.zip(self.open).and_then(|(count, (profile, _))| {
            Duration::try_from_secs_f64(approximate(count) / profile.from).ok()
        });
        [window, counted].into_iter().flatten().min()
    }

    /// Measured time so far.
    pub fn measured(&self) -> Duration {
        let now = Instant::now();
        self.end()
            .map_or(now, |end| end.min(now))
            .saturating_duration_since(self.measure_from)
    }

    /// Whether requests arrive by a schedule.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Arrivals a second over an interval, in an open loop: those that are due in it and in the window, or of its number
    /// of requests. `None`: the interval is empty, too.
    pub fn rate_between(&self, from: Instant, to: Instant) -> Option<f64> {
        let (profile, _) = self.open.as_ref()?;
        let since_begin = |at: Instant| at.saturating_duration_since(self.begin).as_secs_f64();
        let of_warm_up = profile.arrived(since_begin(self.measure_from));
        let count = self.count.map_or(f64::INFINITY, approximate);
        let arrived = |at: Instant| {
            let at = self.end().map_or(at, |end| at.min(end)).max(self.measure_from);
            (profile.arrived(since_begin(at)) - of_warm_up).min(count)
        };
        let length = to.saturating_duration_since(from);
        (!length.is_zero()).then(|| (arrived(to) - arrived(from)) / length.as_secs_f64())
    }

    /// Arrivals of the window that were never sent.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    /// Waits after an error: as long as the server's hint, if there is one, but not past the end.
    pub async fn pause(&self, hint: Option<Duration>) {
        if self.open.is_some() {
            return;
        }
        let resume = Instant::now()
            + hint
                .unwrap_or_default()
                .clamp(ERROR_PAUSE, Duration::from_secs(1));
        tokio::time::sleep_until(self.until.map_or(resume, |until| resume.min(until))).await;
    }

    /// Whether the last of a number of requests has started.
    fn is_counted(&self) -> bool {
        let left = self.left.as_ref();
        left.is_some_and(|left| left.load(Ordering::Relaxed) == 0)
    }

    /// Counts arrivals that will not be sent, at most as many as are left of a number of requests.
    fn give_up(&self, arrivals: u64) {
        let missed = self.left.as_ref().map_or(arrivals, |left| {
            let take = |left: u64| Some(left.saturating_sub(arrivals));
            let left = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
            left.unwrap_or_else(|left| left).min(arrivals)
        });
        self.missed.fetch_add(missed, Ordering::Relaxed);
    }

    /// The permit of a request that starts at `start`; `None`: all requests have been measured.
    fn permit(&self, start: Instant, late: bool) -> Option<Permit> {
        let measured = start >= self.measure_from;
        if measured && let Some(left) = &self.left {
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                .ok()?;
        }
        Some(Permit {
            start,
            measured,
            late,
        })
    }
}

/// One thread's source of permits.
#[derive(Debug)]
pub struct Gate {
    pacer: Arc<Pacer>,
    /// For an open loop. The slot that holds the lock waits for the next arrival, the others for the lock; it
    /// is fair, so the slot that has been free longest comes first.
    arrivals: Option<Mutex<Queue>>,
}

#[derive(Debug)]
struct Queue {
    schedule: Schedule,
    alarm: Alarm,
    /// When the first request of the last group was sent.
    group: Instant,
}

/// What to do with the next arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Send it; it arrived at this instant.
    Send(Instant),
    /// Do not send anything before this instant.
    Wait(Instant),
    /// There are no more.
    Over,
}

impl Queue {
    /// Drops the arrivals before `from`.
    fn skip_to(&mut self, from: Instant) {
        while self.schedule.due().is_some_and(|due| due < from) {
            self.schedule.advance();
        }
    }

    /// Takes the next arrival if it is to be sent at `now`. Requests that had arrived when the last group
    /// began belong to that group; a new group begins when something has arrived, and no sooner than
    /// [`TOGETHER`] after the last one. Does not read the clock, and may be called at any time and any number
    /// of times.
    fn take(&mut self, now: Instant) -> Next {
        let Some(due) = self.schedule.due() else {
            return Next::Over;
        };
        let starts_group = due > self.group;
        let leaves = if starts_group {
            due.max(self.group + TOGETHER)
        } else {
            due
        };
        if now < leaves {
            return Next::Wait(leaves);
        }
        if starts_group {
            self.group = now;
        }
        self.schedule.advance();
        Next::Send(due)
    }
}

impl Gate {
    /// The gate of thread `thread` of `threads`, each of which gets an even share of the arrivals.
    pub fn new(pacer: Arc<Pacer>, thread: u32, threads: u32, seed: u64, alarm: Alarm) -> Self {
        let arrivals = pacer.open.map(|(profile, arrivals)| {
            let spacing = match arrivals {
                Arrivals::Constant => Spacing::Constant { next: thread.into() },
                Arrivals::Poisson => Spacing::Poisson {
                    sum: 0.0,
                    random: fastrand::Rng::with_seed(seed),
                },
            };
            let schedule = Schedule::new(pacer.begin, profile, spacing, threads.into());
            Mutex::new(Queue {
                schedule,
                alarm,
                group: pacer.begin,
            })
        });
        Self { pacer, arrivals }
    }

    /// The next request of a slot that has been free since `free_since`; `None`: the run has ended.
    pub async fn next(&self, free_since: Instant) -> Option<Permit> {
        let pacer = &*self.pacer;
        let Some(arrivals) = &self.arrivals else {
            let now = Instant::now();
            let is_over = pacer.is_stopped() || pacer.end().is_some_and(|end| now >= end);
            return if is_over { None } else { pacer.permit(now, false) };
        };
        let mut arrivals = arrivals.lock().await;
        loop {
            let now = Instant::now();
            if pacer.is_stopped() || pacer.end().is_some_and(|end| now >= end + GRACE) {
                // The rest will not be sent: count it as missed.
                pacer.give_up(arrivals.schedule.give_up(pacer.measure_from, pacer.end()));
                return None;
            }
            if pacer.is_counted() {
                return None;
            }
            if now >= pacer.measure_from {
                arrivals.skip_to(pacer.measure_from);
            }
            match arrivals.take(now) {
                Next::Over => return None,
                Next::Wait(until) => arrivals.alarm.wait(until.min(now + STOP_CHECK)).await,
                Next::Send(due) => {
                    let permit = pacer.permit(due, due < free_since);
                    drop(arrivals);
                    // The slots of all due requests pass here before the first of them sends, so that one
                    // write per connection sends them all.
                    tokio::task::yield_now().await;
                    return permit;
                }
            }
        }
    }
}

/// A number of arrivals as a rate over this time.
pub fn per_second(count: u64, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        approximate(count) / time.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn gate(pacer: Pacer) -> Gate {
        Gate::new(Arc::new(pacer), 0, 1, 7, Alarm::Coarse)
    }

    #[tokio::test(start_paused = true)]
    async fn what_starts_inside_the_window_is_measured() {
        // A closed loop with a window of 2 s after 1 s of warm-up: a request before, inside, and after a
        // stop; and one at its end.
        let begin = Instant::now();
        let gate = gate(Pacer::new(begin, ms(1000), Ok(ms(2000)), None));
        let late = false;
        let permit = |start, measured| {
            Some(Permit {
                start,
                measured,
                late,
            })
        };
        assert_eq!(gate.next(begin).await, permit(begin, false));
        tokio::time::advance(ms(1000)).await;
        assert_eq!(gate.next(begin).await, permit(begin + ms(1000), true));
        gate.pacer.stop();
        assert_eq!(gate.next(begin).await, None);
        let gate = self::gate(Pacer::new(begin, ms(0), Ok(ms(1000)), None));
        assert_eq!(gate.next(begin).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_count_is_of_measured_requests() {
        // Scenario: two requests to measure; three turns in the warm-up, then three after it; closed and
        // open. Expected: the first three are not measured, then two are, then the run has ended.
        for open in [None, Some((Ramp::constant(3.0), Arrivals::Constant))] {
            let begin = Instant::now();
            let gate = gate(Pacer::new(begin, ms(1000), Err(2), open));
            let mut measured = Vec::new();
            for permit in 0..6 {
                if permit == 3 {
                    tokio::time::advance(ms(1000).saturating_sub(begin.elapsed())).await;
                }
                measured.push(gate.next(begin).await.map(|permit| permit.measured));
            }
            let [warm_up, measures] = [false, true].map(Some);
            assert_eq!(
                measured,
                [warm_up, warm_up, warm_up, measures, measures, None],
                "{open:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_of_an_interval_is_that_of_its_arrivals() {
        // Scenario: 0 to 1000/s in 10 s after 1 s of warm-up; then it is stopped in the middle; 100 requests at 80/s. Expected:
        // half a second of arrivals in the first second, and none outside the window; 80 and 20 in a second. A closed loop
        // has none. They arrive for 10 s, then 5 s; the 100 in 1.25 s, though it is stopped later.
        let begin = Instant::now();
        let (from, to) = (0.0, 1000.0);
        let open = Some((Ramp { from, to }, Arrivals::Constant));
        let pacer = Pacer::new(begin, ms(1000), Ok(ms(10_000)), open);
        let between = |from: u64, to: u64| {
            let rate = pacer.rate_between(begin + ms(from), begin + ms(to));
            rate.map(|rate| (rate * 10.0).round())
        };
        assert_eq!(between(0, 1000), Some(0.0));
        assert_eq!(between(1000, 2000), Some(500.0));
        assert_eq!(between(10_000, 11_000), Some(9500.0));
        assert_eq!(between(10_500, 11_500), Some(4875.0));
        assert_eq!(between(11_200, 12_200), Some(0.0));
        assert_eq!(between(11_000, 11_000), None);
        assert_eq!(pacer.arriving(), Some(ms(10_000)));
        tokio::time::advance(ms(6000)).await;
        pacer.stop();
        assert_eq!(pacer.arriving(), Some(ms(5000)));
        assert_eq!(between(5000, 7000), Some(2250.0));
        let (from, to) = (80.0, 80.0);
        let open = Some((Ramp { from, to }, Arrivals::Constant));
        let counted = Pacer::new(begin, ms(1000), Err(100), open);
        let seconds = [0, 1000, 2000, 3000];
        let rates = seconds.map(|at| counted.rate_between(begin + ms(at), begin + ms(at + 1000)));
        assert_eq!(rates, [0.0, 80.0, 20.0, 0.0].map(Some));
        assert_eq!(counted.arriving(), Some(ms(1250)));
        counted.stop();
        assert_eq!(counted.arriving(), Some(ms(1250)));
        let closed = Pacer::new(begin, ms(1000), Ok(ms(10_000)), None);
        assert_eq!(closed.rate_between(begin, begin + ms(2000)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_count_ends_with_its_last_request() {
        // Scenario: two requests at one a second, by one thread, and by a thread whose slot waits when another one
        // takes the last request. Expected: no slot waits for a third arrival.
        for threads in 1..=2 {
            let begin = Instant::now();
            let open = Some((Ramp::constant(1.0), Arrivals::Constant));
            let pacer = Arc::new(Pacer::new(begin, ms(0), Err(2), open));
            let gates: Vec<_> = (0..threads)
                .map(|thread| Gate::new(Arc::clone(&pacer), thread, threads, 7, Alarm::Coarse))
                .collect();
            let mut slots = tokio::task::JoinSet::new();
            for gate in gates {
                slots.spawn(async move { while gate.next(begin).await.is_some() {} });
            }
            while slots.join_next().await.is_some() {}
            // The other thread notices it as late as a stop. The clock is the test's.
            assert!(begin.elapsed() <= ms(1000) + STOP_CHECK, "{threads} threads");
        }
    }

    /// Arrivals at a constant rate, starting at `begin`.
    fn constant(begin: Instant, rate: f64) -> Queue {
        let profile = Profile::new(0.0, Ramp::constant(rate), None);
        let schedule = Schedule::new(begin, profile, Spacing::Constant { next: 0.0 }, 1.0);
        let (alarm, group) = (Alarm::Coarse, begin);
        Queue {
            schedule,
            alarm,
            group,
        }
    }

    /// What is sent when polled at these microseconds, as often as there is something to send: (sending time,
    /// arrivals, end of the wait after it) of each group.
    fn groups(arrivals: &mut Queue, asked: impl IntoIterator<Item = u64>) -> Vec<(u64, Vec<u128>, u128)> {
        let begin = arrivals.schedule.begin;
        let after = |instant: Instant| (instant - begin).as_micros();
        let mut groups = Vec::new();
        for now_us in asked {
            let now = begin + Duration::from_micros(now_us);
            let mut sent = Vec::new();
            let until = loop {
                match arrivals.take(now) {
                    Next::Send(due) => sent.push(after(due)),
                    Next::Wait(until) => break until,
                    Next::Over => panic!("these arrivals never end"),
                }
            };
            assert!(until > now, "a wait that is over would be a busy loop");
            if !sent.is_empty() {
                groups.push((now_us, sent, after(until)));
            }
        }
        groups
    }

    #[test]
    fn what_arrives_close_together_is_sent_together() {
        // Scenario: an arrival every 25 us; polled when the last answer said so, and at every microsecond, as
        // early alarms and other slots do. Expected: the same both times: the first one at once, then groups
        // at multiples of `TOGETHER`, each with all that has arrived by then.
        let every_100_us = [
            (0, vec![0], 100),
            (100, vec![25, 50, 75, 100], 200),
            (200, vec![125, 150, 175, 200], 300),
            (300, vec![225, 250, 275, 300], 400),
        ];
        let mut followed = constant(Instant::now(), 40_000.0);
        let mut now = 0;
        for group in &every_100_us {
            assert_eq!(groups(&mut followed, [now]), std::slice::from_ref(group));
            now = u64::try_from(group.2).unwrap();
        }
        assert_eq!(
            groups(&mut constant(Instant::now(), 40_000.0), 0..400),
            every_100_us
        );
    }

    #[test]
    fn nothing_waits_longer_than_for_its_group() {
        // Scenario: an arrival every 40 us, polled at 150 us, which is late for the group of 100 us, and then
        // at every microsecond; one every 250 us, polled at every microsecond. Expected: a late poll sends
        // all that has arrived and keeps the distance from then on; a lone arrival is sent when it arrives.
        let mut late = constant(Instant::now(), 25_000.0);
        assert_eq!(
            groups(&mut late, [0].into_iter().chain(150..400)),
            [
                (0, vec![0], 100),
                (150, vec![40, 80, 120], 250),
                (250, vec![160, 200, 240], 350),
                (350, vec![280, 320], 450),
            ]
        );
        assert_eq!(
            groups(&mut constant(Instant::now(), 4_000.0), 0..600),
            [(0, vec![0], 250), (250, vec![250], 500), (500, vec![500], 750)]
        );
    }

    #[test]
    fn nothing_is_sent_before_the_run_begins() {
        let now = Instant::now();
        let begin = now + ms(1000);
        let mut arrivals = constant(begin, 40_000.0);
        assert_eq!(arrivals.take(now), Next::Wait(begin));
        assert_eq!(arrivals.take(begin), Next::Send(begin));
    }

    #[tokio::test(start_paused = true)]
    async fn arrivals_that_find_no_slot_are_late_and_what_is_never_sent_is_missed() {
        // Scenario: one arrival every 100 ms for 1 s; the only slot is busy from 150 ms to 450 ms, and from
        // 550 ms until 2 s. Expected: arrivals at 0 and 100 on time; 200, 300 and 400 late, each with its own
        // start; 500 on time; the four after that, which were never sent, are missed.
        let begin = Instant::now();
        let open = Some((Ramp::constant(10.0), Arrivals::Constant));
        let gate = gate(Pacer::new(begin, ms(0), Ok(ms(1000)), open));
        let (mut free, mut turns) = (begin, Vec::new());
        for permit in 0..6 {
            if permit == 2 {
                tokio::time::sleep_until(begin + ms(450)).await;
                free = Instant::now();
            }
            let permit = gate.next(free).await.unwrap();
            turns.push(((permit.start - begin).as_millis(), permit.late));
        }
        let late = [(200, true), (300, true), (400, true)];
        assert_eq!(
            turns,
            [&[(0, false), (100, false)][..], &late, &[(500, false)]].concat()
        );
        tokio::time::sleep_until(begin + ms(2000)).await;
        assert_eq!(gate.next(Instant::now()).await, None);
        assert_eq!((gate.pacer.missed(), gate.next(begin).await), (4, None));
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_is_missed_than_was_left_of_a_count() {
        // Scenario: so many requests at 10 a second, of two threads; after two permits 5 s pass without a free slot, then it
        // is stopped. Expected: what is missed is what is left of them, and had arrived by then.
        for (count, missed) in [(2, 0), (3, 1), (12, 10), (1000, 48)] {
            let begin = Instant::now();
            let open = Some((Ramp::constant(10.0), Arrivals::Constant));
            let pacer = Arc::new(Pacer::new(begin, ms(0), Err(count), open));
            let gate = |thread| Gate::new(Arc::clone(&pacer), thread, 2, 7, Alarm::Coarse);
            let gates = [gate(0), gate(1)];
            for gate in &gates {
                assert!(gate.next(begin).await.is_some());
            }
            tokio::time::sleep_until(begin + ms(5000)).await;
            pacer.stop();
            for gate in &gates {
                assert_eq!(gate.next(begin).await, None);
            }
            assert_eq!(pacer.missed(), missed, "of {count}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_backlog_of_the_warm_up_is_not_sent_in_the_window() {
        // Scenario: an arrival every 100 ms, 1 s of warm-up and a window of 1 s; the only slot is busy for the
        // first 1250 ms. Expected: the next requests are the window's, each measured from its own arrival, and
        // none is missed.
        let begin = Instant::now();
        let open = Some((Ramp::constant(10.0), Arrivals::Constant));
        let gate = gate(Pacer::new(begin, ms(1000), Ok(ms(1000)), open));
        tokio::time::sleep_until(begin + ms(1250)).await;
        let mut starts = Vec::new();
        while let Some(permit) = gate.next(Instant::now()).await {
            assert!(permit.measured, "{permit:?}");
            starts.push((permit.start - begin).as_millis());
        }
        let window: Vec<u128> = (10..20).map(|arrival| arrival * 100).collect();
        assert_eq!((starts, gate.pacer.missed()), (window, 0));
    }
}
