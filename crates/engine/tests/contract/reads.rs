//! Every requested byte, wherever it lies and whatever the batch.

use crate::harness::{Case, DEPTH, Harness, MAX_READ_BYTES, blocks_of, expected, ranges_of};
use crate::named;
use crate::suite::{Test, on_every_variant};
use ringfetch_engine::batch::Batch;
use ringfetch_engine::dataset::{Dtype, KindSpec, Layout};
use ringfetch_engine::engine::SubmitOptions;
use ringfetch_pattern as pattern;
use std::sync::Arc;

fn first_and_last_record(harness: &Harness) {
    // Scenario: the first and the last block of 25. Expectation: their bytes, in request order.
    let (path, model) = harness.file("blocks", 25 * 4096);
    let dataset = harness.blocks(4096, &[&path]);
    harness.expect_blocks(&dataset, &model, 4096, &[0, 24]);
    harness.expect_blocks(&dataset, &model, 4096, &[24, 0]);
    harness.expect_blocks(&dataset, &model, 4096, &[24]);
}

fn unaligned_ranges(harness: &Harness) {
    // Scenario: ranges that begin and end unaligned, alone and together, of one byte and of many.
    // Expectation: exactly their bytes.
    let (dataset, model) = harness.of_blocks(100_000, 1);
    let ranges = [
        (1, 1),
        (511, 2),
        (513, 1023),
        (4095, 4098),
        (50_001, 1),
        (777, 20_000),
        (99_998, 1),
    ];
    for range in ranges {
        harness.expect_ranges(&dataset, &model, &[range]);
    }
    harness.expect_ranges(&dataset, &model, &ranges);
}

fn a_range_crossing_a_block(harness: &Harness) {
    // Scenario: ranges of a blocks dataset over one and over many block boundaries. Expectation: their bytes.
    let (path, model) = harness.file("blocks", 16 * 4096);
    let dataset = harness.blocks(4096, &[&path]);
    harness.expect_ranges(
        &dataset,
        &model,
        &[(4000, 200), (4096, 8192), (1, 16 * 4096 - 2), (0, 16 * 4096)],
    );
}

fn a_range_crossing_files(harness: &Harness) {
    // Scenario: three files of odd lengths as one address space; ranges across one border, across two, on either side
    // of one, and all of it; blocks that straddle a border. Expectation: their bytes.
    let files = [
        harness.file("a", 20_480),
        harness.file("b", 7_777),
        harness.file("c", 12_345),
    ];
    let paths: Vec<_> = files.iter().map(|(path, _)| path.as_path()).collect();
    let model: Vec<u8> = files
        .iter()
        .flat_map(|(_, bytes)| bytes.iter().copied())
        .collect();
    let dataset = harness.blocks(1000, &paths);
    let ranges = [
        (20_000, 1000),
        (20_479, 1),
        (20_480, 1),
        (28_256, 2),
        (20_000, 10_000),
        (0, 40_000),
    ];
    for range in ranges {
        harness.expect_ranges(&dataset, &model, &[range]);
    }
    harness.expect_ranges(&dataset, &model, &ranges);
    harness.expect_blocks(&dataset, &model, 1000, &[20, 28, 39, 0, 20]);
}

fn an_unaligned_tail(harness: &Harness) {
    // Scenario: a file of 50 001 bytes, a multiple of no alignment; its last byte, its last thousand, all of
    // it. Expectation: their bytes, as if the file continued.
    let (path, model) = harness.file("tail", 50_001);
    let dataset = harness.blocks(1, &[&path]);
    for range in [(50_000, 1), (49_001, 1000), (49_664, 337), (0, 50_001)] {
        harness.expect_ranges(&dataset, &model, &[range]);
    }
    harness.expect_ranges(
        &dataset,
        &model,
        &[(50_000, 1), (0, 1), (49_001, 1000), (49_152, 849)],
    );
    let (small, one) = harness.file("small", 1);
    harness.expect_ranges(&harness.blocks(1, &[&small]), &one, &[(0, 1), (0, 1)]);
}

fn more_reads_than_depth(harness: &Harness) {
    // Scenario: one batch of 20 times the queue depth, no two reads mergeable, in random order. Expectation:
    // all of them.
    let reads = 20 * DEPTH as usize;
    let (path, model) = harness.file("blocks", 2 * reads * 512);
    let dataset = harness.blocks(512, &[&path]);
    let blocks: Vec<usize> = (0..reads).map(|number| number * 2 * 37 % (2 * reads)).collect();
    harness.expect_blocks(&dataset, &model, 512, &blocks);
}

