//! How many connections there may be, of what size and for how long: bounds that can change while ports are open.
//!
//! A port that is full makes room for a newcomer by closing a connection that does nothing (`places`). A lowered bound
//! closes none by itself.

use super::places::{Full, Places};
use super::progress::Progress;
use crate::caller::CallerKey;
use crate::config::{Limits, Timeouts};
use crate::lifecycle::State;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Connections that were told to close and have not yet, at most: each still has a descriptor.
const CLOSING_MAX: usize = 256;

/// Bounds on the connections of all ports. Clones share them.
#[derive(Debug, Clone)]
pub struct ConnectionBounds {
    inner: Arc<Bounds>,
}

#[derive(Debug)]
struct Bounds {
    connections: AtomicUsize,
    streams: AtomicU32,
    bytes: AtomicU64,
    timeouts: Mutex<Timeouts>,
    ports: Mutex<Vec<Arc<Slots>>>,
}

impl ConnectionBounds {
    /// Connections a port and requests a connection of `limits`, and this much answer memory a connection.
    pub fn new(limits: &Limits, connection_bytes: u64) -> Self {
        let bounds = Self {
            inner: Arc::new(Bounds {
                connections: AtomicUsize::new(0),
                streams: AtomicU32::new(0),
                bytes: AtomicU64::new(0),
                timeouts: Mutex::default(),
                ports: Mutex::default(),
            }),
        };
        bounds.set(limits, connection_bytes);
        bounds
    }

    /// Replaces them. Connections that are open keep their own; their number counts at once.
    pub fn set(&self, limits: &Limits, connection_bytes: u64) {
        let bounds = &*self.inner;
        let connections = usize::try_from(limits.connections).unwrap_or(usize::MAX);
        bounds.connections.store(connections, Ordering::Relaxed);
        bounds
            .streams
            .store(limits.requests_per_connection, Ordering::Relaxed);
        bounds.bytes.store(connection_bytes, Ordering::Relaxed);
        let ports = bounds.ports.lock().unwrap_or_else(PoisonError::into_inner);
        ports.iter().for_each(|port| port.changed.notify_waiters());
    }

    /// From now on clients are waited for this long.
    pub fn set_timeouts(&self, timeouts: &Timeouts) {
        *self.inner.timeouts.lock().unwrap_or_else(PoisonError::into_inner) = *timeouts;
    }

    /// How long clients are waited for.
    pub(super) fn timeouts(&self) -> Timeouts {
        *self.inner.timeouts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Most answer memory of a new connection.
    pub fn connection_bytes(&self) -> u64 {
        self.inner.bytes.load(Ordering::Relaxed)
    }

    /// Most connections of a port.
    pub(super) fn connections(&self) -> usize {
        self.inner.connections.load(Ordering::Relaxed)
    }

    /// Most requests in flight on a new connection.
    pub(super) fn streams(&self) -> u32 {
        self.inner.streams.load(Ordering::Relaxed)
    }

    /// The places of one more port.
    pub(super) fn slots(&self) -> Arc<Slots> {
        let slots = Arc::new(Slots::default());
        let mut ports = self.inner.ports.lock().unwrap_or_else(PoisonError::into_inner);
        ports.push(Arc::clone(&slots));
        slots
    }
}

/// The connections of one port.
#[derive(Debug, Default)]
pub(super) struct Slots {
    open: AtomicUsize,
    /// Those of them that a drain does not wait for.
    late: AtomicUsize,
    places: Mutex<Places>,
    changed: Notify,
}

/// A connection's place; given back on drop.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    caller: CallerKey,
    number: u64,
    is_late: bool,
}

