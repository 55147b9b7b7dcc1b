//! Studies: measure a device through the engine's own backends and through the baselines that they are
//! compared with, and report it so that a reader can trust it.
//!
//! `study` and `studies` define studies. `strategies` read, with the loops of `drive`, as a step's `setup`
//! says, taking reads from a `job`. They read `material`, with the `page_cache` above it, or a daemon
//! (`served`); `questions` are what vectors are scored for. `runner` orders the steps and records them in a
//! `journal`. `honesty` refuses. `facts`, `sample`, `stats` and `report` report.
#![forbid(unsafe_code)]

mod args;
mod drive;
mod error;
mod facts;
mod honesty;
mod job;
mod journal;
mod material;
mod page_cache;
mod questions;
mod report;
mod runner;
mod sample;
mod served;
mod setup;
mod stats;
mod strategies;
mod studies;
mod study;
mod walk;

pub use args::{
    Act, BlockSize, Calibrate, Common, FlipArgs, Lab, LabCommand, Objects, OfBlocks, OfDaemon, Rescore,
    Strategies,
};
pub use error::LabError;
pub use report::{Advice, Beside, Claim, Line, Plot, Report, ReportRow};
pub use sample::Sample;
pub use served::Clients;
pub use stats::Summary;

use crate::facts::{Place, UNCOUNTED};
use crate::journal::{Header, Journal};
use crate::material::Material;
use crate::report::compare::Comparison;
use crate::runner::Runner;
use crate::study::{About, Cell, Key, Rows, Study, pair};
use ringfetch_command::quantity::{approximate, size};
use std::borrow::Cow;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// What a command needs besides its arguments.
#[derive(Debug)]
pub struct Context {
    /// Set to stop: the current step is dropped, earlier ones are kept.
    pub stop: Arc<AtomicBool>,
    /// Print JSON instead of tables.
    pub json: bool,
    /// Makes clients of the daemon.
    pub clients: Clients,
    /// The admin address of the daemon: `flip` switches its backends, other studies ask for them.
    pub admin: String,
    /// As typed, for the report.
    pub command_line: String,
}

