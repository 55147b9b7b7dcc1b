//! Result files that are complete or absent.

use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A temporary file next to its final name. Dropped before [`PartFile::finish`], it leaves nothing.
#[derive(Debug)]
pub struct PartFile {
    file: NamedTempFile,
    path: PathBuf,
}

impl PartFile {
    /// A new file in the directory of `path`, with the permissions of any new file.
    ///
    /// # Errors
    /// errno.
    pub fn beside(path: &Path) -> io::Result<Self> {
        // A bare name has an empty parent. The umask limits the permissions.
        let directory = Path::new(".").join(path.parent().unwrap_or(path));
        let mut part = tempfile::Builder::new();
        let file = part
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory)
            .map_err(without_temporary_name)?;
        let path = path.to_owned();
        Ok(Self { file, path })
    }

    /// The final name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the file and gives it its name.
    ///
    /// # Errors
    /// errno. The name then keeps its previous file.
    pub fn finish(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        self.file.persist(self.path)?;
        Ok(())
    }
}

/// An error of tempfile without the name of its file, which the caller did not choose.
fn without_temporary_name(error: io::Error) -> io::Error {
    let text = error.to_string();
    let (cause, _) = text.split_once(" at path ").unwrap_or((&text, ""));
    io::Error::new(error.kind(), cause)
}

impl Write for PartFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a whole file at once.
///
/// # Errors
/// As [`PartFile::finish`].
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut part = PartFile::beside(path)?;
    part.write_all(bytes)?;
    part.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_that_cannot_be_named_is_not_left_behind() {
        // Scenario: a new file, one that replaces it, and one whose name is a directory's. Expected: the
        // bytes; an error and no partial file.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        write_whole(&path, b"one").unwrap();
        write_whole(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let taken = directory.path().join("b");
        fs::create_dir_all(taken.join("c")).unwrap();
        assert!(write_whole(&taken, b"x").is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
