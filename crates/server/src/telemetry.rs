//! Logs and the metrics registry.
//!
//! The log filter can be replaced at run time. The engine and the transports register their own metrics;
//! those of the process are here. There is no global registry.

use ringfetch_engine::sync::lock;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};
use tracing::Subscriber;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, fmt, reload};

use crate::config::{LogConfig, LogFormat};
use crate::log_output::LogOutput;
use ringfetch_engine::series::float;

type FilterHandle = reload::Handle<EnvFilter, tracing_subscriber::Registry>;

/// The log's filter and the metrics registry. Clones share them.
#[derive(Debug, Clone)]
pub struct Telemetry {
    handle: FilterHandle,
    filter: Arc<Mutex<String>>,
    registry: Registry,
}

/// Minimum interval between the lines of a [`LogLimiter`].
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Limits a log line that clients can cause, and counts what it stands for.
#[derive(Debug, Default)]
pub(crate) struct LogLimiter {
    /// Since the last line.
    unsaid: AtomicU64,
    last: Mutex<Option<Instant>>,
}

impl LogLimiter {
    /// Notes one more, and returns how many a line is due for, this one included.
    pub(crate) fn due(&self) -> Option<u64> {
        self.unsaid.fetch_add(1, Ordering::Relaxed);
        let mut last = lock(&self.last);
        let is_due = last.is_none_or(|last| last.elapsed() >= LOG_INTERVAL);
        if is_due {
            *last = Some(Instant::now());
        }
        drop(last);
        // With what other cores have counted meanwhile.
        is_due.then(|| self.unsaid.swap(0, Ordering::Relaxed))
    }
}

