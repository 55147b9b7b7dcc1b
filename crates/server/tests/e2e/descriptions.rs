//! What the daemon says of itself: server reflection, and its OpenAPI document.

use crate::daemon::Setup;
use crate::data::{everything, plain_blocks};
use crate::wire::{ADMIN, DATASETS, FETCH, channel};
use std::collections::BTreeSet;
use tonic::Code;

#[tokio::test]
async fn reflection_lists_all_services_in_both_versions() {
    // Scenario: server reflection v1 and v1alpha on both ports: list the services, get the file of an unknown name and
    // of one. Expectation: every service that the port serves, an error as a response, and a file that defines it.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 1);
    let daemon = setup.start();
    let served = [
        (daemon.grpc, vec![FETCH, DATASETS], ADMIN),
        (daemon.admin, vec![ADMIN], FETCH),
    ];
    for (address, own, other) in &served {
        macro_rules! list {
            ($version:ident) => {{
                use pb::server_reflection_request::MessageRequest;
                use pb::server_reflection_response::MessageResponse;
                use tonic_reflection::pb::$version as pb;
                let mut client =
                    pb::server_reflection_client::ServerReflectionClient::new(channel(*address).await);
                let ask = |message_request| pb::ServerReflectionRequest {
                    host: String::new(),
                    message_request: Some(message_request),
                };
                let requests = vec![
                    ask(MessageRequest::ListServices(String::new())),
                    ask(MessageRequest::FileContainingSymbol(
                        "nothing.Here".to_owned(),
                    )),
                    ask(MessageRequest::FileContainingSymbol(own[0].to_owned())),
                ];
                let mut answers = client
                    .server_reflection_info(tokio_stream::iter(requests))
                    .await
                    .unwrap()
                    .into_inner();
                let mut next = async || {
                    answers
                        .message()
                        .await
                        .unwrap()
                        .unwrap()
                        .message_response
                        .unwrap()
                };
                let MessageResponse::ListServicesResponse(listed) = next().await else {
                    panic!("no list")
                };
                let MessageResponse::ErrorResponse(error) = next().await else {
                    panic!("no error")
                };
                assert_eq!(error.error_code, i32::from(Code::NotFound));
                assert!(error.error_message.contains("nothing.Here"), "{error:?}");
                let MessageResponse::FileDescriptorResponse(files) = next().await else {
                    panic!("no file")
                };
                let short = own[0].rsplit('.').next().unwrap();
                let defines = |file: &Vec<u8>| {
                    file.windows(short.len())
                        .any(|word| word == short.as_bytes())
                };
                assert!(files.file_descriptor_proto.iter().any(defines), "{short}");
                listed
                    .service
                    .into_iter()
                    .map(|service| service.name)
                    .collect::<BTreeSet<String>>()
            }};
        }
        for names in [list!(v1), list!(v1alpha)] {
            for service in own.iter().chain(&["grpc.health.v1.Health"]) {
                assert!(names.contains(*service), "{service} is not in {names:?}");
            }
            assert!(!names.contains(*other), "{names:?}");
        }
    }
    daemon.stop().await;
}

#[tokio::test]
async fn every_path_of_openapi_is_there() {
    // Scenario: the document, and a request to each path in it by each of its methods. Expectation: OpenAPI 3
    // in JSON, no path that the daemon does not serve, and no media type that the document does not have.
    let (setup, everything) = everything(Setup::new("mmap"));
    let daemon = setup.start();
    let document = daemon.http_client().get("/openapi.json").await.json();
    assert!(document["openapi"].as_str().unwrap().starts_with("3."));
    let paths = document["paths"].as_object().unwrap();
    let http = daemon.http_client();
    for (path, operations) in paths {
        let name = if path.contains("vectors") {
            "fbin"
        } else if path.contains("object") {
            "objects"
        } else {
            "tailed"
        };
        let filled = path
            .replace("{name}", name)
            .replace("{index}", "0")
            .replace("{id}", "0")
            .replace("{asset}", "script.js")
            .replace("{object}", everything.objects[0].0);
        for (method, operation) in operations.as_object().unwrap() {
            let method = http::Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let answer = http
                .send(
                    method.clone(),
                    &filled,
                    &[("content-type", "application/json")],
                    "{}",
                )
                .await;
            let expected = if method == http::Method::POST { 400 } else { 200 };
            assert_eq!(answer.status, expected, "{method} {filled}: {answer:?}");
            if method == http::Method::GET {
                let described = operation["responses"]["200"]["content"].as_object().unwrap();
                let media_type = answer.header("content-type").split(';').next().unwrap();
                assert!(described.contains_key(media_type), "{filled}: {media_type}");
            }
        }
    }
    for (path, state) in [("/livez", "serving"), ("/readyz", "serving")] {
        assert_eq!(http.get(path).await.json()["state"], state);
    }
    daemon.stop().await;
}

#[tokio::test]
async fn openapi_describes_both_forms_of_a_batch() {
    // Scenario: a batch of vectors, of which one fails, in JSON, and the document. Expectation: the document has
    // every member of the answer, and every header of the same batch as bytes, which say how to split them, and of a single
    // vector; and what is sent as bytes has no schema, as OpenAPI 3.1 has it for bytes.
    let (setup, _) = everything(Setup::new("mmap"));
    let daemon = setup.start();
    let http = daemon.http_client();
    let path = "/v1/datasets/fbin/vectors:batchFetch";
    let body = serde_json::json!({"ids": [0, 99_999_999]});
    let answer = http.batch(path, &body, "application/json").await.json();
    let document = http.get("/openapi.json").await.json();
    let described = document["components"]["schemas"]["BatchAnswer"]["properties"]
        .as_object()
        .unwrap();
    for member in answer.as_object().unwrap().keys() {
        assert!(described.contains_key(member), "{member} is not in {described:?}");
    }
    assert_eq!(described["data"]["type"], "string");
    let as_bytes = http.batch(path, &body, "application/octet-stream").await;
    let ranges = "/v1/datasets/fbin/ranges:batchFetch";
    let uneven = serde_json::json!({"ranges": [{"offset": 0, "length": 1}, {"offset": 0, "length": 2}]});
    let uneven = http.batch(ranges, &uneven, "application/octet-stream").await;
    let single = http.get("/v1/datasets/fbin/vectors/0").await;
    for (method, resource, answer) in [
        ("post", "vectors:batchFetch", as_bytes),
        ("post", "ranges:batchFetch", uneven),
        ("get", "vectors/{id}", single),
    ] {
        let operation = &document["paths"][format!("/v1/datasets/{{name}}/{resource}")][method];
        let described = operation["responses"]["200"]["headers"].as_object().unwrap();
        let own = |name: &&http::HeaderName| name.as_str().starts_with("ringfetch-") || **name == "etag";
        assert!(answer.headers.keys().filter(own).count() > 1, "{answer:?}");
        for name in answer.headers.keys().filter(own) {
            let is_it = |described: &String| described.eq_ignore_ascii_case(name.as_str());
            assert!(described.keys().any(is_it), "{name} is not in {described:?}");
        }
    }
    let mut with_bytes = 0;
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let bytes = &operation["responses"]["200"]["content"]["application/octet-stream"];
            assert!(bytes["schema"].is_null(), "{method} {path}: {bytes}");
            with_bytes += u32::from(bytes.is_object());
        }
    }
    assert!(with_bytes > 5, "{with_bytes}");
    daemon.stop().await;
}
