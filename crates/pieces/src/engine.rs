//! The engine's pieces on the path of every read: geometry, batch, plan, response memory, counters.

use crate::harness::Piece;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::bench_hooks::{Counters, plan_reads};
use ringfetch_engine::buffer::Arena;
use ringfetch_engine::config::DirectIo;
use ringfetch_engine::dataset::{Dataset, DatasetSpec, KindSpec};
use ringfetch_engine::geometry::{Extent, VectorGrid, block_extent, vector_extent};
use std::hint::black_box;
use std::sync::Arc;

const BATCH: usize = 64;
const FILE_BYTES: u64 = 1 << 30;

pub(crate) fn pieces() -> Result<Vec<Piece>, Box<dyn std::error::Error>> {
    // Next to the program, not in a directory for temporary files: those may be in memory, where no read is
    // direct.
    let program = std::env::current_exe()?;
    let file = tempfile::NamedTempFile::new_in(program.parent().ok_or("a program without a directory")?)?;
    file.as_file().set_len(FILE_BYTES)?;
    let spec = DatasetSpec::new("data", file.path(), KindSpec::blocks(4096), DirectIo::Preferred);
    let dataset = Arc::new(Dataset::open(&spec)?);
    let mut random = fastrand::Rng::with_seed(1);
    let blocks: Vec<u64> = (0..BATCH).map(|_| random.u64(..dataset.count())).collect();
    let offsets: Vec<u64> = (0..BATCH).map(|_| random.u64(..FILE_BYTES - 100)).collect();
    let eight = blocks[..8].to_vec();

    let of_blocks = |indices: &mut dyn Iterator<Item = u64>| {
        let mut batch = Batch::new(Arc::clone(&dataset), BATCH);
        indices.for_each(|index| batch.push_block(index));
        batch
    };
    let aligned = of_blocks(&mut blocks.iter().copied());
    let duplicates = of_blocks(&mut (0..BATCH).map(|item| eight[item % 8]));
    let neighbours = of_blocks(&mut (0..BATCH as u64));
    let mut unaligned = Batch::new(Arc::clone(&dataset), BATCH);
    offsets
        .iter()
        .for_each(|&offset| unaligned.push_range(offset, 100));

    let grid = VectorGrid {
        base_offset: 128,
        stride_bytes: 3076,
        vector_bytes: 3072,
        count: 1 << 20,
    };
    let arena = Arena::new(64 << 20, 1)?;
    let counters = Arc::new(Counters::new()?);
    let counting = Arc::clone(&counters);
    let length = |extent: Option<Extent>| extent.map_or(0, |extent| extent.length);
    let geometry_blocks = blocks.clone();

    Ok(vec![
        Piece::new("geometry-block-64", move || {
            let extent = |&index: &u64| block_extent(black_box(index), 4096, 1 << 20).ok();
            to_usize(geometry_blocks.iter().map(|index| length(extent(index))).sum())
        }),
        Piece::new("geometry-vector-64", move || {
            let extent = |id| vector_extent(black_box(id), grid).ok();
            to_usize((0..BATCH as u64).map(|id| length(extent(id))).sum())
        }),
        Piece::new("batch-64-blocks", move || {
            let mut batch = Batch::new(Arc::clone(&dataset), BATCH);
            blocks.iter().for_each(|&index| batch.push_block(index));
            batch.len()
        }),
        Piece::new("plan-64-aligned", move || plan_reads(black_box(&aligned))),
        Piece::new("plan-64-unaligned", move || plan_reads(black_box(&unaligned))),
        Piece::new("plan-64-duplicates", move || plan_reads(black_box(&duplicates))),
        Piece::new("plan-64-neighbours", move || plan_reads(black_box(&neighbours))),
        Piece::new("arena-reserve-free-256k", move || {
            usize::from(black_box(arena.reserve(256 << 10, None)).is_ok())
        }),
        Piece::new("metrics-count-batch-64", move || {
            counting.count_batch(black_box(64));
            1
        }),
        Piece::new("metrics-scrape-2-shards", move || counters.collect()),
    ])
}

fn to_usize(sum: u64) -> usize {
    usize::try_from(sum).unwrap_or(0)
}
