//! A connection's socket: counts its reads and writes, and closes it.
//!
//! If a socket is closed with unread bytes from the peer, the kernel resets the connection and discards
//! written bytes that are not sent yet: the end of a response, if the client sent a ping or a window update
//! meanwhile (RFC 9112 9.6). So the socket outlives the HTTP connection until the peer has closed its side
//! too (lingering close). A slow peer may need long for what the kernel holds, some megabytes.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ringfetch_engine::cores::give_way;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::close::{CloseDecision, CloseReason};
use super::progress::Progress;
use super::running_time;
use super::stalls::StallDetector;
use super::wrong_protocol::{self, FIRST_BYTES};
use crate::config::Timeouts;

/// Time for the peer to close its side, once it has received what was sent.
const LINGER: Duration = Duration::from_secs(2);
/// How often it is checked whether the peer goes on receiving.
pub(super) const CHECK: Duration = Duration::from_millis(250);
/// So few bytes are no response: GOAWAY, PING, TLS close_notify and the end of the stream. A vanished peer acknowledges none.
const FAREWELL_BYTES: u64 = 512;
/// Most bytes that a turn receives: a record of TLS has up to 18 KiB. TLS reads and decrypts until it has a byte for hyper, of
/// which `coalesce` allows 8 KiB in a turn, and beyond the end of the handshake: records may have one byte, or none.
const TURN_BYTES_MAX: u64 = 24 << 10;
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

    /// What counts them.
    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Ready once there is something to read, or the peer is gone.
    pub(super) fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_read_ready(cx).map(|_readable_or_gone| ())
    }

    /// Whether what has arrived begins as a request in HTTP/1.
    pub(super) fn begins_as_http1(&self, cx: &mut Context<'_>) -> bool {
        let mut first = [0; FIRST_BYTES];
        let mut first = ReadBuf::new(&mut first);
        let peeked = self.stream.poll_peek(cx, &mut first);
        matches!(peeked, Poll::Ready(Ok(_))) && wrong_protocol::is_http1(first.filled())
    }

    /// What was written and the peer has not received. Notes whether that may be of a response.
    pub(super) fn unreceived_bytes(&self) -> u64 {
        // An error means that the connection is gone.
        let queued = ringfetch_host::socket::unacknowledged_bytes(&self.stream).unwrap_or_default();
        self.progress.set_unreceived(queued > FAREWELL_BYTES);
        queued
    }

    /// Writes what the kernel takes now. Not counted.
    pub(super) fn write_now(&self, bytes: &[u8]) {
        let _written = self.stream.try_write(bytes);
    }

    /// The same socket for the calling thread's runtime. Dropping this one removes it from its own.
    pub(super) fn moved(&self) -> io::Result<Self> {
        let stream = std::net::TcpStream::from(self.stream.as_fd().try_clone_to_owned()?);
        Ok(Self::new(
            TcpStream::from_std(stream)?,
            Arc::clone(&self.progress),
        ))
    }

    /// Closes the socket once the peer has closed its side. Returns why it was not waited for, if that is its fault.
    ///
    /// # Cancel safety
    /// Dropping the future closes the socket at once.
    pub(super) async fn close(mut self, mut patience: Patience) -> Option<CloseReason> {
        self.stream.shutdown().await.ok()?;
        let mut discarded = vec![0; DISCARD_BYTES];
        loop {
            if let ControlFlow::Break(fault) = patience.look(&self) {
                return fault;
            }
            // Not counted: it is part of no head, and no flood.
            let read = self.stream.read(&mut discarded);
            match tokio::time::timeout(CHECK, read).await {
                // The end, or an error: the connection is gone.
                Ok(Ok(0) | Err(_)) => return None,
                // The peer may send without pause.
                Ok(Ok(_)) => tokio::task::yield_now().await,
                Err(_silent) => {}
            }
        }
    }
}

/// How long the peer is waited for.
#[derive(Debug)]
pub(super) struct Patience {
    times: Timeouts,
    sending: StallDetector,
    /// When it was seen to have received everything.
    received: Option<Instant>,
}

impl Patience {
    pub(super) fn new(times: Timeouts) -> Self {
        Self {
            times,
            sending: StallDetector::default(),
            received: None,
        }
    }

