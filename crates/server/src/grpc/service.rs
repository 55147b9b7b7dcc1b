//! FetchService: HTTP requests in, encoded messages out.
//!
//! Written by hand because tonic's codec copies every response once more (TRAPS 24; MEASURED, "tonic, body of
//! our own"). A request is read completely, within `limits.request_bytes`, before it is decoded; the deadline
//! includes reading it. Every failure is a trailers-only response.

use super::encode::EncodedMessage;
use super::fetch_request::{Decoded, UnaryRequest};
use super::frame::FrameDecoder;
use super::metadata;
use super::read_object;
use super::stream;
use super::wire::{Fields, check_fields, dataset_in};
use crate::caller::Connection;
use crate::error_status;
use crate::fetch::{FetchError, Fetcher, RequestContext, RequestMemory, timeout_at, within};
use crate::http::refusal;
use crate::lifecycle::Lifecycle;
use crate::listener::{AnswerBody, FastPath, FrameParts, RequestBody, ResponseFuture, cleared};
use crate::record::note_dataset;
use crate::rpc_metrics::{CallTimer, GrpcMethod, RequestTimer, RpcMetrics};
use axum::body::Body;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version};
use prost::Message;
use ringfetch_engine::error::ReadError;
use ringfetch_proto::v1;
use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// The service's name: the first part of its methods' paths.
pub(super) const NAME: &str = "ringfetch.v1.FetchService";

/// FetchService as a tower service for the paths `/ringfetch.v1.FetchService/{method}`.
#[derive(Debug, Clone)]
pub(super) struct FetchService {
    /// One `Arc` for all parts: each call counts references, and those of `Lifecycle` alone would be six.
    shared: Arc<Shared>,
}

/// Aligned, so that those of two cores share no cache line.
#[derive(Debug, Clone)]
#[repr(align(128))]
pub(super) struct Shared {
    pub(super) fetcher: Fetcher,
    lifecycle: Lifecycle,
    rpc: RpcMetrics,
}

impl tower::Service<Request<Body>> for FetchService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let started = Instant::now();
        let connection = Connection::of(request.extensions());
        let answer = self.respond(request, connection, started);
        Box::pin(async move { Ok(answer.await.map(Body::from)) })
    }
}

impl FastPath for FetchService {
    fn accepts(&self, request: &Request<RequestBody>) -> bool {
        // As a router would match `/NAME/{method}`; method names need no decoding.
        let rest = request.uri().path().strip_prefix('/');
        let method = rest.and_then(|rest| rest.strip_prefix(NAME)?.strip_prefix('/'));
        method.is_some_and(|method| !method.is_empty() && !method.contains(['/', '%']))
    }

    fn for_core(&self) -> Arc<dyn FastPath> {
        let shared = Arc::new(Shared::clone(&self.shared));
        Arc::new(Self { shared })
    }

    fn call(&self, request: Request<RequestBody>, connection: &Arc<Connection>) -> ResponseFuture {
        self.respond(request, Some(Arc::clone(connection)), Instant::now())
    }
}

/// A request's body, on the fast path or through the router.
trait BytesBody: http_body::Body<Data = Bytes, Error: std::fmt::Display> + Unpin + Send + 'static {
    /// Resolves when a stream has to end, since its connection leaves.
    fn leaving(&self) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

impl BytesBody for RequestBody {
    fn leaving(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(Self::leaving(self))
    }
}

impl BytesBody for Body {
    fn leaving(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::pending())
    }
}

/// A call, without the parts of the request that are already handled: its state is allocated, and copied, for
/// each call.
struct GrpcRequest<B> {
    service: FetchService,
    body: B,
    /// The request's header map, cleared: memory for the response's.
    headers: HeaderMap,
    deadline: Result<Option<Instant>, Status>,
    connection: Option<Arc<Connection>>,
    started: Instant,
}

impl FetchService {
    pub(super) fn new(fetcher: Fetcher, lifecycle: Lifecycle, rpc: RpcMetrics) -> Self {
        Self {
            shared: Arc::new(Shared {
                fetcher,
                lifecycle,
                rpc,
            }),
        }
    }

