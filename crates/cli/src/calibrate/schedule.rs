//! How long each step may take, so that the whole takes what was asked for. Pure: it is told the time.
//!
//! A step costs more than it measures (an engine starts and ends, a file is evicted), by an amount nobody knows before,
//! so each slice is cut from what is left then, less what a step has cost beside its slice so far.

use std::time::{Duration, Instant};

/// Shorter ones would measure the start. It may make the whole longer than asked for.
const SLICE_MIN: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Schedule {
    end: Instant,
    left: u32,
    done: u32,
    /// What the steps so far took beside their slices.
    beside: Duration,
}

impl Schedule {
    pub(super) fn new(now: Instant, budget: Duration, steps: u32) -> Self {
        Self {
            end: now + budget,
            left: steps,
            done: 0,
            beside: Duration::ZERO,
        }
    }

    /// How long the next step is to measure. Worked: 50 s left, 100 steps, 0.1 s beside each: 0.4 s.
    pub(super) fn slice(&self, now: Instant) -> Duration {
        let each = self.end.saturating_duration_since(now) / self.left.max(1);
        let beside = self.beside / self.done.max(1);
        each.saturating_sub(beside).max(SLICE_MIN)
    }

    /// A step has measured for `slice` and took `whole`.
    pub(super) fn took(&mut self, slice: Duration, whole: Duration) {
        self.left = self.left.saturating_sub(1);
        self.done += 1;
        self.beside += whole.saturating_sub(slice);
    }

    /// So many steps turned out to be needless; the others get their time.
    pub(super) fn skip(&mut self, steps: u32) {
        self.left = self.left.saturating_sub(steps);
    }

    /// Steps done and still to do.
    pub(super) fn steps(&self) -> (u32, u32) {
        (self.done, self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_takes_what_was_asked_for() {
        // Scenario: 40 steps in 20 s, each of which costs 0.1 s beside its slice, ten of them left out half way.
        // Expected: over after 20 s, within one step; no slice below the least.
        let begin = Instant::now();
        let (mut now, mut schedule) = (begin, Schedule::new(begin, Duration::from_secs(20), 40));
        for step in 0..30 {
            if step == 15 {
                schedule.skip(10);
            }
            let slice = schedule.slice(now);
            assert!(slice >= SLICE_MIN);
            let whole = slice + Duration::from_millis(100);
            schedule.took(slice, whole);
            now += whole;
        }
        assert_eq!(schedule.steps(), (30, 0));
        let seconds = (now - begin).as_secs_f64();
        assert!((19.0..=20.2).contains(&seconds), "{seconds}");
    }

    #[test]
    fn a_budget_that_is_used_up_leaves_the_shortest_slices() {
        // Scenario: the end has passed and steps are left. Expected: the shortest slice, no panic.
        let begin = Instant::now();
        let schedule = Schedule::new(begin, Duration::from_secs(1), 10);
        assert_eq!(schedule.slice(begin + Duration::from_secs(5)), SLICE_MIN);
    }
}
