//! What only HTTP can get wrong, and a client that goes on sending.

use super::{JSON, OCTETS, serve};
use crate::access::lines;
use crate::access_log::lines_of;
use crate::daemon::{Daemon, PATIENCE, Setup, any_backend};
use crate::data::plain_blocks;
use http::Method;
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

/// Paths of no resource, also below known ones.
const NO_PATHS: [&str; 8] = [
    "/v1",
    "/v1/nowhere",
    "/index.html",
    "/page",
    "/v1/datasets/blocks/blobs",
    "/v1/datasets/blocks/blocks",
    "/v1/datasets/blocks/blocks/1/2",
    "/metrics/",
];

#[tokio::test]
async fn a_request_that_is_wrong_as_a_whole_is_told_so_over_http() {
    // Scenario: each mistake that an HTTP request can have. Expectation: its status, problem+json with the
    // field and the remedy, Allow and similar headers where they apply; the daemon continues to serve, on the
    // same connections.
    let (daemon, _, _) = serve("mmap");
    let http = daemon.http_client();
    let get = async |path: &str| http.get(path).await;

    get("/v1/datasets/nothing/bytes").await.is_problem(
        404,
        "dataset-not-found",
        Some("dataset"),
        &["nothing", "there are:"],
    );
    get("/v1/datasets/nothing")
        .await
        .is_problem(404, "dataset-not-found", Some("dataset"), &[]);
    for path in NO_PATHS {
        let answer = get(path).await;
        answer.is_problem(404, "no-such-path", None, &[]);
        assert_eq!(answer.json()["instance"], path);
    }
    get("/v1/datasets/fbin/blocks/0").await.is_problem(
        400,
        "wrong-kind",
        Some("dataset"),
        &["kind vectors", "vectors/{id}"],
    );
    get("/v1/datasets/objects/bytes").await.is_problem(
        400,
        "wrong-kind",
        Some("dataset"),
        &["objects/{object}"],
    );
    for path in ["/v1/datasets/blocks/objects", "/v1/datasets/blocks/objects/a"] {
        let answer = get(path).await;
        answer.is_problem(400, "wrong-kind", Some("dataset"), &["kind blocks"]);
    }
    for path in ["..%2Fsecret", "../secret", "%2e%2e/secret"] {
        let answer = get(&format!("/v1/datasets/objects/objects/{path}")).await;
        answer.is_problem(400, "object-name-invalid", Some("object"), &["`..` part"]);
    }
    // Names are decoded once.
    for (path, name) in [
        ("no%2Fone", "no/one"),
        ("no%252Fone", "no%2Fone"),
        ("%C3%A9%20%3F%23", "é ?#"),
        ("no+one", "no+one"),
        ("bytes", "bytes"),
    ] {
        let answer = get(&format!("/v1/datasets/objects/objects/{path}")).await;
        let name = format!("no object \"{name}\"");
        answer.is_problem(404, "object-not-found", Some("object"), &[&name]);
    }
    for (path, field) in [("objects/objects/%ff", "object"), ("%ff/bytes", "dataset")] {
        let answer = get(&format!("/v1/datasets/{path}")).await;
        answer.is_problem(400, "malformed", Some(field), &["UTF-8", "percent-encode"]);
    }
    get("/v1/datasets/blocks/blocks/300").await.is_problem(
        404,
        "index-out-of-range",
        Some("index"),
        &["0 to 299"],
    );
    get("/v1/datasets/fbin/vectors/61")
        .await
        .is_problem(404, "index-out-of-range", Some("id"), &["0 to 60"]);
    for index in [
        "-1",
        "+1",
        "%201",
        "1.0",
        "0x1",
        "1e3",
        "x",
        "18446744073709551616",
        "%00",
    ] {
        let answer = get(&format!("/v1/datasets/blocks/blocks/{index}")).await;
        answer.is_problem(400, "malformed", Some("index"), &["decimal number"]);
    }
    for size in ["x", "", "%2B1"] {
        let answer = get(&format!("/v1/datasets/objects/objects?page_size={size}")).await;
        answer.is_problem(400, "malformed", Some("page_size"), &["0 to 4294967295"]);
    }
    get("/v1/datasets/objects/objects?nothing=1").await.is_problem(
        400,
        "malformed",
        Some("query"),
        &["nothing"],
    );

    let batch = "/v1/datasets/blocks/blocks:batchFetch";
    for (body, field, parts) in [
        ("", "body", "EOF"),
        ("{", "body", "EOF"),
        ("[1,2]", "body", "expected an object"),
        ("{\"indices\":[1,]}", "indices", "line 1 column 15"),
        ("{\"indices\":[1,-2]}", "indices[1]", "invalid value"),
        ("{\"indices\":[18446744073709551616]}", "indices[0]", "invalid"),
        ("{\"indices\":\"1\"}", "indices", "invalid type"),
        ("{\"indices\":[1],\"failfast\":true}", "failfast", "fail_fast"),
        ("{\"indices\":[1]} more", "body", "trailing"),
        ("\u{0}\u{1}", "body", "expected value"),
    ] {
        let headers = [("content-type", JSON)];
        let answer = http.send(Method::POST, batch, &headers, body).await;
        answer.is_problem(400, "malformed", Some(field), &[parts]);
    }
    // A name as long as the request is repeated in part.
    let long_name = json!({"indices": [1], "x".repeat(60_000): 1});
    let answer = http.batch(batch, &long_name, JSON).await;
    assert_eq!(answer.status, 400);
    assert!(answer.body.len() < 2048, "{} bytes", answer.body.len());
    http.batch(batch, &json!({"indices": []}), JSON).await.is_problem(
        400,
        "empty-batch",
        Some("indices"),
        &["at least one"],
    );
    let other_kind = "/v1/datasets/blocks/objects:batchFetch";
    let answer = http.batch(other_kind, &json!({"names": ["a"]}), JSON).await;
    answer.is_problem(400, "wrong-kind", Some("dataset"), &["kind blocks"]);
    let ranges = "/v1/datasets/blocks/ranges:batchFetch";
    let objects = "/v1/datasets/objects/objects:batchFetch";
    for (path, body, field, part) in [
        (
            ranges,
            r#"{"ranges":[{"offset":1}]}"#,
            "ranges[0]",
            "missing field `length`",
        ),
        (
            ranges,
            r#"{"ranges":[{"offset":1,"length":1},{"offset":-1,"length":1}]}"#,
            "ranges[1].offset",
            "line 1 column",
        ),
        (ranges, "{}", "body", "missing field `ranges`"),
        (
            ranges,
            r#"{"ranges":[[1, 2]]}"#,
            "ranges[0]",
            "expected an object",
        ),
        (ranges, r#"{"ranges":[{"#, "ranges[0]", "EOF"),
        (ranges, "{\n\"ranges\": [}", "ranges[0]", "line 2 column 12"),
        (
            ranges,
            r#"{"ranges":[],"deadline_ms":-1}"#,
            "deadline_ms",
            "invalid value",
        ),
        // Objects are given in one of two ways.
        (objects, "{}", "objects", "names"),
        (
            objects,
            r#"{"names":["a"],"objects":[{"name":"a"}]}"#,
            "objects",
            "names",
        ),
    ] {
        let headers = [("content-type", JSON)];
        let answer = http.send(Method::POST, path, &headers, body).await;
        answer.is_problem(400, "malformed", Some(field), &[part]);
    }
    http.batch(ranges, &json!({"ranges": []}), JSON).await.is_problem(
        400,
        "empty-batch",
        Some("ranges"),
        &["at least one"],
    );
    let range = json!({"offset": 0, "length": 1});
    for (path, field, many) in [
        (batch, "indices", json!({"indices": vec![0; 101]})),
        (ranges, "ranges", json!({"ranges": vec![range; 101]})),
    ] {
        let answer = http.batch(path, &many, JSON).await;
        answer.is_problem(413, "too-many-items", Some(field), &["limits.items_per_request"]);
    }
    let large = json!({"ranges": [{"offset": 0, "length": 200_000}, {"offset": 0, "length": 200_000}]});
    for (path, field, body) in [
        (ranges, "ranges", &large),
        (batch, "indices", &json!({"indices": vec![0; 100]})),
    ] {
        let answer = http.batch(path, body, OCTETS).await;
        answer.is_problem(
            413,
            "response-too-large",
            Some(field),
            &["limits.response_bytes", "split the batch"],
        );
    }
    let long = json!({"indices": vec![1_000_000; 20_000]});
    let answer = http.batch(batch, &long, JSON).await;
    answer.is_problem(413, "request-too-large", None, &["limits.request_bytes"]);
    // Its body was not read, so no request can follow on the same connection.
    assert_eq!(answer.header("connection"), "close");

    // A body of 24 MiB that the daemon does not read: the client, still sending, gets the reason all the
    // same.
    hears_out_a_sender(&daemon, batch);

    let answer = http
        .send(Method::POST, batch, &[("content-type", "text/plain")], "{}")
        .await;
    answer.is_problem(415, "unsupported-media-type", Some("Content-Type"), &[JSON]);
    let coded = [("content-type", JSON), ("content-encoding", "gzip")];
    let answer = http.send(Method::POST, batch, &coded, "\x1f").await;
    answer.is_problem(415, "unsupported-media-type", Some("Content-Encoding"), &["gzip"]);
    assert_eq!(answer.header("accept-encoding"), "identity");
    let coded = [("content-type", JSON), ("transfer-encoding", "gzip, chunked")];
    let answer = http.send(Method::POST, batch, &coded, "\x1f").await;
    let (slug, field) = ("unsupported-transfer-coding", "Transfer-Encoding");
    answer.is_problem(501, slug, Some(field), &["gzip", "chunked alone"]);
    http.batch(batch, &json!({"indices": [0]}), "image/png")
        .await
        .is_problem(406, "not-acceptable", Some("Accept"), &[JSON]);
    let brew = Method::from_bytes(b"BREW").unwrap();
    for (method, path, allow) in [
        (Method::DELETE, "/v1/datasets/objects/objects/a", "GET, HEAD"),
        (Method::POST, "/v1/datasets/blocks/bytes", "GET, HEAD"),
        (brew, ranges, "POST"),
        (Method::GET, batch, "POST"),
    ] {
        let answer = http.send(method, path, &[], "").await;
        answer.is_problem(405, "method-not-allowed", None, &[allow]);
        assert_eq!(answer.header("allow"), allow);
        let allowed = allow.split(", ").collect::<Vec<_>>();
        assert_eq!(answer.json()["allowed"], json!(allowed));
    }
    let answer = http.send(Method::HEAD, batch, &[], "").await;
    assert_eq!(answer.status, 405);

    // Paths and methods of clients are no labels.
    let scrape = daemon.scrape().await;
    for (code, requests) in [("404", NO_PATHS.len() as u64), ("405", 5)] {
        let labels = [("transport", "http"), ("method", "other"), ("code", code)];
        let counted = scrape.sum("ringfetch_rpc_requests_total", &labels);
        assert_eq!(counted, requests, "{code}");
    }
    assert!(!scrape.text.contains("nowhere") && !scrape.text.contains("BREW"));

    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

#[tokio::test]
async fn the_answer_to_a_head_has_no_body_over_http2() {
    // Scenario: HEAD over HTTP/2 that each port refuses before its routes: of a foreign host, without a credential, and no call;
    // and OPTIONS *. Expectation: a GET's status and length; 204 without a length; no byte of a body is sent, the log says.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    setup.file("principals", lines(&[("reader", "token", "*")]).as_bytes());
    let daemon = setup
        .set("access.principals", "principals")
        .set("access_log.path", "access.log")
        .start();
    for (address, path, host, status) in [
        (daemon.http, "/v1/datasets", "localhost", 401),
        (daemon.http, "/livez", "other.example", 421),
        (daemon.grpc, "/", "localhost", 405),
        (daemon.admin, "/", "localhost", 405),
    ] {
        let client = daemon.http2_client(address);
        let get = client.get_with(path, &[("host", host)]).await;
        let id = format!("head-{status}-{}", address.port());
        let headers = [("host", host), ("x-request-id", &id)];
        let head = client.send(Method::HEAD, path, &headers, "").await;
        assert_eq!((get.status.as_u16(), head.status.as_u16()), (status, status));
        assert_eq!(
            head.header("content-length"),
            get.body.len().to_string(),
            "{head:?}"
        );
        let line = &lines_of(&daemon, &id, 1).await[0];
        assert_eq!(
            (&line["code"], &line["sent_bytes"]),
            (&json!(status.to_string()), &json!(0)),
            "{line}"
        );
    }
    let client = daemon.http2_client(daemon.http);
    let answer = client
        .send(Method::OPTIONS, "*", &[("authorization", "Bearer token")], "")
        .await;
    assert_eq!(
        (answer.status.as_u16(), answer.header("content-length")),
        (204, "")
    );
    daemon.stop().await;
}

#[tokio::test]
async fn who_sends_all_of_a_refused_body_before_it_reads_gets_its_answer() {
    // Scenario: a client of HTTP/1.1 sends 8 MiB to a path that does not exist, and reads after that. Expectation: no write
    // fails, the response is whole, and no connection counts as a flood.
    const BODY_BYTES: usize = 8 << 20;
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 1);
    let daemon = setup.start();
    let head = format!("POST /nope HTTP/1.1\r\nhost: localhost\r\ncontent-length: {BODY_BYTES}\r\n\r\n");
    let mut connection = TcpStream::connect(daemon.http).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = [head.as_bytes(), &vec![b' '; BODY_BYTES]].concat();
    connection.write_all(&request).expect("all is taken");
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).expect("no reset");
    drop(connection);
    let answer = String::from_utf8(answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 404 ") && answer.ends_with('}'),
        "{answer}"
    );
    assert_eq!(daemon.closed("http", "flood").await, 0);
    daemon.stop().await;
}

/// A client that is still sending its body when the response arrives, as curl does without Expect.
fn hears_out_a_sender(daemon: &Daemon, batch: &str) {
    const BODY_BYTES: usize = 24 << 20;
    let mut connection = TcpStream::connect(daemon.http).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut sending = connection.try_clone().unwrap();
    let head = format!(
        "POST {batch} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {BODY_BYTES}\r\n\r\n",
        daemon.http
    );
    let sender = std::thread::spawn(move || {
        sending.write_all(head.as_bytes()).unwrap();
        // The daemon may close the connection once it has responded.
        let _cut = sending.write_all(&vec![b' '; BODY_BYTES]);
    });
    let mut answer = Vec::new();
    // To its end, or until the daemon closes the connection on the rest of the body.
    let _ended = connection.read_to_end(&mut answer);
    drop(connection);
    sender.join().unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 413 ") && answer.contains("limits.request_bytes"),
        "{answer}"
    );
}
