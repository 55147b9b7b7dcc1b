//! `flip`: the operator's question. The same load on a running daemon, under each of its backends in turn, and in words
//! which one serves it best. The daemon gets back the one that it had.

use super::{list, pair};
use crate::args::FlipArgs;
use crate::error::LabError;
use crate::job::{Amount, Heat, Sample, Setup, Shape};
use crate::material::Material;
use crate::report::Report;
use crate::served::{Flip, Items, Served};
use crate::strategies::named;
use crate::study::{Cell, Measure, Needs, Once, Row, Rows, Study, reads_per_second};
use ringfetch_client::{Backend, Kind};
use ringfetch_pace::trace::{self, TraceEntries, TraceShape};
use std::fs;
use std::path::Path;
use std::sync::Arc;

const TRACE_BYTES_MAX: u64 = 1 << 30;

/// Plans the study.
pub(crate) fn plan(args: &FlipArgs, admin: &str) -> Result<Study, LabError> {
    let missing = || LabError::Usage("--server: this study needs a running daemon, and --dataset".to_owned());
    let known = Backend::ALL.map(Backend::as_str);
    if let Some(wrong) = args
        .common
        .only
        .iter()
        .find(|name| !known.contains(&name.as_str()))
    {
        return Err(LabError::Usage(format!(
            "--only: {wrong}: this study has {}",
            known.join(", ")
        )));
    }
    let mut served = Served::find(&args.daemon)?.ok_or_else(missing)?;
    let count = load(&mut served, args.trace.as_deref())?;
    let flip = Flip::prepare(admin, &served.dataset.name)?;
    let mut material = Material::found(&args.common.path)?;
    let load = match (&args.trace, args.rate) {
        (Some(trace), _) => format!("{}, {count} entries in order", trace.display()),
        (None, _) => format!("{count} items at random"),
    };
    let mut study = Study {
        name: "flip",
        title: "one load on a running daemon, under each backend",
        source: "the operator",
        settings: vec![
            pair("daemon", served.shown()),
            pair("etag", &served.dataset.etag),
            pair("load", load),
            pair("batch", args.batch),
            pair("in flight", args.in_flight),
            pair(
                "requests/s",
                args.rate
                    .map_or("as many as are answered".to_owned(), |rate| rate.to_string()),
            ),
            pair("step", humantime::format_duration(args.step)),
        ],
        materials: Vec::new(),
        cells: Vec::new(),
        left_out: Vec::new(),
        needs: Needs {
            larger_than_memory: false,
            warm_bytes: 0,
            warm_option: "",
        },
        columns: &[
            "reads_per_second",
            "p50_us",
            "p99_us",
            "p999_us",
            "depth_achieved",
            "cpu_us_per_read",
        ],
        measure: Measure::Flipped(flip),
        judge,
    };
    material.served = Some(Arc::new(served));
    study.materials.push(Arc::new(material));
    if args.common.repetitions % 2 == 1 {
        let note = "--repetitions is odd: the last order has no swapped partner";
        study.left_out.push(note.to_owned());
    }
    let Some(strategy) = named("daemon") else {
        return Err(missing());
    };
    let wanted =
        |name: &&str| args.common.only.is_empty() || args.common.only.iter().any(|only| only == name);
    let shape = Shape::Items {
        count,
        batch: args.batch as usize,
        random: args.trace.is_none(),
    };
    let time = args.step;
    let amount = args
        .rate
        .map_or(Amount::For(time), |per_second| Amount::At { per_second, time });
    for backend in known.into_iter().filter(wanted) {
        study.plan(Cell {
            key: vec![pair("backend", backend)],
            strategy,
            material: 0,
            setup: Setup::new(Heat::AsFound, shape, amount, args.in_flight as usize),
        });
    }
    Ok(study)
}

/// Decides what is asked for; returns how many entries that has.
fn load(served: &mut Served, trace: Option<&Path>) -> Result<u64, LabError> {
    let dataset = &served.dataset;
    let mut meaning = TraceShape {
        items: dataset.count,
        range_bytes: None,
        length_bytes: Some(dataset.length_bytes),
    };
    let mut names = Vec::new();
    if dataset.kind == Kind::Objects {
        names = served.objects()?;
        meaning = TraceShape {
            items: names.len() as u64,
            range_bytes: None,
            length_bytes: None,
        };
    }
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
    let wrong = |problem: String| LabError::Usage(format!("--trace: {}: {problem}", path.display()));
    let length = fs::metadata(path)
        .map_err(|error| wrong(error.to_string()))?
        .len();
    if length > TRACE_BYTES_MAX {
        return Err(wrong(format!(
            "{length} bytes are more than {TRACE_BYTES_MAX}: cut it"
        )));
    }
    let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    trace::parse(&text, meaning).map_err(wrong)
}

