//! What changes while the daemon serves: which backend reads, and the configuration.
//!
//! One change at a time; a few may wait, more are refused. A change that fails leaves everything
//! as it was. Reads are never stopped for one: a request keeps the dataset it found, a batch the shard it is on. The
//! work is done where blocking is allowed, and goes on when whoever asked for it leaves.
//! Deliberately absent: how a switch is made (the engine's), and what only a restart changes, which is named.

mod changes;
mod metrics;
mod reload;
mod retire;
mod switches;

use crate::catalogue::Catalogue;
use crate::config::{Config, Inputs, Loaded, Setting};
use crate::fetch::{FetchError, Fetcher};
use crate::lifecycle::{Lifecycle, ReloadSignals, State};
use crate::listener::ConnectionLimits;
use crate::telemetry::Telemetry;
use metrics::Metrics;
use retire::RetiredDatasets;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::engine::{BackendStatus, StartError};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError};
use tokio::task::JoinError;

pub use changes::ConfigChange;
pub use reload::{LastReload, ReloadError, ReloadOutcome, ReloadProblem};

/// Changes that may wait for the one under way, it included.
const TURNS: usize = 8;

/// What can be changed, and what it was made from.
#[derive(Debug)]
pub struct ReconfigurerParts {
    /// Where the configuration is read again.
    pub inputs: Inputs,
    /// The configuration in force.
    pub loaded: Loaded,
    /// The datasets that are open, which the fetcher serves.
    pub catalogue: Catalogue,
    /// Reads.
    pub fetcher: Fetcher,
    /// Only while serving is anything changed.
    pub lifecycle: Lifecycle,
    /// The log's filter, and where metrics are registered.
    pub telemetry: Telemetry,
    /// The ports' bounds.
    pub connection_limits: ConnectionLimits,
}

/// Changes a daemon while it serves. Clones share it.
#[derive(Debug, Clone)]
pub struct Reconfigurer {
    inner: Arc<Inner>,
    turns: Arc<Semaphore>,
    /// Where the work is done: the cores must not block, and end before the process does.
    runtime: Handle,
}

#[derive(Debug)]
struct Inner {
    inputs: Inputs,
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    telemetry: Telemetry,
    connection_limits: ConnectionLimits,
    metrics: Metrics,
    /// Locked for as long as a change takes.
    active: Mutex<ActiveConfig>,
    last: Mutex<Option<LastReload>>,
    lame_duck: Mutex<Duration>,
    drain_timeout: Mutex<Duration>,
    retired: Arc<RetiredDatasets>,
}

/// The configuration in force, as far as a reload compares with it.
#[derive(Debug)]
struct ActiveConfig {
    settings: Vec<Setting>,
    backend: BackendKind,
    dataset_backends: BTreeMap<String, BackendKind>,
    catalogue: Catalogue,
}

/// A switch that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchOutcome {
    /// What read before.
    pub previous: BackendStatus,
    /// What reads now.
    pub now: BackendStatus,
    /// Datasets that the switch did not reach, since they have a backend of their own.
    pub datasets_with_own: Vec<String>,
}

/// Why a switch was not made. What read before goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// The daemon does not serve yet, or not any more.
    #[error("the daemon is {0}: nothing is switched")]
    NotServing(State),
    /// Too many changes wait.
    #[error("{TURNS} changes are under way or wait: retry after a moment")]
    Busy,
    /// There is no such dataset.
    #[error(transparent)]
    NoDataset(#[from] FetchError),
    /// The backend is unavailable.
    #[error("{0}")]
    Unavailable(String),
    /// The change broke down: a defect.
    #[error("the switch broke down: {0}")]
    Broken(String),
}

impl Reconfigurer {
    /// Must be called inside a tokio runtime, which does the work.
    ///
    /// # Errors
    /// A metric's name is taken.
    pub fn new(parts: ReconfigurerParts) -> Result<Self, prometheus::Error> {
        let ReconfigurerParts {
            inputs,
            loaded,
            catalogue,
            fetcher,
            lifecycle,
            telemetry,
            connection_limits,
        } = parts;
        let metrics = Metrics::new(telemetry.registry())?;
        let retired = Arc::new(RetiredDatasets::default());
        let Loaded { config, settings } = loaded;
        let active = ActiveConfig {
            settings,
            backend: config.engine.backend,
            dataset_backends: config.dataset_backends,
            catalogue,
        };
        let inner = Inner {
            inputs,
            fetcher,
            lifecycle,
            telemetry,
            connection_limits,
            metrics,
            active: Mutex::new(active),
            last: Mutex::new(None),
            lame_duck: Mutex::new(config.lame_duck),
            drain_timeout: Mutex::new(config.drain_timeout),
            retired,
        };
        Ok(Self {
            inner: Arc::new(inner),
            turns: Arc::new(Semaphore::new(TURNS)),
            runtime: Handle::current(),
        })
    }

