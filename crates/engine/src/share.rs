//! Fair shares of a limited resource: response memory, queued reads, requests in flight.
//!
//! A [`Budget`] is the resource. A caller holds a [`CallerShare`] of it, each of its connections a [`Share`].
//! Nothing is reserved in advance; the limits depend on what is free at the moment (dynamic thresholds:
//! Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998):
//!
//! - a caller may hold at most half of what is free: alone a third of the budget, with two others a fifth
//!   each;
//! - a connection that already holds some may hold, in all, at most what its caller may still take;
//! - within its fixed limits a connection may always hold 1/64 of what is free, so that one that holds little
//!   is served while others of the same caller hold all they may.
//!
//! So no number of holders uses up a budget, and shares need no configuration. Charges race without a lock:
//! two granted at the same moment may exceed a threshold by one of them, but never the budget.

use crate::buffer::PAGE_BYTES;
use crate::error::{ResponseBound, ResponseMax};
use std::cmp::Ordering;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A connection may always hold this part of what is free.
const RESERVE_DIVISOR: u64 = 64;

/// Why a charge is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The budget is used up.
    Budget,
    /// The caller holds all it may.
    Caller,
    /// The caller has used its own limit: see [`CallerShare::set_most`].
    CallerLimit,
    /// The connection holds all it may.
    Connection,
}

/// A limited resource that callers share.
#[derive(Debug)]
pub struct Budget {
    capacity: AtomicU64,
    used: AtomicU64,
}

/// What one caller holds of a budget, over all of its connections.
#[derive(Debug)]
pub struct CallerShare {
    budget: Arc<Budget>,
    held: AtomicU64,
    /// The most it may hold.
    most: AtomicU64,
}

/// What one connection holds of a budget.
#[derive(Debug)]
pub struct Share {
    caller: Arc<CallerShare>,
    /// The most it may ever hold.
    limit: u64,
    held: AtomicU64,
}

/// An amount charged to a budget until this is dropped.
#[derive(Debug)]
pub struct Charge {
    of: Holder,
    amount: u64,
}

/// The account of a charge.
#[derive(Debug, Clone)]
enum Holder {
    Nobody(Arc<Budget>),
    Connection(Arc<Share>),
}

impl Budget {
    /// A budget of this size.
    pub fn new(capacity: u64) -> Arc<Self> {
        Arc::new(Self {
            capacity: AtomicU64::new(capacity),
            used: AtomicU64::new(0),
        })
    }

    /// Its size.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Relaxed)
    }

    /// Changes its size. If more than that is held, nothing is granted until enough is returned.
    pub fn set_capacity(&self, capacity: u64) {
        self.capacity.store(capacity, Relaxed);
    }

    /// How much is held now.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// The share of a new caller.
    pub fn caller(self: &Arc<Self>) -> Arc<CallerShare> {
        Arc::new(CallerShare {
            budget: Arc::clone(self),
            held: AtomicU64::new(0),
            most: AtomicU64::new(u64::MAX),
        })
    }

    /// Charges `amount` without an account.
    ///
    /// # Errors
    /// `Refused::Budget`.
    pub fn charge(self: &Arc<Self>, amount: u64) -> Result<Charge, Refused> {
        self.take(amount)?;
        Ok(Charge {
            of: Holder::Nobody(Arc::clone(self)),
            amount,
        })
    }

    /// Takes `amount`, which [`Self::give_back`] returns.
    ///
    /// # Errors
    /// `Refused::Budget`.
    pub(crate) fn take(&self, amount: u64) -> Result<(), Refused> {
        let capacity = self.capacity();
        let fits = |used: u64| used.checked_add(amount).is_some_and(|used| used <= capacity);
        // What cannot fit is not added, so that nobody else is refused meanwhile. Then one addition, which does not fail under
        // contention as a compare-and-swap does.
        if fits(self.used.load(Relaxed)) {
            if fits(self.used.fetch_add(amount, Relaxed)) {
                return Ok(());
            }
            self.used.fetch_sub(amount, Relaxed);
        }
        Err(Refused::Budget)
    }

    pub(crate) fn give_back(&self, amount: u64) {
        self.used.fetch_sub(amount, Relaxed);
    }
}

impl CallerShare {
    /// The share of a new connection, with at most `limit`.
    pub fn connection(self: &Arc<Self>, limit: u64) -> Arc<Share> {
        Arc::new(Share {
            caller: Arc::clone(self),
            limit,
            held: AtomicU64::new(0),
        })
    }

    /// How much the caller holds now.
    pub fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }

    /// Limits what the caller may hold, however much is free. If it holds more, nothing is granted until
    /// enough is returned.
    pub fn set_most(&self, most: u64) {
        self.most.store(most, Relaxed);
    }

    fn most(&self) -> u64 {
        self.most.load(Relaxed)
    }
}

