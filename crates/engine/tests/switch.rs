//! Switches backends while reads are made, from threads outside and on the cores, without a failed or wrong
//! read.

#![allow(unsafe_code, reason = "a lease needs fcntl")]
#![expect(
    clippy::expect_used,
    reason = "a test fails by panicking, outside of its own function too"
)]

mod wait;

use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig, OnUnavailable};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use ringfetch_pattern as pattern;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use wait::{WAIT, alone, runtime, wait_until};

const SEED: u64 = 11;
const FILE_BYTES: u64 = 8 << 20;
const BLOCK_BYTES: u32 = 4096;
const BLOCKS: u64 = FILE_BYTES / BLOCK_BYTES as u64;

fn config(backend: BackendKind) -> EngineConfig {
    let mut config = EngineConfig {
        backend,
        on_unavailable: OnUnavailable::Fail,
        cores: 2,
        pin: false,
        memory_budget_bytes: 16 << 20,
        ..EngineConfig::default()
    };
    config.uring.queue_depth = 32;
    config
}

fn file(directory: &Path) -> PathBuf {
    let path = directory.join("blocks");
    pattern::write_blocks(&path, SEED, FILE_BYTES, &mut |_| true).expect("write");
    path
}

fn open(name: &str, path: &Path) -> Arc<Dataset> {
    let spec = DatasetSpec::new(name, path, KindSpec::blocks(BLOCK_BYTES), DirectIo::Preferred);
    Arc::new(Dataset::open(&spec).expect("a dataset"))
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn batch(dataset: &Arc<Dataset>, blocks: &[u64]) -> Batch {
    let mut batch = Batch::new(Arc::clone(dataset), blocks.len());
    blocks.iter().for_each(|block| batch.push_block(*block));
    batch
}

/// Whether `data` is exactly these blocks.
fn are_right(data: &[u8], blocks: &[u64]) -> bool {
    let mut wanted = vec![0; BLOCK_BYTES as usize];
    data.len() == blocks.len() * BLOCK_BYTES as usize
        && data
            .chunks(BLOCK_BYTES as usize)
            .zip(blocks)
            .all(|(found, block)| {
                pattern::fill(SEED, block * u64::from(BLOCK_BYTES), &mut wanted);
                found == wanted
            })
}

/// The next 16 blocks of a sequence that visits all of them.
fn next_blocks(state: &mut u64) -> Vec<u64> {
    let step = |_| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*state >> 33) % BLOCKS
    };
    (0..16).map(step).collect()
}

#[derive(Default)]
struct Counts {
    right: AtomicU64,
    wrong: AtomicU64,
    failed: AtomicU64,
    stop: AtomicBool,
}

