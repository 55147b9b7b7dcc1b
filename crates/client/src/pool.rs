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

/// What a call prefers, the least first: how likely it waits for a connection, how often it has tried the endpoint, whether
/// that refuses calls or the connection may be silent, and its leases.
type Rank = (Wait, usize, bool, usize);

/// Endpoints that a call has tried in vain: they are tried last, and the one that was tried last after the others.
#[derive(Debug, Default)]
pub(crate) struct Avoid(Vec<Tried>);

#[derive(Debug)]
struct Tried {
    /// Of the endpoint.
    number: usize,
    at: Instant,
    /// It asked not to be tried again before this has passed.
    hint: Duration,
}

impl Avoid {
    /// Moves a lease's endpoint behind the others.
    pub(crate) fn add(&mut self, lease: &Lease<'_>, hint: Option<Duration>) {
        let (number, at, hint) = (lease.slot.number, Instant::now(), hint.unwrap_or_default());
        self.0.retain(|tried| tried.number != number);
        self.0.push(Tried { number, at, hint });
    }

    /// 0: it has not been tried.
    fn place(&self, number: usize) -> usize {
        let position = self.0.iter().position(|tried| tried.number == number);
        position.map_or(0, |position| position + 1)
    }
}

impl Pool {
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
        let (mut tried, mut broken) = (0, 0);
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
            avoid.add(&lease, None);
            tried += 1;
            if tried >= self.endpoints {
                return Err(error);
            }
        }
    }

    /// How long the endpoint that a call tries next asked it to wait.
    pub(crate) fn hint(&self, avoid: &Avoid) -> Duration {
        let next = self.slots.iter().min_by_key(|slot| slot.rank(avoid));
        let tried = next.and_then(|slot| avoid.0.iter().find(|tried| tried.number == slot.number));
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
            if best_rank == (Wait::No, 0, false, 0) {
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
        (
            self.wait(),
            avoid.place(self.number),
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
            self.calls.heard();
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

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.slot.calls.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Dial;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::task::JoinSet;

    fn pool(endpoints: u16, connections: usize) -> Pool {
        let endpoint =
            |port| Endpoint::new(&format!("http://127.0.0.1:{port}"), Dial::Tcp, &mut None, DOWN).unwrap();
        Pool::new(&(1..=endpoints).map(endpoint).collect::<Vec<_>>(), connections)
    }

    /// To be avoided: these endpoints.
    fn tried(numbers: &[usize]) -> Avoid {
        let (at, hint) = (Instant::now(), Duration::ZERO);
        Avoid(numbers.iter().map(|&number| Tried { number, at, hint }).collect())
    }

    fn counts(pool: &Pool) -> Vec<usize> {
        pool.slots.iter().map(|slot| slot.calls.open()).collect()
    }

    #[test]
    fn the_least_busy_connection_is_taken() {
        // Scenario: three connections, six leases, then the two of one connection are dropped and two more taken.
        // Expected: two leases on each connection, and both new ones on the one that became free.
        let pool = pool(1, 3);
        let mut leases: Vec<Lease<'_>> = (0..6).map(|_| pool.lease(&Avoid::default())).collect();
        assert_eq!(counts(&pool), [2, 2, 2]);
        leases.retain(|lease| !Arc::ptr_eq(lease.slot, &pool.slots[1]));
        assert_eq!(counts(&pool), [2, 0, 2]);
        leases.push(pool.lease(&Avoid::default()));
        leases.push(pool.lease(&Avoid::default()));
        assert_eq!(counts(&pool), [2, 2, 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_is_avoided_or_down_comes_last() {
        // Scenario: two endpoints of two connections each; the first is to be avoided; then the second is down, and then it is
        // not; then both are to be avoided, the first one less. Expected: the second, however busy; the first; both evenly; the
        // first.
        let pool = pool(2, 2);
        let first = pool.slots.iter().position(|slot| slot.number == 0).unwrap();
        let avoid = tried(&[0]);
        let leases: Vec<Lease<'_>> = (0..6).map(|_| pool.lease(&avoid)).collect();
        assert!(leases.iter().all(|lease| lease.slot.number == 1));
        drop(leases);
        let second = pool.slots.iter().find(|slot| slot.number == 1).unwrap();
        second.reach().redial_at = Some(Instant::now() + DOWN);
        second.reach().has_failed = true;
        let leases: Vec<Lease<'_>> = (0..4).map(|_| pool.lease(&Avoid::default())).collect();
        assert!(leases.iter().all(|lease| lease.slot.number == 0) && counts(&pool)[first] == 2);
        drop(leases);
        second.reach().redial_at = None;
        for (avoid, expected) in [(Avoid::default(), [1, 1, 1, 1]), (tried(&[0, 1]), [2, 0, 2, 0])] {
            let leases: Vec<Lease<'_>> = (0..4).map(|_| pool.lease(&avoid)).collect();
            assert_eq!(counts(&pool), expected);
            drop(leases);
        }
    }

    #[test]
    fn a_retry_goes_elsewhere_than_the_attempt_before() {
        // Scenario: two endpoints that fail every attempt of a call; the first at once, so that it is never busy, and the
        // second has other calls. Expected: attempts alternate.
        let pool = pool(2, 1);
        let _busy: Vec<Lease<'_>> = (0..3).map(|_| pool.lease(&tried(&[0]))).collect();
        let mut avoid = Avoid::default();
        let mut attempt = || {
            let lease = pool.lease(&avoid);
            avoid.add(&lease, None);
            lease.slot.number
        };
        assert_eq!(std::array::from_fn(|_| attempt()), [0, 1, 0, 1, 0, 1]);
    }

    const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

    /// Endpoints with this many connections each: those that are `None` never answer, the others count their dials and refuse or
    /// accept them.
    fn pool_of(endpoints: &[Option<bool>], connections: usize) -> (Pool, Vec<Arc<AtomicUsize>>) {
        let (mut made, mut dials) = (Vec::new(), Vec::new());
        for accepts in endpoints.iter().copied() {
            let count = Arc::new(AtomicUsize::new(0));
            dials.push(Arc::clone(&count));
            let dial = Dial::with(move || {
                count.fetch_add(1, Ordering::Relaxed);
                async move {
                    match accepts {
                        None => std::future::pending().await,
                        Some(false) => Err(std::io::ErrorKind::ConnectionRefused.into()),
                        Some(true) => {
                            let (near, far) = tokio::io::duplex(1 << 16);
                            tokio::spawn(async move {
                                let mut server = h2::server::handshake(far).await.unwrap();
                                while server.accept().await.is_some() {}
                            });
                            Ok(near)
                        }
                    }
                }
            });
            made.push(Endpoint::new("http://h:1", dial, &mut None, CONNECT_TIMEOUT).unwrap());
        }
        (Pool::new(&made, connections), dials)
    }

    fn head(_: &Endpoint) -> Request<()> {
        Request::post("http://h:1/x").body(()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_refuses_calls_is_better_than_one_that_is_gone() {
        // Scenario: the first endpoint is busy, and has just refused a call; the second one is gone. Expected: the call
        // goes to the first again, and the second is not dialled more than once in a second.
        let (pool, dials) = pool_of(&[Some(true), Some(false)], 1);
        let _busy = pool.call(&mut Avoid::default(), head).await.unwrap();
        for _ in 0..3 {
            let call = pool.call(&mut tried(&[0]), head).await;
            assert_eq!(call.unwrap().0.slot.number, 0);
        }
        assert_eq!(dials[1].load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_takes_no_stream_keeps_no_call_from_the_others() {
        // Scenario: an endpoint whose connections begin with GOAWAY, as those of a server that drains, next to a good one.
        // Expected: each call gets to the good one.
        let drains = Dial::with(|| async {
            let (near, mut far) = tokio::io::duplex(1 << 16);
            let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
            let goaway = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            far.write_all(&[&settings[..], &goaway].concat()).await?;
            tokio::spawn(async move { far.read_to_end(&mut Vec::new()).await });
            Ok(near)
        });
        let (good, _) = pool_of(&[Some(true)], 1);
        let drains = Endpoint::new("http://h:1", drains, &mut None, CONNECT_TIMEOUT).unwrap();
        let good = Endpoint::clone(&good.slots[0].endpoint);
        let pool = Pool::new(&[drains, good], 1);
        for _ in 0..4 {
            let call = pool.call(&mut Avoid::default(), head).await;
            assert_eq!(call.unwrap().0.slot.number, 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_never_answers_keeps_no_call_from_the_others() {
        // Scenario: an endpoint that takes no connection and refuses none, next to a good one, with three connections to each;
        // calls that wait for less than a connection may take, for as long as three dials. Expected: at most one of them goes
        // to it; it is dialled again after each pause.
        let (pool, dials) = pool_of(&[None, Some(true)], 3);
        let enough = Duration::from_millis(100);
        let (mut held, mut kept) = (0, Vec::new());
        let begin = Instant::now();
        while begin.elapsed() < 3 * (CONNECT_TIMEOUT + DOWN) {
            let mut avoid = Avoid::default();
            match tokio::time::timeout(enough, pool.call(&mut avoid, head)).await {
                Ok(call) => kept.push(call.unwrap()),
                Err(_) => held += 1,
            }
            tokio::time::advance(enough).await;
        }
        assert!(kept.iter().all(|(lease, ..)| lease.slot.number == 1));
        assert!(held <= 1, "{held}");
        let dials = dials[0].load(Ordering::Relaxed);
        assert!((3..=4).contains(&dials), "{dials}");
    }

    /// An endpoint that takes so many connections and then neither takes nor refuses any; ends those that it has.
    fn breakable(most: usize) -> (Endpoint, Arc<Mutex<JoinSet<()>>>) {
        let (dials, servers) = (AtomicUsize::new(0), Arc::new(Mutex::new(JoinSet::new())));
        let running = Arc::clone(&servers);
        let dial = Dial::with(move || {
            let running = Arc::clone(&running);
            let is_lost = dials.fetch_add(1, Ordering::Relaxed) >= most;
            async move {
                if is_lost {
                    std::future::pending::<()>().await;
                }
                let (near, far) = tokio::io::duplex(1 << 16);
                running.lock().unwrap().spawn(async move {
                    let mut server = h2::server::handshake(far).await.unwrap();
                    while server.accept().await.is_some() {}
                });
                Ok(near)
            }
        });
        let endpoint = Endpoint::new("http://h:1", dial, &mut None, CONNECT_TIMEOUT).unwrap();
        (endpoint, servers)
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_whose_connection_ends_is_better_than_one_that_cannot_be_reached() {
        // Scenario: an endpoint that takes no connection and refuses none, next to one whose connection ends, as each does within
        // hours, and that takes another one. Expected: no call waits for the first.
        let (good, servers) = breakable(usize::MAX);
        let (gone, _) = pool_of(&[None], 1);
        let gone = Endpoint::clone(&gone.slots[0].endpoint);
        let pool = Pool::new(&[gone, good], 1);
        let enough = Duration::from_millis(100);
        for dialled in [CONNECT_TIMEOUT, DOWN] {
            pool.connect().await.unwrap();
            tokio::time::sleep(dialled).await;
            servers.lock().unwrap().abort_all();
            tokio::task::yield_now().await;
            let mut kept = Vec::new();
            for _ in 0..20 {
                let mut avoid = Avoid::default();
                let call = tokio::time::timeout(enough, pool.call(&mut avoid, head)).await;
                kept.push(call.expect("it waits").unwrap());
            }
            assert!(kept.iter().all(|(lease, ..)| lease.slot.number == 1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_is_lost_keeps_no_call_from_the_others() {
        // Scenario: an endpoint whose three connections break, and that takes no other and refuses none, next to a good one.
        // Expected: no call waits for it.
        let (lost, servers) = breakable(3);
        let (good, _) = pool_of(&[Some(true)], 1);
        let good = Endpoint::clone(&good.slots[0].endpoint);
        let pool = Pool::new(&[lost, good], 3);
        pool.connect().await.unwrap();
        servers.lock().unwrap().abort_all();
        let enough = Duration::from_millis(100);
        tokio::time::sleep(enough).await;
        for _ in 0..200 {
            let mut avoid = Avoid::default();
            let call = tokio::time::timeout(enough, pool.call(&mut avoid, head)).await;
            assert_eq!(call.expect("it waits").unwrap().0.slot.number, 1);
            tokio::time::advance(enough).await;
        }
    }
}
