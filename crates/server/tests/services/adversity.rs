//! Bounds that many requests together reach: walks of directories, and memory.

use super::served::{BLOCKS_BYTES, Served, data, json_of, text};
use axum::response::Response;
use http::{StatusCode, header};
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
