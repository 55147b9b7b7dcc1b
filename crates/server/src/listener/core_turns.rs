//! Shares the time of a core among its callers.
//!
//! The runtime polls ready tasks in order of arrival and polls its sockets only after them, so a caller with
//! 64 connections would get 64 turns for each turn of another. While tasks of several callers run on a core,
//! each caller may use [`PART_NS`] times its weight between two polls of the sockets (a round). Its further
//! ready tasks wait in a queue, in order of arrival, and are let on one at a time. While a core has one
//! caller, nothing is timed and no task waits.
//!
//! A connection whose client sends more than its turns take, one after the other, has a backlog. Its tasks wait apart from
//! their caller's others, and are let on by turns with these, also if the caller is alone: who sends without pause does
//! not delay those behind the same address that send little.
//!
//! A poll that refuses a request, for its credential, its rights or its rate, is charged the maximum
//! ([`CHARGED_POLL_MAX`]): a client that keeps sending such requests gets less than its share.
//!
//! A task works for the caller of the requests that it dispatches ([`work_for`]), or of the task that spawned
//! it. A connection with requests of several callers works for the address that it came from.

use ringfetch_engine::cores::{CHARGED_POLL_MAX, give_way, note_shared, parks, take_charges};
use ringfetch_engine::share::{Account, Weight};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// Nanoseconds per round of a caller with weight 1. Twice as many gained nothing: a poll that writes a
/// response takes about 80 us, and is never split.
const PART_NS: i64 = 50_000;

/// Most unused time that a caller keeps for later. Work that arrives in a burst, for instance after this
/// thread had no CPU for a while, is then served at once.
const CREDIT_NS_MAX: i64 = 20 * PART_NS;

/// Most time over its share that is deducted from a caller's later rounds.
const DEBT_NS_MAX: i64 = 20 * PART_NS;

/// How long a core counts as shared after polling tasks of two callers.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// Number of callers above which those without tasks are forgotten.
const CALLERS_MIN: usize = 64;

thread_local! {
    static CORE: Core = Core::default();
}

/// The callers of this thread.
#[derive(Default)]
struct Core {
    callers: RefCell<HashMap<u64, Weak<Caller>>>,
    /// Callers that have used time, or have waiting tasks.
    busy: RefCell<Vec<Rc<Caller>>>,
    /// The caller of the task that is being polled.
    current: RefCell<Option<Rc<Caller>>>,
    /// The caller of the last poll, and whether its connection had a backlog.
    last: Cell<Option<(u64, bool)>>,
    shared_until: Cell<Option<Instant>>,
    /// How often the core had parked, by the last poll.
    parks: Cell<Option<u64>>,
    rounds: Cell<RoundState>,
    waker: RefCell<Option<Waker>>,
    /// Whether the task that is being polled has refused a request.
    refuses: Cell<bool>,
    /// Whether it works for a connection with a backlog.
    has_backlog: Cell<bool>,
}

/// State of the task that begins rounds ([`Rounds`]).
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum RoundState {
    /// Not spawned yet.
    #[default]
    None,
    /// No task waits.
    Asleep,
    /// Woken; its next poll still comes before the sockets are polled.
    Woken,
    /// Its next poll comes after the sockets were polled.
    Due,
}

/// A caller on this thread.
#[derive(Debug)]
pub(super) struct Caller {
    id: u64,
    /// Read each time: it may change while tasks keep this, as streams do for hours.
    weight: Weight,
    /// Nanoseconds left; if negative, they are deducted from later rounds.
    balance: Cell<i64>,
    is_busy: Cell<bool>,
    waiting: RefCell<WaitingTasks>,
}

/// Tasks that wait for their caller's time, in the order of arrival.
#[derive(Debug, Default)]
struct WaitingTasks {
    /// Of connections without a backlog, and with one.
    tickets: [VecDeque<Rc<Ticket>>; 2],
    /// Which of them is let on next, if both wait.
    next_has_backlog: bool,
}

/// A waiting task.
#[derive(Debug)]
struct Ticket {
    waker: RefCell<Waker>,
    state: Cell<TicketState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TicketState {
    Waits,
    MayRun,
    Gone,
}

/// The caller of an account, on this thread.
pub(super) fn caller(account: &Account) -> Rc<Caller> {
    CORE.with(|core| core.caller(account.caller(), account.weight()))
}

/// Makes the task that is being polled, and what it spawns from now on, work for this account.
pub(super) fn work_for(account: &Account) {
    CORE.with(|core| core.work_for(account.caller(), account.weight()));
}

/// Notes that the task being polled has refused a request that its client could have avoided.
pub(crate) fn note_refusal() {
    CORE.with(|core| core.refuses.set(true));
}

/// Notes whether the connection whose task is being polled has a backlog.
pub(super) fn note_backlog(has_backlog: bool) {
    CORE.with(|core| core.has_backlog.set(has_backlog));
}

/// Whether the task that is being polled, or the calling thread without one, has noted a refusal; forgets it.
#[cfg(test)]
pub(crate) fn take_refusal() -> bool {
    CORE.with(|core| core.refuses.take())
}

/// Whether the calling thread, without a task, has noted a backlog; forgets it.
#[cfg(test)]
pub(super) fn take_backlog() -> bool {
    CORE.with(|core| core.has_backlog.take())
}

/// The caller of the task that is being polled.
pub(super) fn current() -> Option<Rc<Caller>> {
    CORE.with(|core| core.current.borrow().clone())
}

impl Core {
    fn caller(&self, id: u64, weight: &Weight) -> Rc<Caller> {
        let mut callers = self.callers.borrow_mut();
        if let Some(caller) = callers.get(&id).and_then(Weak::upgrade) {
            return caller;
        }
        if callers.len() >= CALLERS_MIN && callers.len() == callers.capacity() {
            callers.retain(|_, caller| caller.strong_count() > 0);
        }
        let caller = Rc::new(Caller {
            id,
            weight: weight.clone(),
            balance: Cell::default(),
            is_busy: Cell::default(),
            waiting: RefCell::default(),
        });
        caller.balance.set(caller.full());
        callers.insert(id, Rc::downgrade(&caller));
        caller
    }