    /// Each method boxes its own future: they differ in size.
    fn respond<B: BytesBody>(
        &self,
        request: Request<B>,
        connection: Option<Arc<Connection>>,
        started: Instant,
    ) -> ResponseFuture {
        let (parts, body) = request.into_parts();
        let headers = parts.headers;
        let deadline = metadata::check_encoding(&headers).and_then(|()| deadline_of(&headers, started));
        let call = GrpcRequest {
            service: self.clone(),
            body,
            headers: cleared(headers),
            deadline,
            connection,
            started,
        };
        match parts.uri.path().rsplit('/').next().unwrap_or_default() {
            "FetchBlocks" => ResponseFuture::new(call.unary::<v1::FetchBlocksRequest>()),
            "FetchVectors" => ResponseFuture::new(call.unary::<v1::FetchVectorsRequest>()),
            "FetchRanges" => ResponseFuture::new(call.unary::<v1::FetchRangesRequest>()),
            "FetchObjects" => ResponseFuture::new(call.unary::<v1::FetchObjectsRequest>()),
            "ScoreVectors" => ResponseFuture::new(call.unary::<v1::ScoreVectorsRequest>()),
            "FetchStream" => ResponseFuture::new(ready(call.stream())),
            "ReadObject" => ResponseFuture::new(call.read_object()),
            _ => {
                let status = Status::unimplemented(format!("{NAME} has no such method"));
                let rpc = &self.shared.rpc;
                rpc.observe(GrpcMethod::Other, status.code(), started.elapsed());
                ResponseFuture::new(ready(status.into_http()))
            }
        }
    }
}

impl<B: BytesBody> GrpcRequest<B> {
    async fn unary<C: UnaryRequest>(self) -> Response<AnswerBody> {
        let Self {
            service: FetchService { shared },
            mut body,
            headers,
            deadline,
            connection,
            started,
        } = self;
        let Shared { fetcher, rpc, .. } = &*shared;
        let mut counted = RequestTimer::new(rpc, C::METHOD, started);
        let result = async {
            let to_status = |error: FetchError| error_status::to_status(&error, C::ITEMS_FIELD);
            let limits = fetcher.limits();
            // Measured from the arrival of the head, so that it includes reading the request.
            let deadline = within(&limits, started, deadline?);
            let items_max = limits.items_per_request;
            let mut request_memory = RequestMemory::new(fetcher, connection.as_ref());
            let message = {
                let reading = pin!(read_one(&mut body, limits.request_bytes, &mut request_memory));
                timeout_at(deadline, reading).await
            };
            let message =
                message.unwrap_or_else(|| Err(to_status(fetcher.deadline_rejection(connection.as_ref()))))?;
            let counted = items_of::<C>(&message, items_max, &Fields::of_items(items_max));
            let items = fetcher.count_rejection(counted, connection.as_ref());
            items
                .and_then(|items| request_memory.whole(message.len(), items.saturating_mul(C::ITEM_WEIGHT)))
                .map_err(|error| refused(&message, to_status(error)))?;
            let call = Decoded::<C>::of(message)?;
            let context = RequestContext {
                arrived: Some(started),
                deadline,
                connection: connection.clone(),
                fail_fast: call.fail_fast(),
            };
            let to_status = |error: FetchError| error_status::to_status(&error, call.field_of(&error));
            let (answer, data) = call.run(fetcher, &context).await.map_err(to_status)?;
            let charge = request_memory.into_charge();
            EncodedMessage::unary(&answer, data)?
                .charged(|text| fetcher.charge_text(connection.as_ref(), charge, text))
                .map_err(to_status)
        }
        .await;
        counted.end(result.as_ref().map_or_else(Status::code, |_| Code::Ok));
        match result {
            Ok(encoded) => ok(whole(encoded), headers),
            Err(status) => status.into_http(),
        }
    }

    fn stream(self) -> Response<AnswerBody> {
        let Self {
            service: FetchService { shared },
            body,
            headers,
            deadline,
            connection,
            started,
        } = self;
        let Shared {
            fetcher,
            lifecycle,
            rpc,
        } = Shared::clone(&shared);
        let mut timer = CallTimer::new(rpc, GrpcMethod::FetchStream, started);
        let deadline = match deadline {
            Ok(deadline) => deadline,
            Err(status) => {
                timer.end(status.code());
                return status.into_http();
            }
        };
        let limits = fetcher.limits();
        let bounds = stream::StreamLimits {
            requests_in_flight: limits.stream_requests_in_flight as usize,
            message_bytes: limits.request_bytes,
            deadline,
        };
        let (holding, held_by) = (fetcher.clone(), connection.clone());
        let mut charge = None;
        let hold =
            Box::new(move |bytes| holding.recharge_request_memory(held_by.as_ref(), &mut charge, bytes));
        let (counting, counted_on) = (fetcher, connection.clone());
        let late = Box::new(move || drop(counting.deadline_rejection(counted_on.as_ref())));
        let start =
            move |message| stream::respond(Arc::clone(&shared), connection.clone(), deadline, message);
        let leaving = body.leaving();
        let interrupted = async move {
            tokio::select! {
                biased;
                () = lifecycle.draining() => error_status::to_status(&ReadError::Draining.into(), "request"),
                () = leaving => error_status::leaving_stream(),
            }
        };
        ok(
            framed(stream::body(body, bounds, start, hold, late, interrupted, timer)),
            headers,
        )
    }

