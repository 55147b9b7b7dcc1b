//! The engine as the server sees it: cores to run its listeners on, and one way to read.

use crate::batch::{Batch, Fetched};
use crate::buffer::{Arena, PAGE_BYTES, Share};
use crate::config::{BackendKind, EngineConfig, Placement};
use crate::cores::{self, Alarm, Job};
use crate::dataset::Dataset;
use crate::error::{ReadError, Resource};
use crate::metrics::{self, EngineCollector, ShardMetrics};
use crate::plan::{self, Rules};
use crate::shard::Message;
use crate::start::{self, Sim, Starter};
use crate::work::Work;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};

/// Why the engine does not start. The message names the cause and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StartError(pub String);

/// Which backend runs, and why that one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendStatus {
    /// The one in use.
    pub backend: BackendKind,
    /// The one asked for.
    pub requested: BackendKind,
    /// One line: why.
    pub reason: String,
}

impl BackendStatus {
    /// Whether another backend runs than was asked for.
    pub fn is_fallback(&self) -> bool {
        self.backend != self.requested
    }
}

/// A shard's gauges and counters at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardStatus {
    /// Number of the shard, from 0.
    pub shard: u32,
    /// Reads submitted and not completed.
    pub in_flight: u32,
    /// Reads accepted and not submitted.
    pub queued: u64,
    /// The limit of `in_flight`.
    pub queue_depth: u32,
    /// Reads sent to the device, after merging and splitting.
    pub device_reads_total: u64,
    /// Submissions to the kernel (system calls).
    pub submissions_total: u64,
}

/// Totals over all shards at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Totals {
    /// Items answered, errors included.
    pub reads: u64,
    /// Items answered with an error.
    pub read_errors: u64,
    /// Bytes answered.
    pub read_bytes: u64,
    /// (upper bound in seconds, items at or below it), of the time from acceptance to the answer; the last bound is
    /// infinite.
    pub total_seconds: Vec<(f64, u64)>,
}

/// How a batch is to be treated.
#[derive(Debug, Clone, Default)]
pub struct SubmitOptions {
    /// Past this, a batch that was not taken up is answered `DeadlineExceeded` without a read.
    pub deadline: Option<Instant>,
    /// The connection's share of the response memory.
    pub share: Option<Arc<Share>>,
    /// Answer the first item error in place of the batch.
    pub fail_fast: bool,
}

/// What a drain left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainReport {
    /// Reads that did not complete in time; 0 is a clean drain.
    pub abandoned_reads: u64,
}

/// A running engine. Clones share it.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    arena: Arena,
    config: EngineConfig,
    backend: BackendStatus,
    rules: Rules,
    shards: Vec<ShardHandle>,
    /// Whether shard N runs on core N.
    shards_on_cores: bool,
    cores: Mutex<Vec<mpsc::UnboundedSender<Job>>>,
    core_count: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    draining: AtomicBool,
    next_shard: AtomicUsize,
    alarm: watch::Receiver<bool>,
}

/// The way to a shard, and its counters.
pub(crate) struct ShardHandle {
    pub(crate) inbox: mpsc::Sender<Message>,
    pub(crate) metrics: Arc<ShardMetrics>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("backend", &self.backend)
            .field("shards", &self.shards.len())
            .finish()
    }
}

/// A batch on its way. Dropping it gives the batch up: reads not yet submitted are not made; reads in flight finish
/// and their memory returns to the pool.
#[derive(Debug)]
pub struct Ticket {
    answer: oneshot::Receiver<Result<Fetched, ReadError>>,
}

impl Future for Ticket {
    type Output = Result<Fetched, ReadError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        Pin::new(&mut self.answer)
            .poll(cx)
            .map(|answer| answer.unwrap_or(Err(ReadError::ShardFailed)))
    }
}

impl Ticket {
    /// Waits on the calling thread; for callers without a runtime. Inside one it would panic: await the ticket there.
    ///
    /// # Errors
    /// As the future's output.
    pub fn wait(self) -> Result<Fetched, ReadError> {
        self.answer.blocking_recv().unwrap_or(Err(ReadError::ShardFailed))
    }
}

impl Engine {
    /// Probes the backend, reserves the memory, starts the cores and shards.
    ///
    /// # Errors
    /// io_uring cannot be had and `on_unavailable` is `Fail`; or a thread, the memory or a ring cannot be had.
    pub fn start(config: &EngineConfig) -> Result<Self, StartError> {
        let backend = start::choose(config)?;
        Self::start_on(config, backend, None)
    }

