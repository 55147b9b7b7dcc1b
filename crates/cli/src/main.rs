//! `ringfetch`: fetch, look, make and verify data, drive load, and examine a host, from the command line.
//!
//! The composition root: parses arguments, runs one command, and returns an exit code: 0 done, 1 failed, 2
//! wrong usage, 3 a condition of `--require` was not met.
//! Only the result goes to stdout; errors are one line on stderr. A daemon's data are read over the network
//! only; `doctor` and `calibrate` read files of this host.
#![forbid(unsafe_code)]

mod args;
mod backend;
mod commands;
mod daemon;
mod doctor;
mod expected;
mod format;
mod get;
mod inspect;
mod lab;
mod load;
mod make;
mod outcome;
mod progress;
mod reload;
mod score;
mod sink;
mod stop;
mod verify;

use args::DatasetCommand;
use clap::CommandFactory as _;
use commands::{Cli, Command};
use outcome::{EXIT_STATUS, Failure};
use ringfetch_command::manual::{Manual, completions};
use ringfetch_command::{connect, quantity, table};
use ringfetch_lab::LabCommand;
use sink::Sink;
use std::io::Write as _;
use std::process::ExitCode;

/// As in the daemon, since the load generator shares its machine.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const MANUAL: Manual<'_> = Manual {
    section: "1",
    more: &[("EXIT STATUS", EXIT_STATUS)],
    see_also: &[("ringfetchd", "8")],
};

fn main() -> ExitCode {
    outcome::report(run(&Cli::of_process()))
}

fn run(cli: &Cli) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let global = &cli.global;
    let ended = runtime.block_on(async {
        match &cli.command {
            Command::Get(get) => get::run(global, get).await,
            Command::Score(score) => score::run(global, score).await,
            Command::Datasets => inspect::datasets(global).await,
            Command::Status => inspect::status(global).await,
            Command::Backend(backend) => backend::run(global, backend).await,
            Command::Reload => reload::run(global).await,
            Command::LogLevel { filter } => inspect::log_level(global, filter).await,
            Command::Dataset(DatasetCommand::Make(make)) => make::run(global, make).await,
            Command::Dataset(DatasetCommand::Verify(verify)) => verify::run(global, verify).await,
            Command::Load(load) => load::run(global, load).await,
            Command::LoadMerge(merge) => load::merge(global, merge),
            Command::Doctor(doctor) => doctor::run(global, doctor),
            Command::Calibrate(args) => lab::run(global, LabCommand::Calibrate(args.clone())).await,
            Command::Lab(args) => lab::run(global, args.command.clone()).await,
            Command::Completions { shell } => {
                let mut out = Sink::open(None)?;
                out.write_all(&completions(&mut Cli::command(), *shell))?;
                out.finish()
            }
            Command::Man { directory } => Ok(MANUAL.write(Cli::command(), directory)?),
        }
    });
    // Its threads may hang in a read.
    runtime.shutdown_background();
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_has_what_the_command_line_says() {
        // Scenario: the manual. Expectation: a page for the program, with its exit codes, and one for a command, with
        // its options.
        let pages = tempfile::tempdir().unwrap();
        MANUAL.write(Cli::command(), pages.path()).unwrap();
        let text = |name: &str| std::fs::read_to_string(pages.path().join(name)).unwrap();
        assert!(text("ringfetch.1").contains("EXIT STATUS"));
        assert!(text("ringfetch-dataset-make-blocks.1").contains("Length of the file"));
    }
}
