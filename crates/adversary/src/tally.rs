//! What a case did, and what the daemon did about it.

use hdrhistogram::Histogram;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// Most keys of one map; codes and causes are few.
const KEYS_MAX: usize = 64;

/// Totals of a case.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Counts {
    /// Connections opened.
    pub connections: u64,
    /// Connections open now.
    pub connections_open: u64,
    /// Connections that could not be opened, by cause.
    pub connections_failed: BTreeMap<String, u64>,
    /// Calls or requests begun.
    pub calls: u64,
    /// Whole answers.
    pub answers: u64,
    /// Refusals by gRPC code or HTTP status.
    pub refused: BTreeMap<String, u64>,
    /// Connections and streams that the daemon ended, and how.
    pub closed: BTreeMap<String, u64>,
    /// Bytes written to sockets, or handed to HTTP/2.
    pub bytes_sent: u64,
    /// Bytes read.
    pub bytes_received: u64,
    /// HTTP/2 frames of floods.
    pub frames_sent: u64,
    /// Answers with wrong bytes, as far as a case checks them.
    pub answers_wrong: u64,
    /// Time to a refusal, milliseconds.
    pub refusal_p99_ms: f64,
    /// The longest time to a refusal.
    pub refusal_max_ms: f64,
    /// Time to an answer, milliseconds.
    pub answer_p99_ms: f64,
}

impl Counts {
    /// All refusals.
    #[must_use]
    pub fn refused_total(&self) -> u64 {
        self.refused.values().sum()
    }
}

struct Inner {
    counts: Counts,
    refusals_us: Option<Histogram<u64>>,
    answers_us: Option<Histogram<u64>>,
}

/// Totals under construction. Clones share them.
#[derive(Clone)]
pub struct Tally {
    inner: Arc<Mutex<Inner>>,
    changed: Arc<Notify>,
}

impl Default for Tally {
    fn default() -> Self {
        // Two digits from 1 us to 10 minutes take a few KiB. Valid bounds never fail.
        let histogram = || Histogram::new_with_bounds(1, 600_000_000, 2).ok();
        let inner = Inner {
            counts: Counts::default(),
            refusals_us: histogram(),
            answers_us: histogram(),
        };
        Self {
            inner: Arc::new(Mutex::new(inner)),
            changed: Arc::new(Notify::new()),
        }
    }
}

impl std::fmt::Debug for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.counts().fmt(f)
    }
}

impl Tally {
    /// Totals so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let quantile = |of: &Option<Histogram<u64>>, at| {
            of.as_ref()
                .map_or(0.0, |of| milliseconds(of.value_at_quantile(at)))
        };
        Counts {
            refusal_p99_ms: quantile(&inner.refusals_us, 0.99),
            refusal_max_ms: quantile(&inner.refusals_us, 1.0),
            answer_p99_ms: quantile(&inner.answers_us, 0.99),
            ..inner.counts.clone()
        }
    }

    /// Waits for a condition of the totals; limit it with a timeout.
    pub async fn wait_until(&self, mut condition: impl FnMut(&Counts) -> bool) {
        loop {
            let changed = self.changed.notified();
            if condition(&self.counts()) {
                return;
            }
            changed.await;
        }
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner).counts);
        self.changed.notify_waiters();
    }

    pub(crate) fn connected(&self) {
        self.change(|counts| {
            counts.connections += 1;
            counts.connections_open += 1;
        });
    }

    pub(crate) fn disconnected(&self) {
        self.change(|counts| counts.connections_open = counts.connections_open.saturating_sub(1));
    }

    pub(crate) fn connect_failed(&self, error: &io::Error) {
        self.change(|counts| count(&mut counts.connections_failed, &cause(error)));
    }

    pub(crate) fn closed(&self, how: &str) {
        self.change(|counts| count(&mut counts.closed, how));
    }

    pub(crate) fn sent(&self, bytes: usize) {
        self.change(|counts| counts.bytes_sent = counts.bytes_sent.saturating_add(wide(bytes)));
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.change(|counts| counts.bytes_received = counts.bytes_received.saturating_add(wide(bytes)));
    }

    pub(crate) fn refused(&self, code: &str, after: Option<Duration>) {
        if let Some(after) = after {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(histogram) = &mut inner.refusals_us {
                histogram.saturating_record(micros(after));
            }
        }
        self.change(|counts| count(&mut counts.refused, code));
    }

    pub(crate) fn answered(&self, after: Duration) {
        {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(histogram) = &mut inner.answers_us {
                histogram.saturating_record(micros(after));
            }
        }
        self.change(|counts| counts.answers += 1);
    }
}

/// Counts one more of a kind; kinds beyond the limit are counted together.
pub(crate) fn count(map: &mut BTreeMap<String, u64>, key: &str) {
    let key = if map.len() < KEYS_MAX || map.contains_key(key) {
        key
    } else {
        "other"
    };
    let value = map.entry(key.to_owned()).or_default();
    *value = value.saturating_add(1);
}

/// An I/O error as one of a bounded set of texts.
pub(crate) fn cause(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(_) => error.to_string(),
        None => error.kind().to_string(),
    }
}

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

pub(crate) fn milliseconds(micros: u64) -> f64 {
    Duration::from_micros(micros).as_secs_f64() * 1e3
}

pub(crate) fn wide(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_tally_can_be_waited_for() {
        // Scenario: refusals counted by another task. Expectation: the waiter sees them; codes are kept apart.
        let tally = Tally::default();
        let other = tally.clone();
        tokio::spawn(async move {
            other.refused("RESOURCE_EXHAUSTED", Some(Duration::from_millis(5)));
            other.refused("503", None);
        });
        tally.wait_until(|counts| counts.refused_total() == 2).await;
        let counts = tally.counts();
        assert_eq!(counts.refused["RESOURCE_EXHAUSTED"], 1);
        assert!(
            (4.9..5.2).contains(&counts.refusal_max_ms),
            "{}",
            counts.refusal_max_ms
        );
    }

    #[test]
    fn a_cause_is_a_text() {
        // Scenario: an error of the system, and one that a library made. Expectation: words, without the fields of a type.
        let refused = io::Error::from(rustix::io::Errno::CONNREFUSED);
        assert_eq!(cause(&refused), "Connection refused (os error 111)");
        assert_eq!(cause(&io::Error::other("of any length")), "other error");
    }

    #[test]
    fn kinds_are_bounded() {
        // Scenario: more kinds than the limit. Expectation: the rest is counted together.
        let mut map = BTreeMap::new();
        for number in 0..1000 {
            count(&mut map, &number.to_string());
        }
        assert_eq!(map.len(), KEYS_MAX + 1);
        assert_eq!(map.values().sum::<u64>(), 1000);
    }
}
