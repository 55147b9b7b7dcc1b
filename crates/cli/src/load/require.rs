//! Conditions on a result: `p99<5ms`, `errors<0.1%`, `reads_per_second>80000`. A figure that a run does not have
//! (a latency without an answer) meets no condition.

use crate::outcome::Failure;
use crate::quantity::{latency, parse_duration, rate};

/// One condition.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Requirement {
    /// As it was written.
    text: String,
    figure: Figure,
    relation: Relation,
    /// Nanoseconds for latencies, a fraction for shares.
    value: f64,
}

/// A number that a result has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Figure {
    Percentile(f64),
    LatencyMin,
    LatencyMean,
    LatencyMax,
    Errors,
    ErrorShare,
    Missed,
    MissedShare,
    Late,
    LateShare,
    WrongBytes,
    ReadsPerSecond,
    RequestsPerSecond,
    MegabytesPerSecond,
    CpuPerRead,
    ServerCpuPerRead,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    Below,
    AtMost,
    Above,
    AtLeast,
}

const FIGURES: &str = "p50, p99, p99.9, ..., min, mean, max (durations), errors, missed, late (numbers or %), \
                       wrong_bytes, reads_per_second, requests_per_second, megabytes_per_second, cpu_us_per_read, \
                       server_cpu_us_per_read";

impl Requirement {
    /// A figure, `<`, `<=`, `>` or `>=`, and a value.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let at = text
            .find(['<', '>'])
            .ok_or_else(|| "use FIGURE<VALUE, with <, <=, > or >=: p99<5ms, errors<0.1%".to_owned())?;
        let (name, rest) = text.split_at(at);
        let relations = [
            ("<=", Relation::AtMost),
            (">=", Relation::AtLeast),
            ("<", Relation::Below),
            (">", Relation::Above),
        ];
        let found = relations
            .iter()
            .find_map(|(sign, relation)| Some((rest.strip_prefix(sign)?, *relation)));
        let (value, relation) = found.ok_or_else(|| "use <, <=, > or >=".to_owned())?;
        let (figure, value) = read(name.trim(), value.trim())?;
        Ok(Self {
            text: text.to_owned(),
            figure,
            relation,
            value,
        })
    }

    /// The same; `p99=5ms` means at most that.
    pub(crate) fn parse_objective(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, value)) if !name.ends_with(['<', '>']) => {
                let requirement = Self::parse(&format!("{name}<={value}"))?;
                Ok(Self {
                    text: text.to_owned(),
                    ..requirement
                })
            }
            _ => Self::parse(text),
        }
    }

    /// As it was written.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Why a result does not meet it; `None`: it does.
    pub(crate) fn unmet(&self, result: impl Fn(Figure) -> Option<f64>) -> Option<String> {
        let Some(got) = result(self.figure) else {
            return Some(format!("{}: this run has no such figure", self.text));
        };
        let met = match self.relation {
            Relation::Below => got < self.value,
            Relation::AtMost => got <= self.value,
            Relation::Above => got > self.value,
            Relation::AtLeast => got >= self.value,
        };
        (!met).then(|| format!("{}: it is {}", self.text, self.figure.tell(got)))
    }
}

