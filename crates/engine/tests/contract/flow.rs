//! Batches accepted, dropped, refused and drained: deadlines, dropped tickets, bounds, the end.

use crate::harness::VARIANTS;
use crate::harness::{
    Answer, Case, DEPTH, Harness, MEMORY_BYTES, assert_answer, blocks_of, expected, ranges_of,
};
use crate::named;
use crate::needs::Need;
use crate::suite::{Test, on_every_variant};
use crate::wait::{WAIT, wait_until};
use ringfetch_engine::batch::Batch;
use ringfetch_engine::config::{BackendKind, Placement};
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::SubmitOptions;
use ringfetch_engine::error::{ReadError, Resource, ResponseBound, ResponseMax};
use ringfetch_engine::share::Account;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Blocks of 512 bytes, no two of which merge.
fn scattered(dataset: &Arc<Dataset>, reads: usize, seed: usize) -> Batch {
    let blocks = usize::try_from(dataset.count()).expect("small");
    let chosen: Vec<usize> = (0..reads)
        .map(|number| (number * 2 + seed * 38) % blocks)
        .collect();
    blocks_of(dataset, &chosen)
}

fn a_deadline_that_passed(harness: &Harness) {
    // Scenario: batches whose deadline passed before they were submitted; then one with time left.
    // Expectation: DeadlineExceeded and no device read; the bytes.
    let (dataset, model) = harness.of_blocks(100_000, 1);
    let passed = SubmitOptions {
        deadline: Some(Instant::now()),
        ..SubmitOptions::default()
    };
    let answer = harness.fetch_with(|| ranges_of(&dataset, &[(0, 100), (5000, 3)]), passed);
    assert_eq!(answer, Err(ReadError::DeadlineExceeded), "{}", harness.name());
    assert_eq!(harness.device_reads(), 0, "{}", harness.name());
    let in_time = SubmitOptions {
        deadline: Some(Instant::now() + WAIT),
        ..SubmitOptions::default()
    };
    let answer = harness.fetch_with(|| ranges_of(&dataset, &[(0, 100)]), in_time);
    assert_eq!(answer.expect("in time").data, model[..100], "{}", harness.name());
}

fn tickets_dropped_in_flight(harness: &Harness) {
    // Scenario: batches far larger than the queue depth whose tickets are dropped at once, from outside and
    // on both cores, many times. Expectation: memory is returned, later reads are right, every item is
    // counted.
    let (dataset, model) = harness.of_blocks(4000 * 512, 512);
    for round in 0..40 {
        for seed in 0..3 {
            let batch = scattered(&dataset, 5 * DEPTH as usize, round * 3 + seed);
            match harness.submit(batch, SubmitOptions::default()) {
                Ok(ticket) => drop(ticket),
                Err(error) => assert_eq!(
                    error,
                    ReadError::Overloaded {
                        resource: Resource::Memory
                    }
                ),
            }
        }
        for core in 0..2 {
            let engine = harness.engine.clone();
            let batch = scattered(&dataset, 3 * DEPTH as usize, round + core);
            let items = batch.len() as u64;
            let (tell, told) = std::sync::mpsc::channel();
            harness.engine.spawn_on(core, move || async move {
                let ticket = engine.submit(batch, SubmitOptions::default());
                let accepted = if ticket.is_ok() { items } else { 0 };
                drop((ticket, engine));
                tell.send(accepted).expect("the test waits");
            });
            harness.count_accepted(told.recv_timeout(WAIT).expect("an answer in time"));
        }
    }
    harness.wait_idle();
    harness.expect_blocks(&dataset, &model, 512, &[0, 3999, 17, 2000]);
}

fn a_ticket_dropped_half_way(harness: &Harness) {
    // Scenario: one batch at a time, larger than the queue depth, whose ticket is dropped a little later each
    // time, so that it is cancelled with reads in flight, between two groups of them, or at its end.
    // Expectation: the next batch is answered every time.
    let (dataset, model) = harness.of_blocks(4000 * 512, 512);
    for round in 0..100_u32 {
        let ticket = harness.submit(
            scattered(&dataset, 3 * DEPTH as usize, 0),
            SubmitOptions::default(),
        );
        let dropped = Instant::now() + Duration::from_micros(u64::from(round) * 8);
        while Instant::now() < dropped {
            std::hint::spin_loop();
        }
        drop(ticket.expect("accepted"));
        let answer = harness.fetch_outside(blocks_of(&dataset, &[7]), SubmitOptions::default());
        assert_answer(
            &answer.expect("an answer"),
            &expected(&[Ok(&model[7 * 512..8 * 512])]),
            harness.name(),
        );
    }
}

