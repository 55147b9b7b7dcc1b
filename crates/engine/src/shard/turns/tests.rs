//! Who gets how much, in turns that are simulated.

use super::*;

fn origin(caller: u64, connection: u64) -> Origin {
    weighted(caller, connection, 1)
}

fn weighted(caller: u64, connection: u64, weight: u32) -> Origin {
    Origin {
        caller,
        connection,
        weight,
    }
}

/// Takes `rounds` turns; each batch starts reads of `read_bytes(batch)` and never ends. Returns the bytes
/// that each of `batches` started.
fn run(turns: &mut Turns, rounds: usize, batches: usize, read_bytes: impl Fn(usize) -> u64) -> Vec<u64> {
    let mut started = vec![0; batches];
    for _ in 0..rounds {
        let turn = turns.next().expect("a batch waits");
        let mut bytes = 0;
        while i64::try_from(bytes).expect("few") < turn.bytes.min(1 << 20) {
            bytes += read_bytes(turn.batch);
        }
        started[turn.batch] += bytes;
        turns.took(&turn, bytes, false);
    }
    started
}

/// No batch has more than `most` bytes more than another.
#[track_caller]
fn assert_even(started: &[u64], most: u64) {
    let (least, greatest) = (started.iter().min(), started.iter().max());
    assert!(
        greatest.expect("some") - least.expect("some") <= most,
        "{started:?}"
    );
}

#[test]
fn callers_get_the_same_bytes_whatever_the_size_of_their_reads() {
    // Four callers with a batch each that never ends, of reads of 1 MiB to 100 bytes.
    let mut turns = Turns::default();
    for caller in 0..4 {
        turns.push(origin(caller, 1), usize::try_from(caller).expect("small"));
    }
    // 1 MiB, 4 KiB, 64 KiB, 100 bytes.
    let started = run(&mut turns, 2000, 4, |batch| [1 << 20, 4096, 64 << 10, 100][batch]);
    assert_even(&started, 2 << 20);
}

#[test]
fn a_caller_gets_its_weight_times_the_bytes_of_others() {
    // Callers of weights 1, 4 and 100 with reads of 1 MiB, 4 KiB and 64 KiB; the last on ten connections.
    // Then the second gets weight 1. Expectation: bytes in proportion to the weights, and after the
    // change to the new ones.
    for (weights, long) in [([1, 4, 100], 2_u64 << 20), ([1, 1, 100], 2 << 20)] {
        let mut turns = Turns::default();
        turns.push(weighted(0, 0, weights[0]), 0);
        turns.push(weighted(1, 0, 4), 1);
        for connection in 0..10 {
            let batch = 2 + usize::try_from(connection).expect("small");
            turns.push(weighted(2, connection, weights[2]), batch);
        }
        // Another call of the second caller.
        turns.push(weighted(1, 0, weights[1]), 12);
        let read_bytes = |batch| match batch {
            0 => 1 << 20,
            1 | 12 => 4096,
            _ => 64 << 10,
        };
        let started = run(&mut turns, 40_000, 13, read_bytes);
        let of = [started[0], started[1] + started[12], started[2..12].iter().sum()];
        let parts: Vec<u64> = of
            .iter()
            .zip(weights)
            .map(|(bytes, weight)| bytes / u64::from(weight))
            .collect();
        // The first rounds at the changed weight, and one round.
        assert_even(&parts, 2 * long);
        assert_even(&started[2..12], 2 << 20);
    }
}

#[test]
fn others_come_between_the_turns_of_a_heavy_caller() {
    // A caller of weight 100 comes, and then another one; both have one batch. Expectation: the other one has its turn after
    // the first of the heavy caller, none of whose turns is longer than others.
    let mut turns = Turns::default();
    turns.push(weighted(0, 0, 100), 0);
    turns.push(origin(1, 0), 1);
    for number in 0..300 {
        let turn = turns.next().expect("a batch waits");
        assert!(number >= 2 || turn.batch == number);
        assert!(turn.bytes <= QUANTUM_BYTES);
        turns.took(&turn, 64 << 10, false);
    }
}

