//! Deadlines end the wait, and reads that no one waits for do not reach the disk.

use crate::backlog::{ITEMS, Load, slow};
use crate::daemon::{Setup, any_backend, eventually_async};
use crate::data::{everything, plain_blocks};
use crate::wire::{self, Narrow, framed};
use prost::Message as _;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_types::{RpcStatusExt as _, StatusExt as _};

#[tokio::test]
async fn what_nobody_waits_for_is_not_read() {
    // Scenario: a daemon with seconds of reads queued gets requests with short deadlines by unary call, on a
    // stream and over HTTP. Expectation: each fails with its deadline while the queue is still there, and
    // afterwards the device has been read only for requests that were waited for.
    let (setup, _) = plain_blocks(slow(Setup::new("pread")), 8);
    let daemon = setup.set("limits.stream_requests_in_flight", "16").start();
    let load = Load::start(&daemon, 10).await;
    let mut narrow = Narrow::connect(daemon.grpc, 1 << 20).await;
    let http = daemon.http_client();
    let request = wire::blocks("blocks", &[3]);
    let (mut in_time, mut late) = (0, 0);

    for _ in 0..5 {
        eventually_async("a unary call is late", async || {
            let before = load.finished();
            match narrow
                .call("FetchBlocks", &[("grpc-timeout", "1m")], &request)
                .await
                .status()
                .await
            {
                status if status.code() == Code::DeadlineExceeded => {
                    assert!(status.message().contains("deadline passed"), "{status:?}");
                    late += 1;
                    // It failed before its turn, which was behind ten batches.
                    (load.finished() < before + 9).then_some(())
                }
                status => {
                    assert_eq!(status.code(), Code::Ok, "{status:?}");
                    in_time += 1;
                    None
                }
            }
        })
        .await;
        eventually_async("a batch over HTTP is late", async || {
            let before = load.finished();
            let body = serde_json::json!({"indices": [3], "deadline_ms": 1});
            let answer = http
                .batch("/v1/datasets/blocks/blocks:batchFetch", &body, "*/*")
                .await;
            if answer.status == 200 {
                in_time += 1;
                return None;
            }
            answer.is_problem(504, "deadline-exceeded", None, &["deadline passed"]);
            late += 1;
            (load.finished() < before + 9).then_some(())
        })
        .await;
    }

    // On one stream, more requests than get their turn within a millisecond. Every second one has a deadline
    // of 1 ms, which most of these miss; the others are answered in the end, and the stream continues.
    let requests = (0..400).map(move |id| v1::FetchStreamRequest {
        id,
        request: Some(Request::Blocks(request.clone())),
        deadline_ms: u32::from(id % 2 == 0),
    });
    // A window of 16 responses: what the connection holds, with the requests in flight and the abandoned ones
    // between them, stays within 1/64 of the free memory, which it may always hold.
    let channel = wire::channel_of_window(daemon.grpc, 1 << 16).await;
    let mut fetch = wire::fetch_client(channel);
    let mut answers = wire::stream(&mut fetch, requests).await;
    let before = late;
    while let Some(answer) = answers.message().await.unwrap() {
        match wire::blocks_of(answer.response) {
            Err(error) => {
                assert_eq!(error.code, i32::from(Code::DeadlineExceeded), "{}", error.message);
                assert!(error.get_details_retry_info().is_none(), "{error:?}");
                assert_eq!(answer.id % 2, 0);
                late += 1;
            }
            Ok(_) => in_time += 1,
        }
    }
    assert!(late > before);

    let (batches, _) = load.stop().await;
    // Abandoned reads still have to be removed from the inbox.
    let scrape = eventually_async("the queue is empty", async || {
        let scrape = daemon.scrape().await;
        (scrape.sum("ringfetch_queued_reads", &[]) == 0).then_some(scrape)
    })
    .await;
    // A late request may have been read when its deadline passed, but not all of them were. No request counts twice.
    let ok = scrape.sum(
        "ringfetch_reads_total",
        &[("dataset", "blocks"), ("result", "ok")],
    );
    let all = scrape.sum("ringfetch_reads_total", &[("dataset", "blocks")]);
    assert!(
        in_time <= ok && ok < all && all <= in_time + late,
        "{ok} of {all} answered, {in_time} in time, {late} late"
    );
    // A read of bytes already being read joins that read, and does not reach the device a second time.
    let read =
        scrape.sum("ringfetch_device_reads_total", &[]) + scrape.sum("ringfetch_joined_reads_total", &[]);
    let least = batches * ITEMS + in_time;
    assert!(
        (least..least + late).contains(&read),
        "{read} reads, {least} and up to {late} more"
    );
    let rejected = [("reason", "deadline")];
    assert_eq!(scrape.sum("ringfetch_rejected_total", &rejected), late);
    daemon.stop().await;
}

