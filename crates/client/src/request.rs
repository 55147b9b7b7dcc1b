//! Requests and answers as values, the same for calls and streams, and the check of an answer against its
//! request.

use crate::error::Error;
use crate::items::{Blocks, Expected, Items};
use crate::message::Data;
use crate::vectors::Vectors;
use ringfetch_proto::v1 as wire;
use wire::fetch_stream_request::Request as WireRequest;
use wire::fetch_stream_response::Response as WireAnswer;

/// `length` bytes from `offset` of a dataset's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Bytes; at least 1.
    pub length: u64,
}

impl ByteRange {
    /// `length` bytes, at least 1, from `offset`.
    pub fn new(offset: u64, length: u64) -> Self {
        Self { offset, length }
    }
}

/// An object, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ObjectPart {
    /// Relative to the dataset's directory, `/` between the parts.
    pub name: String,
    /// First byte.
    pub offset: u64,
    /// Bytes, at least 1; `None`: to the object's end.
    pub length: Option<u64>,
    /// The required version, as in [`Items::etags`] or [`crate::ObjectStream::etag`], of the same server; empty: any.
    pub if_match: String,
}

impl ObjectPart {
    /// A whole object.
    pub fn whole(name: impl Into<String>) -> Self {
        Self::new(name, 0, None)
    }

    /// `length` bytes, at least 1, from `offset`; `None`: to the object's end.
    pub fn new(name: impl Into<String>, offset: u64, length: impl Into<Option<u64>>) -> Self {
        Self {
            name: name.into(),
            offset,
            length: length.into(),
            if_match: String::new(),
        }
    }

    /// 0: to the object's end.
    ///
    /// # Errors
    /// `Invalid` for 0 bytes, which would mean that on the wire.
    pub(crate) fn length_on_wire(&self) -> Result<u64, Error> {
        match self.length {
            Some(0) => Err(Error::invalid(
                "length",
                "is 0: ask for at least one byte, or for None, to the end",
            )),
            length => Ok(length.unwrap_or(0)),
        }
    }
}

/// A batch of reads of one dataset, in any order, repeats and overlaps allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    dataset: String,
    if_match: String,
    items: Batch,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Batch {
    Blocks(Vec<u64>),
    Vectors(Vec<u64>),
    Ranges(Vec<ByteRange>),
    Objects(Vec<ObjectPart>),
}

/// The answer to a [`Request`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Answer {
    /// To [`Request::blocks`].
    Blocks(Blocks),
    /// To [`Request::vectors`].
    Vectors(Vectors),
    /// To [`Request::ranges`].
    Ranges(Items),
    /// To [`Request::objects`].
    Objects(Items),
}

impl Request {
    /// Whole blocks, by index from 0.
    pub fn blocks(dataset: impl Into<String>, indices: impl Into<Vec<u64>>) -> Self {
        Self::new(dataset, Batch::Blocks(indices.into()))
    }

    /// Vectors, by id from 0.
    pub fn vectors(dataset: impl Into<String>, ids: impl Into<Vec<u64>>) -> Self {
        Self::new(dataset, Batch::Vectors(ids.into()))
    }

    /// Byte ranges of a dataset of kind blocks or vectors.
    pub fn ranges(dataset: impl Into<String>, ranges: impl Into<Vec<ByteRange>>) -> Self {
        Self::new(dataset, Batch::Ranges(ranges.into()))
    }

    /// Objects, whole or in part.
    pub fn objects(dataset: impl Into<String>, parts: impl Into<Vec<ObjectPart>>) -> Self {
        Self::new(dataset, Batch::Objects(parts.into()))
    }

    fn new(dataset: impl Into<String>, items: Batch) -> Self {
        Self {
            dataset: dataset.into(),
            if_match: String::new(),
            items,
        }
    }

    /// Requires this version of the dataset, as in an answer's [`Items::etag`]; FAILED_PRECONDITION if it is
    /// another, which it is at any other server. Objects have a version each, [`ObjectPart::if_match`]: for them this is
    /// `Invalid`.
    #[must_use]
    pub fn if_match(mut self, etag: impl Into<String>) -> Self {
        self.if_match = etag.into();
        self
    }

