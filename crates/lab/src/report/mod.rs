//! A study's results: one value, written as a table, CSV, JSON, plots and a page.

pub(crate) mod compare;
mod csv;
mod html;
pub(crate) mod plot;
mod text;

use crate::error::LabError;
use crate::honesty::came_from;
use crate::job::Sample;
use crate::part_file::write_whole;
use crate::quantity::{latency, rate};
use crate::stats::Summary;
use crate::study::{Key, Row, Rows, bytes_per_second, reads_per_second};
use serde::{Deserialize, Serialize};
use std::path::Path;

const FORMAT: &str = "ringfetch-lab-report/1";
/// A ratio of ours within these factors of the published one confirms it.
const CONFIRMS: (f64, f64) = (0.8, 1.25);
/// A median that is uncertain by more was not measured on a quiet machine.
const SPREAD_MAX: f64 = 0.25;

/// How a measure is taken from a sample and shown.
pub(crate) struct Measure {
    /// In JSON and CSV, its unit last.
    pub(crate) name: &'static str,
    /// In tables.
    pub(crate) title: &'static str,
    pub(crate) of: fn(&Sample) -> f64,
    pub(crate) show: fn(f64) -> String,
}

fn micros(value: f64) -> String {
    latency(value * 1e3)
}

/// Of one core.
pub(crate) fn cpu_percent(sample: &Sample) -> f64 {
    sample.cpu_us_per_read * reads_per_second(sample) / 1e4
}

fn percent(value: f64) -> String {
    format!("{:.2} %", value * 100.0)
}

fn two(value: f64) -> String {
    format!("{value:.2}")
}

type Of = fn(&Sample) -> f64;
type Show = fn(f64) -> String;

const fn measure(name: &'static str, title: &'static str, of: Of, show: Show) -> Measure {
    Measure {
        name,
        title,
        of,
        show,
    }
}

const MIB: f64 = 1_048_576.0;
const DEPTH: Show = |value| format!("{value:.1}");
const TIMES: Show = |value| format!("{value:.0}x");
const WHOLE: Show = |value| format!("{value:.0}");
const TIME: Show = |value| latency(value * 1e9);
const NONE: f64 = f64::NAN;

/// Everything that is summarised of a row. What a sample has not is no number, and is left out.
pub(crate) const MEASURES: [Measure; 18] = [
    measure("reads_per_second", "reads/s", reads_per_second, rate),
    measure("mib_per_second", "MiB/s", |s| bytes_per_second(s) / MIB, rate),
    measure("step_seconds", "time", |s| s.seconds, TIME),
    measure("min_us", "min", |s| s.min_us, micros),
    measure("mean_us", "mean", |s| s.mean_us, micros),
    measure("p50_us", "p50", |s| s.p50_us, micros),
    measure("p99_us", "p99", |s| s.p99_us, micros),
    measure("p999_us", "p99.9", |s| s.p999_us, micros),
    measure("max_us", "max", |s| s.max_us, micros),
    measure("depth_achieved", "in flight", |s| s.depth_achieved, DEPTH),
    measure("cpu_us_per_read", "CPU us/read", |s| s.cpu_us_per_read, two),
    measure("cpu_percent", "CPU %", cpu_percent, WHOLE),
    measure("multiple", "N", |s| s.multiple.unwrap_or(NONE), TIMES),
    measure(
        "over_1ms",
        "> 1 ms",
        |s| s.over.map_or(NONE, |over| over[0]),
        percent,
    ),
    measure(
        "over_8ms",
        "> 8 ms",
        |s| s.over.map_or(NONE, |over| over[3]),
        percent,
    ),
    measure(
        "over_64ms",
        "> 64 ms",
        |s| s.over.map_or(NONE, |over| over[6]),
        percent,
    ),
    measure(
        "device_share",
        "from device",
        |s| s.device_share.unwrap_or(NONE),
        two,
    ),
    measure(
        "resident_before",
        "resident",
        |s| s.resident_before.unwrap_or(NONE),
        two,
    ),
];

/// The measure of this name.
pub(crate) fn measure_named(name: &str) -> Option<&'static Measure> {
    MEASURES.iter().find(|measure| measure.name == name)
}

/// A row of results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportRow {
    /// The values of the axes.
    pub key: Key,
    /// Where the bytes came from, as measured.
    pub came_from: String,
    /// What the strategy has to say of itself.
    pub note: Option<String>,
    /// By name, of every measure that there is.
    pub measures: Vec<(String, Summary)>,
}

