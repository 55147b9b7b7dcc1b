//! Reads that their disk does not answer must not keep the reads of other disks waiting.
//!
//! A submitted read cannot be cancelled, so the reads of a disk that hangs would soon be all that may be in flight.
//! A read that is in flight for [`STALLED_AFTER`] while others wait for room therefore counts towards no limit, and until it
//! ends, no further read of its disk is started: the batches are parked, where their deadlines end them. For the others the
//! backend has spare slots ([`Backend::slots`]).

use super::Shard;
use super::in_flight::TrackedRead;
use crate::backend::Backend;
use crate::plan::PlannedRead;
use crate::planned_batch::PlannedBatch;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Far above what a read takes on a disk with a long queue: 128 reads of a disk that makes 100 a second take 1.3 s.
const STALLED_AFTER: Duration = Duration::from_secs(3);

/// See the module.
#[derive(Debug)]
pub(super) struct Stalled {
    /// Disks with stalled reads ([`crate::dataset::Dataset::disk_of`]), and how many.
    pub(super) disks: Vec<(u64, u32)>,
    /// Batches that wait for these reads. They are not in `turns`, but keep their number likewise.
    pub(super) parked: Vec<usize>,
    has_spare_slots: bool,
}

impl Stalled {
    pub(super) fn new(has_spare_slots: bool) -> Self {
        Self {
            disks: Vec::new(),
            parked: Vec::new(),
            has_spare_slots,
        }
    }

    /// Whether any disk has stalled reads.
    pub(super) fn any(&self) -> bool {
        !self.disks.is_empty()
    }

    /// Whether a read has to wait for stalled reads of its disk.
    pub(super) fn keeps(&self, batch: &PlannedBatch, read: &PlannedRead) -> bool {
        let disk = batch.disk_of(read);
        disk.is_some_and(|disk| self.disks.iter().any(|(known, _)| *known == disk))
    }
}

impl<B: Backend> Shard<B> {
    fn disk_of(&self, read: &TrackedRead) -> Option<u64> {
        let active = self.actives.get(read.active)?.as_ref()?;
        active.batch.disk_of(&read.read)
    }

    /// Whether the next read of a batch has to wait for stalled reads of its disk.
    pub(super) fn is_stalled(&self, key: usize) -> bool {
        let active = self.actives.get(key).and_then(Option::as_ref);
        self.stalled.any()
            && active.is_some_and(|active| {
                let read = active.batch.plan.reads.get(active.next_read);
                read.is_some_and(|read| self.stalled.keeps(&active.batch, read))
            })
    }

    /// While reads wait and nothing more may be started: finds the reads that have stalled.
    pub(super) fn find_stalled(&mut self, now: Instant) {
        if self.turns.is_empty() || !self.stalled.has_spare_slots || self.in_flight.has_room() {
            return;
        }
        let Some(before) = now.checked_sub(STALLED_AFTER) else {
            return;
        };
        let stalled = self.in_flight.stall(before);
        if !stalled.is_empty() {
            self.note_stalled();
        }
        for read in stalled {
            let Some(disk) = self.disk_of(&read) else { continue };
            match self.stalled.disks.iter_mut().find(|(known, _)| *known == disk) {
                Some((_, count)) => *count += 1,
                None => {
                    let active = self.actives.get(read.active).and_then(Option::as_ref);
                    let dataset = active.map_or("", |active| active.batch.dataset.name());
                    tracing::warn!(
                        dataset,
                        "reads take longer than 3 s and leave no room: until they end, no others of this dataset's disk are started"
                    );
                    self.stalled.disks.push((disk, 1));
                }
            }
        }
    }

    fn note_stalled(&mut self) {
        self.metrics
            .stalled
            .store(self.in_flight.stalled(), Ordering::Relaxed);
        self.note_limit();
    }

    /// A stalled read has ended. After the last one of its disk, batches wait for their turn again.
    pub(super) fn recover(&mut self, read: &TrackedRead) {
        self.note_stalled();
        let Some(disk) = self.disk_of(read) else { return };
        let Some(index) = self.stalled.disks.iter().position(|(known, _)| *known == disk) else {
            return;
        };
        if let Some((_, count)) = self.stalled.disks.get_mut(index) {
            *count = count.saturating_sub(1);
            if *count > 0 {
                return;
            }
        }
        self.stalled.disks.swap_remove(index);
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
