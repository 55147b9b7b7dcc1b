//! The files of /proc and /sys, beneath a root that is `/`, or a tree that was recorded elsewhere.
//!
//! What cannot be read is `None`: on some hosts there is no such file, in some containers it is hidden, and no check
//! may end with either.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Longest file that is looked at; /proc/self/mountinfo of a busy host has some 100 KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Most names of a directory that are looked at.
const NAMES_MAX: usize = 4096;

/// See the module. Paths are relative to the root: `proc/self/status`.
#[derive(Debug, Clone)]
pub(super) struct View {
    root: PathBuf,
}

impl View {
    /// This host.
    pub(super) fn real() -> Self {
        Self {
            root: PathBuf::from("/"),
        }
    }

    /// A tree in place of this host's.
    #[cfg(test)]
    pub(super) fn beneath(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    pub(super) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub(super) fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.at(path).exists()
    }

    /// A file's text without the white space around it.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let file = std::fs::File::open(self.at(path)).ok()?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    pub(super) fn number<T: FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    /// What stands after a key at the start of a line: `Seccomp:` in /proc/self/status.
    pub(super) fn line(&self, path: impl AsRef<Path>, key: &str) -> Option<String> {
        let text = self.text(path)?;
        let value = text.lines().find_map(|line| line.strip_prefix(key))?;
        Some(value.trim().to_owned())
    }

    /// Bytes of a line like `MemAvailable:   1024 kB`.
    pub(super) fn kib_line(&self, path: impl AsRef<Path>, key: &str) -> Option<u64> {
        let line = self.line(path, key)?;
        let kib: u64 = line.strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    }

    /// Names in a directory, sorted.
    pub(super) fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .take(NAMES_MAX)
            .collect();
        names.sort();
        names
    }

    /// The path behind symbolic links, relative to the root.
    pub(super) fn resolved(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let root = self.root.canonicalize().ok()?;
        let found = self.at(path).canonicalize().ok()?;
        found.strip_prefix(root).ok().map(Path::to_owned)
    }
}
