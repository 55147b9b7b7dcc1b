//! One step: which reads are made, and what they came to. A strategy takes reads from its job until there are no more,
//! and reports each through a lane.
//!
//! Invariants: the clock starts when the strategy is set up and ends with the last read; every read's bytes are checked
//! at both ends (in tests as a whole) where they are known; a read that failed or is wrong fails the step.

use crate::drive::engine::Choice;
use crate::material::Material;
use crate::walk::Walk;
use hdrhistogram::Histogram;
use ringfetch_baselines::{Usage, usage};
use ringfetch_pace::{Alarm, Arrivals, Gate, Pacer, Ramp};
use ringfetch_pattern as pattern;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that are checked at either end of a read.
const CHECKED_BYTES: usize = 16;
const PAGE_BYTES: u64 = 4096;
/// Arrivals are at a rate that cannot be held when one waits longer to be sent.
const LATE_MAX: Duration = Duration::from_secs(1);
/// Limits that latencies are counted against: 2^n ms, from 1 ms to 64 ms.
pub(crate) const OVER_LIMITS: usize = 7;

/// Where the bytes are to come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heat {
    /// O_DIRECT, from evicted files; what cannot (mmap) reads through the evicted page cache.
    Direct,
    /// Through the page cache, which was evicted.
    Cold,
    /// From the page cache.
    Warm,
    /// From wherever they are: somebody else's page cache is left alone.
    AsFound,
}

impl Heat {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Cold => "cold",
            Self::Warm => "warm",
            Self::AsFound => "as found",
        }
    }
}

/// When a step is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amount {
    /// After this time, or when everything was read.
    For(Duration),
    /// After so many reads (of queries: so many of them), or when everything was read.
    Reads(u64),
    /// After this time, in which so many reads a second arrive, whatever became of those before them.
    At { per_second: u64, time: Duration },
}

/// What a step reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Blocks of the first file's first bytes.
    Blocks {
        block_bytes: usize,
        window_bytes: u64,
        random: bool,
    },
    /// Whole files, each once, in random order.
    Files { count: usize },
    /// Queries, each all of its candidates' vectors, which are scored.
    Queries { count: usize, oversampling: usize },
    /// Items of a daemon's dataset, so many in a request.
    Items { count: u64, batch: usize, random: bool },
}

impl Shape {
    /// Blocks in random order.
    pub(crate) fn random(block_bytes: usize, window_bytes: u64) -> Self {
        Self::Blocks {
            block_bytes,
            window_bytes,
            random: true,
        }
    }
}

/// The settings of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setup {
    pub(crate) heat: Heat,
    pub(crate) shape: Shape,
    pub(crate) amount: Amount,
    /// Most reads in flight: threads, or the depth of a queue.
    pub(crate) depth: usize,
    /// Whether each read opens its file, and the time for that counts.
    pub(crate) open_each: bool,
    /// Whether buffers are used again, or each read has a new one.
    pub(crate) pooled: bool,
    /// Settings of the engine other than its strategy's.
    pub(crate) engine: Option<Choice>,
}

impl Setup {
    /// Of files that are open, into buffers that are used again, with the strategy's own settings.
    pub(crate) fn new(heat: Heat, shape: Shape, amount: Amount, depth: usize) -> Self {
        Self {
            heat,
            shape,
            amount,
            depth,
            open_each: false,
            pooled: true,
            engine: None,
        }
    }

    /// Bytes of the longest read.
    pub(crate) fn read_bytes(&self, material: &Material) -> usize {
        match self.shape {
            Shape::Blocks { block_bytes, .. } => block_bytes,
            Shape::Queries { .. } => material
                .questions
                .as_ref()
                .map_or(0, |questions| questions.vector_bytes()),
            Shape::Items { .. } => 0,
            Shape::Files { count } => {
                let longest = material.files.iter().take(count).map(|file| file.length_bytes);
                usize::try_from(longest.max().unwrap_or(0)).unwrap_or(usize::MAX)
            }
        }
    }

