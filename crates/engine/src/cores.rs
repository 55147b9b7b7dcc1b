//! Threads: a core's pinned thread with its runtime, and the shards beside it or on threads of their own.
//!
//! A core runs whatever the server spawns on it and, where it has a ring, the shard that reads through it, from when that
//! is first wanted. A core with a ring costs nothing more while no shard is on it. Nothing here reads.
//! A shard that panics takes its inbox with it: its callers are answered `ShardFailed`, the failure is counted and
//! announced, and the memory the kernel may still write to is leaked (see `shard`).

use crate::backend::Backend;
use crate::backend::auto::AutoBackend;
use crate::backend::uring::{RingHandle, RingRuntime, UringBackend};
use crate::metrics::ShardMetrics;
use crate::shard::{Inbox, Shard};
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Context;
use std::thread;
use tokio::sync::{mpsc, watch};

/// What is run on a core: made there, so that it need not be `Send`.
pub(crate) type Task = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// What a core is told to do.
pub(crate) enum CoreCommand {
    /// Run this beside everything else.
    Task(Task),
    /// Put a shard on the core's ring, and tell how that went.
    Shard {
        plan: RingConfig,
        shard: UnplacedShard,
        alarm: Alarm,
        placed: std::sync::mpsc::SyncSender<io::Result<RegistrationOutcome>>,
    },
}

thread_local! {
    static CURRENT_CORE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The core this thread is, if it is one.
pub(crate) fn current() -> Option<usize> {
    CURRENT_CORE.get()
}

/// Ends a task's turn on a core: it is polled again after all others that can go on, and after the core has looked at its
/// sockets and its ring. A task that only wakes itself is polled up to 61 times before that: with a few connections that
/// always have something to send, everybody else waits 10 ms for the core to see what has arrived.
pub fn give_way(cx: &mut Context<'_>) {
    // Its first poll hands the waker to the runtime.
    let _given = pin!(tokio::task::yield_now()).poll(cx);
}

/// Tells the world that a shard has failed.
#[derive(Debug, Clone)]
pub(crate) struct Alarm(pub(crate) Arc<watch::Sender<bool>>);

/// What a ring is to have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingConfig {
    pub(crate) queue_depth: u32,
    pub(crate) eager_flush_reads: u32,
    /// Response memory to register: (address, bytes).
    pub(crate) register: Option<(usize, usize)>,
}

/// What a ring came to have: an error text when registration failed.
pub(crate) type RegistrationOutcome = Option<String>;

/// A shard that is still to be given a thread.
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

/// Makes the ring's backend and registers the memory; a refusal is reported, not fatal.
fn ring_backend(ring: RingHandle, plan: RingConfig) -> (UringBackend, RegistrationOutcome) {
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

/// Runs a core's commands until nobody can send any more, and then its shards to their end.
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
                    // Whoever asked for it may have given up waiting; then the shard's inbox is gone as well.
                    drop(placed.send(Err(io::Error::other("the core has no ring"))));
                    continue;
                };
                // One that was put here before belongs to a group that did not start: its senders are gone, and it gives
                // back what it registered with the ring when it ends.
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
    // The runtime must not go while its ring still writes to memory (TRAPS 2): the shards end drained. A panic of one
    // was reported by `supervise`, and then its memory is leaked, not freed.
    for shard in shards {
        let _ended = shard.await;
    }
}

async fn on_backend(backend: UringBackend, plan: RingConfig, shard: UnplacedShard, alarm: Alarm) {
    let UnplacedShard { inbox, metrics } = shard;
    let counted = Arc::clone(&metrics);
    let shard = Shard::new(
        AutoBackend::new(backend, plan.queue_depth),
        inbox,
        counted,
        plan.eager_flush_reads,
    );
    supervise(shard, metrics, alarm).await;
}

