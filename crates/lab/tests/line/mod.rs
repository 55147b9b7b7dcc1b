//! Runs a study from command-line words.

use clap::Parser as _;
use ringfetch_lab::{Clients, Context, Lab, LabError};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    lab: Lab,
}

/// Next to the test binary: temporary directories are often in memory.
pub(crate) fn scratch() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

/// What a command prints; as JSON if its words begin with --json.
pub(crate) fn run(words: &str, directory: &Path, stopped: bool) -> Result<String, LabError> {
    let mut out = Vec::new();
    run_into(&mut out, words, directory, stopped)?;
    Ok(String::from_utf8(out).unwrap())
}

/// The same, to see what a command prints that fails.
pub(crate) fn run_into(
    out: &mut Vec<u8>,
    words: &str,
    directory: &Path,
    stopped: bool,
) -> Result<(), LabError> {
    let at = directory.display().to_string();
    let (json, words) = match words.strip_prefix("--json ") {
        Some(words) => (true, words),
        None => (false, words),
    };
    let line = words
        .split_ascii_whitespace()
        .map(|word| word.replace("DIR", &at));
    let line = Line::parse_from(std::iter::once("lab".to_owned()).chain(line));
    let context = Context {
        stop: Arc::new(AtomicBool::new(stopped)),
        json,
        clients: Clients::default(),
        admin: "http://127.0.0.1:1".to_owned(),
        command_line: words.to_owned(),
    };
    ringfetch_lab::run(&line.lab, &context, out)
}
