//! `calibrate`: which settings of the engine suit one file or device, and when io_uring beats mmap and pread on it.
//!
//! Its stages stand on what those before them found: depths, and threads of mmap; single settings beside the default;
//! rings; the backends, cold and then warm. The rows decide everything (`advice`), so that a run that goes on decides the
//! same.

mod advice;

use super::{list, pair};
use crate::args::{Calibrate, Common};
use crate::drive::engine::{Choice, blocks};
use crate::error::LabError;
use crate::facts;
use crate::job::{Amount, Heat, Setup, Shape};
use crate::material::Material;
use crate::part_file::PartFile;
use crate::quantity::{exact_size, size};
use crate::report::{Plot, Report, plot, series};
use crate::strategies::named;
use crate::study::{Cell, Needs, Rows, Study, reads_per_second};
use crate::{Runs, measured};
use advice::{Found, yaml};
use ringfetch_engine::config::{BackendKind, DirectIo};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const REPETITIONS: u32 = 5;
const QUICK: Duration = Duration::from_secs(15);
/// Below this a file is over before a step is.
const LENGTH_MIN_BYTES: u64 = 16 << 20;
/// What is warmed, at most: beyond the CPU's caches, and read in a second.
const WARM_BYTES_MAX: u64 = 256 << 20;
/// The deepest ring that is tried.
const DEPTH_MAX: u32 = 512;
/// Reads of a batch, but for the curve of depths: there each read is asked for alone, so that its latency is its own.
/// Fewer where they would be more than `BATCH_BYTES_MAX`.
const BATCH: u64 = 16;
const BATCH_BYTES_MAX: u64 = 1 << 20;
/// Reads asked for at once, at least: as many as keep two threads of mmap in announced batches.
const ASKED_MIN: u32 = 128;
/// Reads asked for at once have at most so many bytes.
const ASKED_BYTES_MAX: u64 = 128 << 20;
/// Shorter ones would measure the start. It may make the whole longer than asked for.
const STEP_MIN: Duration = Duration::from_millis(20);
/// What a step costs beside its reads, before that is known.
const BESIDE_STEP: Duration = Duration::from_millis(60);

/// What is calibrated, and what it and this host can do.
#[derive(Debug, Clone)]
struct Subject {
    block_bytes: u32,
    length_bytes: u64,
    /// Whether it takes O_DIRECT.
    direct: bool,
    /// Why there is no ring.
    refusal: Option<String>,
    /// Whether a probing read into registered memory works.
    registered: bool,
    cpus: u32,
    tags: Option<u32>,
    /// What can be warm; 0 where the file is larger than memory.
    warm_bytes: u64,
}

/// What a step is of.
#[derive(Debug, Clone, Copy)]
struct Step {
    stage: &'static str,
    choice: Choice,
    direct: bool,
    warm: bool,
    asked: u32,
}

impl Subject {
    fn of(args: &Calibrate, material: &Material, direct: bool) -> Self {
        let ring = ringfetch_engine::probe::probe();
        let cpus = ringfetch_host::cpus::usable_cpus().len();
        let length_bytes = material.length_bytes();
        let fits = length_bytes <= facts::memory().available_bytes;
        let device = material.place.device.as_ref();
        Self {
            block_bytes: args.block_bytes,
            length_bytes,
            direct,
            registered: ring.as_ref().is_ok_and(|facts| facts.registered_buffers.is_ok()),
            refusal: ring.err().map(|refusal| refusal.to_string()),
            cpus: u32::try_from(cpus).unwrap_or(u32::MAX).max(1),
            tags: device.and_then(ringfetch_host::block::Device::queue_tags),
            warm_bytes: if fits { length_bytes.min(WARM_BYTES_MAX) } else { 0 },
        }
    }

    fn has_ring(&self) -> bool {
        self.refusal.is_none()
    }

    /// Reads that may be asked for at once.
    fn fitting(&self) -> u32 {
        let read = u64::from(self.block_bytes).next_multiple_of(4096);
        u32::try_from(ASKED_BYTES_MAX / read).unwrap_or(u32::MAX)
    }

