//! Responses that end early: the daemon cuts them short, or their client leaves.

use super::lines_of;
use crate::access::hash;
use crate::daemon::{Daemon, Setup, any_backend, eventually_async};
use crate::data::plain_blocks;
use crate::wire::{self, Narrow};
use prost::Message as _;
use ringfetch_proto::v1::fetch_stream_request::Request;
use rustix::process::Signal;
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

/// Many windows, so that most of them are not read before the client has read the first.
const LONG_BYTES: u64 = 32 << 20;
const WINDOW_BYTES: u32 = 64 << 10;

/// A dataset `long` and an object `objects/long`, both sparse; of the requests that succeed hardly any is logged.
fn long_files() -> Setup {
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    setup.file("long", b"");
    setup.file("objects/long", b"");
    for name in ["long", "objects/long"] {
        let file = OpenOptions::new().write(true).open(setup.path(name)).unwrap();
        file.set_len(LONG_BYTES).unwrap();
    }
    setup
        .dataset(&["name: long", "kind: blocks", "block_bytes: 4096", "path: long"])
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .set("access_log.path", "access.log")
        .set("access_log.sample", "4294967295")
        .set("access_log.slow_ms", "0")
}

/// Waits until requests of these methods are counted, with these codes.
async fn counted(daemon: &Daemon, expected: &[(&str, &str, u64)]) {
    eventually_async("the requests are counted", async || {
        let scrape = daemon.scrape().await;
        let is = |(method, code, count): &(&str, &str, u64)| {
            let labels = [("method", *method), ("code", *code)];
            scrape.sum("ringfetch_rpc_requests_total", &labels) == *count
        };
        expected.iter().all(is).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_response_that_the_daemon_cuts_short_has_failed() {
    // Scenario: a dataset is truncated and an object is written to while they are sent. Expectation: each client
    // sees a short body; the log, in spite of its sampling, and the metric have the code that the cause has before
    // the head.
    let daemon = long_files().start();
    // A connection each: one that is not read may take the whole window.
    let mut bytes = Narrow::connect(daemon.http, WINDOW_BYTES).await;
    let mut object = Narrow::connect(daemon.http, WINDOW_BYTES).await;
    let mut grpc = Narrow::connect(daemon.grpc, WINDOW_BYTES).await;
    let request = wire::object("objects", "long");
    let held = [
        bytes.ask_get("/v1/datasets/long/bytes").await,
        object.ask_get("/v1/datasets/objects/objects/long").await,
        grpc.call("ReadObject", &[], &request).await,
    ];
    let truncated = OpenOptions::new().write(true).open(daemon.path("long")).unwrap();
    truncated.set_len(4096).unwrap();
    let appended = OpenOptions::new().append(true).open(daemon.path("objects/long"));
    appended.unwrap().write_all(b"more").unwrap();
    for (held, code) in held.into_iter().zip(["500", "503", "ABORTED"]) {
        let id = held.head.headers["x-request-id"].to_str().unwrap().to_owned();
        // A failed call has its status in trailers.
        assert_eq!(held.ends_whole().await, code == "ABORTED", "{code}");
        let line = &lines_of(&daemon, &id, 1).await[0];
        assert_eq!(line["code"], code, "{line}");
        assert!(line["sent_bytes"].as_u64().unwrap() < LONG_BYTES, "{line}");
    }
    counted(
        &daemon,
        &[
            ("GetBytes", "500", 1),
            ("GetBytes", "200", 0),
            ("GetObject", "503", 1),
            ("GetObject", "200", 0),
            ("ReadObject", "ABORTED", 1),
        ],
    )
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_response_that_its_client_leaves_is_not_ok() {
    // Scenario: clients leave the body of a GET, over HTTP/2 unread and over HTTP/1 after its beginning, and that of
    // a unary call; others read theirs, or have asked for none. Expectation: 499 and CANCELLED for the former in
    // the log and the metric.
    let daemon = long_files().start();
    let mut http = Narrow::connect(daemon.http, 0).await;
    let mut grpc = Narrow::connect(daemon.grpc, 0).await;
    let left = [
        (http.ask_get("/v1/datasets/long/bytes").await, "499"),
        (http.ask_get("/v1/datasets/blocks/blocks/3").await, "499"),
        // Failed before its client left.
        (http.ask_get("/v1/datasets/blocks/blocks/999").await, "404"),
        (
            grpc.call("FetchBlocks", &[], &wire::blocks("blocks", &[1])).await,
            "CANCELLED",
        ),
    ];
    for (held, code) in left {
        let id = held.head.headers["x-request-id"].to_str().unwrap().to_owned();
        drop(held);
        let line = &lines_of(&daemon, &id, 1).await[0];
        assert_eq!(
            (&line["code"], &line["sent_bytes"]),
            (&json!(code), &json!(0)),
            "{line}"
        );
    }
    let mut stream = tokio::net::TcpStream::connect(daemon.http).await.unwrap();
    let asked = "GET /v1/datasets/long/bytes HTTP/1.1\r\nhost: localhost\r\nx-request-id: closed\r\n\r\n";
    stream.write_all(asked.as_bytes()).await.unwrap();
    stream.read_exact(&mut [0; 1000]).await.unwrap();
    drop(stream);
    assert_eq!(lines_of(&daemon, "closed", 1).await[0]["code"], "499");

    let client = daemon.http_client();
    assert_eq!(client.get("/v1/datasets/blocks/blocks/3").await.status, 200);
    let head = client.send(http::Method::HEAD, "/v1/datasets/blocks/blocks/3", &[], "");
    assert_eq!(head.await.status, 200);
    daemon.assert_serves("blocks").await;
    counted(
        &daemon,
        &[
            ("GetBytes", "499", 2),
            ("GetBytes", "200", 0),
            ("GetBlock", "499", 1),
            ("GetBlock", "404", 1),
            ("GetBlock", "200", 3),
            ("FetchBlocks", "CANCELLED", 1),
            ("FetchBlocks", "OK", 1),
        ],
    )
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn an_upload_that_its_client_breaks_off_is_not_malformed() {
    // Scenario: clients send the beginning of a batch; over HTTP/2 one resets it, over HTTP/1.1 one disconnects.
    // Another sends what is no chunk. Expectation: 499 for the former in the log and the metric, 400 for the latter.
    let daemon = long_files().start();
    let path = "/v1/datasets/blocks/blocks:batchFetch";
    let headers = [("content-type", "application/json"), ("x-request-id", "http2")];
    let mut http2 = Narrow::connect(daemon.http, WINDOW_BYTES).await;
    http2.break_off(path, &headers).await;
    let begin = async |id: &str, framing: &str, beginning: &str| {
        let mut stream = tokio::net::TcpStream::connect(daemon.http).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: {id}\r\nexpect: 100-continue\r\n\
             content-type: application/json\r\n{framing}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut goes_on = *b"HTTP/1.1 100 Continue\r\n\r\n";
        stream.read_exact(&mut goes_on).await.unwrap();
        stream.write_all(beginning.as_bytes()).await.unwrap();
        stream
    };
    drop(begin("http1", "content-length: 15", "{").await);
    let mut malformed = begin("malformed", "transfer-encoding: chunked", "zz\r\n").await;
    let mut answer = String::new();
    malformed.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("whole chunks"), "{answer}");
    for (id, code) in [("http2", "499"), ("http1", "499"), ("malformed", "400")] {
        let line = &lines_of(&daemon, id, 1).await[0];
        assert_eq!(
            (&line["code"], &line["method"]),
            (&json!(code), &json!("BatchFetchBlocks")),
            "{line}"
        );
    }
    counted(
        &daemon,
        &[("BatchFetchBlocks", "499", 2), ("BatchFetchBlocks", "400", 1)],
    )
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_response_that_a_revocation_cuts_short_is_not_ok() {
    // Scenario: a principal is removed while a response is sent to it. Expectation: its connection closes, and the
    // log has 499, in spite of its sampling.
    let setup = long_files();
    let principals = |name: &str| format!("{name} sha256:{} long,blocks\n", hash(name));
    setup.file("principals", principals("alice").as_bytes());
    let daemon = setup.set("access.principals", "principals").start();
    let mut stream = tokio::net::TcpStream::connect(daemon.http).await.unwrap();
    let asked = "GET /v1/datasets/long/bytes HTTP/1.1\r\nhost: localhost\r\nx-request-id: revoked\r\n\
                 authorization: Bearer alice\r\n\r\n";
    stream.write_all(asked.as_bytes()).await.unwrap();
    stream.read_exact(&mut [0; 1000]).await.unwrap();
    let mut file = File::create(daemon.path("principals")).unwrap();
    file.write_all(principals("bob").as_bytes()).unwrap();
    daemon.signal(Signal::HUP);
    let line = &lines_of(&daemon, "revoked", 1).await[0];
    assert_eq!(
        (&line["principal"], &line["code"]),
        (&json!("alice"), &json!("499")),
        "{line}"
    );
    daemon.stop().await;
}

#[tokio::test]
async fn what_the_deadline_of_a_stream_cuts_off_is_no_cancel() {
    // Scenario: a stream has requests with long responses and a deadline of a second, or of as long as a busy machine needs to begin
    // them; its client reads nothing. Expectation: the requests that the deadline cuts off are logged with it, not as cancelled by
    // the client, and counted as refused.
    let daemon = long_files().start();
    let request = |id| {
        let ranges = wire::ranges("long", &[(id << 18, 256 << 10)]);
        wire::framed(&wire::on_stream(id, Request::Ranges(ranges)).encode_to_vec())
    };
    let body = (1..=8).map(request).collect::<Vec<_>>().concat();
    let mut seconds = 1;
    let (held, lines) = loop {
        let id = format!("cut-{seconds}");
        let time = format!("{seconds}S");
        let headers = [
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            ("grpc-timeout", &time),
            ("x-request-id", &id),
        ];
        let mut narrow = Narrow::connect(daemon.grpc, WINDOW_BYTES).await;
        let held = narrow
            .ask(
                "/ringfetch.v1.FetchService/FetchStream",
                &headers,
                body.clone().into(),
            )
            .await;
        // Those that succeed, which are at most a few windows, are not logged, and the stream lasts until its client reads.
        let lines = timeout(Duration::from_secs(2 * seconds), lines_of(&daemon, &id, 2)).await;
        if let Ok(lines) = lines {
            break (held, lines);
        }
        seconds *= 2;
        assert!(seconds <= 8, "no request is begun in its time");
    };
    for line in lines {
        assert!(
            line["batch"].is_u64() && line["code"] == "DEADLINE_EXCEEDED",
            "{line}"
        );
    }
    let rejected = daemon
        .sum("ringfetch_rejected_total", &[("reason", "deadline")])
        .await;
    assert!(rejected >= 2, "{rejected}");
    // A drain waits for its end.
    drop(held);
    daemon.stop().await;
}
