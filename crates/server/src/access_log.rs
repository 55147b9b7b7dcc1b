//! The access log: a JSON line for each request, written when it has ended.
//!
//! Lines go through a bounded queue to one thread, which writes them. Lines that do not fit in the queue, or
//! cannot be written, are dropped and counted: no request waits for the log.

mod output;

use crate::config::AccessLogConfig;
use crate::rate::Rate;
use crate::record::{Facts, Times};
use output::Output;
use prometheus::{IntCounter, IntCounterVec, Opts, Registry};
use serde::{Serialize, Serializer};
use serde_json::ser::Formatter;
use std::cell::RefCell;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Builder;
use std::time::{Duration, SystemTime};

/// Most lines in the queue. A line has about 400 bytes, and at most 2 KiB.
const QUEUE_LINES_MAX: usize = 8192;

/// Beside a sample, most lines per second about requests that failed before anything was read: such a request costs its client
/// nothing, and the daemon refuses tens of thousands of them per second.
const REFUSALS_PER_S: u64 = 100;

/// How long the end of the process waits for what is queued.
const FLUSHED_WITHIN: Duration = Duration::from_secs(1);

/// Writes lines. Clones share the queue.
#[derive(Debug, Clone)]
pub struct AccessLog {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Lines; an empty one only wakes the thread.
    queue: SyncSender<Vec<u8>>,
    /// Lines that did not fit.
    overflowed: IntCounter,
    /// One in this many requests is logged, besides slow and failed ones.
    sample: AtomicU32,
    /// Limits failed ones of which nothing was read.
    refusals: Rate,
    /// Lines about those that were left out.
    over_rate: IntCounter,
    /// Requests that take at least this long are always logged.
    slow_ns: AtomicU64,
    reopen: Arc<AtomicBool>,
    is_ending: AtomicBool,
}

/// On drop, writes what is queued, for at most a second.
#[derive(Debug)]
#[must_use = "without it nothing is written at the end"]
pub struct FlushGuard {
    log: Arc<Inner>,
    /// Closed by the thread's end.
    ended: Receiver<()>,
}

impl Drop for FlushGuard {
    fn drop(&mut self) {
        self.log.is_ending.store(true, Ordering::Release);
        // If the queue is full, the thread is awake.
        let _awake = self.log.queue.try_send(Vec::new());
        let _written_or_late = self.ended.recv_timeout(FLUSHED_WITHIN);
    }
}

impl AccessLog {
    /// Checks whether the log can be opened. Creates nothing.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn check(config: &AccessLogConfig) -> io::Result<()> {
        output::check(&config.target)
    }

    /// Opens the log and starts the thread that writes it. Registers `ringfetch_access_log_dropped_total{reason}`.
    ///
    /// # Errors
    /// The target cannot be opened, the system refuses a thread, or a metric's name is already registered.
    pub fn start(config: &AccessLogConfig, registry: &Registry) -> io::Result<(Self, FlushGuard)> {
        let counters = Opts::new(
            "ringfetch_access_log_dropped_total",
            "Lines of the access log that were dropped: the queue was full, they could not be written, or beside a sample there were too many refusals a second.",
        );
        let counters = IntCounterVec::new(counters, &["reason"]).map_err(io::Error::other)?;
        let reopen = Arc::new(AtomicBool::new(false));
        let unwritten = counters.with_label_values(&["write"]);
        let output = Output::open(&config.target, Arc::clone(&reopen), unwritten)?;
        let (queue, lines) = sync_channel(QUEUE_LINES_MAX);
        let refusals = Rate::unlimited();
        refusals.set(REFUSALS_PER_S);
        let inner = Arc::new(Inner {
            queue,
            overflowed: counters.with_label_values(&["queue"]),
            sample: AtomicU32::new(1),
            refusals,
            over_rate: counters.with_label_values(&["rate"]),
            slow_ns: AtomicU64::new(u64::MAX),
            reopen,
            is_ending: AtomicBool::new(false),
        });
        registry.register(Box::new(counters)).map_err(io::Error::other)?;
        let (ends, ended) = sync_channel(0);
        let writing = Arc::clone(&inner);
        Builder::new().name("rf-access-log".to_owned()).spawn(move || {
            let _ends: SyncSender<()> = ends;
            write_lines(&lines, output, &writing.is_ending);
        })?;
        let log = Self {
            inner: Arc::clone(&inner),
        };
        log.set(config);
        Ok((log, FlushGuard { log: inner, ended }))
    }

    /// Applies these settings from now on. The target stays.
    pub fn set(&self, config: &AccessLogConfig) {
        let slow_ns = config.slow.map_or(u64::MAX, nanoseconds);
        self.inner.sample.store(config.sample.max(1), Ordering::Relaxed);
        self.inner.slow_ns.store(slow_ns, Ordering::Relaxed);
    }

    /// Opens the file by name again, before the next line: it may have been renamed.
    pub fn reopen(&self) {
        self.inner.reopen.store(true, Ordering::Relaxed);
        // If the queue is full, the thread is awake.
        let _awake = self.inner.queue.try_send(Vec::new());
    }

    /// Logs a request, unless the sampling leaves it out.
    pub(crate) fn write(&self, facts: &Facts, times: Times) {
        thread_local! {
            static LINE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let inner = &*self.inner;
        if inner.is_left_out(facts, times) {
            return;
        }
        LINE.with_borrow_mut(|line| {
            line.clear();
            // Only text and numbers, so it cannot fail.
            let mut json = serde_json::Serializer::with_formatter(&mut *line, EscapedControls);
            if Line::new(facts, times).serialize(&mut json).is_ok() {
                line.push(b'\n');
                if inner.queue.try_send(line.clone()).is_err() {
                    inner.overflowed.inc();
                }
            }
        });
    }
}

