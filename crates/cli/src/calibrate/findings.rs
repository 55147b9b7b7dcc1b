//! From samples to findings: curves with their knee, contests of two settings, rankings of backends. Pure.

use super::drive::{Sample, Setup};
use super::judge::{Choice, Judgement, choose, judge, knee, median};
use ringfetch_engine::config::BackendKind;
use serde::Serialize;

/// What a step was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Phase {
    Depth,
    RegisteredBuffers,
    EagerFlush,
    DirectIo,
    Rings,
    MmapThreads,
    MmapAnnounce,
    BackendsCold,
    BackendsWarm,
}

/// How the data was when a step began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Heat {
    /// Read past the page cache.
    Direct,
    /// Read through the page cache, from which the file had been evicted.
    Cold,
    /// Read through the page cache, which had all of it.
    Warm,
}

/// A step and what it gave.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Step {
    pub(super) phase: Phase,
    pub(super) heat: Heat,
    /// Share of what it read from that was in the page cache just before; `null` where that was not asked.
    pub(super) resident_before: Option<f64>,
    pub(super) setup: Setup,
    pub(super) sample: Sample,
}

/// A curve's point: medians over the passes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Point {
    /// Depth, or threads.
    pub(super) setting: u32,
    pub(super) reads_per_second: f64,
    /// Each pass's.
    pub(super) passes: Vec<f64>,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) cpu_us_per_read: f64,
    pub(super) in_flight: Option<f64>,
}

/// A curve of reads/s against depth or threads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Curve {
    /// In ascending order of the setting; at least one.
    pub(super) points: Vec<Point>,
    /// So many of them, from the first, can be in force; what is beyond is shown only.
    pub(super) usable: usize,
    /// Index of the knee.
    pub(super) knee: usize,
    /// Index of the most reads/s among the usable ones.
    pub(super) best: usize,
}

impl Curve {
    /// The curve through (setting, sample), in any order; `None` of none. With a `limit`, settings count for the knee up to
    /// the first that reaches it: 240 of 256 tags make 256 the last, which is then cut.
    pub(super) fn through(samples: &[(u32, Sample)], limit: Option<u32>) -> Option<Self> {
        let mut settings: Vec<u32> = samples.iter().map(|(setting, _)| *setting).collect();
        settings.sort_unstable();
        settings.dedup();
        let point = |setting: u32| {
            let of = |value: fn(&Sample) -> f64| {
                let here = samples.iter().filter(|(other, _)| *other == setting);
                here.map(|(_, sample)| value(sample)).collect::<Vec<f64>>()
            };
            let passes = of(|sample| sample.reads_per_second);
            Some(Point {
                setting,
                reads_per_second: median(passes.iter().copied())?,
                passes,
                p50_us: median(of(|sample| sample.p50_us))?,
                p99_us: median(of(|sample| sample.p99_us))?,
                cpu_us_per_read: median(of(|sample| sample.cpu_us_per_read))?,
                in_flight: median(of(|sample| sample.in_flight.unwrap_or(f64::NAN))),
            })
        };
        let points: Vec<Point> = settings.into_iter().filter_map(point).collect();
        let reaches = |point: &Point| limit.is_some_and(|limit| point.setting >= limit);
        let usable = points
            .iter()
            .position(reaches)
            .map_or(points.len(), |last| last + 1);
        let flat: Vec<(u32, f64)> = points
            .iter()
            .take(usable)
            .map(|point| (point.setting, point.reads_per_second))
            .collect();
        let (knee, best) = knee(&flat)?;
        Some(Self {
            points,
            usable,
            knee,
            best,
        })
    }

    pub(super) fn knee(&self) -> Option<&Point> {
        self.points.get(self.knee)
    }

    pub(super) fn best(&self) -> Option<&Point> {
        self.points.get(self.best)
    }

