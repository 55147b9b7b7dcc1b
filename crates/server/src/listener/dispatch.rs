//! Checks every request on a port and passes it to the fast path or the router.
//!
//! Host names and media types are checked because pages in browsers can send requests to any port that their
//! visitor can reach. Routing, extracting parameters and passing the layers cost a fifth of a small response
//! (ADR 0012). A fast path avoids that for requests that it recognizes by their head; its responses must be
//! the same as the router's.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::routing::future::RouteFuture;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body as _;
use hyper::body::Incoming;
use prometheus::{IntCounter, IntCounterVec};
use tonic::Code;
use tower::Service as _;

use super::bodies::{AnswerBody, RequestBody};
use super::core_turns;
use super::hosts::{AllowedHosts, HostError};
use super::progress::{Exchange, Progress, UNIT_BYTES};
use super::response_future::ResponseFuture;
use super::{BODY_WINDOW_BYTES, Role, STREAM_WINDOW_BYTES};
use crate::access::{Access, Denied, Need};
use crate::caller::Connection;
use crate::error_status::{overloaded_call, refused_call};
use crate::grpc;
use crate::http::{refusal, too_late};
use crate::rpc_metrics::{Outcome, replaced};
use ringfetch_engine::share::{Refused, Share};

/// Most open calls of the health and reflection services on a connection. A watch needs no deadline.
const SERVICES_MAX: usize = 4;
/// Units of memory for a call that tonic serves.
const ROUTED_CALL_UNITS: usize = 3;
/// Units of memory for a FetchStream: a window of its requests may wait to be read.
const STREAM_UNITS: usize = 1 + (STREAM_WINDOW_BYTES as u64 / UNIT_BYTES) as usize;
/// Memory of a header field besides its text: an entry of http 1's `HeaderMap`. 450 fields of three bytes, a byte each
/// on the wire, took 46 KiB, measured.
const FIELD_BYTES: usize = 104;
const FETCH_STREAM: &str = "/ringfetch.v1.FetchService/FetchStream";
/// A refusal has a body only while at most so many requests are open on the connection.
const REFUSALS_WITH_BODY: usize = 8;
/// Serves some requests instead of the router.
pub trait FastPath: std::fmt::Debug + Send + Sync {
    /// Whether it serves this request.
    fn accepts(&self, request: &Request<RequestBody>) -> bool;

    /// The same for another core, with counts of references that other cores do not write for each request.
    fn for_core(&self) -> Arc<dyn FastPath>;

    /// Serves a request that it accepts.
    fn call(&self, request: Request<RequestBody>, connection: &Arc<Connection>) -> ResponseFuture;
}

/// Serves the requests of a port: by the fast path if there is one and it accepts the request, else by the router.
#[derive(Debug)]
pub(super) struct RequestDispatcher {
    pub(super) router: Router,
    /// One for each core, if there is any.
    pub(super) fast_paths: Box<[Arc<dyn FastPath>]>,
    pub(super) hosts: Option<AllowedHosts>,
    pub(super) role: Role,
    /// Access control; `None`: clients are not distinguished.
    pub(super) access: Option<Access>,
    pub(super) refusals: RefusalCounters,
}

/// Counts requests refused before the router.
#[derive(Debug)]
pub(super) struct RefusalCounters {
    host: IntCounter,
    content_type: IntCounter,
    draining: IntCounter,
    unauthenticated: IntCounter,
    forbidden: IntCounter,
    memory: IntCounter,
    services: IntCounter,
}

impl RefusalCounters {
    pub(super) fn new(metric: &IntCounterVec, transport: &str) -> Self {
        let counter = |reason| metric.with_label_values(&[transport, reason]);
        Self {
            host: counter("host"),
            content_type: counter("content_type"),
            draining: counter("draining"),
            unauthenticated: counter("unauthenticated"),
            forbidden: counter("forbidden"),
            memory: counter("memory"),
            services: counter("services"),
        }
    }
}

/// The response future of a dispatched request.
pub(super) enum DispatchFuture {
    Refused(Option<Box<Response<AnswerBody>>>),
    Fast(ResponseFuture),
    /// Boxed, to keep the other variants small.
    Routed(Box<RoutedRequest>),
}

/// Bytes of text that a response holds and that are not charged yet, where its body does not tell.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TextBytes(pub(crate) u64);

/// A request that the router serves, and what its response is charged to.
pub(super) struct RoutedRequest {
    response: RouteFuture<Infallible>,
    exchange: Arc<Exchange>,
    by_address: Arc<Share>,
    refused_for_memory: IntCounter,
}

