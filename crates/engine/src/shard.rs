//! A shard: one thread's reads, from the inbox to the answer, over whichever backend.
//!
//! Owns every batch from acceptance to answer, and with it the memory the kernel writes to: a caller that gives up
//! drops only its receiver. Keeps at most `queue_depth` reads in flight. Continues short reads, decides what end of
//! file means, maps errno, counts. Invariants: a slot is in flight or free, never both; a buffer is given away or
//! dropped only when no read of its batch is in flight, and leaked if the shard dies before that (TRAPS 2).
//! Absent on purpose: timers, locks on the hot path, a task per read (TRAPS 3).

use crate::backend::{Attempt, Backend, Finished, Route};
use crate::batch::{Fetched, Lengths};
use crate::config::BackendKind;
use crate::dataset::Dataset;
use crate::error::ReadError;
use crate::metrics::{DatasetCounters, RESULT_ABANDONED, ShardMetrics, nanoseconds};
use crate::plan::PlannedRead;
use crate::work::{Work, compact};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// How often an attempt that was interrupted (EINTR, EAGAIN) is made again before it counts as failed.
const INTERRUPTED_RETRIES_MAX: u8 = 16;

/// Above this many reads in flight, flushing early only costs: the device has enough to do, and a system call for four
/// reads is a fifth of what they cost (MEASURED: it helps at depth 16 to 64, "above depth 128 it only costs").
const EAGER_FLUSH_IN_FLIGHT_MAX: u32 = 64;

/// What a shard's inbox carries.
pub(crate) enum Message {
    /// A batch.
    Work(Box<Work>),
    /// Finish what is here, take nothing more, end.
    Drain,
    /// Let go of what is held of datasets that nobody else holds any more.
    Sweep,
    /// Give a sign of life.
    Beat(oneshot::Sender<()>),
}

/// A dataset that was read here.
struct Known {
    id: u64,
    /// Looks whether anybody still has it.
    dataset: Weak<Dataset>,
    /// Of its files, those that the backend was told of.
    files: Vec<u64>,
    /// One a backend that it was read by.
    counters: Vec<(BackendKind, Arc<DatasetCounters>)>,
}

/// A batch with reads to start or in flight.
struct Active {
    work: Box<Work>,
    counters: Arc<DatasetCounters>,
    next_read: usize,
    in_flight: u32,
}

/// An attempt in flight.
#[derive(Debug, Clone, Copy)]
struct Slot {
    active: usize,
    read: PlannedRead,
    /// Where in the read the current attempt begins.
    from: u32,
    /// Bytes from the read's beginning that have arrived.
    reached: u32,
    interrupted: u8,
    started: Instant,
}

/// The state machine over a backend; a future that ends when it has drained.
pub(crate) struct Shard<B: Backend> {
    backend: B,
    inbox: mpsc::Receiver<Message>,
    metrics: Arc<ShardMetrics>,
    eager_flush_reads: u32,
    actives: Vec<Option<Active>>,
    free_actives: Vec<usize>,
    /// Actives with reads to start, oldest first.
    to_start: VecDeque<usize>,
    unstarted: usize,
    slots: Vec<Option<Slot>>,
    free_slots: Vec<u32>,
    attempts: Vec<Attempt>,
    finished: Vec<Finished>,
    known_datasets: Vec<Known>,
    inbox_ended: bool,
}

// The shard is never pinned structurally: its parts are moved freely.
impl<B: Backend> Unpin for Shard<B> {}

impl<B: Backend> Shard<B> {
    /// `eager_flush_reads`: see `UringConfig`; 0 for backends that gain nothing by it.
    pub(crate) fn new(
        backend: B,
        inbox: mpsc::Receiver<Message>,
        metrics: Arc<ShardMetrics>,
        eager_flush_reads: u32,
    ) -> Self {
        let depth = metrics.queue_depth.max(1);
        Self {
            backend,
            inbox,
            metrics,
            eager_flush_reads,
            actives: Vec::new(),
            free_actives: Vec::new(),
            to_start: VecDeque::new(),
            unstarted: 0,
            slots: vec![None; depth as usize],
            free_slots: (0..depth).rev().collect(),
            attempts: Vec::with_capacity(depth as usize),
            finished: Vec::with_capacity(depth as usize),
            known_datasets: Vec::new(),
            inbox_ended: false,
        }
    }

