//! Which backend reads each dataset: the engine's, or one of its own.
//!
//! Kept beside the engine, which routes and does not tell what has a route of its own. By name, as there: a dataset that is
//! opened anew keeps it. Deliberately absent: order between two switches (`live` makes one at a time).

use super::Fetcher;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::{BackendStatus, StartError};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The backend that reads a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Which, and why.
    pub status: BackendStatus,
    /// Whether the dataset has it of its own, or shares the engine's.
    pub own: bool,
}

/// Own backends, as they were asked for, by the names of their datasets.
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
    pub fn backend_of(&self, dataset: &Dataset) -> Chosen {
        Chosen {
            status: self.inner.engine.backend_of(dataset),
            own: self.own_backend(dataset.name()).is_some(),
        }
    }

    /// The backend that a dataset has of its own.
    pub fn own_backend(&self, dataset: &str) -> Option<BackendKind> {
        self.inner.backends.own().get(dataset).copied()
    }

    /// Gives a dataset a backend of its own, or takes it away. Blocks:
    /// see [`ringfetch_engine::engine::Engine::set_backend_of`].
    ///
    /// # Errors
    /// The backend cannot be had; nothing has changed then.
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

    /// As [`Self::set_backend_of`], but where the backend cannot be had, `engine.on_unavailable` decides, as at the start.
    ///
    /// # Errors
    /// It cannot be had, and no other is to take its place; nothing has changed then.
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

    /// Forgets a name that is not served: its own backend, and what the engine tells of it. Blocks while a switch is made.
    pub fn retire(&self, dataset: &str) {
        self.inner.engine.retire(dataset);
        self.inner.backends.own().remove(dataset);
    }
}
