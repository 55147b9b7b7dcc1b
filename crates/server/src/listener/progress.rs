//! What happened on a connection, as counters: written where it happens (the socket, the requests, the bodies), read
//! by whoever decides how long the connection may go on. One relaxed addition each, no clock and no timer.
//!
//! An `Exchange` is one request and its answer, from the request's head to the last byte of the answer that leaves for
//! the socket. HTTP/2 may hold an answer back long after its body was produced; `Owed` counts those bytes.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use slab::Slab;

use super::ending::Verdict;
use super::watch::ExchangeMarks;
use super::{CONNECTION_WINDOW_BYTES, HEADER_LIST_BYTES, STREAM_WINDOW_BYTES};
use crate::lifecycle::State;

/// The client connection preface of HTTP/2 (RFC 9113 3.4), and less than any head of HTTP/1 that names a host.
pub(super) const PREFACE_BYTES: u64 = 24;
/// How that preface begins, and no request of HTTP/1 does.
const PREFACE_BEGIN: &[u8] = b"PRI";
/// While draining, how long a head that is half here has to become whole.
const HEAD_GRACE: Duration = Duration::from_secs(1);

/// Bytes that a request explains, besides those of its body that are taken up: its head, and a window of a body that is
/// not wanted.
const EXPLAINED_PER_REQUEST: u64 = STREAM_WINDOW_BYTES as u64 + HEADER_LIST_BYTES as u64;
/// A window update or an acknowledgement is 13 or 17 bytes, and clients send one for a few KiB at least.
const SENT_PER_EXPLAINED: u64 = 16;
/// Most unexplained bytes at a time: a window that is not taken up yet, and some more.
const UNEXPLAINED_BYTES_MAX: i64 = CONNECTION_WINDOW_BYTES as i64 + (1 << 20);
/// Bytes a second that need no explanation: pings, settings, priorities.
const UNEXPLAINED_BYTES_PER_S: u128 = 256 << 10;

/// One connection's. Shared by its socket, its requests and whoever may end it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    read_bytes: AtomicU64,
    /// `read_bytes` when the last exchange ended: what comes later is the next head.
    read_bytes_at_end: AtomicU64,
    written_bytes: AtomicU64,
    /// Bytes of request bodies that were taken up.
    body_bytes: AtomicU64,
    /// Bytes of answers that were produced and are not sent.
    owed_bytes: AtomicU64,
    /// The socket took less than it was offered: something waits to be written.
    write_is_blocked: AtomicBool,
    is_http2: AtomicBool,
    /// How far the bytes that no request explains may go: see [`Self::floods`].
    flood_base: AtomicI64,
    /// Exchanges so far.
    begun: AtomicU64,
    /// Exchanges whose request was whole, so far.
    whole: AtomicU64,
    /// Exchanges that ended without an answer, so far.
    cancelled: AtomicU64,
    /// Open exchanges, and those of them whose request is whole or whose answer has begun.
    open: AtomicUsize,
    open_whole: AtomicUsize,
    /// A drain does not wait for it.
    is_late: bool,
    /// What was decided about the connection, and whether the daemon has come to the connection's end. It is woken to
    /// hear either.
    verdict: AtomicU8,
    drains: AtomicBool,
    told: AtomicWaker,
    exchanges: Mutex<Slab<Watched>>,
}

/// An open exchange as those see it who look at all of them now and then.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) exchange: Weak<Exchange>,
    pub(super) marks: ExchangeMarks,
}

/// What a connection has to hear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// This was decided about it.
    Verdict(Verdict),
    /// The daemon drains, or ends if the connection is late.
    Drain,
}

/// What a connection has heard already.
#[derive(Debug, Default)]
pub(super) struct Heard {
    verdict: Option<Verdict>,
    drains: bool,
}

/// What a connection is doing, for those who look for one that can be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It never sent a whole request.
    Unproven,
    /// It did, and has none in flight.
    Idle,
    /// A whole request is in flight, or something is owed to it.
    Busy,
}

/// One request and its answer.
#[derive(Debug)]
pub(super) struct Exchange {
    progress: Arc<Progress>,
    key: usize,
    /// The request's last byte was taken up, or its answer has begun.
    is_whole: AtomicBool,
    /// The head of the answer is there.
    has_answer: AtomicBool,
    /// Somebody waits for more of the request's body.
    wants_body: AtomicBool,
    received_bytes: AtomicU64,
    sent_bytes: AtomicU64,
    owed_bytes: AtomicU64,
    /// Its body has come to a stop: whoever waits for the answer gets none.
    is_stalled: AtomicBool,
    waiting: Mutex<Option<Waker>>,
}

