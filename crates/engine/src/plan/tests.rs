//! The planner against a byte-array model: for any batch, executing the plan puts every item's bytes in
//! place.

use super::model::execute;
use super::{Place, Plan, PlanRules, plan};
use crate::batch::Batch;
use crate::config::DirectIo;
use crate::dataset::{Dataset, DatasetSpec, KindSpec};
use proptest::prelude::*;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, LazyLock};

const FILE_BYTES: usize = 50_001;

struct World {
    dataset: Arc<Dataset>,
    model: Vec<u8>,
}

/// Alignment of direct reads, whatever the file system has.
const SECTOR: u32 = 512;

/// Two files that form one address space; the second ends off every alignment. Holds only their open
/// descriptors: a static is never dropped and would leave their directory behind.
static WORLD: LazyLock<World> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let mut model = vec![0; FILE_BYTES];
    ringfetch_pattern::fill(7, 0, &mut model);
    let paths = vec![directory.path().join("a"), directory.path().join("b")];
    std::fs::write(&paths[0], &model[..20_480]).unwrap();
    std::fs::write(&paths[1], &model[20_480..]).unwrap();
    let dataset = Dataset::open(&DatasetSpec {
        name: "model".to_owned(),
        paths,
        kind: KindSpec::blocks(1),
        direct_io: DirectIo::Off,
    })
    .unwrap()
    .assume_direct(SECTOR);
    World {
        dataset: Arc::new(dataset),
        model,
    }
});

fn items() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let any = (0..FILE_BYTES, 1..9_000_usize);
    let aligned = (0..90_usize, 1..6_usize).prop_map(|(block, blocks)| (block * 512, blocks * 512));
    let near = (0..40_usize, 1..400_usize).prop_map(|(step, length)| (step * 400, length));
    let item = prop_oneof![any, aligned, near];
    prop::collection::vec(item, 1..40).prop_map(|items| {
        items
            .into_iter()
            .map(|(offset, length)| (offset, length.min(FILE_BYTES - offset)))
            .collect()
    })
}

proptest! {
    /// Any mix of aligned, unaligned, overlapping, touching and repeated ranges, direct or not, merged or
    /// not: each item's bytes equal the model's.
    #[test]
    fn every_item_gets_its_bytes(
        items in items(),
        direct in any::<bool>(),
        merge in any::<bool>(),
        merge_gap_bytes in prop_oneof![Just(0), Just(512), 0..5000_u32],
        max_read_bytes in prop_oneof![Just(4096_u32), Just(16_384), Just(1 << 20)],
    ) {
        let world = &*WORLD;
        let mut batch = Batch::new(Arc::clone(&world.dataset), items.len());
        for (offset, length) in &items {
            batch.push_range(*offset as u64, *length as u64);
        }
        prop_assert!(batch.errors().is_empty());
        let plan = plan(&batch, PlanRules { direct, merge, merge_gap_bytes, max_read_bytes });
        let files = [&world.model[..20_480], &world.model[20_480..]];
        let data = execute(&plan, &files);
        let mut place = plan.lead_bytes as usize;
        for (offset, length) in &items {
            prop_assert_eq!(&data[place..place + length], &world.model[*offset..offset + length]);
            place += length;
        }
        prop_assert!(plan.reads.iter().all(|read| read.length <= max_read_bytes.max(4096)));
    }
}

fn planned(ranges: &[(u64, u64)]) -> Plan {
    let mut batch = Batch::new(Arc::clone(&WORLD.dataset), ranges.len());
    for (offset, length) in ranges {
        batch.push_range(*offset, *length);
    }
    plan(
        &batch,
        PlanRules {
            direct: true,
            merge: true,
            merge_gap_bytes: 0,
            max_read_bytes: 1 << 20,
        },
    )
}

/// Sixty-four scattered aligned blocks are sixty-four reads in place: no scratch, no copy.
#[test]
fn aligned_blocks_need_no_scratch() {
    let plan = planned(&[(8192, 4096), (0, 4096), (16_384, 4096)]);
    assert_eq!(plan.scratch_bytes, 0);
    assert_eq!(plan.reads.len(), 3);
    assert!(
        plan.reads
            .iter()
            .all(|read| matches!(read.place, Place::Data(_)) && read.pieces == 1)
    );
}

