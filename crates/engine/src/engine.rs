//! The engine's interface to the server: cores to run listeners on, and reads.

mod status;
mod switch;
mod ticket;

pub use self::status::{BackendStatus, ShardStatus, Totals};
pub use self::switch::Routes;
use self::switch::show;
use self::ticket::Answer;
pub use self::ticket::Ticket;
use crate::at_once::CoreReads;
use crate::backend::residency::Residency;
use crate::batch::Batch;
use crate::buffer::{Arena, PAGE_BYTES};
use crate::config::{BackendKind, EngineConfig};
use crate::cores::{self, Alarm, CoreCommand, Task};
use crate::dataset::Dataset;
use crate::error::{ReadError, Resource, ResponseMax};
use crate::metrics::{EngineCollector, MetricsRegistry, ShardMetrics};
use crate::plan;
use crate::planned_batch::PlannedBatch;
use crate::routing::{BackendRoute, RoutingTable};
use crate::shard::{Control, Mailbox, SendError};
use crate::share::{Account, Budget, CallerAccount, Charge, Refused, Share};
use crate::start::{self, Cores, ShardGroup, Sim, Starter};
use crate::sync::lock;
use arc_swap::ArcSwap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// Why the engine cannot start. The message names the cause and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StartError(pub String);

/// Options for submitting a batch.
#[derive(Debug, Clone, Default)]
pub struct SubmitOptions {
    /// A batch whose reads are not all started by then fails with `DeadlineExceeded`; the remaining reads are
    /// not made.
    pub deadline: Option<Instant>,
    /// The account to charge, which also determines when its reads get their turn.
    pub account: Option<Arc<Account>>,
}

/// The result of a drain.
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
    /// Budget of queued reads over all shards, from which callers take their shares.
    reads: Arc<Budget>,
    config: EngineConfig,
    routes: Arc<ArcSwap<RoutingTable>>,
    /// Held during a switch, so that only one runs at a time.
    switching: Mutex<()>,
    /// Every group that was started.
    groups: Mutex<Vec<Arc<ShardGroup>>>,
    metrics: Arc<MetricsRegistry>,
    cores: Mutex<Cores>,
    core_count: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    draining: AtomicBool,
    next_shard: AtomicUsize,
    /// Cloned for shards started later. A drain takes it, so that [`Engine::failed`] notices when all shards
    /// have ended.
    alarm_raised: Mutex<Option<Alarm>>,
    alarm: watch::Receiver<bool>,
}

/// A channel to a shard, and its counters.
pub(crate) struct ShardHandle {
    pub(crate) inbox: Mailbox,
    pub(crate) metrics: Arc<ShardMetrics>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("backend", &self.routes.load().common.status)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Probes the backend, reserves the memory, starts the cores and shards.
    ///
    /// # Errors
    /// io_uring is unavailable and `on_unavailable` is `Fail`; or a thread, the memory or a ring is refused.
    pub fn start(config: &EngineConfig) -> Result<Self, StartError> {
        let backend = start::choose(config, config.backend)
            .map_err(|error| StartError(format!("engine.backend: {error}")))?;
        Self::start_on(config, backend, None)
    }

    /// The backend that a start with `requested` would use on this host.
    ///
    /// # Errors
    /// The backend is unavailable, and falling back is not allowed.
    pub fn check_backend(config: &EngineConfig, requested: BackendKind) -> Result<BackendStatus, StartError> {
        start::choose(config, requested)
    }

    /// Starts an engine with one shard on the simulated backend of `control`, with `queue_depth` of
    /// `config.uring`.
    ///
    /// # Errors
    /// As [`Engine::start`].
    #[cfg(any(test, feature = "sim"))]
    pub fn start_sim(config: &EngineConfig, control: &crate::sim::SimControl) -> Result<Self, StartError> {
        let backend = BackendStatus::of(BackendKind::Sim, control.to_string());
        Self::start_on(config, backend, Some(control.clone()))
    }

