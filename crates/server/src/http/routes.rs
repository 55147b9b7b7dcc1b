//! The closed list of resources: the one place that pairs a path pattern with its methods and their names. Metrics labels,
//! the `Allow` header and the check that /openapi.json is complete are all read from it.

use crate::rpc_metrics::HttpRoute;
use http::Method;

/// A resource.
#[derive(Debug)]
pub(super) struct Route {
    /// axum's pattern.
    pub(super) pattern: &'static str,
    /// The path in the OpenAPI document, where it differs: axum marks a many-segment parameter with `*`.
    pub(super) documented: Option<&'static str>,
    /// The operation behind GET (and HEAD).
    pub(super) get: Option<HttpRoute>,
    /// The operation behind POST.
    pub(super) post: Option<HttpRoute>,
}

const fn get(pattern: &'static str, operation: HttpRoute) -> Route {
    Route { pattern, documented: None, get: Some(operation), post: None }
}

const fn post(pattern: &'static str, operation: HttpRoute) -> Route {
    Route { pattern, documented: None, get: None, post: Some(operation) }
}

pub(super) const DATASETS: &str = "/v1/datasets";
pub(super) const DATASET: &str = "/v1/datasets/{name}";
pub(super) const BYTES: &str = "/v1/datasets/{name}/bytes";
pub(super) const BLOCK: &str = "/v1/datasets/{name}/blocks/{index}";
pub(super) const VECTOR: &str = "/v1/datasets/{name}/vectors/{id}";
pub(super) const OBJECTS: &str = "/v1/datasets/{name}/objects";
pub(super) const OBJECT: &str = "/v1/datasets/{name}/objects/{*object}";
pub(super) const BATCH_BLOCKS: &str = "/v1/datasets/{name}/blocks:batchFetch";
pub(super) const BATCH_VECTORS: &str = "/v1/datasets/{name}/vectors:batchFetch";
pub(super) const BATCH_RANGES: &str = "/v1/datasets/{name}/ranges:batchFetch";
pub(super) const BATCH_OBJECTS: &str = "/v1/datasets/{name}/objects:batchFetch";
pub(super) const METRICS: &str = "/metrics";
pub(super) const LIVEZ: &str = "/livez";
pub(super) const READYZ: &str = "/readyz";
pub(super) const OPENAPI: &str = "/openapi.json";

/// Every resource.
pub(super) const ROUTES: &[Route] = &[
    get(DATASETS, HttpRoute::ListDatasets),
    get(DATASET, HttpRoute::GetDataset),
    get(BYTES, HttpRoute::GetBytes),
    get(BLOCK, HttpRoute::GetBlock),
    get(VECTOR, HttpRoute::GetVector),
    get(OBJECTS, HttpRoute::ListObjects),
    Route {
        pattern: OBJECT,
        documented: Some("/v1/datasets/{name}/objects/{object}"),
        get: Some(HttpRoute::GetObject),
        post: None,
    },
    post(BATCH_BLOCKS, HttpRoute::BatchFetchBlocks),
    post(BATCH_VECTORS, HttpRoute::BatchFetchVectors),
    post(BATCH_RANGES, HttpRoute::BatchFetchRanges),
    post(BATCH_OBJECTS, HttpRoute::BatchFetchObjects),
    get(METRICS, HttpRoute::Metrics),
    get(LIVEZ, HttpRoute::Livez),
    get(READYZ, HttpRoute::Readyz),
    get(OPENAPI, HttpRoute::OpenApi),
];

/// What the metrics count a request as: a closed set, whatever clients send.
pub(super) fn operation(pattern: Option<&str>, method: &Method) -> HttpRoute {
    let Some(route) = ROUTES.iter().find(|route| Some(route.pattern) == pattern) else { return HttpRoute::Other };
    let operation = match *method {
        Method::GET | Method::HEAD => route.get,
        Method::POST => route.post,
        _ => None,
    };
    operation.unwrap_or(HttpRoute::Other)
}

/// The methods of the resource with this pattern.
pub(super) fn methods_of(pattern: &str) -> Vec<&'static str> {
    let Some(route) = ROUTES.iter().find(|route| route.pattern == pattern) else { return Vec::new() };
    let mut methods = Vec::new();
    if route.get.is_some() {
        methods.extend(["GET", "HEAD"]);
    }
    if route.post.is_some() {
        methods.push("POST");
    }
    methods
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_a_closed_set() {
        // Known and unknown pairs of path and method: an operation's name, or `Other`, never what the client sent.
        assert_eq!(operation(Some(BYTES), &Method::GET), HttpRoute::GetBytes);
        assert_eq!(operation(Some(BYTES), &Method::HEAD), HttpRoute::GetBytes);
        assert_eq!(operation(Some(BYTES), &Method::POST), HttpRoute::Other);
        assert_eq!(operation(Some(BATCH_BLOCKS), &Method::POST), HttpRoute::BatchFetchBlocks);
        assert_eq!(operation(None, &Method::GET), HttpRoute::Other);
        assert_eq!(operation(Some("/x"), &Method::from_bytes(b"BREW").unwrap()), HttpRoute::Other);
    }

    #[test]
    fn methods_are_those_of_the_resource() {
        // A GET resource, a POST resource and an unknown one: HEAD goes with GET, and unknown has none.
        assert_eq!(methods_of(OBJECT), ["GET", "HEAD"]);
        assert_eq!(methods_of(BATCH_RANGES), ["POST"]);
        assert!(methods_of("/nowhere").is_empty());
    }
}
