//! A long response that ends at its deadline even if it is not polled, as when its client does not read: what it
//! holds is given back then, and the client gets the status once it reads.

use crate::listener::FrameParts;
use http_body::Frame;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

/// What a response is made of.
pub(super) trait LongResponse: Send + 'static {
    /// As of a body.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<FrameParts>, Infallible>>>;

    /// Whether nothing follows.
    fn is_end(&self) -> bool;

    /// Gives back what is held for later frames, and wakes the task that polls.
    fn end_at_deadline(&mut self);
}

/// The body: the response, and a task that ends it.
pub(super) struct DeadlineBody<R> {
    response: Arc<Mutex<R>>,
    /// Aborted with the body.
    watcher: Option<tokio::task::AbortHandle>,
}

fn lock<R>(response: &Mutex<R>) -> MutexGuard<'_, R> {
    response.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: LongResponse> DeadlineBody<R> {
    /// Must be called inside a runtime.
    pub(super) fn new(response: R, deadline: Option<Instant>) -> Self {
        let response = Arc::new(Mutex::new(response));
        let watcher = deadline.map(|deadline| {
            let watched = Arc::downgrade(&response);
            let watch = async move {
                tokio::time::sleep_until(deadline.into()).await;
                if let Some(response) = watched.upgrade() {
                    lock(&response).end_at_deadline();
                }
            };
            tokio::spawn(watch).abort_handle()
        });
        Self { response, watcher }
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
        lock(&self.response).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        lock(&self.response).is_end()
    }
}
