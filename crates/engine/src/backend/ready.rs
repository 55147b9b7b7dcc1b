//! Which slots of a ring's backend have finished: one bit each, set by the wakers of its operations, on whichever thread.
//!
//! Invariant: a slot that is set is taken by a later [`Ready::take`], once, and the task of the last [`Ready::register`] is
//! woken for it. `loom/waking.rs` checks that over all interleavings.

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
    /// For so many slots.
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            words: (0..slots.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            any: AtomicBool::new(false),
            dispatcher: Mutex::new(None),
        }
    }

    /// A slot has finished.
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

    /// The next [`Self::take`] is true, without a slot.
    pub(crate) fn mark(&self) {
        self.any.store(true, Ordering::Release);
    }

    /// Whose task is woken. Before [`Self::take`], or what is set in between wakes nobody.
    #[inline]
    pub(crate) fn register(&self, waker: &Waker) {
        let mut dispatcher = self.dispatcher.lock().unwrap_or_else(PoisonError::into_inner);
        if !dispatcher.as_ref().is_some_and(|known| known.will_wake(waker)) {
            *dispatcher = Some(waker.clone());
        }
    }

    /// Whether any slot was set since the last call; then [`Self::words`] have them.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        self.any.swap(false, Ordering::AcqRel)
    }

    /// How many words of slots there are.
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