impl DispatchFuture {
    /// A refusal is charged to no share of memory. Its client may leave its body unread, so it has one only
    /// while few requests are open on the connection; flow control does not hold back a head. A refused call is
    /// a head in any case, which needs its content type: clients report UNKNOWN without it.
    fn refused(response: Response<AnswerBody>, progress: &Progress) -> Self {
        let response = if response.body().is_end_stream() || progress.exchanges() <= REFUSALS_WITH_BODY {
            response
        } else {
            without_body(response)
        };
        Self::Refused(Some(Box::new(response)))
    }
}

fn without_body(response: Response<AnswerBody>) -> Response<AnswerBody> {
    let (mut head, _body) = response.into_parts();
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.remove(header::CONTENT_TYPE);
    Response::from_parts(head, AnswerBody::Routed(Body::empty()))
}

impl RequestDispatcher {
    /// Serves a request on this core.
    pub(super) fn call(
        &self,
        core: usize,
        request: Request<Incoming>,
        connection: &Arc<Connection>,
        exchange: &Arc<Exchange>,
        progress: &Arc<Progress>,
    ) -> DispatchFuture {
        let refused = self.refused(&request, progress.is_late());
        let may_end = self.is_http() || (refused.is_some() && !self.is_call(&request));
        let (head, body) = request.into_parts();
        let body = RequestBody::new(body, &head.headers, Arc::clone(exchange), may_end);
        if let Some(refused) = refused {
            return DispatchFuture::refused(refused, progress);
        }
        let mut request = Request::from_parts(head, body);
        let by_address = connection.request_memory();
        let path = request.uri().path();
        // Limited by number instead: health must not depend on memory.
        let is_service = !self.is_http() && is_service(path);
        let mut units = if path == FETCH_STREAM { STREAM_UNITS } else { 1 };
        units += head_units(&request);
        if progress.is_http2() {
            units += unread_units(&request);
        }
        if let Err(refused) = exchange.charge(units, by_address)
            && !is_service
        {
            return self.no_memory(&request, refused, progress);
        }
        let admitted;
        let connection = match &self.access {
            None => {
                exchange.mark_admitted();
                connection
            }
            Some(access) => match self.admitted(access, &mut request, connection, progress) {
                Ok(as_principal) => {
                    core_turns::work_for(as_principal.account());
                    if as_principal.principal().is_some() || self.need(request.uri().path()).is_some() {
                        exchange.mark_admitted();
                    }
                    exchange.set_connection(&as_principal);
                    admitted = as_principal;
                    &admitted
                }
                Err(refused) => return DispatchFuture::refused(*refused, progress),
            },
        };
        if is_service && !exchange.count_service(SERVICES_MAX) {
            self.refusals.services.inc();
            let detail = "too many health and reflection calls are open on this connection; end one first";
            let refused = refused_call(Code::ResourceExhausted, "too-many-watches", detail);
            return DispatchFuture::refused(refused.into_http(), progress);
        }
        let set_unserved = || {
            if self.is_http() {
                exchange.set_unserved(Outcome::unserved_http());
            }
        };
        match self.fast_paths.get(core) {
            Some(fast_path) if fast_path.accepts(&request) => {
                set_unserved();
                DispatchFuture::Fast(fast_path.call(request, connection))
            }
            Some(_) | None => {
                if self.is_call(&request)
                    && let Err(refused) = exchange.charge(ROUTED_CALL_UNITS - 1, by_address)
                    && !is_service
                {
                    return self.no_memory(&request, refused, progress);
                }
                set_unserved();
                request.extensions_mut().insert(connection.clone());
                // A router is always ready.
                DispatchFuture::Routed(Box::new(RoutedRequest {
                    response: self.router.clone().call(request),
                    exchange: Arc::clone(exchange),
                    by_address: Arc::clone(by_address),
                    refused_for_memory: self.refusals.memory.clone(),
                }))
            }
        }
    }
}

impl RequestDispatcher {
    fn is_http(&self) -> bool {
        matches!(self.role, Role::DataAndProbes(_))
    }

    /// Whether a request is a gRPC call, which a page in a browser cannot send without a CORS preflight. On the HTTP port
    /// none is: [`grpc::refuse_calls`] has answered those over HTTP/2, and a client of HTTP/1.1 expects HTTP.
    fn is_call<B>(&self, request: &Request<B>) -> bool {
        !self.is_http() && request.method() == Method::POST && grpc::is_grpc(request.headers())
    }