    /// How far passes over one point lie apart, as a share of its median: of all points the median one. `None` with one
    /// pass only.
    pub(super) fn unrest(&self) -> Option<f64> {
        let spread = |point: &Point| {
            let low = point.passes.iter().copied().fold(f64::INFINITY, f64::min);
            let high = point.passes.iter().copied().fold(0.0, f64::max);
            (point.passes.len() > 1).then(|| (high - low) / point.reads_per_second)
        };
        median(self.points.iter().filter_map(spread))
    }
}

/// Two settings, compared in pairs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Contest {
    pub(super) phase: Phase,
    /// The settings, as people say them.
    pub(super) first: String,
    pub(super) second: String,
    pub(super) first_reads_per_second: f64,
    pub(super) second_reads_per_second: f64,
    pub(super) first_cpu_us_per_read: f64,
    pub(super) second_cpu_us_per_read: f64,
    /// Second against first: above 1, the second reads more.
    pub(super) reads: Judgement,
    /// Second against first: above 1, the second takes less CPU a read.
    pub(super) cpu: Judgement,
    pub(super) choice: Choice,
}

impl Contest {
    /// Judges (first, second) pairs; `None` of none.
    pub(super) fn between(phase: Phase, names: [String; 2], pairs: &[(Sample, Sample)]) -> Option<Self> {
        let [first, second] = names;
        let ratios = |value: fn(&Sample) -> f64| -> Vec<f64> {
            pairs.iter().map(|(a, b)| value(b) / value(a)).collect()
        };
        let reads = judge(&ratios(|sample| sample.reads_per_second))?;
        let cpu = judge(&ratios(|sample| 1.0 / sample.cpu_us_per_read))?;
        let firsts = |value: fn(&Sample) -> f64| median(pairs.iter().map(|(a, _)| value(a)));
        let seconds = |value: fn(&Sample) -> f64| median(pairs.iter().map(|(_, b)| value(b)));
        Some(Self {
            phase,
            first,
            second,
            first_reads_per_second: firsts(|sample| sample.reads_per_second)?,
            second_reads_per_second: seconds(|sample| sample.reads_per_second)?,
            first_cpu_us_per_read: firsts(|sample| sample.cpu_us_per_read)?,
            second_cpu_us_per_read: seconds(|sample| sample.cpu_us_per_read)?,
            reads,
            cpu,
            choice: choose(&reads, Some(&cpu)),
        })
    }

    /// Whether to take the second; `None`: neither is better.
    pub(super) fn takes_second(&self) -> Option<bool> {
        match self.choice {
            Choice::SecondByReads | Choice::SecondByCpu => Some(true),
            Choice::FirstByReads | Choice::FirstByCpu => Some(false),
            Choice::Default => None,
        }
    }
}

/// A backend's figures: medians over the rounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Ranked {
    #[serde(serialize_with = "word")]
    pub(super) backend: BackendKind,
    /// Whether it read past the page cache.
    pub(super) direct: bool,
    pub(super) reads_per_second: f64,
    pub(super) cpu_us_per_read: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Against the winner, as in a contest: above 1, it reads more than the winner. `null` for the winner.
    pub(super) against_winner: Option<Judgement>,
}

fn word<S: serde::Serializer>(backend: &BackendKind, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(backend.as_str())
}

/// The backends side by side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Ranking {
    pub(super) rows: Vec<Ranked>,
    /// Index of the one to take.
    pub(super) winner: usize,
}

