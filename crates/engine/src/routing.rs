//! Which backend serves which dataset now, and the switch from one to another while batches are on their way.
//!
//! Invariants: a batch is planned, queued and read by the group that its route named when it was submitted; a switch
//! changes what later batches find, and nothing else. A group of shards that was started stays until the engine ends,
//! idle when nothing is routed to it: so a switch takes nothing away from under a batch, and the next one finds it
//! started (ADR 0010). Switches come one at a time. Groups are never ended.

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
    /// Of datasets without one of their own.
    pub(crate) common: BackendRoute,
    /// Of datasets with one of their own, by name, so that a dataset that is opened anew keeps it.
    pub(crate) own: Vec<(String, BackendRoute)>,
}

impl RoutingTable {
    pub(crate) fn of(&self, dataset: &str) -> &BackendRoute {
        let own = self.own.iter().find(|(name, _)| name == dataset);
        own.map_or(&self.common, |(_, route)| route)
    }

    /// The same with another route for a dataset; `None`: none of its own.
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
