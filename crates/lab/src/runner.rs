//! Measures a study's cells: repetition by repetition, each over all cells in an order of its own, so that whatever else
//! the machine does meets all of them.
//!
//! Before that each strategy makes a few reads with every byte checked: one that cannot is left out, with its reason.
//! Invariant: a step that was stopped leaves nothing.

use crate::error::LabError;
use crate::job::{Amount, Heat, Job, Sample, Setup};
use crate::journal::Journal;
use crate::study::{Cell, Row, Rows, Study};
use indicatif::{ProgressBar, ProgressStyle};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Reads of a probe.
const PROBE_READS: u64 = 8;

/// What came of it.
#[derive(Debug)]
pub(crate) enum Outcome {
    Complete(Rows),
    /// Stopped after so many of so many steps.
    Stopped(u64, u64),
}

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
        let mut tried: Vec<(&str, Heat, bool, Result<(), String>)> = Vec::new();
        let cells = std::mem::take(&mut study.cells);
        for cell in cells.clone() {
            let files = cell.setup.files() > 1;
            let of = |known: &&(&str, Heat, bool, Result<(), String>)| {
                (known.0, known.1, known.2) == (cell.strategy.name, cell.setup.heat, files)
            };
            let known = tried.iter().find(of).map(|known| known.3.clone());
            let works = match known {
                Some(works) => works,
                None => {
                    let works = self.tried(study, &cell)?;
                    if self.stop.load(Ordering::Relaxed) {
                        // What was cut short says nothing; the first step will see the same.
                        study.cells = cells;
                        return Ok(());
                    }
                    if let Err(why) = &works {
                        let (name, heat) = (cell.strategy.name, cell.setup.heat.as_str());
                        study.left_out.push(format!("{name}, {heat}: {why}"));
                    }
                    tried.push((cell.strategy.name, cell.setup.heat, files, works.clone()));
                    works
                }
            };
            if works.is_ok() {
                study.cells.push(cell);
            }
        }
        if study.cells.is_empty() {
            let why = study.left_out.join("; ");
            return Err(LabError::Failed(format!("nothing can be measured here: {why}")));
        }
        Ok(())
    }

    /// Why it does not work here, from the attempt.
    fn tried(&self, study: &Study, cell: &Cell) -> Result<Result<(), String>, LabError> {
        let mut setup = cell.setup;
        setup.amount = Amount::Reads(PROBE_READS);
        setup.depth = 1;
        let cell = Cell {
            setup,
            ..cell.clone()
        };
        let works = self.step(study, &cell, self.seed, true).map(drop);
        match works {
            Err(problem) if problem.starts_with("wrong bytes") => {
                Err(LabError::Failed(format!("{}: {problem}", cell.id())))
            }
            works => Ok(works),
        }
    }

    /// Measures every cell in every repetition, but for those that the journal has.
    ///
    /// # Errors
    /// Wrong bytes; a journal that cannot be written.
    pub(crate) fn run(&self, study: &mut Study, journal: &mut Journal) -> Result<Outcome, LabError> {
        let cells = study.cells.clone();
        let mut rows: Vec<Row> = cells
            .iter()
            .map(|cell| Row {
                key: cell.key.clone(),
                samples: vec![None; self.repetitions as usize],
            })
            .collect();
        let total = cells.len() as u64 * u64::from(self.repetitions);
        let bar = self.bar(total);
        let mut broken = vec![false; cells.len()];
        for repetition in 0..self.repetitions {
            let mut order: Vec<usize> = (0..cells.len()).collect();
            // An order of its own, then the same swapped; when the run goes on they are the same.
            fastrand::Rng::with_seed(self.seed ^ (u64::from(repetition / 2) << 32)).shuffle(&mut order);
            if repetition % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let (Some(cell), Some(row)) = (cells.get(index), rows.get_mut(index)) else {
                    continue;
                };
                let id = cell.id();
                bar.set_message(id.clone());
                let place = row.samples.get_mut(repetition as usize);
                let known = journal.sample(&id, repetition).cloned();
                if known.is_some() || broken.get(index) == Some(&true) {
                    place.into_iter().for_each(|place| *place = known.clone());
                    bar.inc(1);
                    // Steps of an earlier run took no time now.
                    bar.reset_eta();
                    continue;
                }
                let seed = self.seed.wrapping_add(bar.position());
                let made = self.step(study, cell, seed, false);
                if self.stop.load(Ordering::Relaxed) {
                    // Finished, it is at its end.
                    let done = bar.position();
                    bar.finish_and_clear();
                    return Ok(Outcome::Stopped(done, total));
                }
                match made {
                    Ok(sample) => {
                        journal.record(&id, repetition, &sample)?;
                        place.into_iter().for_each(|place| *place = Some(sample.clone()));
                    }
                    Err(problem) if problem.starts_with("wrong bytes") => {
                        return Err(LabError::Failed(format!("{id}: {problem}")));
                    }
                    Err(problem) => {
                        broken
                            .get_mut(index)
                            .into_iter()
                            .for_each(|broken| *broken = true);
                        study.left_out.push(format!("{id}: {problem}"));
                    }
                }
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        // A row that failed in some repetition is none.
        let whole = rows.into_iter().zip(broken).filter(|(_, broken)| !broken);
        Ok(Outcome::Complete(Rows(whole.map(|(row, _)| row).collect())))
    }

    /// One step, of as many runs as the study makes of it.
    fn step(&self, study: &Study, cell: &Cell, seed: u64, check_whole: bool) -> Result<Sample, String> {
        let mut once = |setup: Setup| {
            if self.stop.load(Ordering::Relaxed) {
                return Err("stopped".to_owned());
            }
            self.once(
                study,
                &Cell {
                    setup,
                    ..cell.clone()
                },
                seed,
                check_whole,
            )
        };
        if check_whole {
            return once(cell.setup);
        }
        study.measure.step(cell, &mut once)
    }

    /// One run: the page cache as it should be, the reads, what the device says of them.
    fn once(&self, study: &Study, cell: &Cell, seed: u64, check_whole: bool) -> Result<Sample, String> {
        let material = study.materials.get(cell.material).ok_or("no such data")?;
        let (files, window) = (cell.setup.files(), cell.setup.window_bytes());
        let prepared = match cell.setup.heat {
            Heat::Direct | Heat::Cold => material.make_cold(files),
            Heat::Warm => material.make_warm(files, window, self.stop),
            Heat::AsFound => Ok(()),
        };
        prepared.map_err(|error| error.to_string())?;
        let resident_before = material.resident_share(files, window);
        let device_before = material.place.counted();
        let job = Job::new(material, cell.setup, seed, check_whole, self.stop)?;
        (cell.strategy.run)(&job)?;
        let mut sample = job.outcome()?;
        sample.resident_before = resident_before;
        let device = device_before.zip(material.place.counted());
        sample.device_share = device.map(|(before, after)| {
            // A daemon's reads are not this process's.
            let read = match cell.strategy.name {
                "daemon" => after.by_anybody(&before),
                _ => after.since(&before),
            };
            let read = crate::quantity::approximate(read);
            read / crate::quantity::approximate(sample.bytes.max(1))
        });
        Ok(sample)
    }

    fn bar(&self, steps: u64) -> ProgressBar {
        let bar = ProgressBar::new(steps);
        match ProgressStyle::with_template("{bar:30} {pos}/{len}  {eta} left  {msg}") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }
}
