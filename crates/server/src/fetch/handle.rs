//! A dataset that a request looked up. Transports hold this, never the engine's dataset.

use super::request::FetchError;
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::error::ReadError;
use std::sync::Arc;

pub use ringfetch_engine::dataset::{Dtype, Kind};

/// The kind of dataset that a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequiredKind {
    /// Blocks.
    Blocks,
    /// Vectors.
    Vectors,
    /// One address space: blocks or vectors.
    Space,
    /// Objects.
    Objects,
}

impl RequiredKind {
    fn is(self, kind: Kind) -> bool {
        match self {
            Self::Blocks => matches!(kind, Kind::Blocks { .. }),
            Self::Vectors => matches!(kind, Kind::Vectors { .. }),
            Self::Space => !matches!(kind, Kind::Objects),
            Self::Objects => matches!(kind, Kind::Objects),
        }
    }

    /// Checks a dataset's kind.
    ///
    /// # Errors
    /// `WrongKind`, which names what to use instead.
    pub(super) fn check(self, name: &str, kind: Kind) -> Result<(), FetchError> {
        if self.is(kind) {
            return Ok(());
        }
        let remedy = match kind {
            Kind::Blocks { .. } => {
                "FetchBlocks or FetchRanges (over HTTP its blocks/{index}, bytes, blocks:batchFetch or ranges:batchFetch)"
            }
            Kind::Vectors { .. } => {
                "FetchVectors, ScoreVectors or FetchRanges (over HTTP its vectors/{id}, bytes, vectors:batchFetch, vectors:score or \
                 ranges:batchFetch)"
            }
            Kind::Objects => {
                "FetchObjects or ReadObject (over HTTP its objects/{object}, objects or objects:batchFetch)"
            }
        };
        Err(FetchError::WrongKind {
            name: name.to_owned(),
            kind: kind_word(kind),
            remedy,
        })
    }
}

/// The kind as the configuration's word.
pub(super) fn kind_word(kind: Kind) -> &'static str {
    match kind {
        Kind::Blocks { .. } => "blocks",
        Kind::Vectors { .. } => "vectors",
        Kind::Objects => "objects",
    }
}

/// A dataset that a request looked up. It stays open until the response is sent, even if a reload replaces it.
#[derive(Debug, Clone)]
pub struct DatasetHandle(pub(super) Arc<Dataset>);

impl DatasetHandle {
    /// Its name.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Its kind and shape.
    pub fn kind(&self) -> Kind {
        self.0.kind()
    }

    /// The strong entity tag of its address space, unquoted.
    pub fn etag(&self) -> &str {
        self.0.etag()
    }

    /// Checks that this is the requested version; empty: any.
    ///
    /// # Errors
    /// `VersionMismatch`; `Malformed` for a tag in quotes.
    pub fn check_version(&self, if_match: &str) -> Result<(), FetchError> {
        require_version(self.etag(), if_match)
    }
}

/// As [`check_version`], for the one version that a request names.
///
/// # Errors
/// `VersionMismatch`; `Malformed` for a tag in quotes.
pub(super) fn require_version(etag: &str, if_match: &str) -> Result<(), FetchError> {
    check_version(etag, if_match).or_else(|error| {
        check_unquoted(if_match)?;
        Err(error.into())
    })
}

/// Checks that a required version has no quotes, as in HTTP's header: no tag contains one, so it would never be current.
///
/// # Errors
/// `Malformed`.
pub(super) fn check_unquoted(if_match: &str) -> Result<(), FetchError> {
    if !if_match.contains('"') {
        return Ok(());
    }
    Err(FetchError::Malformed {
        field: "if_match".to_owned(),
        problem: "the tag is in quotes, as in HTTP's headers: send it without quotes".to_owned(),
    })
}

/// Checks that `etag` is the requested version; empty: any.
///
/// # Errors
/// `VersionMismatch`.
pub(super) fn check_version(etag: &str, if_match: &str) -> Result<(), ReadError> {
    if if_match.is_empty() || if_match == etag {
        return Ok(());
    }
    Err(ReadError::VersionMismatch {
        etag: etag.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_engine::dataset::Layout;

    #[test]
    fn a_request_for_another_kind_names_what_to_use() {
        // Every pair of required and actual kind: those that do not match name the methods to use instead.
        let blocks = Kind::Blocks {
            block_bytes: 4096,
            count: 10,
        };
        let vectors = Kind::Vectors {
            layout: Layout::Raw,
            dim: 2,
            dtype: Dtype::F32,
            vector_bytes: 8,
            stride_bytes: 8,
            base_offset: 0,
            count: 10,
        };
        for (kind, fits, remedy) in [
            (
                blocks,
                [RequiredKind::Blocks, RequiredKind::Space],
                "FetchBlocks or FetchRanges",
            ),
            (
                vectors,
                [RequiredKind::Vectors, RequiredKind::Space],
                "FetchVectors, ScoreVectors or FetchRanges",
            ),
            (
                Kind::Objects,
                [RequiredKind::Objects; 2],
                "FetchObjects or ReadObject",
            ),
        ] {
            for wanted in [
                RequiredKind::Blocks,
                RequiredKind::Vectors,
                RequiredKind::Space,
                RequiredKind::Objects,
            ] {
                match wanted.check("d", kind) {
                    Ok(()) => assert!(fits.contains(&wanted), "{wanted:?} {kind:?}"),
                    Err(error) => {
                        assert!(!fits.contains(&wanted), "{wanted:?} {kind:?}");
                        assert!(error.to_string().contains(remedy), "{error}");
                    }
                }
            }
        }
    }
}
