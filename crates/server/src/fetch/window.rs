//! Cuts a long response into windows: batches limited in bytes and items, which bound the memory that a slow
//! client holds. Pure; `windowed` fetches them.
//!
//! Small parts share a window (64 ranges of 4 KiB are one batch, not 64). A long extent is cut at aligned
//! offsets, so that all its windows except the first are read without a copy.

use bytes::Bytes;
use ringfetch_engine::geometry::Extent;
use std::collections::VecDeque;

/// Cuts fall on multiples of this: the largest alignment that direct I/O needs in practice (TRAPS 17).
const CUT_ALIGNMENT_BYTES: u64 = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BodyPart {
    /// Known bytes.
    Text(Bytes),
    /// Bytes to fetch; at least one.
    Extent(Extent),
}

impl BodyPart {
    fn bytes(&self) -> u64 {
        match self {
            Self::Text(text) => u64::try_from(text.len()).unwrap_or(u64::MAX),
            Self::Extent(extent) => extent.length,
        }
    }
}

pub(super) fn total_bytes<'a>(pieces: impl IntoIterator<Item = &'a BodyPart>) -> u64 {
    pieces
        .into_iter()
        .map(BodyPart::bytes)
        .fold(0, u64::saturating_add)
}

/// Bytes of a window while memory is plentiful: large enough to keep the device busy.
pub(super) const WINDOW_BYTES_MAX: u64 = 1 << 20;

/// Bounds of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowLimits {
    /// Most bytes to fetch; at least 1.
    pub(super) bytes: u64,
    /// Most extents; at least 1.
    pub(super) extents: usize,
}

/// How much response memory a long response may take, depending on how much is in use.
///
/// Clients that do not read hold their windows, so windows shrink as memory fills. HTTP polls a body ahead, and a window
/// is held until its last byte is written. With HTTP/1.1 a response holds two windows, or three while less than 16 KiB of the
/// first are left. With HTTP/2 it holds three: h2 has one, hyper the next, and the body reads the one after it ahead; four
/// while less than 128 KiB of the first are left (measured: 2 MiB and 4 MiB at most, reading 24 MiB by 16 KiB).
///
/// So with 256 MiB, 16 to 32 such clients fill the first quarter with windows of 1 MiB, 64 to 128 the second with windows of
/// 256 KiB. 512 to 2048 fill the other half with one to four of 64 KiB, which are not read ahead. Until then there is room for
/// short reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowBudget {
    /// Most bytes of the next window.
    pub(super) window_bytes: u64,
    /// Whether it may be fetched before the previous one is sent.
    pub(super) ahead: bool,
}

impl WindowBudget {
    /// For `in_use` of `budget` bytes.
    pub(super) fn new(in_use: u64, budget: u64) -> Self {
        let (window_bytes, ahead) = if in_use < budget / 4 {
            (WINDOW_BYTES_MAX, true)
        } else if in_use < budget / 2 {
            (WINDOW_BYTES_MAX / 4, true)
        } else {
            (WINDOW_BYTES_MAX / 16, false)
        };
        Self { window_bytes, ahead }
    }
}

/// The rest of a body, taken window by window.
#[derive(Debug)]
pub(super) struct WindowPlan {
    left: VecDeque<BodyPart>,
}

impl WindowPlan {
    /// A plan for a whole body.
    pub(super) fn new(pieces: Vec<BodyPart>) -> Self {
        Self { left: pieces.into() }
    }

    /// The length of the rest.
    pub(super) fn left_bytes(&self) -> u64 {
        total_bytes(&self.left)
    }

    /// Puts parts before the rest.
    pub(super) fn put_back(&mut self, Self { left: mut parts }: Self) {
        parts.append(&mut self.left);
        self.left = parts;
    }

    /// Drops the rest of the body.
    pub(super) fn clear(&mut self) {
        self.left.clear();
    }

    /// The next window: as much as fits, at least one part; `None` at the end.
    pub(super) fn next_window(&mut self, limits: WindowLimits) -> Option<Vec<BodyPart>> {
        let bytes_max = limits.bytes.max(1);
        let mut room = WindowLimits {
            bytes: bytes_max,
            extents: limits.extents.max(1),
        };
        let mut window = Vec::new();
        while let Some(piece) = self.left.pop_front() {
            let extent = match piece {
                BodyPart::Text(_) => {
                    window.push(piece);
                    continue;
                }
                BodyPart::Extent(extent) => extent,
            };
            if room.extents == 0 || room.bytes == 0 {
                self.left.push_front(piece);
                break;
            }
            let taken = fitting(extent, room.bytes, room.bytes == bytes_max);
            if taken == 0 {
                self.left.push_front(piece);
                break;
            }
            window.push(BodyPart::Extent(Extent {
                offset: extent.offset,
                length: taken,
            }));
            room.bytes -= taken;
            room.extents -= 1;
            if taken < extent.length {
                let rest = Extent {
                    offset: extent.offset + taken,
                    length: extent.length - taken,
                };
                self.left.push_front(BodyPart::Extent(rest));
                break;
            }
        }
        (!window.is_empty()).then_some(window)
    }
}

