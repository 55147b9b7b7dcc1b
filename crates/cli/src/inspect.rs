//! `ringfetch datasets`, `status` and `log-level`: what the daemon says of itself, as tables or JSON.

use crate::args::Global;
use crate::daemon::{admin, client};
use crate::outcome::Failure;
use crate::quantity::{grouped, latency, rate, size};
use crate::reload;
use crate::sink::{Sink, print_json};
use crate::table::Table;
use ringfetch_client::{Dtype, wire};
use serde_json::{Value, json};
use std::io::Write as _;
use std::time::Duration;

pub(crate) async fn datasets(global: &Global) -> Result<(), Failure> {
    let client = client(global)?;
    let (mut datasets, mut request) = (Vec::new(), wire::ListDatasetsRequest::default());
    loop {
        let page: wire::ListDatasetsResponse = client
            .call("/ringfetch.v1.DatasetService/ListDatasets", &request)
            .await
            .map_err(|error| Failure::call(&error, "grpc", &global.grpc))?;
        datasets.extend(page.datasets);
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            break;
        }
    }
    let mut out = Sink::open(None)?;
    if global.json {
        let datasets: Vec<Value> = datasets.iter().map(dataset_json).collect();
        print_json(&mut out, &json!({ "datasets": datasets }))?;
    } else if datasets.is_empty() {
        writeln!(out, "The daemon serves no datasets.")?;
    } else {
        dataset_table(datasets.iter().map(|dataset| (dataset, None))).write(&mut out)?;
    }
    out.finish()
}

pub(crate) async fn log_level(global: &Global, filter: &str) -> Result<(), Failure> {
    let admin = admin(global)?;
    let previous = admin
        .set_log_level(filter)
        .await
        .map_err(|error| Failure::call(&error, "admin", &global.admin))?;
    let mut out = Sink::open(None)?;
    if global.json {
        print_json(&mut out, &json!({ "filter": filter, "previous": previous }))?;
    } else {
        writeln!(out, "log filter: {filter} (was: {previous})")?;
    }
    out.finish()
}

pub(crate) async fn status(global: &Global) -> Result<(), Failure> {
    let admin = admin(global)?;
    let status = admin
        .status()
        .await
        .map_err(|error| Failure::call(&error, "admin", &global.admin))?;
    let mut out = Sink::open(None)?;
    if global.json {
        print_json(&mut out, &status_json(&status))?;
    } else {
        status_facts(&status).write(&mut out)?;
        if !status.shards.is_empty() {
            writeln!(out)?;
            shard_table(&status.shards).write(&mut out)?;
        }
        if !status.datasets.is_empty() {
            writeln!(out)?;
            let datasets = status.datasets.iter();
            let rows = datasets.filter_map(|each| Some((each.dataset.as_ref()?, each.read_path.as_ref())));
            dataset_table(rows).write(&mut out)?;
        }
    }
    out.finish()
}

/// The word for a kind.
pub(crate) fn kind_name(kind: i32) -> &'static str {
    match wire::Kind::try_from(kind) {
        Ok(wire::Kind::Blocks) => "blocks",
        Ok(wire::Kind::Vectors) => "vectors",
        Ok(wire::Kind::Objects) => "objects",
        Ok(wire::Kind::Unspecified) | Err(_) => "unknown",
    }
}

/// The word for a backend.
pub(crate) fn backend_name(backend: i32) -> &'static str {
    match wire::Backend::try_from(backend) {
        Ok(wire::Backend::Uring) => "uring",
        Ok(wire::Backend::Auto) => "auto",
        Ok(wire::Backend::Mmap) => "mmap",
        Ok(wire::Backend::Pread) => "pread",
        Ok(wire::Backend::Unspecified) | Err(_) => "unknown",
    }
}

fn dtype_name(dtype: i32) -> &'static str {
    Dtype::from_wire(dtype).map_or("unknown", Dtype::as_str)
}

