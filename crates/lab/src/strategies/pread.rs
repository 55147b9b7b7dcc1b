//! pread(2) on one thread.

use super::{Run, Strategy};
use crate::drive::threads;
use std::os::unix::fs::FileExt as _;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "pread",
    about: "pread on one thread, one read at a time",
    depth_max: 1,
    run: Run::Own(|job| threads::drive(job, 1, |file, place, offset| file.read_at(place, offset))),
};