fn add(counter: &AtomicU64, bytes: usize) {
    counter.fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::Relaxed);
}

fn subtract(counter: &AtomicU64, bytes: usize) {
    counter.fetch_sub(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::Relaxed);
}

impl Progress {
    /// A new connection's. A drain does not wait for one that `is_late`.
    pub(super) fn new(is_late: bool) -> Self {
        Self {
            is_late,
            ..Self::default()
        }
    }

    /// Whether a drain does not wait for the connection.
    pub(super) fn is_late(&self) -> bool {
        self.is_late
    }

    /// The socket gave these bytes.
    pub(super) fn read(&self, bytes: &[u8]) {
        if self.read_bytes() == 0 && bytes.starts_with(PREFACE_BEGIN) {
            self.is_http2.store(true, Ordering::Relaxed);
        }
        add(&self.read_bytes, bytes.len());
    }

    /// The socket was offered something and took as much of it.
    pub(super) fn wrote<E>(&self, outcome: &Poll<Result<usize, E>>) {
        self.write_is_blocked
            .store(outcome.is_pending(), Ordering::Relaxed);
        if let Poll::Ready(Ok(written)) = outcome {
            add(&self.written_bytes, *written);
        }
    }

    /// A request has come. `is_whole`: it has no body.
    pub(super) fn open(self: &Arc<Self>, is_whole: bool) -> Arc<Exchange> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = exchanges.vacant_entry();
        let exchange = Arc::new(Exchange {
            progress: Arc::clone(self),
            key: entry.key(),
            is_whole: AtomicBool::new(false),
            has_answer: AtomicBool::new(false),
            wants_body: AtomicBool::new(false),
            received_bytes: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
            owed_bytes: AtomicU64::new(0),
            is_stalled: AtomicBool::new(false),
            waiting: Mutex::default(),
        });
        entry.insert(Watched {
            exchange: Arc::downgrade(&exchange),
            marks: ExchangeMarks::default(),
        });
        drop(exchanges);
        if is_whole {
            exchange.is_whole();
        }
        exchange
    }

    /// Bytes that came and that no request explains, since the connection began.
    fn unexplained(&self) -> i64 {
        let requests = self.begun().saturating_mul(EXPLAINED_PER_REQUEST);
        let explained = requests
            .saturating_add(self.body_bytes())
            .saturating_add(self.written_bytes() / SENT_PER_EXPLAINED);
        let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
        signed(self.read_bytes()).saturating_sub(signed(explained))
    }

    /// Whether more came than requests, and what belongs to them, can explain: frames without a purpose.
    pub(super) fn floods(&self) -> bool {
        let base = self.flood_base.load(Ordering::Relaxed);
        self.unexplained().saturating_sub(base) > UNEXPLAINED_BYTES_MAX
    }

    /// Forgets unexplained bytes as time goes by. What good requests explain beyond what came is forgotten, too.
    pub(super) fn allow_more(&self, time: Duration) {
        let bytes = time.as_millis() * UNEXPLAINED_BYTES_PER_S / 1000;
        let more = i64::try_from(bytes).unwrap_or(i64::MAX);
        let base = self.flood_base.load(Ordering::Relaxed);
        self.flood_base.store(
            base.saturating_add(more).min(self.unexplained()),
            Ordering::Relaxed,
        );
    }

    pub(super) fn cancelled(&self) -> u64 {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(super) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    fn body_bytes(&self) -> u64 {
        self.body_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    pub(super) fn is_http2(&self) -> bool {
        self.is_http2.load(Ordering::Relaxed)
    }

    /// Whether no request is open.
    pub(super) fn is_idle(&self) -> bool {
        self.open.load(Ordering::Relaxed) == 0
    }

    /// Whether the client has to take something before the connection can go on.
    pub(super) fn owes(&self) -> bool {
        self.owed_bytes.load(Ordering::Relaxed) > 0 || self.write_is_blocked.load(Ordering::Relaxed)
    }

    /// Bytes that came since the last exchange ended: of a head, with HTTP/1.
    pub(super) fn head_bytes(&self) -> u64 {
        self.read_bytes()
            .saturating_sub(self.read_bytes_at_end.load(Ordering::Relaxed))
    }

    pub(super) fn standing(&self) -> Standing {
        if self.open_whole.load(Ordering::Relaxed) > 0 || self.owes() {
            Standing::Busy
        } else if self.whole.load(Ordering::Relaxed) > 0 {
            Standing::Idle
        } else {
            Standing::Unproven
        }
    }

    /// Calls `look` for each open exchange.
    pub(super) fn each_exchange(&self, mut look: impl FnMut(&Arc<Exchange>, &mut ExchangeMarks)) {
        // Counted first: most connections have none open when they are looked at.
        if self.is_idle() && !self.owes() {
            return;
        }
        let mut found: Vec<(Arc<Exchange>, usize)> = Vec::new();
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, watched) in exchanges.iter_mut() {
            if let Some(exchange) = watched.exchange.upgrade() {
                look(&exchange, &mut watched.marks);
                found.push((exchange, key));
            }
        }
        // One of these may be the last reference by now, and its end takes the lock.
        drop(exchanges);
        drop(found);
    }

    /// Decides about the connection. The first decision to close counts; one to go away can be followed by one to close.
    pub(super) fn decide(&self, verdict: Verdict) {
        let closes = |code| Verdict::of(code).is_some_and(Verdict::closes);
        let decided = self
            .verdict
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |code| {
                (code == 0 || (verdict.closes() && !closes(code))).then_some(verdict.code())
            });
        if decided.is_ok() {
            self.told.wake();
        }
    }

    /// The daemon is in this state now.
    pub(super) fn follow(&self, state: State) {
        let last = if self.is_late {
            State::Ended
        } else {
            State::Draining
        };
        if state >= last && !self.drains.swap(true, Ordering::AcqRel) {
            self.told.wake();
        }
    }

    /// Ready with what the connection has not `heard` yet. One waiter at a time.
    pub(super) fn poll_news(&self, cx: &Context<'_>, heard: &mut Heard) -> Poll<News> {
        let news = self.news(heard).or_else(|| {
            self.told.register(cx.waker());
            self.news(heard)
        });
        match news {
            Some(News::Verdict(verdict)) => heard.verdict = Some(verdict),
            Some(News::Drain) => heard.drains = true,
            None => {}
        }
        news.map_or(Poll::Pending, Poll::Ready)
    }

    fn news(&self, heard: &Heard) -> Option<News> {
        let verdict = Verdict::of(self.verdict.load(Ordering::Acquire));
        if let Some(verdict) = verdict.filter(|_| verdict != heard.verdict) {
            return Some(News::Verdict(verdict));
        }
        (self.drains.load(Ordering::Acquire) && !heard.drains).then_some(News::Drain)
    }

    /// While draining: resolves when the connection can be ended without anybody missing an answer. Nothing new is
    /// begun on it by then.
    pub(super) async fn owes_nothing(&self) {
        // A client of HTTP/2 that has not heard of the end may have sent one more request.
        let mut looks = if self.is_http2() { 2 } else { 1 };
        let mut body_bytes = self.body_bytes();
        while looks > 0 {
            tokio::time::sleep(HEAD_GRACE).await;
            let before = std::mem::replace(&mut body_bytes, self.body_bytes());
            // A request that stays half is owed nothing.
            let comes_on = !self.is_idle() && body_bytes > before;
            if self.standing() != Standing::Busy && !comes_on {
                looks -= 1;
            }
        }
    }
}

