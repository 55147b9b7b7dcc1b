//! Which reads are next: round robin over callers, within a caller over its connections, within a connection
//! over its calls (batches), counted in bytes.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995) in its surplus form: in each round every member may
//! start [`QUANTUM_BYTES`], a caller its weight times that; its last read may exceed that, and later rounds
//! subtract the excess. A member that returns with a read before it has used its part of the round is served
//! first, since the order within a round changes no share (like the new flows of FQ-CoDel, RFC 8290): a
//! caller of single blocks never waits for a round of long reads. A member without reads keeps its balance
//! until the round has passed it. The waiting batches bound the memory, and `engine.queued_reads` bounds
//! them.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Bytes of a turn: 16 blocks of 4 KiB, which spreads the cost of a turn over several reads, yet a round over
/// 32 callers is no more than what is in flight anyway (`shard::IN_FLIGHT_BYTES_MAX`).
pub(super) const QUANTUM_BYTES: i64 = 64 << 10;

/// The most that later rounds subtract: a read of 1 MiB. The excess of longer reads is ignored, so that
/// finding the next member takes at most 16 rounds.
const DEBT_BYTES_MAX: i64 = 16 * QUANTUM_BYTES;

/// Empty queues kept to reuse their memory.
const SPARE_MAX: usize = 16;

/// The caller and connection of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) caller: u64,
    pub(super) connection: u64,
    /// The caller's share relative to others; at least 1.
    pub(super) weight: u32,
}

/// All batches without an account share one caller.
pub(super) const NOBODY: Origin = Origin {
    caller: u64::MAX,
    connection: u64::MAX,
    weight: 1,
};

/// The batch whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    caller: u64,
    connection: u64,
    /// The number it was pushed with.
    pub(super) batch: usize,
    /// How many bytes it may start; its last read may exceed this.
    pub(super) bytes: i64,
}

/// The waiting batches. See the module.
#[derive(Debug, Default)]
pub(super) struct Turns {
    callers: Circle<Circle<Calls>>,
}

impl Turns {
    pub(super) fn is_empty(&self) -> bool {
        self.callers.is_empty()
    }

    /// Adds a batch, which must not be waiting already.
    pub(super) fn push(&mut self, origin: Origin, batch: usize) {
        let part = QUANTUM_BYTES * i64::from(origin.weight);
        self.callers.enter(origin.caller, part, |caller| {
            caller.enter(origin.connection, QUANTUM_BYTES, |calls| {
                calls.0.push_back((batch, QUANTUM_BYTES));
            });
        });
    }

    /// The next batch. The caller starts some of its reads, and reports them with [`Turns::took`].
    pub(super) fn next(&mut self) -> Option<Turn> {
        let (caller, connections, of_caller) = self.callers.turn()?;
        let (connection, calls, of_connection) = connections.turn()?;
        let (batch, of_batch) = calls.turn()?;
        Some(Turn {
            caller,
            connection,
            batch,
            bytes: of_caller.min(of_connection).min(of_batch),
        })
    }

    /// Ends a turn in which `bytes` were started. `done`: the batch has no more reads to start, and is removed.
    pub(super) fn took(&mut self, turn: &Turn, bytes: u64, done: bool) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.callers.charge(turn.caller, bytes, |connections| {
            connections.charge(turn.connection, bytes, |calls| calls.charge(bytes, done));
        });
    }
}

/// A balance after this many bytes were started.
fn after(balance: i64, bytes: i64) -> i64 {
    balance.saturating_sub(bytes).max(-DEBT_BYTES_MAX)
}

/// A queue of a member.
trait Queue: Default {
    fn is_empty(&self) -> bool;
    /// Whether it is worth keeping for its memory once it is empty.
    fn is_small(&self) -> bool;
}

/// The calls of one connection: batches with their balances.
#[derive(Debug, Default)]
struct Calls(VecDeque<(usize, i64)>);

impl Calls {
    fn turn(&mut self) -> Option<(usize, i64)> {
        if self.0.len() == 1 {
            return self.0.front().map(|(batch, _)| (*batch, i64::MAX));
        }
        // Ends within 17 rounds: each adds a quantum.
        loop {
            let (batch, balance) = self.0.front_mut()?;
            if *balance > 0 {
                return Some((*batch, *balance));
            }
            *balance = balance.saturating_add(QUANTUM_BYTES);
            self.0.rotate_left(1);
        }
    }

