//! The four fetch requests behind one trait: their items, and their responses without the bytes.

use super::convert;
use super::wire::RepeatedField;
use crate::fetch::{FetchError, FetchResponse, Fetcher, Items, Kind, RequestContext};
use crate::rpc_metrics::GrpcMethod;
use bytes::Bytes;
use prost::Message;
use ringfetch_engine::batch::Lengths;
use ringfetch_proto::v1;

/// A unary request of FetchService.
pub(super) trait FetchRequest: Message + Default + Send + Sync + 'static {
    /// The response. Its `data` stays empty: `encode` appends the bytes.
    type Response: Message;
    /// How the metrics name it.
    const METHOD: GrpcMethod;
    /// Its field in `FetchStreamRequest`, and its response's in `FetchStreamResponse`.
    const STREAM_TAG: u32;
    /// The request field that lists the items.
    const ITEMS_FIELD: &'static str;
    /// The fields with an entry for each item.
    const LISTS: &'static [RepeatedField];

    fn dataset(&self) -> &str;
    fn items(&self) -> Items<'_>;
    fn fail_fast(&self) -> bool;
    /// The version required of the dataset; empty: any.
    fn if_match(&self) -> &str;
    fn response(kind: Kind, etags: Etags, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response;
}

/// Executes a request: the response without its bytes, and the bytes.
pub(super) async fn run<C: FetchRequest>(
    fetcher: &Fetcher,
    request: &C,
    context: &RequestContext,
) -> Result<(C::Response, Bytes), FetchError> {
    let (dataset, FetchResponse { fetched, etags }) = fetcher
        .fetch(request.dataset(), request.if_match(), &request.items(), context)
        .await?;
    let errors = convert::item_errors(&fetched.errors);
    let etags = Etags {
        dataset: dataset.etag(),
        objects: etags,
    };
    let response = C::response(dataset.kind(), etags, fetched.lengths, errors);
    Ok((response, fetched.data))
}

/// The versions that were read.
#[derive(Debug, Default)]
pub(super) struct Etags<'a> {
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
    const METHOD: GrpcMethod = GrpcMethod::FetchBlocks;
    const STREAM_TAG: u32 = 2;
    const ITEMS_FIELD: &'static str = "indices";
    const LISTS: &'static [RepeatedField] = &[RepeatedField::varints(2)];

    common_fields!(if_match);
    fn items(&self) -> Items<'_> {
        Items::Blocks(&self.indices)
    }
    fn response(kind: Kind, etags: Etags, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response {
        let block_bytes = match kind {
            Kind::Blocks { block_bytes, .. } => block_bytes,
            Kind::Vectors { .. } | Kind::Objects => 0,
        };
        v1::FetchBlocksResponse {
            block_bytes,
            lengths: lengths_unless(lengths, block_bytes),
            errors,
            etag: etags.dataset.to_owned(),
            data: Bytes::new(),
        }
    }
}

impl FetchRequest for v1::FetchVectorsRequest {
    type Response = v1::FetchVectorsResponse;
    const METHOD: GrpcMethod = GrpcMethod::FetchVectors;
    const STREAM_TAG: u32 = 3;
    const ITEMS_FIELD: &'static str = "ids";
    const LISTS: &'static [RepeatedField] = &[RepeatedField::varints(2)];

    common_fields!(if_match);
    fn items(&self) -> Items<'_> {
        Items::Vectors(&self.ids)
    }
    fn response(kind: Kind, etags: Etags, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response {
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
            etag: etags.dataset.to_owned(),
            data: Bytes::new(),
        }
    }
}

impl FetchRequest for v1::FetchRangesRequest {
    type Response = v1::FetchRangesResponse;
    const METHOD: GrpcMethod = GrpcMethod::FetchRanges;
    const STREAM_TAG: u32 = 4;
    const ITEMS_FIELD: &'static str = "offsets";
    const LISTS: &'static [RepeatedField] = &[RepeatedField::varints(2), RepeatedField::varints(3)];

    common_fields!(if_match);
    fn items(&self) -> Items<'_> {
        Items::Ranges {
            offsets: &self.offsets,
            lengths: &self.lengths,
        }
    }
    fn response(_: Kind, etags: Etags, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response {
        v1::FetchRangesResponse {
            lengths: every_length(lengths),
            errors,
            etag: etags.dataset.to_owned(),
            data: Bytes::new(),
        }
    }
}

impl FetchRequest for v1::FetchObjectsRequest {
    type Response = v1::FetchObjectsResponse;
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
    fn items(&self) -> Items<'_> {
        Items::Objects {
            names: &self.names,
            offsets: &self.offsets,
            lengths: &self.lengths,
            if_match: &self.if_match,
        }
    }
    fn if_match(&self) -> &str {
        // Each object has one of its own.
        ""
    }
    fn response(_: Kind, etags: Etags, lengths: Lengths, errors: Vec<v1::ItemError>) -> Self::Response {
        v1::FetchObjectsResponse {
            lengths: every_length(lengths),
            errors,
            etags: etags.objects,
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
        let response = v1::FetchBlocksRequest::response(blocks, Etags::default(), uniform(), Vec::new());
        assert_eq!((response.block_bytes, response.lengths), (512, Vec::new()));
        let response = v1::FetchBlocksRequest::response(
            blocks,
            Etags::default(),
            Lengths::Each(vec![512, 0]),
            Vec::new(),
        );
        assert_eq!(response.lengths, [512, 0]);
        assert_eq!(
            v1::FetchRangesRequest::response(blocks, Etags::default(), uniform(), Vec::new()).lengths,
            [512; 3]
        );
        assert_eq!(
            v1::FetchObjectsRequest::response(Kind::Objects, Etags::default(), uniform(), Vec::new()).lengths,
            [512; 3]
        );
    }
}
