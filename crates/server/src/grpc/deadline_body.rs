//! A long response that ends at its deadline even if it is not polled, as when its client does not read: what it
//! holds is given back then, and the client gets the status once it reads.

use super::service::trailers_ok;
use crate::listener::FrameParts;
use crate::rpc_metrics::CallTimer;
use http::HeaderMap;
use http_body::Frame;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;
use tonic::{Code, Status};

/// What a response is made of.
pub(super) trait LongResponse: Send + 'static {
    /// The next frame with messages. `None`, or a status, is its end, after which it is not polled.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<FrameParts, Status>>>;

    /// The deadline has passed: gives back what is held for later frames, and returns the status in their place.
    fn give_up(&mut self) -> Status;
}

/// The body: the response, and a task that ends it.
pub(super) struct DeadlineBody<R> {
    shared: Arc<Mutex<Shared<R>>>,
    /// Aborted with the body.
    watcher: Option<tokio::task::AbortHandle>,
}

struct Shared<R> {
    response: R,
    deadline: Option<Instant>,
    /// The status of a response that was given up.
    given_up: Option<Status>,
    /// Ends when the trailers are sent.
    timer: CallTimer,
    /// Of the last poll, woken at the deadline.
    waker: Option<Waker>,
}

fn lock<R>(shared: &Mutex<Shared<R>>) -> MutexGuard<'_, Shared<R>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: LongResponse> DeadlineBody<R> {
    /// Must be called inside a runtime.
    pub(super) fn new(response: R, deadline: Option<Instant>, timer: CallTimer) -> Self {
        let shared = Arc::new(Mutex::new(Shared {
            response,
            deadline,
            given_up: None,
            timer,
            waker: None,
        }));
        let watcher = deadline.map(|deadline| {
            let watched = Arc::downgrade(&shared);
            let watch = async move {
                tokio::time::sleep_until(deadline.into()).await;
                if let Some(shared) = watched.upgrade() {
                    lock(&shared).give_up();
                }
            };
            tokio::spawn(watch).abort_handle()
        });
        Self { shared, watcher }
    }
}

impl<R: LongResponse> Shared<R> {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<FrameParts>, Infallible>>> {
        if self.timer.is_ended() {
            return Poll::Ready(None);
        }
        let polled = match self.given_up.take() {
            Some(status) => Poll::Ready(Some(Err(status))),
            None => self.response.poll_next(cx),
        };
        let is_known = |waker: &Waker| waker.will_wake(cx.waker());
        if polled.is_pending() && !self.waker.as_ref().is_some_and(is_known) {
            self.waker = Some(cx.waker().clone());
        }
        let failed = match ready!(polled) {
            Some(Ok(frame)) => return Poll::Ready(Some(Ok(Frame::data(frame)))),
            Some(Err(status)) => Some(status),
            // It may have ended after the deadline, and before the task that watches that.
            None => self.is_late().then(|| self.response.give_up()),
        };
        self.timer.end(failed.as_ref().map_or(Code::Ok, Status::code));
        let trailers = failed.map_or_else(trailers_ok, |status| trailers_of(&status));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_late(&self) -> bool {
        // The clock of the task.
        let now = tokio::time::Instant::now();
        self.deadline.is_some_and(|deadline| now >= deadline.into())
    }

    fn give_up(&mut self) {
        if !self.timer.is_ended() {
            self.given_up = Some(self.response.give_up());
            self.waker.take().into_iter().for_each(Waker::wake);
        }
    }
}

impl<R> Drop for DeadlineBody<R> {
    fn drop(&mut self) {
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
    }
}

impl<R: LongResponse> http_body::Body for DeadlineBody<R> {
    type Data = FrameParts;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<FrameParts>, Infallible>>> {
        lock(&self.shared).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        lock(&self.shared).timer.is_ended()
    }
}

/// The trailers of a call that failed after its head was sent.
pub(super) fn trailers_of(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    // Cannot fail: messages are percent-encoded.
    if status.add_header(&mut trailers).is_err() {
        trailers.insert(Status::GRPC_STATUS, http::HeaderValue::from(status.code() as i32));
    }
    trailers
}
