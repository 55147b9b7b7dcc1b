//! Faults that only the simulation can produce: short reads, errnos, stalls and reordering, by script or by
//! seed.

use crate::harness::Answer;
use crate::harness::{DEPTH, Harness, MAX_READ_BYTES, assert_answer, blocks_of, expected, ranges_of};
use crate::named;
use crate::suite::{Test, simulated};
use crate::wait::{WAIT, wait_until};
use ringfetch_engine::engine::SubmitOptions;
use ringfetch_engine::error::ReadError;
use ringfetch_engine::sim::{Fault, FaultPlan};
use std::time::{Duration, Instant};

fn device(errno: i32, offset: u64, length: u64) -> ReadError {
    ReadError::Device {
        errno,
        offset,
        length,
    }
}

fn short_reads_still_give_the_bytes() {
    // Scenario: two of three attempts are short, at random, for ranges aligned and not, merged and split.
    // Expectation: the bytes, every time.
    let (harness, control, dataset, model) = Harness::simulated(1 << 20, 1);
    control.set_faults(FaultPlan {
        short_per_mille: 667,
        ..FaultPlan::default()
    });
    let most = MAX_READ_BYTES as usize;
    let ranges = [
        (0, 4096),
        (4096, 4096),
        (1, 99_999),
        (511, 2 * most),
        (700_000, 1),
        (700_001, 513),
        (777, 7),
    ];
    for range in ranges {
        harness.expect_ranges(&dataset, &model, &[range]);
    }
    for _ in 0..20 {
        harness.expect_ranges(&dataset, &model, &ranges);
    }
    assert!(control.faults_total() > 0, "some were short");
    harness.finish();
}

fn a_read_that_arrives_byte_by_byte() {
    // Scenario: every attempt at a read, including the last, returns at most 100 bytes. Expectation: the
    // bytes, in as many attempts as that takes.
    let (harness, control, dataset, model) = Harness::simulated(10_000, 1);
    control.set_faults(FaultPlan::script(&[Fault::Short { bytes: 100 }; 500]));
    harness.expect_ranges(&dataset, &model, &[(3, 2000)]);
    harness.finish();
}

fn interrupted_attempts_are_made_again() {
    // Scenario: EINTR, EAGAIN and ECANCELED a few times before a read succeeds, also after a short part of it.
    // Expectation: the bytes. If it never succeeds: that errno, with the item's extent, not a loop.
    let (harness, control, dataset, model) = Harness::simulated(10_000, 1);
    let options = SubmitOptions::default;
    let interrupted = [
        Fault::Errno(libc::EINTR),
        Fault::Errno(libc::EAGAIN),
        Fault::Short { bytes: 1000 },
        Fault::Errno(libc::EINTR),
        Fault::Errno(libc::ECANCELED),
    ];
    control.set_faults(FaultPlan::script(&interrupted));
    let answer = harness.fetch_outside(ranges_of(&dataset, &[(5, 5000)]), options());
    assert_answer(
        &answer.expect("an answer"),
        &expected(&[Ok(&model[5..5005])]),
        "interrupted",
    );
    for errno in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
        control.set_faults(FaultPlan::script(&[Fault::Errno(errno); 1000]));
        let answer = harness.fetch_outside(ranges_of(&dataset, &[(5, 5000)]), options());
        assert_answer(
            &answer.expect("an answer"),
            &expected(&[Err(device(errno, 5, 5000))]),
            "without end",
        );
    }
    harness.finish();
}

fn a_device_error_is_the_items_own() {
    // Scenario: three reads that do not merge; the second fails with EIO, or does after a part of it.
    // Expectation: Device with that item's extent; the others are served.
    let (harness, control, dataset, model) = Harness::simulated(100_000, 1);
    let ranges = [(0, 4000), (40_000, 4000), (80_000, 4000)];
    let answer = || harness.fetch_outside(ranges_of(&dataset, &ranges), SubmitOptions::default());
    let wanted = expected(&[
        Ok(&model[..4000]),
        Err(device(libc::EIO, 40_000, 4000)),
        Ok(&model[80_000..84_000]),
    ]);
    control.set_faults(FaultPlan::script(&[
        Fault::None,
        Fault::Errno(libc::EIO),
        Fault::None,
    ]));
    assert_answer(&answer().expect("an answer"), &wanted, "EIO");
    let short = Fault::Short { bytes: 1000 };
    control.set_faults(FaultPlan::script(&[
        Fault::None,
        short,
        Fault::None,
        Fault::Errno(libc::EIO),
    ]));
    assert_answer(&answer().expect("an answer"), &wanted, "EIO after a part");
    harness.finish();
}

