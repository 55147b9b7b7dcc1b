//! Reads as requests ask for them, whatever transport they came by: checks a request whole before anything is queued.
//!
//! Checked in this order: draining, the dataset, its kind, the lists, the number of items, the requests in flight,
//! the deadline, the bytes of the answer. A slot among the requests in flight is taken before objects are opened,
//! so that a refused request costs no system call; it is given back when the answer is there (the memory budget
//! bounds what is written out after that).
//!
//! Deliberately absent: codes and status (`status` has the table), and waiting for room: what is over a bound is
//! refused at once.

use crate::config::Limits;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesOrdered;
use prometheus::{IntCounter, IntCounterVec, Opts};
use ringfetch_engine::batch::{Batch, Fetched};
use ringfetch_engine::buffer::Share;
use ringfetch_engine::dataset::{Dataset, Kind, OpenFile};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use ringfetch_engine::error::{ReadError, Resource};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

/// Objects of one request that are opened at the same time. Misses go to the blocking pool, 512 threads by default:
/// one request must not take them all.
const OPENS_AT_ONCE: usize = 16;

/// Datasets that an error names.
const KNOWN_NAMES_MAX: usize = 16;

/// Longest dataset name there can be; a longer one that was asked for is cut where it is repeated.
const NAME_CHARS_MAX: usize = 128;

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
    #[error(
        "{field}: {items} items, and one request may have {max} (limits.items_per_request): split the batch"
    )]
    TooManyItems {
        /// The request field.
        field: &'static str,
        /// How many.
        items: usize,
        /// The limit.
        max: u32,
    },
    /// A larger answer than one request may have.
    #[error(
        "the answer would have {bytes} bytes, and one may have {max} (limits.response_bytes): split the batch"
    )]
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

/// Why a request was refused: the `reason` label of `ringfetch_rejected_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rejection {
    Items,
    ResponseBytes,
    RequestsInFlight,
    Deadline,
    Draining,
    QueuedReads,
    Memory,
    ConnectionMemory,
}

/// Every rejection at its place: `reason as usize`.
const REJECTIONS: [(Rejection, &str); 8] = [
    (Rejection::Items, "items"),
    (Rejection::ResponseBytes, "response_bytes"),
    (Rejection::RequestsInFlight, "requests_in_flight"),
    (Rejection::Deadline, "deadline"),
    (Rejection::Draining, "draining"),
    (Rejection::QueuedReads, "queued_reads"),
    (Rejection::Memory, "memory"),
    (Rejection::ConnectionMemory, "connection_memory"),
];

impl Rejection {
    /// `None` for errors that are not refusals: wrong requests and failed reads.
    fn of(error: &FetchError) -> Option<Self> {
        match error {
            FetchError::TooManyItems { .. } => Some(Self::Items),
            FetchError::ResponseTooLarge { .. } => Some(Self::ResponseBytes),
            FetchError::TooManyRequests { .. } => Some(Self::RequestsInFlight),
            FetchError::Read(ReadError::DeadlineExceeded) => Some(Self::Deadline),
            FetchError::Read(ReadError::Draining) => Some(Self::Draining),
            FetchError::Read(ReadError::Overloaded { resource }) => Some(match resource {
                Resource::QueuedReads => Self::QueuedReads,
                Resource::Memory => Self::Memory,
                Resource::ConnectionMemory => Self::ConnectionMemory,
            }),
            FetchError::DatasetNotFound { .. }
            | FetchError::WrongKind { .. }
            | FetchError::EmptyBatch { .. }
            | FetchError::ListsDiffer { .. }
            | FetchError::Malformed { .. }
            | FetchError::Read(
                ReadError::IndexOutOfRange { .. }
                | ReadError::RangeOutOfRange { .. }
                | ReadError::RangeOverflow { .. }
                | ReadError::ZeroLength
                | ReadError::ItemTooLarge { .. }
                | ReadError::ObjectNameInvalid { .. }
                | ReadError::ObjectNotFound { .. }
                | ReadError::ObjectUnreadable { .. }
                | ReadError::Truncated { .. }
                | ReadError::Device { .. }
                | ReadError::ShardFailed,
            ) => None,
        }
    }
}

/// Refusals counted by reason. Made without a registry, so that a fetcher always has them.
#[derive(Debug)]
struct Rejections {
    vec: IntCounterVec,
    children: [IntCounter; REJECTIONS.len()],
}

