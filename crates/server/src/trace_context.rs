//! The trace that a request belongs to, from the client's `traceparent` (W3C Trace Context, level 2).

use http::HeaderMap;

const TRACEPARENT: &str = "traceparent";

/// A trace, and the client's span in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TraceContext {
    pub(crate) trace_id: u128,
    pub(crate) parent_id: u64,
    /// Whether the trace is recorded.
    pub(crate) is_sampled: bool,
}

impl TraceContext {
    /// Parses the header. `None` if it is missing, malformed or repeated: the specification says to ignore
    /// those.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        match (values.next(), values.next()) {
            (Some(value), None) => Self::parse(value.as_bytes()),
            _ => None,
        }
    }

    fn parse(text: &[u8]) -> Option<Self> {
        // version "-" trace-id "-" parent-id "-" flags: 2 + 1 + 32 + 1 + 16 + 1 + 2 bytes.
        let (known, further) = text.split_at_checked(55)?;
        let mut parts = known.split(|byte| *byte == b'-');
        let mut part = |digits: usize| parts.next().filter(|part| part.len() == digits).and_then(hex);
        let (version, trace_id, parent_id, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        // Later versions may have more fields; version 255 is forbidden.
        let is_whole = match version {
            0 => further.is_empty(),
            255 => false,
            _ => matches!(further.first(), None | Some(b'-')),
        };
        let parent_id = u64::try_from(parent_id).ok()?;
        (is_whole && trace_id != 0 && parent_id != 0).then_some(Self {
            trace_id,
            parent_id,
            is_sampled: flags & 1 == 1,
        })
    }
}

/// Lower-case hexadecimal digits, at most 32.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |value, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn of(values: &[&str]) -> Option<TraceContext> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TRACEPARENT, HeaderValue::from_str(value).unwrap());
        }
        TraceContext::of(&headers)
    }

    #[test]
    fn a_trace_is_taken_from_a_well_formed_header() {
        // Scenario: the specification's example, sampled and not, and a later version with and without more fields.
        // Expectation: its ids.
        let expected = TraceContext {
            trace_id: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736,
            parent_id: 0x00f0_67aa_0ba9_02b7,
            is_sampled: true,
        };
        let later = EXAMPLE.replacen("00", "cc", 1);
        for good in [EXAMPLE, &later, &format!("{later}-more")] {
            assert_eq!(of(&[good]), Some(expected), "{good}");
        }
        let unsampled = EXAMPLE.replace("-01", "-02");
        assert_eq!(of(&[&unsampled]).map(|trace| trace.is_sampled), Some(false));
    }

    #[test]
    fn what_is_malformed_is_ignored() {
        // Scenario: no header, two, a forbidden version, zeros, capitals, other lengths and separators.
        // Expectation: no trace.
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[EXAMPLE, EXAMPLE]), None);
        for bad in [
            "",
            "00",
            &EXAMPLE.replacen("00", "ff", 1),
            &EXAMPLE.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &EXAMPLE.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &EXAMPLE.to_uppercase(),
            &EXAMPLE.replace("-01", "-1x"),
            &EXAMPLE.replace('-', "_"),
            &EXAMPLE[..54],
            &format!("{EXAMPLE}-more"),
            &format!("{}.", EXAMPLE.replacen("00", "cc", 1)),
            &EXAMPLE.replacen("00-4", "0-04", 1),
        ] {
            assert_eq!(of(&[bad]), None, "{bad}");
        }
    }
}
