//! The items of a request, its errors, and the checks that need no reads.

use super::handle::{RequiredKind, check_unquoted};
use super::snapshot::PinnedObject;
use crate::caller::Connection;
use crate::config::Limits;
use ringfetch_engine::error::{ItemError, ReadError, ResponseMax};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most datasets that an error lists.
const KNOWN_NAMES_MAX: usize = 16;

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
        /// Empty (any version), or one for each name; an empty one means any.
        if_match: &'a [String],
    },
    /// Ranges of an object that was looked up before; both lists have the same length.
    Pinned {
        /// The object.
        object: &'a PinnedObject,
        /// First bytes.
        offsets: &'a [u64],
        /// Lengths, each at least 1.
        lengths: &'a [u64],
    },
}

/// What a transport knows about a request.
#[derive(Debug, Clone, Default)]
pub struct RequestContext {
    /// When the request arrived; `None`: now.
    pub arrived: Option<Instant>,
    /// When the client stops waiting.
    pub deadline: Option<Instant>,
    /// The connection it came on.
    pub connection: Option<Arc<Connection>>,
    /// Whether the first item error fails the request.
    pub fail_fast: bool,
}

/// A rate limit of a principal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RateLimit {
    /// Requests.
    Requests,
    /// Bytes of responses.
    Bytes,
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
    /// The principal may not read a dataset of this name, whether it exists or not.
    #[error("dataset: this principal may not read {name:?}; its line in access.principals has to name it")]
    Forbidden {
        /// The name asked for.
        name: String,
    },
    /// The principal's line was removed or changed after the request was admitted. Not `Forbidden`: the new line may
    /// allow it.
    #[error("this principal's line in access.principals has just changed: retry on a new connection")]
    Revoked,
    /// The dataset is of another kind than the method needs.
    #[error("dataset: {name:?} is of kind {kind}; use {remedy}")]
    WrongKind {
        /// The name asked for.
        name: String,
        /// Its kind.
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
    /// Lists that must have the same length differ.
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
    #[error("{field}: {items} items; the limit is {max} (limits.items_per_request): split the batch")]
    TooManyItems {
        /// The request field.
        field: &'static str,
        /// How many.
        items: usize,
        /// The limit.
        max: u32,
    },
    /// Vectors too long to be scored.
    #[error("a vector has {length} bytes, and one can be scored that has at most {max}: raise that limit")]
    VectorTooLong {
        /// The vectors' length.
        length: u64,
        /// The largest possible length.
        max: ResponseMax,
    },
    /// More requests in flight than allowed.
    #[error(
        "overloaded: {} (limits.requests_in_flight is {max}); retry after a moment",
        if *.own { "this caller has used its share of requests in flight" } else { "too many requests are in flight" }
    )]
    TooManyRequests {
        /// The limit.
        max: u32,
        /// Whether the caller's own share is used up.
        own: bool,
    },
    /// The principal has as many requests in flight as its own limit allows.
    #[error(
        "overloaded: this principal has as many requests in flight as its limit allows (requests={max}); retry after a \
         moment"
    )]
    PrincipalRequests {
        /// The limit.
        max: u64,
    },
    /// The memory for requests that are being received is used up, or the caller's share of it.
    #[error(
        "overloaded: {} (limits.request_memory is {max} bytes); retry after a moment",
        if *.own { "this caller's incomplete requests have used its share of request memory" }
        else { "incomplete requests hold all request memory" }
    )]
    RequestMemory {
        /// The limit.
        max: u64,
        /// Whether the caller's own share is used up.
        own: bool,
    },
    /// The principal exceeds one of its rate limits.
    #[error(
        "this principal's limit of {max} {} is used up; retry after {} ms",
        if matches!(rate, RateLimit::Requests) { "requests a second (requests/s)" } else { "bytes a second (bytes/s)" },
        retry_after.as_millis()
    )]
    OverRate {
        /// Which rate.
        rate: RateLimit,
        /// The limit per second.
        max: u64,
        /// When the request would be granted, if nothing else is requested meanwhile.
        retry_after: Duration,
    },
    /// Too many directories are being listed.
    #[error(
        "overloaded: {} ({max} at a time for all callers); retry after a moment",
        if *.own { "this caller has used its share of listings of objects" }
        else { "too many listings of objects are running" }
    )]
    ListingsBusy {
        /// How many at a time.
        max: u64,
        /// Whether the caller's own share is used up.
        own: bool,
    },
    /// A directory that cannot be listed.
    #[error("the dataset's directory cannot be listed: {problem}")]
    ListingFailed {
        /// Why.
        problem: String,
        /// errno of the attempt; `None`: a defect.
        errno: Option<i32>,
    },
    /// The bytes were replaced or written to after they were looked up.
    #[error("the data is being written: retry from the beginning after a moment")]
    Changed,
    /// A malformed request.
    #[error("{field}: {problem}")]
    Malformed {
        /// The request field.
        field: String,
        /// What is wrong and how to fix it.
        problem: String,
    },
    /// With `fail_fast`, the error of an item of several.
    #[error("{what} {number}: {error}")]
    Item {
        /// `item`, or `vector` for scores.
        what: &'static str,
        /// The item's position in the request, or the vector's id.
        number: u64,
        /// Why it could not be read.
        error: Box<ReadError>,
    },
    /// An error of the engine.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl FetchError {
    /// The error of a request that ends with this item of `items`.
    pub(crate) fn of_item(failed: &ItemError, items: usize) -> Self {
        let error = failed.error.clone();
        if items == 1 {
            return Self::Read(error);
        }
        Self::Item {
            what: "item",
            number: failed.item.into(),
            error: Box::new(error),
        }
    }

    /// The error of the engine, if it is one.
    pub(crate) fn read_error(&self) -> Option<&ReadError> {
        if let Self::Item { error, .. } = self {
            return Some(error);
        }
        if let Self::Read(error) = self {
            Some(error)
        } else {
            None
        }
    }
}

