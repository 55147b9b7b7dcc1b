use super::*;
use ringfetch_engine::cores::{charge, count_parks, is_shared};
use std::future::{pending, poll_fn};
use tokio::task::{LocalSet, yield_now};

/// How long one poll takes: one and a half parts.
const WORK: Duration = Duration::from_micros(75);

fn of(id: u64, weight: u32) -> Rc<Caller> {
    CORE.with(|core| core.caller(id, &Weight::new(weight)))
}

fn work() {
    let begun = Instant::now();
    while begun.elapsed() < WORK {
        std::hint::spin_loop();
    }
}

/// Runs a test on a core: a thread of its own, since the state of turns is per thread.
fn on_a_core<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let core = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        LocalSet::new().block_on(&runtime, async { test().await });
    });
    core.join().expect("no panic");
}

/// A task of caller 1 that works and is ready again, for ever.
fn works(mut polled: impl FnMut() + 'static) {
    let task = async move {
        loop {
            work();
            polled();
            yield_now().await;
        }
    };
    drop(tokio::task::spawn_local(InTurn::new(of(1, 1), task)));
}

/// The most polls of `greedy` tasks between two polls of another caller's task, when all of them are always
/// ready. `begun`: the tasks exist.
async fn polls_between(greedy: usize, begun: impl FnOnce()) -> u32 {
    let polled = Rc::new(Cell::new(0_u32));
    for _ in 0..greedy {
        let polled = Rc::clone(&polled);
        works(move || polled.set(polled.get() + 1));
    }
    begun();
    let modest = async move {
        let (mut most, mut since) = (0, Instant::now());
        // In the first turns the core is not yet known to be shared; nor after one in which the thread had no CPU for as long
        // as it counts as shared.
        for turn in 0..200 {
            if turn >= 20 && since.elapsed() < SHARED_FOR {
                most = most.max(polled.get());
            }
            polled.set(0);
            since = Instant::now();
            yield_now().await;
        }
        most
    };
    let modest = tokio::task::spawn_local(InTurn::new(of(2, 1), modest));
    modest.await.expect("no panic")
}

#[test]
fn a_caller_with_many_tasks_has_its_part_of_time_between_two_turns_of_another() {
    // 64 tasks of one caller, whose weight has changed, and one of another. Expectation: one poll, which takes longer than
    // the part of a round; with nine times the weight six to seven, or fewer if all were interrupted. Without turns it would
    // be 64.
    for (weight, polls) in [(1, 1..=1), (9, 2..=7)] {
        on_a_core(move || async move {
            let caller = of(1, 10 - weight);
            let most = polls_between(64, || caller.weight.set(weight)).await;
            assert!(polls.contains(&most), "weight {weight}: {most}");
        });
    }
}

#[test]
fn who_is_refused_has_less_than_its_part() {
    // Two tasks: one is always ready and refuses a request in each poll, which takes no time; the other is
    // another caller's. Expectation: the first gets one poll for every four of the other, as if each took
    // four parts of a round; on a connection that has served several callers, one for each.
    for (serves_several, polls) in [(false, 1..=60), (true, 150..=250)] {
        on_a_core(move || async move {
            let polled = Rc::new(Cell::new(0_u32));
            let seen = Rc::clone(&polled);
            let refusing = async move {
                for id in [7, 8, 1].iter().filter(|_| serves_several) {
                    CORE.with(|core| core.work_for(*id, &Weight::new(1)));
                    yield_now().await;
                }
                loop {
                    note_refusal();
                    seen.set(seen.get() + 1);
                    yield_now().await;
                }
            };
            drop(tokio::task::spawn_local(InTurn::new(of(1, 1), refusing)));
            let other = async move {
                for turn in 0..220 {
                    // Until then its credit is being used up.
                    if turn == 20 {
                        polled.set(0);
                    }
                    yield_now().await;
                }
                polled.get()
            };
            let polled = InTurn::new(of(2, 1), other).await;
            assert!(polls.contains(&polled), "{polled}");
        });
    }
}

#[test]
fn all_tasks_of_a_caller_are_served_in_the_order_of_arrival() {
    // 16 tasks of one caller that are always ready, and another caller. Expectation: no task gets many more
    // turns than another.
    on_a_core(|| async {
        let turns = Rc::new(RefCell::new([0_u32; 16]));
        for number in 0..16 {
            let turns = Rc::clone(&turns);
            works(move || turns.borrow_mut()[number] += 1);
        }
        let until = async {
            while turns.borrow().iter().sum::<u32>() < 1600 {
                yield_now().await;
            }
        };
        InTurn::new(of(2, 1), until).await;
        let turns = turns.borrow();
        let (least, most) = (turns.iter().min().expect("16"), turns.iter().max().expect("16"));
        assert!(*most - *least <= 3, "{turns:?}");
    });
}

