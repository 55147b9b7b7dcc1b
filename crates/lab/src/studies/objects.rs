//! `objects`: whole files, many of them, by 150 threads and by io_uring. After "An io_uring experiment in Grafana Loki's
//! read path".
//!
//! Buffers are `pooled` or `new` for each read (of the engine, whose memory is always pooled, `new` is a copy into new
//! memory); opening is `in` the time or `out` of it. Cold files are read through an emptied page cache.

use super::{chosen, list, pair, sizes_shown};
use crate::args::Objects;
use crate::error::LabError;
use crate::job::{Amount, Heat, Sample, Setup, Shape};
use crate::material::Material;
use crate::quantity::{exact_size, size};
use crate::report::{Beside, Claim, Plot, Report, series};
use crate::stats::Summary;
use crate::study::{Cell, Measure, Needs, Rows, Study};
use std::sync::Arc;

const NAMES: [&str; 3] = ["threaded-pread", "ring", "uring"];
/// As in the publication.
const THREADS: usize = 150;
const RING_DEPTH: usize = 128;
/// The engine has a quarter more than its reads in flight, and that is to be below 256 MiB.
const IN_FLIGHT_BYTES_MAX: u64 = 192 << 20;

/// The files that are made: so many of so many bytes each.
pub(crate) fn sizes(args: &Objects) -> Result<Vec<(u64, u64)>, LabError> {
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
        // The largest number of files that is asked for and fits.
        let fitting = args
            .files
            .iter()
            .map(|files| u64::from(*files))
            .filter(|files| *files <= count);
        Ok((fitting.max().unwrap_or(count), *bytes))
    };
    args.file_bytes.iter().map(of).collect()
}

/// Plans the study.
pub(crate) fn plan(args: &Objects, materials: Vec<Material>) -> Result<Study, LabError> {
    let warm_bytes = materials.iter().map(Material::length_bytes).max().unwrap_or(0);
    let mut study = Study {
        name: "objects",
        title: "whole files, many of them: threads against io_uring",
        source: "An io_uring experiment in Grafana Loki's read path",
        settings: vec![
            pair("files", list(&args.files)),
            pair("file bytes", sizes_shown(&args.file_bytes)),
            pair("threads", THREADS),
            pair("ring depth", RING_DEPTH),
        ],
        materials: materials.into_iter().map(Arc::new).collect(),
        cells: Vec::new(),
        left_out: Vec::new(),
        needs: Needs {
            // Cold files are evicted before each step, and that is checked.
            larger_than_memory: false,
            warm_bytes,
            warm_option: "--bytes-max",
        },
        columns: &[
            "step_seconds",
            "mib_per_second",
            "p50_us",
            "p99_us",
            "depth_achieved",
            "cpu_us_per_read",
        ],
        measure: Measure::Once,
        judge,
    };
    let strategies = chosen(&NAMES, &args.common.only)?;
    let sizes = args.file_bytes.iter().copied().enumerate();
    for (number, bytes, files) in
        sizes.flat_map(|(number, bytes)| args.files.iter().map(move |files| (number, bytes, *files)))
    {
        let there = study
            .materials
            .get(number)
            .map_or(0, |material| material.files.len());
        if files as usize > there {
            let (each, all) = (exact_size(bytes), size(args.bytes_max));
            study
                .left_out
                .push(format!("{files} files of {each}: more than --bytes-max {all}"));
            continue;
        }
        let shape = Shape::Files {
            count: files as usize,
        };
        // As many buffers as fit: large files are fewer in flight.
        let fitting = usize::try_from(IN_FLIGHT_BYTES_MAX / bytes).unwrap_or(1).max(1);
        for heat in [Heat::Cold, Heat::Warm] {
            for (opening, open_each) in [("in", true), ("out", false)] {
                for (buffers, pooled) in [("pooled", true), ("new", false)] {
                    for strategy in &strategies {
                        let depth = if strategy.name == "threaded-pread" {
                            THREADS
                        } else {
                            RING_DEPTH
                        };
                        let depth = depth.min(fitting).min(files as usize);
                        study.plan(Cell {
                            key: vec![
                                pair("heat", heat.as_str()),
                                pair("file_bytes", bytes),
                                pair("opening", opening),
                                pair("buffers", buffers),
                                pair("strategy", strategy.name),
                                pair("files", files),
                            ],
                            strategy,
                            material: number,
                            setup: Setup {
                                open_each,
                                pooled,
                                ..Setup::new(heat, shape, Amount::Reads(u64::MAX), depth)
                            },
                        });
                    }
                }
            }
        }
    }
    Ok(study)
}

fn seconds(sample: &Sample) -> f64 {
    sample.seconds
}

/// How much longer the threads take than a ring: above 1 the ring is ahead.
fn ahead(rows: &Rows, strategy: &str, key: [(&str, &str); 5]) -> Option<Summary> {
    let [heat, bytes, opening, buffers, files] = key;
    let of = |strategy| rows.one_of([("strategy", strategy), heat, bytes, opening, buffers, files]);
    of("threaded-pread")?.ratio(of(strategy)?, seconds)
}

