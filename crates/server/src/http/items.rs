//! One block or one vector. Items are small, so Range is ignored, as RFC 9110 allows; `/bytes` serves parts
//! of an address space.

use super::AppState;
use super::conditional::{ETag, Precondition, evaluate_part};
use super::negotiate::{ResponseFormat, preferred};
use super::problem::{PathParams, Problem};
use super::representation::precondition_failed;
use super::text_body::{PIECE_BYTES_MAX, TextBody, held_at_a_time};
use crate::caller::Connection;
use crate::fetch::{DatasetHandle, Dtype, Fetcher, Items, Kind, RequestContext, RequiredKind};
use crate::listener::{AnswerBody, cleared};
use crate::record::note_dataset;
use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::{Buf as _, Bytes};
use half::{bf16, f16};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use ringfetch_engine::error::ReadError;
use serde::Serialize;
use std::sync::Arc;

/// Elements per vector.
pub(super) const RINGFETCH_DIM: HeaderName = HeaderName::from_static("ringfetch-dim");
/// Element type: `f32`, `f16`, `bf16`, `f64`, `u8`, `i8` or `i32`.
pub(super) const RINGFETCH_DTYPE: HeaderName = HeaderName::from_static("ringfetch-dtype");

/// Serves a block.
#[utoipa::path(get, path = "/v1/datasets/{name}/blocks/{index}", tag = "data", operation_id = "GetBlock",
    params(
        ("name" = String, Path, description = "The dataset, of kind blocks."),
        ("index" = u64, Path, description = "From 0."),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header),
    ),
    responses(
        (status = 200, description = "The block.", content_type = "application/octet-stream"),
        (status = 304, description = "If-None-Match names this version."),
        (status = 412, description = "If-Match names neither this version nor the dataset's."),
    ))]
pub(super) async fn get_block(
    State(app): State<Arc<AppState>>,
    PathParams((name, index)): PathParams<(String, String)>,
    request: Request,
) -> Result<Response, Problem> {
    let (mut parts, _no_body) = request.into_parts();
    let connection = Connection::of(&parts.extensions);
    let answer = block(
        &app.fetcher,
        &name,
        &index,
        &parts.method,
        &mut parts.headers,
        connection,
    )
    .await;
    answer.map(|answer| answer.map(Body::from))
}

/// The response to a request for a block, in the memory of the request's headers.
pub(super) async fn block(
    fetcher: &Fetcher,
    name: &str,
    index: &str,
    method: &Method,
    headers: &mut HeaderMap,
    connection: Option<Arc<Connection>>,
) -> Result<http::Response<AnswerBody>, Problem> {
    note_dataset(name);
    let index = number("index", index)?;
    let dataset = fetcher.open(name, RequiredKind::Blocks, connection.as_ref())?;
    let Kind::Blocks { block_bytes, count } = dataset.kind() else {
        return Err(not_there("block", index, 0));
    };
    if index >= count {
        return Err(not_there("block", index, count));
    }
    let etag = ETag::new(format_args!("{}-block-{index}", dataset.etag()));
    let head = match conditional_head(headers, etag, &dataset)? {
        Ok(head) => head,
        Err(not_modified) => return Ok(not_modified.map(AnswerBody::Routed)),
    };
    if method == Method::HEAD {
        let answer = head_only(head, ResponseFormat::Octets, Some(block_bytes));
        return Ok(answer.map(AnswerBody::Routed));
    }
    let data = fetch_one(fetcher, &dataset, Items::Blocks(&[index]), "index", connection).await?;
    Ok(octets(head, data))
}

/// Serves a vector.
#[utoipa::path(get, path = "/v1/datasets/{name}/vectors/{id}", tag = "data", operation_id = "GetVector",
    params(
        ("name" = String, Path, description = "The dataset, of kind vectors."),
        ("id" = u64, Path, description = "From 0."),
        ("Accept" = Option<String>, Header, description = "`application/json` for an array of numbers."),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header),
    ),
    responses(
        (status = 200, description = "The elements, little-endian; or a JSON array, with null for NaN and \
            infinities.", content(
                ("application/octet-stream"), (Vec<Option<f64>> = "application/json")),
            headers(("Ringfetch-Dim" = u64, description = "Elements."), ("Ringfetch-Dtype", description = "Element type."))),
        (status = 304, description = "If-None-Match names this version."),
        (status = 406, description = "Accept allows neither format."),
        (status = 412, description = "If-Match names neither this version nor the dataset's."),
    ))]
