//! From rows to the section of the daemon's configuration, each key with the figure that it rests on. Pure.
//!
//! Invariant: what was not measured stays at the daemon's default, and its line says so. Absent: keys that say how much
//! is to be served (memory, limits), which no device can tell, and the network, whose cost no file tells.

use super::{ASKED_MIN, Subject};
use crate::drive::engine::{Choice, UNREGISTERED};
use crate::job::Sample;
use crate::quantity::{latency, rate};
use crate::report::{Advice, Beside};
use crate::stats::{Summary, Verdict};
use crate::study::{Row, Rows, reads_per_second};
use ringfetch_engine::config::{BackendKind, EngineConfig};

/// The knee is the smallest setting that reaches this share of the best.
const KNEE_SHARE: f64 = 0.95;
/// Columns of a comment.
const WIDTH: usize = 110;

fn advice(key: &str, value: impl ToString, why: impl Into<String>) -> Advice {
    Advice {
        key: key.to_owned(),
        value: value.to_string(),
        why: why.into(),
    }
}

/// Where a curve bends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Knee<'a> {
    pub(super) setting: u32,
    at: &'a Row,
    best: u32,
    best_at: &'a Row,
}

impl Knee<'_> {
    /// Why the knee is where it is, in figures.
    fn why(&self, what: &str) -> String {
        let reads = |row: &Row| median(row, reads_per_second);
        let p99 = |row: &Row| latency(median(row, |sample| sample.p99_us) * 1e3);
        let (here, most) = (reads(self.at), reads(self.best_at));
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

fn median(row: &Row, of: fn(&Sample) -> f64) -> f64 {
    row.summary(of).map_or(0.0, |summary| summary.median)
}

/// The smallest setting of a curve in ascending order that reaches [`KNEE_SHARE`] of the best, and the best, of equals the
/// first: their indices. With a limit, settings count up to the first that reaches it: 240 of 256 tags make 256 the
/// last, which is then cut.
fn knee(curve: &[(u32, f64)], limit: Option<u32>) -> Option<(usize, usize)> {
    let reaches = |(setting, _): &(u32, f64)| limit.is_some_and(|limit| *setting >= limit);
    let usable = curve
        .iter()
        .position(reaches)
        .map_or(curve.len(), |last| last + 1);
    let curve = curve.get(..usable)?;
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

/// How B does beside A, repetition by repetition.
#[derive(Debug, Clone, Copy)]
struct Contest {
    reads: Summary,
    /// Above 1, B takes less CPU a read.
    cpu: Summary,
}

impl Contest {
    fn between(a: &Row, b: &Row) -> Option<Self> {
        Some(Self {
            reads: b.ratio(a, reads_per_second)?,
            cpu: a.ratio(b, |sample| sample.cpu_us_per_read)?,
        })
    }

    /// Whether to take B, and what it does: reads decide; where they are within the noise, CPU a read does.
    fn choice(&self) -> (bool, &'static str) {
        match (self.reads.verdict(), self.cpu.verdict()) {
            (Verdict::More, _) => (true, "pays"),
            (Verdict::Less, _) => (false, "costs reads"),
            (Verdict::Same, Verdict::More) => (true, "pays in CPU"),
            (Verdict::Same, Verdict::Less) => (false, "costs CPU"),
            (Verdict::Same, Verdict::Same) => (false, "within the noise"),
        }
    }

    fn words(&self) -> String {
        let (reads, cpu) = (self.reads.times(), 1.0 / self.cpu.median);
        format!("reads/s {reads}, CPU a read {cpu:.2}x: {}", self.choice().1)
    }
}

/// What was found so far.
pub(super) struct Found<'a> {
    subject: &'a Subject,
    rows: &'a Rows,
    stopped: bool,
}

impl<'a> Found<'a> {
    pub(super) fn new(subject: &'a Subject, rows: &'a Rows, stopped: bool) -> Self {
        Self {
            subject,
            rows,
            stopped,
        }
    }

    pub(super) fn rows(&self) -> &Rows {
        self.rows
    }

    pub(super) fn tags(&self) -> Option<u32> {
        self.subject.tags
    }

    /// `None` where a part of the curve is missing: its knee would be where it was cut.
    fn knee(&self, stage: &str, limit: Option<u32>) -> Option<Knee<'a>> {
        let of_stage = self.rows.0.iter().filter(|row| row.get("stage") == Some(stage));
        let point = |row: &'a Row| {
            let setting: u32 = row.get("setting")?.parse().ok()?;
            Some((setting, row.summary(reads_per_second)?.median, row))
        };
        let mut points = of_stage.map(point).collect::<Option<Vec<_>>>()?;
        points.sort_by_key(|(setting, ..)| *setting);
        let curve: Vec<(u32, f64)> = points
            .iter()
            .map(|(setting, reads, _)| (*setting, *reads))
            .collect();
        let (knee, best) = knee(&curve, limit)?;
        let ((setting, _, at), (best, _, best_at)) = (points.get(knee)?, points.get(best)?);
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

    /// The depth of each of so many rings after the engine has cut it.
    fn in_force(&self, depth: u32, rings: u32) -> u32 {
        let mut config = EngineConfig {
            device_tags: self.subject.tags,
            cores: rings,
            ..EngineConfig::default()
        };
        config.uring.queue_depth = depth;
        config.ring_depth()
    }

    /// Reads asked for at once: as many as keep the depth and the threads of mmap busy.
    pub(super) fn asked(&self) -> u32 {
        let depth = self.depth().map_or(0, |knee| knee.setting);
        ASKED_MIN.max(depth.saturating_mul(2))
    }

    fn row(&self, stage: &str, setting: &str) -> Option<&'a Row> {
        self.rows.one_of([("stage", stage), ("setting", setting)])
    }

    fn setting(&self, from: &str, to: &str) -> Option<Contest> {
        Contest::between(self.row("settings", from)?, self.row("settings", to)?)
    }

    fn takes(&self, from: &str, to: &str) -> bool {
        self.setting(from, to).is_some_and(|contest| contest.choice().0)
    }

    pub(super) fn direct(&self) -> bool {
        self.subject.direct && !self.takes("default", "direct off")
    }

    /// As many rings as pay, doubling, with the last comparison.
    fn rings(&self) -> (u32, Option<(String, Contest)>) {
        let counts = self.rows.values("setting");
        let found = counts
            .iter()
            .filter_map(|name| Some((name, self.row("rings", name)?)));
        let mut rows: Vec<(u32, &Row)> = found
            .filter_map(|(name, row)| Some((name.parse().ok()?, row)))
            .collect();
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

    fn is_registered(&self) -> bool {
        let all = self.rows.0.iter().flat_map(|row| row.measured());
        let refused = |sample: &Sample| sample.note.as_deref() == Some(UNREGISTERED);
        self.subject.registered && !all.into_iter().any(refused)
    }

    /// A backend with the settings found so far.
    pub(super) fn chosen(&self, backend: BackendKind) -> Choice {
        let base = self.subject.base(backend);
        Choice {
            rings: if backend.uses_ring() { self.rings().0 } else { 1 },
            // A pool of pread has as many reads in flight as threads.
            queue_depth: self
                .depth()
                .map(|knee| knee.setting)
                .or(Some(EngineConfig::default().uring.queue_depth)),
            eager_flush_reads: if self.takes("default", "eager flush 0") {
                0
            } else {
                base.eager_flush_reads
            },
            registered_buffers: self.is_registered() && !self.takes("default", "registered buffers off"),
            mmap_threads: self
                .knee("mmap threads", None)
                .map_or(base.mmap_threads, |knee| knee.setting),
            announce: !self.takes("announce on", "announce off"),
            ..base
        }
    }

    /// The backend to take: a later one in order of preference wins only when it is better beyond the noise.
    fn winner(&self, stage: &str) -> Option<BackendKind> {
        let many = |backend: &BackendKind| self.backend(stage, *backend, "many");
        let mut candidates = self.subject.candidates(stage == "warm").into_iter();
        let mut winner = candidates.next()?;
        many(&winner)?;
        for challenger in candidates {
            let contest = many(&winner)
                .zip(many(&challenger))
                .and_then(|(a, b)| Contest::between(a, b));
            if contest.is_some_and(|contest| contest.choice().0) {
                winner = challenger;
            }
        }
        Some(winner)
    }

    fn backend(&self, stage: &str, backend: BackendKind, setting: &str) -> Option<&'a Row> {
        self.rows.one_of([
            ("stage", stage),
            ("backend", backend.as_str()),
            ("setting", setting),
        ])
    }

    fn not_measured(&self, of_the_ring: bool) -> String {
        match &self.subject.refusal {
            Some(refusal) if of_the_ring => {
                format!("the default; not measured, for there is no io_uring here: {refusal}")
            }
            Some(_) | None if self.stopped => "the default; not measured, for it was stopped".to_owned(),
            Some(_) | None => "the default; not measured (see the notes)".to_owned(),
        }
    }

    /// What to write into the configuration: keys of one section stand together.
    pub(super) fn advice(&self) -> Vec<Advice> {
        let chosen = self.chosen(BackendKind::Uring);
        let (backend, direct, backend_why) = self.advised_backend();
        // Of a setting beside the default: ring settings are not measured without a ring.
        let by = |key, value: &dyn ToString, from: &str, to: &str| {
            let contest = self.setting(from, to);
            let why = contest.map(|contest| format!("{to} against {from}: {}", contest.words()));
            let none = || self.not_measured(from == "default");
            advice(key, value.to_string(), why.unwrap_or_else(none))
        };
        let (eager, registered) = (&chosen.eager_flush_reads, &chosen.registered_buffers);
        let (off, keys) = ("registered buffers off", "engine.uring");
        let threads = self.knee("mmap threads", None);
        let threads_why = threads.map_or_else(|| self.not_measured(false), |knee| knee.why("cold"));
        let mut lines = vec![
            advice("engine.backend", backend, backend_why),
            self.cores(),
            self.direct_io(direct),
            self.queue_depth(),
            by(
                &format!("{keys}.eager_flush_reads"),
                eager,
                "default",
                "eager flush 0",
            ),
            by(&format!("{keys}.registered_buffers"), registered, "default", off),
            advice("engine.mmap.threads", chosen.mmap_threads, threads_why),
            by(
                "engine.mmap.announce",
                &chosen.announce,
                "announce on",
                "announce off",
            ),
        ];
        if let (BackendKind::Pread, Some(threads)) = (backend, chosen.queue_depth) {
            let why = "as many as the knee of the depth: each has one read in flight";
            lines.push(advice("engine.pread.threads", threads, why));
        }
        lines
    }

    /// Warm decides where the whole file can be warm; else cold does.
    fn advised_backend(&self) -> (BackendKind, bool, String) {
        for (stage, words) in [("warm", "the file fits in memory; warm"), ("cold", "cold")] {
            let Some(winner) = self.winner(stage) else {
                continue;
            };
            let each = |backend: BackendKind| {
                let row = self.backend(stage, backend, "many")?;
                let reads = rate(median(row, reads_per_second));
                let cpu = median(row, |sample| sample.cpu_us_per_read);
                Some(format!("{backend} {reads} reads/s at {cpu:.1} us CPU"))
            };
            let each: Vec<String> = self
                .subject
                .candidates(stage == "warm")
                .into_iter()
                .filter_map(each)
                .collect();
            let past_cache = matches!(winner, BackendKind::Uring | BackendKind::Pread);
            let direct = self.direct() && !(stage == "warm" && past_cache);
            return (winner, direct, format!("{words}: {}", each.join(", ")));
        }
        let default = if self.subject.has_ring() {
            EngineConfig::default().backend
        } else {
            BackendKind::Mmap
        };
        (default, self.direct(), self.not_measured(true))
    }

    fn cores(&self) -> Advice {
        const KEY: &str = "engine.cores";
        if let Some(refusal) = &self.subject.refusal {
            let why = format!("the default: without a ring cores only serve connections ({refusal})");
            return advice(KEY, "auto", why);
        }
        let (rings, Some((names, contest))) = self.rings() else {
            let why = if self.subject.cpus > 1 {
                self.not_measured(false)
            } else {
                "there is one CPU".to_owned()
            };
            return advice(KEY, "auto", why);
        };
        let why = "cores serve connections too, which was not measured: more if they are busy";
        advice(KEY, rings, format!("{names}: {}; {why}", contest.words()))
    }

    fn direct_io(&self, direct: bool) -> Advice {
        const KEY: &str = "engine.direct_io";
        let contest = self.setting("default", "direct off");
        let told = contest.map(|contest| format!("buffered against direct: {}", contest.words()));
        match (direct, told) {
            (true, Some(told)) => advice(KEY, "preferred", told),
            (false, told) if self.direct() => {
                let cold = told.map_or_else(String::new, |told| format!(" (cold: {told})"));
                let why = format!("for the backend above, which is to read through the page cache{cold}");
                advice(KEY, "off", why)
            }
            (false, Some(told)) => advice(KEY, "off", told),
            // `preferred` is the default, and takes the page cache where the file refuses.
            (_, None) => advice(KEY, "preferred", self.not_measured(true)),
        }
    }

    fn queue_depth(&self) -> Advice {
        const KEY: &str = "engine.uring.queue_depth";
        let default = EngineConfig::default().uring.queue_depth;
        let (Some(knee), true) = (self.depth(), self.subject.has_ring()) else {
            return advice(KEY, default, self.not_measured(true));
        };
        let rings = self.rings().0;
        let depth = self.in_force(knee.setting, rings);
        let mut why = knee.why("one ring");
        if let (Some(tags), true) = (self.subject.tags, depth < knee.setting) {
            let all = if rings == 1 {
                "it".to_owned()
            } else {
                format!("{rings} rings")
            };
            let cut = format!(
                "; cut from {} to keep {all} below the device's {tags} tags",
                knee.setting
            );
            why.push_str(&cut);
        }
        advice(KEY, depth, why)
    }

    /// The settings beside the default.
    pub(super) fn contests(&self) -> Option<Beside> {
        let mut rows = vec![["setting", "against", ""].map(str::to_owned).to_vec()];
        for (from, to) in [
            ("default", "registered buffers off"),
            ("default", "eager flush 0"),
            ("default", "direct off"),
            ("announce on", "announce off"),
        ] {
            if let Some(contest) = self.setting(from, to) {
                rows.push(vec![to.to_owned(), from.to_owned(), contest.words()]);
            }
        }
        (rows.len() > 1).then(|| Beside::of("Settings beside the default", rows))
    }

    /// When io_uring is ahead of mmap and pread, and by how much.
    pub(super) fn backends(&self) -> Beside {
        let head = ["", "asked for at once", "uring against", "", ""];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for stage in ["cold", "warm"] {
            for (setting, asked) in [("one", "1".to_owned()), ("many", self.asked().to_string())] {
                for other in [BackendKind::Mmap, BackendKind::Pread] {
                    let of = |backend| self.backend(stage, backend, setting);
                    let Some(contest) = of(other)
                        .zip(of(BackendKind::Uring))
                        .and_then(|(other, ring)| Contest::between(other, ring))
                    else {
                        continue;
                    };
                    let said = match contest.reads.verdict() {
                        Verdict::More => "ahead",
                        Verdict::Less => "behind",
                        Verdict::Same => "no difference beyond the noise",
                    };
                    let line = [stage, &asked, other.as_str(), said, &contest.words()];
                    rows.push(line.map(str::to_owned).to_vec());
                }
            }
        }
        if rows.len() == 1 {
            let why = self.subject.refusal.clone();
            rows = vec![vec![why.unwrap_or_else(|| "not measured".to_owned())]];
        }
        Beside::of("When io_uring beats mmap and pread here, and by how much", rows)
    }

    /// What spoils figures and the report itself does not see.
    pub(super) fn doubts(&self) -> Vec<String> {
        let whole = |sample: &Sample| {
            sample.bytes >= self.subject.length_bytes / 4096 * u64::from(self.subject.block_bytes.min(4096))
        };
        let cold = self.rows.0.iter().filter(|row| row.get("heat") != Some("warm"));
        let used_up = cold
            .flat_map(|row| row.measured())
            .filter(|sample| whole(sample))
            .count();
        let mut notes = Vec::new();
        if used_up > 0 {
            notes.push(format!(
                "{used_up} steps had read the whole file before their time was over: a larger file tells more"
            ));
        }
        if self.subject.registered && !self.is_registered() {
            notes.push(format!("registered buffers were not tried: {UNREGISTERED}"));
        }
        notes
    }
}

