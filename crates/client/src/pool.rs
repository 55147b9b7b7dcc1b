//! The connections: some to each endpoint, of which the least busy is chosen. An endpoint that cannot be reached gets no call
//! until a connection to it is open again, if there is another one; one that refuses calls, and a connection that may be
//! silent, are skipped for a while. Invariants: a lease counts on its connection as long as it lives; a connection is opened
//! once at a time, to the end whatever its callers do, and those that wait for it share the outcome.

use crate::connection::{Calls, Endpoint, Until};
use crate::error::Error;
use bytes::Bytes;
use futures_util::future::{FutureExt as _, Shared};
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use http::Request;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// How long an unreachable endpoint is not dialled again, and at most one that refuses calls is skipped.
const DOWN: Duration = Duration::from_secs(1);

/// A place for a connection.
#[derive(Debug)]
pub(crate) struct Slot {
    endpoint: Arc<Endpoint>,
    /// Number of the endpoint.
    number: usize,
    calls: Arc<Calls>,
    /// Whether it has a connection, as far as is known.
    is_open: AtomicBool,
    /// Shared by the slots of the endpoint.
    reach: Arc<Mutex<Reach>>,
    /// Until when others are better, since it refused a call; likewise.
    refuses_until: Arc<Until>,
    state: Mutex<State>,
}

/// Whether an endpoint can be reached.
#[derive(Debug, Default)]
struct Reach {
    /// When to dial it again: the last dial failed, or a connection broke and none has been opened since.
    redial_at: Option<Instant>,
    /// Whether the last dial failed.
    has_failed: bool,
    /// Connections that are being opened.
    opening: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Number of connections opened so far.
    generation: u64,
    sender: Option<SendRequest<Bytes>>,
    opening: Option<Opening>,
}

type Opened = Result<SendRequest<Bytes>, Error>;

/// A connection that is being opened, by a task: a caller's future may wait for long until it is polled again, and other
/// callers with it.
#[derive(Debug)]
struct Opening {
    task: AbortHandle,
    outcome: Shared<oneshot::Receiver<Opened>>,
}

impl State {
    /// The connection that is being opened. A task is gone without an outcome if its runtime is.
    fn opening(&self) -> Option<&Opening> {
        self.opening
            .as_ref()
            .filter(|opening| !opening.task.is_finished())
    }
}

/// The connections of one client.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: Vec<Arc<Slot>>,
    endpoints: usize,
    /// Where the next search begins, so that equally busy connections take turns.
    turn: AtomicUsize,
}

/// How likely a call has to wait for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Wait {
    /// It is open, or was never dialled.
    No,
    /// It broke, or is being dialled: the endpoint may be there.
    Perhaps,
    /// The last dial failed.
    Long,
}

/// What a call prefers, the least first: the endpoint's place in its order, how likely it waits for a connection, how often it
/// has tried the endpoint, whether that refuses calls or the connection may be silent, and its leases.
type Rank = (usize, Wait, usize, bool, usize);

/// Endpoints that a call has tried in vain: they are tried last, and the one that was tried last after the others.
#[derive(Debug, Default)]
pub(crate) struct Avoid {
    tried: Vec<Tried>,
    order: Order,
}

/// In which order a call tries endpoints, whether or not it has to wait for a connection.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// In none.
    #[default]
    Any,
    /// This one first, until that was in vain.
    First(usize),
    /// Those that it has not tried, then the one that it tried first.
    InTurn,
}

#[derive(Debug)]
struct Tried {
    /// Of the endpoint.
    number: usize,
    at: Instant,
    /// It asked not to be tried again before this has passed.
    hint: Duration,
}

impl Avoid {
    /// Moves a slot's endpoint behind the others.
    pub(crate) fn add(&mut self, slot: &Slot, hint: Option<Duration>) {
        let (number, at, hint) = (slot.number, Instant::now(), hint.unwrap_or_default());
        self.tried.retain(|tried| tried.number != number);
        self.tried.push(Tried { number, at, hint });
        if self.order == Order::First(number) {
            self.order = Order::InTurn;
        }
    }

    /// Moves a slot's endpoint before all others, until that is added, and then lets all take turns.
    pub(crate) fn begin_with(&mut self, slot: &Slot) {
        self.order = Order::First(slot.number);
    }

