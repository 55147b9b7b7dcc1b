//! A connection's socket: what goes through it is counted, and its end is heard.
//!
//! A socket that is closed while bytes from the peer lie unread in it is reset by the kernel, and a reset throws away
//! what was written and is not yet on its way: the end of an answer, to a client that pinged or opened its window
//! meanwhile (RFC 9112 9.6 tells of it). So the socket outlives the protocol that spoke on it, until the peer has closed
//! its side too.
//!
//! Deliberately absent: any say in what is sent; the protocol has said everything by then.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;

use super::ending::{Reason, Verdict};
use super::progress::Progress;

/// How long the peer has to close its side.
const LINGER: Duration = Duration::from_secs(2);
/// What is thrown away at a time.
const DISCARD_BYTES: usize = 16 << 10;

/// A socket whose reads and writes are noted.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    progress: Arc<Progress>,
}

impl Socket {
    /// Notes in `progress` what is done with this socket.
    pub(super) fn new(stream: TcpStream, progress: Arc<Progress>) -> Self {
        Self { stream, progress }
    }

    /// Closes it once the peer has closed its side, or after [`LINGER`].
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
        // An error means that the connection is gone, which is what this waits for.
        let _closed_or_late = tokio::time::timeout(LINGER, until_the_peer_closes).await;
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
            // Which wakes the connection, to be closed.
            self.progress.decide(Verdict::Close(Reason::Flood));
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
        // Scenario: a peer that reads late has sent bytes that nobody read when the protocol ends and its socket is closed.
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
            let mut socket = Socket::new(stream, Arc::default());
            socket.write_all(&vec![7; BYTES]).await.expect("written");
            socket.close().await;
        };
        let (got, ()) = tokio::join!(peer, server);
        assert_eq!(got.expect("no reset"), BYTES);
    }
}
