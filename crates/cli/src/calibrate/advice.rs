//! From findings to the section of the daemon's configuration, each line with the figure that it rests on.
//!
//! Invariant: what was not measured stays at the daemon's default, and its line says so. Absent: keys that say how much
//! is to be served (memory, limits), which no device can tell.

use super::findings::{Contest, Curve, Findings, Phase, Ranking};
use super::judge::Choice;
use super::target::Target;
use crate::quantity::{latency, rate};
use ringfetch_engine::config::{BackendKind, EngineConfig};
use serde::Serialize;

/// Columns of a comment.
const WIDTH: usize = 110;

/// A key with its value and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Advice {
    /// `engine.uring.queue_depth`.
    pub(super) key: &'static str,
    pub(super) value: String,
    pub(super) why: String,
}

fn advice(key: &'static str, value: impl ToString, why: impl Into<String>) -> Advice {
    Advice {
        key,
        value: value.to_string(),
        why: why.into(),
    }
}

/// What to write into the configuration for this target.
pub(super) fn advise(target: &Target, findings: &Findings) -> Vec<Advice> {
    advise_on(
        target
            .device
            .as_ref()
            .and_then(ringfetch_host::block::Device::queue_tags),
        findings,
    )
}

fn advise_on(tags: Option<u32>, findings: &Findings) -> Vec<Advice> {
    let chosen = &findings.chosen;
    let (backend, direct, backend_why) = backend(findings);
    let mut lines = vec![
        advice("engine.backend", backend, backend_why),
        cores(findings),
        direct_io(findings, direct),
        queue_depth(findings, tags),
        by_contest(
            "engine.uring.eager_flush_reads",
            chosen.eager_flush_reads,
            findings,
            Phase::EagerFlush,
        ),
        by_contest(
            "engine.uring.registered_buffers",
            chosen.registered_buffers,
            findings,
            Phase::RegisteredBuffers,
        ),
        advice(
            "engine.mmap.threads",
            chosen.mmap_threads,
            findings
                .mmap_threads
                .as_ref()
                .map_or_else(|| not_measured(findings, false), |curve| knee_text(curve, "cold")),
        ),
        by_contest(
            "engine.mmap.announce",
            chosen.announce,
            findings,
            Phase::MmapAnnounce,
        ),
    ];
    if backend == BackendKind::Pread {
        let why = "as many as the knee of the depth: each has one read in flight";
        lines.push(advice("engine.pread.threads", chosen.pread_threads, why));
    }
    lines
}

fn not_measured(findings: &Findings, of_the_ring: bool) -> String {
    match &findings.ring_refusal {
        Some(refusal) if of_the_ring => {
            format!("the default; not measured, for there is no io_uring here: {refusal}")
        }
        Some(_) | None if findings.stopped => "the default; not measured, for it was stopped".to_owned(),
        Some(_) | None => "the default; not measured (see the notes)".to_owned(),
    }
}

/// Warm decides where the whole file can be warm; else cold does.
fn backend(findings: &Findings) -> (BackendKind, bool, String) {
    let told = |ranking: &Ranking, heat: &str| {
        let each: Vec<String> = ranking
            .rows
            .iter()
            .map(|row| {
                let (reads, cpu) = (rate(row.reads_per_second), row.cpu_us_per_read);
                format!("{} {reads} reads/s at {cpu:.1} us CPU", row.backend)
            })
            .collect();
        format!("{heat}: {}", each.join(", "))
    };
    let by = |ranking: &Option<Ranking>| {
        let row = ranking.as_ref()?.winner()?;
        Some((row.backend, row.direct))
    };
    if let (Some((backend, direct)), Some(warm)) = (by(&findings.warm), &findings.warm) {
        let why = format!("the file fits in memory; {}", told(warm, "warm"));
        return (
            backend,
            direct || !matches!(backend, BackendKind::Uring | BackendKind::Pread),
            why,
        );
    }
    if let (Some((backend, _)), Some(cold)) = (by(&findings.cold), &findings.cold) {
        return (backend, findings.chosen.direct, told(cold, "cold"));
    }
    let default = if findings.ring_refusal.is_none() {
        EngineConfig::default().backend
    } else {
        BackendKind::Mmap
    };
    (default, findings.chosen.direct, not_measured(findings, true))
}

