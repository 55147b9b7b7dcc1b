//! Careless and hostile clients (`crates/adversary`) against the daemon, from another address than the
//! victim's and from the same one. Asserted are counts, memory and who is served; `bench/adversary.py`
//! measures times.

use crate::daemon::{Daemon, PATIENCE, Setup, eventually_async};
use crate::data::plain_blocks;
use adversary::cases::floods::Kind;
use adversary::{Counts, Hold, Tally, Target, cases};
use ringfetch_client::Client;
use std::future::Future;
use std::io;

const PLACES: [&str; 2] = ["127.0.0.2", "127.0.0.1"];

fn target(daemon: &Daemon, from: &str) -> Target {
    let target = Target::new(daemon.grpc, daemon.http, daemon.admin, "blocks", 1024, 4096);
    target.expect("loopback").from(from.parse().expect("an address"))
}

/// Waits until `seen` returns true. The panic shows the counts, and with them what the attackers could not do.
async fn happens(tally: &Tally, seen: impl FnMut(&Counts) -> bool) {
    // An attack on a busy machine takes longer than most.
    let waited = tokio::time::timeout(4 * PATIENCE, tally.wait_until(seen)).await;
    assert!(waited.is_ok(), "not seen in time: {:?}", tally.counts());
}

/// Attacks until `seen` returns true for the tally, then runs `meanwhile`, then ends the attack.
async fn during<Fut>(
    tally: &Tally,
    attack: impl FnOnce(Hold, Tally) -> Fut,
    seen: impl FnMut(&Counts) -> bool,
    meanwhile: impl AsyncFnOnce(),
) where
    Fut: Future<Output = io::Result<()>> + Send + 'static,
{
    let (hold, release) = Hold::until_released();
    let attack = tokio::spawn(attack(hold, tally.clone()));
    happens(tally, seen).await;
    meanwhile().await;
    drop(release);
    attack.await.expect("no panic").expect("it could attack");
}