    /// Files that are read.
    pub(crate) fn files(&self) -> usize {
        match self.shape {
            Shape::Blocks { .. } | Shape::Queries { .. } | Shape::Items { .. } => 1,
            Shape::Files { count } => count,
        }
    }

    /// Bytes of each file that may be read.
    pub(crate) fn window_bytes(&self) -> u64 {
        match self.shape {
            Shape::Blocks { window_bytes, .. } => window_bytes,
            Shape::Files { .. } | Shape::Queries { .. } | Shape::Items { .. } => u64::MAX,
        }
    }

    /// Reads that are asked for together, at most.
    pub(crate) fn group(&self, material: &Material) -> usize {
        match self.shape {
            Shape::Blocks { .. } | Shape::Files { .. } => 1,
            Shape::Items { batch, .. } => batch,
            Shape::Queries { oversampling, .. } => material
                .questions
                .as_ref()
                .map_or(1, |questions| questions.candidates(oversampling)),
        }
    }
}

/// Reads that belong together.
#[derive(Debug, Default)]
pub(crate) struct Group {
    /// The query whose candidates they are.
    pub(crate) query: Option<usize>,
    pub(crate) reads: Vec<ReadAt>,
}

/// A read to make; of items, `offset` is the item's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadAt {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) length: usize,
}

/// What a step came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Reads completed.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
    /// From the first read's start to the last one's end.
    pub seconds: f64,
    /// Latency of a read, microseconds: the shortest, the mean, quantiles, the longest.
    pub min_us: f64,
    /// See `min_us`.
    pub mean_us: f64,
    /// See `min_us`.
    pub p50_us: f64,
    /// See `min_us`.
    pub p99_us: f64,
    /// See `min_us`.
    pub p999_us: f64,
    /// See `min_us`.
    pub max_us: f64,
    /// Reads in flight on average, by Little's law.
    pub depth_achieved: f64,
    /// CPU time of this process a read, user and system (getrusage(2)).
    pub cpu_us_per_read: f64,
    /// Bytes that the device read, as a share of the bytes that were asked for. `None`: no device to ask.
    pub device_share: Option<f64>,
    /// The share of the data that was in the page cache before the step. `None`: the kernel does not say.
    pub resident_before: Option<f64>,
    /// Memory of this process when the step ended, without the page cache (RssAnon of proc_pid_status(5)).
    pub own_memory_bytes: u64,
    /// What the strategy has to say of itself.
    pub note: Option<String>,
    /// Of an open loop: the shares of its reads that took longer than 1, 2, 4, 8, 16, 32 and 64 ms. What was never sent
    /// took longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<[f64; OVER_LIMITS]>,
    /// Of an open loop: reads that were never sent.
    #[serde(default)]
    pub missed: u64,
    /// Of `act`: the highest rate that was held, in units of 2,000 reads a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiple: Option<f64>,
}

/// A step under way.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) setup: Setup,
    pub(crate) material: Arc<Material>,
    walk: Walk,
    opened: Vec<Arc<File>>,
    begun: OnceLock<(Instant, Usage, Option<Duration>)>,
    /// Of an open loop, from the beginning on.
    pacer: OnceLock<Arc<Pacer>>,
    stop: Arc<AtomicBool>,
    over: AtomicBool,
    check_whole: bool,
    totals: Mutex<Totals>,
}

/// Reads that are over.
#[derive(Debug)]
struct Counts {
    reads: u64,
    bytes: u64,
    in_flight: Duration,
    latency: Option<Histogram<u64>>,
}

impl Counts {
    fn none() -> Self {
        Self {
            reads: 0,
            bytes: 0,
            in_flight: Duration::ZERO,
            // Three digits are allowed, and it grows by itself.
            latency: Histogram::new(3).ok(),
        }
    }
}

