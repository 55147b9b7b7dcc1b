//! What a study is: data. Axes become cells, each a strategy with its settings; what the cells came to is judged by a
//! function of the study.

use crate::error::LabError;
use crate::job::{Sample, Setup};
use crate::material::Material;
use crate::report::Report;
use crate::served::Flip;
use crate::stats::Summary;
use crate::strategies::Strategy;
use crate::studies::act::Search;
use std::sync::Arc;

/// Buffers of one step, at most; what needs more is left out.
const STEP_BYTES_MAX: u64 = 256 << 20;

/// A name with a value, in the order of columns.
pub(crate) type Key = Vec<(String, String)>;

/// One combination of the axes.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    pub(crate) key: Key,
    pub(crate) strategy: &'static Strategy,
    /// Which of the study's data.
    pub(crate) material: usize,
    pub(crate) setup: Setup,
}

impl Cell {
    /// The same in every run of the study.
    pub(crate) fn id(&self) -> String {
        shown(&self.key)
    }
}

/// `profile=direct strategy=pread depth=1`.
pub(crate) fn shown(key: &Key) -> String {
    let pairs: Vec<String> = key
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    pairs.join(" ")
}

/// What has to be true of data and memory for a study to mean anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Reads have to reach the device: what is read must not fit memory.
    pub(crate) larger_than_memory: bool,
    /// Bytes that have to fit memory beside everything else.
    pub(crate) warm_bytes: u64,
    /// The option that bounds them.
    pub(crate) warm_option: &'static str,
}

/// One run of a setup, whenever it is called.
pub(crate) type Once<'a> = &'a mut dyn FnMut(Setup) -> Result<Sample, String>;

/// What one step of a cell is.
#[derive(Debug)]
pub(crate) enum Measure {
    /// One run of its setup.
    Once,
    /// A search for the highest rate, of many runs.
    Highest(Search),
    /// One run, after a daemon was switched to the cell's backend.
    Flipped(Flip),
}

impl Measure {
    /// Makes a step.
    pub(crate) fn step(&self, cell: &Cell, once: Once<'_>) -> Result<Sample, String> {
        match self {
            Self::Once => once(cell.setup),
            Self::Highest(search) => search.highest(cell.setup, once),
            Self::Flipped(flip) => crate::studies::flip::step(flip, cell, once),
        }
    }

    /// Whatever became of the study: a daemon gets its backend back.
    pub(crate) fn end(&self) -> Result<(), LabError> {
        match self {
            Self::Flipped(flip) => flip.back(),
            Self::Once | Self::Highest(_) => Ok(()),
        }
    }
}

/// A study, planned for given data.
#[derive(Debug)]
pub(crate) struct Study {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// The publication that it repeats.
    pub(crate) source: &'static str,
    /// Everything that decides what is measured, for the report and for resuming.
    pub(crate) settings: Key,
    pub(crate) materials: Vec<Arc<Material>>,
    pub(crate) cells: Vec<Cell>,
    /// What was not planned, and why: a sentence each.
    pub(crate) left_out: Vec<String>,
    pub(crate) needs: Needs,
    /// Measures in tables, by their names in [`crate::report::MEASURES`].
    pub(crate) columns: &'static [&'static str],
    pub(crate) measure: Measure,
    /// Adds claims, tables, plots and notes.
    pub(crate) judge: fn(&mut Report, &Rows),
}

impl Study {
    /// Plans a cell, unless its strategy cannot be so deep or its buffers would be too large.
    pub(crate) fn plan(&mut self, cell: Cell) {
        let material = self.materials.get(cell.material);
        let bytes = material.map_or(0, |material| {
            (cell.setup.read_bytes(material) * cell.setup.group(material)) as u64
        });
        let buffers = bytes.saturating_mul(cell.setup.depth as u64);
        if cell.setup.depth > cell.strategy.depth_max {
            return;
        }
        if buffers > STEP_BYTES_MAX {
            let (id, most) = (cell.id(), crate::quantity::size(STEP_BYTES_MAX));
            self.left_out.push(format!("{id}: more than {most} of buffers"));
            return;
        }
        self.cells.push(cell);
    }
}

/// A cell with its repetitions.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) key: Key,
    /// By repetition; `None`: not measured.
    pub(crate) samples: Vec<Option<Sample>>,
}

impl Row {
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let found = self.key.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Whether its key has these values, and something was measured.
    fn is(&self, values: &[(&str, &str)]) -> bool {
        let mut each = values.iter();
        each.all(|(name, value)| self.get(name) == Some(*value)) && self.measured().next().is_some()
    }

