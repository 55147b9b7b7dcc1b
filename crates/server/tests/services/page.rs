//! The page at `/` and the figures that it shows.

use super::served::{Served, bytes_of, json_of, text};
use axum::body::Body;
use axum::response::Response;
use http::{Method, Request, StatusCode, header};
use serde_json::Value;
use std::time::{Duration, Instant};

async fn ask(
    served: &Served,
    method: Method,
    path: &str,
    headers: &[(header::HeaderName, &str)],
) -> Response {
    let request = Request::builder().method(method).uri(path);
    let request = headers
        .iter()
        .fold(request, |request, (name, value)| request.header(name, *value));
    served.send(request.body(Body::empty()).unwrap()).await
}

async fn status(served: &Served) -> Value {
    let response = ask(served, Method::GET, "/v1/status", &[]).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(text(&response, "cache-control"), "no-store");
    assert_eq!(text(&response, "content-type"), "application/json");
    json_of(response).await
}

/// Polls until the figures are as expected: a response may be 200 ms old.
async fn status_when(served: &Served, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let figures = status(served).await;
        if wanted(&figures) {
            return figures;
        }
        assert!(Instant::now() < deadline, "{what}: {figures}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no whole number: {value}"))
}

#[tokio::test]
async fn the_page_may_load_only_itself() {
    // Scenario: the page and each of its files, by GET, by HEAD, with its tag sent back, with another tag.
    // Expectation: their types; a policy that allows nothing else; cached copies are confirmed (304) or
    // refused (412 as a problem).
    let served = Served::new();
    for (path, content_type) in [
        ("/", "text/html; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/script.js", "text/javascript; charset=utf-8"),
        ("/page/points.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ] {
        let whole = ask(&served, Method::GET, path, &[]).await;
        assert_eq!(whole.status(), StatusCode::OK, "{path}");
        assert_eq!(text(&whole, "content-type"), content_type);
        assert_eq!(text(&whole, "x-content-type-options"), "nosniff");
        assert_eq!(text(&whole, "cache-control"), "no-cache");
        let policy = text(&whole, "content-security-policy");
        let directives: Vec<&str> = policy.split("; ").collect();
        for directive in [
            "default-src 'none'",
            "script-src 'self'",
            "connect-src 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ] {
            assert!(directives.contains(&directive), "{directive} is not in {policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
        let (tag, length) = (text(&whole, "etag"), text(&whole, "content-length"));
        assert_eq!(bytes_of(whole).await.len().to_string(), length, "{path}");

        let head = ask(&served, Method::HEAD, path, &[]).await;
        assert_eq!(
            (text(&head, "etag"), text(&head, "content-length")),
            (tag.clone(), length)
        );
        assert!(bytes_of(head).await.is_empty(), "{path}");
        let kept = ask(&served, Method::GET, path, &[(header::IF_NONE_MATCH, &tag)]).await;
        assert_eq!(
            (kept.status(), text(&kept, "etag")),
            (StatusCode::NOT_MODIFIED, tag)
        );
        assert!(bytes_of(kept).await.is_empty(), "{path}");
        let other = ask(&served, Method::GET, path, &[(header::IF_MATCH, "\"other\"")]).await;
        assert_eq!(other.status(), StatusCode::PRECONDITION_FAILED);
        assert_eq!(json_of(other).await["type"], "/problems/precondition-failed");
    }
    served.stop().await;
}

#[tokio::test]
async fn what_is_no_part_of_the_page_is_a_problem() {
    // Scenario: files that the page does not have. Expectation: problem details that name the path.
    let served = Served::new();
    for path in [
        "/page/other.js",
        "/page/index.html",
        "/page/..%2Fpage.rs",
        "/index.html",
        "/page/",
    ] {
        let response = ask(&served, Method::GET, path, &[]).await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND, "{path}");
        assert_eq!(text(&response, "content-type"), "application/problem+json");
        let problem = json_of(response).await;
        assert_eq!(
            (&problem["type"], &problem["instance"]),
            (&"/problems/no-such-path".into(), &path.into())
        );
    }
    served.stop().await;
}

#[tokio::test]
async fn figures_count_what_was_read() {
    // Scenario: figures of an idle daemon, then three reads of one dataset, one of another and one past the
    // end. Expectation: what is served is listed with its backend and reason; counters grow by exactly that,
    // per dataset and in total; the histogram is cumulative and its last bucket has every read.
    let served = Served::new();
    let before = status(&served).await;
    assert_eq!(
        (&before["state"], &before["version"]),
        (&"starting".into(), &env!("CARGO_PKG_VERSION").into())
    );
    assert_eq!(
        (&before["backend"]["backend"], &before["backend"]["fallback"]),
        (&"pread".into(), &false.into())
    );
    let datasets = before["datasets"].as_array().unwrap();
    let named: Vec<[&str; 3]> = datasets
        .iter()
        .map(|one| ["name", "kind", "backend"].map(|member| one[member].as_str().unwrap()))
        .collect();
    assert_eq!(
        named,
        [
            ["b", "blocks", "pread"],
            ["o", "objects", "pread"],
            ["v", "vectors", "pread"]
        ]
    );
    assert!(
        datasets
            .iter()
            .all(|one| one["reason"] == before["backend"]["reason"] && number(&one["reads_total"]) == 0)
    );

    for path in ["b/blocks/1", "b/blocks/2", "b/blocks/3", "v/vectors/7"] {
        assert_eq!(served.get(path, &[]).await.status(), StatusCode::OK);
    }
    let batch = serde_json::json!({"ids": [0, 100]});
    assert_eq!(
        served.post("v/vectors:batchFetch", "*/*", batch).await.status(),
        StatusCode::OK
    );
    let after = status_when(&served, "six reads", |figures| {
        figures["totals"]["reads_total"] == 6
    })
    .await;
    let counters = |name: &str| {
        let all = after["datasets"].as_array().unwrap();
        let one = all.iter().find(|one| one["name"] == name).unwrap();
        ["reads_total", "read_errors_total", "read_bytes_total"].map(|member| number(&one[member]))
    };
    assert_eq!(counters("b"), [3, 0, 3 * 4096]);
    assert_eq!(counters("v"), [3, 1, 2 * 16]);
    assert_eq!(counters("o"), [0, 0, 0]);
    assert_eq!(number(&after["totals"]["read_errors_total"]), 1);
    assert_eq!(number(&after["totals"]["read_bytes_total"]), 3 * 4096 + 2 * 16);
    assert_eq!(after["started_unix_ms"], before["started_unix_ms"]);
    assert!(number(&after["uptime_ms"]) >= number(&before["uptime_ms"]));

    let buckets = after["read_duration"]["buckets"].as_array().unwrap();
    let counts: Vec<u64> = buckets.iter().map(|bucket| number(&bucket["count"])).collect();
    assert!(
        counts.is_sorted() && counts.last() == Some(&number(&after["read_duration"]["count"])),
        "{buckets:?}"
    );
    let bounds: Vec<f64> = buckets
        .iter()
        .filter_map(|bucket| bucket["le_us"].as_f64())
        .collect();
    assert!(
        bounds.is_sorted() && bounds.len() == buckets.len() - 1,
        "{buckets:?}"
    );

    let shards = after["shards"].as_array().unwrap();
    let sum = |of: &dyn Fn(&Value) -> u64| shards.iter().map(of).sum::<u64>();
    assert!(!shards.is_empty() && shards.iter().all(|shard| number(&shard["queue_depth"]) > 0));
    assert_eq!(sum(&|shard| number(&shard["device_reads_total"])), 5);
    assert_eq!(sum(&|shard| number(&shard["depth_seen"]["count"])), 5);
    assert!(
        shards
            .iter()
            .all(|shard| shard["depth_seen"]["sum"].as_f64() >= shard["depth_seen"]["count"].as_f64())
    );
    served.stop().await;
}

#[tokio::test]
async fn refusals_are_counted_and_draining_is_told() {
    // Scenario: readiness ends; then the daemon drains and refuses a read; the page and the figures are requested.
    // Expectation: both respond, at once with the documented state, and the refusal is counted.
    let served = Served::new();
    served.lifecycle.start_serving();
    assert_eq!(status(&served).await["state"], "serving");
    served.lifecycle.start_lame_duck();
    assert_eq!(status(&served).await["state"], "draining");
    served.fetcher.start_draining();
    served.lifecycle.start_draining();
    assert_eq!(status(&served).await["state"], "draining");
    assert_eq!(
        served.get("b/blocks/1", &[]).await.status(),
        StatusCode::SERVICE_UNAVAILABLE
    );
    status_when(&served, "one refusal", |figures| {
        figures["totals"]["rejected_total"] == 1
    })
    .await;
    assert_eq!(ask(&served, Method::GET, "/", &[]).await.status(), StatusCode::OK);
    served.stop().await;
}
