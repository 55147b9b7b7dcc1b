//! The files of the page at `/`; `tests/page/run.py` has the page in a browser.

use crate::daemon::{Setup, any_backend};
use crate::data::plain_blocks;
use http::Method;

#[tokio::test]
async fn the_page_may_load_only_itself() {
    // Scenario: the page and each of its files, by GET, by HEAD, with its tag sent back, with another tag.
    // Expectation: their types; a policy that allows nothing else; cached copies are confirmed (304) or refused (412 as a
    // problem). Files that it does not have are a problem.
    let daemon = plain_blocks(Setup::new(any_backend()), 1).0.start();
    let http = daemon.http_client();
    for (path, content_type) in [
        ("/", "text/html; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/script.js", "text/javascript; charset=utf-8"),
        ("/page/points.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ] {
        let whole = http.get(path).await;
        assert_eq!(whole.status, 200, "{path}");
        assert_eq!(whole.header("content-type"), content_type);
        assert_eq!(whole.header("x-content-type-options"), "nosniff");
        assert_eq!(whole.header("cache-control"), "no-cache");
        let policy = whole.header("content-security-policy");
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
        let tag = whole.header("etag");

        let head = http.send(Method::HEAD, path, &[], "").await;
        for name in ["etag", "content-length"] {
            assert_eq!(head.header(name), whole.header(name), "{path}");
        }
        let kept = http.get_with(path, &[("if-none-match", tag)]).await;
        assert_eq!((kept.status.as_u16(), kept.header("etag")), (304, tag));
        let other = http.get_with(path, &[("if-match", "\"other\"")]).await;
        other.is_problem(412, "precondition-failed", Some("If-Match"), &[]);
    }
    for path in [
        "/page/other.js",
        "/page/index.html",
        "/page/..%2Fpage.rs",
        "/page/",
    ] {
        let answer = http.get(path).await;
        answer.is_problem(404, "no-such-path", None, &[]);
        assert_eq!(answer.json()["instance"], path);
    }
    daemon.stop().await;
}
