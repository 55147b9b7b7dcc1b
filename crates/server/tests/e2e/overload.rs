//! Every limit that depends on load: what exceeds it is refused at once, with a retry hint, and the service
//! recovers.

use crate::backlog::{Load, batch, slow};
use crate::daemon::{Daemon, PATIENCE, Setup, any_backend, backends, eventually_async};
use crate::data::plain_blocks;
use crate::wire::{self, Answer, Held, Narrow};
use bytes::Bytes;
use prost::Message as _;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_stream_request::Request;
use serde_json::json;
use tonic::{Code, Status};
use tonic_types::{RpcStatusExt as _, StatusExt as _};

/// RESOURCE_EXHAUSTED with RetryInfo and without a field to fix.
fn check(status: &Status, part: &str) {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains(part), "{part:?} is not in {status:?}");
    let retry = status.get_details_retry_info().and_then(|info| info.retry_delay);
    assert!(retry.is_some_and(|delay| !delay.is_zero()), "{status:?}");
    assert!(status.get_details_bad_request().is_none(), "{status:?}");
    let reason = status.get_details_error_info().map(|info| info.reason);
    assert_eq!(reason.as_deref(), Some("OVERLOADED"));
}

/// The same over HTTP.
fn check_http(answer: &Answer, code: u16, part: &str) {
    answer.is_problem(code, "overloaded", None, &[part]);
    assert!(
        answer
            .header("retry-after")
            .parse::<u32>()
            .is_ok_and(|seconds| seconds >= 1),
        "{answer:?}"
    );
    assert!(
        answer.json()["retry_after_ms"]
            .as_u64()
            .is_some_and(|after| after > 0),
        "{answer:?}"
    );
}

/// Sends requests until one is refused while no batch of the load completed: the refusal did not wait for
/// any.
async fn refused_at_once<T>(load: &Load, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    eventually_async("a request is refused at once", async || {
        let before = load.finished();
        let refused = ask().await;
        refused.filter(|_| load.finished() == before)
    })
    .await
}

/// Sends requests over every transport until refused.
async fn refused_everywhere(daemon: &Daemon, load: &Load, dataset: &str, indices: &[u64], part: &str) {
    let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
    let request = wire::blocks(dataset, indices);
    let status = refused_at_once(load, async || fetch.fetch_blocks(request.clone()).await.err()).await;
    check(&status, part);

    let path = format!("/v1/datasets/{dataset}/blocks:batchFetch");
    let body = json!({"indices": indices});
    let answer = refused_at_once(load, async || {
        let answer = http.batch(&path, &body, "*/*").await;
        (answer.status != 200).then_some(answer)
    })
    .await;
    check_http(&answer, 429, part);

    let error = refused_at_once(load, async || {
        let request = wire::on_stream(1, Request::Blocks(request.clone()));
        let mut answers = wire::stream(&mut fetch, [request]).await;
        wire::blocks_of(answers.message().await.unwrap().unwrap().response).err()
    })
    .await;
    assert_eq!(error.code, i32::from(Code::ResourceExhausted));
    let retry = error.get_details_retry_info().and_then(|info| info.retry_delay);
    assert!(
        retry.is_some_and(|delay| !delay.is_zero()) && error.message.contains(part),
        "{error:?}"
    );
}

#[tokio::test]
async fn more_requests_than_may_be_in_flight_are_refused() {
    // Scenario: four requests may be in flight, a caller may have half of what is free, and two clients of one
    // caller always send one each (both may be granted at the same moment, on different cores); others of the
    // caller send requests. Expectation: they are refused at once over gRPC, stream and HTTP, by the caller's share
    // and with a hint; refusals are counted; they are served again once the load is over.
    let (setup, _) = plain_blocks(slow(Setup::new("pread")), 8);
    let daemon = setup.set("limits.requests_in_flight", "4").start();
    let load = Load::start(&daemon, 2).await;
    refused_everywhere(&daemon, &load, "blocks", &[1], "limits.requests_in_flight").await;
    let (finished, _) = load.stop().await;
    assert!(finished > 0, "those in flight were answered");
    daemon.assert_serves("blocks").await;
    let scrape = daemon.scrape().await;
    assert!(scrape.sum("ringfetch_rejected_total", &[("reason", "requests_in_flight")]) >= 3);
    assert!(scrape.sum("ringfetch_rpc_requests_total", &[("code", "RESOURCE_EXHAUSTED")]) >= 1);
    daemon.stop().await;
}

