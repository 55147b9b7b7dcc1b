//! Requests pipelined on one FetchStream call. Invariant: every request that was sent is in `pending` until
//! it is answered or the stream ends, which fails all of them. A request stays there even if its caller has
//! been dropped, so that the server's work stays bounded.

use crate::call::{CallOptions, accept, end, release};
use crate::connection::{Endpoint, Method};
use crate::core::Core;
use crate::error::Error;
use crate::items::{Blocks, Items};
use crate::message::{Data, Incoming, StreamRequest};
use crate::pool::Avoid;
use crate::request::{Answer, ByteRange, ObjectPart, Request, RequestKind, other_kind};
use crate::retry::{Deadlines, Retries};
use crate::scores::{ScoreRequest, Scores};
use crate::vectors::Vectors;
use bytes::Bytes;
use h2::SendStream;
use ringfetch_proto::v1 as wire;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use wire::fetch_stream_request::Request as WireRequest;
use wire::fetch_stream_response::Response as WireAnswer;

static FETCH_STREAM: Method = Method::new("/ringfetch.v1.FetchService/FetchStream");

/// One gRPC stream with many requests in flight; clones share it. Answers arrive in any order, each for its
/// own request. At most the builder's `max_in_flight` requests are in flight; further ones wait. When the
/// last clone is dropped, the stream ends after the requests in flight have been answered.
///
/// Requests are retried as calls are. A stream that broke stays broken: every request that was in flight and every
/// later one gets [`Error::StreamBroken`]; open another with [`crate::Client::stream`].
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
        self.shared.lock().send_side.end();
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when the limit was reached and a request has ended.
    room: Notify,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    pending: HashMap<u64, Waiting, BuildHasherDefault<OwnNumber>>,
    send_side: SendSide,
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

/// The sending side. Requests held back, here or in h2, never exceed the limit in flight.
#[derive(Debug)]
enum SendSide {
    /// Not connected yet: the requests to send, and whether those are all.
    Opening {
        waiting: Vec<Bytes>,
        ended: bool,
    },
    Open(SendStream<Bytes>),
}

impl Default for SendSide {
    fn default() -> Self {
        Self::Opening {
            waiting: Vec::new(),
            ended: false,
        }
    }
}

impl SendSide {
    /// A stream that takes no message has ended: its reader finds out why, and fails the request with that.
    fn send(&mut self, message: Bytes) {
        match self {
            Self::Opening { waiting, .. } => waiting.push(message),
            Self::Open(stream) => drop(stream.send_data(message, false)),
        }
    }

    fn end(&mut self) {
        match self {
            Self::Opening { ended, .. } => *ended = true,
            // A stream that has already ended needs no end.
            Self::Open(stream) => drop(stream.send_data(Bytes::new(), true)),
        }
    }