pub(super) async fn get_vector(
    State(app): State<Arc<AppState>>,
    PathParams((name, id)): PathParams<(String, String)>,
    request: Request,
) -> Result<Response, Problem> {
    let (mut parts, _no_body) = request.into_parts();
    let connection = Connection::of(&parts.extensions);
    let answer = vector(
        &app.fetcher,
        &name,
        &id,
        &parts.method,
        &mut parts.headers,
        connection,
    )
    .await;
    answer.map(|answer| answer.map(Body::from))
}

/// The response to a request for a vector, in the memory of the request's headers. Errors vary by Accept, too: if it allows
/// neither format, 406 takes the place of 404 and 412.
pub(super) async fn vector(
    fetcher: &Fetcher,
    name: &str,
    id: &str,
    method: &Method,
    headers: &mut HeaderMap,
    connection: Option<Arc<Connection>>,
) -> Result<http::Response<AnswerBody>, Problem> {
    let (vary, accept) = (header::VARY, HeaderValue::from_static("Accept"));
    match vector_or_problem(fetcher, name, id, method, headers, connection).await {
        Ok(mut response) => {
            response.headers_mut().insert(vary, accept);
            Ok(response)
        }
        Err(problem) => Err(problem.with_header(vary, accept)),
    }
}

async fn vector_or_problem(
    fetcher: &Fetcher,
    name: &str,
    id: &str,
    method: &Method,
    headers: &mut HeaderMap,
    connection: Option<Arc<Connection>>,
) -> Result<http::Response<AnswerBody>, Problem> {
    note_dataset(name);
    let id = number("id", id)?;
    let dataset = fetcher.open(name, RequiredKind::Vectors, connection.as_ref())?;
    let Kind::Vectors {
        dim,
        dtype,
        vector_bytes,
        count,
        ..
    } = dataset.kind()
    else {
        return Err(not_there("vector", id, 0));
    };
    let form = preferred(headers)?;
    if id >= count {
        return Err(not_there("vector", id, count));
    }
    // A strong tag identifies one representation, and a vector has two.
    let suffix = if form == ResponseFormat::Json { "-json" } else { "" };
    let etag = ETag::new(format_args!("{}-vector-{id}{suffix}", dataset.etag()));
    let mut head = match conditional_head(headers, etag, &dataset)? {
        Ok(head) => head,
        Err(not_modified) => return Ok(not_modified.map(AnswerBody::Routed)),
    };
    head.insert(RINGFETCH_DIM, HeaderValue::from(dim));
    head.insert(RINGFETCH_DTYPE, HeaderValue::from_static(dtype.as_str()));
    if method == Method::HEAD {
        // The length of the JSON form is unknown without a read.
        let length = (form == ResponseFormat::Octets).then_some(vector_bytes);
        return Ok(head_only(head, form, length).map(AnswerBody::Routed));
    }
    let data = fetch_one(fetcher, &dataset, Items::Vectors(&[id]), "id", connection).await?;
    Ok(match form {
        ResponseFormat::Octets => octets(head, data),
        ResponseFormat::Json => {
            head.insert(header::CONTENT_TYPE, form.media_type());
            let mut numbers = JsonNumbers::new(dtype, data);
            let first = numbers.next().unwrap_or_default();
            // The length of a longer text is known at its end.
            let text_bytes = numbers.is_ended.then_some(first.len() as u64);
            let charged = Extension(held_at_a_time(text_bytes));
            let text = TextBody::new(std::iter::once(first).chain(numbers), text_bytes);
            let answer = (StatusCode::OK, head, charged, Body::new(text)).into_response();
            answer.map(AnswerBody::Routed)
        }
    })
}

