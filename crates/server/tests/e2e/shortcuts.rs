//! The fast path responds exactly as the router does.

use crate::daemon::Setup;
use crate::data::{everything, plain_blocks};
use crate::wire::{Answer, Narrow};
use bytes::Bytes;
use http::Method;

/// A response without what depends on the time or the requested path.
fn comparable(answer: &Answer) -> (u16, Vec<(String, String)>, Vec<u8>) {
    let mut headers: Vec<(String, String)> = answer
        .headers
        .iter()
        .filter(|(name, _)| *name != "date")
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
        .collect();
    headers.sort();
    if answer.header("content-type") != "application/problem+json" {
        return (answer.status.as_u16(), headers, answer.body.to_vec());
    }
    // It depends on the length of the repeated path.
    headers.retain(|(name, _)| name != "content-length");
    if answer.body.is_empty() {
        return (answer.status.as_u16(), headers, Vec::new());
    }
    let mut body = answer.json();
    body["instance"].take();
    (answer.status.as_u16(), headers, body.to_string().into_bytes())
}

#[tokio::test]
async fn both_ways_give_the_same_answer() {
    // Scenario: blocks, vectors and bytes, good and bad, with and without conditions, ranges, Accept and a
    // body; each requested by its plain path, which the fast path accepts, and by one with a percent-encoded
    // letter, which only the router decodes. Expectation: the same status, headers and bytes, and each
    // request counted as the same operation.
    let (setup, _) = everything(Setup::new("mmap"));
    let daemon = setup.start();
    let http = daemon.http_client();
    let tag = http.get("/v1/datasets/ragged/blocks/3").await;
    let tag = tag.header("etag").to_owned();
    let headers: [&[(&str, &str)]; 10] = [
        &[],
        &[("if-none-match", &tag)],
        &[("if-none-match", "*")],
        &[("if-match", "\"another\"")],
        &[("if-match", &tag)],
        &[("range", "bytes=10-19")],
        &[("range", "bytes=99999999-")],
        &[("range", "bytes=0-0"), ("if-range", "\"another\"")],
        &[("accept", "application/json")],
        &[("accept", "image/png")],
    ];
    let paths = [
        ("ragged", "blocks/3"),
        ("ragged", "blocks/3?a=b"),
        ("ragged", "blocks/17"),
        ("ragged", "blocks/x"),
        ("ragged", "blocks/+3"),
        ("ragged", "blocks/99999999999999999999"),
        ("ragged", "blocks/3/"),
        ("ragged", "vectors/3"),
        ("ragged", "bytes"),
        ("npy-f16", "vectors/3"),
        ("npy-f16", "vectors/61"),
        ("npy-f16", "blocks/3"),
        ("npy-f16", "bytes"),
        ("objects", "blocks/3"),
        ("objects", "bytes"),
        ("nothing", "blocks/3"),
        ("nothing", "vectors/3"),
        ("nothing", "bytes"),
    ];
    for (dataset, rest) in paths {
        let (first, others) = dataset.split_at(1);
        let plain = format!("/v1/datasets/{dataset}/{rest}");
        let encoded = format!("/v1/datasets/%{:02x}{others}/{rest}", first.as_bytes()[0]);
        for headers in headers {
            for (method, body) in [(Method::GET, ""), (Method::GET, "a body"), (Method::HEAD, "")] {
                let shortcut = http.send(method.clone(), &plain, headers, body).await;
                let routed = http.send(method.clone(), &encoded, headers, body).await;
                let (shortcut, routed) = (comparable(&shortcut), comparable(&routed));
                assert!(
                    shortcut == routed,
                    "{method} {plain} {headers:?} {body:?}:\n{:?}\n{:?}",
                    (shortcut.0, shortcut.1, String::from_utf8_lossy(&shortcut.2)),
                    (routed.0, routed.1, String::from_utf8_lossy(&routed.2))
                );
            }
        }
    }
    let scrape = daemon.scrape().await;
    for (operation, resources) in [("GetBlock", 9), ("GetVector", 4), ("GetBytes", 4)] {
        let counted = scrape.sum(
            "ringfetch_rpc_requests_total",
            &[("transport", "http"), ("method", operation)],
        );
        // The request for the tag counts, too.
        let tags = u64::from(operation == "GetBlock");
        assert_eq!(counted, resources * 10 * 3 * 2 + tags, "{operation}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn each_answer_of_a_vector_varies_by_accept() {
    // Scenario: a vector as bytes, as JSON and in no form, one past the end, and conditions, each by the fast path and by the
    // router. Expectation: every response tells caches that it depends on Accept, as which error it is does, too; a block's does
    // not.
    let (setup, _) = everything(Setup::new("pread"));
    let daemon = setup.start();
    let http = daemon.http_client();
    for (path, headers, status) in [
        ("vectors/3", ("accept", "*/*"), 200),
        ("vectors/3", ("accept", "application/json"), 200),
        ("vectors/3", ("if-none-match", "*"), 304),
        ("vectors/3", ("if-match", "\"another\""), 412),
        ("vectors/3", ("accept", "image/png"), 406),
        ("vectors/61", ("accept", "*/*"), 404),
    ] {
        for dataset in ["npy-f16", "%6epy-f16"] {
            for method in [Method::GET, Method::HEAD] {
                let path = format!("/v1/datasets/{dataset}/{path}");
                let answer = http.send(method.clone(), &path, &[headers], "").await;
                let vary: Vec<_> = answer.headers.get_all("vary").iter().collect();
                assert_eq!(answer.status, status, "{method} {path} {headers:?}");
                assert_eq!(vary, ["Accept"], "{method} {path} {headers:?}");
            }
        }
    }
    let block = http.get("/v1/datasets/ragged/blocks/3").await;
    assert!(!block.headers.contains_key("vary"));
    daemon.stop().await;
}

#[tokio::test]
async fn only_http_tells_the_date() {
    // Scenario: a call, and a GET over both protocols of HTTP. Expectation: only the GETs' responses have a Date, which gRPC does
    // not use.
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.start();
    let headers = [("content-type", "application/grpc"), ("te", "trailers")];
    let path = "/ringfetch.v1.FetchService/FetchBlocks";
    let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
    let head = narrow.ask(path, &headers, Bytes::from_static(&[0; 5])).await.head;
    assert_eq!(head.status, 200);
    assert!(!head.headers.contains_key("date"), "{head:?}");
    for http in [daemon.http_client(), daemon.http2_client(daemon.http)] {
        let answer = http.get("/v1/datasets/blocks/blocks/3").await;
        assert_eq!(answer.status, 200);
        assert!(answer.headers.contains_key("date") && answer.header("content-length") == "4096");
    }
    daemon.stop().await;
}