/// Refuses a run that would mislead, unless it is forced.
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
    match &lab.command.clone().in_order() {
        LabCommand::Strategies(args) => runs.study(&studies::strategies::ABOUT, &args.common, |bar| {
            studies::strategies::plan(args, bar)
        }),
        LabCommand::BlockSize(args) => runs.study(&studies::block_size::ABOUT, &args.common, |bar| {
            studies::block_size::plan(args, bar)
        }),
        LabCommand::Objects(args) => runs.study(&studies::objects::ABOUT, &args.common, |bar| {
            studies::objects::plan(args, bar)
        }),
        LabCommand::Act(args) => runs.study(&studies::act::ABOUT, &args.common, |bar| {
            studies::act::plan(args, context, bar)
        }),
        LabCommand::Rescore(args) => runs.study(&studies::rescore::ABOUT, &args.common, |bar| {
            studies::rescore::plan(args, context, bar)
        }),
        LabCommand::Flip(args) => runs.study(&studies::flip::ABOUT, &args.common, |_| {
            studies::flip::plan(args, context)
        }),
        LabCommand::Calibrate(args) => studies::calibrate::run(args, runs),
        LabCommand::Compare { first, second } => {
            let comparison = Comparison::of(&Report::read(first)?, &Report::read(second)?)?;
            let text = if context.json {
                comparison.json()?
            } else {
                comparison.text()
            };
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
        written.map_err(|error| LabError::Failed(error.to_string()))
    }

    /// Measures a study's cells and reports.
    fn study(
        self,
        about: &About,
        common: &Common,
        plan: impl FnOnce(material::Progress<'_>) -> Result<Study, LabError>,
    ) -> Result<(), LabError> {
        let named = || PathBuf::from(format!("lab-{}", about.name));
        let directory = common.out.clone().unwrap_or_else(named);
        let done = measured(self.context, common, Some(&directory), plan, &mut |_, _| {
            Vec::new()
        })?;
        if let Some(stopped) = done.stopped {
            return Err(LabError::Failed(stopped));
        }
        // A full disk does not cost the figures: they are printed all the same.
        let written = done.report.write(&directory);
        let text = if self.context.json {
            done.report.json()?
        } else {
            let (text, shown) = (done.report.text(), directory.join("report.html"));
            let shown = written
                .as_ref()
                .map(|()| format!("\nReport: {}\n", shown.display()));
            text + shown.as_deref().unwrap_or_default()
        };
        self.print(&text)?;
        written
    }
}

/// The results of a study, not written yet.
struct Measured {
    rows: Rows,
    report: Report,
    /// If it was interrupted: how far it got, and how to resume it.
    stopped: Option<String>,
}

/// Checks that the results have a place, makes the data, checks that their figures would mean something, and
/// measures the planned cells. Then `then` plans further cells from the results, until it has none. `then`
/// may decide only by the rows. Without a `directory`, the steps are not kept.
fn measured(
    context: &Context,
    common: &Common,
    directory: Option<&Path>,
    plan: impl FnOnce(material::Progress<'_>) -> Result<Study, LabError>,
    then: &mut dyn FnMut(&mut Study, &Rows) -> Vec<Cell>,
) -> Result<Measured, LabError> {
    let mut marks = honesty::objections_to_run(common.repetitions);
    if common.path.is_dir() {
        // Before data are made there.
        let place = Place::of(&material::open(&common.path)?);
        let in_memory = place.in_memory.then(|| honesty::IN_MEMORY.to_owned());
        let known: Vec<String> = marks.iter().cloned().chain(in_memory).collect();
        refuse(&known, common.force)?;
    }
    let option = common.out_option;
    if let Some(directory) = directory {
        Journal::check(option, directory, common.resume)?;
        if !common.resume && !common.force {
            Journal::check_empty(option, directory)?;
        }
        Journal::check_writable(option, directory)?;
    }
    more_descriptors();
    let stop = &context.stop;
    let bar = runner::bar("making data: {bytes}  {bytes_per_sec}");
    let mut study = plan(&mut |bytes| {
        bar.set_position(bytes);
        !stop.load(Ordering::Relaxed)
    })?;
    bar.finish_and_clear();
    study.left_out.extend(uncounted(&study));
    let memory = facts::memory();
    let materials: Vec<&Material> = study.materials.iter().map(Arc::as_ref).collect();
    marks.extend(honesty::objections(&materials, study.needs, &memory));
    refuse(&marks, common.force)?;
    let now = || humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let line = context.command_line.clone();
    let host = facts::host();
    let header = Header::new(identity(&study, common, &host), line, now(), marks);
    let mut journal = Journal::open(option, directory, header, common.resume)?;
    let (bar, mut rows) = (runner::bar(runner::STEPS), Rows::default());
    let runner = Runner {
        repetitions: common.repetitions,
        seed: common.seed,
        stop,
        bar: &bar,
    };
    let mut steps = || {
        runner.probe(&mut study)?;
        while !study.cells.is_empty() && !stop.load(Ordering::Relaxed) {
            rows.0.extend(runner.run(&mut study, &mut journal)?.0);
            study.cells = then(&mut study, &rows);
        }
        match stop.load(Ordering::Relaxed) {
            true => Ok(()),
            false => study.check_measured(&rows),
        }
    };
    let outcome = steps();
    if let (Err(_), Some(directory)) = (&outcome, directory) {
        journal.remove_empty(directory);
    }
    match (outcome, study.measure.end()) {
        (Err(problem), Err(left)) => return Err(LabError::Failed(format!("{problem}; {left}"))),
        (outcome, ended) => ended.and(outcome)?,
    }
    let done = bar.position();
    bar.finish_and_clear();
    let stopped = stop.load(Ordering::Relaxed).then(|| {
        let how_far = match (bar.length().unwrap_or(0), journal.steps()) {
            // Without a length, the strategies were still being tried.
            (0, 0) => "before the first step".to_owned(),
            (0, known) => format!("before step {}", known + 1),
            (steps, _) => format!("after {done} of {steps} steps"),
        };
        let remedy =
            directory.map(|directory| format!("; continue with --resume {option} {}", word(directory)));
        format!("stopped {how_far}{}", remedy.unwrap_or_default())
    });
    let mut known = host;
    let places = study.materials.iter().map(|material| material.place.lines());
    known.extend(places.take(1).flatten());
    known.extend(of_run(&study, &memory, &journal, &rows, now()));
    let report = Report::of(&study, journal.header().marks.clone(), known, &rows);
    Ok(Measured {
        rows,
        report,
        stopped,
    })
}

fn word(path: &Path) -> String {
    let shown = path.to_string_lossy();
    // No path has a zero byte, which cannot be quoted.
    shlex::try_quote(&shown).map_or_else(|_| shown.to_string(), Cow::into_owned)
}

/// The CPU time that figures of a daemon lack, if its process is unknown.
fn uncounted(study: &Study) -> Option<String> {
    let served = |cell: &Cell| study.materials.get(cell.setup.material)?.served.as_ref();
    let mut daemons = study.cells.iter().filter(|cell| cell.strategy.name == "daemon");
    let served = daemons.find_map(served)?;
    let missing = "the daemon's CPU time: name its process with --server-pid";
    served.cpu().is_none().then(|| missing.to_owned())
}

/// What must be equal for a run to be resumed: the steps of a row are those of one host, device and daemon.
fn identity(study: &Study, common: &Common, host: &Key) -> Key {
    let data = study.materials.iter().map(|material| material.identity());
    let data = data.collect::<Vec<_>>().join("; ");
    // `./data` and a link to it are `data`.
    let path = std::fs::canonicalize(&common.path);
    let path = path.as_deref().unwrap_or(&common.path);
    let mut identity = vec![
        pair("study", study.about.name),
        pair("version", env!("CARGO_PKG_VERSION")),
        pair("path", path.display()),
        pair("data", data),
        pair("repetitions", common.repetitions),
        pair("seed", common.seed),
        pair("strategies", study.chosen.join(", ")),
    ];
    identity.extend(host.iter().cloned());
    let places = study.materials.iter().map(|material| material.place.lines());
    let mut place: Key = places.take(1).flatten().collect();
    // The counter of a new device is 0 until it is read.
    place.retain(|(name, _)| name != UNCOUNTED);
    identity.extend(place);
    identity.extend(study.settings.iter().cloned());
    identity
}

/// Facts of the run.
fn of_run(study: &Study, memory: &facts::Memory, journal: &Journal, rows: &Rows, ended: String) -> Key {
    let length: u64 = study
        .materials
        .iter()
        .map(|material| material.length_bytes())
        .sum();
    let ratio = approximate(length) / approximate(memory.bytes.max(1));
    let header = journal.header();
    let samples = rows.0.iter().flat_map(|row| row.measured());
    let most = samples.map(|sample| sample.own_memory_bytes).max().unwrap_or(0);
    // Of a directory or a device that a daemon reads it is not known.
    let of_data = [
        pair("data", size(length)),
        pair("data to memory", format!("{ratio:.2}")),
    ];
    let mut facts: Key = of_data.into_iter().filter(|_| length > 0).collect();
    facts.extend([
        pair("begun", &header.begun),
        pair("ended", ended),
        pair("version", env!("CARGO_PKG_VERSION")),
        pair("own memory, at most", size(most)),
        pair("command line", &header.command_line),
    ]);
    facts
}

/// Raises the limit of descriptors as far as allowed: a thousand files are open at once.
fn more_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // If this fails, opening files reports it.
    let _raised = setrlimit(Resource::Nofile, raised);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::tests::{scratch, small};
    use clap::Parser as _;
    use ringfetch_host::block::Device;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        common: Common,
    }

    type Change = fn(&mut Place, &mut Key);

    #[test]
    fn a_run_is_resumed_on_the_same_host_and_device_alone() {
        // Scenario: an unfinished study; the same with other CPUs, less memory, on another file system, with another
        // read-ahead, of a device that is not known. Expected: refused, with the name of what differs; resumed if nothing does.
        let [data, out] = [scratch(), scratch()];
        let words = ["lab", "--path", "/", "--repetitions", "5"];
        let common = Line::parse_from(words).common;
        let device = || {
            let tree = ringfetch_host::tree::storage();
            let device = Device::numbered(&tree.view(), rustix::fs::makedev(259, 0));
            device.unwrap().0
        };
        let resumed = |resume: bool, change: Change| {
            let mut material = small(data.path());
            material.place.device = Some(device());
            let mut host: Key = ["CPU", "memory"].map(|name| pair(name, "8")).to_vec();
            change(&mut material.place, &mut host);
            let study = Study::new(&About::SAMPLE, &common, "", Vec::new(), vec![material]);
            let identity = identity(&study, &common, &host);
            let header = Header::new(identity, String::new(), String::new(), Vec::new());
            let opened = Journal::open("--out", Some(out.path()), header, resume);
            opened.map(drop).map_err(|error| error.to_string())
        };
        resumed(false, |_, _| {}).unwrap();
        resumed(true, |_, _| {}).unwrap();
        let changes: [(&str, Change); 5] = [
            ("CPU", |_, host| host[0].1 = "4".to_owned()),
            ("memory", |_, host| host[1].1 = "4".to_owned()),
            ("file system", |place, _| {
                place.file_system = "xfs at /".to_owned();
            }),
            ("read-ahead", |place, _| {
                place.device.as_mut().unwrap().read_ahead_kib = Some(1);
            }),
            ("device", |place, _| place.device = None),
        ];
        for (name, change) in changes {
            let refused = resumed(true, change).unwrap_err();
            let named = format!("--resume: the unfinished run has {name}: ");
            assert!(refused.starts_with(&named), "{refused}");
        }
    }
}
