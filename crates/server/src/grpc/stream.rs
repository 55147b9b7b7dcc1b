//! FetchStream: a response body that reads requests as there is room for them and answers them as they complete.
//!
//! No task of its own: hyper's polls drive it, so that a client that does not read its answers stops its own stream.
//! At most `requests_in_flight` requests are taken up, one that is done and not yet sent among them; beyond that the
//! request body is not polled, and HTTP/2's flow control holds the client back.
//! A bad request is answered and the stream goes on; bytes that are no request end it. A drain ends it, too, once
//! what was taken up is answered. Deliberately absent: order among answers.

use super::calls::{FetchCall, run};
use super::envelope::{Envelope, Run};
use super::frame::Deframer;
use super::service::{decode, trailers_ok};
use crate::caller::Connection;
use crate::fetch::{CallContext, FetchError, Fetcher};
use crate::status;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http_body::Frame;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request as OneOf;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// What one stream may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Requests taken up at a time; at least 1.
    pub(super) requests_in_flight: usize,
    /// Longest request message.
    pub(super) message_bytes: u32,
    /// When the whole call ends.
    pub(super) deadline: Option<Instant>,
}

/// Answers one request of a stream. Its own deadline counts from the call of this function.
pub(super) fn respond(
    fetcher: Fetcher,
    connection: Option<Arc<Connection>>,
    call_deadline: Option<Instant>,
    request: v1::FetchStreamRequest,
) -> impl Future<Output = Result<Envelope, Status>> + Send {
    let own = match request.deadline_ms {
        0 => None,
        after_ms => Instant::now().checked_add(Duration::from_millis(after_ms.into())),
    };
    let deadline = [own, call_deadline].into_iter().flatten().min();
    let context = CallContext {
        deadline,
        connection,
        fail_fast: false,
    };
    async move {
        let id = request.id;
        match &request.request {
            Some(OneOf::Blocks(call)) => answer(&fetcher, id, call, context).await,
            Some(OneOf::Vectors(call)) => answer(&fetcher, id, call, context).await,
            Some(OneOf::Ranges(call)) => answer(&fetcher, id, call, context).await,
            Some(OneOf::Objects(call)) => answer(&fetcher, id, call, context).await,
            None => failed(id, &nothing_asked()),
        }
    }
}

fn nothing_asked() -> FetchError {
    FetchError::Malformed {
        field: "request".to_owned(),
        problem: "set one of blocks, vectors, ranges and objects".to_owned(),
    }
}

async fn answer<C: FetchCall>(
    fetcher: &Fetcher,
    id: u64,
    call: &C,
    context: CallContext,
) -> Result<Envelope, Status> {
    match run(fetcher, call, context).await {
        Ok((answer, data)) => Envelope::nested(id, C::STREAM_TAG, &answer, data),
        Err(error) => failed(id, &error),
    }
}

/// The answer to a request that failed as a whole.
fn failed(id: u64, error: &FetchError) -> Result<Envelope, Status> {
    let answer = status::of_fetch(error);
    let retry_after_ms = answer
        .retry_after
        .map_or(0, |after| u32::try_from(after.as_millis()).unwrap_or(u32::MAX));
    let error = v1::RequestError {
        code: answer.grpc.into(),
        message: status::message_of(error),
        retry_after_ms,
    };
    let response = v1::fetch_stream_response::Response::Error(error);
    Envelope::plain(&v1::FetchStreamResponse {
        id,
        response: Some(response),
    })
}

/// The body. `start` begins a request, `draining` resolves when the daemon drains, `ended` hears the final code once.
pub(super) struct StreamBody<B, S, Fut, E>
where
    E: FnOnce(Code),
{
    /// The request body; `None` once it ended or is not to be read any more.
    incoming: Option<B>,
    deframer: Deframer,
    start: S,
    in_flight: FuturesUnordered<Fut>,
    requests_in_flight_max: usize,
    /// What is sent next, in this order: the head of an answer too large to be joined with others, and its data.
    next: [Option<Bytes>; 2],
    /// The end to report when everything taken up is answered.
    end: Result<(), Status>,
    trailers_sent: bool,
    deadline: Option<Pin<Box<tokio::time::Sleep>>>,
    draining: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    ended: Option<E>,
}