fn more_queued_reads_than_allowed(harness: &Harness) {
    // Scenario: at most 64 queued reads per shard; batches of 60 are submitted as fast as possible.
    // Expectation: soon one is refused at once, naming the bound; accepted ones are answered; a batch larger
    // than the bound is read when nothing is queued.
    let tuned = Harness::with(harness.variant, |config| {
        config.queued_reads = 64;
        config.cores = 1;
        config.mmap.threads = 1;
    });
    let (path, model) = tuned.file("file", 4000 * 512);
    let dataset = tuned.blocks(512, &[&path]);
    if let Some(sim) = &tuned.sim {
        sim.hold();
    }
    let mut tickets = Vec::new();
    let deadline = Instant::now() + WAIT;
    let refusal = loop {
        assert!(Instant::now() < deadline, "{}: nothing is refused", tuned.name());
        match tuned.submit(scattered(&dataset, 60, tickets.len()), SubmitOptions::default()) {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => break error,
        }
        if tickets.len() == 100 {
            // The device is as fast as the test: start again.
            for ticket in tickets.drain(..) {
                tuned.await_answer(ticket).expect("an answer");
            }
        }
    };
    let resource = Resource::QueuedReads;
    assert_eq!(refusal, ReadError::Overloaded { resource }, "{}", tuned.name());
    if let Some(sim) = &tuned.sim {
        sim.release_all();
    }
    for ticket in tickets {
        tuned.await_answer(ticket).expect("an accepted batch is answered");
    }
    tuned.wait_idle();
    let blocks: Vec<usize> = (0..200).map(|number| number * 2).collect();
    tuned.expect_blocks(&dataset, &model, 512, &blocks);
    tuned.finish();
}

fn more_memory_than_there_is(harness: &Harness) {
    // Scenario: responses are kept until the memory is used up; then one is dropped. Expectation: the next
    // batch is refused at once, naming the memory; then accepted.
    let (dataset, model) = harness.of_blocks(6 << 20, 1);
    let large = 4 << 20;
    let mut kept = Vec::new();
    let refusal = loop {
        let batch = ranges_of(&dataset, &[(4096, large)]);
        match harness.submit(batch, SubmitOptions::default()) {
            Ok(ticket) => kept.push(harness.await_answer(ticket).expect("an answer")),
            Err(error) => break error,
        }
    };
    let resource = Resource::Memory;
    assert_eq!(refusal, ReadError::Overloaded { resource }, "{}", harness.name());
    let fit = usize::try_from(MEMORY_BYTES).expect("small") / large;
    assert_eq!(kept.len(), fit, "{}: answers of 4 MiB in memory", harness.name());
    // A slice keeps all of it.
    let slice = kept.pop().map(|fetched| fetched.data.slice(..1));
    let batch = ranges_of(&dataset, &[(4096, large)]);
    assert!(
        harness.submit(batch, SubmitOptions::default()).is_err(),
        "{}",
        harness.name()
    );
    drop(slice);
    harness.expect_ranges(&dataset, &model, &[(4096, large)]);
    assert!(
        kept.iter()
            .all(|fetched| fetched.data == model[4096..4096 + large]),
        "{}",
        harness.name()
    );
}

