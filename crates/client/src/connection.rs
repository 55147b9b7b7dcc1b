//! One HTTP/2 connection: dialling, windows and frames; `silence` detects a silent peer. Calls use it directly:
//! only h2 is between a call and the socket, which costs half the CPU of a channel with a task per call.
//! `pool` chooses a call's connection. There is no proxy support.

mod silence;

use crate::error::Error;
use crate::tls::Tls;
use bytes::Bytes;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use h2::client::SendRequest;
use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};
use silence::Watched;
use socket2::{SockRef, TcpKeepalive};
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

/// 256 KiB frames: h2 writes a frame with one writev, and the default of 16 KiB costs the server 16 times as many
/// (measured: 443k instead of 360k reads/s at 64 x 4 KiB a call, the largest single lever).
const FRAME_BYTES: u32 = 256 << 10;
/// Room for a large answer without waiting for window updates; throughput is flat from 2 MiB on.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// The most that HTTP/2 allows: each call's own window is the limit. A smaller one would be used up by calls whose answers
/// nobody takes, and then no other call would get one.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// Bytes per read system call: h2 asks for 8 KiB, which is two small answers. Large frames bypass this
/// buffer.
const READ_BYTES: usize = 64 << 10;
/// Most abandoned calls remembered, so that their late answers are not taken for a protocol error.
const ABANDONED_CALLS_MAX: usize = 4096;
/// Most frames to calls beyond these before the connection ends. h2's default of 1024 ends healthy ones.
const LATE_FRAMES_MAX: usize = 1 << 20;
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// How long a connection is doubted: until it is known whether the peer answers, with a second to spare.
const DOUBT: Duration = Duration::from_secs(11);
/// RFC 8305, section 5.
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

type Opened = Pin<Box<dyn Future<Output = io::Result<Box<dyn Io>>> + Send>>;

/// How to open a byte stream to an endpoint.
#[derive(Clone)]
pub(crate) enum Dial {
    Tcp,
    With(Arc<dyn Fn() -> Opened + Send + Sync>),
}

impl Dial {
    pub(crate) fn with<F, Fut, S>(connector: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        Self::With(Arc::new(move || {
            let opened = connector();
            Box::pin(async move { opened.await.map(|stream| Box::new(stream) as Box<dyn Io>) })
        }))
    }
}

/// A time until which something holds.
#[derive(Debug, Default)]
pub(crate) struct Until {
    /// Whether there is one, as far as is known: a call reads this alone.
    is_set: AtomicBool,
    until: Mutex<Option<Instant>>,
}

impl Until {
    /// Until this time, unless a later one is known.
    pub(crate) fn set(&self, until: Instant) {
        let mut known = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *known = (*known).max(Some(until));
        self.is_set.store(true, Ordering::Relaxed);
    }

    pub(crate) fn clear(&self) {
        let mut known = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *known = None;
        self.is_set.store(false, Ordering::Relaxed);
    }

    pub(crate) fn holds(&self) -> bool {
        if !self.is_set.load(Ordering::Relaxed) {
            return false;
        }
        let known = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = known.is_some_and(|until| Instant::now() < until);
        self.is_set.store(holds, Ordering::Relaxed);
        holds
    }
}

/// The calls on a connection.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    open: AtomicUsize,
    /// Whether one has begun since the connection was last looked at.
    has_begun: AtomicBool,
    /// Until when the peer may be silent, since it has not answered one in time.
    doubted_until: Until,
    /// Sent to each connection when it is to be looked at: one that has been replaced may still have calls.
    doubts: watch::Sender<()>,
    /// Connections opened so far.
    connections: AtomicUsize,
}

impl Calls {
    pub(crate) fn begin(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.has_begun.store(true, Ordering::Relaxed);
    }

    pub(crate) fn end(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// One has not been answered in time.
    pub(crate) fn doubt(&self) {
        self.doubted_until.set(Instant::now() + DOUBT);
        self.doubts.send_replace(());
    }

    /// There is a new connection: its number, and what it gets when it is doubted.
    fn connected(&self) -> (usize, watch::Receiver<()>) {
        self.doubted_until.clear();
        let number = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
        (number, self.doubts.subscribe())
    }

    /// The peer answers on this connection, which says nothing about the one that has replaced it.
    fn heard(&self, connection: usize) {
        if connection == self.connections.load(Ordering::Relaxed) {
            self.doubted_until.clear();
        }
    }

    pub(crate) fn are_doubted(&self) -> bool {
        self.doubted_until.holds()
    }

    /// Whether there are any, or have been since this was last asked.
    fn were_any(&self) -> bool {
        self.has_begun.swap(false, Ordering::Relaxed) || self.open() > 0
    }
}

/// A method's path, parsed once.
#[derive(Clone)]
pub(crate) struct Method {
    path: &'static str,
    parsed: OnceLock<PathAndQuery>,
}

impl Method {
    /// `/PACKAGE.SERVICE/METHOD`.
    pub(crate) const fn new(path: &'static str) -> Self {
        Self {
            path,
            parsed: OnceLock::new(),
        }
    }

