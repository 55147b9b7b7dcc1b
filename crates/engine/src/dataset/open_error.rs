//! Why a dataset does not open, or not as it was asked to: each error names the field of the configuration and how to fix it.

use super::OpenError;
use super::file::FileError;
use rustix::fs::Access;
use rustix::io::Errno;
use std::io;
use std::path::Path;

/// Makes the errors of one dataset.
#[derive(Debug, Clone, Copy)]
pub(super) struct ErrorContext<'a> {
    pub(super) dataset: &'a str,
}

impl ErrorContext<'_> {
    pub(super) fn field(self, field: &'static str, problem: impl Into<String>) -> OpenError {
        OpenError {
            dataset: self.dataset.to_owned(),
            field,
            problem: problem.into(),
            is_refused_by_host: false,
        }
    }

    pub(super) fn io(self, path: &Path, error: &io::Error) -> OpenError {
        // The kernel takes a descriptor before it looks for the file, so that a lack of them hides what is wrong with
        // the path.
        let hidden = match is_refused_by_host(error) {
            true => rustix::fs::access(path, Access::READ_OK).err(),
            false => None,
        };
        let hidden = hidden.map(io::Error::from);
        let error = hidden.as_ref().unwrap_or(error);
        let problem = format!("{}: {}", path.display(), open_problem(path, error));
        OpenError {
            is_refused_by_host: is_refused_by_host(error),
            ..self.field("path", problem)
        }
    }
}

/// Whether this host has no descriptor or no memory left, rather than that the file cannot be opened.
pub fn is_refused_by_host(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
}

/// What an errno of an open means to the operator who configured the path.
fn open_problem(path: &Path, error: &io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => missing(path),
        Some(Errno::ACCESS | Errno::PERM) => {
            "permission denied: let the daemon's user read it, and search every directory above it".to_owned()
        }
        Some(Errno::MFILE | Errno::NFILE) => {
            "out of file descriptors: raise the limit (ulimit -n, LimitNOFILE), or serve fewer files"
                .to_owned()
        }
        Some(Errno::NOMEM) => {
            "the kernel has no memory to open it: free some, or raise the limit of the control group"
                .to_owned()
        }
        Some(Errno::NOTDIR) => "a part of the path is not a directory: correct the path".to_owned(),
        Some(Errno::LOOP) => "too many symbolic links: correct the path".to_owned(),
        Some(Errno::NAMETOOLONG) => "the path is too long: correct it".to_owned(),
        // Otherwise it is the file system that has lost its device.
        Some(Errno::NXIO | Errno::NODEV) if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) => {
            "is a socket, or a device that is not there: correct the path".to_owned()
        }
        Some(_) | None => format!("cannot be opened: {error}"),
    }
}

fn missing(path: &Path) -> String {
    if let Ok(target) = std::fs::read_link(path) {
        let target = target.display();
        return format!(
            "is a symbolic link to {target}, which does not exist: correct the link, or make that file first"
        );
    }
    let told = "does not exist: correct the path, or make the file first";
    // Container engines create an empty directory for a mount whose source does not exist.
    let empty = path
        .parent()
        .filter(|directory| std::fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none()));
    match empty {
        Some(directory) => format!(
            "{told}; its directory {} is empty: if it is a mount, mount the right one",
            directory.display()
        ),
        None => told.to_owned(),
    }
}

pub(super) fn file_problem(path: &Path, error: FileError, context: ErrorContext<'_>) -> OpenError {
    let shown = path.display();
    match error {
        FileError::Open(error) => context.io(path, &error),
        FileError::NotAFile("a directory") => context.field(
            "path",
            format!("{shown} is a directory: name a file or a block device, or set kind: objects to serve its files"),
        ),
        FileError::NotAFile(found) => {
            context.field("path", format!("{shown} is {found}: name a regular file or a block device"))
        }
        FileError::DirectRefused(reason) => context.field(
            "direct_io",
            format!(
                "required, but the file system of {shown} refuses O_DIRECT ({reason}): set direct_io: preferred or \
                 off, or move the file to a local file system"
            ),
        ),
        FileError::TrialRead(error) => context.field(
            "path",
            format!("{shown}: its first block cannot be read: {error}; check the device (the kernel log says more)"),
        ),
    }
}

pub(super) fn refusal_reason(path: &Path, reason: &str) -> String {
    format!(
        "the file system of {} refuses O_DIRECT ({reason}): reads go through the page cache",
        path.display()
    )
}
