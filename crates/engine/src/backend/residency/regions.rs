//! Regions of files that were found completely resident: for some seconds their reads are not queried.
//!
//! cachestat(2) of one page walks memory that is in no cache (0.5 to 1 us for a file of 10 GiB, more than the
//! copy), but each page after that costs 39 ns (MEASURED). So where reads keep finding their pages, one query
//! covers the whole region; if it is complete, another one (mincore(2)) tells whether each page has been read.
//! Invariants: a trusted region was completely read and resident at most [`VALID_TICKS`] ago, and a thread that trusts
//! has not been seen to wait for a page for as long. A page that is evicted meanwhile may block a network thread for one
//! device read, which ends the thread's trust. Process-wide, like the page cache, and by `OpenFile::pages`: what one
//! finds missing nobody trusts. One word per region, by hashing; a collision costs a query.

use crate::backend::mmap::{major_faults, waits};
use crate::backend::uring::has_reads_in_flight;
use rustix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// At 39 ns a page of 4 KiB a query takes 20 us, a fifth of a turn.
pub(super) const REGION_BYTES: u64 = 2 << 20;

/// 512 KiB of words, for 128 GiB of files; further regions are queried read by read.
const SLOTS: usize = 1 << 16;

/// Reads in a row that must find their pages before the whole region is queried.
const HITS: u16 = 8;

/// Resolution of the trust, and how late a fault may be noticed.
const TICK_MS: u64 = 16;

/// 8.2 s. At 310,000 reads/s over 10 GiB each region is read 500 times in it. One fault per thread in that
/// time, 10 ms on a slow disk, costs 0.1 % of the time.
const VALID_TICKS: u32 = 512;

/// Completely resident. Lower values, except [`SPOILED`], count hits in a row.
const COMPLETE: u16 = u16::MAX;

/// A page was missing lately: no query before the slot expires.
const SPOILED: u16 = u16::MAX - 1;

const TAG_BITS: u32 = 20;
const TICK_BITS: u32 = 28;

static REGIONS: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];

thread_local! {
    static FAULTS: Cell<Option<Faults>> = const { Cell::new(None) };
}

/// A thread's major faults.
#[derive(Debug, Clone, Copy)]
struct Faults {
    counted_at: Tick,
    count: i64,
    /// When one was last noticed.
    noticed_at: Option<Tick>,
}

/// A moment, in ticks of the kernel's coarse clock, which costs no system call; wraps after 49 days.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tick(u32);

impl Tick {
    pub(crate) fn now() -> Self {
        let time = clock_gettime(ClockId::MonotonicCoarse);
        let (seconds, nanoseconds) = (
            time.tv_sec.try_into().unwrap_or(0_u64),
            time.tv_nsec.try_into().unwrap_or(0_u64),
        );
        let ticks = (seconds * 1000 + nanoseconds / 1_000_000) / TICK_MS;
        Self(u32::try_from(ticks & ((1 << TICK_BITS) - 1)).unwrap_or(0))
    }

    /// Whether `since` is at most [`VALID_TICKS`] ago; also if it is a little later, since a launch keeps the
    /// time of its start while other threads go on.
    fn is_recent(self, since: Self) -> bool {
        let age = self.0.wrapping_sub(since.0).wrapping_add(VALID_TICKS);
        age & ((1 << TICK_BITS) - 1) <= 2 * VALID_TICKS
    }
}

/// One region's word: 20 bits of tag, 28 of time, 16 of count.
#[derive(Debug, Clone, Copy)]
struct Word {
    tag: u64,
    since: Tick,
    hits: u16,
}

impl Word {
    #[expect(clippy::cast_possible_truncation, reason = "masked or the lowest bits")]
    fn of(bits: u64) -> Self {
        Self {
            tag: bits >> (64 - TAG_BITS),
            since: Tick((bits >> 16) as u32 & ((1 << TICK_BITS) - 1)),
            hits: bits as u16,
        }
    }

    fn bits(self) -> u64 {
        self.tag << (64 - TAG_BITS) | u64::from(self.since.0) << 16 | u64::from(self.hits)
    }
}

