//! Serves one connection on its core.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use super::bodies::ResponseOrStall;
use super::close::{CloseCounters, CloseDecision, CloseReason};
use super::coalesce::CoalescingIo;
use super::connection_limits::{ConnectionLimits, ConnectionPermit};
use super::core_turns::{self, InTurn};
use super::dispatch::RequestDispatcher;
use super::progress::{ConnectionEvent, Progress, SeenEvents};
use super::running_time;
use super::socket::Patience;
use super::timeouts::{TimeoutTracker, WatchGuard};
use super::tls_stream::AcceptedStream;
use super::{
    BODIES_WINDOW_BYTES, BODY_WINDOW_BYTES, CorePool, HEADER_LIST_BYTES, MESSAGES_WINDOW_BYTES,
    STREAM_WINDOW_BYTES,
};
use crate::caller::Connection;
use crate::lifecycle::{Lifecycle, State};
use crate::record::{Recorder, within};
use crate::rpc_metrics::RpcMetrics;
use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use prometheus::IntGauge;

/// Time for a silent connection to send a request when the daemon drains, so that it gets a response instead
/// of a reset.
pub(super) const LAST_WORD: Duration = Duration::from_millis(500);
/// What h2 takes of a response before its client can receive it: about a connection's turn. Text of less than 4 KiB, as of
/// a stream's errors, is not charged, and 1 MiB of it took 490 KiB for each FetchStream that nobody read, after 16 KiB of
/// requests.
const SEND_BUFFER_BYTES: usize = 128 << 10;
/// What a connection with a small limit of requests may cancel at once.
const CANCELLED_MAX_LEAST: u32 = 256;
/// hyper keeps a buffer of this size for an idle connection that had a long head.
const HTTP1_BUFFER_BYTES: usize = HEADER_LIST_BYTES as usize;

/// Serves the connections of one port.
#[derive(Debug)]
pub(super) struct PortServer {
    pub(super) transport: &'static str,
    pub(super) dispatcher: RequestDispatcher,
    pub(super) http2_only: bool,
    pub(super) connection_limits: ConnectionLimits,
    pub(super) close_counters: Arc<CloseCounters>,
    /// Records the requests; `None`: nothing is recorded.
    pub(super) recorder: Option<Recorder>,
    pub(super) rpc: RpcMetrics,
    pub(super) cores: Arc<CorePool>,
    /// Counts the open connections.
    pub(super) gauge: IntGauge,
    pub(super) lifecycle: Lifecycle,
}

/// An open connection, counted until dropped.
#[derive(Debug)]
pub(super) struct AcceptedConnection {
    pub(super) connection: Arc<Connection>,
    pub(super) progress: Arc<Progress>,
    /// The core that serves it.
    core: usize,
    permit: ConnectionPermit,
    server: Arc<PortServer>,
}

impl AcceptedConnection {
    pub(super) fn new(
        server: &Arc<PortServer>,
        core: usize,
        connection: Arc<Connection>,
        progress: Arc<Progress>,
        permit: ConnectionPermit,
    ) -> Self {
        if let Some(open) = server.cores.open.get(core) {
            open.fetch_add(1, Ordering::Relaxed);
        }
        server.gauge.inc();
        Self {
            connection,
            progress,
            core,
            permit,
            server: Arc::clone(server),
        }
    }
}

impl Drop for AcceptedConnection {
    fn drop(&mut self) {
        let server = &self.server;
        if let Some(open) = server.cores.open.get(self.core) {
            open.fetch_sub(1, Ordering::Relaxed);
        }
        server.gauge.dec();
    }
}

/// Runs the streams of HTTP/2 connections as local tasks of the core, like connections and shards, in the
/// turn of the request's caller. With `tokio::spawn` they would be in the runtime's own queue, and it polls
/// epoll at every change from one queue to the other: twice per read.
#[derive(Debug, Clone, Copy)]
struct LocalExecutor;

impl<F> hyper::rt::Executor<F> for LocalExecutor
where
    F: Future<Output: 'static> + 'static,
{
    fn execute(&self, stream: F) {
        match core_turns::current() {
            Some(caller) => drop(tokio::task::spawn_local(InTurn::new(caller, stream))),
            None => drop(tokio::task::spawn_local(stream)),
        }
    }
}

/// The next step of a connection.
enum Next<E> {
    Ended(Result<(), E>),
    Event(ConnectionEvent),
    /// It drains, and has no responses to send.
    Drained,
}

impl PortServer {
    /// Has a connection served on its core.
    pub(super) fn hand_over(self: Arc<Self>, stream: AcceptedStream, accepted: AcceptedConnection) {
        let core = accepted.core;
        let server = Arc::clone(&self);
        let serve = move || server.serve_connection(stream, accepted);
        // At the end of a drain cores stop, and with them their late connections.
        if !self.cores.engine.spawn_on(core, serve) && self.lifecycle.state() < State::Draining {
            self.lifecycle.fail(format!("core {core} has stopped"));
        }
    }