#[derive(Debug)]
struct Totals {
    counts: Counts,
    end: Option<(Instant, Usage)>,
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
        // What was read is not cold any more; what is warm can be read again.
        let open = matches!(setup.amount, Amount::At { .. });
        let (count, random, again) = match setup.shape {
            Shape::Blocks {
                window_bytes, random, ..
            } => (
                window_bytes / spacing(&setup),
                random,
                open || setup.heat == Heat::Warm,
            ),
            Shape::Files { count } | Shape::Queries { count, .. } => (count as u64, true, false),
            Shape::Items { count, random, .. } => (count, random, true),
        };
        let most = if again { u64::MAX } else { count };
        let limit = match setup.amount {
            Amount::For(_) | Amount::At { .. } => most,
            Amount::Reads(reads) => reads.min(most),
        };
        let mut job = Self {
            setup,
            material: Arc::clone(material),
            walk: Walk::new(count, random, limit, seed),
            opened: Vec::new(),
            begun: OnceLock::new(),
            pacer: OnceLock::new(),
            stop: Arc::clone(stop),
            over: AtomicBool::new(false),
            check_whole,
            totals: Mutex::new(Totals {
                counts: Counts::none(),
                end: None,
                own_memory_bytes: 0,
                note: None,
                problem: None,
            }),
        };
        if !setup.open_each && !matches!(setup.shape, Shape::Items { .. }) {
            let files = (0..setup.files()).map(|file| job.open(file).map(Arc::new));
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

    pub(crate) fn read_bytes(&self) -> usize {
        self.setup.read_bytes(&self.material)
    }

    pub(crate) fn path(&self, file: usize) -> Option<PathBuf> {
        self.material.files.get(file).map(|file| file.path.clone())
    }

    /// The file of a read: opened before, or now.
    pub(crate) fn file(&self, file: usize) -> io::Result<Arc<File>> {
        match self.opened.get(file) {
            Some(opened) => Ok(Arc::clone(opened)),
            None => self.open(file).map(Arc::new),
        }
    }

    fn open(&self, file: usize) -> io::Result<File> {
        let path = self.path(file).ok_or(io::ErrorKind::NotFound)?;
        let flags = if self.is_direct() {
            OFlags::DIRECT
        } else {
            OFlags::empty()
        };
        let flags = i32::try_from(flags.bits()).unwrap_or(0);
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    }

    /// Everything is set up: the clock starts. Only the first call counts.
    pub(crate) fn begin(&self) {
        self.begun.get_or_init(|| {
            if let Amount::At { per_second, time } = self.setup.amount {
                let rate = crate::quantity::approximate(per_second);
                let open = Some((Ramp { from: rate, to: rate }, Arrivals::Constant));
                let now = tokio::time::Instant::now();
                self.pacer
                    .get_or_init(|| Arc::new(Pacer::new(now, Duration::ZERO, Ok(time), open)));
            }
            (Instant::now(), usage(), self.daemon_cpu())
        });
    }

    /// Whether reads arrive at a rate.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.setup.amount, Amount::At { .. })
    }

    fn daemon_cpu(&self) -> Option<Duration> {
        self.material.served.as_ref()?.cpu()
    }

    /// Of an open loop that has begun: where thread `thread` of `threads` learns of its arrivals. Within a runtime.
    pub(crate) fn gate(&self, thread: u32, threads: u32) -> Option<Arc<Gate>> {
        let pacer = Arc::clone(self.pacer.get()?);
        Some(Arc::new(Gate::new(pacer, thread, threads, 0, Alarm::precise())))
    }

    /// From when the next request's latency counts: from now, or from its arrival, which is waited for. `None`: there
    /// are no more.
    pub(crate) async fn turn(&self, gate: Option<&Gate>) -> Option<Instant> {
        let Some(gate) = gate else {
            return Some(Instant::now());
        };
        let turn = gate.next(tokio::time::Instant::now()).await?;
        if let Some(pacer) = self.pacer.get().filter(|_| turn.start.elapsed() > LATE_MAX) {
            pacer.stop();
        }
        Some(turn.start.into_std())
    }

