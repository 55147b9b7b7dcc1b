//! Callers and their connections. A caller is a principal, from any number of addresses; for requests without
//! one it is the address of the connection, so all such clients behind one proxy are one caller. Limits,
//! shares and turns are per caller, and within a caller per connection, so that opening more connections
//! gains nothing. Connections themselves are counted by address, since they are accepted before any
//! credential is known.

use crate::access::{Grant, GrantInUse, Principal, PrincipalLimits, Revoke};
use crate::config::Limits;
use ringfetch_engine::dataset::IN_FLIGHT_DESCRIPTORS_MAX;
use ringfetch_engine::engine::Engine;
use ringfetch_engine::share::{Account, Budget, CallerAccount, CallerShare, Share};
use ringfetch_engine::sync::lock;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use tokio::sync::OwnedMutexGuard;

/// Hosts are assigned a network of this size (RFC 6177), so all addresses in it are one caller.
const IPV6_PREFIX_BITS: u32 = 64;

/// Identifies an address: an IPv4 address, or the /64 of an IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallerKey(IpAddr);

impl CallerKey {
    /// The key of this address. An IPv4-mapped IPv6 address counts as its IPv4 address.
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

/// Most objects that all requests together may hold open: each has two descriptors if it is read with direct
/// I/O.
const OBJECTS_HELD_MAX: u64 = IN_FLIGHT_DESCRIPTORS_MAX as u64 / 2;

/// Concurrent directory walks of all callers: a caller alone has at most three, two of them on one connection, and
/// leaves room for others.
pub(crate) const WALKS_MAX: u32 = 8;

/// What requests hold besides the engine's memory and queue, each with its budget and shares of it.
#[derive(Debug, Clone)]
pub struct PerResource<T> {
    /// Requests in flight.
    pub requests: T,
    /// Bytes of incomplete and decoded requests.
    pub request_memory: T,
    /// Objects that requests hold open.
    pub objects: T,
    /// Directory walks.
    pub walks: T,
}

impl<T> PerResource<T> {
    fn map<U>(&self, of: impl Fn(&T) -> U) -> PerResource<U> {
        PerResource {
            requests: of(&self.requests),
            request_memory: of(&self.request_memory),
            objects: of(&self.objects),
            walks: of(&self.walks),
        }
    }
}

/// All callers that are connected. Clones share them.
#[derive(Debug, Clone)]
pub struct Callers {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    engine: Engine,
    budgets: PerResource<Arc<Budget>>,
    known: Mutex<HashMap<CallerKey, Weak<Caller>>>,
    next_id: AtomicU64,
    address_ids: RandomState,
}

/// A caller: what it holds over all of its connections. Lives as long as any of them.
#[derive(Debug)]
pub struct Caller {
    /// `None`: the caller is a principal.
    key: Option<CallerKey>,
    engine: Arc<CallerAccount>,
    shares: PerResource<Arc<CallerShare>>,
    /// Locked while a long request of it is parsed, or next to be.
    parsing: Arc<tokio::sync::Mutex<()>>,
    callers: Weak<Inner>,
}

/// A caller's turn to have a long request parsed. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct ParsingTurn {
    _locked: OwnedMutexGuard<()>,
    /// Who connects again meanwhile is the same caller.
    _caller: Arc<Caller>,
}

/// A connection: what its requests hold. Every request has it in its extensions, in the form for the
/// request's principal.
#[derive(Debug)]
pub struct Connection {
    caller: Arc<Caller>,
    account: Arc<Account>,
    shares: PerResource<Arc<Share>>,
    address: CallerKey,
    memory_bytes: u64,
    is_from_this_host: bool,
    /// Names in its client's certificate, if that is verified and used for access control.
    certificate_names: OnceLock<Vec<String>>,
    /// The rights of its requests; `None`: everything that needs no principal.
    grant: Option<GrantInUse>,
    /// The forms of this connection for the principals that use it.
    forms: Mutex<Forms>,
}

/// A connection's forms.
#[derive(Debug, Default)]
struct Forms {
    /// For the last principal.
    latest: Option<Arc<Connection>>,
    /// For those before it whose requests are not finished.
    earlier: Vec<Weak<Connection>>,
}

impl Forms {
    /// The first form, the latest before others, for which this holds.
    fn find(&self, holds: impl Fn(&Connection) -> bool) -> Option<Arc<Connection>> {
        let earlier = self.earlier.iter().filter_map(Weak::upgrade);
        let mut all = self.latest.iter().cloned().chain(earlier);
        all.find(|form| holds(form))
    }

