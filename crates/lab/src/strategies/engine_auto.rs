//! The engine's `auto`: from the page cache what is there, through the ring what is not.

use super::Strategy;
use crate::drive::engine::{self, Choice};
use crate::job::Job;
use ringfetch_engine::config::BackendKind;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "auto",
    about: "the engine's auto: copies what the page cache has, reads the rest through the ring",
    depth_max: 512,
    run,
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    let choice = Choice {
        backend: BackendKind::Auto,
        batch: 1,
        mmap_threads: 1,
        announce: false,
    };
    engine::drive(job, choice)
}