impl Share {
    /// How much the connection holds now.
    pub fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }

    /// The most it may ever hold, if nothing else is held.
    pub fn most(&self) -> u64 {
        let caller = &*self.caller;
        self.limit.min(caller.budget.capacity() / 2).min(caller.most())
    }

    /// Whether `amount` would be granted now.
    ///
    /// # Errors
    /// Which limit refuses it.
    pub fn grants(&self, amount: u64) -> Result<(), Refused> {
        let budget = &*self.caller.budget;
        let free = budget.capacity().saturating_sub(budget.used());
        if amount > free {
            return Err(Refused::Budget);
        }
        let held = self.held().saturating_add(amount);
        if held > self.limit {
            return Err(Refused::Connection);
        }
        let callers = self.caller.held();
        if callers.saturating_add(amount) > self.caller.most() {
            return Err(Refused::CallerLimit);
        }
        if held <= free / RESERVE_DIVISOR {
            return Ok(());
        }
        let most = free / 2;
        if callers.saturating_add(amount) > most {
            Err(Refused::Caller)
        } else if held > most.saturating_sub(callers) {
            Err(Refused::Connection)
        } else {
            Ok(())
        }
    }

    /// Charges `amount`.
    ///
    /// # Errors
    /// Which limit refuses it.
    pub fn charge(self: &Arc<Self>, amount: u64) -> Result<Charge, Refused> {
        self.take(amount)?;
        Ok(Charge {
            of: Holder::Connection(Arc::clone(self)),
            amount,
        })
    }

    fn take(&self, amount: u64) -> Result<(), Refused> {
        self.grants(amount)?;
        self.caller.budget.take(amount)?;
        self.caller.held.fetch_add(amount, Relaxed);
        self.held.fetch_add(amount, Relaxed);
        Ok(())
    }
}

impl Charge {
    /// How much it holds.
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Adds `more` to the charge.
    ///
    /// # Errors
    /// Which limit refuses it; the charge is unchanged.
    pub fn grow(&mut self, more: u64) -> Result<(), Refused> {
        match &self.of {
            Holder::Connection(share) => share.take(more)?,
            Holder::Nobody(budget) => budget.take(more)?,
        }
        self.amount += more;
        Ok(())
    }

    /// Changes the charge to `amount`. An increase is judged as a charge of its own: beside what the charge
    /// holds already, it might be refused although it would be granted to a holder of nothing.
    ///
    /// # Errors
    /// It is an increase that a limit refuses; the charge is empty then.
    pub fn resize(&mut self, amount: u64) -> Result<(), Refused> {
        match amount.cmp(&self.amount) {
            // Always granted, even to a holder of its whole share.
            Ordering::Equal => Ok(()),
            Ordering::Greater => {
                self.give_back(self.amount);
                self.amount = 0;
                self.grow(amount)
            }
            Ordering::Less => {
                self.give_back(self.amount - amount);
                self.amount = amount;
                Ok(())
            }
        }
    }

    /// Splits the charge: the first part has `amount` (or all there is).
    pub fn split(mut self, amount: u64) -> (Self, Self) {
        let amount = amount.min(self.amount);
        self.amount -= amount;
        let first = Self {
            of: self.of.clone(),
            amount,
        };
        (first, self)
    }
}

impl Charge {
    fn give_back(&self, amount: u64) {
        let budget = match &self.of {
            Holder::Nobody(budget) => budget,
            Holder::Connection(share) => {
                share.held.fetch_sub(amount, Relaxed);
                share.caller.held.fetch_sub(amount, Relaxed);
                &share.caller.budget
            }
        };
        budget.give_back(amount);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.give_back(self.amount);
    }
}

/// The weight of a caller, as it is now. Clones share it.
#[derive(Debug, Clone)]
pub struct Weight(Arc<AtomicU32>);

impl Weight {
    /// At least 1.
    pub fn new(weight: u32) -> Self {
        Self(Arc::new(AtomicU32::new(weight.max(1))))
    }

    /// At least 1.
    pub fn set(&self, weight: u32) {
        self.0.store(weight.max(1), Relaxed);
    }

    /// A load.
    pub fn get(&self) -> u32 {
        self.0.load(Relaxed)
    }
}

/// What one caller holds of the engine: response memory in bytes, and unanswered reads; and its weight for
/// reads.
#[derive(Debug)]
pub struct CallerAccount {
    id: u64,
    weight: Weight,
    memory: Arc<CallerShare>,
    reads: Arc<CallerShare>,
}

