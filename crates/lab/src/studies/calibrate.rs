//! `calibrate`: which settings of the engine suit one file or device, and when io_uring beats mmap and pread on it.
//!
//! Each stage builds on the results of earlier ones: depths, and threads of mmap; single settings against the
//! default; rings; the backends, cold and then warm. Only the rows decide (`advice`), so that a resumed run
//! decides the same.

mod advice;
mod found;
mod stages;
mod subject;
mod yaml;

use crate::args::{Calibrate, Common};
use crate::drive::engine::blocks;
use crate::error::LabError;
use crate::material::Material;
use crate::report::{Report, series};
use crate::sample::{Of, reads_per_second};
use crate::study::{About, Rows, Study, list, pair};
use crate::{Runs, measured};
use found::Found;
use humantime::format_duration;
use ringfetch_command::part_file::{PartFile, regular_file, write_whole};
use ringfetch_command::quantity::{exact_size, size};
use ringfetch_engine::config::DirectIo;
use stages::{DEPTH_MAX, Pace, powers_to};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use subject::{ASKED_BYTES_MAX, Subject};
use yaml::yaml;

static ABOUT: About = About {
    name: "calibrate",
    title: "which settings of the engine suit this file on this device",
    source: "",
    columns: "reads_per_second p50_us p99_us depth_achieved cpu_us_per_read",
    judge: |_, _| {},
};
const REPETITIONS: u32 = 5;
const QUICK: Duration = Duration::from_secs(15);
/// A smaller file would be read before a step ends.
const LENGTH_MIN_BYTES: u64 = 16 << 20;
fn failed(problem: String) -> LabError {
    LabError::Failed(problem)
}

fn not_written(path: &Path, error: &io::Error) -> LabError {
    failed(format!("--out: cannot write {}: {error}", path.display()))
}

/// `4KiB`, `512 bytes`.
fn with_unit(block_bytes: u32) -> String {
    let size = exact_size(block_bytes.into());
    match size.ends_with('B') {
        true => size,
        false => format!("{size} bytes"),
    }
}

/// Checks, before measuring, whether the file of `--out` can be written. It is at the end, or not at all: until then there is
/// nothing on disk, which a second signal would leave behind.
fn check_out(path: &Path, force: bool, data: &Path) -> Result<(), LabError> {
    let shown = path.display();
    let problem = match std::fs::symlink_metadata(path) {
        _ if regular_file(path) == regular_file(data) => "is the file that is measured; choose another path",
        Ok(found) if !found.is_file() => "exists and is not a regular file; choose another path",
        Ok(_) if !force => "is there already; --force replaces it",
        _ => {
            return PartFile::beside(path)
                .map(drop)
                .map_err(|error| not_written(path, &error));
        }
    };
    Err(failed(format!("--out: {shown} {problem}")))
}

/// Whether it supports O_DIRECT, and why or why not.
fn opened(args: &Calibrate) -> Result<(bool, String), LabError> {
    let shown = args.path.display();
    if args.path.is_dir() {
        return Err(failed(format!(
            "{shown} is a directory: name one file or block device; for objects, the largest file among them"
        )));
    }
    // Of any length: what is shorter than a block is too short, too.
    let dataset = blocks(&args.path, 1, DirectIo::Preferred).map_err(failed)?;
    let (length, least) = (dataset.length_bytes(), size(LENGTH_MIN_BYTES));
    if length < LENGTH_MIN_BYTES {
        let has = match length {
            0 => "is empty".to_owned(),
            _ => format!("has {}", size(length)),
        };
        return Err(failed(format!(
            "{shown} {has}, too little to measure: name a file of at least {least}, better one larger than memory"
        )));
    }
    Ok((dataset.direct().direct, dataset.direct().reason.clone()))
}

/// How long the whole is to take.
fn budget(args: &Calibrate) -> Duration {
    if args.quick { QUICK } else { args.seconds }
}

