//! Which clients are waited for, and how long: a connection that makes no progress is closed for a reason
//! that is counted, and clients that make progress are served meanwhile.

use crate::daemon::{Daemon, PATIENCE, Setup, eventually_async};
use crate::data::{noise, plain_blocks};
use crate::wire::{self, Narrow, Reconnecting, saying, with_small_buffer};
use ringfetch_proto::v1::fetch_stream_request::Request;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::Code;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const HALF_POST: &[u8] = b"POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nhost: localhost\r\n\
    content-type: application/json\r\ncontent-length: 999\r\n\r\n{";

/// Reads until the daemon closes the connection, in any way.
async fn hear_out(mut stream: TcpStream) {
    let mut bytes = [0; 4096];
    let closes = async { while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {} };
    timeout(PATIENCE, closes).await.expect("it closes");
}

#[tokio::test]
async fn whoever_does_not_come_on_is_closed_for_a_reason_that_is_counted() {
    // Scenario: each phase has a short timeout, and a connection stalls in each: nothing, half a head, a
    // preface alone, half a body, nothing after a request, a response that is not read. Expectation: each is
    // closed, and its reason counted.
    let (setup, _) = plain_blocks(Setup::new("pread"), 8192);
    let daemon = setup
        .set("timeouts.handshake_ms", "300")
        .set("timeouts.head_ms", "300")
        .set("timeouts.body_ms", "300")
        .set("timeouts.idle_ms", "300")
        .set("limits.deadline_ms", "600000")
        .start();
    let whole = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
    for (address, transport, words, reason) in [
        (daemon.http, "http", &b""[..], "handshake"),
        (
            daemon.http,
            "http",
            &b"GET /v1/datasets/blocks/blocks/0 HTTP/1.1\r\n"[..],
            "head",
        ),
        (daemon.grpc, "grpc", &PREFACE[..10], "handshake"),
        (daemon.grpc, "grpc", PREFACE, "head"),
        (daemon.http, "http", HALF_POST, "body"),
        (daemon.http, "http", whole, "idle"),
        (daemon.admin, "admin", &b""[..], "handshake"),
    ] {
        // Again, if this machine was so slow that an earlier phase took too long.
        eventually_async(&format!("{transport} is closed for {reason}"), async || {
            hear_out(saying(address, words).await).await;
            (daemon.closed(transport, reason).await > 0).then_some(())
        })
        .await;
    }

    daemon.logged(&["connections were closed; see reason", "127.0.0.1"]);
    daemon.assert_serves("blocks").await;
    daemon.stop().await;

    // With none of the other timeouts: this machine may be too slow for them, and the daemon would close the connection before
    // it has the request.
    let (setup, _) = plain_blocks(Setup::new("pread"), 8192);
    let daemon = setup
        .set("timeouts.send_ms", "300")
        .set("limits.deadline_ms", "600000")
        .start();
    let mut unread = with_small_buffer(daemon.http).await;
    unread
        .write_all(b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await
        .unwrap();
    daemon.has_closed("http", "send").await;
    let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
    let _held = narrow
        .call("FetchRanges", &[], &wire::ranges("blocks", &[(0, 3 << 20)]))
        .await;
    daemon.has_closed("grpc", "send").await;
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_stream_may_pause_and_a_slow_reader_may_be_slow() {
    // Scenario: short timeouts; a gRPC stream that was answered and sends nothing, and a reader that takes
    // slightly more than it must, until idle connections have been closed three times meanwhile. Expectation:
    // both continue.
    let (setup, bytes) = plain_blocks(Setup::new("pread"), 8192);
    let daemon = setup
        .set("timeouts.body_ms", "400")
        .set("timeouts.idle_ms", "400")
        .set("timeouts.send_ms", "10000")
        .set("timeouts.send_bytes_min", "1")
        .start();
    let (ask, asked) = tokio::sync::mpsc::channel(1);
    let mut fetch = daemon.fetch().await;
    let question = |id| wire::on_stream(id, Request::Blocks(wire::blocks("blocks", &[id])));
    ask.send(question(1)).await.unwrap();
    let asked = tokio_stream::wrappers::ReceiverStream::new(asked);
    let mut answers = fetch.fetch_stream(asked).await.unwrap().into_inner();
    assert_eq!(answers.message().await.unwrap().unwrap().id, 1);

    let mut slow = saying(
        daemon.http,
        b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    )
    .await;
    let mut got = vec![0; 256 << 10];
    slow.read_exact(&mut got).await.unwrap();
    for _ in 0..3 {
        let idle = saying(daemon.http, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        hear_out(idle).await;
        let mut more = vec![0; 256 << 10];
        slow.read_exact(&mut more).await.unwrap();
        got.extend(more);
    }
    ask.send(question(2)).await.unwrap();
    assert_eq!(answers.message().await.unwrap().unwrap().id, 2);
    slow.read_to_end(&mut got).await.unwrap();
    assert!(got.ends_with(&bytes), "{} bytes", got.len());
    drop((ask, answers));
    daemon.stop().await;
}

#[tokio::test]
async fn an_old_connection_is_told_to_go_away() {
    // Scenario: connections may reach an age of 300 ms, and a client sends one request after the other. Expectation:
    // every response is correct, the daemon had each call once, and its connection was replaced.
    let (setup, bytes) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup
        .set("timeouts.connection_age_ms", "300")
        .set("timeouts.connection_age_grace_ms", "60000")
        .start();
    let (http, grpc) = (daemon.http_client(), Reconnecting::new(daemon.grpc));
    let mut calls = 0;
    eventually_async("both transports have replaced a connection", async || {
        let block = &bytes[4096..8192];
        let answer = http.get("/v1/datasets/blocks/blocks/1").await;
        assert!(answer.status == 200 && answer.body == block, "{answer:?}");
        let called = grpc.call("FetchBlocks", &wire::blocks("blocks", &[1])).await;
        let (body, status) = called.rest().await;
        assert_eq!(status.unwrap().code(), Code::Ok);
        assert!(body.ends_with(block));
        calls += 1;
        let ages = [
            daemon.closed("http", "age").await,
            daemon.closed("grpc", "age").await,
        ];
        ages.iter().all(|count| *count > 0).then_some(())
    })
    .await;
    let of_calls = [("transport", "grpc"), ("method", "FetchBlocks")];
    assert_eq!(daemon.sum("ringfetch_rpc_requests_total", &of_calls).await, calls);
    daemon.stop().await;
}

#[tokio::test]
async fn an_old_connection_of_http1_gets_one_more_answer() {
    // Scenario: an idle HTTP/1 connection, after a response, becomes too old, and then its client sends
    // another request. Expectation: the response announces that the connection closes, and it closes.
    let (setup, bytes) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup
        .set("timeouts.connection_age_ms", "300")
        .set("timeouts.connection_age_grace_ms", "60000")
        .start();
    let old = kept_alive(daemon.http).await;
    // Checked on younger connections.
    daemon.has_closed("http", "age").await;
    gets_its_last_answer(old, &bytes[4096..8192]).await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_connection_of_http1_gets_one_more_answer_before_a_drain() {
    // Scenario: the daemon is about to drain, and a client sends requests on a connection that it had before,
    // and on a new one. Expectation: both responses announce that the connection closes, and both close.
    let (setup, bytes) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.set("shutdown.lame_duck_ms", "600000").start();
    let old = kept_alive(daemon.http).await;
    daemon.signal(rustix::process::Signal::TERM);
    eventually_async("it is not ready", async || {
        (daemon.http_client().get("/readyz").await.status == 503).then_some(())
    })
    .await;
    gets_its_last_answer(old, &bytes[4096..8192]).await;
    let new = TcpStream::connect(daemon.http).await.unwrap();
    gets_its_last_answer(new, &bytes[4096..8192]).await;
}

/// An HTTP/1.1 connection after one response.
async fn kept_alive(address: SocketAddr) -> TcpStream {
    // Again, if this machine was so slow that the connection was too old for a second one.
    eventually_async("a connection stays open", async || {
        let mut stream = saying(address, b"HEAD /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        let head = next_head(&mut stream).await;
        assert!(head.starts_with("http/1.1 200"), "{head}");
        (!head.contains("connection: close")).then_some(stream)
    })
    .await
}

async fn next_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8_lossy(&head).to_lowercase()
}

/// Requests block 1 until a response announces that the connection closes; then it must close.
async fn gets_its_last_answer(mut stream: TcpStream, block: &[u8]) {
    eventually_async("an answer says that the connection closes", async || {
        stream
            .write_all(b"GET /v1/datasets/blocks/blocks/1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await
            .unwrap();
        let head = next_head(&mut stream).await;
        let mut answer = vec![0; block.len()];
        stream.read_exact(&mut answer).await.unwrap();
        assert!(answer == block, "{head}");
        head.contains("\r\nconnection: close\r\n").then_some(())
    })
    .await;
    assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn frames_without_a_purpose_close_their_connection() {
    // Scenario: endless pings, settings and frames of unknown types. Expectation: their connections are
    // closed as floods, or by the protocol itself, and others are served.
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.start();
    let ping = [&[0, 0, 8, 6, 0, 0, 0, 0, 0][..], &[7; 8]].concat();
    let settings = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    let unknown = [&[0, 0x3f, 0xff, 0xee, 0, 0, 0, 0, 0][..], &[0; 0x3fff]].concat();
    for frame in [ping, settings, unknown] {
        let stream = saying(daemon.grpc, PREFACE).await;
        let (mut read, mut write) = stream.into_split();
        let volley = frame.repeat(1 + (64 << 10) / frame.len());
        let sending = async { while write.write_all(&volley).await.is_ok() {} };
        let hearing = async {
            let mut bytes = vec![0; 64 << 10];
            while read.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
        };
        tokio::join!(sending, hearing);
    }
    daemon.has_closed("grpc", "flood").await;
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

#[tokio::test]
async fn half_connections_do_not_keep_others_out() {
    // Scenario: 40 connections per port, and 150 half-sent POSTs, half heads and silent connections on HTTP;
    // 150 silent ones on gRPC and admin. Expectation: probes, metrics, reads and the admin service respond
    // each time, and the oldest of the half-open ones have been closed for it.
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.set("limits.connections", "40").start();
    let mut half = Vec::new();
    for _ in 0..50 {
        for words in [HALF_POST, &HALF_POST[..40], b""] {
            half.push(saying(daemon.http, words).await);
        }
        for address in [daemon.grpc, daemon.admin] {
            for _ in 0..3 {
                half.push(saying(address, b"").await);
            }
        }
    }
    for path in ["/livez", "/readyz", "/metrics", "/v1/datasets/blocks/blocks/0"] {
        assert_eq!(daemon.http_client().get(path).await.status, 200, "{path}");
    }
    daemon.assert_serves("blocks").await;
    assert_eq!(daemon.status().await.state, "serving");
    for transport in ["http", "grpc", "admin"] {
        // Each is open until its core, which may wait for a CPU, has closed it.
        eventually_async(
            &format!("{transport}: 110 were closed, and 40 are open"),
            async || {
                let open = daemon
                    .sum("ringfetch_connections", &[("transport", transport)])
                    .await;
                (daemon.closed(transport, "evicted").await >= 110 && open <= 40).then_some(())
            },
        )
        .await;
    }
    // The evicted ones see the close.
    hear_out(half.remove(0)).await;
    daemon.stop().await;
}

#[tokio::test]
async fn busy_connections_keep_their_places() {
    // Scenario: a port for two connections, both with responses that one caller does not read. Another caller
    // connects from another address; then the first caller a third time. Expectation: the other caller
    // replaces the oldest connection; the first caller's new connection is refused.
    let (setup, _) = plain_blocks(Setup::new("pread"), 8192);
    let daemon = setup.set("limits.connections", "2").start();
    let request = b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut unread = Vec::new();
    for _ in 0..2 {
        let mut stream = saying(daemon.http, request).await;
        stream.read_exact(&mut [0; 12]).await.unwrap();
        unread.push(stream);
    }
    hear_out(saying(daemon.http, request).await).await;
    let other = daemon.http_client_from([127, 0, 0, 2].into());
    for reason in ["evicted", "refused"] {
        let line = format!("ringfetch_connections_closed_total{{reason=\"{reason}\",transport=\"http\"}} 1");
        eventually_async(&line, async || {
            let metrics = String::from_utf8(other.get("/metrics").await.body.to_vec()).unwrap();
            metrics.lines().any(|found| found == line).then_some(())
        })
        .await;
    }
    hear_out(unread.remove(0)).await;
    drop(unread);
    daemon.stop().await;
}

#[tokio::test]
async fn pages_in_browsers_reach_nothing() {
    // Scenario: what a page in a browser can send: a foreign host name, on a path of the fast path, of the
    // router, and on an unknown one, over HTTP/1.1 and HTTP/2; and to the admin port a POST in HTTP/1.1, and
    // one in HTTP/2 that is not gRPC. Expectation: 421 that names the key; no response from the service, and
    // nothing is reloaded.
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.start();
    let http = daemon.http_client();
    for path in [
        "/v1/datasets/blocks/blocks/0",
        "/v1/datasets",
        "/livez",
        "/nowhere",
    ] {
        let answer = http.get_with(path, &[("host", "evil.example")]).await;
        answer.is_problem(421, "misdirected", None, &["http.hosts"]);
        let own = [("host", "rebound.localhost:7411")];
        assert!(http.get_with(path, &own).await.status != 421, "{path}");
    }
    let mut narrow = Narrow::connect(daemon.http, 65_535).await;
    let held = narrow
        .ask("/v1/datasets", &[("host", "evil.example")], bytes::Bytes::new())
        .await;
    assert_eq!(held.head.status, 421);

    let reload = "/ringfetch.v1.AdminService/Reload";
    let simple = format!(
        "POST {reload} HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\n\0\0\0\0\0"
    );
    hear_out(saying(daemon.admin, simple.as_bytes()).await).await;
    let mut narrow = Narrow::connect(daemon.admin, 65_535).await;
    let nothing = bytes::Bytes::from_static(&[0; 5]);
    for content_type in ["text/plain", "application/grpc-web", "application/grpcx"] {
        let held = narrow
            .ask(reload, &[("content-type", content_type)], nothing.clone())
            .await;
        assert_eq!(held.head.status, 415, "{content_type}");
    }
    let foreign = [("content-type", "application/grpc"), ("host", "evil.example")];
    assert_eq!(
        narrow.ask(reload, &foreign, nothing.clone()).await.head.status,
        421
    );
    let scrape = daemon.scrape().await;
    assert_eq!(scrape.sum("ringfetch_config_reloads_total", &[]), 0);
    assert!(scrape.sum("ringfetch_requests_refused_total", &[("reason", "host")]) >= 6);
    assert!(scrape.sum("ringfetch_requests_refused_total", &[("reason", "content_type")]) >= 3);
    let own = [("content-type", "application/grpc"), ("te", "trailers")];
    let held = narrow.ask(reload, &own, nothing).await;
    assert_eq!(held.head.status, 200);
    daemon.stop().await;
}

#[tokio::test]
async fn what_concerns_no_resource_is_answered_as_http_has_it() {
    // Scenario: OPTIONS for the whole server, other methods and paths like it, and a Host that is none. Expectation: no
    // content (RFC 9110 9.3.7); 404; 400 (RFC 9112 3.2).
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.start();
    for (line, host, status) in [
        ("OPTIONS *", "localhost", "204"),
        ("GET *", "localhost", "404"),
        ("OPTIONS /*", "localhost", "404"),
        ("GET /livez", "localhost:x", "400"),
        ("GET /livez", "local host", "400"),
    ] {
        let request = format!("{line} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let mut answer = String::new();
        let mut stream = saying(daemon.http, request.as_bytes()).await;
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request}{answer}"
        );
        assert!(status != "204" || answer.ends_with("\r\n\r\n"), "{answer}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_configured_name_is_accepted() {
    // Scenario: a list of two names. Expectation: these and loopback names are accepted, and no others.
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.set("http.hosts", "more.example, data.example").start();
    let http = daemon.http_client();
    for (host, status) in [
        ("data.example", 200),
        ("localhost:1", 200),
        ("other.example", 421),
    ] {
        assert_eq!(
            http.get_with("/livez", &[("host", host)]).await.status,
            status,
            "{host}"
        );
    }
    daemon.stop().await;
}

#[tokio::test]
async fn readiness_ends_before_service_and_probes_after_it() {
    // Scenario: SIGTERM with time as a lame duck; then a drain that an unread response holds up. Expectation:
    // first it is not ready while both transports still serve new connections; then the gRPC port is closed,
    // HTTP serves probes, metrics and status on new connections and refuses data, and the admin service
    // responds; exit 1 for the aborted response.
    let setup = Setup::new("pread");
    setup.file("large.bin", &noise(7, 16 << 20));
    let setup = setup.dataset(&["{name: blocks, kind: blocks, block_bytes: 4KiB, path: large.bin}"]);
    let mut daemon = setup
        // Longer than everything takes in each phase, on a busy machine too.
        .set("shutdown.lame_duck_ms", "8000")
        .set("shutdown.drain_timeout_ms", "12000")
        .start();
    let mut unread = saying(
        daemon.http,
        b"GET /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\n\r\n",
    )
    .await;
    unread.read_exact(&mut [0; 12]).await.unwrap();
    daemon.signal(rustix::process::Signal::TERM);
    eventually_async("it is not ready", async || {
        (daemon.http_client().get("/readyz").await.status == 503).then_some(())
    })
    .await;
    let state = async || daemon.http_client().get("/v1/status").await.json()["state"].clone();
    assert_eq!(state().await, "draining");
    daemon.assert_serves("blocks").await;
    eventually_async("the gRPC port is closed", async || {
        TcpStream::connect(daemon.grpc).await.err()
    })
    .await;
    for path in ["/", "/livez", "/metrics"] {
        assert_eq!(daemon.http_client().get(path).await.status, 200, "{path}");
    }
    assert_eq!(state().await, "draining");
    let refused = daemon.http_client().get("/v1/datasets/blocks/blocks/0").await;
    refused.is_problem(503, "draining", None, &["draining"]);
    assert_eq!(refused.header("retry-after"), "1");
    let counted = [("transport", "http"), ("reason", "draining")];
    let refusals = daemon.sum("ringfetch_requests_refused_total", &counted);
    assert_eq!(refusals.await, 1);
    // The status is collected a few times a second.
    eventually_async("the status counts the refusal", async || {
        let status = daemon.http_client().get("/v1/status").await.json();
        (status["totals"]["rejected_total"] == 1).then_some(())
    })
    .await;
    assert_eq!(daemon.status().await.state, "draining");
    daemon.ends_with(1).await;
    daemon.logged(&["shutdown.drain_timeout_ms (12000) passed with 1 connections open"]);
}

#[tokio::test]
async fn an_answer_to_half_a_request_says_that_the_connection_closes() {
    // Scenario: requests of HTTP/1.1 that are answered before their body has arrived: refused, and served
    // although they have one; and one whose body ends in a chunk that is none. Expectation: each response announces
    // that the connection closes, and it does; a request whose body arrives whole keeps its connection, also if
    // nothing reads it. A HEAD answered by 304 has no length, since 0 would be wrong.
    let (setup, _) = plain_blocks(Setup::new("pread"), 8);
    let daemon = setup.start();
    for (line, status) in [
        ("POST /nope", "404"),
        ("POST /v1/datasets", "405"),
        ("POST /v1/datasets/blocks/blocks:batchFetch", "415"),
        ("GET /livez", "200"),
        ("GET /v1/datasets/blocks/blocks/1", "200"),
        ("GET /v1/datasets/blocks/blocks/8", "404"),
    ] {
        let request = format!(
            "{line} HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 100000\r\n\r\nhalf"
        );
        let mut stream = saying(daemon.http, request.as_bytes()).await;
        let head = next_head(&mut stream).await;
        assert!(
            head.starts_with(&format!("http/1.1 {status}")) && head.contains("\r\nconnection: close\r\n"),
            "{line}: {head}"
        );
        let mut rest = Vec::new();
        // The daemon may close before it has read what was sent, which resets the connection.
        let _closed = stream.read_to_end(&mut rest).await;
    }
    let broken = "POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nhost: localhost\r\n\
                  content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n";
    let mut stream = saying(daemon.http, broken.as_bytes()).await;
    let head = next_head(&mut stream).await;
    assert!(
        head.starts_with("http/1.1 400") && head.contains("\r\nconnection: close\r\n"),
        "{head}"
    );
    let _closed = stream.read_to_end(&mut Vec::new()).await;
    let whole = "POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nhost: localhost\r\n\
                 content-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    let mut stream = saying(daemon.http, whole.as_bytes()).await;
    let head = next_head(&mut stream).await;
    assert!(
        head.starts_with("http/1.1 400") && !head.contains("connection: close"),
        "{head}"
    );
    one_connection_for_small_bodies(&daemon).await;
    let unchanged = "HEAD /v1/datasets/blocks/bytes HTTP/1.1\r\nhost: localhost\r\nif-none-match: *\r\n\r\n";
    let head = next_head(&mut saying(daemon.http, unchanged.as_bytes()).await).await;
    assert!(
        head.starts_with("http/1.1 304") && !head.contains("content-length"),
        "{head}"
    );
    daemon.stop().await;
}

/// Small bodies that nothing reads, as one piece and in chunks: they come with the head or after it, all on one
/// connection.
async fn one_connection_for_small_bodies(daemon: &Daemon) {
    let head = |rest: &str| format!("POST /nope HTTP/1.1\r\nhost: localhost\r\n{rest}\r\n\r\n");
    let mut stream = saying(daemon.http, b"").await;
    for (head, body) in [
        (head("content-length: 4"), "body"),
        (head("transfer-encoding: chunked"), "4\r\nbody\r\n0\r\n\r\n"),
    ] {
        for is_apart in [false, true] {
            if is_apart {
                // Two segments: the second waits for the first's acknowledgement.
                stream.write_all(head.as_bytes()).await.unwrap();
                stream.write_all(body.as_bytes()).await.unwrap();
            } else {
                stream
                    .write_all([&head[..], body].concat().as_bytes())
                    .await
                    .unwrap();
            }
            let answer = next_head(&mut stream).await;
            assert!(
                answer.starts_with("http/1.1 404") && !answer.contains("connection: close"),
                "{answer}"
            );
            skip_body(&answer, &mut stream).await;
        }
    }
    // More than is read, complete but of no declared length.
    let long = format!("{:x}\r\n{}\r\n0\r\n\r\n", 200_000, "x".repeat(200_000));
    let request = head("transfer-encoding: chunked") + &long;
    let answer = next_head(&mut saying(daemon.http, request.as_bytes()).await).await;
    assert!(
        answer.starts_with("http/1.1 404") && answer.contains("\r\nconnection: close\r\n"),
        "{answer}"
    );
    // A body that does not come, and one that waits to be asked for.
    for rest in ["content-length: 4", "content-length: 4\r\nexpect: 100-continue"] {
        let mut stream = saying(daemon.http, head(rest).as_bytes()).await;
        let answer = next_head(&mut stream).await;
        assert!(
            answer.starts_with("http/1.1 404") && answer.contains("\r\nconnection: close\r\n"),
            "{answer}"
        );
    }
}

/// Reads the body of a response with this head.
async fn skip_body(head: &str, stream: &mut TcpStream) {
    let length = head.split("content-length: ").nth(1).expect("a length");
    let length = length.split("\r\n").next().unwrap().parse().unwrap();
    stream.read_exact(&mut vec![0; length]).await.unwrap();
}
