//! Destination of a result: stdout, or a file that is written completely or not at all.

use crate::outcome::Failure;
use ringfetch_command::part_file::PartFile;
use serde::Serialize;
use std::io::{self, BufWriter, IsTerminal as _, StdoutLock, Write};
use std::path::Path;

/// Output of a command. Nothing is certain to be written before [`Sink::finish`].
///
/// If the reader of stdout has closed it (`ringfetch get ... | head`), it has what it wanted: the rest is dropped
/// silently, and the command ends as it would have.
#[derive(Debug)]
pub(crate) enum Sink {
    Stdout(BufWriter<Pipe>),
    File(BufWriter<PartFile>),
}

impl Sink {
    /// Stdout, or a new file at `path`.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = path else {
            return Ok(Self::Stdout(BufWriter::new(Pipe {
                stdout: io::stdout().lock(),
                is_closed: false,
            })));
        };
        let part = PartFile::beside(path).map_err(|error| cannot_write(path, &error))?;
        Ok(Self::File(BufWriter::new(part)))
    }

    /// Whether the output goes to a terminal.
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self, Self::Stdout(_)) && io::stdout().is_terminal()
    }

    /// Whether nobody reads the output any more.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self, Self::Stdout(out) if out.get_ref().is_closed)
    }

    /// Whether the output is a file, which keeps its earlier bytes until [`Sink::finish`]; not so a device or a pipe.
    pub(crate) fn is_file(&self) -> bool {
        matches!(self, Self::File(out) if out.get_ref().is_temporary())
    }

    /// Completes the output after everything was written.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        match self {
            Self::Stdout(_) => Ok(self.flush()?),
            Self::File(out) => {
                let path = out.get_ref().path().to_owned();
                let part = out.into_inner().map_err(io::IntoInnerError::into_error);
                let finished = part.and_then(PartFile::finish);
                finished.map_err(|error| cannot_write(&path, &error))
            }
        }
    }

    /// The error of a write, with the name of what could not be written.
    fn named(&self, error: &io::Error) -> io::Error {
        let text = match self {
            Self::Stdout(_) => format!("stdout: {error}"),
            Self::File(out) => not_written(out.get_ref().path(), error),
        };
        io::Error::new(error.kind(), text)
    }

    fn writer(&mut self) -> &mut dyn Write {
        match self {
            Self::Stdout(out) => out,
            Self::File(out) => out,
        }
    }
}

/// Stdout, until its reader closes it.
#[derive(Debug)]
pub(crate) struct Pipe {
    stdout: StdoutLock<'static>,
    is_closed: bool,
}

impl Pipe {
    /// `dropped` in place of an error that says that the reader has closed it.
    fn or_closed<T>(&mut self, result: io::Result<T>, dropped: T) -> io::Result<T> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.is_closed = true;
                Ok(dropped)
            }
            result => result,
        }
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.stdout.write(bytes);
        self.or_closed(written, bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.stdout.flush();
        self.or_closed(flushed, ())
    }
}

fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::Failed(not_written(path, error))
}

fn not_written(path: &Path, error: &io::Error) -> String {
    format!("--out: cannot write {}: {error}", path.display())
}

/// Prints a command's result on stdout: as JSON, or as the text that `text` writes.
pub(crate) fn print(
    json: bool,
    value: &impl Serialize,
    text: impl FnOnce(&mut Sink) -> io::Result<()>,
) -> Result<(), Failure> {
    let mut out = Sink::open(None)?;
    if json {
        print_json(&mut out, value)?;
    } else {
        text(&mut out)?;
    }
    out.finish()
}

/// Writes a value as indented JSON.
pub(crate) fn print_json(out: &mut Sink, value: &impl Serialize) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)?;
    Ok(())
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.writer().write(bytes);
        written.map_err(|error| self.named(&error))
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.writer().flush();
        flushed.map_err(|error| self.named(&error))
    }
}
