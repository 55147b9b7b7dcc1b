//! `act`: the highest rate of small random reads that a device and an engine hold within the limits of
//! Aerospike's certification (ACT): an open loop, latency from the intended start, and read-only.
//!
//! A step searches by short runs, doubling the rate and then halving the interval, and holds the result for
//! the whole time.

use crate::Context;
use crate::args::Act;
use crate::error::LabError;
use crate::honesty::check_before_making;
use crate::material::{Material, Progress};
use crate::report::{Claim, Report};
use crate::sample::{OVER_LIMITS, Sample, reads_per_second};
use crate::served::Served;
use crate::setup::{Amount, Heat, Setup, Shape};
use crate::stats::Summary;
use crate::study::{About, Measure, Needs, Once, Row, Rows, Study, check_daemon, check_only, list, pair};
use humantime::format_duration;
use ringfetch_command::quantity::{approximate, rate};
use std::sync::Arc;
use std::time::Duration;

const NAMES: &str = "uring auto mmap mmap-plain engine-pread daemon";
pub(crate) static ABOUT: About = About {
    name: "act",
    title: "the highest rate of reads of 1.5 KiB within the limits of a certification",
    source: "Aerospike's ACT",
    columns: "multiple over_1ms over_8ms over_64ms p50_us p999_us cpu_us_per_read",
    judge,
};
/// 1x of the certification.
const READS_PER_SECOND: u64 = 2000;
const READ_BYTES: usize = 1536;
const IN_FLIGHT: usize = 512;
/// (n for 2^n ms, the share of slower reads must be below this).
const LIMITS: [(usize, f64); 3] = [(0, 0.05), (3, 0.01), (6, 0.001)];

pub(crate) fn plan(args: &Act, context: &Context, progress: Progress<'_>) -> Result<Study, LabError> {
    check_only(&args.common, NAMES)?;
    check_daemon(&args.common, &args.daemon)?;
    check_before_making(&args.common, "--size", args.size, Needs::COLD)?;
    let served = Served::find(&args.daemon, context)?;
    let mut material = Material::one(&args.common.path, args.size, progress)?;
    material.served = served.map(Arc::new);
    let length = material.length_bytes();
    let served = material.served.as_deref();
    if let Some((served, file)) = served.zip(material.files.first()) {
        let unlike = |how| Err(LabError::Usage(served.unlike(&file.path, how)));
        if served.dataset.length_bytes < length {
            return unlike(", which is longer");
        }
        // Of a file that was made here each read is checked.
        if file.seed.is_none() && !served.has_ends_of(file)? {
            return unlike(", which begins or ends with other bytes");
        }
    }
    let mut settings = vec![
        pair("limits", "< 5 % over 1 ms, < 1 % over 8 ms, < 0.1 % over 64 ms"),
        pair("1x", format!("{READS_PER_SECOND} reads/s of {READ_BYTES} bytes")),
        pair("hold", format_duration(args.hold)),
        pair("step", format_duration(args.step)),
        pair("most", args.most),
    ];
    settings.extend(Served::settings_of(served));
    let mut study = Study::new(&ABOUT, &args.common, NAMES, settings, vec![material]);
    study.needs = Needs::COLD;
    study.measure = Measure::Highest(Search {
        hold: args.hold,
        step: args.step,
        most: args.most,
    });
    let shape = Shape::random(READ_BYTES, length);
    let axes = [("strategy", study.chosen.clone())];
    study.cross(&axes, |_| {
        Some(Setup::new(Heat::Direct, shape, at(1, args.hold), IN_FLIGHT))
    });
    Ok(study)
}

fn at(n: u64, time: Duration) -> Amount {
    let per_second = n * READS_PER_SECOND;
    Amount::At { per_second, time }
}

/// How the highest rate is searched for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Search {
    pub(crate) hold: Duration,
    pub(crate) step: Duration,
    pub(crate) most: u64,
}