impl Rejections {
    fn new() -> Self {
        let opts = Opts::new(
            "ringfetch_rejected_total",
            "Requests refused because of a bound, a deadline or the drain, by reason.",
        );
        let vec = match IntCounterVec::new(opts, &["reason"]) {
            Ok(vec) => vec,
            // The name and the label are constants that the crate accepts; the tests make one.
            Err(error) => unreachable!("the rejection counter is well formed: {error}"),
        };
        let children = REJECTIONS.map(|(_, reason)| vec.with_label_values(&[reason]));
        Self { vec, children }
    }
}

/// A place among the requests in flight; given back on drop.
#[derive(Debug)]
struct InFlight<'a> {
    count: &'a AtomicU32,
}

impl<'a> InFlight<'a> {
    fn enter(count: &'a AtomicU32, max: u32) -> Result<Self, FetchError> {
        // `fetch_add` first: two that race for the last place cannot both get it. The guard takes the count back
        // where there was none left.
        let before = count.fetch_add(1, Ordering::Relaxed);
        let entered = Self { count };
        if before < max {
            Ok(entered)
        } else {
            Err(FetchError::TooManyRequests { max })
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Items<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Blocks(indices) => indices.len(),
            Self::Vectors(ids) => ids.len(),
            Self::Ranges { offsets, .. } => offsets.len(),
            Self::Objects { names, .. } => names.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The request field that lists them.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Blocks(_) => "indices",
            Self::Vectors(_) => "ids",
            Self::Ranges { .. } => "offsets",
            Self::Objects { .. } => "names",
        }
    }

    /// Whether the lists that must pair up do.
    fn check_pairs(&self) -> Result<(), FetchError> {
        let pair = |field, got, of, expected| {
            if got == expected {
                Ok(())
            } else {
                Err(FetchError::ListsDiffer {
                    field,
                    got,
                    of,
                    expected,
                })
            }
        };
        match self {
            Self::Blocks(_) | Self::Vectors(_) => Ok(()),
            Self::Ranges { offsets, lengths } => pair("lengths", lengths.len(), "offsets", offsets.len()),
            Self::Objects {
                names,
                offsets,
                lengths,
            } => {
                if !offsets.is_empty() {
                    pair("offsets", offsets.len(), "names", names.len())?;
                }
                if !lengths.is_empty() {
                    pair("lengths", lengths.len(), "names", names.len())?;
                }
                Ok(())
            }
        }
    }
}

/// What about a request can be checked without the dataset's files.
fn check(name: &str, kind: Kind, items: Items<'_>, limits: &Limits) -> Result<(), FetchError> {
    let wrong = |kind, remedy| {
        Err(FetchError::WrongKind {
            name: name.to_owned(),
            kind,
            remedy,
        })
    };
    match (items, kind) {
        (Items::Blocks(_), Kind::Blocks { .. })
        | (Items::Vectors(_), Kind::Vectors { .. })
        | (Items::Ranges { .. }, Kind::Blocks { .. } | Kind::Vectors { .. })
        | (Items::Objects { .. }, Kind::Objects) => {}
        (Items::Vectors(_) | Items::Objects { .. }, Kind::Blocks { .. }) => {
            return wrong("blocks", "FetchBlocks or FetchRanges");
        }
        (Items::Blocks(_) | Items::Objects { .. }, Kind::Vectors { .. }) => {
            return wrong("vectors", "FetchVectors or FetchRanges");
        }
        (Items::Blocks(_) | Items::Vectors(_) | Items::Ranges { .. }, Kind::Objects) => {
            return wrong("objects", "FetchObjects");
        }
    }
    if items.is_empty() {
        return Err(FetchError::EmptyBatch { field: items.field() });
    }
    items.check_pairs()?;
    if u32::try_from(items.len()).is_ok_and(|count| count <= limits.items_per_request) {
        Ok(())
    } else {
        Err(FetchError::TooManyItems {
            field: items.field(),
            items: items.len(),
            max: limits.items_per_request,
        })
    }
}

/// `Some(error)` for an extent that lies inside `end` bytes and is larger than any answer. An extent that does not
/// lie inside is the batch's to name: out of range comes before too large.
fn too_large(offset: u64, length: u64, end: u64, max: u64) -> Option<ReadError> {
    let inside = offset.checked_add(length).is_some_and(|last| last <= end);
    (inside && length > max).then_some(ReadError::ItemTooLarge { length, max })
}

