//! The reply to a batch whose reads have finished: removes the bytes of failed items, counts and sends it.
//!
//! Closing the gaps of failed items may move tens of megabytes, so it is done in steps, between which the
//! thread serves others.

use crate::batch::{Fetched, Item, Lengths, Times};
use crate::buffer::PooledBuffer;
use crate::error::{ItemError, ReadError};
use crate::metrics::{DatasetCounters, ShardMetrics, nanoseconds};
use crate::planned_batch::PlannedBatch;
use std::sync::Arc;
use std::time::Instant;

/// See the module.
pub(super) struct Reply {
    batch: Box<PlannedBatch>,
    counters: Arc<DatasetCounters>,
    expired: bool,
    compaction: Option<Compaction>,
}

impl Reply {
    /// `expired`: the batch's deadline passed before all of its reads were started.
    pub(super) fn new(mut batch: Box<PlannedBatch>, counters: Arc<DatasetCounters>, expired: bool) -> Self {
        // An item in several reads reports one error, whichever read finished first: a device error rather
        // than the end of the file.
        batch
            .errors
            .sort_by_key(|error| (error.item, matches!(error.error, ReadError::Truncated { .. })));
        batch.errors.dedup_by_key(|error| error.item);
        let has_bytes = batch.buffer.is_some() && !batch.errors.is_empty();
        let compacts = has_bytes && !expired && !batch.reply.is_closed();
        let compaction = compacts.then(|| Compaction::new(batch.plan.lead_bytes as usize, batch.items.len()));
        Self {
            batch,
            counters,
            expired,
            compaction,
        }
    }

    /// Caller and connection.
    pub(super) fn origin(&self) -> Option<(u64, u64)> {
        self.batch.origin
    }

    /// Does a part of the remaining work, copying at most `bytes`. Returns the bytes copied, and whether the
    /// reply can be sent.
    pub(super) fn advance(&mut self, bytes: u64) -> (u64, bool) {
        match (&mut self.compaction, &self.batch.buffer) {
            (Some(compaction), Some(buffer)) => {
                compaction.advance(buffer, &self.batch.items, &self.batch.errors, bytes)
            }
            _ => (0, true),
        }
    }

    /// Counts the batch and sends its result.
    pub(super) fn send(self, metrics: &ShardMetrics, now: Instant) {
        let Self {
            batch,
            counters,
            expired,
            compaction,
        } = self;
        if batch.reply.is_closed() {
            counters.count_given_up(&batch, metrics, now);
            return;
        }
        let PlannedBatch {
            items,
            errors,
            plan,
            buffer,
            accepted,
            queue_ns,
            reply,
            backend,
            ..
        } = PlannedBatch::unboxed(batch);
        let count = items.len() as u64;
        if expired {
            counters.count_failed(ReadError::DeadlineExceeded.label(), count);
            // The receiver may have been dropped.
            let _gone = reply.send(Err(ReadError::DeadlineExceeded));
            return;
        }
        let lead = plan.lead_bytes as usize;
        let bytes_of = |mut buffer: PooledBuffer, end: usize| {
            buffer.set_visible(lead..end);
            buffer.into_bytes()
        };
        let arrived = || {
            let failed: u64 = errors
                .iter()
                .filter_map(|error| items.get(error.item as usize))
                .map(|item| u64::from(item.length))
                .sum();
            items.iter().map(|item| u64::from(item.length)).sum::<u64>() - failed
        };
        // Counted before it is sent, so that the metrics include every received reply.
        counters.count_ok(count - errors.len() as u64, arrived());
        for error in &errors {
            counters.count_failed(error.error.label(), 1);
        }
        let total_ns = nanoseconds(now.saturating_duration_since(accepted));
        metrics.per_backend(backend).total_time.observe(total_ns, count);
        counters.total_time.observe(total_ns, count);
        // Without reads it only waited for its shard. (Reads that joined others at once are no longer in the plan.)
        let queue_ns = if plan.pieces.is_empty() {
            total_ns
        } else {
            queue_ns
        };
        let (data, lengths) = match (buffer, compaction) {
            (Some(buffer), Some(compaction)) => {
                (bytes_of(buffer, compaction.to), Lengths::Each(compaction.lengths))
            }
            (Some(buffer), None) => {
                let length: usize = items.iter().map(|item| item.length as usize).sum();
                (bytes_of(buffer, lead + length), Lengths::of(&items))
            }
            (None, _) if errors.is_empty() => (bytes::Bytes::new(), Lengths::of(&items)),
            (None, _) => (
                bytes::Bytes::new(),
                Lengths::Each(items.iter().map(|item| item.length).collect()),
            ),
        };
        // If the receiver was dropped, the memory returns to the pool here.
        let _gone = reply.send(Ok(Fetched {
            data,
            lengths,
            errors,
            times: Times { queue_ns, total_ns },
        }));
    }
}

