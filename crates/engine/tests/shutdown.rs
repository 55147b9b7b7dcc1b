//! The end of an engine: under load, repeatedly, without leaving a thread, a descriptor or a mapping; and by
//! a defect.
//!
//! The tests count resources of the whole process, so they run one at a time.

#![expect(
    clippy::expect_used,
    reason = "a test fails by panicking, outside of its own function too"
)]

mod wait;

use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig, OnUnavailable, Placement};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use ringfetch_engine::error::ReadError;
use ringfetch_engine::sim::{Fault, FaultPlan, SimControl};
use ringfetch_pattern as pattern;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use wait::{WAIT, alone, runtime, wait_until};

const BLOCKS: u64 = 1024;
/// More than other mappings have: some versions of glibc keep 40 MiB of stacks, as one.
const MEMORY_BYTES: u64 = 256 << 20;

fn config(backend: BackendKind, placement: Placement) -> EngineConfig {
    let mut config = EngineConfig {
        backend,
        on_unavailable: OnUnavailable::Fail,
        cores: 2,
        pin: false,
        memory_budget_bytes: MEMORY_BYTES,
        ..EngineConfig::default()
    };
    config.uring.queue_depth = 16;
    config.uring.placement = placement;
    config.pread.threads = 4;
    config
}

struct World {
    _directory: tempfile::TempDir,
    dataset: Arc<Dataset>,
}

fn world() -> World {
    // A process's first runtime opens a socket pair for signals that tokio keeps forever: do it before
    // counting.
    drop(runtime());
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("blocks");
    pattern::write_blocks(&path, 4, BLOCKS * 4096, &mut |_| true).expect("write");
    let spec = DatasetSpec::new("shutdown", path, KindSpec::blocks(4096), DirectIo::Required);
    let dataset = Dataset::open(&spec);
    World {
        _directory: directory,
        dataset: Arc::new(dataset.expect("open")),
    }
}

fn batch(dataset: &Arc<Dataset>, seed: u64, items: u64) -> (Vec<u64>, Batch) {
    let blocks: Vec<u64> = (0..items).map(|item| (seed * 131 + item * 37) % BLOCKS).collect();
    let mut batch = Batch::new(Arc::clone(dataset), blocks.len());
    blocks.iter().for_each(|block| batch.push_block(*block));
    (blocks, batch)
}

/// What this process has open: the targets of its descriptors, sorted.
fn descriptors() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("proc").flatten();
    // The descriptor used to list them is closed by then; files of the test before are, soon.
    let mut targets: Vec<String> = entries
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|target| !target.ends_with("/fd") && !target.ends_with(" (deleted)"))
        .collect();
    targets.sort();
    targets
}

/// The engine's threads, and the kernel's workers for its rings.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("proc").flatten();
    // A thread may end meanwhile.
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| name.starts_with("rf-") || name.starts_with("iou-"))
        // It closes the files of every engine, and lives as long as the process.
        .filter(|name| name != "rf-reaper")
        .collect()
}

/// Mappings of rings, and the bytes of what may be response memory: anonymous, and at least as large. Not their number, since
/// neighbours become one. A file stays mapped as long as its dataset is open.
fn mappings() -> (usize, u64) {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("proc");
    let (mut rings, mut memory) = (0, 0);
    for line in maps.lines() {
        let fields: Vec<_> = line.split_whitespace().collect();
        let &[addresses, rights, _, _, _, ref name @ ..] = fields.as_slice() else {
            panic!("{line}");
        };
        let (first, last) = addresses.split_once('-').expect("a range");
        let at = |address| u64::from_str_radix(address, 16).expect("an address");
        let bytes = at(last) - at(first);
        if line.contains("io_uring") {
            rings += 1;
        } else if name.is_empty() && rights == "rw-p" && bytes >= MEMORY_BYTES {
            memory += bytes;
        }
    }
    (rings, memory)
}

