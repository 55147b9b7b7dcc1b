//! Both transports, every kind of dataset and layout, every backend: the same bytes, which are those of the
//! files.

use crate::daemon::{Setup, any_backend, setups};
use crate::data::{Everything, Space, Unit, everything};
use crate::wire::{self, Http, Wire, escaped};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::Method;
use ringfetch_proto::v1;
use ringfetch_proto::v1::fetch_service_client::FetchServiceClient;
use ringfetch_proto::v1::fetch_stream_request::Request;
use ringfetch_proto::v1::fetch_stream_response::Response;
use serde_json::{Value, json};

const OCTETS: &str = "application/octet-stream";
const JSON: &str = "application/json";

#[tokio::test]
async fn both_transports_serve_the_bytes_of_the_files() {
    // Scenario: each dataset read with unary calls, on a stream, and item by item and in batches over HTTP.
    // Expectation: the files' bytes every time, on each backend, and over TLS.
    for setup in setups() {
        let (setup, everything) = everything(setup);
        let daemon = setup.set("limits.response_bytes", "8MiB").start();
        let (mut fetch, http) = (daemon.fetch().await, daemon.http_client());
        for space in &everything.spaces {
            units(&mut fetch, &http, space).await;
            ranges(&mut fetch, &http, space).await;
        }
        objects(&mut fetch, &http, &everything).await;
        described(
            &daemon,
            &daemon.http_client(),
            &mut daemon.datasets().await,
            &everything,
        )
        .await;
        daemon.stop().await;
    }
}

#[tokio::test]
async fn a_vector_as_json_is_its_elements() {
    // Scenario: a vector is requested alone as JSON. Expectation: an array of its numbers.
    let setup = Setup::new(any_backend());
    let elements: Vec<u8> = (0..400_u16).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    setup.file("vectors.dat", &elements);
    let daemon = setup
        .dataset(&["{name: vectors, kind: vectors, path: vectors.dat, layout: raw, dim: 4, dtype: f32}"])
        .start();
    let http = daemon.http_client();
    let answer = http
        .get_with("/v1/datasets/vectors/vectors/2", &[("accept", JSON)])
        .await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json(), json!([8.0, 9.0, 10.0, 11.0]));
    daemon.stop().await;
}

/// Items of a batch: the first, the last, some out of order, one twice.
fn indices(count: usize) -> Vec<u64> {
    let last = count as u64 - 1;
    vec![0, last, last / 2, 1, last / 2, 2, last - 1]
}

async fn units(fetch: &mut FetchServiceClient<Wire>, http: &Http, space: &Space) {
    let name = space.name;
    let wanted = indices(space.items.len());
    let expected: Vec<u8> = wanted
        .iter()
        .flat_map(|index| space.items[usize::try_from(*index).unwrap()].clone())
        .collect();
    let length = space.items[0].len();

    // gRPC, unary and streamed.
    let (data, request) = match space.unit {
        Unit::Blocks => {
            let request = wire::blocks(name, &wanted);
            let answer = fetch.fetch_blocks(request.clone()).await.unwrap().into_inner();
            assert_eq!(
                (answer.block_bytes as usize, answer.lengths, answer.errors),
                (length, vec![], vec![])
            );
            (answer.data, Request::Blocks(request))
        }
        Unit::Vectors(dim, dtype) => {
            let request = wire::vectors(name, &wanted);
            let answer = fetch.fetch_vectors(request.clone()).await.unwrap().into_inner();
            assert_eq!(
                answer.dtype().as_str_name(),
                format!("DTYPE_{}", dtype.to_uppercase())
            );
            assert_eq!((answer.dim, answer.lengths, answer.errors), (dim, vec![], vec![]));
            (answer.data, Request::Vectors(request))
        }
    };
    assert!(data == expected, "{name}: unary");
    assert!(streamed(fetch, request).await == expected, "{name}: stream");

    // HTTP: one by one, and in batches in both formats.
    let (resource, member) = match space.unit {
        Unit::Blocks => ("blocks", "indices"),
        Unit::Vectors(..) => ("vectors", "ids"),
    };
    for index in &wanted {
        let answer = http.get(&format!("/v1/datasets/{name}/{resource}/{index}")).await;
        assert_eq!(
            (answer.status.as_u16(), answer.header("content-type")),
            (200, OCTETS),
            "{name}"
        );
        assert!(
            answer.body == space.items[usize::try_from(*index).unwrap()],
            "{name} {index}"
        );
        if let Unit::Vectors(dim, dtype) = space.unit {
            assert_eq!(answer.header("ringfetch-dim"), dim.to_string());
            assert_eq!(answer.header("ringfetch-dtype"), dtype);
        }
    }
    let path = format!("/v1/datasets/{name}/{resource}:batchFetch");
    let body = json!({ member: wanted });
    let answer = http.batch(&path, &body, OCTETS).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.header("ringfetch-items"), wanted.len().to_string());
    assert_eq!(answer.header("ringfetch-item-bytes"), length.to_string());
    assert_eq!(answer.header("ringfetch-errors"), "0");
    if let Unit::Vectors(dim, dtype) = space.unit {
        assert_eq!(answer.header("ringfetch-dim"), dim.to_string());
        assert_eq!(answer.header("ringfetch-dtype"), dtype);
    }
    assert!(answer.body == expected, "{name}: octets");
    let answer = http.batch(&path, &body, JSON).await.json();
    assert_eq!(
        (&answer["items"], &answer["item_bytes"]),
        (&json!(wanted.len()), &json!(length))
    );
    if let Unit::Vectors(dim, dtype) = space.unit {
        assert_eq!((&answer["dim"], &answer["dtype"]), (&json!(dim), &json!(dtype)));
    }
    assert!(data_of(&answer) == expected, "{name}: JSON");
}

