//! Reads that their disk does not answer must not keep the reads of other disks waiting.
//!
//! A submitted read cannot be cancelled, so the reads of a disk that hangs would soon be all that may be in flight.
//! The bytes of a read that is in flight for [`STALLED_AFTER`] while others wait for room therefore count towards no limit. If
//! such reads are most of what may be in flight, their disk hangs: they count towards no limit of reads either, and until most
//! have ended, no further read of the disk is started: the batches are parked, where their deadlines end them. For the others
//! the backend has spare slots ([`Backend::slots`]). Fewer only take the slots that they have: a disk with one block that it
//! cannot read answers for the others. Either way a disk has at most as many reads in flight as a ring may have.

use super::Shard;
use super::in_flight::TrackedRead;
use crate::backend::Backend;
use crate::plan::PlannedRead;
use crate::planned_batch::PlannedBatch;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Far above what a read takes on a disk with a long queue: 128 reads of a disk that makes 100 a second take 1.3 s.
const STALLED_AFTER: Duration = Duration::from_secs(3);

/// The share of what may be in flight, in thousandths, beyond which stalled reads are most of it.
const MOST: u64 = 500;

/// Without a look at the reads for this long, twice the time between two, the process was paused, or nothing waited.
const PAUSED_AFTER: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(super) struct Stalled {
    /// Disks with stalled reads.
    pub(super) disks: Vec<SlowDisk>,
    /// Batches that wait for those that hang. They are not in `turns`, but keep their number likewise.
    pub(super) parked: Vec<usize>,
    has_spare_slots: bool,
    /// When stalled reads were last looked for; `None` after a pause.
    looked: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct SlowDisk {
    /// [`crate::dataset::Dataset::disk_of`].
    disk: u64,
    /// A dataset on it, for the log.
    dataset: String,
    /// Its stalled reads, and their bytes.
    pub(super) reads: u32,
    bytes: u64,
    pub(super) hangs: bool,
}

impl Stalled {
    pub(super) fn new(has_spare_slots: bool) -> Self {
        Self {
            disks: Vec::new(),
            parked: Vec::new(),
            has_spare_slots,
            looked: None,
        }
    }

    /// Whether any disk has stalled reads.
    pub(super) fn any(&self) -> bool {
        !self.disks.is_empty()
    }

    /// Whether a read has to wait, since its disk hangs.
    pub(super) fn keeps(&self, batch: &PlannedBatch, read: &PlannedRead) -> bool {
        let disk = batch.disk_of(read);
        disk.is_some_and(|disk| self.disks.iter().any(|known| known.hangs && known.disk == disk))
    }

    /// The stalled reads of disks that hang, or of the others, and their bytes.
    fn reads_of(&self, hanging: bool) -> (u32, u64) {
        let disks = self.disks.iter().filter(|disk| disk.hangs == hanging);
        disks.fold((0, 0), |(reads, bytes), disk| {
            (reads + disk.reads, bytes + disk.bytes)
        })
    }
}

impl<B: Backend> Shard<B> {
    fn disk_of(&self, read: &TrackedRead) -> Option<u64> {
        let active = self.actives.get(read.active)?.as_ref()?;
        active.batch.disk_of(&read.read)
    }

    /// Whether the next read of a batch has to wait, since its disk hangs.
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
        let looked = self.stalled.looked;
        let was_paused = looked.is_some_and(|looked| now.saturating_duration_since(looked) > PAUSED_AFTER);
        self.stalled.looked = (!was_paused).then_some(now);
        if was_paused {
            // Reads may have completed meanwhile, and the shard does not know it yet: the next look is soon enough.
            return;
        }
        // There may be more room than there was: other disks answer, or fewer callers share it.
        for index in 0..self.stalled.disks.len() {
            let (reads, bytes) = self.stalled.reads_of(false);
            if let Some(disk) = self.stalled.disks.get(index) {
                self.reconsider(index, reads + disk.reads, bytes + disk.bytes);
            }
        }
        // A turn that is not over has a read for which there is no room, while there may be for shorter ones.
        let has_room = self.turn.is_none() && self.in_flight.has_room();
        if self.turns.is_empty() || !self.stalled.has_spare_slots || has_room {
            return;
        }
        let Some(before) = now.checked_sub(STALLED_AFTER) else {
            return;
        };
        for read in self.in_flight.stall(before) {
            let Some(disk) = self.disk_of(&read) else { continue };
            let bytes = u64::from(read.read.length);
            if let Some(known) = self.stalled.disks.iter_mut().find(|known| known.disk == disk) {
                known.reads += 1;
                known.bytes += bytes;
                continue;
            }
            let active = self.actives.get(read.active).and_then(Option::as_ref);
            self.stalled.disks.push(SlowDisk {
                disk,
                dataset: active.map_or("", |active| active.batch.dataset.name()).to_owned(),
                reads: 1,
                bytes,
                hangs: false,
            });
        }
        self.find_hanging();
    }

    /// While stalled reads of other disks are most of what may be in flight, the one with the most of them hangs.
    fn find_hanging(&mut self) {
        loop {
            self.note_held();
            let (reads, bytes) = self.stalled.reads_of(false);
            if self.in_flight.share(reads, bytes) <= MOST {
                return;
            }
            let others = self.stalled.disks.iter_mut().filter(|disk| !disk.hangs);
            let Some(worst) = others.max_by_key(|disk| self.in_flight.share(disk.reads, disk.bytes)) else {
                return;
            };
            worst.hangs = true;
            tracing::warn!(
                dataset = worst.dataset,
                "reads take longer than 3 s and leave no room: until most have ended, no others of this dataset's disk are started"
            );
        }
    }

    fn note_held(&mut self) {
        let (held, _) = self.stalled.reads_of(true);
        self.in_flight.set_held(held);
        self.metrics.stalled.store(held, Ordering::Relaxed);
        self.note_limit();
    }

    /// A stalled read has ended. Once only few are left of its disk, that answers again, and batches wait for their turn.
    pub(super) fn recover(&mut self, read: &TrackedRead) {
        let Some(number) = self.disk_of(read) else { return };
        let Some(index) = self.stalled.disks.iter().position(|known| known.disk == number) else {
            return;
        };
        let Some(disk) = self.stalled.disks.get_mut(index) else {
            return;
        };
        disk.reads = disk.reads.saturating_sub(1);
        disk.bytes = disk.bytes.saturating_sub(read.read.length.into());
        let (reads, bytes) = (disk.reads, disk.bytes);
        self.reconsider(index, reads, bytes);
        if reads == 0 {
            self.stalled.disks.swap_remove(index);
        }
    }

    /// A disk that hangs does so no longer if this many reads are at most half of what may be in flight.
    fn reconsider(&mut self, index: usize, reads: u32, bytes: u64) {
        let known = self.stalled.disks.get_mut(index);
        if !known.is_some_and(|disk| std::mem::take(&mut disk.hangs)) {
            return;
        }
        self.note_held();
        if self.in_flight.share(reads, bytes) > MOST {
            if let Some(disk) = self.stalled.disks.get_mut(index) {
                disk.hangs = true;
            }
            return self.note_held();
        }
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
