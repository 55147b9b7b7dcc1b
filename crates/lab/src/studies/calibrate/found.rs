//! Interprets the rows of `calibrate` so far: where curves bend, which of two settings is better, and what
//! that means for the engine. Pure.

use super::subject::Subject;
use crate::drive::engine::{Choice, UNREGISTERED};
use crate::sample::{Sample, cpu_us_per_read, reads_per_second};
use crate::stats::{Summary, Verdict};
use crate::study::{Row, Rows};
use ringfetch_command::quantity::{latency, rate};
use ringfetch_engine::config::{BackendKind, EngineConfig};

/// The knee is the smallest setting that reaches this share of the best.
const KNEE_SHARE: f64 = 0.95;
/// Fewest reads submitted at once.
const ASKED_MIN: u32 = 128;
/// As the configuration has it.
const PREAD_THREADS_MAX: u32 = 1024;

#[derive(Debug, Clone, Copy)]
pub(super) struct Knee<'a> {
    pub(super) setting: u32,
    at: &'a Row,
    best: u32,
    best_at: &'a Row,
}

impl Knee<'_> {
    /// Why the knee is where it is, in figures.
    pub(super) fn why(&self, what: &str) -> String {
        let p99 = |row: &Row| latency(row.median(|sample| sample.p99_us) * 1e3);
        let [here, most] = [self.at, self.best_at].map(|row| row.median(reads_per_second));
        if self.setting == self.best {
            return format!("{what}: {} reads/s, the most; p99 {}", rate(here), p99(self.at));
        }
        format!(
            "{what}: {} reads/s, {:.0} % of the most ({} at {}); p99 {} against {}",
            rate(here),
            100.0 * here / most.max(1e-9),
            rate(most),
            self.best,
            p99(self.at),
            p99(self.best_at)
        )
    }
}

/// The smallest setting of an ascending curve that reaches [`KNEE_SHARE`] of the best, and the best (the
/// first of equals): their indices. With a limit, only settings up to the first that reaches it count: a
/// limit of 240 for 256 tags makes 256 the last, which is then lowered. `None` if one of them was not measured: the knee
/// would be where the curve was cut.
fn knee(curve: &[(u32, Option<f64>)], limit: Option<u32>) -> Option<(usize, usize)> {
    let reaches = |(setting, _): &(u32, Option<f64>)| limit.is_some_and(|limit| *setting >= limit);
    let last = curve.iter().position(reaches);
    let curve = curve.get(..last.map_or(curve.len(), |last| last + 1))?;
    let measured = curve.iter().map(|(setting, reads)| Some((*setting, (*reads)?)));
    let curve = measured.collect::<Option<Vec<_>>>()?;
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

/// Compares B with A, repetition by repetition.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contest {
    pub(super) reads: Summary,
    /// Above 1: B takes less CPU per read.
    pub(super) cpu: Summary,
}

impl Contest {
    pub(super) fn between(a: &Row, b: &Row) -> Option<Self> {
        Some(Self {
            reads: b.ratio(a, reads_per_second)?,
            cpu: a.ratio(b, cpu_us_per_read)?,
        })
    }

    /// Whether to take B, and its effect: reads decide; if they are within the noise, CPU per read does.
    pub(super) fn choice(&self) -> (bool, &'static str) {
        match (self.reads.verdict(), self.cpu.verdict()) {
            (Verdict::More, _) => (true, "pays"),
            (Verdict::Less, _) => (false, "costs reads"),
            (Verdict::Same, Verdict::More) => (true, "pays in CPU"),
            (Verdict::Same, Verdict::Less) => (false, "costs CPU"),
            // Stopped before the third: a large difference is no noise, and shows nothing either.
            (Verdict::Same, Verdict::Same) if !self.reads.is_judged() => (false, "too few repetitions"),
            (Verdict::Same, Verdict::Same) => (false, "within the noise"),
        }
    }

    pub(super) fn words(&self) -> String {
        let (reads, cpu) = (self.reads.times(), 1.0 / self.cpu.median);
        format!("reads/s {reads}, CPU a read {cpu:.2}x: {}", self.choice().1)
    }
}

/// The results so far.
pub(super) struct Found<'a> {
    pub(super) subject: &'a Subject,
    pub(super) rows: &'a Rows,
    /// Whether it was stopped before everything was measured.
    pub(super) stopped: bool,
}

impl<'a> Found<'a> {
    pub(super) fn new(subject: &'a Subject, rows: &'a Rows, stopped: bool) -> Self {
        Self {
            subject,
            rows,
            stopped,
        }
    }

