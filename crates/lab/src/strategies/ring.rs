//! io_uring without the engine: one ring, one thread, registered file and buffers, COOP_TASKRUN, SINGLE_ISSUER.

use super::{NOT_POLLED, Run, Strategy};
use crate::drive::{buffers, queue};
use crate::job::Job;
use ringfetch_baselines::{RingOptions, RingQueue};
use std::sync::Arc;

pub(super) static INTERRUPTED: Strategy = Strategy {
    name: "ring",
    about: "bare io_uring on one thread: registered file and buffers, COOP_TASKRUN, SINGLE_ISSUER",
    depth_max: 512,
    run: Run::Own(|job| read_through(job, false)),
};

/// Completions polled (IORING_SETUP_IOPOLL), which needs O_DIRECT and poll queues.
pub(super) static POLLED: Strategy = Strategy {
    name: "ring-polled",
    about: "bare io_uring with polled completions (IORING_SETUP_IOPOLL)",
    depth_max: 512,
    // Without poll queues newer kernels refuse the read, and older ones complete it by interrupt.
    run: Run::Own(|job| {
        read_through(job, true).map_err(|problem| {
            if job.polls() {
                problem
            } else {
                format!("{problem} (the device has no polling queues: queue/io_poll is 0)")
            }
        })
    }),
};

fn read_through(job: &Arc<Job>, polled: bool) -> Result<(), String> {
    let mut buffers = buffers(job)?;
    let options = RingOptions {
        polled,
        registered_file: (job.reads.files == 1 && !job.setup.open_each)
            .then(|| job.file(0))
            .transpose()
            .map_err(|error| error.to_string())?,
    };
    let mut queue =
        RingQueue::open(job.setup.depth, &options).map_err(|error| format!("io_uring_setup: {error}"))?;
    let mut note = queue.flags().to_owned();
    if job.setup.pooled {
        if let Err(error) = queue.register(&mut buffers) {
            note.push_str(&format!("; buffers not registered: {error}"));
        } else {
            note.push_str("; registered buffers");
        }
    }
    if polled && !job.polls() {
        note.insert_str(0, &format!("{NOT_POLLED}; "));
    }
    job.note(&note);
    queue::drive(job, &mut queue, buffers)
}
