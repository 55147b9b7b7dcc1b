//! Problems of a configuration, all reported at once.

use crate::key_file::HOST_REMEDY;
use std::fmt;
use std::path::PathBuf;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The default: it is not set.
    Default,
    /// The demo, which runs without a configuration file.
    Demo,
    /// The configuration file.
    File(PathBuf),
    /// An environment variable, by its name.
    Environment(String),
    /// A command line flag, as typed, without the value.
    Flag(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Demo => f.write_str("demo"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Path of the key: `engine.uring.queue_depth`, `datasets[1].dim`.
    pub key: String,
    /// What is wrong.
    pub problem: String,
    /// What is allowed, or how to fix it.
    pub remedy: String,
    /// Where the value came from.
    pub source: Source,
}

impl Problem {
    pub(super) fn new(
        key: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
        source: Source,
    ) -> Self {
        Self {
            key: key.into(),
            problem: problem.into(),
            remedy: remedy.into(),
            source,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}; {} ({})",
            self.key, self.problem, self.remedy, self.source
        )
    }
}

/// Most problems that are reported at once: a file of another kind has thousands.
pub const REPORTED_MAX: usize = 20;

/// The first problems, and how many more there are.
pub fn listed(problems: &[impl fmt::Display], separator: &str) -> String {
    let first = problems.iter().take(REPORTED_MAX).map(ToString::to_string);
    let more = problems.len().saturating_sub(REPORTED_MAX);
    let more = (more > 0).then(|| format!("and {more} more"));
    first.chain(more).collect::<Vec<_>>().join(separator)
}

/// All mistakes of a configuration, at least one; printed one per line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// Whether all that is wrong is that this host had no descriptor or no memory left to read the file.
    pub fn is_refused_by_host(&self) -> bool {
        self.0.iter().all(|problem| problem.remedy == HOST_REMEDY)
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        write!(
            f,
            "the configuration has {count} problem{}:",
            if count == 1 { "" } else { "s" }
        )?;
        write!(f, "\n  {}", listed(&self.0, "\n  "))
    }
}

impl std::error::Error for Problems {}
