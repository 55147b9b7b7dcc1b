//! The line of `ringfetch lab` as types.

use crate::quantity::{parse_duration, parse_size};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// Measure a device and the ways to read it, and set the published studies' figures beside ours.
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
    /// Compare two finished reports of one study: what differs beyond the spread.
    Compare {
        /// The report to compare with: its directory or its report.json.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
    },
}

/// What all studies share.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// A directory, in which data is made and kept; for studies of blocks also a file or a block device, which is only
    /// read.
    #[arg(long, value_name = "DIR_OR_DEVICE")]
    pub path: PathBuf,
    /// Where the results go: a new directory, or with --resume that of an unfinished run [default: lab-STUDY].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// How often each cell is measured, each time in another order.
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repetitions: u32,
    /// Seed of the orders.
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// Only these strategies.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Go on with an unfinished run.
    #[arg(long)]
    pub resume: bool,
    /// Measure what would mislead, too; the report is marked.
    #[arg(long)]
    pub force: bool,
}

/// What studies of blocks share.
#[derive(Debug, Clone, Args)]
pub struct OfBlocks {
    /// Bytes of the file that is made in a directory: more than memory.
    #[arg(long, value_name = "SIZE", default_value = "32GiB", value_parser = parse_size)]
    pub size: u64,
    /// How long a step reads.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_step)]
    pub step: Duration,
}

/// See [`LabCommand::Strategies`].
#[derive(Debug, Clone, Args)]
pub struct Strategies {
    #[command(flatten)]
    #[allow(missing_docs, reason = "flattened")]
    pub common: Common,
    #[command(flatten)]
    #[allow(missing_docs, reason = "flattened")]
    pub blocks: OfBlocks,
    /// direct, buffered, or both.
    #[arg(long, value_name = "PROFILE,...", value_delimiter = ',', default_values = ["direct", "buffered"],
        value_parser = ["direct", "buffered"])]
    pub profiles: Vec<String>,
    /// Reads in flight.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "4", "16", "32", "64", "128", "256"],
        value_parser = clap::value_parser!(u32).range(1..=512))]
    pub depths: Vec<u32>,
    /// Bytes that the buffered profile reads, from memory.
    #[arg(long, value_name = "SIZE", default_value = "1000MiB", value_parser = parse_size)]
    pub warm_bytes: u64,
}

/// See [`LabCommand::BlockSize`].
#[derive(Debug, Clone, Args)]
pub struct BlockSize {
    #[command(flatten)]
    #[allow(missing_docs, reason = "flattened")]
    pub common: Common,
    #[command(flatten)]
    #[allow(missing_docs, reason = "flattened")]
    pub blocks: OfBlocks,
    /// Reads in flight.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["1", "16"],
        value_parser = clap::value_parser!(u32).range(1..=512))]
    pub depths: Vec<u32>,
    /// The largest block.
    #[arg(long, value_name = "SIZE", default_value = "32MiB", value_parser = parse_size)]
    pub largest: u64,
}

/// See [`LabCommand::Objects`].
#[derive(Debug, Clone, Args)]
pub struct Objects {
    #[command(flatten)]
    #[allow(missing_docs, reason = "flattened")]
    pub common: Common,
    /// Numbers of files.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values = ["50", "100", "300", "1000"],
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub files: Vec<u32>,
    /// Bytes of a file.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_values = ["16KiB", "256KiB", "1MiB", "16MiB"],
        value_parser = parse_file)]
    pub file_bytes: Vec<u64>,
    /// Files of one size, together: fewer files of the larger sizes.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = parse_size)]
    pub bytes_max: u64,
}

fn parse_step(text: &str) -> Result<Duration, String> {
    let step = parse_duration(text)?;
    if !(Duration::from_millis(10)..=Duration::from_secs(600)).contains(&step) {
        return Err("10ms to 10m".to_owned());
    }
    Ok(step)
}

fn parse_file(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    // O_DIRECT reads whole pages.
    if !(4096..=64 << 20).contains(&bytes) || !bytes.is_multiple_of(4096) {
        return Err("4KiB to 64MiB, a multiple of 4KiB".to_owned());
    }
    Ok(bytes)
}
