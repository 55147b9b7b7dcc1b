//! Devices that do not answer.

use super::*;
use crate::series::HistogramTotal;

impl World {
    /// A shard whose backend has as many slots again as its depth, as a ring has.
    fn with_spare_slots(depth: u32, file_bytes: usize, disks: &[u64]) -> Self {
        let mut world = Self::on_disks(depth, file_bytes, disks);
        let mut backend = SimBackend::new(&world.control);
        backend.spare_slots = depth;
        let (mailbox, inbox) = inbox();
        world.mailbox = mailbox;
        world.shard = Shard::new(backend, inbox, Arc::clone(&world.metrics), 0);
        world
    }
}

#[test]
fn what_nobody_waits_for_is_let_go() {
    // Scenario: a device that does not answer; behind its queue of one wait two batches, and three have joined the read in
    // flight, one of which has a further read; the callers leave or their deadline passes, but for one that joined. The engine
    // is tended. Later the device answers. Expectation: only the read in flight and the one that is waited for are left, and
    // get their bytes.
    let mut world = World::new(1, 100_000);
    world.control.hold();
    let mut first = world.send(&[(0, 1000)], |_| {});
    assert!(world.poll().is_pending());
    let left = [10_000, 20_000, 500].map(|offset| world.send(&[(offset, 100)], |_| {}));
    let later = Instant::now() + Duration::from_secs(3600);
    let mut late = [vec![(500, 100)], vec![(500, 100), (30_000, 100)]]
        .map(|ranges| world.send(&ranges, |batch| batch.deadline = Some(later)));
    let mut joined = world.send(&[(500, 100)], |_| {});
    assert!(world.poll().is_pending());
    assert_eq!(world.metrics.queued.load(Ordering::Relaxed), 7);
    drop(left);
    world.shard.tend(later);
    assert_eq!(world.metrics.queued.load(Ordering::Relaxed), 1);
    assert_eq!(world.shard.actives.iter().flatten().count(), 2);
    for answer in &mut late {
        let answer = answer.try_recv().expect("answered");
        assert_eq!(answer.expect_err("it is late"), ReadError::DeadlineExceeded);
    }
    world.control.release_all();
    assert!(world.poll().is_pending());
    for answer in [&mut first, &mut joined] {
        let fetched = answer.try_recv().expect("answered").expect("read");
        assert!(fetched.errors.is_empty() && !fetched.data.is_empty());
    }
    assert!(world.shard.is_idle());
    assert_eq!(world.metrics.queued.load(Ordering::Relaxed), 0);
    assert_eq!(world.shard.actives.len(), world.shard.free_actives.len());
}

#[tokio::test]
async fn a_device_that_hangs_keeps_nothing_of_who_left() {
    // Scenario: a device that does not answer, without room for a further read; one caller waits, and 10,000 come and leave.
    // Later the device answers. Expectation: hardly any numbers of batches are kept; who waited is answered.
    let mut world = World::new(1, 100_000);
    world.control.hold();
    let mut answers = [0, 10_000].map(|offset| world.send(&[(offset, 1000)], |_| {}));
    for number in 0..10_000 {
        let _left = world.send(&[(20_000, 10)], |batch| batch.origin = Some((number, number)));
        assert!(world.poll().is_pending());
        // A task may not receive without end.
        tokio::task::yield_now().await;
    }
    assert!(world.shard.actives.len() < 200, "{}", world.shard.actives.len());
    world.control.release_all();
    assert!(world.poll().is_pending());
    for answer in &mut answers {
        let fetched = answer.try_recv().expect("answered").expect("read");
        assert_eq!(fetched.data.len(), 1000);
    }
    assert!(world.shard.is_idle());
    assert_eq!(world.shard.actives.len(), world.shard.free_actives.len());
}

