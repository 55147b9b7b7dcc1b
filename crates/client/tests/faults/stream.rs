//! Requests pipelined on one stream: answers in any order, refusals, a stream that breaks, a server that lies.

use crate::fake::{Fake, LONG, STILL, answer, answer_all, block, builder, indices, is_cancel};
use futures_util::FutureExt as _;
use prost::Message as _;
use ringfetch_client::{Client, Code, Error, FetchStream};
use ringfetch_proto::v1 as wire;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tonic_types::{ErrorDetails, StatusExt as _};

/// Sends requests for block 0, block 1, ... at once and returns their outcomes, in that order.
async fn send_all(stream: &FetchStream, count: u64) -> Vec<Result<bool, Error>> {
    let sends = (0..count).map(|i| async move {
        let blocks = stream.fetch_blocks("d", &[i, i + 1000]).await?;
        Ok(blocks.get(0).unwrap() == block(i)[..] && blocks.get(1).unwrap() == block(i + 1000)[..])
    });
    futures_util::future::join_all(sends).await
}

pub(crate) fn request_error(id: u64, code: Code, retry_after_ms: u32) -> wire::FetchStreamResponse {
    let mut details = ErrorDetails::new();
    if retry_after_ms > 0 {
        details.set_retry_info(Some(Duration::from_millis(retry_after_ms.into())));
    }
    let status = tonic::Status::with_error_details(tonic::Code::from(code.number()), "refused", details);
    let status = tonic_types::Status::decode(status.details()).unwrap();
    wire::FetchStreamResponse {
        id,
        response: Some(wire::fetch_stream_response::Response::Status(status)),
    }
}

