//! Reads as requests ask for them, whatever transport they came by: checks a request whole before anything is queued.

use crate::config::Limits;
use ringfetch_engine::batch::Fetched;
use ringfetch_engine::buffer::Share;
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::Engine;
use ringfetch_engine::error::ReadError;
use std::sync::Arc;
use std::time::Instant;

/// The items of one request.
#[derive(Debug, Clone, Copy)]
pub enum Items<'a> {
    /// Block indices.
    Blocks(&'a [u64]),
    /// Vector ids.
    Vectors(&'a [u64]),
    /// Byte ranges of the address space; both lists have the same length.
    Ranges {
        /// First bytes.
        offsets: &'a [u64],
        /// Lengths, each at least 1.
        lengths: &'a [u64],
    },
    /// Objects.
    Objects {
        /// Names.
        names: &'a [String],
        /// Empty (from the beginning), or one for each name.
        offsets: &'a [u64],
        /// Empty (to the end), or one for each name; 0 means to the end.
        lengths: &'a [u64],
    },
}

/// What a transport knows about a request.
#[derive(Debug, Clone, Default)]
pub struct CallContext {
    /// When the answer stops being worth anything.
    pub deadline: Option<Instant>,
    /// The connection's share of the response memory.
    pub share: Option<Arc<Share>>,
    /// Whether the first item error is to fail the request.
    pub fail_fast: bool,
}

/// Why a request failed as a whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// No such dataset.
    #[error("dataset: there is no dataset {name:?}; there are: {known}")]
    DatasetNotFound {
        /// The name asked for.
        name: String,
        /// The names there are, comma separated.
        known: String,
    },
    /// The dataset is of another kind than the method is for.
    #[error("dataset: {name:?} is of kind {kind}; use {remedy}")]
    WrongKind {
        /// The name asked for.
        name: String,
        /// What it is.
        kind: &'static str,
        /// What to call instead.
        remedy: &'static str,
    },
    /// No items.
    #[error("{field}: the batch is empty: ask for at least one item")]
    EmptyBatch {
        /// The request field.
        field: &'static str,
    },
    /// Lists that must pair up do not.
    #[error("{field}: {got} entries for {expected} {of}: the lists must have the same length")]
    ListsDiffer {
        /// The request field that is off.
        field: &'static str,
        /// Its length.
        got: usize,
        /// The other field.
        of: &'static str,
        /// The other field's length.
        expected: usize,
    },
    /// More items than one request may have.
    #[error("{field}: {items} items, and one request may have {max} (limits.items_per_request): split the batch")]
    TooManyItems {
        /// The request field.
        field: &'static str,
        /// How many.
        items: usize,
        /// The limit.
        max: u32,
    },
    /// A larger answer than one request may have.
    #[error("the answer would have {bytes} bytes, and one may have {max} (limits.response_bytes): split the batch")]
    ResponseTooLarge {
        /// How many.
        bytes: u64,
        /// The limit.
        max: u64,
    },
    /// More requests in flight than allowed.
    #[error("overloaded: {max} requests are in flight (limits.requests_in_flight); retry after a moment")]
    TooManyRequests {
        /// The limit.
        max: u32,
    },
    /// A malformed request.
    #[error("{field}: {problem}")]
    Malformed {
        /// The request field.
        field: String,
        /// What is wrong and what would mend it.
        problem: String,
    },
    /// The engine's answer.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// One way to read, shared by every transport. Clones share it.
#[derive(Debug, Clone)]
pub struct Fetcher {}

impl Fetcher {
    /// A fetcher over open datasets.
    pub fn new(engine: Engine, datasets: Vec<Arc<Dataset>>, limits: Limits) -> Self {
        let _ = (engine, datasets, limits);
        todo!()
    }
    /// The engine beneath.
    pub fn engine(&self) -> &Engine {
        todo!()
    }
    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        todo!()
    }
    /// Every dataset, by name.
    pub fn datasets(&self) -> Vec<Arc<Dataset>> {
        todo!()
    }
    /// One dataset.
    ///
    /// # Errors
    /// `DatasetNotFound`.
    pub fn dataset(&self, name: &str) -> Result<Arc<Dataset>, FetchError> {
        let _ = name;
        todo!()
    }
    /// Reads a batch.
    ///
    /// # Errors
    /// Whatever fails the request as a whole.
    ///
    /// # Cancel safety
    /// Dropping the future gives the batch up; see [`ringfetch_engine::engine::Ticket`].
    pub async fn fetch(
        &self,
        dataset: &str,
        items: Items<'_>,
        context: CallContext,
    ) -> Result<(Arc<Dataset>, Fetched), FetchError> {
        let _ = (dataset, items, context);
        todo!()
    }
    /// From now on every request is answered `Draining`.
    pub fn start_draining(&self) {
        todo!()
    }
    /// Whether it drains.
    pub fn is_draining(&self) -> bool {
        todo!()
    }
}