    /// 0: it has not been tried.
    fn place(&self, number: usize) -> usize {
        let position = self.tried.iter().position(|tried| tried.number == number);
        position.map_or(0, |position| position + 1)
    }
}

impl Pool {
    /// Whether nobody else on the network can read what is sent.
    pub(crate) fn check_private(&self) -> Result<(), Error> {
        self.slots
            .iter()
            .try_for_each(|slot| slot.endpoint.check_private())
    }

    /// This many connections to each endpoint; at least one of both.
    pub(crate) fn new(endpoints: &[Endpoint], connections: usize) -> Self {
        let place = |endpoint: &Endpoint| (Arc::new(endpoint.clone()), Arc::default(), Arc::default());
        let endpoints: Vec<_> = endpoints.iter().map(place).collect();
        // Alternates endpoints within each round, so that turns go around the endpoints.
        let slots = (0..connections)
            .flat_map(|_| endpoints.iter().enumerate())
            .map(|(number, (endpoint, reach, refuses_until))| {
                Arc::new(Slot {
                    endpoint: Arc::clone(endpoint),
                    number,
                    calls: Arc::default(),
                    is_open: AtomicBool::new(false),
                    reach: Arc::clone(reach),
                    refuses_until: Arc::clone(refuses_until),
                    state: Mutex::default(),
                })
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
        let (mut tried, mut broken, mut passes) = (0, 0, None);
        loop {
            let lease = self.lease(avoid);
            // The usual case: the connection is open and intact.
            if let Some((generation, mut sender)) = lease.slot.held() {
                match sender.send_request(head(&lease.slot.endpoint), false) {
                    Ok((response, body)) => return Ok((lease, response, body)),
                    // It is broken, or has used up its streams' numbers: h2 has nothing else to refuse (`call::metadata`).
                    Err(_) => lease.slot.forget(generation),
                }
                broken += 1;
                // Another one may be open.
                if broken <= self.slots.len() {
                    continue;
                }
            }
            // Boxed, so that the future of a call is not enlarged by connecting.
            let opened = Box::pin(lease.slot.sender()).await;
            let begun = opened.and_then(|mut sender| {
                let begun = sender.send_request(head(&lease.slot.endpoint), false);
                // It has ended since.
                begun.map_err(|error| Error::unreachable(error.to_string()))
            });
            let error = match begun {
                Ok((response, body)) => return Ok((lease, response, body)),
                Err(error) => error,
            };
            avoid.add(lease.slot, None);
            tried += 1;
            if tried >= self.endpoints {
                return Err(passes.unwrap_or(error));
            }
            if error.is_retryable() {
                passes = Some(error);
            }
        }
    }

    /// How long the endpoint that a call tries next asked it to wait.
    pub(crate) fn hint(&self, avoid: &Avoid) -> Duration {
        let next = self.slots.iter().min_by_key(|slot| slot.rank(avoid));
        let tried = next.and_then(|slot| avoid.tried.iter().find(|tried| tried.number == slot.number));
        tried.map_or(Duration::ZERO, |tried| {
            tried.hint.saturating_sub(tried.at.elapsed())
        })
    }

    /// The connection with the fewest leases; those of an unreachable endpoint come last, those to be avoided before them,
    /// and those that may be silent, or whose endpoint refuses calls, before these: it is always the least busy. Under
    /// contention it may only be close to the fewest: the counts are read without a lock.
    pub(crate) fn lease(&self, avoid: &Avoid) -> Lease<'_> {
        let count = self.slots.len();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut best = &self.slots[turn % count];
        let mut best_rank = best.rank(avoid);
        for step in 1..count {
            if best_rank == (0, Wait::No, 0, false, 0) {
                break;
            }
            let slot = &self.slots[turn.wrapping_add(step) % count];
            let slot_rank = slot.rank(avoid);
            if slot_rank < best_rank {
                (best, best_rank) = (slot, slot_rank);
            }
        }
        best.calls.begin();
        Lease { slot: best }
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reach(&self) -> MutexGuard<'_, Reach> {
        self.reach.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rank(self: &Arc<Self>, avoid: &Avoid) -> Rank {
        let place = avoid.place(self.number);
        let in_order = match avoid.order {
            Order::Any => 0,
            Order::First(first) => usize::from(first != self.number),
            Order::InTurn => place,
        };
        (
            in_order,
            self.wait(),
            place,
            self.refuses_until.holds() || self.calls.are_doubted(),
            self.calls.open(),
        )
    }

    /// Whether a call would have to wait for an endpoint that may not be there. It is dialled again if that is due, so that no
    /// call has to wait for that.
    fn wait(self: &Arc<Self>) -> Wait {
        if self.is_open.load(Ordering::Relaxed) {
            return Wait::No;
        }
        let (wait, is_due) = {
            let reach = self.reach();
            let wait = if reach.has_failed {
                Wait::Long
            } else {
                Wait::Perhaps
            };
            match reach.redial_at {
                Some(redial_at) => (wait, reach.opening == 0 && redial_at <= Instant::now()),
                None if reach.opening > 0 => (wait, false),
                None => (Wait::No, false),
            }
        };
        if is_due {
            let mut state = self.lock();
            if state.sender.is_none() && state.opening().is_none() {
                state.opening = Some(self.begin());
            }
        }
        wait
    }

    /// Whether both are connections to one endpoint.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        self.number == other.number
    }

    /// A call on the connection got no answer in time. The answer may be slow, or the connection dead: others are better
    /// until a ping is answered.
    pub(crate) fn late(&self) {
        self.calls.doubt();
    }

    /// The endpoint has refused a call, or broken the connection in one, with this hint of when to retry.
    pub(crate) fn refused(&self, hint: Option<Duration>) {
        let pause = hint.map_or(DOWN, |hint| hint.min(DOWN));
        self.refuses_until.set(Instant::now() + pause);
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
            self.is_open.store(false, Ordering::Relaxed);
            // The endpoint may be gone: no call waits for it if there is another.
            self.reach().redial_at.get_or_insert_with(Instant::now);
        }
    }

