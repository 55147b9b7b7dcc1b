//! Results that are there whole or not at all.

use crate::error::LabError;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

/// Writes a file beside its final name, makes it durable, and renames it.
///
/// # Errors
/// errno, with the final name. Nothing is there under that name that was not there before.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), LabError> {
    let mut part = OsString::from(path);
    part.push(".part");
    let written = File::create(&part)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&part, path));
    written.map_err(|error| {
        // The error that led here is the one to report.
        let _removed = fs::remove_file(&part);
        LabError::at(path.display(), error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_named_is_not_left_behind() {
        // Scenario: a new file, one over it, and one whose name is a directory's. Expected: the bytes; an error and no part.
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
