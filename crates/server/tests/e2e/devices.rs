//! Block devices, files beyond 4 GiB, and a failing disk. Needs root, losetup and /dev/fuse.

use crate::daemon::{Setup, any_backend, backends, backends_and_auto};
use crate::data::noise;
use crate::loop_device::LoopDevice;
use crate::reload::reload;
use crate::wire;
use ringfetch_proto::v1;
use rustix::fs::minor;
use rustix::io::Errno;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

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
async fn names_that_a_disk_cannot_look_up_are_not_taken_for_absent() {
    // Scenario: a file system whose look-ups fail with errnos that a device node without a device has, too, or that only servers
    // of files have; then they work again. Expectation: an object is lost and not "not found", and its read counts as an error of
    // the device; the directory is not listed as if it was empty; a reload is refused for this and not for what the path leads to;
    // afterwards all is as before, without a reload.
    let directory = tempfile::tempdir().unwrap();
    let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
    std::fs::create_dir_all(source.join("below")).unwrap();
    let names = ["a", "b", "below/c"];
    for name in names {
        std::fs::write(source.join(name), name).unwrap();
    }
    let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
    let path = format!("path: {}", disk.path().display());
    let daemon = Setup::new(any_backend())
        .dataset(&["name: objects", "kind: objects", &path])
        .dataset(&[
            "name: blocks",
            "kind: blocks",
            "block_bytes: 1",
            &format!("{path}/a"),
        ])
        .start();
    let (mut fetch, mut datasets, http) = (
        daemon.fetch().await,
        daemon.datasets().await,
        daemon.http_client(),
    );
    let objects = "/v1/datasets/objects/objects";
    let list = v1::ListObjectsRequest {
        dataset: "objects".into(),
        ..v1::ListObjectsRequest::default()
    };
    let errnos = [Errno::NODEV, Errno::NXIO, Errno::STALE, Errno::BADE];
    for errno in errnos {
        let text = std::io::Error::from(errno).to_string();
        disk.set(|disk| disk.names_errno = errno.raw_os_error()).unwrap();
        let lost = fetch.fetch_objects(wire::objects("objects", &["b"])).await;
        let lost = lost.unwrap().into_inner().errors;
        assert_eq!(lost[0].code, i32::from(tonic::Code::DataLoss), "{lost:?}");
        assert!(lost[0].message.contains(&text), "{lost:?}");
        let answer = http.get(&format!("{objects}/b")).await;
        answer.is_problem(500, "device-error", None, &[&text]);
        let status = datasets.list_objects(list.clone()).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::DataLoss, "{status}");
        http.get(objects)
            .await
            .is_problem(500, "device-error", None, &[&text]);
        let refused = reload(&daemon).await.unwrap_err();
        let expected = format!("{}: cannot be opened: {text}", disk.path().join("a").display());
        assert!(refused.message().contains(&expected), "{refused}");
    }
    let scrape = daemon.scrape().await;
    let counted = |result| {
        scrape.sum(
            "ringfetch_reads_total",
            &[("dataset", "objects"), ("result", result)],
        )
    };
    assert_eq!(counted("device_error"), 2 * errnos.len() as u64);
    assert_eq!(counted("unreadable") + counted("not_found"), 0);

    disk.set(|disk| disk.names_errno = 0).unwrap();
    let listed = datasets.list_objects(list).await.unwrap().into_inner().objects;
    assert!(
        listed.iter().map(|object| &object.name[..]).eq(names),
        "{listed:?}"
    );
    assert_eq!(http.get(&format!("{objects}/b")).await.body, &b"b"[..]);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root and /dev/fuse"]