/// Fetches until the engine drains; returns the batches that were answered with data.
async fn load(engine: Engine, dataset: Arc<Dataset>, task: u64, answered: Arc<AtomicU64>) {
    for round in 0.. {
        let (blocks, batch) = batch(&dataset, task * 7919 + round, 24);
        let answer = match engine.submit(batch, SubmitOptions::default()) {
            Ok(ticket) => ticket.await,
            Err(error) => Err(error),
        };
        match answer {
            Ok(fetched) => {
                assert_eq!(fetched.errors, []);
                for (place, block) in blocks.iter().enumerate() {
                    let bytes = &fetched.data[place * 4096..][..4096];
                    assert_eq!(pattern::first_difference(4, block * 4096, bytes), None);
                }
                answered.fetch_add(1, Ordering::Relaxed);
            }
            Err(ReadError::Draining) => return,
            Err(ReadError::Overloaded { .. }) => tokio::task::yield_now().await,
            Err(other) => panic!("task {task}: {other}"),
        }
    }
}

const WITHOUT_RINGS: [(BackendKind, Placement); 2] = [
    (BackendKind::Mmap, Placement::SameThread),
    (BackendKind::Pread, Placement::SameThread),
];
const WITH_RINGS: [(BackendKind, Placement); 2] = [
    (BackendKind::Uring, Placement::SameThread),
    (BackendKind::Uring, Placement::OwnThread),
];

#[test]
fn nothing_is_left_of_an_engine_that_drained_under_load() {
    nothing_is_left(&WITHOUT_RINGS);
}

#[test]
#[ignore = "needs io_uring"]
fn nothing_is_left_of_an_engine_with_rings_that_drained_under_load() {
    nothing_is_left(&WITH_RINGS);
}

/// Scenario: ten engines, one after the other, of each backend and placement in turn; tasks outside, on two
/// threads, and tasks on the cores load each one, and it drains in the middle. Expectation: every ticket is
/// answered with data or Draining, nothing is abandoned, and afterwards threads, descriptors and mappings are as
/// before.
fn nothing_is_left(kinds: &[(BackendKind, Placement)]) {
    let _alone = alone();
    let world = world();
    let before = (descriptors(), mappings());
    for (cycle, &(backend, placement)) in kinds.iter().cycle().take(10).enumerate() {
        let who = format!("cycle {cycle}, {backend} {placement:?}");
        let engine = Engine::start(&config(backend, placement)).expect("start");
        let answered = Arc::new(AtomicU64::new(0));
        for task in 0..4 {
            let (inside, dataset, answered) =
                (engine.clone(), Arc::clone(&world.dataset), Arc::clone(&answered));
            engine.spawn_on(task % 2, move || load(inside, dataset, task as u64, answered));
        }
        let outside: Vec<_> = (0..2)
            .map(|task| {
                let (engine, dataset, answered) =
                    (engine.clone(), Arc::clone(&world.dataset), Arc::clone(&answered));
                std::thread::spawn(move || {
                    let load = async {
                        let one = load(
                            engine.clone(),
                            Arc::clone(&dataset),
                            10 + task,
                            Arc::clone(&answered),
                        );
                        let two = load(
                            engine.clone(),
                            Arc::clone(&dataset),
                            20 + task,
                            Arc::clone(&answered),
                        );
                        tokio::join!(one, two);
                    };
                    runtime().block_on(load);
                })
            })
            .collect();
        wait_until(
            || answered.load(Ordering::Relaxed) > 20,
            || format!("{who}: no load"),
        );
        let runtime = runtime();
        let report = runtime.block_on(engine.drain(Instant::now() + WAIT));
        assert_eq!(report.abandoned_reads, 0, "{who}");
        wait_until(
            || outside.iter().all(|thread| thread.is_finished()),
            || format!("{who}: a ticket is never answered"),
        );
        for thread in outside {
            thread
                .join()
                .unwrap_or_else(|_| panic!("{who}: a task outside failed"));
        }
        assert_eq!(
            engine.memory().0,
            0,
            "{who}: memory in use when nobody holds an answer"
        );
        drop((engine, runtime));
        wait_until(
            || threads().is_empty(),
            || format!("{who}: threads left: {:?}", threads()),
        );
        wait_until(
            || (descriptors(), mappings()) == before,
            || format!("{who}: {:?} became {:?}", before, (descriptors(), mappings())),
        );
    }
}

