//! Private pieces within reach of the micro-benchmarks (`crates/pieces`), and of nothing else: only with feature
//! `bench`. No logic of its own, and no promise to anybody.

use super::encode::EncodedMessage;
use bytes::Bytes;
use ringfetch_proto::v1::FetchBlocksResponse;

/// The head of a unary answer with these bytes: its length, 0 if it cannot be written.
pub fn unary_head_bytes(message: &FetchBlocksResponse, data: Bytes) -> usize {
    EncodedMessage::unary(message, data).map_or(0, |encoded| encoded.head.len())
}

/// The same for an answer on a stream.
pub fn stream_head_bytes(id: u64, message: &FetchBlocksResponse, data: Bytes) -> usize {
    EncodedMessage::nested(id, 2, message, data).map_or(0, |encoded| encoded.head.len())
}
