//! The engine's `pread`: a pool of as many threads as the depth.

use super::Strategy;
use crate::drive::engine::{self, Choice};
use crate::job::Job;
use ringfetch_engine::config::BackendKind;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "engine-pread",
    about: "the engine's pread: a pool of as many threads as the depth",
    depth_max: 512,
    run,
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    let choice = Choice {
        backend: BackendKind::Pread,
        batch: 1,
        mmap_threads: 1,
        announce: false,
    };
    engine::drive(job, choice)
}
