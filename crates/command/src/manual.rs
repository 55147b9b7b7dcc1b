//! Manual pages and completions, generated from a command-line definition, so that they cannot differ from
//! it.

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::io;
use std::path::Path;

/// The manual of one program.
#[derive(Debug, Clone)]
pub struct Manual<'a> {
    /// Section of the manual: `1` for programs, `8` for daemons.
    pub section: &'a str,
    /// Sections that the definition does not contain, for the end of the program's own page.
    pub more: &'a [Section<'a>],
    /// Names of other pages and their sections.
    pub see_also: &'a [(&'a str, &'a str)],
}

/// A heading, and terms with their explanations.
pub type Section<'a> = (&'a str, &'a [(&'a str, &'a str)]);

impl Manual<'_> {
    /// Writes a page for the program and for each of its commands into a directory, creating it.
    ///
    /// # Errors
    /// The directory or a file cannot be written; the message names it.
    pub fn write(&self, command: Command, directory: &Path) -> io::Result<()> {
        let named = |path: &Path, error: &io::Error| {
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        std::fs::create_dir_all(directory).map_err(|error| named(directory, &error))?;
        let mut main = command.disable_help_subcommand(true);
        main.build();
        let name = main.get_name().to_owned();
        let source = format!("{name} {}", main.get_version().unwrap_or_default());
        let mut commands = vec![main];
        while let Some(command) = commands.pop() {
            let visible = |command: &&Command| !command.is_hide_set();
            commands.extend(command.get_subcommands().filter(visible).cloned());
            let is_main = command.get_name() == name;
            let man = Man::new(command)
                .section(self.section)
                .source(source.clone())
                .manual("Ringfetch");
            let mut page = Vec::new();
            man.render(&mut page)?;
            if is_main {
                self.end().to_writer(&mut page)?;
            }
            let path = directory.join(man.get_filename());
            std::fs::write(&path, page).map_err(|error| named(&path, &error))?;
        }
        Ok(())
    }

    fn end(&self) -> Roff {
        let mut roff = Roff::new();
        for (heading, entries) in self.more {
            roff.control("SH", [*heading]);
            for (term, text) in *entries {
                roff.control("TP", []);
                roff.text([bold(*term)]);
                roff.text([roman(*text)]);
            }
        }
        roff.control("SH", ["SEE ALSO"]);
        let mut pages = Vec::new();
        for (name, section) in self.see_also {
            let comma = if pages.is_empty() { "" } else { ", " };
            pages.extend([roman(comma), bold(*name), roman(format!("({section})"))]);
        }
        roff.text(pages);
        roff
    }
}

/// The completions for a shell, to be sourced by it.
pub fn completions(command: &mut Command, shell: Shell) -> Vec<u8> {
    let name = command.get_name().to_owned();
    // Into memory: the generator panics if writing fails.
    let mut script = Vec::new();
    clap_complete::generate(shell, command, name, &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_its_page_however_deep() {
        // Scenario: a program with a command, one below it and a hidden one, into a directory that does not
        // exist yet. Expectation: a page for each but the hidden one; only the program's ends with the extra
        // sections.
        let leaf = Command::new("leaf").about("Deep down");
        let program = Command::new("program")
            .version("1.2")
            .subcommand(Command::new("branch").subcommand(leaf))
            .subcommand(Command::new("secret").hide(true));
        let manual = Manual {
            section: "8",
            more: &[("SIGNALS", &[("SIGHUP", "Read again.")])],
            see_also: &[("other", "1"), ("third", "5")],
        };
        let directory = tempfile::tempdir().unwrap();
        let pages = directory.path().join("share/man8");
        manual.write(program, &pages).unwrap();
        let text = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
        let main = text("program.8");
        for part in [
            "SIGNALS",
            "SIGHUP",
            "SEE ALSO",
            "\\fBother\\fR(1), \\fBthird\\fR(5)",
            "1.2",
        ] {
            assert!(main.contains(part), "{part} is not in:\n{main}");
        }
        assert!(text("program-branch-leaf.8").contains("Deep down"));
        assert!(!text("program-branch.8").contains("SIGHUP"));
        assert!(!pages.join("program-secret.8").exists());
    }
}
