//! The engine alone under a closed loop: reads a second and CPU a read, to be set beside fio on the same file.
//!
//! `cargo run --release -p ringfetch-engine --example engine_load -- FILE [BACKEND [BATCH [OUTSTANDING [SECONDS]]]]`

use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, PartialTail};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument =
        |index: usize, default: &str| arguments.get(index).map_or(default, String::as_str).to_owned();
    let path = arguments
        .first()
        .ok_or("usage: engine_load FILE [BACKEND [BATCH [OUTSTANDING [SECONDS]]]]")?;
    let backend = match argument(1, "uring").as_str() {
        "uring" => BackendKind::Uring,
        "auto" => BackendKind::Auto,
        "mmap" => BackendKind::Mmap,
        "mmap-plain" => BackendKind::Mmap,
        "pread" => BackendKind::Pread,
        other => return Err(format!("BACKEND: {other:?} is none of uring, mmap, mmap-plain, pread").into()),
    };
    let batch_items: usize = argument(2, "64").parse()?;
    let outstanding: usize = argument(3, "1").parse()?;
    let seconds: u64 = argument(4, "3").parse()?;
    let mut config = EngineConfig {
        backend,
        ..EngineConfig::default()
    };
    config.mmap.announce = argument(1, "") != "mmap-plain";
    config.mmap.threads = 1;
    for (name, value) in std::env::vars() {
        match name.as_str() {
            "QUEUE_DEPTH" => config.uring.queue_depth = value.parse()?,
            "EAGER_FLUSH" => config.uring.eager_flush_reads = value.parse()?,
            "REGISTERED" => config.uring.registered_buffers = value == "1",
            "CORES" => config.cores = value.parse()?,
            "MMAP_THREADS" => config.mmap.threads = value.parse()?,
            _ => {}
        }
    }
    let dataset = Arc::new(Dataset::open(&DatasetSpec {
        name: "file".to_owned(),
        paths: vec![path.into()],
        kind: KindSpec::Blocks {
            block_bytes: 4096,
            partial_tail: PartialTail::Ignore,
        },
        direct_io: DirectIo::Preferred,
    })?);
    let engine = Engine::start(&config)?;
    let until = Instant::now() + Duration::from_secs(seconds);
    let reads = Arc::new(AtomicU64::new(0));
    let before = cpu_seconds();
    let started = Instant::now();
    let (done, wait) = std::sync::mpsc::channel();
    for slot in 0..outstanding {
        let (engine_here, dataset, reads, done) = (
            engine.clone(),
            Arc::clone(&dataset),
            Arc::clone(&reads),
            done.clone(),
        );
        engine.spawn_on(slot % engine.core_count(), move || async move {
            let mut random = fastrand::Rng::with_seed(slot as u64);
            while Instant::now() < until {
                let mut batch = Batch::new(Arc::clone(&dataset), batch_items);
                for _ in 0..batch_items {
                    batch.push_block(random.u64(..dataset.count()));
                }
                let answer = match engine_here.submit(batch, SubmitOptions::default()) {
                    Ok(ticket) => ticket.await,
                    Err(error) => Err(error),
                };
                match answer {
                    Ok(fetched) if fetched.errors.is_empty() => {
                        reads.fetch_add(batch_items as u64, Ordering::Relaxed);
                    }
                    other => {
                        tracing::error!(?other, "a batch failed");
                        break;
                    }
                }
            }
            drop(done);
        });
    }
    drop(done);
    // Ends when every sender is gone.
    let _ended: Result<(), _> = wait.recv();
    let elapsed = started.elapsed().as_secs_f64();
    let total = reads.load(Ordering::Relaxed) as f64;
    let cpu = (cpu_seconds() - before) * 1e6 / total.max(1.0);
    let status: Vec<(u64, u64)> = engine
        .shards()
        .iter()
        .map(|shard| (shard.device_reads_total, shard.submissions_total))
        .collect();
    println!(
        "{backend} batch {batch_items} outstanding {outstanding}: {:.0} reads/s, {cpu:.2} us CPU a read, (device reads, submissions) {status:?}",
        total / elapsed
    );
    Ok(())
}

/// User and system time of this process.
fn cpu_seconds() -> f64 {
    // SAFETY: getrusage only fills the value it is given.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
