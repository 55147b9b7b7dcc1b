//! What a connection has said, and what it is still owed: enough to end those that will never finish a request.
//!
//! hyper bounds the time of an HTTP/1 head. It does not bound that of an HTTP/2 preface, nor of the first bytes by which
//! the two are told apart; and a drain waits for either, and for a head that stays half, as for an answer in flight.
//! Deliberately absent: a bound on answers and on bodies; those are the drain's timeout and the client's business.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};

/// The client connection preface of HTTP/2 (RFC 9113 3.4), and less than any head of HTTP/1 that names a host.
const PREFACE_BYTES: u64 = 24;
/// A connection that has not said so much by then is ended.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(30);
/// While draining, how long a head that is half here has to become whole.
const HEAD_GRACE: Duration = Duration::from_secs(1);

/// One connection's. Shared by its socket, its requests and whoever may end it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    read_bytes: AtomicU64,
    /// The socket took less than it was offered: something waits to be written.
    write_is_blocked: AtomicBool,
    /// HTTP/2 requests came: what is owed to them may wait for the peer's window, where nobody here sees it.
    has_streams: AtomicBool,
    requests_open: AtomicUsize,
}

impl Progress {
    pub(super) fn read(&self, bytes: usize) {
        self.read_bytes
            .fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) fn wrote<T>(&self, outcome: &Poll<T>) {
        self.write_is_blocked
            .store(outcome.is_pending(), Ordering::Relaxed);
    }

    /// A request has come; it is open until what this answers is dropped.
    pub(super) fn open(self: &Arc<Self>, version: http::Version) -> OpenRequest {
        if version == http::Version::HTTP_2 {
            self.has_streams.store(true, Ordering::Relaxed);
        }
        self.requests_open.fetch_add(1, Ordering::Relaxed);
        OpenRequest(Arc::clone(self))
    }

    /// Resolves when the connection has had its time to begin and has not.
    pub(super) async fn never_began(&self) {
        tokio::time::sleep(PREFACE_TIMEOUT).await;
        if self.read_bytes.load(Ordering::Relaxed) >= PREFACE_BYTES {
            std::future::pending::<()>().await;
        }
    }

    /// While draining: resolves when the connection can be ended without anybody missing an answer. Nothing new is
    /// begun on it by then.
    pub(super) async fn owes_nothing(&self) {
        loop {
            tokio::time::sleep(HEAD_GRACE).await;
            let owes = self.has_streams.load(Ordering::Relaxed)
                || self.requests_open.load(Ordering::Relaxed) > 0
                || self.write_is_blocked.load(Ordering::Relaxed);
            if !owes {
                return;
            }
        }
    }
}

/// A request that is not answered to its end.
#[derive(Debug)]
pub(super) struct OpenRequest(Arc<Progress>);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.requests_open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A body that keeps its request open.
#[derive(Debug)]
pub(super) struct Answering<B> {
    body: B,
    _open: OpenRequest,
}

impl<B> Answering<B> {
    pub(super) fn new(body: B, open: OpenRequest) -> Self {
        Self { body, _open: open }
    }
}

impl<B: Body + Unpin> Body for Answering<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a future is done by then, on the paused clock.
    async fn done(within: Duration, future: impl Future<Output = ()>) -> bool {
        tokio::time::timeout(within, future).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_does_not_begin_is_told_by_its_bytes() {
        // Scenario: nothing, a byte less than a preface, a preface, after 29 and 31 seconds. Expectation: the first two
        // never began once their time is over.
        let (early, late) = (Duration::from_secs(29), Duration::from_secs(31));
        for (bytes, expected) in [(0, true), (23, true), (24, false)] {
            let progress = Progress::default();
            progress.read(bytes);
            assert!(!done(early, progress.never_began()).await, "{bytes} bytes, early");
            assert_eq!(
                done(late, progress.never_began()).await,
                expected,
                "{bytes} bytes"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_owed_keeps_a_connection() {
        // Scenario: an open request, a blocked write, a stream of HTTP/2, and none of them. Expectation: only the last
        // can be ended, and a request that closes frees its connection.
        let long = Duration::from_secs(60);
        let progress = Arc::new(Progress::default());
        let open = progress.open(http::Version::HTTP_11);
        assert!(!done(long, progress.owes_nothing()).await);
        drop(open);
        assert!(done(long, progress.owes_nothing()).await);
        progress.wrote(&Poll::<()>::Pending);
        assert!(!done(long, progress.owes_nothing()).await);
        progress.wrote(&Poll::Ready(()));
        assert!(done(long, progress.owes_nothing()).await);
        drop(progress.open(http::Version::HTTP_2));
        assert!(!done(long, progress.owes_nothing()).await);
    }
}
