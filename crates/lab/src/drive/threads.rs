//! Threads that each make one read at a time.

use super::buffers;
use crate::job::{Job, Lane};
use ringfetch_baselines::Buffer;
use std::fs::File;
use std::io;
use std::sync::{Arc, RwLock};
use std::time::Instant;

/// Reads with as many threads as the depth; `read` makes one attempt.
pub(crate) fn drive(
    job: &Arc<Job>,
    read: impl Fn(&File, &mut [u8], u64) -> io::Result<usize> + Sync,
) -> Result<(), String> {
    let buffers = buffers(job)?;
    let threads = buffers.len();
    // Held until every thread has started: that time is not part of the figures.
    let gate = RwLock::new(());
    let shut = gate.write();
    std::thread::scope(|scope| {
        let mut started = Ok(());
        for buffer in buffers {
            let (gate, read, lane) = (&gate, &read, job.lane());
            let thread = move || {
                drop(gate.read());
                if let Err(problem) = one(job, buffer, lane, read) {
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
    lane: Lane,
    read: &(impl Fn(&File, &mut [u8], u64) -> io::Result<usize> + Sync),
) -> io::Result<()> {
    // Ends before the buffer is freed.
    let mut lane = lane;
    while let Some(at) = job.next() {
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
        lane.done(&at, started, place.get(..filled).unwrap_or_default());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::Material;
    use crate::material::tests::scratch;
    use crate::setup::{Amount, Heat, Setup, Shape};
    use procfs::FromRead as _;
    use std::os::unix::fs::FileExt as _;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// Minor faults of this thread so far.
    fn faults() -> u64 {
        let stat = procfs::process::Stat::from_file("/proc/thread-self/stat");
        stat.unwrap().minflt
    }

    #[test]
    fn reads_into_reused_buffers_take_no_faults_for_them() {
        // Scenario: 16 warm files of 256 KiB on 16 threads, so that each reads once: buffers of 1024 pages. Expected: far
        // fewer faults within the reads.
        let directory = scratch();
        let files = Arc::new(Material::many(directory.path(), 16, 256 << 10, &mut |_| true).unwrap());
        let setup = Setup::new(
            Heat::Warm,
            Shape::Files { count: 16 },
            Amount::Reads(u64::MAX),
            16,
        );
        let job = Job::new(&files, setup, 1, true, &Arc::new(AtomicBool::new(false))).unwrap();
        let (all, together) = (AtomicU64::new(0), Barrier::new(16));
        drive(&job, |file, place, offset| {
            // Else a thread may make the reads of another one, too.
            together.wait();
            let before = faults();
            let read = file.read_at(place, offset);
            all.fetch_add(faults() - before, Ordering::Relaxed);
            read
        })
        .unwrap();
        assert_eq!(job.outcome().unwrap().reads, 16);
        let all = all.into_inner();
        assert!(all < 200, "{all} faults");
    }
}
