//! Shared reads in flight, turns between callers, and control next to data: on the simulation, which decides
//! when a read finishes.

use crate::harness::{
    Answer, DEPTH, Harness, MAX_READ_BYTES, VARIANTS, assert_answer, blocks_of, expected, ranges_of,
};
use crate::named;
use crate::suite::{Test, simulated};
use crate::wait::{WAIT, wait_until};
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::{SubmitOptions, Ticket};
use ringfetch_engine::error::ReadError;
use ringfetch_engine::sim::{Fault, FaultPlan, SimControl};
use std::sync::Arc;
use std::time::{Duration, Instant};

const CALLERS: usize = 1000;

fn caller(harness: &Harness, id: u64) -> SubmitOptions {
    SubmitOptions {
        account: Some(harness.engine.caller_account(id).connection(id, u64::MAX)),
        ..SubmitOptions::default()
    }
}

fn wait_joined(harness: &Harness, reads: u64) {
    wait_until(
        || harness.joined_reads() == reads,
        || format!("{} reads joined of {reads}", harness.joined_reads()),
    );
}

/// [`CALLERS`] callers ask for the same block; the device holds the read.
fn herd(harness: &Harness, control: &SimControl, dataset: &Arc<Dataset>, block: usize) -> Vec<Ticket> {
    let (started, joined) = (control.started_total(), harness.joined_reads());
    control.hold();
    let tickets = (0..CALLERS as u64)
        .map(|id| {
            let batch = blocks_of(dataset, &[block]);
            harness.submit(batch, caller(harness, id)).expect("accepted")
        })
        .collect();
    wait_joined(harness, joined + CALLERS as u64 - 1);
    assert_eq!(control.started_total(), started + 1, "one read for all");
    tickets
}

fn a_thousand_callers_of_one_block_cost_one_read() {
    // Scenario: 1,000 callers ask for one block while it is being read; it arrives, arrives in parts, fails,
    // or the file has ended. Expectation: one read (and its continuation); every caller gets the bytes, or
    // the error.
    let (harness, control, dataset, model) = Harness::simulated(100 * 4096, 4096);
    let bytes = || Ok(&model[7 * 4096..8 * 4096]);
    let (offset, length) = (7 * 4096, 4096);
    let eio = ReadError::Device {
        errno: libc::EIO,
        offset,
        length,
    };
    let cut = ReadError::Truncated { offset, length };
    let cases = [
        (vec![], bytes(), 1),
        (vec![Fault::Short { bytes: 1000 }], bytes(), 2),
        (vec![Fault::Errno(libc::EIO)], Err(eio), 1),
        (vec![Fault::Short { bytes: 0 }], bytes(), 2),
        // The file was truncated.
        (vec![], Err(cut), 1),
    ];
    for (fates, wanted, attempts) in cases {
        if wanted == Err(ReadError::Truncated { offset, length }) {
            harness.truncate(&harness.path("file"), offset);
        }
        let wanted = expected(&[wanted]);
        let before = control.started_total();
        control.set_faults(FaultPlan::script(&fates));
        let tickets = herd(&harness, &control, &dataset, 7);
        control.release_all();
        for ticket in tickets {
            let answer = harness.await_answer(ticket).expect("an answer").into();
            assert_answer(&answer, &wanted, &format!("{fates:?}"));
        }
        assert_eq!(control.started_total() - before, attempts, "{fates:?}");
    }
    harness.finish();
}

fn a_read_is_shared_though_its_first_caller_gave_up() {
    // Scenario: of 1,000 callers the one that started the read leaves, and every third. Expectation: the
    // others get the bytes of the one read.
    let (harness, control, dataset, model) = Harness::simulated(100 * 4096, 4096);
    let mut tickets = herd(&harness, &control, &dataset, 3);
    let mut number = 0;
    tickets.retain(|_| {
        number += 1;
        number % 3 != 1
    });
    control.release_all();
    for ticket in tickets {
        let answer = harness.await_answer(ticket).expect("an answer").into();
        assert_answer(&answer, &expected(&[Ok(&model[3 * 4096..][..4096])]), "shared");
    }
    assert_eq!(control.started_total(), 1);
    harness.finish();
}

