//! The line of `ringfetch lab` as types.

use clap::{Args, Subcommand};
use ringfetch_command::quantity::{parse_duration, parse_size};
use std::path::PathBuf;
use std::time::Duration;

/// Measure a device and the ways to read it, and compare published figures with ours.
#[derive(Debug, Clone, Args)]
pub struct Lab {
    /// Which study.
    #[command(subcommand)]
    pub command: LabCommand,
}

/// The studies.
#[derive(Debug, Clone, Subcommand)]
pub enum LabCommand {
    /// Which way to read is fastest, by queue depth: random direct reads, and warm sequential ones.
    Strategies(Strategies),
    /// How latency grows with the block, and which block to read (ClickHouse).
    BlockSize(BlockSize),
    /// Whole files, many of them: threads against io_uring (Grafana Loki).
    Objects(Objects),
    /// The highest rate of small reads that Aerospike's certification (ACT) passes, through a daemon and in process.
    Act(Act),
    /// Rescoring the candidates of a vector search from disk (Qdrant), through a daemon and in process.
    Rescore(Rescore),
    /// The same load on a running daemon under each backend in turn; then restore its own backend.
    Flip(FlipArgs),
    /// Which settings of the engine suit a file or device.
    Calibrate(Calibrate),
    /// Compare two finished reports of one study: what differs beyond the spread.
    Compare {
        /// The report to compare with: its directory or its report.json.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
}

impl LabCommand {
    /// The same with its lists sorted and without duplicates: tables and plots have their columns in that
    /// order.
    pub(crate) fn in_order(mut self) -> Self {
        match &mut self {
            Self::Strategies(args) => rise(&mut args.depths),
            Self::BlockSize(args) => rise(&mut args.depths),
            Self::Objects(args) => {
                rise(&mut args.files);
                rise(&mut args.file_bytes);
            }
            Self::Rescore(args) => {
                rise(&mut args.parallel);
                rise(&mut args.oversampling);
            }
            Self::Act(_) | Self::Flip(_) | Self::Calibrate(_) | Self::Compare { .. } => {}
        }
        self
    }
}

fn rise<T: Ord>(values: &mut Vec<T>) {
    values.sort_unstable();
    values.dedup();
}

/// What all studies share.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// A directory, in which data is made and kept; for studies of blocks also a file or a block device, which is only
    /// read.
    #[arg(long, value_name = "DIR_OR_DEVICE")]
    pub(crate) path: PathBuf,
    /// Where the results go: a new directory, or with --resume that of an unfinished run [default: lab-STUDY].
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// The option that names it: a command may have another name for it.
    #[arg(skip = "--out")]
    pub(crate) out_option: &'static str,
    /// How often each cell is measured, each time in another order.
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repetitions: u32,
    /// Seed of the orders.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) seed: u64,
    /// Only these strategies.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Continue an unfinished run.
    #[arg(long)]
    pub(crate) resume: bool,
    /// Measure even if the result may mislead; the report is marked.
    #[arg(long)]
    pub(crate) force: bool,
}

/// A running daemon.
#[derive(Debug, Clone, Args)]
pub struct OfDaemon {
    /// The gRPC address of a running daemon.
    #[arg(long, value_name = "URL", requires = "dataset")]
    pub(crate) server: Option<String>,
    /// The daemon's dataset: for `act` and `rescore` the data that are read below --path.
    #[arg(long, value_name = "NAME", requires = "server")]
    pub(crate) dataset: Option<String>,
    /// PID of the daemon on this machine, to count its CPU time too.
    #[arg(long, value_name = "PID", requires = "server")]
    pub(crate) server_pid: Option<u32>,
    /// Connections to it [default: as many as it has cores, if the service of --admin tells; otherwise half as many as this
    /// machine has CPUs, at most 4].
    #[arg(long, value_name = "N", requires = "server", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) connections: Option<u16>,
}

/// See [`LabCommand::Act`].
#[derive(Debug, Clone, Args)]
pub struct Act {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) daemon: OfDaemon,
    /// Bytes of the file that is made in a directory: more than memory.
    #[arg(long, value_name = "SIZE", default_value = "32GiB", value_parser = parse_size)]
    pub(crate) size: u64,
    /// How long the rate has to be held (a certification takes 24 hours).
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = parse_hold)]
    pub(crate) hold: Duration,
    /// How long each rate is tried during the search.
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_step)]
    pub(crate) step: Duration,
    /// The highest N that is tried.
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) most: u64,
}

/// See [`LabCommand::Rescore`].
#[derive(Debug, Clone, Args)]
pub struct Rescore {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) daemon: OfDaemon,
    /// Vectors of 768 f32 (3 KiB each): more of them than memory holds.
    #[arg(long, value_name = "N", default_value = "5000000", value_parser = clap::value_parser!(u64).range(1_000..=100_000_000))]
    pub(crate) vectors: u64,
    /// Queries at a time.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["4", "8"],
        value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) parallel: Vec<u32>,
    /// Candidates for each result: of those prepared.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "4"],
        value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) oversampling: Vec<u32>,
    /// Queries of a step [default: all prepared].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) queries: Option<u32>,
    /// Read through the page cache, also where a strategy could read past it.
    #[arg(long)]
    pub(crate) buffered: bool,
}

/// See [`LabCommand::Flip`].
#[derive(Debug, Clone, Args)]
pub struct FlipArgs {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) daemon: OfDaemon,
    /// Replay this trace, as of `ringfetch load`: an item a line, or OFFSET LENGTH [default: random items].
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Items of a request.
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) batch: u32,
    /// Requests in flight; with --rate, at most.
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) in_flight: u32,
    /// Requests per second that arrive, whether or not earlier ones have finished [default: as fast as they are answered].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub(crate) rate: Option<u64>,
    /// How long a step takes.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_step)]
    pub(crate) step: Duration,
}