    /// The wire message, and what to check its answer against.
    pub(crate) fn into_wire(self, fail_fast: bool) -> Result<(WireRequest, Wanted), Error> {
        let (dataset, if_match) = (self.dataset, self.if_match);
        let items = match &self.items {
            Batch::Blocks(list) | Batch::Vectors(list) => Expected::Uniform { items: list.len() },
            Batch::Ranges(ranges) => Expected::Each(ranges.iter().map(|range| Some(range.length)).collect()),
            Batch::Objects(parts) => Expected::Each(parts.iter().map(|part| part.length).collect()),
        };
        let mut versions = if if_match.is_empty() {
            Vec::new()
        } else {
            vec![if_match.clone()]
        };
        let (kind, request) = match self.items {
            Batch::Blocks(indices) => {
                let request = wire::FetchBlocksRequest {
                    dataset,
                    indices,
                    fail_fast,
                    if_match,
                };
                (Kind::Blocks, WireRequest::Blocks(request))
            }
            Batch::Vectors(ids) => {
                let request = wire::FetchVectorsRequest {
                    dataset,
                    ids,
                    fail_fast,
                    if_match,
                };
                (Kind::Vectors, WireRequest::Vectors(request))
            }
            Batch::Ranges(ranges) => {
                let (offsets, lengths) = ranges.iter().map(|range| (range.offset, range.length)).unzip();
                let request = wire::FetchRangesRequest {
                    dataset,
                    offsets,
                    lengths,
                    fail_fast,
                    if_match,
                };
                (Kind::Ranges, WireRequest::Ranges(request))
            }
            Batch::Objects(_) if !if_match.is_empty() => {
                let problem = "is a dataset's: objects have a version each (ObjectPart::if_match)";
                return Err(Error::invalid("if_match", problem));
            }
            Batch::Objects(parts) => {
                let on_wire = parts.iter().map(ObjectPart::length_on_wire);
                let on_wire: Vec<u64> = on_wire.collect::<Result<_, _>>()?;
                let (mut offsets, mut lengths) = (Vec::new(), Vec::new());
                if parts.iter().any(|part| part.offset > 0) {
                    offsets = parts.iter().map(|part| part.offset).collect();
                }
                if parts.iter().any(|part| part.length.is_some()) {
                    lengths = on_wire;
                }
                if parts.iter().any(|part| !part.if_match.is_empty()) {
                    versions = parts.iter().map(|part| part.if_match.clone()).collect();
                }
                let request = wire::FetchObjectsRequest {
                    dataset,
                    names: parts.into_iter().map(|part| part.name).collect(),
                    offsets,
                    lengths,
                    fail_fast,
                    if_match: versions.clone(),
                };
                (Kind::Objects, WireRequest::Objects(request))
            }
        };
        let wanted = Wanted {
            kind,
            items,
            versions,
        };
        Ok((request, wanted))
    }
}

/// What an answer is checked against.
#[derive(Debug)]
pub(crate) struct Wanted {
    kind: Kind,
    items: Expected,
    /// That of the dataset, or of each object, where an empty one means any; empty: any of all.
    versions: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Blocks,
    Vectors,
    Ranges,
    Objects,
}

impl Answer {
    /// Checks an answer from the wire against its request.
    pub(crate) fn from_wire(wanted: &Wanted, answer: WireAnswer, data: Data) -> Result<Self, Error> {
        let items = &wanted.items;
        let answer = match (wanted.kind, answer) {
            (_, WireAnswer::Status(status)) => return Err(Error::from_rpc_status(status)),
            (Kind::Blocks, WireAnswer::Blocks(answer)) => Self::Blocks(Blocks::check(items, answer, data)?),
            (Kind::Vectors, WireAnswer::Vectors(answer)) => {
                Self::Vectors(Vectors::check(items, answer, data)?)
            }
            (Kind::Ranges, WireAnswer::Ranges(answer)) => {
                let items = Items::check(items, None, &answer.lengths, answer.errors, data)?;
                Self::Ranges(items.of_version(answer.etag))
            }
            (Kind::Objects, WireAnswer::Objects(answer)) => {
                let items = Items::check(items, None, &answer.lengths, answer.errors, data)?;
                Self::Objects(items.of_versions(answer.etags)?)
            }
            (Kind::Blocks | Kind::Vectors | Kind::Ranges | Kind::Objects, _) => return Err(other_kind()),
        };
        answer.check_versions(&wanted.versions)?;
        Ok(answer)
    }

    /// A server that does not know `if_match` would ignore it.
    fn check_versions(&self, versions: &[String]) -> Result<(), Error> {
        let items = self.items();
        let Self::Objects(_) = self else {
            return match versions.first() {
                Some(version) => check_version(version, items.etag()),
                None => Ok(()),
            };
        };
        for (i, (version, etag)) in versions.iter().zip(items.etags()).enumerate() {
            // An item that failed may be of any version.
            if !version.is_empty() && items.get(i).is_ok() {
                check_version(version, etag)?;
            }
        }
        Ok(())
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

pub(crate) fn check_version(wanted: &str, etag: &str) -> Result<(), Error> {
    if wanted != etag {
        let problem = format!("it is of version {etag:?}, where {wanted:?} was asked for");
        return Err(Error::protocol(problem));
    }
    Ok(())
}

pub(crate) fn other_kind() -> Error {
    Error::protocol("the answer is of another kind than the request")
}
