//! What FetchService does by itself, for the services that tonic generates: checks that a call has one
//! message, counts it, and ends it at its deadline. All with the same errors.
//!
//! The status is in the head of a trailers-only response, otherwise in the trailers. A response dropped
//! before its trailers was cancelled.

use super::deadline_body::trailers_of;
use super::frame::{FrameDecoder, FrameError, PREFIX_BYTES, too_large};
use super::metadata::check_encoding;
use super::reflection;
use super::service::{broken_off, deadline_of, malformed, no_message, several_messages};
use crate::caller::Connection;
use crate::error_status;
use crate::fetch::{Fetcher, timeout_at};
use crate::lifecycle::{self, Lifecycle};
use crate::rpc_metrics::{CallTimer, GrpcMethod, RpcMetrics, grpc_method_of, is_common_service};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::{BufMut as _, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use ringfetch_engine::error::ReadError;
use std::future::Future as _;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::time::Sleep;
use tonic::{Code, Status};

/// What every port has, in messages.
const COMMON_SERVICES: &str = "grpc.health.v1.Health and grpc.reflection.v1.ServerReflection";
/// Longest request message. The longest that is needed is a name of 4 KiB as a page's token. It may take as long to arrive as
/// the client likes, and what an open call is charged covers it (`listener::dispatch`, `ROUTED_CALL_UNITS`).
const MESSAGE_BYTES_MAX: u32 = 8 << 10;

/// What calls need besides their service.
#[derive(Debug, Clone)]
pub(super) struct CallState {
    pub(super) fetcher: Fetcher,
    pub(super) lifecycle: Lifecycle,
    pub(super) rpc: RpcMetrics,
    /// The port's services, besides health and reflection.
    pub(super) services: &'static [&'static str],
    /// The state that ends calls which wait for their client.
    pub(super) last: lifecycle::State,
}

/// Middleware for an axum router.
pub(super) async fn serve(State(state): State<CallState>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let CallState {
        fetcher,
        lifecycle,
        rpc,
        services,
        last,
    } = state;
    let method = grpc_method_of(request.uri().path(), services);
    let mut call = CallTimer::new(rpc, method, started);
    let mut refuse = |status: Status| {
        call.end(status.code());
        status.into_http()
    };
    // tonic's own answer has no message.
    if matches!(method, GrpcMethod::Other) {
        return refuse(no_such_method(request.uri().path(), services));
    }
    // tonic leaves the timeout to its own server, which is not used here.
    let headers = request.headers();
    let deadline = match check_encoding(headers).and_then(|()| deadline_of(headers, started)) {
        Ok(deadline) => deadline,
        Err(malformed) => return refuse(malformed),
    };
    let connection = Connection::of(request.extensions());
    // Most methods are ready at once, which is in time for `timeout_at`.
    let is_late = deadline.is_some_and(|deadline| deadline <= Instant::now());
    let answer = async {
        Ok(if matches!(method, GrpcMethod::ServerReflectionInfo) {
            reflection::respond(request, next, fetcher.clone(), lifecycle, last)
        } else {
            next.run(with_one_message(request).await?).await
        })
    };
    let answered = match is_late {
        true => None,
        false => timeout_at(deadline, pin!(answer)).await,
    };
    let response = match answered {
        Some(Ok(response)) => response,
        Some(Err(status)) => return refuse(status),
        None => {
            let late = fetcher.deadline_rejection(connection.as_ref());
            return refuse(error_status::to_status(&late, "message"));
        }
    };
    let (parts, body) = response.into_parts();
    match Status::from_header_map(&parts.headers) {
        None => Response::from_parts(parts, Body::new(CountedBody::new(body, call, deadline))),
        // As all of prost's errors begin.
        Some(status)
            if status.code() == Code::Internal
                && status.message().starts_with("failed to decode Protobuf") =>
        {
            refuse(malformed(&status.message()))
        }
        Some(status) => {
            call.end(status.code());
            Response::from_parts(parts, body)
        }
    }
}

pub(super) struct Messages {
    body: Body,
    decoder: FrameDecoder,
}

impl Messages {
    pub(super) fn new(body: Body) -> Self {
        Self {
            body,
            decoder: FrameDecoder::new(MESSAGE_BYTES_MAX),
        }
    }

    /// The next one.
    ///
    /// # Errors
    /// As of FetchService.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        let to_status = |error| match error {
            FrameError::TooLarge { max, .. } => {
                too_large(format!("the request is too long; the limit is {max} bytes"))
            }
            FrameError::Compressed | FrameError::BadFlag(_) | FrameError::CutShort => error.to_status(),
        };
        loop {
            if let Some(message) = self.decoder.next().map_err(to_status)? {
                return Ok(Some(message));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(piece) = frame.into_data() {
                        self.decoder.push(piece);
                    }
                }
                Some(Err(error)) => return Err(broken_off(&error)),
                None => return self.decoder.finish().map(|()| None).map_err(to_status),
            }
        }
    }
}

/// Replaces the body by its only message: tonic takes any number, and reports none as INTERNAL.
async fn with_one_message(request: Request) -> Result<Request, Status> {
    let (head, body) = request.into_parts();
    let mut messages = Messages::new(body);
    let message = messages.next().await?.ok_or_else(no_message)?;
    if messages.next().await?.is_some() {
        return Err(several_messages());
    }
    Ok(Request::from_parts(head, Body::from(framed(&message))))
}

/// A message as the body of a call.
pub(super) fn framed(message: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(PREFIX_BYTES + message.len());
    body.put_u8(0);
    // Messages here are short.
    body.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    body.put_slice(message);
    body.freeze()
}

/// The status of a call to a method that the port does not have.
fn no_such_method(path: &str, services: &[&str]) -> Status {
    let service = path.strip_prefix('/').and_then(|path| path.split_once('/'));
    let message = match service {
        Some((service, _)) if services.contains(&service) || is_common_service(service) => {
            format!("{service} has no such method")
        }
        _ => format!(
            "no such service; this port has {}, {COMMON_SERVICES}",
            services.join(", ")
        ),
    };
    Status::unimplemented(message)
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
                // Not counted as a refusal: a watch ends in no other way.
                let late = error_status::to_status(&ReadError::DeadlineExceeded.into(), "message");
                Some(Ok(Frame::trailers(trailers_of(&late))))
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
