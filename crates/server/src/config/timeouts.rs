//! The section `timeouts`: limits for each phase of a connection.

use std::time::Duration;

use super::walk::Section;

/// How long a connection may stay in each phase. Zero means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// From accept to the first bytes of a protocol.
    pub handshake: Duration,
    /// From the handshake to the first request; for each later HTTP/1 head, from its first byte to its last.
    pub head: Duration,
    /// At least [`Self::body_bytes_min`] of a request body must arrive within this time.
    pub body: Duration,
    /// See [`Self::body`].
    pub body_bytes_min: u64,
    /// While data waits to be sent, the client must accept [`Self::send_bytes_min`] within this time.
    pub send: Duration,
    /// See [`Self::send`].
    pub send_bytes_min: u64,
    /// Without a request.
    pub idle: Duration,
    /// From accept until a graceful shutdown (GOAWAY), plus or minus a tenth.
    pub connection_age: Duration,
    /// From then until the connection is closed.
    pub connection_age_grace: Duration,
}

impl Default for Timeouts {
    /// The defaults that `config/ringfetchd.yaml` documents.
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(15),
            body: Duration::from_secs(30),
            body_bytes_min: 1 << 10,
            send: Duration::from_secs(30),
            send_bytes_min: 4 << 10,
            idle: Duration::from_secs(300),
            connection_age: Duration::from_secs(3600),
            connection_age_grace: Duration::from_secs(300),
        }
    }
}

const DAY_MS: u64 = 86_400_000;
const BYTES_MIN_MAX: u64 = 1 << 30;

fn time(section: &mut Section<'_>, name: &str, default: Duration) -> Duration {
    let default_ms = u64::try_from(default.as_millis()).unwrap_or(DAY_MS);
    Duration::from_millis(section.integer(name, default_ms, 0..=DAY_MS))
}

pub(super) fn read(mut section: Section<'_>) -> Timeouts {
    let default = Timeouts::default();
    let handshake = time(&mut section, "handshake_ms", default.handshake);
    let head = time(&mut section, "head_ms", default.head);
    let body = time(&mut section, "body_ms", default.body);
    let body_bytes_min = section.bytes("body_bytes_min", default.body_bytes_min, 1..=BYTES_MIN_MAX, 1);
    let send = time(&mut section, "send_ms", default.send);
    let send_bytes_min = section.bytes("send_bytes_min", default.send_bytes_min, 1..=BYTES_MIN_MAX, 1);
    let timeouts = Timeouts {
        handshake,
        head,
        body,
        body_bytes_min,
        send,
        send_bytes_min,
        idle: time(&mut section, "idle_ms", default.idle),
        connection_age: time(&mut section, "connection_age_ms", default.connection_age),
        connection_age_grace: time(
            &mut section,
            "connection_age_grace_ms",
            default.connection_age_grace,
        ),
    };
    section.finish();
    timeouts
}
