//! A long text that is made while it is sent, so that it occupies neither its core nor much memory.
//!
//! At most [`PIECES_AHEAD`] pieces are made and not sent, and charged. HTTP/2 would take more of them for each response that
//! its client does not read, and nothing would be charged: not even the data that the text is made of, once all of it is.

use crate::listener::TextBytes;
use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body::{Body, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

/// Longest piece: some 500 numbers of f64. With two ahead, a caller may have 30 such responses at once where request memory
/// is 3 MiB, the least. A multiple of 4, so that only the last piece of base64 is padded.
pub(super) const PIECE_BYTES_MAX: usize = 12 << 10;
/// The next piece is made while one is sent.
const PIECES_AHEAD: usize = 2;

/// What a text of this length, if that is known, holds at a time.
pub(super) fn held_at_a_time(text_bytes: Option<u64>) -> TextBytes {
    let most = (PIECES_AHEAD * PIECE_BYTES_MAX) as u64;
    TextBytes(text_bytes.map_or(most, |bytes| bytes.min(most)))
}

/// A body of pieces, each of at least one byte. Whoever keeps its frames waits forever for the third.
pub(super) struct TextBody<P> {
    pieces: P,
    left_bytes: Option<u64>,
    unsent: Arc<Unsent>,
}

impl<P> TextBody<P> {
    /// A body of these pieces, which have this length if it is known.
    pub(super) fn new(pieces: P, text_bytes: Option<u64>) -> Self {
        Self {
            pieces,
            left_bytes: text_bytes,
            unsent: Arc::default(),
        }
    }
}

impl<P: Iterator<Item = Bytes> + Unpin> Body for TextBody<P> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if !self.unsent.has_room(cx) {
            return Poll::Pending;
        }
        let Some(text) = self.pieces.next() else {
            return Poll::Ready(None);
        };
        if let Some(left) = &mut self.left_bytes {
            *left = left.saturating_sub(text.len() as u64);
        }
        let piece = Piece::new(text, &self.unsent);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.left_bytes == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        self.left_bytes
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// The number of pieces that are not sent, and the body that waits to make the next.
#[derive(Debug, Default)]
struct Unsent {
    pieces: AtomicUsize,
    body: AtomicWaker,
}

impl Unsent {
    fn has_room(&self, cx: &Context<'_>) -> bool {
        let has_room = || self.pieces.load(Ordering::Acquire) < PIECES_AHEAD;
        if has_room() {
            return true;
        }
        self.body.register(cx.waker());
        // One may have been sent meanwhile.
        has_room()
    }
}

/// A piece until it is sent, when it is dropped.
struct Piece {
    text: Bytes,
    unsent: Arc<Unsent>,
}

impl Piece {
    fn new(text: Bytes, unsent: &Arc<Unsent>) -> Self {
        unsent.pieces.fetch_add(1, Ordering::Relaxed);
        let unsent = Arc::clone(unsent);
        Self { text, unsent }
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.unsent.pieces.fetch_sub(1, Ordering::Release);
        self.unsent.body.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;

    #[tokio::test]
    async fn a_piece_is_made_when_another_is_sent() {
        // Scenario: a body of three pieces whose frames are kept, then sent one by one. Expectation: two frames, the
        // third once one is sent; its length is right all the time.
        let pieces = ["one", "two", "three"].map(|text| Bytes::from_static(text.as_bytes()));
        let mut body = TextBody::new(pieces.into_iter(), Some(11));
        let mut kept = Vec::new();
        for left in [8, 5] {
            kept.push(body.frame().now_or_never().unwrap().unwrap().unwrap());
            assert_eq!(
                (body.size_hint().exact(), body.is_end_stream()),
                (Some(left), false)
            );
        }
        let mut next = body.frame();
        assert!((&mut next).now_or_never().is_none());
        kept.pop();
        let last = next.await.unwrap().unwrap();
        assert_eq!(last.into_data().unwrap(), "three");
        assert!(body.is_end_stream());
    }
}
