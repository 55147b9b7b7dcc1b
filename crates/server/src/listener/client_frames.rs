//! Follows the heads of a client's HTTP/2 frames (RFC 9113 4.1), for what h2 keeps of them and does not bound.
//!
//! - h2 keeps the payload of a DATA frame that nobody has read as a part of the buffer it was received in, of 8 KiB or more. Each
//!   small frame may keep such a buffer, if what is received between them is read: 16,384 frames of one byte fit into a stream's
//!   window, and kept 134 MiB. Trailers that nobody has read are kept decoded: up to 46 KiB from 500 bytes.
//! - An entry of HPACK's table may keep such a buffer, too: see `table_entries`.
//! - h2 resets a stream by itself if a frame of it is wrong, also one that has ended or was never opened, up to 1,024 on a connection.
//!   It keeps room for as many as waited at once for their reset to be sent: 0.7 MiB.
//! - h2 collects what it cannot decode yet of a list of headers: up to 115 KiB, in frames that never end.

use super::HEADER_LIST_BYTES;
use super::progress::Progress;
use super::table_entries::TableEntries;

/// Head of a frame.
pub(super) const FRAME_HEAD_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const SETTINGS: u8 = 4;
const CONTINUATION: u8 = 9;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
pub(super) const PADDED: u8 = 8;
/// Most padding, and the byte that says how much.
const PADDING_BYTES_MAX: usize = 256;

/// Longest list of headers as sent. h2 decodes up to four times [`HEADER_LIST_BYTES`]; what is longer than that on the wire is too
/// long decoded, too, but for a perverse choice of codes.
const HEADER_BLOCK_BYTES_MAX: usize = 2 * HEADER_LIST_BYTES as usize;

/// A DATA frame that is smaller may keep more than twice the memory that its stream's window accounts for.
pub(super) const SMALL_BYTES: usize = 4 << 10;
/// No message is shorter: see [`super::progress::MESSAGE_BYTES_MIN`].
const TINY_BYTES: usize = super::progress::MESSAGE_BYTES_MIN;
/// Received bytes of which h2 keeps a buffer: 8 KiB, as h2's buffers have.
pub(super) const BLOCK_SHIFT: u32 = 13;
/// With tiny frames 4 KiB, and a buffer of up to 16: a frame that does not fit into the rest of one begins another.
const TINY_BLOCK_SHIFT: u32 = 12;
/// Blocks with tiny frames of as much memory as unread trailers take.
const TRAILERS_BLOCKS: u32 = 3;
/// Most streams of a connection that h2 resets by itself, before it ends the connection.
const RESETS_MAX: usize = 1024;
/// While a socket is always full, resets come after so many bytes: a frame of what h2 takes of a response, and what is gathered.
const RESETS_WRITTEN_BYTES: u64 = 192 << 10;

/// Where a client is in its frames. Nothing is copied but the head that is incomplete.
#[derive(Debug, Default)]
pub(super) struct ClientFrames {
    head: [u8; FRAME_HEAD_BYTES],
    head_bytes: u8,
    /// The frame is one of a list of headers: of those that end it, of any other.
    list: ListState,
    /// Bytes of the frame that are still to come.
    left: u32,
    /// Bytes of the list of headers so far, and how many lists have begun; it wraps.
    list_bytes: u32,
    lists: u32,
    /// The highest stream that was opened, and the highest that had a frame smaller than [`SMALL_BYTES`].
    last_stream: u32,
    last_body: u32,
    received: u64,
    /// Frames smaller than that in what is being received.
    frames: u32,
    /// The last block with a small frame that is not tiny, and with a tiny one, counted from 1.
    small_block: u64,
    tiny_block: u64,
    table: TableEntries,
    /// Streams, in order, with frames for which h2 may have a reset to send.
    streams: Vec<u32>,
    /// The turn, by the bytes received before it, and those written before the first turn of these streams.
    turn: u64,
    written: u64,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ListState {
    /// Between lists.
    #[default]
    None,
    Open,
    /// In the last frame of one.
    Ends,
}

impl ClientFrames {
    /// Follows what h2 gets next, after the preface.
    pub(super) fn follow(&mut self, mut bytes: &[u8], progress: &Progress) {
        if bytes.is_empty() {
            return;
        }
        let was_open = self.list != ListState::None;
        progress.frames.begin();
        self.begin_turn(progress);
        while !bytes.is_empty() {
            if self.left == 0 {
                let Some(rest) = self.next_head(bytes, progress) else {
                    break;
                };
                bytes = rest;
            }
            let passed = bytes.len().min(self.left as usize);
            let (part, rest) = bytes.split_at(passed);
            if self.list != ListState::None {
                self.table.follow(part, self.received);
            }
            bytes = rest;
            self.left -= u32::try_from(passed).unwrap_or(self.left);
            self.received += passed as u64;
            if self.left == 0 && self.list == ListState::Ends {
                self.list = ListState::None;
            }
        }
        match std::mem::take(&mut self.frames) {
            0 => {}
            frames => progress.frames.come(frames),
        }
        if was_open || self.list != ListState::None {
            let is_open = self.list != ListState::None;
            progress
                .frames
                .set_open_list(if is_open { self.lists.max(1) } else { 0 });
        }
        progress.frames.set_entries(self.table.blocks());
    }

