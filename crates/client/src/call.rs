//! One call on one connection: sends a request and reads its answer to the end. Handles gRPC's head and
//! trailers; retries and methods are elsewhere.

use crate::error::Error;
use crate::message::{Encoded, Incoming};
use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, header};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
/// Names that calls set themselves, and those of a connection, which HTTP/2 forbids (RFC 9113, section 8.2.2): h2 would
/// refuse each call with one.
static RESERVED: [HeaderName; 10] = [
    header::CONTENT_TYPE,
    header::TE,
    header::USER_AGENT,
    header::HOST,
    header::CONTENT_LENGTH,
    header::CONNECTION,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Headers and limits of a client's calls.
#[derive(Clone)]
pub(crate) struct CallOptions {
    timeout: Option<Duration>,
    pub(crate) fail_fast: bool,
    /// Headers of a stream, and of a call with the whole timeout.
    stream_headers: Arc<HeaderMap>,
    call_headers: Arc<HeaderMap>,
}

/// Omits the values of headers, which may be secret: clients and streams are printed with these.
impl fmt::Debug for CallOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers: Vec<_> = self.stream_headers.keys().collect();
        f.debug_struct("CallOptions")
            .field("timeout", &self.timeout)
            .field("fail_fast", &self.fail_fast)
            .field("headers", &headers)
            .finish_non_exhaustive()
    }
}

impl CallOptions {
    pub(crate) fn new(timeout: Option<Duration>, metadata: &[(HeaderName, HeaderValue)]) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        let agent = concat!("ringfetch-client/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        let mut options = Self {
            timeout: None,
            fail_fast: false,
            stream_headers: Arc::new(headers),
            call_headers: Arc::default(),
        };
        options.add_metadata(metadata);
        options.set_timeout(timeout);
        options
    }

    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    pub(crate) fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
        let mut headers = HeaderMap::clone(&self.stream_headers);
        if let Some(timeout) = timeout.and_then(timeout_header) {
            headers.insert(GRPC_TIMEOUT, timeout);
        }
        self.call_headers = Arc::new(headers);
    }

    pub(crate) fn add_metadata(&mut self, metadata: &[(HeaderName, HeaderValue)]) {
        let headers = Arc::make_mut(&mut self.stream_headers);
        for (name, value) in metadata {
            // A second token is meant to replace the first.
            if name == header::AUTHORIZATION {
                headers.insert(name, value.clone());
            } else {
                headers.append(name, value.clone());
            }
        }
        self.set_timeout(self.timeout);
    }

    /// The head of a call with this much time left; `None`: all of it.
    pub(crate) fn call(&self, uri: Uri, left: Option<Duration>) -> Request<()> {
        let mut headers = HeaderMap::clone(&self.call_headers);
        if let Some(left) = left.and_then(timeout_header) {
            headers.insert(GRPC_TIMEOUT, left);
        }
        head(uri, headers)
    }

    /// The head of a stream, which has no deadline.
    pub(crate) fn stream(&self, uri: Uri) -> Request<()> {
        head(uri, HeaderMap::clone(&self.stream_headers))
    }
}

fn head(uri: Uri, headers: HeaderMap) -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    request
}

/// Checks a header that a caller adds to calls. The names of gRPC and HTTP/2 are reserved, and values of names in `-bin`
/// would have to be encoded.
pub(crate) fn metadata(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), Error> {
    let wrong = |problem: String| Error::invalid("metadata", problem);
    let name = HeaderName::try_from(name).map_err(|error| wrong(format!("{name:?}: {error}")))?;
    if RESERVED.contains(&name) || name.as_str().starts_with("grpc-") || name.as_str().ends_with("-bin") {
        return Err(wrong(format!(
            "{name:?} is gRPC's or HTTP's own, or binary: use another name"
        )));
    }
    let value = HeaderValue::try_from(value).map_err(|error| wrong(format!("value of {name:?}: {error}")))?;
    Ok((name, value))
}

/// A timeout in gRPC's format: at most 8 digits, in the finest unit that fits.
fn timeout_header(timeout: Duration) -> Option<HeaderValue> {
    let units = [
        (timeout.as_nanos(), 'n'),
        (timeout.as_micros(), 'u'),
        (timeout.as_millis(), 'm'),
        (u128::from(timeout.as_secs()), 'S'),
    ];
    // More than three years is as good as no timeout.
    let (number, unit) = units.into_iter().find(|(number, _)| *number < 100_000_000)?;
    HeaderValue::try_from(format!("{number}{unit}")).ok()
}

