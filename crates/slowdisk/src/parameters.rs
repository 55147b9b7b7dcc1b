//! How slow and how faulty the disk is: values, their bounds, and their text form (`key=value`).

use crate::error::Error;
use serde::Serialize;
use std::fmt::Write as _;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

/// A longer latency is surely a mistake, and makes a reading process unkillable meanwhile.
const LATENCY_MAX: Duration = Duration::from_secs(600);
/// The kernel's own limit for asynchronous reads (`max_background` is 16 bits wide).
pub(crate) const CONCURRENCY_MAX: usize = 65_535;
const RANGES_MAX: usize = 1024;

/// Additional latency, drawn for each read from the seed and the read's number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Jitter {
    /// Nothing.
    #[default]
    None,
    /// Uniform between zero and this.
    Uniform(Duration),
    /// Exponential with this mean, limited to ten times the mean.
    Exponential(Duration),
}

impl Jitter {
    /// The jitter for a number between 0 and 1.
    pub(crate) fn at(self, unit: f64) -> Duration {
        match self {
            Self::None => Duration::ZERO,
            Self::Uniform(most) => most.mul_f64(unit.clamp(0.0, 1.0)),
            Self::Exponential(mean) => {
                let factor = -(1.0 - unit.clamp(0.0, 1.0)).max(f64::MIN_POSITIVE).ln();
                mean.mul_f64(factor.clamp(0.0, 10.0))
            }
        }
    }

    fn longest(self) -> Duration {
        match self {
            Self::None => Duration::ZERO,
            Self::Uniform(most) => most,
            Self::Exponential(mean) => mean.saturating_mul(10),
        }
    }
}

impl FromStr for Jitter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            Some(("uniform", most)) => duration(most).map(Self::Uniform),
            Some(("exponential", mean)) => duration(mean).map(Self::Exponential),
            _ => Err(format!("{text:?}: use none, uniform:TIME or exponential:TIME")),
        }
    }
}

/// How slow and how faulty the disk is. By default neither, with unlimited concurrency.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parameters {
    /// How long each read is in service.
    #[serde(serialize_with = "as_text")]
    pub latency: Duration,
    /// Added to the latency.
    pub jitter: Jitter,
    /// Most reads in service at a time, 1 to 65,535; further ones wait in order of arrival.
    pub concurrency: usize,
    /// Bytes a second of all reads together; 0: unlimited.
    pub bandwidth_bytes: u64,
    /// Reads that overlap one of these byte ranges of a file fail with EIO.
    pub error_ranges: Vec<Range<u64>>,
    /// Every n-th read fails with EIO; 0: none.
    pub error_every: u64,
    /// Each read fails with EIO with this probability.
    pub error_probability: f64,
    /// Every n-th direct read returns about half of the requested bytes; 0: none.
    pub short_every: u64,
    /// Each direct read is short with this probability.
    pub short_probability: f64,
    /// Seed of jitter and probabilities.
    pub seed: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            latency: Duration::ZERO,
            jitter: Jitter::None,
            concurrency: CONCURRENCY_MAX,
            bandwidth_bytes: 0,
            error_ranges: Vec::new(),
            error_every: 0,
            error_probability: 0.0,
            short_every: 0,
            short_probability: 0.0,
            seed: 1,
        }
    }
}

impl Parameters {
    /// The keys of [`Self::assign`], each with an example of its value.
    pub const KEYS: [(&'static str, &'static str); 10] = [
        ("latency", "2ms"),
        ("jitter", "uniform:500us"),
        ("concurrency", "64"),
        ("bandwidth", "500000000"),
        ("error-ranges", "4096+4096,1048576+512"),
        ("error-every", "100"),
        ("error-probability", "0.01"),
        ("short-every", "100"),
        ("short-probability", "0.01"),
        ("seed", "1"),
    ];

    /// Sets one parameter from text. Changes nothing on an error.
    ///
    /// # Errors
    /// `Parameter` for an unknown key, and for a value that does not parse or is out of bounds.
    pub fn assign(&mut self, key: &str, value: &str) -> Result<(), Error> {
        let mut next = self.clone();
        let refuse = |problem: String| Error::parameter(key, problem);
        match key {
            "latency" => next.latency = duration(value).map_err(refuse)?,
            "jitter" => next.jitter = value.parse().map_err(refuse)?,
            "concurrency" => next.concurrency = number(value).map_err(refuse)?,
            "bandwidth" => next.bandwidth_bytes = number(value).map_err(refuse)?,
            "error-ranges" => next.error_ranges = ranges(value).map_err(refuse)?,
            "error-every" => next.error_every = number(value).map_err(refuse)?,
            "error-probability" => next.error_probability = number(value).map_err(refuse)?,
            "short-every" => next.short_every = number(value).map_err(refuse)?,
            "short-probability" => next.short_probability = number(value).map_err(refuse)?,
            "seed" => next.seed = number(value).map_err(refuse)?,
            _ => {
                let mut known = String::new();
                for (name, _) in Self::KEYS {
                    // Writing to a String cannot fail.
                    let _ = write!(known, " {name}");
                }
                return Err(refuse(format!("no such parameter; use one of:{known}")));
            }
        }
        next.check()?;
        *self = next;
        Ok(())
    }