fn a_merged_read_that_fails_is_repeated_once_for_all() {
    // Scenario: 1,000 callers ask for the same two neighbouring blocks, one of which is bad; their one read
    // fails as a whole. Expectation: one further read of each block for all, with its error or its bytes.
    let (harness, control, dataset, model) = Harness::simulated(100 * 4096, 4096);
    let eio = Fault::Errno(libc::EIO);
    control.set_faults(FaultPlan::script(&[eio, eio, Fault::None]));
    control.hold();
    let tickets: Vec<Ticket> = (0..CALLERS as u64)
        .map(|id| {
            let batch = blocks_of(&dataset, &[2, 3]);
            harness.submit(batch, caller(&harness, id)).expect("accepted")
        })
        .collect();
    let others = CALLERS as u64 - 1;
    wait_joined(&harness, others);
    assert_eq!(control.release(1), 1);
    wait_joined(&harness, 3 * others);
    assert!(control.wait_started(3, WAIT), "one read of each block");
    control.release_all();
    let (offset, length) = (2 * 4096, 4096);
    let bad = ReadError::Device {
        errno: libc::EIO,
        offset,
        length,
    };
    let wanted = expected(&[Err(bad), Ok(&model[3 * 4096..][..4096])]);
    for ticket in tickets {
        let answer = harness.await_answer(ticket).expect("an answer").into();
        assert_answer(&answer, &wanted, "split");
    }
    assert_eq!(control.started_total(), 3);
    harness.finish();
}

fn parts_of_a_read_in_flight_are_shared() {
    // Scenario: a range of 100 KB is being read; others ask for blocks and ranges within it, aligned and not,
    // and for one that reaches beyond. The read arrives, or fails. Expectation: only the range that reaches
    // beyond is read; if the first read fails, each is read separately and has its bytes.
    for fails in [false, true] {
        let (harness, control, dataset, model) = Harness::simulated(1 << 20, 1);
        if fails {
            control.set_faults(FaultPlan::script(&[Fault::Errno(libc::EIO)]));
        }
        control.hold();
        let submit = |ranges: &[(usize, usize)]| {
            harness
                .submit(ranges_of(&dataset, ranges), SubmitOptions::default())
                .expect("accepted")
        };
        let owner = submit(&[(8192, 50_000), (58_192, 50_000)]);
        assert!(control.wait_started(1, WAIT));
        let within: [&[(usize, usize)]; 4] = [
            &[(8192, 4096)],
            &[(10_001, 7)],
            &[(40_000, 40_000), (9000, 3)],
            &[(12_288, 8192), (70_000, 5000), (8192, 100_000)],
        ];
        let tickets: Vec<_> = within.iter().map(|ranges| submit(ranges)).collect();
        let beyond = submit(&[(100_000, 20_000)]);
        assert!(control.wait_started(2, WAIT));
        wait_until(|| harness.joined_reads() >= 4, || "nothing joins".to_owned());
        assert_eq!(control.started_total(), 2);
        control.release_all();
        for (ticket, ranges) in tickets.into_iter().zip(within) {
            let items: Vec<_> = ranges
                .iter()
                .map(|&(offset, length)| Ok(&model[offset..offset + length]))
                .collect();
            let answer = harness.await_answer(ticket).expect("an answer").into();
            assert_answer(&answer, &expected(&items), &format!("{ranges:?}, fails: {fails}"));
        }
        for (ticket, range) in [(owner, 8192..108_192), (beyond, 100_000..120_000)] {
            let fetched = harness.await_answer(ticket).expect("an answer");
            assert!(fetched.data == model[range.clone()], "{range:?}");
            assert_eq!(fetched.errors, []);
        }
        harness.finish();
    }
}

fn a_read_that_waits_joins_without_its_turn() {
    // Scenario: every slot is in use, with and without waiting batches; a batch asks for blocks that are in
    // flight, and another for one that is not and one of those. Expectation: the first is answered as soon as
    // its blocks arrive, and nothing is read twice.
    for batches in [1, 3] {
        let depth = DEPTH as usize;
        let (harness, control, dataset, model) = Harness::simulated(1000 * 512, 512);
        control.hold();
        let submit = |blocks: &[usize]| {
            let batch = blocks_of(&dataset, blocks);
            harness.submit(batch, SubmitOptions::default()).expect("accepted")
        };
        let all: Vec<usize> = (0..batches * depth).map(|number| number * 3).collect();
        let first = submit(&all);
        assert!(control.wait_started(u64::from(DEPTH), WAIT));
        let joins = submit(&[0, 3]);
        let half = submit(&[1, 3]);
        wait_joined(&harness, 3);
        assert_eq!(control.release(2), 2);
        let answer = harness.await_answer(joins).expect("an answer").into();
        let block = |number: usize| Ok(&model[number * 512..(number + 1) * 512]);
        assert_answer(&answer, &expected(&[block(0), block(3)]), "joined");
        control.release_all();
        let answer = harness.await_answer(half).expect("an answer").into();
        assert_answer(&answer, &expected(&[block(1), block(3)]), "half joined");
        harness.await_answer(first).expect("an answer");
        assert_eq!(control.started_total(), all.len() as u64 + 1);
        harness.finish();
    }
}

