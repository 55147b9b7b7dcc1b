//! Which backend reads each dataset: the engine's, or one of its own.
//!
//! Kept beside the engine, which switches and does not remember who asked: what has a backend of its own, and what fell
//! back at the start. Deliberately absent: order between two switches (`live` makes one at a time).

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

/// A dataset's own backend.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Own {
    requested: BackendKind,
    /// Why mmap reads in its place, where it does.
    fallback: Option<String>,
}

/// Own backends by the ids of their datasets.
#[derive(Debug, Default)]
pub(super) struct Backends {
    own: Mutex<BTreeMap<u64, Own>>,
}

impl Backends {
    fn own(&self) -> MutexGuard<'_, BTreeMap<u64, Own>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fetcher {
    /// Which backend reads a dataset, and why.
    pub fn backend_of(&self, dataset: &Dataset) -> Chosen {
        let mut status = self.inner.engine.backend_of(dataset);
        let own = self.inner.backends.own();
        let entry = own.get(&dataset.id());
        if let Some(Own {
            requested,
            fallback: Some(reason),
        }) = entry
        {
            status.requested = *requested;
            status.reason.clone_from(reason);
        }
        Chosen {
            status,
            own: entry.is_some(),
        }
    }

    /// The backend that a dataset has of its own.
    pub fn own_backend(&self, dataset: &Dataset) -> Option<BackendKind> {
        self.inner
            .backends
            .own()
            .get(&dataset.id())
            .map(|own| own.requested)
    }

    /// Gives a dataset a backend of its own, or takes it away. Blocks: see [`ringfetch_engine::engine::Engine::set_backend_of`].
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
            Some(requested) => {
                let fallback = None;
                own.insert(dataset.id(), Own { requested, fallback });
            }
            None => {
                own.remove(&dataset.id());
            }
        }
        Ok(status)
    }

    /// Lets mmap read a dataset whose own backend, `requested`, cannot be had for this reason. Blocks.
    ///
    /// # Errors
    /// Not even mmap can be had.
    pub fn fall_back(
        &self,
        dataset: &Dataset,
        requested: BackendKind,
        reason: String,
    ) -> Result<(), StartError> {
        self.inner
            .engine
            .set_backend_of(dataset, Some(BackendKind::Mmap))?;
        let fallback = Some(reason);
        self.inner
            .backends
            .own()
            .insert(dataset.id(), Own { requested, fallback });
        Ok(())
    }

    /// Forgets the own backend of a dataset that is served no more.
    pub(crate) fn forget_backend(&self, dataset: u64) {
        self.inner.backends.own().remove(&dataset);
    }
}
