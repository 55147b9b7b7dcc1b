//! Who has the places of a port, and who gives his up when a newcomer finds none.
//!
//! First a connection that never sent a whole request, then an idle one; of the caller with the most connections first,
//! and of that one's the oldest. If all are busy, a caller with more than half of the places gives its oldest up to
//! other callers. Otherwise the newcomer has to go.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::ending::{Reason, Verdict};
use super::progress::{Progress, Standing};
use crate::caller::CallerKey;

/// How many connections a search looks at, at most: the oldest ones of the callers with the most.
const LOOKS_MAX: usize = 4096;

/// The connections of a port that were not told to close.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// By age: numbers grow.
    callers: HashMap<CallerKey, BTreeMap<u64, Arc<Progress>>>,
    /// How many each has.
    sizes: BTreeSet<(usize, CallerKey)>,
    taken: usize,
    next: u64,
}

/// Every connection has more right to its place than the newcomer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

impl Places {
    /// How many are taken.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// A place for a connection of this caller, among at most `most`: its number.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn take(
        &mut self,
        caller: CallerKey,
        progress: &Arc<Progress>,
        most: usize,
    ) -> Result<u64, Full> {
        while self.taken >= most {
            let (victim, number) = self.victim().or_else(|| self.usurper(caller)).ok_or(Full)?;
            self.close(victim, number);
        }
        let number = self.next;
        self.next += 1;
        self.change(caller, |connections| {
            connections.insert(number, Arc::clone(progress));
        });
        Ok(number)
    }

    /// Gives a place back; it may have been taken away before.
    pub(super) fn leave(&mut self, caller: CallerKey, number: u64) {
        self.change(caller, |connections| {
            connections.remove(&number);
        });
    }

    /// Closes one that does nothing, if there is one.
    pub(super) fn evict(&mut self) -> bool {
        let victim = self.victim();
        if let Some((caller, number)) = victim {
            self.close(caller, number);
        }
        victim.is_some()
    }

    fn close(&mut self, caller: CallerKey, number: u64) {
        self.change(caller, |connections| {
            if let Some(progress) = connections.remove(&number) {
                progress.decide(Verdict::Close(Reason::Evicted));
            }
        });
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Progress>> {
        self.callers.values().flat_map(BTreeMap::values)
    }

    /// The connection that is missed the least.
    fn victim(&self) -> Option<(CallerKey, u64)> {
        let mut idle = None;
        let mut looks = 0;
        for (_, caller) in self.sizes.iter().rev() {
            for (number, progress) in self.callers.get(caller).into_iter().flatten() {
                match progress.standing() {
                    Standing::Unproven => return Some((*caller, *number)),
                    Standing::Idle if idle.is_none() => idle = Some((*caller, *number)),
                    Standing::Idle | Standing::Busy => {}
                }
                looks += 1;
                if looks == LOOKS_MAX {
                    return idle;
                }
            }
        }
        idle
    }

    /// The oldest connection of a caller that has more than half of the places, unless it is this one.
    fn usurper(&self, newcomer: CallerKey) -> Option<(CallerKey, u64)> {
        let (count, caller) = *self.sizes.last()?;
        let (number, _) = self.callers.get(&caller)?.first_key_value()?;
        (count > self.taken / 2 && caller != newcomer).then_some((caller, *number))
    }

    /// Changes a caller's connections and keeps what is known of their number.
    fn change(&mut self, caller: CallerKey, change: impl FnOnce(&mut BTreeMap<u64, Arc<Progress>>)) {
        let connections = self.callers.entry(caller).or_default();
        let before = connections.len();
        change(connections);
        let after = connections.len();
        if after == 0 {
            self.callers.remove(&caller);
        }
        self.taken = self.taken.saturating_sub(before).saturating_add(after);
        self.sizes.remove(&(before, caller));
        if after > 0 {
            self.sizes.insert((after, caller));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::progress::{Heard, News};
    use futures_util::FutureExt as _;

    fn caller(last: u8) -> CallerKey {
        CallerKey::of([192, 0, 2, last].into())
    }

    fn is_closed(progress: &Progress) -> bool {
        let mut heard = Heard::default();
        let news = std::future::poll_fn(|cx| progress.poll_news(cx, &mut heard)).now_or_never();
        news == Some(News::Verdict(Verdict::Close(Reason::Evicted)))
    }

    fn unproven() -> Arc<Progress> {
        Arc::default()
    }

    fn idle() -> Arc<Progress> {
        let progress = Arc::default();
        drop(Progress::open(&progress, true));
        progress
    }

    /// Busy for as long as the test runs.
    fn busy() -> Arc<Progress> {
        let progress = Arc::default();
        std::mem::forget(Progress::open(&progress, true));
        progress
    }

    #[test]
    fn a_newcomer_takes_the_place_that_is_missed_the_least() {
        // Scenario: a caller with two busy connections, an idle and a half-open one; another with an older half-open and an
        // older idle one. Newcomers one after the other. Expectation: the half-open one of the caller with most, the other
        // caller's, then idle ones; then, with all busy, only what is above half of the places, and for others alone.
        let mut places = Places::default();
        let (few, many, third) = (caller(1), caller(2), caller(3));
        let (few_half, few_idle) = (unproven(), idle());
        let (many_half, many_idle, many_busy) = (unproven(), idle(), [busy(), busy(), busy()]);
        for (caller, progress) in [(few, &few_half), (few, &few_idle), (many, &many_busy[0])] {
            places.take(caller, progress, 7).unwrap();
        }
        for progress in [&many_busy[1], &many_busy[2], &many_idle, &many_half] {
            places.take(many, progress, 7).unwrap();
        }
        assert_eq!(places.taken(), 7);
        for victim in [&many_half, &few_half, &many_idle, &few_idle] {
            assert!(!is_closed(victim));
            places.take(third, &busy(), 7).unwrap();
            assert!(is_closed(victim));
            assert_eq!(places.taken(), 7);
        }
        // Now 3 of many, 4 of third, all busy.
        assert_eq!(places.take(third, &busy(), 7), Err(Full));
        places.take(few, &busy(), 7).unwrap();
        assert_eq!(places.take(few, &busy(), 7), Err(Full));
        assert!(many_busy.iter().all(|busy| !is_closed(busy)));
    }

    #[test]
    fn a_lower_bound_is_reached_with_the_next_newcomer() {
        // Scenario: five idle connections, and a bound of two. Expectation: the next one closes four.
        let mut places = Places::default();
        let idle: Vec<_> = (0..5).map(|_| idle()).collect();
        for progress in &idle {
            places.take(caller(1), progress, 5).unwrap();
        }
        places.take(caller(1), &busy(), 2).unwrap();
        assert_eq!(places.taken(), 2);
        assert_eq!(idle.iter().filter(|progress| is_closed(progress)).count(), 4);
        assert!(!is_closed(&idle[4]));
    }

    #[test]
    fn places_that_were_given_back_leave_nothing_behind() {
        // Scenario: one caller takes the only place from another; both give it back. Expectation: nothing is remembered.
        let mut places = Places::default();
        let number = places.take(caller(1), &unproven(), 1).unwrap();
        let other = places.take(caller(2), &unproven(), 1).unwrap();
        places.leave(caller(1), number);
        places.leave(caller(2), other);
        assert_eq!(
            (places.taken(), places.callers.len(), places.sizes.len()),
            (0, 0, 0)
        );
        assert!(!places.evict());
    }
}
