//! Streams with a request body, and requests that the test completes by hand; no datasets.

mod memory;

use super::super::service::decode;
use super::request::failed;
use super::*;
use crate::rpc_metrics::{GrpcMethod, RpcMetrics};
use bytes::Buf as _;
use futures_util::FutureExt as _;
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use prost::Message as _;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request as OneOf;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Code;

type Pieces = mpsc::UnboundedSender<Result<Bytes, ()>>;

/// Requests that were started and are not answered, by id.
#[derive(Clone, Default)]
struct Begun(Arc<Mutex<BTreeMap<u64, oneshot::Sender<EncodedMessage>>>>);

impl Begun {
    fn ids(&self) -> Vec<u64> {
        self.0.lock().unwrap().keys().copied().collect()
    }

    /// Answers a request with `data`.
    fn answer(&self, id: u64, data: &'static [u8]) {
        let sender = self.0.lock().unwrap().remove(&id).unwrap();
        let message = v1::FetchRangesResponse::default();
        sender
            .send(EncodedMessage::nested(id, 4, &message, Bytes::from_static(data)).unwrap())
            .unwrap();
    }
}

/// Metrics and the timer of a call.
fn timed() -> (RpcMetrics, CallTimer) {
    let rpc = RpcMetrics::new(&prometheus::Registry::new()).unwrap();
    let timer = CallTimer::new(rpc.clone(), GrpcMethod::FetchStream, Instant::now());
    (rpc, timer)
}

/// The codes of the calls that have ended.
fn counted(rpc: &RpcMetrics) -> Vec<Code> {
    let codes = (0..=16).map(Code::from_i32);
    codes
        .flat_map(|code| std::iter::repeat_n(code, rpc.counted(GrpcMethod::FetchStream, code)))
        .collect()
}

struct Stream<B> {
    body: B,
    pieces: Option<Pieces>,
    begun: Begun,
    draining: watch::Sender<bool>,
    /// Requests that were counted as cancelled by the deadline.
    late: Arc<AtomicUsize>,
    rpc: RpcMetrics,
    /// Received frames, cut into messages: several responses may share a frame.
    received: FrameDecoder,
}

/// A stream with at most two requests in flight.
fn stream(
    deadline: Option<Instant>,
) -> Stream<impl http_body::Body<Data = FrameParts, Error = Infallible> + Unpin> {
    stream_that_charges(deadline, Box::new(|_bytes| Ok(())))
}

fn stream_that_charges(
    deadline: Option<Instant>,
    hold: ChargeMemory,
) -> Stream<impl http_body::Body<Data = FrameParts, Error = Infallible> + Unpin> {
    stream_of(2, deadline, hold)
}

fn stream_of(
    requests_in_flight: usize,
    deadline: Option<Instant>,
    hold: ChargeMemory,
) -> Stream<impl http_body::Body<Data = FrameParts, Error = Infallible> + Unpin> {
    let (pieces, received) = mpsc::unbounded_channel::<Result<Bytes, ()>>();
    let received = futures_util::stream::unfold(received, |mut received| async move {
        let piece = received.recv().await?;
        Some((piece.map(Frame::data), received))
    });
    let incoming = http_body_util::StreamBody::new(Box::pin(received));
    let begun = Begun::default();
    let start = {
        let begun = begun.clone();
        move |message: StreamRequest| {
            let request = decode::<v1::FetchStreamRequest>(&message.bytes)?;
            let (sender, receiver) = oneshot::channel();
            match message.refused {
                Some(refused) => sender
                    .send(failed(request.id, &refused, "request").unwrap())
                    .unwrap(),
                None => _ = begun.0.lock().unwrap().insert(request.id, sender),
            }
            Ok(async move { receiver.await.map_err(|_| Status::internal("given up")) })
        }
    };
    let (draining, mut drains) = watch::channel(false);
    let (rpc, timer) = timed();
    let late: Arc<AtomicUsize> = Arc::default();
    let counting = Arc::clone(&late);
    let body = body(
        incoming,
        StreamLimits {
            requests_in_flight,
            message_bytes: 2000,
            deadline,
        },
        start,
        hold,
        Box::new(move || _ = counting.fetch_add(1, Ordering::Relaxed)),
        async move {
            let _sender_is_gone = drains.wait_for(|drains| *drains).await;
            error_status::to_status(&ReadError::Draining.into(), "request")
        },
        timer,
    );
    Stream {
        body,
        pieces: Some(pieces),
        begun,
        draining,
        late,
        rpc,
        received: FrameDecoder::new(1 << 20),
    }
}

impl<B: http_body::Body<Data = FrameParts, Error = Infallible> + Unpin> Stream<B> {
    fn send(&self, bytes: impl Into<Bytes>) {
        self.pieces.as_ref().unwrap().send(Ok(bytes.into())).unwrap();
    }

