//! Errors of calls: the server's status with its details, the connection, the deadline, an answer that breaks
//! the contract. Errors of single items are `ItemError`.

use crate::code::Code;
use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use percent_encoding::percent_decode;
use prost::Message as _;
use ringfetch_proto::RpcStatus;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tonic_types::{ErrorDetails, RpcStatusExt as _};

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_STATUS_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
/// Peers send base64 with and without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Why a call or a stream's request failed as a whole.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server returned a status other than OK.
    #[error(transparent)]
    Status(Box<StatusError>),
    /// The connection could not be opened, or broke before the answer was complete.
    #[error("the connection failed: {message}")]
    #[non_exhaustive]
    Transport {
        /// The causes, outermost first.
        message: String,
        /// Whether a request was sent: then the server may have received it, and done what it asks for.
        sent: bool,
        /// Whether the peers refused to agree on TLS, which they would again.
        refused: bool,
    },
    /// The call's timeout passed on the client's side, while it waited for its turn (`Builder::max_in_flight`) or for its answer;
    /// then whether the server did the reads is unknown. A call that still waits for a connection then fails with `Transport`,
    /// or as its last attempt did.
    #[error("no answer within the timeout; raise it, or send less at once")]
    DeadlineExceeded,
    /// The answer contradicts the wire contract: a faulty server, or one of another version.
    #[error("the server's answer breaks the contract: {problem}")]
    #[non_exhaustive]
    Protocol {
        /// What is wrong with it.
        problem: String,
    },
    /// The stream ended before this request was answered. Open a new one; the request may be sent again on it if
    /// [`Error::is_retryable`]. Code, hint and fields are those of the cause.
    #[error("the stream broke: {cause}")]
    #[non_exhaustive]
    StreamBroken {
        /// What ended it.
        cause: Arc<Error>,
    },
    /// A read of an object ([`crate::Client::read_object`]) cannot be completed: the object was written to, or was replaced or
    /// removed after the connection broke or the server failed, and no server in reach has the version that the read began with.
    /// Discard what it has returned, and read the object again. Code and fields are those of the cause.
    #[error("the version of the object that was being read is gone, from byte {offset} on: {cause}")]
    #[non_exhaustive]
    VersionLost {
        /// Offset in the object of the first byte that is missing.
        offset: u64,
        /// How a server refused the rest.
        cause: Arc<Error>,
    },
    /// An invalid argument. Nothing was sent.
    #[error("{field}: {problem}")]
    #[non_exhaustive]
    Invalid {
        /// The argument.
        field: &'static str,
        /// What is wrong and how to fix it.
        problem: String,
    },
}

/// An error status from the server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
#[non_exhaustive]
pub struct StatusError {
    /// The gRPC code.
    pub code: Code,
    /// What is wrong and how to fix it.
    pub message: String,
    /// A retry makes sense after this long (`google.rpc.RetryInfo`). `None`: the server does not suggest one.
    pub retry_after: Option<Duration>,
    /// Which fields of the request are wrong (`google.rpc.BadRequest`).
    pub field_violations: Vec<FieldViolation>,
    /// What went wrong, for programs (`google.rpc.ErrorInfo`): `TOO_MANY_ITEMS`, `PRECONDITION_FAILED`, ...;
    /// empty if the server does not say.
    pub reason: String,
    /// Details of the reason: for `PRECONDITION_FAILED` the `etag` of the current version.
    pub metadata: HashMap<String, String>,
}

/// A field of the request that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FieldViolation {
    /// Path of the field.
    pub field: String,
    /// Why it is wrong.
    pub description: String,
}

impl Error {
    /// What ended the stream or the read, or else this.
    fn root(&self) -> &Self {
        if let Self::StreamBroken { cause } | Self::VersionLost { cause, .. } = self {
            cause.root()
        } else {
            self
        }
    }

    fn status(&self) -> Option<&StatusError> {
        if let Self::Status(status) = self.root() {
            Some(status)
        } else {
            None
        }
    }

