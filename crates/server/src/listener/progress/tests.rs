use super::*;
use futures_util::FutureExt as _;

impl Progress {
    pub(in crate::listener) fn late() -> Self {
        Self {
            is_late: true,
            ..Self::default()
        }
    }

    pub(in crate::listener) fn with_kept(self, kept: &Arc<KeptRequests>) -> Self {
        Self {
            slots: Slots::new(kept),
            ..self
        }
    }

    pub(in crate::listener) fn with_stream_window(self, bytes: u32) -> Self {
        Self {
            frames: ReceivedFrames::new(bytes),
            ..self
        }
    }

    pub(in crate::listener) fn with_tls(self, is_tls: bool) -> Self {
        Self {
            record_bytes: if is_tls { RECORD_BYTES } else { 0 },
            ..self
        }
    }

    /// A connection of HTTP/2.
    pub(in crate::listener) fn http2(kept: &Arc<KeptRequests>) -> Arc<Self> {
        let progress = Self::default().with_kept(kept);
        progress.recognize(PREFACE);
        Arc::new(progress)
    }

    /// So many requests are open at once, and end.
    pub(in crate::listener) fn had_open(self: &Arc<Self>, requests: usize) {
        let opened = |_| {
            let exchange = self.open(true);
            self.keeps_too_much();
            exchange
        };
        drop((0..requests).map(opened).collect::<Vec<_>>());
    }

    /// What its connection has to react to.
    pub(in crate::listener) fn event(&self) -> Option<ConnectionEvent> {
        let mut seen = SeenEvents::default();
        std::future::poll_fn(|cx| self.poll_event(cx, &mut seen)).now_or_never()
    }

    /// Receives bytes without TLS.
    pub(in crate::listener) fn read(&self, bytes: &[u8]) {
        self.received(bytes.len());
        self.recognize(bytes);
    }

    pub(in crate::listener) fn open(self: &Arc<Self>, is_whole: bool) -> Arc<Exchange> {
        let exchange = self.open_recorded(is_whole, None);
        exchange.mark_admitted();
        exchange
    }
}

/// Whether a future completes within this time, on the paused clock.
async fn done(within: Duration, future: impl Future<Output = ()>) -> bool {
    tokio::time::timeout(within, future).await.is_ok()
}

#[tokio::test(start_paused = true)]
async fn a_drain_keeps_a_connection_that_is_owed_something() {
    // Scenario: an open request, a blocked write, half a request, half a request that keeps arriving, and
    // none of these; also with HTTP/2. Expectation: the connection is kept while it owes something or
    // more arrives, and with HTTP/2 as long again for a request that is on its way.
    let (short, long) = (HEAD_GRACE * 3 / 2, Duration::from_secs(60));
    let progress = Arc::new(Progress::default());
    let open = progress.open(true);
    assert!(!done(long, progress.drained()).await);
    drop(open);
    assert!(done(long, progress.drained()).await);
    progress.wrote(&Poll::<Result<usize, ()>>::Pending);
    assert!(!done(long, progress.drained()).await);
    progress.wrote(&Poll::Ready(Ok::<_, ()>(1)));
    assert!(done(short, progress.drained()).await);
    let http2 = Arc::new(Progress::default());
    http2.read(PREFACE);
    assert!(!done(short, http2.drained()).await);
    assert!(done(long, http2.drained()).await);
    let whole = http2.open(true);
    assert!(!done(long, http2.drained()).await);
    drop(whole);
    assert!(done(long, http2.drained()).await);

    let half = progress.open(false);
    assert!(done(long, progress.drained()).await);
    let comes = async {
        for _ in 0..30 {
            half.received(1);
            tokio::time::sleep(HEAD_GRACE).await;
        }
    };
    tokio::select! {
        biased;
        () = progress.drained() => panic!("more arrives"),
        () = comes => {}
    }
}

#[test]
fn http2_is_recognized_by_its_preface_in_any_pieces() {
    // Scenario: the preface and more, whole, cut in two at each place, and byte by byte; heads of HTTP/1, of which some
    // begin like it; the beginning of the preface. Expectation: the former are HTTP/2 with its last byte, the others are not.
    let is_http2 = |pieces: &[&[u8]]| {
        let progress = Progress::default();
        pieces.iter().for_each(|piece| progress.read(piece));
        progress.is_http2()
    };
    let more = [PREFACE, b"\0\0\0\x04\0\0\0\0\0"].concat();
    assert!(is_http2(&[PREFACE]));
    for cut in 0..=more.len() {
        assert!(is_http2(&[&more[..cut], &more[cut..]]), "{cut}");
    }
    let bytes: Vec<&[u8]> = more.chunks(1).collect();
    assert!(is_http2(&bytes));
    assert!(!is_http2(&bytes[..PREFACE.len() - 1]));
    for head in ["GET / HTTP/1.1\r\n\r\n", "PRI / HTTP/1.1\r\n\r\n"] {
        assert!(!is_http2(&[head.as_bytes(), PREFACE]), "{head}");
        let (first, rest) = head.split_at(1);
        assert!(!is_http2(&[first.as_bytes(), PREFACE, rest.as_bytes()]), "{head}");
    }
}

