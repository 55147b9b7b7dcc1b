//! Which items a request reads, and what their bytes ought to be.

use crate::args::{Global, Load, PatternArg};
use crate::expected::{Wrong, check_elements, check_stream, object_seed};
use crate::inspect::kind_name;
use crate::outcome::Failure;
use futures_util::{StreamExt as _, TryStreamExt as _};
use ringfetch_client::{ByteRange, Client, Dtype, ObjectPart, Request, wire};
use std::sync::atomic::{AtomicU64, Ordering};

/// More names than these are not kept: chosen at random, a million are as good as all.
const OBJECTS_MAX: usize = 1_000_000;

/// What is read and in which order.
#[derive(Debug)]
pub(crate) struct Workload {
    dataset: String,
    target: Target,
    /// Items to choose from.
    count: u64,
    order: Order,
    /// The pattern's seed, if every byte is to be checked.
    verify: Option<u64>,
}

#[derive(Debug)]
enum Target {
    Blocks { block_bytes: u32 },
    Vectors { dtype: Dtype, dim: u32 },
    Ranges { range_bytes: u64 },
    Objects { names: Vec<String> },
}

#[derive(Debug)]
enum Order {
    Uniform,
    /// Where the next request begins, over all slots and threads.
    Sequential(AtomicU64),
}

/// Looks the dataset up and checks that it can be read as asked.
pub(crate) async fn resolve(client: &Client, global: &Global, args: &Load) -> Result<Workload, Failure> {
    let call = |error| Failure::call(&error, "grpc", &global.grpc);
    let dataset = client.get_dataset(&args.dataset).await.map_err(call)?;
    let vectors = dataset.vectors.as_ref();
    let objects = dataset.kind == i32::from(wire::Kind::Objects);
    let (target, count) = match args.range_bytes {
        Some(_) if objects => {
            return Err(Failure::Usage(
                "--range-bytes: objects have no common address space".to_owned(),
            ));
        }
        Some(0) => return Err(Failure::Usage("--range-bytes 0: use at least 1".to_owned())),
        Some(_) if args.verify && vectors.is_some() => {
            let problem =
                "--verify: ranges of a file of vectors hold its headers too; leave --range-bytes out";
            return Err(Failure::Usage(problem.to_owned()));
        }
        Some(range_bytes) => (Target::Ranges { range_bytes }, dataset.length_bytes / range_bytes),
        None if objects => {
            let names = client
                .list_objects(&args.dataset)
                .take(OBJECTS_MAX)
                .map_ok(|object| object.name);
            let names: Vec<String> = names.try_collect().await.map_err(call)?;
            let count = u64::try_from(names.len()).unwrap_or(u64::MAX);
            (Target::Objects { names }, count)
        }
        None => match vectors {
            Some(shape) => {
                let dtype = Dtype::from_wire(shape.dtype).ok_or_else(|| {
                    Failure::Failed(format!("{}: dtype {} is unknown here", args.dataset, shape.dtype))
                })?;
                (
                    Target::Vectors {
                        dtype,
                        dim: shape.dim,
                    },
                    dataset.count,
                )
            }
            None => (
                Target::Blocks {
                    block_bytes: dataset.block_bytes,
                },
                dataset.count,
            ),
        },
    };
    if count == 0 {
        return Err(Failure::Failed(format!(
            "{} has nothing to read in it",
            args.dataset
        )));
    }
    Ok(Workload {
        dataset: args.dataset.clone(),
        target,
        count,
        order: match args.pattern {
            PatternArg::Uniform => Order::Uniform,
            PatternArg::Sequential => Order::Sequential(AtomicU64::new(0)),
        },
        verify: args.verify.then_some(args.seed),
    })
}

impl Workload {
    /// Chooses `batch` items into `items`.
    pub(crate) fn choose(&self, random: &mut fastrand::Rng, batch: u32, items: &mut Vec<u64>) {
        items.clear();
        match &self.order {
            Order::Uniform => items.extend((0..batch).map(|_| random.u64(0..self.count))),
            Order::Sequential(next) => {
                let first = next.fetch_add(batch.into(), Ordering::Relaxed);
                items.extend((0..u64::from(batch)).map(|i| first.wrapping_add(i) % self.count));
            }
        }
    }

