//! A fetched batch as an HTTP response.
//!
//! As bytes, the body is the good items back to back; the head describes how to split it: `Ringfetch-Items`,
//! `Ringfetch-Errors` (how many failed), `Ringfetch-Error-Items` (which), and either `Ringfetch-Item-Bytes`
//! (the length of each good item) or `Ringfetch-Lengths` (one per item, 0 for a failed one). A head lists at
//! most 512 items: more items whose lengths may differ are refused before the read, and with more failed items
//! the first error fails the request. JSON contains everything, with the data in base64, encoded while it is
//! sent so that there is never a complete second copy.

use super::items::{RINGFETCH_DIM, RINGFETCH_DTYPE};
use super::negotiate::ResponseFormat;
use super::problem::Problem;
use super::text_body::{PIECE_BYTES_MAX, TextBody, held_at_a_time};
use crate::error_status::{self, ItemMessages};
use crate::fetch::{Dtype, FetchError, FetchResponse};
use axum::Extension;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use ringfetch_engine::batch::{Fetched, Lengths};
use ringfetch_engine::error::ItemError;
use serde::Serialize;
use utoipa::ToSchema;

/// Most entries of a header that lists items: 512 of at most 11 characters are 5.5 KiB, and clients accept 8.
pub(super) const LENGTHS_LISTED_MAX: usize = 512;

const RINGFETCH_ITEMS: HeaderName = HeaderName::from_static("ringfetch-items");
const RINGFETCH_ERRORS: HeaderName = HeaderName::from_static("ringfetch-errors");
const RINGFETCH_ERROR_ITEMS: HeaderName = HeaderName::from_static("ringfetch-error-items");
const RINGFETCH_ITEM_BYTES: HeaderName = HeaderName::from_static("ringfetch-item-bytes");
const RINGFETCH_LENGTHS: HeaderName = HeaderName::from_static("ringfetch-lengths");

/// Data bytes that are encoded at a time; a multiple of 3, so that only the last chunk is padded.
const CHUNK_BYTES: usize = PIECE_BYTES_MAX / 4 * 3;

/// The shape of the vectors in a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Elements per vector.
    pub(super) dim: u32,
    /// Element type.
    pub(super) dtype: Dtype,
}

/// A batch in JSON. `data` comes last.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = BatchAnswer)]
pub(super) struct BatchResponse {
    /// Number of requested items.
    #[schema(value_type = u64)]
    items: usize,
    /// Bytes of each item, where all have the same and none failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    item_bytes: Option<u32>,
    /// Otherwise: bytes of each item, 0 for a failed one.
    #[serde(skip_serializing_if = "Option::is_none")]
    lengths: Option<Vec<u32>>,
    /// Elements per vector; only for vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    dim: Option<u32>,
    /// Element type; only for vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<&'static str>,
    /// The failed items, in order.
    errors: Vec<ItemErrorView>,
    /// The version of each object, without quotes; empty for one that could not be opened. Only for objects.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    etags: Vec<String>,
    /// The good items back to back, in base64.
    // Always `None`: written while the body is sent. `serde(skip)` would leave it out of the schema too.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, format = "byte", required)]
    data: Option<()>,
}

/// A failed item.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ItemError)]
pub(super) struct ItemErrorView {
    /// Its position in the request, from 0.
    item: u32,
    /// The problem type's last segment, such as `index-out-of-range`.
    code: &'static str,
    /// What is wrong and how to fix it; empty where the messages before it are 512 KiB.
    message: String,
}

/// Failed items as they are sent. `messages` is the response's, which may have several lists of them.
pub(super) fn item_error_views(errors: &[ItemError], messages: &mut ItemMessages) -> Vec<ItemErrorView> {
    let view = |ItemError { item, error }: &ItemError| ItemErrorView {
        item: *item,
        code: error_status::of_read(error).slug,
        message: messages.of(error),
    };
    errors.iter().map(view).collect()
}

/// Encodes a batch in the negotiated format. `field` is the member that lists its items; `charge` charges the text of the
/// response.
///
/// # Errors
/// The first item's problem, if more items failed than the head can list; that of `charge`.
pub(super) fn encode(
    form: ResponseFormat,
    answered: FetchResponse,
    shape: Option<Shape>,
    field: &'static str,
    charge: impl FnOnce(Bytes) -> Result<Bytes, FetchError>,
) -> Result<Response, Problem> {
    let FetchResponse { fetched, etags } = answered;
    match form {
        ResponseFormat::Octets => octets(fetched, shape, field),
        ResponseFormat::Json => Ok(json(fetched, etags, shape, charge)?),
    }
}

