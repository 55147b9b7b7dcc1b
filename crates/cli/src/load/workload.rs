//! What is read: one dataset or several with shares, which of their items, how many per request, and the
//! check of their bytes.

use super::args::{Batch, PatternArg, ScoreAt};
use super::choice::Chooser;
use super::scores::{Ranking, Scoring};
use crate::expected::{Mismatch, check_elements, check_stream};
use ringfetch_client::Dtype;
use ringfetch_pace::trace::TraceEntries;
use ringfetch_pattern::object_seed;

/// Most objects that are read, the first ones in the order of names: chosen at random, a million are as good as all.
pub(super) const OBJECTS_MAX: usize = 1_000_000;

/// All datasets to read, with their proportions.
#[derive(Debug)]
pub(crate) struct Workload {
    /// At least one; each with the cumulative share up to it, 1 for the last.
    pub(super) parts: Vec<(Part, f64)>,
    pub(super) batch: Batch,
}

/// What to read from one dataset.
#[derive(Debug)]
pub(crate) struct Part {
    dataset: String,
    target: Target,
    chooser: Chooser,
    /// The entries of a trace; the chooser chooses among their positions.
    trace: Option<Vec<u64>>,
    /// The order of the items, for people.
    order: String,
    pub(super) scoring: Option<Scoring>,
    /// The pattern's seed, if every byte is to be checked.
    pub(super) verify: Option<u64>,
}

/// What an item is.
#[derive(Debug)]
pub(crate) enum Target {
    Blocks {
        block_bytes: u32,
    },
    Vectors {
        dtype: Dtype,
        dim: u32,
    },
    Ranges {
        range_bytes: u64,
    },
    /// Offset and length of each.
    Extents(Vec<(u64, u64)>),
    Objects {
        names: Vec<String>,
    },
}

/// One request: which part of the workload, and which of its items.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    pub(crate) part: usize,
    pub(crate) items: Vec<u64>,
}

impl Workload {
    /// Chooses the next request into `choice`.
    pub(crate) fn choose(&self, random: &mut fastrand::Rng, choice: &mut Choice) {
        choice.part = if self.parts.len() == 1 {
            0
        } else {
            let share = random.f64();
            let part = self.parts.iter().position(|(_, sum)| share < *sum);
            // The sums may end a rounding error below 1.
            part.unwrap_or(self.parts.len() - 1)
        };
        let batch = if self.batch.min == self.batch.max {
            self.batch.max
        } else {
            random.u32(self.batch.min..=self.batch.max)
        };
        let Some((part, _)) = self.parts.get(choice.part) else {
            return;
        };
        part.chooser.choose(random, batch, &mut choice.items);
        if let Some(listed) = &part.trace {
            for item in &mut choice.items {
                *item = at(listed, *item).copied().unwrap_or(0);
            }
        }
    }

    /// The part of a request; the first one if the number is invalid.
    pub(crate) fn part(&self, part: usize) -> &Part {
        let (part, _) = self.parts.get(part).unwrap_or(&self.parts[0]);
        part
    }

    /// All parts with their shares of the requests.
    pub(crate) fn parts(&self) -> impl ExactSizeIterator<Item = (&Part, f64)> {
        let mut before = 0.0;
        self.parts.iter().map(move |(part, sum)| {
            let share = sum - std::mem::replace(&mut before, *sum);
            (part, share)
        })
    }

    /// Whether bytes are checked.
    pub(crate) fn verifies(&self) -> bool {
        self.parts.iter().any(|(part, _)| part.verify.is_some())
    }
}

impl Part {
    /// Reads `count` items, in this order; nothing is scored or checked.
    pub(super) fn new(dataset: String, target: Target, count: u64, order: PatternArg) -> Self {
        Self {
            dataset,
            target,
            chooser: Chooser::new(order, count),
            trace: None,
            order: order.to_string(),
            scoring: None,
            verify: None,
        }
    }