#[test]
fn received_bytes_without_a_purpose_are_bounded_however_long_they_take() {
    // Scenario: after an hour without a byte, as many unexplained ones as are allowed, and one more; a second later as many
    // as a second allows, and one more; and 16 bytes are sent. Expectation: it floods with each one more, but not once that
    // second has passed or those bytes explain one.
    let progress = Progress::default();
    progress.allow_more(Duration::from_secs(3600));
    let more = |bytes: u64| add(&progress.read_bytes, usize::try_from(bytes).unwrap());
    more(UNEXPLAINED_BYTES_MAX.unsigned_abs());
    assert!(!progress.floods());
    more(1);
    assert!(progress.floods());
    progress.allow_more(Duration::from_secs(1));
    assert!(!progress.floods());
    more(u64::try_from(UNEXPLAINED_BYTES_PER_S).unwrap());
    assert!(progress.floods());
    progress.wrote(&Poll::Ready(Ok::<_, ()>(16)));
    assert!(!progress.floods());
}

#[test]
fn tiny_messages_of_a_stream_are_no_flood_and_tinier_frames_are() {
    // Scenario: 150,000 requests of 22 bytes a second on a stream, each in a frame of its own, whose responses have 55 bytes;
    // as many cancels; as many frames that are shorter than any message, or empty. The same over TLS, each in a record of its own.
    // Expectation: only the latter are a flood, and so are records that bring nothing.
    let floods = |bytes: usize, response: usize, record: usize| {
        let progress = Arc::new(Progress::default().with_tls(record > 0));
        let stream = progress.open(true);
        (1..=2_000_000).any(|count| {
            progress.received(9 + bytes + record);
            stream.received(bytes);
            progress.wrote(&Poll::Ready(Ok::<_, ()>(response)));
            if count % 150_000 == 0 {
                progress.allow_more(Duration::from_secs(1));
            }
            progress.floods()
        })
    };
    // Of TLS 1.3, and of 1.2.
    for record in [0, 22, 29] {
        assert_eq!(
            [(22, 55), (9, 0)].map(|(bytes, response)| floods(bytes, response, record)),
            [false; 2]
        );
        assert_eq!([8, 1, 0].map(|bytes| floods(bytes, 0, record)), [true; 3]);
    }
    assert!(floods(22, 55, 29 + 22));
}

#[test]
fn a_connection_is_unproven_until_a_request_is_whole() {
    // Scenario: nothing; a head whose body is missing; the body; the end of the response; bytes that are
    // owed, or not received. Expectation: an incomplete request does not count.
    let progress = Arc::new(Progress::default());
    assert_eq!(progress.activity(), Activity::Unproven);
    let exchange = progress.open(false);
    assert_eq!(progress.activity(), Activity::Unproven);
    exchange.mark_whole();
    assert_eq!(progress.activity(), Activity::Busy);
    exchange.produced(10);
    exchange.sent(4);
    assert!(progress.owes());
    exchange.dropped(6);
    assert!(!progress.owes());
    drop(exchange);
    assert_eq!(progress.activity(), Activity::Idle);
    for (is_unreceived, activity) in [(true, Activity::Busy), (false, Activity::Idle)] {
        progress.set_unreceived(is_unreceived);
        assert_eq!(progress.activity(), activity);
    }
    drop(progress.open(false));
    assert_eq!(progress.activity(), Activity::Idle);
}

#[test]
fn a_drain_does_not_concern_a_late_connection_until_it_ends() {
    // Scenario: the daemon drains, and ends. Expectation: a late connection hears of the latter alone.
    for is_late in [false, true] {
        let progress = if is_late {
            Progress::late()
        } else {
            Progress::default()
        };
        let mut seen = SeenEvents::default();
        let mut event = || std::future::poll_fn(|cx| progress.poll_event(cx, &mut seen)).now_or_never();
        progress.set_state(State::Draining);
        assert_eq!(event(), (!is_late).then_some(ConnectionEvent::Drain));
        progress.set_state(State::Ended);
        assert_eq!(event(), is_late.then_some(ConnectionEvent::Drain));
    }
}

#[test]
fn a_decision_is_heard_once_and_closing_beats_leaving() {
    // Scenario: decisions to close gracefully for age, as nothing is in flight, at once for not reading, then gracefully
    // again. Expectation: each of the first three is seen, the others are not.
    let progress = Progress::default();
    let mut seen = SeenEvents::default();
    let mut event = || std::future::poll_fn(|cx| progress.poll_event(cx, &mut seen)).now_or_never();
    assert_eq!(event(), None);
    let (leave, finish, close) = (
        CloseDecision::GoAway(CloseReason::Age),
        CloseDecision::Finish(CloseReason::Age),
        CloseDecision::Close(CloseReason::Send),
    );
    progress.decide(leave);
    assert_eq!(event(), Some(ConnectionEvent::Close(leave)));
    assert_eq!(event(), None);
    progress.decide(finish);
    assert_eq!(event(), Some(ConnectionEvent::Close(finish)));
    progress.decide(close);
    progress.decide(CloseDecision::GoAway(CloseReason::Idle));
    progress.decide(finish);
    progress.decide(CloseDecision::Close(CloseReason::Evicted));
    assert_eq!(event(), Some(ConnectionEvent::Close(close)));
}
