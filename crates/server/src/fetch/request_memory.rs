//! The memory of a request from its arrival to its response, charged to its connection before it is used; and
//! that of its response's text, until it is sent.
//!
//! A small request that arrives at once is not charged: the memory of such requests is bounded by their number
//! (`limits.requests_in_flight`), and updating three shared counters for each would cost too much.

use super::Fetcher;
use super::listing::PAGE_BYTES_MAX;
use super::request::FetchError;
use crate::caller::Connection;
use crate::error_status::{ITEM_MESSAGES_BYTES_MAX, MESSAGE_BYTES_MAX};
use bytes::Bytes;
use http_body::{Body, Frame};
use ringfetch_engine::share::{Charge, Refused};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

/// Complete requests of at most this size are not charged. Decoded, they take up to 12 times that: an empty
/// name takes two bytes on the wire and 24 in memory. With 4,096 in flight: 24 MiB, and 115 MiB with the plans of those that wait
/// for reads (measured).
const SMALL_BYTES_MAX: usize = 512;
/// What a decoded item takes besides its bytes.
const ITEM_BYTES: usize = 32;
/// Charges grow in steps, so that a request that arrives slowly does not update the counters for each byte.
const STEP_BYTES: usize = 16 << 10;
/// The memory that each open request is charged covers a text of this size.
const TEXT_FREE_BYTES_MAX: usize = 4 << 10;
/// Longest text for one item without its message: in JSON, an error's other members, a length and a version.
const ITEM_TEXT_BYTES: u64 = 128;

/// Request memory that is enough for one request of this size and the text of its response, if nothing else is
/// charged. The largest request is a score over HTTP, charged `bytes` while it is read, then `4 * bytes + 2 *
/// items`. A connection that holds `h` of capacity `c` is granted up to `(c - h) / 2 - h` more
/// (`ringfetch_engine::share`), so `c = 2 * (4 * bytes + 2 * items) + 3 * bytes`. The text is charged in place of
/// the request.
pub(crate) fn enough_for(request_bytes: u64, items_per_request: u32) -> u64 {
    // An item takes at least one byte.
    let items = request_bytes.min(items_per_request.into());
    let items_bytes = items.saturating_mul(ITEM_BYTES as u64).saturating_mul(4);
    let steps = 2 * STEP_BYTES as u64;
    let for_request = request_bytes.saturating_mul(11).saturating_add(items_bytes);
    let messages = ITEM_MESSAGES_BYTES_MAX.min(MESSAGE_BYTES_MAX.saturating_mul(items_per_request as usize));
    let text = items
        .saturating_mul(ITEM_TEXT_BYTES)
        .saturating_add(messages as u64)
        .max(PAGE_BYTES_MAX as u64);
    for_request.max(text.saturating_mul(2)).saturating_add(steps)
}

/// A response's text and its charge.
struct ChargedText {
    text: Bytes,
    _charge: Option<Charge>,
}

impl AsRef<[u8]> for ChargedText {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

#[derive(Debug)]
pub(crate) struct RequestMemory<'a> {
    fetcher: &'a Fetcher,
    connection: Option<&'a Arc<Connection>>,
    charge: Option<Charge>,
}

impl<'a> RequestMemory<'a> {
    /// A request on this connection, with nothing charged yet.
    pub(crate) fn new(fetcher: &'a Fetcher, connection: Option<&'a Arc<Connection>>) -> Self {
        Self {
            fetcher,
            connection,
            charge: None,
        }
    }

    /// The next frame of a body. If it has not arrived, charges the `held` bytes that came before it.
    ///
    /// # Errors
    /// `RequestMemory`. Errors of the body are in the inner result.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn next_frame<B: Body<Data = Bytes> + Unpin>(
        &mut self,
        body: &mut B,
        held: usize,
    ) -> Result<Option<Result<Frame<Bytes>, B::Error>>, FetchError> {
        std::future::poll_fn(|cx| match Pin::new(&mut *body).poll_frame(cx) {
            Poll::Ready(frame) => Poll::Ready(Ok(frame)),
            Poll::Pending => match self.hold(held) {
                Ok(()) => Poll::Pending,
                Err(refused) => Poll::Ready(Err(refused)),
            },
        })
        .await
    }

    /// Whether a complete request of this size is not charged.
    pub(crate) fn is_free(bytes: usize) -> bool {
        bytes <= SMALL_BYTES_MAX
    }

    /// Charges a complete request of `bytes` with this many items. Call it before decoding.
    ///
    /// # Errors
    /// `RequestMemory`.
    pub(crate) fn whole(&mut self, bytes: usize, items: usize) -> Result<(), FetchError> {
        if Self::is_free(bytes) {
            return Ok(());
        }
        self.hold(bytes.saturating_add(items.saturating_mul(ITEM_BYTES)))
    }

    /// The charge, to be held until the request is answered.
    pub(crate) fn into_charge(self) -> Option<Charge> {
        self.charge
    }

    /// Charges at least `bytes`.
    ///
    /// # Errors
    /// `RequestMemory`.
    fn hold(&mut self, bytes: usize) -> Result<(), FetchError> {
        self.fetcher
            .charge_request_memory(self.connection, &mut self.charge, bytes)
    }
}