    /// The next reads that belong together: a query's, or up to `most` others. False: the step is over.
    pub(crate) fn group(&self, most: usize, group: &mut Group) -> bool {
        group.reads.clear();
        let Shape::Queries { oversampling, .. } = self.setup.shape else {
            group.reads.extend(std::iter::from_fn(|| self.next()).take(most));
            return !group.reads.is_empty();
        };
        let query = self
            .position()
            .and_then(|position| usize::try_from(position).ok());
        group.query = query;
        let (Some(query), Some(questions)) = (query, &self.material.questions) else {
            return false;
        };
        let length = questions.vector_bytes();
        let read = |id: &u32| ReadAt {
            file: 0,
            offset: u64::from(*id) * length as u64,
            length,
        };
        group
            .reads
            .extend(questions.ids(query, oversampling).iter().map(read));
        true
    }

    /// The next read; `None` when the step is over.
    pub(crate) fn next(&self) -> Option<ReadAt> {
        self.read_at(self.position()?)
    }

    fn position(&self) -> Option<u64> {
        let (begun, ..) = self.begun.get()?;
        let in_time = match self.setup.amount {
            // One at least, however late the threads began.
            Amount::For(time) => begun.elapsed() < time || self.walk.is_fresh(),
            Amount::Reads(_) | Amount::At { .. } => true,
        };
        if !in_time || self.over.load(Ordering::Relaxed) || self.stop.load(Ordering::Relaxed) {
            return None;
        }
        self.walk.next()
    }

    fn read_at(&self, position: u64) -> Option<ReadAt> {
        match self.setup.shape {
            Shape::Blocks { block_bytes, .. } => Some(ReadAt {
                file: 0,
                offset: position.saturating_mul(spacing(&self.setup)),
                length: block_bytes,
            }),
            Shape::Queries { .. } => None,
            Shape::Items { .. } => Some(ReadAt {
                file: 0,
                offset: position,
                length: 0,
            }),
            Shape::Files { .. } => {
                let file = usize::try_from(position).ok()?;
                let length = self.material.files.get(file)?.length_bytes;
                Some(ReadAt {
                    file,
                    offset: 0,
                    length: usize::try_from(length).ok()?,
                })
            }
        }
    }

    /// Something to count reads with. Each thread or task has its own; dropped, it is counted.
    pub(crate) fn lane(self: &Arc<Self>) -> Lane {
        Lane {
            job: Arc::clone(self),
            counts: Counts::none(),
            scores: Vec::new(),
        }
    }

    /// The strategy failed: nobody gets another read.
    pub(crate) fn fail(&self, problem: impl std::fmt::Display) {
        self.over.store(true, Ordering::Relaxed);
        self.totals().problem.get_or_insert_with(|| problem.to_string());
    }

    /// Something a reader of the figures should know.
    pub(crate) fn note(&self, note: impl Into<String>) {
        self.totals().note = Some(note.into());
    }

    /// No code panics under this lock.
    fn totals(&self) -> MutexGuard<'_, Totals> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it came to.
    ///
    /// # Errors
    /// A read failed, or there was none.
    pub(crate) fn outcome(&self) -> Result<Sample, String> {
        let mut totals = self.totals();
        if let Some(problem) = totals.problem.take() {
            return Err(problem);
        }
        let (Some((begun, used, daemon)), Some((end, used_then))) = (self.begun.get(), totals.end) else {
            return Err("nothing was read".to_owned());
        };
        let counts = &totals.counts;
        let Some(latency) = counts.latency.as_ref().filter(|_| counts.reads > 0) else {
            return Err("nothing was read".to_owned());
        };
        let seconds = end.duration_since(*begun).as_secs_f64().max(1e-9);
        let cpu = (used_then.user + used_then.system).saturating_sub(used.user + used.system);
        let daemons = daemon
            .zip(self.daemon_cpu())
            .map(|(before, after)| after.saturating_sub(before));
        let cpu = cpu + daemons.unwrap_or_default();
        let reads = crate::quantity::approximate(counts.reads);
        let micros = |nanoseconds: u64| crate::quantity::approximate(nanoseconds) / 1e3;
        let quantile = |quantile| micros(latency.value_at_quantile(quantile));
        Ok(Sample {
            reads: counts.reads,
            bytes: counts.bytes,
            seconds,
            min_us: micros(latency.min()),
            mean_us: counts.in_flight.as_secs_f64() * 1e6 / reads,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            max_us: micros(latency.max()),
            depth_achieved: counts.in_flight.as_secs_f64() / seconds,
            cpu_us_per_read: cpu.as_secs_f64() * 1e6 / reads,
            device_share: None,
            resident_before: None,
            own_memory_bytes: totals.own_memory_bytes,
            note: totals.note.clone(),
            over: self.pacer.get().map(|pacer| over(latency, pacer.missed())),
            missed: self.pacer.get().map_or(0, |pacer| pacer.missed()),
            multiple: None,
        })
    }
}