/// Closes the gaps of failed items, so that bytes that were not read are never visible.
struct Compaction {
    /// The next item, and how many of its bytes were moved.
    item: usize,
    moved: usize,
    /// Index of the next error.
    error: usize,
    /// Position of the next item's bytes, and where they belong.
    from: usize,
    to: usize,
    lengths: Vec<u32>,
}

impl Compaction {
    fn new(lead: usize, items: usize) -> Self {
        Self {
            item: 0,
            moved: 0,
            error: 0,
            from: lead,
            to: lead,
            lengths: Vec::with_capacity(items),
        }
    }

    /// Moves at most `bytes`; returns the bytes moved, and whether it has completed. Errors are in item
    /// order.
    fn advance(
        &mut self,
        buffer: &PooledBuffer,
        items: &[Item],
        errors: &[ItemError],
        bytes: u64,
    ) -> (u64, bool) {
        let mut left = usize::try_from(bytes).unwrap_or(usize::MAX);
        let budget = left;
        while let Some(item) = items.get(self.item) {
            let length = item.length as usize;
            if errors
                .get(self.error)
                .is_some_and(|error| error.item as usize == self.item)
            {
                self.error += 1;
                self.lengths.push(0);
                self.from += length;
                self.item += 1;
                continue;
            }
            if self.from != self.to {
                if left == 0 {
                    return (bytes, false);
                }
                // Downwards in ascending order, so that nothing is overwritten before it is moved.
                let part = (length - self.moved).min(left);
                buffer.copy_to(self.from + self.moved, buffer, self.to + self.moved, part);
                left -= part;
                self.moved += part;
                if self.moved < length {
                    continue;
                }
                self.moved = 0;
            }
            self.lengths.push(item.length);
            self.from += length;
            self.to += length;
            self.item += 1;
        }
        ((budget - left) as u64, true)
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the model is small")]
mod tests {
    use super::*;
    use crate::buffer::Arena;

    #[test]
    fn steps_of_any_size_close_the_same_gaps() {
        // Items of 0 to 300 bytes after a lead of 10, some of them failed; moved in steps from 1 byte to
        // everything at once.
        let mut random = fastrand::Rng::with_seed(3);
        let arena = Arena::new(1 << 20, 1).unwrap();
        for step in [1, 7, 100, 4096, u64::MAX] {
            let items: Vec<Item> = (0..100)
                .map(|_| Item {
                    offset: 0,
                    length: random.u32(..300),
                })
                .collect();
            let errors: Vec<ItemError> = (0..100)
                .filter(|_| random.u8(..) < 60)
                .map(|item| ItemError {
                    item,
                    error: ReadError::ShardFailed,
                })
                .collect();
            let total: usize = items.iter().map(|item| item.length as usize).sum();
            let mut buffer = arena.reserve(total as u64 + 10, None).unwrap();
            let model: Vec<u8> = (0..total).map(|_| random.u8(..)).collect();
            // SAFETY: the place is of `total` bytes, and nobody else has the buffer.
            unsafe { std::ptr::copy_nonoverlapping(model.as_ptr(), buffer.place(10, total), total) };
            let mut compaction = Compaction::new(10, items.len());
            let mut steps = 0_u64;
            loop {
                let (moved, done) = compaction.advance(&buffer, &items, &errors, step);
                assert!(moved <= step);
                steps += 1;
                if done {
                    break;
                }
            }
            assert!(step < u64::MAX || steps == 1);
            let (mut wanted, mut at) = (Vec::new(), 0);
            for (number, item) in items.iter().enumerate() {
                if !errors.iter().any(|error| error.item == number as u32) {
                    wanted.extend_from_slice(&model[at..at + item.length as usize]);
                }
                at += item.length as usize;
            }
            buffer.set_visible(10..compaction.to);
            assert!(buffer.as_ref() == wanted, "steps of {step}");
            assert_eq!(compaction.lengths.len(), items.len());
        }
    }
}
