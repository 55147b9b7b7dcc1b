//! A rate limit: a token bucket that holds one second's worth.
//!
//! Stored as the time at which the bucket will be full again (GCRA, ITU-T I.371): one atomic number, so no
//! core waits for another. A response may take more than is left, so that one larger than the bucket is not
//! refused forever; then nothing is granted until that debt is paid back.

use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::time::{Duration, Instant};

const SECOND_NS: u64 = 1_000_000_000;

/// No limit.
pub(crate) const UNLIMITED: u64 = u64::MAX;

/// A refusal: by which limit, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OverRate {
    /// The limit.
    pub(crate) per_s: u64,
    /// When the request would be granted, if nothing else is requested meanwhile. Whole milliseconds.
    pub(crate) retry_after: Duration,
}

/// A limit and how far it is used.
#[derive(Debug)]
pub(crate) struct Rate {
    per_s: AtomicU64,
    full_at_ns: AtomicU64,
}

/// Nanoseconds since a fixed moment in the past.
fn now_ns() -> u64 {
    static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(EPOCH.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// How long it takes to refill `amount`: 16 MiB at 1 MiB/s is 16 s.
fn refill_ns(amount: u64, per_s: u64) -> u64 {
    let ns = u128::from(amount) * u128::from(SECOND_NS) / u128::from(per_s.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

impl Rate {
    pub(crate) fn unlimited() -> Self {
        Self {
            per_s: AtomicU64::new(UNLIMITED),
            full_at_ns: AtomicU64::new(0),
        }
    }

    /// Changes the limit. The bucket is then full; setting the same limit changes nothing.
    pub(crate) fn set(&self, per_s: u64) {
        if self.per_s.swap(per_s, AcqRel) != per_s {
            self.full_at_ns.store(0, Release);
        }
    }

    /// Takes `amount` if all of it is available.
    pub(crate) fn take(&self, amount: u64) -> Result<(), OverRate> {
        self.limited().map_or(Ok(()), |per_s| {
            self.take_at(now_ns(), per_s, amount, refill_ns(amount, per_s))
        })
    }

    /// Takes `amount` if anything is available.
    pub(crate) fn take_any(&self, amount: u64) -> Result<(), OverRate> {
        self.limited()
            .map_or(Ok(()), |per_s| self.take_at(now_ns(), per_s, amount, 0))
    }

    /// Takes `amount` if what refills in `room` is available: whoever waits for anything comes before that.
    pub(crate) fn take_after_others(&self, amount: u64, room: Duration) -> Result<(), OverRate> {
        let room = u64::try_from(room.as_nanos()).unwrap_or(u64::MAX);
        self.limited()
            .map_or(Ok(()), |per_s| self.take_at(now_ns(), per_s, amount, room))
    }

    /// Takes `amount` in any case, and returns how long to wait before using it.
    pub(crate) fn reserve(&self, amount: u64) -> Duration {
        self.limited()
            .map_or(Duration::ZERO, |per_s| self.reserve_at(now_ns(), per_s, amount))
    }

    /// Returns what was taken and not used.
    pub(crate) fn give_back(&self, amount: u64) {
        if let Some(per_s) = self.limited() {
            let refill = refill_ns(amount, per_s);
            self.change(per_s, |full_at| Some(full_at.saturating_sub(refill)));
        }
    }

    /// The limit.
    pub(crate) fn per_s(&self) -> u64 {
        self.per_s.load(Acquire)
    }

    fn limited(&self) -> Option<u64> {
        Some(self.per_s()).filter(|per_s| *per_s != UNLIMITED)
    }

    /// Takes `amount` if what refills in `needed_ns` is available.
    fn take_at(&self, now: u64, per_s: u64, amount: u64, needed_ns: u64) -> Result<(), OverRate> {
        let (refill, needed) = (refill_ns(amount, per_s), needed_ns.max(1));
        let missing = |full_at: u64| {
            let used = full_at.saturating_sub(now);
            used.saturating_add(needed).saturating_sub(SECOND_NS)
        };
        let taken = self.change(per_s, |full_at| {
            (missing(full_at) == 0).then(|| full_at.max(now).saturating_add(refill))
        });
        taken.map(drop).ok_or_else(|| OverRate {
            per_s,
            retry_after: Duration::from_millis(
                missing(self.full_at_ns.load(Acquire)).div_ceil(1_000_000).max(1),
            ),
        })
    }

    fn reserve_at(&self, now: u64, per_s: u64, amount: u64) -> Duration {
        let refill = refill_ns(amount, per_s);
        let before = self.change(per_s, |full_at| Some(full_at.max(now).saturating_add(refill)));
        let used = before.unwrap_or(0).saturating_sub(now);
        Duration::from_nanos(used.saturating_sub(SECOND_NS))
    }

    /// Applies `next` to the fill time and returns the old one; `None` if `next` refuses.
    fn change(&self, per_s: u64, next: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let before = self.full_at_ns.fetch_update(AcqRel, Acquire, next).ok()?;
        // The limit changed meanwhile: what was taken at the old one may take hours to refill at the new one.
        if self.per_s() != per_s {
            self.full_at_ns.store(0, Release);
        }
        Some(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn rate(per_s: u64) -> Rate {
        let rate = Rate::unlimited();
        rate.set(per_s);
        rate
    }

    fn wait(result: Result<(), OverRate>) -> u128 {
        result.map_or_else(|over| over.retry_after.as_millis(), |()| 0)
    }

    #[test]
    fn a_second_at_once_and_then_one_by_one() {
        // Ten per second: ten at once after any pause, then one every 100 ms; a refusal takes nothing and
        // reports when to retry.
        let rate = rate(10);
        for now in [SECOND_NS, 100 * SECOND_NS] {
            let granted = (0..20)
                .filter(|_| rate.take_at(now, 10, 1, 100 * MS).is_ok())
                .count();
            assert_eq!(granted, 10);
            assert_eq!(wait(rate.take_at(now + 30 * MS, 10, 1, 100 * MS)), 70);
            for later in 1..=5 {
                let now = now + later * 100 * MS;
                assert_eq!(rate.take_at(now, 10, 1, 100 * MS), Ok(()));
                assert_eq!(wait(rate.take_at(now, 10, 1, 100 * MS)), 100);
            }
        }
    }

    #[test]
    fn what_is_taken_is_the_bound_whatever_the_clock_does() {
        // Random amounts at random times, seeded, for 100 s: never more than the limit, one burst and one
        // response.
        let (rate, mut random) = (rate(1 << 20), fastrand::Rng::with_seed(5));
        let (mut now, mut taken) = (SECOND_NS, 0_u64);
        let answer = 3 << 20;
        while now < 101 * SECOND_NS {
            now += random.u64(..MS);
            let amount = random.u64(1..=answer);
            if rate.take_at(now, 1 << 20, amount, 0).is_ok() {
                taken += amount;
            }
        }
        let bound = 101 * (1 << 20) + answer;
        assert!(taken <= bound && taken > bound - 2 * answer, "{taken} of {bound}");
    }

    #[test]
    fn an_answer_larger_than_a_second_is_granted_and_paid_back() {
        // 1 MiB/s: 16 MiB are granted at once, then nothing for 15 s, then more.
        let rate = rate(1 << 20);
        assert_eq!(rate.take_at(SECOND_NS, 1 << 20, 16 << 20, 0), Ok(()));
        assert_eq!(wait(rate.take_at(SECOND_NS, 1 << 20, 1, 0)), 15_001);
        assert_eq!(rate.take_at(16 * SECOND_NS + MS, 1 << 20, 16 << 20, 0), Ok(()));
    }

    #[test]
    fn who_comes_after_others_leaves_them_room() {
        // A bucket in debt, at 1 MiB/s: anything is granted a second before it is full, and 100 ms later also
        // to who leaves room.
        let rate = rate(1 << 20);
        let take = |at: u64, needed| wait(rate.take_at(at, 1 << 20, 1 << 20, needed));
        assert_eq!(take(SECOND_NS, 0), 0);
        assert_eq!(take(SECOND_NS, 0), 1);
        assert_eq!(take(SECOND_NS, 100 * MS), 100);
        assert_eq!(take(SECOND_NS + 50 * MS, 100 * MS), 50);
        assert_eq!(take(SECOND_NS + 50 * MS, 0), 0);
    }

    #[test]
    fn pieces_of_long_answers_wait_for_each_other() {
        // Ten parts of 1 MiB at 1 MiB/s, reserved at once: the first two need not wait, each further one
        // waits a second longer.
        let rate = rate(1 << 20);
        let waits: Vec<u64> = (0..10)
            .map(|_| rate.reserve_at(SECOND_NS, 1 << 20, 1 << 20).as_secs())
            .collect();
        assert_eq!(waits, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn what_is_given_back_and_another_bound_free_the_bucket() {
        // A debt of hours: it is gone once it is given back or the limit changes, also if it is taken at the old limit just then,
        // but not when the same limit is set.
        let rate = rate(1 << 10);
        rate.take_any(1 << 30).unwrap();
        rate.give_back(1 << 30);
        rate.take_any(1 << 30).unwrap();
        rate.set(1 << 10);
        assert_eq!(rate.take_any(1).unwrap_err().per_s, 1 << 10);
        assert!(rate.reserve(1) > Duration::from_secs(3600));
        rate.set(1 << 20);
        rate.take_any(1).unwrap();
        // One that had read the limit before it changed.
        rate.take_at(now_ns(), 1, 1 << 20, 0).unwrap();
        rate.take_any(1).unwrap();
        rate.set(UNLIMITED);
        assert_eq!(rate.take(u64::MAX), Ok(()));
        assert_eq!(rate.reserve(u64::MAX), Duration::ZERO);
        rate.give_back(u64::MAX);
    }
}