    fn open(&mut self, stream: SendStream<Bytes>) {
        let opening = std::mem::replace(self, Self::Open(stream));
        if let Self::Opening { waiting, ended } = opening {
            waiting.into_iter().for_each(|message| self.send(message));
            if ended {
                self.end();
            }
        }
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
    /// Nothing is sent before the first poll. If dropped later, the answer is discarded when it arrives, and
    /// until then the request counts as in flight.
    pub async fn send(&self, request: Request) -> Result<Answer, Error> {
        let (request, expected) = request.into_wire(self.0.options.fail_fast)?;
        let kind = RequestKind::of(&request);
        let encoded = StreamRequest::encode(&request)?;
        // Freed now, while it is in the CPU's cache, rather than when the answer arrives.
        drop(request);
        let check = |answer, data| {
            let answer = Answer::from_wire(&expected, answer, data)?;
            answer.fits(kind).then_some(answer).ok_or_else(other_kind)
        };
        self.retried(encoded, check).await
    }

    /// Sends a request, with retries, until `check` accepts its answer.
    async fn retried<T>(
        &self,
        mut request: StreamRequest,
        check: impl Fn(WireAnswer, Data) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut retries = Retries::new(&self.0.core, self.0.options.timeout());
        loop {
            let (sent, deadlines) = (retries.keep(&mut request), retries.deadlines());
            let attempt = pin!(async {
                let answer = self.attempt(sent, deadlines).await?;
                match answer.message.response {
                    Some(response) => check(response, answer.data),
                    None => Err(Error::protocol("an answer without content")),
                }
            });
            if let Some(answer) = retries.attempt(attempt).await? {
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
        let request = request.into_wire(self.0.options.fail_fast);
        let candidates: Vec<usize> = request.queries.iter().map(|query| query.ids.len()).collect();
        let limit = request.limit;
        let check = |answer, _data| match answer {
            WireAnswer::Scores(answer) => Scores::check(&candidates, limit, answer),
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

    /// Whether the stream has ended and must be replaced.
    pub fn is_broken(&self) -> bool {
        self.0.shared.lock().broken.is_some()
    }

    /// Sends the request and waits for its answer.
    async fn attempt(
        &self,
        request: StreamRequest,
        (deadline, late): Deadlines,
    ) -> Result<Box<StreamAnswer>, Error> {
        let (answer, answered) = oneshot::channel();
        let mut attempt = QueuedRequest {
            answer,
            request,
            late,
            has_waited: false,
        };
        while let Some(full) = self.try_send(attempt)? {
            attempt = full;
            (attempt.late, attempt.has_waited) = (deadline, true);
            self.0.shared.room.notified().await;
        }
        // A sender is dropped without an answer only if the runtime that reads the stream is gone.
        answered
            .await
            .unwrap_or_else(|_| Err(Error::protocol("the task that reads the stream is gone")))
    }

    /// Sends the request, or returns it if too many are in flight. An id is either pending and sent, or
    /// neither.
    fn try_send(&self, queued: QueuedRequest) -> Result<Option<QueuedRequest>, Error> {
        let (shared, max_in_flight) = (&self.0.shared, self.0.core.max_in_flight);
        let mut state = shared.lock();
        if state.pending.len() >= max_in_flight && state.broken.is_none() {
            return Ok(Some(queued));
        }
        let QueuedRequest {
            answer,
            request,
            late,
            has_waited,
        } = queued;
        let left = late.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let deadline_ms = left.or(self.0.options.timeout()).map_or(0, millis);
        let sent = state.send(answer, request, deadline_ms);
        let more = state.pending.len() < max_in_flight || state.broken.is_some();
        drop(state);
        // Each woken request wakes the next: of two simultaneous answers only one notifies if no request
        // waits yet.
        if has_waited && more {
            shared.room.notify_one();
        }
        sent.map(|()| None)
    }
}

/// A request that waits for room.
struct QueuedRequest {
    answer: Waiting,
    request: StreamRequest,
    /// Its deadline, if part of its time has passed.
    late: Option<Instant>,
    has_waited: bool,
}

/// Whole milliseconds, at least 1, since 0 means no deadline.
fn millis(left: Duration) -> u32 {
    u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1)
}

impl State {
    fn send(&mut self, waiting: Waiting, request: StreamRequest, deadline_ms: u32) -> Result<(), Error> {
        if let Some(cause) = &self.broken {
            return Err(Error::StreamBroken {
                cause: Arc::clone(cause),
            });
        }
        let id = self.next_id;
        let framed = request.frame(id, deadline_ms)?;
        self.next_id += 1;
        self.pending.insert(id, waiting);
        self.send_side.send(framed);
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers an answer to its request.
    fn answer(&self, answer: Box<StreamAnswer>, max_in_flight: usize) -> Result<(), Error> {
        let id = answer.message.id;
        // Checked before the request is removed, so that the request fails with the stream.
        if answer.message.response.is_none() {
            return Err(Error::protocol("an answer without content"));
        }
        let mut state = self.lock();
        let was_full = state.pending.len() >= max_in_flight;
        let Some(waiting) = state.pending.remove(&id) else {
            return Err(Error::protocol(format!(
                "an answer to request {id}, which is not in flight"
            )));
        };
        drop(state);
        // The receiver is gone if the caller left.
        let _ = waiting.send(Ok(answer));
        // If there was room, the only waiting requests are those that an earlier woken request will wake.
        if was_full {
            self.room.notify_one();
        }
        Ok(())
    }

    /// Ends the stream: all current and later requests get the cause. The first cause is kept.
    fn fail(&self, cause: Error) {
        let mut state = self.lock();
        let cause = Arc::clone(state.broken.get_or_insert_with(|| Arc::new(cause)));
        let pending = std::mem::take(&mut state.pending);
        drop(state);
        // Each one wakes the next.
        self.room.notify_one();
        for (_, waiting) in pending {
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
    let failure = match serve(&core, &options, &shared.0).await {
        Ok(()) => Error::Transport {
            message: "the server ended the stream".to_owned(),
            sent: true,
        },
        Err(error) => error,
    };
    shared.0.fail(failure);
}

async fn serve(core: &Core, options: &CallOptions, shared: &Shared) -> Result<(), Error> {
    let head = |endpoint: &Endpoint| options.stream(endpoint.uri(&FETCH_STREAM));
    let (_lease, response, stream) = core.pool.call(&mut Avoid::default(), head).await?;
    shared.lock().send_side.open(stream);
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
