//! A shard as a future: what one turn on its thread does, in which order, and when other tasks get theirs.

use super::Shard;
use crate::backend::Backend;
use crate::cores::{self, give_way};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Callers, and bytes of their reads that were started, finished or copied.
#[derive(Debug, Default)]
pub(super) struct Served(Vec<(u64, u64)>);

impl Served {
    /// `origin`: caller and connection.
    pub(super) fn add(&mut self, origin: Option<(u64, u64)>, bytes: u64) {
        let Some((caller, _)) = origin else { return };
        match self.0.last_mut() {
            Some((last, served)) if *last == caller => *served += bytes,
            Some(_) | None => self.0.push((caller, bytes)),
        }
    }
}

impl<B: Backend> Future for Shard<B> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let shard = &mut *self;
        shard.charges = cores::is_shared();
        let begun = shard.charges.then(Instant::now);
        let polled = shard.take_turn(cx);
        if let Some(begun) = begun {
            shard.charge(begun.elapsed());
        }
        shard.served.0.clear();
        polled
    }
}

impl<B: Backend> Shard<B> {
    /// Charges the time of a turn to the callers that it served, by bytes.
    pub(super) fn charge(&self, time: Duration) {
        let bytes: u64 = self.served.0.iter().map(|(_, bytes)| bytes).sum();
        let nanoseconds = u64::try_from(time.min(cores::CHARGED_POLL_MAX).as_nanos()).unwrap_or(0);
        for (caller, served) in &self.served.0 {
            let share = nanoseconds.saturating_mul(*served) / bytes.max(1);
            cores::charge(*caller, Duration::from_nanos(share));
        }
    }

    fn take_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let shard = self;
        shard.copied = 0;
        loop {
            shard.obey();
            let more = shard.admit(cx);
            shard.run_copy_tasks();
            if !shard.turns.is_empty() && shard.in_flight.has_room() {
                shard.start_reads(Instant::now());
            }
            shard.launch();
            let submissions = shard.backend.flush();
            if submissions > 0 {
                shard.metrics.count_submission(submissions);
            }
            let mut finished = std::mem::take(&mut shard.finished);
            let polled = shard.backend.poll_completions(cx, &mut finished);
            shard.copied += shard.backend.take_copied();
            if !finished.is_empty() {
                let now = Instant::now();
                for one in finished.drain(..) {
                    shard.finish(one, now);
                }
                shard.took.tell(&shard.metrics);
                shard
                    .metrics
                    .in_flight
                    .store(shard.in_flight.len(), Ordering::Relaxed);
            }
            shard.finished = finished;
            if polled.is_pending() && !more && shard.copy_tasks.is_empty() {
                return if shard.is_idle() && shard.inbox.has_ended() {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                };
            }
            if more || shard.copied >= shard.turn_copy_bytes {
                // Other tasks of the thread run first, and control messages are checked again.
                give_way(cx);
                return Poll::Pending;
            }
        }
    }
}
