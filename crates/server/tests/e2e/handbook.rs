//! Compares the metrics that a daemon exports with those that docs/METRICS.md explains.

use crate::daemon::Setup;
use crate::data::plain_blocks;
use crate::tls::{Authority, with_tls};
use std::collections::BTreeSet;

/// The names in the first cells of the document's tables.
fn explained() -> BTreeSet<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/METRICS.md");
    let text = std::fs::read_to_string(path).expect("docs/METRICS.md");
    let names = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split(['`', '{']).next());
    names.map(str::to_owned).collect()
}

#[tokio::test]
#[ignore = "needs io_uring"]
async fn every_metric_is_explained_and_no_other() {
    // Scenario: a daemon on each backend, after a read and a refusal over each transport. Expectation:
    // together they export exactly the metrics that the document explains.
    let mut exported = BTreeSet::new();
    for backend in ["uring", "mmap", "pread", "auto"] {
        let (setup, _) = plain_blocks(Setup::new(backend), 16);
        // TLS and principals have metrics of their own.
        setup.file(
            "principals",
            format!("a sha256:{} *\n", "5a".repeat(32)).as_bytes(),
        );
        let daemon = with_tls(setup, &Authority::new().pair("daemon"))
            .set("tls.ports", "admin")
            .set("access_log.path", "access.log")
            .set("tracing.otlp_endpoint", "http://127.0.0.1:9")
            .set("access.principals", "principals")
            .set("access.anonymous", "loopback")
            .start();
        daemon.assert_serves("blocks").await;
        let http = daemon.http_client();
        assert_eq!(http.get("/v1/datasets/blocks/blocks/1").await.status, 200);
        let scrape = daemon.scrape().await;
        let types = scrape
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "));
        exported.extend(types.filter_map(|line| line.split(' ').next().map(str::to_owned)));
        daemon.stop().await;
    }
    let explained = explained();
    assert!(exported.len() > 20, "{exported:?}");
    let missing: Vec<_> = exported.difference(&explained).collect();
    let stale: Vec<_> = explained.difference(&exported).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "docs/METRICS.md: not explained: {missing:?}; not exported: {stale:?}"
    );
}
