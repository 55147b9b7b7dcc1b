//! `objects`: whole files, many of them, by 150 threads and by io_uring. After "An io_uring experiment in Grafana Loki's
//! read path".
//!
//! Buffers are `pooled` or `new` for each read (for the engine, whose memory is always pooled, `new` is a
//! copy into new memory); opening is `in` the time or `out` of it. Cold files are read through an emptied
//! page cache.

use crate::args::Objects;
use crate::error::LabError;
use crate::honesty::check_before_making;
use crate::material::{Material, Progress};
use crate::report::{Claim, Report, series};
use crate::sample::seconds;
use crate::setup::{Amount, Heat, Setup, Shape};
use crate::stats::{Summary, Verdict};
use crate::study::{About, Needs, Row, Rows, STEP_BYTES_MAX, Study, check_only, list, pair, texts};
use ringfetch_command::quantity::{exact_size, size};

const NAMES: &str = "threaded-pread ring uring";
pub(crate) static ABOUT: About = About {
    name: "objects",
    title: "whole files, many of them: threads against io_uring",
    source: "An io_uring experiment in Grafana Loki's read path",
    columns: "step_seconds mib_per_second p50_us p99_us depth_achieved cpu_us_per_read",
    judge,
};
/// As in the publication.
const THREADS: usize = 150;
const RING_DEPTH: usize = 128;

/// Most files of a size in flight: their buffers have to fit. The engine needs a quarter more than its reads in
/// flight, and a new buffer is extra. Of 16 MiB, 12.
fn fitting(bytes: u64) -> usize {
    let fitting = STEP_BYTES_MAX.saturating_sub(bytes) / 5 * 4 / bytes;
    usize::try_from(fitting).unwrap_or(1).max(1)
}

/// Threads for this many files of a size.
fn threads(bytes: u64, files: usize) -> usize {
    THREADS.min(fitting(bytes)).min(files)
}

/// The files to make: (count, bytes of each).
fn sizes(args: &Objects) -> Result<Vec<(u64, u64)>, LabError> {
    let most = args.files.iter().max().copied().unwrap_or(0);
    let least = args.files.iter().min().copied().unwrap_or(0);
    let of = |bytes: &u64| {
        let count = (args.bytes_max / bytes).min(most.into());
        if count < least.into() {
            let (each, all) = (exact_size(*bytes), size(args.bytes_max));
            return Err(LabError::Usage(format!(
                "--bytes-max: {least} files of {each} are more than {all}"
            )));
        }
        // The largest requested number of files that fits.
        let files = args.files.iter().map(|files| u64::from(*files));
        Ok((
            files.filter(|files| *files <= count).max().unwrap_or(count),
            *bytes,
        ))
    };
    args.file_bytes.iter().map(of).collect()
}

