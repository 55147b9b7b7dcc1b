//! Counts refused requests by reason: `ringfetch_rejected_total{reason}`, and, before routing,
//! `ringfetch_requests_refused_total{transport,reason}`.

use super::request::{FetchError, RateLimit};
use crate::caller::Connection;
use crate::listener::note_refusal;
use prometheus::{IntCounter, IntCounterVec, Opts};
use ringfetch_engine::error::{ReadError, Resource};
use std::sync::Arc;

/// The reasons with their labels.
macro_rules! rejections {
    ($($reason:ident = $label:literal,)*) => {
        /// Why a request was refused: the `reason` label of `ringfetch_rejected_total`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Rejection { $($reason,)* }

        /// Every rejection at its index, `reason as usize`, with its label.
        const REJECTIONS: [(Rejection, &str); Rejection::COUNT] = [$((Rejection::$reason, $label)),*];

        impl Rejection {
            /// How many there are.
            pub(crate) const COUNT: usize = [$($label),*].len();
        }
    };
}

rejections! {
    Items = "items",
    ResponseBytes = "response_bytes",
    RequestsInFlight = "requests_in_flight",
    Deadline = "deadline",
    Draining = "draining",
    QueuedReads = "queued_reads",
    Memory = "memory",
    CallerMemory = "caller_memory",
    ConnectionMemory = "connection_memory",
    CallerReads = "caller_reads",
    RequestMemory = "request_memory",
    Listings = "listings",
    OpenObjects = "open_objects",
    CallerObjects = "caller_objects",
    RequestsPerSecond = "requests_per_second",
    BytesPerSecond = "bytes_per_second",
    PrincipalRequests = "principal_requests",
    PrincipalMemory = "principal_memory",
}

impl Rejection {
    /// All, with their labels.
    pub(crate) fn all() -> impl Iterator<Item = (Self, &'static str)> {
        REJECTIONS.into_iter()
    }

    /// Whether it is by a limit of the principal's own.
    pub(crate) fn is_principals(self) -> bool {
        matches!(
            self,
            Self::PrincipalRequests | Self::PrincipalMemory | Self::RequestsPerSecond | Self::BytesPerSecond
        )
    }

    /// `None` for errors that are not refusals: wrong requests and failed reads.
    pub(super) fn of(error: &FetchError) -> Option<Self> {
        match error {
            FetchError::TooManyItems { .. } => Some(Self::Items),
            FetchError::Read(ReadError::ResponseTooLarge { .. }) => Some(Self::ResponseBytes),
            FetchError::TooManyRequests { .. } => Some(Self::RequestsInFlight),
            FetchError::PrincipalRequests { .. } => Some(Self::PrincipalRequests),
            FetchError::Read(ReadError::DeadlineExceeded) => Some(Self::Deadline),
            FetchError::Read(ReadError::Draining) => Some(Self::Draining),
            FetchError::Read(ReadError::Overloaded { resource }) => Some(match resource {
                Resource::QueuedReads => Self::QueuedReads,
                Resource::Memory => Self::Memory,
                Resource::CallerMemory => Self::CallerMemory,
                Resource::PrincipalMemory => Self::PrincipalMemory,
                Resource::ConnectionMemory => Self::ConnectionMemory,
                Resource::CallerReads => Self::CallerReads,
                Resource::OpenObjects => Self::OpenObjects,
                Resource::CallerObjects => Self::CallerObjects,
            }),
            FetchError::RequestMemory { .. } => Some(Self::RequestMemory),
            FetchError::ListingsBusy { .. } => Some(Self::Listings),
            FetchError::OverRate { rate, .. } => Some(match rate {
                RateLimit::Requests => Self::RequestsPerSecond,
                RateLimit::Bytes => Self::BytesPerSecond,
            }),
            FetchError::DatasetNotFound { .. }
            | FetchError::Forbidden { .. }
            | FetchError::Revoked
            | FetchError::WrongKind { .. }
            | FetchError::EmptyBatch { .. }
            | FetchError::ListsDiffer { .. }
            | FetchError::VectorTooLong { .. }
            | FetchError::Malformed { .. }
            | FetchError::ListingFailed { .. }
            | FetchError::Changed
            | FetchError::Item { .. }
            | FetchError::Read(
                ReadError::IndexOutOfRange { .. }
                | ReadError::RangeOutOfRange { .. }
                | ReadError::RangeOverflow { .. }
                | ReadError::ZeroLength
                | ReadError::ItemTooLarge { .. }
                | ReadError::ObjectNameInvalid { .. }
                | ReadError::ObjectNotFound { .. }
                | ReadError::ObjectUnreadable { .. }
                | ReadError::VersionMismatch { .. }
                | ReadError::Truncated { .. }
                | ReadError::Device { .. }
                | ReadError::ShardFailed,
            ) => None,
        }
    }
}

