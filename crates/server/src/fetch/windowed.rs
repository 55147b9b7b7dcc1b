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
            match self.fetch_next(&mut rest, ReadPhase::AfterHead).await {
                Err(error) if is_transient(&error) => match waits.next() {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => return Err(error),
                },
                Err(error) => return Err(error),
                Ok(frames) => {
                    if let Some(charged) = &mut charged {
                        // What is left is charged again when it is read.
                        charged.bytes = rest.left_bytes();
                    }
                    return Ok((frames, rest));
                }
            }
        }
    }
}

/// Bytes of a window that its principal was charged and that are not read. Given back when this is dropped: the window
/// could not be read, or the client went away.
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
        tracing::warn!(dataset, left_bytes = self.left_bytes, %error, "a response is cut short");
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
mod tests {
    use super::*;
    use crate::access::PrincipalLimits;
    use crate::config::Limits;
    use crate::fetch::tests::{objects_of, serving};
    use crate::fetch::{Items, Purpose};
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;
    use ringfetch_engine::error::{Resource, ResponseMax};
    use ringfetch_engine::geometry::Extent;

    #[test]
    fn waits_double_and_are_bounded() {
        // All the waits of one window: from the first, doubling, none longer than the longest, 30 s in total.
        let waits: Vec<Duration> = Backoff::default().collect();
        assert_eq!(waits.first(), Some(&WAIT_FIRST));
        assert_eq!(waits[1], WAIT_FIRST * 2);
        assert!(waits.iter().all(|wait| *wait <= WAIT_LONGEST));
        let total: Duration = waits.iter().sum();
        assert!(
            total <= WAIT_TOTAL && total > WAIT_TOTAL - WAIT_LONGEST - WAIT_LONGEST,
            "{total:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_client_that_left_would_have_read_is_given_back() {
        // Scenario: a principal at 64 KiB/s that owes a minute; a window waits until it is charged unconditionally, and
        // its client goes away. Then one is charged at once, and its client goes away. Expectation: the principal owes
        // what it did before, and nothing.
        let principal = Principal::new("reader");
        let (per_s, debt) = (64 << 10, 60 * (64 << 10));
        principal.set_limits(PrincipalLimits {
            bytes_per_s: per_s,
            ..PrincipalLimits::NONE
        });
        let owed = || {
            principal
                .take_bytes(0)
                .map_or_else(|over| over.retry_after, |()| Duration::ZERO)
        };
        principal.take_bytes(debt).unwrap();
        let before = owed();
        let minute = before + GIVES_WAY_MAX + RATE_LOOK;
        let waiting = tokio::time::timeout(minute, wait_for_rate(Arc::clone(&principal), 1000 * per_s));
        assert!(waiting.await.is_err());
        assert!(owed() <= before, "{:?} of {before:?}", owed());
        principal.give_back_bytes(debt);
        drop(wait_for_rate(Arc::clone(&principal), 1000 * per_s).await);
        assert_eq!(owed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_that_changes_ends_the_wait_for_the_old_one() {
        // Scenario: a principal at 64 KiB/s owes a minute; a window has been charged unconditionally and waits, and the limit is
        // raised. Expectation: it waits until it looks again.
        let principal = Principal::new("reader");
        let limits = |bytes_per_s| PrincipalLimits {
            bytes_per_s,
            ..PrincipalLimits::NONE
        };
        principal.set_limits(limits(64 << 10));
        principal.take_bytes(60 * (64 << 10)).unwrap();
        let begun = Instant::now();
        let raise = async {
            tokio::time::sleep(Duration::from_secs(62)).await;
            principal.set_limits(limits(128 << 10));
        };
        let (_charged, ()) = tokio::join!(wait_for_rate(Arc::clone(&principal), 1), raise);
        assert!(begun.elapsed() < Duration::from_secs(64));
    }

    #[tokio::test]
    async fn nothing_is_read_ahead_while_memory_is_short() {
        // Scenario: an object of three windows of 64 KiB, while little of 1 MiB of response memory is in use, and while half of it
        // is. Expectation: only in the first case is the second window read while the first is sent; all arrive in both.
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), vec![7; 192 << 10]).unwrap();
        let limits = Limits {
            response_bytes: 64 << 10,
            ..Limits::default()
        };
        let fetcher = serving(vec![objects_of(directory.path())], limits);
        let context = RequestContext::default();
        let window = Items::Objects {
            names: &["a".to_owned()],
            offsets: &[0],
            lengths: &[64 << 10],
            if_match: &[],
        };
        let mut held = Vec::new();
        for (answers, is_ahead) in [(0, true), (8, false)] {
            while held.len() < answers {
                held.push(fetcher.fetch("objects", "", &window, &context).await.unwrap());
            }
            let version = fetcher
                .object("objects", "a", Purpose::Read, &context)
                .await
                .unwrap();
            let reader = SnapshotReader::new(fetcher.clone(), None, version, std::time::Instant::now());
            let whole = BodyPart::Extent(Extent {
                offset: 0,
                length: 192 << 10,
            });
            let mut body = WindowedBody::start(reader, vec![whole]).await.unwrap();
            let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(body.fetching.is_some() || body.fetched.is_some(), is_ahead);
            // While all of it is in use, the rest waits.
            loop {
                match fetcher.fetch("objects", "", &window, &context).await {
                    Ok(answer) => held.push(answer),
                    Err(refused) => break assert!(is_transient(&refused), "{refused}"),
                }
            }
            if !is_ahead {
                assert!(body.frame().now_or_never().is_none());
            }
            held.truncate(answers);
            let rest = body.collect().await.unwrap().to_bytes();
            assert_eq!(first.len() + rest.len(), 192 << 10);
        }
    }

    #[tokio::test]
    async fn the_first_window_counts_from_the_arrival() {
        // Scenario: a limit of a minute; an object of two windows, for a request that arrived now and for one that arrived two
        // minutes ago. Expectation: for the first it comes whole; the second is past its deadline.
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), vec![7; 128 << 10]).unwrap();
        let limits = Limits {
            response_bytes: 64 << 10,
            deadline: Some(Duration::from_secs(60)),
            ..Limits::default()
        };
        let fetcher = serving(vec![objects_of(directory.path())], limits);
        let start = async |arrived| {
            let context = RequestContext::default();
            let version = fetcher.object("objects", "a", Purpose::Read, &context);
            let reader = SnapshotReader::new(fetcher.clone(), None, version.await.unwrap(), arrived);
            let whole = BodyPart::Extent(Extent {
                offset: 0,
                length: 128 << 10,
            });
            WindowedBody::start(reader, vec![whole]).await
        };
        let now = std::time::Instant::now();
        let whole = start(now).await.unwrap().collect().await.unwrap();
        assert_eq!(whole.to_bytes().len(), 128 << 10);
        let late = start(now.checked_sub(Duration::from_secs(120)).unwrap()).await;
        assert_eq!(late.map(drop).unwrap_err(), ReadError::DeadlineExceeded.into());
    }

    #[test]
    fn only_bounds_that_pass_are_waited_for() {
        // Overload is transient; a lost range, a drain and a permanent limit are not.
        assert!(is_transient(&FetchError::Read(ReadError::Overloaded {
            resource: Resource::Memory
        })));
        assert!(!is_transient(&FetchError::Read(ReadError::Draining)));
        assert!(!is_transient(&FetchError::Read(ReadError::Truncated {
            offset: 0,
            length: 1
        })));
        assert!(!is_transient(&FetchError::Read(ReadError::ResponseTooLarge {
            length: 2,
            max: ResponseMax::of_any(1),
        })));
    }
}
