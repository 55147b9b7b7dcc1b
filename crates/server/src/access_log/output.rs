//! The target of the log: a file, or one of the process's streams. Used only by the log's thread.
//!
//! Lines are written in batches. A failed write loses its lines; the next ones are tried again. A line that
//! was cut off is terminated before the next one, so that every other line stays whole.

use crate::config::AccessLogTarget;
use prometheus::IntCounter;
use rustix::fs::{Access, OFlags};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes written at once to a file.
const FILE_BYTES: usize = 64 << 10;
/// Bytes written at once to a stream: the kernel does not mix so many with what others write to the same pipe
/// (PIPE_BUF), such as the daemon's log.
const STREAM_BYTES: usize = 4096;

/// After each write the thread lets lines gather for this long; otherwise each request would wake it for a
/// write of its own. At this rate the queue has room for 1.6 million lines per second.
const GATHER: Duration = Duration::from_millis(5);

/// Pause between attempts to open the file again where that fails.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

/// Writes lines to the target in batches.
pub(super) struct Output {
    file: File,
    /// The file to open again; `None`: a stream.
    path: Option<PathBuf>,
    reopen: Arc<AtomicBool>,
    /// When to try again to open the file; `None`: no attempt failed.
    next_attempt: Option<Instant>,
    /// Whole lines.
    lines: Vec<u8>,
    lines_bytes_max: usize,
    /// The last line was cut off.
    is_torn: bool,
    is_failing: bool,
    dropped: IntCounter,
}

impl Output {
    /// Opens the target. Once `reopen` is set, a file is opened again.
    ///
    /// # Errors
    /// The target cannot be opened.
    pub(super) fn open(
        target: &AccessLogTarget,
        reopen: Arc<AtomicBool>,
        dropped: IntCounter,
    ) -> io::Result<Self> {
        let stream = |fd: io::Result<_>| fd.map(|fd| (File::from(fd), None));
        let (file, path) = match target {
            AccessLogTarget::File(path) => (append_to(path)?, Some(path.clone())),
            AccessLogTarget::Stdout => stream(io::stdout().as_fd().try_clone_to_owned())?,
            AccessLogTarget::Stderr => stream(io::stderr().as_fd().try_clone_to_owned())?,
        };
        Ok(Self {
            is_torn: is_cut_off(&file, false),
            file,
            lines_bytes_max: if path.is_some() { FILE_BYTES } else { STREAM_BYTES },
            path,
            reopen,
            next_attempt: None,
            lines: Vec::new(),
            is_failing: false,
            dropped,
        })
    }

    fn open_again(&mut self, is_requested: bool) {
        let Some(path) = &self.path else { return };
        match append_to(path) {
            Ok(file) => {
                self.is_torn = is_cut_off(&file, self.is_torn);
                self.file = file;
                if self.next_attempt.take().is_some() {
                    tracing::info!(path = %path.display(), "the access log is reopened");
                }
            }
            Err(error) => {
                if is_requested {
                    tracing::warn!(path = %path.display(), %error, "the access log cannot be reopened; still writing to the old file");
                }
                self.next_attempt = Instant::now().checked_add(REOPEN_PAUSE);
            }
        }
    }

    /// Writes the gathered lines, to the file that has the name now.
    fn write_out(&mut self) {
        let is_requested = self.reopen.swap(false, Ordering::Relaxed);
        if is_requested || self.next_attempt.is_some_and(|due| due <= Instant::now()) {
            self.open_again(is_requested);
        }
        if !self.lines.is_empty() {
            self.write_lines();
        }
    }

    /// Writes the gathered lines. Those that cannot be written are dropped.
    fn write_lines(&mut self) {
        let ended = if self.is_torn {
            write(&self.file, b"\n").1
        } else {
            Ok(())
        };
        self.is_torn = ended.is_err();
        let (written, result) = match ended {
            Ok(()) => write(&self.file, &self.lines),
            Err(error) => (0, Err(error)),
        };
        let (done, left) = self.lines.split_at(written);
        self.is_torn |= done.last().is_some_and(|last| *last != b'\n');
        let lost = left.iter().filter(|byte| **byte == b'\n').count();
        self.dropped.inc_by(lost as u64);
        self.lines.clear();
        let was_failing = std::mem::replace(&mut self.is_failing, result.is_err());
        match result {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "cannot write the access log; lines are dropped");
            }
            Ok(()) if was_failing => tracing::info!("the access log can be written again"),
            Ok(()) | Err(_) => {}
        }
    }
}

