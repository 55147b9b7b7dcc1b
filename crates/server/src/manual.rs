//! Manual pages and shell completions, generated from the definition of the command line. Sections that it lacks (signals,
//! files) are here. Nothing generated is checked in.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::cli::{Cli, EXIT_CODES};

const NAME: &str = "ringfetchd";
/// Daemons' pages are in section 8.
const SECTION: &str = "8";

/// Additional sections of the daemon's page: heading, then (term, text).
const SECTIONS: [(&str, &[(&str, &str)]); 3] = [
    (
        "SIGNALS",
        &[
            (
                "SIGTERM, SIGINT",
                "Drain: not ready, no new work, shutdown.drain_timeout_ms for what is in flight. A second one ends it at once.",
            ),
            (
                "SIGHUP",
                "Read the configuration again: applies what can change while serving, logs what needs a restart; a mistake changes nothing.",
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
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), NAME, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes a page for the daemon and for each of its commands into a directory, creating it.
///
/// # Errors
/// The directory or a file cannot be written.
pub(crate) fn write_pages(directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let mut command = Cli::command()
        .disable_help_subcommand(true)
        // The exit codes: here they have a section of their own.
        .after_help(None::<&str>);
    command.build();
    let version = command.get_version().unwrap_or_default().to_owned();
    let write = |command: clap::Command, main: bool| -> anyhow::Result<()> {
        let man = Man::new(command)
            .section(SECTION)
            .source(format!("{NAME} {version}"))
            .manual("Ringfetch");
        let path = directory.join(man.get_filename());
        let mut page = Vec::new();
        man.render(&mut page)?;
        if main {
            more().to_writer(&mut page)?;
        }
        File::create(&path)
            .and_then(|mut file| file.write_all(&page))
            .with_context(|| path.display().to_string())
    };
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        write(subcommand.clone(), false)?;
    }
    write(command, true)
}

fn more() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for line in EXIT_CODES.lines().skip(1) {
        if let Some((code, text)) = line.trim_start().split_once(' ') {
            roff.control("TP", []);
            roff.text([bold(code)]);
            roff.text([roman(text.trim_start())]);
        }
    }
    for (heading, entries) in SECTIONS {
        roff.control("SH", [heading]);
        for (term, text) in entries {
            roff.control("TP", []);
            roff.text([bold(*term)]);
            roff.text([roman(*text)]);
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text([
        bold("ringfetch"),
        roman("(1), "),
        bold("systemd.service"),
        roman("(5)"),
    ]);
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_its_page() {
        // Scenario: the pages, written to a directory that is not there yet. Expectation: one for the daemon, with its exit
        // codes and signals, and one for each command; each names its section and the version.
        let directory = tempfile::tempdir().expect("a directory");
        let pages = directory.path().join("share/man8");
        write_pages(&pages).expect("pages");
        let text = |name: &str| std::fs::read_to_string(pages.join(name)).expect(name);
        for command in Cli::command().get_subcommands() {
            let page = text(&format!("{NAME}-{}.{SECTION}", command.get_name()));
            let title = format!(".TH {NAME}\\-{}", command.get_name().replace('-', "\\-"));
            assert!(
                page.replace("\\-", "-").contains(&title.replace("\\-", "-")),
                "{page}"
            );
            assert!(page.contains(env!("CARGO_PKG_VERSION")), "{page}");
        }
        let main = text("ringfetchd.8");
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
        // Scenario: completions for every shell there is. Expectation: a script that names a command and a flag.
        for shell in [
            Shell::Bash,
            Shell::Elvish,
            Shell::Fish,
            Shell::PowerShell,
            Shell::Zsh,
        ] {
            let script = completions(shell);
            for word in [NAME, "check-config", "grpc-listen"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
