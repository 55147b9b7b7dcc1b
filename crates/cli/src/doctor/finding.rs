//! The result of a check.

use serde::Serialize;
use std::io::{self, Write};

/// Verdicts, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Ok,
    /// Worth knowing; nothing is wrong.
    Note,
    /// It works, but worse than it could.
    Warning,
    /// io_uring does not work, a path cannot be read, or the daemon does not start with this memory budget.
    Problem,
}

impl Verdict {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }

    /// SGR parameter (ECMA-48): green, blue, yellow, red.
    fn colour(self) -> u8 {
        match self {
            Self::Ok => 32,
            Self::Note => 34,
            Self::Warning => 33,
            Self::Problem => 31,
        }
    }
}

/// A thing that is checked. `docs/DOCTOR.md` lists them all; ids are never reused.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Check {
    pub(super) id: &'static str,
    /// Why it matters.
    pub(super) why: &'static str,
}

/// Defines the checks of one module: each a constant with its id and why it matters, and all of them in
/// `CHECKS`.
macro_rules! checks {
    ($($name:ident = $id:literal, $why:literal;)*) => {
        $(const $name: Check = Check { id: $id, why: $why };)*
        #[cfg(test)]
        pub(super) const CHECKS: &[Check] = &[$($name),*];
    };
}
pub(super) use checks;

impl Check {
    pub(super) fn ok(self, found: impl Into<String>) -> Finding {
        self.finding(Verdict::Ok, found.into(), None)
    }

    pub(super) fn note(self, found: impl Into<String>) -> Finding {
        self.finding(Verdict::Note, found.into(), None)
    }

    pub(super) fn note_with(self, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        self.finding(Verdict::Note, found.into(), Some(remedy.into()))
    }

    pub(super) fn warning(self, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        self.finding(Verdict::Warning, found.into(), Some(remedy.into()))
    }

    /// A warning if `bad`, else ok.
    pub(super) fn warn_if(self, bad: bool, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        if bad {
            self.warning(found, remedy)
        } else {
            self.ok(found)
        }
    }

    /// The kernel file system that would tell is not mounted.
    pub(super) fn unknown_without(self, mount: &str) -> Finding {
        self.note(format!("unknown (is {mount} mounted?)"))
    }

    pub(super) fn problem(self, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        self.finding(Verdict::Problem, found.into(), Some(remedy.into()))
    }

    fn finding(self, verdict: Verdict, found: String, remedy: Option<String>) -> Finding {
        let (check, path) = (self, None);
        Finding {
            check,
            path,
            verdict,
            found,
            remedy,
        }
    }
}

/// What a check found.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Finding {
    #[serde(flatten)]
    pub(super) check: Check,
    /// The path it concerns; `None`: the host.
    pub(super) path: Option<String>,
    pub(super) verdict: Verdict,
    pub(super) found: String,
    /// How to fix it; present for every warning and problem.
    pub(super) remedy: Option<String>,
}

impl Finding {
    pub(super) fn about(mut self, path: &str) -> Self {
        self.path = Some(path.to_owned());
        self
    }

    /// Id, and path if it concerns one.
    pub(super) fn name(&self) -> String {
        match &self.path {
            Some(path) => format!("{} ({path})", self.check.id),
            None => self.check.id.to_owned(),
        }
    }

    /// Writes one line; if it is not ok, also why it matters and how to fix it.
    pub(super) fn write(&self, out: &mut dyn Write, width: usize, colour: bool) -> io::Result<()> {
        let word = self.verdict.as_str();
        let word = if colour {
            format!("\x1b[{}m{word:<7}\x1b[0m", self.verdict.colour())
        } else {
            format!("{word:<7}")
        };
        writeln!(out, "  {word}  {:<width$}  {}", self.check.id, self.found)?;
        if self.verdict > Verdict::Ok {
            writeln!(out, "             why: {}", self.check.why)?;
            if let Some(remedy) = &self.remedy {
                writeln!(out, "             fix: {remedy}")?;
            }
        }
        Ok(())
    }
}