impl Items<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Blocks(indices) => indices.len(),
            Self::Vectors(ids) => ids.len(),
            Self::Ranges { offsets, .. } | Self::Pinned { offsets, .. } => offsets.len(),
            Self::Objects { names, .. } => names.len(),
        }
    }

    /// The kind of dataset that they need.
    pub fn required_kind(&self) -> RequiredKind {
        match self {
            Self::Blocks(_) => RequiredKind::Blocks,
            Self::Vectors(_) => RequiredKind::Vectors,
            Self::Ranges { .. } => RequiredKind::Space,
            Self::Objects { .. } | Self::Pinned { .. } => RequiredKind::Objects,
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
            Self::Ranges { .. } | Self::Pinned { .. } => "offsets",
            Self::Objects { .. } => "names",
        }
    }

    /// Checks that lists that must have equal lengths do, and what is in them as far as it is a matter of form.
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
            Self::Ranges { offsets, lengths } | Self::Pinned { offsets, lengths, .. } => {
                pair("lengths", lengths.len(), "offsets", offsets.len())
            }
            Self::Objects {
                names,
                offsets,
                lengths,
                if_match,
            } => {
                if !if_match.is_empty() {
                    pair("if_match", if_match.len(), "names", names.len())?;
                    if_match.iter().try_for_each(|tag| check_unquoted(tag))?;
                }
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

/// Whether requests on this connection may read a dataset of this name. Without a connection it is the daemon
/// itself, which may.
pub(super) fn may_read(reader: Option<&Arc<Connection>>, dataset: &str) -> bool {
    reader.is_none_or(|reader| reader.may_read(dataset))
}

/// Refuses a request whose line of the principals file was removed or changed since it was admitted. Checked after
/// what the request finds, so that this was found while the line was in force.
pub(super) fn check_in_force(reader: Option<&Arc<Connection>>) -> Result<(), FetchError> {
    match reader {
        Some(reader) if reader.is_revoked() => Err(FetchError::Revoked),
        Some(_) | None => Ok(()),
    }
}

/// Checks what needs no access to files.
pub(super) fn check(items: Items<'_>, limits: &Limits) -> Result<(), FetchError> {
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

/// `Some(error)` for an extent that lies within `end` bytes and is larger than any response. An extent that
/// does not lie within is reported by the batch: out of range comes before too large.
pub(super) fn too_large(offset: u64, length: u64, end: u64, max: ResponseMax) -> Option<ReadError> {
    let inside = offset.checked_add(length).is_some_and(|last| last <= end);
    (inside && length > max.bytes).then_some(ReadError::ItemTooLarge { length, max })
}

/// Names of datasets for an error's message: the first few, and how many more there are.
pub(super) fn known<'a>(mut names: impl Iterator<Item = &'a str>) -> String {
    let first: Vec<&str> = names.by_ref().take(KNOWN_NAMES_MAX).collect();
    match (first.join(", "), names.count()) {
        (first, _) if first.is_empty() => "none".to_owned(),
        (first, 0) => first,
        (first, more) => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            items_per_request: 4,
            response_bytes: 1 << 20,
            request_bytes: 1 << 20,
            request_memory_bytes: 4 << 20,
            requests_in_flight: 2,
            requests_per_connection: 2,
            stream_requests_in_flight: 2,
            connections: 2,
            http_ranges: 2,
            deadline: None,
        }
    }

    #[test]
    fn lists_are_checked_before_they_are_counted() {
        // Empty lists, lists of different lengths, and lists that are too long: each is refused with its
        // field; optional lists may be empty.
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
            check(Items::Blocks(&[]), &limits),
            Err(FetchError::EmptyBatch { field: "indices" })
        );
        assert_eq!(
            check(
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
                Items::Objects {
                    names: &names,
                    offsets: &[1],
                    lengths: &[],
                    if_match: &[]
                },
                &limits
            ),
            differ("offsets", 1, "names", 2)
        );
        assert_eq!(
            check(
                Items::Objects {
                    names: &names,
                    offsets: &[],
                    lengths: &[1; 3],
                    if_match: &[]
                },
                &limits
            ),
            differ("lengths", 3, "names", 2)
        );
        assert_eq!(
            check(
                Items::Objects {
                    names: &names,
                    offsets: &[],
                    lengths: &[],
                    if_match: &names[..1]
                },
                &limits
            ),
            differ("if_match", 1, "names", 2)
        );
        assert_eq!(
            check(Items::Vectors(&[0; 5]), &limits),
            Err(FetchError::TooManyItems {
                field: "ids",
                items: 5,
                max: 4
            })
        );
        assert_eq!(check(Items::Vectors(&[0; 4]), &limits), Ok(()));
    }

    #[test]
    fn out_of_range_comes_before_too_large() {
        // With responses of at most 10 bytes: a long extent inside is too large; one that ends past the end,
        // or overflows, is not.
        let max = ResponseMax::of_any(10);
        assert_eq!(
            too_large(0, 11, 100, max),
            Some(ReadError::ItemTooLarge { length: 11, max })
        );
        assert_eq!(too_large(0, 10, 100, max), None);
        assert_eq!(too_large(95, 11, 100, max), None);
        assert_eq!(too_large(u64::MAX, 11, 100, max), None);
    }

    #[test]
    fn an_error_names_some_datasets_and_counts_the_rest() {
        // Twenty datasets: sixteen are named, four are counted; without any it says so.
        let names: Vec<String> = (0..20).map(|number| format!("d{number:02}")).collect();
        let known_names = known(names.iter().map(String::as_str));
        assert!(
            known_names.starts_with("d00, d01, ") && known_names.ends_with("d15 and 4 more"),
            "{known_names}"
        );
        assert_eq!(known(std::iter::empty()), "none");
    }
}
