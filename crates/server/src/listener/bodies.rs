//! Bodies that record their progress: requests as they are received, responses as they are sent.

use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::Sleep;

use super::frame_parts::FrameParts;

use super::progress::Exchange;
use crate::record::within;
use crate::rpc_metrics::collect;

/// A request's body from the socket.
#[derive(Debug)]
pub struct RequestBody {
    /// `None` only while it is dropped.
    body: Option<Incoming>,
    exchange: Arc<Exchange>,
    /// The client sends it without being asked to, so that it can be read to its end after the response is known.
    comes_unasked: bool,
    /// Over HTTP/2, once it has waited: [`Exchange::arrival_waker`].
    arrival: Option<Waker>,
}

impl RequestBody {
    /// The body of a request with this head. `may_end`: not that of a call, whose streams last as long as they like.
    pub(super) fn new(body: Incoming, head: &HeaderMap, exchange: Arc<Exchange>, may_end: bool) -> Self {
        let comes_unasked = may_end && !body.is_end_stream() && !head.contains_key(header::EXPECT);
        Self {
            body: Some(body),
            exchange,
            comes_unasked,
            arrival: None,
        }
    }

    /// Resolves when the connection leaves and the response, whose body polls this, should end.
    pub fn leaving(&self) -> impl Future<Output = ()> + Send + use<> {
        let exchange = Arc::clone(&self.exchange);
        std::future::poll_fn(move |cx| exchange.poll_leaving(cx))
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let Some(body) = self.body.take()
            && self.comes_unasked
            && !body.is_end_stream()
        {
            self.exchange.leave_unread(body);
        } else {
            self.exchange.mark_read();
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        if this.arrival.is_some() {
            this.exchange.wake_on_arrival(cx);
        }
        let mut polled = {
            let waker = this.arrival.as_ref().unwrap_or_else(|| cx.waker());
            Pin::new(&mut *body).poll_frame(&mut Context::from_waker(waker))
        };
        if polled.is_pending() && this.arrival.is_none() && this.exchange.is_http2() {
            this.exchange.wake_on_arrival(cx);
            let waker = this.arrival.insert(this.exchange.arrival_waker());
            polled = Pin::new(&mut *body).poll_frame(&mut Context::from_waker(waker));
        }
        match &polled {
            Poll::Pending => this.exchange.await_body(cx),
            Poll::Ready(Some(Ok(frame))) => {
                this.exchange.received(frame.data_ref().map_or(0, Bytes::len));
                if body.is_end_stream() {
                    this.exchange.mark_read();
                    this.exchange.mark_whole();
                }
            }
            Poll::Ready(None) => {
                this.exchange.mark_read();
                this.exchange.mark_whole();
            }
            // hyper reports the end of the body next, which is none: the request is not whole, and the connection
            // closes.
            Poll::Ready(Some(Err(error))) => {
                this.comes_unasked = false;
                if !is_malformed(error) {
                    this.exchange.mark_broken_off();
                }
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(SizeHint::default, Incoming::size_hint)
    }
}

/// Whether a body is not framed as its head says. Other errors mean that the client left.
fn is_malformed(error: &hyper::Error) -> bool {
    let cause: Option<&io::Error> = error.source().and_then(<dyn Error>::downcast_ref);
    cause.is_some_and(|cause| {
        matches!(
            cause.kind(),
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData
        )
    })
}

/// Most bytes of an unread body that are read to keep its connection, and the longest wait for them: clients may
/// send it separately from the head.
const UNREAD_BYTES_MAX: u64 = 64 << 10;
const UNREAD_WAIT_MAX: Duration = Duration::from_secs(2);

/// The same over HTTP/2, where it is for the response: the default of `limits.request_bytes`.
const UNREAD_HTTP2_BYTES_MAX: u64 = 4 << 20;

/// A response that waits for the end of its request's body, which nothing else reads. Otherwise hyper closes an
/// HTTP/1.1 connection after the response, and resets an HTTP/2 stream, which makes common clients lose the
/// response (curl 7.88, the JDK's, httpx) although RFC 9113 (8.1) forbids that.
#[derive(Debug)]
struct UnreadRequest<B> {
    response: Response<B>,
    body: Incoming,
    bytes_left: u64,
    wait: Pin<Box<Sleep>>,
}

impl<B> UnreadRequest<B> {
    fn new(response: Response<B>, body: Incoming, is_http2: bool) -> Self {
        Self {
            response,
            body,
            bytes_left: if is_http2 {
                UNREAD_HTTP2_BYTES_MAX
            } else {
                UNREAD_BYTES_MAX
            },
            wait: Box::pin(tokio::time::sleep(UNREAD_WAIT_MAX)),
        }
    }

    /// Ready once the body is at its end, which marks the request as whole, or is not worth waiting for.
    fn poll_end(&mut self, cx: &mut Context<'_>, exchange: &Exchange) -> Poll<()> {
        while self.body.size_hint().lower() <= self.bytes_left {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return self.wait.as_mut().poll(cx),
                Poll::Ready(Some(Ok(frame))) => {
                    let bytes = frame.data_ref().map_or(0, Bytes::len);
                    exchange.received(bytes);
                    // The length of a chunked body is not known beforehand.
                    let Some(left) = self.bytes_left.checked_sub(bytes as u64) else {
                        break;
                    };
                    self.bytes_left = left;
                }
                Poll::Ready(Some(Err(_))) => break,
                Poll::Ready(None) => {
                    exchange.mark_whole();
                    break;
                }
            }
        }
        Poll::Ready(())
    }
}

/// A request's body did not arrive in time, so there is no response: hyper resets the stream (HTTP/2) or the
/// connection (HTTP/1).
#[derive(Debug, thiserror::Error)]
#[error("the request's body did not arrive in time")]
pub(super) struct BodyStalled;

/// A response future that fails when the request's body stalls.
pub(super) struct ResponseOrStall<F, B> {
    answer: F,
    exchange: Arc<Exchange>,
    /// Only the response's head is sent.
    is_head: bool,
    is_polled: bool,
    /// The response, once it is known.
    unread: Option<UnreadRequest<B>>,
}

impl<F, B> ResponseOrStall<F, B> {
    /// The response to a request with this method.
    pub(super) fn new(answer: F, exchange: Arc<Exchange>, is_head: bool) -> Self {
        Self {
            answer,
            exchange,
            is_head,
            is_polled: false,
            unread: None,
        }
    }
}

impl<F, B> Future for ResponseOrStall<F, B>
where
    F: Future<Output = Result<Response<B>, Infallible>> + Unpin,
    B: Body + Default + Unpin,
{
    type Output = Result<Response<ResponseBody<B>>, BodyStalled>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if this.exchange.is_stalled() {
            return Poll::Ready(Err(BodyStalled));
        }
        if !std::mem::replace(&mut this.is_polled, true) {
            this.exchange.begin_serving();
        }
        if this.unread.is_none() {
            let record = this.exchange.record();
            let (polled, observed) = collect(|| within(record, || Pin::new(&mut this.answer).poll(cx)));
            this.exchange.observed(observed);
            let Ok(mut response) = ready!(polled);
            if let Some(record) = record {
                record.answered(response.status(), response.headers_mut());
            }
            match this.exchange.take_unread() {
                None => return Poll::Ready(Ok(this.sent(response))),
                Some(body) => {
                    this.unread = Some(UnreadRequest::new(response, body, this.exchange.is_http2()));
                }
            }
        }
        let Some(mut unread) = this.unread.take() else {
            return Poll::Pending;
        };
        if unread.poll_end(cx, &this.exchange).is_pending() {
            this.unread = Some(unread);
            return Poll::Pending;
        }
        this.exchange.mark_read();
        Poll::Ready(Ok(this.sent(unread.response)))
    }
}

impl<F, B: Body + Default> ResponseOrStall<F, B> {
    /// The response as hyper is to send it.
    fn sent(&self, mut response: Response<B>) -> Response<ResponseBody<B>> {
        if self.exchange.closes_connection() {
            response
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.is_head {
            // hyper leaves the body out over HTTP/1 alone, and axum for its routes alone, whose length it has set.
            let body = std::mem::take(response.body_mut());
            if let Some(length) = body.size_hint().exact().filter(|length| *length > 0) {
                let length = HeaderValue::from(length);
                response
                    .headers_mut()
                    .entry(header::CONTENT_LENGTH)
                    .or_insert(length);
            }
        }
        if matches!(
            response.status(),
            StatusCode::NOT_MODIFIED | StatusCode::NO_CONTENT
        ) {
            // axum's, of the body that is left out: 0, where the representation of a 304 has another length, and a 204 may
            // have none (RFC 9110 8.6). hyper removes it over HTTP/1 alone, from a 204.
            response.headers_mut().remove(header::CONTENT_LENGTH);
        }
        self.exchange.mark_answered();
        if response.status() == StatusCode::NOT_MODIFIED || is_at_end(response.body()) {
            self.exchange.mark_ended();
        }
        let exchange = Arc::clone(&self.exchange);
        response.map(|body| ResponseBody { body, exchange })
    }
}

/// Whether hyper asks for no more of a body: also if the announced length is reached.
fn is_at_end(body: &impl Body) -> bool {
    body.is_end_stream() || body.size_hint().exact() == Some(0)
}

/// The body of a response before its progress is recorded.
pub enum AnswerBody {
    /// At most one frame, then trailers if there are any.
    Whole {
        /// The payload of the frame.
        data: Option<FrameParts>,
        /// Makes the trailers.
        trailers: Option<fn() -> HeaderMap>,
    },
    /// Any number of frames.
    Framed(Pin<Box<dyn Body<Data = FrameParts, Error = Infallible> + Send>>),
    /// From the router.
    Routed(axum::body::Body),
}

impl Default for AnswerBody {
    fn default() -> Self {
        Self::Whole {
            data: None,
            trailers: None,
        }
    }
}

impl AnswerBody {
    /// These bytes, in one frame if there are any.
    pub(crate) fn whole(bytes: Bytes) -> Self {
        Self::Whole {
            data: (!bytes.is_empty()).then(|| bytes.into()),
            trailers: None,
        }
    }
}

impl From<axum::body::Body> for AnswerBody {
    fn from(body: axum::body::Body) -> Self {
        Self::Routed(body)
    }
}

impl From<AnswerBody> for axum::body::Body {
    fn from(body: AnswerBody) -> Self {
        match body {
            AnswerBody::Routed(body) => body,
            // Its length is known, unlike that of mapped frames.
            AnswerBody::Whole { data, trailers: None } => data.map_or_else(Self::empty, |mut data| {
                Self::from(data.copy_to_bytes(data.remaining()))
            }),
            body @ (AnswerBody::Whole { .. } | AnswerBody::Framed(_)) => Self::new(body.map_frame(|frame| {
                frame.map_data(|mut parts: FrameParts| parts.copy_to_bytes(parts.remaining()))
            })),
        }
    }
}

impl Body for AnswerBody {
    type Data = FrameParts;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<FrameParts>, axum::Error>>> {
        Poll::Ready(match self.get_mut() {
            Self::Whole { data, trailers } => match data.take() {
                Some(data) => Some(Ok(Frame::data(data))),
                None => trailers.take().map(|trailers| Ok(Frame::trailers(trailers()))),
            },
            Self::Framed(body) => {
                let frame = ready!(body.as_mut().poll_frame(cx));
                frame.map(|frame| frame.map_err(|never| match never {}))
            }
            Self::Routed(body) => {
                let frame = ready!(Pin::new(body).poll_frame(cx));
                frame.map(|frame| frame.map(|frame| frame.map_data(FrameParts::from)))
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole { data, trailers } => data.is_none() && trailers.is_none(),
            Self::Framed(body) => body.is_end_stream(),
            Self::Routed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole { data, trailers: None } => {
                SizeHint::with_exact(data.as_ref().map_or(0, |data| data.remaining() as u64))
            }
            Self::Whole { .. } => SizeHint::default(),
            Self::Framed(body) => body.size_hint(),
            Self::Routed(body) => body.size_hint(),
        }
    }
}

/// A response's body.
#[derive(Debug)]
pub(super) struct ResponseBody<B> {
    body: B,
    exchange: Arc<Exchange>,
}

impl<B: Body<Data = FrameParts> + Unpin> Body for ResponseBody<B> {
    type Data = TrackedBytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<TrackedBytes>, B::Error>>> {
        let this = self.get_mut();
        let exchange = &this.exchange;
        let body = Pin::new(&mut this.body);
        let (polled, observed) = collect(|| within(exchange.record(), || body.poll_frame(cx)));
        exchange.observed(observed);
        let frame = ready!(polled);
        let is_end = match &frame {
            None => true,
            Some(Ok(frame)) => frame.is_trailers() || is_at_end(&this.body),
            Some(Err(_)) => false,
        };
        if is_end {
            exchange.mark_ended();
        }
        Poll::Ready(
            frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| TrackedBytes::new(bytes, exchange)))),
        )
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Bytes of a response until they are sent. HTTP/2 holds them while the client's window is closed.
#[derive(Debug)]
pub(super) struct TrackedBytes {
    bytes: FrameParts,
    exchange: Arc<Exchange>,
}

impl TrackedBytes {
    fn new(bytes: FrameParts, exchange: &Arc<Exchange>) -> Self {
        exchange.produced(bytes.remaining());
        Self {
            bytes,
            exchange: Arc::clone(exchange),
        }
    }
}

impl Buf for TrackedBytes {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        self.bytes.chunks_vectored(slices)
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        self.exchange.sent(count);
    }

    fn copy_to_bytes(&mut self, count: usize) -> Bytes {
        let copied = self.bytes.copy_to_bytes(count);
        self.exchange.sent(count);
        copied
    }
}

impl Drop for TrackedBytes {
    fn drop(&mut self) {
        if self.bytes.has_remaining() {
            self.exchange.dropped(self.bytes.remaining());
        }
    }
}
