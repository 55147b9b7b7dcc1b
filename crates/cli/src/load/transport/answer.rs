//! What came back, whatever brought it: how many items and bytes, which items failed, and the bytes themselves where
//! they are to be checked.

use bytes::Bytes;
use std::borrow::Cow;
use std::time::Duration;

/// A request that was answered: its items back to back, held against it by the transport.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// Items asked for, failed ones included.
    pub(crate) items: usize,
    /// Of all items together.
    pub(crate) bytes: u64,
    pub(crate) failed: Vec<FailedItem>,
    /// Bytes of each item, 0 for a failed one.
    pub(crate) lengths: Vec<usize>,
    /// The items; empty where nothing is to be checked.
    pub(crate) data: Bytes,
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
pub(crate) struct Refused {
    /// A code, for counting.
    pub(crate) label: Cow<'static, str>,
    /// For people.
    pub(crate) message: String,
    /// When the server would have it again.
    pub(crate) retry_after: Option<Duration>,
}

impl Refused {
    /// An answer that breaks the protocol, or does not fit its request.
    pub(crate) fn protocol(message: impl Into<String>) -> Self {
        Self {
            label: Cow::Borrowed("PROTOCOL"),
            message: message.into(),
            retry_after: None,
        }
    }

    /// A connection that cannot be made, or broke.
    pub(crate) fn transport(message: impl Into<String>) -> Self {
        Self {
            label: Cow::Borrowed("TRANSPORT"),
            message: message.into(),
            retry_after: None,
        }
    }

    /// No answer in time.
    pub(crate) fn timeout() -> Self {
        Self {
            label: Cow::Borrowed("DEADLINE_EXCEEDED"),
            message: "no answer within --timeout".to_owned(),
            retry_after: None,
        }
    }
}

impl From<ringfetch_client::Error> for Refused {
    fn from(error: ringfetch_client::Error) -> Self {
        Self {
            label: Cow::Borrowed(error.label()),
            message: error.to_string(),
            retry_after: error.retry_after(),
        }
    }
}

impl Answer {
    /// Items that were read.
    pub(crate) fn reads(&self) -> u64 {
        u64::try_from(self.items.saturating_sub(self.failed.len())).unwrap_or(u64::MAX)
    }

    /// Shows each item that has bytes, with its position in the request.
    pub(crate) fn each(&self, mut look: impl FnMut(usize, &[u8])) {
        let mut rest: &[u8] = &self.data;
        for (i, &length) in self.lengths.iter().enumerate() {
            let Some((item, others)) = rest.split_at_checked(length) else {
                return;
            };
            rest = others;
            look(i, item);
        }
    }
}
