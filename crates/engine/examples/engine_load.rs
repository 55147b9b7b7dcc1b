//! The engine alone under a closed loop, without a network: reads per second, CPU per read and latency, to
//! compare with fio on the same file. Prints one JSON object.
//!
//! `cargo run --release -p ringfetch-engine --example engine_load -- FILE [--flag value ...]`; `--help` lists
//! the flags. `--queue-depth` is the depth at the device; batches in flight (`--outstanding`) keep it filled.

use hdrhistogram::Histogram;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, PartialTail};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use rustix::time::{ClockId, clock_gettime};
use std::io::Write as _;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

const USAGE: &str = "usage: engine_load FILE [--flag value ...]
  --backend uring|auto|mmap   (uring)
  --batch N            reads a batch (64)
  --outstanding N      batches in flight (4)
  --queue-depth N      most reads in flight at the device (64)
  --threads N          threads of mmap (1)
  --block-bytes N      bytes a read (4096)
  --pin true|false     pin the core to the first CPU (true)
  --seconds S          measured time, after half a second that is not (3)";

/// Driven before anything is measured.
const WARM_UP: Duration = Duration::from_millis(500);

struct Options {
    path: String,
    config: EngineConfig,
    batch: usize,
    outstanding: usize,
    block_bytes: u32,
    seconds: Duration,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let path = arguments
            .next()
            .filter(|path| !path.starts_with("--"))
            .ok_or(USAGE)?;
        let mut options = Self {
            path,
            config: EngineConfig::default(),
            batch: 64,
            outstanding: 4,
            block_bytes: 4096,
            seconds: Duration::from_secs(3),
        };
        options.config.backend = BackendKind::Uring;
        options.config.mmap.threads = 1;
        options.config.uring.queue_depth = 64;
        while let Some(flag) = arguments.next() {
            let value = arguments
                .next()
                .ok_or_else(|| format!("{flag}: needs a value\n{USAGE}"))?;
            let config = &mut options.config;
            match flag.as_str() {
                "--backend" => {
                    config.backend = match value.as_str() {
                        "uring" => BackendKind::Uring,
                        "auto" => BackendKind::Auto,
                        "mmap" => BackendKind::Mmap,
                        other => return Err(format!("--backend {other}: no such backend\n{USAGE}").into()),
                    };
                }
                "--batch" => options.batch = parse(&flag, &value)?,
                "--outstanding" => options.outstanding = parse(&flag, &value)?,
                "--queue-depth" => config.uring.queue_depth = parse(&flag, &value)?,
                "--threads" => config.mmap.threads = parse(&flag, &value)?,
                "--block-bytes" => options.block_bytes = parse(&flag, &value)?,
                "--pin" => config.pin = parse(&flag, &value)?,
                "--seconds" => options.seconds = Duration::try_from_secs_f64(parse(&flag, &value)?)?,
                other => return Err(format!("{other}: no such flag\n{USAGE}").into()),
            }
        }
        if options.batch == 0
            || options.outstanding == 0
            || options.block_bytes == 0
            || options.seconds.is_zero()
        {
            return Err("--batch, --outstanding, --block-bytes, --seconds: at least 1".into());
        }
        Ok(options)
    }
}

fn parse<T: FromStr>(flag: &str, value: &str) -> Result<T, Failure> {
    value
        .parse()
        .map_err(|_| format!("{flag} {value}: not understood\n{USAGE}").into())
}

/// What the slots counted. Only the core's thread touches it while the load runs.
struct Counted {
    reads: AtomicU64,
    /// Latency per batch, nanoseconds.
    latency: Mutex<Histogram<u64>>,
    failed: Mutex<Option<String>>,
}

