//! Memory of requests that have not started.

use super::*;
use std::sync::OnceLock;

/// A stream whose requests are never answered, the pieces of its body, and what is charged of incomplete requests: at
/// most 40 bytes.
fn charged(
    deadline: Option<Instant>,
) -> (
    Arc<Mutex<Vec<usize>>>,
    mpsc::UnboundedSender<Bytes>,
    impl http_body::Body<Data = FrameParts, Error = Infallible> + Unpin,
) {
    let held = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&held);
    let (pieces, mut received) = mpsc::unbounded_channel();
    let incoming = futures_util::stream::poll_fn(move |cx| received.poll_recv(cx))
        .map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
    let bounds = StreamLimits {
        requests_in_flight: 2,
        message_bytes: 64,
        deadline,
    };
    let hold = Box::new(move |bytes: usize| {
        hears.lock().unwrap().push(bytes);
        let max = 40;
        if bytes > 40 {
            Err(FetchError::RequestMemory { max, own: true })
        } else {
            Ok(())
        }
    });
    let start = |_message: StreamRequest| Ok(std::future::pending());
    let incoming = http_body_util::StreamBody::new(incoming);
    let late = Box::new(|| ());
    let body = body(
        incoming,
        bounds,
        start,
        hold,
        late,
        std::future::pending(),
        timed().1,
    );
    (held, pieces, body)
}

/// A message of this length with its prefix, and more.
fn framed(length: u32) -> Vec<u8> {
    [&[0][..], &length.to_be_bytes(), &[0; 64]].concat()
}

#[tokio::test]
async fn a_request_that_is_not_whole_is_charged() {
    // Scenario: half a request message of 60 bytes, then the rest of it. Expectation: what has arrived is
    // charged while the rest is awaited, and nothing once the request has started; on another stream a refused charge
    // ends it.
    let (held, pieces, mut body) = charged(None);
    pieces.send(Bytes::copy_from_slice(&framed(60)[..25])).unwrap();
    assert!(body.frame().now_or_never().is_none());
    assert_eq!(held.lock().unwrap().last(), Some(&25));
    pieces.send(Bytes::from(vec![0; 40])).unwrap();
    assert!(body.frame().now_or_never().is_none());
    assert_eq!(held.lock().unwrap().last(), Some(&0));
    let (_held, pieces, mut body) = charged(None);
    pieces.send(Bytes::copy_from_slice(&framed(60)[..50])).unwrap();
    let trailers = body
        .frame()
        .now_or_never()
        .unwrap()
        .unwrap()
        .unwrap()
        .into_trailers();
    let status = Status::from_header_map(&trailers.unwrap()).unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted);
}

/// Grants nothing.
fn no_memory(bytes: usize) -> Result<(), FetchError> {
    match bytes {
        0 => Ok(()),
        _ => Err(FetchError::RequestMemory { max: 40, own: true }),
    }
}

/// A framed request of at least this length.
fn long_request(id: u64, length: usize) -> Bytes {
    let blocks = v1::FetchBlocksRequest {
        dataset: "d".repeat(length),
        ..Default::default()
    };
    let message = v1::FetchStreamRequest {
        id,
        request: Some(OneOf::Blocks(blocks)),
        deadline_ms: 0,
    };
    EncodedMessage::plain(&message).unwrap().head
}

#[tokio::test]
async fn a_complete_request_is_answered_when_there_is_no_memory() {
    // Scenario: no memory is granted. Two requests are in flight; a short one waits, in a piece of its own; then a long one,
    // and a part of another with it. Expectation: the short one is served like the first two; the long one gets the
    // refusal; the incomplete one ends the stream, when all others are answered.
    let mut stream = stream_that_charges(None, Box::new(no_memory));
    for id in 1..=3 {
        stream.request(id);
    }
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [1, 2]);
    stream.begun.answer(1, b"one");
    assert_eq!(stream.answer().0, 1);
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [2, 3]);
    stream.send([&long_request(4, 1000)[..], &long_request(5, 1000)[..100]].concat());
    assert!(stream.poll().is_none());
    stream.begun.answer(2, b"two");
    let mut answered = Vec::new();
    answered.push(stream.answer().0);
    assert_eq!(stream.refusal(), (4, Code::ResourceExhausted));
    stream.begun.answer(3, b"three");
    answered.push(stream.answer().0);
    assert_eq!(answered, [2, 3]);
    assert_eq!(stream.end().code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn requests_after_a_flood_of_cancels_are_answered_when_there_is_no_memory() {
    // Scenario: no memory is granted; more cancels than one poll handles, and a request after them, in one piece.
    // Expectation: the request is served.
    let mut stream = stream_that_charges(None, Box::new(no_memory));
    let cancels = vec![EncodedMessage::plain(&cancel(9)).unwrap().head; CANCELS_AT_ONCE + 1];
    stream.send([cancels.concat(), long_request(1, 1).to_vec()].concat());
    assert!(stream.poll().is_none());
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [1]);
}

