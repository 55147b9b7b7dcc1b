//! Random batches over two files, checked against a byte array: uring, mmap, pread and the simulation must
//! all return what the array does, errors included.

use crate::harness::{Harness, VARIANTS, Variant, assert_answer, expected};
use crate::suite::Test;
use proptest::prelude::*;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::error::ReadError;
use std::sync::Arc;

const FIRST_BYTES: usize = 70_001;
const BLOCK_BYTES: u64 = 1000;

#[derive(Debug, Clone, Copy)]
enum ItemRequest {
    Range { offset: u64, length: u64 },
    Block(u64),
}

fn requests() -> impl Strategy<Value = Vec<ItemRequest>> {
    let range = |(offset, length)| ItemRequest::Range { offset, length };
    let anywhere = (0..200_500_u64, 0..20_000_u64).prop_map(range);
    let small = (0..200_000_u64, 1..700_u64).prop_map(range);
    let aligned =
        (0..390_u64, 1..20_u64).prop_map(move |(sector, sectors)| range((sector * 512, sectors * 512)));
    let run = (0..20_u64).prop_map(move |step| range((60_000 + step * 1000, 1000)));
    let long = (0..50_000_u64, 128_000..150_000_u64).prop_map(range);
    let absurd = (any::<u64>(), any::<u64>()).prop_map(range);
    let block = (0..203_u64).prop_map(ItemRequest::Block);
    let request = prop_oneof![
        4 => anywhere,
        8 => small,
        4 => aligned,
        8 => run,
        1 => long,
        1 => absurd,
        4 => block
    ];
    prop::collection::vec(request, 0..60)
}

fn batch_of(dataset: &Arc<Dataset>, requests: &[ItemRequest]) -> Batch {
    let mut batch = Batch::new(Arc::clone(dataset), requests.len());
    for request in requests {
        match *request {
            ItemRequest::Range { offset, length } => batch.push_range(offset, length),
            ItemRequest::Block(index) => batch.push_block(index),
        }
    }
    batch
}

/// The expected result, from the array.
fn answer_of<'a>(model: &'a [u8], request: &ItemRequest) -> Result<&'a [u8], ReadError> {
    let end = model.len() as u64;
    let (offset, length) = match *request {
        ItemRequest::Block(index) if index >= end / BLOCK_BYTES => {
            return Err(ReadError::IndexOutOfRange {
                what: "block",
                index,
                count: end / BLOCK_BYTES,
            });
        }
        ItemRequest::Block(index) => (index * BLOCK_BYTES, BLOCK_BYTES),
        ItemRequest::Range { length: 0, .. } => return Err(ReadError::ZeroLength),
        ItemRequest::Range { offset, length } => (offset, length),
    };
    let range_end = offset
        .checked_add(length)
        .ok_or(ReadError::RangeOverflow { offset, length })?;
    if range_end > end {
        return Err(ReadError::RangeOutOfRange { offset, length, end });
    }
    let at = |offset: u64| usize::try_from(offset).expect("inside the model");
    Ok(&model[at(offset)..at(range_end)])
}

fn answers_what_the_model_says(variant: Variant) {
    // Scenario: random batches of ranges and blocks, valid and invalid, touching and overlapping, over two
    // files with an unaligned border; from outside and from each core. Expectation: the model's answer on
    // every backend.
    let harness = Harness::with(variant, |config| config.plan.merge_gap_bytes = 256);
    let files = [
        harness.file("a", FIRST_BYTES),
        harness.file("b", 200_000 - FIRST_BYTES),
    ];
    let dataset = harness.blocks(1000, &[&files[0].0, &files[1].0]);
    let model: Vec<u8> = files.into_iter().flat_map(|(_, bytes)| bytes).collect();
    let config = ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(requests in requests())| {
        let found = harness.fetch(|| batch_of(&dataset, &requests));
        let found = found.unwrap_or_else(|error| panic!("{}: {error}", harness.name()));
        let items: Vec<_> = requests.iter().map(|request| answer_of(&model, request)).collect();
        assert_answer(&found, &expected(&items), harness.name());
    });
    harness.finish();
}

pub(crate) fn tests() -> Vec<Test> {
    let chosen = ["uring_direct", "auto", "mmap", "pread", "sim"];
    let variants = VARIANTS.iter().filter(|variant| chosen.contains(&variant.name));
    let of_variant = |variant: &'static Variant| {
        let name = format!("model::{}::answers_what_the_model_says", variant.name);
        Test::new(name, variant.needs(), || answers_what_the_model_says(*variant))
    };
    variants.map(of_variant).collect()
}
