//! Conditions on a result: `p99<5ms`, `errors<0.1%`, `reads_per_second>80000`. A figure that a run does not
//! have (a latency without a response) meets no condition.

use crate::outcome::Failure;
use crate::quantity::{latency, parse_duration, rate};

/// One condition.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Requirement {
    /// As written by the user.
    text: String,
    figure: Figure,
    unit: Unit,
    /// `<`, `<=`, `>` or `>=`.
    relation: &'static str,
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
enum Unit {
    Nanoseconds,
    Count,
    Share,
    PerSecond,
    Microseconds,
}

/// Every figure except percentiles. `NAME%` is the figure for a condition on NAME whose value is a
/// percentage.
const FIGURES: [(&str, Figure, Unit); 15] = [
    ("min", Figure::LatencyMin, Unit::Nanoseconds),
    ("mean", Figure::LatencyMean, Unit::Nanoseconds),
    ("max", Figure::LatencyMax, Unit::Nanoseconds),
    ("errors", Figure::Errors, Unit::Count),
    ("errors%", Figure::ErrorShare, Unit::Share),
    ("missed", Figure::Missed, Unit::Count),
    ("missed%", Figure::MissedShare, Unit::Share),
    ("late", Figure::Late, Unit::Count),
    ("late%", Figure::LateShare, Unit::Share),
    ("wrong_bytes", Figure::WrongBytes, Unit::Count),
    ("reads_per_second", Figure::ReadsPerSecond, Unit::PerSecond),
    ("requests_per_second", Figure::RequestsPerSecond, Unit::PerSecond),
    (
        "megabytes_per_second",
        Figure::MegabytesPerSecond,
        Unit::PerSecond,
    ),
    ("cpu_us_per_read", Figure::CpuPerRead, Unit::Microseconds),
    (
        "server_cpu_us_per_read",
        Figure::ServerCpuPerRead,
        Unit::Microseconds,
    ),
];

const ALLOWED: &str = "p50, p99, p99.9, ..., min, mean, max (durations), errors, missed, late (numbers or %), \
                       wrong_bytes, reads_per_second, requests_per_second, megabytes_per_second, cpu_us_per_read, \
                       server_cpu_us_per_read";

/// What a run measures besides its requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measured {
    /// Arrivals at a rate.
    pub(crate) arrivals: bool,
    pub(crate) server_cpu: bool,
    /// The bytes of responses, against the data's pattern.
    pub(crate) bytes: bool,
}

impl Requirement {
    /// A figure, `<`, `<=`, `>` or `>=`, and a value.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let at = text
            .find(['<', '>'])
            .ok_or_else(|| "use FIGURE<VALUE, with <, <=, > or >=: p99<5ms, errors<0.1%".to_owned())?;
        let (name, rest) = text.split_at(at);
        let relations = ["<=", ">=", "<", ">"].into_iter();
        let found = relations
            .filter_map(|relation| Some((relation, rest.strip_prefix(relation)?)))
            .next();
        let (relation, value) = found.ok_or_else(|| "use <, <=, > or >=".to_owned())?;
        let (figure, unit, value) = parse_figure(name.trim(), value.trim())?;
        let text = text.to_owned();
        Ok(Self {
            text,
            figure,
            unit,
            relation,
            value,
        })
    }

    /// The same; `p99=5ms` means at most that. Not of figures for which a search has its own rules.
    pub(crate) fn parse_objective(text: &str) -> Result<Self, String> {
        let requirement = match text.split_once('=') {
            Some((name, value)) if !name.ends_with(['<', '>']) => {
                let mut requirement = Self::parse(&format!("{name}<={value}"))?;
                text.clone_into(&mut requirement.text);
                requirement
            }
            _ => Self::parse(text)?,
        };
        let is_ruled = matches!(
            requirement.figure,
            Figure::Missed | Figure::MissedShare | Figure::WrongBytes
        );
        if is_ruled || requirement.is_of_errors() {
            let rule = "no rate holds with an error, a wrong byte, or more than 0.1 % of its arrivals missed";
            return Err(format!(
                "{rule}: leave this out, and name what else is to hold: p99=5ms"
            ));
        }
        Ok(requirement)
    }

    /// As written by the user.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether it is a condition on errors.
    pub(crate) fn is_of_errors(&self) -> bool {
        matches!(self.figure, Figure::Errors | Figure::ErrorShare)
    }

    /// The flags without which no run has its figure; `None`: it needs none that is missing.
    fn missing_flags(&self, measured: Measured) -> Option<&'static str> {
        match self.figure {
            Figure::Missed | Figure::MissedShare | Figure::Late | Figure::LateShare => {
                (!measured.arrivals).then_some("--rate or --ramp")
            }
            Figure::ServerCpuPerRead => (!measured.server_cpu).then_some("--http or --server-pid"),
            Figure::WrongBytes => (!measured.bytes).then_some("--verify"),
            Figure::Percentile(_)
            | Figure::LatencyMin
            | Figure::LatencyMean
            | Figure::LatencyMax
            | Figure::Errors
            | Figure::ErrorShare
            | Figure::ReadsPerSecond
            | Figure::RequestsPerSecond
            | Figure::MegabytesPerSecond
            | Figure::CpuPerRead => None,
        }
    }

    /// Why a result does not meet it; `None`: it does.
    pub(crate) fn unmet(&self, result: impl Fn(Figure) -> Option<f64>) -> Option<String> {
        let Some(got) = result(self.figure) else {
            return Some(format!("{}: this run has no such figure", self.text));
        };
        let met = match self.relation {
            "<" => got < self.value,
            "<=" => got <= self.value,
            ">" => got > self.value,
            _ => got >= self.value,
        };
        (!met).then(|| format!("{}: it is {}", self.text, self.unit.show(got)))
    }
}

