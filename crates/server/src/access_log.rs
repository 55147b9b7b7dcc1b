//! The access log: a JSON line for each request, written when it has ended.
//!
//! Lines go through a bounded queue to one thread, which writes them. Lines that do not fit in the queue, or
//! cannot be written, are dropped and counted: no request waits for the log.

mod output;

use crate::config::AccessLogConfig;
use crate::record::{Facts, Times};
use output::Output;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, Opts, Registry};
use ringfetch_engine::sync::lock;
use serde::{Serialize, Serializer};
use serde_json::ser::Formatter;
use std::cell::RefCell;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};

/// Most lines in the queue. A line has about 400 bytes, and at most 2 KiB.
const QUEUE_LINES_MAX: usize = 8192;

/// Writes lines. Clones share the queue.
#[derive(Debug, Clone)]
pub struct AccessLog {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    queue: NonBlocking,
    /// One in this many requests is logged, besides slow and failed ones.
    sample: AtomicU32,
    /// Requests that take at least this long are always logged.
    slow_ns: AtomicU64,
    reopen: Arc<AtomicBool>,
}

/// On drop, writes what is queued, for at most a second.
#[derive(Debug)]
#[must_use = "without it nothing is written at the end"]
pub struct FlushGuard {
    _worker: WorkerGuard,
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
    /// The target cannot be opened, or a metric's name is already registered.
    pub fn start(config: &AccessLogConfig, registry: &Registry) -> io::Result<(Self, FlushGuard)> {
        let counters = Opts::new(
            "ringfetch_access_log_dropped_total",
            "Lines of the access log that were dropped: the queue was full, or they could not be written.",
        );
        let counters = IntCounterVec::new(counters, &["reason"]).map_err(io::Error::other)?;
        let reopen = Arc::new(AtomicBool::new(false));
        let unwritten = counters.with_label_values(&["write"]);
        let output = Output::open(&config.target, Arc::clone(&reopen), unwritten)?;
        let (queue, worker) = NonBlockingBuilder::default()
            .lossy(true)
            .buffered_lines_limit(QUEUE_LINES_MAX)
            .thread_name("rf-access-log")
            .finish(output);
        let dropped = Dropped {
            counters,
            queue: queue.error_counter(),
            reading: Mutex::new(()),
        };
        registry.register(Box::new(dropped)).map_err(io::Error::other)?;
        let log = Self {
            inner: Arc::new(Inner {
                queue,
                sample: AtomicU32::new(1),
                slow_ns: AtomicU64::new(u64::MAX),
                reopen,
            }),
        };
        log.set(config);
        Ok((log, FlushGuard { _worker: worker }))
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
        // Wakes the thread. The queue never fails.
        let _queued = self.inner.queue.clone().write_all(b"");
    }

    /// Logs a request, unless the sampling leaves it out.
    pub(crate) fn write(&self, facts: &Facts, times: Times) {
        thread_local! {
            static LINE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let inner = &*self.inner;
        let sample = inner.sample.load(Ordering::Relaxed);
        let is_slow = nanoseconds(times.duration) >= inner.slow_ns.load(Ordering::Relaxed);
        // At random, so that requests in a regular pattern are all sampled.
        if sample > 1 && !is_slow && !facts.is_error() && fastrand::u32(..sample) > 0 {
            return;
        }
        LINE.with_borrow_mut(|line| {
            line.clear();
            // Only text and numbers, so it cannot fail. The queue drops and counts lines that do not fit.
            let mut json = serde_json::Serializer::with_formatter(&mut *line, EscapedControls);
            if Line::new(facts, times).serialize(&mut json).is_ok() {
                line.push(b'\n');
                let _queued = inner.queue.clone().write_all(line);
            }
        });
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

/// Counts lines that were not written. Lines dropped by the queue are added at scrape time.
#[derive(Debug)]
struct Dropped {
    counters: IntCounterVec,
    queue: ErrorCounter,
    /// Serializes scrapes, which could otherwise add the same dropped lines twice.
    reading: Mutex<()>,
}

impl Collector for Dropped {
    fn desc(&self) -> Vec<&Desc> {
        self.counters.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let _one_at_a_time = lock(&self.reading);
        let counter = self.counters.with_label_values(&["queue"]);
        counter.inc_by((self.queue.dropped_lines() as u64).saturating_sub(counter.get()));
        self.counters.collect()
    }
}
