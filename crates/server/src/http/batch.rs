//! `POST .../{blocks|vectors|ranges|objects}:batchFetch`: fetches many items of one dataset, requested in JSON. Requests are
//! in `batch_request`, responses in `batch_response`.
//!
//! A request is checked completely before anything is read, including whether its response can be sent in the format that
//! the client accepts.

use super::AppState;
use super::batch_request::{BatchParams, BatchRequest, BlocksBatch, ObjectsBatch, RangesBatch, VectorsBatch};
use super::batch_response::{LENGTHS_LISTED_MAX, Shape, encode};
use super::conditional::ETag;
use super::negotiate::{ResponseFormat, preferred, require_json};
use super::parsing::parse_body;
use super::problem::{PathParams, Problem};
use super::representation::require_version;
use crate::caller::Connection;
use crate::fetch::{FetchError, Kind, RequestContext, RequestMemory, RequiredKind, timeout_at, within};
use crate::record::note_dataset;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use http_body::Body as _;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Fetches blocks.
#[utoipa::path(post, path = "/v1/datasets/{name}/blocks:batchFetch", tag = "data",
    operation_id = "BatchFetchBlocks", params(("name" = String, Path, description = "The dataset, of kind blocks."),
        ("If-Match" = Option<String>, Header)),
    request_body = BlocksBatch, responses((status = 200, description = "The items.", content(
        ("application/octet-stream"), (super::batch_response::BatchResponse = "application/json"))),
        (status = 412, description = "If-Match names other versions of the dataset.")))]
pub(super) async fn blocks(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    run::<BlocksBatch>(&app, &name, request).await
}

/// Fetches vectors.
#[utoipa::path(post, path = "/v1/datasets/{name}/vectors:batchFetch", tag = "data",
    operation_id = "BatchFetchVectors", params(("name" = String, Path, description = "The dataset, of kind vectors."),
        ("If-Match" = Option<String>, Header)),
    request_body = VectorsBatch, responses((status = 200, description = "The items.", content(
        ("application/octet-stream"), (super::batch_response::BatchResponse = "application/json"))),
        (status = 412, description = "If-Match names other versions of the dataset.")))]
pub(super) async fn vectors(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    run::<VectorsBatch>(&app, &name, request).await
}

/// Fetches byte ranges.
#[utoipa::path(post, path = "/v1/datasets/{name}/ranges:batchFetch", tag = "data",
    operation_id = "BatchFetchRanges",
    params(("name" = String, Path, description = "The dataset, of kind blocks or vectors."),
        ("If-Match" = Option<String>, Header)),
    request_body = RangesBatch, responses((status = 200, description = "The items.", content(
        ("application/octet-stream"), (super::batch_response::BatchResponse = "application/json"))),
        (status = 412, description = "If-Match names other versions of the dataset.")))]
pub(super) async fn ranges(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    run::<RangesBatch>(&app, &name, request).await
}

/// Fetches objects, whole or in part.
#[utoipa::path(post, path = "/v1/datasets/{name}/objects:batchFetch", tag = "data",
    operation_id = "BatchFetchObjects", params(("name" = String, Path, description = "The dataset, of kind objects.")),
    request_body = ObjectsBatch, responses((status = 200, description = "The items.", content(
        ("application/octet-stream"), (super::batch_response::BatchResponse = "application/json"))),
        (status = 412, description = "With fail_fast: an object is of another version than its if_match. The detail names \
            it, and its version.")))]
pub(super) async fn objects(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    run::<ObjectsBatch>(&app, &name, request).await
}

