//! Spans, as an OpenTelemetry collector receives them.

use crate::daemon::{Daemon, Setup, any_backend, eventually_async};
use crate::data::plain_blocks;
use crate::wire::{self, Narrow};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use ringfetch_proto::v1::fetch_stream_request::Request;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use tokio::net::TcpSocket;

const TRACE: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
const PARENT: u64 = 0x00f0_67aa_0ba9_02b7;

/// The spans received so far.
#[derive(Debug, Clone, Default)]
struct Collector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        for resource in request.into_inner().resource_spans {
            let of_us = resource.resource.unwrap().attributes;
            assert!(of_us.iter().any(|pair| pair.key == "service.name"));
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.0.lock().unwrap().extend(spans);
        }
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A port of its own, at which nothing listens, and its address.
fn unheard() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

impl Collector {
    fn serve() -> (Self, SocketAddr) {
        let (socket, address) = unheard();
        (Self::serve_on(socket), address)
    }

    fn serve_on(socket: TcpSocket) -> Self {
        let collector = Self::default();
        let listener = socket.listen(16).unwrap();
        let service = TraceServiceServer::new(collector.clone());
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(incoming));
        collector
    }

    /// Waits for `count` spans; returns them by name.
    async fn spans(&self, count: usize) -> Vec<Span> {
        let mut spans = eventually_async(&format!("{count} spans"), async || {
            let spans = self.0.lock().unwrap().clone();
            (spans.len() >= count).then_some(spans)
        })
        .await;
        spans.sort_by(|a, b| a.name.cmp(&b.name));
        spans
    }
}

fn traceparent(is_sampled: bool) -> String {
    format!("00-{TRACE:032x}-{PARENT:016x}-0{}", u8::from(is_sampled))
}

fn attribute<'a>(span: &'a Span, key: &str) -> Option<&'a Value> {
    let found = span.attributes.iter().find(|pair| pair.key == key);
    found.and_then(|pair| pair.value.as_ref()?.value.as_ref())
}

async fn made(daemon: &Daemon, result: &str) -> u64 {
    let labels = [("result", result)];
    daemon.sum("ringfetch_trace_spans_total", &labels).await
}

#[tokio::test]
async fn traced_requests_leave_spans_with_the_collector() {
    // Scenario: requests in a sampled trace (a call, a resource that does not exist, a stream of one
    // request), in one that is not sampled, and without a trace. Expectation: spans of the first, below their
    // client's span, that of the stream's request below the stream's; none of the others.
    let (collector, address) = Collector::serve();
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup
        .set("tracing.otlp_endpoint", &format!("http://{address}"))
        .start();
    let (http, trace) = (daemon.http_client(), traceparent(true));
    let mut narrow = Narrow::connect(daemon.grpc, 1 << 20).await;
    let sampled = [("traceparent", trace.as_str())];
    let call = narrow
        .call("FetchBlocks", &sampled, &wire::blocks("blocks", &[1, 2]))
        .await;
    call.rest().await;
    http.get_with("/v1/datasets/blocks/blocks/99", &sampled).await;
    let message = wire::on_stream(5, Request::Ranges(wire::ranges("blocks", &[(1, 2)])));
    narrow.call("FetchStream", &sampled, &message).await.rest().await;
    http.get_with("/livez", &[("traceparent", &traceparent(false))])
        .await;
    http.get("/livez").await;

    let spans = collector.spans(4).await;
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "grpc FetchBlocks",
            "grpc FetchRanges",
            "grpc FetchStream",
            "http GetBlock"
        ]
    );
    let [call, part, stream, missing] = &spans[..] else {
        panic!("{names:?}");
    };
    for span in &spans {
        assert_eq!(span.trace_id, TRACE.to_be_bytes());
        let parent = if span == part {
            stream.span_id.clone()
        } else {
            PARENT.to_be_bytes().to_vec()
        };
        assert_eq!(span.parent_span_id, parent, "{}", span.name);
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
    }
    assert_eq!(attribute(call, "ringfetch.items"), Some(&Value::IntValue(2)));
    assert_eq!(attribute(call, "ringfetch.bytes"), Some(&Value::IntValue(8192)));
    let dataset = Value::StringValue("blocks".to_owned());
    assert_eq!(attribute(missing, "ringfetch.dataset"), Some(&dataset));
    let code = |span: &Span| span.status.clone().unwrap_or_default().code;
    assert_eq!(
        (code(call), code(missing)),
        (StatusCode::Unset as i32, StatusCode::Error as i32)
    );
    eventually_async("they count as sent", async || {
        (made(&daemon, "sent").await >= 4).then_some(())
    })
    .await;
    assert!(made(&daemon, "made").await <= 4);
    daemon.stop().await;
}

