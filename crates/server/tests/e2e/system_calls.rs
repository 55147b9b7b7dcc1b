//! Counts the system calls per read on an idle daemon, so that they do not creep back. Times are too noisy
//! for a test, counts are not.

use crate::daemon::{Setup, eventually, eventually_async};
use crate::data::plain_blocks;
use ringfetch_client::Client;
use std::collections::BTreeMap;
use std::future::pending;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

const BLOCKS: u64 = 512;
const FEW: u64 = 300;
const MANY: u64 = 2300;

/// The calls that one daemon made in its life, in which it read this many blocks, one at a time; and the length of its life,
/// which is at least this long.
async fn calls_of(backend: &str, reads: u64, life: Duration) -> (BTreeMap<String, u64>, Duration) {
    let directory = tempfile::tempdir().unwrap();
    let summary = directory.path().join("strace");
    let path = summary.to_str().unwrap();
    let (setup, bytes) = plain_blocks(Setup::new(backend), usize::try_from(BLOCKS).unwrap());
    // -D: the daemon stays a child of this process.
    let strace = ["strace", "-D", "-f", "-qq", "-c", "-o", path];
    let begun = Instant::now();
    let daemon = setup.set("engine.cores", "1").through(&strace).start();
    // A client that sends a request in one piece: if head and message are sent separately, as tonic does, the
    // second may arrive while the first is read, and then sometimes wakes the core in vain.
    let client = Client::builder(format!("http://{}", daemon.grpc)).connect().await;
    let client = client.unwrap();
    for number in 0..reads {
        let index = number * 7 % BLOCKS;
        let answer = client.fetch_blocks("blocks", &[index]).await.unwrap();
        let start = usize::try_from(index).unwrap() * 4096;
        assert!(answer.iter().next().unwrap().unwrap() == bytes[start..start + 4096]);
    }
    drop(client);
    // Only time makes it as old as the other.
    timeout_at(begun + life, pending::<()>()).await.unwrap_err();
    let life = begun.elapsed();
    daemon.stop().await;
    let counts = eventually_async("strace writes its summary", async || counts(&summary)).await;
    (counts, life)
}

/// The calls in strace's summary by name: the fourth column; and as `interrupted` the fifth column, errors,
/// of `epoll_wait`, which may be absent.
fn counts(summary: &Path) -> Option<BTreeMap<String, u64>> {
    let text = std::fs::read_to_string(summary).ok()?;
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let count = |words: &Vec<&str>| Some(((*words.last()?).to_owned(), words.get(3)?.parse().ok()?));
    let mut counts: BTreeMap<String, u64> = rows.iter().filter_map(count).collect();
    let waits = rows.iter().find(|words| words.last() == Some(&"epoll_wait"));
    let interrupted = waits.and_then(|words| words.get(4)?.parse().ok());
    counts.insert("interrupted".to_owned(), interrupted.unwrap_or(0));
    counts.contains_key("total").then_some(counts)
}

/// Fails if a read takes more than `limit` calls, apart from occasional ones: a completion that finds the
/// thread asleep interrupts its wait, and it enters the ring and waits once more.
async fn assert_few(backend: &str, limit: f64) {
    let (many, life) = calls_of(backend, MANY, Duration::ZERO).await;
    let (few, _) = calls_of(backend, FEW, life).await;
    // Both include the calls of startup and shutdown, and of as many ticks: on a busy machine a read takes long.
    let each = |name: &str| {
        let of = |counts: &BTreeMap<String, u64>| counts.get(name).copied().unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "small counts")]
        let each = of(&many).saturating_sub(of(&few)) as f64 / (MANY - FEW) as f64;
        each
    };
    let found: Vec<_> = many.keys().map(|name| (name.as_str(), each(name))).collect();
    let found: Vec<_> = found.iter().filter(|(_, each)| *each > 0.02).collect();
    eprintln!("{backend}: {found:?}");
    // Some versions of strace count cachestat(2), others do not know it. getrusage(2) is called once in 16
    // ms, however many reads there are.
    let calls = each("total") - 2.0 * each("interrupted") - each("cachestat") - each("getrusage");
    // What would exceed the limit: streams in another queue than connections (`LocalExecutor`), 2.0; a lone
    // read that is submitted at once and again when the thread sleeps (`submit_left`), 1.0; a copy on a
    // shard's own thread, 6.
    assert!(
        calls <= limit,
        "{backend}: {calls} calls a read, at most {limit} expected: {found:?}"
    );
}

