//! The memory that HTTP/2 keeps of requests, and which connections are closed for it.
//!
//! h2 stores the open requests of a connection in slabs, which double and never shrink: until it closes, a connection keeps up to
//! 2.6 KiB (measured) for each of as many requests as it ever had open at once, refused ones included. Those that are open and
//! admitted are charged to request memory; what a connection keeps beyond that is counted in slots. Above a limit for all
//! connections, those with the most such slots get GOAWAY at the next tick of `timeouts`; above twice the limit they are
//! closed at once, when a connection gets more slots; above three times the limit nothing more is received over HTTP/2 until those
//! that were closed have released theirs, for which their tasks have to run.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::progress::{Progress, UNIT_BYTES};

/// Memory of a slot.
pub(super) const SLOT_BYTES: u64 = 2662;
/// Slots that are always allowed, however small request memory is: 2.6 MiB.
const SLOTS_MIN: usize = 1024;

/// Streams that h2 resets by itself, without a request, take as much as a slot: 0.7 MiB for 1,024 (measured).
const STREAMS_PER_SLOT: usize = 3;

/// Slots that are not counted: the 24 KiB that each connection is assumed to take cover them.
const FREE_SLOTS: usize = 4;

/// The slots of one connection.
#[derive(Debug, Default)]
pub(super) struct Slots {
    own: AtomicUsize,
    /// For what h2 may keep besides: of the bodies of requests, and of streams without one.
    buffers: AtomicUsize,
    /// Those of them that were counted when the connection was closed for them.
    closing: AtomicUsize,
    /// Those of all connections.
    all: Arc<KeptRequests>,
}