/// Of two files of 2^62 bytes, file, offset and index of an item take more than 64 bits: its reads are in order, too.
#[test]
fn items_at_huge_offsets_are_sorted() {
    let sparse = [(); 2].map(|()| {
        let file = rustix::fs::memfd_create(c"sparse", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 62).unwrap();
        file
    });
    let path = |file: &OwnedFd| format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    let mut spec = DatasetSpec::new("sparse", "", KindSpec::blocks(1), DirectIo::Off);
    spec.paths = sparse.iter().map(path).collect();
    let mut batch = Batch::new(Arc::new(Dataset::open(&spec).unwrap()), 4);
    for (offset, length) in [
        ((1 << 63) - 10, 10),
        (7, 3),
        ((1 << 62) + 5, 1),
        ((1 << 62) - 8, 4),
    ] {
        batch.push_range(offset, length);
    }
    let rules = PlanRules {
        direct: false,
        merge: true,
        merge_gap_bytes: 0,
        max_read_bytes: 1 << 20,
    };
    let plan = plan(&batch, rules);
    let reads: Vec<_> = plan.reads.iter().map(|read| (read.file, read.offset)).collect();
    assert_eq!(reads, [(0, 7), (0, (1 << 62) - 8), (1, 5), (1, (1 << 62) - 10)]);
    let items: Vec<_> = plan.pieces.iter().map(|piece| piece.item).collect();
    assert_eq!(items, [1, 3, 2, 0]);
}

/// The same block five times is one read and four copies.
#[test]
fn duplicates_are_read_once() {
    let plan = planned(&[(4096, 4096); 5]);
    assert_eq!((plan.reads.len(), plan.pieces.len()), (1, 5));
}

/// Blocks in file order merge into one read that still lands in place.
#[test]
fn a_sequential_run_is_one_read_in_place() {
    let plan = planned(&[(0, 4096), (4096, 4096), (8192, 4096)]);
    assert_eq!(plan.reads.len(), 1);
    assert_eq!(plan.reads[0].place, Place::Data(0));
    assert_eq!(plan.scratch_bytes, 0);
}

/// A single unaligned range is read in place, with a lead in front of it.
#[test]
fn a_lone_unaligned_range_has_a_lead_instead_of_scratch() {
    let plan = planned(&[(700, 5000)]);
    assert_eq!(
        (plan.lead_bytes, plan.scratch_bytes, plan.reads.len()),
        (700 % SECTOR, 0, 1)
    );
    assert_eq!((plan.reads[0].offset, plan.reads[0].needed), (512, 188 + 5000));
}

/// Two small vectors in one sector cost one device read.
#[test]
fn neighbours_in_a_sector_share_a_read() {
    let plan = planned(&[(100, 50), (1, 60), (300, 100)]);
    assert_eq!(plan.reads.len(), 1);
    assert_eq!(plan.reads[0].length, SECTOR);
}

/// A plan that would take too much scratch memory reads in place, unaligned, instead; one that fits does not.
#[test]
fn scratch_memory_is_bounded() {
    let ranges: Vec<(u64, u64)> = (0..40).map(|number| (number * 1024 + 3, 1)).collect();
    let mut batch = Batch::new(Arc::clone(&WORLD.dataset), ranges.len());
    for (offset, length) in &ranges {
        batch.push_range(*offset, *length);
    }
    let rules = PlanRules {
        direct: true,
        merge: true,
        merge_gap_bytes: 0,
        max_read_bytes: 1 << 20,
    };
    let within = |most| super::plan_within(&batch, rules, |plan| plan.scratch_bytes <= most);
    assert_eq!(within(40 * 512), plan(&batch, rules));
    let bounded = within(40 * 512 - 1);
    assert_eq!(
        (bounded.scratch_bytes, bounded.data_bytes, bounded.reads.len()),
        (0, 40, 40)
    );
    assert!(
        bounded
            .reads
            .iter()
            .all(|read| !read.direct && read.alignment == 1)
    );
}

/// The estimate before planning equals the plan if a request names neighbours in order, and is higher if it
/// does not; gaps and long items are handled as in the plan.
#[test]
fn reads_are_expected_as_they_will_be_planned() {
    let rules = |merge, merge_gap_bytes| PlanRules {
        direct: false,
        merge,
        merge_gap_bytes,
        max_read_bytes: 8192,
    };
    let expected = |rules, ranges: &[(u64, u64)]| {
        let mut batch = Batch::new(Arc::clone(&WORLD.dataset), ranges.len());
        ranges
            .iter()
            .for_each(|(offset, length)| batch.push_range(*offset, *length));
        (
            super::expected_reads(&batch, rules),
            plan(&batch, rules).reads.len(),
        )
    };
    assert_eq!(
        expected(rules(true, 0), &[(0, 100), (100, 100), (200, 100)]),
        (1, 1)
    );
    assert_eq!(expected(rules(false, 0), &[(0, 100), (100, 100)]), (2, 2));
    assert_eq!(
        expected(rules(true, 50), &[(0, 100), (150, 100), (301, 100)]),
        (2, 2)
    );
    assert_eq!(expected(rules(true, 0), &[(0, 20_000)]), (3, 3), "cut");
    assert_eq!(
        expected(rules(true, 0), &[(0, 8000), (8000, 8000)]),
        (2, 2),
        "too long for one"
    );
    assert_eq!(
        expected(rules(true, 0), &[(500, 100), (9000, 100), (40_000, 10)]),
        (3, 3)
    );
    assert_eq!(
        expected(rules(true, 0), &[(200, 100), (100, 100)]),
        (2, 1),
        "in another order"
    );
    assert_eq!(expected(rules(true, 0), &[]), (0, 0));
}