    fn path(&self) -> PathAndQuery {
        self.parsed
            .get_or_init(|| PathAndQuery::from_static(self.path))
            .clone()
    }
}

/// Whether the host of a URL is this one: a loopback address, or `localhost`. A token in plaintext is sent to no other.
pub fn is_loopback(host: &str) -> bool {
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>();
    address.map_or(host.eq_ignore_ascii_case("localhost"), |address| {
        address.to_canonical().is_loopback()
    })
}

/// A server's address, and how to reach it.
#[derive(Clone)]
pub(crate) struct Endpoint {
    authority: Authority,
    /// `HOST:PORT`.
    address: String,
    dial: Dial,
    tls: Option<Tls>,
    connect_timeout: Duration,
    /// Connections that failed, and with each of them the address that is tried first, of a name with several.
    failures: Arc<AtomicUsize>,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Endpoint").field(&self.address).finish()
    }
}

impl Endpoint {
    /// The server at `http://HOST:PORT`, or with TLS at `https://HOST:PORT`: by default, trusting the host's authorities.
    pub(crate) fn new(
        url: &str,
        dial: Dial,
        tls: &mut Option<Tls>,
        connect_timeout: Duration,
    ) -> Result<Self, Error> {
        // Does not show the URL: it may have a password.
        let wrong = || Error::invalid("url", "is not of the form http://HOST:PORT or https://HOST:PORT");
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        // Nothing else is sent, so anything else would be ignored without a word. A port above 65535 is none.
        let is_address = |authority: &&Authority| {
            let port = authority.as_str().strip_prefix(authority.host());
            let has_port = authority.port_u16().is_some() && !authority.as_str().contains('@');
            !authority.host().is_empty() && port.is_some_and(|port| port.is_empty() || has_port)
        };
        let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none() && !url.contains('#');
        let authority = uri.authority().filter(is_address).filter(|_| is_bare);
        let authority = authority.ok_or_else(wrong)?;
        let (port, tls) = match uri.scheme_str() {
            Some("http") => (80, None),
            Some("https") => {
                if tls.is_none() {
                    *tls = Some(Tls::new(None, None)?);
                }
                (443, tls.clone())
            }
            Some(_) | None => return Err(wrong()),
        };
        Ok(Self {
            address: format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(port)),
            authority: authority.clone(),
            dial,
            tls,
            connect_timeout,
            failures: Arc::default(),
        })
    }

    /// Whether nobody else on the network can read what is sent, such as a token.
    pub(crate) fn check_private(&self) -> Result<(), Error> {
        let is_tcp = matches!(self.dial, Dial::Tcp);
        if is_tcp && self.tls.is_none() && !is_loopback(self.authority.host()) {
            return Err(Error::invalid(
                "token",
                format!(
                    "would be sent to {} in plaintext; use https://, or a loopback address",
                    self.address
                ),
            ));
        }
        Ok(())
    }

    /// The URI of a method.
    pub(crate) fn uri(&self, method: &Method) -> Uri {
        let mut parts = http::uri::Parts::default();
        let scheme = if self.tls.is_some() {
            Scheme::HTTPS
        } else {
            Scheme::HTTP
        };
        parts.scheme = Some(scheme);
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(method.path());
        // All three parts are set, so this cannot fail.
        Uri::from_parts(parts).unwrap_or_default()
    }

    /// Opens a connection, driven by its own task until its last user is gone. `calls` are those on it.
    pub(crate) async fn open(&self, calls: Arc<Calls>) -> Result<SendRequest<Bytes>, Error> {
        self.open_of(lookup(&self.address), calls).await
    }

    /// As [`Self::open`], to one of these addresses if there is no connector.
    async fn open_of(
        &self,
        addresses: impl Future<Output = io::Result<Vec<SocketAddr>>>,
        calls: Arc<Calls>,
    ) -> Result<SendRequest<Bytes>, Error> {
        let opened = async {
            match &self.dial {
                Dial::With(dial) => {
                    let stream = dial().await.map_err(|error| self.unreachable(&error))?;
                    self.speak(stream, calls).await
                }
                Dial::Tcp => {
                    let stream = self.connect(addresses).await;
                    self.speak(stream.map_err(|error| self.unreachable(&error))?, calls)
                        .await
                }
            }
        };
        let opened = tokio::time::timeout(self.connect_timeout, opened).await;
        let opened = opened.unwrap_or_else(|_| {
            let timeout = self.connect_timeout;
            Err(self.unreachable(&format_args!("no connection within {timeout:?}")))
        });
        if opened.is_err() {
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
        opened
    }

    /// Whatever listens on a port accepts connections, or the kernel does for it: an address that does may be one where nobody
    /// answers, so that the next connection begins with another.
    async fn connect(
        &self,
        addresses: impl Future<Output = io::Result<Vec<SocketAddr>>>,
    ) -> io::Result<TcpStream> {
        let mut addresses = addresses.await?;
        let begin = self.failures.load(Ordering::Relaxed).checked_rem(addresses.len());
        addresses.rotate_left(begin.unwrap_or(0));
        let stream = connect(&addresses).await?;
        SockRef::from(&stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(TCP_KEEPALIVE))?;
        Ok(stream)
    }

    async fn speak<S>(&self, stream: S, calls: Arc<Calls>) -> Result<SendRequest<Bytes>, Error>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let spoken = match &self.tls {
            None => handshake(stream, calls).await,
            Some(tls) => match tls.connect_http2(self.authority.host(), stream).await {
                Ok(stream) => handshake(Box::new(stream) as Box<dyn Io>, calls).await,
                Err(error) => Err(io::Error::new(error.kind(), format!("TLS: {error}"))),
            },
        };
        spoken.map_err(|error| {
            // What rustls refuses, or was told: with TLS 1.3 only after its handshake, if it is about the client's certificate.
            // Otherwise the connection broke.
            if self.tls.is_some() && error.kind() == io::ErrorKind::InvalidData {
                Error::refused(format!("{}: {error}", self.address))
            } else {
                self.unreachable(&error)
            }
        })
    }

    fn unreachable(&self, error: &dyn fmt::Display) -> Error {
        Error::unreachable(format!("{}: {error}", self.address))
    }
}

