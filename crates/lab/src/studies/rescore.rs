//! `rescore`: what a vector search reads that keeps quantised copies in memory and the vectors on disk. After "Qdrant under
//! the hood: io_uring".
//!
//! The vectors are synthetic: seeded, in clusters, of length 1. Each query has candidates that the quantised copy gave; their
//! vectors are read and scored. In process the engine's backends read, a batch a query; `daemon` asks for scores.

use super::{chosen, list, pair};
use crate::args::Rescore;
use crate::error::LabError;
use crate::job::{Amount, Heat, Sample, Setup, Shape};
use crate::material::{Material, Progress};
use crate::questions::Questions;
use crate::report::{Beside, Claim, Plot, Report, cpu_percent, series};
use crate::served::Served;
use crate::study::{Cell, Measure, Needs, Row, Rows, Study, reads_per_second};
use ringfetch_client::{Dtype, Kind};
use std::fs::File;
use std::io::{self, Read as _, Write};
use std::sync::Arc;

const NAMES: [&str; 6] = ["mmap-plain", "mmap", "engine-pread", "uring", "auto", "daemon"];
const DIM: usize = 768;
const VECTOR_BYTES: u64 = DIM as u64 * 4;
const SEED: u64 = 42;
const CLUSTERS: usize = 1000;
/// Of a vector about its cluster's centre, whose elements lie between -1 and 1.
const SPREAD: f32 = 0.5;
/// The article's table: oversampling, parallel, then IOPS, CPU % of 4 cores and seconds, of io_uring and of mmap.
type Published = (&'static str, &'static str, [f64; 3], [f64; 3]);
const PUBLISHED: [Published; 3] = [
    ("1", "4", [4000.0, 200.0, 12.0], [2000.0, 93.0, 43.0]),
    ("1", "8", [4000.0, 200.0, 12.0], [2000.0, 90.0, 43.0]),
    ("4", "8", [7000.0, 100.0, 30.0], [2300.0, 50.0, 145.0]),
];
/// Through the daemon at most 1/5 of the time of plain mmap in process.
const TARGET: f64 = 5.0;

/// Makes the vectors, unless they are there, and reads the candidates.
pub(crate) fn material(args: &Rescore, progress: Progress<'_>) -> Result<Material, LabError> {
    let name = format!("vectors-{}x{DIM}.f32", args.vectors);
    let mut material = Material::made(&args.common.path, &name, args.vectors * VECTOR_BYTES, |out| {
        write(out, args.vectors, progress)
    })?;
    let data = material.files.first();
    let path = data.map(|data| data.path.clone()).unwrap_or_default();
    let mut found = vec![0; DIM * 4];
    let read = File::open(&path).and_then(|mut file| file.read_exact(&mut found));
    read.map_err(|error| LabError::at(format_args!("--path: {}", path.display()), error))?;
    let mut first = Vec::new();
    vector(0, &centres(), &mut first);
    if found != first {
        let problem = "does not hold what this command makes; move it away";
        return Err(LabError::Usage(format!("--path: {} {problem}", path.display())));
    }
    let command = format!("python3 bench/candidates.py {}", path.display());
    let questions = Questions::read(&path.with_extension("candidates"), args.vectors, &command)?;
    let has = |over: &&u32| !questions.head.oversampling.contains(&(**over as usize));
    if let Some(over) = args.oversampling.iter().find(has) {
        let prepared = list(&questions.head.oversampling);
        return Err(LabError::Usage(format!(
            "--oversampling: {over}: candidates were prepared for {prepared}"
        )));
    }
    material.questions = Some(questions);
    if let Some(served) = Served::find(&args.daemon)? {
        let shape = served.dataset.vectors.as_ref();
        let fits = shape.is_some_and(|shape| shape.dim as usize == DIM && shape.dtype == Some(Dtype::F32));
        if served.dataset.kind != Kind::Vectors || !fits || served.dataset.count != args.vectors {
            let (shown, vectors) = (served.shown(), args.vectors);
            let problem = format!(
                "--dataset: {shown}: this study needs {vectors} vectors of {DIM} f32: {}",
                path.display()
            );
            return Err(LabError::Usage(problem));
        }
        material.served = Some(Arc::new(served));
    }
    Ok(material)
}

fn centres() -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(SEED);
    (0..CLUSTERS * DIM).map(|_| random.f32() * 2.0 - 1.0).collect()
}

/// The bytes of a vector: its cluster's centre and noise of its own, divided by its norm.
fn vector(id: u64, centres: &[f32], bytes: &mut Vec<u8>) {
    let mut random = fastrand::Rng::with_seed(SEED ^ (id + 1));
    let from = random.usize(..CLUSTERS) * DIM;
    let centre = centres.get(from..from + DIM).unwrap_or_default();
    let elements: Vec<f32> = centre
        .iter()
        .map(|at| at + (random.f32() * 2.0 - 1.0) * SPREAD)
        .collect();
    let norm = elements
        .iter()
        .map(|element| element * element)
        .sum::<f32>()
        .sqrt();
    bytes.clear();
    bytes.extend(elements.iter().flat_map(|element| (element / norm).to_le_bytes()));
}