fn item_count(lengths: &Lengths) -> usize {
    match lengths {
        Lengths::Uniform { items, .. } => usize::try_from(*items).unwrap_or(usize::MAX),
        Lengths::Each(lengths) => lengths.len(),
    }
}

/// The common length of the items that did not fail, if they have one.
fn common_length(lengths: &Lengths, errors: &[ItemError]) -> Option<u32> {
    let each = match lengths {
        Lengths::Uniform { item_bytes, .. } => return Some(*item_bytes),
        Lengths::Each(each) => each,
    };
    let mut failed = errors.iter().map(|error| error.item).peekable();
    let mut good = (0_u32..)
        .zip(each)
        .filter(|(item, _)| failed.next_if_eq(item).is_none())
        .map(|(_, length)| *length);
    let first = good.next()?;
    good.all(|length| length == first).then_some(first)
}

fn octets(fetched: Fetched, shape: Option<Shape>, field: &'static str) -> Result<Response, Problem> {
    let (items, errors) = (item_count(&fetched.lengths), fetched.errors);
    let listable = errors.len() <= LENGTHS_LISTED_MAX;
    if let (false, Some(first)) = (listable, errors.first()) {
        let first_error = FetchError::of_item(first, items);
        let detail = format!(
            "{} of {items} items failed, more than a head can list: accept application/json, or split the batch; the \
             first is {first_error}",
            errors.len(),
        );
        return Err(Problem::of_items(first_error, field).with_detail(detail));
    }
    let mut head = HeaderMap::new();
    head.insert(header::CONTENT_TYPE, ResponseFormat::Octets.media_type());
    head.insert(header::VARY, HeaderValue::from_static("Accept"));
    head.insert(RINGFETCH_ITEMS, HeaderValue::from(items));
    head.insert(RINGFETCH_ERRORS, HeaderValue::from(errors.len()));
    if !errors.is_empty() {
        insert_list(
            &mut head,
            RINGFETCH_ERROR_ITEMS,
            errors.iter().map(|error| error.item),
        );
    }
    match (common_length(&fetched.lengths, &errors), fetched.lengths) {
        (Some(length), _) => {
            head.insert(RINGFETCH_ITEM_BYTES, HeaderValue::from(length));
        }
        (None, Lengths::Each(each)) if each.len() <= LENGTHS_LISTED_MAX => {
            insert_list(&mut head, RINGFETCH_LENGTHS, each.into_iter());
        }
        // Every item failed: the body is empty.
        (None, _) => {}
    }
    if let Some(Shape { dim, dtype }) = shape {
        head.insert(RINGFETCH_DIM, HeaderValue::from(dim));
        head.insert(RINGFETCH_DTYPE, HeaderValue::from_static(dtype.as_str()));
    }
    Ok((StatusCode::OK, head, Body::from(fetched.data)).into_response())
}

fn insert_list(head: &mut HeaderMap, name: HeaderName, values: impl Iterator<Item = u32>) {
    let list = values
        .map(|value| value.to_string())
        .collect::<Vec<_>>()
        .join(",");
    if let Ok(value) = HeaderValue::try_from(list) {
        head.insert(name, value);
    }
}

fn json(
    fetched: Fetched,
    etags: Vec<String>,
    shape: Option<Shape>,
    charge: impl FnOnce(Bytes) -> Result<Bytes, FetchError>,
) -> Result<Response, FetchError> {
    let (items, data) = (item_count(&fetched.lengths), fetched.data);
    let (item_bytes, lengths) = match fetched.lengths {
        Lengths::Uniform { item_bytes, .. } => (Some(item_bytes), None),
        Lengths::Each(each) => (None, Some(each)),
    };
    let answer = BatchResponse {
        items,
        item_bytes,
        lengths,
        dim: shape.map(|shape| shape.dim),
        dtype: shape.map(|shape| shape.dtype.as_str()),
        errors: item_error_views(&fetched.errors, &mut ItemMessages::default()),
        etags,
        data: None,
    };
    // Only numbers and strings, so it cannot fail.
    let mut before = serde_json::to_string(&answer).unwrap_or_default();
    if before.pop().is_some() {
        before.push_str(",\"data\":\"");
    }
    let mut head = HeaderMap::new();
    head.insert(header::CONTENT_TYPE, ResponseFormat::Json.media_type());
    head.insert(header::VARY, HeaderValue::from_static("Accept"));
    let before = charge(Bytes::from(before))?;
    // 4 characters for each 3 bytes begun: 100 bytes are 34 groups, 136 characters.
    let encoded = data
        .len()
        .div_ceil(3)
        .saturating_mul(4)
        .saturating_add(AFTER.len());
    let (text_bytes, encoded) = (encoded.saturating_add(before.len()) as u64, encoded as u64);
    let charged = Extension(held_at_a_time(Some(encoded)));
    let body = TextBody::new(pieces(before, data), Some(text_bytes));
    Ok((StatusCode::OK, head, charged, Body::new(body)).into_response())
}

