//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks data that is consistent after every statement, so that a panic of a holder does not matter.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