async fn ranges(fetch: &mut FetchServiceClient<Wire>, http: &Http, space: &Space) {
    let name = space.name;
    let length = space.bytes.len() as u64;
    // The first byte, the last, an odd piece, one across 4 KiB and (in `joined`) across files, and
    // everything.
    let middle = length * 40_020 / 63_000;
    let wanted = [
        (0, 1),
        (length - 1, 1),
        (length / 3, 7),
        (middle.saturating_sub(50), length.min(100) / 2),
        (0, length),
    ];
    let expected = wanted
        .map(|(offset, length)| slice(&space.bytes, offset, length))
        .concat();
    let lengths: Vec<u32> = wanted
        .iter()
        .map(|range| u32::try_from(range.1).unwrap())
        .collect();

    let request = wire::ranges(name, &wanted);
    let answer = fetch.fetch_ranges(request.clone()).await.unwrap().into_inner();
    assert_eq!(
        (answer.lengths, answer.errors),
        (lengths.clone(), vec![]),
        "{name}"
    );
    assert!(answer.data == expected, "{name}: unary ranges");
    assert!(
        streamed(fetch, Request::Ranges(request)).await == expected,
        "{name}: stream of ranges"
    );

    for (offset, length) in wanted {
        let range = format!("bytes={offset}-{}", offset + length - 1);
        let answer = http
            .get_with(&format!("/v1/datasets/{name}/bytes"), &[("range", &range)])
            .await;
        assert_eq!(answer.status, 206, "{name} {range}: {answer:?}");
        assert!(
            answer.body == slice(&space.bytes, offset, length),
            "{name}: {range}"
        );
    }
    let path = format!("/v1/datasets/{name}/ranges:batchFetch");
    let parts: Vec<Value> = wanted
        .iter()
        .map(|(offset, length)| json!({"offset": offset, "length": length}))
        .collect();
    let answer = http.batch(&path, &json!({ "ranges": parts }), OCTETS).await;
    let listed: Vec<String> = lengths.iter().map(u32::to_string).collect();
    assert_eq!(answer.header("ringfetch-lengths"), listed.join(","), "{answer:?}");
    assert!(answer.body == expected, "{name}: octets of ranges");
    let answer = http.batch(&path, &json!({ "ranges": parts }), JSON).await.json();
    assert_eq!(answer["lengths"], json!(lengths));
    assert!(data_of(&answer) == expected, "{name}: JSON of ranges");
}

