//! The summary: which backends can run here, which to use for these paths, and what to fix first.

use super::finding::{Finding, Verdict};
use super::paths::PathFacts;
use crate::quantity::size;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Most remedies repeated at the end.
const FIX_FIRST: usize = 3;
/// From this share of resident bytes on, data count as warm, or as partly warm.
const WARM_PERCENT: u64 = 95;
const PARTLY_WARM_PERCENT: u64 = 5;

#[derive(Debug, Clone)]
pub(super) struct Summary {
    /// uring, auto, mmap, pread: whether each can run.
    runs: Vec<(&'static str, bool)>,
    take: &'static str,
    because: String,
    /// Name of the check, and how to fix it; worst first.
    pub(super) fix_first: Vec<(String, String)>,
}

impl Summary {
    /// `room_bytes`: memory that could cache data, if known.
    pub(super) fn of(checks: &[Finding], files: &[PathFacts], ring: bool, room_bytes: Option<u64>) -> Self {
        let broken = checks
            .iter()
            .any(|finding| finding.check.id == "path.ring_read" && finding.verdict == Verdict::Problem);
        let ring = ring && !broken;
        let runs = vec![("uring", ring), ("auto", ring), ("mmap", true), ("pread", true)];
        let (take, because) = choose(files, ring, room_bytes);
        let fix_first = fix_first(checks);
        Self {
            runs,
            take,
            because,
            fix_first,
        }
    }

    pub(super) fn json(&self) -> Value {
        let runs: BTreeMap<_, _> = self.runs.iter().copied().collect();
        json!({ "runs": runs, "take": self.take, "because": self.because })
    }

    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let named = |wanted| {
            let names = self.runs.iter().filter(|(_, runs)| *runs == wanted);
            names.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
        };
        writeln!(out, "backends that run here: {}", named(true))?;
        if !named(false).is_empty() {
            writeln!(out, "backends that do not: {}", named(false))?;
        }
        writeln!(out, "take: {} ({})", self.take, self.because)?;
        if !self.fix_first.is_empty() {
            writeln!(out, "fix first:")?;
        }
        for (place, (name, remedy)) in (1..).zip(&self.fix_first) {
            writeln!(out, "  {place}. {name}: {remedy}")?;
        }
        Ok(())
    }
}

/// Problems, then warnings, in the order found; each remedy once.
fn fix_first(checks: &[Finding]) -> Vec<(String, String)> {
    let with = |verdict| checks.iter().filter(move |finding| finding.verdict == verdict);
    let mut found: Vec<(String, String)> = Vec::new();
    for finding in with(Verdict::Problem).chain(with(Verdict::Warning)) {
        let Some(remedy) = &finding.remedy else { continue };
        if found.len() < FIX_FIRST && found.iter().all(|(_, known)| known != remedy) {
            found.push((finding.name(), remedy.clone()));
        }
    }
    found
}

