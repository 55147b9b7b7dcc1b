//! Switches from one backend to another while the engine serves.
//!
//! Invariants: an unavailable backend is refused before anything changes; a backend is started, and its
//! metrics exported, before a batch is routed to it. Switches run one at a time, and none once the engine
//! drains.

use super::{Engine, Inner};
use crate::config::BackendKind;
use crate::cores::Alarm;
use crate::dataset::Dataset;
use crate::engine::{BackendStatus, StartError};
use crate::routing::{BackendRoute, RoutingTable};
use crate::start::{self, ShardGroup, Starter};
use crate::sync::lock;
use std::sync::{Arc, MutexGuard};

/// What serves each dataset at one moment, to return to.
pub struct Routes(Arc<RoutingTable>);

impl std::fmt::Debug for Routes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Routes").finish_non_exhaustive()
    }
}

impl Engine {
    /// What serves each dataset now.
    pub fn routes(&self) -> Routes {
        Routes(self.inner.routes.load_full())
    }

    /// Takes back all switches since: their backends still run. Not for others to switch meanwhile.
    pub fn restore(&self, Routes(routes): Routes) {
        let _one_at_a_time = self.inner.switch();
        self.inner.routes.store(routes);
    }

    /// The backend requested for a dataset alone, if it has one of its own.
    pub fn own_backend(&self, dataset: &str) -> Option<BackendKind> {
        let routes = self.inner.routes.load();
        routes.own_of(dataset).map(|route| route.status.requested)
    }

    /// Switches all datasets without a backend of their own, while serving: later batches go to the new
    /// backend, accepted ones finish on the old one. Blocks while the backend starts (up to seconds, the
    /// first time): never call it on a core.
    ///
    /// # Errors
    /// The backend is unavailable, or the engine is draining; in either case nothing changes, whatever
    /// `on_unavailable` says.
    pub fn set_backend(&self, requested: BackendKind) -> Result<BackendStatus, StartError> {
        let _one_at_a_time = self.inner.switch();
        self.route_common(self.inner.admit(requested)?)
    }

    /// As [`Engine::set_backend`] at start: if io_uring is unavailable, `on_unavailable` decides.
    ///
    /// # Errors
    /// The backend is unavailable, and falling back is not allowed.
    pub fn choose_backend(&self, requested: BackendKind) -> Result<BackendStatus, StartError> {
        let _one_at_a_time = self.inner.switch();
        self.route_common(self.inner.choose(requested)?)
    }

    /// Call within [`Inner::switch`].
    fn route_common(&self, status: BackendStatus) -> Result<BackendStatus, StartError> {
        let route = self.inner.route(status.clone())?;
        let routes = self.inner.routes.load();
        let mut served = self.inner.metrics.datasets();
        served.retain(|dataset| !routes.own.iter().any(|(own, _)| own == dataset));
        show(&route.group, &served, status.backend);
        let own = routes.own.clone();
        self.inner
            .routes
            .store(Arc::new(RoutingTable { common: route, own }));
        Ok(status)
    }

    /// Sets a dataset's own backend, as [`Engine::set_backend`] does for all others; `None` clears it. Kept
    /// by name, so it applies again when the dataset is reopened.
    ///
    /// # Errors
    /// As [`Engine::set_backend`].
    pub fn set_backend_of(
        &self,
        dataset: &Dataset,
        requested: Option<BackendKind>,
    ) -> Result<BackendStatus, StartError> {
        let status = requested
            .map(|requested| self.inner.admit(requested))
            .transpose()?;
        self.route_own(dataset, status)
    }

    /// As [`Engine::set_backend_of`] at start: if io_uring is unavailable, `on_unavailable` decides.
    ///
    /// # Errors
    /// The backend is unavailable, and falling back is not allowed.
    pub fn choose_backend_of(
        &self,
        dataset: &Dataset,
        requested: BackendKind,
    ) -> Result<BackendStatus, StartError> {
        let status = self.inner.choose(requested)?;
        self.route_own(dataset, Some(status))
    }