impl Exchange {
    /// The request is whole.
    pub(super) fn is_whole(&self) {
        if !self.is_whole.swap(true, Ordering::Relaxed) {
            self.progress.whole.fetch_add(1, Ordering::Relaxed);
            self.progress.open_whole.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The head of the answer is there: what remains of the request may take its time, as streams do.
    pub(super) fn has_answer(&self) {
        self.has_answer.store(true, Ordering::Relaxed);
        self.is_whole();
    }

    /// Somebody asked for more of the body, and this much came.
    pub(super) fn received(&self, bytes: usize) {
        self.wants_body.store(false, Ordering::Relaxed);
        add(&self.received_bytes, bytes);
        add(&self.progress.body_bytes, bytes);
    }

    /// Somebody asked for more of the body, and nothing came.
    pub(super) fn wants_body(&self, cx: &Context<'_>) {
        self.wants_body.store(true, Ordering::Relaxed);
        if self.has_answer.load(Ordering::Relaxed) {
            return;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *waiting {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *waiting = Some(cx.waker().clone()),
        }
    }

    /// Whether the client has to send more of the body before there can be an answer.
    pub(super) fn waits_for_body(&self) -> bool {
        self.wants_body.load(Ordering::Relaxed)
            && !self.is_whole.load(Ordering::Relaxed)
            && !self.is_stalled.load(Ordering::Relaxed)
    }

    pub(super) fn received_bytes(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// Gives the request up: its body does not come.
    pub(super) fn stall(&self) {
        self.is_stalled.store(true, Ordering::Relaxed);
        let waker = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.is_stalled.load(Ordering::Relaxed)
    }

    /// A part of the answer was produced.
    pub(super) fn produced(&self, bytes: usize) {
        add(&self.owed_bytes, bytes);
        add(&self.progress.owed_bytes, bytes);
    }

    /// A part of it left for the socket.
    pub(super) fn sent(&self, bytes: usize) {
        add(&self.sent_bytes, bytes);
        self.forgiven(bytes);
    }

    /// A part of it will never be sent.
    pub(super) fn forgiven(&self, bytes: usize) {
        subtract(&self.owed_bytes, bytes);
        subtract(&self.progress.owed_bytes, bytes);
    }

    pub(super) fn owes(&self) -> bool {
        self.owed_bytes.load(Ordering::Relaxed) > 0
    }

    pub(super) fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let progress = &*self.progress;
        let mut exchanges = progress.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        exchanges.try_remove(self.key);
        if exchanges.is_empty() {
            // An idle connection should be small.
            *exchanges = Slab::new();
        }
        drop(exchanges);
        progress
            .read_bytes_at_end
            .store(progress.read_bytes(), Ordering::Relaxed);
        if !self.has_answer.load(Ordering::Relaxed) {
            progress.cancelled.fetch_add(1, Ordering::Relaxed);
        }
        progress.open.fetch_sub(1, Ordering::Relaxed);
        if self.is_whole.load(Ordering::Relaxed) {
            progress.open_whole.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ending::Reason;
    use super::*;
    use futures_util::FutureExt as _;

    /// Whether a future is done by then, on the paused clock.
    async fn done(within: Duration, future: impl Future<Output = ()>) -> bool {
        tokio::time::timeout(within, future).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_keeps_a_connection_that_is_owed_something() {
        // Scenario: an open request, a blocked write, half a request, the same of which more and more comes, and none of
        // them, with HTTP/2 as well. Expectation: it is kept while something is owed or comes.
        let long = Duration::from_secs(60);
        let progress = Arc::new(Progress::default());
        let open = progress.open(true);
        assert!(!done(long, progress.owes_nothing()).await);
        drop(open);
        assert!(done(long, progress.owes_nothing()).await);
        progress.wrote(&Poll::<Result<usize, ()>>::Pending);
        assert!(!done(long, progress.owes_nothing()).await);
        progress.wrote(&Poll::Ready(Ok::<_, ()>(1)));
        assert!(done(long, progress.owes_nothing()).await);
        let http2 = Arc::new(Progress::default());
        http2.read(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        assert!(done(long, http2.owes_nothing()).await);
        let whole = http2.open(true);
        assert!(!done(long, http2.owes_nothing()).await);
        drop(whole);
        assert!(done(long, http2.owes_nothing()).await);

        let half = progress.open(false);
        assert!(done(long, progress.owes_nothing()).await);
        let comes = async {
            for _ in 0..30 {
                half.received(1);
                tokio::time::sleep(HEAD_GRACE).await;
            }
        };
        let begun = tokio::time::Instant::now();
        tokio::join!(comes, progress.owes_nothing());
        assert!(begun.elapsed() >= HEAD_GRACE * 30);
    }

    #[test]
    fn a_connection_is_unproven_until_a_request_is_whole() {
        // Scenario: nothing; a head whose body is missing; the body; the answer's end; bytes that are owed. Expectation: a
        // half request is none.
        let progress = Arc::new(Progress::default());
        assert_eq!(progress.standing(), Standing::Unproven);
        let exchange = progress.open(false);
        assert_eq!(progress.standing(), Standing::Unproven);
        exchange.is_whole();
        assert_eq!(progress.standing(), Standing::Busy);
        exchange.produced(10);
        exchange.sent(4);
        assert!(progress.owes());
        exchange.forgiven(6);
        assert!(!progress.owes());
        drop(exchange);
        assert_eq!(progress.standing(), Standing::Idle);
        drop(progress.open(false));
        assert_eq!(progress.standing(), Standing::Idle);
    }

    #[test]
    fn a_decision_is_heard_once_and_closing_beats_leaving() {
        // Scenario: told to go away for its age, then to close since it does not read, then to go away again. Expectation:
        // each of the first two is heard, the third is not.
        let progress = Progress::default();
        let mut heard = Heard::default();
        let mut news = || std::future::poll_fn(|cx| progress.poll_news(cx, &mut heard)).now_or_never();
        assert_eq!(news(), None);
        let (leave, close) = (Verdict::Leave(Reason::Age), Verdict::Close(Reason::Send));
        progress.decide(leave);
        assert_eq!(news(), Some(News::Verdict(leave)));
        assert_eq!(news(), None);
        progress.decide(close);
        progress.decide(Verdict::Leave(Reason::Idle));
        progress.decide(Verdict::Close(Reason::Evicted));
        assert_eq!(news(), Some(News::Verdict(close)));
    }
}
