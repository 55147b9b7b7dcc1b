//! `ringfetch backend`: which backend reads each dataset and why, and the switch to another while the daemon serves.

use crate::args::Global;
use crate::daemon::admin;
use crate::outcome::Failure;
use crate::sink::{Sink, print_json};
use crate::table::Table;
use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use ringfetch_client::{Backend, DatasetStatus, Error, Status, Switched};
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
    /// Take a dataset's own backend away: the engine's reads it again.
    Clear {
        /// The dataset.
        #[arg(long, value_name = "NAME")]
        dataset: String,
    },
}

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

fn failed(global: &Global) -> impl Fn(Error) -> Failure {
    |error| Failure::call(&error, "admin", &global.admin)
}

async fn show(global: &Global) -> Result<(), Failure> {
    let status = admin(global)?.status().await.map_err(failed(global))?;
    let mut out = Sink::open(None)?;
    if global.json {
        let datasets: Vec<Value> = status.datasets.iter().map(dataset_json).collect();
        let Status {
            backend,
            requested,
            reason,
            ..
        } = &status;
        let engine = json!({ "backend": backend, "requested": requested, "reason": reason });
        print_json(&mut out, &json!({ "engine": engine, "datasets": datasets }))?;
    } else {
        table(&status).write(&mut out)?;
    }
    out.finish()
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
        row(name_of(dataset), path.backend, path.requested, by, &path.reason);
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
    let answer = admin(global)?
        .set_backend(backend, dataset)
        .await
        .map_err(failed(global))?;
    let Switched {
        previous, backend, ..
    } = answer;
    let what = dataset.unwrap_or("engine");
    let mut text = format!("{what}: {backend} (was: {previous}); until the next reload\n");
    if !answer.datasets_with_own.is_empty() {
        let names = answer.datasets_with_own.join(", ");
        text.push_str(&format!("as before, by a backend of their own: {names}\n"));
    }
    tell(global, dataset, &answer, &text)
}

async fn clear(global: &Global, dataset: &str) -> Result<(), Failure> {
    let answer = admin(global)?
        .clear_backend(dataset)
        .await
        .map_err(failed(global))?;
    let Switched {
        previous, backend, ..
    } = answer;
    let text = format!("{dataset}: {backend}, the engine's (was: {previous}); until the next reload\n");
    tell(global, Some(dataset), &answer, &text)
}

fn tell(global: &Global, dataset: Option<&str>, answer: &Switched, text: &str) -> Result<(), Failure> {
    let mut out = Sink::open(None)?;
    if global.json {
        let mut told = serde_json::to_value(answer)?;
        told["dataset"] = json!(dataset);
        print_json(&mut out, &told)?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    out.finish()
}
