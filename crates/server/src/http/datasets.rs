//! What is served, as JSON: the proto's fields by their proto names, enums as the words that the configuration uses.

use super::App;
use super::problem::{Problem, Segments};
use crate::fetch::{Chosen, FetchError, Fetcher};
use crate::grpc::describe;
use axum::Json;
use axum::extract::State;
use ringfetch_engine::dataset::{Dataset, Kind};
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// Every dataset.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DatasetList {
    /// In the order of their names.
    datasets: Vec<DatasetView>,
}

/// A dataset.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Dataset)]
pub(super) struct DatasetView {
    /// Name in paths.
    name: String,
    /// `blocks`, `vectors` or `objects`.
    kind: &'static str,
    /// Length of the address space that `/bytes` serves; 0 for objects.
    length_bytes: u64,
    /// Blocks or vectors; 0 for objects, which are not counted.
    count: u64,
    /// Bytes of a block; only for blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    block_bytes: Option<u32>,
    /// Only for vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    vectors: Option<VectorShapeView>,
    /// Strong entity tag of the address space, without quotes; empty for objects, which have one each.
    etag: String,
    /// How its reads reach the device.
    read_path: ReadPathView,
    /// Files or devices that make up the address space.
    files: usize,
}

/// The shape of a vector.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = VectorShape)]
pub(super) struct VectorShapeView {
    /// Elements.
    dim: u32,
    /// `f32`, `f16`, `u8`, `i8` or `i32`; little-endian.
    dtype: &'static str,
    /// `raw`, `fvecs`, `bvecs`, `ivecs`, `npy`, `fbin`, `u8bin` or `i8bin`.
    layout: &'static str,
    /// Bytes of one vector's elements.
    vector_bytes: u32,
    /// Distance between the beginnings of two vectors in the file.
    stride_bytes: u64,
    /// Where vector 0 begins.
    base_offset: u64,
}

/// How reads reach the device, and why that way.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ReadPath)]
pub(super) struct ReadPathView {
    /// `uring`, `mmap`, `auto` or `pread`.
    backend: &'static str,
    /// What was asked for.
    requested: &'static str,
    /// What decided it.
    reason: String,
    /// Whether reads bypass the page cache.
    direct_io: bool,
    /// Why.
    direct_io_reason: String,
    /// What direct reads must be aligned to, offset and length.
    offset_alignment_bytes: u32,
    /// What a direct read's memory must be aligned to.
    memory_alignment_bytes: u32,
    /// Whether the dataset has a backend of its own, or shares the engine's.
    own_backend: bool,
}

impl DatasetView {
    fn new(dataset: &Dataset, chosen: &Chosen) -> Self {
        let backend = &chosen.status;
        let (block_bytes, vectors) = match dataset.kind() {
            Kind::Blocks { block_bytes, .. } => (Some(block_bytes), None),
            Kind::Vectors {
                layout,
                dim,
                dtype,
                vector_bytes,
                stride_bytes,
                base_offset,
                count: _,
            } => {
                let (dtype, layout) = (dtype.as_str(), layout.as_str());
                (
                    None,
                    Some(VectorShapeView {
                        dim,
                        dtype,
                        layout,
                        vector_bytes,
                        stride_bytes,
                        base_offset,
                    }),
                )
            }
            Kind::Objects => (None, None),
        };
        let direct = dataset.direct();
        let (direct_io, direct_io_reason) = describe::direct_io(dataset, backend);
        let has_space = Wanted::Space.is(dataset.kind());
        Self {
            name: dataset.name().to_owned(),
            kind: kind_word(dataset.kind()),
            length_bytes: dataset.length_bytes(),
            count: dataset.count(),
            block_bytes,
            vectors,
            etag: if has_space {
                dataset.etag().to_owned()
            } else {
                String::new()
            },
            read_path: ReadPathView {
                backend: backend.backend.as_str(),
                requested: backend.requested.as_str(),
                reason: backend.reason.clone(),
                direct_io,
                direct_io_reason,
                offset_alignment_bytes: direct.offset_alignment_bytes,
                memory_alignment_bytes: direct.memory_alignment_bytes,
                own_backend: chosen.own,
            },
            files: dataset.files().len(),
        }
    }
}

/// Lists the datasets.
#[utoipa::path(get, path = "/v1/datasets", tag = "datasets", operation_id = "ListDatasets",
    responses((status = 200, description = "Every dataset, by name.", body = DatasetList)))]
pub(super) async fn list(State(app): State<Arc<App>>) -> Json<DatasetList> {
    let datasets = app.fetcher.datasets();
    Json(DatasetList {
        datasets: datasets
            .iter()
            .map(|dataset| DatasetView::new(dataset, &app.fetcher.backend_of(dataset)))
            .collect(),
    })
}

/// Describes a dataset.
#[utoipa::path(get, path = "/v1/datasets/{name}", tag = "datasets", operation_id = "GetDataset",
    params(("name" = String, Path, description = "The dataset.")),
    responses((status = 200, description = "The dataset.", body = DatasetView)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    Segments(name): Segments<String>,
) -> Result<Json<DatasetView>, Problem> {
    let dataset = app.fetcher.dataset(&name)?;
    Ok(Json(DatasetView::new(
        &dataset,
        &app.fetcher.backend_of(&dataset),
    )))
}

/// What a resource needs its dataset to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Blocks.
    Blocks,
    /// Vectors.
    Vectors,
    /// One address space: blocks or vectors.
    Space,
    /// Objects.
    Objects,
}

impl Wanted {
    fn is(self, kind: Kind) -> bool {
        match self {
            Self::Blocks => matches!(kind, Kind::Blocks { .. }),
            Self::Vectors => matches!(kind, Kind::Vectors { .. }),
            Self::Space => !matches!(kind, Kind::Objects),
            Self::Objects => matches!(kind, Kind::Objects),
        }
    }
}

/// The dataset of this name.
///
/// # Errors
/// There is none, or it is of another kind; then the error names the resources to use instead.
pub(super) fn dataset_of_kind(
    fetcher: &Fetcher,
    name: &str,
    wanted: Wanted,
) -> Result<Arc<Dataset>, FetchError> {
    let dataset = fetcher.dataset(name)?;
    let kind = dataset.kind();
    if wanted.is(kind) {
        return Ok(dataset);
    }
    let remedy = match kind {
        Kind::Blocks { .. } => "its blocks/{index}, bytes, blocks:batchFetch or ranges:batchFetch",
        Kind::Vectors { .. } => "its vectors/{id}, bytes, vectors:batchFetch or ranges:batchFetch",
        Kind::Objects => "its objects/{object}, objects or objects:batchFetch",
    };
    Err(FetchError::WrongKind {
        name: name.to_owned(),
        kind: kind_word(kind),
        remedy,
    })
}

/// The kind as the configuration's word.
pub(super) fn kind_word(kind: Kind) -> &'static str {
    match kind {
        Kind::Blocks { .. } => "blocks",
        Kind::Vectors { .. } => "vectors",
        Kind::Objects => "objects",
    }
}
