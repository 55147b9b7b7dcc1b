//! Reads that their device does not answer must not keep the reads of other datasets waiting.
//!
//! A submitted read cannot be cancelled, so the reads of a device that hangs would soon be all that may be in flight.
//! A read that is in flight for [`STALLED_AFTER`] therefore counts towards no limit, and until it ends, no further read of
//! its dataset is started: its batches are parked, where their deadlines end them. For the others the backend has spare
//! slots ([`Backend::slots`]). While reads wait and nothing more may be started, this is checked every [`CHECK`].

use super::Shard;
use crate::backend::Backend;
use std::future::Future as _;
use std::pin::Pin;
use std::task::Context;
use std::time::{Duration, Instant};
use tokio::task::coop::has_budget_remaining;
use tokio::time::{Sleep, sleep};

/// Far above what a read takes on a disk with a long queue: 128 reads of a disk that makes 100 a second take 1.3 s.
const STALLED_AFTER: Duration = Duration::from_secs(3);

/// Time between two checks.
const CHECK: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(super) struct Stalled {
    /// Datasets with stalled reads, by id, and how many.
    datasets: Vec<(u64, u32)>,
    /// Batches that wait for these reads. They are not in `turns`, but keep their number likewise.
    pub(super) parked: Vec<usize>,
    /// The next check. Without spare slots there is none.
    check: Option<Pin<Box<Sleep>>>,
    has_spare_slots: bool,
    pub(super) after: Duration,
    pub(super) every: Duration,
}

impl Stalled {
    pub(super) fn new(has_spare_slots: bool) -> Self {
        Self {
            datasets: Vec::new(),
            parked: Vec::new(),
            check: None,
            has_spare_slots,
            after: STALLED_AFTER,
            every: CHECK,
        }
    }

    fn has(&self, dataset: u64) -> bool {
        self.datasets.iter().any(|(id, _)| *id == dataset)
    }
}

impl<B: Backend> Shard<B> {
    fn dataset_of(&self, key: usize) -> Option<u64> {
        let active = self.actives.get(key)?.as_ref()?;
        Some(active.batch.dataset.id())
    }

    /// Whether a batch has to wait for stalled reads of its dataset.
    pub(super) fn is_stalled(&self, key: usize) -> bool {
        !self.stalled.datasets.is_empty() && self.dataset_of(key).is_some_and(|id| self.stalled.has(id))
    }

    /// Before the shard waits: whether reads that have stalled make room for those that wait. Wakes the shard for the next
    /// check.
    pub(super) fn makes_room(&mut self, cx: &mut Context<'_>) -> bool {
        if self.turns.is_empty() || !self.stalled.has_spare_slots || self.in_flight.has_room() {
            return false;
        }
        match &mut self.stalled.check {
            Some(check) if !check.is_elapsed() => false,
            // Without budget the timer would not be set.
            _ if !has_budget_remaining() => {
                cx.waker().wake_by_ref();
                false
            }
            check => {
                let mut next = Box::pin(sleep(self.stalled.every));
                let _pending = next.as_mut().poll(cx);
                let is_due = check.replace(next).is_some();
                if is_due {
                    self.find_stalled(Instant::now());
                }
                is_due && self.in_flight.has_room()
            }
        }
    }

    pub(super) fn find_stalled(&mut self, now: Instant) {
        let Some(before) = now.checked_sub(self.stalled.after) else {
            return;
        };
        for key in self.in_flight.stall(before) {
            let Some(active) = self.actives.get(key).and_then(Option::as_ref) else {
                continue;
            };
            let id = active.batch.dataset.id();
            match self.stalled.datasets.iter_mut().find(|(known, _)| *known == id) {
                Some((_, count)) => *count += 1,
                None => {
                    let dataset = active.batch.dataset.name();
                    tracing::warn!(
                        dataset,
                        "reads take longer than 3 s and leave no room: until they end, no others of this dataset are started"
                    );
                    self.stalled.datasets.push((id, 1));
                }
            }
        }
    }

    /// A stalled read of this batch has ended. After the last one its dataset's batches wait for their turn again.
    pub(super) fn recover(&mut self, key: usize) {
        let Some(id) = self.dataset_of(key) else { return };
        let Some(index) = self.stalled.datasets.iter().position(|(known, _)| *known == id) else {
            return;
        };
        if let Some((_, count)) = self.stalled.datasets.get_mut(index) {
            *count = count.saturating_sub(1);
            if *count > 0 {
                return;
            }
        }
        self.stalled.datasets.swap_remove(index);
        for key in std::mem::take(&mut self.stalled.parked) {
            if self.is_stalled(key) {
                self.stalled.parked.push(key);
            } else if let Some(active) = self.actives.get_mut(key).and_then(Option::as_mut) {
                active.waits = false;
                self.wait_for_turn(key);
            } else {
                self.forget(key);
            }
        }
    }
}
