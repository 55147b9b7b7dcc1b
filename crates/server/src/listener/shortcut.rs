//! The way past the router, for the few requests that come by the ten thousand.
//!
//! Finding a route, cutting out its parameters and going through its layers cost a fifth of a small answer (ADR 0012).
//! What a shortcut takes must be answered just as the router would; it takes only what it can tell from the request's
//! head at a glance and leaves everything else. Deliberately absent: any knowledge of paths.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::routing::future::RouteFuture;
use http::{HeaderValue, Request, Response, header};
use http_body::Body as _;
use hyper::body::Incoming;
use tower::Service as _;

use crate::caller::Connection;

/// An answer on its way.
pub type Answer = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// Answers some requests in the router's place.
pub trait Shortcut: std::fmt::Debug + Send + Sync {
    /// Whether it answers this request.
    fn takes(&self, request: &Request<Incoming>) -> bool;

    /// Answers a request that it takes.
    fn answer(&self, request: Request<Incoming>, connection: &Arc<Connection>) -> Answer;
}

/// Everything that answers requests on one port: the shortcut if there is one and it takes the request, else the router.
#[derive(Debug, Clone)]
pub(super) struct Front {
    pub(super) router: Router,
    pub(super) shortcut: Option<Arc<dyn Shortcut>>,
}

/// One of the two ways.
pub(super) enum Answering {
    Short(Answer),
    /// Boxed, so that the short way carries no room for it.
    Routed(Box<RouteFuture<Infallible>>),
}

impl Front {
    pub(super) fn call(&self, mut request: Request<Incoming>, connection: &Arc<Connection>) -> Answering {
        match &self.shortcut {
            Some(shortcut) if shortcut.takes(&request) => {
                Answering::Short(shortcut.answer(request, connection))
            }
            Some(_) | None => {
                request.extensions_mut().insert(connection.clone());
                // A router is always ready.
                Answering::Routed(Box::new(self.router.clone().call(request)))
            }
        }
    }
}

impl Future for Answering {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Short(answer) => answer.as_mut().poll(cx).map(|response| Ok(with_length(response))),
            Self::Routed(answer) => Pin::new(answer).poll(cx),
        }
    }
}

/// Says how long the body is where that is known, as the router does.
fn with_length(mut response: Response<Body>) -> Response<Body> {
    if let Some(length) = response.body().size_hint().exact() {
        response
            .headers_mut()
            .entry(header::CONTENT_LENGTH)
            .or_insert_with(|| HeaderValue::from(length));
    }
    response
}
