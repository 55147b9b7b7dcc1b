//! Byte sizes in human notation, in binary units. Decimal units are refused on purpose: readers disagree on
//! what `16MB` means.

/// The accepted notation, for messages.
pub const ALLOWED: &str = "a whole number of bytes, or one with KiB, MiB, GiB or TiB such as 16MiB";

const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// Reads `16MiB`, `64 KiB`, `4096` or `4096B`.
///
/// # Errors
/// The problem, in words that follow "which".
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim());
    if number.is_empty() {
        return Err("is not a size".to_owned());
    }
    if unit.starts_with('.') {
        return Err("has a fraction".to_owned());
    }
    let shift = match unit {
        "" | "B" => 0,
        _ => UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .map(|(_, shift)| *shift)
            .ok_or_else(|| format!("has an unknown unit, {unit:?}"))?,
    };
    let number = number.parse::<u64>().ok();
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| "does not fit 64 bits".to_owned())
}

/// A size in the largest unit that keeps it exact: `4KiB`, `10GiB`, `4097`.
pub fn exact(bytes: u64) -> String {
    let unit = UNITS
        .iter()
        .find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    unit.map_or_else(
        || bytes.to_string(),
        |(unit, shift)| format!("{}{unit}", bytes >> shift),
    )
}

/// A size rounded for people: `512 B`, `1.5 GiB`.
#[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
pub fn rounded(bytes: u64) -> String {
    let unit = UNITS.iter().find(|(_, shift)| bytes >> shift > 0);
    unit.map_or_else(
        || format!("{bytes} B"),
        |(unit, shift)| format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written_back() {
        // Scenario: every unit, spaces, no unit. Expectation: the bytes; and exact() gives a text that parses to them.
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
            assert_eq!(parse(&exact(bytes)), Ok(bytes), "{text}");
        }
        let exactly = [0, 1000, 4096, 4097, 16 << 20].map(exact);
        assert_eq!(exactly, ["0", "1000", "4KiB", "4097", "16MiB"]);
        let about = [0, 1023, 1536, 10 << 30].map(rounded);
        assert_eq!(about, ["0 B", "1023 B", "1.5 KiB", "10.0 GiB"]);
    }

    #[test]
    fn other_sizes_are_refused() {
        // Scenario: decimal units, wrong case, fractions, signs, overflow. Expectation: an error, never a guess.
        let wrong = [
            "16MB",
            "16mib",
            "16M",
            "1k",
            "1.5GiB",
            "-1",
            "",
            "KiB",
            "1GiBGiB",
            "1_000",
            "99999999999TiB",
            "18446744073709551616",
        ];
        for text in wrong {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