impl Slots {
    /// How many are open.
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// How many are open that a drain waits for.
    pub(super) fn awaited(&self) -> usize {
        self.open().saturating_sub(self.late.load(Ordering::Acquire))
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place among at most `most`, if need be that of a connection which is told to close.
    ///
    /// # Errors
    /// Every other connection has more right to its place.
    pub(super) fn take(
        self: &Arc<Self>,
        caller: CallerKey,
        progress: &Arc<Progress>,
        most: usize,
    ) -> Result<Slot, Full> {
        let is_late = progress.is_late();
        let number = self.places().take(caller, progress, most)?;
        self.open.fetch_add(1, Ordering::AcqRel);
        if is_late {
            self.late.fetch_add(1, Ordering::AcqRel);
        }
        Ok(Slot {
            slots: Arc::clone(self),
            caller,
            number,
            is_late,
        })
    }

    /// Tells all connections the daemon's state.
    pub(super) fn tell(&self, state: State) {
        self.places().all().for_each(|progress| progress.follow(state));
    }

    /// Tells one connection to close that does nothing. Whether there was one.
    pub(super) fn evict(&self) -> bool {
        self.places().evict()
    }

    /// Resolves once the connections that were told to close are few.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub(super) async fn few_closing(&self) {
        self.until(|slots| slots.open() < slots.places().taken() + CLOSING_MAX)
            .await;
    }

    /// Resolves once this holds.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub(super) async fn until(&self, holds: impl Fn(&Self) -> bool) {
        loop {
            // Made before the look: a change after it is not missed.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if holds(self) {
                return;
            }
            changed.await;
        }
    }
}

impl Slot {
    /// Tells this place's connection from others of the port.
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.places().leave(self.caller, self.number);
        if self.is_late {
            self.slots.late.fetch_sub(1, Ordering::AcqRel);
        }
        self.slots.open.fetch_sub(1, Ordering::AcqRel);
        self.slots.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    fn caller() -> CallerKey {
        CallerKey::of("127.0.0.1".parse().unwrap())
    }

    #[tokio::test]
    async fn a_place_is_free_once_its_connection_is_gone() {
        // Scenario: two connections, one of which a drain does not wait for. Expectation: it waits for the other alone.
        let slots = Arc::new(Slots::default());
        let progress = Arc::new(Progress::default());
        let awaited = slots.take(caller(), &progress, 2).unwrap();
        let late = slots.take(caller(), &Arc::new(Progress::new(true)), 2).unwrap();
        assert_eq!((slots.open(), slots.awaited()), (2, 1));
        let mut gone = Box::pin(slots.until(|slots| slots.awaited() == 0));
        assert!(gone.as_mut().now_or_never().is_none());
        drop(awaited);
        gone.await;
        assert_eq!(slots.open(), 1);
        drop(late);
        assert_eq!((slots.open(), slots.awaited()), (0, 0));
    }

    #[tokio::test]
    async fn connections_that_do_not_close_hold_newcomers_up() {
        // Scenario: one place; newcomers take it from one another, and nobody gives its own back. Expectation: after so many
        // the port waits, until one is gone.
        let slots = Arc::new(Slots::default());
        let mut held = Vec::new();
        while slots.few_closing().now_or_never().is_some() {
            held.push(slots.take(caller(), &Arc::default(), 1).unwrap());
            assert!(held.len() <= CLOSING_MAX + 1);
        }
        assert_eq!(held.len(), CLOSING_MAX + 1);
        held.remove(0);
        slots.few_closing().await;
    }

    #[test]
    fn a_bound_that_changes_counts_for_the_next_connection() {
        // Scenario: bounds and times are set anew. Expectation: they are what is asked for from then on.
        let bounds = ConnectionBounds::new(&Limits::default(), 4096);
        let limits = Limits {
            connections: 7,
            ..Limits::default()
        };
        bounds.set(&limits, 8192);
        assert_eq!((bounds.connections(), bounds.connection_bytes()), (7, 8192));
        let timeouts = Timeouts {
            send_bytes_min: 5,
            ..Timeouts::default()
        };
        bounds.set_timeouts(&timeouts);
        assert_eq!(bounds.timeouts(), timeouts);
    }
}
