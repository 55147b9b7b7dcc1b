//! Changes of a serving daemon: backend switches and configuration reloads.
//!
//! Changes run one at a time; a few may wait, more are refused. A failed change leaves everything as it was.
//! Reads continue during a change: a request keeps the dataset that it found, a batch its shard. The work
//! runs on a thread for that, and completes even if the caller leaves.

mod changes;
mod metrics;
mod reload;
mod retire;
mod switches;

use crate::access::Access;
use crate::access_log::AccessLog;
use crate::catalogue::Catalogue;
use crate::config::{Config, Inputs, Loaded, Setting};
use crate::fetch::{FetchError, Fetcher};
use crate::lifecycle::{Lifecycle, State};
use crate::listener::ConnectionLimits;
use crate::telemetry::Telemetry;
use crate::tls::Tls;
use metrics::Metrics;
use retire::RetiredDatasets;
use ringfetch_engine::blocking::BlockingPool;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::engine::{BackendStatus, StartError};
use ringfetch_engine::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::signal::unix::Signal;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};

pub use changes::ConfigChange;
pub use reload::{LastReload, ReloadError, ReloadOutcome, ReloadProblem};

/// Changes that may run or wait.
const TURNS: usize = 8;

/// The thread that makes them.
static CHANGER: BlockingPool = BlockingPool::new("rf-change", 1);

/// The parts of a daemon that a change replaces, or whose settings it changes. Clones share them.
#[derive(Debug, Clone)]
pub struct ReconfigurerParts {
    /// The inputs of the configuration.
    pub inputs: Inputs,
    /// Serves the datasets.
    pub fetcher: Fetcher,
    /// Changes are made only while serving.
    pub lifecycle: Lifecycle,
    /// The log filter and the metrics registry.
    pub telemetry: Telemetry,
    /// The limits of connections.
    pub connection_limits: ConnectionLimits,
    /// TLS, if a port has it.
    pub tls: Option<Tls>,
    /// The access log, if there is one.
    pub access_log: Option<AccessLog>,
    /// The principals, if there are any.
    pub access: Option<Access>,
}

/// Changes a daemon while it serves. Clones share it.
#[derive(Debug, Clone)]
pub struct Reconfigurer {
    inner: Arc<Inner>,
    turns: Arc<Semaphore>,
    /// Runs the work: cores must not block, and end before the process.
    runtime: Handle,
}

#[derive(Debug)]
struct Inner {
    parts: ReconfigurerParts,
    metrics: Metrics,
    /// Locked during a change.
    active: Mutex<ActiveConfig>,
    last: Mutex<Option<LastReload>>,
    lame_duck: Mutex<Duration>,
    drain_timeout: Mutex<Duration>,
    retired: Arc<RetiredDatasets>,
}

/// The configuration in force, as far as a reload needs it.
#[derive(Debug)]
struct ActiveConfig {
    settings: Vec<Setting>,
    backend: BackendKind,
    dataset_backends: BTreeMap<String, BackendKind>,
    catalogue: Catalogue,
}

/// A completed switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchOutcome {
    /// The backend before.
    pub previous: BackendStatus,
    /// The backend now.
    pub now: BackendStatus,
    /// Datasets that were not switched because they have their own backend.
    pub datasets_with_own: Vec<String>,
}

/// Why a switch failed. The old backend remains.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// The daemon is not serving.
    #[error("the daemon is {0}: nothing is switched")]
    NotServing(State),
    /// Too many changes are waiting.
    #[error("{TURNS} changes are running or waiting: retry after a moment")]
    Busy,
    /// There is no such dataset.
    #[error(transparent)]
    NoDataset(#[from] FetchError),
    /// The backend is unavailable.
    #[error("{0}")]
    Unavailable(String),
    /// The change panicked, which is a defect, or the system refused a thread for it.
    #[error("the switch failed: {0}")]
    Broken(String),
}

