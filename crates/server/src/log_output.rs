//! The log's output: stderr, without ever blocking for long on a slow reader.
//!
//! A pipe or socket whose reader has stopped would block the thread that logs next: a reload or a drain would
//! never end, and a core would serve nothing. Lines that do not fit, or cannot be written, are dropped and
//! counted, and the count is written as soon as there is room again. A thread and a queue would lose the last
//! lines of a crash.
//!
//! Others write to the same pipe: the access log, if its target is stderr too, and other processes. They may fill it after it
//! was found to have room, so a pipe is opened again, without waiting. The descriptor that they share keeps its flags.
//!
//! Where stderr is the journal, each line begins with its priority, which journald takes off (sd-daemon(3)).

use ringfetch_engine::sync::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// A pipe that is writable has room for at least a page (`PIPE_BUF`), a socket for three quarters of its
/// buffer.
const CHUNK_BYTES: usize = 4096;
/// How long a line waits for a reader that is briefly slow. After one was dropped, lines do not wait until
/// one is written again.
const ROOM_WAIT: Duration = Duration::from_millis(50);
/// How long the last words wait, for each [`CHUNK_BYTES`].
const LAST_WAIT: Duration = Duration::from_secs(1);

/// Whether a stream is the journal, by its device and inode, which the service manager tells in JOURNAL_STREAM
/// (systemd.exec(5)).
fn is_journal(stream: impl AsFd, told: Option<&OsStr>) -> bool {
    let Ok(stat) = rustix::fs::fstat(stream) else {
        return false;
    };
    told == Some(OsStr::new(&format!("{}:{}", stat.st_dev, stat.st_ino)))
}

/// A pipe, opened again: writes to what this returns do not wait. `None` for anything else, or if it cannot be opened.
fn opened_again(stream: impl AsFd) -> Option<OwnedFd> {
    let stat = rustix::fs::fstat(&stream).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Fifo {
        return None;
    }
    let path = format!("/proc/self/fd/{}", stream.as_fd().as_raw_fd());
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

/// Writes an error to stderr, for people: what fits if its reader has stopped, since the process is to end.
pub fn tell(text: &str) {
    let output = LogOutput::new(io::stderr(), false);
    let before = output.priority(Level::ERROR);
    let text = format!("ringfetchd: {text}").replace('\n', &format!("\n{before}"));
    output.write_chunks(format!("{before}{text}\n").as_bytes(), LAST_WAIT);
}

/// Those of syslog(3).
fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        Level::DEBUG | Level::TRACE => "<7>",
    }
}

/// Writes lines to `F` (stderr), or drops them.
#[derive(Debug)]
pub(crate) struct LogOutput<F> {
    to: F,
    /// The same, if it is a pipe.
    pipe: Option<OwnedFd>,
    json: bool,
    is_journal: bool,
    /// [`ROOM_WAIT`], except in a test whose reader may be late.
    room_wait: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    lines_dropped: u64,
    /// The last line was cut off: the next one starts with a line break.
    is_cut: bool,
}

impl<F: AsFd> LogOutput<F> {
    pub(crate) fn new(to: F, json: bool) -> Self {
        Self {
            is_journal: is_journal(&to, std::env::var_os("JOURNAL_STREAM").as_deref()),
            pipe: opened_again(&to),
            to,
            json,
            room_wait: ROOM_WAIT,
            state: Mutex::default(),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_ref().map_or_else(|| self.to.as_fd(), AsFd::as_fd)
    }

    /// Writes what fits; returns the number of bytes written.
    fn write_chunks(&self, line: &[u8], wait: Duration) -> usize {
        let fd = self.fd();
        let (mut written, mut until) = (0, Instant::now() + wait);
        while let Some(chunk) = line.get(written..).filter(|rest| !rest.is_empty()) {
            let chunk = chunk.get(..CHUNK_BYTES).unwrap_or(chunk);
            let mut room = [PollFd::new(&fd, PollFlags::OUT)];
            let Ok(left) = Timespec::try_from(until.saturating_duration_since(Instant::now())) else {
                break;
            };
            match poll(&mut room, Some(&left)) {
                Ok(0) => break,
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(_) => break,
            }
            match rustix::io::write(fd, chunk) {
                Ok(bytes) => (written, until) = (written + bytes, Instant::now() + wait),
                // Others filled the pipe first.
                Err(Errno::INTR | Errno::AGAIN) => {}
                // The disk is full, or the reader has ended: there is nobody to tell.
                Err(_) => break,
            }
        }
        written
    }

    fn priority(&self, level: Level) -> &'static str {
        if self.is_journal { priority(level) } else { "" }
    }

