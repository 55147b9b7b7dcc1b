//! A batch that has reads to start or in flight.

use super::in_flight::{Address, InFlight, Joinable, Joiner, Source};
use crate::backend::Backend;
use crate::config::BackendKind;
use crate::metrics::{DatasetCounters, ShardMetrics, nanoseconds};
use crate::plan::PlannedRead;
use crate::work::Work;
use std::sync::Arc;
use std::time::Instant;

/// A batch with reads to start or in flight.
pub(super) struct Active {
    pub(super) work: Box<Work>,
    pub(super) counters: Arc<DatasetCounters>,
    pub(super) next_read: usize,
    /// Reads from this one on were made up here, after a read failed: see [`Joinable::Same`].
    pub(super) planned: usize,
    /// Reads in flight, and reads that joined one.
    pub(super) outstanding: u32,
    /// Among `turns`, which then has its number, even if the batch is closed meanwhile.
    pub(super) waits: bool,
    /// The deadline passed before all reads were started.
    pub(super) expired: bool,
}

/// How many reads of a batch were taken up.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reads {
    pub(super) started: u64,
    /// Served by a read in flight.
    pub(super) joined: u64,
}

impl Active {
    pub(super) fn is_done(&self) -> bool {
        self.outstanding == 0 && self.next_read == self.work.plan.reads.len()
    }

    /// Where a read is in flight; `None` is a defect of the planner.
    pub(super) fn address(&self, read: &PlannedRead, in_flight: &InFlight) -> Option<Address> {
        let source = Source {
            file: self.work.file_id(read)?,
            direct: read.direct,
        };
        Some(in_flight.address(source, read))
    }

    /// Whether its reads are worth sharing. Asked for the file that is read next: a batch is of few files, and rarely of
    /// some that are and some that are not.
    pub(super) fn shares<B: Backend>(&self, backend: &B) -> bool {
        let read = self.work.plan.reads.get(self.next_read);
        let file = read.and_then(|read| self.work.file_id(read));
        file.is_some_and(|file| backend.shares(file, self.work.backend == BackendKind::Auto))
    }

    /// Lets a read join one in flight that brings its bytes, if there is one.
    pub(super) fn join(
        &mut self,
        key: usize,
        read: &PlannedRead,
        address: Address,
        joinable: Joinable,
        in_flight: &mut InFlight,
    ) -> bool {
        let Some(slot) = in_flight.serving(address, read, joinable) else {
            return false;
        };
        slot.joiners.push(Joiner {
            active: key,
            read: *read,
        });
        self.outstanding += 1;
        true
    }

    /// Counts reads that were started or have joined one just now.
    pub(super) fn count_taken_up(&self, reads: Reads, metrics: &ShardMetrics, now: Instant) {
        let Reads { started, joined } = reads;
        if started + joined == 0 {
            return;
        }
        let queued = now.saturating_duration_since(self.work.accepted);
        let lane = metrics.lane(self.work.backend);
        lane.queue_time.observe(nanoseconds(queued), started + joined);
        metrics.count_joined_reads(joined);
    }

    /// Gives up the reads that are not started, if the caller did or the deadline has passed. Returns how many.
    pub(super) fn drop_unwanted(&mut self, now: Instant) -> usize {
        let total = self.work.plan.reads.len();
        let left = total - self.next_read;
        if left == 0 {
            return 0;
        }
        self.expired = self.work.deadline.is_some_and(|deadline| deadline <= now);
        if !self.expired && !self.work.reply.is_closed() {
            return 0;
        }
        self.next_read = total;
        left
    }
}
