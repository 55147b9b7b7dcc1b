//! `block-size`: how the latency of a random direct read grows with its block. After ClickHouse, "A journey to io_uring,
//! AIO and modern storage devices" (arXiv 2102.11198); blocks below 4 KiB after Neon's RFC on direct I/O.

use crate::args::BlockSize;
use crate::error::LabError;
use crate::honesty::check_before_making;
use crate::material::{Material, Progress};
use crate::report::{Report, series};
use crate::sample::{Of, Sample, bytes_per_second};
use crate::setup::{Amount, Heat, Setup, Shape};
use crate::stats::Summary;
use crate::study::{About, Needs, Row, Rows, Study, check_only, list, pair, texts};
use humantime::format_duration;
use ringfetch_command::quantity::{exact_size, latency};

const NAMES: &str = "pread threaded-pread preadv2-hipri aio ring ring-polled uring engine-pread";
pub(crate) static ABOUT: About = About {
    name: "block-size",
    title: "how latency grows with the block, and which block to read",
    source: "ClickHouse, A journey to io_uring, AIO and modern storage devices",
    columns: "mean_us min_us p50_us p99_us p999_us max_us mib_per_second",
    judge,
};
const SMALLEST_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;
/// A step over fewer blocks would end at once.
const BLOCKS_MIN: u64 = 16;
/// The publication recommends the largest block whose latency is "almost the same" as the smallest one's. Its
/// own example allows about 17 %: 256 KiB took 12 ms on a disk that transfers them in 1.7 ms.
const ALMOST_THE_SAME: f64 = 1.2;

pub(crate) fn plan(args: &BlockSize, progress: Progress<'_>) -> Result<Study, LabError> {
    check_only(&args.common, NAMES)?;
    if args.largest < PAGE_BYTES {
        return Err(LabError::Usage("--largest: at least 4KiB".to_owned()));
    }
    check_before_making(&args.common, "--size", args.blocks.size, Needs::COLD)?;
    let material = Material::one(&args.common.path, args.blocks.size, progress)?;
    let length = material.length_bytes();
    let device = material.place.device.as_ref();
    let logical = device.map_or(512, |device| u64::from(device.logical_block_bytes));
    let doubled = std::iter::successors(Some(SMALLEST_BYTES), |bytes| bytes.checked_mul(2));
    let sizes = doubled.take_while(|bytes| *bytes <= args.largest);
    let (sizes, large): (Vec<u64>, Vec<u64>) = sizes.partition(|bytes| *bytes <= length / BLOCKS_MIN);
    let (sizes, small): (Vec<u64>, Vec<u64>) = sizes.into_iter().partition(|bytes| *bytes >= logical);
    let shown: Vec<String> = sizes.iter().map(|bytes| exact_size(*bytes)).collect();
    let settings = vec![
        pair("blocks", list(&shown)),
        pair("depths", list(&args.depths)),
        pair("step", format_duration(args.blocks.step)),
    ];
    let mut study = Study::new(&ABOUT, &args.common, NAMES, settings, vec![material]);
    study.needs = Needs::COLD;
    for bytes in small {
        let why = format!("below the device's blocks of {logical} bytes");
        study.left_out.push(format!("blocks of {bytes} bytes: {why}"));
    }
    if let (Some(first), Some(last)) = (large.first(), large.last()) {
        let (first, last) = (exact_size(*first), exact_size(*last));
        let why = format!("the data have less than {BLOCKS_MIN} of them");
        study.left_out.push(format!("blocks of {first} to {last}: {why}"));
    }
    let axes = [
        ("strategy", study.chosen.clone()),
        ("depth", texts(&args.depths)),
        ("block_bytes", texts(&sizes)),
    ];
    study.cross(&axes, |at| {
        let shape = Shape::random(at.number("block_bytes"), length);
        Some(Setup::new(
            Heat::Direct,
            shape,
            Amount::For(args.blocks.step),
            at.number("depth"),
        ))
    });
    Ok(study)
}

/// The largest block, from 4 KiB up, such that its mean latency and those of all smaller ones are almost that
/// of 4 KiB.
fn recommended(means: &[(u64, f64)]) -> Option<u64> {
    let least = means.iter().find(|(bytes, _)| *bytes == PAGE_BYTES)?.1;
    let larger = means.iter().filter(|(bytes, _)| *bytes >= PAGE_BYTES);
    let flat = larger.take_while(|(_, mean)| *mean <= least * ALMOST_THE_SAME);
    flat.map(|(bytes, _)| *bytes).last()
}

