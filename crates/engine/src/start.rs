//! Starts cores and shards, at the engine's start or for a switch, and chooses the backend.
//!
//! If a step fails, what was already started ends by itself, since its senders are dropped.

use crate::at_once::CoreReads;
use crate::backend::probe::{self, UringFacts};
use crate::backend::{mmap::MmapBackend, pread::PreadBackend};
use crate::buffer::Arena;
use crate::config::{BackendKind, EngineConfig, OnUnavailable, Placement};
use crate::cores::{self, Alarm, CoreCommand, RingConfig, UnplacedShard};
use crate::engine::{BackendStatus, ShardHandle, StartError};
use crate::metrics::{MetricsRegistry, ShardMetrics};
use rustix::event::{EventfdFlags, eventfd};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc;

/// Reads that an mmap shard announces ahead of copying: 64 a batch gave 75k reads/s on one thread, 256 gave 78k
/// (MEASURED).
const MMAP_DEPTH: u32 = 256;

/// Chooses the backend: `requested`, or the fallback with the reason. The caller knows which key requested it.
pub(crate) fn choose(config: &EngineConfig, requested: BackendKind) -> Result<BackendStatus, StartError> {
    if !requested.uses_ring() {
        return Ok(BackendStatus::of(requested, "chosen by configuration"));
    }
    match probe::probe() {
        Ok(facts) => Ok(BackendStatus::of(requested, works(&facts))),
        Err(refusal) if config.on_unavailable == OnUnavailable::Mmap && refusal.may_fall_back() => {
            Ok(BackendStatus {
                requested,
                ..BackendStatus::of(BackendKind::Mmap, refusal.to_string())
            })
        }
        Err(refusal) => Err(StartError(format!("{requested}: {refusal}"))),
    }
}

/// The status of a ring's backend whose shards run: a probe would take a descriptor and memory that the switch does not.
pub(crate) fn admit_running(requested: BackendKind) -> BackendStatus {
    BackendStatus::of(requested, "switched while running; its rings ran already")
}

/// Whether `requested` is available for a switch, with the reason. Never falls back.
pub(crate) fn admit(requested: BackendKind) -> Result<BackendStatus, StartError> {
    let mut reason = "switched while running".to_owned();
    if requested.uses_ring() {
        let probed = probe::probe();
        let facts = probed.map_err(|refusal| StartError(format!("backend {requested}: {refusal}")))?;
        reason = format!("{reason}; {}", works(&facts));
    }
    Ok(BackendStatus::of(requested, reason))
}

fn works(facts: &UringFacts) -> String {
    format!("io_uring works here (kernel {})", facts.kernel_release)
}

/// Starts the cores. Each has a ring if one is needed now, or may be for a later switch (ADR 0010).
pub(crate) fn cores(
    config: &EngineConfig,
    backend: BackendKind,
) -> Result<(Cores, Vec<JoinHandle<()>>), StartError> {
    let count = config.cores.max(1);
    room_for_runtimes(count)
        .map_err(|error| StartError(format!("{count} cores cannot start: {error}{}", remedy(&error))))?;
    let cpus = if config.pin { cpus_to_pin() } else { Vec::new() };
    let wanted = config.uring.placement == Placement::SameThread;
    let needed = wanted && backend.uses_ring();
    let possible =
        wanted && matches!(backend, BackendKind::Mmap | BackendKind::Pread) && probe::probe().is_ok();
    let entries = (needed || possible).then(|| config.ring_depth());
    let start = |entries: Option<u32>| {
        let mut cores = Cores {
            rings: entries.is_some(),
            commands: Vec::new(),
        };
        let mut threads = Vec::new();
        for index in 0..count as usize {
            let (sender, commands) = mpsc::unbounded_channel();
            let cpu = cpus.get(index % cpus.len().max(1)).copied();
            let thread = cores::start_core(index, cpu, commands, entries).map_err(|error| {
                StartError(format!("core {index} cannot start: {error}{}", remedy(&error)))
            })?;
            threads.push(thread);
            cores.commands.push(sender);
        }
        Ok((cores, threads))
    };
    start(entries).or_else(|error: StartError| {
        if needed {
            return Err(error);
        }
        tracing::info!(%error, "the cores start without rings; a switch to a ring gives its shards threads of their own");
        start(None)
    })
}

/// The CPUs to pin cores to; `None` leaves the placement to the scheduler.
fn cpus_to_pin() -> Vec<usize> {
    ringfetch_host::cpus::cpus_to_pin().unwrap_or_else(|| {
        tracing::info!(
            "cores are not pinned: a CPU quota, not a cpuset, limits this process, and other containers with a quota would \
             pin to the same CPUs"
        );
        Vec::new()
    })
}

