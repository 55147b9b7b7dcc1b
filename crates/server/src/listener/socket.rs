//! A connection's socket: counts its reads and writes, and closes it.
//!
//! If a socket is closed with unread bytes from the peer, the kernel resets the connection and discards
//! written bytes that are not sent yet: the end of a response, if the client sent a ping or a window update
//! meanwhile (RFC 9112 9.6). So the socket outlives the HTTP connection until the peer has closed its side
//! too (lingering close).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;

use super::close::{CloseDecision, CloseReason};
use super::progress::Progress;

/// Time for the peer to close its side.
pub(super) const LINGER: Duration = Duration::from_secs(2);
/// Bytes discarded per read.
const DISCARD_BYTES: usize = 16 << 10;

/// A socket whose reads and writes are counted.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    progress: Arc<Progress>,
}

impl Socket {
    /// Counts reads and writes in `progress`.
    pub(super) fn new(stream: TcpStream, progress: Arc<Progress>) -> Self {
        Self { stream, progress }
    }

    /// Ready once there is something to read, or the peer is gone.
    pub(super) fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_read_ready(cx).map(|_readable_or_gone| ())
    }

    /// A writer that writes at once or not at all. It counts nothing.
    pub(super) fn writer_now(&self) -> impl io::Write {
        WriterNow(&self.stream)
    }

    /// The socket, removed from its runtime.
    pub(super) fn into_std(self) -> io::Result<std::net::TcpStream> {
        self.stream.into_std()
    }

    /// Closes the socket once the peer has closed its side, or after [`LINGER`].
    ///
    /// # Cancel safety
    /// Dropping the future closes the socket at once.
    pub(super) async fn close(mut self) {
        let until_the_peer_closes = async {
            self.stream.shutdown().await?;
            let mut discarded = vec![0; DISCARD_BYTES];
            while self.stream.read(&mut discarded).await? > 0 {}
            io::Result::Ok(())
        };
        // An error means that the connection is gone.
        let _closed_or_late = tokio::time::timeout(LINGER, until_the_peer_closes).await;
    }
}

struct WriterNow<'a>(&'a TcpStream);

impl io::Write for WriterNow<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.progress
            .read(buffer.filled().get(before..).unwrap_or_default());
        if self.progress.floods() {
            // Wakes the connection, which closes.
            self.progress.decide(CloseDecision::Close(CloseReason::Flood));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.progress.wrote(&outcome);
        outcome
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.progress.wrote(&outcome);
        outcome
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn an_answer_is_heard_to_its_end_though_the_peer_spoke_last() {
        // Scenario: a peer that reads late has sent bytes that were not read when the protocol ends and its
        // socket is closed. Expectation: the peer receives everything written, then end of file, not a reset.
        const BYTES: usize = 2 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let peer = async {
            let mut peer = TcpStream::connect(address).await.expect("a connection");
            peer.write_all(b"never read").await.expect("sent");
            // Lets the other side write as much as it can.
            tokio::task::yield_now().await;
            let mut got = Vec::new();
            peer.read_to_end(&mut got).await.map(|_| got.len())
        };
        let server = async {
            let (stream, _) = listener.accept().await.expect("a connection");
            stream.readable().await.expect("bytes");
            let mut socket = Socket::new(stream, Arc::default());
            socket.write_all(&vec![7; BYTES]).await.expect("written");
            socket.close().await;
        };
        let (got, ()) = tokio::join!(peer, server);
        assert_eq!(got.expect("no reset"), BYTES);
    }
}