    async fn read_object(mut self) -> Response<AnswerBody> {
        let headers = std::mem::take(&mut self.headers);
        let rpc = self.service.shared.rpc.clone();
        let mut timer = CallTimer::new(rpc, GrpcMethod::ReadObject, self.started);
        match self.opened_object().await {
            Ok((object, deadline)) => ok(framed(read_object::body(object, deadline, timer)), headers),
            Err(status) => {
                timer.end(status.code());
                status.into_http()
            }
        }
    }

    async fn opened_object(mut self) -> Result<(read_object::ObjectStart, Option<Instant>), Status> {
        // The client's deadline applies to the whole response, the configured limit only to its beginning, as
        // over HTTP.
        let deadline = self.deadline?;
        let (fetcher, connection) = (&self.service.shared.fetcher, self.connection);
        let limits = fetcher.limits();
        let mut request_memory = RequestMemory::new(fetcher, connection.as_ref());
        let beginning = pin!(async {
            let message = read_one(&mut self.body, limits.request_bytes, &mut request_memory).await?;
            let request = request_memory
                .whole(message.len(), 1)
                .map_err(|error| error_status::to_status(&error, "message"))
                .and_then(|()| {
                    check_fields(&message).map_err(|error| malformed(&error))?;
                    decode(&message)
                })
                .map_err(|status| refused(&message, status))?;
            drop(message);
            read_object::begin(fetcher, connection.clone(), self.started, deadline, &request).await
        });
        let begun = timeout_at(within(&limits, self.started, deadline), beginning).await;
        begun
            .unwrap_or_else(|| {
                let late = fetcher.deadline_rejection(connection.as_ref());
                Err(error_status::to_status(&late, "name"))
            })
            .map(|begun| (begun, deadline))
    }
}

/// Answers requests that are not gRPC calls with an HTTP status, and a problem as on the other ports.
pub(crate) fn refuse_other_protocols<B>(request: &Request<B>) -> Option<Response<AnswerBody>> {
    let (status, slug, header, value) = if request.method() != Method::POST {
        let allow = http::header::ALLOW;
        (
            StatusCode::METHOD_NOT_ALLOWED,
            "method-not-allowed",
            allow,
            "POST",
        )
    } else if !metadata::is_grpc(request.headers()) {
        let accept_post = HeaderName::from_static("accept-post");
        (
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported-media-type",
            accept_post,
            "application/grpc",
        )
    } else {
        return None;
    };
    let detail = "this port answers POST requests of content-type application/grpc; the HTTP API has its own port (http.listen)";
    let mut response = refusal(status, slug, detail.to_owned(), request.uri().path());
    response
        .headers_mut()
        .insert(header, HeaderValue::from_static(value));
    Some(response.map(AnswerBody::Routed))
}

/// Answers a call on the HTTP port with a status: of an HTTP response its client shows the number only.
pub(crate) fn refuse_calls<B>(request: &Request<B>) -> Option<Response<AnswerBody>> {
    let is_call = request.method() == Method::POST
        && request.version() == Version::HTTP_2
        && metadata::is_grpc(request.headers());
    is_call.then(|| {
        Status::unimplemented("this port serves the HTTP API; gRPC has its own port (grpc.listen)")
            .into_http()
    })
}

/// A deadline beyond the range of the clock is ignored.
pub(super) fn deadline_of(headers: &HeaderMap, started: Instant) -> Result<Option<Instant>, Status> {
    Ok(metadata::timeout(headers)?.and_then(|timeout| started.checked_add(timeout)))
}

/// One message, and trailers with status OK.
fn whole(encoded: EncodedMessage) -> AnswerBody {
    AnswerBody::Whole {
        data: Some(encoded.into_frame()),
        trailers: Some(trailers_ok),
    }
}

fn framed<B>(body: B) -> AnswerBody
where
    B: http_body::Body<Data = FrameParts, Error = Infallible> + Send + 'static,
{
    AnswerBody::Framed(Box::pin(body))
}

/// `headers`: an empty map, whose memory is reused.
fn ok(body: AnswerBody, mut headers: HeaderMap) -> Response<AnswerBody> {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    let mut response = Response::new(body);
    *response.headers_mut() = headers;
    response
}