/// The `engine` section, each line with its reason. Keys of one section stand together and in order in `lines`.
pub(super) fn yaml(head: &[String], lines: &[Advice]) -> String {
    let mut text = String::new();
    for line in head {
        comment(&mut text, "", line);
    }
    let mut open: Vec<&str> = Vec::new();
    for line in lines {
        let mut sections: Vec<&str> = line.key.split('.').collect();
        let key = sections.pop().unwrap_or(&line.key);
        let kept = open.iter().zip(&sections).take_while(|(a, b)| a == b).count();
        for (level, section) in sections.iter().enumerate().skip(kept) {
            text.push_str(&format!("{}{section}:\n", "  ".repeat(level)));
        }
        let indent = "  ".repeat(sections.len());
        comment(&mut text, &indent, &line.why);
        text.push_str(&format!("{indent}{key}: {}\n", line.value));
        open = sections;
    }
    text
}

/// A comment in lines of at most [`WIDTH`], where its words allow that. No character can end it: a path may hold any.
fn comment(out: &mut String, indent: &str, text: &str) {
    let shown: String = text
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    let mut line = format!("{indent}#");
    let empty = line.chars().count();
    for word in shown.split(' ') {
        let used = line.chars().count();
        if used > empty && used + 1 + word.chars().count() > WIDTH {
            out.push_str(&line);
            out.push('\n');
            line = format!("{indent}#  ");
        }
        line.push(' ');
        line.push_str(word);
    }
    out.push_str(&line);
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::tests::row;

    fn subject() -> Subject {
        Subject {
            block_bytes: 4096,
            length_bytes: 1 << 30,
            direct: true,
            refusal: None,
            registered: true,
            cpus: 2,
            tags: Some(256),
            warm_bytes: 0,
        }
    }

    /// A row of five repetitions whose CPU a read is as given.
    fn measured(stage: &str, backend: &str, setting: &str, reads: u64, cpu: f64) -> Row {
        let key = [("stage", stage), ("backend", backend), ("setting", setting)];
        let mut row = row(&key, &[reads; 5]);
        row.samples
            .iter_mut()
            .flatten()
            .for_each(|sample| sample.cpu_us_per_read = cpu);
        row
    }

    fn value(lines: &[Advice], key: &str) -> (String, String) {
        let line = lines.iter().find(|line| line.key == key).unwrap();
        (line.value.clone(), line.why.clone())
    }

    #[test]
    fn the_knee_is_the_smallest_setting_that_is_nearly_best() {
        // Scenario: a curve that saturates, one that falls again, a flat one, one that only rises, one point, none; limits
        // below, between and above its settings.
        // Expected: the smallest setting at 95 % of the best, beside the best; up to the first that reaches the limit.
        let curve = [
            (1, 17.0),
            (4, 40.0),
            (16, 74.0),
            (64, 89.0),
            (128, 92.0),
            (256, 92.5),
        ];
        assert_eq!(knee(&curve, None), Some((3, 5)));
        assert_eq!(
            knee(&[(1, 10.0), (2, 20.0), (4, 19.5), (8, 12.0)], None),
            Some((1, 1))
        );
        assert_eq!(knee(&[(1, 10.0), (2, 9.9), (4, 10.1)], None), Some((0, 2)));
        assert_eq!(knee(&[(1, 5.0)], None), Some((0, 0)));
        assert_eq!(knee(&[], None), None);
        let rising = [(64, 1.0), (128, 2.0), (256, 4.0), (512, 8.0)];
        let limits = [Some(1), Some(128), Some(240), Some(513), None];
        assert_eq!(
            limits.map(|limit| knee(&rising, limit).unwrap().0),
            [0, 1, 2, 3, 3]
        );
    }

    #[test]
    fn the_section_says_every_key_with_its_figure() {
        // Scenario: a knee at 256 that the tags cut to 120 for two rings, settings that pay, cost and do neither, backends
        // of which mmap wins cold, and a path with a line break in the head.
        // Expected: the whole section, word for word; a line for each comparison of the backends.
        let mut rows = Rows(Vec::new());
        for (setting, reads) in [("128", 80_000), ("256", 98_000), ("512", 100_000)] {
            rows.0.push(measured("depth", "uring", setting, reads, 2.0));
        }
        rows.0.extend([
            measured("mmap threads", "mmap", "1", 50_000, 2.0),
            measured("mmap threads", "mmap", "2", 100_000, 2.0),
            measured("settings", "mmap", "announce on", 100, 2.0),
            measured("settings", "mmap", "announce off", 100, 2.0),
            measured("settings", "uring", "default", 100, 2.0),
            measured("settings", "uring", "eager flush 0", 101, 1.6),
            measured("settings", "uring", "registered buffers off", 125, 2.0),
            measured("settings", "uring", "direct off", 50, 2.0),
            measured("rings", "uring", "1", 100, 2.0),
            measured("rings", "uring", "2", 150, 2.0),
            measured("cold", "uring", "many", 50_000, 2.5),
            measured("cold", "mmap", "many", 75_000, 2.5),
        ]);
        let subject = subject();
        let found = Found::new(&subject, &rows, false);
        let text = yaml(&["of /data/a\nb: c".to_owned()], &found.advice());
        let expected = "\
# of /data/a?b: c
engine:
  # cold: uring 50 000 reads/s at 2.5 us CPU, mmap 75 000 reads/s at 2.5 us CPU
  backend: mmap
  # 2 rings against 1: reads/s 1.50x (1.50 to 1.50), CPU a read 1.00x: pays; cores serve connections too,
  #   which was not measured: more if they are busy
  cores: 2
  # buffered against direct: reads/s 0.50x (0.50 to 0.50), CPU a read 1.00x: costs reads
  direct_io: preferred
  uring:
    # one ring: 98 000 reads/s, the most; p99 300 us; cut from 256 to keep 2 rings below the device's 256 tags
    queue_depth: 120
    # eager flush 0 against default: reads/s 1.01x (1.01 to 1.01), CPU a read 0.80x: pays in CPU
    eager_flush_reads: 0
    # registered buffers off against default: reads/s 1.25x (1.25 to 1.25), CPU a read 1.00x: pays
    registered_buffers: false
  mmap:
    # cold: 100 000 reads/s, the most; p99 300 us
    threads: 2
    # announce off against announce on: reads/s 1.00x (1.00 to 1.00), CPU a read 1.00x: within the noise
    announce: true
";
        assert_eq!(text, expected);
        let unlimited = Subject {
            tags: None,
            ..subject.clone()
        };
        let lines = Found::new(&unlimited, &rows, false).advice();
        let why = "one ring: 98 000 reads/s, 98 % of the most (100 000 at 512); p99 300 us against 300 us";
        assert_eq!(
            value(&lines, "engine.uring.queue_depth"),
            ("256".to_owned(), why.to_owned())
        );
        assert_eq!(found.backends().rows[1][2..4], ["mmap", "behind"]);
        assert_eq!(found.contests().unwrap().rows.len(), 5);
    }

    #[test]
    fn what_was_not_measured_stays_at_its_default_and_says_so() {
        // Scenario: a depth only half of the curve of which was measured, stopped by hand; then a host without io_uring on
        // which pread won cold.
        // Expected: the defaults, each with a word that it was not measured; then pread with its threads, the ring's keys
        // at their defaults with the reason.
        let subject = subject();
        let mut rows = Rows(vec![
            measured("depth", "uring", "1", 100, 2.0),
            row(&[("stage", "depth"), ("setting", "2")], &[]),
        ]);
        let lines = Found::new(&subject, &rows, true).advice();
        assert_eq!(value(&lines, "engine.uring.queue_depth").0, "128");
        assert_eq!(value(&lines, "engine.backend").0, "uring");
        assert!(lines.iter().all(|line| line.why.contains("stopped")), "{lines:?}");

        let refused = Subject {
            refusal: Some("a seccomp filter refuses it".to_owned()),
            ..subject
        };
        rows.0 = vec![
            measured("depth", "pread", "64", 100, 2.0),
            measured("cold", "mmap", "many", 50, 2.0),
            measured("cold", "pread", "many", 90, 2.0),
        ];
        let found = Found::new(&refused, &rows, false);
        let lines = found.advice();
        assert_eq!(value(&lines, "engine.backend").0, "pread");
        assert_eq!(value(&lines, "engine.pread.threads").0, "64");
        assert_eq!(value(&lines, "engine.cores").0, "auto");
        let (depth, why) = value(&lines, "engine.uring.queue_depth");
        assert!(depth == "128" && why.contains("seccomp"), "{depth} {why}");
        assert!(found.backends().rows[0][0].contains("seccomp"));
    }

    #[test]
    fn a_file_that_fits_in_memory_is_decided_warm() {
        // Scenario: uring wins cold; warm, mmap does, and then pread through the page cache; a backend that is as fast as
        // the first in order.
        // Expected: mmap, direct I/O left as it is; then pread without direct I/O; the first in order.
        let subject = subject();
        let values = |pread: u64, mmap: u64| {
            let rows = Rows(vec![
                measured("settings", "uring", "default", 200, 2.0),
                measured("settings", "uring", "direct off", 100, 2.0),
                measured("cold", "uring", "many", 90, 2.0),
                measured("cold", "mmap", "many", 10, 2.0),
                measured("warm", "mmap", "many", mmap, 2.0),
                measured("warm", "pread", "many", pread, 2.0),
            ]);
            let lines = Found::new(&subject, &rows, false).advice();
            [0, 2].map(|index: usize| lines[index].clone())
        };
        let shown = |lines: &[Advice; 2]| lines.clone().map(|line| line.value);
        assert_eq!(shown(&values(10, 90)), ["mmap", "preferred"]);
        let read = values(90, 10);
        assert_eq!(shown(&read), ["pread", "off"]);
        assert!(
            read[1].why.starts_with("for the backend above"),
            "{}",
            read[1].why
        );
        assert_eq!(shown(&values(100, 99)), ["mmap", "preferred"]);
    }

    #[test]
    fn cpu_decides_where_reads_do_not() {
        // Scenario: more reads for more CPU; fewer for less; as many for less, for more, for as much.
        // Expected: reads first, CPU where reads are within the noise, else neither.
        let a = measured("", "", "", 100, 2.0);
        let words = |reads, cpu| {
            Contest::between(&a, &measured("", "", "", reads, cpu))
                .unwrap()
                .choice()
        };
        assert_eq!(words(120, 2.5), (true, "pays"));
        assert_eq!(words(80, 1.0), (false, "costs reads"));
        assert_eq!(words(101, 1.5), (true, "pays in CPU"));
        assert_eq!(words(101, 3.0), (false, "costs CPU"));
        assert_eq!(words(101, 2.01), (false, "within the noise"));
    }
}
