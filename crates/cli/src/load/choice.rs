//! Chooses the next item: uniform, sequential, zipfian, hot spot. Pure, except for the position that
//! sequential requests share.

use super::args::PatternArg;
use crate::quantity::approximate;
use std::sync::atomic::{AtomicU64, Ordering};

/// Chooses among `count` items, at least 1.
#[derive(Debug)]
pub(crate) struct Chooser {
    count: u64,
    order: Order,
}

#[derive(Debug)]
enum Order {
    Uniform,
    /// Where the next request begins, shared by all slots and threads.
    Sequential(AtomicU64),
    Zipfian(Zipfian),
    /// This many of the first items get this share of the reads.
    Hotspot(u64, f64),
}

impl Chooser {
    pub(crate) fn new(pattern: PatternArg, count: u64) -> Self {
        let count = count.max(1);
        let order = match pattern {
            PatternArg::Uniform => Order::Uniform,
            PatternArg::Sequential => Order::Sequential(AtomicU64::new(0)),
            PatternArg::Zipfian(theta) => Order::Zipfian(Zipfian::new(count, theta)),
            PatternArg::Hotspot(fraction, share) => {
                Order::Hotspot(part_of(fraction, count).clamp(1, count), share)
            }
        };
        Self { count, order }
    }

    /// Chooses `batch` items into `items`.
    pub(crate) fn choose(&self, random: &mut fastrand::Rng, batch: u32, items: &mut Vec<u64>) {
        items.clear();
        let count = self.count;
        match &self.order {
            Order::Uniform => items.extend((0..batch).map(|_| random.u64(0..count))),
            Order::Sequential(next) => {
                let first = next.fetch_add(batch.into(), Ordering::Relaxed);
                items.extend((0..u64::from(batch)).map(|i| first.wrapping_add(i) % count));
            }
            Order::Zipfian(zipfian) => {
                items.extend((0..batch).map(|_| zipfian.scatter(zipfian.rank(random.f64()))));
            }
            Order::Hotspot(hot, share) => items.extend((0..batch).map(|_| {
                if random.f64() < *share || *hot == count {
                    random.u64(0..*hot)
                } else {
                    random.u64(*hot..count)
                }
            })),
        }
    }
}

/// `fraction` (0 to 1) of a count, rounded down.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative, and not above the count"
)]
fn part_of(fraction: f64, count: u64) -> u64 {
    ((approximate(count) * fraction) as u64).min(count)
}

/// The item of rank i (from 0) is read with a probability proportional to 1 / (i + 1)^theta. The generator is
/// that of Gray et al., "Quickly Generating Billion-Record Synthetic Databases" (SIGMOD 1994), figure 5,
/// which YCSB's `ZipfianGenerator` uses too. As in YCSB's `ScrambledZipfianGenerator`, the popular items are
/// spread over the whole dataset: there by a hash, which may map two ranks to one item, here by a
/// permutation, which does not.
#[derive(Debug)]
struct Zipfian {
    count: u64,
    theta: f64,
    zeta: f64,
    alpha: f64,
    eta: f64,
    /// Coprime to `count`, near its golden section, so that neighbouring ranks are far apart (Knuth 6.4).
    step: u64,
}

impl Zipfian {
    fn new(count: u64, theta: f64) -> Self {
        let n = approximate(count);
        let zeta = zeta(count, theta);
        let zeta_2 = zeta_of_two(theta);
        Self {
            count,
            theta,
            zeta,
            alpha: 1.0 / (1.0 - theta),
            // With two items or fewer, the first two cases of `rank` cover all.
            eta: if count > 2 {
                (1.0 - (2.0 / n).powf(1.0 - theta)) / (1.0 - zeta_2 / zeta)
            } else {
                0.0
            },
            step: golden_step(count),
        }
    }

    /// The rank for a uniform number from 0 to 1.
    fn rank(&self, uniform: f64) -> u64 {
        let uz = uniform * self.zeta;
        let rank = if uz < 1.0 {
            0
        } else if uz < zeta_of_two(self.theta) {
            1
        } else {
            part_of((self.eta * uniform - self.eta + 1.0).powf(self.alpha), self.count)
        };
        rank.min(self.count - 1)
    }

    /// The item of a rank, scattered over the dataset.
    fn scatter(&self, rank: u64) -> u64 {
        let item = u128::from(rank) * u128::from(self.step) % u128::from(self.count);
        // Less than the count.
        u64::try_from(item).unwrap_or(0)
    }
}

fn zeta_of_two(theta: f64) -> f64 {
    1.0 + 0.5f64.powf(theta)
}

/// The sum of 1 / i^theta for i from 1 to n. The head term by term, the rest by Euler-Maclaurin: the relative
/// error is below 1e-9, and a dataset of a billion items does not delay the start by a second.
fn zeta(n: u64, theta: f64) -> f64 {
    const HEAD: u64 = 10_000;
    let head: f64 = (1..=n.min(HEAD)).map(|i| approximate(i).powf(-theta)).sum();
    if n <= HEAD {
        return head;
    }
    let (from, to) = (approximate(HEAD), approximate(n));
    let integral = (to.powf(1.0 - theta) - from.powf(1.0 - theta)) / (1.0 - theta);
    // Sum over (from, to] = integral + (f(to) - f(from)) / 2 + (f'(to) - f'(from)) / 12 - ...
    let ends = (to.powf(-theta) - from.powf(-theta)) / 2.0;
    let slopes = -theta * (to.powf(-theta - 1.0) - from.powf(-theta - 1.0)) / 12.0;
    head + integral + ends + slopes
}

