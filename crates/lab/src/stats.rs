//! Medians, and how far they can be trusted. Pure.

use serde::{Deserialize, Serialize};

/// The confidence that an interval should have, where there are enough values for it.
const CONFIDENCE: f64 = 0.95;

/// What some repetitions of one measure say together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The middle value; of an even number the mean of the two in the middle.
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
    /// Values.
    pub count: usize,
}

impl Summary {
    /// Summarises finite values. `None`: there are none.
    ///
    /// The interval is that of order statistics, which assumes no distribution: from the k-th smallest to the k-th
    /// largest of n values it has the true median with probability 1 - 2 P(B < k), B binomial with n and 1/2 (Conover,
    /// Practical Nonparametric Statistics, 3.2). Worked: of 5 values, the smallest and largest, 1 - 2/32 = 0.9375; of 10,
    /// the second and ninth, 1 - 2 x 11/1024 = 0.979.
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

    /// Whether the intervals of two summaries do not touch.
    pub fn differs_from(&self, other: &Self) -> bool {
        self.high < other.low || other.high < self.low
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

/// How many values are left out at either end, and the confidence that the rest has the median between its ends.
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
        // Scenario: five values out of order, an even number, one value, values that are no numbers, none.
        // Expected: the middle and the interval of order statistics; nothing where there is nothing.
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
                assert!(
                    (share - stated).abs() < 0.015,
                    "{count}: {share} against {stated}"
                );
            }
        }
    }

    #[test]
    fn only_intervals_that_do_not_touch_differ() {
        // Scenario: ranges apart, overlapping and touching. Expected: only the first differ.
        let of = |from: f64| Summary::of([from, from + 1.0, from + 2.0]).unwrap();
        assert!(of(0.0).differs_from(&of(3.0)) && of(3.0).differs_from(&of(0.0)));
        assert!(!of(0.0).differs_from(&of(1.0)) && !of(0.0).differs_from(&of(2.0)));
        assert!((of(9.0).spread() - 0.2).abs() < 1e-12);
    }
}
