//! Starting an engine: which backend it is to be, then its cores and shards.
//!
//! What was started before a failure ends by itself, since its senders are dropped.

use crate::backend::probe::{self, UringRefusal};
use crate::backend::{mmap::MmapBackend, pread::PreadBackend};
use crate::buffer::Arena;
use crate::config::{BackendKind, EngineConfig, OnUnavailable, Placement};
use crate::cores::{self, Alarm, Job, RingPlan, Unplaced};
use crate::engine::{BackendStatus, ShardHandle, StartError};
use crate::metrics::ShardMetrics;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::sync::mpsc;

/// Batches an inbox holds; the bound on queued *reads* is the finer one.
const INBOX_BATCHES: usize = 4096;

/// Reads that an mmap shard announces ahead of its copying: 64 a batch gave 75k reads/s on one thread, 256 gave 78k
/// (MEASURED).
const MMAP_DEPTH: u32 = 256;

/// Chooses the backend: the one asked for, or the fallback with the reason.
pub(crate) fn choose(config: &EngineConfig) -> Result<BackendStatus, StartError> {
    let requested = config.backend;
    let status = |backend, reason| BackendStatus {
        backend,
        requested,
        reason,
    };
    if !requested.uses_ring() {
        return Ok(status(requested, "chosen by configuration".to_owned()));
    }
    let decide = |refusal: UringRefusal| match config.on_unavailable {
        OnUnavailable::Mmap if refusal.may_fall_back() => Ok(status(BackendKind::Mmap, refusal.to_string())),
        OnUnavailable::Mmap | OnUnavailable::Fail => {
            Err(StartError(format!("engine.backend: {requested}: {refusal}")))
        }
    };
    match probe::probe() {
        Ok(facts) => Ok(status(
            requested,
            format!("io_uring works here (kernel {})", facts.kernel_release),
        )),
        Err(refusal) => decide(refusal),
    }
}

/// Starts cores and shards; on an error what was started ends by itself, since its senders are dropped.
pub(crate) struct Starter<'a> {
    pub(crate) config: &'a EngineConfig,
    pub(crate) arena: &'a Arena,
    pub(crate) alarm: Alarm,
    pub(crate) threads: Vec<JoinHandle<()>>,
    pub(crate) shards: Vec<ShardHandle>,
    pub(crate) sim: Sim,
}

#[cfg(any(test, feature = "sim"))]
pub(crate) type Sim = Option<crate::sim::SimControl>;
#[cfg(not(any(test, feature = "sim")))]
pub(crate) type Sim = Option<std::convert::Infallible>;