#[test]
fn what_one_long_read_takes_is_paid_back_in_few_rounds() {
    // A caller starts 100 MiB in one turn, beside one with blocks. Expectation: its next turn comes after 1 MiB of those.
    let mut turns = Turns::default();
    turns.push(origin(0, 0), 0);
    turns.push(origin(1, 0), 1);
    let (mut long_turns, mut blocks) = (0, 0_u64);
    while long_turns < 2 {
        let turn = turns.next().expect("a batch waits");
        if turn.batch == 0 {
            long_turns += 1;
            turns.took(&turn, 100 << 20, false);
        } else {
            blocks += 4096;
            turns.took(&turn, 4096, false);
        }
    }
    assert!((1 << 20..2 << 20).contains(&blocks), "{blocks}");
}

#[test]
fn a_single_block_goes_first_beside_a_heavy_caller() {
    // A caller of weight 100 with long reads on eight connections; another with one block, again and
    // again. The block is next every time.
    let mut turns = Turns::default();
    for connection in 0..8 {
        turns.push(
            weighted(0, connection, 100),
            usize::try_from(connection).expect("small"),
        );
    }
    for _ in 0..50 {
        run(&mut turns, 30, 9, |_| 1 << 20);
        turns.push(origin(1, 0), 8);
        let turn = turns.next().expect("a batch waits");
        assert_eq!(turn.batch, 8);
        turns.took(&turn, 4096, true);
    }
}

#[test]
fn many_connections_get_a_caller_no_more_than_one() {
    // Caller 0 has 100 connections with a batch each, caller 1 one connection with one batch.
    let mut turns = Turns::default();
    for connection in 0..100 {
        turns.push(origin(0, connection), usize::try_from(connection).expect("small"));
    }
    turns.push(origin(1, 0), 100);
    let started = run(&mut turns, 4000, 101, |_| 4096);
    assert_even(&[started[..100].iter().sum(), started[100]], 256 << 10);
    assert_even(&started[..100], 128 << 10);
}

#[test]
fn many_calls_get_a_connection_no_more_than_one() {
    // Connection 0 has 50 batches, connection 1 has one.
    let mut turns = Turns::default();
    for batch in 0..50 {
        turns.push(origin(7, 0), batch);
    }
    turns.push(origin(7, 1), 50);
    let started = run(&mut turns, 2000, 51, |_| 32 << 10);
    assert_even(&[started[..50].iter().sum(), started[50]], 256 << 10);
    assert_even(&started[..50], 128 << 10);
}

#[test]
fn a_single_block_goes_before_a_round_of_long_reads() {
    // Eight callers with long reads have waited for long; a ninth comes again and again with one block,
    // as a caller of its own or as a connection of an existing one. The block is next every time.
    for newcomer in [origin(9, 9), origin(0, 9)] {
        let mut turns = Turns::default();
        for caller in 0..8 {
            turns.push(origin(caller, caller), usize::try_from(caller).expect("small"));
            turns.push(
                origin(0, 100 + caller),
                20 + usize::try_from(caller).expect("small"),
            );
        }
        // Every member is new at first, and precedes those already there.
        run(&mut turns, 1000, 30, |_| 1 << 20);
        let mut others = 0;
        for _ in 0..50 {
            run(&mut turns, 40, 30, |_| 1 << 20);
            turns.push(newcomer, 8);
            if newcomer.caller == 0 {
                // Its caller has used its part; among the caller's connections it is first.
                while let Some(turn) = turns.next()
                    && turn.caller != 0
                {
                    turns.took(&turn, 1 << 20, false);
                    others += 1;
                }
            }
            let turn = turns.next().expect("a batch waits");
            assert_eq!(turn.batch, 8);
            turns.took(&turn, 4096, true);
        }
        assert!(
            others <= 50 * 7,
            "{others} turns of others: at most one round each"
        );
    }
}

/// Bytes that callers 0 and 1 have started after 5000 turns: caller 0 has one read of `bytes` at a time,
/// and the next as soon as that is started; caller 1 has blocks waiting.
fn beside_a_long_queue(bytes: u64) -> [u64; 2] {
    let mut turns = Turns::default();
    turns.push(origin(1, 0), 1);
    turns.push(origin(0, 0), 0);
    let mut started = [0_u64; 2];
    for _ in 0..5000 {
        let turn = turns.next().expect("a batch waits");
        let taken = [bytes, 4096][turn.batch];
        started[turn.batch] += taken;
        turns.took(&turn, taken, turn.batch == 0);
        if turn.batch == 0 {
            turns.push(origin(0, 0), 0);
        }
    }
    started
}

#[test]
fn who_comes_back_at_once_gets_no_more_than_its_part() {
    // One read of 1 MiB at a time.
    assert_even(&beside_a_long_queue(1 << 20), 2 << 20);
}

