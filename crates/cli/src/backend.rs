//! `ringfetch backend`: which backend reads each dataset and why, and the switch to another while the daemon serves.

use crate::args::Global;
use crate::daemon::admin;
use crate::inspect::backend_name;
use crate::outcome::Failure;
use crate::sink::{Sink, print_json};
use crate::table::Table;
use clap::{Subcommand, ValueEnum};
use ringfetch_client::{Error, wire};
use serde_json::{Value, json};
use std::io::Write as _;

/// Without a subcommand: show.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Switch>,
}

#[derive(Debug, Subcommand)]
enum Switch {
    /// Read by this backend from now on, until the daemon's next reload or restart. Fails, and changes nothing, where it
    /// cannot be had.
    Set {
        /// The backend.
        #[arg(value_enum)]
        backend: Backend,
        /// Only this dataset. Without it: the engine's, for every dataset that has none of its own.
        #[arg(long, value_name = "NAME")]
        dataset: Option<String>,
    },
    /// Take a dataset's own backend away: the engine's reads it again.
    Clear {
        /// The dataset.
        #[arg(long, value_name = "NAME")]
        dataset: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    Uring,
    Mmap,
    Auto,
    Pread,
}

impl Backend {
    fn wire(self) -> wire::Backend {
        match self {
            Self::Uring => wire::Backend::Uring,
            Self::Mmap => wire::Backend::Mmap,
            Self::Auto => wire::Backend::Auto,
            Self::Pread => wire::Backend::Pread,
        }
    }
}

pub(crate) async fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    match &args.command {
        None => show(global).await,
        Some(Switch::Set { backend, dataset }) => set(global, *backend, dataset.as_deref()).await,
        Some(Switch::Clear { dataset }) => clear(global, dataset).await,
    }
}

fn failed(global: &Global) -> impl Fn(Error) -> Failure {
    |error| Failure::call(&error, "admin", &global.admin)
}

async fn show(global: &Global) -> Result<(), Failure> {
    let status = admin(global)?.status().await.map_err(failed(global))?;
    let mut out = Sink::open(None)?;
    if global.json {
        let datasets: Vec<Value> = status.datasets.iter().map(dataset_json).collect();
        let engine = json!({
            "backend": backend_name(status.backend),
            "requested": backend_name(status.requested),
            "reason": status.reason,
        });
        print_json(&mut out, &json!({ "engine": engine, "datasets": datasets }))?;
    } else {
        table(&status).write(&mut out)?;
    }
    out.finish()
}

fn table(status: &wire::GetStatusResponse) -> Table {
    let mut table = Table::new(&[]);
    table.row(["DATASET", "BACKEND", "ASKED FOR", "BY", "WHY"]);
    let mut row = |name: &str, backend, requested, by: &str, reason: &str| {
        table.row([name, backend_name(backend), backend_name(requested), by, reason]);
    };
    row("(engine)", status.backend, status.requested, "-", &status.reason);
    for dataset in &status.datasets {
        let path = dataset.read_path.clone().unwrap_or_default();
        let by = if path.own_backend { "itself" } else { "engine" };
        row(name_of(dataset), path.backend, path.requested, by, &path.reason);
    }
    table
}

fn name_of(status: &wire::DatasetStatus) -> &str {
    status.dataset.as_ref().map_or("", |dataset| &dataset.name)
}

fn dataset_json(dataset: &wire::DatasetStatus) -> Value {
    let path = dataset.read_path.clone().unwrap_or_default();
    json!({
        "name": name_of(dataset),
        "backend": backend_name(path.backend),
        "requested": backend_name(path.requested),
        "own": path.own_backend,
        "reason": path.reason,
    })
}

async fn set(global: &Global, backend: Backend, dataset: Option<&str>) -> Result<(), Failure> {
    let answer = admin(global)?
        .set_backend(backend.wire(), dataset)
        .await
        .map_err(failed(global))?;
    let mut out = Sink::open(None)?;
    let (previous, now) = (backend_name(answer.previous), backend_name(answer.backend));
    if global.json {
        let told = json!({
            "dataset": dataset,
            "previous": previous,
            "backend": now,
            "reason": answer.reason,
            "datasets_with_own": answer.datasets_with_own,
        });
        print_json(&mut out, &told)?;
    } else {
        let what = dataset.unwrap_or("engine");
        writeln!(out, "{what}: {now} (was: {previous}); until the next reload")?;
        if !answer.datasets_with_own.is_empty() {
            let names = answer.datasets_with_own.join(", ");
            writeln!(out, "as before, by a backend of their own: {names}")?;
        }
    }
    out.finish()
}

async fn clear(global: &Global, dataset: &str) -> Result<(), Failure> {
    let answer = admin(global)?
        .clear_backend(dataset)
        .await
        .map_err(failed(global))?;
    let mut out = Sink::open(None)?;
    let (previous, now) = (backend_name(answer.previous), backend_name(answer.backend));
    if global.json {
        let told = json!({
            "dataset": dataset,
            "previous": previous,
            "backend": now,
            "reason": answer.reason,
        });
        print_json(&mut out, &told)?;
    } else {
        writeln!(
            out,
            "{dataset}: {now}, the engine's (was: {previous}); until the next reload"
        )?;
    }
    out.finish()
}