    fn start_on(config: &EngineConfig, backend: BackendStatus, sim: Sim) -> Result<Self, StartError> {
        let arena = Arena::new(config.memory_budget_bytes, config.cores).map_err(|error| {
            StartError(format!(
                "engine.memory_budget: {} bytes cannot be reserved: {error}; ask for less",
                config.memory_budget_bytes
            ))
        })?;
        let (alarm_raised, alarm) = watch::channel(false);
        let alarm_raised = Alarm(Arc::new(alarm_raised));
        let metrics = Arc::new(MetricsRegistry::default());
        let (cores, mut threads) = start::cores(config, backend.backend)?;
        let mut starter = Starter {
            config,
            arena: &arena,
            alarm: alarm_raised.clone(),
            first_shard: 0,
            threads: Vec::new(),
            shards: Vec::new(),
        };
        let on_cores = starter.start(backend.backend, &cores, sim)?;
        let group = Arc::new(starter.finish(backend.backend, on_cores, &metrics, &mut threads));
        show(&group, &[], backend.backend);
        let routes = RoutingTable {
            common: BackendRoute::new(config, Arc::clone(&group), backend),
            own: Vec::new(),
        };
        Ok(Self {
            inner: Arc::new(Inner {
                arena,
                reads: Budget::new(config.queued_reads.into()),
                config: config.clone(),
                routes: Arc::new(ArcSwap::from_pointee(routes)),
                switching: Mutex::new(()),
                groups: Mutex::new(vec![group]),
                metrics,
                core_count: cores.commands.len(),
                cores: Mutex::new(cores),
                threads: Mutex::new(threads),
                draining: AtomicBool::new(false),
                next_shard: AtomicUsize::new(0),
                alarm_raised: Mutex::new(Some(alarm_raised)),
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

    /// Runs a future on a core. The future and what it spawns (`tokio::spawn`, `spawn_local`) stay on that
    /// thread, and batches submitted there go to that core's shard. Returns false if the core has stopped.
    pub fn spawn_on<F, Fut>(&self, core: usize, task: F) -> bool
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        let job: Task = Box::new(move || Box::pin(task()));
        let cores = lock(&self.inner.cores);
        let core = cores.commands.get(core);
        core.is_some_and(|core| core.send(CoreCommand::Task(job)).is_ok())
    }

    /// Queues a batch on the shard of the calling core (else the least loaded one) of the backend that serves its
    /// dataset now.
    ///
    /// # Errors
    /// At once: `Overloaded`, `Draining`, `ResponseTooLarge` for a batch of more bytes than a response or the
    /// share can ever hold.
    pub fn submit(&self, batch: Batch, options: SubmitOptions) -> Result<Ticket, ReadError> {
        let inner = &*self.inner;
        if inner.draining.load(Ordering::Relaxed) {
            return Err(ReadError::Draining);
        }
        let account = options.account.as_deref();
        let own = account.map_or(ResponseMax::of_any(u64::MAX), Account::response_max);
        let max = ResponseMax::of_any(self.response_bytes_max()).or_less(own);
        if batch.data_bytes() > max.bytes {
            return Err(ReadError::ResponseTooLarge {
                length: batch.data_bytes(),
                max,
            });
        }
        let routes = inner.routes.load();
        let route = routes.of(batch.dataset.name());
        let share = account.map(Account::memory);
        let mut residency = Residency::Ask;
        if let Some(core) = cores::current()
            && let Some(reads) = route.group.at_once.get(core)
        {
            match reads.fetch(
                &batch,
                route.status.backend,
                &inner.arena,
                share,
                options.deadline,
            ) {
                Ok(fetched) => {
                    let answer = Answer::Made(Some(fetched));
                    return Ok(Ticket { answer });
                }
                Err(known) => residency = known,
            }
        }
        let shard = inner.choose_shard(&route.group).ok_or(ReadError::ShardFailed)?;
        // Not `Overloaded`, which suggests a retry: this memory would never be available.
        let fits = |plan: &plan::Plan| {
            let pages = |bytes: u32| u64::from(bytes).next_multiple_of(PAGE_BYTES);
            u64::from(plan.scratch_bytes) <= self.response_bytes_max()
                && pages(plan.data_bytes) + pages(plan.scratch_bytes) <= own.bytes
        };
        // Planning is most of the cost of a refusal, so check for room first.
        let mut turn = inner.charge_reads(plan::expected_reads(&batch, route.rules), account)?;
        inner.arena.grants(batch.data_bytes(), share)?;
        let plan = plan::plan_within(&batch, route.rules, fits);
        if let (Some(turn), Some(share)) = (&mut turn, account.map(Account::reads)) {
            turn.resize(chargeable(plan.reads.len(), share))
                .map_err(too_many_reads)?;
        }
        let [buffer, scratch] = inner
            .arena
            .reserve_both([plan.data_bytes, plan.scratch_bytes], share)?;
        let reads = i64::try_from(plan.reads.len()).unwrap_or(i64::MAX);
        // A batch alone is always accepted; otherwise a limit below its size would refuse it forever.
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
        let work = PlannedBatch {
            backend: route.status.backend,
            residency,
            dataset,
            origin: account.map(|account| (account.caller(), account.id())),
            weight: account.map_or(1, |account| account.weight().get()),
            objects: (!objects.is_empty()).then(|| Arc::new(objects)),
            items,
            errors,
            plan,
            buffer,
            scratch,
            _reads: turn,
            accepted: Instant::now(),
            queue_ns: 0,
            deadline: options.deadline,
            reply,
        };
        match shard.inbox.deliver(work.boxed()) {
            Ok(()) => Ok(Ticket {
                answer: Answer::Awaited(answer),
            }),
            Err(SendError::Full) => refuse(ReadError::Overloaded {
                resource: Resource::QueuedReads,
            }),
            Err(SendError::Closed) => {
                let draining = inner.draining.load(Ordering::Relaxed);
                refuse(if draining {
                    ReadError::Draining
                } else {
                    ReadError::ShardFailed
                })
            }
        }
    }

    /// Exports a dataset's series, starting at 0: a rate over a counter that appears with its first read would miss
    /// that read.
    pub fn introduce(&self, dataset: &Dataset) {
        self.inner.metrics.introduce(dataset.name());
        let routes = self.inner.routes.load();
        let route = routes.of(dataset.name());
        show(&route.group, &[dataset.name().to_owned()], route.status.backend);
    }

    /// Makes shards release what they hold for datasets without other users (their entries in a ring's file
    /// table). Call it some time after a dataset was removed or replaced; the next call asks again where a
    /// shard was too busy.
    pub fn sweep(&self) {
        for group in self.inner.groups() {
            group.at_once.iter().for_each(CoreReads::sweep);
            for shard in &group.shards {
                // A full inbox, or a shard that has ended: the next call tries again.
                shard.inbox.try_command(Control::Sweep);
            }
        }
    }

    /// Makes shards with reads that wait release what nobody waits for any more, and start reads beside those that a disk does
    /// not answer. Call it about once a second.
    pub fn tend(&self) {
        for group in self.inner.groups() {
            let busy = group
                .shards
                .iter()
                .filter(|shard| shard.metrics.queued.load(Ordering::Relaxed) > 0);
            busy.for_each(|shard| shard.inbox.try_command(Control::Tend));
        }
    }

    /// Checks that every shard responds.
    ///
    /// # Errors
    /// The number of a shard that did not respond in time: it is stuck, or has failed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn signs_of_life(&self, within: Duration) -> Result<(), u32> {
        let until = tokio::time::Instant::now() + within;
        let mut asked = Vec::new();
        for group in self.inner.groups() {
            for shard in &group.shards {
                let (reply, answer) = oneshot::channel();
                let sent = tokio::time::timeout_at(until, shard.inbox.command(Control::Beat(reply))).await;
                match sent {
                    Ok(Ok(())) => asked.push((shard.metrics.shard, answer)),
                    Ok(Err(_)) | Err(_) => return Err(shard.metrics.shard),
                }
            }
        }
        for (shard, answer) in asked {
            match tokio::time::timeout_at(until, answer).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Err(shard),
            }
        }
        Ok(())
    }

    /// The largest response that the memory allows: a quarter of it, so that one request leaves room for
    /// others and for its own scratch memory, which is at most as large.
    pub fn response_bytes_max(&self) -> u64 {
        (self.inner.arena.budget_bytes() / 4).clamp(1, 1 << 31)
    }

    /// A new caller's account; `id` must be unique.
    pub fn caller_account(&self, id: u64) -> Arc<CallerAccount> {
        CallerAccount::new(id, self.inner.arena.budget(), &self.inner.reads)
    }

    /// Registers the engine's metrics.
    ///
    /// # Errors
    /// A name is taken.
    pub fn register_metrics(&self, registry: &prometheus::Registry) -> Result<(), prometheus::Error> {
        self.inner.arena.register_metrics(registry)?;
        let metrics = Arc::clone(&self.inner.metrics);
        let routes = Arc::downgrade(&self.inner.routes);
        registry.register(Box::new(EngineCollector::new(metrics, routes)?))
    }

    /// Resolves when a shard has failed, which only a defect can cause: the process should then drain and
    /// exit, so that its supervisor restarts it.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn failed(&self) {
        let mut alarm = self.inner.alarm.clone();
        // The shards' threads hold the senders; if all have ended normally, this never resolves.
        if alarm.wait_for(|raised| *raised).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Refuses new work, completes what was accepted, then stops shards and cores; at `deadline` aborts, and
    /// leaks memory that the kernel may still write to.
    pub async fn drain(&self, deadline: Instant) -> DrainReport {
        let inner = &*self.inner;
        inner.draining.store(true, Ordering::Relaxed);
        let until = tokio::time::Instant::from_std(deadline);
        // No switch starts after this; a running one completes first.
        drop(lock(&inner.alarm_raised).take());
        while matches!(inner.switching.try_lock(), Err(TryLockError::WouldBlock)) && Instant::now() < deadline
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let groups = inner.groups();
        let shards = || groups.iter().flat_map(|group| &group.shards);
        for shard in shards() {
            // A failed shard has no inbox; a stuck one is abandoned at the deadline.
            let _sent = tokio::time::timeout_at(until, shard.inbox.command(Control::Drain)).await;
        }
        for shard in shards() {
            let _ended = tokio::time::timeout_at(until, shard.inbox.closed()).await;
        }
        lock(&inner.cores).commands.clear();
        let mut threads = std::mem::take(&mut *lock(&inner.threads));
        // Threads end within microseconds of their last read; joining blocks, so poll them.
        while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        threads.retain(|thread| !thread.is_finished());
        let left = |shard: &ShardHandle| {
            u64::from(shard.metrics.in_flight.load(Ordering::Relaxed)) + shard.metrics.queued()
        };
        let abandoned_reads = if threads.is_empty() {
            0
        } else {
            shards().map(left).sum()
        };
        DrainReport { abandoned_reads }
    }
}

/// The charge for this many reads: at most a whole share, so that a larger batch is accepted when it is
/// alone.
fn chargeable(reads: usize, share: &Share) -> u64 {
    u64::try_from(reads).unwrap_or(u64::MAX).min(share.most())
}

fn too_many_reads(refused: Refused) -> ReadError {
    ReadError::Overloaded {
        resource: match refused {
            Refused::Budget => Resource::QueuedReads,
            Refused::Caller | Refused::CallerLimit | Refused::Connection => Resource::CallerReads,
        },
    }
}

impl Inner {
    /// Charges a caller for its reads until they complete. A batch larger than any share is accepted alone.
    fn charge_reads(&self, reads: usize, account: Option<&Account>) -> Result<Option<Charge>, ReadError> {
        let Some(share) = account.map(Account::reads) else {
            return Ok(None);
        };
        let charged = share.charge(chargeable(reads, share)).map_err(too_many_reads)?;
        Ok(Some(charged))
    }

    fn groups(&self) -> Vec<Arc<ShardGroup>> {
        lock(&self.groups).clone()
    }

    fn choose_shard<'a>(&self, group: &'a ShardGroup) -> Option<&'a ShardHandle> {
        if let (true, Some(core)) = (group.on_cores, cores::current()) {
            return group.shards.get(core);
        }
        // The least loaded shard; round robin among equals, so that idle shards share.
        let first = self.next_shard.fetch_add(1, Ordering::Relaxed);
        let count = group.shards.len();
        (0..count)
            .filter_map(|index| group.shards.get((first.wrapping_add(index)) % count))
            .min_by_key(|shard| {
                let in_flight = i64::from(shard.metrics.in_flight.load(Ordering::Relaxed));
                shard.metrics.queued.load(Ordering::Relaxed) + in_flight
            })
    }
}
