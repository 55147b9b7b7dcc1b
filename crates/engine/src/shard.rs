//! A shard: the reads of one thread, from the inbox to the reply, over any backend.
//!
//! Owns every batch from acceptance to reply, and with it the memory that the kernel writes to: a caller that
//! leaves drops only its receiver. Keeps at most `queue_depth` reads in flight, in turn over callers
//! (`turns`), and never reads bytes that are already in flight (`in_flight`; ADR 0013). Continues short
//! reads, handles the end of files, maps errno, counts. Invariants: a slot is in flight or free, never both;
//! a buffer is released only when no read of its batch is in flight, and leaked if the shard dies before that
//! (TRAPS 2); at most [`TURN_COPY_BYTES`] are copied before other tasks of the thread get their turn. No
//! timers, no locks on the hot path, no task per read (TRAPS 3).

mod active_batch;
mod continuation;
mod copy_tasks;
mod in_flight;
mod inbox;
mod known;
mod reply;
mod run;
mod stalled;
#[cfg(test)]
mod tests;
mod turns;
mod unwanted;

pub(crate) use inbox::{Control, Inbox, Mailbox, SendError, inbox};
pub(crate) use turns::NumberHasher;

use crate::backend::{Attempt, Backend, Completion, ReadSource};
use crate::cores;
use crate::metrics::{DeviceTimes, ShardMetrics};
use crate::plan::PlannedRead;
use crate::planned_batch::{PlannedBatch, Shortfall};
use active_batch::{ActiveBatch, ReadCounts};
use continuation::Next;
use copy_tasks::{CopyTask, SharedRead};
use in_flight::{InFlight, Joinable, TrackedRead};
use known::KnownDatasets;
use reply::Reply;
use run::Served;
use stalled::Stalled;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Context;
use std::time::{Duration, Instant};
use tokio::task::coop::has_budget_remaining;
use turns::{NOBODY, Origin, Turn, Turns};
use unwanted::LOOKED_OVER_PER_BATCH;

/// With more reads in flight than this, early flushes only cost: the device is busy, and a system call for
/// four reads is a fifth of their cost (MEASURED: it helps at depth 16 to 64, "above depth 128 it only
/// costs").
const EAGER_FLUSH_IN_FLIGHT_MAX: u32 = 64;

/// Bytes in flight beyond which no further read is started while several callers or connections have reads. A
/// new caller's block waits at the device behind what is in flight, even if its turn comes first, so this is
/// small; yet it keeps a device busy: at 7 GB/s and 100 us a read, 0.7 MB are in flight.
pub(crate) const IN_FLIGHT_BYTES_MAX: u64 = 2 << 20;

/// Factor of that limit while only one connection has reads: the lower limit would cost system calls and, if
/// the thread is scheduled late, bandwidth; a new caller waits behind the larger amount only once.
const ALONE_FACTOR: u64 = 4;

/// A connection counts as the only one after this long without others.
const ALONE_AFTER: Duration = Duration::from_secs(1);

/// A batch with more reads than this joins reads in flight only when its turn comes: searching twice for each
/// read costs more than it saves.
const JOINED_AT_ONCE_MAX: usize = 16;

/// Most bytes copied in one turn: some 100 us of a core.
pub(crate) const TURN_COPY_BYTES: u64 = 1 << 20;

/// The same while several callers have reads or tasks on the core: each of the others waits for several such turns, and for the
/// replies that they complete to be sent.
const SHARED_TURN_COPY_BYTES: u64 = 128 << 10;

/// Most batches taken from the inbox in one turn.
const ADMITTED_MAX: usize = 256;

