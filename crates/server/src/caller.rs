//! Callers and their connections. A caller is the address that a connection comes from, whoever it says it is. Limits, shares and turns are per caller, and within a caller per connection, so that opening more
//! connections gains nothing. Behind one proxy all users are one caller.

use crate::access::{Grant, GrantInUse, Revoke};
use crate::config::Limits;
use ringfetch_engine::dataset::IN_FLIGHT_DESCRIPTORS_MAX;
use ringfetch_engine::engine::Engine;
use ringfetch_engine::share::{Account, Budget, CallerAccount, CallerShare, Share};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Hosts get a network of this size (RFC 6177), so its addresses are one caller.
const IPV6_PREFIX_BITS: u32 = 64;

/// Identifies a caller: an IPv4 address, or the /64 of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallerKey(IpAddr);

impl CallerKey {
    /// The caller that connects from this address. An IPv4 address mapped into IPv6 is that IPv4 address.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = address.to_bits() >> (128 - IPV6_PREFIX_BITS) << (128 - IPV6_PREFIX_BITS);
                Self(IpAddr::V6(Ipv6Addr::from_bits(network)))
            }
            v4 @ IpAddr::V4(_) => Self(v4),
        }
    }
}

impl std::fmt::Display for CallerKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V4(address) => write!(f, "{address}"),
            IpAddr::V6(network) => write!(f, "{network}/{IPV6_PREFIX_BITS}"),
        }
    }
}

/// Objects that all requests together may hold open: each has two descriptors if it is read with direct I/O.
const OBJECTS_HELD_MAX: u64 = IN_FLIGHT_DESCRIPTORS_MAX as u64 / 2;

/// All callers that are connected. Clones share them.
#[derive(Debug, Clone)]
pub struct Callers {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    engine: Engine,
    requests: Arc<Budget>,
    request_memory: Arc<Budget>,
    objects: Arc<Budget>,
    known: Mutex<HashMap<CallerKey, Weak<Caller>>>,
    next_id: AtomicU64,
}

/// A caller: what it holds over all of its connections. Lives as long as one of them.
#[derive(Debug)]
pub struct Caller {
    key: CallerKey,
    engine: Arc<CallerAccount>,
    requests: Arc<CallerShare>,
    request_memory: Arc<CallerShare>,
    objects: Arc<CallerShare>,
    callers: Weak<Inner>,
}

/// A connection: what its requests hold. Every request has it in its extensions, as its principal may use it.
#[derive(Debug)]
pub struct Connection {
    caller: Arc<Caller>,
    account: Arc<Account>,
    requests: Arc<Share>,
    request_memory: Arc<Share>,
    objects: Arc<Share>,
    is_from_this_host: bool,
    /// Names in its client's certificate, if that was verified and counts.
    certificate_names: OnceLock<Vec<String>>,
    /// What its requests may do; `None`: anything that needs no principal.
    grant: Option<GrantInUse>,
    /// This connection as the last principal on it uses it.
    latest: Mutex<Option<Arc<Self>>>,
}

impl Callers {
    /// No callers yet.
    pub fn new(engine: Engine, limits: &Limits) -> Self {
        Self {
            inner: Arc::new(Inner {
                engine,
                requests: Budget::new(limits.requests_in_flight.into()),
                request_memory: Budget::new(limits.request_memory_bytes),
                objects: Budget::new(OBJECTS_HELD_MAX),
                known: Mutex::default(),
                next_id: AtomicU64::new(0),
            }),
        }
    }

    /// Replaces the limits that callers share.
    pub fn set_limits(&self, limits: &Limits) {
        self.inner.requests.set_capacity(limits.requests_in_flight.into());
        self.inner
            .request_memory
            .set_capacity(limits.request_memory_bytes);
    }

    /// A connection from `address`, which may hold at most `memory_bytes` of response memory.
    pub fn connect(&self, address: IpAddr, memory_bytes: u64) -> Arc<Connection> {
        let caller = self.caller(CallerKey::of(address));
        let id = self.inner.next_id.fetch_add(1, Ordering::Relaxed);
        Arc::new(Connection {
            account: caller.engine.connection(id, memory_bytes),
            requests: caller.requests.connection(u64::MAX),
            request_memory: caller.request_memory.connection(u64::MAX),
            objects: caller.objects.connection(u64::MAX),
            caller,
            is_from_this_host: address.to_canonical().is_loopback(),
            certificate_names: OnceLock::new(),
            grant: None,
            latest: Mutex::default(),
        })
    }

