//! Checks that hold for every HTTP answer, whatever the request.

use crate::{Answer, World, part};
use http::{Method, StatusCode};
use serde_json::Value;

/// Statuses that a request can cause (docs/API.md). 500 is a defect; 503 is impossible, since requests come
/// one at a time.
const POSSIBLE: [u16; 14] = [
    200, 206, 304, 400, 404, 405, 406, 408, 412, 413, 415, 416, 422, 504,
];

/// Checks an answer's status, length and, where it is a problem, its body.
pub fn form(method: &Method, answer: &Answer) {
    assert!(POSSIBLE.contains(&answer.status.as_u16()), "{answer:?}");
    let has_body = *method != Method::HEAD && answer.status != StatusCode::NOT_MODIFIED;
    if let Some(length) = answer.headers.get("content-length").filter(|_| has_body) {
        assert_eq!(
            length.as_bytes(),
            answer.body.len().to_string().as_bytes(),
            "{answer:?}"
        );
    }
    if !has_body {
        // For HEAD, hyper omits the body of a problem.
        assert!(
            answer.status.as_u16() >= 400 || answer.body.is_empty(),
            "{answer:?}"
        );
    } else if answer.status.as_u16() >= 400 {
        assert_eq!(answer.header("content-type"), "application/problem+json");
        let problem: Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(problem["status"], answer.status.as_u16());
        assert!(
            problem["type"]
                .as_str()
                .is_some_and(|kind| kind.starts_with("/problems/"))
        );
        assert!(problem["detail"].is_string() && problem["instance"].is_string());
    }
}

/// The bytes of a path without escapes: of an address space, a block, a vector or an object.
pub fn resource<'a>(world: &'a World, path: &str) -> Option<&'a [u8]> {
    let (dataset, rest) = path.strip_prefix("/v1/datasets/")?.split_once('/')?;
    if rest == "bytes" {
        return world.address_space(dataset);
    }
    let (kind, item) = rest.split_once('/')?;
    match (dataset, kind) {
        ("b", "blocks") => world.block(item.parse().ok()?),
        ("v", "vectors") => world.vector(item.parse().ok()?),
        ("o", "objects") => world.object(item),
        _ => None,
    }
}

/// Checks the bytes of a 200 or 206 for a GET against those of its path.
pub fn bytes(expected: &[u8], answer: &Answer) {
    let media_type = answer.header("content-type");
    if answer.status == StatusCode::OK && media_type == "application/octet-stream" {
        assert_eq!(answer.body, expected, "{answer:?}");
    }
    if answer.status != StatusCode::PARTIAL_CONTENT {
        return;
    }
    match media_type.split_once("boundary=") {
        None => assert_eq!(
            answer.body,
            placed(answer.header("content-range"), expected),
            "{answer:?}"
        ),
        Some((_, boundary)) => multipart(boundary, expected, &answer.body),
    }
}

/// The bytes that a Content-Range names.
fn placed<'a>(content_range: &str, of: &'a [u8]) -> &'a [u8] {
    let (range, length) = content_range
        .strip_prefix("bytes ")
        .unwrap()
        .split_once('/')
        .unwrap();
    assert_eq!(length, of.len().to_string());
    let (first, last) = range.split_once('-').unwrap();
    let (first, last): (u64, u64) = (first.parse().unwrap(), last.parse().unwrap());
    part(of, first, last - first + 1).expect("a range inside the resource")
}

/// Reads a multipart/byteranges body part by part (RFC 2046): each has its bytes, and nothing remains.
fn multipart(boundary: &str, expected: &[u8], mut body: &[u8]) {
    let (delimiter, mut parts) = (format!("--{boundary}"), 0);
    loop {
        body = body.strip_prefix(delimiter.as_bytes()).expect("a delimiter");
        if body == b"--\r\n" {
            return assert!(parts >= 2, "one part needs no multipart");
        }
        let end = body
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
            .expect("the end of a part's head");
        let head = std::str::from_utf8(&body[..end]).unwrap();
        let range = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Range: "))
            .expect("its range");
        let bytes = placed(range, expected);
        body = body[end + 4..].strip_prefix(bytes).expect("its bytes");
        body = body.strip_prefix(b"\r\n").expect("the end of a part");
        parts += 1;
    }
}
