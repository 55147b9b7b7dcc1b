//! The loops that strategies share: blocking threads, one thread with a queue, the engine, a daemon.

use crate::job::Job;
use ringfetch_baselines::Buffer;

pub(crate) mod daemon;
pub(crate) mod engine;
pub(crate) mod queue;
pub(crate) mod threads;

/// One buffer per read of the depth, for the longest read. Reused ones have their pages before the clock starts, as the
/// memory that a ring registers does: else the first read into each pays for them, and those of a ring do not.
pub(crate) fn buffers(job: &Job) -> Result<Vec<Buffer>, String> {
    let buffer = |_| {
        let mut buffer = Buffer::zeroed(job.reads.bytes)?;
        if job.setup.pooled {
            // Not with zeros, which the compiler may know to be there.
            buffer.fill(1);
        }
        Ok(buffer)
    };
    let buffers: std::io::Result<Vec<Buffer>> = (0..job.setup.depth.max(1)).map(buffer).collect();
    buffers.map_err(|error| error.to_string())
}
