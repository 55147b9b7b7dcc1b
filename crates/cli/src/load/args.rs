//! The arguments of `load` and `load-merge`, parsed into types that cannot hold invalid values. Checks that
//! need the dataset are made where it is known.

use super::require::Requirement;
use crate::args::SEED;
use crate::quantity::{parse_duration, parse_size};
use crate::score::MetricName;
use clap::{ArgGroup, Args, ValueEnum};
use ringfetch_pace::{Arrivals, Ramp};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Highest accepted requests per second: more than any machine sends, few enough to count one by one.
const RATE_MAX: f64 = 10_000_000.0;
const BATCH_MAX: u32 = 65_536;
/// 10 years. The clock ends at 2^63 seconds, and what begins now must end before.
const SECONDS_MAX: Duration = Duration::from_secs(3660 * 24 * 3600);
/// YCSB's constant (`ZipfianGenerator.ZIPFIAN_CONSTANT`).
const ZIPFIAN_THETA: f64 = 0.99;

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["dataset", "mix"])))]
#[command(group(ArgGroup::new("open").args(["rate", "ramp"])))]
pub(crate) struct Load {
    /// What to read: blocks by index, vectors by id, objects by name.
    #[arg(long)]
    pub(crate) dataset: Option<String>,
    /// Read several datasets, each with its share of the requests: blocks=0.7,vectors=0.3.
    #[arg(long, value_name = "NAME=SHARE,...", value_parser = parse_mix)]
    pub(crate) mix: Option<Mix>,
    /// How requests are sent: one call each, pipelined on one stream per connection, or HTTP/1.1.
    #[arg(long, value_enum, default_value_t = TransportArg::Grpc)]
    pub(crate) transport: TransportArg,
    /// The daemon's HTTP address: for --transport http, which needs no other, and for its counters before and after.
    #[arg(long, env = "RINGFETCH_HTTP", value_name = "URL")]
    pub(crate) http: Option<String>,
    /// Connections. Default: 1; with --transport http as many as --outstanding.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) connections: Option<u32>,
    /// Threads that drive; each has its own share of --connections and --outstanding, of both at least one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) threads: u32,
    /// Requests in flight, over all connections: kept up by a closed loop, not exceeded by an open one.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) outstanding: u32,
    /// Reads per request: a number, or a range (1..64) to choose from uniformly.
    #[arg(long, default_value = "64", value_parser = parse_batch)]
    pub(crate) batch: Batch,
    /// Which items: uniform, sequential, zipfian or zipfian:THETA, or hotspot:FRACTION:SHARE (hotspot:0.1:0.9: a tenth of
    /// the items gets nine tenths of the reads).
    #[arg(long, default_value = "uniform", value_parser = parse_pattern)]
    pub(crate) pattern: PatternArg,
    /// Read the items that this file lists, one per line, repeatedly: an index (a byte offset with
    /// --range-bytes), or `OFFSET LENGTH`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pattern", "mix"])]
    pub(crate) trace: Option<PathBuf>,
    /// Read ranges of this many bytes, at multiples of it, from a dataset of kind blocks or vectors.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) range_bytes: Option<u64>,
    /// Rank the vectors of a request by their nearness to a synthetic query, instead of fetching them.
    #[arg(
        long,
        value_enum,
        value_name = "METRIC",
        conflicts_with = "range_bytes",
        help_heading = "Scores"
    )]
    pub(crate) score: Option<MetricName>,
    /// Who computes the scores: the daemon, or this process from fetched vectors.
    #[arg(long, value_enum, default_value_t = ScoreAt::Daemon, requires = "score", help_heading = "Scores")]
    pub(crate) score_at: ScoreAt,
    /// Most results per request.
    #[arg(long, value_name = "N", default_value_t = 10, requires = "score", help_heading = "Scores",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) score_limit: u32,
    /// How long to measure; with --step-to-knee: at each rate.
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "10")]
    pub(crate) seconds: Duration,
    /// Measure this many requests instead.
    #[arg(long, value_name = "N", conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) requests: Option<u64>,
    /// Drive load this long before measuring.
    #[arg(long, value_name = "S", value_parser = parse_seconds, default_value = "1")]
    pub(crate) warmup_seconds: Duration,
    /// Check every byte against the pattern; with --score every result.
    #[arg(long)]
    pub(crate) verify: bool,
    /// The seed that the data was made with, for --verify.
    #[arg(long, default_value_t = SEED)]
    pub(crate) seed: u64,
    /// Seed of the choice of items and of Poisson arrivals, so that a run can be repeated.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub(crate) choice_seed: u64,
    /// Also measure this process's CPU (the daemon's, on this machine).
    #[arg(long, value_name = "PID")]
    pub(crate) server_pid: Option<u32>,

    /// Open loop: start this many requests per second, whether or not earlier ones have finished.
    #[arg(long, value_name = "N", value_parser = parse_rate, allow_negative_numbers = true, help_heading = "Open loop")]
    pub(crate) rate: Option<f64>,
    /// Open loop at a rate that goes from FROM to TO requests a second while it is measured.
    #[arg(long, value_name = "FROM:TO", value_parser = parse_ramp, conflicts_with = "requests",
          help_heading = "Open loop")]
    pub(crate) ramp: Option<Ramp>,
    /// How an open loop's requests are spaced.
    #[arg(long, value_enum, default_value_t = Arrivals::Constant, requires = "open", help_heading = "Open loop")]
    pub(crate) arrivals: Arrivals,
    /// Raise the rate, starting at --rate, until the objective fails, and report the highest rate that held.
    #[arg(long, requires = "rate", requires = "objective", conflicts_with_all = ["requests", "csv"],
          help_heading = "Open loop")]
    pub(crate) step_to_knee: bool,
    /// What a rate must hold with --step-to-knee: p99=5ms.
    #[arg(long, value_name = "METRIC=VALUE", value_parser = Requirement::parse_objective, requires = "step_to_knee",
          help_heading = "Open loop")]
    pub(crate) objective: Vec<Requirement>,

    /// Fail with exit code 3 unless this holds: p99<5ms, errors<0.1%, reads_per_second>80000.
    #[arg(long, value_name = "CONDITION", value_parser = Requirement::parse, help_heading = "Results")]
    pub(crate) require: Vec<Requirement>,
    /// Write the latencies' distribution as HdrHistogram's text, in milliseconds.
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) hgrm: Option<PathBuf>,
    /// Write one line per interval: rates, latencies, errors, requests in flight.
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) csv: Option<PathBuf>,
    /// How often --csv and the line on the terminal are written.
    #[arg(long, value_name = "S", value_parser = parse_interval, default_value = "1", help_heading = "Results")]
    pub(crate) interval: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Merge {
    /// What `load --json` printed, of runs that drove one daemon at the same time.
    #[arg(required = true, value_name = "RESULT")]
    pub(crate) results: Vec<PathBuf>,
    /// As for `load`.
    #[arg(long, value_name = "CONDITION", value_parser = Requirement::parse)]
    pub(crate) require: Vec<Requirement>,
    /// As for `load`.
    #[arg(long, value_name = "FILE")]
    pub(crate) hgrm: Option<PathBuf>,
}

