//! Manual pages and shell completions, made from the command line's own definition, so that they cannot differ from
//! it. What a definition does not tell (exit codes) is written here. Nothing generated is checked in.

use crate::commands::Cli;
use crate::outcome::Failure;
use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::io::{self, Write as _};
use std::path::Path;

const NAME: &str = "ringfetch";

const EXIT_STATUS: [(&str, &str); 4] = [
    ("0", "Done."),
    ("1", "It was tried and failed."),
    ("2", "Wrong usage: the arguments cannot be meant."),
    (
        "3",
        "It was done and measured, and a condition of the caller's (load --require) was not met.",
    ),
];

/// Prints the completions for a shell, to be sourced by it.
///
/// # Errors
/// Stdout cannot be written.
pub(crate) fn completions(shell: Shell) -> Result<(), Failure> {
    // Into memory first: the generator panics when what it writes to fails.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), NAME, &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}

/// Writes a page for the program and for each of its commands into a directory, which is made.
///
/// # Errors
/// The directory or a file cannot be written.
pub(crate) fn write_pages(directory: &Path) -> Result<(), Failure> {
    let told = |path: &Path, error: &io::Error| Failure::Failed(format!("{}: {error}", path.display()));
    std::fs::create_dir_all(directory).map_err(|error| told(directory, &error))?;
    let mut main = Cli::command().disable_help_subcommand(true);
    main.build();
    let version = main.get_version().unwrap_or_default().to_owned();
    let mut commands = vec![main];
    while let Some(command) = commands.pop() {
        let visible = |command: &&clap::Command| !command.is_hide_set();
        commands.extend(command.get_subcommands().filter(visible).cloned());
        let is_main = command.get_name() == NAME;
        let man = Man::new(command)
            .source(format!("{NAME} {version}"))
            .manual("Ringfetch");
        let mut page = Vec::new();
        man.render(&mut page)?;
        if is_main {
            more().to_writer(&mut page)?;
        }
        let path = directory.join(man.get_filename());
        std::fs::write(&path, page).map_err(|error| told(&path, &error))?;
    }
    Ok(())
}

fn more() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for (code, text) in EXIT_STATUS {
        roff.control("TP", []);
        roff.text([bold(code)]);
        roff.text([roman(text)]);
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold("ringfetchd"), roman("(8)")]);
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_its_page_however_deep() {
        // Scenario: the pages, written to a directory that is not there yet. Expectation: one for the program, with its
        // exit codes, and one for each command and each command's commands.
        let directory = tempfile::tempdir().expect("a directory");
        let pages = directory.path().join("man1");
        write_pages(&pages).expect("pages");
        let text = |name: &str| std::fs::read_to_string(pages.join(name)).expect(name);
        assert!(text("ringfetch.1").contains("EXIT STATUS"));
        for command in Cli::command().get_subcommands() {
            let name = format!("{NAME}-{}", command.get_name());
            assert!(
                text(&format!("{name}.1")).contains(env!("CARGO_PKG_VERSION")),
                "{name}"
            );
        }
        assert!(text("ringfetch-dataset-make-blocks.1").contains("Length of the file"));
    }
}