fn more_memory_than_a_share(harness: &Harness) {
    // Scenario: one connection keeps responses until it is refused; then another connection of the same
    // caller asks, and one of another caller. Expectation: the first held a good part of the memory and is
    // refused for what it or its caller holds; the others are served; dropped responses are credited.
    let (dataset, model) = harness.of_blocks(6 << 20, 1);
    let caller = harness.engine.caller_account(1);
    let greedy = caller.connection(1, MEMORY_BYTES / 2);
    let neighbour = caller.connection(2, MEMORY_BYTES / 2);
    let stranger = harness.engine.caller_account(2).connection(1, MEMORY_BYTES / 2);
    let charged_to = |account: &Arc<Account>| SubmitOptions {
        account: Some(Arc::clone(account)),
        ..SubmitOptions::default()
    };
    let piece: usize = 1 << 20;
    let mut kept = Vec::new();
    let refusal = loop {
        let batch = ranges_of(&dataset, &[(0, piece)]);
        match harness.submit(batch, charged_to(&greedy)) {
            Ok(ticket) => kept.push(harness.await_answer(ticket).expect("an answer")),
            Err(error) => break error,
        }
    };
    let ReadError::Overloaded { resource } = refusal else {
        panic!("{}: {refusal}", harness.name());
    };
    assert!(
        matches!(resource, Resource::CallerMemory | Resource::ConnectionMemory),
        "{}: {resource}",
        harness.name()
    );
    let held = (kept.len() * piece) as u64;
    assert!(
        (MEMORY_BYTES / 8..=MEMORY_BYTES / 3).contains(&held),
        "{}: {held}",
        harness.name()
    );
    for account in [&neighbour, &stranger] {
        let answer = harness.fetch_with(|| ranges_of(&dataset, &[(7, 9000)]), charged_to(account));
        assert_eq!(
            answer.expect("its own share").data,
            model[7..9007],
            "{}",
            harness.name()
        );
    }
    drop(kept);
    wait_until(
        || {
            [&greedy, &neighbour, &stranger]
                .iter()
                .all(|account| account.memory().held() == 0 && account.reads().held() == 0)
        },
        || format!("{}: a share keeps what was dropped", harness.name()),
    );
    let answer = harness.fetch_with(|| ranges_of(&dataset, &[(7, 9000)]), charged_to(&greedy));
    assert!(answer.is_ok(), "{}: {answer:?}", harness.name());
}

fn scratch_memory_that_never_fits(harness: &Harness) {
    // Scenario: 12 000 ranges of one byte, each in its own sector: 12 kB of response, and for direct reads 6
    // MB of scratch memory, with 4 MiB in all. And a connection whose share is a little more than its
    // response. Expectation: both are read, since waiting would never make room.
    let tuned = Harness::with(harness.variant, |config| config.memory_budget_bytes = 4 << 20);
    let (path, model) = tuned.file("file", 12_000 * 1024);
    let dataset = tuned.blocks(1, &[&path]);
    let ranges: Vec<_> = (0..12_000).map(|number| (number * 1024 + 3, 1)).collect();
    let wanted: Vec<u8> = ranges.iter().map(|(offset, _)| model[*offset]).collect();
    let answer = tuned.fetch_outside(ranges_of(&dataset, &ranges), SubmitOptions::default());
    assert!(
        answer.expect("read").data == wanted,
        "{}: other bytes",
        tuned.name()
    );
    tuned.finish();
    let ranges: Vec<_> = (0..100).map(|number| (number * 100_000 + 3, 1000)).collect();
    let wanted: Vec<u8> = ranges
        .iter()
        .flat_map(|(offset, length)| &model[*offset..offset + length])
        .copied()
        .collect();
    let options = SubmitOptions {
        account: Some(harness.engine.caller_account(1).connection(1, 102_400)),
        ..SubmitOptions::default()
    };
    let answer = harness.fetch_outside(ranges_of(&dataset, &ranges), options);
    assert!(
        answer.expect("read").data == wanted,
        "{}: other bytes",
        harness.name()
    );
}

fn a_response_larger_than_the_share(harness: &Harness) {
    // Scenario: a range of more bytes than the connection's whole share; then exactly as many, unaligned.
    // Expectation: too large, with the share's figure, not a momentary overload; read.
    let (dataset, model) = harness.of_blocks(100_000, 1);
    let options = || SubmitOptions {
        account: Some(harness.engine.caller_account(1).connection(1, 8192)),
        ..SubmitOptions::default()
    };
    let answer = harness.fetch_with(|| ranges_of(&dataset, &[(0, 8193)]), options());
    assert_eq!(
        answer,
        Err(ReadError::ResponseTooLarge {
            length: 8193,
            max: ResponseMax {
                bytes: 8192,
                bound: ResponseBound::Connection,
            },
        }),
        "{}",
        harness.name()
    );
    let answer = harness.fetch_outside(ranges_of(&dataset, &[(777, 8192)]), options());
    assert_eq!(answer.expect("read").data, model[777..8969], "{}", harness.name());
}