impl Reconfigurer {
    /// `loaded` is the configuration in force, `catalogue` has the datasets that the fetcher serves. Must be called
    /// inside a tokio runtime, which runs the work.
    ///
    /// # Errors
    /// A metric's name is already registered.
    pub fn new(
        parts: ReconfigurerParts,
        loaded: Loaded,
        catalogue: Catalogue,
    ) -> Result<Self, prometheus::Error> {
        let Loaded { config, settings } = loaded;
        let inner = Inner {
            metrics: Metrics::new(parts.telemetry.registry())?,
            parts,
            active: Mutex::new(ActiveConfig {
                settings,
                backend: config.engine.backend,
                dataset_backends: config.dataset_backends,
                catalogue,
            }),
            last: Mutex::new(None),
            lame_duck: Mutex::new(config.lame_duck),
            drain_timeout: Mutex::new(config.drain_timeout),
            retired: Arc::default(),
        };
        Ok(Self {
            inner: Arc::new(inner),
            turns: Arc::new(Semaphore::new(TURNS)),
            runtime: Handle::current(),
        })
    }

    /// Switches all datasets without their own backend, until the next reload.
    ///
    /// # Errors
    /// See [`SwitchError`].
    ///
    /// # Cancel safety
    /// The switch is completed even if the future is dropped.
    pub async fn set_backend(&self, backend: BackendKind) -> Result<SwitchOutcome, SwitchError> {
        self.switch(move |inner| {
            let engine = inner.parts.fetcher.engine();
            let previous = engine.backend();
            let now = inner.count_switch(backend, || engine.set_backend(backend))?;
            let datasets = inner.parts.fetcher.datasets();
            let mut names: Vec<String> = datasets.iter().map(|dataset| dataset.name().to_owned()).collect();
            names.retain(|name| engine.own_backend(name).is_some());
            Ok(SwitchOutcome {
                previous,
                now,
                datasets_with_own: names,
            })
        })
        .await
    }

    /// Sets or clears (`None`) a dataset's own backend, until the next reload.
    ///
    /// # Errors
    /// See [`SwitchError`].
    ///
    /// # Cancel safety
    /// The switch is completed even if the future is dropped.
    pub async fn set_backend_of(
        &self,
        dataset: &str,
        backend: Option<BackendKind>,
    ) -> Result<SwitchOutcome, SwitchError> {
        let name = dataset.to_owned();
        self.switch(move |inner| {
            let dataset = inner.parts.fetcher.dataset(&name)?;
            let engine = inner.parts.fetcher.engine();
            let previous = engine.backend_of(&dataset);
            // Without one of its own it has the one that the engine uses, which may be a fallback.
            let asked = backend.unwrap_or_else(|| engine.backend().backend);
            let now = inner.count_switch(asked, || engine.set_backend_of(&dataset, backend))?;
            Ok(SwitchOutcome {
                previous,
                now,
                datasets_with_own: Vec::new(),
            })
        })
        .await
    }

    async fn switch(
        &self,
        work: impl FnOnce(&Inner) -> Result<SwitchOutcome, SwitchError> + Send + 'static,
    ) -> Result<SwitchOutcome, SwitchError> {
        let turn = self.turn().map_err(|_| SwitchError::Busy)?;
        let done = self.in_turn(turn, move |inner, _in_force| {
            match inner.parts.lifecycle.state() {
                State::Serving => work(inner),
                state @ (State::Starting | State::LameDuck | State::Draining | State::Ended) => {
                    Err(SwitchError::NotServing(state))
                }
            }
        });
        done.await
            .unwrap_or_else(|problem| Err(SwitchError::Broken(problem)))
    }

    /// Reloads the configuration: applies everything that can change, or nothing if there is an error.
    ///
    /// # Errors
    /// See [`ReloadError`].
    ///
    /// # Cancel safety
    /// The reload is completed even if the future is dropped.
    pub async fn reload(&self) -> Result<ReloadOutcome, ReloadError> {
        self.reopen_access_log();
        let turn = self.turn().map_err(|_| ReloadError::Busy)?;
        self.reload_in(turn).await
    }

