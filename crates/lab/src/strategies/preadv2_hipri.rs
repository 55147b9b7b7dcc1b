//! preadv2(2) with RWF_HIPRI: the thread polls for the completion if the device has poll queues.

use super::{NOT_POLLED, Run, Strategy};
use crate::drive::threads;
use crate::job::Job;
use rustix::io::{ReadWriteFlags, preadv2};
use std::io::{self, IoSliceMut};
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "preadv2-hipri",
    about: "preadv2 with RWF_HIPRI on as many threads as the depth; without polling queues as pread",
    depth_max: 512,
    run: Run::Own(run),
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    if !job.polls() {
        job.note(NOT_POLLED);
    }
    threads::drive(job, |file, place, offset| {
        let mut places = [IoSliceMut::new(place)];
        preadv2(file, &mut places, offset, ReadWriteFlags::HIPRI).map_err(io::Error::from)
    })
}
