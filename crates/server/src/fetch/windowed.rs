//! Long responses, read window by window while they are sent.
//!
//! Invariants: the first window is read before the head is sent, so that its errors have a status; at most
//! two windows are in a body or being read for it, smaller ones as memory fills, besides what HTTP has taken
//! (`WindowBudget`); every window is of the version in the ETag, or the body ends with an error. gRPC reports a later error in its trailers. HTTP has to close
//! the connection, so that the client sees a truncated body and can resume with Range and If-Range. Frames
//! are slices of the response memory, never copies.

use super::Fetcher;
use super::request::{FetchError, RequestContext};
use super::snapshot::{ReadPhase, Snapshot};
use super::window::{BodyPart, WindowBudget, WindowLimits, WindowPlan, total_bytes};
use crate::access::Principal;
use crate::caller::Connection;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use ringfetch_engine::error::ReadError;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Backoff of a later window that was refused: doubled from the first wait to the longest, up to a total.
const WAIT_FIRST: Duration = Duration::from_millis(5);
const WAIT_LONGEST: Duration = Duration::from_secs(1);
const WAIT_TOTAL: Duration = Duration::from_secs(30);
/// How often a window is cut, if limits shrink each time before the engine has it.
const CUTS_MAX: u32 = 3;
/// How often a window that waits for its principal's rate checks whether the limit has changed.
const RATE_LOOK: Duration = Duration::from_secs(1);
/// How long what its principal's rate grants is left to other requests before a window takes it: they are told when
/// to retry, and need a round trip.
const ROOM_FOR_OTHERS: Duration = Duration::from_millis(100);
/// How much later than without other requests a window is read at most.
const GIVES_WAY_MAX: Duration = Duration::from_secs(1);

/// Reads the windows of one response.
#[derive(Debug)]
pub(crate) struct SnapshotReader {
    fetcher: Fetcher,
    connection: Option<Arc<Connection>>,
    version: Snapshot,
    /// When the request arrived, from which the time counts that its first window may take.
    arrived: std::time::Instant,
}

/// The frames of a window, and the parts that no longer fitted in it.
type Fetching = Pin<Box<dyn Future<Output = Result<(Vec<Bytes>, WindowPlan), FetchError>> + Send>>;

/// A body of known length, fetched in windows.
pub(crate) struct WindowedBody {
    reader: Arc<SnapshotReader>,
    plan: WindowPlan,
    /// Frames of the window being sent.
    ready: VecDeque<Bytes>,
    /// The next window, being read.
    fetching: Option<Fetching>,
    /// The next window, read while `ready` is being sent.
    fetched: Option<Result<Vec<Bytes>, FetchError>>,
    left_bytes: u64,
}

impl SnapshotReader {
    /// A reader for one response on this connection, to a request that arrived then.
    pub(crate) fn new(
        fetcher: Fetcher,
        connection: Option<Arc<Connection>>,
        version: Snapshot,
        arrived: std::time::Instant,
    ) -> Self {
        Self {
            fetcher,
            connection,
            version,
            arrived,
        }
    }

    fn window_budget(&self) -> WindowBudget {
        let (in_use, budget) = self.fetcher.engine().memory();
        WindowBudget::new(in_use, budget)
    }

    fn window_limits(&self) -> WindowLimits {
        let connection = self.connection.as_ref();
        // Two windows, rounded up to pages, fit in what the caller may hold.
        let share = connection.map_or(u64::MAX, |connection| connection.account().memory().most());
        // At a low rate, a second's worth, so that the response does not pause for longer.
        let principal = connection.and_then(|connection| connection.principal());
        let second = principal.map_or(u64::MAX, |principal| principal.bytes_per_s());
        WindowLimits {
            bytes: self
                .window_budget()
                .window_bytes
                .min(self.fetcher.item_bytes_max())
                .min(share / 4)
                .min(second),
            extents: usize::try_from(self.fetcher.limits().items_per_request).unwrap_or(usize::MAX),
        }
    }

