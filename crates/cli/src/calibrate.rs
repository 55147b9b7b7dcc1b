//! `ringfetch calibrate`: about a minute of reading through the engine itself, and then the settings that suit this
//! file, on this device, on this host. What may be measured: `target`. One step of it: `drive`, over a `walk`. Which
//! steps: `measure`, by a `schedule`. What they mean: `judge`, `findings`, `notes`. What is told: `advice`, `report`,
//! `plot`.
//!
//! Invariants: the target is only read; nothing is written before everything was measured, and nothing is replaced
//! unasked; memory is bounded by one step's. Absent: the network, whose cost no file tells (`ringfetch load` does).

pub(crate) mod args;

mod advice;
mod drive;
mod findings;
mod judge;
mod measure;
mod notes;
mod plot;
mod report;
mod schedule;
mod target;
mod walk;

use crate::args::Global;
use crate::outcome::Failure;
use crate::progress;
use crate::quantity::exact_size;
use crate::sink::{Sink, part_beside};
use args::Calibrate;
use measure::Bench;
use report::{Circumstances, Report};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};
use target::Target;
use tempfile::NamedTempFile;
use tokio::sync::watch;

pub(crate) async fn run(global: &Global, args: &Calibrate) -> Result<(), Failure> {
    if args.out.is_some() && args.out == args.plot {
        return Err(Failure::Usage("--out and --plot name the same file".to_owned()));
    }
    let (begin, date) = (Instant::now(), SystemTime::now());
    let target = Target::open(&args.path, args.block_bytes)?;
    // Before the minute, not after it: a place that cannot be written to.
    let yaml_file = Output::open("--out", args.out.as_deref(), args.force)?;
    let plot_file = Output::open("--plot", args.plot.as_deref(), args.force)?;
    let cpus = ringfetch_host::cpus::usable_cpus().len();
    let (stopper, stop) = watch::channel(false);
    let on_ctrl_c = tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            stopper.send_replace(true);
        }
        // Kept: without a sender nobody could wait for a word of it.
        stopper.closed().await;
    });
    let bar = progress::steps();
    let bench = Bench::new(
        &target,
        (args.budget(), args.rounds()),
        ringfetch_engine::probe::probe(),
        u32::try_from(cpus).unwrap_or(u32::MAX),
        &bar,
        stop,
    );
    let findings = bench.run().await;
    bar.finish_and_clear();
    on_ctrl_c.abort();
    let findings = findings?;
    if findings.steps.is_empty() {
        return Err(Failure::Failed("stopped before anything was measured".to_owned()));
    }
    let advice = advice::advise(&target, &findings);
    let report = Report {
        target: &target,
        findings: &findings,
        advice: &advice,
        circumstances: Circumstances {
            date: humantime::format_rfc3339_seconds(date).to_string(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cpus,
            budget: args.budget(),
            took: begin.elapsed(),
        },
    };
    let yaml = advice::yaml(&report.head(), &advice);
    let plotted = match (&findings.depth, &plot_file) {
        (Some(curve), Some(_)) => Some(plot::svg(&labels(&report), curve)),
        (None, _) | (_, None) => None,
    };
    tell(global, &report, &yaml, yaml_file.is_none())?;
    if let Some(file) = yaml_file {
        file.write(&yaml)?;
    }
    match (plot_file, plotted) {
        (Some(file), Some(picture)) => file.write(&picture),
        (Some(_), None) => Err(Failure::Failed(
            "--plot: not written, for the depths were not all measured".to_owned(),
        )),
        (None, _) => Ok(()),
    }
}

/// The result on stdout. With the YAML it is YAML as a whole: the tables stand in comments.
fn tell(global: &Global, report: &Report<'_>, yaml: &str, with_yaml: bool) -> Result<(), Failure> {
    let mut out = Sink::open(None)?;
    if global.json {
        serde_json::to_writer_pretty(&mut out, &report.json(yaml)?)?;
        writeln!(out)?;
        return out.finish();
    }
    let mut text = Vec::new();
    report.write(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    if !with_yaml {
        out.write_all(text.as_bytes())?;
        return out.finish();
    }
    for line in text.lines() {
        writeln!(out, "{}", format!("# {line}").trim_end())?;
    }
    // The tables have said what the head says.
    write!(out, "\n{}", advice::yaml(&[], report.advice))?;
    out.finish()
}

fn labels(report: &Report<'_>) -> plot::Labels {
    let (target, at) = (report.target, &report.circumstances);
    let ring = report.findings.ring_refusal.is_none();
    let heat = if target.direct { "direct" } else { "buffered, cold" };
    plot::Labels {
        title: format!(
            "{}: {} random reads, {heat}, {}",
            report.device_name(),
            exact_size(target.block_bytes.into()),
            at.date.split('T').next().unwrap_or_default()
        ),
        subtitle: format!(
            "{}, kernel {}, one {}; line: median of the passes, dots: each pass",
            target.path.file_name().unwrap_or_default().to_string_lossy(),
            at.kernel,
            if ring {
                "io_uring ring"
            } else {
                "pool of pread threads"
            }
        ),
        axis: if ring { "queue depth" } else { "threads of pread" },
        tags: target
            .device
            .as_ref()
            .and_then(ringfetch_host::block::Device::queue_tags),
    }
}

/// A file that is written at the end, or not at all.
#[derive(Debug)]
struct Output {
    flag: &'static str,
    file: NamedTempFile,
    path: PathBuf,
}

impl Output {
    fn open(flag: &'static str, path: Option<&Path>, force: bool) -> Result<Option<Self>, Failure> {
        let Some(path) = path else { return Ok(None) };
        let shown = path.display();
        if let Ok(found) = std::fs::symlink_metadata(path) {
            if !found.is_file() {
                return Err(Failure::Failed(format!(
                    "{flag}: {shown} exists and is not a regular file; choose another path"
                )));
            }
            if !force {
                return Err(Failure::Failed(format!(
                    "{flag}: {shown} is there already; --force replaces it"
                )));
            }
        }
        let file = part_beside(path)
            .map_err(|error| Failure::Failed(format!("{flag}: cannot write {shown}: {error}")))?;
        Ok(Some(Self {
            flag,
            file,
            path: path.to_owned(),
        }))
    }

    fn write(mut self, text: &str) -> Result<(), Failure> {
        let written = self.file.write_all(text.as_bytes());
        let committed = written.and_then(|()| Ok(self.file.persist(self.path)?));
        committed
            .map(drop)
            .map_err(|error| Failure::Failed(format!("{}: {error}", self.flag)))
    }
}