    /// Requests in flight of all callers.
    pub fn requests(&self) -> &Arc<Budget> {
        &self.inner.requests
    }

    /// Bytes of all callers' unfinished and decoded requests.
    pub fn request_memory(&self) -> &Arc<Budget> {
        &self.inner.request_memory
    }

    /// Objects that all callers' requests hold open.
    pub fn objects(&self) -> &Arc<Budget> {
        &self.inner.objects
    }

    fn caller(&self, key: CallerKey) -> Arc<Caller> {
        let inner = &*self.inner;
        let mut known = inner.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(caller) = known.get(&key).and_then(Weak::upgrade) {
            return caller;
        }
        let id = inner.next_id.fetch_add(1, Ordering::Relaxed);
        let caller = Arc::new(Caller {
            key,
            engine: inner.engine.caller_account(id),
            requests: inner.requests.caller(),
            request_memory: inner.request_memory.caller(),
            objects: inner.objects.caller(),
            callers: Arc::downgrade(&self.inner),
        });
        known.insert(key, Arc::downgrade(&caller));
        caller
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let Some(callers) = self.callers.upgrade() else {
            return;
        };
        let mut known = callers.known.lock().unwrap_or_else(PoisonError::into_inner);
        // The caller may have connected again.
        if known
            .get(&self.key)
            .is_some_and(|caller| caller.strong_count() == 0)
        {
            known.remove(&self.key);
        }
    }
}

impl Caller {
    /// Its key.
    pub fn key(&self) -> CallerKey {
        self.key
    }
}

impl Connection {
    /// Its caller.
    pub fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }

    /// Its account with the engine.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Its requests in flight.
    pub fn requests(&self) -> &Arc<Share> {
        &self.requests
    }

    /// Bytes of its unfinished and decoded requests.
    pub fn request_memory(&self) -> &Arc<Share> {
        &self.request_memory
    }

    /// Objects that its requests hold open.
    pub fn objects(&self) -> &Arc<Share> {
        &self.objects
    }

    /// Whether its client is on this host.
    pub(crate) fn is_from_this_host(&self) -> bool {
        self.is_from_this_host
    }

    /// Names that its client is known by, from a verified certificate.
    pub(crate) fn certificate_names(&self) -> &[String] {
        self.certificate_names.get().map_or(&[], Vec::as_slice)
    }

    /// Sets those names, once.
    pub(crate) fn identify(&self, names: Vec<String>) {
        let _only_once = self.certificate_names.set(names);
    }

    /// This connection for requests with this grant, which closes it when it is revoked. `None`: it is revoked.
    pub(crate) fn granted<C: Revoke + 'static>(
        &self,
        grant: &Arc<Grant>,
        closing: &Arc<C>,
    ) -> Option<Arc<Self>> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(latest) = &*latest
            && latest.grant.as_ref().is_some_and(|in_use| in_use.is_of(grant))
        {
            return Some(Arc::clone(latest));
        }
        let granted = Arc::new(Self {
            caller: Arc::clone(&self.caller),
            account: Arc::clone(&self.account),
            requests: Arc::clone(&self.requests),
            request_memory: Arc::clone(&self.request_memory),
            objects: Arc::clone(&self.objects),
            is_from_this_host: self.is_from_this_host,
            certificate_names: OnceLock::new(),
            grant: Some(GrantInUse::new(grant, closing)?),
            latest: Mutex::default(),
        });
        *latest = Some(Arc::clone(&granted));
        Some(granted)
    }

    /// Whether its requests may read a dataset of this name, whether there is one or not.
    pub(crate) fn may_read(&self, dataset: &str) -> bool {
        self.grant.as_ref().is_none_or(|grant| grant.may_read(dataset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_host_are_one_caller() {
        // Two addresses of one /64, a mapped IPv4 address and its own form are one caller each; other networks are not.
        let key = |address: &str| CallerKey::of(address.parse().unwrap());
        assert_eq!(key("2001:db8:1:2::3"), key("2001:db8:1:2:ffff::"));
        assert_ne!(key("2001:db8:1:2::3"), key("2001:db8:1:3::3"));
        assert_eq!(key("::ffff:192.0.2.7"), key("192.0.2.7"));
        assert_ne!(key("192.0.2.7"), key("192.0.2.8"));
        assert_eq!(key("2001:db8:1:2::3").to_string(), "2001:db8:1:2::/64");
        assert_eq!(key("::ffff:192.0.2.7").to_string(), "192.0.2.7");
    }
}