/// The table of engines in README.md ("Serve your own data"), applied to these facts.
fn choose(files: &[PathFacts], ring: bool, room_bytes: Option<u64>) -> (&'static str, String) {
    let readable: Vec<&PathFacts> = files.iter().filter(|file| file.readable).collect();
    let plain = if !ring {
        Some(("mmap", "io_uring is unavailable"))
    } else if readable.is_empty() {
        Some((
            "uring",
            "name the paths to serve, and doctor checks what of them is in memory",
        ))
    } else if readable.iter().all(|file| !file.direct) {
        Some((
            "mmap",
            "all reads go through memory anyway: no path is read directly from a device",
        ))
    } else {
        None
    };
    if let Some((take, because)) = plain {
        return (take, because.to_owned());
    }
    let total: u64 = readable.iter().map(|file| file.length_bytes).sum();
    let known = readable.iter().all(|file| file.resident_bytes.is_some());
    let resident: u64 = readable.iter().filter_map(|file| file.resident_bytes).sum();
    let percent = u64::try_from(u128::from(resident) * 100 / u128::from(total.max(1))).unwrap_or(100);
    // What was not examined may be of any size.
    let is_cut = readable.iter().any(|file| file.is_cut);
    let (at_least, of) = if is_cut {
        ("at least ", " of what was examined")
    } else {
        ("", "")
    };
    let holds = room_bytes.is_some_and(|room| total <= room);
    let fits = holds && !is_cut;
    let total = format!("{at_least}{}", size(total));
    let room = match room_bytes.map(size) {
        Some(room) if fits => format!("{total} fit into the {room} of memory that could cache them"),
        Some(room) if holds => {
            format!("{total}; whether all fit into the {room} of memory that could cache them is unknown")
        }
        Some(room) => format!("{total} are more than the {room} of memory that could cache them"),
        None => format!("{total}; how much memory there is to cache them is unknown"),
    };
    let share = format!("{percent} %{of} is in the page cache");
    match percent {
        WARM_PERCENT.. if known && fits => ("mmap", format!("{share}, and {room}")),
        PARTLY_WARM_PERCENT.. if known => ("auto", format!("{share}; {room}")),
        _ if known && fits => (
            "uring",
            format!("{share}; but {room}: mmap or auto once it is warm"),
        ),
        _ => ("uring", room),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Check;
    use super::*;

    fn file(length_bytes: u64, resident_bytes: Option<u64>, direct: bool) -> PathFacts {
        let readable = true;
        PathFacts {
            readable,
            length_bytes,
            is_cut: false,
            resident_bytes,
            direct,
        }
    }

    #[test]
    fn the_backend_follows_the_data() {
        // README's table, with 1000 bytes of memory for a cache.
        let room = Some(1000);
        for (files, backend) in [
            (vec![], "uring"),
            (vec![file(10, Some(10), false)], "mmap"),
            (vec![file(100, Some(100), true)], "mmap"),
            (vec![file(100, Some(30), true)], "auto"),
            (vec![file(100, Some(0), true)], "uring"),
            (vec![file(5000, Some(0), true)], "uring"),
            (vec![file(5000, Some(5000), true)], "auto"),
            (vec![file(100, None, true)], "uring"),
            (vec![PathFacts::default(), file(100, Some(0), true)], "uring"),
            (vec![file(0, Some(0), true)], "uring"),
        ] {
            assert_eq!(choose(&files, true, room).0, backend, "{files:?}");
        }
        assert_eq!(choose(&[file(10, Some(10), true)], false, room).0, "mmap");
        assert_eq!(choose(&[file(100, Some(100), true)], true, None).0, "auto");
    }

    #[test]
    fn what_was_not_examined_does_not_fit_into_memory() {
        // Scenario: directories of more objects than were examined; of these, all, none and more than memory holds is
        // resident; beside a file. Expected: never mmap, and no word that all fit.
        let cut = |length_bytes, resident_bytes| PathFacts {
            is_cut: true,
            ..file(length_bytes, Some(resident_bytes), true)
        };
        for (files, backend, because) in [
            (vec![cut(100, 100)], "auto", "100 % of what was examined is in"),
            (vec![cut(100, 0)], "uring", "at least 100 B; whether all fit into"),
            (vec![cut(5000, 5000)], "auto", "are more than"),
            (
                vec![file(100, Some(100), true), cut(100, 100)],
                "auto",
                "at least 200 B",
            ),
        ] {
            let (take, why) = choose(&files, true, Some(1000));
            assert_eq!(take, backend, "{why}");
            assert!(why.contains(because) && !why.contains(" B fit into"), "{why}");
        }
    }

    #[test]
    fn the_worst_is_fixed_first_and_once() {
        let check = |id| Check { id, why: "" };
        let checks = [
            check("a").warning("", "fix a"),
            check("b").problem("", "fix b"),
            check("path.ring_read").problem("", "fix b"),
            check("d").ok(""),
            check("e").problem("", "fix e"),
            check("f").warning("", "fix f"),
        ];
        let summary = Summary::of(&checks, &[], true, None);
        let fixes: Vec<&str> = summary
            .fix_first
            .iter()
            .map(|(_, remedy)| remedy.as_str())
            .collect();
        assert_eq!(fixes, ["fix b", "fix e", "fix a"]);
        // A ring that cannot read a path is not a backend.
        assert_eq!(summary.json()["runs"]["uring"], false);
        assert_eq!(summary.json()["runs"]["mmap"], true);
    }
}