fn a_device_error_is_eio_however_it_is_read() {
    // Scenario: a read fails with an errno of the block layer, as direct reads do: of a bad sector with ENODATA. The page cache
    // reports EIO for each (TRAPS 17). Expectation: EIO.
    let (harness, control, dataset, _) = Harness::simulated(10_000, 1);
    let of_block_layer = [
        libc::ENODATA,
        libc::EREMOTEIO,
        libc::ENOLINK,
        libc::EILSEQ,
        libc::EBADE,
        libc::ETIME,
        libc::ENODEV,
    ];
    for errno in of_block_layer {
        control.set_faults(FaultPlan::script(&[Fault::Errno(errno)]));
        let answer = harness.fetch_outside(ranges_of(&dataset, &[(5, 5000)]), SubmitOptions::default());
        assert_answer(
            &answer.expect("an answer"),
            &expected(&[Err(device(libc::EIO, 5, 5000))]),
            &format!("errno {errno}"),
        );
    }
    harness.finish();
}

fn a_failed_merged_read_is_tried_item_by_item() {
    // Scenario: ten blocks in a row, read in one; that read fails, and the reads that replace it succeed, or
    // one of them fails too. Expectation: all blocks; all but that one.
    let (harness, control, dataset, model) = Harness::simulated(100 * 4096, 4096);
    let blocks: Vec<usize> = (20..30).collect();
    let eio = Fault::Errno(libc::EIO);
    for bad in [None, Some(0), Some(4), Some(9)] {
        let mut fates = vec![eio];
        fates.extend((0..10).map(|item| if bad == Some(item) { eio } else { Fault::None }));
        control.set_faults(FaultPlan::script(&fates));
        let answer = harness.fetch_outside(blocks_of(&dataset, &blocks), SubmitOptions::default());
        let items: Vec<_> = (0..10)
            .map(|item| match bad {
                Some(bad) if bad == item => Err(device(libc::EIO, (20 + item as u64) * 4096, 4096)),
                Some(_) | None => Ok(&model[(20 + item) * 4096..][..4096]),
            })
            .collect();
        assert_answer(
            &answer.expect("an answer"),
            &expected(&items),
            &format!("bad: {bad:?}"),
        );
    }
    harness.finish();
}

fn items_that_share_bytes_do_not_spoil_each_other() {
    // Scenario: the same bytes requested several times, and ranges that overlap, read in one; that read
    // fails, and so does one of the reads that replace it, each in turn, leaving garbage in its memory.
    // Expectation: exactly one item fails, the others have their bytes.
    let (harness, control, dataset, model) = Harness::simulated(100_000, 1);
    let shapes: [&[(usize, usize)]; 3] = [
        &[(4096, 4096), (4096, 4096), (4096, 4096)],
        &[(1000, 100), (1050, 100), (1000, 100), (1100, 50)],
        &[(0, 8192), (4096, 4096), (100, 9000), (8192, 4096)],
    ];
    let eio = Fault::Errno(libc::EIO);
    for reorder in [false, true] {
        for ranges in shapes {
            for bad in 0..ranges.len() {
                let mut fates = vec![eio];
                fates.extend((0..ranges.len()).map(|read| if bad == read { eio } else { Fault::None }));
                control.set_faults(FaultPlan {
                    reorder,
                    ..FaultPlan::script(&fates)
                });
                let batch = ranges_of(&dataset, ranges);
                let answer = harness.fetch_outside(batch, SubmitOptions::default());
                let answer = answer.expect("an answer");
                let failed: Vec<u32> = answer.errors.iter().map(|error| error.item).collect();
                assert_eq!(failed.len(), 1, "{ranges:?}, bad {bad}: {:?}", answer.errors);
                let items: Vec<_> = (0..)
                    .zip(ranges)
                    .map(|(item, &(offset, length))| match failed.contains(&item) {
                        true => Err(device(libc::EIO, offset as u64, length as u64)),
                        false => Ok(&model[offset..offset + length]),
                    })
                    .collect();
                assert_answer(
                    &answer,
                    &expected(&items),
                    &format!("{ranges:?}, bad {bad}, reorder {reorder}"),
                );
            }
        }
    }
    harness.finish();
}

