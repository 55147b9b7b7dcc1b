//! The command line as types. What clap can check it checks here; what needs the dataset is checked by the command.

use crate::quantity::{parse_duration, parse_size};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// The demo's seed, and so everybody's until another is chosen.
const SEED: u64 = 42;

/// Fetch, look, make and verify data, and drive load.
#[derive(Debug, Parser)]
#[command(
    name = "ringfetch",
    version,
    about,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// The daemon's gRPC address.
    #[arg(
        long,
        global = true,
        env = "RINGFETCH_GRPC",
        value_name = "URL",
        default_value = "http://127.0.0.1:7410"
    )]
    pub(crate) grpc: String,
    /// The daemon's admin address (status, log-level).
    #[arg(
        long,
        global = true,
        env = "RINGFETCH_ADMIN",
        value_name = "URL",
        default_value = "http://127.0.0.1:7412"
    )]
    pub(crate) admin: String,
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// How long a call may take.
    #[arg(long, global = true, value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Fetch blocks, vectors, a byte range or an object.
    #[command(subcommand)]
    Get(Get),
    /// List what the daemon serves.
    Datasets,
    /// Show how the daemon is doing: backend and why, memory, rates, shards.
    Status,
    /// Replace the daemon's log filter until it restarts.
    LogLevel {
        /// A tracing filter: `info`, or `info,ringfetch_engine=debug`.
        filter: String,
    },
    /// Make or verify pattern data.
    #[command(subcommand)]
    Dataset(DatasetCommand),
    /// Drive load in a closed loop and measure it.
    Load(Load),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Get {
    /// Whole blocks, by index.
    Block {
        /// Name of a dataset of kind blocks.
        dataset: String,
        /// From 0.
        #[arg(required = true, value_name = "INDEX")]
        indices: Vec<u64>,
        #[command(flatten)]
        out: Out,
    },
    /// Vectors, by id.
    Vector {
        /// Name of a dataset of kind vectors.
        dataset: String,
        /// From 0.
        #[arg(required = true, value_name = "ID")]
        ids: Vec<u64>,
        #[command(flatten)]
        out: Out,
    },
    /// A byte range of a dataset of kind blocks or vectors.
    Range {
        /// Name of the dataset.
        dataset: String,
        /// First byte.
        #[arg(value_parser = parse_size)]
        offset: u64,
        /// Bytes (4096, 64KiB, ...).
        #[arg(value_parser = parse_size)]
        length: u64,
        #[command(flatten)]
        out: Out,
    },
    /// An object, whole or in part.
    Object {
        /// Name of a dataset of kind objects.
        dataset: String,
        /// Name below the dataset's directory: `shard-00/object-000005`.
        name: String,
        /// First byte.
        #[arg(long, value_parser = parse_size, default_value = "0")]
        offset: u64,
        /// Bytes; without it: to the end.
        #[arg(long, value_parser = parse_size)]
        length: Option<u64>,
        #[command(flatten)]
        out: Out,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Out {
    /// How to print: hex (as xxd), text (numbers; UTF-8), raw bytes, or npy (vectors). Default: text for vectors, else
    /// hex.
    #[arg(long, value_enum, conflicts_with = "json")]
    pub(crate) format: Option<Format>,
    /// Write to this file instead of stdout.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Hex,
    Text,
    Raw,
    Npy,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DatasetCommand {
    /// Write a file or directory of pattern data, whose every byte `verify` knows.
    #[command(subcommand)]
    Make(Make),
    /// Fetch a dataset over the network and check it against the pattern.
    Verify(Verify),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Make {
    /// A file of blocks.
    Blocks {
        /// The file.
        path: PathBuf,
        /// Length of the file (10GiB, ...).
        #[arg(long, value_parser = parse_size)]
        size: u64,
        /// Block length that the printed configuration names.
        #[arg(long, value_parser = parse_size, default_value = "4KiB")]
        block_bytes: u64,
        #[command(flatten)]
        how: MakeHow,
    },
    /// A file of vectors.
    Vectors {
        /// The file.
        path: PathBuf,
        /// Vectors.
        #[arg(long)]
        count: u64,
        /// Elements of a vector.
        #[arg(long)]
        dim: u32,
        /// Element type. Default: what the layout fixes, else f32.
        #[arg(long, value_enum)]
        dtype: Option<DtypeArg>,
        /// File layout. Default: by the file's suffix, else raw.
        #[arg(long, value_enum)]
        layout: Option<LayoutArg>,
        #[command(flatten)]
        how: MakeHow,
    },
    /// A directory of objects.
    Objects {
        /// The directory.
        path: PathBuf,
        /// Objects.
        #[arg(long)]
        count: u64,
        /// Shortest object. The first two are empty and of one byte all the same.
        #[arg(long, value_parser = parse_size, default_value = "1KiB")]
        length_min: u64,
        /// Longest object.
        #[arg(long, value_parser = parse_size, default_value = "64KiB")]
        length_max: u64,
        #[command(flatten)]
        how: MakeHow,
    },
}

#[derive(Debug, Args)]
pub(crate) struct MakeHow {
    /// The pattern's seed.
    #[arg(long, default_value_t = SEED)]
    pub(crate) seed: u64,
    /// Replace what is there.
    #[arg(long)]
    pub(crate) force: bool,
    /// Name in the printed configuration. Default: from the path.
    #[arg(long)]
    pub(crate) name: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    F32,
    F16,
    U8,
    I8,
    I32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayoutArg {
    Raw,
    Fvecs,
    Bvecs,
    Ivecs,
    Npy,
    Fbin,
    U8bin,
    I8bin,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Name of the dataset.
    pub(crate) dataset: String,
    /// The seed it was made with.
    #[arg(long, default_value_t = SEED)]
    pub(crate) seed: u64,
    /// Check this many blocks, vectors or objects, chosen at random.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) sample: u64,
    /// Check all of it.
    #[arg(long, conflicts_with = "sample")]
    pub(crate) all: bool,
    /// Check only the first bytes of the dataset (of its elements, for vectors; of each object, for objects).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) length: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Load {
    /// What to read: blocks by index, vectors by id, objects by name.
    #[arg(long)]
    pub(crate) dataset: String,
    /// HTTP/2 connections.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) connections: u32,
    /// Requests in flight, over all connections.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) outstanding: u32,
    /// Reads a request.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) batch: u32,
    /// In which order.
    #[arg(long, value_enum, default_value_t = PatternArg::Uniform)]
    pub(crate) pattern: PatternArg,
    /// How long to measure.
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "10")]
    pub(crate) seconds: Duration,
    /// Measure this many requests instead.
    #[arg(long, value_name = "N", conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: Option<u64>,
    /// Drive load this long before measuring.
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "1")]
    pub(crate) warmup_seconds: Duration,
    /// Check every byte against the pattern.
    #[arg(long)]
    pub(crate) verify: bool,
    /// The seed that the data was made with, for --verify.
    #[arg(long, default_value_t = SEED)]
    pub(crate) seed: u64,
    /// Seed of the choice of items, so that a run can be repeated.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub(crate) choice_seed: u64,
    /// Read ranges of this many bytes, at multiples of it, from a dataset of kind blocks or vectors.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) range_bytes: Option<u64>,
    /// How requests travel: a call each, or pipelined on one stream a connection.
    #[arg(long, value_enum, default_value_t = TransportArg::Grpc)]
    pub(crate) transport: TransportArg,
    /// Threads that drive; each has its own share of the connections.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) threads: u32,
    /// Also measure this process's CPU (the daemon's, on this machine).
    #[arg(long, value_name = "PID")]
    pub(crate) server_pid: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PatternArg {
    Uniform,
    Sequential,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportArg {
    Grpc,
    Stream,
}

/// `10`, `0.5`, `10s`, `2m`.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string()),
        Err(_) => parse_duration(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        // Scenario: clap's own check of the definition (clashing names, impossible defaults).
        // Expected: no complaint.
        Cli::command().debug_assert();
    }

    #[test]
    fn seconds_take_numbers_and_units() {
        // Scenario: plain numbers, fractions, units, and what is neither.
        // Expected: durations; an error.
        assert_eq!(parse_seconds("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_seconds("2m"), Ok(Duration::from_secs(120)));
        for wrong in ["-1", "soon", "", "NaN"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }
}
