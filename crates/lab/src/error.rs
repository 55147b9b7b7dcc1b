//! Why a study did not do what it was asked.

/// One line each; names the option to look at.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabError {
    /// The arguments do not make sense.
    #[error("{0}")]
    Usage(String),
    /// What was asked for would mislead, and `--force` was not given.
    #[error("{0}")]
    Refused(String),
    /// It was tried and failed.
    #[error("{0}")]
    Failed(String),
}

impl LabError {
    /// An error of the operating system at something that has a name.
    pub(crate) fn at(what: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        Self::Failed(format!("{what}: {error}"))
    }

    /// With other words.
    pub(crate) fn map(self, words: impl Fn(&str) -> String) -> Self {
        match self {
            Self::Usage(problem) => Self::Usage(words(&problem)),
            Self::Refused(problem) => Self::Refused(words(&problem)),
            Self::Failed(problem) => Self::Failed(words(&problem)),
        }
    }
}
