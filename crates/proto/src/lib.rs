//! Ringfetch's wire types (`proto/ringfetch/v1`), generated, and nothing else.
#![forbid(unsafe_code)]

/// Package `ringfetch.v1`.
#[allow(
    missing_docs,
    clippy::all,
    clippy::pedantic,
    reason = "generated from the .proto files, which hold the comments"
)]
pub mod v1 {
    tonic::include_proto!("ringfetch.v1");
}

/// `google.rpc.Status`, as a stream's answers hold it.
pub use tonic_types::Status as RpcStatus;

/// The encoded `google.protobuf.FileDescriptorSet` of `proto/`, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptor_set.bin"));