fn a_thousand_batches_that_overlap_under_faults() {
    // Scenario: many callers ask for overlapping parts of 100 KB while attempts are short, fail, are
    // interrupted and finish in any order, and some callers leave. Expectation: every item has its bytes, or
    // a device error with its own extent.
    let (harness, control, dataset, model) = Harness::simulated(100_001, 1);
    control.set_faults(FaultPlan {
        short_per_mille: 150,
        eio_per_mille: 60,
        eintr_per_mille: 50,
        reorder: true,
        ..FaultPlan::default()
    });
    let mut random = fastrand::Rng::with_seed(control.seed());
    for round in 0..40 {
        control.hold();
        let mut asked = Vec::new();
        for id in 0..25 {
            let ranges: Vec<(usize, usize)> = (0..random.usize(1..10))
                .map(|_| {
                    let offset = random.usize(..100_000);
                    let longest = [10, 600, 5000, 60_000][random.usize(..4)];
                    (offset, random.usize(1..=longest).min(model.len() - offset))
                })
                .collect();
            let ticket = harness.submit(ranges_of(&dataset, &ranges), caller(&harness, id % 5));
            asked.push((ranges, ticket.expect("accepted")));
        }
        control.release_all();
        for (ranges, ticket) in asked {
            if random.u8(..) < 30 {
                drop(ticket);
                continue;
            }
            let answer: Answer = harness.await_answer(ticket).expect("an answer").into();
            let items: Vec<_> = (0..)
                .zip(&ranges)
                .map(
                    |(item, &(offset, length))| match answer.errors.iter().any(|error| error.item == item) {
                        true => Err(ReadError::Device {
                            errno: libc::EIO,
                            offset: offset as u64,
                            length: length as u64,
                        }),
                        false => Ok(&model[offset..offset + length]),
                    },
                )
                .collect();
            assert_answer(&answer, &expected(&items), &format!("round {round}: {control}"));
        }
    }
    assert!(harness.joined_reads() > 100, "{control}");
    harness.finish();
}

fn a_single_block_goes_before_long_reads_of_others() {
    // Scenario: eight callers, or eight connections of one, each read 1 MiB in pieces, and in-flight is at
    // its limit. A ninth asks for one block, again and again. Expectation: the block is started next, every
    // time.
    for one_caller in [false, true] {
        let (harness, control, dataset, model) = Harness::simulated(20 << 20, 1);
        let shared = harness.engine.caller_account(1);
        let account = |id: u64| SubmitOptions {
            account: Some(match one_caller {
                true => shared.connection(id, u64::MAX),
                false => harness.engine.caller_account(id).connection(id, u64::MAX),
            }),
            ..SubmitOptions::default()
        };
        control.hold();
        let hogs: Vec<_> = (0..8)
            .zip((0..).step_by(2 << 20))
            .map(|(id, offset)| {
                let batch = ranges_of(&dataset, &[(offset, 1 << 20)]);
                harness.submit(batch, account(id)).expect("accepted")
            })
            .collect();
        // 2 MiB for one caller; half of the queue for several callers.
        let most = if one_caller { DEPTH } else { DEPTH / 2 };
        assert_eq!(DEPTH, (2 << 20) / MAX_READ_BYTES);
        assert!(control.wait_started(u64::from(most), WAIT));
        assert_eq!(
            harness.runtime.block_on(harness.engine.signs_of_life(WAIT)),
            Ok(())
        );
        assert_eq!(control.in_flight(), most as usize);
        // The first to arrive had a round's part at once; the others have it now.
        let mut released = control.release(8);
        assert!(control.wait_started(u64::from(most) + 8, WAIT));
        let mine = account(9);
        for number in 0..4_usize {
            // Attempts are released in the order of their start: all that started before the block's, and
            // then one more. Before it, as many as may be in flight, or some could start meanwhile.
            let all = u64::from((8 << 20) / MAX_READ_BYTES) + number as u64;
            let before = all.min(released as u64 + u64::from(most));
            assert!(control.wait_started(before, WAIT));
            assert_eq!(control.started_total(), before);
            let block = (18 << 20) + number * 8192;
            let ticket = harness
                .submit(ranges_of(&dataset, &[(block, 4096)]), mine.clone())
                .expect("accepted");
            released += control.release(usize::try_from(before).expect("few") - released);
            assert!(control.wait_started(before + 1, WAIT));
            released += control.release(1);
            let answer = harness.await_answer(ticket).expect("an answer").into();
            assert_answer(
                &answer,
                &expected(&[Ok(&model[block..block + 4096])]),
                "a single block",
            );
        }
        control.release_all();
        for ticket in hogs {
            harness.await_answer(ticket).expect("an answer");
        }
        harness.finish();
    }
}