#[tokio::test]
async fn a_span_says_what_failed() {
    // Scenario: a batch one of whose items is past the end, and a batch of a dataset that does not exist.
    // Expectation: both spans have the status of an error; the first one's is not described by the code OK.
    let (collector, address) = Collector::serve();
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup
        .set("tracing.otlp_endpoint", &format!("http://{address}"))
        .set("tracing.sample", "1")
        .start();
    let mut narrow = Narrow::connect(daemon.grpc, 1 << 20).await;
    for dataset in ["blocks", "nothing"] {
        let message = wire::blocks(dataset, &[1, 99]);
        narrow.call("FetchBlocks", &[], &message).await.rest().await;
    }
    let mut found: Vec<(i32, String)> = collector
        .spans(2)
        .await
        .into_iter()
        .filter_map(|span| span.status)
        .map(|status| (status.code, status.message))
        .collect();
    found.sort();
    let error = |message: &str| (StatusCode::Error as i32, message.to_owned());
    assert_eq!(found, [error("NOT_FOUND"), error("an item failed")]);
    daemon.stop().await;
}

#[tokio::test]
async fn what_is_in_the_queue_is_sent_at_the_end() {
    // Scenario: with `sample: 1` a request without a trace, and the daemon stops. Expectation: its span, the
    // root of a trace.
    let (collector, address) = Collector::serve();
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let setup = setup.set("tracing.otlp_endpoint", &format!("http://{address}"));
    let daemon = setup.set("tracing.sample", "1").start();
    daemon.http_client().get("/v1/datasets/blocks/blocks/1").await;
    daemon.stop().await;
    let [root] = &collector.spans(1).await[..] else {
        panic!("more than one");
    };
    assert!(root.parent_span_id.is_empty() && root.trace_id.iter().any(|byte| *byte != 0));
}

#[tokio::test]
async fn a_collector_that_is_gone_costs_no_request() {
    // Scenario: nothing listens at the endpoint, then a collector does. Expectation: requests are answered, spans count as
    // failed, then as sent; the log reports when it fails and when it works again, each once; the daemon exits cleanly.
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let (gone, address) = unheard();
    let endpoint = format!("http://{address}");
    let daemon = setup
        .set("tracing.otlp_endpoint", &endpoint)
        .set("tracing.sample", "1")
        .start();
    for _ in 0..10 {
        daemon.assert_serves("blocks").await;
    }
    eventually_async("spans are lost", async || {
        (made(&daemon, "failed").await > 0).then_some(())
    })
    .await;
    let fails = "spans cannot be sent to the collector and are lost";
    daemon.logged(&[fails]);
    let _collector = Collector::serve_on(gone);
    eventually_async("spans are sent", async || {
        daemon.assert_serves("blocks").await;
        (made(&daemon, "sent").await > 0).then_some(())
    })
    .await;
    let works = "spans can be sent to the collector again";
    daemon.logged(&[works]);
    let log = daemon.log();
    let times = |text| log.iter().filter(|line| line.contains(text)).count();
    assert_eq!((times(fails), times(works)), (1, 1));
    daemon.stop().await;
}

#[tokio::test]
async fn a_collector_that_accepts_no_connection_is_a_failure() {
    // Scenario: the collector's host takes no connection: its queue of new ones is full, so that SYNs are dropped.
    // Expectation: spans count as failed, long before the kernel gives up the connection (two minutes).
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    let _first = std::net::TcpStream::connect(address).unwrap();
    let (setup, _) = plain_blocks(Setup::new(any_backend()), 16);
    let daemon = setup
        .set("tracing.otlp_endpoint", &format!("http://{address}"))
        .set("tracing.sample", "1")
        .start();
    daemon.assert_serves("blocks").await;
    eventually_async("spans are lost", async || {
        (made(&daemon, "failed").await > 0).then_some(())
    })
    .await;
    daemon.stop().await;
}
