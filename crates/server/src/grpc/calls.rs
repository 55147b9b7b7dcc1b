//! The four ways to fetch, as one shape: what a request asks for, and what its answer says beside the bytes.

use super::describe;
use super::wire::List;
use crate::door::{Answered, CallContext, FetchError, Fetcher, Items, Kind};
use crate::rpc_metrics::GrpcMethod;
use bytes::Bytes;
use prost::Message;
use ringfetch_engine::batch::Lengths;
use ringfetch_proto::v1;

/// A request of the fetch service that has one answer.
pub(super) trait FetchCall: Message + Default + Send + Sync + 'static {
    /// The answer. Its `data` is left empty: the bytes travel beside it (`envelope`).
    type Answer: Message;
    /// How the metrics name it.
    const METHOD: GrpcMethod;
    /// Its field in `FetchStreamRequest`, and its answer's in `FetchStreamResponse`.
    const STREAM_TAG: u32;
    /// The request field that lists the items.
    const ITEMS_FIELD: &'static str;
    /// The fields that have an entry an item.
    const LISTS: &'static [List];

    fn dataset(&self) -> &str;
    fn items(&self) -> Items<'_>;
    fn fail_fast(&self) -> bool;
    /// The version that the dataset must be of; empty: any.
    fn if_match(&self) -> &str;
    fn answer(kind: Kind, versions: Versions, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Answer;
}

/// Reads what a request asks for: the answer without its bytes, and the bytes.
pub(super) async fn run<C: FetchCall>(
    fetcher: &Fetcher,
    request: &C,
    context: &CallContext,
) -> Result<(C::Answer, Bytes), FetchError> {
    let (dataset, Answered { fetched, etags }) = fetcher
        .fetch(request.dataset(), request.if_match(), &request.items(), context)
        .await?;
    let errors = describe::item_errors(&fetched.errors);
    let versions = Versions {
        dataset: dataset.etag(),
        objects: etags,
    };
    let answer = C::answer(dataset.kind(), versions, fetched.lengths, errors);
    Ok((answer, fetched.data))
}

/// What an answer was read from.
#[derive(Debug, Default)]
pub(super) struct Versions<'a> {
    dataset: &'a str,
    /// Of each item, for objects.
    objects: Vec<String>,
}

/// The list of lengths, or none where every item has `implied` bytes.
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

impl FetchCall for v1::FetchBlocksRequest {
    type Answer = v1::FetchBlocksResponse;
    const METHOD: GrpcMethod = GrpcMethod::FetchBlocks;
    const STREAM_TAG: u32 = 2;
    const ITEMS_FIELD: &'static str = "indices";
    const LISTS: &'static [List] = &[List {
        tag: 2,
        varints: true,
    }];

    fn dataset(&self) -> &str {
        &self.dataset
    }
    fn items(&self) -> Items<'_> {
        Items::Blocks(&self.indices)
    }
    fn fail_fast(&self) -> bool {
        self.fail_fast
    }
    fn if_match(&self) -> &str {
        &self.if_match
    }
    fn answer(kind: Kind, versions: Versions, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Answer {
        let block_bytes = match kind {
            Kind::Blocks { block_bytes, .. } => block_bytes,
            Kind::Vectors { .. } | Kind::Objects => 0,
        };
        v1::FetchBlocksResponse {
            block_bytes,
            lengths: lengths_unless(lengths, block_bytes),
            errors,
            etag: versions.dataset.to_owned(),
            data: Bytes::new(),
        }
    }
}

