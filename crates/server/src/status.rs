//! The one table from an error to its gRPC code, HTTP status, problem type and retry hint.

use crate::fetch::FetchError;
use ringfetch_engine::error::ReadError;
use std::time::Duration;

/// How an error is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The gRPC status code.
    pub grpc: tonic::Code,
    /// The HTTP status.
    pub http: ::http::StatusCode,
    /// The problem type's last path segment and the metrics' word: `out-of-range`, `overloaded`, ...
    pub slug: &'static str,
    /// When a retry makes sense.
    pub retry_after: Option<Duration>,
}

/// How a failed item is answered.
pub fn of_read(error: &ReadError) -> Answer {
    let _ = error;
    todo!()
}

/// How a failed request is answered.
pub fn of_fetch(error: &FetchError) -> Answer {
    let _ = error;
    todo!()
}

/// The request field an error is about, if it is about one.
pub fn field_of(error: &FetchError) -> Option<&str> {
    let _ = error;
    todo!()
}