    fn work_for(&self, id: u64, weight: &Weight) {
        let mut current = self.current.borrow_mut();
        if let Some(caller) = current.as_mut().filter(|caller| caller.id != id) {
            *caller = self.caller(id, weight);
        }
    }

    /// Notes that a task of this caller is being polled; returns the time if the core is shared.
    fn shared_now(&self, caller: &Caller, has_backlog: bool) -> Option<Instant> {
        let now = (caller.id, has_backlog);
        let is_other = self.last.replace(Some(now)).is_some_and(|last| last != now);
        if !is_other && self.shared_until.get().is_none() {
            return None;
        }
        let now = Instant::now();
        if is_other {
            self.shared_until.set(Some(now + SHARED_FOR));
            note_shared(true);
        } else if self.shared_until.get().is_some_and(|until| until <= now) {
            self.end_turns();
            return None;
        }
        let parks = parks();
        if parks != self.parks.replace(parks) {
            self.forgive();
        }
        Some(now)
    }

    /// The core was idle since the last poll, so the time used before was taken from no other caller.
    fn forgive(&self) {
        take_charges(|_, _| {});
        self.busy.borrow_mut().retain(|caller| {
            let waits = !caller.waiting.borrow().is_empty();
            if !waits {
                caller.balance.set(caller.full());
            }
            caller.is_busy.set(waits);
            waits
        });
    }

    /// One caller has been alone for a while: ends all waiting.
    fn end_turns(&self) {
        self.shared_until.set(None);
        note_shared(false);
        take_charges(|_, _| {});
        for caller in self.busy.borrow_mut().drain(..) {
            caller.is_busy.set(false);
            caller.balance.set(caller.full());
            while caller.let_on() {}
        }
    }

    /// Whether a task may be polled; otherwise it gets a ticket, or keeps the one it has.
    fn admits(&self, turns: &mut TaskTurns, cx: &mut Context<'_>) -> bool {
        let TaskTurns { caller, ticket, .. } = turns;
        if let Some(waiting) = ticket {
            if waiting.state.get() == TicketState::MayRun {
                *ticket = None;
                return true;
            }
            waiting.waker.borrow_mut().clone_from(cx.waker());
            return false;
        }
        let mut waiting = caller.waiting.borrow_mut();
        let [light, backlog] = &mut waiting.tickets;
        let queue = if turns.has_backlog { backlog } else { light };
        if caller.has_time() && queue.is_empty() {
            return true;
        }
        let new = Rc::new(Ticket {
            waker: RefCell::new(cx.waker().clone()),
            state: Cell::new(TicketState::Waits),
        });
        queue.push_back(Rc::clone(&new));
        *ticket = Some(new);
        self.note_busy(caller);
        self.want_round();
        false
    }

    fn note_busy(&self, caller: &Rc<Caller>) {
        if !caller.is_busy.replace(true) {
            self.busy.borrow_mut().push(Rc::clone(caller));
        }
    }

    /// Makes sure that the next round begins: a task waits.
    fn want_round(&self) {
        match self.rounds.get() {
            RoundState::None => {
                self.rounds.set(RoundState::Woken);
                drop(tokio::task::spawn_local(Rounds));
            }
            RoundState::Asleep => {
                self.rounds.set(RoundState::Woken);
                if let Some(waker) = self.waker.borrow_mut().take() {
                    waker.wake();
                }
            }
            RoundState::Woken | RoundState::Due => {}
        }
    }

    fn took(&self, caller: &Rc<Caller>, time: Duration) {
        caller.charge(time.min(CHARGED_POLL_MAX));
        self.note_busy(caller);
        if caller.has_time() {
            caller.let_on();
        }
    }