impl ReportRow {
    /// A measure's summary.
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

/// What the publication says, and whether it holds here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// As the publication has it.
    pub claim: String,
    /// `confirmed`, `refuted`, `undecided` or `not tested`.
    pub verdict: String,
    /// In words, with our figures.
    pub words: String,
}

impl Claim {
    fn of(claim: String, (verdict, words): (&str, String)) -> Self {
        Self {
            claim,
            verdict: verdict.to_owned(),
            words,
        }
    }

    /// Of a ratio that the publication gives.
    pub(crate) fn of_ratio(claim: String, published: f64, ours: Option<Summary>) -> Self {
        let Some(ours) = ours else {
            return Self::of(claim, Self::untested());
        };
        let (least, most) = (published * CONFIRMS.0, published * CONFIRMS.1);
        let times = ours.times();
        let refuted = |than| format!("does not hold here: {times}, {than} than {published}x");
        let told = if ours.high < least {
            ("refuted", refuted("less"))
        } else if ours.low > most {
            ("refuted", refuted("more"))
        } else if ours.low >= least && ours.high <= most {
            ("confirmed", format!("holds here: {times}"))
        } else {
            ("undecided", format!("the repetitions differ too much: {times}"))
        };
        Self::of(claim, told)
    }

    /// That something is more than something else: of their ratio.
    pub(crate) fn of_order(claim: String, ratio: Option<Summary>) -> Self {
        let told = match ratio.map(|ratio| (ratio, ratio.times())) {
            None => Self::untested(),
            Some((ratio, times)) if ratio.low > 1.0 => ("confirmed", format!("holds here: {times}")),
            Some((ratio, times)) if ratio.high < 1.0 => {
                ("refuted", format!("the reverse holds here: {times}"))
            }
            Some((_, times)) => ("undecided", format!("no difference beyond the spread: {times}")),
        };
        Self::of(claim, told)
    }

    /// That something is at least so many times something else: of their ratio.
    pub(crate) fn at_least(claim: String, least: f64, ratio: Option<Summary>) -> Self {
        let told = match ratio.map(|ratio| (ratio, ratio.times())) {
            None => Self::untested(),
            Some((ratio, times)) if ratio.low >= least => ("confirmed", times),
            Some((ratio, times)) if ratio.high < least => ("refuted", times),
            Some((_, times)) => ("undecided", times),
        };
        Self::of(claim, told)
    }

    fn untested() -> (&'static str, String) {
        let words = "a strategy that it is about was not measured";
        ("not tested", words.to_owned())
    }
}

/// A table beside the results: published figures beside ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beside {
    /// What it shows.
    pub title: String,
    /// The head first.
    pub rows: Vec<Vec<String>>,
}

impl Beside {
    pub(crate) fn of(title: &str, rows: Vec<Vec<String>>) -> Self {
        let title = title.to_owned();
        Self { title, rows }
    }
}

/// A plot, both of its axes logarithmic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plot {
    /// File name, without its ending.
    pub name: String,
    /// What it shows.
    pub title: String,
    /// Of the horizontal axis, with its unit.
    pub x: String,
    /// Of the vertical axis, with its unit.
    pub y: String,
    /// A name, and points with their intervals: x, median, low, high.
    pub series: Vec<(String, Vec<[f64; 4]>)>,
}

impl Plot {
    pub(crate) fn of(
        name: String,
        title: String,
        axes: [&str; 2],
        series: Vec<(String, Vec<[f64; 4]>)>,
    ) -> Self {
        let [x, y] = axes.map(str::to_owned);
        Self {
            name,
            title,
            x,
            y,
            series,
        }
    }
}

