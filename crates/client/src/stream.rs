//! Requests pipelined on one FetchStream call. A request waits in `queued` until it may be in flight and HTTP/2 has room for
//! it, and gets its deadline then; whatever makes room sends it, not its caller, who may not be polled. A caller that leaves
//! takes it along. Invariant: every request that was sent is in `pending` until it is answered or the stream ends, which
//! fails all of them. A request stays there even if its caller has been dropped, so that the server's work stays bounded;
//! but it is cancelled.

use crate::call::{CallOptions, accept, end, release};
use crate::connection::{Endpoint, Method};
use crate::core::Core;
use crate::error::Error;
use crate::items::{Blocks, Items};
use crate::message::{Data, Incoming, StreamRequest};
use crate::pool::{Avoid, Slot};
use crate::request::{Answer, ByteRange, ObjectPart, Request, other_kind};
use crate::retry::{Retries, Turn, by};
use crate::scores::{ScoreRequest, Scores};
use crate::vectors::Vectors;
use bytes::Bytes;
use h2::SendStream;
use h2::client::ResponseFuture;
use ringfetch_proto::v1 as wire;
use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use wire::fetch_stream_request::Request as WireRequest;
use wire::fetch_stream_response::Response as WireAnswer;

static FETCH_STREAM: Method = Method::new("/ringfetch.v1.FetchService/FetchStream");

/// How long a stream that was dropped may take to end. Nobody waits for an answer on it.
const END_WITHIN: Duration = Duration::from_secs(10);

/// One gRPC stream with many requests in flight; clones share it. Answers arrive in any order, each for its
/// own request. At most the builder's `max_in_flight` requests are in flight; further ones wait. When the
/// last clone is dropped, the stream ends after the requests in flight have been answered; a program that ends then waits for
/// it with [`FetchStream::finish`], or its server takes the stream for one that was cancelled.
///
/// Requests are retried as calls are, but on this stream: where there are several servers, at the one that refused them. A
/// stream that broke stays broken: every request that was in flight and every later one gets [`Error::StreamBroken`]; open
/// another with [`crate::Client::stream`]. That happens to every stream in the end: a server ends those on a connection of an
/// hour (`timeouts.connection_age_ms`), and when it drains, with UNAVAILABLE, after it has answered what it has taken up.
#[derive(Debug, Clone)]
pub struct FetchStream(Arc<Sending>);

/// State shared by the clones of a stream; the stream ends with it.
#[derive(Debug)]
struct Sending {
    shared: Arc<Shared>,
    core: Arc<Core>,
    options: CallOptions,
}

impl Drop for Sending {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.has_ended = true;
        state.end();
        drop(state);
        self.shared.is_dropped.notify_one();
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when no request follows.
    is_dropped: Notify,
    /// Notified when there is a cancel to send, and when HTTP/2 has no room for a request.
    is_blocked: Notify,
    /// Notified when the stream has ended.
    is_broken: Notify,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    /// Requests that wait to be sent, in order of their ids.
    queued: BTreeMap<u64, QueuedRequest>,
    pending: HashMap<u64, Waiting, BuildHasherDefault<OwnNumber>>,
    /// `None`: not connected yet.
    send_side: Option<SendStream<Bytes>>,
    /// That of its connection, likewise.
    slot: Option<Arc<Slot>>,
    /// Messages that cancel requests: sent together, since servers count small frames that wait as an attack.
    cancels: Vec<u8>,
    /// No request follows.
    has_ended: bool,
    /// Why the stream ended, if it has.
    broken: Option<Arc<Error>>,
}

/// An answer as received. It stays where it was decoded until its request takes it.
#[derive(Debug, Default)]
struct StreamAnswer {
    message: wire::FetchStreamResponse,
    data: Data,
}

/// Where a request waits for its answer.
type Waiting = oneshot::Sender<Result<Box<StreamAnswer>, Error>>;

/// A hash for numbers that this side counts up: no peer can make them collide.
#[derive(Debug, Default)]
struct OwnNumber(u64);

impl Hasher for OwnNumber {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, number: u64) {
        // Fibonacci hashing: 2^64 by the golden ratio spreads consecutive numbers over all bits.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl FetchStream {
    pub(crate) fn open(core: &Arc<Core>, options: &CallOptions) -> Self {
        let shared = Arc::new(Shared::default());
        tokio::spawn(read(Arc::clone(core), options.clone(), Arc::clone(&shared)));
        Self(Arc::new(Sending {
            shared,
            core: Arc::clone(core),
            options: options.clone(),
        }))
    }