fn write(out: &mut dyn Write, count: u64, progress: Progress<'_>) -> io::Result<()> {
    let (centres, mut bytes) = (centres(), Vec::new());
    for id in 0..count {
        if id % 1024 == 0 && !progress(id * VECTOR_BYTES) {
            return Err(io::Error::other("stopped"));
        }
        vector(id, &centres, &mut bytes);
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// Plans the study.
pub(crate) fn plan(args: &Rescore, material: Material) -> Result<Study, LabError> {
    let mut names = chosen(&NAMES, &args.common.only)?;
    let served = material.served.as_ref().map(|served| served.shown());
    if served.is_none() {
        names.retain(|strategy| strategy.name != "daemon");
    }
    if names.is_empty() {
        return Err(LabError::Usage(
            "--only: daemon needs --server and --dataset".to_owned(),
        ));
    }
    let head = material
        .questions
        .as_ref()
        .map(|questions| questions.head.clone());
    let Some(head) = head else {
        return Err(LabError::Failed("no candidates".to_owned()));
    };
    let queries = args
        .queries
        .map_or(head.queries, |queries| head.queries.min(queries as usize));
    let mut study = Study {
        name: "rescore",
        title: "rescoring the candidates of a vector search from disk",
        source: "Qdrant under the hood: io_uring",
        settings: vec![
            pair(
                "vectors",
                format!(
                    "{} of {DIM} f32, synthetic: {CLUSTERS} clusters, seed {SEED}",
                    args.vectors
                ),
            ),
            pair("candidates", format!("by {}", head.made_by)),
            pair("queries", queries),
            pair("limit", head.limit),
            pair("parallel", list(&args.parallel)),
            pair("oversampling", list(&args.oversampling)),
            pair("buffered", args.buffered),
            pair("daemon", served.unwrap_or_else(|| "none".to_owned())),
        ],
        materials: vec![Arc::new(material)],
        cells: Vec::new(),
        left_out: Vec::new(),
        needs: Needs {
            larger_than_memory: true,
            warm_bytes: 0,
            warm_option: "",
        },
        columns: &[
            "step_seconds",
            "reads_per_second",
            "cpu_percent",
            "p50_us",
            "p99_us",
        ],
        measure: Measure::Once,
        judge,
    };
    let heat = if args.buffered { Heat::Cold } else { Heat::Direct };
    for oversampling in &args.oversampling {
        let shape = Shape::Queries {
            count: queries,
            oversampling: *oversampling as usize,
        };
        for parallel in &args.parallel {
            let setup = Setup::new(heat, shape, Amount::Reads(u64::MAX), *parallel as usize);
            for strategy in &names {
                study.plan(Cell {
                    key: vec![
                        pair("strategy", strategy.name),
                        pair("oversampling", oversampling),
                        pair("parallel", parallel),
                    ],
                    strategy,
                    material: 0,
                    setup,
                });
            }
        }
    }
    Ok(study)
}

fn seconds(sample: &Sample) -> f64 {
    sample.seconds
}

fn judge(report: &mut Report, rows: &Rows) {
    let row = |strategy: &str, over: &str, parallel: &str| {
        rows.one_of([
            ("strategy", strategy),
            ("oversampling", over),
            ("parallel", parallel),
        ])
    };
    let head = [
        "engine",
        "oversampling",
        "parallel",
        "~max IOPS",
        "CPU %",
        "time (s)",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (over, parallel, uring, mmap) in PUBLISHED {
        for (name, [iops, cpu, time]) in [("published: io_uring", uring), ("published: mmap", mmap)] {
            let line = [name, over, parallel].map(str::to_owned).into_iter();
            lines.push(
                line.chain([iops, cpu, time].map(|value| format!("{value:.0}")))
                    .collect(),
            );
        }
    }
    for row in &rows.0 {
        let value = |of: fn(&Sample) -> f64, digits: usize| {
            row.summary(of)
                .map_or_else(|| "-".to_owned(), |value| format!("{:.digits$}", value.median))
        };
        let mut line: Vec<String> = row.key.iter().map(|(_, value)| value.clone()).collect();
        line.extend([
            value(reads_per_second, 0),
            value(cpu_percent, 0),
            value(seconds, 2),
        ]);
        lines.push(line);
    }
    let title =
        "The article's table, and ours (means of a step; CPU % of one core, the daemon's with --server-pid)";
    report.beside.push(Beside {
        title: title.to_owned(),
        rows: lines,
    });
    let faster = |ours: Option<&Row>, over: &str, parallel: &str| {
        row("mmap-plain", over, parallel)?.ratio(ours?, seconds)
    };
    for (over, parallel, uring, mmap) in PUBLISHED {
        let published = (mmap[2] / uring[2] * 10.0).round() / 10.0;
        let claim = format!(
            "oversampling {over}, {parallel} in parallel: io_uring takes 1/{published} of the time of mmap"
        );
        let ratio = faster(row("uring", over, parallel), over, parallel);
        report.claims.push(Claim::of_ratio(claim, published, ratio));
    }
    let claim = format!(
        "through the daemon rescoring takes at most 1/{TARGET} of the time of plain mmap in process (ours)"
    );
    let ratio = faster(row("daemon", "4", "8"), "4", "8");
    report.claims.push(Claim::at_least(claim, TARGET, ratio));
    report.notes.push(
        "the vectors are synthetic: they say how fast vectors are read, nothing about recall".to_owned(),
    );
    for over in rows.values("oversampling") {
        report.plots.push(Plot {
            name: format!("plot-oversampling-{over}"),
            title: format!("Rescoring, oversampling {over}"),
            x: "queries in parallel".to_owned(),
            y: "vectors/s".to_owned(),
            series: series(
                rows,
                &[("oversampling", over.as_str())],
                "strategy",
                "parallel",
                reads_per_second,
            ),
        });
    }
}
