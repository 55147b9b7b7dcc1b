//! Reloads: the configuration is read and checked, its datasets are opened and its backends started before
//! anything takes effect. If a step fails, earlier ones are rolled back.

use super::changes::{self, ConfigChange, ConfigDiff};
use super::switches::BackendSwitches;
use super::{ActiveConfig, Inner, lock};
use crate::access::Access;
use crate::access_log::AccessLog;
use crate::catalogue::CatalogueDiff;
use crate::config::{self, Base, Config, Loaded, listed};
use crate::key_file::FileError;
use crate::lifecycle::State;
use crate::tls::Tls;
use std::collections::BTreeSet;
use std::time::SystemTime;

/// What a reload changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReloadOutcome {
    /// Changed keys that were applied.
    pub applied: Vec<ConfigChange>,
    /// Changed keys that need a restart.
    pub needs_restart: Vec<ConfigChange>,
    /// Changes of the datasets.
    pub datasets: CatalogueDiff,
    /// Remarks, such as fallbacks.
    pub notes: Vec<String>,
}

/// A mistake in the new configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReloadProblem {
    /// The key.
    pub key: String,
    /// What is wrong and how to fix it.
    pub problem: String,
}

/// Why a reload failed. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReloadError {
    /// The daemon is not serving.
    #[error("the daemon is {0}: nothing is reloaded")]
    NotServing(State),
    /// Too many changes are waiting.
    #[error("several changes are running or waiting: retry after a moment")]
    Busy,
    /// It serves the demo.
    #[error("there is no configuration file to read again: the daemon was started without --config")]
    NoFile,
    /// Mistakes in the configuration or the files it names.
    #[error("{}", of_mistakes(.0))]
    Invalid(Vec<ReloadProblem>),
    /// The host refuses what its datasets take: file descriptors, memory.
    #[error("{0}")]
    HostRefused(String),
    /// A backend that it asks for is unavailable.
    #[error("{0}")]
    Unavailable(String),
    /// The reload panicked, which is a defect, or the system refused a thread for it.
    #[error("the reload failed: {0}")]
    Broken(String),
}

fn of_mistakes(mistakes: &[ReloadProblem]) -> String {
    let (count, s) = (mistakes.len(), if mistakes.len() == 1 { "" } else { "s" });
    let problems: Vec<&str> = mistakes.iter().map(|mistake| mistake.problem.as_str()).collect();
    format!(
        "the configuration has {count} problem{s}: {}",
        listed(&problems, "; ")
    )
}

/// How the last reload ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastReload {
    /// When.
    pub at: SystemTime,
    /// What needs a restart, or why it failed.
    pub result: Result<Vec<ConfigChange>, String>,
}

impl Inner {
    pub(super) fn reload(&self, active: &mut ActiveConfig) -> Result<ReloadOutcome, ReloadError> {
        // Regardless of the configuration: the file may have been rotated.
        self.parts.access_log.iter().for_each(AccessLog::reopen);
        match self.parts.lifecycle.state() {
            State::Serving => {}
            state @ (State::Starting | State::LameDuck | State::Draining | State::Ended) => {
                tracing::info!(%state, "nothing is reloaded");
                return Err(ReloadError::NotServing(state));
            }
        }
        if let Base::Demo(_) = self.parts.inputs.base {
            let refused = ReloadError::NoFile;
            tracing::warn!(problem = %refused, "there is nothing to reload");
            return Err(refused);
        }
        let reloading = self.parts.lifecycle.start_reloading();
        let result = self.try_reload(active);
        let result = result.map_err(|refused| self.failed(refused));
        if let Ok(reloaded) = &result {
            self.metrics.reloaded();
            log(reloaded);
            self.remember(Ok(reloaded.needs_restart.clone()));
        }
        // The result must be visible before the end of the reload is announced.
        drop(reloading);
        result
    }

    /// Counts, logs and stores a failed reload.
    pub(super) fn failed(&self, refused: ReloadError) -> ReloadError {
        self.metrics.reload_failed();
        tracing::error!(problem = %refused, "the configuration is not reloaded: nothing has changed");
        self.remember(Err(refused.to_string()));
        refused
    }

    fn remember(&self, result: Result<Vec<ConfigChange>, String>) {
        let at = SystemTime::now();
        *lock(&self.last) = Some(LastReload { at, result });
    }