#[test]
fn who_has_one_read_at_a_time_gets_no_less_than_its_part() {
    // One block at a time.
    assert_even(&beside_a_long_queue(4096), 128 << 10);
}

#[test]
fn what_was_used_is_forgotten_while_another_is_alone() {
    // Next to caller 1, caller 0 starts twice its part and leaves; caller 1 continues alone, for a
    // hundred parts; caller 0 returns with a block. Expectation: the block is next but one at the latest.
    let mut turns = Turns::default();
    turns.push(origin(1, 0), 1);
    turns.push(origin(0, 0), 0);
    let mut left = false;
    let mut alone = 0_u64;
    while alone < 100 << 20 {
        let turn = turns.next().expect("a batch waits");
        if turn.batch == 0 {
            left = true;
            turns.took(&turn, 2 << 20, true);
        } else {
            alone += if left { 4096 } else { 0 };
            turns.took(&turn, 4096, false);
        }
    }
    turns.push(origin(0, 0), 0);
    let mut before = 0;
    loop {
        let turn = turns.next().expect("a batch waits");
        if turn.batch == 0 {
            break;
        }
        before += 1;
        turns.took(&turn, 4096, false);
    }
    assert!(before <= 1, "{before} turns of the other one");
}

#[test]
fn who_is_alone_takes_as_much_as_there_is() {
    // One batch without an account starts far more than a round's part, then another caller comes.
    let mut turns = Turns::default();
    turns.push(NOBODY, 3);
    for _ in 0..10 {
        let turn = turns.next().expect("it waits");
        assert_eq!((turn.batch, turn.bytes), (3, i64::MAX));
        turns.took(&turn, 100 << 20, false);
    }
    // It owes nothing for that.
    turns.push(origin(1, 1), 4);
    let started = run(&mut turns, 1000, 5, |_| 4096);
    assert_even(&started[3..], 128 << 10);
}

#[test]
fn nothing_is_kept_of_who_left_without_a_turn() {
    // Beside a batch that waits, 1000 callers with a connection each leave, and 1000 connections of its caller. Expectation:
    // one caller with one connection is known, and its batch is next.
    let mut turns = Turns::default();
    turns.push(origin(0, 0), 0);
    for number in 1..=1000 {
        turns.push(origin(number, number), 1);
        turns.push(origin(0, number), 1);
    }
    turns.retain(|batch| batch == 0);
    let callers = &turns.callers;
    assert_eq!(
        (callers.members.len(), callers.round.len(), callers.early.len()),
        (1, 1, 1)
    );
    let connections = &callers.members[&0].queue;
    assert_eq!((connections.members.len(), connections.round.len()), (1, 1));
    assert!(callers.spare.len() <= SPARE_MAX && connections.spare.len() <= SPARE_MAX);
    assert_eq!(turns.next().map(|turn| turn.batch), Some(0));
}

#[test]
fn every_batch_leaves_once_and_nothing_is_kept() {
    // Batches of many callers come and go at random, from a seed; now and then some leave from anywhere.
    let mut turns = Turns::default();
    let mut random = fastrand::Rng::with_seed(11);
    let mut waiting = std::collections::BTreeSet::new();
    let (mut pushed, mut left) = (0, 0);
    for _ in 0..20_000 {
        if random.bool() && waiting.len() < 500 {
            let weight = [1, 1, 3, 100][random.usize(..4)];
            turns.push(weighted(random.u64(..20), random.u64(..5), weight), pushed);
            waiting.insert(pushed);
            pushed += 1;
        } else if let Some(turn) = turns.next() {
            let done = random.u8(..) < 200;
            turns.took(&turn, random.u64(..2 << 20), done);
            if done {
                assert!(waiting.remove(&turn.batch), "{} left twice", turn.batch);
                left += 1;
            }
        }
        if random.u8(..) == 0 {
            turns.retain(|batch| batch % 3 > 0 || !waiting.remove(&batch));
            left = pushed - waiting.len();
        }
        assert_eq!(turns.is_empty(), waiting.is_empty());
    }
    while let Some(turn) = turns.next() {
        turns.took(&turn, 4096, true);
        left += 1;
    }
    assert_eq!(left, pushed);
    assert!(turns.callers.members.is_empty() && turns.callers.round.is_empty());
    assert!(turns.callers.early.is_empty() && turns.callers.spare.len() <= SPARE_MAX);
}