fn an_early_end_of_file_is_truncation() {
    // Scenario: the file was truncated; a read returns nothing, or a part in two attempts and then nothing.
    // Expectation: Truncated with the item's extent; of merged items those that arrived whole are served.
    let (harness, control, dataset, model) = Harness::simulated(100_000, 1);
    let lost = |offset, length| Err(ReadError::Truncated { offset, length });
    let fetch = |ranges: &[(usize, usize)]| {
        let answer = harness.fetch_outside(ranges_of(&dataset, ranges), SubmitOptions::default());
        answer.expect("an answer")
    };
    harness.truncate(&harness.path("file"), 2500);
    control.set_faults(FaultPlan::script(&[Fault::Short { bytes: 1700 }]));
    assert_answer(
        &fetch(&[(0, 1000), (1000, 1000), (2000, 1000), (3000, 1000)]),
        &expected(&[
            Ok(&model[..1000]),
            Ok(&model[1000..2000]),
            lost(2000, 1000),
            lost(3000, 1000),
        ]),
        "a part",
    );
    harness.truncate(&harness.path("file"), 5);
    assert_answer(&fetch(&[(5, 5000)]), &expected(&[lost(5, 5000)]), "nothing");
    harness.finish();
}

fn a_read_that_never_advances_fails() {
    // Scenario: attempts return nothing although the file has not ended: once, and forever. Expectation: the
    // bytes, and an I/O error.
    let (harness, control, dataset, model) = Harness::simulated(100_000, 1);
    let nothing = Fault::Short { bytes: 0 };
    control.set_faults(FaultPlan::script(&[nothing, nothing]));
    harness.expect_ranges(&dataset, &model, &[(5, 5000)]);
    control.set_faults(FaultPlan::script(&[nothing; 1000]));
    let answer = harness.fetch_outside(ranges_of(&dataset, &[(5, 5000)]), SubmitOptions::default());
    let failed = expected(&[Err(device(libc::EIO, 5, 5000))]);
    assert_answer(&answer.expect("an answer"), &failed, "nothing");
    harness.finish();
}

fn an_item_in_two_reads_has_one_error() {
    // Scenario: an item longer than the longest read, of a truncated file; one of its reads finds the end of
    // the file, the other a device error, in either order. Expectation: the device error, once.
    let (harness, control, dataset, _) = Harness::simulated(1 << 20, 1);
    harness.truncate(&harness.path("file"), 0);
    let (end, eio) = (Fault::None, Fault::Errno(libc::EIO));
    for fates in [[end, eio], [eio, end]] {
        control.set_faults(FaultPlan::script(&fates));
        let length = MAX_READ_BYTES as usize + 1000;
        let answer = harness.fetch_outside(ranges_of(&dataset, &[(0, length)]), SubmitOptions::default());
        assert_answer(
            &answer.expect("an answer"),
            &expected(&[Err(device(libc::EIO, 0, length as u64))]),
            &format!("{fates:?}"),
        );
    }
    harness.finish();
}

