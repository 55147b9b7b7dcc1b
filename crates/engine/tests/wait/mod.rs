//! Waiting for what the kernel or another thread does and announces to nobody, and being alone in the process.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest wait for anything: far more than it takes on a busy machine.
pub(crate) const WAIT: Duration = Duration::from_secs(30);

/// Polls a condition until it holds or the longest wait is over.
#[track_caller]
pub(crate) fn wait_until(condition: impl Fn() -> bool, complaint: impl Fn() -> String) {
    let deadline = Instant::now() + WAIT;
    while !condition() {
        assert!(Instant::now() < deadline, "{}", complaint());
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// One test at a time: those that count what the process has, or use the machine, which has few loop devices and one page
/// cache.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A runtime on this thread.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime")
}
