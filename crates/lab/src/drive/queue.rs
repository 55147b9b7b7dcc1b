//! One thread that keeps a queue of reads full.

use crate::job::{Job, ReadAt};
use ringfetch_baselines::{Buffer, Finished, Read, ReadQueue};
use std::sync::Arc;
use std::time::Instant;

/// Reads through a queue, with these buffers.
pub(crate) fn drive(job: &Arc<Job>, queue: &mut dyn ReadQueue, mut spare: Vec<Buffer>) -> Result<(), String> {
    let mut made: Vec<Option<(ReadAt, Instant)>> = vec![None; spare.len()];
    let mut free: Vec<usize> = (0..spare.len()).collect();
    let mut finished: Vec<Finished> = Vec::new();
    let mut lane = job.lane();
    job.begin();
    loop {
        while !spare.is_empty() {
            let Some(at) = job.next() else { break };
            let started = Instant::now();
            let (Some(mut buffer), Some(number)) = (spare.pop(), free.pop()) else {
                break;
            };
            if !job.setup.pooled {
                buffer = Buffer::zeroed(at.length).map_err(|error| error.to_string())?;
            }
            let read = Read {
                tag: number as u64,
                file: job.file(at.file).map_err(|error| error.to_string())?,
                offset: at.offset,
                length: at.length,
                buffer,
            };
            queue.start(read).map_err(|error| error.to_string())?;
            if let Some(entry) = made.get_mut(number) {
                *entry = Some((at, started));
            }
        }
        if queue.in_flight() == 0 {
            return Ok(());
        }
        queue.wait(&mut finished).map_err(|error| error.to_string())?;
        for one in finished.drain(..) {
            let number = usize::try_from(one.tag).unwrap_or(usize::MAX);
            let bytes = one.result.map_err(|error| error.to_string())?;
            if let Some((at, started)) = made.get_mut(number).and_then(Option::take) {
                lane.done(&at, started, one.buffer.get(..bytes).unwrap_or_default());
                free.push(number);
            }
            spare.push(one.buffer);
        }
    }
}