    fn route_own(
        &self,
        dataset: &Dataset,
        status: Option<BackendStatus>,
    ) -> Result<BackendStatus, StartError> {
        let inner = &*self.inner;
        let _one_at_a_time = inner.switch();
        let route = status.map(|status| inner.route(status)).transpose()?;
        let routes = inner.routes.load().with_own(dataset.name(), route);
        let now = routes.of(dataset.name());
        show(&now.group, &[dataset.name().to_owned()], now.status.backend);
        let status = now.status.clone();
        inner.routes.store(Arc::new(routes));
        Ok(status)
    }

    /// Removes a dataset that is no longer served from `ringfetch_dataset_backend_info`, with its own
    /// backend. Its counters remain while it is still read.
    pub fn retire(&self, dataset: &str) {
        let _one_at_a_time = self.inner.switch();
        self.inner.metrics.forget(dataset);
        let routes = self.inner.routes.load().with_own(dataset, None);
        self.inner.routes.store(Arc::new(routes));
    }

    /// Tells that nobody holds a retired dataset any more, so that none of them can be read again.
    pub fn retired_are_closed(&self) {
        self.inner.metrics.forgotten_are_closed();
    }
}

impl Inner {
    /// Waits for a running switch to end, and blocks the next.
    fn switch(&self) -> MutexGuard<'_, ()> {
        lock(&self.switching)
    }

    fn admit(&self, requested: BackendKind) -> Result<BackendStatus, StartError> {
        if self.has_rings_for(requested) {
            return Ok(start::admit_running(requested));
        }
        start::admit(requested)
    }

    fn choose(&self, requested: BackendKind) -> Result<BackendStatus, StartError> {
        if self.has_rings_for(requested) {
            return Ok(start::admit_running(requested));
        }
        start::choose(&self.config, requested)
    }

    fn has_rings_for(&self, requested: BackendKind) -> bool {
        requested.uses_ring() && self.running(requested).is_some()
    }

    /// The shards that serve a backend, if they run.
    fn running(&self, backend: BackendKind) -> Option<Arc<ShardGroup>> {
        self.groups().into_iter().find(|group| group.serves(backend))
    }

    /// The route to a backend; starts its shards if necessary. Call within [`Inner::switch`].
    fn route(&self, status: BackendStatus) -> Result<BackendRoute, StartError> {
        let raised = lock(&self.alarm_raised).clone();
        let alarm =
            raised.ok_or_else(|| StartError(format!("backend {}: the engine is ending", status.backend)))?;
        let group = match self.running(status.backend) {
            Some(group) => group,
            None => self.start_group(status.backend, alarm)?,
        };
        Ok(BackendRoute::new(&self.config, group, status))
    }

    fn start_group(&self, backend: BackendKind, alarm: Alarm) -> Result<Arc<ShardGroup>, StartError> {
        let mut starter = Starter {
            config: &self.config,
            arena: &self.arena,
            alarm,
            first_shard: self.metrics.shard_count(),
            threads: Vec::new(),
            shards: Vec::new(),
        };
        // Memory that a ring registers must be populated; on a core that would block the core's connections.
        if backend.uses_ring() && self.config.uring.registered_buffers {
            self.arena.populate();
        }
        let cores = lock(&self.cores).clone();
        let on_cores = starter.start(backend, &cores, None)?;
        let mut threads = lock(&self.threads);
        let group = Arc::new(starter.finish(backend, on_cores, &self.metrics, &mut threads));
        drop(threads);
        lock(&self.groups).push(Arc::clone(&group));
        Ok(group)
    }
}

/// Exports the series of a backend, and of these datasets by it, from now on.
pub(super) fn show(group: &ShardGroup, datasets: &[String], backend: BackendKind) {
    for shard in &group.shards {
        shard.metrics.show(backend);
        for dataset in datasets {
            let _counters = shard.metrics.dataset(dataset, backend);
        }
    }
}