    /// Reads a window's extents as one batch and inserts the text between them.
    async fn fetch(&self, window: &[BodyPart], phase: ReadPhase) -> Result<Vec<Bytes>, FetchError> {
        let (mut offsets, mut lengths) = (Vec::new(), Vec::new());
        for piece in window {
            if let BodyPart::Extent(extent) = piece {
                offsets.push(extent.offset);
                lengths.push(extent.length);
            }
        }
        let mut data = Bytes::new();
        if !offsets.is_empty() {
            let context = RequestContext {
                arrived: (phase == ReadPhase::BeforeHead).then_some(self.arrived),
                deadline: None,
                connection: self.connection.clone(),
                fail_fast: true,
            };
            let fetcher = &self.fetcher;
            let read = fetcher.read_snapshot(&self.version, &offsets, &lengths, &context, phase);
            data = read.await?;
        }
        let mut frames = Vec::with_capacity(window.len());
        for piece in window {
            match piece {
                BodyPart::Text(text) => frames.push(text.clone()),
                BodyPart::Extent(extent) => {
                    let length = usize::try_from(extent.length).unwrap_or(usize::MAX);
                    if length > data.len() {
                        // Impossible after a batch without errors; a body must have its announced length.
                        return Err(FetchError::Changed);
                    }
                    frames.push(data.split_to(length));
                }
            }
        }
        Ok(frames)
    }

    /// Reads the next window of a plan; after an error the plan still has it. Empty at the plan's end.
    async fn fetch_next(&self, plan: &mut WindowPlan, phase: ReadPhase) -> Result<Vec<Bytes>, FetchError> {
        let mut attempt = 1;
        while let Some(window) = plan.next_window(self.window_limits()) {
            match self.fetch(&window, phase).await {
                Ok(frames) => return Ok(frames),
                Err(error) => {
                    plan.put_back(WindowPlan::new(window));
                    // It was cut within the limits, so they shrank meanwhile.
                    if attempt == CUTS_MAX || !is_over_a_limit(&error) {
                        return Err(error);
                    }
                    attempt += 1;
                }
            }
        }
        Ok(Vec::new())
    }

    /// Reads a later window, and retries if it is refused: the head is sent, so the client can no longer be
    /// asked to retry. Limits may have shrunk since the window was planned; what does not fit any more is returned.
    async fn fetch_with_retry(&self, window: Vec<BodyPart>) -> Result<(Vec<Bytes>, WindowPlan), FetchError> {
        let principal = self.connection.as_ref().and_then(|own| own.principal());
        let mut charged = match principal {
            Some(principal) if principal.is_byte_rate_limited() => {
                // In a task, since this future is not polled while the client does not read what came before, and would
                // keep the turn from the principal's other responses.
                let mut waiting = JoinSet::new();
                waiting.spawn(wait_for_rate(Arc::clone(principal), total_bytes(&window)));
                // An error: the runtime ends.
                waiting.join_next().await.and_then(Result::ok)
            }
            Some(_) | None => None,
        };
        let mut rest = WindowPlan::new(window);
        let mut waits = Backoff::default();
        loop {
            if let Some(charged) = &mut charged {
                // While it is read, and if that fails.
                charged.bytes = 0;
            }
            let result = self.fetch_next(&mut rest, ReadPhase::AfterHead).await;
            let refused = matches!(&result, Err(error) if is_transient(error));
            if let Some(charged) = &mut charged
                && (result.is_ok() || refused)
            {
                // What is left is charged again when it is read, and what was refused is not read.
                charged.bytes = rest.left_bytes();
            }
            if refused && let Some(wait) = waits.next() {
                tokio::time::sleep(wait).await;
                continue;
            }
            return result.map(|frames| (frames, rest));
        }
    }
}

/// Bytes of a window that its principal was charged and that are not read. Given back when this is dropped: the window
/// was refused, or the client went away before it was read.
struct UnreadBytes {
    principal: Arc<Principal>,
    bytes: u64,
}

impl Drop for UnreadBytes {
    fn drop(&mut self) {
        self.principal.give_back_bytes(self.bytes);
    }
}

/// Charges a later window to its principal's bytes per second, and waits until they are due. Other requests
/// of the principal come first, but not for ever. Its windows wait one at a time: each takes its bytes a second
/// after it would be due at the latest, and several would together take the whole rate.
async fn wait_for_rate(principal: Arc<Principal>, bytes: u64) -> UnreadBytes {
    let turn = principal.window_turn().await;
    let limit = principal.bytes_per_s();
    let mut gives_way_until = None;
    while let Err(over) = principal.take_bytes_after_others(bytes, ROOM_FOR_OTHERS) {
        let now = Instant::now();
        let until = *gives_way_until.get_or_insert(now + over.retry_after + GIVES_WAY_MAX);
        if now < until {
            let step = over.retry_after.min(until - now);
            tokio::time::sleep(step.min(RATE_LOOK)).await;
            continue;
        }
        let mut wait = principal.reserve_bytes(bytes);
        let charged = UnreadBytes {
            principal: Arc::clone(&principal),
            bytes,
        };
        // A changed limit takes effect at once.
        while !wait.is_zero() && principal.bytes_per_s() == limit {
            let step = wait.min(RATE_LOOK);
            tokio::time::sleep(step).await;
            wait -= step;
        }
        return charged;
    }
    drop(turn);
    UnreadBytes { principal, bytes }
}