fn plan(
    args: &Calibrate,
    common: &Common,
    material: Arc<Material>,
    subject: &Subject,
    reason: String,
) -> Study {
    let most = subject.fitting().min(DEPTH_MAX);
    let warm = match subject.warm_bytes {
        0 => "not measured: the data are larger than the memory that is available".to_owned(),
        bytes => format!("the first {}", size(bytes)),
    };
    let ring = match (&subject.refusal, subject.registered) {
        (Some(refusal), _) => refusal.clone(),
        (None, true) => "with registered buffers".to_owned(),
        (None, false) => "without registered buffers".to_owned(),
    };
    let tags = subject.tags.map(|tags| match tags.cpus_of_queue {
        Some(cpus) => format!("{} for each {cpus} CPUs", tags.of_queue),
        None => tags.of_queue.to_string(),
    });
    // What the steps depend on, so that a run is resumed only where its later ones are as its earlier ones. How long those of
    // a stage take depends on how long the earlier stages took, too: the journal has it.
    let settings = vec![
        pair("block", with_unit(args.block_bytes)),
        pair("direct I/O", reason),
        // Not `io_uring`, which is a line about the host: names identify.
        pair("ring", ring),
        pair("CPUs", subject.cpus),
        pair("tags", tags.as_deref().unwrap_or("unknown")),
        pair("warm", warm),
        pair("depths", list(&powers_to(most))),
        pair("time", format_duration(budget(args))),
    ];
    // Cold reads follow an eviction, which is checked, so they need no more data than memory holds.
    let mut study = Study::new(&ABOUT, common, "engine", settings, Vec::new());
    study.materials.push(material);
    if most < DEPTH_MAX {
        let (each, all) = (with_unit(args.block_bytes), size(ASKED_BYTES_MAX));
        let why = format!("reads of {each} would take more than {all} of memory");
        study.left_out.push(format!("depths beyond {most}: {why}"));
    }
    if subject.has_ring() && !subject.registered {
        let why = "registered buffers: a read into registered memory does not work here";
        study.left_out.push(why.to_owned());
    }
    let refusal = subject.refusal.as_ref();
    let refusal = refusal.map(|refusal| format!("uring and auto: {refusal}"));
    study.left_out.extend(refusal);
    study
}

/// Omits the option of the path, which is an argument here.
fn named_here(problem: &str) -> String {
    problem.replace("--path: ", "")
}

/// Measures, and prints what to configure.
pub(crate) fn run(args: &Calibrate, runs: Runs<'_>) -> Result<(), LabError> {
    let (direct, reason) = opened(args)?;
    let yaml_file = args.out.as_deref();
    yaml_file.map_or(Ok(()), |path| check_out(path, args.force, &args.path))?;
    let common = Common {
        path: args.path.clone(),
        out: args.report.clone(),
        out_option: "--report",
        repetitions: REPETITIONS,
        seed: args.seed,
        only: Vec::new(),
        resume: args.resume,
        force: args.force,
    };
    let material = Arc::new(Material::one(&args.path, 0, &mut |_| true)?);
    let subject = Subject::of(args, &material, direct);
    let pace = Pace {
        begun: Instant::now(),
        budget: budget(args),
    };
    let mut stage = 0;
    let first = subject.next(&mut stage, &Rows::default(), &pace);
    let study = |_: crate::material::Progress<'_>| {
        let mut study = plan(args, &common, material, &subject, reason);
        study.cells = first;
        Ok(study)
    };
    let next = &mut |_: &mut Study, rows: &Rows| subject.next(&mut stage, rows, &pace);
    let done = measured(runs.context, &common, args.report.as_deref(), study, next);
    let done = done.map_err(|error| error.map(named_here))?;
    if let (Some(stopped), true) = (&done.stopped, args.report.is_some()) {
        // As the other studies: --resume measures the rest, so there is no result yet.
        return Err(failed(stopped.clone()));
    }
    let found = Found::new(&subject, &done.rows, done.stopped.is_some());
    if done.rows.0.iter().all(|row| row.measured().next().is_none()) {
        return Err(failed("stopped before anything was measured".to_owned()));
    }
    let mut report = done.report;
    if done.stopped.is_some() {
        let note = "STOPPED by hand: what was not measured by then stays at its default";
        report.notes.push(note.to_owned());
    }
    conclude(&mut report, &found, args);
    // A full disk does not cost the figures: they are printed all the same.
    let reported = args
        .report
        .as_deref()
        .map_or(Ok(()), |directory| report.write(directory));
    let mut text = report.text();
    if runs.context.json {
        text = report.json()?;
    } else if yaml_file.is_none() {
        // The whole output is YAML: the tables are comments, and already contain its head.
        let lines = text.lines().map(|line| format!("# {line}").trim_end().to_owned());
        let comments = lines.collect::<Vec<_>>().join("\n");
        text = format!("{comments}\n\n{}", yaml(&[], &report.advice));
    }
    let configured = yaml_file.map_or(Ok(()), |path| {
        write_whole(path, report.yaml.as_bytes()).map_err(|error| not_written(path, &error))
    });
    runs.print(&text)?;
    reported.and(configured)
}

