//! Ports: bound before anything else starts; connections are accepted on the main thread and served on the engine's cores.
//!
//! A connection goes to the core with the fewest connections and stays there, so that its reads never cross threads;
//! SO_REUSEPORT's hash could put several on one core. A full port closes an inactive connection for each new one
//! (`connection_table`); `timeouts` closes slow ones. With TLS the handshake comes first, on the main thread (`tls_stream`).

mod bind;
mod bodies;
mod client_frames;
mod close;
mod coalesce;
mod connection_limits;
mod connection_table;
pub(crate) mod core_turns;
mod dispatch;
mod frame_parts;
mod hosts;
mod kept_requests;
mod progress;
mod response_future;
mod running_time;
mod serve;
mod socket;
mod stalls;
mod table_entries;
mod timeouts;
mod tls_stream;
mod wrong_protocol;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpStream as StdTcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use prometheus::{IntCounterVec, IntGaugeVec, Opts};
use ringfetch_engine::dataset::close_cached_objects;
use ringfetch_engine::engine::Engine;
use rustix::io::Errno;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::access::Access;
use crate::caller::{CallerKey, Callers};
use crate::fetch::Fetcher;
use crate::lifecycle::{Lifecycle, State};
use crate::record::Recorder;
use crate::rpc_metrics::RpcMetrics;
use crate::telemetry::LogLimiter;
use crate::tls::Tls;

use close::{CloseCounters, CloseReason};
use connection_limits::PortConnections;
use connection_table::PortFull;
use dispatch::{RefusalCounters, RequestDispatcher};
use progress::Progress;
use serve::{AcceptedConnection, PortServer};
use tls_stream::{AcceptedStream, Handshakes};

pub use bind::{Addresses, BindError, BoundSocket, bind};
pub use bodies::{AnswerBody, RequestBody};
pub use connection_limits::ConnectionLimits;
pub(crate) use core_turns::note_refusal;
pub use dispatch::FastPath;
pub(crate) use dispatch::TextBytes;
pub use frame_parts::FrameParts;
pub use hosts::AllowedHosts;
pub use response_future::ResponseFuture;
pub(crate) use response_future::cleared;
pub use wrong_protocol::WrongProtocol;

/// TCP keepalive: idle time before the first probe.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// Interval and number of probes until the peer is considered gone.
const TCP_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const TCP_KEEPALIVE_PROBES: u32 = 3;
/// HTTP/2 windows for requests, which bound the memory of unread requests: per body on HTTP, and of all
/// bodies of a connection. Clients choose the windows for responses.
const BODY_WINDOW_BYTES: u32 = 64 << 10;
const BODIES_WINDOW_BYTES: u32 = 256 << 10;
/// The same for gRPC, whose clients send a frame for each message of a stream. h2 closes a connection
/// (`too_many_data_frames`) when unread frames fall short of 256 bytes each by more than half the
/// connection's window in total, so a stream's window must fill up before that. 745 frames of 22 bytes fill
/// one and fall short by 174,330 bytes; half the connection's window, 1 MiB, allows six such streams.
const STREAM_WINDOW_BYTES: u32 = 16 << 10;
const MESSAGES_WINDOW_BYTES: u32 = 2 << 20;
/// Longest list of headers, decoded (RFC 9113 6.5.2). h2 answers up to four times that with 431, since it has to decode it to keep the
/// compression's state, and ends the connection beyond; `client_frames` does above twice that as sent.
const HEADER_LIST_BYTES: u32 = 16 << 10;
/// Pause after an `accept` that failed for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The engine's cores, with the number of connections on each. Shared by all ports.
#[derive(Debug)]
pub struct CorePool {
    engine: Engine,
    callers: Callers,
    open: Box<[AtomicUsize]>,
    gauge: IntGaugeVec,
    closed: IntCounterVec,
    refused: IntCounterVec,
}

impl CorePool {
    /// All of an engine's cores.
    ///
    /// # Errors
    /// The metric's name is already registered.
    pub fn new(fetcher: &Fetcher, registry: &prometheus::Registry) -> Result<Arc<Self>, prometheus::Error> {
        let engine = fetcher.engine().clone();
        let gauge = IntGaugeVec::new(
            Opts::new("ringfetch_connections", "Open connections."),
            &["transport"],
        )?;
        registry.register(Box::new(gauge.clone()))?;
        let closed = close::metric(registry)?;
        let open = (0..engine.core_count()).map(|_| AtomicUsize::new(0)).collect();
        Ok(Arc::new(Self {
            engine,
            callers: fetcher.callers().clone(),
            open,
            gauge,
            closed,
            refused: fetcher.refused_before_routing().clone(),
        }))
    }
}

