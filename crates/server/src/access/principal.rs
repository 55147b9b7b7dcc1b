//! A principal: what all of its credentials and connections share.

use crate::caller::Caller;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most that a principal may hold at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrincipalLimits {
    pub(crate) requests: u64,
    pub(crate) memory_bytes: u64,
}

impl PrincipalLimits {
    /// No limits but those of every caller.
    pub(super) const NONE: Self = Self {
        requests: u64::MAX,
        memory_bytes: u64::MAX,
    };
}

/// Who a credential stands for.
#[derive(Debug)]
pub(crate) struct Principal {
    name: String,
    requests: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limits: PrincipalLimits,
    /// From its first request on.
    caller: Option<Arc<Caller>>,
}

impl Principal {
    pub(crate) fn new(name: &str) -> Arc<Self> {
        let state = State {
            limits: PrincipalLimits::NONE,
            caller: None,
        };
        Arc::new(Self {
            name: name.to_owned(),
            requests: AtomicU64::new(0),
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Bounds what it holds, also by requests in flight.
    pub(crate) fn set_limits(&self, limits: PrincipalLimits) {
        let mut state = self.state();
        state.limits = limits;
        if let Some(caller) = &state.caller {
            caller.set_limits(limits);
        }
    }

    /// The caller that it is on all connections.
    pub(crate) fn caller(&self, make: impl FnOnce() -> Arc<Caller>) -> Arc<Caller> {
        let mut state = self.state();
        let limits = state.limits;
        let caller = state.caller.get_or_insert_with(|| {
            let caller = make();
            caller.set_limits(limits);
            caller
        });
        Arc::clone(caller)
    }

    pub(super) fn count_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Requests in flight, and bytes of response memory.
    pub(crate) fn held(&self) -> (u64, u64) {
        let held = |caller: &Arc<Caller>| (caller.requests_in_flight(), caller.memory_bytes());
        self.state().caller.as_ref().map_or((0, 0), held)
    }
}
