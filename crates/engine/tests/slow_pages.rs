//! `auto` on a disk that answers nothing, where a page that it is asked for is in the page cache, but not read yet: its
//! core, which serves connections too, must not wait for it.

#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking, outside of its own function too"
)]

#[path = "../../server/tests/e2e/loop_device.rs"]
mod loop_device;
mod wait;

use loop_device::LoopDevice;
use ringfetch_engine::batch::{Batch, Fetched};
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig, OnUnavailable};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
use ringfetch_engine::engine::{Engine, SubmitOptions, Ticket};
use ringfetch_engine::error::ReadError;
use ringfetch_engine::probe::resident_pages;
use ringfetch_pattern as pattern;
use slowdisk::{Parameters, SlowDisk};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Instant;
use wait::{WAIT, alone, runtime, wait_until};

const SEED: u64 = 17;
const FILE_BYTES: u64 = 4 << 20;
const BLOCK_BYTES: u32 = 512;
/// Blocks of a page of 4 KiB.
const PAGE: u64 = 8;
/// The first block of a page that is read while the disk answers nothing: far behind what attaching a device reads.
const MISSING: u64 = 400 * PAGE;
/// Pages of a region that `auto` trusts as a whole.
const REGION_PAGES: u64 = 512;

/// An engine of one core, and two datasets of one file on a slow disk, or of a block device made of it: FUSE refuses reads
/// that do not wait, a device has them.
struct Scene {
    engine: Engine,
    datasets: [Arc<Dataset>; 2],
    _device: Option<LoopDevice>,
    disk: SlowDisk,
    _directory: tempfile::TempDir,
}

/// The answer to a read of one block.
type Answer = Result<Fetched, ReadError>;

impl Scene {
    fn new(backend: BackendKind, is_device: bool) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let source = directory.path().join("blocks");
        pattern::write_blocks(&source, SEED, FILE_BYTES, &mut |_| true).expect("write");
        let mountpoint = directory.path().join("disk");
        let disk = SlowDisk::mount(&source, &mountpoint, &Parameters::default()).expect("a disk");
        let device = is_device.then(|| LoopDevice::attach(disk.path(), "--read-only"));
        let path = device
            .as_ref()
            .map_or_else(|| disk.path().to_owned(), |device| PathBuf::from(&device.0));
        let datasets = ["first", "second"].map(|name| {
            let kind = KindSpec::blocks(BLOCK_BYTES);
            let spec = DatasetSpec::new(name, &path, kind, DirectIo::Off);
            Arc::new(Dataset::open(&spec).expect("a dataset"))
        });
        let config = EngineConfig {
            backend,
            on_unavailable: OnUnavailable::Fail,
            cores: 1,
            pin: false,
            memory_budget_bytes: 16 << 20,
            ..EngineConfig::default()
        };
        let engine = Engine::start(&config).expect("an engine");
        datasets.iter().for_each(|dataset| engine.introduce(dataset));
        Self {
            engine,
            datasets,
            _device: device,
            disk,
            _directory: directory,
        }
    }

    /// Submits the read of a block from outside of the core.
    fn submit(&self, dataset: usize, block: u64) -> Ticket {
        let ticket = self
            .engine
            .submit(batch(&self.datasets[dataset], block), SubmitOptions::default());
        ticket.expect("accepted")
    }

    /// Reads a block by a task on the core.
    fn read_on_core(&self, dataset: usize, block: u64) -> mpsc::Receiver<Answer> {
        let (engine, dataset) = (self.engine.clone(), Arc::clone(&self.datasets[dataset]));
        let (sender, answer) = mpsc::channel();
        let spawned = self.engine.spawn_on(0, move || async move {
            let read = match engine.submit(batch(&dataset, block), SubmitOptions::default()) {
                Ok(ticket) => ticket.await,
                Err(error) => Err(error),
            };
            drop(engine);
            // The test may have failed.
            let _gone = sender.send(read);
        });
        assert!(spawned);
        answer
    }

    /// Whether the core runs tasks.
    fn core_is_free(&self) -> bool {
        let (sender, ran) = mpsc::channel();
        let spawned = self.engine.spawn_on(0, move || async move {
            let _gone = sender.send(());
        });
        spawned && ran.recv_timeout(WAIT).is_ok()
    }

    /// Submits the read of a block that is not resident, and waits until the disk has it.
    fn begin_on_disk(&self, dataset: usize, block: u64) -> Ticket {
        self.disk.hold();
        let before = self.disk.reads().arrived;
        let ticket = self.submit(dataset, block);
        wait_until(
            || self.disk.reads().arrived > before,
            || "the read does not reach the disk".to_owned(),
        );
        ticket
    }

    /// While a page is being read, reads another block of it, from the core and from outside. The core stays free, and all
    /// get their bytes once the disk answers.
    fn reads_what_is_on_its_way(&self, dataset: usize, begun: (Ticket, u64), block: u64) {
        let on_core = self.read_on_core(dataset, block);
        let was_free = self.core_is_free();
        let outside = self.submit(dataset, block + 1);
        let was_free = was_free && self.core_is_free();
        self.disk.release();
        assert!(was_free, "the core waits for the disk");
        let (begun, begun_block) = begun;
        assert_right(begun.wait(), begun_block);
        assert_right(on_core.recv_timeout(WAIT).expect("an answer"), block);
        assert_right(outside.wait(), block + 1);
        let report = runtime().block_on(self.engine.drain(Instant::now() + WAIT));
        assert_eq!(report.abandoned_reads, 0);
    }
}