#[tokio::test]
async fn the_last_request_is_not_charged_once_it_has_started() {
    // Scenario: half a request message of 60 bytes, then the rest of it and the end of the body. Expectation: nothing
    // is charged while the request is in flight.
    let (held, pieces, mut body) = charged(None);
    pieces.send(Bytes::copy_from_slice(&framed(60)[..25])).unwrap();
    assert!(body.frame().now_or_never().is_none());
    assert_eq!(held.lock().unwrap().last(), Some(&25));
    pieces.send(Bytes::from(vec![0; 40])).unwrap();
    drop(pieces);
    assert!(body.frame().now_or_never().is_none());
    assert_eq!(held.lock().unwrap().last(), Some(&0));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_not_whole_is_given_back_at_the_deadline() {
    // Scenario: half a request message, of a client that does not read, so that the body is not polled any more; the deadline
    // passes. Expectation: nothing is charged.
    let deadline = tokio::time::Instant::now() + Duration::from_secs(1);
    let (held, pieces, mut body) = charged(Some(deadline.into_std()));
    pieces.send(Bytes::copy_from_slice(&framed(60)[..25])).unwrap();
    assert!(body.frame().now_or_never().is_none());
    assert_eq!(held.lock().unwrap().last(), Some(&25));
    tokio::time::sleep_until(deadline + Duration::from_millis(2)).await;
    assert_eq!(held.lock().unwrap().last(), Some(&0));
}

#[tokio::test]
async fn a_request_that_waited_is_not_charged_twice() {
    // Scenario: two requests are in flight, and a long one waits; one of the two is answered. Expectation: the long one is
    // charged while it waits, and no longer so before it starts, which charges it.
    let (begun, charges): (Arc<OnceLock<Begun>>, Arc<Mutex<Vec<_>>>) = Default::default();
    let (starts, hears) = (Arc::clone(&begun), Arc::clone(&charges));
    let hold = move |bytes| {
        let started = starts.get().map(Begun::ids);
        hears.lock().unwrap().push((bytes, started.unwrap_or_default()));
        Ok(())
    };
    let mut stream = stream_that_charges(None, Box::new(hold));
    begun.set(stream.begun.clone()).unwrap_or_default();
    stream.request(1);
    stream.request(2);
    stream.send(long_request(3, 1000));
    assert!(stream.poll().is_none());
    stream.begun.answer(1, b"one");
    assert_eq!(stream.answer().0, 1);
    assert!(stream.poll().is_none());
    assert_eq!(stream.begun.ids(), [2, 3]);
    let charges = charges.lock().unwrap();
    let waiting = charges.iter().rposition(|(bytes, _)| *bytes > 1000).unwrap();
    assert_eq!(charges[waiting + 1], (0, vec![2]));
}

#[tokio::test]
async fn a_cancel_brings_no_request_that_is_not_charged() {
    // Scenario: messages with a request and then a cancel, of which the latter counts; a short one, and one as long as a request
    // that is charged. Expectation: the first cancels; the second, which would be decoded without a charge, ends the stream.
    let both = |length: usize| {
        let names = vec![String::new(); length];
        let objects = v1::FetchObjectsRequest {
            names,
            ..Default::default()
        };
        let request = v1::FetchStreamRequest {
            request: Some(OneOf::Objects(objects)),
            ..Default::default()
        };
        let message = [request.encode_to_vec(), cancel(1).encode_to_vec()].concat();
        let length = u32::try_from(message.len()).unwrap();
        [&[0][..], &length.to_be_bytes(), &message].concat()
    };
    let mut stream = stream(None);
    stream.request(1);
    assert!(stream.poll().is_none());
    stream.send(both(100));
    assert_eq!(stream.refusal(), (1, Code::Cancelled));
    stream.send(both(800));
    assert_eq!(stream.end().code(), Code::InvalidArgument);
}
