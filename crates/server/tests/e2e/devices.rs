//! Block devices, files beyond 4 GiB, and a failing disk. Needs root, losetup and /dev/fuse.

use crate::daemon::{PATIENCE, Setup, backends, backends_and_auto, eventually_async};
use crate::data::noise;
use crate::loop_device::LoopDevice;
use crate::reload::reload;
use crate::wire;
use rustix::fs::minor;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A file system of `directory`'s `source`, mounted there under this name.
fn mounted(directory: &Path, name: &str) -> slowdisk::SlowDisk {
    let (source, mountpoint) = (directory.join("source"), directory.join(name));
    slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap()
}

#[tokio::test]
#[ignore = "needs root"]
async fn devices_of_both_sector_sizes_are_served() {
    // Scenario: two loop devices, with sectors of 512 and 4096 bytes, as blocks and as raw vectors, read by
    // every backend. Expectation: their bytes over both transports, with direct I/O (except mmap), and the
    // alignment that each needs.
    let bytes = noise(30, 2 << 20);
    for backend in backends_and_auto() {
        let mut setup = Setup::new(backend);
        let file = setup.file("disk", &bytes);
        // A backing file for each: a loop device does not lock the file beneath it.
        let other = setup.file("disk4k", &bytes);
        let (small, large) = (
            LoopDevice::attach(&file, "--sector-size=512"),
            LoopDevice::attach(&other, "--sector-size=4096"),
        );
        for (name, device) in [("s512", &small), ("s4096", &large)] {
            let path = format!("path: {}", device.0);
            let name = format!("name: {name}");
            setup = setup.dataset(&[
                &name,
                "kind: blocks",
                "block_bytes: 1KiB",
                &path,
                "direct_io: required",
            ]);
        }
        let path = format!("path: {}", large.0);
        setup = setup.dataset(&[
            "name: v",
            "kind: vectors",
            "layout: raw",
            "dim: 96",
            "dtype: f16",
            "header_bytes: 512",
            &path,
        ]);
        let wasted = (bytes.len() - 512) % 192;
        if wasted != 0 {
            // 2 MiB - 512 bytes are 10 920 vectors of 192 bytes, without remainder.
            panic!("{wasted} bytes are left over");
        }
        let daemon = setup.start();
        let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
        for (name, sector_bytes) in [("s512", 512), ("s4096", 4096)] {
            let last = (bytes.len() as u64 >> 10) - 1;
            let indices = [0, last, 3, 1000];
            let answer = fetch
                .fetch_blocks(wire::blocks(name, &indices))
                .await
                .unwrap()
                .into_inner();
            let expected: Vec<u8> = indices
                .iter()
                .flat_map(|index| bytes[usize::try_from(index << 10).unwrap()..][..1024].to_vec())
                .collect();
            assert!(
                answer.errors.is_empty() && answer.data == expected,
                "{backend} {name}"
            );
            let ranges = [(0, 1), (1023, 4098), (bytes.len() as u64 - 5, 5)];
            let answer = fetch
                .fetch_ranges(wire::ranges(name, &ranges))
                .await
                .unwrap()
                .into_inner();
            let expected = [&bytes[..1], &bytes[1023..1023 + 4098], &bytes[bytes.len() - 5..]].concat();
            assert!(answer.data == expected, "{backend} {name}");
            assert!(
                http.get(&format!("/v1/datasets/{name}/bytes")).await.body == bytes,
                "{backend} {name}"
            );

            let status = http.get("/v1/status").await.json();
            let datasets = status["datasets"].as_array().unwrap();
            let described = datasets.iter().find(|dataset| dataset["name"] == name).unwrap();
            assert_eq!(described["length_bytes"], bytes.len());
            assert_eq!(described["direct_io"], backend != "mmap", "{described}");
            assert_eq!(described["offset_alignment_bytes"], sector_bytes, "{described}");
        }
        let answer = fetch
            .fetch_vectors(wire::vectors("v", &[0, 10_919]))
            .await
            .unwrap()
            .into_inner();
        let expected = [&bytes[512..704], &bytes[bytes.len() - 192..]].concat();
        assert!(answer.data == expected, "{backend} vectors");
        daemon.stop().await;
    }
}

