//! The reads in flight: their slots, and which of them covers the bytes of another read.
//!
//! A read whose bytes are covered by a read in flight (same open file, hence the same version, and the same
//! directness) joins it: no second read is made, and the bytes are copied when the first one finishes. Found
//! by hashing: a read is chained under the [`GRAIN_BYTES`] of the file in which it begins; longer reads are
//! in a short list. Worked, grains of 32 KiB: 4 KiB at 100 KiB is searched among the reads that begin in
//! grain 3 or 2, and then among the long ones, of which at most `IN_FLIGHT_BYTES_MAX / GRAIN_BYTES` = 64 are
//! in flight, or 256 for a lone connection.

use crate::plan::{Place, PlannedRead};
use std::time::Instant;

/// Most reads of scattered blocks are shorter, so that two chains are searched for them; longer reads are
/// few.
const GRAIN_BYTES: u32 = 32 << 10;

const NONE: u32 = u32::MAX;

/// So many stalled reads are weighed by their bytes, too: an object of 2 MiB is two reads, and all that may be in flight.
const LONG_READS_MIN: u32 = 8;

/// The source of a read: only reads with equal sources are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileAccess {
    /// `OpenFile::id`.
    pub(super) file: u64,
    pub(super) direct: bool,
}

/// Where a read is indexed among those in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct IndexKey {
    access: FileAccess,
    /// Index into `InFlight::heads`; [`NONE`] for a read longer than a grain.
    chain: u32,
}

/// A read that waits for one in flight, of the same batch or another.
#[derive(Debug, Clone, Copy)]
pub(super) struct JoinedRead {
    /// Its batch.
    pub(super) active: usize,
    pub(super) read: PlannedRead,
}

/// A slot for a read in flight. Filled and cleared in place: moves are measurable at a million reads a
/// second.
#[derive(Debug)]
pub(super) struct Slot {
    /// Its content; meaningless while the slot is free.
    pub(super) tracked: TrackedRead,
    access: FileAccess,
    /// Its chain; `NONE` if it is in none.
    chain: u32,
    /// Where in the read the current attempt begins.
    pub(super) from: u32,
    pub(super) interrupted: u8,
    /// Attempts without progress before the file's end.
    pub(super) barren: u8,
    is_free: bool,
    /// Whether its bytes count towards no limit: see `stalled`.
    is_stalled: bool,
    pub(super) started: Instant,
    /// Reads that joined this one.
    pub(super) joiners: Vec<JoinedRead>,
    /// The next slot in its chain.
    next: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct TrackedRead {
    /// Its batch.
    pub(super) active: usize,
    pub(super) read: PlannedRead,
    /// Bytes from the read's start that have arrived.
    pub(super) reached: u32,
}

/// Which reads in flight a read may join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joinable {
    /// All that cover it.
    Covering,
    /// Those of other batches with the same range that need at least as many bytes: their outcome is this
    /// read's outcome. For a read made after another one failed, so that it cannot keep joining in vain.
    Same { batch: usize },
}

/// See the module.
#[derive(Debug)]
pub(super) struct InFlight {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Most reads in flight: at most one per slot.
    reads_max: u32,
    bytes: u64,
    /// Stalled reads, and their bytes, which are in flight beyond the limit.
    stalled: u32,
    stalled_bytes: u64,
    /// Those of disks that hang, which are in flight beyond the limit of reads, too.
    held: u32,
    bytes_max: u64,
    /// Whether the limit of bytes was reached, and less than half of it is free.
    is_full: bool,
    /// First slot of each chain. A power of two of them, and the mask for an index.
    heads: Vec<u32>,
    chain_mask: u32,
    /// Chained reads that end in another grain than they begin in.
    crossing: usize,
    /// Slots of reads longer than a grain.
    long: Vec<u32>,
}

impl TrackedRead {
    /// Whether `read` covers exactly the same bytes as this one.
    pub(super) fn is_same_range(&self, read: &PlannedRead) -> bool {
        self.read.offset == read.offset && self.read.length == read.length
    }

