//! The bare ring with polled completions (IORING_SETUP_IOPOLL), which need O_DIRECT and polling queues.

use super::{Strategy, ring};
use crate::job::Job;
use std::sync::Arc;

pub(super) static STRATEGY: Strategy = Strategy {
    name: "ring-polled",
    about: "bare io_uring with polled completions (IORING_SETUP_IOPOLL)",
    depth_max: 512,
    run,
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    let device = job.material.place.device.as_ref();
    let polls = device.is_some_and(|device| device.poll_queues);
    ring::read_through(job, true).map_err(|problem| explained(problem, polls))?;
    // Completions report what the kernel refuses, so whoever gets here was polled, or served from memory.
    Ok(())
}

fn explained(problem: String, polls: bool) -> String {
    if polls {
        problem
    } else {
        format!("{problem} (the device has no polling queues: queue/io_poll is 0)")
    }
}