    /// Ends when the peer is not waited for any longer; with a reason, if that is its fault: it does not go on receiving.
    pub(super) fn look(&mut self, socket: &Socket) -> ControlFlow<Option<CloseReason>> {
        let now = running_time::now();
        let queued = socket.unreceived_bytes();
        let ought = queued > FAREWELL_BYTES;
        let acknowledged = socket.progress.written_bytes().saturating_sub(queued);
        let (least, limit) = (self.times.send_bytes_min, self.times.send);
        if self.sending.lasts(now, ought, acknowledged, least, limit) {
            return ControlFlow::Break(Some(CloseReason::Send));
        }
        if ought {
            self.received = None;
            return ControlFlow::Continue(());
        }
        let received = *self.received.get_or_insert(now);
        if now - received >= LINGER {
            ControlFlow::Break(None)
        } else {
            ControlFlow::Continue(())
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.progress.turn_bytes() >= TURN_BYTES_MAX {
            // The socket may have more and would not wake the task.
            give_way(cx);
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.progress
            .received(buffer.filled().len().saturating_sub(before));
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
    use std::pin::pin;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_turn_takes_little_from_the_socket() {
        // Scenario: a peer has sent what two turns may receive, which is read as long as there is more, as TLS does while it has nothing for hyper.
        // Expectation: half of them in a turn, and the next turn comes.
        const BYTES: u64 = TURN_BYTES_MAX * 2;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let peer = TcpStream::connect(listener.local_addr().expect("its address"));
        let (peer, accepted) = tokio::join!(peer, listener.accept());
        let bytes = vec![0; usize::try_from(BYTES).expect("few")];
        let sent = peer.expect("a connection").write_all(&bytes).await;
        sent.expect("all fit into the socket");
        let progress: Arc<Progress> = Arc::default();
        let mut socket = Socket::new(accepted.expect("a connection").0, Arc::clone(&progress));
        socket.stream.readable().await.expect("bytes");
        let mut turns = Vec::new();
        let received = std::future::poll_fn(|cx| {
            progress.begin_turn();
            let mut part = [0; 4 << 10];
            while progress.read_bytes() < BYTES
                && let Poll::Ready(read) = Pin::new(&mut socket).poll_read(cx, &mut ReadBuf::new(&mut part))
            {
                read.expect("bytes");
            }
            turns.push(progress.turn_bytes());
            match progress.read_bytes() {
                BYTES => Poll::Ready(()),
                _ => Poll::Pending,
            }
        });
        let in_time = tokio::time::timeout(Duration::from_secs(10), received).await;
        in_time.expect("it is woken");
        assert_eq!(turns, [BYTES / 2; 2]);
    }

    #[tokio::test]
    async fn who_sends_to_a_socket_that_closes_gives_way() {
        // Scenario: a peer has sent three times what is discarded in a read, and has closed its side, when the socket closes.
        // Expectation: each read is in a turn of its own.
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let peer = TcpStream::connect(listener.local_addr().expect("its address"));
        let (peer, accepted) = tokio::join!(peer, listener.accept());
        let mut peer = peer.expect("a connection");
        let sent = peer.write_all(&[0; 3 * DISCARD_BYTES]).await;
        sent.expect("all fit into the socket");
        peer.shutdown().await.expect("its end");
        let (stream, _) = accepted.expect("a connection");
        stream.readable().await.expect("bytes");
        let mut closes = pin!(Socket::new(stream, Arc::default()).close(Patience::new(Timeouts::default())));
        let mut turns = 0;
        let closed = std::future::poll_fn(|cx| {
            turns += 1;
            closes.as_mut().poll(cx)
        });
        assert_eq!(closed.await, None);
        assert!(turns > 3, "{turns}");
    }

    #[tokio::test]
    async fn an_answer_is_heard_to_its_end_though_the_peer_spoke_last() {
        // Scenario: a peer that reads late has sent bytes that were not read when the protocol ends and its
        // socket is closed. Expectation: the peer receives everything written, then end of file, not a reset; what is
        // discarded counts as nothing received, so as no flood and no head.
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
            let progress = Arc::default();
            let mut socket = Socket::new(stream, Arc::clone(&progress));
            socket.write_all(&vec![7; BYTES]).await.expect("written");
            let times = Timeouts::default();
            assert_eq!(socket.close(Patience::new(times)).await, None);
            assert_eq!(progress.read_bytes(), 0);
        };
        let (got, ()) = tokio::join!(peer, server);
        assert_eq!(got.expect("no reset"), BYTES);
    }
}
