//! The routes: path, methods and operation of each resource. The router, the metrics' labels, the `Allow`
//! header and the check that /openapi.json is complete are derived from this table.

use crate::rpc_metrics::HttpOperation;
use http::Method;

/// A path and what it does.
#[derive(Debug)]
pub(super) struct Route {
    /// axum's pattern; `{*name}` is a parameter of any number of segments.
    pub(super) pattern: &'static str,
    /// Its methods.
    pub(super) methods: &'static [&'static str],
    /// Its operation; each operation has one route.
    pub(super) operation: HttpOperation,
}

const fn read(pattern: &'static str, operation: HttpOperation) -> Route {
    Route {
        pattern,
        methods: &["GET", "HEAD"],
        operation,
    }
}

const fn post(pattern: &'static str, operation: HttpOperation) -> Route {
    Route {
        pattern,
        methods: &["POST"],
        operation,
    }
}

/// Every route.
pub(super) const ROUTES: &[Route] = &[
    read("/v1/datasets", HttpOperation::ListDatasets),
    read("/v1/datasets/{name}", HttpOperation::GetDataset),
    read("/v1/datasets/{name}/bytes", HttpOperation::GetBytes),
    read("/v1/datasets/{name}/blocks/{index}", HttpOperation::GetBlock),
    read("/v1/datasets/{name}/vectors/{id}", HttpOperation::GetVector),
    read("/v1/datasets/{name}/objects", HttpOperation::ListObjects),
    read("/v1/datasets/{name}/objects/{*object}", HttpOperation::GetObject),
    post(
        "/v1/datasets/{name}/blocks:batchFetch",
        HttpOperation::BatchFetchBlocks,
    ),
    post(
        "/v1/datasets/{name}/vectors:batchFetch",
        HttpOperation::BatchFetchVectors,
    ),
    post(
        "/v1/datasets/{name}/ranges:batchFetch",
        HttpOperation::BatchFetchRanges,
    ),
    post(
        "/v1/datasets/{name}/objects:batchFetch",
        HttpOperation::BatchFetchObjects,
    ),
    post("/v1/datasets/{name}/vectors:score", HttpOperation::ScoreVectors),
    read("/", HttpOperation::Page),
    read("/page/{asset}", HttpOperation::PageAsset),
    read("/v1/status", HttpOperation::GetStatus),
    read("/metrics", HttpOperation::Metrics),
    read("/livez", HttpOperation::Livez),
    read("/readyz", HttpOperation::Readyz),
    read("/openapi.json", HttpOperation::OpenApi),
];

fn find(pattern: Option<&str>) -> Option<&'static Route> {
    ROUTES.iter().find(|route| Some(route.pattern) == pattern)
}

/// The operation that metrics count a request as: a closed set, whatever clients send.
pub(super) fn operation(pattern: Option<&str>, method: &Method) -> HttpOperation {
    match find(pattern) {
        Some(route) if route.methods.contains(&method.as_str()) => route.operation,
        _ => HttpOperation::Other,
    }
}

/// The methods of the route with this pattern.
pub(super) fn methods_of(pattern: Option<&str>) -> &'static [&'static str] {
    find(pattern).map_or(&[], |route| route.methods)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_one_resource() {
        // The whole table: no operation and no pattern occurs twice.
        for (i, route) in ROUTES.iter().enumerate() {
            for other in &ROUTES[i + 1..] {
                assert!(
                    route.operation != other.operation && route.pattern != other.pattern,
                    "{other:?}"
                );
            }
        }
    }
}
