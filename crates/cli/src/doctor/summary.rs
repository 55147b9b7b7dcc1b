//! What it comes to: which backends can run here, which to take for these paths, and what to fix first.

use super::finding::{Finding, Verdict};
use super::paths::Facts;
use crate::quantity::size;
use serde_json::{Value, json};
use std::io::{self, Write};

/// Remedies that are told at the end.
const MEND_FIRST: usize = 3;
/// From this share of resident bytes on, data counts as warm, and as partly warm.
const WARM_PERCENT: u64 = 95;
const PARTLY_WARM_PERCENT: u64 = 5;

#[derive(Debug, Clone)]
pub(super) struct Summary {
    /// uring, auto, mmap, pread: whether each can run.
    runs: Vec<(&'static str, bool)>,
    take: &'static str,
    because: String,
    /// Name of the check, and how to fix it; the worst first.
    pub(super) mend_first: Vec<(String, String)>,
}

impl Summary {
    /// `room_bytes`: memory that could cache data, if that is told.
    pub(super) fn of(checks: &[Finding], files: &[Facts], ring: bool, room_bytes: Option<u64>) -> Self {
        let broken = checks
            .iter()
            .any(|finding| finding.check.id == "path.ring_read" && finding.verdict == Verdict::Problem);
        let ring = ring && !broken;
        let (take, because) = choose(files, ring, room_bytes);
        Self {
            runs: vec![("uring", ring), ("auto", ring), ("mmap", true), ("pread", true)],
            take,
            because,
            mend_first: mend_first(checks),
        }
    }

    pub(super) fn json(&self) -> Value {
        let runs: serde_json::Map<String, Value> = self
            .runs
            .iter()
            .map(|(name, runs)| ((*name).to_owned(), Value::Bool(*runs)))
            .collect();
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
        if !self.mend_first.is_empty() {
            writeln!(out, "fix first:")?;
        }
        for (place, (name, remedy)) in (1..).zip(&self.mend_first) {
            writeln!(out, "  {place}. {name}: {remedy}")?;
        }
        Ok(())
    }
}

/// Problems, then warnings, as they were found; a remedy is told once, whoever names it.
fn mend_first(checks: &[Finding]) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for verdict in [Verdict::Problem, Verdict::Warning] {
        for finding in checks.iter().filter(|finding| finding.verdict == verdict) {
            let Some(remedy) = &finding.remedy else { continue };
            if found.iter().all(|(_, known)| known != remedy) {
                found.push((finding.name(), remedy.clone()));
            }
        }
    }
    found.truncate(MEND_FIRST);
    found
}

/// The table of engines in README.md ("Serve your own data"), for what was found.
fn choose(files: &[Facts], ring: bool, room_bytes: Option<u64>) -> (&'static str, String) {
    if !ring {
        return ("mmap", "io_uring is unavailable".to_owned());
    }
    let readable: Vec<&Facts> = files.iter().filter(|file| file.readable).collect();
    if readable.is_empty() {
        let because = "name the paths to be served, and what is in memory of them is looked at";
        return ("uring", because.to_owned());
    }
    if readable.iter().all(|file| !file.direct) {
        return (
            "mmap",
            "all reads go through memory anyway: no path is read directly from a device".to_owned(),
        );
    }
    let total: u64 = readable.iter().map(|file| file.length_bytes).sum();
    let told = readable.iter().all(|file| file.resident_bytes.is_some());
    let resident: u64 = readable.iter().filter_map(|file| file.resident_bytes).sum();
    let percent = u64::try_from(u128::from(resident) * 100 / u128::from(total.max(1))).unwrap_or(100);
    let fits = room_bytes.is_some_and(|room| total <= room);
    let size_told = match room_bytes {
        Some(room) => format!(
            "{} {} the {} of memory that could cache them",
            size(total),
            if fits { "fit into" } else { "are more than" },
            size(room)
        ),
        None => format!(
            "{}; how much memory there is to cache them is unknown",
            size(total)
        ),
    };
    let share = format!("{percent} % is in the page cache");
    if told && percent >= WARM_PERCENT && fits {
        return ("mmap", format!("{share}, and {size_told}"));
    }
    if told && percent >= PARTLY_WARM_PERCENT {
        return ("auto", format!("{share}; {size_told}"));
    }
    if told && fits {
        return (
            "uring",
            format!("{share}; but {size_told}: mmap or auto once it is warm"),
        );
    }
    ("uring", size_told)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Check;
    use super::*;

    fn file(length_bytes: u64, resident_bytes: Option<u64>, direct: bool) -> Facts {
        Facts {
            readable: true,
            length_bytes,
            resident_bytes,
            direct,
        }
    }

    #[test]
    fn the_backend_follows_the_data() {
        // Scenario: no ring; no path; data in memory only; warm, partly warm, cold data that fits, cold data that does
        // not, warm data that does not, data or memory of which nothing can be told; an unreadable path beside a cold one.
        // Expectation: README's table.
        let room = Some(1000);
        let take = |files: &[Facts]| choose(files, true, room).0;
        assert_eq!(choose(&[file(10, Some(10), true)], false, room).0, "mmap");
        assert_eq!(take(&[]), "uring");
        assert_eq!(take(&[file(10, Some(10), false)]), "mmap");
        assert_eq!(take(&[file(100, Some(100), true)]), "mmap");
        assert_eq!(take(&[file(100, Some(30), true)]), "auto");
        assert_eq!(take(&[file(100, Some(0), true)]), "uring");
        assert_eq!(take(&[file(5000, Some(0), true)]), "uring");
        assert_eq!(take(&[file(5000, Some(5000), true)]), "auto");
        assert_eq!(take(&[file(100, None, true)]), "uring");
        assert_eq!(take(&[Facts::default(), file(100, Some(0), true)]), "uring");
        assert_eq!(take(&[file(0, Some(0), true)]), "uring");
        assert_eq!(choose(&[file(100, Some(100), true)], true, None).0, "auto");
    }

    #[test]
    fn the_worst_is_mended_first_and_once() {
        // Scenario: warnings before problems, two checks with one remedy, five in all. Expectation: three remedies,
        // problems first, none twice; a ring that cannot read a path is no backend.
        let check = |id| Check { id, why: "" };
        let checks = [
            check("a").warning("", "mend a"),
            check("b").problem("", "mend b"),
            check("path.ring_read").problem("", "mend b"),
            check("d").ok(""),
            check("e").problem("", "mend e"),
            check("f").warning("", "mend f"),
        ];
        let summary = Summary::of(&checks, &[], true, None);
        let mended: Vec<&str> = summary
            .mend_first
            .iter()
            .map(|(_, remedy)| remedy.as_str())
            .collect();
        assert_eq!(mended, ["mend b", "mend e", "mend a"]);
        assert_eq!(summary.json()["runs"]["uring"], false);
        assert_eq!(summary.json()["runs"]["mmap"], true);
    }
}
