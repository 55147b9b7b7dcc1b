//! gRPC calls: bytes that no client library would send, and what only a part of a daemon can show.

use super::served::{LIMITS, Served};
use bytes::{BufMut as _, Bytes};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use prost::Message as _;
use ringfetch_proto::v1;
use ringfetch_proto::v1::admin_service_client::AdminServiceClient;
use ringfetch_server::config::Limits;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use tower::ServiceExt as _;

fn blocks(indices: Vec<u64>) -> v1::FetchBlocksRequest {
    v1::FetchBlocksRequest {
        dataset: "b".into(),
        indices,
        fail_fast: false,
        ..Default::default()
    }
}

/// One query of ones with twenty candidates.
fn scores() -> v1::ScoreVectorsRequest {
    v1::ScoreVectorsRequest {
        dataset: "v".into(),
        queries: vec![v1::ScoreQuery {
            vector: vec![1.0; 4],
            ids: (0..20).collect(),
        }],
        metric: v1::Metric::Dot.into(),
        limit: 3,
        ..Default::default()
    }
}

#[tokio::test]
async fn a_draining_daemon_says_unavailable_and_when_to_retry() {
    // The drain has begun: UNAVAILABLE with RetryInfo, for data and for scores; both refusals are counted.
    let served = Served::new();
    served.fetcher.start_draining();
    for status in [
        served.fetch().fetch_blocks(blocks(vec![0])).await.unwrap_err(),
        served.fetch().score_vectors(scores()).await.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
    }
    let scraped = prometheus::TextEncoder::new()
        .encode_to_string(&served.registry.gather())
        .unwrap();
    let counted = r#"ringfetch_rejected_total{reason="draining"} 2"#;
    assert!(scraped.lines().any(|line| line == counted), "{scraped}");
}

#[tokio::test]
async fn candidates_beyond_an_answers_bytes_are_scored() {
    // Responses of at most 100 bytes, and 20 candidates of 16 bytes that fifty queries share: only ids and
    // scores are in the response.
    let served = Served::with(Limits {
        response_bytes: 100,
        ..LIMITS
    });
    let mut many = scores();
    many.queries = vec![many.queries[0].clone(); 50];
    let answer = served.fetch().score_vectors(many).await.unwrap().into_inner();
    assert_eq!((answer.results.len(), answer.results[0].ids.len()), (50, 3));
    assert!(answer.results.iter().all(|result| *result == answer.results[0]));
}

