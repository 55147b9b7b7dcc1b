//! FetchStream: a response body that starts requests while there is room and sends responses as they
//! complete, in any order.
//!
//! It has no task of its own: hyper's polls drive it, so a client that does not read its responses stops its
//! own stream. At most `requests_in_flight` requests are in flight, counting those completed but not given to
//! HTTP/2, whose send buffer holds up to 128 KiB more of them; beyond that the request body is not polled, and
//! HTTP/2 flow control stops the client. One more message is read, so that a cancel is seen while the stream
//! is full.
//!
//! An invalid request gets an error response and the stream continues, as does one that there is no memory for once it has
//! arrived. Bytes that are not a request end it, and so do an incomplete request without memory, a drain and the age of its
//! connection, once the requests in flight are answered. The deadline holds even if the body is not polled, as when the client
//! does not read: the requests in flight are then cancelled, so that they hold no memory.

mod in_flight;
mod request;

pub(super) use request::{StreamRequest, respond};

use super::deadline_body::{DeadlineBody, LongResponse};
use super::encode::{EncodedMessage, FrameBuffer};
use super::frame::FrameDecoder;
use crate::error_status;
use crate::fetch::{FetchError, RequestMemory};
use crate::listener::FrameParts;
use crate::rpc_metrics::CallTimer;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use in_flight::InFlightRequest;
use request::{MessageHeader, check_cancel};
use ringfetch_engine::error::ReadError;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;
use tonic::Status;

/// Cancels handled by one poll. Each scans the requests in flight.
const CANCELS_AT_ONCE: usize = 64;

/// What is left to read of the body in one poll.
struct BodyTurn {
    /// Cancels that may still be handled.
    cancels: usize,
    /// It has no more now, and wakes the task: asking again takes a lock of the connection.
    is_pending: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct StreamLimits {
    /// Requests in flight; at least 1.
    pub(super) requests_in_flight: usize,
    /// Longest request message.
    pub(super) message_bytes: u32,
    /// When the whole call ends.
    pub(super) deadline: Option<Instant>,
}

/// The body. `start` starts a request, `hold` charges the bytes of an incomplete one, `late` counts one that the deadline
/// cancels, `interrupted` resolves when the stream has to end, with its status. Must be called inside a runtime.
pub(super) fn body<B, S, Fut>(
    incoming: B,
    bounds: StreamLimits,
    start: S,
    hold: ChargeMemory,
    late: CountLate,
    interrupted: impl Future<Output = Status> + Send + 'static,
    timer: CallTimer,
) -> DeadlineBody<impl LongResponse>
where
    B: http_body::Body<Data = Bytes> + Unpin + Send + 'static,
    S: Fn(StreamRequest) -> Result<Fut, Status> + Send + 'static,
    Fut: Future<Output = Result<EncodedMessage, Status>> + Send + 'static,
{
    let stream = StreamState {
        incoming: Some(incoming),
        decoder: FrameDecoder::new(bounds.message_bytes),
        start,
        in_flight: FuturesUnordered::new(),
        requests_in_flight_max: bounds.requests_in_flight.max(1),
        waiting: None,
        next: None,
        end: None,
        hold,
        late,
        arrived: Instant::now(),
        interrupted: Some(Box::pin(interrupted)),
    };
    DeadlineBody::new(stream, bounds.deadline, timer)
}

/// Charges the bytes of an incomplete request.
type ChargeMemory = Box<dyn FnMut(usize) -> Result<(), FetchError> + Send>;
/// Counts a request that the stream's deadline cancels.
type CountLate = Box<dyn Fn() + Send>;

struct StreamState<B, S, Fut> {
    /// The request body; `None` once it has ended or is no longer read.
    incoming: Option<B>,
    decoder: FrameDecoder,
    start: S,
    in_flight: FuturesUnordered<InFlightRequest<Fut>>,
    requests_in_flight_max: usize,
    /// A request that was read while the stream is full, to see whether it is a cancel.
    waiting: Option<StreamRequest>,
    /// Sent next: a response that did not fit in the last frame.
    next: Option<EncodedMessage>,
    /// The status to report when all requests in flight are answered; `None`: OK.
    end: Option<Status>,
    hold: ChargeMemory,
    late: CountLate,
    /// When the last bytes arrived.
    arrived: Instant,
    interrupted: Option<Pin<Box<dyn Future<Output = Status> + Send>>>,
}

impl<B, S, Fut> StreamState<B, S, Fut>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    S: Fn(StreamRequest) -> Result<Fut, Status>,
    Fut: Future<Output = Result<EncodedMessage, Status>>,
{
    /// Starts requests that have arrived while there is room, and reads one more.
    fn take_up(&mut self, cx: &mut Context<'_>, turn: &mut BodyTurn) -> Result<(), Status> {
        loop {
            if self.in_flight.len() < self.requests_in_flight_max
                && let Some(message) = self.waiting.take()
            {
                if !RequestMemory::is_free(message.bytes.len()) {
                    // It is charged anew once it starts. Less is never refused.
                    let _less = (self.hold)(self.decoder.held());
                }
                let id = message.header.id;
                let work = (self.start)(message)?;
                self.in_flight.push(InFlightRequest::new(id, work));
                continue;
            }
            let Some(incoming) = &mut self.incoming else {
                break;
            };
            if self.waiting.is_some() {
                break;
            }
            if turn.cancels == 0 {
                // Yields to other tasks first.
                cx.waker().wake_by_ref();
                break;
            }
            if let Some(bytes) = self.decoder.next().map_err(|error| error.to_status())? {
                let header = MessageHeader::of(&bytes)?;
                if header.is_cancel {
                    check_cancel(&bytes)?;
                    turn.cancels -= 1;
                    let in_flight = Pin::new(&mut self.in_flight);
                    in_flight
                        .iter_pin_mut()
                        .for_each(|request| request.cancel(header.id));
                } else {
                    self.waiting = Some(StreamRequest {
                        header,
                        bytes,
                        arrived: self.arrived,
                        refused: None,
                    });
                }
                continue;
            }
            if turn.is_pending {
                break;
            }
            match Pin::new(incoming).poll_frame(cx) {
                Poll::Pending => {
                    turn.is_pending = true;
                    break;
                }
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(piece) = frame.into_data() {
                        self.arrived = Instant::now();
                        self.decoder.push(piece);
                    }
                }
                Poll::Ready(Some(Err(_))) => {
                    self.cut(Status::cancelled("the client went away"));
                    break;
                }
                Poll::Ready(None) => {
                    self.incoming = None;
                    self.decoder.finish().map_err(|error| error.to_status())?;
                }
            }
        }
        self.charge_unstarted(turn)
    }

