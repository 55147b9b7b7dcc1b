//! System calls of a read on an idle daemon: counted, so that they do not creep back. Times are too noisy for a test, counts
//! are not.

use crate::daemon::{Setup, eventually_async};
use crate::data::plain_blocks;
use crate::wire;
use std::collections::BTreeMap;
use std::path::Path;

const BLOCKS: u64 = 512;
const FEW: u64 = 300;
const MANY: u64 = 2300;

/// What one daemon did in its life, in which it was asked for so many blocks, one at a time.
async fn calls_of(backend: &str, reads: u64) -> BTreeMap<String, u64> {
    let directory = tempfile::tempdir().unwrap();
    let summary = directory.path().join("strace");
    let path = summary.to_str().unwrap();
    let (setup, bytes) = plain_blocks(Setup::new(backend), usize::try_from(BLOCKS).unwrap());
    // -D: the daemon stays this process's child.
    let strace = ["strace", "-D", "-f", "-qq", "-c", "-o", path];
    let daemon = setup.set("engine.cores", "1").through(&strace).start();
    let mut fetch = daemon.fetch().await;
    for number in 0..reads {
        let index = number * 7 % BLOCKS;
        let answer = fetch.fetch_blocks(wire::blocks("blocks", &[index])).await;
        let start = usize::try_from(index).unwrap() * 4096;
        assert!(answer.unwrap().into_inner().data == bytes[start..start + 4096]);
    }
    drop(fetch);
    daemon.stop().await;
    eventually_async("strace writes its summary", async || counts(&summary)).await
}

/// The calls in strace's summary, by name: the fourth column, before errors, of which there may be none.
fn counts(summary: &Path) -> Option<BTreeMap<String, u64>> {
    let text = std::fs::read_to_string(summary).ok()?;
    let count = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        Some(((*words.last()?).to_owned(), words.get(3)?.parse().ok()?))
    };
    let counts: BTreeMap<String, u64> = text.lines().filter_map(count).collect();
    counts.contains_key("total").then_some(counts)
}

/// Fails if a read takes more than `limit` calls, or if the thread enters the kernel other than once for its sockets and once
/// for its ring whenever it sleeps.
async fn assert_few(backend: &str, limit: f64) {
    let (few, many) = (calls_of(backend, FEW).await, calls_of(backend, MANY).await);
    // What the start and the end take is in both.
    let each = |name: &str| {
        let of = |counts: &BTreeMap<String, u64>| counts.get(name).copied().unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "small counts")]
        let each = of(&many).saturating_sub(of(&few)) as f64 / (MANY - FEW) as f64;
        each
    };
    let found: Vec<_> = many.keys().map(|name| (name.as_str(), each(name))).collect();
    let found: Vec<_> = found.iter().filter(|(_, each)| *each > 0.02).collect();
    eprintln!("{backend}: {found:?}");
    assert!(
        each("total") <= limit,
        "{backend}: {} calls a read, at most {limit} expected: {found:?}",
        each("total")
    );
    // More of epoll: streams run in another queue than connections (`LocalExecutor`: 2.0 more). More of the ring: a read
    // that is alone is submitted at once and again when the thread sleeps (`submit_left`: 1.0 more).
    let more = each("epoll_wait") - each("io_uring_enter");
    assert!(
        more.abs() <= 0.4,
        "{backend}: {more} calls of epoll more than of the ring: {found:?}"
    );
}

#[tokio::test]
#[ignore = "needs strace, io_uring and direct I/O"]
async fn a_cold_read_takes_few_system_calls() {
    // Scenario: blocks are read past the page cache through a ring, one at a time. Expectation: 7.5 to 7.9 calls, by how
    // often the device is faster than the thread falls asleep.
    assert_few("uring", 8.8).await;
}

#[tokio::test]
#[ignore = "needs strace and io_uring"]
async fn a_warm_read_takes_few_system_calls() {
    // Scenario: blocks that were just written are read one at a time, copied from the page cache. Expectation: 5.8 to 6.3.
    assert_few("auto", 6.8).await;
}

#[tokio::test]
#[ignore = "needs strace and io_uring"]
async fn a_warm_read_of_a_mapping_takes_few_system_calls() {
    // Scenario: blocks that were just written are read one at a time from a dataset that a mapping serves; the cores have
    // rings, for a switch. Expectation: 6.5 to 7.2 calls, since the core copies them itself; by way of a shard's thread 13.
    assert_few("mmap", 8.0).await;
}
