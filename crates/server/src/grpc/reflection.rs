//! Server reflection, in both versions.
//!
//! tonic-reflection ends the whole call at a request that it cannot answer, and with OK at one that is malformed. The
//! protocol has an error response for the former, after which the call continues. So each request is passed on as a
//! call of its own. A drain ends a call that waits for its next request, since tools keep one open; on the admin port its end does.

use super::deadline_body::trailers_of;
use super::service::{decode, trailers_ok};
use super::tonic_calls::{Messages, framed};
use crate::caller::Connection;
use crate::error_status;
use crate::fetch::Fetcher;
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
use std::sync::Arc;
use tokio::sync::oneshot;
use tonic::{Code, Status};
// Both versions have the same encoding.
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ErrorResponse, ServerReflectionRequest, ServerReflectionResponse};

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

struct Call {
    requests: Messages,
    uri: Uri,
    reflection: Next,
    fetcher: Fetcher,
    connection: Option<Arc<Connection>>,
    lifecycle: Lifecycle,
    last: State,
    /// Resolves when the last response is sent. HTTP/2 would take more of a call whose client does not read.
    sent: Option<oneshot::Receiver<Infallible>>,
}

/// A response until it is sent, when it is dropped.
struct Unsent {
    response: Bytes,
    _sent: oneshot::Sender<Infallible>,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.response
    }
}

/// Serves a call of the reflection service, which is `reflection`, until the daemon reaches `last`.
pub(super) fn respond(
    request: Request,
    reflection: Next,
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    last: State,
) -> Response {
    let (head, body) = request.into_parts();
    let call = Call {
        requests: Messages::new(body),
        uri: head.uri,
        reflection,
        fetcher,
        connection: Connection::of(&head.extensions),
        lifecycle,
        last,
        sent: None,
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
    /// Bytes that are no request, no memory for the response, or the daemon has reached `last`. All end the call.
    async fn next_response(&mut self) -> Result<Option<Bytes>, Status> {
        let (requests, sent) = (&mut self.requests, self.sent.take());
        let next = async {
            if let Some(sent) = sent {
                let _dropped = sent.await;
            }
            requests.next().await
        };
        let message = tokio::select! {
            biased;
            message = next => message?,
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
        let response = match status {
            None => body.to_bytes(),
            Some(error) => {
                let response = ServerReflectionResponse {
                    valid_host: request.host.clone(),
                    original_request: Some(request),
                    message_response: Some(MessageResponse::ErrorResponse(ErrorResponse {
                        error_code: error.code() as i32,
                        error_message: error.message().to_owned(),
                    })),
                };
                framed(&response.encode_to_vec())
            }
        };
        let connection = self.connection.as_ref();
        let charged = self.fetcher.charge_text(connection, None, response);
        let response = charged.map_err(|error| error_status::to_status(&error, "message"))?;
        let (_sent, sent) = oneshot::channel();
        self.sent = Some(sent);
        Ok(Some(Bytes::from_owner(Unsent { response, _sent })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use crate::fetch::tests::without_datasets;
    use crate::rpc_metrics::RpcMetrics;
    use futures_util::FutureExt as _;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tower::Service as _;

    #[tokio::test]
    async fn a_call_holds_one_description_and_its_charge() {
        // Scenario: a call asks for the description of a service, twice, and does not take the first one at once. Expectation:
        // that is charged; the second one is made when it is gone, and charged likewise.
        let fetcher = without_datasets(Limits::default());
        let rpc = RpcMetrics::new(&prometheus::Registry::new()).unwrap();
        let mut service = crate::grpc::service(fetcher.clone(), Lifecycle::new(), rpc);
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::FileContainingSymbol(
                "ringfetch.v1.FetchService".to_owned(),
            )),
        };
        let call = http::Request::post("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
            .header(CONTENT_TYPE, GRPC)
            .body(Body::from(framed(&request.encode_to_vec()).repeat(2)));
        let mut responses = service.call(call.unwrap()).await.unwrap().into_body();
        let used = || fetcher.callers().budgets().request_memory.used();
        let description = responses.frame().await.unwrap().unwrap().into_data().unwrap();
        let charged = used();
        assert!(charged >= description.len() as u64, "{charged}");
        assert!(responses.frame().now_or_never().is_none());
        drop(description);
        assert_eq!(used(), 0);
        let _second = responses.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(used(), charged);
    }
}
