//! ScoreVectors: both transports, every layout and element type, every backend: the same scores, which match
//! the files' elements.

mod plain_sums;

use crate::daemon::{Setup, any_backend, backends_and_auto};
use crate::data::{Space, Unit, everything};
use crate::wire::{self, Http, Wire};
use plain_sums::right;
use ringfetch_client::{Client, Metric, ScoreRequest};
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_service_client::FetchServiceClient;
use ringfetch_proto::v1::fetch_stream_request::Request;
use ringfetch_proto::v1::fetch_stream_response::Response;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tonic::Code;
use tonic_types::StatusExt as _;

const METRICS: [(v1::Metric, &str); 4] = [
    (v1::Metric::Dot, "dot"),
    (v1::Metric::Cosine, "cosine"),
    (v1::Metric::Euclidean, "euclidean"),
    (v1::Metric::Manhattan, "manhattan"),
];

#[tokio::test]
async fn both_transports_score_alike_on_each_backend() {
    // Scenario: two queries that share candidates, with a repeated id and one past the end, as a unary call,
    // on a stream and over HTTP. Expectation: the same response, bit by bit, on every backend, equal to plain
    // sums over the files' elements; noise as f32 has NaN and infinities, which are left out and counted; a
    // threshold leaves out more; the calls are counted.
    let mut seen: BTreeMap<String, v1::ScoreVectorsResponse> = BTreeMap::new();
    for backend in backends_and_auto() {
        let (setup, everything) = everything(Setup::new(backend));
        let daemon = setup.start();
        let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
        let mut calls = 0;
        for space in &everything.spaces {
            let Unit::Vectors(dim, dtype) = space.unit else {
                continue;
            };
            for (metric, word) in METRICS {
                let request = request(space, dim, metric);
                if dtype == "i32" {
                    refused(&mut fetch, &http, request, word).await;
                    continue;
                }
                let mut answer = fetch.score_vectors(request.clone()).await.unwrap().into_inner();
                assert_eq!(streamed(&mut fetch, request.clone()).await, answer, "{word}");
                assert!(!answer.etag.is_empty());
                by_client(&format!("http://{}", daemon.grpc), &request, &answer).await;
                over_http(&http, &request, word, &answer).await;
                right(space, dtype, word, &request, &answer);
                calls += 1;
                // Sums of small integers, of which JSON has every digit.
                if matches!(word, "dot" | "manhattan") && matches!(dtype, "u8" | "i8") {
                    above_a_threshold(&mut fetch, &http, request, word, &answer).await;
                    calls += 1;
                }
                // The etag differs between runs.
                answer.etag.clear();
                let first = seen
                    .entry(format!("{} {word}", space.name))
                    .or_insert(answer.clone());
                assert_eq!(*first, answer, "{} {word}", space.name);
            }
        }
        let scrape = daemon.scrape().await;
        let counted = |transport, code| {
            let labels = [
                ("transport", transport),
                ("method", "ScoreVectors"),
                ("code", code),
            ];
            scrape.sum("ringfetch_rpc_requests_total", &labels)
        };
        assert_eq!(counted("http", "200"), calls);
        // The Rust client has called as well.
        assert!(counted("grpc", "OK") >= calls);
        daemon.stop().await;
    }
}

fn request(space: &Space, dim: u32, metric: v1::Metric) -> v1::ScoreVectorsRequest {
    let count = space.items.len() as u64;
    let vector = |step: f32| {
        (0..dim)
            .map(|place| f32::from(u16::try_from(place % 50).unwrap()).mul_add(step, -3.0))
            .collect()
    };
    v1::ScoreVectorsRequest {
        dataset: space.name.to_owned(),
        queries: vec![
            v1::ScoreQuery {
                vector: vector(0.25),
                ids: [(0..count).rev().collect(), vec![3, count]].concat(),
            },
            v1::ScoreQuery {
                vector: vector(-0.5),
                ids: vec![7, 3, 9],
            },
        ],
        metric: metric.into(),
        limit: 20,
        ..Default::default()
    }
}

async fn streamed(
    fetch: &mut FetchServiceClient<Wire>,
    request: v1::ScoreVectorsRequest,
) -> v1::ScoreVectorsResponse {
    let Response::Scores(answer) = in_stream(fetch, request).await else {
        panic!("an answer of another kind");
    };
    answer
}

async fn in_stream(fetch: &mut FetchServiceClient<Wire>, request: v1::ScoreVectorsRequest) -> Response {
    let request = wire::on_stream(5, Request::Scores(request));
    let mut answers = wire::stream(fetch, [request]).await;
    let answer = answers.message().await.unwrap().expect("an answer");
    answer.response.expect("content")
}