fn main() -> Result<(), Failure> {
    let arguments = std::env::args().skip(1);
    if std::env::args().any(|argument| argument == "--help") {
        writeln!(std::io::stdout(), "{USAGE}")?;
        return Ok(());
    }
    let options = Options::parse(arguments)?;
    let kind = KindSpec::Blocks {
        block_bytes: options.block_bytes,
        partial_tail: PartialTail::Ignore,
    };
    let spec = DatasetSpec::new("file", &options.path, kind, DirectIo::Preferred);
    let dataset = Arc::new(Dataset::open(&spec)?);
    let engine = Engine::start(&options.config)?;
    let measure_from = Instant::now() + WARM_UP;
    let until = measure_from + options.seconds;
    let counted = Arc::new(Counted {
        reads: AtomicU64::new(0),
        latency: Mutex::new(Histogram::new(3)?),
        failed: Mutex::new(None),
    });
    let (done, wait) = std::sync::mpsc::channel::<()>();
    for slot in 0..options.outstanding {
        let drive = Slot {
            engine: engine.clone(),
            dataset: Arc::clone(&dataset),
            counted: Arc::clone(&counted),
            batch: options.batch,
            seed: slot as u64,
            measure_from,
            until,
        };
        let done = done.clone();
        engine.spawn_on(0, move || async move {
            drive.run().await;
            drop(done);
        });
    }
    drop(done);
    let reads = || counted.reads.load(Ordering::Relaxed);
    std::thread::sleep(measure_from.saturating_duration_since(Instant::now()));
    let (began, cpu_before, reads_before) = (Instant::now(), cpu_time(), reads());
    std::thread::sleep(until.saturating_duration_since(Instant::now()));
    let (elapsed, cpu, total) = (began.elapsed(), cpu_time() - cpu_before, reads() - reads_before);
    // Ends when every slot has dropped its sender.
    let _ended: Result<(), _> = wait.recv();
    if let Some(error) = counted
        .failed
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take()
    {
        return Err(format!("a batch failed: {error}").into());
    }
    if total == 0 {
        return Err("nothing was read".into());
    }
    let latency = counted.latency.lock().unwrap_or_else(PoisonError::into_inner);
    report(&engine, total as f64, elapsed, cpu, &latency)
}

fn report(
    engine: &Engine,
    reads: f64,
    elapsed: Duration,
    cpu: Duration,
    latency: &Histogram<u64>,
) -> Result<(), Failure> {
    let per_second = reads / elapsed.as_secs_f64();
    let cpu_us = cpu.as_secs_f64() * 1e6 / reads;
    let micros = |quantile| latency.value_at_quantile(quantile) as f64 / 1e3;
    let (p50, p99) = (micros(0.5), micros(0.99));
    let shards = engine.shards();
    // These include the warm-up: compare them only with each other.
    let device: u64 = shards.iter().map(|shard| shard.device_reads_total).sum();
    let submissions: u64 = shards.iter().map(|shard| shard.submissions_total).sum();
    let backend = engine.backend().backend;
    writeln!(
        std::io::stdout(),
        "{{\"backend\": \"{backend}\", \"reads_per_second\": {per_second:.1}, \"cpu_us_per_read\": {cpu_us:.4}, \
         \"latency_us\": {{\"p50\": {p50:.1}, \"p99\": {p99:.1}}}, \"device_reads\": {device}, \
         \"submissions\": {submissions}}}"
    )?;
    Ok(())
}

/// One batch in flight, repeated.
struct Slot {
    engine: Engine,
    dataset: Arc<Dataset>,
    counted: Arc<Counted>,
    batch: usize,
    seed: u64,
    measure_from: Instant,
    until: Instant,
}

impl Slot {
    async fn run(self) {
        let mut random = fastrand::Rng::with_seed(self.seed);
        let count = self.dataset.count();
        let mut start = Instant::now();
        while start < self.until {
            let mut batch = Batch::new(Arc::clone(&self.dataset), self.batch);
            for _ in 0..self.batch {
                batch.push_block(random.u64(..count));
            }
            let answer = match self.engine.submit(batch, SubmitOptions::default()) {
                Ok(ticket) => ticket.await,
                Err(error) => Err(error),
            };
            let problem = match answer {
                Ok(fetched) => fetched.errors.first().map(|item| format!("{item:?}")),
                Err(error) => Some(error.to_string()),
            };
            if problem.is_some() {
                *self.counted.failed.lock().unwrap_or_else(PoisonError::into_inner) = problem;
                return;
            }
            let end = Instant::now();
            self.counted.reads.fetch_add(self.batch as u64, Ordering::Relaxed);
            if start >= self.measure_from {
                let nanoseconds = u64::try_from((end - start).as_nanos()).unwrap_or(u64::MAX);
                let mut latency = self
                    .counted
                    .latency
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                latency.record(nanoseconds).ok();
            }
            start = end;
        }
    }
}

/// User and system time of this process, all threads.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
