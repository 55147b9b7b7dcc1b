//! Whether what should make progress does, by a counter that is looked at once per tick.

use std::time::Duration;

use tokio::time::Instant;

/// Whether a timeout has passed; zero means no timeout.
pub(super) fn is_over(time: Duration, limit: Duration) -> bool {
    !limit.is_zero() && time >= limit
}

/// Detects a counter that should grow, but grows by less than `least` within a timeout.
#[derive(Debug, Default)]
pub(super) struct StallDetector(Option<(Instant, u64)>);

impl StallDetector {
    /// Whether it has lasted for `limit`; `ought`: whether the counter should grow now.
    pub(super) fn lasts(
        &mut self,
        now: Instant,
        ought: bool,
        count: u64,
        least: u64,
        limit: Duration,
    ) -> bool {
        let (since, before) = *self.0.get_or_insert((now, count));
        if !ought || count.saturating_sub(before) >= least {
            self.0 = ought.then_some((now, count));
            return false;
        }
        is_over(now - since, limit)
    }
}
