//! Real block devices: loop devices with sectors of 512 and 4096 bytes, and one that fails permanently.
//!
//! A loop device whose backing file was truncated returns EIO for the lost part: a real device error on every
//! path, including SIGBUS under a mapping.

use crate::harness::{Harness, VARIANTS, Variant, blocks_of, ranges_of};
use crate::machine::Device;
use crate::named;
use crate::needs::Need;
use crate::suite::Test;
use crate::wait::{WAIT, alone, wait_until};
use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, Dtype, KindSpec};
use ringfetch_engine::error::ReadError;
use ringfetch_engine::probe;
use ringfetch_pattern as pattern;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity};
use std::path::Path;
use std::sync::Arc;

/// Drops the cached pages of these files or devices.
fn drop_cached(paths: &[&Path]) {
    for path in paths {
        let file = std::fs::File::open(path).expect("open");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
    }
}

/// Whether the page cache has some of a device from `begin` to `end`; false where the kernel does not tell.
fn is_cached(device: &Path, begin: u64, end: u64) -> bool {
    let file = std::fs::File::open(device).expect("open");
    let pages = |length| probe::resident_pages(&file, length).unwrap_or(0);
    pages(end) > pages(begin)
}

fn reads_are_right_on(variant: Variant, sector_bytes: u32) {
    let _alone = alone();
    let harness = Harness::with(variant, |_| {});
    let (backing, model) = harness.file("backing", 4 << 20);
    let device = Device::on_file(&backing, sector_bytes, true).expect("a loop device");
    let dataset = harness.blocks(4096, &[device.path()]);
    // Its own length: st_size is 0.
    assert_eq!(dataset.length_bytes(), 4 << 20, "{}", harness.name());
    assert_eq!(dataset.count(), 1024, "{}", harness.name());
    let facts = dataset.direct();
    assert_eq!(facts.direct, variant.direct_io != DirectIo::Off, "{facts:?}");
    if variant.direct_io == DirectIo::Required {
        assert!(
            !facts.reason.contains("memory"),
            "{}: a device's node is on tmpfs: {facts:?}",
            harness.name()
        );
        assert_eq!(
            facts.offset_alignment_bytes,
            sector_bytes,
            "{}: {facts:?}",
            harness.name()
        );
        assert!(facts.memory_alignment_bytes <= sector_bytes, "{facts:?}");
        let alignment = format!("{sector_bytes}-byte alignment");
        assert!(facts.reason.contains(&alignment), "{facts:?}");
    }
    harness.expect_blocks(&dataset, &model, 4096, &[0, 1023, 7, 8, 9, 500, 7]);
    harness.expect_ranges(
        &dataset,
        &model,
        &[
            (511, 2),
            (512, 512),
            (4095, 1026),
            (1_000_001, 300_000),
            ((4 << 20) - 1, 1),
            (0, 1),
        ],
    );
    harness.expect_ranges(&dataset, &model, &[(77, 200_000)]);
    harness.expect_ranges(&dataset, &model, &[((4 << 20) - 700, 700)]);
    drop(dataset);

    let vectors = KindSpec::raw_vectors(1024, Dtype::F32, 4096);
    let dataset = harness.open(vectors, &[device.path()]);
    assert_eq!(dataset.count(), 1023, "{}", harness.name());
    drop(dataset);
    let uneven = DatasetSpec::new("uneven", device.path(), KindSpec::blocks(3000), variant.direct_io);
    let error = Dataset::open(&uneven).expect_err("3000 does not divide the length");
    assert_eq!(error.field, "block_bytes", "{error}");
    harness.finish();
}

fn sectors_of_512_bytes(variant: Variant) {
    // Scenario: a loop device of 512-byte sectors, read by every backend. Expectation: direct reads aligned
    // to 512, and the right bytes for blocks and unaligned ranges, at both ends too; it opens as raw vectors;
    // a block size that does not divide its length is refused with the field.
    reads_are_right_on(variant, 512);
}

fn sectors_of_4096_bytes(variant: Variant) {
    // Scenario: a loop device of 4096-byte sectors. Expectation: direct reads aligned to 4096, and the same
    // otherwise.
    reads_are_right_on(variant, 4096);
}

