//! Limits of connections: number, memory and timeouts. They can change while ports are open.
//!
//! A full port closes an inactive connection for a new one (`connection_table`). Lowering a limit closes no
//! connection by itself.

use super::connection_table::{ConnectionTable, PortFull};
use super::kept_requests::KeptRequests;
use super::progress::Progress;
use crate::caller::CallerKey;
use crate::config::{Limits, Timeouts};
use crate::lifecycle::State;
use ringfetch_engine::sync::lock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;

/// Most connections that are closing at a time: each still has a descriptor.
const CLOSING_MAX: usize = 256;

/// Limits of the connections of all ports. Clones share them.
#[derive(Debug, Clone)]
pub struct ConnectionLimits {
    inner: Arc<SharedLimits>,
}

#[derive(Debug, Default)]
struct SharedLimits {
    connections: AtomicUsize,
    streams: AtomicU32,
    bytes: AtomicU64,
    timeouts: Mutex<Timeouts>,
    ports: Mutex<Vec<Arc<PortConnections>>>,
    kept: Arc<KeptRequests>,
}

impl ConnectionLimits {
    /// The limits in `limits`, and `connection_bytes` of response memory per connection.
    pub fn new(limits: &Limits, connection_bytes: u64) -> Self {
        let connection_limits = Self {
            inner: Arc::default(),
        };
        connection_limits.set(limits, connection_bytes);
        connection_limits
    }

    /// Replaces the limits. Open connections keep theirs, except that the limit on their number applies to the
    /// next one.
    pub fn set(&self, limits: &Limits, connection_bytes: u64) {
        let connection_limits = &*self.inner;
        let connections = usize::try_from(limits.connections).unwrap_or(usize::MAX);
        connection_limits
            .connections
            .store(connections, Ordering::Relaxed);
        connection_limits
            .streams
            .store(limits.requests_per_connection, Ordering::Relaxed);
        connection_limits.bytes.store(connection_bytes, Ordering::Relaxed);
        connection_limits
            .kept
            .set_request_memory(limits.request_memory_bytes);
    }

    /// Replaces the timeouts.
    pub fn set_timeouts(&self, timeouts: &Timeouts) {
        *lock(&self.inner.timeouts) = *timeouts;
    }

    /// The timeouts.
    pub(super) fn timeouts(&self) -> Timeouts {
        *lock(&self.inner.timeouts)
    }

    /// Most response memory of a new connection.
    pub fn connection_bytes(&self) -> u64 {
        self.inner.bytes.load(Ordering::Relaxed)
    }

    /// Most connections of a port.
    pub(super) fn connections_max(&self) -> usize {
        self.inner.connections.load(Ordering::Relaxed)
    }

    /// Most requests in flight on a new connection.
    pub(super) fn streams(&self) -> u32 {
        self.inner.streams.load(Ordering::Relaxed)
    }

    /// Adds a port; returns the counter of its connections.
    pub(super) fn add_port(&self) -> Arc<PortConnections> {
        let connections = Arc::new(PortConnections::default());
        lock(&self.inner.ports).push(Arc::clone(&connections));
        connections
    }

    /// Counts what h2 keeps of requests.
    pub(super) fn kept(&self) -> &Arc<KeptRequests> {
        &self.inner.kept
    }

    /// Sends away connections for which h2 keeps much, if it keeps too much for all of them; with `closes`, also closes some.
    pub(super) fn reclaim_kept(&self, closes: bool) {
        if !self.inner.kept.are_many() {
            return;
        }
        let ports = lock(&self.inner.ports).clone();
        let connections = ports
            .iter()
            .flat_map(|port| port.table().all().cloned().collect::<Vec<_>>());
        self.inner.kept.reclaim(connections, closes);
    }
}

/// The connections of one port.
#[derive(Debug, Default)]
pub(super) struct PortConnections {
    open: AtomicUsize,
    /// Those of them that a drain does not wait for.
    late: AtomicUsize,
    table: Mutex<ConnectionTable>,
    changed: Notify,
}

/// A connection of a port, removed on drop.
#[derive(Debug)]
pub(super) struct ConnectionPermit {
    connections: Arc<PortConnections>,
    caller: CallerKey,
    number: u64,
    is_late: bool,
}

impl PortConnections {
    /// The number of open connections.
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// The number of open connections that a drain waits for.
    pub(super) fn awaited(&self) -> usize {
        self.open().saturating_sub(self.late.load(Ordering::Acquire))
    }

    /// How many of those have a client that has not received the last byte of its answers.
    pub(super) fn unanswered(&self) -> usize {
        let is_unanswered = |progress: &&Arc<Progress>| !progress.is_late() && progress.is_unanswered();
        self.table().all().filter(is_unanswered).count()
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        lock(&self.table)
    }