/// Channels to the cores.
#[derive(Clone)]
pub(crate) struct Cores {
    /// Whether each core has a ring.
    pub(crate) rings: bool,
    pub(crate) commands: Vec<mpsc::UnboundedSender<CoreCommand>>,
}

/// The shards of a backend: one per ring, or one per blocking thread.
pub(crate) struct ShardGroup {
    /// `Uring` means a ring's shards, which also serve `auto`.
    pub(crate) backend: BackendKind,
    pub(crate) shards: Vec<ShardHandle>,
    /// Whether shard N runs on core N.
    pub(crate) on_cores: bool,
    /// For each core of `mmap` and `auto`: answers small requests whose bytes are resident.
    pub(crate) at_once: Vec<CoreReads>,
}

impl ShardGroup {
    /// Whether its shards serve a backend.
    pub(crate) fn serves(&self, backend: BackendKind) -> bool {
        self.backend == backend || (self.backend.uses_ring() && backend.uses_ring())
    }
}

/// Starts a group of shards; on an error the shards already started end by themselves, since their senders
/// are dropped.
pub(crate) struct Starter<'a> {
    pub(crate) config: &'a EngineConfig,
    pub(crate) arena: &'a Arena,
    pub(crate) alarm: Alarm,
    /// The number of the first shard.
    pub(crate) first_shard: u32,
    pub(crate) threads: Vec<JoinHandle<()>>,
    pub(crate) shards: Vec<ShardHandle>,
}

#[cfg(any(test, feature = "sim"))]
pub(crate) type Sim = Option<crate::sim::SimControl>;
#[cfg(not(any(test, feature = "sim")))]
pub(crate) type Sim = Option<std::convert::Infallible>;

/// Longest wait for a core to run a shard, which takes milliseconds unless memory is registered.
const PLACING_MAX: Duration = Duration::from_secs(10);

/// Registering memory makes all of it present: 0.3 GB/s were seen where a virtual machine's host had to find
/// it first.
const REGISTERED_BYTES_PER_S: u64 = 128 << 20;

