//! The requests of FetchService behind one trait, and the four that fetch bytes behind another.

use super::convert;
use super::encode::{ResponseFields, Tagged};
use super::service::{decode_into, refused};
use super::wire::{FieldValue, Fields, RepeatedField, TooManyFields, longest_list, visit};
use crate::error_status::ItemMessages;
use crate::fetch::{FetchError, FetchResponse, Fetcher, Items, Kind, RequestContext, ScoreQuery, Scoring};
use crate::rpc_metrics::GrpcMethod;
use bytes::Bytes;
use prost::Message;
use ringfetch_engine::batch::Lengths;
use ringfetch_engine::error::ReadError;
use ringfetch_proto::v1;
use ringfetch_score::Metric;
use std::cell::RefCell;
use std::future::Future;
use std::ops::Deref;
use std::thread::LocalKey;
use tonic::Status;

/// A request with one response: in a call of its own, or in a stream.
pub(super) trait UnaryRequest: Message + Default + Send + Sync + 'static {
    /// The response, without the bytes of its `data`.
    type Answer: ResponseFields + Send;
    /// Its name in metrics.
    const METHOD: GrpcMethod;
    /// Its field number in `FetchStreamRequest`, and its response's in `FetchStreamResponse`.
    const STREAM_TAG: u32;
    /// The request field that lists the items.
    const ITEMS_FIELD: &'static str;
    /// Memory per item while the request is served, relative to an item of a fetch.
    const ITEM_WEIGHT: usize = 1;

    /// This thread's spare messages to decode into.
    fn spares() -> &'static Spares<Self>;
    /// The items in an encoded request.
    ///
    /// # Errors
    /// It has more than `fields`.
    fn count_items(message: &[u8], fields: &Fields) -> Result<usize, TooManyFields>;
    /// The request field that an error is about, if the error names none itself.
    fn field_of(&self, _: &FetchError) -> &'static str {
        Self::ITEMS_FIELD
    }
    fn fail_fast(&self) -> bool;
    /// Executes the request: the response without its bytes, and the bytes.
    fn run(
        &self,
        fetcher: &Fetcher,
        context: &RequestContext,
    ) -> impl Future<Output = Result<(Self::Answer, Bytes), FetchError>> + Send;
}

impl<R: FetchRequest> UnaryRequest for R {
    type Answer = Tagged<R::Response>;
    const METHOD: GrpcMethod = R::METHOD;
    const STREAM_TAG: u32 = R::STREAM_TAG;
    const ITEMS_FIELD: &'static str = R::ITEMS_FIELD;

    fn spares() -> &'static Spares<R> {
        R::spares()
    }
    fn count_items(message: &[u8], fields: &Fields) -> Result<usize, TooManyFields> {
        longest_list(message, R::LISTS, fields)
    }
    fn field_of(&self, error: &FetchError) -> &'static str {
        let item = if let FetchError::Item { number, .. } = error {
            usize::try_from(*number).unwrap_or(usize::MAX)
        } else {
            0
        };
        let error = error.read_error();
        let field = error.and_then(|error| FetchRequest::field_of(self, item, error));
        field.unwrap_or(R::ITEMS_FIELD)
    }
    fn fail_fast(&self) -> bool {
        FetchRequest::fail_fast(self)
    }
    fn run(
        &self,
        fetcher: &Fetcher,
        context: &RequestContext,
    ) -> impl Future<Output = Result<(Tagged<R::Response>, Bytes), FetchError>> + Send {
        run(fetcher, self, context)
    }
}

/// A request for bytes.
pub(super) trait FetchRequest: Message + Default + Send + Sync + 'static {
    /// The response, whose `etag` and `data` stay empty: `encode` appends them.
    type Response: Message;
    /// The response's field for the dataset's version; `None` if each item has its own.
    const ETAG_FIELD: Option<u32>;
    /// Its name in metrics.
    const METHOD: GrpcMethod;
    /// Its field number in `FetchStreamRequest`, and its response's in `FetchStreamResponse`.
    const STREAM_TAG: u32;
    /// The request field that lists the items.
    const ITEMS_FIELD: &'static str;
    /// The fields with an entry for each item.
    const LISTS: &'static [RepeatedField];

    /// This thread's spare messages to decode into.
    fn spares() -> &'static Spares<Self>;
    fn dataset(&self) -> &str;
    fn items(&self) -> Items<'_>;
    /// The field that an item's error is about, if it is not the one that lists the items.
    fn field_of(&self, _: usize, _: &ReadError) -> Option<&'static str> {
        None
    }
    fn fail_fast(&self) -> bool;
    /// The required version of the dataset; empty: any.
    fn if_match(&self) -> &str;
    /// The response without its bytes. `etags`: the versions of the items, for objects.
    fn response(
        kind: Kind,
        etags: Vec<String>,
        lengths: Lengths,
        errors: Vec<v1::ItemError>,
    ) -> Self::Response;
}

