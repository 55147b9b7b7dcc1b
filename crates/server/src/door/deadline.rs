//! Waiting no longer than until a deadline.
//!
//! Every request has a deadline, nearly all are answered long before it, and a timer each would cost more than the rest of
//! the door: a lock and a place in the wheel, twice. And tokio wakes its own thread by a system call whenever a timer is
//! set that comes before all others (ADR 0012). So a deadline that is far away is noted in a list of its thread, and the
//! list is walked every [`WALK_PERIOD`]: who is due before the next walk is woken and sets a timer. The walk's own timer
//! is earlier than nearly all of those.
//! Deliberately absent: walks when nobody waits; the last one ends within [`WALK_PERIOD`].

use slab::Slab;
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};

/// How often far deadlines are looked at. Nearer ones have a timer each.
const WALK_PERIOD: Duration = Duration::from_secs(1);

/// What comes of some work, or `None` if it takes until after the deadline. Work that is done at once is never late.
/// Pinned work, so that no future is moved into another: each such move doubles a request's state (ADR 0012).
///
/// # Cancel safety
/// As the work's.
pub(crate) fn until<F: Future + Unpin>(deadline: Option<std::time::Instant>, work: F) -> Until<F> {
    Until {
        work,
        alarm: deadline.map(|deadline| Alarm::new(deadline.into())),
    }
}

/// See [`until`].
pub(crate) struct Until<F> {
    work: F,
    alarm: Option<Alarm>,
}

impl<F: Future + Unpin> Future for Until<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(done) = Pin::new(&mut self.work).poll(cx) {
            return Poll::Ready(Some(done));
        }
        match &mut self.alarm {
            Some(alarm) => alarm.poll(cx).map(|()| None),
            None => Poll::Pending,
        }
    }
}

/// Goes off at a deadline.
struct Alarm {
    deadline: Instant,
    set: Set,
}

enum Set {
    Not,
    /// In the list of the thread that polled it last.
    Noted {
        place: usize,
        number: u64,
    },
    Timer(Pin<Box<Sleep>>),
}

impl Alarm {
    fn new(deadline: Instant) -> Self {
        Self {
            deadline,
            set: Set::Not,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Set::Noted { place, number } = self.set
            && with_list(|list| list.renew(place, number, cx.waker())).is_some()
        {
            return Poll::Pending;
        }
        if let Set::Timer(timer) = &mut self.set {
            return timer.as_mut().poll(cx);
        }
        let (noted, first_walk) = with_list(|list| list.note(self.deadline, cx.waker()));
        if let Some(first) = first_walk {
            begin_to_walk(first);
        }
        if let Some((place, number)) = noted {
            self.set = Set::Noted { place, number };
            return Poll::Pending;
        }
        let mut timer = Box::pin(sleep_until(self.deadline));
        let state = timer.as_mut().poll(cx);
        self.set = Set::Timer(timer);
        state
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Set::Noted { place, number } = self.set {
            // On another thread it is not found, and its own thread's next walk after the deadline forgets it.
            with_list(|list| list.strike(place, number));
        }
    }
}

/// The far deadlines of one thread.
#[derive(Default)]
struct List {
    /// When it is walked next; `None`: nobody walks.
    next_walk: Option<Instant>,
    entries: Slab<Entry>,
}

struct Entry {
    deadline: Instant,
    waker: Waker,
    /// Told apart from all others, of all threads.
    number: u64,
}

/// Shared with the task that walks it.
type Shared = Arc<Mutex<List>>;

thread_local! {
    static LIST: Shared = Shared::default();
    /// The numbers that this thread gives: from a block of its own.
    static NUMBERS: RefCell<std::ops::Range<u64>> = const { RefCell::new(0..0) };
}

/// Wakers that leave the list come back: what their end sets off may want the list.
fn with_list<T: Default>(work: impl FnOnce(&mut List) -> T) -> T {
    // Not there while the thread ends: then nothing is noted, and a timer is set.
    LIST.try_with(|list| work(&mut lock(list))).unwrap_or_default()
}

fn lock(list: &Shared) -> MutexGuard<'_, List> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
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

impl List {
    /// Notes a deadline, unless it may pass before the next walk. And when a walk has to begin that nobody does yet.
    fn note(&mut self, deadline: Instant, waker: &Waker) -> (Option<(usize, u64)>, Option<Instant>) {
        let begun = self.next_walk.is_none().then(|| Instant::now() + WALK_PERIOD);
        self.next_walk = self.next_walk.or(begun);
        if self.next_walk.is_some_and(|next| deadline <= next) {
            return (None, begun);
        }
        let number = next_number();
        let place = self.entries.insert(Entry {
            deadline,
            waker: waker.clone(),
            number,
        });
        (Some((place, number)), begun)
    }

    /// If the entry is there this waker is woken from now on, instead of the one that comes back.
    fn renew(&mut self, place: usize, number: u64, waker: &Waker) -> Option<Option<Waker>> {
        let entry = self
            .entries
            .get_mut(place)
            .filter(|entry| entry.number == number)?;
        let other = !entry.waker.will_wake(waker);
        Some(other.then(|| std::mem::replace(&mut entry.waker, waker.clone())))
    }

    fn strike(&mut self, place: usize, number: u64) -> Option<Waker> {
        let entry = self.entries.get(place).filter(|entry| entry.number == number);
        entry.is_some().then(|| self.entries.remove(place).waker)
    }

    /// Those who are due before `next` set a timer themselves.
    fn due_before(&mut self, next: Instant) -> Vec<Waker> {
        let due = self.entries.iter().filter(|(_, entry)| entry.deadline <= next);
        let due: Vec<usize> = due.map(|(place, _)| place).collect();
        due.into_iter()
            .map(|place| self.entries.remove(place).waker)
            .collect()
    }
}

/// Starts the task that walks this thread's list.
fn begin_to_walk(first: Instant) {
    if let Ok(walk) = LIST.try_with(|list| Walk(Arc::clone(list))) {
        tokio::spawn(walk.until_nobody_waits(first));
    }
}

/// The task that walks a list.
struct Walk(Shared);

impl Walk {
    async fn until_nobody_waits(self, first: Instant) {
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

impl Drop for Walk {
    fn drop(&mut self) {
        // Also where the runtime ends before the list is empty: the next one on this thread walks it again.
        lock(&self.0).next_walk = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[tokio::test(start_paused = true)]
    async fn work_is_waited_for_until_its_deadline() {
        // Scenario: work of no time, of 1, 3, 20 and 40 seconds, with deadlines in 2 and 30 s, in the past, and without one,
        // twice each on one thread. Expectation: what is done in time is seen, also at once after the deadline; the rest is
        // given up at the deadline and not later; without a deadline everything is waited for.
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
                    until(deadline_at, pin!(work)).await,
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

    #[test]
    fn a_thread_whose_runtime_ended_begins_anew() {
        // Scenario: two runtimes one after the other on one thread; the first ends while somebody waits. Expectation: in the
        // second one a deadline far away is kept too.
        let waiting = || {
            until(
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