    fn request(&self, id: u64) {
        let message = v1::FetchStreamRequest {
            id,
            request: None,
            deadline_ms: 0,
        };
        self.send(EncodedMessage::plain(&message).unwrap().head);
    }

    fn cancel(&self, id: u64) {
        self.send(EncodedMessage::plain(&cancel(id)).unwrap().head);
    }

    /// The next frame, if the body has one now.
    fn poll(&mut self) -> Option<Frame<FrameParts>> {
        self.body
            .frame()
            .now_or_never()
            .map(|frame| frame.unwrap().unwrap())
    }

    /// The id and data of the next response, in however many frames it comes.
    fn answer(&mut self) -> (u64, Bytes) {
        let response = self.response();
        match response.response {
            Some(v1::fetch_stream_response::Response::Ranges(ranges)) => (response.id, ranges.data),
            other => panic!("not an answer to ranges: {other:?}"),
        }
    }

    /// The id of the next response and the error code of its request.
    fn refusal(&mut self) -> (u64, Code) {
        let response = self.response();
        match response.response {
            Some(v1::fetch_stream_response::Response::Status(status)) => (response.id, status.code.into()),
            other => panic!("not a refusal: {other:?}"),
        }
    }

    fn response(&mut self) -> v1::FetchStreamResponse {
        loop {
            if let Some(message) = self
                .received
                .next()
                .unwrap_or_else(|_| panic!("not a gRPC frame"))
            {
                return v1::FetchStreamResponse::decode(message).unwrap();
            }
            let mut frame = self.poll().unwrap().into_data().unwrap();
            self.received.push(frame.copy_to_bytes(frame.remaining()));
        }
    }

    /// The status that the stream ends with, which must be available now.
    fn end(&mut self) -> Status {
        let trailers = self.poll().unwrap().into_trailers().unwrap();
        assert!(self.body.is_end_stream());
        Status::from_header_map(&trailers).unwrap()
    }
}

fn cancel(id: u64) -> v1::FetchStreamRequest {
    v1::FetchStreamRequest {
        id,
        request: Some(OneOf::Cancel(v1::Cancel {})),
        deadline_ms: 0,
    }
}

#[tokio::test]
async fn a_cancelled_request_is_given_up_and_answered_once() {
    // Scenario: both places are taken, and one of the two requests is cancelled; then a third arrives.
    // Expectation: the work is dropped, the response is CANCELLED, and the third gets the place; the other
    // request is answered as usual.
    let mut stream = stream(None);
    stream.request(1);
    stream.request(2);
    assert!(stream.poll().is_none());
    let work = stream.begun.0.lock().unwrap().remove(&1).unwrap();
    stream.cancel(1);
    assert_eq!(stream.refusal(), (1, Code::Cancelled));
    assert!(work.is_closed(), "it is still worked on");
    stream.request(3);
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [2, 3]);
    stream.begun.answer(3, b"three");
    stream.begun.answer(2, b"two");
    let mut answers = [stream.answer(), stream.answer()];
    answers.sort();
    assert_eq!(answers, [(2, "two".into()), (3, "three".into())]);
    stream.pieces = None;
    assert_eq!(stream.end().code(), Code::Ok);
}

#[tokio::test]
async fn a_cancel_of_nothing_is_ignored() {
    // Ids that were never used, that were answered, and that are being answered: no response to the cancel,
    // and one response to each request. Two requests with the same id are both cancelled.
    let mut stream = stream(None);
    stream.cancel(7);
    stream.request(1);
    assert!(stream.poll().is_none());
    stream.begun.answer(1, b"one");
    stream.cancel(1);
    assert_eq!(stream.response().id, 1);
    stream.cancel(1);
    stream.cancel(8);
    assert!(stream.poll().is_none());
    stream.request(5);
    stream.request(5);
    stream.cancel(5);
    assert_eq!(stream.refusal(), (5, Code::Cancelled));
    assert_eq!(stream.refusal(), (5, Code::Cancelled));
    stream.pieces = None;
    assert_eq!(stream.end().code(), Code::Ok);
}

#[tokio::test]
async fn a_flood_of_cancels_lets_others_have_their_turn() {
    // Scenario: more cancels than one poll handles, and a request after them, in one piece. Expectation: the
    // first poll ends before the request and schedules another, which starts it.
    struct Woken(std::sync::atomic::AtomicBool);
    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let mut stream = stream(None);
    let mut flood = Vec::new();
    for id in 0..=CANCELS_AT_ONCE as u64 {
        flood.extend(EncodedMessage::plain(&cancel(id)).unwrap().head);
    }
    stream.send(flood);
    stream.request(1);
    let woken = Arc::new(Woken(false.into()));
    let waker = Arc::clone(&woken).into();
    let mut cx = Context::from_waker(&waker);
    assert!(Pin::new(&mut stream.body).poll_frame(&mut cx).is_pending());
    assert!(stream.begun.ids().is_empty());
    assert!(woken.0.load(Ordering::Relaxed));
    assert!(Pin::new(&mut stream.body).poll_frame(&mut cx).is_pending());
    assert_eq!(stream.begun.ids(), [1]);
}

