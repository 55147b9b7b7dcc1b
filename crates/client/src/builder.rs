//! Settings: addresses, connections, limits, headers. They are checked here, once.

use crate::call::{self, CallOptions};
use crate::client::Client;
use crate::connection::{Dial, Endpoint};
use crate::core::Core;
use crate::error::Error;
use crate::pool::Pool;
use crate::retry::{Allowance, RetryBudget, RetryPolicy, Tokens};
use crate::tls::Tls;
use http::header::AUTHORIZATION;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

const CONNECTIONS_MAX: usize = 1024;

/// Settings of a [`Client`]; see [`Client::builder`].
#[derive(Clone)]
#[must_use = "a builder does nothing until it connects"]
pub struct Builder {
    urls: Vec<String>,
    connections: usize,
    max_in_flight: usize,
    timeout: Option<Duration>,
    connect_timeout: Duration,
    retry: RetryPolicy,
    retry_budget: RetryBudget,
    max_answer_bytes: usize,
    metadata: Vec<(String, String)>,
    tls: Option<Tls>,
}

/// Omits the addresses and the values of headers, which may have secrets.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers: Vec<&str> = self.metadata.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Builder")
            .field("urls", &self.urls.len())
            .field("connections", &self.connections)
            .field("timeout", &self.timeout)
            .field("metadata", &headers)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the server at `http://HOST:PORT` or `https://HOST:PORT`. If the host is a name with several addresses, each
    /// connection is to one of them that accepts it; after one that failed, the next begins with another.
    pub fn builder(url: impl Into<String>) -> Builder {
        Builder::new(url)
    }
}

impl Builder {
    pub(crate) fn new(url: impl Into<String>) -> Self {
        Self {
            urls: vec![url.into()],
            connections: 1,
            max_in_flight: 1024,
            timeout: Some(Duration::from_secs(10)),
            connect_timeout: Duration::from_secs(5),
            retry: RetryPolicy::default(),
            retry_budget: RetryBudget::default(),
            max_answer_bytes: 64 << 20,
            metadata: Vec::new(),
            tls: None,
        }
    }

    /// Another server with the same data, at `http://HOST:PORT`. Calls go to the least busy connection of all
    /// servers. One that cannot be reached gets none until it can, if another one is reachable: it is dialled again each
    /// second. One that refuses calls, or whose connection breaks in one, is skipped for a second, or less if it asks for less,
    /// and a retry goes to another server than the previous attempt.
    pub fn endpoint(mut self, url: impl Into<String>) -> Self {
        self.urls.push(url.into());
        self
    }

    /// HTTP/2 connections to each server; 1 to 1024 in all. The least busy one takes a call. Default 1. The
    /// server serves a connection on one core, so use at least as many as it has cores.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// Most calls in flight, at least 1; further ones wait. Also limits the requests of each stream. Reads of
    /// objects do not count. Default 1024.
    pub fn max_in_flight(mut self, calls: usize) -> Self {
        self.max_in_flight = calls;
        self
    }

    /// How long a call may take in all, including the wait for its turn and retries. It is sent to the
    /// server, which does not start late work. `None`: no limit. Default 10 s. [`Client::with_timeout`]
    /// changes it for single calls. Of [`Client::read_object`] it limits each wait instead.
    pub fn timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.timeout = timeout.into();
        self
    }

    /// How long connecting may take, until the server has answered. Default 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// See [`RetryPolicy`].
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// See [`RetryBudget`].
    pub fn retry_budget(mut self, budget: RetryBudget) -> Self {
        self.retry_budget = budget;
        self
    }

    /// A header for every call and stream: a tenant, a token, a trace. [`Client::with_metadata`] adds one for
    /// single calls. `authorization` as [`Self::token`].
    pub fn metadata(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.push((name.into(), value.into()));
        self
    }

    /// A bearer token for every call and stream. It is not sent in plaintext to another host: with a URL `http://HOST:PORT` whose
    /// host is not a loopback address or `localhost`, connecting fails. What a connector of yours opens is your decision.
    pub fn token(self, token: &str) -> Self {
        self.metadata("authorization", format!("Bearer {token}"))
    }

    /// TLS settings for `https://` URLs. Default: trust the host's authorities, present no certificate.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Longest accepted answer, in bytes; a longer one is a protocol error. Default 64 MiB.
    pub fn max_answer_bytes(mut self, bytes: usize) -> Self {
        self.max_answer_bytes = bytes;
        self
    }

    /// Opens all connections at once. If there are several servers, one reachable server is enough.
    ///
    /// # Errors
    /// `Invalid` for a setting out of bounds, `Transport` if no server can be reached.
    ///
    /// # Cancel safety
    /// Dropping the future closes what was opened.
    pub async fn connect(self) -> Result<Client, Error> {
        let client = self.connect_lazy()?;
        client.core().pool.connect().await?;
        Ok(client)
    }

    /// Connects on the first calls, which must be made inside a Tokio runtime.
    ///
    /// # Errors
    /// `Invalid` for a setting out of bounds.
    pub fn connect_lazy(self) -> Result<Client, Error> {
        self.build(&Dial::Tcp)
    }

    /// As [`Self::connect_lazy`], over byte streams that `connector` opens: a Unix socket, a tunnel, a pipe in a test.
    ///
    /// # Errors
    /// `Invalid` for a setting out of bounds.
    pub fn connect_lazy_with<F, Fut, Io>(self, connector: F) -> Result<Client, Error>
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = std::io::Result<Io>> + Send + 'static,
        Io: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.build(&Dial::with(connector))
    }

    fn build(self, dial: &Dial) -> Result<Client, Error> {
        let all = self.connections.saturating_mul(self.urls.len());
        if !(1..=CONNECTIONS_MAX).contains(&all) {
            return Err(Error::invalid(
                "connections",
                format!("are {all}; use 1 to {CONNECTIONS_MAX}"),
            ));
        }
        if !(1..=Semaphore::MAX_PERMITS).contains(&self.max_in_flight) {
            return Err(Error::invalid(
                "max_in_flight",
                format!("is {}; use at least 1", self.max_in_flight),
            ));
        }
        let mut tls = self.tls;
        let endpoint = |url: &String| Endpoint::new(url, dial.clone(), &mut tls, self.connect_timeout);
        let endpoints: Vec<_> = self.urls.iter().map(endpoint).collect::<Result<_, _>>()?;
        let metadata = |(name, value): &(String, String)| call::metadata(name, value);
        let metadata: Vec<_> = self.metadata.iter().map(metadata).collect::<Result<_, _>>()?;
        if metadata.iter().any(|(name, _)| name == AUTHORIZATION) {
            endpoints.iter().try_for_each(Endpoint::check_private)?;
        }
        let core = Core {
            pool: Pool::new(&endpoints, self.connections),
            permits: Semaphore::new(self.max_in_flight),
            max_in_flight: self.max_in_flight,
            retries: Allowance {
                policy: self.retry,
                tokens: Tokens::new(self.retry_budget)?,
            },
            max_answer_bytes: self.max_answer_bytes,
        };
        Ok(Client::from_parts(
            Arc::new(core),
            CallOptions::new(self.timeout, &metadata),
        ))
    }
}
