//! Derives the keys of the daemon's configuration from the results, each with the figure that supports it.
//! Pure.
//!
//! Invariant: a setting that was not measured keeps the daemon's default, and its line says so. There is no
//! advice on sizes (memory, limits), which a device cannot tell, nor on the network, whose cost a file cannot
//! tell.

use super::found::{Contest, Found};
use crate::drive::engine::UNREGISTERED;
use crate::report::Advice;
use crate::sample::{Sample, cpu_us_per_read, reads_per_second};
use crate::setup::spacing_bytes;
use crate::stats::Verdict;
use ringfetch_command::quantity::rate;
use ringfetch_engine::config::{BackendKind, EngineConfig};

const REGISTERED: &str = "engine.uring.registered_buffers";
/// Names of settings that differ from the default.
const EAGER_OFF: &str = "eager flush 0";
const REGISTERED_OFF: &str = "registered buffers off";

fn advice(key: &str, value: impl ToString, why: impl Into<String>) -> Advice {
    Advice {
        key: key.to_owned(),
        value: value.to_string(),
        why: why.into(),
    }
}

impl Found<'_> {
    fn not_measured(&self, of_the_ring: bool) -> String {
        match &self.subject.refusal {
            Some(refusal) if of_the_ring => {
                format!("the default; not measured, for there is no io_uring here: {refusal}")
            }
            Some(_) | None if self.stopped => "the default; not measured, for it was stopped".to_owned(),
            Some(_) | None => "the default; not measured (see the notes)".to_owned(),
        }
    }

    /// What to write into the configuration: keys of one section are adjacent.
    pub(super) fn advice(&self) -> Vec<Advice> {
        let chosen = self.chosen(BackendKind::Uring);
        let (backend, direct, backend_why) = self.advised_backend();
        // Compares a setting with the default: ring settings are not measured without a ring.
        let by = |key, value: &dyn ToString, from: &str, to: &str| {
            let contest = self.setting(from, to);
            let why = contest.map(|contest| format!("{to} against {from}: {}", contest.words()));
            advice(
                key,
                value.to_string(),
                why.unwrap_or_else(|| self.not_measured(from == "default")),
            )
        };
        let eager = chosen.eager_flush_reads;
        // Without registered memory there is nothing to compare.
        let registered = match self.setting("default", REGISTERED_OFF) {
            Some(_) if self.is_registered() => {
                by(REGISTERED, &chosen.registered_buffers, "default", REGISTERED_OFF)
            }
            Some(_) | None => {
                let default = EngineConfig::default().uring.registered_buffers;
                advice(REGISTERED, default, self.not_measured(true))
            }
        };
        let announce = &chosen.announce;
        let threads = self.knee("mmap threads", None);
        let threads_why = threads.map_or_else(|| self.not_measured(false), |knee| knee.why("cold"));
        let mut lines = vec![
            advice("engine.backend", backend, backend_why),
            self.cores(),
            self.direct_io(direct),
            self.queue_depth(),
            by("engine.uring.eager_flush_reads", &eager, "default", EAGER_OFF),
            registered,
            advice("engine.mmap.threads", chosen.mmap_threads, threads_why),
            by("engine.mmap.announce", announce, "announce on", "announce off"),
        ];
        if backend == BackendKind::Pread {
            lines.push(self.pread_threads());
        }
        lines
    }

    /// As many as pread was measured with.
    fn pread_threads(&self) -> Advice {
        let threads = self.chosen(BackendKind::Pread).queue_depth.unwrap_or_default();
        let why = match (self.depth(), self.rings().0) {
            (Some(knee), _) if !self.subject.has_ring() => knee.why("threads of all cores"),
            (Some(_), 1) => "as measured: as many as one ring has reads in flight".to_owned(),
            (Some(_), rings) => {
                format!("as measured: as many as {rings} rings have reads in flight; all cores share them")
            }
            (None, _) => "as measured; what more or fewer would do was not".to_owned(),
        };
        advice("engine.pread.threads", threads, why)
    }

    /// Warm results decide if the whole file can be warm; otherwise cold ones do.
    fn advised_backend(&self) -> (BackendKind, bool, String) {
        for (stage, words) in [("warm", "the file fits in memory; warm"), ("cold", "cold")] {
            let Some(winner) = self.winner(stage) else {
                continue;
            };
            let each = |backend: BackendKind| {
                let row = self.backend(stage, backend, "many")?;
                let (reads, cpu) = (rate(row.median(reads_per_second)), row.median(cpu_us_per_read));
                Some(format!("{backend} {reads} reads/s at {cpu:.1} us CPU"))
            };
            let candidates = self.subject.candidates(stage == "warm").into_iter();
            let each: Vec<String> = candidates.clone().filter_map(each).collect();
            // Why not another one that made more reads.
            let many = |backend| self.backend(stage, backend, "many");
            let contest = |backend: BackendKind| {
                let (ours, other) = many(winner).zip(many(backend))?;
                let more = other.median(reads_per_second) > ours.median(reads_per_second);
                let contest = Contest::between(ours, other).filter(|_| more)?;
                Some(format!("; {backend} against {winner}: {}", contest.words()))
            };
            let contests: String = candidates.filter_map(contest).collect();
            let past_cache = matches!(winner, BackendKind::Uring | BackendKind::Pread);
            let direct = self.direct() && !(stage == "warm" && past_cache);
            return (winner, direct, format!("{words}: {}{contests}", each.join(", ")));
        }
        let default = match self.subject.has_ring() {
            true => EngineConfig::default().backend,
            false => BackendKind::Mmap,
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
            let why = match self.subject.cpus > 1 {
                true => self.not_measured(false),
                false => "there is one CPU".to_owned(),
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
            // `preferred` is the default, and uses the page cache if the file refuses direct I/O.
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
            let all = match rings {
                1 => "it".to_owned(),
                _ => format!("{rings} rings"),
            };
            let from = knee.setting;
            let cut = format!(
                "; cut from {from} to keep {all} below the device's {} tags",
                tags.of_queue
            );
            why.push_str(&cut);
        }
        advice(KEY, depth, why)
    }

    /// The settings that differ from the default: a table with its head.
    pub(super) fn contests(&self) -> Vec<Vec<String>> {
        let pairs = [
            ("default", REGISTERED_OFF),
            ("default", EAGER_OFF),
            ("default", "direct off"),
            ("announce on", "announce off"),
        ];
        let line = |(from, to): (&str, &str)| {
            let words = self.setting(from, to)?.words();
            Some(vec![to.to_owned(), from.to_owned(), words])
        };
        let head = ["setting", "against", ""].map(str::to_owned).to_vec();
        [head]
            .into_iter()
            .chain(pairs.into_iter().filter_map(line))
            .collect()
    }

    /// When io_uring is ahead of mmap and pread, and by how much: a table with its head.
    pub(super) fn backends(&self) -> Vec<Vec<String>> {
        let head = ["", "submitted at once", "uring against", "", ""];
        let mut lines = vec![head.map(str::to_owned).to_vec()];
        for stage in ["cold", "warm"] {
            if self.rows.with(&[("stage", stage)]).next().is_none() {
                continue;
            }
            for setting in ["one", "many"] {
                for other in [BackendKind::Mmap, BackendKind::Pread] {
                    let of = |backend| self.backend(stage, backend, setting);
                    let rows = of(other).zip(of(BackendKind::Uring));
                    let contest = rows.and_then(|(other, ring)| Contest::between(other, ring));
                    let said = match contest.map(|contest| contest.reads.verdict()) {
                        Some(Verdict::More) => "ahead",
                        Some(Verdict::Less) => "behind",
                        Some(Verdict::Same) => "no difference beyond the noise",
                        None => "not measured",
                    };
                    let words = contest.map_or_else(String::new, |contest| contest.words());
                    let line = [
                        stage,
                        &self.submitted(setting, other),
                        other.as_str(),
                        said,
                        &words,
                    ];
                    lines.push(line.map(str::to_owned).to_vec());
                }
            }
        }
        match (lines.len(), &self.subject.refusal) {
            (_, Some(refusal)) => vec![vec![refusal.clone()]],
            (1, None) => vec![vec!["not measured".to_owned()]],
            (_, None) => {
                if self.subject.warm_bytes == 0 {
                    let why = "the data are larger than the memory that is available";
                    lines.push(["warm", "", "", "not measured", why].map(str::to_owned).to_vec());
                }
                lines
            }
        }
    }

    /// Reads submitted at once by uring and by another backend: `128`, or `256 against 128`.
    fn submitted(&self, setting: &str, other: BackendKind) -> String {
        if setting == "one" {
            return "1".to_owned();
        }
        let [ring, other] = [BackendKind::Uring, other].map(|backend| self.asked(&self.chosen(backend)));
        match ring == other {
            true => ring.to_string(),
            false => format!("{ring} against {other}"),
        }
    }

    /// Conditions that spoil figures but that the report itself does not see.
    pub(super) fn doubts(&self) -> Vec<String> {
        let positions = self.subject.length_bytes / spacing_bytes(self.subject.block_bytes.into());
        let whole = |sample: &&Sample| sample.reads >= positions;
        let cold = self.rows.0.iter().filter(|row| row.get("heat") != Some("warm"));
        let used_up = cold.flat_map(|row| row.measured()).filter(whole).count();
        let mut notes = Vec::new();
        if used_up > 0 {
            notes.push(format!(
                "{used_up} steps read the whole file before their time ended; use a larger file"
            ));
        }
        if self.subject.registered && !self.is_registered() {
            notes.push(format!("registered buffers were not tried: {UNREGISTERED}"));
        }
        notes
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::studies::calibrate::subject::Subject;
    use crate::studies::calibrate::yaml::yaml;
    use crate::study::tests::row;
    use crate::study::{Row, Rows};
    use ringfetch_host::block::Tags;

    pub(in crate::studies::calibrate) fn subject() -> Subject {
        Subject {
            block_bytes: 4096,
            length_bytes: 1 << 30,
            direct: true,
            refusal: None,
            registered: true,
            cpus: 2,
            tags: Some(Tags {
                of_queue: 256,
                cpus_of_queue: None,
            }),
            warm_bytes: 0,
        }
    }

    /// A row of five repetitions with this CPU per read.
    pub(in crate::studies::calibrate) fn measured(
        stage: &str,
        backend: &str,
        setting: &str,
        reads: u64,
        cpu: f64,
    ) -> Row {
        let key = [("stage", stage), ("backend", backend), ("setting", setting)];
        let mut row = row(&key, &[reads; 5]);
        let samples = row.samples.iter_mut().flatten();
        samples.for_each(|sample| sample.cpu_us_per_read = cpu);
        row
    }

    fn value(lines: &[Advice], key: &str) -> (String, String) {
        let line = lines.iter().find(|line| line.key == key).unwrap();
        (line.value.clone(), line.why.clone())
    }

    #[test]
    fn the_section_says_every_key_with_its_figure() {
        // Scenario: a knee at 256 that the tags lower to 120 for two rings, settings that pay, cost and do
        // neither, backends of which mmap wins cold, and a path with a line break in the head. Expected: the
        // whole section, word for word; a line for each comparison of the backends.
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
        let depth = value(&lines, "engine.uring.queue_depth");
        assert_eq!(depth, ("256".to_owned(), why.to_owned()));
        // Two cores are asked for twice the 512 reads, whatever the backend.
        let lines = found.backends();
        let measured = lines.iter().find(|line| line[3] == "behind").unwrap();
        assert_eq!(measured[..3], ["cold", "1024", "mmap"]);
        assert_eq!(lines.iter().filter(|line| line[3] == "not measured").count(), 4);
        let why = "the data are larger than the memory that is available";
        assert_eq!(lines.last().unwrap(), &["warm", "", "", "not measured", why]);
        assert_eq!(found.contests().len(), 5);
    }

    #[test]
    fn what_was_not_measured_stays_at_its_default_and_says_so() {
        // Scenario: a depth with only half of its curve measured, stopped by hand; then a host without
        // io_uring on which pread won cold. Expected: the defaults, each with a remark that it was not
        // measured; then pread with its threads, the ring's keys at their defaults with the reason.
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
            registered: false,
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
        assert!(found.backends()[0][0].contains("seccomp"));
        let (registered, why) = value(&lines, "engine.uring.registered_buffers");
        assert!(
            registered == "true" && why.contains("seccomp"),
            "{registered} {why}"
        );

        // Memory cannot be registered: found out before, or by a step, whose figures then compare nothing.
        let mut unregistered = measured("settings", "uring", "default", 100, 2.0);
        unregistered
            .samples
            .iter_mut()
            .flatten()
            .for_each(|sample| sample.note = Some(UNREGISTERED.to_owned()));
        rows.0 = vec![
            unregistered,
            measured("settings", "uring", "registered buffers off", 200, 2.0),
        ];
        for registered in [true, false] {
            let subject = Subject {
                registered,
                ..subject.clone()
            };
            let lines = Found::new(&subject, &rows, false).advice();
            let (value, why) = value(&lines, "engine.uring.registered_buffers");
            assert!(
                value == "true" && why.starts_with("the default; not measured"),
                "{value} {why}"
            );
        }
    }

    #[test]
    fn what_failed_decides_nothing_and_the_rest_does() {
        // Scenario: rings of 256 and 512 that failed, of a curve that rises to 128; cold, all backends, only two, one; the same
        // stopped. Expected: the default depth, which says so; the comparison of those that were measured, of two at least;
        // once stopped, of all.
        let subject = subject();
        let depths = [1, 2, 4, 8, 16, 32, 64, 128].map(|depth| {
            let setting = depth.to_string();
            measured("depth", "uring", &setting, depth, 2.0)
        });
        let failed = ["256", "512"].map(|setting| row(&[("stage", "depth"), ("setting", setting)], &[]));
        let rows = Rows(depths.into_iter().chain(failed).collect());
        let found = Found::new(&subject, &rows, false);
        let (depth, why) = value(&found.advice(), "engine.uring.queue_depth");
        assert!(depth == "128" && why.contains("not measured"), "{depth} {why}");
        assert!(found.depth().is_none());
        // A device that takes 64 requests does not need them.
        let few = Subject {
            tags: Some(Tags {
                of_queue: 64,
                cpus_of_queue: None,
            }),
            ..self::subject()
        };
        assert!(Found::new(&few, &rows, false).depth().is_some());
        let cold = |stopped, backends: &[(&str, u64)]| {
            let rows = backends
                .iter()
                .map(|(name, reads)| measured("cold", name, "many", *reads, 2.0));
            let (backend, why) = value(
                &Found::new(&subject, &Rows(rows.collect()), stopped).advice(),
                "engine.backend",
            );
            (backend, why.contains("not measured"))
        };
        let all = [("uring", 40), ("auto", 45), ("mmap", 50), ("pread", 90)];
        let pread = ("pread".to_owned(), false);
        assert_eq!(cold(false, &all), pread);
        assert_eq!(cold(false, &all[2..]), pread);
        assert_eq!(cold(true, &all), pread);
        let default = ("uring".to_owned(), true);
        assert_eq!(cold(false, &all[3..]), default);
        assert_eq!(cold(true, &all[2..]), default);
    }

    #[test]
    fn steps_that_read_the_whole_file_are_noted() {
        // Scenario: steps of 64 and of 63 reads of 1 MiB, of a file of 64.5 MiB. Expected: a note on one of them.
        let subject = Subject {
            block_bytes: 1 << 20,
            length_bytes: 129 << 19,
            ..subject()
        };
        let rows = Rows(vec![row(&[("stage", "depth")], &[64, 63])]);
        let notes = Found::new(&subject, &rows, false).doubts();
        let expected = "1 steps read the whole file before their time ended; use a larger file";
        assert_eq!(notes, [expected]);
    }

    #[test]
    fn a_file_that_fits_in_memory_is_decided_warm() {
        // Scenario: uring wins cold; warm, mmap does, and then pread through the page cache; a backend that
        // is as fast as the preferred one. Expected: mmap, direct I/O unchanged; then pread without direct
        // I/O; the preferred one, with the reason.
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
        assert!(read[1].why.starts_with("for the backend above"), "{read:?}");
        let equal = values(100, 99);
        assert_eq!(shown(&equal), ["mmap", "preferred"]);
        let why = "; pread against mmap: reads/s 1.01x (1.01 to 1.01), CPU a read 1.00x: within the noise";
        assert!(equal[0].why.ends_with(why), "{equal:?}");
    }
}
