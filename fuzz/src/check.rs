//! Checks that hold for every HTTP answer, whatever the request.

use crate::{Answer, World, part};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode};
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
    // No sign, which `parse` would accept.
    let number = || {
        item.parse()
            .ok()
            .filter(|_| item.bytes().all(|byte| byte.is_ascii_digit()))
    };
    match (dataset, kind) {
        ("b", "blocks") => world.block(number()?),
        ("v", "vectors") => world.vector(number()?),
        ("o", "objects") => world.object(item),
        _ => None,
    }
}

/// Checks the answer to a GET of what [`resource`] found: its bytes, and its status if no header but one simple Range
/// has a say in it.
pub fn bytes(whole: &[u8], request: &Request<Bytes>, answer: &Answer) {
    let (path, headers) = (request.uri().path(), request.headers());
    let has_ranges = path.ends_with("/bytes") || path.contains("/objects/");
    let ranges: Vec<&HeaderValue> = headers.get_all("range").iter().filter(|_| has_ranges).collect();
    let asked = match ranges[..] {
        [range] => range.to_str().ok().and_then(|range| simple_range(range, whole)),
        _ => None,
    };
    let required = match (&ranges[..], asked) {
        ([], _) => Some(StatusCode::OK),
        (_, Some([])) => Some(StatusCode::RANGE_NOT_SATISFIABLE),
        (_, Some(_)) => Some(StatusCode::PARTIAL_CONTENT),
        (_, None) => None,
    };
    let media_type = answer.header("content-type");
    let has_conditions = headers
        .keys()
        .any(|name| name == "accept" || name.as_str().starts_with("if-"));
    if let Some(required) = required.filter(|_| !has_conditions) {
        assert_eq!(answer.status, required, "{request:?}\n{answer:?}");
        assert!(
            media_type == "application/octet-stream" || required == StatusCode::RANGE_NOT_SATISFIABLE,
            "{request:?}\n{answer:?}"
        );
    }
    if answer.status == StatusCode::OK && media_type == "application/octet-stream" {
        assert_eq!(answer.body, whole, "{request:?}\n{answer:?}");
    }
    if answer.status != StatusCode::PARTIAL_CONTENT {
        return;
    }
    match (media_type.split_once("boundary="), asked) {
        (None, asked) => {
            let placed = placed(answer.header("content-range"), whole);
            assert_eq!(answer.body, placed, "{request:?}\n{answer:?}");
            assert_eq!(placed, asked.unwrap_or(placed), "{request:?}\n{answer:?}");
        }
        (Some((_, boundary)), None) => multipart(boundary, whole, &answer.body),
        (Some(_), Some(_)) => panic!("several parts for one range: {request:?}\n{answer:?}"),
    }
}

/// The bytes that `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-LENGTH` names (RFC 9110 14.1.2); `None` for any other
/// header, and for parts of nothing.
fn simple_range<'a>(range: &str, whole: &'a [u8]) -> Option<&'a [u8]> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !are_digits(first) || !are_digits(last) {
        return None;
    }
    // More than fits is past any end.
    let number = |digits: &str| digits.parse().unwrap_or(usize::MAX);
    let (from, to) = match (first, last) {
        ("", "") => return None,
        ("", length) => (whole.len().saturating_sub(number(length)), whole.len()),
        (first, "") => (number(first), whole.len()),
        (first, last) if number(first) > number(last) => return None,
        (first, last) => (number(first), number(last).saturating_add(1)),
    };
    Some(whole.get(from..to.min(whole.len())).unwrap_or_default())
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
