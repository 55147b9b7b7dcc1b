//! Combines all writes that a connection makes in one poll into one system call.
//!
//! h2 writes a frame at a time, and a write to a socket costs more than the rest of a small response (a third of the
//! server's CPU with one 4 KiB read per call). So what hyper writes and flushes while its connection is polled
//! is buffered here and written after the poll. Large writes are not copied: they go to the socket directly,
//! after the buffer. A connection buffers at most `GATHERED_BYTES_MAX`; then writing waits for the socket.
//! A turn is bounded too: a connection that sends megabytes, or receives requests without pause, yields to
//! the core's other connections. There are no timers: nothing is held back beyond the poll that wrote it.

use super::core_turns;
use super::progress::Progress;
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use ringfetch_engine::cores::{give_way, is_shared, submit_left};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

/// Larger writes are not buffered: the copy would cost more than the write it saves.
const COPIED_BYTES_MAX: usize = 20 << 10;

/// Most bytes sent in one turn: about 60 us, since on loopback the receiver's work is done in the same call.
/// The connection's next turn comes after those of all others. Half of a response of 256 KiB fits, with its
/// envelope. With 320 KiB, a reader next to eight readers of large scattered responses waited 3.5 to 5 times
/// as long as next to well-behaved ones. With 128 KiB, a response of 256 KiB took a third turn, and a read
/// from memory 11 % more CPU.
const TURN_BYTES_MAX: usize = 144 << 10;

/// Most bytes received in one turn. Processing requests is expensive: tokio lets a task read 128 times before
/// it yields, and eight connections that sent only header fields, thousands of them, blocked a core for 30 ms
/// per round.
const TURN_RECEIVED_BYTES_MAX: usize = 8 << 10;

/// Least. While a core is shared, a connection whose turn took long receives half as much in the next ones: 8 KiB of
/// requests whose 490 fields are each a reference of one byte took 1 to 2 ms.
const TURN_RECEIVED_BYTES_MIN: usize = 256;

/// A longer turn is long: five times a caller's part of a round of `core_turns`. With 100 us single requests of a principal took 2 % more CPU.
const LONG_TURN: Duration = Duration::from_micros(250);

/// A connection has a backlog after so many more turns in which it could have got more, than others: 64 KiB at once are none. Where long
/// turns have become shorter, only those count that take long for so little.
const BACKLOG_TURNS: u32 = 8;
const SLOW_BYTES_MAX: usize = 2 << 10;

/// Most slices in one write, the same bound as in h2 and hyper.
const PIECES_MAX: usize = 64;

/// Most bytes buffered.
const GATHERED_BYTES_MAX: usize = 64 << 10;

thread_local! {
    /// An empty buffer. A connection's buffer is empty after its turn, so one buffer serves all of a core's
    /// connections; only a connection whose socket is full keeps its own.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

struct WriteBuffer<T> {
    io: T,
    bytes: Vec<u8>,
    /// How many of `bytes` are written.
    written: usize,
    /// Bytes of large writes in this turn.
    turn_bytes: usize,
    /// Counts received bytes.
    progress: Arc<Progress>,
    /// When this turn began, later by the time of its large writes, if the core is shared.
    begun: Option<Instant>,
    /// Bytes that hyper had got when it began, and how many it may get in a turn.
    received_before: u64,
    receives: usize,
    /// It could have got more in this turn; in how many turns it could, less those in which it could not.
    is_bounded: bool,
    bounded_turns: u32,
}

impl<T: Write + Unpin> WriteBuffer<T> {
    /// Writes the buffer.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(rest) = self.bytes.get(self.written..).filter(|rest| !rest.is_empty()) {
            match ready!(Pin::new(&mut self.io).poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.written += written,
            }
        }
        if !self.bytes.is_empty() {
            self.written = 0;
            self.bytes.clear();
            SPARE.set(std::mem::take(&mut self.bytes));
        }
        Pin::new(&mut self.io).poll_flush(cx)
    }

    /// Writes pieces without buffering, up to the bound of the turn.
    fn poll_write_through(
        &mut self,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let most = TURN_BYTES_MAX.saturating_sub(self.turn_bytes);
        if most == 0 {
            // The socket has room and would not wake the task.
            give_way(cx);
            return Poll::Pending;
        }
        let mut cut = [IoSlice::new(&[]); PIECES_MAX];
        let (mut count, mut left) = (0, most);
        for (place, piece) in cut.iter_mut().zip(pieces) {
            let taken = piece.get(..left).unwrap_or(piece);
            *place = IoSlice::new(taken);
            count += 1;
            left -= taken.len();
            if left == 0 {
                break;
            }
        }
        let cut = cut.get(..count).unwrap_or_default();
        let before = self.begun.map(|_| Instant::now());
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, cut);
        if let (Some(begun), Some(before)) = (&mut self.begun, before) {
            *begun += before.elapsed();
        }
        let written = ready!(written)?;
        self.turn_bytes += written;
        Poll::Ready(Ok(written))
    }

    /// `begun`: now, on a shared core.
    fn begin_turn(&mut self, begun: Option<Instant>) {
        self.begun = begun;
        self.turn_bytes = 0;
        self.progress.begin_turn();
        self.received_before = self.progress.frames.plain_bytes();
    }

    /// Bytes that hyper has got in this turn.
    fn received(&self) -> usize {
        let received = self
            .progress
            .frames
            .plain_bytes()
            .saturating_sub(self.received_before);
        usize::try_from(received).unwrap_or(usize::MAX)
    }

    /// Notes whether the client sends more than turns take. Adapts what is received in a turn to the time that this one took on a
    /// shared core, but for its writes: an upload beside a download on one connection is not what takes long.
    fn end_turn(&mut self) {
        let (received, is_bounded) = (self.received(), std::mem::take(&mut self.is_bounded));
        let begun = self.begun.take();
        if received > 0 {
            let counts = self.receives == TURN_RECEIVED_BYTES_MAX || self.receives <= SLOW_BYTES_MAX;
            self.bounded_turns = if is_bounded && counts {
                (self.bounded_turns + 1).min(2 * BACKLOG_TURNS)
            } else {
                self.bounded_turns.saturating_sub(1)
            };
            core_turns::note_backlog(self.bounded_turns >= BACKLOG_TURNS);
        }
        let Some(begun) = begun else {
            self.receives = TURN_RECEIVED_BYTES_MAX;
            return;
        };
        if received == 0 {
            return;
        }
        let is_long = begun.elapsed() > LONG_TURN;
        if is_long && received >= self.receives / 2 {
            self.receives = (self.receives / 2).max(TURN_RECEIVED_BYTES_MIN);
        } else if !is_long && received >= self.receives {
            self.receives = (self.receives * 2).min(TURN_RECEIVED_BYTES_MAX);
        }
    }

    fn gather<'a>(&mut self, pieces: impl Iterator<Item = &'a [u8]>) {
        if self.bytes.capacity() == 0 {
            self.bytes = SPARE.take();
        }
        pieces.for_each(|piece| self.bytes.extend_from_slice(piece));
    }

    fn has_room(&self, length: usize) -> bool {
        self.bytes.len() + length <= GATHERED_BYTES_MAX
    }
}