    /// Offset in this read of the bytes of `read`, which it covers.
    pub(super) fn distance(&self, read: &PlannedRead) -> u32 {
        u32::try_from(read.offset.saturating_sub(self.read.offset)).unwrap_or(u32::MAX)
    }

    fn serves(&self, read: &PlannedRead, joinable: Joinable) -> bool {
        match joinable {
            Joinable::Same { batch } => {
                self.active != batch && self.is_same_range(read) && self.read.needed >= read.needed
            }
            Joinable::Covering => self.read.offset <= read.offset && end_of(read) <= end_of(&self.read),
        }
    }
}

impl Slot {
    fn free() -> Self {
        let read = PlannedRead {
            file: 0,
            direct: false,
            alignment: 1,
            offset: 0,
            length: 0,
            needed: 0,
            place: Place::Data(0),
            first_piece: 0,
            pieces: 0,
        };
        Self {
            tracked: TrackedRead {
                active: 0,
                read,
                reached: 0,
            },
            access: FileAccess {
                file: 0,
                direct: false,
            },
            chain: NONE,
            from: 0,
            interrupted: 0,
            barren: 0,
            is_free: true,
            is_stalled: false,
            started: Instant::now(),
            joiners: Vec::new(),
            next: NONE,
        }
    }
}

impl InFlight {
    /// For `depth` reads of at most `bytes_max` bytes in total, and `slots - depth` more if some have stalled; a single read
    /// may exceed the bytes.
    pub(super) fn new(depth: u32, slots: u32, bytes_max: u64) -> Self {
        // `queue_depth` is far below 2^30.
        let chains = (2 * depth).next_power_of_two();
        Self {
            slots: (0..slots).map(|_| Slot::free()).collect(),
            free: (0..slots).rev().collect(),
            reads_max: depth,
            bytes: 0,
            stalled: 0,
            stalled_bytes: 0,
            held: 0,
            bytes_max,
            is_full: false,
            heads: vec![NONE; chains as usize],
            chain_mask: chains - 1,
            crossing: 0,
            long: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> u32 {
        // There are as many slots as `new` was given, a u32.
        u32::try_from(self.slots.len() - self.free.len()).unwrap_or(u32::MAX)
    }

    /// Those that count towards the limit of reads.
    pub(super) fn moving(&self) -> u32 {
        self.len().saturating_sub(self.held)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Whether a further read may be started. If bytes are the limit, reads are started in groups: one at a
    /// time would take a system call each.
    pub(super) fn has_room(&mut self) -> bool {
        self.is_full &= self.counted_bytes() > self.bytes_max / 2;
        self.moving() < self.moving_max() && !self.is_full && !self.free.is_empty()
    }

    /// Most reads in flight besides those held by disks that hang. While there are some, half of the slots that are left: so there
    /// are others when the next disk hangs, too. Of 256 slots one disk that hangs keeps 128, further ones 64, 32 and so on.
    pub(super) fn moving_max(&self) -> u32 {
        if self.held == 0 {
            return self.reads_max;
        }
        let left = u32::try_from(self.slots.len()).unwrap_or(u32::MAX) - self.held;
        self.reads_max.min(left.div_ceil(2))
    }

    /// How much these reads are of what may be in flight, in thousandths; a few long ones, such as those of one object, only by
    /// their number.
    pub(super) fn share(&self, reads: u32, bytes: u64) -> u64 {
        let of_reads = u64::from(reads) * 1000 / u64::from(self.moving_max().max(1));
        if reads < LONG_READS_MIN {
            return of_reads;
        }
        of_reads.max(bytes * 1000 / self.bytes_max.max(1))
    }

    fn counted_bytes(&self) -> u64 {
        self.bytes - self.stalled_bytes
    }

    /// Sets the limit of reads in flight, at most one per slot.
    pub(super) fn set_reads_max(&mut self, reads_max: u32) {
        self.reads_max = reads_max.min(u32::try_from(self.slots.len()).unwrap_or(u32::MAX));
    }

    /// Sets the limit of bytes in flight.
    pub(super) fn set_bytes_max(&mut self, bytes_max: u64) {
        self.bytes_max = bytes_max;
    }

    /// The slot for a read of this many bytes; `None` if it has to wait.
    pub(super) fn room_for(&mut self, length: u32) -> Option<u32> {
        if !self.has_room() {
            return None;
        }
        let is_first = self.len() == self.stalled;
        if !is_first && self.counted_bytes() + u64::from(length) > self.bytes_max {
            self.is_full = true;
            return None;
        }
        self.free.last().copied()
    }

    /// The key of a read.
    pub(super) fn index_key(&self, access: FileAccess, read: &PlannedRead) -> IndexKey {
        let chain = if read.length > GRAIN_BYTES {
            NONE
        } else {
            self.chain(access, grain_of(read))
        };
        IndexKey { access, chain }
    }

    /// Puts a read into the slot from [`InFlight::room_for`]. Others may join it if it has a key.
    pub(super) fn start(
        &mut self,
        active: usize,
        read: &PlannedRead,
        index_key: Option<IndexKey>,
        now: Instant,
    ) {
        let Some(number) = self.free.pop() else { return };
        self.bytes += u64::from(read.length);
        let Some(slot) = self.slots.get_mut(number as usize) else {
            return;
        };
        slot.tracked.active = active;
        slot.tracked.read = *read;
        slot.tracked.reached = 0;
        slot.from = 0;
        slot.interrupted = 0;
        slot.barren = 0;
        slot.is_free = false;
        slot.is_stalled = false;
        slot.chain = NONE;
        slot.started = now;
        let Some(IndexKey { access, chain }) = index_key else {
            return;
        };
        slot.access = access;
        slot.chain = chain;
        if let Some(head) = self.heads.get_mut(chain as usize) {
            slot.next = std::mem::replace(head, number);
            self.crossing += usize::from(is_crossing(read));
        } else {
            self.long.push(number);
        }
    }

    /// The read in a slot; `None` if the slot is free.
    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut Slot> {
        self.slots.get_mut(slot as usize).filter(|slot| !slot.is_free)
    }

    /// The reads that joined those started by `before`.
    pub(super) fn joiners_since(&mut self, before: Instant) -> impl Iterator<Item = &mut Vec<JoinedRead>> {
        let slots = self.slots.iter_mut();
        let old = slots.filter(move |slot| !slot.is_free && slot.started <= before);
        old.map(|slot| &mut slot.joiners)
    }

    /// Stalls the reads that were started by `before`: their bytes count towards no limit any more. Returns them.
    pub(super) fn stall(&mut self, before: Instant) -> Vec<TrackedRead> {
        let mut stalled = Vec::new();
        for slot in &mut self.slots {
            if !slot.is_free && !slot.is_stalled && slot.started <= before {
                slot.is_stalled = true;
                self.stalled += 1;
                self.stalled_bytes += u64::from(slot.tracked.read.length);
                stalled.push(slot.tracked);
            }
        }
        stalled
    }

    /// From now on, so many stalled reads count towards no limit of reads either.
    pub(super) fn set_held(&mut self, held: u32) {
        self.held = held;
    }

    /// Frees the slot of a finished read, after its joiners were taken. Returns whether it was stalled.
    pub(super) fn finish(&mut self, number: u32) -> bool {
        let Some(slot) = self.slots.get_mut(number as usize).filter(|slot| !slot.is_free) else {
            return false;
        };
        slot.is_free = true;
        let was_stalled = slot.is_stalled;
        if was_stalled {
            self.stalled -= 1;
            self.stalled_bytes -= u64::from(slot.tracked.read.length);
        }
        let (next, crossing) = (slot.next, is_crossing(&slot.tracked.read));
        self.free.push(number);
        self.bytes = self.bytes.saturating_sub(u64::from(slot.tracked.read.length));
        let Some(head) = self.heads.get_mut(slot.chain as usize) else {
            self.long.retain(|long| *long != number);
            return was_stalled;
        };
        self.crossing -= usize::from(crossing);
        if *head == number {
            *head = next;
            return was_stalled;
        }
        let mut at = *head;
        while let Some(before) = self.slots.get_mut(at as usize) {
            if before.next == number {
                before.next = next;
                break;
            }
            at = before.next;
        }
        was_stalled
    }

    /// The read in flight that covers the bytes of `read`.
    pub(super) fn serving(
        &mut self,
        index_key: IndexKey,
        read: &PlannedRead,
        joinable: Joinable,
    ) -> Option<&mut Slot> {
        if self.is_empty() {
            return None;
        }
        let number = self.find(index_key, read, joinable)?;
        self.get_mut(number)
    }

    fn find(&self, index_key: IndexKey, read: &PlannedRead, joinable: Joinable) -> Option<u32> {
        let IndexKey { access, chain } = index_key;
        let serving = |number: u32| {
            let slot = self.slots.get(number as usize)?;
            let serves = slot.access == access && slot.tracked.serves(read, joinable);
            Some((serves, slot.next))
        };
        let in_chain = |chain: u32| {
            let mut number = self.heads.get(chain as usize).copied()?;
            // Ends at NONE, which is not a slot's number.
            while let Some((serves, next)) = serving(number) {
                if serves {
                    return Some(number);
                }
                number = next;
            }
            None
        };
        // A chained read that covers it is at most a grain long, so it begins in the same grain or the one
        // before.
        let found = in_chain(chain);
        if found.is_some() {
            return found;
        }
        if chain != NONE
            && self.crossing > 0
            && let Some(before) = grain_of(read).checked_sub(1)
            && let Some(found) = in_chain(self.chain(access, before))
        {
            return Some(found);
        }
        let mut long = self.long.iter().copied();
        long.find(|number| serving(*number).is_some_and(|(serves, _)| serves))
    }

    fn chain(&self, access: FileAccess, grain: u64) -> u32 {
        // Fibonacci hashing: the high bits of the product are the best mixed.
        let key = access.file.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ (grain << 1) ^ u64::from(access.direct);
        let product = key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        u32::try_from(product).unwrap_or(0) & self.chain_mask
    }
}

/// Offsets are below 2^63 (the kernel's own limit), lengths below 2^32.
fn end_of(read: &PlannedRead) -> u64 {
    read.offset + u64::from(read.length)
}

fn is_crossing(read: &PlannedRead) -> bool {
    end_of(read).saturating_sub(1) / u64::from(GRAIN_BYTES) != grain_of(read)
}

fn grain_of(read: &PlannedRead) -> u64 {
    read.offset / u64::from(GRAIN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(offset: u64, length: u32) -> PlannedRead {
        PlannedRead {
            file: 0,
            direct: true,
            alignment: 512,
            offset,
            length,
            needed: length,
            place: Place::Data(0),
            first_piece: 0,
            pieces: 1,
        }
    }

    const FILE: FileAccess = FileAccess {
        file: 7,
        direct: true,
    };

    fn started(in_flight: &mut InFlight, offset: u64, length: u32) -> u32 {
        let slot = in_flight.room_for(length).expect("room");
        let read = read(offset, length);
        let index_key = in_flight.index_key(FILE, &read);
        in_flight.start(0, &read, Some(index_key), Instant::now());
        slot
    }

    #[test]
    fn a_read_joins_what_covers_it_and_nothing_else() {
        // In flight: 4 KiB at 64 KiB, 20 KiB across the next grain's boundary, 1 MiB at 10 MiB, and 4 KiB at 20 MiB of which
        // one byte is needed.
        let mut in_flight = InFlight::new(8, 8, u64::MAX);
        started(&mut in_flight, 64 << 10, 4096);
        started(&mut in_flight, 90 << 10, 20 << 10);
        started(&mut in_flight, 10 << 20, 1 << 20);
        let last = started(&mut in_flight, 20 << 20, 4096);
        in_flight.get_mut(last).expect("in flight").tracked.read.needed = 1;
        let mut joins = |access, offset, length, joinable| {
            let read = read(offset, length);
            let index_key = in_flight.index_key(access, &read);
            in_flight.serving(index_key, &read, joinable).is_some()
        };
        let covering = Joinable::Covering;
        assert!(joins(FILE, 64 << 10, 4096, covering), "the same");
        assert!(joins(FILE, (64 << 10) + 512, 512, covering), "a part");
        assert!(joins(FILE, 100 << 10, 4096, covering), "from the grain before");
        assert!(
            joins(FILE, (10 << 20) + (500 << 10), 4096, covering),
            "in a long one"
        );
        assert!(
            joins(FILE, (10 << 20) + 4096, 100 << 10, covering),
            "long in a long one"
        );
        assert!(!joins(FILE, 64 << 10, 8192, covering), "reaches beyond");
        assert!(!joins(FILE, 63 << 10, 2048, covering), "begins before");
        assert!(!joins(FILE, 11 << 20, 512, covering), "behind");
        let same = Joinable::Same { batch: 1 };
        assert!(!joins(FILE, (64 << 10) + 512, 512, same), "only a part");
        assert!(joins(FILE, 64 << 10, 4096, same));
        assert!(!joins(FILE, 20 << 20, 4096, same), "needs less");
        let own = Joinable::Same { batch: 0 };
        assert!(!joins(FILE, 64 << 10, 4096, own), "of the batch itself");
        let buffered = FileAccess {
            direct: false,
            ..FILE
        };
        assert!(!joins(buffered, 64 << 10, 4096, covering), "through the cache");
        let other = FileAccess { file: 8, ..FILE };
        assert!(
            !joins(other, 64 << 10, 4096, covering),
            "another version of the file"
        );
    }

    #[test]
    fn what_is_over_is_joined_no_more() {
        // Random reads start and finish, many of them in one chain, against a list that is searched linearly.
        let mut in_flight = InFlight::new(64, 64, u64::MAX);
        let mut model: Vec<(u32, u64, u32)> = Vec::new();
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..20_000 {
            let (offset, length) = (random.u64(..512) * 1024, random.u32(1..80) * 1024);
            let wanted = read(offset, length);
            let covers =
                |at: u64, long: u32| at <= offset && offset + u64::from(length) <= at + u64::from(long);
            let index_key = in_flight.index_key(FILE, &wanted);
            let found = in_flight.serving(index_key, &wanted, Joinable::Covering);
            assert_eq!(
                found.is_some(),
                model.iter().any(|(_, at, long)| covers(*at, *long)),
                "{length} at {offset}"
            );
            if random.bool() && model.len() < 64 {
                model.push((started(&mut in_flight, offset, length), offset, length));
            } else if !model.is_empty() {
                let (slot, at, _) = model.swap_remove(random.usize(..model.len()));
                assert_eq!(
                    in_flight.get_mut(slot).expect("in flight").tracked.read.offset,
                    at
                );
                in_flight.finish(slot);
            }
            assert_eq!(in_flight.len() as usize, model.len());
        }
        for (slot, ..) in model {
            in_flight.finish(slot);
        }
        assert!(in_flight.is_empty() && in_flight.bytes == 0 && in_flight.long.is_empty());
        assert_eq!(in_flight.crossing, 0);
        assert!(in_flight.heads.iter().all(|head| *head == NONE));
    }

    #[test]
    fn bytes_in_flight_are_bounded_beyond_the_first_read() {
        // Scenario: at most 100,000 bytes; one read of 1 MiB, then shorter ones. Expectation: a long read
        // runs alone; once the bound is reached, nothing starts until half of it is free.
        let mut in_flight = InFlight::new(8, 8, 100_000);
        let first = started(&mut in_flight, 0, 1 << 20);
        assert!(in_flight.room_for(1).is_none() && !in_flight.has_room());
        in_flight.finish(first);
        let second = started(&mut in_flight, 0, 60_000);
        let third = started(&mut in_flight, 0, 30_000);
        assert!(in_flight.has_room() && in_flight.room_for(10_000).is_some());
        assert!(
            in_flight.room_for(10_001).is_none() && !in_flight.has_room(),
            "full"
        );
        in_flight.finish(third);
        assert!(!in_flight.has_room(), "until half of it is free");
        in_flight.finish(second);
        assert!(in_flight.has_room() && in_flight.room_for(85_000).is_some());
    }
}