/// Datasets, and how they are read where that is known.
fn dataset_table<'a>(
    datasets: impl Iterator<Item = (&'a wire::Dataset, Option<&'a wire::ReadPath>)>,
) -> Table {
    let mut table = Table::new(&[2, 3]);
    let mut rows = datasets.peekable();
    let paths = rows.peek().is_some_and(|(_, path)| path.is_some());
    let head = ["NAME", "KIND", "COUNT", "SIZE", "SHAPE", "BACKEND", "DIRECT"];
    table.row(head.into_iter().take(if paths { 7 } else { 5 }));
    for (dataset, path) in rows {
        let objects = dataset.kind == i32::from(wire::Kind::Objects);
        let shape = match &dataset.vectors {
            Some(shape) => format!("{} x {} ({})", shape.dim, dtype_name(shape.dtype), shape.layout),
            None if dataset.block_bytes > 0 => format!("{} bytes", dataset.block_bytes),
            None => "-".to_owned(),
        };
        let (backend, direct) = match path {
            Some(path) if path.direct_io => (backend_name(path.backend), "yes".to_owned()),
            Some(path) if path.direct_io_reason.is_empty() => (backend_name(path.backend), "no".to_owned()),
            Some(path) => (
                backend_name(path.backend),
                format!("no: {}", path.direct_io_reason),
            ),
            None => ("unknown", "-".to_owned()),
        };
        let mut cells = vec![dataset.name.clone(), kind_name(dataset.kind).to_owned()];
        if objects {
            cells.extend(["-".to_owned(), "-".to_owned()]);
        } else {
            cells.extend([grouped(dataset.count), size(dataset.length_bytes)]);
        }
        cells.push(shape);
        if paths {
            cells.extend([backend.to_owned(), direct]);
        }
        table.row(cells);
    }
    table
}

fn status_facts(status: &wire::GetStatusResponse) -> Table {
    let backend = backend_name(status.backend);
    let backend = match (status.fallback, status.reason.as_str()) {
        (true, reason) => format!(
            "{backend}, FALLBACK from {}: {reason}",
            backend_name(status.requested)
        ),
        (false, "") => backend.to_owned(),
        (false, reason) => format!("{backend} ({reason})"),
    };
    let micros = |us: f64| latency(us * 1e3);
    let uptime = Duration::from_secs(status.uptime_ms / 1000);
    let mut table = Table::default();
    table.row([
        "state",
        &format!("{}, up {}", status.state, humantime::format_duration(uptime)),
    ]);
    table.row(["version", &status.version]);
    table.row(["backend", &backend]);
    table.row(["cores", &status.cores.to_string()]);
    let (used, budget) = (size(status.memory_in_use_bytes), size(status.memory_budget_bytes));
    table.row(["memory", &format!("{used} of {budget} in use")]);
    let (reads, bytes) = (
        rate(status.reads_per_second),
        rate(status.read_bytes_per_second / 1e6),
    );
    let window = f64::from(status.rates_window_ms) / 1e3;
    table.row([
        "rate",
        &format!("{reads} reads/s, {bytes} MB/s over the last {window} s"),
    ]);
    let (reads, errors) = (grouped(status.reads_total), grouped(status.read_errors_total));
    table.row(["reads", &format!("{reads}, {errors} failed")]);
    let [p50, p99, p999] = [
        status.latency_p50_us,
        status.latency_p99_us,
        status.latency_p999_us,
    ]
    .map(micros);
    table.row([
        "latency",
        &format!("p50 {p50}, p99 {p99}, p99.9 {p999} (upper bucket bounds, since start)"),
    ]);
    if let Some(last) = &status.last_reload {
        table.row(["config", &reload::last_line(last)]);
    }
    table
}

