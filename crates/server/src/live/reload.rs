//! A reload: the configuration is read again from where it was read at the start, checked whole, its datasets opened, its
//! backends started, and only then is anything of it in force. What fails on the way is taken back.

use super::changes::{self, Change, Changes};
use super::switches::Switches;
use super::{InForce, Inner, lock};
use crate::catalogue::Difference;
use crate::config::{self, Base, Config, Loaded};
use crate::lifecycle::State;
use std::collections::BTreeSet;
use std::time::SystemTime;

/// What a reload changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Keys that differ and are in force now.
    pub applied: Vec<Change>,
    /// Keys that differ and wait for a restart.
    pub needs_restart: Vec<Change>,
    /// What became of the datasets.
    pub datasets: Difference,
    /// What else there is to say.
    pub notes: Vec<String>,
}

/// One thing that is wrong with the new configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The key to look at.
    pub key: String,
    /// What is wrong and how to fix it.
    pub problem: String,
}

/// Why a reload changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The daemon does not serve yet, or not any more.
    #[error("the daemon is {0}: nothing is reloaded")]
    NotServing(State),
    /// Too many changes wait.
    #[error("several changes are under way or wait: retry after a moment")]
    Busy,
    /// It runs the demo.
    #[error("there is no configuration file to read again: the daemon was started without --config")]
    NoFile,
    /// The configuration, or the files it names, are at fault.
    #[error("{}", of_mistakes(.0))]
    Invalid(Vec<Mistake>),
    /// A backend that it asks for is unavailable.
    #[error("{0}")]
    Unavailable(String),
    /// The reload broke down: a defect.
    #[error("the reload broke down: {0}")]
    Broken(String),
}

fn of_mistakes(mistakes: &[Mistake]) -> String {
    let (count, s) = (mistakes.len(), if mistakes.len() == 1 { "" } else { "s" });
    let problems: Vec<&str> = mistakes.iter().map(|mistake| mistake.problem.as_str()).collect();
    format!(
        "the configuration has {count} problem{s}: {}",
        problems.join("; ")
    )
}

/// How the last reload ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastReload {
    /// When.
    pub at: SystemTime,
    /// What needs a restart; or why it changed nothing.
    pub result: Result<Vec<Change>, String>,
}

impl Inner {
    pub(super) fn reload(&self, in_force: &mut InForce) -> Result<Reloaded, Refused> {
        match self.lifecycle.state() {
            State::Serving => {}
            state @ (State::Starting | State::LameDuck | State::Draining | State::Ended) => {
                tracing::info!(%state, "nothing is reloaded");
                return Err(Refused::NotServing(state));
            }
        }
        if let Base::Demo(_) = self.inputs.base {
            let refused = Refused::NoFile;
            tracing::warn!(problem = %refused, "there is nothing to reload");
            return Err(refused);
        }
        let reloading = self.lifecycle.start_reloading();
        let result = self.try_reload(in_force);
        let result = result.map_err(|refused| self.failed(refused));
        if let Ok(reloaded) = &result {
            self.metrics.reloaded();
            tell(reloaded);
            self.remember(Ok(reloaded.needs_restart.clone()));
        }
        // Whoever waits for the end asks next how it ended.
        drop(reloading);
        result
    }

    /// Tells of a reload that failed wherever it is looked for, and gives back why.
    pub(super) fn failed(&self, refused: Refused) -> Refused {
        self.metrics.reload_failed();
        tracing::error!(problem = %refused, "the configuration is not reloaded: nothing has changed");
        self.remember(Err(refused.to_string()));
        refused
    }

    fn remember(&self, result: Result<Vec<Change>, String>) {
        let at = SystemTime::now();
        *lock(&self.last) = Some(LastReload { at, result });
    }

    fn try_reload(&self, in_force: &mut InForce) -> Result<Reloaded, Refused> {
        let Loaded { mut config, settings } = config::load(&self.inputs).map_err(|problems| {
            let mistake = |problem: &config::Problem| Mistake {
                key: problem.key.clone(),
                problem: problem.to_string(),
            };
            Refused::Invalid(problems.0.iter().map(mistake).collect())
        })?;
        let mut changes = Changes::between(&in_force.settings, &settings);
        let (catalogue, difference) = in_force.catalogue.renewed(&config.datasets).map_err(|errors| {
            let mistake = |error: &ringfetch_engine::dataset::OpenError| Mistake {
                key: format!("datasets.{}.{}", error.dataset, error.field),
                problem: error.to_string(),
            };
            Refused::Invalid(errors.0.iter().map(mistake).collect())
        })?;
        self.hold_back(&mut config, &mut changes);

        let switched = Switches::make(self, in_force, &config, &catalogue, &difference);
        let Switches { applied, notes, .. } =
            switched.map_err(|error| Refused::Unavailable(error.to_string()))?;

        // From here on nothing can fail.
        let mut applied = [applied, changes.live.clone()].concat();
        self.fetcher.replace(catalogue.datasets(), config.limits);
        self.bounds.set(&config.limits, config.engine.connection_bytes);
        self.bounds.set_timeouts(&config.timeouts);
        *lock(&self.lame_duck) = config.lame_duck;
        *lock(&self.drain_timeout) = config.drain_timeout;
        let filter = &config.log.filter;
        match self.telemetry.set_filter(filter) {
            Ok(before) if before != *filter => applied.push(Change::new("log.filter", before, filter)),
            Ok(_) => {}
            // It was parsed by the configuration.
            Err(problem) => tracing::error!(filter, problem, "the log filter stays"),
        }
        for name in &difference.removed {
            self.fetcher.retire(name);
        }
        let served: BTreeSet<u64> = catalogue.datasets().iter().map(|dataset| dataset.id()).collect();
        for dataset in in_force.catalogue.datasets() {
            if !served.contains(&dataset.id()) {
                self.retired.add(&dataset);
            }
        }
        *in_force = InForce {
            settings: changes::in_force(&in_force.settings, settings, &changes),
            backend: config.engine.backend,
            dataset_backends: config.dataset_backends,
            catalogue,
        };
        Ok(Reloaded {
            applied,
            needs_restart: changes.needs_restart,
            datasets: difference,
            notes,
        })
    }

    /// Limits that only make sense with the larger memory that a restart would bring stay as they are.
    fn hold_back(&self, config: &mut Config, changes: &mut Changes) {
        let engine = self.fetcher.engine();
        if config.limits.response_bytes > engine.response_bytes_max() {
            config.limits.response_bytes = self.fetcher.limits().response_bytes;
            changes.hold_back("limits.response_bytes");
        }
        let (_, budget) = engine.memory();
        if config.engine.connection_bytes > budget {
            config.engine.connection_bytes = self.bounds.connection_bytes();
            changes.hold_back("limits.connection_bytes");
        }
    }
}

fn tell(reloaded: &Reloaded) {
    let list = |changes: &[Change]| {
        let lines: Vec<String> = changes.iter().map(ToString::to_string).collect();
        lines.join("; ")
    };
    for change in &reloaded.needs_restart {
        tracing::warn!(change = %change, "needs a restart");
    }
    for note in &reloaded.notes {
        tracing::warn!(note, "reloaded, but not as asked");
    }
    let datasets = &reloaded.datasets;
    tracing::info!(
        applied = list(&reloaded.applied),
        needs_restart = list(&reloaded.needs_restart),
        datasets_added = datasets.added.join(", "),
        datasets_removed = datasets.removed.join(", "),
        datasets_replaced = datasets.replaced.join(", "),
        datasets_unchanged = datasets.unchanged.len(),
        "reloaded"
    );
}
