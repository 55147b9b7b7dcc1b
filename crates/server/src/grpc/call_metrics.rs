//! Counts calls of the services that tonic generates, and gives their framing the errors of FetchService, which
//! has its own framing and counts its own calls.
//!
//! The status is in the head of a trailers-only response, otherwise in the trailers. A response dropped
//! before its trailers was cancelled.

use super::frame::too_large;
use super::service::malformed;
use super::{SMALL_REQUEST_BYTES_MAX, metadata};
use crate::rpc_metrics::{CallTimer, GrpcMethod, RpcMetrics};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;
use tonic::{Code, Status};

/// Middleware for an axum router.
pub(crate) async fn count(State(rpc): State<RpcMetrics>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let method = method_of(request.uri().path());
    let mut call = CallTimer::new(rpc, method, started);
    // tonic ignores a timeout that it cannot read.
    if let Err(malformed) = metadata::timeout(request.headers()) {
        call.end(malformed.code());
        return malformed.into_http();
    }
    let (parts, body) = next.run(request).await.into_parts();
    match Status::from_header_map(&parts.headers) {
        None => Response::from_parts(parts, Body::new(CountedBody { body, call })),
        Some(status) => {
            let translated = translate(&status);
            call.end(translated.as_ref().map_or(status.code(), Status::code));
            translated.map_or_else(|| Response::from_parts(parts, body), Status::into_http)
        }
    }
}

/// FetchService's error for one that tonic reports before a method runs; `None`: it is no such error.
fn translate(status: &Status) -> Option<Status> {
    // No method of these services has this status.
    if status.code() == Code::OutOfRange {
        let limit = format!("the request is too long; the limit is {SMALL_REQUEST_BYTES_MAX} bytes");
        return Some(too_large(limit));
    }
    // As all of prost's errors begin.
    let is_undecoded =
        status.code() == Code::Internal && status.message().starts_with("failed to decode Protobuf");
    is_undecoded.then(|| malformed(&status.message()))
}

fn method_of(path: &str) -> GrpcMethod {
    match path {
        "/ringfetch.v1.DatasetService/ListDatasets" => GrpcMethod::ListDatasets,
        "/ringfetch.v1.DatasetService/GetDataset" => GrpcMethod::GetDataset,
        "/ringfetch.v1.DatasetService/ListObjects" => GrpcMethod::ListObjects,
        "/ringfetch.v1.AdminService/GetStatus" => GrpcMethod::GetStatus,
        "/ringfetch.v1.AdminService/SetLogLevel" => GrpcMethod::SetLogLevel,
        "/ringfetch.v1.AdminService/SetBackend" => GrpcMethod::SetBackend,
        "/ringfetch.v1.AdminService/ClearBackend" => GrpcMethod::ClearBackend,
        "/ringfetch.v1.AdminService/Reload" => GrpcMethod::Reload,
        "/grpc.health.v1.Health/Check" => GrpcMethod::HealthCheck,
        "/grpc.health.v1.Health/Watch" => GrpcMethod::HealthWatch,
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        | "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo" => {
            GrpcMethod::ServerReflectionInfo
        }
        _ => GrpcMethod::Other,
    }
}

fn code_in(headers: &HeaderMap) -> Option<Code> {
    headers
        .get(Status::GRPC_STATUS)
        .map(|value| Code::from_bytes(value.as_bytes()))
}

struct CountedBody {
    body: Body,
    call: CallTimer,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let frame = std::task::ready!(Pin::new(&mut this.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(code) = frame.trailers_ref().and_then(code_in)
        {
            this.call.end(code);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