#[test]
fn an_engine_dropped_without_a_drain_ends() {
    a_dropped_engine_ends(&WITHOUT_RINGS);
}

#[test]
#[ignore = "needs io_uring"]
fn an_engine_with_rings_dropped_without_a_drain_ends() {
    a_dropped_engine_ends(&WITH_RINGS);
}

/// Scenario: an engine is dropped while tickets are in flight. Expectation: they are answered, and its
/// threads end.
fn a_dropped_engine_ends(kinds: &[(BackendKind, Placement)]) {
    let _alone = alone();
    let world = world();
    let before = descriptors();
    for &(backend, placement) in kinds {
        let engine = Engine::start(&config(backend, placement)).expect("start");
        let tickets: Vec<_> = (0..10)
            .map(|seed| engine.submit(batch(&world.dataset, seed, 40).1, SubmitOptions::default()))
            .collect();
        drop(engine);
        for ticket in tickets {
            let fetched = ticket.expect("accepted").wait();
            assert_eq!(fetched.expect("answered").data.len(), 40 * 4096, "{backend}");
        }
        wait_until(
            || threads().is_empty() && descriptors() == before,
            || {
                format!(
                    "{backend} {placement:?}: {:?}, {before:?} became {:?}",
                    threads(),
                    descriptors()
                )
            },
        );
    }
}

#[test]
fn a_shard_that_panics_answers_everybody() {
    // Scenario: a defect makes the only shard panic, with one batch half read, one in its queue and one
    // dropped by its caller. Expectation: ShardFailed for all of them and for later ones, `failed` resolves,
    // the memory of reads in flight stays in use forever, and the drain still ends.
    let _alone = alone();
    let world = world();
    let control = SimControl::from_environment();
    let engine =
        Engine::start_sim(&config(BackendKind::Sim, Placement::SameThread), &control).expect("start");
    control.hold();
    control.set_faults(FaultPlan::script(&[Fault::None, Fault::Panic]));
    let submit = |seed| engine.submit(batch(&world.dataset, seed, 12).1, SubmitOptions::default());
    let tickets: Vec<_> = (0..3).map(|seed| submit(seed).expect("accepted")).collect();
    drop(submit(3));
    assert!(control.wait_started(16, WAIT), "the slots are in flight");
    control.release(2);
    for ticket in tickets {
        assert_eq!(ticket.wait().err(), Some(ReadError::ShardFailed));
    }
    let runtime = runtime();
    let failed = runtime.block_on(async { tokio::time::timeout(WAIT, engine.failed()).await });
    failed.expect("the failure is told");
    let (tell, told) = mpsc::channel();
    let later = engine.submit(batch(&world.dataset, 4, 1).1, SubmitOptions::default());
    // Refused at once, or answered; never left waiting.
    std::thread::spawn(move || tell.send(later.and_then(|ticket| ticket.wait())));
    let later = told.recv_timeout(WAIT).expect("an answer in time");
    assert_eq!(later.err(), Some(ReadError::ShardFailed));
    let held = engine.memory().0;
    assert!(
        held >= 16 * 4096,
        "{held} bytes: the memory of 16 reads in flight is not reused"
    );
    let deadline = Instant::now() + WAIT;
    runtime.block_on(engine.drain(deadline));
    assert!(Instant::now() < deadline, "the drain ends");
    assert_eq!(engine.memory().0, held, "leaked, not freed");
    wait_until(
        || threads().is_empty(),
        || format!("threads left: {:?}", threads()),
    );
}
