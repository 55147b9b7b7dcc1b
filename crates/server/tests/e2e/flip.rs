//! Switches of the engine's backend while clients read: no read fails or is wrong, and an unavailable backend
//! changes nothing.

use crate::daemon::{Daemon, LISTEN, Setup};
use crate::data::{noise, plain_blocks};
use crate::readers::{Known, Tally, ranges, streamed, unary};
use crate::seccomp::EPERM;
use crate::wire;
use ringfetch_proto::v1;
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// A switch, of the engine or of one dataset.
pub(crate) async fn set(
    daemon: &Daemon,
    backend: v1::Backend,
    dataset: Option<&str>,
) -> Result<v1::SetBackendResponse, Status> {
    let request = v1::SetBackendRequest {
        backend: backend.into(),
        dataset: dataset.map(str::to_owned),
    };
    let answer = daemon.admin_client().await.set_backend(request).await;
    answer.map(tonic::Response::into_inner)
}

async fn clear(daemon: &Daemon, dataset: &str) -> Result<v1::ClearBackendResponse, Status> {
    let request = v1::ClearBackendRequest {
        dataset: dataset.to_owned(),
    };
    let answer = daemon.admin_client().await.clear_backend(request).await;
    answer.map(tonic::Response::into_inner)
}

/// A dataset's (backend, requested backend, whether it has its own).
async fn reads(daemon: &Daemon, dataset: &str) -> (v1::Backend, v1::Backend, bool) {
    let path = daemon.read_path(dataset).await;
    (path.backend(), path.requested(), path.own_backend)
}

