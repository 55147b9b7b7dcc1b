//! What can go wrong while a response is being sent: files that change, memory that is full, a drain.

use super::served::{BLOCKS_BYTES, MIB, Served, bytes_of, data, json_of, text};
use axum::body::Body;
use axum::response::Response;
use http::{Request, StatusCode, header};
use http_body_util::BodyExt as _;
use ringfetch_proto::v1;
use serde_json::json;
use std::future::Future as _;
use std::task::Poll;
use tonic::Code;
use tonic_types::StatusExt as _;

#[tokio::test]
async fn walks_are_bounded_over_all_transports() {
    // Eight directories are being walked, for any caller: one more listing is refused with a hint over gRPC and
    // HTTP, and served when one has ended.
    let served = Served::new();
    let mut walks: Vec<_> = std::iter::from_fn(|| served.fetcher.charge_walk(None).ok()).collect();
    assert_eq!(walks.len(), 8);
    let request = v1::ListObjectsRequest {
        dataset: "o".into(),
        ..Default::default()
    };
    let refused = served.datasets().list_objects(request.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.get_details_retry_info().is_some(), "{refused:?}");
    let refused = served.get("o/objects", &[]).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers().contains_key(header::RETRY_AFTER));
    walks.pop();
    assert!(served.datasets().list_objects(request).await.is_ok());
    assert_eq!(served.get("o/objects", &[]).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn an_object_that_is_replaced_is_sent_as_it_was() {
    // The object is replaced after the first window is sent: the body ends with old bytes, and the next GET
    // gets the new object. If the object is written to in place, the body ends with an error.
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
    let rest = body.collect().await.unwrap().to_bytes();
    assert!([&first[..], &rest].concat() == data(5 * MIB + 17, 1));
    let response = served
        .get(
            "o/objects/a/long",
            &[(header::RANGE, "bytes=0-"), (header::IF_RANGE, &old_tag)],
        )
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(bytes_of(response).await == fresh);

    let mut body = served.get("o/objects/a/long", &[]).await.into_body();
    body.frame().await.unwrap().unwrap();
    std::fs::write(path.join("long"), data(5 * MIB + 17, 3)).unwrap();
    assert!(body.collect().await.is_err());
    served.stop().await;
}

#[tokio::test]
async fn a_file_that_is_cut_short_breaks_its_answer_off() {
    // The file is truncated after the first window is sent: the body ends with an error; what is left is
    // still served.
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

async fn fill(served: &Served, blocks: u32, held: &mut Vec<Response>) -> Response {
    let indices: Vec<u32> = (0..blocks).collect();
    loop {
        assert!(held.len() < 256, "8 MiB never filled up");
        let response = served
            .post("b/blocks:batchFetch", "*/*", json!({"indices": indices}))
            .await;
        if response.status() != StatusCode::OK {
            return response;
        }
        held.push(response);
    }
}

#[tokio::test]
async fn full_memory_refuses_new_answers_and_delays_begun_ones() {
    // Unread responses fill the memory: a new one is refused with Retry-After; one that has begun waits, and
    // continues afterwards.
    let served = Served::new();
    let mut held = Vec::new();
    let refused = fill(&served, 128, &mut held).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(text(&refused, "retry-after"), "1");
    assert_eq!(json_of(refused).await["type"], "/problems/overloaded");

    // Room for the first window, which is being sent; then none again.
    drop(held.pop());
    let mut body = served.get("b/bytes", &[]).await.into_body();
    fill(&served, 1, &mut held).await;
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
    // The drain begins after the first window: the rest arrives; a new request is refused, and the daemon is
    // not ready.
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
