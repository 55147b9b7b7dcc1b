//! What a client has sent over HTTP/2, as far as h2 may keep it: see `client_frames`, which calls most of this.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use super::MESSAGE_BYTES_MIN;
use crate::listener::BODY_WINDOW_BYTES;
use crate::listener::client_frames::SMALL_BYTES;
use crate::listener::kept_requests::SLOT_BYTES;

/// Blocks of a connection after which it is looked again how many it may keep: of 64 KiB at least.
const BLOCKS_STEP: i32 = 16;
/// Slots (2.6 KiB) of the buffer that a block may keep: up to 10 KiB of one with entries or small frames (measured), 16 with tiny ones.
const SLOTS_PER_BLOCK: usize = 4;
const SLOTS_PER_TINY_BLOCK: usize = 6;
/// Blocks with entries of HPACK's table that are not counted: the 24 KiB that each connection is assumed to take cover them.
const FREE_ENTRIES_BLOCKS: u32 = 1;
/// Streams that are as much as a block, to tell when to look.
const STREAMS_PER_BLOCK: u32 = 16;

/// Blocks of received bytes with small, and with tiny DATA frames. They wrap.
pub(in crate::listener) type Blocks = [u32; 2];

/// Both in one word, which is loaded and stored at once.
fn packed([small, tiny]: Blocks) -> u64 {
    u64::from(small) << 32 | u64::from(tiny)
}

#[expect(clippy::cast_possible_truncation, reason = "each has half of the word")]
pub(super) fn unpacked(blocks: u64) -> Blocks {
    [(blocks >> 32) as u32, blocks as u32]
}

/// The frames of a connection.
#[derive(Debug, Default)]
pub(in crate::listener) struct ReceivedFrames {
    /// Bytes that hyper got, decrypted if there is TLS.
    plain_bytes: AtomicU64,
    /// The list of headers that has not ended, by a number; 0: none.
    open_list: AtomicU32,
    /// Blocks so far, before what is being received now, and how many of all there were at the last look.
    blocks: AtomicU64,
    blocks_before: AtomicU64,
    seen_blocks: AtomicU32,
    /// Blocks whose entries HPACK's table keeps.
    entries_blocks: AtomicU32,
    /// Most streams for which h2 may have had a reset to send at once.
    streams: AtomicU32,
    /// DATA frames smaller than [`SMALL_BYTES`] that came and were not read: at least those that wait to be.
    unread: AtomicI64,
    /// The window of each request's body, once the client has acknowledged it, and `plain_bytes` when it did; 0 before.
    stream_window: u32,
    acknowledged_after: AtomicU64,
}

impl ReceivedFrames {
    /// Of a connection with this window for each request's body.
    pub(super) fn new(stream_window: u32) -> Self {
        Self {
            stream_window,
            ..Self::default()
        }
    }

    /// hyper gets more bytes. Only its task counts them.
    pub(super) fn add_plain_bytes(&self, more: usize) {
        self.plain_bytes
            .store(self.plain_bytes().wrapping_add(more as u64), Ordering::Relaxed);
    }

    /// Bytes that hyper got.
    pub(in crate::listener) fn plain_bytes(&self) -> u64 {
        self.plain_bytes.load(Ordering::Relaxed)
    }

    /// More is received.
    pub(in crate::listener) fn begin(&self) {
        self.blocks_before.store(self.blocks_word(), Ordering::Relaxed);
    }

    pub(in crate::listener) fn set_open_list(&self, list: u32) {
        self.open_list.store(list, Ordering::Relaxed);
    }

    /// The list of headers that is incomplete, if one is.
    pub(in crate::listener) fn open_list(&self) -> Option<u32> {
        Some(self.open_list.load(Ordering::Relaxed)).filter(|list| *list > 0)
    }

    /// The client has acknowledged the settings.
    pub(in crate::listener) fn set_acknowledged(&self) {
        self.acknowledged_after
            .store(self.plain_bytes().max(1), Ordering::Relaxed);
    }

    /// h2 may keep buffers for more blocks.
    pub(in crate::listener) fn add_blocks(&self, [more_small, more_tiny]: Blocks) {
        let [small, tiny] = self.blocks();
        let blocks = [small.wrapping_add(more_small), tiny.wrapping_add(more_tiny)];
        self.blocks.store(packed(blocks), Ordering::Relaxed);
    }

    pub(in crate::listener) fn blocks(&self) -> Blocks {
        unpacked(self.blocks_word())
    }

