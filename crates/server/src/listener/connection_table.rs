//! The connections of a port, and which one is closed for a new one when the port is full.
//!
//! Victims are, in this order: a connection that never completed a request, then an idle one; among those,
//! the oldest of the caller with the most connections, or of the one of several whose oldest came first: by
//! address, a newcomer with the highest would be closed next. If all are busy, a caller with more than half of the
//! connections loses its oldest to another caller. Otherwise the new connection is refused.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::close::{CloseDecision, CloseReason};
use super::progress::{Activity, Progress};
use crate::caller::CallerKey;

/// Most connections examined in a search: the oldest ones of the callers with the most, of each half of what is left.
const LOOKS_MAX: usize = 8192;

/// Most connections closed for a new one where the limit was lowered, each after a search: cores whose connections end wait
/// for it.
const CLOSED_FOR_ONE_MAX: usize = 16;

/// The connections of a port that are not closing.
#[derive(Debug, Default)]
pub(super) struct ConnectionTable {
    /// By age: numbers increase.
    callers: HashMap<CallerKey, BTreeMap<u64, Arc<Progress>>>,
    ranks: BTreeSet<Rank>,
    taken: usize,
    next: u64,
}

/// How many connections a caller has, and the number of its oldest: the last caller's are closed first.
type Rank = (usize, Reverse<u64>, CallerKey);

fn rank(caller: CallerKey, connections: &BTreeMap<u64, Arc<Progress>>) -> Rank {
    let oldest = connections.keys().next().copied().unwrap_or_default();
    (connections.len(), Reverse(oldest), caller)
}

/// The port is full, and no connection may be closed for the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PortFull;

impl ConnectionTable {
    /// The number of connections.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// Adds a connection of this caller and returns its number, if the port then has at most `most` or
    /// another connection can be closed for it. While there are more, several are.
    ///
    /// # Errors
    /// The port is full.
    pub(super) fn take(
        &mut self,
        caller: CallerKey,
        progress: &Arc<Progress>,
        most: usize,
    ) -> Result<u64, PortFull> {
        let excess = (self.taken + 1).saturating_sub(most);
        for closed in 0..excess.min(CLOSED_FOR_ONE_MAX) {
            match self.idle_victim().or_else(|| self.over_share(caller)) {
                Some((victim, number)) => self.close(victim, number),
                None if closed == 0 => return Err(PortFull),
                None => break,
            }
        }
        let number = self.next;
        self.next += 1;
        self.change(caller, |connections| {
            connections.insert(number, Arc::clone(progress));
        });
        Ok(number)
    }

    /// Removes a connection, which may already have been evicted.
    pub(super) fn leave(&mut self, caller: CallerKey, number: u64) {
        self.change(caller, |connections| {
            connections.remove(&number);
        });
    }

    /// Closes an inactive connection, if there is one.
    pub(super) fn evict(&mut self) -> bool {
        let idle_victim = self.idle_victim();
        if let Some((caller, number)) = idle_victim {
            self.close(caller, number);
        }
        idle_victim.is_some()
    }

    fn close(&mut self, caller: CallerKey, number: u64) {
        self.change(caller, |connections| {
            if let Some(progress) = connections.remove(&number) {
                progress.decide(CloseDecision::Close(CloseReason::Evicted));
            }
        });
    }

