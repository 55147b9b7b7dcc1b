//! Threads: pinned cores with their runtimes, and threads of shards.
//!
//! A core runs what the server spawns on it and, if it has a ring, the shard that reads through it, started
//! when it is first needed. A ring without a shard costs nothing. If a shard panics, its inbox is dropped:
//! its callers get `ShardFailed`, the failure is counted and announced, and memory that the kernel may still
//! write to is leaked (see `shard`).

use crate::backend::Backend;
use crate::backend::auto::AutoBackend;
use crate::backend::uring::{RingHandle, RingRuntime, UringBackend};
pub use crate::backend::uring::{count_parks, parks, submit_left};
use crate::metrics::ShardMetrics;
use crate::shard::{Inbox, Shard};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Context;
use std::thread;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// A task for a core. Its future is created there, so it need not be `Send`.
pub(crate) type Task = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

pub(crate) enum CoreCommand {
    /// Run this concurrently.
    Task(Task),
    /// Start a shard on the core's ring, and report the result.
    Shard {
        plan: RingConfig,
        shard: UnplacedShard,
        alarm: Alarm,
        placed: std::sync::mpsc::SyncSender<io::Result<RegistrationOutcome>>,
    },
}

thread_local! {
    static CURRENT_CORE: Cell<Option<usize>> = const { Cell::new(None) };
    static IS_SHARED: Cell<bool> = const { Cell::new(false) };
    static CHARGES: RefCell<Vec<(u64, Duration)>> = const { RefCell::new(Vec::new()) };
}

/// Most callers (`share::Account::caller`) whose charges are kept until they are taken.
const CHARGED_MAX: usize = 256;

/// Notes whether tasks of several callers run on this core. While they do, its shard charges callers for its time, and has
/// shorter turns, also if only one of them has reads there: another's may be answered without the shard.
pub fn note_shared(is_shared: bool) {
    IS_SHARED.set(is_shared);
}

/// Whether tasks of several callers run on this core, so that a long poll delays others.
pub fn is_shared() -> bool {
    IS_SHARED.get()
}

/// Most that one poll is charged: longer polls were mostly interrupted by another process.
pub const CHARGED_POLL_MAX: Duration = Duration::from_micros(200);

/// Charges a caller for time that this core's shard spent on its reads.
pub fn charge(caller: u64, time: Duration) {
    CHARGES.with_borrow_mut(|charges| {
        if let Some((_, charged)) = charges.iter_mut().find(|(charged, _)| *charged == caller) {
            *charged += time;
        } else if charges.len() < CHARGED_MAX {
            charges.push((caller, time));
        }
    });
}

/// Passes on what callers were charged since the last call.
pub fn take_charges(mut take: impl FnMut(u64, Duration)) {
    CHARGES.with_borrow_mut(|charges| charges.drain(..).for_each(|(caller, time)| take(caller, time)));
}

/// The number of the calling core, from 0, if it is one.
pub fn current() -> Option<usize> {
    CURRENT_CORE.get()
}

/// Ends the turn of a task on a core: it is polled again after all other ready tasks, and after the core has
/// polled its sockets and its ring. A task that only wakes itself is polled up to 61 times before that: a few
/// connections that always have data to send would delay all others by 10 ms.
pub fn give_way(cx: &mut Context<'_>) {
    submit_left();
    // The first poll hands the waker to the runtime.
    let _given = pin!(tokio::task::yield_now()).poll(cx);
}

/// Announces that a shard has failed.
#[derive(Debug, Clone)]
pub(crate) struct Alarm(pub(crate) Arc<watch::Sender<bool>>);

/// What to set up for a ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingConfig {
    pub(crate) queue_depth: u32,
    pub(crate) eager_flush_reads: u32,
    /// Response memory to register: (address, bytes).
    pub(crate) register: Option<(usize, usize)>,
}

/// The result of setting up a ring: the error, if registration failed.
pub(crate) type RegistrationOutcome = Option<io::Error>;