    /// The request for these items.
    pub(crate) fn request(&self, items: &[u64]) -> Request {
        let dataset = self.dataset.clone();
        match &self.target {
            Target::Blocks { .. } => Request::Blocks {
                dataset,
                indices: items.to_vec(),
            },
            Target::Vectors { .. } => Request::Vectors {
                dataset,
                ids: items.to_vec(),
            },
            Target::Ranges { range_bytes } => {
                let range = |&item: &u64| ByteRange {
                    offset: item * range_bytes,
                    length: *range_bytes,
                };
                Request::Ranges {
                    dataset,
                    ranges: items.iter().map(range).collect(),
                }
            }
            Target::Objects { names } => Request::Objects {
                dataset,
                parts: items
                    .iter()
                    .map(|&item| ObjectPart::whole(name(names, item)))
                    .collect(),
            },
        }
    }

    /// Whether bytes are checked.
    pub(crate) fn verifies(&self) -> bool {
        self.verify.is_some()
    }

    /// Compares an item's bytes with the pattern; `None` if they are right, or not to be checked.
    pub(crate) fn check(&self, item: u64, bytes: &[u8], scratch: &mut Vec<u8>) -> Option<Wrong> {
        let seed = self.verify?;
        match &self.target {
            Target::Blocks { block_bytes } => check_stream(seed, item * u64::from(*block_bytes), bytes),
            Target::Vectors { dtype, dim } => {
                check_elements(seed, *dtype, item * u64::from(*dim), bytes, scratch)
            }
            Target::Ranges { range_bytes } => check_stream(seed, item * range_bytes, bytes),
            Target::Objects { names } => check_stream(object_seed(seed, name(names, item)), 0, bytes),
        }
    }

    /// An item for people: `block 17`.
    pub(crate) fn describe(&self, item: u64) -> String {
        match &self.target {
            Target::Blocks { .. } => format!("block {item}"),
            Target::Vectors { .. } => format!("vector {item}"),
            Target::Ranges { range_bytes } => format!("range at offset {}", item * range_bytes),
            Target::Objects { names } => format!("object {}", name(names, item)),
        }
    }

    /// What is read, for people: `blocks of 4096 bytes`.
    pub(crate) fn what(&self) -> String {
        match &self.target {
            Target::Blocks { block_bytes } => format!("blocks of {block_bytes} bytes"),
            Target::Vectors { dtype, dim } => format!("vectors of {dim} {dtype}"),
            Target::Ranges { range_bytes } => format!("ranges of {range_bytes} bytes"),
            Target::Objects { names } => {
                format!("{} whole {}", names.len(), kind_name(wire::Kind::Objects.into()))
            }
        }
    }
}

fn name(names: &[String], item: u64) -> &str {
    usize::try_from(item)
        .ok()
        .and_then(|item| names.get(item))
        .map_or("", String::as_str)
}

#[cfg(test)]
impl Workload {
    /// Blocks of 8 bytes, for tests.
    pub(crate) fn of_blocks(count: u64, sequential: bool, verify: Option<u64>) -> Self {
        let order = if sequential {
            Order::Sequential(AtomicU64::new(0))
        } else {
            Order::Uniform
        };
        Self {
            dataset: "d".into(),
            target: Target::Blocks { block_bytes: 8 },
            count,
            order,
            verify,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_chosen_in_range_in_the_asked_order() {
        // Scenario: batches of 4 out of 6, sequential and uniform, the latter twice with one seed.
        // Expected: sequential wraps around; uniform stays in range, reaches every item, and repeats with its seed.
        let mut items = Vec::new();
        let mut random = fastrand::Rng::with_seed(3);
        let sequential = Workload::of_blocks(6, true, None);
        let mut seen: Vec<u64> = Vec::new();
        for _ in 0..2 {
            sequential.choose(&mut random, 4, &mut items);
            seen.extend(&items);
        }
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 0, 1]);

        let uniform = Workload::of_blocks(6, false, None);
        let choose = |seed| {
            let mut items = Vec::new();
            uniform.choose(&mut fastrand::Rng::with_seed(seed), 100, &mut items);
            items
        };
        assert_eq!(choose(3), choose(3));
        assert!((0..6).all(|item| choose(3).contains(&item)) && choose(3).iter().all(|&item| item < 6));
    }
}
