//! The settings of a step: which reads, from where, how many, and how many at once.

use crate::drive::engine::Choice;
use crate::material::Material;
use crate::questions::Questions;
use std::time::Duration;

const PAGE_BYTES: u64 = 4096;

/// Where the bytes must come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heat {
    /// O_DIRECT, from evicted files; mmap, which cannot, reads through the evicted page cache.
    Direct,
    /// Through the page cache, after eviction.
    Cold,
    /// From the page cache.
    Warm,
    /// From wherever they are: another process's page cache is left alone.
    AsFound,
}

impl Heat {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Cold => "cold",
            Self::Warm => "warm",
            Self::AsFound => "as found",
        }
    }
}

/// When a step ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amount {
    /// After this time, or when everything was read.
    For(Duration),
    /// After this many reads (for queries: this many queries), or when everything was read.
    Reads(u64),
    /// After this time, in which this many reads a second arrive, whether or not earlier ones have finished.
    At { per_second: u64, time: Duration },
}

/// What a step reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Blocks of the first file's first bytes.
    Blocks {
        block_bytes: usize,
        window_bytes: u64,
        random: bool,
    },
    /// Whole files, each once, in random order.
    Files { count: usize },
    /// Queries: for each, the vectors of all its candidates, which are scored.
    Queries { count: usize, oversampling: usize },
    /// Items of a daemon's dataset, `batch` per request.
    Items { count: u64, batch: usize, random: bool },
}

impl Shape {
    /// Blocks in random order.
    pub(crate) fn random(block_bytes: usize, window_bytes: u64) -> Self {
        Self::Blocks {
            block_bytes,
            window_bytes,
            random: true,
        }
    }
}

/// From one block that is read in random order to the next: every block, or of those smaller than a page every so many
/// that none is read with its neighbour. Of 3072 bytes every third: in page 0, 2, 4 and 5, 6 and 7, then 9.
pub(crate) fn spacing_bytes(block_bytes: u64) -> u64 {
    let block_bytes = block_bytes.max(1);
    if block_bytes >= PAGE_BYTES {
        return block_bytes;
    }
    // At least a page less one byte lies between two of them. An odd number: they begin at all the places within a page
    // at which the blocks of a dataset do, and cross its end as often.
    let every = (PAGE_BYTES - 1).div_ceil(block_bytes) + 1;
    block_bytes * (every | 1)
}

/// The settings of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setup {
    /// Index of the data among the study's.
    pub(crate) material: usize,
    pub(crate) heat: Heat,
    pub(crate) shape: Shape,
    pub(crate) amount: Amount,
    /// Most reads in flight: threads, or the depth of a queue.
    pub(crate) depth: usize,
    /// Whether each read opens its file, and the time for that counts.
    pub(crate) open_each: bool,
    /// Whether buffers are reused, or each read gets a new one.
    pub(crate) pooled: bool,
    /// Engine settings that override the strategy's.
    pub(crate) engine: Option<Choice>,
}

impl Setup {
    /// Files opened in advance, buffers reused, the strategy's own settings.
    pub(crate) fn new(heat: Heat, shape: Shape, amount: Amount, depth: usize) -> Self {
        Self {
            material: 0,
            heat,
            shape,
            amount,
            depth,
            open_each: false,
            pooled: true,
            engine: None,
        }
    }

    /// What the reads of these data have in common.
    pub(crate) fn reads(&self, material: &Material) -> Reads {
        let each = |count: usize| Reads {
            bytes: 0,
            group: 1,
            files: 1,
            window_bytes: u64::MAX,
            positions: count as u64,
            spacing_bytes: 1,
            random: true,
        };
        match self.shape {
            Shape::Blocks {
                block_bytes,
                window_bytes,
                random,
            } => {
                let spacing_bytes = match random {
                    true => spacing_bytes(block_bytes as u64),
                    false => (block_bytes as u64).max(1),
                };
                Reads {
                    bytes: block_bytes,
                    window_bytes,
                    positions: window_bytes / spacing_bytes,
                    spacing_bytes,
                    random,
                    ..each(0)
                }
            }
            Shape::Files { count } => {
                let lengths = material.files.iter().take(count).map(|file| file.length_bytes);
                let bytes = usize::try_from(lengths.max().unwrap_or(0)).unwrap_or(usize::MAX);
                Reads {
                    bytes,
                    files: count,
                    ..each(count)
                }
            }
            Shape::Queries { count, oversampling } => {
                let questions = material.questions.as_ref();
                let group = questions.map_or(1, |questions| questions.candidates(oversampling));
                let bytes = questions.map_or(0, Questions::vector_bytes);
                Reads {
                    bytes,
                    group,
                    ..each(count)
                }
            }
            Shape::Items { count, batch, random } => Reads {
                group: batch,
                positions: count,
                random,
                ..each(0)
            },
        }
    }
}

