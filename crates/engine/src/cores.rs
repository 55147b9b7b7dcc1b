//! Threads: a core's pinned thread with its runtime, and the shards beside it or on threads of their own.
//!
//! A core runs whatever the server spawns on it and, with uring on the same thread, its shard. Nothing here reads.
//! A shard that panics takes its inbox with it: its callers are answered `ShardFailed`, the failure is counted and
//! announced, and the memory the kernel may still write to is leaked (see `shard`).

use crate::backend::Backend;
use crate::backend::auto::AutoBackend;
use crate::backend::uring::{RingRuntime, UringBackend};
use crate::metrics::ShardMetrics;
use crate::shard::{Message, Shard};
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use tokio::sync::{mpsc, watch};

/// What is run on a core: made there, so that it need not be `Send`.
pub(crate) type Job = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

thread_local! {
    static CURRENT_CORE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The core this thread is, if it is one.
pub(crate) fn current() -> Option<usize> {
    CURRENT_CORE.get()
}

/// Tells the world that a shard has failed.
#[derive(Debug, Clone)]
pub(crate) struct Alarm(pub(crate) Arc<watch::Sender<bool>>);

/// What a ring is to have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingPlan {
    pub(crate) queue_depth: u32,
    pub(crate) eager_flush_reads: u32,
    /// Whether resident data is copied instead of read.
    pub(crate) auto: bool,
    /// Response memory to register: (address, bytes).
    pub(crate) register: Option<(usize, usize)>,
}

/// What a ring came to have: an error text when registration failed.
pub(crate) type RingOutcome = Option<String>;

/// A shard that is still to be given a thread.
pub(crate) struct Unplaced {
    pub(crate) inbox: mpsc::Receiver<Message>,
    pub(crate) metrics: Arc<ShardMetrics>,
}

fn pin_to(cpu: Option<usize>) {
    let Some(cpu) = cpu else { return };
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return;
    }
    set.set(cpu);
    if let Err(errno) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(cpu, %errno, "cannot pin a core to its CPU; it runs unpinned");
    }
}

/// Makes the ring's backend and registers the memory; a refusal is told, not fatal.
fn ring_backend(ring: &RingRuntime, plan: RingPlan) -> (UringBackend, RingOutcome) {
    let mut backend = ring.backend(plan.queue_depth);
    // Workers serve buffered misses only; as many as the depth can use, never the kernel's default of thousands.
    if let Err(error) = backend.cap_workers(plan.queue_depth.min(64)) {
        tracing::debug!(%error, "the kernel's worker threads cannot be capped");
    }
    let outcome = plan.register.and_then(|(base, bytes)| {
        backend
            .register_memory(base as *mut u8, bytes)
            .err()
            .map(|error| error.to_string())
    });
    (backend, outcome)
}

/// Runs a shard to its end, and raises the alarm if that end is a panic.
async fn supervise<B: Backend + 'static>(shard: Shard<B>, metrics: Arc<ShardMetrics>, alarm: Alarm) {
    if let Err(error) = tokio::task::spawn_local(shard).await {
        metrics.failures.fetch_add(1, Ordering::Relaxed);
        tracing::error!(shard = metrics.shard, %error, "a shard failed; its reads are answered with an error");
        alarm.0.send_replace(true);
    }
}

async fn run_jobs(mut jobs: mpsc::UnboundedReceiver<Job>) {
    while let Some(job) = jobs.recv().await {
        tokio::task::spawn_local(job());
    }
}

/// Starts a core's thread. With `ring`, its runtime drives a ring and the shard on it; without, a plain runtime.
///
/// # Errors
/// The thread, the runtime or the ring cannot be had.
pub(crate) fn start_core(
    core: usize,
    cpu: Option<usize>,
    jobs: mpsc::UnboundedReceiver<Job>,
    ring: Option<(RingPlan, Unplaced)>,
    alarm: Alarm,
) -> io::Result<(thread::JoinHandle<()>, RingOutcome)> {
    let (started, start) = std::sync::mpsc::sync_channel::<io::Result<RingOutcome>>(1);
    let handle = thread::Builder::new()
        .name(format!("rf-core-{core}"))
        .spawn(move || {
            pin_to(cpu);
            CURRENT_CORE.set(Some(core));
            match ring {
                Some((plan, shard)) => on_ring(plan, shard, Some(jobs), alarm, started),
                None => on_plain(started, async move { run_jobs(jobs).await }),
            }
        })?;
    let outcome = start
        .recv()
        .map_err(|_| io::Error::other("the thread ended while it started"))??;
    Ok((handle, outcome))
}