#[tokio::test]
async fn more_reads_than_may_be_queued_are_refused() {
    // Scenario: 4096 reads may be queued, and a client keeps the queue full. Expectation: another batch of
    // 4096 is refused at once on every transport, and served once the load is over.
    let (setup, _) = plain_blocks(slow(Setup::new("pread")), 8);
    let daemon = setup.set("limits.queued_reads", "4096").start();
    let load = Load::start(&daemon, 1).await;
    refused_everywhere(&daemon, &load, "slow", &batch(), "limits.queued_reads").await;
    load.stop().await;
    let mut fetch = daemon.fetch().await;
    let answer = fetch
        .fetch_blocks(wire::blocks("slow", &batch()))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.data.len(), batch().len() * 512);
    let refused = [("reason", "caller_reads")];
    assert!(daemon.sum("ringfetch_rejected_total", &refused).await >= 3);
    daemon.stop().await;
}

#[tokio::test]
async fn memory_that_slow_clients_hold_is_bounded_by_connection_and_by_caller() {
    // Scenario: 8 MiB of memory, 2 MiB per connection, and responses of 2 MiB that connections of three
    // callers request and do not read. Expectation: a connection that has used its share, and a caller that
    // has used its own, get RESOURCE_EXHAUSTED (429 over HTTP); small responses are served all the time, to
    // the greedy callers too; all memory is free once the clients are gone.
    const ANSWER: u64 = 2 << 20;
    for &backend in backends() {
        let (setup, _) = plain_blocks(Setup::new(backend), 1024);
        let daemon = setup
            .set("engine.memory_budget", "8MiB")
            .set("limits.response_bytes", "2MiB")
            .set("limits.connection_bytes", "2MiB")
            .start();
        let large = wire::ranges("blocks", &[(0, ANSWER)]);
        let large_json = Bytes::from(json!({"ranges": [{"offset": 0, "length": ANSWER}]}).to_string());
        let (path, headers) = (
            "/v1/datasets/blocks/ranges:batchFetch",
            [("content-type", "application/json")],
        );
        let mut holding = Vec::new();
        for (index, from) in ["127.0.0.1", "127.0.0.2", "127.0.0.3"].into_iter().enumerate() {
            let mut first = Narrow::connect_from(from, daemon.grpc, 65_535).await;
            let held = first.call("FetchRanges", &[], &large).await;
            if index < 2 {
                let status = first.call("FetchRanges", &[], &large).await.status().await;
                check(&status, "this connection's share");
            }
            holding.push((first, held));
            let mut second = Narrow::connect_from(from, daemon.grpc, 65_535).await;
            let status = second.call("FetchRanges", &[], &large).await.status().await;
            check(&status, "this caller");
            let mut third = Narrow::connect_from(from, daemon.http, 65_535).await;
            let refused = third.ask(path, &headers, large_json.clone()).await;
            assert_eq!(
                (refused.head.status.as_u16(), &refused.head.headers["retry-after"]),
                (429, &http::HeaderValue::from_static("1"))
            );
            daemon.assert_serves("blocks").await;
            let small = wire::ranges("blocks", &[(0, 4096)]);
            let served = second.call("FetchRanges", &[], &small).await.rest().await;
            assert!(served.1.is_some_and(|status| status.code() == Code::Ok), "{from}");
        }
        assert_eq!(daemon.status().await.memory_in_use_bytes, 3 * ANSWER, "{backend}");
        let scrape = daemon.scrape().await;
        for (reason, least) in [("connection_memory", 2), ("caller_memory", 6)] {
            assert!(
                scrape.sum("ringfetch_rejected_total", &[("reason", reason)]) >= least,
                "{reason}"
            );
        }
        assert_eq!(scrape.sum("ringfetch_rejected_total", &[("reason", "memory")]), 0);

        // One of them reads its response after all, which is complete; the others disconnect.
        let (_, (body, status)) = {
            let (narrow, held) = holding.remove(0);
            (narrow, held.rest().await)
        };
        assert!(status.is_some_and(|status| status.code() == Code::Ok));
        assert!(body.len() as u64 > ANSWER);
        drop(holding);
        daemon.gives_memory_back().await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn what_is_refused_for_its_text_or_its_number_is_counted_as_such() {
    // Scenario: streams hold this address's share of request memory; then a list of objects has no room for its text, over
    // both transports. And a connection asks for a fifth watch. Expectation: all are refused, counted by the code that the
    // client gets, and as refused for memory.
    let setup = Setup::new("pread")
        .set("limits.request_bytes", "64KiB")
        .set("limits.items_per_request", "64")
        .set("limits.request_memory", "3MiB");
    for number in 0..500 {
        setup.file(&format!("objects/{number:0200}"), b"");
    }
    let daemon = setup
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .start();
    let call = [("content-type", "application/grpc"), ("te", "trailers")];
    let is_refused = |held: &Held| {
        held.head
            .headers
            .get("grpc-status")
            .is_some_and(|code| code == "8")
    };
    let mut holding = Vec::new();
    for _ in 0..4 {
        let mut connection = Narrow::connect(daemon.grpc, 65_535).await;
        let mut streams = Vec::new();
        while !streams.last().is_some_and(is_refused) {
            let stream = connection.ask_without_end("/ringfetch.v1.FetchService/FetchStream", &call);
            streams.push(stream.await);
        }
        holding.push((connection, streams));
    }
    let http = daemon.http_client();
    assert_eq!(http.get("/v1/datasets/objects/objects").await.status, 429);
    let list = wire::listing("objects");
    let listed = daemon.datasets().await.list_objects(list).await;
    check(&listed.unwrap_err(), "this caller");
    drop(holding);
    let mut connection = Narrow::connect(daemon.grpc, 65_535).await;
    let mut watches = Vec::new();
    for _ in 0..5 {
        let empty = Bytes::from_static(&[0; 5]);
        watches.push(connection.ask("/grpc.health.v1.Health/Watch", &call, empty).await);
    }
    assert_eq!(watches.iter().filter(|watch| is_refused(watch)).count(), 1);

    let scrape = eventually_async("memory is given back", async || daemon.try_scrape().await.ok()).await;
    for (transport, method, code) in [
        ("http", "ListObjects", "429"),
        ("grpc", "ListObjects", "RESOURCE_EXHAUSTED"),
    ] {
        let labels = [("transport", transport), ("method", method)];
        let with_code = [labels[0], labels[1], ("code", code)];
        for labels in [&labels[..], &with_code] {
            assert_eq!(scrape.sum("ringfetch_rpc_requests_total", labels), 1, "{method}");
        }
    }
    let refused = |transport, reason| {
        let labels = [("transport", transport), ("reason", reason)];
        scrape.sum("ringfetch_requests_refused_total", &labels)
    };
    // Four streams and the list; the watch.
    assert_eq!((refused("grpc", "memory"), refused("grpc", "services")), (5, 1));
    assert!(refused("http", "memory") >= 1);
    daemon.stop().await;
}

#[tokio::test]
async fn a_stream_holds_what_has_arrived_and_not_what_had_before() {
    // Scenario: one client after the other sends a request of 1 MiB on a stream, and with its end the beginning of a small
    // one; 12 MiB of request memory, of which an address may hold a third. Expectation: each is answered.
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup
        .set("limits.request_bytes", "1MiB")
        .set("limits.items_per_request", "64")
        .set("limits.request_memory", "12MiB")
        .start();
    let headers = [("content-type", "application/grpc"), ("te", "trailers")];
    let request = |name_bytes| {
        let unknown = wire::blocks(&"d".repeat(name_bytes), &[1]);
        wire::framed(&wire::on_stream(1, Request::Blocks(unknown)).encode_to_vec())
    };
    let beginning = [&request((1 << 20) - 100)[..], &request(1000)[..20]].concat();
    let mut open = Vec::new();
    for _ in 0..8 {
        let mut narrow = Narrow::connect(daemon.grpc, 65_535).await;
        let path = "/ringfetch.v1.FetchService/FetchStream";
        let mut stream = narrow
            .ask_to_begin(path, &headers, beginning.clone().into())
            .await;
        let answer = wire::messages::<v1::FetchStreamResponse>(&stream.piece().await).remove(0);
        let error = wire::blocks_of(answer.response).unwrap_err();
        assert_eq!(error.code, i32::from(Code::NotFound), "{error:?}");
        open.push((narrow, stream));
    }
    drop(open);
    daemon.stop().await;
}

#[tokio::test]
async fn connections_get_the_descriptors_of_cached_objects() {
    // Scenario: a cache of objects has taken most descriptors. Then clients connect that do not read their responses,
    // until there are none left, and some more. Expectation: all get one, and no connection is closed for another.
    const OBJECTS: u64 = 300;
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    for index in 0..OBJECTS {
        setup.file(&format!("objects/{index}"), b"x");
    }
    let daemon = setup
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .set("engine.direct_io", "off")
        .through(&["prlimit", "--nofile=200"])
        .start();
    let http = daemon.http_client();
    for index in 0..OBJECTS {
        let object = http.get(&format!("/v1/datasets/objects/objects/{index}")).await;
        assert_eq!(object.status, 200, "{object:?}");
    }
    let mut held = Vec::new();
    let mut more = 0..8;
    while !daemon.log().join("").contains("cannot accept") || more.next().is_some() {
        let mut narrow = Narrow::connect(daemon.http, 0).await;
        let asked = narrow.ask_get("/v1/datasets/blocks/blocks/3");
        let answered = tokio::time::timeout(PATIENCE, asked).await;
        held.push((answered.expect("a response"), narrow));
    }
    let evicted = [("reason", "evicted")];
    let closed = daemon.sum("ringfetch_connections_closed_total", &evicted).await;
    assert_eq!(closed, 0);
    drop(held);
    daemon.stop().await;
}

/// Whether the daemon has a thread of this name.
fn has_thread(daemon: &Daemon, name: &str) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid().as_raw_nonzero())).unwrap();
    let mut names = tasks
        .flatten()
        .map(|task| std::fs::read_to_string(task.path().join("comm")));
    names.any(|found| found.is_ok_and(|found| found.trim() == name))
}

