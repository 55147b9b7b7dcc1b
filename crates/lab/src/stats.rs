//! Medians, and how far they can be trusted. Pure.

use serde::{Deserialize, Serialize};

/// A ratio closer to 1 than this is no difference, however often it was seen.
const GAIN_MIN: f64 = 0.03;
/// With fewer values no ratio is judged: two agree by chance half of the time.
const JUDGED_MIN: usize = 3;
/// With fewer values than this the median must be further from 1.
const JUDGED_FEW: usize = 5;
const FEW_FACTOR: f64 = 2.5;

/// The confidence that an interval should have, if there are enough values for it.
const CONFIDENCE: f64 = 0.95;

/// What a ratio shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    More,
    Less,
    /// No difference distinguishable from chance.
    Same,
}

/// Summary of some repetitions of one measure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The middle value; for an even count the mean of the two in the middle.
    pub median: f64,
    /// Lower bound of the median's confidence interval.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
    /// Probability that such an interval contains the true median.
    pub confidence: f64,
    /// The smallest value.
    pub least: f64,
    /// The largest value.
    pub most: f64,
    /// Number of values.
    pub count: usize,
}

impl Summary {
    /// Summarises finite values. `None`: there are none.
    ///
    /// The interval is that of order statistics, which assumes no distribution: from the k-th smallest to the
    /// k-th largest of n values, it contains the true median with probability 1 - 2 P(B < k), B binomial with
    /// n and 1/2 (Conover, Practical Nonparametric Statistics, 3.2). Worked: for 5 values, the smallest and
    /// largest, 1 - 2/32 = 0.9375; for 10, the second and ninth, 1 - 2 x 11/1024 = 0.979.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        let (inward, confidence) = interval(values.len());
        Some(Self {
            median: median_of_sorted(&values)?,
            low: *values.get(inward)?,
            high: *values.get(values.len() - 1 - inward)?,
            confidence,
            least,
            most,
            count: values.len(),
        })
    }

    /// Whether there are enough values to judge by their interval.
    pub(crate) fn is_judged(&self) -> bool {
        self.count >= JUDGED_MIN
    }

    /// Whether the interval lies above a bound.
    pub(crate) fn is_above(&self, bound: f64) -> bool {
        self.is_judged() && self.low > bound
    }

    /// Whether the interval lies below a bound.
    pub(crate) fn is_below(&self, bound: f64) -> bool {
        self.is_judged() && self.high < bound
    }

    /// Judges a ratio by logarithms, so that A to B is judged like B to A. It differs from 1 if there are at
    /// least three values, the interval lies on one side, and the median is further from 1 than 3 % and than
    /// half of the interval (for fewer than five values, than 2.5 times that half).
    ///
    /// Two equal sides, however noisy, are judged different by chance in 1 of 18 comparisons of three values
    /// and 1 of 28 of five (20 000 simulated ones each, normally distributed). Worked: 1.08, 1.09, 1.10,
    /// 1.12, 1.15 is more: 10 % > (15 - 8) / 2 %. 1.01, 1.03, 1.05, 1.20, 1.30 is not: 5 % < 14 %.
    pub(crate) fn verdict(&self) -> Verdict {
        let [middle, low, high] = [self.median, self.low, self.high].map(f64::ln);
        let factor = if self.count < JUDGED_FEW { FEW_FACTOR } else { 1.0 };
        let beyond = middle.abs() > (1.0 + GAIN_MIN).ln().max(factor * (high - low) / 2.0);
        match beyond {
            true if self.is_above(1.0) => Verdict::More,
            true if self.is_below(1.0) => Verdict::Less,
            _ => Verdict::Same,
        }
    }

    /// The summary of the inverse ratio.
    pub(crate) fn inverse(&self) -> Self {
        Self {
            median: 1.0 / self.median,
            low: 1.0 / self.high,
            high: 1.0 / self.low,
            least: 1.0 / self.most,
            most: 1.0 / self.least,
            ..*self
        }
    }

    /// `2.00x (1.90 to 2.10)`.
    pub(crate) fn times(&self) -> String {
        format!("{:.2}x ({:.2} to {:.2})", self.median, self.low, self.high)
    }

    /// Whether the intervals of two summaries do not overlap.
    pub fn differs_from(&self, other: &Self) -> bool {
        other.is_judged() && (self.is_below(other.low) || self.is_above(other.high))
    }

    /// Width of the interval, as a share of the median.
    pub fn spread(&self) -> f64 {
        (self.high - self.low) / self.median.abs().max(f64::MIN_POSITIVE)
    }
}

fn median_of_sorted(values: &[f64]) -> Option<f64> {
    let above = *values.get(values.len() / 2)?;
    if values.len() % 2 == 1 {
        return Some(above);
    }
    Some(f64::midpoint(*values.get(values.len() / 2 - 1)?, above))
}

