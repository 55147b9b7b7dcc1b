//! The most frequent requests, served without the router: GET of a block, a vector, or bytes (ADR 0012).
//!
//! Responses are the router's, from the same functions. Only requests that the path alone identifies are
//! accepted: nothing percent-encoded, no HEAD, no body. Vectors as JSON and several ranges are left to the router, which charges
//! text to its caller. A layer around the router that must see these requests has to be repeated here:
//! currently `outer_layer`.

use super::negotiate::{ResponseFormat, preferred};
use super::routes::{self, Route};
use super::{items, objects, problem};
use crate::caller::Connection;
use crate::fetch::Fetcher;
use crate::listener::{AnswerBody, FastPath, RequestBody, ResponseFuture};
use crate::rpc_metrics::{HttpOperation, RequestTimer, RpcMetrics};
use axum::response::IntoResponse as _;
use http::{Method, Request, header};
use http_body::Body as _;
use std::sync::Arc;
use std::time::Instant;

/// The fast path of [`super::service`], with the same fetcher and metrics.
pub fn fast_path(fetcher: Fetcher, rpc: RpcMetrics) -> Arc<dyn FastPath> {
    let shared = Arc::new(Shared { fetcher, rpc });
    Arc::new(ReadFastPath { shared })
}

#[derive(Debug)]
struct ReadFastPath {
    shared: Arc<Shared>,
}

/// Aligned, so that those of two cores share no cache line.
#[derive(Debug, Clone)]
#[repr(align(128))]
struct Shared {
    fetcher: Fetcher,
    rpc: RpcMetrics,
}

/// What to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Target<'a> {
    operation: HttpOperation,
    dataset: &'a str,
    /// Block or vector as in the path; empty for bytes.
    item: &'a str,
}

impl<'a> Target<'a> {
    /// Parses a path that needs no decoding.
    fn of(path: &'a str) -> Option<Self> {
        let (dataset, rest) = path.strip_prefix("/v1/datasets/")?.split_once('/')?;
        let (operation, item) = match rest.split_once('/') {
            Some(("blocks", item)) => (HttpOperation::GetBlock, item),
            Some(("vectors", item)) => (HttpOperation::GetVector, item),
            None if rest == "bytes" => (HttpOperation::GetBytes, ""),
            Some(_) | None => return None,
        };
        let is_plain = |text: &str| !text.contains(['%', '/']);
        let is_whole = !dataset.is_empty() && (operation == HttpOperation::GetBytes || !item.is_empty());
        (is_whole && is_plain(dataset) && is_plain(item)).then_some(Self {
            operation,
            dataset,
            item,
        })
    }
}

impl FastPath for ReadFastPath {
    fn accepts(&self, request: &Request<RequestBody>) -> bool {
        let (headers, is_comma) = (request.headers(), |byte: &u8| *byte == b',');
        let has_text = |target: Target<'_>| match headers.get(header::RANGE) {
            Some(ranges) if target.operation == HttpOperation::GetBytes => {
                ranges.as_bytes().iter().any(is_comma)
            }
            Some(_) | None => {
                target.operation == HttpOperation::GetVector
                    && matches!(preferred(headers), Ok(ResponseFormat::Json))
            }
        };
        request.method() == Method::GET
            && request.body().is_end_stream()
            && Target::of(request.uri().path()).is_some_and(|target| !has_text(target))
    }

    fn for_core(&self) -> Arc<dyn FastPath> {
        let shared = Arc::new(Shared::clone(&self.shared));
        Arc::new(Self { shared })
    }

    fn call(&self, request: Request<RequestBody>, connection: &Arc<Connection>) -> ResponseFuture {
        let (shared, connection) = (Arc::clone(&self.shared), Arc::clone(connection));
        ResponseFuture::new(async move {
            let arrival = Instant::now();
            let (mut parts, _no_body) = request.into_parts();
            let (path, connection) = (parts.uri.path(), Some(connection));
            let target = Target::of(path);
            let Shared { fetcher, rpc } = &*shared;
            let operation = target.map_or(HttpOperation::Other, |target| target.operation);
            let mut counted = RequestTimer::new(rpc, operation, arrival);
            let result = match target {
                Some(Target {
                    operation: HttpOperation::GetBlock,
                    dataset,
                    item,
                }) => {
                    let (method, headers) = (&parts.method, &mut parts.headers);
                    items::block(fetcher, dataset, item, method, headers, connection).await
                }
                Some(Target {
                    operation: HttpOperation::GetVector,
                    dataset,
                    item,
                }) => {
                    let (method, headers) = (&parts.method, &mut parts.headers);
                    items::vector(fetcher, dataset, item, method, headers, connection).await
                }
                Some(Target { dataset, .. }) => objects::bytes(fetcher, dataset, &parts, connection)
                    .await
                    .map(|response| response.map(AnswerBody::Routed)),
                None => Err(problem::no_such_path().await),
            };
            let matched = routes::ROUTES.iter().find(|route| route.operation == operation);
            let matched = matched.map(|Route { pattern, .. }| *pattern);
            let response = result.unwrap_or_else(|problem| problem.into_response().map(AnswerBody::Routed));
            let response = problem::render(response, path, matched, &parts.method);
            counted.end(response.status());
            response
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_glance_can_tell_is_taken() {
        // Paths of the three reads; and the same with something to decode, too much, too little, or another
        // operation.
        let of = |path| Target::of(path).map(|target| (target.operation, target.dataset, target.item));
        for (path, expected) in [
            (
                "/v1/datasets/d/blocks/7",
                Some((HttpOperation::GetBlock, "d", "7")),
            ),
            (
                "/v1/datasets/d/blocks/x",
                Some((HttpOperation::GetBlock, "d", "x")),
            ),
            (
                "/v1/datasets/d/vectors/7",
                Some((HttpOperation::GetVector, "d", "7")),
            ),
            ("/v1/datasets/d/bytes", Some((HttpOperation::GetBytes, "d", ""))),
            ("/v1/datasets/%64/bytes", None),
            ("/v1/datasets/d/blocks/%37", None),
            ("/v1/datasets//blocks/7", None),
            ("/v1/datasets/d/blocks/", None),
            ("/v1/datasets/d/blocks", None),
            ("/v1/datasets/d/blocks/7/", None),
            ("/v1/datasets/d/blocks/7/8", None),
            ("/v1/datasets/d/bytes/", None),
            ("/v1/datasets/d/objects/7", None),
            ("/v1/datasets/d/blocks:batchFetch", None),
            ("/v1/datasets/d", None),
            ("/v2/datasets/d/bytes", None),
        ] {
            assert_eq!(of(path), expected, "{path}");
        }
    }
}
