//! The section `access_log`: the target, and which requests are logged.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::walk::Section;

const WORDS: [(&str, Option<AccessLogTarget>); 3] = [
    ("off", None),
    ("stdout", Some(AccessLogTarget::Stdout)),
    ("stderr", Some(AccessLogTarget::Stderr)),
];
const SLOW_MS: u64 = 1000;

/// Where the access log is written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessLogTarget {
    /// A file that is appended to.
    File(PathBuf),
    /// The daemon's standard output.
    Stdout,
    /// The daemon's standard error, which the log also uses.
    Stderr,
}

impl fmt::Display for AccessLogTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Stdout => f.write_str("stdout"),
            Self::Stderr => f.write_str("stderr"),
        }
    }
}

/// The access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessLogConfig {
    /// The target.
    pub target: AccessLogTarget,
    /// One in this many requests is logged, and those that fail, within a rate if nothing was read for them; 1: all.
    pub sample: u32,
    /// Requests that take at least this long are always logged.
    pub slow: Option<Duration>,
}

/// `None`: no access log.
pub(super) fn read(mut section: Section<'_>, directory: &Path) -> Option<AccessLogConfig> {
    let target = section.path_or_word("path", directory, &WORDS);
    let sample = section.small("sample", 1, 1..=u32::MAX);
    let slow_ms = section.integer("slow_ms", SLOW_MS, 0..=86_400_000);
    section.finish();
    Some(AccessLogConfig {
        target: target.map_or_else(|word| word, |path| Some(AccessLogTarget::File(path)))?,
        sample,
        slow: (slow_ms > 0).then(|| Duration::from_millis(slow_ms)),
    })
}
