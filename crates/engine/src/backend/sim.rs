//! A simulated backend for tests: it reads real bytes, but a seeded plan makes attempts fail, fall short, stall or
//! finish out of order, and the test decides when they finish.
//! Invariants: the fate of the Nth attempt depends only on the seed, the plan and N, never on time, so with
//! one shard a run is reproducible; memory that an attempt did not fill is overwritten with `0xDB`, to expose
//! code that trusts it. No threads, no sleeps. Several shards share one count N, whose order depends on the
//! threads' timing.

use super::pread::pread_attempt;
use super::{Attempt, Backend, Completion, ReadSource};
use crate::sync::lock;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The faults of attempts. None by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The fates of the first attempts after the plan was set; later ones are random.
    pub script: Vec<Fault>,
    /// Of a thousand attempts, how many return fewer bytes than requested, at least one.
    pub short_per_mille: u16,
    /// Of a thousand attempts, how many fail with EIO.
    pub eio_per_mille: u16,
    /// Of a thousand attempts, how many fail with EINTR.
    pub eintr_per_mille: u16,
    /// Of a thousand attempts, how many fail with EAGAIN.
    pub eagain_per_mille: u16,
    /// Of a thousand attempts, how many stall until they are released.
    pub stall_per_mille: u16,
    /// Most random faults; `None`: no limit. With a limit, retries succeed eventually.
    pub faults_max: Option<u64>,
    /// Report finished attempts in a random order.
    pub reorder: bool,
}

/// The fate of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It reads everything requested.
    None,
    /// It reads at most this many bytes; 0 looks like the end of the file.
    Short {
        /// The most it reads.
        bytes: u32,
    },
    /// It reads nothing and fails with this errno.
    Errno(i32),
    /// It reads everything requested, once it is released.
    Stall,
    /// The shard panics when the attempt finishes, as a defect of the engine would.
    Panic,
}

/// Controls the simulated backends made from it. Clones share it. Displays as the seed.
#[derive(Clone)]
pub struct SimControl {
    shared: Arc<Shared>,
}

struct Shared {
    seed: u64,
    state: Mutex<State>,
    /// Something was started or reported.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    plan: FaultPlan,
    /// How many fates of the plan's script were used.
    script_dealt: usize,
    faults: u64,
    started: u64,
    in_flight: usize,
    in_flight_max: usize,
    /// Whether attempts are held when they start.
    holding: bool,
    /// Numbers of the attempts that wait for their release.
    held: BTreeSet<u64>,
    /// One waker for each backend, by its number.
    wakers: Vec<Option<Waker>>,
}

/// Set to a seed, to repeat a run.
const SEED_VARIABLE: &str = "RINGFETCH_SIM_SEED";