fn cores(findings: &Findings) -> Advice {
    const KEY: &str = "engine.cores";
    if let Some(refusal) = &findings.ring_refusal {
        let why = format!("the default: without a ring cores only serve connections ({refusal})");
        return advice(KEY, "auto", why);
    }
    let Some(contest) = findings.contest(Phase::Rings) else {
        let why = if findings.stopped {
            not_measured(findings, false)
        } else {
            "there is one CPU".to_owned()
        };
        return advice(KEY, "auto", why);
    };
    let why = format!(
        "{} rings against {}: {}; cores serve connections too, which was not measured: more if they are busy",
        contest.second,
        contest.first,
        ratios(contest)
    );
    advice(KEY, findings.chosen.rings, why)
}

fn direct_io(findings: &Findings, direct: bool) -> Advice {
    const KEY: &str = "engine.direct_io";
    let told = findings.contest(Phase::DirectIo).map(contest_text);
    match (direct, told) {
        (true, Some(told)) => advice(KEY, "preferred", told),
        (false, told) if findings.chosen.direct => {
            let cold = told.map_or_else(String::new, |told| format!(" (cold: {told})"));
            advice(
                KEY,
                "off",
                format!("for the backend above, which is to read through the page cache{cold}"),
            )
        }
        (false, Some(told)) => advice(KEY, "off", told),
        // `preferred` is the default, and takes the page cache where the file refuses.
        (_, None) => advice(KEY, "preferred", not_measured(findings, true)),
    }
}

fn queue_depth(findings: &Findings, tags: Option<u32>) -> Advice {
    const KEY: &str = "engine.uring.queue_depth";
    let default = EngineConfig::default().uring.queue_depth;
    let (Some(curve), Some(depth)) = (&findings.depth, findings.depth_in_force) else {
        return advice(KEY, default, not_measured(findings, true));
    };
    let mut why = knee_text(curve, "one ring");
    if let (Some(knee), Some(tags)) = (curve.knee(), tags)
        && depth < knee.setting
    {
        let rings = findings.chosen.rings;
        let all = if rings == 1 {
            "it".to_owned()
        } else {
            format!("{rings} rings")
        };
        why.push_str(&format!(
            "; cut from {} to keep {all} below the device's {tags} tags",
            knee.setting
        ));
    }
    advice(KEY, depth, why)
}

fn by_contest(key: &'static str, value: impl ToString, findings: &Findings, phase: Phase) -> Advice {
    let of_the_ring = phase != Phase::MmapAnnounce;
    let why = findings
        .contest(phase)
        .map_or_else(|| not_measured(findings, of_the_ring), contest_text);
    advice(key, value, why)
}

/// Why the knee is where it is, in figures.
pub(super) fn knee_text(curve: &Curve, what: &str) -> String {
    let (Some(knee), Some(best)) = (curve.knee(), curve.best()) else {
        return String::new();
    };
    let share = 100.0 * knee.reads_per_second / best.reads_per_second.max(1e-9);
    let p99 = |us: f64| latency(us * 1e3);
    if knee.setting == best.setting {
        return format!(
            "{what}: {} reads/s, the most; p99 {}",
            rate(knee.reads_per_second),
            p99(knee.p99_us)
        );
    }
    format!(
        "{what}: {} reads/s, {share:.0} % of the most ({} at {}); p99 {} against {}",
        rate(knee.reads_per_second),
        rate(best.reads_per_second),
        best.setting,
        p99(knee.p99_us),
        p99(best.p99_us)
    )
}

fn contest_text(contest: &Contest) -> String {
    format!(
        "{} against {}: {}",
        contest.second,
        contest.first,
        ratios(contest)
    )
}

