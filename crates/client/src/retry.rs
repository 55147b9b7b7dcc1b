//! Decides whether a failed attempt is repeated, after what delay, and how many retries a client may make in
//! all. Depends on errors and time, not on the call.

use crate::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// How often a call is retried and after which delays. The crate's documentation says which errors are
/// retried. Start from [`RetryPolicy::default`] or [`RetryPolicy::none`] and set fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetryPolicy {
    /// Attempts in all, the first included; 1 means no retry, and so does 0.
    pub attempts_max: u32,
    /// Upper bound of the wait before the second attempt; it doubles with each further one.
    pub backoff_min: Duration,
    /// Upper bound of every wait, apart from a server's hint.
    pub backoff_max: Duration,
    /// If the hint of the server to try next is longer, the error is returned at once.
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

    /// The wait after this many failures: the hint, plus the exponential backoff, of which half is random, so that clients
    /// refused together do not return together ("equal jitter": Brooker, "Exponential Backoff And Jitter", AWS Architecture
    /// Blog, 2015). The other half makes sure that a call outlives a restart. `random` is uniform in 0..1.
    fn wait(&self, failures: u32, hint: Duration, random: f64) -> Duration {
        let doublings = failures.saturating_sub(1).min(20);
        let bound = self
            .backoff_min
            .saturating_mul(1 << doublings)
            .min(self.backoff_max);
        hint.saturating_add(bound.mul_f64(0.5 + random / 2.0))
    }
}

impl Default for RetryPolicy {
    /// 15 attempts, 10 ms to 1 s, hints of up to 10 s. Their waits take 4.1 to 8.3 s, so that a call outlives the restart of its
    /// only server, unless its timeout is shorter.
    fn default() -> Self {
        Self {
            attempts_max: 15,
            backoff_min: Duration::from_millis(10),
            backoff_max: Duration::from_secs(1),
            hint_max: Duration::from_secs(10),
        }
    }
}

/// How many retries all calls of a client may make together, so that a server in trouble does not get a
/// multiple of its load: gRPC's retry throttling (gRFC A6, "Throttling Retry Attempts and Hedged RPCs"). A
/// client has `tokens_max` tokens. Each attempt that fails with a retryable error takes one, each that
/// succeeds returns `per_success`; while half of them or fewer are left, nothing is retried, and errors are
/// returned as they come. An attempt that found no connection, so that nothing was sent, takes none and is made again in any
/// case, like gRPC's transparent retries: all calls share one attempt to connect.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RetryBudget {
    /// Tokens at the start and at most, 1 to 1000; a burst of failures may use half of them for retries. 0:
    /// no limit.
    pub tokens_max: u32,
    /// Tokens returned by a success: 0.1 means one retry per ten answers, in the long run. Counted in
    /// thousandths.
    pub per_success: f64,
}

impl Default for RetryBudget {
    /// 1000 tokens, 0.1 per success: 500 retries in a burst, and a tenth of the successes.
    fn default() -> Self {
        Self {
            tokens_max: 1000,
            per_success: 0.1,
        }
    }
}

/// The tokens of a client, in thousandths.
#[derive(Debug)]
pub(crate) struct Tokens {
    left: AtomicU32,
    max: u32,
    per_success: u32,
}

const TOKEN: u32 = 1000;