/// The state machine over a backend; a future that ends when it has drained.
pub(crate) struct Shard<B: Backend> {
    // Before the backend: where a shard dies, nobody waits for threads that the backend joins.
    inbox: Inbox,
    actives: Vec<Option<ActiveBatch>>,
    backend: B,
    metrics: Arc<ShardMetrics>,
    eager_flush_reads: u32,
    free_actives: Vec<usize>,
    /// Where the next check of waiting batches begins.
    look_from: usize,
    turns: Turns,
    /// Batches that were closed while they waited: their numbers are still in `turns`, or parked.
    closed_waiting: usize,
    /// The turn in progress, and the bytes that it has started.
    turn: Option<(Turn, u64)>,
    /// The last connection with a batch, and until when it counts as contended.
    last_origin: Option<(u64, u64)>,
    contended_until: Instant,
    /// Until when its caller counts as sharing; whether it did at the last batch.
    shared_until: Instant,
    is_shared: bool,
    /// Most bytes copied in a turn.
    turn_copy_bytes: u64,
    in_flight: InFlight,
    stalled: Stalled,
    attempts: Vec<Attempt>,
    finished: Vec<Completion>,
    copy_tasks: VecDeque<CopyTask>,
    /// Bytes copied since the thread's other tasks had their turn.
    copied: u64,
    /// Whether callers are charged for this turn, and what it served then.
    charges: bool,
    served: Served,
    known: KnownDatasets,
    took: DeviceTimes,
}

// Never structurally pinned: its parts may move.
impl<B: Backend> Unpin for Shard<B> {}

impl<B: Backend> Shard<B> {
    /// `eager_flush_reads`: see `UringConfig`; 0 for backends that do not gain from it.
    pub(crate) fn new(backend: B, inbox: Inbox, metrics: Arc<ShardMetrics>, eager_flush_reads: u32) -> Self {
        let depth = metrics.queue_depth.max(1);
        let slots = backend.slots(depth);
        Self {
            in_flight: InFlight::new(depth, slots, backend.in_flight_bytes_max()),
            stalled: Stalled::new(slots > depth),
            backend,
            inbox,
            metrics,
            eager_flush_reads,
            actives: Vec::new(),
            free_actives: Vec::new(),
            look_from: 0,
            turns: Turns::default(),
            closed_waiting: 0,
            turn: None,
            last_origin: None,
            contended_until: Instant::now(),
            shared_until: Instant::now(),
            is_shared: false,
            turn_copy_bytes: TURN_COPY_BYTES,
            attempts: Vec::with_capacity(depth as usize),
            finished: Vec::with_capacity(depth as usize),
            copy_tasks: VecDeque::new(),
            copied: 0,
            charges: false,
            served: Served::default(),
            known: KnownDatasets::default(),
            took: DeviceTimes::default(),
        }
    }

    fn obey(&mut self) {
        // Ticks that piled up while the thread was stopped count as one.
        let mut tends = false;
        while let Some(control) = self.inbox.control() {
            match control {
                Control::Drain => self.inbox.close(),
                Control::Sweep => self.known.sweep(&mut self.backend),
                Control::Tend => tends = true,
                Control::Beat(reply) => {
                    // The caller may have stopped waiting.
                    let _gone = reply.send(());
                }
            }
        }
        if tends {
            self.tend(Instant::now());
        }
    }

    /// Takes batches from the inbox, which does not preserve order between callers. `limits.queued_reads`
    /// bounds how many wait. Returns whether there may be more.
    fn admit(&mut self, cx: &mut Context<'_>) -> bool {
        let mut now = None;
        for _ in 0..ADMITTED_MAX {
            let Some(batch) = self.inbox.poll_batch(cx) else {
                // The runtime lets a task receive 128 messages until it yields; then the inbox looks empty.
                return !has_budget_remaining();
            };
            let now = *now.get_or_insert_with(Instant::now);
            self.take_up(batch, now);
            if !self.turns.is_empty() {
                self.look_over(LOOKED_OVER_PER_BATCH, now);
            }
        }
        true
    }

    fn take_up(&mut self, batch: Box<PlannedBatch>, now: Instant) {
        let reads = batch.plan.reads.len();
        let counters = self.known.counters_of(&batch, &mut self.backend, &self.metrics);
        self.metrics.batch_items.observe(batch.items.len() as u64, 1);
        if batch.reply.is_closed() {
            self.unqueue(reads);
            counters.count_given_up(&batch, &self.metrics, now);
            return;
        }
        let mut active = ActiveBatch {
            batch,
            counters,
            next_read: 0,
            planned: reads,
            outstanding: 0,
            waits: false,
            expired: false,
        };
        // Checked before any read, so that a cancelled request never reaches the disk (TRAPS 25).
        active.expired = active.batch.deadline.is_some_and(|deadline| deadline <= now);
        if reads == 0 || active.expired {
            self.unqueue(reads);
            return self.answer(active, now);
        }
        self.bound_turns(active.batch.origin, now);
        let key = self.free_actives.pop().unwrap_or_else(|| {
            self.actives.push(None);
            self.actives.len() - 1
        });
        if let Some(place) = self.actives.get_mut(key) {
            *place = Some(active);
        }
        // If nothing waits, there is no turn to wait for.
        let done = self.turns.is_empty() && self.start_some(key, i64::MAX, now).1;
        if !done && self.join_all(key, now) {
            self.wait_for_turn(key);
        }
    }

