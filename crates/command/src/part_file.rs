//! Result files that are complete or absent, also if the process ends while another thread writes them ([`abandon`]).

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::NamedTempFile;

/// Of the temporary names.
const PREFIX: &str = ".ringfetch-";
const SUFFIX: &str = ".part";

/// Whether no file is to be made or named any more; locked while one is.
static ABANDONED: Mutex<bool> = Mutex::new(false);

/// A temporary file next to its final name. Dropped before [`PartFile::finish`], it leaves nothing.
///
/// Symbolic links are followed. A device or a pipe (`/dev/null`, `/dev/stdout`) is not replaced: the bytes go into it.
#[derive(Debug)]
pub struct PartFile {
    target: Target,
    path: PathBuf,
}

#[derive(Debug)]
enum Target {
    Named(NamedTempFile),
    Special(File),
}

impl PartFile {
    /// A new file in the directory of `path`, with the permissions of the file there, or else of any new file.
    ///
    /// # Errors
    /// errno.
    pub fn beside(path: &Path) -> io::Result<Self> {
        let found = fs::metadata(path).ok();
        if found.as_ref().is_some_and(fs::Metadata::is_dir) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if found.as_ref().is_some_and(|found| !found.is_file()) {
            return Ok(Self {
                target: Target::Special(File::options().write(true).open(path)?),
                path: path.to_owned(),
            });
        }
        let mode = found.as_ref().map(|found| found.permissions().mode() & 0o777);
        let path = found.map_or_else(|| Ok(path.to_owned()), |_| path.canonicalize())?;
        // A bare name has an empty parent.
        let directory = Path::new(".").join(path.parent().unwrap_or(&path));
        // Opened here, since errors of tempfile name its file, which the caller did not choose.
        // At no time may more users open it than the one that it replaces.
        let mut new = File::options();
        new.write(true).create_new(true).mode(mode.unwrap_or(0o666));
        let mut name = tempfile::Builder::new();
        name.prefix(PREFIX).suffix(SUFFIX);
        let wanted = still_wanted()?;
        let file = name.make_in(directory, |path| new.open(path))?;
        drop(wanted);
        if let Some(mode) = mode
            && file.as_file().metadata()?.permissions().mode() & 0o777 != mode
        {
            // What the umask took. File systems that give all files to one user may refuse that to others.
            let _kept = file.as_file().set_permissions(Permissions::from_mode(mode));
        }
        Ok(Self {
            target: Target::Named(file),
            path,
        })
    }

    /// The final name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the bytes are in a temporary file until [`PartFile::finish`]; a device or a pipe gets them at once.
    pub fn is_temporary(&self) -> bool {
        matches!(self.target, Target::Named(_))
    }

    /// Syncs the file and gives it its name.
    ///
    /// # Errors
    /// errno. The name then keeps its previous file.
    pub fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        match self.target {
            Target::Special(_) => {}
            Target::Named(file) => {
                file.as_file().sync_all()?;
                let _wanted = still_wanted()?;
                file.persist(self.path)?;
            }
        }
        Ok(())
    }

    fn file(&mut self) -> &mut File {
        match &mut self.target {
            Target::Named(file) => file.as_file_mut(),
            Target::Special(file) => file,
        }
    }
}

impl Write for PartFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file().flush()
    }
}

fn still_wanted() -> io::Result<MutexGuard<'static, bool>> {
    let abandoned = ABANDONED.lock().unwrap_or_else(PoisonError::into_inner);
    match *abandoned {
        false => Ok(abandoned),
        true => Err(io::ErrorKind::Interrupted.into()),
    }
}

/// Removes the temporary files of this process, which is about to end; none gets its name after this. May hang as writes do.
pub fn abandon() {
    *ABANDONED.lock().unwrap_or_else(PoisonError::into_inner) = true;
    for descriptor in fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let path = fs::read_link(descriptor.path()).unwrap_or_default();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        if name.starts_with(PREFIX) && name.ends_with(SUFFIX) {
            let _removed = fs::remove_file(path);
        }
    }
}

/// The regular file that a path names, or will name: two of its names are equal here. Of a device or a pipe, the path itself.
pub fn regular_file(path: &Path) -> PathBuf {
    match path.canonicalize() {
        Ok(found) if found.is_file() => found,
        Ok(_) => path.to_owned(),
        Err(_) => {
            // A bare name has an empty parent.
            let directory = Path::new(".").join(path.parent().unwrap_or(path));
            let directory = directory.canonicalize().unwrap_or(directory);
            directory.join(path.file_name().unwrap_or_default())
        }
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
    use std::os::unix::fs::{FileTypeExt as _, symlink};

    #[test]
    fn a_file_that_cannot_be_named_is_not_left_behind() {
        // Scenario: a new file, one that replaces it, and one whose name is a directory's. Expected: the bytes; an error
        // before anything is written, and no partial file.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        write_whole(&path, b"one").unwrap();
        write_whole(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let taken = directory.path().join("b");
        fs::create_dir_all(taken.join("c")).unwrap();
        assert!(PartFile::beside(&taken).is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_file_that_is_replaced_keeps_its_permissions() {
        // Scenario: files that more users, fewer users and not even their owner may write than a new one, one of them behind a
        // link; a new name. Expected: their permissions while the bytes are written and after; those of any new file.
        let directory = tempfile::tempdir().unwrap();
        let [old, link, new, any] = ["old", "link", "new", "any"].map(|name| directory.path().join(name));
        let mode = |file: &Path| fs::metadata(file).unwrap().permissions().mode() & 0o777;
        fs::write(&old, b"old").unwrap();
        symlink(&old, &link).unwrap();
        for (path, wanted) in [(&old, 0o600), (&old, 0o666), (&link, 0o400), (&link, 0o640)] {
            fs::set_permissions(&old, Permissions::from_mode(wanted)).unwrap();
            let mut part = PartFile::beside(path).unwrap();
            let temporary = fs::read_dir(directory.path())
                .unwrap()
                .map(|entry| entry.unwrap().path());
            let temporary: Vec<_> = temporary.filter(|path| ![&old, &link].contains(&path)).collect();
            assert_eq!(
                temporary.iter().map(|path| mode(path)).collect::<Vec<_>>(),
                [wanted]
            );
            part.write_all(b"new").unwrap();
            part.finish().unwrap();
            assert_eq!((mode(&old), fs::read(&old).unwrap()), (wanted, b"new".to_vec()));
        }
        write_whole(&new, b"new").unwrap();
        fs::write(&any, b"any").unwrap();
        assert_eq!(mode(&new), mode(&any));
    }

    #[test]
    fn what_is_no_regular_file_stays_what_it_is() {
        // Scenario: the name of a link to a file, and of a link to a pipe. Expected: the file behind the first has the
        // bytes, with all links in place; the reader of the pipe gets them, and the pipe is still there.
        let directory = tempfile::tempdir().unwrap();
        let [file, link, pipe, named] =
            ["file", "link", "pipe", "named"].map(|name| directory.path().join(name));
        fs::write(&file, b"old").unwrap();
        symlink(&file, &link).unwrap();
        write_whole(&link, b"new").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert!(link.is_symlink());

        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        symlink(&pipe, &named).unwrap();
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        write_whole(&named, b"through").unwrap();
        assert_eq!(reader.join().unwrap(), b"through");
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo() && named.is_symlink());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 4);
    }
}