/// How many values are left out at either end, and the confidence that the rest has the median between its
/// ends.
fn interval(count: usize) -> (usize, f64) {
    let n = u32::try_from(count).unwrap_or(u32::MAX).min(1000);
    // P(B = 0), and from there on C(n, i) / 2^n by recurrence.
    let mut probability = 0.5_f64.powi(i32::try_from(n).unwrap_or(i32::MAX));
    let mut below = probability;
    let mut best = (0, (1.0 - 2.0 * below).max(0.0));
    for k in 1..n.div_ceil(2) {
        probability *= f64::from(n - k + 1) / f64::from(k);
        below += probability;
        let confidence = 1.0 - 2.0 * below;
        if confidence < CONFIDENCE {
            break;
        }
        best = (k as usize, confidence);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_of_known_values() {
        // Scenario: five values out of order, an even number, one value, values that are NaN or infinite,
        // none. Expected: the middle and the interval of order statistics; nothing if there are no values.
        let five = Summary::of([5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!((five.median, five.low, five.high, five.count), (3.0, 1.0, 5.0, 5));
        assert!((five.confidence - 0.9375).abs() < 1e-12);
        let ten = Summary::of((1..=10).map(f64::from)).unwrap();
        assert_eq!((ten.median, ten.low, ten.high), (5.5, 2.0, 9.0));
        assert!((ten.confidence - 0.978_515_625).abs() < 1e-12);
        assert_eq!((ten.least, ten.most), (1.0, 10.0));
        let one = Summary::of([7.0]).unwrap();
        assert_eq!((one.low, one.high, one.confidence), (7.0, 7.0, 0.0));
        assert_eq!(Summary::of([f64::NAN, f64::INFINITY]), None);
        let outlier = Summary::of([10.0, 10.0, 900.0, 10.0, 10.0]).unwrap();
        assert_eq!(outlier.median, 10.0);
    }

    #[test]
    fn intervals_contain_the_median_as_often_as_they_say() {
        // Scenario: 4 000 seeded draws each of 5 and 15 values, uniform (median 0.5) and exponential (median ln 2).
        // Expected: the share of intervals that contain the true median lies within 1.5 % of the stated confidence.
        let mut random = fastrand::Rng::with_seed(7);
        for (exponential, median) in [(false, 0.5), (true, std::f64::consts::LN_2)] {
            let shape = |u: f64| if exponential { -(1.0 - u).ln() } else { u };
            for count in [5, 15] {
                let (mut hits, mut stated) = (0.0, 0.0);
                for _ in 0..4000 {
                    let drawn = Summary::of((0..count).map(|_| shape(random.f64()))).unwrap();
                    stated = drawn.confidence;
                    hits += f64::from(u8::from(drawn.low <= median && median <= drawn.high));
                }
                let share = hits / 4000.0;
                assert!((share - stated).abs() < 0.015, "{count}: {share}, {stated}");
            }
        }
    }

    #[test]
    fn only_intervals_that_do_not_touch_differ() {
        // Scenario: ranges apart, overlapping and touching; apart, but of two values. Expected: only the first differ.
        let of = |from: f64| Summary::of([from, from + 1.0, from + 2.0]).unwrap();
        assert!(of(0.0).differs_from(&of(3.0)) && of(3.0).differs_from(&of(0.0)));
        assert!(!of(0.0).differs_from(&of(1.0)) && !of(0.0).differs_from(&of(2.0)));
        let two = |from: f64| Summary::of([from, from + 1.0]).unwrap();
        assert!(!two(0.0).differs_from(&two(3.0)) && !two(0.0).differs_from(&of(3.0)));
        assert!((of(9.0).spread() - 0.2).abs() < 1e-12);
    }

    #[test]
    fn only_ratios_beyond_the_noise_differ() {
        // Scenario: clear gains and losses; a gain below 3 %; one that a value contradicts; one whose
        // interval is as wide as the gain; two values; invalid ratios. Then 2000 comparisons of equal sides,
        // varying by up to 10 % or 50 %, and of five values, 10 %, in which one side is truly 1.25 times as
        // fast. Expected: more and less for the clear ones; at most 1 in 12 of three values and 1 in 20 of
        // five by chance; at least 9 in 10 of the last.
        let verdict = |ratios: &[f64]| {
            let judged = Summary::of(ratios.iter().copied());
            judged.map_or(Verdict::Same, |ratio| ratio.verdict())
        };
        assert_eq!(verdict(&[1.08, 1.09, 1.10, 1.12, 1.15]), Verdict::More);
        assert_eq!(verdict(&[0.80, 0.82, 0.79, 0.81, 0.78]), Verdict::Less);
        for noise in [
            &[1.02, 1.025, 1.029][..],
            &[0.99, 1.20, 1.25, 1.21, 1.22],
            &[1.01, 1.03, 1.05, 1.20, 1.30],
            // Enough for five values, not for three.
            &[1.08, 1.10, 1.17],
            &[2.0, 2.0],
            &[1.0, 1.0, 1.0],
            &[f64::NAN, f64::INFINITY, 0.0],
            &[],
        ] {
            assert_eq!(verdict(noise), Verdict::Same, "{noise:?}");
        }
        let there = Summary::of([1.28, 1.3, 1.35]).unwrap();
        let both = [there, there.inverse()].map(|ratio| ratio.verdict());
        assert_eq!(both, [Verdict::More, Verdict::Less]);
        assert_eq!(there.times(), "1.30x (1.28 to 1.35)");
        let mut random = fastrand::Rng::with_seed(7);
        let mut differing = |values: u32, noise: f64, gain: f64| {
            let differs = |_: &u32| {
                let mut step = || 1.0 - noise + 2.0 * noise * random.f64();
                let ratios: Vec<f64> = (0..values).map(|_| gain * step() / step()).collect();
                verdict(&ratios) != Verdict::Same
            };
            (0..2000).filter(differs).count()
        };
        for (values, most) in [(3, 166), (5, 100)] {
            for noise in [0.1, 0.5] {
                let by_chance = differing(values, noise, 1.0);
                assert!(by_chance <= most, "{values} values, {noise}: {by_chance}");
            }
        }
        let found = differing(5, 0.1, 1.25);
        assert!(found >= 1800, "{found}");
    }
}
