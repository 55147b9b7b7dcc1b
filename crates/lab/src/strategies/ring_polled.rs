//! The bare ring with polled completions (IORING_SETUP_IOPOLL), which need O_DIRECT and poll queues.

use super::{Run, Strategy, ring};

pub(super) static STRATEGY: Strategy = Strategy {
    name: "ring-polled",
    about: "bare io_uring with polled completions (IORING_SETUP_IOPOLL)",
    depth_max: 512,
    // Completions report what the kernel refuses, so a read that succeeds was polled, or served from memory.
    run: Run::Own(|job| {
        ring::read_through(job, true).map_err(|problem| {
            if job.polls() {
                problem
            } else {
                format!("{problem} (the device has no polling queues: queue/io_poll is 0)")
            }
        })
    }),
};