pub(crate) fn plan(args: &Objects, progress: Progress<'_>) -> Result<Study, LabError> {
    check_only(&args.common, NAMES)?;
    let planned = sizes(args)?;
    let largest = planned
        .iter()
        .map(|(count, bytes)| count * bytes)
        .max()
        .unwrap_or(0);
    let needs = |warm_bytes| Needs {
        // Cold files are evicted before each step, which is checked.
        larger_than_memory: false,
        warm_bytes,
        warm_option: "--bytes-max",
    };
    check_before_making(&args.common, "--bytes-max", largest, needs(largest))?;
    let made = planned.into_iter();
    let made = made.map(|(count, bytes)| Material::many(&args.common.path, count, bytes, progress));
    let materials: Vec<Material> = made.collect::<Result<_, _>>()?;
    let warm_bytes = materials.iter().map(Material::length_bytes).max().unwrap_or(0);
    let sizes: Vec<String> = args.file_bytes.iter().map(|bytes| exact_size(*bytes)).collect();
    let settings = vec![
        pair("files", list(&args.files)),
        pair("file bytes", list(&sizes)),
        pair("threads", THREADS),
        pair("ring depth", RING_DEPTH),
    ];
    let made: Vec<usize> = materials.iter().map(|material| material.files.len()).collect();
    let mut study = Study::new(&ABOUT, &args.common, NAMES, settings, materials);
    study.needs = needs(warm_bytes);
    for (each, bytes) in sizes.iter().zip(&args.file_bytes) {
        let (fitting, all) = (fitting(*bytes), size(STEP_BYTES_MAX));
        if fitting < THREADS {
            let why = format!("more would take more than {all} of buffers");
            study
                .left_out
                .push(format!("more than {fitting} files of {each} in flight: {why}"));
        }
    }
    for (each, made) in sizes.iter().zip(&made) {
        let most = size(args.bytes_max);
        let too_many = args.files.iter().filter(|files| **files as usize > *made);
        let sentence = |files| format!("{files} files of {each}: more than --bytes-max {most}");
        study.left_out.extend(too_many.map(sentence));
    }
    let axes = [
        ("heat", texts(&["cold", "warm"])),
        ("file_bytes", texts(&args.file_bytes)),
        ("opening", texts(&["in", "out"])),
        ("buffers", texts(&["pooled", "new"])),
        ("strategy", study.chosen.clone()),
        ("files", texts(&args.files)),
    ];
    study.cross(&axes, |at| {
        let (bytes, count) = (at.number::<u64>("file_bytes"), at.number("files"));
        let material = args.file_bytes.iter().position(|known| *known == bytes)?;
        if count > *made.get(material)? {
            return None;
        }
        let heat = if at.text("heat") == "cold" {
            Heat::Cold
        } else {
            Heat::Warm
        };
        let depth = match at.text("strategy") {
            "threaded-pread" => threads(bytes, count),
            _ => RING_DEPTH.min(fitting(bytes)).min(count),
        };
        let shape = Shape::Files { count };
        Some(Setup {
            material,
            open_each: at.text("opening") == "in",
            pooled: at.text("buffers") == "pooled",
            ..Setup::new(heat, shape, Amount::Reads(u64::MAX), depth)
        })
    });
    Ok(study)
}

/// How much longer the threads take than a ring: above 1 the ring is faster.
fn ahead(rows: &Rows, strategy: &str, key: [(&str, &str); 5]) -> Option<Summary> {
    let [heat, bytes, opening, buffers, files] = key;
    let of = |strategy| rows.one_of(&[("strategy", strategy), heat, bytes, opening, buffers, files]);
    of("threaded-pread")?.ratio(of(strategy)?, seconds)
}

