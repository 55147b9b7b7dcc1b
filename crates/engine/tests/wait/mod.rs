//! Waiting for what the kernel or another thread does and announces to nobody.

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
