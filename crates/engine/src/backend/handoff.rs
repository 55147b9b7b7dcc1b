//! Hands work to a pool of threads, and its results back to the submitting task.
//!
//! Invariants: every job is taken once; every result is collected once; a task whose last poll found no
//! result is woken for the next one. `loom/waking.rs` checks this over all interleavings.

#[cfg(all(loom, test))]
use loom::sync::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
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
        let waker = {
            let mut done = lock(&self.done);
            done.results.push(result);
            done.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Appends the available results. `Pending` if there are none: the task is then woken by the next one.
    pub(crate) fn poll_results(&self, cx: &mut Context<'_>, results: &mut Vec<R>) -> Poll<()> {
        let mut done = lock(&self.done);
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