fn held_reads_keep_to_the_queue_depth() {
    // Scenario: a batch of five times the queue depth, whose reads finish one by one. Expectation: never more
    // in flight than the depth, and each read that finishes makes room for one.
    let depth = DEPTH as usize;
    let (harness, control, dataset, model) = Harness::simulated(1000 * 512, 512);
    let blocks: Vec<usize> = (0..5 * depth).map(|number| number * 3).collect();
    control.hold();
    let batch = blocks_of(&dataset, &blocks);
    let ticket = harness.submit(batch, SubmitOptions::default()).expect("accepted");
    for finished in 0..3 * depth {
        assert!(
            control.wait_started((depth + finished) as u64, WAIT),
            "read {finished} makes room"
        );
        assert_eq!(control.in_flight(), depth);
        assert_eq!(control.release(1), 1);
    }
    control.release_all();
    let answer: Answer = harness.await_answer(ticket).expect("an answer").into();
    let items: Vec<_> = blocks
        .iter()
        .map(|block| Ok(&model[block * 512..][..512]))
        .collect();
    assert_answer(&answer, &expected(&items), "held");
    assert_eq!(control.max_in_flight(), depth);
    harness.finish();
}

fn a_stalled_read_holds_up_no_other() {
    // Scenario: the first read of a batch stalls; further batches come and go. Expectation: they are answered
    // at once, the stalled one when it is released.
    let (harness, control, dataset, model) = Harness::simulated(100_000, 1);
    control.set_faults(FaultPlan::script(&[Fault::Stall]));
    let batch = ranges_of(&dataset, &[(0, 100), (50_000, 100)]);
    let mut stalled = harness.submit(batch, SubmitOptions::default()).expect("accepted");
    for number in 0..50 {
        harness.expect_ranges(&dataset, &model, &[(number * 1000, 900)]);
    }
    let pending = harness
        .runtime
        .block_on(async { tokio::time::timeout(Duration::ZERO, &mut stalled).await.is_err() });
    assert!(pending, "one of its reads has not arrived");
    assert_eq!(control.release_all(), 1);
    let answer: Answer = harness.await_answer(stalled).expect("an answer").into();
    assert_answer(
        &answer,
        &expected(&[Ok(&model[..100]), Ok(&model[50_000..50_100])]),
        "released",
    );
    harness.finish();
}

fn a_batch_given_up_between_two_lots_of_reads() {
    // Scenario: a batch of three times the queue depth; its ticket is dropped while all slots are in flight,
    // and they finish in one turn, which leaves nothing in flight and nothing to start. Expectation: the
    // shard continues to take batches, and the memory is returned.
    let (harness, control, dataset, model) = Harness::simulated(1000 * 512, 512);
    let blocks: Vec<usize> = (0..3 * DEPTH as usize).map(|number| number * 3).collect();
    control.hold();
    let batch = blocks_of(&dataset, &blocks);
    let ticket = harness.submit(batch, SubmitOptions::default()).expect("accepted");
    assert!(control.wait_started(u64::from(DEPTH), WAIT));
    drop(ticket);
    control.release_all();
    harness.wait_idle();
    assert_eq!(control.started_total(), u64::from(DEPTH), "the rest is not read");
    harness.expect_blocks(&dataset, &model, 512, &[7]);
    harness.finish();
}

fn a_batch_given_up_before_its_first_read() {
    // Scenario: two batches hold all slots, so that a third is admitted without a read in flight; its ticket
    // is dropped. Expectation: none of its reads is made.
    let (harness, control, dataset, _) = Harness::simulated(1000 * 512, 512);
    let half = DEPTH as usize / 2;
    let blocks: Vec<usize> = (0..half).map(|number| number * 3).collect();
    control.hold();
    // Different blocks for each batch, or they would join.
    let submit = |number: usize| {
        let blocks: Vec<usize> = blocks.iter().map(|block| block + number * 100).collect();
        harness.submit(blocks_of(&dataset, &blocks), SubmitOptions::default())
    };
    let kept = [submit(0).expect("accepted"), submit(1).expect("accepted")];
    assert!(control.wait_started(u64::from(DEPTH), WAIT));

    drop(submit(2).expect("accepted"));
    // A fourth waits behind the third: when a slot becomes free, the third's turn comes first.
    let fourth = submit(3).expect("accepted");
    control.release_all();
    for ticket in kept.into_iter().chain([fourth]) {
        harness.await_answer(ticket).expect("an answer");
    }
    harness.wait_idle();
    assert_eq!(control.started_total(), 3 * half as u64);
    harness.finish();
}

