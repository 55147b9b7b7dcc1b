//! Everything besides the data: health, probes, and the admin service; and what is no call.

use crate::daemon::{Setup, backends, eventually_async};
use crate::data::plain_blocks;
use crate::wire::{self, ADMIN, DATASETS, FETCH, Narrow, channel};
use bytes::Bytes;
use prost::Message as _;
use ringfetch_proto::v1::{self, fetch_stream_request::Request};
use serde_json::Value;
use std::net::SocketAddr;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

/// A service's health, as a check and a watch report it.
async fn health(address: SocketAddr, service: &str) -> (Result<ServingStatus, Code>, ServingStatus) {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let mut client = HealthClient::new(channel(address).await);
    let mut watch = client.watch(request.clone()).await.unwrap().into_inner();
    let first = watch.message().await.unwrap().unwrap();
    let checked = client.check(request).await;
    let checked = checked.map(|answer| answer.into_inner().status());
    (checked.map_err(|status| status.code()), first.status())
}

#[tokio::test]
async fn each_service_has_its_health() {
    // Scenario: both gRPC ports are checked for the daemon as a whole, their own services, the other port's
    // and unknown names, and watched. Expectation: SERVING for what they serve; NOT_FOUND, or SERVICE_UNKNOWN, for the rest.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 1);
    let daemon = setup.start();
    for (address, own, others) in [
        (daemon.grpc, vec!["", FETCH, DATASETS], vec![ADMIN, "nonsense"]),
        (daemon.admin, vec!["", ADMIN], vec![FETCH, "nonsense"]),
    ] {
        let serving = (Ok(ServingStatus::Serving), ServingStatus::Serving);
        for service in own {
            assert_eq!(health(address, service).await, serving, "{service}");
        }
        let unknown = (Err(Code::NotFound), ServingStatus::ServiceUnknown);
        for service in others {
            assert_eq!(health(address, service).await, unknown, "{service}");
        }
    }
    daemon.stop().await;
}