/// One run under the cell's backend.
pub(crate) fn step(flip: &Flip, cell: &Cell, once: Once<'_>) -> Result<Sample, String> {
    let wanted = cell.key.iter().find(|(name, _)| name == "backend");
    let wanted: Backend = wanted.map_or("", |(_, value)| value.as_str()).parse()?;
    let reads = flip.to(wanted)?;
    let mut sample = once(cell.setup)?;
    if reads != wanted {
        sample.note = Some(format!("read by {reads}"));
    }
    Ok(sample)
}

/// What is compared: with a rate, the tail; without one, what was served. The larger, the better.
fn measured(rows: &Rows) -> (&'static str, fn(&Sample) -> f64) {
    let open = rows
        .0
        .iter()
        .flat_map(Row::measured)
        .any(|sample| sample.over.is_some());
    if open {
        ("shortness of p99", |sample| 1.0 / sample.p99_us)
    } else {
        ("items/s", reads_per_second)
    }
}

fn judge(report: &mut Report, rows: &Rows) {
    let (what, of) = measured(rows);
    report.notes.insert(0, verdict(rows, what, of));
}

/// Which backend to choose, in a sentence.
fn verdict(rows: &Rows, what: &str, of: fn(&Sample) -> f64) -> String {
    let Some(best) = rows.best([], of) else {
        return "verdict: none, nothing was measured".to_owned();
    };
    let name = |row: &Row| row.get("backend").unwrap_or_default().to_owned();
    let (mut ahead, mut level) = (Vec::new(), Vec::new());
    for other in rows.0.iter().filter(|row| !std::ptr::eq(*row, best)) {
        let Some(ratio) = best.ratio(other, of) else {
            continue;
        };
        let (times, from, to, sure) = (ratio.median, ratio.low, ratio.high, ratio.confidence * 100.0);
        let words = format!(
            "{times:.2}x of {} ({from:.2} to {to:.2}, {sure:.0} %)",
            name(other)
        );
        let side = if from > 1.0 { &mut ahead } else { &mut level };
        side.push(words);
    }
    let best = name(best);
    let (some, none) = (list(&ahead), list(&level));
    match (ahead.is_empty(), level.is_empty()) {
        (true, true) => format!("verdict: only {best} was measured"),
        (false, true) => format!("verdict: {best}; its {what}: {some}"),
        (true, false) => format!("verdict: it does not matter beyond the spread; {what} of {best}: {none}"),
        (false, false) => {
            format!("verdict: {best}; its {what}: {some}; no difference beyond the spread: {none}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::tests::row;

    #[test]
    fn the_verdict_says_which_backend_and_by_how_much() {
        // Scenario: uring twice as fast as mmap on a machine that becomes slower; auto level with it; both level; one alone.
        // Expected: a sentence that says so.
        let of = |rows: &[(&str, [u64; 5])]| {
            let rows = rows.iter().map(|(name, reads)| row(&[("backend", name)], reads));
            verdict(&Rows(rows.collect()), "items/s", reads_per_second)
        };
        let (fast, slow) = ([400, 380, 360, 200, 180], [200, 190, 180, 100, 90]);
        let clear = of(&[("uring", fast), ("mmap", slow)]);
        assert_eq!(
            clear,
            "verdict: uring; its items/s: 2.00x of mmap (2.00 to 2.00, 94 %)"
        );
        let level = [390, 390, 350, 210, 170];
        let two = of(&[("uring", fast), ("mmap", slow), ("auto", level)]);
        assert!(two.contains("; no difference beyond the spread: "), "{two}");
        assert!(of(&[("uring", fast), ("auto", level)]).contains("does not matter"));
        assert!(of(&[("uring", fast)]).contains("only uring"));
    }

    #[test]
    fn with_a_rate_the_tail_is_compared() {
        // Scenario: an open loop whose p99 is halved. Expected: twice as good.
        let mut rows = Rows(vec![
            row(&[("backend", "uring")], &[9; 5]),
            row(&[("backend", "mmap")], &[9; 5]),
        ]);
        for (row, p99_us) in rows.0.iter_mut().zip([100.0, 200.0]) {
            for sample in row.samples.iter_mut().flatten() {
                sample.p99_us = p99_us;
                sample.over = Some([0.0; 7]);
            }
        }
        let mut report = crate::report::tests::report();
        judge(&mut report, &rows);
        assert_eq!(
            report.notes[0],
            "verdict: uring; its shortness of p99: 2.00x of mmap (2.00 to 2.00, 94 %)"
        );
    }
}
