//! The connections: some to each endpoint, of which the least busy is chosen. An unreachable endpoint is
//! skipped for a while if there is another one. Invariants: a lease counts on its connection as long as it
//! lives; only one caller at a time opens a connection, and callers that wait for it share its failure.

use crate::connection::Endpoint;
use crate::error::Error;
use bytes::Bytes;
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use http::Request;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// How long an unreachable endpoint is skipped.
const DOWN: Duration = Duration::from_secs(1);

/// A place for a connection.
#[derive(Debug)]
struct Slot {
    endpoint: Arc<Endpoint>,
    /// Number of the endpoint.
    number: usize,
    outstanding: Arc<AtomicUsize>,
    /// Whether `down_until` need be read.
    is_down: AtomicBool,
    state: Mutex<State>,
    dialling: tokio::sync::Mutex<()>,
    failures: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Number of connections opened so far.
    generation: u64,
    sender: Option<SendRequest<Bytes>>,
    down_until: Option<Instant>,
    /// Why the last attempt to connect failed.
    problem: Option<Error>,
}

/// The connections of one client.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: Vec<Slot>,
    endpoints: usize,
    /// Where the next search begins, so that equally busy connections take turns.
    turn: AtomicUsize,
}

/// Endpoints that a call has tried in vain: they are tried last.
#[derive(Debug, Default)]
pub(crate) struct Avoid(Vec<usize>);

impl Avoid {
    /// Moves a lease's endpoint behind the others.
    pub(crate) fn add(&mut self, lease: &Lease<'_>) {
        if !self.0.contains(&lease.slot.number) {
            self.0.push(lease.slot.number);
        }
    }
}

impl Pool {
    /// This many connections to each endpoint; at least one of both.
    pub(crate) fn new(endpoints: &[Endpoint], connections: usize) -> Self {
        let endpoints: Vec<_> = endpoints.iter().cloned().map(Arc::new).collect();
        // Alternates endpoints within each round, so that turns go around the endpoints.
        let slots = (0..connections)
            .flat_map(|_| endpoints.iter().enumerate())
            .map(|(number, endpoint)| Slot {
                endpoint: Arc::clone(endpoint),
                number,
                outstanding: Arc::default(),
                is_down: AtomicBool::new(false),
                state: Mutex::default(),
                dialling: tokio::sync::Mutex::default(),
                failures: AtomicU64::new(0),
            })
            .collect();
        Self {
            slots,
            endpoints: endpoints.len(),
            turn: AtomicUsize::new(0),
        }
    }

    /// Opens all connections.
    ///
    /// # Errors
    /// An endpoint's connection fails and it is the only one, or all endpoints fail.
    pub(crate) async fn connect(&self) -> Result<(), Error> {
        let opened = futures_util::future::join_all(self.slots.iter().map(|slot| slot.sender())).await;
        let (mut reached, mut problem) = (false, None);
        for outcome in opened {
            match outcome {
                Ok(_) => reached = true,
                Err(error) => problem = Some(error),
            }
        }
        match problem {
            Some(problem) if !reached || self.endpoints == 1 => Err(problem),
            Some(_) | None => Ok(()),
        }
    }

    /// Begins a call on a connection. Unreachable endpoints are tried one after another, each once.
    pub(crate) async fn call(
        &self,
        avoid: &mut Avoid,
        head: impl Fn(&Endpoint) -> Request<()>,
    ) -> Result<(Lease<'_>, ResponseFuture, SendStream<Bytes>), Error> {
        let mut tried = 0;
        loop {
            let lease = self.lease(avoid);
            // The usual case: the connection is open and intact.
            if let Some((generation, mut sender)) = lease.slot.held() {
                match sender.send_request(head(&lease.slot.endpoint), false) {
                    Ok((response, body)) => return Ok((lease, response, body)),
                    Err(_) => lease.slot.forget(generation),
                }
            }
            // Boxed, so that the future of a call is not enlarged by connecting.
            let opened = Box::pin(lease.slot.sender()).await;
            let error = match opened {
                Ok(mut sender) => {
                    let (response, body) = sender.send_request(head(&lease.slot.endpoint), false)?;
                    return Ok((lease, response, body));
                }
                Err(error) => error,
            };
            avoid.add(&lease);
            tried += 1;
            if tried >= self.endpoints {
                return Err(error);
            }
        }
    }

