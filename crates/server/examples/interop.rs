//! gRPC's interoperability service (`grpc.testing.TestService`) on the daemon's gRPC port: the port's listener, its router
//! with one service more, and its fast path. `.ci/suites` runs gRPC's own client against it. h2spec gets a port with
//! a page at `/`.
//!
//! `interop FILE` listens on two free loopback ports, writes them (gRPC's, h2spec's) to FILE and serves until it is killed.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test server: what fails should end it")]

use axum::Router;
use axum::body::Body;
use axum::extract::Request as HttpRequest;
use axum::response::Response as HttpResponse;
use axum::routing::{any, post};
use futures_util::{Stream, StreamExt as _, stream};
use http::StatusCode;
use http_body::Frame;
use http_body_util::BodyExt as _;
use prost::Message;
use ringfetch_engine::config::{BackendKind, EngineConfig};
use ringfetch_engine::engine::Engine;
use ringfetch_server::config::Limits;
use ringfetch_server::fetch::Fetcher;
use ringfetch_server::grpc;
use ringfetch_server::lifecycle::Lifecycle;
use ringfetch_server::listener::{ConnectionLimits, CorePool, Listener, Port, Role, bind};
use ringfetch_server::rpc_metrics::RpcMetrics;
use std::pin::Pin;
use std::time::Duration;
use tonic::server::Grpc;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::service_fn;

// The part of grpc/testing/messages.proto that the service needs.

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct Payload {
    #[prost(bytes = "vec", tag = "2")]
    body: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct EchoStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
}

#[derive(Clone, PartialEq, Message)]
struct SimpleRequest {
    #[prost(int32, tag = "2")]
    response_size: i32,
    #[prost(message, optional, tag = "7")]
    response_status: Option<EchoStatus>,
}

/// `SimpleResponse` and `StreamingOutputCallResponse`.
#[derive(Clone, PartialEq, Message)]
struct PayloadResponse {
    #[prost(message, optional, tag = "1")]
    payload: Option<Payload>,
}

#[derive(Clone, PartialEq, Message)]
struct StreamingInputCallRequest {
    #[prost(message, optional, tag = "1")]
    payload: Option<Payload>,
}

#[derive(Clone, PartialEq, Message)]
struct StreamingInputCallResponse {
    #[prost(int32, tag = "1")]
    aggregated_payload_size: i32,
}

#[derive(Clone, PartialEq, Message)]
struct ResponseParameters {
    #[prost(int32, tag = "1")]
    size: i32,
    #[prost(int32, tag = "2")]
    interval_us: i32,
}

#[derive(Clone, PartialEq, Message)]
struct StreamingOutputCallRequest {
    #[prost(message, repeated, tag = "2")]
    response_parameters: Vec<ResponseParameters>,
    #[prost(message, optional, tag = "7")]
    response_status: Option<EchoStatus>,
}

type Responses = Pin<Box<dyn Stream<Item = Result<PayloadResponse, Status>> + Send>>;

fn payload(size: i32) -> PayloadResponse {
    let body = vec![0; usize::try_from(size).unwrap_or(0)];
    PayloadResponse {
        payload: Some(Payload { body }),
    }
}

/// The failure that a request asks for.
fn echoed(status: Option<EchoStatus>) -> Result<(), Status> {
    match status {
        Some(EchoStatus { code, message }) if code != 0 => Err(Status::new(Code::from(code), message)),
        Some(_) | None => Ok(()),
    }
}

/// The responses that one request of a stream asks for, each after its pause; then its failure, if it asks for one.
fn answers(
    request: StreamingOutputCallRequest,
) -> impl Stream<Item = Result<PayloadResponse, Status>> + Send {
    let responses = stream::iter(request.response_parameters).then(|wanted| async move {
        let pause_us = u64::try_from(wanted.interval_us).unwrap_or(0);
        tokio::time::sleep(Duration::from_micros(pause_us)).await;
        Ok(payload(wanted.size))
    });
    responses.chain(stream::iter(echoed(request.response_status).err().map(Err)))
}

async fn empty(_: Request<Empty>) -> Result<Response<Empty>, Status> {
    Ok(Response::new(Empty {}))
}

async fn unary(request: Request<SimpleRequest>) -> Result<Response<PayloadResponse>, Status> {
    let request = request.into_inner();
    echoed(request.response_status)?;
    Ok(Response::new(payload(request.response_size)))
}

async fn output(request: Request<StreamingOutputCallRequest>) -> Result<Response<Responses>, Status> {
    Ok(Response::new(Box::pin(answers(request.into_inner()))))
}

async fn input(
    request: Request<Streaming<StreamingInputCallRequest>>,
) -> Result<Response<StreamingInputCallResponse>, Status> {
    let (mut requests, mut total) = (request.into_inner(), 0);
    while let Some(request) = requests.message().await? {
        total += request.payload.map_or(0, |payload| payload.body.len());
    }
    Ok(Response::new(StreamingInputCallResponse {
        aggregated_payload_size: i32::try_from(total).unwrap_or(i32::MAX),
    }))
}

