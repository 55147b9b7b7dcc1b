//! What the engine reports about itself: its backends, shards, totals and memory.

use super::{Engine, ShardHandle};
use crate::config::BackendKind;
use crate::dataset::Dataset;
use crate::start::ShardGroup;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The backend in use, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendStatus {
    /// The one in use.
    pub backend: BackendKind,
    /// The one requested.
    pub requested: BackendKind,
    /// The reason, in one line.
    pub reason: String,
}

impl BackendStatus {
    /// The requested one runs.
    pub(crate) fn of(requested: BackendKind, reason: impl Into<String>) -> Self {
        Self {
            backend: requested,
            requested,
            reason: reason.into(),
        }
    }

    /// Whether another backend runs than requested.
    pub fn is_fallback(&self) -> bool {
        self.backend != self.requested
    }
}

/// A shard's gauges and counters at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardStatus {
    /// Number of the shard, from 0.
    pub shard: u32,
    /// Its backend; the shard of a ring serves `auto` and `uring`, and reports `uring`.
    pub backend: BackendKind,
    /// Whether any dataset is routed to it: after a switch the shards of the old backend remain, idle.
    pub routed: bool,
    /// Reads submitted and not completed, without stalled ones.
    pub in_flight: u32,
    /// Reads that their disk has not completed for 3 s while others waited for room: it hangs, or is far too slow.
    pub stalled: u32,
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
    /// Items completed, failed ones included.
    pub reads: u64,
    /// Items that failed.
    pub read_errors: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// (upper bound in seconds, items at or below it) of the time from acceptance to the reply; the last bound is
    /// infinite.
    pub total_seconds: Vec<(f64, u64)>,
}

impl Engine {
    /// The backend of datasets that have none of their own, and why.
    pub fn backend(&self) -> BackendStatus {
        self.inner.routes.load().common.status.clone()
    }

    /// Which backend serves a dataset, and why.
    pub fn backend_of(&self, dataset: &Dataset) -> BackendStatus {
        self.inner.routes.load().of(dataset.name()).status.clone()
    }

    /// Every shard's state now.
    pub fn shards(&self) -> Vec<ShardStatus> {
        let routes = self.inner.routes.load();
        let groups = self.inner.groups();
        let status = |(group, shard): (&Arc<ShardGroup>, &ShardHandle)| {
            let metrics = &shard.metrics;
            let mut routed = routes.own.iter().map(|(_, route)| route).chain([&routes.common]);
            ShardStatus {
                shard: metrics.shard,
                backend: group.backend,
                routed: routed.any(|route| Arc::ptr_eq(&route.group, group)),
                in_flight: metrics.moving(),
                stalled: metrics.stalled.load(Ordering::Relaxed),
                queued: metrics.queued(),
                queue_depth: metrics.depth_limit.load(Ordering::Relaxed),
                device_reads_total: metrics.device_reads.load(Ordering::Relaxed),
                submissions_total: metrics.submissions.load(Ordering::Relaxed),
            }
        };
        let shards = groups
            .iter()
            .flat_map(|group| group.shards.iter().map(move |shard| (group, shard)));
        shards.map(status).collect()
    }

    /// Sums over the shards now.
    pub fn totals(&self) -> Totals {
        self.inner.metrics.totals()
    }

    /// Response memory in bytes: (in use, budget).
    pub fn memory(&self) -> (u64, u64) {
        (self.inner.arena.in_use_bytes(), self.inner.arena.budget_bytes())
    }
}
