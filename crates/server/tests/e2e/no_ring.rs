//! Where io_uring is unavailable, or parts of it: the cause and the remedy are named, the fallback is visible
//! everywhere, and a mistake in the setup does not fall back.

use crate::daemon::{Daemon, Setup};
use crate::data::plain_blocks;
use crate::seccomp::{ENOSYS, EPERM};
use crate::wire;
use ringfetch_proto::v1;

fn under_seccomp(errno: u32) -> Setup {
    let (setup, _) = plain_blocks(Setup::new("uring"), 16);
    setup.without_io_uring(errno)
}

async fn assert_falls_back(daemon: &Daemon, reason: &str) {
    let line = daemon.logged(&["WARN", "fallback"]);
    assert!(
        line.contains(reason) && line.contains("\"backend\":\"mmap\""),
        "{line}"
    );
    let line = daemon.logged(&["\"started\""]);
    assert!(
        line.contains("\"requested\":\"uring\"") && line.contains("\"backend\":\"mmap\""),
        "{line}"
    );

    let scrape = daemon.scrape().await;
    let labels = [("backend", "mmap"), ("requested", "uring")];
    let series: Vec<_> = scrape.series("ringfetch_backend_info", &labels).collect();
    assert!(series.len() == 1 && series[0].0.contains(reason), "{series:?}");

    let status = daemon.status().await;
    assert!(status.fallback && status.reason.contains(reason), "{status:?}");
    assert_eq!(
        (status.backend(), status.requested()),
        (v1::Backend::Mmap, v1::Backend::Uring)
    );
    let path = daemon.read_path("blocks").await;
    assert_eq!(
        (path.backend(), path.requested()),
        (v1::Backend::Mmap, v1::Backend::Uring)
    );
    assert!(path.reason.contains(reason) && !path.direct_io, "{path:?}");
    let mirrored = daemon.http_client().get("/v1/status").await.json();
    let mirrored = &mirrored["datasets"][0];
    assert_eq!(mirrored["requested"], "uring");
    assert_eq!(mirrored["reason"], path.reason);

    daemon.assert_serves("blocks").await;
    let scrape = daemon.scrape().await;
    assert!(scrape.sum("ringfetch_reads_total", &[("backend", "mmap"), ("result", "ok")]) >= 2);
}

#[tokio::test]
async fn a_seccomp_filter_means_mmap_for_all_to_see() {
    // Scenario: a filter that returns EPERM (like Docker) or ENOSYS (like Podman) for io_uring_setup, and
    // `on_unavailable: mmap`. Expectation: mmap serves; the log warns; metric, status and dataset report what
    // was requested and the reason.
    for (errno, reason) in [
        (EPERM, "a seccomp filter forbids io_uring"),
        (ENOSYS, "a seccomp filter answers ENOSYS"),
    ] {
        let daemon = under_seccomp(errno).set("engine.on_unavailable", "mmap").start();
        assert_falls_back(&daemon, reason).await;
        daemon.stop().await;
    }
}

#[test]
fn an_engine_asked_for_by_name_fails_with_the_remedy() {
    // Scenario: the same filters, and `on_unavailable: fail`; a start, and a check of the configuration.
    // Expectation: exit code 3 at once, the key, the cause, and how to allow io_uring.
    for errno in [EPERM, ENOSYS] {
        let setup = under_seccomp(errno).set("engine.on_unavailable", "fail");
        for run in [setup.refused(), setup.run(&["check-config", "--open"])] {
            run.with(3, &["engine.backend: uring", "seccomp filter", "io_uring_setup"]);
        }
    }
}

#[test]
fn a_dataset_that_asks_for_the_ring_fails_with_its_own_key() {
    // Scenario: a filter, `on_unavailable: fail`, mmap for the engine and uring for one dataset; a start, and a check of
    // the configuration. Expectation: exit code 3, and the key is that dataset's, not the engine's.
    let (setup, _) = plain_blocks(Setup::new("mmap"), 1);
    setup.file("own.bin", &[7; 4096]);
    let setup = setup
        .dataset(&["{name: own, kind: blocks, block_bytes: 4KiB, path: own.bin, backend: uring}"])
        .without_io_uring(EPERM);
    for run in [setup.refused(), setup.run(&["check-config", "--open"])] {
        run.with(3, &["datasets.own.backend: uring: a seccomp filter"]);
    }
}

#[test]
fn a_check_of_the_configuration_tells_of_a_fallback() {
    // Scenario: a filter, `on_unavailable: mmap`, and a check of the configuration with its files. Expectation: exit
    // code 0, since the daemon would serve, and a line with what would run and the reason, for the engine and for a
    // dataset with a backend of its own; with mmap no such line.
    let (setup, _) = plain_blocks(Setup::new("uring").set("engine.on_unavailable", "mmap"), 1);
    setup.file("own.bin", &[7; 4096]);
    let setup =
        setup.dataset(&["{name: own, kind: blocks, block_bytes: 4KiB, path: own.bin, backend: auto}"]);
    let check = ["check-config", "--open"];
    let said = setup.without_io_uring(EPERM).run(&check);
    let reason = "mmap would run: a seccomp filter forbids io_uring";
    let engine = format!("engine.backend is uring, and {reason}");
    let dataset = format!("datasets.own.backend is auto, and {reason}");
    said.with(0, &[&engine, &dataset]);
    let (mmap, _) = plain_blocks(Setup::new("mmap"), 1);
    let said = mmap.without_io_uring(EPERM).run(&check);
    assert_eq!((said.code, said.said.as_str()), (Some(0), ""));
}

