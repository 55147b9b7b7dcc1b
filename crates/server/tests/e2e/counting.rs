//! The metrics are true: after a load whose clients count every read, the daemon reports the same numbers.

use crate::access_log;
use crate::daemon::{Daemon, Setup, any_backend, backends, eventually_async};
use crate::data::plain_blocks;
use crate::exposition::Scrape;
use crate::wire;
use http::Method;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use tonic::Code;

const COUNT: u64 = 2000;
const ROUNDS: u64 = 30;

#[derive(Default)]
struct Counted {
    good: AtomicU64,
    bad: AtomicU64,
    bytes: AtomicU64,
}

impl Counted {
    fn add(&self, items: usize, errors: usize, bytes: usize) {
        self.good.fetch_add((items - errors) as u64, Ordering::Relaxed);
        self.bad.fetch_add(errors as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// 20 blocks, of which every fifth does not exist.
fn indices(client: u64, round: u64) -> Vec<u64> {
    (0..20)
        .map(|item| {
            (client * 7919 + round * 104_729 + item * 613) % COUNT + if item % 5 == 4 { COUNT } else { 0 }
        })
        .collect()
}

async fn unary(daemon: &Daemon, client: u64, counted: &Counted) {
    let mut fetch = daemon.fetch().await;
    for round in 0..ROUNDS {
        let request = wire::blocks("blocks", &indices(client, round));
        let answer = fetch.fetch_blocks(request).await.unwrap().into_inner();
        counted.add(20, answer.errors.len(), answer.data.len());
    }
}

async fn streamed(daemon: &Daemon, client: u64, counted: &Counted) {
    let requests = (0..ROUNDS).map(move |round| {
        wire::on_stream(
            round,
            Request::Blocks(wire::blocks("blocks", &indices(client, round))),
        )
    });
    let mut fetch = daemon.fetch().await;
    let mut answers = wire::stream(&mut fetch, requests).await;
    while let Some(answer) = answers.message().await.unwrap() {
        let answer = wire::blocks_of(answer.response).unwrap();
        counted.add(20, answer.errors.len(), answer.data.len());
    }
}

async fn over_http(daemon: &Daemon, client: u64, counted: &Counted) {
    let http = daemon.http_client();
    for round in 0..ROUNDS {
        let body = serde_json::json!({"indices": indices(client, round)});
        let answer = http
            .batch(
                "/v1/datasets/blocks/blocks:batchFetch",
                &body,
                "application/octet-stream",
            )
            .await;
        let errors: usize = answer.header("ringfetch-errors").parse().unwrap();
        counted.add(20, errors, answer.body.len());
        // One block by itself, and a range, which also counts as one read.
        let answer = http.get(&format!("/v1/datasets/blocks/blocks/{round}")).await;
        counted.add(1, 0, answer.body.len());
        let range = format!("bytes={}-{}", round * 1000, round * 1000 + 5999);
        let answer = http
            .get_with("/v1/datasets/blocks/bytes", &[("range", &range)])
            .await;
        counted.add(1, 0, answer.body.len());
    }
}

#[tokio::test]
async fn the_metrics_are_what_the_clients_counted() {
    // Scenario: clients of every transport at once, with known numbers of good and bad reads, on each
    // backend. Expectation: reads, bytes and requests match exactly; nothing is in flight; depth and latency
    // were observed once per read.
    for &backend in backends() {
        let (setup, _) = plain_blocks(Setup::new(backend), usize::try_from(COUNT).unwrap());
        let daemon = setup.start();
        let counted = Counted::default();
        tokio::join!(
            unary(&daemon, 1, &counted),
            unary(&daemon, 2, &counted),
            unary(&daemon, 3, &counted),
            streamed(&daemon, 4, &counted),
            streamed(&daemon, 5, &counted),
            over_http(&daemon, 6, &counted),
            over_http(&daemon, 7, &counted),
        );
        let good = counted.good.into_inner();
        let bad = counted.bad.into_inner();
        assert_eq!((good, bad), (7 * ROUNDS * 16 + 2 * ROUNDS * 2, 7 * ROUNDS * 4));

        // A stream is counted when its end is written, possibly after its client has seen it; and a shard
        // reports what it has in flight at the end of its turn, after it has answered.
        let streams = &[("method", "FetchStream"), ("code", "OK")];
        let scrape = eventually_async("both streams are counted and the shards are idle", async || {
            let scrape = daemon.scrape().await;
            let idle = ["ringfetch_in_flight_reads", "ringfetch_queued_reads"];
            let idle = idle.iter().all(|metric| scrape.sum(metric, &[]) == 0);
            (idle && scrape.sum("ringfetch_rpc_requests_total", streams) >= 2).then_some(scrape)
        })
        .await;
        let is = |metric: &str, labels: &[(&str, &str)], expected: u64| {
            let found = scrape.sum(metric, labels);
            assert_eq!(found, expected, "{backend}: {metric}{labels:?}");
        };
        is(
            "ringfetch_reads_total",
            &[("result", "ok"), ("dataset", "blocks"), ("backend", backend)],
            good,
        );
        is("ringfetch_reads_total", &[("result", "out_of_range")], bad);
        is("ringfetch_reads_total", &[], good + bad);
        is(
            "ringfetch_read_bytes_total",
            &[("dataset", "blocks"), ("backend", backend)],
            counted.bytes.into_inner(),
        );
        is(
            "ringfetch_read_duration_seconds_count",
            &[("stage", "total"), ("backend", backend)],
            good + bad,
        );
        is("ringfetch_batch_items_sum", &[], good + bad);
        is("ringfetch_rejected_total", &[], 0);
        is(
            "ringfetch_rpc_requests_total",
            &[("transport", "grpc"), ("method", "FetchBlocks"), ("code", "OK")],
            3 * ROUNDS,
        );
        is("ringfetch_rpc_requests_total", &[("method", "FetchStream")], 2);
        for method in ["BatchFetchBlocks", "GetBlock"] {
            is(
                "ringfetch_rpc_requests_total",
                &[("transport", "http"), ("method", method), ("code", "200")],
                2 * ROUNDS,
            );
        }
        is(
            "ringfetch_rpc_requests_total",
            &[("method", "GetBytes"), ("code", "206")],
            2 * ROUNDS,
        );
        is(
            "ringfetch_rpc_duration_seconds_count",
            &[("method", "FetchBlocks")],
            3 * ROUNDS,
        );
        of_the_device(&scrape, backend);

        let status = daemon.status().await;
        assert_eq!((status.reads_total, status.read_errors_total), (good + bad, bad));
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_request_whose_client_leaves_at_once_is_counted() {
    // Scenario: clients over HTTP/1.1 that send a request and close their sending side with it, some with a body.
    // Expectation: answered or not, each is counted once, as it is in the access log.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup.set("access_log.path", "access.log").start();
    let get = "GET /v1/datasets/blocks/blocks/7 HTTP/1.1\r\nhost: localhost\r\n\r\n".to_owned();
    let post = "POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nhost: localhost\r\n\
                content-type: application/json\r\ncontent-length: 15\r\n\r\n{\"indices\":[7]}";
    let pipelined = get.repeat(2);
    // At least so many of all so far, and at most: of two pipelined ones the second may be unread.
    for (request, least, most) in [
        (get.as_str(), 20, 20),
        (post, 40, 40),
        (pipelined.as_str(), 60, 80),
    ] {
        for _ in 0..20 {
            let mut stream = std::net::TcpStream::connect(daemon.http).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            // It may be reset.
            let _end = std::io::Read::read_to_end(&mut stream, &mut answer);
        }
        let requests = eventually_async("each is counted as often as it is logged", async || {
            let scrape = daemon.scrape().await;
            let methods = ["GetBlock", "BatchFetchBlocks", "other"];
            let counted =
                methods.map(|method| scrape.sum("ringfetch_rpc_requests_total", &[("method", method)]));
            let log = std::fs::read_to_string(daemon.path("access.log")).unwrap_or_default();
            let logged =
                methods.map(|method| log.matches(&format!("\"method\":\"{method}\"")).count() as u64);
            let all: u64 = logged.iter().sum();
            (all >= least && counted == logged).then_some(all)
        })
        .await;
        assert!(requests <= most, "{requests} after {request}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn an_object_that_cannot_be_read_is_counted_by_every_road() {
    // Scenario: objects that are missing, have an invalid name, or are shorter than the range, requested over
    // HTTP, by ReadObject and in a batch. Expectation: each counts as one read with its result, and as one
    // failed item in the access log; HEAD, which reads nothing, counts nothing.
    let setup = Setup::new(any_backend());
    setup.file("objects/short", b"short");
    let setup = setup.dataset(&["name: objects", "kind: objects", "path: objects"]);
    let daemon = setup.set("access_log.path", "access.log").start();
    let http = daemon.http_client();
    let mut fetch = daemon.fetch().await;
    let labels = [
        ("missing", "not_found"),
        ("a//b", "invalid"),
        ("short", "out_of_range"),
    ];
    for (name, _) in labels {
        let path = format!("/v1/datasets/objects/objects/{name}");
        let refused = http.get_with(&path, &[("range", "bytes=9-")]).await;
        assert!(refused.status.is_client_error(), "{refused:?}");
        http.send(Method::HEAD, &path, &[], String::new()).await;
        let request = v1::ReadObjectRequest {
            offset: 9,
            ..wire::object("objects", name)
        };
        fetch.read_object(request).await.unwrap_err();
        let mut request = wire::objects("objects", &[name]);
        request.offsets = vec![9];
        let answer = fetch.fetch_objects(request).await.unwrap().into_inner();
        assert_eq!(answer.errors.len(), 1);
    }
    let scrape = daemon.scrape().await;
    for (name, result) in labels {
        let counted = scrape.sum(
            "ringfetch_reads_total",
            &[("dataset", "objects"), ("result", result)],
        );
        assert_eq!(counted, 3, "{name}");
    }
    for method in ["GetObject", "ReadObject", "FetchObjects"] {
        let lines = eventually_async(method, async || {
            let mut lines = access_log::lines(&daemon, "access.log");
            lines.retain(|line| line["method"] == method && line["items"] != 0);
            (lines.len() >= labels.len()).then_some(lines)
        })
        .await;
        let one = |line: &serde_json::Value| line["items"] == 1 && line["failed_items"] == 1;
        assert!(lines.len() == labels.len() && lines.iter().all(one), "{lines:?}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn the_item_that_ends_its_request_is_a_failed_one() {
    // Scenario: a file that is truncated while it is served. Its lost block is requested where the first error ends the
    // request: by GET, by GET of its bytes, and in batches with `fail_fast` over both transports. Then a block past
    // the end, likewise. Expectation: one failed item in the line of each request.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 8);
    let daemon = setup.set("access_log.path", "access.log").start();
    let file = OpenOptions::new().write(true).open(daemon.path("blocks.bin"));
    file.unwrap().set_len(4 * 4096).unwrap();
    let http = daemon.http_client();
    let mut fetch = daemon.fetch().await;
    let of = |rest: &str| format!("/v1/datasets/blocks/{rest}");
    assert_eq!(http.get(&of("blocks/6")).await.status, 500);
    let range = [("range", "bytes=24576-24583")];
    assert_eq!(http.get_with(&of("bytes"), &range).await.status, 500);
    let json = [("content-type", "application/json")];
    for (index, status, code) in [(6, 500, Code::DataLoss), (8, 404, Code::OutOfRange)] {
        let body = format!("{{\"indices\": [1, {index}], \"fail_fast\": true}}");
        let refused = http
            .send(Method::POST, &of("blocks:batchFetch"), &json, body)
            .await;
        assert_eq!(refused.status, status);
        let request = v1::FetchBlocksRequest {
            fail_fast: true,
            ..wire::blocks("blocks", &[1, index])
        };
        assert_eq!(fetch.fetch_blocks(request).await.unwrap_err().code(), code);
    }
    let lines = eventually_async("a line for each request", async || {
        let lines = access_log::lines(&daemon, "access.log");
        (lines.len() >= 6).then_some(lines)
    })
    .await;
    for line in &lines {
        let is_single = line["method"]
            .as_str()
            .is_some_and(|method| method.starts_with("Get"));
        assert_eq!(line["items"], if is_single { 1 } else { 2 }, "{line}");
        assert_eq!(line["failed_items"], 1, "{line}");
    }
    daemon.stop().await;
}

/// The counters between engine and device add up.
fn of_the_device(scrape: &Scrape, backend: &str) {
    let reads = scrape.sum("ringfetch_device_reads_total", &[]);
    assert!(reads > 0);
    assert!(scrape.sum("ringfetch_device_read_bytes_total", &[]) >= 4096);
    for metric in [
        "ringfetch_queue_depth_count",
        "ringfetch_read_duration_seconds_count",
    ] {
        let labels: &[(&str, &str)] = if metric.contains("queue") {
            &[]
        } else {
            &[("stage", "device")]
        };
        assert_eq!(scrape.sum(metric, labels), reads, "{backend}: {metric}");
    }
    // Batches: more than one read was in flight at a time, and each read counts itself.
    assert!(scrape.sum("ringfetch_queue_depth_sum", &[]) > reads, "{backend}");
    if backend == "uring" {
        let submissions = scrape.sum("ringfetch_submissions_total", &[]);
        assert!(
            submissions > 0 && submissions <= reads,
            "{submissions} system calls for {reads} reads"
        );
    }
}

#[tokio::test]
#[ignore = "needs promtool"]
async fn promtool_has_nothing_to_say_about_the_metrics() {
    // Scenario: good and bad reads by unary calls, on streams and over HTTP, on each backend; then /metrics.
    // Expectation: `promtool check metrics` accepts the page without a remark.
    for &backend in backends() {
        let (setup, _) = plain_blocks(Setup::new(backend), usize::try_from(COUNT).unwrap());
        let daemon = setup.start();
        let counted = Counted::default();
        tokio::join!(
            unary(&daemon, 1, &counted),
            streamed(&daemon, 2, &counted),
            over_http(&daemon, 3, &counted),
        );
        checked_by_promtool(&daemon.scrape().await);
        daemon.stop().await;
    }
}

fn checked_by_promtool(scrape: &Scrape) {
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool (of Prometheus) must be installed");
    promtool
        .stdin
        .take()
        .unwrap()
        .write_all(scrape.text.as_bytes())
        .unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success() && said.is_empty(),
        "{}",
        String::from_utf8_lossy(&said)
    );
}