/// The same with a flood of one connection.
async fn flood(
    target: &Target,
    kind: Kind,
    tally: &Tally,
    seen: impl FnMut(&Counts) -> bool,
    meanwhile: impl AsyncFnOnce(),
) {
    let (target, options) = (target.clone(), cases::floods::Options { kind, connections: 1 });
    let attack = |hold, tally| async move { cases::floods::run(&target, &options, &hold, &tally).await };
    during(tally, attack, seen, meanwhile).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_never_end_hold_no_more_than_their_memory() {
    // Scenario: 2,000 calls send 512 KiB each of a request and never end it, with 8 MiB of request memory.
    // Expectation: the daemon grows by little more than that, refuses what exceeds it, and serves others,
    // also from the same address.
    for from in PLACES {
        let (setup, _) = plain_blocks(Setup::new("pread"), 1024);
        let daemon = setup
            .set("limits.request_bytes", "640KiB")
            .set("limits.request_memory", "8MiB")
            .start();
        daemon.assert_serves("blocks").await;
        let before = daemon.resident_mib();
        let tally = Tally::default();
        let target = target(&daemon, from);
        let options = cases::partial_bodies::Options {
            connections: 10,
            calls: 200,
            announced_bytes: (512 << 10) + 1,
            body_bytes: 512 << 10,
        };
        during(
            &tally,
            |hold, tally| async move { cases::partial_bodies::run(&target, &options, &hold, &tally).await },
            |counts| counts.calls >= 2000 && counts.refused_total() >= 100,
            async || {
                for _ in 0..20 {
                    daemon.assert_serves("blocks").await;
                }
                let grown = daemon.resident_mib() - before;
                // Its request memory, and the windows and buffers of ten connections.
                assert!(grown <= 8.0 + 32.0, "{from}: {grown} MiB");
            },
        )
        .await;
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buffers_that_few_bytes_pin_are_bounded() {
    // Scenario: with room for 1,024 calls in request memory, eight clients pin buffers with frames of a byte, of 300 bytes and of
    // 2 KiB on streams that are not read, and come back. Expectation: they are closed for memory, the daemon grows by no more than
    // those calls may keep three times and what eight connections have in buffers, and others are served.
    for (streams, frame_bytes) in [(1, 1), (16, 300), (16, 2048)] {
        let (setup, _) = plain_blocks(Setup::new("pread"), 1024);
        let daemon = setup
            .set("limits.request_bytes", "16KiB")
            .set("limits.request_memory", "4MiB")
            .start();
        daemon.assert_serves("blocks").await;
        let before = daemon.resident_mib();
        let tally = Tally::default();
        let target = target(&daemon, "127.0.0.2");
        let options = cases::pinned_buffers::Options {
            connections: 8,
            kind: cases::pinned_buffers::Kind::Data,
            streams,
            frame_bytes,
        };
        during(
            &tally,
            |hold, tally| async move { cases::pinned_buffers::run(&target, &options, &hold, &tally).await },
            |counts| counts.closed.values().sum::<u64>() >= 16,
            async || {
                daemon.assert_serves("blocks").await;
                let grown = daemon.resident_mib() - before;
                assert!(grown <= 8.0 + 32.0, "{frame_bytes}: {grown} MiB");
                assert!(daemon.closed("grpc", "memory").await > 0);
            },
        )
        .await;
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_of_http2_that_never_end_end_their_connections() {
    // Scenario: heads that do not end, beside an open stream, and go on slowly; ones that go on quickly. Expectation: the connections
    // are closed, for the time and for a flood, and others are served meanwhile.
    let (setup, _) = plain_blocks(Setup::new("pread"), 1024);
    let daemon = setup.set("timeouts.head_ms", "300").start();
    let (slow, quick) = (Tally::default(), Tally::default());
    let target = target(&daemon, "127.0.0.2");
    let options = cases::half_open::Options {
        connections: 20,
        kinds: vec![cases::half_open::Kind::SlowHttp2Head],
        calls: 0,
        once: true,
    };
    let of_slow = target.clone();
    during(
        &slow,
        |hold, tally| async move { cases::half_open::run(&of_slow, &options, &hold, &tally).await },
        |counts| counts.connections >= 20 && counts.connections_open == 0,
        async || assert!(daemon.closed("grpc", "head").await >= 20),
    )
    .await;
    flood(
        &target,
        Kind::Http2LongHead,
        &quick,
        |counts| !counts.closed.is_empty(),
        async || {
            daemon.has_closed("grpc", "flood").await;
            daemon.assert_serves("blocks").await;
        },
    )
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn header_fields_that_are_references_are_served_up_to_the_limit() {
    // Scenario: requests with as many fields as are allowed, each a byte, and ones whose 8 KiB of such bytes are 30 MB decoded.
    // Expectation: the former are served, the latter end their connections; others are served meanwhile.
    let (setup, _) = plain_blocks(Setup::new("pread"), 1024);
    let daemon = setup.start();
    let target = target(&daemon, "127.0.0.2");
    let (within, over) = (Tally::default(), Tally::default());
    flood(
        &target,
        Kind::IndexedHeaders,
        &within,
        |counts| counts.answers >= 500,
        async || {
            daemon.assert_serves("blocks").await;
        },
    )
    .await;
    assert!(within.counts().closed.is_empty(), "{within:?}");
    flood(
        &target,
        Kind::IndexedHeadersOver,
        &over,
        |counts| counts.closed.values().sum::<u64>() >= 10,
        async || daemon.assert_serves("blocks").await,
    )
    .await;
    assert!(daemon.closed("grpc", "flood").await >= 10);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_that_open_and_close_all_the_time_stop_nobody() {
    // Scenario: a client with 250 open requests changes the windows of all of them some thousand times. Expectation: each change is
    // acknowledged, the connection goes on, and others are served meanwhile.
    let (setup, _) = plain_blocks(Setup::new("pread"), 1024);
    let daemon = setup.start();
    let target = target(&daemon, "127.0.0.2");
    let tally = Tally::default();
    let acknowledged = |counts: &Counts| counts.frames_sent >= 5000 && counts.bytes_received >= 9 * 5000;
    flood(&target, Kind::SettingsWindows, &tally, acknowledged, async || {
        daemon.assert_serves("blocks").await;
    })
    .await;
    let counts = tally.counts();
    assert_eq!((counts.connections, counts.calls), (1, 250), "{counts:?}");
    assert!(
        counts.closed.is_empty() && counts.refused.is_empty(),
        "{counts:?}"
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paced_reader_compares_what_it_gets() {
    // Scenario: a reader at a steady rate that expects the blocks' pattern, and one that expects another. Expectation: all answers of
    // the former are right, all of the latter wrong.
    let setup = Setup::new("pread");
    ringfetch_pattern::write_blocks(&setup.path("blocks.bin"), 9, 1024 * 4096, &mut |_| true).unwrap();
    let daemon = setup
        .dataset(&["{name: blocks, kind: blocks, block_bytes: 4KiB, path: blocks.bin}"])
        .start();
    let options = cases::paced::Options {
        rate: 1000.0,
        beside_token: None,
        beside_calls: 0,
        beside_blocks: 0,
    };
    for (seed, is_right) in [(9, true), (10, false)] {
        let target = Target {
            seed: Some(seed),
            ..target(&daemon, "127.0.0.1")
        };
        let read = async || daemon.sum("ringfetch_batch_items_count", &[]).await;
        let before = read().await;
        let (hold, release) = Hold::until_released();
        let options = options.clone();
        let run =
            tokio::spawn(async move { cases::paced::run(&target, &options, &hold, &Tally::default()).await });
        eventually_async("some is read", async || {
            (read().await >= before + 5).then_some(())
        })
        .await;
        drop(release);
        let figures = run.await.expect("no panic").expect("it could read");
        let wrong: u64 = figures.failed.values().sum();
        assert_eq!((figures.ok > 0, wrong > 0), (is_right, !is_right), "{figures:?}");
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root, /dev/fuse and io_uring"]
async fn a_herd_on_one_cold_block_is_one_read_a_shard() {
    // Scenario: a disk that holds its reads; 1,000 calls for one block on 50 connections; once all have
    // arrived, the disk continues. Expectation: the disk serves at most one read for each of the two shards,
    // and all responses are the same and correct.
    for backend in ["uring", "auto"] {
        let directory = tempfile::tempdir().unwrap();
        let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
        std::fs::create_dir_all(&source).unwrap();
        std::fs::create_dir_all(&mountpoint).unwrap();
        ringfetch_pattern::write_blocks(&source.join("blocks.bin"), 9, 1024 * 4096, &mut |_| true).unwrap();
        let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
        let path = format!("path: {}", disk.path().join("blocks.bin").display());
        let setup =
            Setup::new(backend).dataset(&["name: blocks", "kind: blocks", "block_bytes: 4KiB", &path]);
        let daemon = setup.set("engine.cores", "2").start();
        disk.reset();
        disk.hold();
        let tally = Tally::default();
        let mut target = target(&daemon, "127.0.0.2");
        target.seed = Some(9);
        let options = cases::herd::Options {
            callers: 1000,
            connections: 50,
            block: 500,
        };
        during(
            &tally,
            |hold, tally| async move { cases::herd::run(&target, &options, &hold, &tally).await },
            |counts| counts.calls >= 1000,
            async || {
                eventually_async("all have come", async || {
                    (daemon.sum("ringfetch_batch_items_count", &[]).await >= 1000).then_some(())
                })
                .await;
                disk.release();
                happens(&tally, |counts| counts.answers >= 1000).await;
            },
        )
        .await;
        let (counts, reads) = (tally.counts(), disk.records());
        assert_eq!(counts.answers_wrong, 0, "{backend}");
        let of_the_block = reads
            .iter()
            .filter(|read| read.overlaps(500 * 4096, 4096))
            .count();
        assert!(of_the_block <= 2, "{backend}: {of_the_block} reads");
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root, /dev/fuse and io_uring"]
async fn a_server_of_files_that_does_not_answer_stops_no_other_dataset() {
    // Scenario: a disk that answers no query for attributes, which a network file system or FUSE daemon may
    // take any time for; its cached blocks are read, in a batch that a shard serves. Expectation: meanwhile
    // another dataset is served on the same core; once the disk answers, its blocks arrive too.
    for (backend, direct_io) in [("auto", "preferred"), ("uring", "off")] {
        let directory = tempfile::tempdir().unwrap();
        let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
        std::fs::create_dir_all(&source).unwrap();
        std::fs::create_dir_all(&mountpoint).unwrap();
        std::fs::write(source.join("blocks.bin"), vec![7; 64 * 4096]).unwrap();
        let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
        let file = disk.path().join("blocks.bin");
        let (setup, _) = plain_blocks(Setup::new(backend), 64);
        let path = format!("path: {}", file.display());
        let daemon = setup
            .dataset(&["name: remote", "kind: blocks", "block_bytes: 4KiB", &path])
            .set("engine.cores", "1")
            .set("engine.direct_io", direct_io)
            .start();
        let client = Client::builder(format!("http://{}", daemon.grpc)).connect().await;
        let client = client.unwrap();
        assert_eq!(std::fs::read(&file).unwrap().len(), 64 * 4096);
        disk.hold_attributes();
        let remote = tokio::spawn({
            let client = client.clone();
            async move { client.fetch_blocks("remote", &[3, 9, 27]).await }
        });
        eventually_async("the blocks are there, or the disk is queried", async || {
            (remote.is_finished() || disk.attributes_held() > 0).then_some(())
        })
        .await;
        let served = tokio::time::timeout(PATIENCE, daemon.assert_serves("blocks")).await;
        disk.release_attributes();
        served.expect("another dataset is served");
        let blocks = remote.await.unwrap().unwrap();
        assert!(
            blocks.iter().all(|block| *block.unwrap() == [7; 4096]),
            "{backend}"
        );
        daemon.stop().await;
    }
}
