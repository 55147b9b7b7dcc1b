//! The Range header (RFC 9110 14): resolves it with a length to extents, in the requested order.
//!
//! A malformed header, or one with another unit, is ignored, as the RFC requires. A valid one that would be
//! expensive (too many or overlapping ranges: RFC 9110 17.15) is refused rather than ignored: the whole
//! resource may be hundreds of gigabytes.

use ringfetch_engine::geometry::Extent;

/// What to do about a Range header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ranges {
    /// Ignore it: send the whole resource.
    Ignored,
    /// Send these, each of at least one byte and inside the length; at least one.
    Send(Vec<Extent>),
    /// Every range is past the end.
    Unsatisfiable,
    /// Too expensive; the reason and the remedy in one line.
    Refused(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RangeSpec {
    /// `first-last`, or `first-`.
    From { first: u64, last: Option<u64> },
    /// `-length`.
    Last { length: u64 },
}

/// Resolves a Range header against a representation of `length` bytes.
///
/// Positions beyond 64 bits saturate, and so are past any end.
pub(super) fn resolve(value: &[u8], length: u64, ranges_max: u32) -> Ranges {
    let Some(specs) = parse(value) else {
        return Ranges::Ignored;
    };
    if specs.len() > usize::try_from(ranges_max).unwrap_or(usize::MAX) {
        return Ranges::Refused(format!(
            "{} ranges; the limit is {ranges_max} (limits.http_ranges): send several requests, or POST \
             ranges:batchFetch, for objects objects:batchFetch",
            specs.len()
        ));
    }
    if length == 0
        && specs
            .iter()
            .any(|spec| matches!(spec, RangeSpec::Last { length: 1.. }))
    {
        // Satisfiable (RFC 9110 14.1.2), but Content-Range cannot describe an empty part: send the whole
        // resource.
        return Ranges::Ignored;
    }
    let extents: Vec<Extent> = specs.into_iter().filter_map(|spec| place(spec, length)).collect();
    if extents.is_empty() {
        return Ranges::Unsatisfiable;
    }
    match overlapping(&extents) {
        0..=2 if sum(&extents) <= u128::from(length) => Ranges::Send(extents),
        0..=2 => {
            Ranges::Refused("the ranges together are longer than the resource: request each byte once".into())
        }
        count => Ranges::Refused(format!(
            "{count} of the ranges overlap others: request each byte once"
        )),
    }
}

pub(super) fn content_range(extent: Extent, length: u64) -> String {
    // bytes=0-499 of 1234 bytes: "bytes 0-499/1234", both ends included.
    let last = extent.offset.saturating_add(extent.length).saturating_sub(1);
    format!("bytes {}-{last}/{length}", extent.offset)
}

/// The ranges of `bytes=...`; `None` if it is malformed or in another unit.
fn parse(value: &[u8]) -> Option<Vec<RangeSpec>> {
    let value = std::str::from_utf8(value).ok()?;
    let (unit, set) = value.split_once('=')?;
    if !unit.trim_matches(BLANK).eq_ignore_ascii_case("bytes") {
        return None;
    }
    // RFC 9110 5.6.1: recipients accept empty list elements and blanks.
    let elements = set
        .split(',')
        .map(|element| element.trim_matches(BLANK))
        .filter(|element| !element.is_empty());
    let specs: Vec<RangeSpec> = elements.map(parse_spec).collect::<Option<_>>()?;
    (!specs.is_empty()).then_some(specs)
}

const BLANK: [char; 2] = [' ', '\t'];

fn parse_spec(element: &str) -> Option<RangeSpec> {
    let (first, last) = element.split_once('-')?;
    match (first.is_empty(), last.is_empty()) {
        (true, true) => None,
        (true, false) => Some(RangeSpec::Last {
            length: number(last)?,
        }),
        (false, true) => Some(RangeSpec::From {
            first: number(first)?,
            last: None,
        }),
        (false, false) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(RangeSpec::From {
                first,
                last: Some(last),
            })
        }
    }
}

/// Digits only (no sign, no blank), saturating.
fn number(digits: &str) -> Option<u64> {
    digits.bytes().try_fold(0_u64, |value, byte| {
        byte.is_ascii_digit()
            .then(|| value.saturating_mul(10).saturating_add(u64::from(byte - b'0')))
    })
}

