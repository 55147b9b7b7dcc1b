//! The backend switches of a reload, all or none: if one fails, the earlier ones are rolled back.

use super::changes::ConfigChange;
use super::{ActiveConfig, Inner};
use crate::catalogue::{Catalogue, CatalogueDiff};
use crate::config::Config;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::{BackendStatus, Engine, Routes, StartError};
use std::sync::Arc;

/// The switches that were made.
#[derive(Debug)]
pub(super) struct BackendSwitches<'a> {
    inner: &'a Inner,
    pub(super) applied: Vec<ConfigChange>,
    pub(super) notes: Vec<String>,
    before: Routes,
    /// Datasets that are not served yet.
    new: Vec<String>,
}

impl<'a> BackendSwitches<'a> {
    /// Makes the switches that the configuration requires.
    ///
    /// # Errors
    /// A backend is unavailable; then nothing has changed.
    pub(super) fn make(
        inner: &'a Inner,
        active: &ActiveConfig,
        config: &Config,
        catalogue: &Catalogue,
        difference: &CatalogueDiff,
    ) -> Result<Self, StartError> {
        let mut switches = Self {
            inner,
            applied: Vec::new(),
            notes: Vec::new(),
            before: inner.parts.fetcher.engine().routes(),
            new: Vec::new(),
        };
        match switches.make_all(active, config, catalogue, difference) {
            Ok(()) => Ok(switches),
            Err(error) => {
                switches.roll_back();
                Err(error)
            }
        }
    }

    fn engine(&self) -> &'a Engine {
        self.inner.parts.fetcher.engine()
    }

    fn make_all(
        &mut self,
        active: &ActiveConfig,
        config: &Config,
        catalogue: &Catalogue,
        difference: &CatalogueDiff,
    ) -> Result<(), StartError> {
        let is_new = |dataset: &Arc<Dataset>| {
            let name = dataset.name();
            difference.added.iter().any(|added| added == name)
        };
        let wanted = |dataset: &Arc<Dataset>| config.dataset_backends.get(dataset.name()).copied();
        let (new, served): (Vec<_>, Vec<_>) = catalogue.datasets().into_iter().partition(is_new);
        // New datasets first: they have no readers yet.
        for dataset in &new {
            if let Some(wanted) = wanted(dataset) {
                self.new.push(dataset.name().to_owned());
                // Not counted, as at the start: it had no backend before.
                self.engine()
                    .set_backend_of(dataset, Some(wanted))
                    .map_err(|error| of_dataset(dataset, &error))?;
            }
        }
        self.common(config.engine.backend, active.backend)?;
        for dataset in &served {
            let before = active.dataset_backends.get(dataset.name()).copied();
            self.dataset(dataset, wanted(dataset), before)?;
        }
        Ok(())
    }

    /// `configured` is the backend in the previous configuration. If it is unchanged, this only reverts a
    /// switch made at run time, and a backend that fell back at startup may fall back again: that is not a
    /// mistake in the new configuration.
    fn common(&mut self, wanted: BackendKind, configured: BackendKind) -> Result<(), StartError> {
        let engine = self.engine();
        let before = engine.backend();
        if before.requested == wanted {
            return Ok(());
        }
        let now = self.count_switch(wanted, || match wanted == configured {
            true => engine.choose_backend(wanted),
            false => engine.set_backend(wanted),
        });
        let now = now.map_err(|error| StartError(format!("engine.backend: {error}")))?;
        if now.is_fallback() {
            let reason = &now.reason;
            self.notes.push(format!(
                "engine.backend: {wanted} is unavailable, {} is used: {reason}",
                now.backend
            ));
        }
        if before.requested != now.backend {
            let change = ConfigChange::new("engine.backend", before.requested, now.backend);
            self.applied.push(change);
        }
        Ok(())
    }

    /// As [`Self::common`], for a dataset's own backend.
    fn dataset(
        &mut self,
        dataset: &Arc<Dataset>,
        wanted: Option<BackendKind>,
        configured: Option<BackendKind>,
    ) -> Result<(), StartError> {
        let name = dataset.name();
        let engine = self.engine();
        let before = engine.own_backend(name);
        if before == wanted {
            return Ok(());
        }
        let now = match wanted {
            None => {
                // By the backend that serves it then, also where the engine fell back: that is not what failed.
                let now = engine.set_backend_of(dataset, None);
                let inherited = engine.backend().backend;
                self.inner.metrics.switched(inherited, now.is_ok());
                now
            }
            Some(wanted) => self.count_switch(wanted, || match configured == Some(wanted) {
                true => engine.choose_backend_of(dataset, wanted),
                false => engine.set_backend_of(dataset, Some(wanted)),
            }),
        };
        let now = now.map_err(|error| of_dataset(dataset, &error))?;
        let key = format!("datasets.{name}.backend");
        if wanted.is_some() && now.is_fallback() {
            let (requested, reason) = (now.requested, &now.reason);
            self.notes.push(format!(
                "{key}: {requested} is unavailable, {} is used: {reason}",
                now.backend
            ));
        }
        let word = |backend: Option<BackendKind>| backend.map_or("inherit", BackendKind::as_str);
        self.applied
            .push(ConfigChange::new(key, word(before), word(wanted)));
        Ok(())
    }

    fn count_switch(
        &self,
        backend: BackendKind,
        switch: impl FnOnce() -> Result<BackendStatus, StartError>,
    ) -> Result<BackendStatus, StartError> {
        let result = switch();
        let is_used = result.as_ref().is_ok_and(|now| !now.is_fallback());
        self.inner.metrics.switched(backend, is_used);
        result
    }

    /// Undoes the switches.
    fn roll_back(self) {
        let engine = self.engine();
        engine.restore(self.before);
        self.new.iter().for_each(|name| engine.retire(name));
    }
}

fn of_dataset(dataset: &Dataset, error: &StartError) -> StartError {
    StartError(format!("datasets.{}.backend: {error}", dataset.name()))
}