fn a_drain_gives_up_at_its_deadline() {
    // Scenario: the device holds every read of three batches; a drain with a short deadline; then the device
    // continues. Expectation: the drain returns soon after its deadline and reports every remaining read;
    // accepted batches are still answered, and their memory is returned.
    let (harness, control, dataset, model) = Harness::simulated(1000 * 512, 512);
    // Different blocks for each batch, or they would join.
    let blocks = |batch: usize| -> Vec<usize> { (0..10).map(|number| number * 3 + batch * 100).collect() };
    control.hold();
    let submit = |batch| harness.submit(blocks_of(&dataset, &blocks(batch)), SubmitOptions::default());
    let tickets: Vec<_> = (0..3).map(|batch| submit(batch).expect("accepted")).collect();
    assert!(control.wait_started(u64::from(DEPTH), WAIT));
    // The shard counts them at the end of its turn.
    wait_until(
        || {
            let shards = harness.engine.shards();
            let counted = shards.iter().map(|shard| (shard.in_flight, shard.queued));
            counted.eq([(DEPTH, 30 - u64::from(DEPTH))])
        },
        || format!("{:?}", harness.engine.shards()),
    );
    let deadline = Instant::now() + Duration::from_millis(100);
    let report = harness.runtime.block_on(harness.engine.drain(deadline));
    assert_eq!(report.abandoned_reads, 30, "{DEPTH} in flight, the others queued");
    assert!(Instant::now() < deadline + WAIT, "a drain keeps to its deadline");
    assert!(
        harness.engine.memory().0 > 0,
        "memory in flight is not given back"
    );
    control.release_all();
    for (batch, ticket) in tickets.into_iter().enumerate() {
        let items: Vec<_> = blocks(batch)
            .into_iter()
            .map(|block| Ok(&model[block * 512..][..512]))
            .collect();
        let answer: Answer = harness.await_answer(ticket).expect("an answer").into();
        assert_answer(&answer, &expected(&items), "after the drain");
    }
    harness.finish();
}

fn a_drain_lets_go_of_what_nobody_waits_for() {
    // Scenario: the device returns nothing, and a batch waits behind the reads in flight; the engine is told to drain; then the
    // caller of the batch leaves. Expectation: the shard still gives signs of life, and when it is tended the memory of
    // the batch is free.
    let (harness, control, dataset, stuck) = Harness::stuck();
    let held = harness.engine.memory().0;
    let waiting = ranges_of(&dataset, &[(3 << 20, 3 << 20)]);
    let waiting = harness
        .submit(waiting, SubmitOptions::default())
        .expect("accepted");
    let report = harness.runtime.block_on(harness.engine.drain(Instant::now()));
    assert!(report.abandoned_reads > 0);
    let alive = || harness.runtime.block_on(harness.engine.signs_of_life(WAIT));
    assert_eq!(alive(), Ok(()));
    assert!(harness.engine.memory().0 >= held + (3 << 20));
    drop(waiting);
    harness.engine.tend();
    wait_until(
        || harness.engine.memory().0 == held,
        || format!("{} bytes, not {held}", harness.engine.memory().0),
    );
    control.release_all();
    harness.await_answer(stuck).expect("an answer");
    harness.finish();
}

fn memory_in_flight_is_not_reused() {
    // Scenario: a batch's reads are held and its ticket is dropped; batches that take all other memory come
    // and go, then the held reads write to their memory. Expectation: no other batch's bytes change.
    let (harness, control, dataset, model) = Harness::simulated(6 << 20, 1);
    control.set_faults(FaultPlan::script(&[Fault::Stall; 4]));
    let batch = ranges_of(&dataset, &[(0, 4 * MAX_READ_BYTES as usize)]);
    let ticket = harness.submit(batch, SubmitOptions::default()).expect("accepted");
    assert!(control.wait_started(4, WAIT));
    drop(ticket);
    let mut kept = Vec::new();
    while let Ok(ticket) = harness.submit(
        ranges_of(&dataset, &[(1 << 20, 1 << 20)]),
        SubmitOptions::default(),
    ) {
        kept.push(harness.await_answer(ticket).expect("an answer"));
    }
    assert!(kept.len() > 15, "most of the memory is taken");
    assert_eq!(control.release_all(), 4);
    wait_until(
        || control.in_flight() == 0,
        || "the held reads never finish".to_owned(),
    );
    assert!(kept.iter().all(|fetched| fetched.data == model[1 << 20..2 << 20]));
    drop(kept);
    harness.finish();
}

