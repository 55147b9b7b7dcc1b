//! One request of a connection, from its head to the last byte of its response.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};

use hyper::body::Incoming;
use ringfetch_engine::share::{Charge, Refused, Share};
use ringfetch_engine::sync::lock;
use slab::Slab;

use super::unread::Unread;
use super::{Blocks, KEPT_EXCHANGES, MESSAGE_BYTES_MIN, Progress, add, subtract};
use crate::caller::Connection;
use crate::listener::client_frames::FRAME_HEAD_BYTES;
use crate::record::Record;
use crate::rpc_metrics::{Collected, Outcome};

/// One request and its response.
#[derive(Debug)]
pub(in crate::listener) struct Exchange {
    progress: Arc<Progress>,
    key: usize,
    /// The request was read completely, or its response has started.
    is_whole: AtomicBool,
    /// The client has the right to what it asks for. With access control, a health call, a probe or a refusal
    /// does not prove that: a connection with nothing else is the first to be evicted.
    is_admitted: AtomicBool,
    is_service: AtomicBool,
    units: AtomicUsize,
    /// The connection as used by the request's principal. Held until the response is sent, so that revoking
    /// the principal closes it.
    connection: OnceLock<Arc<Connection>>,
    /// The response's head is ready.
    has_answer: AtomicBool,
    /// The response's body was taken to its end, or it has none.
    has_ended: AtomicBool,
    /// Some of its bytes were dropped instead of written.
    is_cut: AtomicBool,
    /// The client left before the request was whole.
    is_broken_off: AtomicBool,
    /// The packed [`Outcome`], if the request is one that metrics count.
    outcome: AtomicU32,
    /// The service waits for more of the request's body.
    wants_body: AtomicBool,
    received_bytes: AtomicU64,
    /// What of the body may be unread.
    unread: Unread,
    sent_bytes: AtomicU64,
    owed_bytes: AtomicU64,
    /// Its body has stalled: there will be no response.
    is_stalled: AtomicBool,
    /// Its connection leaves, and waits no longer for what would not end by itself.
    is_leaving: AtomicBool,
    /// Woken when the body has stalled, and once there is a response, when the connection leaves.
    waiting: Mutex<Option<Waker>>,
    /// The rest of its body, if nothing else reads it.
    rest: Mutex<Option<Incoming>>,
    /// Its record; `None`: it is not recorded.
    record: Option<Arc<Record>>,
}

/// Tells an exchange that more of its body has arrived. h2 may keep it for longer than the exchange lasts.
struct Arrival(Weak<Exchange>);

impl Wake for Arrival {
    fn wake(self: Arc<Self>) {
        if let Some(exchange) = self.0.upgrade() {
            exchange.arrives();
        }
    }
}

impl Exchange {
    /// An exchange that its connection stores under `key`.
    pub(super) fn new(progress: Arc<Progress>, key: usize, record: Option<Arc<Record>>) -> Arc<Self> {
        Arc::new(Self {
            unread: Unread::new(progress.frames.blocks_before(), progress.frames.window()),
            progress,
            key,
            is_whole: AtomicBool::new(false),
            is_admitted: AtomicBool::new(false),
            is_service: AtomicBool::new(false),
            units: AtomicUsize::new(0),
            connection: OnceLock::new(),
            has_answer: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            is_broken_off: AtomicBool::new(false),
            outcome: AtomicU32::new(0),
            wants_body: AtomicBool::new(false),
            received_bytes: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
            owed_bytes: AtomicU64::new(0),
            is_stalled: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
            waiting: Mutex::default(),
            rest: Mutex::default(),
            record,
        })
    }

    /// Its record, if it is recorded.
    pub(in crate::listener) fn record(&self) -> Option<&Arc<Record>> {
        self.record.as_ref()
    }

    /// Marks the request as complete.
    pub(in crate::listener) fn mark_whole(&self) {
        self.mark(&self.is_whole, &self.is_admitted);
    }

    /// Marks the request as admitted: its client has the right to what it asks for.
    pub(in crate::listener) fn mark_admitted(&self) {
        self.mark(&self.is_admitted, &self.is_whole);
    }