    pub(super) fn blocks_word(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    pub(super) fn blocks_before(&self) -> u64 {
        self.blocks_before.load(Ordering::Relaxed)
    }

    /// HPACK's table keeps so many blocks.
    pub(in crate::listener) fn set_entries(&self, blocks: u32) {
        self.entries_blocks.store(blocks, Ordering::Relaxed);
    }

    /// h2 may have a reset to send for so many streams.
    pub(in crate::listener) fn name_streams(&self, streams: usize) {
        let most = u32::try_from(streams).unwrap_or(u32::MAX).max(self.streams());
        self.streams.store(most, Ordering::Relaxed);
    }

    pub(in crate::listener) fn streams(&self) -> u32 {
        self.streams.load(Ordering::Relaxed)
    }

    /// So many DATA frames smaller than [`SMALL_BYTES`] come.
    pub(in crate::listener) fn come(&self, frames: u32) {
        self.unread.fetch_add(frames.into(), Ordering::Relaxed);
    }

    /// A DATA frame of so many bytes is read.
    pub(super) fn is_read(&self, bytes: usize) {
        if bytes > 0 && bytes < SMALL_BYTES {
            self.unread.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Unread bytes that the body of a new request may have.
    pub(super) fn window(&self) -> u32 {
        if self.acknowledged_after.load(Ordering::Relaxed) > 0 {
            self.stream_window
        } else {
            // The protocol's own.
            self.stream_window.max(BODY_WINDOW_BYTES)
        }
    }

    /// Bytes that came before the client had acknowledged the window: more than it may be unread.
    fn early_bytes(&self) -> u64 {
        match self.acknowledged_after.load(Ordering::Relaxed) {
            0 => self.plain_bytes(),
            bytes => bytes,
        }
    }

    /// Blocks of every kind so far.
    fn all_blocks(&self) -> u32 {
        let entries = self.entries_blocks.load(Ordering::Relaxed);
        let others = entries + self.streams() / STREAMS_PER_BLOCK;
        self.blocks().into_iter().fold(others, u32::wrapping_add)
    }

    /// Whether many more blocks have come since the last look.
    pub(super) fn is_look_due(&self) -> bool {
        let seen = self.seen_blocks.load(Ordering::Relaxed);
        // Fewer than before, if the table has let some go.
        self.all_blocks().wrapping_sub(seen).cast_signed() >= BLOCKS_STEP
    }

    /// Looks which of them may be unread.
    pub(super) fn look(&self) -> UnreadFrames<'_> {
        self.seen_blocks.store(self.all_blocks(), Ordering::Relaxed);
        UnreadFrames {
            frames: self,
            blocks: self.blocks(),
            kept: Blocks::default(),
            bodies: 0,
            bytes: 0,
            uncharged_bytes: 0,
        }
    }
}

/// The frames of a connection that may be unread, by its bodies.
pub(super) struct UnreadFrames<'a> {
    frames: &'a ReceivedFrames,
    blocks: Blocks,
    /// Since the bytes that some body has not read came, at most.
    kept: Blocks,
    bodies: usize,
    bytes: usize,
    /// What requests are not charged for: they are charged for the window that the client should acknowledge.
    uncharged_bytes: u64,
}

impl UnreadFrames<'_> {
    /// A body may have unread bytes, at most the window, that came after these blocks.
    pub(super) fn add_body(&mut self, after: Blocks, window: u32, received_bytes: u64) {
        self.bodies += 1;
        self.bytes = self.bytes.saturating_add(window as usize);
        let early_bytes = self.frames.early_bytes().saturating_sub(received_bytes);
        self.uncharged_bytes += early_bytes.min(window.saturating_sub(self.frames.stream_window).into());
        for ((kept, now), after) in self.kept.iter_mut().zip(self.blocks).zip(after) {
            *kept = now.wrapping_sub(after).max(*kept);
        }
    }

    /// Slots of memory that h2 may keep for them. While the client takes no answers (`owes`), h2 may have frames that it has not
    /// looked at.
    pub(super) fn slots(self, owes: bool) -> usize {
        let Self { frames, bodies, .. } = self;
        if bodies == 0 && !owes {
            // Forgets those of bodies that were dropped.
            frames.unread.store(0, Ordering::Relaxed);
        }
        let unread = usize::try_from(frames.unread.load(Ordering::Relaxed)).unwrap_or(0);
        let [small, tiny] = self.kept.map(|blocks| blocks as usize);
        // For each body one at least, since `client_frames` leaves its first one out; and one for each frame that is unread, and that
        // the windows hold, at most. A frame has a message, at least.
        let small = small.min(self.bytes / MESSAGE_BYTES_MIN).max(bodies).min(unread);
        let entries = frames.entries_blocks.load(Ordering::Relaxed);
        let entries = entries.saturating_sub(FREE_ENTRIES_BLOCKS) as usize;
        let uncharged = usize::try_from(self.uncharged_bytes / SLOT_BYTES).unwrap_or(usize::MAX);
        (small + entries) * SLOTS_PER_BLOCK + tiny * SLOTS_PER_TINY_BLOCK + uncharged
    }
}
