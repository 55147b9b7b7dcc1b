//! How long a case runs: until a time, or until a test has seen enough.

use std::future::Future;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Ends a [`Hold`] when dropped.
pub use tokio_util::sync::DropGuard as Release;

/// The end of a case. Clones end together.
#[derive(Debug, Clone)]
pub struct Hold {
    until: Option<Instant>,
    released: CancellationToken,
}

impl Hold {
    /// Until released.
    pub fn until_released() -> (Self, Release) {
        let released = CancellationToken::new();
        let release = released.clone().drop_guard();
        let until = None;
        (Self { until, released }, release)
    }

    /// For a time, or until released.
    pub fn at_most(time: Duration) -> (Self, Release) {
        let (mut hold, release) = Self::until_released();
        hold.until = Some(Instant::now() + time);
        (hold, release)
    }

    /// Returns when the hold ends.
    pub async fn ended(&self) {
        match self.until {
            None => self.released.cancelled().await,
            // An error means that the time has passed.
            Some(until) => drop(tokio::time::timeout_at(until, self.released.cancelled()).await),
        }
    }

    /// Whether it has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.released.is_cancelled() || self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// The future's output, or `None` if the hold ends first.
    pub async fn unless_ended<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.ended() => None,
            value = future => Some(value),
        }
    }

    /// Waits, at most until the end. `false`: the hold has ended.
    pub async fn pause(&self, time: Duration) -> bool {
        self.unless_ended(tokio::time::sleep(time)).await.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_hold_ends_by_time_or_by_release() {
        // Scenario: one hold of a minute, one released, one whose release is dropped. Expectation: each ends.
        let (timed, _keep) = Hold::at_most(Duration::from_secs(60));
        assert!(!timed.has_ended());
        timed.ended().await;
        assert!(timed.has_ended());
        let (released, release) = Hold::until_released();
        assert_eq!(released.unless_ended(async { 1 }).await, Some(1));
        drop(release);
        released.ended().await;
        assert_eq!(released.unless_ended(std::future::pending::<()>()).await, None);
        assert!(released.has_ended() && !released.pause(Duration::from_secs(1)).await);
    }
}