/// The ratios to 4 KiB by which a block was recommended, and the next one was not; whether they decide that.
fn evidence(
    recommended: Option<u64>,
    means: &[(u64, f64)],
    of_page: impl Fn(u64) -> Option<Summary>,
) -> String {
    let Some(best) = recommended else {
        return String::new();
    };
    let next = means.iter().map(|(bytes, _)| *bytes).find(|bytes| *bytes > best);
    let ratios = [Some(best), next].map(|bytes| bytes.and_then(|bytes| Some((bytes, of_page(bytes)?))));
    let said = ratios.iter().flatten();
    let mut said: String = said
        .map(|(bytes, ratio)| format!("; {}: {}", exact_size(*bytes), ratio.times()))
        .collect();
    let [same, more] = ratios.map(|found| found.map(|(_, ratio)| ratio));
    let is_same = same.is_some_and(|ratio| ratio.is_judged() && ratio.high <= ALMOST_THE_SAME);
    if !is_same || more.is_some_and(|ratio| !ratio.is_above(ALMOST_THE_SAME)) {
        said.push_str(": uncertain, the repetitions differ too much");
    }
    said
}

/// The row with one read at a time.
fn one<'a>(rows: &'a Rows, strategy: &str, bytes: &str) -> Option<&'a Row> {
    rows.one_of(&[("strategy", strategy), ("depth", "1"), ("block_bytes", bytes)])
}

