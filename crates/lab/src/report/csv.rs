//! The results as CSV (RFC 4180): the axes, then median, low and high of each measure. A forced report has its marks in the
//! notes of all rows, since a row is read without the others.

use super::{FORCED, MEASURES, Report};

pub(super) fn write(report: &Report) -> String {
    let axes = report.rows.iter().take(1).flat_map(|row| &row.key);
    let mut head: Vec<String> = axes.map(|(name, _)| name.clone()).collect();
    head.extend(["came_from", "repetitions"].map(str::to_owned));
    for measure in &MEASURES {
        head.extend(["median", "low", "high"].map(|part| format!("{}_{part}", measure.name)));
    }
    head.push("note".to_owned());
    let mut out = line(&head);
    for row in &report.rows {
        let mut cells: Vec<String> = row.key.iter().map(|(_, value)| value.clone()).collect();
        let count = row.measures.first().map_or(0, |(_, summary)| summary.count);
        cells.extend([row.came_from.clone(), count.to_string()]);
        for measure in &MEASURES {
            let found = row.measure(measure.name);
            let parts = found.map(|summary| [summary.median, summary.low, summary.high]);
            let shown = parts.map(|parts| parts.map(|value| format!("{value:.6}")));
            cells.extend(shown.unwrap_or_default());
        }
        let marks = report.marks.iter().map(|mark| format!("{FORCED}: {mark}"));
        cells.push(marks.chain(row.note.clone()).collect::<Vec<_>>().join("; "));
        out.push_str(&line(&cells));
    }
    out
}

fn line(cells: &[String]) -> String {
    let quoted = |cell: &String| match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.clone(),
    };
    cells.iter().map(quoted).collect::<Vec<_>>().join(",") + "\r\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_has_as_many_cells_as_the_head() {
        // Scenario: two rows of a forced report, a note with a comma and quotes. Expected: one line each, quoted, of equal
        // length, whose note begins with the mark; not forced, without it.
        let mut report = crate::report::tests::report();
        report.rows[0].note = Some("not polled, \"really\"".to_owned());
        let text = write(&report);
        let lines: Vec<&str> = text.split_terminator("\r\n").collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("profile,strategy,depth,came_from,repetitions,reads_per_second_median"));
        let mark = "FORCED, no evidence: --size: too small";
        assert!(lines[1].ends_with(&format!(",\"{mark}; not polled, \"\"really\"\"\"")));
        assert!(lines[2].ends_with(&format!(",\"{mark}\"")));
        report.marks.clear();
        let text = write(&report);
        let lines: Vec<&str> = text.split_terminator("\r\n").collect();
        assert!(lines[1].ends_with(",\"not polled, \"\"really\"\"\"") && lines[2].ends_with(','));
        assert_eq!(lines[0].split(',').count(), lines[2].split(',').count());
        assert!(lines[2].starts_with("direct,aio,4,device,5,320.000000,300.000000,340.000000"));
    }
}