/// Executes a request: the response without its bytes, and the bytes.
async fn run<C: FetchRequest>(
    fetcher: &Fetcher,
    request: &C,
    context: &RequestContext,
) -> Result<(Tagged<C::Response>, Bytes), FetchError> {
    let (dataset, FetchResponse { fetched, etags }) = fetcher
        .fetch(request.dataset(), request.if_match(), &request.items(), context)
        .await?;
    let errors = convert::item_errors(&fetched.errors, &mut ItemMessages::default());
    let response = Tagged {
        message: C::response(dataset.kind(), etags, fetched.lengths, errors),
        etag_field: C::ETAG_FIELD,
        dataset,
    };
    Ok((response, fetched.data))
}

/// The list that has what is wrong with a range, if its error is about a range.
fn field_of_range(error: &ReadError) -> Option<&'static str> {
    let (offset, end) = if let ReadError::RangeOutOfRange { offset, end, .. } = error {
        (*offset, *end)
    } else if let ReadError::RangeOverflow { offset, .. } = error {
        // The longest that a file can be.
        (*offset, i64::MAX.unsigned_abs())
    } else {
        return matches!(error, ReadError::ZeroLength).then_some("lengths");
    };
    // No offset would help at an empty object.
    let is_too_long = offset < end || offset == 0;
    Some(if is_too_long { "lengths" } else { "offsets" })
}

/// The list of lengths, or an empty one if every item has `implied` bytes.
fn lengths_unless(lengths: Lengths, implied: u32) -> Vec<u32> {
    match lengths {
        Lengths::Uniform { item_bytes, .. } if item_bytes == implied => Vec::new(),
        Lengths::Uniform { .. } | Lengths::Each(_) => every_length(lengths),
    }
}

fn every_length(lengths: Lengths) -> Vec<u32> {
    match lengths {
        Lengths::Uniform { item_bytes, items } => vec![item_bytes; items as usize],
        Lengths::Each(lengths) => lengths,
    }
}

/// A thread's cleared messages, whose memory is reused.
pub(super) type Spares<M> = LocalKey<RefCell<Vec<M>>>;

/// Most spare messages per kind and thread, and longest request whose memory is kept: each of its bytes may
/// decode to a number.
const SPARES_MAX: usize = 64;
const SPARE_BYTES_MAX: usize = 512;

pub(super) struct Decoded<M: UnaryRequest> {
    message: M,
    is_small: bool,
}

impl<M: UnaryRequest> Decoded<M> {
    /// Decodes a message, as `decode` does. Records the dataset of one that cannot be decoded.
    ///
    /// # Errors
    /// As `decode`.
    pub(super) fn of(bytes: Bytes) -> Result<Self, Status> {
        Self::of_part(&bytes).map_err(|status| refused(&bytes, status))
    }

    /// Decodes a part of a message, and records nothing.
    ///
    /// # Errors
    /// As `decode`.
    pub(super) fn of_part(bytes: &[u8]) -> Result<Self, Status> {
        let is_small = bytes.len() <= SPARE_BYTES_MAX;
        let spare = if is_small {
            M::spares().with_borrow_mut(Vec::pop)
        } else {
            None
        };
        let message = decode_into(spare.unwrap_or_default(), bytes)?;
        Ok(Self { message, is_small })
    }
}

/// A message that was decoded otherwise, whose memory is not kept.
impl<M: UnaryRequest> From<M> for Decoded<M> {
    fn from(message: M) -> Self {
        Self {
            message,
            is_small: false,
        }
    }
}

impl<M: UnaryRequest> Deref for Decoded<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.message
    }
}

impl<M: UnaryRequest> Drop for Decoded<M> {
    fn drop(&mut self) {
        if self.is_small {
            let mut message = std::mem::take(&mut self.message);
            message.clear();
            M::spares().with_borrow_mut(|spares| {
                if spares.len() < SPARES_MAX {
                    spares.push(message);
                }
            });
        }
    }
}

