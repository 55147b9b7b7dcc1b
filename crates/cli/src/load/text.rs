//! A report for people: one table, and for a knee search a second one of its steps.

use super::args::Batch;
use super::report::{Cpu, Knee, LatencyMicros, Report};
use crate::outcome::Failure;
use crate::quantity::{grouped, latency, rate, size};
use crate::sink;
use crate::table::Table;
use ringfetch_command::part_file::PartFile;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// Writes the report to stdout, for people or as JSON.
pub(super) fn print(report: &Report, json: bool) -> Result<(), Failure> {
    sink::print(json, report, |out| write(report, out))
}

/// The file of `--hgrm`, opened before anything is sent: a path that cannot be written costs no run. What is there stays
/// until there is a result.
#[derive(Debug)]
pub(super) struct Hgrm(Option<PartFile>);

impl Hgrm {
    pub(super) fn create(path: Option<&Path>) -> Result<Self, Failure> {
        let part = path.map(|path| PartFile::beside(path).map_err(|error| failed(path, &error)));
        part.transpose().map(Self)
    }

    pub(super) fn write(self, report: &Report) -> Result<(), Failure> {
        let Some(mut part) = self.0 else { return Ok(()) };
        let path = part.path().to_owned();
        let mut text = Vec::new();
        report.latency().write_hgrm(&mut text)?;
        let written = part.write_all(&text).and_then(|()| part.finish());
        written.map_err(|error| failed(&path, &error))
    }
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::Failed(format!("--hgrm {}: {error}", path.display()))
}

fn write(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    if let Some(knee) = &report.knee {
        steps(knee).write(out)?;
        writeln!(out)?;
    }
    table(report).write(out)
}

fn steps(knee: &Knee) -> Table {
    let mut table = Table::new(&[0, 1, 2, 3, 4, 5, 6]);
    table.row("RATE/S REQUESTS/S READS/S P50 P99 ERRORS MISSED HELD".split(' '));
    for step in &knee.steps {
        let held = step.broken.as_ref().map(|why| format!("no: {why}"));
        table.row([
            rate(step.rate),
            rate(step.requests_per_second),
            rate(step.reads_per_second),
            or_dash(step.p50_us, |us| latency(us * 1e3)),
            or_dash(step.p99_us, |us| latency(us * 1e3)),
            grouped(step.errors),
            grouped(step.missed),
            held.unwrap_or_else(|| "yes".to_owned()),
        ]);
    }
    table
}

fn or_dash(figure: Option<f64>, text: impl Fn(f64) -> String) -> String {
    figure.map_or_else(|| "-".to_owned(), text)
}

/// A row: its name, and the arguments of `format!` for its text.
macro_rules! row {
    ($table:ident, $name:literal => $($text:tt)+) => {
        $table.row([$name.to_owned(), format!($($text)+)])
    };
}

fn table(report: &Report) -> Table {
    let mut table = Table::default();
    if let Some(knee) = &report.knee {
        let objective = knee.objective.join(", ");
        let held = match (knee.rate.map(rate), &knee.ended) {
            (Some(rate), None) => {
                format!("{rate} requests/s hold {objective}; the figures below are of that step")
            }
            (Some(rate), Some(why)) => {
                format!(
                    "at least {rate} requests/s hold {objective}, of which the figures below are; the search ended early: {why}"
                )
            }
            (None, None) => format!("none: no rate held {objective}"),
            (None, Some(why)) => format!("unknown: the search ended early: {why}"),
        };
        row!(table, "knee" => "{held}");
    }
    if report.instances > 1 {
        row!(table, "merged" => "{} results, taken to have run at the same time", report.instances);
    }
    let (what, batch) = (&report.what, Batch::new(report.batch_min, report.batch));
    row!(table, "dataset" => "{}: {what}, {}, batches of {batch}", report.dataset, report.pattern);
    for part in &report.mix {
        let (requests, reads) = (grouped(part.requests), grouped(part.reads));
        row!(table, "" => "{}: {requests} requests, {reads} reads", part.dataset);
    }
    let (connections, threads) = (report.connections, report.threads);
    let (connections, threads) = (plural(connections, "connection"), plural(threads, "thread"));
    row!(table, "load" => "{} loop, {} over {connections}, {threads}", report.loop_kind, report.transport);
    let (achieved, outstanding) = (report.outstanding_achieved, report.outstanding);
    row!(table, "outstanding" => "{achieved:.1} of {outstanding} requests, over time");
    row!(table, "measured" => "{:.2} s after {} s of warm-up", report.seconds, report.warmup_seconds);
    for (name, per_second, count) in [
        ("reads/s", report.reads_per_second, grouped(report.reads)),
        ("requests/s", report.requests_per_second, grouped(report.requests)),
        ("MB/s", report.megabytes_per_second, size(report.read_bytes)),
    ] {
        table.row([name, &format!("{}  ({count} in all)", rate(per_second))]);
    }
    open_loop(report, &mut table);
    row!(table, "latency/request" => "{}", latencies(report.latency_us.as_ref()));
    let mut errors = by_code(&report.request_errors, "requests ");
    errors.extend(by_code(&report.item_errors, "items "));
    row!(table, "errors" => "{}", list(&errors));
    if let Some(first) = &report.first_error {
        row!(table, "first error" => "{first}");
    }
    let wrong = match (&report.first_wrong, report.verified) {
        (Some(first), _) => format!("{}, the first in {first}", grouped(report.wrong_bytes)),
        (None, true) => "0: every byte was checked".to_owned(),
        (None, false) => "not checked (--verify)".to_owned(),
    };
    row!(table, "wrong bytes" => "{wrong}");
    row!(table, "own CPU" => "{}", cpu_text(&report.own_cpu));
    match &report.server_cpu {
        Some(cpu) => row!(table, "server CPU" => "{}", cpu_text(cpu)),
        None if report.server_unknown.is_some() => {}
        None => row!(table, "server CPU" => "not measured (--http, --server-pid)"),
    }
    if let Some(problem) = &report.server_unknown {
        row!(table, "server unknown" => "{problem}");
    }
    server(report, &mut table);
    table
}