    fn try_reload(&self, active: &mut ActiveConfig) -> Result<ReloadOutcome, ReloadError> {
        let Loaded { mut config, settings } = config::load(&self.parts.inputs).map_err(|problems| {
            let mistake = |problem: &config::Problem| ReloadProblem {
                key: problem.key.clone(),
                problem: problem.to_string(),
            };
            ReloadError::Invalid(problems.0.iter().map(mistake).collect())
        })?;
        let mut changes = ConfigDiff::new(&active.settings, &settings);
        let (catalogue, difference) = active.catalogue.renewed(&config.datasets).map_err(|errors| {
            if errors.0.iter().all(|error| error.is_refused_by_host) {
                return ReloadError::HostRefused(errors.to_string());
            }
            let mistake = |error: &ringfetch_engine::dataset::OpenError| ReloadProblem {
                key: format!("datasets.{}.{}", error.dataset, error.field),
                problem: error.to_string(),
            };
            ReloadError::Invalid(errors.0.iter().map(mistake).collect())
        })?;
        let unusable = |mut error: FileError| {
            let more = std::mem::take(&mut error.more);
            let mistake = |error: FileError| ReloadProblem {
                key: error.key.to_owned(),
                problem: error.to_string(),
            };
            ReloadError::Invalid(std::iter::once(error).chain(more).map(mistake).collect())
        };
        let renewed = self
            .parts
            .tls
            .as_ref()
            .map_or(Ok(None), Tls::read)
            .map_err(unusable)?;
        let principals = self.parts.access.as_ref().map_or(Ok(None), Access::read);
        let principals = principals.map_err(unusable)?;
        self.hold_back(&mut config, &mut changes);

        let switched = BackendSwitches::make(self, active, &config, &catalogue, &difference);
        let BackendSwitches { applied, notes, .. } =
            switched.map_err(|error| ReloadError::Unavailable(error.to_string()))?;

        // Nothing can fail from here on.
        let mut applied = [applied, changes.live.clone()].concat();
        // Before the datasets: a right that is taken away must not apply to them.
        if let (Some(access), Some(principals)) = (&self.parts.access, principals) {
            access.install(principals);
        }
        self.parts.fetcher.replace(catalogue.datasets(), config.limits);
        self.parts
            .connection_limits
            .set(&config.limits, config.engine.connection_bytes);
        self.parts.connection_limits.set_timeouts(&config.timeouts);
        if let (Some(tls), Some(renewed)) = (&self.parts.tls, renewed) {
            tls.install(renewed);
        }
        if let (Some(log), Some(config)) = (&self.parts.access_log, &config.access_log) {
            log.set(config);
        }
        *lock(&self.lame_duck) = config.lame_duck;
        *lock(&self.drain_timeout) = config.drain_timeout;
        let filter = &config.log.filter;
        match self.parts.telemetry.set_filter(filter) {
            Ok(before) if before != *filter => applied.push(ConfigChange::new("log.filter", before, filter)),
            Ok(_) => {}
            // It was validated with the configuration.
            Err(problem) => tracing::error!(filter, problem, "cannot replace the log filter"),
        }
        for name in &difference.removed {
            self.parts.fetcher.engine().retire(name);
        }
        let served: BTreeSet<u64> = catalogue.datasets().iter().map(|dataset| dataset.id()).collect();
        for dataset in active.catalogue.datasets() {
            if !served.contains(&dataset.id()) {
                self.retired.add(&dataset);
            }
        }
        *active = ActiveConfig {
            settings: changes::active(&active.settings, settings, &changes),
            backend: config.engine.backend,
            dataset_backends: config.dataset_backends,
            catalogue,
        };
        Ok(ReloadOutcome {
            applied,
            needs_restart: changes.needs_restart,
            datasets: difference,
            notes,
        })
    }

    /// Holds back, until a restart, limits that need more memory or a longer queue than the engine has.
    fn hold_back(&self, config: &mut Config, changes: &mut ConfigDiff) {
        let engine = self.parts.fetcher.engine();
        if config.limits.response_bytes > engine.response_bytes_max() {
            config.limits.response_bytes = self.parts.fetcher.limits().response_bytes;
            changes.hold_back("limits.response_bytes");
        }
        let (_, budget) = engine.memory();
        if config.engine.connection_bytes > budget {
            config.engine.connection_bytes = self.parts.connection_limits.connection_bytes();
            changes.hold_back("limits.connection_bytes");
        }
        if config.limits.items_per_request > engine.queued_reads_max() {
            config.limits.items_per_request = self.parts.fetcher.limits().items_per_request;
            changes.hold_back("limits.items_per_request");
        }
    }
}

fn log(reloaded: &ReloadOutcome) {
    let list = |changes: &[ConfigChange]| {
        let lines: Vec<String> = changes.iter().map(ToString::to_string).collect();
        lines.join("; ")
    };
    for change in &reloaded.needs_restart {
        tracing::warn!(change = %change, "needs a restart");
    }
    for note in &reloaded.notes {
        tracing::warn!(note, "reloaded, with a fallback");
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