    /// What a request needs; `None`: nothing, since orchestrators have no credentials.
    fn need(&self, path: &str) -> Option<Need> {
        match self.role {
            Role::Data | Role::Control if path.starts_with("/grpc.health.v1.Health/") => None,
            Role::Data => Some(Need::Known),
            Role::Control => Some(Need::Admin),
            Role::DataAndProbes(_) if matches!(path, "/livez" | "/readyz") => None,
            // Everything that does not concern one dataset, whether the path exists or not, except the API
            // description.
            Role::DataAndProbes(is_operation) if is_operation(path) && path != "/openapi.json" => {
                Some(Need::Operation)
            }
            Role::DataAndProbes(_) => Some(Need::Known),
        }
    }

    /// The connection as used by the request's principal, or the response to a request that is denied.
    fn admitted<B>(
        &self,
        access: &Access,
        request: &mut Request<B>,
        connection: &Arc<Connection>,
        progress: &Arc<Progress>,
    ) -> Result<Arc<Connection>, Box<Response<AnswerBody>>> {
        let admitted = match self.need(request.uri().path()) {
            None => Ok(Arc::clone(connection)),
            Some(need) => access.admit(request.headers(), need, connection, progress),
        };
        // Nothing after this point needs it.
        request.headers_mut().remove(header::AUTHORIZATION);
        admitted.map_err(|denied| Box::new(self.denied(denied, request)))
    }

    /// The response to a request whose memory is not granted: at most a head.
    fn no_memory<B>(&self, request: &Request<B>, refused: Refused, progress: &Progress) -> DispatchFuture {
        self.refusals.memory.inc();
        DispatchFuture::refused(no_memory(self.is_call(request), refused), progress)
    }

    fn denied<B>(&self, denied: Denied, request: &Request<B>) -> Response<AnswerBody> {
        let (counter, code, status, slug, detail) = match denied {
            Denied::Unauthenticated => (
                &self.refusals.unauthenticated,
                Code::Unauthenticated,
                StatusCode::UNAUTHORIZED,
                "unauthenticated",
                "no valid credential: send authorization: Bearer TOKEN, or a client certificate",
            ),
            Denied::Forbidden(need) => (
                &self.refusals.forbidden,
                Code::PermissionDenied,
                StatusCode::FORBIDDEN,
                "forbidden",
                match need {
                    Need::Admin => {
                        "this principal has no right to do that: its line in access.principals needs @admin"
                    }
                    Need::Known | Need::Operation => {
                        "this principal has no right to do that: its line in access.principals needs @metrics, @admin or *"
                    }
                },
            ),
        };
        counter.inc();
        core_turns::note_refusal();
        if self.is_call(request) {
            return refused_call(code, slug, detail).into_http();
        }
        let mut response = refusal(status, slug, detail.to_owned(), request.uri().path());
        if denied == Denied::Unauthenticated {
            let scheme = HeaderValue::from_static("Bearer realm=\"ringfetch\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response.map(AnswerBody::Routed)
    }

    /// The response if the request is refused.
    fn refused<B>(&self, request: &Request<B>, is_late: bool) -> Option<Response<AnswerBody>> {
        let path = request.uri().path();
        // Before the host and the credential, which a call may lack here, and whose refusals would hide the mistake.
        if self.is_http()
            && let Some(refused) = grpc::refuse_calls(request)
        {
            self.refusals.content_type.inc();
            return Some(refused);
        }
        if let Err(error) = self.hosts.as_ref().map_or(Ok(()), |hosts| hosts.check(request)) {
            self.refusals.host.inc();
            let (status, slug) = match error {
                HostError::Missing | HostError::Malformed => (StatusCode::BAD_REQUEST, "malformed"),
                HostError::Foreign => (StatusCode::MISDIRECTED_REQUEST, "misdirected"),
            };
            return Some(refusal(status, slug, error.to_string(), path).map(AnswerBody::Routed));
        }
        match self.role {
            Role::Data | Role::Control => {
                let refused = grpc::refuse_other_protocols(request)?;
                self.refusals.content_type.inc();
                Some(refused)
            }
            Role::DataAndProbes(is_probe) if is_late && !is_probe(path) => {
                self.refusals.draining.inc();
                Some(too_late(path).map(AnswerBody::Routed))
            }
            Role::DataAndProbes(_) => None,
        }
    }
}

/// Whole units of memory: the request's own unit covers the rest.
fn units_of(bytes: u64) -> usize {
    usize::try_from(bytes / UNIT_BYTES).unwrap_or(usize::MAX)
}

/// Units of memory for a head that is longer than the first unit covers: it may be held until the request has
/// arrived.
fn head_units<B>(request: &Request<B>) -> usize {
    let headers = request.headers();
    let lengths = headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len());
    let uri = request.uri();
    let authority = uri.authority().map_or(0, |authority| authority.as_str().len());
    let path_and_query = uri.path_and_query().map_or(0, |text| text.as_str().len());
    let method = request.method().as_str().len();
    let text = method + authority + path_and_query + lengths.sum::<usize>();
    // Further values of a name are kept apart.
    let fields = headers.capacity() + headers.len() - headers.keys_len();
    units_of((text + fields * FIELD_BYTES) as u64)
}

/// Units of memory for a body that nothing reads before the response is known: h2 keeps it.
fn unread_units(request: &Request<RequestBody>) -> usize {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return 0;
    }
    let window = u64::from(BODY_WINDOW_BYTES);
    units_of(request.body().size_hint().upper().unwrap_or(window).min(window))
}

