//! Counters of a connection, updated by its socket, requests and bodies, and read by `timeouts`. Each update
//! is one relaxed addition; there are no clocks and no timers.
//!
//! An `Exchange` is one request and its response, from the request's head to the last byte of the response written to the
//! socket. HTTP/2 may buffer a response long after its body was produced; `TrackedBytes` counts those bytes.

mod exchange;
mod frames;
mod unread;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use exchange::ExchangeMemory;
pub(super) use exchange::{Exchange, UNIT_BYTES};
pub(super) use frames::{Blocks, ReceivedFrames};
use futures_util::task::AtomicWaker;
use ringfetch_engine::sync::lock;
use slab::Slab;

use super::close::{CloseDecision, CloseReason};
use super::kept_requests::{KeptRequests, Slots};
use super::timeouts::ExchangeStalls;
use super::{BODY_WINDOW_BYTES, HEADER_LIST_BYTES, MESSAGES_WINDOW_BYTES};
use crate::access::Revoke;
use crate::lifecycle::State;
use crate::record::Record;
use crate::rpc_metrics::RpcMetrics;

/// Room for open exchanges that an idle connection keeps: 224 bytes.
const KEPT_EXCHANGES: usize = 4;

/// The HTTP/2 connection preface (RFC 9113 3.4); shorter than any HTTP/1 head with a host.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Instead of the length of a part of it: other bytes came.
const NO_PREFACE: usize = usize::MAX;
/// While draining, the time for an incomplete head to arrive.
const HEAD_GRACE: Duration = Duration::from_secs(1);

/// The shortest message of a client: a cancel, of 5 bytes that begin each message and two fields of 2.
pub(super) const MESSAGE_BYTES_MIN: usize = 9;
/// A TLS record without its data: a head of 5 bytes, a nonce of 8 (TLS 1.2, RFC 5288) or a type of 1 (TLS 1.3), and a tag of 16.
const RECORD_BYTES: usize = 29;
/// Bytes that one request explains, besides the body that was read: its head, and a window of unread body.
const EXPLAINED_PER_REQUEST: u64 = BODY_WINDOW_BYTES as u64 + HEADER_LIST_BYTES as u64;
/// Bytes sent that explain one received byte: a window update or an acknowledgement is 13 or 17 bytes, and
/// clients send one for at least a few KiB.
const SENT_PER_EXPLAINED: u64 = 16;
/// Most unexplained bytes: a window that is not read yet, and a margin.
const UNEXPLAINED_BYTES_MAX: i64 = MESSAGES_WINDOW_BYTES as i64 + (1 << 20);
/// Unexplained bytes allowed per second: pings, settings, priorities.
const UNEXPLAINED_BYTES_PER_S: u128 = 256 << 10;

/// The counters of a connection, shared by its socket, its requests and `timeouts`.
#[derive(Debug, Default)]
pub(super) struct Progress {
    read_bytes: AtomicU64,
    /// The same when this turn of the connection began.
    read_bytes_before: AtomicU64,
    /// Bytes that hyper had got when the last exchange ended; later ones are the next head.
    plain_bytes_at_end: AtomicU64,
    written_bytes: AtomicU64,
    /// Bytes of request bodies that were read, and of the heads of their frames and records.
    body_bytes: AtomicU64,
    /// Bytes of responses that were produced but not sent.
    owed_bytes: AtomicU64,
    /// The socket did not accept all bytes: a write is pending.
    write_is_blocked: AtomicBool,
    /// The connection drains or closes, and the client has not received all of its last response.
    is_unreceived: AtomicBool,
    /// How much of the preface the client has sent: all of it with HTTP/2.
    preface_bytes: AtomicUsize,
    pub(super) frames: ReceivedFrames,
    /// What TLS adds to a message that is sent alone.
    record_bytes: usize,
    /// Baseline of unexplained bytes: see [`Self::floods`].
    flood_base: AtomicI64,
    /// Exchanges started.
    begun: AtomicU64,
    /// Exchanges whose request was complete and admitted.
    whole: AtomicU64,
    /// Exchanges that ended without a response.
    cancelled: AtomicU64,
    /// Open exchanges, and those among them that count as `whole`.
    open: AtomicUsize,
    open_whole: AtomicUsize,
    /// Open exchanges that may last as long as the connection: see [`Exchange::is_service`].
    services: AtomicUsize,
    memory: ExchangeMemory,
    /// Room for open requests that h2 has made and keeps: see `kept_requests`.
    slots: Slots,
    /// It is to leave for its slots.
    must_leave: AtomicBool,
    /// A drain does not wait for it.
    is_late: bool,
    /// Its client's address, for the access log and traces.
    peer: Option<IpAddr>,
    /// Counts its requests when they have ended. `None` only in tests.
    rpc: Option<RpcMetrics>,
    /// The decision to close the connection, and whether it has to drain. The connection's task is woken for
    /// either.
    decision: AtomicU8,
    drains: AtomicBool,
    /// The daemon is about to drain.
    is_lame: AtomicBool,
    waker: AtomicWaker,
    exchanges: Mutex<Slab<TrackedExchange>>,
}

