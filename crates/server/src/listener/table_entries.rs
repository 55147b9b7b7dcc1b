//! Follows a client's header blocks as far as is needed to tell which entries of HPACK's dynamic table (RFC 7541) keep memory that
//! nothing else accounts for.
//!
//! h2 keeps the value of `:path`, `:authority` and `:scheme` in the table as a part of the buffer that it was received in, of 8 KiB or
//! more; others are copied. A table of 4 KiB has up to 110 such entries, each of which may keep a buffer of its own: 0.9 MiB for a
//! connection on which no request is open (measured). The daemon cannot make the table smaller: h2 lets a client that does not
//! care keep 4 KiB.

use std::collections::VecDeque;

use super::client_frames::{BLOCK_SHIFT, PADDED};

/// Bytes of the table (RFC 9113 6.5.2: the daemon announces no other size), and of an entry without its name and value
/// (RFC 7541 4.1).
const TABLE_BYTES: u32 = 4096;
const ENTRY_BYTES: u32 = 32;
/// Entries of the static table (appendix A): `:authority`, `:path`, `:scheme`, and its length.
const AUTHORITY: u32 = 1;
const PATHS_AND_SCHEMES: std::ops::RangeInclusive<u32> = 4..=7;
const STATIC_ENTRIES: u32 = 61;
/// The first byte of a name that begins with a colon, as it is and in Huffman's code, where it has seven bits.
const COLON: u8 = b':';
const HUFFMAN_COLON: u8 = 0xb8;

/// A flag of HEADERS (RFC 9113 6.2), and the bytes of a priority.
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: u8 = 5;

#[derive(Debug, Default)]
pub(super) struct TableEntries {
    /// Bytes of the frame before its part of the block: the length of the padding, if it has any, and a priority.
    before: u8,
    has_padding: bool,
    /// Bytes of the frame's part of the block that are still to come, with those before it.
    left: u32,
    step: Step,
    /// Whether each entry of the dynamic table has one of those names, the newest in the lowest bit. One that did not fit has emptied
    /// the table, so no index leads to it or beyond it.
    names: u128,
    /// Bytes that entries have taken so far, at least. It wraps.
    bytes: u32,
    /// Blocks with such entries that may be in the table, by number, and `bytes` before the last entry of each.
    blocks: VecDeque<(u32, u32)>,
}

/// What comes next in a block.
#[derive(Debug, Default, Clone, Copy)]
enum Step {
    /// A field, or a change of the table's size.
    #[default]
    Field,
    /// The length of a text.
    Length(Text),
    /// The rest of an integer (RFC 7541 5.1).
    Rest { of: Integer, value: u32, shift: u32 },
    /// So many bytes of a text.
    Text {
        text: Text,
        is_huffman: bool,
        is_first: bool,
        left: u32,
    },
}

