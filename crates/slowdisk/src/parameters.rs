//! How slow and how faulty the disk is: values, their bounds, and their text form (`key=value`).

use crate::error::Error;
use serde::Serialize;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

/// A longer latency is surely a mistake, and makes a reading process unkillable meanwhile.
const LATENCY_MAX: Duration = Duration::from_secs(600);
/// The kernel's own limit for asynchronous reads (`max_background` is 16 bits wide).
pub(crate) const CONCURRENCY_MAX: usize = 65_535;
const RANGES_MAX: usize = 1024;

/// How slow and how faulty the disk is. By default neither, with unlimited concurrency.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parameters {
    /// How long each read is in service.
    #[serde(serialize_with = "as_text")]
    pub latency: Duration,
    /// Mean of what is added to the latency: exponential, at most ten times this.
    #[serde(serialize_with = "as_text")]
    pub jitter: Duration,
    /// Most reads in service at a time, 1 to 65,535; further ones wait in order of arrival.
    pub concurrency: usize,
    /// Reads that overlap one of these byte ranges of a file fail with EIO.
    pub error_ranges: Vec<Range<u64>>,
    /// Each read fails with EIO with this probability.
    pub error_probability: f64,
    /// Each direct read returns about half of the requested bytes with this probability.
    pub short_probability: f64,
    /// Reads of an open file whose name leads to another file by now, or to none, fail with ESTALE, as those of a network
    /// file system do whose server has removed the file.
    pub loses_replaced: bool,
    /// Look-ups and opens fail with this errno; 0: they do not.
    pub names_errno: i32,
    /// The generation of what is looked up. With another one, the kernel takes what is open under the same number for lost
    /// (EIO), as if the server had begun to number anew.
    pub generation: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            latency: Duration::ZERO,
            jitter: Duration::ZERO,
            concurrency: CONCURRENCY_MAX,
            error_ranges: Vec::new(),
            error_probability: 0.0,
            short_probability: 0.0,
            loses_replaced: false,
            names_errno: 0,
            generation: 0,
        }
    }
}

impl Parameters {
    /// Sets one parameter, a field's name with dashes, from text. Changes nothing on an error.
    ///
    /// # Errors
    /// `Parameter` for an unknown key, and for a value that does not parse or is out of bounds.
    pub fn assign(&mut self, key: &str, value: &str) -> Result<(), Error> {
        let mut next = self.clone();
        let refuse = |problem: String| Error::parameter(key, problem);
        match key {
            "latency" => next.latency = duration(value).map_err(refuse)?,
            "jitter" => next.jitter = duration(value).map_err(refuse)?,
            "concurrency" => next.concurrency = number(value).map_err(refuse)?,
            "error-ranges" => next.error_ranges = ranges(value).map_err(refuse)?,
            "error-probability" => next.error_probability = number(value).map_err(refuse)?,
            "short-probability" => next.short_probability = number(value).map_err(refuse)?,
            "loses-replaced" => {
                next.loses_replaced = value
                    .parse()
                    .map_err(|_| refuse("use true or false".to_owned()))?;
            }
            "names-errno" => next.names_errno = number(value).map_err(refuse)?,
            "generation" => next.generation = number(value).map_err(refuse)?,
            _ => return Err(refuse("no such parameter".to_owned())),
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
        if self.latency.saturating_add(self.jitter.saturating_mul(10)) > LATENCY_MAX {
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

    /// The jitter for a number between 0 and 1.
    pub(crate) fn jitter_at(&self, unit: f64) -> Duration {
        let factor = -(1.0 - unit.clamp(0.0, 1.0)).max(f64::MIN_POSITIVE).ln();
        self.jitter.mul_f64(factor.clamp(0.0, 10.0))
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
    fn every_parameter_is_set_from_text() {
        // Scenario: a value for each key. Expectation: accepted; an unknown key is refused by name.
        let mut parameters = Parameters::default();
        for (key, value) in [
            ("latency", "2ms"),
            ("jitter", "500us"),
            ("concurrency", "64"),
            ("error-ranges", "4096+4096,1048576+512"),
            ("error-probability", "0.01"),
            ("short-probability", "0.01"),
            ("names-errno", "19"),
            ("generation", "1"),
        ] {
            parameters.assign(key, value).expect(key);
        }
        assert_eq!(parameters.latency, Duration::from_millis(2));
        assert_eq!(parameters.jitter, Duration::from_micros(500));
        assert_eq!(parameters.error_ranges, [4096..8192, 1_048_576..1_049_088]);
        let refused = parameters.assign("speed", "1").expect_err("unknown").to_string();
        assert!(refused.contains("speed"), "{refused}");
    }

    #[test]
    fn a_refused_value_changes_nothing() {
        // Scenario: values out of bounds or of the wrong form. Expectation: an error, and the parameters as before.
        let mut parameters = Parameters::default();
        for (key, value) in [
            ("latency", "2"),
            ("latency", "1h"),
            ("jitter", "5min"),
            ("concurrency", "0"),
            ("concurrency", "65536"),
            ("error-probability", "1.5"),
            ("error-probability", "NaN"),
            ("error-ranges", "18446744073709551615+1"),
            ("error-ranges", "5"),
        ] {
            assert!(parameters.assign(key, value).is_err(), "{key}={value}");
        }
        assert_eq!(parameters, Parameters::default());
    }

    #[test]
    fn jitter_stays_within_its_bounds() {
        // Scenario: the ends of the unit interval and beyond. Expectation: from zero to the stated maximum.
        let jitter = Duration::from_millis(1);
        let parameters = Parameters {
            jitter,
            ..Parameters::default()
        };
        for unit in [-1.0, 0.0, 0.5, 1.0, 2.0] {
            assert_eq!(Parameters::default().jitter_at(unit), Duration::ZERO);
            assert!(parameters.jitter_at(unit) <= jitter * 10);
        }
        assert!(parameters.jitter_at(0.9) > jitter);
    }
}
