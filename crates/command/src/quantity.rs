//! Sizes, durations and numbers in human notation.

use std::time::Duration;

pub use crate::size::{exact as exact_size, rounded as size};

/// `4096`, `64KiB`, `10GiB`.
///
/// # Errors
/// What is wrong, with examples.
pub fn parse_size(text: &str) -> Result<u64, String> {
    crate::size::parse(text)
        .map_err(|problem| format!("{problem}; use bytes or a binary unit: 4096, 64KiB, 16MiB, 10GiB, 1TiB"))
}

/// `500ms`, `10s`, `2m`.
///
/// # Errors
/// What is wrong, with examples.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; use 500ms, 10s, 2m"))
}

/// A number in groups of three digits: `1 234 567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

/// A rate, rounded, in groups of three digits; one decimal below ten.
pub fn rate(per_second: f64) -> String {
    if per_second < 10.0 {
        return format!("{per_second:.1}");
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a positive number, for display"
    )]
    let rounded = per_second.round() as u64;
    grouped(rounded)
}

/// A latency for people, three digits: `875 us`, `1.23 ms`, `12.3 s`.
pub fn latency(nanoseconds: f64) -> String {
    let (value, unit) = match nanoseconds {
        n if n < 999_500.0 => (n / 1e3, "us"),
        n if n < 999_500_000.0 => (n / 1e6, "ms"),
        n => (n / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// A number below a thousand, rounded: `1.23`, `12.3`, `875`.
pub fn three_digits(value: f64) -> String {
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$}")
}

/// A count as a float, for ratios and display.
#[expect(clippy::cast_precision_loss, reason = "53 bits are enough for a ratio")]
pub fn approximate(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_written_for_people() {
        // Scenario: numbers around every boundary. Expected: human notation.
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(grouped),
            ["0", "999", "1 000", "1 234 567"]
        );
        assert_eq!(
            [0.0, 9.94, 10.4, 91_234.5].map(rate),
            ["0.0", "9.9", "10", "91 235"]
        );
        let latencies = [640.0, 999_499.0, 1_234_567.0, 21_400_000.0, 412_000_000.0, 1.5e9];
        assert_eq!(
            latencies.map(latency),
            ["0.64 us", "999 us", "1.23 ms", "21.4 ms", "412 ms", "1.50 s"]
        );
    }
}
