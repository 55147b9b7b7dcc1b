//! A trace file: one item per line, in reading order. Every problem names its line. Empty lines and lines
//! that begin with # are skipped. A trace has no times: the pacer decides when.

use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;

/// 16 bytes each: 256 MB.
const ENTRIES_MAX: usize = 1 << 24;
/// The longest lines are comments.
const LINE_BYTES_MAX: u64 = 4096;
/// 16 million lines of 40 characters fit well.
const BYTES_MAX: u64 = 1 << 30;

/// What the numbers in a trace mean, and their bounds.
#[derive(Debug, Clone, Copy)]
pub struct TraceShape {
    /// A single number is the index of one of this many items, unless `range_bytes` is set.
    pub items: u64,
    /// Single numbers are byte offsets of ranges of this length.
    pub range_bytes: Option<u64>,
    /// End of `OFFSET LENGTH` ranges; `None` if there is no common address space.
    pub length_bytes: Option<u64>,
    /// Whether there may be more objects than these, the first in the order of names.
    pub is_cut: bool,
}

/// The entries of a trace.
#[derive(Debug, PartialEq, Eq)]
pub enum TraceEntries {
    /// Indices of items.
    Items(Vec<u64>),
    /// Offset and length of each range.
    Ranges(Vec<(u64, u64)>),
}

/// Reads a trace from a file.
///
/// # Errors
/// errno, or the problem with its line number.
pub fn read(path: &Path, meaning: TraceShape) -> Result<TraceEntries, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    parse(BufReader::new(file), meaning)
}

/// Reads a trace, line by line: neither a file without an end nor a line without one takes memory.
fn parse(mut text: impl BufRead, meaning: TraceShape) -> Result<TraceEntries, String> {
    let (mut items, mut ranges) = (Vec::new(), Vec::new());
    let (mut line, mut bytes) = (Vec::new(), 0);
    for number in 1_u64.. {
        let problem = |problem: String| Err(format!("line {number}: {problem}"));
        line.clear();
        let read = text
            .by_ref()
            .take(LINE_BYTES_MAX + 1)
            .read_until(b'\n', &mut line);
        match read {
            Ok(0) => break,
            Ok(_) if line.len() as u64 > LINE_BYTES_MAX => {
                return problem(format!("it has more than {LINE_BYTES_MAX} bytes, the limit"));
            }
            Ok(_) => bytes += line.len() as u64,
            Err(error) => return Err(error.to_string()),
        }
        if bytes > BYTES_MAX {
            return problem(format!(
                "there are more than {BYTES_MAX} bytes up to here: cut the trace"
            ));
        }
        let Ok(line) = std::str::from_utf8(&line).map(str::trim) else {
            return problem("it is not UTF-8".to_owned());
        };
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.split([' ', '\t', ',']).filter(|word| !word.is_empty());
        let mut number = || words.next().map(str::parse::<u64>);
        let (first, length) = match (number(), number(), number()) {
            (Some(Ok(first)), None, None) => (first, meaning.range_bytes),
            (Some(Ok(offset)), Some(Ok(length)), None) => (offset, Some(length)),
            _ => return problem(format!("{line:?} is neither one number nor OFFSET LENGTH")),
        };
        match length {
            None if first >= meaning.items && meaning.is_cut => {
                let items = meaning.items;
                return problem(format!(
                    "{first} is not read: of objects, only the first {items} in the order of names are"
                ));
            }
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
        is_cut: false,
    };

    #[test]
    fn a_trace_lists_items_or_ranges() {
        let items = |text: &str| parse(text.as_bytes(), BLOCKS).unwrap();
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
                &b"0\n4608\n"[..],
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
            let problem = parse(text.as_bytes(), BLOCKS).unwrap_err();
            assert!(problem.starts_with(line), "{text:?}: {problem}");
        }
        // A line without an end, as /dev/zero is.
        let endless = std::io::repeat(0).take(u64::MAX);
        let problem = parse(BufReader::new(endless), BLOCKS).unwrap_err();
        assert_eq!(problem, "line 1: it has more than 4096 bytes, the limit");
        let length_bytes = None;
        let problem = parse(
            &b"1 1"[..],
            TraceShape {
                length_bytes,
                ..BLOCKS
            },
        )
        .unwrap_err();
        assert!(problem.contains("address space"), "{problem}");
        // It may be there.
        let is_cut = true;
        let problem = parse(&b"9\n10\n"[..], TraceShape { is_cut, ..BLOCKS }).unwrap_err();
        assert_eq!(
            problem,
            "line 2: 10 is not read: of objects, only the first 10 in the order of names are"
        );
    }
}