fn a_thousand_batches_under_faults() {
    // Scenario: a thousand random batches while attempts are short, fail, are interrupted, stall and finish
    // in any order; several batches at a time. Expectation: every item has its bytes or a device error with
    // its own extent; never a hang, never more in flight than the depth.
    let (harness, control, dataset, model) = Harness::simulated(300_001, 1);
    control.set_faults(FaultPlan {
        short_per_mille: 150,
        eio_per_mille: 30,
        eintr_per_mille: 80,
        eagain_per_mille: 80,
        stall_per_mille: 20,
        reorder: true,
        ..FaultPlan::default()
    });
    // The control prints its seed, from which this generator follows too.
    let mut random = fastrand::Rng::with_seed(control.seed());
    let mut failed = 0;
    for round in 0..200 {
        let shapes: Vec<Vec<(usize, usize)>> = (0..5)
            .map(|_| {
                let items = random.usize(1..30);
                let near = random.bool();
                let start = random.usize(..200_000);
                (0..items)
                    .map(|_| {
                        let offset = if near {
                            start + random.usize(..20_000)
                        } else {
                            random.usize(..300_000)
                        };
                        let longest = [10, 600, 5000, 150_000][random.usize(..4)];
                        (offset, random.usize(1..=longest).min(model.len() - offset))
                    })
                    .collect()
            })
            .collect();
        let tickets: Vec<_> = shapes
            .iter()
            .map(|shape| harness.submit(ranges_of(&dataset, shape), SubmitOptions::default()))
            .collect();
        for (shape, ticket) in shapes.iter().zip(tickets) {
            let mut ticket = ticket.expect("accepted");
            let deadline = Instant::now() + WAIT;
            let answer: Answer = loop {
                assert!(Instant::now() < deadline, "round {round}: {control}: no answer");
                let turn = async { tokio::time::timeout(Duration::from_millis(1), &mut ticket).await };
                match harness.runtime.block_on(turn) {
                    Ok(answer) => break answer.expect("an answer").into(),
                    Err(_) => control.release(usize::MAX),
                };
            };
            failed += answer.errors.len();
            let items: Vec<_> = (0..)
                .zip(shape)
                .map(
                    |(item, &(offset, length))| match answer.errors.iter().any(|error| error.item == item) {
                        true => Err(device(libc::EIO, offset as u64, length as u64)),
                        false => Ok(&model[offset..offset + length]),
                    },
                )
                .collect();
            assert_answer(&answer, &expected(&items), &format!("round {round}: {control}"));
        }
    }
    assert!(failed > 0, "some reads failed for good");
    assert!(control.max_in_flight() <= DEPTH as usize);
    control.release_all();
    harness.finish();
}

pub(crate) fn tests() -> Vec<Test> {
    simulated(
        "faults",
        named!(
            short_reads_still_give_the_bytes,
            a_read_that_arrives_byte_by_byte,
            interrupted_attempts_are_made_again,
            a_device_error_is_the_items_own,
            a_device_error_is_eio_however_it_is_read,
            a_failed_merged_read_is_tried_item_by_item,
            items_that_share_bytes_do_not_spoil_each_other,
            an_early_end_of_file_is_truncation,
            a_read_that_never_advances_fails,
            an_item_in_two_reads_has_one_error,
            held_reads_keep_to_the_queue_depth,
            a_stalled_read_holds_up_no_other,
            a_batch_given_up_between_two_lots_of_reads,
            a_batch_given_up_before_its_first_read,
            a_drain_gives_up_at_its_deadline,
            a_drain_lets_go_of_what_nobody_waits_for,
            memory_in_flight_is_not_reused,
            a_thousand_batches_under_faults
        ),
    )
}