#[derive(Debug)]
struct Inner {
    engine: Engine,
    datasets: Arc<BTreeMap<String, Arc<Dataset>>>,
    limits: Limits,
    in_flight: AtomicU32,
    draining: AtomicBool,
    rejections: Rejections,
}

/// One way to read, shared by every transport. Clones share it.
#[derive(Debug, Clone)]
pub struct Fetcher {
    inner: Arc<Inner>,
}

impl Fetcher {
    /// A fetcher over open datasets.
    pub fn new(engine: Engine, datasets: Vec<Arc<Dataset>>, limits: Limits) -> Self {
        let datasets = datasets
            .into_iter()
            .map(|dataset| (dataset.name().to_owned(), dataset))
            .collect();
        Self {
            inner: Arc::new(Inner {
                engine,
                datasets: Arc::new(datasets),
                limits,
                in_flight: AtomicU32::new(0),
                draining: AtomicBool::new(false),
                rejections: Rejections::new(),
            }),
        }
    }

    /// Registers `ringfetch_rejected_total{reason}`.
    ///
    /// # Errors
    /// The name is taken in this registry.
    pub fn register_metrics(&self, registry: &prometheus::Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(self.inner.rejections.vec.clone()))
    }

    /// The engine beneath.
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// The limits in force.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Every dataset, by name.
    pub fn datasets(&self) -> Vec<Arc<Dataset>> {
        self.inner.datasets.values().cloned().collect()
    }

    /// One dataset.
    ///
    /// # Errors
    /// `DatasetNotFound`.
    pub fn dataset(&self, name: &str) -> Result<Arc<Dataset>, FetchError> {
        self.inner
            .datasets
            .get(name)
            .cloned()
            .ok_or_else(|| FetchError::DatasetNotFound {
                name: name.chars().take(NAME_CHARS_MAX).collect(),
                known: known(&self.inner.datasets),
            })
    }

    /// Reads a batch. What is wrong with one item is in the answer's errors, unless `fail_fast`; an item larger than
    /// any answer can be is such an error too.
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
        let result = self.fetch_uncounted(dataset, items, context).await;
        if let Err(error) = &result {
            self.count_rejection(error);
        }
        result
    }

    /// From now on every request is answered `Draining`.
    pub fn start_draining(&self) {
        self.inner.draining.store(true, Ordering::Release);
    }

    /// Whether it drains.
    pub fn is_draining(&self) -> bool {
        self.inner.draining.load(Ordering::Acquire)
    }

    /// The largest item an answer can hold: bounded by the limit, by the memory, and by the 32 bits of the lengths.
    pub fn item_bytes_max(&self) -> u64 {
        self.inner
            .limits
            .response_bytes
            .min(self.inner.engine.response_bytes_max())
            .min(u64::from(u32::MAX))
    }

    /// Counts a refusal; other errors are not counted here.
    fn count_rejection(&self, error: &FetchError) {
        if let Some(reason) = Rejection::of(error) {
            self.inner.rejections.children[reason as usize].inc();
        }
    }

    async fn fetch_uncounted(
        &self,
        name: &str,
        items: Items<'_>,
        context: CallContext,
    ) -> Result<(Arc<Dataset>, Fetched), FetchError> {
        if self.is_draining() {
            return Err(ReadError::Draining.into());
        }
        let dataset = self.dataset(name)?;
        check(name, dataset.kind(), items, &self.inner.limits)?;
        let _in_flight = InFlight::enter(&self.inner.in_flight, self.inner.limits.requests_in_flight)?;
        if context
            .deadline
            .is_some_and(|deadline| deadline <= Instant::now())
        {
            return Err(ReadError::DeadlineExceeded.into());
        }
        let batch = self.plan(&dataset, items).await;
        let max = self.item_bytes_max();
        if batch.data_bytes() > max {
            return Err(FetchError::ResponseTooLarge {
                bytes: batch.data_bytes(),
                max,
            });
        }
        let options = SubmitOptions {
            deadline: context.deadline,
            share: context.share,
            fail_fast: context.fail_fast,
        };
        let fetched = self.inner.engine.submit(batch, options)?.await?;
        Ok((dataset, fetched))
    }

    /// The batch of a checked request. Opens objects; touches nothing else.
    async fn plan(&self, dataset: &Arc<Dataset>, items: Items<'_>) -> Batch {
        let max = self.item_bytes_max();
        let mut batch = Batch::new(Arc::clone(dataset), items.len());
        match items {
            Items::Blocks(items) | Items::Vectors(items) => {
                let length = match dataset.kind() {
                    Kind::Blocks { block_bytes, .. } => u64::from(block_bytes),
                    Kind::Vectors { vector_bytes, .. } => u64::from(vector_bytes),
                    Kind::Objects => 0,
                };
                let blocks = matches!(dataset.kind(), Kind::Blocks { .. });
                for item in items {
                    if length > max {
                        batch.push_failed(ReadError::ItemTooLarge { length, max });
                    } else if blocks {
                        batch.push_block(*item);
                    } else {
                        batch.push_vector(*item);
                    }
                }
            }
            Items::Ranges { offsets, lengths } => {
                let end = dataset.length_bytes();
                for (offset, length) in offsets.iter().zip(lengths) {
                    match too_large(*offset, *length, end, max) {
                        Some(error) => batch.push_failed(error),
                        None => batch.push_range(*offset, *length),
                    }
                }
            }
            Items::Objects {
                names,
                offsets,
                lengths,
            } => {
                // A plain loop where `buffered` would do: its closure over a borrowed name keeps the future from being
                // `Send` for every lifetime, which transports need.
                let mut waiting = names.iter();
                let mut opening = FuturesOrdered::new();
                for item in 0..names.len() {
                    while opening.len() < OPENS_AT_ONCE
                        && let Some(name) = waiting.next()
                    {
                        opening.push_back(dataset.object(name));
                    }
                    let Some(object) = opening.next().await else { break };
                    let offset = offsets.get(item).copied().unwrap_or(0);
                    let length = lengths.get(item).copied().filter(|length| *length > 0);
                    match object {
                        Ok(object) => push_object(&mut batch, &object, offset, length, max),
                        Err(error) => batch.push_failed(error),
                    }
                }
            }
        }
        batch
    }
}

