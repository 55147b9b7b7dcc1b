//! `ringfetchd check-config`.

use std::io::{self, Write as _};

use ringfetch_engine::engine::{BackendStatus, Engine};
use ringfetch_server::access_log::AccessLog;
use ringfetch_server::config::{Base, Inputs};
use ringfetch_server::tls::Tls;
use ringfetch_server::{demo, host_memory};

use crate::start_errors::StartErrors;
use crate::{check_memory, load, load_access, load_tls, print, raise_open_files};

/// Checks the configuration; with `open` all that a start checks, but for its ports.
pub(crate) fn run(inputs: &Inputs, open: bool) -> anyhow::Result<()> {
    let config = load(inputs)?.config;
    raise_open_files();
    let names: Vec<&str> = config
        .datasets
        .iter()
        .map(|dataset| dataset.name.as_str())
        .collect();
    // A start makes the data of a demo that has none.
    let is_made = match &inputs.base {
        Base::File(_) => true,
        Base::Demo(directory) => demo::is_complete(directory),
    };
    let opened = if open {
        let mut errors = StartErrors::default();
        errors.of_config(check_memory(&config));
        errors.of_host(host_memory::check_process_limits(
            config.engine.memory_budget_bytes,
        ));
        let tls = errors.of_key_file(load_tls(&config)).flatten();
        errors.of_key_file(load_access(&config));
        errors.of_access_log(&config, AccessLog::check);
        // They stay open, as in a start, while the backends are checked.
        let _open = is_made.then(|| errors.open(&config.datasets, |_| ()));
        let mut statuses = Vec::new();
        for (key, backend) in config.backends() {
            let checked = Engine::check_backend(&config.engine, backend);
            let status = errors.of_host(checked.map_err(|error| format!("{key}: {error}")));
            statuses.push((key, status));
        }
        if errors.any() {
            return Err(errors.into_error());
        }
        for problem in tls.iter().flat_map(Tls::left_out) {
            let _stderr_is_gone = writeln!(io::stderr(), "ringfetchd: left out: {problem}");
        }
        for (key, status) in statuses {
            if let Some(status) = status.filter(BackendStatus::is_fallback) {
                let (requested, backend, reason) = (status.requested, status.backend, status.reason);
                let line = format!("fallback: {key} is {requested}, and {backend} would run: {reason}");
                let _stderr_is_gone = writeln!(io::stderr(), "ringfetchd: {line}");
            }
        }
        if is_made {
            ", and they open"
        } else {
            "; a start makes the demo's data first"
        }
    } else {
        ""
    };
    let backend = config.engine.backend;
    print(&format!(
        "ok: backend {backend}, {} datasets ({}){opened}\n",
        names.len(),
        names.join(", ")
    ))
}