    /// Forgets the streams of earlier turns, if what h2 had to send was written.
    fn begin_turn(&mut self, progress: &Progress) {
        let turn = progress.read_bytes_before();
        if std::mem::replace(&mut self.turn, turn) == turn {
            return;
        }
        let written = progress.written_bytes();
        if !progress.write_is_blocked() || written - self.written >= RESETS_WRITTEN_BYTES {
            self.written = written;
            self.streams.clear();
        }
    }

    /// A frame comes that h2 may answer with a reset.
    fn name_stream(&mut self, stream: u32, progress: &Progress) {
        // Mostly the frames of one request.
        if self.streams.last() == Some(&stream) || self.streams.len() == RESETS_MAX {
            return;
        }
        if let Err(place) = self.streams.binary_search(&stream) {
            self.streams.insert(place, stream);
            progress.frames.name_streams(self.streams.len());
        }
    }

    /// Completes a frame's head; returns what follows it, if it is complete.
    fn next_head<'a>(&mut self, bytes: &'a [u8], progress: &Progress) -> Option<&'a [u8]> {
        let have = usize::from(self.head_bytes);
        let taken = bytes.len().min(FRAME_HEAD_BYTES - have);
        let (part, rest) = bytes.split_at_checked(taken)?;
        self.head.get_mut(have..have + taken)?.copy_from_slice(part);
        self.received += taken as u64;
        self.head_bytes = u8::try_from(have + taken).unwrap_or_default();
        if have + taken < FRAME_HEAD_BYTES {
            return None;
        }
        self.head_bytes = 0;
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = self.head;
        self.left = u32::from_be_bytes([0, l0, l1, l2]);
        let stream = u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]);
        if matches!(kind, DATA | HEADERS | PRIORITY) {
            self.name_stream(stream, progress);
        }
        match kind {
            DATA => self.data(flags, stream, progress),
            HEADERS => {
                self.list_bytes = 0;
                self.lists = self.lists.wrapping_add(1);
                if stream > self.last_stream {
                    self.last_stream = stream;
                } else {
                    progress.frames.add_blocks([0, TRAILERS_BLOCKS]);
                }
                self.of_list(flags, progress);
            }
            CONTINUATION => self.of_list(flags, progress),
            SETTINGS if flags & ACK != 0 => progress.frames.set_acknowledged(),
            _ => {}
        }
        Some(rest)
    }

    fn data(&mut self, flags: u8, stream: u32, progress: &Progress) {
        let padding = if flags & PADDED == 0 { 0 } else { PADDING_BYTES_MAX };
        let least = (self.left as usize).saturating_sub(padding);
        // h2 counts empty ones.
        if self.left == 0 || least >= SMALL_BYTES {
            return;
        }
        self.frames += 1;
        // Mostly the whole request of a call, which is read at once. `Progress` counts one for each body that is not.
        if stream > self.last_body {
            self.last_body = stream;
            return;
        }
        let (last, shift, more) = if least < TINY_BYTES {
            (&mut self.tiny_block, TINY_BLOCK_SHIFT, [0, 1])
        } else {
            (&mut self.small_block, BLOCK_SHIFT, [1, 0])
        };
        let block = (self.received >> shift) + 1;
        if std::mem::replace(last, block) != block {
            progress.frames.add_blocks(more);
        }
    }

    fn of_list(&mut self, flags: u8, progress: &Progress) {
        let [.., kind, _, _, _, _, _] = self.head;
        self.table.begin(kind == HEADERS, flags, self.left);
        self.list = if flags & END_HEADERS == 0 {
            ListState::Open
        } else {
            ListState::Ends
        };
        self.list_bytes = self.list_bytes.saturating_add(self.left);
        if self.list_bytes as usize > HEADER_BLOCK_BYTES_MAX {
            progress.is_too_long();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::progress::{Blocks, PREFACE};
    use std::task::Poll;

    fn frame(kind: u8, flags: u8, stream: u32, bytes: usize) -> Vec<u8> {
        let length = u32::try_from(bytes).unwrap().to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        // No frame begins like this.
        [head, vec![0xff; bytes]].concat()
    }

    /// The blocks that are counted, whether a list is open, and whether one was too long, in whatever pieces the frames come.
    fn followed(frames: &[Vec<u8>]) -> (Blocks, bool, bool) {
        let bytes = [PREFACE.to_vec(), frames.concat()].concat();
        let outcomes = [1, 2, 7, 9, 10, 1000, bytes.len()].map(|piece| {
            let (progress, mut follows) = (Progress::default(), ClientFrames::default());
            for part in bytes.chunks(piece) {
                follows.follow(progress.recognize(part), &progress);
            }
            (
                progress.frames.blocks(),
                progress.frames.open_list().is_some(),
                progress.is_closing(),
            )
        });
        assert!(
            outcomes.iter().all(|outcome| *outcome == outcomes[0]),
            "{outcomes:?}"
        );
        outcomes[0]
    }

    #[test]
    fn a_block_with_small_frames_is_counted_once() {
        // Scenario: messages of 22 and of 256 bytes in frames of their own, those of a call, large ones, empty ones, and padded ones; single
        // bytes between frames of 8 KiB; calls of one message each. Expectation: the messages count by 8 KiB in which they came, the
        // large and empty ones not at all, single bytes apart; the first one of a body does not count.
        let open = frame(HEADERS, END_HEADERS, 1, 100);
        let messages = vec![frame(DATA, 0, 1, 22); 1000];
        let blocks = u32::try_from((31 * 1000 + 109) / 8192 + 1).unwrap();
        assert_eq!(
            followed(&[vec![open.clone()], messages].concat()),
            ([blocks, 0], false, false)
        );
        let longer = vec![frame(DATA, 0, 1, 256); 1000];
        let blocks = u32::try_from((265 * 1000 + 109) / 8192 + 1).unwrap();
        assert_eq!(followed(&[vec![open.clone()], longer].concat()).0, [blocks, 0]);
        let large = vec![frame(DATA, 0, 1, 4096); 1000];
        assert_eq!(followed(&[vec![open], large].concat()), ([0; 2], false, false));
        assert_eq!(followed(&vec![frame(DATA, 0, 1, 0); 1000]).0, [0; 2]);
        assert_eq!(followed(&vec![frame(DATA, PADDED, 1, 300); 2]).0, [1, 0]);
        let pinned = [frame(DATA, 0, 1, 1), frame(DATA, 0, 3, 8192)];
        assert_eq!(followed(&vec![pinned.concat(); 101]), ([0, 100], false, false));
        let call = |stream| {
            [
                frame(HEADERS, END_HEADERS, stream, 100),
                frame(DATA, 0, stream, 22),
            ]
            .concat()
        };
        let calls: Vec<_> = (0..1000).map(|call| 2 * call + 1).map(call).collect();
        assert_eq!(followed(&calls).0, [0; 2]);
    }

    #[test]
    fn streams_count_once_until_all_is_written() {
        // Scenario: empty frames of 300 streams, from both ends, each twice, in one turn; ten in a turn, where the socket takes all,
        // nothing, or much but never all; 2,000 streams in one turn. Expectation: 300; ten, all of them, ten; as many as h2 resets.
        let ends = |streams: u32| (0..streams).flat_map(move |low| [low, streams - 1 - low]);
        let takes = |bytes| Poll::Ready(Ok::<usize, ()>(bytes));
        for (streams, in_turn, writes, expected) in [
            (300, 600, vec![takes(1)], 300),
            (300, 10, vec![takes(1)], 10),
            (300, 10, vec![Poll::Pending], 300),
            (300, 10, vec![takes(192 << 10), Poll::Pending], 10),
            (2000, 4000, vec![takes(1)], 1024),
        ] {
            for kind in [DATA, PRIORITY] {
                let (progress, mut follows) = (Progress::default(), ClientFrames::default());
                follows.follow(progress.recognize(PREFACE), &progress);
                let named: Vec<_> = ends(streams).collect();
                for part in named.chunks(in_turn) {
                    progress.begin_turn();
                    for stream in part {
                        let frame = frame(kind, 0, 2 * stream + 1, 0);
                        progress.received(frame.len());
                        follows.follow(progress.recognize(&frame), &progress);
                    }
                    writes.iter().for_each(|write| progress.wrote(write));
                }
                assert_eq!(
                    progress.frames.streams(),
                    expected,
                    "{streams}, {in_turn}, {writes:?}"
                );
            }
        }
    }

    #[test]
    fn lists_of_headers_end_and_are_bounded() {
        // Scenario: lists in one frame and in several, one that does not end, ones of 32 KiB and of more; trailers. Expectation: only
        // the one that does not end is open, only the longer one is too long; trailers count as blocks.
        let whole = frame(HEADERS, END_HEADERS, 1, 100);
        let begun = frame(HEADERS, 0, 3, 16 << 10);
        let more = |flags| frame(CONTINUATION, flags, 3, 16 << 10);
        assert_eq!(followed(std::slice::from_ref(&whole)), ([0; 2], false, false));
        assert_eq!(followed(&[whole.clone(), begun.clone()]), ([0; 2], true, false));
        let ended = [whole.clone(), begun.clone(), more(END_HEADERS)];
        assert_eq!(followed(&ended), ([0; 2], false, false));
        let half = [begun.clone(), more(END_HEADERS)[..5000].to_vec()];
        assert_eq!(followed(&half), ([0; 2], true, false));
        let long = [begun, more(0), frame(CONTINUATION, END_HEADERS, 3, 1)];
        assert_eq!(followed(&long), ([0; 2], false, true));
        let trailers = [whole.clone(), frame(DATA, 0, 1, 4096), whole];
        assert_eq!(followed(&trailers).0, [0, TRAILERS_BLOCKS]);
    }
}
