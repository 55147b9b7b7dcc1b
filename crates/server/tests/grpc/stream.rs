//! FetchStream over datasets, with tonic's client.

use super::served::{Served, serve, vector};
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request as Ask;
use ringfetch_proto::v1::fetch_stream_response::Response as Answer;
use ringfetch_server::config::Limits;
use std::collections::BTreeMap;
use tonic::Code;
use tonic_types::RpcStatusExt as _;

fn request(id: u64, ask: Ask) -> v1::FetchStreamRequest {
    v1::FetchStreamRequest {
        id,
        request: Some(ask),
        deadline_ms: 0,
    }
}

fn blocks(indices: Vec<u64>) -> Ask {
    Ask::Blocks(v1::FetchBlocksRequest {
        dataset: "blocks".into(),
        indices,
        fail_fast: false,
        ..Default::default()
    })
}

/// Sends every request, and reads every response.
async fn all(served: &Served, requests: Vec<v1::FetchStreamRequest>) -> BTreeMap<u64, Answer> {
    let requests = tokio_stream::iter(requests);
    let mut answers = served.fetch().fetch_stream(requests).await.unwrap().into_inner();
    let mut found = BTreeMap::new();
    while let Some(answer) = answers.message().await.unwrap() {
        assert!(
            found.insert(answer.id, answer.response.unwrap()).is_none(),
            "{} came twice",
            answer.id
        );
    }
    found
}

#[tokio::test]
async fn every_request_of_a_stream_gets_its_answer() {
    // All four kinds and two bad requests on one stream: each is answered under its id, and the stream ends
    // with OK.
    let served = serve(Limits {
        stream_requests_in_flight: 2,
        ..Limits::default()
    });
    let vectors = v1::FetchVectorsRequest {
        dataset: "vectors".into(),
        ids: vec![2, 1],
        fail_fast: false,
        ..Default::default()
    };
    let ranges = v1::FetchRangesRequest {
        dataset: "blocks".into(),
        offsets: vec![3],
        lengths: vec![4],
        fail_fast: false,
        ..Default::default()
    };
    let objects = v1::FetchObjectsRequest {
        dataset: "objects".into(),
        names: vec!["one".into()],
        ..Default::default()
    };
    let nowhere = v1::FetchBlocksRequest {
        dataset: "none".into(),
        indices: vec![1],
        fail_fast: false,
        ..Default::default()
    };
    let answers = all(
        &served,
        vec![
            request(0, blocks(vec![4, 2])),
            request(1, Ask::Vectors(vectors)),
            request(2, Ask::Ranges(ranges)),
            request(3, Ask::Objects(objects)),
            request(4, Ask::Blocks(nowhere)),
            v1::FetchStreamRequest {
                id: u64::MAX,
                request: None,
                deadline_ms: 5,
            },
        ],
    )
    .await;
    assert_eq!(answers.len(), 6);
    let Answer::Blocks(found) = &answers[&0] else {
        panic!("{answers:?}")
    };
    assert_eq!(found.data, [served.block(4), served.block(2)].concat());
    let Answer::Vectors(found) = &answers[&1] else {
        panic!("{answers:?}")
    };
    assert_eq!(found.data, [vector(2), vector(1)].concat());
    let Answer::Ranges(found) = &answers[&2] else {
        panic!("{answers:?}")
    };
    assert_eq!(found.data, served.blocks[3..7]);
    let Answer::Objects(found) = &answers[&3] else {
        panic!("{answers:?}")
    };
    assert_eq!(found.data, "first object");
    for (id, code) in [(4, Code::NotFound), (u64::MAX, Code::InvalidArgument)] {
        let Answer::Status(status) = &answers[&id] else {
            panic!("{answers:?}")
        };
        assert_eq!(Code::from(status.code), code);
        assert!(status.get_details_retry_info().is_none() && status.get_details_error_info().is_some());
    }
    let ended = r#"ringfetch_rpc_requests_total{code="OK",method="FetchStream",transport="grpc"} 1"#;
    served.await_scraped(ended).await;
}

#[tokio::test]
async fn a_long_stream_is_answered_whole() {
    // A thousand requests through a window of eight: every one is answered with its block.
    let served = serve(Limits {
        stream_requests_in_flight: 8,
        ..Limits::default()
    });
    let requests = (0..1000).map(|id| request(id, blocks(vec![id % 50]))).collect();
    let answers = all(&served, requests).await;
    assert_eq!(answers.len(), 1000);
    for (id, answer) in &answers {
        let Answer::Blocks(found) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(found.data, served.block(usize::try_from(id % 50).unwrap()));
    }
}

#[tokio::test]
async fn a_drain_ends_an_idle_stream() {
    // The client keeps its side open and sends nothing: the drain ends the call with UNAVAILABLE.
    let served = serve(Limits::default());
    let requests = tokio_stream::pending::<v1::FetchStreamRequest>();
    let mut answers = served.fetch().fetch_stream(requests).await.unwrap().into_inner();
    served.lifecycle.start_draining();
    assert_eq!(answers.message().await.unwrap_err().code(), Code::Unavailable);
}