#[tokio::test]
async fn reads_of_a_disk_that_hangs_leave_the_depth_to_others() {
    // Scenario: a device that does not answer has all four reads that may be in flight, and more are queued, one of them for
    // a caller that leaves; then another dataset is read, one on the same disk, and the first one again, also by 1000 callers
    // that leave. Later the device answers. Expectation: of that disk nothing more is started, and the other is read; who left
    // is forgotten; in the end all are answered, and nothing is left.
    let mut world = World::with_spare_slots(4, 100_000, &[1]);
    world.control.hold();
    let ranges = |count: u64| (0..count).map(|item| (item * 1000, 10)).collect::<Vec<_>>();
    let (other, same) = (
        World::on_disks(1, 100_000, &[2]),
        World::on_disks(1, 100_000, &[1]),
    );
    let send =
        |world: &World, of: &World| world.send(&ranges(1), |batch| batch.dataset = Arc::clone(&of.dataset));
    let mut answers = vec![world.send(&ranges(7), |_| {})];
    assert!(world.poll().is_pending());
    assert_eq!(world.control.in_flight(), 4);
    let left = world.send(&[(50_000, 10)], |batch| batch.origin = Some((7, 0)));
    assert!(world.poll().is_pending());
    answers.extend([&other, &same].map(|of| send(&world, of)));
    assert!(world.poll().is_pending());
    assert_eq!(world.control.in_flight(), 4);
    world.shard.tend(Instant::now() + Duration::from_secs(5));
    assert!(world.poll().is_pending());
    let gauges = |world: &World| {
        (
            world.metrics.moving(),
            world.metrics.stalled.load(Ordering::Relaxed),
        )
    };
    assert_eq!(gauges(&world), (1, 4));
    for _ in 0..1000 {
        let _left = world.send(&[(70_000, 10)], |_| {});
        assert!(world.poll().is_pending());
        // A task may not receive without end.
        tokio::task::yield_now().await;
    }
    assert!(world.shard.actives.len() < 200, "{}", world.shard.actives.len());
    for _ in 0..3 {
        answers.push(world.send(&[(60_000, 10)], |batch| batch.origin = Some((8, 0))));
        assert!(world.poll().is_pending());
        assert_eq!(world.control.in_flight(), 4 + 1);
    }
    drop(left);
    world.shard.tend(Instant::now());
    world.control.release_all();
    assert!(world.poll().is_pending());
    assert_eq!(gauges(&world), (0, 0));
    for (answer, bytes) in answers.iter_mut().zip([70, 10, 10, 10, 10, 10]) {
        let fetched = answer.try_recv().expect("answered").expect("read");
        assert_eq!((fetched.errors.len(), fetched.data.len()), (0, bytes));
    }
    assert!(world.shard.is_idle());
    assert_eq!(world.metrics.queued.load(Ordering::Relaxed), 0);
    assert_eq!(world.shard.actives.len(), world.shard.free_actives.len());
}

/// 10 bytes for each of these items of a dataset whose files have 100,000 bytes.
fn items_of(file: u64, items: std::ops::Range<u64>) -> Vec<(u64, u64)> {
    items.map(|item| (file * 100_000 + item * 1000, 10)).collect()
}

#[test]
fn a_disk_that_hangs_leaves_the_datasets_other_disks_to_their_readers() {
    // Scenario: a dataset on two disks; the second one hangs, with all reads that may be in flight. Then items of the first are
    // read, by batches that find nothing waiting and by others, and by one that wants items of both; later the disk answers.
    // Expectation: what is on the first disk is read meanwhile, and no more of the second; in the end all are answered, and
    // nothing is left.
    let mut world = World::with_spare_slots(4, 100_000, &[1, 2]);
    world.control.hold();
    let mut answers = vec![(world.send(&items_of(1, 0..7), |_| {}), 70)];
    assert!(world.poll().is_pending());
    assert_eq!(world.control.in_flight(), 4);
    world.shard.tend(Instant::now() + Duration::from_secs(5));
    let alone = world.send(&items_of(0, 0..1), |_| {});
    assert!(world.poll().is_pending());
    assert_eq!(world.control.in_flight(), 5);
    answers.push((alone, 10));
    let both = [items_of(0, 1..2), items_of(1, 10..12)].concat();
    answers.push((world.send(&both, |_| {}), 30));
    assert!(world.poll().is_pending());
    assert_eq!(world.control.in_flight(), 6);
    answers.push((world.send(&items_of(0, 3..4), |_| {}), 10));
    world.control.release_all();
    assert!(world.poll().is_pending());
    for (mut answer, bytes) in answers {
        let fetched = answer.try_recv().expect("answered").expect("read");
        assert_eq!((fetched.errors.len(), fetched.data.len()), (0, bytes));
    }
    assert!(world.shard.is_idle() && world.shard.stalled.parked.is_empty());
    assert_eq!(world.metrics.queued.load(Ordering::Relaxed), 0);
    assert_eq!(world.shard.actives.len(), world.shard.free_actives.len());
}