/// Sends a call's message and reads the message of the answer.
pub(crate) async fn exchange(
    response: ResponseFuture,
    mut body: SendStream<Bytes>,
    message: Bytes,
    answer_bytes_max: usize,
) -> Result<Encoded, Error> {
    // If the server does not take the message, its answer says why.
    let _ = body.send_data(message, true);
    drop(body);
    let mut body = accept(response.await?)?;
    let mut incoming = Incoming::new(answer_bytes_max);
    let mut answer = None;
    while let Some(chunk) = body.data().await {
        incoming.push(release(&mut body, chunk?)?);
        if answer.is_none() {
            answer = incoming.next()?;
        }
        if answer.is_some() && !incoming.is_empty() {
            return Err(Error::protocol("more than one answer to a call"));
        }
    }
    if let Some(error) = end(&mut body).await? {
        return Err(error);
    }
    answer.ok_or_else(|| Error::protocol("the answer is cut off"))
}

/// The body of an answer, unless its head is an error.
pub(crate) fn accept(response: Response<RecvStream>) -> Result<RecvStream, Error> {
    let (head, body) = response.into_parts();
    match Error::in_head(head.status, &head.headers) {
        Some(error) => Err(error),
        // Success, but nothing follows: not even the message.
        None if body.is_end_stream() => Err(Error::protocol("the answer is empty")),
        None => Ok(body),
    }
}

/// A chunk, whose flow-control window is released at once: answers are bounded.
pub(crate) fn release(body: &mut RecvStream, chunk: Bytes) -> Result<Bytes, Error> {
    body.flow_control().release_capacity(chunk.len())?;
    Ok(chunk)
}

/// The error in the trailers, if any.
pub(crate) async fn end(body: &mut RecvStream) -> Result<Option<Error>, Error> {
    let trailers = body.trailers().await?.unwrap_or_default();
    Ok(Error::in_trailers(&trailers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_written_in_the_finest_unit_that_fits() {
        // Scenario: durations from 7 ns to ten years.
        // Expected: at most 8 digits each; none where even seconds do not fit.
        let written = |timeout| timeout_header(timeout).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(written(Duration::from_nanos(7)).unwrap(), "7n");
        assert_eq!(written(Duration::from_millis(99)).unwrap(), "99000000n");
        assert_eq!(written(Duration::from_millis(700)).unwrap(), "700000u");
        assert_eq!(written(Duration::from_secs(100)).unwrap(), "100000m");
        assert_eq!(written(Duration::from_secs(1_000_000)).unwrap(), "1000000S");
        assert_eq!(written(Duration::from_secs(u64::MAX)), None);
    }

    #[tokio::test]
    async fn a_token_is_in_no_debug_output() {
        // Scenario: a builder, a client, an admin client and a stream with a token, printed as a caller's log
        // prints what holds them. Expected: the name of the header and not its value.
        let builder = crate::Client::builder("http://127.0.0.1:1").token("s3cret");
        let client = builder.clone().connect_lazy().unwrap();
        let admin = crate::AdminClient::from(client.clone());
        let stream = client.stream();
        for text in [
            format!("{builder:?}"),
            format!("{client:?}"),
            format!("{admin:?}"),
            format!("{stream:?}"),
        ] {
            assert!(
                text.contains("authorization") && !text.contains("s3cret"),
                "{text}"
            );
        }
    }

    #[test]
    fn metadata_cannot_take_the_place_of_what_grpc_sends() {
        // Scenario: a custom name; names of gRPC and HTTP/2; a binary one; invalid names; a value with a line
        // end. Expected: only the first is accepted.
        assert!(metadata("x-tenant", "blue").is_ok());
        for name in [
            "content-type",
            "te",
            "grpc-timeout",
            "grpc-status",
            "host",
            "user-agent",
            "connection",
            "Keep-Alive",
            "proxy-connection",
            "transfer-encoding",
            "upgrade",
            "trace-bin",
            "",
            "a b",
            ":path",
        ] {
            assert!(
                matches!(
                    metadata(name, "v"),
                    Err(Error::Invalid {
                        field: "metadata",
                        ..
                    })
                ),
                "{name}"
            );
        }
        assert!(metadata("x", "a\nb").is_err());
    }

    #[test]
    fn a_second_token_replaces_the_first() {
        // Scenario: a token and a tenant, then another of each, as a call and a stream send them. Expected: the second token
        // alone; both tenants.
        let pair = |token, tenant| {
            let pairs = [("authorization", token), ("x-tenant", tenant)];
            pairs.map(|(name, value)| metadata(name, value).unwrap())
        };
        let mut options = CallOptions::new(None, &pair("Bearer old", "blue"));
        options.add_metadata(&pair("Bearer new", "red"));
        for head in [options.call(Uri::default(), None), options.stream(Uri::default())] {
            let all = |name| head.headers().get_all(name).iter().collect::<Vec<_>>();
            assert_eq!(all("authorization"), ["Bearer new"]);
            assert_eq!(all("x-tenant"), ["blue", "red"]);
        }
    }
}
