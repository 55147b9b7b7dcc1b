//! The planner against a byte array: for any batch and rules, executing the plan puts each item's bytes in
//! place.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::bench_hooks::plan_and_execute;
use ringfetch_engine::config::{DirectIo, PlanConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec, PartialTail};
use std::sync::{Arc, LazyLock};

const FILE_BYTES: u32 = 50_001;
const FIRST_FILE: usize = 20_480;

struct World {
    _directory: tempfile::TempDir,
    dataset: Arc<Dataset>,
    model: Vec<u8>,
}

/// Two files that form one address space; the second ends off every alignment.
static WORLD: LazyLock<World> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let model: Vec<u8> = (0..FILE_BYTES).map(|i| (i * 7 + i / 251) as u8).collect();
    let paths = ["a", "b"].map(|name| directory.path().join(name)).to_vec();
    std::fs::write(&paths[0], &model[..FIRST_FILE]).unwrap();
    std::fs::write(&paths[1], &model[FIRST_FILE..]).unwrap();
    let dataset = Dataset::open(&DatasetSpec {
        name: "model".to_owned(),
        paths,
        kind: KindSpec::Blocks {
            block_bytes: 1,
            partial_tail: PartialTail::Refuse,
        },
        direct_io: DirectIo::Required,
    });
    World {
        _directory: directory,
        dataset: Arc::new(dataset.expect("TMPDIR has direct I/O")),
        model,
    }
});

#[derive(Debug)]
struct Input {
    direct: bool,
    merge: bool,
    gap: u16,
    /// 4096 << 0 to 7.
    max_read: u8,
    items: Vec<Item>,
}

#[derive(Debug)]
enum Item {
    Any(u16, u16),
    Sectors(u8, u8),
    Near(u8, u8),
}

// By hand: the derive needs another build of most procedural macros.
impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(from: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let (direct, merge, gap, max_read) = from.arbitrary()?;
        let items = from.arbitrary()?;
        Ok(Self {
            direct,
            merge,
            gap,
            max_read,
            items,
        })
    }
}

impl<'a> Arbitrary<'a> for Item {
    fn arbitrary(from: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        Ok(match from.int_in_range(0..=2_u8)? {
            0 => Self::Any(from.arbitrary()?, from.arbitrary()?),
            1 => Self::Sectors(from.arbitrary()?, from.arbitrary()?),
            _ => Self::Near(from.arbitrary()?, from.arbitrary()?),
        })
    }
}

fuzz_target!(|input: Input| {
    let world = &*WORLD;
    let items: Vec<(u32, u32)> = (input.items.iter().take(256))
        .map(|item| match *item {
            Item::Any(offset, length) => (u32::from(offset), u32::from(length % 9000)),
            Item::Sectors(offset, length) => (u32::from(offset) * 512, u32::from(length % 16) * 512),
            Item::Near(offset, length) => (u32::from(offset) * 100, u32::from(length) * 3),
        })
        .map(|(offset, length)| {
            let offset = offset % FILE_BYTES;
            (offset, length.clamp(1, FILE_BYTES - offset))
        })
        .collect();
    let mut batch = Batch::new(Arc::clone(&world.dataset), items.len());
    for (offset, length) in &items {
        batch.push_range(u64::from(*offset), u64::from(*length));
    }
    assert!(batch.errors().is_empty());
    let max_read_bytes = 4096 << (input.max_read % 8);
    let config = PlanConfig {
        // At most a read's length, as the configuration requires.
        merge_gap_bytes: u32::from(input.gap).min(max_read_bytes),
        max_read_bytes,
    };
    let files = [&world.model[..FIRST_FILE], &world.model[FIRST_FILE..]];
    let (mut place, data) = plan_and_execute(&batch, input.direct, input.merge, &config, &files);
    for (offset, length) in items {
        let (offset, length) = (offset as usize, length as usize);
        assert_eq!(data[place..place + length], world.model[offset..offset + length]);
        place += length;
    }
});
