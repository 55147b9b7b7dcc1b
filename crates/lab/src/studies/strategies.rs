//! `strategies`: which way to read is fastest, by queue depth. After io-uring-bench, the code behind "The Layer Below:
//! io_uring".
//!
//! `direct` makes random 4 KiB reads over more data than memory holds, past the page cache; mmap, which
//! cannot, reads through an emptied cache. `buffered` reads 64 KiB blocks sequentially, from memory.

use crate::args::Strategies;
use crate::error::LabError;
use crate::honesty::check_before_making;
use crate::material::{Material, Progress};
use crate::report::{Claim, Report, series};
use crate::sample::{Sample, reads_per_second};
use crate::setup::{Amount, Heat, Setup, Shape};
use crate::strategies::NOT_POLLED;
use crate::study::{About, Needs, Rows, Study, check_only, list, pair, texts};
use humantime::format_duration;
use ringfetch_command::quantity::size;

const NAMES: &str = "pread threaded-pread preadv2-hipri tokio-fs aio ring ring-polled uring \
    uring-batch auto mmap mmap-plain engine-pread";
pub(crate) static ABOUT: About = About {
    name: "strategies",
    title: "which way to read is fastest, by queue depth",
    source: "io-uring-bench (NVMe, 24 cores, poll_queues=16)",
    columns: "reads_per_second mib_per_second p50_us p99_us depth_achieved cpu_us_per_read",
    judge,
};
const DIRECT_BLOCK_BYTES: usize = 4096;
const BUFFERED_BLOCK_BYTES: usize = 64 << 10;
/// The buffered profile measures memory: more threads than this would measure the scheduler.
const BUFFERED_DEPTH_MAX: usize = 64;
/// Reads a second against one pread thread (PUBLISHED: 28 418 IOPS), by depth.
const PUBLISHED: [(&str, f64); 6] = [
    ("1", 1.1),
    ("4", 4.4),
    ("16", 15.0),
    ("32", 26.5),
    ("64", 33.4),
    ("128", 34.3),
];

pub(crate) fn plan(args: &Strategies, progress: Progress<'_>) -> Result<Study, LabError> {
    check_only(&args.common, NAMES)?;
    let has = |profile: &&str| args.profiles.iter().any(|known| known == profile);
    let needs = |length: u64| Needs {
        larger_than_memory: has(&"direct"),
        warm_bytes: if has(&"buffered") {
            args.warm_bytes.min(length)
        } else {
            0
        },
        warm_option: "--warm-bytes",
    };
    let size_bytes = args.blocks.size;
    check_before_making(&args.common, "--size", size_bytes, needs(size_bytes))?;
    let material = Material::one(&args.common.path, size_bytes, progress)?;
    let length = material.length_bytes();
    let warm_bytes = needs(length).warm_bytes;
    let settings = vec![
        pair("profiles", list(&args.profiles)),
        pair("depths", list(&args.depths)),
        pair("step", format_duration(args.blocks.step)),
        pair("warm bytes", size(warm_bytes)),
    ];
    let mut study = Study::new(&ABOUT, &args.common, NAMES, settings, vec![material]);
    study.needs = needs(length);
    if has(&"buffered") {
        let deep = args
            .depths
            .iter()
            .filter(|depth| **depth as usize > BUFFERED_DEPTH_MAX);
        let why = format!("more than {BUFFERED_DEPTH_MAX} reads in flight would measure the scheduler");
        let deep = deep.map(|depth| format!("buffered, depth {depth}: {why}"));
        study.left_out.extend(deep);
        let polled = study.chosen.iter().filter(|name| *name == "ring-polled");
        let polled = polled.map(|name| format!("{name}, buffered: only direct reads can be polled"));
        study.left_out.extend(polled);
    }
    let profiles: Vec<&str> = ["direct", "buffered"].into_iter().filter(has).collect();
    let axes = [
        ("profile", texts(&profiles)),
        ("strategy", study.chosen.clone()),
        ("depth", texts(&args.depths)),
    ];
    study.cross(&axes, |at| {
        let (depth, random) = (at.number("depth"), at.text("profile") == "direct");
        let (heat, block_bytes, window_bytes) = match random {
            true => (Heat::Direct, DIRECT_BLOCK_BYTES, length),
            false => (Heat::Warm, BUFFERED_BLOCK_BYTES, warm_bytes),
        };
        if !random && (depth > BUFFERED_DEPTH_MAX || at.text("strategy") == "ring-polled") {
            return None;
        }
        let shape = Shape::Blocks {
            block_bytes,
            window_bytes,
            random,
        };
        Some(Setup::new(heat, shape, Amount::For(args.blocks.step), depth))
    });
    Ok(study)
}

