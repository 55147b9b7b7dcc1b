//! `multipart/byteranges` (RFC 9110 14.6): the text around the parts, so that the length is known before
//! anything is read.

use super::range::content_range;
use crate::fetch::BodyPart;
use crate::listener::TextBytes;
use bytes::Bytes;
use ringfetch_engine::geometry::Extent;
use std::hash::{BuildHasher, Hasher, RandomState};

/// A body of several parts.
#[derive(Debug)]
pub(super) struct Multipart {
    /// Value of the response's Content-Type.
    pub(super) content_type: String,
    /// The body in order: text, extent, text, extent, ..., text.
    pub(super) pieces: Vec<BodyPart>,
    /// Memory of the text and the pieces, from which a response is made.
    pub(super) text_bytes: TextBytes,
}

impl Multipart {
    /// Frames extents of a representation of `length` bytes.
    pub(super) fn new(extents: &[Extent], length: u64, part_type: &str) -> Self {
        let boundary = boundary();
        let (mut text, mut ends) = (String::new(), Vec::with_capacity(extents.len()));
        for &extent in extents {
            let range = content_range(extent, length);
            let line_end = if text.is_empty() { "" } else { "\r\n" };
            text.push_str(&format!(
                "{line_end}--{boundary}\r\nContent-Type: {part_type}\r\nContent-Range: {range}\r\n\r\n"
            ));
            ends.push(text.len());
        }
        text.push_str(&format!("\r\n--{boundary}--\r\n"));
        text.shrink_to_fit();
        let mut text = Bytes::from(text);
        // A piece is held by the plan, and by the window that it is read with.
        let held = text.len() + (2 * extents.len() + 1) * (size_of::<BodyPart>() + size_of::<Bytes>());
        let mut pieces = Vec::with_capacity(extents.len() * 2 + 1);
        let mut begin = 0;
        for (&extent, end) in extents.iter().zip(ends) {
            pieces.push(BodyPart::Text(text.split_to(end - begin)));
            pieces.push(BodyPart::Extent(extent));
            begin = end;
        }
        pieces.push(BodyPart::Text(text));
        Self {
            content_type: format!("multipart/byteranges; boundary={boundary}"),
            pieces,
            text_bytes: TextBytes(u64::try_from(held).unwrap_or(u64::MAX)),
        }
    }
}

/// 128 unpredictable bits, so that data cannot contain the boundary on purpose. `RandomState` is keyed from the system's
/// entropy, which is enough here.
fn boundary() -> String {
    let half = || RandomState::new().build_hasher().finish();
    format!("ringfetch-{:016x}{:016x}", half(), half())
}
