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
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
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