    /// Sends a request and returns its answer.
    ///
    /// # Errors
    /// As [`crate::Client::fetch`]; [`Error::StreamBroken`] if the stream ended before the answer.
    ///
    /// # Cancel safety
    /// Nothing is sent before the first poll. If dropped later, a request that still waits is not sent, and one that was
    /// sent is cancelled: it counts as in flight until the server has answered that.
    pub async fn send(&self, request: Request) -> Result<Answer, Error> {
        let (request, wanted) = request.into_wire(self.0.options.fail_fast)?;
        let encoded = StreamRequest::encode(&request)?;
        // Freed now, while it is in the CPU's cache, rather than when the answer arrives.
        drop(request);
        self.retried(encoded, |answer, data| Answer::from_wire(&wanted, answer, data))
            .await
    }

    /// Sends a request, with retries, until `check` accepts its answer.
    async fn retried<T>(
        &self,
        mut request: StreamRequest,
        check: impl Fn(WireAnswer, Data) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut retries = Retries::new(&self.0.core.retries, self.0.options.timeout());
        loop {
            let sent = retries.keep(&mut request);
            let answer = self.attempt(sent, retries.turn()).await;
            let outcome = answer.and_then(|answer| match answer.message.response {
                Some(response) => check(response, answer.data),
                None => Err(Error::protocol("an answer without content")),
            });
            let hint = outcome.as_ref().err().and_then(Error::retry_after);
            if outcome.as_ref().is_err_and(|error| error.is_retryable()) {
                self.0.shared.refused(hint);
            }
            if let Some(answer) = retries.settle(outcome, hint.unwrap_or_default()).await? {
                return Ok(answer);
            }
        }
    }

    /// As [`crate::Client::score_vectors`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn score_vectors(&self, request: ScoreRequest) -> Result<Scores, Error> {
        let (request, wanted) = request.into_wire(self.0.options.fail_fast);
        let check = |answer, _data| match answer {
            WireAnswer::Scores(answer) => Scores::check(&wanted, answer),
            WireAnswer::Status(status) => Err(Error::from_rpc_status(status)),
            WireAnswer::Blocks(_)
            | WireAnswer::Vectors(_)
            | WireAnswer::Ranges(_)
            | WireAnswer::Objects(_) => Err(other_kind()),
        };
        let encoded = StreamRequest::encode(&WireRequest::Scores(request))?;
        self.retried(encoded, check).await
    }

    /// As [`crate::Client::fetch_blocks`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn fetch_blocks(&self, dataset: &str, indices: &[u64]) -> Result<Blocks, Error> {
        self.send(Request::blocks(dataset, indices)).await?.into_blocks()
    }

    /// As [`crate::Client::fetch_vectors`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn fetch_vectors(&self, dataset: &str, ids: &[u64]) -> Result<Vectors, Error> {
        self.send(Request::vectors(dataset, ids)).await?.into_vectors()
    }

    /// As [`crate::Client::fetch_ranges`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn fetch_ranges(&self, dataset: &str, ranges: &[ByteRange]) -> Result<Items, Error> {
        self.send(Request::ranges(dataset, ranges)).await?.into_items()
    }

    /// As [`crate::Client::fetch_objects`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn fetch_objects(&self, dataset: &str, parts: &[ObjectPart]) -> Result<Items, Error> {
        self.send(Request::objects(dataset, parts)).await?.into_items()
    }

    /// Drops this clone and waits until the stream has ended: all others are dropped, and the server has answered what it took
    /// up and ended its side, or has failed, or has had 10 s since the last clone was dropped.
    ///
    /// # Cancel safety
    /// If dropped, the stream ends by itself.
    pub async fn finish(self) {
        let shared = Arc::clone(&self.0.shared);
        let mut ended = pin!(shared.is_broken.notified());
        ended.as_mut().enable();
        drop(self);
        if shared.lock().broken.is_none() {
            ended.await;
        }
    }

    /// Whether the stream has ended and must be replaced.
    pub fn is_broken(&self) -> bool {
        self.0.shared.lock().broken.is_some()
    }

    /// Sends the request and waits for its answer.
    async fn attempt(&self, request: StreamRequest, turn: Turn) -> Result<Box<StreamAnswer>, Error> {
        let (answer, answered) = oneshot::channel();
        let queued = QueuedRequest {
            answer,
            request,
            deadline: turn.deadline,
        };
        let id = self.submit(queued, turn.late)?;
        let mut cancel = CancelOnDrop {
            shared: &self.0.shared,
            id: Some(id),
        };
        let Some(answer) = by(turn.deadline, answered).await else {
            let state = self.0.shared.lock();
            if state.send_side.is_none() {
                let first = Error::unreachable("no connection within the request's timeout".to_owned());
                return Err(turn.unsent(first));
            }
            if !state.pending.contains_key(&id) {
                return Err(turn.unsent(Error::DeadlineExceeded));
            }
            state.slot.iter().for_each(|slot| slot.late());
            return Err(Error::DeadlineExceeded);
        };
        cancel.id = None;
        // A sender is dropped without an answer only if the runtime that reads the stream is gone.
        answer.unwrap_or_else(|_| Err(Error::protocol("the task that reads the stream is gone")))
    }

    /// Sends the request, or queues it if too many are in flight or HTTP/2 has no room for it.
    fn submit(&self, queued: QueuedRequest, late: Option<Instant>) -> Result<u64, Error> {
        let shared = &self.0.shared;
        let mut state = shared.lock();
        if let Some(cause) = &state.broken {
            return Err(Error::StreamBroken {
                cause: Arc::clone(cause),
            });
        }
        let id = state.next_id;
        state.next_id += 1;
        let may_send = state.pending.len() < self.0.core.max_in_flight;
        if may_send && state.queued.is_empty() && state.has_room() {
            state.send(id, queued, late.map(left).or(self.0.options.timeout()));
            return Ok(id);
        }
        state.queued.insert(id, queued);
        drop(state);
        if may_send {
            shared.is_blocked.notify_one();
        }
        Ok(id)
    }
}

