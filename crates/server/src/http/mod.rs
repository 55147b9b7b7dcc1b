//! The HTTP mirror of the API, and what operators read: the page at `/` with its figures (`/v1/status`), `/metrics`,
//! `/livez`, `/readyz`, `/openapi.json`.
//!
//! Every request passes one outermost layer that counts it and writes problem details; inside it each operation has one
//! resource (`routes`). Bytes reach the body as slices of the response memory. Deliberately absent: compression,
//! authentication, timeouts of a connection (the listener's), and any cache.

mod batch;
mod batch_answer;
mod batch_request;
mod bounded_list;
mod conditional;
mod datasets;
mod items;
mod multipart;
mod negotiate;
mod objects;
mod openapi;
mod page;
mod probes;
mod problem;
mod range;
mod representation;
mod routes;
mod shortcut;
mod status;

use crate::caller::Connection;
use crate::door::Fetcher;
use crate::figures::Figures;
use crate::lifecycle::Lifecycle;
use crate::rpc_metrics::{HttpRoute, RpcMetrics};
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Instant;

pub(crate) use problem::refusal;
pub use shortcut::shortcut;

/// What the operations work with.
#[derive(Debug)]
struct App {
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    registry: prometheus::Registry,
    document: Bytes,
    page: page::Page,
    figures: status::Latest,
}

/// The HTTP service: made once, cloned for each connection. Requests should carry their
/// [`Connection`] among their extensions; without one, what they hold is on nobody's account.
pub fn service(
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    rpc: RpcMetrics,
    registry: prometheus::Registry,
) -> Router {
    let app = App {
        page: page::Page::new(),
        figures: status::Latest::new(Figures::of(&fetcher)),
        fetcher,
        lifecycle,
        registry,
        document: openapi::document(),
    };
    with_edge(router(), rpc).with_state(Arc::new(app))
}

/// Whether a path is for operators and orchestrators, who are answered until the end of a drain.
pub fn is_operation(path: &str) -> bool {
    !path.starts_with("/v1/datasets")
}

fn router() -> Router<Arc<App>> {
    routes::ROUTES.iter().fold(Router::new(), |router, route| {
        router.route(route.pattern, method_of(route.operation))
    })
}

fn method_of(operation: HttpRoute) -> MethodRouter<Arc<App>> {
    match operation {
        HttpRoute::ListDatasets => get(datasets::list),
        HttpRoute::GetDataset => get(datasets::get),
        HttpRoute::GetBytes => get(objects::get_bytes),
        HttpRoute::GetBlock => get(items::get_block),
        HttpRoute::GetVector => get(items::get_vector),
        HttpRoute::ListObjects => get(objects::list),
        HttpRoute::GetObject => get(objects::get_object),
        HttpRoute::BatchFetchBlocks => post(batch::blocks),
        HttpRoute::BatchFetchVectors => post(batch::vectors),
        HttpRoute::BatchFetchRanges => post(batch::ranges),
        HttpRoute::BatchFetchObjects => post(batch::objects),
        HttpRoute::Page => get(page::index),
        HttpRoute::PageAsset => get(page::asset),
        HttpRoute::GetStatus => get(status::status),
        HttpRoute::Metrics => get(probes::metrics),
        HttpRoute::Livez => get(probes::livez),
        HttpRoute::Readyz => get(probes::readyz),
        HttpRoute::OpenApi => get(openapi::get),
        HttpRoute::Other => MethodRouter::new(),
    }
}

/// Adds the outermost layer and the answer to unknown paths.
fn with_edge<S: Clone + Send + Sync + 'static>(router: Router<S>, rpc: RpcMetrics) -> Router<S> {
    router
        .fallback(problem::no_such_path)
        .layer(from_fn_with_state(rpc, edge))
}

/// Counts and times a request, and writes the body of its problem if it has one.
async fn edge(State(rpc): State<RpcMetrics>, request: Request, next: Next) -> Response {
    let arrival = Instant::now();
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let matched = matched.as_ref().map(MatchedPath::as_str);
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let counted = rpc.http(routes::operation(matched, &method)).begin(arrival);
    let response = problem::render(next.run(request).await, uri.path(), matched, &method);
    counted.end(response.status());
    response
}

/// The connection that a request came on.
fn connection_of(extensions: &http::Extensions) -> Option<Arc<Connection>> {
    extensions.get().cloned()
}

#[cfg(test)]
mod tests;
