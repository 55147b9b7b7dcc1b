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
use ringfetch_engine::cores::{give_way, submit_left};
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
            let begun = core_turns::is_shared().then(Instant::now);
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
mod tests {
    use super::*;
    use crate::listener::kept_requests::KeptRequests;
    use futures_util::FutureExt as _;
    use std::collections::VecDeque;
    use std::task::Waker;

    /// A socket that accepts what its script says, counts calls, and keeps what it received: a real socket
    /// cannot be made full, or made to fail, at a chosen moment.
    #[derive(Default)]
    struct Scripted {
        /// `Some(n)`: accepts at most n bytes; `None`: is full once. After the script it accepts everything.
        script: VecDeque<Result<Option<usize>, io::ErrorKind>>,
        got: Rc<RefCell<Vec<Vec<u8>>>>,
        /// How long a write takes.
        write: Duration,
        /// What it has received; each read counts as one of 1 KiB, if it has not.
        bytes: VecDeque<u8>,
        progress: Arc<Progress>,
    }

    impl Read for Scripted {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            mut buffer: ReadBufCursor<'_>,
        ) -> Poll<io::Result<()>> {
            if self.bytes.is_empty() {
                self.progress.read(&[0; 1 << 10]);
            } else {
                let count = buffer.remaining().min(self.bytes.len());
                let part: Vec<u8> = self.bytes.drain(..count).collect();
                buffer.put_slice(&part);
                self.progress.read(&part);
            }
            Poll::Ready(Ok(()))
        }
    }

    impl Write for Scripted {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let taken = match self.script.pop_front() {
                Some(Ok(None)) => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Some(Err(kind)) => return Poll::Ready(Err(kind.into())),
                Some(Ok(Some(most))) => bytes.len().min(most),
                None => bytes.len(),
            };
            std::thread::sleep(self.write);
            self.got.borrow_mut().push(bytes[..taken].to_vec());
            Poll::Ready(Ok(taken))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    type Script = Vec<Result<Option<usize>, io::ErrorKind>>;

    /// Writes the pieces one after the other, flushing each, as one connection in one turn. Returns what the
    /// socket received, write by write, and how the connection ended.
    async fn one_turn(script: Script, pieces: Vec<Vec<u8>>) -> (Vec<Vec<u8>>, io::Result<()>) {
        let got = Rc::default();
        let socket = Scripted {
            script: script.into(),
            got: Rc::clone(&got),
            ..Scripted::default()
        };
        let (mut io, drain) = CoalescingIo::new(socket, Arc::default());
        let mut left = VecDeque::from(pieces);
        let mut connection = Box::pin(std::future::poll_fn(move |cx| {
            while let Some(piece) = left.front() {
                let written = ready!(Pin::new(&mut io).poll_write(cx, piece))?;
                assert_eq!(written, piece.len());
                ready!(Pin::new(&mut io).poll_flush(cx))?;
                left.pop_front();
            }
            Poll::Ready(io::Result::Ok(()))
        }));
        let ended = drain.drive(connection.as_mut()).await;
        drop(connection);
        drop(drain.finish().await);
        (Rc::unwrap_or_clone(got).into_inner(), ended)
    }

    /// A hundred small frames written and flushed in one turn reach the socket as one write, in order.
    #[tokio::test]
    async fn small_writes_of_a_turn_are_one() {
        let pieces: Vec<Vec<u8>> = (0..100).map(|piece| vec![piece; 40]).collect();
        let (got, ended) = one_turn(Vec::new(), pieces.clone()).await;
        assert!(ended.is_ok());
        assert_eq!(got, [pieces.concat()]);
    }

    /// A large piece is not copied: it follows the buffered bytes, in a write of its own.
    #[tokio::test]
    async fn a_large_write_goes_straight_through_in_order() {
        let pieces = vec![vec![1; 40], vec![2; COPIED_BYTES_MAX + 1], vec![3; 40]];
        let (got, ended) = one_turn(Vec::new(), pieces.clone()).await;
        assert!(ended.is_ok());
        assert_eq!(got, pieces);
    }

    /// A socket that accepts little, and is full now and then, receives every byte once, in order; meanwhile
    /// at most the bound is buffered.
    #[tokio::test]
    async fn a_slow_socket_gets_everything_in_order() {
        let pieces: Vec<Vec<u8>> = (0..200_u8).map(|piece| vec![piece; 1000]).collect();
        let script = [
            Ok(Some(7)),
            Ok(None),
            Ok(Some(5000)),
            Ok(None),
            Ok(None),
            Ok(Some(1)),
        ]
        .repeat(5);
        let (got, ended) = one_turn(script, pieces.clone()).await;
        assert!(ended.is_ok());
        assert!(got.iter().all(|write| write.len() <= GATHERED_BYTES_MAX));
        assert_eq!(got.concat(), pieces.concat());
    }

    /// A write that was only buffered reports success; the connection sees the socket's failure at its next
    /// write, and ends.
    #[tokio::test]
    async fn a_failed_write_is_not_lost() {
        let pieces: Vec<Vec<u8>> = (0..200_u8).map(|piece| vec![piece; 1000]).collect();
        let (_, ended) = one_turn(vec![Err(io::ErrorKind::BrokenPipe)], pieces).await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn an_error_does_not_wait_for_the_last_write() {
        // Scenario: a connection sends a goodbye, shuts its socket down and ends with an error, as HTTP/2 does for a flood, while
        // the socket is full. Expectation: its error at once; the goodbye is sent once there is room.
        let socket = Scripted {
            script: [Ok(None)].into(),
            ..Scripted::default()
        };
        let got = Rc::clone(&socket.got);
        let (mut io, drain) = CoalescingIo::new(socket, Arc::default());
        let mut connection = Box::pin(std::future::poll_fn(move |cx| {
            let buffered = Pin::new(&mut io).poll_write(cx, b"goodbye");
            assert!(matches!(buffered, Poll::Ready(Ok(7))));
            ready!(Pin::new(&mut io).poll_shutdown(cx))?;
            Poll::Ready(io::Result::Err(io::ErrorKind::ConnectionAborted.into()))
        }));
        let ended = drain.drive(connection.as_mut()).now_or_never();
        assert_eq!(
            ended.map(|ended| ended.unwrap_err().kind()),
            Some(io::ErrorKind::ConnectionAborted)
        );
        drop(connection);
        assert!(drain.finish().await.is_some());
        assert_eq!(*got.borrow(), [b"goodbye"]);
    }

    /// The output of a task that is polled only when it is woken.
    async fn woken<T: 'static>(task: impl Future<Output = T> + 'static) -> T {
        let local = tokio::task::LocalSet::new();
        let task = tokio::time::timeout(Duration::from_secs(1), local.spawn_local(task));
        let done = local.run_until(task).await.expect("it is woken");
        done.expect("no panic")
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_whose_write_has_failed_ends_although_it_waits() {
        // Scenario: a connection writes little, and then waits for its service, without a read or a write; the socket fails
        // after its turn. Expectation: it ends with the error, and is not polled for nothing until its service responds.
        let socket = Scripted {
            script: [Err(io::ErrorKind::BrokenPipe)].into(),
            ..Scripted::default()
        };
        let (mut io, drain) = CoalescingIo::new(socket, Arc::default());
        let mut polls = 0;
        let connection = std::pin::pin!(std::future::poll_fn(|cx| {
            polls += 1;
            assert_eq!(polls, 1, "polled in vain");
            let buffered = Pin::new(&mut io).poll_write(cx, b"answer");
            assert!(matches!(buffered, Poll::Ready(Ok(6))));
            Poll::<io::Result<()>>::Pending
        }));
        let ended = tokio::time::timeout(Duration::from_secs(1), drain.drive(connection)).await;
        let ended = ended.expect("it ends");
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    /// 16 MiB to a socket that accepts everything go out in bounded turns, and the connection asks for
    /// another turn after each.
    #[tokio::test]
    async fn a_large_answer_gives_way_after_each_turn() {
        const BYTES: usize = 16 << 20;
        let got: Rc<RefCell<Vec<Vec<u8>>>> = Rc::default();
        let socket = Scripted {
            script: VecDeque::new(),
            got: Rc::clone(&got),
            ..Scripted::default()
        };
        let (mut io, drain) = CoalescingIo::new(socket, Arc::default());
        let answer = vec![7; BYTES];
        let mut sent = 0;
        let mut connection = std::pin::pin!(std::future::poll_fn(move |cx| {
            while sent < BYTES {
                let pieces = [IoSlice::new(&answer[sent..]), IoSlice::new(b"never reached")];
                sent += ready!(Pin::new(&mut io).poll_write_vectored(cx, &pieces))?;
            }
            Poll::Ready(io::Result::Ok(()))
        }));
        let mut turns = 0;
        let mut driving = std::pin::pin!(drain.drive(connection.as_mut()));
        std::future::poll_fn(|cx| {
            turns += 1;
            let before: usize = got.borrow().iter().map(Vec::len).sum();
            let ended = driving.as_mut().poll(cx);
            let after: usize = got.borrow().iter().map(Vec::len).sum();
            assert!(after - before <= TURN_BYTES_MAX, "{}", after - before);
            ended
        })
        .await
        .unwrap();
        assert!(turns >= BYTES / TURN_BYTES_MAX, "{turns} turns");
        assert_eq!(got.borrow().concat(), vec![7; BYTES]);
    }

    #[tokio::test(start_paused = true)]
    async fn who_must_wait_reads_once_memory_is_released() {
        // Scenario: a connection of HTTP/2 while another one that is closed keeps the memory of requests; then that is gone.
        // Expectation: it reads nothing before, and is polled again until then.
        let kept = Arc::default();
        KeptRequests::set_request_memory(&kept, 1);
        let closed = Progress::http2(&kept);
        closed.had_open(4096);
        closed.close_for_slots();
        let progress = Progress::http2(&kept);
        let socket = Scripted {
            progress: Arc::clone(&progress),
            ..Scripted::default()
        };
        let (mut io, drain) = CoalescingIo::new(socket, Arc::clone(&progress));
        let (mut closed, turns) = (Some(closed), Rc::new(Cell::new(0)));
        let counting = Rc::clone(&turns);
        let mut connection = Box::pin(std::future::poll_fn(move |cx| {
            counting.set(counting.get() + 1);
            if counting.get() == 10 {
                drop(closed.take());
            }
            let mut buffer = ReadBuf::new(&mut []);
            Pin::new(&mut io).poll_read(cx, buffer.unfilled())
        }));
        let ended = woken(async move { drain.drive(connection.as_mut()).await }).await;
        ended.unwrap();
        assert_eq!((turns.get(), progress.read_bytes()), (10, 1 << 10));
    }

    #[tokio::test]
    async fn who_sends_without_end_gives_way() {
        // Scenario: a socket that always has data, and a connection that reads ten times as often as a turn
        // allows, next to another task. Expectation: the other task runs between any two turns; no read is
        // lost.
        let progress: Arc<Progress> = Arc::default();
        let socket = Scripted {
            progress: Arc::clone(&progress),
            ..Scripted::default()
        };
        let (mut io, drain) = CoalescingIo::new(socket, progress);
        let reads_max = (10 * TURN_RECEIVED_BYTES_MAX) >> 10;
        let (mut reads, others) = (0, Rc::new(Cell::new(0)));
        let connection = std::pin::pin!(std::future::poll_fn(move |cx| {
            while reads < reads_max {
                let mut bytes = [0; 8];
                let mut buffer = ReadBuf::new(&mut bytes);
                ready!(Pin::new(&mut io).poll_read(cx, buffer.unfilled()))?;
                reads += 1;
            }
            Poll::Ready(io::Result::Ok(()))
        }));
        let counting = Rc::clone(&others);
        let other = async move {
            loop {
                counting.set(counting.get() + 1);
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            ended = drain.drive(connection) => ended.expect("no error"),
            () = other => {}
        }
        assert_eq!(others.get(), 9);
    }

    #[test]
    fn who_takes_long_on_a_shared_core_receives_less_in_a_turn() {
        // Scenario: turns in which all is received that may be: long ones on a shared core, then quick ones, then long ones on a core
        // of its own. Expectation: half as much each time, but some; twice as much each time, up to all; all.
        let progress: Arc<Progress> = Arc::default();
        let socket = Scripted::default();
        let (io, _drain) = CoalescingIo::new(socket, Arc::clone(&progress));
        let gathered = &mut *io.0.borrow_mut();
        let mut turn = |begun: Option<Instant>| {
            gathered.begin_turn(begun);
            progress.read(&vec![0; gathered.receives]);
            gathered.end_turn();
            gathered.receives
        };
        let now = Instant::now();
        // Whatever time the test takes, none has passed since then.
        let (long, quick) = (now - LONG_TURN * 2, now + Duration::from_secs(3600));
        let received: Vec<_> = (0..7).map(|_| turn(Some(long))).collect();
        assert_eq!(received, [4096, 2048, 1024, 512, 256, 256, 256]);
        let received: Vec<_> = (0..6).map(|_| turn(Some(quick))).collect();
        assert_eq!(received, [512, 1024, 2048, 4096, 8192, 8192]);
        turn(Some(long));
        assert_eq!(turn(None), TURN_RECEIVED_BYTES_MAX);
    }

    #[tokio::test]
    async fn who_sends_more_than_its_turns_take_has_a_backlog() {
        // Scenario: connections whose clients have sent 1 MiB, and 4 KiB, which each poll reads as far as it may. Expectation:
        // the first has a backlog after some turns, until it has read all; the second never has.
        for (bytes, has_backlog) in [(1 << 20, true), (4 << 10, false)] {
            let progress: Arc<Progress> = Arc::default();
            let socket = Scripted {
                bytes: vec![0; bytes].into(),
                progress: Arc::clone(&progress),
                ..Scripted::default()
            };
            let (mut io, drain) = CoalescingIo::new(socket, progress);
            let mut left = bytes;
            let mut connection = std::pin::pin!(std::future::poll_fn(|cx| {
                while left > 0 {
                    let mut bytes = [0; 1000];
                    let mut buffer = ReadBuf::new(&mut bytes);
                    ready!(Pin::new(&mut io).poll_read(cx, buffer.unfilled()))?;
                    left -= buffer.filled().len();
                }
                Poll::<io::Result<()>>::Pending
            }));
            let mut driving = std::pin::pin!(drain.drive(connection.as_mut()));
            let mut backlogs = Vec::new();
            for _ in 0..2 * (1 << 20) / TURN_RECEIVED_BYTES_MAX {
                core_turns::note_backlog(false);
                std::future::poll_fn(|cx| {
                    assert!(driving.as_mut().poll(cx).is_pending());
                    Poll::Ready(())
                })
                .await;
                backlogs.push(core_turns::take_backlog());
            }
            assert_eq!(backlogs.iter().position(|has| *has), has_backlog.then_some(7));
            assert_eq!(backlogs.last(), Some(&false));
        }
    }

    #[test]
    fn the_time_of_large_writes_is_not_that_of_the_turn() {
        // Scenario: a large write on a shared core that takes a millisecond. Expectation: the turn counts as begun that much later.
        let socket = Scripted {
            write: Duration::from_millis(1),
            ..Scripted::default()
        };
        let (io, _drain) = CoalescingIo::new(socket, Arc::default());
        let gathered = &mut *io.0.borrow_mut();
        let begun = Instant::now();
        gathered.begin_turn(Some(begun));
        let cx = &mut Context::from_waker(Waker::noop());
        let written = gathered.poll_write_through(cx, &[IoSlice::new(&[0; 2 * COPIED_BYTES_MAX])]);
        assert!(written.is_ready());
        assert!(gathered.begun >= Some(begun + Duration::from_millis(1)));
    }

    #[tokio::test]
    async fn what_a_turn_may_receive_is_received() {
        // Scenario: a connection that may receive 256 bytes in a turn reads from a socket that has a mebibyte. Expectation: it gets
        // them in order, and no more in any turn.
        const BYTES: usize = 1 << 20;
        let sent: Vec<u8> = (0..251).cycle().take(BYTES).collect();
        let progress: Arc<Progress> = Arc::default();
        let socket = Scripted {
            bytes: sent.clone().into(),
            progress: Arc::clone(&progress),
            ..Scripted::default()
        };
        let (mut io, drain) = CoalescingIo::new(socket, progress);
        io.0.borrow_mut().receives = TURN_RECEIVED_BYTES_MIN;
        let (mut got, turns) = (Vec::new(), Rc::new(RefCell::new(Vec::new())));
        let lengths = Rc::clone(&turns);
        let got = std::pin::pin!(async {
            let connection = std::pin::pin!(std::future::poll_fn(|cx| {
                io.0.borrow_mut().receives = TURN_RECEIVED_BYTES_MIN;
                let before = got.len();
                while got.len() < BYTES {
                    let mut bytes = [0; 1000];
                    let mut buffer = ReadBuf::new(&mut bytes);
                    let read = Pin::new(&mut io).poll_read(cx, buffer.unfilled());
                    got.extend_from_slice(buffer.filled());
                    if read.is_pending() {
                        lengths.borrow_mut().push(got.len() - before);
                        return Poll::Pending;
                    }
                }
                Poll::Ready(io::Result::Ok(()))
            }));
            drain.drive(connection).await.unwrap();
            got
        });
        let local = tokio::task::LocalSet::new();
        let got = local.run_until(got).await;
        assert!(got == sent);
        assert!(
            turns
                .borrow()
                .iter()
                .all(|bytes| *bytes == TURN_RECEIVED_BYTES_MIN)
        );
        assert_eq!(turns.borrow().len(), BYTES / TURN_RECEIVED_BYTES_MIN - 1);
    }
}
