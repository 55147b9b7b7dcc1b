//! gRPC's length-prefixed messages (PROTOCOL-HTTP2.md, "Length-Prefixed-Message"): one flag byte, four bytes of
//! length, the message.
//!
//! The prefix is checked against the limit before any of the message is stored. A message that comes in several pieces gets
//! memory of its whole length with the second one, and is charged for it. `metadata` refuses compressed encodings.

use crate::error_status::ERROR_DOMAIN;
use bytes::{Buf as _, Bytes, BytesMut};
use std::collections::HashMap;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// Bytes before each message.
pub(super) const PREFIX_BYTES: usize = 5;

/// Why bytes are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameError {
    /// The prefix announces more than a message may have.
    TooLarge { length: u32, max: u32 },
    /// The compressed flag is set, but no encoding was negotiated.
    Compressed,
    /// The flag is neither 0 nor 1.
    BadFlag(u8),
    /// The body ended inside a message.
    CutShort,
}

/// The status of a request message above its limit.
pub(super) fn too_large(message: String) -> Status {
    let mut details = ErrorDetails::with_error_info("REQUEST_TOO_LARGE", ERROR_DOMAIN, HashMap::new());
    details.add_bad_request_violation("message", message.clone());
    Status::with_error_details(Code::ResourceExhausted, message, details)
}

impl FrameError {
    pub(super) fn to_status(self) -> Status {
        let (code, message) = match self {
            Self::TooLarge { length, max } => {
                let message = format!(
                    "the request has {length} bytes; the limit is {max} (limits.request_bytes): split the batch"
                );
                return too_large(message);
            }
            Self::Compressed => (
                Code::Internal,
                "the message is marked compressed, and grpc-encoding names no compression".to_owned(),
            ),
            Self::BadFlag(flag) => (
                Code::Internal,
                format!("the message begins with flag {flag}; only 0 (not compressed) is supported"),
            ),
            Self::CutShort => (Code::Internal, "the request ended inside a message".to_owned()),
        };
        Status::new(code, message)
    }
}

/// Finds messages in a body that arrives in pieces. A message within one piece is not copied.
#[derive(Debug)]
pub(super) struct FrameDecoder {
    /// Longest message, without its prefix.
    message_bytes_max: u32,
    /// The beginning of an incomplete message. Empty when `piece` begins with a prefix.
    partial: BytesMut,
    /// The unparsed rest of the last piece.
    piece: Bytes,
}

impl FrameDecoder {
    pub(super) fn new(message_bytes_max: u32) -> Self {
        Self {
            message_bytes_max,
            partial: BytesMut::new(),
            piece: Bytes::new(),
        }
    }

    /// Adds a piece. Call it only after `next` returned `None`.
    pub(super) fn push(&mut self, piece: Bytes) {
        debug_assert!(
            self.piece.is_empty(),
            "`next` parses all of a piece before it returns None"
        );
        self.piece = piece;
    }

