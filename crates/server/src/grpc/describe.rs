//! What the engine knows, in the words of the wire: datasets, kinds, backends, item errors.

use crate::fetch::Chosen;
use crate::status;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::dataset::{Dataset, Dtype, Kind, Layout};
use ringfetch_engine::engine::BackendStatus;
use ringfetch_engine::error::ItemError;
use ringfetch_proto::v1;

/// A dataset with its read path.
pub(crate) fn dataset(dataset: &Dataset, backend: &Chosen) -> v1::Dataset {
    let (kind, count, block_bytes, vectors) = match dataset.kind() {
        Kind::Blocks { block_bytes, count } => (v1::Kind::Blocks, count, block_bytes, None),
        Kind::Vectors {
            layout,
            dim,
            dtype: element,
            vector_bytes,
            stride_bytes,
            base_offset,
            count,
        } => {
            let shape = v1::VectorShape {
                dim,
                dtype: dtype(element).into(),
                layout: layout_name(layout).to_owned(),
                vector_bytes,
                stride_bytes,
                base_offset,
            };
            (v1::Kind::Vectors, count, 0, Some(shape))
        }
        Kind::Objects => (v1::Kind::Objects, 0, 0, None),
    };
    v1::Dataset {
        name: dataset.name().to_owned(),
        kind: kind.into(),
        length_bytes: dataset.length_bytes(),
        count,
        block_bytes,
        vectors,
        // Objects have a tag each.
        etag: match dataset.kind() {
            Kind::Objects => String::new(),
            Kind::Blocks { .. } | Kind::Vectors { .. } => dataset.etag().to_owned(),
        },
        read_path: Some(read_path(dataset, backend)),
        files: u32::try_from(dataset.files().len()).unwrap_or(u32::MAX),
    }
}

fn read_path(dataset: &Dataset, chosen: &Chosen) -> v1::ReadPath {
    let status = &chosen.status;
    let facts = dataset.direct();
    let (direct_io, direct_io_reason) = direct_io(dataset, status);
    v1::ReadPath {
        backend: backend(status.backend).into(),
        requested: backend(status.requested).into(),
        reason: status.reason.clone(),
        direct_io,
        direct_io_reason,
        offset_alignment_bytes: facts.offset_alignment_bytes,
        memory_alignment_bytes: facts.memory_alignment_bytes,
        own_backend: chosen.own,
    }
}

/// Whether a dataset's reads bypass the page cache, and why. A mapping's do not, whatever the file could do.
pub(crate) fn direct_io(dataset: &Dataset, status: &BackendStatus) -> (bool, String) {
    let facts = dataset.direct();
    match status.backend {
        BackendKind::Mmap => (false, "mmap reads through the page cache".to_owned()),
        BackendKind::Uring | BackendKind::Auto | BackendKind::Pread | BackendKind::Sim => {
            (facts.direct, facts.reason.clone())
        }
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

fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::Raw => "raw",
        Layout::Fvecs => "fvecs",
        Layout::Bvecs => "bvecs",
        Layout::Ivecs => "ivecs",
        Layout::Npy => "npy",
        Layout::Fbin => "fbin",
        Layout::U8bin => "u8bin",
        Layout::I8bin => "i8bin",
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