async fn objects(fetch: &mut FetchServiceClient<Wire>, http: &Http, everything: &Everything) {
    let names: Vec<&str> = everything.objects.iter().map(|object| object.0).collect();
    let whole = everything
        .objects
        .iter()
        .flat_map(|object| object.1.clone())
        .collect::<Vec<u8>>();
    let lengths: Vec<u32> = everything
        .objects
        .iter()
        .map(|object| u32::try_from(object.1.len()).unwrap())
        .collect();

    let request = wire::objects("objects", &names);
    let answer = fetch.fetch_objects(request.clone()).await.unwrap().into_inner();
    assert_eq!((answer.lengths, answer.errors), (lengths.clone(), vec![]));
    assert!(answer.data == whole, "unary objects");
    assert!(
        streamed(fetch, Request::Objects(request)).await == whole,
        "stream of objects"
    );

    for (name, content) in &everything.objects {
        let answer = http
            .get(&format!("/v1/datasets/objects/objects/{}", escaped(name)))
            .await;
        assert_eq!(answer.status, 200, "{name}: {answer:?}");
        assert!(answer.body == *content, "{name}");
    }
    let path = "/v1/datasets/objects/objects:batchFetch";
    let answer = http.batch(path, &json!({ "names": names }), OCTETS).await;
    let listed: Vec<String> = lengths.iter().map(u32::to_string).collect();
    assert_eq!(answer.header("ringfetch-lengths"), listed.join(","), "{answer:?}");
    assert!(answer.body == whole, "octets of objects");
    let answer = http.batch(path, &json!({ "names": names }), JSON).await.json();
    assert!(data_of(&answer) == whole, "JSON of objects");

    // Parts: 10 bytes from 3, from 4000 to the end, of an object without bytes, the last byte, the whole one
    // again.
    let (large, block) = (&everything.objects[2].1, &everything.objects[3].1);
    let parts = v1::FetchObjectsRequest {
        offsets: vec![3, 4000, 0, 4095, 0],
        lengths: vec![10, 0, 0, 1, 4096],
        ..wire::objects(
            "objects",
            &[
                "large.bin",
                "nested/deeper/block",
                "empty",
                "nested/deeper/block",
                "nested/deeper/block",
            ],
        )
    };
    let expected = [&large[3..13], &block[4000..], &block[4095..], block].concat();
    let answer = fetch.fetch_objects(parts).await.unwrap().into_inner();
    assert_eq!(
        (answer.lengths, answer.errors),
        (vec![10, 96, 0, 1, 4096], vec![])
    );
    assert!(answer.data == expected, "unary parts");
    let parts = json!({"objects": [
        {"name": "large.bin", "offset": 3, "length": 10}, {"name": "nested/deeper/block", "offset": 4000},
        {"name": "empty"}, {"name": "nested/deeper/block", "offset": 4095, "length": 1},
        {"name": "nested/deeper/block"},
    ]});
    let answer = http.batch(path, &parts, OCTETS).await;
    assert_eq!(answer.header("ringfetch-lengths"), "10,96,0,1,4096", "{answer:?}");
    assert!(answer.body == expected, "octets of parts");

    // A link that stays inside is served; one that leads outside is not found.
    let answer = fetch
        .fetch_objects(wire::objects("objects", &["stays", "leaves"]))
        .await
        .unwrap()
        .into_inner();
    assert!(answer.data == everything.objects[0].1);
    assert_eq!((answer.errors.len(), answer.errors[0].item), (1, 1));
    assert_eq!(answer.errors[0].code, i32::from(tonic::Code::NotFound));
    assert_eq!(http.get("/v1/datasets/objects/objects/leaves").await.status, 404);
}