impl Ranking {
    /// Ranks backends that were each measured once in every round, in order of preference: a later one wins only when
    /// it is better beyond the noise, by reads or, these being equal, by CPU.
    pub(super) fn of(rounds: &[Vec<(Setup, Sample)>]) -> Option<Self> {
        let whole: Vec<&Vec<(Setup, Sample)>> = rounds
            .iter()
            .filter(|round| round.len() == rounds.first().map_or(0, Vec::len))
            .collect();
        let setups: Vec<Setup> = whole.first()?.iter().map(|(setup, _)| *setup).collect();
        let samples = |index: usize| -> Vec<Sample> {
            let one = |round: &&Vec<(Setup, Sample)>| round.get(index).map(|(_, sample)| *sample);
            whole.iter().filter_map(one).collect()
        };
        let compared = |a: usize, b: usize| {
            let pairs: Vec<(Sample, Sample)> = samples(a).into_iter().zip(samples(b)).collect();
            Contest::between(Phase::BackendsCold, [String::new(), String::new()], &pairs)
        };
        let mut winner = 0;
        for challenger in 1..setups.len() {
            if compared(winner, challenger)?.takes_second() == Some(true) {
                winner = challenger;
            }
        }
        let row = |(index, setup): (usize, &Setup)| {
            let of = |value: fn(&Sample) -> f64| median(samples(index).iter().map(value));
            Some(Ranked {
                backend: setup.backend,
                direct: setup.direct && setup.backend != BackendKind::Mmap,
                reads_per_second: of(|sample| sample.reads_per_second)?,
                cpu_us_per_read: of(|sample| sample.cpu_us_per_read)?,
                p50_us: of(|sample| sample.p50_us)?,
                p99_us: of(|sample| sample.p99_us)?,
                against_winner: (index != winner)
                    .then(|| compared(winner, index).map(|contest| contest.reads))
                    .flatten(),
            })
        };
        let rows = setups
            .iter()
            .enumerate()
            .map(row)
            .collect::<Option<Vec<Ranked>>>()?;
        Some(Self { rows, winner })
    }

    pub(super) fn winner(&self) -> Option<&Ranked> {
        self.rows.get(self.winner)
    }
}

/// Everything that was found out. What is `None` was not measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Findings {
    /// Why there is no io_uring here; `null` where there is.
    pub(super) ring_refusal: Option<String>,
    /// Of `uring`; of `pread`, by its threads, where there is no ring.
    pub(super) depth: Option<Curve>,
    pub(super) contests: Vec<Contest>,
    pub(super) mmap_threads: Option<Curve>,
    pub(super) cold: Option<Ranking>,
    pub(super) warm: Option<Ranking>,
    /// Bytes of the file that the warm steps read.
    pub(super) warm_window_bytes: Option<u64>,
    /// The settings that won.
    pub(super) chosen: Setup,
    /// The chosen depth after the engine has cut it by the device's tags; `None` without a ring.
    pub(super) depth_in_force: Option<u32>,
    /// Whether it was ended by hand.
    pub(super) stopped: bool,
    /// What a reader has to know, a line each.
    pub(super) notes: Vec<String>,
    pub(super) steps: Vec<Step>,
}

impl Findings {
    pub(super) fn contest(&self, phase: Phase) -> Option<&Contest> {
        self.contests.iter().rfind(|contest| contest.phase == phase)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::calibrate) fn sample(reads_per_second: f64, cpu_us_per_read: f64) -> Sample {
        Sample {
            reads: 1000,
            seconds: 1.0,
            reads_per_second,
            cpu_us_per_read,
            p50_us: 100.0,
            p99_us: 1e6 / reads_per_second,
            in_flight: Some(3.5),
            queue_depth: 64,
            pinned_bytes: 0,
            file_used_up: false,
        }
    }

    pub(in crate::calibrate) fn setup(backend: BackendKind) -> Setup {
        Setup {
            backend,
            direct: true,
            rings: 1,
            queue_depth: 64,
            eager_flush_reads: 4,
            registered_buffers: true,
            mmap_threads: 2,
            announce: true,
            pread_threads: 64,
            batch: 16,
            asked: 128,
            device_tags: Some(256),
        }
    }

