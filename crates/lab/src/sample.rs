//! The result of a step: its reads as they are counted, and the figures computed from them.

use crate::job::GIVEN_UP;
use hdrhistogram::Histogram;
use ringfetch_command::quantity::approximate;
use ringfetch_pace::quantile_of_sent;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const PAGE_BYTES: u64 = 4096;
/// Limits that latencies are counted against: 2^n ms, from 1 ms to 64 ms.
pub(crate) const OVER_LIMITS: usize = 7;
/// The longest usual latency, a little over a second: 2^30 ns.
const READY: Duration = Duration::from_nanos(1 << 30);

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Reads completed.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
    /// From the first read's start to the last one's end.
    pub seconds: f64,
    /// Latency of a read, microseconds: the shortest, the mean, quantiles, the longest. In an open loop, reads that were
    /// never sent count in quantiles, as slower than all others: one of them has at least the longest latency, which
    /// stands for it.
    pub min_us: f64,
    /// See `min_us`.
    pub mean_us: f64,
    /// See `min_us`.
    pub p50_us: f64,
    /// See `min_us`.
    pub p99_us: f64,
    /// See `min_us`.
    pub p999_us: f64,
    /// See `min_us`.
    pub max_us: f64,
    /// Reads in flight on average, by Little's law.
    pub depth_achieved: f64,
    /// CPU time of this process per read, user and system (CLOCK_PROCESS_CPUTIME_ID of clock_gettime(2)).
    pub cpu_us_per_read: f64,
    /// Bytes that the device read, as a share of the bytes requested, or of the pages that these lie in where reads go
    /// through the page cache. `None`: there are no device counters.
    pub device_share: Option<f64>,
    /// The share of the data in the page cache before the step. `None`: the kernel does not report it.
    pub resident_before: Option<f64>,
    /// Memory of this process when the step ended, without the page cache (RssAnon of proc_pid_status(5)).
    pub own_memory_bytes: u64,
    /// The strategy's own remark.
    pub note: Option<String>,
    /// In an open loop: the shares of its reads that took longer than 1, 2, 4, 8, 16, 32 and 64 ms. Reads
    /// that were never sent count as longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<[f64; OVER_LIMITS]>,
    /// In an open loop: reads that were never sent.
    #[serde(default)]
    pub missed: u64,
    /// In `act`: the highest rate that was held, in units of 2,000 reads a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiple: Option<f64>,
}

impl Sample {
    /// In an open loop: the share of its reads that were never sent.
    pub(crate) fn missed_share(&self) -> f64 {
        approximate(self.missed) / approximate((self.reads + self.missed).max(1))
    }

    /// In an open loop: whether it ended early, since its rate was not held.
    pub(crate) fn is_given_up(&self) -> bool {
        self.note.as_deref().is_some_and(|note| note.contains(GIVEN_UP))
    }
}

/// Extracts a figure from a sample.
pub(crate) type Of = fn(&Sample) -> f64;

pub(crate) fn reads_per_second(sample: &Sample) -> f64 {
    approximate(sample.reads) / sample.seconds
}

pub(crate) fn bytes_per_second(sample: &Sample) -> f64 {
    approximate(sample.bytes) / sample.seconds
}

/// CPU time of a sample as a share of one core, in percent.
pub(crate) fn cpu_percent(sample: &Sample) -> f64 {
    sample.cpu_us_per_read * reads_per_second(sample) / 1e4
}

/// CPU time per read of a sample.
pub(crate) fn cpu_us_per_read(sample: &Sample) -> f64 {
    sample.cpu_us_per_read
}

/// How long a sample took.
pub(crate) fn seconds(sample: &Sample) -> f64 {
    sample.seconds
}

/// Finished reads.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    reads: u64,
    pub(crate) bytes: u64,
    /// Bytes of the pages that they lie in.
    pub(crate) paged_bytes: u64,
    waited: Duration,
    in_flight: Duration,
    latency: Option<Histogram<u32>>,
}