impl Search {
    /// The run that held the highest N; if not even 1x was held, that run, with N = 0.
    pub(crate) fn highest(&self, setup: Setup, once: Once<'_>) -> Result<Sample, String> {
        let mut run = |n: u64, time: Duration| {
            let amount = at(n, time);
            once(Setup { amount, ..setup })
        };
        // `low` passed (0 always does), `high` did not.
        let (mut low, mut high) = (0, self.most + 1);
        while high - low > 1 {
            let n = if high > self.most {
                (low * 2).clamp(1, self.most)
            } else {
                u64::midpoint(low, high)
            };
            let end = if passes(&run(n, self.step)?) {
                &mut low
            } else {
                &mut high
            };
            *end = n;
        }
        loop {
            let mut held = run(low.max(1), self.hold)?;
            let passed = passes(&held);
            if passed || low <= 1 {
                held.multiple = Some(if passed { approximate(low.max(1)) } else { 0.0 });
                return Ok(held);
            }
            // It held only for a short run: try a little less.
            low -= (low / 16).max(1);
        }
    }
}

/// Whether the rate was not given up, and the limits were met: reads that were never sent count as slower than each.
fn passes(sample: &Sample) -> bool {
    let share = |bits: usize| sample.over.and_then(|over| over.get(bits).copied());
    let kept = |(bits, limit): &(usize, f64)| share(*bits).is_some_and(|share| share < *limit);
    !sample.is_given_up() && LIMITS.iter().all(kept)
}

fn judge(report: &mut Report, rows: &Rows) {
    let mut head = vec!["strategy".to_owned(), "N".to_owned(), "reads/s".to_owned()];
    head.extend((0..OVER_LIMITS).map(|bits| format!("> {} ms", 1 << bits)));
    let mut beside = vec![head];
    for row in &rows.0 {
        let (Some(n), Some(reads)) = (row.summary(multiple), row.summary(reads_per_second)) else {
            continue;
        };
        let mut line = vec![row.get("strategy").unwrap_or_default().to_owned()];
        line.push(format!("{:.0}x ({:.0} to {:.0})", n.median, n.low, n.high));
        line.push(rate(reads.median));
        for bits in 0..OVER_LIMITS {
            let shares = row
                .measured()
                .filter_map(|sample| sample.over?.get(bits).copied());
            let share = Summary::of(shares).map_or(f64::NAN, |share| share.median * 100.0);
            line.push(format!("{share:.2} %"));
        }
        beside.push(line);
    }
    let title = "The highest N held, and the share of its reads above each bucket (medians)";
    report.table(title, beside);
    let note = "where N is 0 not even 1x was held: the row is of 1x all the same";
    report.notes.push(note.to_owned());
    let process = rows.0.iter().filter(|row| row.get("strategy") != Some("daemon"));
    let best = process.max_by(|one, other| one.median(multiple).total_cmp(&other.median(multiple)));
    let daemon = rows.one_of(&[("strategy", "daemon")]).zip(best);
    let ratio = daemon.and_then(|(ours, best)| ours.ratio(best, multiple));
    let claim = "over gRPC the same N is held as by the best engine in process (ours, not ACT's)";
    let left_out = daemon.map_or_else(Vec::new, |(_, best)| without_ratio(best));
    if left_out.is_empty() {
        return report.claim(claim, 1.0, ratio);
    }
    let rest = ratio.map_or_else(String::new, |ratio| format!("; in the others {}", ratio.times()));
    let left_out = list(&left_out);
    let words = format!("the best engine in process did not hold 1x in repetitions {left_out}{rest}");
    report.claims.push(Claim::undecided(claim, words));
}

/// The repetitions, from 1, in which nothing can be divided by its N.
fn without_ratio(row: &Row) -> Vec<usize> {
    let samples = (1..).zip(&row.samples);
    let held_none =
        samples.filter(|(_, sample)| sample.as_ref().is_some_and(|sample| multiple(sample) == 0.0));
    held_none.map(|(repetition, _)| repetition).collect()
}

