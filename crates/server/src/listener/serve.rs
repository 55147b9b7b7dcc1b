//! Serves one connection on its core.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpStream;
use tokio::sync::watch::Receiver;

use super::bodies::ResponseOrStall;
use super::close::{CloseCounters, CloseDecision};
use super::coalesce::CoalescingIo;
use super::connection_limits::ConnectionLimits;
use super::dispatch::RequestDispatcher;
use super::progress::Progress;
use super::timeouts::{TimeoutTracker, WatchGuard};
use super::{CONNECTION_WINDOW_BYTES, HEADER_LIST_BYTES, STREAM_WINDOW_BYTES, lingering};
use crate::caller::Connection;
use crate::lifecycle::State;

/// Time for a silent connection to send a request when the daemon drains, so that it gets a response and not a reset.
const LAST_WORD: Duration = Duration::from_millis(500);
const SEND_BUFFER_BYTES: usize = 1 << 20;
const HTTP1_BUFFER_BYTES: usize = 64 << 10;

/// Serves the connections of one port.
#[derive(Debug)]
pub(super) struct PortServer {
    pub(super) transport: &'static str,
    pub(super) dispatcher: RequestDispatcher,
    pub(super) http2_only: bool,
    pub(super) connection_limits: ConnectionLimits,
    pub(super) close_counters: Arc<CloseCounters>,
}

/// An accepted connection.
#[derive(Debug)]
pub(super) struct AcceptedConnection {
    pub(super) connection: Arc<Connection>,
    pub(super) progress: Arc<Progress>,
    /// Unique within the port.
    pub(super) number: u64,
    /// A drain does not wait for it.
    pub(super) is_late: bool,
    pub(super) state: Receiver<State>,
}

impl PortServer {
    /// Serves a connection until it ends, is closed, or, while draining, its requests are answered. Runs on a core.
    pub(super) async fn serve_connection(
        self: Arc<Self>,
        stream: std::net::TcpStream,
        accepted: AcceptedConnection,
    ) {
        let Ok(stream) = TcpStream::from_std(stream) else {
            return;
        };
        let caller = accepted.connection.caller().key();
        let _watched = WatchGuard::start(
            TimeoutTracker::new(accepted.number),
            &accepted.progress,
            &self.close_counters,
            caller,
            &self.connection_limits,
        );
        let count = |decision: CloseDecision| self.close_counters.count(decision.reason(), caller);
        if let Some(decision) = self.run(stream, accepted, &count).await {
            count(decision);
        }
    }

    /// As [`Self::serve_connection`]; returns the decision to close the connection, if it is not counted yet.
    async fn run(
        self: &Arc<Self>,
        stream: TcpStream,
        accepted: AcceptedConnection,
        count: &impl Fn(CloseDecision),
    ) -> Option<CloseDecision> {
        let AcceptedConnection {
            connection,
            progress,
            is_late,
            mut state,
            ..
        } = accepted;
        let last = if is_late { State::Ended } else { State::Draining };
        // Readable first: a client that has sent something gets a response below; closing here would reset it.
        tokio::select! {
            biased;
            _readable_or_gone = stream.readable() => {}
            decision = progress.decided(None) => return Some(decision),
            () = reached(&mut state, last) => {
                // It may have connected just now and not sent its request yet.
                if tokio::time::timeout(LAST_WORD, stream.readable()).await.is_err() {
                    return None;
                }
            }
        }
        let (port, seen) = (Arc::clone(self), Arc::clone(&progress));
        let service = service_fn(move |request: http::Request<Incoming>| {
            let exchange = seen.open(request.body().is_end_stream());
            let answer = port.dispatcher.call(request, &connection, &exchange, is_late);
            ResponseOrStall::new(answer, exchange)
        });
        let builder = self.protocol();
        let (stream, lingering_close) = lingering::with_lingering_close(stream, Arc::clone(&progress));
        let (mut known, mut drains) = (None, false);
        let ended = {
            let (stream, flusher) = CoalescingIo::new(TokioIo::new(stream), Arc::clone(&progress));
            let mut connection = pin!(builder.serve_connection(stream, service));
            loop {
                // The connection first: if it shuts down before it has read anything, it closes without a response.
                tokio::select! {
                    biased;
                    ended = flusher.drive(connection.as_mut()) => break ended,
                    decision = progress.decided(known) => {
                        if decision.closes() {
                            return Some(decision).filter(|_| known.is_none());
                        }
                        count(decision);
                        known = Some(decision);
                        connection.as_mut().graceful_shutdown();
                    }
                    () = reached(&mut state, last), if !drains => {
                        drains = true;
                        connection.as_mut().graceful_shutdown();
                    }
                    () = progress.owes_nothing(), if drains => return None,
                }
            }
        };
        if let Err(error) = ended {
            // Mostly clients that went away.
            tracing::debug!(
                transport = self.transport,
                error,
                "connection ended with an error"
            );
        }
        tokio::select! {
            () = lingering_close.close() => None,
            decision = progress.decided(known) => Some(decision).filter(|_| known.is_none()),
        }
    }

    fn protocol(&self) -> auto::Builder<TokioExecutor> {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        if self.http2_only {
            builder = builder.http2_only();
        }
        builder
            .http1()
            .keep_alive(true)
            // `timeouts` enforces the times of connections, without a timer for each request.
            .header_read_timeout(None)
            // No `pipeline_flush`: with it hyper copies bodies into an unbounded buffer.
            .max_buf_size(HTTP1_BUFFER_BYTES);
        builder
            .http2()
            // No pings, which would wake the core for each connection. TCP keepalive finds lost peers, `timeouts` stalled ones.
            .max_header_list_size(HEADER_LIST_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .adaptive_window(false)
            .max_concurrent_streams(self.connection_limits.streams())
            .max_send_buf_size(SEND_BUFFER_BYTES);
        builder
    }
}

async fn reached(state: &mut Receiver<State>, least: State) {
    // A closed channel means that the daemon has ended.
    let _reached_or_gone = state.wait_for(|state| *state >= least).await;
}
