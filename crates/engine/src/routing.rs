//! Which backend serves which dataset, and how it is switched while batches are in flight.
//!
//! Invariants: a batch is planned, queued and read by the group of its route at submission; a switch affects
//! only later batches. A group of shards stays until the engine ends, idle if nothing is routed to it: a
//! switch disturbs no batch, and the next switch finds the group started (ADR 0010). Switches run one at a
//! time.

use crate::config::{BackendKind, EngineConfig};
use crate::engine::BackendStatus;
use crate::plan::PlanRules;
use crate::start::ShardGroup;
use std::sync::Arc;

/// Where a dataset's batches go.
#[derive(Clone)]
pub(crate) struct BackendRoute {
    pub(crate) group: Arc<ShardGroup>,
    pub(crate) status: BackendStatus,
    pub(crate) rules: PlanRules,
}

impl BackendRoute {
    /// Routes to a group that serves `status.backend`.
    pub(crate) fn new(config: &EngineConfig, group: Arc<ShardGroup>, status: BackendStatus) -> Self {
        let rules = PlanRules {
            direct: matches!(
                status.backend,
                BackendKind::Uring | BackendKind::Auto | BackendKind::Pread
            ),
            merge: status.backend != BackendKind::Mmap,
            merge_gap_bytes: config.plan.merge_gap_bytes,
            max_read_bytes: config.plan.max_read_bytes,
        };
        Self { group, status, rules }
    }
}

/// All routes at one moment.
#[derive(Clone)]
pub(crate) struct RoutingTable {
    /// For datasets without one of their own.
    pub(crate) common: BackendRoute,
    /// For datasets with one of their own, by name, so that it applies again when a dataset is reopened.
    pub(crate) own: Vec<(String, BackendRoute)>,
}

impl RoutingTable {
    pub(crate) fn of(&self, dataset: &str) -> &BackendRoute {
        self.own_of(dataset).unwrap_or(&self.common)
    }

    pub(crate) fn own_of(&self, dataset: &str) -> Option<&BackendRoute> {
        let own = self.own.iter().find(|(name, _)| name == dataset);
        own.map(|(_, route)| route)
    }

    /// A copy with another route for a dataset; `None` removes its own.
    pub(crate) fn with_own(&self, dataset: &str, route: Option<BackendRoute>) -> Self {
        let mut own = self.own.clone();
        own.retain(|(name, _)| name != dataset);
        own.extend(route.map(|route| (dataset.to_owned(), route)));
        Self {
            common: self.common.clone(),
            own,
        }
    }
}
