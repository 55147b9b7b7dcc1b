//! One step: which reads are made, and their results. A strategy takes reads from its job until there are no
//! more, and reports each through a lane.
//!
//! Invariants: the clock starts when the strategy is set up and ends with the last read; where the data are
//! known, every read's bytes are checked at both ends (in tests as a whole); a read that failed or is wrong
//! fails the step.

use crate::material::Material;
use crate::sample::{Counts, Sample};
use crate::served::Served;
use crate::setup::{Amount, Heat, Reads, Setup, Shape};
use crate::walk::Walk;
use ringfetch_command::quantity::approximate;
use ringfetch_pace::{Alarm, Arrivals, Gate, Pacer, Ramp};
use ringfetch_pattern as pattern;
use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// For `custom_flags`.
pub(crate) const DIRECT: i32 = OFlags::DIRECT.bits().cast_signed();
/// Bytes checked at either end of a read.
const CHECKED_BYTES: usize = 16;
/// If an arrival waits longer than this to be sent, the rate cannot be held: as ACT's `max-lag-sec`, whose default is 10
/// (aerospike/act, README.md, 1e61500).
const LATE_MAX: Duration = Duration::from_secs(10);
/// In the note of a step that ended because of it.
pub(crate) const GIVEN_UP: &str = "given up: a read waited longer than 10 s to be sent";

/// A read to make; for items, `offset` is the item's number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ReadAt {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) length: usize,
    /// The query that the read belongs to; only for candidates.
    pub(crate) query: Option<usize>,
}

/// A running step.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) setup: Setup,
    pub(crate) reads: Reads,
    pub(crate) material: Arc<Material>,
    walk: Walk,
    opened: Vec<Arc<File>>,
    begun: OnceLock<(Instant, Duration)>,
    /// CPU time of the daemon that makes the reads, when it began; `None`: unknown.
    daemon: OnceLock<Option<Duration>>,
    /// Of an open loop; set when the step begins.
    pacer: OnceLock<Arc<Pacer>>,
    stop: Arc<AtomicBool>,
    over: AtomicBool,
    check_whole: bool,
    totals: Mutex<Totals>,
}

/// Sums over all lanes.
#[derive(Debug)]
struct Totals {
    counts: Counts,
    /// Of lanes that have ended. Added up when all have: it takes longer than a small read, while other lanes still read.
    ended: Vec<Counts>,
    end: Option<(Instant, Duration)>,
    own_memory_bytes: u64,
    note: Option<String>,
    problem: Option<String>,
}

impl Job {
    pub(crate) fn new(
        material: &Arc<Material>,
        setup: Setup,
        seed: u64,
        check_whole: bool,
        stop: &Arc<AtomicBool>,
    ) -> Result<Arc<Self>, String> {
        let reads = setup.reads(material);
        // Bytes that were read are no longer cold; warm bytes can be read again.
        let again = match setup.shape {
            Shape::Blocks { .. } => matches!(setup.amount, Amount::At { .. }) || setup.heat == Heat::Warm,
            Shape::Files { .. } | Shape::Queries { .. } => false,
            Shape::Items { .. } => true,
        };
        let most = if again { u64::MAX } else { reads.positions };
        let limit = match setup.amount {
            Amount::For(_) | Amount::At { .. } => most,
            Amount::Reads(reads) => reads.min(most),
        };
        let mut job = Self {
            setup,
            material: Arc::clone(material),
            walk: Walk::new(reads.positions, reads.random, limit, seed),
            reads,
            opened: Vec::new(),
            begun: OnceLock::new(),
            daemon: OnceLock::new(),
            pacer: OnceLock::new(),
            stop: Arc::clone(stop),
            over: AtomicBool::new(false),
            check_whole,
            totals: Mutex::new(Totals {
                counts: Counts::none(),
                ended: Vec::new(),
                end: None,
                own_memory_bytes: 0,
                note: None,
                problem: None,
            }),
        };
        if !setup.open_each && !matches!(setup.shape, Shape::Items { .. }) {
            let files = (0..reads.files).map(|file| job.open(file).map(Arc::new));
            let opened: io::Result<Vec<Arc<File>>> = files.collect();
            job.opened = opened.map_err(|error| format!("cannot open: {error}"))?;
        }
        Ok(Arc::new(job))
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.setup.heat == Heat::Direct
    }

    /// Whether the device has queues for polled completions.
    pub(crate) fn polls(&self) -> bool {
        let device = self.material.place.device.as_ref();
        device.is_some_and(|device| device.poll_queues)
    }

