//! How a command ends: its message on stderr, and the exit code.

use crate::connect::{known_remedy, remedy};
use crate::table::printable;
use ringfetch_client::{Code, Error};
use std::io::{self, Write as _};
use std::process::ExitCode;

/// The exit codes, for the manual.
pub(crate) const EXIT_STATUS: &[(&str, &str)] = &[
    ("0", "Done."),
    (
        "1",
        "It was tried and failed; or, in load, requests or items failed and no --require of errors allows that.",
    ),
    ("2", "Wrong usage: the arguments make no sense."),
    (
        "3",
        "It was done and measured, and a condition of the caller (load --require) was not met.",
    ),
];

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The arguments are invalid: exit code 2.
    Usage(String),
    /// It was tried and failed: exit code 1.
    Failed(String),
    /// It completed, but a `--require` condition was not met: exit code 3.
    Condition(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::from(io::Error::from(error))
    }
}

impl Failure {
    /// A failed call to the server at `url`, given by the flag `--{flag}`.
    pub(crate) fn call(error: &Error, flag: &str, url: &str) -> Self {
        match error {
            Error::Transport { message, .. } => Self::Failed(format!(
                "cannot reach {url} ({message}); {}",
                remedy(message, flag, url)
            )),
            Error::Status(status) if status.code == Code::Unimplemented && status.message.is_empty() => {
                Self::Failed(format!(
                    "UNIMPLEMENTED: {url} serves something else; is it the daemon's {flag} address (--{flag})?"
                ))
            }
            Error::Status(status) if status.code == Code::Unimplemented => {
                Self::Failed(format!("{error} (--{flag})"))
            }
            Error::Status(status) if status.code == Code::Unauthenticated => {
                Self::Failed(format!("{error} (--token-file)"))
            }
            Error::DeadlineExceeded => {
                let remedy = format!("raise it, send less at once, or name another address: --{flag}");
                Self::Failed(format!("no answer from {url} within --timeout; {remedy}"))
            }
            Error::Invalid {
                field: "url",
                problem,
                ..
            } => Self::Usage(format!("--{flag}: {problem}")),
            Error::Invalid {
                field: "tls",
                problem,
                ..
            } => Self::Failed(format!("--ca: {problem}")),
            Error::Status(_)
            | Error::Protocol { .. }
            | Error::StreamBroken { .. }
            | Error::VersionLost { .. }
            | Error::Invalid { .. }
            | _ => Self::Failed(error.to_string()),
        }
    }

    /// A failed call to the admin address `url` that changes something: without an answer, it may have done so. `look`
    /// says how to see that.
    pub(crate) fn change(error: &Error, url: &str, look: &str) -> Self {
        let problem = match error {
            // A known cause kept the request from the daemon.
            Error::Transport {
                message, sent: true, ..
            } if known_remedy(message).is_none() => {
                format!("the connection to {url} ended before the answer ({message})")
            }
            Error::DeadlineExceeded => "no answer within --timeout".to_owned(),
            Error::Transport { .. }
            | Error::Status(_)
            | Error::Protocol { .. }
            | Error::StreamBroken { .. }
            | Error::VersionLost { .. }
            | Error::Invalid { .. }
            | _ => return Self::call(error, "admin", url),
        };
        Self::Failed(format!("{problem}: it may have been done; {look}"))
    }
}

/// Prints a failure on stderr, in one line, and returns the exit code.
pub(crate) fn report(outcome: Result<(), Failure>) -> ExitCode {
    let (message, code) = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Failed(message)) => (message, 1),
        Err(Failure::Usage(message)) => (message, 2),
        Err(Failure::Condition(message)) => (message, 3),
    };
    // A stderr that cannot be written does not change how the command ended.
    let _ = writeln!(
        io::stderr(),
        "ringfetch: {}",
        printable(&message.replace('\n', "; "))
    );
    ExitCode::from(code)
}
