//! Ports: bound before anything else starts, accepted on the main thread, served on the engine's cores.
//!
//! Each connection goes to the core with the fewest open ones and stays there, so that its reads never cross threads;
//! SO_REUSEPORT's hash would pile a few connections on one core. When a port has its fill, it stops accepting and the
//! kernel's backlog holds the rest. Deliberately absent: TLS, and what the requests mean.

mod bound;
mod coalesce;
mod lingering;
mod progress;
mod shortcut;
mod slots;

use coalesce::Coalescing;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpStream as StdTcpStream};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use prometheus::{IntGauge, IntGaugeVec, Opts};
use ringfetch_engine::engine::Engine;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::caller::{Callers, Connection};
use crate::lifecycle::{Lifecycle, State};

use progress::{Answering, Progress};
use shortcut::Front;
use slots::{Slot, Slots};

pub use bound::{Addresses, BindError, Bound, bind};
pub use shortcut::{Answer, Shortcut};
pub use slots::ConnectionBounds;

/// An idle connection's peer is asked whether it lives after this long.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// A connection on which nothing was ever said is closed after this long.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long one that is silent when the daemon drains may yet speak, to be told instead of reset: a round trip, and a
/// client that is slow to write.
const LAST_WORD: Duration = Duration::from_millis(500);
/// A request's head must be complete after this long (HTTP/1).
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// HTTP/2 pings, which find a peer that is gone while its answers are pending.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest frame a client may send. Small frames cost: at 16 KiB (the default) a third of the CPU was framing (MEASURED,
/// there for the client's side).
const FRAME_BYTES: u32 = 256 << 10;
/// Windows for what clients send; flat from 2 MiB on (MEASURED).
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
const SEND_BUFFER_BYTES: usize = 1 << 20;
const HTTP1_BUFFER_BYTES: usize = 64 << 10;
/// Pause after an `accept` that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A port that stays full, or cannot accept, says so this often.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// The engine's cores as connections see them: how many each has. One for all ports.
#[derive(Debug)]
pub struct Cores {
    engine: Engine,
    callers: Callers,
    open: Box<[AtomicUsize]>,
    gauge: IntGaugeVec,
}

impl Cores {
    /// All of an engine's cores.
    ///
    /// # Errors
    /// The metric's name is taken.
    pub fn new(
        engine: Engine,
        callers: Callers,
        registry: &prometheus::Registry,
    ) -> Result<Arc<Self>, prometheus::Error> {
        let gauge = IntGaugeVec::new(
            Opts::new("ringfetch_connections", "Open connections."),
            &["transport"],
        )?;
        registry.register(Box::new(gauge.clone()))?;
        let open = (0..engine.core_count()).map(|_| AtomicUsize::new(0)).collect();
        Ok(Arc::new(Self {
            engine,
            callers,
            open,
            gauge,
        }))
    }
}

/// The core with the fewest connections; of several the first after `last`, so that connections that come and go one at
/// a time are spread too.
fn least_loaded(open: &[AtomicUsize], last: usize) -> usize {
    let count = open.len().max(1);
    let after_last = (1..=count).map(|step| (last + step) % count);
    after_last
        .min_by_key(|core| open.get(*core).map_or(0, |open| open.load(Ordering::Relaxed)))
        .unwrap_or(0)
}

/// What one port serves.
#[derive(Debug)]
pub struct Port {
    /// `grpc`, `http` or `admin`, in logs and metrics.
    pub transport: &'static str,
    /// Its address, taken.
    pub bound: Bound,
    /// Whether only HTTP/2 is spoken (gRPC); else HTTP/1.1 too.
    pub http2_only: bool,
    /// The service; each request gets a clone.
    pub router: Router,
    /// Answers what it takes in the router's place.
    pub shortcut: Option<Arc<dyn Shortcut>>,
}

/// A port that clients can connect to.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    conversation: Conversation,
    cores: Arc<Cores>,
    lifecycle: Lifecycle,
    slots: Arc<Slots>,
    gauge: IntGauge,
}

/// How connections of one port are served.
#[derive(Debug, Clone)]
struct Conversation {
    transport: &'static str,
    front: Front,
    http2_only: bool,
    bounds: ConnectionBounds,
}

/// An open connection, counted until dropped.
#[derive(Debug)]
struct Open {
    cores: Arc<Cores>,
    core: usize,
    gauge: IntGauge,
    _slot: Slot,
}