/// A socket whose writes are buffered.
pub(super) struct CoalescingIo<T>(Rc<RefCell<WriteBuffer<T>>>);

impl<T: Read + Write + Unpin> CoalescingIo<T> {
    /// The socket for hyper, and the flusher of its buffer.
    pub(super) fn new(io: T, progress: Arc<Progress>) -> (Self, Flusher<T>) {
        let gathered = Rc::new(RefCell::new(WriteBuffer {
            io,
            bytes: Vec::new(),
            written: 0,
            turn_bytes: 0,
            begun: None,
            received_before: progress.frames.plain_bytes(),
            receives: TURN_RECEIVED_BYTES_MAX,
            is_bounded: false,
            bounded_turns: 0,
            progress,
        }));
        (Self(Rc::clone(&gathered)), Flusher { gathered })
    }
}

/// Writes a connection's buffer after each poll.
pub(super) struct Flusher<T> {
    gathered: Rc<RefCell<WriteBuffer<T>>>,
}

impl<T: Write + Unpin> Flusher<T> {
    /// Writes what is left, once the connection is dropped. Returns the socket, unless that has failed.
    pub(super) async fn finish(self) -> Option<T> {
        let mut gathered = Rc::into_inner(self.gathered)?.into_inner();
        std::future::poll_fn(|cx| gathered.poll_drain(cx)).await.ok()?;
        Some(gathered.io)
    }

    /// Accesses the socket between polls of the connection.
    pub(super) fn with_io(&self, act: impl FnOnce(&mut T)) {
        act(&mut self.gathered.borrow_mut().io);
    }

    /// Polls a connection and writes its buffer after each poll, until it has ended. It is not polled after that: what is
    /// left to write is for [`Self::finish`], since its error must not wait for a client that does not read.
    ///
    /// # Errors
    /// Errors of the connection, or of writing its buffer.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub(super) async fn drive<C, E>(&self, mut connection: Pin<&mut C>) -> Result<(), E>
    where
        C: Future<Output = Result<(), E>>,
        E: From<io::Error>,
    {
        std::future::poll_fn(|cx| {
            submit_left();
            let begun = is_shared().then(Instant::now);
            self.gathered.borrow_mut().begin_turn(begun);
            let polled = connection.as_mut().poll(cx);
            let gathered = &mut *self.gathered.borrow_mut();
            gathered.end_turn();
            if polled.is_ready() {
                return polled;
            }
            match gathered.poll_drain(cx) {
                Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
                // Nothing can be written any more, and the connection may not read or write before its service responds.
                Poll::Ready(Err(error)) => Poll::Ready(Err(error.into())),
            }
        })
        .await
    }
}

impl<T: Read + Write + Unpin> Read for CoalescingIo<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let gathered = &mut *self.0.borrow_mut();
        let most = gathered.receives.saturating_sub(gathered.received());
        if most == 0 || gathered.progress.must_wait() {
            gathered.is_bounded = true;
            // The socket may have more bytes and would not wake the task.
            give_way(cx);
            return Poll::Pending;
        }
        if gathered.receives == TURN_RECEIVED_BYTES_MAX {
            return Pin::new(&mut gathered.io).poll_read(cx, buffer);
        }
        let mut part = [MaybeUninit::uninit(); TURN_RECEIVED_BYTES_MAX / 2];
        let most = most.min(buffer.remaining()).min(part.len());
        let mut part = ReadBuf::uninit(part.get_mut(..most).unwrap_or_default());
        ready!(Pin::new(&mut gathered.io).poll_read(cx, part.unfilled()))?;
        buffer.put_slice(part.filled());
        Poll::Ready(Ok(()))
    }
}

impl<T: Read + Write + Unpin> Write for CoalescingIo<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let length = pieces.iter().map(|piece| piece.len()).sum();
        let gathered = &mut *self.0.borrow_mut();
        if length > COPIED_BYTES_MAX || !gathered.has_room(length) {
            ready!(gathered.poll_drain(cx))?;
        }
        if length > COPIED_BYTES_MAX {
            return gathered.poll_write_through(cx, pieces);
        }
        gathered.gather(pieces.iter().map(|piece| &**piece));
        Poll::Ready(Ok(length))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // After the poll: see `Flusher::drive`.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The socket is closed once the connection has ended and its buffer is written: see `Flusher::finish`.
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests;
