//! pread(2).

use super::{Run, Strategy};
use crate::drive::threads;
use std::os::unix::fs::FileExt as _;

pub(super) static ONE_THREAD: Strategy = Strategy {
    name: "pread",
    about: "pread on one thread, one read at a time",
    depth_max: 1,
    run: Run::Own(|job| threads::drive(job, |file, place, offset| file.read_at(place, offset))),
};

pub(super) static THREADED: Strategy = Strategy {
    name: "threaded-pread",
    about: "pread on as many threads as the depth",
    depth_max: 512,
    run: Run::Own(|job| threads::drive(job, |file, place, offset| file.read_at(place, offset))),
};
