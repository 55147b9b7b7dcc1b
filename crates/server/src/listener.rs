//! Ports: bound before anything else starts, accepted on the main thread, served on the engine's cores.
//!
//! Each connection goes to the core with the fewest open ones and stays there, so that its reads never cross threads;
//! SO_REUSEPORT's hash would pile a few connections on one core. A port that is full closes a connection that does nothing
//! for each newcomer (`places`); how long clients are waited for is `watch`'s. Deliberately absent: TLS, and what the
//! requests mean.

mod bodies;
mod bound;
mod coalesce;
mod conversation;
mod ending;
mod front;
mod hosts;
mod places;
mod progress;
mod slots;
mod socket;
mod watch;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpStream as StdTcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use prometheus::{IntCounterVec, IntGauge, IntGaugeVec, Opts};
use ringfetch_engine::engine::Engine;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::caller::{CallerKey, Callers};
use crate::lifecycle::{Lifecycle, State};

use conversation::{Conversation, Party};
use ending::{Endings, Reason};
use front::{Front, Refusals};
use places::Full;
use progress::Progress;
use slots::{Slot, Slots};

pub use bodies::ReceivedBody;
pub use bound::{Addresses, BindError, Bound, bind};
pub use front::{Answer, Shortcut};
pub use hosts::Hosts;
pub use slots::ConnectionBounds;