    pub(crate) fn dataset(&self) -> &str {
        &self.dataset
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Reads the entries of a trace, in order, repeatedly.
    pub(super) fn follow(&mut self, listed: TraceEntries) {
        let length = match listed {
            TraceEntries::Items(items) => self.trace.insert(items).len(),
            TraceEntries::Ranges(ranges) => {
                let length = ranges.len();
                self.target = Target::Extents(ranges);
                length
            }
        };
        self.order = format!("a trace of {length}");
        self.chooser = Chooser::new(PatternArg::Sequential, length as u64);
    }

    /// The order of the items, for people.
    pub(crate) fn order(&self) -> &str {
        &self.order
    }

    /// Whether bytes are checked.
    pub(crate) fn verifies(&self) -> bool {
        self.verify.is_some()
    }

    /// Whether a response's bytes are used, and so must be kept.
    pub(crate) fn keeps_bytes(&self) -> bool {
        self.verify.is_some() || self.scoring.is_some()
    }

    /// How its vectors are scored, if that side does it.
    pub(crate) fn scored_at(&self, at: ScoreAt) -> Option<&Scoring> {
        self.scoring.as_ref().filter(|scoring| scoring.at == at)
    }

    /// Compares a ranking with that of the pattern's vectors: the first difference, and how many there are.
    pub(crate) fn check_ranking(&self, items: &[u64], ranking: &Ranking) -> Option<(String, u64)> {
        self.scoring.as_ref()?.check(self.verify?, items, ranking)
    }

    /// Compares an item's bytes with the pattern; `None` if they are right, or not checked.
    pub(crate) fn check(&self, item: u64, bytes: &[u8], scratch: &mut Vec<u8>) -> Option<Mismatch> {
        let seed = self.verify?;
        match &self.target {
            Target::Blocks { block_bytes } => check_stream(seed, item * u64::from(*block_bytes), bytes),
            Target::Vectors { dtype, dim } => {
                check_elements(seed, *dtype, item * u64::from(*dim), bytes, scratch)
            }
            Target::Ranges { .. } | Target::Extents(_) => {
                check_stream(seed, self.target.extent(item)?.0, bytes)
            }
            Target::Objects { names } => check_stream(object_seed(seed, name(names, item)), 0, bytes),
        }
    }

    /// An item for people: `block 17`.
    pub(crate) fn describe(&self, item: u64) -> String {
        match &self.target {
            Target::Blocks { .. } => format!("block {item}"),
            Target::Vectors { .. } => format!("vector {item}"),
            Target::Ranges { .. } | Target::Extents(_) => {
                let (offset, length) = self.target.extent(item).unwrap_or_default();
                format!("{length} bytes from {offset}")
            }
            Target::Objects { names } => format!("object {}", name(names, item)),
        }
    }

    /// What is read, for people: `blocks of 4096 bytes`.
    pub(crate) fn what(&self) -> String {
        match &self.target {
            Target::Blocks { block_bytes } => format!("blocks of {block_bytes} bytes"),
            Target::Vectors { dtype, dim } => match &self.scoring {
                Some(scoring) => format!("vectors of {dim} {dtype}, {}", scoring.what()),
                None => format!("vectors of {dim} {dtype}"),
            },
            Target::Ranges { range_bytes } => format!("ranges of {range_bytes} bytes"),
            Target::Extents(_) => "ranges as listed".to_owned(),
            Target::Objects { names } if is_cut(names) => {
                format!("{} whole objects, the first in the order of names", names.len())
            }
            Target::Objects { names } => format!("{} whole objects", names.len()),
        }
    }
}

impl Target {
    /// Offset and length of an item that is a range.
    pub(crate) fn extent(&self, item: u64) -> Option<(u64, u64)> {
        match self {
            // Items were counted as whole ranges of the dataset's length, so this cannot overflow.
            Self::Ranges { range_bytes } => Some((item * range_bytes, *range_bytes)),
            Self::Extents(ranges) => at(ranges, item).copied(),
            Self::Blocks { .. } | Self::Vectors { .. } | Self::Objects { .. } => None,
        }
    }

