//! The run as a time series: one CSV line per interval. Latencies are of requests that ended in it.

use super::recorder::Tally;
use crate::outcome::Failure;
use crate::quantity::approximate;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

const HEADER: &str = "t,intended_requests_per_second,requests_per_second,reads_per_second,p50_us,p99_us,max_us,errors,\
                      outstanding";

/// A file to which lines are written as they come.
#[derive(Debug)]
pub(crate) struct Series {
    path: PathBuf,
    out: BufWriter<File>,
}

impl Series {
    /// Opens the file. What is in it stays until [`Self::begin`].
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let opened = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let out = BufWriter::new(opened.map_err(|error| failed(path, &error))?);
        let path = path.to_owned();
        Ok(Self { path, out })
    }

    /// Empties the file, for the lines to come.
    pub(crate) fn begin(mut self) -> Result<Self, Failure> {
        let file = self.out.get_ref();
        let emptied = match file.metadata() {
            Ok(found) if found.is_file() => file.set_len(0),
            found => found.map(drop),
        };
        let begun = emptied.and_then(|()| writeln!(self.out, "{HEADER}"));
        begun.map_err(|error| failed(&self.path, &error))?;
        Ok(self)
    }

    /// Writes a line.
    pub(crate) fn write(&mut self, line: &str) -> Result<(), Failure> {
        let written = writeln!(self.out, "{line}");
        // A reader that follows the file sees the line now.
        let written = written.and_then(|()| self.out.flush());
        written.map_err(|error| failed(&self.path, &error))
    }
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::Failed(format!("--csv {}: {error}", path.display()))
}

/// The line of an interval that ended `at` into the window. `intended`: arrivals per second in an open loop.
pub(crate) fn line(
    at: Duration,
    length: Duration,
    intended: Option<f64>,
    interval: &Tally,
    outstanding: u32,
) -> String {
    let per_second = |count: u64| approximate(count) / length.as_secs_f64().max(1e-9);
    // Empty without a value: a zero would be drawn.
    let us = |ns: Option<f64>| ns.map_or_else(String::new, |ns| format!("{:.1}", ns / 1e3));
    let latency = &interval.latency;
    format!(
        "{:.3},{},{:.1},{:.1},{},{},{},{},{outstanding}",
        at.as_secs_f64(),
        intended.map_or_else(String::new, |rate| format!("{rate:.1}")),
        per_second(interval.requests),
        per_second(interval.reads),
        us(latency.percentile(50.0)),
        us(latency.percentile(99.0)),
        us(latency.max_ns().map(approximate)),
        interval.errors(),
    )
}

#[cfg(test)]
mod tests {
    use super::super::histogram::tests::ramp;
    use super::*;

    #[test]
    fn an_interval_is_a_line() {
        // Half a second with 100 requests of 1 to 100 us, 400 reads and an error; one with nothing.
        let mut interval = Tally::default();
        (interval.requests, interval.reads, interval.latency) = (100, 400, ramp(1..=100));
        interval.request_errors.insert("UNAVAILABLE".into(), 1);
        let half = Duration::from_millis(500);
        let text = line(half, half, Some(250.0), &interval, 7);
        let cells: Vec<&str> = text.split(',').collect();
        assert_eq!(cells.len(), HEADER.split(',').count());
        assert_eq!(cells[..4], ["0.500", "250.0", "200.0", "800.0"]);
        assert_eq!(cells[6..], ["100.0", "1", "7"]);
        assert!(
            cells[4].starts_with("50.") && cells[5].starts_with("99."),
            "{text}"
        );
        let nothing = line(half, half, None, &Tally::default(), 0);
        assert_eq!(nothing, "0.500,,0.0,0.0,,,,0,0");
    }
}