    /// Sets the limits of bytes in flight and of copies, depending on whether other callers would wait behind
    /// them.
    fn bound_turns(&mut self, origin: Option<(u64, u64)>, now: Instant) {
        if origin != self.last_origin {
            let caller = |origin: Option<(u64, u64)>| origin.map(|(caller, _)| caller);
            if self.last_origin.is_some() && caller(origin) != caller(self.last_origin) {
                self.shared_until = now + ALONE_AFTER;
            }
            self.last_origin = origin;
            self.contended_until = now + ALONE_AFTER;
        }
        let is_shared = self.shared_until > now;
        let copies = if is_shared || cores::is_shared() {
            SHARED_TURN_COPY_BYTES
        } else {
            TURN_COPY_BYTES
        };
        if copies != std::mem::replace(&mut self.turn_copy_bytes, copies) {
            self.backend.bound_copies(copies);
        }
        if is_shared != std::mem::replace(&mut self.is_shared, is_shared) {
            let depth = self.metrics.queue_depth.max(1);
            let most = if is_shared {
                self.backend.shared_depth(depth)
            } else {
                depth
            };
            self.in_flight.set_reads_max(most);
            self.note_limit();
        }
        let alone = self.contended_until <= now;
        let factor = if alone { ALONE_FACTOR } else { 1 };
        self.in_flight
            .set_bytes_max(self.backend.in_flight_bytes_max() * factor);
    }

    fn note_limit(&self) {
        let most = self.in_flight.moving_max();
        self.metrics.depth_limit.store(most, Ordering::Relaxed);
    }

    fn wait_for_turn(&mut self, key: usize) {
        if let Some(active) = self.actives.get_mut(key).and_then(Option::as_mut)
            && !active.waits
        {
            active.waits = true;
            // The new batch may be next.
            if let Some((turn, bytes)) = self.turn.take() {
                self.turns.took(&turn, bytes, false);
            }
            let weight = active.batch.weight;
            let of = |(caller, connection)| Origin {
                caller,
                connection,
                weight,
            };
            self.turns.push(active.batch.origin.map_or(NOBODY, of), key);
        }
    }

    /// Lets the reads of a waiting batch join reads in flight that cover their bytes, since those may have
    /// finished by its turn. Returns whether any reads are left.
    fn join_all(&mut self, key: usize, now: Instant) -> bool {
        let Some(active) = self.actives.get_mut(key).and_then(Option::as_mut) else {
            return false;
        };
        let (in_flight, metrics) = (&mut self.in_flight, &self.metrics);
        let left = active.batch.plan.reads.len() - active.next_read;
        if !in_flight.is_empty() && left <= JOINED_AT_ONCE_MAX && self.backend.shares() {
            let mut reads = std::mem::take(&mut active.batch.plan.reads);
            let (before, mut waiting) = (reads.len(), active.next_read);
            reads.retain(|read| {
                // Earlier reads have been started.
                if let Some(started) = waiting.checked_sub(1) {
                    waiting = started;
                    return true;
                }
                let index_key = active.index_key(read, in_flight);
                !index_key
                    .is_some_and(|index_key| active.join(key, read, index_key, Joinable::Covering, in_flight))
            });
            let reads_taken_up = ReadCounts {
                started: 0,
                joined: (before - reads.len()) as u64,
            };
            active.count_taken_up(reads_taken_up, metrics, now);
            active.planned = reads.len();
            active.batch.plan.reads = reads;
        }
        active.next_read < active.batch.plan.reads.len()
    }

    fn unqueue(&self, reads: usize) {
        if reads > 0 {
            self.metrics
                .queued
                .fetch_sub(i64::try_from(reads).unwrap_or(i64::MAX), Ordering::Relaxed);
        }
    }

