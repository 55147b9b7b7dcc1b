//! The engine's `mmap` without announcing: as many threads as the depth, each waits for its own page fault.

use super::Strategy;
use crate::drive::engine::{self, Choice};
use crate::job::Job;
use ringfetch_engine::config::BackendKind;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "mmap-plain",
    about: "the engine's mmap, not announced: as many threads as the depth (at most 256), a page fault a read",
    depth_max: 512,
    run,
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    let choice = Choice {
        backend: BackendKind::Mmap,
        batch: 1,
        mmap_threads: job.setup.depth,
        announce: false,
    };
    engine::drive(job, choice)
}