impl Tokens {
    pub(crate) fn new(budget: RetryBudget) -> Result<Self, Error> {
        let RetryBudget {
            tokens_max,
            per_success,
        } = budget;
        if tokens_max > 1000 || !(0.001..=1000.0).contains(&per_success) {
            return Err(Error::invalid(
                "retry_budget",
                format!(
                    "{tokens_max} tokens, {per_success} for a success; use up to 1000, and 0.001 to 1000"
                ),
            ));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "in range: it was checked to be 0.001 to 1000"
        )]
        let per_success = (per_success * f64::from(TOKEN)).round() as u32;
        let max = tokens_max * TOKEN;
        Ok(Self {
            left: AtomicU32::new(max),
            max,
            per_success,
        })
    }

    fn succeeded(&self) {
        // Full in the usual case: then no shared memory is written.
        if self.left.load(Ordering::Relaxed) < self.max {
            let add = |left: u32| Some(left.saturating_add(self.per_success).min(self.max));
            let _ = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        }
    }

    /// Counts a retryable failure; returns whether a retry is left.
    fn failed(&self) -> bool {
        let take = |left: u32| Some(left.saturating_sub(TOKEN));
        let before = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .unwrap_or(0);
        self.max == 0 || before.saturating_sub(TOKEN) > self.max / 2
    }
}

/// What a client's calls have for their retries.
#[derive(Debug)]
pub(crate) struct Allowance {
    pub(crate) policy: RetryPolicy,
    pub(crate) tokens: Tokens,
}

/// What an attempt has to know of its call.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) deadline: Option<Instant>,
    /// The same if part of its time has passed. What is sent at once has the whole timeout, so the clock need not be read.
    pub(crate) late: Option<Instant>,
    /// Why the attempt before failed.
    before: Option<Error>,
}

impl Turn {
    /// The error of a call whose deadline passes before this attempt is sent.
    pub(crate) fn unsent(self, first: Error) -> Error {
        self.before.unwrap_or(first)
    }
}

/// The outcome of a future, unless the deadline passes before that.
pub(crate) async fn by<T>(deadline: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline, future).await.ok(),
        None => Some(future.await),
    }
}

/// When this much time has passed; `None`: never.
pub(crate) fn deadline_in(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// The retries of one call.
pub(crate) struct Retries<'a> {
    policy: &'a RetryPolicy,
    tokens: &'a Tokens,
    deadline: Option<Instant>,
    /// The same once part of its time has passed.
    late: Option<Instant>,
    /// Those of the policy, or fewer.
    pub(crate) attempts_max: u32,
    failures: u32,
    /// Why the last attempt failed.
    last: Option<Error>,
}

impl<'a> Retries<'a> {
    pub(crate) fn new(allowance: &'a Allowance, timeout: Option<Duration>) -> Self {
        Self {
            late: None,
            ..Self::until(allowance, deadline_in(timeout))
        }
    }

    /// Those of a call that has less than the whole timeout.
    pub(crate) fn until(Allowance { policy, tokens }: &'a Allowance, deadline: Option<Instant>) -> Self {
        Self {
            policy,
            tokens,
            deadline,
            late: deadline,
            attempts_max: policy.attempts_max,
            failures: 0,
            last: None,
        }
    }

    /// That of the next attempt.
    pub(crate) fn turn(&mut self) -> Turn {
        Turn {
            deadline: self.deadline,
            late: self.late,
            before: self.last.take(),
        }
    }

    /// The message to send; keeps a copy if there may be another attempt.
    pub(crate) fn keep<T: Clone + Default>(&self, sent: &mut T) -> T {
        if self.failures + 1 < self.attempts_max {
            sent.clone()
        } else {
            std::mem::take(sent)
        }
    }

