//! Lingering close. If a socket is closed with unread bytes from the peer, the kernel resets the connection and discards
//! written bytes that are not sent yet: the end of a response, for a client that sent a ping or a window update in between
//! (RFC 9112 9.6). So the socket outlives the HTTP connection until the peer has closed its side too.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::close::{CloseDecision, CloseReason};
use super::progress::Progress;

/// Time for the peer to close its side.
const LINGER: Duration = Duration::from_secs(2);
/// Bytes discarded per read.
const DISCARD_BYTES: usize = 16 << 10;

/// A socket that is passed to its [`LingeringClose`] when dropped.
#[derive(Debug)]
pub(super) struct LingeringStream {
    /// `None` only while it is dropped.
    stream: Option<TcpStream>,
    progress: Arc<Progress>,
    back: Option<oneshot::Sender<TcpStream>>,
}

/// Receives the socket when the HTTP connection drops it.
#[derive(Debug)]
pub(super) struct LingeringClose(oneshot::Receiver<TcpStream>);

/// Wraps a socket. Its reads and writes are counted in `progress`.
pub(super) fn with_lingering_close(
    stream: TcpStream,
    progress: Arc<Progress>,
) -> (LingeringStream, LingeringClose) {
    let (back, returned) = oneshot::channel();
    let lingering = LingeringStream {
        stream: Some(stream),
        progress,
        back: Some(back),
    };
    (lingering, LingeringClose(returned))
}

impl LingeringClose {
    /// Closes the socket once the peer has, or after [`LINGER`]. Call it when the stream is dropped.
    ///
    /// # Cancel safety
    /// Dropping the future closes the socket at once.
    pub(super) async fn close(mut self) {
        let Ok(mut stream) = self.0.try_recv() else { return };
        let until_the_peer_closes = async {
            stream.shutdown().await?;
            let mut discarded = vec![0; DISCARD_BYTES];
            while stream.read(&mut discarded).await? > 0 {}
            io::Result::Ok(())
        };
        // An error means that the connection is gone.
        let _closed_or_late = tokio::time::timeout(LINGER, until_the_peer_closes).await;
    }
}

impl Drop for LingeringStream {
    fn drop(&mut self) {
        if let (Some(stream), Some(back)) = (self.stream.take(), self.back.take()) {
            // If the receiver is gone the socket is closed here.
            let _nobody_waits = back.send(stream);
        }
    }
}

impl LingeringStream {
    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        let stream = self.stream.as_mut();
        stream
            .map(Pin::new)
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl AsyncRead for LingeringStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(self.stream()?.poll_read(cx, buffer))?;
        self.progress
            .read(buffer.filled().get(before..).unwrap_or_default());
        if self.progress.floods() {
            // Wakes the connection, which closes.
            self.progress.decide(CloseDecision::Close(CloseReason::Flood));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for LingeringStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = self.stream()?.poll_write(cx, bytes);
        self.progress.wrote(&outcome);
        outcome
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = self.stream()?.poll_write_vectored(cx, slices);
        self.progress.wrote(&outcome);
        outcome
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn an_answer_is_heard_to_its_end_though_the_peer_spoke_last() {
        // Scenario: a peer that reads late has sent bytes that nobody read when the protocol ends and drops its socket.
        // Expectation: the peer gets all that was written and then an end, not a reset.
        const BYTES: usize = 2 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let peer = async {
            let mut peer = TcpStream::connect(address).await.expect("a connection");
            peer.write_all(b"never read").await.expect("sent");
            // The other side writes meanwhile, as far as it can.
            tokio::task::yield_now().await;
            let mut got = Vec::new();
            peer.read_to_end(&mut got).await.map(|_| got.len())
        };
        let server = async {
            let (stream, _) = listener.accept().await.expect("a connection");
            stream.readable().await.expect("bytes");
            let (mut lingering, returned) = with_lingering_close(stream, Arc::default());
            lingering.write_all(&vec![7; BYTES]).await.expect("written");
            drop(lingering);
            returned.close().await;
        };
        let (got, ()) = tokio::join!(peer, server);
        assert_eq!(got.expect("no reset"), BYTES);
    }
}
