//! Compares two reports of one study: what differs beyond the repetitions' spread.

use super::{Report, measure_named};
use crate::error::LabError;
use crate::stats::Summary;
use crate::study::{Key, shown};
use ringfetch_command::table::Table;
use serde::Serialize;

const FORMAT: &str = "ringfetch-lab-comparison/1";

/// The second report, B, against the first, A.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    format: &'static str,
    study: String,
    /// Why A and B are no evidence.
    marks_a: Vec<String>,
    marks_b: Vec<String>,
    /// Facts and settings that are not the same.
    facts: Vec<DifferentFact>,
    /// Measures that differ beyond the spread.
    differ: Vec<Difference>,
    /// Number of measures that do not.
    same: u32,
    /// Number of rows that are in one report only.
    alone: usize,
}

#[derive(Debug, Serialize)]
struct DifferentFact {
    name: String,
    a: Option<String>,
    b: Option<String>,
}

#[derive(Debug, Serialize)]
struct Difference {
    key: Key,
    measure: String,
    a: Summary,
    b: Summary,
    /// Null in JSON if A is 0.
    b_over_a: f64,
}

impl Comparison {
    /// # Errors
    /// The reports are of different studies.
    pub(crate) fn of(first: &Report, second: &Report) -> Result<Self, LabError> {
        if first.study != second.study {
            let (first, second) = (&first.study, &second.study);
            let problem = format!("these are reports of different studies: {first} and {second}");
            return Err(LabError::Usage(problem));
        }
        let all = [&first.facts, &first.settings, &second.facts, &second.settings];
        let mut names: Vec<&String> = Vec::new();
        for (name, _) in all.into_iter().flatten() {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let facts = names.into_iter().map(|name| {
            let [a, b] = [first, second].map(|report| report.fact(name).map(str::to_owned));
            let name = name.clone();
            DifferentFact { name, a, b }
        });
        let (mut differ, mut same, mut both) = (Vec::new(), 0, 0);
        for row in &first.rows {
            let Some(other) = second.rows.iter().find(|other| other.key == row.key) else {
                continue;
            };
            both += 1;
            for name in &first.columns {
                let (Some(a), Some(b)) = (row.measure(name), other.measure(name)) else {
                    continue;
                };
                if a.differs_from(b) {
                    differ.push(Difference {
                        key: row.key.clone(),
                        measure: name.clone(),
                        a: *a,
                        b: *b,
                        b_over_a: b.median / a.median,
                    });
                } else {
                    same += 1;
                }
            }
        }
        Ok(Self {
            format: FORMAT,
            study: first.study.clone(),
            marks_a: first.marks.clone(),
            marks_b: second.marks.clone(),
            facts: facts.filter(|fact| fact.a != fact.b).collect(),
            differ,
            same,
            alone: first.rows.len() + second.rows.len() - 2 * both,
        })
    }

    /// As text: the remarks, and a table.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        for (name, marks) in [("A", &self.marks_a), ("B", &self.marks_b)] {
            for mark in marks {
                out.push_str(&format!("{name} was FORCED, no evidence: {mark}\n"));
            }
        }
        for DifferentFact { name, a, b } in &self.facts {
            let [a, b] = [a, b].map(|value| value.as_deref().unwrap_or("-"));
            out.push_str(&format!("{name}: {a} against {b}\n"));
        }
        let mut table = Table::new(&[]);
        table.row(["", "measure", "A", "B", "B / A", ""]);
        for Difference {
            key,
            measure,
            a,
            b,
            b_over_a,
        } in &self.differ
        {
            let show = |value| measure_named(measure).map_or_else(String::new, |named| (named.show)(value));
            let verdict = if b.median > a.median { "more" } else { "less" };
            let [a, b] = [a, b].map(|summary| show(summary.median));
            let times = format!("{b_over_a:.2}");
            table.row([&shown(key), measure, &a, &b, &times, verdict].map(str::to_owned));
        }
        if !self.differ.is_empty() {
            out.push_str(&format!("\n{table}"));
        }
        let (same, alone) = (self.same, self.alone);
        out.push_str(&format!(
            "\n{same} measures do not differ beyond the spread; {alone} rows are in one report only\n"
        ));
        out
    }

    /// As JSON, for programs.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub(crate) fn json(&self) -> Result<String, LabError> {
        let json =
            serde_json::to_string_pretty(self).map_err(|error| LabError::at("the comparison", error))?;
        Ok(format!("{json}\n"))
    }
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
        let same = Comparison::of(&first, &first).unwrap().text();
        assert!(
            same.contains("4 measures do not differ") && !same.contains("B / A"),
            "{same}"
        );
        let mut second = first.clone();
        second.facts[0].1 = "9.9".to_owned();
        second.rows.remove(0);
        let faster = &mut second.rows[0].measures[0].1;
        (faster.median, faster.low, faster.high) = (640.0, 600.0, 680.0);
        let compared = Comparison::of(&first, &second).unwrap();
        let text = compared.text();
        assert!(text.contains("kernel: 1.2 against 9.9"), "{text}");
        assert!(
            text.contains("strategy=aio") && text.contains("2.00") && text.contains("more"),
            "{text}"
        );
        assert!(
            text.contains("1 measures do not differ") && text.contains("1 rows are in one"),
            "{text}"
        );
        let json: serde_json::Value = serde_json::from_str(&compared.json().unwrap()).unwrap();
        let kernel = serde_json::json!([{ "name": "kernel", "a": "1.2", "b": "9.9" }]);
        assert_eq!(json["facts"], kernel, "{json}");
        assert_eq!([&json["same"], &json["alone"]], [1, 1], "{json}");
        let differ = &json["differ"][0];
        assert_eq!(
            [
                &differ["a"]["median"],
                &differ["b"]["median"],
                &differ["b_over_a"]
            ],
            [320.0, 640.0, 2.0]
        );
        second.study = "other".to_owned();
        assert!(Comparison::of(&first, &second).is_err());
    }
}
