//! Maps every error to its gRPC code, HTTP status, problem type and retry hint.
//!
//! There is a retry hint exactly if the same request may succeed later. Messages contain names chosen by
//! clients, and are cut to fit in a gRPC trailer. No wildcard arms: a new error does not compile until it has
//! a mapping.

use crate::fetch::FetchError;
use ::http::StatusCode as Http;
use ringfetch_engine::error::{ReadError, Resource, is_of_device, is_temporary};
use rustix::io::Errno;
use std::collections::HashMap;
use std::time::Duration;
use tonic::Code;
use tonic_types::{ErrorDetails, StatusExt as _};

/// The status of an error on both transports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorStatus {
    /// The gRPC status code.
    pub grpc: Code,
    /// The HTTP status.
    pub http: Http,
    /// The problem type's last path segment and the metrics' word: `out-of-range`, `overloaded`, ...
    pub slug: &'static str,
    /// When a retry makes sense.
    pub retry_after: Option<Duration>,
}

impl ErrorStatus {
    const fn new(grpc: Code, http: Http, slug: &'static str) -> Self {
        Self {
            grpc,
            http,
            slug,
            retry_after: None,
        }
    }

    /// Whether only another request can succeed.
    pub(crate) fn is_requests_fault(&self) -> bool {
        self.retry_after.is_none() && self.http.is_client_error()
    }

    const fn retry(self, after: Duration) -> Self {
        Self {
            retry_after: Some(after),
            ..self
        }
    }
}

/// The domain of `google.rpc.ErrorInfo`.
pub const ERROR_DOMAIN: &str = "ringfetch";

/// Longest message that is sent, in bytes. grpc-core and grpc-java refuse more than 8 KiB of trailers, which
/// contain a message up to three times (percent-encoded, and twice in base64 in the details).
pub(crate) const MESSAGE_BYTES_MAX: usize = 512;

/// Queues and memory drain at the rate of the disk: thousands of reads in this time.
const RETRY_OVERLOADED: Duration = Duration::from_millis(50);
/// A large directory takes about this long to walk.
const RETRY_LISTING: Duration = Duration::from_millis(200);
/// A source that changed between look-up and read, again and again, is being written.
const RETRY_CHANGING: Duration = Duration::from_secs(1);
/// The new line is in force already, and the connection is being closed.
const RETRY_REVOKED: Duration = Duration::from_millis(50);
/// By then the client has found another replica, or this one has restarted.
const RETRY_DRAINING: Duration = Duration::from_secs(1);

/// The status of a failed item.
pub fn of_read(error: &ReadError) -> ErrorStatus {
    let (grpc, http, slug) = match error {
        // Over HTTP an index is part of the path, and a resource that does not exist is a 404.
        ReadError::IndexOutOfRange { .. } => (Code::OutOfRange, Http::NOT_FOUND, "index-out-of-range"),
        ReadError::RangeOutOfRange { .. } => (
            Code::OutOfRange,
            Http::RANGE_NOT_SATISFIABLE,
            "range-out-of-range",
        ),
        ReadError::RangeOverflow { .. } => (Code::InvalidArgument, Http::BAD_REQUEST, "range-overflow"),
        ReadError::ZeroLength => (Code::InvalidArgument, Http::BAD_REQUEST, "zero-length"),
        ReadError::ItemTooLarge { .. } => {
            (Code::ResourceExhausted, Http::PAYLOAD_TOO_LARGE, "item-too-large")
        }
        ReadError::ResponseTooLarge { .. } => (
            Code::ResourceExhausted,
            Http::PAYLOAD_TOO_LARGE,
            "response-too-large",
        ),
        ReadError::ObjectNameInvalid { .. } => {
            (Code::InvalidArgument, Http::BAD_REQUEST, "object-name-invalid")
        }
        ReadError::ObjectNotFound { .. } => (Code::NotFound, Http::NOT_FOUND, "object-not-found"),
        ReadError::ObjectUnreadable { name: _, errno } => return of_unreadable(*errno),
        // Not ABORTED: clients would send the same request again.
        ReadError::VersionMismatch { .. } => (
            Code::FailedPrecondition,
            Http::PRECONDITION_FAILED,
            "precondition-failed",
        ),
        ReadError::Truncated { .. } => (Code::DataLoss, Http::INTERNAL_SERVER_ERROR, "truncated"),
        ReadError::Device { errno, .. } if is_temporary(*errno) => return unreadable_for_now("unreadable"),
        ReadError::Device { .. } => (Code::DataLoss, Http::INTERNAL_SERVER_ERROR, "device-error"),
        ReadError::Overloaded { resource } => {
            return overloaded(match resource {
                Resource::CallerMemory
                | Resource::PrincipalMemory
                | Resource::ConnectionMemory
                | Resource::CallerReads
                | Resource::CallerObjects => true,
                Resource::QueuedReads | Resource::Memory | Resource::OpenObjects => false,
            });
        }
        ReadError::DeadlineExceeded => (Code::DeadlineExceeded, Http::GATEWAY_TIMEOUT, "deadline-exceeded"),
        ReadError::Draining => {
            let status = ErrorStatus::new(Code::Unavailable, Http::SERVICE_UNAVAILABLE, "draining");
            return status.retry(RETRY_DRAINING);
        }
        ReadError::ShardFailed => (Code::Internal, Http::INTERNAL_SERVER_ERROR, "engine-failed"),
    };
    ErrorStatus::new(grpc, http, slug)
}