    /// Charges the front batch, whose turn it is.
    fn charge(&mut self, bytes: i64, done: bool) {
        if done {
            self.0.pop_front();
        } else if self.0.len() > 1
            && let Some((_, balance)) = self.0.front_mut()
        {
            *balance = after(*balance, bytes);
        }
    }
}

impl Queue for Calls {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn is_small(&self) -> bool {
        self.0.capacity() <= 64
    }
}

/// Members that take turns, by number.
#[derive(Debug)]
struct Circle<Q> {
    members: HashMap<u64, Member<Q>, BuildHasherDefault<NumberHasher>>,
    /// Every member once, in round order.
    round: VecDeque<u64>,
    /// Members that returned before the round reached them, with part of their bytes left: served first.
    early: VecDeque<u64>,
    /// Members with something queued.
    waiting: usize,
    spare: Vec<Q>,
}

#[derive(Debug)]
struct Member<Q> {
    /// Bytes that it may still start in this round; if negative, later rounds subtract it.
    balance: i64,
    /// What each round adds.
    part: i64,
    queue: Q,
    is_early: bool,
    /// Whether it was served before the round reached it: what it used belongs to the previous round.
    went_early: bool,
}

impl<Q> Member<Q> {
    /// Whether its part is more than a turn.
    fn is_heavy(&self) -> bool {
        self.part > QUANTUM_BYTES
    }
}

impl<Q> Default for Circle<Q> {
    fn default() -> Self {
        Self {
            members: HashMap::default(),
            round: VecDeque::new(),
            early: VecDeque::new(),
            waiting: 0,
            spare: Vec::new(),
        }
    }
}

impl<Q: Queue> Circle<Q> {
    /// Queues something for a member, by `push`; from now on its part of a round is `part`.
    fn enter(&mut self, key: u64, part: i64, push: impl FnOnce(&mut Q)) {
        let member = self.members.entry(key).or_insert_with(|| {
            self.round.push_back(key);
            Member {
                balance: part,
                part,
                queue: self.spare.pop().unwrap_or_default(),
                is_early: false,
                went_early: false,
            }
        });
        member.part = part;
        if member.queue.is_empty() {
            self.waiting += 1;
            if member.balance > 0 && !member.is_early {
                member.is_early = true;
                self.early.push_back(key);
            }
        }
        push(&mut member.queue);
    }

    /// The next member, its queue, and how much it may start.
    fn turn(&mut self) -> Option<(u64, &mut Q, i64)> {
        if self.waiting == 0 {
            return None;
        }
        // The round passes over members that have nothing queued, and removes them.
        let alone = self.members.len() == 1;
        let key = loop {
            if let Some(&key) = self.early.front() {
                match self.members.get_mut(&key) {
                    Some(member) if !member.queue.is_empty() && member.balance > 0 => {
                        if member.is_heavy() {
                            // First for one turn only; otherwise a newcomer would wait for its whole part.
                            member.is_early = false;
                            self.early.pop_front();
                        }
                        break key;
                    }
                    Some(member) => member.is_early = false,
                    None => {}
                }
                self.early.pop_front();
                continue;
            }
            // Ends within 17 rounds: each adds a quantum, and some member waits.
            let key = *self.round.front()?;
            let Some(member) = self.members.get_mut(&key) else {
                self.round.pop_front();
                continue;
            };
            let went_early = std::mem::take(&mut member.went_early);
            if !member.queue.is_empty() && (member.balance > 0 || alone && !member.is_heavy()) {
                break key;
            }
            member.balance = member.balance.saturating_add(member.part);
            if went_early && !member.queue.is_empty() && member.balance > 0 {
                break key;
            }
            if member.queue.is_empty() && member.balance > 0 {
                self.round.pop_front();
                self.remove(key);
            } else {
                self.round.rotate_left(1);
            }
        };
        let member = self.members.get_mut(&key)?;
        let balance = if alone {
            i64::MAX
        } else {
            // Between the turns of a large part, others may come first.
            member.balance.min(QUANTUM_BYTES)
        };
        Some((key, &mut member.queue, balance))
    }