/// All of a study.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Of this file.
    pub format: String,
    /// Name of the study.
    pub study: String,
    /// What it answers.
    pub title: String,
    /// The publication that it repeats.
    pub source: String,
    /// Rules that `--force` has set aside: with any, the figures are no evidence.
    pub marks: Vec<String>,
    /// Of the machine, the data and the run.
    pub facts: Key,
    /// What was measured.
    pub settings: Key,
    /// What was not, and why.
    pub left_out: Vec<String>,
    /// What a reader has to know.
    pub notes: Vec<String>,
    /// Strategies, with a line each.
    pub strategies: Key,
    /// Names of the measures that tables show.
    pub columns: Vec<String>,
    /// The results.
    pub rows: Vec<ReportRow>,
    /// Published claims against them.
    pub claims: Vec<Claim>,
    /// Published figures beside them.
    pub beside: Vec<Beside>,
    /// Plots.
    pub plots: Vec<Plot>,
    /// Settings that follow, of studies that give advice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub advice: Vec<Advice>,
    /// The same as a section of a configuration.
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
        let named = rows.values("strategy");
        let about = |name: &String| {
            let strategy = crate::strategies::named(name)?;
            Some((name.clone(), strategy.about.to_owned()))
        };
        let mut report = Self {
            format: FORMAT.to_owned(),
            study: study.name.to_owned(),
            title: study.title.to_owned(),
            source: study.source.to_owned(),
            marks,
            facts,
            settings: study.settings.clone(),
            left_out: study.left_out.clone(),
            notes: Vec::new(),
            strategies: named.iter().filter_map(about).collect(),
            columns: study.columns.iter().map(|name| (*name).to_owned()).collect(),
            rows: rows.0.iter().map(ReportRow::of).collect(),
            claims: Vec::new(),
            beside: Vec::new(),
            plots: Vec::new(),
            advice: Vec::new(),
            yaml: String::new(),
        };
        (study.judge)(&mut report, rows);
        report.doubts(rows);
        report
    }

    /// Notes on figures that are not what their row says, or that are uncertain.
    fn doubts(&mut self, rows: &Rows) {
        // Rows whose key says one thing and whose bytes came from elsewhere.
        let astray = |promises: [&str; 2], place: &str| {
            let promised = |row: &&ReportRow| {
                row.key
                    .iter()
                    .any(|(_, value)| promises.contains(&value.as_str()))
            };
            let rows = self.rows.iter().filter(promised);
            rows.filter(|row| row.came_from == place || row.came_from == "both")
                .count()
        };
        let spread = |row: &&Row| {
            row.summary(reads_per_second)
                .is_some_and(|all| all.spread() > SPREAD_MAX)
        };
        let notes = [
            (
                astray(["direct", "cold"], "memory"),
                "rows that should have read from the device read from memory, in part or wholly",
            ),
            (
                astray(["warm", "buffered"], "device"),
                "rows that should have read from memory read from the device, in part or wholly",
            ),
            (
                rows.0.iter().filter(spread).count(),
                "rows have medians that are uncertain by more than 25 %: the machine was not quiet",
            ),
        ];
        let found = notes.into_iter().filter(|(count, _)| *count > 0);
        self.notes
            .extend(found.map(|(count, what)| format!("{count} {what}")));
    }

    /// As one JSON document.
    pub(crate) fn json(&self) -> Result<String, LabError> {
        let json = serde_json::to_string_pretty(self).map_err(|error| LabError::at("report.json", error))?;
        Ok(format!("{json}\n"))
    }

    /// The table for the terminal.
    pub(crate) fn text(&self) -> String {
        text::write(self)
    }

    /// Writes every form of it into a directory; the JSON comes last.
    ///
    /// # Errors
    /// errno with the name.
    pub(crate) fn write(&self, directory: &Path) -> Result<(), LabError> {
        let mut drawn = Vec::new();
        for plot in &self.plots {
            let svg = plot::svg(&[plot])?;
            write_whole(&directory.join(format!("{}.svg", plot.name)), svg.as_bytes())?;
            drawn.push(svg);
        }
        write_whole(&directory.join("report.csv"), csv::write(self).as_bytes())?;
        write_whole(
            &directory.join("report.html"),
            html::write(self, &drawn).as_bytes(),
        )?;
        write_whole(&directory.join("report.json"), self.json()?.as_bytes())
    }

    /// Reads a finished report: its directory, or the file itself.
    ///
    /// # Errors
    /// What is there is none.
    pub(crate) fn read(path: &Path) -> Result<Self, LabError> {
        let file = if path.is_dir() {
            path.join("report.json")
        } else {
            path.to_owned()
        };
        let shown = file.display();
        let text = std::fs::read(&file).map_err(|error| LabError::at(&shown, error))?;
        let report: Option<Self> = serde_json::from_slice(&text).ok();
        report
            .filter(|report| report.format == FORMAT)
            .ok_or_else(|| LabError::Usage(format!("{shown} is not a finished report of this command")))
    }
}

