//! Studies: a device measured through the engine's own backends and through the baselines that they are compared with,
//! and reports of it that a reader can trust.
//!
//! A daemon that a study asks: `served`; what vectors are scored for: `questions`. What a study is: `study` and `studies`. What reads: `strategies`, over the loops of `drive`, from a `job`. What is
//! read: `material`. In which order: `runner`, recorded in a `journal`. What is refused: `honesty`. What is told:
//! `facts`, `stats`, `report`.
#![forbid(unsafe_code)]

mod args;
mod drive;
mod error;
mod facts;
mod honesty;
mod job;
mod journal;
mod material;
pub mod part_file;
pub mod quantity;
mod questions;
mod report;
mod runner;
mod served;
mod stats;
mod strategies;
mod studies;
mod study;
pub mod table;
mod walk;

pub use args::{
    Act, BlockSize, Calibrate, Common, FlipArgs, Lab, LabCommand, Objects, OfBlocks, OfDaemon, Rescore,
    Strategies,
};
pub use error::LabError;
pub use job::Sample;
pub use report::{Advice, Beside, Claim, Plot, Report, ReportRow};
pub use stats::Summary;

use crate::journal::{Header, Journal};
use crate::material::Material;
use crate::quantity::{approximate, size};
use crate::runner::Runner;
use crate::served::Served;
use crate::study::{Cell, Key, Rows, Study};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// What a command needs beside its arguments.
#[derive(Debug)]
pub struct Context {
    /// Set to stop: the step under way is dropped, what was measured stays.
    pub stop: Arc<AtomicBool>,
    /// Print JSON rather than tables.
    pub json: bool,
    /// The admin address of the daemon that `flip` switches.
    pub admin: String,
    /// As it was typed, for the report.
    pub command_line: String,
}

/// Refuses what would mislead, unless it is forced.
fn refuse(marks: &[String], force: bool) -> Result<(), LabError> {
    if marks.is_empty() || force {
        return Ok(());
    }
    Err(LabError::Refused(format!(
        "{} (--force measures it all the same, and marks the report)",
        marks.join("; ")
    )))
}

/// Runs a command. Blocks for as long as the study takes: call it on a thread of its own.
///
/// # Errors
/// One line that names the option or the path.
pub fn run(lab: &Lab, context: &Context, out: &mut dyn Write) -> Result<(), LabError> {
    let runs = Runs { context, out };
    match &lab.command {
        LabCommand::Strategies(args) => runs.study(&args.common, |progress| {
            let material = Material::one(&args.common.path, args.blocks.size, progress)?;
            studies::strategies::plan(args, material)
        }),
        LabCommand::BlockSize(args) => runs.study(&args.common, |progress| {
            let material = Material::one(&args.common.path, args.blocks.size, progress)?;
            studies::block_size::plan(args, material)
        }),
        LabCommand::Objects(args) => runs.study(&args.common, |progress| {
            let sizes = studies::objects::sizes(args)?.into_iter();
            let made = sizes.map(|(count, bytes)| Material::many(&args.common.path, count, bytes, progress));
            studies::objects::plan(args, made.collect::<Result<_, _>>()?)
        }),
        LabCommand::Act(args) => runs.study(&args.common, |progress| {
            let mut material = Material::one(&args.common.path, args.size, progress)?;
            material.served = Served::find(&args.daemon)?.map(Arc::new);
            studies::act::plan(args, material)
        }),
        LabCommand::Rescore(args) => runs.study(&args.common, |progress| {
            studies::rescore::plan(args, studies::rescore::material(args, progress)?)
        }),
        LabCommand::Flip(args) => runs.study(&args.common, |_progress| {
            studies::flip::plan(args, &context.admin)
        }),
        LabCommand::Calibrate(args) => studies::calibrate::run(args, runs),
        LabCommand::Compare { first, second } => {
            let text = report::compare::compare(&Report::read(first)?, &Report::read(second)?)?;
            runs.print(&text)
        }
    }
}

struct Runs<'a> {
    context: &'a Context,
    out: &'a mut dyn Write,
}

impl Runs<'_> {
    fn print(self, text: &str) -> Result<(), LabError> {
        let written = self.out.write_all(text.as_bytes());
        written.map_err(|error| LabError::at("stdout", error))
    }

    /// Measures a study's cells and reports.
    fn study(
        self,
        common: &Common,
        plan: impl FnOnce(material::Progress<'_>) -> Result<Study, LabError>,
    ) -> Result<(), LabError> {
        let done = measured(self.context, common, plan, &mut |_, _| Vec::new())?;
        if let Some(stopped) = done.stopped {
            return Err(LabError::Failed(stopped));
        }
        done.report.write(&done.directory)?;
        if self.context.json {
            return self.print(&done.report.json()?);
        }
        let (text, shown) = (done.report.text(), done.directory.join("report.html"));
        self.print(&format!("{text}\nReport: {}\n", shown.display()))
    }
}

