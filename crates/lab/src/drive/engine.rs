//! The engine, through the calls that the daemon makes: batches submitted on its one core.

use crate::job::{Group, Job, Lane, ReadAt, Shape};
use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig, OnUnavailable};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, OpenFile, PartialTail};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use ringfetch_pace::Gate;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Response memory, within these bounds; a step that needs more is not planned (see the runner's bound).
const MEMORY_MIN_BYTES: u64 = 16 << 20;
const MEMORY_MAX_BYTES: u64 = 512 << 20;
const OBJECTS_OPEN_MAX: usize = 2048;
/// A device that does not answer within this has failed.
const DRAIN: Duration = Duration::from_secs(30);

/// What a strategy chooses of the engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice {
    pub(crate) backend: BackendKind,
    /// Reads of a batch.
    pub(crate) batch: usize,
    pub(crate) mmap_threads: usize,
    pub(crate) announce: bool,
}

/// Reads with `depth` reads asked for at once.
pub(crate) fn drive(job: &Arc<Job>, choice: Choice) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime
        .map_err(|error| error.to_string())?
        .block_on(drive_on(job, choice))
}

async fn drive_on(job: &Arc<Job>, choice: Choice) -> Result<(), String> {
    // Arrivals come one by one, and a slot has a query.
    let alone = job.is_open() || job.setup.group(&job.material) > 1;
    let batch = if alone {
        1
    } else {
        choice.batch.clamp(1, job.setup.depth.max(1))
    };
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
    job.begin();
    let (for_slots, slots_source) = (Arc::clone(job), Arc::clone(&source));
    engine.spawn_on(0, move || async move {
        let gate = for_slots.gate(0, 1);
        for _ in 0..slots {
            let (job, source, gate) = (Arc::clone(&for_slots), Arc::clone(&slots_source), gate.clone());
            let done = done.clone();
            tokio::task::spawn_local(async move {
                let mut lane = job.lane();
                if let Err(problem) = source.slot(&job, &mut lane, gate.as_deref()).await {
                    job.fail(problem);
                }
                drop((lane, done));
            });
        }
    });
    // Nothing is ever sent: it is closed when the last slot has ended.
    let _closed = ended.recv().await;
    drop(source);
    let left = engine.drain(Instant::now() + DRAIN).await.abandoned_reads;
    if left > 0 {
        return Err(format!(
            "{left} reads did not complete within {} s",
            DRAIN.as_secs()
        ));
    }
    Ok(())
}

struct Source {
    engine: Engine,
    dataset: Arc<Dataset>,
    /// Objects that were opened before, by number.
    opened: HashMap<usize, Arc<OpenFile>>,
    batch: usize,
}

impl Source {
    /// One batch in flight, again and again.
    async fn slot(&self, job: &Arc<Job>, lane: &mut Lane, gate: Option<&Gate>) -> Result<(), String> {
        let mut group = Group::default();
        while let Some(started) = job.turn(gate).await {
            if !job.group(self.batch, &mut group) {
                break;
            }
            let mut batch = Batch::new(Arc::clone(&self.dataset), group.reads.len());
            for read in &group.reads {
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
            // What a caller does that keeps the bytes: the engine's own memory is always used again.
            let copy = (!job.setup.pooled).then(|| fetched.data.to_vec());
            let mut rest: &[u8] = copy.as_deref().unwrap_or(&fetched.data);
            for read in &group.reads {
                let (data, after) = rest.split_at(read.length.min(rest.len()));
                lane.read_of(&group, read, started, data);
                rest = after;
            }
            lane.ranked(&group);
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
    let (kind, path) = match job.setup.shape {
        Shape::Blocks { .. } | Shape::Queries { .. } | Shape::Items { .. } => (
            KindSpec::Blocks {
                block_bytes: u32::try_from(job.read_bytes()).unwrap_or(u32::MAX),
                partial_tail: PartialTail::Ignore,
            },
            job.path(0).unwrap_or_default(),
        ),
        Shape::Files { .. } => (
            KindSpec::Objects {
                max_open_files: OBJECTS_OPEN_MAX,
                revalidate: Duration::from_secs(3600),
            },
            job.material.directory.clone(),
        ),
    };
    let spec = DatasetSpec {
        name: "lab".to_owned(),
        paths: vec![path],
        kind,
        direct_io: if job.is_direct() {
            DirectIo::Required
        } else {
            DirectIo::Off
        },
    };
    Dataset::open(&spec).map_err(|error| error.problem)
}

fn configuration(job: &Job, choice: Choice) -> EngineConfig {
    let threads = |count: usize, most: u32| u32::try_from(count).unwrap_or(most).clamp(1, most);
    let group = job.setup.group(&job.material).max(choice.batch);
    let depth = threads(job.setup.depth, 4096);
    // A read that is not whole pages takes them, and up to as much again of scratch memory.
    let bytes = job.read_bytes() as u64;
    let read = bytes.next_multiple_of(4096) * if bytes.is_multiple_of(4096) { 1 } else { 2 };
    // A batch may have a quarter; 64 reads of 4 MiB get 320 MiB.
    let batches = read.saturating_mul(4 * group as u64);
    let at_once = read.saturating_mul((job.setup.group(&job.material) * job.setup.depth) as u64);
    let memory = batches.max(at_once / 4 * 5);
    let memory = memory.next_multiple_of(1 << 20);
    let mut config = EngineConfig {
        backend: choice.backend,
        // Whether there is a ring was found out before: a fallback would be a lie.
        on_unavailable: OnUnavailable::Fail,
        memory_budget_bytes: memory.clamp(MEMORY_MIN_BYTES, MEMORY_MAX_BYTES),
        ..EngineConfig::default()
    };
    // Not below the default: reads of more than 1 MiB are split, and their parts are in flight together.
    config.uring.queue_depth = depth.max(config.uring.queue_depth);
    config.pread.threads = depth.min(1024);
    config.mmap.threads = threads(choice.mmap_threads, 256);
    config.mmap.announce = choice.announce;
    config
}
