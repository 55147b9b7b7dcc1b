//! How connections are made: addresses, pool, windows and frames, limits. Settings are checked here, once.

use crate::client::{CallOptions, Client, Core};
use crate::error::Error;
use crate::pool::Pool;
use crate::retry::RetryPolicy;
use http::Uri;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tonic::transport::{Channel, Endpoint};

/// 256 KiB frames: h2 writes a frame with one writev, and the default of 16 KiB costs the server 16 times as many
/// (measured: 443k instead of 360k reads/s at 64 x 4 KiB a call, the largest single lever).
const FRAME_BYTES: u32 = 256 << 10;
/// Room for a large answer without waiting for window updates; figures are flat from 2 MiB on.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// Room for several answers at once.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTIONS_MAX: usize = 1024;

/// Settings of a [`Client`]; see [`Client::builder`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it connects"]
pub struct Builder {
    url: String,
    connections: usize,
    max_in_flight: usize,
    timeout: Option<Duration>,
    connect_timeout: Duration,
    retry: RetryPolicy,
    max_answer_bytes: usize,
}

impl Builder {
    pub(crate) fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connections: 1,
            max_in_flight: 1024,
            timeout: Some(Duration::from_secs(10)),
            connect_timeout: Duration::from_secs(5),
            retry: RetryPolicy::default(),
            max_answer_bytes: 64 << 20,
        }
    }

    /// HTTP/2 connections, 1 to 1024; the least busy one takes a call. Default 1. The server serves a connection on one
    /// core, so use at least as many as it has cores.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// Most calls in flight, at least 1; further ones wait. Also the bound of each stream's requests. Default 1024.
    pub fn max_in_flight(mut self, calls: usize) -> Self {
        self.max_in_flight = calls;
        self
    }

    /// How long a call may take in all, waiting for its turn and retries included; the server is told and does not
    /// begin what is late. `None`: for ever. Default 10 s. [`Client::with_timeout`] changes it for single calls.
    pub fn timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.timeout = timeout.into();
        self
    }

    /// How long making a connection may take. Default 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// See [`RetryPolicy`].
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Longest answer that is taken, in bytes; a longer one is a protocol error. Default 64 MiB.
    pub fn max_answer_bytes(mut self, bytes: usize) -> Self {
        self.max_answer_bytes = bytes;
        self
    }

    /// Connects, all connections at once.
    ///
    /// # Errors
    /// `Invalid` for a setting out of its bounds, `Transport` if the server cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future closes what was opened.
    pub async fn connect(self) -> Result<Client, Error> {
        let endpoint = self.endpoint()?;
        let connects = (0..self.connections).map(|_| endpoint.connect());
        let channels = futures_util::future::try_join_all(connects)
            .await
            .map_err(Error::from_connect)?;
        self.finish(channels)
    }

    /// Connects when the first calls are made. Must be called inside a Tokio runtime.
    ///
    /// # Errors
    /// `Invalid` for a setting out of its bounds.
    pub fn connect_lazy(self) -> Result<Client, Error> {
        let endpoint = self.endpoint()?;
        let channels = (0..self.connections).map(|_| endpoint.connect_lazy()).collect();
        self.finish(channels)
    }

    /// As [`Self::connect_lazy`], over byte streams that `connector` opens: a Unix socket, a tunnel, a pipe in a test.
    ///
    /// # Errors
    /// `Invalid` for a setting out of its bounds.
    pub fn connect_lazy_with<F, Fut, Io>(self, connector: F) -> Result<Client, Error>
    where
        F: Fn() -> Fut + Clone + Send + 'static,
        Fut: Future<Output = std::io::Result<Io>> + Send,
        Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let endpoint = self.endpoint()?;
        let open = move || {
            let connector = connector.clone();
            let service = tower::service_fn(move |_: Uri| {
                let opened = connector();
                async move { opened.await.map(TokioIo::new) }
            });
            endpoint.connect_with_connector_lazy(service)
        };
        let channels = (0..self.connections).map(|_| open()).collect();
        self.finish(channels)
    }

    fn endpoint(&self) -> Result<Endpoint, Error> {
        if !(1..=CONNECTIONS_MAX).contains(&self.connections) {
            let problem = format!("is {}; use 1 to {CONNECTIONS_MAX}", self.connections);
            return Err(Error::invalid("connections", problem));
        }
        if !(1..=Semaphore::MAX_PERMITS).contains(&self.max_in_flight) {
            return Err(Error::invalid(
                "max_in_flight",
                format!("is {}; use at least 1", self.max_in_flight),
            ));
        }
        let url = &self.url;
        let uri: Uri = url.parse().map_err(|error| {
            Error::invalid(
                "url",
                format!("{url:?} is not a URL ({error}); use http://HOST:PORT"),
            )
        })?;
        if uri.scheme_str() != Some("http") || uri.host().is_none_or(str::is_empty) {
            return Err(Error::invalid(
                "url",
                format!("{url:?} is not of the form http://HOST:PORT"),
            ));
        }
        Ok(Endpoint::from(uri)
            .connect_timeout(self.connect_timeout)
            .max_frame_size(FRAME_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            // Without it a small request waits 40 ms for the acknowledgement of the one before.
            .tcp_nodelay(true)
            .tcp_keepalive(Some(Duration::from_secs(60)))
            .http2_keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(10)))
    }

    fn finish(self, channels: Vec<Channel>) -> Result<Client, Error> {
        let mut channels = channels.into_iter();
        let first = channels
            .next()
            .ok_or_else(|| Error::invalid("connections", "use at least 1"))?;
        let core = Core {
            pool: Pool::new(first, channels),
            permits: Semaphore::new(self.max_in_flight),
            max_in_flight: self.max_in_flight,
            retry: self.retry,
            max_answer_bytes: self.max_answer_bytes,
        };
        Ok(Client::from_parts(
            Arc::new(core),
            CallOptions {
                timeout: self.timeout,
                fail_fast: false,
            },
        ))
    }
}