/// Calls a path with bytes that no client library would send. Expects a gRPC response without a message.
async fn raw(address: SocketAddr, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Status {
    let common = [("content-type", "application/grpc"), ("te", "trailers")];
    let mut client = Narrow::connect(address, 65_535).await;
    let held = client
        .ask(path, &[&common[..], headers].concat(), body.into())
        .await;
    assert_eq!(held.head.status, 200, "{path}");
    assert_eq!(held.head.headers["content-type"], "application/grpc", "{path}");
    let (body, status) = held.rest().await;
    assert!(body.is_empty(), "{path}");
    status.expect("a status")
}

#[tokio::test]
async fn fields_that_are_set_a_million_times_are_refused() {
    // Scenario: requests that set a field again and again, of which protobuf keeps the last: the dataset or the name of a call, and
    // the id of a message of a stream. Expectation: twenty times is as good as once; of a million, which takes a core for 25 ms to
    // decode, the message is refused, with the reason.
    let daemon = plain_blocks(Setup::new("mmap"), 1).0.start();
    let blocks = wire::blocks("blocks", &[0]);
    let on_stream = wire::on_stream(7, Request::Blocks(blocks.clone())).encode_to_vec();
    let object = v1::ReadObjectRequest {
        dataset: "none".to_owned(),
        name: "none".to_owned(),
        ..Default::default()
    };
    let none: &[u8] = &[];
    // The last in a group of the unknown field 123.
    for (method, field, [begin, end], message, code_else) in [
        (
            "FetchBlocks",
            [0x0a, 0],
            [none; 2],
            blocks.encode_to_vec(),
            Code::Ok,
        ),
        (
            "ReadObject",
            [0x12, 0],
            [none; 2],
            object.encode_to_vec(),
            Code::NotFound,
        ),
        ("FetchStream", [0x08, 0], [none; 2], on_stream, Code::Ok),
        (
            "FetchBlocks",
            [0x08, 0],
            [&[0xdb, 7], &[0xdc, 7]],
            blocks.encode_to_vec(),
            Code::Ok,
        ),
    ] {
        for (times, code) in [(20, code_else), (1_000_000, Code::InvalidArgument)] {
            let sent = wire::framed(&[begin, &field.repeat(times), end, &message].concat());
            let path = format!("/ringfetch.v1.FetchService/{method}");
            let common = [("content-type", "application/grpc"), ("te", "trailers")];
            let mut client = Narrow::connect(daemon.grpc, 65_535).await;
            let (body, status) = client.ask(&path, &common, sent).await.rest().await;
            let status = status.expect("a status");
            assert_eq!(status.code(), code, "{method}: {status:?}");
            assert_eq!(!body.is_empty(), code == Code::Ok, "{method}: {status:?}");
            let is_refused = status.message().contains("message: ") && status.message().contains(" fields: ");
            assert_eq!(is_refused, code == Code::InvalidArgument, "{method}: {status:?}");
        }
    }
    daemon.gives_memory_back().await;
    daemon.stop().await;
}

#[tokio::test]
async fn bytes_that_are_no_call_get_a_status() {
    // Scenario: what a broken or hostile client sends to services of both kinds of framing. Expectation: the same status
    // from all of them, with the field or the limit.
    let setup = plain_blocks(Setup::new("mmap"), 1).0;
    let daemon = setup.set("limits.request_bytes", "8KiB").start();
    let blocks = wire::blocks("blocks", &[0]).encode_to_vec();
    for (address, path, message) in [
        (daemon.grpc, "/ringfetch.v1.FetchService/FetchBlocks", &blocks[..]),
        (daemon.grpc, "/ringfetch.v1.DatasetService/ListDatasets", b""),
        (daemon.grpc, "/grpc.health.v1.Health/Watch", b""),
        (daemon.admin, "/ringfetch.v1.AdminService/SetLogLevel", b""),
    ] {
        let good = wire::framed(message).to_vec();
        let compressed = [&[1], &good[1..]].concat();
        let claims_4_gib = [&[0, 255, 255, 255, 255], &good[5..]].concat();
        for (headers, body, code, part) in [
            (&[][..], Vec::new(), Code::Unimplemented, ""),
            (&[], [&good[..], &good].concat(), Code::Unimplemented, ""),
            (&[], good[..4].to_vec(), Code::Internal, ""),
            (&[], wire::framed(&[0; 9])[..13].to_vec(), Code::Internal, ""),
            (&[], wire::framed(&[0xff; 9]).to_vec(), Code::InvalidArgument, ""),
            (&[], compressed, Code::Internal, ""),
            (&[], claims_4_gib, Code::ResourceExhausted, "the limit is 8192"),
            (
                &[],
                wire::framed(&[0; 8193]).to_vec(),
                Code::ResourceExhausted,
                "the limit is 8192",
            ),
            (
                &[("grpc-encoding", "gzip")],
                good.clone(),
                Code::Unimplemented,
                "",
            ),
            (
                &[("grpc-timeout", "never")],
                good.clone(),
                Code::InvalidArgument,
                "grpc-timeout",
            ),
        ] {
            let status = raw(address, path, headers, body).await;
            assert_eq!(status.code(), code, "{path}: {status:?}");
            let message = status.message();
            assert!(!message.is_empty() && message.contains(part), "{path}: {message}");
            let details = status.get_error_details();
            if code == Code::ResourceExhausted {
                assert_eq!(
                    details.error_info().unwrap().reason,
                    "REQUEST_TOO_LARGE",
                    "{path}"
                );
            }
            if code == Code::InvalidArgument && headers.is_empty() {
                let violations = &details.bad_request().unwrap().field_violations;
                assert_eq!(violations[0].field, "message", "{path}");
            }
        }
    }
    for version in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        for (body, code) in [
            (wire::framed(&[0xff; 9]), Code::InvalidArgument),
            (wire::framed(&[]).slice(..4), Code::Internal),
            (Bytes::from_static(&[1, 0, 0, 0, 0]), Code::Internal),
            (wire::framed(&[0; 65_537]), Code::ResourceExhausted),
            (Bytes::new(), Code::Ok),
        ] {
            let status = raw(daemon.grpc, &path, &[], body).await;
            assert_eq!(status.code(), code, "{version}: {status:?}");
        }
    }
    daemon.stop().await;
}