#[test]
fn there_is_room_beside_several_disks_that_hang() {
    // Scenario: a disk hangs with all reads that may be in flight, then another one with all that are started of it beside those.
    // Expectation: reads of a third are started.
    let mut world = World::with_spare_slots(4, 100_000, &[1, 2, 3]);
    world.control.hold();
    // One moment, long after all that is started: between two that are further apart the process was paused.
    let later = Instant::now() + Duration::from_secs(3600);
    let mut answers = Vec::new();
    for disk in 0..3 {
        let before = world.control.in_flight();
        answers.push(world.send(&items_of(disk, 0..4), |_| {}));
        assert!(world.poll().is_pending());
        world.shard.tend(later);
        assert!(world.poll().is_pending());
        assert!(world.control.in_flight() > before, "disk {disk}");
    }
    world.control.release_all();
    assert!(world.poll().is_pending());
    for mut answer in answers {
        let fetched = answer.try_recv().expect("answered").expect("read");
        assert_eq!((fetched.errors.len(), fetched.data.len()), (0, 40));
    }
    assert!(world.shard.is_idle() && world.shard.stalled.parked.is_empty());
}

/// Lets the read in this slot have been in flight for longer than reads take.
fn make_old(world: &mut World, slot: u32) {
    if let Some(slot) = world.shard.in_flight.get_mut(slot) {
        slot.started = Instant::now().checked_sub(Duration::from_secs(10)).expect("up");
    }
}

#[test]
fn a_read_that_takes_long_costs_its_disk_one_slot() {
    // Scenario: of a disk's four reads in flight, with four more waiting, one takes long and the others are answered. Then the
    // whole disk hangs, and later answers all but one; another disk is read meanwhile. Expectation: three reads are in flight
    // beside the one that takes long, also after the disk has answered; while it hangs, no more of it are started.
    let mut world = World::with_spare_slots(4, 100_000, &[1, 2]);
    world.control.hold();
    // One moment: between two that are further apart the process was paused.
    let now = Instant::now();
    let mut answers = vec![(world.send(&items_of(0, 0..8), |_| {}), 80)];
    assert!(world.poll().is_pending());
    make_old(&mut world, 3);
    world.shard.tend(now);
    world.control.release(3);
    assert!(world.poll().is_pending());
    assert_eq!(
        (world.control.in_flight(), world.shard.stalled.parked.len()),
        (4, 0)
    );
    answers.push((world.send(&items_of(0, 20..25), |_| {}), 50));
    assert!(world.poll().is_pending());
    (0..4).for_each(|slot| make_old(&mut world, slot));
    world.shard.tend(now);
    answers.push((world.send(&items_of(1, 0..1), |_| {}), 10));
    assert!(world.poll().is_pending());
    assert_eq!(
        (world.control.in_flight(), world.shard.stalled.parked.len()),
        (5, 2)
    );
    assert_eq!(world.metrics.stalled.load(Ordering::Relaxed), 4);
    world.control.release(3);
    assert!(world.poll().is_pending());
    assert_eq!(
        (world.control.in_flight(), world.shard.stalled.parked.len()),
        (4, 0)
    );
    assert_eq!(world.metrics.stalled.load(Ordering::Relaxed), 0);
    world.control.release_all();
    assert!(world.poll().is_pending());
    for (mut answer, bytes) in answers {
        let fetched = answer.try_recv().expect("answered").expect("read");
        assert_eq!((fetched.errors.len(), fetched.data.len()), (0, bytes));
    }
    assert!(world.shard.is_idle() && world.shard.stalled.disks.is_empty());
}

