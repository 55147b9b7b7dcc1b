//! The daemon's own counters, read from its metrics page before and after: reads from the device, system
//! calls, refusals, and its CPU time, even if it runs on another machine. They count all load, not only this
//! run's.

use super::transport::{Credentials, RequestError, get_text};
use crate::quantity::approximate;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// A longer page is not the daemon's.
const PAGE_BYTES_MAX: usize = 16 << 20;

/// One reading of the page: every sample by its name and labels.
#[derive(Debug, Clone)]
pub(crate) struct Page {
    samples: Vec<Sample>,
    /// When it was read.
    at: Instant,
}

#[derive(Debug, Clone, PartialEq)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Page {
    /// Reads `/metrics` of the daemon.
    pub(super) async fn read(
        http: &str,
        credentials: &Credentials,
        timeout: Duration,
    ) -> Result<Self, RequestError> {
        let text = get_text(http, credentials, "/metrics", timeout).await?;
        if text.len() > PAGE_BYTES_MAX {
            return Err(RequestError::protocol("the metrics page is too long"));
        }
        let page = Self::parse(&text);
        let known = page.named("ringfetch_build_info").next().is_some();
        known
            .then_some(page)
            .ok_or_else(|| RequestError::protocol("its /metrics is not ringfetchd's"))
    }

    /// Parses Prometheus's text format 0.0.4. Skips lines that are not samples.
    fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let (samples, at) = (lines.filter_map(parse_sample).collect(), Instant::now());
        Self { samples, at }
    }

    fn named(&self, name: &str) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.name == name)
    }

    /// The sum over all samples of a name.
    fn sum(&self, name: &str) -> f64 {
        // Starts from zero: the sum of no floats is -0.
        self.named(name).fold(0.0, |sum, sample| sum + sample.value)
    }

    /// The same, grouped by the value of one label.
    fn by(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for sample in self.named(name) {
            if let Some((_, value)) = sample.labels.iter().find(|(other, _)| other == label) {
                *sums.entry(value.clone()).or_default() += sample.value;
            }
        }
        sums
    }
}

/// `name{label="value",...} 1.5`, with `\\`, `\"` and `\n` escaped in values as in JSON.
fn parse_sample(line: &str) -> Option<Sample> {
    let (name, mut rest) = line.split_at(line.find(['{', ' '])?);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, quoted) = rest.split_once('=')?;
            let mut values = serde_json::Deserializer::from_str(quoted).into_iter::<String>();
            labels.push((label.to_owned(), values.next()?.ok()?));
            rest = quoted.get(values.byte_offset()..)?.trim_start_matches([',', ' ']);
        }
        rest = &rest[1..];
    }
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    let name = name.to_owned();
    Some(Sample { name, labels, value })
}

/// What the daemon counted between two readings, for all clients.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counted {
    /// Time between the two readings: about the window.
    pub(crate) seconds: f64,
    /// Reads answered, by result.
    pub(crate) reads: BTreeMap<String, u64>,
    pub(crate) read_bytes: u64,
    /// After merging and aligning, summed over shards.
    pub(crate) device_reads: u64,
    pub(crate) device_read_bytes: u64,
    /// System calls that submitted them.
    pub(crate) submissions: u64,
    /// Requests refused, by reason.
    pub(crate) rejected: BTreeMap<String, u64>,
    pub(crate) cpu_seconds: f64,
    /// Ratios; null if nothing was counted.
    pub(crate) device_reads_per_read: Option<f64>,
    /// Bytes read from the device per byte requested.
    pub(crate) read_amplification: Option<f64>,
    pub(crate) submissions_per_read: Option<f64>,
    /// Mean over reads of the number in flight when each was submitted.
    pub(crate) queue_depth_mean: Option<f64>,
}