/// 429 means the client is at fault, which is right only if the caller itself holds the resource.
fn overloaded(own: bool) -> ErrorStatus {
    let http = if own {
        Http::TOO_MANY_REQUESTS
    } else {
        Http::SERVICE_UNAVAILABLE
    };
    ErrorStatus::new(Code::ResourceExhausted, http, "overloaded").retry(RETRY_OVERLOADED)
}

fn of_unreadable(errno: i32) -> ErrorStatus {
    let errno = Errno::from_raw_os_error(errno);
    if errno == Errno::ACCESS || errno == Errno::PERM {
        ErrorStatus::new(Code::PermissionDenied, Http::FORBIDDEN, "object-unreadable")
    } else if is_out_of_files(errno) {
        unreadable_for_now("out-of-files")
    } else if is_temporary(errno.raw_os_error()) {
        unreadable_for_now("object-unreadable")
    } else if is_of_device(errno.raw_os_error()) {
        // The same error as when the object was already open: opening looks up the name, and tries a direct read.
        ErrorStatus::new(Code::DataLoss, Http::INTERNAL_SERVER_ERROR, "device-error")
    } else {
        ErrorStatus::new(Code::Internal, Http::INTERNAL_SERVER_ERROR, "object-unreadable")
    }
}

/// As of an object that cannot be opened, but for a missing permission: which directory it is, no client chooses.
fn of_listing(errno: Option<i32>) -> ErrorStatus {
    match errno.map(Errno::from_raw_os_error) {
        Some(errno) if is_out_of_files(errno) || is_temporary(errno.raw_os_error()) => {
            let status = ErrorStatus::new(Code::Unavailable, Http::SERVICE_UNAVAILABLE, "listing-failed");
            status.retry(RETRY_LISTING)
        }
        Some(errno) if is_of_device(errno.raw_os_error()) => {
            ErrorStatus::new(Code::DataLoss, Http::INTERNAL_SERVER_ERROR, "device-error")
        }
        Some(_) | None => ErrorStatus::new(Code::Internal, Http::INTERNAL_SERVER_ERROR, "listing-failed"),
    }
}

/// Other requests release descriptors when they finish.
fn is_out_of_files(errno: Errno) -> bool {
    errno == Errno::MFILE || errno == Errno::NFILE
}

fn unreadable_for_now(slug: &'static str) -> ErrorStatus {
    ErrorStatus::new(Code::Unavailable, Http::SERVICE_UNAVAILABLE, slug).retry(RETRY_OVERLOADED)
}