fn a_last_sector_that_is_not_whole(variant: Variant) {
    // Scenario: a device of 4096-byte sectors that ends 1,536 bytes into a sector, which no read returns.
    // Expectation: it ends with its last whole sector, on every path.
    let _alone = alone();
    let harness = Harness::with(variant, |_| {});
    let (backing, model) = harness.file("backing", (1 << 20) + 1536);
    let device = Device::on_file(&backing, 4096, true).expect("a loop device");
    let dataset = harness.blocks(512, &[device.path()]);
    assert_eq!(dataset.length_bytes(), 1 << 20, "{}", harness.name());
    harness.expect_blocks(&dataset, &model, 512, &[2047, 0]);
    harness.expect_ranges(&dataset, &model, &[((1 << 20) - 700, 700)]);
    drop(dataset);
    harness.finish();
}

fn a_device_that_fails(variant: Variant) {
    // Scenario: a device loses its second half, including what was cached of it; blocks in both halves, apart
    // and in a run that merges into one read; ranges that cross the border. Expectation: EIO with the item's
    // extent for what is lost, bytes for everything else, the same on every path; and the engine continues.
    let _alone = alone();
    let harness = Harness::with(variant, |_| {});
    let (backing, model) = harness.file("backing", 4 << 20);
    let device = Device::on_file(&backing, 512, true).expect("a loop device");
    let dataset = harness.blocks(4096, &[device.path()]);
    let half = 2 << 20;
    harness.truncate(&backing, half as u64);
    let eio = |offset: usize, length: usize| ReadError::Device {
        errno: libc::EIO,
        offset: offset as u64,
        length: length as u64,
    };
    let run: Vec<usize> = (500..524).collect();
    let apart = vec![0, 600, 100, 1023, 511, 512];
    for blocks in [apart, run, vec![700]] {
        // The kernel keeps pages that somebody uses at that moment.
        wait_until(
            || {
                drop_cached(&[device.path(), &backing]);
                !is_cached(device.path(), half as u64, 4 << 20)
            },
            || "the lost half stays in the page cache".to_owned(),
        );
        let items: Vec<_> = blocks
            .iter()
            .map(|block| match block * 4096 < half {
                true => Ok(&model[block * 4096..][..4096]),
                false => Err(eio(block * 4096, 4096)),
            })
            .collect();
        harness.expect(|| blocks_of(&dataset, &blocks), &items);
    }
    let ranges = [
        (100, 5000),
        (half - 10_000, 20_000),
        (half - 4096, 4096),
        (half + 5, 10),
    ];
    harness.expect(
        || ranges_of(&dataset, &ranges),
        &[
            Ok(&model[100..5100]),
            Err(eio(half - 10_000, 20_000)),
            Ok(&model[half - 4096..half]),
            Err(eio(half + 5, 10)),
        ],
    );
    harness.expect_blocks(&dataset, &model, 4096, &[0, 1, 2, 511]);
    drop(dataset);
    let file = backing.canonicalize().expect("the backing file");
    harness.finish();
    let gone = device.path().to_owned();
    drop(device);
    wait_until(
        || detached(&gone, &file),
        || format!("{} stays attached after {WAIT:?}", gone.display()),
    );
}

/// Whether a loop device has lost this backing file; another process may have given it one of its own.
fn detached(device: &Path, file: &Path) -> bool {
    let name = device.file_name().expect("a name").to_string_lossy();
    let found = std::fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"));
    // ` (deleted)` follows.
    !found.is_ok_and(|found| found.starts_with(&*file.to_string_lossy()))
}

fn memory_that_a_driver_gets_wrong_is_not_used(variant: Variant) {
    // Scenario: a device in memory whose driver announces 512-byte aligned memory and overwrites whole pages;
    // blocks, vectors of 3,072 bytes, ranges at odd offsets, runs that merge and reads that are split, by
    // every backend. Expectation: direct reads into whole pages, the reason reported, and the right bytes
    // everywhere.
    let _alone = alone();
    let mut model = vec![0; 4 << 20];
    pattern::fill(7, 0, &mut model);
    let device = Device::in_memory(4 << 20).expect("zram");
    std::fs::write(device.path(), &model).expect("write to the device");
    let harness = Harness::with(variant, |_| {});
    let dataset = harness.blocks(4096, &[device.path()]);
    let facts = dataset.direct();
    if facts.direct {
        assert_eq!(facts.memory_alignment_bytes, 4096, "{facts:?}");
        let part = "since a trial read into 512-byte aligned memory has the bytes around it overwritten";
        assert!(facts.reason.contains(part), "{facts:?}");
    }
    assert_eq!(facts.direct, variant.direct_io != DirectIo::Off, "{facts:?}");
    harness.expect_blocks(&dataset, &model, 4096, &[0, 1023, 7, 8, 9, 500, 7]);
    harness.expect_blocks(&dataset, &model, 4096, &(100..180).collect::<Vec<_>>());
    // Worked: after 512 bytes of response, a block aligned to the device's sectors is off the page in memory.
    harness.expect_ranges(&dataset, &model, &[(512, 512), (8192, 4096), (40_960, 12_288)]);
    harness.expect_ranges(
        &dataset,
        &model,
        &[(1, 3584), (4096, 8192), (77, 200_000), (0, 1)],
    );
    harness.expect_ranges(&dataset, &model, &[(777, 1_000_000)]);
    harness.expect_ranges(&dataset, &model, &[((4 << 20) - 700, 700)]);
    drop(dataset);

    let kind = KindSpec::raw_vectors(768, Dtype::F32, 1024);
    let dataset = harness.open(kind, &[device.path()]);
    let vectors: Vec<usize> = (0..64).chain([1000, 3, 999, 1001, 1]).collect();
    let items: Vec<_> = vectors
        .iter()
        .map(|vector| Ok(&model[1024 + vector * 3072..][..3072]))
        .collect();
    let build = || {
        let mut batch = Batch::new(Arc::clone(&dataset), vectors.len());
        vectors
            .iter()
            .for_each(|vector| batch.push_vector(*vector as u64));
        batch
    };
    harness.expect(build, &items);
    drop(dataset);
    harness.finish();
}