fn more_reads_than_several_batches(harness: &Harness) {
    // Scenario: sixty batches at once, each larger than the queue depth, answered in any order. Expectation: each has
    // its own bytes.
    let (path, model) = harness.file("blocks", 1000 * 512);
    let dataset = harness.blocks(512, &[&path]);
    let shapes: Vec<Vec<usize>> = (0..60_usize)
        .map(|batch| (0..25).map(|item| (batch * 7919 + item * 31) % 1000).collect())
        .collect();
    let tickets: Vec<_> = shapes
        .iter()
        .map(|shape| harness.submit(blocks_of(&dataset, shape), SubmitOptions::default()))
        .collect();
    for (shape, ticket) in shapes.iter().zip(tickets) {
        let fetched = harness
            .await_answer(ticket.expect("accepted"))
            .expect("an answer");
        let wanted: Vec<u8> = shape
            .iter()
            .flat_map(|block| &model[block * 512..(block + 1) * 512])
            .copied()
            .collect();
        assert!(
            fetched.data == wanted,
            "{}: batch {shape:?} has other bytes",
            harness.name()
        );
    }
}

fn waiting_without_a_runtime(harness: &Harness) {
    // Scenario: a thread without a runtime waits for its ticket. Expectation: the answer.
    let (dataset, model) = harness.of_blocks(9000, 1);
    let ticket = harness.submit(ranges_of(&dataset, &[(5, 8000)]), SubmitOptions::default());
    let fetched = ticket.expect("accepted").wait().expect("an answer");
    assert!(fetched.data == model[5..8005], "{}", harness.name());
}

fn duplicates_and_overlaps(harness: &Harness) {
    // Scenario: the same block several times, between others; ranges inside, across and around one another.
    // Expectation: each item its own copy of the bytes.
    let (dataset, model) = harness.of_blocks(64 * 1024, 4096);
    harness.expect_blocks(&dataset, &model, 4096, &[3, 3, 3, 0, 3, 15, 0, 3]);
    harness.expect_ranges(
        &dataset,
        &model,
        &[
            (100, 1000),
            (0, 5000),
            (100, 1000),
            (999, 1),
            (4999, 2),
            (0, 65_536),
            (100, 1000),
            (512, 512),
        ],
    );
}

fn sequential_runs(harness: &Harness) {
    // Scenario: all blocks in order, in reverse, every second one, and ranges that touch. Expectation: their bytes.
    let (path, model) = harness.file("blocks", 64 * 4096);
    let dataset = harness.blocks(4096, &[&path]);
    harness.expect_blocks(&dataset, &model, 4096, &(0..64).collect::<Vec<_>>());
    harness.expect_blocks(&dataset, &model, 4096, &(0..64).rev().collect::<Vec<_>>());
    harness.expect_blocks(&dataset, &model, 4096, &(0..64).step_by(2).collect::<Vec<_>>());
    let touching: Vec<_> = (0..100).map(|number| (300 + number * 333, 333)).collect();
    harness.expect_ranges(&dataset, &model, &touching);
}

fn gaps_are_read_over_and_left_out(harness: &Harness) {
    // Scenario: items closer together than the gap that is read over, not ending on any alignment. Expectation: the
    // items' bytes and none of the gap's.
    let tuned = Harness::with(harness.variant, |config| config.plan.merge_gap_bytes = 4096);
    let (path, model) = tuned.file("file", 200_000);
    let dataset = tuned.blocks(1, &[&path]);
    let ranges: Vec<_> = (0..60).map(|number| (number * 3001, 700)).collect();
    tuned.expect_ranges(&dataset, &model, &ranges);
    tuned.finish();
}

fn a_range_larger_than_a_read(harness: &Harness) {
    // Scenario: ranges longer than the longest device read, aligned and not, alone and with others.
    // Expectation: their bytes, reassembled.
    let (dataset, model) = harness.of_blocks(2 << 20, 1);
    let most = MAX_READ_BYTES as usize;
    for range in [
        (0, most),
        (0, most + 1),
        (511, most),
        (511, 1 << 20),
        (0, 2 << 20),
        (1, (2 << 20) - 1),
    ] {
        harness.expect_ranges(&dataset, &model, &[range]);
    }
    harness.expect_ranges(
        &dataset,
        &model,
        &[(4096, 3 * most), (77, 5), (700, 2 * most + 9)],
    );
}

fn items_of_different_lengths(harness: &Harness) {
    // Scenario: a batch of lengths from one byte to 60 000. Expectation: each length reported, bytes back to
    // back.
    let (dataset, model) = harness.of_blocks(100_000, 1);
    let ranges: Vec<_> = (0..40).map(|number| (number * 997, 1 + number * 1500)).collect();
    harness.expect_ranges(&dataset, &model, &ranges);
}

