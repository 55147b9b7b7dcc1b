//! Copies done in parts, so that the thread can serve others in between: bytes of a shared read for its joiners, and
//! gaps left by failed items.

use super::Shard;
use super::in_flight::{JoinedRead, TrackedRead};
use super::reply::Reply;
use crate::backend::Backend;
use crate::planned_batch::Shortfall;
use std::time::Instant;

/// Bytes of a copy that cost as much as the rest of what is done for a joiner.
const JOINER_BYTES: u64 = 512;

/// See the module.
pub(super) enum CopyTask {
    Share(Box<SharedRead>),
    Reply(Box<Reply>),
}

/// A finished read with joiners.
pub(super) struct SharedRead {
    pub(super) tracked: TrackedRead,
    pub(super) errno: Option<i32>,
    /// The joiners that are not served yet.
    pub(super) joiners: std::vec::IntoIter<JoinedRead>,
}

impl<B: Backend> Shard<B> {
    /// Copies as much as a turn allows.
    pub(super) fn run_copy_tasks(&mut self) {
        if self.copy_tasks.is_empty() {
            return;
        }
        let now = Instant::now();
        while self.copied < self.turn_copy_bytes
            && let Some(task) = self.copy_tasks.pop_front()
        {
            match task {
                CopyTask::Share(mut shared) => {
                    if let Some(joiner) = shared.joiners.next() {
                        let (before, origin) = (self.copied, self.origin_of(joiner.active));
                        self.serve(&joiner, &shared.tracked, shared.errno, now);
                        self.copied = self.copied.max(before + JOINER_BYTES);
                        self.served.add(origin, self.copied - before);
                        self.copy_tasks.push_front(CopyTask::Share(shared));
                    } else {
                        self.settle(&shared.tracked, shared.errno, now);
                    }
                }
                CopyTask::Reply(mut reply) => {
                    let (copied, ready) = reply.advance(self.turn_copy_bytes - self.copied);
                    self.copied += copied;
                    self.served.add(reply.origin(), copied);
                    if ready {
                        reply.send(&self.metrics, now);
                    } else {
                        self.copy_tasks.push_back(CopyTask::Reply(reply));
                    }
                }
            }
        }
    }

    fn origin_of(&self, key: usize) -> Option<(u64, u64)> {
        self.actives.get(key)?.as_ref()?.batch.origin
    }

    /// Completes a joiner from the read that it joined, or queues it as a read of its own.
    fn serve(&mut self, joiner: &JoinedRead, tracked: &TrackedRead, errno: Option<i32>, now: Instant) {
        let read = &joiner.read;
        let reached = tracked
            .reached
            .saturating_sub(tracked.distance(read))
            .min(read.length);
        // A read that is short without an error has reached the end of the file.
        let at_end = errno.is_none() && tracked.reached < tracked.read.needed;
        let own_error = errno.filter(|_| tracked.is_same_range(read));
        let shared_error = own_error.filter(|_| read.pieces == 1);
        let owner = self.actives.get(tracked.active).and_then(Option::as_ref);
        let active = self.actives.get(joiner.active).and_then(Option::as_ref);
        let (Some(owner), Some(active)) = (owner, active) else {
            return;
        };
        let wanted = !active.batch.reply.is_closed();
        let served = reached >= read.needed || at_end || shared_error.is_some();
        if wanted && served {
            let distance = tracked.distance(read);
            owner
                .batch
                .share(&tracked.read, distance, &active.batch, read, reached);
            self.copied += u64::from(reached);
        }
        let Some(active) = self.actives.get_mut(joiner.active).and_then(Option::as_mut) else {
            return;
        };
        active.outstanding -= 1;
        if wanted && !served && own_error.is_some() {
            // As the read's owner does, so that all of them join the reads of the pieces, and none repeats
            // this one.
            self.unqueue(1);
            return self.split(joiner.active, read);
        }
        if wanted && !served {
            // The read failed, perhaps because of other bytes. The joiner is still queued.
            active.batch.plan.reads.push(*read);
            return self.wait_for_turn(joiner.active);
        }
        if wanted {
            let shortfall = shared_error.map_or(Shortfall::EndOfFile, Shortfall::Errno);
            self.copied += active.batch.deliver(read, reached, shortfall);
        }
        self.unqueue(1);
        self.close_if_done(joiner.active, now);
    }
}
