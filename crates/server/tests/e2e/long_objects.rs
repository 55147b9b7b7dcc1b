//! ReadObject: objects of any length, of one version from the first byte to the last.

use crate::daemon::{Daemon, Setup, backends, eventually_async, setups};
use crate::data::{everything, noise};
use crate::wire::{self, Narrow};
use ringfetch_proto::v1;
use std::fs::{self, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::time::Duration;
use tokio::time::timeout;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// Many windows of 1 MiB, and a few bytes.
const LENGTH: usize = (12 << 20) + 345;

fn setup(backend: &str, bytes: &[u8]) -> Setup {
    let setup = Setup::new(backend);
    setup.file("objects/long", bytes);
    setup.dataset(&["name: objects", "kind: objects", "path: objects"])
}

fn request(name: &str) -> v1::ReadObjectRequest {
    wire::object("objects", name)
}

/// The first message, and the data: every message begins where the previous one ended.
fn put_together(messages: &[v1::ReadObjectResponse]) -> (v1::ReadObjectResponse, Vec<u8>) {
    let (first, rest) = messages.split_first().unwrap();
    assert!(first.data.is_empty() && first.etag.len() == 32, "{first:?}");
    let (mut data, mut next) = (Vec::new(), first.offset);
    for message in rest {
        assert_eq!((message.offset, message.etag.as_str()), (next, ""));
        assert!(!message.data.is_empty() && message.data.len() <= 1 << 20);
        data.extend_from_slice(&message.data);
        next += message.data.len() as u64;
    }
    (first.clone(), data)
}

/// Reads to the end: the messages, and the final status.
async fn read(
    daemon: &Daemon,
    request: v1::ReadObjectRequest,
) -> (Vec<v1::ReadObjectResponse>, Result<(), Status>) {
    // A client with gRPC's default limit of 4 MiB per message.
    let mut fetch = v1::fetch_service_client::FetchServiceClient::new(wire::channel(daemon.grpc).await);
    let mut messages = Vec::new();
    let mut answer = match fetch.read_object(request).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return (messages, Err(status)),
    };
    loop {
        match answer.message().await {
            Ok(Some(message)) => messages.push(message),
            Ok(None) => return (messages, Ok(())),
            Err(status) => return (messages, Err(status)),
        }
    }
}