/// The extent of a range in `length` bytes; `None` if it is past the end.
fn place(spec: RangeSpec, length: u64) -> Option<Extent> {
    match spec {
        // 90-199 of 100 bytes: offset 90, end min(200, 100), so 10 bytes.
        RangeSpec::From { first, last } if first < length => {
            let end = last.map_or(length, |last| last.saturating_add(1).min(length));
            Some(Extent {
                offset: first,
                length: end - first,
            })
        }
        RangeSpec::From { .. } => None,
        // -30 of 100 bytes: offset 70. -300 of 100 bytes: all of it.
        RangeSpec::Last { length: asked } => {
            let taken = asked.min(length);
            (taken > 0).then(|| Extent {
                offset: length - taken,
                length: taken,
            })
        }
    }
}

/// How many of the extents overlap another.
fn overlapping(extents: &[Extent]) -> usize {
    let mut sorted: Vec<Extent> = extents.to_vec();
    sorted.sort_unstable();
    let mut count = 0;
    // End of all previous extents, and whether the one that ends there is already counted.
    let mut reach = 0;
    let mut counted = true;
    for extent in sorted {
        let end = extent.offset + extent.length;
        if extent.offset < reach {
            count += if counted { 1 } else { 2 };
            counted = true;
            reach = reach.max(end);
        } else {
            counted = false;
            reach = end;
        }
    }
    count
}

