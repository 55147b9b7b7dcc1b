//! What measurements mean: the knee of a curve, and whether one setting beats another. Pure.
//!
//! Both rules are made for machines that do other things too. A curve's points are medians of passes over the whole
//! curve, so that a slow minute does not dent one point. Two settings are compared in pairs of steps that follow each
//! other, A B, B A, A B, and only the ratios inside the pairs count, so that a machine that drifts moves both sides.

use serde::Serialize;

/// The knee is the smallest setting that reaches this share of the best.
pub(super) const KNEE_SHARE: f64 = 0.95;
/// A smaller difference is none, however often it was seen.
pub(super) const GAIN_MIN: f64 = 0.03;
/// With fewer pairs nothing is judged: two agree by chance half of the time.
const PAIRS_MIN: usize = 3;
/// With fewer pairs than this the median has to be further out.
const PAIRS_FEW: usize = 5;
const FEW_FACTOR: f64 = 2.5;

/// The middle one; of an even number the mean of the two in the middle.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    let above = values.get(values.len() / 2).copied()?;
    if values.len() % 2 == 1 {
        return Some(above);
    }
    let below = values.get(values.len() / 2 - 1).copied()?;
    Some(f64::midpoint(below, above))
}

/// Where a curve of (setting, reads/s), in ascending order of the setting, bends: the index of the smallest setting that
/// reaches [`KNEE_SHARE`] of the best, and that of the best (of equals the first).
pub(super) fn knee(curve: &[(u32, f64)]) -> Option<(usize, usize)> {
    let mut best = 0;
    for (index, (_, reads)) in curve.iter().enumerate() {
        if *reads > curve.get(best)?.1 {
            best = index;
        }
    }
    let enough = curve.get(best)?.1 * KNEE_SHARE;
    let knee = curve.iter().position(|(_, reads)| *reads >= enough)?;
    Some((knee, best))
}

/// How B does beside A.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Better,
    Worse,
    /// No difference that could be told from chance.
    WithinNoise,
}

/// The ratios B / A of some pairs, and what they mean. Above 1, B is better.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Judgement {
    pub(super) verdict: Verdict,
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) pairs: usize,
}

/// Judges the ratios of pairs. B is better (or worse) when
/// 1. there are at least three pairs,
/// 2. all of them say so, and
/// 3. the median is further from 1 than 3 %, and further than half of what lies between the lowest and the highest; with
///    fewer than five pairs, than 2.5 times that half.
///
/// Two equal sides, however noisy, are told apart by chance in 1 of 18 comparisons of three pairs, 1 of 28 of five and 1
/// of 150 of seven (20 000 simulated ones each, normally distributed). Worked, five pairs: 1.08, 1.09, 1.10, 1.12, 1.15 is
/// better: 10 % > (15 - 8) / 2 %. 1.01, 1.03, 1.05, 1.20, 1.30 is noise: 5 % < 14 %. Ratios are compared by their
/// logarithms, so that A beside B is judged as B beside A.
pub(super) fn judge(ratios: &[f64]) -> Option<Judgement> {
    let logs: Vec<f64> = ratios
        .iter()
        .filter(|ratio| ratio.is_finite() && **ratio > 0.0)
        .map(|ratio| ratio.ln())
        .collect();
    let middle = median(logs.iter().copied())?;
    let low = logs.iter().copied().fold(f64::INFINITY, f64::min);
    let high = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let factor = if logs.len() < PAIRS_FEW { FEW_FACTOR } else { 1.0 };
    let beyond = middle.abs() > (1.0 + GAIN_MIN).ln().max(factor * (high - low) / 2.0);
    let verdict = if logs.len() < PAIRS_MIN || !beyond {
        Verdict::WithinNoise
    } else if low > 0.0 {
        Verdict::Better
    } else if high < 0.0 {
        Verdict::Worse
    } else {
        Verdict::WithinNoise
    };
    Some(Judgement {
        verdict,
        median: middle.exp(),
        low: low.exp(),
        high: high.exp(),
        pairs: logs.len(),
    })
}

/// Which of two settings to take, and by what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Choice {
    SecondByReads,
    FirstByReads,
    /// As many reads, for less CPU.
    SecondByCpu,
    FirstByCpu,
    /// Neither is better: the default stays.
    Default,
}

