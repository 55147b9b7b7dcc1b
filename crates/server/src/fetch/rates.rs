//! Rate limits of principals (ADR 0016): requests and bytes are charged before the work is done.

use super::request::{FetchError, RateLimit};
use super::{Fetcher, RequestContext};
use crate::access::Principal;
use crate::caller::Connection;
use crate::rate::OverRate;
use std::sync::Arc;

/// The bytes of a response that were charged to its principal.
#[derive(Debug)]
pub(super) struct ChargedBytes<'a> {
    principal: Option<&'a Principal>,
    bytes: u64,
}

fn refused(rate: RateLimit) -> impl FnOnce(OverRate) -> FetchError {
    move |OverRate { per_s, retry_after }| FetchError::OverRate {
        rate,
        max: per_s,
        retry_after,
    }
}

/// Counts bytes that were read for a principal.
pub(super) fn count_bytes(context: &RequestContext, bytes: usize) {
    let connection = context.connection.as_deref();
    if let Some(principal) = connection.and_then(Connection::principal) {
        principal.count_bytes(u64::try_from(bytes).unwrap_or(u64::MAX));
    }
}

impl Fetcher {
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
    pub(super) fn charge_bytes(context: &RequestContext, bytes: u64) -> Result<ChargedBytes<'_>, FetchError> {
        let charged = ChargedBytes::of(context, bytes);
        if let Some(principal) = charged.principal {
            principal.take_bytes(bytes).map_err(refused(RateLimit::Bytes))?;
        }
        Ok(charged)
    }
}

impl<'a> ChargedBytes<'a> {
    /// What was charged for this response.
    pub(super) fn of(context: &'a RequestContext, bytes: u64) -> Self {
        let connection = context.connection.as_deref();
        let principal = connection
            .and_then(Connection::principal)
            .map(|principal| &**principal);
        Self { principal, bytes }
    }

    /// Returns the charge: nothing is sent.
    pub(super) fn give_back(&self) {
        if let Some(principal) = self.principal {
            principal.give_back_bytes(self.bytes);
        }
    }
}
