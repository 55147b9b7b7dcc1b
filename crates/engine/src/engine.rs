//! The engine as the server sees it: cores to run its listeners on, and one way to read.

use crate::batch::{Batch, Fetched};
use crate::buffer::Share;
use crate::config::{BackendKind, EngineConfig};
use crate::error::ReadError;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

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
pub struct Engine {}

/// A batch on its way. Dropping it gives the batch up: reads not yet submitted are not made; reads in flight finish
/// and their memory returns to the pool.
#[derive(Debug)]
pub struct Ticket {}

impl Future for Ticket {
    type Output = Result<Fetched, ReadError>;
    fn poll(self: Pin<&mut Self>, _cx: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        todo!()
    }
}

impl Engine {
    /// Probes the backend, reserves the memory, starts the cores and shards.
    ///
    /// # Errors
    /// io_uring cannot be had and `on_unavailable` is `Fail`; or a thread, the memory or a ring cannot be had.
    pub fn start(config: &EngineConfig) -> Result<Self, StartError> {
        let _ = config;
        todo!()
    }
    /// Network cores: pinned threads with a current-thread tokio runtime each.
    pub fn core_count(&self) -> usize {
        todo!()
    }
    /// Runs a future on a core. It and what it spawns (`tokio::spawn`, `spawn_local`) stay on that thread, and
    /// batches submitted there go to that core's shard. Returns false when the core has stopped.
    pub fn spawn_on<F, Fut>(&self, core: usize, task: F) -> bool
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        let _ = (core, task);
        todo!()
    }
    /// Queues a batch on the shard of the calling core (else the least loaded one).
    ///
    /// # Errors
    /// At once: `Overloaded`, `Draining`, or with `fail_fast` the first item error already known.
    pub fn submit(&self, batch: Batch, options: SubmitOptions) -> Result<Ticket, ReadError> {
        let _ = (batch, options);
        todo!()
    }
    /// Which backend runs, and why.
    pub fn backend(&self) -> BackendStatus {
        todo!()
    }
    /// Every shard's state now.
    pub fn shards(&self) -> Vec<ShardStatus> {
        todo!()
    }
    /// Sums over the shards now.
    pub fn totals(&self) -> Totals {
        todo!()
    }
    /// Response memory: (in use, budget), bytes.
    pub fn memory(&self) -> (u64, u64) {
        todo!()
    }
    /// The largest response the memory can hold.
    pub fn response_bytes_max(&self) -> u64 {
        todo!()
    }
    /// A connection's share of the response memory.
    pub fn new_share(&self) -> Arc<Share> {
        todo!()
    }
    /// Registers the engine's metrics.
    ///
    /// # Errors
    /// A name is taken.
    pub fn register_metrics(&self, registry: &prometheus::Registry) -> Result<(), prometheus::Error> {
        let _ = registry;
        todo!()
    }
    /// Takes no new work, answers what was accepted, then stops shards and cores; at `deadline` gives up and leaks
    /// what the kernel still writes to.
    pub async fn drain(&self, deadline: Instant) -> DrainReport {
        let _ = deadline;
        todo!()
    }
}

/// The core this thread is, if it is one.
pub fn current_core() -> Option<usize> {
    todo!()
}