/// Never fails: the log's thread has no one to report an error to.
impl Write for Output {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.lines.len() + line.len() > self.lines_bytes_max {
            self.write_out();
        }
        self.lines.extend_from_slice(line);
        Ok(line.len())
    }

    /// Called when the queue is empty.
    fn flush(&mut self) -> io::Result<()> {
        let has_lines = !self.lines.is_empty();
        self.write_out();
        if has_lines {
            std::thread::sleep(GATHER);
        }
        Ok(())
    }
}

/// Writes as much as possible; returns how much, and the error if there was one.
fn write(mut file: &File, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return (written, Err(ErrorKind::WriteZero.into())),
            Ok(more) => written += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return (written, Err(error)),
        }
    }
    (written, Ok(()))
}

/// Whether a target can be opened, or, if the file does not exist, created.
///
/// # Errors
/// It can be neither.
pub(super) fn check(target: &AccessLogTarget) -> io::Result<()> {
    let AccessLogTarget::File(path) = target else {
        return Ok(());
    };
    if path.metadata().is_ok() {
        return append_to(path).map(drop);
    }
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        Some(_) | None => Path::new("."),
    };
    Ok(rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK)?)
}

/// Whether the last line is not complete: whoever wrote it was stopped within it, or the disk was full. `was_torn` counts
/// where the file may only be written.
fn is_cut_off(file: &File, was_torn: bool) -> bool {
    let mut last = [0];
    match file.metadata().map_or(0, |found| found.len()).checked_sub(1) {
        Some(end) => file
            .read_exact_at(&mut last, end)
            .map_or(was_torn, |()| last != [b'\n']),
        None => false,
    }
}

