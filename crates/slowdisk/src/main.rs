//! `slowdisk`: mounts a slow, faulty disk and keeps it until it is interrupted or told to quit.
//!
//! Writes one JSON object per line to stdout: first that it is mounted and with which parameters, then an
//! answer to each command from stdin, at the end the parameters and counts.
#![forbid(unsafe_code)]

use anyhow::{Context as _, bail};
use clap::Parser;
use serde_json::{Value, json};
use slowdisk::{Options, Parameters, SlowDisk};
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Most commands that may wait; a faster writer blocks.
const COMMANDS_WAITING_MAX: usize = 16;

/// Shows a file or directory as a slow, faulty, counting disk (FUSE, read-only) until Ctrl-C, SIGTERM or `quit`.
///
/// Commands on stdin, one a line; each is answered by one line of JSON:
///   set KEY VALUE    change a parameter; keys are the options below without their dashes
///   hold             answer no read; reads still arrive and are counted
///   release          end a hold
///   report           parameters and counts
///   reset            set the counts to zero
///   records          every read answered so far: offset, length, outcome
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
    /// Added to the latency: none, uniform:TIME (0 to TIME), exponential:TIME (mean TIME, at most ten times that).
    #[arg(long, value_name = "JITTER")]
    jitter: Option<String>,
    /// Most reads in service at a time, 1 to 65535; further ones wait.
    #[arg(long, value_name = "READS")]
    concurrency: Option<String>,
    /// Bytes a second of all reads together; 0: unlimited.
    #[arg(long, value_name = "BYTES")]
    bandwidth: Option<String>,
    /// Reads that touch these bytes of a file fail with EIO: OFFSET+LENGTH, with commas between.
    #[arg(long, value_name = "RANGES")]
    error_ranges: Option<String>,
    /// Every n-th read fails with EIO.
    #[arg(long, value_name = "N")]
    error_every: Option<String>,
    /// Each read fails with EIO with this probability.
    #[arg(long, value_name = "P")]
    error_probability: Option<String>,
    /// Every n-th direct read returns half of the requested bytes.
    #[arg(long, value_name = "N")]
    short_every: Option<String>,
    /// Each direct read is short with this probability.
    #[arg(long, value_name = "P")]
    short_probability: Option<String>,
    /// Seed of jitter and probabilities.
    #[arg(long, value_name = "SEED")]
    seed: Option<String>,
    /// Make every read go past the page cache, not only those with O_DIRECT.
    #[arg(long)]
    bypass_cache: bool,
    /// End when stdin ends: for programs that start this one.
    #[arg(long)]
    until_eof: bool,
}

impl Arguments {
    fn parameters(&self) -> Result<Parameters, slowdisk::Error> {
        let mut parameters = Parameters::default();
        let given = [
            ("latency", &self.latency),
            ("jitter", &self.jitter),
            ("concurrency", &self.concurrency),
            ("bandwidth", &self.bandwidth),
            ("error-ranges", &self.error_ranges),
            ("error-every", &self.error_every),
            ("error-probability", &self.error_probability),
            ("short-every", &self.short_every),
            ("short-probability", &self.short_probability),
            ("seed", &self.seed),
        ];
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
        ["report"] => json!(disk.report()),
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
    let options = Options::new(&arguments.source, &arguments.mountpoint);
    let disk = SlowDisk::mount(
        options
            .parameters(parameters)
            .bypass_cache(arguments.bypass_cache),
    )?;
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
    let report = disk.report();
    drop(disk);
    say(&json!({"unmounted": true, "parameters": report.parameters, "reads": report.reads}))
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