/// A shard that has no thread yet.
pub(crate) struct UnplacedShard {
    pub(crate) inbox: Inbox,
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

/// Creates the ring's backend and registers the memory. Returns a failure to register, which is not fatal.
fn ring_backend(ring: RingHandle, plan: RingConfig) -> (UringBackend, RegistrationOutcome) {
    let mut backend = ring.backend(plan.queue_depth);
    let outcome = plan
        .register
        // Without its descriptor, which was logged, nothing can be registered.
        .filter(|_| ring.is_known())
        .and_then(|(base, bytes)| backend.register_memory(base as *mut u8, bytes).err());
    (backend, outcome)
}

/// Runs a shard to its end; announces a panic.
async fn supervise<B: Backend + 'static>(shard: Shard<B>, metrics: Arc<ShardMetrics>, alarm: Alarm) {
    if let Err(error) = tokio::task::spawn_local(shard).await {
        metrics.failures.fetch_add(1, Ordering::Relaxed);
        tracing::error!(shard = metrics.shard, %error, "a shard failed; its reads fail with an error");
        alarm.0.send_replace(true);
    }
}

/// Runs a core's commands until all senders are dropped, and then its shards to their end.
async fn run_commands(mut commands: mpsc::UnboundedReceiver<CoreCommand>, ring: Option<RingHandle>) {
    let mut shards = Vec::new();
    while let Some(command) = commands.recv().await {
        match command {
            CoreCommand::Task(task) => drop(tokio::task::spawn_local(task())),
            CoreCommand::Shard {
                plan,
                shard,
                alarm,
                placed,
            } => {
                let Some(ring) = ring else {
                    // The caller may have stopped waiting; then the shard's inbox is closed as well.
                    drop(placed.send(Err(io::Error::other("the core has no ring"))));
                    continue;
                };
                // A previous shard belongs to a group that did not start: its senders are dropped, and it
                // releases the ring's registrations when it ends.
                for earlier in shards.drain(..) {
                    let _ended = earlier.await;
                }
                let (backend, outcome) = ring_backend(ring, plan);
                if placed.send(Ok(outcome)).is_ok() {
                    shards.push(tokio::task::spawn_local(on_backend(backend, plan, shard, alarm)));
                }
            }
        }
    }
    // The runtime must outlive writes of its ring (TRAPS 2): shards end drained. If one panicked, `supervise`
    // has reported it, and its memory is leaked, not freed.
    for shard in shards {
        let _ended = shard.await;
    }
}

async fn on_backend(backend: UringBackend, plan: RingConfig, shard: UnplacedShard, alarm: Alarm) {
    let UnplacedShard { inbox, metrics } = shard;
    let counted = Arc::clone(&metrics);
    let shard = Shard::new(AutoBackend::new(backend), inbox, counted, plan.eager_flush_reads);
    supervise(shard, metrics, alarm).await;
}

/// Tells whoever starts a thread whether it has started.
type Started = std::sync::mpsc::SyncSender<io::Result<RegistrationOutcome>>;

/// Runs `body` on a thread of this name, and waits until it has reported that it started, or failed.
fn start_thread(
    name: String,
    body: impl FnOnce(&Started) -> io::Result<()> + Send + 'static,
) -> io::Result<(thread::JoinHandle<()>, RegistrationOutcome)> {
    let (started, start) = std::sync::mpsc::sync_channel(1);
    let handle = thread::Builder::new().name(name).spawn(move || {
        if let Err(error) = body(&started) {
            // If the receiver is gone, the start was abandoned.
            drop(started.send(Err(error)));
        }
    })?;
    let outcome = start
        .recv()
        .map_err(|_| io::Error::other("the thread ended while it started"))??;
    Ok((handle, outcome))
}