    /// Starts reads in turn while there is room in flight.
    fn start_reads(&mut self, now: Instant) {
        while self.in_flight.has_room() {
            let (turn, before) = match self.turn.take() {
                Some(begun) => begun,
                None => match self.turns.next() {
                    Some(turn) => (turn, 0),
                    None => return,
                },
            };
            let allowance = turn.bytes.saturating_sub_unsigned(before);
            let (bytes, done) = self.start_some(turn.batch, allowance, now);
            let bytes = before + bytes;
            if done || i64::try_from(bytes).is_ok_and(|bytes| bytes >= turn.bytes) {
                self.turns.took(&turn, bytes, done);
            } else if self.is_stalled(turn.batch) {
                self.turns.took(&turn, bytes, true);
                self.stalled.parked.push(turn.batch);
            } else {
                // No room for the next read.
                self.turn = Some((turn, bytes));
                return;
            }
        }
    }

    /// Starts or joins reads of a batch until `allowance` bytes are reached, there is no room, or the next one would have to wait
    /// for stalled reads. Returns the bytes, and whether the batch has no more reads to start.
    fn start_some(&mut self, key: usize, allowance: i64, now: Instant) -> (u64, bool) {
        let Some(active) = self.actives.get_mut(key).and_then(Option::as_mut) else {
            self.forget(key);
            return (0, true);
        };
        let allowance = u64::try_from(allowance).unwrap_or(0);
        let mut unqueued = active.drop_unwanted(now);
        let total = active.batch.plan.reads.len();
        let shares = self.backend.shares();
        let some_stalled = self.stalled.any();
        let mut taken_up = ReadCounts::default();
        let mut bytes = 0_u64;
        while bytes < allowance
            && let Some(read) = active.batch.plan.reads.get(active.next_read).copied()
        {
            let joinable = if active.next_read < active.planned {
                Joinable::Covering
            } else {
                Joinable::Same { batch: key }
            };
            let index_key = if shares {
                active.index_key(&read, &self.in_flight)
            } else {
                None
            };
            if index_key
                .is_some_and(|index_key| active.join(key, &read, index_key, joinable, &mut self.in_flight))
            {
                taken_up.joined += 1;
            } else {
                if some_stalled && self.stalled.keeps(&active.batch, &read) {
                    break;
                }
                let Some(number) = self.in_flight.room_for(read.length) else {
                    break;
                };
                if let Some(attempt) = active.batch.attempt(number, &read, 0) {
                    self.attempts.push(attempt);
                    self.in_flight.start(key, &read, index_key, now);
                    active.outstanding += 1;
                    taken_up.started += 1;
                } else {
                    active.batch.deliver(&read, 0, Shortfall::Defect);
                }
                unqueued += 1;
            }
            active.next_read += 1;
            bytes = bytes.saturating_add(u64::from(read.length));
        }
        active.count_taken_up(taken_up, &self.metrics, now);
        if self.charges {
            self.served.add(active.batch.origin, bytes);
        }
        let done = active.next_read == total;
        let closes = done && active.outstanding == 0;
        if done {
            active.waits = false;
        }
        self.unqueue(unqueued);
        if closes {
            self.close(key, now);
        }
        (bytes, done)
    }

    /// Hands the prepared attempts to the backend.
    fn launch(&mut self) {
        if self.attempts.is_empty() {
            return;
        }
        self.backend.announce(&self.attempts);
        let in_flight = self.in_flight.len();
        let fresh = u32::try_from(self.attempts.len()).unwrap_or(u32::MAX);
        let mut depth = self.in_flight.moving().saturating_sub(fresh);
        self.metrics
            .depth_seen
            .observe_each(u64::from(depth) + 1, u64::from(depth) + u64::from(fresh));
        let (mut device_reads, mut device_bytes) = (0, 0);
        let mut unflushed = 0;
        for attempt in self.attempts.drain(..) {
            depth += 1;
            let length = attempt.length;
            if self.backend.start(attempt) == ReadSource::Device {
                device_reads += 1;
                device_bytes += u64::from(length);
            }
            unflushed += 1;
            if unflushed == self.eager_flush_reads && depth < EAGER_FLUSH_IN_FLIGHT_MAX {
                self.metrics.count_submission(self.backend.flush());
                unflushed = 0;
            }
        }
        self.metrics.count_device_reads(device_reads, device_bytes);
        self.metrics.count_resident_reads(u64::from(fresh) - device_reads);
        self.metrics.in_flight.store(in_flight, Ordering::Relaxed);
    }

