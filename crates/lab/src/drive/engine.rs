//! Reads through the engine, by the calls that the daemon makes: batches submitted on its cores.

use crate::job::{Job, Lane, ReadAt};
use crate::setup::Shape;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig, OnUnavailable};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, OpenFile, PartialTail};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use ringfetch_host::View;
use ringfetch_host::block::Tags;
use ringfetch_pace::Gate;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Smallest response memory; a step that needs more than a study may use is not planned.
const MEMORY_MIN_BYTES: u64 = 16 << 20;
/// The note of a step whose memory could not be registered with the ring.
pub(crate) const UNREGISTERED: &str = "memory not registered: RLIMIT_MEMLOCK (ulimit -l) is too low";
const OBJECTS_OPEN_MAX: usize = 2048;
/// A device that does not answer within this has failed.
const DRAIN: Duration = Duration::from_secs(30);

/// Engine settings chosen by a strategy or by a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) backend: BackendKind,
    /// Most reads per batch.
    pub(crate) batch: usize,
    pub(crate) rings: u32,
    /// Of each ring; for pread the threads of all cores. `None`: the step's depth, and for a ring at least the default.
    pub(crate) queue_depth: Option<u32>,
    pub(crate) eager_flush_reads: u32,
    pub(crate) registered_buffers: bool,
    pub(crate) mmap_threads: u32,
    pub(crate) announce: bool,
    /// Lowers the depth; `None`: the depth is not lowered.
    pub(crate) device_tags: Option<Tags>,
}

impl Choice {
    /// The defaults of the daemon, on one ring, with each read submitted alone.
    pub(crate) fn of(backend: BackendKind) -> Self {
        let defaults = EngineConfig::default();
        Self {
            backend,
            batch: 1,
            rings: 1,
            queue_depth: None,
            eager_flush_reads: defaults.uring.eager_flush_reads,
            registered_buffers: defaults.uring.registered_buffers,
            mmap_threads: defaults.mmap.threads,
            announce: defaults.mmap.announce,
            device_tags: None,
        }
    }
}

/// Keeps `depth` reads in flight.
pub(crate) fn drive(job: &Arc<Job>, choice: Choice) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    runtime.block_on(drive_on(job, choice))
}

async fn drive_on(job: &Arc<Job>, choice: Choice) -> Result<(), String> {
    // In an open loop requests arrive one by one, and with queries each slot has one query.
    let alone = job.is_open() || job.reads.group > 1;
    let most = if alone { 1 } else { job.setup.depth };
    let batch = choice.batch.clamp(1, most.max(1));
    let slots = job.setup.depth.max(1).div_ceil(batch);
    let dataset = Arc::new(dataset(job)?);
    let engine = Engine::start(&configuration(job, choice)).map_err(|error| error.to_string())?;
    let source = Arc::new(Source {
        engine: engine.clone(),
        opened: opened(job, &dataset).await?,
        dataset,
        batch,
    });
    engine.introduce(&source.dataset);
    let (done, mut ended) = mpsc::channel::<()>(1);
    let cores = engine.core_count().max(1);
    let lanes: Vec<_> = (0..cores).map(|_| Arc::new(Core::of(job))).collect();
    job.begin();
    for (core, shared) in lanes.iter().enumerate().cycle().take(slots) {
        let (job, source, done) = (Arc::clone(job), Arc::clone(&source), done.clone());
        let shared = Arc::clone(shared);
        engine.spawn_on(core, move || async move {
            if let Err(problem) = source.slot(&job, &shared, (core, cores)).await {
                job.fail(problem);
            }
            drop((shared, done));
        });
    }
    drop((lanes, done));
    // Nothing is ever sent: the channel closes when the last slot has ended.
    let _closed = ended.recv().await;
    let pinned = View::real().line("proc/self/status", "VmPin:");
    if choice.backend.uses_ring() && choice.registered_buffers && pinned.as_deref() == Some("0 kB") {
        job.note(UNREGISTERED);
    }
    drop(source);
    let left = engine.drain(Instant::now() + DRAIN).await.abandoned_reads;
    if left > 0 {
        let within = DRAIN.as_secs();
        return Err(format!("{left} reads did not complete within {within} s"));
    }
    Ok(())
}

/// State shared by the slots of a core, which run on one thread.
struct Core {
    lane: Mutex<Lane>,
    /// Of an open loop.
    gate: OnceLock<Option<Arc<Gate>>>,
}

impl Core {
    fn of(job: &Arc<Job>) -> Self {
        Self {
            lane: Mutex::new(job.lane()),
            gate: OnceLock::new(),
        }
    }
}

struct Source {
    engine: Engine,
    dataset: Arc<Dataset>,
    /// Objects opened in advance, by number.
    opened: HashMap<usize, Arc<OpenFile>>,
    batch: usize,
}

impl Source {
    /// Keeps one batch in flight.
    async fn slot(&self, job: &Arc<Job>, core: &Core, place: (usize, usize)) -> Result<(), String> {
        let gate = core.gate.get_or_init(|| job.gate(place.0, place.1));
        let mut reads = Vec::new();
        while let Some(started) = job.turn(gate.as_deref()).await {
            if !job.group(self.batch, &mut reads) {
                break;
            }
            let mut batch = Batch::new(Arc::clone(&self.dataset), reads.len());
            for read in &reads {
                self.push(job, &mut batch, read).await?;
            }
            let ticket = self.engine.submit(batch, SubmitOptions::default());
            let answer = match ticket {
                Ok(ticket) => ticket.await,
                Err(error) => Err(error),
            };
            let fetched = answer.map_err(|error| error.to_string())?;
            if let Some(item) = fetched.errors.first() {
                return Err(item.error.to_string());
            }
            // What a caller does to keep the bytes, since the engine's own memory is always reused.
            let copy = (!job.setup.pooled).then(|| fetched.data.to_vec());
            let mut rest: &[u8] = copy.as_deref().unwrap_or(&fetched.data);
            // No code panics under this lock.
            let mut lane = core.lane.lock().unwrap_or_else(PoisonError::into_inner);
            for read in &reads {
                let (data, after) = rest.split_at(read.length.min(rest.len()));
                lane.done(read, started, data);
                rest = after;
            }
        }
        Ok(())
    }