/// What one connection of a caller holds of the engine. Reads take turns over callers, and within a caller over its
/// connections.
#[derive(Debug)]
pub struct Account {
    caller: u64,
    id: u64,
    weight: Weight,
    memory: Arc<Share>,
    reads: Arc<Share>,
}

impl CallerAccount {
    /// `id` distinguishes callers.
    pub(crate) fn new(id: u64, memory: &Arc<Budget>, reads: &Arc<Budget>) -> Arc<Self> {
        Arc::new(Self {
            id,
            weight: Weight::new(1),
            memory: memory.caller(),
            reads: reads.caller(),
        })
    }

    /// Sets the weight of its later reads: while others wait, it gets `weight` times what a caller of weight
    /// 1 gets of the disk; at least 1.
    pub fn set_weight(&self, weight: u32) {
        self.weight.set(weight);
    }

    /// Response memory, bytes.
    pub fn memory(&self) -> &Arc<CallerShare> {
        &self.memory
    }

    /// The account of one connection; `id` distinguishes the caller's connections. It may hold at most
    /// `memory_bytes` of response memory.
    pub fn connection(&self, id: u64, memory_bytes: u64) -> Arc<Account> {
        Arc::new(Account {
            caller: self.id,
            id,
            weight: self.weight.clone(),
            memory: self.memory.connection(memory_bytes),
            reads: self.reads.connection(u64::MAX),
        })
    }
}

impl Account {
    /// The longest response that its memory can ever hold.
    pub fn response_max(&self) -> ResponseMax {
        let most = self.memory.most();
        ResponseMax {
            bytes: most / PAGE_BYTES * PAGE_BYTES,
            bound: if self.memory.caller.most() <= most {
                ResponseBound::Principal
            } else {
                ResponseBound::Connection
            },
        }
    }

    /// Id of its caller.
    pub fn caller(&self) -> u64 {
        self.caller
    }

    /// Weight of its caller.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// Its id among the connections of the caller.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Response memory, bytes.
    pub fn memory(&self) -> &Arc<Share> {
        &self.memory
    }

