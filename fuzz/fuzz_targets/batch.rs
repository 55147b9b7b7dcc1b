//! JSON batches against an independent interpretation of the same JSON: a valid batch is accepted, and an accepted one
//! gets exactly the bytes of its valid items, as bytes and in JSON, or the scores that a plain sum gives. The first byte
//! chooses the operation and the form of the answer.
#![no_main]

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{Method, Request};
use libfuzzer_sys::{Corpus, fuzz_target};
use ringfetch_fuzz::items::Batch;
use ringfetch_fuzz::{BLOCK_BYTES, REQUEST_BYTES, VECTOR_BYTES, WORLD, World, check, part, scores};
use ringfetch_proto::v1;
use serde_json::Value;

const OPERATIONS: [&str; 6] = [
    "b/blocks:batchFetch",
    "v/vectors:batchFetch",
    "b/ranges:batchFetch",
    "v/ranges:batchFetch",
    "o/objects:batchFetch",
    "v/vectors:score",
];

const SCORE: &str = "v/vectors:score";

/// A deadline that does not pass.
const LONG_MS: u64 = 20_000;

/// The batch of a request, as lenient as possible; `None`: some number or name is invalid, so it must be refused.
fn batch<'a>(world: &'a World, operation: &str, request: &Value) -> Option<Batch<'a>> {
    let list = |member: &str| request[member].as_array().map(Vec::as_slice).unwrap_or_default();
    let number = |value: &Value| if value.is_null() { Some(0) } else { value.as_u64() };
    let mut bytes = 0_u64;
    let mut count = |item: Option<&'a [u8]>, length: u64| {
        bytes = bytes.saturating_add(length);
        Some(item)
    };
    let items: Option<Vec<_>> = match operation {
        "b/blocks:batchFetch" => list("indices")
            .iter()
            .map(|index| count(world.block(index.as_u64()?), BLOCK_BYTES as u64))
            .collect(),
        "v/vectors:batchFetch" => list("ids")
            .iter()
            .map(|id| count(world.vector(id.as_u64()?), VECTOR_BYTES as u64))
            .collect(),
        "o/objects:batchFetch" => {
            let length_of = |name: &str| world.object(name).map_or(0, <[u8]>::len) as u64;
            let whole: Option<Vec<_>> = list("names")
                .iter()
                .map(|name| count(world.object(name.as_str()?), length_of(name.as_str()?)))
                .collect();
            let parts: Option<Vec<_>> = list("objects")
                .iter()
                .map(|entry| {
                    let tag = entry["if_match"].as_str().unwrap_or_default();
                    // A tag has no quotes here.
                    if tag.contains('"') {
                        return None;
                    }
                    let (offset, length) = (number(&entry["offset"])?, number(&entry["length"])?);
                    let name = entry["name"].as_str()?;
                    let found = world.object_part(name, offset, length);
                    // No input can guess the tag of a file of this run.
                    count(found.filter(|_| tag.is_empty()), length.max(length_of(name)))
                })
                .collect();
            Some([whole?, parts?].concat())
        }
        _ => {
            let space = world.address_space(&operation[..1])?;
            list("ranges")
                .iter()
                .map(|range| {
                    let (offset, length) = (range["offset"].as_u64()?, range["length"].as_u64()?);
                    count(part(space, offset, length), length)
                })
                .collect()
        }
    };
    Some(Batch {
        items: items?,
        bytes,
        fail_fast: request["fail_fast"] == true,
    })
}

/// The same for a request for scores.
fn scoring(request: &Value) -> Option<v1::ScoreVectorsRequest> {
    let float = |value: &Value| {
        let whole = value.as_u64().map(|value| value as f32);
        let whole = whole.or(value.as_i64().map(|value| value as f32));
        whole.or(value.as_f64().map(|value| value as f32))
    };
    let query = |query: &Value| {
        Some(v1::ScoreQuery {
            vector: query["vector"]
                .as_array()?
                .iter()
                .map(float)
                .collect::<Option<_>>()?,
            ids: query["ids"]
                .as_array()?
                .iter()
                .map(Value::as_u64)
                .collect::<Option<_>>()?,
        })
    };
    let metric = match request["metric"].as_str()? {
        "dot" => v1::Metric::Dot,
        "cosine" => v1::Metric::Cosine,
        "euclidean" => v1::Metric::Euclidean,
        "manhattan" => v1::Metric::Manhattan,
        _ => return None,
    };
    Some(v1::ScoreVectorsRequest {
        dataset: "v".to_owned(),
        queries: request["queries"]
            .as_array()?
            .iter()
            .map(query)
            .collect::<Option<_>>()?,
        metric: metric.into(),
        limit: request["limit"].as_u64()?.try_into().ok()?,
        threshold: match &request["threshold"] {
            Value::Null => None,
            threshold => Some(threshold.as_f64()?),
        },
        fail_fast: request["fail_fast"] == true,
        if_match: String::new(),
    })
}