    pub(crate) fn path(&self, file: usize) -> Option<PathBuf> {
        self.material.files.get(file).map(|file| file.path.clone())
    }

    /// The file of a read: opened in advance, or now.
    pub(crate) fn file(&self, file: usize) -> io::Result<Arc<File>> {
        match self.opened.get(file) {
            Some(opened) => Ok(Arc::clone(opened)),
            None => self.open(file).map(Arc::new),
        }
    }

    fn open(&self, file: usize) -> io::Result<File> {
        let path = self.path(file).ok_or(io::ErrorKind::NotFound)?;
        let mut options = OpenOptions::new();
        if self.is_direct() {
            options.custom_flags(DIRECT);
        }
        options.read(true).open(path)
    }

    /// Set-up is complete: starts the clock. Only the first call counts.
    pub(crate) fn begin(&self) {
        self.begun.get_or_init(|| {
            if let Amount::At { per_second, time } = self.setup.amount {
                let rate = approximate(per_second);
                let open = Some((Ramp::constant(rate), Arrivals::Constant));
                let pacer = Pacer::new(tokio::time::Instant::now(), Duration::ZERO, Ok(time), open);
                let pacer = pacer.ended_by(Arc::clone(&self.stop));
                let _first = self.pacer.set(Arc::new(pacer));
            }
            (Instant::now(), own_cpu())
        });
    }

    /// As [`Self::begin`], for reads that the daemon makes: its CPU time counts too.
    pub(crate) fn begin_daemon(&self) {
        self.daemon.get_or_init(|| self.daemon_cpu());
        self.begin();
    }