/// Connects to `HOST:PORT`: of a name with several addresses, to the first one that accepts.
///
/// # Errors
/// The name has no address, or why none of them accepts. An address that does not answer takes as long as the kernel
/// tries: limit the time.
pub async fn connect_tcp(address: &str) -> io::Result<TcpStream> {
    connect(&lookup(address).await?).await
}

async fn lookup(address: &str) -> io::Result<Vec<SocketAddr>> {
    Ok(lookup_host(address).await?.collect())
}

/// Tries one address after another, the next one as soon as the one before has failed or has been silent for a while.
async fn connect(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let (mut left, mut attempts) = (addresses.iter(), FuturesUnordered::new());
    let mut refused = io::Error::other("the name has no address");
    loop {
        attempts.extend(left.next().map(TcpStream::connect));
        let patience = if left.len() > 0 {
            NEXT_ADDRESS_AFTER
        } else {
            Duration::MAX
        };
        match tokio::time::timeout(patience, attempts.next()).await {
            Ok(Some(Ok(stream))) => {
                // Otherwise a small request waits 40 ms for the previous one's acknowledgement.
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Ok(Some(Err(error))) => refused = error,
            Ok(None) => return Err(refused),
            Err(_) => {}
        }
    }
}

/// Speaks HTTP/2 and waits for the peer's settings, since whatever listens on a port accepts connections, or
/// the kernel does for it. That costs each connection one round trip.
async fn handshake<S>(stream: S, calls: Arc<Calls>) -> io::Result<SendRequest<Bytes>>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let is_silent = Arc::new(AtomicBool::new(false));
    let stream = Watched {
        stream,
        is_silent: Arc::clone(&is_silent),
    };
    let (mut sender, mut connection) = h2::client::Builder::new()
        .max_frame_size(FRAME_BYTES)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_reset_streams(ABANDONED_CALLS_MAX)
        .max_local_error_reset_streams(Some(LATE_FRAMES_MAX))
        // Otherwise small frames of late answers use up a budget, and the connection ends. Frames of others are bounded by the
        // calls' windows.
        .data_frame_budget(usize::MAX)
        .enable_push(false)
        // The settings raise it.
        .initial_max_send_streams(0)
        .handshake(BufReader::with_capacity(READ_BYTES, stream))
        .await
        .map_err(io_error)?;
    poll_fn(|context| match Pin::new(&mut connection).poll(context) {
        // The first error, which calls would get: a later one is that the peer, which was sent it, has hung
        // up.
        Poll::Ready(ended) => Poll::Ready(Err(match (sender.poll_ready(context), ended) {
            (Poll::Ready(Err(error)), _) | (_, Err(error)) => io_error(error),
            (_, Ok(())) => io::Error::other("the server hung up"),
        })),
        Poll::Pending if sender.current_max_send_streams() > 0 => Poll::Ready(Ok(())),
        Poll::Pending => Poll::Pending,
    })
    .await?;
    let (silent, is_over) = oneshot::channel();
    let watch = connection
        .ping_pong()
        .map(|pings| tokio::spawn(silence::watch(pings, calls.connected(), calls, silent)));
    tokio::spawn(async move {
        tokio::select! {
            biased;
            // The calls on it fail with the reason.
            _ = &mut connection => {}
            Ok(()) = is_over => {
                is_silent.store(true, Ordering::Relaxed);
                // It meets the error of `Watched`, and fails the calls on it with that.
                let _ = (&mut connection).now_or_never();
            }
        }
        if let Some(watch) = watch {
            watch.abort();
        }
    });
    Ok(sender)
}