async fn run<R: BatchRequest>(app: &AppState, name: &str, request: Request) -> Result<Response, Problem> {
    // Before anything that may refuse it.
    note_dataset(name);
    let arrival = Instant::now();
    let (parts, body) = request.into_parts();
    let form = preferred(&parts.headers)?;
    require_json(&parts.headers)?;
    let connection = Connection::of(&parts.extensions);
    let limits = app.fetcher.limits();
    let (body, mut request_memory) = receive(app, connection.as_ref(), body, arrival).await?;
    let items_max = usize::try_from(limits.items_per_request).unwrap_or(usize::MAX);
    // At most so many items are stored, however many are listed, so charge for them before parsing.
    request_memory.whole(body.len(), items_max.min(body.len()))?;
    let (of, charge) = (connection.as_ref(), request_memory.into_charge());
    let (request, listed, charge) =
        parse_body::<R>(&app.fetcher, of, body, items_max, charge, arrival).await?;
    let params = request.into_params()?;
    if listed > items_max {
        let too_many = FetchError::TooManyItems {
            field: params.field,
            items: listed,
            max: limits.items_per_request,
        };
        app.fetcher.count_rejection(Err(too_many), connection.as_ref())?;
    }
    let kind = params.columns.items().required_kind();
    let dataset = app.fetcher.open(name, kind, connection.as_ref())?;
    check_form(&params, form)?;
    // Objects have one version each.
    let etag =
        (params.columns.items().required_kind() != RequiredKind::Objects).then(|| ETag::new(dataset.etag()));
    match &etag {
        Some(etag) => require_version(&parts.headers, etag)?,
        None => refuse_preconditions(&parts.headers)?,
    }

    let deadline =
        (params.deadline_ms > 0).then(|| arrival + Duration::from_millis(params.deadline_ms.into()));
    let context = RequestContext {
        arrived: Some(arrival),
        deadline,
        connection: connection.clone(),
        fail_fast: params.fail_fast,
    };
    let result = app
        .fetcher
        .fetch_of(&dataset, &params.columns.items(), &context)
        .await;
    let answered =
        result.map_err(|error| Problem::of_items(in_terms_of(params.field, error), params.field))?;
    let shape = match dataset.kind() {
        Kind::Vectors { dim, dtype, .. }
            if params.columns.items().required_kind() == RequiredKind::Vectors =>
        {
            Some(Shape { dim, dtype })
        }
        Kind::Vectors { .. } | Kind::Blocks { .. } | Kind::Objects => None,
    };
    let mut response = encode(form, answered, shape, params.field, |text| {
        app.fetcher.charge_text(connection.as_ref(), charge, text)
    })?;
    if let Some(etag) = etag {
        response.headers_mut().insert(header::ETAG, etag.value());
    }
    Ok(response)
}

/// Refuses a precondition on a batch of objects: each object has its own version.
fn refuse_preconditions(headers: &HeaderMap) -> Result<(), Problem> {
    for name in ["If-Match", "If-None-Match"] {
        if headers.contains_key(name) {
            let why = "does not apply: each object has its own version; use if_match of an object";
            return Err(Problem::malformed(name, why));
        }
    }
    Ok(())
}

/// Refuses items whose lengths may differ if these do not fit a header.
fn check_form(params: &BatchParams, form: ResponseFormat) -> Result<(), Problem> {
    let items = params.columns.items().len();
    if form == ResponseFormat::Json || items <= LENGTHS_LISTED_MAX || params.columns.is_uniform() {
        return Ok(());
    }
    Err(Problem::new(
        StatusCode::NOT_ACCEPTABLE,
        "lengths-not-listable",
        format!(
            "{items} items whose lengths may differ; the response's headers can list {LENGTHS_LISTED_MAX}: \
             accept application/json, or split the batch"
        ),
    )
    .with_field(params.field)
    .with_allowed(vec![super::negotiate::JSON]))
}

/// Receives a request's body within the time and memory that requests have.
pub(super) async fn receive<'a>(
    app: &'a AppState,
    connection: Option<&'a Arc<Connection>>,
    body: Body,
    arrival: Instant,
) -> Result<(Bytes, RequestMemory<'a>), Problem> {
    let limits = app.fetcher.limits();
    let mut request_memory = RequestMemory::new(&app.fetcher, connection);
    let reading = read_body(body, limits.request_bytes, &mut request_memory);
    let body = timeout_at(within(&limits, arrival, None), pin!(reading))
        .await
        .ok_or_else(|| {
            app.fetcher.deadline_rejection(connection);
            not_sent_in_time()
        })??;
    Ok((body, request_memory))
}

