//! Bounds that many requests together reach: walks of directories, and memory.

use super::served::{BLOCKS_BYTES, LIMITS, MIB, Served, data, json_of, text};
use axum::response::Response;
use http::{StatusCode, header};
use http_body_util::BodyExt as _;
use ringfetch_proto::v1;
use ringfetch_server::config::Limits;
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

#[tokio::test]
async fn requests_in_flight_do_not_delay_responses_that_have_begun() {
    // Scenario: an object is read over gRPC and HTTP; after its first window the limit is lowered, and others hold all that it
    // allows. Expectation: a new request is refused; both responses are complete.
    let served = Served::new();
    let mut body = served.get("o/objects/a/long", &[]).await.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let request = v1::ReadObjectRequest {
        dataset: "o".into(),
        name: "a/long".into(),
        ..Default::default()
    };
    let mut call = served.fetch().read_object(request).await.unwrap().into_inner();
    assert!(call.message().await.unwrap().is_some());
    // Of 64, some of which the next windows may have.
    let _held = served.fetcher.callers().requests().charge(32).unwrap();
    let limits = Limits {
        requests_in_flight: 2,
        ..LIMITS
    };
    served.fetcher.replace(served.fetcher.datasets(), limits);
    let refused = served.get("b/blocks/0", &[]).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let mut received = 0;
    while let Some(message) = call.message().await.unwrap() {
        received += message.data.len();
    }
    let rest = body.collect().await.unwrap().to_bytes();
    assert_eq!(received, 5 * MIB + 17);
    assert!([&first[..], &rest[..]].concat() == data(5 * MIB + 17, 1));
    served.stop().await;
}
