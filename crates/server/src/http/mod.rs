//! The HTTP API, and endpoints for operators: the page at `/` with its status (`/v1/status`), `/metrics`, `/livez`,
//! `/readyz`, `/openapi.json`.
//!
//! An outermost layer counts every request and writes problem details; inside it each operation has one route
//! (`routes`). Bodies are slices of the response memory. There is no compression and no cache. The listener
//! enforces the timeouts of connections and access control.

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
mod parsing;
mod probes;
mod problem;
mod range;
mod representation;
mod routes;
mod score;
mod status;
mod text_body;

use crate::fetch::Fetcher;
use crate::gathering::Gathering;
use crate::lifecycle::Lifecycle;
use crate::rpc_metrics::{HttpOperation, RequestTimer, RpcMetrics};
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use fast_path::fast_path;
pub(crate) use problem::{refusal, too_late};

/// The state shared by the handlers.
#[derive(Debug)]
struct AppState {
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    registry: prometheus::Registry,
    scrapes: Gathering<Result<Bytes, String>>,
    document: Bytes,
    page: page::Page,
    status: status::StatusTexts,
}

/// The HTTP service: created once, cloned for each connection. Requests should carry their [`Connection`](crate::caller::Connection) in
/// their extensions; without one they are not charged to a caller.
pub fn service(
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    rpc: RpcMetrics,
    registry: prometheus::Registry,
) -> Router {
    let app = AppState {
        page: page::Page::new(),
        status: status::StatusTexts::new(&fetcher),
        fetcher,
        lifecycle,
        registry,
        scrapes: Gathering::new(Duration::ZERO),
        document: openapi::document(),
    };
    router()
        .fallback(problem::no_route)
        .layer(from_fn_with_state(rpc, outer_layer))
        .with_state(Arc::new(app))
}

/// Whether a path is for operators and orchestrators, and served until the end of a drain.
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
        HttpOperation::ScoreVectors => post(score::score),
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

/// Counts and times a request, and writes the body of its problem, if it has one.
async fn outer_layer(State(rpc): State<RpcMetrics>, request: Request, next: Next) -> Response {
    let arrival = Instant::now();
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let matched = matched.as_ref().map(MatchedPath::as_str);
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let mut counted = RequestTimer::new(&rpc, routes::operation(matched, &method), arrival);
    let response = problem::render(next.run(request).await, uri.path(), matched, &method);
    counted.end(response.status());
    response
}