impl Load {
    /// Number of connections: as requested, or the transport's default.
    pub(crate) fn connections(&self) -> u32 {
        let default = match self.transport {
            TransportArg::Grpc | TransportArg::Stream => 1,
            TransportArg::Http => self.outstanding,
        };
        self.connections.unwrap_or(default)
    }

    /// The rate at the start and at the end of the window, for an open loop.
    pub(crate) fn rates(&self) -> Option<Ramp> {
        self.ramp.or(self.rate.map(Ramp::constant))
    }
}

/// Datasets and their shares of the requests, each above 0.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mix(pub(crate) Vec<(String, f64)>);

/// Reads per request, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) min: u32,
    pub(crate) max: u32,
}

impl Batch {
    pub(crate) fn new(min: u32, max: u32) -> Self {
        Self { min, max }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PatternArg {
    Uniform,
    Sequential,
    /// Theta, between 0 and 1, exclusive.
    Zipfian(f64),
    /// A fraction of the items and their share of the reads, both between 0 and 1, exclusive.
    Hotspot(f64, f64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TransportArg {
    Grpc,
    Stream,
    Http,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScoreAt {
    Daemon,
    Client,
}

impl std::fmt::Display for TransportArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(
            self.to_possible_value()
                .as_ref()
                .map_or("", |value| value.get_name()),
        )
    }
}

impl std::fmt::Display for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.min == self.max {
            write!(f, "{}", self.max)
        } else {
            write!(f, "{}..{}", self.min, self.max)
        }
    }
}

impl std::fmt::Display for PatternArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Uniform => write!(f, "uniform"),
            Self::Sequential => write!(f, "sequential"),
            Self::Zipfian(theta) => write!(f, "zipfian:{theta}"),
            Self::Hotspot(fraction, share) => write!(f, "hotspot:{fraction}:{share}"),
        }
    }
}