    /// Starts an engine whose one shard reads through the simulated backend in the hand of `control`, with
    /// `queue_depth` of `config.uring`.
    ///
    /// # Errors
    /// As [`Engine::start`].
    #[cfg(any(test, feature = "sim"))]
    pub fn start_sim(config: &EngineConfig, control: &crate::sim::SimControl) -> Result<Self, StartError> {
        let requested = BackendKind::Sim;
        let backend = BackendStatus {
            backend: requested,
            requested,
            reason: control.to_string(),
        };
        Self::start_on(config, backend, Some(control.clone()))
    }

    fn start_on(config: &EngineConfig, backend: BackendStatus, sim: Sim) -> Result<Self, StartError> {
        let arena = Arena::new(config.memory_budget_bytes).map_err(|error| {
            StartError(format!(
                "engine.memory_budget: {} bytes cannot be reserved: {error}; ask for less",
                config.memory_budget_bytes
            ))
        })?;
        let (alarm_raised, alarm) = watch::channel(false);
        let alarm_raised = Alarm(Arc::new(alarm_raised));
        let mut starter = Starter {
            config,
            arena: &arena,
            alarm: alarm_raised,
            threads: Vec::new(),
            shards: Vec::new(),
            sim,
        };
        let cores = starter.start(backend.backend)?;
        let Starter { threads, shards, .. } = starter;
        let rules = Rules {
            direct: matches!(
                backend.backend,
                BackendKind::Uring | BackendKind::Auto | BackendKind::Pread
            ),
            merge: backend.backend != BackendKind::Mmap,
            merge_gap_bytes: config.plan.merge_gap_bytes,
            max_read_bytes: config.plan.max_read_bytes,
        };
        let shards_on_cores = backend.backend.uses_ring() && config.uring.placement == Placement::SameThread;
        Ok(Self {
            inner: Arc::new(Inner {
                arena,
                config: config.clone(),
                backend,
                rules,
                shards,
                shards_on_cores,
                core_count: cores.len(),
                cores: Mutex::new(cores),
                threads: Mutex::new(threads),
                draining: AtomicBool::new(false),
                next_shard: AtomicUsize::new(0),
                alarm,
            }),
        })
    }

