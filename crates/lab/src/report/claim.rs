//! The claims of a publication, and whether they hold here.

use crate::stats::{Summary, Verdict};
use serde::{Deserialize, Serialize};

/// Our ratio confirms the published one if it is within these factors of it.
const CONFIRMS: (f64, f64) = (0.8, 1.25);

/// A published claim, and whether it holds here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// As published.
    pub claim: String,
    /// `confirmed`, `refuted`, `undecided` or `not tested`.
    pub verdict: String,
    /// The verdict in words, with our figures.
    pub words: String,
}

impl Claim {
    /// Judges our ratio: the verdict, and the words before and after it.
    fn of(claim: &str, ours: Option<Summary>, judge: impl FnOnce(&Summary) -> [&'static str; 3]) -> Self {
        let (verdict, words) = match ours {
            None => ("not tested", "what it compares was not measured".to_owned()),
            Some(ours) if !ours.is_judged() => {
                ("undecided", format!("too few repetitions: {}", ours.times()))
            }
            Some(ours) => {
                let [verdict, before, after] = judge(&ours);
                (verdict, format!("{before}{}{after}", ours.times()))
            }
        };
        Self {
            claim: claim.to_owned(),
            verdict: verdict.to_owned(),
            words,
        }
    }

    /// A claim that our figures cannot decide.
    pub(crate) fn undecided(claim: &str, words: String) -> Self {
        Self {
            claim: claim.to_owned(),
            verdict: "undecided".to_owned(),
            words,
        }
    }

    /// Judges a ratio that the publication gives.
    pub(crate) fn of_ratio(claim: &str, published: f64, ours: Option<Summary>) -> Self {
        let (least, most) = (published * CONFIRMS.0, published * CONFIRMS.1);
        let mut judged = Self::of(claim, ours, |ours| {
            if ours.high < least {
                ["refuted", "does not hold here: ", ", less than "]
            } else if ours.low > most {
                ["refuted", "does not hold here: ", ", more than "]
            } else if ours.low >= least && ours.high <= most {
                ["confirmed", "holds here: ", ""]
            } else {
                ["undecided", "the repetitions differ too much: ", ""]
            }
        });
        if judged.verdict == "refuted" {
            judged.words.push_str(&format!("{published}x"));
        }
        judged
    }

    /// Judges that something is more than something else, by their ratio (see [`Summary::verdict`]).
    pub(crate) fn of_order(claim: &str, ratio: Option<Summary>) -> Self {
        Self::of(claim, ratio, |ratio| match ratio.verdict() {
            Verdict::More => ["confirmed", "holds here: ", ""],
            Verdict::Less => ["refuted", "the reverse holds here: ", ""],
            Verdict::Same => ["undecided", "no difference beyond chance and 3 %: ", ""],
        })
    }

    /// Judges that something is at least `least` times something else, by their ratio.
    pub(crate) fn at_least(claim: &str, least: f64, ratio: Option<Summary>) -> Self {
        Self::of(claim, ratio, |ratio| {
            match (ratio.low >= least, ratio.high < least) {
                (true, _) => ["confirmed", "", ""],
                (_, true) => ["refuted", "", ""],
                _ => ["undecided", "", ""],
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_judged_by_their_intervals() {
        // Scenario: ratios at, far below, far above and around a published 10x; an order that holds, is
        // reversed, is within the spread; nothing measured. Expected: the verdicts in words, with figures.
        let of = |values: [f64; 5]| Claim::of_ratio("", 10.0, Summary::of(values));
        let verdict = |claim: Claim| claim.verdict;
        let confirmed = of([9.0, 9.5, 10.0, 10.5, 11.0]);
        assert_eq!(confirmed.words, "holds here: 10.00x (9.00 to 11.00)");
        assert!(of([2.0; 5]).words.contains("less than 10x"));
        assert!(of([20.0; 5]).words.contains("more than 10x"));
        assert_eq!(verdict(of([5.0, 9.0, 10.0, 11.0, 20.0])), "undecided");
        let order = |values: [f64; 5]| verdict(Claim::of_order("", Summary::of(values)));
        assert_eq!(order([1.1; 5]), "confirmed");
        assert_eq!(order([0.9; 5]), "refuted");
        assert_eq!(order([0.9, 1.0, 1.1, 1.2, 1.3]), "undecided");
        assert_eq!(verdict(Claim::of_ratio("", 1.0, None)), "not tested");
    }

    #[test]
    fn chance_decides_no_order() {
        // Scenario: 2000 times five repetitions of two equal sides that vary by 10 %; one side ahead by 1 to 3 % each time.
        // Expected: at most 1 in 20 is decided; undecided.
        let of = |ratios: [f64; 5]| Claim::of_order("", Summary::of(ratios)).verdict;
        let mut random = fastrand::Rng::with_seed(7);
        let mut step = || 0.9 + 0.2 * random.f64();
        let decided = (0..2000).filter(|_| of([(); 5].map(|()| step() / step())) != "undecided");
        let decided = decided.count();
        assert!(decided <= 100, "{decided}");
        assert_eq!(of([1.01, 1.02, 1.01, 1.03, 1.02]), "undecided");
    }

    #[test]
    fn two_repetitions_judge_no_claim() {
        // Scenario: two repetitions that agree, with a claim and against it. Expected: undecided, with the figures.
        let two = |value: f64| Summary::of([value; 2]);
        for claim in [
            Claim::of_ratio("", 10.0, two(10.0)),
            Claim::of_ratio("", 10.0, two(1.0)),
            Claim::of_order("", two(1.1)),
            Claim::of_order("", two(0.9)),
            Claim::at_least("", 5.0, two(6.0)),
            Claim::at_least("", 5.0, two(4.0)),
        ] {
            assert_eq!(claim.verdict, "undecided", "{claim:?}");
            assert!(claim.words.starts_with("too few repetitions: "), "{claim:?}");
        }
    }
}
