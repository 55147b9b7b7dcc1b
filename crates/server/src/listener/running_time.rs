//! Time as the timeouts of connections count it: without that in which the thread did not run.
//!
//! When a process goes on that was stopped, or whose machine was, its timers are due before it has read what clients sent
//! meanwhile. So a timer that is late by more than its own time blames nobody.

use std::cell::Cell;
use std::time::Duration;
use tokio::task::yield_now;
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

/// Sleeps for so long. A step counts as itself, however late it was, so the end comes; a late last step is followed by one more.
/// After all of them the runtime looks at its sockets once: what arrived in time is read first, though the thread ran too late.
pub(super) async fn sleep(time: Duration) {
    let mut left = time;
    while !left.is_zero() {
        let step = left.min(STEP_MAX);
        let lost = lost_in(step).await;
        left -= step;
        if left.is_zero() && !lost.is_zero() {
            lost_in(step).await;
        }
    }
    yield_now().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use std::pin::pin;

    #[tokio::test(start_paused = true)]
    async fn time_that_is_lost_counts_as_one_step() {
        // Scenario: a tick of a second, and sleeps of one and two; the clock jumps by 60 s, twice, and then by one. Expectation: a
        // second has passed for the tick; both sleeps go on after the first jump, and the longer one after the second, too; neither
        // can be put off for ever; each ends one look at the sockets later.
        let begun = now();
        let second = Duration::from_secs(1);
        let mut ticks = pin!(tick(second));
        let (mut short, mut long) = (pin!(sleep(second)), pin!(sleep(2 * second)));
        let mut jump = async |time, ended: [bool; 2]| {
            let polled = [short.as_mut().now_or_never(), long.as_mut().now_or_never()];
            assert_eq!(polled.map(|polled| polled.is_some()), ended);
            tokio::time::advance(time).await;
        };
        assert!(ticks.as_mut().now_or_never().is_none());
        jump(60 * second, [false, false]).await;
        assert!(ticks.now_or_never().is_some());
        assert_eq!(now() - begun, second);
        jump(60 * second, [false, false]).await;
        let mut ended =
            || [short.as_mut().now_or_never(), long.as_mut().now_or_never()].map(|end| end.is_some());
        assert_eq!([ended(), ended()], [[false, false], [true, false]]);
        tokio::time::advance(second).await;
        assert_eq!(
            [(); 2].map(|()| long.as_mut().now_or_never().is_some()),
            [false, true]
        );
    }
}
