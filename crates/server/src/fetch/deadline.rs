//! Waiting no longer than until a deadline.
//!
//! tokio wakes its own thread by a system call whenever a timer is set that comes before all others, and the thread
//! then looks for events once more for nothing: with few requests in flight each one's deadline is such a timer. So
//! while deadlines are waited for, one timer more is set, a forerunner that is earlier than they are (ADR 0012).
//! Deliberately absent: timers when nobody waits; the last one ends within [`FORERUNNER_TIME`].

use std::cell::Cell;
use std::future::Future;
use std::time::{Duration, Instant};

/// How far ahead a forerunner is set. Deadlines nearer than this may be the earliest themselves.
const FORERUNNER_TIME: Duration = Duration::from_secs(1);

thread_local! {
    /// Whether this thread has one.
    static FORERUNNER: Cell<bool> = const { Cell::new(false) };
}

/// What comes of some work, or `None` if it takes until after the deadline. Work that is done at once is never late.
///
/// # Cancel safety
/// As the work's.
pub(crate) async fn until<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    let Some(deadline) = deadline else {
        return Some(work.await);
    };
    send_ahead_of(deadline.into());
    tokio::time::timeout_at(deadline.into(), work).await.ok()
}

/// Sets a timer before this deadline. At most one a thread.
fn send_ahead_of(deadline: tokio::time::Instant) {
    if FORERUNNER.get() {
        return;
    }
    let goes_off = deadline.min(tokio::time::Instant::now() + FORERUNNER_TIME);
    FORERUNNER.set(true);
    tokio::spawn(async move {
        tokio::time::sleep_until(goes_off).await;
        FORERUNNER.set(false);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_is_waited_for_until_its_deadline() {
        // Scenario: work of no time, of 1 and of 3 seconds, with deadlines in 2 s, in the past, and without one, twice
        // each on one thread. Expectation: what is done in time is seen, also at once after the deadline; the rest is
        // given up at the deadline and not later; without a deadline everything is waited for.
        let second = Duration::from_secs(1);
        for _ in 0..2 {
            for (takes, deadline, expected) in [
                (0, Some(2), Some(0)),
                (1, Some(2), Some(1)),
                (3, Some(2), None),
                (0, Some(0), Some(0)),
                (1, Some(0), None),
                (3, None, Some(3)),
            ] {
                let begin = tokio::time::Instant::now();
                let deadline_at = deadline.map(|seconds| (begin + second * seconds).into_std());
                let work = async {
                    if takes > 0 {
                        tokio::time::sleep(second * takes).await;
                    }
                    takes
                };
                assert_eq!(
                    until(deadline_at, work).await,
                    expected,
                    "{takes} s, {deadline:?}"
                );
                let lasted = if expected.is_some() {
                    takes
                } else {
                    deadline.unwrap_or(0)
                };
                assert!(begin.elapsed() <= second * lasted + Duration::from_millis(1));
            }
        }
    }
}