/// Draws conclusions from the rows: advice, the comparison of the backends, plots, doubts.
fn conclude(report: &mut Report, found: &Found<'_>, args: &Calibrate) {
    for mark in &mut report.marks {
        *mark = named_here(mark);
    }
    let contests = found.contests();
    if contests.len() > 1 {
        report.table("Settings compared with the default", contests);
    }
    report.table(
        "When io_uring beats mmap and pread here, and by how much",
        found.backends(),
    );
    report.notes.extend(found.doubts());
    report.advice = found.advice();
    let block = with_unit(args.block_bytes);
    let most = if found.stopped { "at most " } else { "" };
    let fact = |name: &str| report.fact(name).unwrap_or("unknown");
    let (path, begun, data) = (args.path.display(), fact("begun"), fact("data"));
    let (device, kernel) = (fact("device"), fact("kernel"));
    let what = "the engine alone, without a network";
    let mut head = vec![
        format!("ringfetch calibrate {begun}: {path}, {data} on {device}; kernel {kernel}"),
        format!("random reads of {block}, medians of {most}{REPETITIONS}; {what}"),
    ];
    let marks = report.marks.iter();
    head.extend(marks.map(|mark| format!("FORCED, no evidence: {mark}")));
    head.extend(report.notes.iter().map(|note| format!("note: {note}")));
    report.yaml = yaml(&head, &report.advice);
    let knee = found.depth().map(|knee| format!(", knee: {}", knee.setting));
    let tags = found.subject.tags.map(|tags| format!(", {} tags", tags.of_queue));
    let (knee, tags) = (knee.unwrap_or_default(), tags.unwrap_or_default());
    let draws: [(&str, &str, Of); 3] = [
        ("reads", "reads/s", reads_per_second),
        ("p50", "latency p50, us", |sample| sample.p50_us),
        ("p99", "latency p99, us", |sample| sample.p99_us),
    ];
    for (name, y, of) in draws {
        let title = format!("Random reads of {block}, one ring{knee}{tags}");
        let lines = series(found.rows, &[("stage", "depth")], "backend", "setting", of);
        let axes = ["requested reads in flight", y];
        report.plot(format!("plot-depth-{name}"), title, axes, lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::tests::{scratch, small};
    use crate::studies::calibrate::advice::tests::subject;
    use clap::Parser as _;
    use ringfetch_host::block::Tags;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Calibrate,
    }

    #[test]
    fn what_a_step_depends_on_identifies_the_run() {
        // Scenario: subjects that differ in what the rings, the CPUs or the device support. Expected: other settings each, so
        // that a run is not resumed; the same settings for the same subject.
        let directory = scratch();
        let material = Arc::new(small(directory.path()));
        let args = Line::parse_from(["calibrate", "/data/file"]).args;
        let common = Common {
            path: args.path.clone(),
            out: None,
            out_option: "--report",
            repetitions: REPETITIONS,
            seed: 1,
            only: Vec::new(),
            resume: false,
            force: false,
        };
        let settings = |subject: &Subject| {
            plan(
                &args,
                &common,
                Arc::clone(&material),
                subject,
                "direct".to_owned(),
            )
            .settings
        };
        let same = subject();
        assert_eq!(settings(&same), settings(&subject()));
        let tags = |cpus_of_queue| {
            Some(Tags {
                of_queue: 64,
                cpus_of_queue,
            })
        };
        let others = [
            Subject {
                registered: false,
                ..subject()
            },
            Subject {
                refusal: Some("seccomp".to_owned()),
                ..subject()
            },
            Subject { cpus: 3, ..subject() },
            Subject {
                tags: None,
                ..subject()
            },
            Subject {
                tags: tags(None),
                ..subject()
            },
            Subject {
                tags: tags(Some(2)),
                ..subject()
            },
        ];
        let mut all: Vec<_> = others.iter().chain([&same]).map(settings).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), others.len() + 1, "{all:?}");
    }
}
