//! Makes a workload of the arguments and of what the daemon says of the datasets.

use super::args::Load;
use super::scores::Scoring;
use super::shape::Describer;
use super::workload::{Part, Target, Workload, is_cut};
use crate::outcome::Failure;
use ringfetch_client::Kind;
use ringfetch_pace::trace::{self, TraceEntries, TraceShape};
use std::path::Path;

/// Looks up the datasets and checks that they support the requested reads.
pub(super) async fn resolve(describer: &Describer<'_>, args: &Load) -> Result<Workload, Failure> {
    let single = args.dataset.iter().map(|name| (name.clone(), 1.0));
    let mix = args.mix.iter().flat_map(|mix| mix.0.clone());
    let shares: Vec<(String, f64)> = mix.chain(single).collect();
    let whole: f64 = shares.iter().map(|(_, share)| share).sum();
    let (mut parts, mut sum) = (Vec::new(), 0.0);
    for (name, share) in shares {
        sum += share / whole;
        parts.push((resolve_part(describer, args, name).await?, sum));
    }
    let batch = args.batch;
    Ok(Workload { parts, batch })
}

async fn resolve_part(describer: &Describer<'_>, args: &Load, name: String) -> Result<Part, Failure> {
    let dataset = describer.shape(&name).await?;
    let vectors = dataset.vectors.as_ref();
    let objects = dataset.kind == Kind::Objects.as_str();
    let (target, count) = match args.range_bytes {
        Some(_) if objects => {
            let problem = format!("--range-bytes: objects have no common address space ({name})");
            return Err(Failure::Usage(problem));
        }
        Some(0) => return Err(Failure::Usage("--range-bytes 0: use at least 1".to_owned())),
        Some(range_bytes) => (Target::Ranges { range_bytes }, dataset.length_bytes / range_bytes),
        None if objects => {
            let names = describer.names(&name).await?;
            let count = names.len() as u64;
            (Target::Objects { names }, count)
        }
        None => {
            let block_bytes = dataset.block_bytes;
            let unknown = || Failure::Failed(format!("{name}: its dtype is unknown here"));
            let target = match vectors.map(|shape| (shape.dtype(), shape.dim)) {
                Some((dtype, dim)) => Target::Vectors {
                    dtype: dtype.ok_or_else(unknown)?,
                    dim,
                },
                None => Target::Blocks { block_bytes },
            };
            (target, dataset.count)
        }
    };
    if let (0, Some(range_bytes)) = (count, args.range_bytes) {
        let problem = format!("{name} has {} bytes, which is less", dataset.length_bytes);
        return Err(Failure::Usage(format!("--range-bytes {range_bytes}: {problem}")));
    }
    if count == 0 {
        return Err(Failure::Failed(format!("{name} has nothing to read in it")));
    }
    let mut part = Part::new(name, target, count, args.pattern);
    part.verify = args.verify.then_some(args.seed);
    if let Some(path) = &args.trace {
        let length_bytes = (!objects).then_some(dataset.length_bytes);
        let range_bytes = args.range_bytes;
        part.follow(read_trace(
            path,
            TraceShape {
                items: count,
                range_bytes,
                length_bytes,
                is_cut: matches!(part.target(), Target::Objects { names } if is_cut(names)),
            },
        )?);
    }
    let ranges = matches!(part.target(), Target::Ranges { .. } | Target::Extents(_));
    if args.verify && vectors.is_some() && ranges {
        let problem = "--verify: ranges of a file of vectors hold its headers too; read vectors by id";
        return Err(Failure::Usage(problem.to_owned()));
    }
    let shape = match *part.target() {
        Target::Vectors { dtype, dim } => Some((dtype, dim)),
        Target::Blocks { .. } | Target::Ranges { .. } | Target::Extents(_) | Target::Objects { .. } => None,
    };
    part.scoring = Scoring::new(args, shape).map_err(|problem| {
        Failure::Usage(format!("--score: {} cannot be scored: {problem}", part.dataset()))
    })?;
    Ok(part)
}

fn read_trace(path: &Path, meaning: TraceShape) -> Result<TraceEntries, Failure> {
    let named = |problem| Failure::Usage(format!("--trace {}: {problem}", path.display()));
    trace::read(path, meaning).map_err(named)
}