    fn set_latest(&mut self, form: &Arc<Connection>) {
        if let Some(before) = self.latest.replace(Arc::clone(form)) {
            self.earlier.push(Arc::downgrade(&before));
        }
        let latest = Arc::as_ptr(form);
        self.earlier
            .retain(|form| form.strong_count() > 0 && form.as_ptr() != latest);
    }
}

/// A connection's parts of what its caller may hold.
type ConnectionShares = (Arc<Account>, PerResource<Arc<Share>>);

impl Callers {
    /// No callers yet.
    pub fn new(engine: Engine, limits: &Limits) -> Self {
        Self {
            inner: Arc::new(Inner {
                engine,
                budgets: PerResource {
                    requests: Budget::new(limits.requests_in_flight.into()),
                    request_memory: Budget::new(limits.request_memory_bytes),
                    objects: Budget::new(OBJECTS_HELD_MAX),
                    walks: Budget::new(WALKS_MAX.into()),
                },
                known: Mutex::default(),
                next_id: AtomicU64::new(0),
                address_ids: RandomState::new(),
            }),
        }
    }

    /// Replaces the limits that callers share.
    pub fn set_limits(&self, limits: &Limits) {
        let budgets = &self.inner.budgets;
        budgets.requests.set_capacity(limits.requests_in_flight.into());
        budgets.request_memory.set_capacity(limits.request_memory_bytes);
    }

    /// A connection from `address`, which may hold at most `memory_bytes` of response memory.
    pub fn connect(&self, address: IpAddr, memory_bytes: u64) -> Arc<Connection> {
        let caller = self.caller(CallerKey::of(address));
        let (account, shares) = self.shares(&caller, memory_bytes);
        Arc::new(Connection {
            caller,
            account,
            shares,
            address: CallerKey::of(address),
            memory_bytes,
            is_from_this_host: address.to_canonical().is_loopback(),
            certificate_names: OnceLock::new(),
            grant: None,
            forms: Mutex::default(),
        })
    }

    /// What all callers together may hold.
    pub fn budgets(&self) -> &PerResource<Arc<Budget>> {
        &self.inner.budgets
    }

    fn caller(&self, key: CallerKey) -> Arc<Caller> {
        let mut known = lock(&self.inner.known);
        if let Some(caller) = known.get(&key).and_then(Weak::upgrade) {
            return caller;
        }
        let caller = self.new_caller(Some(key));
        known.insert(key, Arc::downgrade(&caller));
        caller
    }

    fn shares(&self, caller: &Caller, memory_bytes: u64) -> ConnectionShares {
        let account = caller.engine.connection(self.next_id(), memory_bytes);
        (account, caller.shares.map(|share| share.connection(u64::MAX)))
    }

    fn next_id(&self) -> u64 {
        self.inner.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn new_caller(&self, key: Option<CallerKey>) -> Arc<Caller> {
        let inner = &*self.inner;
        // An address that connects for each request stays one caller: as many, it would lose what a lone one gets, and
        // leave its debts behind. Apart from ids that count up, and even: all ones stand for nobody.
        let id = key.map_or_else(
            || self.next_id(),
            |key| (inner.address_ids.hash_one(key) & !1) | (1 << 63),
        );
        Arc::new(Caller {
            key,
            engine: inner.engine.caller_account(id),
            shares: inner.budgets.map(Budget::caller),
            parsing: Arc::default(),
            callers: Arc::downgrade(&self.inner),
        })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let (Some(key), Some(callers)) = (self.key, self.callers.upgrade()) else {
            return;
        };
        let mut known = lock(&callers.known);
        // The caller may have connected again meanwhile.
        if known.get(&key).is_some_and(|caller| caller.strong_count() == 0) {
            known.remove(&key);
        }
    }
}

impl Caller {
    /// Applies limits to what it holds at once, and its weight to later reads.
    pub(crate) fn set_limits(&self, limits: PrincipalLimits) {
        self.shares.requests.set_most(limits.requests);
        self.engine.memory().set_most(limits.memory_bytes);
        self.engine.set_weight(limits.weight);
    }

    pub(crate) fn requests_in_flight(&self) -> u64 {
        self.shares.requests.held()
    }

    /// Bytes of response memory that it holds.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.engine.memory().held()
    }
}

impl Connection {
    /// The connection of a request, from its extensions.
    pub(crate) fn of(extensions: &http::Extensions) -> Option<Arc<Self>> {
        extensions.get().cloned()
    }