/// Reads a second decide; where they are within the noise, CPU a read does.
pub(super) fn choose(reads: &Judgement, cpu: Option<&Judgement>) -> Choice {
    match (reads.verdict, cpu.map(|cpu| cpu.verdict)) {
        (Verdict::Better, _) => Choice::SecondByReads,
        (Verdict::Worse, _) => Choice::FirstByReads,
        (Verdict::WithinNoise, Some(Verdict::Better)) => Choice::SecondByCpu,
        (Verdict::WithinNoise, Some(Verdict::Worse)) => Choice::FirstByCpu,
        (Verdict::WithinNoise, Some(Verdict::WithinNoise) | None) => Choice::Default,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(ratios: &[f64]) -> Verdict {
        judge(ratios).map_or(Verdict::WithinNoise, |judgement| judgement.verdict)
    }

    #[test]
    fn the_knee_is_the_smallest_setting_that_is_nearly_best() {
        // Scenario: a curve that saturates, one that falls again, a flat one, one that only rises, one point, none.
        // Expected: the smallest setting at 95 % of the best, beside the best; nothing for no points.
        let saturating = [
            (1, 17.0),
            (4, 40.0),
            (16, 74.0),
            (64, 89.0),
            (128, 92.0),
            (256, 92.5),
        ];
        assert_eq!(knee(&saturating), Some((3, 5)));
        assert_eq!(knee(&[(1, 10.0), (2, 20.0), (4, 19.5), (8, 12.0)]), Some((1, 1)));
        assert_eq!(knee(&[(1, 10.0), (2, 9.9), (4, 10.1)]), Some((0, 2)));
        assert_eq!(knee(&[(1, 1.0), (2, 2.0), (4, 4.0)]), Some((2, 2)));
        assert_eq!(knee(&[(1, 5.0)]), Some((0, 0)));
        assert_eq!(knee(&[]), None);
    }

    #[test]
    fn a_noisy_point_moves_the_median_little() {
        // Scenario: three passes of which one was disturbed; even numbers; what is no number; nothing.
        // Expected: the middle one, the mean of two, the numbers only, nothing.
        assert_eq!(median([90.0, 12.0, 88.0]), Some(88.0));
        assert_eq!(median([1.0, 2.0]), Some(1.5));
        assert_eq!(median([f64::NAN, 3.0, f64::INFINITY]), Some(3.0));
        assert_eq!(median([]), None);
    }

    #[test]
    fn only_what_is_beyond_the_noise_pays() {
        // Scenario: clear gains and losses; a gain below 3 %; one that a pair contradicts; one as wide as it is high;
        // two pairs only; ratios that are none.
        // Expected: better and worse for the clear ones, within the noise for all others.
        assert_eq!(verdict(&[1.08, 1.09, 1.10, 1.12, 1.15]), Verdict::Better);
        assert_eq!(verdict(&[0.80, 0.82, 0.79, 0.81, 0.78]), Verdict::Worse);
        for noise in [
            &[1.02, 1.025, 1.029][..],
            &[0.99, 1.20, 1.25, 1.21, 1.22],
            &[1.01, 1.03, 1.05, 1.20, 1.30],
            // Enough for five pairs, not for three.
            &[1.08, 1.10, 1.17],
            &[2.0, 2.0],
            &[1.0, 1.0, 1.0],
            &[f64::NAN, f64::INFINITY, 0.0],
            &[],
        ] {
            assert_eq!(verdict(noise), Verdict::WithinNoise, "{noise:?}");
        }
        let (there, back) = (
            judge(&[1.28, 1.3, 1.35]).unwrap(),
            judge(&[1.0 / 1.28, 1.0 / 1.3, 1.0 / 1.35]).unwrap(),
        );
        assert!((there.median * back.median - 1.0).abs() < 1e-9);
        assert_eq!((there.verdict, back.verdict), (Verdict::Better, Verdict::Worse));
    }

    #[test]
    fn chance_seldom_pays() {
        // Scenario: 2000 comparisons of three, five and seven pairs in which both sides are the same and a step is off
        // by up to 10 % or 50 % either way; and 2000 of five pairs, 10 %, in which B is truly 1.25 times as fast.
        // Expected: at most 1 in 12 of three pairs, 1 in 20 of five and 1 in 50 of seven is judged a difference; at
        // least 9 in 10 of the last are.
        let mut random = fastrand::Rng::with_seed(7);
        let mut differing = |pairs: u32, noise: f64, gain: f64| {
            let differs = |_: &u32| {
                let mut step = || 1.0 - noise + 2.0 * noise * random.f64();
                let ratios: Vec<f64> = (0..pairs).map(|_| gain * step() / step()).collect();
                verdict(&ratios) != Verdict::WithinNoise
            };
            (0..2000).filter(differs).count()
        };
        for (pairs, most) in [(3, 166), (5, 100), (7, 40)] {
            for noise in [0.1, 0.5] {
                let by_chance = differing(pairs, noise, 1.0);
                assert!(by_chance <= most, "{pairs} pairs, {noise}: {by_chance}");
            }
        }
        let found = differing(5, 0.1, 1.25);
        assert!(found >= 1800, "{found}");
    }

    #[test]
    fn cpu_decides_where_reads_do_not() {
        // Scenario: every verdict on reads with every one on CPU.
        // Expected: reads first, CPU where reads are within the noise, else the default.
        let told = |verdict| Judgement {
            verdict,
            median: 1.0,
            low: 1.0,
            high: 1.0,
            pairs: 5,
        };
        use Verdict::{Better, WithinNoise, Worse};
        for (reads, cpu, choice) in [
            (Better, Worse, Choice::SecondByReads),
            (Worse, Better, Choice::FirstByReads),
            (WithinNoise, Better, Choice::SecondByCpu),
            (WithinNoise, Worse, Choice::FirstByCpu),
            (WithinNoise, WithinNoise, Choice::Default),
        ] {
            assert_eq!(
                choose(&told(reads), Some(&told(cpu))),
                choice,
                "{reads:?} {cpu:?}"
            );
        }
        assert_eq!(choose(&told(WithinNoise), None), Choice::Default);
    }
}