#[tokio::test]
#[ignore = "needs root"]
async fn what_a_device_no_longer_has_is_lost() {
    // Scenario: a device shrinks while it is served, to an end within a page. Expectation: blocks before the new end are
    // served; the block across it and those behind it are DATA_LOSS on every backend, and no zeros.
    let bytes = noise(33, 64 << 10);
    for backend in backends_and_auto() {
        let setup = Setup::new(backend);
        let file = setup.file("disk", &bytes);
        let device = LoopDevice::attach(&file, "--sector-size=512");
        let path = format!("path: {}", device.0);
        let daemon = setup
            .dataset(&["name: disk", "kind: blocks", "block_bytes: 4KiB", &path])
            .start();
        let backing = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        backing.set_len((32 << 10) + 512).unwrap();
        let resized = Command::new("losetup")
            .args(["--set-capacity", &device.0])
            .status();
        assert!(resized.unwrap().success());
        let mut fetch = daemon.fetch().await;
        // Two times: the second one finds pages that the first one has read.
        for _ in 0..2 {
            let answer = fetch.fetch_blocks(wire::blocks("disk", &[7, 8, 9, 15])).await;
            let answer = answer.unwrap().into_inner();
            let lost: Vec<(u32, i32)> = answer
                .errors
                .iter()
                .map(|error| (error.item, error.code))
                .collect();
            let data_loss = i32::from(tonic::Code::DataLoss);
            assert_eq!(
                lost,
                [1, 2, 3].map(|item| (item, data_loss)),
                "{backend}: {answer:?}"
            );
            assert!(answer.data == bytes[7 * 4096..8 * 4096], "{backend}");
        }
        let http = daemon.http_client();
        let answer = http.get("/v1/datasets/disk/blocks/8").await;
        answer.is_problem(500, "device-error", None, &["Input/output error"]);
        daemon.stop().await;
    }
}