/// `10`, `0.5`, `10s`, `2m`.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let duration = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds)
            .map_err(|_| "use seconds, such as 10 or 0.5, or a duration, such as 2m".to_owned())?,
        Err(_) => parse_duration(text)?,
    };
    let fits = duration <= SECONDS_MAX;
    fits.then_some(duration)
        .ok_or_else(|| "use at most 10y".to_owned())
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_seconds(text)?;
    let enough = interval >= Duration::from_millis(10);
    enough
        .then_some(interval)
        .ok_or_else(|| "use at least 0.01".to_owned())
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= RATE_MAX => Ok(rate),
        _ => Err(format!("use requests a second, above 0 and at most {RATE_MAX}")),
    }
}

fn parse_ramp(text: &str) -> Result<Ramp, String> {
    let ends = || {
        let (from, to) = text.split_once(':')?;
        let (from, to) = (from.parse::<f64>().ok()?, to.parse::<f64>().ok()?);
        let good = |rate: f64| (0.0..=RATE_MAX).contains(&rate);
        (good(from) && good(to) && from + to > 0.0).then_some(Ramp { from, to })
    };
    ends().ok_or_else(|| {
        format!("use two rates in requests a second, 0 to {RATE_MAX} and not both 0: 1000:20000")
    })
}

fn parse_batch(text: &str) -> Result<Batch, String> {
    let ends = || {
        let (min, max) = text.split_once("..").unwrap_or((text, text));
        let (min, max) = (min.parse().ok()?, max.parse().ok()?);
        (1 <= min && min <= max && max <= BATCH_MAX).then_some(Batch { min, max })
    };
    ends().ok_or_else(|| format!("use 1 to {BATCH_MAX}, or a range of it: 64, 1..64"))
}

fn parse_pattern(text: &str) -> Result<PatternArg, String> {
    let part = |text: &str| text.parse::<f64>().ok().filter(|part| 0.0 < *part && *part < 1.0);
    let mut words = text.split(':');
    let pattern = match (words.next(), words.next(), words.next(), words.next()) {
        (Some("uniform"), None, None, None) => Some(PatternArg::Uniform),
        (Some("sequential"), None, None, None) => Some(PatternArg::Sequential),
        (Some("zipfian"), None, None, None) => Some(PatternArg::Zipfian(ZIPFIAN_THETA)),
        (Some("zipfian"), Some(theta), None, None) => part(theta).map(PatternArg::Zipfian),
        (Some("hotspot"), Some(fraction), Some(share), None) => {
            let parts = part(fraction).zip(part(share));
            parts.map(|(fraction, share)| PatternArg::Hotspot(fraction, share))
        }
        _ => None,
    };
    pattern.ok_or_else(|| {
        "use uniform, sequential, zipfian, zipfian:THETA or hotspot:FRACTION:SHARE, with numbers between 0 and 1"
            .to_owned()
    })
}