async fn duplex(
    request: Request<Streaming<StreamingOutputCallRequest>>,
) -> Result<Response<Responses>, Status> {
    let requests = request.into_inner();
    let responses = requests.flat_map(|request| match request {
        Ok(request) => answers(request).left_stream(),
        Err(status) => stream::iter([Err(status)]).right_stream(),
    });
    Ok(Response::new(Box::pin(responses)))
}

/// Sends back the two headers of the case `custom_metadata`: one at the beginning, one in the trailers.
async fn echo_metadata(request: HttpRequest, next: axum::middleware::Next) -> HttpResponse {
    const INITIAL: &str = "x-grpc-test-echo-initial";
    const TRAILING: &str = "x-grpc-test-echo-trailing-bin";
    let [initial, trailing] = [INITIAL, TRAILING].map(|name| request.headers().get(name).cloned());
    let mut response = next.run(request).await;
    if let Some(value) = initial {
        response.headers_mut().insert(INITIAL, value);
    }
    let Some(value) = trailing else { return response };
    response.map(|body| {
        Body::new(body.map_frame(move |frame| match frame.into_trailers() {
            Ok(mut trailers) => {
                trailers.insert(TRAILING, value.clone());
                Frame::trailers(trailers)
            }
            Err(data) => data,
        }))
    })
}

/// Answers as h2spec assumes of a server: with data, after the whole request, and after what follows it on the connection.
async fn page(request: HttpRequest) -> (StatusCode, &'static str) {
    if request.into_body().collect().await.is_err() {
        return (StatusCode::BAD_REQUEST, "the body is cut short");
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    (StatusCode::OK, "a page with some data")
}

fn grpc_of<T, U>() -> Grpc<ProstCodec<T, U>>
where
    T: Message + 'static,
    U: Message + Default + 'static,
{
    Grpc::new(ProstCodec::default())
}

/// `grpc.testing.TestService`. What it has not is answered UNIMPLEMENTED by the router that it is merged into.
fn test_service() -> Router {
    let path = |method| format!("/grpc.testing.TestService/{method}");
    let body = |response: http::Response<tonic::body::Body>| response.map(Body::new);
    Router::new()
        .route(
            &path("EmptyCall"),
            post(async move |call: HttpRequest| body(grpc_of().unary(service_fn(empty), call).await)),
        )
        .route(
            &path("UnaryCall"),
            post(async move |call: HttpRequest| body(grpc_of().unary(service_fn(unary), call).await)),
        )
        .route(
            &path("StreamingOutputCall"),
            post(async move |call: HttpRequest| {
                body(grpc_of().server_streaming(service_fn(output), call).await)
            }),
        )
        .route(
            &path("StreamingInputCall"),
            post(async move |call: HttpRequest| {
                body(grpc_of().client_streaming(service_fn(input), call).await)
            }),
        )
        .route(
            &path("FullDuplexCall"),
            post(async move |call: HttpRequest| body(grpc_of().streaming(service_fn(duplex), call).await)),
        )
        .layer(axum::middleware::from_fn(echo_metadata))
}

fn main() {
    let file = std::env::args_os().nth(1).unwrap();
    let config = EngineConfig {
        backend: BackendKind::Pread,
        pin: false,
        ..EngineConfig::default()
    };
    // Starting blocks until the threads are there, so not on the runtime.
    let engine = Engine::start(&config).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        let limits = Limits::default();
        let fetcher = Fetcher::new(engine.clone(), Vec::new(), limits);
        let (lifecycle, registry) = (Lifecycle::new(), prometheus::Registry::new());
        lifecycle.start_serving();
        let rpc = RpcMetrics::new(&registry).unwrap();
        let cores = CorePool::new(&fetcher, &registry).unwrap();
        let connection_limits = ConnectionLimits::new(&limits, engine.config().connection_bytes);
        let open = |transport, router, fast_path, role| {
            let bound = bind(transport, "127.0.0.1:0".parse().unwrap()).unwrap();
            let address = bound.address();
            let port = Port {
                transport,
                bound,
                http2_only: true,
                router,
                fast_path,
                hosts: None,
                tls: None,
                access: None,
                role,
                recorder: None,
                rpc: rpc.clone(),
            };
            let listener = Listener::open_port(port, &cores, &connection_limits, &lifecycle).unwrap();
            (address.port(), listener)
        };
        let calls = grpc::service(fetcher.clone(), lifecycle.clone(), rpc.clone()).merge(test_service());
        let fast_path = grpc::fast_path(fetcher, lifecycle.clone(), rpc.clone());
        let (grpc, calls) = open("grpc", calls, Some(fast_path), Role::Data);
        // A gRPC port refuses GET, which h2spec sends.
        let pages = Router::new().route("/", any(page));
        let (http, pages) = open("http", pages, None, Role::DataAndProbes(|_| false));
        std::fs::write(file, format!("{grpc} {http}\n")).unwrap();
        tokio::join!(calls.serve(), pages.serve());
    });
}