/// The error of the stream below, if it is one.
fn io_error(error: h2::Error) -> io::Error {
    let message = error.to_string();
    error.into_io().unwrap_or_else(|| io::Error::other(message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};

    #[test]
    fn a_token_is_not_sent_in_plaintext_to_another_host() {
        // Scenario: clients with a token for addresses of this host and of others, one of which is among several;
        // through a connector, and without a token, which is given when the client is built, as a header, or later. Expected: an error
        // names the address, without the token, where another host would get the token in plaintext; no other is refused.
        let with_token = |url: &str| crate::Client::builder(url).token("s3cret");
        let with_header = |url: &str| crate::Client::builder(url).metadata("Authorization", "s3cret");
        let later = |client: &crate::Client| client.with_metadata("authorization", "s3cret");
        for local in [
            "127.0.0.1:1",
            "127.8.8.8",
            "LOCALHOST:1",
            "[::1]:1",
            "[::ffff:127.0.0.1]:1",
        ] {
            let client = with_token(&format!("http://{local}")).connect_lazy().unwrap();
            later(&client).unwrap();
        }
        for remote in ["10.0.0.1:1", "db1", "[2001:db8::1]:1", "127.0.0.1.example.org:1"] {
            let url = format!("http://{remote}");
            let among = with_token("http://127.0.0.1:1").endpoint(&url);
            let plain = crate::Client::builder(&url).connect_lazy().unwrap();
            plain.with_metadata("x-tenant", "s3cret").unwrap();
            for refused in [
                with_token(&url).connect_lazy(),
                with_header(&url).connect_lazy(),
                among.connect_lazy(),
                later(&plain),
            ] {
                let error = refused.unwrap_err();
                assert!(
                    matches!(error, Error::Invalid { field: "token", .. }),
                    "{error:?}"
                );
                let error = error.to_string();
                assert!(error.contains(remote) && !error.contains("s3cret"), "{error}");
            }
            let tunnel = || async { Ok(tokio::io::duplex(1).0) };
            let client = with_token(&url).connect_lazy_with(tunnel).unwrap();
            later(&client).unwrap();
        }
    }

    #[tokio::test]
    async fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        // Scenario: a name with addresses that answer no connection, since their backlog is full, and one that accepts; one
        // without. Expected: a connection to the last; an error. (Not with paused time, which does not wait for the kernel.)
        let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        full.listen(0).unwrap();
        let silent = full.local_addr().unwrap().as_socket().unwrap();
        let _waits = std::net::TcpStream::connect(silent).unwrap();
        let good = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let good = good.local_addr().unwrap();
        let all = [silent, silent, good];
        let connected = tokio::time::timeout(Duration::from_secs(30), connect(&all));
        assert_eq!(connected.await.unwrap().unwrap().peer_addr().unwrap(), good);
        assert!(connect(&[]).await.is_err());
    }

    #[tokio::test]
    async fn of_several_addresses_one_that_accepts_and_is_silent_is_not_tried_again_first() {
        // Scenario: a name with two addresses, of which the first accepts connections and answers none of them. Expected: the
        // first connection fails when its time is up, the next ones do not.
        let listen = async || tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (silent, good) = (listen().await, listen().await);
        let addresses = vec![silent.local_addr().unwrap(), good.local_addr().unwrap()];
        tokio::spawn(async move {
            while let Ok((stream, _)) = good.accept().await {
                tokio::spawn(async move {
                    let mut server = h2::server::handshake(stream).await.unwrap();
                    while server.accept().await.is_some() {}
                });
            }
        });
        let open = async |endpoint: &Endpoint| {
            let addresses = std::future::ready(Ok(addresses.clone()));
            endpoint.open_of(addresses, Arc::default()).await
        };
        let timeout = Duration::from_secs(1);
        let endpoint = Endpoint::new("http://h:1", Dial::Tcp, &mut None, timeout).unwrap();
        let error = open(&endpoint).await.unwrap_err();
        assert!(error.to_string().contains("no connection within 1s"), "{error}");
        // Longer than a busy machine needs.
        let connect_timeout = Duration::from_secs(30);
        let patient = Endpoint {
            connect_timeout,
            ..endpoint
        };
        open(&patient).await.unwrap();
        open(&patient).await.unwrap();
    }
}
