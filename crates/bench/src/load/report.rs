//! What a run is told as: a table for people, the same numbers as JSON.

use super::cpu::Snapshot;
use super::recorder::Tally;
use super::workload::Workload;
use crate::args::{Load, PatternArg, TransportArg};
use crate::outcome::Failure;
use crate::quantity::{approximate, grouped, latency, rate, size};
use crate::sink::Sink;
use crate::table::Table;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Instant;

/// All numbers of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    dataset: String,
    what: String,
    pattern: &'static str,
    loop_kind: &'static str,
    transport: &'static str,
    connections: u32,
    threads: u32,
    batch: u32,
    choice_seed: u64,
    warmup_seconds: f64,
    /// From the window's begin to the end of the last request that began in it.
    seconds: f64,
    requests: u64,
    requests_per_second: f64,
    reads: u64,
    reads_per_second: f64,
    read_bytes: u64,
    megabytes_per_second: f64,
    /// Requests in flight: asked for, and averaged over time.
    outstanding: u32,
    outstanding_achieved: f64,
    /// Of answered requests; null if there were none.
    latency_us: Option<LatencyMicros>,
    errors: u64,
    request_errors: BTreeMap<&'static str, u64>,
    item_errors: BTreeMap<&'static str, u64>,
    first_error: Option<String>,
    verified: bool,
    wrong_bytes: u64,
    first_wrong: Option<String>,
    own_cpu: Cpu,
    /// Of the process that --server-pid names.
    server_cpu: Option<Cpu>,
}

#[derive(Debug, Serialize)]
struct LatencyMicros {
    min: f64,
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    p99_9: f64,
    max: f64,
}

#[derive(Debug, Serialize)]
struct Cpu {
    seconds: f64,
    /// Cores kept busy.
    cores: f64,
    /// Null if nothing was read.
    us_per_read: Option<f64>,
}

impl Report {
    pub(crate) fn new(
        args: &Load,
        threads: u32,
        workload: &Workload,
        measure_from: Instant,
        tally: Tally,
        before: &Snapshot,
        after: &Snapshot,
    ) -> Self {
        let end = tally.last_end.unwrap_or(measure_from);
        let seconds = end.saturating_duration_since(measure_from).as_secs_f64();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let cpu = |used: std::time::Duration| Cpu {
            seconds: used.as_secs_f64(),
            cores: per_second(used.as_secs_f64()),
            us_per_read: (tally.reads > 0).then(|| used.as_secs_f64() * 1e6 / approximate(tally.reads)),
        };
        let percentile = |percentile| tally.percentile(percentile).map(|ns| ns / 1e3);
        let latency_us = || {
            Some(LatencyMicros {
                min: approximate(tally.latency_min_ns) / 1e3,
                mean: tally.latency_mean_ns()? / 1e3,
                p50: percentile(50.0)?,
                p90: percentile(90.0)?,
                p99: percentile(99.0)?,
                p99_9: percentile(99.9)?,
                max: approximate(tally.latency_max_ns) / 1e3,
            })
        };
        Self {
            dataset: args.dataset.clone(),
            what: workload.what(),
            pattern: match args.pattern {
                PatternArg::Uniform => "uniform",
                PatternArg::Sequential => "sequential",
            },
            loop_kind: "closed",
            transport: match args.transport {
                TransportArg::Grpc => "grpc",
                TransportArg::Stream => "stream",
            },
            connections: args.connections,
            threads,
            batch: args.batch,
            choice_seed: args.choice_seed,
            warmup_seconds: args.warmup_seconds.as_secs_f64(),
            seconds,
            requests: tally.requests,
            requests_per_second: per_second(approximate(tally.requests)),
            reads: tally.reads,
            reads_per_second: per_second(approximate(tally.reads)),
            read_bytes: tally.bytes,
            megabytes_per_second: per_second(approximate(tally.bytes) / 1e6),
            outstanding: args.outstanding,
            // Little's law, exactly: time in flight summed over requests, by time.
            outstanding_achieved: per_second(tally.in_flight.as_secs_f64()),
            latency_us: latency_us(),
            errors: tally.errors(),
            own_cpu: cpu(after.own_since(before)),
            server_cpu: after.server_since(before).map(cpu),
            request_errors: tally.request_errors,
            item_errors: tally.item_errors,
            first_error: tally.first_error,
            verified: workload.verifies(),
            wrong_bytes: tally.wrong_bytes,
            first_wrong: tally.first_wrong,
        }
    }

