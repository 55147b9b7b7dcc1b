//! The report as text for a terminal.

use super::{Report, measure_named};
use crate::study::Key;
use crate::table::Table;
use std::fmt::Write as _;

pub(super) fn write(report: &Report) -> String {
    let mut out = String::new();
    // A String takes everything.
    let _written = lines(report, &mut out);
    out
}

fn lines(report: &Report, out: &mut String) -> std::fmt::Result {
    writeln!(out, "{}: {}", report.study, report.title)?;
    for mark in &report.marks {
        writeln!(out, "FORCED, no evidence: {mark}")?;
    }
    writeln!(out)?;
    pairs(out, &report.facts);
    writeln!(out)?;
    let mut table = Table::new(&[]);
    table.row(head(report));
    for row in cells(report) {
        table.row(row);
    }
    out.push_str(&shown(&table));
    for beside in &report.beside {
        writeln!(out, "\n{}", beside.title)?;
        let mut table = Table::new(&[]);
        for row in &beside.rows {
            table.row(row.iter().map(String::as_str));
        }
        out.push_str(&shown(&table));
    }
    for (title, sentences) in [("Left out", &report.left_out), ("Notes", &report.notes)] {
        if !sentences.is_empty() {
            writeln!(out, "\n{title}")?;
        }
        for sentence in sentences {
            writeln!(out, "- {sentence}")?;
        }
    }
    if !report.claims.is_empty() {
        writeln!(out, "\nClaims of {}", report.source)?;
    }
    for claim in &report.claims {
        writeln!(out, "- {}: {}: {}", claim.claim, claim.verdict, claim.words)?;
    }
    Ok(())
}

fn pairs(out: &mut String, pairs: &Key) {
    let mut table = Table::new(&[]);
    for (name, value) in pairs {
        table.row([name.as_str(), value.as_str()]);
    }
    out.push_str(&shown(&table));
}

fn shown(table: &Table) -> String {
    let mut bytes = Vec::new();
    let _written = table.write(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The head of the table of results: axes, measures, where the bytes came from.
pub(super) fn head(report: &Report) -> Vec<String> {
    let mut head: Vec<String> = Vec::new();
    if let Some(row) = report.rows.first() {
        head.extend(row.key.iter().map(|(name, _)| name.clone()));
    }
    for name in &report.columns {
        head.push(
            measure_named(name)
                .map_or(name.as_str(), |measure| measure.title)
                .to_owned(),
        );
    }
    if let Some(first) = report.columns.first().and_then(|name| measure_named(name)) {
        head.push(format!("{} from .. to", first.title));
    }
    head.extend(["from".to_owned(), "note".to_owned()]);
    head
}

/// A line for each row: medians, and the interval of the first measure.
pub(super) fn cells(report: &Report) -> Vec<Vec<String>> {
    let line = |row: &super::ReportRow| {
        let mut cells: Vec<String> = row.key.iter().map(|(_, value)| value.clone()).collect();
        for name in &report.columns {
            let shown = row.measure(name).zip(measure_named(name));
            cells.push(shown.map_or_else(
                || "-".to_owned(),
                |(summary, measure)| (measure.show)(summary.median),
            ));
        }
        if let Some(name) = report.columns.first() {
            let shown = row.measure(name).zip(measure_named(name));
            cells.push(shown.map_or_else(String::new, |(summary, measure)| {
                format!(
                    "{} .. {}",
                    (measure.show)(summary.low),
                    (measure.show)(summary.high)
                )
            }));
        }
        cells.push(row.came_from.clone());
        cells.push(row.note.clone().unwrap_or_default());
        cells
    };
    report.rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use crate::report::tests::report;

    #[test]
    fn the_table_says_everything_that_a_reader_needs() {
        // Scenario: a forced report. Expected: its mark, facts, medians with intervals, what was left out, the claim.
        let text = report().text();
        for part in [
            "FORCED, no evidence: --size: too small",
            "kernel",
            "reads/s from .. to",
            "320",
            "300 .. 340",
            "device",
            "- tokio-fs: not <here>",
            "- 5x: refuted: does not hold here: 3.20x",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
