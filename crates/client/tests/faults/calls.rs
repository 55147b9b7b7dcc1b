//! Calls to a server that refuses, stalls, lies and cuts connections. Time is paused: waits are exact and
//! take no real time.

use crate::fake::{Fake, LONG, answer, block, blocks, builder, indices, served_by, with_hint};
use futures_util::FutureExt as _;
use ringfetch_client::{
    AdminClient, Backend, ByteRange, Client, Code, Error, Metric, ObjectPart, Request, RetryPolicy,
    ScoreRequest,
};
use ringfetch_proto::v1 as wire;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Barrier;
use tokio::time::Instant;
use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

#[tokio::test(start_paused = true)]
async fn unavailable_is_tried_again_until_it_is_not() {
    // Scenario: the first two calls fail with UNAVAILABLE, the third returns the blocks. Expected: the
    // blocks, after three calls and at most 10 + 20 ms of backoff.
    let fake = Fake::new().on_blocks(|n, request| async move {
        if n < 2 {
            Err(Status::unavailable("draining"))
        } else {
            Ok(blocks(&request.get_ref().indices))
        }
    });
    let start = Instant::now();
    let answer = fake.client().fetch_blocks("d", &[3, 1, 3]).await.unwrap();
    assert_eq!(fake.calls(), 3);
    assert!(
        start.elapsed() <= Duration::from_millis(35),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(answer.block_bytes(), 8);
    for (item, index) in answer.iter().zip([3, 1, 3]) {
        assert_eq!(item.unwrap(), block(index)[..]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_servers_hint_is_waited_for() {
    // Scenario: RESOURCE_EXHAUSTED with RetryInfo of 250 ms, then the blocks.
    // Expected: a second call not before 250 ms, and at most the first backoff of 10 ms later.
    let hint = Duration::from_millis(250);
    let fake = Fake::new().on_blocks(move |n, request| async move {
        if n == 0 {
            Err(with_hint(tonic::Code::ResourceExhausted, hint))
        } else {
            Ok(blocks(&request.get_ref().indices))
        }
    });
    let start = Instant::now();
    fake.client().fetch_blocks("d", &[1]).await.unwrap();
    assert_eq!(fake.calls(), 2);
    assert!(
        start.elapsed() >= hint && start.elapsed() <= hint + Duration::from_millis(15),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn without_a_hint_exhaustion_is_final() {
    // Scenario: RESOURCE_EXHAUSTED without RetryInfo: the limit of a single request. Expected: one call; the
    // error has the code, no hint, and the wrong field.
    let fake = Fake::new().on_blocks(|_, _| async {
        let details = ErrorDetails::with_bad_request_violation("indices", "5000 items, the limit is 4096");
        let code = tonic::Code::ResourceExhausted;
        Err(Status::with_error_details(code, "over a limit", details))
    });
    let error = fake.client().fetch_blocks("d", &[1]).await.unwrap_err();
    assert_eq!(fake.calls(), 1);
    assert_eq!(
        (error.code(), error.retry_after()),
        (Some(Code::ResourceExhausted), None)
    );
    assert_eq!(error.field_violations()[0].field, "indices");
    assert_eq!(error.to_string(), "RESOURCE_EXHAUSTED: over a limit");
}

#[tokio::test(start_paused = true)]
async fn other_codes_are_final() {
    // Scenario: every code but UNAVAILABLE and RESOURCE_EXHAUSTED, with a hint to retry.
    // Expected: one call and that code.
    for code in [
        Code::NotFound,
        Code::InvalidArgument,
        Code::OutOfRange,
        Code::DataLoss,
        Code::Internal,
        Code::DeadlineExceeded,
    ] {
        let fake = Fake::new().on_blocks(move |_, _| async move {
            Err(with_hint(code.number().into(), Duration::from_millis(1)))
        });
        let error = fake.client().fetch_blocks("d", &[1]).await.unwrap_err();
        assert_eq!((fake.calls(), error.code()), (1, Some(code)));
    }
}

#[tokio::test(start_paused = true)]
async fn attempts_are_bounded_by_number_and_by_deadline() {
    // Scenario: a server that is always unavailable, without a deadline; one that is overloaded for 3 s, for a call that has 2 s; a hint
    // of an hour for a call without a deadline.
    // Expected: fifteen calls by default and one with no retries; a single call and the server's error at once.
    let fake = Fake::new().on_blocks(|_, _| async { Err(Status::unavailable("draining")) });
    let patient = fake.client().with_timeout(None);
    let error = patient.fetch_blocks("d", &[1]).await.unwrap_err();
    assert_eq!((fake.calls(), error.code()), (15, Some(Code::Unavailable)));
    let client = fake.client_with(builder().retry(RetryPolicy::none()));
    client.fetch_blocks("d", &[1]).await.unwrap_err();
    assert_eq!(fake.calls(), 16);

    for (hint, timeout) in [(3, Some(Duration::from_secs(2))), (3600, None)] {
        let hint = Duration::from_secs(hint);
        let fake = Fake::new()
            .on_blocks(move |_, _| async move { Err(with_hint(tonic::Code::ResourceExhausted, hint)) });
        let start = Instant::now();
        let error = fake
            .client()
            .with_timeout(timeout)
            .fetch_blocks("d", &[1])
            .await
            .unwrap_err();
        assert_eq!((fake.calls(), error.retry_after()), (1, Some(hint)));
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}

/// The time limit that a request says.
pub(crate) fn timeout_us<T>(request: &tonic::Request<T>) -> usize {
    let header = request.metadata().get("grpc-timeout").unwrap();
    let header = header.to_str().unwrap();
    match header.split_at(header.len() - 1) {
        (n, "n") => n.parse::<usize>().unwrap() / 1000,
        (n, "u") => n.parse().unwrap(),
        (n, "m") => n.parse::<usize>().unwrap() * 1000,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_ends_at_its_deadline_and_the_server_knows_it() {
    // Scenario: a server that never answers; a call with a timeout of 700 ms.
    // Expected: DeadlineExceeded at 700 ms, one call, and grpc-timeout was at most that and not much less.
    let seen = Arc::new(AtomicUsize::new(0));
    let fake = Fake::new().on_blocks({
        let seen = Arc::clone(&seen);
        move |_, request| {
            seen.store(timeout_us(&request), Ordering::SeqCst);
            std::future::pending()
        }
    });
    let start = Instant::now();
    let client = fake.client().with_timeout(Duration::from_millis(700));
    let error = client.fetch_blocks("d", &[1]).await.unwrap_err();
    assert!(matches!(error, Error::DeadlineExceeded), "{error:?}");
    assert!(
        (700..=702).contains(&start.elapsed().as_millis()),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(fake.calls(), 1);
    assert!(
        (690_000..=700_000).contains(&seen.load(Ordering::SeqCst)),
        "{seen:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_are_bounded() {
    // Scenario: 20 calls at once through a client of 3 connections that allows 4 in flight; the server answers
    // once it has four. Expected: all are answered, never more than 4 at the server, all three connections are used.
    let four = Arc::new(Barrier::new(4));
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let fake = Fake::new().on_blocks({
        let (now, most) = (Arc::clone(&now), Arc::clone(&most));
        move |_, request| {
            let (now, most, four) = (Arc::clone(&now), Arc::clone(&most), Arc::clone(&four));
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                four.wait().await;
                now.fetch_sub(1, Ordering::SeqCst);
                Ok(blocks(&request.get_ref().indices))
            }
        }
    });
    let client = fake.client_with(builder().connections(3).max_in_flight(4));
    let calls = (0..20u64).map(|i| {
        let client = client.clone();
        async move { client.fetch_blocks("d", &[i]).await.unwrap().get(0).unwrap() == block(i)[..] }
    });
    let right = futures_util::future::join_all(calls).await;
    assert_eq!(right, [true; 20]);
    assert_eq!((most.load(Ordering::SeqCst), fake.connections()), (4, 3));
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_fails_is_told_apart_and_made_again() {
    // Scenario: every connection is refused; two are refused and the third is accepted. Expected: a transport
    // error without a gRPC code, and that nothing was sent, after all attempts; blocks.
    let fake = Fake::new().refusing(|_| true);
    let error = fake.client().fetch_blocks("d", &[1]).await.unwrap_err();
    assert!(matches!(error, Error::Transport { sent: false, .. }), "{error:?}");
    assert_eq!(
        (error.code(), error.label(), fake.calls()),
        (None, "TRANSPORT", 0)
    );
    assert!(error.to_string().contains("refused"), "{error}");

    let fake = Fake::new().refusing(|n| n < 2);
    fake.client().fetch_blocks("d", &[1]).await.unwrap();
    assert_eq!((fake.calls(), fake.connections()), (1, 3));
}

#[tokio::test(start_paused = true)]
async fn calls_that_nobody_polls_hold_up_no_other() {
    // Scenario: a call that opens the connection, and one that waits for it, each polled once and then kept, as a slow branch
    // of `select!` keeps them; a third one without a deadline. Expected: its blocks, soon; then those of the others.
    let client = Fake::new().client().with_timeout(None);
    let mut first = pin!(client.fetch_blocks("d", &[1]));
    let mut second = pin!(client.fetch_blocks("d", &[2]));
    assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
    let third = tokio::time::timeout(LONG, client.fetch_blocks("d", &[3]));
    third.await.expect("the third call hangs").unwrap();
    first.await.unwrap();
    second.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_is_found_by_short_calls_and_an_idle_one_is_not_asked() {
    // Scenario: a peer that stops reading after 45 s, and answers no call at all; no call for five minutes, then one of 100 ms
    // in each second. Expected: the connection is kept until then, and replaced within a minute.
    let dials = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&dials);
    let dial = served_by(move |mut connection| {
        count.fetch_add(1, Ordering::SeqCst);
        async move {
            let mut held = Vec::new();
            let serve = async {
                while let Some(call) = connection.accept().await {
                    held.push(call);
                }
            };
            let _ = tokio::time::timeout(Duration::from_secs(45), serve).await;
            std::future::pending::<()>().await;
        }
    });
    let settings = builder().timeout(Duration::from_millis(100));
    let client = settings.connect_lazy_with(dial).unwrap();
    let call = async || {
        let error = client.fetch_blocks("d", &[1]).await.unwrap_err();
        assert!(matches!(error, Error::DeadlineExceeded), "{error:?}");
        dials.load(Ordering::SeqCst)
    };
    assert_eq!(call().await, 1);
    // Only time can show that nothing is asked.
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(call().await, 1);
    let begin = Instant::now();
    while call().await == 1 {
        assert!(begin.elapsed() < LONG, "it is not found");
        // One call in each second: without pauses, its connection would never be without a call.
        tokio::time::sleep(Duration::from_millis(900)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_changes_something_is_sent_once() {
    // Scenario: a server that takes each request and hangs up; every call of an admin client. Expected: a
    // transport error that says that it was sent; one request for each call that changes something, fifteen for the one that only asks.
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    let client = builder()
        .timeout(None)
        .connect_lazy_with(served_by(move |mut connection| {
            let requests = Arc::clone(&counted);
            async move {
                if connection.accept().await.is_some() {
                    requests.fetch_add(1, Ordering::SeqCst);
                }
            }
        }));
    let admin = &AdminClient::from(client.unwrap());
    let count = async |call: Pin<&mut dyn Future<Output = Result<(), Error>>>| {
        let error = call.await.unwrap_err();
        assert!(matches!(error, Error::Transport { sent: true, .. }), "{error:?}");
        requests.swap(0, Ordering::SeqCst)
    };
    let reload = pin!(async { admin.reload().await.map(drop) });
    assert_eq!(count(reload).await, 1);
    let log = pin!(async { admin.set_log_level("info").await.map(drop) });
    assert_eq!(count(log).await, 1);
    let set = pin!(async { admin.set_backend(Backend::Mmap, None).await.map(drop) });
    assert_eq!(count(set).await, 1);
    let clear = pin!(async { admin.clear_backend("d").await.map(drop) });
    assert_eq!(count(clear).await, 1);
    let status = pin!(async { admin.status().await.map(drop) });
    assert_eq!(count(status).await, 15);
}

#[tokio::test(start_paused = true)]
async fn a_lying_server_gets_a_protocol_error() {
    // Scenario: answers with a block too few, a block length of 0, lengths that do not add up, an error for
    // an item that was not requested, and one that is longer than the client accepts. Expected: a protocol
    // error each, after one call.
    let lies: [fn() -> wire::FetchBlocksResponse; 5] = [
        || blocks(&[1]),
        || wire::FetchBlocksResponse {
            block_bytes: 0,
            ..blocks(&[1, 2])
        },
        || wire::FetchBlocksResponse {
            lengths: vec![8, 9],
            ..blocks(&[1, 2])
        },
        || {
            let error = wire::ItemError {
                item: 7,
                code: 11,
                message: String::new(),
            };
            wire::FetchBlocksResponse {
                lengths: vec![8, 8],
                errors: vec![error],
                ..blocks(&[1, 2])
            }
        },
        || blocks(&[0; 1000]),
    ];
    for (case, lie) in lies.into_iter().enumerate() {
        let fake = Fake::new().on_blocks(move |_, _| async move { Ok(lie()) });
        let client = fake.client_with(builder().max_answer_bytes(4000));
        let error = client.fetch_blocks("d", &[1, 2]).await.unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "case {case}: {error:?}");
        assert_eq!(fake.calls(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_of_another_version_is_refused() {
    // Scenario: a server that ignores the required version, as one that does not know the field: blocks by a call and on a
    // stream, objects of which one is of another version and one does not exist, the same with the right versions; a version
    // of the dataset for objects. Expected: protocol errors; the objects; an error that names the setting.
    let versioned = |indices: &[u64]| wire::FetchBlocksResponse {
        etag: "new".into(),
        ..blocks(indices)
    };
    let fake = Fake::new()
        .on_blocks(move |_, request| std::future::ready(Ok(versioned(&request.get_ref().indices))))
        .on_stream(move |mut requests, answers| async move {
            while let Ok(Some(request)) = requests.message().await {
                let blocks = wire::fetch_stream_response::Response::Blocks(versioned(indices(&request)));
                let (id, response) = (request.id, Some(blocks));
                answers
                    .send(Ok(wire::FetchStreamResponse { id, response }))
                    .unwrap();
            }
        });
    let client = fake.client();
    let of = |etag| Request::blocks("d", [1]).if_match(etag);
    client.fetch(of("new")).await.unwrap();
    let stream = client.stream();
    for outcome in [client.fetch(of("old")).await, stream.send(of("old")).await] {
        assert!(matches!(outcome, Err(Error::Protocol { .. })), "{outcome:?}");
    }
    assert!(!stream.is_broken());

    let part = |name: &str, etag: &str| {
        let mut part = ObjectPart::whole(name);
        part.if_match = etag.into();
        part
    };
    let parts = [part("a", ""), part("b", "version of b"), part("nothing", "x")];
    client.fetch_objects("d", &parts).await.unwrap();
    let parts = [part("a", ""), part("b", "version of a")];
    let error = client.fetch_objects("d", &parts).await.unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
    let objects = Request::objects("d", parts).if_match("x");
    let error = client.fetch(objects).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Invalid {
                field: "if_match",
                ..
            }
        ),
        "{error:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn fail_fast_reaches_the_server() {
    // Scenario: blocks, scores and a stream's blocks, of a client and of the same with `fail_fast`. Expected: the server sees
    // it in each of the latter's requests, and in no other.
    let seen: Arc<Mutex<Vec<(&str, bool)>>> = Arc::default();
    let note = || {
        let seen = Arc::clone(&seen);
        move |method, fail_fast| seen.lock().unwrap().push((method, fail_fast))
    };
    let (of_blocks, of_scores, of_stream) = (note(), note(), note());
    let fake = Fake::new()
        .on_blocks(move |_, request| {
            of_blocks("blocks", request.get_ref().fail_fast);
            async move { Ok(blocks(&request.get_ref().indices)) }
        })
        .on_scores(move |request| {
            of_scores("scores", request.fail_fast);
            Status::not_found("no vectors")
        })
        .on_stream(move |mut requests, answers| {
            let of_stream = of_stream.clone();
            async move {
                while let Ok(Some(request)) = requests.message().await {
                    if let Some(wire::fetch_stream_request::Request::Blocks(blocks)) = &request.request {
                        of_stream("stream", blocks.fail_fast);
                    }
                    answers.send(Ok(answer(request.id, indices(&request)))).unwrap();
                }
            }
        });
    let client = fake.client();
    for client in [&client, &client.with_fail_fast(true)] {
        client.fetch_blocks("d", &[1]).await.unwrap();
        let scores = ScoreRequest::new("d", Metric::Dot, 1);
        client.score_vectors(scores).await.unwrap_err();
        client.stream().fetch_blocks("d", &[1]).await.unwrap();
    }
    let expected =
        [false, true].map(|fail_fast| ["blocks", "scores", "stream"].map(|method| (method, fail_fast)));
    assert_eq!(*seen.lock().unwrap(), expected.concat());
}

#[tokio::test(start_paused = true)]
async fn ranges_and_objects_come_back_item_by_item() {
    // Scenario: two ranges; a whole object, a missing one, a part; an answer without the version of an object; a part of
    // length 0. Expected: their bytes and versions, and only the missing one has an error; a protocol error, since a caller
    // would take one object's version for another's; the last is never sent.
    let client = Fake::new().client();
    let ranges = [ByteRange::new(254, 4), ByteRange::new(7, 1)];
    let answer = client.fetch_ranges("d", &ranges).await.unwrap();
    assert_eq!(answer.get(0).unwrap(), [254, 255, 0, 1][..]);
    assert_eq!(answer.get(1).unwrap(), [7][..]);

    let part = ObjectPart::new("abcdef", 2, 3);
    let parts = [
        ObjectPart::whole("shard-00/a"),
        ObjectPart::whole("nothing"),
        part,
    ];
    let answer = client.fetch_objects("d", &parts).await.unwrap();
    assert_eq!(answer.get(0).unwrap(), "shard-00/a");
    assert_eq!(answer.get(1).unwrap_err().code, Code::NotFound);
    assert_eq!(answer.get(2).unwrap(), "cde");
    let versions = ["version of shard-00/a", "", "version of abcdef"];
    assert_eq!(answer.etags(), versions);
    let parts = [ObjectPart::whole("a?"), ObjectPart::whole("b")];
    let error = client.fetch_objects("d", &parts).await.unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");

    let error = client
        .fetch_objects("d", &[ObjectPart::new("abcdef", 2, 0)])
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Invalid { field: "length", .. }),
        "{error:?}"
    );
}

#[tokio::test]
async fn settings_out_of_bounds_are_named() {
    // Scenario: no connections, no calls in flight, URLs without scheme or host, with another scheme, a fragment, or a password,
    // also where the user is named as the host. Expected: an error that names the setting; the password neither in it nor in
    // the builder as a log prints it.
    for (builder, field) in [
        (builder().connections(0), "connections"),
        (builder().connections(5000), "connections"),
        (builder().max_in_flight(0), "max_in_flight"),
        (Client::builder("127.0.0.1:7410"), "url"),
        (Client::builder("ftp://127.0.0.1:7410"), "url"),
        (Client::builder("http://"), "url"),
        (Client::builder("no url at all"), "url"),
        (Client::builder("http://user:secret@127.0.0.1:7410"), "url"),
        (Client::builder("http://localhost:secret@localhost:7410"), "url"),
        (Client::builder("http://user:secret|@127.0.0.1:7410"), "url"),
        (Client::builder("http://127.0.0.1:7410/#secret"), "url"),
    ] {
        assert!(!format!("{builder:?}").contains("secret"), "{builder:?}");
        let error = builder.connect_lazy().unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
        assert!(
            matches!(error, Error::Invalid { field: found, .. } if found == field),
            "{error:?}"
        );
    }
}
