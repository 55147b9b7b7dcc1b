//! The access log: a line for each request over every interface, and what happens when it cannot be written.

mod reopening;
mod unfinished;

use crate::access::hash;
use crate::daemon::{Daemon, PATIENCE, Setup, any_backend, backends_and_auto, eventually, eventually_async};
use crate::data::{everything, noise, plain_blocks};
use crate::wire::{self, Narrow};
use bytes::Bytes;
use http::Method;
use prost::Message;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// Several windows.
const LONG_BYTES: usize = (3 << 20) + 17;

/// The lines of the log of this name.
pub(crate) fn lines(daemon: &Daemon, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(daemon.path(name)).unwrap_or_default();
    // The last line may be incomplete.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let line = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    whole.lines().map(line).collect()
}

/// Waits for `count` lines with this request id. Asynchronous, because the disconnect of a client happens on
/// this thread.
pub(crate) async fn lines_of(daemon: &Daemon, id: &str, count: usize) -> Vec<Value> {
    eventually_async(&format!("{count} lines of {id}"), async || {
        let mut found = lines(daemon, "access.log");
        found.retain(|line| line["request_id"] == id);
        (found.len() >= count).then_some(found)
    })
    .await
}

async fn dropped(daemon: &Daemon, reason: &str) -> u64 {
    let labels = [("reason", reason)];
    daemon.sum("ringfetch_access_log_dropped_total", &labels).await
}

fn frame(message: &impl Message) -> Bytes {
    wire::framed(&message.encode_to_vec())
}

/// A message with a byte too many.
fn malformed(message: &impl Message) -> Bytes {
    wire::framed(&[message.encode_to_vec(), vec![0xff]].concat())
}

/// A gRPC call with a request id, which the response must repeat.
async fn call(daemon: &Daemon, id: &str, method: &str, body: Bytes) {
    let mut narrow = Narrow::connect(daemon.grpc, 8 << 20).await;
    let headers = [
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("x-request-id", id),
        ("traceparent", TRACEPARENT),
    ];
    let path = format!("/ringfetch.v1.{method}");
    let held = narrow.ask(&path, &headers, body).await;
    assert_eq!(held.head.headers["x-request-id"], id);
    held.rest().await.1.unwrap();
}

/// The same over HTTP.
async fn get(daemon: &Daemon, id: &str, method: Method, path: &str, body: Option<Value>) {
    let headers = [
        ("x-request-id", id),
        ("content-type", "application/json"),
        ("traceparent", "malformed"),
    ];
    let headers = &headers[..if body.is_some() { 3 } else { 1 }];
    let body = body.map(|body| body.to_string()).unwrap_or_default();
    let answer = daemon.http_client().send(method, path, headers, body).await;
    assert_eq!(answer.header("x-request-id"), id);
}

fn score() -> v1::ScoreVectorsRequest {
    wire::best("npy-f32", vec![0.5; 100], vec![1, 2, 3])
}

/// The contents of a line, in the order of [`EXPECTED`].
type Said<'a> = (&'a str, Value, u64, u64, u64, &'a str);

fn said(line: &Value) -> Said<'_> {
    let number = |key: &str| line[key].as_u64().unwrap_or_else(|| panic!("{key}: {line}"));
    let text = |key: &str| line[key].as_str().unwrap_or_else(|| panic!("{key}: {line}"));
    (
        text("method"),
        line["dataset"].clone(),
        number("items"),
        number("failed_items"),
        number("bytes"),
        text("code"),
    )
}

