//! Measures a study's cells: repetition by repetition, each over all cells in a new order, so that other
//! activity of the machine affects all of them.
//!
//! First each strategy makes a few reads with every byte checked: one that fails is left out, with its
//! reason. Invariant: a step that was stopped leaves nothing.

use crate::error::LabError;
use crate::job::Job;
use crate::journal::Journal;
use crate::page_cache::{CACHESTAT, COLD_SHARE_MAX};
use crate::sample::Sample;
use crate::setup::{Amount, Shape};
use crate::study::{Cell, Row, Rows, Study};
use humantime::format_duration;
use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use ringfetch_command::quantity::grouped;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Template of the progress bar for steps.
pub(crate) const STEPS: &str = "{bar:30} {pos}/{len}  {left}{wide_msg}";
const PROBE_READS: u64 = 8;
const PAGE_BYTES: usize = 4096;

/// How cells are measured.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    pub(crate) repetitions: u32,
    pub(crate) seed: u64,
    pub(crate) stop: &'a Arc<AtomicBool>,
    pub(crate) bar: &'a ProgressBar,
}

impl Runner<'_> {
    /// Leaves out what does not work here.
    ///
    /// # Errors
    /// A strategy returned wrong bytes.
    pub(crate) fn probe(&self, study: &mut Study) -> Result<(), LabError> {
        // Kinds of cells, each with whether it works.
        let mut tried = Vec::new();
        let mut working = Vec::new();
        for cell in &study.cells {
            let files = matches!(cell.setup.shape, Shape::Files { count } if count > 1);
            // A file system may want direct reads aligned, to a page at most.
            let small = match cell.setup.shape {
                Shape::Blocks { block_bytes, .. } => Some(block_bytes).filter(|bytes| *bytes < PAGE_BYTES),
                Shape::Files { .. } | Shape::Queries { .. } | Shape::Items { .. } => None,
            };
            let kind = (cell.strategy.name, cell.setup.heat, files, small);
            if !tried.iter().any(|(known, _)| *known == kind) {
                let works = self.tried(study, cell)?;
                if self.stop.load(Ordering::Relaxed) {
                    // An interrupted probe says nothing; the first step will stop too.
                    return Ok(());
                }
                tried.push((kind, works.is_ok()));
                let blocks = small.map_or_else(String::new, |bytes| format!(", blocks of {bytes} bytes"));
                let why = works
                    .err()
                    .map(|why| format!("{}, {}{blocks}: {why}", kind.0, kind.1.as_str()));
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

    /// Tries a cell: `Ok(Err)` says why it does not work here.
    fn tried(&self, study: &Study, cell: &Cell) -> Result<Result<(), String>, LabError> {
        self.bar.set_message(format!("trying {}", cell.id()));
        let mut cell = cell.clone();
        (cell.setup.amount, cell.setup.depth) = (Amount::Reads(PROBE_READS), 1);
        match self.step(study, &cell, self.seed, true) {
            Err(problem) if problem.starts_with("wrong bytes") => Err(wrong(study, &cell, &problem)),
            works => Ok(works.map(drop)),
        }
    }

    /// Measures every cell in every repetition, except for those in the journal. If stopped, returns what was
    /// measured until then. The row of a cell that failed has no samples.
    ///
    /// # Errors
    /// Wrong bytes; data that changed; the journal cannot be written.
    pub(crate) fn run(&self, study: &mut Study, journal: &mut Journal) -> Result<Rows, LabError> {
        let bar = self.bar;
        // As long as in an earlier run, whose plan may have been another: the samples of a row are compared, and the rows of
        // a stage.
        let known = study.cells.iter().find_map(|cell| journal.time(&cell.id()));
        for cell in &mut study.cells {
            if let (Amount::For(time), Some(known)) = (&mut cell.setup.amount, known) {
                *time = known;
            }
        }
        let row = |cell: &Cell| Row {
            key: cell.key.clone(),
            heat: cell.setup.heat,
            samples: Vec::new(),
        };
        // Each with whether no repetition has failed.
        let cells = study.cells.iter().map(|cell| (cell.clone(), row(cell), true));
        let mut cells: Vec<(Cell, Row, bool)> = cells.collect();
        bar.inc_length(cells.len() as u64 * u64::from(self.repetitions));
        'steps: for repetition in 0..self.repetitions {
            let mut order: Vec<usize> = (0..cells.len()).collect();
            // A random order, then the same reversed; a resumed run has the same orders.
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
                let known = journal.step(&id, repetition).cloned();
                if known.is_some() || !*whole {
                    if let Some(Err(problem)) = &known {
                        *whole = false;
                        study.left_out.push(format!("{id}: {problem}"));
                    }
                    row.samples.push(known.and_then(Result::ok));
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
                let material = study.materials.get(cell.setup.material);
                material.map_or(Ok(()), |material| material.check_unchanged())?;
                if let Err(problem) = &made
                    && problem.starts_with("wrong bytes")
                {
                    return Err(wrong(study, cell, problem));
                }
                let time = match cell.setup.amount {
                    Amount::For(time) => Some(time),
                    Amount::Reads(_) | Amount::At { .. } => None,
                };
                journal.record(&id, repetition, time, &made)?;
                match made {
                    Ok(sample) => row.samples.push(Some(sample)),
                    Err(problem) => {
                        // The cell stays, so that a curve is known to lack a point.
                        *whole = false;
                        study.left_out.push(format!("{id}: {problem}"));
                    }
                }
                bar.inc(1);
            }
        }
        let rows = cells.into_iter().map(|(_, mut row, whole)| {
            // What failed in some repetition is not measured.
            row.samples.retain(|_| whole);
            row
        });
        Ok(Rows(rows.collect()))
    }

    /// One step, with as many runs as the study makes of it.
    fn step(&self, study: &Study, cell: &Cell, seed: u64, check_whole: bool) -> Result<Sample, String> {
        let mut runs = 0u64;
        let mut once = |setup| {
            if self.stop.load(Ordering::Relaxed) {
                return Err("stopped".to_owned());
            }
            let cell = Cell {
                setup,
                ..cell.clone()
            };
            // What one run has read a device or its host may keep, beyond the reach of an eviction. Steps count up, too.
            let seed = seed ^ (runs << 32);
            runs += 1;
            self.once(study, &cell, seed, check_whole)
        };
        if check_whole {
            return once(cell.setup);
        }
        study.measure.step(cell, &mut once)
    }

    /// One run: prepares the page cache, reads, and compares with the device's counters.
    fn once(&self, study: &Study, cell: &Cell, seed: u64, check_whole: bool) -> Result<Sample, String> {
        if let Amount::At { per_second, time } = cell.setup.amount {
            // A step of `act` is many of them, of which the last may take a day.
            let (id, each, time) = (cell.id(), grouped(per_second), format_duration(time));
            self.bar.set_message(format!("{id}: {each}/s for {time}"));
        }
        let material = study.materials.get(cell.setup.material).ok_or("no such data")?;
        let reads = cell.setup.reads(material);
        let reads = (reads.files, reads.window_bytes);
        let prepared = material.prepare(cell.setup.heat, reads, CACHESTAT, self.stop);
        let resident_before = prepared.map_err(|error| error.to_string())?;
        let device_before = material.place.counted();
        let job = Job::new(material, cell.setup, seed, check_whole, self.stop)?;
        cell.strategy.run(&job)?;
        let mut sample = job.outcome()?;
        sample.resident_before = resident_before;
        let by_daemon = cell.strategy.name == "daemon";
        sample.device_share = device_before
            .zip(material.place.counted())
            .map(|(before, after)| {
                // A daemon's reads are not counted for this process.
                let read = match by_daemon {
                    true => after.by_anybody(&before),
                    false => after.since(&before),
                };
                let past_cache = match by_daemon {
                    true => by_daemon_past_cache(resident_before),
                    false => cell.strategy.past_cache(&cell.setup),
                };
                job.device_share(read, past_cache)
            });
        Ok(sample)
    }
}

/// Whether a daemon's reads go past the page cache: not, if the data were in it; else perhaps.
fn by_daemon_past_cache(resident_before: Option<f64>) -> Option<bool> {
    Some(false).filter(|_| resident_before.is_some_and(|share| share > COLD_SHARE_MAX))
}

/// The error for bytes that are not the data's. Those of a daemon may be another dataset's.
fn wrong(study: &Study, cell: &Cell, problem: &str) -> LabError {
    let material = study.materials.get(cell.setup.material);
    let material = material.filter(|_| cell.strategy.name == "daemon");
    match material.and_then(|material| material.served.as_ref().zip(material.files.first())) {
        Some((served, file)) => LabError::Usage(served.unlike(&file.path, &format!(": {problem}"))),
        None => LabError::Failed(format!("{}: {problem}", cell.id())),
    }
}

/// A bar with this template, of no length so far. `left`: the time left, if it is known.
pub(crate) fn bar(line: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    let left = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        // 0: unknown before the first step, and after the last one, when a study may plan more.
        if state.eta().as_secs() > 0 {
            let _written = write!(out, "{:#} left  ", HumanDuration(state.eta()));
        }
    };
    match ProgressStyle::with_template(line) {
        Ok(style) => bar.with_style(style.with_key("left", left)),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Header;
    use crate::material::tests::{scratch, small};
    use crate::report::Report;
    use crate::setup::{Heat, Setup};
    use crate::strategies::{Run, Strategy};
    use crate::studies::act::Search;
    use crate::study::{About, Measure, Needs, pair};
    use indicatif::{ProgressDrawTarget, TermLike};
    use std::io;
    use std::path::Path;
    use std::sync::atomic::AtomicU32;
    use std::sync::{Mutex, PoisonError};
    use std::time::{Duration, Instant};

    /// A terminal that keeps what is written to it.
    #[derive(Debug, Clone, Default)]
    struct Terminal(Arc<Mutex<String>>);

    impl Terminal {
        fn take(&self) -> String {
            std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
        }
    }

    impl TermLike for Terminal {
        fn width(&self) -> u16 {
            200
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_never_says_that_nothing_is_left() {
        // Scenario: a bar while strategies are tried, in its first step, and after its last one, when a study may plan
        // more. Expected: the number of steps, and no time left.
        let (terminal, bar) = (Terminal::default(), bar(STEPS));
        bar.set_draw_target(ProgressDrawTarget::term_like(Box::new(terminal.clone())));
        let drawn = || {
            bar.force_draw();
            terminal.take()
        };
        let tries = drawn();
        bar.set_length(2);
        let first = drawn();
        bar.inc(2);
        let last = drawn();
        for (text, steps) in [(tries, "0/0"), (first, "0/2"), (last, "2/2")] {
            assert!(text.contains(steps) && !text.contains("left"), "{text}");
        }
    }

    /// Where the runs of `noted` began.
    static FIRST: Mutex<Vec<u64>> = Mutex::new(Vec::new());

    fn noted(job: &Arc<Job>) -> Result<(), String> {
        let mut lane = job.lane();
        job.begin();
        let read = job.next().ok_or("nothing to read")?;
        FIRST
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(read.offset);
        lane.counted(read.offset, read.length, Instant::now());
        Ok(())
    }

    fn study(cells: Vec<Cell>, measure: Measure) -> (tempfile::TempDir, Study) {
        let directory = scratch();
        let study = Study {
            about: &About::SAMPLE,
            settings: Vec::new(),
            materials: vec![Arc::new(small(directory.path()))],
            chosen: Vec::new(),
            cells,
            left_out: Vec::new(),
            needs: Needs::default(),
            measure,
        };
        (directory, study)
    }

    const fn strategy(name: &'static str, run: fn(&Arc<Job>) -> Result<(), String>) -> Strategy {
        Strategy {
            name,
            about: "",
            depth_max: 4,
            run: Run::Own(run),
        }
    }

    /// Cold reads of pages at a depth.
    fn cell(strategy: &'static Strategy, amount: Amount, depth: usize) -> Cell {
        Cell {
            key: vec![pair("depth", depth)],
            strategy,
            setup: Setup::new(Heat::Cold, Shape::random(4096, 4 << 20), amount, depth),
        }
    }

    fn journal(directory: Option<&Path>, resume: bool) -> Journal {
        let header = Header::new(Vec::new(), String::new(), String::new(), Vec::new());
        Journal::open("--out", directory, header, resume).unwrap()
    }

    fn runner<'a>(stop: &'a Arc<AtomicBool>, bar: &'a ProgressBar) -> Runner<'a> {
        Runner {
            repetitions: 1,
            seed: 7,
            stop,
            bar,
        }
    }

    #[test]
    fn the_runs_of_a_step_read_other_places() {
        // Scenario: two steps of `act`, each a search of one run and the hold. Expected: none begins where another did.
        static NOTED: Strategy = strategy("noted", noted);
        let time = Duration::from_millis(1);
        let amount = Amount::At { per_second: 1, time };
        let cell = Cell {
            key: Vec::new(),
            strategy: &NOTED,
            setup: Setup::new(Heat::Cold, Shape::random(512, 4 << 20), amount, 1),
        };
        let search = Search {
            hold: time,
            step: time,
            most: 1,
        };
        let (_directory, study) = study(Vec::new(), Measure::Highest(search));
        let (stop, bar) = (Arc::default(), ProgressBar::hidden());
        for seed in [7, 8] {
            runner(&stop, &bar).step(&study, &cell, seed, false).unwrap();
        }
        let mut first = FIRST.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert_eq!(first.len(), 4);
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 4, "{first:?}");
    }

    #[test]
    fn a_daemon_may_read_past_a_cache_of_which_nothing_is_known() {
        // Scenario: all, nothing and an unknown share of the data in the page cache. Expected: only the first rules direct reads out.
        let found = [Some(1.0), Some(0.0), None].map(by_daemon_past_cache);
        assert_eq!(found, [Some(false), None, None]);
    }

    /// A read, and a failure from a depth of 4 on.
    fn shallow(job: &Arc<Job>) -> Result<(), String> {
        if job.setup.depth >= 4 {
            return Err("no memory".to_owned());
        }
        of_whole_pages(job)
    }

    #[test]
    fn a_cell_that_fails_keeps_its_row_without_samples() {
        // Scenario: depths 2 and 4, of which the second fails. Expected: two rows, one of them without samples, the reason; the
        // report has the other one only.
        static SHALLOW: Strategy = strategy("shallow", shallow);
        let cells = [2, 4].map(|depth| cell(&SHALLOW, Amount::Reads(1), depth));
        let (_directory, mut study) = study(cells.to_vec(), Measure::Once);
        let mut journal = journal(None, false);
        let (stop, bar) = (Arc::default(), ProgressBar::hidden());
        let rows = runner(&stop, &bar).run(&mut study, &mut journal).unwrap();
        let samples: Vec<usize> = rows.0.iter().map(|row| row.samples.len()).collect();
        assert_eq!(samples, [1, 0]);
        assert_eq!(study.left_out, ["depth=4: no memory"]);
        assert_eq!(Report::of(&study, Vec::new(), Vec::new(), &rows).rows.len(), 1);
    }

    /// How many steps [`weak`] has made.
    static WEAK: AtomicU32 = AtomicU32::new(0);

    /// A read; the second of them fails.
    fn weak(job: &Arc<Job>) -> Result<(), String> {
        match WEAK.fetch_add(1, Ordering::Relaxed) {
            1 => Err("no memory".to_owned()),
            _ => of_whole_pages(job),
        }
    }

    #[test]
    fn a_resumed_run_knows_what_has_failed() {
        // Scenario: a cell that fails in the second of three repetitions; the run is resumed after that, when it would not
        // fail. Expected: the cell is left out both times, with the same reason, and not tried again.
        static WEAK_ONCE: Strategy = strategy("weak", weak);
        let cell = cell(&WEAK_ONCE, Amount::Reads(1), 1);
        let out = scratch();
        let (stop, bar) = (Arc::default(), ProgressBar::hidden());
        for (resume, repetitions) in [(false, 2), (true, 3)] {
            let (_directory, mut study) = study(vec![cell.clone()], Measure::Once);
            let mut journal = journal(Some(out.path()), resume);
            let runner = Runner {
                repetitions,
                ..runner(&stop, &bar)
            };
            let rows = runner.run(&mut study, &mut journal).unwrap();
            assert!(rows.0[0].samples.is_empty(), "{rows:?}");
            assert_eq!(study.left_out, ["depth=1: no memory"]);
            assert_eq!(WEAK.load(Ordering::Relaxed), 2);
        }
    }

    /// How long the steps of [`timed`] were to take.
    static TIMES: Mutex<Vec<Amount>> = Mutex::new(Vec::new());

    fn timed(job: &Arc<Job>) -> Result<(), String> {
        let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
        times.push(job.setup.amount);
        of_whole_pages(job)
    }

    #[test]
    fn the_steps_of_a_resumed_row_last_as_long_as_before() {
        // Scenario: a run that is stopped after the first step of two cells; resumed when its plan has longer steps, since
        // part of its time is over. Expected: the other steps, of the other cell too, take as long as the first.
        static TIMED: Strategy = strategy("timed", timed);
        let out = scratch();
        let (stop, bar) = (Arc::default(), ProgressBar::hidden());
        let short = Amount::For(Duration::from_millis(10));
        for (resume, amount, depths) in [
            (false, short, &[2][..]),
            (true, Amount::For(Duration::from_secs(60)), &[1, 2]),
        ] {
            let cells = depths.iter().map(|depth| cell(&TIMED, amount, *depth)).collect();
            let (_directory, mut study) = study(cells, Measure::Once);
            let mut journal = journal(Some(out.path()), resume);
            let repetitions = if resume { 2 } else { 1 };
            let runner = Runner {
                repetitions,
                ..runner(&stop, &bar)
            };
            runner.run(&mut study, &mut journal).unwrap();
        }
        let times = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(*times, [short; 4]);
    }

    fn of_whole_pages(job: &Arc<Job>) -> Result<(), String> {
        if job.reads.bytes < 4096 {
            return Err("Invalid argument".to_owned());
        }
        let mut lane = job.lane();
        job.begin();
        let read = job.next().ok_or("nothing to read")?;
        lane.counted(read.offset, read.length, Instant::now());
        Ok(())
    }

    #[test]
    fn a_block_that_is_refused_leaves_out_no_other_one() {
        // Scenario: direct reads of 512 bytes, which a file system refuses, and of 1 to 3 pages. Expected: the first is left
        // out, with the reason.
        static PAGES: Strategy = strategy("pages", of_whole_pages);
        let cell = |block_bytes: usize| Cell {
            key: Vec::new(),
            strategy: &PAGES,
            setup: Setup::new(
                Heat::Direct,
                Shape::random(block_bytes, 4 << 20),
                Amount::Reads(1),
                1,
            ),
        };
        let cells = [512, 4096, 8192, 12_288].map(cell);
        let (_directory, mut study) = study(cells.to_vec(), Measure::Once);
        let (stop, bar) = (Arc::default(), ProgressBar::hidden());
        runner(&stop, &bar).probe(&mut study).unwrap();
        let left: Vec<Setup> = study.cells.iter().map(|cell| cell.setup).collect();
        assert_eq!(
            left,
            cells
                .into_iter()
                .skip(1)
                .map(|cell| cell.setup)
                .collect::<Vec<_>>()
        );
        assert_eq!(
            study.left_out,
            ["pages, direct, blocks of 512 bytes: Invalid argument"]
        );
    }
}
