//! The HTTP service over a real engine and real files, without sockets: what needs bytes, time and changing files.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

mod adversity;
mod page;
mod served;

use axum::body::Body;
use http::{Method, Request, StatusCode, header};
use serde_json::json;
use served::{BLOCKS_BYTES, MIB, Served, bytes_of, data, json_of, request, text};

#[tokio::test]
async fn long_answers_are_whole() {
    // Datasets, objects and ranges of many windows: every byte, and the announced Content-Length.
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
    // Three ranges, the first longer than a window and the last at the front: each part has its bytes and its
    // position.
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
    // HEAD of every resource with bytes: GET's status, length, tag and type; the engine's read count does not
    // change.
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
    // The tag of a response, sent back: If-None-Match 304; another tag in If-Match 412, in If-Range the whole
    // resource.
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
    // Blocks, vectors, ranges and objects, alone and in a batch, as bytes and in JSON: the same bytes
    // everywhere.
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
    // Wrong names, kinds, numbers, bodies and deadlines: each is a problem with its status and the member at
    // fault.
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
        ("o/objects?page_size=x", 400, "malformed", "page_size"),
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
async fn objects_are_listed_in_pages() {
    // Three objects, two per page: byte order, and `next_page_token` only if there is a next page.
    let served = Served::new();
    let page = json_of(served.get("o/objects?page_size=2", &[]).await).await;
    let long = json!({"name": "a/long", "length_bytes": 5 * MIB + 17});
    let empty = json!({"name": "empty", "length_bytes": 0});
    assert_eq!(
        page,
        json!({"objects": [long, empty], "next_page_token": "empty"})
    );
    let page = json_of(served.get("o/objects?page_size=2&page_token=empty", &[]).await).await;
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
    // How it is read is only for operators.
    assert_eq!(
        (&blocks["read_path"], &blocks["files"]),
        (&json!(null), &json!(null))
    );
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
