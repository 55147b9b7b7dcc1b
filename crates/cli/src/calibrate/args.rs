//! The line of `ringfetch calibrate` as a type.

use crate::load::args::parse_seconds;
use crate::quantity::parse_size;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// The shortest budget: below it no step would be longer than its own start and end.
const SECONDS_MIN: u64 = 3;
/// What `--quick` takes.
const QUICK_SECONDS: u64 = 15;
/// A budget of at least so much is spent on more rounds, a smaller one on longer steps.
const MORE_ROUNDS_SECONDS: u64 = 30;

#[derive(Debug, Args)]
pub(crate) struct Calibrate {
    /// A file or a block device of those that are to be served. It is only read.
    pub(crate) path: PathBuf,
    /// How long to measure, in all; at least 3 s.
    #[arg(long, value_name = "S", value_parser = parse_budget, default_value = "60")]
    pub(crate) seconds: Duration,
    /// 15 s and fewer rounds: for a first look.
    #[arg(long, conflicts_with = "seconds")]
    pub(crate) quick: bool,
    /// Bytes of a read, 512B to 1MiB: those of the dataset's blocks or vectors.
    #[arg(long, value_name = "SIZE", value_parser = parse_block, default_value = "4KiB")]
    pub(crate) block_bytes: u32,
    /// Write the YAML section to this file instead of stdout.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Draw reads/s and latency against depth into this file (SVG).
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Replace what --out and --plot name.
    #[arg(long)]
    pub(crate) force: bool,
}

/// How often each thing is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rounds {
    /// Passes over the depths and the numbers of threads.
    pub(super) passes: u32,
    /// Passes over the backends; at least three, as for pairs.
    pub(super) rankings: u32,
    /// Pairs of a comparison. At least three, or nothing would ever be beyond the noise (see `judge`).
    pub(super) pairs: u32,
}

impl Calibrate {
    /// All the time there is.
    pub(super) fn budget(&self) -> Duration {
        if self.quick {
            Duration::from_secs(QUICK_SECONDS)
        } else {
            self.seconds
        }
    }

    pub(super) fn rounds(&self) -> Rounds {
        if self.budget() < Duration::from_secs(MORE_ROUNDS_SECONDS) {
            Rounds {
                passes: 1,
                rankings: 3,
                pairs: 3,
            }
        } else {
            Rounds {
                passes: 5,
                rankings: 5,
                pairs: 7,
            }
        }
    }
}

fn parse_budget(text: &str) -> Result<Duration, String> {
    let budget = parse_seconds(text)?;
    if budget < Duration::from_secs(SECONDS_MIN) {
        return Err(format!("too short to measure anything: at least {SECONDS_MIN}"));
    }
    // The schedule's arithmetic on instants must not overflow.
    if budget > Duration::from_secs(86_400) {
        return Err("more than a day: at most 86400".to_owned());
    }
    Ok(budget)
}

fn parse_block(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    match u32::try_from(bytes) {
        Ok(bytes) if (512..=1 << 20).contains(&bytes) => Ok(bytes),
        Ok(_) | Err(_) => Err("reads of 512B to 1MiB can be calibrated".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_and_a_block_have_bounds() {
        // Scenario: budgets and blocks at their bounds and beyond.
        // Expected: accepted at the bounds, refused beyond with what would be accepted.
        assert_eq!(parse_budget("3"), Ok(Duration::from_secs(3)));
        assert_eq!(parse_budget("2m"), Ok(Duration::from_secs(120)));
        for wrong in ["0", "2.9", "86401", "soon"] {
            assert!(parse_budget(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_block("512"), Ok(512));
        assert_eq!(parse_block("1MiB"), Ok(1 << 20));
        for wrong in ["511", "2MiB", "0", "8GiB"] {
            assert!(parse_block(wrong).is_err(), "{wrong}");
        }
    }
}