/// Whether fewer bytes or items would have been accepted.
fn is_over_a_limit(error: &FetchError) -> bool {
    matches!(
        error,
        FetchError::Read(ReadError::ItemTooLarge { .. } | ReadError::ResponseTooLarge { .. })
            | FetchError::TooManyItems { .. }
    )
}

/// Whether a retry may succeed soon.
fn is_transient(error: &FetchError) -> bool {
    matches!(error, FetchError::Read(ReadError::Overloaded { .. }))
}

/// How long to wait before each further attempt.
#[derive(Debug, Default)]
struct Backoff {
    waited: Duration,
    last: Option<Duration>,
}

impl Iterator for Backoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.last.map_or(WAIT_FIRST, |last| (last * 2).min(WAIT_LONGEST));
        self.last = Some(wait);
        self.waited += wait;
        (self.waited <= WAIT_TOTAL).then_some(wait)
    }
}

impl WindowedBody {
    /// The error of a response that ends at its deadline. Counts the refusal.
    pub(crate) fn deadline_rejection(&self) -> FetchError {
        let SnapshotReader {
            fetcher, connection, ..
        } = &*self.reader;
        fetcher.deadline_rejection(connection.as_ref())
    }

    /// Reads the first window; the others are read while the body is sent.
    ///
    /// # Errors
    /// Errors of the first window.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the read.
    pub(crate) async fn start(reader: SnapshotReader, pieces: Vec<BodyPart>) -> Result<Self, FetchError> {
        let left_bytes = total_bytes(&pieces);
        let mut plan = WindowPlan::new(pieces);
        let first = reader.fetch_next(&mut plan, ReadPhase::BeforeHead).await?;
        Ok(Self {
            reader: Arc::new(reader),
            plan,
            ready: first.into(),
            fetching: None,
            fetched: None,
            left_bytes,
        })
    }

    /// Bytes not sent yet.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    /// Starts reading the next window, if there is one and none is being read, and polls it.
    fn poll_next_window(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Vec<Bytes>, FetchError>>> {
        if let Some(result) = self.fetched.take() {
            return Poll::Ready(Some(result));
        }
        if self.fetching.is_none() {
            let Some(window) = self.plan.next_window(self.reader.window_limits()) else {
                return Poll::Ready(None);
            };
            let reader = Arc::clone(&self.reader);
            self.fetching = Some(Box::pin(async move { reader.fetch_with_retry(window).await }));
        }
        let Some(fetching) = self.fetching.as_mut() else {
            return Poll::Ready(None);
        };
        let result = ready!(fetching.as_mut().poll(cx));
        self.fetching = None;
        Poll::Ready(Some(result.map(|(frames, rest)| {
            self.plan.put_back(rest);
            frames
        })))
    }

    fn abort(&mut self, error: FetchError) -> FetchError {
        let dataset = self.reader.version.dataset();
        if let Some(responses) = self.reader.fetcher.inner.cut_short.due() {
            tracing::warn!(dataset, left_bytes = self.left_bytes, %error, responses, "responses are cut short");
        }
        self.plan.clear();
        self.ready.clear();
        self.left_bytes = 0;
        error
    }
}

impl http_body::Body for WindowedBody {
    type Data = Bytes;
    type Error = FetchError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, FetchError>>> {
        let this = &mut *self;
        while this.ready.is_empty() {
            match ready!(this.poll_next_window(cx)) {
                Some(Ok(frames)) => this.ready = frames.into(),
                Some(Err(error)) => return Poll::Ready(Some(Err(this.abort(error)))),
                None => return Poll::Ready(None),
            }
        }
        // The next window is read while these frames are sent: submitted by this poll, collected by a later one.
        if this.fetched.is_none()
            && (this.fetching.is_some() || this.reader.window_budget().ahead)
            && let Poll::Ready(result) = this.poll_next_window(cx)
        {
            this.fetched = result;
        }
        let Some(frame) = this.ready.pop_front() else {
            return Poll::Ready(None);
        };
        this.left_bytes = this
            .left_bytes
            .saturating_sub(u64::try_from(frame.len()).unwrap_or(u64::MAX));
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.left_bytes == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left_bytes)
    }
}

#[cfg(test)]
mod tests;