/// The Rust client's response is the same.
async fn by_client(url: &str, request: &v1::ScoreVectorsRequest, expected: &v1::ScoreVectorsResponse) {
    let client = Client::builder(url).connect_lazy().unwrap();
    let metric = match request.metric() {
        v1::Metric::Cosine => Metric::Cosine,
        v1::Metric::Euclidean => Metric::Euclidean,
        v1::Metric::Manhattan => Metric::Manhattan,
        v1::Metric::Dot | v1::Metric::Unspecified => Metric::Dot,
    };
    let mut asked = ScoreRequest::new(&request.dataset, metric, request.limit).if_match(&expected.etag);
    for query in &request.queries {
        asked = asked.query(query.vector.as_slice(), query.ids.as_slice());
    }
    let scores = client.score_vectors(asked.clone()).await.unwrap();
    assert_eq!(client.stream().score_vectors(asked).await.unwrap(), scores);
    assert_eq!(scores.etag, expected.etag);
    assert_eq!(scores.results.len(), expected.results.len());
    for (ranking, expected) in scores.results.iter().zip(&expected.results) {
        let best: Vec<(u64, f64)> = expected
            .ids
            .iter()
            .copied()
            .zip(expected.scores.iter().copied())
            .collect();
        assert_eq!((&ranking.best, ranking.unscored), (&best, expected.unscored));
        assert_eq!(ranking.errors.len(), expected.errors.len());
    }
}

fn body(request: &v1::ScoreVectorsRequest, word: &str) -> Value {
    let query = |query: &v1::ScoreQuery| json!({ "vector": query.vector, "ids": query.ids });
    let queries: Vec<Value> = request.queries.iter().map(query).collect();
    let mut body = json!({ "queries": queries, "metric": word, "limit": request.limit });
    if let Some(threshold) = request.threshold {
        body["threshold"] = json!(threshold);
    }
    body
}

/// With the second score as threshold, the response has those that reach it, and no others.
async fn above_a_threshold(
    fetch: &mut FetchServiceClient<Wire>,
    http: &Http,
    mut request: v1::ScoreVectorsRequest,
    word: &str,
    without: &v1::ScoreVectorsResponse,
) {
    let threshold = without.results[0].scores[1];
    request.threshold = Some(threshold);
    let mut expected = without.clone();
    for result in &mut expected.results {
        let reaches = |score: &&f64| match word {
            "dot" => **score >= threshold,
            _ => **score <= threshold,
        };
        let reaching = result.scores.iter().filter(reaches).count();
        result.ids.truncate(reaching);
        result.scores.truncate(reaching);
    }
    assert!(expected.results[0].ids.len() < without.results[0].ids.len());
    let answer = fetch.score_vectors(request.clone()).await.unwrap().into_inner();
    assert_eq!(answer, expected, "{word}");
    assert_eq!(streamed(fetch, request.clone()).await, expected, "{word}");
    over_http(http, &request, word, &expected).await;
}

async fn over_http(
    http: &Http,
    request: &v1::ScoreVectorsRequest,
    word: &str,
    expected: &v1::ScoreVectorsResponse,
) {
    let path = format!("/v1/datasets/{}/vectors:score", request.dataset);
    let answer = http.batch(&path, &body(request, word), "application/json").await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.header("etag"), format!("\"{}\"", expected.etag));
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    let answer = answer.json();
    for (result, expected) in answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .zip(&expected.results)
    {
        assert_eq!(result["ids"], json!(expected.ids));
        // Compared as text: serde_json parses numbers with an error in the last bit.
        let scores = format!(r#""scores":{}"#, json!(expected.scores));
        assert!(text.contains(&scores), "{text}");
        assert_eq!(result["scores"].as_array().unwrap().len(), expected.scores.len());
        assert_eq!(result["unscored"], json!(expected.unscored));
        let items: Vec<u32> = expected.errors.iter().map(|error| error.item).collect();
        let errors = result["errors"].as_array().unwrap();
        assert_eq!(
            errors
                .iter()
                .map(|error| error["item"].clone())
                .collect::<Vec<_>>(),
            items
        );
        for error in errors {
            assert_eq!(error["code"], "index-out-of-range");
        }
    }
    assert_eq!(
        answer["results"].as_array().unwrap().len(),
        expected.results.len()
    );
}

/// Scores of i32 vectors, which are lists of neighbours, are refused.
async fn refused(
    fetch: &mut FetchServiceClient<Wire>,
    http: &Http,
    request: v1::ScoreVectorsRequest,
    word: &str,
) {
    let path = format!("/v1/datasets/{}/vectors:score", request.dataset);
    let answer = http.batch(&path, &body(&request, word), "application/json").await;
    assert_eq!(
        (answer.status.as_u16(), answer.json()["field"].clone()),
        (400, json!("metric"))
    );
    let status = fetch.score_vectors(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("metric: "), "{status}");
}