#[tokio::test]
async fn a_deadline_that_has_passed_touches_nothing() {
    // Scenario: an idle daemon, and calls whose deadline has passed when they arrive, for blocks, for scores, and on a
    // stream. Expectation: DEADLINE_EXCEEDED, and no read of the device; an invalid timeout is
    // INVALID_ARGUMENT.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 8);
    setup.file("vectors.dat", &[0; 128]);
    let daemon = setup
        .dataset(&["{name: vectors, kind: vectors, path: vectors.dat, layout: raw, dim: 4, dtype: f32}"])
        .start();
    let scores = wire::best("vectors", vec![1.0; 4], vec![3]);
    let mut narrow = Narrow::connect(daemon.grpc, 1 << 20).await;
    let request = wire::blocks("blocks", &[3]);
    for timeout in ["1n", "0m", "0S"] {
        let status = narrow
            .call("FetchBlocks", &[("grpc-timeout", timeout)], &request)
            .await
            .status()
            .await;
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        let status = narrow
            .call("ScoreVectors", &[("grpc-timeout", timeout)], &scores)
            .await
            .status()
            .await;
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        // The stream's end, after the responses to its requests.
        let on_stream = wire::on_stream(0, Request::Blocks(request.clone()));
        let held = narrow
            .call("FetchStream", &[("grpc-timeout", timeout)], &on_stream)
            .await;
        let status = held.status().await;
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        assert_eq!(
            status.get_details_error_info().unwrap().reason,
            "DEADLINE_EXCEEDED"
        );
    }
    for timeout in ["", "1", "m", "-1m", "123456789m", "1 m"] {
        let status = narrow
            .call("FetchBlocks", &[("grpc-timeout", timeout)], &request)
            .await
            .status()
            .await;
        assert_eq!(status.code(), Code::InvalidArgument, "{timeout:?}: {status:?}");
        assert!(status.message().contains("grpc-timeout"), "{status:?}");
    }
    let scrape = daemon.scrape().await;
    assert_eq!(scrape.sum("ringfetch_device_reads_total", &[]), 0);
    assert_eq!(scrape.sum("ringfetch_reads_total", &[("result", "ok")]), 0);
    let status = narrow
        .call("FetchBlocks", &[("grpc-timeout", "99999999H")], &request)
        .await
        .status()
        .await;
    assert_eq!(status.code(), Code::Ok, "{status:?}");
    assert!(daemon.sum("ringfetch_device_reads_total", &[]).await > 0);
    daemon.stop().await;
}

