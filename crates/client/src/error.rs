//! What can go wrong with a call: the server's status with its details, the connection, the deadline, an answer that
//! breaks the contract. What is wrong with one item of a batch is an `ItemError` and not here.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;
use tonic::{Code, Status, TimeoutExpired};
use tonic_types::{ErrorDetails, RpcStatusExt as _, StatusExt as _};

/// Why a call or a stream's request failed as a whole.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server answered with a status other than OK.
    #[error(transparent)]
    Status(Box<StatusError>),
    /// The connection could not be made, or broke before the answer was whole.
    #[error("the connection failed: {message}")]
    Transport {
        /// The causes, outermost first.
        message: String,
    },
    /// The call's timeout passed on this side. Whether the server did the reads is unknown.
    #[error("no answer within the timeout; raise it, or send less at once")]
    DeadlineExceeded,
    /// The answer contradicts the wire contract: a faulty server, or one of another version.
    #[error("the server's answer breaks the contract: {problem}")]
    Protocol {
        /// What is wrong with it.
        problem: String,
    },
    /// The stream ended with this request unanswered. Open a new one; the request may be sent again.
    #[error("the stream broke: {cause}")]
    StreamBroken {
        /// What ended it.
        cause: Arc<Error>,
    },
    /// An argument that no server could answer. Nothing was sent.
    #[error("{field}: {problem}")]
    Invalid {
        /// The argument.
        field: &'static str,
        /// What is wrong and what would mend it.
        problem: String,
    },
}

/// A status that the server answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", code_name(*.code))]
pub struct StatusError {
    /// The gRPC code.
    pub code: Code,
    /// What is wrong and what would mend it.
    pub message: String,
    /// When a retry makes sense (`google.rpc.RetryInfo`): after this long. None: the server does not suggest one.
    pub retry_after: Option<Duration>,
    /// Which fields of the request are wrong (`google.rpc.BadRequest`).
    pub field_violations: Vec<FieldViolation>,
}

/// A field of the request that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldViolation {
    /// Path of the field.
    pub field: String,
    /// Why it is wrong.
    pub description: String,
}

impl Error {
    /// The gRPC code, if the server answered one; `DeadlineExceeded` also when the timeout passed on this side.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Status(status) => Some(status.code),
            Self::DeadlineExceeded => Some(Code::DeadlineExceeded),
            Self::Transport { .. }
            | Self::Protocol { .. }
            | Self::StreamBroken { .. }
            | Self::Invalid { .. } => None,
        }
    }

    /// The server's hint when to try again.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status(status) => status.retry_after,
            Self::Transport { .. }
            | Self::DeadlineExceeded
            | Self::Protocol { .. }
            | Self::StreamBroken { .. }
            | Self::Invalid { .. } => None,
        }
    }

    /// The fields of the request that the server finds wrong.
    pub fn field_violations(&self) -> &[FieldViolation] {
        match self {
            Self::Status(status) => &status.field_violations,
            Self::Transport { .. }
            | Self::DeadlineExceeded
            | Self::Protocol { .. }
            | Self::StreamBroken { .. }
            | Self::Invalid { .. } => &[],
        }
    }

    /// Whether the same request may succeed if it is sent again; see the crate's documentation.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Status(status) => {
                status.code == Code::Unavailable
                    || (status.code == Code::ResourceExhausted && status.retry_after.is_some())
            }
            Self::Transport { .. } => true,
            Self::DeadlineExceeded
            | Self::Protocol { .. }
            | Self::StreamBroken { .. }
            | Self::Invalid { .. } => false,
        }
    }

    /// One word for counting errors: the gRPC code's name, or `TRANSPORT`, `PROTOCOL`, `STREAM_BROKEN`, `INVALID`.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Status(status) => code_name(status.code),
            Self::DeadlineExceeded => code_name(Code::DeadlineExceeded),
            Self::Transport { .. } => "TRANSPORT",
            Self::Protocol { .. } => "PROTOCOL",
            Self::StreamBroken { .. } => "STREAM_BROKEN",
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

    /// A status as the transport hands it over: only one that came over the wire has no source.
    pub(crate) fn from_status(status: Status) -> Self {
        if let Some(source) = status.source() {
            let causes = Causes(Some(source));
            if causes.clone().any(|cause| cause.is::<TimeoutExpired>()) {
                return Self::DeadlineExceeded;
            }
            return Self::transport(status.message(), causes);
        }
        // Made on this side, without a source, when a message is longer than the limit (tonic 0.14, codec/decode.rs).
        if status
            .message()
            .starts_with("Error, decoded message length too large")
        {
            return Self::protocol(format!(
                "{}; raise the builder's max_answer_bytes, or ask for less at once",
                status.message()
            ));
        }
        let details = status.get_error_details();
        Self::of_server(status.code(), status.message().to_owned(), &details)
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
        Self::Status(Box::new(StatusError {
            code,
            message,
            retry_after,
            field_violations,
        }))
    }

    /// A request of a stream that failed as a whole.
    pub(crate) fn from_rpc_status(status: tonic_types::Status) -> Self {
        let code = Code::from_i32(status.code);
        if code == Code::Ok {
            return Self::protocol("a request of the stream failed with code OK");
        }
        let details = status.get_error_details();
        Self::of_server(code, status.message, &details)
    }

    /// A connection that could not be made.
    pub(crate) fn from_connect(error: tonic::transport::Error) -> Self {
        Self::transport("", Causes(Some(&error)))
    }

    fn transport(message: &str, causes: Causes<'_>) -> Self {
        // Causes repeat one another; a sentence that says each thing once is the readable one.
        let mut said = message.to_owned();
        for cause in causes.map(ToString::to_string) {
            if !said.contains(&cause) {
                if !said.is_empty() {
                    said.push_str(": ");
                }
                said.push_str(&cause);
            }
        }
        Self::Transport { message: said }
    }
}

/// An error and what caused it, outermost first.
#[derive(Clone)]
struct Causes<'a>(Option<&'a (dyn StdError + 'static)>);

impl<'a> Iterator for Causes<'a> {
    type Item = &'a (dyn StdError + 'static);

    fn next(&mut self) -> Option<Self::Item> {
        let this = self.0?;
        self.0 = this.source();
        Some(this)
    }
}

/// The code as gRPC spells it.
pub(crate) fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
impl From<Status> for Error {
    /// A status that a call of one's own was answered with, told as this client tells it.
    fn from(status: Status) -> Self {
        Self::from_status(status)
    }
}
