//! Requests and answers as values, the same for a call and for a stream, and the check of one against the other.

use crate::error::Error;
use crate::items::{Blocks, Expected, Items};
use crate::vectors::Vectors;
use ringfetch_proto::v1 as wire;
use wire::fetch_stream_request::Request as WireRequest;
use wire::fetch_stream_response::Response as WireAnswer;

/// `length` bytes from `offset` of a dataset's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Bytes; at least 1.
    pub length: u64,
}

/// An object, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectPart {
    /// Relative to the dataset's directory, `/` between the parts.
    pub name: String,
    /// First byte.
    pub offset: u64,
    /// Bytes, at least 1; `None`: to the object's end.
    pub length: Option<u64>,
}

impl ObjectPart {
    /// A whole object.
    pub fn whole(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            offset: 0,
            length: None,
        }
    }
}

/// A batch of reads of one dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Whole blocks.
    Blocks {
        /// Of kind blocks.
        dataset: String,
        /// From 0, in any order, repeats allowed.
        indices: Vec<u64>,
    },
    /// Vectors.
    Vectors {
        /// Of kind vectors.
        dataset: String,
        /// From 0, in any order, repeats allowed.
        ids: Vec<u64>,
    },
    /// Byte ranges.
    Ranges {
        /// Of kind blocks or vectors.
        dataset: String,
        /// In any order; they may overlap.
        ranges: Vec<ByteRange>,
    },
    /// Objects, whole or in part.
    Objects {
        /// Of kind objects.
        dataset: String,
        /// In any order.
        parts: Vec<ObjectPart>,
    },
}

/// The answer to a [`Request`].
#[derive(Debug, Clone)]
pub enum Answer {
    /// To [`Request::Blocks`].
    Blocks(Blocks),
    /// To [`Request::Vectors`].
    Vectors(Vectors),
    /// To [`Request::Ranges`].
    Ranges(Items),
    /// To [`Request::Objects`].
    Objects(Items),
}

impl Request {
    /// What goes over the wire, and what its answer is held against.
    pub(crate) fn into_wire(self, fail_fast: bool) -> Result<(WireRequest, Expected), Error> {
        Ok(match self {
            Self::Blocks { dataset, indices } => {
                let expected = Expected::Uniform { items: indices.len() };
                (
                    WireRequest::Blocks(wire::FetchBlocksRequest {
                        dataset,
                        indices,
                        fail_fast,
                        if_match: String::new(),
                    }),
                    expected,
                )
            }
            Self::Vectors { dataset, ids } => {
                let expected = Expected::Uniform { items: ids.len() };
                (
                    WireRequest::Vectors(wire::FetchVectorsRequest {
                        dataset,
                        ids,
                        fail_fast,
                        if_match: String::new(),
                    }),
                    expected,
                )
            }
            Self::Ranges { dataset, ranges } => {
                let expected = Expected::Each(ranges.iter().map(|range| Some(range.length)).collect());
                let (offsets, lengths) = ranges.iter().map(|range| (range.offset, range.length)).unzip();
                (
                    WireRequest::Ranges(wire::FetchRangesRequest {
                        dataset,
                        offsets,
                        lengths,
                        fail_fast,
                        if_match: String::new(),
                    }),
                    expected,
                )
            }
            Self::Objects { dataset, parts } => {
                // On the wire 0 means "to the end", which is not what a length of 0 asks for.
                if parts.iter().any(|part| part.length == Some(0)) {
                    return Err(Error::invalid(
                        "length",
                        "is 0: ask for at least one byte, or for None, to the end",
                    ));
                }
                let expected = Expected::Each(parts.iter().map(|part| part.length).collect());
                let (mut offsets, mut lengths) = (Vec::new(), Vec::new());
                if parts.iter().any(|part| part.offset > 0) {
                    offsets = parts.iter().map(|part| part.offset).collect();
                }
                if parts.iter().any(|part| part.length.is_some()) {
                    lengths = parts.iter().map(|part| part.length.unwrap_or(0)).collect();
                }
                let names = parts.into_iter().map(|part| part.name).collect();
                let request = wire::FetchObjectsRequest {
                    dataset,
                    names,
                    offsets,
                    lengths,
                    fail_fast,
                    if_match: Vec::new(),
                };
                (WireRequest::Objects(request), expected)
            }
        })
    }
}

impl Answer {
    /// Checks what came over the wire against what was asked.
    pub(crate) fn from_wire(expected: &Expected, asked: Asked, answer: WireAnswer) -> Result<Self, Error> {
        match (asked, answer) {
            (Asked::Blocks, WireAnswer::Blocks(answer)) => Blocks::check(expected, answer).map(Self::Blocks),
            (Asked::Vectors, WireAnswer::Vectors(answer)) => {
                Vectors::check(expected, answer).map(Self::Vectors)
            }
            (Asked::Ranges, WireAnswer::Ranges(answer)) => {
                Items::check(expected, None, &answer.lengths, answer.errors, answer.data).map(Self::Ranges)
            }
            (Asked::Objects, WireAnswer::Objects(answer)) => {
                Items::check(expected, None, &answer.lengths, answer.errors, answer.data).map(Self::Objects)
            }
            (_, WireAnswer::Status(status)) => Err(Error::from_rpc_status(status)),
            (
                asked,
                WireAnswer::Blocks(_)
                | WireAnswer::Vectors(_)
                | WireAnswer::Ranges(_)
                | WireAnswer::Objects(_),
            ) => Err(Error::protocol(format!(
                "the answer to a request for {asked:?} is of another kind"
            ))),
        }
    }

    /// The items, whatever they are.
    pub fn items(&self) -> &Items {
        match self {
            Self::Blocks(blocks) => blocks,
            Self::Vectors(vectors) => vectors,
            Self::Ranges(items) | Self::Objects(items) => items,
        }
    }

    pub(crate) fn into_blocks(self) -> Result<Blocks, Error> {
        match self {
            Self::Blocks(blocks) => Ok(blocks),
            Self::Vectors(_) | Self::Ranges(_) | Self::Objects(_) => Err(other_kind()),
        }
    }

    pub(crate) fn into_vectors(self) -> Result<Vectors, Error> {
        match self {
            Self::Vectors(vectors) => Ok(vectors),
            Self::Blocks(_) | Self::Ranges(_) | Self::Objects(_) => Err(other_kind()),
        }
    }

    pub(crate) fn into_items(self) -> Result<Items, Error> {
        match self {
            Self::Ranges(items) | Self::Objects(items) => Ok(items),
            Self::Blocks(_) | Self::Vectors(_) => Err(other_kind()),
        }
    }
}

fn other_kind() -> Error {
    Error::protocol("the answer is of another kind than the request")
}

/// The kind of a request, which its answer must have too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    Blocks,
    Vectors,
    Ranges,
    Objects,
    /// Which has no answer of its own.
    Cancel,
}

impl Asked {
    pub(crate) fn of(request: &WireRequest) -> Self {
        match request {
            WireRequest::Blocks(_) => Self::Blocks,
            WireRequest::Vectors(_) => Self::Vectors,
            WireRequest::Ranges(_) => Self::Ranges,
            WireRequest::Objects(_) => Self::Objects,
            WireRequest::Cancel(_) => Self::Cancel,
        }
    }
}
