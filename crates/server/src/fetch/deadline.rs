//! Timeouts that cost no timer for each request.
//!
//! Every request has a deadline, and nearly all complete long before it. A tokio timer for each would cost
//! more than all other checks: a lock and an entry in the timer wheel, twice, and a system call to wake the
//! thread whenever a timer is earlier than all others (ADR 0012). So distant deadlines are kept in a list per
//! thread, walked every [`WALK_PERIOD`]: the walk wakes the entries due before the next one, and they set a
//! timer of their own. The walk's own timer is earlier than nearly all of those. The walk stops when the list
//! is empty.

use crate::config::Limits;
use ringfetch_engine::sync::lock;
use slab::Slab;
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};

/// How often the list of distant deadlines is walked. Nearer ones have a timer each.
const WALK_PERIOD: Duration = Duration::from_secs(1);

/// The earlier of the caller's deadline and `limits.deadline_ms` after the arrival.
pub(crate) fn within(
    limits: &Limits,
    arrived: std::time::Instant,
    deadline: Option<std::time::Instant>,
) -> Option<std::time::Instant> {
    let limit = limits.deadline.and_then(|limit| arrived.checked_add(limit));
    [deadline, limit].into_iter().flatten().min()
}

/// The output of `work`, or `None` if the deadline passes first. Work that is ready at once is never late.
/// Takes pinned work, so that no future is moved into another: each such move doubles a request's state (ADR 0012).
///
/// # Cancel safety
/// As that of `work`.
pub(crate) fn timeout_at<F: Future + Unpin>(deadline: Option<std::time::Instant>, work: F) -> TimeoutAt<F> {
    TimeoutAt {
        work,
        timer: deadline.map(|deadline| DeadlineTimer::new(deadline.into())),
    }
}

/// See [`timeout_at`].
pub(crate) struct TimeoutAt<F> {
    work: F,
    timer: Option<DeadlineTimer>,
}

impl<F: Future + Unpin> Future for TimeoutAt<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(done) = Pin::new(&mut self.work).poll(cx) {
            return Poll::Ready(Some(done));
        }
        match &mut self.timer {
            Some(timer) => timer.poll(cx).map(|()| None),
            None => Poll::Pending,
        }
    }
}

/// Ready at a deadline.
struct DeadlineTimer {
    deadline: Instant,
    set: TimerState,
}

enum TimerState {
    Unset,
    /// In the list of the thread that polled it last.
    Listed {
        place: usize,
        number: u64,
    },
    Timer(Pin<Box<Sleep>>),
}

impl DeadlineTimer {
    fn new(deadline: Instant) -> Self {
        Self {
            deadline,
            set: TimerState::Unset,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let TimerState::Listed { place, number } = self.set
            && with_list(|list| list.update_waker(place, number, cx.waker())).is_some()
        {
            return Poll::Pending;
        }
        if let TimerState::Timer(timer) = &mut self.set {
            return timer.as_mut().poll(cx);
        }
        let (listed, first_walk) = with_list(|list| list.insert(self.deadline, cx.waker()));
        if let Some(first) = first_walk {
            start_walk(first);
        }
        if let Some((place, number)) = listed {
            self.set = TimerState::Listed { place, number };
            return Poll::Pending;
        }
        let mut timer = Box::pin(sleep_until(self.deadline));
        let state = timer.as_mut().poll(cx);
        self.set = TimerState::Timer(timer);
        state
    }
}

impl Drop for DeadlineTimer {
    fn drop(&mut self) {
        if let TimerState::Listed { place, number } = self.set {
            // Not found if dropped on another thread; then the first walk after the deadline removes it.
            with_list(|list| list.remove(place, number));
        }
    }
}

/// The distant deadlines of one thread.
#[derive(Default)]
struct TimerList {
    /// When the list is walked next; `None`: no walk is running.
    next_walk: Option<Instant>,
    entries: Slab<TimerEntry>,
}

struct TimerEntry {
    deadline: Instant,
    waker: Waker,
    /// Unique across all threads.
    number: u64,
}

/// Shared with the task that walks the list.
type Shared = Arc<Mutex<TimerList>>;

thread_local! {
    static LIST: Shared = Shared::default();
    /// Numbers reserved for this thread.
    static NUMBERS: RefCell<std::ops::Range<u64>> = const { RefCell::new(0..0) };
}

/// Works on this thread's list. Wakers removed from it are returned and dropped outside the lock: dropping
/// one may use the list.
fn with_list<T: Default>(work: impl FnOnce(&mut TimerList) -> T) -> T {
    // The list is gone while the thread ends: then nothing is inserted, and a timer is set instead.
    LIST.try_with(|list| work(&mut lock(list))).unwrap_or_default()
}

fn next_number() -> u64 {
    const BLOCK: u64 = 1 << 20;
    static NEXT_BLOCK: AtomicU64 = AtomicU64::new(0);
    NUMBERS.with_borrow_mut(|numbers| {
        numbers.next().unwrap_or_else(|| {
            let first = NEXT_BLOCK.fetch_add(BLOCK, Ordering::Relaxed);
            *numbers = first + 1..first + BLOCK;
            first
        })
    })
}

impl TimerList {
    /// Inserts a deadline, unless it may pass before the next walk. Also returns when a walk has to start, if
    /// none is running.
    fn insert(&mut self, deadline: Instant, waker: &Waker) -> (Option<(usize, u64)>, Option<Instant>) {
        let begun = self.next_walk.is_none().then(|| Instant::now() + WALK_PERIOD);
        self.next_walk = self.next_walk.or(begun);
        if self.next_walk.is_some_and(|next| deadline <= next) {
            return (None, begun);
        }
        let number = next_number();
        let place = self.entries.insert(TimerEntry {
            deadline,
            waker: waker.clone(),
            number,
        });
        (Some((place, number)), begun)
    }

