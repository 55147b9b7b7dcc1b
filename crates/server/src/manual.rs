//! Manual pages and shell completions, generated from the definition of the command line. Sections that it
//! does not have (signals, files) are here. Nothing generated is checked in.

use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::Shell;
use ringfetch_command::manual::{Manual, Section};

use crate::cli::{Cli, EXIT_CODES};

/// Additional sections of the daemon's page, after the exit codes.
const SECTIONS: [Section<'_>; 3] = [
    (
        "SIGNALS",
        &[
            (
                "SIGTERM, SIGINT",
                "Drains: not ready at once; after shutdown.lame_duck_ms refuses new requests, and gives those in flight shutdown.drain_timeout_ms. A second signal exits at once.",
            ),
            (
                "SIGHUP",
                "Reloads the configuration: applies what can change while serving and logs what needs a restart. If there is a mistake, nothing changes.",
            ),
        ],
    ),
    (
        "ENVIRONMENT",
        &[
            (
                "RINGFETCH__SECTION__KEY",
                "Sets a key of the configuration: RINGFETCH__ENGINE__BACKEND is engine.backend.",
            ),
            (
                "NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID",
                "Notifications to a service manager of start, reload, stop and liveness, as in sd_notify(3).",
            ),
        ],
    ),
    (
        "FILES",
        &[(
            "/etc/ringfetch/ringfetchd.yaml",
            "The configuration, where the systemd unit and the image look for it.",
        )],
    ),
];

/// The completions for a shell, to be sourced by it.
pub(crate) fn completions(shell: Shell) -> String {
    let script = ringfetch_command::manual::completions(&mut Cli::command(), shell);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes a page for the daemon and for each of its commands into a directory, creating it.
///
/// # Errors
/// The directory or a file cannot be written.
pub(crate) fn write_pages(directory: &Path) -> anyhow::Result<()> {
    let codes: Vec<(&str, &str)> = EXIT_CODES
        .lines()
        .skip(1)
        .filter_map(|line| line.trim().split_once(' '))
        .map(|(code, text)| (code, text.trim_start()))
        .collect();
    let mut more: Vec<Section<'_>> = vec![("EXIT STATUS", &codes)];
    more.extend(SECTIONS);
    let manual = Manual {
        // Daemons' pages are in section 8.
        section: "8",
        more: &more,
        see_also: &[("ringfetch", "1"), ("systemd.service", "5")],
    };
    // The exit codes have their own section.
    manual.write(Cli::command().after_help(None::<&str>), directory)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_page_has_its_sections() {
        // Scenario: the pages. Expectation: the daemon's has its commands, exit codes, signals and variables.
        let pages = tempfile::tempdir().expect("a directory");
        write_pages(pages.path()).expect("pages");
        let main = std::fs::read_to_string(pages.path().join("ringfetchd.8")).expect("its page");
        for part in [
            "EXIT STATUS",
            "\\fB130\\fR",
            "SIGHUP",
            "NOTIFY_SOCKET",
            "check\\-config",
        ] {
            assert!(main.contains(part), "{part} is not in:\n{main}");
        }
    }

    #[test]
    fn every_shell_gets_a_script_that_knows_the_commands() {
        // Scenario: completions for every supported shell. Expectation: a script that names a command and a
        // flag.
        for shell in [
            Shell::Bash,
            Shell::Elvish,
            Shell::Fish,
            Shell::PowerShell,
            Shell::Zsh,
        ] {
            let script = completions(shell);
            for word in ["ringfetchd", "check-config", "grpc-listen"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