impl Slots {
    pub(super) fn new(all: &Arc<KeptRequests>) -> Self {
        Self {
            own: AtomicUsize::default(),
            buffers: AtomicUsize::default(),
            closing: AtomicUsize::default(),
            all: Arc::clone(all),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.own.load(Ordering::Relaxed) + self.buffers.load(Ordering::Relaxed)
    }

    /// Counts slots for so many open requests, if there are none for them yet. Returns whether a search is due. Only the
    /// connection's own task may call it.
    pub(super) fn grow(&self, open: usize) -> bool {
        let before = self.own.load(Ordering::Relaxed);
        if open <= before.max(FREE_SLOTS) {
            return false;
        }
        let slots = open.next_power_of_two();
        self.own.store(slots, Ordering::Relaxed);
        self.all.add(slots - before)
    }

    /// Counts so many for bodies, and those of so many streams at once, instead of those before. Returns whether a search is due. Only
    /// on the connection's core.
    #[must_use]
    pub(super) fn set_buffers(&self, bodies: usize, streams: u32) -> bool {
        let requests = self.own.load(Ordering::Relaxed).max(FREE_SLOTS);
        let others = (streams as usize).saturating_sub(requests);
        let slots = bodies + others / STREAMS_PER_SLOT;
        let before = self.buffers.swap(slots, Ordering::Relaxed);
        self.all.remove(before.saturating_sub(slots));
        slots > before && self.all.add(slots - before)
    }

    /// Its connection is closed for them.
    pub(super) fn close(&self) {
        let slots = self.count();
        // Two searches at a time may find it.
        let is_first = self
            .closing
            .compare_exchange(0, slots, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok();
        if is_first {
            self.all.closing.fetch_add(slots, Ordering::Relaxed);
        }
    }

    /// Whether all connections have so many that no request may come, and some will soon be released.
    pub(super) fn are_full(&self) -> bool {
        self.all.is_full()
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.all.remove(self.count());
        let closing = self.closing.load(Ordering::Relaxed);
        self.all.closing.fetch_sub(closing, Ordering::Relaxed);
    }
}

/// Counts the slots of all connections.
#[derive(Debug, Default)]
pub(super) struct KeptRequests {
    slots: AtomicUsize,
    /// Those of connections that are closed for them.
    closing: AtomicUsize,
    max: AtomicUsize,
    /// With more slots than this, the next connection that gets some searches for connections to close.
    search_above: AtomicUsize,
}

impl KeptRequests {
    /// Allows as many slots as requests have room in request memory.
    pub(super) fn set_request_memory(&self, bytes: u64) {
        let slots = usize::try_from(bytes / UNIT_BYTES).unwrap_or(usize::MAX);
        self.max.store(slots.max(SLOTS_MIN), Ordering::Relaxed);
        self.search_above.store(self.hard_max(), Ordering::Relaxed);
    }

    fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    fn hard_max(&self) -> usize {
        self.max().saturating_mul(2)
    }

    /// What a search frees beyond the limit, and what may come before the next one: searches look at all connections.
    fn step(&self) -> usize {
        self.max() / 8
    }

    /// Adds slots; returns whether a search is due, which is said once.
    #[must_use]
    fn add(&self, slots: usize) -> bool {
        let all = self
            .slots
            .fetch_add(slots, Ordering::Relaxed)
            .saturating_add(slots);
        let is_due = all > self.search_above.load(Ordering::Relaxed);
        if is_due {
            self.search_above
                .store(all.saturating_add(self.step()), Ordering::Relaxed);
        }
        is_due
    }

    /// Removes the slots of a connection that has ended, and whose requests have.
    fn remove(&self, slots: usize) {
        if slots > 0 {
            let left = self
                .slots
                .fetch_sub(slots, Ordering::Relaxed)
                .saturating_sub(slots);
            let next = self.hard_max().max(left.saturating_add(self.step()));
            self.search_above.fetch_min(next, Ordering::Relaxed);
        }
    }

    /// Whether there are more slots than allowed.
    pub(super) fn are_many(&self) -> bool {
        self.slots.load(Ordering::Relaxed) > self.max()
    }

    fn is_full(&self) -> bool {
        let is_over = self.slots.load(Ordering::Relaxed) > self.max().saturating_mul(3);
        is_over && self.closing.load(Ordering::Relaxed) > 0
    }

    /// Sends away those of all connections that have the most slots for nothing; with `closes`, also closes some.
    pub(super) fn reclaim(&self, connections: impl Iterator<Item = Arc<Progress>>, closes: bool) {
        let mut idle: Vec<_> = connections
            .map(|progress| (progress.idle_slots(), progress))
            .filter(|(slots, progress)| *slots > 0 && !progress.is_closing())
            .collect();
        idle.sort_unstable_by_key(|(slots, _)| std::cmp::Reverse(*slots));
        let sum = |stays: fn(&Progress) -> bool| -> usize {
            let counted = idle.iter().filter(|(_, progress)| stays(progress));
            counted.map(|(slots, _)| slots).sum()
        };
        let excess = |slots: usize, limit: usize| {
            let is_over = slots > limit;
            if is_over { slots - limit + self.step() } else { 0 }
        };
        let mut to_close = if closes {
            excess(sum(|_| true), self.hard_max())
        } else {
            0
        };
        let mut to_leave = excess(sum(|progress| !progress.must_leave()), self.max());
        for (slots, progress) in &idle {
            if to_close > 0 {
                to_close = to_close.saturating_sub(*slots);
                progress.close_for_slots();
            } else if to_leave == 0 {
                break;
            }
            if !progress.must_leave() {
                to_leave = to_leave.saturating_sub(*slots);
                progress.send_away();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::close::{CloseDecision, CloseReason};
    use crate::listener::progress::{ConnectionEvent, PREFACE};

    /// A connection that had so many requests open at once.
    fn had(kept: &Arc<KeptRequests>, requests: usize) -> Arc<Progress> {
        let progress = Progress::http2(kept);
        progress.had_open(requests);
        progress
    }

    fn is_closed(progress: &Progress) -> bool {
        progress.event() == Some(ConnectionEvent::Close(CloseDecision::Close(CloseReason::Memory)))
    }

    #[test]
    fn those_that_keep_most_for_nothing_leave_first() {
        // Scenario: a limit of 1,024 slots, reached by many small connections and three that had 200 requests open at once; then one
        // more, then more than twice the limit. Expectation: at the limit nobody leaves; above it large ones do, and above
        // twice the limit some of them are closed. None of the small ones.
        let kept = Arc::new(KeptRequests::default());
        kept.set_request_memory(1);
        let small: Vec<_> = (0..16).map(|_| had(&kept, 16)).collect();
        let few: Vec<_> = (0..1000).map(|_| had(&kept, 4)).collect();
        let mut large: Vec<_> = (0..3).map(|_| had(&kept, 200)).collect();
        let reclaim = |large: &[Arc<Progress>], closes| {
            let all = small.iter().chain(&few).chain(large);
            kept.reclaim(all.cloned().collect::<Vec<_>>().into_iter(), closes);
            let leave = large.iter().filter(|progress| progress.must_leave()).count();
            (leave, large.iter().filter(|progress| is_closed(progress)).count())
        };
        assert!(!kept.are_many());
        assert_eq!(reclaim(&large, true), (0, 0));

        large.push(had(&kept, 129));
        assert!(kept.are_many());
        assert_eq!(reclaim(&large, true), (2, 0));
        assert_eq!(reclaim(&large, true), (2, 0));

        large.extend((0..4).map(|_| had(&kept, 256)));
        // 256 + 8 x 256 idle slots, 2 x 1,024 allowed.
        assert_eq!(reclaim(&large, false), (6, 0));
        assert_eq!(reclaim(&large, true), (6, 2));
        let none = small.iter().chain(&few).any(|progress| progress.must_leave());
        assert!(!none);

        drop((small, few, large));
        assert_eq!(kept.slots.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn searches_are_rare_and_due_again_after_connections_have_ended() {
        // Scenario: one slot after the other, to four times the limit; then all but one limit's worth end, and slots are added again.
        // Expectation: no search below twice the limit, then one every eighth of the limit; and the same the second time.
        let kept = KeptRequests::default();
        kept.set_request_memory(4 << 20);
        let searches = |slots: usize| (0..slots).filter(|_| kept.add(1)).count();
        assert_eq!(searches(2048), 0);
        assert_eq!(searches(2048), 16);
        kept.remove(3072);
        assert_eq!(searches(1024), 0);
        assert_eq!(searches(1024), 8);
    }

    #[test]
    fn open_requests_that_are_charged_keep_nothing_for_nothing() {
        // Scenario: 256 requests are open on a connection, charged to request memory, and then end. Expectation: nearly no idle
        // slot while they are open, but for those that are not charged to any connection; 256 afterwards. None over HTTP/1.
        let kept = Arc::new(KeptRequests::default());
        let share = ringfetch_engine::share::Budget::new(16 << 20)
            .caller()
            .connection(u64::MAX);
        for (progress, slots) in [(Progress::http2(&kept), 256), (Arc::default(), 0)] {
            let opened = |_| {
                let exchange = progress.open(true);
                progress.keeps_too_much();
                exchange.charge(1, &share).unwrap();
                exchange
            };
            let open: Vec<_> = (0..256).map(opened).collect();
            assert!(progress.idle_slots() <= 8, "{}", progress.idle_slots());
            drop(open);
            assert_eq!(progress.idle_slots(), slots);
        }
    }

    #[test]
    fn bytes_that_came_before_the_window_was_acknowledged_are_counted() {
        // Scenario: with a window of 16 KiB, 60,000 bytes come for a body that nobody reads, the last ones in a small frame, and then the
        // acknowledgement; the same after the acknowledgement, as if the client kept to the window. Expectation: slots of 48 KiB and one
        // buffer until all are read; one buffer.
        let kept = Arc::new(KeptRequests::default());
        kept.set_request_memory(1);
        let body = |acknowledges_first: bool| {
            let progress = Progress::default().with_kept(&kept).with_stream_window(16 << 10);
            progress.recognize(PREFACE);
            if acknowledges_first {
                progress.frames.set_acknowledged();
            }
            let progress = Arc::new(progress);
            let body = progress.open(false);
            progress.recognize(&[0; 60_000]);
            progress.frames.come(1);
            (progress, body)
        };
        let slots = |progress: &Progress| {
            assert!(!progress.count_buffers());
            progress.idle_slots()
        };
        let (early, unread) = body(false);
        assert_eq!(slots(&early), 18 + 4);
        early.frames.set_acknowledged();
        assert_eq!(slots(&early), 18 + 4);
        unread.received(60_000);
        assert_eq!(slots(&early), 4);
        let (late, _unread) = body(true);
        assert_eq!(slots(&late), 4);
    }

    #[test]
    fn no_more_buffers_are_counted_than_frames_are_unread() {
        // Scenario: 1,005 frames in 1,000 blocks, of which one body reads 1,000 and another none; the latter is dropped while answers wait
        // for their client, and after them; then one has two frames in 100 blocks. Expectation: slots of five buffers; none,
        // and then of seven, or of two.
        let kept = Arc::new(KeptRequests::default());
        kept.set_request_memory(1);
        for is_owed in [true, false] {
            let progress = Progress::http2(&kept);
            let slots = || {
                assert!(!progress.count_buffers());
                progress.idle_slots()
            };
            let (reads, idle) = (progress.open(false), progress.open(false));
            progress.frames.come(1005);
            progress.frames.add_blocks([1000, 0]);
            (0..1000).for_each(|_| reads.received(22));
            assert_eq!(slots(), 5 * 4);
            reads.mark_read();
            idle.mark_read();
            reads.produced(usize::from(is_owed));
            assert_eq!(slots(), 0);
            progress.frames.begin();
            let _next = progress.open(false);
            progress.frames.come(2);
            progress.frames.add_blocks([100, 0]);
            assert_eq!(slots(), if is_owed { 7 * 4 } else { 2 * 4 });
        }
    }

    #[test]
    fn bodies_of_which_nothing_has_come_keep_no_buffers() {
        // Scenario: the heads of 150 calls have come, whose tasks have not run yet; then a small frame for two of them. Expectation:
        // no slots; those of two buffers.
        let kept = Arc::new(KeptRequests::default());
        kept.set_request_memory(1);
        let progress = Progress::default().with_kept(&kept).with_stream_window(64 << 10);
        progress.recognize(PREFACE);
        let progress = Arc::new(progress);
        let _open: Vec<_> = (0..150).map(|_| progress.open(false)).collect();
        let slots = || {
            assert!(!progress.count_buffers());
            progress.idle_slots()
        };
        assert_eq!(slots(), 0);
        progress.frames.come(2);
        assert_eq!(slots(), 2 * 4);
    }

    #[test]
    fn nothing_is_received_while_what_is_closed_still_holds_its_slots() {
        // Scenario: connections that had 256 requests open at once, to three times the limit; one of them is closed for its slots,
        // by two searches; then there is one with few more, and the closed one ends. Expectation: others wait from above that limit
        // until it has ended; HTTP/1 never waits.
        let kept = Arc::new(KeptRequests::default());
        kept.set_request_memory(4 << 20);
        let mut all: Vec<_> = (0..12).map(|_| had(&kept, 256)).collect();
        let (other, http1) = (Progress::http2(&kept), Progress::default().with_kept(&kept));
        all[0].close_for_slots();
        all[0].close_for_slots();
        assert!(!other.must_wait());
        all.push(had(&kept, 5));
        assert!(other.must_wait() && !http1.must_wait());
        all.remove(0);
        assert!(!other.must_wait());
        // Nobody waits where nothing will be released.
        all.push(had(&kept, 256));
        assert!(!other.must_wait());
    }
}
