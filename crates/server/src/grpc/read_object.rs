//! ReadObject: an object of any length, streamed in messages as its windows are read.
//!
//! Uses `WindowedBody` as HTTP does: the first window is read before the call is answered, so that a refusal
//! has no body, and at most two windows are held, besides what HTTP/2 has taken (`WindowBudget`). Each frame of
//! a window becomes a message.

use super::deadline_body::{DeadlineBody, LongResponse};
use super::encode::EncodedMessage;
use crate::caller::Connection;
use crate::error_status;
use crate::fetch::{
    BodyPart, FetchError, Fetcher, LOOK_UPS_MAX, Purpose, RequestContext, SnapshotReader, WindowedBody,
    past_the_end,
};
use crate::listener::FrameParts;
use crate::rpc_metrics::CallTimer;
use bytes::Bytes;
use http_body::Body as _;
use ringfetch_engine::error::ReadError;
use ringfetch_engine::geometry::{Extent, check_range};
use ringfetch_proto::v1;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tonic::Status;

/// An object whose first window has been read.
pub(super) struct ObjectStart {
    first: v1::ReadObjectResponse,
    windows: WindowedBody,
}

/// Looks up the object of a request that arrived then, and reads its first window.
///
/// # Errors
/// Whatever refuses a read; `VersionMismatch`.
pub(super) async fn begin(
    fetcher: &Fetcher,
    connection: Option<Arc<Connection>>,
    arrived: Instant,
    deadline: Option<Instant>,
    request: &v1::ReadObjectRequest,
) -> Result<ObjectStart, Status> {
    let to_status = |error: FetchError| error_status::to_status(&error, "name");
    let context = RequestContext {
        arrived: Some(arrived),
        deadline,
        connection: connection.clone(),
        fail_fast: true,
    };
    let mut purpose = Purpose::Read;
    for _ in 0..LOOK_UPS_MAX {
        let version = fetcher
            .object(&request.dataset, &request.name, purpose, &context)
            .await
            .map_err(to_status)?;
        let checked = version.check(&request.if_match);
        let extent = match checked.and_then(|()| Ok(extent(request, version.length_bytes())?)) {
            Ok(extent) => extent,
            Err(FetchError::Read(error)) => {
                let field = field_past_the_end(request, version.length_bytes());
                let error = fetcher.failed_read(&version, error).await;
                return Err(error_status::to_status(&error, field));
            }
            Err(error) => return Err(to_status(error)),
        };
        let first = v1::ReadObjectResponse {
            etag: version.etag().to_owned(),
            object_length_bytes: version.length_bytes(),
            offset: request.offset,
            data: Bytes::new(),
        };
        let reader = SnapshotReader::new(fetcher.clone(), connection.clone(), version, arrived);
        let pieces = extent.map(BodyPart::Extent).into_iter().collect();
        match WindowedBody::start(reader, pieces).await {
            Ok(windows) => return Ok(ObjectStart { first, windows }),
            Err(FetchError::Changed) => purpose = Purpose::ReadAgain,
            Err(error) => return Err(to_status(error)),
        }
    }
    Err(to_status(FetchError::Changed))
}

/// The requested extent of an object of `end` bytes; `None` if it is empty, at the end.
fn extent(request: &v1::ReadObjectRequest, end: u64) -> Result<Option<Extent>, ReadError> {
    let offset = request.offset;
    let length = match request.length {
        0 if offset == end => return Ok(None),
        // Not by `check_range`, for which an offset of 64 ones overflows.
        0 if offset > end => return Err(past_the_end(offset, end)),
        0 => end - offset,
        length => length,
    };
    check_range(offset, length, end).map(Some)
}

/// The field of a request for what an object of `end` bytes does not have.
fn field_past_the_end(request: &v1::ReadObjectRequest, end: u64) -> &'static str {
    // No offset would help at an empty object.
    let is_too_long = request.offset < end || request.offset == 0;
    if is_too_long { "length" } else { "offset" }
}

/// The messages of the response and its trailers.
struct ObjectMessages {
    /// `None` once the end status is known.
    windows: Option<WindowedBody>,
    /// Offset of the next message with data.
    offset: u64,
    /// The message to send next.
    next: Option<FrameParts>,
    /// Not OK.
    end: Option<Status>,
}

/// The body of a response that has begun. Must be called inside a runtime.
pub(super) fn body(
    begun: ObjectStart,
    deadline: Option<Instant>,
    timer: CallTimer,
) -> DeadlineBody<impl LongResponse> {
    let ObjectStart { first, windows } = begun;
    let mut messages = ObjectMessages {
        windows: Some(windows),
        offset: first.offset,
        next: None,
        end: None,
    };
    messages.queue(&first, Bytes::new());
    DeadlineBody::new(messages, deadline, timer)
}

impl ObjectMessages {
    fn queue(&mut self, message: &v1::ReadObjectResponse, data: Bytes) {
        match EncodedMessage::unary(message, data) {
            Ok(encoded) => self.next = Some(encoded.into_frame()),
            Err(status) => self.end_with(Some(status)),
        }
    }

    fn end_with(&mut self, end: Option<Status>) {
        self.windows = None;
        self.end = end;
    }

    /// Fills `next`, or sets the end status.
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(windows) = &mut self.windows else {
            return Poll::Ready(());
        };
        match ready!(Pin::new(windows).poll_frame(cx)) {
            None => self.end_with(None),
            Some(Err(error)) => self.end_with(Some(error_status::to_status(&error, "name"))),
            Some(Ok(frame)) => {
                // A windowed body has no trailers.
                let data = frame.into_data().unwrap_or_default();
                let message = v1::ReadObjectResponse {
                    offset: self.offset,
                    ..Default::default()
                };
                self.offset = self
                    .offset
                    .saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
                self.queue(&message, data);
            }
        }
        Poll::Ready(())
    }
}

impl LongResponse for ObjectMessages {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<FrameParts, Status>>> {
        loop {
            if let Some(next) = self.next.take() {
                return Poll::Ready(Some(Ok(next)));
            }
            if self.windows.is_none() {
                return Poll::Ready(self.end.take().map(Err));
            }
            ready!(self.poll_message(cx));
        }
    }

    fn end_at_deadline(&mut self) {
        let Some(windows) = &self.windows else {
            return;
        };
        let late = windows.deadline_rejection();
        self.end_with(Some(error_status::to_status(&late, "name")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_an_object_lies_within_it() {
        // An object of 100 bytes: parts within it, and what ends or begins past its end, up to the largest numbers. Expectation:
        // the extents; of the others, out of range, but for an end beyond 64 bits.
        let of = |offset, length| {
            let request = v1::ReadObjectRequest {
                offset,
                length,
                ..v1::ReadObjectRequest::default()
            };
            extent(&request, 100)
        };
        let part = |offset, length| Ok(Some(Extent { offset, length }));
        assert_eq!(of(0, 0), part(0, 100));
        assert_eq!(of(99, 0), part(99, 1));
        assert_eq!(of(40, 60), part(40, 60));
        assert_eq!(of(100, 0), Ok(None));
        for (offset, length) in [(101, 0), (u64::MAX, 0), (100, 1), (0, 101), (0, u64::MAX)] {
            assert!(
                matches!(of(offset, length), Err(ReadError::RangeOutOfRange { .. })),
                "{offset} {length}"
            );
        }
        assert!(matches!(of(1, u64::MAX), Err(ReadError::RangeOverflow { .. })));
    }
}