#[tokio::test]
async fn no_core_writes_the_metrics() {
    // Scenario: a scrape; then eight whose clients leave at once, and eight more at once. Expectation: a thread that is no core
    // writes them, and all whose clients stay are answered.
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.start();
    // It ends when it has been idle for a while.
    eventually_async("a thread writes them", async || {
        daemon.scrape().await;
        has_thread(&daemon, "rf-metrics").then_some(())
    })
    .await;
    for _ in 0..8 {
        let mut leaves = std::net::TcpStream::connect(daemon.http).unwrap();
        let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n";
        std::io::Write::write_all(&mut leaves, request).unwrap();
    }
    let scrapes = futures_util::future::join_all((0..8).map(|_| daemon.scrape())).await;
    assert!(
        scrapes
            .iter()
            .all(|scrape| scrape.text.contains("process_open_fds"))
    );
    daemon.stop().await;
}

#[tokio::test]
async fn no_core_gathers_the_status() {
    // The status, over HTTP, and by the admin service of another daemon. Expectation: a thread that is no core gathers it.
    for by_admin in [false, true] {
        let (setup, _) = plain_blocks(Setup::new("pread"), 16);
        let daemon = setup.start();
        let mut admin = daemon.admin_client().await;
        let http = daemon.http_client();
        eventually_async("a thread gathers it", async || {
            if by_admin {
                let status = admin.get_status(v1::GetStatusRequest {}).await.unwrap();
                assert_eq!(status.into_inner().datasets.len(), 1);
            } else {
                assert_eq!(http.get("/v1/status").await.status, 200);
            }
            has_thread(&daemon, "rf-metrics").then_some(())
        })
        .await;
        daemon.stop().await;
    }
}