    /// Reads accepted and not answered.
    pub fn reads(&self) -> &Arc<Share> {
        &self.reads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Takes pieces of `amount` until one is refused.
    fn fill(share: &Arc<Share>, amount: u64) -> (Vec<Charge>, Refused) {
        let mut held = Vec::new();
        loop {
            match share.charge(amount) {
                Ok(charge) => held.push(charge),
                Err(refused) => return (held, refused),
            }
        }
    }

    #[test]
    fn what_is_refused_has_nobody_else_refused() {
        // Scenario: one thread takes a whole budget and returns it, again and again, while another one asks for more than there is.
        // Expectation: the former gets it each time.
        let budget = Budget::new(100);
        let (is_on, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let refused = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    assert!(budget.charge(101).is_err());
                    is_on.store(true, Relaxed);
                }
            });
            while !is_on.load(Relaxed) {
                std::thread::yield_now();
            }
            let refused = (0..1_000_000).filter(|_| budget.charge(100).is_err()).count();
            is_over.store(true, Relaxed);
            refused
        });
        assert_eq!((refused, budget.used()), (0, 0));
    }

    #[test]
    fn a_caller_alone_holds_a_third_and_leaves_room_for_others() {
        // 300 in all, charges of 1, greedy callers with eight connections each: the first stops at a third
        // plus what its connections may always hold, the next ones at the same fraction of the rest, and a
        // newcomer is served after all of them.
        let budget = Budget::new(300);
        let mut held = Vec::new();
        let mut free = 300;
        for _ in 0..4 {
            let caller = budget.caller();
            let connections: Vec<_> = (0..8).map(|_| caller.connection(u64::MAX)).collect();
            for connection in &connections {
                held.extend(fill(connection, 1).0);
            }
            assert!(
                caller.held() >= free / 4 && caller.held() <= free / 2,
                "{} of {free}",
                caller.held()
            );
            free -= caller.held();
        }
        assert!(budget.caller().connection(u64::MAX).charge(10).is_ok());
        drop(held);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_connection_that_holds_little_is_served_beside_greedy_ones_of_its_caller() {
        // 256 MiB; 1,000 connections of one caller take 1 MiB at a time as long as they can. Another
        // connection of the same caller still gets blocks, and one of another caller a response of 16 MiB.
        let mib = 1 << 20;
        let budget = Budget::new(256 * mib);
        let caller = budget.caller();
        let greedy: Vec<_> = (0..1000).map(|_| caller.connection(64 * mib)).collect();
        let held: Vec<_> = greedy.iter().map(|share| fill(share, mib)).collect();
        assert!(held.iter().all(|(_, refused)| *refused != Refused::Budget));
        let modest = caller.connection(64 * mib);
        let _blocks: Vec<_> = (0..8).map(|_| modest.charge(64 << 10).unwrap()).collect();
        assert!(budget.caller().connection(64 * mib).charge(16 * mib).is_ok());
    }

    #[test]
    fn a_callers_own_limit_holds_over_all_its_connections_and_at_once() {
        // Scenario: 1,000 in all; a caller limited to 10 has 20 connections, which take 1 each; then the
        // limit drops below what is held, and rises. Expectation: ten are granted, then none until enough is
        // returned, then more; another caller is unaffected.
        let budget = Budget::new(1000);
        let caller = budget.caller();
        caller.set_most(10);
        let connections: Vec<_> = (0..20).map(|_| caller.connection(u64::MAX)).collect();
        let take = || {
            connections
                .iter()
                .filter_map(|share| share.charge(1).ok())
                .collect::<Vec<_>>()
        };
        let mut held = take();
        assert_eq!((held.len(), connections[0].most()), (10, 10));
        assert_eq!(connections[19].charge(1).unwrap_err(), Refused::CallerLimit);
        caller.set_most(4);
        held.truncate(4);
        assert!(take().is_empty());
        held.pop();
        assert_eq!(take().len(), 1);
        caller.set_most(6);
        held.extend(take());
        assert_eq!(caller.held(), 6);
        assert!(budget.caller().connection(u64::MAX).charge(300).is_ok());
    }

    #[test]
    fn a_weight_is_at_least_one() {
        // Scenario: a weight of 0, and of 7. Expectation: 1, since rounds in which a caller gets nothing would not end; 7.
        let budget = Budget::new(1);
        let caller = CallerAccount::new(0, &budget, &budget);
        let connection = caller.connection(0, 1);
        let set = |weight| {
            caller.set_weight(weight);
            connection.weight().get()
        };
        assert_eq!([0, 7].map(set), [1, 7]);
    }

    #[test]
    fn a_refusal_names_who_holds_too_much() {
        // 100 in all: more than there is, more than the connection's limit, and more than half of what is
        // free.
        let budget = Budget::new(100);
        let caller = budget.caller();
        let share = caller.connection(40);
        assert_eq!(share.most(), 40);
        assert_eq!(share.charge(101).unwrap_err(), Refused::Budget);
        assert_eq!(share.charge(41).unwrap_err(), Refused::Connection);
        let _first = share.charge(40).unwrap();
        let other = caller.connection(40);
        assert_eq!(other.charge(1).unwrap_err(), Refused::Caller);
        let charge = budget.charge(60).unwrap();
        assert_eq!(budget.charge(1).unwrap_err(), Refused::Budget);
        assert_eq!(budget.used(), 100);
        drop(charge);
        assert_eq!((budget.used(), caller.held(), share.held()), (40, 40, 40));
    }

    #[test]
    fn the_most_can_be_had_at_once_and_in_pieces() {
        // Nothing else is held: a charge of `most` is granted, and so are charges that were held and
        // returned.
        let budget = Budget::new(1 << 20);
        let share = budget.caller().connection(u64::MAX);
        assert_eq!(share.most(), 1 << 19);
        let charge = share.charge(share.most()).unwrap();
        assert_eq!(share.held(), 1 << 19);
        drop(charge);
        assert_eq!(share.held(), 0);
        let (_held, refused) = fill(&share, 4096);
        assert_ne!(refused, Refused::Budget);
        assert!(share.held() >= (1 << 20) / 6, "{}", share.held());
    }

    #[test]
    fn a_charge_can_be_corrected_when_its_holder_has_all_it_may() {
        // Scenario: a lone caller takes the most it can, and corrects the charge: to the same, to less, to
        // more. Expectation: the same and less are always granted, and what is returned is free; more is
        // granted up to the most, whatever the charge holds, and refused beyond it.
        let budget = Budget::new(4096);
        let share = budget.caller().connection(u64::MAX);
        let mut charge = share.charge(share.most()).expect("the most");
        assert_eq!(charge.resize(2048), Ok(()));
        assert_eq!((charge.amount(), budget.used(), share.held()), (2048, 2048, 2048));
        assert_eq!(charge.resize(2049), Err(Refused::Caller));
        assert_eq!((charge.amount(), budget.used(), share.held()), (0, 0, 0));
        assert_eq!(charge.resize(1300), Ok(()));
        assert_eq!(charge.resize(2048), Ok(()));
        assert_eq!(charge.resize(10), Ok(()));
        assert_eq!((charge.amount(), budget.used(), share.held()), (10, 10, 10));
        assert_eq!(charge.resize(1000), Ok(()));
        drop(charge);
        assert_eq!((budget.used(), share.held()), (0, 0));
    }
}