/// What came of a study, not written yet.
struct Measured {
    rows: Rows,
    report: Report,
    directory: PathBuf,
    /// Cut short, with what goes on.
    stopped: Option<String>,
}

/// Makes the data, checks that their figures would mean something, and measures: the planned cells, and then those that
/// `then` makes of what was measured until it has no more. Everything `then` decides by has to be in the rows.
fn measured(
    context: &Context,
    common: &Common,
    plan: impl FnOnce(material::Progress<'_>) -> Result<Study, LabError>,
    then: &mut dyn FnMut(&mut Study, &Rows) -> Vec<Cell>,
) -> Result<Measured, LabError> {
    let mut marks = honesty::objections_to_run(common.repetitions);
    if common.path.is_dir() {
        // Before data are made in it.
        refuse(&marks, common.force)?;
    }
    more_descriptors();
    let stop = &context.stop;
    let bar = made_bar();
    let mut study = plan(&mut |bytes| {
        bar.set_position(bytes);
        !stop.load(Ordering::Relaxed)
    })?;
    bar.finish_and_clear();
    let memory = facts::memory();
    let materials: Vec<&Material> = study.materials.iter().map(Arc::as_ref).collect();
    marks.extend(honesty::objections(&materials, study.needs, &memory));
    refuse(&marks, common.force)?;
    let named = || PathBuf::from(format!("lab-{}", study.name));
    let directory = common.out.clone().unwrap_or_else(named);
    let now = || humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let line = context.command_line.clone();
    let header = Header::new(identity(&study, common), line, now(), marks);
    let mut journal = Journal::open(&directory, header, common.resume)?;
    let runner = Runner {
        repetitions: common.repetitions,
        seed: common.seed,
        stop,
    };
    let (bar, mut rows) = (runner::bar(), Rows::default());
    let mut steps = || {
        runner.probe(&mut study)?;
        while !study.cells.is_empty() && !stop.load(Ordering::Relaxed) {
            rows.0.extend(runner.run(&mut study, &mut journal, &bar)?.0);
            study.cells = then(&mut study, &rows);
        }
        Ok(())
    };
    let outcome = steps();
    match (outcome, study.measure.end()) {
        (Err(problem), Err(left)) => return Err(LabError::Failed(format!("{problem}; {left}"))),
        (outcome, ended) => ended.and(outcome)?,
    }
    let done = bar.position();
    bar.finish_and_clear();
    let stopped = stop.load(Ordering::Relaxed).then(|| {
        let (steps, shown) = (bar.length().unwrap_or(0), directory.display());
        format!("stopped after {done} of {steps} steps; --resume --out {shown} goes on")
    });
    let mut known = facts::host();
    if let Some(material) = study.materials.first() {
        known.extend(material.place.lines());
    }
    known.extend(told(&study, &memory, &journal, &rows, now()));
    let report = Report::of(&study, journal.header().marks.clone(), known, &rows);
    Ok(Measured {
        rows,
        report,
        directory,
        stopped,
    })
}

/// What has to be the same for a run to go on.
fn identity(study: &Study, common: &Common) -> Key {
    let data: Vec<String> = study
        .materials
        .iter()
        .map(|material| material.identity())
        .collect();
    let mut identity = vec![
        ("study".to_owned(), study.name.to_owned()),
        ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("kernel".to_owned(), facts::kernel()),
        ("path".to_owned(), common.path.display().to_string()),
        ("data".to_owned(), data.join("; ")),
        ("repetitions".to_owned(), common.repetitions.to_string()),
        ("seed".to_owned(), common.seed.to_string()),
        ("strategies".to_owned(), common.only.join(", ")),
    ];
    identity.extend(study.settings.iter().cloned());
    identity
}

/// Facts of the run.
fn told(study: &Study, memory: &facts::Memory, journal: &Journal, rows: &Rows, ended: String) -> Key {
    let length = study
        .materials
        .iter()
        .map(|material| material.length_bytes())
        .sum::<u64>();
    let ratio = approximate(length) / approximate(memory.bytes.max(1));
    let header = journal.header();
    let samples = rows.0.iter().flat_map(|row| row.measured());
    let most = samples.map(|sample| sample.own_memory_bytes).max().unwrap_or(0);
    [
        ("data", size(length)),
        ("data to memory", format!("{ratio:.2}")),
        ("begun", header.begun.clone()),
        ("ended", ended),
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("own memory, at most", size(most)),
        ("command line", header.command_line.clone()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

fn made_bar() -> ProgressBar {
    let bar = ProgressBar::no_length();
    match ProgressStyle::with_template("making data: {bytes}  {bytes_per_sec}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// A thousand files are open at once: as many as are allowed.
fn more_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // Where it is refused, opening says so.
    let _raised = setrlimit(Resource::Nofile, raised);
}