/// Declares the spare messages of a request.
macro_rules! spares {
    ($message:ty) => {
        fn spares() -> &'static Spares<Self> {
            thread_local! {
                static SPARES: RefCell<Vec<$message>> = const { RefCell::new(Vec::new()) };
            }
            &SPARES
        }
    };
}

/// Fields that the requests have in common, for [`FetchRequest`].
macro_rules! common_fields {
    (if_match) => {
        common_fields!();
        fn if_match(&self) -> &str {
            &self.if_match
        }
    };
    () => {
        fn dataset(&self) -> &str {
            &self.dataset
        }
        fn fail_fast(&self) -> bool {
            self.fail_fast
        }
    };
}

impl FetchRequest for v1::FetchBlocksRequest {
    type Response = v1::FetchBlocksResponse;
    const ETAG_FIELD: Option<u32> = Some(4);
    const METHOD: GrpcMethod = GrpcMethod::FetchBlocks;
    const STREAM_TAG: u32 = 2;
    const ITEMS_FIELD: &'static str = "indices";
    const LISTS: &'static [RepeatedField] = &[RepeatedField::varints(2)];

    common_fields!(if_match);
    spares!(v1::FetchBlocksRequest);
    fn items(&self) -> Items<'_> {
        Items::Blocks(&self.indices)
    }
    fn response(kind: Kind, _: Vec<String>, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response {
        let block_bytes = match kind {
            Kind::Blocks { block_bytes, .. } => block_bytes,
            Kind::Vectors { .. } | Kind::Objects => 0,
        };
        v1::FetchBlocksResponse {
            block_bytes,
            lengths: lengths_unless(lengths, block_bytes),
            errors,
            ..Default::default()
        }
    }
}

impl FetchRequest for v1::FetchVectorsRequest {
    type Response = v1::FetchVectorsResponse;
    const ETAG_FIELD: Option<u32> = Some(5);
    const METHOD: GrpcMethod = GrpcMethod::FetchVectors;
    const STREAM_TAG: u32 = 3;
    const ITEMS_FIELD: &'static str = "ids";
    const LISTS: &'static [RepeatedField] = &[RepeatedField::varints(2)];

    common_fields!(if_match);
    spares!(v1::FetchVectorsRequest);
    fn items(&self) -> Items<'_> {
        Items::Vectors(&self.ids)
    }
    fn response(kind: Kind, _: Vec<String>, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response {
        let (dim, dtype, vector_bytes) = match kind {
            Kind::Vectors {
                dim,
                dtype,
                vector_bytes,
                ..
            } => (dim, convert::dtype(dtype), vector_bytes),
            Kind::Blocks { .. } | Kind::Objects => (0, v1::Dtype::Unspecified, 0),
        };
        v1::FetchVectorsResponse {
            dim,
            dtype: dtype.into(),
            lengths: lengths_unless(lengths, vector_bytes),
            errors,
            ..Default::default()
        }
    }
}

impl FetchRequest for v1::FetchRangesRequest {
    type Response = v1::FetchRangesResponse;
    const ETAG_FIELD: Option<u32> = Some(3);
    const METHOD: GrpcMethod = GrpcMethod::FetchRanges;
    const STREAM_TAG: u32 = 4;
    const ITEMS_FIELD: &'static str = "offsets";
    const LISTS: &'static [RepeatedField] = &[RepeatedField::varints(2), RepeatedField::varints(3)];

    common_fields!(if_match);
    spares!(v1::FetchRangesRequest);
    fn items(&self) -> Items<'_> {
        Items::Ranges {
            offsets: &self.offsets,
            lengths: &self.lengths,
        }
    }
    fn field_of(&self, _: usize, error: &ReadError) -> Option<&'static str> {
        let is_too_long = matches!(error, ReadError::ItemTooLarge { .. });
        field_of_range(error).or(is_too_long.then_some("lengths"))
    }
    fn response(_: Kind, _: Vec<String>, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response {
        v1::FetchRangesResponse {
            lengths: every_length(lengths),
            errors,
            ..Default::default()
        }
    }
}

