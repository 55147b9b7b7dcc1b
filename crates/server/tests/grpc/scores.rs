//! ScoreVectors: its responses, and its errors for bad input.

use super::served::{DIM, VECTORS, serve, vector};
use ringfetch_proto::v1;
use ringfetch_server::config::Limits;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// A valid request: one query of ones.
fn request() -> v1::ScoreVectorsRequest {
    v1::ScoreVectorsRequest {
        dataset: "vectors".into(),
        queries: vec![v1::ScoreQuery {
            vector: vec![1.0; DIM],
            ids: (0..VECTORS as u64).collect(),
        }],
        metric: v1::Metric::Dot.into(),
        limit: 3,
        ..Default::default()
    }
}

/// Sums of the elements, by id.
fn sums() -> Vec<(f64, u64)> {
    let sum = |id: usize| {
        let elements = vector(id);
        let values = elements
            .chunks(4)
            .map(|raw| f32::from_le_bytes(raw.try_into().unwrap()));
        values.map(f64::from).sum()
    };
    (0..VECTORS).map(|id| (sum(id), id as u64)).collect()
}

fn field_of(status: &Status) -> String {
    let violations = status.get_details_bad_request().unwrap().field_violations;
    violations[0].field.clone()
}

#[tokio::test]
async fn the_best_candidates_come_best_first() {
    // The inner product with ones is the sum of the elements: the three largest, largest first, and counted as a call.
    let served = serve(Limits::default());
    let answer = served
        .fetch()
        .score_vectors(request())
        .await
        .unwrap()
        .into_inner();
    let mut expected = sums();
    expected.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
    expected.truncate(3);
    let result = &answer.results[0];
    assert_eq!(result.ids, expected.iter().map(|(_, id)| *id).collect::<Vec<_>>());
    assert_eq!(
        result.scores,
        expected.iter().map(|(sum, _)| *sum).collect::<Vec<_>>()
    );
    assert!(
        served.scraped(r#"ringfetch_rpc_requests_total{code="OK",method="ScoreVectors",transport="grpc"} 1"#)
    );
}

#[tokio::test]
async fn a_threshold_leaves_out_what_does_not_reach_it() {
    // At least the second best score: two results, fewer than the limit.
    let served = serve(Limits::default());
    let mut scores: Vec<f64> = sums().into_iter().map(|(sum, _)| sum).collect();
    scores.sort_by(|one, other| other.total_cmp(one));
    let request = v1::ScoreVectorsRequest {
        threshold: Some(scores[1]),
        ..request()
    };
    let answer = served.fetch().score_vectors(request).await.unwrap().into_inner();
    assert_eq!(answer.results[0].scores, scores[..2]);
}

#[tokio::test]
async fn bad_input_is_answered_with_its_field() {
    // Every mistake that a request can have, one at a time: the code, and the field at fault.
    let served = serve(Limits {
        items_per_request: 40,
        ..Limits::default()
    });
    type Spoil = fn(&mut v1::ScoreVectorsRequest);
    let cases: [(Spoil, Code, &str, &str); 16] = [
        (
            |request| request.dataset = "none".into(),
            Code::NotFound,
            "dataset",
            "there is no dataset",
        ),
        (
            |request| request.dataset = "blocks".into(),
            Code::FailedPrecondition,
            "dataset",
            "kind blocks",
        ),
        (
            |request| request.if_match = "old".into(),
            Code::FailedPrecondition,
            "if_match",
            "",
        ),
        (
            |request| request.queries.clear(),
            Code::InvalidArgument,
            "queries",
            "empty",
        ),
        (
            |request| request.metric = 0,
            Code::InvalidArgument,
            "metric",
            "dot, cosine",
        ),
        (
            |request| request.metric = 99,
            Code::InvalidArgument,
            "metric",
            "dot, cosine",
        ),
        (
            |request| request.queries[0].ids.clear(),
            Code::InvalidArgument,
            "queries[0].ids",
            "empty",
        ),
        (
            |request| request.queries[0].vector.push(1.0),
            Code::InvalidArgument,
            "queries[0].vector",
            "4 elements",
        ),
        (
            |request| request.queries[0].vector.clear(),
            Code::InvalidArgument,
            "queries[0].vector",
            "0 elements",
        ),
        (
            |request| request.queries[0].vector[1] = f32::NAN,
            Code::InvalidArgument,
            "queries[0].vector",
            "element 1 is NaN",
        ),
        (
            |request| request.queries[0].vector[2] = f32::NEG_INFINITY,
            Code::InvalidArgument,
            "queries[0].vector",
            "element 2 is -inf",
        ),
        (
            |request| request.limit = 0,
            Code::InvalidArgument,
            "limit",
            "1 to 20",
        ),
        (
            |request| request.limit = 21,
            Code::InvalidArgument,
            "limit",
            "1 to 20",
        ),
        (
            |request| request.threshold = Some(f64::NAN),
            Code::InvalidArgument,
            "threshold",
            "NaN",
        ),
        (
            |request| request.queries[0].ids = vec![0; 41],
            Code::ResourceExhausted,
            "queries.ids",
            "41 items",
        ),
        (
            |request| request.queries = vec![request.queries[0].clone(); 3],
            Code::ResourceExhausted,
            "queries.ids",
            "60 items",
        ),
    ];
    for (spoil, code, field, told) in cases {
        let mut spoilt = request();
        spoil(&mut spoilt);
        let status = served.fetch().score_vectors(spoilt.clone()).await.unwrap_err();
        assert_eq!(
            (status.code(), field_of(&status).as_str()),
            (code, field),
            "{status}"
        );
        assert!(status.message().contains(told), "{status}");
    }
}

#[tokio::test]
async fn an_id_past_the_end_is_an_item_error() {
    // It is listed with its position, and the others have scores; with fail_fast it fails the call.
    let served = serve(Limits::default());
    let mut with_bad = request();
    with_bad.queries[0].ids = vec![4, VECTORS as u64, 5, u64::MAX];
    let answer = served
        .fetch()
        .score_vectors(with_bad.clone())
        .await
        .unwrap()
        .into_inner();
    let result = &answer.results[0];
    assert_eq!(result.ids.len(), 2);
    let failed = result.errors.iter().map(|error| (error.item, error.code));
    assert_eq!(
        failed.collect::<Vec<_>>(),
        [1, 3].map(|item| (item, Code::OutOfRange as i32))
    );
    with_bad.fail_fast = true;
    let status = served.fetch().score_vectors(with_bad).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
}

#[tokio::test]
async fn candidates_beyond_an_answers_bytes_are_scored() {
    // Responses of at most 100 bytes, and 20 candidates of 12 bytes that fifty queries share: only ids and
    // scores are in the response.
    let served = serve(Limits {
        response_bytes: 100,
        ..Limits::default()
    });
    let mut many = request();
    many.queries = vec![many.queries[0].clone(); 50];
    let answer = served.fetch().score_vectors(many).await.unwrap().into_inner();
    assert_eq!((answer.results.len(), answer.results[0].ids.len()), (50, 3));
    assert!(answer.results.iter().all(|result| *result == answer.results[0]));
}

#[tokio::test]
async fn a_passed_deadline_is_told() {
    // Draining and deadlines are checked as for a fetch.
    let served = serve(Limits::default());
    let mut late = tonic::Request::new(request());
    late.metadata_mut().insert("grpc-timeout", "1n".parse().unwrap());
    let status = served.fetch().score_vectors(late).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    served.fetcher.start_draining();
    let status = served.fetch().score_vectors(request()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}
