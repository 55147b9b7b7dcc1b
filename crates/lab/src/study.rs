//! A study as data. Its axes become cells, each a strategy with its settings; a function of the study judges
//! their results.

use crate::args::{Common, OfDaemon};
use crate::error::LabError;
use crate::material::Material;
use crate::report::Report;
use crate::sample::{Of, Sample};
use crate::served::Flip;
use crate::setup::{Heat, Setup};
use crate::stats::Summary;
use crate::strategies::{Run, Strategy, named};
use crate::studies::act::Search;
use ringfetch_command::quantity::size;
use std::sync::Arc;

/// Most buffer bytes of one step; a cell that needs more is left out.
pub(crate) const STEP_BYTES_MAX: u64 = 256 << 20;

/// A name with a value, in the order of columns.
pub(crate) type Key = Vec<(String, String)>;

pub(crate) fn pair(name: &str, value: impl ToString) -> (String, String) {
    (name.to_owned(), value.to_string())
}

/// The value of a name.
pub(crate) fn get<'a>(key: &'a Key, name: &str) -> Option<&'a str> {
    let found = key.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| value.as_str())
}

/// `profile=direct strategy=pread depth=1`.
pub(crate) fn shown(key: &Key) -> String {
    let pairs = key.iter().map(|(name, value)| format!("{name}={value}"));
    pairs.collect::<Vec<_>>().join(" ")
}

/// One combination of the axes.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    pub(crate) key: Key,
    pub(crate) strategy: &'static Strategy,
    pub(crate) setup: Setup,
}

impl Cell {
    /// The same in every run of the study.
    pub(crate) fn id(&self) -> String {
        shown(&self.key)
    }

    /// Buffer bytes of a step: the engine's memory, or the buffers of all reads in flight, plus one more if
    /// buffers are not reused.
    pub(crate) fn buffer_bytes(&self, material: &Material) -> u64 {
        let (setup, reads) = (&self.setup, self.setup.reads(material));
        let held = match self.strategy.run {
            Run::Engine(choice) => {
                let batch = setup.engine.unwrap_or_else(|| choice(setup)).batch;
                reads.engine_bytes(setup.depth, batch)
            }
            Run::Own(_) => reads.in_flight_bytes(setup.depth),
        };
        let new = if setup.pooled { 0 } else { reads.bytes };
        held.saturating_add(new as u64)
    }
}

/// What must be true of data and memory for a study to be meaningful.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Reads must reach the device: the data must not fit in memory.
    pub(crate) larger_than_memory: bool,
    /// Bytes that must fit in memory besides everything else.
    pub(crate) warm_bytes: u64,
    /// The option that sets them.
    pub(crate) warm_option: &'static str,
}

impl Needs {
    /// Only cold reads.
    pub(crate) const COLD: Self = Self {
        larger_than_memory: true,
        warm_bytes: 0,
        warm_option: "",
    };
}

/// Runs a setup once per call.
pub(crate) type Once<'a> = &'a mut dyn FnMut(Setup) -> Result<Sample, String>;

/// What one step of a cell measures.
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
    pub(crate) fn step(&self, cell: &Cell, once: Once<'_>) -> Result<Sample, String> {
        match self {
            Self::Once => once(cell.setup),
            Self::Highest(search) => search.highest(cell.setup, once),
            Self::Flipped(flip) => crate::studies::flip::step(flip, cell, once),
        }
    }

    /// Restores the daemon's backend, whatever became of the study.
    pub(crate) fn end(&self) -> Result<(), LabError> {
        match self {
            Self::Flipped(flip) => flip.back(),
            Self::Once | Self::Highest(_) => Ok(()),
        }
    }
}

/// The fixed properties of a study, whatever it reads.
#[derive(Debug)]
pub(crate) struct About {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// The publication that it repeats.
    pub(crate) source: &'static str,
    /// Measures in tables, by their names in [`crate::report::MEASURES`], with spaces between them.
    pub(crate) columns: &'static str,
    /// Adds claims, tables, plots and notes.
    pub(crate) judge: fn(&mut Report, &Rows),
}

#[cfg(test)]
impl About {
    /// For tests.
    pub(crate) const SAMPLE: Self = Self {
        name: "sample",
        title: "",
        source: "",
        columns: "",
        judge: |_, _| {},
    };
}

