//! Configuration: YAML, environment and flags to validated types, every mistake reported at once.

use std::net::SocketAddr;
use std::time::Duration;

use ringfetch_engine::config::EngineConfig;
use ringfetch_engine::dataset::DatasetSpec;

/// Bounds on what clients may ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most items of one request.
    pub items_per_request: u32,
    /// Most bytes of one answer.
    pub response_bytes: u64,
    /// Most bytes of one request message or HTTP body.
    pub request_bytes: u32,
    /// Most requests in flight in the whole daemon.
    pub requests_in_flight: u32,
    /// Most requests in flight on one HTTP/2 connection.
    pub requests_per_connection: u32,
    /// Most requests in flight on one FetchStream; further ones are not read from the socket.
    pub stream_requests_in_flight: u32,
    /// Most open connections on each port; further ones wait in the kernel's backlog.
    pub connections: u32,
    /// Most ranges of one HTTP request; more are answered as if there were no Range header, per RFC 9110 14.2.
    pub http_ranges: u32,
}

/// Logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// A tracing filter, such as `info`.
    pub filter: String,
    /// Text or JSON.
    pub format: LogFormat,
}

/// How a log line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise.
    Auto,
    /// For people.
    Text,
    /// For machines.
    Json,
}

/// The whole configuration, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where gRPC listens.
    pub grpc_listen: SocketAddr,
    /// Where HTTP listens.
    pub http_listen: SocketAddr,
    /// Where the admin service listens; none: nowhere.
    pub admin_listen: Option<SocketAddr>,
    /// The engine's settings.
    pub engine: EngineConfig,
    /// What is served.
    pub datasets: Vec<DatasetSpec>,
    /// Bounds.
    pub limits: Limits,
    /// Logs.
    pub log: LogConfig,
    /// How long a drain may take.
    pub drain_timeout: Duration,
}
