//! One step: an engine with given settings under a closed loop for a given time, through the same calls that the daemon
//! makes, and what came of it.
//!
//! Invariants: nothing of a step is left behind (engine, threads, mapping, memory); a step ends within the time of its
//! slowest read after it is told to stop; a failed read fails the calibration, for its figures would be of something
//! else. CPU is CLOCK_PROCESS_CPUTIME_ID: user and system time of all threads, as getrusage(2) has it, this one included.

use super::target::Target;
use super::walk::Walk;
use crate::outcome::Failure;
use crate::quantity::approximate;
use hdrhistogram::Histogram;
use procfs::process::Process;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, EngineConfig, OnUnavailable};
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::{Engine, SubmitOptions};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Answer memory of a step: a few times what is asked for at once, within these bounds.
const MEMORY_MIN_BYTES: u64 = 16 << 20;
pub(super) const MEMORY_MAX_BYTES: u64 = 256 << 20;
/// The first part of a step is driven and not measured; not where a walk ends.
const WARM_UP_SHARE: u32 = 5;
const WARM_UP_MAX: Duration = Duration::from_millis(200);
/// A device that does not answer within this has failed.
const DRAIN: Duration = Duration::from_secs(30);

/// The settings of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Setup {
    #[serde(serialize_with = "word")]
    pub(super) backend: BackendKind,
    /// Past the page cache, where the backend can.
    pub(super) direct: bool,
    pub(super) rings: u32,
    pub(super) queue_depth: u32,
    pub(super) eager_flush_reads: u32,
    pub(super) registered_buffers: bool,
    pub(super) mmap_threads: u32,
    pub(super) announce: bool,
    pub(super) pread_threads: u32,
    /// Reads of one batch.
    pub(super) batch: usize,
    /// Reads asked for at once, a ring.
    pub(super) asked: usize,
    /// The device's tags, by which the engine cuts the depth; `None`: uncut.
    pub(super) device_tags: Option<u32>,
}

fn word<S: serde::Serializer>(backend: &BackendKind, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(backend.as_str())
}

/// What a step gave.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Sample {
    pub(super) reads: u64,
    pub(super) seconds: f64,
    pub(super) reads_per_second: f64,
    pub(super) cpu_us_per_read: f64,
    /// Of a batch, from its submission to its answer.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Reads in flight on average, by Little's law: reads/s times the mean latency. Of batches of one read only.
    pub(super) in_flight: Option<f64>,
    /// The depth in force, after the engine has cut it.
    pub(super) queue_depth: u32,
    /// Memory that this process had pinned (VmPin of proc_pid_status(5)): the registered buffers.
    pub(super) pinned_bytes: u64,
    /// Whether every block of a cold file was read before the time was over.
    pub(super) file_used_up: bool,
}

/// What one core's slots have counted.
struct Counted {
    reads: AtomicU64,
    latency: Mutex<Latencies>,
}

/// Of batches, nanoseconds.
struct Latencies {
    /// Of those that began in the warm-up: they count only where there were no others.
    early: Histogram<u64>,
    measured: Histogram<u64>,
}

impl Latencies {
    fn new() -> Result<Self, Failure> {
        let histogram = || Histogram::<u64>::new(3).map_err(|error| Failure::Failed(error.to_string()));
        Ok(Self {
            early: histogram()?,
            measured: histogram()?,
        })
    }
}