    pub(crate) fn print(&self, json: bool) -> Result<(), Failure> {
        let mut out = Sink::open(None)?;
        if json {
            serde_json::to_writer_pretty(&mut out, self)?;
            writeln!(out)?;
        } else {
            self.table().write(&mut out)?;
        }
        out.finish()
    }

    fn table(&self) -> Table {
        let mut table = Table::default();
        let mut row = |name: &str, text: String| table.row([name.to_owned(), text]);
        row(
            "dataset",
            format!(
                "{}: {}, {}, batches of {}",
                self.dataset, self.what, self.pattern, self.batch
            ),
        );
        let via = format!(
            "{} over {}",
            self.transport,
            counted(self.connections, "connection")
        );
        row(
            "load",
            format!("closed loop, {via}, {}", counted(self.threads, "thread")),
        );
        row(
            "outstanding",
            format!(
                "{:.1} of {} requests, over time",
                self.outstanding_achieved, self.outstanding
            ),
        );
        row(
            "measured",
            format!("{:.2} s after {} s of warm-up", self.seconds, self.warmup_seconds),
        );
        row(
            "reads/s",
            format!(
                "{}  ({} in all)",
                rate(self.reads_per_second),
                grouped(self.reads)
            ),
        );
        row(
            "requests/s",
            format!(
                "{}  ({} in all)",
                rate(self.requests_per_second),
                grouped(self.requests)
            ),
        );
        row(
            "MB/s",
            format!(
                "{}  ({} in all)",
                rate(self.megabytes_per_second),
                size(self.read_bytes)
            ),
        );
        let latencies = self.latency_us.as_ref().map_or_else(
            || "none: no request was answered".to_owned(),
            |us| {
                let values = [
                    ("min", us.min),
                    ("avg", us.mean),
                    ("p50", us.p50),
                    ("p90", us.p90),
                    ("p99", us.p99),
                    ("p99.9", us.p99_9),
                    ("max", us.max),
                ];
                values
                    .map(|(name, us)| format!("{name} {}", latency(us * 1e3)))
                    .join("  ")
            },
        );
        row("latency/request", latencies);
        let codes = |what, errors: &BTreeMap<&'static str, u64>| {
            errors
                .iter()
                .map(|(code, count)| format!("{} {what} {code}", grouped(*count)))
                .collect::<Vec<_>>()
        };
        let errors = [
            codes("requests", &self.request_errors),
            codes("items", &self.item_errors),
        ]
        .concat();
        row(
            "errors",
            if errors.is_empty() {
                "none".to_owned()
            } else {
                errors.join(", ")
            },
        );
        if let Some(first) = &self.first_error {
            row("first error", first.clone());
        }
        let wrong = match (&self.first_wrong, self.verified) {
            (Some(first), _) => format!("{}, the first in {first}", grouped(self.wrong_bytes)),
            (None, true) => "0: every byte was checked".to_owned(),
            (None, false) => "not checked (--verify)".to_owned(),
        };
        row("wrong bytes", wrong);
        row("own CPU", cpu_text(&self.own_cpu));
        row(
            "server CPU",
            self.server_cpu
                .as_ref()
                .map_or_else(|| "not measured (--server-pid)".to_owned(), cpu_text),
        );
        table
    }

    /// Whether the run was one: anything read, and everything that was read right.
    pub(crate) fn outcome(&self) -> Result<(), Failure> {
        if self.wrong_bytes > 0 {
            return Err(Failure::Failed(format!(
                "{} wrong bytes",
                grouped(self.wrong_bytes)
            )));
        }
        if self.reads > 0 {
            return Ok(());
        }
        let why = self
            .first_error
            .as_deref()
            .unwrap_or("no request was made in the window");
        Err(Failure::Failed(format!("nothing was read: {why}")))
    }
}

fn counted(count: u32, what: &str) -> String {
    if count == 1 {
        format!("1 {what}")
    } else {
        format!("{count} {what}s")
    }
}

fn cpu_text(cpu: &Cpu) -> String {
    let per_read = cpu
        .us_per_read
        .map_or_else(String::new, |us| format!(", {us:.2} us/read"));
    format!("{:.2} cores{per_read}", cpu.cores)
}
