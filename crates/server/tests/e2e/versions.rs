//! Versions of the data: every response names its version, and a request may require one.

use crate::daemon::{LISTEN, Setup, eventually_async};
use crate::data::{everything, noise, plain_blocks};
use crate::reload::{engine, reload};
use crate::wire;
use http::Method;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request;
use ringfetch_proto::v1::fetch_stream_response::Response;
use serde_json::json;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, RpcStatusExt as _, StatusExt as _};

/// Checks the details of a request for another version than `etag`.
fn check(code: Code, details: &ErrorDetails, etag: &str) {
    assert_eq!(code, Code::FailedPrecondition, "{details:?}");
    let info = details.error_info().unwrap();
    assert_eq!(info.reason, "PRECONDITION_FAILED");
    assert_eq!(
        info.metadata,
        HashMap::from([("etag".to_owned(), etag.to_owned())])
    );
    assert_eq!(
        details.bad_request().unwrap().field_violations[0].field,
        "if_match"
    );
    assert!(details.retry_info().is_none());
}

fn refused<T: std::fmt::Debug>(result: Result<T, Status>, etag: &str) {
    let status = result.unwrap_err();
    check(status.code(), &status.get_error_details(), etag);
}

#[tokio::test]
async fn a_request_is_answered_from_the_version_it_names_or_not_at_all() {
    // Scenario: blocks, vectors, ranges and scores without a required version, with the current one, and with
    // another, by calls, on a stream and over HTTP. Expectation: every response names the version, the same
    // everywhere; the other one is refused with the current version.
    let (setup, everything) = everything(Setup::new("pread"));
    let daemon = setup.start();
    let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
    let other = "0123456789abcdef0123456789abcdef";
    for space in &everything.spaces {
        let name = space.name;
        let path = format!("/v1/datasets/{name}/bytes");
        let head = http.get_with(&path, &[("range", "bytes=0-0")]).await;
        let etag = head.header("etag").trim_matches('"').to_owned();
        assert_eq!(etag.len(), 32);
        let answer = http
            .get_with(&path, &[("if-match", &format!("\"{other}\""))])
            .await;
        answer.is_problem(412, "precondition-failed", Some("If-Match"), &[]);

        let answered = |etag_of: Result<String, Status>, if_match: &str| {
            if if_match == other {
                refused(etag_of, &etag);
            } else {
                assert_eq!(etag_of.unwrap(), etag, "{name}");
            }
        };
        let mut streamed = Vec::new();
        for if_match in ["", &etag, other] {
            let request = v1::FetchRangesRequest {
                if_match: if_match.to_owned(),
                ..wire::ranges(name, &[(0, 1)])
            };
            streamed.push(Request::Ranges(request.clone()));
            let answer = fetch.fetch_ranges(request).await;
            answered(answer.map(|answer| answer.into_inner().etag), if_match);
            if matches!(space.unit, crate::data::Unit::Blocks) {
                let request = v1::FetchBlocksRequest {
                    if_match: if_match.to_owned(),
                    ..wire::blocks(name, &[1])
                };
                streamed.push(Request::Blocks(request.clone()));
                let answer = fetch.fetch_blocks(request).await;
                answered(answer.map(|answer| answer.into_inner().etag), if_match);
            } else {
                let request = v1::FetchVectorsRequest {
                    if_match: if_match.to_owned(),
                    ..wire::vectors(name, &[1])
                };
                streamed.push(Request::Vectors(request.clone()));
                let answer = fetch.fetch_vectors(request).await;
                answered(answer.map(|answer| answer.into_inner().etag), if_match);
            }
        }
        if name == "npy-f32" {
            for if_match in [&etag, other] {
                let request = v1::ScoreVectorsRequest {
                    if_match: if_match.to_owned(),
                    ..wire::best(name, vec![1.0; 100], vec![1])
                };
                let answer = fetch.score_vectors(request).await;
                answered(answer.map(|answer| answer.into_inner().etag), if_match);
            }
        }
        let batch = format!("/v1/datasets/{name}/ranges:batchFetch");
        let body = json!({"ranges": [{"offset": 0, "length": 1}]}).to_string();
        for (tag, status) in [(&etag[..], 200), (other, 412)] {
            let quoted = format!("\"{tag}\"");
            let headers = [("content-type", "application/json"), ("if-match", &quoted[..])];
            let answer = http.send(Method::POST, &batch, &headers, body.clone()).await;
            assert_eq!(
                (answer.status.as_u16(), answer.header("etag")),
                (status, &format!("\"{etag}\"")[..])
            );
        }

        let requests: Vec<_> = (0..)
            .zip(streamed)
            .map(|(id, request)| wire::on_stream(id, request))
            .collect();
        let mut answers = wire::stream(&mut fetch, requests).await;
        let (mut good, mut bad) = (0, 0);
        while let Some(answer) = answers.message().await.unwrap() {
            let named = match answer.response.unwrap() {
                Response::Blocks(answer) => answer.etag,
                Response::Vectors(answer) => answer.etag,
                Response::Ranges(answer) => answer.etag,
                Response::Status(status) => {
                    check(status.code.into(), &status.get_error_details(), &etag);
                    bad += 1;
                    continue;
                }
                Response::Objects(_) | Response::Scores(_) => panic!("not asked for"),
            };
            assert_eq!(named, etag);
            good += 1;
        }
        assert_eq!((good, bad), (4, 2), "{name}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn each_object_of_a_batch_has_a_version() {
    // Scenario: objects with required versions: for the first the current one, for the second another, for
    // the third any; and one that does not exist. Expectation: the second fails alone, and its version is in
    // the response; with fail_fast it fails the call; lists that differ are refused.
    let (setup, everything) = everything(Setup::new("pread"));
    let daemon = setup.start();
    let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
    let names = ["one", ".hidden", "nested/deeper/block", "nothing"];
    let mut etags = Vec::new();
    for name in &names[..3] {
        let answer = http.get(&format!("/v1/datasets/objects/objects/{name}")).await;
        etags.push(answer.header("etag").trim_matches('"').to_owned());
    }
    let request = v1::FetchObjectsRequest {
        if_match: vec![etags[0].clone(), etags[0].clone(), String::new(), String::new()],
        ..wire::objects("objects", &names)
    };
    let answer = fetch.fetch_objects(request.clone()).await.unwrap().into_inner();
    assert_eq!(answer.etags, [&etags[0], &etags[1], &etags[2], ""]);
    let failed: Vec<_> = answer
        .errors
        .iter()
        .map(|error| (error.item, error.code))
        .collect();
    let codes = [Code::FailedPrecondition, Code::NotFound].map(i32::from);
    assert_eq!(failed, [(1, codes[0]), (3, codes[1])]);
    assert!(
        answer.errors[0].message.contains(&etags[1]),
        "{:?}",
        answer.errors
    );
    let content = |name: &str| {
        &everything
            .objects
            .iter()
            .find(|object| object.0 == name)
            .unwrap()
            .1
    };
    assert_eq!(
        answer.data,
        [&content("one")[..], content("nested/deeper/block")].concat()
    );

    let parts: Vec<_> = names
        .iter()
        .zip(&request.if_match)
        .map(|(name, if_match)| json!({"name": name, "if_match": if_match}))
        .collect();
    let path = "/v1/datasets/objects/objects:batchFetch";
    let mirrored = http
        .batch(path, &json!({ "objects": parts }), "application/json")
        .await
        .json();
    assert_eq!(mirrored["etags"], json!(answer.etags));
    assert_eq!(mirrored["errors"][0]["code"], "precondition-failed");
    assert_eq!(mirrored["errors"][0]["message"], answer.errors[0].message);

    let strict = v1::FetchObjectsRequest {
        fail_fast: true,
        ..request.clone()
    };
    let message = format!("item 1: {}", answer.errors[0].message);
    let refusal = fetch.fetch_objects(strict.clone()).await;
    assert_eq!(refusal.as_ref().unwrap_err().message(), message);
    refused(refusal, &etags[1]);
    let on_stream = wire::on_stream(1, Request::Objects(strict));
    let mut answers = wire::stream(&mut fetch, [on_stream]).await;
    match answers.message().await.unwrap().unwrap().response {
        Some(Response::Status(status)) => assert_eq!(status.message, message),
        other => panic!("{other:?}"),
    }
    // The tag of one object is not that of the batch.
    let strict = json!({"objects": parts, "fail_fast": true});
    let problem = http.batch(path, &strict, "application/octet-stream").await;
    problem.is_problem(412, "precondition-failed", Some("if_match"), &[&message]);
    assert!(!problem.headers.contains_key("etag"));
    let short = v1::FetchObjectsRequest {
        if_match: etags,
        ..request
    };
    let status = fetch.fetch_objects(short).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(
        status.message().starts_with("if_match: 3 entries for 4 names"),
        "{status:?}"
    );
    daemon.stop().await;
}

#[tokio::test]
async fn a_tag_in_quotes_is_no_other_version() {
    // Scenario: `if_match` is the current tag as HTTP's header has it, in quotes: in calls of every kind, on a stream, and in
    // JSON. Expectation: the request is malformed, and its error says what to send.
    let (setup, _) = everything(Setup::new("pread"));
    let daemon = setup.start();
    let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
    let tag_of = async |path: &str| http.get(path).await.header("etag").to_owned();
    let space = tag_of("/v1/datasets/npy-f32/bytes").await;
    let object = tag_of("/v1/datasets/objects/objects/one").await;
    let is_told = |code: Code, details: &ErrorDetails| {
        assert_eq!(code, Code::InvalidArgument, "{details:?}");
        assert_eq!(details.error_info().unwrap().reason, "MALFORMED");
        let violation = &details.bad_request().unwrap().field_violations[0];
        assert_eq!(violation.field, "if_match");
        assert!(violation.description.contains("without quotes"), "{violation:?}");
    };
    let ranges = v1::FetchRangesRequest {
        if_match: space.clone(),
        ..wire::ranges("npy-f32", &[(0, 1)])
    };
    let scores = v1::ScoreVectorsRequest {
        if_match: format!("W/{space}"),
        ..wire::best("npy-f32", vec![1.0; 100], vec![1])
    };
    let objects = v1::FetchObjectsRequest {
        if_match: vec![String::new(), object.clone()],
        ..wire::objects("objects", &["one"; 2])
    };
    let long = v1::ReadObjectRequest {
        if_match: object.clone(),
        ..wire::object("objects", "one")
    };
    let answers = [
        fetch.fetch_ranges(ranges.clone()).await.map(drop),
        fetch.score_vectors(scores).await.map(drop),
        fetch.fetch_objects(objects.clone()).await.map(drop),
        fetch.read_object(long).await.map(drop),
    ];
    for answer in answers {
        let status = answer.unwrap_err();
        is_told(status.code(), &status.get_error_details());
    }
    let requests = [Request::Ranges(ranges), Request::Objects(objects)];
    let requests = (0..)
        .zip(requests)
        .map(|(id, request)| wire::on_stream(id, request));
    let mut answers = wire::stream(&mut fetch, requests.collect::<Vec<_>>()).await;
    for _ in 0..2 {
        match answers.message().await.unwrap().unwrap().response {
            Some(Response::Status(status)) => is_told(status.code.into(), &status.get_error_details()),
            other => panic!("{other:?}"),
        }
    }
    let parts = json!({"objects": [{"name": "one"}, {"name": "one", "if_match": object}]});
    let answer = http
        .batch(
            "/v1/datasets/objects/objects:batchFetch",
            &parts,
            "application/json",
        )
        .await;
    answer.is_problem(400, "malformed", Some("if_match"), &["without quotes"]);
    daemon.stop().await;
}

#[tokio::test]
async fn a_version_that_a_reload_replaced_is_refused() {
    // Scenario: a file is replaced by rename while it is served, and the configuration is reloaded.
    // Expectation: requests for the old version are answered until then, and refused from then on, with the
    // new version.
    let (setup, _) = plain_blocks(Setup::new("pread"), 8);
    let daemon = setup.start();
    let mut fetch = daemon.fetch().await;
    let answer = fetch.fetch_blocks(wire::blocks("blocks", &[0])).await;
    let old = answer.unwrap().into_inner().etag;
    let request = v1::FetchBlocksRequest {
        if_match: old.clone(),
        ..wire::blocks("blocks", &[0])
    };
    fs::write(daemon.path("next"), noise(8, 8 * 4096)).unwrap();
    fs::rename(daemon.path("next"), daemon.path("blocks.bin")).unwrap();
    assert_eq!(
        fetch
            .fetch_blocks(request.clone())
            .await
            .unwrap()
            .into_inner()
            .etag,
        old
    );
    reload(&daemon).await.unwrap();
    let answer = fetch.fetch_blocks(wire::blocks("blocks", &[0])).await;
    let new = answer.unwrap().into_inner().etag;
    assert_ne!(new, old);
    refused(fetch.fetch_blocks(request).await, &new);
    daemon.stop().await;
}

#[tokio::test]
async fn a_version_is_of_one_layout() {
    // Scenario: reloads change only how a file is divided: the length of its blocks, from blocks to vectors, their
    // dimension, type, and header; then back to the first. Expectation: each layout has a version of its own, which
    // refuses requests for the version before; the first one is the first version again.
    let of = |keys: &str| {
        let keys = format!("{{name: d, path: data.bin, {keys}}}");
        format!("{}{}\ndatasets:\n  - {keys}\n", LISTEN, engine("pread"))
    };
    let layouts = [
        "kind: blocks, block_bytes: 512",
        "kind: blocks, block_bytes: 1024",
        "kind: vectors, layout: raw, dim: 4, dtype: f32",
        "kind: vectors, layout: raw, dim: 8, dtype: f32",
        "kind: vectors, layout: raw, dim: 4, dtype: i32",
        "kind: vectors, layout: raw, dim: 2, dtype: f64",
        "kind: vectors, layout: raw, dim: 4, dtype: f32, header_bytes: 16",
        "kind: blocks, block_bytes: 512",
    ];
    let setup = Setup::new("pread").whole(&of(layouts[0]));
    setup.file("data.bin", &noise(7, 8192));
    let daemon = setup.start();
    let mut fetch = daemon.fetch().await;
    let mut versions: Vec<String> = Vec::new();
    for keys in layouts {
        daemon.rewrite(&of(keys));
        reload(&daemon).await.unwrap();
        let get = v1::GetDatasetRequest { name: "d".into() };
        let described = daemon.datasets().await.get_dataset(get).await.unwrap();
        let version = described.into_inner().dataset.unwrap().etag;
        if let Some(before) = versions.last() {
            let (is_blocks, if_match) = (keys.starts_with("kind: blocks"), before.clone());
            if is_blocks {
                let request = wire::blocks("d", &[1]);
                let request = v1::FetchBlocksRequest { if_match, ..request };
                refused(fetch.fetch_blocks(request).await, &version);
            } else {
                let request = wire::vectors("d", &[1]);
                let request = v1::FetchVectorsRequest { if_match, ..request };
                refused(fetch.fetch_vectors(request).await, &version);
            }
        }
        let bytes = daemon.http_client().get("/v1/datasets/d/bytes").await;
        assert_eq!(bytes.header("etag"), format!("\"{version}\""), "{keys}");
        versions.push(version);
    }
    assert_eq!(versions.pop(), Some(versions[0].clone()));
    let distinct: BTreeSet<_> = versions.iter().collect();
    assert_eq!(distinct.len(), versions.len(), "{versions:?}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_stands_twice_is_of_one_version() {
    // Scenario: one batch requests an object 32 times while it is replaced without pause; every open looks
    // the name up. Expectation: its 32 copies are the same bytes with one etag, whichever version they are
    // of.
    let setup = Setup::new("pread");
    setup.file("objects/o", &[0; 100]);
    let setup = setup.dataset(&["{name: objects, kind: objects, path: objects, revalidate_ms: 0}"]);
    let daemon = setup.start();
    let stop = AtomicBool::new(false);
    let replace = async {
        for version in (0..100_u8).cycle() {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            fs::write(daemon.path("next"), [version; 100]).unwrap();
            fs::rename(daemon.path("next"), daemon.path("objects/o")).unwrap();
            tokio::task::yield_now().await;
        }
    };
    let read = async {
        let mut fetch = daemon.fetch().await;
        let mut seen = BTreeSet::new();
        eventually_async("many versions are read", async || {
            let answer = fetch.fetch_objects(wire::objects("objects", &["o"; 32])).await;
            let answer = answer.unwrap().into_inner();
            assert!(answer.errors.is_empty(), "{:?}", answer.errors);
            assert!(
                answer.data.iter().all(|byte| *byte == answer.data[0]),
                "of two versions"
            );
            assert!(
                answer.etags.iter().all(|etag| *etag == answer.etags[0]),
                "{:?}",
                answer.etags
            );
            seen.insert(answer.data[0]);
            (seen.len() >= 20).then_some(())
        })
        .await;
        stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(replace, read);
    daemon.stop().await;
}

#[tokio::test]
async fn items_over_http_may_be_asked_for_by_the_version_of_their_dataset() {
    // Scenario: blocks and vectors with `If-Match`: their own tag, their dataset's, another item's, another
    // version; conditions on batches. Expectation: the first two hold, also for other items; the others do
    // not, and the failing header is named.
    let (setup, everything) = everything(Setup::new("pread"));
    let daemon = setup.start();
    let http = daemon.http_client();
    for (name, path) in [("joined", "blocks"), ("npy-f32", "vectors")] {
        assert!(everything.spaces.iter().any(|space| space.name == name));
        let item = |index: u32| format!("/v1/datasets/{name}/{path}/{index}");
        let own = http.get(&item(1)).await.header("etag").to_owned();
        let whole = http.get(&format!("/v1/datasets/{name}/bytes")).await;
        let whole = whole.header("etag").to_owned();
        for (index, tag, status) in [
            (1, &own, 200),
            (1, &whole, 200),
            (2, &whole, 200),
            (2, &own, 412),
            (1, &"\"0123456789abcdef0123456789abcdef\"".to_owned(), 412),
        ] {
            let answer = http.get_with(&item(index), &[("if-match", tag)]).await;
            assert_eq!(answer.status.as_u16(), status, "{path}/{index} of {tag}");
        }
        let bare = own.trim_matches('"');
        // By the shortcut, and by the router.
        for path in [item(1), format!("/v1/datasets/{name}/{path}/%31")] {
            for (condition, field) in [("if-match", "If-Match"), ("if-none-match", "If-None-Match")] {
                let answer = http.get_with(&path, &[(condition, bare)]).await;
                answer.is_problem(400, "malformed", Some(field), &["double quotes"]);
            }
        }
        let same = http.get_with(&item(1), &[("if-none-match", &own)]).await;
        assert_eq!((same.status.as_u16(), same.header("etag")), (304, &own[..]));
        assert!(same.body.is_empty());
        let both = [("if-match", &whole[..]), ("if-none-match", &own[..])];
        assert_eq!(http.get_with(&item(1), &both).await.status, 304);
        let ranges = format!("/v1/datasets/{name}/ranges:batchFetch");
        let body = json!({"ranges": [{"offset": 0, "length": 1}]}).to_string();
        let headers = [("content-type", "application/json"), ("if-none-match", "*")];
        let answer = http.send(Method::POST, &ranges, &headers, body.clone()).await;
        answer.is_problem(412, "precondition-failed", Some("If-None-Match"), &[]);
        let headers = [("content-type", "application/json"), ("if-match", bare)];
        let answer = http.send(Method::POST, &ranges, &headers, body).await;
        answer.is_problem(400, "malformed", Some("If-Match"), &["double quotes"]);
    }
    for (name, field) in [("if-match", "If-Match"), ("if-none-match", "If-None-Match")] {
        let body = json!({"names": [everything.objects[3].0]}).to_string();
        let headers = [("content-type", "application/json"), (name, "\"a\"")];
        let path = "/v1/datasets/objects/objects:batchFetch";
        let answer = http.send(Method::POST, path, &headers, body).await;
        answer.is_problem(400, "malformed", Some(field), &["if_match"]);
    }
}
