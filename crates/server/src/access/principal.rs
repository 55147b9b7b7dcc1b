//! A principal: what all of its credentials and connections share.

use crate::caller::Caller;
use crate::fetch::Rejection;
use crate::rate::{OverRate, Rate, UNLIMITED};
use ringfetch_engine::sync::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What a principal may hold at a time and request per second, and its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PrincipalLimits {
    pub(crate) requests: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) requests_per_s: u64,
    pub(crate) bytes_per_s: u64,
    /// Its share of the disk, relative to callers of weight 1.
    pub(crate) weight: u32,
}

impl PrincipalLimits {
    /// No limits except those of every caller.
    pub(crate) const NONE: Self = Self {
        requests: u64::MAX,
        memory_bytes: u64::MAX,
        requests_per_s: UNLIMITED,
        bytes_per_s: UNLIMITED,
        weight: 1,
    };
}

/// Who a credential belongs to.
#[derive(Debug)]
pub(crate) struct Principal {
    name: String,
    requests: AtomicU64,
    bytes: AtomicU64,
    rejected: [AtomicU64; Rejection::COUNT],
    request_rate: Rate,
    byte_rate: Rate,
    state: Mutex<State>,
    /// Held by the one later part of a response that waits for the rate of bytes.
    waiting_window: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State {
    limits: PrincipalLimits,
    /// Set at its first request.
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
            bytes: AtomicU64::new(0),
            rejected: std::array::from_fn(|_| AtomicU64::new(0)),
            request_rate: Rate::unlimited(),
            byte_rate: Rate::unlimited(),
            state: Mutex::new(state),
            waiting_window: tokio::sync::Mutex::new(()),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Applies limits to what it holds and has in flight, and to its rates.
    pub(crate) fn set_limits(&self, limits: PrincipalLimits) {
        let mut state = self.state();
        state.limits = limits;
        self.request_rate.set(limits.requests_per_s);
        self.byte_rate.set(limits.bytes_per_s);
        if let Some(caller) = &state.caller {
            caller.set_limits(limits);
        }
    }

    /// The one caller that it is on all its connections.
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

    pub(crate) fn count_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn count_rejection(&self, reason: Rejection) {
        if let Some(counter) = self.rejected.get(reason as usize) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn rejected(&self, reason: Rejection) -> u64 {
        let counter = self.rejected.get(reason as usize);
        counter.map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    /// Charges a request to its rate.
    ///
    /// # Errors
    /// It has made as many as it may.
    pub(crate) fn take_request(&self) -> Result<(), OverRate> {
        self.request_rate.take(1)
    }

    /// Charges the bytes of a response to its rate, which may exceed what is left.
    ///
    /// # Errors
    /// Nothing is left.
    pub(crate) fn take_bytes(&self, bytes: u64) -> Result<(), OverRate> {
        self.byte_rate.take_any(bytes)
    }

    /// Returns the charge for a response that is not read.
    pub(crate) fn give_back_bytes(&self, bytes: u64) {
        self.byte_rate.give_back(bytes);
    }

    /// Its limit of bytes per second.
    pub(crate) fn bytes_per_s(&self) -> u64 {
        self.byte_rate.per_s()
    }

    /// Whether it has a limit of bytes per second.
    pub(crate) fn is_byte_rate_limited(&self) -> bool {
        self.bytes_per_s() != UNLIMITED
    }

    /// Waits until no other later part of a response waits for the rate of bytes, first come, first served. Only in a task
    /// of its own: the turn goes to who waited longest, polled or not.
    pub(crate) async fn window_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.waiting_window.lock().await
    }

    /// Charges the bytes of a later part of a response if other requests have had `room` to come first.
    ///
    /// # Errors
    /// They have not.
    pub(crate) fn take_bytes_after_others(&self, bytes: u64, room: Duration) -> Result<(), OverRate> {
        self.byte_rate.take_after_others(bytes, room)
    }

    /// Charges the bytes of a later part of a response, and returns how long that part has to wait.
    pub(crate) fn reserve_bytes(&self, bytes: u64) -> Duration {
        self.byte_rate.reserve(bytes)
    }

    /// Requests in flight, and bytes of response memory.
    pub(crate) fn held(&self) -> (u64, u64) {
        let held = |caller: &Arc<Caller>| (caller.requests_in_flight(), caller.memory_bytes());
        self.state().caller.as_ref().map_or((0, 0), held)
    }
}
