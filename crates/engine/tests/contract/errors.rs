//! Reads that must fail: the same error value from every backend, for the item concerned and for no other.

use crate::harness::{Case, Harness, MEMORY_BYTES, blocks_of, ranges_of};
use crate::named;
use crate::suite::{Test, on_every_variant};
use ringfetch_engine::batch::Batch;
use ringfetch_engine::error::{ReadError, ResponseMax};
use std::sync::Arc;

fn past_the_end(harness: &Harness) {
    // Scenario: ranges that cross the end, begin at it or lie past it; the block and vector after the last.
    // Expectation: the error with the actual count or length.
    let (dataset, _) = harness.of_blocks(10_000, 1000);
    for (offset, length) in [(9_999, 2), (10_000, 1), (0, 10_001), (1 << 40, 4096)] {
        let error = ReadError::RangeOutOfRange {
            offset: offset as u64,
            length: length as u64,
            end: 10_000,
        };
        harness.expect(|| ranges_of(&dataset, &[(offset, length)]), &[Err(error)]);
    }
    let error = |index| ReadError::IndexOutOfRange {
        what: "block",
        index,
        count: 10,
    };
    harness.expect(
        || blocks_of(&dataset, &[10, usize::MAX]),
        &[Err(error(10)), Err(error(u64::MAX))],
    );
}

fn a_partial_tail_is_not_served(harness: &Harness) {
    // Scenario: 10 100 bytes in blocks of 1000, the remainder ignored. Expectation: the remainder is out of
    // range, for blocks and for ranges.
    let (dataset, model) = harness.of_blocks(10_100, 1000);
    let past = ReadError::RangeOutOfRange {
        offset: 9_999,
        length: 2,
        end: 10_000,
    };
    harness.expect(
        || ranges_of(&dataset, &[(9_000, 1000), (9_999, 2)]),
        &[Ok(&model[9000..10_000]), Err(past)],
    );
}

fn no_bytes_and_too_many(harness: &Harness) {
    // Scenario: a range of no bytes; ranges whose end does not fit 64 bits. Expectation: each gets its own
    // error, even if the offset lies past the end.
    let (dataset, _) = harness.of_blocks(10_000, 1);
    let build = || {
        let mut batch = Batch::new(Arc::clone(&dataset), 5);
        batch.push_range(0, 0);
        batch.push_range(20_000, 0);
        batch.push_range(u64::MAX, 1);
        batch.push_range(1, u64::MAX);
        batch.push_range(u64::MAX, u64::MAX);
        batch
    };
    let overflow = |offset, length| Err(ReadError::RangeOverflow { offset, length });
    harness.expect(
        build,
        &[
            Err(ReadError::ZeroLength),
            Err(ReadError::ZeroLength),
            overflow(u64::MAX, 1),
            overflow(1, u64::MAX),
            overflow(u64::MAX, u64::MAX),
        ],
    );
}

fn an_item_of_another_kind(harness: &Harness) {
    // Scenario: a vector requested from a blocks dataset. Expectation: out of range, with count 0.
    let (dataset, model) = harness.of_blocks(8192, 4096);
    let build = || {
        let mut batch = Batch::new(Arc::clone(&dataset), 2);
        batch.push_vector(0);
        batch.push_block(1);
        batch
    };
    let error = ReadError::IndexOutOfRange {
        what: "vector",
        index: 0,
        count: 0,
    };
    harness.expect(build, &[Err(error), Ok(&model[4096..])]);
}

fn only_failed_items(harness: &Harness) {
    // Scenario: a batch of only failed items, one of them failed by the caller. Expectation: no bytes, the
    // errors in order, no device read.
    let (dataset, _) = harness.of_blocks(10_000, 1);
    let missing = ReadError::ObjectNotFound {
        name: "nowhere".to_owned(),
    };
    let build = || {
        let mut batch = ranges_of(&dataset, &[(0, 0), (10_000, 1)]);
        batch.push_failed(missing.clone());
        batch
    };
    let past = ReadError::RangeOutOfRange {
        offset: 10_000,
        length: 1,
        end: 10_000,
    };
    harness.expect(
        build,
        &[Err(ReadError::ZeroLength), Err(past), Err(missing.clone())],
    );
    assert_eq!(harness.device_reads(), 0, "{}", harness.name());
}

fn an_empty_batch(harness: &Harness) {
    // Scenario: no items. Expectation: an empty response.
    let (dataset, _) = harness.of_blocks(10_000, 1);
    harness.expect(|| ranges_of(&dataset, &[]), &[]);
}

fn good_and_failed_items_mixed(harness: &Harness) {
    // Scenario: failed items at the beginning, in the middle and at the end of good ones of different lengths.
    // Expectation: the good ones' bytes without a gap, length 0 for the others, errors in item order.
    let (dataset, model) = harness.of_blocks(50_001, 1);
    let past = |offset, length| {
        Err(ReadError::RangeOutOfRange {
            offset,
            length,
            end: 50_001,
        })
    };
    let ranges = [
        (50_001, 1),
        (7, 1000),
        (50_000, 2),
        (0, 0),
        (20_480, 4096),
        (49_999, 2),
        (1, 50_001),
    ];
    harness.expect(
        || ranges_of(&dataset, &ranges),
        &[
            past(50_001, 1),
            Ok(&model[7..1007]),
            past(50_000, 2),
            Err(ReadError::ZeroLength),
            Ok(&model[20_480..24_576]),
            Ok(&model[49_999..]),
            past(1, 50_001),
        ],
    );
    // A single good item after a failed one is read in place, unaligned.
    harness.expect(
        || ranges_of(&dataset, &[(0, 0), (700, 5000)]),
        &[Err(ReadError::ZeroLength), Ok(&model[700..5700])],
    );
}

fn a_response_larger_than_may_be(harness: &Harness) {
    // Scenario: a range, and a batch of ranges, of more bytes than a quarter of the memory; then exactly a
    // quarter. Expectation: refused at once with both figures; read.
    let (dataset, model) = harness.of_blocks(7 << 20, 1);
    let most = usize::try_from(MEMORY_BYTES / 4).expect("small");
    let too_large = |length: usize| {
        Err(ReadError::ResponseTooLarge {
            length: length as u64,
            max: ResponseMax::of_any(MEMORY_BYTES / 4),
        })
    };
    let answer = harness.fetch(|| ranges_of(&dataset, &[(0, most + 1)]));
    assert_eq!(answer, too_large(most + 1), "{}", harness.name());
    let answer = harness.fetch(|| ranges_of(&dataset, &[(0, most), (5, 2)]));
    assert_eq!(answer, too_large(most + 2), "{}", harness.name());
    harness.expect_ranges(&dataset, &model, &[(4096, most)]);
}

const CASES: &[Case] = named!(
    past_the_end,
    a_partial_tail_is_not_served,
    no_bytes_and_too_many,
    an_item_of_another_kind,
    only_failed_items,
    an_empty_batch,
    good_and_failed_items_mixed,
    a_response_larger_than_may_be,
);

pub(crate) fn tests() -> Vec<Test> {
    on_every_variant("errors", CASES)
}