impl Inner {
    /// Whether the sampling leaves a request out. Counts it if it failed.
    fn is_left_out(&self, facts: &Facts, times: Times) -> bool {
        let sample = self.sample.load(Ordering::Relaxed);
        let is_slow = nanoseconds(times.duration) >= self.slow_ns.load(Ordering::Relaxed);
        if sample <= 1 || is_slow {
            return false;
        }
        let is_error = facts.is_error();
        let is_refusal = is_error && facts.bytes == 0 && facts.disk.is_zero();
        if is_error && (!is_refusal || self.refusals.take(1).is_ok()) {
            return false;
        }
        // At random, so that requests in a regular pattern are all sampled.
        let is_left_out = fastrand::u32(..sample) > 0;
        if is_left_out && is_refusal {
            self.over_rate.inc();
        }
        is_left_out
    }
}

/// The thread: writes lines until the process ends. It flushes whenever the queue is empty.
fn write_lines(lines: &Receiver<Vec<u8>>, mut output: Output, is_ending: &AtomicBool) {
    while let Ok(first) = lines.recv() {
        for line in std::iter::once(first).chain(lines.try_iter()) {
            // Failures are counted there.
            let _written = output.write_all(&line);
        }
        let _written = output.flush();
        if is_ending.load(Ordering::Acquire) {
            // Queued while the others were written.
            for line in lines.try_iter() {
                let _written = output.write_all(&line);
            }
            let _written = output.flush();
            return;
        }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// A line; its keys are public (docs/OPERATIONS.md).
#[derive(Debug, Serialize)]
struct Line<'a> {
    #[serde(serialize_with = "rfc3339")]
    time: SystemTime,
    request_id: &'a str,
    trace_id: Option<String>,
    principal: Option<&'a str>,
    peer: Option<IpAddr>,
    transport: &'a str,
    method: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<u64>,
    dataset: Option<&'a str>,
    items: u64,
    failed_items: u64,
    bytes: u64,
    sent_bytes: Option<u64>,
    queue_us: u64,
    disk_us: u64,
    send_us: Option<u64>,
    code: &'a str,
    duration_us: u64,
}

impl<'a> Line<'a> {
    fn new(facts: &'a Facts, times: Times) -> Self {
        Self {
            time: times.arrived,
            request_id: &facts.request_id,
            trace_id: facts.trace.map(|trace| format!("{:032x}", trace.trace_id)),
            principal: facts.principal.as_deref(),
            peer: facts.peer,
            transport: facts.transport,
            method: facts.method,
            batch: facts.batch,
            dataset: facts.dataset.as_deref(),
            items: facts.items,
            failed_items: facts.failed_items,
            bytes: facts.bytes,
            sent_bytes: facts.sent_bytes,
            queue_us: microseconds(facts.queue),
            disk_us: microseconds(facts.disk),
            send_us: times.send.map(microseconds),
            code: facts.code(),
            duration_us: microseconds(times.duration),
        }
    }
}

/// JSON with control characters, separators of lines and overrides of direction escaped: clients may ask for any name, and
/// terminals obey those.
struct EscapedControls;

impl Formatter for EscapedControls {
    fn write_string_fragment<W>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()>
    where
        W: ?Sized + io::Write,
    {
        let is_obeyed =
            |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        for part in fragment.split_inclusive(is_obeyed) {
            let text = part.trim_end_matches(is_obeyed);
            writer.write_all(text.as_bytes())?;
            for c in part.chars().filter(|c| is_obeyed(*c)) {
                write!(writer, "\\u{:04x}", u32::from(c))?;
            }
        }
        Ok(())
    }
}

fn rfc3339<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_micros(*time))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::AccessLogTarget;

    #[test]
    fn what_is_queued_while_the_log_is_written_is_not_lost_at_the_end() {
        // Scenario: the process ends just after a line was written, and two more were queued meanwhile. Expectation: all are in
        // the file.
        let file = tempfile::NamedTempFile::new().unwrap();
        let config = AccessLogConfig {
            target: AccessLogTarget::File(file.path().to_owned()),
            sample: 1,
            slow: None,
        };
        let (log, guard) = AccessLog::start(&config, &Registry::new()).unwrap();
        let written = || std::fs::read_to_string(file.path()).unwrap();
        let queue = |line: &str| log.inner.queue.try_send(line.into()).unwrap();
        queue("one\n");
        while written().is_empty() {
            std::thread::yield_now();
        }
        queue("two\n");
        queue("three\n");
        drop(guard);
        assert_eq!(written(), "one\ntwo\nthree\n");
    }
}