#[test]
fn a_long_read_does_not_wait_for_a_disk_that_hangs_with_short_ones() {
    // Scenario: a disk hangs with half of the reads that may be in flight, or more, all short; a read of 3 MiB of another disk, with
    // which more bytes would be in flight than may be, waits. Expectation: it is started once those have stalled.
    for count in [2, 3] {
        let mut world = World::with_spare_slots(4, 4 << 20, &[1, 2]);
        world.control.hold();
        let short: Vec<_> = (0..count).map(|item| ((4 << 20) + item * 100_000, 10)).collect();
        let _hang = world.send(&short, |batch| batch.origin = Some((1, 1)));
        assert!(world.poll().is_pending());
        let mut long = world.send(&[(0, 3 << 20)], |batch| {
            batch.origin = Some((1, 2));
            let reads = &mut batch.plan.reads;
            reads.truncate(1);
            (reads[0].length, reads[0].needed) = (3 << 20, 3 << 20);
        });
        assert!(world.poll().is_pending());
        assert_eq!(world.control.in_flight(), short.len());
        world.shard.tend(Instant::now() + Duration::from_secs(5));
        assert!(world.poll().is_pending());
        assert_eq!(world.control.in_flight(), short.len() + 1);
        world.control.release_all();
        assert!(world.poll().is_pending());
        let fetched = long.try_recv().expect("answered").expect("read");
        assert_eq!(fetched.data.len(), 3 << 20);
    }
}

#[test]
fn a_disk_that_hangs_no_more_once_there_is_more_room_is_read_again() {
    // Scenario: a disk hangs, and another one with both reads that there is room for beside it; then the first answers, and those
    // two are only half of what may be in flight. Expectation: at the next tick a third is started beside them.
    let mut world = World::with_spare_slots(4, 100_000, &[1, 2]);
    world.control.hold();
    // One moment, long after all that is started: between two that are further apart the process was paused.
    let later = Instant::now() + Duration::from_secs(3600);
    let _answers = [(0, 4), (1, 3)].map(|(disk, count)| world.send(&items_of(disk, 0..count), |_| {}));
    for (released, in_flight, parked) in [(0, 6, 0), (0, 6, 1), (4, 3, 0)] {
        world.control.release(released);
        assert!(world.poll().is_pending());
        world.shard.tend(later);
        assert!(world.poll().is_pending());
        assert_eq!(
            (world.control.in_flight(), world.shard.stalled.parked.len()),
            (in_flight, parked)
        );
    }
}

#[test]
fn a_pause_of_the_process_is_no_disk_that_hangs() {
    // Scenario: more reads than may be in flight; the process is stopped for a while (SIGSTOP), or its thread is; then the engine is
    // tended, twice at once, since ticks were missed, before what the disk has completed meanwhile is taken; nothing completes until the
    // next time. Expectation: the disk hangs only then.
    let mut world = World::with_spare_slots(4, 100_000, &[1]);
    world.control.hold();
    let _answer = world.send(&items_of(0, 0..8), |_| {});
    assert!(world.poll().is_pending());
    (0..4).for_each(|slot| make_old(&mut world, slot));
    let before = Instant::now().checked_sub(Duration::from_secs(10)).expect("up");
    world.shard.tend(before);
    for (tended, hanging) in [(2, 0), (1, 1)] {
        (0..tended).for_each(|_| world.mailbox.try_command(Control::Tend));
        assert!(world.poll().is_pending());
        assert_eq!(world.shard.stalled.disks.len(), hanging);
    }
}

