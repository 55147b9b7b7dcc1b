//! Time as the timeouts of connections count it: without that in which the thread did not run.
//!
//! When a process goes on that was stopped, or whose machine was, its timers are due before it has read what clients sent
//! meanwhile. So a timer that is late by more than its own time blames nobody.

use std::cell::Cell;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Longest step of [`sleep`].
const STEP_MAX: Duration = Duration::from_secs(1);

thread_local! {
    /// The time that this thread has lost in ticks.
    static LOST: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The present on this thread.
pub(super) fn now() -> Instant {
    Instant::now() - LOST.get()
}

/// Sleeps for so long; returns by how much it was late if the thread cannot have run meanwhile.
async fn lost_in(time: Duration) -> Duration {
    let due = Instant::now() + time;
    sleep_until(due).await;
    let late = due.elapsed();
    if late > time { late } else { Duration::ZERO }
}

/// Waits for the next tick of this thread, which has one ticker at most.
pub(super) async fn tick(period: Duration) {
    let lost = lost_in(period).await;
    LOST.set(LOST.get() + lost);
}

/// Sleeps for so long.
pub(super) async fn sleep(time: Duration) {
    let mut left = time;
    while !left.is_zero() {
        let step = left.min(STEP_MAX);
        if lost_in(step).await.is_zero() {
            left -= step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use std::pin::pin;

    #[tokio::test(start_paused = true)]
    async fn time_that_is_lost_does_not_count() {
        // Scenario: a tick of a second and a sleep of two; the clock jumps by 60 s. Expectation: for both a second at most has
        // passed; a delay of half a second counts.
        let begun = now();
        let (mut ticks, mut sleeps) = (
            pin!(tick(Duration::from_secs(1))),
            pin!(sleep(Duration::from_secs(2))),
        );
        assert!(ticks.as_mut().now_or_never().is_none() && sleeps.as_mut().now_or_never().is_none());
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!(ticks.now_or_never().is_some() && sleeps.as_mut().now_or_never().is_none());
        assert_eq!(now() - begun, Duration::from_secs(1));
        for left in [true, true, false] {
            assert_eq!(sleeps.as_mut().now_or_never().is_none(), left);
            tokio::time::advance(Duration::from_millis(1500)).await;
        }
    }
}