/// How much of an extent fits in `room` bytes: all of it, or up to an aligned cut; 0 if there is no such cut
/// and the window is not empty (`fresh` is false).
///
/// Offset 500, room 1 MiB = 1 048 576: the end 1 049 076 is cut back to 1 048 576, so 1 048 076 bytes; from there on
/// every window is 1 MiB at a multiple of 4096.
fn fitting(extent: Extent, room: u64, fresh: bool) -> u64 {
    if extent.length <= room {
        return extent.length;
    }
    let end = extent.offset.saturating_add(room);
    let cut = end - end % CUT_ALIGNMENT_BYTES;
    if cut > extent.offset {
        return cut - extent.offset;
    }
    if fresh { room } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn windows(pieces: Vec<BodyPart>, limits: WindowLimits) -> Vec<Vec<BodyPart>> {
        let mut plan = WindowPlan::new(pieces);
        std::iter::from_fn(|| plan.next_window(limits)).collect()
    }

    fn extent(offset: u64, length: u64) -> BodyPart {
        BodyPart::Extent(Extent { offset, length })
    }

    #[test]
    fn a_long_extent_is_cut_at_aligned_offsets() {
        // 3 MiB from offset 500, windows of 1 MiB: the first is shorter, the others begin at multiples of 4096.
        let mib = 1 << 20;
        let limits = WindowLimits {
            bytes: mib,
            extents: 8,
        };
        let expected = vec![
            vec![extent(500, mib - 500)],
            vec![extent(mib, mib)],
            vec![extent(2 * mib, mib)],
            vec![extent(3 * mib, 500)],
        ];
        assert_eq!(windows(vec![extent(500, 3 * mib)], limits), expected);
    }

    #[test]
    fn small_pieces_share_a_window() {
        // Ten ranges of 4 KiB with text between them: one window, so one batch.
        let pieces: Vec<BodyPart> = (0..10)
            .flat_map(|i| [BodyPart::Text(Bytes::from_static(b"x")), extent(i * 8192, 4096)])
            .collect();
        let limits = WindowLimits {
            bytes: 1 << 20,
            extents: 64,
        };
        assert_eq!(windows(pieces.clone(), limits), [pieces]);
    }

    #[test]
    fn a_window_has_a_bounded_number_of_extents() {
        // Five one-byte ranges, two per window: three windows.
        let pieces: Vec<BodyPart> = (0..5).map(|i| extent(i * 10, 1)).collect();
        let limits = WindowLimits {
            bytes: 1 << 20,
            extents: 2,
        };
        assert_eq!(
            windows(pieces, limits).iter().map(Vec::len).collect::<Vec<_>>(),
            [2, 2, 1]
        );
    }

    #[test]
    fn windows_shrink_as_the_memory_fills() {
        // 256 MiB, empty to full: 1 MiB and 256 KiB with one window ahead, then 64 KiB without, to the last
        // byte.
        let mib = 1 << 20;
        for (in_use, kib, ahead) in [
            (0, 1024, true),
            (64 * mib - 1, 1024, true),
            (64 * mib, 256, true),
            (128 * mib, 64, false),
            (256 * mib, 64, false),
        ] {
            let expected = WindowBudget {
                window_bytes: kib << 10,
                ahead,
            };
            assert_eq!(WindowBudget::new(in_use, 256 * mib), expected, "{in_use}");
        }
    }

    proptest! {
        #[test]
        fn windows_are_the_body_in_order(
            parts in prop::collection::vec((0..50_000_u64, 1..30_000_u64, any::<bool>()), 0..12),
            bytes in 1..20_000_u64,
            extents in 1..5_usize,
        ) {
            // Any body and limits: windows are within the limits, never empty, and joined together they are
            // exactly the body.
            let pieces: Vec<BodyPart> = parts.iter().flat_map(|&(offset, length, text)| {
                let text = text.then(|| BodyPart::Text(Bytes::from_static(b"text")));
                text.into_iter().chain([extent(offset, length)])
            }).collect();
            let mut joined: Vec<BodyPart> = Vec::new();
            for window in windows(pieces.clone(), WindowLimits { bytes, extents }) {
                prop_assert!(!window.is_empty());
                let fetched: Vec<&BodyPart> = window.iter().filter(|piece| matches!(piece, BodyPart::Extent(_))).collect();
                prop_assert!(fetched.len() <= extents);
                prop_assert!(fetched.iter().map(|piece| piece.bytes()).sum::<u64>() <= bytes);
                for piece in window {
                    match (joined.last_mut(), &piece) {
                        (Some(BodyPart::Extent(last)), BodyPart::Extent(next))
                            if last.offset + last.length == next.offset => last.length += next.length,
                        _ => joined.push(piece),
                    }
                }
            }
            // Neighbours in the body itself are joined in the same way.
            let mut expected: Vec<BodyPart> = Vec::new();
            for piece in pieces {
                match (expected.last_mut(), &piece) {
                    (Some(BodyPart::Extent(last)), BodyPart::Extent(next))
                        if last.offset + last.length == next.offset => last.length += next.length,
                    _ => expected.push(piece),
                }
            }
            prop_assert_eq!(joined, expected);
        }
    }
}
