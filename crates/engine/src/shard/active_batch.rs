//! A batch that has reads to start or in flight.

use super::in_flight::{FileAccess, InFlight, IndexKey, Joinable, JoinedRead};
use crate::metrics::{DatasetCounters, ShardMetrics, nanoseconds};
use crate::plan::PlannedRead;
use crate::planned_batch::PlannedBatch;
use std::sync::Arc;
use std::time::Instant;

/// A batch with reads to start or in flight.
pub(super) struct ActiveBatch {
    pub(super) batch: Box<PlannedBatch>,
    pub(super) counters: Arc<DatasetCounters>,
    pub(super) next_read: usize,
    /// Reads from this index on were added after a read failed: see [`Joinable::Same`].
    pub(super) planned: usize,
    /// Reads in flight, and reads that joined one.
    pub(super) outstanding: u32,
    /// Whether it is in `turns`, which keeps its number even if the batch is closed before its turn.
    pub(super) waits: bool,
    /// Whether the deadline passed before all reads were started.
    pub(super) expired: bool,
}

/// Reads of a batch that were started or joined.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReadCounts {
    pub(super) started: u64,
    /// Reads that joined one in flight.
    pub(super) joined: u64,
}

impl ActiveBatch {
    pub(super) fn is_done(&self) -> bool {
        self.outstanding == 0 && self.next_read == self.batch.plan.reads.len()
    }

    /// The key of a read for the index of reads in flight; `None` is a defect of the planner.
    pub(super) fn index_key(&self, read: &PlannedRead, in_flight: &InFlight) -> Option<IndexKey> {
        let access = FileAccess {
            file: self.batch.file_id(read)?,
            direct: read.direct,
        };
        Some(in_flight.index_key(access, read))
    }

    /// Joins a read to one in flight that covers its bytes, if there is one.
    pub(super) fn join(
        &mut self,
        key: usize,
        read: &PlannedRead,
        index_key: IndexKey,
        joinable: Joinable,
        in_flight: &mut InFlight,
    ) -> bool {
        let Some(slot) = in_flight.serving(index_key, read, joinable) else {
            return false;
        };
        slot.joiners.push(JoinedRead {
            active: key,
            read: *read,
        });
        self.outstanding += 1;
        true
    }

    /// Counts reads that were started or joined.
    pub(super) fn count_taken_up(&mut self, reads: ReadCounts, metrics: &ShardMetrics, now: Instant) {
        let ReadCounts { started, joined } = reads;
        if started + joined == 0 {
            return;
        }
        let queued = nanoseconds(now.saturating_duration_since(self.batch.accepted));
        self.batch.queue_ns = queued;
        let per_backend = metrics.per_backend(self.batch.backend);
        per_backend.queue_time.observe(queued, started + joined);
        metrics.count_joined_reads(joined);
    }

    /// Cancels the reads that are not started if the caller left or the deadline has passed. Returns the
    /// number of reads cancelled.
    pub(super) fn drop_unwanted(&mut self, now: Instant) -> usize {
        let total = self.batch.plan.reads.len();
        let left = total - self.next_read;
        if left == 0 {
            return 0;
        }
        if !self.is_unwanted(now) {
            return 0;
        }
        self.next_read = total;
        left
    }

    /// Whether the caller left, or the deadline has passed.
    pub(super) fn is_unwanted(&mut self, now: Instant) -> bool {
        self.expired |= self.batch.deadline.is_some_and(|deadline| deadline <= now);
        self.expired || self.batch.reply.is_closed()
    }
}
