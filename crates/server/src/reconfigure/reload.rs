//! Reloads: the configuration is read and checked, its datasets are opened and its backends started before
//! anything takes effect. If a step fails, earlier ones are rolled back.

use super::changes::{self, ConfigChange, ConfigDiff};
use super::switches::BackendSwitches;
use super::{ActiveConfig, Inner, lock};
use crate::access::Access;
use crate::access_log::AccessLog;
use crate::catalogue::{Catalogue, CatalogueDiff};
use crate::config::{self, Base, Config, Loaded, listed};
use crate::file_step;
use crate::host_memory;
use crate::key_file::{FileError, HOST_REMEDY};
use crate::lifecycle::State;
use crate::tls::Tls;
use ringfetch_engine::dataset::{Kind, is_refused_by_host};
use ringfetch_engine::engine::Engine;
use ringfetch_host::View;
use std::collections::BTreeSet;
use std::fmt;
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
    /// The host refuses what its files and datasets take: file descriptors, memory, a file system that responds.
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
        match self.parts.lifecycle.state() {
            State::Serving => {}
            state @ (State::Starting | State::LameDuck | State::Draining | State::Ended) => {
                tracing::info!(%state, "nothing is reloaded");
                return Err(ReloadError::NotServing(state));
            }
        }
        // Whatever it comes to: the service manager waits for its end.
        let reloading = self.parts.lifecycle.start_reloading();
        if let Base::Demo(_) = self.parts.inputs.base {
            let refused = ReloadError::NoFile;
            tracing::warn!(problem = %refused, "there is nothing to reload");
            return Err(refused);
        }
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
        let inputs = self.parts.inputs.clone();
        let loaded = in_time(&["the configuration"], move || config::load(&inputs))?;
        let Loaded { mut config, settings } = loaded.map_err(|problems| {
            if problems.is_refused_by_host() {
                return ReloadError::HostRefused(listed(&problems.0, "; "));
            }
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
        check_budget(&config, &changes)?;
        check_backends(&config, &changes)?;
        check_moved(&config, &changes)?;
        let renewed = match self.parts.tls.clone() {
            Some(tls) => in_force(
                in_time(&["tls"], move || Tls::read(&tls)),
                is_moved(&changes, &TLS_FILES),
            )?,
            None => None,
        };
        let principals = match self.parts.access.clone() {
            Some(access) => in_force(
                in_time(&["access.principals"], move || Access::read(&access)),
                is_moved(&changes, &PRINCIPALS),
            )?,
            None => None,
        };
        let wanted = config.limits.response_bytes;
        self.hold_back(&mut config, &mut changes);
        fit_an_answer(&config, wanted, &catalogue, &difference)?;

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
        let served: BTreeSet<u64> = catalogue.datasets().iter().map(|dataset| dataset.id()).collect();
        for dataset in active.catalogue.datasets() {
            if !served.contains(&dataset.id()) {
                self.retired.add(&dataset);
            }
        }
        for name in &difference.removed {
            self.parts.fetcher.engine().retire(name);
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
        let (_, budget) = engine.memory();
        let keeps_connection = config.engine.connection_bytes > budget;
        if keeps_connection {
            config.engine.connection_bytes = self.parts.connection_limits.connection_bytes();
        }
        // A response must fit on a connection, too.
        let response_bytes_max = engine.response_bytes_max().min(config.engine.connection_bytes);
        if config.limits.response_bytes > response_bytes_max {
            config.limits.response_bytes = self.parts.fetcher.limits().response_bytes;
            changes.hold_back("limits.response_bytes");
        }
        if keeps_connection {
            changes.hold_back("limits.connection_bytes");
        }
        if config.limits.items_per_request > engine.config().queued_reads {
            config.limits.items_per_request = self.parts.fetcher.limits().items_per_request;
            changes.hold_back("limits.items_per_request");
        }
        // They belong to a log that is not running, or will not after the restart.
        if self.parts.access_log.is_none() || config.access_log.is_none() {
            changes.hold_back("access_log.sample");
            changes.hold_back("access_log.slow_ms");
        }
    }
}

/// A step that reads files, unless their file system does not respond.
fn in_time<T: Send + 'static>(
    files: &[impl fmt::Display],
    step: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ReloadError> {
    file_step::run(files, file_step::WITHIN, step).map_err(ReloadError::HostRefused)
}

const TLS_FILES: [&str; 3] = ["tls.certificate", "tls.key", "tls.client_ca"];
const PRINCIPALS: [&str; 1] = ["access.principals"];
const LOG_PATH: &str = "access_log.path";
const BUDGET: &str = "engine.memory_budget";

/// What the files in force hold now; `None` if that is unchanged, or if the next start reads others and these may be gone.
fn in_force<T>(
    read: Result<Result<Option<T>, FileError>, ReloadError>,
    is_moved: bool,
) -> Result<Option<T>, ReloadError> {
    match read {
        Ok(Ok(renewed)) => Ok(renewed),
        Ok(Err(_)) | Err(_) if is_moved => Ok(None),
        Ok(Err(error)) => Err(unusable(error)),
        Err(late) => Err(late),
    }
}

/// Whether one of the keys has another value from the next start on.
fn is_moved(changes: &ConfigDiff, keys: &[&str]) -> bool {
    let mut waiting = changes.needs_restart.iter();
    waiting.any(|change| keys.contains(&&change.key[..]))
}

/// Checks that the next start may have the response memory that waits for it.
fn check_budget(config: &Config, changes: &ConfigDiff) -> Result<(), ReloadError> {
    if !is_moved(changes, &[BUDGET]) {
        return Ok(());
    }
    let bytes = config.engine.memory_budget_bytes;
    host_memory::check(bytes, &View::real()).map_err(|problem| {
        let key = BUDGET.to_owned();
        ReloadError::Invalid(vec![ReloadProblem { key, problem }])
    })?;
    host_memory::check_process_limits(bytes).map_err(ReloadError::HostRefused)
}

/// Checks that the next start has the backends that must not fall back from then on.
fn check_backends(config: &Config, changes: &ConfigDiff) -> Result<(), ReloadError> {
    if !is_moved(changes, &["engine.on_unavailable"]) {
        return Ok(());
    }
    for (key, backend) in config.backends() {
        Engine::check_backend(&config.engine, backend)
            .map_err(|error| ReloadError::Unavailable(format!("{key}: {error}")))?;
    }
    Ok(())
}

/// Checks the files that the next start will read in place of those in force.
fn check_moved(config: &Config, changes: &ConfigDiff) -> Result<(), ReloadError> {
    if let Some(tls) = config.tls.clone().filter(|_| is_moved(changes, &TLS_FILES)) {
        let files = [Some(&tls.certificate), Some(&tls.key), tls.client_ca.as_ref()];
        let files = files.into_iter().flatten();
        let files: Vec<_> = files.map(|path| path.display().to_string()).collect();
        in_time(&files, move || Tls::load(&tls).map(drop))?.map_err(unusable)?;
    }
    if let Some(path) = &config.access.principals
        && is_moved(changes, &PRINCIPALS)
    {
        let has_client_ca = config.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        let (file, access) = (path.display().to_string(), config.access.clone());
        in_time(&[&file], move || Access::load(&access, has_client_ca).map(drop))?.map_err(unusable)?;
    }
    if let Some(log) = config
        .access_log
        .clone()
        .filter(|_| is_moved(changes, &[LOG_PATH]))
    {
        let target = log.target.to_string();
        in_time(&[&target], move || AccessLog::check(&log))?.map_err(|error| {
            let problem = format!("{LOG_PATH}: {target} cannot be written: {error}");
            if is_refused_by_host(&error) {
                return ReloadError::HostRefused(format!("{problem}; {HOST_REMEDY}"));
            }
            ReloadError::Invalid(vec![ReloadProblem {
                key: LOG_PATH.to_owned(),
                problem: format!(
                    "{problem}; name a file that the daemon may append to, stdout, stderr or off"
                ),
            }])
        })?;
    }
    Ok(())
}

/// Files that cannot be used: mistakes, unless all that is wrong is that the host refuses to read them.
fn unusable(mut error: FileError) -> ReloadError {
    let more = std::mem::take(&mut error.more);
    let errors: Vec<FileError> = std::iter::once(error).chain(more).collect();
    if errors.iter().all(FileError::is_refused_by_host) {
        return ReloadError::HostRefused(listed(&errors, "; "));
    }
    let mistake = |error: &FileError| ReloadProblem {
        key: error.key.to_owned(),
        problem: error.to_string(),
    };
    ReloadError::Invalid(errors.iter().map(mistake).collect())
}

/// Checks that new datasets can be read if the `wanted` length of a response waits for a restart.
///
/// # Errors
/// An item of one fits that length, and not the one in force.
fn fit_an_answer(
    config: &Config,
    wanted: u64,
    catalogue: &Catalogue,
    difference: &CatalogueDiff,
) -> Result<(), ReloadError> {
    let in_force = config.limits.response_bytes;
    let is_unchanged = |name: &String| difference.unchanged.binary_search(name).is_ok();
    let mut problems = Vec::new();
    for dataset in catalogue.datasets() {
        let (field, item, bytes) = match dataset.kind() {
            Kind::Blocks { block_bytes, .. } => ("block_bytes", "a block", block_bytes),
            Kind::Vectors { vector_bytes, .. } => ("dim", "a vector", vector_bytes),
            Kind::Objects => continue,
        };
        let name = dataset.spec().name.clone();
        let fits = u64::from(bytes) <= in_force || u64::from(bytes) > wanted;
        if fits || is_unchanged(&name) {
            continue;
        }
        let index = config.datasets.iter().position(|spec| spec.name == name);
        let key = format!("datasets[{}].{field}", index.unwrap_or_default());
        let problem = format!(
            "{key}: makes {item} {bytes} bytes, and an answer has at most {in_force} until limits.response_bytes changes, \
             which needs a restart; restart the daemon, or leave dataset {name} out until then"
        );
        problems.push((index, ReloadProblem { key, problem }));
    }
    if problems.is_empty() {
        return Ok(());
    }
    // In the order of the file.
    problems.sort_by_key(|(index, _)| *index);
    let problems = problems.into_iter().map(|(_, problem)| problem);
    Err(ReloadError::Invalid(problems.collect()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_the_host_refuses_is_no_mistake() {
        // Scenario: a file that the host has no descriptor for, one with a mistake, and both. Expectation: the first is
        // the host's refusal; with a mistake, all are listed as mistakes.
        let error = |key, remedy| FileError {
            key,
            path: "f".to_owned(),
            problem: "p".to_owned(),
            remedy,
            more: Vec::new(),
            may_pass: false,
        };
        let refused = unusable(error("tls.key", HOST_REMEDY));
        assert!(
            matches!(&refused, ReloadError::HostRefused(text) if text.starts_with("tls.key: f: p; raise"))
        );
        let both = FileError {
            more: vec![error("access.principals", "correct it")],
            ..error("tls.key", HOST_REMEDY)
        };
        for (error, count) in [(error("tls.key", "correct it"), 1), (both, 2)] {
            let ReloadError::Invalid(mistakes) = unusable(error) else {
                panic!("the mistake is not found");
            };
            assert_eq!(mistakes.len(), count);
        }
    }
}