#[tokio::test]
async fn a_request_that_does_not_arrive_in_time_is_counted_over_both_transports() {
    // Scenario: requests whose bodies do not arrive within limits.deadline_ms: a call, a batch, and a score over HTTP.
    // Expectation: DEADLINE_EXCEEDED, and 408; each is counted as refused, and has this code in the request metrics
    // and in the access log.
    let setup = everything(Setup::new(any_backend())).0;
    let daemon = setup
        .set("limits.deadline_ms", "50")
        .set("access_log.path", "access.log")
        .start();
    let mut narrow = Narrow::connect(daemon.grpc, 1 << 20).await;
    let headers = [("content-type", "application/grpc"), ("te", "trailers")];
    let path = "/ringfetch.v1.FetchService/FetchBlocks";
    let status = narrow.ask_without_end(path, &headers).await.status().await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    let mut over_http = Narrow::connect(daemon.http, 1 << 20).await;
    for path in [
        "/v1/datasets/tailed/blocks:batchFetch",
        "/v1/datasets/fbin/vectors:score",
    ] {
        let headers = [("content-type", "application/json")];
        let held = over_http.ask_without_end(path, &headers).await;
        assert_eq!(held.head.status, 408, "{path}");
    }
    let scrape = daemon.scrape().await;
    let rejected = [("reason", "deadline")];
    assert_eq!(scrape.sum("ringfetch_rejected_total", &rejected), 3);
    for (method, code) in [
        ("FetchBlocks", "DEADLINE_EXCEEDED"),
        ("BatchFetchBlocks", "408"),
        ("ScoreVectors", "408"),
    ] {
        let labels = [("method", method), ("code", code)];
        assert_eq!(scrape.sum("ringfetch_rpc_requests_total", &labels), 1, "{method}");
        let line = [format!("\"method\":\"{method}\""), format!("\"code\":\"{code}\"")];
        eventually_async("a line of the access log", async || {
            let log = std::fs::read_to_string(daemon.path("access.log")).unwrap_or_default();
            log.lines()
                .any(|found| line.iter().all(|part| found.contains(part)))
                .then_some(())
        })
        .await;
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_call_of_any_service_ends_at_its_deadline() {
    // Scenario: calls of the services that tonic serves whose deadline has passed when they arrive, or passes while
    // their message is awaited; a health watch whose deadline passes while nothing changes. Expectation: each ends with
    // DEADLINE_EXCEEDED; those that were not served are counted as refused. With time left they succeed.
    let setup = everything(plain_blocks(Setup::new(any_backend()), 8).0).0;
    let daemon = setup.start();
    let dataset = v1::GetDatasetRequest {
        name: "blocks".to_owned(),
    };
    let objects = wire::listing("objects");
    let methods = [
        (
            daemon.grpc,
            "/ringfetch.v1.DatasetService/ListDatasets",
            Vec::new(),
        ),
        (
            daemon.grpc,
            "/ringfetch.v1.DatasetService/GetDataset",
            dataset.encode_to_vec(),
        ),
        (
            daemon.grpc,
            "/ringfetch.v1.DatasetService/ListObjects",
            objects.encode_to_vec(),
        ),
        (daemon.admin, "/ringfetch.v1.AdminService/GetStatus", Vec::new()),
        (daemon.grpc, "/grpc.health.v1.Health/Check", Vec::new()),
    ];
    let headers = |timeout| {
        [
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            ("grpc-timeout", timeout),
        ]
    };
    let mut refused = 0;
    for (address, path, message) in &methods {
        let mut narrow = Narrow::connect(*address, 1 << 20).await;
        for timeout in ["1n", "0S"] {
            let held = narrow.ask(path, &headers(timeout), framed(message)).await;
            let status = held.status().await;
            assert_eq!(status.code(), Code::DeadlineExceeded, "{path}: {status:?}");
            assert!(status.message().contains("deadline passed"), "{status:?}");
            refused += 1;
        }
        let held = narrow.ask_without_end(path, &headers("50m")).await;
        let status = held.status().await;
        assert_eq!(status.code(), Code::DeadlineExceeded, "{path}: {status:?}");
        refused += 1;
        let held = narrow.ask(path, &headers("1H"), framed(message)).await;
        let status = held.status().await;
        assert_eq!(status.code(), Code::Ok, "{path}: {status:?}");
    }
    let rejected = [("reason", "deadline")];
    assert_eq!(daemon.sum("ringfetch_rejected_total", &rejected).await, refused);

    let mut narrow = Narrow::connect(daemon.grpc, 1 << 20).await;
    let watch = HealthCheckRequest::default().encode_to_vec();
    let path = "/grpc.health.v1.Health/Watch";
    // Again, if the deadline has passed before the daemon could answer.
    let (body, status) = eventually_async("a watch is answered", async || {
        let held = narrow.ask(path, &headers("100m"), framed(&watch)).await;
        let (body, status) = held.rest().await;
        (!body.is_empty()).then_some((body, status))
    })
    .await;
    assert_eq!(body.as_ref(), [0, 0, 0, 0, 2, 8, 1], "SERVING");
    let status = status.unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(
        status.get_details_error_info().unwrap().reason,
        "DEADLINE_EXCEEDED"
    );
    let labels = [("method", "HealthWatch"), ("code", "DEADLINE_EXCEEDED")];
    eventually_async("the watch is counted", async || {
        (daemon.sum("ringfetch_rpc_requests_total", &labels).await > 0).then_some(())
    })
    .await;
    daemon.stop().await;
}