    async fn push(&self, job: &Arc<Job>, batch: &mut Batch, read: &ReadAt) -> Result<(), String> {
        if !matches!(job.setup.shape, Shape::Files { .. }) {
            batch.push_range(read.offset, read.length as u64);
            return Ok(());
        }
        let object = match self.opened.get(&read.file) {
            Some(object) => Arc::clone(object),
            None => open(job, &self.dataset, read.file).await?,
        };
        batch.push_object(&object, 0, None);
        Ok(())
    }
}

async fn open(job: &Job, dataset: &Arc<Dataset>, file: usize) -> Result<Arc<OpenFile>, String> {
    let name = job.material.files.get(file).map_or("", |file| file.name.as_str());
    dataset.object(name).await.map_err(|error| error.to_string())
}

async fn opened(job: &Job, dataset: &Arc<Dataset>) -> Result<HashMap<usize, Arc<OpenFile>>, String> {
    let mut opened = HashMap::new();
    if let (Shape::Files { count }, false) = (job.setup.shape, job.setup.open_each) {
        for file in 0..count {
            opened.insert(file, open(job, dataset, file).await?);
        }
    }
    Ok(opened)
}

fn dataset(job: &Job) -> Result<Dataset, String> {
    let direct_io = match job.is_direct() {
        true => DirectIo::Required,
        false => DirectIo::Off,
    };
    if !matches!(job.setup.shape, Shape::Files { .. }) {
        return blocks(&job.path(0).unwrap_or_default(), job.reads.bytes, direct_io);
    }
    let kind = KindSpec::Objects {
        max_open_files: OBJECTS_OPEN_MAX,
        revalidate: Duration::from_secs(3600),
    };
    opened_as(&job.material.directory, kind, direct_io)
}

/// A file or device as the engine sees it.
pub(crate) fn blocks(path: &Path, block_bytes: usize, direct_io: DirectIo) -> Result<Dataset, String> {
    let kind = KindSpec::Blocks {
        block_bytes: u32::try_from(block_bytes).unwrap_or(u32::MAX),
        partial_tail: PartialTail::Ignore,
    };
    opened_as(path, kind, direct_io)
}

fn opened_as(path: &Path, kind: KindSpec, direct_io: DirectIo) -> Result<Dataset, String> {
    let spec = DatasetSpec {
        name: "lab".to_owned(),
        paths: vec![path.to_owned()],
        kind,
        direct_io,
    };
    Dataset::open(&spec).map_err(|error| error.problem)
}

fn configuration(job: &Job, choice: Choice) -> EngineConfig {
    let depth = u32::try_from(job.setup.depth).unwrap_or(u32::MAX).clamp(1, 4096);
    let memory = job.reads.engine_bytes(job.setup.depth, choice.batch);
    let mut config = EngineConfig {
        backend: choice.backend,
        // Whether there is a ring was checked before: a fallback would falsify the results.
        on_unavailable: OnUnavailable::Fail,
        cores: choice.rings,
        // As the daemon's cores, where its settings are compared: one ring with several, which are. Else not, like the baselines:
        // other load on one CPU must not hit the engine alone.
        pin: job.setup.engine.is_some(),
        memory_budget_bytes: memory.next_multiple_of(1 << 20).max(MEMORY_MIN_BYTES),
        device_tags: choice.device_tags.into_iter().collect(),
        ..EngineConfig::default()
    };
    // Not below the default: reads of more than 1 MiB are split, and their parts are in flight together.
    let ring_depth = depth.max(config.uring.queue_depth);
    config.uring.queue_depth = choice.queue_depth.unwrap_or(ring_depth);
    config.uring.eager_flush_reads = choice.eager_flush_reads;
    config.uring.registered_buffers = choice.registered_buffers;
    config.pread.threads = choice.queue_depth.unwrap_or(depth).min(1024);
    config.mmap.threads = choice.mmap_threads.clamp(1, 256);
    config.mmap.announce = choice.announce;
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::tests::{scratch, small};
    use crate::setup::{Amount, Heat, Setup};
    use std::sync::atomic::AtomicBool;

    #[test]
    fn settings_of_the_daemon_are_compared_on_its_cores() {
        // Scenario: a step of `calibrate`, with its own settings, on one ring and on two; a strategy. Expected: pinned, both, as
        // the daemon is by default; not pinned, like the baselines.
        let directory = scratch();
        let material = Arc::new(small(directory.path()));
        let pinned = |own: Option<Choice>, rings: u32| {
            let shape = Shape::random(4096, 4 << 20);
            let setup = Setup {
                engine: own,
                ..Setup::new(Heat::Cold, shape, Amount::Reads(1), 1)
            };
            let job = Job::new(&material, setup, 1, false, &Arc::new(AtomicBool::new(false))).unwrap();
            let choice = Choice {
                rings,
                ..Choice::of(BackendKind::Pread)
            };
            configuration(&job, choice).pin
        };
        let own = Some(Choice::of(BackendKind::Pread));
        assert_eq!(
            [pinned(own, 1), pinned(own, 2), pinned(None, 1)],
            [true, true, false]
        );
        assert!(EngineConfig::default().pin);
    }
}
