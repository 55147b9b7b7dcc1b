//! Which slots of a ring's backend have finished: one bit each, set by the wakers of its operations on any
//! thread.
//!
//! Invariant: a later [`Ready::take`] returns each slot that was set, once, and the task of the last
//! [`Ready::register`] is woken for it. `loom/waking.rs` checks this over all interleavings.

#[cfg(all(loom, test))]
use loom::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use std::sync::PoisonError;
#[cfg(not(all(loom, test)))]
use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use std::task::Waker;

/// See the module.
pub(crate) struct Ready {
    words: Box<[AtomicU64]>,
    any: AtomicBool,
    dispatcher: Mutex<Option<Waker>>,
}

impl Ready {
    /// State for this many slots.
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            words: (0..slots.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            any: AtomicBool::new(false),
            dispatcher: Mutex::new(None),
        }
    }

    /// Marks a slot as finished.
    #[inline]
    pub(crate) fn set(&self, slot: u32) {
        if let Some(word) = self.words.get(slot as usize / 64) {
            word.fetch_or(1 << (slot % 64), Ordering::Release);
        }
        // Many reads finish in one pass of the driver: only the first wakes the dispatcher.
        if !self.any.swap(true, Ordering::AcqRel) {
            let waker = self
                .dispatcher
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Makes the next [`Self::take`] return true without a slot.
    pub(crate) fn mark(&self) {
        self.any.store(true, Ordering::Release);
    }

    /// Sets the task to wake. Call before [`Self::take`]: otherwise a slot set in between wakes no task.
    #[inline]
    pub(crate) fn register(&self, waker: &Waker) {
        let mut dispatcher = self.dispatcher.lock().unwrap_or_else(PoisonError::into_inner);
        if !dispatcher.as_ref().is_some_and(|known| known.will_wake(waker)) {
            *dispatcher = Some(waker.clone());
        }
    }

    /// Whether any slot was set since the last call; if so, [`Self::take_word`] returns which.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        self.any.swap(false, Ordering::AcqRel)
    }

    /// Number of words of slots.
    pub(crate) fn words(&self) -> usize {
        self.words.len()
    }

    /// Takes the slots of a word that were set: bit 3 of word 1 is slot 67.
    #[inline]
    pub(crate) fn take_word(&self, word: usize) -> u64 {
        self.words
            .get(word)
            .map_or(0, |bits| bits.swap(0, Ordering::Acquire))
    }
}
