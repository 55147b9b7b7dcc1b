//! JSON batches against an independent interpretation of the same JSON: an accepted batch gets exactly the
//! bytes of its valid items, as bytes and in JSON. The first byte chooses the operation and the form of the
//! answer.
#![no_main]

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{Method, Request};
use libfuzzer_sys::{Corpus, fuzz_target};
use ringfetch_fuzz::{ITEMS_MAX, WORLD, World, check, part};
use serde_json::Value;

const OPERATIONS: [&str; 6] = [
    "b/blocks:batchFetch",
    "v/vectors:batchFetch",
    "b/ranges:batchFetch",
    "v/ranges:batchFetch",
    "o/objects:batchFetch",
    "v/vectors:score",
];

/// The bytes of each item; `None`: it fails. The outer `None`: some number is invalid, so the batch must be
/// refused.
fn items<'a>(world: &'a World, operation: &str, request: &Value) -> Option<Vec<Option<&'a [u8]>>> {
    let list = |member: &str| request[member].as_array().map(Vec::as_slice).unwrap_or_default();
    let number = |value: &Value| if value.is_null() { Some(0) } else { value.as_u64() };
    match operation {
        "b/blocks:batchFetch" => list("indices")
            .iter()
            .map(|index| Some(world.block(index.as_u64()?)))
            .collect(),
        "v/vectors:batchFetch" => list("ids")
            .iter()
            .map(|id| Some(world.vector(id.as_u64()?)))
            .collect(),
        "o/objects:batchFetch" => {
            let whole = list("names")
                .iter()
                .map(|name| Some(world.object(name.as_str()?)));
            let parts = list("objects").iter().map(|entry| {
                let other_version = entry["if_match"].as_str().is_some_and(|tag| !tag.is_empty());
                let (offset, length) = (number(&entry["offset"])?, number(&entry["length"])?);
                let found = world.object_part(entry["name"].as_str()?, offset, length);
                // No input can guess the tag of a file of this run.
                Some(found.filter(|_| !other_version))
            });
            whole.chain(parts).collect()
        }
        _ => {
            let space = world.address_space(&operation[..1])?;
            list("ranges")
                .iter()
                .map(|range| Some(part(space, range["offset"].as_u64()?, range["length"].as_u64()?)))
                .collect()
        }
    }
}

fuzz_target!(|input: &[u8]| -> Corpus {
    let Some((selector, json)) = input.split_first() else {
        return Corpus::Reject;
    };
    let operation = OPERATIONS[usize::from(*selector) % OPERATIONS.len()];
    let as_json = *selector >= 128;
    let request = Request::post(format!("/v1/datasets/{operation}"))
        .header("content-type", "application/json")
        .header(
            "accept",
            if as_json {
                "application/json"
            } else {
                "application/octet-stream"
            },
        )
        .body(Bytes::copy_from_slice(json))
        .unwrap();
    let world = &*WORLD;
    let answer = world.over_http(request);
    check::form(&Method::POST, &answer);
    if answer.status != 200 || operation == "v/vectors:score" {
        return Corpus::Keep;
    }
    let request: Value = serde_json::from_slice(json).expect("what was accepted is JSON");
    let items = items(world, operation, &request).expect("what was accepted has numbers and names");
    assert!(
        items.len() <= ITEMS_MAX as usize,
        "{} items were accepted",
        items.len()
    );
    let expected = items.iter().copied().flatten().collect::<Vec<_>>().concat();
    let failed = items.iter().filter(|item| item.is_none()).count();
    if as_json {
        let response: Value = serde_json::from_slice(&answer.body).unwrap();
        let data = response["data"].as_str().unwrap_or_default();
        assert_eq!(BASE64_STANDARD.decode(data).unwrap(), expected);
        assert_eq!(
            response["errors"].as_array().map_or(0, Vec::len),
            failed,
            "{response}"
        );
    } else {
        assert_eq!(answer.body, expected);
        assert_eq!(
            answer.header("ringfetch-items"),
            items.len().to_string(),
            "{answer:?}"
        );
    }
    Corpus::Keep
});
