//! How many connections there may be, and of what size: bounds that can change while ports are open.
//!
//! A lowered bound ends no connection: it is kept by taking no further ones. Each port has one acceptor, which is why
//! looking for room and taking it are two steps.

use crate::config::Limits;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;

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
        ports.iter().for_each(|port| port.changed.notify_one());
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

/// The connections of one port, counted.
#[derive(Debug, Default)]
pub(super) struct Slots {
    open: AtomicUsize,
    changed: Notify,
}

/// A connection's place; given back on drop.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
}

impl Slots {
    /// How many are taken.
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// Takes a place, whether there is room or not.
    pub(super) fn take(self: &Arc<Self>) -> Slot {
        self.open.fetch_add(1, Ordering::AcqRel);
        Slot {
            slots: Arc::clone(self),
        }
    }

    /// Resolves once this holds for the number of places taken. One waiter at a time: a change wakes one.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub(super) async fn until(&self, holds: impl Fn(usize) -> bool) {
        while !holds(self.open()) {
            // A change between the look and this is kept for it.
            self.changed.notified().await;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.open.fetch_sub(1, Ordering::AcqRel);
        self.slots.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    fn limits(connections: u32) -> Limits {
        Limits {
            connections,
            ..Limits::default()
        }
    }

    #[tokio::test]
    async fn a_bound_that_is_raised_makes_room_at_once() {
        // Scenario: one place, taken; somebody waits; the bound becomes two. Then it is lowered to one while two are taken.
        // Expectation: whoever waits goes on; after the lowering there is room only once both are given back.
        let bounds = ConnectionBounds::new(&limits(1), 4096);
        let slots = bounds.slots();
        let first = slots.take();
        let mut waiting = Box::pin(slots.until(|open| open < bounds.connections()));
        assert!(waiting.as_mut().now_or_never().is_none());
        bounds.set(&limits(2), 8192);
        waiting.await;
        assert_eq!(bounds.connection_bytes(), 8192);

        let second = slots.take();
        bounds.set(&limits(1), 4096);
        drop(first);
        let mut waiting = Box::pin(slots.until(|open| open < bounds.connections()));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(second);
        waiting.await;
        assert_eq!(slots.open(), 0);
    }
}