#[tokio::test]
async fn each_request_by_every_road_leaves_a_line() {
    // Scenario: calls and resources of each kind, over the fast paths and through the router, and refusals;
    // each with a request id, on each backend. Expectation: one line for each, with what was requested, what
    // was read and how it ended; the response repeats the id.
    let long = LONG_BYTES as u64;
    for backend in backends_and_auto() {
        let (setup, _) = everything(Setup::new(backend));
        setup.file("objects/long", &noise(3, LONG_BYTES));
        let daemon = setup.set("access_log.path", "access.log").start();
        let fetch = |method: &str| format!("FetchService/{method}");
        let whole = wire::object("objects", "long");
        let calls = [
            (fetch("FetchBlocks"), frame(&wire::blocks("joined", &[1, 2]))),
            (
                fetch("FetchVectors"),
                frame(&wire::vectors("npy-f32", &[3, 1000])),
            ),
            (
                fetch("FetchRanges"),
                frame(&wire::ranges("joined", &[(5, 7), (1, 1)])),
            ),
            (fetch("FetchObjects"), frame(&wire::objects("objects", &["one"]))),
            (fetch("ReadObject"), frame(&whole)),
            (fetch("ScoreVectors"), frame(&score())),
            (fetch("FetchBlocks"), frame(&wire::blocks("nothing", &[1]))),
            (fetch("FetchBlocks"), wire::framed(&[0xff, 0xff])),
            (fetch("FetchBlocks"), malformed(&wire::blocks("joined", &[1]))),
            (fetch("FetchBlocks"), frame(&wire::blocks("joined", &[0; 5000]))),
            (fetch("ScoreVectors"), malformed(&score())),
            (fetch("ReadObject"), malformed(&whole)),
            (fetch("Nonsense"), Bytes::new()),
            (
                "DatasetService/ListDatasets".into(),
                frame(&v1::ListDatasetsRequest::default()),
            ),
        ];
        let one = fs::metadata(daemon.path("objects/one")).unwrap().len();
        let dataset = |name: &str| Value::from(name);
        let expected: [Said<'_>; 14] = [
            ("FetchBlocks", dataset("joined"), 2, 0, 6000, "OK"),
            ("FetchVectors", dataset("npy-f32"), 2, 1, 400, "OK"),
            ("FetchRanges", dataset("joined"), 2, 0, 8, "OK"),
            ("FetchObjects", dataset("objects"), 1, 0, one, "OK"),
            ("ReadObject", dataset("objects"), 1, 0, long, "OK"),
            ("ScoreVectors", dataset("npy-f32"), 3, 0, 1200, "OK"),
            ("FetchBlocks", dataset("nothing"), 0, 0, 0, "NOT_FOUND"),
            ("FetchBlocks", Value::Null, 0, 0, 0, "INVALID_ARGUMENT"),
            ("FetchBlocks", dataset("joined"), 0, 0, 0, "INVALID_ARGUMENT"),
            ("FetchBlocks", dataset("joined"), 0, 0, 0, "RESOURCE_EXHAUSTED"),
            ("ScoreVectors", dataset("npy-f32"), 0, 0, 0, "INVALID_ARGUMENT"),
            ("ReadObject", dataset("objects"), 0, 0, 0, "INVALID_ARGUMENT"),
            ("other", Value::Null, 0, 0, 0, "UNIMPLEMENTED"),
            ("ListDatasets", Value::Null, 0, 0, 0, "OK"),
        ];
        for (number, ((method, body), expected)) in calls.into_iter().zip(expected).enumerate() {
            let id = format!("call-{number}");
            call(&daemon, &id, &method, body).await;
            let [line] = &lines_of(&daemon, &id, 1).await[..] else {
                panic!("several lines of {id}");
            };
            assert_eq!(said(line), expected, "{backend}: {line}");
            assert_eq!(
                (&line["transport"], &line["peer"], &line["trace_id"]),
                (&json!("grpc"), &json!("127.0.0.1"), &json!(TRACE))
            );
        }

        let of = |rest: &str| format!("/v1/datasets/{rest}");
        let batch = json!({"indices": [0, 1, 20, 21]});
        let query = |ids: &[u64]| json!({"vector": vec![0.5; 100], "ids": ids});
        let queries = [query(&[4, 5, 999]), query(&[999, 999, 4])];
        let scores = json!({"queries": queries, "metric": "dot", "limit": 1});
        let resources = [
            (Method::GET, of("joined/blocks/3"), None),
            (Method::HEAD, of("joined/blocks/3"), None),
            (Method::GET, of("npy-f32/vectors/60"), None),
            (Method::GET, of("joined/bytes"), None),
            (Method::GET, of("objects/objects/long"), None),
            (Method::POST, of("joined/blocks:batchFetch"), Some(batch)),
            (Method::POST, of("npy-f32/vectors:score"), Some(scores)),
            (Method::GET, of("joined/blocks/21"), None),
            (Method::GET, of("joined/blocks/x"), None),
            (Method::POST, of("joined/blocks:batchFetch"), Some(json!({}))),
            (Method::POST, of("npy-f32/vectors:score"), Some(json!({}))),
            (Method::GET, of("nothing/blocks/1"), None),
            (Method::GET, "/nowhere".to_owned(), None),
            (Method::GET, "/livez".to_owned(), None),
            (Method::DELETE, of("joined"), None),
        ];
        let expected: [Said<'_>; 15] = [
            ("GetBlock", dataset("joined"), 1, 0, 3000, "200"),
            ("GetBlock", dataset("joined"), 0, 0, 0, "200"),
            ("GetVector", dataset("npy-f32"), 1, 0, 400, "200"),
            ("GetBytes", dataset("joined"), 1, 0, 63_000, "200"),
            ("GetObject", dataset("objects"), 1, 0, long, "200"),
            ("BatchFetchBlocks", dataset("joined"), 4, 1, 9000, "200"),
            ("ScoreVectors", dataset("npy-f32"), 6, 3, 800, "200"),
            ("GetBlock", dataset("joined"), 0, 0, 0, "404"),
            ("GetBlock", dataset("joined"), 0, 0, 0, "400"),
            ("BatchFetchBlocks", dataset("joined"), 0, 0, 0, "400"),
            ("ScoreVectors", dataset("npy-f32"), 0, 0, 0, "400"),
            ("GetBlock", dataset("nothing"), 0, 0, 0, "404"),
            ("other", Value::Null, 0, 0, 0, "404"),
            ("livez", Value::Null, 0, 0, 0, "200"),
            ("other", Value::Null, 0, 0, 0, "405"),
        ];
        for (number, ((method, path, body), expected)) in resources.into_iter().zip(expected).enumerate() {
            let id = format!("get-{number}");
            get(&daemon, &id, method, &path, body).await;
            let [line] = &lines_of(&daemon, &id, 1).await[..] else {
                panic!("several lines of {id}");
            };
            assert_eq!(said(line), expected, "{backend}: {path}: {line}");
            assert_eq!(
                (&line["transport"], &line["trace_id"]),
                (&json!("http"), &Value::Null)
            );
        }
        // What the port refuses before anything else, without an id from the client.
        let foreign = daemon
            .http_client()
            .get_with("/livez", &[("host", "evil.example")])
            .await;
        let made = foreign.header("x-request-id").to_owned();
        assert_eq!((foreign.status.as_u16(), made.len()), (421, 32));
        assert_eq!(lines_of(&daemon, &made, 1).await[0]["code"], "421");
        // Methods that the port does not have, refused for their media type before they are routed.
        let mut admin = Narrow::connect(daemon.admin, 8 << 20).await;
        for (path, method) in [
            ("/ringfetch.v1.FetchService/FetchBlocks", "other"),
            ("/ringfetch.v1.Nonsense/GetStatus", "other"),
            ("/ringfetch.v1.AdminService/GetStatus", "GetStatus"),
        ] {
            let held = admin
                .ask(path, &[("content-type", "text/plain")], Bytes::new())
                .await;
            let id = held.head.headers["x-request-id"].to_str().unwrap().to_owned();
            held.rest().await;
            let line = &lines_of(&daemon, &id, 1).await[0];
            assert_eq!(
                (&line["method"], &line["code"]),
                (&json!(method), &json!("415")),
                "{line}"
            );
            assert_eq!(line["transport"], "admin");
        }
        let dataset = "joined".to_owned();
        let request = v1::ClearBackendRequest { dataset };
        daemon.admin_client().await.clear_backend(request).await.unwrap();
        let line = eventually_async("the line of ClearBackend", async || {
            let mut lines = lines(&daemon, "access.log").into_iter();
            lines.find(|line| line["method"] == "ClearBackend")
        })
        .await;
        assert_eq!(line["dataset"], "joined", "{line}");
        for line in lines(&daemon, "access.log") {
            let number = |key: &str| line[key].as_u64().unwrap();
            // Later windows of a long response are read while it is sent.
            assert!(
                number("bytes") > 1 << 20 || number("queue_us") + number("send_us") <= number("duration_us"),
                "{line}"
            );
            assert!(line["principal"].is_null() && line["batch"].is_null());
            let time = line["time"].as_str().unwrap();
            assert!(
                humantime::parse_rfc3339(time).is_ok() && time.ends_with('Z'),
                "{time}"
            );
            // A HEAD request reads no items, and its response has no body.
            assert!(number("sent_bytes") > 0 || number("items") == 0, "{line}");
        }
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_stream_leaves_a_line_a_batch_and_one_of_its_own() {
    // Scenario: four requests on a stream: a good one, one of two items, scores, an unknown dataset; a request that
    // is cancelled as it arrives; one refused before it is decoded; and a stream that its client cancels. Expectation:
    // a line for each request with the stream's id, its own number and its method, and one for the stream; the last
    // one was cancelled.
    let (setup, _) = everything(Setup::new(any_backend()));
    let daemon = setup.set("access_log.path", "access.log").start();
    let requests = [
        Request::Blocks(wire::blocks("joined", &[1])),
        Request::Vectors(wire::vectors("npy-f32", &[1, 2])),
        Request::Scores(score()),
        Request::Ranges(wire::ranges("nothing", &[(1, 2)])),
    ];
    let body = requests
        .into_iter()
        .zip(10..)
        .map(|(request, id)| frame(&wire::on_stream(id, request)));
    call(
        &daemon,
        "stream",
        "FetchService/FetchStream",
        body.collect::<Vec<_>>().concat().into(),
    )
    .await;
    let mut found = lines_of(&daemon, "stream", 5).await;
    found.sort_by_key(|line| line["batch"].as_u64().unwrap_or(u64::MAX));
    let dataset = |name: &str| Value::from(name);
    let expected: [Said<'_>; 5] = [
        ("FetchBlocks", dataset("joined"), 1, 0, 3000, "OK"),
        ("FetchVectors", dataset("npy-f32"), 2, 0, 800, "OK"),
        ("ScoreVectors", dataset("npy-f32"), 3, 0, 1200, "OK"),
        ("FetchRanges", dataset("nothing"), 0, 0, 0, "NOT_FOUND"),
        ("FetchStream", Value::Null, 0, 0, 0, "OK"),
    ];
    assert_eq!(found.iter().map(said).collect::<Vec<_>>(), expected);
    assert_eq!(found[0]["batch"], 10);
    assert!(found[0]["sent_bytes"].is_null() && found[4]["sent_bytes"].as_u64() > Some(3800));
    assert!(found.iter().all(|line| line["trace_id"] == TRACE));

    let cancelled = [
        wire::on_stream(7, Request::Blocks(wire::blocks("joined", &[1]))),
        wire::on_stream(7, Request::Cancel(v1::Cancel {})),
    ];
    let body = cancelled.iter().flat_map(frame).collect();
    call(&daemon, "cancelled", "FetchService/FetchStream", body).await;
    let mut found = lines_of(&daemon, "cancelled", 2).await;
    found.sort_by_key(|line| line["batch"].as_u64().unwrap_or(u64::MAX));
    let expected: [Said<'_>; 2] = [
        ("FetchBlocks", Value::Null, 0, 0, 0, "CANCELLED"),
        ("FetchStream", Value::Null, 0, 0, 0, "OK"),
    ];
    assert_eq!(found.iter().map(said).collect::<Vec<_>>(), expected);
    assert_eq!(found[0]["batch"], 7);

    // More items than a request may have: refused before it is decoded.
    let refused = wire::on_stream(8, Request::Vectors(wire::vectors("npy-f32", &[0; 5000])));
    call(&daemon, "refused", "FetchService/FetchStream", frame(&refused)).await;
    let mut found = lines_of(&daemon, "refused", 2).await;
    found.sort_by_key(|line| line["batch"].as_u64().unwrap_or(u64::MAX));
    let expected: Said<'_> = ("FetchVectors", dataset("npy-f32"), 0, 0, 0, "RESOURCE_EXHAUSTED");
    assert_eq!((said(&found[0]), &found[0]["batch"]), (expected, &json!(8)));

    let (requests, received) = tokio::sync::mpsc::unbounded_channel();
    let send = requests.send(wire::on_stream(1, Request::Blocks(wire::blocks("joined", &[1]))));
    send.unwrap();
    let mut fetch = daemon.fetch().await;
    let received = tokio_stream::wrappers::UnboundedReceiverStream::new(received);
    let mut stream = tonic::Request::new(received);
    stream
        .metadata_mut()
        .insert("x-request-id", "left".parse().unwrap());
    let mut answers = fetch.fetch_stream(stream).await.unwrap().into_inner();
    answers.message().await.unwrap().unwrap();
    drop((answers, requests, fetch));
    let found = lines_of(&daemon, "left", 2).await;
    assert_eq!(
        (&found[1]["method"], &found[1]["code"]),
        (&json!("FetchStream"), &json!("CANCELLED"))
    );
    eventually_async("the call is counted once, as cancelled", async || {
        let labels = [
            ("transport", "grpc"),
            ("method", "FetchStream"),
            ("code", "CANCELLED"),
        ];
        let counted = daemon.sum("ringfetch_rpc_requests_total", &labels).await;
        (counted == 1).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_line_names_the_principal_and_no_secret() {
    // Scenario: a principal reads what it may and what it may not; a client sends an unknown token.
    // Expectation: the principal is in the first two lines, none in the third, and no token anywhere.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let principals = format!("alice sha256:{} blocks\n", hash("open-sesame"));
    setup.file("principals", principals.as_bytes());
    let daemon = setup
        .set("access.principals", "principals")
        .set("access_log.path", "access.log")
        .start();
    for (token, dataset, principal, code) in [
        ("open-sesame", "blocks", json!("alice"), "200"),
        ("open-sesame", "hidden", json!("alice"), "403"),
        ("wrong-sesame", "blocks", Value::Null, "401"),
    ] {
        let path = format!("/v1/datasets/{dataset}/blocks/1");
        let authorization = format!("Bearer {token}");
        let headers = [("authorization", authorization.as_str())];
        let answer = daemon.http_client().get_with(&path, &headers).await;
        let [line] = &lines_of(&daemon, answer.header("x-request-id"), 1).await[..] else {
            panic!("several lines");
        };
        assert_eq!(
            (&line["principal"], &line["code"]),
            (&principal, &json!(code)),
            "{line}"
        );
    }
    let text = fs::read_to_string(daemon.path("access.log")).unwrap();
    assert!(!text.contains("sesame"), "{text}");
    daemon.stop().await;
}

#[tokio::test]
async fn a_line_is_one_line_and_controls_no_terminal() {
    // Scenario: a client asks for a dataset whose name has controls of both kinds, a delete, separators of lines, and a
    // character that reverses the text after it; and for one whose name is not ASCII. Expectation: the line has the names, and
    // the former's characters only escaped.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup.set("access_log.path", "access.log").start();
    let bad = "\u{1b}[31m\u{9b}31m\u{7f}\n\u{85}\u{2028}\u{2029}\u{202e}x";
    for (id, name) in [("bad", bad), ("good", "Ångström 𝛼")] {
        let asked = frame(&wire::blocks(name, &[1]));
        call(&daemon, id, "FetchService/FetchBlocks", asked).await;
        assert_eq!(lines_of(&daemon, id, 1).await[0]["dataset"], name);
    }
    let text = fs::read_to_string(daemon.path("access.log")).unwrap();
    let raw = bad.chars().filter(|c| !c.is_ascii_graphic() && *c != '\n');
    let raw: Vec<_> = raw.filter(|c| text.contains(*c)).collect();
    assert!(raw.is_empty(), "{raw:?}");
    assert!(text.lines().count() == 2 && text.contains("Ångström 𝛼"), "{text}");
    daemon.stop().await;
}

#[tokio::test]
async fn a_sample_leaves_out_only_what_is_good_and_fast() {
    // Scenario: after a reload one in four billion requests is logged; then good requests, one that fails,
    // and one with an item that fails. Expectation: only the latter two are logged.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup.set("access_log.path", "access.log").start();
    let file = fs::read_to_string(daemon.path("ringfetchd.yaml")).unwrap();
    daemon.rewrite(&(file + "access_log: {sample: 4294967295, slow_ms: 0}\n"));
    daemon.signal(Signal::HUP);
    let said = daemon.logged(&["reloaded"]);
    assert!(said.contains("access_log.sample 1 -> 4294967295"), "{said}");
    let http = daemon.http_client();
    for path in ["1", "2", "3", "999", "4"] {
        http.get(&format!("/v1/datasets/blocks/blocks/{path}")).await;
    }
    let batch = json!({"indices": [1, 999]});
    let path = "/v1/datasets/blocks/blocks:batchFetch";
    assert_eq!(http.batch(path, &batch, "*/*").await.status, 200);
    let found = eventually("two lines", PATIENCE, || {
        let found = lines(&daemon, "access.log");
        (found.len() >= 2).then_some(found)
    });
    let codes: Vec<_> = found.iter().map(|line| line["code"].as_str().unwrap()).collect();
    assert_eq!(codes, ["404", "200"]);
    daemon.stop().await;
}

#[tokio::test]
async fn beside_a_sample_refusals_have_a_rate_and_are_counted_beyond_it() {
    // Scenario: one in four billion requests is logged; 10,000 requests on a stream fail without a read, half of them for an
    // unknown dataset and half for a block past the end; then one fails of which a part was read, and one more without.
    // Expectation: of the former some are logged, and the others counted; the latter two are logged.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup
        .set("access_log.path", "access.log")
        .set("access_log.sample", "4294967295")
        .set("access_log.slow_ms", "0")
        .start();
    const REQUESTS: u64 = 10_000;
    let requests = (0..REQUESTS).map(|id| {
        let dataset = if id % 2 == 0 { "nothing" } else { "blocks" };
        wire::on_stream(id, Request::Blocks(wire::blocks(dataset, &[999])))
    });
    let mut fetch = daemon.fetch().await;
    let stream = fetch.fetch_stream(tokio_stream::iter(requests)).await;
    let mut answers = stream.unwrap().into_inner();
    for _ in 0..REQUESTS {
        answers.message().await.unwrap().unwrap();
    }
    drop((answers, fetch));
    let logged = eventually_async("each is logged or counted", async || {
        let logged = lines(&daemon, "access.log").len() as u64;
        (logged + dropped(&daemon, "rate").await >= REQUESTS).then_some(logged)
    })
    .await;
    assert!((100..REQUESTS / 2).contains(&logged), "{logged}");
    let partly = Some(json!({"indices": [1, 999]}));
    get(
        &daemon,
        "partly",
        Method::POST,
        "/v1/datasets/blocks/blocks:batchFetch",
        partly,
    )
    .await;
    lines_of(&daemon, "partly", 1).await;
    // Once the rate allows it again.
    eventually_async("a refusal is logged", async || {
        get(&daemon, "refused", Method::GET, "/v1/datasets/nothing", None).await;
        let found = lines(&daemon, "access.log");
        found
            .iter()
            .any(|line| line["request_id"] == "refused")
            .then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_full_disk_costs_lines_and_no_request() {
    // Scenario: the log's disk is full. Expectation: requests are answered, the lines count as dropped, the
    // daemon reports it once, and exits cleanly.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup.set("access_log.path", "/dev/full").start();
    for _ in 0..20 {
        daemon.assert_serves("blocks").await;
    }
    eventually_async("lines are dropped", async || {
        (dropped(&daemon, "write").await > 20).then_some(())
    })
    .await;
    daemon.logged(&["cannot write the access log; lines are dropped"]);
    let said = daemon.log();
    let said = said
        .iter()
        .filter(|line| line.contains("cannot write the access log"))
        .count();
    assert_eq!(said, 1);
    daemon.stop().await;
}

#[tokio::test]
async fn a_file_at_its_size_limit_costs_lines_and_no_request() {
    // Scenario: the process may write files of at most 4 KiB (RLIMIT_FSIZE), and the log gets there. Expectation: the
    // kernel's signal does not end the daemon; requests are answered, lines are dropped until a new file has the name.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup
        .set("access_log.path", "access.log")
        .through(&["prlimit", "--fsize=4096"])
        .start();
    eventually_async("lines are dropped", async || {
        daemon.assert_serves("blocks").await;
        (dropped(&daemon, "write").await > 0).then_some(())
    })
    .await;
    assert_eq!(fs::metadata(daemon.path("access.log")).unwrap().len(), 4096);
    fs::rename(daemon.path("access.log"), daemon.path("old.log")).unwrap();
    daemon.signal(Signal::HUP);
    eventually_async("lines are written again", async || {
        daemon.assert_serves("blocks").await;
        (!lines(&daemon, "access.log").is_empty()).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test]
async fn a_log_that_nobody_reads_stops_no_request() {
    // Scenario: the log goes to a pipe that is not read, and there are more requests than fit in pipe and
    // queue. Expectation: all are answered, some lines are dropped, and the daemon exits.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let pipe = setup.path("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    // Open at both ends, so that the daemon's open succeeds.
    let _held = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let daemon = setup
        .set("access_log.path", "stdout")
        .through(&["sh", "-c", "exec \"$@\" >\"$0\"", pipe.to_str().unwrap()])
        .start();
    let mut fetch = daemon.fetch().await;
    // 64 KiB hold fewer than 300 lines; the queue holds 8,192.
    const REQUESTS: u64 = 10_000;
    let requests =
        (0..REQUESTS).map(|id| wire::on_stream(id, Request::Blocks(wire::blocks("blocks", &[id % 16]))));
    let stream = fetch.fetch_stream(tokio_stream::iter(requests)).await;
    let mut answers = stream.unwrap().into_inner();
    for _ in 0..REQUESTS {
        answers.message().await.unwrap().unwrap();
    }
    assert!(dropped(&daemon, "queue").await > 0);
    daemon.stop().await;
}

#[test]
fn what_cannot_be_a_log_is_refused_at_the_start() {
    // Scenario: a directory, a FIFO, and a directory that does not exist. Expectation: exit code 2 with key,
    // path and remedy.
    for (path, problem) in [
        ("objects", "is a directory"),
        ("fifo", "is not a regular file"),
        ("none/access.log", "cannot be written: No such file"),
    ] {
        let (setup, _) = plain_blocks(Setup::new("pread"), 4);
        setup.file("objects/one", b"");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, setup.path("fifo"), mode).unwrap();
        let refused = setup.set("access_log.path", path).refused();
        refused.with(2, &["access_log.path: ", path, problem, "stdout, stderr or off"]);
    }
}
