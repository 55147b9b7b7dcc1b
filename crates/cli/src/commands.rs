//! The command line: every command by its name.

use crate::args::{DatasetCommand, Get, Global};
use crate::backend;
use crate::doctor::Doctor;
use crate::load::args::{Load, Merge};
use crate::score::Score;
use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{Arg, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;
use ringfetch_command::arguments;
use std::path::PathBuf;

/// Fetch, inspect, generate and verify data, and drive load.
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

impl Cli {
    /// The arguments of this process; if they are wrong, it ends. A variable that is empty is as good as none, as in
    /// most programs: `RINGFETCH_CA= ringfetch ...` is how a shell leaves one out.
    pub(crate) fn of_process() -> Self {
        let matches = without_empty_variables(Self::command()).try_get_matches();
        let parsed = matches.and_then(|matches| {
            let mut cli = Self::from_arg_matches(&matches)?;
            let source = matches.value_source("timeout");
            cli.global.is_default_timeout = source == Some(ValueSource::DefaultValue);
            Ok(cli)
        });
        parsed.unwrap_or_else(|error| arguments::exit("ringfetch", &error))
    }
}

fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |arg: &Arg| {
        let value = arg.get_env().and_then(std::env::var_os);
        value.is_some_and(|value| value.is_empty())
    };
    let command = command.mut_args(|arg| match is_empty(&arg) {
        true => arg.env(Resettable::Reset),
        false => arg,
    });
    command.mut_subcommands(without_empty_variables)
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Fetch blocks, vectors, a byte range or an object.
    #[command(subcommand)]
    Get(Get),
    /// Rank vectors by their nearness to a query, without fetching them.
    Score(Score),
    /// List what the daemon serves.
    Datasets,
    /// Show the daemon's state: backend and why, memory, rates, shards.
    Status,
    /// Show which backend reads each dataset and why, or switch it while the daemon serves.
    #[command(args_conflicts_with_subcommands = true)]
    Backend(backend::Args),
    /// Make the daemon read its configuration file again, as SIGHUP does.
    Reload,
    /// Replace the daemon's log filter until its next reload or restart.
    LogLevel {
        /// A tracing filter: `info`, or `info,ringfetch_engine=debug`.
        filter: String,
    },
    /// Make or verify pattern data.
    #[command(subcommand)]
    Dataset(DatasetCommand),
    /// Drive load, closed loop or at a rate, and measure it.
    Load(Box<Load>),
    /// Merge the results of several `load --json` into one report.
    LoadMerge(Merge),
    /// Show what this host, and the device beneath each path, can do for the daemon, and why not.
    Doctor(Doctor),
    /// Measure a file or device through the engine, and print the settings that suit it.
    Calibrate(ringfetch_lab::Calibrate),
    /// Run a study of a device and of the ways to read it, and compare it with published figures.
    Lab(Box<ringfetch_lab::Lab>),
    /// Print completions for the shell to source.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Write the manual pages into a directory.
    Man {
        /// Where to; made if it is not there.
        directory: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        // Scenario: clap's own check of the definition (clashing names, impossible defaults).
        // Expected: no complaint.
        Cli::command().debug_assert();
    }
}