    /// The connection with the fewest leases, preferring those that are not to be avoided. Under contention
    /// it may only be close to the fewest: the counts are read without a lock.
    pub(crate) fn lease(&self, avoid: &Avoid) -> Lease<'_> {
        let count = self.slots.len();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let rank = |slot: &Slot| {
            let last = avoid.0.contains(&slot.number) || slot.is_down();
            (last, slot.outstanding.load(Ordering::Relaxed))
        };
        let mut best = &self.slots[turn % count];
        let mut best_rank = rank(best);
        for step in 1..count {
            if best_rank == (false, 0) {
                break;
            }
            let slot = &self.slots[turn.wrapping_add(step) % count];
            let slot_rank = rank(slot);
            if slot_rank < best_rank {
                (best, best_rank) = (slot, slot_rank);
            }
        }
        best.outstanding.fetch_add(1, Ordering::Relaxed);
        Lease { slot: best }
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
            && self.lock().down_until.is_some_and(|until| Instant::now() < until)
    }

    /// The connection, with its number, if it is open.
    fn held(&self) -> Option<(u64, SendRequest<Bytes>)> {
        let state = self.lock();
        state.sender.clone().map(|sender| (state.generation, sender))
    }

    /// Drops a broken connection, unless a later one has replaced it.
    fn forget(&self, generation: u64) {
        let mut state = self.lock();
        if state.generation == generation {
            state.sender = None;
        }
    }

    /// The connection, opened if necessary.
    async fn sender(&self) -> Result<SendRequest<Bytes>, Error> {
        let failures = self.failures.load(Ordering::Acquire);
        let _dialling = self.dialling.lock().await;
        if let Some((_, sender)) = self.held() {
            return Ok(sender);
        }
        if self.failures.load(Ordering::Acquire) != failures
            && let Some(problem) = self.lock().problem.clone()
        {
            return Err(problem);
        }
        let opened = self.endpoint.open(Arc::clone(&self.outstanding)).await;
        let mut state = self.lock();
        match opened {
            Ok(sender) => {
                state.generation += 1;
                state.sender = Some(sender.clone());
                (state.down_until, state.problem) = (None, None);
                self.is_down.store(false, Ordering::Relaxed);
                Ok(sender)
            }
            Err(error) => {
                state.down_until = Some(Instant::now() + DOWN);
                state.problem = Some(error.clone());
                self.is_down.store(true, Ordering::Relaxed);
                self.failures.fetch_add(1, Ordering::Release);
                Err(error)
            }
        }
    }
}

/// The use of one connection, for a call or for a stream's life.
#[derive(Debug)]
pub(crate) struct Lease<'a> {
    slot: &'a Slot,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.slot.outstanding.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Dial;

    fn pool(endpoints: u16, connections: usize) -> Pool {
        let endpoint =
            |port| Endpoint::new(&format!("http://127.0.0.1:{port}"), Dial::Tcp, &mut None, DOWN).unwrap();
        Pool::new(&(1..=endpoints).map(endpoint).collect::<Vec<_>>(), connections)
    }

    fn counts(pool: &Pool) -> Vec<usize> {
        pool.slots
            .iter()
            .map(|slot| slot.outstanding.load(Ordering::Relaxed))
            .collect()
    }

    #[test]
    fn the_least_busy_connection_is_taken() {
        // Scenario: three connections, six leases, then the two of one connection are dropped and two more taken.
        // Expected: two leases on each connection, and both new ones on the one that became free.
        let pool = pool(1, 3);
        let mut leases: Vec<Lease<'_>> = (0..6).map(|_| pool.lease(&Avoid::default())).collect();
        assert_eq!(counts(&pool), [2, 2, 2]);
        leases.retain(|lease| !std::ptr::eq(lease.slot, &raw const pool.slots[1]));
        assert_eq!(counts(&pool), [2, 0, 2]);
        leases.push(pool.lease(&Avoid::default()));
        leases.push(pool.lease(&Avoid::default()));
        assert_eq!(counts(&pool), [2, 2, 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_is_avoided_or_down_comes_last() {
        // Scenario: two endpoints of two connections each; the first is to be avoided; then the second is
        // down, and a second later it is not; then both are to be avoided. Expected: the second, however
        // busy; the first; both evenly; still both.
        let pool = pool(2, 2);
        let first = pool.slots.iter().position(|slot| slot.number == 0).unwrap();
        let avoid = Avoid(vec![0]);
        let leases: Vec<Lease<'_>> = (0..6).map(|_| pool.lease(&avoid)).collect();
        assert!(leases.iter().all(|lease| lease.slot.number == 1));
        drop(leases);
        for slot in pool.slots.iter().filter(|slot| slot.number == 1) {
            slot.is_down.store(true, Ordering::Relaxed);
            slot.lock().down_until = Some(Instant::now() + DOWN);
        }
        let leases: Vec<Lease<'_>> = (0..4).map(|_| pool.lease(&Avoid::default())).collect();
        assert!(leases.iter().all(|lease| lease.slot.number == 0) && counts(&pool)[first] == 2);
        drop(leases);
        tokio::time::advance(DOWN).await;
        for avoid in [Avoid::default(), Avoid(vec![0, 1])] {
            let leases: Vec<Lease<'_>> = (0..4).map(|_| pool.lease(&avoid)).collect();
            assert_eq!(counts(&pool), [1, 1, 1, 1]);
            drop(leases);
        }
    }
}