    /// The settings of a batch on one ring that everything begins with.
    fn base(&self, backend: BackendKind) -> Choice {
        let fitting = BATCH_BYTES_MAX / u64::from(self.block_bytes.max(1));
        Choice {
            batch: usize::try_from(fitting.clamp(1, BATCH)).unwrap_or(1),
            registered_buffers: self.registered,
            device_tags: self.tags,
            ..Choice::of(backend)
        }
    }

    /// In order of preference: cold the ring, which is made for it, warm the mapping.
    fn candidates(&self, warm: bool) -> Vec<BackendKind> {
        use BackendKind::{Auto, Mmap, Pread, Uring};
        let order = if warm {
            [Mmap, Auto, Uring, Pread]
        } else {
            [Uring, Auto, Mmap, Pread]
        };
        let usable = |backend: &BackendKind| self.has_ring() || !backend.uses_ring();
        order.into_iter().filter(usable).collect()
    }

    /// The cells of a stage, from 0, each with the name of its setting; `None` after the last.
    fn stage(&self, number: usize, rows: &Rows) -> Option<Vec<(String, Step)>> {
        use BackendKind::{Mmap, Pread, Uring};
        let found = Found::new(self, rows, false);
        let (asked, direct) = (found.asked(), found.direct());
        let mut cells: Vec<(String, Step)> = Vec::new();
        let mut add = |stage, setting: &dyn ToString, choice: Choice, set: &dyn Fn(&mut Step)| {
            let mut step = Step {
                stage,
                choice,
                direct,
                warm: false,
                asked: asked.saturating_mul(choice.rings).min(self.fitting()),
            };
            set(&mut step);
            cells.push((setting.to_string(), step));
        };
        match number {
            0 => {
                let base = self.base(if self.has_ring() { Uring } else { Pread });
                for depth in powers_to(DEPTH_MAX.min(self.fitting())) {
                    add("depth", &depth, base, &|step| {
                        (step.asked, step.choice.queue_depth) = (depth, Some(depth));
                        // Beyond the tags there is something to be seen, too.
                        (step.choice.batch, step.choice.device_tags) = (1, None);
                    });
                }
                // More threads than CPUs wait for faults at the same time.
                for threads in powers_to(self.cpus.saturating_mul(2).min(256)) {
                    let mapped = self.base(Mmap);
                    add("mmap threads", &threads, mapped, &|step| {
                        step.choice.mmap_threads = threads;
                    });
                }
            }
            1 => {
                let (mapped, ring) = (found.chosen(Mmap), found.chosen(Uring));
                add("settings", &"announce on", mapped, &|_| {});
                add("settings", &"announce off", mapped, &|step| {
                    step.choice.announce = false;
                });
                if self.has_ring() {
                    add("settings", &"default", ring, &|_| {});
                    add("settings", &"eager flush 0", ring, &|step| {
                        step.choice.eager_flush_reads = 0;
                    });
                    if ring.registered_buffers {
                        let off = |step: &mut Step| step.choice.registered_buffers = false;
                        add("settings", &"registered buffers off", ring, &off);
                    }
                    if self.direct {
                        add("settings", &"direct off", ring, &|step| step.direct = false);
                    }
                }
            }
            2 if self.has_ring() && self.cpus > 1 => {
                for rings in powers_to(self.cpus) {
                    let mut choice = found.chosen(Uring);
                    choice.rings = rings;
                    add("rings", &rings, choice, &|_| {});
                }
            }
            3 | 4 if number == 3 || self.warm_bytes > 0 => {
                let (warm, stage) = (number == 4, if number == 4 { "warm" } else { "cold" });
                for backend in self.candidates(warm) {
                    let choice = found.chosen(backend);
                    let through_cache = warm && matches!(backend, Uring | Pread);
                    let heat = |step: &mut Step| (step.warm, step.direct) = (warm, direct && !through_cache);
                    add(stage, &"many", choice, &heat);
                    add(stage, &"one", choice, &|step| {
                        heat(step);
                        (step.asked, step.choice.batch, step.choice.rings) = (1, 1, 1);
                    });
                }
            }
            2..=4 => {}
            _ => return None,
        }
        Some(cells)
    }

