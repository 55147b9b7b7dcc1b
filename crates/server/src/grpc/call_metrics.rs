//! Counts calls of the services that tonic generates. FetchService counts its own.
//!
//! The status is in the head of a trailers-only response, otherwise in the trailers. A response dropped
//! before its trailers was cancelled.

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
    let (parts, body) = next.run(request).await.into_parts();
    let mut call = CallTimer::new(rpc, method, started);
    if let Some(code) = code_in(&parts.headers) {
        call.end(code);
        return Response::from_parts(parts, body);
    }
    Response::from_parts(parts, Body::new(CountedBody { body, call }))
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