const AFTER: &[u8] = b"\"}";

/// `{...,"data":"` + base64 + `"}`.
fn pieces(before: Bytes, mut data: Bytes) -> impl Iterator<Item = Bytes> {
    let encoded = std::iter::from_fn(move || {
        let length = data.len().min(CHUNK_BYTES);
        (length > 0).then(|| Bytes::from(BASE64_STANDARD.encode(data.split_to(length))))
    });
    std::iter::once(before)
        .chain(encoded)
        .chain(std::iter::once(Bytes::from_static(AFTER)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::batch_request::tests::rendered;
    use http_body_util::BodyExt;
    use proptest::prelude::*;
    use ringfetch_engine::batch::Times;
    use ringfetch_engine::error::ReadError;

    fn fetched(data: &'static [u8], lengths: Lengths, errors: Vec<ItemError>) -> Fetched {
        Fetched {
            data: Bytes::from_static(data),
            lengths,
            errors,
            times: Times::default(),
        }
    }

    #[tokio::test]
    async fn more_failures_than_a_head_can_name_are_a_problem() {
        // One failure more than can be listed: a problem in bytes, which names the member; a full list in JSON.
        let many = u32::try_from(LENGTHS_LISTED_MAX).unwrap() + 1;
        let batch = || {
            let name = "x".repeat(1000);
            let error = ReadError::ObjectNotFound { name };
            let failed = |item| ItemError {
                item,
                error: error.clone(),
            };
            let errors = (0..many).map(failed).collect();
            FetchResponse {
                fetched: fetched(b"", Lengths::Each(vec![0; LENGTHS_LISTED_MAX + 1]), errors),
                etags: Vec::new(),
            }
        };
        let problem = encode(ResponseFormat::Octets, batch(), None, "names", Ok)
            .err()
            .unwrap();
        let (status, field, detail) = rendered(problem).await;
        assert_eq!((status, field.as_str()), (404, "names"));
        assert!(detail.contains("513 of 513 items failed"), "{detail}");
        assert!(detail.contains("accept application/json"), "{detail}");
        assert_eq!(
            encode(ResponseFormat::Json, batch(), None, "names", Ok)
                .ok()
                .unwrap()
                .status(),
            200
        );
    }

    /// The bytes of a body whose frames are sent one by one.
    async fn sent(mut body: Body) -> Vec<u8> {
        let mut text = Vec::new();
        while let Some(frame) = body.frame().await {
            text.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
        text
    }

    proptest! {
        #[test]
        fn the_json_body_has_the_length_it_declares(length in 0..200_000_usize, etag in "[a-z]{0,20}") {
            // Data of any length, over several chunks: the size hint equals what is sent, and that decodes to
            // the data.
            let data: Vec<u8> = (0..length).map(|i| u8::try_from(i % 251).unwrap()).collect();
            let lengths = Lengths::Uniform { item_bytes: 1, items: 1 };
            let batch = Fetched { data: data.clone().into(), ..fetched(b"", lengths, vec![]) };
            let body = json(batch, vec![etag], None, Ok).unwrap().into_body();
            let declared = http_body::Body::size_hint(&body).exact().unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let text = runtime.block_on(sent(body));
            prop_assert_eq!(declared, text.len() as u64);
            let text: serde_json::Value = serde_json::from_slice(&text).unwrap();
            prop_assert_eq!(BASE64_STANDARD.decode(text["data"].as_str().unwrap()).unwrap(), data);
        }
    }
}