fn sum(extents: &[Extent]) -> u128 {
    extents.iter().map(|extent| u128::from(extent.length)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn send(extents: &[(u64, u64)]) -> Ranges {
        Ranges::Send(
            extents
                .iter()
                .map(|&(offset, length)| Extent { offset, length })
                .collect(),
        )
    }

    #[test]
    fn well_formed_ranges_are_placed() {
        // Every form in RFC 9110 14.1.2, against 10 000 bytes: clamped to the end, in the requested order.
        for (value, expected) in [
            ("bytes=0-499", send(&[(0, 500)])),
            ("bytes=500-999", send(&[(500, 500)])),
            ("bytes=-500", send(&[(9500, 500)])),
            ("bytes=9500-", send(&[(9500, 500)])),
            ("bytes=0-0,-1", send(&[(0, 1), (9999, 1)])),
            (
                "bytes= 0-999, 4500-5499, -1000",
                send(&[(0, 1000), (4500, 1000), (9000, 1000)]),
            ),
            ("bytes=500-600,0-99", send(&[(500, 101), (0, 100)])),
            ("bytes=9999-20000", send(&[(9999, 1)])),
            ("bytes=-20000", send(&[(0, 10_000)])),
            ("bytes=0-99999999999999999999999", send(&[(0, 10_000)])),
            ("BYTES=0-0", send(&[(0, 1)])),
            ("bytes=,0-0,,\t1-1,", send(&[(0, 1), (1, 1)])),
            ("bytes=0-0,20000-", send(&[(0, 1)])),
            ("bytes=007-008", send(&[(7, 2)])),
        ] {
            assert_eq!(resolve(value.as_bytes(), 10_000, 16), expected, "{value}");
        }
    }

    #[test]
    fn malformed_and_foreign_headers_are_ignored() {
        // Mistakes of every kind: the whole resource is sent, as if there were no header.
        for value in [
            "",
            "bytes",
            "bytes=",
            "bytes=,",
            "bytes=-",
            "bytes=a-b",
            "bytes=5-2",
            "bytes=0-1,5-2",
            "bytes=0-1;2-3",
            "bytes=+1-2",
            "bytes=1 -2",
            "bytes=1- 2",
            "bytes=--1",
            "bytes=1-2-3",
            "items=0-1",
            "bytes:0-1",
            "0-1",
            "bytes=0x1-2",
            "bytes=\u{663}-4",
        ] {
            assert_eq!(resolve(value.as_bytes(), 10_000, 16), Ranges::Ignored, "{value}");
        }
        assert_eq!(resolve(b"bytes=\xff-1", 10_000, 16), Ranges::Ignored);
    }

    #[test]
    fn ranges_past_the_end_are_unsatisfiable() {
        // None of the requested bytes exist: 416, also for a suffix of no bytes and for positions beyond 64
        // bits.
        for value in [
            "bytes=100-",
            "bytes=100-200",
            "bytes=-0",
            "bytes=18446744073709551616-",
            "bytes=100-,200-",
        ] {
            assert_eq!(
                resolve(value.as_bytes(), 100, 16),
                Ranges::Unsatisfiable,
                "{value}"
            );
        }
    }

    #[test]
    fn an_empty_representation_has_no_ranges() {
        // No bytes at all: a range is unsatisfiable, a suffix means the (empty) whole.
        assert_eq!(resolve(b"bytes=0-", 0, 16), Ranges::Unsatisfiable);
        assert_eq!(resolve(b"bytes=0-0", 0, 16), Ranges::Unsatisfiable);
        assert_eq!(resolve(b"bytes=-0", 0, 16), Ranges::Unsatisfiable);
        assert_eq!(resolve(b"bytes=-5", 0, 16), Ranges::Ignored);
    }

    #[test]
    fn the_whole_of_64_bits_can_be_asked_for() {
        // The longest possible representation: ends do not overflow.
        assert_eq!(resolve(b"bytes=0-", u64::MAX, 16), send(&[(0, u64::MAX)]));
        let last = format!("bytes={}-{}", u64::MAX - 1, u64::MAX);
        assert_eq!(resolve(last.as_bytes(), u64::MAX, 16), send(&[(u64::MAX - 1, 1)]));
    }

    #[test]
    fn expensive_headers_are_refused() {
        // Too many ranges, three that overlap, two that together exceed the length: refused, and the reason
        // names the limit.
        let Ranges::Refused(many) = resolve(b"bytes=0-0,2-2,4-4", 100, 2) else {
            panic!("three ranges of two")
        };
        for part in [
            "limits.http_ranges",
            "POST ranges:batchFetch, for objects objects:batchFetch",
        ] {
            assert!(many.contains(part), "{many}");
        }
        assert!(matches!(
            resolve(b"bytes=0-9,5-14,10-19", 100, 16),
            Ranges::Refused(_)
        ));
        assert!(matches!(resolve(b"bytes=0-,0-", 100, 16), Ranges::Refused(_)));
        assert_eq!(resolve(b"bytes=0-9,5-14", 100, 16), send(&[(0, 10), (5, 10)]));
    }

    /// The bytes of a range, found by checking each position.
    fn model(spec: RangeSpec, length: u64) -> Vec<u64> {
        (0..length)
            .filter(|&byte| match spec {
                RangeSpec::From { first, last } => byte >= first && last.is_none_or(|last| byte <= last),
                RangeSpec::Last { length: asked } => length - byte <= asked,
            })
            .collect()
    }

    fn spec() -> impl Strategy<Value = RangeSpec> {
        prop_oneof![
            (0..80_u64, 0..40_u64).prop_map(|(first, more)| RangeSpec::From {
                first,
                last: Some(first + more)
            }),
            (0..80_u64).prop_map(|first| RangeSpec::From { first, last: None }),
            (0..80_u64).prop_map(|length| RangeSpec::Last { length }),
        ]
    }

    fn text(spec: &RangeSpec) -> String {
        match spec {
            RangeSpec::From {
                first,
                last: Some(last),
            } => format!("{first}-{last}"),
            RangeSpec::From { first, last: None } => format!("{first}-"),
            RangeSpec::Last { length } => format!("-{length}"),
        }
    }

    proptest! {
        #[test]
        fn placing_agrees_with_looking_at_every_byte(specs in prop::collection::vec(spec(), 1..6), length in 0..64_u64) {
            // Any well-formed header: exactly the bytes that each range names are sent, and refusals are
            // justified.
            let value = format!("bytes={}", specs.iter().map(text).collect::<Vec<_>>().join(","));
            let expected: Vec<Vec<u64>> =
                specs.iter().map(|&spec| model(spec, length)).filter(|bytes| !bytes.is_empty()).collect();
            let overlaps = expected.iter().enumerate().filter(|(i, bytes)| {
                expected.iter().enumerate().any(|(j, other)| *i != j && bytes.iter().any(|byte| other.contains(byte)))
            }).count();
            let total: usize = expected.iter().map(Vec::len).sum();
            match resolve(value.as_bytes(), length, 16) {
                Ranges::Send(extents) => {
                    let sent: Vec<Vec<u64>> =
                        extents.iter().map(|e| (e.offset..e.offset + e.length).collect()).collect();
                    prop_assert_eq!(sent, expected);
                    prop_assert!(overlaps <= 2);
                }
                Ranges::Unsatisfiable => prop_assert!(expected.is_empty()),
                Ranges::Ignored => prop_assert!(length == 0),
                Ranges::Refused(_) => prop_assert!(overlaps > 2 || total as u64 > length),
            }
        }

        #[test]
        fn no_header_panics(value in prop::collection::vec(any::<u8>(), 0..64), length: u64) {
            // Any bytes at all: there is a result, and everything sent lies within the length.
            if let Ranges::Send(extents) = resolve(&value, length, 16) {
                for extent in extents {
                    prop_assert!(extent.length >= 1 && extent.offset.checked_add(extent.length).unwrap() <= length);
                }
            }
        }
    }
}