#[tokio::test]
#[ignore = "needs strace, io_uring and direct I/O"]
async fn a_cold_read_takes_few_system_calls() {
    // Scenario: blocks are read past the page cache through a ring, one at a time. Expectation: 6 calls:
    // twice the thread enters the ring and sleeps, for the request and for the device; and it receives and
    // sends.
    assert_few("uring", 6.2).await;
}

#[tokio::test]
#[ignore = "needs strace and io_uring"]
async fn a_warm_read_takes_few_system_calls() {
    // Scenario: recently written blocks are read one at a time, copied from the page cache. Expectation: 4
    // calls, besides those that do not occur with each read: the thread receives, sends, enters the ring and
    // sleeps.
    assert_few("auto", 4.2).await;
}

#[tokio::test]
#[ignore = "needs strace and io_uring"]
async fn a_warm_read_of_a_mapping_takes_few_system_calls() {
    // Scenario: recently written blocks are read one at a time from a dataset that mmap serves; the cores
    // have rings, for a switch. Expectation: 6 calls: those of `auto`, the copy, which the core makes itself,
    // and one for the length of the file.
    assert_few("mmap", 6.2).await;
}

/// Sends the first 200 kB of a request, 64 times at once, and leaves.
fn send_parts_of_requests(address: SocketAddr) {
    let head = "POST /v1/datasets/blocks/blocks:batchFetch HTTP/1.1\r\nHost: localhost\r\n\
                Content-Type: application/json\r\nContent-Length: 220000\r\n\r\n";
    let part = [head.as_bytes(), &[b' '; 200_000]].concat();
    let streams: Vec<_> = (0..64).filter_map(|_| TcpStream::connect(address).ok()).collect();
    for mut stream in &streams {
        // The daemon refuses some of them early.
        let _refused = stream.write_all(&part);
    }
}

#[test]
#[ignore = "needs strace"]
fn memory_is_returned_by_a_thread_of_its_own() {
    // Scenario: parts of requests, 13 MB of them, come and go again and again, until the daemon has returned memory to the system.
    // Expectation: its own thread does that, and no core.
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("strace");
    let strace = [
        "strace",
        "-D",
        "-f",
        "-qq",
        "-e",
        "trace=madvise",
        "-o",
        trace.to_str().unwrap(),
    ];
    let (setup, _) = plain_blocks(Setup::new("pread"), 16);
    let daemon = setup.through(&strace).start();
    let returned = || {
        let lines = std::fs::read_to_string(&trace).unwrap();
        let returning = lines.lines().filter(|line| line.contains("MADV_DONTNEED"));
        let thread = |line: &str| line.split_whitespace().next().unwrap().to_owned();
        let mut calls: BTreeMap<String, u32> = BTreeMap::new();
        for thread in returning.map(thread) {
            let name = format!("/proc/{thread}/comm");
            // Threads that have ended return their own stacks.
            if let Ok(name) = std::fs::read_to_string(name) {
                *calls.entry(name.trim().to_owned()).or_default() += 1;
            }
        }
        calls
    };
    let calls = eventually("memory is returned", Duration::from_secs(60), || {
        send_parts_of_requests(daemon.http);
        let calls = returned();
        calls.contains_key("rf-purge").then_some(calls)
    });
    assert!(!calls.keys().any(|name| name.starts_with("rf-core")), "{calls:?}");
}
