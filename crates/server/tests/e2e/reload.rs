//! Reloads while clients read: what can change changes at once, and clients notice only by what is served.

use crate::daemon::{
    Daemon, LISTEN, PATIENCE, Setup, backends, backends_and_auto, eventually, eventually_async,
};
use crate::data::noise;
use crate::flip::set;
use crate::readers::{Known, Tally, ranges, streamed, unary};
use crate::wire::{self, Narrow};
use bytes::Bytes;
use ringfetch_proto::v1;
use rustix::process::Signal;
use std::fs;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// A configuration file: keys besides the addresses, and datasets of 4 KiB blocks, each in a file of its
/// name.
pub(crate) fn file(keys: &str, datasets: &[&str]) -> String {
    let entry =
        |name: &&str| format!("  - {{name: {name}, kind: blocks, block_bytes: 4KiB, path: {name}.bin}}\n");
    let datasets: String = datasets.iter().map(entry).collect();
    format!("{LISTEN}{keys}\ndatasets:\n{datasets}")
}

/// The keys that every daemon here starts with.
pub(crate) fn engine(backend: &str) -> String {
    format!("engine: {{backend: {backend}, on_unavailable: fail, cores: 2, memory_budget: 32MiB}}")
}

pub(crate) async fn reload(daemon: &Daemon) -> Result<v1::ReloadResponse, Status> {
    let answer = daemon.admin_client().await.reload(v1::ReloadRequest {}).await;
    answer.map(tonic::Response::into_inner)
}

/// Completed reloads, by their result.
pub(crate) async fn reloads(daemon: &Daemon, result: &str) -> u64 {
    let labels = [("result", result)];
    daemon.sum("ringfetch_config_reloads_total", &labels).await
}

/// Sends SIGHUP and waits until the reload has ended.
pub(crate) async fn hang_up(daemon: &Daemon) {
    let before = reloads(daemon, "ok").await + reloads(daemon, "failed").await;
    daemon.signal(Signal::HUP);
    eventually_async("the reload is made", async || {
        let now = reloads(daemon, "ok").await + reloads(daemon, "failed").await;
        (now > before).then_some(())
    })
    .await;
}

