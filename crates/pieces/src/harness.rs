//! Runs named pieces of code.

use std::hint::black_box;
use std::io::Write as _;
use std::time::{Duration, Instant};

/// A piece: its name, what it does per run, and the run itself, which returns a value so that it is not
/// optimized away.
pub(crate) struct Piece {
    pub(crate) name: &'static str,
    pub(crate) run: Box<dyn FnMut() -> usize>,
}

impl Piece {
    pub(crate) fn new(name: &'static str, run: impl FnMut() -> usize + 'static) -> Self {
        Self {
            name,
            run: Box::new(run),
        }
    }

    fn times(&mut self, count: u64) -> Duration {
        let start = Instant::now();
        for _ in 0..count {
            black_box((self.run)());
        }
        start.elapsed()
    }

    /// (least, median) nanoseconds per run, over samples of about 10 ms.
    fn measure(&mut self) -> (f64, f64) {
        const SAMPLES: usize = 21;
        let mut count = 1;
        while self.times(count) < Duration::from_millis(10) {
            count *= 2;
        }
        let mut samples: Vec<f64> = (0..SAMPLES)
            .map(|_| self.times(count).as_secs_f64() * 1e9 / count as f64)
            .collect();
        samples.sort_by(f64::total_cmp);
        (samples[0], samples[SAMPLES / 2])
    }
}

/// Runs the command line.
pub(crate) fn main(mut pieces: Vec<Piece>) -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut out = std::io::stdout().lock();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => {
            for piece in &pieces {
                writeln!(out, "{}", piece.name)?;
            }
        }
        ["--exactly", name, count] => {
            let piece = pieces.iter_mut().find(|piece| piece.name == name);
            let piece = piece.ok_or_else(|| format!("{name}: no such piece (--list)"))?;
            piece.times(count.parse()?);
        }
        [] | [_] => {
            let part = arguments.first().map_or("", String::as_str);
            writeln!(out, "{:<28} {:>12} {:>12}", "piece", "least ns", "median ns")?;
            for piece in pieces.iter_mut().filter(|piece| piece.name.contains(part)) {
                let (least, median) = piece.measure();
                writeln!(out, "{:<28} {least:>12.1} {median:>12.1}", piece.name)?;
            }
        }
        _ => return Err("usage: [NAME | --list | --exactly NAME N]".into()),
    }
    Ok(())
}