fn batch(dataset: &Arc<Dataset>, block: u64) -> Batch {
    let mut batch = Batch::new(Arc::clone(dataset), 1);
    batch.push_block(block);
    batch
}

#[track_caller]
fn assert_right(answer: Answer, block: u64) {
    let fetched = answer.expect("a response");
    let mut wanted = vec![0; BLOCK_BYTES as usize];
    pattern::fill(SEED, block * u64::from(BLOCK_BYTES), &mut wanted);
    assert_eq!(fetched.errors, []);
    assert!(fetched.data == wanted, "block {block}");
}

/// Two datasets of one file with `auto`. While one's read of a page is in flight, the other is asked for a block of it.
#[test]
#[ignore = "needs root, losetup, /dev/fuse and io_uring"]
fn a_page_that_another_dataset_is_reading_stops_no_core() {
    let _alone = alone();
    for is_device in [false, true] {
        let scene = Scene::new(BackendKind::Auto, is_device);
        let begun = scene.begin_on_disk(0, MISSING);
        scene.reads_what_is_on_its_way(1, (begun, MISSING), MISSING + 3);
    }
}

/// A read of a page is in flight by another backend when `auto` takes over, and is asked for another block of it.
#[test]
#[ignore = "needs root, losetup, /dev/fuse and io_uring"]
fn a_page_that_the_backend_before_is_reading_stops_no_core() {
    let _alone = alone();
    for before in [BackendKind::Uring, BackendKind::Pread, BackendKind::Mmap] {
        for is_device in [false, true] {
            let scene = Scene::new(before, is_device);
            let begun = scene.begin_on_disk(0, MISSING);
            scene.engine.set_backend(BackendKind::Auto).expect("auto");
            scene.reads_what_is_on_its_way(0, (begun, MISSING), MISSING + 3);
        }
    }
}

/// As above, but all other pages of the region are resident, and reads have found some of them.
#[test]
#[ignore = "needs root, /dev/fuse and io_uring"]
fn a_region_with_a_page_on_its_way_is_not_trusted() {
    let _alone = alone();
    for before in [BackendKind::Uring, BackendKind::Pread] {
        let scene = Scene::new(before, false);
        let file = std::fs::File::open(scene.disk.path()).expect("open");
        wait_until(
            || {
                for page in (0..REGION_PAGES).filter(|page| page * PAGE != MISSING) {
                    assert_right(scene.submit(0, page * PAGE).wait(), page * PAGE);
                }
                let region = REGION_PAGES * PAGE * u64::from(BLOCK_BYTES);
                resident_pages(&file, region).expect("cachestat(2)") == REGION_PAGES - 1
            },
            || "not all other pages are resident, or that one is".to_owned(),
        );
        let begun = scene.begin_on_disk(0, MISSING);
        scene.engine.set_backend(BackendKind::Auto).expect("auto");
        for page in 0..16 {
            assert_right(scene.submit(0, page * PAGE + 1).wait(), page * PAGE + 1);
        }
        scene.reads_what_is_on_its_way(0, (begun, MISSING), MISSING + 3);
    }
}
