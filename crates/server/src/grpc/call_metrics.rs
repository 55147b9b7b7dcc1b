//! Counts calls of the services that tonic generates, ends them at their deadline, and gives their framing the
//! errors of FetchService, which does all this by itself.
//!
//! The status is in the head of a trailers-only response, otherwise in the trailers. A response dropped
//! before its trailers was cancelled.

use super::frame::too_large;
use super::read_object::trailers_of;
use super::service::{deadline_of, malformed};
use super::{SMALL_REQUEST_BYTES_MAX, connection_of};
use crate::error_status;
use crate::fetch::{Fetcher, timeout_at};
use crate::rpc_metrics::{CallTimer, GrpcMethod, RpcMetrics};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use std::future::Future as _;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::time::Sleep;
use tonic::{Code, Status};

/// What calls need besides their service.
#[derive(Debug, Clone)]
pub(super) struct CallState {
    pub(super) fetcher: Fetcher,
    pub(super) rpc: RpcMetrics,
}

/// Middleware for an axum router.
pub(super) async fn serve(State(state): State<CallState>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let CallState { fetcher, rpc } = state;
    let mut call = CallTimer::new(rpc, method_of(request.uri().path()), started);
    let mut refuse = |status: Status| {
        call.end(status.code());
        status.into_http()
    };
    // tonic leaves the timeout to its own server, which is not used here.
    let deadline = match deadline_of(request.headers(), started) {
        Ok(deadline) => deadline,
        Err(malformed) => return refuse(malformed),
    };
    let connection = connection_of(request.extensions());
    // Most methods are ready at once, which is in time for `timeout_at`.
    let is_late = deadline.is_some_and(|deadline| deadline <= Instant::now());
    let answered = match is_late {
        true => None,
        false => timeout_at(deadline, pin!(next.run(request))).await,
    };
    let Some(response) = answered else {
        let late = fetcher.deadline_rejection(connection.as_ref());
        return refuse(error_status::to_status(&late, "message"));
    };
    let (parts, body) = response.into_parts();
    match Status::from_header_map(&parts.headers) {
        None => Response::from_parts(parts, Body::new(CountedBody::new(body, call, deadline))),
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

/// The body of a call that was not refused.
struct CountedBody {
    body: Body,
    call: CallTimer,
    /// When a stream ends that waits for something.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl CountedBody {
    fn new(body: Body, call: CallTimer, deadline: Option<Instant>) -> Self {
        Self {
            body,
            call,
            deadline: deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline.into()))),
        }
    }
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let frame = match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                let Some(deadline) = &mut this.deadline else {
                    return Poll::Pending;
                };
                ready!(deadline.as_mut().poll(cx));
                this.body = Body::empty();
                Some(Ok(Frame::trailers(trailers_of(&Status::deadline_exceeded(
                    "the deadline of the call passed",
                )))))
            }
        };
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
