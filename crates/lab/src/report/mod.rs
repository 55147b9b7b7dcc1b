//! A study's results: one value, written as a table, CSV, JSON, plots and an HTML page.

mod claim;
pub(crate) mod compare;
mod csv;
mod document;
mod measure;
pub(crate) mod plot;

pub use claim::Claim;
pub(crate) use measure::{MEASURES, measure_named};

use crate::error::LabError;
use crate::honesty::{NOT_COUNTED, came_from};
use crate::sample::{Of, Sample, reads_per_second};
use crate::setup::Heat;
use crate::stats::Summary;
use crate::study::{Key, Row, Rows, get};
use ringfetch_command::input_file;
use ringfetch_command::part_file::write_whole;
use serde::{Deserialize, Serialize};
use std::path::Path;

const FORMAT: &str = "ringfetch-lab-report/1";
/// As of the samples that a report is made of.
const LENGTH_MAX_BYTES: u64 = 64 << 20;
/// How the marks of a forced report begin.
const FORCED: &str = "FORCED, no evidence";
/// A larger relative spread means that the machine was not quiet.
const SPREAD_MAX: f64 = 0.25;

/// A row of results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportRow {
    /// The values of the axes.
    pub key: Key,
    /// Where the bytes came from, as measured.
    pub came_from: String,
    /// The strategy's own remark.
    pub note: Option<String>,
    /// Every available measure, by name.
    pub measures: Vec<(String, Summary)>,
}

impl ReportRow {
    pub(crate) fn measure(&self, name: &str) -> Option<&Summary> {
        let found = self.measures.iter().find(|(known, _)| known == name);
        found.map(|(_, summary)| summary)
    }

    fn of(row: &Row) -> Self {
        let share = |of: fn(&Sample) -> Option<f64>| {
            Summary::of(row.measured().filter_map(of)).map(|summary| summary.median)
        };
        let measures = MEASURES.iter().filter_map(|measure| {
            let summary = Summary::of(row.measured().map(measure.of))?;
            Some((measure.name.to_owned(), summary))
        });
        Self {
            key: row.key.clone(),
            came_from: came_from(share(|s| s.device_share), share(|s| s.resident_before)).to_owned(),
            note: row.measured().find_map(|sample| sample.note.clone()),
            measures: measures.collect(),
        }
    }
}

/// An additional table: published figures next to ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beside {
    /// What it shows.
    pub title: String,
    /// The head first.
    pub rows: Vec<Vec<String>>,
}

/// A plot, both of its axes logarithmic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plot {
    /// File name, without extension.
    pub name: String,
    /// What it shows.
    pub title: String,
    /// Horizontal axis, with its unit.
    pub x: String,
    /// Vertical axis, with its unit.
    pub y: String,
    /// Lines with a name, and points with their intervals: x, median, low, high.
    pub series: Vec<Line>,
}

/// A line of a plot.
pub type Line = (String, Vec<[f64; 4]>);

/// A whole report.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Format of this file.
    pub format: String,
    /// Name of the study.
    pub study: String,
    /// The question that it answers.
    pub title: String,
    /// The publication that it repeats.
    pub source: String,
    /// Rules that `--force` overrode: if there are any, the figures are no evidence.
    pub marks: Vec<String>,
    /// Facts about the machine, the data and the run.
    pub facts: Key,
    /// What was measured.
    pub settings: Key,
    /// What was not measured, and why.
    pub left_out: Vec<String>,
    /// What a reader must know.
    pub notes: Vec<String>,
    /// Strategies, one line each.
    pub strategies: Key,
    /// Names of the measures that tables show.
    pub columns: Vec<String>,
    /// The results.
    pub rows: Vec<ReportRow>,
    /// Published claims, judged by the results.
    pub claims: Vec<Claim>,
    /// Published figures next to the results.
    pub beside: Vec<Beside>,
    /// Plots.
    pub plots: Vec<Plot>,
    /// Recommended settings, of studies that give advice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub advice: Vec<Advice>,
    /// The advice as a section of a configuration.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub yaml: String,
}

/// A key of the configuration with its value and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    /// `engine.uring.queue_depth`.
    pub key: String,
    /// As in YAML.
    pub value: String,
    /// With the figures.
    pub why: String,
}

impl Report {
    pub(crate) fn of(study: &crate::study::Study, marks: Vec<String>, facts: Key, rows: &Rows) -> Self {
        let about = |name: &String| {
            let strategy = crate::strategies::named(name)?;
            Some((name.clone(), strategy.about.to_owned()))
        };
        let columns = study.about.columns.split_whitespace();
        let rows = &rows.measured();
        let mut report = Self {
            format: FORMAT.to_owned(),
            study: study.about.name.to_owned(),
            title: study.about.title.to_owned(),
            source: study.about.source.to_owned(),
            marks,
            facts,
            settings: study.settings.clone(),
            left_out: study.left_out.clone(),
            strategies: rows.values("strategy").iter().filter_map(about).collect(),
            columns: columns.map(str::to_owned).collect(),
            rows: rows.0.iter().map(ReportRow::of).collect(),
            ..Self::default()
        };
        (study.about.judge)(&mut report, rows);
        report.doubts(rows);
        report
    }

