//! pread(2) on one thread.

use super::Strategy;
use crate::drive::threads;
use crate::job::Job;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "pread",
    about: "pread on one thread, one read at a time",
    depth_max: 1,
    run,
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    threads::drive(job, 1, |file, place, offset| file.read_at(place, offset))
}
