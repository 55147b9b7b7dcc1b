//! Converts datasets, kinds, backends and item errors to protobuf messages.

use crate::error_status::{self, ItemMessages};
use crate::fetch::{DatasetInfo, Dtype, ReadPath};
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::error::ItemError;
use ringfetch_proto::v1;

pub(crate) fn dataset(info: DatasetInfo) -> v1::Dataset {
    let kind = match (info.block_bytes, &info.vectors) {
        (Some(_), _) => v1::Kind::Blocks,
        (None, Some(_)) => v1::Kind::Vectors,
        (None, None) => v1::Kind::Objects,
    };
    v1::Dataset {
        name: info.name,
        kind: kind.into(),
        length_bytes: info.length_bytes,
        count: info.count,
        block_bytes: info.block_bytes.unwrap_or(0),
        vectors: info.vectors.map(|shape| v1::VectorShape {
            dim: shape.dim,
            dtype: dtype(shape.dtype).into(),
            layout: shape.layout.to_owned(),
            vector_bytes: shape.vector_bytes,
        }),
        etag: info.etag,
    }
}

/// How a dataset's reads reach the device.
pub(crate) fn read_path(path: ReadPath) -> v1::ReadPath {
    v1::ReadPath {
        backend: backend(path.backend).into(),
        requested: backend(path.requested).into(),
        reason: path.reason,
        direct_io: path.direct_io,
        direct_io_reason: path.direct_io_reason,
        offset_alignment_bytes: path.offset_alignment_bytes,
        memory_alignment_bytes: path.memory_alignment_bytes,
        own_backend: path.own_backend,
    }
}

/// A backend. The simulated one, which only tests use, has no value on the wire.
pub(crate) fn backend(kind: BackendKind) -> v1::Backend {
    match kind {
        BackendKind::Uring => v1::Backend::Uring,
        BackendKind::Auto => v1::Backend::Auto,
        BackendKind::Mmap => v1::Backend::Mmap,
        BackendKind::Pread => v1::Backend::Pread,
        BackendKind::Sim => v1::Backend::Unspecified,
    }
}

/// An element type.
pub(crate) fn dtype(dtype: Dtype) -> v1::Dtype {
    match dtype {
        Dtype::F32 => v1::Dtype::F32,
        Dtype::F16 => v1::Dtype::F16,
        Dtype::U8 => v1::Dtype::U8,
        Dtype::I8 => v1::Dtype::I8,
        Dtype::I32 => v1::Dtype::I32,
        Dtype::Bf16 => v1::Dtype::Bf16,
        Dtype::F64 => v1::Dtype::F64,
    }
}

/// Failed items. `messages` is the response's, which may have several lists of them.
pub(crate) fn item_errors(errors: &[ItemError], messages: &mut ItemMessages) -> Vec<v1::ItemError> {
    let item_error = |failed: &ItemError| v1::ItemError {
        item: failed.item,
        code: error_status::of_read(&failed.error).grpc.into(),
        message: messages.of(&failed.error),
    };
    errors.iter().map(item_error).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_engine::error::ReadError;

    #[test]
    fn the_longest_answer_by_default_is_one_that_stock_clients_take() {
        // Every item of a request for objects but one fails with the longest message there is, the one has as
        // many bytes as a response may have, and all have a version: together less than the 4 MiB that gRPC
        // clients accept, also inside a stream's response.
        use prost::Message as _;
        let limits = crate::config::Limits::default();
        let failed = |item| ItemError {
            item,
            error: ReadError::ObjectNotFound {
                name: "x".repeat(4096),
            },
        };
        let errors: Vec<_> = (0..limits.items_per_request).map(failed).collect();
        let items = errors.len();
        let sent = item_errors(&errors, &mut ItemMessages::default());
        let answer = v1::FetchObjectsResponse {
            lengths: vec![u32::try_from(limits.response_bytes).unwrap(); items],
            errors: sent.clone(),
            etags: vec!["0".repeat(32); items],
            data: vec![0; usize::try_from(limits.response_bytes).unwrap()].into(),
        };
        let response = Some(v1::fetch_stream_response::Response::Objects(answer));
        let length = v1::FetchStreamResponse {
            id: u64::MAX,
            response,
        }
        .encoded_len();
        assert!(length < 4 << 20, "{length}");
        assert!(sent[0].message.len() == 512 && sent[items - 1].message.is_empty());
    }
}
