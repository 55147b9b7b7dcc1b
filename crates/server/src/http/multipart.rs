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
        Self::with_boundary(extents, length, part_type, &boundary())
    }

    fn with_boundary(extents: &[Extent], length: u64, part_type: &str, boundary: &str) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::total_bytes;
    use proptest::prelude::*;

    /// The body as a client sees it, where byte `i` of the representation is `i % 251`.
    fn produce(pieces: &[BodyPart]) -> Vec<u8> {
        let mut body = Vec::new();
        for piece in pieces {
            match piece {
                BodyPart::Text(text) => body.extend_from_slice(text),
                BodyPart::Extent(extent) => {
                    body.extend(
                        (extent.offset..extent.offset + extent.length)
                            .map(|i| u8::try_from(i % 251).unwrap()),
                    );
                }
            }
        }
        body
    }

    #[test]
    fn two_parts_look_like_the_rfc_example() {
        // Two parts of a 20-byte representation: the exact bytes, CRLFs included.
        let extents = [
            Extent { offset: 0, length: 2 },
            Extent {
                offset: 17,
                length: 3,
            },
        ];
        let multipart = Multipart::with_boundary(&extents, 20, "application/octet-stream", "B");
        let expected = b"--B\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes 0-1/20\r\n\r\n\x00\x01\
            \r\n--B\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes 17-19/20\r\n\r\n\x11\x12\x13\
            \r\n--B--\r\n";
        assert_eq!(produce(&multipart.pieces), expected);
        assert_eq!(multipart.content_type, "multipart/byteranges; boundary=B");
    }

    #[test]
    fn boundaries_differ_and_are_legal() {
        // Two responses: different boundaries, each within RFC 2046's 70 characters, with none that would
        // need quotes.
        let (a, b) = (boundary(), boundary());
        assert_ne!(a, b);
        assert!(
            a.len() <= 70 && a.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-'),
            "{a}"
        );
    }

    proptest! {
        #[test]
        fn the_declared_length_is_the_produced_length(parts in prop::collection::vec((0..5000_u64, 1..300_u64), 1..8)) {
            // Any parts: the length computed beforehand equals the number of bytes produced.
            let extents: Vec<Extent> = parts.iter().map(|&(offset, length)| Extent { offset, length }).collect();
            let multipart = Multipart::new(&extents, 10_000, "application/octet-stream");
            prop_assert_eq!(total_bytes(&multipart.pieces), produce(&multipart.pieces).len() as u64);
        }
    }
}
