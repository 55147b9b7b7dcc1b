//! `ringfetch reload`: makes the daemon read its configuration file again, and reports the result.

use crate::args::Global;
use crate::daemon::{admin_within, change_failure};
use crate::outcome::Failure;
use crate::sink;
use ringfetch_client::{ConfigChange, LastReload, Reloaded};
use std::io::Write as _;
use std::time::Duration;

/// The time limit unless one is given. The daemon reports a file system that does not respond after 10 s and 20 ms a file, in
/// each of several steps, and may still be making an earlier change.
const TIMEOUT: Duration = Duration::from_secs(600);

pub(crate) async fn run(global: &Global) -> Result<(), Failure> {
    let timeout = if global.is_default_timeout {
        TIMEOUT
    } else {
        global.timeout
    };
    let reloaded = admin_within(global, timeout)?.reload().await;
    let look = "`ringfetch status` shows the last reload";
    let reloaded = reloaded.map_err(change_failure(global, look))?;
    sink::print(global.json, &reloaded, |out| {
        let lines = lines(&reloaded);
        if lines.is_empty() {
            writeln!(out, "reloaded: nothing differs")?;
        }
        lines.iter().try_for_each(|line| writeln!(out, "{line}"))
    })
}

/// One line per result.
fn lines(reloaded: &Reloaded) -> Vec<String> {
    let change = |change: &ConfigChange| format!("{} {} -> {}", change.key, change.before, change.after);
    let changes = |changes: &[ConfigChange]| changes.iter().map(change).collect();
    let groups = [
        ("applied", changes(&reloaded.applied)),
        ("dataset added", reloaded.datasets_added.clone()),
        ("dataset removed", reloaded.datasets_removed.clone()),
        ("dataset replaced", reloaded.datasets_replaced.clone()),
        ("needs a restart", changes(&reloaded.needs_restart)),
        ("note", reloaded.notes.clone()),
    ];
    let lines = |(what, each): (&'static str, Vec<String>)| {
        each.into_iter().map(move |text| format!("{what}: {text}"))
    };
    groups.into_iter().flat_map(lines).collect()
}

pub(crate) fn last_line(last: &LastReload) -> String {
    if !last.successful {
        return format!("RELOAD FAILED, nothing has changed: {}", last.problem);
    }
    if last.needs_restart.is_empty() {
        return "reloaded".to_owned();
    }
    let keys: Vec<&str> = last
        .needs_restart
        .iter()
        .map(|change| change.key.as_str())
        .collect();
    format!("reloaded; needs a restart: {}", keys.join(", "))
}
