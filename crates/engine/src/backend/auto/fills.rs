//! Parts of files that any shard of this process is reading into the page cache.
//!
//! The page cache counts a page as present from the start of its read. Copying it from a mapping then waits for the
//! device, which would block a network thread with all of its connections. So a shard records here what its ring reads
//! through the page cache, for whichever backend and dataset, and every shard checks this before it copies from a mapping
//! without a query.
//!
//! One counter for each [`GRAIN_BYTES`] of a file, by hashing: a collision costs a system call (see `auto`), never a
//! wait. Process-wide, like the page cache, and by `OpenFile::pages`: several may have one file open.

use std::sync::atomic::{AtomicU32, Ordering};

/// Size of the parts. Twice the kernel's default readahead, so that what a read fetches beyond itself is
/// within the next part.
const GRAIN_BYTES: u64 = 256 << 10;

const COUNTERS: usize = 4096;

static FILLING: [AtomicU32; COUNTERS] = [const { AtomicU32::new(0) }; COUNTERS];

/// What one shard's ring reads through the page cache: `OpenFile::pages`, and the first and last grain of each slot.
#[derive(Debug)]
pub(super) struct Fills {
    slots: Vec<Option<(u64, u64, u64)>>,
    count: usize,
}

fn counter(pages: u64, grain: u64) -> &'static AtomicU32 {
    // Fibonacci hashing: the high bits of the product are the best mixed.
    let product = (pages.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ grain).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let index = usize::try_from(product >> 40).unwrap_or(0) % COUNTERS;
    #[expect(clippy::indexing_slicing, reason = "below COUNTERS")]
    &FILLING[index]
}

/// Whether a read may be filling the page cache with these bytes.
pub(super) fn is_filling(pages: u64, offset: u64, length: u32) -> bool {
    let last = (offset + u64::from(length)).saturating_sub(1) / GRAIN_BYTES;
    // Acquire: seeing the end of a fill implies seeing its pages.
    (offset / GRAIN_BYTES..=last).any(|grain| counter(pages, grain).load(Ordering::Acquire) > 0)
}

impl Fills {
    pub(super) fn new(queue_depth: u32) -> Self {
        Self {
            slots: vec![None; queue_depth as usize],
            count: 0,
        }
    }

    #[cfg(test)]
    pub(super) fn are_over(&self) -> bool {
        self.count == 0
    }

    /// Records that a slot's read fills the page cache.
    pub(super) fn begin(&mut self, slot: u32, pages: u64, offset: u64, length: u32) {
        let Some(place) = self.slots.get_mut(slot as usize) else {
            return;
        };
        // One part more, for the kernel's readahead.
        let last = (offset + u64::from(length)).saturating_sub(1) / GRAIN_BYTES + 1;
        let first = offset / GRAIN_BYTES;
        *place = Some((pages, first, last));
        self.count += 1;
        for grain in first..=last {
            counter(pages, grain).fetch_add(1, Ordering::Release);
        }
    }

    /// Records the end of a slot's read.
    pub(super) fn end(&mut self, slot: u32) {
        if self.count == 0 {
            return;
        }
        if let Some((pages, first, last)) = self.slots.get_mut(slot as usize).and_then(Option::take) {
            self.count -= 1;
            for grain in first..=last {
                counter(pages, grain).fetch_sub(1, Ordering::Release);
            }
        }
    }
}

impl Drop for Fills {
    fn drop(&mut self) {
        for slot in 0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX) {
            self.end(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_being_filled_is_seen_until_it_is_over() {
        // A value that no other test's file has.
        let file = u64::MAX - 1;
        let mut fills = Fills::new(4);
        let at = 10 * GRAIN_BYTES;
        fills.begin(0, file, at + 100, 4096);
        fills.begin(1, file, at, 4096);
        assert!(is_filling(file, at, 4096));
        assert!(is_filling(file, at - 1, 2), "across the boundary");
        assert!(is_filling(file, at + GRAIN_BYTES, 4096), "what is read ahead");
        assert!(!is_filling(file, at - 4096, 4096), "in front of it");
        assert!(!is_filling(file, at + 2 * GRAIN_BYTES, 4096), "far behind");
        fills.end(0);
        assert!(is_filling(file, at, 4096), "the other one goes on");
        fills.end(1);
        assert!(!is_filling(file, at, 4096));
        fills.begin(2, file, at, 1 << 20);
        assert!(is_filling(file, at + (1 << 20) - 1, 1));
        drop(fills);
        assert!(
            !is_filling(file, at, 1 << 20),
            "a shard that ends takes its own away"
        );
    }
}
