//! A distribution of durations: record, add, query percentiles, and write in HdrHistogram's two forms.
//! Invariant: all have one shape, so that they can always be added; the smallest, the largest and the sum are
//! exact.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hdrhistogram::Histogram;
use hdrhistogram::serialization::{Deserializer, Serializer as _, V2DeflateSerializer};
use std::io::{self, Write};
use std::time::Duration;

/// 1 ns to 1 h at 3 digits: about 270 KB. Longer durations count as the longest. Below a thousand times the minimum,
/// durations would have fewer digits.
const NS_MIN: u64 = 1;
const NS_MAX: u64 = 3_600_000_000_000;
const DIGITS: u8 = 3;
/// Lines per halving of the distance to 100 %: HdrHistogram's `percentileTicksPerHalfDistance`.
const TICKS_PER_HALF: u32 = 5;
/// Longest encoded text; a full histogram is at most about 100 KB when compressed.
const ENCODED_BYTES_MAX: usize = 8 << 20;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Durations {
    min_ns: u64,
    max_ns: u64,
    sum_ns: u128,
    count: u64,
    /// `None` until there is a duration, since most histograms stay empty.
    histogram: Option<Histogram<u64>>,
}

impl Default for Durations {
    fn default() -> Self {
        Self {
            min_ns: u64::MAX,
            max_ns: 0,
            sum_ns: 0,
            count: 0,
            histogram: None,
        }
    }
}

impl Durations {
    pub(crate) fn record(&mut self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
        self.sum_ns += u128::from(ns);
        self.count += 1;
        if self.histogram.is_none() {
            // The bounds are constants known to be valid.
            self.histogram = Histogram::new_with_bounds(NS_MIN, NS_MAX, DIGITS).ok();
        }
        if let Some(histogram) = &mut self.histogram {
            histogram.saturating_record(ns);
        }
    }

