//! A server for tests that only knows the clock: it answers after a fixed time, but not during a stall.

use super::response::{RequestError, Response};
use std::time::Duration;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy)]
pub(in crate::load) struct Fake {
    /// Time for each response.
    pub(in crate::load) takes: Duration,
    /// Requests that arrive from the first instant on are answered at the second.
    pub(in crate::load) stall: Option<(Instant, Instant)>,
}

impl Fake {
    pub(super) async fn fetch(&self, items: &[u64]) -> Result<Response, RequestError> {
        let now = Instant::now();
        let stalled = self.stall.filter(|(from, until)| (*from..*until).contains(&now));
        tokio::time::sleep_until(stalled.map_or(now + self.takes, |(_, until)| until)).await;
        Ok(Response {
            items: items.len(),
            ..Response::default()
        })
    }
}