fn multiple(sample: &Sample) -> f64 {
    sample.multiple.unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::tests::sample;

    fn with(over: [f64; OVER_LIMITS], missed: u64) -> Sample {
        Sample {
            over: Some(over),
            missed,
            ..sample(100, 1.0)
        }
    }

    #[test]
    fn the_certifications_limits_are_kept_or_broken() {
        // Scenario: shares just below each limit, of which some reads were never sent; each limit reached; the same shares of
        // a step that was given up; a closed loop. Expected: passed; then not passed, each.
        let good = [0.049, 0.04, 0.03, 0.0099, 0.009, 0.009, 0.0009];
        assert!(passes(&with(good, 0)) && passes(&with(good, 1)));
        for (bits, share) in LIMITS {
            let mut over = good;
            over[bits] = share;
            assert!(!passes(&with(over, 0)), "{bits}");
        }
        let note = Some("given up: a read waited longer than 10 s to be sent; another note".to_owned());
        assert!(!passes(&Sample {
            note,
            ..with(good, 1)
        }));
        assert!(!passes(&sample(100, 1.0)));
    }

    #[test]
    fn repetitions_that_held_nothing_decide_nothing() {
        // Scenario: N over gRPC and in process: equal; neither holds 1x; only gRPC does, always and twice of five; only the
        // engine does. Expected: confirmed; undecided, with the repetitions that have no ratio; refuted.
        use crate::study::tests::row;
        let claim = |daemon: [f64; 5], own: [f64; 5]| {
            let rows = [("daemon", daemon), ("uring", own)].map(|(name, held)| {
                let mut row = row(&[("strategy", name)], &[100; 5]);
                for (sample, n) in row.samples.iter_mut().flatten().zip(held) {
                    sample.multiple = Some(n);
                }
                row
            });
            let mut report = crate::report::tests::report();
            report.claims.clear();
            judge(&mut report, &Rows(rows.to_vec()));
            let claim = report.claims.pop().unwrap();
            (claim.verdict, claim.words)
        };
        let words = |verdict: &str, words: &str| (verdict.to_owned(), words.to_owned());
        assert_eq!(claim([3.0; 5], [3.0; 5]).0, "confirmed");
        let none = "the best engine in process did not hold 1x in repetitions 1, 2, 3, 4, 5";
        assert_eq!(claim([0.0; 5], [0.0; 5]), words("undecided", none));
        assert_eq!(claim([3.0; 5], [0.0; 5]), words("undecided", none));
        let some = "the best engine in process did not hold 1x in repetitions 2, 4; in the others 1.00x (1.00 to 1.00)";
        assert_eq!(
            claim([3.0; 5], [3.0, 0.0, 3.0, 0.0, 3.0]),
            words("undecided", some)
        );
        assert_eq!(claim([0.0; 5], [3.0; 5]).0, "refuted");
    }

    fn search(holds: impl Fn(u64, Duration) -> bool) -> (f64, Vec<u64>) {
        let search = Search {
            hold: Duration::from_secs(60),
            step: Duration::from_secs(5),
            most: 100,
        };
        let setup = Setup::new(Heat::Direct, Shape::Files { count: 1 }, Amount::Reads(1), 1);
        let mut tried = Vec::new();
        let found = search.highest(setup, &mut |setup| {
            let Amount::At { per_second, time } = setup.amount else {
                panic!("an open loop")
            };
            let n = per_second / READS_PER_SECOND;
            tried.push(n);
            let share = if holds(n, time) { 0.0 } else { 1.0 };
            Ok(with([share; OVER_LIMITS], 0))
        });
        (found.unwrap().multiple.unwrap(), tried)
    }

    #[test]
    fn the_highest_rate_is_found_and_held() {
        // Scenario: devices that hold 37x, all, none, and one that holds 37x only briefly, 35x for long.
        // Expected: that N; a search by doubling, then by halving, then the hold.
        let (n, tried) = search(|n, _| n <= 37);
        assert_eq!(n, 37.0);
        assert_eq!(tried, [1, 2, 4, 8, 16, 32, 64, 48, 40, 36, 38, 37, 37]);
        assert_eq!(search(|_, _| true).0, 100.0);
        assert_eq!(search(|_, _| false), (0.0, vec![1, 1]));
        let tired = search(|n, time| n <= if time.as_secs() > 5 { 35 } else { 37 });
        assert_eq!((tired.0, &tired.1[12..]), (35.0, &[37, 35][..]));
    }
}
