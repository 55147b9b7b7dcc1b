//! Detects a peer that is silent: pings it, and fails its stream.

use super::Calls;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{oneshot, watch};

/// How often a connection in use is pinged, and how long the peer may take to answer.
const PING_EVERY: Duration = Duration::from_secs(30);
const PONG_WITHIN: Duration = Duration::from_secs(10);

/// Signals and returns if the peer does not answer a ping in time. A connection is pinged after calls that have ended, too:
/// if their deadlines are short, there is hardly ever one when it is looked at. An idle one is not: gRPC's servers close it.
/// After a call that was not answered in time it is pinged at once.
pub(super) async fn watch(
    mut pings: h2::PingPong,
    (connection, mut doubts): (usize, watch::Receiver<()>),
    calls: Arc<Calls>,
    silent: oneshot::Sender<()>,
) {
    loop {
        let doubted = tokio::time::timeout(PING_EVERY, doubts.changed()).await;
        if !calls.were_any() && doubted.is_err() {
            continue;
        }
        let pong = pings.ping(h2::Ping::opaque());
        if !matches!(tokio::time::timeout(PONG_WITHIN, pong).await, Ok(Ok(_))) {
            // The receiver is gone if the connection has ended meanwhile.
            let _ = silent.send(());
            return;
        }
        calls.heard(connection);
    }
}

/// A byte stream that fails once its peer is known to be silent.
pub(super) struct Watched<S> {
    pub(super) stream: S,
    pub(super) is_silent: Arc<AtomicBool>,
}

impl<S: Unpin> Watched<S> {
    fn check(&mut self) -> io::Result<Pin<&mut S>> {
        if self.is_silent.load(Ordering::Relaxed) {
            let problem = format!("the server has not answered a ping within {PONG_WITHIN:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
        }
        Ok(Pin::new(&mut self.stream))
    }
}

impl<S: AsyncRead + Unpin> Watched<S> {
    /// The outcome of a write. If that has failed, the reason that the peer gave before it hung up, an alert of TLS, instead of
    /// "broken pipe". It may be on this host and not noticed yet; whoever cannot write can read the end.
    fn or_reason<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if !matches!(written, Poll::Ready(Err(_))) {
            return written;
        }
        let mut bytes = [0];
        let read = Pin::new(&mut self.stream).poll_read(context, &mut ReadBuf::new(&mut bytes));
        match read {
            Poll::Ready(Ok(())) => written,
            Poll::Ready(Err(reason)) => Poll::Ready(Err(reason)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check()?.poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = self.check()?.poll_write(context, bytes);
        self.or_reason(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.check()?.poll_write_vectored(context, pieces);
        self.or_reason(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let written = self.check()?.poll_flush(context);
        self.or_reason(context, written)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?.poll_shutdown(context)
    }
}
