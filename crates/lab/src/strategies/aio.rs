//! Linux AIO on one thread.

use super::{Run, Strategy};
use crate::drive::{buffers, queue};
use crate::job::Job;
use crate::setup::Heat;
use ringfetch_baselines::AioQueue;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "aio",
    about: "Linux AIO (io_submit) on one thread; only direct reads are asynchronous",
    depth_max: 512,
    run: Run::Own(run),
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    if job.setup.heat != Heat::Direct {
        job.note("each read is made inside io_submit: through the page cache Linux AIO is synchronous");
    }
    let buffers = buffers(job)?;
    let mut queue = AioQueue::open(job.setup.depth).map_err(|error| format!("io_setup: {error}"))?;
    queue::drive(job, &mut queue, buffers)
}