/// A request that waits to be sent.
#[derive(Debug)]
struct QueuedRequest {
    answer: Waiting,
    request: StreamRequest,
    deadline: Option<Instant>,
}

/// Withdraws a request whose caller leaves, or cancels it if it was sent.
struct CancelOnDrop<'a> {
    shared: &'a Shared,
    /// `None`: it is answered.
    id: Option<u64>,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id else {
            return;
        };
        let mut state = self.shared.lock();
        let withdrawn = state.queued.remove(&id);
        if withdrawn.is_none() {
            state.cancel(id);
        }
        drop(state);
        if withdrawn.is_none() {
            self.shared.is_blocked.notify_one();
        }
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Whole milliseconds, at least 1, since 0 means no deadline.
fn millis(left: Duration) -> u32 {
    u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1)
}

impl State {
    /// Whether HTTP/2 takes a request now, rather than keep it until the server has read those before it.
    fn has_room(&mut self) -> bool {
        self.send_side.as_mut().is_some_and(|stream| {
            // The rest of a request that does not fit follows by itself.
            stream.reserve_capacity(1);
            stream.capacity() > 0
        })
    }

    /// Ready once HTTP/2 has room; `false`: it never has.
    fn poll_room(&mut self, context: &mut Context<'_>) -> Poll<bool> {
        if self.has_room() {
            return Poll::Ready(true);
        }
        match &mut self.send_side {
            Some(stream) => stream.poll_capacity(context).map(|room| room.is_some()),
            None => Poll::Ready(false),
        }
    }

    fn send(&mut self, id: u64, queued: QueuedRequest, left: Option<Duration>) {
        match queued.request.frame(id, left.map_or(0, millis)) {
            Ok(framed) => {
                self.pending.insert(id, queued.answer);
                self.send_now(framed, false);
            }
            Err(error) => drop(queued.answer.send(Err(error))),
        }
    }

    /// Sends what is queued, in order, as long as it may be in flight and HTTP/2 has room. Returns whether HTTP/2 has none
    /// for the next.
    fn send_queued(&mut self, max_in_flight: usize) -> bool {
        while self.pending.len() < max_in_flight && !self.queued.is_empty() {
            if !self.has_room() {
                return true;
            }
            if let Some((id, queued)) = self.queued.pop_first() {
                let left = queued.deadline.map(left);
                self.send(id, queued, left);
            }
        }
        false
    }

    /// Cancels a request, unless it is answered.
    fn cancel(&mut self, id: u64) {
        if self.pending.contains_key(&id)
            && let Ok(cancel) = StreamRequest::encode(&WireRequest::Cancel(wire::Cancel {}))
            && let Ok(framed) = cancel.frame(id, 0)
        {
            self.cancels.extend_from_slice(&framed);
        }
    }

    fn send_cancels(&mut self) {
        if !self.cancels.is_empty() {
            let cancels = std::mem::take(&mut self.cancels);
            self.send_now(cancels.into(), false);
        }
    }

    fn end(&mut self) {
        self.send_cancels();
        self.send_now(Bytes::new(), true);
    }

