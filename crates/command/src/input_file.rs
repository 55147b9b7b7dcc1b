//! Files that are read whole. A pipe has no length to check beforehand, and /dev/zero no end.

use crate::size;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Reads a file of at most `bytes_max` bytes.
///
/// # Errors
/// errno; `FileTooLarge` with the limit.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(path)?;
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let problem = format!("it has more than {}, the limit", size::exact(bytes_max));
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// [`read`], for text in UTF-8.
///
/// # Errors
/// As [`read`]; `InvalidData` if it is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let text = String::from_utf8(read(path, bytes_max)?);
    text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        // Scenario: a file of as many bytes as allowed, of one more, and one without an end. Expected: its bytes; for
        // the others an error with the limit.
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"12345").unwrap();
        assert_eq!(read_text(file.path(), 5).unwrap(), "12345");
        for (path, bytes_max) in [(file.path(), 4), (Path::new("/dev/zero"), 4096)] {
            let error = read(path, bytes_max).unwrap_err();
            let limit = format!("more than {}, the limit", size::exact(bytes_max));
            assert!(error.to_string().contains(&limit), "{error}");
        }
        std::fs::write(file.path(), b"\xff").unwrap();
        assert_eq!(
            read_text(file.path(), 5).unwrap_err().to_string(),
            "it is not UTF-8"
        );
    }
}