/// The core with the fewest connections; if there are several, the first after `last`, so that successive
/// connections are spread.
fn least_loaded(open: &[AtomicUsize], last: usize) -> usize {
    let count = open.len().max(1);
    let after_last = (1..=count).map(|step| (last + step) % count);
    after_last
        .min_by_key(|core| open.get(*core).map_or(0, |open| open.load(Ordering::Relaxed)))
        .unwrap_or(0)
}

/// The configuration of a port.
#[derive(Debug)]
pub struct Port {
    /// `grpc`, `http` or `admin`, in logs and metrics.
    pub transport: &'static str,
    /// Its bound socket.
    pub bound: BoundSocket,
    /// Whether only HTTP/2 is accepted (gRPC), or HTTP/1.1 too.
    pub http2_only: bool,
    /// The service; each request gets a clone.
    pub router: Router,
    /// Serves some requests instead of the router.
    pub fast_path: Option<Arc<dyn FastPath>>,
    /// Accepted host names, if browsers can reach the port; `None`: any.
    pub hosts: Option<AllowedHosts>,
    /// TLS, unless it is plain text.
    pub tls: Option<Tls>,
    /// Access control; `None`: clients are not distinguished.
    pub access: Option<Access>,
    /// Its purpose.
    pub role: Role,
    /// Records its requests.
    pub recorder: Option<Recorder>,
    /// Counts its requests: the metrics of `router` and `fast_path`.
    pub rpc: RpcMetrics,
}

/// The purpose of a port, which decides when it closes.
#[derive(Debug, Clone, Copy)]
pub enum Role {
    /// Data. Closed when a drain begins.
    Data,
    /// Data, and endpoints for operators and orchestrators. When a drain begins its connections shut down
    /// gracefully. New ones are accepted until the end of the drain, and served only the paths for which this
    /// function returns true.
    DataAndProbes(fn(&str) -> bool),
    /// gRPC calls by operators. Open until the end of a drain.
    Control,
}

/// A port that clients can connect to.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    server: Arc<PortServer>,
    connections: Arc<PortConnections>,
    handshakes: Option<Arc<Handshakes>>,
}

impl Listener {
    /// Starts listening and logs the address. Must be called inside a tokio runtime; [`Listener::serve`] accepts.
    ///
    /// # Errors
    /// Another process listens there.
    pub fn open_port(
        port: Port,
        cores: &Arc<CorePool>,
        connection_limits: &ConnectionLimits,
        lifecycle: &Lifecycle,
    ) -> Result<Self, BindError> {
        let Port {
            transport,
            bound,
            http2_only,
            router,
            fast_path,
            hosts,
            tls,
            access,
            role,
            recorder,
            rpc,
        } = port;
        let fast_paths = fast_path.iter();
        let fast_paths = fast_paths
            .flat_map(|path| cores.open.iter().map(|_| path.for_core()))
            .collect();
        let address = bound.address();
        let tcp = bound.listen()?;
        let connections = connection_limits.add_port();
        tokio::spawn(announce_state(Arc::clone(&connections), lifecycle.clone()));
        tracing::info!(transport, %address, tls = tls.is_some(), "listening");
        if access.is_some() && tls.is_none() && !address.ip().to_canonical().is_loopback() {
            tracing::warn!(transport, "tokens reach this port in plain text");
        }
        Ok(Self {
            tcp,
            server: Arc::new(PortServer {
                transport,
                dispatcher: RequestDispatcher {
                    router,
                    fast_paths,
                    hosts,
                    role,
                    access,
                    refusals: RefusalCounters::new(&cores.refused, transport),
                },
                http2_only,
                connection_limits: connection_limits.clone(),
                close_counters: CloseCounters::new(&cores.closed, transport),
                recorder,
                rpc,
                cores: Arc::clone(cores),
                gauge: cores.gauge.with_label_values(&[transport]),
                lifecycle: lifecycle.clone(),
            }),
            connections,
            handshakes: tls.map(|tls| Arc::new(Handshakes::new(tls, transport))),
        })
    }

    /// Accepts until the daemon drains. Then a port for data closes; others accept until the returned value is closed or
    /// dropped.
    ///
    /// # Cancel safety
    /// Dropping the future closes the port; connections continue.
    pub async fn serve(self) -> DrainingPort {
        tokio::select! {
            () = self.server.lifecycle.draining() => {}
            () = self.accept(false) => {}
        }
        let connections = Arc::clone(&self.connections);
        let late = match self.server.dispatcher.role {
            Role::Data => {
                self.accept_backlog(false);
                None
            }
            Role::DataAndProbes(_) | Role::Control => {
                // They connected before the drain, which therefore waits for them.
                self.accept_waiting(false);
                let (until, dropped) = oneshot::channel::<Infallible>();
                let accepting = tokio::spawn(async move {
                    tokio::select! {
                        _told_or_dropped = dropped => {}
                        () = self.accept(true) => {}
                    }
                    self.accept_backlog(true);
                });
                Some((until, accepting))
            }
        };
        DrainingPort { connections, late }
    }