/// Whether a call is for the health or reflection service.
fn is_service(path: &str) -> bool {
    path.starts_with("/grpc.health.v1.Health/") || path.starts_with("/grpc.reflection.")
}

impl Future for DispatchFuture {
    type Output = Result<Response<AnswerBody>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            // Futures are not polled after completion.
            Self::Refused(answer) => answer
                .take()
                .map_or(Poll::Pending, |answer| Poll::Ready(Ok(*answer))),
            Self::Fast(answer) => Pin::new(answer)
                .poll(cx)
                .map(|response| Ok(with_length(response))),
            Self::Routed(routed) => {
                let RoutedRequest {
                    response,
                    exchange,
                    by_address,
                    refused_for_memory,
                } = &mut **routed;
                Pin::new(response)
                    .poll(cx)
                    .map_ok(|response| charged(response, exchange, by_address, refused_for_memory))
            }
        }
    }
}

/// Charges text that a response holds whole (lists, metrics, descriptions) as request memory, not as response
/// memory: metrics must be available when that is used up. Data was charged when it was read.
fn charged(
    response: axum::response::Response,
    exchange: &Exchange,
    by_address: &Arc<Share>,
    refused_for_memory: &IntCounter,
) -> Response<AnswerBody> {
    let is_data = |value: &HeaderValue| {
        let data = [&b"application/octet-stream"[..], b"multipart/"];
        data.iter().any(|data| value.as_bytes().starts_with(data))
    };
    let media_type = response.headers().get(header::CONTENT_TYPE);
    let text_bytes = match response.extensions().get::<TextBytes>() {
        Some(TextBytes(bytes)) => *bytes,
        None if media_type.is_some_and(is_data) => 0,
        None => response.body().size_hint().exact().unwrap_or(0),
    };
    let units = units_of(text_bytes);
    if units == 0 {
        return response.map(AnswerBody::Routed);
    }
    match exchange.charge(units, by_address) {
        Ok(()) => response.map(AnswerBody::Routed),
        Err(refused) => {
            refused_for_memory.inc();
            let answer = no_memory(grpc::is_grpc(response.headers()), refused);
            // A call that is dropped counts as cancelled.
            drop(response);
            replaced(Code::ResourceExhausted, answer.status());
            answer
        }
    }
}

