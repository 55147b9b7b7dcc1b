//! The HTTP mirror of the API, and what operators read: the page at `/` with its figures (`/v1/status`), `/metrics`,
//! `/livez`, `/readyz`, `/openapi.json`.
//!
//! Every request passes one outermost layer that counts it and writes problem details; inside it each operation has one
//! resource (`routes`). Bytes reach the body as slices of the response memory. Deliberately absent: compression,
//! authentication, timeouts of a connection (the listener's), and any cache.

mod batch;
mod batch_request;
mod batch_response;
mod bounded_list;
mod conditional;
mod datasets;
mod fast_path;
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
mod status;

use crate::caller::Connection;
use crate::daemon_status::StatusCollector;
use crate::fetch::Fetcher;
use crate::lifecycle::Lifecycle;
use crate::rpc_metrics::{HttpOperation, RpcMetrics};
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Instant;

pub use fast_path::fast_path;
pub(crate) use problem::refusal;

/// What the operations work with.
#[derive(Debug)]
struct AppState {
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    registry: prometheus::Registry,
    document: Bytes,
    page: page::Page,
    status: status::StatusCache,
}

/// The HTTP service: made once, cloned for each connection. Requests should carry their
/// [`Connection`] among their extensions; without one, what they hold is on nobody's account.
pub fn service(
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    rpc: RpcMetrics,
    registry: prometheus::Registry,
) -> Router {
    let app = AppState {
        page: page::Page::new(),
        status: status::StatusCache::new(StatusCollector::of(&fetcher)),
        fetcher,
        lifecycle,
        registry,
        document: openapi::document(),
    };
    with_outer_layer(router(), rpc).with_state(Arc::new(app))
}

/// Whether a path is for operators and orchestrators, who are answered until the end of a drain.
pub fn is_operation(path: &str) -> bool {
    !path.starts_with("/v1/datasets")
}

fn router() -> Router<Arc<AppState>> {
    routes::ROUTES.iter().fold(Router::new(), |router, route| {
        router.route(route.pattern, method_of(route.operation))
    })
}

fn method_of(operation: HttpOperation) -> MethodRouter<Arc<AppState>> {
    match operation {
        HttpOperation::ListDatasets => get(datasets::list),
        HttpOperation::GetDataset => get(datasets::get),
        HttpOperation::GetBytes => get(objects::get_bytes),
        HttpOperation::GetBlock => get(items::get_block),
        HttpOperation::GetVector => get(items::get_vector),
        HttpOperation::ListObjects => get(objects::list),
        HttpOperation::GetObject => get(objects::get_object),
        HttpOperation::BatchFetchBlocks => post(batch::blocks),
        HttpOperation::BatchFetchVectors => post(batch::vectors),
        HttpOperation::BatchFetchRanges => post(batch::ranges),
        HttpOperation::BatchFetchObjects => post(batch::objects),
        HttpOperation::Page => get(page::index),
        HttpOperation::PageAsset => get(page::asset),
        HttpOperation::GetStatus => get(status::status),
        HttpOperation::Metrics => get(probes::metrics),
        HttpOperation::Livez => get(probes::livez),
        HttpOperation::Readyz => get(probes::readyz),
        HttpOperation::OpenApi => get(openapi::get),
        HttpOperation::Other => MethodRouter::new(),
    }
}

/// Adds the outermost layer and the answer to unknown paths.
fn with_outer_layer<S: Clone + Send + Sync + 'static>(router: Router<S>, rpc: RpcMetrics) -> Router<S> {
    router
        .fallback(problem::no_such_path)
        .layer(from_fn_with_state(rpc, outer_layer))
}

/// Counts and times a request, and writes the body of its problem if it has one.
async fn outer_layer(State(rpc): State<RpcMetrics>, request: Request, next: Next) -> Response {
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