/// A region's slot and tag. Neighbouring regions have neighbouring slots, which keeps them in the CPU's
/// cache.
fn place(file: u64, region: u64) -> (&'static AtomicU64, u64) {
    // Fibonacci hashing: the high bits of the product are the best mixed.
    let base = file.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    let index = usize::try_from(base.wrapping_add(region)).unwrap_or(0) % SLOTS;
    let tag = (file.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ region).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    #[expect(clippy::indexing_slicing, reason = "below SLOTS")]
    (&REGIONS[index], tag >> (64 - TAG_BITS))
}

/// The regions that a read touches; `length` is at least 1.
fn touched(offset: u64, length: u32) -> std::ops::RangeInclusive<u64> {
    offset / REGION_BYTES..=(offset + u64::from(length)).saturating_sub(1) / REGION_BYTES
}

/// Whether bytes may be copied from a mapping without a query.
pub(super) fn trusts(file: u64, offset: u64, length: u32, now: Tick) -> bool {
    let is_complete = |region| {
        let (slot, tag) = place(file, region);
        let word = Word::of(slot.load(Ordering::Relaxed));
        word.hits == COMPLETE && word.tag == tag && now.is_recent(word.since)
    };
    touched(offset, length).all(is_complete) && no_fault_lately(now)
}

/// Whether this thread may trust. Counts its faults once per tick.
fn no_fault_lately(now: Tick) -> bool {
    FAULTS.with(|cell| {
        let known = cell.get();
        let faults = match known {
            Some(faults) if faults.counted_at == now => faults,
            Some(_) | None => {
                let count = major_faults();
                let noticed_at = match known {
                    Some(before) if before.count == count => before.noticed_at,
                    Some(_) => Some(now),
                    None => None,
                };
                let faults = Faults {
                    counted_at: now,
                    count,
                    noticed_at,
                };
                cell.set(Some(faults));
                faults
            }
        };
        !faults.noticed_at.is_some_and(|at| now.is_recent(at))
    })
}

/// Lets this thread trust again: any code of a test may have waited for its own page.
#[cfg(test)]
pub(crate) fn forget_faults() {
    FAULTS.set(None);
}

/// Makes copies of bytes that may be trusted, and notices if they waited for the device.
///
/// A completion of this thread's ring that arrives while the thread waits for a page hides the fault: the kernel gives it up,
/// and the repeated one finds the page (`fault_signal_pending`; of 500 faults 2 were counted, MEASURED, Linux 6.18). So while
/// reads are in flight the thread's waits are counted, for 0.4 us, instead of its faults.
pub(crate) fn watch<T>(copies: impl FnOnce() -> T) -> T {
    if !has_reads_in_flight() {
        return copies();
    }
    let before = waits();
    let result = copies();
    if waits() > before {
        let now = Tick::now();
        FAULTS.set(Some(Faults {
            counted_at: now,
            count: major_faults(),
            noticed_at: Some(now),
        }));
    }
    result
}

/// Records whether a read's pages were resident. Returns the start of its region if the region is now worth a
/// query.
pub(super) fn learn(file: u64, offset: u64, length: u32, hit: bool, now: Tick) -> Option<u64> {
    let mut regions = touched(offset, length);
    if !hit {
        // Of several any may have the gap.
        regions.for_each(|region| _ = learn_of(file, region, false, now));
        return None;
    }
    match (regions.next(), regions.next()) {
        (Some(region), None) => learn_of(file, region, true, now),
        // Rare; other reads cover these regions.
        _ => None,
    }
}

fn learn_of(file: u64, region: u64, hit: bool, now: Tick) -> Option<u64> {
    let (slot, tag) = place(file, region);
    let mut word = Word::of(slot.load(Ordering::Relaxed));
    let is_current = now.is_recent(word.since);
    if is_current && word.tag != tag && word.hits == COMPLETE {
        return None;
    }
    if !is_current || word.tag != tag {
        word = Word {
            tag,
            since: now,
            hits: 0,
        };
    }
    word.hits = match word.hits {
        _ if !hit => SPOILED,
        // COMPLETE: this thread does not trust now.
        known @ (SPOILED | COMPLETE) => known,
        hits => (hits + 1).min(HITS),
    };
    // If two threads do this at once, one count is lost.
    slot.store(word.bits(), Ordering::Relaxed);
    (word.hits == HITS).then_some(region * REGION_BYTES)
}