/// The response where request memory is not granted: a head.
fn no_memory(is_call: bool, refused: Refused) -> Response<AnswerBody> {
    let own = refused != Refused::Budget;
    if is_call {
        let detail = if own {
            "this caller's open requests have used its share of request memory (limits.request_memory)"
        } else {
            "open requests have used all request memory (limits.request_memory)"
        };
        return overloaded_call(detail).into_http();
    }
    let mut response = Response::new(AnswerBody::default());
    *response.status_mut() = if own {
        StatusCode::TOO_MANY_REQUESTS
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// Sets the Content-Length of an empty response, as the router does. hyper sets others, and that of an empty one over HTTP/1
/// alone.
fn with_length(mut response: Response<AnswerBody>) -> Response<AnswerBody> {
    if response.body().size_hint().exact() == Some(0) {
        response
            .headers_mut()
            .entry(header::CONTENT_LENGTH)
            .or_insert(HeaderValue::from_static("0"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AccessConfig, Anonymous, Limits};
    use crate::fetch::before_routing;
    use crate::fetch::tests::without_datasets;
    use crate::listener::core_turns::take_refusal;

    fn dispatcher() -> RequestDispatcher {
        RequestDispatcher {
            router: Router::new(),
            fast_paths: Box::new([]),
            hosts: None,
            role: Role::Data,
            access: None,
            refusals: RefusalCounters::new(&before_routing(), "grpc"),
        }
    }

    #[test]
    fn a_credential_goes_no_further_than_its_check() {
        // Scenario: calls with a token, of a method that needs one and of one that needs none. Expectation: once they are
        // admitted, neither has it.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("principals");
        // The hash of "abc" (FIPS 180-2, B.1).
        let hash = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        std::fs::write(&path, format!("a sha256:{hash} *\n")).unwrap();
        let config = AccessConfig {
            principals: Some(path),
            anonymous: Anonymous::Nobody,
        };
        let access = Access::load(&config, false).unwrap().unwrap();
        let fetcher = without_datasets(Limits::default());
        let connection = fetcher.callers().connect("192.0.2.1".parse().unwrap(), u64::MAX);
        for path in [FETCH_STREAM, "/grpc.health.v1.Health/Check"] {
            let request = Request::post(path).header(header::AUTHORIZATION, "Bearer abc");
            let mut request = request.body(()).unwrap();
            let admitted = dispatcher().admitted(&access, &mut request, &connection, &Arc::default());
            assert!(admitted.is_ok() && !request.headers().contains_key(header::AUTHORIZATION));
        }
    }

    #[test]
    fn a_long_head_is_charged_wherever_its_length_is() {
        // Scenario: 15,000 bytes as a path, a query, an authority, and a method. Expectation: each costs as much, three units.
        let long = "x".repeat(15_000);
        let head = |method: &str, uri: &str| {
            let request = Request::builder().method(method).uri(uri).body(()).unwrap();
            head_units(&request)
        };
        let uris = [format!("/{long}"), format!("/?{long}"), format!("http://{long}/")];
        assert_eq!(uris.map(|uri| head("POST", &uri)), [3; 3]);
        assert_eq!(head(&long, "/"), 3);
    }

    #[test]
    fn who_is_denied_uses_time_of_the_core() {
        // Scenario: requests without a credential and without the right, as a gRPC call and over HTTP. Expectation: each has its
        // code, is counted, and is noted for the caller's time on the core.
        let dispatcher = dispatcher();
        for (denied, status, code) in [
            (Denied::Unauthenticated, 401, "16"),
            (Denied::Forbidden(Need::Known), 403, "7"),
        ] {
            let get = Request::get("/v1/datasets").body(()).unwrap();
            assert_eq!(dispatcher.denied(denied, &get).status(), status);
            assert!(take_refusal());
            let call = Request::post(FETCH_STREAM).header(header::CONTENT_TYPE, "application/grpc");
            let answer = dispatcher.denied(denied, &call.body(()).unwrap());
            assert_eq!(answer.headers()["grpc-status"], code);
            assert!(take_refusal());
        }
        let RefusalCounters {
            unauthenticated,
            forbidden,
            ..
        } = &dispatcher.refusals;
        assert_eq!((unauthenticated.get(), forbidden.get()), (2, 2));
    }

    #[test]
    fn the_http_port_answers_http1_in_http_whatever_a_request_says_it_is() {
        // Scenario: requests of HTTP/1.1 to the HTTP port with the content type of gRPC, without a credential and without
        // memory. Expectation: they are not taken for calls: HTTP's status, and no status of gRPC.
        let dispatcher = RequestDispatcher {
            role: Role::DataAndProbes(|_| false),
            ..dispatcher()
        };
        let request = Request::post("/v1/datasets").header(header::CONTENT_TYPE, "application/grpc");
        let request = request.body(()).unwrap();
        assert!(dispatcher.refused(&request, false).is_none());
        let denied = dispatcher.denied(Denied::Unauthenticated, &request);
        assert_eq!(denied.status(), 401);
        assert!(denied.headers().contains_key(header::WWW_AUTHENTICATE));
        let DispatchFuture::Refused(Some(no_memory)) =
            dispatcher.no_memory(&request, Refused::Caller, &Arc::default())
        else {
            panic!("it is served");
        };
        assert_eq!(no_memory.status(), 429);
        for answer in [&denied, &*no_memory] {
            assert!(!answer.headers().contains_key("grpc-status"));
        }
    }
}