    /// The connection, opened if necessary. It is opened even if the caller leaves: with a deadline that is shorter than
    /// opening takes, there would never be a connection, and an endpoint that does not answer would never be skipped.
    async fn sender(self: &Arc<Self>) -> Opened {
        let outcome = {
            let mut state = self.lock();
            if let Some(sender) = &state.sender {
                return Ok(sender.clone());
            }
            let known = state.opening().map(|opening| opening.outcome.clone());
            known.unwrap_or_else(|| state.opening.insert(self.begin()).outcome.clone())
        };
        let gone = |_| Err(Error::unreachable("the task that connects is gone".to_owned()));
        outcome.await.unwrap_or_else(gone)
    }

    fn begin(self: &Arc<Self>) -> Opening {
        let (slot, (known, outcome)) = (Arc::clone(self), oneshot::channel());
        self.reach().opening += 1;
        let opening = EndOfOpening(Arc::clone(&self.reach));
        let task = tokio::spawn(async move {
            let opened = slot.open(opening).await;
            // The receivers are gone if all callers have left.
            let _ = known.send(opened);
        });
        Opening {
            task: task.abort_handle(),
            outcome: outcome.shared(),
        }
    }

    async fn open(&self, opening: EndOfOpening) -> Opened {
        let opened = self.endpoint.open(Arc::clone(&self.calls)).await;
        {
            let mut reach = self.reach();
            reach.has_failed = opened.is_err();
            reach.redial_at = reach.has_failed.then(|| Instant::now() + DOWN);
        }
        drop(opening);
        let mut state = self.lock();
        state.opening = None;
        if let Ok(sender) = &opened {
            state.generation += 1;
            state.sender = Some(sender.clone());
            self.is_open.store(true, Ordering::Relaxed);
        }
        opened
    }
}

/// Counts a connection that is being opened until this is dropped, also with its runtime.
struct EndOfOpening(Arc<Mutex<Reach>>);

impl Drop for EndOfOpening {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).opening -= 1;
    }
}

/// The use of one connection, for a call or for a stream's life.
#[derive(Debug)]
pub(crate) struct Lease<'a> {
    pub(crate) slot: &'a Arc<Slot>,
}

impl Lease<'_> {
    /// The same for a call that outlives its caller's borrow of the pool.
    pub(crate) fn hold(self) -> HeldLease {
        let slot = Arc::clone(self.slot);
        slot.calls.begin();
        HeldLease { slot }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.slot.calls.end();
    }
}

/// A lease that borrows nothing.
#[derive(Debug)]
pub(crate) struct HeldLease {
    pub(crate) slot: Arc<Slot>,
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.slot.calls.end();
    }
}

#[cfg(test)]
mod tests;