    /// A value of the key as a number.
    pub(crate) fn number(&self, name: &str) -> Option<f64> {
        self.get(name)?.parse().ok()
    }

    pub(crate) fn measured(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter().flatten()
    }

    pub(crate) fn summary(&self, of: fn(&Sample) -> f64) -> Option<Summary> {
        Summary::of(self.measured().map(of))
    }

    /// `self / other`, repetition by repetition: a machine that drifts moves both.
    pub(crate) fn ratio(&self, other: &Self, of: fn(&Sample) -> f64) -> Option<Summary> {
        let pairs = self.samples.iter().zip(&other.samples);
        let ratios = pairs.filter_map(|(ours, theirs)| Some(of(ours.as_ref()?) / of(theirs.as_ref()?)));
        Summary::of(ratios)
    }
}

/// Reads a second of a sample.
pub(crate) fn reads_per_second(sample: &Sample) -> f64 {
    crate::quantity::approximate(sample.reads) / sample.seconds
}

/// Bytes a second of a sample.
pub(crate) fn bytes_per_second(sample: &Sample) -> f64 {
    crate::quantity::approximate(sample.bytes) / sample.seconds
}

/// All rows of a study, in the order of its cells.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows(pub(crate) Vec<Row>);

impl Rows {
    /// Rows with these values in their keys.
    pub(crate) fn with<'a>(&'a self, values: &'a [(&'a str, &'a str)]) -> impl Iterator<Item = &'a Row> {
        self.0.iter().filter(|row| row.is(values))
    }

    /// The first with exactly these values.
    pub(crate) fn one_of<const N: usize>(&self, values: [(&str, &str); N]) -> Option<&Row> {
        self.0.iter().find(|row| row.is(&values))
    }

    /// The one with these values that has the highest median.
    pub(crate) fn best<const N: usize>(
        &self,
        values: [(&str, &str); N],
        of: fn(&Sample) -> f64,
    ) -> Option<&Row> {
        let median = |row: &Row| row.summary(of).map_or(f64::MIN, |summary| summary.median);
        let rows = self.0.iter().filter(|row| row.is(&values));
        rows.max_by(|a, b| median(a).total_cmp(&median(b)))
    }

    /// The values of a name, in order of appearance.
    pub(crate) fn values(&self, name: &str) -> Vec<String> {
        let mut values: Vec<String> = Vec::new();
        for value in self.0.iter().filter_map(|row| row.get(name)) {
            if !values.iter().any(|known| known == value) {
                values.push(value.to_owned());
            }
        }
        values
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample(reads: u64, seconds: f64) -> Sample {
        Sample {
            reads,
            bytes: reads * 4096,
            seconds,
            min_us: 50.0,
            mean_us: 100.0,
            p50_us: 90.0,
            p99_us: 300.0,
            p999_us: 500.0,
            max_us: 900.0,
            depth_achieved: 3.9,
            cpu_us_per_read: 2.5,
            device_share: Some(1.0),
            resident_before: Some(0.0),
            own_memory_bytes: 9 << 20,
            note: None,
            over: None,
            missed: 0,
            multiple: None,
        }
    }

    pub(crate) fn row(key: &[(&str, &str)], reads: &[u64]) -> Row {
        let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Row {
            key: key.iter().map(pair).collect(),
            samples: reads.iter().map(|reads| Some(sample(*reads, 1.0))).collect(),
        }
    }

    #[test]
    fn rows_are_found_and_compared_within_repetitions() {
        // Scenario: a machine that becomes twice as fast half way; the second row always reads 3 times as much; one
        // repetition is missing. Expected: a ratio of exactly 3; the best and the named rows.
        let slow = row(&[("strategy", "a"), ("depth", "1")], &[100, 110, 200, 210, 220]);
        let mut fast = row(&[("strategy", "b"), ("depth", "4")], &[300, 330, 600, 630, 660]);
        fast.samples[3] = None;
        let ratio = fast.ratio(&slow, reads_per_second).unwrap();
        assert_eq!(
            (ratio.median, ratio.low, ratio.high, ratio.count),
            (3.0, 3.0, 3.0, 4)
        );
        let rows = Rows(vec![slow, fast, row(&[("strategy", "b"), ("depth", "8")], &[])]);
        assert_eq!(
            rows.best([], reads_per_second).unwrap().get("strategy"),
            Some("b")
        );
        assert_eq!(rows.one_of([("depth", "4")]).unwrap().number("depth"), Some(4.0));
        assert!(rows.one_of([("depth", "8")]).is_none(), "a row without samples");
        assert_eq!(rows.values("strategy"), ["a", "b"]);
    }
}
