//! The command line: flags to configuration inputs. A flag that sets a key is only a name for that key; the configuration
//! checks its value.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, PathBufValueParser, TypedValueParser as _};
use clap::error::{ContextKind, ContextValue};
use clap::{Error, Parser, Subcommand};
use clap_complete::Shell;
use ringfetch_server::config::{Base, Flag, Inputs};
use ringfetch_server::demo;

/// A heading, then one line per code.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
    0  drained after SIGTERM or SIGINT; or the command succeeded
    1  failed at run time, or the drain aborted requests; not ready (healthcheck)
    2  a mistake in the configuration, the command line, or a dataset: no port was bound; fix it before starting again
    3  this host refuses what the configuration asks for: a port, io_uring with on_unavailable: fail, memory, threads, descriptors;
       or what may pass: a file of tls or access.principals is missing, empty or being written, a certificate not valid yet
  130  a second signal ended the drain";

/// Serves random reads - blocks, vectors, byte ranges, objects - over gRPC and HTTP.
///
/// Without a configuration it creates demo data and serves that. Flags override the environment
/// (RINGFETCH__ENGINE__BACKEND is engine.backend), which overrides the file.
#[derive(Debug, Parser)]
#[command(name = "ringfetchd", version, max_term_width = 110, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// Configuration file; config/ringfetchd.yaml documents every key.
    // An empty one is refused as every key without a value is, with a text that names the variable: the demo in place of
    // the data would look healthy.
    #[arg(long, short, value_name = "FILE", env = "RINGFETCH_CONFIG", global = true,
          value_parser = OsStringValueParser::new().map(PathBuf::from))]
    config: Option<PathBuf>,
    /// Sets any key outside `datasets`, such as engine.uring.queue_depth=64. Repeatable.
    #[arg(long, value_name = "KEY=VALUE", global = true)]
    set: Vec<String>,
    /// engine.backend: uring, mmap, auto or pread. This and the next three override --set.
    #[arg(long, global = true)]
    backend: Option<String>,
    /// grpc.listen, such as 127.0.0.1:7410; port 0 is any free one.
    #[arg(long, value_name = "ADDRESS", global = true)]
    grpc_listen: Option<String>,
    /// http.listen.
    #[arg(long, value_name = "ADDRESS", global = true)]
    http_listen: Option<String>,
    /// log.filter, such as debug or info,ringfetch_engine=debug.
    #[arg(long, value_name = "FILTER", global = true)]
    log: Option<String>,
    /// Directory of the demo's data, created if it is missing.
    // Its datasets' paths are part of a configuration, which is text.
    #[arg(long, value_name = "DIRECTORY", default_value = demo::DIRECTORY_DEFAULT, global = true,
          value_parser = PathBufValueParser::new().try_map(utf8))]
    pub(crate) demo_dir: PathBuf,
    /// Once ready, write the real listen addresses here as JSON.
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) addresses_file: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Command {
    /// Serves until SIGTERM or SIGINT. The default.
    Run,
    /// Reports every mistake in the configuration; exits 2 if there are any.
    CheckConfig {
        /// Open the files too, and compare with this host: memory, backends.
        #[arg(long)]
        open: bool,
    },
    /// Prints the configuration that a start would use now, with the source of each value.
    PrintConfig,
    /// Checks the daemon's /readyz; exits with 0 if it is ready, otherwise 1.
    Healthcheck,
    /// Creates the demo data in --demo-dir unless it exists, and exits.
    MakeDemo,
    /// Prints completions for a shell, to be sourced by it.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Writes the manual pages into a directory.
    Man {
        /// Directory to write to; created if it is missing.
        directory: PathBuf,
    },
}

impl Cli {
    /// The arguments. A file in the place of a command, as other daemons take it, is refused with a tip.
    pub(crate) fn of(
        arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, Error> {
        Self::try_parse_from(arguments).map_err(|mut error| {
            if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand)
                && Path::new(word).is_file()
            {
                let tip = format!("to serve what this file configures: --config {word}");
                error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
            }
            error
        })
    }

    /// The inputs of the configuration, including this process's environment.
    pub(crate) fn inputs(&self) -> Inputs {
        let mut flags: Vec<Flag> = self.set.iter().map(|setting| set(setting)).collect();
        for (name, key, value) in [
            ("--backend", "engine.backend", &self.backend),
            ("--grpc-listen", "grpc.listen", &self.grpc_listen),
            ("--http-listen", "http.listen", &self.http_listen),
            ("--log", "log.filter", &self.log),
        ] {
            if let Some(value) = value {
                flags.push(Flag {
                    name: name.to_owned(),
                    key: key.to_owned(),
                    value: value.clone(),
                });
            }
        }
        let base = match &self.config {
            Some(path) => Base::File(path.clone()),
            None => Base::Demo(self.demo_dir.clone()),
        };
        Inputs {
            base,
            environment: std::env::vars_os().collect(),
            flags,
        }
    }
}

/// Splits `KEY=VALUE`. Without `=` the value is empty, which the configuration reports.
fn set(setting: &str) -> Flag {
    let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
    Flag {
        name: format!("--set {key}"),
        key: key.to_owned(),
        value: value.to_owned(),
    }
}

fn utf8(path: PathBuf) -> Result<PathBuf, &'static str> {
    match path.to_str() {
        Some(_) => Ok(path),
        None => Err("it is not UTF-8, as a configuration is; choose another path"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_the_place_of_a_command_is_told_its_flag() {
        // Scenario: a file instead of a command, and a word that is neither. Expectation: both are refused, with the flag for the
        // first.
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        for (word, has_tip) in [(file, true), ("servee", false)] {
            let error = Cli::of(["ringfetchd", word]).unwrap_err().to_string();
            assert_eq!(error.contains(&format!("--config {word}")), has_tip, "{error}");
        }
    }
}
