//! What is measured: one tally a thread, taken and summed by whoever watches. A request that failed as a whole has no
//! latency; an item that failed is no read.

use super::workload::Workload;
use hdrhistogram::Histogram;
use ringfetch_client::{Answer, Error};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// 1 us to 1 h at 3 digits: about 180 KB. Longer latencies count as the longest.
const LATENCY_NS_MIN: u64 = 1_000;
const LATENCY_NS_MAX: u64 = 3_600_000_000_000;

/// One thread's counts since they were last taken. The lock is its own thread's but for once a second.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    tally: Mutex<(Tally, Vec<u8>)>,
}

/// Counts over some time.
#[derive(Debug, Clone)]
pub(crate) struct Tally {
    /// Requests that were answered.
    pub(crate) requests: u64,
    /// Items that were read.
    pub(crate) reads: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// Requests that failed as a whole, by code.
    pub(crate) request_errors: BTreeMap<&'static str, u64>,
    /// Items that failed, by code.
    pub(crate) item_errors: BTreeMap<&'static str, u64>,
    /// The first error, whole or item, in words.
    pub(crate) first_error: Option<String>,
    /// Bytes that are not the pattern's.
    pub(crate) wrong_bytes: u64,
    /// The first of them, in words.
    pub(crate) first_wrong: Option<String>,
    /// Time that requests were in flight, answered or not, summed.
    pub(crate) in_flight: Duration,
    /// When the last request ended.
    pub(crate) last_end: Option<Instant>,
    pub(crate) latency_min_ns: u64,
    pub(crate) latency_max_ns: u64,
    latency_sum_ns: u128,
    /// `None` until there is a latency: most of a histogram's life is being zero.
    latency: Option<Histogram<u64>>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            requests: 0,
            reads: 0,
            bytes: 0,
            request_errors: BTreeMap::new(),
            item_errors: BTreeMap::new(),
            first_error: None,
            wrong_bytes: 0,
            first_wrong: None,
            in_flight: Duration::ZERO,
            last_end: None,
            latency_min_ns: u64::MAX,
            latency_max_ns: 0,
            latency_sum_ns: 0,
            latency: None,
        }
    }
}

impl Recorder {
    /// Counts one request, and checks its bytes if the workload says so.
    pub(crate) fn record(
        &self,
        workload: &Workload,
        items: &[u64],
        start: Instant,
        end: Instant,
        answer: &Result<Answer, Error>,
    ) {
        let mut guard = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        let (tally, scratch) = &mut *guard;
        let took = end.saturating_duration_since(start);
        tally.in_flight += took;
        tally.last_end = tally.last_end.max(Some(end));
        let answer = match answer {
            Ok(answer) => answer.items(),
            Err(error) => {
                *tally.request_errors.entry(error.label()).or_default() += 1;
                tally.first_error.get_or_insert_with(|| error.to_string());
                return;
            }
        };
        tally.requests += 1;
        tally.latency(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        tally.bytes += count(answer.data().len());
        tally.reads += count(answer.len() - answer.errors().len());
        for error in answer.errors() {
            *tally.item_errors.entry(error.label()).or_default() += 1;
            tally.first_error.get_or_insert_with(|| error.to_string());
        }
        if workload.verifies() {
            for (i, &item) in items.iter().enumerate() {
                let Ok(bytes) = answer.slice(i) else { continue };
                if let Some(wrong) = workload.check(item, bytes, scratch) {
                    tally.wrong_bytes += wrong.count;
                    tally.first_wrong.get_or_insert_with(|| {
                        format!("{}, byte {}: {wrong}", workload.describe(item), wrong.at)
                    });
                }
            }
        }
    }

    /// The counts so far; they begin anew.
    pub(crate) fn take(&self) -> Tally {
        std::mem::take(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner).0)
    }
}