/// The descriptions over both transports agree, with each other and with the files.
async fn described(
    daemon: &crate::daemon::Daemon,
    http: &Http,
    datasets: &mut v1::dataset_service_client::DatasetServiceClient<Wire>,
    everything: &Everything,
) {
    let listed = datasets
        .list_datasets(v1::ListDatasetsRequest::default())
        .await
        .unwrap()
        .into_inner()
        .datasets;
    let mirrored = http.get("/v1/datasets").await.json();
    assert_eq!(listed.len(), everything.spaces.len() + 1);
    let status = daemon.status().await;
    let mut statuses = status.datasets.iter();
    let figures = http.get("/v1/status").await.json();
    let mut figures = figures["datasets"].as_array().unwrap().iter();
    for (dataset, mirrored) in listed.iter().zip(mirrored["datasets"].as_array().unwrap()) {
        let name = &dataset.name;
        let request = v1::GetDatasetRequest { name: name.clone() };
        assert_eq!(
            datasets
                .get_dataset(request)
                .await
                .unwrap()
                .into_inner()
                .dataset
                .as_ref(),
            Some(dataset)
        );
        assert_eq!(&http.get(&format!("/v1/datasets/{name}")).await.json(), mirrored);

        let word = |name: &str| name.rsplit('_').next().unwrap().to_lowercase();
        assert_eq!(mirrored["name"], *name);
        assert_eq!(mirrored["kind"], word(dataset.kind().as_str_name()));
        assert_eq!(mirrored["length_bytes"], dataset.length_bytes);
        assert_eq!(mirrored["count"], dataset.count);
        assert_eq!(mirrored["etag"], dataset.etag, "{name}");
        // How it is read is only for operators.
        assert!(
            mirrored["read_path"].is_null() && mirrored["files"].is_null(),
            "{mirrored}"
        );
        let (seen, told) = (statuses.next().unwrap(), figures.next().unwrap());
        assert_eq!(seen.dataset.as_ref(), Some(dataset));
        let path = seen.read_path.as_ref().unwrap();
        for (member, value) in mirrored.as_object().unwrap() {
            assert_eq!(&told[member], value, "{name}");
        }
        assert_eq!(told["files"], seen.files);
        assert_eq!(told["reads_total"], seen.reads_total, "{name}");
        assert_eq!(told["backend"], word(path.backend().as_str_name()));
        assert_eq!(told["requested"], word(path.requested().as_str_name()));
        assert_eq!(told["reason"], path.reason);
        assert_eq!(told["own_backend"], path.own_backend);
        assert_eq!(told["direct_io"], path.direct_io, "{name}");
        assert_eq!(told["direct_io_reason"], path.direct_io_reason, "{name}");
        assert_eq!(told["offset_alignment_bytes"], path.offset_alignment_bytes);
        assert_eq!(told["memory_alignment_bytes"], path.memory_alignment_bytes);
        // mmap reads through the page cache, whatever the file supports; the others use direct I/O on this
        // disk.
        assert_eq!(
            path.direct_io,
            path.backend() != v1::Backend::Mmap,
            "{name}: {}",
            path.direct_io_reason
        );

        let Some(space) = everything.spaces.iter().find(|space| space.name == name) else {
            assert_eq!(
                (name.as_str(), dataset.etag.as_str(), dataset.count),
                ("objects", "", 0)
            );
            assert_eq!(dataset.length_bytes, 0);
            continue;
        };
        let path = format!("/v1/datasets/{name}/bytes");
        let head = http.send(Method::HEAD, &path, &[], "").await;
        assert_eq!(head.header("etag"), format!("\"{}\"", dataset.etag));
        assert_eq!(dataset.count, space.items.len() as u64);
        assert_eq!(dataset.length_bytes, space.bytes.len() as u64);
        assert_eq!(seen.files, if name == "joined" { 3 } else { 1 });
        match (space.unit, &dataset.vectors) {
            (Unit::Blocks, None) => {
                assert_eq!(dataset.block_bytes as usize, space.items[0].len());
                assert_eq!(mirrored["block_bytes"], dataset.block_bytes);
            }
            (Unit::Vectors(dim, dtype), Some(shape)) => {
                assert_eq!(
                    (shape.dim, word(shape.dtype().as_str_name()).as_str()),
                    (dim, dtype)
                );
                let mirrored = &mirrored["vectors"];
                assert_eq!(
                    (&mirrored["dim"], &mirrored["dtype"]),
                    (&json!(dim), &json!(dtype))
                );
                assert_eq!(mirrored["layout"], shape.layout);
                if name == "fvecs" {
                    assert_eq!((shape.layout.as_str(), shape.vector_bytes), ("fvecs", 12));
                }
                assert_eq!(told["stride_bytes"], seen.stride_bytes);
                // Vector 1 is where the status says.
                let begin = seen.base_offset + seen.stride_bytes;
                let found = slice(&space.bytes, begin, shape.vector_bytes.into());
                assert!(found == space.items[1], "{name}");
            }
            (unit, shape) => panic!("{name}: {unit:?} {shape:?}"),
        }
    }
}

/// The response to one request on its own stream.
async fn streamed(fetch: &mut FetchServiceClient<Wire>, request: Request) -> Bytes {
    let request = wire::on_stream(u64::MAX, request);
    let mut answers = wire::stream(fetch, [request]).await;
    let answer = answers.message().await.unwrap().expect("an answer");
    assert_eq!(answer.id, u64::MAX);
    assert_eq!(
        answers.message().await.unwrap(),
        None,
        "one answer to one request"
    );
    match answer.response.expect("a response") {
        Response::Blocks(answer) => answer.data,
        Response::Vectors(answer) => answer.data,
        Response::Ranges(answer) => answer.data,
        Response::Objects(answer) => answer.data,
        Response::Scores(answer) => panic!("{answer:?}"),
        Response::Status(error) => panic!("{error:?}"),
    }
}

fn slice(bytes: &[u8], offset: u64, length: u64) -> Vec<u8> {
    let offset = usize::try_from(offset).unwrap();
    bytes[offset..offset + usize::try_from(length).unwrap()].to_vec()
}

fn data_of(answer: &Value) -> Vec<u8> {
    BASE64_STANDARD
        .decode(answer["data"].as_str().expect("data"))
        .expect("base64")
}
