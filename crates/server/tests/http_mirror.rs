//! The HTTP service over a real engine and real files, without sockets: what needs bytes, time and changing files.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use http::{Method, Request, StatusCode, header};
use http_body_util::BodyExt as _;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, Dtype, KindSpec, Layout, PartialTail};
use ringfetch_engine::engine::Engine;
use ringfetch_server::config::Limits;
use ringfetch_server::fetch::Fetcher;
use ringfetch_server::http as service_of;
use ringfetch_server::lifecycle::Lifecycle;
use ringfetch_server::rpc_metrics::RpcMetrics;
use serde_json::{Value, json};
use std::future::Future as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tower::ServiceExt as _;

const MIB: usize = 1 << 20;
/// Five windows and three blocks.
const BLOCKS_BYTES: usize = 5 * MIB + 3 * 4096;

struct Served {
    directory: TempDir,
    engine: Engine,
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    router: Router,
}

fn data(length: usize, seed: usize) -> Vec<u8> {
    (0..length)
        .map(|i| u8::try_from((i * 7 + i / 251 + seed) % 256).unwrap())
        .collect()
}

impl Served {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("blocks"), data(BLOCKS_BYTES, 0)).unwrap();
        let vectors: Vec<u8> = (0..400_u16).flat_map(|i| f32::from(i).to_le_bytes()).collect();
        std::fs::write(path("vectors"), vectors).unwrap();
        std::fs::create_dir_all(path("objects/a")).unwrap();
        std::fs::write(path("objects/a/long"), data(5 * MIB + 17, 1)).unwrap();
        std::fs::write(path("objects/one"), b"x").unwrap();
        std::fs::write(path("objects/empty"), b"").unwrap();
        let datasets = [
            (
                "b",
                "blocks",
                KindSpec::Blocks {
                    block_bytes: 4096,
                    partial_tail: PartialTail::Refuse,
                },
            ),
            (
                "v",
                "vectors",
                KindSpec::Vectors {
                    layout: Layout::Raw,
                    dim: Some(4),
                    dtype: Some(Dtype::F32),
                    header_bytes: 0,
                },
            ),
            (
                "o",
                "objects",
                KindSpec::Objects {
                    max_open_files: 8,
                    revalidate: Duration::ZERO,
                },
            ),
        ];
        let datasets = datasets.map(|(name, file, kind)| {
            let paths: Vec<PathBuf> = vec![path(file)];
            let spec = DatasetSpec {
                name: name.to_owned(),
                paths,
                kind,
                direct_io: DirectIo::Off,
            };
            Arc::new(Dataset::open(&spec).unwrap())
        });
        let config = EngineConfig {
            backend: BackendKind::Pread,
            pin: false,
            memory_budget_bytes: 8 * MIB as u64,
            ..EngineConfig::default()
        };
        let limits = Limits {
            items_per_request: 4096,
            response_bytes: 4 * MIB as u64,
            request_bytes: 1 << 16,
            requests_in_flight: 64,
            requests_per_connection: 64,
            stream_requests_in_flight: 8,
            connections: 8,
            http_ranges: 8,
        };
        // Starting blocks until the threads are there, so not on the test's runtime.
        let engine = std::thread::spawn(move || Engine::start(&config).unwrap()).join().unwrap();
        let fetcher = Fetcher::new(engine.clone(), datasets.to_vec(), limits);
        let lifecycle = Lifecycle::new();
        let registry = prometheus::Registry::new();
        let rpc = RpcMetrics::new(&registry).unwrap();
        let router = service_of::service(fetcher.clone(), lifecycle.clone(), rpc, registry);
        Self {
            directory,
            engine,
            fetcher,
            lifecycle,
            router,
        }
    }

    async fn send(&self, request: Request<Body>) -> Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    async fn get(&self, path: &str, headers: &[(header::HeaderName, &str)]) -> Response {
        self.send(request(Method::GET, path, headers, Body::empty()))
            .await
    }

    async fn post(&self, path: &str, accept: &str, body: Value) -> Response {
        let headers = [
            (header::CONTENT_TYPE, "application/json"),
            (header::ACCEPT, accept),
        ];
        self.send(request(
            Method::POST,
            path,
            &headers,
            Body::from(body.to_string()),
        ))
        .await
    }

    async fn stop(self) {
        let report = self.engine.drain(Instant::now() + Duration::from_secs(10)).await;
        assert_eq!(report.abandoned_reads, 0);
    }
}