    fn cell(&self, setting: &str, step: &Step, time: Duration) -> Option<Cell> {
        let backend = step.choice.backend;
        let heat = if step.warm {
            Heat::Warm
        } else if step.direct && backend != BackendKind::Mmap {
            Heat::Direct
        } else {
            Heat::Cold
        };
        let strategy = if backend == BackendKind::Pread {
            "engine-pread"
        } else {
            backend.as_str()
        };
        let shape = Shape::Blocks {
            block_bytes: self.block_bytes as usize,
            window_bytes: if step.warm {
                self.warm_bytes
            } else {
                self.length_bytes
            },
            random: true,
        };
        Some(Cell {
            key: vec![
                pair("stage", step.stage),
                pair("backend", backend),
                pair("setting", setting),
                pair("heat", heat.as_str()),
            ],
            strategy: named(strategy)?,
            material: 0,
            setup: Setup {
                engine: Some(step.choice),
                ..Setup::new(heat, shape, Amount::For(time), step.asked as usize)
            },
        })
    }

    /// The cells of the next stage that has some.
    fn next(&self, stage: &mut usize, rows: &Rows, pace: &Pace) -> Vec<Cell> {
        // What the later stages will have, as far as that is known.
        let left = (*stage..)
            .map_while(|number| self.stage(number, rows))
            .map(|cells| cells.len())
            .sum();
        let time = pace.step(left, rows);
        while let Some(cells) = self.stage(*stage, rows) {
            *stage += 1;
            if !cells.is_empty() {
                let cell = |(setting, step): &(String, Step)| self.cell(setting, step, time);
                return cells.iter().filter_map(cell).collect();
            }
        }
        Vec::new()
    }
}

/// How long each step may take, so that the whole takes what was asked for.
#[derive(Debug)]
struct Pace {
    begun: Instant,
    budget: Duration,
}

impl Pace {
    fn step(&self, cells_left: usize, rows: &Rows) -> Duration {
        let took = self.begun.elapsed();
        let (mut steps, mut reading) = (0u32, Duration::ZERO);
        for sample in rows.0.iter().flat_map(|row| row.measured()) {
            steps += 1;
            reading += Duration::try_from_secs_f64(sample.seconds).unwrap_or_default();
        }
        let beside = match steps {
            0 => BESIDE_STEP,
            steps => took.saturating_sub(reading) / steps,
        };
        let left = u32::try_from(cells_left)
            .unwrap_or(u32::MAX)
            .saturating_mul(REPETITIONS);
        let each = self.budget.saturating_sub(took) / left.max(1);
        each.saturating_sub(beside).max(STEP_MIN)
    }
}

/// 1, 2, 4 and so on, and the end itself: 6 gives 1, 2, 4, 6.
fn powers_to(end: u32) -> Vec<u32> {
    let end = end.max(1);
    let powers = (0..32).map(|bit| 1u32 << bit).take_while(|power| *power < end);
    powers.chain([end]).collect()
}

fn failed(problem: String) -> LabError {
    LabError::Failed(problem)
}

/// A file that is written at the end, or not at all: what cannot be written is found out before the minute.
fn output(flag: &str, path: Option<&Path>, force: bool) -> Result<Option<PartFile>, LabError> {
    let Some(path) = path else { return Ok(None) };
    let shown = path.display();
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.is_file() {
            let problem = "exists and is not a regular file; choose another path";
            return Err(failed(format!("{flag}: {shown} {problem}")));
        }
        if !force {
            return Err(failed(format!(
                "{flag}: {shown} is there already; --force replaces it"
            )));
        }
    }
    let part = PartFile::beside(path);
    part.map(Some)
        .map_err(|error| failed(format!("{flag}: cannot write {shown}: {error}")))
}