/// `x1.08 reads/s (1.05 to 1.12), x0.97 CPU a read: pays`.
fn ratios(contest: &Contest) -> String {
    let reads = &contest.reads;
    format!(
        "x{:.2} reads/s ({:.2} to {:.2}), x{:.2} CPU a read: {}",
        reads.median,
        reads.low,
        reads.high,
        1.0 / contest.cpu.median,
        verdict(contest)
    )
}

/// What a contest came to, of its second setting.
pub(super) fn verdict(contest: &Contest) -> &'static str {
    match contest.choice {
        Choice::SecondByReads => "pays",
        Choice::FirstByReads => "costs reads",
        Choice::SecondByCpu => "pays in CPU",
        Choice::FirstByCpu => "costs CPU",
        Choice::Default => "within the noise",
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
        let key = sections.pop().unwrap_or(line.key);
        let kept = open.iter().zip(&sections).take_while(|(a, b)| a == b).count();
        for (level, section) in sections.iter().enumerate().skip(kept) {
            text.push_str(&format!("{}{section}:\n", "  ".repeat(level)));
        }
        let indent = "  ".repeat(sections.len());
        comment(&mut text, &indent, &line.why);
        text.push_str(&format!(
            "{indent}{key}: {}
",
            line.value
        ));
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
    use super::super::drive::Setup;
    use super::super::findings::tests::{sample, setup};
    use super::*;

    fn findings() -> Findings {
        Findings {
            ring_refusal: None,
            depth: None,
            contests: Vec::new(),
            mmap_threads: None,
            cold: None,
            warm: None,
            warm_window_bytes: None,
            chosen: setup(BackendKind::Uring),
            depth_in_force: Some(120),
            stopped: false,
            notes: Vec::new(),
            steps: Vec::new(),
        }
    }

    fn contest(phase: Phase, reads: f64, cpu: f64) -> Contest {
        let pair = (sample(100.0, 2.0), sample(100.0 * reads, 2.0 / cpu));
        Contest::between(phase, ["off", "on"].map(str::to_owned), &[pair; 3]).unwrap()
    }

    #[test]
    fn the_section_says_every_key_with_its_figure() {
        // Scenario: a knee at 256 that the tags cut to 120 for two rings, contests that pay, cost and do neither, a
        // ranking that mmap wins cold, and a path with a line break in the head.
        // Expected: the whole section, word for word.
        let curve = Curve::through(
            &[
                (128, sample(80_000.0, 2.0)),
                (256, sample(98_000.0, 2.0)),
                (512, sample(100_000.0, 2.0)),
            ],
            None,
        );
        let row = |backend, reads| (setup(backend), sample(reads, 2.5));
        let round = vec![
            row(BackendKind::Uring, 50_000.0),
            row(BackendKind::Mmap, 75_000.0),
        ];
        let chosen = Setup {
            rings: 2,
            registered_buffers: false,
            ..setup(BackendKind::Uring)
        };
        let found = Findings {
            mmap_threads: curve.clone(),
            depth: curve,
            contests: vec![
                contest(Phase::RegisteredBuffers, 0.8, 1.0),
                contest(Phase::EagerFlush, 1.01, 1.25),
                contest(Phase::DirectIo, 2.0, 1.0),
                contest(Phase::Rings, 1.5, 1.0),
                contest(Phase::MmapAnnounce, 1.0, 1.0),
            ],
            cold: Ranking::of(&[round.clone(), round.clone(), round]),
            chosen,
            ..findings()
        };
        let text = yaml(&["of /data/a\nb: c".to_owned()], &advise_on(Some(256), &found));
        let expected = "\
# of /data/a?b: c
engine:
  # cold: uring 50 000 reads/s at 2.5 us CPU, mmap 75 000 reads/s at 2.5 us CPU
  backend: mmap
  # on rings against off: x1.50 reads/s (1.50 to 1.50), x1.00 CPU a read: pays; cores serve connections too,
  #   which was not measured: more if they are busy
  cores: 2
  # on against off: x2.00 reads/s (2.00 to 2.00), x1.00 CPU a read: pays
  direct_io: preferred
  uring:
    # one ring: 98 000 reads/s, 98 % of the most (100 000 at 512); p99 10.2 us against 10.0 us; cut from 256
    #   to keep 2 rings below the device's 256 tags
    queue_depth: 120
    # on against off: x1.01 reads/s (1.01 to 1.01), x0.80 CPU a read: pays in CPU
    eager_flush_reads: 4
    # on against off: x0.80 reads/s (0.80 to 0.80), x1.00 CPU a read: costs reads
    registered_buffers: false
  mmap:
    # cold: 98 000 reads/s, 98 % of the most (100 000 at 512); p99 10.2 us against 10.0 us
    threads: 2
    # on against off: x1.00 reads/s (1.00 to 1.00), x1.00 CPU a read: within the noise
    announce: true
";
        assert_eq!(text, expected);
    }

    #[test]
    fn what_was_not_measured_stays_at_its_default_and_says_so() {
        // Scenario: nothing measured, stopped by hand; then a host without io_uring on which pread won cold.
        // Expected: the defaults, each with a word that it was not measured; then pread with its threads, the ring's keys
        // at their defaults with the reason.
        let stopped = Findings {
            stopped: true,
            ..findings()
        };
        let lines = advise_on(None, &stopped);
        let value = |lines: &[Advice], key: &str| {
            let line = lines.iter().find(|line| line.key == key);
            line.map(|line| (line.value.clone(), line.why.clone())).unwrap()
        };
        assert_eq!(value(&lines, "engine.uring.queue_depth").0, "128");
        assert_eq!(value(&lines, "engine.backend").0, "uring");
        assert!(lines.iter().all(|line| line.why.contains("stopped")), "{lines:?}");

        let round = vec![
            (setup(BackendKind::Mmap), sample(50.0, 2.0)),
            (setup(BackendKind::Pread), sample(90.0, 2.0)),
        ];
        let refused = Findings {
            ring_refusal: Some("a seccomp filter refuses it".to_owned()),
            cold: Ranking::of(&[round.clone(), round.clone(), round]),
            depth_in_force: None,
            ..findings()
        };
        let lines = advise_on(Some(256), &refused);
        assert_eq!(value(&lines, "engine.backend").0, "pread");
        assert_eq!(value(&lines, "engine.pread.threads").0, "64");
        assert_eq!(value(&lines, "engine.cores").0, "auto");
        let (depth, why) = value(&lines, "engine.uring.queue_depth");
        assert!(depth == "128" && why.contains("seccomp"), "{depth} {why}");
    }

    #[test]
    fn a_file_that_fits_in_memory_is_decided_warm() {
        // Scenario: uring wins cold; warm, mmap does, and then pread through the page cache.
        // Expected: mmap, direct I/O left as it is; then pread without direct I/O.
        let round = |winner: BackendKind, loser: BackendKind, direct: bool| {
            let of = |backend| Setup {
                direct,
                ..setup(backend)
            };
            let round = vec![(of(winner), sample(90.0, 2.0)), (of(loser), sample(10.0, 2.0))];
            Ranking::of(&[round.clone(), round.clone(), round])
        };
        let found = |warm| Findings {
            contests: vec![contest(Phase::DirectIo, 2.0, 1.0)],
            cold: round(BackendKind::Uring, BackendKind::Mmap, true),
            warm,
            ..findings()
        };
        let values = |findings: &Findings| {
            let lines = advise_on(None, findings);
            [0, 2].map(|index: usize| lines[index].value.clone())
        };
        let mapped = found(round(BackendKind::Mmap, BackendKind::Uring, true));
        assert_eq!(values(&mapped), ["mmap", "preferred"]);
        let read = found(round(BackendKind::Pread, BackendKind::Uring, false));
        assert_eq!(values(&read), ["pread", "off"]);
        let lines = advise_on(None, &read);
        assert!(
            lines[2].why.starts_with("for the backend above"),
            "{}",
            lines[2].why
        );
    }
}