/// An idle connection's peer is asked whether it lives after this long.
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// And then this often and so many times, until it is taken for gone.
const TCP_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const TCP_KEEPALIVE_PROBES: u32 = 3;
/// Windows for what clients send: what a connection can make the daemon hold before anybody takes it up. Requests are
/// small; the windows for answers are the clients' own.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 256 << 10;
/// Longest list of headers, decoded (RFC 9113 6.5.2).
const HEADER_LIST_BYTES: u32 = 16 << 10;
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
    closed: IntCounterVec,
    refused: IntCounterVec,
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
        let (closed, refused) = (ending::metric(registry)?, front::metric(registry)?);
        let open = (0..engine.core_count()).map(|_| AtomicUsize::new(0)).collect();
        Ok(Arc::new(Self {
            engine,
            callers,
            open,
            gauge,
            closed,
            refused,
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
    /// By which names it may be addressed, where browsers could ask under others; none: by any.
    pub hosts: Option<Hosts>,
    /// What it is there for.
    pub role: Role,
}

/// What a port is there for, which says when it closes.
#[derive(Debug, Clone, Copy)]
pub enum Role {
    /// Data. Closed when a drain begins.
    Data,
    /// Data, and what operators and orchestrators ask. When a drain begins its connections are told to end; further ones
    /// get an answer to the paths for which this holds, until the end of the drain.
    DataAndProbes(fn(&str) -> bool),
    /// Only calls of gRPC, by operators. Open until the end of a drain.
    Control,
}

/// A port that clients can connect to.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    conversation: Arc<Conversation>,
    cores: Arc<Cores>,
    lifecycle: Lifecycle,
    slots: Arc<Slots>,
    gauge: IntGauge,
    role: Role,
}

/// An open connection, counted until dropped.
#[derive(Debug)]
struct Open {
    cores: Arc<Cores>,
    core: usize,
    gauge: IntGauge,
    slot: Slot,
}

impl Open {
    /// Tells the connection from others of its port.
    fn number(&self) -> u64 {
        self.slot.number()
    }

    fn new(cores: Arc<Cores>, core: usize, gauge: IntGauge, slot: Slot) -> Self {
        if let Some(open) = cores.open.get(core) {
            open.fetch_add(1, Ordering::Relaxed);
        }
        gauge.inc();
        Self {
            cores,
            core,
            gauge,
            slot,
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
            hosts,
            role,
        } = port;
        let address = bound.address();
        let tcp = bound.listen()?;
        let slots = bounds.slots();
        tokio::spawn(tell(Arc::clone(&slots), lifecycle.clone()));
        tracing::info!(transport, %address, "listening");
        Ok(Self {
            tcp,
            conversation: Arc::new(Conversation {
                transport,
                front: Front {
                    router,
                    shortcut,
                    hosts,
                    role,
                    refusals: Refusals::new(&cores.refused, transport),
                },
                http2_only,
                bounds: bounds.clone(),
                endings: Endings::new(&cores.closed, transport),
            }),
            cores: Arc::clone(cores),
            lifecycle: lifecycle.clone(),
            slots,
            gauge: cores.gauge.with_label_values(&[transport]),
            role,
        })
    }

    /// Accepts until the daemon drains. Then a port for data alone closes; others go on until what this answers with is
    /// told to close, or dropped.
    ///
    /// # Cancel safety
    /// Dropping the future closes the port; connections go on.
    pub async fn serve(self) -> Remaining {
        tokio::select! {
            () = self.lifecycle.draining() => {}
            () = self.accept(false) => {}
        }
        let slots = Arc::clone(&self.slots);
        let late = match self.role {
            Role::Data => {
                self.accept_who_knocked(false);
                None
            }
            Role::DataAndProbes(_) | Role::Control => {
                let (until, dropped) = oneshot::channel::<Infallible>();
                let accepting = tokio::spawn(async move {
                    tokio::select! {
                        _told_or_dropped = dropped => {}
                        () = self.accept(true) => {}
                    }
                    self.accept_who_knocked(true);
                });
                Some(Late { until, accepting })
            }
        };
        Remaining { slots, late }
    }

    /// Takes the connections that the kernel has completed already, as far as there is room: closing the port would reset
    /// them, and they are to be told like all others that the daemon drains.
    fn accept_who_knocked(&self, is_late: bool) {
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
            self.hand_over(stream, peer, last, is_late);
        }
    }

    async fn accept(&self, is_late: bool) {
        let mut failing = Complaint::default();
        let mut last = 0;
        loop {
            self.slots.few_closing().await;
            let (stream, peer) = match self.tcp.accept().await {
                Ok(accepted) => accepted,
                Err(error) if is_of_one_connection(&error) => continue,
                Err(error) => {
                    if failing.is_due() {
                        let transport = self.conversation.transport;
                        tracing::warn!(transport, %error, "accepting fails; is the limit of open files too low?");
                    }
                    // Its descriptor is what the next one needs.
                    self.slots.evict();
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            // A connection that is gone already fails here, and is nobody's loss.
            let Ok(stream) = prepare(stream) else { continue };
            last = least_loaded(&self.cores.open, last);
            self.hand_over(stream, peer.ip(), last, is_late);
        }
    }

    fn hand_over(&self, stream: StdTcpStream, peer: IpAddr, core: usize, is_late: bool) {
        let (bounds, endings) = (&self.conversation.bounds, &self.conversation.endings);
        // Nobody waits for operators' own connections when everything else is answered.
        let progress = Arc::new(Progress::new(is_late || matches!(self.role, Role::Control)));
        let caller = CallerKey::of(peer);
        let slot = match self.slots.take(caller, &progress, bounds.connections()) {
            Ok(slot) => slot,
            Err(Full) => return endings.count(Reason::Refused, caller),
        };
        // It has its place: what changes from now on it is told.
        progress.follow(self.lifecycle.state());
        let party = Party {
            connection: self.cores.callers.connect(peer, bounds.connection_bytes()),
            progress,
            open: Open::new(Arc::clone(&self.cores), core, self.gauge.clone(), slot),
        };
        let conversation = Arc::clone(&self.conversation);
        let alive = self
            .cores
            .engine
            .spawn_on(core, move || conversation.hold(stream, party));
        // Cores end at the end of a drain, and late connections with them.
        if !alive && self.lifecycle.state() < State::Draining {
            self.lifecycle.fail(format!("core {core} has stopped"));
        }
    }
}

/// A port while the daemon drains: its open connections, and the port itself if it stays open. Closed when dropped.
#[derive(Debug)]
pub struct Remaining {
    slots: Arc<Slots>,
    late: Option<Late>,
}

/// A port that accepts until this is dropped.
#[derive(Debug)]
struct Late {
    until: oneshot::Sender<Infallible>,
    accepting: JoinHandle<()>,
}

impl Remaining {
    /// Resolves once none is open that was there before the drain, operators' own left out.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn closed(&self) {
        self.slots.until(|slots| slots.awaited() == 0).await;
    }

    /// How many of those are open.
    pub fn open(&self) -> usize {
        self.slots.awaited()
    }

    /// Closes the port, after who has knocked until now was let in; resolves once no connection is open at all.
    ///
    /// # Cancel safety
    /// Dropping the future closes the port; connections go on.
    pub async fn all_closed(self) {
        if let Some(Late { until, accepting }) = self.late {
            drop(until);
            // It cannot be cut off, and has nothing to say.
            let _port_is_closed = accepting.await;
        }
        self.slots.until(|slots| slots.open() == 0).await;
    }
}

/// Tells a port's connections what the daemon does, until it ends.
async fn tell(slots: Arc<Slots>, lifecycle: Lifecycle) {
    for state in [State::Draining, State::Ended] {
        lifecycle.reached(state).await;
        slots.tell(state);
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
    let keepalive = TcpKeepalive::new()
        .with_time(TCP_KEEPALIVE)
        .with_interval(TCP_KEEPALIVE_INTERVAL)
        .with_retries(TCP_KEEPALIVE_PROBES);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
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