impl Open {
    fn new(cores: Arc<Cores>, core: usize, gauge: IntGauge, slot: Slot) -> Self {
        if let Some(open) = cores.open.get(core) {
            open.fetch_add(1, Ordering::Relaxed);
        }
        gauge.inc();
        Self {
            cores,
            core,
            gauge,
            _slot: slot,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(open) = self.cores.open.get(self.core) {
            open.fetch_sub(1, Ordering::Relaxed);
        }
        self.gauge.dec();
    }
}

/// Says something at most once every [`COMPLAINT_INTERVAL`].
#[derive(Debug, Default)]
struct Complaint {
    last: Option<Instant>,
}

impl Complaint {
    fn is_due(&mut self) -> bool {
        let due = self.last.is_none_or(|last| last.elapsed() >= COMPLAINT_INTERVAL);
        if due {
            self.last = Some(Instant::now());
        }
        due
    }
}

impl Listener {
    /// Starts listening and logs the address. Must be called inside a tokio runtime; [`Listener::serve`] accepts.
    ///
    /// # Errors
    /// Somebody else listens there by now.
    pub fn open_port(
        port: Port,
        cores: &Arc<Cores>,
        bounds: &ConnectionBounds,
        lifecycle: &Lifecycle,
    ) -> Result<Self, BindError> {
        let Port {
            transport,
            bound,
            http2_only,
            router,
            shortcut,
        } = port;
        let address = bound.address();
        let tcp = bound.listen()?;
        tracing::info!(transport, %address, "listening");
        Ok(Self {
            tcp,
            conversation: Conversation {
                transport,
                front: Front { router, shortcut },
                http2_only,
                bounds: bounds.clone(),
            },
            cores: Arc::clone(cores),
            lifecycle: lifecycle.clone(),
            slots: bounds.slots(),
            gauge: cores.gauge.with_label_values(&[transport]),
        })
    }

    /// Accepts until the daemon drains. Then nobody can connect any more, and what is left are the open connections.
    ///
    /// # Cancel safety
    /// Dropping the future closes the port; connections go on.
    pub async fn serve(self) -> Remaining {
        tokio::select! {
            () = self.lifecycle.draining() => {}
            () = self.accept() => {}
        }
        self.accept_who_knocked();
        Remaining { slots: self.slots }
    }

    /// Takes the connections that the kernel has completed already, as far as there is room: closing the port would reset
    /// them, and they are to be told like all others that the daemon drains.
    fn accept_who_knocked(&self) {
        let mut last = 0;
        while self.slots.open() < self.conversation.bounds.connections() {
            // The kernel itself: tokio knows of connections only what it saw when it last waited.
            let Ok((socket, peer)) = SockRef::from(&self.tcp).accept() else {
                return;
            };
            let stream = StdTcpStream::from(socket);
            let ready = stream.set_nonblocking(true).and_then(|()| set_options(&stream));
            if ready.is_err() {
                continue;
            }
            last = least_loaded(&self.cores.open, last);
            let peer = peer
                .as_socket()
                .map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip());
            self.hand_over(stream, peer, last);
        }
    }

