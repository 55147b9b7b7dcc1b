//! Whole requests that are refused: each with the right code, field and remedy, and without affecting the
//! next one.

use super::served::{Served, serve};
use bytes::{BufMut as _, Bytes};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use prost::Message as _;
use ringfetch_proto::v1;
use ringfetch_server::config::Limits;
use std::time::Duration;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use tower::ServiceExt as _;

fn blocks(indices: Vec<u64>) -> v1::FetchBlocksRequest {
    v1::FetchBlocksRequest {
        dataset: "blocks".into(),
        indices,
        fail_fast: false,
        ..Default::default()
    }
}

#[tokio::test]
async fn a_wrong_request_is_told_its_field() {
    // Unknown dataset, wrong kind, nothing requested, too much requested: code and field; then a good one
    // succeeds.
    let served = serve(Limits {
        items_per_request: 3,
        ..Limits::default()
    });
    let elsewhere = |dataset: &str| v1::FetchBlocksRequest {
        dataset: dataset.into(),
        ..blocks(vec![1])
    };
    for (request, code, field) in [
        (elsewhere("none"), Code::NotFound, "dataset"),
        (elsewhere("objects"), Code::FailedPrecondition, "dataset"),
        (blocks(vec![]), Code::InvalidArgument, "indices"),
        (blocks(vec![0; 4]), Code::ResourceExhausted, "indices"),
    ] {
        let status = served.fetch().fetch_blocks(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{}", status.message());
        assert_eq!(
            status.get_details_bad_request().unwrap().field_violations[0].field,
            field
        );
    }
    let status = served
        .fetch()
        .fetch_ranges(v1::FetchRangesRequest {
            dataset: "blocks".into(),
            offsets: vec![1],
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(
        status.message(),
        "lengths: 0 entries for 1 offsets: the lists must have the same length"
    );
    served.fetch().fetch_blocks(blocks(vec![0; 3])).await.unwrap();
    assert!(served.scraped(r#"ringfetch_rejected_total{reason="items"} 1"#));
    let not_found =
        r#"ringfetch_rpc_requests_total{code="NOT_FOUND",method="FetchBlocks",transport="grpc"} 1"#;
    assert!(served.scraped(not_found));
}

#[tokio::test]
async fn a_deadline_that_has_passed_reads_nothing() {
    // grpc-timeout 0: DEADLINE_EXCEEDED, whether the wait or the check found it first, and no read was made.
    let served = serve(Limits::default());
    let mut request = tonic::Request::new(blocks(vec![0]));
    request.set_timeout(Duration::ZERO);
    let status = served.fetch().fetch_blocks(request).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(served.fetcher.engine().totals().reads, 0);
}

#[tokio::test]
async fn a_draining_daemon_says_unavailable_and_when_to_retry() {
    // The drain has begun: UNAVAILABLE with RetryInfo.
    let served = serve(Limits::default());
    served.fetcher.start_draining();
    let status = served.fetch().fetch_blocks(blocks(vec![0])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
    assert!(served.scraped(r#"ringfetch_rejected_total{reason="draining"} 1"#));
}

#[tokio::test]
async fn no_place_in_flight_is_refused_at_once() {
    // No request may be in flight: RESOURCE_EXHAUSTED with a hint, without a read.
    let served = serve(Limits {
        requests_in_flight: 0,
        ..Limits::default()
    });
    let status = served.fetch().fetch_blocks(blocks(vec![0])).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.get_details_retry_info().is_some());
    assert!(served.scraped(r#"ringfetch_rejected_total{reason="requests_in_flight"} 1"#));
}

/// Calls a path with bytes that no client library would send.
async fn raw(served: &Served, path: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Response<Bytes> {
    let mut request = Request::builder()
        .method("POST")
        .uri(path)
        .header("te", "trailers");
    if !headers.iter().any(|(name, _)| *name == "content-type") {
        request = request.header("content-type", "application/grpc");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(Bytes::from(body))).unwrap();
    let (mut parts, body) = served.router.clone().oneshot(request).await.unwrap().into_parts();
    let collected = body.collect().await.unwrap();
    parts
        .headers
        .extend(collected.trailers().cloned().unwrap_or_default());
    Response::from_parts(parts, collected.to_bytes())
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.put_u32(u32::try_from(message.len()).unwrap());
    bytes.extend_from_slice(message);
    bytes
}

fn status(headers: &HeaderMap) -> Status {
    Status::from_header_map(headers).unwrap()
}

const FETCH_BLOCKS: &str = "/ringfetch.v1.FetchService/FetchBlocks";

#[tokio::test]
async fn bytes_that_are_no_call_get_a_status() {
    // What a broken or hostile client sends: always HTTP 200 with a gRPC status and no body.
    let served = serve(Limits {
        request_bytes: 1024,
        ..Limits::default()
    });
    let good = framed(&blocks(vec![1]).encode_to_vec());
    let compressed = [&[1], &good[1..]].concat();
    let claims_4_gib = [&[0, 255, 255, 255, 255], &good[5..]].concat();
    for (headers, body, code) in [
        (&[][..], Vec::new(), Code::Unimplemented),
        (&[], [good.clone(), good.clone()].concat(), Code::Unimplemented),
        (&[], good[..7].to_vec(), Code::Internal),
        (&[], framed(&[0xff; 9]), Code::InvalidArgument),
        (&[], compressed, Code::Internal),
        (&[], claims_4_gib, Code::ResourceExhausted),
        (&[], framed(&[0; 1025]), Code::ResourceExhausted),
        (&[("grpc-encoding", "gzip")], good.clone(), Code::Unimplemented),
        (&[("grpc-timeout", "never")], good.clone(), Code::InvalidArgument),
    ] {
        let response = raw(&served, FETCH_BLOCKS, headers, body).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let status = status(response.headers());
        assert_eq!(status.code(), code, "{}", status.message());
        assert!(!status.message().is_empty() && response.body().is_empty());
    }
    let response = raw(&served, FETCH_BLOCKS, &[], good).await;
    assert_eq!(status(response.headers()).code(), Code::Ok);
}

#[tokio::test]
async fn what_is_not_served_is_unimplemented() {
    // An unknown method, an unknown service, and the admin service on the public port.
    let served = serve(Limits::default());
    for path in [
        "/ringfetch.v1.FetchService/FetchEverything",
        "/ringfetch.v1.FetchService/",
        "/ringfetch.v1.FetchService/FetchBlocks/more",
        "/ringfetch.v1.ScoreService/ScoreVectors",
        "/ringfetch.v1.AdminService/GetStatus",
        "/",
    ] {
        let response = raw(&served, path, &[], framed(&[])).await;
        assert_eq!(status(response.headers()).code(), Code::Unimplemented, "{path}");
    }
    let response = raw(
        &served,
        FETCH_BLOCKS,
        &[("content-type", "application/json")],
        Vec::new(),
    )
    .await;
    assert_eq!(response.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
}

#[tokio::test]
async fn a_message_of_any_text_travels() {
    // A dataset name with a line break and non-ASCII letters: the status arrives intact.
    let served = serve(Limits::default());
    let request = v1::FetchBlocksRequest {
        dataset: "näme\n%00".into(),
        ..blocks(vec![1])
    };
    let status = served.fetch().fetch_blocks(request).await.unwrap_err();
    assert_eq!(
        status.message(),
        r#"dataset: there is no dataset "näme\n%00"; there are: blocks, objects, vectors"#
    );
    let long = v1::FetchBlocksRequest {
        dataset: "ö".repeat(1 << 20),
        ..blocks(vec![1])
    };
    let status = served.fetch().fetch_blocks(long).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert!(status.message().len() <= 512);
}
