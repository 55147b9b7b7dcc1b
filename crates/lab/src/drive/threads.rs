//! Threads that each make one read at a time.

use crate::job::Job;
use ringfetch_baselines::Buffer;
use std::fs::File;
use std::io;
use std::sync::{Arc, RwLock};
use std::time::Instant;

/// Reads with `depth` threads; `read` makes one attempt.
pub(crate) fn drive(
    job: &Arc<Job>,
    threads: usize,
    read: impl Fn(&File, &mut [u8], u64) -> io::Result<usize> + Sync,
) -> Result<(), String> {
    // Held until every thread has started: that time is not part of the figures.
    let gate = RwLock::new(());
    let shut = gate.write();
    std::thread::scope(|scope| {
        let mut started = Ok(());
        for _ in 0..threads.max(1) {
            let thread = || {
                let buffer = Buffer::zeroed(job.reads.bytes);
                drop(gate.read());
                if let Err(problem) = buffer.and_then(|buffer| one(job, buffer, &read)) {
                    job.fail(problem);
                }
            };
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, thread) {
                job.fail(&error);
                started = Err(format!("cannot start {threads} threads: {error}"));
                break;
            }
        }
        job.begin();
        drop(shut);
        started
    })
}

fn one(
    job: &Arc<Job>,
    mut buffer: Buffer,
    read: &(impl Fn(&File, &mut [u8], u64) -> io::Result<usize> + Sync),
) -> io::Result<()> {
    let (mut lane, mut reads) = (job.lane(), Vec::new());
    while job.group(1, &mut reads) {
        for at in &reads {
            let started = Instant::now();
            let file = job.file(at.file)?;
            if !job.setup.pooled {
                buffer = Buffer::zeroed(at.length)?;
            }
            let Some(place) = buffer.get_mut(..at.length) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            let mut filled = 0;
            while let Some(rest) = place.get_mut(filled..).filter(|rest| !rest.is_empty()) {
                match read(&file, rest, at.offset + filled as u64) {
                    Ok(0) => break,
                    Ok(bytes) => filled += bytes,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            lane.done(at, started, place.get(..filled).unwrap_or_default());
        }
    }
    Ok(())
}