/// What studies of blocks share.
#[derive(Debug, Clone, Args)]
pub struct OfBlocks {
    /// Bytes of the file that is made in a directory: more than memory.
    #[arg(long, value_name = "SIZE", default_value = "32GiB", value_parser = parse_size)]
    pub(crate) size: u64,
    /// How long a step reads.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_step)]
    pub(crate) step: Duration,
}

/// See [`LabCommand::Strategies`].
#[derive(Debug, Clone, Args)]
pub struct Strategies {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) blocks: OfBlocks,
    /// direct, buffered, or both.
    #[arg(long, value_name = "PROFILE,...", value_delimiter = ',', default_values = ["direct", "buffered"],
        value_parser = ["direct", "buffered"])]
    pub(crate) profiles: Vec<String>,
    /// Reads in flight.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "4", "16", "32", "64", "128", "256"],
        value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) depths: Vec<u32>,
    /// Bytes that the buffered profile reads, from memory.
    #[arg(long, value_name = "SIZE", default_value = "1000MiB", value_parser = parse_size)]
    pub(crate) warm_bytes: u64,
}

/// See [`LabCommand::BlockSize`].
#[derive(Debug, Clone, Args)]
pub struct BlockSize {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) blocks: OfBlocks,
    /// Reads in flight.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "16"],
        value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) depths: Vec<u32>,
    /// The largest block.
    #[arg(long, value_name = "SIZE", default_value = "32MiB", value_parser = parse_size)]
    pub(crate) largest: u64,
}

/// See [`LabCommand::Objects`].
#[derive(Debug, Clone, Args)]
pub struct Objects {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Numbers of files.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["50", "100", "300", "1000"],
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) files: Vec<u32>,
    /// Bytes of a file.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_values = ["16KiB", "256KiB", "1MiB", "16MiB"],
        value_parser = parse_file)]
    pub(crate) file_bytes: Vec<u64>,
    /// Files of one size, together: fewer files of the larger sizes.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = parse_size)]
    pub(crate) bytes_max: u64,
}

/// See [`LabCommand::Calibrate`].
#[derive(Debug, Clone, Args)]
pub struct Calibrate {
    /// A file or a block device to be served. It is only read.
    pub(crate) path: PathBuf,
    /// How long to measure, about; at least 3 s.
    #[arg(long, value_name = "S", value_parser = parse_budget, default_value = "60")]
    pub(crate) seconds: Duration,
    /// 15 s: for a first look.
    #[arg(long, conflicts_with = "seconds")]
    pub(crate) quick: bool,
    /// Bytes of a read, 512B to 1MiB: those of the dataset's blocks or vectors.
    #[arg(long, value_name = "SIZE", value_parser = parse_block, default_value = "4KiB")]
    pub(crate) block_bytes: u32,
    /// Write the YAML section to this file instead of stdout.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Keep the steps and the report (HTML, CSV, JSON, plots) in this new directory; a run that was stopped can be continued.
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,
    /// Continue the unfinished run in --report.
    #[arg(long, requires = "report")]
    pub(crate) resume: bool,
    /// Seed of the orders.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) seed: u64,
    /// Replace what --out names, and measure even if the result may mislead; the report is marked.
    #[arg(long)]
    pub(crate) force: bool,
}

fn parse_budget(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().map(|seconds| format!("{seconds}s"));
    // A shorter step would mostly consist of its own start and end.
    between(seconds.as_deref().unwrap_or(text), "3s", "1day")
}

fn parse_step(text: &str) -> Result<Duration, String> {
    between(text, "10ms", "10m")
}

fn parse_hold(text: &str) -> Result<Duration, String> {
    between(text, "10ms", "7d")
}

fn between(text: &str, least: &str, most: &str) -> Result<Duration, String> {
    let duration = parse_duration(text)?;
    if (parse_duration(least)?..=parse_duration(most)?).contains(&duration) {
        return Ok(duration);
    }
    Err(format!("use at least {least} and at most {most}"))
}

fn parse_block(text: &str) -> Result<u32, String> {
    let bytes = u32::try_from(parse_size(text)?).ok();
    let fitting = bytes.filter(|bytes| (512..=1 << 20).contains(bytes));
    fitting.ok_or_else(|| "reads of 512B to 1MiB can be calibrated".to_owned())
}

fn parse_file(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    // O_DIRECT reads whole pages.
    if !(4096..=64 << 20).contains(&bytes) || !bytes.is_multiple_of(4096) {
        return Err("4KiB to 64MiB, a multiple of 4KiB".to_owned());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_and_a_block_have_bounds() {
        // Scenario: budgets and blocks at their bounds and beyond.
        // Expected: accepted at the bounds, refused beyond.
        assert_eq!(parse_budget("3"), Ok(Duration::from_secs(3)));
        assert_eq!(parse_budget("2m"), Ok(Duration::from_secs(120)));
        assert_eq!((parse_block("512"), parse_block("1MiB")), (Ok(512), Ok(1 << 20)));
        for wrong in ["0", "2.9", "86401", "soon", "nan"] {
            assert!(parse_budget(wrong).is_err(), "{wrong}");
        }
        for wrong in ["511", "2MiB", "0", "8GiB"] {
            assert!(parse_block(wrong).is_err(), "{wrong}");
        }
    }
}
