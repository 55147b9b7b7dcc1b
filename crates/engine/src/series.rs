//! Metrics that are put together at each scrape, from counters of many threads.

use prometheus::core::Desc;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use std::collections::{BTreeMap, HashMap};

/// Upper bounds of histograms of durations, in nanoseconds: 1-2-5 from 1 us to 10 s (TRAPS 27: the library's default
/// begins at 5 ms, far above a device).
pub const DURATION_BOUNDS_NS: [u64; 22] = {
    let mut bounds = [0; 22];
    let mut decade = 1_000;
    let mut index = 0;
    while index < 22 {
        bounds[index] = decade * [1, 2, 5][index % 3];
        if index % 3 == 2 {
            decade *= 10;
        }
        index += 1;
    }
    bounds
};

/// A histogram, summed over its parts.
#[derive(Debug, Default)]
pub struct HistogramTotal {
    /// Of each bound, not cumulative.
    pub buckets: Vec<u64>,
    /// Of all values, those above the last bound included.
    pub count: u64,
    /// Of all values.
    pub sum: u64,
}

/// A count as a float; exact below 2^53.
#[expect(clippy::cast_precision_loss, reason = "Prometheus counts in f64")]
pub fn float(value: u64) -> f64 {
    value as f64
}

/// The metrics of a collector: their names and help texts.
#[derive(Debug)]
pub struct Catalog(Vec<Desc>);

impl Catalog {
    /// Of these names and help texts.
    ///
    /// # Errors
    /// A name is malformed, or has no help text.
    pub fn new(metrics: &[(&str, &str)]) -> Result<Self, prometheus::Error> {
        let described = metrics.iter().map(|(name, help)| {
            Desc::new((*name).to_owned(), (*help).to_owned(), Vec::new(), HashMap::new())
        });
        Ok(Self(described.collect::<Result<_, _>>()?))
    }

    /// For the registry.
    pub fn descriptions(&self) -> Vec<&Desc> {
        self.0.iter().collect()
    }

    /// Begins a scrape.
    pub fn scrape(&self) -> Scrape<'_> {
        Scrape {
            catalog: self,
            families: BTreeMap::new(),
        }
    }
}

/// The series of one scrape.
#[derive(Debug)]
pub struct Scrape<'a> {
    catalog: &'a Catalog,
    families: BTreeMap<&'static str, MetricFamily>,
}

impl Scrape<'_> {
    fn push(
        &mut self,
        name: &'static str,
        kind: MetricType,
        labels: &[(&str, &str)],
        fill: impl FnOnce(&mut Metric),
    ) {
        let family = self.families.entry(name).or_insert_with(|| {
            let described = self.catalog.0.iter().find(|desc| desc.fq_name == name);
            debug_assert!(described.is_some(), "{name} is not in the catalog");
            let mut family = MetricFamily::default();
            family.set_name(name.to_owned());
            family.set_help(described.map_or_else(String::new, |desc| desc.help.clone()));
            family.set_field_type(kind);
            family
        });
        let labels = labels
            .iter()
            .map(|(name, value)| {
                let mut pair = LabelPair::default();
                pair.set_name((*name).to_owned());
                pair.set_value((*value).to_owned());
                pair
            })
            .collect();
        let mut metric = Metric::from_label(labels);
        fill(&mut metric);
        family.mut_metric().push(metric);
    }

    /// Adds a counter with these labels.
    pub fn counter(&mut self, name: &'static str, labels: &[(&str, &str)], value: u64) {
        self.push(name, MetricType::COUNTER, labels, |metric| {
            let mut counter = Counter::default();
            counter.set_value(float(value));
            metric.set_counter(counter);
        });
    }

    /// Adds a gauge with these labels.
    pub fn gauge(&mut self, name: &'static str, labels: &[(&str, &str)], value: f64) {
        self.push(name, MetricType::GAUGE, labels, |metric| {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        });
    }

    /// Adds a histogram of durations in nanoseconds, by [`DURATION_BOUNDS_NS`]; it is exported in seconds.
    pub fn durations(&mut self, name: &'static str, labels: &[(&str, &str)], total: &HistogramTotal) {
        self.histogram(name, labels, total, &DURATION_BOUNDS_NS, 1e9);
    }

    /// Adds a histogram with these labels, and `parts` of what was counted to the exported unit. A division, because
    /// 1000 * 1e-9 is 0.0000010000000000000002, a label that no query would have.
    pub fn histogram(
        &mut self,
        name: &'static str,
        labels: &[(&str, &str)],
        total: &HistogramTotal,
        bounds: &[u64],
        parts: f64,
    ) {
        self.push(name, MetricType::HISTOGRAM, labels, |metric| {
            let mut histogram = Histogram::default();
            let mut cumulative = 0;
            let buckets = bounds.iter().zip(&total.buckets).map(|(bound, count)| {
                cumulative += count;
                let mut bucket = Bucket::default();
                bucket.set_upper_bound(float(*bound) / parts);
                bucket.set_cumulative_count(cumulative);
                bucket
            });
            histogram.set_bucket(buckets.collect());
            histogram.set_sample_count(total.count);
            histogram.set_sample_sum(float(total.sum) / parts);
            metric.set_histogram(histogram);
        });
    }

    /// The metrics that have series: the registry refuses others.
    pub fn finish(self) -> Vec<MetricFamily> {
        self.families.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_decimal_numbers_as_queries_write_them() {
        // Scenario: the bounds of a histogram of durations as text, which is their label. Expectation: 1, 2 and 5 times
        // powers of ten, without the errors of binary fractions.
        let catalog = Catalog::new(&[("duration_seconds", "Durations.")]).unwrap();
        let mut scrape = catalog.scrape();
        let total = HistogramTotal {
            buckets: vec![0; DURATION_BOUNDS_NS.len()],
            ..HistogramTotal::default()
        };
        scrape.durations("duration_seconds", &[], &total);
        let families = scrape.finish();
        let buckets = families[0].get_metric()[0].get_histogram().get_bucket();
        let found: Vec<String> = buckets
            .iter()
            .map(|bucket| bucket.upper_bound().to_string())
            .collect();
        let expected = (0..buckets.len()).map(|index| {
            let text = format!("{}e{}", [1, 2, 5][index % 3], index.cast_signed() / 3 - 6);
            text.parse::<f64>().unwrap().to_string()
        });
        assert_eq!(found, expected.collect::<Vec<_>>());
    }
}