impl Starter<'_> {
    pub(crate) fn start(
        &mut self,
        backend: BackendKind,
    ) -> Result<Vec<mpsc::UnboundedSender<Job>>, StartError> {
        let cores = self.config.cores.max(1);
        room_for_runtimes(cores)
            .map_err(|error| StartError(format!("{cores} cores cannot start: {error}{}", remedy(&error))))?;
        let cpus = crate::cpus::usable_cpus();
        let same_thread = backend.uses_ring() && self.config.uring.placement == Placement::SameThread;
        let mut senders = Vec::new();
        for core in 0..cores {
            let index = core as usize;
            let (sender, jobs) = mpsc::unbounded_channel();
            let cpu = if self.config.pin {
                cpus.get(index % cpus.len().max(1)).copied()
            } else {
                None
            };
            let ring = same_thread.then(|| {
                (
                    self.ring_plan(backend),
                    self.shard(core, backend, self.ring_plan(backend).queue_depth),
                )
            });
            let (thread, outcome) =
                cores::start_core(index, cpu, jobs, ring, self.alarm.clone()).map_err(|error| {
                    StartError(format!("core {core} cannot start: {error}{}", remedy(&error)))
                })?;
            Self::report(core, outcome);
            self.threads.push(thread);
            senders.push(sender);
        }
        match backend {
            BackendKind::Uring | BackendKind::Auto if same_thread => {}
            BackendKind::Uring | BackendKind::Auto => {
                for number in 0..cores {
                    let plan = self.ring_plan(backend);
                    let shard = self.shard(number, backend, plan.queue_depth);
                    let (thread, outcome) = cores::start_ring_shard(plan, shard, self.alarm.clone())
                        .map_err(|error| {
                            StartError(format!("ring {number} cannot start: {error}{}", remedy(&error)))
                        })?;
                    Self::report(number, outcome);
                    self.threads.push(thread);
                }
            }
            BackendKind::Mmap => {
                let announce = self.config.mmap.announce;
                for number in 0..self.config.mmap.threads.max(1) {
                    let shard = self.shard(number, backend, MMAP_DEPTH);
                    self.blocking(shard, move || Ok(MmapBackend::new(announce)))?;
                }
            }
            BackendKind::Pread => {
                let threads = self.config.pread.threads.max(1);
                let shard = self.shard(0, backend, threads);
                self.blocking(shard, move || PreadBackend::new(threads))?;
            }
            BackendKind::Sim => match self.sim.take() {
                #[cfg(any(test, feature = "sim"))]
                Some(control) => {
                    let shard = self.shard(0, backend, self.config.uring.queue_depth);
                    self.blocking(shard, move || Ok(crate::backend::sim::SimBackend::new(&control)))?;
                }
                #[cfg(not(any(test, feature = "sim")))]
                Some(never) => match never {},
                None => {
                    return Err(StartError(
                        "engine.backend: sim is for tests; choose uring, mmap, auto or pread".to_owned(),
                    ));
                }
            },
        }
        Ok(senders)
    }

    fn blocking<B: crate::backend::Backend + 'static>(
        &mut self,
        shard: Unplaced,
        make: impl FnOnce() -> std::io::Result<B> + Send + 'static,
    ) -> Result<(), StartError> {
        let number = shard.metrics.shard;
        let thread = cores::start_blocking_shard(shard, make, self.alarm.clone())
            .map_err(|error| StartError(format!("shard {number} cannot start: {error}{}", remedy(&error))))?;
        self.threads.push(thread);
        Ok(())
    }

    fn shard(&mut self, number: u32, backend: BackendKind, depth: u32) -> Unplaced {
        let (sender, inbox) = mpsc::channel(INBOX_BATCHES);
        let metrics = ShardMetrics::new(number, backend, depth);
        self.shards.push(ShardHandle {
            inbox: sender,
            metrics: Arc::clone(&metrics),
        });
        Unplaced { inbox, metrics }
    }

    /// The depth of one ring: what was asked for, cut so that all rings together stay below the device's tags, since
    /// io_uring_enter blocks when they run out (TRAPS 15). Worked: 256 tags, 2 rings: (256 - 16) / 2 = 120 each.
    fn ring_plan(&self, backend: BackendKind) -> RingPlan {
        let rings = self.config.cores.max(1);
        let uring = &self.config.uring;
        let queue_depth = match self.config.device_tags {
            Some(tags) => uring.queue_depth.min(((tags - tags / 16) / rings).max(1)),
            None => uring.queue_depth,
        };
        let (base, bytes) = self.arena.region();
        RingPlan {
            queue_depth: queue_depth.max(1),
            eager_flush_reads: uring.eager_flush_reads,
            auto: backend == BackendKind::Auto,
            register: uring.registered_buffers.then_some((base as usize, bytes)),
        }
    }

    fn report(ring: u32, outcome: cores::RingOutcome) {
        if let Some(error) = outcome {
            tracing::warn!(
                ring,
                %error,
                "the response memory is not registered with the ring; reads go on without (raise RLIMIT_MEMLOCK to \
                 engine.memory_budget, or set engine.uring.registered_buffers: false)"
            );
        }
    }
}

/// Descriptors of one runtime: epoll, its waker, the signals' pipe, and a ring with its event.
const RUNTIME_DESCRIPTORS: u32 = 6;

/// Finds out whether the runtimes can have their descriptors: tokio panics where it cannot have one for its signals.
/// One runtime more than cores: the daemon's own.
fn room_for_runtimes(cores: u32) -> std::io::Result<()> {
    let held: std::io::Result<Vec<_>> = (0..cores.saturating_add(1).saturating_mul(RUNTIME_DESCRIPTORS))
        .map(|_| std::fs::File::open("/dev/null"))
        .collect();
    held.map(drop)
}

fn remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise the open-file limit (ulimit -n)",
        Some(libc::ENOMEM) => "; raise RLIMIT_MEMLOCK (ulimit -l), or lower engine.uring.queue_depth",
        Some(libc::EAGAIN) => "; raise the limit on threads (ulimit -u, or the cgroup's pids.max)",
        Some(_) | None => "",
    }
}