    /// Serves a connection until it ends, is closed, or has sent its last response while draining. Runs on a
    /// core. Not an `async fn`, whose future would store each argument twice: its size is what an idle
    /// connection costs.
    pub(super) fn serve_connection(
        self: Arc<Self>,
        stream: AcceptedStream,
        accepted: AcceptedConnection,
    ) -> impl Future<Output = ()> {
        let turns = core_turns::caller(accepted.connection.account());
        let caller = accepted.connection.address();
        let stream = stream.arrive(&accepted.progress);
        let watch = TimeoutTracker::new(accepted.permit.number(), self.cancelled_max());
        let watched = WatchGuard::start(
            watch,
            &accepted.progress,
            &self.close_counters,
            caller,
            &self.connection_limits,
        );
        InTurn::new(turns, async move {
            let Ok(stream) = stream else { return };
            // Captured whole, so that both live until the end.
            let (accepted, _watched) = (&accepted, &watched);
            let progress = &accepted.progress;
            let mut is_counted = false;
            let mut count = |decision: CloseDecision| {
                if !std::mem::replace(&mut is_counted, true) {
                    self.close_counters.count(decision.reason(), caller);
                }
            };
            let mut seen = SeenEvents::default();
            // Readable first: a client that has sent something gets a response below; closing here would
            // reset its connection.
            let event = poll_fn(|cx| match stream.poll_read_ready(cx) {
                Poll::Ready(()) => Poll::Ready(None),
                Poll::Pending => progress.poll_event(cx, &mut seen).map(Some),
            });
            match event.await {
                None => {}
                Some(ConnectionEvent::Close(decision)) => return count(decision),
                // The client may have just connected and not sent its request yet.
                Some(ConnectionEvent::Drain) => {
                    let mut late = Box::pin(running_time::sleep(LAST_WORD));
                    let speaks = poll_fn(|cx| match stream.poll_read_ready(cx) {
                        Poll::Ready(()) => Poll::Ready(true),
                        Poll::Pending => late.as_mut().poll(cx).map(|()| false),
                    });
                    if !speaks.await {
                        return;
                    }
                    seen = SeenEvents::default();
                }
            }
            if self.http2_only && poll_fn(|cx| Poll::Ready(stream.begins_as_http1(cx))).await {
                count(CloseDecision::Close(CloseReason::Protocol));
                let patience = Patience::new(self.connection_limits.timeouts());
                let closed = Box::pin(stream.refuse_http1(patience));
                let _counted = until_closed(closed, progress, &mut seen).await;
                return;
            }
            let service = {
                let (port, progress) = (Arc::clone(&self), Arc::clone(progress));
                let (core, connection) = (accepted.core, Arc::clone(&accepted.connection));
                service_fn(move |request: http::Request<Incoming>| {
                    let recorder = port.recorder.as_ref();
                    let record = recorder.map(|to| to.begin(&request, progress.peer(), port.transport));
                    let exchange = progress.open_recorded(request.body().is_end_stream(), record);
                    if progress.keeps_too_much() {
                        port.connection_limits.reclaim_kept(true);
                    }
                    let is_head = request.method() == http::Method::HEAD;
                    let answer = within(exchange.record(), || {
                        port.dispatcher
                            .call(core, request, &connection, &exchange, &progress)
                    });
                    ResponseOrStall::new(answer, exchange, is_head)
                })
            };
            let (stream, flusher) = CoalescingIo::new(TokioIo::new(stream), Arc::clone(progress));
            // Owned and boxed, so that the connection keeps neither the builder nor space for both protocols.
            let mut connection = Box::pin(self.protocol().serve_connection(stream, service).into_owned());
            let mut drained = None;
            let ended = loop {
                let next = {
                    let mut driven = pin!(flusher.drive(connection.as_mut()));
                    // The connection first: if it shuts down before it has read anything, it closes without a
                    // response.
                    let next = poll_fn(|cx| {
                        if let Poll::Ready(ended) = driven.as_mut().poll(cx) {
                            return Poll::Ready(Next::Ended(ended));
                        }
                        if progress.buffers_too_much() {
                            self.connection_limits.reclaim_kept(true);
                        }
                        if let Poll::Ready(event) = progress.poll_event(cx, &mut seen) {
                            return Poll::Ready(Next::Event(event));
                        }
                        if drained.is_some() {
                            flusher.with_io(|io| io.inner().note_unreceived());
                        }
                        poll_option(&mut drained, cx).map(|()| Next::Drained)
                    });
                    next.await
                };
                match next {
                    Next::Ended(ended) => break ended,
                    Next::Event(ConnectionEvent::Close(decision)) => {
                        count(decision);
                        match decision {
                            CloseDecision::Close(_) => {
                                return flusher.with_io(|io| io.inner_mut().say_goodbye());
                            }
                            CloseDecision::Finish(_) => break Ok(()),
                            CloseDecision::GoAway(_) => {}
                        }
                        // Its next response announces the close: closing without that could race with a
                        // request.
                        if progress.closes_by_response() {
                            continue;
                        }
                    }
                    Next::Event(ConnectionEvent::Drain) => drained = Some(Box::pin(progress.drained())),
                    Next::Drained => break Ok(()),
                }
                connection.as_mut().graceful_shutdown();
            };
            drop(connection);
            if let Err(error) = ended {
                // Mostly clients that disconnected.
                if let Some(reason) = fault_of(error.as_ref()) {
                    count(CloseDecision::Close(reason));
                }
                tracing::debug!(
                    transport = self.transport,
                    error,
                    "connection ended with an error"
                );
            }
            let patience = Patience::new(self.connection_limits.timeouts());
            let closed = Box::pin(async move {
                let socket = flusher.finish().await?;
                socket.into_inner().close(patience).await
            });
            if let Some(decision) = until_closed(closed, progress, &mut seen).await {
                count(decision);
            }
        })
    }