#[tokio::test]
async fn files_beyond_4_gib_are_read_where_they_are() {
    // Scenario: a sparse file of slightly more than 5 GiB, with data around 4 GiB and at its end.
    // Expectation: the right bytes at offsets beyond 32 bits, zeroes in the holes, and the end in the right
    // place.
    const GIB: u64 = 1 << 30;
    let length = 5 * GIB + 4096;
    let (around, end) = (noise(31, 12_288), noise(32, 4096));
    for &backend in backends() {
        let setup = Setup::new(backend);
        let file = std::fs::File::create(setup.path("sparse")).unwrap();
        file.set_len(length).unwrap();
        file.write_all_at(&around, 4 * GIB - 4096).unwrap();
        file.write_all_at(&end, length - 4096).unwrap();
        let setup = setup.dataset(&["{name: sparse, kind: blocks, block_bytes: 4KiB, path: sparse}"]);
        let daemon = setup.start();
        let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
        let four = 4 * GIB / 4096;
        let indices = [four, length / 4096 - 1, four - 1, 7, four + 1];
        let answer = fetch
            .fetch_blocks(wire::blocks("sparse", &indices))
            .await
            .unwrap()
            .into_inner();
        let expected = [
            &around[4096..8192],
            &end,
            &around[..4096],
            &[0; 4096],
            &around[8192..],
        ]
        .concat();
        assert!(answer.errors.is_empty() && answer.data == expected, "{backend}");
        let range = format!("bytes={}-{}", 4 * GIB - 10, 4 * GIB + 9);
        let answer = http
            .get_with("/v1/datasets/sparse/bytes", &[("range", &range)])
            .await;
        assert!(answer.body == around[4086..4106], "{backend}");
        assert_eq!(
            answer.header("content-range"),
            format!("bytes {}-{}/{length}", 4 * GIB - 10, 4 * GIB + 9)
        );
        let answer = http
            .get_with("/v1/datasets/sparse/bytes", &[("range", "bytes=-4096")])
            .await;
        assert!(answer.body == end, "{backend}");
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root and /dev/fuse"]
async fn a_disk_that_fails_is_not_asked_about_every_object() {
    // Scenario: a thousand objects on a disk that fails every read, which may take it half a minute each; later it reads
    // again. Expectation: the dataset opens after a few reads, since objects may be read by another path; then they are.
    use ringfetch_engine::config::DirectIo;
    use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
    let directory = tempfile::tempdir().unwrap();
    let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
    std::fs::create_dir_all(&source).unwrap();
    for number in 0..1000 {
        std::fs::write(source.join(number.to_string()), [7; 4096]).unwrap();
    }
    let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
    disk.set(|disk| disk.error_probability = 1.0).unwrap();
    let kind = KindSpec::objects(8, Duration::ZERO);
    let spec = DatasetSpec::new("objects", disk.path(), kind, DirectIo::Preferred);
    let dataset = Dataset::open(&spec).unwrap();
    let failed = disk.reads().failed;
    assert!(
        (1..=64).contains(&failed),
        "{failed} reads: {:?}",
        dataset.direct()
    );
    assert!(dataset.object("7").await.is_err());
    disk.set(|disk| disk.error_probability = 0.0).unwrap();
    assert_eq!(dataset.object("7").await.unwrap().length_bytes(), 4096);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root and /dev/fuse"]
async fn a_file_that_its_server_has_replaced_is_lost_until_it_is_opened_again() {
    // Scenario: a file system whose server removes files that are open here; blocks and objects on it are replaced by rename
    // after a first read, and read where they were not. Expectation: an object is lost once and then what it is now, and by
    // HTTP at once, long before `revalidate_ms`; blocks are lost until a reload, and never a mixture.
    for backend in backends_and_auto() {
        let directory = tempfile::tempdir().unwrap();
        let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
        std::fs::create_dir_all(source.join("objects")).unwrap();
        let names = ["blocks.bin", "objects/a", "objects/b"];
        for name in names {
            std::fs::write(source.join(name), [1; 16 * 4096]).unwrap();
        }
        let parameters = slowdisk::Parameters {
            loses_replaced: true,
            ..slowdisk::Parameters::default()
        };
        let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &parameters).unwrap();
        let path = |name: &str| format!("path: {}", disk.path().join(name).display());
        let daemon = Setup::new(backend)
            .dataset(&[
                "name: blocks",
                "kind: blocks",
                "block_bytes: 4KiB",
                &path("blocks.bin"),
            ])
            .dataset(&[
                "name: objects",
                "kind: objects",
                "revalidate_ms: 3600000",
                &path("objects"),
            ])
            .start();
        let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
        let b = "/v1/datasets/objects/objects/b";
        for path in ["/v1/datasets/blocks/bytes", "/v1/datasets/objects/objects/a", b] {
            let answer = http.get_with(path, &[("range", "bytes=0-9")]).await;
            assert_eq!(
                (answer.status.as_u16(), &answer.body[..]),
                (206, &[1; 10][..]),
                "{path}"
            );
        }
        for name in names {
            std::fs::write(source.join("next"), [2; 8 * 4096]).unwrap();
            std::fs::rename(source.join("next"), source.join(name)).unwrap();
        }

        let a = wire::objects("objects", &["a"]);
        let lost = fetch.fetch_objects(a.clone()).await.unwrap().into_inner();
        assert_eq!(
            lost.errors[0].code,
            i32::from(tonic::Code::DataLoss),
            "{backend}: {lost:?}"
        );
        assert!(
            lost.errors[0].message.contains("Stale file handle"),
            "{backend}: {lost:?}"
        );
        let answer = fetch.fetch_objects(a).await.unwrap().into_inner();
        assert!(answer.data == [2; 8 * 4096][..], "{backend}: {:?}", answer.errors);
        assert!(http.get(b).await.body == [2; 8 * 4096][..], "{backend}");

        let last = wire::blocks("blocks", &[5]);
        for _ in 0..2 {
            let lost = fetch.fetch_blocks(last.clone()).await.unwrap().into_inner();
            assert_eq!(
                lost.errors[0].code,
                i32::from(tonic::Code::DataLoss),
                "{backend}: {lost:?}"
            );
        }
        assert_eq!(reload(&daemon).await.unwrap().datasets_replaced, ["blocks"]);
        let answer = fetch.fetch_blocks(last).await.unwrap().into_inner();
        assert!(answer.data == [2; 4096][..], "{backend}: {:?}", answer.errors);
        daemon.stop().await;
    }
}

/// Ends the connection to the server of a FUSE file system, as the server's end would; it stays mounted.
fn abort(mountpoint: &Path) {
    let connection = minor(rustix::fs::stat(mountpoint).unwrap().st_dev).to_string();
    let control = tempfile::tempdir().unwrap();
    let run = |command: &str, arguments: &[&str]| {
        let status = Command::new(command).args(arguments).arg(control.path()).status();
        assert!(status.unwrap().success(), "{command}");
    };
    run("mount", &["-t", "fusectl", "none"]);
    std::fs::write(control.path().join(connection).join("abort"), "1").unwrap();
    run("umount", &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root and /dev/fuse"]
async fn a_disk_whose_server_has_ended_is_lost_until_it_is_mounted_again() {
    // Scenario: the process behind a FUSE file system ends while blocks and objects of it are served; a reload; later it is
    // mounted again, and a second reload. Expectation: DATA_LOSS of what is on it and not in memory, open or not, and of nothing else, on
    // every backend; the first reload changes nothing; after the second one everything is served.
    for backend in backends_and_auto() {
        let directory = tempfile::tempdir().unwrap();
        let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
        std::fs::create_dir_all(source.join("objects")).unwrap();
        let bytes = noise(34, 64 * 4096);
        for name in ["blocks.bin", "objects/a", "objects/b"] {
            std::fs::write(source.join(name), &bytes).unwrap();
        }
        let mount =
            || slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
        let disk = mount();
        let path = |name: &str| format!("path: {}", disk.path().join(name).display());
        let setup = Setup::new(backend);
        setup.file("here", &bytes);
        let daemon = setup
            .dataset(&["name: here", "kind: blocks", "block_bytes: 4KiB", "path: here"])
            .dataset(&[
                "name: blocks",
                "kind: blocks",
                "block_bytes: 4KiB",
                &path("blocks.bin"),
            ])
            .dataset(&["name: objects", "kind: objects", &path("objects")])
            .start();
        let mut fetch = daemon.fetch().await;
        let object = |name: &str| wire::objects("objects", &[name]);
        let served = fetch.fetch_objects(object("a")).await.unwrap().into_inner();
        assert!(served.data == bytes, "{backend}: {:?}", served.errors);
        abort(&mountpoint);

        let data_loss = i32::from(tonic::Code::DataLoss);
        for _ in 0..2 {
            let lost = fetch
                .fetch_blocks(wire::blocks("blocks", &[5, 60]))
                .await
                .unwrap()
                .into_inner();
            let codes: Vec<i32> = lost.errors.iter().map(|error| error.code).collect();
            assert_eq!(codes, [data_loss; 2], "{backend}: {lost:?}");
            let lost = fetch.fetch_objects(object("b")).await.unwrap().into_inner();
            assert_eq!(lost.errors[0].code, data_loss, "{backend}: {lost:?}");
            // Its pages may be in memory.
            let open = fetch.fetch_objects(object("a")).await.unwrap().into_inner();
            let is_lost = open.errors.first().map(|error| error.code) == Some(data_loss);
            assert!(is_lost || open.data == bytes, "{backend}: {open:?}");
            daemon.assert_serves("here").await;
            reload(&daemon).await.unwrap_err();
        }

        drop(disk);
        let _disk = mount();
        let replaced = reload(&daemon).await.unwrap().datasets_replaced;
        assert_eq!(replaced, ["blocks", "objects"], "{backend}");
        let answer = fetch
            .fetch_blocks(wire::blocks("blocks", &[5, 60]))
            .await
            .unwrap()
            .into_inner();
        let expected = [5, 60].map(|block| &bytes[block * 4096..][..4096]).concat();
        assert!(answer.data == expected, "{backend}: {:?}", answer.errors);
        for name in ["a", "b"] {
            let answer = fetch.fetch_objects(object(name)).await.unwrap().into_inner();
            assert!(answer.data == bytes, "{backend}: {:?}", answer.errors);
        }
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root and /dev/fuse"]
async fn a_disk_that_hangs_does_not_keep_others_waiting() {
    // Scenario: a disk answers nothing, and has as many reads of a dataset as a ring may have in flight, and more that wait,
    // also of another dataset; those of other disks are read through the same ring, of one that needs the kernel's worker
    // threads, too; the disk answers again. Expectation: the others are served meanwhile; in the end the waiting calls have the
    // right bytes.
    for backend in backends_and_auto() {
        if !["uring", "auto"].contains(&backend) {
            // A thread that waits for a disk serves nobody.
            continue;
        }
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
        let here = setup.file("blocks.bin", &bytes);
        let here = std::fs::File::open(here).unwrap();
        here.sync_all().unwrap();
        let daemon = setup
            .dataset(&["{name: blocks, kind: blocks, block_bytes: 4KiB, path: blocks.bin}"])
            .set("engine.cores", "1")
            .set("engine.uring.queue_depth", "8")
            .dataset(&["name: hangs", "kind: blocks", "block_bytes: 4KiB", &paths[0]])
            .dataset(&["name: hangs-too", "kind: blocks", "block_bytes: 4KiB", &paths[1]])
            .dataset(&["name: fuse", "kind: blocks", "block_bytes: 4KiB", &paths[2]])
            .start();
        // What is in memory needs no ring.
        rustix::fs::fadvise(&here, 0, None, rustix::fs::Advice::DontNeed).unwrap();
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
#[ignore = "needs root and /dev/fuse"]
async fn worker_threads_that_wait_for_a_disk_keep_no_others_waiting() {
    // Scenario: a file system that needs the kernel's worker threads answers nothing, and has fewer reads than a ring may have in
    // flight; another such file system is read through the same ring. Expectation: it is served.
    for backend in backends_and_auto() {
        if !["uring", "auto"].contains(&backend) {
            continue;
        }
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
    // Scenario: a start opens two datasets; the file system of the second does not respond, until the log tells of it.
    // Expectation: it names the dataset and its file; then the daemon serves both.
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
    let waits_for = format!("\"step\":\"opening dataset hangs: {file}\"");
    let daemon = setup
        .dataset(&["{name: blocks, kind: blocks, block_bytes: 4KiB, path: blocks.bin}"])
        .dataset(&[
            "{name: hangs, kind: blocks, block_bytes: 4KiB, path: ",
            &file,
            "}",
        ])
        .disturbed(move |daemon| {
            let told = |line: &String| line.contains("the start takes long") && line.contains(&waits_for);
            if daemon.log().iter().any(told) {
                disk.release_attributes();
            }
        })
        .start();
    for dataset in ["blocks", "hangs"] {
        daemon.assert_serves(dataset).await;
    }
    daemon.stop().await;
}
