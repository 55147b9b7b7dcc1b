//! Which slots of a ring's backend have finished: one bit each, set by the wakers of its operations on any
//! thread.
//!
//! Invariant: a later [`Ready::poll`] reports each slot that was set, once, and the task of the last one is
//! woken for it. `loom/waking.rs` checks this over all interleavings.

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
use std::task::{Context, Waker};

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

    /// Sets the task to wake. Call before [`Self::take`]: otherwise a slot set in between wakes no task.
    #[inline]
    pub(crate) fn register(&self, waker: &Waker) {
        let mut dispatcher = self.dispatcher.lock().unwrap_or_else(PoisonError::into_inner);
        if !dispatcher.as_ref().is_some_and(|known| known.will_wake(waker)) {
            *dispatcher = Some(waker.clone());
        }
    }

    /// Whether any slot was set since the last call.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        self.any.swap(false, Ordering::AcqRel)
    }

    /// Whether any slot was set since the last call; if so, calls `finished` with each. The task is woken for later ones.
    #[inline]
    pub(crate) fn poll(&self, cx: &Context<'_>, mut finished: impl FnMut(u32)) -> bool {
        self.register(cx.waker());
        if !self.take() {
            return false;
        }
        let mut first = 0;
        for word in &self.words {
            let mut bits = word.swap(0, Ordering::Acquire);
            while bits != 0 {
                finished(first + bits.trailing_zeros());
                bits &= bits - 1;
            }
            first += 64;
        }
        true
    }
}