/// Bytes from one position to the next: small blocks are a page apart, so that none is read with its neighbour.
fn spacing(setup: &Setup) -> u64 {
    match setup.shape {
        Shape::Blocks {
            block_bytes, random, ..
        } => {
            let least = if random { PAGE_BYTES } else { 1 };
            (block_bytes as u64).max(least)
        }
        Shape::Files { .. } | Shape::Queries { .. } | Shape::Items { .. } => 1,
    }
}

/// The shares of latencies above 2^n ms, of `missed` more that are above any.
fn over(latency: &Histogram<u64>, missed: u64) -> [f64; OVER_LIMITS] {
    let all = crate::quantity::approximate((latency.len() + missed).max(1));
    std::array::from_fn(|bits| {
        let recorded = latency.iter_recorded();
        // Values are recorded to three digits.
        let slow =
            recorded.filter(|value| latency.lowest_equivalent(value.value_iterated_to()) > 1_000_000 << bits);
        let slow: u64 = slow.map(|value| value.count_since_last_iteration()).sum();
        crate::quantity::approximate(slow + missed) / all
    })
}

/// What one thread or task has read.
#[derive(Debug)]
pub(crate) struct Lane {
    job: Arc<Job>,
    counts: Counts,
    /// Of the query under way.
    scores: Vec<f64>,
}

impl Lane {
    /// A read is over, and its bytes are not here.
    pub(crate) fn counted(&mut self, bytes: usize, started: Instant) {
        let latency = started.elapsed();
        self.counts.reads += 1;
        self.counts.bytes += bytes as u64;
        self.counts.in_flight += latency;
        if let Some(histogram) = &mut self.counts.latency {
            let _recorded = histogram.record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        }
    }

    /// A read of a group is over: its bytes are scored, if it is a query's.
    pub(crate) fn read_of(&mut self, group: &Group, read: &ReadAt, started: Instant, data: &[u8]) {
        if let (Some(query), Some(questions)) = (group.query, &self.job.material.questions) {
            self.scores.push(questions.score(query, data));
        }
        self.done(read, started, data);
    }

    /// All reads of a group are over: what a query's scores came to is held against what they should be.
    pub(crate) fn ranked(&mut self, group: &Group) {
        if let Some(query) = group.query {
            let mut scores = std::mem::take(&mut self.scores);
            self.ranking(query, &mut scores);
            scores.clear();
            self.scores = scores;
        }
    }

    /// Holds scores of a query against what they should be.
    pub(crate) fn ranking(&self, query: usize, scores: &mut Vec<f64>) {
        let (Shape::Queries { oversampling, .. }, Some(questions)) =
            (self.job.setup.shape, &self.job.material.questions)
        else {
            return;
        };
        if let Err(problem) = questions.check(query, oversampling, scores) {
            self.job.fail(problem);
        }
    }