/// What a step's reads have in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reads {
    /// Bytes of the longest read; 0: the length of a daemon's item.
    pub(crate) bytes: usize,
    /// Most reads requested together.
    pub(crate) group: usize,
    /// Files read, and how many bytes of each.
    pub(crate) files: usize,
    pub(crate) window_bytes: u64,
    /// Positions to read, and the bytes from one to the next.
    pub(crate) positions: u64,
    pub(crate) spacing_bytes: u64,
    pub(crate) random: bool,
}

impl Reads {
    /// Bytes of this many groups in flight.
    pub(crate) fn in_flight_bytes(&self, depth: usize) -> u64 {
        (self.bytes as u64).saturating_mul(self.group.saturating_mul(depth) as u64)
    }

    /// Response memory that the engine needs for batches of this many reads. Each read takes whole pages
    /// (three times as many, with the scratch memory, if it does not begin and end on a page). A batch may
    /// take a quarter of the memory, and all in flight need a quarter more than their size. 12 reads of 16
    /// MiB need 240 MiB.
    pub(crate) fn engine_bytes(&self, depth: usize, batch: usize) -> u64 {
        let bytes = self.bytes as u64;
        let pages = if bytes.is_multiple_of(PAGE_BYTES) { 1 } else { 3 };
        let read = bytes.next_multiple_of(PAGE_BYTES).saturating_mul(pages);
        let in_flight = read.saturating_mul(self.group.saturating_mul(depth) as u64);
        let batch = read
            .saturating_mul(self.group.max(batch) as u64)
            .saturating_mul(4);
        batch.max(in_flight / 4 * 5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::material::tests::{scratch, small};
    use ringfetch_command::quantity::approximate;

    #[test]
    fn small_blocks_cross_pages_as_those_of_a_dataset_and_share_none() {
        // Scenario: random blocks of 512 bytes to 6000. Expected: each is a block of the dataset, within the window; no two
        // small ones share a page; as large a share of them lies in two pages as of all blocks (of 3072 bytes half).
        let directory = scratch();
        let material = small(directory.path());
        let window_bytes = material.length_bytes();
        let pages = |offset: u64, bytes: u64| offset / PAGE_BYTES..(offset + bytes).div_ceil(PAGE_BYTES);
        let crossing = |offsets: &[u64], bytes: u64| {
            let crossing = offsets.iter().filter(|offset| {
                let pages = pages(**offset, bytes);
                pages.end - pages.start > bytes.div_ceil(PAGE_BYTES)
            });
            approximate(crossing.count() as u64) / approximate(offsets.len() as u64)
        };
        for bytes in [512, 1000, 1536, 3072, 4096, 6000] {
            let shape = Shape::random(usize::try_from(bytes).unwrap(), window_bytes);
            let setup = Setup::new(Heat::Cold, shape, Amount::Reads(1), 1);
            let reads = setup.reads(&material);
            let offsets: Vec<u64> = (0..reads.positions).map(|at| at * reads.spacing_bytes).collect();
            for two in offsets.windows(2) {
                assert!(
                    two[0].is_multiple_of(bytes) && two[1] + bytes <= window_bytes,
                    "{two:?}"
                );
                let apart = pages(two[1], bytes).start >= pages(two[0], bytes).end;
                assert!(apart || bytes > PAGE_BYTES, "{bytes} bytes: {two:?}");
            }
            let all: Vec<u64> = (0..window_bytes / bytes).map(|at| at * bytes).collect();
            let [ours, all] = [crossing(&offsets, bytes), crossing(&all, bytes)];
            assert!((ours - all).abs() < 0.02, "{bytes} bytes: {ours}, of all {all}");
        }
    }
}
