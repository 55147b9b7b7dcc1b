//! Responses to GET and HEAD of `/bytes` and of objects: preconditions and ranges in the order of RFC 9110 13.2.2.
//!
//! HEAD never reads, and Range does not apply to it (RFC 9110 14.2: GET is the only method with range handling).

use super::conditional::{ETag, Precondition, evaluate, if_range_holds};
use super::multipart::Multipart;
use super::negotiate::OCTET_STREAM;
use super::problem::Problem;
use super::range::{Ranges, content_range, resolve};
use crate::caller::Connection;
use crate::error_status;
use crate::fetch::{BodyPart, FetchError, Fetcher, Snapshot, SnapshotReader, WindowedBody, past_the_end};
use crate::rpc_metrics::cut_short;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::BodyExt as _;
use ringfetch_engine::geometry::Extent;
use std::sync::Arc;
use std::time::Instant;

/// The kind of response.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Decision {
    NotModified,
    PreconditionFailed,
    /// The head of the whole resource, without a body.
    HeadOnly,
    Whole,
    One(Extent),
    Many(Vec<Extent>),
    Unsatisfiable,
}

fn decide(
    method: &Method,
    headers: &HeaderMap,
    etag: &ETag,
    length: u64,
    ranges_max: u32,
) -> Result<Decision, Problem> {
    match evaluate(headers, etag)? {
        Precondition::Failed => return Ok(Decision::PreconditionFailed),
        Precondition::NotModified => return Ok(Decision::NotModified),
        Precondition::Holds => {}
    }
    if method == Method::HEAD {
        return Ok(Decision::HeadOnly);
    }
    // Range is not a list header: if there are several, sending the whole resource is always correct.
    let mut values = headers.get_all(header::RANGE).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Ok(Decision::Whole);
    };
    if !if_range_holds(headers, etag)? {
        return Ok(Decision::Whole);
    }
    Ok(match resolve(value.as_bytes(), length, ranges_max) {
        Ranges::Ignored => Decision::Whole,
        Ranges::Unsatisfiable => Decision::Unsatisfiable,
        Ranges::Refused(why) => return Err(Problem::malformed("Range", why)),
        Ranges::Send(extents) => match extents[..] {
            [one] => Decision::One(one),
            _ => Decision::Many(extents),
        },
    })
}

/// Responds to a request for bytes that arrived then.
///
/// # Errors
/// Those of the first window: `Changed` if the bytes were replaced before it was read.
pub(super) async fn answer(
    fetcher: &Fetcher,
    version: Snapshot,
    method: &Method,
    headers: &HeaderMap,
    connection: Option<Arc<Connection>>,
    arrival: Instant,
) -> Result<Response, FetchError> {
    let (length, etag) = (version.length_bytes(), ETag::new(version.etag()));
    let decision = match decide(method, headers, &etag, length, fetcher.limits().http_ranges) {
        Ok(decision) => decision,
        Err(problem) => return Ok(problem.into_response()),
    };
    let mut head = HeaderMap::new();
    head.insert(header::ETAG, etag.value());
    head.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static(OCTET_STREAM));
    let mut text_bytes = None;
    let (status, pieces) = match decision {
        Decision::NotModified => {
            head.remove(header::CONTENT_TYPE);
            return Ok((StatusCode::NOT_MODIFIED, head).into_response());
        }
        Decision::PreconditionFailed => return Ok(precondition_failed(&etag).into_response()),
        Decision::Unsatisfiable => {
            fetcher.failed_read(&version, past_the_end(length, length)).await;
            return Ok(unsatisfiable(&etag, length).into_response());
        }
        Decision::HeadOnly => {
            head.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
            return Ok((StatusCode::OK, head, Body::empty()).into_response());
        }
        Decision::Whole if length == 0 => (StatusCode::OK, Vec::new()),
        Decision::Whole => (
            StatusCode::OK,
            vec![BodyPart::Extent(Extent { offset: 0, length })],
        ),
        Decision::One(extent) => {
            insert_text(&mut head, header::CONTENT_RANGE, content_range(extent, length));
            (StatusCode::PARTIAL_CONTENT, vec![BodyPart::Extent(extent)])
        }
        Decision::Many(extents) => {
            let multipart = Multipart::new(&extents, length, OCTET_STREAM);
            insert_text(&mut head, header::CONTENT_TYPE, multipart.content_type);
            text_bytes = Some(multipart.text_bytes);
            (StatusCode::PARTIAL_CONTENT, multipart.pieces)
        }
    };
    let reader = SnapshotReader::new(fetcher.clone(), connection, version, arrival);
    let body = WindowedBody::start(reader, pieces).await?;
    head.insert(header::CONTENT_LENGTH, HeaderValue::from(body.left_bytes()));
    let body = body.map_err(|error| {
        cut_short(error_status::of_fetch(&error).http);
        error
    });
    let mut response = (status, head, Body::new(body)).into_response();
    if let Some(text_bytes) = text_bytes {
        response.extensions_mut().insert(text_bytes);
    }
    Ok(response)
}

/// Checks the preconditions of a request other than GET.
///
/// # Errors
/// 412, which names the header that does not hold; 400 for one without any tag.
pub(super) fn require_version(headers: &HeaderMap, etag: &ETag) -> Result<(), Problem> {
    match evaluate(headers, etag)? {
        Precondition::Holds => Ok(()),
        Precondition::Failed => Err(precondition_failed(etag)),
        Precondition::NotModified => Err(Problem::new(
            StatusCode::PRECONDITION_FAILED,
            "precondition-failed",
            "If-None-Match names the current version",
        )
        .with_field("If-None-Match")
        .with_header(header::ETAG, etag.value())),
    }
}

/// The problem for 412.
pub(super) fn precondition_failed(etag: &ETag) -> Problem {
    Problem::new(
        StatusCode::PRECONDITION_FAILED,
        "precondition-failed",
        "If-Match does not name the current version, whose ETag is in this response",
    )
    .with_field("If-Match")
    .with_header(header::ETAG, etag.value())
}

fn unsatisfiable(etag: &ETag, length: u64) -> Problem {
    let problem = Problem::new(
        StatusCode::RANGE_NOT_SATISFIABLE,
        "range-not-satisfiable",
        format!("every range begins past the end of {length} bytes"),
    )
    .with_field("Range")
    .with_header(header::ETAG, etag.value());
    match HeaderValue::try_from(format!("bytes */{length}")) {
        Ok(value) => problem.with_header(header::CONTENT_RANGE, value),
        Err(_) => problem,
    }
}

/// Inserts text known to be printable ASCII.
fn insert_text(headers: &mut HeaderMap, name: http::HeaderName, text: String) {
    if let Ok(value) = HeaderValue::try_from(text) {
        headers.insert(name, value);
    }
}