/// An upper bound on the number of items in a request: for a short request, its bytes.
///
/// # Errors
/// `TooManyItems`, before the items are decoded into memory; `Malformed` with more than `fields`.
pub(super) fn items_of<C: UnaryRequest>(
    message: &[u8],
    max: u32,
    fields: &Fields,
) -> Result<usize, FetchError> {
    let most = usize::try_from(max).unwrap_or(usize::MAX);
    // An item has at least one byte.
    if message.len() <= most {
        return Ok(message.len());
    }
    match C::count_items(message, fields)? {
        items if items <= most => Ok(items),
        items => Err(FetchError::TooManyItems {
            field: C::ITEMS_FIELD,
            items,
            max,
        }),
    }
}

/// Reads the one message of a unary call.
///
/// Any other number of messages is UNIMPLEMENTED, as gRPC's `doc/statuscodes.md` requires for a cardinality
/// violation.
async fn read_one<B>(
    mut body: &mut B,
    message_bytes_max: u32,
    request_memory: &mut RequestMemory<'_>,
) -> Result<Bytes, Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let mut decoder = FrameDecoder::new(message_bytes_max);
    let mut message: Option<Bytes> = None;
    loop {
        while let Some(next) = decoder.next().map_err(|error| error.to_status())? {
            if message.replace(next).is_some() {
                return Err(several_messages());
            }
        }
        let held = decoder.held() + message.as_ref().map_or(0, Bytes::len);
        let frame = request_memory.next_frame(&mut body, held).await;
        match frame.map_err(|error| error_status::to_status(&error, "message"))? {
            Some(Ok(frame)) => {
                if let Ok(piece) = frame.into_data() {
                    decoder.push(piece);
                }
            }
            Some(Err(error)) => return Err(broken_off(&error)),
            None => break,
        }
    }
    decoder.finish().map_err(|error| error.to_status())?;
    message.ok_or_else(no_message)
}

pub(super) fn several_messages() -> Status {
    Status::unimplemented("a unary call has one request message, but several were sent")
}

pub(super) fn no_message() -> Status {
    Status::unimplemented("a unary call has one request message, but none was sent")
}

pub(super) fn broken_off(error: &impl std::fmt::Display) -> Status {
    Status::cancelled(format!("the request was not sent completely: {error}"))
}

/// Decodes a request message.
///
/// # Errors
/// INVALID_ARGUMENT for the field `message`: not protobuf, or of another schema.
pub(super) fn decode<M: Message + Default>(message: &[u8]) -> Result<M, Status> {
    decode_into(M::default(), message)
}

/// As `decode`, into the memory of an empty message.
pub(super) fn decode_into<M: Message>(mut decoded: M, message: &[u8]) -> Result<M, Status> {
    let decoding = decoded.merge(message);
    decoding.map(|()| decoded).map_err(|error| malformed(&error))
}

/// Records the dataset of a request that is refused with this status before it is decoded.
pub(super) fn refused(message: &[u8], status: Status) -> Status {
    if let Some(dataset) = dataset_in(message) {
        note_dataset(dataset);
    }
    status
}

/// The status of a message that cannot be decoded.
pub(super) fn malformed(error: &impl std::fmt::Display) -> Status {
    let problem = error_status::message_of(&format_args!("message: not a request of this method: {error}"));
    let details = ErrorDetails::with_bad_request_violation("message", problem.clone());
    Status::with_error_details(Code::InvalidArgument, problem, details)
}

/// The trailers of a successful call.
pub(super) fn trailers_ok() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    trailers
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Buf as _;
    use http_body::Body as _;
    use http_body_util::BodyExt as _;

    #[tokio::test]
    async fn an_answer_is_a_head_its_bytes_and_trailers() {
        // One frame with the head and the uncopied bytes of `data`, then grpc-status 0. Without data: the
        // head alone.
        let data = Bytes::from(vec![7; 3 << 20]);
        let encoded = EncodedMessage::unary(&v1::FetchRangesResponse::default(), data.clone()).unwrap();
        let mut body = whole(encoded.clone());
        let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
        let mut slices = [std::io::IoSlice::new(&[]); 4];
        assert_eq!(frame.chunks_vectored(&mut slices), 2);
        assert_eq!(slices[0][..], encoded.head);
        assert_eq!(slices[1].as_ptr(), data.as_ptr());
        let trailers = body.frame().await.unwrap().unwrap().into_trailers().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
        assert!(body.is_end_stream() && body.frame().await.is_none());

        let empty = EncodedMessage::unary(&v1::FetchRangesResponse::default(), Bytes::new()).unwrap();
        let collected = whole(empty).collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(collected.to_bytes(), [0; 5][..]);
    }
}
