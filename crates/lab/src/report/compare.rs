//! Compares two reports of one study: what differs beyond the repetitions' spread.

use super::{Report, measure_named};
use crate::error::LabError;
use crate::study::shown;
use ringfetch_command::table::Table;

/// A table of the second report against the first.
///
/// # Errors
/// The reports are of different studies.
pub(crate) fn compare(first: &Report, second: &Report) -> Result<String, LabError> {
    if first.study != second.study {
        let (first, second) = (&first.study, &second.study);
        let problem = format!("these are reports of different studies: {first} and {second}");
        return Err(LabError::Usage(problem));
    }
    let mut out = String::new();
    for (name, report) in [("A", first), ("B", second)] {
        for mark in &report.marks {
            out.push_str(&format!("{name} was FORCED, no evidence: {mark}\n"));
        }
    }
    let facts = [&first.facts, &first.settings, &second.facts, &second.settings];
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in facts.into_iter().flatten() {
        if names.contains(&name) {
            continue;
        }
        names.push(name);
        let [a, b] = [first, second].map(|report| report.fact(name).unwrap_or("-"));
        if a != b {
            out.push_str(&format!("{name}: {a} against {b}\n"));
        }
    }
    let mut table = Table::new(&[]);
    table.row(["", "measure", "A", "B", "B / A", ""]);
    let (mut same, mut differing, mut both) = (0, 0, 0);
    for row in &first.rows {
        let Some(other) = second.rows.iter().find(|other| other.key == row.key) else {
            continue;
        };
        both += 1;
        for name in &first.columns {
            let (Some(a), Some(b)) = (row.measure(name), other.measure(name)) else {
                continue;
            };
            let Some(measure) = measure_named(name).filter(|_| a.differs_from(b)) else {
                same += u32::from(!a.differs_from(b));
                continue;
            };
            let [shown_a, shown_b] = [a, b].map(|summary| (measure.show)(summary.median));
            let (times, verdict) = (
                b.median / a.median,
                if b.median > a.median { "more" } else { "less" },
            );
            let times = format!("{times:.2}");
            differing += 1;
            table.row([&shown(&row.key), name, &shown_a, &shown_b, &times, verdict].map(str::to_owned));
        }
    }
    let table = if differing == 0 {
        String::new()
    } else {
        format!("\n{table}")
    };
    let alone = first.rows.len() + second.rows.len() - 2 * both;
    Ok(format!(
        "{out}{table}\n{same} measures do not differ beyond the spread; {alone} rows are in one report only\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn only_what_differs_beyond_the_spread_is_shown() {
        // Scenario: a report against itself; against one with a faster row, another kernel and one row less;
        // against one of another study. Expected: no row; that row and the kernel; an error.
        let first = report();
        let same = compare(&first, &first).unwrap();
        assert!(
            same.contains("4 measures do not differ") && !same.contains("B / A"),
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
