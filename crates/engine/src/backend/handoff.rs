//! Hands work to a pool of threads, and its results back to the submitting task.
//!
//! Invariants: every job is taken once; every result is collected once; a task whose last poll found no
//! result is woken for the next one. `loom/waking.rs` checks this over all interleavings.

#[cfg(all(loom, test))]
use loom::sync::{Condvar, Mutex, MutexGuard};
use std::any::Any;
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::PoisonError;
#[cfg(not(all(loom, test)))]
use std::sync::{Condvar, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

/// See the module.
#[derive(Debug)]
pub(crate) struct Handoff<J, R> {
    queue: Mutex<Queue<J>>,
    /// Something was queued, or the queue was closed.
    queued: Condvar,
    done: Mutex<Done<R>>,
}

#[derive(Debug)]
struct Queue<J> {
    jobs: VecDeque<J>,
    closed: bool,
}

#[derive(Debug)]
struct Done<R> {
    results: Vec<R>,
    panic: Option<Box<dyn Any + Send>>,
    waker: Option<Waker>,
}

impl<J, R> Handoff<J, R> {
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue {
                jobs: VecDeque::new(),
                closed: false,
            }),
            queued: Condvar::new(),
            done: Mutex::new(Done {
                results: Vec::new(),
                panic: None,
                waker: None,
            }),
        }
    }

    /// Queues jobs for at most `threads` threads.
    pub(crate) fn submit(&self, jobs: impl ExactSizeIterator<Item = J>, threads: usize) {
        let count = jobs.len();
        lock(&self.queue).jobs.extend(jobs);
        for _ in 0..count.min(threads) {
            self.queued.notify_one();
        }
    }

    /// The next job, once there is one; `None`: the queue is closed and empty.
    pub(crate) fn next(&self) -> Option<J> {
        let mut queue = lock(&self.queue);
        while queue.jobs.is_empty() && !queue.closed {
            queue = self.queued.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.jobs.pop_front()
    }

    /// Closes the queue: the threads end once all jobs are taken.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.queued.notify_all();
    }

    pub(crate) fn report(&self, result: R) {
        self.tell(|done| done.results.push(result));
    }

    /// Reports that a job panicked, so that it has no result: the task panics in its turn.
    pub(crate) fn report_panic(&self, panic: Box<dyn Any + Send>) {
        self.tell(|done| done.panic = Some(panic));
    }

    fn tell(&self, report: impl FnOnce(&mut Done<R>)) {
        let waker = {
            let mut done = lock(&self.done);
            report(&mut done);
            done.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Appends the available results. `Pending` if there are none: the task is then woken by the next one.
    pub(crate) fn poll_results(&self, cx: &mut Context<'_>, results: &mut Vec<R>) -> Poll<()> {
        let mut done = lock(&self.done);
        if let Some(panic) = done.panic.take() {
            drop(done);
            resume_unwind(panic);
        }
        if done.results.is_empty() {
            match &mut done.waker {
                Some(waker) => waker.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        results.append(&mut done.results);
        Poll::Ready(())
    }
}

/// No code panics while holding these locks, so their data is always consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
