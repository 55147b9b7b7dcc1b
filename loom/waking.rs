//! The code that wakes a shard from other threads, over all interleavings that loom finds: no wake-up is
//! lost, and nothing is reported twice. docs/PROOF.md has the command.

#![expect(
    dead_code,
    reason = "modules of the crate, of which not everything is used here"
)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../crates/engine/src/backend/handoff.rs"]
mod handoff;
#[path = "../crates/engine/src/backend/ready.rs"]
mod ready;

use handoff::Handoff;
use loom::future::block_on;
use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;
use ready::Ready;
use std::future::poll_fn;
use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// For models of three threads: limits preemptions to two, besides blocking waits. All interleavings would
/// take hours.
fn bounded() -> Builder {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(2);
    builder
}

/// Polls until `count` slots have finished.
fn dispatched(ready: &Ready, count: usize) -> Vec<u32> {
    let mut taken = Vec::new();
    block_on(poll_fn(|cx| {
        while ready.poll(cx, |slot| taken.push(slot)) {
            if taken.len() >= count {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }));
    taken
}

#[test]
fn every_slot_that_finishes_is_dispatched_once() {
    // Scenario: two threads set slots in two words while the dispatcher checks, registers and sleeps.
    // Expectation: it gets each of them once; if a wake-up were lost, it would sleep forever, which loom
    // reports as a deadlock.
    bounded().check(|| {
        let ready = Arc::new(Ready::new(128));
        let threads = [3, 67].map(|slot| {
            let ready = Arc::clone(&ready);
            thread::spawn(move || ready.set(slot))
        });
        let mut taken = dispatched(&ready, 2);
        taken.sort_unstable();
        assert_eq!(taken, [3, 67]);
        for thread in threads {
            thread.join().unwrap();
        }
        ready.poll(&Context::from_waker(Waker::noop()), |slot| panic!("{slot}"));
    });
}

/// A waker that records being woken.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: StdArc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Whether there is an interleaving in which a slot is set, and the task that checks by `poll` neither sees
/// it nor is woken.
fn is_missed(poll: fn(&Ready, &Waker) -> bool) -> bool {
    let missed = StdArc::new(AtomicBool::new(false));
    let found = StdArc::clone(&missed);
    loom::model(move || {
        let ready = Arc::new(Ready::new(64));
        let other = Arc::clone(&ready);
        let thread = thread::spawn(move || other.set(3));
        let task = StdArc::new(Woken::default());
        let is_seen = poll(&ready, &Waker::from(StdArc::clone(&task)));
        thread.join().unwrap();
        if !is_seen && !task.0.load(Ordering::SeqCst) {
            found.store(true, Ordering::SeqCst);
        }
    });
    missed.load(Ordering::SeqCst)
}

#[test]
fn only_a_dispatcher_that_looks_before_it_registers_misses_a_wake_up() {
    // Scenario: the order of `Ready::poll`, and the reverse. Expectation: loom finds a lost
    // wake-up only for the reverse, so this model can fail.
    assert!(!is_missed(|ready, waker| {
        ready.poll(&Context::from_waker(waker), |_| ())
    }));
    assert!(is_missed(|ready, waker| {
        let is_seen = ready.take();
        ready.register(waker);
        is_seen
    }));
}

#[test]
fn every_job_is_done_and_collected_once_and_the_threads_end() {
    // Scenario: two threads serve two jobs, submitted one after the other, while the task collects results,
    // sleeps, and finally closes. Expectation: each result once; the threads end.
    bounded().check(|| {
        let handoff = Arc::new(Handoff::<u32, u32>::new());
        let threads = [(), ()].map(|()| {
            let handoff = Arc::clone(&handoff);
            thread::spawn(move || {
                while let Some(job) = handoff.next() {
                    handoff.report(job);
                }
            })
        });
        handoff.submit([1].into_iter(), 2);
        let mut results = Vec::new();
        let mut is_first = true;
        block_on(poll_fn(|cx| {
            while results.len() < 2 {
                if handoff.poll_results(cx, &mut results).is_pending() {
                    return Poll::Pending;
                }
                if std::mem::take(&mut is_first) {
                    handoff.submit([2].into_iter(), 2);
                }
            }
            Poll::Ready(())
        }));
        handoff.close();
        for thread in threads {
            thread.join().unwrap();
        }
        results.sort_unstable();
        assert_eq!(results, [1, 2]);
    });
}

#[test]
fn jobs_that_are_queued_when_the_queue_closes_are_done() {
    // Scenario: a thread serves while two jobs are queued and the queue closes at once, as in the drop of
    // `PreadBackend`. Expectation: both are done when the thread ends.
    loom::model(|| {
        let handoff = Arc::new(Handoff::<u32, u32>::new());
        let server = Arc::clone(&handoff);
        let thread = thread::spawn(move || {
            let mut done = 0;
            while let Some(job) = server.next() {
                server.report(job);
                done += 1;
            }
            done
        });
        handoff.submit([1, 2].into_iter(), 1);
        handoff.close();
        assert_eq!(thread.join().unwrap(), 2);
    });
}
