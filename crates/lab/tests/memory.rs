//! Memory of a study whose steps have the largest allowed buffers, one kind after the other. Alone in its
//! process.
#![allow(clippy::unwrap_used, reason = "tests")]

mod line;

/// As in `ringfetch`: what the allocator keeps from one step adds to the next one's memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Threads, histograms, the runner and what the allocator keeps of 150 threads (10 to 48 MiB in five runs),
/// besides the 256 MiB that a step's buffers may have. Buffers kept by the allocator would exceed this.
const PROCESS_BYTES_MAX: u64 = 60 << 20;

#[test]
#[ignore = "needs io_uring and reads gigabytes"]
fn steps_with_the_largest_buffers_stay_within_their_bound() {
    // Scenario: 150 threads with files of 256 KiB, then rings and threads with 192 MiB of files of 16 MiB in
    // flight, buffers reused and new, in turn. Expected: no step takes more than its limit and the process.
    let directory = line::scratch();
    let words = "objects --path DIR --out DIR/out --repetitions 2 --force --files 12,150 --file-bytes 256KiB,16MiB \
                 --bytes-max 192MiB";
    line::run(words, directory.path(), false).unwrap();
    let samples = std::fs::read_to_string(directory.path().join("out/samples.jsonl")).unwrap();
    let lines = samples.lines().skip(1).map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        (
            line["sample"]["own_memory_bytes"].as_u64().unwrap(),
            line["cell"].clone(),
        )
    });
    let lines: Vec<_> = lines.collect();
    assert!(
        lines
            .iter()
            .any(|(_, cell)| cell.as_str().unwrap().contains("uring"))
    );
    let (most, cell) = lines.into_iter().max_by_key(|(bytes, _)| *bytes).unwrap();
    assert!(
        most <= (256 << 20) + PROCESS_BYTES_MAX,
        "{cell}: {} MiB",
        most >> 20
    );
}