impl Tally {
    /// Adds another tally's counts.
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.reads += other.reads;
        self.bytes += other.bytes;
        for (mine, theirs) in [
            (&mut self.request_errors, &other.request_errors),
            (&mut self.item_errors, &other.item_errors),
        ] {
            for (code, count) in theirs {
                *mine.entry(code).or_default() += count;
            }
        }
        self.first_error = self.first_error.take().or_else(|| other.first_error.clone());
        self.wrong_bytes += other.wrong_bytes;
        self.first_wrong = self.first_wrong.take().or_else(|| other.first_wrong.clone());
        self.in_flight += other.in_flight;
        self.last_end = self.last_end.max(other.last_end);
        self.latency_min_ns = self.latency_min_ns.min(other.latency_min_ns);
        self.latency_max_ns = self.latency_max_ns.max(other.latency_max_ns);
        self.latency_sum_ns += other.latency_sum_ns;
        match (&mut self.latency, &other.latency) {
            // Histograms of one shape always add up.
            (Some(mine), Some(theirs)) => drop(mine.add(theirs)),
            (None, Some(theirs)) => self.latency = Some(theirs.clone()),
            (_, None) => {}
        }
    }

    /// Everything that failed, requests and items.
    pub(crate) fn errors(&self) -> u64 {
        self.request_errors.values().sum::<u64>() + self.item_errors.values().sum::<u64>()
    }

    /// A percentile of the answered requests' latency in nanoseconds; `None` if none was answered.
    #[expect(clippy::cast_precision_loss, reason = "three digits are kept")]
    pub(crate) fn percentile(&self, percentile: f64) -> Option<f64> {
        let histogram = self.latency.as_ref()?;
        // The histogram rounds up within its resolution; nothing is slower than the slowest.
        Some(
            histogram
                .value_at_percentile(percentile)
                .clamp(self.latency_min_ns, self.latency_max_ns) as f64,
        )
    }

    /// The mean latency in nanoseconds; `None` if no request was answered.
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    pub(crate) fn latency_mean_ns(&self) -> Option<f64> {
        (self.requests > 0).then(|| self.latency_sum_ns as f64 / self.requests as f64)
    }

    fn latency(&mut self, nanoseconds: u64) {
        self.latency_min_ns = self.latency_min_ns.min(nanoseconds);
        self.latency_max_ns = self.latency_max_ns.max(nanoseconds);
        self.latency_sum_ns += u128::from(nanoseconds);
        if self.latency.is_none() {
            // The bounds are constants that are known to be good.
            self.latency = Histogram::new_with_bounds(LATENCY_NS_MIN, LATENCY_NS_MAX, 3).ok();
        }
        if let Some(histogram) = &mut self.latency {
            histogram.saturating_record(nanoseconds);
        }
    }
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed() -> Result<Answer, Error> {
        Err(Error::DeadlineExceeded)
    }

    #[test]
    fn errors_have_no_latency() {
        // Scenario: three failed requests of 5 ms each.
        // Expected: three errors by code, time in flight, and no latency at all.
        let (recorder, workload) = (Recorder::default(), Workload::of_blocks(10, false, None));
        let start = Instant::now();
        let end = start + Duration::from_millis(5);
        for _ in 0..3 {
            recorder.record(&workload, &[1], start, end, &failed());
        }
        let tally = recorder.take();
        assert_eq!(
            (tally.requests, tally.errors(), tally.percentile(50.0)),
            (0, 3, None)
        );
        assert_eq!(tally.request_errors["DEADLINE_EXCEEDED"], 3);
        assert_eq!(
            (tally.in_flight, tally.last_end),
            (Duration::from_millis(15), Some(end))
        );
        assert_eq!(recorder.take().errors(), 0);
    }

    #[test]
    fn tallies_add_up_to_what_one_would_have_counted() {
        // Scenario: 1000 latencies of 1 to 1000 us in one tally, and split over three that are added.
        // Expected: the same percentiles, within the histogram's three digits of the truth, and the same mean.
        let mut whole = Tally::default();
        let mut parts = [(); 3].map(|()| Tally::default());
        for us in 1..=1000u64 {
            for tally in [&mut whole, &mut parts[usize::try_from(us % 3).unwrap()]] {
                tally.requests += 1;
                tally.latency(us * 1000);
            }
        }
        let mut sum = Tally::default();
        for part in &parts {
            sum.add(part);
        }
        for (percentile, want) in [
            (50.0, 500_000.0),
            (99.0, 990_000.0),
            (99.9, 999_000.0),
            (100.0, 1e6),
        ] {
            let got = sum.percentile(percentile).unwrap();
            assert_eq!(Some(got), whole.percentile(percentile));
            assert!((got - want).abs() / want < 0.002, "p{percentile}: {got}");
        }
        assert_eq!(sum.latency_mean_ns(), Some(500_500.0));
        assert_eq!((sum.latency_min_ns, sum.latency_max_ns), (1000, 1_000_000));
    }
}