    /// Adds a connection if the port then has at most `most`, or if another one can be closed for it.
    ///
    /// # Errors
    /// The port is full.
    pub(super) fn take(
        self: &Arc<Self>,
        caller: CallerKey,
        progress: &Arc<Progress>,
        most: usize,
    ) -> Result<ConnectionPermit, PortFull> {
        let is_late = progress.is_late();
        let number = self.table().take(caller, progress, most)?;
        self.open.fetch_add(1, Ordering::AcqRel);
        if is_late {
            self.late.fetch_add(1, Ordering::AcqRel);
        }
        Ok(ConnectionPermit {
            connections: Arc::clone(self),
            caller,
            number,
            is_late,
        })
    }

    /// Passes the daemon's state to all connections.
    pub(super) fn set_state(&self, state: State) {
        self.table().all().for_each(|progress| progress.set_state(state));
    }

    /// Closes an inactive connection; returns whether there was one.
    pub(super) fn evict(&self) -> bool {
        self.table().evict()
    }

    /// Resolves once few connections are closing.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub(super) async fn few_closing(&self) {
        self.until(|connections| connections.open() < connections.table().taken() + CLOSING_MAX)
            .await;
    }

    /// Resolves once `holds` returns true.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub(super) async fn until(&self, holds: impl Fn(&Self) -> bool) {
        loop {
            // Registered before the check, so that no change is missed.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if holds(self) {
                return;
            }
            changed.await;
        }
    }
}

impl ConnectionPermit {
    /// Its number, unique within the port.
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.connections.table().leave(self.caller, self.number);
        if self.is_late {
            self.connections.late.fetch_sub(1, Ordering::AcqRel);
        }
        self.connections.open.fetch_sub(1, Ordering::AcqRel);
        self.connections.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use std::task::Poll;

    fn caller() -> CallerKey {
        CallerKey::of("127.0.0.1".parse().unwrap())
    }

    #[tokio::test]
    async fn a_place_is_free_once_its_connection_is_gone() {
        // Scenario: two connections with a request each, one of which a drain does not wait for. Expectation: it waits for the
        // other alone, whose request is unanswered until its last byte is written and, as far as is known, received.
        let connections = Arc::new(PortConnections::default());
        let progress = Arc::new(Progress::default());
        let awaited = connections.take(caller(), &progress, 2).unwrap();
        let is_late = Arc::new(Progress::late());
        let late = connections.take(caller(), &is_late, 2).unwrap();
        assert_eq!((connections.open(), connections.awaited()), (2, 1));
        let _late_request = is_late.open(true);
        let request = progress.open(true);
        assert_eq!(connections.unanswered(), 1);
        progress.wrote(&Poll::<Result<usize, ()>>::Pending);
        drop(request);
        assert_eq!(connections.unanswered(), 1);
        progress.wrote(&Poll::Ready(Ok::<_, ()>(1)));
        progress.set_unreceived(true);
        assert_eq!(connections.unanswered(), 1);
        progress.set_unreceived(false);
        assert_eq!(connections.unanswered(), 0);
        let mut gone = Box::pin(connections.until(|connections| connections.awaited() == 0));
        assert!(gone.as_mut().now_or_never().is_none());
        drop(awaited);
        gone.await;
        assert_eq!(connections.open(), 1);
        drop(late);
        assert_eq!((connections.open(), connections.awaited()), (0, 0));
    }

    #[tokio::test]
    async fn connections_that_do_not_close_hold_newcomers_up() {
        // Scenario: a port for one connection. Each new connection evicts the one before, and evicted
        // connections stay open. Expectation: once too many are closing the port waits, until one of them is
        // gone.
        let connections = Arc::new(PortConnections::default());
        let mut held = Vec::new();
        while connections.few_closing().now_or_never().is_some() {
            held.push(connections.take(caller(), &Arc::default(), 1).unwrap());
            assert!(held.len() <= CLOSING_MAX + 1);
        }
        assert_eq!(held.len(), CLOSING_MAX + 1);
        held.remove(0);
        connections.few_closing().await;
    }

    #[test]
    fn a_bound_that_changes_counts_for_the_next_connection() {
        // Scenario: limits and timeouts are replaced, and a connection had 1,100 requests open at once. Expectation: the new values
        // are returned from then on; with little request memory those are too many.
        let connection_limits = ConnectionLimits::new(&Limits::default(), 4096);
        let progress = Progress::http2(connection_limits.kept());
        progress.had_open(1100);
        assert!(!connection_limits.kept().are_many());
        let limits = Limits {
            connections: 7,
            requests_per_connection: 9,
            request_memory_bytes: 1,
            ..Limits::default()
        };
        connection_limits.set(&limits, 8192);
        assert_eq!(
            (
                connection_limits.connections_max(),
                connection_limits.streams(),
                connection_limits.connection_bytes()
            ),
            (7, 9, 8192)
        );
        assert!(connection_limits.kept().are_many());
        let timeouts = Timeouts {
            send_bytes_min: 5,
            ..Timeouts::default()
        };
        connection_limits.set_timeouts(&timeouts);
        assert_eq!(connection_limits.timeouts(), timeouts);
    }
}