/// What an integer means.
#[derive(Debug, Clone, Copy)]
enum Integer {
    /// A field of the table, its size, or the name of a field that becomes no entry and has this value.
    Index(Option<Text>),
    /// The index of an entry's name.
    Name,
    Length {
        text: Text,
        is_huffman: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Text {
    is_name: bool,
    /// Of a new entry.
    is_entry: bool,
}

impl Text {
    const fn name(is_entry: bool) -> Self {
        let is_name = true;
        Self { is_name, is_entry }
    }

    const fn value(is_entry: bool) -> Self {
        let is_name = false;
        Self { is_name, is_entry }
    }
}

impl TableEntries {
    /// A frame of this length begins: HEADERS, which begin a block, or CONTINUATION.
    pub(super) fn begin(&mut self, is_headers: bool, flags: u8, length: u32) {
        self.left = length;
        (self.before, self.has_padding) = (0, false);
        if is_headers {
            self.step = Step::Field;
            self.has_padding = flags & PADDED != 0;
            let priority = if flags & PRIORITY == 0 { 0 } else { PRIORITY_BYTES };
            self.before = u8::from(self.has_padding) + priority;
        }
    }

    /// Follows bytes of the frame, which begin after `received` bytes of the connection.
    pub(super) fn follow(&mut self, mut bytes: &[u8], received: u64) {
        while let Some((&byte, rest)) = bytes.split_first() {
            if self.left == 0 {
                return;
            }
            if self.before > 0 {
                self.before -= 1;
                self.left -= 1;
                if std::mem::take(&mut self.has_padding) {
                    self.left = self.left.saturating_sub(byte.into());
                }
                bytes = rest;
                continue;
            }
            let passed = self.step(byte, bytes.len(), received);
            self.left -= u32::try_from(passed).unwrap_or(self.left);
            bytes = bytes.get(passed..).unwrap_or_default();
        }
    }

    /// Blocks that the table keeps.
    pub(super) fn blocks(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap_or(u32::MAX)
    }

    /// Takes the next byte, or all of a text that are there. Returns how many.
    fn step(&mut self, byte: u8, there: usize, received: u64) -> usize {
        self.step = match self.step {
            Step::Field => self.field(byte, received),
            Step::Length(text) => {
                let is_huffman = byte & 0x80 != 0;
                self.integer(Integer::Length { text, is_huffman }, byte, 0x7f, received)
            }
            Step::Rest { of, value, shift } => {
                let value = longer(value, byte, shift);
                if byte & 0x80 == 0 {
                    self.whole(of, value, received)
                } else {
                    let shift = shift + 7;
                    Step::Rest { of, value, shift }
                }
            }
            Step::Text {
                text,
                is_huffman,
                is_first,
                left,
            } => {
                if is_first && text == Text::name(true) {
                    let is_kept = if is_huffman {
                        byte & !1 == HUFFMAN_COLON
                    } else {
                        byte == COLON
                    };
                    self.enter(is_kept, received);
                }
                let passed = left.min(u32::try_from(there).unwrap_or(u32::MAX)).min(self.left);
                self.step = match left - passed {
                    0 => Step::after(text),
                    left => Step::Text {
                        text,
                        is_huffman,
                        is_first: false,
                        left,
                    },
                };
                return passed as usize;
            }
        };
        1
    }

    fn field(&mut self, byte: u8, received: u64) -> Step {
        match byte {
            // Of the table, as it is.
            0x80.. => self.integer(Integer::Index(None), byte, 0x7f, received),
            // Another entry.
            0x40 => Step::Length(Text::name(true)),
            0x41..0x80 => self.integer(Integer::Name, byte, 0x3f, received),
            // The table's size.
            0x20..0x40 => self.integer(Integer::Index(None), byte, 0x1f, received),
            // No entry.
            0x00 | 0x10 => Step::Length(Text::name(false)),
            ..0x20 => self.integer(Integer::Index(Some(Text::value(false))), byte, 0x0f, received),
        }
    }

    /// An integer begins in the lowest bits of its first byte; if all of them are set, more bytes of it come.
    fn integer(&mut self, of: Integer, byte: u8, bits: u8, received: u64) -> Step {
        let value = u32::from(byte & bits);
        if byte & bits == bits {
            Step::Rest { of, value, shift: 0 }
        } else {
            self.whole(of, value, received)
        }
    }

    fn whole(&mut self, of: Integer, value: u32, received: u64) -> Step {
        match of {
            Integer::Index(text) => text.map_or(Step::Field, Step::Length),
            Integer::Name => {
                self.enter(self.is_kept(value), received);
                Step::Length(Text::value(true))
            }
            Integer::Length { text, is_huffman } => self.text(text, is_huffman, value),
        }
    }

    /// Whether an index is that of a name whose value keeps its buffer.
    fn is_kept(&self, name: u32) -> bool {
        match name.checked_sub(STATIC_ENTRIES + 1) {
            None => name == AUTHORITY || PATHS_AND_SCHEMES.contains(&name),
            Some(place) => self.names.checked_shr(place).is_some_and(|names| names & 1 == 1),
        }
    }

    /// An entry begins.
    fn enter(&mut self, is_kept: bool, received: u64) {
        self.names = self.names << 1 | u128::from(is_kept);
        if is_kept {
            #[expect(clippy::cast_possible_truncation, reason = "only equality matters")]
            let block = (received >> BLOCK_SHIFT) as u32;
            match self.blocks.back_mut() {
                Some((last, bytes)) if *last == block => *bytes = self.bytes,
                Some(_) | None => self.blocks.push_back((block, self.bytes)),
            }
        }
        self.takes(ENTRY_BYTES);
    }

    /// A text of this length begins.
    fn text(&mut self, text: Text, is_huffman: bool, length: u32) -> Step {
        if text.is_entry {
            // Huffman's longest code has 30 bits. A name is taken before its entry begins, which keeps that a little longer.
            self.takes(if is_huffman { length / 30 * 8 } else { length });
        }
        if length == 0 {
            return Step::after(text);
        }
        Step::Text {
            text,
            is_huffman,
            is_first: true,
            left: length,
        }
    }

    /// Entries take so many more bytes. What no longer fits with them is not in the table.
    fn takes(&mut self, bytes: u32) {
        self.bytes = self.bytes.wrapping_add(bytes);
        while let Some((_, before)) = self.blocks.front()
            && self.bytes.wrapping_sub(*before) > TABLE_BYTES
        {
            self.blocks.pop_front();
        }
    }
}

/// An integer of HPACK with seven more bits. h2 refuses those of more than 28.
fn longer(value: u32, byte: u8, shift: u32) -> u32 {
    let more = u32::from(byte & 0x7f).checked_shl(shift).unwrap_or(u32::MAX);
    value.saturating_add(more)
}

impl Step {
    fn after(text: Text) -> Self {
        if text.is_name {
            Self::Length(Text::value(text.is_entry))
        } else {
            Self::Field
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks that are kept after these frames, one in each 8 KiB received, in whatever pieces they come.
    fn kept(frames: &[(bool, u8, &[u8])]) -> u32 {
        let outcomes = [1, 2, 3, 7, 1000].map(|piece| {
            let mut entries = TableEntries::default();
            for (number, (is_headers, flags, payload)) in frames.iter().enumerate() {
                entries.begin(*is_headers, *flags, u32::try_from(payload.len()).unwrap());
                for part in payload.chunks(piece) {
                    entries.follow(part, 8192 * number as u64);
                }
            }
            entries.blocks()
        });
        assert!(
            outcomes.iter().all(|outcome| *outcome == outcomes[0]),
            "{outcomes:?}"
        );
        outcomes[0]
    }

    fn kept_of(block: &[u8]) -> u32 {
        kept(&[(true, 0, block)])
    }

    #[test]
    fn only_entries_of_the_parts_of_an_address_count() {
        // The examples of RFC 7541, C.3 and C.4 (Huffman): an :authority, and later cache-control and a name of its own.
        let first = [&[0x82, 0x86, 0x84, 0x41, 0x0f], &b"www.example.com"[..]].concat();
        assert_eq!(kept_of(&first), 1);
        let huffman = [
            0x82, 0x86, 0x84, 0x41, 0x8c, 0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0,
        ];
        assert_eq!(kept_of(&[&huffman[..], &[0xab, 0x90, 0xf4, 0xff]].concat()), 1);
        let second = [&[0x82, 0x86, 0x84, 0xbe, 0x58, 0x08], &b"no-cache"[..]].concat();
        assert_eq!(kept_of(&second), 0);
        let third = [
            &[0x82, 0x87, 0x85, 0xbf, 0x40, 0x0a],
            &b"custom-key"[..],
            &[0x0c],
            b"custom-value",
        ]
        .concat();
        assert_eq!(kept_of(&third), 0);
        // A path: without an entry; never indexed; with one; its name as text, and in Huffman's code; by a name of the dynamic table.
        assert_eq!(kept_of(&[0x04, 1, b'/']), 0);
        assert_eq!(kept_of(&[0x14, 1, b'/']), 0);
        assert_eq!(kept_of(&[0x44, 1, b'/']), 1);
        assert_eq!(kept_of(&[&[0x40, 5], &b":path"[..], &[1, b'/']].concat()), 1);
        assert_eq!(kept_of(&[0x40, 0x84, 0xb9, 0x58, 0xd3, 0x3f, 1, b'/']), 1);
        let (path, other) = ([0x44, 1, b'/'], [0x58, 1, b'x']);
        let by_newest = [0x7e, 1, b'/'];
        let by_next = [0x7f, 0x00, 1, b'/'];
        let by_far = [0x7f, 0x80, 0x01, 1, b'/'];
        let kept_after = |blocks: &[&[u8]]| {
            let frames: Vec<_> = blocks.iter().map(|block| (true, 0, *block)).collect();
            kept(&frames)
        };
        assert_eq!(kept_after(&[&path, &by_newest]), 2);
        assert_eq!(kept_after(&[&other, &by_newest]), 0);
        assert_eq!(kept_after(&[&path, &other, &by_newest]), 1);
        assert_eq!(kept_after(&[&path, &other, &by_next]), 2);
        assert_eq!(kept_after(&[&path, &by_far]), 1);
        assert_eq!(kept_of(&[&[0x00, 5], &b":path"[..], &[1, b'/']].concat()), 0);
        // After a change of the table's size, a long index, and long texts.
        let filler = [0x61; 300];
        let long = [
            &[0x3f, 0xe1, 0x1f, 0xff, 0x80, 0x01, 0x0f, 0x10, 0x7f, 0xad, 0x01],
            &filler[..],
        ]
        .concat();
        assert_eq!(kept_of(&long), 0);
        assert_eq!(kept_of(&[&long[..], &[0x44, 1, b'/']].concat()), 1);
    }

    #[test]
    fn padding_and_priorities_are_no_fields_and_blocks_go_on() {
        // A path in a frame with both, whose padding looks like paths; one that goes on in the next frame; the same bytes in a frame
        // that begins a block.
        let padded = [3, 0, 0, 0, 0, 7, 0x44, 1, b'/', 0x44, 1, b'/'];
        assert_eq!(kept(&[(true, PADDED | PRIORITY, &padded)]), 1);
        assert_eq!(kept(&[(true, PADDED, &[3, 0x82, 0x44, 1, b'/'])]), 0);
        assert_eq!(kept(&[(true, 0, &[0x04, 3]), (false, 0, &[0x44, 1, b'/'])]), 0);
        assert_eq!(kept(&[(true, 0, &[0x04, 3]), (true, 0, &[0x44, 1, b'/'])]), 1);
    }

    #[test]
    fn what_has_left_the_table_is_kept_no_more() {
        // A path in each of 1,000 blocks, of 37 and more bytes; then a value of another name that fills the table, and more of them,
        // until no path can be left.
        let path = (true, 0, &[0x44_u8, 5, b'/', b'p', b'a', b't', b'h'][..]);
        assert_eq!(kept(&vec![path; 50]), 50);
        assert_eq!(kept(&vec![path; 1000]), 4096 / 37);
        let other = [&[0x58, 0x7f, 0xe1, 0x1d][..], &[b'x'; 4096 - 32 - 128]].concat();
        let fills = (true, 0, &other[..]);
        assert_eq!(kept(&[&vec![path; 1000][..], &[fills]].concat()), 3);
        assert_eq!(kept(&[&vec![path; 1000][..], &[fills, fills]].concat()), 0);
    }

    #[test]
    fn a_path_that_enters_the_table_again_and_again_is_kept_once_or_twice() {
        // Scenario: 1,000 calls in a block each, with a value of their own of 55 bytes, for which the path has to leave the table, and
        // enters it again with every 41st call. Expectation: two blocks at most, and one at least.
        let first = [&[0x40, 11][..], b"traceparent", &[55], &[b'0'; 55]].concat();
        let next = [&[0x7e, 55][..], &[b'0'; 55]].concat();
        let again = [&[0x44, 5][..], b"/path", &first].concat();
        let blocks = (0..1000).map(|call| if call % 41 == 0 { &again } else { &next });
        let frames: Vec<(bool, u8, &[u8])> = blocks.map(|block| (true, 0, &block[..])).collect();
        let kept = kept(&frames);
        assert!((1..=2).contains(&kept), "{kept}");
    }
}