impl FetchRequest for v1::FetchObjectsRequest {
    type Response = v1::FetchObjectsResponse;
    const ETAG_FIELD: Option<u32> = None;
    const METHOD: GrpcMethod = GrpcMethod::FetchObjects;
    const STREAM_TAG: u32 = 5;
    const ITEMS_FIELD: &'static str = "names";
    const LISTS: &'static [RepeatedField] = &[
        RepeatedField::strings(2),
        RepeatedField::varints(3),
        RepeatedField::varints(4),
        RepeatedField::strings(6),
    ];

    common_fields!();
    spares!(v1::FetchObjectsRequest);
    fn items(&self) -> Items<'_> {
        Items::Objects {
            names: &self.names,
            offsets: &self.offsets,
            lengths: &self.lengths,
            if_match: &self.if_match,
        }
    }
    fn field_of(&self, item: usize, error: &ReadError) -> Option<&'static str> {
        let has_length = self.lengths.get(item).is_some_and(|length| *length > 0);
        let is_too_long = has_length && matches!(error, ReadError::ItemTooLarge { .. });
        field_of_range(error).or(is_too_long.then_some("lengths"))
    }
    fn if_match(&self) -> &str {
        // Each object has its own.
        ""
    }
    fn response(_: Kind, etags: Vec<String>, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response {
        v1::FetchObjectsResponse {
            lengths: every_length(lengths),
            errors,
            etags,
            data: Bytes::new(),
        }
    }
}

impl UnaryRequest for v1::ScoreVectorsRequest {
    type Answer = v1::ScoreVectorsResponse;
    const METHOD: GrpcMethod = GrpcMethod::ScoreVectors;
    const STREAM_TAG: u32 = 8;
    const ITEMS_FIELD: &'static str = "queries.ids";
    const ITEM_WEIGHT: usize = 2;

    spares!(v1::ScoreVectorsRequest);

    fn count_items(message: &[u8], fields: &Fields) -> Result<usize, TooManyFields> {
        let mut items = Ok(0_usize);
        visit(message, fields, |tag, field| {
            if let (2, FieldValue::Bytes(query)) = (tag, field)
                && let Ok(before) = items
            {
                // A query without ids is refused later; until then it takes as much memory as an item.
                let ids = longest_list(query, &[RepeatedField::varints(2)], fields);
                items = ids.map(|ids| before.saturating_add(ids.max(1)));
            }
        })?;
        items
    }
    fn fail_fast(&self) -> bool {
        self.fail_fast
    }
    async fn run(
        &self,
        fetcher: &Fetcher,
        context: &RequestContext,
    ) -> Result<(v1::ScoreVectorsResponse, Bytes), FetchError> {
        let scoring = Scoring {
            queries: self
                .queries
                .iter()
                .map(|query| ScoreQuery {
                    vector: &query.vector,
                    ids: &query.ids,
                })
                .collect(),
            metric: match self.metric() {
                v1::Metric::Dot => Some(Metric::Dot),
                v1::Metric::Cosine => Some(Metric::Cosine),
                v1::Metric::Euclidean => Some(Metric::Euclidean),
                v1::Metric::Manhattan => Some(Metric::Manhattan),
                v1::Metric::Unspecified => None,
            },
            limit: self.limit,
            threshold: self.threshold,
        };
        // Boxed: it is larger than all other state of a request.
        let scoring = Box::pin(fetcher.score(&self.dataset, &self.if_match, &scoring, context));
        let (dataset, rankings) = scoring.await?;
        let mut messages = ItemMessages::default();
        let results = rankings.into_iter().map(|ranking| v1::ScoreResult {
            ids: ranking.best.iter().map(|scored| scored.id).collect(),
            scores: ranking.best.iter().map(|scored| scored.score).collect(),
            unscored: ranking.unscored,
            errors: convert::item_errors(&ranking.errors, &mut messages),
        });
        let response = v1::ScoreVectorsResponse {
            results: results.collect(),
            etag: dataset.etag().to_owned(),
        };
        Ok((response, Bytes::new()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_left_out_where_the_shape_implies_them() {
        // Blocks that were all read: no list. One failed: the list. Ranges always have a list.
        let blocks = Kind::Blocks {
            block_bytes: 512,
            count: 10,
        };
        let uniform = || Lengths::Uniform {
            item_bytes: 512,
            items: 3,
        };
        let response = v1::FetchBlocksRequest::response(blocks, Vec::new(), uniform(), Vec::new());
        assert_eq!((response.block_bytes, response.lengths), (512, Vec::new()));
        let response =
            v1::FetchBlocksRequest::response(blocks, Vec::new(), Lengths::Each(vec![512, 0]), Vec::new());
        assert_eq!(response.lengths, [512, 0]);
        assert_eq!(
            v1::FetchRangesRequest::response(blocks, Vec::new(), uniform(), Vec::new()).lengths,
            [512; 3]
        );
        assert_eq!(
            v1::FetchObjectsRequest::response(Kind::Objects, Vec::new(), uniform(), Vec::new()).lengths,
            [512; 3]
        );
    }
}