/// (key, before, after) of each change.
pub(crate) fn told(changes: &[v1::ConfigChange]) -> Vec<(&str, &str, &str)> {
    changes
        .iter()
        .map(|change| (change.key.as_str(), change.before.as_str(), change.after.as_str()))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn datasets_come_and_go_while_they_are_read() {
    // Scenario: of three datasets under load, one is unchanged, one's file is replaced by rename, one is
    // removed, and a new one is added; by SIGHUP, on each backend. Meanwhile a response of the replaced one
    // has begun and is not read. Expectation: no read fails; every response is of one version, and successive
    // calls never return to the old one; the response that had begun ends with old bytes; listings, tags and
    // names follow; as many files are open as before.
    for backend in backends_and_auto() {
        let setup = Setup::new(backend).whole(&file(&engine(backend), &["same", "renamed", "gone"]));
        let length = 2048 * 4096;
        let contents = |name: &str, seed| {
            let bytes = noise(seed, length);
            setup.file(&format!("{name}.bin"), &bytes);
            bytes
        };
        let same = [contents("same", 1)];
        let renamed = [contents("renamed", 2), noise(3, length)];
        contents("gone", 4);
        let new = contents("new", 5);
        let daemon = setup.start();
        let tally = Tally::default();
        let known = |name, versions| Known { name, versions };
        let (same, renamed) = (known("same", &same[..]), known("renamed", &renamed[..]));

        let reloads_it = async {
            tally.more(100).await;
            let mut narrow = Narrow::connect(daemon.http, 65_535).await;
            let begun = narrow.ask_get("/v1/datasets/renamed/bytes").await;
            assert_eq!(begun.head.status, 200);
            let old_tag = begun.head.headers["etag"].clone();

            fs::write(daemon.path("next"), &renamed.versions[1]).unwrap();
            fs::rename(daemon.path("next"), daemon.path("renamed.bin")).unwrap();
            daemon.rewrite(&file(&engine(backend), &["same", "renamed", "new"]));
            hang_up(&daemon).await;
            let line = daemon.logged(&["\"reloaded\"", "\"datasets_replaced\":\"renamed\""]);
            assert!(
                line.contains("\"datasets_added\":\"new\"") && line.contains("\"datasets_removed\":\"gone\"")
            );

            let seen = tally.newest();
            eventually_async("the new bytes are read", async || {
                (tally.newest() > seen + 50).then_some(())
            })
            .await;
            let answer = daemon.http_client().get("/v1/datasets").await.json();
            let names: Vec<_> = answer["datasets"]
                .as_array()
                .unwrap()
                .iter()
                .map(|view| &view["name"])
                .collect();
            assert_eq!(names, ["new", "renamed", "same"]);
            let fresh = daemon
                .http_client()
                .get_with("/v1/datasets/renamed/bytes", &[("range", "bytes=0-9")])
                .await;
            assert_ne!(fresh.header("etag"), old_tag);
            let mut fetch = daemon.fetch().await;
            let gone = fetch.fetch_blocks(wire::blocks("gone", &[0])).await.unwrap_err();
            assert_eq!(gone.code(), Code::NotFound);
            let first = fetch.fetch_blocks(wire::blocks("new", &[0])).await.unwrap();
            assert!(first.into_inner().data == new[..4096]);

            let (body, _) = begun.rest().await;
            assert!(
                body == renamed.versions[0],
                "{backend}: the begun answer is not of the old bytes"
            );
            tally.more(100).await;
            tally.stop();
        };
        tokio::join!(
            reloads_it,
            unary(&daemon, &same, &tally, 1),
            ranges(&daemon, &same, &tally),
            unary(&daemon, &renamed, &tally, 2),
            streamed(&daemon, &renamed, &tally),
            ranges(&daemon, &renamed, &tally),
        );
        assert_eq!(daemon.status().await.read_errors_total, 0, "{backend}");
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_new_dataset_with_a_backend_of_its_own_is_no_switch() {
    // Scenario: a reload adds a dataset with its own backend; the next one changes that. Expectation: only the second is
    // counted as a switch, as at the start.
    let setup = Setup::new("mmap").whole(&file(&engine("mmap"), &["a"]));
    setup.file("a.bin", &noise(1, 4096));
    let daemon = setup.start();
    for (backend, switches) in [("pread", 0), ("mmap", 1)] {
        let new =
            format!("  - {{name: new, kind: blocks, block_bytes: 4KiB, path: a.bin, backend: {backend}}}\n");
        daemon.rewrite(&(file(&engine("mmap"), &["a"]) + &new));
        reload(&daemon).await.unwrap();
        daemon.assert_serves("new").await;
        let counted = daemon.sum("ringfetch_backend_switches_total", &[]).await;
        assert_eq!(counted, switches, "{backend}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn what_is_left_alone_keeps_its_file_and_no_file_is_leaked() {
    // Scenario: twenty reloads, each with one dataset replaced by rename, one added or removed again, and one
    // unchanged, all of them read in between. Expectation: in the end as many files are open as after the
    // first read; only those that changed are opened again; the counters continue.
    for backend in backends_and_auto() {
        let setup = Setup::new(backend).whole(&file(&engine(backend), &["same", "renamed"]));
        for name in ["same", "renamed", "extra"] {
            setup.file(&format!("{name}.bin"), &noise(9, 8 * 4096));
        }
        let daemon = setup.start();
        let mut fetch = daemon.fetch().await;
        let mut read = async |name: &str| {
            let answer = fetch
                .fetch_blocks(wire::blocks(name, &[0, 5]))
                .await
                .unwrap()
                .into_inner();
            assert_eq!((answer.data.len(), answer.errors.len()), (8192, 0), "{name}");
            answer.data
        };
        read("same").await;
        read("renamed").await;
        let before = daemon.open_files();
        for round in 0..20_u64 {
            let bytes = noise(100 + round, 8 * 4096);
            fs::write(daemon.path("next"), &bytes).unwrap();
            fs::rename(daemon.path("next"), daemon.path("renamed.bin")).unwrap();
            let extra = round % 2 == 0;
            let names: &[&str] = if extra {
                &["same", "renamed", "extra"]
            } else {
                &["same", "renamed"]
            };
            daemon.rewrite(&file(&engine(backend), names));
            let answer = reload(&daemon).await.unwrap();
            assert_eq!(
                (&answer.datasets_unchanged[..], &answer.datasets_replaced[..]),
                (&["same".to_owned()][..], &["renamed".to_owned()][..])
            );
            let come_or_gone = if extra {
                &answer.datasets_added
            } else {
                &answer.datasets_removed
            };
            assert_eq!(come_or_gone, &["extra"]);
            read("same").await;
            assert!(
                read("renamed").await[..4096] == bytes[..4096],
                "{backend}, round {round}"
            );
            if extra {
                read("extra").await;
            }
        }
        eventually(
            &format!("{backend}: {before} files are open again"),
            PATIENCE,
            || (daemon.open_files() <= before).then_some(()),
        );
        let ok = [("dataset", "same"), ("result", "ok")];
        assert_eq!(daemon.sum("ringfetch_reads_total", &ok).await, 42, "{backend}");
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_dataset_that_was_removed_leaves_the_metrics() {
    // Scenario: two datasets are read, one of them also with failures; a reload removes that one.
    // Expectation: no series names it any more; the other's continue, and the totals of the status keep its
    // reads.
    for &backend in backends() {
        let setup = Setup::new(backend).whole(&file(&engine(backend), &["same", "gone"]));
        for name in ["same", "gone"] {
            setup.file(&format!("{name}.bin"), &noise(9, 8 * 4096));
        }
        let daemon = setup.start();
        let mut fetch = daemon.fetch().await;
        for _ in 0..10 {
            for name in ["same", "gone"] {
                fetch.fetch_blocks(wire::blocks(name, &[0, 5, 99])).await.unwrap();
            }
        }
        daemon.rewrite(&file(&engine(backend), &["same"]));
        assert_eq!(reload(&daemon).await.unwrap().datasets_removed, ["gone"]);
        let scrape = eventually_async("no series of the dataset is left", async || {
            let scrape = daemon.scrape().await;
            (!scrape.text.contains("dataset=\"gone\"")).then_some(scrape)
        })
        .await;
        let counted = scrape.sum("ringfetch_reads_total", &[("dataset", "same")]);
        assert_eq!(counted, 30, "{backend}");
        let status = daemon.status().await;
        assert_eq!(
            (status.reads_total, status.read_errors_total),
            (60, 20),
            "{backend}"
        );
        daemon.stop().await;
    }
}

#[tokio::test]
async fn limits_change_at_once_and_what_cannot_is_named() {
    // Scenario: limits of requests, of connections and of a connection's memory, and the log filter change;
    // also cores, an address and the shards' queue. Expectation: the first apply to the next request, and the
    // response lists them; the others are listed as waiting for a restart: now, next time, and in the status.
    let setup = Setup::new("mmap").whole(&file(&engine("mmap"), &["blocks"]));
    setup.file("blocks.bin", &noise(9, 64 * 4096));
    let daemon = setup.start();
    let mut fetch = daemon.fetch().await;
    let request = wire::blocks("blocks", &[0, 1, 2]);
    fetch.fetch_blocks(request.clone()).await.unwrap();

    let keys = "engine: {backend: mmap, on_unavailable: fail, cores: 3, memory_budget: 32MiB}\n\
                limits: {items_per_request: 2, http_ranges: 1, connections: 1, connection_bytes: 8MiB, queued_reads: 9999}\n\
                log: {filter: debug}\nshutdown: {drain_timeout_ms: 9000}";
    daemon.rewrite(&file(keys, &["blocks"]));
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(
        told(&answer.applied),
        [
            ("limits.items_per_request", "4096", "2"),
            ("limits.connection_bytes", "32MiB", "8MiB"),
            ("limits.connections", "4096", "1"),
            ("limits.http_ranges", "64", "1"),
            ("shutdown.drain_timeout_ms", "10000", "9000"),
            ("log.filter", "info", "debug"),
        ]
    );
    let waiting = [
        ("engine.cores", "2", "3"),
        ("limits.queued_reads", "65536", "9999"),
    ];
    assert_eq!(told(&answer.needs_restart), waiting);
    assert_eq!(answer.datasets_unchanged, ["blocks"]);
    daemon.logged(&["WARN", "needs a restart", "engine.cores 2 -> 3"]);

    let status = fetch.fetch_blocks(request.clone()).await.unwrap_err();
    assert!(
        status.message().contains("limits.items_per_request"),
        "{status:?}"
    );
    let held = daemon.http_client();
    let refused = held
        .get_with("/v1/datasets/blocks/bytes", &[("range", "bytes=0-1,5-6")])
        .await;
    assert_eq!(refused.status, 400, "{refused:?}");
    // One connection per port: a new one replaces the idle `held`, which is not used again, since it may not
    // have seen the close yet.
    let second = daemon.http_client();
    assert_eq!(second.get("/livez").await.status, 200);
    daemon.logged(&["connections were closed", "evicted", "\"transport\":\"http\""]);
    daemon.logged(&["\"DEBUG\""]);

    let again = reload_on_held_connection(&daemon, &keys.replace("connections: 1,", "connections: 2,")).await;
    assert_eq!(told(&again.applied), [("limits.connections", "1", "2")]);
    assert_eq!(told(&again.needs_restart), waiting);
    drop(held);
    let last = daemon.status().await.last_reload.unwrap();
    assert!(last.successful && last.at_unix_ms > 1_600_000_000_000, "{last:?}");
    assert_eq!(told(&last.needs_restart), waiting);
    drop(fetch);
    daemon.stop().await;
}

#[tokio::test]
async fn a_limit_that_only_a_restart_allows_waits_for_it() {
    // Scenario: a larger batch, with the longer queue that it needs; a longer response, with the memory that it needs.
    // Expectation: none is applied, since the queue or the memory in force has no room: clients would be asked to try
    // again, for nothing. Reloads report all of them, and the old limits stay in force.
    let keys = |limits: &str, memory: &str| {
        format!("engine: {{backend: mmap, cores: 1, memory_budget: {memory}}}\nlimits: {{{limits}}}")
    };
    let small = keys("items_per_request: 8, queued_reads: 8", "32MiB");
    let setup = Setup::new("mmap").whole(&file(&small, &["blocks"]));
    setup.file("blocks.bin", &noise(9, 64 * 4096));
    let daemon = setup.start();
    let large = "items_per_request: 9, queued_reads: 9, response_bytes: 16MiB, connection_bytes: 64MiB";
    daemon.rewrite(&file(&keys(large, "64MiB"), &["blocks"]));
    for _ in 0..2 {
        let answer = reload(&daemon).await.unwrap();
        assert_eq!(told(&answer.applied), []);
        assert_eq!(
            told(&answer.needs_restart),
            [
                ("engine.memory_budget", "32MiB", "64MiB"),
                ("limits.queued_reads", "8", "9"),
                ("limits.response_bytes", "3MiB", "16MiB"),
                ("limits.connection_bytes", "32MiB", "64MiB"),
                ("limits.items_per_request", "8", "9"),
            ]
        );
    }
    let batch = wire::blocks("blocks", &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
    let status = daemon.fetch().await.fetch_blocks(batch).await.unwrap_err();
    assert!(
        status
            .message()
            .contains("9 items; the limit is 8 (limits.items_per_request)"),
        "{status:?}"
    );
    daemon.stop().await;
}

async fn reload_on_held_connection(daemon: &Daemon, keys: &str) -> v1::ReloadResponse {
    daemon.rewrite(&file(keys, &["blocks"]));
    reload(daemon).await.unwrap()
}

#[tokio::test]
async fn the_files_word_ends_what_was_set_at_run_time() {
    // Scenario: the backend of the engine and of a dataset and the log filter are set at run time; the file
    // is reloaded unchanged, then with another backend for each. Expectation: the file's values are in force
    // each time, and the response lists what was reverted.
    use v1::Backend::{Mmap, Pread};
    let setup = Setup::new("mmap").whole(&file(&engine("mmap"), &["a", "b"]));
    setup.file("a.bin", &noise(9, 8 * 4096));
    setup.file("b.bin", &noise(9, 8 * 4096));
    let daemon = setup.start();
    set(&daemon, Pread, None).await.unwrap();
    set(&daemon, Pread, Some("b")).await.unwrap();
    let filter = v1::SetLogLevelRequest {
        filter: "debug".to_owned(),
    };
    daemon.admin_client().await.set_log_level(filter).await.unwrap();
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(
        told(&answer.applied),
        [
            ("engine.backend", "pread", "mmap"),
            ("datasets.b.backend", "pread", "inherit"),
            ("log.filter", "debug", "info"),
        ]
    );
    let backends = async || {
        let status = daemon.status().await;
        let of = |dataset: &v1::DatasetStatus| {
            let path = dataset.read_path.clone().unwrap();
            (path.backend(), path.own_backend)
        };
        (status.backend(), of(&status.datasets[0]), of(&status.datasets[1]))
    };
    assert_eq!(backends().await, (Mmap, (Mmap, false), (Mmap, false)));

    let text = file(&engine("pread"), &["b"])
        + "  - {name: a, kind: blocks, block_bytes: 4KiB, path: a.bin, backend: mmap}\n";
    daemon.rewrite(&text);
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(
        told(&answer.applied),
        [
            ("engine.backend", "mmap", "pread"),
            ("datasets.a.backend", "inherit", "mmap")
        ]
    );
    assert_eq!(answer.datasets_unchanged, ["a", "b"]);
    assert_eq!(backends().await, (Pread, (Mmap, true), (Pread, false)));
    daemon.assert_serves("a").await;
    daemon.assert_serves("b").await;
    let again = reload(&daemon).await.unwrap();
    assert!(
        again.applied.is_empty() && again.needs_restart.is_empty(),
        "{again:?}"
    );
    daemon.stop().await;
}

#[tokio::test]
async fn an_objects_directory_that_grows_stays_and_one_that_is_replaced_does_not() {
    // Scenario: a file is added to a directory; then the directory itself is replaced, and another dataset's file is cut into
    // other blocks; then the directory's cache gets another bound; each with a reload. Expectation: the datasets stay open at
    // first, those that changed are then opened again, and the new directory's files are served.
    let layout = |open_files: u32, block_bytes: u32| {
        let objects =
            format!("{{name: objects, kind: objects, path: objects, max_open_files: {open_files}}}");
        let blocks = format!("{{name: cut, kind: blocks, block_bytes: {block_bytes}, path: cut.bin}}");
        format!(
            "{LISTEN}{}\ndatasets:\n  - {objects}\n  - {blocks}\n",
            engine("mmap")
        )
    };
    let setup = Setup::new("mmap").whole(&layout(8, 512));
    setup.file("objects/one", b"one");
    setup.file("cut.bin", &[7; 8192]);
    let daemon = setup.start();
    fs::write(daemon.path("objects/two"), "two").unwrap();
    let unchanged = reload(&daemon).await.unwrap().datasets_unchanged;
    assert_eq!(unchanged, ["cut", "objects"]);
    fs::rename(daemon.path("objects"), daemon.path("old")).unwrap();
    fs::create_dir(daemon.path("objects")).unwrap();
    fs::write(daemon.path("objects/three"), "three").unwrap();
    daemon.rewrite(&layout(8, 1024));
    let replaced = reload(&daemon).await.unwrap().datasets_replaced;
    assert_eq!(replaced, ["cut", "objects"]);
    daemon.rewrite(&layout(9, 1024));
    let replaced = reload(&daemon).await.unwrap().datasets_replaced;
    assert_eq!(replaced, ["objects"]);
    let answer = daemon
        .fetch()
        .await
        .fetch_objects(wire::objects("objects", &["three"]))
        .await
        .unwrap();
    assert_eq!(answer.into_inner().data, Bytes::from("three"));
    daemon.stop().await;
}

#[tokio::test]
async fn an_access_log_that_is_not_written_has_no_new_settings() {
    // Scenario: a sample for a log that the file turns on, by a reload, and for one that it turns off. Expectation: the
    // settings wait for the restart together with the path, since none was applied; reloads report them again.
    let text = |log: &str| file(&(engine("mmap") + "\naccess_log: " + log), &["blocks"]);
    for (before, after) in [("off", "access.log"), ("access.log", "off")] {
        let setup = Setup::new("mmap").whole(&text(&format!("{{path: {before}}}")));
        setup.file("blocks.bin", &noise(9, 4096));
        let daemon = setup.start();
        daemon.rewrite(&text(&format!("{{path: {after}, sample: 5, slow_ms: 7}}")));
        for _ in 0..2 {
            let answer = reload(&daemon).await.unwrap();
            assert_eq!(told(&answer.applied), [], "{after}");
            let mut waiting: Vec<_> = answer.needs_restart.iter().map(|change| &change.key).collect();
            waiting.sort_unstable();
            assert_eq!(
                waiting,
                ["access_log.path", "access_log.sample", "access_log.slow_ms"]
            );
        }
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_response_waits_for_the_connection_that_it_needs() {
    // Scenario: more bytes on a connection than the memory in force, and a response that needs them. Expectation: neither
    // is applied: such a response would fit on no connection.
    let keys = |limits: &str, memory: &str| {
        format!("engine: {{backend: mmap, cores: 1, memory_budget: {memory}}}\nlimits: {{{limits}}}")
    };
    let small = keys("response_bytes: 1MiB, connection_bytes: 2MiB", "32MiB");
    let setup = Setup::new("mmap").whole(&file(&small, &["blocks"]));
    setup.file("blocks.bin", &noise(9, 4096));
    let daemon = setup.start();
    let large = keys("response_bytes: 4MiB, connection_bytes: 64MiB", "64MiB");
    daemon.rewrite(&file(&large, &["blocks"]));
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(told(&answer.applied), []);
    assert_eq!(
        told(&answer.needs_restart),
        [
            ("engine.memory_budget", "32MiB", "64MiB"),
            ("limits.response_bytes", "1MiB", "4MiB"),
            ("limits.connection_bytes", "2MiB", "64MiB"),
        ]
    );
    daemon.stop().await;
}

#[tokio::test]
async fn a_dataset_whose_items_need_a_longer_response_waits_for_it() {
    // Scenario: datasets with items of 3 MiB, with the longer response and the memory that they need; then a smaller block
    // in place of the first. Expectation: refused, with the keys and the way: nobody could read them before the restart. The
    // smaller one is added.
    let start = "engine: {backend: mmap, cores: 1, memory_budget: 8MiB}";
    let setup = Setup::new("mmap").whole(&file(start, &["blocks"]));
    setup.file("blocks.bin", &noise(9, 3 << 20));
    let daemon = setup.start();
    let larger = "engine: {backend: mmap, cores: 1, memory_budget: 64MiB}\nlimits: {response_bytes: 4MiB}";
    let new = |bytes: &str| {
        let entry = format!("  - {{name: new, kind: blocks, block_bytes: {bytes}, path: blocks.bin}}\n");
        file(larger, &["blocks"]) + &entry
    };
    let vectors = "  - {name: v, kind: vectors, layout: raw, dim: 786432, dtype: f32, path: blocks.bin}\n";
    daemon.rewrite(&(new("3MiB") + vectors));
    let status = reload(&daemon).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let found = status.get_details_bad_request().unwrap().field_violations;
    let found: Vec<_> = found.iter().map(|violation| violation.field.as_str()).collect();
    assert_eq!(found, ["datasets[1].block_bytes", "datasets[2].dim"]);
    assert!(
        status.message().contains("3145728 bytes") && status.message().contains("restart"),
        "{status:?}"
    );
    assert_eq!(daemon.status().await.datasets.len(), 1);

    daemon.rewrite(&new("4KiB"));
    let answer = reload(&daemon).await.unwrap();
    assert_eq!(answer.datasets_added, ["new"]);
    let waiting: Vec<_> = answer.needs_restart.iter().map(|change| &change.key).collect();
    assert_eq!(
        waiting,
        [
            "engine.memory_budget",
            "limits.response_bytes",
            "limits.connection_bytes"
        ]
    );
    daemon.stop().await;
}
