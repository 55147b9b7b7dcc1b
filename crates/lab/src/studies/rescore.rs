//! `rescore`: the reads of a vector search that keeps quantised copies in memory and the vectors on disk.
//! After "Qdrant under the hood: io_uring".
//!
//! The vectors are synthetic: seeded, in clusters, of length 1. Each query has candidates from the quantised
//! copy; their vectors are read and scored. In process, the engine's backends read one batch per query;
//! `daemon` requests scores.

use crate::args::Rescore;
use crate::error::LabError;
use crate::honesty::check_before_making;
use crate::material::{Material, Progress, at_path, foreign};
use crate::questions::Questions;
use crate::report::{Claim, Report, series};
use crate::sample::{Of, cpu_percent, reads_per_second, seconds};
use crate::served::Served;
use crate::setup::{Amount, Heat, Setup, Shape};
use crate::study::{About, Needs, Row, Rows, Study, check_daemon, check_only, list, pair, texts};
use crate::{Context, word};
use ringfetch_client::{Dtype, Kind};
use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;

const NAMES: &str = "uring auto mmap mmap-plain engine-pread daemon";
pub(crate) static ABOUT: About = About {
    name: "rescore",
    title: "rescoring the candidates of a vector search from disk",
    source: "Qdrant under the hood: io_uring",
    columns: "step_seconds reads_per_second cpu_percent p50_us p99_us",
    judge,
};
const DIM: usize = 768;
const VECTOR_BYTES: u64 = DIM as u64 * 4;
const SEED: u64 = 42;
const CLUSTERS: usize = 1000;
/// Spread of a vector around its cluster's centre, whose elements lie between -1 and 1.
const SPREAD: f32 = 0.5;
/// The article's table: oversampling, parallel, then IOPS, CPU % of 4 cores and seconds, of io_uring and of mmap.
type Published = (&'static str, &'static str, [f64; 3], [f64; 3]);
const PUBLISHED: [Published; 3] = [
    ("1", "4", [4000.0, 200.0, 12.0], [2000.0, 93.0, 43.0]),
    ("1", "8", [4000.0, 200.0, 12.0], [2000.0, 90.0, 43.0]),
    ("4", "8", [7000.0, 100.0, 30.0], [2300.0, 50.0, 145.0]),
];
/// Through the daemon, at most 1/5 of the time of plain mmap in process.
const TARGET: f64 = 5.0;

/// Makes the vectors if they are missing, and reads the candidates.
fn material(args: &Rescore, context: &Context, progress: Progress<'_>) -> Result<Material, LabError> {
    let name = format!("vectors-{}x{DIM}.f32", args.vectors);
    let bytes = args.vectors * VECTOR_BYTES;
    check_before_making(&args.common, "--vectors", bytes, Needs::COLD)?;
    let served = Served::find(&args.daemon, context)?;
    let mut material = Material::made(&args.common.path, &name, ("--vectors", bytes), |part| {
        write(part, args.vectors, progress)
    })?;
    let data = material.files.first();
    let path = data.map(|data| data.path.clone()).unwrap_or_default();
    let mut found = vec![0; DIM * 4];
    let read = File::open(&path).and_then(|mut file| file.read_exact(&mut found));
    read.map_err(|error| at_path(&path, &error))?;
    if found != vector(0, &centres()) {
        return Err(foreign(&path));
    }
    let command = format!(
        "python3 bench/candidates.py {} (in the sources, and in a release's tarball)",
        word(&path)
    );
    let questions = Questions::read(&path.with_extension("candidates"), args.vectors, &command)?;
    let has = |over: &&u32| !questions.head.oversampling.contains(&(**over as usize));
    if let Some(over) = args.oversampling.iter().find(has) {
        let prepared = list(&questions.head.oversampling);
        return Err(LabError::Usage(format!(
            "--oversampling: {over}: candidates were prepared for {prepared}"
        )));
    }
    material.questions = Some(questions);
    if let Some(served) = served {
        let shape = served.dataset.vectors.as_ref();
        let fits = shape.is_some_and(|shape| shape.dim as usize == DIM && shape.dtype == Some(Dtype::F32));
        if served.dataset.kind != Kind::Vectors || !fits || served.dataset.count != args.vectors {
            let shape = format!(", {} vectors of {DIM} f32", args.vectors);
            return Err(LabError::Usage(served.unlike(&path, &shape)));
        }
        material.served = Some(Arc::new(served));
    }
    Ok(material)
}

fn centres() -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(SEED);
    (0..CLUSTERS * DIM).map(|_| random.f32() * 2.0 - 1.0).collect()
}