    /// The settings it was started with.
    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }

    /// Network cores: pinned threads with a current-thread tokio runtime each.
    pub fn core_count(&self) -> usize {
        self.inner.core_count
    }

    /// Runs a future on a core. It and what it spawns (`tokio::spawn`, `spawn_local`) stay on that thread, and
    /// batches submitted there go to that core's shard. Returns false when the core has stopped.
    pub fn spawn_on<F, Fut>(&self, core: usize, task: F) -> bool
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        let job: Job = Box::new(move || Box::pin(task()));
        let cores = self.inner.cores.lock().unwrap_or_else(PoisonError::into_inner);
        cores.get(core).is_some_and(|core| core.send(job).is_ok())
    }

    /// Queues a batch on the shard of the calling core (else the least loaded one).
    ///
    /// # Errors
    /// At once: `Overloaded`, `Draining`, `ItemTooLarge` for a batch of more bytes than a response or the share may ever
    /// hold, or with `fail_fast` the first item error already known.
    pub fn submit(&self, batch: Batch, options: SubmitOptions) -> Result<Ticket, ReadError> {
        let inner = &*self.inner;
        if inner.draining.load(Ordering::Relaxed) {
            return Err(ReadError::Draining);
        }
        if let (true, Some(first)) = (options.fail_fast, batch.errors().first()) {
            return Err(first.error.clone());
        }
        let share = options.share.as_ref();
        let share_bytes = share.map_or(u64::MAX, |share| share.limit_bytes() / PAGE_BYTES * PAGE_BYTES);
        let max = self.response_bytes_max().min(share_bytes);
        if batch.data_bytes() > max {
            return Err(ReadError::ItemTooLarge {
                length: batch.data_bytes(),
                max,
            });
        }
        let shard = inner.choose_shard().ok_or(ReadError::ShardFailed)?;
        // Memory that no waiting would ever free is not asked for: Overloaded says that a retry makes sense.
        let fits = |plan: &plan::Plan| {
            let pages = |bytes: u32| u64::from(bytes).next_multiple_of(PAGE_BYTES);
            u64::from(plan.scratch_bytes) <= self.response_bytes_max()
                && pages(plan.data_bytes) + pages(plan.scratch_bytes) <= share_bytes
        };
        let plan = plan::plan_within(&batch, inner.rules, fits);
        let reserve = |bytes: u32| match bytes {
            0 => Ok(None),
            bytes => inner.arena.reserve(u64::from(bytes), share).map(Some),
        };
        let buffer = reserve(plan.data_bytes)?;
        let scratch = reserve(plan.scratch_bytes)?;
        let reads = i64::try_from(plan.reads.len()).unwrap_or(i64::MAX);
        // A read that was queued alone may always go, or a limit below one batch would refuse everything.
        let queued = shard.metrics.queued.fetch_add(reads, Ordering::Relaxed);
        let refuse = |error| {
            shard.metrics.queued.fetch_sub(reads, Ordering::Relaxed);
            Err(error)
        };
        if queued > 0 && queued + reads > i64::from(inner.config.queued_reads) {
            return refuse(ReadError::Overloaded {
                resource: Resource::QueuedReads,
            });
        }
        let (reply, answer) = oneshot::channel();
        let Batch {
            dataset,
            objects,
            items,
            errors,
            ..
        } = batch;
        let work = Work {
            dataset,
            objects,
            items,
            errors,
            plan,
            buffer,
            scratch,
            accepted: Instant::now(),
            deadline: options.deadline,
            fail_fast: options.fail_fast,
            reply,
        };
        match shard.inbox.try_send(Message::Work(Box::new(work))) {
            Ok(()) => Ok(Ticket { answer }),
            Err(mpsc::error::TrySendError::Full(_)) => refuse(ReadError::Overloaded {
                resource: Resource::QueuedReads,
            }),
            Err(mpsc::error::TrySendError::Closed(_)) => {
                let draining = inner.draining.load(Ordering::Relaxed);
                refuse(if draining {
                    ReadError::Draining
                } else {
                    ReadError::ShardFailed
                })
            }
        }
    }

    /// Exports a dataset's series from now on, at 0: a rate over a counter that appears with its first read would miss
    /// that read.
    pub fn introduce(&self, dataset: &Dataset) {
        for shard in &self.inner.shards {
            let _counters = shard.metrics.dataset(dataset.id(), dataset.name());
        }
    }

    /// Which backend serves the datasets that have none of their own, and why.
    pub fn backend(&self) -> BackendStatus {
        self.inner.backend.clone()
    }

    /// Which backend serves a dataset, and why.
    pub fn backend_of(&self, _dataset: &Dataset) -> BackendStatus {
        self.inner.backend.clone()
    }

    /// Makes `requested` the backend of every dataset that has none of its own, while it serves: batches submitted from
    /// now on go there, those accepted before finish where they are. Blocks for as long as starting it takes (up to
    /// seconds, the first time): call it where blocking is allowed.
    ///
    /// # Errors
    /// The backend cannot be had; nothing has changed then, whatever `on_unavailable` says.
    pub fn set_backend(&self, requested: BackendKind) -> Result<BackendStatus, StartError> {
        Err(StartError(format!(
            "backend {requested}: the engine cannot be switched while it runs"
        )))
    }

    /// Gives a dataset a backend of its own, as [`Engine::set_backend`] does for all others; `None` takes it away again.
    ///
    /// # Errors
    /// As [`Engine::set_backend`].
    pub fn set_backend_of(
        &self,
        _dataset: &Dataset,
        requested: Option<BackendKind>,
    ) -> Result<BackendStatus, StartError> {
        self.set_backend(requested.unwrap_or(self.inner.backend.requested))
    }

    /// Lets go of what the shards hold of datasets that nobody else holds any more (their places in a ring's table of
    /// files): call it some time after a dataset was removed or replaced.
    pub fn sweep(&self) {}

    /// Asks every shard for a sign of life.
    ///
    /// # Errors
    /// The number of a shard that gave none in time: it is stuck, or has failed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn signs_of_life(&self, _within: Duration) -> Result<(), u32> {
        Ok(())
    }

    /// Every shard's state now.
    pub fn shards(&self) -> Vec<ShardStatus> {
        let status = |shard: &ShardHandle| {
            let metrics = &shard.metrics;
            ShardStatus {
                shard: metrics.shard,
                in_flight: metrics.in_flight.load(Ordering::Relaxed),
                queued: u64::try_from(metrics.queued.load(Ordering::Relaxed)).unwrap_or(0),
                queue_depth: metrics.queue_depth,
                device_reads_total: metrics.device_reads.load(Ordering::Relaxed),
                submissions_total: metrics.submissions.load(Ordering::Relaxed),
            }
        };
        self.inner.shards.iter().map(status).collect()
    }

    /// Sums over the shards now.
    pub fn totals(&self) -> Totals {
        metrics::totals(&self.inner.shard_metrics())
    }

    /// Response memory: (in use, budget), bytes.
    pub fn memory(&self) -> (u64, u64) {
        (self.inner.arena.in_use_bytes(), self.inner.arena.budget_bytes())
    }

    /// The largest response the memory can hold: a quarter of it, so that one request leaves room for others and for
    /// its own scratch memory, which is at most as much again.
    pub fn response_bytes_max(&self) -> u64 {
        (self.inner.arena.budget_bytes() / 4).clamp(1, 1 << 31)
    }

    /// A connection's share of the response memory.
    pub fn new_share(&self) -> Arc<Share> {
        Share::new(self.inner.config.connection_bytes)
    }

    /// Registers the engine's metrics.
    ///
    /// # Errors
    /// A name is taken.
    pub fn register_metrics(&self, registry: &prometheus::Registry) -> Result<(), prometheus::Error> {
        self.inner.arena.register_metrics(registry)?;
        let shards = self.inner.shard_metrics();
        registry.register(Box::new(EngineCollector::new(
            shards,
            self.inner.backend.clone(),
        )?))
    }

    /// Resolves when a shard has failed, which only a defect can cause: the process should then drain and end, so that
    /// its supervisor starts it anew.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn failed(&self) {
        let mut alarm = self.inner.alarm.clone();
        // The sender lives on the shards' threads; when all have ended in good order there is nothing to tell.
        if alarm.wait_for(|raised| *raised).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Takes no new work, answers what was accepted, then stops shards and cores; at `deadline` gives up and leaks
    /// what the kernel still writes to.
    pub async fn drain(&self, deadline: Instant) -> DrainReport {
        let inner = &*self.inner;
        inner.draining.store(true, Ordering::Relaxed);
        let until = tokio::time::Instant::from_std(deadline);
        for shard in &inner.shards {
            // A shard that has failed has no inbox any more; one that is stuck is given up at the deadline.
            let _sent = tokio::time::timeout_at(until, shard.inbox.send(Message::Drain)).await;
        }
        for shard in &inner.shards {
            let _ended = tokio::time::timeout_at(until, shard.inbox.closed()).await;
        }
        inner.cores.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let mut threads = std::mem::take(&mut *inner.threads.lock().unwrap_or_else(PoisonError::into_inner));
        // Threads end within microseconds of their last read; joining them blocks, so it is looked at now and then.
        while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        threads.retain(|thread| !thread.is_finished());
        let left = |shard: &ShardHandle| {
            let queued = u64::try_from(shard.metrics.queued.load(Ordering::Relaxed)).unwrap_or(0);
            u64::from(shard.metrics.in_flight.load(Ordering::Relaxed)) + queued
        };
        let abandoned_reads = if threads.is_empty() {
            0
        } else {
            inner.shards.iter().map(left).sum()
        };
        DrainReport { abandoned_reads }
    }
}

impl Inner {
    fn shard_metrics(&self) -> Vec<Arc<ShardMetrics>> {
        self.shards
            .iter()
            .map(|shard| Arc::clone(&shard.metrics))
            .collect()
    }

    fn choose_shard(&self) -> Option<&ShardHandle> {
        if let (true, Some(core)) = (self.shards_on_cores, cores::current()) {
            return self.shards.get(core);
        }
        // The least loaded; among equals in turn, so that idle shards share.
        let first = self.next_shard.fetch_add(1, Ordering::Relaxed);
        let count = self.shards.len();
        (0..count)
            .filter_map(|index| self.shards.get((first.wrapping_add(index)) % count))
            .min_by_key(|shard| {
                let in_flight = i64::from(shard.metrics.in_flight.load(Ordering::Relaxed));
                shard.metrics.queued.load(Ordering::Relaxed) + in_flight
            })
    }
}

/// The core this thread is, if it is one.
pub fn current_core() -> Option<usize> {
    cores::current()
}