/// Refusals by reason. Created without a registry, so that a fetcher always has them.
#[derive(Debug)]
pub(super) struct RejectionCounters {
    pub(super) vec: IntCounterVec,
    /// Counted by the ports.
    pub(super) before_routing: IntCounterVec,
    children: [IntCounter; REJECTIONS.len()],
}

impl RejectionCounters {
    pub(super) fn new() -> Self {
        let vec = counter(
            "ringfetch_rejected_total",
            "Requests refused because of a limit, a deadline or the drain, by reason.",
            &["reason"],
        );
        let children = REJECTIONS.map(|(_, reason)| vec.with_label_values(&[reason]));
        Self {
            vec,
            before_routing: before_routing(),
            children,
        }
    }

    /// Counts a refusal of a request on this connection; other errors are not counted here. One for a lack of rights is only
    /// noted, as those are before routing: it is no limit.
    pub(super) fn count(&self, error: &FetchError, connection: Option<&Arc<Connection>>) {
        if matches!(error, FetchError::Forbidden { .. } | FetchError::OverRate { .. }) {
            note_refusal();
        }
        let Some(reason) = Rejection::of(error) else {
            return;
        };
        self.children[reason as usize].inc();
        if let Some(principal) = connection.and_then(|connection| connection.principal()) {
            principal.count_rejection(reason);
        }
    }
}

/// Counts what a port refuses before routing.
pub(crate) fn before_routing() -> IntCounterVec {
    counter(
        "ringfetch_requests_refused_total",
        "Requests that a port refused before routing, by reason.",
        &["transport", "reason"],
    )
}

fn counter(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    match IntCounterVec::new(Opts::new(name, help), labels) {
        Ok(vec) => vec,
        // Names and labels are constants that the crate accepts, which a test checks.
        Err(error) => unreachable!("{name} is well formed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::core_turns::take_refusal;

    #[test]
    fn every_refusal_has_its_reason() {
        // The table is in the order of the enum, and each refusal is counted under its own reason.
        let rejections = RejectionCounters::new();
        for (place, (reason, label)) in REJECTIONS.iter().enumerate() {
            assert_eq!(*reason as usize, place);
            rejections.children[place].inc();
            assert_eq!(rejections.vec.with_label_values(&[label]).get(), 1);
        }
        let overloaded = FetchError::Read(ReadError::Overloaded {
            resource: Resource::ConnectionMemory,
        });
        assert_eq!(Rejection::of(&overloaded), Some(Rejection::ConnectionMemory));
        assert_eq!(Rejection::of(&FetchError::Read(ReadError::ZeroLength)), None);
    }

    #[test]
    fn who_is_over_its_rate_or_has_no_right_uses_time_of_the_core() {
        // Scenario: a request over each rate, one for a dataset that its principal may not read, one whose principal's line has
        // just changed, and one over the memory. Expectation: only the first three are noted for the caller's time on the core.
        let rejections = RejectionCounters::new();
        let over = |rate| FetchError::OverRate {
            rate,
            max: 1,
            retry_after: std::time::Duration::from_secs(1),
        };
        let noted = |error| {
            rejections.count(&error, None);
            take_refusal()
        };
        assert!(noted(over(RateLimit::Requests)) && noted(over(RateLimit::Bytes)));
        let name = "hidden".to_owned();
        assert!(noted(FetchError::Forbidden { name }));
        assert!(!noted(FetchError::Revoked));
        let resource = Resource::Memory;
        assert!(!noted(FetchError::Read(ReadError::Overloaded { resource })));
    }
}