#[tokio::test]
async fn what_is_not_served_is_unimplemented() {
    // Scenario: unknown methods, unknown services, and the admin service on the public port. Expectation: a message that
    // says what there is.
    let daemon = plain_blocks(Setup::new("mmap"), 1).0.start();
    let no_method = "ringfetch.v1.FetchService has no such method";
    let no_service = "this port has ringfetch.v1.FetchService, ringfetch.v1.DatasetService, grpc.health";
    for (path, message) in [
        ("/ringfetch.v1.FetchService/FetchEverything", no_method),
        ("/ringfetch.v1.FetchService/", no_method),
        ("/ringfetch.v1.FetchService/FetchBlocks/", no_method),
        ("/ringfetch.v1.FetchService/FetchBlocks/more", no_method),
        (
            "/ringfetch.v1.DatasetService/Nonsense",
            "ringfetch.v1.DatasetService has no such method",
        ),
        ("/ringfetch.v1.fetchservice/FetchBlocks", no_service),
        ("/ringfetch.v1.ScoreService/ScoreVectors", no_service),
        ("/ringfetch.v1.AdminService/GetStatus", no_service),
        ("/", no_service),
    ] {
        let status = raw(daemon.grpc, path, &[], wire::framed(&[])).await;
        assert_eq!(status.code(), Code::Unimplemented, "{path}");
        assert!(status.message().contains(message), "{path}: {}", status.message());
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_call_on_the_http_port_learns_which_port_has_grpc() {
    // Scenario: calls on the HTTP port, without a credential where principals are needed, under a foreign name, and at the path
    // of a resource; the same request as JSON; a GET on the gRPC port. Expectation: a status whose message names the key of the
    // other port, since clients show only the number of an HTTP response, counted as refused; problems for what is no call.
    let fetch = "/ringfetch.v1.FetchService/FetchBlocks";
    let key = crate::access::lines(&[("a", "first", "*")]);
    for is_open in [true, false] {
        let (mut setup, _) = plain_blocks(Setup::new("mmap"), 1);
        if !is_open {
            setup.file("principals", key.as_bytes());
            setup = setup.set("access.principals", "principals");
        }
        let daemon = setup.start();
        for (path, headers) in [
            (fetch, &[][..]),
            (fetch, &[("host", "evil.example")]),
            ("/grpc.health.v1.Health/Check", &[]),
            ("/v1/datasets/blocks/blocks:batchFetch", &[]),
        ] {
            let status = raw(daemon.http, path, headers, wire::framed(&[])).await;
            assert_eq!(status.code(), Code::Unimplemented, "{path}");
            assert!(
                status.message().contains("grpc.listen"),
                "{path}: {}",
                status.message()
            );
        }
        let mut client = Narrow::connect(daemon.http, 65_535).await;
        let json = [("content-type", "application/json")];
        let no_call = client.ask(fetch, &json, Bytes::new()).await.head;
        assert_eq!(no_call.status, if is_open { 404 } else { 401 });
        assert_eq!(no_call.headers["content-type"], "application/problem+json");
        let mut client = Narrow::connect(daemon.grpc, 65_535).await;
        let (problem, _) = client.ask_get("/v1/datasets").await.rest().await;
        let problem = String::from_utf8(problem.to_vec()).unwrap();
        assert!(problem.contains("http.listen"), "{problem}");
        if is_open {
            let labels = [("transport", "http"), ("reason", "content_type")];
            assert_eq!(daemon.sum("ringfetch_requests_refused_total", &labels).await, 4);
        }
        daemon.stop().await;
    }
}

#[tokio::test]
async fn what_is_no_call_is_refused_and_counted() {
    // Scenario: a GET and POSTs of other media types, for methods of FetchService and of services that tonic serves and
    // for none, on both gRPC ports. Expectation: 405 or 415 with what is accepted, counted as refused for `content_type`;
    // a content type in other letters is a call.
    let daemon = plain_blocks(Setup::new("mmap"), 1).0.start();
    for (transport, address, path) in [
        ("grpc", daemon.grpc, "/ringfetch.v1.FetchService/FetchBlocks"),
        ("grpc", daemon.grpc, "/ringfetch.v1.DatasetService/ListDatasets"),
        ("grpc", daemon.grpc, "/"),
        ("admin", daemon.admin, "/ringfetch.v1.AdminService/GetStatus"),
    ] {
        let labels = [("transport", transport), ("reason", "content_type")];
        let counted = async || daemon.sum("ringfetch_requests_refused_total", &labels).await;
        let before = counted().await;
        let mut client = Narrow::connect(address, 65_535).await;
        let got = client.ask_get(path).await.head;
        assert_eq!(
            (got.status.as_u16(), &got.headers["allow"]),
            (405, &"POST".parse().unwrap()),
            "{path}"
        );
        for media_type in [
            "application/json",
            "application/grpc+json",
            "application/grpc-web",
        ] {
            let refused = client
                .ask(path, &[("content-type", media_type)], Bytes::new())
                .await
                .head;
            assert_eq!(refused.status, 415, "{path} {media_type}");
            assert_eq!(
                refused.headers["accept-post"], "application/grpc",
                "{path} {media_type}"
            );
        }
        assert_eq!(counted().await - before, 4, "{path}");
        let call = client
            .ask(path, &[("content-type", "Application/gRPC+proto")], Bytes::new())
            .await
            .head;
        assert_eq!(call.headers["content-type"], "application/grpc", "{path}");
        assert_eq!(counted().await - before, 4, "{path}");
    }
    daemon.stop().await;
}

/// The figures of the page after 90 reads of blocks of 4 KiB, 30 of them past the end.
fn figures_are_of(figures: &Value) {
    let number = |value: &Value| {
        value
            .as_u64()
            .unwrap_or_else(|| panic!("no whole number: {value}"))
    };
    assert_eq!(figures["state"], "serving");
    for of in [&figures["totals"], &figures["datasets"][0]] {
        let counted =
            ["reads_total", "read_errors_total", "read_bytes_total"].map(|member| number(&of[member]));
        assert_eq!(counted, [90, 30, 60 * 4096], "{of}");
    }
    let duration = &figures["read_duration"];
    let buckets = duration["buckets"].as_array().unwrap();
    let counts: Vec<u64> = buckets.iter().map(|bucket| number(&bucket["count"])).collect();
    assert!(counts.is_sorted(), "{buckets:?}");
    assert_eq!(counts.last(), Some(&number(&duration["count"])));
    let bounds: Vec<f64> = buckets
        .iter()
        .filter_map(|bucket| bucket["le_us"].as_f64())
        .collect();
    assert!(
        bounds.is_sorted() && bounds.len() == buckets.len() - 1,
        "{buckets:?}"
    );
    for shard in figures["shards"].as_array().unwrap() {
        let depth = &shard["depth_seen"];
        assert!(number(&shard["queue_depth"]) > 0, "{shard}");
        assert_eq!(number(&shard["stalled"]), 0, "{shard}");
        assert!(depth["sum"].as_f64() >= depth["count"].as_f64(), "{shard}");
    }
}

#[tokio::test]
async fn the_status_is_plausible_after_a_load() {
    // Scenario: a few hundred reads with some errors, on each backend. Expectation: the values of the
    // configuration, exact totals, rates above zero, percentiles in order, shards that are idle again.
    for &backend in backends() {
        let (setup, _) = plain_blocks(Setup::new(backend), 256);
        let daemon = setup.start();
        let mut fetch = daemon.fetch().await;
        for round in 0..30 {
            fetch
                .fetch_blocks(wire::blocks("blocks", &[round, round * 7 % 256, 9999]))
                .await
                .unwrap();
        }
        // A shard reports what it has in flight at the end of its turn, after it has answered.
        let status = eventually_async("the shards are idle again", async || {
            let status = daemon.status().await;
            let mut shards = status.shards.iter();
            let idle = shards.all(|shard| shard.in_flight == 0 && shard.queued == 0);
            (idle && status.memory_in_use_bytes == 0).then_some(status)
        })
        .await;
        assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
        assert_eq!(
            (status.state.as_str(), status.fallback, status.cores),
            ("serving", false, 2)
        );
        assert_eq!(
            status.backend().as_str_name(),
            format!("BACKEND_{}", backend.to_uppercase())
        );
        assert_eq!(status.memory_budget_bytes, 32 << 20);
        assert_eq!((status.reads_total, status.read_errors_total), (90, 30));
        assert!(status.uptime_ms > 0 && status.uptime_ms < 600_000);
        assert!(
            status.reads_per_second > 0.0 && status.read_bytes_per_second > 4096.0,
            "{status:?}"
        );
        assert!(status.rates_window_ms > 0);
        let (p50, p99, p999) = (
            status.latency_p50_us,
            status.latency_p99_us,
            status.latency_p999_us,
        );
        assert!(
            p50 >= 1.0 && p50 <= p99 && p99 <= p999 && p999 < 1e7,
            "{p50} {p99} {p999}"
        );
        assert!(!status.shards.is_empty());
        assert!(status.shards.iter().all(|shard| shard.queue_depth > 0));
        assert!(
            status
                .shards
                .iter()
                .map(|shard| shard.device_reads_total)
                .sum::<u64>()
                > 30
        );
        assert_eq!(status.datasets.len(), 1);
        figures_are_of(&daemon.http_client().get("/v1/status").await.json());
        daemon.stop().await;
    }
}

#[tokio::test]
#[ignore = "needs io_uring"]
async fn the_status_has_the_limit_of_reads_in_flight_that_is_in_force() {
    // Scenario: two callers read from one ring, so that half of its depth is the limit. Expectation: the metric and
    // the status have that limit.
    let (setup, _) = plain_blocks(Setup::new("uring"), 64);
    let setup = setup.set("engine.cores", "1");
    let daemon = setup.set("engine.uring.queue_depth", "16").start();
    let block = wire::ranges("blocks", &[(0, 4096)]);
    for from in ["127.0.0.1", "127.0.0.2"] {
        let mut caller = Narrow::connect_from(from, daemon.grpc, 65_535).await;
        let (_, status) = caller.call("FetchRanges", &[], &block).await.rest().await;
        assert!(status.is_some_and(|status| status.code() == Code::Ok), "{from}");
    }
    let metric = daemon.sum("ringfetch_queue_depth_limit", &[]).await;
    let [shard] = &daemon.status().await.shards[..] else {
        panic!("one core has one shard");
    };
    assert_eq!((metric, shard.queue_depth), (8, 8));
    daemon.stop().await;
}

#[tokio::test]
async fn the_log_level_changes_while_it_runs() {
    // Scenario: the filter is set to debug and back; then to an invalid one. Expectation: debug lines appear
    // only in between; the response has the previous filter; the invalid one is INVALID_ARGUMENT that names
    // the field, and changes nothing.
    let (setup, _) = plain_blocks(Setup::new("pread"), 4);
    let daemon = setup.start();
    let mut admin = daemon.admin_client().await;
    let mut set = async |filter: &str| {
        let request = v1::SetLogLevelRequest {
            filter: filter.to_owned(),
        };
        admin
            .set_log_level(request)
            .await
            .map(|answer| answer.into_inner().previous)
    };
    // A connection that ends with an error is logged at level debug.
    let break_off = async || {
        use tokio::io::AsyncWriteExt as _;
        let mut stream = tokio::net::TcpStream::connect(daemon.http).await.unwrap();
        stream.write_all(b"GARBAGE\r\n\r\n").await.unwrap();
        let mut end = Vec::new();
        let _reset = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut end).await;
    };
    break_off().await;
    // Its line comes after its client has seen the end.
    eventually_async("only the connection of the scrape is open", async || {
        let open = daemon.sum("ringfetch_connections", &[("transport", "http")]);
        (open.await == 1).then_some(())
    })
    .await;
    assert_eq!(set("debug").await.unwrap(), "info");
    assert!(
        !daemon
            .log()
            .iter()
            .any(|line| line.contains("\"DEBUG\"") && line.contains("ended with an error"))
    );
    eventually_async("a line at level debug", async || {
        break_off().await;
        daemon
            .log()
            .iter()
            .any(|line| line.contains("\"DEBUG\"") && line.contains("ended with an error"))
            .then_some(())
    })
    .await;
    assert_eq!(set("warn,ringfetch_server=info").await.unwrap(), "debug");
    for (filter, part) in [
        ("", "empty"),
        ("   ", "empty"),
        ("ringfetch=loud", "loud"),
        (&"x".repeat(5000), "4096"),
    ] {
        let status = set(filter).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(
            status.message().starts_with("filter: ") && status.message().contains(part),
            "{status:?}"
        );
        assert_eq!(
            status.get_details_bad_request().unwrap().field_violations[0].field,
            "filter"
        );
    }
    assert_eq!(set("info").await.unwrap(), "warn,ringfetch_server=info");
    let refused = [("method", "SetLogLevel"), ("code", "INVALID_ARGUMENT")];
    assert_eq!(daemon.sum("ringfetch_rpc_requests_total", &refused).await, 4);
    daemon.stop().await;
}