#[tokio::test]
async fn answers_come_in_the_order_of_completion() {
    // Two requests, the second completed first: its response comes first. When the client ends its side, the
    // stream ends with OK.
    let mut stream = stream(None);
    stream.request(1);
    stream.request(2);
    assert!(stream.poll().is_none());
    stream.begun.answer(2, b"two");
    assert_eq!(stream.answer(), (2, Bytes::from_static(b"two")));
    stream.pieces = None;
    assert!(stream.poll().is_none(), "request 1 is not answered");
    stream.begun.answer(1, b"one");
    assert_eq!(stream.answer(), (1, Bytes::from_static(b"one")));
    assert_eq!(stream.end().code(), Code::Ok);
    assert_eq!(counted(&stream.rpc), [Code::Ok]);
}

#[tokio::test]
async fn answers_that_are_ready_together_share_as_few_frames_as_they_can() {
    // Scenario: 32 answers of 4 KiB are ready, of which 15 fit into a frame. Expectation: the one that does not fit begins
    // the next frame, so that there are three.
    const DATA: &[u8] = &[7; 4096];
    let mut stream = stream_of(32, None, Box::new(|_bytes| Ok(())));
    (1..=32).for_each(|id| stream.request(id));
    assert!(stream.poll().is_none());
    (1..=32).for_each(|id| stream.begun.answer(id, DATA));
    let mut answers = Vec::new();
    while let Some(frame) = stream.poll() {
        let mut frame = frame.into_data().unwrap();
        stream.received.push(frame.copy_to_bytes(frame.remaining()));
        let messages = std::iter::from_fn(|| stream.received.next().unwrap());
        answers.push(messages.count());
    }
    assert_eq!(answers, [15, 15, 2]);
}

#[tokio::test]
async fn a_full_stream_takes_up_no_more() {
    // Room for two and four sent: two are started; each response that is sent makes room for one more.
    let mut stream = stream(None);
    (1..=4).for_each(|id| stream.request(id));
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [1, 2]);
    stream.begun.answer(1, b"one");
    // Completed, but not sent while the body is not polled: no room yet.
    assert_eq!(stream.begun.ids(), [2]);
    assert_eq!(stream.answer().0, 1);
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [2, 3]);
}

#[tokio::test]
async fn requests_may_arrive_in_any_pieces() {
    // Two requests, byte by byte and then both in one piece: all four are started and answered.
    let mut stream = stream(None);
    let framed = |id| {
        let message = v1::FetchStreamRequest {
            id,
            request: None,
            deadline_ms: 0,
        };
        EncodedMessage::plain(&message).unwrap().head
    };
    for byte in [framed(1), framed(2)].concat() {
        stream.send(vec![byte]);
    }
    stream.send([framed(3), framed(4)].concat());
    for id in 1..=4 {
        assert!(stream.poll().is_none());
        stream.begun.answer(id, b"x");
        assert_eq!(stream.answer().0, id);
    }
}

#[tokio::test]
async fn bytes_that_are_no_request_end_the_stream() {
    // Not protobuf, too long, compressed, truncated: each ends the stream with its status, once the request in flight is
    // answered.
    for (bytes, code) in [
        (&[0, 0, 0, 0, 2, 0xff, 0xff][..], Code::InvalidArgument),
        (&[0, 0, 0, 7, 209], Code::ResourceExhausted),
        (&[1, 0, 0, 0, 1, 0], Code::Internal),
        (&[0, 0, 0], Code::Internal),
    ] {
        let mut stream = stream(None);
        stream.request(1);
        stream.send(bytes);
        stream.pieces = None;
        assert!(stream.poll().is_none(), "{bytes:?}");
        stream.begun.answer(1, b"one");
        assert_eq!(stream.answer().0, 1);
        assert_eq!(stream.end().code(), code, "{bytes:?}");
        assert_eq!(counted(&stream.rpc), [code]);
    }
}

#[tokio::test]
async fn a_client_that_goes_away_gives_up_its_requests() {
    let mut stream = stream(None);
    stream.request(1);
    stream.pieces.as_ref().unwrap().send(Err(())).unwrap();
    assert_eq!(stream.end().code(), Code::Cancelled);
    assert!(stream.begun.0.lock().unwrap()[&1].is_closed());
}