    /// Bytes of an item; `None` if only the server knows.
    pub(crate) fn item_bytes(&self, item: u64) -> Option<u64> {
        match self {
            Self::Blocks { block_bytes } => Some((*block_bytes).into()),
            Self::Vectors { dtype, dim } => Some(u64::from(dtype.size_bytes()) * u64::from(*dim)),
            Self::Ranges { .. } | Self::Extents(_) => self.extent(item).map(|(_, length)| length),
            Self::Objects { .. } => None,
        }
    }
}

/// Whether there may be more objects, which are not read.
pub(super) fn is_cut(names: &[String]) -> bool {
    names.len() >= OBJECTS_MAX
}

fn at<T>(list: &[T], position: u64) -> Option<&T> {
    list.get(usize::try_from(position).ok()?)
}

/// The name of an object by its number.
pub(crate) fn name(names: &[String], item: u64) -> &str {
    at(names, item).map_or("", String::as_str)
}

#[cfg(test)]
impl Workload {
    /// Blocks of 8 bytes, one per request, for tests.
    pub(crate) fn of_blocks(count: u64) -> Self {
        Self::of_parts(&[("d", count, 1.0)], Batch::new(1, 1))
    }

    /// Several datasets of blocks of 8 bytes, with the sums of their shares.
    pub(crate) fn of_parts(parts: &[(&str, u64, f64)], batch: Batch) -> Self {
        let part = |&(dataset, count, sum): &(&str, u64, f64)| {
            let target = Target::Blocks { block_bytes: 8 };
            let part = Part::new(dataset.to_owned(), target, count, PatternArg::Uniform);
            (part, sum)
        };
        Self {
            parts: parts.iter().map(part).collect(),
            batch,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mix_and_a_range_of_batches_are_kept() {
        // 10 000 requests: the shares within 2 %, every batch size equally often within 10 %.
        let workload = Workload::of_parts(&[("a", 10, 0.7), ("b", 1000, 1.0)], Batch::new(1, 4));
        let (mut random, mut choice) = (fastrand::Rng::with_seed(5), Choice::default());
        let (mut parts, mut sizes) = ([0u32; 2], [0u32; 5]);
        for _ in 0..10_000 {
            workload.choose(&mut random, &mut choice);
            parts[choice.part] += 1;
            sizes[choice.items.len()] += 1;
            let count = [10, 1000][choice.part];
            assert!(choice.items.iter().all(|item| *item < count), "{choice:?}");
        }
        assert!((6_800..=7_200).contains(&parts[0]), "{parts:?}");
        assert!(
            sizes[1..].iter().all(|size| (2_250..=2_750).contains(size)),
            "{sizes:?}"
        );
        for ((_, share), want) in workload.parts().zip([0.7, 0.3]) {
            assert!((share - want).abs() < 1e-9, "{share}");
        }
    }

    #[test]
    fn it_is_said_that_only_the_first_objects_are_read() {
        // Scenario: one object less than are read of a dataset, and as many. Expected: the latter may not be all.
        let mut workload = Workload::of_blocks(1);
        for (objects, what) in [
            (OBJECTS_MAX - 1, "999999 whole objects"),
            (
                OBJECTS_MAX,
                "1000000 whole objects, the first in the order of names",
            ),
        ] {
            let names = vec![String::new(); objects];
            workload.parts[0].0.target = Target::Objects { names };
            assert_eq!(workload.part(0).what(), what);
        }
    }

    #[test]
    fn a_trace_is_followed() {
        // Batches of 2 out of three items, cyclically; then out of two ranges.
        let mut workload = Workload::of_blocks(10);
        workload.batch = Batch::new(2, 2);
        workload.parts[0].0.follow(TraceEntries::Items(vec![7, 3, 9]));
        let (mut random, mut choice) = (fastrand::Rng::with_seed(5), Choice::default());
        let mut seen = Vec::new();
        for _ in 0..3 {
            workload.choose(&mut random, &mut choice);
            seen.extend_from_slice(&choice.items);
        }
        assert_eq!(
            (seen, workload.part(0).order()),
            (vec![7, 3, 9, 7, 3, 9], "a trace of 3")
        );

        let mut workload = Workload::of_blocks(10);
        workload.batch = Batch::new(2, 2);
        workload.parts[0]
            .0
            .follow(TraceEntries::Ranges(vec![(5, 10), (0, 80)]));
        workload.choose(&mut random, &mut choice);
        let extents = choice
            .items
            .iter()
            .map(|&item| workload.part(0).target().extent(item));
        assert!(extents.eq([Some((5, 10)), Some((0, 80))]));
    }
}