/// How well the run kept up with the arrivals of an open loop.
fn open_loop(report: &Report, table: &mut Table) {
    let Some(open) = &report.open_loop else { return };
    let (from, to) = (rate(open.rate_from), rate(open.rate_to));
    let rates = if from == to {
        from
    } else {
        format!("{from} to {to}")
    };
    let (kind, arrivals) = (open.arrivals_kind, grouped(open.arrivals));
    row!(table, "intended" => "{rates} requests/s, {kind} arrivals ({arrivals} in all)");
    let (per_second, missed) = (rate(open.missed_per_second), grouped(open.missed));
    row!(table, "rate missed" => "{per_second} requests/s ({missed} never sent)");
    let (late, lateness) = (grouped(open.late), latencies(open.lateness_us.as_ref()));
    row!(table, "late" => "{late} found no free slot of their thread; sent after arrival by: {lateness}");
}

/// What the daemon counted.
fn server(report: &Report, table: &mut Table) {
    let Some(server) = &report.server else { return };
    let ratio = |ratio| or_dash(ratio, |ratio| format!("{ratio:.2}"));
    let (reads, bytes) = (grouped(server.device_reads), size(server.device_read_bytes));
    let (each, amplification) = (
        ratio(server.device_reads_per_read),
        ratio(server.read_amplification),
    );
    row!(table, "server's device" => "{reads} reads ({each} a read), {bytes} ({amplification} bytes read for one asked)");
    let (submissions, each) = (grouped(server.submissions), ratio(server.submissions_per_read));
    let depth = or_dash(server.queue_depth_mean, |depth| format!("{depth:.1}"));
    row!(table, "server's ring" => "{submissions} submissions ({each} a read), depth {depth} on average");
    row!(table, "server's reads" => "{}", list(&by_code(&server.reads, "")));
    row!(table, "server's refusals" => "{}", list(&by_code(&server.rejected, "")));
    if let Some(both) = &report.reads_in_all {
        let verdict = match both.client.cmp(&both.server) {
            std::cmp::Ordering::Equal => "the same",
            std::cmp::Ordering::Less => "others read too, or requests were abandoned",
            std::cmp::Ordering::Greater => {
                "the server reads a vector once that a score names twice, counts no empty object over HTTP, or was restarted"
            }
        };
        let (client, server) = (grouped(both.client), grouped(both.server));
        row!(table, "both counted" => "client {client}, server {server}: {verdict} (warm-up included)");
    }
}

/// Counts with their codes: `12 items NOT_FOUND`.
fn by_code(counts: &BTreeMap<String, u64>, what: &str) -> Vec<String> {
    let text = |(code, count): (&String, &u64)| format!("{} {what}{code}", grouped(*count));
    counts.iter().map(text).collect()
}

fn list(texts: &[String]) -> String {
    if texts.is_empty() {
        "none".to_owned()
    } else {
        texts.join(", ")
    }
}

fn latencies(us: Option<&LatencyMicros>) -> String {
    let Some(us) = us else {
        return "none: no request was answered".to_owned();
    };
    let [min, mean, p50, p90, p99, p99_9, max] =
        [us.min, us.mean, us.p50, us.p90, us.p99, us.p99_9, us.max].map(|us| latency(us * 1e3));
    format!("min {min}  avg {mean}  p50 {p50}  p90 {p90}  p99 {p99}  p99.9 {p99_9}  max {max}")
}

fn plural(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn cpu_text(cpu: &Cpu) -> String {
    let per_read = cpu.us_per_read.map(|us| format!(", {us:.2} us/read"));
    format!("{:.2} cores{}", cpu.cores, per_read.unwrap_or_default())
}
