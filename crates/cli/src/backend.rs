//! `ringfetch backend`: shows which backend reads each dataset and why, and switches backends while the
//! daemon serves.

use crate::args::Global;
use crate::daemon::{admin, admin_failure, change_failure};
use crate::outcome::Failure;
use crate::sink;
use crate::table::Table;
use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use ringfetch_client::{Backend, DatasetStatus, Status, Switched};
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
    /// is unavailable.
    Set {
        /// The backend.
        #[arg(value_parser = backends())]
        backend: Backend,
        /// Only this dataset. Without it: the engine's, for every dataset that has none of its own.
        #[arg(long, value_name = "NAME")]
        dataset: Option<String>,
    },
    /// Clear a dataset's own backend, so that the engine's reads it.
    Clear {
        /// The dataset.
        #[arg(long, value_name = "NAME")]
        dataset: String,
    },
}

/// How to see whether a switch was made.
pub(crate) const LOOK: &str = "`ringfetch backend` shows which backends read now";

fn backends() -> impl TypedValueParser<Value = Backend> {
    PossibleValuesParser::new(Backend::ALL.map(Backend::as_str)).try_map(|word| word.parse::<Backend>())
}

pub(crate) async fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    match &args.command {
        None => show(global).await,
        Some(Switch::Set { backend, dataset }) => set(global, *backend, dataset.as_deref()).await,
        Some(Switch::Clear { dataset }) => clear(global, dataset).await,
    }
}

async fn show(global: &Global) -> Result<(), Failure> {
    let status = admin(global)?.status().await.map_err(admin_failure(global))?;
    let value = json!({
        "engine": {
            "backend": status.backend,
            "requested": status.requested,
            "reason": status.reason,
        },
        "datasets": status.datasets.iter().map(dataset_json).collect::<Vec<_>>(),
    });
    sink::print(global.json, &value, |out| table(&status).write(out))
}

fn table(status: &Status) -> Table {
    let mut table = Table::new(&[]);
    table.row(["DATASET", "BACKEND", "ASKED FOR", "BY", "WHY"]);
    let mut row = |name: &str, backend: Backend, requested: Backend, by: &str, reason: &str| {
        table.row([name, backend.as_str(), requested.as_str(), by, reason]);
    };
    row("(engine)", status.backend, status.requested, "-", &status.reason);
    for dataset in &status.datasets {
        let path = dataset.read_path.clone().unwrap_or_default();
        let by = if path.own_backend { "itself" } else { "engine" };
        // The engine's may be long: once is enough.
        let reason = match path.reason.as_str() {
            "" => "",
            reason if !path.own_backend && reason == status.reason => "as the engine",
            reason => reason,
        };
        row(name_of(dataset), path.backend, path.requested, by, reason);
    }
    table
}

fn name_of(status: &DatasetStatus) -> &str {
    status.dataset.as_ref().map_or("", |dataset| &dataset.name)
}

fn dataset_json(dataset: &DatasetStatus) -> Value {
    let path = dataset.read_path.clone().unwrap_or_default();
    json!({
        "name": name_of(dataset),
        "backend": path.backend,
        "requested": path.requested,
        "own": path.own_backend,
        "reason": path.reason,
    })
}

async fn set(global: &Global, backend: Backend, dataset: Option<&str>) -> Result<(), Failure> {
    let switched = admin(global)?.set_backend(backend, dataset).await;
    let switched = switched.map_err(change_failure(global, LOOK))?;
    let (what, backend, previous) = (dataset.unwrap_or("engine"), switched.backend, switched.previous);
    let mut text = format!("{what}: {backend} (was: {previous}); until the next reload\n");
    if !switched.datasets_with_own.is_empty() {
        let names = switched.datasets_with_own.join(", ");
        text.push_str(&format!("as before, by a backend of their own: {names}\n"));
    }
    print(global, dataset, &switched, &text)
}

async fn clear(global: &Global, dataset: &str) -> Result<(), Failure> {
    let switched = admin(global)?.clear_backend(dataset).await;
    let switched = switched.map_err(change_failure(global, LOOK))?;
    let (backend, previous) = (switched.backend, switched.previous);
    let text = format!("{dataset}: {backend}, the engine's (was: {previous}); until the next reload\n");
    print(global, Some(dataset), &switched, &text)
}

fn print(global: &Global, dataset: Option<&str>, switched: &Switched, text: &str) -> Result<(), Failure> {
    let mut value = serde_json::to_value(switched)?;
    value["dataset"] = json!(dataset);
    sink::print(global.json, &value, |out| out.write_all(text.as_bytes()))
}