    /// Accepts the connections in the backlog, as far as there is room, before the port is closed: that would reset them,
    /// but they should learn that the daemon drains.
    fn accept_backlog(&self, is_late: bool) {
        bind::refuse_handshakes(&self.tcp);
        self.accept_waiting(is_late);
    }

    /// Accepts the connections that wait, as far as there is room.
    fn accept_waiting(&self, is_late: bool) {
        let mut last = 0;
        while self.connections.open() < self.server.connection_limits.connections_max() {
            // Asks the kernel directly: tokio knows only the readiness that it polled last.
            let Ok((socket, peer)) = SockRef::from(&self.tcp).accept() else {
                return;
            };
            let stream = StdTcpStream::from(socket);
            let ready = stream.set_nonblocking(true).and_then(|()| set_options(&stream));
            if ready.is_err() {
                continue;
            }
            last = least_loaded(&self.server.cores.open, last);
            let peer = peer
                .as_socket()
                .map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip());
            self.hand_over(stream, peer, last, is_late);
        }
    }

    async fn accept(&self, is_late: bool) {
        let failing = LogLimiter::default();
        let mut last = 0;
        loop {
            self.connections.few_closing().await;
            let (stream, peer) = match self.tcp.accept().await {
                Ok(accepted) => accepted,
                Err(error) if is_of_one_connection(&error) => continue,
                Err(error) => {
                    if failing.due().is_some() {
                        let transport = self.server.transport;
                        tracing::warn!(transport, %error, "cannot accept connections; is the limit of open files too low?");
                    }
                    // Frees descriptors for the next connections: open files are reopened, clients reconnect.
                    if !close_cached_objects() {
                        self.connections.evict();
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            // Fails if the connection is already gone.
            let Ok(stream) = prepare(stream) else { continue };
            last = least_loaded(&self.server.cores.open, last);
            self.hand_over(stream, peer.ip(), last, is_late);
        }
    }

    fn hand_over(&self, stream: StdTcpStream, peer: IpAddr, core: usize, is_late: bool) {
        let server = Arc::clone(&self.server);
        let limits = &server.connection_limits;
        // A drain does not wait for operators' connections.
        let is_late = is_late || matches!(server.dispatcher.role, Role::Control);
        let progress = Arc::new(Progress::of_connection(
            peer,
            is_late,
            server.windows().0,
            self.handshakes.is_some(),
            server.rpc.clone(),
            limits.kept(),
        ));
        let caller = CallerKey::of(peer);
        let permit = match self.connections.take(caller, &progress, limits.connections_max()) {
            Ok(permit) => permit,
            Err(PortFull) => return server.close_counters.count(CloseReason::Refused, caller),
        };
        // It is in the table by now, so that it sees every later change of state.
        progress.set_state(server.lifecycle.state());
        let connection = server.cores.callers.connect(peer, limits.connection_bytes());
        let accepted = AcceptedConnection::new(&server, core, connection, progress, permit);
        match &self.handshakes {
            None => server.hand_over(AcceptedStream::Plain(stream), accepted),
            Some(handshakes) => {
                let handshakes = Arc::clone(handshakes);
                tokio::spawn(async move {
                    if let Some(stream) = handshakes.shake(stream, &accepted, &server).await {
                        server.hand_over(stream, accepted);
                    }
                });
            }
        }
    }
}

/// A port of a draining daemon: its open connections, and the port itself if it stays open. Closed when dropped.
#[derive(Debug)]
pub struct DrainingPort {
    connections: Arc<PortConnections>,
    /// It accepts until the former is dropped.
    late: Option<(oneshot::Sender<Infallible>, JoinHandle<()>)>,
}

impl DrainingPort {
    /// Resolves once all connections opened before the drain are closed, except operators'.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn closed(&self) {
        self.connections
            .until(|connections| connections.awaited() == 0)
            .await;
    }

    /// How many of those connections have a client that has not received all of its answers. Others are only waiting for
    /// their client to close, or have sent nothing.
    pub fn unanswered(&self) -> usize {
        self.connections.unanswered()
    }

    /// Accepts the backlog and closes the port; resolves once no connection is open.
    ///
    /// # Cancel safety
    /// Dropping the future closes the port; connections continue.
    pub async fn all_closed(self) {
        if let Some((until, accepting)) = self.late {
            drop(until);
            // It is not aborted, and returns nothing.
            let _port_is_closed = accepting.await;
        }
        self.connections
            .until(|connections| connections.open() == 0)
            .await;
    }
}

/// Passes the daemon's state to the connections of a port, until the end.
async fn announce_state(connections: Arc<PortConnections>, lifecycle: Lifecycle) {
    for state in [State::LameDuck, State::Draining, State::Ended] {
        lifecycle.reached(state).await;
        connections.set_state(state);
    }
}

/// Errors of accept(2) that concern only one connection: Linux reports those of its network, too.
fn is_of_one_connection(error: &io::Error) -> bool {
    #[rustfmt::skip]
    const OF_ONE: [Errno; 12] = [
        Errno::CONNABORTED, Errno::CONNREFUSED, Errno::CONNRESET, Errno::INTR, Errno::PROTO, Errno::NOPROTOOPT,
        Errno::OPNOTSUPP, Errno::NETDOWN, Errno::NETUNREACH, Errno::HOSTDOWN, Errno::HOSTUNREACH, Errno::NONET,
    ];
    Errno::from_io_error(error).is_some_and(|errno| OF_ONE.contains(&errno))
}

/// Removes a connection from this thread's runtime and sets its options.
fn prepare(stream: TcpStream) -> io::Result<StdTcpStream> {
    let stream = stream.into_std()?;
    set_options(&stream)?;
    Ok(stream)
}

fn set_options(stream: &StdTcpStream) -> io::Result<()> {
    // A response must not wait for the acknowledgement of the previous one.
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(TCP_KEEPALIVE)
        .with_interval(TCP_KEEPALIVE_INTERVAL)
        .with_retries(TCP_KEEPALIVE_PROBES);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use futures_util::FutureExt as _;
    use ringfetch_engine::config::{BackendKind, EngineConfig};

    #[tokio::test]
    async fn who_waits_to_be_accepted_when_a_drain_begins_is_waited_for() {
        // Scenario: a client has connected and is not accepted yet when the drain begins, on a port that stays open for probes.
        // Expectation: the drain waits for it, until it has been silent for a while.
        let config = EngineConfig {
            backend: BackendKind::Mmap,
            cores: 1,
            pin: false,
            ..EngineConfig::default()
        };
        let engine = std::thread::spawn(move || Engine::start(&config).expect("an engine"));
        let engine = engine.join().expect("no panic");
        let (limits, lifecycle) = (Limits::default(), Lifecycle::new());
        let fetcher = Fetcher::new(engine.clone(), Vec::new(), limits);
        let registry = prometheus::Registry::new();
        let bound = bind("listen", "127.0.0.1:0".parse().expect("an address")).expect("a port");
        let address = bound.address();
        let port = Port {
            transport: "http",
            bound,
            http2_only: false,
            router: Router::new(),
            fast_path: None,
            hosts: None,
            tls: None,
            access: None,
            role: Role::DataAndProbes(|_| true),
            recorder: None,
            rpc: RpcMetrics::new(&registry).expect("metrics"),
        };
        let cores = CorePool::new(&fetcher, &registry).expect("cores");
        let connection_limits = ConnectionLimits::new(&limits, engine.config().connection_bytes);
        let listener = Listener::open_port(port, &cores, &connection_limits, &lifecycle);
        let listener = listener.expect("a listener");
        let _client = std::net::TcpStream::connect(address).expect("a connection");
        lifecycle.start_draining();
        let port = listener.serve().await;
        assert!(port.closed().now_or_never().is_none());
        let closed = tokio::time::timeout(Duration::from_secs(60), port.closed()).await;
        closed.expect("the silent connection is closed");
    }

    #[test]
    fn errors_of_a_connection_that_is_accepted_are_no_lack_of_descriptors() {
        // Scenario: the errors of accept(2) that a new connection may have, and those of a process or host. Expectation: only for
        // the latter are others closed.
        for errno in [
            Errno::CONNABORTED,
            Errno::PROTO,
            Errno::HOSTUNREACH,
            Errno::NETDOWN,
        ] {
            assert!(is_of_one_connection(&errno.into()), "{errno}");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM] {
            assert!(!is_of_one_connection(&errno.into()), "{errno}");
        }
    }

    #[test]
    fn connections_go_to_the_least_loaded_core() {
        // Scenario: cores with 2, 1 and 1 connections, then all equal. Expectation: one of the emptiest; if
        // there are several, the first after the last choice.
        let open = [2, 1, 1].map(AtomicUsize::new);
        assert_eq!(least_loaded(&open, 0), 1);
        assert_eq!(least_loaded(&open, 1), 2);
        assert_eq!(least_loaded(&open, 2), 1);
        let equal = [3, 3, 3].map(AtomicUsize::new);
        assert_eq!([0, 1, 2].map(|last| least_loaded(&equal, last)), [1, 2, 0]);
        assert_eq!(least_loaded(&[], 0), 0);
    }
}