/// A study, planned for given data.
#[derive(Debug)]
pub(crate) struct Study {
    pub(crate) about: &'static About,
    /// All settings that decide what is measured, for the report and for resuming.
    pub(crate) settings: Key,
    pub(crate) materials: Vec<Arc<Material>>,
    /// The strategies that `--only` leaves.
    pub(crate) chosen: Vec<String>,
    pub(crate) cells: Vec<Cell>,
    /// What was not planned, and why: a sentence each.
    pub(crate) left_out: Vec<String>,
    pub(crate) needs: Needs,
    pub(crate) measure: Measure,
}

impl Study {
    /// A study without cells, with the strategies among `names` (separated by spaces) that `--only` chooses
    /// and the data allow.
    pub(crate) fn new(
        about: &'static About,
        common: &Common,
        names: &str,
        settings: Key,
        materials: Vec<Material>,
    ) -> Self {
        let only = &common.only;
        let served = materials.iter().any(|material| material.served.is_some());
        let wanted = names.split_whitespace().map(str::to_owned);
        let chosen = wanted
            .filter(|name| only.is_empty() || only.contains(name))
            .filter(|name| name != "daemon" || served)
            .collect();
        Self {
            about,
            settings,
            materials: materials.into_iter().map(Arc::new).collect(),
            chosen,
            cells: Vec::new(),
            left_out: Vec::new(),
            needs: Needs::default(),
            measure: Measure::Once,
        }
    }

    /// Plans a cell for each combination of the axes' values, the last axis varying fastest, read by the
    /// strategy of its axis (without one, by a daemon). `of` returns `None` if the combination makes no
    /// sense.
    pub(crate) fn cross(&mut self, axes: &[(&str, Vec<String>)], of: impl Fn(&At<'_>) -> Option<Setup>) {
        let mut keys: Vec<Key> = vec![Vec::new()];
        for (name, values) in axes {
            let longer = |key: &Key| {
                let key = key.clone();
                let one = |value: &String| [&key[..], &[pair(name, value)]].concat();
                values.iter().map(one).collect::<Vec<_>>()
            };
            keys = keys.iter().flat_map(longer).collect();
        }
        for key in keys {
            let strategy = named(get(&key, "strategy").unwrap_or("daemon"));
            if let (Some(strategy), Some(setup)) = (strategy, of(&At(&key))) {
                self.plan(Cell { key, strategy, setup });
            }
        }
    }

    /// Plans a cell, unless its strategy does not support the depth or its buffers would be too large.
    fn plan(&mut self, cell: Cell) {
        let material = self.materials.get(cell.setup.material);
        let bytes = material.map_or(0, |material| cell.buffer_bytes(material));
        if cell.setup.depth > cell.strategy.depth_max {
            let why = format!("{}: depth {} only", cell.strategy.name, cell.strategy.depth_max);
            if !self.left_out.contains(&why) {
                self.left_out.push(why);
            }
            return;
        }
        if bytes > STEP_BYTES_MAX {
            let (id, most) = (cell.id(), size(STEP_BYTES_MAX));
            self.left_out.push(format!("{id}: more than {most} of buffers"));
            return;
        }
        self.cells.push(cell);
    }

    /// Refuses a report without any row.
    ///
    /// # Errors
    /// Every row was left out: the reasons.
    pub(crate) fn check_measured(&self, rows: &Rows) -> Result<(), LabError> {
        if rows.0.iter().any(|row| row.measured().next().is_some()) {
            return Ok(());
        }
        let why = self.left_out.join("; ");
        Err(LabError::Failed(format!("nothing was measured: {why}")))
    }
}

/// A combination of the axes' values.
#[derive(Debug)]
pub(crate) struct At<'a>(&'a Key);

impl At<'_> {
    /// The value of an axis.
    pub(crate) fn text(&self, name: &str) -> &str {
        get(self.0, name).unwrap_or_default()
    }

    /// The value of an axis as a number.
    pub(crate) fn number<T: std::str::FromStr + Default>(&self, name: &str) -> T {
        self.text(name).parse().unwrap_or_default()
    }
}

/// Refuses strategies that the study does not have: called before data are made.
pub(crate) fn check_only(common: &Common, names: &str) -> Result<(), LabError> {
    let names: Vec<&str> = names.split_whitespace().collect();
    let mut only = common.only.iter();
    only.find(|name| !names.contains(&name.as_str()))
        .map_or(Ok(()), |wrong| {
            let all = names.join(", ");
            Err(LabError::Usage(format!("--only: {wrong}: this study has {all}")))
        })
}