/// Opens a regular file or a character device to append to it, and to read it where that is allowed.
fn append_to(path: &Path) -> io::Result<File> {
    let open = |reads| {
        OpenOptions::new()
            .read(reads)
            .append(true)
            .create(true)
            // It has names of clients and data: only for the daemon's user and group.
            .mode(0o640)
            // A FIFO must not block startup.
            .custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed())
            .open(path)
    };
    let opened = open(true).or_else(|_| open(false));
    let kind = match &opened {
        Ok(file) => file.metadata(),
        Err(_) => path.metadata(),
    };
    let kind = kind.map(|metadata| metadata.file_type());
    match kind {
        Ok(kind) if kind.is_dir() => Err(io::Error::other("is a directory")),
        Ok(kind) if !kind.is_file() && !kind.is_char_device() => {
            Err(io::Error::other("is not a regular file"))
        }
        Ok(_) | Err(_) => opened,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::io::Read as _;

    fn output(path: &Path) -> Output {
        let dropped = IntCounter::new("dropped", "dropped").unwrap();
        Output::open(&AccessLogTarget::File(path.to_owned()), Arc::default(), dropped).unwrap()
    }

    #[test]
    fn lines_are_lost_and_counted_while_the_disk_is_full() {
        // Scenario: three lines to /dev/full, which accepts none; then a file replaces it. Expectation:
        // nothing fails, the lines count as dropped, the next one is written.
        let mut output = output(Path::new("/dev/full"));
        for _ in 0..3 {
            output.write_all(b"lost\n").unwrap();
        }
        output.flush().unwrap();
        assert_eq!((output.dropped.get(), output.is_failing), (3, true));
        let file = tempfile::NamedTempFile::new().unwrap();
        output.path = Some(file.path().to_owned());
        output.reopen.store(true, Ordering::Relaxed);
        output.write_all(b"kept\n").unwrap();
        output.flush().unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"kept\n");
        assert_eq!((output.dropped.get(), output.is_failing), (3, false));
    }

    #[test]
    fn a_line_that_was_cut_off_is_ended() {
        // Scenario: lines to a pipe with room for only some of them, which is then emptied. Expectation: the
        // reader gets whole lines, one that was cut off, and whole lines; all others count as dropped.
        let (mut reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let mut output = output(Path::new("/dev/null"));
        output.lines_bytes_max = 100 << 10;
        (output.path, output.file) = (None, File::from(std::os::fd::OwnedFd::from(writer)));
        let line = [&[b'x'; 999][..], b"\n"].concat();
        for _ in 0..200 {
            output.write_all(&line).unwrap();
        }
        output.flush().unwrap();
        let first = drain(&mut reader, 1 << 16);
        assert!(output.is_torn);
        output.write_all(b"after\n").unwrap();
        output.flush().unwrap();
        drop(output.file);
        let mut rest = first;
        reader.read_to_end(&mut rest).unwrap();
        let text = String::from_utf8(rest).unwrap();
        let whole = text.lines().filter(|text| text.len() == 999).count() as u64;
        assert_eq!(whole + output.dropped.get(), 200);
        assert!(text.ends_with("x\nafter\n"));
        assert_eq!(text.lines().count() as u64, whole + 2);
    }

    #[test]
    fn a_line_that_was_cut_off_is_ended_in_a_file_that_is_opened() {
        // Scenario: a file ends within a line when it is opened, by a start and again; then a new file has its name.
        // Expectation: the line is ended before the next one; the new file begins with its first line.
        let directory = tempfile::tempdir().unwrap();
        let [path, renamed] = ["log", "log.1"].map(|name| directory.path().join(name));
        std::fs::write(&path, "cut").unwrap();
        let mut output = output(&path);
        let mut write = |line: &[u8], opens: bool| {
            output.reopen.store(opens, Ordering::Relaxed);
            output.write_all(line).unwrap();
            output.flush().unwrap();
        };
        write(b"started\n", false);
        append_to(&path).unwrap().write_all(b"cut").unwrap();
        write(b"same\n", true);
        std::fs::rename(&path, &renamed).unwrap();
        write(b"new\n", true);
        let written = [&renamed, &path].map(|path| std::fs::read_to_string(path).unwrap());
        assert_eq!(written, ["cut\nstarted\ncut\nsame\n", "new\n"]);
        // A file that may only be written: what this process remembers counts, unless the file is new.
        let only_written = |path: &Path| OpenOptions::new().append(true).create(true).open(path).unwrap();
        let [old, new] = [path, directory.path().join("log.2")].map(|path| only_written(&path));
        assert!(is_cut_off(&old, true) && !is_cut_off(&old, false) && !is_cut_off(&new, true));
    }

    #[test]
    fn a_file_that_cannot_be_opened_again_is_tried_again_after_a_pause() {
        // Scenario: a file and its directory are renamed, and it is opened again while there is no such directory; then there is
        // one. Expectation: lines are in the old file until the next attempt is due, or requested, and then in the new one.
        let top = tempfile::tempdir().unwrap();
        let [logs, old] = ["logs", "old"].map(|name| top.path().join(name));
        let path = logs.join("log");
        std::fs::create_dir(&logs).unwrap();
        let mut output = output(&path);
        let write = |output: &mut Output, line: &[u8]| {
            output.write_all(line).unwrap();
            output.flush().unwrap();
        };
        let later = Some(Instant::now() + Duration::from_secs(3600));
        for (number, is_requested) in [(0, false), (1, true)] {
            let old = old.with_extension(number.to_string());
            std::fs::rename(&logs, &old).unwrap();
            output.reopen.store(true, Ordering::Relaxed);
            write(&mut output, b"failed\n");
            assert!(output.next_attempt.is_some());
            std::fs::create_dir(&logs).unwrap();
            output.next_attempt = later;
            write(&mut output, b"waits\n");
            assert_eq!(output.next_attempt, later);
            if is_requested {
                output.reopen.store(true, Ordering::Relaxed);
            } else {
                output.next_attempt = Some(Instant::now());
            }
            write(&mut output, b"new\n");
            assert_eq!(output.next_attempt, None);
            let written = [&old.join("log"), &path].map(|path| std::fs::read_to_string(path).unwrap());
            let before = if number == 0 { "" } else { "new\n" };
            assert_eq!(written, [&format!("{before}failed\nwaits\n"), "new\n"]);
        }
    }

    fn drain(reader: &mut impl io::Read, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        let read = reader.read(&mut bytes).unwrap();
        bytes.truncate(read);
        bytes
    }

    #[test]
    fn only_what_can_be_appended_to_is_a_log() {
        // Scenario: a directory, a FIFO without a reader, a socket, a file in a directory that does not
        // exist, and a file that does not exist yet. Expectation: the last one is created, for its owner and
        // group; the others are errors that name the problem.
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for (name, kind) in [("fifo", FileType::Fifo), ("socket", FileType::Socket)] {
            mknodat(CWD, path(name), kind, Mode::RUSR, 0).unwrap();
        }
        for (name, problem) in [
            ("", "is a directory"),
            ("fifo", "is not a regular file"),
            ("socket", "is not a regular file"),
            ("none/log", "No such file"),
        ] {
            let refused = append_to(&path(name)).unwrap_err().to_string();
            assert!(refused.starts_with(problem), "{name}: {refused}");
        }
        append_to(&path("log")).unwrap();
        assert_eq!(path("log").metadata().unwrap().len(), 0);
    }
}
