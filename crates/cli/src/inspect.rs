//! `ringfetch datasets`, `status` and `log-level`: what the daemon reports about itself, as tables or JSON.

use crate::args::Global;
use crate::daemon::{admin, admin_failure, change_failure, client, grpc_failure};
use crate::outcome::Failure;
use crate::quantity::{grouped, latency, rate, size};
use crate::reload;
use crate::sink;
use crate::table::Table;
use ringfetch_client::{Backend, Dataset, Dtype, Kind, ReadPath, ShardStatus, Status};
use serde_json::json;
use std::io::Write as _;
use std::time::Duration;

pub(crate) async fn datasets(global: &Global) -> Result<(), Failure> {
    let datasets = client(global)?
        .list_datasets()
        .await
        .map_err(grpc_failure(global))?;
    sink::print(global.json, &json!({ "datasets": datasets }), |out| {
        if datasets.is_empty() {
            return writeln!(out, "The daemon serves no datasets, or none that you may read.");
        }
        dataset_table(datasets.iter().map(|dataset| (dataset, None))).write(out)
    })
}

pub(crate) async fn log_level(global: &Global, filter: &str) -> Result<(), Failure> {
    let previous = admin(global)?.set_log_level(filter).await;
    let look = "run it again: that changes nothing if it was";
    let previous = previous.map_err(change_failure(global, look))?;
    let value = json!({ "filter": filter, "previous": previous });
    sink::print(global.json, &value, |out| {
        writeln!(out, "log filter: {filter} (was: {previous})")
    })
}

pub(crate) async fn status(global: &Global) -> Result<(), Failure> {
    let status = admin(global)?.status().await.map_err(admin_failure(global))?;
    sink::print(global.json, &status, |out| {
        status_table(&status).write(out)?;
        if !status.shards.is_empty() {
            writeln!(out)?;
            shard_table(&status.shards).write(out)?;
        }
        if !status.datasets.is_empty() {
            writeln!(out)?;
            let datasets = status.datasets.iter();
            let rows = datasets.filter_map(|each| Some((each.dataset.as_ref()?, each.read_path.as_ref())));
            dataset_table(rows).write(out)?;
        }
        Ok(())
    })
}

/// Datasets, and how they are read, if known.
fn dataset_table<'a>(datasets: impl Iterator<Item = (&'a Dataset, Option<&'a ReadPath>)>) -> Table {
    let mut table = Table::new(&[2, 3]);
    let mut rows = datasets.peekable();
    let paths = rows.peek().is_some_and(|(_, path)| path.is_some());
    let head = ["NAME", "KIND", "COUNT", "SIZE", "SHAPE", "BACKEND", "DIRECT"];
    table.row(head.into_iter().take(if paths { 7 } else { 5 }));
    for (dataset, path) in rows {
        let objects = dataset.kind == Kind::Objects;
        let shape = match &dataset.vectors {
            Some(shape) => {
                let dtype = shape.dtype.map_or("unknown", Dtype::as_str);
                format!("{} x {dtype} ({})", shape.dim, shape.layout)
            }
            None if dataset.block_bytes > 0 => format!("{} bytes", dataset.block_bytes),
            None => "-".to_owned(),
        };
        let direct = path.map(|path| match path.direct_io_reason.as_str() {
            _ if path.direct_io => "yes".to_owned(),
            "" => "no".to_owned(),
            reason => format!("no: {reason}"),
        });
        let mut cells = vec![dataset.name.clone(), dataset.kind.as_str().to_owned()];
        if objects {
            cells.extend(["-".to_owned(), "-".to_owned()]);
        } else {
            cells.extend([grouped(dataset.count), size(dataset.length_bytes)]);
        }
        cells.push(shape);
        if paths {
            cells.push(path.map_or(Backend::Unknown, |path| path.backend).to_string());
            cells.push(direct.unwrap_or_else(|| "-".to_owned()));
        }
        table.row(cells);
    }
    table
}

fn status_table(status: &Status) -> Table {
    let backend = match (status.fallback, status.reason.as_str()) {
        (true, reason) => format!("{}, FALLBACK from {}: {reason}", status.backend, status.requested),
        (false, "") => status.backend.to_string(),
        (false, reason) => format!("{} ({reason})", status.backend),
    };
    let uptime = humantime::format_duration(Duration::from_secs(status.uptime_ms / 1000));
    let (used, budget) = (size(status.memory_in_use_bytes), size(status.memory_budget_bytes));
    let megabytes = rate(status.read_bytes_per_second / 1e6);
    let (reads, window) = (
        rate(status.reads_per_second),
        f64::from(status.rates_window_ms) / 1e3,
    );
    let (total, errors) = (grouped(status.reads_total), grouped(status.read_errors_total));
    let percentiles = [
        status.latency_p50_us,
        status.latency_p99_us,
        status.latency_p999_us,
    ];
    let [p50, p99, p999] = percentiles.map(|us| match us {
        // No read was timed, though some may have failed.
        0.0 => "-".to_owned(),
        us if us.is_infinite() => "over 10 s".to_owned(),
        us => latency(us * 1e3),
    });
    let mut table = Table::default();
    table.row(["state", &format!("{}, up {uptime}", status.state)]);
    table.row(["version", &status.version]);
    table.row(["backend", &backend]);
    table.row(["cores", &status.cores.to_string()]);
    table.row(["memory", &format!("{used} of {budget} in use")]);
    table.row([
        "rate",
        &format!("{reads} reads/s, {megabytes} MB/s over the last {window} s"),
    ]);
    table.row(["reads", &format!("{total}, {errors} failed")]);
    let latencies = format!("p50 {p50}, p99 {p99}, p99.9 {p999} (upper bucket bounds, since start)");
    table.row(["latency", &latencies]);
    if let Some(last) = &status.last_reload {
        table.row(["config", &reload::last_line(last)]);
    }
    table
}

fn shard_table(shards: &[ShardStatus]) -> Table {
    let mut table = Table::new(&[0, 2, 3, 4, 5, 6, 7]);
    table.row("SHARD,BACKEND,IN FLIGHT,STALLED,QUEUED,DEPTH,DEVICE READS,SUBMISSIONS".split(','));
    for shard in shards {
        table.row([
            shard.shard.to_string(),
            format!("{}{}", shard.backend, if shard.routed { "" } else { ", idle" }),
            shard.in_flight.to_string(),
            shard.stalled.to_string(),
            grouped(shard.queued),
            shard.queue_depth.to_string(),
            grouped(shard.device_reads_total),
            grouped(shard.submissions_total),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latencies(us: f64) -> String {
        let mut status = Status::default();
        status.reads_total = 5;
        (
            status.latency_p50_us,
            status.latency_p99_us,
            status.latency_p999_us,
        ) = (us, us, us);
        let mut text = Vec::new();
        status_table(&status).write(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_latency_that_is_not_known_is_not_made_up() {
        // Scenario: five reads, none of which was timed; then reads beyond the histogram's last bound. Expected: a dash, and
        // the bound.
        let text = latencies(0.0);
        assert!(text.contains("p50 -, p99 -, p99.9 -"), "{text}");
        let text = latencies(f64::INFINITY);
        assert!(
            text.contains("p50 over 10 s, p99 over 10 s, p99.9 over 10 s"),
            "{text}"
        );
    }
}
