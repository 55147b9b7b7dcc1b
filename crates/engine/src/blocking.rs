//! Threads for calls that block: at most so many, started when needed, ended when idle.
//!
//! Not the blocking pool of tokio: where the system refuses a thread and there is none, it panics in the caller and keeps
//! the call, with the memory and the permits that it holds, until some later call gets a thread.

use crate::sync::lock;
use rustix::process::getpid;
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long an idle thread waits for the next call.
const IDLE_MAX: Duration = Duration::from_secs(10);

type Call = Box<dyn FnOnce() + Send>;

/// A pool of threads with one name.
#[derive(Debug)]
pub struct BlockingPool {
    name: &'static str,
    threads_max: usize,
    state: Mutex<State>,
    called: Condvar,
}

#[derive(Default)]
struct State {
    /// Bounded by the callers, each of which holds a permit or a charge for its call.
    calls: VecDeque<Call>,
    threads: usize,
    /// Threads that wait for a call, or were woken for one in `calls`.
    idle: usize,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("calls", &self.calls.len())
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl BlockingPool {
    /// A pool without threads. The name is that of its threads: at most 15 bytes.
    pub const fn new(name: &'static str, threads_max: usize) -> Self {
        Self {
            name,
            threads_max,
            state: Mutex::new(State {
                calls: VecDeque::new(),
                threads: 0,
                idle: 0,
            }),
            called: Condvar::new(),
        }
    }

    /// Makes a call on one of the threads. The receiver gets its result, or an error if it panics; the call is made even
    /// if the receiver is dropped.
    ///
    /// # Errors
    /// The system refuses a thread, and there is none. The call is dropped.
    pub fn run<T: Send + 'static>(
        &'static self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<oneshot::Receiver<T>> {
        let start = || {
            let thread = Builder::new().name(self.name.to_owned());
            let serve = || {
                unpin();
                self.serve();
            };
            thread.spawn(serve).map(drop)
        };
        self.run_with(call, start)
    }

    fn run_with<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
        start: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<oneshot::Receiver<T>> {
        let (done, result) = oneshot::channel();
        // An error means that nobody waits for the result.
        let call = Box::new(move || drop(done.send(call())));
        let mut state = self.lock();
        if state.idle <= state.calls.len() && state.threads < self.threads_max {
            match start() {
                Ok(()) => state.threads += 1,
                Err(error) if state.threads == 0 => return Err(error),
                // One of the busy ones comes to it.
                Err(_) => {}
            }
        }
        state.calls.push_back(call);
        drop(state);
        self.called.notify_one();
        Ok(result)
    }

    /// A thread of the pool.
    fn serve(&self) {
        let mut state = self.lock();
        loop {
            while let Some(call) = state.calls.pop_front() {
                drop(state);
                // The receiver notices.
                let _panicked = catch_unwind(AssertUnwindSafe(call));
                state = self.lock();
            }
            state.idle += 1;
            let waited = self
                .called
                .wait_timeout_while(state, IDLE_MAX, |state| state.calls.is_empty());
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            if state.calls.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No call is made under the lock.
        lock(&self.state)
    }
}

/// Lets the calling thread use the CPUs of the process's first thread, which is not pinned. It inherits those of the thread that
/// starts it: of a core that is pinned, one CPU, which it would take from that core.
pub(crate) fn unpin() {
    // Where the mask has more CPUs than this can read, it stays on that CPU.
    if let Ok(cpus) = sched_getaffinity(Some(getpid())) {
        let _stays_too = sched_setaffinity(None, &cpus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::CpuSet;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier, mpsc};

    fn refused() -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    #[test]
    fn a_call_without_a_thread_is_refused_and_holds_nothing() {
        // Scenario: the system refuses the first thread. Expectation: an error, and what the call holds is dropped; the
        // next call, for which there is a thread, is made.
        static POOL: BlockingPool = BlockingPool::new("rf-test-refused", 2);
        let held = Arc::new(());
        let holds = Arc::clone(&held);
        let error = POOL.run_with(move || drop(holds), refused).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
        assert_eq!(Arc::strong_count(&held), 1);
        assert_eq!(POOL.run(|| 7).unwrap().blocking_recv(), Ok(7));
    }

    #[test]
    fn a_call_waits_for_a_busy_thread_where_no_other_can_be_had() {
        // Scenario: the only thread is busy, and a second one is refused. Expectation: the call is made once it is free.
        static POOL: BlockingPool = BlockingPool::new("rf-test-busy", 2);
        let (release, busy) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let first = POOL.run(move || {
            tell.send(()).unwrap();
            busy.recv().unwrap_err()
        });
        told.recv().unwrap();
        let second = POOL.run_with(|| 7, refused).unwrap();
        drop(release);
        first.unwrap().blocking_recv().unwrap();
        assert_eq!(second.blocking_recv(), Ok(7));
    }

    #[test]
    fn there_are_never_more_threads_than_allowed_and_as_many_where_needed() {
        // Scenario: twelve calls, of which four at a time wait for each other, on four threads. Expectation: all are
        // made, by four threads.
        static POOL: BlockingPool = BlockingPool::new("rf-test-bound", 4);
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        let together = Arc::new(Barrier::new(4));
        let calls: Vec<_> = (0..12)
            .map(|_| {
                let together = Arc::clone(&together);
                POOL.run(move || {
                    let running = RUNNING.fetch_add(1, Ordering::SeqCst) + 1;
                    together.wait();
                    RUNNING.fetch_sub(1, Ordering::SeqCst);
                    running
                })
                .unwrap()
            })
            .collect();
        for call in calls {
            assert!(call.blocking_recv().unwrap() <= 4);
        }
        assert_eq!(POOL.lock().threads, 4);
    }

    #[test]
    fn a_panic_ends_its_call_alone() {
        // Scenario: a call panics on the only thread. Expectation: its receiver gets an error; the next call is made.
        static POOL: BlockingPool = BlockingPool::new("rf-test-panic", 1);
        let broken = POOL.run(|| panic!("a defect")).unwrap();
        let next = POOL.run(|| 7).unwrap();
        assert!(broken.blocking_recv().is_err());
        assert_eq!(next.blocking_recv(), Ok(7));
    }

    #[test]
    fn a_thread_may_use_all_cpus_whoever_starts_it() {
        // Scenario: a thread that is pinned to one CPU, as a core is, makes the first call. Expectation: it is made by a thread that
        // may use all CPUs of the process.
        static POOL: BlockingPool = BlockingPool::new("rf-test-pinned", 1);
        let all = sched_getaffinity(None).unwrap();
        let of_pinned = std::thread::spawn(move || {
            let last = (0..CpuSet::MAX_CPU).rfind(|&cpu| all.is_set(cpu)).unwrap();
            let mut only = CpuSet::new();
            only.set(last);
            sched_setaffinity(None, &only).unwrap();
            POOL.run(|| sched_getaffinity(None).unwrap())
                .unwrap()
                .blocking_recv()
        });
        assert_eq!(of_pinned.join().unwrap(), Ok(all));
    }
}
