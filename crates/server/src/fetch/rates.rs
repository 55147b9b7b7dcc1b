//! Rate limits of principals (ADR 0016): requests and bytes are charged before the work is done.

use super::RequestContext;
use super::request::{FetchError, RateLimit};
use crate::access::Principal;
use crate::caller::Connection;
use crate::rate::OverRate;
use std::sync::Arc;

fn refused(rate: RateLimit) -> impl FnOnce(OverRate) -> FetchError {
    move |OverRate { per_s, retry_after }| FetchError::OverRate {
        rate,
        max: per_s,
        retry_after,
    }
}

fn principal_of(context: &RequestContext) -> Option<&Arc<Principal>> {
    context.connection.as_deref().and_then(Connection::principal)
}

/// Counts bytes that were read for a principal.
pub(super) fn count_bytes(context: &RequestContext, bytes: usize) {
    if let Some(principal) = principal_of(context) {
        principal.count_bytes(u64::try_from(bytes).unwrap_or(u64::MAX));
    }
}

/// Charges a request, whatever its outcome.
///
/// # Errors
/// `OverRate`.
pub(super) fn charge_request(reader: Option<&Arc<Connection>>) -> Result<(), FetchError> {
    reader
        .and_then(|reader| reader.principal())
        .map_or(Ok(()), |principal| principal.take_request())
        .map_err(refused(RateLimit::Requests))
}

/// Charges the bytes of a response before it is read. A response larger than what is left is granted;
/// further requests are then refused until the debt is paid back. The limits bound a response's length,
/// and so the debt; a score's debt is bounded by its candidates (`limits.items_per_request`).
///
/// # Errors
/// `OverRate`.
pub(super) fn charge_bytes(context: &RequestContext, bytes: u64) -> Result<(), FetchError> {
    principal_of(context)
        .map_or(Ok(()), |principal| principal.take_bytes(bytes))
        .map_err(refused(RateLimit::Bytes))
}

/// Returns what was charged for a response: nothing is sent.
pub(super) fn give_back_bytes(context: &RequestContext, bytes: u64) {
    if let Some(principal) = principal_of(context) {
        principal.give_back_bytes(bytes);
    }
}