    /// Replaces the waker of an entry, if it is in the list, and returns the old one.
    fn update_waker(&mut self, place: usize, number: u64, waker: &Waker) -> Option<Option<Waker>> {
        let entry = self
            .entries
            .get_mut(place)
            .filter(|entry| entry.number == number)?;
        let other = !entry.waker.will_wake(waker);
        Some(other.then(|| std::mem::replace(&mut entry.waker, waker.clone())))
    }

    fn remove(&mut self, place: usize, number: u64) -> Option<Waker> {
        let entry = self.entries.get(place).filter(|entry| entry.number == number);
        entry.is_some().then(|| self.entries.remove(place).waker)
    }

    /// Removes the entries due before `next`; their futures then set a timer of their own.
    fn due_before(&mut self, next: Instant) -> Vec<Waker> {
        let due = self.entries.iter().filter(|(_, entry)| entry.deadline <= next);
        let due: Vec<usize> = due.map(|(place, _)| place).collect();
        due.into_iter()
            .map(|place| self.entries.remove(place).waker)
            .collect()
    }
}

/// Starts the task that walks this thread's list.
fn start_walk(first: Instant) {
    if let Ok(walk) = LIST.try_with(|list| ListWalk(Arc::clone(list))) {
        tokio::spawn(walk.run(first));
    }
}

struct ListWalk(Shared);

impl ListWalk {
    async fn run(self, first: Instant) {
        let mut next = first;
        loop {
            sleep_until(next).await;
            next = Instant::now() + WALK_PERIOD;
            let due = {
                let mut list = lock(&self.0);
                if list.entries.is_empty() {
                    list.next_walk = None;
                    return;
                }
                list.next_walk = Some(next);
                list.due_before(next)
            };
            due.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for ListWalk {
    fn drop(&mut self) {
        // Also runs if the runtime ends before the list is empty: the next runtime on this thread then starts
        // a new walk.
        lock(&self.0).next_walk = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use std::pin::pin;

    #[tokio::test(start_paused = true)]
    async fn work_is_waited_for_until_its_deadline() {
        // Scenario: work of 0, 1, 3, 20 and 40 seconds, with deadlines in 2 and 30 s, in the past, and
        // without one, twice each on one thread. Expectation: work that completes in time succeeds, as does
        // work ready at once after its deadline; the rest is dropped at the deadline and not later; without a
        // deadline everything completes.
        let second = Duration::from_secs(1);
        for _ in 0..2 {
            for (takes, deadline, expected) in [
                (0, Some(2), Some(0)),
                (1, Some(2), Some(1)),
                (3, Some(2), None),
                (0, Some(0), Some(0)),
                (1, Some(0), None),
                (3, None, Some(3)),
                (20, Some(30), Some(20)),
                (40, Some(30), None),
            ] {
                let begin = Instant::now();
                let deadline_at = deadline.map(|seconds| (begin + second * seconds).into_std());
                let work = async {
                    if takes > 0 {
                        tokio::time::sleep(second * takes).await;
                    }
                    takes
                };
                assert_eq!(
                    timeout_at(deadline_at, pin!(work)).await,
                    expected,
                    "{takes} s, {deadline:?}"
                );
                let lasted = if expected.is_some() {
                    takes
                } else {
                    deadline.unwrap_or(0)
                };
                assert!(begin.elapsed() <= second * lasted + Duration::from_millis(1));
            }
        }
        assert!(
            with_list(|list| list.entries.iter().next().is_none()),
            "noted still"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_wakes_who_polled_last() {
        // Scenario: work with a distant deadline is polled by a task that is gone, and then by this one; and a place in the list
        // that has another entry by now. Expectation: this task is woken at the deadline; that entry stays as it is.
        let begin = Instant::now();
        let deadline = begin + Duration::from_secs(30);
        let mut late = Box::pin(timeout_at(
            Some(deadline.into_std()),
            std::future::pending::<()>(),
        ));
        assert!(late.as_mut().now_or_never().is_none());
        let (place, number) = with_list(|list| list.insert(deadline, Waker::noop()))
            .0
            .expect("distant");
        assert!(with_list(|list| list.remove(place, number + 1)).is_none());
        assert!(with_list(|list| list.update_waker(place, number + 1, Waker::noop())).is_none());
        assert!(with_list(|list| list.remove(place, number)).is_some());
        // Its waker is the only one that is set for that time.
        let late = tokio::time::timeout(Duration::from_secs(60), late).await;
        assert_eq!(late, Ok(None));
        assert!(begin.elapsed() < Duration::from_secs(31), "{:?}", begin.elapsed());
    }

    #[test]
    fn a_thread_whose_runtime_ended_begins_anew() {
        // Scenario: two runtimes one after the other on one thread; the first ends while a timeout waits.
        // Expectation: the second one also honours a distant deadline.
        let waiting = || {
            timeout_at(
                Some(std::time::Instant::now() + Duration::from_secs(30)),
                std::future::pending::<()>(),
            )
        };
        for gives_up in [true, false] {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build();
            runtime.expect("a runtime").block_on(async {
                if gives_up {
                    tokio::spawn(waiting());
                    tokio::task::yield_now().await;
                } else {
                    assert_eq!(waiting().await, None);
                }
            });
        }
    }
}
