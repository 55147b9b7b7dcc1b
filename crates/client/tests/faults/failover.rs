//! Several servers of which one is silent, slow, unreachable or overloaded. Time is paused.

use crate::fake::{BoxFuture, Fake};
use ringfetch_client::{Builder, Client, Code, Error};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::DuplexStream;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Status;
use tonic_types::{ErrorDetails, StatusExt as _};

type Dialled = BoxFuture<std::io::Result<DuplexStream>>;

fn builder() -> Builder {
    Client::builder("http://fake:1")
}

fn accepts(_: usize) -> bool {
    false
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
    }
}

#[tokio::test(start_paused = true)]
async fn the_reason_of_an_attempt_outlives_one_that_was_not_sent() {
    // Scenario: a server that is unavailable and then gone; a call that may take less than a connection. Expected: its status,
    // when the time is up.
    let hint = Duration::from_millis(500);
    let fake = Fake::new().on_blocks(move |_, _| async move {
        let details = ErrorDetails::with_retry_info(Some(hint));
        Err(Status::with_error_details(
            tonic::Code::Unavailable,
            "draining",
            details,
        ))
    });
    let (dials, pipe) = (AtomicUsize::new(0), Arc::new(Mutex::new(JoinSet::new())));
    let (connector, running) = (fake.connector(accepts), Arc::clone(&pipe));
    let settings = builder().timeout(Duration::from_secs(4));
    let client = settings.connect_lazy_with(move || -> Dialled {
        if dials.fetch_add(1, Ordering::SeqCst) > 0 {
            return Box::pin(std::future::pending());
        }
        let (dialled, running) = (connector(), Arc::clone(&running));
        Box::pin(async move {
            let mut server = dialled.await?;
            let (near, mut far) = tokio::io::duplex(1 << 16);
            running.lock().unwrap().spawn(async move {
                drop(tokio::io::copy_bidirectional(&mut far, &mut server).await);
            });
            Ok(near)
        })
    });
    let client = client.unwrap();
    let mut call = pin!(client.fetch_blocks("d", &[1]));
    // It waits for its second attempt then.
    assert!(tokio::time::timeout(hint / 2, call.as_mut()).await.is_err());
    assert_eq!(fake.calls(), 1);
    pipe.lock().unwrap().abort_all();
    let begin = Instant::now();
    let error = call.await.unwrap_err();
    assert_eq!(error.code(), Some(Code::Unavailable), "{error:?}");
    assert_eq!(begin.elapsed().as_secs(), 3);
}