    /// Requests that a client may cancel at once, also before its connection's turn on the core: all that it may have open,
    /// as when their deadlines pass together. h2's 20 ended connections of clients with short deadlines.
    fn cancelled_max(&self) -> usize {
        self.connection_limits.streams().max(CANCELLED_MAX_LEAST) as usize
    }

    /// HTTP/2's windows of a request's body, and of all bodies of a connection.
    pub(super) fn windows(&self) -> (u32, u32) {
        if self.http2_only {
            (STREAM_WINDOW_BYTES, MESSAGES_WINDOW_BYTES)
        } else {
            (BODY_WINDOW_BYTES, BODIES_WINDOW_BYTES)
        }
    }

    fn protocol(&self) -> auto::Builder<LocalExecutor> {
        let mut builder = auto::Builder::new(LocalExecutor);
        if self.http2_only {
            builder = builder.http2_only();
        }
        let (stream_window, connection_window) = self.windows();
        builder
            .http1()
            .keep_alive(true)
            // `timeouts` enforces timeouts, without a timer per request.
            .header_read_timeout(None)
            // No `pipeline_flush`: with it hyper copies bodies into an unbounded buffer.
            .max_buf_size(HTTP1_BUFFER_BYTES);
        builder
            .http2()
            // No pings, which would wake the core for each connection. TCP keepalive finds lost peers,
            // `timeouts` stalled ones.
            .max_header_list_size(HEADER_LIST_BYTES)
            .initial_stream_window_size(stream_window)
            .initial_connection_window_size(connection_window)
            .adaptive_window(false)
            // gRPC has no Date.
            .auto_date_header(!self.http2_only)
            .max_concurrent_streams(self.connection_limits.streams())
            .max_pending_accept_reset_streams(self.cancelled_max())
            // `max_local_error_reset_streams` stays 1,024: as long as a connection lives, it also counts parts of bodies that come
            // after their refusal, and requests beyond a limit that the client has yet to learn.
            .max_send_buf_size(SEND_BUFFER_BYTES);
        builder
    }
}

/// Waits until a socket is closed, or its connection is to be closed at once. Returns why, if that is the client's fault or a
/// decision.
async fn until_closed(
    mut closed: Pin<Box<impl Future<Output = Option<CloseReason>>>>,
    progress: &Progress,
    seen: &mut SeenEvents,
) -> Option<CloseDecision> {
    poll_fn(|cx| {
        if let Poll::Ready(fault) = closed.as_mut().poll(cx) {
            return Poll::Ready(fault.map(CloseDecision::Close));
        }
        loop {
            match progress.poll_event(cx, seen) {
                Poll::Ready(ConnectionEvent::Close(decision)) if decision.closes() => {
                    return Poll::Ready(Some(decision));
                }
                Poll::Ready(ConnectionEvent::Close(_) | ConnectionEvent::Drain) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await
}

/// Why hyper or h2 ended a connection because of what its client sent. A flood: too many resets, or too many frames that
/// wait to be read.
fn fault_of(error: &(dyn std::error::Error + 'static)) -> Option<CloseReason> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|error| {
        if error.downcast_ref().is_some_and(hyper::Error::is_parse) {
            return Some(CloseReason::Protocol);
        }
        let error: &h2::Error = error.downcast_ref()?;
        error.is_library().then(|| match error.reason() {
            Some(h2::Reason::ENHANCE_YOUR_CALM) => CloseReason::Flood,
            Some(_) | None => CloseReason::Protocol,
        })
    })
}

/// Polls a future if there is one.
fn poll_option<F: Future + Unpin>(future: &mut Option<F>, cx: &mut Context<'_>) -> Poll<F::Output> {
    future
        .as_mut()
        .map_or(Poll::Pending, |future| Pin::new(future).poll(cx))
}