fn kernel_workers_do_not_share_the_cpu_of_a_pinned_core(variant: Variant) {
    // Scenario: a device that cannot start a read without sleeping, so that the kernel's worker threads make
    // the reads of a ring; its core is pinned. Expectation: the workers may run on the process's other CPUs,
    // if it has any, and not on the core's.
    let _alone = alone();
    let device = Device::in_memory(4 << 20).expect("zram");
    let harness = Harness::with(variant, |config| {
        config.cores = 1;
        config.pin = true;
    });
    let dataset = harness.blocks(4096, &[device.path()]);
    harness.expect_blocks(&dataset, &vec![0; 4 << 20], 4096, &(0..64).collect::<Vec<_>>());
    let may_use = |thread: &str| sched_getaffinity(Some(Pid::from_raw(thread.parse().ok()?)?)).ok();
    let all = sched_getaffinity(None).expect("the mask of this thread");
    let threads = std::fs::read_dir("/proc/self/task").expect("threads").flatten();
    let workers: Vec<_> = threads
        .filter_map(|thread| {
            let name = std::fs::read_to_string(thread.path().join("comm")).ok()?;
            let core = may_use(name.trim_end().strip_prefix("iou-wrk-")?)?;
            // Cores of other tests are not pinned.
            (core != all).then_some((core, may_use(thread.file_name().to_str()?)?))
        })
        .collect();
    assert!(
        !workers.is_empty() || all.count() == 1,
        "no worker of a pinned core"
    );
    for (core, worker) in workers {
        let both = (0..CpuSet::MAX_CPU).filter(|&cpu| core.is_set(cpu) && worker.is_set(cpu));
        assert_eq!(
            both.count(),
            0,
            "a core on {core:?}, a worker on {worker:?}, of {all:?}"
        );
    }
    drop(dataset);
    harness.finish();
}

/// The variants that read from the device.
fn real_variants() -> impl Iterator<Item = &'static Variant> {
    VARIANTS
        .iter()
        .filter(|variant| variant.backend != BackendKind::Sim)
}

pub(crate) fn tests() -> Vec<Test> {
    type OnDevice = (&'static str, fn(Variant));
    let on_loop: &[OnDevice] = named!(
        sectors_of_512_bytes,
        sectors_of_4096_bytes,
        a_last_sector_that_is_not_whole,
        a_device_that_fails
    );
    let in_memory: &[OnDevice] = named!(memory_that_a_driver_gets_wrong_is_not_used);
    let mut tests = Vec::new();
    for (device, cases) in [(Need::LoopDevice, on_loop), (Need::Zram, in_memory)] {
        for variant in real_variants() {
            for &(case, run) in cases {
                let ring = variant.has_ring().then_some(Need::IoUring);
                let needs = ring.into_iter().chain([device]).collect();
                let name = format!("devices::{}::{case}", variant.name);
                tests.push(Test::new(name, needs, move || run(*variant)));
            }
        }
    }
    let case = "kernel_workers_do_not_share_the_cpu_of_a_pinned_core";
    let on_ring = real_variants()
        .find(|variant| variant.has_ring())
        .expect("a ring");
    tests.push(Test::new(
        format!("devices::{}::{case}", on_ring.name),
        vec![Need::IoUring, Need::Zram],
        move || kernel_workers_do_not_share_the_cpu_of_a_pinned_core(*on_ring),
    ));
    tests
}