/// An open exchange with the stall detectors of `timeouts`.
#[derive(Debug)]
pub(super) struct TrackedExchange {
    pub(super) exchange: Weak<Exchange>,
    pub(super) marks: ExchangeStalls,
}

/// What a connection has to react to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionEvent {
    /// The connection is to be closed.
    Close(CloseDecision),
    /// The daemon drains, or ends if the connection is late.
    Drain,
}

/// The events that a connection has seen.
#[derive(Debug, Default)]
pub(super) struct SeenEvents {
    decision: Option<CloseDecision>,
    drains: bool,
}

/// The activity of a connection, to choose one to evict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    /// No complete, admitted request yet.
    Unproven,
    /// No such request in flight.
    Idle,
    /// Such a request is in flight, or bytes are pending.
    Busy,
}

fn add(counter: &AtomicU64, bytes: usize) {
    counter.fetch_add(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::Relaxed);
}

fn subtract(counter: &AtomicU64, bytes: usize) {
    counter.fetch_sub(u64::try_from(bytes).unwrap_or(u64::MAX), Ordering::Relaxed);
}

impl Progress {
    /// A new connection, with this window for each request's body, and slots counted in `kept`. A drain does not wait for one
    /// that `is_late`.
    pub(super) fn of_connection(
        peer: IpAddr,
        is_late: bool,
        stream_window: u32,
        is_tls: bool,
        rpc: RpcMetrics,
        kept: &Arc<KeptRequests>,
    ) -> Self {
        Self {
            peer: Some(peer),
            is_late,
            frames: ReceivedFrames::new(stream_window),
            record_bytes: if is_tls { RECORD_BYTES } else { 0 },
            rpc: Some(rpc),
            slots: Slots::new(kept),
            ..Self::default()
        }
    }