/// A second dataset next to `blocks`.
fn with_other(setup: Setup) -> Setup {
    setup.file("other.bin", &noise(8, 64 * 4096));
    setup.dataset(&["{name: other, kind: blocks, block_bytes: 4KiB, path: other.bin}"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flip_under_load_fails_no_read() {
    use v1::Backend::{Mmap, Pread};
    flips_under_load(&["pread", "mmap"], &[Mmap, Pread, Mmap, Pread, Mmap, Pread]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs io_uring"]
async fn a_flip_to_or_from_rings_under_load_fails_no_read() {
    use v1::Backend::{Auto, Mmap, Pread, Uring};
    let way = [
        Mmap, Uring, Auto, Mmap, Pread, Uring, Pread, Auto, Pread, Mmap, Auto, Uring,
    ];
    flips_under_load(&["uring", "mmap", "auto", "pread"], &way).await;
}

/// Scenario: calls, a pipelined stream and long HTTP responses on one dataset while the engine goes through
/// every pair of `backends`, three times to each. Expectation: every response is complete and correct;
/// status, dataset and metrics follow; the reads of each backend are counted separately.
async fn flips_under_load(backends: &[&str], way: &[v1::Backend]) {
    let (setup, bytes) = plain_blocks(Setup::new(backends[0]), 1024);
    let daemon = setup.start();
    let (versions, tally) = ([bytes], Tally::default());
    let known = Known {
        name: "blocks",
        versions: &versions,
    };
    let first = *way.last().unwrap();
    let flips = async {
        let mut before = first;
        for &backend in way {
            tally.more(100).await;
            let answer = set(&daemon, backend, None).await.unwrap();
            assert_eq!((answer.previous(), answer.backend()), (before, backend));
            assert!(!answer.reason.is_empty());
            assert_eq!(reads(&daemon, "blocks").await, (backend, backend, false));
            before = backend;
        }
        tally.more(100).await;
        tally.stop();
    };
    tokio::join!(
        flips,
        unary(&daemon, &known, &tally, 1),
        unary(&daemon, &known, &tally, 500),
        streamed(&daemon, &known, &tally),
        ranges(&daemon, &known, &tally),
    );
    assert!(
        tally.answers() > 100 * (way.len() as u64 + 1),
        "{}",
        tally.answers()
    );
    let status = daemon.status().await;
    assert_eq!(
        (status.backend(), status.fallback, status.read_errors_total),
        (first, false, 0)
    );
    let scrape = daemon.scrape().await;
    for &backend in backends {
        let ok = [("backend", backend), ("dataset", "blocks"), ("result", "ok")];
        assert!(
            scrape.sum("ringfetch_reads_total", &ok) >= 100,
            "{backend}: {}",
            scrape.text
        );
        let switches = [("backend", backend), ("result", "ok")];
        let counted = scrape.sum("ringfetch_backend_switches_total", &switches);
        // Three times each.
        assert_eq!(counted, 3, "{backend}");
    }
    let failed = [("result", "failed")];
    assert_eq!(scrape.sum("ringfetch_backend_switches_total", &failed), 0);
    let info: Vec<_> = scrape.series("ringfetch_backend_info", &[]).collect();
    assert!(
        info.len() == 1 && info[0].0.contains(&format!("backend=\"{}\"", backends[0])),
        "{info:?}"
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dataset_is_flipped_by_itself() {
    // Scenario: one of two datasets gets its own backend under load, the engine is switched, the dataset's
    // backend is cleared. Expectation: each switch affects exactly what it names, and reports the datasets
    // that it did not affect; no read fails.
    use v1::Backend::{Mmap, Pread};
    let (setup, bytes) = plain_blocks(Setup::new("mmap"), 256);
    let daemon = with_other(setup).start();
    let (versions, tally) = ([bytes], Tally::default());
    let known = Known {
        name: "blocks",
        versions: &versions,
    };
    let other_versions = [noise(8, 64 * 4096)];
    let other = Known {
        name: "other",
        versions: &other_versions,
    };
    let flips = async {
        tally.more(50).await;
        let answer = set(&daemon, Pread, Some("blocks")).await.unwrap();
        assert_eq!((answer.previous(), answer.backend()), (Mmap, Pread));
        assert_eq!(reads(&daemon, "blocks").await, (Pread, Pread, true));
        assert_eq!(reads(&daemon, "other").await, (Mmap, Mmap, false));
        tally.more(50).await;
        for backend in [Pread, Mmap] {
            let answer = set(&daemon, backend, None).await.unwrap();
            assert_eq!(answer.datasets_with_own, ["blocks"]);
            assert_eq!(reads(&daemon, "blocks").await, (Pread, Pread, true));
            assert_eq!(reads(&daemon, "other").await, (backend, backend, false));
            tally.more(50).await;
        }
        let answer = clear(&daemon, "blocks").await.unwrap();
        assert_eq!((answer.previous(), answer.backend()), (Pread, Mmap));
        assert_eq!(reads(&daemon, "blocks").await, (Mmap, Mmap, false));
        tally.more(50).await;
        tally.stop();
    };
    tokio::join!(
        flips,
        unary(&daemon, &known, &tally, 1),
        streamed(&daemon, &known, &tally),
        unary(&daemon, &other, &tally, 3),
    );
    assert_eq!(daemon.status().await.read_errors_total, 0);
    let mirrored = daemon.http_client().get("/v1/status").await.json();
    assert_eq!(mirrored["datasets"][0]["own_backend"], false);
    daemon.stop().await;
}

#[tokio::test]
async fn a_switch_that_cannot_be_meant_is_refused() {
    // Scenario: no backend, an unknown one, a dataset that does not exist, an empty name. Expectation:
    // INVALID_ARGUMENT or NOT_FOUND that names the field; nothing is switched.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 16);
    let daemon = setup.start();
    let mut admin = daemon.admin_client().await;
    for backend in [0, 77] {
        let request = v1::SetBackendRequest {
            backend,
            dataset: None,
        };
        let status = admin.set_backend(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert_eq!(
            status.get_details_bad_request().unwrap().field_violations[0].field,
            "backend"
        );
    }
    let status = set(&daemon, v1::Backend::Pread, Some("")).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    for status in [
        set(&daemon, v1::Backend::Pread, Some("nothing"))
            .await
            .unwrap_err(),
        clear(&daemon, "nothing").await.unwrap_err(),
        clear(&daemon, "").await.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::NotFound, "{status:?}");
        assert!(status.message().contains("there are: blocks"), "{status:?}");
    }
    assert_eq!(daemon.status().await.backend(), v1::Backend::Mmap);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_cannot_be_had_leaves_the_old_one() {
    // Scenario: io_uring is forbidden, mmap serves under load, and uring and auto are requested, for all
    // datasets and for one. Expectation: FAILED_PRECONDITION with the cause; mmap continues without a failed
    // read; metric and log report it.
    use v1::Backend::{Auto, Mmap, Uring};
    let (setup, bytes) = plain_blocks(Setup::new("mmap"), 64);
    let daemon = setup.without_io_uring(EPERM).start();
    let (versions, tally) = ([bytes], Tally::default());
    let known = Known {
        name: "blocks",
        versions: &versions,
    };
    let flips = async {
        tally.more(20).await;
        for (backend, dataset) in [(Uring, None), (Auto, None), (Uring, Some("blocks"))] {
            let status = set(&daemon, backend, dataset).await.unwrap_err();
            assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
            assert!(status.message().contains("seccomp"), "{status:?}");
            assert_eq!(reads(&daemon, "blocks").await, (Mmap, Mmap, false));
            tally.more(20).await;
        }
        tally.stop();
    };
    tokio::join!(
        flips,
        unary(&daemon, &known, &tally, 1),
        streamed(&daemon, &known, &tally)
    );
    daemon.logged(&["WARN", "backend switch failed", "seccomp"]);
    let scrape = daemon.scrape().await;
    let failed = |backend| [("backend", backend), ("result", "failed")];
    assert_eq!(
        scrape.sum("ringfetch_backend_switches_total", &failed("uring")),
        2
    );
    assert_eq!(scrape.sum("ringfetch_backend_switches_total", &failed("auto")), 1);
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

/// The engine on mmap; by the configuration one dataset on pread and one on uring.
fn own_backends(on_unavailable: &str) -> Setup {
    let setup = Setup::new("mmap").set("engine.on_unavailable", on_unavailable);
    let (setup, _) = plain_blocks(setup, 16);
    ["pread", "uring"].into_iter().fold(setup, |setup, backend| {
        let (name, word) = (format!("name: {backend}"), format!("backend: {backend}"));
        setup.dataset(&[
            &name,
            "kind: blocks",
            "block_bytes: 4KiB",
            "path: blocks.bin",
            &word,
        ])
    })
}

#[tokio::test]
#[ignore = "needs io_uring"]
async fn a_dataset_has_a_backend_of_its_own_from_the_start() {
    // Scenario: datasets with their own backends, uring among them. Expectation: each is read by its own.
    use v1::Backend::{Mmap, Pread, Uring};
    let daemon = own_backends("fail").start();
    assert_eq!(reads(&daemon, "blocks").await, (Mmap, Mmap, false));
    assert_eq!(reads(&daemon, "pread").await, (Pread, Pread, true));
    assert_eq!(reads(&daemon, "uring").await, (Uring, Uring, true));
    for dataset in ["blocks", "pread", "uring"] {
        daemon.assert_serves(dataset).await;
    }
    let mut fetch = daemon.fetch().await;
    fetch
        .fetch_blocks(wire::blocks("uring", &[1, 5, 9]))
        .await
        .unwrap();
    let scrape = daemon.scrape().await;
    let by_ring = [("backend", "uring"), ("dataset", "uring")];
    assert!(
        scrape.sum("ringfetch_reads_total", &by_ring) >= 5,
        "{}",
        scrape.text
    );
    daemon.stop().await;
}

#[tokio::test]
async fn a_datasets_own_backend_falls_back_or_is_refused() {
    // Scenario: io_uring is forbidden, and a dataset requests it; it is switched, and a reload returns to the
    // file. The engine requests it, and datasets lose a backend of their own, by call and by reload. Expectation: depending
    // on `on_unavailable`, it falls back to mmap, which is visible everywhere and not counted as a successful switch, nor
    // what loses its own as a failed one; or startup fails and names its key.
    use v1::Backend::{Mmap, Pread, Uring};
    let daemon = own_backends("mmap").without_io_uring(EPERM).start();
    assert_eq!(reads(&daemon, "pread").await, (Pread, Pread, true));
    daemon.logged(&["WARN", "fallback", "\"dataset\":\"uring\"", "seccomp"]);
    assert_eq!(reads(&daemon, "uring").await, (Mmap, Uring, true));
    daemon.assert_serves("uring").await;
    set(&daemon, Pread, Some("uring")).await.unwrap();
    crate::reload::reload(&daemon).await.unwrap();
    assert_eq!(reads(&daemon, "uring").await, (Mmap, Uring, true));
    let scrape = daemon.scrape().await;
    for (result, count) in [("ok", 0), ("failed", 1)] {
        let labels = [("backend", "uring"), ("result", result)];
        let counted = scrape.sum("ringfetch_backend_switches_total", &labels);
        assert_eq!(counted, count, "{result}");
    }
    daemon.stop().await;
    let engine = own_backends("mmap").set("engine.backend", "uring");
    let daemon = engine.without_io_uring(EPERM).start();
    clear(&daemon, "pread").await.unwrap();
    set(&daemon, Pread, Some("blocks")).await.unwrap();
    crate::reload::reload(&daemon).await.unwrap();
    assert_eq!(reads(&daemon, "blocks").await, (Mmap, Uring, false));
    let scrape = daemon.scrape().await;
    let switches = |labels: &[(&str, &str)]| scrape.sum("ringfetch_backend_switches_total", labels);
    assert_eq!(switches(&[("result", "failed")]), 0);
    assert_eq!(switches(&[("backend", "mmap"), ("result", "ok")]), 2);
    assert_eq!(switches(&[("backend", "pread"), ("result", "ok")]), 2);
    daemon.stop().await;
    let refused = own_backends("fail").without_io_uring(EPERM).start_or_refused();
    let refused = refused.err().expect("a refusal");
    refused.with(3, &["datasets.uring.backend", "seccomp"]);
}

#[tokio::test]
async fn a_reload_that_forbids_a_fallback_in_use_is_refused() {
    // Scenario: io_uring is forbidden, a dataset requests it and has mmap; a reload sets `on_unavailable: fail`, and then also
    // another backend for the dataset. Expectation: refused, since the next start would be, with key and cause; the latter waits
    // for the restart.
    let file = |on_unavailable: &str, own: &str| {
        format!(
            "{LISTEN}engine: {{backend: mmap, cores: 1, memory_budget: 32MiB, on_unavailable: {on_unavailable}}}\n\
             datasets: [{{name: own, kind: blocks, block_bytes: 4KiB, path: own.bin, backend: {own}}}]"
        )
    };
    let setup = Setup::new("mmap").whole(&file("mmap", "uring"));
    setup.file("own.bin", &noise(9, 4096));
    let daemon = setup.without_io_uring(EPERM).start();
    daemon.rewrite(&file("fail", "uring"));
    let status = crate::reload::reload(&daemon).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    let (key, cause) = ("datasets.own.backend: ", "seccomp");
    assert!(
        status.message().contains(key) && status.message().contains(cause),
        "{status:?}"
    );
    daemon.rewrite(&file("fail", "mmap"));
    let answer = crate::reload::reload(&daemon).await.unwrap();
    let waits: Vec<_> = answer.needs_restart.iter().map(|change| &change.key).collect();
    assert_eq!(waits, ["engine.on_unavailable"]);
    daemon.stop().await;
}

#[tokio::test]
#[ignore = "needs io_uring"]
async fn a_switch_back_to_rings_that_run_takes_no_descriptors() {
    // Scenario: a daemon on rings switches to mmap; it has as many files open as it may; it switches back, and so does one
    // dataset. Expectation: both succeed, since the rings are still there.
    use v1::Backend::{Auto, Mmap, Uring};
    let (setup, _) = plain_blocks(Setup::new("uring"), 16);
    let daemon = with_other(setup).start();
    let mut admin = daemon.admin_client().await;
    let mut set = async |backend: v1::Backend, dataset: Option<&str>| {
        let request = v1::SetBackendRequest {
            backend: backend.into(),
            dataset: dataset.map(str::to_owned),
        };
        admin.set_backend(request).await
    };
    set(Mmap, None).await.unwrap();
    let limit = getrlimit(Resource::Nofile);
    let lower = Rlimit {
        current: Some(8),
        ..limit
    };
    prlimit(Some(daemon.pid()), Resource::Nofile, lower).unwrap();
    set(Uring, None).await.unwrap();
    set(Auto, Some("other")).await.unwrap();
    prlimit(Some(daemon.pid()), Resource::Nofile, limit).unwrap();
    assert_eq!(reads(&daemon, "blocks").await, (Uring, Uring, false));
    assert_eq!(reads(&daemon, "other").await, (Auto, Auto, true));
    daemon.stop().await;
}