/// The bytes of a vector: its cluster's centre plus its own noise, divided by the norm.
fn vector(id: u64, centres: &[f32]) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(SEED ^ (id + 1));
    let from = random.usize(..CLUSTERS) * DIM;
    let centre = centres.get(from..from + DIM).unwrap_or_default();
    let near = centre.iter().map(|at| at + (random.f32() * 2.0 - 1.0) * SPREAD);
    let elements: Vec<f32> = near.collect();
    let squares = elements.iter().map(|element| element * element);
    let norm = squares.sum::<f32>().sqrt();
    let unit = elements.iter().map(|element| element / norm);
    unit.flat_map(f32::to_le_bytes).collect()
}

fn write(part: &Path, count: u64, progress: Progress<'_>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(part)?);
    let centres = centres();
    for id in 0..count {
        if id % 1024 == 0 && !progress(id * VECTOR_BYTES) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        out.write_all(&vector(id, &centres))?;
    }
    out.into_inner()?.sync_all()
}

pub(crate) fn plan(args: &Rescore, context: &Context, progress: Progress<'_>) -> Result<Study, LabError> {
    check_only(&args.common, NAMES)?;
    check_daemon(&args.common, &args.daemon)?;
    let material = material(args, context, progress)?;
    let questions = material.questions.as_ref();
    let head = questions.map(|questions| questions.head.clone());
    let head = head.ok_or_else(|| LabError::Failed("no candidates".to_owned()))?;
    let asked = args.queries.map_or(head.queries, |queries| queries as usize);
    let count = head.queries.min(asked);
    let made = format!("{DIM} f32, synthetic: {CLUSTERS} clusters, seed {SEED}");
    let mut settings = vec![
        pair("vectors", format!("{} of {made}", args.vectors)),
        pair("candidates", format!("by {}", head.made_by)),
        pair("queries", count),
        pair("limit", head.limit),
        pair("parallel", list(&args.parallel)),
        pair("oversampling", list(&args.oversampling)),
        pair("buffered", args.buffered),
    ];
    settings.extend(Served::settings_of(material.served.as_deref()));
    let mut study = Study::new(&ABOUT, &args.common, NAMES, settings, vec![material]);
    study.needs = Needs::COLD;
    let heat = if args.buffered { Heat::Cold } else { Heat::Direct };
    let axes = [
        ("strategy", study.chosen.clone()),
        ("oversampling", texts(&args.oversampling)),
        ("parallel", texts(&args.parallel)),
    ];
    study.cross(&axes, |at| {
        let oversampling = at.number("oversampling");
        let shape = Shape::Queries { count, oversampling };
        Some(Setup::new(
            heat,
            shape,
            Amount::Reads(u64::MAX),
            at.number("parallel"),
        ))
    });
    Ok(study)
}

fn judge(report: &mut Report, rows: &Rows) {
    let row = |strategy: &str, over: &str, parallel: &str| {
        rows.one_of(&[
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
        for (name, figures) in [("published: io_uring", uring), ("published: mmap", mmap)] {
            let figures = figures.map(|value| format!("{value:.0}"));
            lines.push([&[name, over, parallel].map(str::to_owned)[..], &figures].concat());
        }
    }
    for row in &rows.0 {
        let value = |of: Of, digits: usize| {
            let found = row.summary(of).map(|value| format!("{:.digits$}", value.median));
            found.unwrap_or_else(|| "-".to_owned())
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
    report.table(title, lines);
    let faster = |ours: Option<&Row>, over: &str, parallel: &str| {
        row("mmap-plain", over, parallel)?.ratio(ours?, seconds)
    };
    for (over, parallel, uring, mmap) in PUBLISHED {
        let published = (mmap[2] / uring[2] * 10.0).round() / 10.0;
        let what = format!("oversampling {over}, {parallel} in parallel");
        let claim = format!("{what}: io_uring takes 1/{published} of the time of mmap");
        let ratio = faster(row("uring", over, parallel), over, parallel);
        report.claim(&claim, published, ratio);
    }
    let claim = format!(
        "through the daemon rescoring takes at most 1/{TARGET} of the time of plain mmap in process (ours)"
    );
    let ratio = faster(row("daemon", "4", "8"), "4", "8");
    report.claims.push(Claim::at_least(&claim, TARGET, ratio));
    let note = "the vectors are synthetic: they say how fast vectors are read, nothing about recall";
    report.notes.push(note.to_owned());
    for over in &rows.values("oversampling") {
        let lines = series(
            rows,
            &[("oversampling", over)],
            "strategy",
            "parallel",
            reads_per_second,
        );
        let (name, title) = (
            format!("plot-oversampling-{over}"),
            format!("Rescoring, oversampling {over}"),
        );
        report.plot(name, title, ["queries in parallel", "vectors/s"], lines);
    }
}