/// Runs a step for `slice`. `None`: it was told to stop, and its figures would not be comparable.
///
/// # Errors
/// The engine does not start, a read failed, nothing was read.
pub(super) async fn drive(
    target: &Target,
    setup: &Setup,
    walk: (Walk, bool),
    slice: Duration,
    stop: &mut watch::Receiver<bool>,
) -> Result<Option<Sample>, Failure> {
    let (walk, ends) = walk;
    let dataset = target.dataset(setup.direct)?;
    let (config, slots) = configuration(setup, target.block_bytes);
    let engine = Engine::start(&config).map_err(|error| Failure::Failed(error.to_string()))?;
    let warm_up = if ends {
        Duration::ZERO
    } else {
        (slice / WARM_UP_SHARE).min(WARM_UP_MAX)
    };
    let begin = Instant::now();
    let load = Arc::new(Load {
        engine: engine.clone(),
        dataset,
        walk,
        batch: setup.batch.max(1),
        measure_from: begin + warm_up,
        until: begin + slice,
        halted: AtomicBool::new(false),
        failed: Mutex::new(None),
    });
    let cores = engine.core_count().max(1);
    let mut counted = Vec::new();
    for _ in 0..cores {
        counted.push(Arc::new(Counted {
            reads: AtomicU64::new(0),
            latency: Mutex::new(Latencies::new()?),
        }));
    }
    let (done, mut ended) = mpsc::channel::<()>(1);
    for slot in 0..slots {
        let Some(counted) = counted.get(slot % cores).map(Arc::clone) else {
            continue;
        };
        let (load, done) = (Arc::clone(&load), done.clone());
        engine.spawn_on(slot % cores, move || async move {
            load.slot(&counted).await;
            drop(done);
        });
    }
    drop(done);
    let reads = || {
        let each = counted.iter().map(|core| core.reads.load(Ordering::Relaxed));
        each.sum::<u64>()
    };
    let mark = || (Instant::now(), cpu_time(), reads());
    let wait_until =
        async |instant: Instant, ended: &mut mpsc::Receiver<()>, stop: &mut watch::Receiver<bool>| {
            tokio::select! {
                () = tokio::time::sleep_until(instant.into()) => {}
                // Nothing is ever sent: it is closed when the last slot has ended.
                _ = ended.recv() => {}
                _ = stop.wait_for(|stop| *stop) => load.halted.store(true, Ordering::Relaxed),
            }
        };
    let first = mark();
    wait_until(load.measure_from, &mut ended, stop).await;
    let mut before = mark();
    wait_until(load.until, &mut ended, stop).await;
    let mut after = mark();
    let pinned_bytes = pinned_bytes();
    let _closed = ended.recv().await;
    if after.2 == before.2 {
        // Reads slower than the slice, or a machine too busy to look in time: then all of them count, from the first.
        (before, after) = (first, mark());
    }
    let depth = engine.shards().first().map_or(0, |shard| shard.queue_depth);
    let report = engine.drain(Instant::now() + DRAIN).await;
    if report.abandoned_reads > 0 {
        return Err(Failure::Failed(format!(
            "{}: {} reads did not complete within {} s: the device does not answer",
            target.path.display(),
            report.abandoned_reads,
            DRAIN.as_secs()
        )));
    }
    if let Some(problem) = lock(&load.failed).take() {
        return Err(Failure::Failed(format!("{}: {problem}", target.path.display())));
    }
    if load.halted.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let latency = latencies(&counted)?;
    let (elapsed, cpu, total) = (
        after.0 - before.0,
        after.1.saturating_sub(before.1),
        after.2 - before.2,
    );
    if total == 0 {
        return Err(Failure::Failed(format!(
            "{}: nothing was read in {} ms; give it more --seconds",
            target.path.display(),
            slice.as_millis()
        )));
    }
    let reads_per_second = approximate(total) / elapsed.as_secs_f64().max(1e-9);
    let micros = |quantile| approximate(latency.value_at_quantile(quantile)) / 1e3;
    Ok(Some(Sample {
        reads: total,
        seconds: elapsed.as_secs_f64(),
        reads_per_second,
        cpu_us_per_read: cpu.as_secs_f64() * 1e6 / approximate(total),
        p50_us: micros(0.5),
        p99_us: micros(0.99),
        in_flight: (setup.batch == 1).then(|| reads_per_second * latency.mean() / 1e9),
        queue_depth: depth,
        pinned_bytes,
        file_used_up: ends && after.0 < load.until,
    }))
}

/// All cores' latencies together.
fn latencies(counted: &[Arc<Counted>]) -> Result<Histogram<u64>, Failure> {
    let mut all = Latencies::new()?;
    for core in counted {
        let core = lock(&core.latency);
        let added = all
            .measured
            .add(&core.measured)
            .and_then(|()| all.early.add(&core.early));
        added.map_err(|error| Failure::Failed(error.to_string()))?;
    }
    Ok(if all.measured.is_empty() {
        all.early
    } else {
        all.measured
    })
}

/// The depth of a ring with these settings, after the engine has cut it by the device's tags.
pub(super) async fn depth_in_force(setup: &Setup, block_bytes: u32) -> Result<u32, Failure> {
    let (config, _) = configuration(setup, block_bytes);
    let engine = Engine::start(&config).map_err(|error| Failure::Failed(error.to_string()))?;
    let depth = engine.shards().first().map_or(0, |shard| shard.queue_depth);
    engine.drain(Instant::now() + DRAIN).await;
    Ok(depth)
}