    /// Charges what has arrived and is not started. A complete request for which there is no memory is answered in its
    /// turn; only an incomplete one ends the stream.
    fn charge_unstarted(&mut self, turn: &BodyTurn) -> Result<(), Status> {
        let decoding = self.decoder.held();
        match &mut self.waiting {
            Some(StreamRequest { refused: Some(_), .. }) => {}
            Some(StreamRequest { bytes, refused, .. }) => {
                let waiting = if RequestMemory::is_free(bytes.len()) {
                    0
                } else {
                    bytes.len()
                };
                *refused = (self.hold)(decoding + waiting).err().map(Box::new);
            }
            // What is left may be complete.
            None if turn.cancels == 0 => {}
            None => {
                (self.hold)(decoding).map_err(|error| error_status::to_status(&error, "request"))?;
            }
        }
        Ok(())
    }

    /// Ends the stream once the requests in flight are answered.
    fn stop_reading(&mut self, status: Status) {
        self.incoming = None;
        self.decoder = FrameDecoder::new(0);
        self.waiting = None;
        // Nothing is never refused. The next poll may be long in coming.
        let _nothing = (self.hold)(0);
        self.end = Some(status);
    }

    /// Ends the stream at once and cancels the requests in flight.
    fn cut(&mut self, status: Status) {
        self.stop_reading(status);
        self.in_flight.clear();
    }

    /// Checks whether it has to end.
    fn poll_interruptions(&mut self, cx: &mut Context<'_>) {
        if let Some(interrupted) = &mut self.interrupted
            && let Poll::Ready(status) = interrupted.as_mut().poll(cx)
        {
            self.interrupted = None;
            // A client that has sent all its requests gets OK after its responses; others get the status.
            if self.incoming.is_some() {
                self.stop_reading(status);
            }
        }
    }
}

impl<B, S, Fut> LongResponse for StreamState<B, S, Fut>
where
    B: http_body::Body<Data = Bytes> + Unpin + Send + 'static,
    S: Fn(StreamRequest) -> Result<Fut, Status> + Send + 'static,
    Fut: Future<Output = Result<EncodedMessage, Status>> + Send + 'static,
{
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<FrameParts, Status>>> {
        self.poll_interruptions(cx);
        let mut frame = FrameBuffer::default();
        if let Some(next) = self.next.take() {
            // Anything fits into an empty frame.
            let _always_ok = frame.push(next);
        }
        let mut turn = BodyTurn {
            cancels: CANCELS_AT_ONCE,
            is_pending: false,
        };
        loop {
            // Requests first, so that the disk is busy while responses are encoded.
            if let Err(status) = self.take_up(cx, &mut turn) {
                self.stop_reading(status);
            }
            match self.in_flight.poll_next_unpin(cx) {
                // Small responses that are ready together share a frame; the first one that does not fit
                // follows.
                Poll::Ready(Some(Ok(encoded))) => {
                    if let Err(next) = frame.push(encoded) {
                        self.next = Some(next);
                        break;
                    }
                }
                Poll::Ready(Some(Err(status))) => self.cut(status),
                Poll::Ready(None) if self.incoming.is_none() && frame.is_empty() => {
                    return Poll::Ready(self.end.take().map(Err));
                }
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        if frame.is_empty() {
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(frame.into_frame())))
    }

    fn give_up(&mut self) -> Status {
        let open = Pin::new(&self.in_flight).iter_pin_ref();
        for _ in open.filter(|request| request.is_open()) {
            (self.late)();
        }
        let late = error_status::to_status(&ReadError::DeadlineExceeded.into(), "request");
        self.cut(late.clone());
        self.next = None;
        late
    }
}

#[cfg(test)]
mod tests;
