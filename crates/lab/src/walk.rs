//! Which positions a step reads: all of them, in an order that looks random, none twice before each was read
//! once; or sequentially. Pure but for a counter.
//!
//! The random order is a permutation by a Feistel network over the smallest even number of bits that holds
//! the positions, repeated until the result is in range (Black and Rogaway, "Ciphers with Arbitrary Finite
//! Domains", 2002).

use ringfetch_pattern::mixed;
use std::sync::atomic::{AtomicU64, Ordering};

const ROUNDS: usize = 4;

/// The positions of one step, shared by all readers.
#[derive(Debug)]
pub(crate) struct Walk {
    count: u64,
    random: bool,
    limit: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
    next: AtomicU64,
}

impl Walk {
    /// A walk over `count` positions that returns `limit` of them, starting again after the last.
    pub(crate) fn new(count: u64, random: bool, limit: u64, seed: u64) -> Self {
        let count = count.max(1);
        let mut keys = fastrand::Rng::with_seed(seed);
        // 1000 positions need 10 bits, 5 per half: 1024 values, of which 24 are skipped.
        let bits = 64 - (count - 1).leading_zeros();
        Self {
            count,
            random,
            limit,
            half_bits: bits.div_ceil(2).max(1),
            keys: std::array::from_fn(|_| keys.u64(..)),
            next: AtomicU64::new(0),
        }
    }

    /// The next position, below the count; `None` at the limit.
    pub(crate) fn next(&self) -> Option<u64> {
        let step = self.next.fetch_add(1, Ordering::Relaxed);
        if step >= self.limit {
            return None;
        }
        let mut place = step % self.count;
        if self.random {
            place = self.shuffled(place);
            while place >= self.count {
                place = self.shuffled(place);
            }
        }
        Some(place)
    }

    /// Whether no position was taken yet.
    pub(crate) fn is_fresh(&self) -> bool {
        self.next.load(Ordering::Relaxed) == 0
    }

    /// A permutation of the numbers of `2 * half_bits` bits.
    fn shuffled(&self, position: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (position >> self.half_bits, position & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mixed(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_gives_each_position_once() {
        // Scenario: counts of one, powers of two and odd ones, random and in order. Expected: each position once.
        for count in [1, 2, 7, 1000, 1024, 12_345] {
            for random in [false, true] {
                let walk = Walk::new(count, random, count, 1);
                let mut places: Vec<u64> = std::iter::from_fn(|| walk.next()).collect();
                assert_eq!(places.is_sorted(), !random || count < 3, "{count} {random}");
                places.sort_unstable();
                assert_eq!(places, (0..count).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn walks_differ_by_seed_and_end_at_their_limit() {
        // Scenario: two seeds; a limit above the count. Expected: different orders; the same positions again,
        // up to the limit.
        let all = |seed| {
            let walk = Walk::new(4096, true, 4096, seed);
            std::iter::from_fn(|| walk.next()).collect::<Vec<_>>()
        };
        assert_ne!(all(1), all(2));
        let walk = Walk::new(8, true, 20, 3);
        let taken: Vec<u64> = std::iter::from_fn(|| walk.next()).collect();
        assert_eq!((&taken[..8], taken.len()), (&taken[8..16], 20));
    }
}