impl SimControl {
    /// A control without faults; `seed` determines all random choices.
    pub fn new(seed: u64) -> Self {
        let shared = Shared {
            seed,
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// A control with the seed in `RINGFETCH_SIM_SEED`, else with a new one. Prints it to standard error, which the
    /// test runner shows when the test fails.
    pub fn from_environment() -> Self {
        let control = Self::from_environment_silently();
        eprintln!("{control}");
        control
    }

    /// As [`Self::from_environment`], for a test runner that shows printed text even if the test passes.
    pub fn from_environment_silently() -> Self {
        let given = std::env::var(SEED_VARIABLE)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        Self::new(given.unwrap_or_else(|| fastrand::u64(..)))
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Sets the faults of later attempts.
    pub fn set_faults(&self, plan: FaultPlan) {
        let mut state = self.state();
        state.plan = plan;
        state.script_dealt = 0;
        state.faults = 0;
    }

    /// Holds later attempts until they are released.
    pub fn hold(&self) {
        self.state().holding = true;
    }

    /// Releases up to `count` attempts, oldest first. Returns how many.
    pub fn release(&self, count: usize) -> usize {
        let mut state = self.state();
        let mut released = 0;
        while released < count && state.held.pop_first().is_some() {
            released += 1;
        }
        self.wake(state);
        released
    }

    /// Ends [`Self::hold`] and releases every held or stalled attempt. Returns how many.
    pub fn release_all(&self) -> usize {
        let mut state = self.state();
        state.holding = false;
        let released = std::mem::take(&mut state.held).len();
        self.wake(state);
        released
    }

    /// Attempts started and not yet reported.
    pub fn in_flight(&self) -> usize {
        self.state().in_flight
    }

    /// The most ever in flight.
    pub fn max_in_flight(&self) -> usize {
        self.state().in_flight_max
    }

    /// Attempts started in total.
    pub fn started_total(&self) -> u64 {
        self.state().started
    }

    /// Attempts with a fault since the plan was set.
    pub fn faults_total(&self) -> u64 {
        self.state().faults
    }

    /// Blocks until exactly this many attempts are in flight; false if `timeout` passes first.
    pub fn wait_in_flight(&self, count: usize, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.in_flight == count)
    }

    /// Blocks until at least this many attempts were started in total; false if `timeout` passes first.
    pub fn wait_started(&self, count: u64, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.started >= count)
    }

    fn wait(&self, timeout: Duration, reached: impl Fn(&State) -> bool) -> bool {
        let waited = self
            .shared
            .changed
            .wait_timeout_while(self.state(), timeout, |state| !reached(state));
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        reached(&state)
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let wakers: Vec<Waker> = state.wakers.iter_mut().filter_map(Option::take).collect();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A second panic must not hide a test that panicked with the lock.
        lock(&self.shared.state)
    }

    /// Random numbers of the Nth attempt, independent of the others'.
    fn random(&self, number: u64) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.shared.seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }
}

impl fmt::Display for SimControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "simulated faults with seed {0}: repeat with {SEED_VARIABLE}={0}",
            self.shared.seed
        )
    }
}

impl fmt::Debug for SimControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimControl")
            .field("seed", &self.shared.seed)
            .finish_non_exhaustive()
    }
}

impl State {
    /// The fate of an attempt for `length` bytes.
    fn deal(&mut self, length: u32, mut random: fastrand::Rng) -> Fault {
        let fate = if let Some(&fate) = self.plan.script.get(self.script_dealt) {
            self.script_dealt += 1;
            fate
        } else if self.plan.faults_max.is_some_and(|most| self.faults >= most) {
            Fault::None
        } else {
            self.plan.by_chance(length, &mut random)
        };
        self.faults += u64::from(fate != Fault::None);
        fate
    }
}

impl FaultPlan {
    /// These fates for the first attempts, and no fault after them.
    pub fn script(fates: &[Fault]) -> Self {
        Self {
            script: fates.to_vec(),
            ..Self::default()
        }
    }

    fn by_chance(&self, length: u32, random: &mut fastrand::Rng) -> Fault {
        let short = if length > 1 {
            Fault::Short {
                bytes: random.u32(1..length),
            }
        } else {
            Fault::None
        };
        let chances = [
            (self.short_per_mille, short),
            (self.eio_per_mille, Fault::Errno(libc::EIO)),
            (self.eintr_per_mille, Fault::Errno(libc::EINTR)),
            (self.eagain_per_mille, Fault::Errno(libc::EAGAIN)),
            (self.stall_per_mille, Fault::Stall),
        ];
        let mut drawn = random.u32(..1000);
        for (per_mille, fate) in chances {
            match drawn.checked_sub(u32::from(per_mille)) {
                Some(rest) => drawn = rest,
                None => return fate,
            }
        }
        Fault::None
    }
}

/// One shard's simulated backend.
#[derive(Debug)]
pub(crate) struct SimBackend {
    control: SimControl,
    /// Its place among the control's wakers.
    number: usize,
    pending: Vec<Pending>,
    started_since_flush: bool,
    /// Slots beyond the depth, as a ring has.
    pub(crate) spare_slots: u32,
}