/// The status of a failed request.
pub fn of_fetch(error: &FetchError) -> ErrorStatus {
    let (grpc, http, slug) = match error {
        FetchError::DatasetNotFound { .. } => (Code::NotFound, Http::NOT_FOUND, "dataset-not-found"),
        FetchError::Forbidden { .. } => (Code::PermissionDenied, Http::FORBIDDEN, "forbidden"),
        FetchError::Revoked => {
            let status = ErrorStatus::new(Code::Unavailable, Http::SERVICE_UNAVAILABLE, "revoked");
            return status.retry(RETRY_REVOKED);
        }
        // 400, as google.rpc maps FAILED_PRECONDITION.
        FetchError::WrongKind { .. } => (Code::FailedPrecondition, Http::BAD_REQUEST, "wrong-kind"),
        FetchError::EmptyBatch { .. } => (Code::InvalidArgument, Http::BAD_REQUEST, "empty-batch"),
        FetchError::ListsDiffer { .. } => (Code::InvalidArgument, Http::BAD_REQUEST, "lists-differ"),
        FetchError::TooManyItems { .. } => {
            (Code::ResourceExhausted, Http::PAYLOAD_TOO_LARGE, "too-many-items")
        }
        FetchError::VectorTooLong { .. } => {
            (Code::ResourceExhausted, Http::PAYLOAD_TOO_LARGE, "item-too-large")
        }
        FetchError::TooManyRequests { own, .. } | FetchError::RequestMemory { own, .. } => {
            return overloaded(*own);
        }
        FetchError::PrincipalRequests { .. } => return overloaded(true),
        FetchError::ListingsBusy { own, .. } => return overloaded(*own).retry(RETRY_LISTING),
        FetchError::OverRate { retry_after, .. } => {
            let status = ErrorStatus::new(Code::ResourceExhausted, Http::TOO_MANY_REQUESTS, "rate-limited");
            return status.retry(*retry_after);
        }
        FetchError::ListingFailed { errno, .. } => return of_listing(*errno),
        FetchError::Changed => {
            let status = ErrorStatus::new(Code::Aborted, Http::SERVICE_UNAVAILABLE, "changing");
            return status.retry(RETRY_CHANGING);
        }
        FetchError::Malformed { .. } => (Code::InvalidArgument, Http::BAD_REQUEST, "malformed"),
        FetchError::Item { error, .. } => return of_read(error),
        FetchError::Read(error) => return of_read(error),
    };
    ErrorStatus::new(grpc, http, slug)
}

/// The request field an error is about, if it is about one.
pub fn field_of(error: &FetchError) -> Option<&str> {
    match error {
        FetchError::DatasetNotFound { .. } | FetchError::Forbidden { .. } | FetchError::WrongKind { .. } => {
            Some("dataset")
        }
        FetchError::EmptyBatch { field }
        | FetchError::ListsDiffer { field, .. }
        | FetchError::TooManyItems { field, .. } => Some(field),
        FetchError::Malformed { field, .. } => Some(field),
        FetchError::Item { .. } | FetchError::Read(_) => {
            matches!(error.read_error(), Some(ReadError::VersionMismatch { .. })).then_some("if_match")
        }
        FetchError::VectorTooLong { .. }
        | FetchError::TooManyRequests { .. }
        | FetchError::PrincipalRequests { .. }
        | FetchError::RequestMemory { .. }
        | FetchError::ListingsBusy { .. }
        | FetchError::OverRate { .. }
        | FetchError::ListingFailed { .. }
        | FetchError::Changed
        | FetchError::Revoked => None,
    }
}

/// The messages of a response's failed items: together at most [`ITEM_MESSAGES_BYTES_MAX`], which clients accept.
/// Items beyond that have an empty one.
#[derive(Debug)]
pub(crate) struct ItemMessages {
    left: usize,
}

/// Most bytes of all messages in a response, as they are sent (in JSON, two for a quote).
pub(crate) const ITEM_MESSAGES_BYTES_MAX: usize = 512 << 10;

impl Default for ItemMessages {
    fn default() -> Self {
        Self {
            left: ITEM_MESSAGES_BYTES_MAX,
        }
    }
}

impl ItemMessages {
    /// The next item's message.
    pub(crate) fn of(&mut self, error: &ReadError) -> String {
        if self.left == 0 {
            return String::new();
        }
        let message = message_of(error);
        let escapes = message
            .bytes()
            .filter(|byte| matches!(byte, b'"' | b'\\'))
            .count();
        let left = self.left.checked_sub(message.len() + escapes);
        self.left = left.unwrap_or(0);
        left.map_or_else(String::new, |_| message)
    }
}

