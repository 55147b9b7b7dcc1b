//! What of a request's body may have arrived and be unread: the memory of it that h2 keeps (see `client_frames`).

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::task::Waker;

use futures_util::task::AtomicWaker;

use super::Blocks;

/// Some of the body may have arrived and be unread.
const MAY_HAVE_UNREAD: u8 = 0;
/// All that has arrived is read.
const WAITS: u8 = 1;
/// The body is read to its end, or dropped.
const READ: u8 = 2;

#[derive(Debug)]
pub(super) struct Unread {
    state: AtomicU8,
    /// What may be unread came after the first marks; once so many bytes are read as the window has, after the second ones.
    marks: [[AtomicU32; 3]; 2],
    marked_bytes: AtomicU64,
    /// Unread bytes that the body may have.
    window: u32,
    arrival: AtomicWaker,
}

impl Unread {
    /// Of a body that began after these blocks.
    pub(super) fn new(before: Blocks, window: u32) -> Self {
        Self {
            state: AtomicU8::new(MAY_HAVE_UNREAD),
            marks: [before.map(AtomicU32::new), before.map(AtomicU32::new)],
            marked_bytes: AtomicU64::new(0),
            window,
            arrival: AtomicWaker::new(),
        }
    }

    /// More was read: `bytes` in all, after these blocks.
    pub(super) fn reads(&self, bytes: u64, blocks: Blocks) {
        if bytes - self.marked_bytes.load(Ordering::Relaxed) >= u64::from(self.window) {
            let [since, next] = &self.marks;
            for (since, next) in since.iter().zip(next) {
                since.store(next.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            self.mark(next, bytes, blocks);
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
    pub(super) fn arrives(&self, bytes: u64, before: Blocks) {
        let waited =
            self.state
                .compare_exchange(WAITS, MAY_HAVE_UNREAD, Ordering::Relaxed, Ordering::Relaxed);
        if waited.is_ok() {
            self.marks
                .iter()
                .for_each(|marks| self.mark(marks, bytes, before));
        }
        self.arrival.wake();
    }

    fn mark(&self, marks: &[AtomicU32; 3], bytes: u64, blocks: Blocks) {
        for (mark, blocks) in marks.iter().zip(blocks) {
            mark.store(blocks, Ordering::Relaxed);
        }
        self.marked_bytes.store(bytes, Ordering::Relaxed);
    }

    /// The blocks before those that have unread bytes of the body, and the most such bytes, if there may be any.
    pub(super) fn since(&self) -> Option<(Blocks, u32)> {
        let [since, _] = &self.marks;
        let may_have_unread = self.state.load(Ordering::Relaxed) == MAY_HAVE_UNREAD;
        may_have_unread.then(|| {
            let blocks = since.each_ref().map(|mark| mark.load(Ordering::Relaxed));
            (blocks, self.window)
        })
    }
}