#[tokio::test]
async fn a_daemon_without_a_file_cannot_reload_and_says_so() {
    // The demo has no configuration file: FAILED_PRECONDITION with the remedy, and no reload in the status.
    let served = Served::new();
    served.lifecycle.start_serving();
    let mut admin = AdminServiceClient::new(served.admin.clone());
    let status = admin.reload(v1::ReloadRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("--config"), "{status:?}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "NO_FILE");
    let state = admin.get_status(v1::GetStatusRequest {}).await.unwrap();
    assert_eq!(state.into_inner().last_reload, None);
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
    let (mut parts, body) = served.grpc.clone().oneshot(request).await.unwrap().into_parts();
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
    // What a broken or hostile client sends to services of both kinds of framing: always HTTP 200 with a gRPC status and
    // no body.
    let served = Served::new();
    for (path, message) in [
        (FETCH_BLOCKS, blocks(vec![1]).encode_to_vec()),
        ("/ringfetch.v1.DatasetService/ListDatasets", Vec::new()),
        ("/grpc.health.v1.Health/Watch", Vec::new()),
    ] {
        let good = framed(&message);
        let compressed = [&[1], &good[1..]].concat();
        let claims_4_gib = [&[0, 255, 255, 255, 255], &good[5..]].concat();
        for (headers, body, code) in [
            (&[][..], Vec::new(), Code::Unimplemented),
            (&[], [good.clone(), good.clone()].concat(), Code::Unimplemented),
            (&[], good[..4].to_vec(), Code::Internal),
            (&[], good[..good.len() - 1].to_vec(), Code::Internal),
            (&[], framed(&[0xff; 9]), Code::InvalidArgument),
            (&[], compressed, Code::Internal),
            (&[], claims_4_gib, Code::ResourceExhausted),
            (&[], framed(&vec![0; (1 << 16) + 1]), Code::ResourceExhausted),
            (&[("grpc-encoding", "gzip")], good.clone(), Code::Unimplemented),
            (&[("grpc-timeout", "never")], good.clone(), Code::InvalidArgument),
        ] {
            let response = raw(&served, path, headers, body).await;
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(response.headers()["content-type"], "application/grpc");
            let status = status(response.headers());
            assert_eq!(status.code(), code, "{path}: {}", status.message());
            assert!(!status.message().is_empty() && response.body().is_empty());
            if code == Code::InvalidArgument && headers.is_empty() {
                let invalid = &status.get_details_bad_request().unwrap().field_violations[0];
                assert_eq!(invalid.field, "message", "{path}");
            }
        }
        // Also ends the watch.
        served.lifecycle.start_draining();
        let response = raw(&served, path, &[("content-type", "application/grpc+proto")], good).await;
        assert_eq!(status(response.headers()).code(), Code::Ok, "{path}");
    }
}

#[tokio::test]
async fn reflection_reports_what_is_no_request() {
    // Bytes that are no reflection request: the same codes as from a stream of FetchService. Nothing at all is no error.
    let served = Served::new();
    for version in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        for (body, code) in [
            (framed(&[0xff; 9]), Code::InvalidArgument),
            (framed(&[])[..4].to_vec(), Code::Internal),
            ([&[1], &framed(&[])[1..]].concat(), Code::Internal),
            (framed(&vec![0; (1 << 16) + 1]), Code::ResourceExhausted),
            (Vec::new(), Code::Ok),
        ] {
            let response = raw(&served, &path, &[], body).await;
            assert_eq!(response.headers()["content-type"], "application/grpc");
            let status = status(response.headers());
            assert_eq!(status.code(), code, "{version}: {}", status.message());
            assert!(response.body().is_empty());
        }
    }
}

#[tokio::test]
async fn what_is_not_served_is_unimplemented() {
    // Unknown methods, unknown services, and the admin service on the public port. Expectation: a message says what there is.
    let served = Served::new();
    let no_method = "ringfetch.v1.FetchService has no such method";
    let no_service = "this port has ringfetch.v1.FetchService, ringfetch.v1.DatasetService, grpc.health";
    for (path, message) in [
        ("/ringfetch.v1.FetchService/FetchEverything", no_method),
        ("/ringfetch.v1.FetchService/", no_method),
        ("/ringfetch.v1.FetchService/FetchBlocks/", no_method),
        ("/ringfetch.v1.FetchService/FetchBlocks/more", no_method),
        (
            "/ringfetch.v1.DatasetService/Nonsense",
            "ringfetch.v1.DatasetService has no such method",
        ),
        ("/ringfetch.v1.fetchservice/FetchBlocks", no_service),
        ("/ringfetch.v1.ScoreService/ScoreVectors", no_service),
        ("/ringfetch.v1.AdminService/GetStatus", no_service),
        ("/", no_service),
    ] {
        let response = raw(&served, path, &[], framed(&[])).await;
        let status = status(response.headers());
        assert_eq!(status.code(), Code::Unimplemented, "{path}");
        assert!(status.message().contains(message), "{path}: {}", status.message());
    }
}

#[tokio::test]
async fn a_message_of_any_text_travels() {
    // A dataset name with a line break and non-ASCII letters: the status arrives intact.
    let served = Served::with(Limits {
        request_bytes: 4 << 20,
        ..LIMITS
    });
    let request = v1::FetchBlocksRequest {
        dataset: "näme\n%00".into(),
        ..blocks(vec![1])
    };
    let status = served.fetch().fetch_blocks(request).await.unwrap_err();
    assert_eq!(
        status.message(),
        r#"dataset: there is no dataset "näme\n%00"; there are: b, o, v"#
    );
    let long = v1::FetchBlocksRequest {
        dataset: "ö".repeat(1 << 20),
        ..blocks(vec![1])
    };
    let status = served.fetch().fetch_blocks(long).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert!(status.message().len() <= 512);
}