    /// Handles a finished attempt: its read has completed, continues, or has failed.
    fn finish(&mut self, finished: Completion, now: Instant) {
        let Some(slot) = self.in_flight.get_mut(finished.slot) else {
            return;
        };
        let Some(active) = self.actives.get(slot.tracked.active).and_then(Option::as_ref) else {
            return;
        };
        let read = slot.tracked.read;
        let errno = match continuation::after(finished.result, slot, &active.batch) {
            Next::Over(errno) => errno,
            Next::Attempt => {
                if let Some(attempt) = active.batch.attempt(finished.slot, &read, slot.from) {
                    self.attempts.push(attempt);
                    return;
                }
                finished.result.err()
            }
        };
        self.took
            .add(active.batch.backend, slot.started, now, &self.metrics);
        let (tracked, joiners) = (slot.tracked, std::mem::take(&mut slot.joiners));
        if self.in_flight.finish(finished.slot) {
            self.recover(&tracked);
        }
        if joiners.is_empty() {
            return self.settle(&tracked, errno, now);
        }
        let joiners = joiners.into_iter();
        self.copy_tasks.push_back(CopyTask::Share(Box::new(SharedRead {
            tracked,
            errno,
            joiners,
        })));
    }

    /// Delivers the result of a read to its batch.
    fn settle(&mut self, tracked: &TrackedRead, errno: Option<i32>, now: Instant) {
        let Some(active) = self.actives.get_mut(tracked.active).and_then(Option::as_mut) else {
            return;
        };
        active.outstanding -= 1;
        if self.charges {
            self.served.add(active.batch.origin, tracked.read.length.into());
        }
        if errno.is_some() && tracked.read.pieces > 1 {
            return self.split(tracked.active, &tracked.read);
        }
        let shortfall = errno.map_or(Shortfall::EndOfFile, Shortfall::Errno);
        self.copied += active.batch.deliver(&tracked.read, tracked.reached, shortfall);
        if active.is_done() {
            self.close(tracked.active, now);
        }
    }

    /// Queues the items of a merged read as reads of their own: it failed as a whole, but perhaps only one
    /// item's bytes are bad, and every backend fails the same items.
    fn split(&mut self, key: usize, read: &PlannedRead) {
        let Some(active) = self.actives.get_mut(key).and_then(Option::as_mut) else {
            return;
        };
        let singles = active.batch.split_pieces(read);
        self.metrics
            .queued
            .fetch_add(i64::try_from(singles).unwrap_or(0), Ordering::Relaxed);
        self.wait_for_turn(key);
    }

    fn close_if_done(&mut self, key: usize, now: Instant) {
        let active = self.actives.get(key).and_then(Option::as_ref);
        if active.is_some_and(ActiveBatch::is_done) {
            self.close(key, now);
        }
    }

    /// Removes a batch with no work left, and replies to it.
    fn close(&mut self, key: usize, now: Instant) {
        if let Some(active) = self.actives.get_mut(key).and_then(Option::take) {
            if active.waits {
                self.closed_waiting += 1;
            } else {
                self.free_actives.push(key);
            }
            self.answer(active, now);
        }
    }

    fn answer(&mut self, active: ActiveBatch, now: Instant) {
        // Counted before the reply, so that the metrics include every received reply.
        self.took.tell(&self.metrics);
        let mut reply = Reply::new(active.batch, active.counters, active.expired);
        let (copied, ready) = reply.advance(self.turn_copy_bytes.saturating_sub(self.copied));
        self.copied += copied;
        if ready {
            reply.send(&self.metrics, now);
        } else {
            self.copy_tasks.push_back(CopyTask::Reply(Box::new(reply)));
        }
    }

    fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
            && self.turns.is_empty()
            && self.attempts.is_empty()
            && self.copy_tasks.is_empty()
    }
}

impl<B: Backend> Drop for Shard<B> {
    fn drop(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        // The kernel may still write to these batches' memory. Leaking it is safe; freeing it is not (TRAPS
        // 2).
        for active in self
            .actives
            .iter_mut()
            .filter_map(Option::take)
            .filter(|active| active.outstanding > 0)
        {
            let ActiveBatch { batch, .. } = active;
            let PlannedBatch { buffer, scratch, .. } = *batch;
            std::mem::forget(buffer);
            std::mem::forget(scratch);
        }
    }
}