fn bytes_in_flight_are_bounded_whatever_the_depth() {
    // Scenario: depth 128, and 16 MiB to be read in pieces of 1 MiB, for a lone caller, and for one that
    // shares. Expectation: eight are in flight, or two; never more.
    let simulated = VARIANTS[VARIANTS.len() - 1];
    for (accounts, most) in [(0, 8), (2, 2)] {
        let harness = Harness::with(simulated, |config| {
            config.uring.queue_depth = 128;
            config.plan.max_read_bytes = 1 << 20;
            config.memory_budget_bytes = 64 << 20;
        });
        let control = harness.sim.clone().expect("a simulation");
        let (dataset, model) = harness.of_blocks(16 << 20, 1);
        for id in 0..accounts {
            let answer = harness.fetch_outside(ranges_of(&dataset, &[(0, 1)]), caller(&harness, id));
            assert!(answer.is_ok());
        }
        let options = match accounts {
            0 => SubmitOptions::default(),
            _ => caller(&harness, 0),
        };
        let answer = harness.fetch_outside(ranges_of(&dataset, &[(0, 16 << 20)]), options);
        assert!(answer.expect("an answer").data == model);
        assert_eq!(control.max_in_flight(), most);
        harness.finish();
    }
}

fn a_shard_behind_a_stuck_device_gives_signs_of_life() {
    // Scenario: the device returns nothing; the queue is filled until it refuses. Expectation: the shard
    // answers heartbeats, again and again, and accepts a drain.
    let simulated = VARIANTS[VARIANTS.len() - 1];
    let harness = Harness::with(simulated, |config| config.queued_reads = 3000);
    let control = harness.sim.clone().expect("a simulation");
    let (dataset, _) = harness.of_blocks(4000 * 512, 512);
    control.hold();
    let mut tickets = Vec::new();
    for block in 0.. {
        match harness.submit(blocks_of(&dataset, &[block % 4000]), SubmitOptions::default()) {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => {
                assert!(matches!(error, ReadError::Overloaded { .. }), "{error}");
                break;
            }
        }
    }
    assert!(tickets.len() >= 3000, "{}", tickets.len());
    for _ in 0..10 {
        assert_eq!(
            harness.runtime.block_on(harness.engine.signs_of_life(WAIT)),
            Ok(())
        );
    }
    assert_eq!(control.started_total(), u64::from(DEPTH), "nothing has arrived");
    control.release_all();
    for ticket in tickets {
        harness.await_answer(ticket).expect("an answer");
    }
    harness.finish();
}

fn what_nobody_wants_any_more_does_not_wait_for_its_turn() {
    // Scenario: the device returns nothing; waiting batches are dropped, or their deadline passes.
    // Expectation: when the engine is tended, the memory of the first is free, and the second are answered.
    let (harness, control, dataset, stuck) = Harness::stuck();
    let held = harness.engine.memory().0;
    let waiting: Vec<_> = (0..4)
        .map(|_| {
            let batch = ranges_of(&dataset, &[(3 << 20, 3 << 20)]);
            harness.submit(batch, SubmitOptions::default()).expect("accepted")
        })
        .collect();
    let beat = || {
        harness.engine.tend();
        harness.runtime.block_on(harness.engine.signs_of_life(WAIT))
    };
    assert_eq!(beat(), Ok(()));
    assert!(harness.engine.memory().0 >= held + (12 << 20));
    drop(waiting);
    wait_until(
        || beat() == Ok(()) && harness.engine.memory().0 == held,
        || format!("{} bytes, not {held}", harness.engine.memory().0),
    );
    let late = SubmitOptions {
        deadline: Some(Instant::now() + Duration::from_millis(5)),
        ..SubmitOptions::default()
    };
    let batch = ranges_of(&dataset, &[(3 << 20, 3 << 20)]);
    let mut late = harness.submit(batch, late).expect("accepted");
    let mut answer = None;
    while answer.is_none() {
        assert_eq!(beat(), Ok(()));
        let turn = async { tokio::time::timeout(Duration::from_millis(1), &mut late).await };
        answer = harness.runtime.block_on(turn).ok();
    }
    assert_eq!(answer.and_then(Result::err), Some(ReadError::DeadlineExceeded));
    control.release_all();
    harness.await_answer(stuck).expect("an answer");
    harness.finish();
}

pub(crate) fn tests() -> Vec<Test> {
    simulated(
        "sharing",
        named!(
            a_thousand_callers_of_one_block_cost_one_read,
            a_read_is_shared_though_its_first_caller_gave_up,
            a_merged_read_that_fails_is_repeated_once_for_all,
            parts_of_a_read_in_flight_are_shared,
            a_read_that_waits_joins_without_its_turn,
            a_thousand_batches_that_overlap_under_faults,
            a_single_block_goes_before_long_reads_of_others,
            bytes_in_flight_are_bounded_whatever_the_depth,
            a_shard_behind_a_stuck_device_gives_signs_of_life,
            what_nobody_wants_any_more_does_not_wait_for_its_turn
        ),
    )
}
