//! Why a study failed.

/// One line each; names the option to look at.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabError {
    /// The arguments do not make sense.
    #[error("{0}")]
    Usage(String),
    /// The request would give misleading figures, and `--force` was not given.
    #[error("{0}")]
    Refused(String),
    /// It was tried and failed.
    #[error("{0}")]
    Failed(String),
}

impl LabError {
    /// An operating system error, with the name of what it concerns.
    pub(crate) fn at(what: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        Self::Failed(format!("{what}: {error}"))
    }

    pub(crate) fn map(self, words: impl Fn(&str) -> String) -> Self {
        match self {
            Self::Usage(problem) => Self::Usage(words(&problem)),
            Self::Refused(problem) => Self::Refused(words(&problem)),
            Self::Failed(problem) => Self::Failed(words(&problem)),
        }
    }
}