/// The scores of an answer.
fn scored(body: &[u8]) -> v1::ScoreVectorsResponse {
    let answer: Value = serde_json::from_slice(body).unwrap();
    let number = |value: &Value| value.as_u64().expect("a number");
    let list = |value: &Value| value.as_array().expect("a list").clone();
    // To the last bit, which serde_json does not read by default.
    let text = std::str::from_utf8(body).unwrap();
    let exact = text.split("\"scores\":[").skip(1).map(|rest| {
        let numbers = rest.split(']').next().unwrap_or_default().split_terminator(',');
        numbers.map(|number| number.parse().expect("a number")).collect()
    });
    let result = |(result, scores): (&Value, Vec<f64>)| v1::ScoreResult {
        ids: list(&result["ids"]).iter().map(number).collect(),
        scores,
        unscored: number(&result["unscored"]) as u32,
        errors: list(&result["errors"])
            .iter()
            .map(|error| v1::ItemError {
                item: number(&error["item"]) as u32,
                ..Default::default()
            })
            .collect(),
    };
    v1::ScoreVectorsResponse {
        results: list(&answer["results"]).iter().zip(exact).map(result).collect(),
        ..Default::default()
    }
}

/// Whether the text is of exactly the members that a request has, each once and none of them null, and its deadline does
/// not pass.
fn is_clean(operation: &str, json: &[u8], request: &Value) -> bool {
    let (lists, others, of_entries): (&[&str], &[&str], &[&str]) = match operation {
        "b/blocks:batchFetch" => (&["indices"], &[], &[]),
        "v/vectors:batchFetch" => (&["ids"], &[], &[]),
        "o/objects:batchFetch" => (
            &["names", "objects"],
            &[],
            &["name", "offset", "length", "if_match"],
        ),
        SCORE => (
            &["queries"],
            &["metric", "limit", "threshold"],
            &["vector", "ids"],
        ),
        _ => (&["ranges"], &[], &["offset", "length"]),
    };
    let is_member = |(name, value): (&String, &Value)| match name.as_str() {
        "fail_fast" => value.is_boolean(),
        "deadline_ms" => value
            .as_u64()
            .is_some_and(|ms| ms == 0 || (LONG_MS..=u32::MAX.into()).contains(&ms)),
        name => !value.is_null() && (lists.contains(&name) || others.contains(&name)),
    };
    let is_of_entry = |(name, value): (&String, &Value)| {
        of_entries.contains(&name.as_str()) && !value.is_null() && (name != "if_match" || value.is_string())
    };
    let mut entries = lists
        .iter()
        .filter_map(|list| request[list].as_array())
        .flatten()
        .filter_map(Value::as_object);
    request
        .as_object()
        .is_some_and(|members| members.iter().all(is_member))
        && lists.iter().filter(|list| !request[list].is_null()).count() == 1
        && entries.all(|members| members.iter().all(is_of_entry))
        && colons(json) == members_of(request)
}

/// Colons outside strings: as many as there are members, repeated ones included.
fn colons(json: &[u8]) -> usize {
    let (mut colons, mut in_string, mut is_escaped) = (0, false, false);
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => in_string = !in_string,
            b':' if !in_string => colons += 1,
            _ => {}
        }
    }
    colons
}

fn members_of(value: &Value) -> usize {
    match value {
        Value::Object(members) => members.len() + members.values().map(members_of).sum::<usize>(),
        Value::Array(values) => values.iter().map(members_of).sum(),
        _ => 0,
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
    let request: Value = match serde_json::from_slice(json) {
        Ok(request) => request,
        Err(error) => {
            assert_ne!(answer.status, 200, "{error}: accepted");
            return Corpus::Keep;
        }
    };
    let is_clear = json.len() <= REQUEST_BYTES as usize && is_clean(operation, json, &request);
    if operation == SCORE {
        let scoring = scoring(&request);
        if answer.status == 200 {
            let scoring = scoring.expect("what was accepted has numbers and a metric");
            scores::check(world, &scoring, &scored(&answer.body));
        } else {
            let refused =
                scoring.filter(|scoring| is_clear && as_json && scores::must_succeed(world, scoring));
            assert!(refused.is_none(), "{request} was refused: {answer:?}");
        }
        return Corpus::Keep;
    }
    let batch = batch(world, operation, &request);
    if answer.status != 200 {
        let refused = batch.filter(|batch| is_clear && batch.must_succeed());
        assert!(refused.is_none(), "{request} was refused: {answer:?}");
        return Corpus::Keep;
    }
    let batch = batch.expect("what was accepted has numbers and names");
    let number = |text: &str| text.trim().parse::<u32>().expect("a number");
    if as_json {
        let response: Value = serde_json::from_slice(&answer.body).unwrap();
        let data = BASE64_STANDARD
            .decode(response["data"].as_str().unwrap_or_default())
            .unwrap();
        let errors = response["errors"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        batch.check(
            &data,
            errors.iter().map(|error| error["item"].as_u64().unwrap() as u32),
        );
    } else {
        let failed = answer.header("ringfetch-error-items").split_terminator(',');
        batch.check(&answer.body, failed.map(number));
        assert_eq!(
            number(answer.header("ringfetch-items")) as usize,
            batch.items.len(),
            "{answer:?}"
        );
    }
    Corpus::Keep
});
