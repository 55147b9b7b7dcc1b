//! Where a result goes: stdout, or a file that is there whole or not at all.

use crate::outcome::Failure;
use serde_json::Value;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal as _, StdoutLock, Write};
use std::path::{Path, PathBuf};

/// A place for a command's result. Nothing is there for certain before [`Sink::finish`].
#[derive(Debug)]
pub(crate) enum Sink {
    Stdout(BufWriter<StdoutLock<'static>>),
    File { out: BufWriter<File>, part: PartFile },
}

impl Sink {
    /// Stdout, or a new file at `path`.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = path else {
            return Ok(Self::Stdout(BufWriter::new(io::stdout().lock())));
        };
        let part = PartFile::beside(path);
        let file = File::create(part.path())
            .map_err(|error| Failure::Failed(format!("--out: cannot write {}: {error}", path.display())))?;
        Ok(Self::File {
            out: BufWriter::new(file),
            part,
        })
    }

    /// Whether a person would see what is written.
    pub(crate) fn is_terminal(&self) -> bool {
        match self {
            Self::Stdout(_) => io::stdout().is_terminal(),
            Self::File { .. } => false,
        }
    }

    /// Everything was written.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        match self {
            Self::Stdout(mut out) => out.flush()?,
            Self::File { mut out, part } => {
                out.flush()?;
                part.commit()?;
            }
        }
        Ok(())
    }
}

/// Writes a value as JSON, for people too.
pub(crate) fn print_json(out: &mut Sink, value: &Value) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)?;
    Ok(())
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout(out) => out.write(bytes),
            Self::File { out, .. } => out.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stdout(out) => out.flush(),
            Self::File { out, .. } => out.flush(),
        }
    }
}

/// A file that is being written beside its final name. Dropped before [`PartFile::commit`], it is removed.
#[derive(Debug)]
pub(crate) struct PartFile {
    part: Option<PathBuf>,
    path: PathBuf,
}

impl PartFile {
    /// `DIR/NAME.part` for `DIR/NAME`.
    pub(crate) fn beside(path: &Path) -> Self {
        let mut part = OsString::from(path);
        part.push(".part");
        Self {
            part: Some(part.into()),
            path: path.to_owned(),
        }
    }

    /// Where to write.
    pub(crate) fn path(&self) -> &Path {
        self.part.as_deref().unwrap_or(&self.path)
    }

    /// Gives the file its final name.
    pub(crate) fn commit(mut self) -> io::Result<()> {
        match self.part.take() {
            Some(part) => std::fs::rename(&part, &self.path).inspect_err(|_| {
                let _ = std::fs::remove_file(&part);
            }),
            None => Ok(()),
        }
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            // It may never have been created.
            let _ = std::fs::remove_file(part);
        }
    }
}