#[tokio::test]
async fn objects_of_any_length_are_read_whole_and_in_part() {
    // Scenario: objects of no bytes, of a few and of many windows, whole and in part, on each backend.
    // Expectation: their bytes, in order, with the length and the version that HTTP reports; each counts as
    // one call with OK.
    for setup in setups() {
        let (setup, everything) = everything(setup);
        let long = noise(91, LENGTH);
        setup.file("objects/long", &long);
        let daemon = setup.start();
        let http = daemon.http_client();
        let objects = everything.objects.iter().map(|(name, content)| (*name, content));
        let mut calls = 0;
        for (name, content) in objects.chain([("long", &long)]) {
            let path = format!("/v1/datasets/objects/objects/{}", wire::escaped(name));
            let etag = http.get(&path).await.header("etag").trim_matches('"').to_owned();
            let end = content.len();
            let parts = [(0, 0), (end / 2, 0), (end / 3, end / 2), (end, 0)];
            for (offset, length) in parts {
                let (found, ended) = read(
                    &daemon,
                    v1::ReadObjectRequest {
                        offset: offset as u64,
                        length: length as u64,
                        if_match: etag.clone(),
                        ..request(name)
                    },
                )
                .await;
                ended.unwrap_or_else(|status| panic!("{name} from {offset}: {status:?}"));
                let (first, data) = put_together(&found);
                assert_eq!(
                    (first.etag.as_str(), first.object_length_bytes, first.offset),
                    (etag.as_str(), end as u64, offset as u64)
                );
                let expected = if length == 0 {
                    &content[offset..]
                } else {
                    &content[offset..offset + length]
                };
                assert!(data == expected, "{name} from {offset}");
                calls += 1;
            }
        }
        eventually_async("every call is counted", async || {
            let labels = [("method", "ReadObject"), ("code", "OK")];
            let counted = daemon.sum("ringfetch_rpc_requests_total", &labels).await;
            (counted >= calls && daemon.status().await.memory_in_use_bytes == 0).then_some(())
        })
        .await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn what_cannot_be_read_is_refused_before_the_first_message() {
    // Parts past the end, unknown names and datasets, another kind, another version: each has its code, as from
    // FetchObjects, and its own field; and a compressed call.
    let (setup, _) = everything(Setup::new("pread"));
    let daemon = setup.start();
    let one = |change: fn(&mut v1::ReadObjectRequest)| {
        let mut request = request("one");
        change(&mut request);
        request
    };
    for (request, code, field) in [
        (one(|request| request.offset = 2), Code::OutOfRange, "offset"),
        (one(|request| request.length = 2), Code::OutOfRange, "length"),
        (
            v1::ReadObjectRequest {
                length: 1,
                ..request("empty")
            },
            Code::OutOfRange,
            "length",
        ),
        (
            one(|request| request.offset = u64::MAX),
            Code::OutOfRange,
            "offset",
        ),
        (
            one(|request| request.name = "nothing".into()),
            Code::NotFound,
            "name",
        ),
        (
            one(|request| request.name = "../secret".into()),
            Code::InvalidArgument,
            "name",
        ),
        (
            one(|request| request.dataset = "nothing".into()),
            Code::NotFound,
            "dataset",
        ),
        (
            one(|request| request.dataset = "joined".into()),
            Code::FailedPrecondition,
            "dataset",
        ),
        (
            one(|request| request.if_match = "0".into()),
            Code::FailedPrecondition,
            "if_match",
        ),
    ] {
        let (found, ended) = read(&daemon, request.clone()).await;
        let status = ended.unwrap_err();
        assert_eq!((found.len(), status.code()), (0, code), "{request:?}: {status:?}");
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, field, "{request:?}");
    }
    let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
    let compressed = narrow
        .call("ReadObject", &[("grpc-encoding", "gzip")], &request("one"))
        .await;
    assert_eq!(compressed.status().await.code(), Code::Unimplemented);
    daemon.stop().await;
}

#[tokio::test]
async fn an_object_that_is_replaced_is_read_to_its_end() {
    // Scenario: a response has begun, over gRPC and over HTTP, and is not read; the object is replaced by
    // rename, and removed. Expectation: both responses hold a few windows and end with old bytes; new calls
    // find the new object, then none.
    for backend in backends() {
        let (old, new) = (noise(92, LENGTH), noise(93, LENGTH));
        let daemon = setup(backend, &old)
            .set("limits.connection_bytes", "8MiB")
            .start();
        let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
        let mut over_http = Narrow::connect(daemon.http, 65_535).await;
        let begun = narrow.call("ReadObject", &[], &request("long")).await;
        let mirrored = over_http.ask_get("/v1/datasets/objects/objects/long").await;
        fs::write(daemon.path("next"), &new).unwrap();
        fs::rename(daemon.path("next"), daemon.path("objects/long")).unwrap();
        eventually_async("the new object is served", async || {
            let (found, ended) = read(&daemon, request("long")).await;
            ended.unwrap();
            let (_, data) = put_together(&found);
            assert!(data == new || data == old, "{backend}: of two versions");
            (data == new).then_some(())
        })
        .await;
        fs::remove_file(daemon.path("objects/long")).unwrap();
        eventually_async(
            "each answer holds two windows, and one that HTTP/2 has",
            async || (daemon.status().await.memory_in_use_bytes <= 2 * (3 << 20)).then_some(()),
        )
        .await;
        let (body, status) = begun.rest().await;
        assert_eq!(status.unwrap().code(), Code::Ok, "{backend}");
        assert!(
            put_together(&wire::messages(&body)).1 == old,
            "{backend}: other bytes"
        );
        let (body, _) = mirrored.rest().await;
        assert!(body == old, "{backend}: other bytes over HTTP");
        daemon.stop().await;
    }
}

#[tokio::test]
async fn an_object_that_is_written_to_ends_the_call() {
    // Scenario: a response has begun and is not read; the object is written to in place. Expectation: the
    // call ends with ABORTED and its reason, and no message has new bytes; the next call reads the object as
    // it is now.
    for backend in backends() {
        let old = noise(94, LENGTH);
        let daemon = setup(backend, &old).start();
        let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
        let begun = narrow.call("ReadObject", &[], &request("long")).await;
        let mut file = OpenOptions::new()
            .write(true)
            .open(daemon.path("objects/long"))
            .unwrap();
        let last = LENGTH - 1;
        file.seek(SeekFrom::Start(last as u64)).unwrap();
        file.write_all(&[!old[last]]).unwrap();
        let (body, status) = begun.rest().await;
        let status = status.unwrap();
        assert_eq!(status.code(), Code::Aborted, "{backend}: {status:?}");
        assert_eq!(status.get_details_error_info().unwrap().reason, "CHANGING");
        let (_, data) = put_together(&wire::messages(&body));
        assert!(data.len() < LENGTH && old.starts_with(&data), "{backend}");
        let new = [&old[..last], &[!old[last]]].concat();
        let (found, ended) = read(&daemon, request("long")).await;
        ended.unwrap();
        assert!(put_together(&found).1 == new, "{backend}");
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_deadline_is_for_the_whole_answer() {
    // Scenario: calls for 12 MiB through a small window, with a deadline of 20 ms, or of what this machine needs to begin and not to
    // end. Expectation: sooner or later one has begun when its deadline passes, and ends with DEADLINE_EXCEEDED; one with no time at
    // all is refused. Both have the same status, and are counted.
    let daemon = setup("pread", &noise(95, LENGTH)).start();
    let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
    let gone = narrow
        .call("ReadObject", &[("grpc-timeout", "1n")], &request("long"))
        .await;
    let gone = gone.status().await;
    assert_eq!(gone.code(), Code::DeadlineExceeded);
    let (mut refused, mut time_ms) = (1, 20_u32);
    eventually_async("a deadline passes inside an answer", async || {
        let time = format!("{time_ms}m");
        let headers = [("grpc-timeout", &time[..])];
        let (body, status) = narrow
            .call("ReadObject", &headers, &request("long"))
            .await
            .rest()
            .await;
        let status = status.unwrap();
        let late = status.code() == Code::DeadlineExceeded;
        if late {
            refused += 1;
            assert_eq!(status.message(), gone.message());
            assert_eq!(status.details(), gone.details());
        }
        match (late, body.len()) {
            (true, 0) => time_ms = (2 * time_ms).min(5000),
            (false, _) => time_ms = (time_ms / 2).max(1),
            (true, sent) => return (sent < LENGTH).then_some(()),
        }
        None
    })
    .await;
    let rejected = [("reason", "deadline")];
    assert_eq!(daemon.sum("ringfetch_rejected_total", &rejected).await, refused);
    daemon.stop().await;
}

#[tokio::test]
async fn a_deadline_ends_an_answer_that_is_not_read() {
    // Scenario: a response of 12 MiB has begun, its client reads nothing, and its deadline passes, after a second or as long as a busy
    // machine needs to show what is held before that. Expectation: what is held for it grows, until the window that HTTP/2 has not
    // taken is given back; a client that reads at last gets what HTTP/2 had taken, and DEADLINE_EXCEEDED.
    let daemon = setup("pread", &noise(97, LENGTH)).start();
    let mut seconds = 1;
    let begun = loop {
        let time = format!("{seconds}S");
        let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
        let headers = [("grpc-timeout", &time[..])];
        let begun = narrow.call("ReadObject", &headers, &request("long")).await;
        let mut most = 0;
        let given_back = eventually_async("a window is given back", async || {
            let held = daemon.status().await.memory_in_use_bytes;
            most = most.max(held);
            (held < most).then_some(())
        });
        if timeout(Duration::from_secs(2 * seconds), given_back)
            .await
            .is_ok()
        {
            break begun;
        }
        drop((begun, narrow));
        daemon.gives_memory_back().await;
        seconds *= 2;
        assert!(seconds <= 8, "no window is given back");
    };
    let (body, status) = begun.rest().await;
    assert_eq!(status.unwrap().code(), Code::DeadlineExceeded);
    assert!(!body.is_empty() && body.len() < LENGTH, "{} bytes", body.len());
    daemon.gives_memory_back().await;
    daemon.stop().await;
}

#[tokio::test]
async fn an_answer_that_has_begun_is_sent_while_it_drains() {
    // Scenario: a response has begun and is not read when a drain begins. Expectation: it is sent completely,
    // and the daemon exits.
    let bytes = noise(96, LENGTH);
    for setup in [setup("pread", &bytes), setup("pread", &bytes).over_tls()] {
        let mut daemon = setup.set("shutdown.drain_timeout_ms", "60000").start();
        let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
        let begun = narrow.call("ReadObject", &[], &request("long")).await;
        daemon.signal(rustix::process::Signal::TERM);
        eventually_async("it drains", async || {
            (daemon.status().await.state == "draining").then_some(())
        })
        .await;
        let (body, status) = begun.rest().await;
        assert_eq!(status.unwrap().code(), Code::Ok);
        assert!(put_together(&wire::messages(&body)).1 == bytes);
        drop(narrow);
        daemon.ends_with(0).await;
    }
}

#[tokio::test]
async fn what_is_sent_by_default_is_what_stock_clients_take() {
    // Scenario: with the default limit, 3 MiB of blocks, by clients that accept 4 MiB per message, and one
    // block more. Expectation: the first arrive, by a call and on a stream; the others are refused with the
    // remedy, over HTTP as well; a longer range over HTTP arrives.
    let bytes = noise(97, LENGTH);
    let setup = Setup::new("pread");
    setup.file("blocks.bin", &bytes);
    let blocks = [
        "name: blocks",
        "kind: blocks",
        "block_bytes: 1KiB",
        "path: blocks.bin",
        "partial_tail: ignore",
    ];
    let daemon = setup.dataset(&blocks).start();
    let mut fetch = v1::fetch_service_client::FetchServiceClient::new(wire::channel(daemon.grpc).await);
    let indices: Vec<u64> = (0..3073).collect();
    let (whole, more) = (
        wire::blocks("blocks", &indices[..3072]),
        wire::blocks("blocks", &indices),
    );
    let answer = fetch.fetch_blocks(whole.clone()).await.unwrap().into_inner();
    assert!(answer.data == bytes[..3 << 20]);
    let request = wire::on_stream(1, v1::fetch_stream_request::Request::Blocks(whole));
    let mut answers = wire::stream(&mut fetch, [request]).await;
    assert!(answers.message().await.unwrap().is_some());
    let status = fetch.fetch_blocks(more).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let remedy = [
        "limits.response_bytes",
        "split the batch",
        "raise that limit and the client's",
    ];
    assert!(
        remedy.iter().all(|part| status.message().contains(part)),
        "{status:?}"
    );
    let http = daemon.http_client();
    let path = "/v1/datasets/blocks/blocks:batchFetch";
    let answer = http
        .batch(path, &serde_json::json!({ "indices": indices }), "*/*")
        .await;
    answer.is_problem(413, "response-too-large", Some("indices"), &remedy);
    let end = LENGTH - LENGTH % 1024;
    assert!(http.get("/v1/datasets/blocks/bytes").await.body == bytes[..end]);
    daemon.stop().await;
}