/// Whether it takes O_DIRECT, and why or why not.
fn opened(args: &Calibrate) -> Result<(bool, String), LabError> {
    let shown = args.path.display();
    if args.path.is_dir() {
        return Err(failed(format!(
            "{shown} is a directory: name one file or block device; for objects, the largest file among them"
        )));
    }
    let dataset = blocks(&args.path, args.block_bytes as usize, DirectIo::Preferred).map_err(failed)?;
    let (length, least) = (dataset.length_bytes(), size(LENGTH_MIN_BYTES));
    if length < LENGTH_MIN_BYTES {
        let has = if length == 0 {
            "is empty".to_owned()
        } else {
            format!("has {}", size(length))
        };
        return Err(failed(format!(
            "{shown} {has}, too little to measure: name a file of at least {least}, better one larger than memory"
        )));
    }
    Ok((dataset.direct().direct, dataset.direct().reason.clone()))
}

fn plan(args: &Calibrate, material: Arc<Material>, subject: &Subject, reason: String) -> Study {
    let most = subject.fitting().min(DEPTH_MAX);
    let mut left_out = Vec::new();
    if most < DEPTH_MAX {
        let (each, all) = (exact_size(args.block_bytes.into()), size(ASKED_BYTES_MAX));
        left_out.push(format!(
            "depths beyond {most}: reads of {each} would take more than {all} of memory"
        ));
    }
    if subject.has_ring() && !subject.registered {
        left_out.push("registered buffers: a read into registered memory does not work here".to_owned());
    }
    left_out.extend(
        subject
            .refusal
            .iter()
            .map(|refusal| format!("uring and auto: {refusal}")),
    );
    let warm = if subject.warm_bytes > 0 {
        format!("the first {}", size(subject.warm_bytes))
    } else {
        "not measured: the data are larger than the memory that is available".to_owned()
    };
    Study {
        name: "calibrate",
        title: "which settings of the engine suit this file on this device",
        source: "",
        settings: vec![
            pair("block", exact_size(args.block_bytes.into())),
            pair("direct I/O", reason),
            pair("warm", warm),
            pair("depths", list(&powers_to(most))),
        ],
        materials: vec![material],
        cells: Vec::new(),
        left_out,
        needs: Needs {
            // Cold reads are made after eviction, and that is checked.
            larger_than_memory: false,
            warm_bytes: 0,
            warm_option: "",
        },
        columns: &[
            "reads_per_second",
            "p50_us",
            "p99_us",
            "depth_achieved",
            "cpu_us_per_read",
        ],
        measure: crate::study::Measure::Once,
        judge: |_, _| {},
    }
}

/// With the options of this command: the path is none of them.
fn named_here(problem: &str) -> String {
    problem.replace("--path: ", "").replace("--out", "--report")
}

