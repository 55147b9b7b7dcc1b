//! When a request may start, and whether it counts. A closed loop: as soon as the slot is free, until the window or
//! the number of requests is used up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A slot that got an error waits at least this long: a server that refuses at once must not be flooded, and a
/// measurement of refusals is none.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

/// The clock of a run, shared by all slots.
#[derive(Debug)]
pub(crate) struct Pacer {
    measure_from: Instant,
    until: Option<Instant>,
    /// Requests still to be measured.
    left: Option<AtomicU64>,
    stopped: AtomicBool,
}

/// Leave to send one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    /// From when its latency counts. In a closed loop: now.
    pub(crate) start: Instant,
    /// Whether it is inside the measured window.
    pub(crate) measured: bool,
}

impl Pacer {
    /// Measures for `window` from an instant on.
    pub(crate) fn window(measure_from: Instant, window: Duration) -> Self {
        let until = measure_from.checked_add(window);
        Self {
            measure_from,
            until,
            left: None,
            stopped: AtomicBool::new(false),
        }
    }

    /// Measures so many requests from an instant on.
    pub(crate) fn count(measure_from: Instant, requests: u64) -> Self {
        let left = Some(AtomicU64::new(requests));
        Self {
            measure_from,
            until: None,
            left,
            stopped: AtomicBool::new(false),
        }
    }

    /// The next request of a free slot; `None`: the run is over.
    pub(crate) fn next(&self) -> Option<Turn> {
        self.next_at(Instant::now())
    }

    fn next_at(&self, start: Instant) -> Option<Turn> {
        if self.stopped.load(Ordering::Relaxed) || self.until.is_some_and(|until| start >= until) {
            return None;
        }
        let measured = start >= self.measure_from;
        if measured && let Some(left) = &self.left {
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                .ok()?;
        }
        Some(Turn { start, measured })
    }

    /// What a slot waits after an error: the server's hint, if it gave one, but not past the end.
    pub(crate) async fn pause(&self, hint: Option<Duration>) {
        let resume = Instant::now()
            + hint
                .unwrap_or_default()
                .clamp(ERROR_PAUSE, Duration::from_secs(1));
        let resume = self.until.map_or(resume, |until| resume.min(until));
        tokio::time::sleep_until(resume.into()).await;
    }

    /// Ends the run now; what is in flight is waited for.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// How long has been measured so far.
    pub(crate) fn measured(&self) -> Duration {
        self.measure_from.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_starts_inside_the_window_is_measured() {
        // Scenario: a window of 2 s after 1 s of warm-up, asked before, inside, at its end, and after a stop.
        // Expected: not measured; measured; over; over.
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let pacer = Pacer::window(at(1000), Duration::from_secs(2));
        assert_eq!(
            pacer.next_at(at(999)),
            Some(Turn {
                start: at(999),
                measured: false
            })
        );
        assert_eq!(
            pacer.next_at(at(1000)),
            Some(Turn {
                start: at(1000),
                measured: true
            })
        );
        assert_eq!(pacer.next_at(at(3000)), None);
        pacer.stop();
        assert_eq!(pacer.next_at(at(2000)), None);
    }

    #[test]
    fn a_count_is_of_measured_requests() {
        // Scenario: two requests to be measured; three turns in the warm-up, then three after it.
        // Expected: the first three are free, then two are measured, then it is over.
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let pacer = Pacer::count(at(1000), 2);
        let turns: Vec<_> = [0, 1, 2, 1000, 1001, 1002]
            .map(|ms| pacer.next_at(at(ms)).map(|turn| turn.measured))
            .to_vec();
        assert_eq!(
            turns,
            [
                Some(false),
                Some(false),
                Some(false),
                Some(true),
                Some(true),
                None
            ]
        );
    }
}