    async fn reload_in(&self, turn: OwnedSemaphorePermit) -> Result<ReloadOutcome, ReloadError> {
        let runtime = self.runtime.clone();
        let done = self.in_turn(turn, move |inner, active| {
            let result = inner.reload(active);
            inner.retired.watch(&runtime, inner.parts.fetcher.engine());
            result
        });
        done.await.unwrap_or_else(|problem| {
            let refused = self.inner.failed(ReloadError::Broken(problem));
            // It may not have begun, and the service manager waits for its end.
            drop(self.inner.parts.lifecycle.start_reloading());
            Err(refused)
        })
    }

    /// Reloads on each of these signals. Those that arrive during a reload are merged.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the signal without effect.
    pub async fn reload_on_signal(self, mut hangups: Signal) {
        while hangups.recv().await.is_some() {
            self.reopen_access_log();
            // A signal cannot be refused, so it waits. The semaphore is never closed.
            let Ok(turn) = Arc::clone(&self.turns).acquire_owned().await else {
                return;
            };
            tracing::info!(signal = "SIGHUP", "reading the configuration again");
            // `reload_in` logs the outcome.
            let _logged = self.reload_in(turn).await;
        }
    }

    /// Regardless of the configuration and of changes that wait: the file may have been rotated.
    fn reopen_access_log(&self) {
        self.inner.parts.access_log.iter().for_each(AccessLog::reopen);
    }

    /// The last reload, if there was one.
    pub fn last_reload(&self) -> Option<LastReload> {
        lock(&self.inner.last).clone()
    }

    /// How long requests are served after readiness has ended.
    pub fn lame_duck(&self) -> Duration {
        *lock(&self.inner.lame_duck)
    }

    /// How long a drain may take.
    pub fn drain_timeout(&self) -> Duration {
        *lock(&self.inner.drain_timeout)
    }

    /// A permit to run or wait.
    fn turn(&self) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        Arc::clone(&self.turns).try_acquire_owned()
    }

    /// Waits for its turn and runs work on the thread for changes. An error is a problem as text.
    async fn in_turn<T: Send + 'static>(
        &self,
        turn: OwnedSemaphorePermit,
        work: impl FnOnce(&Inner, &mut ActiveConfig) -> T + Send + 'static,
    ) -> Result<T, String> {
        let (inner, runtime) = (Arc::clone(&self.inner), self.runtime.clone());
        let done = CHANGER.run(move || {
            let _turn = turn;
            let _inside = runtime.enter();
            work(&inner, &mut lock(&inner.active))
        });
        let done = done.map_err(|error| format!("no thread: {error}; retry after a moment"))?;
        done.await.map_err(|_| "it panicked".to_owned())
    }
}

impl Inner {
    /// Makes, counts and logs a switch.
    fn count_switch(
        &self,
        backend: BackendKind,
        switch: impl FnOnce() -> Result<BackendStatus, StartError>,
    ) -> Result<BackendStatus, SwitchError> {
        let result = switch();
        self.metrics.switched(backend, result.is_ok());
        match &result {
            Ok(now) => tracing::info!(backend = %now.backend, reason = now.reason, "backend switched"),
            Err(error) => tracing::warn!(%backend, %error, "backend switch failed; the old one stays"),
        }
        result.map_err(|error| SwitchError::Unavailable(error.to_string()))
    }
}

/// Sets datasets' own backends from the configuration, before they are served. Blocks.
///
/// # Errors
/// A backend is unavailable, and falling back is not allowed.
pub fn start_own_backends(fetcher: &Fetcher, config: &Config) -> Result<(), StartError> {
    for dataset in fetcher.datasets() {
        let name = dataset.name();
        let Some(&backend) = config.dataset_backends.get(name) else {
            continue;
        };
        let status = fetcher
            .engine()
            .choose_backend_of(&dataset, backend)
            .map_err(|error| StartError(format!("datasets.{name}.backend: {error}")))?;
        if status.is_fallback() {
            let BackendStatus {
                backend,
                requested,
                reason,
            } = status;
            tracing::warn!(dataset = name, %requested, %backend, reason, "fallback");
        }
    }
    Ok(())
}