/// An error's message as it is sent: at most 512 bytes, since clients choose parts of it.
pub fn message_of(error: &impl std::fmt::Display) -> String {
    shortened(error.to_string(), MESSAGE_BYTES_MAX)
}

/// A message of at most `bytes_max`, which is above 6. What is too long loses its middle: its end has the reason and the
/// remedy.
pub(crate) fn shortened(mut message: String, bytes_max: usize) -> String {
    const CUT: &str = "...";
    if message.len() > bytes_max {
        let begin = message.floor_char_boundary(bytes_max / 2 - CUT.len());
        let end = message.ceil_char_boundary(message.len() - bytes_max / 2);
        message.replace_range(begin..end, CUT);
    }
    message
}

/// A failed request as a gRPC status with its `google.rpc` details: `ErrorInfo` always (the reason is the
/// slug in capitals), `RetryInfo` if a retry makes sense, otherwise `BadRequest` if the request is at fault.
/// `items_field` is the request field that lists the items, for errors that name no field themselves.
pub fn to_status(error: &FetchError, items_field: &str) -> tonic::Status {
    to_status_naming(error, field_of(error).unwrap_or(items_field))
}

/// As [`to_status`], for a request that has only the one field.
pub(crate) fn to_status_naming(error: &FetchError, field: &str) -> tonic::Status {
    let answer = of_fetch(error);
    let message = message_of(error);
    let reason = reason_of(answer.slug);
    let mut metadata = HashMap::new();
    if let Some(ReadError::VersionMismatch { etag }) = error.read_error() {
        metadata.insert("etag".to_owned(), etag.clone());
    }
    let mut details = ErrorDetails::with_error_info(reason, ERROR_DOMAIN, metadata);
    if let Some(after) = answer.retry_after {
        details.set_retry_info(Some(after));
    } else if answer.is_requests_fault() {
        details.add_bad_request_violation(field, message.clone());
    }
    tonic::Status::with_error_details(answer.grpc, message, details)
}

/// A status with this reason, and a hint if a retry makes sense.
pub(crate) fn status_with(
    code: Code,
    reason: &str,
    message: &str,
    retry_after: Option<Duration>,
) -> tonic::Status {
    let mut details = ErrorDetails::with_error_info(reason, ERROR_DOMAIN, HashMap::new());
    if retry_after.is_some() {
        details.set_retry_info(retry_after);
    }
    tonic::Status::with_error_details(code, message, details)
}

/// The status of a stream that ends because its connection leaves. Another one goes on on another connection.
pub(crate) fn leaving_stream() -> tonic::Status {
    let message = "the daemon closes this connection, as it does with old ones: open another stream";
    status_with(
        Code::Unavailable,
        "CONNECTION_CLOSING",
        message,
        Some(Duration::ZERO),
    )
}

/// The status of a call that is refused before its request is read.
pub(crate) fn refused_call(code: Code, slug: &str, message: &str) -> tonic::Status {
    status_with(code, &reason_of(slug), message, None)
}

/// The status of a call refused for lack of memory before it is read.
pub(crate) fn overloaded_call(message: &str) -> tonic::Status {
    let status = overloaded(true);
    status_with(status.grpc, &reason_of(status.slug), message, status.retry_after)
}

/// The reason of `ErrorInfo`: the slug in capitals.
fn reason_of(slug: &str) -> String {
    slug.replace('-', "_").to_ascii_uppercase()
}

