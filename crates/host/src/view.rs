//! The files of /proc and /sys, below `/` or below a directory with another host's files.

use procfs::{FromRead as _, Meminfo};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Longest file read; /proc/self/mountinfo of a busy host has some 100 KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Most names read of a directory.
const NAMES_MAX: usize = 4096;

/// The files of one host. Paths are relative to its root: `proc/self/status`. An unreadable file is `None`:
/// some kernels do not have it, and some containers hide it.
#[derive(Debug, Clone)]
pub struct View {
    root: PathBuf,
}

impl View {
    /// This host.
    pub fn real() -> Self {
        Self {
            root: PathBuf::from("/"),
        }
    }

    /// A tree in place of this host's.
    #[cfg(feature = "tree")]
    pub(crate) fn beneath(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Whether the file or directory exists.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.at(path).exists()
    }

    /// A file's text without surrounding white space.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let file = std::fs::File::open(self.at(path)).ok()?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// A file that holds one number.
    pub fn number<T: FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    /// The rest of the line that begins with `key`: `Seccomp:` in /proc/self/status.
    pub fn line(&self, path: impl AsRef<Path>, key: &str) -> Option<String> {
        let text = self.text(path)?;
        let value = text.lines().find_map(|line| line.strip_prefix(key))?;
        Some(value.trim().to_owned())
    }

    /// /proc/meminfo, in bytes.
    pub fn meminfo(&self) -> Option<Meminfo> {
        Meminfo::from_file(self.at("proc/meminfo")).ok()
    }

    /// Names in a directory, sorted.
    pub(crate) fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .take(NAMES_MAX)
            .collect();
        names.sort();
        names
    }

    /// The target of symbolic links, relative to the root.
    pub(crate) fn resolved(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let root = self.root.canonicalize().ok()?;
        let found = self.at(path).canonicalize().ok()?;
        found.strip_prefix(root).ok().map(Path::to_owned)
    }
}

/// The word in brackets, as in `none [mq-deadline] kyber`; a single word without brackets is returned as is.
pub fn chosen(words: &str) -> Option<&str> {
    let bracketed = words
        .split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    let single = || (words.split_whitespace().count() == 1).then_some(words);
    bracketed.or_else(single)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_in_brackets_is_chosen() {
        // Scenario: schedulers; a single one, without brackets; several without. Expected: the one in brackets; that one; none.
        let words = ["none [mq-deadline] bfq", "none", "always never"].map(chosen);
        assert_eq!(words, [Some("mq-deadline"), Some("none"), None]);
    }
}