impl Counts {
    /// No reads, with the memory to count them: up to [`READY`], counting takes no more of it.
    pub(crate) fn none() -> Self {
        // Three digits are valid. It grows by itself, and does not shrink.
        let mut latency = Histogram::new(3).ok();
        if let Some(latency) = &mut latency {
            let _recorded = latency.record(nanos(READY));
            latency.reset();
        }
        Self {
            latency,
            ..Self::default()
        }
    }

    /// Counts a read: where its bytes lie, its latency, and the part of that after it was sent.
    pub(crate) fn read(&mut self, offset: u64, bytes: usize, latency: Duration, in_flight: Duration) {
        self.reads += 1;
        self.bytes += bytes as u64;
        // 3072 bytes from 3072 lie in two pages.
        let end = offset.saturating_add(bytes as u64);
        self.paged_bytes += end.div_ceil(PAGE_BYTES).saturating_sub(offset / PAGE_BYTES) * PAGE_BYTES;
        self.waited += latency;
        self.in_flight += in_flight;
        if let Some(histogram) = &mut self.latency {
            let _recorded = histogram.record(nanos(latency));
        }
    }

    /// Adds another's reads.
    pub(crate) fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.bytes += other.bytes;
        self.paged_bytes += other.paged_bytes;
        self.waited += other.waited;
        self.in_flight += other.in_flight;
        if let (Some(all), Some(latency)) = (&mut self.latency, &other.latency) {
            let _added = all.add(latency);
        }
    }

    /// The figures of these reads for this much time and CPU time; in an open loop, including reads that were
    /// never sent. `None`: there are no reads.
    pub(crate) fn sample(&self, time: Duration, cpu: Duration, missed: Option<u64>) -> Option<Sample> {
        let latency = self.latency.as_ref().filter(|_| self.reads > 0)?;
        let (reads, seconds) = (approximate(self.reads), time.as_secs_f64().max(1e-9));
        let micros = |nanoseconds: u64| approximate(nanoseconds) / 1e3;
        let never_sent = missed.unwrap_or(0);
        let quantile = |quantile| {
            let of_sent = quantile_of_sent(quantile, self.reads, never_sent);
            micros(latency.value_at_quantile(of_sent.min(1.0)))
        };
        Some(Sample {
            reads: self.reads,
            bytes: self.bytes,
            seconds,
            min_us: micros(latency.min()),
            mean_us: self.waited.as_secs_f64() * 1e6 / reads,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            max_us: micros(latency.max()),
            depth_achieved: self.in_flight.as_secs_f64() / seconds,
            cpu_us_per_read: cpu.as_secs_f64() * 1e6 / reads,
            device_share: None,
            resident_before: None,
            own_memory_bytes: 0,
            note: None,
            over: missed.map(|missed| over(latency, missed)),
            missed: never_sent,
            multiple: None,
        })
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The shares of latencies above 2^n ms, with `missed` more that are above every limit.
fn over(latency: &Histogram<u32>, missed: u64) -> [f64; OVER_LIMITS] {
    let all = approximate((latency.len() + missed).max(1));
    std::array::from_fn(|bits| {
        let recorded = latency.iter_recorded();
        // Values are recorded to three digits.
        let slow =
            recorded.filter(|value| latency.lowest_equivalent(value.value_iterated_to()) > 1_000_000 << bits);
        let slow: u64 = slow.map(|value| value.count_since_last_iteration()).sum();
        approximate(slow + missed) / all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_in_flight_from_their_sending_on() {
        // Scenario: ten reads that wait a second each for a slot and then take 10 ms, in a second. Expected: a
        // depth of 0.1, and latencies that include the wait, their mean between the shortest and the longest.
        let mut counts = Counts::none();
        for _ in 0..10 {
            counts.read(0, 1, Duration::from_millis(1010), Duration::from_millis(10));
        }
        let sample = counts
            .sample(Duration::from_secs(1), Duration::ZERO, Some(0))
            .unwrap();
        assert!((sample.depth_achieved - 0.1).abs() < 1e-9, "{sample:?}");
        assert!(sample.p50_us > 1e6, "{sample:?}");
        assert!((sample.mean_us - 1_010_000.0).abs() < 1e-3, "{sample:?}");
    }

    #[test]
    fn to_count_a_read_takes_no_memory() {
        // Scenario: latencies from 1 ns to more than a second. Expected: the histogram does not grow, as the first read of each
        // thread would have it, within the time that is measured.
        let mut counts = Counts::none();
        let values = |counts: &Counts| counts.latency.as_ref().map(Histogram::distinct_values);
        let before = values(&counts);
        for latency in (0..=30).map(|bits| Duration::from_nanos(1 << bits)) {
            counts.read(0, 1, latency, latency);
        }
        assert_eq!(values(&counts), before);
        let sample = counts.sample(Duration::from_secs(1), Duration::ZERO, None);
        assert_eq!(sample.map(|sample| sample.reads), Some(31));
    }

    #[test]
    fn a_quantile_is_that_of_its_rank() {
        // Scenario: latencies of 1 to 29 ms, and one read that was never sent. Expected: the median is the 15th of 30.
        let mut counts = Counts::none();
        for ms in (1..=29).map(Duration::from_millis) {
            counts.read(0, 1, ms, ms);
        }
        let sample = counts.sample(Duration::from_secs(1), Duration::ZERO, Some(1));
        let median = sample.map_or(0.0, |sample| sample.p50_us);
        assert!((median / 15e3 - 1.0).abs() < 0.002, "{median}");
    }

    #[test]
    fn reads_that_were_never_sent_are_slower_than_all_others() {
        // Scenario: latencies of 1 to 1000 ms, 500 reads that were never sent. Expected: the median is that of 1500; p99 and
        // p99.9 are among the reads that were never sent, so at least the longest.
        let mut counts = Counts::none();
        for ms in (1..=1000).map(Duration::from_millis) {
            counts.read(0, 1, ms, ms);
        }
        let sample = counts.sample(Duration::from_secs(1), Duration::ZERO, Some(500));
        let sample = sample.unwrap();
        assert!((sample.p50_us / 750e3 - 1.0).abs() < 0.002, "{sample:?}");
        assert_eq!([sample.p99_us, sample.p999_us], [sample.max_us; 2], "{sample:?}");
    }

    #[test]
    fn shares_over_limits_are_those_of_known_distributions() {
        // Scenario: 900 latencies of exactly 1 ms, 80 of 3 ms, 15 of 20 ms, 5 of 100 ms; 1 000 more were
        // never sent; 20 000 seeded exponential ones with a mean of 2 ms. Expected: the shares; at least half
        // above every limit; e^(-limit / mean) +- 1 %.
        let known = || Histogram::<u32>::new(3).unwrap();
        let (mut known, mut drawn) = (known(), known());
        for (milliseconds, count) in [(1, 900), (3, 80), (20, 15), (100, 5)] {
            known.record_n(milliseconds * 1_000_000, count).unwrap();
        }
        assert_eq!(over(&known, 0), [0.1, 0.1, 0.02, 0.02, 0.02, 0.005, 0.005]);
        assert_eq!(over(&known, 1000)[6], 0.5025);
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..20_000 {
            let drawn_s = -(1.0 - random.f64()).ln() * 2e-3;
            let nanoseconds = Duration::from_secs_f64(drawn_s).as_nanos();
            drawn.record(u64::try_from(nanoseconds).unwrap()).unwrap();
        }
        for (limit, share) in [1.0_f64, 2.0, 4.0, 8.0].iter().zip(over(&drawn, 0)) {
            assert!((share - (-limit / 2.0).exp()).abs() < 0.01, "{limit} ms: {share}");
        }
    }
}