    /// The gRPC code, if the server returned one; also `DeadlineExceeded` if the timeout passed on the
    /// client's side.
    pub fn code(&self) -> Option<Code> {
        if matches!(self.root(), Self::DeadlineExceeded) {
            return Some(Code::DeadlineExceeded);
        }
        self.status().map(|status| status.code)
    }

    /// The server's hint of when to retry.
    pub fn retry_after(&self) -> Option<Duration> {
        self.status().and_then(|status| status.retry_after)
    }

    /// The request's fields that the server rejects.
    pub fn field_violations(&self) -> &[FieldViolation] {
        self.status().map_or(&[], |status| &status.field_violations)
    }

    /// Whether the same request may succeed if sent again, after `StreamBroken` on another stream; see the crate's
    /// documentation.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Status(status) => {
                status.code == Code::Unavailable
                    || (status.code == Code::ResourceExhausted && status.retry_after.is_some())
            }
            Self::Transport { refused, .. } => !refused,
            Self::StreamBroken { cause } => cause.is_retryable(),
            Self::DeadlineExceeded
            | Self::Protocol { .. }
            | Self::VersionLost { .. }
            | Self::Invalid { .. } => false,
        }
    }

    /// One word for counting errors: the gRPC code's name, or `TRANSPORT`, `PROTOCOL`, `STREAM_BROKEN`,
    /// `VERSION_LOST`, `INVALID`.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Status(status) => status.code.as_str(),
            Self::DeadlineExceeded => Code::DeadlineExceeded.as_str(),
            Self::Transport { .. } => "TRANSPORT",
            Self::Protocol { .. } => "PROTOCOL",
            Self::StreamBroken { .. } => "STREAM_BROKEN",
            Self::VersionLost { .. } => "VERSION_LOST",
            Self::Invalid { .. } => "INVALID",
        }
    }

    pub(crate) fn protocol(problem: impl Into<String>) -> Self {
        Self::Protocol {
            problem: problem.into(),
        }
    }

    pub(crate) fn invalid(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid {
            field,
            problem: problem.into(),
        }
    }

    /// A connection that could not be opened, so that nothing was sent.
    pub(crate) fn unreachable(message: String) -> Self {
        Self::Transport {
            message,
            sent: false,
            refused: false,
        }
    }

    /// A connection whose peer, or whose certificate, is not accepted.
    pub(crate) fn refused(message: String) -> Self {
        Self::Transport {
            message,
            sent: false,
            refused: true,
        }
    }

    /// The error in the head of an answer, if any: a gRPC status, or the HTTP status or the type of the answer of a
    /// server that does not speak gRPC (mapped by gRPC's "HTTP to gRPC Status Code Mapping").
    pub(crate) fn in_head(status: StatusCode, headers: &HeaderMap) -> Option<Self> {
        if headers.contains_key(GRPC_STATUS) {
            return Self::in_trailers(headers);
        }
        let code = match status.as_u16() {
            200 => {
                let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
                let problem = || {
                    let kind = String::from_utf8_lossy(kind);
                    Self::protocol(format!("it is of type {kind:?}; is this the gRPC address?"))
                };
                return (!kind.starts_with(b"application/grpc")).then(problem);
            }
            400 => Code::Internal,
            401 => Code::Unauthenticated,
            403 => Code::PermissionDenied,
            404 => Code::Unimplemented,
            429 | 502..=504 => Code::Unavailable,
            _ => Code::Unknown,
        };
        let message = format!("HTTP status {status}; is this the gRPC address?");
        Some(Self::of_server(code, message, &ErrorDetails::new()))
    }

    /// The error in trailers, if any. A message or details that cannot be read leave the code as it is: it says whether to try
    /// again. (tonic's `Status::from_header_map` replaces it, or panics.)
    pub(crate) fn in_trailers(trailers: &HeaderMap) -> Option<Self> {
        let Some(status) = trailers.get(GRPC_STATUS) else {
            return Some(Self::protocol("the answer ends without a grpc-status"));
        };
        if status == "0" {
            return None;
        }
        let number = status.to_str().ok().and_then(|number| number.parse().ok());
        let code = number.and_then(Code::from_number).unwrap_or(Code::Unknown);
        let text = |name| trailers.get(name).map_or(&b""[..], HeaderValue::as_bytes);
        let message = percent_decode(text(GRPC_MESSAGE)).decode_utf8_lossy();
        let details = BASE64.decode(text(GRPC_STATUS_DETAILS)).ok();
        let details = details.and_then(|details| RpcStatus::decode(&*details).ok());
        let details = details.map_or_else(ErrorDetails::new, |status| status.get_error_details());
        Some(Self::of_server(code, message.into_owned(), &details))
    }

    fn of_server(code: Code, message: String, details: &ErrorDetails) -> Self {
        let retry_after = details.retry_info().and_then(|info| info.retry_delay);
        let field_violations = details
            .bad_request()
            .map(|bad| bad.field_violations.as_slice())
            .unwrap_or_default()
            .iter()
            .map(|violation| FieldViolation {
                field: violation.field.clone(),
                description: violation.description.clone(),
            })
            .collect();
        let info = details.error_info();
        Self::Status(Box::new(StatusError {
            code,
            message,
            retry_after,
            field_violations,
            reason: info.map_or_else(String::new, |info| info.reason.clone()),
            metadata: info.map_or_else(HashMap::new, |info| info.metadata.clone()),
        }))
    }

    /// A stream's request that failed as a whole.
    pub(crate) fn from_rpc_status(status: RpcStatus) -> Self {
        let Some(code) = Code::from_number(status.code) else {
            return Self::protocol("a request of the stream failed with code OK");
        };
        let details = status.get_error_details();
        Self::of_server(code, status.message, &details)
    }
}