    /// Checks that all values are within their bounds.
    ///
    /// # Errors
    /// `Parameter` for the first one that is not.
    pub fn check(&self) -> Result<(), Error> {
        if self.latency.saturating_add(self.jitter.longest()) > LATENCY_MAX {
            return Err(Error::parameter(
                "latency",
                format!("more than {LATENCY_MAX:?} with its jitter"),
            ));
        }
        if !(1..=CONCURRENCY_MAX).contains(&self.concurrency) {
            let problem = format!("is {}; use 1 to {CONCURRENCY_MAX}", self.concurrency);
            return Err(Error::parameter("concurrency", problem));
        }
        if self.error_ranges.len() > RANGES_MAX {
            return Err(Error::parameter(
                "error-ranges",
                format!("more than {RANGES_MAX}"),
            ));
        }
        for (key, value) in [
            ("error-probability", self.error_probability),
            ("short-probability", self.short_probability),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return Err(Error::parameter(key, format!("is {value}; use 0 to 1")));
            }
        }
        Ok(())
    }

    /// How long a transfer of this many bytes occupies the bus.
    pub(crate) fn transfer_time(&self, length_bytes: u64) -> Duration {
        if self.bandwidth_bytes == 0 {
            return Duration::ZERO;
        }
        let nanos = u128::from(length_bytes) * 1_000_000_000 / u128::from(self.bandwidth_bytes);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(LATENCY_MAX)
    }
}

fn as_text<S: serde::Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&humantime::format_duration(*value))
}

fn number<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not a number in range"))
}

fn duration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    humantime::parse_duration(text).map_err(|error| format!("{text:?}: {error}; use for example 2ms"))
}

/// `OFFSET+LENGTH`, separated by commas; empty: none.
fn ranges(text: &str) -> Result<Vec<Range<u64>>, String> {
    let parts = text.split(',').filter(|part| !part.is_empty());
    let parse = |part: &str| {
        let (offset, length) = part.split_once('+')?;
        let offset: u64 = offset.parse().ok()?;
        let length: u64 = length.parse().ok()?;
        Some(offset..offset.checked_add(length)?)
    };
    parts
        .map(|part| parse(part).ok_or_else(|| format!("{part:?}: use OFFSET+LENGTH in bytes")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_takes_its_own_example() {
        // Scenario: each documented key with its example. Expectation: accepted; an unknown key is refused by name.
        let mut parameters = Parameters::default();
        for (key, example) in Parameters::KEYS {
            parameters.assign(key, example).expect(key);
        }
        assert_eq!(parameters.latency, Duration::from_millis(2));
        assert_eq!(parameters.jitter, Jitter::Uniform(Duration::from_micros(500)));
        assert_eq!(parameters.error_ranges, [4096..8192, 1_048_576..1_049_088]);
        let refused = parameters.assign("speed", "1").expect_err("unknown").to_string();
        assert!(
            refused.contains("speed") && refused.contains("bandwidth"),
            "{refused}"
        );
    }

    #[test]
    fn a_refused_value_changes_nothing() {
        // Scenario: values out of bounds or of the wrong form. Expectation: an error, and the parameters as before.
        let mut parameters = Parameters::default();
        for (key, value) in [
            ("latency", "2"),
            ("latency", "1h"),
            ("jitter", "normal:1ms"),
            ("concurrency", "0"),
            ("concurrency", "65536"),
            ("error-probability", "1.5"),
            ("error-probability", "NaN"),
            ("error-ranges", "18446744073709551615+1"),
            ("error-ranges", "5"),
            ("seed", "-1"),
        ] {
            assert!(parameters.assign(key, value).is_err(), "{key}={value}");
        }
        assert_eq!(parameters, Parameters::default());
    }

    #[test]
    fn jitter_stays_within_its_bounds() {
        // Scenario: the ends of the unit interval and beyond. Expectation: from zero to the stated maximum.
        let mean = Duration::from_millis(1);
        for unit in [-1.0, 0.0, 0.5, 1.0, 2.0] {
            assert_eq!(Jitter::None.at(unit), Duration::ZERO);
            assert!(Jitter::Uniform(mean).at(unit) <= mean);
            assert!(Jitter::Exponential(mean).at(unit) <= mean * 10);
        }
        assert_eq!(Jitter::Uniform(mean).at(0.5), mean / 2);
    }

    #[test]
    fn transfer_time_is_bytes_over_bandwidth() {
        // Scenario: 1 MB at 100 MB/s. Expectation: 10 ms; without a bandwidth nothing.
        let parameters = Parameters {
            bandwidth_bytes: 100_000_000,
            ..Parameters::default()
        };
        assert_eq!(parameters.transfer_time(1_000_000), Duration::from_millis(10));
        assert_eq!(Parameters::default().transfer_time(u64::MAX), Duration::ZERO);
    }
}
