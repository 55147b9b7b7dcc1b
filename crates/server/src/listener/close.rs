//! Why the daemon closes connections; counts and logs them by reason.

use std::sync::Arc;

use prometheus::{IntCounter, IntCounterVec, Opts, Registry};

use crate::caller::CallerKey;
use crate::telemetry::LogLimiter;

/// Why a connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// No protocol started in time.
    Handshake,
    /// The TLS handshake failed.
    Tls,
    /// A request's head did not arrive in time.
    Head,
    /// A request's body did not arrive in time.
    Body,
    /// The client does not read its responses.
    Send,
    /// No request for too long.
    Idle,
    /// Its maximum age has passed.
    Age,
    /// Many bytes but hardly any requests, or many cancelled requests.
    Flood,
    /// What the client sent is not the protocol, or a head is too long.
    Protocol,
    /// Closed for a new connection.
    Evicted,
    /// The port was full.
    Refused,
    /// Its principal lost its credential or its rights.
    Revoked,
    /// HTTP/2 keeps much memory of its earlier requests.
    Memory,
}

impl CloseReason {
    /// In the order of their numbers.
    const ALL: [Self; 13] = [
        Self::Handshake,
        Self::Tls,
        Self::Head,
        Self::Body,
        Self::Send,
        Self::Idle,
        Self::Age,
        Self::Flood,
        Self::Protocol,
        Self::Evicted,
        Self::Refused,
        Self::Revoked,
        Self::Memory,
    ];

    /// The word in metrics and logs.
    fn as_str(self) -> &'static str {
        match self {
            Self::Handshake => "handshake",
            Self::Tls => "tls",
            Self::Head => "head",
            Self::Body => "body",
            Self::Send => "send",
            Self::Idle => "idle",
            Self::Age => "age",
            Self::Flood => "flood",
            Self::Protocol => "protocol",
            Self::Evicted => "evicted",
            Self::Refused => "refused",
            Self::Revoked => "revoked",
            Self::Memory => "memory",
        }
    }

    /// Whether the reason is routine and not logged.
    fn is_ordinary(self) -> bool {
        matches!(self, Self::Idle | Self::Age)
    }
}

/// How a connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseDecision {
    /// Gracefully: no further requests are accepted; it closes once those in flight are answered.
    GoAway(CloseReason),
    /// Nothing is in flight: it closes once the client has received everything, or does not go on receiving.
    Finish(CloseReason),
    /// At once.
    Close(CloseReason),
}

/// Bits of a decision's code. The greater ones replace the others.
const CLOSE: u8 = 0x80;
const FINISH: u8 = 0x40;

impl CloseDecision {
    pub(super) fn reason(self) -> CloseReason {
        match self {
            Self::GoAway(reason) | Self::Finish(reason) | Self::Close(reason) => reason,
        }
    }

    pub(super) fn closes(self) -> bool {
        matches!(self, Self::Close(_))
    }

    /// Whether it replaces a decision with this code: only a more urgent one does.
    pub(super) fn replaces(self, code: u8) -> bool {
        code == 0 || self.code() & (CLOSE | FINISH) > code & (CLOSE | FINISH)
    }

    /// The decision as a number other than 0.
    pub(super) fn code(self) -> u8 {
        let code = self.reason() as u8 + 1;
        match self {
            Self::GoAway(_) => code,
            Self::Finish(_) => code | FINISH,
            Self::Close(_) => code | CLOSE,
        }
    }

    pub(super) fn of(code: u8) -> Option<Self> {
        let index = usize::from(code & !(CLOSE | FINISH)).checked_sub(1)?;
        let reason = *CloseReason::ALL.get(index)?;
        Some(match code & (CLOSE | FINISH) {
            0 => Self::GoAway(reason),
            FINISH => Self::Finish(reason),
            _ => Self::Close(reason),
        })
    }
}

/// Counts and logs what one port closes.
#[derive(Debug)]
pub(super) struct CloseCounters {
    transport: &'static str,
    counters: [IntCounter; CloseReason::ALL.len()],
    lines: LogLimiter,
}

/// The metric, for all ports.
pub(super) fn metric(registry: &Registry) -> Result<IntCounterVec, prometheus::Error> {
    let closed = IntCounterVec::new(
        Opts::new(
            "ringfetch_connections_closed_total",
            "Connections that the daemon closed, by reason.",
        ),
        &["transport", "reason"],
    )?;
    registry.register(Box::new(closed.clone()))?;
    Ok(closed)
}

impl CloseCounters {
    pub(super) fn new(metric: &IntCounterVec, transport: &'static str) -> Arc<Self> {
        Arc::new(Self {
            transport,
            counters: CloseReason::ALL.map(|reason| metric.with_label_values(&[transport, reason.as_str()])),
            lines: LogLimiter::default(),
        })
    }

    /// Counts a closed connection.
    pub(super) fn count(&self, reason: CloseReason, caller: CallerKey) {
        if let Some(counter) = self.counters.get(reason as usize) {
            counter.inc();
        }
        if reason.is_ordinary() {
            return;
        }
        if let Some(connections) = self.lines.due() {
            tracing::warn!(
                transport = self.transport,
                reason = reason.as_str(),
                %caller,
                connections,
                "connections were closed; see reason"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_are_encoded_as_numbers() {
        // Scenario: each decision as a number and back, and numbers that encode none. Expectation: the same
        // decision, or `None`.
        for reason in CloseReason::ALL {
            let decisions = [CloseDecision::GoAway, CloseDecision::Finish, CloseDecision::Close];
            for decision in decisions.map(|decision| decision(reason)) {
                assert_eq!(CloseDecision::of(decision.code()), Some(decision));
            }
        }
        assert_eq!(CloseDecision::of(0), None);
        assert_eq!(CloseDecision::of(0x7f), None);
    }

    #[test]
    fn the_handbook_has_a_remedy_for_every_reason_in_the_log() {
        // Scenario: the handbook's row of the line that closed connections are logged with. Expectation: it names each
        // reason that is logged, and no other.
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/OPERATIONS.md");
        let handbook = std::fs::read_to_string(path).unwrap();
        let row = handbook
            .lines()
            .find(|line| line.starts_with("| `connections were closed"))
            .unwrap();
        let remedies = row.split(" | ").last().unwrap();
        for reason in CloseReason::ALL {
            let name = reason.as_str();
            // `head, body: the remedy`
            let mut named = remedies
                .split(' ')
                .filter_map(|word| word.strip_suffix([',', ':']));
            assert_eq!(named.any(|word| word == name), !reason.is_ordinary(), "{name}");
        }
    }
}
