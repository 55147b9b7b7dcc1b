//! When the requests of an open loop arrive: evenly or at random, at a constant rate or along a ramp.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokio::time::Instant;

/// Requests a second at the start and at the end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ramp {
    /// At the start.
    pub from: f64,
    /// At the end.
    pub to: f64,
}

impl Ramp {
    /// One rate from the start to the end.
    pub fn constant(rate: f64) -> Self {
        Self { from: rate, to: rate }
    }
}

/// How requests arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// Evenly.
    Constant,
    /// Independently of one another, as many callers' are.
    Poisson,
}

impl std::fmt::Display for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Constant => "constant",
            Self::Poisson => "Poisson",
        })
    }
}

/// How many requests have arrived by a time: a constant rate during the warm-up, then a linear ramp from one
/// rate to another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Profile {
    pub(crate) warmup_s: f64,
    /// Requests a second.
    pub(crate) from: f64,
    pub(crate) to: f64,
    /// `None`: unlimited; then both rates are equal.
    pub(crate) window_s: Option<f64>,
}

impl Profile {
    pub(super) fn new(warmup_s: f64, Ramp { from, to }: Ramp, window_s: Option<f64>) -> Self {
        Self {
            warmup_s,
            from,
            to,
            window_s,
        }
    }

    fn acceleration(&self) -> f64 {
        self.window_s
            .map_or(0.0, |window_s| (self.to - self.from) / window_s)
    }

    /// Requests that have arrived this long after the beginning, with a fraction of the next one.
    pub(crate) fn arrived(&self, seconds: f64) -> f64 {
        let into = (seconds - self.warmup_s).clamp(0.0, self.window_s.unwrap_or(f64::MAX));
        self.from * seconds.min(self.warmup_s) + (self.from + self.acceleration() * into / 2.0) * into
    }

    /// Seconds until `arrivals` requests have arrived; `None`: never, within the window.
    fn at(&self, arrivals: f64) -> Option<f64> {
        let before = self.from * self.warmup_s;
        if arrivals < before {
            return Some(arrivals / self.from);
        }
        // from * t + acceleration * t^2 / 2 = n, in a form without cancellation that also holds for
        // acceleration 0: 0 to 1000/s in 10 s, n = 1250: 2 * 1250 / (0 + sqrt(2 * 100 * 1250)) = 5 s.
        let n = arrivals - before;
        let root = (self.from * self.from + 2.0 * self.acceleration() * n).sqrt();
        let seconds = if n > 0.0 {
            2.0 * n / (self.from + root)
        } else {
            0.0
        };
        let inside = self.window_s.is_none_or(|window_s| seconds < window_s);
        // NaN: the rate falls to 0 before this many have arrived.
        (inside && seconds.is_finite()).then_some(self.warmup_s + seconds)
    }
}

/// The arrival times of one thread's requests.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) begin: Instant,
    profile: Profile,
    spacing: Spacing,
    threads: f64,
    /// The next arrival.
    due: Option<Instant>,
}

#[derive(Debug)]
pub(crate) enum Spacing {
    /// Number of this thread's next arrival among those of all threads.
    Constant { next: f64 },
    /// A Poisson process at rate 1, stretched to the profile (time rescaling: Brown et al., Neural
    /// Computation 14, 2002). The threads' processes add up to one at the whole rate.
    Poisson { sum: f64, random: fastrand::Rng },
}

impl Schedule {
    pub(crate) fn new(begin: Instant, profile: Profile, spacing: Spacing, threads: f64) -> Self {
        let due = None;
        let mut schedule = Self {
            begin,
            profile,
            spacing,
            threads,
            due,
        };
        schedule.advance();
        schedule
    }

    /// The next arrival; `None`: there are no more.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Moves on to the following arrival.
    pub(crate) fn advance(&mut self) {
        let arrivals = match &mut self.spacing {
            Spacing::Constant { next } => {
                let arrivals = *next;
                *next += self.threads;
                arrivals
            }
            Spacing::Poisson { sum, random } => {
                // 1 - [0, 1) is never 0, so the logarithm is finite.
                *sum -= (1.0 - random.f64()).ln();
                *sum * self.threads
            }
        };
        let due = self.profile.at(arrivals);
        self.due = due
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .and_then(|after| self.begin.checked_add(after));
    }