/// A status as the message in its details.
pub fn to_rpc_status(status: &tonic::Status) -> tonic_types::Status {
    use prost::Message as _;
    let detailed = tonic_types::Status::decode(status.details()).ok();
    detailed
        .filter(|detailed| detailed.code != 0)
        .unwrap_or_else(|| tonic_types::Status {
            code: status.code().into(),
            message: status.message().to_owned(),
            details: Vec::new(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_engine::error::ResponseMax;

    #[test]
    fn a_retry_hint_stands_where_a_retry_can_help() {
        // Limits that apply now have RetryInfo and no field; limits on one request have the field and no
        // RetryInfo.
        let now = to_status(&FetchError::TooManyRequests { max: 7, own: false }, "indices");
        assert_eq!(now.code(), Code::ResourceExhausted);
        assert_eq!(
            now.get_details_retry_info().unwrap().retry_delay,
            Some(RETRY_OVERLOADED)
        );
        assert!(now.get_details_bad_request().is_none());

        let never = to_status(
            &ReadError::ResponseTooLarge {
                length: 9,
                max: ResponseMax::of_any(7),
            }
            .into(),
            "indices",
        );
        assert_eq!(never.code(), Code::ResourceExhausted);
        assert!(never.get_details_retry_info().is_none());
        let violations = never.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "indices");
        assert!(violations[0].description.contains("limits.response_bytes"));
    }

    #[test]
    fn a_long_name_does_not_make_a_long_message() {
        // A name of 100 kB of two-byte characters: the message loses its middle, is cut between characters, stays
        // within the limit, and keeps what follows the name.
        let error = FetchError::DatasetNotFound {
            name: "é".repeat(50_000),
            known: "a".into(),
        };
        let status = to_status(&error, "indices");
        let message = status.message();
        assert!(
            message.len() <= MESSAGE_BYTES_MAX && message.contains("é...é"),
            "{message}"
        );
        assert!(message.ends_with("there are: a"), "{message}");
        assert!(status.details().len() < 3 * MESSAGE_BYTES_MAX);
        let unreadable = message_of(&ReadError::ObjectUnreadable {
            name: "o".repeat(1000),
            errno: Errno::ACCESS.raw_os_error(),
        });
        assert_eq!(unreadable.len(), MESSAGE_BYTES_MAX);
        assert!(
            unreadable.ends_with("cannot be opened: Permission denied (os error 13)"),
            "{unreadable}"
        );
    }

    #[test]
    fn errno_decides_how_an_unreadable_object_is_answered() {
        // A missing permission is for the client to fix, a lack of descriptors, threads or memory is temporary, a
        // failed device is the same error as for a read, and anything else is the server's fault. A read that failed for
        // want of memory, or was interrupted too often, may succeed later, and is no loss of data. So it is with a
        // directory that cannot be listed, but for the permission.
        let of = |errno: Errno| {
            of_read(&ReadError::ObjectUnreadable {
                name: "o".into(),
                errno: errno.raw_os_error(),
            })
        };
        assert_eq!(of(Errno::ACCESS).grpc, Code::PermissionDenied);
        assert_eq!(of(Errno::MFILE).grpc, Code::Unavailable);
        assert!(of(Errno::NFILE).retry_after.is_some());
        for errno in [Errno::AGAIN, Errno::NOMEM] {
            assert_eq!(of(errno).grpc, Code::Unavailable);
            assert!(of(errno).retry_after.is_some());
        }
        let read = |errno: Errno| ReadError::Device {
            errno: errno.raw_os_error(),
            offset: 0,
            length: 1,
        };
        for errno in [
            Errno::IO,
            Errno::NODATA,
            Errno::NODEV,
            Errno::UCLEAN,
            Errno::NOTCONN,
            Errno::STALE,
        ] {
            assert_eq!(of(errno), of_read(&read(errno)), "{errno}");
            assert_eq!(of(errno).grpc, Code::DataLoss);
        }
        for errno in [Errno::AGAIN, Errno::NOMEM, Errno::INTR, Errno::CANCELED] {
            let answer = of_read(&read(errno));
            assert_eq!(
                (answer.grpc, answer.http),
                (Code::Unavailable, Http::SERVICE_UNAVAILABLE)
            );
            assert_eq!(answer.retry_after, Some(RETRY_OVERLOADED));
            assert_eq!(read(errno).label(), "unreadable");
        }
        // Direct I/O that is required and refused.
        assert_eq!(of(Errno::INVAL).grpc, Code::Internal);
        let listed = |errno: Option<Errno>| {
            let answer = of_fetch(&FetchError::ListingFailed {
                problem: "p".into(),
                errno: errno.map(Errno::raw_os_error),
            });
            (answer.grpc, answer.retry_after.is_some())
        };
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN] {
            assert_eq!(listed(Some(errno)), (Code::Unavailable, true), "{errno}");
        }
        assert_eq!(listed(Some(Errno::IO)), (Code::DataLoss, false));
        for errno in [Some(Errno::ACCESS), None] {
            assert_eq!(listed(errno), (Code::Internal, false));
        }
    }
}