    /// Its client's address.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        self.peer
    }

    /// Whether a drain does not wait for the connection.
    pub(super) fn is_late(&self) -> bool {
        self.is_late
    }

    /// Records received bytes, encrypted if there is TLS.
    pub(super) fn received(&self, bytes: usize) {
        add(&self.read_bytes, bytes);
    }

    /// A turn of the connection begins.
    pub(super) fn begin_turn(&self) {
        self.read_bytes_before.store(self.read_bytes(), Ordering::Relaxed);
    }

    /// Bytes received before this turn, encrypted if there is TLS.
    pub(super) fn read_bytes_before(&self) -> u64 {
        self.read_bytes_before.load(Ordering::Relaxed)
    }

    /// Bytes received in this turn.
    pub(super) fn turn_bytes(&self) -> u64 {
        self.read_bytes().saturating_sub(self.read_bytes_before())
    }

    /// Counts what hyper gets, and recognizes HTTP/2 by its first bytes, in whatever pieces, as hyper does: clients need not
    /// negotiate it (ALPN), nor keep to what they negotiated. Returns what belongs to frames of HTTP/2.
    pub(super) fn recognize<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        self.frames.add_plain_bytes(bytes.len());
        let before = self.preface_bytes.load(Ordering::Relaxed);
        let Some(rest) = PREFACE.get(before..) else {
            return &[];
        };
        let (part, frames) = bytes.split_at(rest.len().min(bytes.len()));
        if !part.is_empty() {
            let is_preface = rest.starts_with(part);
            let after = if is_preface {
                before + part.len()
            } else {
                NO_PREFACE
            };
            self.preface_bytes.store(after, Ordering::Relaxed);
        }
        if self.is_http2() { frames } else { &[] }
    }

    /// A list of headers is longer than any that is served.
    pub(super) fn is_too_long(&self) {
        self.decide(CloseDecision::Close(CloseReason::Flood));
    }

    /// Counts the buffers that h2 may keep for unread bodies, if many more have come since it was last called. Returns whether
    /// connections keep so much that some have to be closed.
    pub(super) fn buffers_too_much(&self) -> bool {
        self.frames.is_look_due() && self.count_buffers()
    }

    /// The same in any case.
    #[must_use]
    pub(super) fn count_buffers(&self) -> bool {
        let mut unread = self.frames.look();
        self.each_exchange(|exchange, _| {
            if let Some((after, window)) = exchange.unread_since() {
                unread.add_body(after, window, exchange.received_bytes());
            }
        });
        self.slots
            .set_buffers(unread.slots(self.owes()), self.frames.streams())
    }

    /// Records the outcome of a write.
    pub(super) fn wrote<E>(&self, outcome: &Poll<Result<usize, E>>) {
        self.write_is_blocked
            .store(outcome.is_pending(), Ordering::Relaxed);
        if let Poll::Ready(Ok(written)) = outcome {
            add(&self.written_bytes, *written);
        }
    }

    /// Starts an exchange. `is_whole`: the request has no body.
    pub(super) fn open_recorded(
        self: &Arc<Self>,
        is_whole: bool,
        record: Option<Arc<Record>>,
    ) -> Arc<Exchange> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        let mut exchanges = lock(&self.exchanges);
        let entry = exchanges.vacant_entry();
        let exchange = Exchange::new(Arc::clone(self), entry.key(), record);
        entry.insert(TrackedExchange {
            exchange: Arc::downgrade(&exchange),
            marks: ExchangeStalls::default(),
        });
        drop(exchanges);
        if is_whole {
            exchange.mark_read();
            exchange.mark_whole();
        }
        exchange
    }

    /// Counts what h2 keeps for the request that was just opened, if so many were never open at once. Returns whether
    /// connections keep so much that some have to be closed.
    pub(super) fn keeps_too_much(&self) -> bool {
        self.is_http2() && self.slots.grow(self.exchanges())
    }

    /// Whether the connection may receive nothing now: others that are closed have to release memory first.
    pub(super) fn must_wait(&self) -> bool {
        self.slots.are_full() && self.is_http2()
    }

    /// Slots that h2 keeps for its requests, and that no open request is charged for.
    pub(super) fn idle_slots(&self) -> usize {
        self.slots.count().saturating_sub(self.memory.charged_units())
    }

    /// Closes it at once, because of its idle slots.
    pub(super) fn close_for_slots(&self) {
        self.slots.close();
        self.decide(CloseDecision::Close(CloseReason::Memory));
    }

    /// Closes it gracefully at the next check, because of its idle slots.
    pub(super) fn send_away(&self) {
        self.must_leave.store(true, Ordering::Relaxed);
    }

    pub(super) fn must_leave(&self) -> bool {
        self.must_leave.load(Ordering::Relaxed)
    }

    /// Whether it is to be closed at once.
    pub(super) fn is_closing(&self) -> bool {
        CloseDecision::of(self.decision.load(Ordering::Relaxed)).is_some_and(CloseDecision::closes)
    }

    /// Received bytes that no request accounts for.
    fn unexplained(&self) -> i64 {
        let requests = self.begun().saturating_mul(EXPLAINED_PER_REQUEST);
        let explained = requests
            .saturating_add(self.body_bytes())
            .saturating_add(self.written_bytes() / SENT_PER_EXPLAINED);
        let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
        signed(self.read_bytes()).saturating_sub(signed(explained))
    }

    /// Whether far more was received than requests account for, such as a flood of control frames.
    pub(super) fn floods(&self) -> bool {
        let base = self.flood_base.load(Ordering::Relaxed);
        self.unexplained().saturating_sub(base) > UNEXPLAINED_BYTES_MAX
    }

    /// Moves the baseline as time passes; credit from requests does not accumulate.
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
        self.preface_bytes.load(Ordering::Relaxed) == PREFACE.len()
    }

    /// Open exchanges.
    pub(super) fn exchanges(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Whether no request is open.
    pub(super) fn is_idle(&self) -> bool {
        self.open.load(Ordering::Relaxed) == 0
    }

    /// Whether bytes wait for the client to read them.
    pub(super) fn owes(&self) -> bool {
        self.owed_bytes.load(Ordering::Relaxed) > 0 || self.write_is_blocked()
    }

    /// Whether the socket did not accept all bytes of the last write.
    pub(super) fn write_is_blocked(&self) -> bool {
        self.write_is_blocked.load(Ordering::Relaxed)
    }

    /// Whether no request is open, and no bytes wait for the client to read them.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_idle() && !self.owes()
    }

    /// Bytes received since the last exchange ended: with HTTP/1, of a head.
    pub(super) fn head_bytes(&self) -> u64 {
        self.frames
            .plain_bytes()
            .saturating_sub(self.plain_bytes_at_end.load(Ordering::Relaxed))
    }

    /// Sets whether the client has not received all that was written, while the connection drains or closes.
    pub(super) fn set_unreceived(&self, is_unreceived: bool) {
        self.is_unreceived.store(is_unreceived, Ordering::Relaxed);
    }

    /// Whether the client has not received all of an answer that was written, as far as the connection has looked: it does
    /// once it drains or closes.
    fn is_unreceived(&self) -> bool {
        self.is_unreceived.load(Ordering::Relaxed)
    }

    /// Whether the client has not received all that it is to receive.
    pub(super) fn is_unanswered(&self) -> bool {
        !self.is_quiet() || self.is_unreceived()
    }

    /// Whether a complete, admitted request is in flight, or bytes are pending.
    fn is_serving(&self) -> bool {
        self.open_whole.load(Ordering::Relaxed) > 0 || self.owes()
    }

    pub(super) fn activity(&self) -> Activity {
        if self.is_serving() || self.is_unreceived() {
            Activity::Busy
        } else if self.whole.load(Ordering::Relaxed) > 0 {
            Activity::Idle
        } else {
            Activity::Unproven
        }
    }

    /// Calls `look` for each open exchange.
    pub(super) fn each_exchange(&self, mut look: impl FnMut(&Arc<Exchange>, &mut ExchangeStalls)) {
        // Most connections have no open exchange.
        if self.is_quiet() {
            return;
        }
        let mut found = Vec::new();
        let mut exchanges = lock(&self.exchanges);
        for (_, watched) in exchanges.iter_mut() {
            if let Some(exchange) = watched.exchange.upgrade() {
                look(&exchange, &mut watched.marks);
                found.push(exchange);
            }
        }
        // Dropped after the lock: dropping a last reference takes it.
        drop(exchanges);
        drop(found);
    }

    /// Decides to close the connection. The first decision wins, until there is a more urgent one.
    pub(super) fn decide(&self, decision: CloseDecision) {
        let decided = self
            .decision
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |code| {
                decision.replaces(code).then_some(decision.code())
            });
        if decided.is_ok() {
            self.waker.wake();
        }
    }

    /// Whether this is an HTTP/1 connection that is too old, and closes after its next response.
    pub(super) fn closes_by_response(&self) -> bool {
        let decision = CloseDecision::of(self.decision.load(Ordering::Relaxed));
        decision == Some(CloseDecision::GoAway(CloseReason::Age)) && !self.is_http2()
    }

    /// Whether a response announces that the connection closes after it. Only on HTTP/1: when the connection
    /// is too old, or when the daemon is about to drain and will close idle connections.
    fn announces_close(&self) -> bool {
        self.closes_by_response() || (self.is_lame.load(Ordering::Relaxed) && !self.is_http2())
    }

    /// Reacts to the daemon's state.
    pub(super) fn set_state(&self, state: State) {
        if state >= State::LameDuck {
            self.is_lame.store(true, Ordering::Relaxed);
        }
        let last = if self.is_late {
            State::Ended
        } else {
            State::Draining
        };
        if state >= last && !self.drains.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// Ready with the next event that is not in `seen`. One waiter at a time.
    pub(super) fn poll_event(&self, cx: &Context<'_>, seen: &mut SeenEvents) -> Poll<ConnectionEvent> {
        let event = self.next_event(seen).or_else(|| {
            self.waker.register(cx.waker());
            self.next_event(seen)
        });
        match event {
            Some(ConnectionEvent::Close(decision)) => seen.decision = Some(decision),
            Some(ConnectionEvent::Drain) => seen.drains = true,
            None => {}
        }
        event.map_or(Poll::Pending, Poll::Ready)
    }

    fn next_event(&self, seen: &SeenEvents) -> Option<ConnectionEvent> {
        let decision = CloseDecision::of(self.decision.load(Ordering::Acquire));
        if let Some(decision) = decision.filter(|_| decision != seen.decision) {
            return Some(ConnectionEvent::Close(decision));
        }
        (self.drains.load(Ordering::Acquire) && !seen.drains).then_some(ConnectionEvent::Drain)
    }

    /// While draining: resolves when the connection can be closed without losing a response. It must not
    /// start new requests after that.
    pub(super) async fn drained(&self) {
        // An HTTP/2 client may have sent one more request before it received GOAWAY.
        let mut looks = if self.is_http2() { 2 } else { 1 };
        let mut body_bytes = self.body_bytes();
        while looks > 0 {
            tokio::time::sleep(HEAD_GRACE).await;
            let before = std::mem::replace(&mut body_bytes, self.body_bytes());
            // An incomplete request that stalls gets no response.
            let comes_on = !self.is_idle() && body_bytes > before;
            // What is only to be received is waited for when it closes.
            if !self.is_serving() && !comes_on {
                looks -= 1;
            }
        }
    }
}

impl Revoke for Progress {
    fn revoke(&self) {
        self.decide(CloseDecision::Close(CloseReason::Revoked));
    }
}

#[cfg(test)]
mod tests;
