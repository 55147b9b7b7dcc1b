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

/// The messages of the response.
struct ObjectMessages {
    /// Sent first: it has no data.
    first: Option<v1::ReadObjectResponse>,
    /// `None` once it is given up.
    windows: Option<WindowedBody>,
    /// Offset of the next message with data.
    offset: u64,
}

/// The body of a response that has begun. Must be called inside a runtime.
pub(super) fn body(
    ObjectStart { first, windows }: ObjectStart,
    deadline: Option<Instant>,
    timer: CallTimer,
) -> DeadlineBody<impl LongResponse> {
    let messages = ObjectMessages {
        offset: first.offset,
        first: Some(first),
        windows: Some(windows),
    };
    DeadlineBody::new(messages, deadline, timer)
}

impl LongResponse for ObjectMessages {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<FrameParts, Status>>> {
        let encoded = |message: v1::ReadObjectResponse, data| {
            EncodedMessage::unary(&message, data).map(EncodedMessage::into_frame)
        };
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(encoded(first, Bytes::new())));
        }
        let Some(windows) = &mut self.windows else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(windows).poll_frame(cx));
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(|error| error_status::to_status(&error, "name"))?;
            // A windowed body has no trailers.
            let data = frame.into_data().unwrap_or_default();
            let message = v1::ReadObjectResponse {
                offset: self.offset,
                ..Default::default()
            };
            let bytes = u64::try_from(data.len()).unwrap_or(u64::MAX);
            self.offset = self.offset.saturating_add(bytes);
            encoded(message, data)
        }))
    }

    fn give_up(&mut self) -> Status {
        let late = match self.windows.take() {
            Some(windows) => windows.deadline_rejection(),
            None => ReadError::DeadlineExceeded.into(),
        };
        error_status::to_status(&late, "name")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use crate::fetch::tests::{objects_of, serving};
    use crate::rpc_metrics::{GrpcMethod, RpcMetrics};
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;
    use tonic::Code;

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

    #[tokio::test]
    async fn an_object_that_is_sent_after_the_deadline_is_no_success() {
        // Scenario: the last part of an object is taken when the deadline has passed, before the task that watches the deadline
        // runs. Expectation: all of it, then DEADLINE_EXCEEDED, which is counted.
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), "abc").unwrap();
        let fetcher = serving(vec![objects_of(directory.path())], Limits::default());
        let request = v1::ReadObjectRequest {
            dataset: "objects".to_owned(),
            name: "a".to_owned(),
            ..v1::ReadObjectRequest::default()
        };
        let now = Instant::now();
        let begun = begin(&fetcher, None, now, None, &request).await.unwrap();
        let rpc = RpcMetrics::new(&prometheus::Registry::new()).unwrap();
        let timer = CallTimer::new(rpc.clone(), GrpcMethod::ReadObject, now);
        let mut body = body(begun, Some(now), timer);
        let mut next = || body.frame().now_or_never().unwrap();
        assert!(next().unwrap().unwrap().is_data());
        assert!(next().unwrap().unwrap().is_data());
        let trailers = next().unwrap().unwrap().into_trailers().unwrap();
        assert_eq!(trailers[Status::GRPC_STATUS], "4");
        assert!(next().is_none());
        assert_eq!(rpc.counted(GrpcMethod::ReadObject, Code::DeadlineExceeded), 1);
    }
}