/// Measures, and says what to configure.
pub(crate) fn run(args: &Calibrate, runs: Runs<'_>) -> Result<(), LabError> {
    if args.out.is_some() && args.out == args.plot {
        return Err(LabError::Usage("--out and --plot name the same file".to_owned()));
    }
    let (direct, reason) = opened(args)?;
    let yaml_file = output("--out", args.out.as_deref(), args.force)?;
    let plot_file = output("--plot", args.plot.as_deref(), args.force)?;
    let scratch = tempfile::tempdir().map_err(|error| LabError::at("a temporary directory", error))?;
    let common = Common {
        path: args.path.clone(),
        out: Some(
            args.report
                .clone()
                .unwrap_or_else(|| scratch.path().join("report")),
        ),
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
        budget: if args.quick { QUICK } else { args.seconds },
    };
    let mut stage = 0;
    let first = subject.next(&mut stage, &Rows::default(), &pace);
    let study = |_: crate::material::Progress<'_>| {
        Ok(Study {
            cells: first,
            ..plan(args, material, &subject, reason)
        })
    };
    let done = measured(runs.context, &common, study, &mut |_, rows| {
        subject.next(&mut stage, rows, &pace)
    });
    let done = done.map_err(|error| match error {
        LabError::Refused(problem) => LabError::Refused(named_here(&problem)),
        LabError::Usage(problem) => LabError::Usage(named_here(&problem)),
        LabError::Failed(problem) => LabError::Failed(named_here(&problem)),
    })?;
    let found = Found::new(&subject, &done.rows, done.stopped.is_some());
    if done.rows.0.iter().all(|row| row.measured().next().is_none()) {
        return Err(failed("stopped before anything was measured".to_owned()));
    }
    let mut report = done.report;
    if done.stopped.is_some() {
        let mut note = "STOPPED by hand: what was not measured by then stays at its default".to_owned();
        if let Some(directory) = &args.report {
            let _ = write!(note, "; --resume --report {} goes on", directory.display());
        }
        report.notes.push(note);
    }
    conclude(&mut report, &found, args);
    if args.report.is_some() && done.stopped.is_none() {
        report.write(&done.directory)?;
    }
    let drawn = match &plot_file {
        Some(_) if found.depth().is_some() => {
            let depths = report
                .plots
                .iter()
                .filter(|plot| plot.name.starts_with("plot-depth"));
            Some(plot::svg(&depths.collect::<Vec<_>>())?)
        }
        Some(_) | None => None,
    };
    let with_yaml = yaml_file.is_none();
    if let Some(file) = yaml_file {
        let written = file.finish(report.yaml.as_bytes());
        written.map_err(|error| LabError::at("--out", error))?;
    }
    let text = if runs.context.json {
        report.json()?
    } else if with_yaml {
        // YAML as a whole: the tables stand in comments, and have said what its head says.
        let lines = report.text();
        let lines = lines
            .lines()
            .map(|line| format!("# {line}").trim_end().to_owned());
        format!(
            "{}\n\n{}",
            lines.collect::<Vec<_>>().join("\n"),
            yaml(&[], &report.advice)
        )
    } else {
        report.text()
    };
    runs.print(&text)?;
    match (plot_file, drawn) {
        (Some(file), Some(picture)) => {
            let written = file.finish(picture.as_bytes());
            written.map_err(|error| LabError::at("--plot", error))
        }
        (Some(_), None) => Err(failed(
            "--plot: not written, for the depths were not all measured".to_owned(),
        )),
        (None, _) => Ok(()),
    }
}

/// What follows from the rows: advice, the comparison of the backends, plots, doubts.
fn conclude(report: &mut Report, found: &Found<'_>, args: &Calibrate) {
    for mark in &mut report.marks {
        *mark = named_here(mark);
    }
    report.beside.extend(found.contests());
    report.beside.push(found.backends());
    report.notes.extend(found.doubts());
    report.advice = found.advice();
    let fact = |name: &str| {
        let known = report.facts.iter().find(|(known, _)| known == name);
        known.map_or("unknown", |(_, value)| value.as_str())
    };
    let mut head = vec![
        format!(
            "ringfetch calibrate {}: {}, {} on {}; kernel {}",
            fact("begun"),
            args.path.display(),
            fact("data"),
            fact("device"),
            fact("kernel")
        ),
        format!(
            "random reads of {}, medians of {REPETITIONS}; the engine alone, without a network",
            exact_size(args.block_bytes.into())
        ),
    ];
    head.extend(
        report
            .marks
            .iter()
            .map(|mark| format!("FORCED, no evidence: {mark}")),
    );
    head.extend(report.notes.iter().map(|note| format!("note: {note}")));
    report.yaml = yaml(&head, &report.advice);
    let knee = found
        .depth()
        .map_or_else(String::new, |knee| format!(", knee: {}", knee.setting));
    let tags = found
        .tags()
        .map_or_else(String::new, |tags| format!(", {tags} tags"));
    let block = exact_size(args.block_bytes.into());
    for (name, y, of) in [
        (
            "reads",
            "reads/s",
            reads_per_second as fn(&crate::job::Sample) -> f64,
        ),
        ("p50", "latency p50, us", |sample| sample.p50_us),
        ("p99", "latency p99, us", |sample| sample.p99_us),
    ] {
        let title = format!("Random reads of {block}, one ring{knee}{tags}");
        let lines = series(found.rows(), &[("stage", "depth")], "backend", "setting", of);
        let (name, x) = (format!("plot-depth-{name}"), "reads in flight asked for");
        report.plots.push(Plot::of(name, title, [x, y], lines));
    }
}