#[derive(Debug)]
struct Pending {
    number: u64,
    attempt: Attempt,
    fate: Fault,
}

impl SimBackend {
    /// A backend under `control`.
    pub(crate) fn new(control: &SimControl) -> Self {
        let mut state = control.state();
        let number = state.wakers.len();
        state.wakers.push(None);
        drop(state);
        Self {
            control: control.clone(),
            number,
            pending: Vec::new(),
            started_since_flush: false,
            spare_slots: 0,
        }
    }
}

impl Backend for SimBackend {
    fn slots(&self, depth: u32) -> u32 {
        depth + self.spare_slots
    }

    fn start(&mut self, attempt: Attempt) -> ReadSource {
        let mut state = self.control.state();
        let number = state.started;
        state.started += 1;
        state.in_flight += 1;
        state.in_flight_max = state.in_flight_max.max(state.in_flight);
        let fate = state.deal(attempt.length, self.control.random(number));
        if state.holding || fate == Fault::Stall {
            state.held.insert(number);
        }
        drop(state);
        self.pending.push(Pending {
            number,
            attempt,
            fate,
        });
        self.started_since_flush = true;
        self.control.shared.changed.notify_all();
        ReadSource::Device
    }

    fn flush(&mut self) -> u32 {
        u32::from(std::mem::take(&mut self.started_since_flush))
    }

    fn poll_completions(&mut self, cx: &mut Context<'_>, finished: &mut Vec<Completion>) -> Poll<()> {
        let mut state = self.control.state();
        let mut over: Vec<Pending> = self
            .pending
            .extract_if(.., |pending| !state.held.contains(&pending.number))
            .collect();
        if over.is_empty() {
            if let Some(waker) = state.wakers.get_mut(self.number) {
                *waker = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        state.in_flight = state.in_flight.saturating_sub(over.len());
        let reorder = state.plan.reorder;
        drop(state);
        if reorder {
            over.sort_by_cached_key(|pending| self.control.random(!pending.number).u64(..));
        }
        finished.extend(over.into_iter().map(|pending| {
            let slot = pending.attempt.slot;
            Completion {
                slot,
                result: make(&pending.attempt, pending.fate),
            }
        }));
        self.control.shared.changed.notify_all();
        Poll::Ready(())
    }
}

impl Drop for SimBackend {
    fn drop(&mut self) {
        let mut state = self.control.state();
        state.in_flight = state.in_flight.saturating_sub(self.pending.len());
        for pending in &self.pending {
            state.held.remove(&pending.number);
        }
        drop(state);
        self.control.shared.changed.notify_all();
    }
}

/// Makes an attempt with its fate, and overwrites the memory that it did not fill.
fn make(attempt: &Attempt, fate: Fault) -> Result<u32, i32> {
    let length = match fate {
        Fault::Errno(_) => 0,
        Fault::Short { bytes } => bytes.min(attempt.length),
        Fault::None | Fault::Stall => attempt.length,
        Fault::Panic => panic!("the fault plan made the simulation panic"),
    };
    // Buffered, since a shortened length is no longer aligned for a direct read.
    let real = Attempt {
        direct: false,
        length,
        ..attempt.clone()
    };
    // SAFETY: the shard keeps the attempt's memory for us until it is reported, and `length` is at most its own.
    let read = unsafe { pread_attempt(&real) };
    let filled = read.unwrap_or(0).min(attempt.length);
    // SAFETY: `filled` is at most the attempt's length.
    let rest = unsafe { attempt.destination.add(filled as usize) };
    // SAFETY: from there to the attempt's end the memory is ours too.
    unsafe { rest.write_bytes(0xDB, (attempt.length - filled) as usize) };
    match fate {
        Fault::Errno(errno) => Err(errno),
        Fault::None | Fault::Short { .. } | Fault::Stall | Fault::Panic => read,
    }
}

#[cfg(test)]
mod tests;