/// The largest share of a dataset in a mix: their sum stays a number.
const SHARE_MAX: f64 = 1e9;

fn parse_mix(text: &str) -> Result<Mix, String> {
    let mut parts: Vec<(String, f64)> = Vec::new();
    for part in text.split(',') {
        let (name, share) = part
            .split_once('=')
            .ok_or_else(|| format!("{part:?} is not NAME=SHARE; use blocks=0.7,vectors=0.3"))?;
        let share = share
            .parse::<f64>()
            .ok()
            .filter(|share| *share > 0.0 && *share <= SHARE_MAX);
        let share = share
            .ok_or_else(|| format!("the share of {name:?} is not a number above 0, at most {SHARE_MAX}"))?;
        if name.is_empty() || parts.iter().any(|(other, _)| other == name) {
            return Err(format!("the dataset {name:?} is empty or named twice"));
        }
        parts.push((name.to_owned(), share));
    }
    Ok(Mix(parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_take_numbers_and_units() {
        for (text, ms) in [
            ("10", 10_000),
            ("0.5", 500),
            ("2m", 120_000),
            ("10y", 315_576_000_000),
        ] {
            assert_eq!(parse_seconds(text), Ok(Duration::from_millis(ms)));
        }
        for wrong in ["-1", "soon", "", "NaN", "1e19", "11y"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
        assert!(parse_interval("0.001").is_err());
    }

    /// Which of these words, separated by spaces, are accepted.
    fn accepted<T>(parse: impl Fn(&str) -> Result<T, String>, words: &str) -> Vec<&str> {
        words.split(' ').filter(|word| parse(word).is_ok()).collect()
    }

    #[test]
    fn words_become_values_or_say_what_is_allowed() {
        let nothing: &[&str] = &[];
        assert_eq!(parse_rate("2.5"), Ok(2.5));
        assert_eq!(accepted(parse_rate, "0 -1 NaN inf 1e9 many"), nothing);
        assert_eq!(
            parse_ramp("0:5e3").map(|ramp| (ramp.from, ramp.to)),
            Ok((0.0, 5000.0))
        );
        assert_eq!(accepted(parse_ramp, " 5 5: 0:0 -1:5 NaN:5 1:2:3"), nothing);
        assert_eq!(parse_batch("64"), Ok(Batch::new(64, 64)));
        assert_eq!(parse_batch("1..64"), Ok(Batch::new(1, 64)));
        assert_eq!(
            accepted(parse_batch, " 0 0..4 5..4 1..65537 1...4 1.. -1"),
            nothing
        );
        assert_eq!(parse_pattern("zipfian"), Ok(PatternArg::Zipfian(0.99)));
        assert_eq!(parse_pattern("zipfian:0.5"), Ok(PatternArg::Zipfian(0.5)));
        assert_eq!(
            parse_pattern("hotspot:0.1:0.9"),
            Ok(PatternArg::Hotspot(0.1, 0.9))
        );
        let wrong = " zipf zipfian:1 zipfian:0 hotspot hotspot:0.1 hotspot:2:0.5 uniform:1";
        assert_eq!(accepted(parse_pattern, wrong), nothing);
        assert_eq!(
            parse_mix("a=0.7,b=3"),
            Ok(Mix(vec![("a".into(), 0.7), ("b".into(), 3.0)]))
        );
        assert_eq!(
            accepted(parse_mix, " a a= a=0 a=-1 =1 a=1,a=2 a=1, a=NaN a=1e308"),
            nothing
        );
    }
}