/// A number coprime to `count`, near 0.618 of it.
fn golden_step(count: u64) -> u64 {
    let near = part_of(0.618_033_988_749_895, count).max(1);
    // Gaps between numbers coprime to a 64-bit number are short: a few dozen at most.
    (near..=near.saturating_add(10_000))
        .find(|&step| greatest_common_divisor(step, count) == 1)
        .unwrap_or(1)
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn chosen(pattern: PatternArg, count: u64, reads: u32) -> HashMap<u64, u32> {
        let (chooser, mut items) = (Chooser::new(pattern, count), Vec::new());
        chooser.choose(&mut fastrand::Rng::with_seed(7), reads, &mut items);
        let mut times = HashMap::new();
        for item in items {
            assert!(item < count, "{item}");
            *times.entry(item).or_default() += 1;
        }
        times
    }

    #[test]
    fn items_are_chosen_in_range_in_the_asked_order() {
        // Batches of 4 out of 6: sequential wraps around; uniform reaches every item, and repeats with its seed.
        let mut items = Vec::new();
        let mut random = fastrand::Rng::with_seed(3);
        let sequential = Chooser::new(PatternArg::Sequential, 6);
        let mut seen: Vec<u64> = Vec::new();
        for _ in 0..2 {
            sequential.choose(&mut random, 4, &mut items);
            seen.extend(&items);
        }
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 0, 1]);
        let uniform = chosen(PatternArg::Uniform, 6, 100);
        assert_eq!(uniform, chosen(PatternArg::Uniform, 6, 100));
        assert_eq!(uniform.len(), 6);
    }

    #[test]
    fn zipfian_reads_have_the_shape_of_the_formula() {
        // The ten most popular of 1000 items are each within 10 % (ranks 2 and 3, which the generator
        // approximates, 25 %) of 1 / rank^theta / zeta; the top hundred together within 2 %; and the two most
        // popular are not neighbours.
        for theta in [0.99, 0.5] {
            let times = chosen(PatternArg::Zipfian(theta), 1000, 200_000);
            let zipfian = Zipfian::new(1000, theta);
            let share = |rank: u64| {
                let item = zipfian.scatter(rank);
                f64::from(times.get(&item).copied().unwrap_or(0)) / 200_000.0
            };
            let due = |rank: u64| approximate(rank + 1).powf(-theta) / zipfian.zeta;
            for rank in 0..10 {
                let allowed = if rank == 2 || rank == 3 { 0.25 } else { 0.10 };
                let (got, want) = (share(rank), due(rank));
                let close = (got / want - 1.0).abs() < allowed;
                assert!(close, "theta {theta} rank {rank}: {got} for {want}");
            }
            let (got, want) = ((0..100).map(share).sum::<f64>(), (0..100).map(due).sum::<f64>());
            assert!((got / want - 1.0).abs() < 0.02, "theta {theta}: {got} for {want}");
            assert!(zipfian.scatter(0).abs_diff(zipfian.scatter(1)) > 100);
        }
    }

    #[test]
    fn the_popular_items_are_spread_without_collisions() {
        for count in (1..=50).chain([4096]) {
            let zipfian = Zipfian::new(count, 0.9);
            let mut items: Vec<u64> = (0..count).map(|rank| zipfian.scatter(rank)).collect();
            items.sort_unstable();
            assert_eq!(items, (0..count).collect::<Vec<_>>());
            for uniform in [0.0, 0.5, 0.999_999_999, 1.0 - f64::EPSILON] {
                assert!(zipfian.rank(uniform) < count, "{count} {uniform}");
            }
        }
    }

    #[test]
    fn the_long_sum_is_the_sum() {
        for theta in [0.2, 0.8, 0.99] {
            let terms = (1..=1_000_000u64).rev().map(|i| approximate(i).powf(-theta));
            let sum: f64 = terms.sum();
            assert!((zeta(1_000_000, theta) / sum - 1.0).abs() < 1e-9, "{theta}");
        }
    }

    #[test]
    fn a_hot_spot_gets_its_share() {
        // A tenth of 1000 items gets nine tenths of the reads, +- 1 %; at least one item is hot.
        let times = chosen(PatternArg::Hotspot(0.1, 0.9), 1000, 100_000);
        let hot: u32 = (0..100).filter_map(|item| times.get(&item)).sum();
        assert!((89_000..=91_000).contains(&hot), "{hot}");
        assert_eq!(times.len(), 1000);
        let times = chosen(PatternArg::Hotspot(0.001, 0.5), 10, 1000);
        assert!((400..600).contains(&times[&0]), "{times:?}");
        assert_eq!(chosen(PatternArg::Hotspot(0.5, 0.5), 1, 10)[&0], 10);
    }
}