impl Starter<'_> {
    /// Starts the shards that serve `backend`, and returns whether shard N is on core N.
    pub(crate) fn start(
        &mut self,
        backend: BackendKind,
        cores: &Cores,
        sim: Sim,
    ) -> Result<bool, StartError> {
        let on_cores = backend.uses_ring() && cores.rings;
        match backend {
            BackendKind::Uring | BackendKind::Auto => {
                let plan = self.ring_plan();
                for (number, core) in cores.commands.iter().enumerate() {
                    let shard = self.shard(backend, plan.queue_depth);
                    let alarm = self.alarm.clone();
                    let outcome = if on_cores {
                        place(core, plan, shard, alarm)
                    } else {
                        cores::start_ring_shard(plan, shard, alarm).map(|(thread, outcome)| {
                            self.threads.push(thread);
                            outcome
                        })
                    };
                    let outcome = outcome.map_err(|error| {
                        StartError(format!("ring {number} cannot start: {error}{}", remedy(&error)))
                    })?;
                    Self::report(number, outcome);
                }
            }
            BackendKind::Mmap => {
                let announce = self.config.mmap.announce;
                for _ in 0..self.config.mmap.threads.max(1) {
                    let shard = self.shard(backend, MMAP_DEPTH);
                    self.blocking(shard, move || Ok(MmapBackend::new(announce)))?;
                }
            }
            BackendKind::Pread => {
                let threads = self.config.pread.threads.max(1);
                let shard = self.shard(backend, threads);
                self.blocking(shard, move || PreadBackend::new(threads))?;
            }
            BackendKind::Sim => match sim {
                #[cfg(any(test, feature = "sim"))]
                Some(control) => {
                    let shard = self.shard(backend, self.config.uring.queue_depth);
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
        Ok(on_cores)
    }

    /// Registers the started shards as a group: scrapes include them, and the engine waits for them when it
    /// ends.
    pub(crate) fn finish(
        self,
        backend: BackendKind,
        on_cores: bool,
        metrics: &MetricsRegistry,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> ShardGroup {
        metrics.add_shards(self.shards.iter().map(|shard| Arc::clone(&shard.metrics)));
        threads.extend(self.threads);
        // The shards of a ring serve `auto` too, now or later.
        let copies = backend == BackendKind::Mmap || backend.uses_ring();
        let cores = if copies { self.config.cores.max(1) } else { 0 };
        let at_once = self.shards.iter().cycle().zip(0..cores).map(|(shard, _)| {
            let counted = ShardMetrics::new(shard.metrics.shard, backend, 0);
            metrics.add_core(Arc::clone(&counted));
            CoreReads::new(counted)
        });
        ShardGroup {
            at_once: at_once.collect(),
            backend: if backend.uses_ring() {
                BackendKind::Uring
            } else {
                backend
            },
            shards: self.shards,
            on_cores,
        }
    }

    fn blocking<B: crate::backend::Backend + 'static>(
        &mut self,
        shard: UnplacedShard,
        make: impl FnOnce() -> std::io::Result<B> + Send + 'static,
    ) -> Result<(), StartError> {
        let number = shard.metrics.shard;
        let thread = cores::start_blocking_shard(shard, make, self.alarm.clone())
            .map_err(|error| StartError(format!("shard {number} cannot start: {error}{}", remedy(&error))))?;
        self.threads.push(thread);
        Ok(())
    }

    fn shard(&mut self, backend: BackendKind, depth: u32) -> UnplacedShard {
        let (mailbox, inbox) = crate::shard::inbox();
        let number = self.first_shard + u32::try_from(self.shards.len()).unwrap_or(u32::MAX);
        let metrics = ShardMetrics::new(number, backend, depth);
        self.shards.push(ShardHandle {
            inbox: mailbox,
            metrics: Arc::clone(&metrics),
        });
        UnplacedShard { inbox, metrics }
    }

    fn ring_plan(&self) -> RingConfig {
        let (base, bytes) = self.arena.region();
        RingConfig {
            queue_depth: self.config.ring_depth(),
            eager_flush_reads: self.config.uring.eager_flush_reads,
            register: self
                .config
                .uring
                .registered_buffers
                .then_some((base as usize, bytes)),
        }
    }

    fn report(ring: usize, outcome: cores::RegistrationOutcome) {
        let Some(error) = outcome else { return };
        // io_uring_register(2): over RLIMIT_MEMLOCK. A limit does not help against other errors, such as a
        // filter's EPERM.
        let remedy = if error.raw_os_error() == Some(libc::ENOMEM) {
            "raise RLIMIT_MEMLOCK to engine.memory_budget for each ring, or set engine.uring.registered_buffers: false"
        } else {
            "set engine.uring.registered_buffers: false, or allow io_uring_register"
        };
        tracing::warn!(
            ring,
            %error,
            remedy,
            "the response memory is not registered with the ring; reads continue unregistered"
        );
    }
}

/// Puts a shard on a core that has a ring.
fn place(
    core: &mpsc::UnboundedSender<CoreCommand>,
    plan: RingConfig,
    shard: UnplacedShard,
    alarm: Alarm,
) -> std::io::Result<cores::RegistrationOutcome> {
    let registered_bytes = plan.register.map_or(0, |(_, bytes)| bytes as u64);
    let within = PLACING_MAX + Duration::from_secs(registered_bytes / REGISTERED_BYTES_PER_S);
    let (placed, answer) = std::sync::mpsc::sync_channel(1);
    let command = CoreCommand::Shard {
        plan,
        shard,
        alarm,
        placed,
    };
    let gone = || std::io::Error::other("the core has stopped");
    core.send(command).map_err(|_| gone())?;
    answer.recv_timeout(within).map_err(|error| match error {
        RecvTimeoutError::Timeout => std::io::Error::other(format!(
            "its core did not answer within {} s, in which {registered_bytes} bytes of response memory were to be \
             registered: lower engine.memory_budget, or set engine.uring.registered_buffers: false",
            within.as_secs()
        )),
        RecvTimeoutError::Disconnected => gone(),
    })?
}

/// Descriptors of one runtime: epoll, its waker, the signal pipe, and a ring with its eventfd.
const RUNTIME_DESCRIPTORS: u32 = 6;

/// Checks that the runtimes can get their descriptors, since tokio panics if it cannot get one for its
/// signals. One runtime more than cores: the daemon's own.
fn room_for_runtimes(cores: u32) -> std::io::Result<()> {
    // They need no file to open: /dev may be empty.
    let held: Result<Vec<_>, _> = (0..cores.saturating_add(1).saturating_mul(RUNTIME_DESCRIPTORS))
        .map(|_| eventfd(0, EventfdFlags::CLOEXEC))
        .collect();
    Ok(held.map(drop)?)
}

fn remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise the open-file limit (ulimit -n)",
        Some(libc::ENOMEM) => "; raise RLIMIT_MEMLOCK (ulimit -l), or lower engine.uring.queue_depth",
        Some(libc::EAGAIN) => {
            "; raise the limit on threads (ulimit -u, or the cgroup's pids.max), or on address space (ulimit -v)"
        }
        Some(_) | None => "",
    }
}