/// A figure by its name, and its value in its unit.
fn read(name: &str, value: &str) -> Result<(Figure, f64), String> {
    let number = |text: &str| text.parse::<f64>().ok().filter(|number| number.is_finite());
    let unknown = || format!("{name:?} is not a figure; use {FIGURES}");
    let wrong = |what: &str| format!("{value:?} is not a {what}, as {name} takes");
    let of_latency = match name {
        "min" => Some(Figure::LatencyMin),
        "mean" => Some(Figure::LatencyMean),
        "max" => Some(Figure::LatencyMax),
        _ => match name.strip_prefix('p').map(number) {
            Some(Some(percentile)) if 0.0 < percentile && percentile <= 100.0 => {
                Some(Figure::Percentile(percentile))
            }
            Some(_) | None => None,
        },
    };
    if let Some(figure) = of_latency {
        let duration = parse_duration(value).map_err(|_| wrong("duration like 500us, 5ms or 1s"))?;
        return Ok((figure, duration.as_secs_f64() * 1e9));
    }
    let countable = match name {
        "errors" => Some((Figure::Errors, Figure::ErrorShare)),
        "missed" => Some((Figure::Missed, Figure::MissedShare)),
        "late" => Some((Figure::Late, Figure::LateShare)),
        _ => None,
    };
    if let Some((count, share)) = countable {
        return match value.strip_suffix('%') {
            Some(percent) => number(percent.trim()).map(|percent| (share, percent / 100.0)),
            None => number(value).map(|value| (count, value)),
        }
        .ok_or_else(|| wrong("number or percentage"));
    }
    let figure = match name {
        "wrong_bytes" => Figure::WrongBytes,
        "reads_per_second" => Figure::ReadsPerSecond,
        "requests_per_second" => Figure::RequestsPerSecond,
        "megabytes_per_second" => Figure::MegabytesPerSecond,
        "cpu_us_per_read" => Figure::CpuPerRead,
        "server_cpu_us_per_read" => Figure::ServerCpuPerRead,
        _ => return Err(unknown()),
    };
    number(value)
        .map(|value| (figure, value))
        .ok_or_else(|| wrong("number"))
}

impl Figure {
    fn tell(self, got: f64) -> String {
        match self {
            Self::Percentile(_) | Self::LatencyMin | Self::LatencyMean | Self::LatencyMax => latency(got),
            Self::ErrorShare | Self::MissedShare | Self::LateShare => format!("{:.4} %", got * 100.0),
            Self::Errors | Self::Missed | Self::Late | Self::WrongBytes => format!("{got:.0}"),
            Self::ReadsPerSecond | Self::RequestsPerSecond | Self::MegabytesPerSecond => rate(got),
            Self::CpuPerRead | Self::ServerCpuPerRead => format!("{got:.2}"),
        }
    }
}

/// The conditions that a result does not meet, as a failure of their own kind.
pub(crate) fn check(
    requirements: &[Requirement],
    result: impl Fn(Figure) -> Option<f64>,
) -> Result<(), Failure> {
    let unmet: Vec<String> = requirements
        .iter()
        .filter_map(|requirement| requirement.unmet(&result))
        .collect();
    if unmet.is_empty() {
        return Ok(());
    }
    Err(Failure::Condition(format!("not met: {}", unmet.join("; "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_read_or_say_what_is_allowed() {
        // Scenario: every figure and relation; then what is nearly right.
        // Expected: a condition; an error for each of the others.
        for right in [
            "p99<5ms",
            "p99.9 <= 1s",
            "p50>1us",
            "min>=0s",
            "mean<1ms",
            "max<10s",
            "errors<1",
            "errors<0.1%",
            "missed<1%",
            "late<5",
            "wrong_bytes<=0",
            "reads_per_second>80000",
            "requests_per_second>1e3",
            "megabytes_per_second>10",
            "cpu_us_per_read<2.5",
            "server_cpu_us_per_read<4",
        ] {
            assert!(Requirement::parse(right).is_ok(), "{right}");
        }
        for wrong in [
            "",
            "p99",
            "p99=5ms",
            "p99<5",
            "p101<5ms",
            "p0<1s",
            "px<1s",
            "errors<x",
            "errors<x%",
            "reads>1",
            "reads_per_second>NaN",
            "reads_per_second>5%",
            "<5",
            "p99<",
            "p99<>5ms",
        ] {
            assert!(Requirement::parse(wrong).is_err(), "{wrong}");
        }
        assert!(Requirement::parse_objective("p99=5ms").is_ok());
        assert!(Requirement::parse_objective("p99<=5ms").is_ok());
        assert!(Requirement::parse_objective("p99").is_err());
    }
}