fn judge(report: &mut Report, rows: &Rows) {
    let single = |bytes: &str, value: Of| one(rows, "pread", bytes).and_then(|row| row.summary(value));
    let shown = |bytes: &str, value: Of| {
        single(bytes, value).map_or_else(|| "-".to_owned(), |summary| latency(summary.median * 1e3))
    };
    let alone = rows.with(&[("strategy", "pread"), ("depth", "1")]);
    let means = alone.filter_map(|row| {
        let mean = row.summary(|sample| sample.mean_us)?.median;
        Some((row.get("block_bytes")?.parse().ok()?, mean))
    });
    let means: Vec<(u64, f64)> = means.collect();
    let recommended = recommended(&means);
    let best = recommended.map_or_else(|| "-".to_owned(), exact_size);
    let min = |sample: &Sample| sample.min_us;
    let mean = |sample: &Sample| sample.mean_us;
    let line = |name: &str, published: &str, ours: String| {
        let cells = [name].into_iter().chain(published.split('|'));
        cells.map(str::to_owned).chain([ours]).collect()
    };
    let published = [
        ("", "HDD|SATA SSD|NVMe SSD|Optane", "here".to_owned()),
        ("4 KiB, min", "4 ms|-|-|12 us", shown("4096", min)),
        (
            "4 KiB, mean",
            "12 ms|140 us|a little below SATA|-",
            shown("4096", mean),
        ),
        ("4 KiB, p99", "-|-|half of SATA|-", shown("4096", |s| s.p99_us)),
        ("256 KiB, mean", "12 ms|1.2 ms|-|-", shown("262144", mean)),
        ("1 MiB, mean", "-|3 ms|below 1 ms|-", shown("1048576", mean)),
        ("recommended block", "256KiB|4KiB|4KiB|8KiB", best.clone()),
    ];
    let lines = published.map(|(name, published, ours)| line(name, published, ours));
    report.table("One random pread at a time: published and here", lines.to_vec());
    let ratio = |above: &str, below: &str, value: Of| {
        one(rows, "pread", above)?.ratio(one(rows, "pread", below)?, value)
    };
    let of_page = |bytes: u64| ratio(&bytes.to_string(), "4096", mean);
    report.notes.push(format!(
        "recommended block: {best}, the largest whose mean latency is at most {ALMOST_THE_SAME} times that of 4KiB (one \
         pread at a time){}",
        evidence(recommended, &means, of_page)
    ));
    let linear = "latency grows linearly from 4 MiB on: 32 MiB take 8x as long";
    report.claim(linear, 8.0, ratio("33554432", "4194304", mean));
    let tail = ratio("4096", "512", |sample| sample.p999_us);
    let smaller = "Neon: the p99.9 of 512 bytes is 3x lower than that of 4 KiB";
    report.claim(smaller, 3.0, tail);
    let polled = |row: &&Row| row.measured().all(|sample| sample.note.is_none());
    let polled = one(rows, "preadv2-hipri", "4096").filter(polled);
    let both = polled.zip(one(rows, "pread", "4096"));
    let halved = both.and_then(|(polled, plain)| plain.ratio(polled, |sample| sample.max_us));
    let halves = "polled reads (RWF_HIPRI) halve the longest latency of 4 KiB (Optane)";
    report.claim(halves, 2.0, halved);
    let few = |row: &&Row| row.measured().any(|sample| sample.reads < 1000);
    let few = rows.0.iter().filter(few).count();
    if few > 0 {
        let note = "rows have fewer than 1 000 reads in a step: their p99.9 is their longest";
        report.notes.push(format!("{few} {note}"));
    }
    for depth in &rows.values("depth") {
        let draws: [(&str, &str, Of); 3] = [
            ("mean", "mean latency, us", mean),
            ("p99", "p99 latency, us", |sample| sample.p99_us),
            ("throughput", "MB/s", |sample| bytes_per_second(sample) / 1e6),
        ];
        for (name, y, value) in draws {
            let (name, axes) = (format!("plot-depth-{depth}-{name}"), ["block, bytes", y]);
            let lines = series(rows, &[("depth", depth)], "strategy", "block_bytes", value);
            let title = format!("Random direct reads, {depth} in flight");
            report.plot(name, title, axes, lines);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::tests::row;
    use ringfetch_command::quantity::approximate;

    #[test]
    fn the_publications_devices_get_its_recommendations() {
        // Scenario: the publication's disk (10.3 ms and 150 MB/s), its SATA SSD (140 us, linear), its Optane (flat to 8 KiB);
        // a curve that falls below again later; no figure of 4 KiB. Expected: 256 KiB, 4 KiB, 8 KiB; the first bend; none.
        let sizes = || (12..24).map(|bits| 1u64 << bits);
        let mean = |base: f64, per_byte: f64| {
            let one = |bytes| (bytes, base + approximate(bytes) * per_byte);
            sizes().map(one).collect::<Vec<_>>()
        };
        assert_eq!(recommended(&mean(10_300.0, 1.0 / 150.0)), Some(256 << 10));
        assert_eq!(recommended(&mean(75.0, 65.0 / 4096.0)), Some(4096));
        assert_eq!(recommended(&mean(11.0, 0.9 / 4096.0)), Some(8192));
        let bent = [(4096, 10.0), (8192, 20.0), (16384, 10.0)];
        assert_eq!(recommended(&bent), Some(4096));
        assert_eq!(recommended(&[(512, 1.0)]), None);
    }

    #[test]
    fn a_recommended_block_has_its_evidence() {
        // Scenario: 8 KiB take as long as 4 KiB, 16 KiB twice as long, in every repetition; then not in each. Expected: the
        // ratios; that they decide nothing.
        let note = |large: &[f64; 5]| {
            let rows =
                [("4096", [100.0; 5]), ("8192", [110.0; 5]), ("16384", *large)].map(|(bytes, means)| {
                    let key = [("strategy", "pread"), ("depth", "1"), ("block_bytes", bytes)];
                    let mut row = row(&key, &[9; 5]);
                    let samples = row.samples.iter_mut().flatten();
                    samples
                        .zip(means)
                        .for_each(|(sample, mean_us)| sample.mean_us = mean_us);
                    row
                });
            let mut report = crate::report::tests::report();
            report.notes.clear();
            judge(&mut report, &Rows(rows.to_vec()));
            report.notes.swap_remove(0)
        };
        let sure = note(&[200.0; 5]);
        let figures = "(one pread at a time); 8KiB: 1.10x (1.10 to 1.10); 16KiB: 2.00x (2.00 to 2.00)";
        assert!(
            sure.starts_with("recommended block: 8KiB, ") && sure.ends_with(figures),
            "{sure}"
        );
        let unsure = note(&[200.0, 200.0, 200.0, 200.0, 115.0]);
        assert!(
            unsure.ends_with(": uncertain, the repetitions differ too much"),
            "{unsure}"
        );
    }

    #[test]
    fn a_row_that_was_not_polled_tests_no_claim_about_polling() {
        // Scenario: preadv2 with a note that it was not polled, then without. Expected: not tested; refuted (equal).
        let key = |strategy| [("strategy", strategy), ("depth", "1"), ("block_bytes", "4096")];
        let mut rows = Rows(vec![
            row(&key("pread"), &[9; 5]),
            row(&key("preadv2-hipri"), &[9; 5]),
        ]);
        let verdict = |rows: &Rows| {
            let mut report = crate::report::tests::report();
            report.claims.clear();
            judge(&mut report, rows);
            report.claims[2].verdict.clone()
        };
        assert_eq!(verdict(&rows), "refuted");
        let noted = rows.0[1].samples.iter_mut().flatten();
        noted.for_each(|sample| sample.note = Some("not polled".to_owned()));
        assert_eq!(verdict(&rows), "not tested");
    }
}
