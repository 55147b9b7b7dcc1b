//! The closed list of resources: the one place that pairs a path with its operation and method. The router, the metrics'
//! labels, the `Allow` header and the check that /openapi.json is complete are all made from it.

use crate::rpc_metrics::HttpRoute;
use http::Method;

/// How a resource is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    /// GET and HEAD.
    Read,
    /// POST.
    Post,
}

/// A resource.
#[derive(Debug)]
pub(super) struct Route {
    /// axum's pattern; `{*name}` is a parameter of any number of segments.
    pub(super) pattern: &'static str,
    /// How it is used.
    pub(super) verb: Verb,
    /// What it does; each operation has one resource.
    pub(super) operation: HttpRoute,
}

const fn read(pattern: &'static str, operation: HttpRoute) -> Route {
    Route {
        pattern,
        verb: Verb::Read,
        operation,
    }
}

const fn post(pattern: &'static str, operation: HttpRoute) -> Route {
    Route {
        pattern,
        verb: Verb::Post,
        operation,
    }
}

/// Every resource.
pub(super) const ROUTES: &[Route] = &[
    read("/v1/datasets", HttpRoute::ListDatasets),
    read("/v1/datasets/{name}", HttpRoute::GetDataset),
    read("/v1/datasets/{name}/bytes", HttpRoute::GetBytes),
    read("/v1/datasets/{name}/blocks/{index}", HttpRoute::GetBlock),
    read("/v1/datasets/{name}/vectors/{id}", HttpRoute::GetVector),
    read("/v1/datasets/{name}/objects", HttpRoute::ListObjects),
    read("/v1/datasets/{name}/objects/{*object}", HttpRoute::GetObject),
    post(
        "/v1/datasets/{name}/blocks:batchFetch",
        HttpRoute::BatchFetchBlocks,
    ),
    post(
        "/v1/datasets/{name}/vectors:batchFetch",
        HttpRoute::BatchFetchVectors,
    ),
    post(
        "/v1/datasets/{name}/ranges:batchFetch",
        HttpRoute::BatchFetchRanges,
    ),
    post(
        "/v1/datasets/{name}/objects:batchFetch",
        HttpRoute::BatchFetchObjects,
    ),
    read("/", HttpRoute::Page),
    read("/page/{asset}", HttpRoute::PageAsset),
    read("/v1/status", HttpRoute::GetStatus),
    read("/metrics", HttpRoute::Metrics),
    read("/livez", HttpRoute::Livez),
    read("/readyz", HttpRoute::Readyz),
    read("/openapi.json", HttpRoute::OpenApi),
];

fn find(pattern: Option<&str>) -> Option<&'static Route> {
    ROUTES.iter().find(|route| Some(route.pattern) == pattern)
}

/// What the metrics count a request as: a closed set, whatever clients send.
pub(super) fn operation(pattern: Option<&str>, method: &Method) -> HttpRoute {
    match find(pattern) {
        Some(route) if methods(route.verb).contains(&method.as_str()) => route.operation,
        _ => HttpRoute::Other,
    }
}

/// The methods of the resource with this pattern.
pub(super) fn methods_of(pattern: Option<&str>) -> &'static [&'static str] {
    find(pattern).map_or(&[], |route| methods(route.verb))
}

fn methods(verb: Verb) -> &'static [&'static str] {
    match verb {
        Verb::Read => &["GET", "HEAD"],
        Verb::Post => &["POST"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: Option<&str> = Some("/v1/datasets/{name}/bytes");
    const BATCH: Option<&str> = Some("/v1/datasets/{name}/blocks:batchFetch");

    #[test]
    fn labels_are_a_closed_set() {
        // Known and unknown pairs of path and method: an operation, or `Other`, never what the client sent.
        assert_eq!(operation(BYTES, &Method::GET), HttpRoute::GetBytes);
        assert_eq!(operation(BYTES, &Method::HEAD), HttpRoute::GetBytes);
        assert_eq!(operation(BYTES, &Method::POST), HttpRoute::Other);
        assert_eq!(operation(BATCH, &Method::POST), HttpRoute::BatchFetchBlocks);
        assert_eq!(operation(BATCH, &Method::GET), HttpRoute::Other);
        assert_eq!(operation(None, &Method::GET), HttpRoute::Other);
        assert_eq!(
            operation(BYTES, &Method::from_bytes(b"BREW").unwrap()),
            HttpRoute::Other
        );
    }

    #[test]
    fn methods_are_those_of_the_resource() {
        // A resource that is read, one that is posted to, and none.
        assert_eq!(methods_of(BYTES), ["GET", "HEAD"]);
        assert_eq!(methods_of(BATCH), ["POST"]);
        assert!(methods_of(None).is_empty());
    }

    #[test]
    fn each_operation_has_one_resource() {
        // The whole table: no operation and no pattern is there twice.
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