impl Fetcher {
    /// Charges a response's text (errors, lengths, versions; its data is charged as response memory) as request
    /// memory until it is sent. `charge` is the request's own, whose memory is no longer needed.
    ///
    /// # Errors
    /// `RequestMemory`.
    pub(crate) fn charge_text(
        &self,
        connection: Option<&Arc<Connection>>,
        mut charge: Option<Charge>,
        text: Bytes,
    ) -> Result<Bytes, FetchError> {
        if text.len() <= TEXT_FREE_BYTES_MAX {
            return Ok(text);
        }
        if let Some(charge) = &mut charge {
            // Empty, if it is refused.
            let _refused = charge.resize(steps(text.len()));
        }
        self.charge_request_memory(connection, &mut charge, text.len())?;
        Ok(Bytes::from_owner(ChargedText {
            text,
            _charge: charge,
        }))
    }

    /// Changes `charge` to `bytes` of request memory.
    ///
    /// # Errors
    /// `RequestMemory`; the charge is unchanged.
    pub(crate) fn recharge_request_memory(
        &self,
        connection: Option<&Arc<Connection>>,
        charge: &mut Option<Charge>,
        bytes: usize,
    ) -> Result<(), FetchError> {
        let wanted = steps(bytes);
        match charge {
            _ if bytes == 0 => *charge = None,
            Some(more) if wanted < more.amount() => {
                // Cannot be refused.
                let _less = more.resize(wanted);
            }
            Some(_) | None => return self.charge_request_memory(connection, charge, bytes),
        }
        Ok(())
    }

    /// Grows `charge` to at least `bytes` of request memory.
    ///
    /// # Errors
    /// `RequestMemory`.
    fn charge_request_memory(
        &self,
        connection: Option<&Arc<Connection>>,
        charge: &mut Option<Charge>,
        bytes: usize,
    ) -> Result<(), FetchError> {
        let charged = charge.as_ref().map_or(0, Charge::amount);
        let wanted = steps(bytes);
        if bytes == 0 || wanted <= charged {
            return Ok(());
        }
        let more = wanted - charged;
        let budget = &self.callers().budgets().request_memory;
        let result = match (charge, connection) {
            (Some(charge), _) => charge.grow(more),
            (none, Some(connection)) => {
                let charged = connection.request_memory().charge(more);
                charged.map(|charged| *none = Some(charged))
            }
            (none, None) => budget.charge(more).map(|charged| *none = Some(charged)),
        };
        let result = result.map_err(|refused| FetchError::RequestMemory {
            max: budget.capacity(),
            own: refused != Refused::Budget,
        });
        self.count_rejection(result, connection)
    }
}

/// The charge for so many bytes.
fn steps(bytes: usize) -> u64 {
    u64::try_from(bytes.next_multiple_of(STEP_BYTES)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use crate::fetch::tests::without_datasets;

    #[test]
    fn a_complete_request_is_charged_for_its_bytes_and_its_items() {
        // Scenario: the largest request that is free, with many items, and one of a byte more. Expectation: only the latter is
        // charged: 513 bytes and 32 for each of 1,000 items, in steps of 16 KiB.
        let fetcher = without_datasets(Limits::default());
        for (bytes, charged) in [(SMALL_BYTES_MAX, None), (SMALL_BYTES_MAX + 1, Some(32 << 10))] {
            let mut memory = RequestMemory::new(&fetcher, None);
            memory.whole(bytes, 1000).unwrap();
            let charge = memory.into_charge();
            assert_eq!(charge.as_ref().map(Charge::amount), charged);
        }
    }

    #[test]
    fn text_is_charged_in_place_of_its_request() {
        // Scenario: a request of 1 MiB has a response with 5 KiB of text. Expectation: 16 KiB are charged until that is sent.
        let fetcher = without_datasets(Limits::default());
        let used = || fetcher.callers().budgets().request_memory.used();
        let mut memory = RequestMemory::new(&fetcher, None);
        memory.whole(1 << 20, 0).unwrap();
        assert_eq!(used(), 1 << 20);
        let text = Bytes::from(vec![b' '; 5 << 10]);
        let text = fetcher.charge_text(None, memory.into_charge(), text).unwrap();
        assert_eq!(used(), 16 << 10);
        drop(text);
        assert_eq!(used(), 0);
    }
}