async fn read_body(
    mut body: Body,
    bytes_max: u32,
    request_memory: &mut RequestMemory<'_>,
) -> Result<Bytes, Problem> {
    let too_large = || {
        Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "request-too-large",
            format!(
                "the request's body is too long; the limit is {bytes_max} bytes (limits.request_bytes): split the batch"
            ),
        )
    };
    if body.size_hint().lower() > u64::from(bytes_max) {
        return Err(too_large());
    }
    let most = usize::try_from(bytes_max).unwrap_or(usize::MAX);
    let announced = body.size_hint().exact();
    let announced = announced.and_then(|bytes| usize::try_from(bytes).ok());
    let (mut first, mut all) = (Bytes::new(), BytesMut::new());
    while let Some(frame) = request_memory
        .next_frame(&mut body, first.len() + all.capacity())
        .await?
    {
        let frame = frame.map_err(|_broken_off| {
            let remedy = "send as many bytes as Content-Length says, or whole chunks";
            Problem::malformed("body", format!("is cut off, or malformed: {remedy}"))
        })?;
        let Ok(piece) = frame.into_data() else { continue };
        if first.len() + all.len() + piece.len() > most {
            return Err(too_large());
        }
        // A body that arrives in one piece is not copied.
        if first.is_empty() && all.is_empty() {
            first = piece;
        } else {
            if all.is_empty() {
                // Growing by doubling would take up to twice the body.
                all.reserve(announced.unwrap_or(0));
            }
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&piece);
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

fn not_sent_in_time() -> Problem {
    Problem::new(
        StatusCode::REQUEST_TIMEOUT,
        "request-timeout",
        "the body did not arrive in time (limits.deadline_ms): send it faster, or split the batch",
    )
}

/// Translates an error: the fetcher names columns, but the client knows only the members of its JSON.
fn in_terms_of(field: &'static str, error: FetchError) -> FetchError {
    if let FetchError::EmptyBatch { .. } = error {
        return FetchError::EmptyBatch { field };
    }
    if let FetchError::TooManyItems { items, max, .. } = error {
        return FetchError::TooManyItems { field, items, max };
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use crate::fetch::tests::without_datasets;
    use crate::http::batch_request::Columns;
    use crate::http::batch_request::tests::rendered;
    use futures_util::FutureExt as _;
    use http_body::{Frame, SizeHint};
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use tokio_stream::StreamExt as _;

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused() {
        // Bodies of 8 bytes and more, with and without a declared length: 413 names the limit.
        let fetcher = without_datasets(Limits::default());
        let mut request_memory = RequestMemory::new(&fetcher, None);
        let undeclared = |text: &'static str| {
            let frames = tokio_stream::once(Ok::<_, Infallible>(Bytes::from_static(text.as_bytes())));
            Body::from_stream(frames)
        };
        let whole = read_body(Body::from("12345678"), 8, &mut request_memory).await;
        assert_eq!(whole.unwrap(), "12345678");
        for body in [undeclared("123456789"), Body::from("123456789")] {
            let problem = read_body(body, 8, &mut request_memory).await.unwrap_err();
            let (status, _, detail) = rendered(problem).await;
            assert_eq!(status, 413);
            assert!(detail.contains("limits.request_bytes"), "{detail}");
        }
    }

    #[tokio::test]
    async fn the_memory_of_a_body_is_charged_while_it_arrives() {
        // A body in pieces that stops before its end. Announced: its length is charged. Not announced: what its memory has
        // grown to, in steps of 16 KiB, which is more than what has arrived.
        let fetcher = without_datasets(Limits::default());
        let piece = || Ok::<_, Infallible>(Bytes::from(vec![b' '; 100_000]));
        for announced in [Some(1_000_000), None] {
            let pieces = tokio_stream::iter([piece(), piece(), piece()]).chain(tokio_stream::pending());
            let body = http_body_util::StreamBody::new(pieces.map(|piece| piece.map(Frame::data)));
            let body = Body::new(Announced(body, announced));
            let mut request_memory = RequestMemory::new(&fetcher, None);
            let mut reading = Box::pin(read_body(body, 2_000_000, &mut request_memory));
            assert!(reading.as_mut().now_or_never().is_none());
            drop(reading);
            let charged = request_memory.into_charge().unwrap().amount();
            let expected = match announced {
                Some(length) => length..=length + (16 << 10),
                None => 350_000..=650_000,
            };
            assert!(expected.contains(&charged), "{announced:?}: {charged}");
        }
    }

    /// A body with or without a length that is known beforehand.
    struct Announced<B>(B, Option<u64>);

    impl<B: http_body::Body + Unpin> http_body::Body for Announced<B> {
        type Data = B::Data;
        type Error = B::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
            Pin::new(&mut self.0).poll_frame(cx)
        }

        fn size_hint(&self) -> SizeHint {
            self.1.map_or_else(SizeHint::default, SizeHint::with_exact)
        }
    }

    #[tokio::test]
    async fn lengths_that_cannot_be_listed_are_refused_beforehand() {
        // One item more than a head can list: fine in JSON or with equal lengths, 406 for differing ones, and for objects of
        // any length, which may turn out to be equal: so the message does not say that they differ.
        let many = LENGTHS_LISTED_MAX + 1;
        let ranges = |last: u64| {
            let mut lengths = vec![4; many];
            lengths[many - 1] = last;
            let columns = Columns::Ranges {
                offsets: vec![0; many],
                lengths,
            };
            BatchParams {
                columns,
                field: "ranges",
                fail_fast: false,
                deadline_ms: 0,
            }
        };
        assert!(check_form(&ranges(4), ResponseFormat::Octets).is_ok());
        assert!(check_form(&ranges(5), ResponseFormat::Json).is_ok());
        let names = vec!["a".to_owned(); many];
        let objects = BatchParams {
            columns: Columns::Objects {
                names,
                offsets: Vec::new(),
                lengths: Vec::new(),
                if_match: Vec::new(),
            },
            field: "names",
            ..ranges(4)
        };
        for (params, member) in [(ranges(5), "ranges"), (objects, "names")] {
            let refused = check_form(&params, ResponseFormat::Octets).unwrap_err();
            let (status, field, detail) = rendered(refused).await;
            assert_eq!((status, field.as_str()), (406, member));
            assert!(
                detail.starts_with("513 items whose lengths may differ;"),
                "{detail}"
            );
        }
    }
}
