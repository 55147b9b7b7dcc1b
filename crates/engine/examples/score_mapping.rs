//! The arithmetic of ScoreVectors over a mapping, in this process, on one thread: the reference for the
//! daemon's scores of warm data (`bench/compare.py`, row `scores-warm`).
//!
//! `cargo run --release -p ringfetch-engine --example score_mapping -- FILE HEADER_BYTES DIM BATCH SECONDS`:
//! `BATCH` random vectors of `DIM` f32 at a time, ten results by inner product. Prints one JSON object.
#![allow(unsafe_code, reason = "maps a file that nobody truncates")]

use ringfetch_engine::dataset::Dtype;
use ringfetch_score::{Metric, Scored, Scorer};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::time::{ClockId, clock_gettime};
use std::io::Write as _;
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, header_bytes, dim, batch, seconds] = &arguments[..] else {
        return Err("usage: score_mapping FILE HEADER_BYTES DIM BATCH SECONDS".into());
    };
    let (header_bytes, dim, batch): (usize, usize, usize) =
        (header_bytes.parse()?, dim.parse()?, batch.parse()?);
    let seconds = Duration::from_secs_f64(seconds.parse()?);
    let file = std::fs::File::open(path)?;
    let length = usize::try_from(file.metadata()?.len())?;
    let count = (length.saturating_sub(header_bytes) / (dim * 4)) as u64;
    if count == 0 {
        return Err("no vectors".into());
    }
    // SAFETY: a new mapping, which overlaps nothing and is never unmapped.
    let start = unsafe {
        mmap(
            std::ptr::null_mut(),
            length,
            ProtFlags::READ,
            MapFlags::SHARED,
            &file,
            0,
        )?
    };
    // SAFETY: `length` bytes are mapped at `start`, and the benchmark that runs this does not write to the file.
    let data = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), length) };
    let scorer = Scorer::new(Metric::Dot, Dtype::F32).ok_or("f32 has scores")?;
    let query: Vec<f32> = (0..dim).map(|place| (place as f32).sin()).collect();
    let mut random = fastrand::Rng::with_seed(1);
    let (mut ids, mut scored) = (Vec::with_capacity(batch), Vec::with_capacity(batch));
    let (mut reads, mut checksum, began, used) = (0_u64, 0.0, Instant::now(), cpu_time());
    while began.elapsed() < seconds {
        ids.clear();
        ids.extend((0..batch).map(|_| random.u64(..count)));
        // In file order, as the daemon does.
        ids.sort_unstable();
        scored.clear();
        for id in &ids {
            let place = header_bytes + usize::try_from(*id)? * dim * 4;
            let elements = data
                .get(place..place + dim * 4)
                .ok_or("a vector ends past the end")?;
            let score = scorer.score(&query, 1.0, elements);
            scored.push(Scored { id: *id, score });
        }
        Metric::Dot.rank(&mut scored, 10);
        checksum += scored.first().map_or(0.0, |best| best.score);
        reads += batch as u64;
    }
    let (elapsed, used) = (began.elapsed().as_secs_f64(), (cpu_time() - used).as_secs_f64());
    let (per_second, cpu_us) = (reads as f64 / elapsed, used * 1e6 / reads as f64);
    writeln!(
        std::io::stdout().lock(),
        "{{\"reads_per_second\": {per_second:.1}, \"cpu_us_per_read\": {cpu_us:.4}, \"checksum\": {checksum:e}}}"
    )?;
    Ok(())
}

/// User and system time of this process.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
