//! `flip`: the same load on a running daemon, under each of its backends in turn, and a sentence on which one
//! serves it best. The daemon's previous backend is restored.

use crate::Context;
use crate::args::FlipArgs;
use crate::error::LabError;
use crate::material::Material;
use crate::report::Report;
use crate::sample::{Of, Sample, reads_per_second};
use crate::served::{Flip, Items, OBJECTS_MAX, Served};
use crate::setup::{Amount, Heat, Setup, Shape};
use crate::stats::Verdict;
use crate::study::{About, Cell, Measure, Once, Row, Rows, Study, check_only, get, list, pair};
use humantime::format_duration;
use ringfetch_client::{Backend, Kind};
use ringfetch_pace::trace::{self, TraceEntries, TraceShape};
use std::path::Path;
use std::sync::Arc;

pub(crate) static ABOUT: About = About {
    name: "flip",
    title: "one load on a running daemon, under each backend",
    source: "the operator",
    columns: "reads_per_second missed_share p50_us p99_us p999_us depth_achieved cpu_us_per_read",
    judge,
};

pub(crate) fn plan(args: &FlipArgs, context: &Context) -> Result<Study, LabError> {
    let missing = || LabError::Usage("--server: this study needs a running daemon, and --dataset".to_owned());
    let mut material = Material::found(&args.common.path)?;
    let backends = Backend::ALL.map(Backend::as_str).join(" ");
    check_only(&args.common, &backends)?;
    let mut study = Study::new(&ABOUT, &args.common, &backends, Vec::new(), Vec::new());
    let mut served = Served::find(&args.daemon, context)?.ok_or_else(missing)?;
    let count = load(&mut served, args.trace.as_deref())?;
    let flip = Flip::prepare(context, &served.dataset.name)?;
    if let (1, Some(file)) = (flip.files, material.files.first()) {
        // Part of a block at its end may not be served.
        let (all, rest) = (
            served.dataset.length_bytes,
            served.dataset.block_bytes.saturating_sub(1),
        );
        let fits = (all..=all.saturating_add(rest.into())).contains(&file.length_bytes);
        if !fits || !served.has_ends_of(file)? {
            let (path, shown) = (file.path.display(), served.shown());
            let problem = format!("--path: {path} is not the file of {shown}");
            return Err(LabError::Usage(problem));
        }
    }
    // If a run was killed, the backend of its last step must not pass for this.
    let own = flip.had.map_or("none", Backend::as_str);
    study.measure = Measure::Flipped(flip);
    let load = match &args.trace {
        Some(trace) => format!("{}, {count} entries in order", trace.display()),
        None if served.dataset.kind == Kind::Objects && count >= OBJECTS_MAX as u64 => {
            format!("the first {count} objects at random")
        }
        None => format!("{count} items at random"),
    };
    let rate = args.rate.map(|rate| rate.to_string());
    study.settings = vec![
        pair("etag", &served.dataset.etag),
        pair("own backend", own),
        pair("load", load),
        pair("batch", args.batch),
        pair("in flight", args.in_flight),
        pair(
            "requests/s",
            rate.unwrap_or_else(|| "as many as are answered".to_owned()),
        ),
        pair("step", format_duration(args.step)),
    ];
    study.settings.extend(Served::settings_of(Some(&served)));
    material.served = Some(Arc::new(served));
    study.materials.push(Arc::new(material));
    if args.common.repetitions % 2 == 1 {
        let note = "--repetitions is odd: the last order has no swapped partner";
        study.left_out.push(note.to_owned());
    }
    let (batch, random, time) = (args.batch as usize, args.trace.is_none(), args.step);
    let shape = Shape::Items { count, batch, random };
    let at_rate = |per_second| Amount::At { per_second, time };
    let amount = args.rate.map_or(Amount::For(time), at_rate);
    let axes = [("backend", study.chosen.clone())];
    study.cross(&axes, |_| {
        Some(Setup::new(Heat::AsFound, shape, amount, args.in_flight as usize))
    });
    Ok(study)
}

/// Decides which items to request; returns how many there are.
fn load(served: &mut Served, trace: Option<&Path>) -> Result<u64, LabError> {
    let dataset = &served.dataset;
    let objects = dataset.kind == Kind::Objects;
    let names = if objects { served.objects()? } else { Vec::new() };
    let meaning = TraceShape {
        items: if objects {
            names.len() as u64
        } else {
            dataset.count
        },
        range_bytes: None,
        length_bytes: (!objects).then_some(dataset.length_bytes),
        is_cut: objects && names.len() >= OBJECTS_MAX,
    };
    if meaning.items == 0 {
        return Err(LabError::Usage(format!("--dataset: {} is empty", served.shown())));
    }
    let listed = trace.map(|path| parse(path, meaning)).transpose()?;
    let count = match &listed {
        Some(TraceEntries::Items(items)) => items.len() as u64,
        Some(TraceEntries::Ranges(ranges)) => ranges.len() as u64,
        None => meaning.items,
    };
    served.items = match (listed, names.is_empty()) {
        (Some(TraceEntries::Items(items)), false) => {
            let name = |item: &u64| names.get(usize::try_from(*item).ok()?).cloned();
            Items::Objects(items.iter().filter_map(name).collect())
        }
        (None, false) => Items::Objects(names),
        (Some(listed), _) => Items::Trace(listed),
        (None, true) => Items::Numbers,
    };
    Ok(count)
}

