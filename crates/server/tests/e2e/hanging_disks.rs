//! Disks that do not answer. Most need root, losetup and /dev/fuse.

use crate::daemon::{PATIENCE, Setup, eventually, eventually_async};
use crate::data::noise;
use crate::loop_device::LoopDevice;
use crate::supervised::Manager;
use crate::wire;
use ringfetch_engine::probe::resident_pages;
use rustix::fs::inotify;
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

/// A file system of `directory`'s `source`, mounted there under this name.
fn mounted(directory: &Path, name: &str) -> slowdisk::SlowDisk {
    let (source, mountpoint) = (directory.join("source"), directory.join(name));
    slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root, /dev/fuse and io_uring"]
async fn a_disk_that_hangs_does_not_keep_others_waiting() {
    // Scenario: a disk answers nothing, and has as many reads of a dataset as a ring may have in flight, and more that wait,
    // also of another dataset; those of other disks are read through the same ring, of one that needs the kernel's worker
    // threads, too; the disk answers again. Expectation: the others are served meanwhile, and the status counts the reads of this
    // disk as stalled; in the end the waiting calls have the right bytes.
    // With the others a thread that waits for a disk serves nobody.
    for backend in ["uring", "auto"] {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source");
        std::fs::create_dir(&source).unwrap();
        let bytes = noise(35, 64 * 32 * 4096);
        std::fs::write(source.join("blocks.bin"), &bytes).unwrap();
        std::fs::write(source.join("more.bin"), &bytes).unwrap();
        let [disk, other] = ["disk", "other"].map(|name| mounted(directory.path(), name));
        let path = |disk: &slowdisk::SlowDisk, name| format!("path: {}", disk.path().join(name).display());
        let paths = [(&disk, "blocks.bin"), (&disk, "more.bin"), (&other, "blocks.bin")]
            .map(|(disk, name)| path(disk, name));
        let setup = Setup::new(backend);
        // Temporary directories are often in memory.
        let program = std::env::current_exe().unwrap();
        let on_disk = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let here = on_disk.path().join("blocks.bin");
        std::fs::write(&here, &bytes).unwrap();
        let daemon = setup
            .dataset(&[
                "name: blocks",
                "kind: blocks",
                "block_bytes: 4KiB",
                &format!("path: {}", here.display()),
            ])
            // However long it takes.
            .set("limits.deadline_ms", "0")
            .set("engine.cores", "1")
            .set("engine.uring.queue_depth", "8")
            .dataset(&["name: hangs", "kind: blocks", "block_bytes: 4KiB", &paths[0]])
            .dataset(&["name: hangs-too", "kind: blocks", "block_bytes: 4KiB", &paths[1]])
            .dataset(&["name: fuse", "kind: blocks", "block_bytes: 4KiB", &paths[2]])
            .start();
        // What is in memory needs no ring. The kernel keeps pages that somebody uses at that moment.
        let here = std::fs::File::open(here).unwrap();
        eventually("nothing is in memory", PATIENCE, || {
            here.sync_all().unwrap();
            rustix::fs::fadvise(&here, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            (resident_pages(&here, bytes.len() as u64).unwrap() == 0).then_some(())
        });
        disk.hold();
        // Too far apart to be merged.
        let indices: Vec<u64> = (0..64).map(|item| item * 32).collect();
        let mut waiting = Vec::new();
        for (queued, dataset) in [(50, "hangs"), (110, "hangs-too")] {
            let (mut fetch, request) = (daemon.fetch().await, wire::blocks(dataset, &indices));
            waiting.push(tokio::spawn(async move { fetch.fetch_blocks(request).await }));
            eventually_async("the ring is full, and reads wait", async || {
                let scrape = daemon.scrape().await;
                let sum = |metric| scrape.sum(metric, &[]);
                (sum("ringfetch_in_flight_reads") == 8 && sum("ringfetch_queued_reads") >= queued)
                    .then_some(())
            })
            .await;
        }
        for dataset in ["blocks", "fuse"] {
            let served = tokio::time::timeout(PATIENCE, daemon.assert_serves(dataset));
            served
                .await
                .unwrap_or_else(|_| panic!("{backend}: {dataset} is not served"));
        }
        assert!(waiting.iter().all(|call| !call.is_finished()), "{backend}");
        eventually_async("metrics and status count the stalled reads", async || {
            let stalled = daemon.sum("ringfetch_stalled_reads", &[]).await;
            let by_call = daemon.status().await.shards[0].stalled;
            let over_http = daemon.http_client().get("/v1/status").await.json();
            let over_http = over_http["shards"][0]["stalled"].as_u64();
            (stalled > 0 && u64::from(by_call) == stalled && over_http == Some(stalled)).then_some(())
        })
        .await;
        disk.release();
        for call in waiting {
            let answer = call.await.unwrap().unwrap().into_inner();
            let expected = indices.iter().flat_map(|index| {
                let begin = usize::try_from(index * 4096).unwrap();
                &bytes[begin..begin + 4096]
            });
            assert!(answer.data.iter().eq(expected), "{backend}: {:?}", answer.errors);
        }
        daemon.logged(&["reads take longer than 3 s", "hangs"]);
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root, /dev/fuse and io_uring"]
async fn worker_threads_that_wait_for_a_disk_keep_no_others_waiting() {
    // Scenario: a file system that needs the kernel's worker threads answers nothing, and has fewer reads than a ring may have in
    // flight; another such file system is read through the same ring. Expectation: it is served.
    for backend in ["uring", "auto"] {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("source");
        std::fs::create_dir(&source).unwrap();
        std::fs::write(source.join("blocks.bin"), noise(38, 100 * 32 * 4096)).unwrap();
        let [disk, other] = ["disk", "other"].map(|name| mounted(directory.path(), name));
        let dataset = |name: &str, disk: &slowdisk::SlowDisk| {
            let path = disk.path().join("blocks.bin");
            format!(
                "{{name: {name}, kind: blocks, block_bytes: 4KiB, direct_io: off, path: {}}}",
                path.display()
            )
        };
        let daemon = Setup::new(backend)
            .set("engine.cores", "1")
            .set("engine.uring.queue_depth", "128")
            .dataset(&[&dataset("hangs", &disk)])
            .dataset(&[&dataset("fuse", &other)])
            .start();
        disk.hold();
        // Too far apart to be merged.
        let indices: Vec<u64> = (0..100).map(|item| item * 32).collect();
        let (mut fetch, request) = (daemon.fetch().await, wire::blocks("hangs", &indices));
        let waiting = tokio::spawn(async move { fetch.fetch_blocks(request).await });
        let in_flight = async || daemon.sum("ringfetch_in_flight_reads", &[]).await;
        eventually_async("all are in flight", async || {
            (in_flight().await == 100).then_some(())
        })
        .await;
        let served = tokio::time::timeout(PATIENCE, daemon.assert_serves("fuse"));
        served.await.unwrap_or_else(|_| panic!("{backend}: not served"));
        disk.release();
        let answer = waiting.await.unwrap().unwrap().into_inner();
        assert!(
            answer.errors.is_empty() && answer.data.len() == 100 * 4096,
            "{backend}"
        );
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root, losetup and /dev/fuse"]
async fn a_disk_whose_queue_is_full_stops_no_core() {
    // Scenario: `mmap`, and a disk that answers nothing: single blocks of it are wanted, several times as many as its queue
    // takes; all calls pass their deadline. Expectation: the core still serves what is in memory.
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("blocks.bin"), vec![7; 128 << 20]).unwrap();
    let disk = mounted(directory.path(), "disk");
    let device = LoopDevice::attach(disk.path().join("blocks.bin"), "--sector-size=512");
    let path = format!("path: {}", device.0);
    let setup = Setup::new("mmap");
    setup.file("blocks.bin", &noise(36, 16 * 4096));
    let daemon = setup
        .dataset(&["{name: blocks, kind: blocks, block_bytes: 4KiB, path: blocks.bin}"])
        .dataset(&["name: hangs", "kind: blocks", "block_bytes: 4KiB", &path])
        .set("engine.cores", "1")
        .start();
    daemon.assert_serves("blocks").await;
    disk.hold();
    let mut calls = Vec::new();
    for connection in 0..4 {
        let fetch = daemon.fetch().await;
        for call in 0..128 {
            let mut request =
                tonic::Request::new(wire::blocks("hangs", &[(connection * 128 + call) * 64 + 32]));
            request.set_timeout(Duration::from_secs(1));
            let mut fetch = fetch.clone();
            calls.push(tokio::spawn(async move { fetch.fetch_blocks(request).await }));
        }
    }
    let served = tokio::time::timeout(PATIENCE, async {
        let answers = futures_util::future::join_all(calls).await;
        daemon.assert_serves("blocks").await;
        answers
    });
    let served = served.await;
    disk.release();
    let answers = served.expect("what is in memory is served");
    for answer in answers {
        let error = answer.unwrap().unwrap_err();
        // Cancelled: tonic's client gave up first. A refusal would not have waited for the disk.
        let codes = [tonic::Code::Cancelled, tonic::Code::DeadlineExceeded];
        assert!(codes.contains(&error.code()), "{error:?}");
    }
    daemon.stop().await;
}

#[tokio::test]
#[ignore = "needs root and /dev/fuse"]
async fn a_long_start_says_what_it_waits_for() {
    // Scenario: a start opens two datasets; the file system of the second does not respond, until the service manager has been
    // asked for more time. Expectation: the message and the log name the dataset and its file; then the daemon serves both.
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    std::fs::create_dir(&source).unwrap();
    let bytes = noise(37, 16 * 4096);
    std::fs::write(source.join("hangs.bin"), &bytes).unwrap();
    let disk = mounted(directory.path(), "disk");
    let file = disk.path().join("hangs.bin").display().to_string();
    disk.hold_attributes();
    let setup = Setup::new("mmap");
    setup.file("blocks.bin", &bytes);
    let step = format!("opening dataset hangs: {file}");
    let asks = [
        "EXTEND_TIMEOUT_USEC=30000000".to_owned(),
        format!("STATUS=starting: {step}"),
    ];
    let (manager, setup) = Manager::beside(setup);
    let daemon = setup
        .dataset(&["{name: blocks, kind: blocks, block_bytes: 4KiB, path: blocks.bin}"])
        .dataset(&[
            "{name: hangs, kind: blocks, block_bytes: 4KiB, path: ",
            &file,
            "}",
        ])
        .disturbed(move |_| {
            if manager
                .hears(Duration::from_millis(1))
                .is_some_and(|lines| lines == asks)
            {
                disk.release_attributes();
            }
        })
        .start();
    daemon.logged(&["the start takes long", &format!("\"step\":\"{step}\"")]);
    for dataset in ["blocks", "hangs"] {
        daemon.assert_serves(dataset).await;
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_start_opens_no_file_again() {
    // Scenario: a start with a dataset that is read through the page cache. Expectation: no descriptor of its file is closed: to
    // open it again could hang where the start does not say for what it waits.
    let (setup, bytes) = (Setup::new("pread"), noise(39, 16 * 4096));
    let file = setup.file("blocks.bin", &bytes);
    let closed = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&closed, &file, inotify::WatchFlags::CLOSE_NOWRITE).unwrap();
    let daemon = setup
        .dataset(&["{name: blocks, kind: blocks, block_bytes: 4KiB, direct_io: off, path: blocks.bin}"])
        .start();
    daemon.assert_serves("blocks").await;
    let mut events = [MaybeUninit::uninit(); 256];
    let event = inotify::Reader::new(&closed, &mut events).next().map(drop);
    assert_eq!(event, Err(rustix::io::Errno::AGAIN));
    daemon.stop().await;
    let event = inotify::Reader::new(&closed, &mut events).next().map(drop);
    assert_eq!(event, Ok(()), "its end is seen");
}