    /// The next complete message without its prefix; `None`: more bytes are needed.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, FrameError> {
        if self.partial.is_empty() {
            if let Some(length) = self.length_in(&self.piece)?
                && self.piece.len() - PREFIX_BYTES >= length
            {
                self.piece.advance(PREFIX_BYTES);
                return Ok(Some(self.piece.split_to(length)));
            }
            self.partial.extend_from_slice(&std::mem::take(&mut self.piece));
            return Ok(None);
        }
        self.fill_to(PREFIX_BYTES);
        let Some(length) = self.length_in(&self.partial)? else {
            return Ok(None);
        };
        // At once: growing by doubling would take up to twice the message.
        let missing = (PREFIX_BYTES + length).saturating_sub(self.partial.len());
        self.partial.reserve(missing);
        self.fill_to(PREFIX_BYTES + length);
        if self.partial.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        // Not `split`, which would keep the memory for the next beginning of a message, however long this one was.
        let mut message = std::mem::take(&mut self.partial).freeze();
        message.advance(PREFIX_BYTES);
        Ok(Some(message))
    }

    /// Memory held for an incomplete message.
    pub(super) fn held(&self) -> usize {
        let partial = if self.partial.is_empty() {
            0
        } else {
            self.partial.capacity()
        };
        partial + self.piece.len()
    }

    /// Checks that no message is incomplete. Call it at the end of the body, after `next` returned `None`.
    pub(super) fn finish(&self) -> Result<(), FrameError> {
        if self.partial.is_empty() && self.piece.is_empty() {
            Ok(())
        } else {
            Err(FrameError::CutShort)
        }
    }

    /// Moves bytes to `partial` until it has `wanted` bytes or there are no more.
    fn fill_to(&mut self, wanted: usize) {
        let missing = wanted.saturating_sub(self.partial.len()).min(self.piece.len());
        self.partial.extend_from_slice(&self.piece.split_to(missing));
    }

    /// The checked length in a prefix, once the prefix is complete.
    fn length_in(&self, bytes: &[u8]) -> Result<Option<usize>, FrameError> {
        let Some((&[flag, a, b, c, d], _)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes([a, b, c, d]);
        match flag {
            0 if length > self.message_bytes_max => Err(FrameError::TooLarge {
                length,
                max: self.message_bytes_max,
            }),
            // A u32 fits in a usize: the daemon needs a 64-bit platform.
            0 => Ok(Some(length as usize)),
            1 => Err(FrameError::Compressed),
            other => Err(FrameError::BadFlag(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::BufMut as _;
    use proptest::prelude::*;

    fn framed(messages: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for message in messages {
            bytes.put_u8(0);
            bytes.put_u32(u32::try_from(message.len()).unwrap());
            bytes.extend_from_slice(message);
        }
        bytes
    }

    fn read(decoder: &mut FrameDecoder, found: &mut Vec<Vec<u8>>) -> Result<(), FrameError> {
        while let Some(message) = decoder.next()? {
            found.push(message.to_vec());
        }
        Ok(())
    }

    #[test]
    fn what_is_held_of_a_long_message_is_its_length() {
        // A message of 1,000,000 bytes in pieces of 16 KiB, then the beginning of another. From the second piece on its memory
        // is held, and no more; and not for the next one.
        const LENGTH: usize = 1_000_000;
        let bytes = Bytes::from(framed(&[vec![7; LENGTH]]));
        let mut decoder = FrameDecoder::new(1 << 20);
        let pieces: Vec<Bytes> = (0..bytes.len())
            .step_by(16 << 10)
            .map(|from| bytes.slice(from..bytes.len().min(from + (16 << 10))))
            .collect();
        let (last, before) = pieces.split_last().unwrap();
        for (number, piece) in before.iter().enumerate() {
            decoder.push(piece.clone());
            assert_eq!(decoder.next().unwrap(), None);
            if number > 0 {
                assert_eq!(decoder.held(), PREFIX_BYTES + LENGTH, "piece {number}");
            }
        }
        decoder.push(last.clone());
        assert_eq!(decoder.next().unwrap().unwrap(), vec![7; LENGTH]);
        assert_eq!(decoder.held(), 0);
        decoder.push(bytes.slice(..20));
        assert_eq!(decoder.next().unwrap(), None);
        assert!((20..1000).contains(&decoder.held()), "{}", decoder.held());
    }

    proptest! {
        #[test]
        fn messages_come_out_however_the_body_is_cut(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8),
            cuts in prop::collection::vec(1usize..20, 1..40),
        ) {
            // Any messages, delivered in any pieces: the same messages come out, and nothing is left over.
            let bytes = framed(&messages);
            let mut decoder = FrameDecoder::new(1000);
            let mut found = Vec::new();
            let (mut rest, mut cut) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (piece, left) = rest.split_at((*cut.next().unwrap()).min(rest.len()));
                decoder.push(Bytes::copy_from_slice(piece));
                read(&mut decoder, &mut found).unwrap();
                rest = left;
            }
            prop_assert_eq!(found, messages);
            prop_assert_eq!(decoder.finish(), Ok(()));
        }
    }

    #[test]
    fn a_body_fed_byte_by_byte_is_read() {
        // Two messages and an empty one, one byte at a time: each comes out with its last byte.
        let messages = [b"first".to_vec(), Vec::new(), b"third".to_vec()];
        let mut decoder = FrameDecoder::new(5);
        let mut found = Vec::new();
        for byte in framed(&messages) {
            decoder.push(Bytes::copy_from_slice(&[byte]));
            read(&mut decoder, &mut found).unwrap();
        }
        assert_eq!(found, messages);
    }

    #[test]
    fn a_message_in_one_piece_is_not_copied() {
        // A whole frame in one piece: the message is a slice of that piece.
        let piece = Bytes::from(framed(&[b"whole".to_vec()]));
        let mut decoder = FrameDecoder::new(5);
        decoder.push(piece.clone());
        let message = decoder.next().unwrap().unwrap();
        assert_eq!(message.as_ptr(), piece[PREFIX_BYTES..].as_ptr());
    }

    #[test]
    fn a_prefix_alone_is_enough_to_refuse() {
        // Prefixes that announce too much, or have a flag set: refused before any of the message arrives.
        for (prefix, error) in [
            ([0, 0, 0, 0, 6], FrameError::TooLarge { length: 6, max: 5 }),
            (
                [0, 255, 255, 255, 255],
                FrameError::TooLarge {
                    length: u32::MAX,
                    max: 5,
                },
            ),
            ([1, 0, 0, 0, 1], FrameError::Compressed),
            ([7, 0, 0, 0, 1], FrameError::BadFlag(7)),
        ] {
            let mut at_once = FrameDecoder::new(5);
            at_once.push(Bytes::copy_from_slice(&prefix));
            assert_eq!(at_once.next(), Err(error));
            let mut in_pieces = FrameDecoder::new(5);
            for byte in prefix {
                in_pieces.push(Bytes::copy_from_slice(&[byte]));
                if let Err(found) = in_pieces.next() {
                    assert_eq!(found, error);
                }
            }
            assert_eq!(in_pieces.next(), Err(error));
        }
        let status = FrameError::TooLarge { length: 6, max: 5 }.to_status();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(
            status.message().contains("limits.request_bytes") && status.get_details_retry_info().is_none()
        );
    }

    #[test]
    fn a_body_that_ends_inside_a_message_is_cut_short() {
        // A prefix without its message, and half a prefix: both are reported at the end of the body.
        for bytes in [&[0, 0, 0, 0, 2, 9][..], &[0, 0]] {
            let mut decoder = FrameDecoder::new(5);
            decoder.push(Bytes::copy_from_slice(bytes));
            assert_eq!(decoder.next(), Ok(None));
            assert_eq!(decoder.finish(), Err(FrameError::CutShort));
        }
    }
}