    fn in_flight(&self) -> u32 {
        // Both are at most queue_depth, a u32.
        u32::try_from(self.slots.len() - self.free_slots.len()).unwrap_or(u32::MAX)
    }

    /// Takes batches from the inbox while there is room to start their reads soon. Returns whether the inbox will
    /// wake the task: not when it was left with messages for want of room.
    fn admit(&mut self, cx: &mut Context<'_>) -> bool {
        while !self.inbox_ended {
            if !self.has_room() {
                return false;
            }
            match self.inbox.poll_recv(cx) {
                Poll::Ready(Some(Message::Work(work))) => self.take_up(work),
                Poll::Ready(Some(Message::Drain)) => self.inbox.close(),
                Poll::Ready(Some(Message::Sweep)) => self.sweep(),
                // Whoever asked may have given up waiting.
                Poll::Ready(Some(Message::Beat(reply))) => drop(reply.send(())),
                Poll::Ready(None) => self.inbox_ended = true,
                Poll::Pending => break,
            }
        }
        true
    }

    fn has_room(&self) -> bool {
        self.unstarted < self.slots.len()
    }

    fn take_up(&mut self, work: Box<Work>) {
        let reads = work.plan.reads.len();
        let counters = self.counters_of(&work);
        self.metrics.batch_items.observe(work.items.len() as u64, 1);
        if work.reply.is_closed() {
            self.unqueue(reads);
            counters.count_failed(RESULT_ABANDONED, work.items.len() as u64);
            return;
        }
        // The deadline is looked at here, so that a request whose caller gave up never reaches the disk (TRAPS 25).
        if work.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            self.unqueue(reads);
            counters.count_failed(ReadError::DeadlineExceeded.label(), work.items.len() as u64);
            // The receiver may be gone by now; then nobody wants to know.
            let _gone = work.reply.send(Err(ReadError::DeadlineExceeded));
            return;
        }
        let active = Active {
            work,
            counters,
            next_read: 0,
            in_flight: 0,
        };
        if reads == 0 {
            return self.answer(active, Instant::now());
        }
        let key = self.free_actives.pop().unwrap_or_else(|| {
            self.actives.push(None);
            self.actives.len() - 1
        });
        if let Some(place) = self.actives.get_mut(key) {
            *place = Some(active);
        }
        self.unstarted += reads;
        self.to_start.push_back(key);
    }

    fn counters_of(&mut self, work: &Work) -> Arc<DatasetCounters> {
        let (id, backend) = (work.dataset.id(), work.backend);
        let index = self.known_datasets.iter().position(|known| known.id == id);
        let index = index.unwrap_or_else(|| {
            let files = work.dataset.files();
            self.backend.introduce(files);
            self.known_datasets.push(Known {
                id,
                dataset: Arc::downgrade(&work.dataset),
                files: files.iter().map(|file| file.id).collect(),
                counters: Vec::new(),
            });
            self.known_datasets.len() - 1
        });
        let known = self
            .known_datasets
            .get_mut(index)
            .map(|known| &mut known.counters);
        let found = known
            .as_ref()
            .and_then(|known| known.iter().find(|(of, _)| *of == backend));
        match found {
            Some((_, counters)) => Arc::clone(counters),
            None => {
                let counters = self.metrics.dataset(work.dataset.name(), backend);
                if let Some(known) = known {
                    known.push((backend, Arc::clone(&counters)));
                }
                counters
            }
        }
    }

    fn sweep(&mut self) {
        // A batch holds its dataset until it is answered, so nothing that is in flight is let go of.
        let backend = &mut self.backend;
        self.known_datasets.retain(|known| {
            let held = known.dataset.strong_count() > 0;
            if !held {
                backend.forget(&known.files);
            }
            held
        });
    }

    fn unqueue(&self, reads: usize) {
        self.metrics
            .queued
            .fetch_sub(i64::try_from(reads).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    /// Starts reads, oldest batch first, until the queue depth is reached.
    fn start_reads(&mut self, now: Instant) {
        let mut started = 0;
        while let (Some(&key), false) = (self.to_start.front(), self.free_slots.is_empty()) {
            let Some(active) = self.actives.get_mut(key).and_then(Option::as_mut) else {
                self.to_start.pop_front();
                continue;
            };
            let total = active.work.plan.reads.len();
            if active.next_read < total && active.work.reply.is_closed() {
                // Given up: what is in flight finishes, the rest is not read.
                self.unstarted -= total - active.next_read;
                started += total - active.next_read;
                active.next_read = total;
            }
            let lane = self.metrics.lane(active.work.backend);
            let queued_ns = nanoseconds(now.saturating_duration_since(active.work.accepted));
            while active.next_read < total {
                let Some(slot) = self.free_slots.pop() else { break };
                let Some(read) = active.work.plan.reads.get(active.next_read).copied() else {
                    break;
                };
                active.next_read += 1;
                active.in_flight += 1;
                self.unstarted -= 1;
                started += 1;
                lane.queue_time.observe(queued_ns, 1);
                let state = Slot {
                    active: key,
                    read,
                    from: 0,
                    reached: 0,
                    interrupted: 0,
                    started: now,
                };
                if let Some(attempt) = active.work.attempt(slot, &read, 0) {
                    self.attempts.push(attempt);
                }
                if let Some(place) = self.slots.get_mut(slot as usize) {
                    *place = Some(state);
                }
            }
            if active.next_read < total {
                break;
            }
            self.to_start.pop_front();
            if active.in_flight == 0 {
                self.close(key, now);
            }
        }
        if started > 0 {
            self.unqueue(started);
        }
    }

    /// Hands the prepared attempts to the backend.
    fn launch(&mut self) {
        if self.attempts.is_empty() {
            return;
        }
        self.backend.announce(&self.attempts);
        let in_flight = self.in_flight();
        let fresh = u32::try_from(self.attempts.len()).unwrap_or(u32::MAX);
        let mut depth = in_flight.saturating_sub(fresh);
        let mut unflushed = 0;
        for attempt in self.attempts.drain(..) {
            depth += 1;
            self.metrics.depth_seen.observe(u64::from(depth), 1);
            let length = attempt.length;
            match self.backend.start(attempt) {
                Route::Device => self.metrics.count_device_read(length),
                Route::PageCache => self.metrics.count_resident_read(),
            }
            unflushed += 1;
            if unflushed == self.eager_flush_reads && depth < EAGER_FLUSH_IN_FLIGHT_MAX {
                self.metrics.count_submission(self.backend.flush());
                unflushed = 0;
            }
        }
        self.metrics.in_flight.store(in_flight, Ordering::Relaxed);
    }

    /// Looks at one finished attempt: the read is done, goes on, or has failed.
    fn finish(&mut self, finished: Finished, now: Instant) {
        let Some(place) = self.slots.get_mut(finished.slot as usize) else {
            return;
        };
        let Some(mut slot) = place.take() else { return };
        let Some(active) = self.actives.get_mut(slot.active).and_then(Option::as_mut) else {
            return;
        };
        let read = slot.read;
        let again = match finished.result {
            Ok(bytes) => {
                let reached = slot.from.saturating_add(bytes).min(read.length);
                let progress = reached > slot.reached;
                slot.reached = slot.reached.max(reached);
                let goes_on = slot.reached < read.needed && progress;
                if goes_on {
                    // The next attempt begins on the alignment, of the file and of the memory, so it repeats some
                    // bytes; end of file is when it brings nothing new. Worked, alignment 512: 700 of 4096 arrive;
                    // again from 512, which brings 188: 700 once more, so the file ends there.
                    slot.from = slot.reached - slot.reached % active.work.restart_alignment(&read);
                }
                goes_on
            }
            Err(libc::EINTR | libc::EAGAIN) if slot.interrupted < INTERRUPTED_RETRIES_MAX => {
                slot.interrupted += 1;
                true
            }
            Err(_) => false,
        };
        if again && let Some(attempt) = active.work.attempt(finished.slot, &read, slot.from) {
            self.attempts.push(attempt);
            *place = Some(slot);
            return;
        }
        self.free_slots.push(finished.slot);
        active.in_flight -= 1;
        self.metrics
            .lane(active.work.backend)
            .device_time
            .observe(nanoseconds(now.saturating_duration_since(slot.started)), 1);
        let errno = finished.result.err();
        if errno.is_some() && read.pieces > 1 {
            // A merged read failed as a whole, but perhaps only one item's bytes are bad: read each on its own, so
            // that every backend fails the same items.
            let singles = active.work.split_pieces(&read);
            self.unstarted += singles;
            self.metrics
                .queued
                .fetch_add(i64::try_from(singles).unwrap_or(0), Ordering::Relaxed);
            if !self.to_start.contains(&slot.active) {
                self.to_start.push_front(slot.active);
            }
            return;
        }
        active.work.deliver(&read, slot.reached, errno);
        if active.in_flight == 0 && active.next_read == active.work.plan.reads.len() {
            self.close(slot.active, now);
        }
    }

    /// Removes a batch of which nothing is left to do, and answers it.
    fn close(&mut self, key: usize, now: Instant) {
        if let Some(active) = self.actives.get_mut(key).and_then(Option::take) {
            self.free_actives.push(key);
            self.answer(active, now);
        }
    }

    fn answer(&self, active: Active, now: Instant) {
        let Active { work, counters, .. } = active;
        let Work {
            items,
            mut errors,
            plan,
            buffer,
            accepted,
            fail_fast,
            reply,
            backend,
            ..
        } = *work;
        let count = items.len() as u64;
        if reply.is_closed() {
            counters.count_failed(RESULT_ABANDONED, count);
            return;
        }
        // Of an item in several reads one error is told, whichever read finished first: the device's before the end of
        // the file.
        errors.sort_by_key(|error| (error.item, matches!(error.error, ReadError::Truncated { .. })));
        errors.dedup_by_key(|error| error.item);
        let (data, lengths) = match buffer {
            Some(buffer) if errors.is_empty() => {
                let length: usize = items.iter().map(|item| item.length as usize).sum();
                let mut buffer = buffer;
                let lead = plan.lead_bytes as usize;
                buffer.set_visible(lead..lead + length);
                (buffer.into_bytes(), Lengths::of(&items))
            }
            Some(buffer) => compact(buffer, plan.lead_bytes as usize, &items, &errors),
            None if errors.is_empty() => (bytes::Bytes::new(), Lengths::of(&items)),
            None => (
                bytes::Bytes::new(),
                Lengths::Each(items.iter().map(|item| item.length).collect()),
            ),
        };
        // Counted before it is answered: whoever has the answer finds it in the metrics.
        counters.count_ok(count - errors.len() as u64, data.len() as u64);
        for error in &errors {
            counters.count_failed(error.error.label(), 1);
        }
        self.metrics
            .lane(backend)
            .total_time
            .observe(nanoseconds(now.saturating_duration_since(accepted)), count);
        let answer = match errors.first() {
            Some(first) if fail_fast => Err(first.error.clone()),
            Some(_) | None => Ok(Fetched {
                data,
                lengths,
                errors,
            }),
        };
        // A receiver that is gone wants no answer; the memory returns to the pool here.
        let _gone = reply.send(answer);
    }
}

impl<B: Backend> Future for Shard<B> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let shard = &mut *self;
        loop {
            let inbox_wakes = shard.admit(cx);
            if !shard.to_start.is_empty() && !shard.free_slots.is_empty() {
                shard.start_reads(Instant::now());
            }
            shard.launch();
            let submissions = shard.backend.flush();
            if submissions > 0 {
                shard.metrics.count_submission(submissions);
            }
            let mut finished = std::mem::take(&mut shard.finished);
            let polled = shard.backend.poll_finished(cx, &mut finished);
            if !finished.is_empty() {
                let now = Instant::now();
                for one in finished.drain(..) {
                    shard.finish(one, now);
                }
                shard
                    .metrics
                    .in_flight
                    .store(shard.in_flight(), Ordering::Relaxed);
            }
            shard.finished = finished;
            if polled.is_pending() {
                // Room came since the inbox was looked at, perhaps with nothing left in flight (a batch given up): it
                // must be looked at again, or nobody ever wakes this task.
                if !inbox_wakes && shard.has_room() {
                    continue;
                }
                let idle = shard.in_flight() == 0 && shard.to_start.is_empty() && shard.attempts.is_empty();
                return if idle && shard.inbox_ended {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                };
            }
        }
    }
}

impl<B: Backend> Drop for Shard<B> {
    fn drop(&mut self) {
        if self.in_flight() == 0 {
            return;
        }
        // The kernel may still write to these batches' memory. Never freed is safe; freed is not (TRAPS 2).
        for active in self
            .actives
            .iter_mut()
            .filter_map(Option::take)
            .filter(|active| active.in_flight > 0)
        {
            let Active { work, .. } = active;
            let Work { buffer, scratch, .. } = *work;
            std::mem::forget(buffer);
            std::mem::forget(scratch);
        }
    }
}