    /// Charges a member for what it started, and its queue by `charge`. A lone member is not charged, unless
    /// it is heavy: otherwise others would wait for its whole part whenever they have used theirs.
    fn charge(&mut self, key: u64, bytes: i64, charge: impl FnOnce(&mut Q)) {
        let alone = self.members.len() == 1;
        let Some(member) = self.members.get_mut(&key) else {
            return;
        };
        charge(&mut member.queue);
        member.went_early |= self.round.front() != Some(&key);
        if !alone || member.is_heavy() {
            member.balance = after(member.balance, bytes);
        }
        if !member.queue.is_empty() {
            return;
        }
        self.waiting -= 1;
        if self.waiting == 0 {
            // No other member waited, so the excess is ignored.
            self.early.clear();
            while let Some(key) = self.round.pop_front() {
                self.remove(key);
            }
        } else if self.round.front() == Some(&key) {
            // Its turn has ended: it is now last in the round.
            self.round.rotate_left(1);
        }
    }

    fn remove(&mut self, key: u64) {
        if let Some(member) = self.members.remove(&key)
            && self.spare.len() < SPARE_MAX
            && member.queue.is_small()
        {
            self.spare.push(member.queue);
        }
    }
}

impl<Q: Queue> Queue for Circle<Q> {
    fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    fn is_small(&self) -> bool {
        self.members.capacity() <= 64 && self.round.capacity() <= 64 && self.early.capacity() <= 64
    }
}