#[test]
fn one_object_that_takes_long_stops_nothing_else_of_its_disk() {
    // Scenario: two reads of 1 MiB, as of an object, are all the bytes that may be in flight, and take long; another item of
    // their disk waits. Expectation: it is started.
    let mut world = World::with_spare_slots(128, 8 << 20, &[1]);
    world.control.hold();
    let _slow = world.send(&[(0, 2 << 20)], |batch| batch.origin = Some((1, 1)));
    assert!(world.poll().is_pending());
    let _other = world.send(&[(4 << 20, 10)], |batch| batch.origin = Some((1, 2)));
    assert!(world.poll().is_pending());
    assert_eq!(world.control.in_flight(), 2);
    world.shard.tend(Instant::now() + Duration::from_secs(5));
    assert!(world.poll().is_pending());
    let parked = world.shard.stalled.parked.len();
    assert_eq!((world.control.in_flight(), parked), (3, 0));
}

/// Of no disk more than the depth of 4 reads is in flight, and those of disks that hang count towards no limit.
fn check_counts(world: &mut World) {
    let shard = &mut world.shard;
    let reads: Vec<_> = (0..8)
        .filter_map(|slot| shard.in_flight.get_mut(slot).map(|slot| slot.tracked))
        .collect();
    for file in 0..3 {
        assert!(reads.iter().filter(|tracked| tracked.read.file == file).count() <= 4);
    }
    let hanging = shard.stalled.disks.iter().filter(|disk| disk.hangs);
    let held = hanging.map(|disk| disk.reads).sum::<u32>();
    assert_eq!(shard.in_flight.moving() + held, shard.in_flight.len());
}

#[test]
fn nothing_is_left_behind_whatever_disks_hang_and_answer() {
    // Scenario: three disks answer some of their reads, late; batches of random items of them come, some of whose callers leave
    // or have a deadline; the engine is tended, when some or all reads have stalled. In the end the disks answer. Expectation: no
    // batch waits for a disk unless it hangs, and none has more reads in flight than the depth; whoever waits gets its bytes, or
    // was late; nothing is left.
    let mut world = World::with_spare_slots(4, 20_000, &[1, 2, 3]);
    let mut random = fastrand::Rng::with_seed(7);
    let mut stalls = 0;
    for _ in 0..300 {
        world.control.hold();
        let mut waiting = Vec::new();
        for _ in 0..random.usize(1..40) {
            match random.u8(..8) {
                0 => {
                    // All have stalled, or some.
                    let old = if random.bool() { 0..8 } else { 0..random.u32(0..8) };
                    for slot in old {
                        make_old(&mut world, slot);
                    }
                    world.shard.tend(Instant::now());
                }
                1 => drop(world.control.release(random.usize(..4))),
                2 if !waiting.is_empty() => drop(waiting.swap_remove(random.usize(..waiting.len()))),
                _ => {
                    let count = random.u8(1..20);
                    let mut item = |_| (random.u64(..3) * 20_000 + random.u64(..8) * 1000, 10);
                    let ranges: Vec<(u64, u64)> = (0..count).map(&mut item).collect();
                    let answer = world.send(&ranges, |batch| {
                        batch.origin = Some((random.u64(..3), random.u64(..9)));
                        batch.deadline = random.bool().then(|| Instant::now() + Duration::from_secs(4));
                        random.shuffle(&mut batch.plan.reads);
                    });
                    waiting.push((answer, ranges));
                }
            }
            if random.bool() {
                assert!(world.poll().is_pending());
                let hanging = world.shard.stalled.disks.iter().filter(|disk| disk.hangs).count();
                stalls = stalls.max(hanging);
                assert!(hanging > 0 || world.shard.stalled.parked.is_empty());
                check_counts(&mut world);
            }
        }
        world.control.release_all();
        assert!(world.poll().is_pending() && world.shard.is_idle());
        for (mut answer, ranges) in waiting {
            let bytes = |&(from, _): &(u64, u64)| (0..10).map(move |byte| (from % 20_000 + byte) % 251);
            match answer.try_recv().expect("answered") {
                Ok(fetched) => assert!(
                    fetched
                        .data
                        .iter()
                        .map(|byte| u64::from(*byte))
                        .eq(ranges.iter().flat_map(bytes))
                ),
                Err(error) => assert_eq!(error, ReadError::DeadlineExceeded),
            }
        }
        assert!(world.shard.stalled.parked.is_empty());
        assert_eq!(world.metrics.queued.load(Ordering::Relaxed), 0);
        assert_eq!(world.shard.actives.len(), world.shard.free_actives.len());
    }
    assert_eq!(stalls, 3, "all disks have hung at the same time");
}