fn request(method: Method, path: &str, headers: &[(header::HeaderName, &str)], body: Body) -> Request<Body> {
    let builder = Request::builder()
        .method(method)
        .uri(format!("/v1/datasets/{path}"));
    headers
        .iter()
        .fold(builder, |builder, (name, value)| builder.header(name, *value))
        .body(body)
        .unwrap()
}

async fn bytes_of(response: Response) -> Vec<u8> {
    response.into_body().collect().await.unwrap().to_bytes().to_vec()
}

async fn json_of(response: Response) -> Value {
    serde_json::from_slice(&bytes_of(response).await).unwrap()
}

fn text(response: &Response, name: impl AsRef<str>) -> String {
    response
        .headers()
        .get(name.as_ref())
        .map_or(String::new(), |value| value.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn long_answers_are_whole() {
    // Datasets, objects and ranges of many windows: every byte, and the Content-Length that was announced.
    let served = Served::new();
    let blocks = data(BLOCKS_BYTES, 0);
    let object = data(5 * MIB + 17, 1);
    for (path, range, status, expected) in [
        ("b/bytes", "", 200, &blocks[..]),
        ("b/bytes", "bytes=500-4999999", 206, &blocks[500..5_000_000]),
        (
            "b/bytes",
            "bytes=-2000001",
            206,
            &blocks[BLOCKS_BYTES - 2_000_001..],
        ),
        ("o/objects/a/long", "", 200, &object[..]),
        ("o/objects/a%2Flong", "bytes=1-", 206, &object[1..]),
        ("o/objects/one", "", 200, b"x"),
        ("o/objects/empty", "", 200, b""),
        ("o/objects/empty", "bytes=-1", 200, b""),
    ] {
        let response = served.get(path, &[(header::RANGE, range)]).await;
        assert_eq!(response.status(), status, "{path} {range}");
        assert_eq!(
            text(&response, "content-length"),
            expected.len().to_string(),
            "{path} {range}"
        );
        assert!(bytes_of(response).await == expected, "{path} {range}");
    }
    served.stop().await;
}

#[tokio::test]
async fn several_ranges_are_parts_in_the_order_asked_for() {
    // Three ranges, the first longer than a window and the last at the front: each part has its bytes and its place.
    let served = Served::new();
    let blocks = data(BLOCKS_BYTES, 0);
    let response = served
        .get("b/bytes", &[(header::RANGE, "bytes=1000-2999999,-10,5-5")])
        .await;
    assert_eq!(response.status(), StatusCode::PARTIAL_CONTENT);
    let content_type = text(&response, "content-type");
    let boundary = content_type
        .strip_prefix("multipart/byteranges; boundary=")
        .unwrap()
        .to_owned();
    let declared = text(&response, "content-length");
    let mut expected = Vec::new();
    for (first, last) in [(1000, 2_999_999), (BLOCKS_BYTES - 10, BLOCKS_BYTES - 1), (5, 5)] {
        let line_end = if expected.is_empty() { "" } else { "\r\n" };
        let range = format!("Content-Range: bytes {first}-{last}/{BLOCKS_BYTES}");
        let head =
            format!("{line_end}--{boundary}\r\nContent-Type: application/octet-stream\r\n{range}\r\n\r\n");
        expected.extend_from_slice(head.as_bytes());
        expected.extend_from_slice(&blocks[first..=last]);
    }
    expected.extend_from_slice(format!("\r\n--{boundary}--\r\n").as_bytes());
    assert_eq!(declared, expected.len().to_string());
    assert!(bytes_of(response).await == expected);
    served.stop().await;
}

#[tokio::test]
async fn head_has_the_head_of_get_and_reads_nothing() {
    // HEAD of every resource with bytes: GET's status, length, tag and type; the engine's read count stands still.
    let served = Served::new();
    for path in [
        "b/bytes",
        "b/blocks/3",
        "v/vectors/7",
        "o/objects/a/long",
        "o/objects/empty",
    ] {
        let get = served.get(path, &[]).await;
        let reads = served.engine.totals().reads;
        let head = served.send(request(Method::HEAD, path, &[], Body::empty())).await;
        assert_eq!(head.status(), get.status(), "{path}");
        for name in ["content-length", "content-type", "etag", "accept-ranges"] {
            assert_eq!(text(&head, name), text(&get, name), "{path} {name}");
        }
        assert!(bytes_of(head).await.is_empty());
        assert_eq!(served.engine.totals().reads, reads, "{path}");
    }
    let gone = served
        .send(request(Method::HEAD, "b/blocks/999999", &[], Body::empty()))
        .await;
    assert_eq!(gone.status(), StatusCode::NOT_FOUND);
    served.stop().await;
}

#[tokio::test]
async fn tags_guard_every_resource() {
    // The tag of an answer sent back: If-None-Match 304, If-Match of another 412, If-Range of another the whole.
    let served = Served::new();
    for path in ["b/bytes", "b/blocks/3", "v/vectors/7", "o/objects/one"] {
        let tag = text(&served.get(path, &[]).await, "etag");
        assert!(tag.starts_with('"') && tag.len() > 2, "{path}: {tag}");
        let same = served.get(path, &[(header::IF_NONE_MATCH, &tag)]).await;
        assert_eq!(
            (same.status(), text(&same, "etag")),
            (StatusCode::NOT_MODIFIED, tag.clone()),
            "{path}"
        );
        assert!(bytes_of(same).await.is_empty());
        assert_eq!(
            served.get(path, &[(header::IF_MATCH, &tag)]).await.status(),
            StatusCode::OK,
            "{path}"
        );
        let other = served.get(path, &[(header::IF_MATCH, "\"other\"")]).await;
        assert_eq!(other.status(), StatusCode::PRECONDITION_FAILED, "{path}");
    }
    let range = (header::RANGE, "bytes=0-0");
    let tag = text(&served.get("b/bytes", &[]).await, "etag");
    let part = served
        .get("b/bytes", &[range.clone(), (header::IF_RANGE, &tag)])
        .await;
    assert_eq!(part.status(), StatusCode::PARTIAL_CONTENT);
    let whole = served
        .get("b/bytes", &[range, (header::IF_RANGE, &format!("W/{tag}"))])
        .await;
    assert_eq!(whole.status(), StatusCode::OK);
    served.stop().await;
}

#[tokio::test]
async fn items_come_one_by_one_and_in_batches_alike() {
    // Blocks, vectors, ranges and objects, alone and in a batch, as bytes and in JSON: the same bytes everywhere.
    let served = Served::new();
    let blocks = data(BLOCKS_BYTES, 0);
    let one = bytes_of(served.get("b/blocks/3", &[]).await).await;
    assert!(one == blocks[3 * 4096..4 * 4096]);
    let batch = served
        .post("b/blocks:batchFetch", "*/*", json!({"indices": [3, 999_999, 3]}))
        .await;
    assert_eq!(text(&batch, "ringfetch-error-items"), "1");
    assert_eq!(text(&batch, "ringfetch-item-bytes"), "4096");
    assert!(bytes_of(batch).await == [&one[..], &one[..]].concat());

    let numbers = served
        .get("v/vectors/2", &[(header::ACCEPT, "application/json")])
        .await;
    assert_eq!(json_of(numbers).await, json!([8.0, 9.0, 10.0, 11.0]));
    let batch = served
        .post(
            "v/vectors:batchFetch",
            "application/json",
            json!({"ids": [0, 100]}),
        )
        .await;
    let batch = json_of(batch).await;
    assert_eq!(
        (&batch["dim"], &batch["dtype"], &batch["lengths"]),
        (&json!(4), &json!("f32"), &json!([16, 0]))
    );
    assert_eq!(batch["errors"][0]["code"], "index-out-of-range");
    assert_eq!(batch["data"], "AAAAAAAAgD8AAABAAABAQA==");

    let ranges = json!({"ranges": [{"offset": 10, "length": 3}, {"offset": 0, "length": 2}]});
    let batch = served.post("b/ranges:batchFetch", "*/*", ranges).await;
    assert_eq!(text(&batch, "ringfetch-lengths"), "3,2");
    assert!(bytes_of(batch).await == [&blocks[10..13], &blocks[..2]].concat());

    let objects =
        json!({"objects": [{"name": "a/long", "offset": 5, "length": 2}, {"name": "one"}, {"name": "../b"}]});
    let batch = served.post("o/objects:batchFetch", "*/*", objects).await;
    assert_eq!(
        (
            text(&batch, "ringfetch-lengths"),
            text(&batch, "ringfetch-errors")
        ),
        ("2,1,0".into(), "1".into())
    );
    assert!(bytes_of(batch).await == [&data(10, 1)[5..7], b"x"].concat());
    served.stop().await;
}

#[tokio::test]
async fn mistakes_are_answered_with_their_status() {
    // Wrong names, kinds, numbers, bodies and deadlines: a problem each, with the status and the member to look at.
    let served = Served::new();
    for (path, status, slug, field) in [
        ("x", 404, "dataset-not-found", "dataset"),
        ("x/bytes", 404, "dataset-not-found", "dataset"),
        ("o/bytes", 400, "wrong-kind", "dataset"),
        ("v/blocks/1", 400, "wrong-kind", "dataset"),
        ("b/blocks/-1", 400, "malformed", "index"),
        ("v/vectors/100", 404, "index-out-of-range", "id"),
        ("o/objects/none", 404, "object-not-found", ""),
        ("o/objects/a", 404, "object-not-found", ""),
        ("o/objects/..%2Fblocks", 400, "object-name-invalid", ""),
        ("o/objects?limit=x", 400, "malformed", "limit"),
        ("b/objects", 400, "wrong-kind", "dataset"),
    ] {
        let response = served.get(path, &[]).await;
        assert_eq!(response.status(), status, "{path}");
        let problem = json_of(response).await;
        assert_eq!(problem["type"], format!("/problems/{slug}"), "{path}");
        assert_eq!(problem["field"].as_str().unwrap_or_default(), field, "{path}");
    }
    for (path, body, status, slug) in [
        ("b/blocks:batchFetch", json!({"indices": []}), 400, "empty-batch"),
        (
            "b/blocks:batchFetch",
            json!({"indices": vec![0; 5000]}),
            413,
            "too-many-items",
        ),
        (
            "b/blocks:batchFetch",
            json!({"indices": vec![0; 2000]}),
            413,
            "response-too-large",
        ),
        (
            "b/blocks:batchFetch",
            json!({"indices": [999_999], "fail_fast": true}),
            404,
            "index-out-of-range",
        ),
        (
            "b/ranges:batchFetch",
            json!({"ranges": [{"offset": 1}]}),
            400,
            "malformed",
        ),
        ("b/objects:batchFetch", json!({"names": ["a"]}), 400, "wrong-kind"),
        (
            "b/blocks:batchFetch",
            json!({"indices": vec!["0".repeat(100); 1000]}),
            413,
            "request-too-large",
        ),
    ] {
        let response = served.post(path, "*/*", body).await;
        assert_eq!(response.status(), status, "{slug}");
        assert_eq!(json_of(response).await["type"], format!("/problems/{slug}"));
    }
    let flood = served
        .get(
            "b/bytes",
            &[(header::RANGE, "bytes=0-0,2-2,4-4,6-6,8-8,10-10,12-12,14-14,16-16")],
        )
        .await;
    assert_eq!(flood.status(), StatusCode::BAD_REQUEST);
    assert!(
        json_of(flood).await["detail"]
            .as_str()
            .unwrap()
            .contains("limits.http_ranges")
    );
    let past = served.get("b/bytes", &[(header::RANGE, "bytes=99999999-")]).await;
    assert_eq!(past.status(), StatusCode::RANGE_NOT_SATISFIABLE);
    assert_eq!(text(&past, "content-range"), format!("bytes */{BLOCKS_BYTES}"));
    served.stop().await;
}

#[tokio::test]
async fn an_object_that_is_replaced_breaks_its_answer_off() {
    // The object is replaced after the first window is sent: the body ends in an error, and the next GET is of the new.
    let served = Served::new();
    let response = served.get("o/objects/a/long", &[]).await;
    let old_tag = text(&response, "etag");
    let mut body = response.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first == data(first.len(), 1));
    let fresh = data(5 * MIB + 17, 2);
    let path = served.directory.path().join("objects/a");
    std::fs::write(path.join("new"), &fresh).unwrap();
    std::fs::rename(path.join("new"), path.join("long")).unwrap();
    assert!(body.collect().await.is_err());
    let response = served
        .get(
            "o/objects/a/long",
            &[(header::RANGE, "bytes=0-"), (header::IF_RANGE, &old_tag)],
        )
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(bytes_of(response).await == fresh);
    served.stop().await;
}

#[tokio::test]
async fn a_file_that_is_cut_short_breaks_its_answer_off() {
    // The file loses its end after the first window is sent: the body ends in an error, what is left is still served.
    let served = Served::new();
    let mut body = served.get("b/bytes", &[]).await.into_body();
    body.frame().await.unwrap().unwrap();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(served.directory.path().join("blocks"))
        .unwrap();
    file.set_len(MIB as u64).unwrap();
    assert!(body.collect().await.is_err());
    let lost = served.get("b/blocks/1000", &[]).await;
    assert_eq!(lost.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(json_of(lost).await["type"], "/problems/truncated");
    assert_eq!(served.get("b/blocks/1", &[]).await.status(), StatusCode::OK);
    served.stop().await;
}

#[tokio::test]
async fn full_memory_refuses_new_answers_and_delays_begun_ones() {
    // Unread answers fill the memory: a new one is refused with Retry-After; a begun one waits, and goes on after.
    let served = Served::new();
    let mut held = Vec::new();
    let refused = loop {
        assert!(held.len() < 64, "8 MiB never filled up");
        let response = served.get("b/bytes", &[(header::RANGE, "bytes=0-524287")]).await;
        match response.status() {
            StatusCode::PARTIAL_CONTENT => held.push(response),
            _ => break response,
        }
    };
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(text(&refused, "retry-after"), "1");
    assert_eq!(json_of(refused).await["type"], "/problems/overloaded");

    // Room for one window, which the head needs.
    held.truncate(held.len() - 2);
    let mut body = served.get("b/bytes", &[]).await.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let mut second = std::pin::pin!(body.frame());
    let waits = std::future::poll_fn(|cx| Poll::Ready(second.as_mut().poll(cx).is_pending()));
    assert!(waits.await);
    drop(held);
    let second = second.await.unwrap().unwrap().into_data().unwrap();
    let mut all = [&first[..], &second[..]].concat();
    drop((first, second));
    all.extend_from_slice(&body.collect().await.unwrap().to_bytes());
    assert!(all == data(BLOCKS_BYTES, 0));
    served.stop().await;
}

#[tokio::test]
async fn a_begun_answer_is_finished_while_draining() {
    // The drain begins after the first window: the rest comes; a new request is refused and readiness is gone.
    let served = Served::new();
    served.lifecycle.start_serving();
    let ready = || served.send(Request::builder().uri("/readyz").body(Body::empty()).unwrap());
    assert_eq!(ready().await.status(), StatusCode::OK);
    let response = served.get("b/bytes", &[]).await;
    served.fetcher.start_draining();
    served.lifecycle.start_draining();
    let refused = served.get("b/blocks/1", &[]).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(text(&refused, "retry-after"), "1");
    assert_eq!(json_of(refused).await["type"], "/problems/draining");
    assert_eq!(json_of(ready().await).await, json!({"state": "draining"}));
    assert!(bytes_of(response).await == data(BLOCKS_BYTES, 0));
    served.stop().await;
}

#[tokio::test]
async fn objects_are_listed_in_pages() {
    // Three objects, two a page: byte order, and `next_after` only where there is more.
    let served = Served::new();
    let page = json_of(served.get("o/objects?limit=2", &[]).await).await;
    let long = json!({"name": "a/long", "length_bytes": 5 * MIB + 17});
    let empty = json!({"name": "empty", "length_bytes": 0});
    assert_eq!(page, json!({"objects": [long, empty], "next_after": "empty"}));
    let page = json_of(served.get("o/objects?limit=2&after=empty", &[]).await).await;
    assert_eq!(page, json!({"objects": [{"name": "one", "length_bytes": 1}]}));
    served.stop().await;
}

#[tokio::test]
async fn datasets_are_described() {
    // The list and one of each kind: the proto's fields, the shape of vectors, and how they are read.
    let served = Served::new();
    let list = json_of(
        served
            .send(
                Request::builder()
                    .uri("/v1/datasets")
                    .body(Body::empty())
                    .unwrap(),
            )
            .await,
    )
    .await;
    let names: Vec<&str> = list["datasets"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["b", "o", "v"]);
    let blocks = json_of(served.get("b", &[]).await).await;
    assert_eq!(blocks["length_bytes"], BLOCKS_BYTES);
    assert_eq!(
        (&blocks["kind"], &blocks["block_bytes"]),
        (&json!("blocks"), &json!(4096))
    );
    assert_eq!(blocks["read_path"]["backend"], "pread");
    assert_eq!(
        text(&served.get("b/bytes", &[]).await, "etag"),
        format!("\"{}\"", blocks["etag"].as_str().unwrap())
    );
    let vectors = json_of(served.get("v", &[]).await).await;
    assert_eq!(
        (&vectors["count"], &vectors["vectors"]["dim"]),
        (&json!(100), &json!(4))
    );
    assert_eq!(vectors["vectors"]["dtype"], "f32");
    let objects = json_of(served.get("o", &[]).await).await;
    assert_eq!(
        (&objects["etag"], &objects["length_bytes"]),
        (&json!(""), &json!(0))
    );
    served.stop().await;
}
