//! The engine's `uring`: one ring on one core.

use super::Strategy;
use crate::drive::engine::{self, Choice};
use crate::job::Job;
use ringfetch_engine::config::BackendKind;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "uring",
    about: "the engine's uring: one ring, each read asked for alone",
    depth_max: 512,
    run,
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    let choice = Choice {
        backend: BackendKind::Uring,
        batch: 1,
        mmap_threads: 1,
        announce: false,
    };
    engine::drive(job, choice)
}