fn judge(report: &mut Report, rows: &Rows) {
    let head = "heat,file,opening,buffers,ring,ahead from,behind up to,at most files";
    let mut table = vec![head.split(',').map(str::to_owned).collect::<Vec<_>>()];
    let (files, sizes) = (rows.values("files"), rows.values("file_bytes"));
    let shown = |bytes: &str| bytes.parse().map_or_else(|_| bytes.to_owned(), exact_size);
    // One line for each combination of the axes other than the number of files.
    let mut lines: Vec<[(&str, &str); 4]> = Vec::new();
    for row in &rows.0 {
        let line =
            ["heat", "file_bytes", "opening", "buffers"].map(|name| (name, row.get(name).unwrap_or("")));
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    for [heat, bytes, opening, buffers] in lines {
        for strategy in ["ring", "uring"] {
            let at = |files: &str| ahead(rows, strategy, [heat, bytes, opening, buffers, ("files", files)]);
            let ratios = files.iter().filter_map(|files| Some((files, at(files)?)));
            let ratios: Vec<(&String, Summary)> = ratios.collect();
            let Some((_, last)) = ratios.last() else {
                continue;
            };
            let (from, to) = crossover(&ratios);
            let most = format!("{:.2}x", last.median);
            let line = [heat.1, &shown(bytes.1), opening.1, buffers.1, strategy];
            table.push([&line.map(str::to_owned)[..], &[from, to, most]].concat());
        }
    }
    let title = "Crossovers: numbers of files at which a ring is ahead of, or behind, threads";
    report.table(title, table);
    claims(report, rows);
    for heat in &rows.values("heat") {
        for bytes in &sizes {
            let pooled = [("opening", "in"), ("buffers", "pooled")];
            let values = [[("heat", heat.as_str()), ("file_bytes", bytes)], pooled].concat();
            let lines = series(rows, &values, "strategy", "files", |sample| sample.seconds * 1e3);
            let (name, files) = (format!("plot-{heat}-{bytes}"), shown(bytes));
            let title = format!("Whole files of {files}, {heat}, opening included, buffers pooled");
            report.plot(name, title, ["files", "time, ms"], lines);
        }
    }
}

/// From which number of files on the ring is always faster, and up to which it is always slower.
fn crossover(ratios: &[(&String, Summary)]) -> (String, String) {
    let ahead = |(_, ratio): &&(&String, Summary)| ratio.verdict() == Verdict::More;
    let behind = |(_, ratio): &&(&String, Summary)| ratio.verdict() == Verdict::Less;
    let from = ratios.iter().rev().take_while(ahead).last();
    let to = ratios.iter().take_while(behind).last();
    let shown = |found: Option<&(&String, Summary)>| {
        found.map_or_else(|| "-".to_owned(), |(files, _)| (*files).clone())
    };
    (shown(from), shown(to))
}

fn claims(report: &mut Report, rows: &Rows) {
    let (files, sizes) = (rows.values("files"), rows.values("file_bytes"));
    let number = |value: &&String| value.parse::<u64>().unwrap_or(0);
    let (Some(fewest), Some(small), Some(large)) = (
        files.iter().min_by_key(number),
        sizes.iter().min_by_key(number),
        sizes.iter().max_by_key(number),
    ) else {
        return;
    };
    let of = |strategy: &str, bytes: &str, count: &str, buffers: &str| {
        let [heat, opening] = [("heat", "cold"), ("opening", "in")];
        let key = [
            heat,
            ("file_bytes", bytes),
            opening,
            ("buffers", buffers),
            ("files", count),
        ];
        ahead(rows, strategy, key)
    };
    let threads_of = |bytes: &str, count: &str| {
        let (bytes, count) = (bytes.parse().unwrap_or(1), count.parse().unwrap_or(0));
        threads(bytes, count)
    };
    // The largest number of files of this size, in threads too.
    let most = |strategy: &str, bytes: &str, buffers: &str| {
        let mut tried = files.iter().rev();
        let found = tried.find_map(|count| Some((count, of(strategy, bytes, count, buffers)?)));
        let count = found.map_or(fewest, |(count, _)| count);
        (threads_of(bytes, count), found.map(|(_, ratio)| ratio))
    };
    let inverse = |ratio: Option<Summary>| ratio.map(|ratio| ratio.inverse());
    for strategy in ["ring", "uring"] {
        let threads = threads_of(small, fewest);
        let few = format!("cold, {strategy} is behind {threads} threads at few files ({fewest})");
        let (threads, ratio) = most(strategy, large, "pooled");
        let shown = exact_size(number(&large));
        let large_files = format!("cold, {strategy} is ahead of {threads} threads at large files ({shown})");
        let (threads, unpooled) = most(strategy, small, "new");
        let new = format!("cold, without pooled buffers {strategy} loses outright to {threads} threads");
        report.claims.extend([
            Claim::of_order(&few, inverse(of(strategy, small, fewest, "pooled"))),
            Claim::of_order(&large_files, ratio),
            Claim::of_order(&new, inverse(unpooled)),
        ]);
    }
    let row_of = |buffers: &str| -> Option<&Row> {
        let [heat, opening, strategy] = [
            ("heat", "warm"),
            ("opening", "in"),
            ("strategy", "threaded-pread"),
        ];
        rows.0.iter().rfind(|row| {
            row.is(&[
                heat,
                ("file_bytes", large),
                opening,
                ("buffers", buffers),
                strategy,
            ])
        })
    };
    let pooled = row_of("new").zip(row_of("pooled"));
    let pooled = pooled.and_then(|(new, pooled)| new.ratio(pooled, seconds));
    let claim = format!(
        "warm, pooling buffers makes threads faster, at files of {}",
        exact_size(number(&large))
    );
    report.claims.push(Claim::of_order(&claim, pooled));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossovers_are_where_intervals_leave_one() {
        // Scenario: slower at 50, equal at 100, faster from 300 on; faster once in between; equal everywhere; ahead each time, by
        // 1 to 3 %. Expected: faster from 300 and slower up to 50; nothing; nothing; nothing.
        let counts = ["50", "100", "300", "1000"].map(str::to_owned);
        let of = |ratios: [[f64; 5]; 4]| {
            let ratios = ratios.map(|values| Summary::of(values).unwrap());
            crossover(&counts.iter().zip(ratios).collect::<Vec<_>>())
        };
        let around = |median: f64| [-0.1, -0.05, 0.0, 0.05, 0.1].map(|apart| median + apart);
        let [behind, level, ahead] = [0.8, 1.0, 1.2].map(around);
        let pair = |from: &str, to: &str| (from.to_owned(), to.to_owned());
        assert_eq!(of([behind, level, ahead, ahead]), pair("300", "50"));
        assert_eq!(of([level, ahead, level, level]), pair("-", "-"));
        assert_eq!(of([ahead; 4]), pair("50", "-"));
        assert_eq!(of([[1.01, 1.01, 1.02, 1.02, 1.03]; 4]), pair("-", "-"));
    }

    #[test]
    fn claims_name_as_many_threads_as_there_were() {
        // Scenario: cold files of 16 KiB and of 16 MiB, of which 12 are in flight at most, 50 and 1000 of them.
        // Expected: 50 threads for 50 files, 12 for large ones, 150 for a thousand small ones.
        let mut rows = Rows(Vec::new());
        for (bytes, files) in [("16384", "50"), ("16384", "1000"), ("16777216", "50")] {
            for strategy in ["threaded-pread", "ring"] {
                for buffers in ["pooled", "new"] {
                    let key = [
                        ("heat", "cold"),
                        ("file_bytes", bytes),
                        ("opening", "in"),
                        ("buffers", buffers),
                        ("strategy", strategy),
                        ("files", files),
                    ];
                    rows.0.push(crate::study::tests::row(&key, &[9; 5]));
                }
            }
        }
        let mut report = crate::report::tests::report();
        report.claims.clear();
        claims(&mut report, &rows);
        let said: Vec<&str> = report.claims.iter().map(|claim| claim.claim.as_str()).collect();
        let expected = [
            "cold, ring is behind 50 threads at few files (50)",
            "cold, ring is ahead of 12 threads at large files (16MiB)",
            "cold, without pooled buffers ring loses outright to 150 threads",
        ];
        assert_eq!(said[..3], expected);
    }

    #[test]
    fn fewer_files_are_made_of_the_larger_sizes() {
        // Scenario: up to 1 000 files, 1 GiB of each size; then 50 files that do not fit. Expected: the
        // largest requested number of files that fits; an error that names the option.
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            objects: Objects,
        }
        let parse = |most: &str| {
            let line = format!("x --path / --bytes-max {most} --file-bytes 16KiB,4MiB");
            let line = line.split(' ');
            sizes(&Line::parse_from(line).objects)
        };
        assert_eq!(parse("1GiB").unwrap(), [(1000, 16 << 10), (100, 4 << 20)]);
        let refused = parse("100MiB").unwrap_err().to_string();
        assert!(refused.starts_with("--bytes-max"), "{refused}");
    }
}