#[tokio::test]
async fn a_drain_answers_what_was_taken_up_and_ends_the_stream() {
    // One request in flight when the drain begins, one sent after that: the first is answered, then
    // UNAVAILABLE with a hint.
    let mut stream = stream(None);
    stream.request(1);
    assert!(stream.poll().is_none());
    stream.draining.send(true).unwrap();
    stream.request(2);
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [1]);
    stream.begun.answer(1, b"one");
    assert_eq!(stream.answer().0, 1);
    let end = stream.end();
    assert_eq!(end.code(), Code::Unavailable);
    assert!(tonic_types::StatusExt::get_details_retry_info(&end).is_some());
}

#[tokio::test]
async fn an_idle_stream_wakes_up_for_the_drain() {
    // Nothing in flight and nothing sent: the drain alone ends the stream.
    let mut stream = stream(None);
    assert!(stream.poll().is_none());
    let draining = stream.draining.clone();
    let (frame, ()) = tokio::join!(stream.body.frame(), async { draining.send(true).unwrap() });
    assert_eq!(
        frame.unwrap().unwrap().into_trailers().unwrap()["grpc-status"],
        "14"
    );
}

#[tokio::test]
async fn a_deadline_ends_the_stream() {
    // A deadline in the past and a request in flight: DEADLINE_EXCEEDED, and the request is cancelled and counted.
    let mut stream = stream(Some(Instant::now()));
    stream.request(1);
    assert_eq!(
        stream
            .body
            .frame()
            .await
            .unwrap()
            .unwrap()
            .into_trailers()
            .unwrap()["grpc-status"],
        "4"
    );
    assert_eq!(counted(&stream.rpc), [Code::DeadlineExceeded]);
    assert_eq!(stream.late.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn answers_at_the_deadline_do_not_make_the_stream_a_success() {
    // Scenario: the client has sent all its requests; the last one is answered when the deadline has passed, before
    // the task that watches the deadline runs. Expectation: the answer, then DEADLINE_EXCEEDED.
    let mut stream = stream(Some(Instant::now()));
    stream.request(1);
    assert!(stream.poll().is_none());
    stream.begun.answer(1, b"late");
    stream.pieces = None;
    assert_eq!(stream.answer(), (1, Bytes::from_static(b"late")));
    assert_eq!(stream.end().code(), Code::DeadlineExceeded);
    assert_eq!(counted(&stream.rpc), [Code::DeadlineExceeded]);
    assert_eq!(stream.late.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_stream_that_is_dropped_was_cancelled() {
    // The client resets the stream with a request in flight: the request is cancelled, and one call is
    // counted.
    let mut stream = stream(None);
    stream.request(1);
    assert!(stream.poll().is_none());
    drop(stream.body);
    assert!(stream.begun.0.lock().unwrap()[&1].is_closed());
    assert_eq!(counted(&stream.rpc), [Code::Cancelled]);
}

#[tokio::test(start_paused = true)]
async fn a_deadline_holds_while_nobody_reads() {
    // Scenario: a stream with a deadline has started a request, and another that was answered; its client reads nothing, so
    // the body is not polled. The deadline passes. Expectation: the request is cancelled, so that it holds nothing, and counted
    // once; when the client reads at last, it gets the status.
    let deadline = tokio::time::Instant::now() + Duration::from_secs(1);
    let mut stream = stream(Some(deadline.into_std()));
    stream.request(6);
    assert!(stream.poll().is_none());
    stream.begun.answer(6, b"six");
    assert_eq!(stream.answer().0, 6);
    stream.request(7);
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [7]);
    let sender = stream.begun.0.lock().unwrap().remove(&7).unwrap();
    assert!(!sender.is_closed());
    tokio::time::sleep_until(deadline + Duration::from_millis(2)).await;
    assert!(sender.is_closed(), "its request is still waited for");
    assert_eq!(stream.late.load(Ordering::Relaxed), 1);
    assert_eq!(stream.end().code(), Code::DeadlineExceeded);
    assert_eq!(stream.late.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn a_response_that_waits_for_its_frame_is_given_back_at_the_deadline() {
    // Scenario: two responses that do not fit in one frame; the client takes the first, and reads on after the
    // deadline. Expectation: the status follows, since the memory of the second was given back.
    const DATA: &[u8] = &[7; 40_000];
    let deadline = tokio::time::Instant::now() + Duration::from_secs(1);
    let mut stream = stream(Some(deadline.into_std()));
    stream.request(1);
    stream.request(2);
    assert!(stream.poll().is_none());
    stream.begun.answer(1, DATA);
    stream.begun.answer(2, DATA);
    assert_eq!(stream.answer(), (1, Bytes::from_static(DATA)));
    tokio::time::sleep_until(deadline + Duration::from_millis(2)).await;
    assert_eq!(stream.end().code(), Code::DeadlineExceeded);
}
