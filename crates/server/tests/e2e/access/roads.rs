//! Every way to ask for a dataset, over each transport.

use super::with;
use crate::daemon::Daemon;
use crate::wire;
use http::Method;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request as OneOf;
use ringfetch_proto::v1::fetch_stream_response::Response;
use serde_json::json;
use tonic::{Code, Status};

/// Sends every HTTP request for a dataset: the responses' status, headers and body, without the name.
pub(super) async fn http_roads(daemon: &Daemon, token: &str, dataset: &str) -> Vec<String> {
    let authorization = format!("Bearer {token}");
    let json = ("content-type", "application/json");
    let with_token = [("authorization", &authorization[..]), json];
    let headers = if token.is_empty() {
        &[json][..]
    } else {
        &with_token
    };
    let at = |rest: &str| format!("/v1/datasets/{dataset}{rest}");
    let mut seen = Vec::new();
    let mut see = async |method: Method, rest: &str, headers: &[(&str, &str)], body: String| {
        let answer = daemon.http_client().send(method, &at(rest), headers, body).await;
        let mut headers = answer.headers.clone();
        headers.remove("date");
        // It depends on the length of the name in the body.
        headers.remove("content-length");
        let body = String::from_utf8_lossy(&answer.body).replace(dataset, "NAME");
        seen.push(format!("{} {headers:?} {body}", answer.status));
    };
    for rest in [
        "",
        "/bytes",
        "/blocks/1",
        "/blocks/99999",
        "/blocks/%31",
        "/vectors/1",
        "/vectors/99999",
        "/objects",
        "/objects/a",
        "/objects/b",
        "/objects?page_size=1",
    ] {
        see(Method::GET, rest, headers, String::new()).await;
        see(Method::HEAD, rest, headers, String::new()).await;
    }
    for condition in [
        ("if-none-match", "*"),
        ("if-match", "\"other\""),
        ("range", "bytes=0-1"),
    ] {
        let headers = [headers, &[condition]].concat();
        for rest in ["/bytes", "/blocks/1", "/objects/a"] {
            see(Method::GET, rest, &headers, String::new()).await;
        }
    }
    let score = json!({"queries": [{"vector": [0, 0, 0, 0], "ids": [1]}], "metric": "dot", "limit": 1});
    for (rest, body) in [
        ("/blocks:batchFetch", json!({"indices": [1]})),
        ("/vectors:batchFetch", json!({"ids": [1]})),
        (
            "/ranges:batchFetch",
            json!({"ranges": [{"offset": 0, "length": 1}]}),
        ),
        ("/objects:batchFetch", json!({"objects": [{"name": "a"}]})),
        ("/vectors:score", score),
    ] {
        see(Method::POST, rest, headers, body.to_string()).await;
    }
    seen
}

/// Makes every gRPC call for a dataset: the responses' code and message, without the name.
pub(super) async fn grpc_roads(daemon: &Daemon, token: &str, dataset: &str) -> Vec<(Code, String)> {
    let (mut fetch, mut datasets) = (daemon.fetch().await, daemon.datasets().await);
    let name = || dataset.to_owned();
    let score = || wire::best(dataset, vec![0.0; 4], vec![1]);
    let object = wire::object(dataset, "a");
    let list = wire::listing(dataset);
    let mut statuses: Vec<Option<Status>> = vec![
        fetch
            .fetch_blocks(with(token, wire::blocks(dataset, &[1])))
            .await
            .err(),
        fetch
            .fetch_vectors(with(token, wire::vectors(dataset, &[1])))
            .await
            .err(),
        fetch
            .fetch_ranges(with(token, wire::ranges(dataset, &[(0, 1)])))
            .await
            .err(),
        fetch
            .fetch_objects(with(token, wire::objects(dataset, &["a"])))
            .await
            .err(),
        fetch.score_vectors(with(token, score())).await.err(),
        fetch.read_object(with(token, object)).await.err(),
        datasets
            .get_dataset(with(token, v1::GetDatasetRequest { name: name() }))
            .await
            .err(),
        datasets.list_objects(with(token, list)).await.err(),
    ];
    for request in [
        OneOf::Blocks(wire::blocks(dataset, &[1])),
        OneOf::Vectors(wire::vectors(dataset, &[1])),
        OneOf::Ranges(wire::ranges(dataset, &[(0, 1)])),
        OneOf::Objects(wire::objects(dataset, &["a"])),
        OneOf::Scores(score()),
    ] {
        let request = wire::on_stream(7, request);
        let stream = fetch
            .fetch_stream(with(token, tokio_stream::iter([request])))
            .await;
        statuses.push(match stream {
            Err(status) => Some(status),
            Ok(stream) => {
                let answer = stream.into_inner().message().await.unwrap().unwrap();
                if let Some(Response::Status(status)) = answer.response {
                    Some(Status::new(Code::from_i32(status.code), status.message))
                } else {
                    None
                }
            }
        });
    }
    let seen = |status: Option<Status>| {
        let ok = || Status::new(Code::Ok, "");
        let status = status.unwrap_or_else(ok);
        (status.code(), status.message().replace(dataset, "NAME"))
    };
    statuses.into_iter().map(seen).collect()
}