/// Refuses `--only daemon` without a daemon: called before data are made.
pub(crate) fn check_daemon(common: &Common, daemon: &OfDaemon) -> Result<(), LabError> {
    if daemon.server.is_none() && common.only.iter().any(|name| name == "daemon") {
        let problem = "--only: daemon needs --server and --dataset";
        return Err(LabError::Usage(problem.to_owned()));
    }
    Ok(())
}

/// The values of an axis.
pub(crate) fn texts<T: ToString>(values: &[T]) -> Vec<String> {
    values.iter().map(T::to_string).collect()
}

/// `1, 2, 4`.
pub(crate) fn list<T: ToString>(values: &[T]) -> String {
    texts(values).join(", ")
}

/// A cell with its repetitions.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) key: Key,
    /// Where its bytes were to come from.
    pub(crate) heat: Heat,
    /// By repetition; `None` or missing: not measured.
    pub(crate) samples: Vec<Option<Sample>>,
}

impl Row {
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        get(&self.key, name)
    }

    /// Whether its key has these values, and something was measured.
    pub(crate) fn is(&self, values: &[(&str, &str)]) -> bool {
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

    pub(crate) fn summary(&self, of: Of) -> Option<Summary> {
        Summary::of(self.measured().map(of))
    }

    /// The median; 0 if nothing was measured.
    pub(crate) fn median(&self, of: Of) -> f64 {
        self.summary(of).map_or(0.0, |summary| summary.median)
    }

    /// `self / other`, repetition by repetition: a machine that drifts moves both.
    pub(crate) fn ratio(&self, other: &Self, of: Of) -> Option<Summary> {
        let pairs = self.samples.iter().zip(&other.samples);
        let ratios = pairs.filter_map(|(ours, theirs)| Some(of(ours.as_ref()?) / of(theirs.as_ref()?)));
        Summary::of(ratios)
    }
}

/// All rows of a study, in the order of its cells.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows(pub(crate) Vec<Row>);

impl Rows {
    /// Those with samples.
    pub(crate) fn measured(&self) -> Self {
        let rows = self.0.iter().filter(|row| row.measured().next().is_some());
        Self(rows.cloned().collect())
    }

    /// Rows with these values in their keys.
    pub(crate) fn with<'a>(&'a self, values: &'a [(&'a str, &'a str)]) -> impl Iterator<Item = &'a Row> {
        self.0.iter().filter(|row| row.is(values))
    }

    /// The first with exactly these values.
    pub(crate) fn one_of(&self, values: &[(&str, &str)]) -> Option<&Row> {
        self.0.iter().find(|row| row.is(values))
    }

    /// The row with these values that has the highest median.
    pub(crate) fn best(&self, values: &[(&str, &str)], of: Of) -> Option<&Row> {
        let rows = self.0.iter().filter(|row| row.is(values));
        rows.max_by(|a, b| a.median(of).total_cmp(&b.median(of)))
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
    use crate::sample::reads_per_second;

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
        Row {
            key: key.iter().map(|(name, value)| pair(name, value)).collect(),
            heat: Heat::Direct,
            samples: reads.iter().map(|reads| Some(sample(*reads, 1.0))).collect(),
        }
    }

    #[test]
    fn a_report_without_rows_is_a_failure() {
        // Scenario: a study whose only row failed; one with a row. Expected: an error with the reason; none.
        let study = Study {
            about: &About::SAMPLE,
            settings: Vec::new(),
            materials: Vec::new(),
            chosen: Vec::new(),
            cells: Vec::new(),
            left_out: vec!["strategy=daemon: connection reset".to_owned()],
            needs: Needs::default(),
            measure: Measure::Once,
        };
        let problem = study.check_measured(&Rows::default()).unwrap_err();
        let expected = "nothing was measured: strategy=daemon: connection reset";
        assert_eq!(problem.to_string(), expected);
        study.check_measured(&Rows(vec![row(&[], &[1])])).unwrap();
    }

    #[test]
    fn rows_are_found_and_compared_within_repetitions() {
        // Scenario: a machine that becomes twice as fast half way; the second row always reads 3 times as
        // much; one repetition is missing. Expected: a ratio of exactly 3; the best and the named rows.
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
            rows.best(&[], reads_per_second).unwrap().get("strategy"),
            Some("b")
        );
        assert_eq!(rows.one_of(&[("depth", "4")]).unwrap().number("depth"), Some(4.0));
        assert!(rows.one_of(&[("depth", "8")]).is_none(), "a row without samples");
        assert_eq!(rows.values("strategy"), ["a", "b"]);
    }
}