/// Starts a thread that has nothing but a shard on a ring.
///
/// # Errors
/// As [`start_core`].
pub(crate) fn start_ring_shard(
    plan: RingPlan,
    shard: Unplaced,
    alarm: Alarm,
) -> io::Result<(thread::JoinHandle<()>, RingOutcome)> {
    let (started, start) = std::sync::mpsc::sync_channel::<io::Result<RingOutcome>>(1);
    let name = format!("rf-shard-{}", shard.metrics.shard);
    let handle = thread::Builder::new()
        .name(name)
        .spawn(move || on_ring(plan, shard, None, alarm, started))?;
    let outcome = start
        .recv()
        .map_err(|_| io::Error::other("the thread ended while it started"))??;
    Ok((handle, outcome))
}

/// Starts a thread that has nothing but a shard on a blocking backend, which is made there.
///
/// # Errors
/// The thread or its runtime cannot be had, or `make` fails.
pub(crate) fn start_blocking_shard<B: Backend + 'static>(
    shard: Unplaced,
    make: impl FnOnce() -> io::Result<B> + Send + 'static,
    alarm: Alarm,
) -> io::Result<thread::JoinHandle<()>> {
    let (started, start) = std::sync::mpsc::sync_channel::<io::Result<RingOutcome>>(1);
    let name = format!("rf-shard-{}", shard.metrics.shard);
    let handle = thread::Builder::new().name(name).spawn(move || {
        let backend = match make() {
            Ok(backend) => backend,
            // The other side reads the error; if it is gone, nobody starts anything.
            Err(error) => return drop(started.send(Err(error))),
        };
        let metrics = Arc::clone(&shard.metrics);
        let shard = Shard::new(backend, shard.inbox, shard.metrics, 0);
        on_plain(started, supervise(shard, metrics, alarm));
    })?;
    start
        .recv()
        .map_err(|_| io::Error::other("the thread ended while it started"))??;
    Ok(handle)
}

fn on_ring(
    plan: RingPlan,
    shard: Unplaced,
    jobs: Option<mpsc::UnboundedReceiver<Job>>,
    alarm: Alarm,
    started: std::sync::mpsc::SyncSender<io::Result<RingOutcome>>,
) {
    let ring = match RingRuntime::new(plan.queue_depth) {
        Ok(ring) => ring,
        Err(error) => return drop(started.send(Err(error))),
    };
    let (backend, outcome) = ring_backend(&ring, plan);
    if started.send(Ok(outcome)).is_err() {
        return;
    }
    let Unplaced { inbox, metrics } = shard;
    let counted = Arc::clone(&metrics);
    if plan.auto {
        let shard = Shard::new(AutoBackend::new(backend), inbox, counted, plan.eager_flush_reads);
        ring.block_on(run_beside(supervise(shard, metrics, alarm), jobs));
    } else {
        let shard = Shard::new(backend, inbox, counted, plan.eager_flush_reads);
        ring.block_on(run_beside(supervise(shard, metrics, alarm), jobs));
    }
}

/// A shard and, on the same thread, whatever is sent to the core.
async fn run_beside(shard: impl Future<Output = ()> + 'static, jobs: Option<mpsc::UnboundedReceiver<Job>>) {
    let shard = tokio::task::spawn_local(shard);
    if let Some(jobs) = jobs {
        run_jobs(jobs).await;
    }
    // The runtime must not go while its ring still writes to memory (TRAPS 2): the shard ends drained. Its own panic
    // was reported by `supervise`, and then its memory is leaked, not freed.
    let _ended = shard.await;
}

fn on_plain(started: std::sync::mpsc::SyncSender<io::Result<RingOutcome>>, main: impl Future<Output = ()>) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return drop(started.send(Err(error))),
    };
    if started.send(Ok(None)).is_err() {
        return;
    }
    tokio::task::LocalSet::new().block_on(&runtime, main);
}