/// The engine's settings, and how many batches are kept in flight.
fn configuration(setup: &Setup, block_bytes: u32) -> (EngineConfig, usize) {
    let rings = setup.rings.max(1);
    // A read takes whole pages, and up to as much again where it is not aligned (scratch memory).
    let read = 2 * u64::from(block_bytes).next_multiple_of(4096);
    let asked = (setup.asked as u64).saturating_mul(u64::from(rings));
    let memory = asked.saturating_mul(read).saturating_mul(2);
    let memory = memory
        .next_multiple_of(1 << 20)
        .clamp(MEMORY_MIN_BYTES, MEMORY_MAX_BYTES);
    let fitting = usize::try_from(memory / 2 / read).unwrap_or(usize::MAX);
    let asked = usize::try_from(asked).unwrap_or(usize::MAX).min(fitting);
    let slots = asked.div_ceil(setup.batch.max(1)).max(1);
    let mut config = EngineConfig {
        backend: setup.backend,
        // Whether there is a ring was found out before: from here on a fallback would be a lie.
        on_unavailable: OnUnavailable::Fail,
        cores: rings,
        memory_budget_bytes: memory,
        device_tags: setup.device_tags,
        ..EngineConfig::default()
    };
    config.uring.queue_depth = setup.queue_depth;
    config.uring.eager_flush_reads = setup.eager_flush_reads;
    config.uring.registered_buffers = setup.registered_buffers;
    config.mmap.threads = setup.mmap_threads;
    config.mmap.announce = setup.announce;
    config.pread.threads = setup.pread_threads;
    (config, slots)
}

/// What the slots of a step share.
struct Load {
    engine: Engine,
    dataset: Arc<Dataset>,
    walk: Walk,
    batch: usize,
    measure_from: Instant,
    until: Instant,
    halted: AtomicBool,
    failed: Mutex<Option<String>>,
}

impl Load {
    /// One batch in flight, again and again; one at least, however late the thread began.
    async fn slot(&self, counted: &Counted) {
        let mut start = Instant::now();
        loop {
            let mut batch = Batch::new(Arc::clone(&self.dataset), self.batch);
            let mut items = 0;
            for block in std::iter::from_fn(|| self.walk.next_block()).take(self.batch) {
                batch.push_block(block);
                items += 1;
            }
            if items == 0 {
                return;
            }
            let answer = match self.engine.submit(batch, SubmitOptions::default()) {
                Ok(ticket) => ticket.await,
                Err(error) => Err(error),
            };
            let problem = match answer {
                Ok(fetched) => fetched.errors.first().map(|item| item.error.to_string()),
                Err(error) => Some(error.to_string()),
            };
            if let Some(problem) = problem {
                lock(&self.failed).get_or_insert(problem);
                self.halted.store(true, Ordering::Relaxed);
                return;
            }
            let end = Instant::now();
            counted.reads.fetch_add(items, Ordering::Relaxed);
            let nanoseconds = u64::try_from((end - start).as_nanos()).unwrap_or(u64::MAX);
            let mut latency = lock(&counted.latency);
            let histogram = if start >= self.measure_from {
                &mut latency.measured
            } else {
                &mut latency.early
            };
            // It resizes itself; only what is longer than any wait is refused.
            let _recorded = histogram.record(nanoseconds);
            drop(latency);
            if end >= self.until || self.halted.load(Ordering::Relaxed) {
                return;
            }
            start = end;
        }
    }
}

/// No code panics under these locks.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// VmPin of this process; 0 where the kernel does not say.
fn pinned_bytes() -> u64 {
    let status = Process::myself().and_then(|process| process.status());
    let kibibytes = status.ok().and_then(|status| status.vmpin);
    kibibytes.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn setup() -> Setup {
        Setup {
            backend: BackendKind::Uring,
            direct: true,
            rings: 1,
            queue_depth: 64,
            eager_flush_reads: 4,
            registered_buffers: true,
            mmap_threads: 2,
            announce: true,
            pread_threads: 32,
            batch: 16,
            asked: 128,
            device_tags: None,
        }
    }

    #[test]
    fn memory_is_bounded_whatever_is_asked_for() {
        // Scenario: few small reads, many large ones on many rings, and single reads of 1 MiB.
        // Expected: memory between its bounds, and never more asked for than half of it holds, scratch included.
        let small = configuration(&setup(), 4096);
        assert_eq!((small.0.memory_budget_bytes, small.1), (MEMORY_MIN_BYTES, 8));
        for (rings, batch, asked, block) in
            [(64, 16, 1024, 1 << 20), (1, 1, 512, 1 << 20), (2, 16, 1024, 512)]
        {
            let setup = Setup {
                rings,
                batch,
                asked,
                ..setup()
            };
            let (config, slots) = configuration(&setup, block);
            assert!((MEMORY_MIN_BYTES..=MEMORY_MAX_BYTES).contains(&config.memory_budget_bytes));
            let held = (slots * batch) as u64 * u64::from(block).next_multiple_of(4096) * 2;
            assert!(
                slots == 1
                    || held <= config.memory_budget_bytes / 2 + 32 * u64::from(block).next_multiple_of(4096),
                "{rings} {batch} {asked} {block}: {held}"
            );
            assert!(config.memory_budget_bytes.is_multiple_of(4096));
        }
    }
}
