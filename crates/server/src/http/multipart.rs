//! `multipart/byteranges` (RFC 9110 14.6): the text around the parts, so that the length is known before
//! anything is read.

use super::range::content_range;
use crate::fetch::BodyPart;
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
}

impl Multipart {
    /// Frames extents of a representation of `length` bytes.
    pub(super) fn new(extents: &[Extent], length: u64, part_type: &str) -> Self {
        let boundary = boundary();
        let mut pieces = Vec::with_capacity(extents.len() * 2 + 1);
        let mut line_end = "";
        for &extent in extents {
            let range = content_range(extent, length);
            let head = format!(
                "{line_end}--{boundary}\r\nContent-Type: {part_type}\r\nContent-Range: {range}\r\n\r\n"
            );
            pieces.push(BodyPart::Text(Bytes::from(head)));
            pieces.push(BodyPart::Extent(extent));
            line_end = "\r\n";
        }
        pieces.push(BodyPart::Text(Bytes::from(format!(
            "{line_end}--{boundary}--\r\n"
        ))));
        Self {
            content_type: format!("multipart/byteranges; boundary={boundary}"),
            pieces,
        }
    }
}

/// 128 unpredictable bits, so that data cannot contain the boundary on purpose. `RandomState` is keyed from the system's
/// entropy, which is enough here.
fn boundary() -> String {
    let half = || RandomState::new().build_hasher().finish();
    format!("ringfetch-{:016x}{:016x}", half(), half())
}