/// A way to break a request; the resulting gRPC code and HTTP status, the field, and a part of the remedy.
type Mistake = (
    fn(&mut v1::ScoreVectorsRequest),
    (Code, u16),
    &'static str,
    &'static str,
);

/// A mistake of the most frequent kind.
const fn invalid(
    spoil: fn(&mut v1::ScoreVectorsRequest),
    field: &'static str,
    remedy: &'static str,
) -> Mistake {
    (spoil, (Code::InvalidArgument, 400), field, remedy)
}

const MISTAKES: [Mistake; 20] = [
    (
        |request| request.dataset = "nothing".to_owned(),
        (Code::NotFound, 404),
        "dataset",
        "there is no dataset",
    ),
    (
        |request| request.dataset = "joined".to_owned(),
        (Code::FailedPrecondition, 400),
        "dataset",
        "kind blocks",
    ),
    invalid(
        |request| request.queries[0].vector.clear(),
        "queries[0].vector",
        "it has 0 elements",
    ),
    invalid(
        |request| request.queries[0].vector[2] = f32::NEG_INFINITY,
        "queries[0].vector",
        "element 2 is -inf: elements must be finite",
    ),
    invalid(
        |request| request.metric = 99,
        "metric",
        "name one of dot, cosine, euclidean and manhattan",
    ),
    invalid(
        |request| request.threshold = Some(f64::NAN),
        "threshold",
        "it is NaN",
    ),
    (
        |request| request.queries = vec![request.queries[0].clone(); 34],
        (Code::ResourceExhausted, 413),
        "queries.ids",
        "102 items",
    ),
    invalid(
        |request| request.queries[1].vector.truncate(2),
        "queries[1].vector",
        "it has 2 elements; vectors of \"fvecs\" have 3",
    ),
    invalid(
        |request| request.queries[0].vector[1] = f32::INFINITY,
        "queries[0].vector",
        "element 1 is inf: elements must be finite",
    ),
    invalid(
        |request| request.queries[0].vector[1] = f32::NAN,
        "queries[0].vector",
        "element 1 is NaN: elements must be finite",
    ),
    invalid(
        |request| request.metric = 0,
        "metric",
        "name one of dot, cosine, euclidean and manhattan",
    ),
    invalid(
        |request| request.dataset = "ivecs".to_owned(),
        "metric",
        "those of f32, f16, bf16, f64, u8 and i8 can be scored",
    ),
    invalid(|request| request.limit = 0, "limit", "must be from 1 to 3"),
    invalid(|request| request.limit = 4, "limit", "must be from 1 to 3"),
    invalid(
        |request| request.queries.clear(),
        "queries",
        "ask for at least one",
    ),
    invalid(
        |request| request.queries[1].ids.clear(),
        "queries[1].ids",
        "name at least one candidate",
    ),
    (
        |request| request.queries[1].ids = vec![5; 98],
        (Code::ResourceExhausted, 413),
        "queries.ids",
        "the limit is 100 (limits.items_per_request): split the batch",
    ),
    // Refused before the dataset is looked up.
    (
        |request| {
            request.queries[1].ids = vec![u64::MAX; 98];
            request.dataset = "nothing".to_owned();
        },
        (Code::ResourceExhausted, 413),
        "queries.ids",
        "101 items; the limit is 100 (limits.items_per_request): split the batch",
    ),
    (
        |request| {
            request.queries[1].ids.clear();
            request.queries = vec![request.queries[1].clone(); 101];
            request.dataset = "nothing".to_owned();
        },
        (Code::ResourceExhausted, 413),
        "queries.ids",
        "101 items; the limit is 100 (limits.items_per_request): split the batch",
    ),
    (
        |request| {
            request.queries[0].ids[1] = 61;
            request.fail_fast = true;
        },
        (Code::OutOfRange, 404),
        "",
        "vector 61 is out of range: the dataset has 61 (vector 0 to 60)",
    ),
];