fn vectors_with_headers_between(harness: &Harness) {
    // Scenario: an .fvecs file of 100 dimensions: 400 bytes from 4, then every 404; some in a row, some not, one twice.
    // Expectation: the elements without any header.
    let path = harness.directory.path().join("v.fvecs");
    pattern::write_vectors(&path, 5, Layout::Fvecs, Dtype::F32, 100, 500, &mut |_| true).expect("write");
    let kind = KindSpec::Vectors {
        layout: Layout::Fvecs,
        dim: None,
        dtype: None,
        header_bytes: 0,
    };
    let dataset = harness.open(kind, &[&path]);
    assert_eq!(dataset.count(), 500);
    expect_vectors(harness, &dataset, 5, 100, &[0, 499, 7, 8, 9, 10, 250, 7]);
}

fn vectors_of_3072_bytes(harness: &Harness) {
    // Scenario: raw f32 vectors of 768 dimensions, aligned to 1024 bytes; then after a header of 100 bytes,
    // unaligned. Expectation: their elements.
    for header_bytes in [0, 100] {
        let path = harness.directory.path().join(format!("v{header_bytes}"));
        pattern::write_vectors(&path, 6, Layout::Raw, Dtype::F32, 768, 200, &mut |_| true).expect("write");
        let elements = std::fs::read(&path).expect("read");
        let header = vec![0xAA; usize::try_from(header_bytes).expect("small")];
        std::fs::write(&path, [header, elements].concat()).expect("write");
        let kind = KindSpec::raw_vectors(768, Dtype::F32, header_bytes);
        let dataset = harness.open(kind, &[&path]);
        expect_vectors(harness, &dataset, 6, 768, &[199, 0, 1, 2, 3, 100, 98, 99, 0]);
    }
}

fn expect_vectors(
    harness: &Harness,
    dataset: &Arc<ringfetch_engine::dataset::Dataset>,
    seed: u64,
    dim: u64,
    ids: &[u64],
) {
    let vectors: Vec<Vec<u8>> = ids
        .iter()
        .map(|id| {
            let mut bytes = vec![0; usize::try_from(dim * 4).expect("small")];
            pattern::fill_elements(seed, Dtype::F32, id * dim, &mut bytes);
            bytes
        })
        .collect();
    let items: Vec<_> = vectors.iter().map(|vector| Ok(vector.as_slice())).collect();
    let build = || {
        let mut batch = Batch::new(Arc::clone(dataset), ids.len());
        ids.iter().for_each(|id| batch.push_vector(*id));
        batch
    };
    harness.expect(build, &items);
}

fn batches_from_both_cores_at_once(harness: &Harness) {
    // Scenario: on each core eight tasks fetch one batch after the other, while others are fetched from
    // outside. Expectation: every answer is right.
    let (path, model) = harness.file("blocks", 500 * 4096);
    let dataset = harness.blocks(4096, &[&path]);
    let model = Arc::new(model);
    let shape = |task: usize, round: usize| -> Vec<usize> {
        (0..10)
            .map(|item| (task * 131 + round * 17 + item * 97) % 500)
            .collect()
    };
    std::thread::scope(|scope| {
        for task in 0..16 {
            let (dataset, model) = (&dataset, &model);
            scope.spawn(move || {
                for round in 0..8 {
                    let blocks = shape(task, round);
                    let options = SubmitOptions::default();
                    let answer = harness.fetch_on(task % 2, blocks_of(dataset, &blocks), options);
                    let items: Vec<_> = blocks
                        .iter()
                        .map(|block| Ok(&model[block * 4096..][..4096]))
                        .collect();
                    assert!(
                        answer == Ok(expected(&items)),
                        "{}: task {task} round {round}",
                        harness.name()
                    );
                }
            });
        }
        for round in 0..20 {
            let blocks = shape(99, round);
            let answer = harness.fetch_outside(blocks_of(&dataset, &blocks), SubmitOptions::default());
            let items: Vec<_> = blocks
                .iter()
                .map(|block| Ok(&model[block * 4096..][..4096]))
                .collect();
            assert!(
                answer == Ok(expected(&items)),
                "{}: outside, round {round}",
                harness.name()
            );
        }
    });
}

pub(crate) const CASES: &[Case] = named!(
    first_and_last_record,
    unaligned_ranges,
    a_range_crossing_a_block,
    a_range_crossing_files,
    an_unaligned_tail,
    more_reads_than_depth,
    more_reads_than_several_batches,
    waiting_without_a_runtime,
    duplicates_and_overlaps,
    sequential_runs,
    gaps_are_read_over_and_left_out,
    a_range_larger_than_a_read,
    items_of_different_lengths,
    vectors_with_headers_between,
    vectors_of_3072_bytes,
    batches_from_both_cores_at_once,
);

pub(crate) fn tests() -> Vec<Test> {
    on_every_variant("reads", CASES)
}