    /// See [`knee`].
    pub(super) fn knee(&self, stage: &str, limit: Option<u32>) -> Option<Knee<'a>> {
        let of_stage = self.rows.0.iter().filter(|row| row.get("stage") == Some(stage));
        let point = |row: &'a Row| {
            let setting: u32 = row.get("setting")?.parse().ok()?;
            Some((setting, row))
        };
        let mut points = of_stage.map(point).collect::<Option<Vec<_>>>()?;
        points.sort_by_key(|(setting, _)| *setting);
        let reads = |row: &Row| Some(row.summary(reads_per_second)?.median);
        let curve = points.iter().map(|(setting, row)| (*setting, reads(row)));
        let (knee, best) = knee(&curve.collect::<Vec<_>>(), limit)?;
        let ((setting, at), (best, best_at)) = (points.get(knee)?, points.get(best)?);
        Some(Knee {
            setting: *setting,
            at,
            best: *best,
            best_at,
        })
    }

    pub(super) fn depth(&self) -> Option<Knee<'a>> {
        let limit = self.subject.has_ring().then(|| self.in_force(u32::MAX, 1));
        self.knee("depth", limit)
    }

    /// The depth of each of this many rings after the engine has lowered it.
    pub(super) fn in_force(&self, depth: u32, rings: u32) -> u32 {
        let mut config = EngineConfig {
            device_tags: self.subject.tags.into_iter().collect(),
            cores: rings,
            ..EngineConfig::default()
        };
        config.uring.queue_depth = depth;
        config.ring_depth()
    }

    /// Reads submitted at once: enough to keep the depth of each ring and the mmap threads busy, if they fit. A thread
    /// takes whole batches: it has one, and the next one waits.
    pub(super) fn asked(&self, choice: &Choice) -> u32 {
        let depth = self.depth().map_or(0, |knee| knee.setting);
        let each = ASKED_MIN.max(depth.saturating_mul(2));
        let batches = match choice.backend == BackendKind::Mmap {
            true => choice.mmap_threads.saturating_mul(2),
            false => 0,
        };
        let of_threads = batches.saturating_mul(u32::try_from(choice.batch).unwrap_or(u32::MAX));
        let all = each.saturating_mul(choice.rings).max(of_threads);
        all.min(self.subject.fitting())
    }

    fn row(&self, stage: &str, setting: &str) -> Option<&'a Row> {
        self.rows.one_of(&[("stage", stage), ("setting", setting)])
    }

    pub(super) fn setting(&self, from: &str, to: &str) -> Option<Contest> {
        Contest::between(self.row("settings", from)?, self.row("settings", to)?)
    }

    fn takes(&self, from: &str, to: &str) -> bool {
        self.setting(from, to).is_some_and(|contest| contest.choice().0)
    }

    pub(super) fn direct(&self) -> bool {
        self.subject.direct && !self.takes("default", "direct off")
    }

    /// As many rings as pay off, doubling, with the last comparison.
    pub(super) fn rings(&self) -> (u32, Option<(String, Contest)>) {
        let of_stage = self.rows.with(&[("stage", "rings")]);
        let count = |row: &'a Row| Some((row.get("setting")?.parse().ok()?, row));
        let mut rows: Vec<(u32, &Row)> = of_stage.filter_map(count).collect();
        rows.sort_by_key(|(rings, _)| *rings);
        let (mut rings, mut last) = (1, None);
        for ((few, less), (many, more)) in rows.iter().zip(rows.iter().skip(1)) {
            let Some(contest) = Contest::between(less, more) else {
                break;
            };
            last = Some((format!("{many} rings against {few}"), contest));
            if contest.reads.verdict() != Verdict::More {
                break;
            }
            rings = *many;
        }
        (rings, last)
    }

    pub(super) fn is_registered(&self) -> bool {
        let all = self.rows.0.iter().flat_map(|row| row.measured());
        let refused = |sample: &Sample| sample.note.as_deref() == Some(UNREGISTERED);
        self.subject.registered && !all.into_iter().any(refused)
    }

    /// A backend with the settings found so far.
    pub(super) fn chosen(&self, backend: BackendKind) -> Choice {
        let base = self.subject.base(backend);
        let (rings, default) = (self.rings().0, EngineConfig::default().uring.queue_depth);
        let depth = self.depth().map_or(default, |knee| knee.setting);
        // All cores share one pool of pread's threads, each with one read in flight: as many as all rings have.
        let pool = self.in_force(depth, rings).saturating_mul(rings);
        let depth = match backend == BackendKind::Pread && self.subject.has_ring() {
            true => pool.min(PREAD_THREADS_MAX),
            false => depth,
        };
        let threads = self.knee("mmap threads", None);
        Choice {
            // The others get as many cores to submit and answer on, since only the backends are compared.
            rings,
            queue_depth: Some(depth),
            eager_flush_reads: match self.takes("default", "eager flush 0") {
                true => 0,
                false => base.eager_flush_reads,
            },
            registered_buffers: self.is_registered() && !self.takes("default", "registered buffers off"),
            mmap_threads: threads.map_or(base.mmap_threads, |knee| knee.setting),
            announce: !self.takes("announce on", "announce off"),
            ..base
        }
    }

    /// The backend to take of those measured: a later one in order of preference wins only when it is better beyond the
    /// noise. `None`: fewer than two were measured, or not all of them before it was stopped.
    pub(super) fn winner(&self, stage: &str) -> Option<BackendKind> {
        let all = self.subject.candidates(stage == "warm");
        let row = |backend: &BackendKind| Some((*backend, self.backend(stage, *backend, "many")?));
        let measured: Vec<_> = all.iter().filter_map(row).collect();
        let least = if self.stopped { all.len() } else { 2 };
        let (first, challengers) = measured.split_first().filter(|_| measured.len() >= least)?;
        let mut winner = *first;
        for challenger in challengers {
            let contest = Contest::between(winner.1, challenger.1);
            if contest.is_some_and(|contest| contest.choice().0) {
                winner = *challenger;
            }
        }
        Some(winner.0)
    }

    pub(super) fn backend(&self, stage: &str, backend: BackendKind, setting: &str) -> Option<&'a Row> {
        let [backend, stage] = [("backend", backend.as_str()), ("stage", stage)];
        self.rows.one_of(&[stage, backend, ("setting", setting)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::studies::calibrate::advice::tests::measured;

    #[test]
    fn the_knee_is_the_smallest_setting_that_is_nearly_best() {
        // Scenario: a curve that saturates, one that falls again, a flat one, one that only rises, one point,
        // none; limits below, between and above its settings; one that was not measured, below a limit and above it.
        // Expected: the smallest setting at 95 % of the best, with the best; up to the first that reaches the limit; no knee
        // if that one counts.
        let knee = |curve: &[(u32, f64)], limit| {
            let measured: Vec<_> = curve
                .iter()
                .map(|(setting, reads)| (*setting, Some(*reads)))
                .collect();
            knee(&measured, limit)
        };
        let reads = [17.0, 40.0, 74.0, 89.0, 92.0, 92.5];
        let curve: Vec<_> = [1, 4, 16, 64, 128, 256].into_iter().zip(reads).collect();
        assert_eq!(knee(&curve, None), Some((3, 5)));
        let falling = [(1, 10.0), (2, 20.0), (4, 19.5), (8, 12.0)];
        assert_eq!(knee(&falling, None), Some((1, 1)));
        assert_eq!(knee(&[(1, 10.0), (2, 9.9), (4, 10.1)], None), Some((0, 2)));
        assert_eq!(knee(&[(1, 5.0)], None), Some((0, 0)));
        assert_eq!(knee(&[], None), None);
        let rising = [(64, 1.0), (128, 2.0), (256, 4.0), (512, 8.0)];
        let limits = [Some(1), Some(128), Some(240), Some(513), None];
        let knees = limits.map(|limit| knee(&rising, limit).unwrap().0);
        assert_eq!(knees, [0, 1, 2, 3, 3]);
        let gap = [(64, Some(1.0)), (128, Some(2.0)), (256, None)];
        let knees = [Some(128), Some(129)].map(|limit| super::knee(&gap, limit));
        assert_eq!(knees, [Some((1, 1)), None]);
    }

    #[test]
    fn cpu_decides_where_reads_do_not() {
        // Scenario: more reads for more CPU; fewer for less; as many for less, for more, for as much.
        // Expected: reads decide, CPU where reads are within the noise, else neither.
        let a = measured("", "", "", 100, 2.0);
        let words = |reads, cpu| {
            let b = measured("", "", "", reads, cpu);
            Contest::between(&a, &b).unwrap().choice()
        };
        assert_eq!(words(120, 2.5), (true, "pays"));
        assert_eq!(words(80, 1.0), (false, "costs reads"));
        assert_eq!(words(101, 1.5), (true, "pays in CPU"));
        assert_eq!(words(101, 3.0), (false, "costs CPU"));
        assert_eq!(words(101, 2.01), (false, "within the noise"));
    }

    #[test]
    fn what_was_repeated_too_rarely_is_not_called_noise() {
        // Scenario: two ratios far from 1, of two repetitions. Expected: no choice, and the reason is their number.
        let [reads, cpu] = [[0.7, 0.71], [0.5, 0.51]].map(|ratios| Summary::of(ratios).unwrap());
        let contest = Contest { reads, cpu };
        assert_eq!(contest.choice(), (false, "too few repetitions"));
    }
}
