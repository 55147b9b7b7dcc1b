//! `slowdisk`: mounts a slow, faulty disk and keeps it until it is interrupted or told to quit.
//!
//! Writes one JSON object per line to stdout: first that it is mounted and with which parameters, then an
//! answer to each command from stdin, at the end the parameters and counts.
#![forbid(unsafe_code)]

use anyhow::{Context as _, bail};
use clap::Parser;
use serde_json::{Value, json};
use slowdisk::{Parameters, SlowDisk};
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Most commands that may wait; a faster writer blocks.
const COMMANDS_WAITING_MAX: usize = 16;

/// Shows a file or directory as a slow, faulty, counting disk (FUSE, read-only) until Ctrl-C, SIGTERM or `quit`.
///
/// Commands on stdin, one a line; each is answered by one line of JSON:
///   set KEY VALUE    change a parameter: latency TIME, jitter TIME (mean of an exponential distribution, at most ten
///                    times that), concurrency READS, error-ranges OFFSET+LENGTH,... (bytes of which each read fails
///                    with EIO), error-probability P, short-probability P (direct reads that return half),
///                    loses-replaced true|false (reads of an open file that was replaced or removed fail with ESTALE),
///                    names-errno ERRNO (of look-ups and opens; 0: none), generation NUMBER (another one: all that
///                    is open is lost)
///   hold             answer no read; reads still arrive and are counted
///   release          end a hold
///   report           parameters and counts
///   reset            set the counts to zero
///   records          the first million reads answered: offset, length, outcome
///   quit             unmount and end
#[derive(Parser)]
#[command(name = "slowdisk", version, verbatim_doc_comment)]
struct Arguments {
    /// A file, or a directory and what is below it. Keep it in the page cache: its own time is added to the latency.
    source: PathBuf,
    /// Where to mount; created if it is missing, and then removed at the end.
    mountpoint: PathBuf,
    /// Time each read is in service: 2ms, 150us.
    #[arg(long, value_name = "TIME")]
    latency: Option<String>,
    /// Most reads in service at a time, 1 to 65535; further ones wait.
    #[arg(long, value_name = "READS")]
    concurrency: Option<String>,
    /// End when stdin ends: for programs that start this one.
    #[arg(long)]
    until_eof: bool,
}

impl Arguments {
    fn parameters(&self) -> Result<Parameters, slowdisk::Error> {
        let mut parameters = Parameters::default();
        let given = [("latency", &self.latency), ("concurrency", &self.concurrency)];
        for (key, value) in given {
            if let Some(value) = value {
                parameters.assign(key, value)?;
            }
        }
        Ok(parameters)
    }
}

fn say(line: &Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .context("stdout")
}

fn report(disk: &SlowDisk) -> Value {
    json!({"parameters": disk.parameters(), "reads": disk.reads()})
}

/// Runs one command. `None`: quit.
fn command(disk: &SlowDisk, line: &str) -> Option<Value> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let done = json!({"ok": true});
    let answer = match words[..] {
        ["quit"] => return None,
        ["hold"] => {
            disk.hold();
            done
        }
        ["release"] => {
            disk.release();
            done
        }
        ["reset"] => {
            disk.reset();
            done
        }
        ["report"] => report(disk),
        ["records"] => json!(disk.records()),
        ["set", key, value] => {
            let set = disk.set(|parameters| parameters.assign(key, value));
            match set.and_then(|assigned| assigned) {
                Ok(()) => json!({"ok": true, "parameters": disk.parameters()}),
                Err(error) => json!({"ok": false, "error": error.to_string()}),
            }
        }
        _ => {
            json!({"ok": false, "error": "use set KEY VALUE, hold, release, report, reset, records or quit"})
        }
    };
    Some(answer)
}

async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let parameters = arguments.parameters()?;
    let mut terminated = signal(SignalKind::terminate()).context("signals")?;
    let mut interrupted = signal(SignalKind::interrupt()).context("signals")?;
    let disk = SlowDisk::mount(&arguments.source, &arguments.mountpoint, &parameters)?;
    say(&json!({"mounted": disk.path(), "parameters": disk.parameters()}))?;

    let (sender, mut commands) = mpsc::channel(COMMANDS_WAITING_MAX);
    // A separate thread: reading stdin cannot be cancelled, and must not keep the process from ending.
    std::thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                if sender.blocking_send(line).is_err() {
                    return;
                }
            }
        })?;
    let mut reads_commands = true;
    loop {
        tokio::select! {
            _ = terminated.recv() => break,
            _ = interrupted.recv() => break,
            line = commands.recv(), if reads_commands => match line {
                Some(line) => match command(&disk, &line) {
                    Some(answer) => say(&answer)?,
                    None => break,
                },
                None if arguments.until_eof => break,
                None => reads_commands = false,
            },
        }
    }
    let last = report(&disk);
    drop(disk);
    say(&last)
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if arguments.source == arguments.mountpoint {
        bail!("source and mount point are the same");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    runtime.block_on(run(arguments))
}