fn nothing_new_after_a_drain(harness: &Harness) {
    // Scenario: a drain, twice; then batches from outside, and tasks for the cores. Expectation: Draining at
    // once; the cores have stopped; the second drain has nothing to do.
    let own = Harness::with(harness.variant, |_| {});
    let (path, _) = own.file("file", 10_000);
    let dataset = own.blocks(1, &[&path]);
    for _ in 0..2 {
        let report = own.runtime.block_on(own.engine.drain(Instant::now() + WAIT));
        assert_eq!(report.abandoned_reads, 0, "{}", own.name());
        let answer = own.fetch_outside(ranges_of(&dataset, &[(0, 1)]), SubmitOptions::default());
        assert_eq!(answer, Err(ReadError::Draining), "{}", own.name());
    }
    assert!(!own.engine.spawn_on(0, || async {}), "{}", own.name());
    own.finish();
}

fn a_drain_with_reads_in_flight(harness: &Harness) {
    // Scenario: twenty batches larger than the queue depth, and immediately a drain. Expectation: all of them
    // are answered with their bytes, and nothing is abandoned.
    let own = Harness::with(harness.variant, |_| {});
    let (path, model) = own.file("file", 4000 * 512);
    let dataset = own.blocks(512, &[&path]);
    let blocks =
        |batch: usize| -> Vec<usize> { (0..50).map(|item| (batch * 37 + item * 2) % 4000).collect() };
    let submit = |batch| own.submit(blocks_of(&dataset, &blocks(batch)), SubmitOptions::default());
    let tickets: Vec<_> = (0..20).map(|batch| submit(batch).expect("accepted")).collect();
    let report = own.runtime.block_on(own.engine.drain(Instant::now() + WAIT));
    assert_eq!(report.abandoned_reads, 0, "{}", own.name());
    for (batch, ticket) in tickets.into_iter().enumerate() {
        let answer: Answer = own.await_answer(ticket).expect("answered").into();
        let items: Vec<_> = blocks(batch)
            .into_iter()
            .map(|block| Ok(&model[block * 512..][..512]))
            .collect();
        assert_answer(&answer, &expected(&items), own.name());
    }
    own.finish();
}

const CASES: &[Case] = named!(
    a_deadline_that_passed,
    tickets_dropped_in_flight,
    a_ticket_dropped_half_way,
    more_queued_reads_than_allowed,
    more_memory_than_there_is,
    more_memory_than_a_share,
    scratch_memory_that_never_fits,
    a_response_larger_than_the_share,
    nothing_new_after_a_drain,
    a_drain_with_reads_in_flight,
);

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = on_every_variant("flow", CASES);
    let needs = vec![Need::IoUring, Need::DirectIo];
    tests.push(Test::new(
        "flow::a_shard_is_its_cores_own".to_owned(),
        needs,
        a_shard_is_its_cores_own,
    ));
    tests
}

fn a_shard_is_its_cores_own() {
    // Scenario: uring on the cores' threads; batches submitted on core 1 only. Expectation: its shard reads all of
    // them, the other none.
    for variant in VARIANTS {
        if variant.backend != BackendKind::Uring || variant.placement != Placement::SameThread {
            continue;
        }
        let harness = Harness::with(variant, |_| {});
        // Where direct reads are of 4 KiB, smaller blocks share them.
        let (dataset, _) = harness.of_blocks(400 * 4096, 4096);
        for round in 0..5 {
            let answer = harness.fetch_on(1, scattered(&dataset, 10, round), SubmitOptions::default());
            assert!(answer.is_ok(), "{}: {answer:?}", harness.name());
        }
        let reads: Vec<u64> = harness
            .engine
            .shards()
            .iter()
            .map(|shard| shard.device_reads_total)
            .collect();
        // After a switch, the idle shards of the previous backend precede them.
        assert_eq!(reads[reads.len() - 2..], [0, 50], "{}", harness.name());
        harness.finish();
    }
}