    /// Whether reads arrive at a rate (an open loop).
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.setup.amount, Amount::At { .. })
    }

    fn served(&self) -> Option<&Served> {
        self.material.served.as_deref()
    }

    fn daemon_cpu(&self) -> Option<Duration> {
        self.served()?.cpu()
    }

    /// In an open loop that has begun: the gate through which thread `thread` of `threads` receives its
    /// arrivals. Call it within a runtime.
    pub(crate) fn gate(&self, thread: usize, threads: usize) -> Option<Arc<Gate>> {
        let pacer = Arc::clone(self.pacer.get()?);
        let [thread, threads] = [thread, threads].map(|number| u32::try_from(number).unwrap_or(1));
        Some(Arc::new(Gate::new(pacer, thread, threads, 0, Alarm::precise())))
    }

    /// Waits for the next request. `None`: there are no more.
    pub(crate) async fn turn(&self, gate: Option<&Gate>) -> Option<Start> {
        let Some(gate) = gate else {
            return Some(Instant::now().into());
        };
        let turn = gate.next(tokio::time::Instant::now()).await?;
        if let Some(pacer) = self.pacer.get().filter(|_| turn.start.elapsed() > LATE_MAX) {
            pacer.stop();
            self.note(GIVEN_UP);
        }
        Some(Start {
            due: turn.start.into_std(),
            sent: Instant::now(),
        })
    }

    /// The next group of reads: those of a query, or up to `most` others. False: the step is over.
    pub(crate) fn group(&self, most: usize, reads: &mut Vec<ReadAt>) -> bool {
        reads.clear();
        let Shape::Queries { oversampling, .. } = self.setup.shape else {
            reads.extend(std::iter::from_fn(|| self.next()).take(most));
            return !reads.is_empty();
        };
        let query = self.position().and_then(|place| usize::try_from(place).ok());
        let (Some(number), Some(questions)) = (query, &self.material.questions) else {
            return false;
        };
        let length = questions.vector_bytes();
        reads.extend(questions.ids(number, oversampling).iter().map(|id| {
            let offset = u64::from(*id) * length as u64;
            ReadAt {
                file: 0,
                offset,
                length,
                query,
            }
        }));
        true
    }

    /// The next read; `None` once the step is over.
    pub(crate) fn next(&self) -> Option<ReadAt> {
        self.read_at(self.position()?)
    }

    fn position(&self) -> Option<u64> {
        let (begun, _) = self.begun.get()?;
        let in_time = match self.setup.amount {
            // At least one, however late the threads began.
            Amount::For(time) => begun.elapsed() < time || self.walk.is_fresh(),
            Amount::Reads(_) | Amount::At { .. } => true,
        };
        if !in_time || self.over.load(Ordering::Relaxed) || self.stop.load(Ordering::Relaxed) {
            return None;
        }
        self.walk.next()
    }

    fn read_at(&self, position: u64) -> Option<ReadAt> {
        let mut read = ReadAt {
            offset: position.saturating_mul(self.reads.spacing_bytes),
            length: self.reads.bytes,
            ..ReadAt::default()
        };
        if let Shape::Files { .. } = self.setup.shape {
            (read.file, read.offset) = (usize::try_from(position).ok()?, 0);
            read.length = usize::try_from(self.material.files.get(read.file)?.length_bytes).ok()?;
        }
        Some(read)
    }

    /// A lane to count reads with, made before the clock starts, so that its memory is not part of the figures. Each thread or
    /// task has its own; its counts are added when it is dropped.
    pub(crate) fn lane(self: &Arc<Self>) -> Lane {
        debug_assert!(self.begun.get().is_none(), "the clock has started");
        Lane {
            job: Arc::clone(self),
            counts: Counts::none(),
            scores: Vec::new(),
        }
    }

    /// Reports that the strategy failed: there are no more reads.
    pub(crate) fn fail(&self, problem: impl std::fmt::Display) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(pacer) = self.pacer.get() {
            pacer.stop();
        }
        self.totals().problem.get_or_insert_with(|| problem.to_string());
    }

    /// Adds a note for readers of the figures, once.
    pub(crate) fn note(&self, note: &str) {
        let mut totals = self.totals();
        match &mut totals.note {
            Some(known) if known.contains(note) => {}
            Some(known) => known.extend(["; ", note]),
            None => totals.note = Some(note.to_owned()),
        }
    }

    /// No code panics under this lock.
    fn totals(&self) -> MutexGuard<'_, Totals> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sums of all lanes that have ended.
    fn added_up(&self) -> MutexGuard<'_, Totals> {
        let mut totals = self.totals();
        for counts in std::mem::take(&mut totals.ended) {
            totals.counts.add(&counts);
        }
        totals
    }

    /// What a device read, as a share of what it would have without a cache above it: the page cache reads whole pages.
    /// `past_cache`: whether the bytes alone are read instead; `None`: perhaps.
    pub(crate) fn device_share(&self, read: u64, past_cache: Option<bool>) -> f64 {
        let totals = self.added_up();
        let (exact, paged) = (totals.counts.bytes, totals.counts.paged_bytes);
        let due = match past_cache {
            Some(true) => exact,
            Some(false) => paged,
            None => read.clamp(exact, paged),
        };
        approximate(read) / approximate(due.max(1))
    }

    /// The result of the step.
    ///
    /// # Errors
    /// A read failed, or there was none.
    pub(crate) fn outcome(&self) -> Result<Sample, String> {
        let mut totals = self.added_up();
        if let Some(problem) = totals.problem.take() {
            return Err(problem);
        }
        let nothing = || "nothing was read".to_owned();
        let ((begun, used), (end, used_then)) = self.begun.get().zip(totals.end).ok_or_else(nothing)?;
        let mut cpu = used_then.saturating_sub(*used);
        if let Some(before) = self.daemon.get() {
            let both = before.zip(self.daemon_cpu());
            if both.is_none() && self.served().is_some_and(Served::has_process) {
                return Err("--server-pid: the process has ended".to_owned());
            }
            cpu += both.map_or(Duration::ZERO, |(before, after)| after.saturating_sub(before));
        }
        // Requests arrive, but the figures count their reads.
        let each = match self.setup.shape {
            Shape::Items { batch, .. } => batch as u64,
            Shape::Blocks { .. } | Shape::Files { .. } | Shape::Queries { .. } => 1,
        };
        let missed = self.pacer.get().map(|pacer| pacer.missed().saturating_mul(each));
        let sample = totals.counts.sample(end.duration_since(*begun), cpu, missed);
        Ok(Sample {
            own_memory_bytes: totals.own_memory_bytes,
            note: totals.note.clone(),
            ..sample.ok_or_else(nothing)?
        })
    }
}

/// When a request starts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    /// Its latency begins here: now, or at its arrival in an open loop.
    due: Instant,
    /// It is in flight from here on.
    sent: Instant,
}

impl From<Instant> for Start {
    fn from(now: Instant) -> Self {
        Self { due: now, sent: now }
    }
}

/// Counts the reads of one thread or task.
#[derive(Debug)]
pub(crate) struct Lane {
    job: Arc<Job>,
    counts: Counts,
    /// Scores of the current query.
    scores: Vec<f64>,
}