/// A series for each value of `by`, over `x`, of the rows with these values.
pub(crate) fn series(
    rows: &Rows,
    values: &[(&str, &str)],
    by: &str,
    x: &str,
    of: fn(&Sample) -> f64,
) -> Vec<(String, Vec<[f64; 4]>)> {
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

    pub(crate) fn report() -> Report {
        let rows = Rows(vec![
            row(
                &[("profile", "direct"), ("strategy", "pread"), ("depth", "1")],
                &[100; 5],
            ),
            row(
                &[("profile", "direct"), ("strategy", "aio"), ("depth", "4")],
                &[300, 310, 320, 330, 340],
            ),
        ]);
        let study = crate::study::Study {
            name: "sample",
            title: "What <is> & is \"not\"",
            source: "a publication",
            settings: vec![("depths".to_owned(), "1, 4".to_owned())],
            materials: Vec::new(),
            cells: Vec::new(),
            left_out: vec!["tokio-fs: not <here>".to_owned()],
            needs: crate::study::Needs {
                larger_than_memory: false,
                warm_bytes: 0,
                warm_option: "",
            },
            columns: &["reads_per_second", "p99_us"],
            measure: crate::study::Measure::Once,
            judge: |report, rows| {
                let lines = series(rows, &[], "strategy", "depth", reads_per_second);
                let (name, title) = ("plot".to_owned(), "a <plot>".to_owned());
                report
                    .plots
                    .push(Plot::of(name, title, ["depth", "reads/s"], lines));
                let ratio = rows.0[1].ratio(&rows.0[0], reads_per_second);
                report.claims.push(Claim::of_ratio("5x".to_owned(), 5.0, ratio));
            },
        };
        let facts = vec![("kernel".to_owned(), "1.2".to_owned())];
        Report::of(&study, vec!["--size: too small".to_owned()], facts, &rows)
    }

    #[test]
    fn claims_are_judged_by_their_intervals() {
        // Scenario: ratios at, far below, far above and around a published 10x; an order that holds, is reversed, is
        // within the spread; nothing measured. Expected: the verdicts in words, with figures.
        let of = |values: [f64; 5]| Claim::of_ratio(String::new(), 10.0, Summary::of(values));
        let verdict = |claim: Claim| claim.verdict;
        let confirmed = of([9.0, 9.5, 10.0, 10.5, 11.0]);
        assert_eq!(confirmed.words, "holds here: 10.00x (9.00 to 11.00)");
        assert!(of([2.0; 5]).words.contains("less than 10x"));
        assert!(of([20.0; 5]).words.contains("more than 10x"));
        assert_eq!(verdict(of([5.0, 9.0, 10.0, 11.0, 20.0])), "undecided");
        let order = |values: [f64; 5]| verdict(Claim::of_order(String::new(), Summary::of(values)));
        assert_eq!(order([1.1; 5]), "confirmed");
        assert_eq!(order([0.9; 5]), "refuted");
        assert_eq!(order([0.9, 1.0, 1.1, 1.2, 1.3]), "undecided");
        assert_eq!(verdict(Claim::of_ratio(String::new(), 1.0, None)), "not tested");
    }

    #[test]
    fn a_report_is_written_whole_and_read_again() {
        // Scenario: a report into a directory. Expected: every form of it; the JSON is the same report; what is none is
        // refused.
        let directory = tempfile::tempdir().unwrap();
        let report = report();
        report.write(directory.path()).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        assert_eq!(names, ["plot.svg", "report.csv", "report.html", "report.json"]);
        assert_eq!(Report::read(directory.path()).unwrap(), report);
        let other = directory.path().join("other.json");
        std::fs::write(&other, "{}").unwrap();
        assert!(
            Report::read(&other)
                .unwrap_err()
                .to_string()
                .contains("other.json")
        );
    }

    #[test]
    fn rows_that_were_not_cold_are_pointed_out() {
        // Scenario: a direct row whose bytes came from memory, and rows that vary. Expected: a note on each.
        let mut warm = row(&[("profile", "direct")], &[100, 100, 100, 200, 300]);
        warm.samples
            .iter_mut()
            .flatten()
            .for_each(|sample| sample.device_share = Some(0.0));
        let rows = Rows(vec![warm]);
        let mut report = report();
        report.rows = rows.0.iter().map(ReportRow::of).collect();
        report.notes.clear();
        report.doubts(&rows);
        assert_eq!(report.rows[0].came_from, "memory");
        assert!(
            report.notes.len() == 2 && report.notes[0].starts_with("1 rows"),
            "{:?}",
            report.notes
        );
    }
}
