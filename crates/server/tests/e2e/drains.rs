//! Draining, idle and under load: no client gets a broken response, each learns to go elsewhere, and the
//! process ends in time.
//!
//! Clients run on one thread: a request handed to a hyper connection that is just ending on another thread
//! may neither complete nor fail (hyperium/hyper#2312); on a busy machine that hung this test about once in a
//! hundred runs.

use crate::backlog::{batch, slow};
use crate::daemon::{Daemon, PATIENCE, Setup, any_backend, backends, eventually, eventually_async};
use crate::data::plain_blocks;
use crate::tls::{Authority, with_tls};
use crate::wire::{self, Http, Narrow, channel};
use ringfetch_proto::v1::fetch_stream_request::Request;
use rustix::process::Signal;
use std::future::pending;
use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::timeout;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConnection, StreamOwned, version};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

const COUNT: u64 = 512;
/// Blocks of a file that does not fit in the socket buffers of a client that does not read.
const LONG_COUNT: usize = 4096;

/// Reads until refused; every response before that is complete and correct.
async fn unary(daemon: &Daemon, bytes: &[u8], answered: &AtomicU64, seed: u64) {
    let mut fetch = daemon.fetch().await;
    for round in seed.. {
        let indices: Vec<u64> = (0..16).map(|item| (round * 31 + item * 77) % COUNT).collect();
        match fetch.fetch_blocks(wire::blocks("blocks", &indices)).await {
            Ok(answer) => {
                let expected: Vec<u8> = indices
                    .iter()
                    .flat_map(|index| of(bytes, *index))
                    .copied()
                    .collect();
                assert!(answer.into_inner().data == expected, "wrong bytes");
                answered.fetch_add(1, Ordering::Relaxed);
            }
            Err(status) => {
                assert!(
                    status.code() == Code::Unavailable || was_not_sent(&status),
                    "{status:?}"
                );
                return;
            }
        }
    }
}

/// Whether a call was never sent, because its connection got a GOAWAY first. Clients may retry it elsewhere;
/// tonic reports CANCELLED or INTERNAL, depending on where the two crossed.
fn was_not_sent(status: &tonic::Status) -> bool {
    let sources = std::iter::successors(std::error::Error::source(status), |error| error.source());
    let mut hyper = sources.filter_map(|error| error.downcast_ref::<hyper::Error>());
    hyper.any(|error| error.is_canceled() || format!("{error:?}").contains("GoAway(b\"\", NO_ERROR, Remote)"))
}

/// The same on one stream that never ends by itself.
async fn streamed(daemon: &Daemon, bytes: &[u8], answered: &AtomicU64) {
    let requests =
        (0..u64::MAX).map(|id| wire::on_stream(id, Request::Blocks(wire::blocks("blocks", &[id % COUNT]))));
    let mut fetch = daemon.fetch().await;
    let mut answers = wire::stream(&mut fetch, requests).await;
    loop {
        match answers.message().await {
            Ok(Some(answer)) => {
                let id = answer.id;
                match wire::blocks_of(answer.response) {
                    Ok(blocks) => assert!(blocks.data == of(bytes, id % COUNT), "wrong bytes"),
                    Err(error) => assert_eq!(error.code, i32::from(Code::Unavailable), "{error:?}"),
                }
                answered.fetch_add(1, Ordering::Relaxed);
            }
            Ok(None) => panic!("the stream ended as if it had been told everything"),
            Err(status) => {
                assert_eq!(status.code(), Code::Unavailable, "{status:?}");
                return;
            }
        }
    }
}

