//! tokio::fs, as many files and tasks as the depth.
//!
//! tokio::fs reads into its own memory, which O_DIRECT refuses: direct reads use `spawn_blocking` and
//! pread(2), as tokio::fs does internally.

use super::{Run, Strategy};
use crate::drive::buffers;
use crate::job::{Job, Lane, ReadAt};
use ringfetch_baselines::Buffer;
use std::io::{self, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Instant;
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};

pub(super) static STRATEGY: Strategy = Strategy {
    name: "tokio-fs",
    about: "tokio::fs, as many tasks as the depth; direct: tokio's blocking pool with pread",
    depth_max: 512,
    run: Run::Own(run),
};

fn run(job: &Arc<Job>) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ringfetch_host::cpus::usable_cpus().len())
        .max_blocking_threads(job.setup.depth.max(1))
        .build();
    runtime.map_err(|error| error.to_string())?.block_on(async {
        let buffers = buffers(job)?.into_iter().map(|buffer| (buffer, job.lane()));
        let (buffers, mut tasks) = (buffers.collect::<Vec<_>>(), Vec::new());
        job.begin();
        for (buffer, mut lane) in buffers {
            let job = Arc::clone(job);
            tasks.push(tokio::spawn(async move {
                if let Err(error) = task(&job, buffer, &mut lane).await {
                    job.fail(error);
                }
            }));
        }
        for task in tasks {
            task.await.map_err(|error| error.to_string())?;
        }
        Ok(())
    })
}

async fn task(job: &Arc<Job>, mut buffer: Buffer, lane: &mut Lane) -> io::Result<()> {
    // The task keeps one file open: cloning a descriptor for each read would cost another system call.
    let mut kept: Option<(usize, tokio::fs::File)> = None;
    while let Some(at) = job.next() {
        let started = Instant::now();
        if !job.setup.pooled {
            buffer = Buffer::zeroed(at.length)?;
        }
        if job.is_direct() {
            buffer = blocking(job, at, buffer).await?;
        } else {
            let mut file = match kept.take() {
                Some((number, file)) if number == at.file && !job.setup.open_each => file,
                _ => tokio::fs::File::open(job.path(at.file).unwrap_or_default()).await?,
            };
            file.seek(SeekFrom::Start(at.offset)).await?;
            let place = buffer.get_mut(..at.length).unwrap_or_default();
            file.read_exact(place).await?;
            kept = Some((at.file, file));
        }
        lane.done(&at, started, buffer.get(..at.length).unwrap_or_default());
    }
    Ok(())
}

async fn blocking(job: &Arc<Job>, at: ReadAt, mut buffer: Buffer) -> io::Result<Buffer> {
    let job = Arc::clone(job);
    let reading = tokio::task::spawn_blocking(move || {
        let place = buffer.get_mut(..at.length).unwrap_or_default();
        job.file(at.file)?.read_exact_at(place, at.offset)?;
        Ok(buffer)
    });
    reading.await.map_err(io::Error::other)?
}
