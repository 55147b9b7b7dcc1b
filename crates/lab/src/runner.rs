//! Measures a study's cells: repetition by repetition, each over all cells in an order of its own, so that whatever else
//! the machine does meets all of them.
//!
//! Before that each strategy makes a few reads with every byte checked: one that cannot is left out, with its reason.
//! Invariant: a step that was stopped leaves nothing.

use crate::error::LabError;
use crate::job::Job;
use crate::journal::Journal;
use crate::sample::Sample;
use crate::setup::{Amount, Heat, Shape};
use crate::study::{Cell, Row, Rows, Study};
use indicatif::{ProgressBar, ProgressStyle};
use ringfetch_command::quantity::approximate;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The bar's line of the steps.
pub(crate) const STEPS: &str = "{bar:30} {pos}/{len}  {eta} left  {msg}";
/// Reads of a probe.
const PROBE_READS: u64 = 8;

/// How it is measured.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    pub(crate) repetitions: u32,
    pub(crate) seed: u64,
    pub(crate) stop: &'a Arc<AtomicBool>,
}

impl Runner<'_> {
    /// Leaves out what does not work here.
    ///
    /// # Errors
    /// A strategy returned wrong bytes.
    pub(crate) fn probe(&self, study: &mut Study) -> Result<(), LabError> {
        let mut tried: Vec<((&str, Heat, bool), bool)> = Vec::new();
        let mut working = Vec::new();
        for cell in &study.cells {
            let files = matches!(cell.setup.shape, Shape::Files { count } if count > 1);
            let kind = (cell.strategy.name, cell.setup.heat, files);
            if !tried.iter().any(|(known, _)| *known == kind) {
                let works = self.tried(study, cell)?;
                if self.stop.load(Ordering::Relaxed) {
                    // What was cut short says nothing; the first step will see the same.
                    return Ok(());
                }
                tried.push((kind, works.is_ok()));
                let why = works
                    .err()
                    .map(|why| format!("{}, {}: {why}", kind.0, kind.1.as_str()));
                study.left_out.extend(why);
            }
            if tried.contains(&(kind, true)) {
                working.push(cell.clone());
            }
        }
        study.cells = working;
        if study.cells.is_empty() {
            let why = study.left_out.join("; ");
            return Err(LabError::Failed(format!("nothing can be measured here: {why}")));
        }
        Ok(())
    }

    /// Why it does not work here, from the attempt.
    fn tried(&self, study: &Study, cell: &Cell) -> Result<Result<(), String>, LabError> {
        let mut cell = cell.clone();
        (cell.setup.amount, cell.setup.depth) = (Amount::Reads(PROBE_READS), 1);
        match self.step(study, &cell, self.seed, true) {
            Err(problem) if problem.starts_with("wrong bytes") => {
                Err(LabError::Failed(format!("{}: {problem}", cell.id())))
            }
            works => Ok(works.map(drop)),
        }
    }

    /// Measures every cell in every repetition, but for those that the journal has. When it is stopped, what was measured
    /// until then is returned.
    ///
    /// # Errors
    /// Wrong bytes; a journal that cannot be written.
    pub(crate) fn run(
        &self,
        study: &mut Study,
        journal: &mut Journal,
        bar: &ProgressBar,
    ) -> Result<Rows, LabError> {
        let row = |cell: &Cell| Row {
            key: cell.key.clone(),
            samples: Vec::new(),
        };
        // With whether no repetition has failed.
        let cells = study.cells.iter().map(|cell| (cell.clone(), row(cell), true));
        let mut cells: Vec<(Cell, Row, bool)> = cells.collect();
        bar.inc_length(cells.len() as u64 * u64::from(self.repetitions));
        'steps: for repetition in 0..self.repetitions {
            let mut order: Vec<usize> = (0..cells.len()).collect();
            // An order of its own, then the same swapped; when the run goes on they are the same.
            fastrand::Rng::with_seed(self.seed ^ (u64::from(repetition / 2) << 32)).shuffle(&mut order);
            if repetition % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let Some((cell, row, whole)) = cells.get_mut(index) else {
                    continue;
                };
                let id = cell.id();
                bar.set_message(id.clone());
                let known = journal.sample(&id, repetition).cloned();
                if known.is_some() || !*whole {
                    row.samples.push(known);
                    bar.inc(1);
                    // Steps of an earlier run took no time now.
                    bar.reset_eta();
                    continue;
                }
                let seed = self.seed.wrapping_add(bar.position());
                let made = self.step(study, cell, seed, false);
                if self.stop.load(Ordering::Relaxed) {
                    break 'steps;
                }
                match made {
                    Ok(sample) => {
                        journal.record(&id, repetition, &sample)?;
                        row.samples.push(Some(sample));
                    }
                    Err(problem) if problem.starts_with("wrong bytes") => {
                        return Err(LabError::Failed(format!("{id}: {problem}")));
                    }
                    Err(problem) => {
                        *whole = false;
                        study.left_out.push(format!("{id}: {problem}"));
                    }
                }
                bar.inc(1);
            }
        }
        // A row that failed in some repetition is none.
        let whole = cells.into_iter().filter(|(.., whole)| *whole);
        Ok(Rows(whole.map(|(_, row, _)| row).collect()))
    }

    /// One step, of as many runs as the study makes of it.
    fn step(&self, study: &Study, cell: &Cell, seed: u64, check_whole: bool) -> Result<Sample, String> {
        let mut once = |setup| match self.stop.load(Ordering::Relaxed) {
            true => Err("stopped".to_owned()),
            false => self.once(
                study,
                &Cell {
                    setup,
                    ..cell.clone()
                },
                seed,
                check_whole,
            ),
        };
        if check_whole {
            return once(cell.setup);
        }
        study.measure.step(cell, &mut once)
    }

    /// One run: the page cache as it should be, the reads, what the device says of them.
    fn once(&self, study: &Study, cell: &Cell, seed: u64, check_whole: bool) -> Result<Sample, String> {
        let material = study.materials.get(cell.setup.material).ok_or("no such data")?;
        let reads = cell.setup.reads(material);
        let (files, window) = (reads.files, reads.window_bytes);
        let prepared = match cell.setup.heat {
            Heat::Direct | Heat::Cold => material.make_cold(files),
            Heat::Warm if material.resident_share(files, window) == Some(1.0) => Ok(()),
            Heat::Warm => material.make_warm(files, window, self.stop),
            Heat::AsFound => Ok(()),
        };
        prepared.map_err(|error| error.to_string())?;
        let resident_before = material.resident_share(files, window);
        let device_before = material.place.counted();
        let job = Job::new(material, cell.setup, seed, check_whole, self.stop)?;
        cell.strategy.run(&job)?;
        let mut sample = job.outcome()?;
        sample.resident_before = resident_before;
        sample.device_share = device_before
            .zip(material.place.counted())
            .map(|(before, after)| {
                // A daemon's reads are not this process's.
                let read = match cell.strategy.name {
                    "daemon" => after.by_anybody(&before),
                    _ => after.since(&before),
                };
                approximate(read) / approximate(sample.bytes.max(1))
            });
        Ok(sample)
    }
}

/// A bar with this line, of no length so far.
pub(crate) fn bar(line: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    match ProgressStyle::with_template(line) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