    #[test]
    fn a_curve_has_medians_in_order() {
        // Scenario: three passes over three depths, in both directions, one sample disturbed.
        // Expected: points ascending with medians, the knee at the second, and no unrest told of one pass only.
        let mut samples = Vec::new();
        for pass in [[100.0, 195.0, 200.0], [102.0, 20.0, 199.0], [98.0, 196.0, 201.0]] {
            for (depth, reads) in [4, 1, 16].into_iter().zip([pass[1], pass[0], pass[2]]) {
                samples.push((depth, sample(reads, 2.0)));
            }
        }
        let curve = Curve::through(&samples, None).unwrap();
        let reads: Vec<(u32, f64)> = curve
            .points
            .iter()
            .map(|point| (point.setting, point.reads_per_second))
            .collect();
        assert_eq!(reads, [(1, 100.0), (4, 195.0), (16, 200.0)]);
        assert_eq!((curve.knee, curve.best), (1, 2));
        assert!(curve.unrest().unwrap() < 0.05);
        assert_eq!(Curve::through(&samples[..3], None).unwrap().unrest(), None);
        assert_eq!(Curve::through(&[], None), None);
    }

    #[test]
    fn what_cannot_be_in_force_is_no_knee() {
        // Scenario: a curve that goes on rising beyond the device's tags; limits below, between and above its settings.
        // Expected: the knee among the settings up to the first that reaches the limit.
        let samples = [64, 128, 256, 512].map(|depth| (depth, sample(1000.0 * f64::from(depth), 2.0)));
        for (limit, usable) in [
            (Some(1), 1),
            (Some(128), 2),
            (Some(240), 3),
            (Some(513), 4),
            (None, 4),
        ] {
            let curve = Curve::through(&samples, limit).unwrap();
            assert_eq!(
                (curve.usable, curve.knee, curve.points.len()),
                (usable, usable - 1, 4),
                "{limit:?}"
            );
        }
    }

    #[test]
    fn a_contest_is_decided_by_reads_then_by_cpu() {
        // Scenario: a second setting that reads more; one that reads as much for less CPU; one that differs in nothing;
        // no pair.
        // Expected: taken, taken by CPU, left to the default, no contest.
        let between = |second: Sample| {
            let names = ["off".to_owned(), "on".to_owned()];
            Contest::between(Phase::EagerFlush, names, &[(sample(100.0, 2.0), second); 3]).unwrap()
        };
        let more = between(sample(120.0, 2.5));
        assert_eq!(
            (more.choice, more.takes_second()),
            (Choice::SecondByReads, Some(true))
        );
        assert!((more.reads.median - 1.2).abs() < 1e-9 && (more.cpu.median - 0.8).abs() < 1e-9);
        assert_eq!(between(sample(101.0, 1.5)).choice, Choice::SecondByCpu);
        assert_eq!(between(sample(101.0, 2.01)).takes_second(), None);
        assert_eq!(
            Contest::between(Phase::EagerFlush, [String::new(), String::new()], &[]),
            None
        );
    }

    #[test]
    fn a_backend_wins_only_beyond_the_noise() {
        // Scenario: three rounds and one that was cut short, of uring, auto and mmap: auto a little faster in one round
        // only, mmap slower; then mmap twice as fast.
        // Expected: uring, the first in order, and the rounds' medians; then mmap, with uring's share of it.
        let round = |auto: f64, mmap: f64| {
            vec![
                (setup(BackendKind::Uring), sample(100.0, 2.0)),
                (setup(BackendKind::Auto), sample(auto, 2.0)),
                (setup(BackendKind::Mmap), sample(mmap, 4.0)),
            ]
        };
        let mut rounds = vec![round(101.0, 90.0), round(110.0, 80.0), round(99.0, 85.0)];
        rounds.push(rounds[0][..1].to_vec());
        let ranking = Ranking::of(&rounds).unwrap();
        assert_eq!(ranking.winner().unwrap().backend, BackendKind::Uring);
        assert!((ranking.rows[2].reads_per_second - 85.0).abs() < 1e-9);
        assert!(!ranking.rows[2].direct && ranking.rows[0].direct);

        let ranking = Ranking::of(&[round(99.0, 200.0), round(100.0, 210.0), round(101.0, 190.0)]).unwrap();
        assert_eq!(ranking.winner().unwrap().backend, BackendKind::Mmap);
        let uring = ranking.rows[0].against_winner.unwrap();
        assert!((uring.median - 0.5).abs() < 1e-9, "{uring:?}");
        assert_eq!(Ranking::of(&[]), None);
    }
}