    /// The address that it comes from.
    pub fn address(&self) -> CallerKey {
        self.address
    }

    /// Its account with the engine.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// What its requests hold, besides that.
    pub fn shares(&self) -> &PerResource<Arc<Share>> {
        &self.shares
    }

    /// Bytes of its incomplete and decoded requests.
    pub fn request_memory(&self) -> &Arc<Share> {
        &self.shares.request_memory
    }

    /// Waits until its caller may have a long request parsed: one at a time, in the order of arrival.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn parsing_turn(&self) -> ParsingTurn {
        ParsingTurn {
            _locked: Arc::clone(&self.caller.parsing).lock_owned().await,
            _caller: Arc::clone(&self.caller),
        }
    }

    /// Whether its client is on this host.
    pub(crate) fn is_from_this_host(&self) -> bool {
        self.is_from_this_host
    }

    /// Its client's names, from a verified certificate.
    pub(crate) fn certificate_names(&self) -> &[String] {
        self.certificate_names.get().map_or(&[], Vec::as_slice)
    }

    /// Sets those names, once.
    pub(crate) fn identify(&self, names: Vec<String>) {
        let _only_once = self.certificate_names.set(names);
    }

    /// This connection for requests with this grant. Revoking the grant closes it; `None` if the grant is
    /// already revoked.
    pub(crate) fn granted<C: Revoke + 'static>(
        &self,
        grant: &Arc<Grant>,
        closing: &Arc<C>,
    ) -> Option<Arc<Self>> {
        let is_granted = |form: &Self| form.grant.as_ref().is_some_and(|in_use| in_use.is_of(grant));
        let mut forms = lock(&self.forms);
        if let Some(latest) = forms.latest.as_ref().filter(|latest| is_granted(latest)) {
            return Some(Arc::clone(latest));
        }
        if let Some(form) = forms.find(is_granted) {
            forms.set_latest(&form);
            return Some(form);
        }
        // Exists until the daemon ends. Only a weak reference is kept, since the engine's threads may drop
        // what is held here.
        let callers = Callers {
            inner: self.caller.callers.upgrade()?,
        };
        let in_use = GrantInUse::new(grant, closing)?;
        let caller = grant.principal.caller(|| callers.new_caller(None));
        // Shared with other credentials of the same principal, so that the limits cover both.
        let same = forms.find(|form| Arc::ptr_eq(&form.caller, &caller));
        let (account, shares) = same.map_or_else(
            || callers.shares(&caller, self.memory_bytes),
            |same| (Arc::clone(&same.account), same.shares.clone()),
        );
        let granted = Arc::new(Self {
            caller,
            account,
            shares,
            address: self.address,
            memory_bytes: self.memory_bytes,
            is_from_this_host: self.is_from_this_host,
            certificate_names: OnceLock::new(),
            grant: Some(in_use),
            forms: Mutex::default(),
        });
        forms.set_latest(&granted);
        Some(granted)
    }

    /// The principal of its requests; `None` without a credential.
    pub(crate) fn principal(&self) -> Option<&Arc<Principal>> {
        self.grant.as_ref().map(GrantInUse::principal)
    }

    /// Whether its requests may read a dataset of this name, whether it exists or not.
    pub(crate) fn may_read(&self, dataset: &str) -> bool {
        self.grant.as_ref().is_none_or(|grant| grant.may_read(dataset))
    }

    /// Whether the line of the principals file that admitted its requests was removed or changed.
    pub(crate) fn is_revoked(&self) -> bool {
        self.grant.as_ref().is_some_and(GrantInUse::is_revoked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::tests::User;
    use crate::fetch::tests::without_datasets;
    use ringfetch_engine::share::Refused;

    #[test]
    fn an_address_that_connects_again_is_the_same_caller() {
        // Scenario: an address whose only connection ends, then another one from it, and one from another address.
        // Expectation: reads of the first two are of one caller for the turns, which know callers by id.
        let fetcher = without_datasets(Limits::default());
        let caller = |address: &str| {
            let connection = fetcher.callers().connect(address.parse().unwrap(), 64 << 20);
            connection.account().caller()
        };
        let first = caller("192.0.2.1");
        assert_eq!(caller("192.0.2.1"), first);
        assert_ne!(caller("192.0.2.2"), first);
    }

    #[test]
    fn a_principal_is_one_caller_from_every_address_and_within_its_limits() {
        // Scenario: a principal with two tokens and a limit of 3 requests and 64 KiB, on connections from two
        // addresses, with both tokens on one of them; another principal and an anonymous client on the same
        // connections. Expectation: three requests and 64 KiB in total, whichever connection and token they
        // use; the others are not affected; a changed limit applies at once.
        let fetcher = without_datasets(Limits::default());
        let callers = fetcher.callers();
        let connections = ["192.0.2.1", "192.0.2.1", "192.0.2.2"]
            .map(|address| callers.connect(address.parse().unwrap(), 64 << 20));
        let principal = Principal::new("greedy");
        principal.set_limits(PrincipalLimits {
            requests: 3,
            memory_bytes: 64 << 10,
            ..PrincipalLimits::NONE
        });
        let grants = [Grant::for_tests(&principal, 1), Grant::for_tests(&principal, 2)];
        let other = Grant::for_tests(&Principal::new("other"), 3);
        let granted = |connection: &Arc<Connection>, grant: &Arc<Grant>| {
            connection.granted(grant, &Arc::new(User::default())).unwrap()
        };
        let take = |grant: &Arc<Grant>| -> Vec<_> {
            let ask = |connection| granted(connection, grant).shares.requests.charge(1).ok();
            connections.iter().filter_map(ask).collect()
        };
        let mut held = take(&grants[0]);
        held.extend(take(&grants[1]));
        assert_eq!((held.len(), principal.held().0), (3, 3));
        assert_eq!(take(&other).len(), 3);
        assert!(
            connections
                .iter()
                .all(|own| own.shares.requests.charge(1).is_ok())
        );
        let memory = |connection: usize, bytes| {
            let connection = granted(&connections[connection], &grants[connection % 2]);
            connection.account().memory().charge(bytes)
        };
        let most = memory(0, 64 << 10).unwrap();
        assert_eq!(memory(2, 4096).unwrap_err(), Refused::CallerLimit);
        assert_eq!(principal.held().1, 64 << 10);
        assert_eq!(granted(&connections[2], &grants[1]).account().weight().get(), 1);
        principal.set_limits(PrincipalLimits {
            requests: 4,
            memory_bytes: 128 << 10,
            weight: 7,
            ..PrincipalLimits::NONE
        });
        assert!(memory(2, 4096).is_ok());
        assert_eq!(granted(&connections[0], &grants[0]).account().weight().get(), 7);
        assert_eq!(take(&grants[0]).len(), 1);
        drop((held, most));
        assert_eq!(principal.held(), (0, 0));
    }

    #[test]
    fn a_connection_of_several_principals_holds_one_share_for_each() {
        // Scenario: two principals take turns on a connection that may hold 64 KiB, 4 KiB at a time, and hold what
        // they get. Expectation: 64 KiB each; once one has let go of it, that one may hold as much again.
        let fetcher = without_datasets(Limits::default());
        let connection = fetcher.callers().connect("192.0.2.1".parse().unwrap(), 64 << 10);
        let grants = [1, 2].map(|token| Grant::for_tests(&Principal::new(&token.to_string()), token));
        let take = |grant| {
            let form = connection.granted(grant, &Arc::new(User::default())).unwrap();
            let charge = form.account().memory().charge(4096).ok()?;
            Some((form, charge))
        };
        let mut held: [Vec<_>; 2] = Default::default();
        for _ in 0..40 {
            for (grant, held) in grants.iter().zip(&mut held) {
                held.extend(take(grant));
            }
        }
        assert_eq!(held.each_ref().map(Vec::len), [16, 16]);
        held[0].clear();
        let again: Vec<_> = (0..40).filter_map(|_| take(&grants[0])).collect();
        assert_eq!(again.len(), 16);
    }

    #[test]
    fn addresses_of_one_host_are_one_caller() {
        // Two addresses in one /64, and an IPv4 address in both forms, are one caller each; other networks
        // are not.
        let key = |address: &str| CallerKey::of(address.parse().unwrap());
        assert_eq!(key("2001:db8:1:2::3"), key("2001:db8:1:2:ffff::"));
        assert_ne!(key("2001:db8:1:2::3"), key("2001:db8:1:3::3"));
        assert_eq!(key("::ffff:192.0.2.7"), key("192.0.2.7"));
        assert_ne!(key("192.0.2.7"), key("192.0.2.8"));
        assert_eq!(key("2001:db8:1:2::3").to_string(), "2001:db8:1:2::/64");
        assert_eq!(key("::ffff:192.0.2.7").to_string(), "192.0.2.7");
    }
}