impl<B, S, Fut, E> StreamBody<B, S, Fut, E>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    S: Fn(v1::FetchStreamRequest) -> Fut,
    Fut: Future<Output = Result<Envelope, Status>>,
    E: FnOnce(Code),
{
    pub(super) fn new(
        incoming: B,
        bounds: Bounds,
        start: S,
        draining: impl Future<Output = ()> + Send + 'static,
        ended: E,
    ) -> Self {
        Self {
            incoming: Some(incoming),
            deframer: Deframer::new(bounds.message_bytes),
            start,
            in_flight: FuturesUnordered::new(),
            requests_in_flight_max: bounds.requests_in_flight.max(1),
            next: [None, None],
            end: Ok(()),
            trailers_sent: false,
            deadline: bounds
                .deadline
                .map(|deadline| Box::pin(tokio::time::sleep_until(deadline.into()))),
            draining: Some(Box::pin(draining)),
            ended: Some(ended),
        }
    }

    /// Takes up what has arrived, while there is room.
    fn take_up(&mut self, cx: &mut Context<'_>) -> Result<(), Status> {
        while self.in_flight.len() < self.requests_in_flight_max {
            let Some(incoming) = &mut self.incoming else {
                return Ok(());
            };
            if let Some(message) = self.deframer.next().map_err(|error| error.to_status())? {
                let request = decode::<v1::FetchStreamRequest>(message)?;
                self.in_flight.push((self.start)(request));
                continue;
            }
            match Pin::new(incoming).poll_frame(cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(piece) = frame.into_data() {
                        self.deframer.push(piece);
                    }
                }
                Poll::Ready(Some(Err(_))) => return Err(Status::cancelled("the client went away")),
                Poll::Ready(None) => {
                    self.incoming = None;
                    self.deframer.finish().map_err(|error| error.to_status())?;
                }
            }
        }
        Ok(())
    }

    /// Ends the stream at once: what is in flight is given up.
    fn cut(&mut self, status: Status) {
        self.incoming = None;
        self.in_flight.clear();
        self.end = Err(status);
    }

    /// What ends a stream from outside.
    fn poll_interruptions(&mut self, cx: &mut Context<'_>) {
        if self
            .deadline
            .as_mut()
            .is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready())
        {
            self.deadline = None;
            self.cut(Status::deadline_exceeded("the deadline of the stream passed"));
        }
        if self
            .draining
            .as_mut()
            .is_some_and(|draining| draining.as_mut().poll(cx).is_ready())
        {
            self.draining = None;
            // A client that had finished gets its answers and an OK; another learns to go elsewhere.
            if self.incoming.take().is_some() {
                self.end = Err(status::to_status(
                    &FetchError::Read(ringfetch_engine::error::ReadError::Draining),
                    "request",
                ));
            }
        }
    }

    fn finish(&mut self) -> Frame<Bytes> {
        self.trailers_sent = true;
        let end = std::mem::replace(&mut self.end, Ok(()));
        if let Some(ended) = self.ended.take() {
            ended(end.as_ref().map_or_else(Status::code, |()| Code::Ok));
        }
        let trailers = match end {
            Ok(()) => trailers_ok(),
            Err(status) => {
                let mut trailers = http::HeaderMap::new();
                // Only a message that is no header value could fail, and it is percent-encoded.
                if status.add_header(&mut trailers).is_err() {
                    trailers.insert(Status::GRPC_STATUS, http::HeaderValue::from(status.code() as i32));
                }
                trailers
            }
        };
        Frame::trailers(trailers)
    }
}

// Nothing in it is pinned in place: futures are boxed by `in_flight`, the request body is Unpin.
impl<B, S, Fut, E: FnOnce(Code)> Unpin for StreamBody<B, S, Fut, E> {}

impl<B, S, Fut, E> http_body::Body for StreamBody<B, S, Fut, E>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    S: Fn(v1::FetchStreamRequest) -> Fut,
    Fut: Future<Output = Result<Envelope, Status>>,
    E: FnOnce(Code),
{
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        // An answer whose head was sent must be sent whole, whatever has happened since.
        if let Some(bytes) = this.next.iter_mut().find_map(Option::take) {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        if this.trailers_sent {
            return Poll::Ready(None);
        }
        this.poll_interruptions(cx);
        let mut run = Run::default();
        loop {
            // Requests first: the disk should be busy while answers are written.
            if let Err(status) = this.take_up(cx) {
                this.cut(status);
            }
            match this.in_flight.poll_next_unpin(cx) {
                // Small answers that are there together go out together; a large one follows the run before it.
                Poll::Ready(Some(Ok(envelope))) => {
                    if let Err(Envelope { head, data }) = run.push(envelope) {
                        this.next = [Some(head), Some(data).filter(|data| !data.is_empty())];
                        break;
                    }
                }
                Poll::Ready(Some(Err(status))) => this.cut(status),
                Poll::Ready(None) if this.incoming.is_none() && run.is_empty() => {
                    return Poll::Ready(Some(Ok(this.finish())));
                }
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        if !run.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(run.into_bytes()))));
        }
        match this.next.iter_mut().find_map(Option::take) {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.trailers_sent && self.next.iter().all(Option::is_none)
    }
}

impl<B, S, Fut, E: FnOnce(Code)> Drop for StreamBody<B, S, Fut, E> {
    fn drop(&mut self) {
        // Dropped before its end: the client reset the stream or its connection.
        if let Some(ended) = self.ended.take() {
            ended(Code::Cancelled);
        }
    }
}

#[cfg(test)]
mod tests;
