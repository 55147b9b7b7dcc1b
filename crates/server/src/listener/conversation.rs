//! One connection on its core, from its first byte to its last.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpStream;

use super::bodies::Awaited;
use super::coalesce::Coalescing;
use super::ending::{Endings, Verdict};
use super::front::Front;
use super::progress::{Heard, News, Progress};
use super::slots::ConnectionBounds;
use super::socket::Socket;
use super::watch::{Watch, Watching};
use super::{CONNECTION_WINDOW_BYTES, HEADER_LIST_BYTES, Open, STREAM_WINDOW_BYTES};
use crate::caller::Connection;

/// How long one that is silent when the daemon drains may yet speak, to be told instead of reset: a round trip, and a
/// client that is slow to write.
const LAST_WORD: Duration = Duration::from_millis(500);
const SEND_BUFFER_BYTES: usize = 1 << 20;
const HTTP1_BUFFER_BYTES: usize = 64 << 10;

/// How connections of one port are served.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) transport: &'static str,
    pub(super) front: Front,
    pub(super) http2_only: bool,
    pub(super) bounds: ConnectionBounds,
    pub(super) endings: Arc<Endings>,
}

/// What one connection brings along.
#[derive(Debug)]
pub(super) struct Party {
    pub(super) connection: Arc<Connection>,
    pub(super) progress: Arc<Progress>,
    /// Held to the end.
    pub(super) open: Open,
}

/// What a connection that is served comes to next.
enum Next<E> {
    Ended(Result<(), E>),
    News(News),
    /// And drains: it may go.
    OwesNothing,
}

impl Conversation {
    /// Serves one connection until it ends, is told to end, or, while draining, until its requests are answered. Runs on
    /// a core. (A future of its own making: as `async fn` it would have room for each argument twice, and idle connections
    /// cost what this takes.)
    pub(super) fn hold(
        self: Arc<Self>,
        stream: std::net::TcpStream,
        party: Party,
    ) -> impl Future<Output = ()> {
        let caller = party.connection.caller().key();
        let stream = TcpStream::from_std(stream);
        let watch = Watch::new(party.open.number());
        let watched = Watching::start(watch, &party.progress, &self.endings, caller, &self.bounds);
        async move {
            let Ok(stream) = stream else { return };
            // Both whole, so that all of them lives to the end.
            let (party, _watched) = (&party, &watched);
            let progress = &party.progress;
            let mut is_counted = false;
            let mut count = |verdict: Verdict| {
                if !std::mem::replace(&mut is_counted, true) {
                    self.endings.count(verdict.reason(), caller);
                }
            };
            let mut heard = Heard::default();
            // Readable first: a client that has spoken is told to go elsewhere below, where closing would reset it.
            let news = poll_fn(|cx| match stream.poll_read_ready(cx) {
                Poll::Ready(_readable_or_gone) => Poll::Ready(None),
                Poll::Pending => progress.poll_news(cx, &mut heard).map(Some),
            });
            match news.await {
                None => {}
                Some(News::Verdict(verdict)) => return count(verdict),
                // It may have connected just now, and not have come to speak yet.
                Some(News::Drain) => {
                    let speaks = tokio::time::timeout(LAST_WORD, stream.readable());
                    if Box::pin(speaks).await.is_err() {
                        return;
                    }
                    heard = Heard::default();
                }
            }
            let service = {
                let (port, seen) = (Arc::clone(&self), Arc::clone(progress));
                let connection = Arc::clone(&party.connection);
                service_fn(move |request: http::Request<Incoming>| {
                    let exchange = seen.open(request.body().is_end_stream());
                    let answer = port.front.call(request, &connection, &exchange, seen.is_late());
                    Awaited::new(answer, exchange)
                })
            };
            let (stream, drain) = Coalescing::new(
                TokioIo::new(Socket::new(stream, Arc::clone(progress))),
                Arc::clone(progress),
            );
            // Owned and boxed: neither the builder nor the room for both protocols stays with the connection.
            let mut connection = Box::pin(self.protocol().serve_connection(stream, service).into_owned());
            let mut owes_nothing = None;
            let ended = loop {
                let next = {
                    let mut driven = pin!(drain.drive(connection.as_mut()));
                    // The connection first: asked to shut down before it has read anything, it would close without an
                    // answer.
                    let next = poll_fn(|cx| {
                        if let Poll::Ready(ended) = driven.as_mut().poll(cx) {
                            return Poll::Ready(Next::Ended(ended));
                        }
                        if let Poll::Ready(news) = progress.poll_news(cx, &mut heard) {
                            return Poll::Ready(Next::News(news));
                        }
                        poll_if_there(&mut owes_nothing, cx).map(|()| Next::OwesNothing)
                    });
                    next.await
                };
                match next {
                    Next::Ended(ended) => break ended,
                    Next::News(News::Verdict(verdict)) => {
                        count(verdict);
                        if verdict.closes() {
                            return;
                        }
                    }
                    Next::News(News::Drain) => owes_nothing = Some(Box::pin(progress.owes_nothing())),
                    Next::OwesNothing => return,
                }
                connection.as_mut().graceful_shutdown();
            };
            drop(connection);
            if let Err(error) = ended {
                // Mostly clients that went away.
                tracing::debug!(
                    transport = self.transport,
                    error,
                    "connection ended with an error"
                );
            }
            let Some(socket) = drain.into_io() else { return };
            let mut closed = Box::pin(socket.into_inner().close());
            let verdict = poll_fn(|cx| {
                if closed.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(None);
                }
                loop {
                    match progress.poll_news(cx, &mut heard) {
                        Poll::Ready(News::Verdict(verdict)) => return Poll::Ready(Some(verdict)),
                        Poll::Ready(News::Drain) => {}
                        Poll::Pending => return Poll::Pending,
                    }
                }
            });
            if let Some(verdict) = verdict.await {
                count(verdict);
            }
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
            // `watch` has the times of connections, without a timer for each request.
            .header_read_timeout(None)
            // And no `pipeline_flush`: with it hyper copies bodies into its own memory, without a bound.
            .max_buf_size(HTTP1_BUFFER_BYTES);
        builder
            .http2()
            // No pings: each connection would wake its core for them. TCP finds peers that are gone, `watch` those that stop.
            .max_header_list_size(HEADER_LIST_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .adaptive_window(false)
            .max_concurrent_streams(self.bounds.streams())
            .max_send_buf_size(SEND_BUFFER_BYTES);
        builder
    }
}

/// A future that may not be wanted yet; never ready until then.
fn poll_if_there<F: Future + Unpin>(future: &mut Option<F>, cx: &mut Context<'_>) -> Poll<F::Output> {
    future
        .as_mut()
        .map_or(Poll::Pending, |future| Pin::new(future).poll(cx))
}
