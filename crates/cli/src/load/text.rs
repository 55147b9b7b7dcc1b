//! A report for people: one table, and for a search for the knee a second one of its steps.

use super::report::{Cpu, Knee, LatencyMicros, Report};
use crate::outcome::Failure;
use crate::quantity::{grouped, latency, rate, size};
use crate::sink::{Sink, print_json};
use crate::table::Table;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// Writes the report to stdout, for people or as JSON, and the latencies to the files that were asked for.
pub(super) fn publish(
    report: &Report,
    json: bool,
    hgrm: Option<&Path>,
    hdr: Option<&Path>,
) -> Result<(), Failure> {
    let named = |flag: &str, path: &Path, written: io::Result<()>| {
        written.map_err(|error| Failure::Failed(format!("{flag} {}: {error}", path.display())))
    };
    if let Some(path) = hgrm {
        let mut text = Vec::new();
        report.latency().write_hgrm(&mut text)?;
        named("--hgrm", path, std::fs::write(path, text))?;
    }
    if let Some(path) = hdr {
        let text = report.latency_histogram.clone().unwrap_or_default() + "\n";
        named("--hdr", path, std::fs::write(path, text))?;
    }
    let mut out = Sink::open(None)?;
    if json {
        print_json(&mut out, report)?;
    } else {
        write(report, &mut out)?;
    }
    out.finish()
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
    table.row([
        "RATE/S",
        "REQUESTS/S",
        "READS/S",
        "P50",
        "P99",
        "ERRORS",
        "MISSED",
        "HELD",
    ]);
    for step in &knee.steps {
        let us = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), |us| latency(us * 1e3));
        table.row([
            rate(step.rate),
            rate(step.requests_per_second),
            rate(step.reads_per_second),
            us(step.p50_us),
            us(step.p99_us),
            grouped(step.errors),
            grouped(step.missed),
            step.broken
                .as_ref()
                .map_or_else(|| "yes".to_owned(), |why| format!("no: {why}")),
        ]);
    }
    table
}

fn table(report: &Report) -> Table {
    let mut table = Table::default();
    let mut row = |name: &str, text: String| table.row([name.to_owned(), text]);
    if let Some(knee) = &report.knee {
        let objective = knee.objective.join(", ");
        row(
            "knee",
            knee.rate.map_or_else(
                || format!("none: no rate held {objective}"),
                |knee| {
                    format!(
                        "{} requests/s hold {objective}; the figures below are of that step",
                        rate(knee)
                    )
                },
            ),
        );
    }
    if report.instances > 1 {
        row(
            "merged",
            format!("{} results, taken to have run at the same time", report.instances),
        );
    }
    let batch = if report.batch_min == report.batch {
        report.batch.to_string()
    } else {
        format!("{}..{}", report.batch_min, report.batch)
    };
    row(
        "dataset",
        format!(
            "{}: {}, {}, batches of {batch}",
            report.dataset, report.what, report.pattern
        ),
    );
    for part in &report.mix {
        row(
            "",
            format!(
                "{}: {} requests, {} reads",
                part.dataset,
                grouped(part.requests),
                grouped(part.reads)
            ),
        );
    }
    let via = format!(
        "{} over {}",
        report.transport,
        counted(report.connections, "connection")
    );
    row(
        "load",
        format!(
            "{} loop, {via}, {}",
            report.loop_kind,
            counted(report.threads, "thread")
        ),
    );
    row(
        "outstanding",
        format!(
            "{:.1} of {} requests, over time",
            report.outstanding_achieved, report.outstanding
        ),
    );
    row(
        "measured",
        format!(
            "{:.2} s after {} s of warm-up",
            report.seconds, report.warmup_seconds
        ),
    );
    let in_all = |per_second: f64, count: String| format!("{}  ({count} in all)", rate(per_second));
    row("reads/s", in_all(report.reads_per_second, grouped(report.reads)));
    row(
        "requests/s",
        in_all(report.requests_per_second, grouped(report.requests)),
    );
    row(
        "MB/s",
        in_all(report.megabytes_per_second, size(report.read_bytes)),
    );
    if let Some(open) = &report.open_loop {
        #[expect(
            clippy::float_cmp,
            reason = "both are the same argument, unless there is a ramp"
        )]
        let rates = if open.rate_from == open.rate_to {
            rate(open.rate_from)
        } else {
            format!("{} to {}", rate(open.rate_from), rate(open.rate_to))
        };
        let kind = match open.arrivals_kind {
            ringfetch_pace::Arrivals::Constant => "constant",
            ringfetch_pace::Arrivals::Poisson => "Poisson",
        };
        row(
            "intended",
            format!(
                "{rates} requests/s, {kind} arrivals ({} in all)",
                grouped(open.arrivals)
            ),
        );
        row(
            "rate missed",
            format!(
                "{} requests/s ({} never sent)",
                rate(open.missed_per_second),
                grouped(open.missed)
            ),
        );
        row(
            "late",
            format!(
                "{} found all {} in flight; sent after arrival by: {}",
                grouped(open.late),
                report.outstanding,
                latencies(open.lateness_us.as_ref())
            ),
        );
    }
    row("latency/request", latencies(report.latency_us.as_ref()));
    row("errors", errors(report));
    if let Some(first) = &report.first_error {
        row("first error", first.clone());
    }
    let wrong = match (&report.first_wrong, report.verified) {
        (Some(first), _) => format!("{}, the first in {first}", grouped(report.wrong_bytes)),
        (None, true) => "0: every byte was checked".to_owned(),
        (None, false) => "not checked (--verify)".to_owned(),
    };
    row("wrong bytes", wrong);
    row("own CPU", cpu_text(&report.own_cpu));
    let no_cpu = || "not measured (--http, --server-pid)".to_owned();
    row(
        "server CPU",
        report.server_cpu.as_ref().map_or_else(no_cpu, cpu_text),
    );
    server(report, &mut row);
    table
}