#[tokio::test]
async fn backends_without_a_ring_do_not_mind() {
    // Scenario: the filter, and mmap or pread configured. Expectation: they serve, and nothing counts as a
    // fallback.
    for backend in ["mmap", "pread"] {
        let daemon = under_seccomp(EPERM).set("engine.backend", backend).start();
        assert!(!daemon.status().await.fallback);
        daemon.assert_serves("blocks").await;
        let log = daemon.log().join("\n");
        assert!(!log.contains("WARN"), "{log}");
        daemon.stop().await;
    }
}

#[tokio::test]
#[ignore = "needs io_uring"]
async fn a_limit_of_open_files_that_is_too_low_never_falls_back() {
    // Scenario: every limit of open files from too few for anything to enough, with `on_unavailable: mmap`.
    // Expectation: either the daemon serves on uring, or it ends with a message about descriptors; it never
    // falls back silently. At some limit it is the ring that is unavailable.
    let mut refused_by_ring = 0;
    let mut served = false;
    for limit in 4..64 {
        let (setup, _) = plain_blocks(Setup::new("uring"), 16);
        let nofile = format!("--nofile={limit}");
        let setup = setup
            .set("engine.on_unavailable", "mmap")
            .through(&["prlimit", &nofile]);
        match setup.start_or_refused() {
            Ok(daemon) => {
                let status = daemon.status().await;
                assert_eq!(
                    (status.backend(), status.fallback),
                    (v1::Backend::Uring, false),
                    "at {limit}"
                );
                served = true;
                break;
            }
            Err(refused) => {
                assert!(matches!(refused.code, Some(3 | 127)), "at {limit}: {refused:?}");
                let told = [
                    "descriptor",
                    "open files",
                    "open-file",
                    "cannot open shared object",
                ];
                assert!(
                    told.iter().any(|word| refused.said.contains(word)),
                    "at {limit}: {refused:?}"
                );
                assert!(
                    !refused.said.contains("fallback") && !refused.said.contains("panicked"),
                    "{refused:?}"
                );
                refused_by_ring += u32::from(refused.said.contains("engine.backend: uring"));
            }
        }
    }
    assert!(
        served && refused_by_ring > 0,
        "{refused_by_ring} refusals by the ring; served: {served}"
    );
}

#[tokio::test]
#[ignore = "needs io_uring"]
async fn a_daemon_that_may_hardly_write_files_has_the_ring() {
    // Scenario: a process that may write files of at most 512 bytes (RLIMIT_FSIZE, LimitFSIZE in systemd), enough for
    // the addresses that this test reads, and uring without a fallback. Expectation: it serves on uring, since reads
    // need no file to be written.
    let (setup, _) = plain_blocks(Setup::new("uring"), 16);
    let daemon = setup.through(&["prlimit", "--fsize=512"]).start();
    assert_eq!(daemon.status().await.backend(), v1::Backend::Uring);
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

#[tokio::test]
#[ignore = "needs root and io_uring"]
async fn without_lockable_memory_it_goes_on_unregistered_and_says_so() {
    // Scenario: a user without privileges, 64 KiB of lockable memory and 32 MiB of response memory to
    // register. Expectation: uring serves, and the log says that the memory is not registered and how to fix
    // it; with `registered_buffers: false` it says nothing.
    // Locked memory is counted over all processes of a user, so no other process may run as this one.
    let user = (100_000 + std::process::id()).to_string();
    for registered in ["true", "false"] {
        let (setup, bytes) = plain_blocks(Setup::new("uring").open_to_all(), 16);
        let daemon = setup
            .set("engine.uring.registered_buffers", registered)
            .through(&[
                "prlimit",
                "--memlock=65536",
                "setpriv",
                "--reuid",
                &user,
                "--regid",
                &user,
                "--clear-groups",
            ])
            .start();
        let answer = daemon
            .fetch()
            .await
            .fetch_blocks(wire::blocks("blocks", &[0, 15]))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(answer.data, [&bytes[..4096], &bytes[15 * 4096..]].concat());
        assert_eq!(daemon.status().await.backend(), v1::Backend::Uring);
        if registered == "true" {
            let line = daemon.logged(&["WARN", "not registered with the ring"]);
            assert!(
                line.contains("RLIMIT_MEMLOCK") && line.contains("registered_buffers: false"),
                "{line}"
            );
        } else {
            assert!(!daemon.log().join("\n").contains("WARN"), "{:?}", daemon.log());
        }
        daemon.stop().await;
    }
}