/// The same over HTTP/1.1, with long responses.
async fn over_http(http: Http, bytes: &[u8], answered: &AtomicU64) {
    for round in 0.. {
        let from = round * 4097 % 1_000_000;
        let range = format!("bytes={from}-{}", from + 999_999);
        // A truncated body fails the client itself.
        let Some(answer) = http
            .try_get("/v1/datasets/blocks/bytes", &[("range", &range)])
            .await
        else {
            return;
        };
        if answer.status == 503 {
            answer.is_problem(503, "draining", None, &["draining"]);
            assert_eq!(answer.header("retry-after"), "1");
            return;
        }
        assert_eq!(answer.status, 206, "{answer:?}");
        assert!(answer.body == bytes[from..from + 1_000_000], "wrong bytes");
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

/// Ready until it is not; never ready again after the signal.
async fn readiness(http: Http, signalled: &AtomicU64) {
    loop {
        let late = signalled.load(Ordering::Acquire) > 0;
        match http.try_get("/readyz", &[]).await {
            // A signalled daemon may report ready once more: the signal is still on its way.
            Some(answer) if answer.status == 200 && !late => {}
            Some(answer) if answer.status == 200 => eventually_ends(&http).await,
            Some(answer) => assert_eq!(answer.status, 503, "{answer:?}"),
            None => return,
        }
        tokio::task::yield_now().await;
    }
}

async fn eventually_ends(http: &Http) {
    eventually_async("readiness ends", async || {
        let answer = http.try_get("/readyz", &[]).await;
        answer.is_none_or(|answer| answer.status == 503).then_some(())
    })
    .await;
}

/// A watch of the daemon's health, which is SERVING.
async fn watch(daemon: &Daemon) -> Streaming<HealthCheckResponse> {
    let mut health = HealthClient::new(channel(daemon.grpc).await);
    let request = HealthCheckRequest {
        service: "ringfetch.v1.FetchService".to_owned(),
    };
    let mut changes = health.watch(request).await.unwrap().into_inner();
    assert_eq!(next(&mut changes).await, Some(ServingStatus::Serving));
    changes
}

async fn next(changes: &mut Streaming<HealthCheckResponse>) -> Option<ServingStatus> {
    changes.message().await.unwrap().map(|answer| answer.status())
}

async fn watched_to_the_end(mut changes: Streaming<HealthCheckResponse>) {
    assert_eq!(next(&mut changes).await, Some(ServingStatus::NotServing));
    assert_eq!(next(&mut changes).await, None);
}

#[tokio::test]
async fn a_drain_under_load_breaks_no_answer() {
    // Scenario: clients of every kind read without pause when SIGTERM or SIGINT arrives. Expectation: every
    // response that arrives is complete and correct; then UNAVAILABLE, 503, or a refused connection; the
    // watch sees NOT_SERVING; exit 0 long before the drain's timeout.
    let signals = [Signal::TERM, Signal::INT, Signal::TERM];
    for (&backend, signal) in backends().iter().zip(signals) {
        let (setup, bytes) = plain_blocks(Setup::new(backend), usize::try_from(COUNT).unwrap());
        let mut daemon = setup.set("shutdown.drain_timeout_ms", "600000").start();
        let (answered, signalled) = (AtomicU64::new(0), AtomicU64::new(0));
        let http = || daemon.http_client();
        // Opened before the clients get their first responses, after which the signal is sent.
        let changes = watch(&daemon).await;
        let stopper = async {
            eventually_async("the load is under way", async || {
                (answered.load(Ordering::Relaxed) > 300).then_some(())
            })
            .await;
            daemon.signal(signal);
            signalled.store(1, Ordering::Release);
        };
        tokio::join!(
            stopper,
            unary(&daemon, &bytes, &answered, 1),
            unary(&daemon, &bytes, &answered, 2),
            streamed(&daemon, &bytes, &answered),
            over_http(http(), &bytes, &answered),
            over_http(http(), &bytes, &answered),
            readiness(http(), &signalled),
            watched_to_the_end(changes),
        );
        daemon.ends_with(0).await;
        daemon.logged(&["\"drained\""]);
        let log = daemon.log().join("\n");
        assert!(!log.contains("ERROR"), "{log}");
    }
}

/// Sends a GET and leaves the response unread.
fn asked(address: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    stream
}

/// Waits until the daemon drains: then its gRPC port is closed.
fn drains(daemon: &Daemon) {
    eventually("the gRPC port is closed", PATIENCE, || {
        TcpStream::connect(daemon.grpc).err()
    });
}

fn list_services() -> ServerReflectionRequest {
    ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..ServerReflectionRequest::default()
    }
}

/// A reflection call that has got one response, and what sends its further requests.
async fn reflected(
    address: SocketAddr,
) -> (
    UnboundedSender<ServerReflectionRequest>,
    Streaming<ServerReflectionResponse>,
) {
    let (asks, asked) = tokio::sync::mpsc::unbounded_channel();
    asks.send(list_services()).unwrap();
    let mut reflection = ServerReflectionClient::new(channel(address).await);
    let asked = UnboundedReceiverStream::new(asked);
    let mut reflected = reflection
        .server_reflection_info(asked)
        .await
        .unwrap()
        .into_inner();
    assert!(reflected.message().await.unwrap().is_some());
    (asks, reflected)
}

#[tokio::test]
async fn idle_connections_are_not_waited_for() {
    // Scenario: each backend and each signal, without an admin port, with idle connections: one kept alive
    // after a response, one on each port that has sent nothing, one with a FetchStream on which nothing was
    // sent, and one with a reflection call that waits for its next request. Expectation: healthy, with the
    // right bytes, before the signal; both streams end with UNAVAILABLE; exit 0 after it, long before the
    // drain's timeout; the log says where the daemon listened and that it drained.
    let signals = [Signal::TERM, Signal::INT, Signal::TERM];
    for (&backend, signal) in backends().iter().zip(signals) {
        let (setup, bytes) = plain_blocks(Setup::new(backend), 16);
        let mut daemon = setup
            .set("admin.listen", "off")
            .set("timeouts.handshake_ms", "600000")
            .set("shutdown.drain_timeout_ms", "600000")
            .start();
        assert_eq!(daemon.admin.port(), 0);
        let http = daemon.http.to_string();
        let health = daemon.command(&["healthcheck", "--http-listen", &http]);
        assert!(health.status.success(), "{health:?}");
        let block = daemon.http_client().get("/v1/datasets/blocks/blocks/7").await;
        assert_eq!(block.status, 200);
        assert!(block.body == of(&bytes, 7), "wrong bytes");

        let mut kept = asked(daemon.http, "/livez");
        let mut first = [0; 12];
        kept.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        let _silent = [daemon.http, daemon.grpc].map(|address| TcpStream::connect(address).unwrap());
        let mut fetch = daemon.fetch().await;
        let stream = fetch.fetch_stream(tokio_stream::pending()).await.unwrap();
        let (_asks, mut reflected) = reflected(daemon.grpc).await;
        eventually_async("the open connections are counted", async || {
            let metrics = daemon.scrape().await;
            let open = |transport| metrics.sum("ringfetch_connections", &[("transport", transport)]);
            // HTTP has three: kept alive, silent, and the one of this request.
            ((open("http"), open("grpc")) == (3, 3)).then_some(())
        })
        .await;

        daemon.signal(signal);
        let mut stream = stream.into_inner();
        let end = timeout(PATIENCE, stream.message()).await;
        let end = end.expect("the end of the stream").unwrap_err();
        assert_eq!(end.code(), Code::Unavailable, "{end:?}");
        let end = timeout(PATIENCE, reflected.message()).await;
        let end = end.expect("the end of the reflection call").unwrap_err();
        assert_eq!(end.code(), Code::Unavailable, "{end:?}");
        daemon.ends_with(0).await;
        daemon.logged(&[&format!("\"address\":\"{http}\"")]);
        daemon.logged(&["\"drained\""]);
    }
}

#[tokio::test]
async fn a_response_in_flight_is_finished_first() {
    // Scenario: the client has begun to read a long response when the signal arrives. Expectation: new
    // connections are refused on gRPC, and get no data on HTTP; on the admin port a reflection call goes on; the response is
    // complete and correct; exit 0.
    let (setup, bytes) = plain_blocks(Setup::new(any_backend()), LONG_COUNT);
    let mut daemon = setup.set("shutdown.drain_timeout_ms", "60000").start();
    let mut stream = asked(daemon.http, "/v1/datasets/blocks/bytes");
    let mut answer = vec![0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, b"HTTP/1.1 200");
    daemon.signal(Signal::TERM);
    drains(&daemon);
    let refused = daemon.http_client().get("/v1/datasets/blocks/blocks/0").await;
    refused.is_problem(503, "draining", None, &["draining"]);
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(daemon.http_client().get("/livez").await.status, 200);
    let ready = daemon.http_client().get("/readyz").await;
    assert_eq!(
        (ready.status.as_u16(), &ready.json()["state"]),
        (503, &"draining".into())
    );
    let (asks, mut reflected) = reflected(daemon.admin).await;
    asks.send(list_services()).unwrap();
    assert!(reflected.message().await.unwrap().is_some());
    assert!(daemon.is_alive(), "{}", daemon.log().join("\n"));
    stream.read_to_end(&mut answer).unwrap();
    let head = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .unwrap();
    assert!(answer[head + 4..] == bytes, "wrong bytes");
    daemon.ends_with(0).await;
}

#[tokio::test]
async fn who_had_connected_and_not_spoken_is_told_of_the_drain() {
    // Scenario: connections that are silent until SIGTERM, and send a request right after it, to a daemon that the kernel does not
    // let run for longer than it waits for them. Expectation: each gets a response, 503 or the data; none is reset; exit 0.
    let (daemon, bytes, mut silent) = paused_in_a_drain(|setup| setup).await;
    for stream in &mut silent {
        stream.write_all(REQUEST).unwrap();
    }
    resumes_too_late(&daemon).await;
    all_are_answered(&mut silent, &bytes);
    ends(daemon, silent).await;
}

#[tokio::test]
async fn a_handshake_that_begins_in_a_drain_is_completed() {
    // Scenario: the same with TLS; what they send in time is the first message of a handshake, which takes a round trip more.
    // Expectation: as above.
    let authority = Authority::new();
    let pair = authority.pair("daemon");
    let (daemon, bytes, silent) = paused_in_a_drain(|setup| with_tls(setup, &pair)).await;
    let connector = authority.connector(&[&version::TLS13], &["http/1.1"]);
    let mut beginning: Vec<_> = silent
        .into_iter()
        .map(|mut stream| {
            let name = ServerName::from(daemon.http.ip());
            let mut tls = ClientConnection::new(Arc::clone(connector.config()), name).unwrap();
            tls.write_tls(&mut stream).unwrap();
            StreamOwned::new(tls, stream)
        })
        .collect();
    resumes_too_late(&daemon).await;
    for stream in &mut beginning {
        stream.write_all(REQUEST).unwrap();
    }
    all_are_answered(&mut beginning, &bytes);
    ends(daemon, beginning).await;
}

/// A daemon that has just begun to drain and is stopped, its block, and silent connections to its HTTP port.
async fn paused_in_a_drain(with: impl Fn(Setup) -> Setup) -> (Daemon, Vec<u8>, Vec<TcpStream>) {
    for _ in 0..20 {
        let (setup, bytes) = plain_blocks(Setup::new("mmap"), 1);
        let mut daemon = with(setup).set("shutdown.drain_timeout_ms", "60000").start();
        let connect = || {
            let stream = TcpStream::connect(daemon.http).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream
        };
        let silent = (0..16).map(|_| connect()).collect();
        let signalled = Instant::now();
        daemon.signal(Signal::TERM);
        drains(&daemon);
        // It waits for half a second. On a busy machine that may be over: then once more.
        if daemon.pause() && signalled.elapsed() <= Duration::from_millis(400) {
            return (daemon, bytes, silent);
        }
        daemon.signal(Signal::CONT);
        daemon.ends_with(0).await;
    }
    panic!("the daemon could not be paused within half a second")
}

/// It runs again when the time is over for which it waits for silent connections.
async fn resumes_too_late(daemon: &Daemon) {
    // The scenario's time, not one to wait for something.
    timeout(Duration::from_millis(600), pending::<()>())
        .await
        .unwrap_err();
    daemon.signal(Signal::CONT);
}

async fn ends<T>(mut daemon: Daemon, connections: Vec<T>) {
    drop(connections);
    daemon.ends_with(0).await;
}

const REQUEST: &[u8] = b"GET /v1/datasets/blocks/blocks/0 HTTP/1.1\r\nhost: localhost\r\n\r\n";

fn all_are_answered(streams: &mut [impl Read], bytes: &[u8]) {
    for stream in streams {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        is_answered(&answer, bytes);
    }
}

fn is_answered(answer: &[u8], bytes: &[u8]) {
    let is_whole = answer.starts_with(b"HTTP/1.1 200 ") && answer.ends_with(bytes);
    assert!(
        is_whole || answer.starts_with(b"HTTP/1.1 503 "),
        "{}",
        String::from_utf8_lossy(answer)
    );
}

#[tokio::test]
async fn what_is_in_flight_is_answered_however_long_the_queue() {
    // Scenario: four batches of 4096 reads wait for one reading thread when SIGTERM arrives; run twice.
    // Expectation: all of them are answered completely; exit 0.
    for _ in 0..2 {
        let setup = slow(Setup::new("pread")).set("shutdown.drain_timeout_ms", "600000");
        let mut daemon = setup.start();
        let mut calls = Vec::new();
        for _ in 0..4 {
            let mut fetch = daemon.fetch().await;
            calls.push(tokio::spawn(async move {
                fetch.fetch_blocks(wire::blocks("slow", &batch())).await
            }));
        }
        eventually_async("all four are accepted", async || {
            let items = daemon.scrape().await;
            let queued = items.sum("ringfetch_queued_reads", &[]);
            let taken_up = items.sum("ringfetch_device_reads_total", &[])
                + items.sum("ringfetch_joined_reads_total", &[]);
            (queued + taken_up >= 4 * 4096).then_some(())
        })
        .await;
        daemon.signal(Signal::TERM);
        for call in calls {
            let answer = call.await.unwrap().expect("an answer").into_inner();
            assert_eq!((answer.errors.len(), answer.data.len()), (0, 4096 * 512));
        }
        daemon.ends_with(0).await;
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_cannot_hold_the_daemon() {
    // Scenario: gRPC responses that are not read, on each backend, and a drain timeout of half a second.
    // Expectation: the daemon ends soon after it, with exit code 1 and a line that names the key and what was
    // aborted.
    for &backend in backends() {
        let (setup, _) = plain_blocks(Setup::new(backend), 1024);
        let setup = setup.set("shutdown.drain_timeout_ms", "500");
        let mut daemon = setup.set("log.format", "json").start();
        let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
        let held = narrow
            .call("FetchRanges", &[], &wire::ranges("blocks", &[(0, 3 << 20)]))
            .await;
        assert_eq!(held.head.status, 200);
        daemon.signal(Signal::TERM);
        daemon.ends_with(1).await;
        daemon.logged(&["shutdown.drain_timeout_ms (500) passed with 1 connections open"]);
        daemon.logged(&["the drain aborted", "\"timeout_ms\":500,"]);
    }
}

#[tokio::test]
async fn a_short_drain_is_clean_if_every_request_is_answered() {
    // Scenario: a drain timeout of 100 ms, in which no connection is closed whose client does nothing: one is kept alive
    // after a response, and one on each port has sent nothing. Expectation: exit 0.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 1);
    let mut daemon = setup.set("shutdown.drain_timeout_ms", "100").start();
    let mut kept = asked(daemon.http, "/livez");
    kept.read_exact(&mut [0; 12]).unwrap();
    let _silent = [daemon.http, daemon.grpc].map(|address| TcpStream::connect(address).unwrap());
    eventually_async("the open connections are counted", async || {
        let metrics = daemon.scrape().await;
        let open = |transport| metrics.sum("ringfetch_connections", &[("transport", transport)]);
        ((open("http"), open("grpc")) == (3, 1)).then_some(())
    })
    .await;
    daemon.signal(Signal::TERM);
    let status = daemon.ended().await;
    assert_eq!(status.code(), Some(0), "{}", daemon.log().join("\n"));
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    // Scenario: a drain that may wait ten minutes for a client of each transport, and a second signal of the
    // other kind. Expectation: the process ends at once, with the exit code for an interrupt.
    for (first, name, second) in [
        (Signal::INT, "SIGINT", Signal::TERM),
        (Signal::TERM, "SIGTERM", Signal::INT),
    ] {
        let (setup, _) = plain_blocks(Setup::new(any_backend()), LONG_COUNT);
        let mut daemon = setup.set("shutdown.drain_timeout_ms", "600000").start();
        let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
        let _held = narrow
            .call("FetchRanges", &[], &wire::ranges("blocks", &[(0, 3 << 20)]))
            .await;
        let mut unread = asked(daemon.http, "/v1/datasets/blocks/bytes");
        unread.read_exact(&mut [0; 12]).unwrap();
        daemon.signal(first);
        daemon.logged(&["draining", name]);
        daemon.signal(second);
        daemon.ends_with(130).await;
    }
}

/// How a client that opens a new connection for each request found the daemon gone.
#[derive(Debug, PartialEq, Eq)]
enum Farewell {
    /// Nothing listens.
    Refused,
    /// The connection was accepted and got no response.
    Reset,
}

/// Opens a new connection for each request until that fails; responses are complete reads or refusals.
fn knock_until_nobody_is_there(address: SocketAddr, answered: &AtomicU64) -> Farewell {
    const HEAD: &[u8] = b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\n\
        range: bytes=0-999999\r\nconnection: close\r\n\r\n";
    loop {
        let Ok(mut stream) = TcpStream::connect(address) else {
            return Farewell::Refused;
        };
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = Vec::new();
        if stream.write_all(HEAD).is_err() || stream.read_to_end(&mut answer).is_err() || answer.is_empty() {
            return Farewell::Reset;
        }
        let is_whole = answer.starts_with(b"HTTP/1.1 206 ") && answer.len() > 1_000_000;
        assert!(
            is_whole || answer.starts_with(b"HTTP/1.1 503 "),
            "{}",
            answer.len()
        );
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn who_asks_again_and_again_is_answered_until_nobody_listens() {
    // Scenario: eight clients without any pause between requests, each on a new connection, when SIGTERM
    // arrives. Expectation: responses, refusals, then a refused connection; at most one client, whose
    // handshake another CPU completes meanwhile, connects between the last accept and the closing of the port.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 2048);
    let mut daemon = setup.start();
    let (address, answered) = (daemon.http, AtomicU64::new(0));
    let farewells: Vec<Farewell> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| knock_until_nobody_is_there(address, &answered)))
            .collect();
        eventually("the load is under way", PATIENCE, || {
            (answered.load(Ordering::Relaxed) > 100).then_some(())
        });
        daemon.signal(Signal::TERM);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let resets = farewells
        .iter()
        .filter(|farewell| **farewell == Farewell::Reset)
        .count();
    assert!(resets <= 1, "{resets} of 8 were let in and not answered");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(daemon.ends_with(0));
}

fn of(bytes: &[u8], index: u64) -> &[u8] {
    &bytes[usize::try_from(index * 4096).unwrap()..][..4096]
}