/// What the daemon counted.
fn server(report: &Report, row: &mut impl FnMut(&str, String)) {
    let Some(server) = &report.server else { return };
    let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
    row(
        "server's device",
        format!(
            "{} reads ({} a read), {} ({} bytes read for one asked)",
            grouped(server.device_reads),
            ratio(server.device_reads_per_read),
            size(server.device_read_bytes),
            ratio(server.read_amplification)
        ),
    );
    row(
        "server's ring",
        format!(
            "{} submissions ({} a read), depth {} on average",
            grouped(server.submissions),
            ratio(server.submissions_per_read),
            server
                .queue_depth_mean
                .map_or_else(|| "-".to_owned(), |depth| format!("{depth:.1}"))
        ),
    );
    let by = |counts: &BTreeMap<String, u64>| {
        let list: Vec<String> = counts
            .iter()
            .map(|(name, count)| format!("{} {name}", grouped(*count)))
            .collect();
        if list.is_empty() {
            "none".to_owned()
        } else {
            list.join(", ")
        }
    };
    row("server's reads", by(&server.reads));
    row("server's refusals", by(&server.rejected));
    if let Some(both) = &report.reads_in_all {
        let verdict = match both.client.cmp(&both.server) {
            std::cmp::Ordering::Equal => "the same",
            std::cmp::Ordering::Less => "others read too, or answers were given up",
            std::cmp::Ordering::Greater => {
                "the server counts no read for an empty object by HTTP, or began anew"
            }
        };
        row(
            "both counted",
            format!(
                "client {}, server {}: {verdict} (warm-up included)",
                grouped(both.client),
                grouped(both.server)
            ),
        );
    }
}

fn errors(report: &Report) -> String {
    let codes = |what, errors: &BTreeMap<String, u64>| {
        errors
            .iter()
            .map(|(code, count)| format!("{} {what} {code}", grouped(*count)))
            .collect::<Vec<_>>()
    };
    let errors = [
        codes("requests", &report.request_errors),
        codes("items", &report.item_errors),
    ]
    .concat();
    if errors.is_empty() {
        "none".to_owned()
    } else {
        errors.join(", ")
    }
}

fn latencies(us: Option<&LatencyMicros>) -> String {
    us.map_or_else(
        || "none: no request was answered".to_owned(),
        |us| {
            [
                ("min", us.min),
                ("avg", us.mean),
                ("p50", us.p50),
                ("p90", us.p90),
                ("p99", us.p99),
                ("p99.9", us.p99_9),
                ("max", us.max),
            ]
            .map(|(name, us)| format!("{name} {}", latency(us * 1e3)))
            .join("  ")
        },
    )
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