/// Parses a path segment as an index.
fn number(field: &'static str, text: &str) -> Result<u64, Problem> {
    // `parse` alone would accept a sign.
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or_else(|| {
        Problem::malformed(
            field,
            format!("{text:?} is not a decimal number from 0 to 2^64 - 1"),
        )
    })
}

fn not_there(what: &'static str, index: u64, count: u64) -> Problem {
    let field = if what == "block" { "index" } else { "id" };
    Problem::from(ReadError::IndexOutOfRange { what, index, count }).with_field(field)
}

/// The head of the response, or (inner error) the complete response if a precondition decides it. Takes the request's
/// headers.
fn conditional_head(
    headers: &mut HeaderMap,
    etag: ETag,
    dataset: &DatasetHandle,
) -> Result<Result<HeaderMap, Response>, Problem> {
    let precondition = evaluate_part(headers, &etag, || Some(ETag::new(dataset.etag())))?;
    if precondition == Precondition::Failed {
        return Err(precondition_failed(&etag));
    }
    let mut head = cleared(std::mem::take(headers));
    head.insert(header::ETAG, etag.into_value());
    Ok(match precondition {
        Precondition::NotModified => Err((StatusCode::NOT_MODIFIED, head).into_response()),
        Precondition::Holds | Precondition::Failed => Ok(head),
    })
}

fn head_only(mut head: HeaderMap, form: ResponseFormat, length: Option<u32>) -> Response {
    head.insert(header::CONTENT_TYPE, form.media_type());
    if let Some(length) = length {
        head.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
        return (StatusCode::OK, head, Body::empty()).into_response();
    }
    // A body of unknown length, so that no Content-Length of 0 is added.
    let unknown = futures_util::stream::empty::<Result<Bytes, std::convert::Infallible>>();
    (StatusCode::OK, head, Body::from_stream(unknown)).into_response()
}

/// Reads the item that this segment of the path names.
async fn fetch_one(
    fetcher: &Fetcher,
    dataset: &DatasetHandle,
    item: Items<'_>,
    field: &'static str,
    connection: Option<Arc<Connection>>,
) -> Result<Bytes, Problem> {
    let context = RequestContext {
        connection,
        fail_fast: true,
        ..RequestContext::default()
    };
    let answered = fetcher.fetch_of(dataset, &item, &context).await;
    let answered = answered.map_err(|error| Problem::of_items(error, field))?;
    Ok(answered.fetched.data)
}

fn octets(mut head: HeaderMap, data: Bytes) -> http::Response<AnswerBody> {
    head.insert(header::CONTENT_TYPE, ResponseFormat::Octets.media_type());
    let mut response = http::Response::new(AnswerBody::whole(data));
    *response.headers_mut() = head;
    response
}

/// Longest number and its comma: `,-2.2250738585072014e-308`.
const NUMBER_BYTES_MAX: usize = 25;

/// Little-endian elements as a JSON array, in pieces. Floats in the shortest form that reads back the same.
#[derive(Debug)]
struct JsonNumbers {
    dtype: Dtype,
    /// Those that are left.
    data: Bytes,
    is_begun: bool,
    is_ended: bool,
}

impl JsonNumbers {
    fn new(dtype: Dtype, data: Bytes) -> Self {
        Self {
            dtype,
            data,
            is_begun: false,
            is_ended: false,
        }
    }

    /// Appends elements as long as there is room for one and the end.
    fn append<const N: usize, T: Serialize>(&mut self, text: &mut Vec<u8>, element: impl Fn([u8; N]) -> T) {
        let mut taken = 0;
        let (elements, _no_rest) = self.data.as_chunks::<N>();
        for bytes in elements {
            if text.len() + NUMBER_BYTES_MAX >= PIECE_BYTES_MAX {
                break;
            }
            text.push(if self.is_begun { b',' } else { b'[' });
            self.is_begun = true;
            // A number is always written to memory.
            let _written = serde_json::to_writer(&mut *text, &element(*bytes));
            taken += N;
        }
        self.data.advance(taken);
        if self.data.len() < N {
            text.extend_from_slice(if self.is_begun { b"]" } else { b"[]" });
            self.is_ended = true;
        }
    }
}

