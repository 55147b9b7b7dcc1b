//! A trace file: one item per line, in reading order. Every problem names its line. Empty lines and lines
//! that begin with # are skipped. A trace has no times: the pacer decides when.

/// 16 bytes each: 256 MB.
const ENTRIES_MAX: usize = 1 << 24;

/// What the numbers in a trace mean, and their bounds.
#[derive(Debug, Clone, Copy)]
pub struct TraceShape {
    /// A single number is the index of one of this many items, unless `range_bytes` is set.
    pub items: u64,
    /// Single numbers are byte offsets of ranges of this length.
    pub range_bytes: Option<u64>,
    /// End of `OFFSET LENGTH` ranges; `None` if there is no common address space.
    pub length_bytes: Option<u64>,
}

/// The entries of a trace.
#[derive(Debug, PartialEq, Eq)]
pub enum TraceEntries {
    /// Indices of items.
    Items(Vec<u64>),
    /// Offset and length of each range.
    Ranges(Vec<(u64, u64)>),
}

/// Reads a trace.
///
/// # Errors
/// The problem, with its line number.
pub fn parse(text: &str, meaning: TraceShape) -> Result<TraceEntries, String> {
    let (mut items, mut ranges) = (Vec::new(), Vec::new());
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let problem = |problem: String| Err(format!("line {number}: {problem}"));
        let mut words = line.split([' ', '\t', ',']).filter(|word| !word.is_empty());
        let mut number = || words.next().map(str::parse::<u64>);
        let (first, length) = match (number(), number(), number()) {
            (Some(Ok(first)), None, None) => (first, meaning.range_bytes),
            (Some(Ok(offset)), Some(Ok(length)), None) => (offset, Some(length)),
            _ => return problem(format!("{line:?} is neither one number nor OFFSET LENGTH")),
        };
        match length {
            None if first >= meaning.items => {
                return problem(format!("{first} is past the last item, {}", meaning.items - 1));
            }
            None => items.push(first),
            Some(length) => {
                let Some(end) = meaning.length_bytes else {
                    return problem("objects have no common address space: use their numbers".to_owned());
                };
                if length == 0 || first.checked_add(length).is_none_or(|last| last > end) {
                    return problem(format!(
                        "{length} bytes from {first} are none, or past the end at {end}"
                    ));
                }
                ranges.push((first, length));
            }
        }
        if !items.is_empty() && !ranges.is_empty() {
            return problem("some lines have a length and some have none".to_owned());
        }
        if items.len().max(ranges.len()) > ENTRIES_MAX {
            return problem(format!("there are more than {ENTRIES_MAX}: cut the trace"));
        }
    }
    match (items.is_empty(), ranges.is_empty()) {
        (true, true) => Err("nothing is listed in it".to_owned()),
        (false, _) => Ok(TraceEntries::Items(items)),
        (true, false) => Ok(TraceEntries::Ranges(ranges)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: TraceShape = TraceShape {
        items: 10,
        range_bytes: None,
        length_bytes: Some(5120),
    };

    #[test]
    fn a_trace_lists_items_or_ranges() {
        let items = |text| parse(text, BLOCKS).unwrap();
        assert_eq!(
            items("# a trace\n3\n\n 9 \r\n0\n"),
            TraceEntries::Items(vec![3, 9, 0])
        );
        assert_eq!(
            items("5119 1\n7,100\n"),
            TraceEntries::Ranges(vec![(5119, 1), (7, 100)])
        );
        // Offsets with --range-bytes.
        let (range_bytes, ranges) = (Some(512), vec![(0, 512), (4608, 512)]);
        assert_eq!(
            parse(
                "0\n4608\n",
                TraceShape {
                    range_bytes,
                    ..BLOCKS
                }
            ),
            Ok(TraceEntries::Ranges(ranges))
        );
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, line) in [
            ("1\nx\n", "line 2: "),
            ("-1", "line 1: "),
            ("1 2 3", "line 1: "),
            ("\n\n10", "line 3: "),
            ("5119 2", "line 1: "),
            ("0 0", "line 1: "),
            ("18446744073709551615 1", "line 1: "),
            ("1\n1 1", "line 2: "),
            ("# nothing\n", "nothing is listed"),
        ] {
            let problem = parse(text, BLOCKS).unwrap_err();
            assert!(problem.starts_with(line), "{text:?}: {problem}");
        }
        let length_bytes = None;
        let problem = parse(
            "1 1",
            TraceShape {
                length_bytes,
                ..BLOCKS
            },
        )
        .unwrap_err();
        assert!(problem.contains("address space"), "{problem}");
    }
}
