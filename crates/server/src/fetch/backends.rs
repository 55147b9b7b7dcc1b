//! Which backend reads each dataset: the engine's, or the dataset's own.
//!
//! The engine routes reads but does not report which datasets have their own backend. Kept by name, as in the
//! engine, so that a dataset keeps its backend when a reload opens it again. `reconfigure` makes one switch
//! at a time.

use super::Fetcher;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::{BackendStatus, StartError};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The backend that reads a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetBackend {
    /// Which backend, and why.
    pub status: BackendStatus,
    /// Whether the dataset has its own backend or shares the engine's.
    pub own: bool,
}

/// Datasets with their own backend: the requested backend, by name.
#[derive(Debug, Default)]
pub(super) struct Backends {
    own: Mutex<BTreeMap<String, BackendKind>>,
}

impl Backends {
    fn own(&self) -> MutexGuard<'_, BTreeMap<String, BackendKind>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fetcher {
    /// Which backend reads a dataset, and why.
    pub fn backend_of(&self, dataset: &Dataset) -> DatasetBackend {
        DatasetBackend {
            status: self.inner.engine.backend_of(dataset),
            own: self.own_backend(dataset.name()).is_some(),
        }
    }

    /// The dataset's own backend, if it has one.
    pub fn own_backend(&self, dataset: &str) -> Option<BackendKind> {
        self.inner.backends.own().get(dataset).copied()
    }

    /// Sets or clears a dataset's own backend. Blocks:
    /// see [`ringfetch_engine::engine::Engine::set_backend_of`].
    ///
    /// # Errors
    /// The backend is unavailable; then nothing has changed.
    pub fn set_backend_of(
        &self,
        dataset: &Dataset,
        requested: Option<BackendKind>,
    ) -> Result<BackendStatus, StartError> {
        let status = self.inner.engine.set_backend_of(dataset, requested)?;
        let mut own = self.inner.backends.own();
        match requested {
            Some(requested) => own.insert(dataset.name().to_owned(), requested),
            None => own.remove(dataset.name()),
        };
        Ok(status)
    }

    /// As [`Self::set_backend_of`], but if the backend is unavailable, `engine.on_unavailable` decides, as at
    /// startup.
    ///
    /// # Errors
    /// The backend is unavailable and there is no fallback; then nothing has changed.
    pub fn choose_backend_of(
        &self,
        dataset: &Dataset,
        requested: BackendKind,
    ) -> Result<BackendStatus, StartError> {
        let status = self.inner.engine.choose_backend_of(dataset, requested)?;
        let mut own = self.inner.backends.own();
        own.insert(dataset.name().to_owned(), requested);
        Ok(status)
    }

    /// Forgets a dataset that is no longer served: its own backend, and its metrics in the engine. Blocks during a switch.
    pub fn retire(&self, dataset: &str) {
        self.inner.engine.retire(dataset);
        self.inner.backends.own().remove(dataset);
    }
}