    async fn accept(&self) {
        let (mut full, mut failing) = (Complaint::default(), Complaint::default());
        let mut last = 0;
        loop {
            let bounds = &self.conversation.bounds;
            if self.slots.open() >= bounds.connections() && full.is_due() {
                let (transport, connections) = (self.conversation.transport, bounds.connections());
                tracing::warn!(
                    transport,
                    connections,
                    "limits.connections reached: new connections wait"
                );
            }
            self.slots.until(|open| open < bounds.connections()).await;
            let (stream, peer) = match self.tcp.accept().await {
                Ok(accepted) => accepted,
                Err(error) if is_of_one_connection(&error) => continue,
                Err(error) => {
                    if failing.is_due() {
                        let transport = self.conversation.transport;
                        tracing::warn!(transport, %error, "accepting fails; is the limit of open files too low?");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            // A connection that is gone already fails here, and is nobody's loss.
            let Ok(stream) = prepare(stream) else { continue };
            last = least_loaded(&self.cores.open, last);
            self.hand_over(stream, peer.ip(), last);
        }
    }

    fn hand_over(&self, stream: StdTcpStream, peer: IpAddr, core: usize) {
        let open = Open::new(
            Arc::clone(&self.cores),
            core,
            self.gauge.clone(),
            self.slots.take(),
        );
        let conversation = self.conversation.clone();
        let state = self.lifecycle.subscribe();
        let memory_bytes = self.conversation.bounds.connection_bytes();
        let connection = self.cores.callers.connect(peer, memory_bytes);
        let alive = self.cores.engine.spawn_on(core, move || async move {
            let _counted_until_the_end = open;
            conversation.hold(stream, connection, state).await;
        });
        if !alive {
            self.lifecycle.fail(format!("core {core} has stopped"));
        }
    }
}

/// The open connections of a port that accepts no more.
#[derive(Debug)]
pub struct Remaining {
    slots: Arc<Slots>,
}

impl Remaining {
    /// Resolves once none is open.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn closed(&self) {
        self.slots.until(|open| open == 0).await;
    }

    /// How many are open.
    pub fn open(&self) -> usize {
        self.slots.open()
    }
}

/// Errors that accept(2) passes on from one connection; the next one may be well.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

/// Takes a connection out of this thread's runtime, its options set.
fn prepare(stream: TcpStream) -> io::Result<StdTcpStream> {
    let stream = stream.into_std()?;
    set_options(&stream)?;
    Ok(stream)
}

fn set_options(stream: &StdTcpStream) -> io::Result<()> {
    // An answer must not wait for the acknowledgement of the one before.
    stream.set_nodelay(true)?;
    SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(TCP_KEEPALIVE))
}

impl Conversation {
    /// Serves one connection until it ends or, while draining, until its requests are answered. Runs on a core.
    async fn hold(
        self,
        stream: StdTcpStream,
        connection: Arc<Connection>,
        mut state: watch::Receiver<State>,
    ) {
        let Ok(stream) = TcpStream::from_std(stream) else {
            return;
        };
        // Readable first: a client that has spoken is told to go elsewhere below, where closing would reset it.
        tokio::select! {
            biased;
            first = tokio::time::timeout(FIRST_BYTE_TIMEOUT, stream.readable()) => {
                if first.is_err() {
                    return;
                }
            }
            () = draining(&mut state) => {
                // It may have connected just now, and not have come to speak yet.
                if tokio::time::timeout(LAST_WORD, stream.readable()).await.is_err() {
                    return;
                }
            }
        }
        let transport = self.transport;
        let front = self.front.clone();
        let progress = Arc::new(Progress::default());
        let seen = Arc::clone(&progress);
        let service = service_fn(move |request: http::Request<Incoming>| {
            let open = seen.open(request.version());
            let answer = front.call(request, &connection);
            async move {
                answer
                    .await
                    .map(|response| response.map(|body| Answering::new(body, open)))
            }
        });
        let builder = self.protocol();
        let (stream, returned) = lingering::lend(stream, Arc::clone(&progress));
        let ended = {
            let (stream, drain) = Coalescing::new(TokioIo::new(stream));
            let mut connection = pin!(builder.serve_connection(stream, service));
            // The connection first: asked to shut down before it has read anything, it would close without an answer.
            tokio::select! {
                biased;
                ended = drain.drive(connection.as_mut()) => ended,
                () = progress.never_began() => return,
                () = draining(&mut state) => {
                    connection.as_mut().graceful_shutdown();
                    tokio::select! {
                        ended = drain.drive(connection) => ended,
                        () = progress.owes_nothing() => return,
                    }
                }
            }
        };
        if let Err(error) = ended {
            // Mostly clients that went away.
            tracing::debug!(transport, error, "connection ended with an error");
        }
        returned.close().await;
    }

    fn protocol(&self) -> auto::Builder<TokioExecutor> {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        if self.http2_only {
            builder = builder.http2_only();
        }
        builder
            .http1()
            .timer(TokioTimer::new())
            .keep_alive(true)
            .header_read_timeout(HEAD_TIMEOUT)
            // And no `pipeline_flush`: with it hyper copies bodies into its own memory, without a bound.
            .max_buf_size(HTTP1_BUFFER_BYTES);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_frame_size(FRAME_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .adaptive_window(false)
            .max_concurrent_streams(self.bounds.streams())
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .max_send_buf_size(SEND_BUFFER_BYTES);
        builder
    }
}

async fn draining(state: &mut watch::Receiver<State>) {
    // A closed channel means that the daemon is gone, which is as good a reason to end.
    let _drains_or_gone = state.wait_for(|state| *state == State::Draining).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_go_to_the_least_loaded_core() {
        // Scenario: cores with 2, 1 and 1 connections, then all equal. Expectation: one of the emptiest, and of several
        // the one after the last choice.
        let open = [2, 1, 1].map(AtomicUsize::new);
        assert_eq!(least_loaded(&open, 0), 1);
        assert_eq!(least_loaded(&open, 1), 2);
        assert_eq!(least_loaded(&open, 2), 1);
        let equal = [3, 3, 3].map(AtomicUsize::new);
        assert_eq!([0, 1, 2].map(|last| least_loaded(&equal, last)), [1, 2, 0]);
        assert_eq!(least_loaded(&[], 0), 0);
    }
}