fn judge(report: &mut Report, rows: &Rows) {
    let head = "heat,file,opening,buffers,ring,ahead from,behind up to,at most files";
    let mut table = vec![head.split(',').map(str::to_owned).collect::<Vec<_>>()];
    let (files, sizes) = (rows.values("files"), rows.values("file_bytes"));
    let shown = |bytes: &str| bytes.parse().map_or_else(|_| bytes.to_owned(), exact_size);
    // A line for each combination of the axes but the number of files.
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
            let line = [
                heat.1,
                &shown(bytes.1),
                opening.1,
                buffers.1,
                strategy,
                &from,
                &to,
                &most,
            ];
            table.push(line.map(str::to_owned).to_vec());
        }
    }
    let title = "Crossovers: numbers of files at which a ring is ahead of, or behind, 150 threads";
    report.beside.push(Beside::of(title, table));
    claims(report, rows);
    for heat in rows.values("heat") {
        for bytes in &sizes {
            let values = [
                ("heat", heat.as_str()),
                ("file_bytes", bytes),
                ("opening", "in"),
                ("buffers", "pooled"),
            ];
            let shown = shown(bytes);
            let title = format!("Whole files of {shown}, {heat}, opening included, buffers pooled");
            let lines = series(rows, &values, "strategy", "files", |sample| sample.seconds * 1e3);
            let name = format!("plot-{heat}-{bytes}");
            report
                .plots
                .push(Plot::of(name, title, ["files", "time, ms"], lines));
        }
    }
}

/// From which number of files on the ring is ahead at all of them, and up to which it is behind at all.
fn crossover(ratios: &[(&String, Summary)]) -> (String, String) {
    let from = ratios
        .iter()
        .rev()
        .take_while(|(_, ratio)| ratio.low > 1.0)
        .last();
    let to = ratios.iter().take_while(|(_, ratio)| ratio.high < 1.0).last();
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
        let key = [
            ("heat", "cold"),
            ("file_bytes", bytes),
            ("opening", "in"),
            ("buffers", buffers),
            ("files", count),
        ];
        ahead(rows, strategy, key)
    };
    // The largest number of files that this size has.
    let most = |strategy: &str, bytes: &str, buffers: &str| {
        let tried = files.iter().rev();
        let mut found = tried.filter_map(|count| of(strategy, bytes, count, buffers));
        found.next()
    };
    let inverse = |ratio: Option<Summary>| ratio.map(|ratio| ratio.inverse());
    for strategy in ["ring", "uring"] {
        let few = inverse(of(strategy, small, fewest, "pooled"));
        let few_claim = format!("cold, {strategy} is behind 150 threads at few files ({fewest})");
        report.claims.push(Claim::of_order(few_claim, few));
        let large_claim = format!("cold, {strategy} is ahead of 150 threads at large files");
        report
            .claims
            .push(Claim::of_order(large_claim, most(strategy, large, "pooled")));
        let new_claim = format!("cold, without pooled buffers {strategy} loses outright");
        report
            .claims
            .push(Claim::of_order(new_claim, inverse(most(strategy, small, "new"))));
    }
    let pooled = |heat: &str| {
        let row = |buffers: &str| {
            let values = [
                ("heat", heat),
                ("file_bytes", large.as_str()),
                ("opening", "in"),
                ("buffers", buffers),
                ("strategy", "threaded-pread"),
            ];
            let found: Vec<_> = rows.with(&values).cloned().collect();
            found.into_iter().last()
        };
        row("new")?.ratio(&row("pooled")?, seconds)
    };
    let claim = "warm, pooling buffers makes 150 threads faster";
    report
        .claims
        .push(Claim::of_order(claim.to_owned(), pooled("warm")));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossovers_are_where_intervals_leave_one() {
        // Scenario: behind at 50, level at 100, ahead from 300 on; ahead once in between; level everywhere.
        // Expected: ahead from 300 and behind up to 50; nothing; nothing.
        let counts = ["50", "100", "300", "1000"].map(str::to_owned);
        let of = |ratios: [[f64; 3]; 4]| {
            let ratios = ratios.map(|values| Summary::of(values).unwrap());
            crossover(&counts.iter().zip(ratios).collect::<Vec<_>>())
        };
        let (behind, level, ahead) = ([0.7, 0.8, 0.9], [0.9, 1.0, 1.1], [1.1, 1.2, 1.3]);
        assert_eq!(
            of([behind, level, ahead, ahead]),
            ("300".to_owned(), "50".to_owned())
        );
        assert_eq!(of([level, ahead, level, level]), ("-".to_owned(), "-".to_owned()));
        assert_eq!(of([ahead; 4]), ("50".to_owned(), "-".to_owned()));
    }

    #[test]
    fn fewer_files_are_made_of_the_larger_sizes() {
        // Scenario: up to 1 000 files, 1 GiB of each size; then 50 files that do not fit. Expected: the largest number of
        // files that is asked for and fits; an error that names the option.
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            objects: Objects,
        }
        let parse = |most: &str| {
            let line = [
                "x",
                "--path",
                "/",
                "--bytes-max",
                most,
                "--file-bytes",
                "16KiB,4MiB",
            ];
            sizes(&Line::parse_from(line).objects)
        };
        assert_eq!(parse("1GiB").unwrap(), [(1000, 16 << 10), (100, 4 << 20)]);
        assert!(
            parse("100MiB")
                .unwrap_err()
                .to_string()
                .starts_with("--bytes-max")
        );
    }
}