    /// All connections.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Progress>> {
        self.callers.values().flat_map(BTreeMap::values)
    }

    /// An unproven or idle connection.
    fn idle_victim(&self) -> Option<(CallerKey, u64)> {
        let mut idle = None;
        let mut left = LOOKS_MAX;
        for (_, _, caller) in self.ranks.iter().rev() {
            let connections = self.callers.get(caller).into_iter().flatten();
            for (number, progress) in connections.take(left.div_ceil(2)) {
                match progress.activity() {
                    Activity::Unproven => return Some((*caller, *number)),
                    Activity::Idle if idle.is_none() => idle = Some((*caller, *number)),
                    Activity::Idle | Activity::Busy => {}
                }
                left -= 1;
            }
            if left == 0 {
                break;
            }
        }
        idle
    }

    /// The oldest connection of the caller with more than half of all connections, unless that is the
    /// newcomer itself.
    fn over_share(&self, newcomer: CallerKey) -> Option<(CallerKey, u64)> {
        let (count, Reverse(oldest), caller) = *self.ranks.last()?;
        (count > self.taken / 2 && caller != newcomer).then_some((caller, oldest))
    }

    /// Changes a caller's connections and updates the counts.
    fn change(&mut self, caller: CallerKey, change: impl FnOnce(&mut BTreeMap<u64, Arc<Progress>>)) {
        let connections = self.callers.entry(caller).or_default();
        let before = rank(caller, connections);
        change(connections);
        let after = rank(caller, connections);
        self.taken = self.taken.saturating_sub(before.0).saturating_add(after.0);
        self.ranks.remove(&before);
        if after.0 > 0 {
            self.ranks.insert(after);
        } else {
            self.callers.remove(&caller);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::progress::ConnectionEvent;

    fn caller(last: u8) -> CallerKey {
        CallerKey::of([192, 0, 2, last].into())
    }

    fn is_closed(progress: &Progress) -> bool {
        progress.event() == Some(ConnectionEvent::Close(CloseDecision::Close(CloseReason::Evicted)))
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
    fn a_new_connection_evicts_the_least_useful_one() {
        // Scenario: a caller with two busy connections, an idle and a half-open one; another with an older
        // half-open and an older idle one; then new connections one after the other. Expectation: they
        // replace the half-open one of the caller with the most, the other caller's half-open one, then the
        // idle ones. Once all are busy, only a caller with more than half of the places loses its oldest, and
        // only to other callers.
        let mut table = ConnectionTable::default();
        let (few, many, third) = (caller(1), caller(2), caller(3));
        let (few_half, few_idle) = (unproven(), idle());
        let (many_half, many_idle, many_busy) = (unproven(), idle(), [busy(), busy(), busy()]);
        for (caller, progress) in [(few, &few_half), (few, &few_idle), (many, &many_busy[0])] {
            table.take(caller, progress, 7).unwrap();
        }
        for progress in [&many_busy[1], &many_busy[2], &many_idle, &many_half] {
            table.take(many, progress, 7).unwrap();
        }
        assert_eq!(table.taken(), 7);
        let third_busy = [busy(), busy(), busy(), busy()];
        for (idle_victim, new) in [&many_half, &few_half, &many_idle, &few_idle]
            .into_iter()
            .zip(&third_busy)
        {
            assert!(!is_closed(idle_victim));
            table.take(third, new, 7).unwrap();
            assert!(is_closed(idle_victim));
            assert_eq!(table.taken(), 7);
        }
        // Now `many` has 3 and `third` 4, all busy.
        assert_eq!(table.take(third, &busy(), 7), Err(PortFull));
        table.take(few, &busy(), 7).unwrap();
        assert_eq!(table.take(few, &busy(), 7), Err(PortFull));
        assert!(many_busy.iter().all(|busy| !is_closed(busy)));
        assert_eq!(
            third_busy.each_ref().map(|busy| is_closed(busy)),
            [true, false, false, false]
        );
    }

    #[test]
    fn whose_connection_came_last_is_not_closed_next() {
        // Scenario: a port full of half-open connections from an address each; four more, from the highest address, the lowest and
        // between. Expectation: each replaces the oldest, whatever its address.
        let mut table = ConnectionTable::default();
        let first = [11, 12, 13, 14].map(|address| (address, unproven()));
        let later = [99, 1, 50, 2].map(|address| (address, unproven()));
        for (address, progress) in first.iter().chain(&later) {
            table.take(caller(*address), progress, 4).unwrap();
        }
        let closed = |connections: &[(u8, Arc<Progress>); 4]| {
            let closed = connections.iter().filter(|(_, progress)| is_closed(progress));
            closed.map(|(address, _)| *address).collect::<Vec<_>>()
        };
        assert_eq!((closed(&first), closed(&later)), (vec![11, 12, 13, 14], vec![]));
    }

    #[test]
    fn a_lower_bound_is_reached_with_the_next_newcomer() {
        // Scenario: five idle connections, and a limit of two. Expectation: the next one closes four.
        let mut table = ConnectionTable::default();
        let idle: Vec<_> = (0..5).map(|_| idle()).collect();
        for progress in &idle {
            table.take(caller(1), progress, 5).unwrap();
        }
        table.take(caller(1), &busy(), 2).unwrap();
        assert_eq!(table.taken(), 2);
        assert_eq!(idle.iter().filter(|progress| is_closed(progress)).count(), 4);
        assert!(!is_closed(&idle[4]));
    }

    #[test]
    fn busy_connections_of_one_caller_hide_no_idle_one_of_another() {
        // Scenario: a caller with very many busy connections and another with an idle one; a newcomer when the port is full.
        // Expectation: the idle one is closed.
        let mut table = ConnectionTable::default();
        let most = LOOKS_MAX + 1;
        let busy: Vec<_> = (1..most).map(|_| busy()).collect();
        for progress in &busy {
            table.take(caller(1), progress, most).unwrap();
        }
        let idle = idle();
        table.take(caller(2), &idle, most).unwrap();
        table.take(caller(3), &unproven(), most).unwrap();
        assert!(is_closed(&idle));
        assert!(!busy.iter().any(|progress| is_closed(progress)));
    }

    #[test]
    fn a_newcomer_closes_few_however_much_lower_the_bound_is() {
        // Scenario: 100 idle connections of two callers, and a limit of ten; then new ones, and two with a limit of five, of
        // a caller whose own are busy. Expectation: each closes 16, alike of both callers, until there are ten; the next one closes
        // the last idle ones and is admitted, the last one is refused.
        let mut table = ConnectionTable::default();
        for number in 0..100 {
            table.take(caller(1 + number % 2), &idle(), 100).unwrap();
        }
        let mut left = Vec::new();
        for _ in 0..7 {
            table.take(caller(3), &busy(), 10).unwrap();
            left.push(table.taken());
        }
        assert_eq!(left, [85, 70, 55, 40, 25, 10, 10]);
        let others = [1, 2].map(|other| table.callers.get(&caller(other)).map_or(0, BTreeMap::len));
        assert_eq!(others, [1, 2]);
        assert!(table.take(caller(3), &busy(), 5).is_ok());
        assert_eq!(table.taken(), 8);
        assert_eq!(table.take(caller(3), &busy(), 5), Err(PortFull));
    }

    #[test]
    fn removed_connections_leave_nothing_behind() {
        // Scenario: one caller takes the only place from another; both leave. Expectation: the table is
        // empty.
        let mut table = ConnectionTable::default();
        let number = table.take(caller(1), &unproven(), 1).unwrap();
        let other = table.take(caller(2), &unproven(), 1).unwrap();
        table.leave(caller(1), number);
        table.leave(caller(2), other);
        assert_eq!((table.taken(), table.callers.len(), table.ranks.len()), (0, 0, 0));
        assert!(!table.evict());
    }
}