    /// A stream that takes no message has ended: its reader finds out why, and fails the requests with that.
    fn send_now(&mut self, message: Bytes, is_end: bool) {
        if let Some(stream) = &mut self.send_side {
            drop(stream.send_data(message, is_end));
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to send.
    fn open(&self, stream: SendStream<Bytes>, slot: &Arc<Slot>, max_in_flight: usize) {
        let mut state = self.lock();
        state.slot = Some(Arc::clone(slot));
        state.send_side = Some(stream);
        let is_blocked = state.send_queued(max_in_flight);
        if state.has_ended {
            state.end();
        }
        drop(state);
        if is_blocked {
            self.is_blocked.notify_one();
        }
    }

    /// The server has refused a request: new calls and streams go to others.
    fn refused(&self, hint: Option<Duration>) {
        let state = self.lock();
        if state.broken.is_none() {
            state.slot.iter().for_each(|slot| slot.refused(hint));
        }
    }

    /// Sends cancels and what is queued as soon as HTTP/2 has room, until the stream takes no more.
    async fn use_room(&self, max_in_flight: usize) {
        loop {
            self.is_blocked.notified().await;
            let mut is_blocked = true;
            while is_blocked {
                if !poll_fn(|context| self.lock().poll_room(context)).await {
                    return;
                }
                let mut state = self.lock();
                state.send_cancels();
                is_blocked = state.send_queued(max_in_flight);
            }
        }
    }

    /// Delivers an answer to its request.
    fn answer(&self, answer: Box<StreamAnswer>, max_in_flight: usize) -> Result<(), Error> {
        let id = answer.message.id;
        // Checked before the request is removed, so that the request fails with the stream.
        if answer.message.response.is_none() {
            return Err(Error::protocol("an answer without content"));
        }
        let mut state = self.lock();
        let Some(waiting) = state.pending.remove(&id) else {
            return Err(Error::protocol(format!(
                "an answer to request {id}, which is not in flight"
            )));
        };
        let is_blocked = state.send_queued(max_in_flight);
        drop(state);
        // The receiver is gone if the caller left.
        let _ = waiting.send(Ok(answer));
        if is_blocked {
            self.is_blocked.notify_one();
        }
        Ok(())
    }

    /// Ends the stream: all current and later requests get the cause. The first cause is kept.
    fn fail(&self, cause: Error) {
        let mut state = self.lock();
        let cause = Arc::clone(state.broken.get_or_insert_with(|| Arc::new(cause)));
        let (pending, queued) = (
            std::mem::take(&mut state.pending),
            std::mem::take(&mut state.queued),
        );
        drop(state);
        self.is_broken.notify_waiters();
        let queued = queued.into_values().map(|queued| queued.answer);
        for waiting in pending.into_values().chain(queued) {
            let _ = waiting.send(Err(Error::StreamBroken {
                cause: Arc::clone(&cause),
            }));
        }
    }
}

/// Fails the stream however its reader ends, so that no request waits forever.
struct FailOnDrop(Arc<Shared>);

impl Drop for FailOnDrop {
    fn drop(&mut self) {
        self.0.fail(Error::protocol("the stream's reader was stopped"));
    }
}

/// Opens the call and reads answers until it ends.
async fn read(core: Arc<Core>, options: CallOptions, shared: Arc<Shared>) {
    let shared = FailOnDrop(shared);
    let failure = serve(&core, &options, &shared.0).await;
    shared.0.fail(failure);
}

/// Returns why the stream ended.
async fn serve(core: &Core, options: &CallOptions, shared: &Shared) -> Error {
    let head = |endpoint: &Endpoint| options.stream(endpoint.uri(&FETCH_STREAM));
    let (lease, response, stream) = match core.pool.call(&mut Avoid::default(), head).await {
        Ok(begun) => begun,
        Err(error) => return error,
    };
    shared.open(stream, lease.slot, core.max_in_flight);
    let mut answers = pin!(read_answers(core, response, shared));
    let reading = async {
        tokio::select! {
            biased;
            ended = &mut answers => ended,
            () = shared.use_room(core.max_in_flight) => answers.await,
        }
    };
    let overdue = async {
        shared.is_dropped.notified().await;
        tokio::time::sleep(END_WITHIN).await;
    };
    let ended = tokio::select! {
        biased;
        ended = reading => ended,
        // Otherwise it would stay open for as long as its connection. Dropping what reads it cancels it.
        () = overdue => Err(Error::protocol("the server does not end the stream")),
    };
    let is_due = ended.is_ok() && shared.lock().has_ended;
    let failure = ended.err().unwrap_or_else(|| Error::Transport {
        message: "the server ended the stream".to_owned(),
        sent: true,
        refused: false,
    });
    // Otherwise it would be the least busy for the next stream.
    if failure.is_retryable() && !is_due {
        lease.slot.refused(failure.retry_after());
    }
    failure
}

async fn read_answers(core: &Core, response: ResponseFuture, shared: &Shared) -> Result<(), Error> {
    let mut body = accept(response.await?)?;
    let mut incoming = Incoming::new(core.max_answer_bytes);
    while let Some(chunk) = body.data().await {
        incoming.push(release(&mut body, chunk?)?);
        while let Some(encoded) = incoming.next()? {
            let mut answer = Box::<StreamAnswer>::default();
            answer.data = encoded.decode_into(&mut answer.message)?;
            shared.answer(answer, core.max_in_flight)?;
        }
    }
    end(&mut body).await?.map_or(Ok(()), Err)
}