/// Records whether a whole region was resident.
pub(super) fn settle(file: u64, begin: u64, complete: bool, now: Tick) {
    let (slot, tag) = place(file, begin / REGION_BYTES);
    let word = Word {
        tag,
        since: now,
        hits: if complete { COMPLETE } else { SPOILED },
    };
    slot.store(word.bits(), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn later(now: Tick) -> Tick {
        Tick(now.0 + VALID_TICKS + 1)
    }

    /// Eight reads in a row that find their pages make a region worth a query. If it is complete, reads
    /// inside it are trusted as long as the verdict is valid; reads that reach beyond it are not, nor is its
    /// neighbour.
    #[test]
    fn a_region_that_is_complete_is_trusted_for_a_while() {
        // An id that no other test's file has.
        let (file, now) = (u64::MAX - 11, Tick(1_000_000));
        let begin = 3 * REGION_BYTES;
        for read in 1..=8_u64 {
            let due = learn(file, begin + read * 4096, 4096, true, now);
            assert_eq!(due, (read == 8).then_some(begin));
            assert!(!trusts(file, begin, 4096, now));
        }
        settle(file, begin, true, now);
        assert!(trusts(file, begin, 4096, now));
        assert_eq!(
            learn(file, begin, 4096, true, now),
            None,
            "of a thread without trust"
        );
        assert!(trusts(file, begin, 4096, now));
        assert!(trusts(file, begin + REGION_BYTES - 4096, 4096, now));
        assert!(!trusts(file, begin + REGION_BYTES - 4096, 4097, now));
        assert!(!trusts(file, begin - 4096, 4096, now));
        assert!(!trusts(file - 1, begin, 4096, now));
        forget_faults();
        assert!(trusts(file, begin, 4096, Tick(now.0 + VALID_TICKS)));
        assert!(!trusts(file, begin, 4096, later(now)));
    }

    /// A launch keeps the time of its start. What other threads found out meanwhile holds for it too.
    #[test]
    fn a_verdict_that_is_newer_than_the_launch_counts() {
        let (file, started) = (u64::MAX - 14, Tick(1_000_000));
        settle(file, 0, true, Tick(started.0 + 1));
        assert!(trusts(file, 0, 4096, started));
        assert_eq!(learn(file, 0, 4096, true, started), None);
        assert!(trusts(file, 0, 4096, started), "not overwritten");
    }

    /// A region with a missing page is not queried again before its slot expires.
    #[test]
    fn a_region_with_a_gap_is_left_alone_for_a_while() {
        let (file, now) = (u64::MAX - 12, Tick(1_000_000));
        let asks = |now| (0..100).filter_map(|_| learn(file, 0, 4096, true, now)).count();
        assert_eq!(learn(file, 0, 4096, false, now), None);
        assert_eq!(asks(now), 0);
        assert!(asks(later(now)) > 0);
        settle(file, 0, false, later(now));
        assert_eq!(asks(later(now)), 0);
    }

    /// A miss ends the trust in its region. A region that shares a word with a trusted one does not take it
    /// over.
    #[test]
    fn a_miss_ends_the_trust() {
        let (file, now) = (u64::MAX - 13, Tick(1_000_000));
        let elsewhere = SLOTS as u64 * REGION_BYTES;
        settle(file, 0, true, now);
        learn(file, elsewhere, 4096, false, now);
        assert!(trusts(file, 0, 4096, now) && !trusts(file, elsewhere, 4096, now));
        learn(file, 0, 4096, false, now);
        assert!(!trusts(file, 0, 4096, now));
        // Across two regions: of both.
        for begin in [0, REGION_BYTES] {
            settle(file, begin, true, now);
        }
        learn(file, REGION_BYTES - 1, 2, false, now);
        assert!(!trusts(file, 0, 4096, now) && !trusts(file, REGION_BYTES, 4096, now));
    }

    /// A word keeps what was put into it, at the limits too.
    #[test]
    fn a_word_has_room_for_all_three() {
        for (tag, since, hits) in [
            (0, 0, 0),
            ((1 << 20) - 1, (1 << 28) - 1, COMPLETE),
            (5, 9, SPOILED),
        ] {
            let since = Tick(since);
            let word = Word::of(Word { tag, since, hits }.bits());
            assert_eq!((word.tag, word.since, word.hits), (tag, since, hits));
        }
        assert!(Tick(3).is_recent(Tick((1 << 28) - 3)), "across the wrap");
    }
}
