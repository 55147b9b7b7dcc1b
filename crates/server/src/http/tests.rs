//! The router without an engine: responses that do not depend on an operation.

use super::*;
use crate::http::problem::PathParams;
use axum::body::Body;
use http::{Method, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;

/// The routes of the service; each returns its parameters instead of running its operation.
fn echo_router() -> (Router, prometheus::Registry) {
    async fn echo(PathParams(parameters): PathParams<Vec<(String, String)>>) -> String {
        parameters
            .into_iter()
            .map(|(name, value)| format!("{name}={value};"))
            .collect()
    }
    let registry = prometheus::Registry::new();
    let rpc = RpcMetrics::new(&registry).unwrap();
    let routed = routes::ROUTES.iter().fold(Router::new(), |router, route| {
        let method = match route.verb {
            routes::Verb::Read => get(echo),
            routes::Verb::Post => post(echo),
        };
        router.route(route.pattern, method)
    });
    (with_outer_layer(routed, rpc), registry)
}

async fn answer(method: Method, path: &str) -> (StatusCode, http::HeaderMap, String) {
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .body(Body::empty())
        .unwrap();
    let (parts, body) = echo_router().0.oneshot(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (
        parts.status,
        parts.headers,
        String::from_utf8(body.to_vec()).unwrap(),
    )
}

#[tokio::test]
async fn an_unknown_path_is_a_problem() {
    // Paths of no resource, also below known ones: 404 as problem+json that names the path.
    for path in [
        "/v1",
        "/index.html",
        "/page",
        "/v1/datasets/a/blobs",
        "/v1/datasets/a/blocks",
        "/v1/datasets/a/blocks/1/2",
        "/metrics/",
    ] {
        let (status, headers, body) = answer(Method::GET, path).await;
        assert_eq!(status, 404, "{path}");
        assert_eq!(headers[header::CONTENT_TYPE], "application/problem+json");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (&body["type"], &body["instance"]),
            (&"/problems/no-such-path".into(), &path.into())
        );
    }
}

#[tokio::test]
async fn a_wrong_method_is_told_the_right_ones() {
    // POST to resources that are read; GET, HEAD and a made-up method to those that are posted to: 405 with
    // Allow, also in the body.
    for (method, path, allow) in [
        (Method::POST, "/v1/datasets/a/bytes", "GET, HEAD"),
        (Method::DELETE, "/v1/datasets/a/objects/b", "GET, HEAD"),
        (Method::GET, "/v1/datasets/a/blocks:batchFetch", "POST"),
        (
            Method::from_bytes(b"BREW").unwrap(),
            "/v1/datasets/a/ranges:batchFetch",
            "POST",
        ),
    ] {
        let (status, headers, body) = answer(method.clone(), path).await;
        assert_eq!(status, 405, "{method} {path}");
        assert_eq!(headers[header::ALLOW], allow);
        let body: Value = serde_json::from_str(&body).unwrap();
        let allowed: Vec<&str> = body["allowed"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one.as_str().unwrap())
            .collect();
        assert_eq!(allowed.join(", "), allow);
        assert!(body["detail"].as_str().unwrap().contains(allow));
    }
    assert_eq!(
        answer(Method::HEAD, "/v1/datasets/a/ranges:batchFetch").await.0,
        405
    );
}

#[tokio::test]
async fn object_names_are_decoded_once() {
    // Names with escapes, nested with `/` plain and escaped, leading and doubled slashes: decoded once, and
    // not normalized.
    for (path, name) in [
        ("a", "a"),
        ("a/b/c", "a/b/c"),
        ("a%2Fb", "a/b"),
        ("a%252Fb", "a%2Fb"),
        ("%C3%A9%20%3F%23", "é ?#"),
        ("a+b", "a+b"),
        ("../etc", "../etc"),
        ("%2e%2e/etc", "../etc"),
        ("/etc/passwd", "/etc/passwd"),
        ("a//b", "a//b"),
        ("bytes", "bytes"),
    ] {
        let (status, _, body) = answer(Method::GET, &format!("/v1/datasets/d/objects/{path}")).await;
        assert_eq!(status, 200, "{path}: {body}");
        assert_eq!(body, format!("name=d;object={name};"), "{path}");
    }
}

#[tokio::test]
async fn requests_are_counted_under_closed_labels() {
    // Known and unknown paths and methods: counted by operation or as `other`, with their status.
    let (router, registry) = echo_router();
    for (method, path) in [
        (Method::GET, "/v1/datasets/a/bytes"),
        (Method::HEAD, "/v1/datasets/a/bytes"),
        (Method::POST, "/v1/datasets/a/blocks:batchFetch"),
        (Method::GET, "/secret/path"),
        (Method::PUT, "/v1/datasets/a/bytes"),
        (Method::GET, "/v1/datasets/a/blocks:batchFetch"),
        (Method::from_bytes(b"BREW").unwrap(), "/v1/datasets/a/bytes"),
    ] {
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .body(Body::empty())
            .unwrap();
        router.clone().oneshot(request).await.unwrap();
    }
    let text = prometheus::TextEncoder::new()
        .encode_to_string(&registry.gather())
        .unwrap();
    for line in [
        r#"ringfetch_rpc_requests_total{code="200",method="GetBytes",transport="http"} 2"#,
        r#"ringfetch_rpc_requests_total{code="200",method="BatchFetchBlocks",transport="http"} 1"#,
        r#"ringfetch_rpc_requests_total{code="404",method="other",transport="http"} 1"#,
        r#"ringfetch_rpc_requests_total{code="405",method="other",transport="http"} 3"#,
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("secret"));
}