/// A figure by its name, and its value in its unit.
fn parse_figure(name: &str, value: &str) -> Result<(Figure, Unit, f64), String> {
    let number = |text: &str| text.parse::<f64>().ok().filter(|number| number.is_finite());
    let named = |name: &str| FIGURES.into_iter().find(|(known, ..)| *known == name);
    let percentile = || {
        let percentile = number(name.strip_prefix('p')?)?;
        let known = 0.0 < percentile && percentile <= 100.0;
        known.then_some((name, Figure::Percentile(percentile), Unit::Nanoseconds))
    };
    let plain = named(name).filter(|_| !name.ends_with('%')).or_else(percentile);
    let plain = plain.ok_or_else(|| format!("{name:?} is not a figure; use {ALLOWED}"))?;
    let share = named(&format!("{name}%"));
    let (what, (_, figure, unit), parsed) = match (plain, share, value.strip_suffix('%')) {
        (_, Some(share), Some(percent)) => {
            let fraction = number(percent.trim()).map(|percent| percent / 100.0);
            ("number or percentage", share, fraction)
        }
        ((.., Unit::Nanoseconds), ..) => {
            let duration = parse_duration(value).ok();
            let nanoseconds = duration.map(|duration| duration.as_secs_f64() * 1e9);
            ("duration like 500us, 5ms or 1s", plain, nanoseconds)
        }
        (_, Some(_), None) => ("number or percentage", plain, number(value)),
        (_, None, _) => ("number", plain, number(value)),
    };
    let value = parsed.ok_or_else(|| format!("{value:?} is not a {what}, as {name} takes"))?;
    Ok((figure, unit, value))
}

impl Unit {
    fn show(self, got: f64) -> String {
        match self {
            Self::Nanoseconds if got.is_infinite() => {
                "unknown, and longer than any: arrivals were never sent, or requests timed out".to_owned()
            }
            Self::Nanoseconds => latency(got),
            Self::Count => format!("{got:.0}"),
            Self::Share => format!("{:.4} %", got * 100.0),
            Self::PerSecond => rate(got),
            Self::Microseconds => format!("{got:.2}"),
        }
    }
}

/// Refuses conditions whose figure the run will not have, before it sends anything.
pub(crate) fn check_available<'a>(
    mut requirements: impl Iterator<Item = &'a Requirement>,
    measured: Measured,
) -> Result<(), Failure> {
    let missing = requirements.find_map(|requirement| {
        let flags = requirement.missing_flags(measured)?;
        Some(format!("{}: this figure needs {flags}", requirement.text))
    });
    missing.map_or(Ok(()), |problem| Err(Failure::Usage(problem)))
}

/// Fails, with its own exit code, if the result does not meet the conditions.
pub(crate) fn check(
    requirements: &[Requirement],
    result: impl Fn(Figure) -> Option<f64>,
) -> Result<(), Failure> {
    let unmet = requirements
        .iter()
        .filter_map(|requirement| requirement.unmet(&result));
    let unmet: Vec<String> = unmet.collect();
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
        let right = "p99<5ms|p99.9 <= 1s|p50>1us|min>=0s|mean<1ms|max<10s|errors<1|errors<0.1%|missed<1%|late<5|\
                     wrong_bytes<=0|reads_per_second>80000|requests_per_second>1e3|megabytes_per_second>10|\
                     cpu_us_per_read<2.5|server_cpu_us_per_read<4";
        for right in right.split('|') {
            assert!(Requirement::parse(right).is_ok(), "{right}");
        }
        let wrong = "|p99|p99=5ms|p99<5|p101<5ms|p0<1s|px<1s|errors<x|errors<x%|errors%<1|reads>1|\
                     reads_per_second>NaN|reads_per_second>5%|<5|p99<|p99<>5ms";
        for wrong in wrong.split('|') {
            assert!(Requirement::parse(wrong).is_err(), "{wrong}");
        }
        assert!(Requirement::parse_objective("p99=5ms").is_ok());
        assert!(Requirement::parse_objective("p99<=5ms").is_ok());
        assert!(Requirement::parse_objective("p99").is_err());
        for ruled in ["errors<1%", "errors=0", "missed=5%", "missed<10", "wrong_bytes<1"] {
            let refused = Requirement::parse_objective(ruled).unwrap_err();
            assert!(refused.contains("leave this out"), "{ruled}: {refused}");
        }
    }
}