#[test]
fn a_read_that_its_caller_gives_up_at_the_deadline_was_late() {
    // Scenario: a device that answers late; a read in flight and one that waits, with a deadline, and the same without; all four
    // callers leave after the deadline. Expectation: two reads have missed it, two were abandoned, and only these are timed: a
    // read burns one budget.
    let mut world = World::new(1, 100_000);
    world.control.hold();
    let now = Instant::now();
    let accepted = now.checked_sub(Duration::from_secs(1)).expect("the host is up");
    let later = Some(now + Duration::from_secs(3600));
    let answers = [(0, later), (10_000, later), (20_000, None), (30_000, None)].map(|(offset, deadline)| {
        world.send(&[(offset, 10)], |batch| {
            (batch.accepted, batch.deadline) = (accepted, deadline);
        })
    });
    assert!(world.poll().is_pending());
    // They pass here, however long that took.
    let actives = world.shard.actives.iter_mut().flatten();
    let mut passed = 0;
    for deadline in actives.filter_map(|active| active.batch.deadline.as_mut()) {
        *deadline = now;
        passed += 1;
    }
    assert_eq!(passed, 2);
    drop(answers);
    world.control.release_all();
    assert!(world.poll().is_pending());
    assert!(world.shard.is_idle());
    let counters = world.metrics.dataset("data", BackendKind::Sim);
    let counted = |result| counters.failed(result);
    assert_eq!(
        (counted(ReadError::DeadlineExceeded.label()), counted("abandoned")),
        (2, 2)
    );
    let mut total = HistogramTotal::default();
    counters.total_time.merge_into(&mut total);
    assert_eq!(total.count, 2);
}

#[test]
fn what_is_given_up_after_long_was_slow() {
    // Scenario: a device that answers late; reads in flight, waiting, joined and in the inbox, accepted a second ago, and then
    // others that wait for no time, since they are accepted later than now; all callers leave. Expectation: those that waited
    // for long are timed, with the time that they waited; the others are not.
    let now = Instant::now();
    let before = now.checked_sub(Duration::from_secs(1)).expect("the host is up");
    for (accepted, slow) in [(before, 4), (now + Duration::from_secs(3600), 0)] {
        let mut world = World::new(1, 100_000);
        world.control.hold();
        let send = |world: &World, offset| world.send(&[(offset, 10)], |batch| batch.accepted = accepted);
        let answers = [0, 10_000, 0].map(|offset| send(&world, offset));
        assert!(world.poll().is_pending());
        drop(answers);
        drop(send(&world, 20_000));
        assert!(world.poll().is_pending());
        world.control.release_all();
        assert!(world.poll().is_pending());
        assert!(world.shard.is_idle());
        let counters = world.metrics.dataset("data", BackendKind::Sim);
        assert_eq!(counters.failed("abandoned"), 4);
        let backend = &world.metrics.per_backend(BackendKind::Sim);
        for times in [&counters.total_time, &backend.total_time] {
            let mut total = HistogramTotal::default();
            times.merge_into(&mut total);
            assert_eq!(total.count, slow);
            assert!(total.sum >= slow * 1_000_000_000, "{}", total.sum);
        }
    }
}
