//! A response of any transport: how many items and bytes, which items failed, and the bytes themselves if
//! they are to be checked.

use crate::load::scores::{Ranking, Scoring};
use bytes::Bytes;
use ringfetch_client::{Error, Items};
use std::borrow::Cow;
use std::time::Duration;

/// The response to a request; the transport has checked it against the request.
#[derive(Debug, Default)]
pub(crate) struct Response {
    /// Items requested, failed ones included.
    pub(crate) items: usize,
    /// Total of all items.
    pub(crate) bytes: u64,
    pub(crate) failed: Vec<FailedItem>,
    pub(crate) body: Body,
}

/// The items' bytes.
#[derive(Debug, Default)]
pub(crate) enum Body {
    /// Nothing to check.
    #[default]
    None,
    Items(Items),
    /// Back to back; bytes of each item, 0 for a failed one.
    Octets {
        lengths: Vec<usize>,
        data: Bytes,
    },
    /// Scored vectors.
    Ranked(Ranking),
}

/// An item that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FailedItem {
    /// A code, for counting.
    pub(crate) label: Cow<'static, str>,
    /// For people.
    pub(crate) message: String,
}

/// A request that failed as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestError {
    /// A code, for counting.
    pub(crate) label: Cow<'static, str>,
    /// For people.
    pub(crate) message: String,
    /// When the server suggests a retry.
    pub(crate) retry_after: Option<Duration>,
}

impl RequestError {
    fn new(label: &'static str, message: impl Into<String>) -> Self {
        let (label, message, retry_after) = (Cow::Borrowed(label), message.into(), None);
        Self {
            label,
            message,
            retry_after,
        }
    }

    /// A response that breaks the protocol, or does not fit its request.
    pub(crate) fn protocol(message: impl Into<String>) -> Self {
        Self::new("PROTOCOL", message)
    }

    /// A connection that cannot be opened, or broke.
    pub(crate) fn transport(message: impl Into<String>) -> Self {
        Self::new("TRANSPORT", message)
    }

    /// No response in time.
    pub(crate) fn timeout() -> Self {
        Self::new("DEADLINE_EXCEEDED", "no answer within --timeout")
    }
}

impl From<Error> for RequestError {
    fn from(error: Error) -> Self {
        let message = match &error {
            Error::DeadlineExceeded => return Self::timeout(),
            // The caller adds the address.
            Error::Transport { message, .. } => message.clone(),
            Error::StreamBroken { cause, .. } => return Self::from(Error::clone(cause)),
            Error::Status(_)
            | Error::Protocol { .. }
            | Error::VersionLost { .. }
            | Error::Invalid { .. }
            | _ => error.to_string(),
        };
        Self {
            label: Cow::Borrowed(error.label()),
            message,
            retry_after: error.retry_after(),
        }
    }
}

impl Response {
    /// Ranks its vectors.
    pub(super) fn rank(mut self, scoring: &Scoring, items: &[u64]) -> Self {
        self.body = Body::Ranked(scoring.rank(items, |look| self.each(look)));
        self
    }

    /// A ranking by the daemon.
    pub(super) fn ranked(items: usize, best: Ranking, failed: Vec<FailedItem>) -> Self {
        Self {
            items,
            bytes: u64::try_from(best.len()).unwrap_or(u64::MAX).saturating_mul(16),
            failed,
            body: Body::Ranked(best),
        }
    }

    /// Items that were read.
    pub(crate) fn reads(&self) -> u64 {
        u64::try_from(self.items.saturating_sub(self.failed.len())).unwrap_or(u64::MAX)
    }

    /// Passes each item that has bytes, with its position in the request.
    pub(crate) fn each(&self, mut look: impl FnMut(usize, &[u8])) {
        match &self.body {
            Body::None | Body::Ranked(_) => {}
            Body::Items(items) => {
                for (i, item) in items.iter().enumerate() {
                    if let Ok(item) = item {
                        look(i, &item);
                    }
                }
            }
            Body::Octets { lengths, data } => {
                let mut rest: &[u8] = data;
                for (i, &length) in lengths.iter().enumerate() {
                    let Some((item, others)) = rest.split_at_checked(length) else {
                        return;
                    };
                    rest = others;
                    look(i, item);
                }
            }
        }
    }
}
