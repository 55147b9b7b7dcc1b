//! Two reports of one study beside each other: what differs beyond the repetitions' spread.

use super::{Report, measure_named};
use crate::error::LabError;
use crate::study::shown;
use crate::table::Table;
use std::fmt::Write as _;

/// A table of the second report against the first.
///
/// # Errors
/// They are reports of different studies.
pub(crate) fn compare(first: &Report, second: &Report) -> Result<String, LabError> {
    if first.study != second.study {
        return Err(LabError::Usage(format!(
            "these are reports of different studies: {} and {}",
            first.study, second.study
        )));
    }
    let mut out = String::new();
    // A String takes everything.
    let _written = lines(first, second, &mut out);
    Ok(out)
}

fn lines(first: &Report, second: &Report, out: &mut String) -> std::fmt::Result {
    for (name, report) in [("A", first), ("B", second)] {
        for mark in &report.marks {
            writeln!(out, "{name} was FORCED, no evidence: {mark}")?;
        }
    }
    let value = |report: &Report, name: &str| {
        let found = report
            .facts
            .iter()
            .chain(&report.settings)
            .find(|(known, _)| known == name);
        found.map_or_else(|| "-".to_owned(), |(_, value)| value.clone())
    };
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in [&first.facts, &first.settings, &second.facts, &second.settings]
        .into_iter()
        .flatten()
    {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    for name in names {
        let (a, b) = (value(first, name), value(second, name));
        if a != b {
            writeln!(out, "{name}: {a} against {b}")?;
        }
    }
    writeln!(out)?;
    let mut table = Table::new(&[]);
    table.row(["", "measure", "A", "B", "B / A", ""]);
    let (mut same, mut alone) = (0, second.rows.len());
    for row in &first.rows {
        let Some(other) = second.rows.iter().find(|other| other.key == row.key) else {
            alone += 1;
            continue;
        };
        alone -= 1;
        for name in &first.columns {
            let (Some(a), Some(b)) = (row.measure(name), other.measure(name)) else {
                continue;
            };
            if !a.differs_from(b) {
                same += 1;
                continue;
            }
            let Some(show) = measure_named(name).map(|measure| measure.show) else {
                continue;
            };
            let verdict = if b.median > a.median { "more" } else { "less" };
            table.row([
                shown(&row.key),
                name.clone(),
                show(a.median),
                show(b.median),
                format!("{:.2}", b.median / a.median),
                verdict.to_owned(),
            ]);
        }
    }
    let mut bytes = Vec::new();
    let _written = table.write(&mut bytes);
    out.push_str(&String::from_utf8_lossy(&bytes));
    writeln!(
        out,
        "\n{same} measures do not differ beyond the spread; {alone} rows are in one report only"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn only_what_differs_beyond_the_spread_is_shown() {
        // Scenario: a report against itself; against one with a faster row, another kernel and a row less; against one of
        // another study. Expected: no row; that row and the kernel; an error.
        let first = report();
        let same = compare(&first, &first).unwrap();
        assert!(
            same.contains("4 measures do not differ") && !same.contains("strategy="),
            "{same}"
        );
        let mut second = first.clone();
        second.facts[0].1 = "9.9".to_owned();
        second.rows.remove(0);
        let faster = &mut second.rows[0].measures[0].1;
        (faster.median, faster.low, faster.high) = (640.0, 600.0, 680.0);
        let text = compare(&first, &second).unwrap();
        assert!(text.contains("kernel: 1.2 against 9.9"), "{text}");
        assert!(
            text.contains("strategy=aio") && text.contains("2.00") && text.contains("more"),
            "{text}"
        );
        assert!(
            text.contains("1 measures do not differ") && text.contains("1 rows are in one"),
            "{text}"
        );
        second.study = "other".to_owned();
        assert!(compare(&first, &second).is_err());
    }
}
