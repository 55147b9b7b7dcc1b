//! Several servers of which one is silent, slow, unreachable or overloaded. Time is paused.

use crate::fake::{Dialled, Fake, LONG, Pipes, blocks, builder, served_by, with_hint};
use crate::stream::request_error;
use ringfetch_client::{Builder, Client, Code, Error, RetryPolicy};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// A client of two servers. The first connection is to the first one, the second to the other one, later ones to the first.
pub(crate) fn of_two(
    builder: Builder,
    first: impl Fn() -> Dialled + Send + Sync + 'static,
    other: impl Fn() -> Dialled + Send + Sync + 'static,
) -> Client {
    let dials = AtomicUsize::new(0);
    let connector = move || match dials.fetch_add(1, Ordering::SeqCst) {
        1 => other(),
        _ => first(),
    };
    let builder = builder.endpoint("http://fake:2");
    builder.connect_lazy_with(connector).unwrap()
}

/// A peer that completes the handshake and then neither reads nor writes.
fn silent() -> Dialled {
    served_by(|connection| async move {
        std::future::pending::<()>().await;
        drop(connection);
    })()
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_silent_fails_few_calls() {
    // Scenario: a server that connects and then answers nothing, next to one that serves; 20 calls of 100 ms without retries,
    // at once and in 20 s. Expected: at most three fail.
    for pause in [Duration::ZERO, Duration::from_secs(1)] {
        let settings = builder()
            .retry(RetryPolicy::none())
            .timeout(Duration::from_millis(100));
        let client = of_two(settings, silent, Fake::new().connector());
        let mut failed = 0;
        for _ in 0..20 {
            failed += usize::from(client.fetch_blocks("d", &[1]).await.is_err());
            // Their rate is the scenario: a server may be avoided for a time or for some calls.
            tokio::time::sleep(pause).await;
        }
        assert!(failed <= 3, "{pause:?}: {failed}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_a_silent_server_says_why_it_ends() {
    // Scenario: a server that connects and then answers nothing; a call without a timeout or retries. Expected: an error that
    // names the ping, which was not answered.
    let settings = builder().retry(RetryPolicy::none()).timeout(None);
    let client = settings.connect_lazy_with(silent).unwrap();
    let call = tokio::time::timeout(LONG, client.fetch_blocks("d", &[1]));
    let error = call.await.expect("the call hangs").unwrap_err();
    assert!(matches!(error, Error::Transport { sent: true, .. }), "{error:?}");
    assert!(error.to_string().contains("ping"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_drains_does_not_vouch_for_the_one_that_replaced_it() {
    // Scenario: a server whose first connection drains, with a stream that is still open, and whose next ones are silent, next
    // to one that serves; four calls of 100 ms at a time, without retries. Expected: one fails, and none of those after it.
    let dials = AtomicUsize::new(0);
    let drains = served_by(|mut connection| async move {
        let mut held = Vec::new();
        while let Some(call) = connection.accept().await {
            held.push(call);
            connection.graceful_shutdown();
        }
    });
    let first = move || match dials.fetch_add(1, Ordering::SeqCst) {
        0 => drains(),
        _ => silent(),
    };
    let timeout = Duration::from_millis(100);
    let settings = builder().retry(RetryPolicy::none()).timeout(timeout);
    let client = of_two(settings, first, Fake::new().connector());
    let _stream = client.stream();
    // Time is paused: it passes once the connection drains.
    tokio::time::sleep(timeout).await;
    let mut failed = 0;
    for _ in 0..20 {
        let calls = (0..4).map(|_| client.fetch_blocks("d", &[1]));
        let outcomes = futures_util::future::join_all(calls).await;
        failed += outcomes.iter().filter(|outcome| outcome.is_err()).count();
        // Their rate is the scenario: a server may be avoided for a time.
        tokio::time::sleep(timeout).await;
    }
    assert_eq!(failed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_silent_fails_few_requests_of_streams() {
    // Scenario: as above, with a stream to the silent server, on which a request gets no answer in time; then 20 streams of a
    // request each. Expected: none of these fails.
    let settings = builder().timeout(Duration::from_millis(100));
    let client = of_two(settings, silent, Fake::new().connector());
    let error = client.stream().fetch_blocks("d", &[1]).await.unwrap_err();
    assert!(matches!(error, Error::DeadlineExceeded), "{error:?}");
    for _ in 0..20 {
        client.stream().fetch_blocks("d", &[1]).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_answer_is_no_reason_to_avoid_a_server() {
    // Scenario: the first call to one of two servers is not answered in time, but a ping is; then there are 20 more; the same
    // with one server, and one more at once. Expected: they are spread over both; it is answered.
    let slow = || {
        Fake::new().on_blocks(|n, request| async move {
            if n == 0 {
                std::future::pending::<()>().await;
            }
            Ok(blocks(&request.get_ref().indices))
        })
    };
    let late = async |client: &Client| {
        let error = client.fetch_blocks("d", &[1]).await.unwrap_err();
        assert!(matches!(error, Error::DeadlineExceeded), "{error:?}");
    };
    let settings = builder().timeout(Duration::from_millis(100));
    let only = slow().client_with(settings.clone());
    late(&only).await;
    only.fetch_blocks("d", &[1]).await.unwrap();

    let (slow, other) = (slow(), Fake::new());
    let client = of_two(settings, slow.connector(), other.connector());
    late(&client).await;
    // The ping is answered once it gets a call again.
    while slow.calls() == 1 {
        client.fetch_blocks("d", &[1]).await.unwrap();
        assert!(other.calls() < 20, "it is avoided");
    }
    let before = (slow.calls(), other.calls());
    for _ in 0..20 {
        client.fetch_blocks("d", &[1]).await.unwrap();
    }
    let calls = (slow.calls() - before.0, other.calls() - before.1);
    assert!(
        (9..=11).contains(&calls.0) && calls.0 + calls.1 == 20,
        "{calls:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_server_that_cannot_be_reached_is_not_reported_as_a_slow_one() {
    // Scenario: a server that takes no connection and refuses none, with the default settings and with a timeout that is
    // shorter than a connection may take; a call that waits for its turn until a connection is open. Expected: transport errors
    // that say so, and that nothing was sent, when the time is up.
    let never = || -> Dialled { Box::pin(std::future::pending()) };
    let short = Duration::from_secs(1);
    for (settings, seconds, text) in [
        (builder(), 10, "no connection within 5s"),
        (builder().timeout(short), 1, "no connection"),
        (builder().timeout(short).max_in_flight(1), 1, "no connection"),
    ] {
        let client = settings.connect_lazy_with(never).unwrap();
        let begin = Instant::now();
        let (first, second) = tokio::join!(client.fetch_blocks("d", &[1]), client.get_dataset("d"));
        assert_eq!(begin.elapsed().as_secs(), seconds);
        let error = first.unwrap_err();
        assert!(matches!(error, Error::Transport { sent: false, .. }), "{error:?}");
        assert!(error.to_string().contains(text), "{error}");
        second.unwrap_err();
        // A stream breaks with its connection.
        let error = client.stream().fetch_blocks("d", &[1]).await.unwrap_err();
        assert_ne!(error.code(), Some(Code::DeadlineExceeded), "{error:?}");
        assert!(error.to_string().contains("no connection"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_reason_of_an_attempt_outlives_one_that_was_not_sent() {
    // Scenario: a server that is unavailable and then gone; a call that may take less than a connection. Expected: its status,
    // when the time is up.
    let hint = Duration::from_millis(500);
    let fake =
        Fake::new().on_blocks(move |_, _| async move { Err(with_hint(tonic::Code::Unavailable, hint)) });
    let (dials, pipes) = (AtomicUsize::new(0), Pipes::default());
    let connector = pipes.through(fake.connector());
    let settings = builder().timeout(Duration::from_secs(4));
    let client = settings.connect_lazy_with(move || -> Dialled {
        if dials.fetch_add(1, Ordering::SeqCst) > 0 {
            return Box::pin(std::future::pending());
        }
        connector()
    });
    let client = client.unwrap();
    let mut call = pin!(client.fetch_blocks("d", &[1]));
    // It waits for its second attempt then.
    assert!(tokio::time::timeout(hint / 2, call.as_mut()).await.is_err());
    assert_eq!(fake.calls(), 1);
    pipes.cut();
    let begin = Instant::now();
    let error = call.await.unwrap_err();
    assert_eq!(error.code(), Some(Code::Unavailable), "{error:?}");
    assert_eq!(begin.elapsed().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn the_hint_of_a_server_delays_no_attempt_at_another() {
    // Scenario: a server that is overloaded for 400 ms, or for an hour, next to one that serves; then one that is overloaded
    // for 100 ms. Expected: an answer within the backoff; then a third attempt, at the first, after its 400 ms.
    let exhausted = |hint| with_hint(tonic::Code::ResourceExhausted, hint);
    let hint = Duration::from_millis(400);
    for hint in [hint, Duration::from_secs(3600)] {
        let first = Fake::new().on_blocks(move |_, _| async move { Err(exhausted(hint)) });
        let client = of_two(builder(), first.connector(), Fake::new().connector());
        let begin = Instant::now();
        client.fetch_blocks("d", &[1]).await.unwrap();
        assert!(
            begin.elapsed() <= Duration::from_millis(15),
            "{:?}",
            begin.elapsed()
        );
        assert_eq!(first.calls(), 1);
    }
    let first = Fake::new().on_blocks(move |n, request| async move {
        if n == 0 {
            return Err(exhausted(hint));
        }
        Ok(blocks(&request.get_ref().indices))
    });
    let other = Fake::new().on_blocks(move |_, _| async move { Err(exhausted(hint / 4)) });
    let client = of_two(builder(), first.connector(), other.connector());
    let begin = Instant::now();
    client.fetch_blocks("d", &[1]).await.unwrap();
    assert_eq!((first.calls(), other.calls()), (2, 1));
    let took = begin.elapsed();
    assert!(
        took >= hint && took <= hint + Duration::from_millis(35),
        "{took:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_hint_of_the_only_server_in_reach_is_kept() {
    // Scenario: a server that is overloaded once for 400 ms, or for an hour, next to one that takes no connection, and next to
    // one that refuses each. Expected: an answer after 400 ms; the refusal at once.
    let never: fn() -> Dialled = || Box::pin(std::future::pending());
    let refuses: fn() -> Dialled = || Box::pin(async { Err(std::io::ErrorKind::ConnectionRefused.into()) });
    for other in [never, refuses] {
        for (hint, calls) in [(Duration::from_millis(400), 2), (Duration::from_secs(3600), 1)] {
            let first = Fake::new().on_blocks(move |n, request| async move {
                if n == 2 {
                    return Err(with_hint(tonic::Code::ResourceExhausted, hint));
                }
                Ok(blocks(&request.get_ref().indices))
            });
            let client = of_two(builder(), first.connector(), other);
            // Dials the other one, too.
            client.fetch_blocks("d", &[1]).await.unwrap();
            client.fetch_blocks("d", &[1]).await.unwrap();
            let begin = Instant::now();
            let outcome = client.fetch_blocks("d", &[1]).await;
            assert_eq!(first.calls(), calls + 2, "{outcome:?}");
            assert_eq!(outcome.is_ok(), begin.elapsed() >= hint, "{outcome:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_a_request_of_a_stream_gets_the_next_call_last() {
    // Scenario: a stream to the first of two servers, which refuses a request for a second; then four calls. Expected: all go
    // to the other one.
    let refuses = Fake::new().on_stream(|mut requests, answers| async move {
        while let Ok(Some(request)) = requests.message().await {
            let reply = request_error(request.id, Code::Unavailable, 1000);
            answers.send(Ok(reply)).unwrap();
        }
    });
    let other = Fake::new();
    let settings = builder().retry(RetryPolicy::none());
    let client = of_two(settings, refuses.connector(), other.connector());
    let stream = client.stream();
    let error = stream.fetch_blocks("d", &[1]).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::Unavailable));
    drop(stream);
    for _ in 0..4 {
        client.fetch_blocks("d", &[1]).await.unwrap();
    }
    assert_eq!((refuses.calls(), other.calls()), (0, 4));
}