    /// Adds a table; the head is the first of `rows`.
    pub(crate) fn table(&mut self, title: &str, rows: Vec<Vec<String>>) {
        let title = title.to_owned();
        self.beside.push(Beside { title, rows });
    }

    pub(crate) fn plot(&mut self, name: String, title: String, axes: [&str; 2], series: Vec<Line>) {
        let [x, y] = axes.map(str::to_owned);
        // A plot is shown without its report.
        let title = match self.marks.is_empty() {
            true => title,
            false => format!("{FORCED}: {title}"),
        };
        self.plots.push(Plot {
            name,
            title,
            x,
            y,
            series,
        });
    }

    /// Adds the verdict on a published ratio.
    pub(crate) fn claim(&mut self, claim: &str, published: f64, ours: Option<Summary>) {
        self.claims.push(Claim::of_ratio(claim, published, ours));
    }

    /// Adds notes on figures whose bytes came from elsewhere than they should, or that are uncertain.
    fn doubts(&mut self, rows: &Rows) {
        let of_heats = |heats: &[Heat], places: &[&str]| {
            let pairs = rows.0.iter().zip(&self.rows);
            let promised = pairs.filter(|(row, _)| heats.contains(&row.heat));
            let from = promised.filter(|(_, shown)| {
                let place = shown.came_from.trim_end_matches(NOT_COUNTED);
                places.contains(&place)
            });
            from.count()
        };
        let spread = |row: &Row| row.summary(reads_per_second).map(|all| all.spread());
        let noisy = |row: &&Row| spread(row) > Some(SPREAD_MAX);
        let device = of_heats(&[Heat::Direct, Heat::Cold], &["memory", "both"]);
        let memory = of_heats(&[Heat::Warm], &["device", "evicted", "both"]);
        let unknown = of_heats(&[Heat::Direct, Heat::Cold, Heat::Warm], &["unknown"]);
        for (count, what) in [
            (
                device,
                "rows that should have read from the device read from memory, in part or wholly",
            ),
            (
                memory,
                "rows that should have read from memory read from the device, in part or wholly",
            ),
            (
                unknown,
                "rows do not show where their bytes came from, since neither the device nor the page cache can be asked (as on \
                 overlayfs): put the data into a volume",
            ),
            (
                rows.0.iter().filter(noisy).count(),
                "rows have medians that are uncertain by more than 25 %: the machine was not quiet",
            ),
        ] {
            if count > 0 {
                self.notes.push(format!("{count} {what}"));
            }
        }
    }

    pub(crate) fn fact(&self, name: &str) -> Option<&str> {
        get(&self.facts, name).or_else(|| get(&self.settings, name))
    }

    /// The report as one JSON document.
    pub(crate) fn json(&self) -> Result<String, LabError> {
        let json = serde_json::to_string_pretty(self).map_err(|error| LabError::at("report.json", error))?;
        Ok(format!("{json}\n"))
    }

    /// The report for the terminal.
    pub(crate) fn text(&self) -> String {
        document::text(self)
    }

    /// Writes every form of it into a directory; the JSON comes last.
    pub(crate) fn write(&self, directory: &Path) -> Result<(), LabError> {
        let write = |name: &str, text: &str| {
            let path = directory.join(name);
            write_whole(&path, text.as_bytes()).map_err(|error| LabError::at(path.display(), error))
        };
        let drawn = self.plots.iter().map(plot::svg);
        let drawn: Vec<String> = drawn.collect::<Result<_, _>>()?;
        for (plot, svg) in self.plots.iter().zip(&drawn) {
            write(&format!("{}.svg", plot.name), svg)?;
        }
        write("report.csv", &csv::write(self))?;
        write("report.html", &document::html(self, &drawn))?;
        write("report.json", &self.json()?)
    }

    /// Reads a finished report: its directory, or the file itself.
    ///
    /// # Errors
    /// The file is not a report.
    pub(crate) fn read(path: &Path) -> Result<Self, LabError> {
        let file = if path.is_dir() {
            path.join("report.json")
        } else {
            path.to_owned()
        };
        let shown = file.display();
        let text = input_file::read(&file, LENGTH_MAX_BYTES).map_err(|error| LabError::at(&shown, error))?;
        let report: Option<Self> = serde_json::from_slice(&text).ok();
        report
            .filter(|report| report.format == FORMAT)
            .ok_or_else(|| LabError::Usage(format!("{shown} is not a finished report of this command")))
    }
}