    /// A read is over: its bytes, all of them.
    pub(crate) fn done(&mut self, read: &ReadAt, started: Instant, data: &[u8]) {
        self.counted(data.len(), started);
        if data.len() != read.length {
            let (got, wanted) = (data.len(), read.length);
            return self.job.fail(format!(
                "{got} of {wanted} bytes at {}: a short read",
                read.offset
            ));
        }
        let seed = self.job.material.files.get(read.file).and_then(|file| file.seed);
        if let Some(seed) = seed
            && let Some(at) = difference(seed, read.offset, data, self.job.check_whole)
        {
            self.job
                .fail(format!("wrong bytes at {}", read.offset + at as u64));
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let end = (Instant::now(), usage());
        let mut totals = self.job.totals();
        totals.counts.reads += self.counts.reads;
        totals.counts.bytes += self.counts.bytes;
        totals.counts.in_flight += self.counts.in_flight;
        if let (Some(all), Some(latency)) = (&mut totals.counts.latency, &self.counts.latency) {
            let _added = all.add(latency);
        }
        if totals.end.is_none() {
            // The first that ends: the others still have their buffers.
            totals.own_memory_bytes = crate::facts::own_memory_bytes();
        }
        // The last lane has the end.
        totals.end = Some(end);
    }
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
        // Scenario: ten reads of 512 bytes asked for, before and after the clock starts. Expected: none, then ten a page
        // apart; the figures follow.
        let (_directory, job) = job(Amount::Reads(10));
        assert_eq!(job.next(), None);
        job.begin();
        let mut lane = job.lane();
        let started = Instant::now();
        while let Some(read) = job.next() {
            assert!(read.offset.is_multiple_of(4096) && read.length == 512);
            let mut data = vec![0; 512];
            pattern::fill(42, read.offset, &mut data);
            lane.done(&read, started, &data);
        }
        drop(lane);
        let sample = job.outcome().unwrap();
        assert_eq!((sample.reads, sample.bytes), (10, 5120));
        assert!(sample.min_us <= sample.mean_us && sample.p99_us <= sample.max_us);
        assert!(
            sample.min_us > 0.0 && sample.mean_us < sample.max_us * 1.01,
            "{sample:?}"
        );
        assert!(sample.depth_achieved > 0.0 && sample.seconds > 0.0);
    }

    #[test]
    fn shares_over_limits_are_those_of_known_distributions() {
        // Scenario: 900 latencies of exactly 1 ms, 80 of 3 ms, 15 of 20 ms, 5 of 100 ms; 1 000 more were never sent; 20 000 seeded
        // exponential ones with a mean of 2 ms. Expected: the shares; half of everything is over any; e^(-limit / mean) +- 1 %.
        let known = || Histogram::<u64>::new(3).unwrap();
        let (mut known, mut drawn) = (known(), known());
        for (milliseconds, count) in [(1, 900), (3, 80), (20, 15), (100, 5)] {
            known.record_n(milliseconds * 1_000_000, count).unwrap();
        }
        assert_eq!(over(&known, 0), [0.1, 0.1, 0.02, 0.02, 0.02, 0.005, 0.005]);
        assert_eq!(over(&known, 1000)[6], 0.5025);
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..20_000 {
            let drawn_s = -(1.0 - random.f64()).ln() * 2e-3;
            let nanoseconds = Duration::from_secs_f64(drawn_s).as_nanos();
            drawn.record(u64::try_from(nanoseconds).unwrap()).unwrap();
        }
        for (limit, share) in [1.0_f64, 2.0, 4.0, 8.0].iter().zip(over(&drawn, 0)) {
            assert!((share - (-limit / 2.0).exp()).abs() < 0.01, "{limit} ms: {share}");
        }
    }

    #[test]
    fn wrong_and_short_reads_fail_the_step() {
        // Scenario: a byte changed at either end; too few bytes; no read at all. Expected: an error that says which.
        let read = ReadAt {
            file: 0,
            offset: 8192,
            length: 512,
        };
        for (wrong, words) in [(0, "wrong bytes at 8192"), (511, "wrong bytes at 8703")] {
            let (_directory, job) = job(Amount::Reads(1));
            job.begin();
            let mut data = vec![0; 512];
            pattern::fill(42, 8192, &mut data);
            data[wrong] ^= 1;
            job.lane().done(&read, Instant::now(), &data);
            assert_eq!(job.next(), None);
            assert_eq!(job.outcome().unwrap_err(), words);
        }
        let (_directory, job) = job(Amount::Reads(1));
        job.begin();
        assert_eq!(job.outcome().unwrap_err(), "nothing was read");
        job.lane().done(&read, Instant::now(), &[0; 5]);
        assert!(job.outcome().unwrap_err().contains("short"));
    }
}