fn shard_table(shards: &[wire::ShardStatus]) -> Table {
    let mut table = Table::new(&[0, 2, 3, 4, 5, 6]);
    table.row([
        "SHARD",
        "BACKEND",
        "IN FLIGHT",
        "QUEUED",
        "DEPTH",
        "DEVICE READS",
        "SUBMISSIONS",
    ]);
    for shard in shards {
        table.row([
            shard.shard.to_string(),
            format!(
                "{}{}",
                backend_name(shard.backend),
                if shard.routed { "" } else { ", idle" }
            ),
            shard.in_flight.to_string(),
            grouped(shard.queued),
            shard.queue_depth.to_string(),
            grouped(shard.device_reads_total),
            grouped(shard.submissions_total),
        ]);
    }
    table
}

/// A dataset as JSON, with the wire contract's field names.
fn dataset_json(dataset: &wire::Dataset) -> Value {
    let vectors = dataset.vectors.as_ref().map(|shape| {
        json!({
            "dim": shape.dim,
            "dtype": dtype_name(shape.dtype),
            "layout": shape.layout,
            "vector_bytes": shape.vector_bytes,
        })
    });
    json!({
        "name": dataset.name,
        "kind": kind_name(dataset.kind),
        "length_bytes": dataset.length_bytes,
        "count": dataset.count,
        "block_bytes": dataset.block_bytes,
        "vectors": vectors,
        "etag": dataset.etag,
    })
}

/// A dataset as the status has it: how it is read beside what it is.
fn dataset_status_json(status: &wire::DatasetStatus) -> Value {
    let mut value = status.dataset.as_ref().map_or_else(|| json!({}), dataset_json);
    let read_path = status.read_path.as_ref().map(|path| {
        json!({
            "backend": backend_name(path.backend),
            "requested": backend_name(path.requested),
            "reason": path.reason,
            "direct_io": path.direct_io,
            "direct_io_reason": path.direct_io_reason,
            "offset_alignment_bytes": path.offset_alignment_bytes,
            "memory_alignment_bytes": path.memory_alignment_bytes,
            "own_backend": path.own_backend,
        })
    });
    value["read_path"] = json!(read_path);
    value["files"] = json!(status.files);
    value["stride_bytes"] = json!(status.stride_bytes);
    value["base_offset"] = json!(status.base_offset);
    value["reads_total"] = json!(status.reads_total);
    value["read_errors_total"] = json!(status.read_errors_total);
    value["read_bytes_total"] = json!(status.read_bytes_total);
    value
}

fn status_json(status: &wire::GetStatusResponse) -> Value {
    let shards: Vec<Value> = status
        .shards
        .iter()
        .map(|shard| {
            json!({
                "shard": shard.shard,
                "backend": backend_name(shard.backend),
                "routed": shard.routed,
                "in_flight": shard.in_flight,
                "queued": shard.queued,
                "queue_depth": shard.queue_depth,
                "device_reads_total": shard.device_reads_total,
                "submissions_total": shard.submissions_total,
            })
        })
        .collect();
    json!({
        "version": status.version,
        "uptime_ms": status.uptime_ms,
        "state": status.state,
        "backend": backend_name(status.backend),
        "requested": backend_name(status.requested),
        "reason": status.reason,
        "fallback": status.fallback,
        "cores": status.cores,
        "memory_budget_bytes": status.memory_budget_bytes,
        "memory_in_use_bytes": status.memory_in_use_bytes,
        "shards": shards,
        "datasets": status.datasets.iter().map(dataset_status_json).collect::<Vec<_>>(),
        "reads_per_second": status.reads_per_second,
        "read_bytes_per_second": status.read_bytes_per_second,
        "rates_window_ms": status.rates_window_ms,
        "reads_total": status.reads_total,
        "read_errors_total": status.read_errors_total,
        "latency_p50_us": status.latency_p50_us,
        "latency_p99_us": status.latency_p99_us,
        "latency_p999_us": status.latency_p999_us,
        "last_reload": status.last_reload.as_ref().map(reload::last_json),
    })
}
