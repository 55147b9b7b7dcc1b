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
//! two granted at the same moment may exceed a threshold by one of them, but never the budget, or a caller's own limit.

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
        let caller = &*self.caller;
        caller.budget.take(amount)?;
        let callers = caller.held.fetch_add(amount, Relaxed);
        if callers.saturating_add(amount) > caller.most() {
            // Another core was first.
            caller.held.fetch_sub(amount, Relaxed);
            caller.budget.give_back(amount);
            return Err(Refused::CallerLimit);
        }
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
mod tests;
