//! The engine's `mmap` as it is configured by default: batches are announced (MADV_WILLNEED), two threads copy.

use super::Strategy;
use crate::drive::engine::{self, Choice};
use crate::job::Job;
use ringfetch_engine::config::BackendKind;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "mmap",
    about: "the engine's mmap, announced: batches of up to 16 reads, two threads; latency is that of a batch",
    depth_max: 512,
    run,
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    let choice = Choice {
        backend: BackendKind::Mmap,
        batch: 16,
        mmap_threads: 2,
        announce: true,
    };
    engine::drive(job, choice)
}
