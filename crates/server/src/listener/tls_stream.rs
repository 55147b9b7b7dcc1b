//! A connection's stream, with or without TLS, and the handshakes of a port.
//!
//! Handshakes run on the main thread, so that their arithmetic (0.1 to 1 ms) delays no reads; then the
//! connection moves to its core. The number of concurrent handshakes per port is limited: one too many ends
//! the oldest of the caller with the most.

use std::future::{Future as _, poll_fn};
use std::io::{self, IoSlice};
use std::net::TcpStream as StdTcpStream;
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use prometheus::IntCounter;
use ringfetch_engine::sync::lock;
use tokio::io::{AsyncBufRead as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;

use super::client_frames::ClientFrames;
use super::close::{CloseDecision, CloseReason};
use super::connection_table::ConnectionTable;
use super::progress::{ConnectionEvent, Progress, SeenEvents};
use super::running_time;
use super::serve::{AcceptedConnection, LAST_WORD, PortServer};
use super::socket::{CHECK, Patience, Socket};
use super::wrong_protocol::WrongProtocol;
use crate::tls::{Tls, names_of};

/// Longest handshake, even if `timeouts.handshake_ms` is off.
const HANDSHAKE_MAX: Duration = Duration::from_secs(60);
/// Most bytes that a client sends after its handshake without one for HTTP: the longest record (18 KiB), new keys, and the 4 KiB that
/// rustls reads at once. It would keep 64 KiB of a message of its own that does not end.
const SEALED_BYTES_MAX: u64 = 24 << 10;

/// A connection's stream. Counters count the bytes on the socket, encrypted if there is TLS.
#[derive(Debug)]
pub(super) struct Stream {
    transport: Transport,
    frames: ClientFrames,
    /// Of TLS.
    opened: Opened,
}

#[derive(Debug)]
enum Transport {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

/// An accepted connection on its way to its core.
#[derive(Debug)]
pub(super) enum AcceptedStream {
    Plain(StdTcpStream),
    /// After the handshake. Its socket is registered with the main thread's runtime.
    Tls(Box<TlsStream<Socket>>),
}

impl AcceptedStream {
    /// Registers the socket with the calling thread's runtime.
    pub(super) fn arrive(self, progress: &Arc<Progress>) -> io::Result<Stream> {
        let transport = match self {
            Self::Plain(stream) => {
                let stream = TcpStream::from_std(stream)?;
                Transport::Plain(Socket::new(stream, Arc::clone(progress)))
            }
            Self::Tls(mut stream) => {
                let (socket, _) = stream.get_mut();
                *socket = socket.moved()?;
                Transport::Tls(stream)
            }
        };
        Ok(Stream {
            transport,
            frames: ClientFrames::default(),
            opened: Opened::new(progress),
        })
    }
}

impl Transport {
    fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }
}

impl Stream {
    /// Ready once the peer has sent something, or is gone.
    pub(super) fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        // The first request may have come with the end of the handshake.
        if let Transport::Tls(stream) = &self.transport
            && !stream.get_ref().1.wants_read()
        {
            return Poll::Ready(());
        }
        self.transport.socket().poll_read_ready(cx)
    }

    /// Whether the client speaks HTTP/1 without TLS, by what has arrived.
    pub(super) fn begins_as_http1(&self, cx: &mut Context<'_>) -> bool {
        match &self.transport {
            Transport::Plain(socket) => socket.begins_as_http1(cx),
            Transport::Tls(_) => false,
        }
    }

    /// Responds to HTTP/1 on a port without it, and closes the connection as [`Self::close`] does.
    pub(super) async fn refuse_http1(self, patience: Patience) -> Option<CloseReason> {
        self.transport
            .socket()
            .write_now(WrongProtocol::Grpc.response().as_bytes());
        self.close(patience).await
    }

    /// Call it before dropping a connection: sends TLS close_notify as far as the socket accepts it now, so
    /// that clients do not see a truncation.
    pub(super) fn say_goodbye(&mut self) {
        if let Transport::Tls(stream) = &mut self.transport {
            let (socket, session) = stream.get_mut();
            session.send_close_notify();
            let mut records = Vec::new();
            while session.wants_write() && session.write_tls(&mut records).is_ok_and(|written| written > 0) {}
            socket.write_now(&records);
        }
    }

    /// Notes whether the peer has not received all that was written.
    pub(super) fn note_unreceived(&self) {
        self.transport.socket().unreceived_bytes();
    }

    /// Ends TLS, and closes the socket as [`Socket::close`] does.
    ///
    /// # Cancel safety
    /// Dropping the future closes the socket at once.
    pub(super) async fn close(self, mut patience: Patience) -> Option<CloseReason> {
        match self.transport {
            Transport::Plain(socket) => socket.close(patience).await,
            Transport::Tls(mut stream) => {
                loop {
                    if let ControlFlow::Break(fault) = patience.look(stream.get_ref().0) {
                        return fault;
                    }
                    // close_notify waits for room in the socket. An error means that the connection is gone.
                    if timeout(CHECK, stream.shutdown()).await.is_ok() {
                        break;
                    }
                }
                stream.into_inner().0.close(patience).await
            }
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let Self {
            transport,
            frames,
            opened,
        } = self.get_mut();
        let socket = match transport {
            Transport::Plain(socket) => {
                ready!(Pin::new(&mut *socket).poll_read(cx, buffer))?;
                socket
            }
            Transport::Tls(stream) => {
                ready!(opened.poll_read(stream, cx, buffer))?;
                stream.get_ref().0
            }
        };
        let read = buffer.filled().get(before..).unwrap_or_default();
        let progress = socket.progress();
        frames.follow(progress.recognize(read), progress);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().transport {
            Transport::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Transport::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().transport {
            Transport::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, slices),
            Transport::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// What TLS has opened of what was received.
#[derive(Debug)]
struct Opened {
    /// The bytes received when it last opened some.
    at: u64,
    /// An error behind what was opened.
    failed: Option<io::Error>,
}

impl Opened {
    fn new(progress: &Progress) -> Self {
        Self {
            at: progress.read_bytes(),
            failed: None,
        }
    }

    /// Reads as `TlsStream` does, of which nobody knows when it opened the last record. Closes a connection of which too
    /// much is sealed.
    fn poll_read(
        &mut self,
        stream: &mut TlsStream<Socket>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Err(error));
        }
        let before = buffer.filled().len();
        while buffer.remaining() > 0 {
            let polled = Pin::new(&mut *stream).poll_fill_buf(cx);
            let length = match polled {
                Poll::Ready(Ok(opened)) => {
                    let length = opened.len().min(buffer.remaining());
                    buffer.put_slice(opened.get(..length).unwrap_or_default());
                    length
                }
                Poll::Ready(Err(error)) if buffer.filled().len() > before => {
                    self.failed = Some(error);
                    break;
                }
                Poll::Pending if buffer.filled().len() > before => break,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    self.look(stream.get_ref().0.progress());
                    return Poll::Pending;
                }
            };
            if length == 0 {
                break;
            }
            Pin::new(&mut *stream).consume(length);
            self.at = stream.get_ref().0.progress().read_bytes();
        }
        Poll::Ready(Ok(()))
    }

    fn look(&self, progress: &Progress) {
        if progress.read_bytes().saturating_sub(self.at) > SEALED_BYTES_MAX {
            // Wakes the connection, which closes.
            progress.decide(CloseDecision::Close(CloseReason::Flood));
        }
    }
}

/// The handshakes of one port.
#[derive(Debug)]
pub(super) struct Handshakes {
    tls: Tls,
    table: Mutex<ConnectionTable>,
    succeeded: IntCounter,
    failed: IntCounter,
}

impl Handshakes {
    pub(super) fn new(tls: Tls, transport: &str) -> Self {
        let [succeeded, failed] = tls.handshake_counters(transport);
        Self {
            tls,
            table: Mutex::default(),
            succeeded,
            failed,
        }
    }

    /// Performs a connection's handshake; counts and logs a failure.
    pub(super) async fn shake(
        &self,
        stream: StdTcpStream,
        accepted: &AcceptedConnection,
        server: &PortServer,
    ) -> Option<AcceptedStream> {
        let caller = accepted.connection.address();
        let progress = &accepted.progress;
        let taken = lock(&self.table).take(caller, progress, self.tls.handshakes_max());
        let shaken = match taken {
            // All entries are handshakes, so there is always one to end.
            Err(_full) => Err(Some(CloseReason::Refused)),
            Ok(number) => {
                let shaken = self.shake_in_time(stream, accepted, server).await;
                lock(&self.table).leave(caller, number);
                shaken
            }
        };
        match shaken {
            Ok(_) => self.succeeded.inc(),
            Err(None) => {}
            Err(Some(reason)) => {
                self.failed.inc();
                server.close_counters.count(reason, caller);
            }
        }
        shaken.ok()
    }

    async fn accept(&self, mut socket: Socket, server: &PortServer) -> io::Result<TlsStream<Socket>> {
        poll_fn(|cx| socket.poll_read_ready(cx)).await;
        if poll_fn(|cx| Poll::Ready(socket.begins_as_http1(cx))).await {
            // Counts as sent, and so as a handshake that failed.
            socket.read_u8().await?;
            socket.write_now(WrongProtocol::Tls.response().as_bytes());
            let patience = Patience::new(server.connection_limits.timeouts());
            socket.close(patience).await;
            return Err(io::Error::other("the client speaks HTTP without TLS"));
        }
        self.tls.acceptor(server.http2_only).accept(socket).await
    }

    /// Fails without a reason if its client left before it sent a byte, as probes do, or was silent until a drain.
    async fn shake_in_time(
        &self,
        stream: StdTcpStream,
        accepted: &AcceptedConnection,
        server: &PortServer,
    ) -> Result<AcceptedStream, Option<CloseReason>> {
        let progress = &accepted.progress;
        let failed = |error: io::Error| {
            tracing::debug!(transport = server.transport, %error, "TLS handshake failed");
            (progress.read_bytes() > 0).then_some(CloseReason::Tls)
        };
        let limit = server.connection_limits.timeouts().handshake;
        let limit = if limit.is_zero() {
            HANDSHAKE_MAX
        } else {
            limit.min(HANDSHAKE_MAX)
        };
        let mut late = pin!(running_time::sleep(limit));
        let socket = Socket::new(TcpStream::from_std(stream).map_err(failed)?, Arc::clone(progress));
        let mut shaking = pin!(self.accept(socket, server));
        let (mut seen, mut drains, mut goes_on) = (SeenEvents::default(), false, false);
        loop {
            let event = poll_fn(|cx| progress.poll_event(cx, &mut seen));
            let turn = poll_fn(|cx| {
                progress.begin_turn();
                shaking.as_mut().poll(cx)
            });
            tokio::select! {
                biased;
                shaken = turn => {
                    let stream = shaken.map_err(failed)?;
                    if server.dispatcher.access.is_some()
                        && let Some([certificate, ..]) = stream.get_ref().1.peer_certificates()
                    {
                        accepted.connection.identify(names_of(certificate));
                    }
                    return Ok(AcceptedStream::Tls(Box::new(stream)));
                }
                event = event => match event {
                    ConnectionEvent::Close(decision) => return Err(Some(decision.reason())),
                    // Its first request is answered if it arrives soon.
                    ConnectionEvent::Drain => {
                        drains = true;
                        late.set(running_time::sleep(LAST_WORD.min(limit)));
                    }
                },
                () = &mut late => {
                    let has_begun = drains && progress.read_bytes() > 0;
                    if !has_begun || goes_on {
                        return Err((!drains).then_some(CloseReason::Handshake));
                    }
                    // What is left takes a round trip.
                    goes_on = true;
                    late.set(running_time::sleep(LAST_WORD.min(limit)));
                }
            }
        }
    }
}
