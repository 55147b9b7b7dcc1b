//! Descriptions of the server's datasets.

use crate::vectors::Dtype;
use ringfetch_proto::v1 as wire;

/// What a dataset is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Blocks of one length.
    Blocks,
    /// Vectors of one shape.
    Vectors,
    /// Objects with names.
    Objects,
    /// A kind that this client does not know.
    Unknown,
}

impl Kind {
    /// The word in configuration and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::Vectors => "vectors",
            Self::Objects => "objects",
            Self::Unknown => "unknown",
        }
    }
}

/// A dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Dataset {
    /// Name in requests.
    pub name: String,
    /// What it is made of.
    pub kind: Kind,
    /// Length of the address space that ranges are read from. 0 for objects.
    pub length_bytes: u64,
    /// Blocks or vectors. 0 for objects, which are not counted.
    pub count: u64,
    /// For blocks: bytes of one; otherwise 0.
    pub block_bytes: u32,
    /// For vectors: their shape.
    pub vectors: Option<VectorShape>,
    /// Strong entity tag of the address space, without quotes. Empty for objects.
    pub etag: String,
}

/// The shape of vectors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct VectorShape {
    /// Elements of one vector.
    pub dim: u32,
    /// Element type; `None` for one that this client does not know.
    #[cfg_attr(feature = "serde", serde(serialize_with = "crate::status::dtype"))]
    pub dtype: Option<Dtype>,
    /// raw, fvecs, bvecs, ivecs, npy, fbin, u8bin or i8bin.
    pub layout: String,
    /// Bytes of one vector's elements.
    pub vector_bytes: u32,
}

/// An object of a dataset of kind objects.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectInfo {
    /// Relative to the dataset's directory.
    pub name: String,
    /// Its length.
    pub length_bytes: u64,
}

impl ObjectInfo {
    /// An object of this name and length.
    pub fn new(name: impl Into<String>, length_bytes: u64) -> Self {
        Self {
            name: name.into(),
            length_bytes,
        }
    }
}

impl From<wire::Dataset> for Dataset {
    fn from(dataset: wire::Dataset) -> Self {
        let kind = match dataset.kind() {
            wire::Kind::Blocks => Kind::Blocks,
            wire::Kind::Vectors => Kind::Vectors,
            wire::Kind::Objects => Kind::Objects,
            wire::Kind::Unspecified => Kind::Unknown,
        };
        let shape = |shape: wire::VectorShape| VectorShape {
            dim: shape.dim,
            dtype: Dtype::from_wire(shape.dtype),
            layout: shape.layout,
            vector_bytes: shape.vector_bytes,
        };
        Self {
            kind,
            name: dataset.name,
            length_bytes: dataset.length_bytes,
            count: dataset.count,
            block_bytes: dataset.block_bytes,
            vectors: dataset.vectors.map(shape),
            etag: dataset.etag,
        }
    }
}