fn parse(path: &Path, meaning: TraceShape) -> Result<TraceEntries, LabError> {
    let wrong = |problem| LabError::Usage(format!("--trace: {}: {problem}", path.display()));
    trace::read(path, meaning).map_err(wrong)
}

/// One run under the cell's backend.
pub(crate) fn step(flip: &Flip, cell: &Cell, once: Once<'_>) -> Result<Sample, String> {
    let wanted: Backend = get(&cell.key, "backend").unwrap_or_default().parse()?;
    let reads = flip.to(wanted)?;
    let mut sample = once(cell.setup)?;
    if reads != wanted {
        let known = sample.note.map_or_else(String::new, |note| format!("; {note}"));
        sample.note = Some(format!("read by {reads}{known}"));
    }
    Ok(sample)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compared {
    ItemsPerSecond,
    P99,
}

impl Compared {
    /// With a rate, the tail latency; without one, the throughput.
    fn by(rows: &Rows) -> Self {
        let mut samples = rows.0.iter().flat_map(Row::measured);
        match samples.any(|sample| sample.over.is_some()) {
            true => Self::P99,
            false => Self::ItemsPerSecond,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::ItemsPerSecond => "items/s",
            Self::P99 => "p99",
        }
    }

    /// Larger is better.
    fn of(self) -> Of {
        match self {
            Self::ItemsPerSecond => reads_per_second,
            Self::P99 => |sample| 1.0 / sample.p99_us,
        }
    }

    fn times(self, ratio: f64, other: &str) -> String {
        match self {
            Self::ItemsPerSecond => format!("{ratio:.2}x of {other}"),
            Self::P99 => format!("{ratio:.2}x shorter than {other}'s"),
        }
    }
}

fn judge(report: &mut Report, rows: &Rows) {
    let compared = Compared::by(rows);
    let (held, missed) = rows.0.iter().cloned().partition(holds);
    let (held, missed): (Vec<Row>, Vec<Row>) = (held, missed);
    let mut words = verdict(&Rows(held), compared);
    if !missed.is_empty() {
        let each = missed.iter().map(|row| {
            let share = row.measured().map(Sample::missed_share).fold(0.0, f64::max);
            format!(
                "{} (up to {:.1} % never sent in a repetition)",
                name(row),
                share * 100.0
            )
        });
        let each = list(&each.collect::<Vec<_>>());
        words = format!("{words}; the rate was not held by {each}: that p99 is longer than shown");
    }
    report.notes.insert(0, words);
}

/// Whether its p99 is known: not if more than a hundredth of the arrivals were never sent, or the rest of a step was given up.
fn holds(row: &Row) -> bool {
    row.measured()
        .all(|sample| sample.missed_share() <= 0.01 && !sample.is_given_up())
}

fn name(row: &Row) -> String {
    row.get("backend").unwrap_or_default().to_owned()
}

/// Which backend to choose, in a sentence.
fn verdict(rows: &Rows, compared: Compared) -> String {
    let (what, of) = (compared.name(), compared.of());
    let Some(best) = rows.best(&[], of) else {
        return "verdict: none, nothing was measured that can be compared".to_owned();
    };
    let (mut ahead, mut level) = (Vec::new(), Vec::new());
    for other in rows.0.iter().filter(|row| !std::ptr::eq(*row, best)) {
        let Some(ratio) = best.ratio(other, of) else {
            continue;
        };
        let (times, from, to, sure) = (ratio.median, ratio.low, ratio.high, ratio.confidence * 100.0);
        let words = format!(
            "{} ({from:.2} to {to:.2}, {sure:.0} %)",
            compared.times(times, &name(other))
        );
        let side = match ratio.verdict() {
            Verdict::More => &mut ahead,
            // It has the highest median, so no other is clearly faster.
            Verdict::Same | Verdict::Less => &mut level,
        };
        side.push(words);
    }
    let judged = best.summary(of).is_some_and(|summary| summary.is_judged());
    let best = name(best);
    let (some, none) = (list(&ahead), list(&level));
    match (ahead.is_empty(), level.is_empty()) {
        (true, true) => format!("verdict: {best}; nothing else can be compared"),
        (false, true) => format!("verdict: {best}; its {what}: {some}"),
        (true, false) if !judged => {
            format!("verdict: none, too few repetitions; {what} of {best}: {none}")
        }
        (true, false) => format!("verdict: no difference beyond chance and 3 %; {what} of {best}: {none}"),
        (false, false) => {
            format!("verdict: {best}; its {what}: {some}; no difference beyond chance and 3 %: {none}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::tests::row;

    #[test]
    fn the_verdict_says_which_backend_and_by_how_much() {
        // Scenario: uring twice as fast as mmap on a machine that becomes slower; auto equal to it; both
        // equal; one alone. Expected: a sentence that says so.
        let of = |rows: &[(&str, [u64; 5])]| {
            let rows = rows.iter().map(|(name, reads)| row(&[("backend", name)], reads));
            verdict(&Rows(rows.collect()), Compared::ItemsPerSecond)
        };
        let (fast, slow) = ([400, 380, 360, 200, 180], [200, 190, 180, 100, 90]);
        let clear = of(&[("uring", fast), ("mmap", slow)]);
        let times = "2.00x of mmap (2.00 to 2.00, 94 %)";
        assert_eq!(clear, format!("verdict: uring; its items/s: {times}"));
        let level = [390, 390, 350, 210, 170];
        let two = of(&[("uring", fast), ("mmap", slow), ("auto", level)]);
        assert!(two.contains("; no difference beyond chance and 3 %: "), "{two}");
        assert!(of(&[("uring", fast), ("auto", level)]).starts_with("verdict: no difference"));
        assert!(of(&[("uring", fast)]).contains("uring; nothing else can be compared"));
    }

    #[test]
    fn chance_makes_no_winner() {
        // Scenario: uring ahead of mmap by 1 to 3 % each time; 2000 times two and four equal backends that vary by 10 %.
        // Expected: no difference beyond chance and 3 %; a winner among two in at most 1 of 20, among four in at most 1 of 6.
        let of = |rows: Vec<Row>| verdict(&Rows(rows), Compared::ItemsPerSecond);
        let rows = [("uring", [101, 102, 101, 103, 102]), ("mmap", [100; 5])];
        let words = of(rows
            .map(|(name, reads)| row(&[("backend", name)], &reads))
            .to_vec());
        let expected = "verdict: no difference beyond chance and 3 %; items/s of uring: 1.02x of mmap (1.01 to 1.03, 94 %)";
        assert_eq!(words, expected);
        let mut random = fastrand::Rng::with_seed(7);
        for (backends, most) in [(2, 100), (4, 333)] {
            let by_chance = (0..2000).filter(|_| {
                let rows = ["uring", "auto", "mmap", "pread"].into_iter().take(backends);
                let rows =
                    rows.map(|name| row(&[("backend", name)], &[(); 5].map(|()| random.u64(9000..=11_000))));
                !of(rows.collect()).starts_with("verdict: no difference")
            });
            let by_chance = by_chance.count();
            assert!(by_chance <= most, "{backends} backends: {by_chance}");
        }
    }

    #[test]
    fn two_repetitions_give_no_verdict() {
        // Scenario: uring twice as fast as mmap, twice. Expected: the figures, and that they are too few.
        let rows = [("uring", [400; 2]), ("mmap", [200; 2])];
        let rows = rows.map(|(name, reads)| row(&[("backend", name)], &reads));
        let words = verdict(&Rows(rows.to_vec()), Compared::ItemsPerSecond);
        let expected =
            "verdict: none, too few repetitions; items/s of uring: 2.00x of mmap (2.00 to 2.00, 50 %)";
        assert_eq!(words, expected);
    }

    #[test]
    fn with_a_rate_the_tail_is_compared() {
        // Scenario: an open loop whose p99 is halved. Expected: twice as good.
        let rows = ["uring", "mmap"].map(|name| row(&[("backend", name)], &[9; 5]));
        let mut rows = Rows(rows.to_vec());
        for (row, p99_us) in rows.0.iter_mut().zip([100.0, 200.0]) {
            for sample in row.samples.iter_mut().flatten() {
                sample.p99_us = p99_us;
                sample.over = Some([0.0; 7]);
            }
        }
        let mut report = crate::report::tests::report();
        judge(&mut report, &rows);
        let expected = "verdict: uring; its p99: 2.00x shorter than mmap's (2.00 to 2.00, 94 %)";
        assert_eq!(report.notes[0], expected);
        // The one with the better p99 left a tenth of its reads unsent in one repetition.
        for sample in rows.0[0].samples.iter_mut().flatten().take(1) {
            sample.missed = 1;
        }
        let mut report = crate::report::tests::report();
        judge(&mut report, &rows);
        let expected = "verdict: mmap; nothing else can be compared; the rate was not held by uring (up to 10.0 % never sent in a \
                        repetition): that p99 is longer than shown";
        assert_eq!(report.notes[0], expected);
        // One of several threads was late, and the step ended early: few arrivals were due by then.
        for sample in rows.0[0].samples.iter_mut().flatten() {
            sample.missed = 0;
            sample.note = Some(format!("read by auto; {}", crate::job::GIVEN_UP));
        }
        judge(&mut report, &rows);
        assert!(
            report.notes[0].starts_with("verdict: mmap; nothing else"),
            "{:?}",
            report.notes
        );
        rows.0.pop();
        judge(&mut report, &rows);
        assert!(report.notes[0].starts_with("verdict: none"), "{:?}", report.notes);
    }
}