    fn write_line(&self, state: &mut State, level: Level, line: &[u8]) {
        let wait = if state.lines_dropped == 0 {
            self.room_wait
        } else {
            Duration::ZERO
        };
        let mut whole = Vec::new();
        if state.is_cut {
            whole.push(b'\n');
        }
        if state.lines_dropped > 0 {
            whole.extend_from_slice(self.notice(state.lines_dropped).as_bytes());
        }
        let before = whole.len();
        let priority = self.priority(level).as_bytes();
        // Outside of the journal the common case copies nothing.
        let bytes = if whole.is_empty() && priority.is_empty() {
            line
        } else {
            for line in line.split_inclusive(|byte| *byte == b'\n') {
                whole.extend_from_slice(priority);
                whole.extend_from_slice(line);
            }
            whole.as_slice()
        };
        let written = self.write_chunks(bytes, wait);
        if written >= before && before > 0 {
            state.lines_dropped = 0;
        }
        if written < bytes.len() {
            state.lines_dropped = state.lines_dropped.saturating_add(1);
        }
        if written > 0 {
            state.is_cut = bytes.get(written - 1) != Some(&b'\n');
        }
    }

    fn notice(&self, lines: u64) -> String {
        let message = "log lines were dropped: stderr did not take them";
        let (time, target) = (
            humantime::format_rfc3339_micros(SystemTime::now()),
            module_path!(),
        );
        let priority = self.priority(Level::WARN);
        if self.json {
            format!(
                "{priority}{{\"timestamp\":\"{time}\",\"level\":\"WARN\",\"message\":\"{message}\",\"lines\":{lines},\"target\":\"{target}\"}}\n",
            )
        } else {
            format!("{priority}{time}  WARN {target}: {message} lines={lines}\n")
        }
    }
}

/// The output while one line is written.
pub(crate) struct Line<'a, F> {
    output: &'a LogOutput<F>,
    level: Level,
    state: MutexGuard<'a, State>,
}

