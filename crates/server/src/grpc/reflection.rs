//! Server reflection, in both versions.
//!
//! tonic-reflection ends the whole call at a request that it cannot answer, and with OK at one that is malformed. The
//! protocol has an error response for the former, after which the call continues. So each request is passed on as a
//! call of its own. A drain ends a call that waits for its next request, since tools keep one open; on the admin port its end does.

use super::read_object::trailers_of;
use super::service::{decode, trailers_ok};
use super::tonic_calls::{Messages, framed};
use crate::error_status;
use crate::lifecycle::{Lifecycle, State};
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Uri};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use prost::Message as _;
use ringfetch_engine::error::ReadError;
use std::convert::Infallible;
use tonic::{Code, Status};
// Both versions have the same encoding.
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ErrorResponse, ServerReflectionRequest, ServerReflectionResponse};

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

struct Call {
    requests: Messages,
    uri: Uri,
    reflection: Next,
    lifecycle: Lifecycle,
    last: State,
}

/// Serves a call of the reflection service, which is `reflection`, until the daemon reaches `last`.
pub(super) fn respond(request: Request, reflection: Next, lifecycle: Lifecycle, last: State) -> Response {
    let (head, body) = request.into_parts();
    let call = Call {
        requests: Messages::new(body),
        uri: head.uri,
        reflection,
        lifecycle,
        last,
    };
    let frames = futures_util::stream::unfold(Some(call), |call| async {
        let mut call = call?;
        let (frame, call) = match call.next_response().await {
            Ok(Some(response)) => (Frame::data(response), Some(call)),
            Ok(None) => (Frame::trailers(trailers_ok()), None),
            Err(status) => (Frame::trailers(trailers_of(&status)), None),
        };
        Some((Ok::<_, Infallible>(frame), call))
    });
    let mut response = Response::new(Body::new(StreamBody::new(frames)));
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}

impl Call {
    /// The response to the next request, framed; `None` after the last one.
    ///
    /// # Errors
    /// Bytes that are no request, or the daemon has reached `last`. Both end the call.
    async fn next_response(&mut self) -> Result<Option<Bytes>, Status> {
        let message = tokio::select! {
            biased;
            message = self.requests.next() => message?,
            () = self.lifecycle.reached(self.last) => {
                return Err(error_status::to_status(&ReadError::Draining.into(), "message"));
            }
        };
        let Some(message) = message else {
            return Ok(None);
        };
        let request: ServerReflectionRequest = decode(&message)?;
        let mut single = Request::new(Body::from(framed(&message)));
        *single.method_mut() = http::Method::POST;
        *single.uri_mut() = self.uri.clone();
        single.headers_mut().insert(CONTENT_TYPE, GRPC);
        let (head, body) = self.reflection.clone().run(single).await.into_parts();
        let body = body.collect().await;
        let body = body.map_err(|error| Status::internal(error.to_string()))?;
        let ended = body.trailers().unwrap_or(&head.headers);
        let status = Status::from_header_map(ended).filter(|status| status.code() != Code::Ok);
        let Some(error) = status else {
            return Ok(Some(body.to_bytes()));
        };
        let response = ServerReflectionResponse {
            valid_host: request.host.clone(),
            original_request: Some(request),
            message_response: Some(MessageResponse::ErrorResponse(ErrorResponse {
                error_code: error.code() as i32,
                error_message: error.message().to_owned(),
            })),
        };
        Ok(Some(framed(&response.encode_to_vec())))
    }
}