impl Counts {
    fn count(&self, data: Option<&[u8]>, blocks: &[u64]) {
        let which = match data {
            Some(data) if are_right(data, blocks) => &self.right,
            Some(_) => &self.wrong,
            None => &self.failed,
        };
        which.fetch_add(blocks.len() as u64, Ordering::Relaxed);
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fn metrics_of(engine: &Engine) -> String {
    let registry = prometheus::Registry::new();
    engine.register_metrics(&registry).expect("free names");
    prometheus::TextEncoder::new()
        .encode_to_string(&registry.gather())
        .expect("text")
}

fn drain(engine: &Engine) {
    let report = runtime().block_on(engine.drain(Instant::now() + WAIT));
    assert_eq!(report.abandoned_reads, 0);
}

#[test]
fn switches_under_load_lose_nothing() {
    switches_lose_nothing(&[BackendKind::Mmap, BackendKind::Pread]);
}

#[test]
#[ignore = "needs io_uring"]
fn switches_to_and_from_rings_under_load_lose_nothing() {
    use BackendKind::{Auto, Mmap, Pread, Uring};
    switches_lose_nothing(&[Mmap, Auto, Pread, Uring]);
}

/// Scenario: a thread outside and a task on each core read batches without pause while the backend cycles 40
/// times through `round`. Expectation: every read is right, with some on every backend; the fortieth cycle
/// needs no more descriptors than the second.
fn switches_lose_nothing(round: &[BackendKind]) {
    let _alone = alone();
    let directory = directory();
    let dataset = open("d", &file(directory.path()));
    let last = *round.last().expect("a round");
    let engine = Engine::start(&config(last)).expect("an engine");
    engine.introduce(&dataset);
    let counts = Arc::new(Counts::default());
    let (ended, ends) = mpsc::channel();
    for core in 0..engine.core_count() {
        let (engine_there, dataset, counts, ended) = (
            engine.clone(),
            Arc::clone(&dataset),
            Arc::clone(&counts),
            ended.clone(),
        );
        let spawned = engine.spawn_on(core, move || async move {
            let mut state = core as u64;
            while !counts.stop.load(Ordering::Relaxed) {
                let blocks = next_blocks(&mut state);
                let ticket = engine_there.submit(batch(&dataset, &blocks), SubmitOptions::default());
                let answer = match ticket {
                    Ok(ticket) => ticket.await.ok().filter(|fetched| fetched.errors.is_empty()),
                    Err(_) => None,
                };
                counts.count(answer.as_ref().map(|fetched| &*fetched.data), &blocks);
            }
            drop(engine_there);
            ended.send(()).expect("the test waits");
        });
        assert!(spawned);
    }
    let outside = std::thread::spawn({
        let (engine, dataset, counts) = (engine.clone(), Arc::clone(&dataset), Arc::clone(&counts));
        move || {
            let mut state = 77;
            while !counts.stop.load(Ordering::Relaxed) {
                let blocks = next_blocks(&mut state);
                let ticket = engine.submit(batch(&dataset, &blocks), SubmitOptions::default());
                let answer = ticket.and_then(ringfetch_engine::engine::Ticket::wait);
                let answer = answer.ok().filter(|fetched| fetched.errors.is_empty());
                counts.count(answer.as_ref().map(|fetched| &*fetched.data), &blocks);
            }
        }
    });
    let mut after_second = 0;
    for number in 0..40 {
        for &backend in round {
            let status = engine.set_backend(backend).expect("a switch");
            assert_eq!((status.backend, engine.backend().backend), (backend, backend));
            let before = counts.right.load(Ordering::Relaxed);
            wait_until(
                || counts.right.load(Ordering::Relaxed) > before + 64,
                || "no read is answered any more".to_owned(),
            );
        }
        if number == 1 {
            after_second = descriptors();
        }
    }
    // The last switch's files are closed a moment later.
    wait_until(
        || descriptors() <= after_second,
        || format!("{after_second} descriptors then, {} now", descriptors()),
    );
    counts.stop.store(true, Ordering::Relaxed);
    outside.join().expect("no panic");
    for _ in 0..engine.core_count() {
        ends.recv_timeout(WAIT).expect("a core's task ends");
    }
    let [right, wrong, failed] =
        [&counts.right, &counts.wrong, &counts.failed].map(|count| count.load(Ordering::Relaxed));
    assert_eq!((wrong, failed), (0, 0), "of {right} right ones");
    let metrics = metrics_of(&engine);
    let mut sum = 0;
    for backend in round {
        let name = format!("ringfetch_reads_total{{dataset=\"d\",backend=\"{backend}\",result=\"ok\"}} ");
        let reads = metrics.lines().find_map(|line| line.strip_prefix(&name));
        let reads: u64 = reads
            .unwrap_or_else(|| panic!("{name}: {metrics}"))
            .parse()
            .expect("a count");
        assert!(reads > 0, "{backend} served nothing");
        sum += reads;
    }
    assert_eq!(sum, right, "the metrics of both sides together");
    drain(&engine);
}

#[test]
fn a_dataset_may_have_a_backend_of_its_own() {
    // Scenario: of two datasets on mmap one gets mmap as its own, then the engine is switched to pread, then
    // the own backend is cleared. Expectation: each is read by its backend, as the metrics show; the bytes
    // are right throughout.
    let _alone = alone();
    let directory = directory();
    let path = file(directory.path());
    let (one, other) = (open("one", &path), open("other", &path));
    let engine = Engine::start(&config(BackendKind::Mmap)).expect("an engine");
    engine.introduce(&one);
    engine.introduce(&other);
    let read = |dataset: &Arc<Dataset>| {
        let ticket = engine.submit(batch(dataset, &[3, 5]), SubmitOptions::default());
        let fetched = ticket
            .and_then(ringfetch_engine::engine::Ticket::wait)
            .expect("an answer");
        assert!(are_right(&fetched.data, &[3, 5]));
        engine.backend_of(dataset).backend
    };
    engine
        .set_backend_of(&one, Some(BackendKind::Mmap))
        .expect("a switch");
    assert_eq!((read(&one), read(&other)), (BackendKind::Mmap, BackendKind::Mmap));
    engine.set_backend(BackendKind::Pread).expect("a switch");
    assert_eq!(
        (read(&one), read(&other)),
        (BackendKind::Mmap, BackendKind::Pread)
    );
    let metrics = metrics_of(&engine);
    for wanted in [
        "ringfetch_dataset_backend_info{dataset=\"one\",backend=\"mmap\",requested=\"mmap\",reason=\"switched while running\"} 1",
        "ringfetch_dataset_backend_info{dataset=\"other\",backend=\"pread\",requested=\"pread\",reason=\"switched while running\"} 1",
        "ringfetch_backend_info{backend=\"pread\",requested=\"pread\",reason=\"switched while running\"} 1",
        "ringfetch_reads_total{dataset=\"one\",backend=\"mmap\",result=\"ok\"} 4",
        "ringfetch_reads_total{dataset=\"one\",backend=\"pread\",result=\"ok\"} 0",
    ] {
        let found = metrics.lines().any(|line| line == wanted);
        // A dataset with a backend of its own has no series of the others.
        assert_eq!(found, !wanted.ends_with(" 0"), "{wanted}\n{metrics}");
    }
    engine.set_backend_of(&one, None).expect("taken away");
    assert_eq!(read(&one), BackendKind::Pread);
    drain(&engine);
}

#[test]
fn what_cannot_be_had_changes_nothing() {
    // Scenario: a switch to the simulation, which a running engine does not have; a switch of an engine that
    // has drained. Expectation: each is refused with its reason; the old backend continues to serve until the
    // drain.
    let _alone = alone();
    let directory = directory();
    let dataset = open("d", &file(directory.path()));
    let engine = Engine::start(&config(BackendKind::Mmap)).expect("an engine");
    let refused = engine.set_backend(BackendKind::Sim).expect_err("no simulation");
    assert!(
        refused.0.contains("choose uring, mmap, auto or pread"),
        "{refused}"
    );
    assert_eq!(engine.backend().backend, BackendKind::Mmap);
    let ticket = engine.submit(batch(&dataset, &[1]), SubmitOptions::default());
    assert!(are_right(
        &ticket.expect("accepted").wait().expect("read").data,
        &[1]
    ));
    drain(&engine);
    let refused = engine.set_backend(BackendKind::Pread).expect_err("drained");
    assert!(refused.0.contains("ending"), "{refused}");
}

#[test]
fn a_dataset_that_is_gone_leaves_no_descriptor() {
    for backend in [BackendKind::Mmap, BackendKind::Pread] {
        no_descriptor_is_left(backend);
    }
}

#[test]
#[ignore = "needs io_uring"]
fn a_dataset_that_is_gone_leaves_no_descriptor_in_a_ring() {
    no_descriptor_is_left(BackendKind::Uring);
}

/// Scenario: 300 times, more than a ring's table has entries, a dataset is opened, read on both cores, and
/// dropped; then a sweep. Expectation: the kernel closes the file, which a write lease proves; and the last
/// dataset is still read right.
fn no_descriptor_is_left(backend: BackendKind) {
    let _alone = alone();
    let directory = directory();
    let path = file(directory.path());
    let engine = Engine::start(&config(backend)).expect("an engine");
    let mut last = None;
    for number in 0..300 {
        let dataset = open("d", &path);
        for core in 0..engine.core_count() {
            let (tell, told) = mpsc::channel();
            let (there, dataset) = (engine.clone(), Arc::clone(&dataset));
            engine.spawn_on(core, move || async move {
                let ticket = there.submit(batch(&dataset, &[number]), SubmitOptions::default());
                let right = match ticket {
                    Ok(ticket) => ticket
                        .await
                        .is_ok_and(|fetched| are_right(&fetched.data, &[number])),
                    Err(_) => false,
                };
                drop(dataset);
                tell.send(right).expect("the test waits");
            });
            assert!(told.recv_timeout(WAIT).expect("an answer"), "read {number}");
        }
        last = Some(dataset);
        engine.sweep();
    }
    drop(last);
    engine.sweep();
    // F_SETLEASE with F_WRLCK succeeds only while nobody else has the file open, io_uring's tables included.
    let alone = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .expect("open");
    wait_until(
        || write_lease(&alone),
        || "the file is still open somewhere".to_owned(),
    );
    drain(&engine);
}

/// Whether a write lease is granted, which any other descriptor of the file prevents; it is released at once.
fn write_lease(file: &std::fs::File) -> bool {
    use std::os::fd::AsRawFd;
    // SAFETY: plain numbers; the descriptor is open.
    let given = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) } == 0;
    // SAFETY: as above.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    given
}