    /// Counts the remaining arrivals between two instants, and drops all of them.
    pub(crate) fn give_up(&mut self, from: Instant, end: Option<Instant>) -> u64 {
        let mut missed = 0;
        while let Some(due) = self.due.take().filter(|due| end.is_some_and(|end| *due < end)) {
            missed += u64::from(due >= from);
            self.advance();
        }
        missed
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::approximate;

    fn profile(warmup_s: f64, from: f64, to: f64, window_s: Option<f64>) -> Profile {
        Profile::new(warmup_s, Ramp { from, to }, window_s)
    }

    fn arrivals(profile: Profile, arrivals: Arrivals, thread: u32, threads: u32) -> Vec<f64> {
        let begin = Instant::now();
        let spacing = match arrivals {
            Arrivals::Constant => Spacing::Constant { next: thread.into() },
            Arrivals::Poisson => Spacing::Poisson {
                sum: 0.0,
                random: fastrand::Rng::with_seed(11 + u64::from(thread)),
            },
        };
        let mut schedule = Schedule::new(begin, profile, spacing, threads.into());
        let mut seconds = Vec::new();
        while let Some(due) = schedule.due {
            seconds.push((due - begin).as_secs_f64());
            schedule.advance();
        }
        seconds
    }

    #[test]
    fn constant_arrivals_are_even_over_all_threads() {
        // Scenario: 1000/s for 1 s of warm-up and a window of 2 s, over three threads. Expected: 3000
        // arrivals in total, exactly 1 ms apart.
        let profile = profile(1.0, 1000.0, 1000.0, Some(2.0));
        let mut all: Vec<f64> = (0..3)
            .flat_map(|thread| arrivals(profile, Arrivals::Constant, thread, 3))
            .collect();
        all.sort_by(f64::total_cmp);
        assert_eq!(all.len(), 3000);
        assert!(
            all.windows(2)
                .all(|pair| (pair[1] - pair[0] - 0.001).abs() < 1e-6)
        );
    }

    #[test]
    fn poisson_arrivals_have_the_mean_and_the_variance_of_one() {
        // Scenario: 1000/s for 100 s from two threads, fixed seeds: gaps, and counts in windows of 100 ms.
        // Expected: 100 000 arrivals +- 1 %; gaps with a mean of 1 ms and as large a standard deviation +- 2 %;
        // counts whose variance is their mean, 100, +- 15 %.
        let profile = profile(0.0, 1000.0, 1000.0, Some(100.0));
        let mut all: Vec<f64> = (0..2)
            .flat_map(|thread| arrivals(profile, Arrivals::Poisson, thread, 2))
            .collect();
        all.sort_by(f64::total_cmp);
        let count = |length: usize| approximate(u64::try_from(length).unwrap());
        assert!((99_000..=101_000).contains(&all.len()), "{}", all.len());
        let gaps: Vec<f64> = all.windows(2).map(|pair| (pair[1] - pair[0]) * 1000.0).collect();
        let moments = |values: &[f64]| {
            let mean = values.iter().sum::<f64>() / count(values.len());
            let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
            (mean, squares / count(values.len()))
        };
        let (mean, variance) = moments(&gaps);
        assert!(
            (mean - 1.0).abs() < 0.02 && (variance.sqrt() - 1.0).abs() < 0.02,
            "{mean} {variance}"
        );
        let counts: Vec<f64> = (0..1000u32)
            .map(|window| {
                let from = f64::from(window) / 10.0;
                count(all.iter().filter(|at| (from..from + 0.1).contains(*at)).count())
            })
            .collect();
        let (mean, variance) = moments(&counts);
        assert!((variance / mean - 1.0).abs() < 0.15, "{mean} {variance}");
    }

    #[test]
    fn a_ramp_has_the_area_under_its_line() {
        // Scenario: 0 to 1000/s and 1000/s to 0 in 10 s, 100/s to 300/s in 4 s after 1 s of warm-up.
        // Expected: 5000 each (counted from 0; the falling one without the last, which never arrives), and
        // 100 + 800; half of the arrivals after sqrt(1/2) of the rising time; the number on the way.
        let rising = profile(0.0, 0.0, 1000.0, Some(10.0));
        let up = arrivals(rising, Arrivals::Constant, 0, 1);
        assert_eq!(up.len(), 5000);
        assert!((up[2500] - 10.0 * 0.5f64.sqrt()).abs() < 1e-6);
        let falling = profile(0.0, 1000.0, 0.0, Some(10.0));
        assert_eq!(arrivals(falling, Arrivals::Constant, 0, 1).len(), 5000);
        let third = profile(1.0, 100.0, 300.0, Some(4.0));
        assert_eq!(arrivals(third, Arrivals::Constant, 0, 1).len(), 900);
        let arrived = [0.5, 1.0, 3.0, 9.0].map(|seconds| third.arrived(seconds));
        assert_eq!(arrived, [50.0, 100.0, 400.0, 900.0]);
    }
}