impl Counted {
    /// # Errors
    /// The daemon was restarted in between, so its counters began at zero.
    pub(crate) fn between(before: &Page, after: &Page) -> Result<Self, String> {
        let [was, is] = [before, after].map(|page| page.sum("process_start_time_seconds"));
        if was.to_bits() != is.to_bits() {
            let meant = "what it counted before is lost";
            return Err(format!("the daemon was restarted while it was measured: {meant}"));
        }
        let grown = |name: &str| (after.sum(name) - before.sum(name)).max(0.0);
        let grown_by = |name: &str, label: &str| {
            let (old, new) = (before.by(name, label), after.by(name, label).into_iter());
            let counts = new.map(|(value, count)| {
                let count = whole(count - old.get(&value).copied().unwrap_or(0.0));
                (value, count)
            });
            counts
                .filter(|(_, count)| *count > 0)
                .collect::<BTreeMap<String, u64>>()
        };
        let ratio = |part: f64, whole: f64| (whole > 0.0).then(|| part / whole);
        let reads = grown_by("ringfetch_reads_total", "result");
        let read_count = approximate(reads.values().sum());
        let bytes = grown("ringfetch_read_bytes_total");
        let device_bytes = grown("ringfetch_device_read_bytes_total");
        let device_reads = grown("ringfetch_device_reads_total");
        let submissions = grown("ringfetch_submissions_total");
        let [depths, depth_count] =
            ["sum", "count"].map(|part| grown(&format!("ringfetch_queue_depth_{part}")));
        Ok(Self {
            seconds: after.at.saturating_duration_since(before.at).as_secs_f64(),
            reads,
            read_bytes: whole(bytes),
            device_reads: whole(device_reads),
            device_read_bytes: whole(device_bytes),
            submissions: whole(submissions),
            rejected: grown_by("ringfetch_rejected_total", "reason"),
            cpu_seconds: grown("process_cpu_seconds_total"),
            device_reads_per_read: ratio(device_reads, read_count),
            read_amplification: ratio(device_bytes, bytes),
            submissions_per_read: ratio(submissions, read_count),
            queue_depth_mean: ratio(depths, depth_count),
        })
    }

    /// CPU per read from the daemon's figures alone: both cover the same time and all clients.
    pub(crate) fn cpu_us_per_read(&self) -> Option<f64> {
        let reads: u64 = self.reads.values().sum();
        (reads > 0).then(|| self.cpu_seconds * 1e6 / approximate(reads))
    }

    /// Reads answered with their bytes.
    pub(crate) fn reads_ok(&self) -> u64 {
        self.reads.get("ok").copied().unwrap_or(0)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a counter below 2^53, and not negative"
)]
fn whole(count: f64) -> u64 {
    count.round().max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = r#"# HELP ringfetch_reads_total Items answered, by result.
# TYPE ringfetch_reads_total counter
ringfetch_reads_total{dataset="a",backend="uring",result="ok"} 100
ringfetch_reads_total{dataset="a",backend="uring",result="eio"} 3
ringfetch_device_reads_total{shard="0"} 10
process_cpu_seconds_total 1.5
"#;
    const AFTER: &str = r#"ringfetch_backend_info{backend="mmap",reason="said \"no\", a } \\ b\n"} 1
ringfetch_reads_total{dataset="a",backend="uring",result="ok"} 200
ringfetch_reads_total{dataset="b, {c}",backend="uring",result="ok"} 100 1700000000
ringfetch_reads_total{dataset="a",backend="uring",result="eio"} 3
ringfetch_read_bytes_total{dataset="a"} 4096
ringfetch_device_reads_total{shard="0"} 60
ringfetch_device_reads_total{shard="1"} 1e2
ringfetch_device_read_bytes_total{shard="1"} 8192
ringfetch_queue_depth_bucket{shard="0",le="+Inf"} 4
ringfetch_queue_depth_sum{shard="0"} 32
ringfetch_queue_depth_count{shard="0"} 4
process_cpu_seconds_total 1.75
this is no sample
broken{x="y 1
"#;

    #[test]
    fn what_grew_between_two_pages_is_counted() {
        let (before, after) = (Page::parse(BEFORE), Page::parse(AFTER));
        assert_eq!(after.samples[0].labels[1].1, "said \"no\", a } \\ b\n");
        let counted = Counted::between(&before, &after).unwrap();
        assert_eq!(counted.reads, BTreeMap::from([("ok".to_owned(), 200)]));
        assert_eq!(counted.reads_ok(), 200);
        assert_eq!((counted.device_reads, counted.read_bytes), (150, 4096));
        assert!((counted.cpu_seconds - 0.25).abs() < 1e-9);
        assert!((counted.cpu_us_per_read().unwrap() - 1250.0).abs() < 1e-6);
        assert_eq!(counted.device_reads_per_read, Some(0.75));
        assert_eq!(counted.read_amplification, Some(2.0));
        assert_eq!(counted.queue_depth_mean, Some(8.0));
        assert_eq!(counted.submissions_per_read, Some(0.0));
        let nothing = Counted::between(&after, &after).unwrap();
        assert_eq!((nothing.reads_ok(), nothing.device_reads_per_read), (0, None));
    }

    #[test]
    fn counters_of_a_daemon_that_was_started_anew_are_none() {
        // Scenario: the second page is from a later start, with smaller counts. Expected: an error, no
        // figures.
        let at = |start: &str| Page::parse(&format!("{BEFORE}process_start_time_seconds {start}\n"));
        assert!(Counted::between(&at("1700000000.25"), &at("1700000000.25")).is_ok());
        let problem = Counted::between(&at("1700000000.25"), &at("1700000009.5")).unwrap_err();
        assert!(problem.contains("restarted"), "{problem}");
    }
}