/// A line for each value of `by`, over `x`, from the rows with these values.
pub(crate) fn series(rows: &Rows, values: &[(&str, &str)], by: &str, x: &str, of: Of) -> Vec<Line> {
    let line = |name: String| {
        let points = rows.with(values).filter(|row| row.get(by) == Some(&name));
        let points = points.filter_map(|row| {
            let summary = row.summary(of)?;
            Some([row.number(x)?, summary.median, summary.low, summary.high])
        });
        let points: Vec<[f64; 4]> = points.collect();
        (!points.is_empty()).then_some((name, points))
    };
    rows.values(by).into_iter().filter_map(line).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::study::tests::row;
    use crate::study::{About, Study, pair};

    pub(crate) fn report() -> Report {
        let key = |strategy, depth| [("profile", "direct"), ("strategy", strategy), ("depth", depth)];
        let slow = row(&key("pread", "1"), &[100; 5]);
        let rows = Rows(vec![slow, row(&key("aio", "4"), &[300, 310, 320, 330, 340])]);
        static ABOUT: About = About {
            name: "sample",
            title: "What <is> & is \"not\"",
            source: "a publication",
            columns: "reads_per_second p99_us",
            judge: |report, rows| {
                let lines = series(rows, &[], "strategy", "depth", reads_per_second);
                let (name, title) = ("plot".to_owned(), "a <plot>".to_owned());
                report.plot(name, title, ["depth", "reads/s"], lines);
                report.claim("5x", 5.0, rows.0[1].ratio(&rows.0[0], reads_per_second));
            },
        };
        let study = Study {
            about: &ABOUT,
            settings: vec![pair("depths", "1, 4")],
            materials: Vec::new(),
            chosen: Vec::new(),
            cells: Vec::new(),
            left_out: vec!["tokio-fs: not <here>".to_owned()],
            needs: crate::study::Needs::default(),
            measure: crate::study::Measure::Once,
        };
        let facts = vec![pair("kernel", "1.2")];
        Report::of(&study, vec!["--size: too small".to_owned()], facts, &rows)
    }

    #[test]
    fn a_report_is_written_whole_and_read_again() {
        // Scenario: a forced report into a directory. Expected: every form of it, its plot with the mark; the JSON is the same
        // report; another file is refused.
        let directory = tempfile::tempdir().unwrap();
        let report = report();
        report.write(directory.path()).unwrap();
        let names = std::fs::read_dir(directory.path()).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["plot.svg", "report.csv", "report.html", "report.json"]);
        assert_eq!(Report::read(directory.path()).unwrap(), report);
        let plot = std::fs::read_to_string(directory.path().join("plot.svg")).unwrap();
        assert!(plot.contains("FORCED, no evidence"), "{plot}");
        let other = directory.path().join("other.json");
        std::fs::write(&other, "{}").unwrap();
        let refused = Report::read(&other).unwrap_err().to_string();
        assert!(refused.contains("other.json"));
    }

    #[test]
    fn rows_that_the_device_does_not_count_are_checked_by_the_page_cache() {
        // Scenario: cold and warm rows without counters, of data that were in memory, in part, and not at all; then rows of
        // which nothing is known, one of them as found. Expected: a note on those that are not what they should be; one on
        // the row that should be known.
        let notes = |rows: &[(Heat, Option<f64>)]| {
            let row = |(heat, resident): &(Heat, Option<f64>)| {
                let mut row = row(&[("strategy", "uring")], &[100; 5]);
                row.heat = *heat;
                for sample in row.samples.iter_mut().flatten() {
                    (sample.device_share, sample.resident_before) = (None, *resident);
                }
                row
            };
            let rows = Rows(rows.iter().map(row).collect());
            let mut report = report();
            report.rows = rows.0.iter().map(ReportRow::of).collect();
            report.notes.clear();
            report.doubts(&rows);
            report.notes
        };
        let all = |heat| [0.0, 0.5, 1.0].map(|share| (heat, Some(share)));
        let cold = notes(&all(Heat::Cold));
        assert!(
            cold.len() == 1 && cold[0].starts_with("2 rows that should have read from the device"),
            "{cold:?}"
        );
        let warm = notes(&all(Heat::Warm));
        assert!(
            warm.len() == 1 && warm[0].starts_with("2 rows that should have read from memory"),
            "{warm:?}"
        );
        let unknown = notes(&[(Heat::Direct, None), (Heat::AsFound, None)]);
        assert!(
            unknown.len() == 1 && unknown[0].starts_with("1 rows do not show where"),
            "{unknown:?}"
        );
    }

    #[test]
    fn rows_that_were_not_cold_are_pointed_out() {
        // Scenario: a row of direct reads, which its key need not say, whose bytes came from memory and which varies.
        // Expected: a note on each.
        let mut warm = row(&[("strategy", "uring")], &[100, 100, 100, 200, 300]);
        let samples = warm.samples.iter_mut().flatten();
        samples.for_each(|sample| sample.device_share = Some(0.0));
        let rows = Rows(vec![warm]);
        let mut report = report();
        report.rows = rows.0.iter().map(ReportRow::of).collect();
        report.notes.clear();
        report.doubts(&rows);
        assert_eq!(report.rows[0].came_from, "memory");
        let notes = &report.notes;
        assert!(notes.len() == 2 && notes[0].starts_with("1 rows"), "{notes:?}");
    }
}
