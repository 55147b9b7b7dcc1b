//! Searches for the highest rate that meets an objective: up in a geometric series until a rate breaks it,
//! then between the last that held and the first that did not. Pure: from the results so far to the next
//! rate.

/// Factor between two steps up.
const FACTOR: f64 = 2.0;
/// The search ends when the knee is between two rates at most this ratio apart.
const RATIO: f64 = 1.05;
/// Most steps of a search: 20 doublings, and the halvings between the last two.
const STEPS_MAX: usize = 30;
/// If a larger share of arrivals was never sent, the rate was not driven at all.
pub(crate) const MISSED_SHARE_MAX: f64 = 0.001;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Search {
    start: f64,
    /// The highest rate that held, the lowest that did not.
    held: Option<f64>,
    broken: Option<f64>,
    steps: usize,
}

impl Search {
    /// A search that starts at this rate.
    pub(crate) fn new(start: f64) -> Self {
        Self {
            start,
            held: None,
            broken: None,
            steps: 0,
        }
    }

    /// The next rate to try; `None`: the search has ended.
    pub(crate) fn next(&self) -> Option<f64> {
        if self.steps >= STEPS_MAX {
            return None;
        }
        match (self.held, self.broken) {
            (None, None) => Some(self.start),
            (Some(held), None) => Some(held * FACTOR),
            // The geometric mean: between 1000 and 4000 lies 2000.
            (Some(held), Some(broken)) => (broken / held > RATIO).then(|| (held * broken).sqrt()),
            // Even the first rate was too high: go down, as far as makes sense.
            (None, Some(broken)) => (broken > self.start / 64.0).then_some(broken / FACTOR),
        }
    }

    pub(crate) fn record(&mut self, rate: f64, held: bool) {
        self.steps += 1;
        let end = if held { &mut self.held } else { &mut self.broken };
        *end = Some(rate);
    }

    /// The highest rate that held.
    pub(crate) fn knee(&self) -> Option<f64> {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(start: f64, holds: impl Fn(f64) -> bool) -> (Option<f64>, usize) {
        let (mut search, mut steps) = (Search::new(start), 0);
        while let Some(rate) = search.next() {
            search.record(rate, holds(rate));
            steps += 1;
        }
        (search.knee(), steps)
    }

    #[test]
    fn the_knee_is_found_from_below_and_from_above() {
        // A server that holds up to 3700/s, one that holds nothing, one that holds everything.
        for start in [100.0, 50_000.0, 3700.0] {
            let (knee, steps) = search(start, |rate| rate <= 3700.0);
            let knee = knee.unwrap();
            assert!(
                (3700.0 / 1.05..=3700.0).contains(&knee) && steps <= 14,
                "{start}: {knee} in {steps}"
            );
        }
        let (knee, steps) = search(1000.0, |_| false);
        assert!(knee.is_none() && steps <= 8, "{steps}");
        assert_eq!(search(1.0, |_| true).1, STEPS_MAX);
    }
}
