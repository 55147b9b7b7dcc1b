//! The gRPC transport's pieces on the path of every call: decoding the request's message, encoding the
//! answer's envelope; and prost's own cost for the answer, which copies the payload.

use crate::harness::Piece;
use bytes::Bytes;
use prost::Message as _;
use ringfetch_proto::v1::{FetchBlocksRequest, FetchBlocksResponse};
use ringfetch_server::grpc::bench_hooks::{stream_head_bytes, unary_head_bytes};
use std::hint::black_box;

const BATCH: u64 = 64;

pub(crate) fn pieces() -> Vec<Piece> {
    let request = FetchBlocksRequest {
        dataset: "data".to_owned(),
        // Spread over a file of 10 GiB, so that most need three or four bytes.
        indices: (0..BATCH).map(|item| item * 40_009).collect(),
        fail_fast: false,
        ..Default::default()
    };
    let request = Bytes::from(request.encode_to_vec());
    let data = Bytes::from(vec![7; 64 * 4096]);
    let uniform = FetchBlocksResponse {
        block_bytes: 4096,
        ..FetchBlocksResponse::default()
    };
    let lengths = FetchBlocksResponse {
        lengths: vec![4096; 64],
        ..uniform.clone()
    };
    let whole = FetchBlocksResponse {
        data: data.clone(),
        ..uniform.clone()
    };
    let (for_lengths, for_stream, of_stream) = (data.clone(), data.clone(), uniform.clone());
    vec![
        Piece::new("request-decode-64", move || {
            FetchBlocksRequest::decode(black_box(request.clone())).map_or(0, |request| request.indices.len())
        }),
        Piece::new("envelope-64", move || {
            unary_head_bytes(black_box(&uniform), data.clone())
        }),
        Piece::new("envelope-64-with-lengths", move || {
            unary_head_bytes(black_box(&lengths), for_lengths.clone())
        }),
        Piece::new("envelope-64-on-a-stream", move || {
            stream_head_bytes(black_box(7), black_box(&of_stream), for_stream.clone())
        }),
        Piece::new("prost-encode-64", move || black_box(&whole).encode_to_vec().len()),
    ]
}