#[test]
fn a_caller_alone_waits_for_nobody() {
    // 64 tasks of one caller, each polled ten times. Expectation: they are polled in order of arrival, round
    // after round, and the core is not shared.
    on_a_core(|| async {
        let order = Rc::new(RefCell::new(Vec::new()));
        let tasks: Vec<_> = (0..64)
            .map(|number| {
                let order = Rc::clone(&order);
                let task = async move {
                    for _ in 0..10 {
                        order.borrow_mut().push(number);
                        let mut is_second = false;
                        poll_fn(|cx| {
                            if std::mem::replace(&mut is_second, true) {
                                return Poll::Ready(());
                            }
                            cx.waker().wake_by_ref();
                            Poll::Pending
                        })
                        .await;
                    }
                };
                tokio::task::spawn_local(InTurn::new(of(1, 1), task))
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
        let expected: Vec<_> = (0..10).flat_map(|_| 0..64).collect();
        assert_eq!(*order.borrow(), expected);
        assert!(CORE.with(|core| core.rounds.get() == RoundState::None));
    });
}

#[test]
fn connections_with_a_backlog_do_not_delay_the_callers_others() {
    // 64 connections of one caller that send without pause, each with a task that it spawns, and one that does not.
    // Expectation: few polls of the former between two of the latter, as one of each is let on by turns; none of them gets many
    // more turns than another.
    on_a_core(|| async {
        let turns = Rc::new(RefCell::new([0_u32; 64]));
        for number in 0..64 {
            let turns = Rc::clone(&turns);
            let task = async move {
                note_backlog(true);
                let seen = Rc::clone(&turns);
                let spawned = async move {
                    loop {
                        work();
                        seen.borrow_mut()[number] += 1;
                        yield_now().await;
                    }
                };
                drop(tokio::task::spawn_local(InTurn::new(of(1, 1), spawned)));
            };
            drop(tokio::task::spawn_local(InTurn::new(of(1, 1), task)));
        }
        let sum = || turns.borrow().iter().sum::<u32>();
        let light = async {
            let mut most = 0;
            // In the first turns the core is not yet known to be shared.
            for turn in 0..500 {
                let (before, since) = (sum(), Instant::now());
                yield_now().await;
                if turn >= 20 && since.elapsed() < SHARED_FOR {
                    most = most.max(sum() - before);
                }
            }
            most
        };
        let most = InTurn::new(of(1, 1), light).await;
        assert!((1..=4).contains(&most), "{most}");
        let turns = turns.borrow();
        let (least, most) = (turns.iter().min().expect("64"), turns.iter().max().expect("64"));
        assert!(*most - *least <= 3, "{turns:?}");
    });
}

#[test]
fn tasks_that_are_dropped_while_they_wait_hold_nobody_up() {
    // 30 tasks of one caller wait; every other one is dropped, some while they may run. Expectation: the
    // others complete.
    on_a_core(|| async {
        let ended = Rc::new(Cell::new(0));
        drop(tokio::task::spawn_local(InTurn::new(of(2, 1), async {
            loop {
                yield_now().await;
            }
        })));
        let mut tasks = Vec::new();
        for number in 0..30 {
            let ended = Rc::clone(&ended);
            let task = async move {
                for _ in 0..3 {
                    work();
                    yield_now().await;
                }
                ended.set(ended.get() + 1);
            };
            let task = tokio::task::spawn_local(InTurn::new(of(1, 1), task));
            tasks.push((number, task));
        }
        yield_now().await;
        for (number, task) in tasks {
            if number % 2 == 0 {
                task.abort();
            } else {
                task.await.expect("no panic");
            }
        }
        assert!(ended.get() >= 15, "{}", ended.get());
    });
}

#[test]
fn a_connection_works_for_its_requests_callers_or_for_its_own() {
    // A connection's task dispatches requests of one caller, then also of another. Expectation: it works for
    // the first, then for the caller that it started with; what it spawns works for the caller of the
    // request.
    on_a_core(|| async {
        let spawned_for = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::clone(&spawned_for);
        let mut connection = Box::pin(InTurn::new(of(1, 1), async move {
            for requests in [vec![7], vec![7], vec![7, 8, 7], vec![8]] {
                for id in requests {
                    CORE.with(|core| core.work_for(id, &Weight::new(1)));
                    seen.borrow_mut().push(current().expect("a task is polled").id);
                }
                yield_now().await;
            }
        }));
        let mut worked_for = Vec::new();
        for _ in 0..4 {
            poll_fn(|cx| {
                assert!(connection.as_mut().poll(cx).is_pending());
                Poll::Ready(())
            })
            .await;
            worked_for.push(connection.turns.caller.id);
        }
        assert_eq!(worked_for, [7, 7, 7, 1]);
        assert_eq!(*spawned_for.borrow(), [7, 7, 7, 8, 7, 8]);
        assert!(current().is_none());
    });
}

#[test]
fn turns_end_when_one_caller_has_been_alone_for_a_while() {
    // 16 tasks of a caller that are always ready, and another caller once. Expectation: after a while nothing
    // is timed, no task waits and no debt is left, though tasks waited all the time before; all tasks go on.
    on_a_core(|| async {
        let polled = Rc::new(Cell::new(0_u32));
        for number in 0..16 {
            let polled = Rc::clone(&polled);
            works(move || polled.set(polled.get() | 1 << number));
        }
        yield_now().await;
        assert!(!is_shared());
        InTurn::new(of(2, 1), yield_now()).await;
        assert!(is_shared());
        let deadline = Instant::now() + 10 * SHARED_FOR;
        let (mut turns, mut waited) = (0, 0);
        while CORE.with(|core| core.shared_until.get().is_some()) {
            assert!(Instant::now() < deadline, "still shared");
            turns += 1;
            waited += u32::from(!of(1, 1).waiting.borrow().is_empty());
            yield_now().await;
        }
        assert!(waited > turns / 2, "{waited} of {turns}");
        assert!(!is_shared());
        yield_now().await;
        let caller = of(1, 1);
        assert!(caller.waiting.borrow().is_empty() && caller.balance.get() == caller.full());
        assert!(CORE.with(|core| core.busy.borrow().is_empty()));
        polled.set(0);
        for _ in 0..3 {
            yield_now().await;
        }
        assert_eq!(polled.get(), 0xffff);
    });
}

#[test]
fn what_a_core_keeps_of_its_callers_is_bounded() {
    // Scenario: ten thousand callers come and go; a poll of another takes a second, and so do a hundred more. Expectation: few
    // are remembered; the first poll counts as four parts of a round, and all of them as no more than twenty in debt.
    on_a_core(|| async {
        for id in 0..10_000 {
            drop(of(id, 1));
        }
        assert!(CORE.with(|core| core.callers.borrow().len() <= 4 * CALLERS_MIN));
        let caller = of(1, 1);
        CORE.with(|core| core.took(&caller, Duration::from_secs(1)));
        assert_eq!(caller.balance.get(), caller.full() - 4 * PART_NS);
        for _ in 0..100 {
            caller.charge(Duration::from_secs(1));
        }
        assert_eq!(caller.balance.get(), -DEBT_NS_MAX);
    });
}

#[test]
fn what_a_shard_spends_for_a_caller_is_part_of_its_time() {
    // The core's shard spends eight parts of a round for a caller, in two turns; and again, before the core is idle, and before
    // it is no longer shared. Expectation: the next round deducts the former, and adds one; the others are forgotten.
    on_a_core(|| async {
        let caller = of(1, 1);
        let spend = || (0..2).for_each(|_| charge(1, 4 * Duration::from_nanos(PART_NS.unsigned_abs())));
        spend();
        CORE.with(Core::begin_round);
        assert_eq!(caller.balance.get(), caller.full() - 7 * PART_NS);
        for forget in [Core::forgive, Core::end_turns] {
            spend();
            CORE.with(|core| {
                forget(core);
                core.begin_round();
            });
            assert_eq!(caller.balance.get(), caller.full());
        }
    });
}

#[test]
fn no_task_overtakes_one_of_its_caller_that_waits() {
    // Two tasks of a caller without time wait; then it has time, and a third one comes. Expectation: that one waits too.
    on_a_core(|| async {
        CORE.with(|core| core.shared_until.set(Some(Instant::now() + SHARED_FOR)));
        let caller = of(1, 1);
        let waits = |task: &mut Pin<Box<InTurn<std::future::Ready<()>>>>| {
            let polled = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            polled.is_pending()
        };
        let task = || Box::pin(InTurn::new(Rc::clone(&caller), std::future::ready(())));
        let mut tasks = [task(), task(), task()];
        caller.balance.set(0);
        assert!(waits(&mut tasks[0]) && waits(&mut tasks[1]));
        caller.balance.set(PART_NS);
        assert!(waits(&mut tasks[2]));
        caller.let_on();
        assert!(!waits(&mut tasks[0]));
    });
}

#[test]
fn what_is_used_while_the_core_has_nothing_else_to_do_is_not_counted() {
    // Two callers; one works for longer than all its credit, in polls between which the core is idle.
    // Expectation: it never waits, so the core does not poll its sockets more often for it.
    on_a_core(|| async {
        count_parks();
        for id in [1, 2, 1, 2] {
            InTurn::new(of(id, 1), async {}).await;
        }
        let task = async {
            for _ in 0..40 {
                work();
                let before = parks();
                // A timer runs only after a park, however late this thread gets to it.
                let never = tokio::time::timeout(Duration::from_millis(1), pending::<()>()).await;
                assert!(never.is_err() && parks() > before, "the core was idle");
                // However long that took, the core is still shared.
                InTurn::new(of(2, 1), async {}).await;
            }
        };
        InTurn::new(of(1, 1), task).await;
        assert!(40 * WORK.as_nanos() > 2 * u128::try_from(CREDIT_NS_MAX).expect("positive"));
        assert!(CORE.with(|core| core.rounds.get() == RoundState::None));
    });
}