    /// Sets a mark, which only its own task does, and counts the exchange once it has both.
    fn mark(&self, mark: &AtomicBool, other: &AtomicBool) {
        if mark.load(Ordering::Relaxed) {
            return;
        }
        mark.store(true, Ordering::Relaxed);
        if other.load(Ordering::Relaxed) {
            self.progress.whole.fetch_add(1, Ordering::Relaxed);
            self.progress.open_whole.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sets the connection as used by the request's principal.
    pub(in crate::listener) fn set_connection(&self, connection: &Arc<Connection>) {
        let _only_once = self.connection.set(Arc::clone(connection));
    }

    /// Charges `units` more of memory, of [`UNIT_BYTES`] each, to its connection's share of request memory.
    ///
    /// # Errors
    /// Returns which limit refused it. The units are counted all the same, until the exchange ends.
    pub(in crate::listener) fn charge(&self, units: usize, share: &Arc<Share>) -> Result<(), Refused> {
        self.units.fetch_add(units, Ordering::Relaxed);
        self.progress.memory.take(units, share)
    }

    /// Counts the request among the health and reflection calls, which no share of memory limits. Returns
    /// `false` if the connection has `most` of them already.
    pub(in crate::listener) fn count_service(&self, most: usize) -> bool {
        let fits = self.progress.services.fetch_add(1, Ordering::Relaxed) < most;
        if fits {
            self.is_service.store(true, Ordering::Relaxed);
        } else {
            self.progress.services.fetch_sub(1, Ordering::Relaxed);
        }
        fits
    }

    /// Whether it is one of HTTP/2.
    pub(in crate::listener) fn is_http2(&self) -> bool {
        self.progress.is_http2()
    }

    /// Keeps the rest of a body that nothing reads, until the response is known.
    pub(in crate::listener) fn leave_unread(&self, body: Incoming) {
        if self.progress.announces_close() {
            self.mark_read();
        } else {
            *lock(&self.rest) = Some(body);
        }
    }

    /// The body that nothing read.
    pub(in crate::listener) fn take_unread(&self) -> Option<Incoming> {
        lock(&self.rest).take()
    }

    /// Whether this response announces that the connection closes after it: also if a part of the request's
    /// body is unread. hyper then closes the connection, and a client that was not told would send its next
    /// request on it without knowing whether that was executed.
    pub(in crate::listener) fn closes_connection(&self) -> bool {
        let is_unread = !self.is_whole.load(Ordering::Relaxed) && !self.progress.is_http2();
        is_unread || self.progress.announces_close()
    }

    /// Marks the response's head as ready. The rest of the request may now take any time, as in streams.
    pub(in crate::listener) fn mark_answered(&self) {
        self.has_answer.store(true, Ordering::Relaxed);
        self.mark_whole();
    }

    /// Sets the outcome that it has if its response is never polled.
    pub(in crate::listener) fn set_unserved(&self, outcome: Outcome) {
        self.outcome.store(outcome.pack(), Ordering::Relaxed);
    }

    /// Its response is polled for the first time: from now on it is counted by what serves it, also if that is dropped.
    pub(in crate::listener) fn begin_serving(&self) {
        self.outcome.store(0, Ordering::Relaxed);
    }

    /// Notes what was observed while its response was polled.
    pub(in crate::listener) fn observed(&self, collected: Collected) {
        if collected.is_empty() {
            return;
        }
        // Only its own task changes it.
        let before = Outcome::unpack(self.outcome.load(Ordering::Relaxed));
        if let Some(outcome) = collected.added_to(before) {
            self.outcome.store(outcome.pack(), Ordering::Relaxed);
        }
    }

    /// Marks the response's body as taken to its end: what is left of it is only to be written.
    pub(in crate::listener) fn mark_ended(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// Marks a request whose client left before it was whole: cancelled, although its error is a response.
    pub(in crate::listener) fn mark_broken_off(&self) {
        self.is_broken_off.store(true, Ordering::Relaxed);
    }

    /// Counts bytes of the body that were read: a frame of HTTP/2. The heads of a shorter one than any message have no purpose.
    pub(in crate::listener) fn received(&self, bytes: usize) {
        self.wants_body.store(false, Ordering::Relaxed);
        add(&self.received_bytes, bytes);
        let heads = if bytes < MESSAGE_BYTES_MIN {
            0
        } else {
            FRAME_HEAD_BYTES + self.progress.record_bytes
        };
        add(&self.progress.body_bytes, bytes + heads);
        let frames = &self.progress.frames;
        frames.is_read(bytes);
        self.unread.reads(self.received_bytes(), frames.blocks_word());
    }

    /// For the poll of a body that waits: wakes that of `cx`, and notes that something has arrived. A body that waits is not polled
    /// again before that, however long it takes.
    pub(in crate::listener) fn arrival_waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::new(Arrival(Arc::downgrade(self))))
    }

    /// Sets what [`Self::arrival_waker`] wakes. Called before each poll.
    pub(in crate::listener) fn wake_on_arrival(&self, cx: &Context<'_>) {
        self.unread.wake_on_arrival(cx.waker());
    }

    fn arrives(&self) {
        let before = self.progress.frames.blocks_before();
        self.unread.arrives(self.received_bytes(), before);
    }

    /// Marks the body as read to its end, or dropped.
    pub(in crate::listener) fn mark_read(&self) {
        self.unread.ends();
    }

    /// See [`Unread::since`].
    pub(super) fn unread_since(&self) -> Option<(Blocks, u32)> {
        self.unread.since()
    }

    /// Notes that the service waits for more of the body.
    pub(in crate::listener) fn await_body(&self, cx: &Context<'_>) {
        self.wants_body.store(true, Ordering::Relaxed);
        self.unread.waits();
        if self.has_answer.load(Ordering::Relaxed) {
            return;
        }
        self.wake_later(cx);
    }

    fn wake_later(&self, cx: &Context<'_>) {
        let mut waiting = lock(&self.waiting);
        match &mut *waiting {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *waiting = Some(cx.waker().clone()),
        }
    }

    fn wake(&self) {
        let waker = lock(&self.waiting).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether the response waits for more of the body.
    pub(in crate::listener) fn waits_for_body(&self) -> bool {
        self.wants_body.load(Ordering::Relaxed)
            && !self.is_whole.load(Ordering::Relaxed)
            && !self.is_stalled.load(Ordering::Relaxed)
    }

    pub(in crate::listener) fn received_bytes(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// Aborts the request: its body stalled.
    pub(in crate::listener) fn stall(&self) {
        self.is_stalled.store(true, Ordering::Relaxed);
        self.wake();
    }

    pub(in crate::listener) fn is_stalled(&self) -> bool {
        self.is_stalled.load(Ordering::Relaxed)
    }

    /// Tells it that its connection leaves.
    pub(in crate::listener) fn leave(&self) {
        if !self.is_leaving.swap(true, Ordering::Relaxed) {
            self.wake();
        }
    }

    pub(in crate::listener) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed)
    }

    /// Ready once the connection leaves. For its response's body: before, the waker is that of its request's.
    pub(in crate::listener) fn poll_leaving(&self, cx: &Context<'_>) -> Poll<()> {
        if !self.is_leaving() {
            self.wake_later(cx);
        }
        match self.is_leaving() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    /// Counts bytes of the response that were produced.
    pub(in crate::listener) fn produced(&self, bytes: usize) {
        add(&self.owed_bytes, bytes);
        add(&self.progress.owed_bytes, bytes);
    }

    /// Counts bytes of the response that were written to the socket.
    pub(in crate::listener) fn sent(&self, bytes: usize) {
        add(&self.sent_bytes, bytes);
        self.forgiven(bytes);
    }

    /// Bytes of the response will never be sent.
    pub(in crate::listener) fn dropped(&self, bytes: usize) {
        self.is_cut.store(true, Ordering::Relaxed);
        self.forgiven(bytes);
    }

    /// Bytes of the response are owed no longer.
    fn forgiven(&self, bytes: usize) {
        subtract(&self.owed_bytes, bytes);
        subtract(&self.progress.owed_bytes, bytes);
    }

    pub(in crate::listener) fn owes(&self) -> bool {
        self.owed_bytes.load(Ordering::Relaxed) > 0
    }

    pub(in crate::listener) fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let progress = &*self.progress;
        let is_sent = self.has_ended.load(Ordering::Relaxed) && !self.is_cut.load(Ordering::Relaxed);
        let outcome = Outcome::unpack(self.outcome.load(Ordering::Relaxed));
        let is_broken_off = self.is_broken_off.load(Ordering::Relaxed);
        let outcome = outcome.map(|outcome| match is_sent {
            _ if is_broken_off => outcome.abandoned(),
            true => outcome,
            false => outcome.unsent(),
        });
        if let (Some(outcome), Some(rpc)) = (outcome, &progress.rpc) {
            rpc.count(outcome);
        }
        if let Some(record) = &self.record {
            record.ended(self.sent_bytes(), outcome, is_sent);
        }
        let mut exchanges = lock(&progress.exchanges);
        exchanges.try_remove(self.key);
        if exchanges.is_empty() && exchanges.capacity() > KEPT_EXCHANGES {
            // Frees memory when the connection becomes idle, except for one whose client sends its requests
            // one after the other.
            *exchanges = Slab::new();
        }
        drop(exchanges);
        progress
            .plain_bytes_at_end
            .store(progress.frames.plain_bytes(), Ordering::Relaxed);
        if !self.has_answer.load(Ordering::Relaxed) || is_broken_off {
            progress.cancelled.fetch_add(1, Ordering::Relaxed);
        }
        progress.open.fetch_sub(1, Ordering::Relaxed);
        if self.is_whole.load(Ordering::Relaxed) && self.is_admitted.load(Ordering::Relaxed) {
            progress.open_whole.fetch_sub(1, Ordering::Relaxed);
        }
        progress.memory.give_back(self.units.load(Ordering::Relaxed));
        if self.is_service.load(Ordering::Relaxed) {
            progress.services.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Memory that an open exchange takes in h2, hyper and this crate, from its head on: 4.4 KiB, measured with
/// 256 calls on each of 100 connections; a call that tonic serves takes 11.6 KiB.
pub(in crate::listener) const UNIT_BYTES: u64 = 4 << 10;
/// Units that are not charged: the 24 KiB that each connection is assumed to take cover them.
const FREE_UNITS: usize = 6;
/// The charge changes in steps, so that the counters shared by all cores are seldom updated.
const UNITS_STEP: usize = 8;

/// The memory of a connection's open exchanges.
#[derive(Debug, Default)]
pub(super) struct ExchangeMemory {
    units: AtomicUsize,
    charged_units: AtomicUsize,
    charge: Mutex<Option<Charge>>,
}

impl ExchangeMemory {
    /// Units that are charged.
    pub(super) fn charged_units(&self) -> usize {
        self.charged_units.load(Ordering::Relaxed)
    }

    fn to_charge(open: usize) -> usize {
        open.saturating_sub(FREE_UNITS).next_multiple_of(UNITS_STEP)
    }

    fn take(&self, units: usize, share: &Arc<Share>) -> Result<(), Refused> {
        let open = self
            .units
            .fetch_add(units, Ordering::Relaxed)
            .saturating_add(units);
        if open <= self.charged_units.load(Ordering::Relaxed) + FREE_UNITS {
            return Ok(());
        }
        let charged_units = Self::to_charge(open);
        let bytes = UNIT_BYTES.saturating_mul(charged_units as u64);
        let mut charge = lock(&self.charge);
        match &mut *charge {
            Some(charge) => charge.grow(bytes.saturating_sub(charge.amount()))?,
            none => *none = Some(share.charge(bytes)?),
        }
        self.charged_units.store(charged_units, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the units of an exchange that has ended. Once at most a quarter of the charged units are open,
    /// the charge shrinks to fit. Mostly none are charged.
    fn give_back(&self, units: usize) {
        let open = self
            .units
            .fetch_sub(units, Ordering::Relaxed)
            .saturating_sub(units);
        let charged_units = self.charged_units();
        if charged_units == 0 || open.saturating_mul(4) > charged_units {
            return;
        }
        let mut held = lock(&self.charge);
        let Some(charge) = &mut *held else { return };
        let charged_units = Self::to_charge(self.units.load(Ordering::Relaxed));
        let bytes = UNIT_BYTES.saturating_mul(charged_units as u64);
        if charged_units == 0 {
            *held = None;
        } else if bytes >= charge.amount() || charge.resize(bytes).is_err() {
            return;
        }
        self.charged_units.store(charged_units, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_engine::share::Budget;

    #[test]
    fn memory_of_exchanges_is_charged_in_steps_and_given_back() {
        // Scenario: exchanges of one unit open one after the other, and end; then one of many units is
        // refused. Expectation: six are free, the others charged in steps of eight; little stays charged
        // while few are open, and nothing at the end or for the refused one; nothing is kept of those that ended.
        let budget = Budget::new(1 << 20);
        let share = budget.caller().connection(u64::MAX);
        let progress = Arc::new(Progress::default());
        let open: Vec<_> = (0..6)
            .map(|_| progress.open(true))
            .inspect(|exchange| exchange.charge(1, &share).unwrap())
            .collect();
        assert_eq!(share.held(), 0);
        let more: Vec<_> = (0..32)
            .map(|_| progress.open(true))
            .inspect(|exchange| exchange.charge(1, &share).unwrap())
            .collect();
        assert_eq!(share.held(), 32 * UNIT_BYTES);
        drop(more);
        assert!(share.held() <= 8 * UNIT_BYTES, "{}", share.held());
        let large = progress.open(true);
        assert!(large.charge(1000, &share).is_err());
        drop(large);
        let tracked = || progress.exchanges.lock().unwrap().len();
        assert_eq!(tracked(), open.len());
        drop(open);
        assert_eq!((share.held(), budget.used()), (0, 0));
        assert_eq!((tracked(), progress.exchanges.lock().unwrap().capacity()), (0, 0));
    }

    #[test]
    fn requests_that_their_client_resets_are_cancelled() {
        // Scenario: a request ends with its response; one without; one is broken off, whose error is its response.
        // Expectation: the latter two count as cancelled.
        let progress = Arc::new(Progress::default());
        let answered = progress.open(true);
        answered.mark_answered();
        drop(answered);
        assert_eq!(progress.cancelled(), 0);
        drop(progress.open(true));
        let broken_off = progress.open(false);
        broken_off.mark_broken_off();
        broken_off.mark_answered();
        drop(broken_off);
        assert_eq!(progress.cancelled(), 2);
    }

    #[test]
    fn a_body_that_waits_keeps_nothing_until_more_arrives() {
        // Scenario: of two bodies one waits; 100 blocks of small frames come for others; then the one that waited is woken, and as many
        // come again; it waits again, and ends. Expectation: only the body that was never read counts for the first ones; both for the
        // second, the woken one from what woke it on; and neither once it waits again, or is dropped.
        let progress = Arc::new(Progress::default());
        let waits = |exchange: &Arc<Exchange>| {
            let waker = exchange.arrival_waker();
            exchange.wake_on_arrival(&Context::from_waker(Waker::noop()));
            exchange.await_body(&Context::from_waker(Waker::noop()));
            waker
        };
        let since = |exchange: &Exchange| exchange.unread_since().map(|(blocks, _)| blocks);
        let comes = || {
            progress.frames.begin();
            progress.frames.add_blocks([100, 0]);
        };
        let (idle, unread) = (progress.open(false), progress.open(false));
        let waker = waits(&idle);
        comes();
        assert_eq!((since(&idle), since(&unread)), (None, Some([0; 2])));
        comes();
        waker.wake();
        assert_eq!((since(&idle), since(&unread)), (Some([100, 0]), Some([0; 2])));
        let waker = waits(&idle);
        assert_eq!(since(&idle), None);
        unread.mark_read();
        idle.mark_read();
        waker.wake();
        assert_eq!((since(&idle), since(&unread)), (None, None));
    }

    #[test]
    fn a_body_that_began_with_a_larger_window_keeps_it() {
        // Scenario: a body begins before its client has acknowledged a window of 16 KiB, so with 64 KiB; 1,000 blocks come, and 48 KiB of
        // it are read. Expectation: all of them may be unread; once two windows are read, none.
        let progress = Arc::new(Progress::default().with_stream_window(16 << 10));
        let exchange = progress.open(false);
        progress.frames.add_blocks([0, 1000]);
        progress.frames.begin();
        progress.frames.set_acknowledged();
        let since = || exchange.unread_since().map(|(blocks, _)| blocks);
        (0..3).for_each(|_| exchange.received(16 << 10));
        assert_eq!(since(), Some([0; 2]));
        (0..5).for_each(|_| exchange.received(16 << 10));
        assert_eq!(since(), Some([0, 1000]));
    }
}