    /// Adds another distribution's durations.
    pub(crate) fn add(&mut self, other: &Self) {
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        self.sum_ns += other.sum_ns;
        self.count += other.count;
        match (&mut self.histogram, &other.histogram) {
            // Histograms of one shape can always be added.
            (Some(mine), Some(theirs)) => drop(mine.add(theirs)),
            (None, Some(theirs)) => self.histogram = Some(theirs.clone()),
            (_, None) => {}
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn min_ns(&self) -> Option<u64> {
        (self.count > 0).then_some(self.min_ns)
    }

    pub(crate) fn max_ns(&self) -> Option<u64> {
        (self.count > 0).then_some(self.max_ns)
    }

    /// A percentile in nanoseconds; `None` if there is no duration.
    #[expect(clippy::cast_precision_loss, reason = "three digits are kept")]
    pub(crate) fn percentile(&self, percentile: f64) -> Option<f64> {
        let histogram = self.histogram.as_ref()?;
        // Errors of rounding do not reach the next rank: 99.9 / 100 is above 0.999.
        let quantile = percentile / 100.0 * (1.0 - 4.0 * f64::EPSILON);
        // The histogram rounds up within its resolution; no value exceeds the slowest.
        Some(
            histogram
                .value_at_quantile(quantile)
                .clamp(self.min_ns, self.max_ns) as f64,
        )
    }

    /// The mean in nanoseconds; `None` if there is no duration.
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    pub(crate) fn mean_ns(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum_ns as f64 / self.count as f64)
    }

    /// HdrHistogram's V2 encoding, compressed, in base64, as its log readers and plotters expect. In
    /// nanoseconds.
    pub(crate) fn encode(&self) -> Option<String> {
        let mut bytes = Vec::new();
        V2DeflateSerializer::new()
            .serialize(self.histogram.as_ref()?, &mut bytes)
            .ok()?;
        Some(BASE64_STANDARD.encode(bytes))
    }

    /// Decodes the text of [`Self::encode`], with the exact figures that it does not contain.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub(crate) fn decode(text: &str, min_ns: u64, max_ns: u64, mean_ns: f64) -> Result<Self, String> {
        if text.len() > ENCODED_BYTES_MAX {
            return Err(format!("is longer than {ENCODED_BYTES_MAX} characters"));
        }
        let bytes = BASE64_STANDARD
            .decode(text.trim())
            .map_err(|error| format!("is not base64: {error}"))?;
        let theirs: Histogram<u64> = Deserializer::new()
            .deserialize(&mut bytes.as_slice())
            .map_err(|error| format!("is not an HdrHistogram: {error}"))?;
        if (theirs.low(), theirs.sigfig()) != (NS_MIN, DIGITS) || theirs.high() != NS_MAX {
            let problem = "is a histogram of another shape than this version of `ringfetch load` makes";
            return Err(problem.to_owned());
        }
        // The mean of equal durations may be rounded up beyond the maximum.
        let mean_max = crate::quantity::approximate(max_ns) + 1.0;
        if theirs.is_empty() || min_ns > max_ns || !(0.0..=mean_max).contains(&mean_ns) {
            return Err("contradicts its own minimum, mean and maximum".to_owned());
        }
        let count = theirs.len();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and as exact as the mean was written"
        )]
        let sum_ns = (mean_ns * crate::quantity::approximate(count)).round() as u128;
        Ok(Self {
            min_ns,
            max_ns,
            sum_ns,
            count,
            histogram: Some(theirs),
        })
    }

    /// The percentile distribution as HdrHistogram's `outputPercentileDistribution` prints it, in milliseconds: the
    /// format of .hgrm files, which its plotter reads.
    pub(crate) fn write_hgrm(&self, out: &mut dyn Write) -> io::Result<()> {
        const NS_PER_MS: f64 = 1e6;
        writeln!(
            out,
            "{:>12} {:>14} {:>10} {:>14}\n",
            "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
        )?;
        let Some(histogram) = &self.histogram else {
            return Ok(());
        };
        let mut total = 0u64;
        for value in histogram.iter_quantiles(TICKS_PER_HALF) {
            total += value.count_since_last_iteration();
            let ms = crate::quantity::approximate(value.value_iterated_to().min(self.max_ns)) / NS_PER_MS;
            let quantile = value.quantile_iterated_to();
            if quantile < 1.0 {
                writeln!(
                    out,
                    "{ms:>12.3} {quantile:>2.12} {total:>10} {:>14.2}",
                    1.0 / (1.0 - quantile)
                )?;
            } else {
                writeln!(out, "{ms:>12.3} {quantile:>2.12} {total:>10}")?;
            }
        }
        let (mean, deviation) = (
            self.mean_ns().unwrap_or(0.0) / NS_PER_MS,
            histogram.stdev() / NS_PER_MS,
        );
        writeln!(
            out,
            "#[Mean    = {mean:>12.3}, StdDeviation   = {deviation:>12.3}]"
        )?;
        let max = crate::quantity::approximate(self.max_ns) / NS_PER_MS;
        writeln!(out, "#[Max     = {max:>12.3}, Total count    = {total:>12}]")?;
        // Two half-decades of digits: 2 x 10^3, rounded up to a power of two.
        let sub_buckets = (2 * 10u64.pow(DIGITS.into())).next_power_of_two();
        writeln!(
            out,
            "#[Buckets = {:>12}, SubBuckets     = {sub_buckets:>12}]",
            histogram.buckets()
        )
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Durations 1 us apart, over this range of us.
    pub(crate) fn ramp(us: std::ops::RangeInclusive<u64>) -> Durations {
        let mut durations = Durations::default();
        us.for_each(|us| durations.record(Duration::from_micros(us)));
        durations
    }

    #[test]
    fn parts_add_up_to_what_one_would_have_counted() {
        let whole = ramp(1..=1000);
        let mut sum = Durations::default();
        for part in [ramp(1..=10), ramp(11..=700), ramp(701..=1000)] {
            sum.add(&part);
        }
        assert_eq!(sum, whole);
        // Within three digits of the truth; ends and mean are exact.
        for (percentile, want) in [(50.0, 5e5), (99.0, 9.9e5), (99.9, 9.99e5), (100.0, 1e6)] {
            let got = sum.percentile(percentile).unwrap();
            assert!((got - want).abs() / want < 0.002, "p{percentile}: {got}");
        }
        assert_eq!((sum.min_ns(), sum.max_ns()), (Some(1000), Some(1_000_000)));
        assert_eq!(sum.count(), 1000);
        assert_eq!(sum.mean_ns(), Some(500_500.0));
        assert_eq!(Durations::default().mean_ns(), None);
    }

    #[test]
    fn a_percentile_is_that_of_its_rank() {
        // Scenario: the slowest of 1000 takes a second, and of 3000 the three slowest. Expected: p99.9 is not one of them, and
        // anything above is.
        for thousands in [1, 3] {
            let mut durations = Durations::default();
            for i in 0..1000 * thousands {
                durations.record(Duration::from_millis(if i < thousands { 1000 } else { 1 }));
            }
            let [below, above] = [99.9, 99.901].map(|percentile| durations.percentile(percentile).unwrap());
            assert!(below < 2e6 && above > 9e8, "{below} {above}");
        }
    }

    #[test]
    fn short_durations_have_their_digits() {
        // Scenario: durations from 4 ns to 0.3 s, each with one of twice its length. Expected: the median, to three digits.
        for digits in 0..9 {
            let ns = 3 * 10u64.pow(digits) + 1;
            let mut durations = Durations::default();
            for ns in [ns, ns, 2 * ns] {
                durations.record(Duration::from_nanos(ns));
            }
            let (median, ns) = (
                durations.percentile(50.0).unwrap(),
                crate::quantity::approximate(ns),
            );
            assert!((median / ns - 1.0).abs() <= 1e-3, "{ns}: {median}");
        }
    }

    #[test]
    fn the_encoding_goes_there_and_back() {
        // The compressed V2 form that other tools read; then text that is invalid, cut off, of another shape (as earlier
        // versions made it, too), contradictory.
        let whole = ramp(1..=1000);
        let text = whole.encode().unwrap();
        assert!(text.starts_with("HISTFAAAA"), "{text}");
        assert_eq!(
            Durations::decode(&text, 1000, 1_000_000, 500_500.0).unwrap(),
            whole
        );
        for wrong in ["", "!", "AAAA", &text[..40]] {
            assert!(Durations::decode(wrong, 1, 2, 1.0).is_err(), "{wrong}");
        }
        let earlier = Histogram::<u64>::new_with_bounds(1000, NS_MAX, DIGITS);
        for other in [Histogram::new(2), earlier] {
            let mut bytes = Vec::new();
            V2DeflateSerializer::new()
                .serialize(&other.unwrap(), &mut bytes)
                .unwrap();
            let problem = Durations::decode(&BASE64_STANDARD.encode(bytes), 1, 2, 1.0).unwrap_err();
            assert!(problem.contains("another shape than this version"), "{problem}");
        }
        assert!(Durations::decode(&text, 2, 1, 1.0).is_err());
        for mean in [f64::NAN, -1.0, 4.0, 1e300, f64::INFINITY] {
            assert!(Durations::decode(&text, 1, 2, mean).is_err(), "{mean}");
        }
        assert_eq!(Durations::default().encode(), None);
    }

    #[test]
    fn the_percentile_distribution_is_the_known_text() {
        // The header, ascending percentiles with their counts, 100 % last, and the three closing lines.
        let mut text = Vec::new();
        ramp(1..=1000).write_hgrm(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "       Value     Percentile TotalCount 1/(1-Percentile)"
        );
        assert!(
            lines[2]
                .split_whitespace()
                .eq("0.001 0.000000000000 1 1.00".split(' ')),
            "{text}"
        );
        let (rows, closing) = lines[2..].split_at(lines.len() - 5);
        let numbers = |line: &&str| {
            line.split_whitespace()
                .map(|word| word.parse().unwrap())
                .collect()
        };
        let rows: Vec<Vec<f64>> = rows.iter().map(numbers).collect();
        assert!(
            rows.is_sorted_by(|a, b| (0..3).all(|column| a[column] <= b[column])),
            "{text}"
        );
        assert_eq!(rows.last().unwrap()[1..], [1.0, 1000.0]);
        assert!(
            rows.iter().all(|row| (row[2] / 1000.0 - row[1]).abs() < 0.11),
            "{text}"
        );
        assert_eq!(
            closing[0],
            "#[Mean    =        0.500, StdDeviation   =        0.289]"
        );
        assert_eq!(
            closing[1],
            "#[Max     =        1.000, Total count    =         1000]"
        );
        let mut empty = Vec::new();
        Durations::default().write_hgrm(&mut empty).unwrap();
        assert_eq!(String::from_utf8(empty).unwrap().lines().count(), 2);
    }
}
