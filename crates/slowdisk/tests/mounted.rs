//! A mounted disk, through the kernel: bytes, counts, faults, holds, depth, and unmounting.

#![forbid(unsafe_code)]
#![expect(clippy::expect_used, reason = "a test fails by panicking")]

use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig, OnUnavailable};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use slowdisk::{Outcome, Parameters, SlowDisk};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const BLOCK: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(30);

/// A directory with a file of `blocks` blocks, each filled with different bytes.
struct Source {
    directory: tempfile::TempDir,
}

impl Source {
    fn new(blocks: usize) -> Self {
        let source = Self {
            directory: tempfile::tempdir().expect("a directory"),
        };
        fs::create_dir_all(source.path("source/below")).expect("directories");
        let bytes: Vec<u8> = (0..blocks).flat_map(block).collect();
        fs::write(source.path("source/data.bin"), bytes).expect("a file");
        source
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn mount(&self, parameters: Parameters) -> SlowDisk {
        self.mount_path("source/data.bin", "mnt", parameters)
            .expect("a mount")
    }

    fn mount_path(
        &self,
        name: &str,
        mountpoint: &str,
        parameters: Parameters,
    ) -> Result<SlowDisk, slowdisk::Error> {
        SlowDisk::mount(&self.path(name), &self.path(mountpoint), &parameters)
    }
}

fn block(index: usize) -> Vec<u8> {
    let value = u32::try_from(index).expect("small").to_le_bytes();
    value.iter().copied().cycle().take(BLOCK).collect()
}

fn direct(path: &Path) -> File {
    let flags = i32::from_ne_bytes(rustix::fs::OFlags::DIRECT.bits().to_ne_bytes());
    File::options()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .expect("O_DIRECT")
}

fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    mounts.lines().any(|line| line.split(' ').nth(4) == path.to_str())
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn every_direct_read_reaches_the_disk_as_it_was_asked() {
    // Scenario: the same block three times with O_DIRECT, and one across the end. Expectation: four reads, right bytes.
    let source = Source::new(8);
    let disk = source.mount(Parameters::default());
    let file = direct(disk.path());
    let mut bytes = vec![0; BLOCK];
    for _ in 0..3 {
        file.read_exact_at(&mut bytes, 5 * 4096).expect("a read");
        assert_eq!(bytes, block(5));
    }
    let mut tail = vec![0; 2 * BLOCK];
    assert_eq!(file.read_at(&mut tail, 7 * 4096).expect("a read"), BLOCK);
    assert_eq!(tail[..BLOCK], block(7));
    let reads = disk.reads();
    assert_eq!(
        (reads.arrived, reads.answered, reads.bytes),
        (4, 4, 4 * 4096),
        "{reads:?}"
    );
    let records = disk.records();
    assert_eq!(
        records
            .iter()
            .filter(|record| record.overlaps(5 * 4096, 4096))
            .count(),
        3
    );
    assert!(
        records
            .iter()
            .all(|record| record.direct && record.outcome == Outcome::Served),
        "{records:?}"
    );
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn a_buffered_block_is_read_once() {
    // Scenario: one block read twice, and once more after the file was reopened. Expectation: one disk read
    // of it.
    let source = Source::new(1);
    let disk = source.mount(Parameters::default());
    for _ in 0..2 {
        let file = File::open(disk.path()).expect("open");
        let mut bytes = vec![0; BLOCK];
        file.read_exact_at(&mut bytes, 0).expect("a read");
        file.read_exact_at(&mut bytes, 0).expect("a read");
        assert_eq!(bytes, block(0));
    }
    assert_eq!(disk.reads().answered, 1);
    assert!(!disk.records()[0].direct);
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn a_directory_shows_its_files_and_what_is_below() {
    // Scenario: a directory with a file, a directory, a file in it and a symbolic link. Expectation: all but the link.
    let source = Source::new(1);
    fs::write(source.path("source/below/object"), b"abc").expect("a file");
    symlink("data.bin", source.path("source/link")).expect("a link");
    let disk = source
        .mount_path("source", "mnt", Parameters::default())
        .expect("a mount");
    let entries = fs::read_dir(disk.path()).expect("a list");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["below", "data.bin"]);
    assert_eq!(
        fs::read(disk.path().join("below/object")).expect("a read"),
        b"abc"
    );
    assert!(File::open(disk.path().join("link")).is_err());
    assert!(
        fs::write(disk.path().join("new"), b"x").is_err(),
        "it is read-only"
    );
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn a_replaced_file_and_a_shorter_one_are_seen_at_once() {
    // Scenario: the source's file is truncated, then replaced by rename. Expectation: the new length, then a
    // new inode.
    let source = Source::new(4);
    let disk = source.mount(Parameters::default());
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(disk.path()).expect("stat"));
    let before = inode();
    let path = source.path("source/data.bin");
    File::options()
        .write(true)
        .open(&path)
        .expect("open")
        .set_len(4096)
        .expect("cut");
    assert_eq!(fs::metadata(disk.path()).expect("stat").len(), 4096);
    assert_eq!(inode(), before);
    fs::write(source.path("source/new"), block(9)).expect("a file");
    fs::rename(source.path("source/new"), &path).expect("rename");
    assert_ne!(inode(), before);
    assert_eq!(fs::read(disk.path()).expect("a read"), block(9));
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn injected_errors_and_short_reads_reach_the_reader() {
    // Scenario: block 2 is bad, then every read short, then neither. Expectation: EIO, half a block, the whole block.
    let source = Source::new(4);
    let bad = 2 * 4096..3 * 4096;
    let parameters = Parameters {
        error_ranges: vec![bad],
        ..Parameters::default()
    };
    let disk = source.mount(parameters);
    let file = direct(disk.path());
    let mut bytes = vec![0; BLOCK];
    let error = file.read_at(&mut bytes, 2 * 4096).expect_err("EIO");
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    disk.set(|parameters| {
        parameters.error_ranges.clear();
        parameters.short_probability = 1.0;
    })
    .expect("parameters");
    assert_eq!(file.read_at(&mut bytes, 2 * 4096).expect("a read"), BLOCK / 2);
    assert_eq!(bytes[..BLOCK / 2], block(2)[..BLOCK / 2]);
    disk.set(|parameters| parameters.short_probability = 0.0)
        .expect("parameters");
    assert_eq!(file.read_at(&mut bytes, 2 * 4096).expect("a read"), BLOCK);
    let reads = disk.reads();
    assert_eq!((reads.answered, reads.failed, reads.short), (3, 1, 1));
    assert!(disk.set(|parameters| parameters.concurrency = 0).is_err());
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn the_page_cache_gets_whole_reads() {
    // Scenario: every direct read is short; the page cache reads ahead, of a file that bypasses it otherwise.
    // Expectation: its read is whole, since the kernel would take a short one for the end of the file and show zeros.
    let source = Source::new(4);
    let parameters = Parameters {
        short_probability: 1.0,
        ..Parameters::default()
    };
    let disk = source.mount(parameters);
    let file = direct(disk.path());
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed).expect("a read ahead");
    assert!(disk.wait_until(PATIENCE, |reads| reads.answered == 1));
    assert_eq!(disk.reads().short, 0);
    let records = disk.records();
    let direct: Vec<bool> = records.iter().map(|read| read.direct).collect();
    assert_eq!(direct, [false], "{records:?}");
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn held_reads_wait_and_slots_bound_those_in_service() {
    // Scenario: two slots, five readers, held. Expectation: two in service, three waiting, none answered until released.
    let source = Source::new(8);
    let parameters = Parameters {
        concurrency: 2,
        ..Parameters::default()
    };
    let disk = source.mount(parameters);
    disk.hold();
    thread::scope(|scope| {
        for index in 0..5 {
            let disk = &disk;
            scope.spawn(move || {
                let mut bytes = vec![0; BLOCK];
                let offset = u64::try_from(index * BLOCK).expect("small");
                direct(disk.path())
                    .read_exact_at(&mut bytes, offset)
                    .expect("a read");
                assert_eq!(bytes, block(index));
            });
        }
        assert!(disk.wait_until(PATIENCE, |reads| reads.arrived == 5));
        let reads = disk.reads();
        assert_eq!((reads.in_service, reads.waiting, reads.answered), (2, 3, 0));
        disk.release();
    });
    let reads = disk.reads();
    assert_eq!(
        (reads.answered, reads.in_service_peak, reads.waiting_peak),
        (5, 2, 3)
    );
}

fn engine(backend: BackendKind) -> Engine {
    let mut config = EngineConfig {
        backend,
        on_unavailable: OnUnavailable::Fail,
        cores: 1,
        ..EngineConfig::default()
    };
    config.uring.queue_depth = 1024;
    Engine::start(&config).expect("an engine")
}

fn dataset(path: &Path, direct_io: DirectIo) -> Arc<Dataset> {
    let block_bytes = u32::try_from(BLOCK).expect("small");
    let spec = DatasetSpec::new("slow", path, KindSpec::blocks(block_bytes), direct_io);
    Arc::new(Dataset::open(&spec).expect("a dataset"))
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn a_ring_has_a_thousand_direct_reads_in_flight() {
    // Scenario: one batch of 1000 separate blocks through io_uring with O_DIRECT, held. Expectation: all 1000 arrive
    // before one is answered, so neither the kernel's background limit nor its worker threads bound the depth.
    let source = Source::new(2000);
    let disk = source.mount(Parameters::default());
    let dataset = dataset(disk.path(), DirectIo::Required);
    let engine = engine(BackendKind::Uring);
    disk.reset();
    disk.hold();
    let mut batch = Batch::new(dataset, 1000);
    for index in 0..1000 {
        batch.push_block(index * 2);
    }
    let ticket = engine.submit(batch, SubmitOptions::default()).expect("submitted");
    assert!(
        disk.wait_until(PATIENCE, |reads| reads.arrived == 1000),
        "{:?}",
        disk.reads()
    );
    assert_eq!(disk.reads().answered, 0);
    disk.release();
    let fetched = ticket.wait().expect("an answer");
    assert!(fetched.errors.is_empty(), "{:?}", fetched.errors);
    let expected: Vec<u8> = (0..1000).flat_map(|index| block(index * 2)).collect();
    assert!(fetched.data == expected);
    assert_eq!(disk.reads().answered, 1000);
    let records = disk.records();
    assert!(records.len() == 1000 && records.iter().all(|record| record.direct));
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn a_mapping_reads_through_the_page_cache() {
    // Scenario: the same block through a mapping, twice. Expectation: right bytes, and the second costs no disk read.
    let source = Source::new(64);
    let disk = source.mount(Parameters::default());
    let dataset = dataset(disk.path(), DirectIo::Off);
    let engine = engine(BackendKind::Mmap);
    disk.reset();
    let fetch = || {
        let mut batch = Batch::new(Arc::clone(&dataset), 1);
        batch.push_block(40);
        engine
            .submit(batch, SubmitOptions::default())
            .expect("submitted")
            .wait()
            .expect("an answer")
    };
    assert!(fetch().data == block(40));
    let after_first = disk.reads().answered;
    assert!(after_first >= 1);
    assert!(fetch().data == block(40));
    assert_eq!(disk.reads().answered, after_first);
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn a_panic_leaves_nothing_mounted() {
    // Scenario: a panic while the disk is mounted, held, and a file open. Expectation: unmounted, mount point
    // removed.
    let source = Source::new(1);
    let mountpoint = source.path("mnt");
    let panicked = thread::scope(|scope| {
        let test = scope.spawn(|| {
            let disk = source.mount(Parameters::default());
            assert!(is_mounted(&mountpoint));
            disk.hold();
            let _open = File::open(disk.path()).expect("open");
            panic!("on purpose");
        });
        test.join().is_err()
    });
    assert!(panicked);
    assert!(!is_mounted(&mountpoint) && !mountpoint.exists());
}

#[test]
fn source_and_mount_point_inside_each_other_are_refused() {
    // Scenario: the mount point below the source. Expectation: an error that says so, before anything is mounted.
    let source = Source::new(1);
    let refused = |from, to| {
        source
            .mount_path(from, to, Parameters::default())
            .expect_err("refused")
            .to_string()
    };
    let error = refused("source", "source/below");
    assert!(error.contains("inside the other"), "{error}");
    assert!(refused("missing", "mnt").contains("missing"));
}

#[test]
#[ignore = "needs root and /dev/fuse"]
fn the_command_takes_orders_and_reports_at_the_end() {
    // Scenario: slowdisk with a latency, one read, a bad command, a change, quit. Expectation: JSON for each, unmounted.
    let source = Source::new(4);
    let mountpoint = source.path("mnt");
    let mut child = Command::new(env!("CARGO_BIN_EXE_slowdisk"))
        .args([source.path("source/data.bin"), mountpoint.clone()])
        .args(["--latency", "100us", "--until-eof"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("slowdisk");
    let mut orders = child.stdin.take().expect("stdin");
    let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
    let mut line = || -> serde_json::Value {
        serde_json::from_str(&lines.next().expect("a line").expect("UTF-8")).expect("JSON")
    };
    let mounted = line();
    let path = PathBuf::from(mounted["mounted"].as_str().expect("a path"));
    assert_eq!(mounted["parameters"]["latency"], "100us");
    direct(&path).read_exact_at(&mut [0; BLOCK], 0).expect("a read");
    orders
        .write_all(b"set latency fast\nset error-probability 1\nreport\n")
        .expect("orders");
    assert_eq!(line()["ok"], false);
    assert_eq!(line()["parameters"]["error_probability"], 1.0);
    assert_eq!(line()["reads"]["answered"], 1);
    assert!(direct(&path).read_exact_at(&mut [0; BLOCK], 0).is_err());
    orders.write_all(b"quit\n").expect("orders");
    let last = line();
    assert_eq!(
        (&last["reads"]["answered"], &last["reads"]["failed"]),
        (&2.into(), &1.into())
    );
    assert!(child.wait().expect("an end").success());
    assert!(!is_mounted(&mountpoint));
}
