//! Submission must not starve: a task that never lets its thread park must not keep reads from the kernel
//! (TRAPS 3).
//!
//! The workload runs in a child process, this test's own binary, under `strace`, which counts the relevant
//! system calls.

#![expect(
    clippy::expect_used,
    reason = "a test fails by panicking, outside of its own function too"
)]

use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig, OnUnavailable};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use ringfetch_pattern as pattern;
use std::cell::Cell;
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const READS: u64 = 2000;
const DEPTH: u32 = 32;
const TEST: &str = "reads_reach_the_kernel_beside_a_busy_task";

/// Set in the child: `busy` or `quiet`, and the file to read.
const MODE: &str = "RINGFETCH_STARVATION_MODE";
const FILE: &str = "RINGFETCH_STARVATION_FILE";

/// Longest run of a child, under strace on a busy machine.
const CHILD_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
#[ignore = "needs strace and io_uring"]
fn reads_reach_the_kernel_beside_a_busy_task() {
    // Scenario: 2000 reads of one block, 32 in flight, on a core where another task yields in a loop; and on
    // a core that has nothing else to do. Expectation: both end, with fewer than two io_uring_enter calls per
    // read beside the task, and no more than three without it; the engine counted no more than strace did.
    if let Ok(mode) = std::env::var(MODE) {
        let file = std::env::var(FILE).expect("the parent names a file");
        return workload(Path::new(&file), mode == "busy");
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let file = directory.path().join("blocks");
    pattern::write_blocks(&file, 3, 4 << 20, &mut |_| true).expect("write");
    for mode in ["busy", "quiet"] {
        let counts = directory.path().join(mode);
        let submissions = run_child(mode, &file, &counts);
        let enters = calls(&counts, "io_uring_enter");
        // A thread that idles enters to submit, to park, and to park again after the completion has interrupted it: all three
        // for each read where the disk ends one at a time.
        let most = if mode == "busy" { 2 * READS } else { 3 * READS + 16 };
        assert!(
            enters < most,
            "{mode}: {enters} io_uring_enter calls for {READS} reads"
        );
        assert!(
            submissions > 0 && submissions <= enters,
            "{mode}: the engine counted {submissions} submissions, strace {enters} calls"
        );
        assert!(
            submissions <= READS,
            "{mode}: {submissions} submissions for {READS} reads"
        );
    }
}

/// Runs the workload under strace; returns the submissions that the engine counted.
fn run_child(mode: &str, file: &Path, counts: &Path) -> u64 {
    let mut child = Command::new("strace")
        .args(["-f", "-c", "--seccomp-bpf", "-e", "trace=io_uring_enter", "-o"])
        .arg(counts)
        .arg(std::env::current_exe().expect("the test's own path"))
        .args(["--exact", TEST, "--ignored", "--nocapture"])
        .env(MODE, mode)
        .env(FILE, file)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("install strace: {error}"));
    let mut stdout = child.stdout.take().expect("piped");
    let (tell, told) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let read = std::io::Read::read_to_string(&mut stdout, &mut text);
        // The parent gave up and does not need the text.
        let _gone = tell.send(read.map(|_| text));
    });
    let text = match told.recv_timeout(CHILD_TIMEOUT) {
        Ok(text) => text.expect("text"),
        Err(_) => {
            child.kill().expect("our own child");
            panic!("{mode}: {READS} reads do not end within {CHILD_TIMEOUT:?}: submission starves");
        }
    };
    reader.join().expect("no panic");
    let status = child.wait().expect("our own child");
    assert!(status.success(), "{mode}: {status}: {text}");
    let line = text.lines().find_map(|line| line.split_once("submissions: "));
    line.and_then(|(_, number)| number.trim().parse().ok())
        .unwrap_or_else(|| panic!("{mode}: the child does not tell its submissions: {text}"))
}

/// The calls of one kind in strace's summary: the fourth column; the errors column after it may be empty.
fn calls(counts: &Path, name: &str) -> u64 {
    let summary = std::fs::read_to_string(counts).expect("strace's summary");
    let row = summary
        .lines()
        .find(|line| line.split_whitespace().last() == Some(name))
        .unwrap_or_else(|| panic!("no {name} in {summary}"));
    row.split_whitespace()
        .nth(3)
        .and_then(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("no count in {row}"))
}

/// The child: prints the engine's count of submissions.
#[expect(clippy::print_stdout, reason = "the parent reads it there")]
fn workload(file: &Path, busy: bool) {
    let mut config = EngineConfig {
        backend: BackendKind::Uring,
        on_unavailable: OnUnavailable::Fail,
        cores: 1,
        pin: false,
        memory_budget_bytes: 16 << 20,
        ..EngineConfig::default()
    };
    config.uring.queue_depth = DEPTH;
    let engine = Engine::start(&config).expect("io_uring");
    let spec = DatasetSpec::new("starvation", file, KindSpec::blocks(4096), DirectIo::Required);
    let dataset = Dataset::open(&spec);
    let dataset = Arc::new(dataset.expect("open"));
    let (tell, told) = mpsc::channel();
    let inside = engine.clone();
    engine.spawn_on(0, move || async move {
        let unread = Rc::new(Cell::new(READS));
        let running = Rc::new(Cell::new(DEPTH));
        if busy {
            let running = Rc::clone(&running);
            tokio::task::spawn_local(async move {
                while running.get() > 0 {
                    tokio::task::yield_now().await;
                }
            });
        }
        for task in 0..DEPTH {
            let (engine, dataset, tell) = (inside.clone(), Arc::clone(&dataset), tell.clone());
            let (unread, running) = (Rc::clone(&unread), Rc::clone(&running));
            tokio::task::spawn_local(async move {
                // Blocks of its own, with one between them and the next task's: reads of neighbors would be joined.
                let own_blocks = dataset.count() / u64::from(DEPTH);
                let mut step = 0;
                while unread.get() > 0 {
                    unread.set(unread.get() - 1);
                    let mut batch = Batch::new(Arc::clone(&dataset), 1);
                    step = (step + 7) % (own_blocks - 1);
                    let block = u64::from(task) * own_blocks + step;
                    batch.push_block(block);
                    let ticket = engine.submit(batch, SubmitOptions::default());
                    let fetched = ticket.expect("accepted").await.expect("an answer");
                    assert_eq!(
                        pattern::first_difference(3, block * 4096, &fetched.data),
                        None,
                        "block {block}"
                    );
                }
                running.set(running.get() - 1);
                tell.send(()).expect("the test waits");
            });
        }
    });
    let deadline = Instant::now() + CHILD_TIMEOUT;
    for _ in 0..DEPTH {
        let left = deadline.saturating_duration_since(Instant::now());
        told.recv_timeout(left).expect("every task ends in time");
    }
    let shards = engine.shards();
    assert_eq!(
        shards.iter().map(|shard| shard.device_reads_total).sum::<u64>(),
        READS
    );
    let submissions: u64 = shards.iter().map(|shard| shard.submissions_total).sum();
    println!("\nsubmissions: {submissions}");
}