async fn a_reload_opens_what_is_lost_under_the_handles_that_are_open() {
    // Scenario: the server of a file system gives its files new handles, as after they were restored; device, inode, length and
    // time of each are what they were. Expectation: DATA_LOSS until a reload, which opens them again; an object of a directory that
    // is reached as before is opened again once it is looked up.
    for backend in backends_and_auto() {
        let directory = tempfile::tempdir().unwrap();
        let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
        std::fs::create_dir_all(source.join("objects")).unwrap();
        let bytes = noise(36, 64 * 4096);
        for name in ["blocks.bin", "objects/a"] {
            std::fs::write(source.join(name), &bytes).unwrap();
        }
        let disk = slowdisk::SlowDisk::mount(&source, &mountpoint, &slowdisk::Parameters::default()).unwrap();
        let path = |name: &str| format!("path: {}", disk.path().join(name).display());
        let (blocks, objects) = (path("blocks.bin"), path("objects"));
        let daemon = Setup::new(backend)
            .dataset(&["name: blocks", "kind: blocks", "block_bytes: 4KiB", &blocks])
            .dataset(&["name: objects", "kind: objects", &objects])
            .dataset(&["name: root", "kind: objects", "revalidate_ms: 0", &path("")])
            .start();
        let mut fetch = daemon.fetch().await;
        let below = wire::objects("root", &["objects/a"]);
        let answer = fetch.fetch_objects(below.clone()).await.unwrap().into_inner();
        assert!(answer.data == bytes, "{backend}: {:?}", answer.errors);
        let (block, object) = (wire::blocks("blocks", &[60]), wire::objects("objects", &["a"]));
        assert!(reload(&daemon).await.unwrap().datasets_replaced.is_empty());

        disk.set(|disk| disk.generation = 1).unwrap();
        // The kernel notices it at the next look-up.
        assert!(mountpoint.join("blocks.bin").exists() && mountpoint.join("objects").exists());
        let data_loss = i32::from(tonic::Code::DataLoss);
        let lost = fetch.fetch_blocks(block.clone()).await.unwrap().into_inner();
        assert_eq!(lost.errors[0].code, data_loss, "{backend}: {lost:?}");
        let lost = fetch.fetch_objects(object.clone()).await.unwrap().into_inner();
        assert_eq!(lost.errors[0].code, data_loss, "{backend}: {lost:?}");

        let answer = fetch.fetch_objects(below).await.unwrap().into_inner();
        assert!(answer.data == bytes, "{backend}: {:?}", answer.errors);

        let replaced = reload(&daemon).await.unwrap().datasets_replaced;
        assert_eq!(replaced, ["blocks", "objects"], "{backend}");
        let answer = fetch.fetch_blocks(block).await.unwrap().into_inner();
        assert!(
            answer.data == bytes[60 * 4096..61 * 4096],
            "{backend}: {:?}",
            answer.errors
        );
        let answer = fetch.fetch_objects(object).await.unwrap().into_inner();
        assert!(answer.data == bytes, "{backend}: {:?}", answer.errors);
        daemon.stop().await;
    }
}

#[tokio::test]
#[ignore = "needs root"]
async fn a_reload_finds_what_is_mounted_below_a_directory_that_was_mounted_again() {
    // Scenario: a directory of objects with a file system mounted in it; both are unmounted lazily, and mounted again, which keeps
    // the directory's device and inode. Expectation: after a reload the objects of what is mounted there now.
    let directory = tempfile::tempdir().unwrap();
    let (source, mountpoint) = (directory.path().join("source"), directory.path().join("disk"));
    std::fs::create_dir_all(source.join("below")).unwrap();
    std::fs::create_dir(&mountpoint).unwrap();
    let run = |command: &str, arguments: &[&str], at: &Path| {
        let status = Command::new(command).args(arguments).arg(at).status();
        assert!(status.unwrap().success(), "{command} {arguments:?}");
    };
    let below = mountpoint.join("below");
    let mount = |object: &str| {
        run("mount", &["--bind", source.to_str().unwrap()], &mountpoint);
        // Otherwise what is mounted in it is mounted in the source, too.
        run("mount", &["--make-private"], &mountpoint);
        run("mount", &["-t", "tmpfs", "none"], &below);
        std::fs::write(below.join("o"), object).unwrap();
    };
    let unmount = || run("umount", &["--recursive", "--lazy"], &mountpoint);
    mount("old");
    let path = format!("path: {}", mountpoint.display());
    let daemon = Setup::new(any_backend())
        .dataset(&["name: objects", "kind: objects", "revalidate_ms: 0", &path])
        .start();
    let http = daemon.http_client();
    let object = "/v1/datasets/objects/objects/below/o";
    assert_eq!(http.get(object).await.body, &b"old"[..]);
    assert!(reload(&daemon).await.unwrap().datasets_replaced.is_empty());
    unmount();
    mount("new");
    let replaced = reload(&daemon).await.unwrap().datasets_replaced;
    let body = http.get(object).await.body;
    unmount();
    assert_eq!(
        (&replaced[..], &body[..]),
        (&["objects".to_owned()][..], &b"new"[..])
    );
    daemon.stop().await;
}