#[tokio::test(start_paused = true)]
async fn answers_in_any_order_reach_their_requests() {
    // Scenario: 16 requests at once; the server answers only when it has all, the last one first.
    // Expected: each gets its own blocks, over one connection.
    let fake = Fake::new().on_stream(|mut requests, answers| async move {
        let mut seen = Vec::new();
        while let Ok(Some(request)) = requests.message().await {
            seen.push(request);
            if seen.len() == 16 {
                for request in seen.drain(..).rev() {
                    answers.send(Ok(answer(request.id, indices(&request)))).unwrap();
                }
            }
        }
    });
    let stream = fake.client().stream();
    let outcomes = send_all(&stream, 16).await;
    assert!(
        outcomes.iter().all(|outcome| matches!(outcome, Ok(true))),
        "{outcomes:?}"
    );
    assert_eq!(fake.connections(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_is_tried_again_and_leaves_the_others_alone() {
    // Scenario: block 0's first request is refused with a hint of 40 ms, block 1 is out of range, 2 is served.
    // Expected: 0 is served at the second attempt, not before 40 ms; 1 has its error; the stream lives on.
    let fake = Fake::new().on_stream(|mut requests, answers| async move {
        let mut refused = false;
        while let Ok(Some(request)) = requests.message().await {
            let reply = match indices(&request)[0] {
                0 if !std::mem::replace(&mut refused, true) => {
                    request_error(request.id, Code::ResourceExhausted, 40)
                }
                1 => request_error(request.id, Code::OutOfRange, 0),
                _ => answer(request.id, indices(&request)),
            };
            answers.send(Ok(reply)).unwrap();
        }
    });
    let start = Instant::now();
    let stream = fake.client().stream();
    let outcomes = send_all(&stream, 3).await;
    assert!(matches!(outcomes[0], Ok(true)), "{outcomes:?}");
    assert_eq!(outcomes[1].as_ref().unwrap_err().code(), Some(Code::OutOfRange));
    assert!(matches!(outcomes[2], Ok(true)), "{outcomes:?}");
    assert!(
        start.elapsed() >= Duration::from_millis(40),
        "{:?}",
        start.elapsed()
    );
    assert!(!stream.is_broken());
}

#[tokio::test(start_paused = true)]
async fn when_the_stream_breaks_everything_pending_fails() {
    // Scenario: the server takes five requests, answers one and ends the stream: with a status, and cleanly.
    // Expected: one answer, four StreamBroken with the cause, which may be sent again on another stream; a later request
    // fails at once, without a timeout.
    for status in [Some(tonic::Status::unavailable("draining")), None] {
        let has_status = status.is_some();
        let fake = Fake::new().on_stream(move |mut requests, answers| {
            let status = status.clone();
            async move {
                let mut seen = Vec::new();
                while seen.len() < 5 {
                    seen.push(requests.message().await.unwrap().unwrap());
                }
                answers.send(Ok(answer(seen[2].id, indices(&seen[2])))).unwrap();
                if let Some(status) = status {
                    answers.send(Err(status)).unwrap();
                }
            }
        });
        let start = Instant::now();
        let stream = fake.client().stream();
        let outcomes = send_all(&stream, 5).await;
        assert!(matches!(outcomes[2], Ok(true)), "{outcomes:?}");
        let broken: Vec<_> = outcomes
            .iter()
            .filter_map(|outcome| outcome.as_ref().err())
            .collect();
        assert_eq!(broken.len(), 4);
        for error in broken {
            assert!(matches!(error, Error::StreamBroken { .. }), "{error:?}");
            assert!(error.is_retryable(), "{error:?}");
            assert_eq!(error.code(), has_status.then_some(Code::Unavailable), "{error:?}");
        }
        assert!(stream.is_broken());
        let error = stream.fetch_blocks("d", &[1]).await.unwrap_err();
        assert!(matches!(error, Error::StreamBroken { .. }), "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_was_dropped_is_cancelled_if_its_server_does_not_end_it() {
    // Scenario: a server that answers requests and does not end its side; a stream that is dropped after its answer.
    // Expected: the server sees the call end, although the connection stays.
    let is_closed = Arc::new(Notify::new());
    let closed = Arc::clone(&is_closed);
    let fake = Fake::new().on_stream(move |requests, answers| {
        let closed = Arc::clone(&closed);
        async move {
            answer_all(requests, answers.clone()).await;
            answers.closed().await;
            closed.notify_one();
        }
    });
    let client = fake.client();
    client.stream().fetch_blocks("d", &[1]).await.unwrap();
    let closed = tokio::time::timeout(LONG, is_closed.notified());
    closed.await.expect("the call stays open");
    client.fetch_blocks("d", &[1]).await.unwrap();
    assert_eq!(fake.connections(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_finished_when_its_server_has_ended_it() {
    // Scenario: a server that takes 2 s to end a stream; two clones that finish it, one of them later. Then one that
    // is not there, and one that never ends it. Expected: both clones wait for that end; the others end, too.
    let ended = Arc::new(AtomicUsize::new(0));
    let in_order = Arc::clone(&ended);
    let fake = Fake::new().on_stream(move |requests, answers| {
        let ended = Arc::clone(&in_order);
        async move {
            answer_all(requests, answers.clone()).await;
            tokio::time::sleep(Duration::from_secs(2)).await;
            ended.fetch_add(1, Ordering::Relaxed);
            drop(answers);
        }
    });
    let client = fake.client();
    let stream = client.stream();
    stream.fetch_blocks("d", &[1]).await.unwrap();
    let start = Instant::now();
    let clone = stream.clone();
    let later = async move {
        tokio::time::sleep(Duration::from_secs(3)).await;
        clone.fetch_blocks("d", &[2]).await.unwrap();
        clone.finish().await;
    };
    tokio::join!(stream.finish(), later);
    assert_eq!(ended.load(Ordering::Relaxed), 1);
    assert!(start.elapsed() >= Duration::from_secs(5), "{:?}", start.elapsed());
    // Nothing was sent on it.
    client.stream().finish().await;
    assert_eq!(ended.load(Ordering::Relaxed), 2);

    let refusing = Fake::new().refusing(|_| true).client();
    refusing.stream().finish().await;
    let never = Fake::new().on_stream(|requests, answers| async move {
        answer_all(requests, answers.clone()).await;
        answers.closed().await;
    });
    let start = Instant::now();
    never.client().stream().finish().await;
    assert!(
        start.elapsed() >= Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
    assert!(start.elapsed() < LONG, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn requests_fail_where_the_server_is_unreachable() {
    // Scenario: a stream over a connection that is refused.
    // Expected: StreamBroken with a transport error as its cause.
    let client = Fake::new().refusing(|_| true).client();
    let error = client.stream().fetch_blocks("d", &[1]).await.unwrap_err();
    let Error::StreamBroken { cause, .. } = &error else {
        panic!("{error:?}")
    };
    assert!(matches!(**cause, Error::Transport { .. }), "{cause:?}");
}

#[tokio::test(start_paused = true)]
async fn a_lying_stream_is_broken_off() {
    // Scenario: an answer to a request that was never made; one without content; and one of the wrong length.
    // Expected: the first two break the stream with a protocol error, the third fails only its request.
    type Lie = fn(u64) -> wire::FetchStreamResponse;
    let lies: [(Lie, bool); 3] = [
        (|id| answer(id + 77, &[0, 1000]), true),
        (|id| wire::FetchStreamResponse { id, response: None }, true),
        (|id| answer(id, &[0]), false),
    ];
    for (case, (lie, breaks)) in lies.into_iter().enumerate() {
        let fake = Fake::new().on_stream(move |mut requests, answers| async move {
            while let Ok(Some(request)) = requests.message().await {
                if answers.send(Ok(lie(request.id))).is_err() {
                    break;
                }
            }
        });
        let stream = fake.client().stream();
        let outcome = send_all(&stream, 1).await.remove(0).unwrap_err();
        assert_eq!(stream.is_broken(), breaks, "case {case}");
        assert!(!outcome.is_retryable(), "case {case}: {outcome:?}");
        if let Error::StreamBroken { cause, .. } = &outcome {
            assert!(
                breaks && matches!(**cause, Error::Protocol { .. }),
                "case {case}: {cause:?}"
            );
        } else {
            assert!(
                !breaks && matches!(outcome, Error::Protocol { .. }),
                "case {case}: {outcome:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_server_has_in_hand_is_bounded_also_when_senders_give_up() {
    // Scenario: two requests may be in flight. Two senders leave once nothing moves any more, before they are
    // answered; a third waits until nothing moves. Then the server, which ignores cancels, answers. Expected: the server
    // never has more than two; the third waits, and is served once an abandoned one was answered.
    let most = Arc::new(AtomicUsize::new(0));
    let answers_due = Arc::new(Semaphore::new(0));
    let fake = Fake::new().on_stream({
        let (most, answers_due) = (Arc::clone(&most), Arc::clone(&answers_due));
        move |mut requests, answers| {
            let (most, now) = (Arc::clone(&most), Arc::new(AtomicUsize::new(0)));
            let answers_due = Arc::clone(&answers_due);
            async move {
                while let Ok(Some(request)) = requests.message().await {
                    if is_cancel(&request) {
                        continue;
                    }
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    let (answers, now) = (answers.clone(), Arc::clone(&now));
                    let answers_due = Arc::clone(&answers_due);
                    tokio::spawn(async move {
                        answers_due.acquire().await.unwrap().forget();
                        now.fetch_sub(1, Ordering::SeqCst);
                        answers.send(Ok(answer(request.id, indices(&request)))).unwrap();
                    });
                }
            }
        }
    });
    let client = fake.client_with(builder().max_in_flight(2));
    let stream = client.stream();
    assert!(tokio::time::timeout(STILL, send_all(&stream, 2)).await.is_err());
    let mut third = pin!(stream.fetch_blocks("d", &[7]));
    assert!(tokio::time::timeout(STILL, third.as_mut()).await.is_err());
    assert_eq!(most.load(Ordering::SeqCst), 2);
    answers_due.add_permits(3);
    assert_eq!(third.await.unwrap().get(0).unwrap(), block(7)[..]);
    assert_eq!(most.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn a_request_ends_at_its_deadline_and_the_server_knows_it() {
    // Scenario: a server that takes requests and answers none; a client with a timeout of 300 ms.
    // Expected: DeadlineExceeded at 300 ms, deadline_ms on the wire; the stream lives on.
    let seen = Arc::new(AtomicUsize::new(0));
    let fake = Fake::new().on_stream({
        let seen = Arc::clone(&seen);
        move |mut requests, answers| {
            let seen = Arc::clone(&seen);
            async move {
                while let Ok(Some(request)) = requests.message().await {
                    seen.fetch_max(request.deadline_ms as usize, Ordering::SeqCst);
                }
                drop(answers);
            }
        }
    });
    let stream = fake.client().with_timeout(Duration::from_millis(300)).stream();
    let start = Instant::now();
    let error = stream.fetch_blocks("d", &[1]).await.unwrap_err();
    assert!(matches!(error, Error::DeadlineExceeded), "{error:?}");
    assert!(
        (300..=302).contains(&start.elapsed().as_millis()),
        "{:?}",
        start.elapsed()
    );
    assert!((295..=300).contains(&seen.load(Ordering::SeqCst)), "{seen:?}");
    assert!(!stream.is_broken());
}

/// What a stream's server received: the id and the deadline of each request, `None` for a cancel.
type Seen = Arc<Mutex<Vec<(u64, Option<u32>)>>>;

/// A server that notes what it receives, as soon as it is allowed to read, and answers as it should.
fn noting(seen: &Seen, may_read: &Arc<Semaphore>) -> Fake {
    let (seen, may_read) = (Arc::clone(seen), Arc::clone(may_read));
    Fake::new().on_stream(move |mut requests, answers| {
        let (seen, may_read) = (Arc::clone(&seen), Arc::clone(&may_read));
        async move {
            drop(may_read.acquire().await.unwrap());
            while let Ok(Some(request)) = requests.message().await {
                let deadline_ms = (!is_cancel(&request)).then_some(request.deadline_ms);
                seen.lock().unwrap().push((request.id, deadline_ms));
                if deadline_ms.is_some() {
                    answers.send(Ok(answer(request.id, indices(&request)))).unwrap();
                }
            }
        }
    })
}

/// A request of 24 KiB: the third one does not fit in the window.
fn long() -> Vec<u64> {
    vec![1 << 20; 8192]
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_the_connection_is_not_sent_once_its_caller_has_left() {
    // Scenario: a connection takes longer than the 300 ms of a request on a stream; one more request, and then there is a
    // connection. Expected: an error at 300 ms that says so; the server sees only the latter.
    let (seen, may_connect) = (Seen::default(), Arc::new(Semaphore::new(0)));
    let fake = noting(&seen, &Arc::new(Semaphore::new(1))).dialled_with(&may_connect);
    let stream = fake.client().with_timeout(Duration::from_millis(300)).stream();
    let start = Instant::now();
    let error = stream.fetch_blocks("d", &[1]).await.unwrap_err();
    assert!(matches!(error, Error::Transport { sent: false, .. }), "{error:?}");
    assert!(
        start.elapsed() <= Duration::from_millis(302),
        "{:?}",
        start.elapsed()
    );
    may_connect.add_permits(1);
    stream.fetch_blocks("d", &[2]).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [(1, Some(300))]);
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_the_server_to_read_says_what_time_it_has_left() {
    // Scenario: a server reads nothing for 200 ms; eight long requests that may take 300 ms, and then eight for which it
    // reads nothing for longer than that, and one more. Expected: the first are answered, those that waited have 100 ms
    // left; of the second, only those that fit in the window arrive, and then their cancels; the last is answered.
    let (seen, may_read) = (Seen::default(), Arc::new(Semaphore::new(0)));
    let client = noting(&seen, &may_read)
        .client()
        .with_timeout(Duration::from_millis(300));
    let stream = client.stream();
    let long = long();
    let send_eight = |stream: FetchStream| {
        let long = &long;
        let send = move |_| {
            let stream = stream.clone();
            async move { stream.fetch_blocks("d", long).await.is_ok() }
        };
        futures_util::future::join_all((0..8).map(send))
    };
    let mut first = pin!(send_eight(stream));
    let still = tokio::time::timeout(Duration::from_millis(200), first.as_mut());
    assert!(still.await.is_err());
    may_read.add_permits(1);
    assert_eq!(first.await, [true; 8]);
    let deadlines: Vec<_> = seen.lock().unwrap().drain(..).collect();
    assert_eq!(deadlines.len(), 8);
    assert_eq!(deadlines[..2], [(0, Some(300)), (1, Some(300))]);
    assert!(
        deadlines[4..]
            .iter()
            .all(|(_, deadline)| deadline.unwrap() <= 100),
        "{deadlines:?}"
    );

    may_read.forget_permits(1);
    let stream = client.stream();
    assert_eq!(send_eight(stream.clone()).await, [false; 8]);
    may_read.add_permits(1);
    stream.fetch_blocks("d", &[1]).await.unwrap();
    let mut seen = seen.lock().unwrap();
    let last = seen.pop().unwrap();
    let sent = seen.len() / 2;
    assert!((2..5).contains(&sent) && last == (8, Some(300)), "{seen:?}");
    let ids = 0..sent as u64;
    let expected = ids
        .clone()
        .map(|id| (id, Some(300)))
        .chain(ids.map(|id| (id, None)));
    assert!(seen.iter().copied().eq(expected), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_caller_leaves_is_cancelled_and_gives_its_place_to_the_next() {
    // Scenario: one request may be in flight; a server that answers only what is cancelled, and block 1. The caller of
    // block 0 leaves; then block 1; then another caller leaves by its timeout, and block 1 again. Expected: the blocks;
    // a cancel for each request that was given up, and none for others.
    let seen = Seen::default();
    let fake = Fake::new().on_stream({
        let seen = Arc::clone(&seen);
        move |mut requests, answers| {
            let seen = Arc::clone(&seen);
            async move {
                while let Ok(Some(request)) = requests.message().await {
                    let id = request.id;
                    seen.lock()
                        .unwrap()
                        .push((id, (!is_cancel(&request)).then_some(0)));
                    if is_cancel(&request) {
                        answers.send(Ok(request_error(id, Code::Cancelled, 0))).unwrap();
                    } else if indices(&request) == [1] {
                        answers.send(Ok(answer(id, &[1]))).unwrap();
                    }
                }
            }
        }
    });
    let client = fake.client_with(builder().max_in_flight(1));
    let stream = client.with_timeout(Duration::from_secs(5)).stream();
    let left = tokio::time::timeout(STILL, stream.fetch_blocks("d", &[0]));
    assert!(left.await.is_err());
    stream.fetch_blocks("d", &[1]).await.unwrap();
    let error = stream.fetch_blocks("d", &[0]).await.unwrap_err();
    assert!(matches!(error, Error::DeadlineExceeded), "{error:?}");
    stream.fetch_blocks("d", &[1]).await.unwrap();
    let expected = [
        (0, Some(0)),
        (0, None),
        (1, Some(0)),
        (2, Some(0)),
        (2, None),
        (3, Some(0)),
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_kept_and_not_polled_holds_up_no_other() {
    // Scenario: one request may be in flight, and the server answers it late; a second waits for its place, whose caller does
    // not poll it any more, then a third. Expected: all are answered, the third without the second being polled.
    let (seen, may_read) = (Seen::default(), Arc::new(Semaphore::new(0)));
    let settings = builder().max_in_flight(1).timeout(None);
    let stream = noting(&seen, &may_read).client_with(settings).stream();
    let mut first = pin!(stream.fetch_blocks("d", &[1]));
    let mut kept = pin!(stream.fetch_blocks("d", &[2]));
    let mut third = pin!(stream.fetch_blocks("d", &[3]));
    for waiting in [&mut first, &mut kept, &mut third] {
        assert!(tokio::time::timeout(STILL, waiting.as_mut()).await.is_err());
    }
    may_read.add_permits(1);
    first.await.unwrap();
    let third = tokio::time::timeout(STILL, third).await;
    assert_eq!(third.unwrap().unwrap().get(0).unwrap(), block(3)[..]);
    assert_eq!(kept.await.unwrap().get(0).unwrap(), block(2)[..]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_request_that_waits_for_room_gets_it() {
    // Scenario: 2000 requests without a deadline on several threads, with a limit of three in flight; then
    // the stream breaks while 50 wait. Expected: all are answered; all fail.
    let fake = Fake::new().on_stream(|mut requests, answers| async move {
        let mut count = 0;
        while let Ok(Some(request)) = requests.message().await {
            count += 1;
            if count > 2000 {
                return;
            }
            answers.send(Ok(answer(request.id, indices(&request)))).unwrap();
        }
    });
    let settings = builder().max_in_flight(3).timeout(None);
    let stream = fake.client_with(settings).stream();
    let send = |i: u64| {
        let stream = stream.clone();
        tokio::spawn(async move { stream.fetch_blocks("d", &[i]).await.is_ok() })
    };
    for (count, answered) in [(2000, true), (50, false)] {
        let sends = futures_util::future::join_all((0..count).map(send));
        let outcomes = tokio::time::timeout(LONG, sends).await.unwrap();
        assert!(outcomes.into_iter().all(|outcome| outcome.unwrap() == answered));
    }
}

/// Answers the first request of a stream, ends the stream with a status, and wants to read no more, all in one write.
async fn answer_one(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<bytes::Bytes>,
    is_received: Arc<Notify>,
) {
    let first = request.into_body().data().await.unwrap().unwrap();
    is_received.notify_one();
    let length = u32::from_be_bytes(first[1..5].try_into().unwrap()) as usize;
    let request = wire::FetchStreamRequest::decode(&first[5..][..length]).unwrap();
    let answer = answer(request.id, indices(&request));
    let mut message = vec![0];
    message.extend(u32::try_from(answer.encoded_len()).unwrap().to_be_bytes());
    answer.encode(&mut message).unwrap();
    let head = http::Response::builder().header("content-type", "application/grpc");
    let mut body = respond.send_response(head.body(()).unwrap(), false).unwrap();
    body.send_data(message.into(), false).unwrap();
    let status = tonic::Status::unauthenticated("revoked");
    let mut trailers = http::HeaderMap::new();
    status.add_header(&mut trailers).unwrap();
    body.send_trailers(trailers).unwrap();
}

#[tokio::test]
async fn a_stream_that_the_server_ends_keeps_its_reason_and_its_answers() {
    // Scenario: the server answers a request and ends the stream with a status while others are being sent. Expected: the
    // answer, and the status for the others.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let is_received = Arc::new(Notify::new());
    let noted = Arc::clone(&is_received);
    let server = tokio::spawn(async move {
        let (socket, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(socket).await.unwrap();
        while let Some(Ok((request, respond))) = connection.accept().await {
            tokio::spawn(answer_one(request, respond, Arc::clone(&noted)));
        }
    });
    // Connected first: more small requests than h2 allows unread would wait for the connection.
    let stream = Client::builder(url).connect().await.unwrap().stream();
    // Wakes itself, so that it has its turn between the tasks that read the connection and the stream.
    let others = tokio::spawn({
        let stream = stream.clone();
        async move {
            is_received.notified().await;
            let ended = poll_fn(move |context| {
                context.waker().wake_by_ref();
                match stream.fetch_blocks("d", &[8]).now_or_never() {
                    Some(Err(error)) => Poll::Ready(error),
                    Some(Ok(_)) | None => Poll::Pending,
                }
            });
            ended.await
        }
    });
    let (first, error) = tokio::join!(stream.fetch_blocks("d", &[7]), others);
    let Error::StreamBroken { cause, .. } = error.unwrap() else {
        panic!("not the end of the stream");
    };
    assert_eq!(cause.code(), Some(Code::Unauthenticated), "{cause:?}");
    assert_eq!(first.unwrap().get(0).unwrap(), block(7)[..]);
    server.abort();
}