fn push_object(batch: &mut Batch, object: &Arc<OpenFile>, offset: u64, length: Option<u64>, max: u64) {
    let end = object.length_bytes();
    let wanted = length.unwrap_or_else(|| end.saturating_sub(offset));
    match too_large(offset, wanted, end, max) {
        Some(error) => batch.push_failed(error),
        None => batch.push_object(object, offset, length),
    }
}

/// The datasets there are, for an error's message: a few of them, and how many more.
fn known<V>(datasets: &BTreeMap<String, V>) -> String {
    if datasets.is_empty() {
        return "none".to_owned();
    }
    let mut names = datasets
        .keys()
        .take(KNOWN_NAMES_MAX)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    if datasets.len() > KNOWN_NAMES_MAX {
        names.push_str(&format!(" and {} more", datasets.len() - KNOWN_NAMES_MAX));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfetch_engine::dataset::{Dtype, Layout};

    fn limits() -> Limits {
        Limits {
            items_per_request: 4,
            response_bytes: 1 << 20,
            request_bytes: 1 << 20,
            requests_in_flight: 2,
            requests_per_connection: 2,
            stream_requests_in_flight: 2,
            connections: 2,
            http_ranges: 2,
        }
    }

    const BLOCKS: Kind = Kind::Blocks {
        block_bytes: 4096,
        count: 10,
    };
    const VECTORS: Kind = Kind::Vectors {
        layout: Layout::Raw,
        dim: 2,
        dtype: Dtype::F32,
        vector_bytes: 8,
        stride_bytes: 8,
        base_offset: 0,
        count: 10,
    };

    #[test]
    fn a_request_for_another_kind_names_the_right_method() {
        // Every wrong pairing of items and kind is refused with the method that fits the dataset; the right ones pass.
        let names = ["a".to_owned()];
        let blocks = Items::Blocks(&[1]);
        let vectors = Items::Vectors(&[1]);
        let ranges = Items::Ranges {
            offsets: &[1],
            lengths: &[1],
        };
        let objects = Items::Objects {
            names: &names,
            offsets: &[],
            lengths: &[],
        };
        for (items, kind, remedy) in [
            (blocks, BLOCKS, None),
            (vectors, VECTORS, None),
            (ranges, BLOCKS, None),
            (ranges, VECTORS, None),
            (objects, Kind::Objects, None),
            (vectors, BLOCKS, Some("FetchBlocks or FetchRanges")),
            (objects, BLOCKS, Some("FetchBlocks or FetchRanges")),
            (blocks, VECTORS, Some("FetchVectors or FetchRanges")),
            (objects, VECTORS, Some("FetchVectors or FetchRanges")),
            (blocks, Kind::Objects, Some("FetchObjects")),
            (vectors, Kind::Objects, Some("FetchObjects")),
            (ranges, Kind::Objects, Some("FetchObjects")),
        ] {
            let found = match check("d", kind, items, &limits()) {
                Ok(()) => None,
                Err(FetchError::WrongKind { remedy, .. }) => Some(remedy),
                Err(other) => panic!("{other}"),
            };
            assert_eq!(found, remedy, "{items:?} {kind:?}");
        }
    }

    #[test]
    fn lists_are_checked_before_they_are_counted() {
        // Empty, differing and too long lists: each is refused with its field; optional lists may be empty.
        let names = ["a".to_owned(), "b".to_owned()];
        let differ = |field, got, of, expected| {
            Err(FetchError::ListsDiffer {
                field,
                got,
                of,
                expected,
            })
        };
        let limits = limits();
        assert_eq!(
            check("d", BLOCKS, Items::Blocks(&[]), &limits),
            Err(FetchError::EmptyBatch { field: "indices" })
        );
        assert_eq!(
            check(
                "d",
                BLOCKS,
                Items::Ranges {
                    offsets: &[1, 2],
                    lengths: &[1]
                },
                &limits
            ),
            differ("lengths", 1, "offsets", 2)
        );
        assert_eq!(
            check(
                "d",
                Kind::Objects,
                Items::Objects {
                    names: &names,
                    offsets: &[1],
                    lengths: &[]
                },
                &limits
            ),
            differ("offsets", 1, "names", 2)
        );
        assert_eq!(
            check(
                "d",
                Kind::Objects,
                Items::Objects {
                    names: &names,
                    offsets: &[],
                    lengths: &[1; 3]
                },
                &limits
            ),
            differ("lengths", 3, "names", 2)
        );
        assert_eq!(
            check("d", VECTORS, Items::Vectors(&[0; 5]), &limits),
            Err(FetchError::TooManyItems {
                field: "ids",
                items: 5,
                max: 4
            })
        );
        assert_eq!(check("d", VECTORS, Items::Vectors(&[0; 4]), &limits), Ok(()));
    }

    #[test]
    fn places_in_flight_are_given_back() {
        // Two places: the third request is refused at once, and a place that is given back can be taken again.
        let count = AtomicU32::new(0);
        let first = InFlight::enter(&count, 2).unwrap();
        let _second = InFlight::enter(&count, 2).unwrap();
        assert_eq!(
            InFlight::enter(&count, 2).unwrap_err(),
            FetchError::TooManyRequests { max: 2 }
        );
        drop(first);
        assert!(InFlight::enter(&count, 2).is_ok());
    }

    #[test]
    fn out_of_range_comes_before_too_large() {
        // With answers of at most 10 bytes: a long extent inside is too large, one that leaves or overflows is not.
        assert_eq!(
            too_large(0, 11, 100, 10),
            Some(ReadError::ItemTooLarge { length: 11, max: 10 })
        );
        assert_eq!(too_large(0, 10, 100, 10), None);
        assert_eq!(too_large(95, 11, 100, 10), None);
        assert_eq!(too_large(u64::MAX, 11, 100, 10), None);
    }

    #[test]
    fn every_refusal_has_its_reason() {
        // The table stands in the order of the enum, and each refusal is counted under its own reason.
        let rejections = Rejections::new();
        for (place, (reason, label)) in REJECTIONS.iter().enumerate() {
            assert_eq!(*reason as usize, place);
            rejections.children[place].inc();
            assert_eq!(rejections.vec.with_label_values(&[label]).get(), 1);
        }
        let overloaded = FetchError::Read(ReadError::Overloaded {
            resource: Resource::ConnectionMemory,
        });
        assert_eq!(Rejection::of(&overloaded), Some(Rejection::ConnectionMemory));
        assert_eq!(Rejection::of(&FetchError::Read(ReadError::ZeroLength)), None);
    }

    #[test]
    fn an_error_names_some_datasets_and_counts_the_rest() {
        // Twenty datasets: sixteen are named, four are counted; without any it says so.
        let datasets: BTreeMap<String, ()> = (0..20).map(|number| (format!("d{number:02}"), ())).collect();
        let known_names = known(&datasets);
        assert!(
            known_names.starts_with("d00, d01, ") && known_names.ends_with("d15 and 4 more"),
            "{known_names}"
        );
        assert_eq!(known::<()>(&BTreeMap::new()), "none");
    }
}