impl Iterator for JsonNumbers {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        if self.is_ended {
            return None;
        }
        let elements_left = self.data.len() / usize::try_from(self.dtype.bytes()).unwrap_or(1).max(1);
        let text_bytes = elements_left.saturating_add(1).saturating_mul(NUMBER_BYTES_MAX);
        let mut text = Vec::with_capacity(text_bytes.min(PIECE_BYTES_MAX));
        match self.dtype {
            Dtype::F32 => self.append(&mut text, f32::from_le_bytes),
            Dtype::F16 => self.append(&mut text, |bytes| f32::from(f16::from_le_bytes(bytes))),
            Dtype::Bf16 => self.append(&mut text, |bytes| f32::from(bf16::from_le_bytes(bytes))),
            Dtype::F64 => self.append(&mut text, f64::from_le_bytes),
            Dtype::I32 => self.append(&mut text, i32::from_le_bytes),
            Dtype::U8 => self.append(&mut text, u8::from_le_bytes),
            Dtype::I8 => self.append(&mut text, i8::from_le_bytes),
        }
        // Without the capacity that is left.
        Some(Bytes::from(text.into_boxed_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json_numbers(dtype: Dtype, data: &[u8]) -> String {
        let pieces: Vec<Bytes> = JsonNumbers::new(dtype, Bytes::copy_from_slice(data)).collect();
        String::from_utf8(pieces.concat()).unwrap()
    }

    #[test]
    fn a_long_vector_becomes_short_pieces() {
        // Scenario: the longest number 10,000 times, in a row with the shortest. Expectation: pieces of at most 12 KiB, all
        // but the last nearly full, which together are the array; and the data is released.
        let numbers: Vec<f64> = (0..10_000)
            .flat_map(|_| [-2.225_073_858_507_201_4e-308, 0.0])
            .collect();
        let data: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut pieces = JsonNumbers::new(Dtype::F64, Bytes::from(data));
        let texts: Vec<Bytes> = pieces.by_ref().collect();
        let (_last, full) = texts.split_last().unwrap();
        assert!(texts.iter().all(|text| text.len() <= PIECE_BYTES_MAX));
        assert!(
            full.iter()
                .all(|text| text.len() > PIECE_BYTES_MAX - 2 * NUMBER_BYTES_MAX)
        );
        assert_eq!(texts.concat(), serde_json::to_vec(&numbers).unwrap());
        assert!(pieces.data.is_empty());
    }

    #[test]
    fn elements_of_every_dtype_become_numbers() {
        // Known bytes of each element type, with NaN among the floats: the numbers that they encode, and null
        // for NaN.
        let f32s: Vec<u8> = [0.1_f32, -2.0, f32::NAN]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        assert_eq!(json_numbers(Dtype::F32, &f32s), "[0.1,-2.0,null]");
        let f16s: Vec<u8> = [1.5, -0.25]
            .iter()
            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
            .collect();
        assert_eq!(json_numbers(Dtype::F16, &f16s), "[1.5,-0.25]");
        // The upper halves of 1.0 and of -2.0.
        assert_eq!(json_numbers(Dtype::Bf16, &[0x80, 0x3f, 0, 0xc0]), "[1.0,-2.0]");
        let f64s = [0.1_f64.to_le_bytes(), f64::INFINITY.to_le_bytes()].concat();
        assert_eq!(json_numbers(Dtype::F64, &f64s), "[0.1,null]");
        assert_eq!(
            json_numbers(Dtype::I32, &[255, 255, 255, 255, 1, 0, 0, 0]),
            "[-1,1]"
        );
        assert_eq!(json_numbers(Dtype::U8, &[0, 255]), "[0,255]");
        assert_eq!(json_numbers(Dtype::I8, &[0, 255]), "[0,-1]");
        assert_eq!(json_numbers(Dtype::F32, &[]), "[]");
    }
}