fn judge(report: &mut Report, rows: &Rows) {
    let direct =
        |strategy, depth| rows.one_of(&[("profile", "direct"), ("strategy", strategy), ("depth", depth)]);
    let base = direct("pread", "1");
    let head = ["depth", "published io_uring", "ring here", "uring here"].map(str::to_owned);
    let mut beside = vec![head.to_vec()];
    for (depth, published) in PUBLISHED {
        let mut line = vec![depth.to_owned(), format!("{published}x")];
        for strategy in ["ring", "uring"] {
            let ratio = direct(strategy, depth)
                .zip(base)
                .and_then(|(ring, pread)| ring.ratio(pread, reads_per_second));
            line.push(ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{:.2}x", ratio.median)));
            if ["1", "16", "64"].contains(&depth) {
                let what =
                    format!("{strategy} at depth {depth} makes {published}x the reads of one pread thread");
                report.claim(&what, published, ratio);
            }
        }
        beside.push(line);
    }
    report.table("Random direct reads of 4 KiB against one pread thread", beside);
    let best =
        |profile, strategy| rows.best(&[("profile", profile), ("strategy", strategy)], reads_per_second);
    for ring in ["ring", "uring"] {
        let beats = "all pread threads (published: 974 495 against 564 188)";
        let warm = "warm, the order reverses: pread threads beat";
        for (profile, first, second, claim) in [
            (
                "direct",
                ring,
                "threaded-pread",
                format!("one thread with {ring} beats {beats}"),
            ),
            (
                "buffered",
                "threaded-pread",
                ring,
                format!("{warm} {ring} (published: 46 GB/s against 7)"),
            ),
        ] {
            let rows = best(profile, first).zip(best(profile, second));
            let ratio = rows.and_then(|(first, second)| first.ratio(second, reads_per_second));
            report.claims.push(Claim::of_order(&claim, ratio));
        }
    }
    let [polled, plain] = ["ring-polled", "ring"].map(|strategy| best("direct", strategy));
    let interrupted = |sample: &Sample| {
        let note = sample.note.as_deref();
        note.is_some_and(|note| note.starts_with(NOT_POLLED))
    };
    let polled = polled.filter(|row| !row.measured().any(interrupted));
    let ratio = polled.zip(plain);
    let ratio = ratio.and_then(|(polled, plain)| polled.ratio(plain, reads_per_second));
    let claim = "polled completions (IOPOLL) make one ring faster (published: by 10 to 15 %)";
    report.claims.push(Claim::of_order(claim, ratio));
    for (profile, title) in [
        ("direct", "Random direct reads of 4 KiB"),
        ("buffered", "Sequential reads of 64 KiB from memory"),
    ] {
        let lines = |of| series(rows, &[("profile", profile)], "strategy", "depth", of);
        for (name, y, lines) in [
            ("reads", "reads/s", lines(reads_per_second)),
            ("p99", "p99 latency, us", lines(|sample| sample.p99_us)),
        ] {
            if !lines.is_empty() {
                let axes = ["requested reads in flight", y];
                report.plot(format!("plot-{profile}-{name}"), title.to_owned(), axes, lines);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::tests::row;

    #[test]
    fn the_publications_claims_are_judged() {
        // Scenario: figures as published; the same where nothing was polled; then a device on which a ring gains nothing.
        // Expected: all of ring's claims confirmed; that on polling not tested; then refuted, with our figures.
        let rows = |ring: [u64; 3], threads: u64, warm: [u64; 2]| {
            let of = |profile, strategy, depth, reads| {
                row(
                    &[("profile", profile), ("strategy", strategy), ("depth", depth)],
                    &[reads; 5],
                )
            };
            let direct = |strategy, depth, reads| of("direct", strategy, depth, reads);
            let buffered = |strategy, reads| of("buffered", strategy, "16", reads);
            Rows(vec![
                direct("pread", "1", 28_418),
                direct("ring", "1", ring[0]),
                direct("ring", "16", ring[1]),
                direct("ring", "64", ring[2]),
                direct("threaded-pread", "32", threads),
                buffered("threaded-pread", warm[0]),
                buffered("ring", warm[1]),
            ])
        };
        let judged = |rows: &Rows| {
            let mut report = crate::report::tests::report();
            report.claims.clear();
            judge(&mut report, rows);
            report
        };
        let verdicts = |report: &Report, about: &str| {
            let about = report.claims.iter().filter(|claim| claim.claim.contains(about));
            about.map(|claim| claim.verdict.clone()).collect::<Vec<_>>()
        };
        let count = |report: &Report, verdict: &str| {
            let all = verdicts(report, "");
            all.iter().filter(|known| *known == verdict).count()
        };
        // A ring that is polled makes 12 % more reads; then as many.
        let rows = |ring: [u64; 3], polled: u64, threads: u64, warm: [u64; 2]| {
            let mut rows = rows(ring, threads, warm);
            let key = [
                ("profile", "direct"),
                ("strategy", "ring-polled"),
                ("depth", "64"),
            ];
            rows.0.push(row(&key, &[polled; 5]));
            rows
        };
        let published = judged(&rows([31_796, 426_580, 950_330], 1_064_369, 564_188, [46, 7]));
        let rings = verdicts(&published, "ring at depth");
        assert_eq!(rings, ["confirmed", "not tested"].repeat(3));
        assert_eq!((published.claims.len(), count(&published, "confirmed")), (11, 6));
        let mut interrupted = rows([31_796, 426_580, 950_330], 1_064_369, 564_188, [46, 7]);
        let polled = interrupted.0.last_mut().unwrap().samples.iter_mut().flatten();
        polled
            .for_each(|sample| sample.note = Some("not polled: queue/io_poll is 0; COOP_TASKRUN".to_owned()));
        assert_eq!(verdicts(&judged(&interrupted), "polled"), ["not tested"]);
        let slow = judged(&rows([28_000, 30_000, 30_000], 30_000, 31_000, [7, 46]));
        assert_eq!(
            (count(&slow, "refuted"), verdicts(&slow, "polled")),
            (4, vec!["undecided".to_owned()])
        );
        assert!(slow.plots.iter().any(|plot| plot.name == "plot-direct-reads"));
    }
}
