//! What the engine knows, in the words of the wire: datasets, kinds, backends, item errors.

use crate::fetch::{DatasetInfo, Dtype};
use crate::status;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::error::ItemError;
use ringfetch_proto::v1;

/// A dataset with its read path.
pub(crate) fn dataset(info: DatasetInfo) -> v1::Dataset {
    let kind = match (info.block_bytes, &info.vectors) {
        (Some(_), _) => v1::Kind::Blocks,
        (None, Some(_)) => v1::Kind::Vectors,
        (None, None) => v1::Kind::Objects,
    };
    let path = info.read_path;
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
            stride_bytes: shape.stride_bytes,
            base_offset: shape.base_offset,
        }),
        etag: info.etag,
        read_path: Some(v1::ReadPath {
            backend: backend(path.backend).into(),
            requested: backend(path.requested).into(),
            reason: path.reason,
            direct_io: path.direct_io,
            direct_io_reason: path.direct_io_reason,
            offset_alignment_bytes: path.offset_alignment_bytes,
            memory_alignment_bytes: path.memory_alignment_bytes,
            own_backend: path.own_backend,
        }),
        files: u32::try_from(info.files).unwrap_or(u32::MAX),
    }
}

/// A backend; the simulated one, which only tests have, is not on the wire.
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
    }
}

/// Failed items.
pub(crate) fn item_errors(errors: &[ItemError]) -> Vec<v1::ItemError> {
    errors.iter().map(item_error).collect()
}

fn item_error(failed: &ItemError) -> v1::ItemError {
    v1::ItemError {
        item: failed.item,
        code: status::of_read(&failed.error).grpc.into(),
        message: status::message_of(&failed.error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_engine::error::ReadError;

    #[test]
    fn a_failed_item_keeps_its_place_and_gets_a_code() {
        // A block past the end: OUT_OF_RANGE at the item's position, with a message that says what there is.
        let failed = ItemError {
            item: 3,
            error: ReadError::IndexOutOfRange {
                what: "block",
                index: 12,
                count: 10,
            },
        };
        let wire = item_errors(&[failed]);
        assert_eq!((wire[0].item, wire[0].code), (3, tonic::Code::OutOfRange as i32));
        assert_eq!(
            wire[0].message,
            "block 12 is out of range: the dataset has 10 (block 0 to 9)"
        );
    }
}