    /// Begins a round, after the core has polled its sockets. Returns whether any task still waits.
    fn begin_round(&self) -> bool {
        let mut waits = false;
        take_charges(|id, time| {
            if let Some(caller) = self.callers.borrow().get(&id).and_then(Weak::upgrade) {
                caller.charge(time);
                self.note_busy(&caller);
            }
        });
        self.busy.borrow_mut().retain(|caller| {
            let full = caller.full();
            caller
                .balance
                .set((caller.balance.get() + caller.part()).min(full));
            if caller.has_time() {
                caller.let_on();
            }
            let has_waiting = !caller.waiting.borrow().is_empty();
            waits |= has_waiting;
            let stays = has_waiting || caller.balance.get() < full;
            caller.is_busy.set(stays);
            stays
        });
        waits
    }
}

impl Caller {
    /// Nanoseconds added in each round.
    fn part(&self) -> i64 {
        PART_NS * i64::from(self.weight.get())
    }

    fn has_time(&self) -> bool {
        self.balance.get() > 0
    }

    fn charge(&self, time: Duration) {
        let nanoseconds = i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        self.balance
            .set(self.balance.get().saturating_sub(nanoseconds).max(-DEBT_NS_MAX));
    }

    /// Lets the next waiting task on; returns false if none waits.
    fn let_on(&self) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        while let Some(ticket) = waiting.pop() {
            if ticket.let_on() {
                return true;
            }
        }
        false
    }

    /// The most time that it can have saved.
    fn full(&self) -> i64 {
        CREDIT_NS_MAX.max(self.part())
    }
}

impl WaitingTasks {
    fn is_empty(&self) -> bool {
        self.tickets.iter().all(VecDeque::is_empty)
    }

    /// The next one: of each kind by turns.
    fn pop(&mut self) -> Option<Rc<Ticket>> {
        let [light, backlog] = &mut self.tickets;
        let backlog_first = self.next_has_backlog && !backlog.is_empty() || light.is_empty();
        self.next_has_backlog = !backlog_first;
        if backlog_first {
            backlog.pop_front()
        } else {
            light.pop_front()
        }
    }
}

impl Ticket {
    /// Wakes its task; returns false if the task is gone.
    fn let_on(&self) -> bool {
        let waits = self.state.get() == TicketState::Waits;
        if waits {
            self.state.set(TicketState::MayRun);
            self.waker.borrow().wake_by_ref();
        }
        waits
    }
}

/// Begins a round after each poll of the sockets, while any task waits.
struct Rounds;

impl Future for Rounds {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        CORE.with(|core| {
            if core.rounds.get() == RoundState::Due && !core.begin_round() {
                *core.waker.borrow_mut() = Some(cx.waker().clone());
                core.rounds.set(RoundState::Asleep);
                return;
            }
            core.rounds.set(RoundState::Due);
            give_way(cx);
        });
        Poll::Pending
    }
}

pin_project_lite::pin_project! {
    /// A task whose polls take turns.
    pub(super) struct InTurn<F> {
        #[pin]
        task: F,
        turns: TaskTurns,
    }
}

/// The caller that a task works for, and its ticket while it waits.
struct TaskTurns {
    caller: Rc<Caller>,
    ticket: Option<Rc<Ticket>>,
    /// The caller that it started with.
    own: Rc<Caller>,
    /// It has worked for several other callers, and from then on works for its own.
    serves_several: bool,
    /// Its connection had a backlog in its last poll, or when it was spawned.
    has_backlog: bool,
}

impl TaskTurns {
    fn worked_for(&mut self, caller: Rc<Caller>) {
        if caller.id == self.caller.id || self.serves_several {
            return;
        }
        self.serves_several = self.caller.id != self.own.id;
        self.caller = if self.serves_several {
            Rc::clone(&self.own)
        } else {
            caller
        };
    }
}

impl Drop for TaskTurns {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take()
            && ticket.state.replace(TicketState::Gone) == TicketState::MayRun
        {
            self.caller.let_on();
        }
    }
}

impl<F> InTurn<F> {
    pub(super) fn new(caller: Rc<Caller>, task: F) -> Self {
        Self {
            task,
            turns: TaskTurns {
                own: Rc::clone(&caller),
                caller,
                ticket: None,
                serves_several: false,
                has_backlog: CORE.with(|core| core.has_backlog.get()),
            },
        }
    }
}

impl<F: Future> Future for InTurn<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        CORE.with(|core| {
            let turns = this.turns;
            let begun = core.shared_now(&turns.caller, turns.has_backlog);
            if begun.is_some() && !core.admits(turns, cx) {
                return Poll::Pending;
            }
            turns.ticket = None;
            let outer = core.current.replace(Some(Rc::clone(&turns.caller)));
            let outer_backlog = core.has_backlog.replace(turns.has_backlog);
            core.refuses.set(false);
            let polled = this.task.poll(cx);
            turns.has_backlog = core.has_backlog.replace(outer_backlog);
            let worked_for = core.current.replace(outer);
            if let Some(begun) = begun {
                // Requests of other callers on the same connection must not wait for this refusal.
                let is_refusal = core.refuses.take() && !turns.serves_several;
                core.took(
                    &turns.caller,
                    if is_refusal {
                        Duration::MAX
                    } else {
                        begun.elapsed()
                    },
                );
            }
            if let Some(worked_for) = worked_for {
                turns.worked_for(worked_for);
            }
            polled
        })
    }
}