#[tokio::test]
async fn each_mistake_is_answered_with_its_field_and_remedy() {
    // Every mistake that a request can have, on every backend, as a unary call, on a stream and over HTTP.
    for backend in backends_and_auto() {
        let (setup, _everything) = everything(Setup::new(backend));
        let daemon = setup.set("limits.items_per_request", "100").start();
        let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
        for (spoil, (code, status), field, remedy) in MISTAKES {
            let query = |ids: &[u64]| v1::ScoreQuery {
                vector: vec![1.0, 2.0, 3.0],
                ids: ids.to_vec(),
            };
            let mut request = v1::ScoreVectorsRequest {
                dataset: "fvecs".to_owned(),
                queries: vec![query(&[0, 1, 2]), query(&[3])],
                metric: v1::Metric::Dot.into(),
                limit: 3,
                ..Default::default()
            };
            spoil(&mut request);
            let refused = fetch.score_vectors(request.clone()).await.unwrap_err();
            assert_eq!(refused.code(), code, "{refused:?}");
            let message = refused.message();
            assert!(
                message.contains(remedy) && message.starts_with(field),
                "{message}"
            );
            if !field.is_empty() {
                let details = refused.get_details_bad_request().unwrap();
                assert_eq!(details.field_violations[0].field, field);
            }
            let Response::Status(in_stream) = in_stream(&mut fetch, request.clone()).await else {
                panic!("{remedy}");
            };
            assert_eq!(
                (in_stream.code, in_stream.message.as_str()),
                (code as i32, message)
            );

            // JSON has no NaN, and no threshold is none.
            if request.threshold.is_some() {
                continue;
            }
            let word = METRICS.iter().find(|(metric, _)| *metric == request.metric());
            let mut json = body(&request, word.map_or("l2", |(_, word)| word));
            json["fail_fast"] = json!(request.fail_fast);
            let path = format!("/v1/datasets/{}/vectors:score", request.dataset);
            let problem = http.batch(&path, &json, "application/json").await.json();
            assert_eq!(problem["status"], status, "{problem}");
            assert!(
                problem["field"].as_str().unwrap_or("").starts_with(field),
                "{problem}"
            );
            // JSON has no NaN and no infinity: their replacement is not a number.
            if !remedy.contains("finite") {
                assert!(problem["detail"].as_str().unwrap().contains(remedy), "{problem}");
            }
        }
        daemon.stop().await;
    }
}

#[tokio::test]
async fn bad_json_is_answered_with_its_member() {
    // Every mistake that a body can have, one at a time; and a client that does not accept JSON.
    let (setup, _everything) = everything(Setup::new(any_backend()));
    let daemon = setup.start();
    let http = daemon.http_client();
    let body = |query: Value, more: Value| {
        let mut body = json!({ "queries": [query], "metric": "dot", "limit": 1 });
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    let good = || json!({ "vector": [1, 2, 3], "ids": [0, 1] });
    let path = "/v1/datasets/fvecs/vectors:score";
    let json_type = "application/json";
    for (wrong, field) in [
        (body(good(), json!({ "cutoff": 1 })), "cutoff"),
        (body(json!({ "vector": [1, 2, 3] }), json!({})), "queries[0]"),
        (
            body(json!({ "vector": [1, 2, 3], "ids": [-1] }), json!({})),
            "queries[0].ids[0]",
        ),
    ] {
        let answer = http.batch(path, &wrong, json_type).await;
        let problem = answer.json();
        assert_eq!(
            (answer.status.as_u16(), problem["field"].as_str()),
            (400, Some(field)),
            "{problem}"
        );
    }
    let other_kind = http
        .batch(
            "/v1/datasets/ragged/vectors:score",
            &body(good(), json!({})),
            json_type,
        )
        .await;
    assert_eq!(
        (other_kind.status.as_u16(), other_kind.json()["field"].clone()),
        (400, json!("dataset"))
    );
    let octets = http
        .batch(path, &body(good(), json!({})), "application/octet-stream")
        .await;
    assert_eq!(
        (octets.status.as_u16(), octets.json()["field"].clone()),
        (406, json!("Accept"))
    );
    assert_eq!(
        http.batch(path, &body(good(), json!({})), json_type).await.status,
        200
    );
    daemon.stop().await;
}

#[tokio::test]
async fn candidates_beyond_an_answers_bytes_are_scored() {
    // Scenario: responses of at most 4 KiB, and 61 candidates of 516 bytes that fifty queries share. Expectation: each query
    // has its results, since only ids and scores are in the response.
    let (setup, everything) = everything(Setup::new(any_backend()));
    let daemon = setup.set("limits.response_bytes", "4KiB").start();
    let space = everything.spaces.iter().find(|space| space.name == "fbin");
    let mut request = request(space.unwrap(), 129, v1::Metric::Dot);
    let mut query = request.queries[0].clone();
    query.ids = (0..61).collect();
    (request.queries, request.limit) = (vec![query; 50], 3);
    let scored = daemon.fetch().await.score_vectors(request).await;
    let results = scored.unwrap().into_inner().results;
    assert_eq!((results.len(), results[0].ids.len()), (50, 3));
    assert!(results.iter().all(|result| *result == results[0]));
    daemon.stop().await;
}
