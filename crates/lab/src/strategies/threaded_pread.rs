//! pread(2) on as many threads as the depth.

use super::{Run, Strategy};
use crate::drive::threads;
use std::os::unix::fs::FileExt as _;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "threaded-pread",
    about: "pread on as many threads as the depth",
    depth_max: 512,
    run: Run::Own(|job| {
        threads::drive(job, job.setup.depth, |file, place, offset| {
            file.read_at(place, offset)
        })
    }),
};
