//! Byte sizes as people write them: a plain integer, or an integer with a binary unit.
//!
//! Decimal units are refused on purpose: `16MB` means two different sizes to two readers.

/// What is allowed, for messages.
pub(super) const ALLOWED: &str = "a whole number of bytes, or one with KiB, MiB, GiB or TiB such as 16MiB";

const UNITS: [(&str, u64); 4] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Reads `16MiB`, `64 KiB`, `4096` or `4096B`.
///
/// # Errors
/// What is wrong, as the middle of a sentence.
pub(super) fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim());
    if number.is_empty() {
        return Err(format!("is {text:?}, which is not a size"));
    }
    let number: u64 = number
        .parse()
        .map_err(|_| format!("is {text:?}, which does not fit 64 bits"))?;
    if unit.starts_with('.') {
        return Err(format!("is {text:?}, which has a fraction"));
    }
    if unit.is_empty() || unit == "B" {
        return Ok(number);
    }
    let Some((_, factor)) = UNITS.iter().find(|(name, _)| *name == unit) else {
        return Err(format!("is {text:?}, and {unit:?} is not a unit here"));
    };
    number
        .checked_mul(*factor)
        .ok_or_else(|| format!("is {text:?}, which does not fit 64 bits"))
}

/// Writes a size with the largest unit that divides it.
pub(super) fn format(bytes: u64) -> String {
    let unit = UNITS
        .iter()
        .rev()
        .find(|(_, factor)| bytes != 0 && bytes.is_multiple_of(*factor));
    unit.map_or_else(
        || bytes.to_string(),
        |(name, factor)| format!("{}{name}", bytes / factor),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written_back() {
        // Scenario: every unit, spaces, no unit. Expectation: the bytes; and format() gives a text that parses to them.
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("64KiB", 65_536),
            (" 64 KiB ", 65_536),
            ("1536MiB", 1536 << 20),
            ("4GiB", 4 << 30),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
            assert_eq!(parse(&format(bytes)), Ok(bytes), "{text}");
        }
        assert_eq!(format(16 << 20), "16MiB");
        assert_eq!(format(1000), "1000");
    }

    #[test]
    fn other_sizes_are_refused() {
        // Scenario: decimal units, wrong case, fractions, signs, overflow. Expectation: an error, never a guess.
        for text in [
            "16MB",
            "16mib",
            "16M",
            "1.5GiB",
            "-1",
            "",
            "KiB",
            "1_000",
            "99999999999TiB",
            "18446744073709551616",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
