//! The four unary calls: the right bytes, and errors of single items.

use super::served::{BLOCK_BYTES, BLOCKS, DIM, VECTORS, serve, vector};
use ringfetch_proto::v1;
use ringfetch_server::config::Limits;
use tonic::Code;
use tonic_types::StatusExt as _;

#[tokio::test]
async fn blocks_come_in_the_order_of_the_request() {
    // Any order, one twice, the first and the last: the file's bytes, and no lengths, since each has the
    // block's.
    let served = serve(Limits::default());
    let wanted = [BLOCKS - 1, 0, 7, 7, 8];
    let request = v1::FetchBlocksRequest {
        dataset: "blocks".into(),
        indices: wanted.iter().map(|index| *index as u64).collect(),
        fail_fast: false,
        ..Default::default()
    };
    let answer = served.fetch().fetch_blocks(request).await.unwrap().into_inner();
    let expected = wanted.map(|index| served.block(index)).concat();
    assert_eq!(answer.data, expected);
    assert_eq!(
        (
            answer.block_bytes as usize,
            answer.lengths.len(),
            answer.errors.len()
        ),
        (BLOCK_BYTES, 0, 0)
    );
    assert!(
        served.scraped(r#"ringfetch_rpc_requests_total{code="OK",method="FetchBlocks",transport="grpc"} 1"#)
    );
}

#[tokio::test]
async fn vectors_come_without_their_record_headers() {
    // .fvecs has a dimension before each vector: the response has only the elements, with shape and type.
    let served = serve(Limits::default());
    let request = v1::FetchVectorsRequest {
        dataset: "vectors".into(),
        ids: vec![19, 0, 4],
        fail_fast: false,
        ..Default::default()
    };
    let answer = served.fetch().fetch_vectors(request).await.unwrap().into_inner();
    assert_eq!(answer.data, [vector(19), vector(0), vector(4)].concat());
    assert_eq!((answer.dim as usize, answer.dtype()), (DIM, v1::Dtype::F32));
    assert!(answer.lengths.is_empty() && answer.errors.is_empty());
}

#[tokio::test]
async fn ranges_see_the_file_as_it_is() {
    // Ranges of any length in blocks and in vectors (with their headers): the requested bytes and lengths.
    let served = serve(Limits::default());
    let offsets = vec![49_999, 0, 998];
    let lengths = vec![1, 3, 5];
    let request = v1::FetchRangesRequest {
        dataset: "blocks".into(),
        offsets,
        lengths,
        fail_fast: false,
        ..Default::default()
    };
    let answer = served.fetch().fetch_ranges(request).await.unwrap().into_inner();
    let expected = [
        &served.blocks[49_999..],
        &served.blocks[..3],
        &served.blocks[998..1003],
    ]
    .concat();
    assert_eq!((answer.data.to_vec(), answer.lengths), (expected, vec![1, 3, 5]));

    let whole = (VECTORS * (4 + 4 * DIM)) as u64;
    let request = v1::FetchRangesRequest {
        dataset: "vectors".into(),
        offsets: vec![0],
        lengths: vec![whole],
        fail_fast: false,
        ..Default::default()
    };
    let answer = served.fetch().fetch_ranges(request).await.unwrap().into_inner();
    assert_eq!(answer.data[..4], 3u32.to_le_bytes());
    assert_eq!(answer.data.len() as u64, whole);
}

#[tokio::test]
async fn objects_come_whole_or_in_part() {
    // A whole object, an empty one, one in a directory, and parts with and without an end.
    let served = serve(Limits::default());
    let names = ["one", "empty", "deep/two", "one", "one"]
        .map(String::from)
        .to_vec();
    let request = v1::FetchObjectsRequest {
        dataset: "objects".into(),
        names: names.clone(),
        ..Default::default()
    };
    let answer = served.fetch().fetch_objects(request).await.unwrap().into_inner();
    assert_eq!(answer.lengths, [12, 0, 6, 12, 12]);
    assert_eq!(answer.data, "first objectsecondfirst objectfirst object");
    assert!(answer.errors.is_empty());

    let request = v1::FetchObjectsRequest {
        dataset: "objects".into(),
        names,
        offsets: vec![6, 0, 1, 0, 11],
        lengths: vec![0, 0, 2, 5, 1],
        fail_fast: false,
        ..Default::default()
    };
    let answer = served.fetch().fetch_objects(request).await.unwrap().into_inner();
    assert_eq!(
        (&answer.data[..], answer.lengths),
        (&b"objectecfirstt"[..], vec![6, 0, 2, 5, 1])
    );
}

#[tokio::test]
async fn a_bad_item_does_not_fail_the_rest() {
    // Past the end, overflowing, empty, and names that lead nowhere or outside: each is an error at its
    // position, the rest is delivered.
    let served = serve(Limits::default());
    let request = v1::FetchRangesRequest {
        dataset: "blocks".into(),
        offsets: vec![0, 50_000, u64::MAX, 7, 10],
        lengths: vec![2, 1, 2, 0, 2],
        fail_fast: false,
        ..Default::default()
    };
    let answer = served.fetch().fetch_ranges(request).await.unwrap().into_inner();
    assert_eq!(answer.lengths, [2, 0, 0, 0, 2]);
    assert_eq!(
        answer.data,
        [&served.blocks[..2], &served.blocks[10..12]].concat()
    );
    let told = |errors: &[v1::ItemError]| {
        errors
            .iter()
            .map(|e| (e.item, Code::from(e.code)))
            .collect::<Vec<_>>()
    };
    let expected = [
        (1, Code::OutOfRange),
        (2, Code::InvalidArgument),
        (3, Code::InvalidArgument),
    ];
    assert_eq!(told(&answer.errors), expected);

    let request = v1::FetchBlocksRequest {
        dataset: "blocks".into(),
        indices: vec![BLOCKS as u64, 3],
        fail_fast: false,
        ..Default::default()
    };
    let answer = served.fetch().fetch_blocks(request).await.unwrap().into_inner();
    assert_eq!(
        (answer.lengths, told(&answer.errors)),
        (vec![0, 1000], vec![(0, Code::OutOfRange)])
    );
    assert_eq!(answer.data, served.block(3));

    let request = v1::FetchObjectsRequest {
        dataset: "objects".into(),
        names: ["one", "../blocks", "none", "", "deep"]
            .map(String::from)
            .to_vec(),
        ..Default::default()
    };
    let answer = served.fetch().fetch_objects(request).await.unwrap().into_inner();
    assert_eq!(answer.data, "first object");
    let expected = [
        (1, Code::InvalidArgument),
        (2, Code::NotFound),
        (3, Code::InvalidArgument),
        (4, Code::NotFound),
    ];
    assert_eq!(told(&answer.errors), expected);
}

#[tokio::test]
async fn fail_fast_makes_the_first_bad_item_the_answer() {
    // The same request with fail_fast: the item's code becomes the call's, with a reason to branch on.
    let served = serve(Limits::default());
    let request = v1::FetchBlocksRequest {
        dataset: "blocks".into(),
        indices: vec![0, 50, 51],
        fail_fast: true,
        ..Default::default()
    };
    let status = served.fetch().fetch_blocks(request).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    assert!(
        status.message().contains("block 50 is out of range"),
        "{}",
        status.message()
    );
    assert_eq!(
        status.get_details_error_info().unwrap().reason,
        "INDEX_OUT_OF_RANGE"
    );
    assert_eq!(
        status.get_details_bad_request().unwrap().field_violations[0].field,
        "indices"
    );
}

#[tokio::test]
async fn an_item_larger_than_an_answer_is_that_items_error() {
    // Responses of at most 1500 bytes: a range of 1501 is an error at its position; two blocks together fail
    // the request.
    let served = serve(Limits {
        response_bytes: 1500,
        ..Limits::default()
    });
    let request = v1::FetchRangesRequest {
        dataset: "blocks".into(),
        offsets: vec![0, 5],
        lengths: vec![1501, 5],
        fail_fast: false,
        ..Default::default()
    };
    let answer = served.fetch().fetch_ranges(request).await.unwrap().into_inner();
    assert_eq!(answer.data, served.blocks[5..10]);
    assert_eq!(Code::from(answer.errors[0].code), Code::ResourceExhausted);

    let request = v1::FetchBlocksRequest {
        dataset: "blocks".into(),
        indices: vec![0, 1],
        fail_fast: false,
        ..Default::default()
    };
    let status = served.fetch().fetch_blocks(request).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("limits.response_bytes"));
    assert!(status.get_details_retry_info().is_none());
    assert!(served.scraped(r#"ringfetch_rejected_total{reason="response_bytes"} 1"#));
}

#[tokio::test]
async fn an_object_that_was_replaced_is_read_anew_after_its_error() {
    // Truncated after it was opened: DATA_LOSS once; the next call opens the name again and gets what is
    // left.
    let served = serve(Limits::default());
    let request = || v1::FetchObjectsRequest {
        dataset: "objects".into(),
        names: vec!["one".into()],
        ..Default::default()
    };
    served.fetch().fetch_objects(request()).await.unwrap();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(served.directory().join("objects/one"))
        .unwrap();
    file.set_len(5).unwrap();
    let answer = served
        .fetch()
        .fetch_objects(request())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        answer.errors.first().map(|error| Code::from(error.code)),
        Some(Code::DataLoss)
    );
    let answer = served
        .fetch()
        .fetch_objects(request())
        .await
        .unwrap()
        .into_inner();
    assert_eq!((&answer.data[..], answer.errors.len()), (&b"first"[..], 0));
}
