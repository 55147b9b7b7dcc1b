//! What reads cost the thread, and who is charged for it.

use super::*;
use crate::cores;

/// Runs `test` as a core on which tasks of several callers run.
fn on_a_shared_core<T>(test: impl FnOnce() -> T) -> T {
    cores::run_as(0, || {
        cores::note_shared(true);
        let result = test();
        cores::note_shared(false);
        result
    })
}

#[test]
fn a_callers_reads_are_charged_while_only_others_tasks_share_the_core() {
    // Scenario: one caller reads 1 MiB, while another's tasks run on the core and have no reads there; and again on a core that it
    // has for itself. Expectation: it is charged for the former, and in turns as short as beside reads of others.
    for is_shared in [true, false] {
        let mut world = World::new(8, 3 << 20);
        let read = |world: &mut World| {
            let _answer = world.send(&[(0, 1 << 20)], |batch| batch.origin = Some((1, 1)));
            assert!(world.poll().is_pending());
            assert!(world.poll().is_pending());
            let mut charged = Vec::new();
            cores::take_charges(|caller, time| charged.push((caller, time > Duration::ZERO)));
            (charged, world.shard.turn_copy_bytes)
        };
        let found = if is_shared {
            on_a_shared_core(|| read(&mut world))
        } else {
            cores::run_as(0, || read(&mut world))
        };
        let expected = if is_shared {
            (vec![(1, true)], SHARED_TURN_COPY_BYTES)
        } else {
            (Vec::new(), TURN_COPY_BYTES)
        };
        assert_eq!(found, expected, "{is_shared}");
    }
}

#[test]
fn starting_reads_is_charged() {
    // Scenario: on a shared core, a caller's reads are started, and none finishes in that turn. Expectation: it is charged.
    let mut world = World::new(8, 1 << 20);
    world.control.hold();
    let ranges = [0, 1, 2, 3].map(|read| (read * 100_000, 4096));
    let _answer = world.send(&ranges, |batch| batch.origin = Some((1, 1)));
    let mut charged = Vec::new();
    on_a_shared_core(|| {
        assert!(world.poll().is_pending());
        cores::take_charges(|caller, time| charged.push((caller, time > Duration::ZERO)));
    });
    assert_eq!(charged, [(1, true)]);
}

#[test]
fn a_long_turn_is_charged_in_part() {
    // Scenario: a turn of a second serves one caller three times as many bytes as another. Expectation: the two are charged for
    // 200 us of it, in that ratio.
    let mut world = World::new(1, 4096);
    for (caller, bytes) in [(1, 3000), (2, 1000)] {
        world.shard.served.add(Some((caller, 1)), bytes);
    }
    world.shard.charge(Duration::from_secs(1));
    let mut charged = Vec::new();
    cores::take_charges(|caller, time| charged.push((caller, time.as_micros())));
    assert_eq!(charged, [(1, 150), (2, 50)]);
}

#[test]
fn a_joined_reads_copy_is_charged_to_who_joined() {
    // Scenario: on a core that two callers share, one reads the same 1 MiB twice, of which the second read joins the first, and
    // the other reads 4 KiB; all of them arrive in one turn, in which the 1 MiB are copied. Expectation: the first caller is
    // charged for most of it.
    // The thread may have no CPU during any of them, and that counts, too: the least of several.
    let mut charges = [Duration::MAX; 3];
    for _ in 0..20 {
        let mut world = World::new(8, 3 << 20);
        world.control.hold();
        let large = (0, 1 << 20);
        let sent = [(large, (1, 1)), (large, (1, 1)), ((2 << 20, 4096), (2, 2))];
        let _answers = sent.map(|(range, origin)| world.send(&[range], |batch| batch.origin = Some(origin)));
        let found: [Duration; 3] = on_a_shared_core(|| {
            assert!(world.poll().is_pending());
            world.control.release_all();
            cores::take_charges(|_, _| ());
            assert!(world.poll().is_pending());
            let mut charges = [Duration::ZERO; 3];
            cores::take_charges(|caller, time| charges[usize::try_from(caller).expect("small")] += time);
            charges
        });
        charges = [0, 1, 2].map(|caller: usize| charges[caller].min(found[caller]));
    }
    assert!(charges[1] > charges[2], "{charges:?}");
}

/// Makes `count` batches of one byte join the read in flight, which covers it.
fn join(world: &mut World, count: usize) -> Vec<Reply> {
    let mut answers = Vec::new();
    while answers.len() < count {
        answers.extend((0..200).map(|_| world.send(&[(5, 1)], |_| {})));
        assert!(world.poll().is_pending());
    }
    assert_eq!(
        world.metrics.queued.load(Ordering::Relaxed),
        i64::try_from(answers.len()).expect("few")
    );
    answers
}

#[test]
fn joiners_of_few_bytes_are_answered_in_several_turns() {
    // Scenario: 10,000 batches of one byte have joined a read, which finishes. Expectation: no turn answers more than some
    // thousands of them, and further turns all.
    let mut world = World::new(1, 4096);
    world.control.hold();
    let _first = world.send(&[(0, 4096)], |_| {});
    assert!(world.poll().is_pending());
    let mut waiting = join(&mut world, 10_000);
    world.control.release_all();
    for turns in 0.. {
        let before = waiting.len();
        assert!(world.poll().is_pending());
        waiting.retain_mut(|answer| answer.try_recv().is_err());
        let answered = before - waiting.len();
        assert!((1..4096).contains(&answered), "{answered} in turn {turns}");
        if waiting.is_empty() {
            break;
        }
    }
    assert!(world.poll().is_pending());
    assert!(world.shard.is_idle());
}

#[test]
fn joiners_that_nobody_waits_for_are_let_go_in_several_turns() {
    // Scenario: 10,000 batches have joined a read that does not finish, and their callers leave; the engine is tended again and
    // again. Expectation: each time some thousands of them are let go, until none is left.
    let mut world = World::new(1, 4096);
    world.control.hold();
    let _first = world.send(&[(0, 4096)], |_| {});
    assert!(world.poll().is_pending());
    drop(join(&mut world, 10_000));
    let later = Instant::now() + Duration::from_secs(2);
    let mut queued = 10_000;
    while queued > 0 {
        world.shard.tend(later);
        let left = world.metrics.queued.load(Ordering::Relaxed);
        assert!((1..=4096).contains(&(queued - left)), "{left} of {queued}");
        queued = left;
    }
}

#[test]
fn a_read_that_joined_before_its_turn_has_time_on_the_disk() {
    // Scenario: a read is in flight, another one waits for its turn, and a third one joins the first. Expectation: what the first
    // one still takes is no time of the third one in the queue.
    let mut world = World::new(1, 100_000);
    world.control.hold();
    let [_first, _waits, mut joined] = [0, 50_000, 0].map(|offset| world.send(&[(offset, 1000)], |_| {}));
    assert!(world.poll().is_pending());
    assert_eq!(world.metrics.joined_reads.load(Ordering::Relaxed), 1);
    let begun = Instant::now();
    while Instant::now() == begun {
        std::hint::spin_loop();
    }
    world.control.release_all();
    assert!(world.poll().is_pending());
    let times = joined.try_recv().expect("answered").expect("read").times;
    assert!(times.queue_ns < times.total_ns, "{times:?}");
}
