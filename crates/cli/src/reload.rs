//! `ringfetch reload`: the daemon reads its configuration file again; what came of it.

use crate::args::Global;
use crate::daemon::admin;
use crate::outcome::Failure;
use crate::sink::{Sink, print_json};
use ringfetch_client::wire;
use serde_json::{Value, json};
use std::io::Write as _;

pub(crate) async fn run(global: &Global) -> Result<(), Failure> {
    let answer = admin(global)?
        .reload()
        .await
        .map_err(|error| Failure::call(&error, "admin", &global.admin))?;
    let mut out = Sink::open(None)?;
    if global.json {
        let told = json!({
            "applied": changes_json(&answer.applied),
            "needs_restart": changes_json(&answer.needs_restart),
            "datasets_added": answer.datasets_added,
            "datasets_removed": answer.datasets_removed,
            "datasets_replaced": answer.datasets_replaced,
            "datasets_unchanged": answer.datasets_unchanged,
            "notes": answer.notes,
        });
        print_json(&mut out, &told)?;
    } else {
        let lines = lines(&answer);
        if lines.is_empty() {
            writeln!(out, "reloaded: nothing differs")?;
        }
        for line in lines {
            writeln!(out, "{line}")?;
        }
    }
    out.finish()
}

/// One line a thing that came of it.
fn lines(answer: &wire::ReloadResponse) -> Vec<String> {
    let of_changes = |what: &'static str, changes: &[wire::ConfigChange]| {
        let line = move |change: &wire::ConfigChange| {
            let wire::ConfigChange { key, before, after } = change;
            format!("{what}: {key} {before} -> {after}")
        };
        changes.iter().map(line).collect::<Vec<_>>()
    };
    let of_names = |what: &'static str, names: &[String]| {
        let line = move |name: &String| format!("{what}: {name}");
        names.iter().map(line).collect::<Vec<_>>()
    };
    [
        of_changes("applied", &answer.applied),
        of_names("dataset added", &answer.datasets_added),
        of_names("dataset removed", &answer.datasets_removed),
        of_names("dataset replaced", &answer.datasets_replaced),
        of_changes("needs a restart", &answer.needs_restart),
        of_names("note", &answer.notes),
    ]
    .concat()
}

fn changes_json(changes: &[wire::ConfigChange]) -> Value {
    let change = |change: &wire::ConfigChange| json!({ "key": change.key, "before": change.before, "after": change.after });
    changes.iter().map(change).collect()
}

/// The last reload, as the status has it.
pub(crate) fn last_json(last: &wire::LastReload) -> Value {
    json!({
        "successful": last.successful,
        "at_unix_ms": last.at_unix_ms,
        "problem": last.problem,
        "needs_restart": changes_json(&last.needs_restart),
    })
}

/// The same as one line: what is wrong, or waits, comes to the eye.
pub(crate) fn last_line(last: &wire::LastReload) -> String {
    if !last.successful {
        return format!("RELOAD FAILED, nothing has changed: {}", last.problem);
    }
    let waiting: Vec<&str> = last
        .needs_restart
        .iter()
        .map(|change| change.key.as_str())
        .collect();
    match waiting[..] {
        [] => "reloaded".to_owned(),
        _ => format!("reloaded; needs a restart: {}", waiting.join(", ")),
    }
}