    /// Ends an attempt, which keeps its deadline. Returns its answer, or `None` after the wait before the next attempt, or the
    /// error if there is no further attempt. `hint`: how long the server of that asked to wait.
    pub(crate) async fn settle<T>(
        &mut self,
        outcome: Result<T, Error>,
        hint: Duration,
    ) -> Result<Option<T>, Error> {
        let error = match outcome {
            Ok(answer) => {
                self.tokens.succeeded();
                return Ok(Some(answer));
            }
            Err(error) => error,
        };
        // A broken stream stays broken.
        let is_final = matches!(error, Error::StreamBroken { .. }) || !error.is_retryable();
        let was_sent = !matches!(error, Error::Transport { sent: false, .. });
        if is_final || (was_sent && !self.tokens.failed()) {
            return Err(error);
        }
        self.failures += 1;
        if self.failures >= self.attempts_max || hint > self.policy.hint_max {
            return Err(error);
        }
        let wait = self.policy.wait(self.failures, hint, fastrand::f64());
        // A wait that ends past the deadline would only replace an informative error with `DeadlineExceeded`.
        if self
            .deadline
            .is_some_and(|deadline| deadline.saturating_duration_since(Instant::now()) <= wait)
        {
            return Err(error);
        }
        (self.last, self.late) = (Some(error), self.deadline);
        tokio::time::sleep(wait).await;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_from_the_least_to_the_most_and_never_undercut_the_hint() {
        // Scenario: the largest and smallest random draw after 1..=9 failures, with and without a hint.
        // Expected: upper bounds 10, 20, 40 .. 640, 1000, 1000 ms above the hint; lower bounds are half of that above it.
        let policy = RetryPolicy::default();
        let hint = Duration::from_millis(70);
        for (failures, bound_ms) in (1..).zip([10, 20, 40, 80, 160, 320, 640, 1000, 1000]) {
            assert_eq!(
                policy.wait(failures, Duration::ZERO, 1.0),
                Duration::from_millis(bound_ms)
            );
            assert_eq!(
                policy.wait(failures, hint, 0.0),
                hint + Duration::from_millis(bound_ms) / 2
            );
            assert_eq!(
                policy.wait(failures, hint, 1.0),
                hint + Duration::from_millis(bound_ms)
            );
        }
        assert_eq!(policy.wait(u32::MAX, Duration::ZERO, 1.0), Duration::from_secs(1));
    }

    #[test]
    fn retries_stop_at_half_the_tokens_until_successes_have_given_some_back() {
        // Scenario: 10 tokens, 0.1 per success: failures until there is no retry; 10 successes, then 11, each
        // followed by failures; 10 000 successes; no limit. Expected: the first four failures are retried;
        // none; one; four again, since there are never more tokens than at the start; all are retried.
        let budget = RetryBudget {
            tokens_max: 10,
            per_success: 0.1,
        };
        let tokens = Tokens::new(budget).unwrap();
        let burst = || (0..20).take_while(|_| tokens.failed()).count();
        assert_eq!(burst(), 4);
        (0..10).for_each(|_| tokens.succeeded());
        assert!(!tokens.failed());
        (0..11).for_each(|_| tokens.succeeded());
        assert!(tokens.failed() && !tokens.failed());
        (0..10_000).for_each(|_| tokens.succeeded());
        assert_eq!(burst(), 4);
        let unlimited = Tokens::new(RetryBudget {
            tokens_max: 0,
            ..budget
        })
        .unwrap();
        assert!((0..10_000).all(|_| unlimited.failed()));
        for wrong in [
            RetryBudget {
                tokens_max: 1001,
                ..budget
            },
            RetryBudget {
                per_success: 0.0,
                ..budget
            },
        ] {
            assert!(Tokens::new(wrong).is_err(), "{wrong:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_hint_beyond_the_end_of_time_is_past_the_deadline() {
        // Scenario: a policy that follows any hint, and the longest hint. Expected: the server's error.
        let client = crate::Client::builder("http://127.0.0.1:1").retry(RetryPolicy {
            hint_max: Duration::MAX,
            ..RetryPolicy::default()
        });
        let client = client.connect_lazy().unwrap();
        let mut retries = Retries::new(&client.core().retries, Some(Duration::from_secs(10)));
        let error = Error::Status(Box::new(crate::StatusError {
            code: crate::Code::Unavailable,
            message: String::new(),
            retry_after: Some(Duration::MAX),
            field_violations: Vec::new(),
            reason: String::new(),
            metadata: std::collections::HashMap::new(),
        }));
        let error = retries
            .settle(Err::<(), _>(error), Duration::MAX)
            .await
            .unwrap_err();
        assert_eq!(error.retry_after(), Some(Duration::MAX));
    }
}