/// We assign these keys, so they need no protection against collisions: one multiplication (Fibonacci
/// hashing, Knuth, TAOCP 6.4) spreads them.
#[derive(Debug, Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // The map takes its slots from the low bits and its tags from the high ones.
        let product = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(caller: u64, connection: u64) -> Origin {
        weighted(caller, connection, 1)
    }

    fn weighted(caller: u64, connection: u64, weight: u32) -> Origin {
        Origin {
            caller,
            connection,
            weight,
        }
    }

    /// Takes `rounds` turns; each batch starts reads of `read_bytes(batch)` and never ends. Returns the bytes
    /// that each of `batches` started.
    fn run(turns: &mut Turns, rounds: usize, batches: usize, read_bytes: impl Fn(usize) -> u64) -> Vec<u64> {
        let mut started = vec![0; batches];
        for _ in 0..rounds {
            let turn = turns.next().expect("a batch waits");
            let mut bytes = 0;
            while i64::try_from(bytes).expect("few") < turn.bytes.min(1 << 20) {
                bytes += read_bytes(turn.batch);
            }
            started[turn.batch] += bytes;
            turns.took(&turn, bytes, false);
        }
        started
    }

    /// No batch has more than `most` bytes more than another.
    #[track_caller]
    fn assert_even(started: &[u64], most: u64) {
        let (least, greatest) = (started.iter().min(), started.iter().max());
        assert!(
            greatest.expect("some") - least.expect("some") <= most,
            "{started:?}"
        );
    }

    #[test]
    fn callers_get_the_same_bytes_whatever_the_size_of_their_reads() {
        // Four callers with a batch each that never ends, of reads of 1 MiB to 100 bytes.
        let mut turns = Turns::default();
        for caller in 0..4 {
            turns.push(origin(caller, 1), usize::try_from(caller).expect("small"));
        }
        // 1 MiB, 4 KiB, 64 KiB, 100 bytes.
        let started = run(&mut turns, 2000, 4, |batch| [1 << 20, 4096, 64 << 10, 100][batch]);
        assert_even(&started, 2 << 20);
    }

    #[test]
    fn a_caller_gets_its_weight_times_the_bytes_of_others() {
        // Callers of weights 1, 4 and 100 with reads of 1 MiB, 4 KiB and 64 KiB; the last on ten connections.
        // Then the second gets weight 1. Expectation: bytes in proportion to the weights, and after the
        // change to the new ones.
        for (weights, long) in [([1, 4, 100], 2_u64 << 20), ([1, 1, 100], 2 << 20)] {
            let mut turns = Turns::default();
            turns.push(weighted(0, 0, weights[0]), 0);
            turns.push(weighted(1, 0, 4), 1);
            for connection in 0..10 {
                let batch = 2 + usize::try_from(connection).expect("small");
                turns.push(weighted(2, connection, weights[2]), batch);
            }
            // Another call of the second caller.
            turns.push(weighted(1, 0, weights[1]), 12);
            let read_bytes = |batch| match batch {
                0 => 1 << 20,
                1 | 12 => 4096,
                _ => 64 << 10,
            };
            let started = run(&mut turns, 40_000, 13, read_bytes);
            let of = [started[0], started[1] + started[12], started[2..12].iter().sum()];
            let parts: Vec<u64> = of
                .iter()
                .zip(weights)
                .map(|(bytes, weight)| bytes / u64::from(weight))
                .collect();
            // The first rounds at the changed weight, and one round.
            assert_even(&parts, 2 * long);
            assert_even(&started[2..12], 2 << 20);
        }
    }

    #[test]
    fn a_single_block_goes_first_beside_a_heavy_caller() {
        // A caller of weight 100 with long reads on eight connections; another with one block, again and
        // again. The block is next every time.
        let mut turns = Turns::default();
        for connection in 0..8 {
            turns.push(
                weighted(0, connection, 100),
                usize::try_from(connection).expect("small"),
            );
        }
        for _ in 0..50 {
            run(&mut turns, 30, 9, |_| 1 << 20);
            turns.push(origin(1, 0), 8);
            let turn = turns.next().expect("a batch waits");
            assert_eq!(turn.batch, 8);
            turns.took(&turn, 4096, true);
        }
    }

    #[test]
    fn many_connections_get_a_caller_no_more_than_one() {
        // Caller 0 has 100 connections with a batch each, caller 1 one connection with one batch.
        let mut turns = Turns::default();
        for connection in 0..100 {
            turns.push(origin(0, connection), usize::try_from(connection).expect("small"));
        }
        turns.push(origin(1, 0), 100);
        let started = run(&mut turns, 4000, 101, |_| 4096);
        assert_even(&[started[..100].iter().sum(), started[100]], 256 << 10);
        assert_even(&started[..100], 128 << 10);
    }

    #[test]
    fn many_calls_get_a_connection_no_more_than_one() {
        // Connection 0 has 50 batches, connection 1 has one.
        let mut turns = Turns::default();
        for batch in 0..50 {
            turns.push(origin(7, 0), batch);
        }
        turns.push(origin(7, 1), 50);
        let started = run(&mut turns, 2000, 51, |_| 32 << 10);
        assert_even(&[started[..50].iter().sum(), started[50]], 256 << 10);
        assert_even(&started[..50], 128 << 10);
    }

    #[test]
    fn a_single_block_goes_before_a_round_of_long_reads() {
        // Eight callers with long reads have waited for long; a ninth comes again and again with one block,
        // as a caller of its own or as a connection of an existing one. The block is next every time.
        for newcomer in [origin(9, 9), origin(0, 9)] {
            let mut turns = Turns::default();
            for caller in 0..8 {
                turns.push(origin(caller, caller), usize::try_from(caller).expect("small"));
                turns.push(
                    origin(0, 100 + caller),
                    20 + usize::try_from(caller).expect("small"),
                );
            }
            // Every member is new at first, and precedes those already there.
            run(&mut turns, 1000, 30, |_| 1 << 20);
            let mut others = 0;
            for _ in 0..50 {
                run(&mut turns, 40, 30, |_| 1 << 20);
                turns.push(newcomer, 8);
                if newcomer.caller == 0 {
                    // Its caller has used its part; among the caller's connections it is first.
                    while let Some(turn) = turns.next()
                        && turn.caller != 0
                    {
                        turns.took(&turn, 1 << 20, false);
                        others += 1;
                    }
                }
                let turn = turns.next().expect("a batch waits");
                assert_eq!(turn.batch, 8);
                turns.took(&turn, 4096, true);
            }
            assert!(
                others <= 50 * 7,
                "{others} turns of others: at most one round each"
            );
        }
    }

    /// Bytes that callers 0 and 1 have started after 5000 turns: caller 0 has one read of `bytes` at a time,
    /// and the next as soon as that is started; caller 1 has blocks waiting.
    fn beside_a_long_queue(bytes: u64) -> [u64; 2] {
        let mut turns = Turns::default();
        turns.push(origin(1, 0), 1);
        turns.push(origin(0, 0), 0);
        let mut started = [0_u64; 2];
        for _ in 0..5000 {
            let turn = turns.next().expect("a batch waits");
            let taken = [bytes, 4096][turn.batch];
            started[turn.batch] += taken;
            turns.took(&turn, taken, turn.batch == 0);
            if turn.batch == 0 {
                turns.push(origin(0, 0), 0);
            }
        }
        started
    }

    #[test]
    fn who_comes_back_at_once_gets_no_more_than_its_part() {
        // One read of 1 MiB at a time.
        assert_even(&beside_a_long_queue(1 << 20), 2 << 20);
    }

    #[test]
    fn who_has_one_read_at_a_time_gets_no_less_than_its_part() {
        // One block at a time.
        assert_even(&beside_a_long_queue(4096), 128 << 10);
    }

    #[test]
    fn what_was_used_is_forgotten_while_another_is_alone() {
        // Next to caller 1, caller 0 starts twice its part and leaves; caller 1 continues alone, for a
        // hundred parts; caller 0 returns with a block. Expectation: the block is next but one at the latest.
        let mut turns = Turns::default();
        turns.push(origin(1, 0), 1);
        turns.push(origin(0, 0), 0);
        let mut left = false;
        let mut alone = 0_u64;
        while alone < 100 << 20 {
            let turn = turns.next().expect("a batch waits");
            if turn.batch == 0 {
                left = true;
                turns.took(&turn, 2 << 20, true);
            } else {
                alone += if left { 4096 } else { 0 };
                turns.took(&turn, 4096, false);
            }
        }
        turns.push(origin(0, 0), 0);
        let mut before = 0;
        loop {
            let turn = turns.next().expect("a batch waits");
            if turn.batch == 0 {
                break;
            }
            before += 1;
            turns.took(&turn, 4096, false);
        }
        assert!(before <= 1, "{before} turns of the other one");
    }

    #[test]
    fn who_is_alone_takes_as_much_as_there_is() {
        // One batch without an account starts far more than a round's part, then another caller comes.
        let mut turns = Turns::default();
        turns.push(NOBODY, 3);
        for _ in 0..10 {
            let turn = turns.next().expect("it waits");
            assert_eq!((turn.batch, turn.bytes), (3, i64::MAX));
            turns.took(&turn, 100 << 20, false);
        }
        // It owes nothing for that.
        turns.push(origin(1, 1), 4);
        let started = run(&mut turns, 1000, 5, |_| 4096);
        assert_even(&started[3..], 128 << 10);
    }

    #[test]
    fn every_batch_leaves_once_and_nothing_is_kept() {
        // Batches of many callers come and go at random, from a seed.
        let mut turns = Turns::default();
        let mut random = fastrand::Rng::with_seed(11);
        let mut waiting = std::collections::BTreeSet::new();
        let (mut pushed, mut left) = (0, 0);
        for _ in 0..20_000 {
            if random.bool() && waiting.len() < 500 {
                let weight = [1, 1, 3, 100][random.usize(..4)];
                turns.push(weighted(random.u64(..20), random.u64(..5), weight), pushed);
                waiting.insert(pushed);
                pushed += 1;
            } else if let Some(turn) = turns.next() {
                let done = random.u8(..) < 200;
                turns.took(&turn, random.u64(..2 << 20), done);
                if done {
                    assert!(waiting.remove(&turn.batch), "{} left twice", turn.batch);
                    left += 1;
                }
            }
            assert_eq!(turns.is_empty(), waiting.is_empty());
        }
        while let Some(turn) = turns.next() {
            turns.took(&turn, 4096, true);
            left += 1;
        }
        assert_eq!(left, pushed);
        assert!(turns.callers.members.is_empty() && turns.callers.round.is_empty());
        assert!(turns.callers.early.is_empty() && turns.callers.spare.len() <= SPARE_MAX);
    }
}
