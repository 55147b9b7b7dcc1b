//! pread(2) on as many threads as the depth.

use super::Strategy;
use crate::drive::threads;
use crate::job::Job;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "threaded-pread",
    about: "pread on as many threads as the depth",
    depth_max: 512,
    run,
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    threads::drive(job, job.setup.depth, |file, place, offset| {
        file.read_at(place, offset)
    })
}