/// Starts a core's thread. With `ring_entries`, its runtime drives a ring of as many; without, it is a plain runtime.
///
/// # Errors
/// The thread, the runtime or the ring cannot be made.
pub(crate) fn start_core(
    core: usize,
    cpu: Option<usize>,
    commands: mpsc::UnboundedReceiver<CoreCommand>,
    ring_entries: Option<u32>,
) -> io::Result<thread::JoinHandle<()>> {
    let (started, start) = std::sync::mpsc::sync_channel::<io::Result<RegistrationOutcome>>(1);
    let handle = thread::Builder::new()
        .name(format!("rf-core-{core}"))
        .spawn(move || {
            pin_to(cpu);
            CURRENT_CORE.set(Some(core));
            let Some(entries) = ring_entries else {
                return on_plain(started, run_commands(commands, None));
            };
            match RingRuntime::new(entries) {
                Ok(ring) => {
                    if started.send(Ok(None)).is_ok() {
                        ring.block_on(run_commands(commands, Some(ring.handle())));
                    }
                }
                Err(error) => drop(started.send(Err(error))),
            }
        })?;
    start
        .recv()
        .map_err(|_| io::Error::other("the thread ended while it started"))??;
    Ok(handle)
}

/// Starts a thread that has nothing but a shard on a ring.
///
/// # Errors
/// As [`start_core`].
pub(crate) fn start_ring_shard(
    plan: RingConfig,
    shard: UnplacedShard,
    alarm: Alarm,
) -> io::Result<(thread::JoinHandle<()>, RegistrationOutcome)> {
    let (started, start) = std::sync::mpsc::sync_channel::<io::Result<RegistrationOutcome>>(1);
    let name = format!("rf-shard-{}", shard.metrics.shard);
    let handle = thread::Builder::new()
        .name(name)
        .spawn(move || on_ring(plan, shard, alarm, started))?;
    let outcome = start
        .recv()
        .map_err(|_| io::Error::other("the thread ended while it started"))??;
    Ok((handle, outcome))
}

/// Starts a thread that has nothing but a shard on a blocking backend, which is made there.
///
/// # Errors
/// The thread or its runtime cannot be made, or `make` fails.
pub(crate) fn start_blocking_shard<B: Backend + 'static>(
    shard: UnplacedShard,
    make: impl FnOnce() -> io::Result<B> + Send + 'static,
    alarm: Alarm,
) -> io::Result<thread::JoinHandle<()>> {
    let (started, start) = std::sync::mpsc::sync_channel::<io::Result<RegistrationOutcome>>(1);
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
    plan: RingConfig,
    shard: UnplacedShard,
    alarm: Alarm,
    started: std::sync::mpsc::SyncSender<io::Result<RegistrationOutcome>>,
) {
    let ring = match RingRuntime::new(plan.queue_depth) {
        Ok(ring) => ring,
        Err(error) => return drop(started.send(Err(error))),
    };
    let (backend, outcome) = ring_backend(ring.handle(), plan);
    if started.send(Ok(outcome)).is_ok() {
        ring.block_on(on_backend(backend, plan, shard, alarm));
    }
}

fn on_plain(
    started: std::sync::mpsc::SyncSender<io::Result<RegistrationOutcome>>,
    main: impl Future<Output = ()>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return drop(started.send(Err(error))),
    };
    if started.send(Ok(None)).is_err() {
        return;
    }
    tokio::task::LocalSet::new().block_on(&runtime, main);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Arena;
    use crate::config::BackendKind;

    /// A shard is put on a core, and its group is given up before it serves, twice; then comes one that stays.
    /// Expectation: each has the memory registered with the core's ring, and the core ends when the last one does.
    #[test]
    #[ignore = "needs io_uring"]
    fn a_shard_after_one_that_was_given_up_has_registered_memory() {
        let arena = Arena::new(1 << 20).unwrap();
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
            assert_eq!(answer.recv().unwrap().unwrap(), None, "shard {number}");
            drop(mailbox);
        }
        drop(core);
        thread.join().unwrap();
    }
}
