//! A daemon that is busy for as long as a test wants: one thread that reads, and clients that queue more than
//! it can read during many requests.

use crate::daemon::{Daemon, Setup, eventually_async};
use crate::data::noise;
use crate::wire;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::task::JoinHandle;
use tonic::Code;

/// Items in one batch of the load; as many device reads, since no two are adjacent.
pub(crate) const ITEMS: u64 = 4096;
const BLOCK_BYTES: usize = 512;
/// Blocks between two items: the device may read 4 KiB for each, and no two reads touch.
const STEP: u64 = 16;

/// A setup with one reading thread and a dataset `slow`.
pub(crate) fn slow(setup: Setup) -> Setup {
    let blocks = usize::try_from(ITEMS * STEP).expect("fits");
    setup.file("slow.bin", &noise(80, blocks * BLOCK_BYTES));
    setup
        .set("engine.backend", "pread")
        .set("engine.pread.threads", "1")
        // However slow the disk is.
        .set("limits.deadline_ms", "0")
        .dataset(&["name: slow", "kind: blocks", "block_bytes: 512", "path: slow.bin"])
}

/// Blocks of `slow` of which the planner cannot merge any.
pub(crate) fn batch() -> Vec<u64> {
    (0..ITEMS).map(|item| item * STEP).collect()
}

#[derive(Default)]
struct Counts {
    stop: AtomicBool,
    finished: AtomicU64,
    refused: AtomicU64,
}

/// Clients, each with one batch of [`ITEMS`] in flight at all times.
pub(crate) struct Load {
    counts: Arc<Counts>,
    tasks: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts the clients and waits until the daemon has a backlog.
    pub(crate) async fn start(daemon: &Daemon, clients: usize) -> Self {
        let counts = Arc::new(Counts::default());
        let mut tasks = Vec::new();
        for _ in 0..clients {
            let (counts, mut fetch) = (Arc::clone(&counts), daemon.fetch().await);
            tasks.push(tokio::spawn(async move {
                while !counts.stop.load(Ordering::Relaxed) {
                    match fetch.fetch_blocks(wire::blocks("slow", &batch())).await {
                        Ok(answer) => {
                            assert!(answer.into_inner().errors.is_empty());
                            counts.finished.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(status) => {
                            assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                            counts.refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            }));
        }
        eventually_async("the daemon is behind", async || {
            (daemon.sum("ringfetch_queued_reads", &[]).await > 1000).then_some(())
        })
        .await;
        Self { counts, tasks }
    }

    /// Batches answered so far.
    pub(crate) fn finished(&self) -> u64 {
        self.counts.finished.load(Ordering::Relaxed)
    }

    /// Lets every client finish its batch: (batches answered, batches refused).
    pub(crate) async fn stop(self) -> (u64, u64) {
        self.counts.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("a client");
        }
        let counts = &self.counts;
        (
            counts.finished.load(Ordering::Relaxed),
            counts.refused.load(Ordering::Relaxed),
        )
    }
}
