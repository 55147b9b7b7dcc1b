//! The measures that summarise every row, and how they are shown.

use crate::sample::{OVER_LIMITS, Of, Sample, bytes_per_second, cpu_percent, reads_per_second, seconds};
use ringfetch_command::quantity::{latency, rate};

type Show = fn(f64) -> String;

/// How a measure is taken from a sample and shown.
pub(crate) struct Measure {
    /// Name in JSON and CSV, its unit last.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) of: Of,
    pub(crate) show: Show,
}

const fn measure(name: &'static str, title: &'static str, of: Of, show: Show) -> Measure {
    Measure {
        name,
        title,
        of,
        show,
    }
}

const MIB: f64 = 1_048_576.0;
const NONE: f64 = f64::NAN;
const DEPTH: Show = |value| format!("{value:.1}");
const MICROS: Show = |value| latency(value * 1e3);
const PERCENT: Show = |value| format!("{:.2} %", value * 100.0);
const TIME: Show = |value| latency(value * 1e9);
const TIMES: Show = |value| format!("{value:.0}x");
const TWO: Show = |value| format!("{value:.2}");
const WHOLE: Show = |value| format!("{value:.0}");

/// The share of an open loop's reads that took longer than 2^n ms.
fn over<const N: usize>(sample: &Sample) -> f64 {
    const { assert!(N < OVER_LIMITS) };
    sample.over.map_or(NONE, |over| over[N])
}

/// The share of an open loop's reads that were never sent.
fn missed(sample: &Sample) -> f64 {
    sample.over.map_or(NONE, |_| sample.missed_share())
}

/// All measures of a row. A sample without one gives NaN, which is left out.
pub(crate) const MEASURES: [Measure; 19] = [
    measure("reads_per_second", "reads/s", reads_per_second, rate),
    measure("mib_per_second", "MiB/s", |s| bytes_per_second(s) / MIB, rate),
    measure("step_seconds", "time", seconds, TIME),
    measure("min_us", "min", |s| s.min_us, MICROS),
    measure("mean_us", "mean", |s| s.mean_us, MICROS),
    measure("p50_us", "p50", |s| s.p50_us, MICROS),
    measure("p99_us", "p99", |s| s.p99_us, MICROS),
    measure("p999_us", "p99.9", |s| s.p999_us, MICROS),
    measure("max_us", "max", |s| s.max_us, MICROS),
    measure("depth_achieved", "in flight", |s| s.depth_achieved, DEPTH),
    measure("cpu_us_per_read", "CPU us/read", |s| s.cpu_us_per_read, TWO),
    measure("cpu_percent", "CPU %", cpu_percent, WHOLE),
    measure("multiple", "N", |s| s.multiple.unwrap_or(NONE), TIMES),
    measure("missed_share", "never sent", missed, PERCENT),
    measure("over_1ms", "> 1 ms", over::<0>, PERCENT),
    measure("over_8ms", "> 8 ms", over::<3>, PERCENT),
    measure("over_64ms", "> 64 ms", over::<6>, PERCENT),
    measure(
        "device_share",
        "from device",
        |s| s.device_share.unwrap_or(NONE),
        TWO,
    ),
    measure(
        "resident_before",
        "resident",
        |s| s.resident_before.unwrap_or(NONE),
        TWO,
    ),
];

pub(crate) fn measure_named(name: &str) -> Option<&'static Measure> {
    MEASURES.iter().find(|measure| measure.name == name)
}
