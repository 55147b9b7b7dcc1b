//! All findings as text, and as JSON whose ids are stable.

use super::Needs;
use super::finding::{Finding, Verdict};
use super::summary::Summary;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::io::{self, Write};

#[derive(Debug)]
pub(super) struct Report {
    pub(super) release: String,
    pub(super) user: u32,
    pub(super) needs: Needs,
    pub(super) checks: Vec<Finding>,
    pub(super) summary: Summary,
}

impl Report {
    /// Names of the checks with this verdict or a worse one.
    pub(super) fn at_least(&self, verdict: Verdict) -> Vec<String> {
        let bad = self.checks.iter().filter(|finding| finding.verdict >= verdict);
        bad.map(Finding::name).collect()
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.checks
            .iter()
            .filter(|finding| finding.verdict == verdict)
            .count()
    }

    pub(super) fn json(&self) -> Value {
        let fix_first = self.summary.fix_first.iter();
        let fix_first: Vec<Value> = fix_first
            .map(|(name, remedy)| json!({ "check": name, "remedy": remedy }))
            .collect();
        let worst = self.checks.iter().map(|finding| finding.verdict).max();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "kernel_release": self.release,
            "user": self.user,
            "memory_budget_bytes": self.needs.memory_budget_bytes,
            "cores": self.needs.cores,
            "verdict": worst.unwrap_or(Verdict::Ok).as_str(),
            "backends": self.summary.json(),
            "fix_first": fix_first,
            "checks": self.checks,
        })
    }

    pub(super) fn write(&self, out: &mut dyn Write, colour: bool) -> io::Result<()> {
        writeln!(
            out,
            "ringfetch {} on Linux {}, as user {}: limits are those of this process, so run it as the daemon runs",
            env!("CARGO_PKG_VERSION"),
            self.release,
            self.user
        )?;
        let width = self.checks.iter().map(|finding| finding.check.id.len()).max();
        let width = width.unwrap_or(0);
        let mut shown = HashSet::new();
        for section in self.checks.chunk_by(|a, b| a.path == b.path) {
            let path = section.first().and_then(|finding| finding.path.as_deref());
            writeln!(out, "\n{}", path.unwrap_or("host"))?;
            let mut repeated = 0;
            for finding in section {
                // Paths on one device hardly differ.
                let id = finding.check.id;
                if !shown.insert((id, &finding.found)) && id.starts_with("device.") {
                    repeated += 1;
                    continue;
                }
                finding.write(out, width, colour)?;
            }
            if repeated > 0 {
                writeln!(out, "  and of the device, as above: {repeated}")?;
            }
        }
        writeln!(out)?;
        self.summary.write(out)?;
        let all = [Verdict::Problem, Verdict::Warning, Verdict::Note, Verdict::Ok];
        let [problems, warnings, notes, ok] = all.map(|verdict| self.count(verdict));
        writeln!(
            out,
            "problems: {problems}, warnings: {warnings}, notes: {notes}, ok: {ok}"
        )
    }
}