impl FetchCall for v1::FetchVectorsRequest {
    type Answer = v1::FetchVectorsResponse;
    const METHOD: GrpcMethod = GrpcMethod::FetchVectors;
    const STREAM_TAG: u32 = 3;
    const ITEMS_FIELD: &'static str = "ids";
    const LISTS: &'static [List] = &[List {
        tag: 2,
        varints: true,
    }];

    fn dataset(&self) -> &str {
        &self.dataset
    }
    fn items(&self) -> Items<'_> {
        Items::Vectors(&self.ids)
    }
    fn fail_fast(&self) -> bool {
        self.fail_fast
    }
    fn if_match(&self) -> &str {
        &self.if_match
    }
    fn answer(kind: Kind, versions: Versions, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Answer {
        let (dim, dtype, vector_bytes) = match kind {
            Kind::Vectors {
                dim,
                dtype,
                vector_bytes,
                ..
            } => (dim, describe::dtype(dtype), vector_bytes),
            Kind::Blocks { .. } | Kind::Objects => (0, v1::Dtype::Unspecified, 0),
        };
        v1::FetchVectorsResponse {
            dim,
            dtype: dtype.into(),
            lengths: lengths_unless(lengths, vector_bytes),
            errors,
            etag: versions.dataset.to_owned(),
            data: Bytes::new(),
        }
    }
}

impl FetchCall for v1::FetchRangesRequest {
    type Answer = v1::FetchRangesResponse;
    const METHOD: GrpcMethod = GrpcMethod::FetchRanges;
    const STREAM_TAG: u32 = 4;
    const ITEMS_FIELD: &'static str = "offsets";
    const LISTS: &'static [List] = &[
        List {
            tag: 2,
            varints: true,
        },
        List {
            tag: 3,
            varints: true,
        },
    ];

    fn dataset(&self) -> &str {
        &self.dataset
    }
    fn items(&self) -> Items<'_> {
        Items::Ranges {
            offsets: &self.offsets,
            lengths: &self.lengths,
        }
    }
    fn fail_fast(&self) -> bool {
        self.fail_fast
    }
    fn if_match(&self) -> &str {
        &self.if_match
    }
    fn answer(_: Kind, versions: Versions, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Answer {
        v1::FetchRangesResponse {
            lengths: every_length(lengths),
            errors,
            etag: versions.dataset.to_owned(),
            data: Bytes::new(),
        }
    }
}

impl FetchCall for v1::FetchObjectsRequest {
    type Answer = v1::FetchObjectsResponse;
    const METHOD: GrpcMethod = GrpcMethod::FetchObjects;
    const STREAM_TAG: u32 = 5;
    const ITEMS_FIELD: &'static str = "names";
    const LISTS: &'static [List] = &[
        List {
            tag: 2,
            varints: false,
        },
        List {
            tag: 3,
            varints: true,
        },
        List {
            tag: 4,
            varints: true,
        },
        List {
            tag: 6,
            varints: false,
        },
    ];

    fn dataset(&self) -> &str {
        &self.dataset
    }
    fn items(&self) -> Items<'_> {
        Items::Objects {
            names: &self.names,
            offsets: &self.offsets,
            lengths: &self.lengths,
            if_match: &self.if_match,
        }
    }
    fn fail_fast(&self) -> bool {
        self.fail_fast
    }
    fn if_match(&self) -> &str {
        // Each object has its own.
        ""
    }
    fn answer(_: Kind, versions: Versions, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Answer {
        v1::FetchObjectsResponse {
            lengths: every_length(lengths),
            errors,
            etags: versions.objects,
            data: Bytes::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_left_out_where_the_shape_implies_them() {
        // Blocks that all came: no list. One failed: the list. Ranges always have theirs.
        let blocks = Kind::Blocks {
            block_bytes: 512,
            count: 10,
        };
        let uniform = || Lengths::Uniform {
            item_bytes: 512,
            items: 3,
        };
        let answer = v1::FetchBlocksRequest::answer(blocks, Versions::default(), uniform(), Vec::new());
        assert_eq!((answer.block_bytes, answer.lengths), (512, Vec::new()));
        let answer = v1::FetchBlocksRequest::answer(
            blocks,
            Versions::default(),
            Lengths::Each(vec![512, 0]),
            Vec::new(),
        );
        assert_eq!(answer.lengths, [512, 0]);
        assert_eq!(
            v1::FetchRangesRequest::answer(blocks, Versions::default(), uniform(), Vec::new()).lengths,
            [512; 3]
        );
        assert_eq!(
            v1::FetchObjectsRequest::answer(Kind::Objects, Versions::default(), uniform(), Vec::new())
                .lengths,
            [512; 3]
        );
    }
}
