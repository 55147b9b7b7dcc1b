//! Everything besides the data: health, reflection, OpenAPI, probes, and the admin service.

use crate::daemon::{Setup, backends, eventually_async};
use crate::data::{everything, plain_blocks};
use crate::wire::{self, Narrow, channel};
use bytes::{Buf as _, BufMut as _, Bytes};
use ringfetch_proto::v1;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

const FETCH: &str = "ringfetch.v1.FetchService";
const DATASETS: &str = "ringfetch.v1.DatasetService";
const ADMIN: &str = "ringfetch.v1.AdminService";

async fn health(address: SocketAddr, service: &str) -> Result<ServingStatus, Code> {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = HealthClient::new(channel(address).await).check(request).await;
    answer
        .map(|answer| answer.into_inner().status())
        .map_err(|status| status.code())
}

#[tokio::test]
async fn each_service_has_its_health() {
    // Scenario: both gRPC ports are checked for the daemon as a whole, their own services, the other port's
    // and unknown names. Expectation: SERVING for what they serve, NOT_FOUND for the rest.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 1);
    let daemon = setup.start();
    for (address, own, others) in [
        (daemon.grpc, vec!["", FETCH, DATASETS], vec![ADMIN, "nonsense"]),
        (daemon.admin, vec!["", ADMIN], vec![FETCH, "nonsense"]),
    ] {
        for service in own {
            assert_eq!(
                health(address, service).await,
                Ok(ServingStatus::Serving),
                "{service}"
            );
        }
        for service in others {
            assert_eq!(health(address, service).await, Err(Code::NotFound), "{service}");
        }
    }
    daemon.stop().await;
}

#[tokio::test]
async fn every_service_refuses_what_is_no_request_in_the_same_way() {
    // Scenario: a method of each service gets a message that is none of its requests, one that is too long, and a
    // timeout that is none. Expectation: the same errors from all of them, whatever frames its messages.
    let setup = plain_blocks(Setup::new("mmap"), 1).0;
    let daemon = setup.set("limits.request_bytes", "64KiB").start();
    for (address, path) in [
        (daemon.grpc, "/ringfetch.v1.FetchService/FetchBlocks"),
        (daemon.grpc, "/ringfetch.v1.DatasetService/GetDataset"),
        (daemon.grpc, "/grpc.health.v1.Health/Check"),
        (daemon.admin, "/ringfetch.v1.AdminService/SetLogLevel"),
    ] {
        let refused = async |message: &[u8], grpc_timeout: Option<&'static str>| {
            let mut client = tonic::client::Grpc::new(channel(address).await);
            client.ready().await.unwrap();
            let mut request = tonic::Request::new(Bytes::copy_from_slice(message));
            if let Some(timeout) = grpc_timeout {
                request
                    .metadata_mut()
                    .insert("grpc-timeout", timeout.parse().unwrap());
            }
            let path = http::uri::PathAndQuery::from_static(path);
            client.unary(request, path, Unread).await.unwrap_err()
        };
        let status = refused(b"\x08\x05", None).await;
        assert_eq!(status.code(), Code::InvalidArgument, "{path}: {status:?}");
        let details = status.get_error_details();
        let violations = &details.bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "message", "{path}");
        let status = refused(&vec![0; 70_000], None).await;
        assert_eq!(status.code(), Code::ResourceExhausted, "{path}: {status:?}");
        assert!(
            status.message().contains("the limit is 65536"),
            "{path}: {status:?}"
        );
        let reason = &status.get_error_details().error_info().unwrap().reason.clone();
        assert_eq!(reason, "REQUEST_TOO_LARGE", "{path}");
        let status = refused(b"", Some("soon")).await;
        assert_eq!(status.code(), Code::InvalidArgument, "{path}: {status:?}");
        assert!(status.message().contains("grpc-timeout"), "{path}: {status:?}");
    }
    daemon.stop().await;
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

/// Sends bytes as a message, and decodes nothing.
#[derive(Debug, Default, Clone, Copy)]
struct Unread;

impl Codec for Unread {
    type Encode = Bytes;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }
    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Unread {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Unread {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        buffer.advance(buffer.remaining());
        Ok(Some(()))
    }
}

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
    // in JSON, and no path that the daemon does not serve.
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
        for method in operations.as_object().unwrap().keys() {
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
        for name in answer.headers.keys().filter(own) {
            let is_it = |described: &String| described.eq_ignore_ascii_case(name.as_str());
            assert!(described.keys().any(is_it), "{name} is not in {described:?}");
        }
    }
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let bytes = &operation["responses"]["200"]["content"]["application/octet-stream"];
            assert!(bytes["schema"].is_null(), "{method} {path}: {bytes}");
        }
    }
    daemon.stop().await;
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
