//! Errors of a slow disk.

use std::io;
use std::path::PathBuf;

/// Why a disk was not mounted, or its parameters not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter is unknown, does not parse or is out of bounds.
    #[error("{key}: {problem}")]
    Parameter {
        /// The parameter, as in `slowdisk --help` and `set`.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The source is missing, unreadable, or neither a regular file nor a directory.
    #[error("source {}: {source}", path.display())]
    Source {
        /// The source.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The mount failed: FUSE is unavailable, or not permitted, or the mount point is unusable.
    #[error("mount point {}: {source}", path.display())]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn parameter(key: &str, problem: impl Into<String>) -> Self {
        Self::Parameter {
            key: key.to_owned(),
            problem: problem.into(),
        }
    }
}
