//! Bad requests over both transports: the code, a message that names the field and the remedy, details that
//! decode, and a daemon that continues.

mod over_http;

use crate::daemon::{AS_NOBODY, Daemon, Setup, any_backend, backends_and_auto};
use crate::data::{Everything, everything, plain_blocks};
use crate::wire::{self, Answer, Http, Wire};
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_service_client::FetchServiceClient;
use ringfetch_proto::v1::fetch_stream_request::Request;
use ringfetch_proto::v1::fetch_stream_response::Response;
use serde_json::json;
use tonic::{Code, Status};
use tonic_types::{RpcStatusExt as _, StatusExt as _};

const OCTETS: &str = "application/octet-stream";
const JSON: &str = "application/json";

/// A daemon with small limits, the bytes of its dataset `blocks`, and what else it serves.
fn serve(backend: &str) -> (Daemon, Vec<u8>, Everything) {
    let setup = Setup::new(backend)
        .set("limits.items_per_request", "100")
        .set("limits.request_bytes", "64KiB")
        .set("limits.response_bytes", "256KiB");
    let (setup, bytes) = plain_blocks(setup, 300);
    let (setup, everything) = everything(setup);
    (setup.start(), bytes, everything)
}

/// The code of a refusal, and its reason in the details.
type Refusal = (Code, &'static str);

const DATASET_NOT_FOUND: Refusal = (Code::NotFound, "DATASET_NOT_FOUND");
const EMPTY_BATCH: Refusal = (Code::InvalidArgument, "EMPTY_BATCH");
const INDEX_OUT_OF_RANGE: Refusal = (Code::OutOfRange, "INDEX_OUT_OF_RANGE");
const LISTS_DIFFER: Refusal = (Code::InvalidArgument, "LISTS_DIFFER");
const REQUEST_TOO_LARGE: Refusal = (Code::ResourceExhausted, "REQUEST_TOO_LARGE");
const RESPONSE_TOO_LARGE: Refusal = (Code::ResourceExhausted, "RESPONSE_TOO_LARGE");
const TOO_MANY_ITEMS: Refusal = (Code::ResourceExhausted, "TOO_MANY_ITEMS");
const WRONG_KIND: Refusal = (Code::FailedPrecondition, "WRONG_KIND");

/// Fails unless the call was refused, with this field in the details and these parts in the message.
fn refused<T: std::fmt::Debug>(
    answer: Result<T, Status>,
    (code, reason): Refusal,
    field: &str,
    parts: &[&str],
) {
    let status = answer.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    for part in parts {
        assert!(
            status.message().contains(part),
            "{part:?} is not in {:?}",
            status.message()
        );
    }
    let info = status
        .get_details_error_info()
        .unwrap_or_else(|| panic!("no ErrorInfo: {status:?}"));
    assert_eq!(
        (info.reason.as_str(), info.domain.as_str()),
        (reason, "ringfetch"),
        "{status:?}"
    );
    let found = status
        .get_details_bad_request()
        .unwrap_or_else(|| panic!("no BadRequest: {status:?}"));
    assert_eq!(found.field_violations[0].field, field, "{status:?}");
    // There is no retry hint where a retry cannot help.
    assert!(status.get_details_retry_info().is_none(), "{status:?}");
}

#[tokio::test]
async fn a_request_that_is_wrong_as_a_whole_is_told_so_over_grpc() {
    // Scenario: each mistake that a request as a whole can have. Expectation: gRPC's code for it, google.rpc
    // details that name the field, a message with the remedy; refusals are counted by their reason; the daemon
    // continues to serve, on the same connection.
    let (daemon, _, _) = serve(any_backend());
    let mut fetch = daemon.fetch().await;

    refused(
        fetch.fetch_blocks(wire::blocks("nothing", &[0])).await,
        DATASET_NOT_FOUND,
        "dataset",
        &["\"nothing\"", "there are: blocks"],
    );
    refused(
        fetch.fetch_blocks(wire::blocks("", &[0])).await,
        DATASET_NOT_FOUND,
        "dataset",
        &["\"\""],
    );
    // A message of any text arrives.
    refused(
        fetch.fetch_blocks(wire::blocks("näme\n%00", &[0])).await,
        DATASET_NOT_FOUND,
        "dataset",
        &[r#"no dataset "näme\n%00"; there are"#],
    );
    refused(
        fetch.fetch_blocks(wire::blocks("fbin", &[0])).await,
        WRONG_KIND,
        "dataset",
        &["kind vectors", "use FetchVectors, ScoreVectors or"],
    );
    refused(
        fetch.fetch_objects(wire::objects("blocks", &["a"])).await,
        WRONG_KIND,
        "dataset",
        &["kind blocks", "use FetchBlocks"],
    );
    refused(
        fetch.fetch_ranges(wire::ranges("objects", &[(0, 1)])).await,
        WRONG_KIND,
        "dataset",
        &["use FetchObjects or ReadObject"],
    );

    let empty = ["indices", "ids", "offsets", "names"];
    let answers = [
        fetch.fetch_blocks(wire::blocks("blocks", &[])).await.map(drop),
        fetch.fetch_vectors(wire::vectors("fbin", &[])).await.map(drop),
        fetch.fetch_ranges(wire::ranges("fbin", &[])).await.map(drop),
        fetch.fetch_objects(wire::objects("objects", &[])).await.map(drop),
    ];
    for (field, answer) in empty.iter().zip(answers) {
        refused(answer, EMPTY_BATCH, field, &[field, "at least one item"]);
    }
    let mut uneven = wire::ranges("blocks", &[(0, 1), (1, 1)]);
    uneven.lengths.pop();
    refused(
        fetch.fetch_ranges(uneven).await,
        LISTS_DIFFER,
        "lengths",
        &["1 entries for 2 offsets", "the same length"],
    );
    let mut uneven = wire::objects("objects", &["one", "empty"]);
    uneven.offsets = vec![0];
    refused(
        fetch.fetch_objects(uneven).await,
        LISTS_DIFFER,
        "offsets",
        &["the same length"],
    );

    refused(
        fetch.fetch_blocks(wire::blocks("blocks", &[0; 101])).await,
        TOO_MANY_ITEMS,
        "indices",
        &["101 items", "100", "limits.items_per_request", "split the batch"],
    );
    refused(
        fetch
            .fetch_ranges(wire::ranges("blocks", &[(0, 200_000); 2]))
            .await,
        RESPONSE_TOO_LARGE,
        "offsets",
        &["400000 bytes", "limits.response_bytes", "split the batch"],
    );
    refused(
        fetch.fetch_blocks(wire::blocks("blocks", &[0; 100])).await,
        RESPONSE_TOO_LARGE,
        "indices",
        &["409600 bytes", "limits.response_bytes", "split the batch"],
    );
    // A message of 8 MB, of which the daemon reads only the beginning.
    refused(
        fetch
            .fetch_blocks(wire::blocks("blocks", &vec![u64::MAX; 800_000]))
            .await,
        REQUEST_TOO_LARGE,
        "message",
        &["limits.request_bytes", "65536", "split the batch"],
    );
    fetch.fetch_blocks(wire::blocks("blocks", &[0])).await.unwrap();

    let mut datasets = daemon.datasets().await;
    let request = v1::GetDatasetRequest {
        name: "nothing".to_owned(),
    };
    refused(
        datasets.get_dataset(request).await,
        DATASET_NOT_FOUND,
        "name",
        &["\"nothing\""],
    );
    let request = wire::listing("blocks");
    refused(
        datasets.list_objects(request).await,
        WRONG_KIND,
        "dataset",
        &["kind blocks"],
    );

    let scrape = daemon.scrape().await;
    for (reason, refusals) in [("items", 1), ("response_bytes", 2)] {
        let refused = scrape.sum("ringfetch_rejected_total", &[("reason", reason)]);
        assert_eq!(refused, refusals, "{reason}");
    }
    for (method, calls) in [("FetchBlocks", 3), ("GetDataset", 1)] {
        let labels = [("transport", "grpc"), ("method", method), ("code", "NOT_FOUND")];
        let counted = scrape.sum("ringfetch_rpc_requests_total", &labels);
        assert_eq!(counted, calls, "{method}");
    }
    daemon.assert_serves("blocks").await;
    daemon.stop().await;
}

/// (object name, code, problem type, part of the message).
const BAD_NAMES: [(&str, Code, &str, &str); 8] = [
    (
        "../secret",
        Code::InvalidArgument,
        "object-name-invalid",
        "`..` part",
    ),
    (
        "nested/../../secret",
        Code::InvalidArgument,
        "object-name-invalid",
        "`..` part",
    ),
    (
        "/etc/passwd",
        Code::InvalidArgument,
        "object-name-invalid",
        "relative to the dataset's directory",
    ),
    (
        "nested//deeper/block",
        Code::InvalidArgument,
        "object-name-invalid",
        "an empty",
    ),
    ("a\0b", Code::InvalidArgument, "object-name-invalid", "NUL"),
    (
        "not there",
        Code::NotFound,
        "object-not-found",
        "no object \"not there\"",
    ),
    ("nested", Code::NotFound, "object-not-found", "no object"),
    ("leaves", Code::NotFound, "object-not-found", "no object"),
];

#[tokio::test]
async fn a_bad_item_is_told_alike_by_both_transports() {
    // Scenario: batches with good items and each kind of bad one, on every backend. Expectation: the good
    // items' bytes, and for each bad one the same code and message over gRPC and HTTP; with fail_fast, the
    // first fails the call.
    for backend in backends_and_auto() {
        let (daemon, bytes, everything) = serve(backend);
        let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());

        // Indices.
        let request = wire::blocks("blocks", &[0, 300, 1, u64::MAX]);
        let answer = fetch.fetch_blocks(request.clone()).await.unwrap().into_inner();
        assert_eq!(answer.lengths, [4096, 0, 4096, 0]);
        assert!(answer.data == bytes[..2 * 4096], "{backend}");
        let expected = [
            (1, Code::OutOfRange, "300 (block 0 to 299)"),
            (3, Code::OutOfRange, "is out of range"),
        ];
        items(&answer.errors, &expected);
        let path = "/v1/datasets/blocks/blocks:batchFetch";
        let mirrored = http.batch(path, &json!({"indices": request.indices}), JSON).await;
        alike(&mirrored, &answer.errors, &["index-out-of-range"; 2]);
        assert_eq!(mirrored.json()["lengths"], json!(answer.lengths));
        let mirrored = http
            .batch(path, &json!({"indices": request.indices}), OCTETS)
            .await;
        assert_eq!(mirrored.header("ringfetch-errors"), "2");
        assert_eq!(mirrored.header("ringfetch-error-items"), "1,3");
        assert_eq!(mirrored.header("ringfetch-item-bytes"), "4096");
        assert_eq!(mirrored.body, answer.data);
        let nothing = http.batch(path, &json!({"indices": [300]}), OCTETS).await;
        assert_eq!(nothing.status, 200);
        assert_eq!(nothing.header("ringfetch-error-items"), "0");
        let failing = json!({"indices": request.indices, "fail_fast": true});
        let failing = http.batch(path, &failing, OCTETS).await;
        failing.is_problem(404, "index-out-of-range", Some("indices"), &["item 1: block 300"]);
        refused(
            fetch
                .fetch_blocks(v1::FetchBlocksRequest {
                    fail_fast: true,
                    ..request
                })
                .await,
            INDEX_OUT_OF_RANGE,
            "indices",
            &["item 1: block 300 is out of range"],
        );

        // Ranges: past the end, overflow, empty, too large.
        let end = 300 * 4096;
        let wanted = [
            (end - 1, 1),
            (end - 1, 2),
            (u64::MAX, 2),
            (7, 0),
            (0, (256 << 10) + 1),
            (end, 1),
        ];
        let request = wire::ranges("blocks", &wanted);
        let answer = fetch.fetch_ranges(request.clone()).await.unwrap().into_inner();
        assert_eq!(answer.lengths, [1, 0, 0, 0, 0, 0]);
        assert!(answer.data == bytes[bytes.len() - 1..], "{backend}");
        items(
            &answer.errors,
            &[
                (1, Code::OutOfRange, "ask for at most 1"),
                (2, Code::InvalidArgument, "overflows 64 bits"),
                (3, Code::InvalidArgument, "length is 0: ask for at least one byte"),
                (4, Code::ResourceExhausted, "fetch it in ranges"),
                (5, Code::OutOfRange, "there are 1228800 bytes, counted from 0"),
            ],
        );
        assert!(
            answer
                .errors
                .iter()
                .all(|error| !error.message.contains("at most 0"))
        );
        let slugs = [
            "range-out-of-range",
            "range-overflow",
            "zero-length",
            "item-too-large",
            "range-out-of-range",
        ];
        let parts: Vec<_> = wanted
            .iter()
            .map(|(offset, length)| json!({"offset": offset, "length": length}))
            .collect();
        let path = "/v1/datasets/blocks/ranges:batchFetch";
        alike(
            &http.batch(path, &json!({ "ranges": parts }), JSON).await,
            &answer.errors,
            &slugs,
        );
        let failing = http
            .batch(path, &json!({"ranges": parts, "fail_fast": true}), JSON)
            .await;
        failing.is_problem(
            416,
            "range-out-of-range",
            Some("ranges"),
            &["item 1: ", "ends past the end"],
        );
        // Whatever an item's error says, the call's names the item.
        let fields = ["lengths", "offsets", "lengths", "lengths", "offsets"];
        for ((item, error), field) in (1..).zip(&answer.errors).zip(fields) {
            let wanted = [(0, 1), wanted[item]];
            let failing = v1::FetchRangesRequest {
                fail_fast: true,
                ..wire::ranges("blocks", &wanted)
            };
            let status = fetch.fetch_ranges(failing).await.unwrap_err();
            assert_eq!(status.message(), format!("item 1: {}", error.message));
            let found = status.get_details_bad_request().unwrap();
            assert_eq!(found.field_violations[0].field, field, "{status:?}");
        }

        let names: Vec<&str> = BAD_NAMES
            .iter()
            .map(|bad| bad.0)
            .chain(["one", "", ".hidden"])
            .collect();
        let answer = fetch
            .fetch_objects(wire::objects("objects", &names))
            .await
            .unwrap()
            .into_inner();
        let mut expected: Vec<_> = (0..)
            .zip(BAD_NAMES)
            .map(|(item, bad)| (item, bad.1, bad.3))
            .collect();
        expected.push((9, Code::InvalidArgument, "it is empty"));
        items(&answer.errors, &expected);
        assert_eq!(answer.lengths, [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 3]);
        let good = [&everything.objects[0].1[..], &everything.objects[7].1];
        assert_eq!(answer.data, good.concat());
        // Objects of one byte, of none, and of more than a response, and their parts.
        let (one, long) = (&["one"][..], &["one", "large.bin"][..]);
        for (names, offsets, lengths, code, field) in [
            (one, vec![2], vec![], Code::OutOfRange, "offsets"),
            (one, vec![1], vec![1], Code::OutOfRange, "offsets"),
            (one, vec![u64::MAX], vec![], Code::OutOfRange, "offsets"),
            (one, vec![0], vec![2], Code::OutOfRange, "lengths"),
            (one, vec![], vec![2], Code::OutOfRange, "lengths"),
            (&["empty"], vec![], vec![1], Code::OutOfRange, "lengths"),
            (long, vec![], vec![1, 3 << 20], Code::ResourceExhausted, "lengths"),
            (long, vec![], vec![1, 0], Code::ResourceExhausted, "names"),
            (long, vec![], vec![], Code::ResourceExhausted, "names"),
        ] {
            let request = v1::FetchObjectsRequest {
                offsets,
                lengths,
                fail_fast: true,
                ..wire::objects("objects", names)
            };
            let status = fetch.fetch_objects(request.clone()).await.unwrap_err();
            let found = status.get_details_bad_request().unwrap();
            assert_eq!(
                (status.code(), &found.field_violations[0].field[..]),
                (code, field)
            );
            // Nor a length that was not sent.
            let remedy = status.message();
            assert!(
                !["at most 0", "offset 2 + length", "+ length 1 "]
                    .iter()
                    .any(|part| remedy.contains(part)),
                "{remedy}"
            );
            let on_stream = wire::on_stream(1, Request::Objects(request));
            let mut answers = wire::stream(&mut fetch, [on_stream]).await;
            match answers.message().await.unwrap().unwrap().response {
                Some(Response::Status(streamed)) => {
                    let streamed = streamed.get_details_bad_request().unwrap();
                    assert_eq!(streamed.field_violations[0].field, field);
                }
                other => panic!("{other:?}"),
            }
        }
        let mut slugs = BAD_NAMES.map(|bad| bad.2).to_vec();
        slugs.push("object-name-invalid");
        let path = "/v1/datasets/objects/objects:batchFetch";
        alike(
            &http.batch(path, &json!({ "names": names }), JSON).await,
            &answer.errors,
            &slugs,
        );
        let mirrored = http.batch(path, &json!({ "names": names }), OCTETS).await;
        assert_eq!(mirrored.header("ringfetch-errors"), "9");
        assert_eq!(mirrored.header("ringfetch-lengths"), "0,0,0,0,0,0,0,0,1,0,3");
        assert_eq!(mirrored.body, answer.data);
        for (name, code, slug, part) in BAD_NAMES {
            let answer = http
                .get(&format!("/v1/datasets/objects/objects/{}", wire::escaped(name)))
                .await;
            let status = if code == Code::NotFound { 404 } else { 400 };
            answer.is_problem(status, slug, Some("object"), &[part]);
        }
        daemon.assert_serves("blocks").await;
        daemon.stop().await;
    }
}

fn items(errors: &[v1::ItemError], expected: &[(u32, Code, &str)]) {
    assert_eq!(errors.len(), expected.len(), "{errors:?}");
    for (error, (item, code, part)) in errors.iter().zip(expected) {
        assert_eq!((error.item, error.code), (*item, i32::from(*code)), "{error:?}");
        assert!(error.message.contains(part), "{part:?} is not in {error:?}");
    }
}

/// The errors over HTTP: the same items and messages, with these types.
fn alike(mirrored: &Answer, errors: &[v1::ItemError], slugs: &[&str]) {
    assert_eq!(mirrored.status, 200, "{mirrored:?}");
    let body = mirrored.json();
    let told = body["errors"].as_array().expect("errors");
    assert_eq!((told.len(), errors.len()), (slugs.len(), slugs.len()), "{body}");
    for ((told, error), slug) in told.iter().zip(errors).zip(slugs) {
        assert_eq!(told["item"], error.item);
        assert_eq!(told["message"], error.message);
        assert_eq!(told["code"], *slug);
    }
}

#[tokio::test]
#[ignore = "needs root"]
async fn an_object_that_may_not_be_read_is_permission_denied() {
    // Scenario: the daemon runs as another user; one object only its owner may read, one is in a closed
    // directory. Expectation: PERMISSION_DENIED and 403 for those, each counted as a read; the rest is served.
    use std::os::unix::fs::PermissionsExt as _;
    let setup = Setup::new("pread").open_to_all();
    let closed = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    setup.file("objects/fine", b"fine");
    closed(&setup.file("objects/private", b"private"), 0o600);
    setup.file("objects/closed/inside", b"inside");
    closed(&setup.path("objects/closed"), 0o700);
    let daemon = setup
        .dataset(&["name: objects", "kind: objects", "path: objects"])
        .through(&AS_NOBODY)
        .start();
    let mut fetch: FetchServiceClient<Wire> = daemon.fetch().await;
    let http: Http = daemon.http_client();
    let names = ["private", "fine", "closed/inside"];
    let answer = fetch
        .fetch_objects(wire::objects("objects", &names))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.data, &b"fine"[..]);
    let denied = "cannot be opened: Permission denied";
    items(
        &answer.errors,
        &[
            (0, Code::PermissionDenied, denied),
            (2, Code::PermissionDenied, denied),
        ],
    );
    for name in ["private", "closed/inside"] {
        let answer = http.get(&format!("/v1/datasets/objects/objects/{name}")).await;
        answer.is_problem(
            403,
            "object-unreadable",
            Some("object"),
            &[name, "Permission denied"],
        );
    }
    let unreadable = [("result", "unreadable")];
    let counted = daemon.sum("ringfetch_reads_total", &unreadable).await;
    assert_eq!(counted, 4, "two in the batch and two by GET");
    daemon.stop().await;
}