/// Never fails: nobody would hear of it, and the next line has to know what was written of this one.
impl<F: AsFd> io::Write for Line<'_, F> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.output.write_line(&mut self.state, self.level, line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a, F: AsFd + 'a> MakeWriter<'a> for LogOutput<F> {
    type Writer = Line<'a, F>;

    fn make_writer(&'a self) -> Self::Writer {
        Line {
            output: self,
            level: Level::INFO,
            state: lock(&self.state),
        }
    }

    fn make_writer_for(&'a self, of: &Metadata<'_>) -> Self::Writer {
        Line {
            level: *of.level(),
            ..self.make_writer()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};

    fn line(number: usize, length: usize) -> String {
        format!("{number:06} {}\n", "x".repeat(length))
    }

    fn write(output: &LogOutput<io::PipeWriter>, text: &str) {
        output.make_writer().write_all(text.as_bytes()).expect("a pipe");
    }

    #[test]
    fn a_pipe_that_nobody_reads_blocks_no_one_and_what_it_lost_is_counted() {
        // Scenario: 2,000 lines of 107 bytes for a pipe of 64 KiB, then room, then one more line.
        // Expectation: every write returns; whole lines in order arrive; then how many were lost; then the last line.
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let output = LogOutput::new(writer, false);
        (0..2000).for_each(|number| write(&output, &line(number, 99)));
        let mut first = vec![0; 16 * 4096];
        let taken = reader.read(&mut first).expect("a pipe");
        write(&output, &line(2000, 99));
        drop(output);
        let mut text = String::from_utf8(first.get(..taken).expect("bytes").to_vec()).expect("text");
        reader.read_to_string(&mut text).expect("a pipe");
        let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        let (last, before) = lines.split_last().expect("lines");
        assert_eq!(format!("{last}\n"), line(2000, 99));
        let (notice, whole) = before.split_last().expect("lines");
        let lost: usize = notice
            .rsplit_once("lines=")
            .and_then(|(_, count)| count.parse().ok())
            .expect("a count");
        assert!(lost > 0, "{notice}");
        // A line that was cut off counts as lost.
        let whole: Vec<_> = whole.iter().filter(|line| line.len() == 106).collect();
        assert_eq!(whole.len() + lost, 2000);
        assert!(
            whole
                .iter()
                .enumerate()
                .all(|(number, found)| format!("{found}\n") == line(number, 99))
        );
    }

    #[test]
    fn a_line_that_cannot_be_written_is_counted() {
        // Scenario: a full disk, and a pipe whose reader has ended. Expectation: the line counts as dropped.
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .expect("a device");
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        for to in [full.into(), OwnedFd::from(writer)] {
            let output = LogOutput::new(to, false);
            output.make_writer().write_all(b"lost\n").expect("no failure");
            assert_eq!(output.make_writer().state.lines_dropped, 1);
        }
    }

    #[test]
    fn what_others_write_to_the_pipe_makes_no_line_wait() {
        // Scenario: a pipe is full, as others make it after it was found to have room. Expectation: a write fails at once, and
        // the line counts as dropped; the descriptor that the others have still waits for room.
        let (_reader, writer) = io::pipe().expect("a pipe");
        let others = writer.try_clone().expect("a descriptor");
        let output = LogOutput::new(writer, false);
        let mut written = Ok(0);
        while written.is_ok() {
            written = rustix::io::write(output.fd(), &[b'x'; CHUNK_BYTES]);
        }
        assert_eq!(written, Err(Errno::AGAIN));
        write(&output, "lost\n");
        assert_eq!(output.make_writer().state.lines_dropped, 1);
        let flags = rustix::fs::fcntl_getfl(others).expect("flags");
        assert!(!flags.contains(OFlags::NONBLOCK), "{flags:?}");
    }

    #[test]
    fn the_count_of_dropped_lines_has_what_other_lines_have() {
        // Scenario: the line that counts, as JSON. Expectation: the members of every line, so that a collector takes it.
        let (_reader, writer) = io::pipe().expect("a pipe");
        let notice = LogOutput::new(writer, true).notice(3);
        let notice: serde_json::Value = serde_json::from_str(&notice).expect("JSON");
        let time = notice["timestamp"].as_str().expect("a time");
        humantime::parse_rfc3339(time).expect("a time");
        assert_eq!(notice["level"], "WARN");
        assert_eq!(notice["lines"], 3);
        assert!(notice["message"].is_string() && notice["target"].is_string());
    }

    #[test]
    fn each_line_of_an_event_has_its_priority_in_the_journal() {
        // Scenario: an event of two lines at ERROR. Expectation: the priority before both, since journald takes each for a
        // message of its own.
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut output = LogOutput::new(writer, false);
        output.is_journal = true;
        output.write_line(&mut State::default(), Level::ERROR, b"a\n  b\n");
        drop(output);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("a pipe");
        assert_eq!(text, "<3>a\n<3>  b\n");
    }

    #[test]
    fn lines_longer_than_a_pipe_arrive_whole_where_they_are_read() {
        // Scenario: lines of up to 300,000 bytes and a reader. Expectation: all bytes, in order.
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let reading = std::thread::spawn(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).expect("a pipe");
            text
        });
        let mut output = LogOutput::new(writer, true);
        output.room_wait = Duration::from_secs(30);
        let lines: Vec<String> = (0..20).map(|number| line(number, number * 15_000)).collect();
        lines.iter().for_each(|text| write(&output, text));
        drop(output);
        assert_eq!(reading.join().expect("a reader"), lines.concat());
    }
}