#[test]
fn every_shard_gives_signs_of_life() {
    every_shard_of_two_backends_gives_signs_of_life(BackendKind::Pread);
}

#[test]
#[ignore = "needs io_uring"]
fn every_shard_with_a_ring_gives_signs_of_life() {
    every_shard_of_two_backends_gives_signs_of_life(BackendKind::Uring);
}

fn every_shard_of_two_backends_gives_signs_of_life(first: BackendKind) {
    // Scenario: an engine with `first` and a mapping started; then one whose only shard has a read that never
    // ends, which must not count against it; then one whose shard has panicked. Expectation: alive, alive,
    // the shard's number.
    use ringfetch_engine::sim::{Fault, FaultPlan, SimControl};
    let _alone = alone();
    let directory = directory();
    let dataset = open("d", &file(directory.path()));
    let runtime = runtime();
    let engine = Engine::start(&config(first)).expect("an engine");
    engine.set_backend(BackendKind::Mmap).expect("a switch");
    assert_eq!(runtime.block_on(engine.signs_of_life(WAIT)), Ok(()));
    drain(&engine);

    let control = SimControl::from_environment();
    control.set_faults(FaultPlan::script(&[Fault::Stall, Fault::Panic]));
    let engine = Engine::start_sim(&config(BackendKind::Sim), &control).expect("an engine");
    let stalled = engine
        .submit(batch(&dataset, &[1]), SubmitOptions::default())
        .expect("accepted");
    assert_eq!(runtime.block_on(engine.signs_of_life(WAIT)), Ok(()));
    let panicked = engine
        .submit(batch(&dataset, &[2]), SubmitOptions::default())
        .expect("accepted");
    assert!(runtime.block_on(panicked).is_err());
    assert_eq!(runtime.block_on(engine.signs_of_life(WAIT)), Err(0));
    drop(stalled);
}