impl From<h2::Error> for Error {
    /// A connection or stream that ended before its answer did.
    fn from(error: h2::Error) -> Self {
        Self::Transport {
            message: error.to_string(),
            sent: true,
            refused: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: &'static str, message: &'static [u8], details: &'static str) -> Box<StatusError> {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static(code));
        trailers.insert("grpc-message", HeaderValue::from_bytes(message).unwrap());
        trailers.insert("grpc-status-details-bin", HeaderValue::from_static(details));
        let Some(Error::Status(status)) = Error::in_trailers(&trailers) else {
            panic!("{trailers:?}");
        };
        status
    }

    #[test]
    fn a_code_is_that_of_the_server_whatever_is_wrong_with_the_rest() {
        // Scenario: a message that is not UTF-8, encoded or as it is, or whose encoding is cut off; details that are not base64
        // or cut off, and good ones, with and without padding. Expected: the code, as much of the message as can be read, and the
        // details that can be read: UNAVAILABLE is tried again.
        for (message, want) in [
            (&b"%C3%A9t%C3%A9%0Aa"[..], "\u{e9}t\u{e9}\na"),
            (b"a%FFb", "a\u{fffd}b"),
            (b"a\xffb", "a\u{fffd}b"),
            (b"a%2", "a%2"),
        ] {
            let status = status("14", message, "");
            assert_eq!((status.code, status.message.as_str()), (Code::Unavailable, want));
            assert!(Error::Status(status).is_retryable());
        }
        // `google.rpc.Status` with a `RetryInfo` of 5 s.
        let hint = "CA4aMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIBQ";
        let padded = "CA4aMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIBQ==";
        for (details, seconds) in [
            ("!!!", None),
            ("____", None),
            ("CA4aMAoo", None),
            (hint, Some(5)),
            (padded, Some(5)),
        ] {
            let status = status("14", b"m", details);
            assert_eq!(status.code, Code::Unavailable, "{details}");
            assert_eq!(status.retry_after, seconds.map(Duration::from_secs), "{details}");
        }
        for code in ["17", "x", "", "00"] {
            assert_eq!(status(code, b"m", "").code, Code::Unknown, "{code}");
        }
    }
}