    /// Makes a backend read every dataset that has none of its own, until the next reload.
    ///
    /// # Errors
    /// See [`SwitchError`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves the switch to be made.
    pub async fn set_backend(&self, backend: BackendKind) -> Result<SwitchOutcome, SwitchError> {
        self.switch(move |inner| {
            let engine = inner.fetcher.engine();
            let previous = engine.backend();
            let now = inner.count_switch(backend, || engine.set_backend(backend))?;
            let datasets = inner.fetcher.datasets();
            let mut names: Vec<String> = datasets.iter().map(|dataset| dataset.name().to_owned()).collect();
            names.retain(|name| inner.fetcher.own_backend(name).is_some());
            Ok(SwitchOutcome {
                previous,
                now,
                datasets_with_own: names,
            })
        })
        .await
    }

    /// Gives a dataset a backend of its own until the next reload, or takes it away (`None`).
    ///
    /// # Errors
    /// See [`SwitchError`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves the switch to be made.
    pub async fn set_backend_of(
        &self,
        dataset: &str,
        backend: Option<BackendKind>,
    ) -> Result<SwitchOutcome, SwitchError> {
        let name = dataset.to_owned();
        self.switch(move |inner| {
            let dataset = inner.fetcher.dataset(&name)?;
            let previous = inner.fetcher.backend_of(&dataset).status;
            let asked = backend.unwrap_or_else(|| inner.fetcher.engine().backend().requested);
            let now = inner.count_switch(asked, || inner.fetcher.set_backend_of(&dataset, backend))?;
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
        let done = self.in_turn(turn, move |inner, _in_force| match inner.lifecycle.state() {
            State::Serving => work(inner),
            state @ (State::Starting | State::LameDuck | State::Draining | State::Ended) => {
                Err(SwitchError::NotServing(state))
            }
        });
        let broken = |error: JoinError| Err(SwitchError::Broken(error.to_string()));
        done.await.unwrap_or_else(broken)
    }

    /// Reads the configuration again and applies what can change, or nothing at all.
    ///
    /// # Errors
    /// See [`ReloadError`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves the reload to be made.
    pub async fn reload(&self) -> Result<ReloadOutcome, ReloadError> {
        let turn = self.turn().map_err(|_| ReloadError::Busy)?;
        self.reload_in(turn).await
    }

    async fn reload_in(&self, turn: OwnedSemaphorePermit) -> Result<ReloadOutcome, ReloadError> {
        let runtime = self.runtime.clone();
        let done = self.in_turn(turn, move |inner, active| {
            let result = inner.reload(active);
            inner.retired.watch(&runtime, inner.fetcher.engine());
            result
        });
        let broken = |error: JoinError| Err(self.inner.failed(ReloadError::Broken(error.to_string())));
        done.await.unwrap_or_else(broken)
    }

    /// Reloads on each SIGHUP, for as long as there are any.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the signal without effect.
    pub async fn reload_on_signal(self, mut reload_signals: ReloadSignals) {
        while reload_signals.next().await.is_some() {
            // Nobody would hear that it is busy: it waits. The semaphore is never closed.
            let Ok(turn) = Arc::clone(&self.turns).acquire_owned().await else {
                return;
            };
            tracing::info!(signal = "SIGHUP", "reading the configuration again");
            // What comes of it is logged there.
            let _told = self.reload_in(turn).await;
        }
    }

    /// The last reload, if there was one.
    pub fn last_reload(&self) -> Option<LastReload> {
        lock(&self.inner.last).clone()
    }

    /// How long requests are still served after readiness has ended.
    pub fn lame_duck(&self) -> Duration {
        *lock(&self.inner.lame_duck)
    }

    /// How long a drain may take.
    pub fn drain_timeout(&self) -> Duration {
        *lock(&self.inner.drain_timeout)
    }

    /// A place among those who wait for their turn.
    fn turn(&self) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        Arc::clone(&self.turns).try_acquire_owned()
    }

    /// Does something when it is its turn, where blocking is allowed.
    async fn in_turn<T: Send + 'static>(
        &self,
        turn: OwnedSemaphorePermit,
        work: impl FnOnce(&Inner, &mut ActiveConfig) -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let inner = Arc::clone(&self.inner);
        let done = self.runtime.spawn_blocking(move || {
            let _turn = turn;
            work(&inner, &mut lock(&inner.active))
        });
        done.await
    }
}

impl Inner {
    /// Makes a switch, counts it and tells of it.
    fn count_switch(
        &self,
        backend: BackendKind,
        switch: impl FnOnce() -> Result<BackendStatus, StartError>,
    ) -> Result<BackendStatus, SwitchError> {
        let result = switch();
        self.metrics.switched(backend, result.is_ok());
        match &result {
            Ok(now) => tracing::info!(backend = %now.backend, reason = now.reason, "backend switched"),
            Err(error) => tracing::warn!(%backend, %error, "backend not switched: the old one stays"),
        }
        result.map_err(|error| SwitchError::Unavailable(error.to_string()))
    }
}

/// Gives each dataset the backend of its own that the configuration names, before it is served. Blocks.
///
/// # Errors
/// One is unavailable, and falling back is not allowed.
pub fn start_own_backends(fetcher: &Fetcher, config: &Config) -> Result<(), StartError> {
    for dataset in fetcher.datasets() {
        let name = dataset.name();
        let Some(&backend) = config.dataset_backends.get(name) else {
            continue;
        };
        let status = fetcher
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
