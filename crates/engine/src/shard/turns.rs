//! Which reads are next: round robin over callers, within a caller over its connections, within a connection
//! over its calls (batches), counted in bytes.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995) in its surplus form: in each round every member may
//! start [`QUANTUM_BYTES`], a caller its weight times that; its last read may exceed that, and later rounds
//! subtract the excess. A member that returns with a read before it has used its part of the round is served
//! first, since the order within a round changes no share (like the new flows of FQ-CoDel, RFC 8290): a
//! caller of single blocks never waits for a round of long reads. A member without reads keeps its balance
//! until the round has passed it. The waiting batches bound the memory, and `limits.queued_reads` bounds
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

    /// Removes the batches that are not to be kept. No turn may be in progress.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(usize) -> bool) {
        self.callers.retain(|connections| {
            connections.retain(|calls| calls.0.retain(|(batch, _)| keep(*batch)));
        });
    }
}

/// A balance after this many bytes were started.
fn after(balance: i64, bytes: i64) -> i64 {
    balance.saturating_sub(bytes).max(-DEBT_BYTES_MAX)
}

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
            self.clear();
        } else if self.round.front() == Some(&key) {
            // Its turn has ended: it is now last in the round.
            self.round.rotate_left(1);
        }
    }

    /// Removes something from the queues, by `retain`, and the members that are left without, unless they owe bytes.
    fn retain(&mut self, mut retain: impl FnMut(&mut Q)) {
        self.waiting = 0;
        for member in self.members.values_mut() {
            retain(&mut member.queue);
            self.waiting += usize::from(!member.queue.is_empty());
        }
        if self.waiting == 0 {
            return self.clear();
        }
        self.members
            .retain(|_, member| !member.queue.is_empty() || member.balance <= 0);
        self.round.retain(|key| self.members.contains_key(key));
        self.early.retain(|key| self.members.contains_key(key));
    }

    /// Forgets all members: none waits, so what they owe is ignored.
    fn clear(&mut self) {
        self.early.clear();
        while let Some(key) = self.round.pop_front() {
            self.remove(key);
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
pub(crate) struct NumberHasher(u64);

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
mod tests;
