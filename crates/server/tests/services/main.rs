//! The gRPC and HTTP services over a real engine and real files, without sockets: requests that clients cannot
//! send, moments that a socket does not show, counts of the engine. What clients see is in `e2e`.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

mod adversity;
mod calls;
mod page;
mod served;

use axum::body::Body;
use http::{Method, StatusCode};
use served::{Served, bytes_of, request, text};

#[tokio::test]
async fn head_has_the_head_of_get_and_reads_nothing() {
    // HEAD of every resource with bytes: GET's status, length, tag and type; the engine's read count does not
    // change.
    let served = Served::new();
    for path in [
        "b/bytes",
        "b/blocks/3",
        "v/vectors/7",
        "o/objects/a/long",
        "o/objects/empty",
    ] {
        let get = served.get(path, &[]).await;
        let reads = served.engine.totals().reads;
        let head = served.send(request(Method::HEAD, path, &[], Body::empty())).await;
        assert_eq!(head.status(), get.status(), "{path}");
        for name in ["content-length", "content-type", "etag", "accept-ranges"] {
            assert_eq!(text(&head, name), text(&get, name), "{path} {name}");
        }
        assert!(bytes_of(head).await.is_empty());
        assert_eq!(served.engine.totals().reads, reads, "{path}");
    }
    let gone = served
        .send(request(Method::HEAD, "b/blocks/999999", &[], Body::empty()))
        .await;
    assert_eq!(gone.status(), StatusCode::NOT_FOUND);
    served.stop().await;
}