/// Starts the thread of a core. With `ring_entries` its runtime drives a ring of that size.
///
/// # Errors
/// The thread, the runtime or the ring cannot be created.
pub(crate) fn start_core(
    core: usize,
    cpu: Option<usize>,
    commands: mpsc::UnboundedReceiver<CoreCommand>,
    ring_entries: Option<u32>,
) -> io::Result<thread::JoinHandle<()>> {
    let (handle, _) = start_thread(format!("rf-core-{core}"), move |started| {
        // Before pinning, while the mask is the process's.
        let others = cpu.map_or_else(Vec::new, ringfetch_host::cpus::others);
        pin_to(cpu);
        CURRENT_CORE.set(Some(core));
        let Some(entries) = ring_entries else {
            return on_plain(started, run_commands(commands, None));
        };
        let ring = RingRuntime::new(entries)?;
        if let Err(error) = ring.handle().run_workers_on(&others) {
            tracing::debug!(%error, "the kernel's worker threads share the core's CPU");
        }
        if started.send(Ok(None)).is_ok() {
            ring.block_on(run_commands(commands, Some(ring.handle())));
        }
        Ok(())
    })?;
    Ok(handle)
}

/// Starts a thread that only runs a shard on a ring.
///
/// # Errors
/// As [`start_core`].
pub(crate) fn start_ring_shard(
    plan: RingConfig,
    shard: UnplacedShard,
    alarm: Alarm,
) -> io::Result<(thread::JoinHandle<()>, RegistrationOutcome)> {
    start_thread(format!("rf-shard-{}", shard.metrics.shard), move |started| {
        let ring = RingRuntime::new(plan.queue_depth)?;
        let (backend, outcome) = ring_backend(ring.handle(), plan);
        if started.send(Ok(outcome)).is_ok() {
            ring.block_on(on_backend(backend, plan, shard, alarm));
        }
        Ok(())
    })
}

/// Starts a thread that only runs a shard on a blocking backend, created on that thread.
///
/// # Errors
/// The thread or its runtime cannot be created, or `make` fails.
pub(crate) fn start_blocking_shard<B: Backend + 'static>(
    shard: UnplacedShard,
    make: impl FnOnce() -> io::Result<B> + Send + 'static,
    alarm: Alarm,
) -> io::Result<thread::JoinHandle<()>> {
    let name = format!("rf-shard-{}", shard.metrics.shard);
    let (handle, _) = start_thread(name, move |started| {
        let metrics = Arc::clone(&shard.metrics);
        let shard = Shard::new(make()?, shard.inbox, shard.metrics, 0);
        on_plain(started, supervise(shard, metrics, alarm))
    })?;
    Ok(handle)
}

fn on_plain(started: &Started, main: impl Future<Output = ()>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    if started.send(Ok(None)).is_ok() {
        tokio::task::LocalSet::new().block_on(&runtime, async {
            count_parks();
            main.await;
        });
    }
    Ok(())
}

/// Runs a function as if on a core.
#[cfg(test)]
pub(crate) fn run_as<T>(core: usize, run: impl FnOnce() -> T) -> T {
    let before = CURRENT_CORE.replace(Some(core));
    let result = run();
    CURRENT_CORE.set(before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Arena;
    use crate::config::BackendKind;

    /// A shard is placed on a core and its group is dropped before it serves, twice; then one stays.
    /// Expectation: each registers the memory with the core's ring, and the core ends when the last one does.
    #[test]
    #[ignore = "needs io_uring"]
    fn a_shard_after_one_that_was_given_up_has_registered_memory() {
        let arena = Arena::new(1 << 20, 1).unwrap();
        let (base, bytes) = arena.region();
        let (core, commands) = mpsc::unbounded_channel();
        let thread = start_core(0, None, commands, Some(8)).unwrap();
        for number in 0..3 {
            let (mailbox, inbox) = crate::shard::inbox();
            let metrics = ShardMetrics::new(number, BackendKind::Uring, 8);
            let (placed, answer) = std::sync::mpsc::sync_channel(1);
            let command = CoreCommand::Shard {
                plan: RingConfig {
                    queue_depth: 8,
                    eager_flush_reads: 0,
                    register: Some((base as usize, bytes)),
                },
                shard: UnplacedShard { inbox, metrics },
                alarm: Alarm(Arc::new(watch::channel(false).0)),
                placed,
            };
            assert!(core.send(command).is_ok());
            assert!(answer.recv().unwrap().unwrap().is_none(), "shard {number}");
            drop(mailbox);
        }
        drop(core);
        thread.join().unwrap();
    }
}
