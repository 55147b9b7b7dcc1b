//! Descriptions of datasets for clients, and of how they are read for operators; shared by the transports.
//! HTTP sends them as JSON, gRPC through `grpc::convert`.

use super::handle::{Kind, kind_word};
use super::rates::charge_request;
use super::{FetchError, Fetcher};
use crate::caller::Connection;
use crate::record;
use ringfetch_engine::config::BackendKind;
use ringfetch_engine::dataset::{Dataset, Dtype};
use ringfetch_engine::engine::Engine;
use serde::{Serialize, Serializer};
use std::sync::Arc;
use utoipa::ToSchema;

/// A dataset.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Dataset)]
pub struct DatasetInfo {
    /// Name in paths.
    pub name: String,
    /// `blocks`, `vectors` or `objects`.
    pub kind: &'static str,
    /// Length of the address space that `/bytes` serves; 0 for objects.
    pub length_bytes: u64,
    /// Blocks or vectors; 0 for objects, which are not counted.
    pub count: u64,
    /// Bytes of a block; only for blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_bytes: Option<u32>,
    /// Only for vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vectors: Option<VectorShape>,
    /// Strong entity tag of the address space, without quotes; empty for objects, which have one each.
    pub etag: String,
}

/// How a dataset is read.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Reading)]
pub struct StorageInfo {
    /// How its reads reach the device.
    #[serde(flatten)]
    pub path: ReadPath,
    /// Files or devices that make up the address space; 0 for objects.
    #[schema(value_type = u64)]
    pub files: usize,
    /// Of vectors: distance between the beginnings of two of them in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride_bytes: Option<u64>,
    /// Of vectors: where vector 0 begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_offset: Option<u64>,
}

/// The shape of a vector.
#[derive(Debug, Serialize, ToSchema)]
pub struct VectorShape {
    /// Elements.
    pub dim: u32,
    /// `f32`, `f16`, `bf16`, `f64`, `u8`, `i8` or `i32`; little-endian.
    #[serde(serialize_with = "dtype_word")]
    #[schema(value_type = String)]
    pub dtype: Dtype,
    /// `raw`, `fvecs`, `bvecs`, `ivecs`, `npy`, `fbin`, `u8bin` or `i8bin`.
    pub layout: &'static str,
    /// Bytes of one vector's elements.
    pub vector_bytes: u32,
}

/// How reads reach the device, and why that way.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReadPath {
    /// `uring`, `mmap`, `auto` or `pread`.
    #[serde(serialize_with = "backend_word")]
    #[schema(value_type = String)]
    pub backend: BackendKind,
    /// The requested backend.
    #[serde(serialize_with = "backend_word")]
    #[schema(value_type = String)]
    pub requested: BackendKind,
    /// Whether `backend` differs from `requested`.
    pub fallback: bool,
    /// The reason for the choice.
    pub reason: String,
    /// Whether reads bypass the page cache.
    pub direct_io: bool,
    /// Why.
    pub direct_io_reason: String,
    /// Required alignment of offset and length of direct reads.
    pub offset_alignment_bytes: u32,
    /// Required alignment of the memory of direct reads.
    pub memory_alignment_bytes: u32,
    /// Whether the dataset has a backend of its own, or shares the engine's.
    pub own_backend: bool,
}

fn dtype_word<S: Serializer>(dtype: &Dtype, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.as_str())
}

/// A backend as the configuration's word.
pub(crate) fn backend_word<S: Serializer>(backend: &BackendKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(backend.as_str())
}

impl Fetcher {
    /// Describes every dataset and how it is read, by name.
    pub fn describe_all(&self) -> Vec<(DatasetInfo, StorageInfo)> {
        let datasets = self.datasets();
        let both = |dataset: &Arc<Dataset>| {
            let storage = StorageInfo::new(dataset, self.engine());
            (DatasetInfo::new(dataset), storage)
        };
        datasets.iter().map(both).collect()
    }

    /// Describes a dataset for a request on this connection.
    ///
    /// # Errors
    /// `OverRate`, `Revoked`, `Forbidden`, `DatasetNotFound`.
    pub fn describe(&self, name: &str, reader: Option<&Arc<Connection>>) -> Result<DatasetInfo, FetchError> {
        record::note_dataset(name);
        let found = charge_request(reader).and_then(|()| self.dataset_for(name, reader));
        Ok(DatasetInfo::new(&*self.count_rejection(found, reader)?))
    }
}

impl DatasetInfo {
    pub(super) fn new(dataset: &Dataset) -> Self {
        let kind = dataset.kind();
        let (block_bytes, vectors) = match kind {
            Kind::Blocks { block_bytes, .. } => (Some(block_bytes), None),
            Kind::Vectors {
                layout,
                dim,
                dtype,
                vector_bytes,
                ..
            } => {
                let shape = VectorShape {
                    dim,
                    dtype,
                    layout: layout.as_str(),
                    vector_bytes,
                };
                (None, Some(shape))
            }
            Kind::Objects => (None, None),
        };
        Self {
            name: dataset.name().to_owned(),
            kind: kind_word(kind),
            length_bytes: dataset.length_bytes(),
            count: dataset.count(),
            block_bytes,
            vectors,
            etag: match kind {
                Kind::Objects => String::new(),
                Kind::Blocks { .. } | Kind::Vectors { .. } => dataset.etag().to_owned(),
            },
        }
    }
}

impl StorageInfo {
    fn new(dataset: &Dataset, engine: &Engine) -> Self {
        let status = engine.backend_of(dataset);
        let direct = dataset.direct();
        let (direct_io, direct_io_reason) = match status.backend {
            // Even if the file supports direct I/O.
            BackendKind::Mmap => (false, "mmap reads through the page cache".to_owned()),
            BackendKind::Uring | BackendKind::Auto | BackendKind::Pread | BackendKind::Sim => {
                (direct.direct, direct.reason.clone())
            }
        };
        let (stride_bytes, base_offset) = match dataset.kind() {
            Kind::Vectors {
                stride_bytes,
                base_offset,
                ..
            } => (Some(stride_bytes), Some(base_offset)),
            Kind::Blocks { .. } | Kind::Objects => (None, None),
        };
        Self {
            path: ReadPath {
                backend: status.backend,
                requested: status.requested,
                fallback: status.is_fallback(),
                reason: status.reason,
                direct_io,
                direct_io_reason,
                offset_alignment_bytes: direct.offset_alignment_bytes,
                memory_alignment_bytes: direct.memory_alignment_bytes,
                own_backend: engine.own_backend(dataset.name()).is_some(),
            },
            files: dataset.files().len(),
            stride_bytes,
            base_offset,
        }
    }
}