impl Lane {
    /// Counts a finished read whose bytes are not here.
    pub(crate) fn counted(&mut self, offset: u64, bytes: usize, start: impl Into<Start>) {
        let Start { due, sent } = start.into();
        self.counts.read(offset, bytes, due.elapsed(), sent.elapsed());
    }

    /// Checks the scores of all of a query's candidates.
    pub(crate) fn ranking(&self, query: usize, mut scores: Vec<f64>) {
        let (shape, questions) = (self.job.setup.shape, &self.job.material.questions);
        if let (Shape::Queries { oversampling, .. }, Some(questions)) = (shape, questions)
            && let Err(problem) = questions.check(query, oversampling, &mut scores)
        {
            self.job.fail(problem);
        }
    }

    /// Counts a finished read and checks its bytes. The reads of a query follow each other.
    pub(crate) fn done(&mut self, read: &ReadAt, start: impl Into<Start>, data: &[u8]) {
        self.counted(read.offset, data.len(), start);
        let (got, wanted, at) = (data.len(), read.length, read.offset);
        if got != wanted {
            return self
                .job
                .fail(format!("{got} of {wanted} bytes at {at}: a short read"));
        }
        let seed = self.job.material.files.get(read.file).and_then(|file| file.seed);
        let wrong = seed.and_then(|seed| difference(seed, at, data, self.job.check_whole));
        if let Some(place) = wrong {
            self.job.fail(format!("wrong bytes at {}", at + place as u64));
        }
        if let (Some(query), Some(questions)) = (read.query, &self.job.material.questions) {
            self.scores.push(questions.score(query, data));
            if self.scores.len() == self.job.reads.group {
                let scores = std::mem::take(&mut self.scores);
                self.ranking(query, scores);
            }
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let end = (Instant::now(), own_cpu());
        let mut totals = self.job.totals();
        totals.ended.push(std::mem::take(&mut self.counts));
        if totals.end.is_none() {
            // Taken when the first lane ends: the others still have their buffers.
            totals.own_memory_bytes = crate::facts::own_memory_bytes();
        }
        // That of the last lane, which need not be the last to get the lock.
        if totals.end.is_none_or(|(known, _)| known < end.0) {
            totals.end = Some(end);
        }
    }
}

/// CPU time of this process so far: all threads, including those of its rings.
fn own_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

fn difference(seed: u64, offset: u64, data: &[u8], whole: bool) -> Option<usize> {
    if whole || data.len() <= 2 * CHECKED_BYTES {
        return pattern::first_difference(seed, offset, data);
    }
    let last = data.len() - CHECKED_BYTES;
    let (head, tail) = (data.get(..CHECKED_BYTES)?, data.get(last..)?);
    pattern::first_difference(seed, offset, head)
        .or_else(|| pattern::first_difference(seed, offset + last as u64, tail).map(|at| at + last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::tests::{scratch, small};

    fn job(amount: Amount) -> (tempfile::TempDir, Arc<Job>) {
        let directory = scratch();
        let setup = Setup::new(Heat::Cold, Shape::random(512, 4 << 20), amount, 1);
        let material = Arc::new(small(directory.path()));
        let stop = Arc::new(AtomicBool::new(false));
        let job = Job::new(&material, setup, 1, false, &stop).unwrap();
        (directory, job)
    }

    #[test]
    fn a_step_ends_after_its_reads_and_counts_them() {
        // Scenario: ten reads of 512 bytes requested, before and after the clock starts. Expected: none, then
        // ten in a page each; the figures match. Through the page cache, ten pages are due; where it is not known, the bytes suffice.
        let (_directory, job) = job(Amount::Reads(10));
        assert_eq!(job.next(), None);
        let mut lane = job.lane();
        job.begin();
        let started = Instant::now();
        while let Some(read) = job.next() {
            assert!(read.offset.is_multiple_of(512) && read.length == 512);
            let mut data = vec![0; 512];
            pattern::fill(42, read.offset, &mut data);
            lane.done(&read, started, &data);
        }
        drop(lane);
        let shares = |past_cache| [40_960, 5_120, 2_560].map(|read| job.device_share(read, past_cache));
        assert_eq!(shares(Some(false)), [1.0, 0.125, 0.0625]);
        assert_eq!(shares(None), [1.0, 1.0, 0.5]);
        assert_eq!(shares(Some(true)), [8.0, 1.0, 0.5]);
        let sample = job.outcome().unwrap();
        assert_eq!((sample.reads, sample.bytes), (10, 5120));
        assert!(sample.min_us <= sample.mean_us && sample.p99_us <= sample.max_us);
        assert!(sample.min_us > 0.0 && sample.mean_us < sample.max_us * 1.01);
        assert!(sample.depth_achieved > 0.0 && sample.seconds > 0.0);
    }

    #[test]
    fn wrong_and_short_reads_fail_the_step() {
        // Scenario: a byte changed at either end; too few bytes; no read at all. Expected: an error that says which.
        let read = ReadAt {
            offset: 8192,
            length: 512,
            ..ReadAt::default()
        };
        for (wrong, words) in [(0, "wrong bytes at 8192"), (511, "wrong bytes at 8703")] {
            let (_directory, job) = job(Amount::Reads(1));
            let mut lane = job.lane();
            job.begin();
            let mut data = vec![0; 512];
            pattern::fill(42, 8192, &mut data);
            data[wrong] ^= 1;
            lane.done(&read, Instant::now(), &data);
            assert_eq!(job.next(), None);
            assert_eq!(job.outcome().unwrap_err(), words);
        }
        let (_directory, job) = job(Amount::Reads(1));
        let mut lane = job.lane();
        job.begin();
        assert_eq!(job.outcome().unwrap_err(), "nothing was read");
        lane.done(&read, Instant::now(), &[0; 5]);
        assert!(job.outcome().unwrap_err().contains("short"));
    }

    #[tokio::test]
    async fn a_rate_that_cannot_be_held_is_given_up() {
        // Scenario: ten arrivals a second, of which the first is sent 5 s late; 11 s late. Expected: the step goes on; it has
        // no further read, and its note says so.
        let time = Duration::from_secs(60);
        for (late_s, goes_on) in [(5, true), (11, false)] {
            let per_second = 10;
            let (_directory, job) = job(Amount::At { per_second, time });
            let begin = tokio::time::Instant::now().checked_sub(Duration::from_secs(late_s));
            let open = Some((Ramp::constant(10.0), Arrivals::Constant));
            let pacer = Pacer::new(begin.unwrap(), Duration::ZERO, Ok(time), open);
            job.pacer.set(Arc::new(pacer)).unwrap();
            let mut lane = job.lane();
            job.begin();
            let gate = job.gate(0, 1);
            let start = job.turn(gate.as_deref()).await.unwrap();
            lane.counted(0, 512, start);
            assert_eq!(job.turn(gate.as_deref()).await.is_some(), goes_on, "{late_s} s");
            drop(lane);
            let note = job.outcome().unwrap().note;
            let given_up = note.is_some_and(|note| note.starts_with("given up"));
            assert_eq!(given_up, !goes_on, "{late_s} s");
        }
    }

    #[tokio::test]
    async fn a_failure_and_a_stop_wait_for_no_arrival() {
        // Scenario: an open loop with slots that wait for the arrival of the next minute; a read fails; the study is stopped.
        // Expected: none of the slots gets that arrival.
        let ends: [fn(&Job); 2] = [
            |job| job.fail("connection reset"),
            |job| job.stop.store(true, Ordering::Relaxed),
        ];
        for end in ends {
            let (per_second, time) = (1, Duration::from_secs(600));
            let (_directory, job) = job(Amount::At { per_second, time });
            job.begin();
            // The first of 60 threads has the first and the 61st arrival.
            let gate = job.gate(0, 60);
            assert!(job.turn(gate.as_deref()).await.is_some());
            let slots = futures_util::future::join_all([(); 3].map(|()| job.turn(gate.as_deref())));
            let (turns, ()) = tokio::join!(slots, async { end(&job) });
            assert!(turns.iter().all(Option::is_none), "{turns:?}");
        }
    }

    #[test]
    fn a_step_ends_with_its_last_lane() {
        // Scenario: four threads end their lanes at once, many times. Expected: the end is not before any of them.
        let (_directory, of_material) = job(Amount::Reads(1));
        for _ in 0..500 {
            let (material, setup) = (&of_material.material, of_material.setup);
            let job = Job::new(material, setup, 1, false, &of_material.stop).unwrap();
            let together = std::sync::Barrier::new(4);
            let ends = std::thread::scope(|scope| {
                let threads = [(); 4].map(|()| {
                    scope.spawn(|| {
                        let lane = job.lane();
                        together.wait();
                        let before = Instant::now();
                        drop(lane);
                        before
                    })
                });
                threads.map(|thread| thread.join().unwrap())
            });
            let (end, _) = job.totals().end.unwrap();
            assert!(ends.iter().all(|before| *before <= end));
        }
    }
}
