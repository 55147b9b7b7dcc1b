//! Copies of reads that do not end where their bytes belong.

use super::*;
use crate::plan::Place;

const ITEMS: u32 = 16;
const ITEM_BYTES: u32 = 64 << 10;
const READ_BYTES: u32 = ITEMS * ITEM_BYTES;

/// Sends a batch whose items are merged into one read, into scratch memory, at this multiple of its length.
fn send(world: &World, number: u64, caller: Option<u64>) -> (u64, Reply) {
    let first = number * u64::from(READ_BYTES);
    let item = |item| (first + u64::from(item * ITEM_BYTES), u64::from(ITEM_BYTES));
    let ranges: Vec<_> = (0..ITEMS).map(item).collect();
    let answer = world.send(&ranges, |batch| {
        batch.origin = caller.map(|caller| (caller, 0));
        batch.scratch = Some(world.arena.reserve(READ_BYTES.into(), None).expect("memory"));
        let mut read = batch.plan.reads[0];
        (read.length, read.needed, read.pieces) = (READ_BYTES, READ_BYTES, ITEMS);
        read.place = Place::Scratch(0);
        batch.plan.reads = std::iter::once(read).collect();
        for (piece, number) in batch.plan.pieces.iter_mut().zip(0..) {
            piece.source = number * ITEM_BYTES;
        }
    });
    (first, answer)
}

/// Polls until all have their bytes, with a heartbeat before and `check` after each turn. Returns the number of turns.
fn turns_until_answered(
    world: &mut World,
    mut answers: Vec<(u64, Reply)>,
    check: impl Fn(&Shard<SimBackend>),
) -> usize {
    for turn in 1..1000 {
        let (reply, mut beat) = oneshot::channel();
        world.mailbox.try_command(Control::Beat(reply));
        assert!(world.poll().is_pending());
        assert_eq!(beat.try_recv(), Ok(()));
        check(&world.shard);
        answers.retain_mut(|(first, answer)| {
            let Ok(fetched) = answer.try_recv() else {
                return true;
            };
            let fetched = fetched.expect("read");
            let bytes =
                (*first..*first + u64::from(READ_BYTES)).map(|at| u8::try_from(at % 251).expect("small"));
            assert!(fetched.errors.is_empty() && fetched.data.iter().copied().eq(bytes));
            false
        });
        if answers.is_empty() {
            assert!(world.poll().is_pending());
            assert!(world.shard.is_idle() && world.control.in_flight() == 0);
            assert_eq!(world.shard.in_flight.put_off_bytes, 0);
            assert_eq!(world.metrics.queued.load(Ordering::Relaxed), 0);
            return turn;
        }
    }
    panic!("no answer");
}

#[test]
fn reads_that_finish_together_are_copied_in_several_turns() {
    // Scenario: reads of 1 MiB finish in one turn: eight of them; two of two callers, of which one is joined by a third.
    // Expectation: a turn copies 1 MiB; 128 KiB, and what is copied whole for the third.
    let mut world = World::new(32, 8 << 20);
    world.control.hold();
    let answers: Vec<_> = (0..8).map(|number| send(&world, number, None)).collect();
    assert!(world.poll().is_pending());
    assert_eq!(world.control.release_all(), 8);
    let turns = turns_until_answered(&mut world, answers, |shard| {
        assert!(shard.copied <= TURN_COPY_BYTES);
    });
    assert!((8..=9).contains(&turns), "{turns}");

    let mut world = World::new(32, 8 << 20);
    world.control.hold();
    let mut answers = Vec::from([0, 1].map(|number| send(&world, number, Some(number))));
    assert!(world.poll().is_pending());
    answers.push(send(&world, 0, Some(2)));
    assert!(world.poll().is_pending());
    assert_eq!(world.control.release_all(), 2);
    let most = SHARED_TURN_COPY_BYTES + u64::from(READ_BYTES);
    let turns = turns_until_answered(&mut world, answers, |shard| assert!(shard.copied <= most));
    assert!((24..=30).contains(&turns), "{turns}");
}

#[test]
fn reads_do_not_get_ahead_of_copies() {
    // Scenario: two callers with twelve reads of 1 MiB each, of a device that is faster than their copies. Expectation: at
    // most the 2 MiB of what may be in flight wait to be copied.
    let mut world = World::new(32, 24 << 20);
    let answers: Vec<_> = (0..24)
        .map(|number| send(&world, number, Some(number % 2)))
        .collect();
    turns_until_answered(&mut world, answers, |shard| {
        assert!(shard.copied <= SHARED_TURN_COPY_BYTES, "{}", shard.copied);
        let waiting = shard.in_flight.put_off_bytes;
        assert!(waiting <= IN_FLIGHT_BYTES_MAX, "{waiting}");
    });
}
