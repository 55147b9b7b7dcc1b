//! What of a request's body may have arrived and be unread: the memory of it that h2 keeps (see `client_frames`).

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::Waker;

use futures_util::task::AtomicWaker;

use super::frames::{Blocks, unpacked};

/// Some of the body may have arrived and be unread.
const MAY_HAVE_UNREAD: u8 = 0;
/// All that has arrived is read.
const WAITS: u8 = 1;
/// The body is read to its end, or dropped.
const READ: u8 = 2;

#[derive(Debug)]
pub(super) struct Unread {
    state: AtomicU8,
    /// What may be unread came after the first of these blocks, packed as in `ReceivedFrames`; once so many bytes are read as the window has,
    /// after the second ones.
    marks: [AtomicU64; 2],
    marked_bytes: AtomicU64,
    /// Unread bytes that the body may have.
    window: u32,
    arrival: AtomicWaker,
}

impl Unread {
    /// Of a body that began after these blocks.
    pub(super) fn new(before: u64, window: u32) -> Self {
        Self {
            state: AtomicU8::new(MAY_HAVE_UNREAD),
            marks: [before, before].map(AtomicU64::new),
            marked_bytes: AtomicU64::new(0),
            window,
            arrival: AtomicWaker::new(),
        }
    }

    /// More was read: `bytes` in all, after these blocks.
    pub(super) fn reads(&self, bytes: u64, blocks: u64) {
        if bytes - self.marked_bytes.load(Ordering::Relaxed) >= u64::from(self.window) {
            let [_, next] = &self.marks;
            self.mark([next.load(Ordering::Relaxed), blocks], bytes);
        }
    }

    /// All that has arrived is read.
    pub(super) fn waits(&self) {
        self.state.store(WAITS, Ordering::Relaxed);
    }

    /// The body is read to its end, or dropped.
    pub(super) fn ends(&self) {
        self.state.store(READ, Ordering::Relaxed);
    }

    /// Sets what [`Self::arrives`] wakes.
    pub(super) fn wake_on_arrival(&self, waker: &Waker) {
        self.arrival.register(waker);
    }

    /// Something has arrived after these blocks, of a body of which `bytes` are read.
    pub(super) fn arrives(&self, bytes: u64, before: u64) {
        let waited =
            self.state
                .compare_exchange(WAITS, MAY_HAVE_UNREAD, Ordering::Relaxed, Ordering::Relaxed);
        if waited.is_ok() {
            self.mark([before, before], bytes);
        }
        self.arrival.wake();
    }

    fn mark(&self, blocks: [u64; 2], bytes: u64) {
        for (mark, blocks) in self.marks.iter().zip(blocks) {
            mark.store(blocks, Ordering::Relaxed);
        }
        self.marked_bytes.store(bytes, Ordering::Relaxed);
    }

    /// The blocks before those that have unread bytes of the body, and the most such bytes, if there may be any.
    pub(super) fn since(&self) -> Option<(Blocks, u32)> {
        let [since, _] = &self.marks;
        let may_have_unread = self.state.load(Ordering::Relaxed) == MAY_HAVE_UNREAD;
        may_have_unread.then(|| (unpacked(since.load(Ordering::Relaxed)), self.window))
    }
}
