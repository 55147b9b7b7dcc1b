//! Exposes private functions to the micro-benchmarks in `crates/pieces`: no logic of its own, and no public API.

use super::encode::EncodedMessage;
use bytes::Bytes;
use ringfetch_proto::v1::FetchBlocksResponse;

/// The length of the head of a unary response with these bytes; 0 if it cannot be encoded.
pub fn unary_head_bytes(message: &FetchBlocksResponse, data: Bytes) -> usize {
    EncodedMessage::unary(message, data).map_or(0, |encoded| encoded.head.len())
}

/// The same for a response on a stream.
pub fn stream_head_bytes(id: u64, message: &FetchBlocksResponse, data: Bytes) -> usize {
    EncodedMessage::nested(id, 2, message, data).map_or(0, |encoded| encoded.head.len())
}
