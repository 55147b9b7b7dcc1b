//! Which blocks a step reads: all of a window's, in an order that looks random, none twice before each was read once.
//! So a step on a cold file does not warm what it still has to read. Pure but for a counter.
//!
//! The order is a permutation made by a Feistel network over the smallest even number of bits that holds the window,
//! walked until it falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: cycle walking).

use std::sync::atomic::{AtomicU64, Ordering};

/// Reads closer together than this share a page of the cache.
const PAGE_BYTES: u64 = 4096;
const ROUNDS: usize = 4;

/// The positions of one step. Shared by all that read.
#[derive(Debug)]
pub(super) struct Walk {
    /// Positions; a block each, or the first block of a page.
    count: u64,
    /// Blocks from one position to the next: 8 for blocks of 512 bytes.
    stride: u64,
    /// Whether it ends when each was read once.
    once: bool,
    half_bits: u32,
    keys: [u64; ROUNDS],
    next: AtomicU64,
}

impl Walk {
    /// A walk over the first `window_bytes` in blocks of `block_bytes`.
    pub(super) fn new(window_bytes: u64, block_bytes: u32, once: bool, seed: u64) -> Self {
        let block = u64::from(block_bytes.max(1));
        let stride = PAGE_BYTES.div_ceil(block);
        let count = (window_bytes / block / stride).max(1);
        let mut random = fastrand::Rng::with_seed(seed);
        // 1000 positions need 10 bits, so 5 a half: 1024 places, of which 24 are walked past.
        let bits = 64 - (count - 1).leading_zeros();
        Self {
            count,
            stride,
            once,
            half_bits: bits.div_ceil(2).max(1),
            keys: std::array::from_fn(|_| random.u64(..)),
            next: AtomicU64::new(0),
        }
    }

    /// The next block; `None` when each was read.
    pub(super) fn next_block(&self) -> Option<u64> {
        let position = self.next.fetch_add(1, Ordering::Relaxed);
        if self.once && position >= self.count {
            return None;
        }
        let mut place = self.shuffled(position % self.count);
        while place >= self.count {
            place = self.shuffled(place);
        }
        Some(place * self.stride)
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

/// The finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(walk: &Walk) -> Vec<u64> {
        std::iter::from_fn(|| walk.next_block()).collect()
    }

    #[test]
    fn a_walk_visits_every_page_once() {
        // Scenario: windows of one block, of powers of two and of odd counts, in blocks of a page, of less and of more.
        // Expected: as many positions as pages or blocks, each a different one inside the window.
        for (window, block) in [
            (4096, 4096),
            (1000 * 4096, 4096),
            (1 << 20, 4096),
            (12_345 * 512, 512),
            (7 << 20, 1 << 20),
        ] {
            let mut blocks = all(&Walk::new(window, block, true, 1));
            let spacing = u64::from(block).max(4096);
            assert_eq!(blocks.len() as u64, (window / spacing).max(1), "{window} {block}");
            blocks.sort_unstable();
            let apart = |pair: &[u64]| (pair[1] - pair[0]) * u64::from(block) >= spacing;
            assert!(blocks.windows(2).all(apart), "{window} {block}");
            assert!(
                blocks
                    .iter()
                    .all(|index| (index + 1) * u64::from(block) <= window)
            );
        }
    }

    #[test]
    fn walks_differ_by_seed_and_go_on_unless_told_to_end() {
        // Scenario: two seeds; and a walk without end.
        // Expected: other orders, neither ascending; the endless one begins anew with the same blocks.
        let (first, second) = (
            all(&Walk::new(1 << 24, 4096, true, 1)),
            all(&Walk::new(1 << 24, 4096, true, 2)),
        );
        assert_ne!(first, second);
        let steps_up = first.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((1500..2600).contains(&steps_up), "{steps_up} of {}", first.len());
        let walk = Walk::new(8 * 4096, 4096, false, 3);
        let taken: Vec<u64> = (0..16).filter_map(|_| walk.next_block()).collect();
        assert_eq!(taken[..8], taken[8..]);
    }
}
