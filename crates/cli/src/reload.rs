//! `ringfetch reload`: the daemon reads its configuration file again; what came of it.

use crate::args::Global;
use crate::daemon::admin;
use crate::outcome::Failure;
use crate::sink::{Sink, print_json};
use ringfetch_client::{ConfigChange, LastReload, Reloaded};
use std::io::Write as _;

pub(crate) async fn run(global: &Global) -> Result<(), Failure> {
    let answer = admin(global)?
        .reload()
        .await
        .map_err(|error| Failure::call(&error, "admin", &global.admin))?;
    let mut out = Sink::open(None)?;
    if global.json {
        print_json(&mut out, &answer)?;
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
fn lines(answer: &Reloaded) -> Vec<String> {
    let of_changes = |what: &'static str, changes: &[ConfigChange]| {
        let line = move |change: &ConfigChange| {
            format!("{what}: {} {} -> {}", change.key, change.before, change.after)
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

/// The last reload as one line.
pub(crate) fn last_line(last: &LastReload) -> String {
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
