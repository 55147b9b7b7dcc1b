//! When a failed attempt is made again, and after how long. Knows errors and time, not what is called.

use crate::error::Error;
use std::time::Duration;
use tokio::time::Instant;

/// How often and how patiently a call is tried again. What is retried at all is told in the crate's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Attempts in all, the first included; 1 means no retry, and 0 is taken for 1.
    pub attempts_max: u32,
    /// Upper bound of the wait before the second attempt; it doubles with each further one.
    pub backoff_min: Duration,
    /// Upper bound of every wait, the server's hint aside.
    pub backoff_max: Duration,
    /// A longer hint of the server is not waited for: the error is returned at once, with the hint in it.
    pub hint_max: Duration,
}

impl RetryPolicy {
    /// No retries.
    pub fn none() -> Self {
        Self {
            attempts_max: 1,
            ..Self::default()
        }
    }

    /// The wait after so many failures: the hint, and on top a random part of the exponential backoff. The whole
    /// backoff is jittered, so that clients refused together do not come back together ("full jitter": Brooker,
    /// "Exponential Backoff And Jitter", AWS Architecture Blog, 2015). `random` is uniform in 0..1.
    fn wait(&self, failures: u32, hint: Duration, random: f64) -> Duration {
        let doublings = failures.saturating_sub(1).min(20);
        let bound = self
            .backoff_min
            .saturating_mul(1 << doublings)
            .min(self.backoff_max);
        hint.saturating_add(bound.mul_f64(random))
    }
}

impl Default for RetryPolicy {
    /// 5 attempts, 10 ms to 1 s, hints of up to 10 s.
    fn default() -> Self {
        Self {
            attempts_max: 5,
            backoff_min: Duration::from_millis(10),
            backoff_max: Duration::from_secs(1),
            hint_max: Duration::from_secs(10),
        }
    }
}

/// The retries of one call.
pub(crate) struct Retries {
    policy: RetryPolicy,
    deadline: Option<Instant>,
    failures: u32,
}

impl Retries {
    pub(crate) fn new(policy: RetryPolicy, deadline: Option<Instant>) -> Self {
        Self {
            policy,
            deadline,
            failures: 0,
        }
    }

    /// Returns after the wait that is due, if the call is to be tried again; else with the error.
    pub(crate) async fn after(&mut self, error: Error) -> Result<(), Error> {
        self.failures += 1;
        let hint = error.retry_after().unwrap_or_default();
        if !error.is_retryable() || self.failures >= self.policy.attempts_max || hint > self.policy.hint_max {
            return Err(error);
        }
        let wait = self.policy.wait(self.failures, hint, fastrand::f64());
        // A wait that ends past the deadline can only turn a telling error into a dumb one.
        if self
            .deadline
            .is_some_and(|deadline| Instant::now() + wait >= deadline)
        {
            return Err(error);
        }
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_from_the_least_to_the_most_and_never_undercut_the_hint() {
        // Scenario: the largest and smallest random draw after 1..=9 failures, with and without a hint.
        // Expected: upper bounds 10, 20, 40 .. 640, 1000, 1000 ms; the lower bound is the hint.
        let policy = RetryPolicy::default();
        let hint = Duration::from_millis(70);
        for (failures, bound_ms) in (1..).zip([10, 20, 40, 80, 160, 320, 640, 1000, 1000]) {
            assert_eq!(
                policy.wait(failures, Duration::ZERO, 1.0),
                Duration::from_millis(bound_ms)
            );
            assert_eq!(policy.wait(failures, hint, 0.0), hint);
            assert_eq!(
                policy.wait(failures, hint, 1.0),
                hint + Duration::from_millis(bound_ms)
            );
        }
        assert_eq!(policy.wait(u32::MAX, Duration::ZERO, 1.0), Duration::from_secs(1));
    }
}