/// Why telemetry cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter does not parse.
    #[error("log.filter: {0}")]
    Filter(String),
    /// Another subscriber is already installed.
    #[error("logging is already set up: {0}")]
    Subscriber(#[from] tracing::subscriber::SetGlobalDefaultError),
    /// A metric's name is already registered.
    #[error("a metric cannot be registered: {0}")]
    Metrics(#[from] prometheus::Error),
}

impl Telemetry {
    /// Starts logging to stderr, and creates the registry with the process's metrics.
    ///
    /// # Errors
    /// See [`TelemetryError`]. Can be started once per process.
    pub fn start(log: &LogConfig) -> Result<Self, TelemetryError> {
        let (telemetry, subscriber) = Self::detached(log)?;
        tracing::subscriber::set_global_default(subscriber)?;
        Ok(telemetry)
    }

    /// The same without installing the subscriber.
    ///
    /// # Errors
    /// As [`Telemetry::start`], except for the subscriber.
    fn detached(log: &LogConfig) -> Result<(Self, impl Subscriber + Send + Sync + use<>), TelemetryError> {
        let filter = parse(&log.filter).map_err(TelemetryError::Filter)?;
        let (filter, handle) = reload::Layer::new(filter);
        let terminal = std::io::stderr().is_terminal();
        let text = match log.format {
            LogFormat::Auto => terminal,
            LogFormat::Text => true,
            LogFormat::Json => false,
        };
        let layer = fmt::layer().with_writer(LogOutput::new(std::io::stderr(), !text));
        let layer = if text {
            // https://no-color.org: any value but the empty one switches colours off.
            let colours = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
            layer.with_ansi(colours).boxed()
        } else {
            layer.json().flatten_event(true).boxed()
        };
        let subscriber = tracing_subscriber::registry().with(filter).with(layer);
        let registry = Registry::new();
        register_process(&registry)?;
        let filter = Arc::new(Mutex::new(log.filter.clone()));
        Ok((
            Self {
                handle,
                filter,
                registry,
            },
            subscriber,
        ))
    }

    /// The metrics registry.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Replaces the log filter until the next reload or start; returns the previous one.
    ///
    /// # Errors
    /// The filter is invalid; the current one remains.
    pub fn set_filter(&self, filter: &str) -> Result<String, String> {
        let parsed = parse(filter).map_err(|problem| {
            format!(
                "{filter:?} is not a filter: {problem}; write one like info or warn,ringfetch_engine=debug"
            )
        })?;
        // Locked during the reload, so that the stored filter is always the one in force.
        let mut current = lock(&self.filter);
        self.handle.reload(parsed).map_err(|error| error.to_string())?;
        Ok(std::mem::replace(&mut *current, filter.to_owned()))
    }
}

/// Parses a log filter. `EnvFilter` takes a word that is not a level as a target, logs everything of it and
/// nothing else: a mistyped level would silence the log. So a target must have a level here.
///
/// # Errors
/// What is wrong with the filter.
pub(crate) fn parse(filter: &str) -> Result<EnvFilter, String> {
    if filter.trim().is_empty() {
        return Err("it names no level".to_owned());
    }
    let mut most = LevelFilter::OFF;
    // Fields of a span may contain commas and words of their own.
    let words = filter.split(',').map(str::trim).filter(|_| !filter.contains('['));
    for word in words.filter(|word| !word.is_empty() && !word.contains('=')) {
        let level = word.parse::<LevelFilter>().map_err(|_no_level| {
            format!("{word} is not a level (off, error, warn, info, debug or trace); for a target, write {word}=debug")
        })?;
        most = most.max(level);
    }
    // h2 warns once for each connection that resets many requests, so any client could fill the log. Later
    // directives win.
    let quiet = if [LevelFilter::WARN, LevelFilter::INFO].contains(&most) {
        "h2=error,"
    } else {
        ""
    };
    // Patterns become complete automata, whose states may double with each group.
    let builder = EnvFilter::builder().with_regex(false);
    let parsed = builder.parse(format!("{quiet}{filter}"));
    parsed.map_err(|error| error.to_string())
}

fn register_process(registry: &Registry) -> Result<(), prometheus::Error> {
    registry.register(Box::new(Process::new()?))?;
    let build = IntGaugeVec::new(
        Opts::new("ringfetch_build_info", "Always 1; the version is in the label."),
        &["version"],
    )?;
    build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
    registry.register(Box::new(build))
}

/// The process's metrics, read when scraped. The collector of the prometheus crate counts only whole seconds
/// of CPU, too coarse to compute microseconds per read.
#[derive(Debug)]
struct Process {
    /// Serializes scrapes, which could otherwise add the same CPU time twice.
    reading: Mutex<()>,
    cpu_seconds: Counter,
    resident_bytes: IntGauge,
    virtual_bytes: IntGauge,
    open_fds: IntGauge,
    max_fds: Gauge,
    threads: IntGauge,
    start_seconds: Gauge,
    page_faults: IntCounterVec,
    /// Minor and major faults.
    page_faults_of: [IntCounter; 2],
}

impl Process {
    fn new() -> Result<Self, prometheus::Error> {
        let page_faults = IntCounterVec::new(
            Opts::new(
                "ringfetch_page_faults_total",
                "Page faults of the process: minor, served from memory; major, read from a device.",
            ),
            &["kind"],
        )?;
        let process = Self {
            reading: Mutex::new(()),
            cpu_seconds: Counter::new("process_cpu_seconds_total", "User and system CPU time, seconds.")?,
            resident_bytes: IntGauge::new("process_resident_memory_bytes", "Resident memory, bytes.")?,
            virtual_bytes: IntGauge::new("process_virtual_memory_bytes", "Address space, bytes.")?,
            open_fds: IntGauge::new("process_open_fds", "Open file descriptors.")?,
            max_fds: Gauge::new("process_max_fds", "Most file descriptors the process may open.")?,
            threads: IntGauge::new("process_threads", "Threads.")?,
            start_seconds: Gauge::new(
                "process_start_time_seconds",
                "When the process started, seconds since 1970.",
            )?,
            page_faults_of: ["minor", "major"].map(|kind| page_faults.with_label_values(&[kind])),
            page_faults,
        };
        // It is constant.
        process.start_seconds.set(started().unwrap_or_else(now));
        Ok(process)
    }

    fn parts(&self) -> [&dyn Collector; 8] {
        [
            &self.cpu_seconds,
            &self.resident_bytes,
            &self.virtual_bytes,
            &self.open_fds,
            &self.max_fds,
            &self.threads,
            &self.start_seconds,
            &self.page_faults,
        ]
    }

    fn read(&self) {
        let _one_at_a_time = lock(&self.reading);
        let spent = seconds(clock_gettime(ClockId::ProcessCPUTime));
        // A counter panics on a negative increment, which rounding might cause.
        let difference = spent - self.cpu_seconds.get();
        if difference > 0.0 {
            self.cpu_seconds.inc_by(difference);
        }
        let limit = getrlimit(Resource::Nofile).current;
        self.max_fds.set(limit.map_or(f64::INFINITY, float));
        if let Some(open) = open_descriptors() {
            self.open_fds.set(open);
        }
        let Ok(process) = procfs::process::Process::myself() else {
            return;
        };
        if let Ok(stat) = process.stat() {
            for (now, counter) in [stat.minflt, stat.majflt].into_iter().zip(&self.page_faults_of) {
                counter.inc_by(now.saturating_sub(counter.get()));
            }
            self.threads.set(stat.num_threads);
        }
        if let Ok(pages) = process.statm() {
            for (gauge, pages) in [
                (&self.virtual_bytes, pages.size),
                (&self.resident_bytes, pages.resident),
            ] {
                let bytes = pages.saturating_mul(rustix::param::page_size() as u64);
                gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
            }
        }
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.parts().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.read();
        self.parts().into_iter().flat_map(Collector::collect).collect()
    }
}

/// To list 40,000 descriptors takes some 100 ms. Since Linux 6.2 the directory's length is their number.
fn open_descriptors() -> Option<i64> {
    const DIRECTORY: &str = "/proc/self/fd";
    let length = std::fs::metadata(DIRECTORY).ok()?.len();
    if length > 0 {
        return i64::try_from(length).ok();
    }
    let entries = std::fs::read_dir(DIRECTORY).ok()?;
    // One of them is the descriptor of the directory that is being read.
    Some(signed(entries.count().saturating_sub(1)))
}

/// Start time of the process: boot time plus its clock ticks after boot.
fn started() -> Option<f64> {
    let ticks = procfs::process::Process::myself().ok()?.stat().ok()?.starttime;
    let since_boot = seconds(clock_gettime(ClockId::Boottime));
    let age = since_boot - float(ticks) / float(rustix::param::clock_ticks_per_second());
    Some(now() - age)
}

fn now() -> f64 {
    seconds(clock_gettime(ClockId::Realtime))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "53 bits of seconds and 30 of nanoseconds are more than enough"
)]
fn seconds(time: rustix::time::Timespec) -> f64 {
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn signed(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> LogConfig {
        LogConfig {
            filter: "info".to_owned(),
            format: LogFormat::Text,
        }
    }

    #[test]
    fn the_filter_is_replaced_and_the_previous_one_returned() {
        // Scenario: a valid filter, an invalid one, another valid one. Expectation: the invalid one is an
        // error that names it and changes nothing.
        let (telemetry, _subscriber) = Telemetry::detached(&log()).expect("telemetry");
        assert_eq!(telemetry.set_filter("debug"), Ok("info".to_owned()));
        let error = telemetry.set_filter("info,=what=").expect_err("no filter");
        assert!(error.contains("info,=what="), "{error}");
        assert_eq!(telemetry.set_filter("warn"), Ok("debug".to_owned()));
    }

    #[test]
    fn a_fields_value_in_a_filter_is_no_pattern() {
        // Scenario: values of a field that are no regular expression, and one whose automaton would have 2^64 states.
        // Expectation: each is a filter, at once.
        let pattern = format!("(0|1)*1{}", "(0|1)".repeat(64));
        for value in ["(", &pattern] {
            let parsed = parse(&format!("info,[{{field={value}}}]=debug"));
            assert!(parsed.is_ok(), "{parsed:?}");
        }
    }

    #[test]
    fn a_line_has_what_other_cores_count_meanwhile() {
        // Scenario: between a core's count and its line, another core counts one. Expectation: the line has both, and
        // none is left for the next.
        let limiter = LogLimiter::default();
        let unsaid = || limiter.unsaid.load(Ordering::Relaxed);
        let holds_up = limiter.last.lock().expect("the lock");
        let logged = std::thread::scope(|scope| {
            let core = scope.spawn(|| limiter.due());
            while unsaid() == 0 {
                std::thread::yield_now();
            }
            limiter.unsaid.fetch_add(1, Ordering::Relaxed);
            drop(holds_up);
            core.join().expect("no panic")
        });
        assert_eq!((logged, unsaid()), (Some(2), 0));
    }

    #[test]
    fn the_process_describes_itself() {
        // Scenario: one scrape of a fresh registry. Expectation: every documented process metric, with
        // plausible values for a running process.
        let (telemetry, _subscriber) = Telemetry::detached(&log()).expect("telemetry");
        let families = telemetry.registry().gather();
        let value = |name: &str| {
            let family = families.iter().find(|family| family.name() == name);
            let metric = &family.unwrap_or_else(|| panic!("{name} is missing")).get_metric()[0];
            metric
                .get_gauge()
                .get_value()
                .max(metric.get_counter().get_value())
        };
        assert!(value("process_cpu_seconds_total") > 0.0);
        assert!(value("process_resident_memory_bytes") > 4096.0);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_open_fds") >= 3.0);
        assert!(value("process_max_fds") >= value("process_open_fds"));
        assert!(value("process_threads") >= 1.0);
        // The first series is `major`, which may be 0; every process has minor faults.
        let faults = families
            .iter()
            .find(|family| family.name() == "ringfetch_page_faults_total");
        let faults = faults.expect("page faults").get_metric();
        let kinds: Vec<&str> = faults
            .iter()
            .map(|metric| metric.get_label()[0].value())
            .collect();
        assert_eq!(kinds, ["major", "minor"]);
        assert!(faults[1].get_counter().get_value() > 0.0);
        let age = now() - value("process_start_time_seconds");
        assert!((-1.0..3600.0).contains(&age), "{age}");
        assert!((value("ringfetch_build_info") - 1.0).abs() < f64::EPSILON);
    }
}
