//! A dataset's bytes as one resource, each object as a resource, and the list of objects.
//!
//! An object may be replaced between its look-up and the first read. Then the response starts again with the
//! new version: an ETag never labels bytes of another version.

use super::AppState;
use super::datasets::page_of;
use super::problem::{PathParams, Problem};
use super::representation::answer;
use crate::caller::Connection;
use crate::fetch::{FetchError, Fetcher, LOOK_UPS_MAX, Purpose, RequestContext};
use crate::record::note_dataset;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use http::Method;
use http::request::Parts;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;
use utoipa::ToSchema;

/// Serves a dataset's address space.
#[utoipa::path(get, path = "/v1/datasets/{name}/bytes", tag = "data", operation_id = "GetBytes",
    params(
        ("name" = String, Path, description = "The dataset, of kind blocks or vectors."),
        ("Range" = Option<String>, Header, description = "`bytes=0-499`, `bytes=500-`, `bytes=-500`, or several, which are \
            refused (400) if more than two overlap, or if they are longer than the resource together. A malformed one is ignored."),
        ("If-Range" = Option<String>, Header, description = "A strong ETag: Range applies only if it is still current."),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header),
    ),
    responses(
        (status = 200, description = "All of it.", content_type = "application/octet-stream"),
        (status = 206, description = "The range, or several in the requested order.", content(
            ("application/octet-stream"), ("multipart/byteranges"))),
        (status = 304, description = "If-None-Match names this version."),
        (status = 412, description = "If-Match names other versions."),
        (status = 416, description = "Every range begins past the end."),
    ))]
pub(super) async fn get_bytes(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, _no_body) = request.into_parts();
    let connection = Connection::of(&parts.extensions);
    bytes(&app.fetcher, &name, &parts, connection).await
}

/// The response to a request for all or part of a dataset's address space.
pub(super) async fn bytes(
    fetcher: &Fetcher,
    name: &str,
    parts: &Parts,
    connection: Option<Arc<Connection>>,
) -> Result<Response, Problem> {
    let arrival = Instant::now();
    let version = fetcher.space(name, connection.as_ref())?;
    let answered = answer(
        fetcher,
        version,
        &parts.method,
        &parts.headers,
        connection,
        arrival,
    );
    Ok(answered.await?)
}

/// Serves an object.
#[utoipa::path(get, path = "/v1/datasets/{name}/objects/{object}", tag = "data", operation_id = "GetObject",
    params(
        ("name" = String, Path, description = "The dataset, of kind objects."),
        ("object" = String, Path, description = "The object's name. `/` between its parts need not be escaped; `?` and `#` must be, \
             as `%3F` and `%23`: the server ignores a raw one and what follows it."),
        ("Range" = Option<String>, Header, description = "As for bytes."),
        ("If-Range" = Option<String>, Header, description = "As for bytes."),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header),
    ),
    responses(
        (status = 200, description = "All of it.", content_type = "application/octet-stream"),
        (status = 206, description = "The range, or several in the requested order.", content(
            ("application/octet-stream"), ("multipart/byteranges"))),
        (status = 304, description = "If-None-Match names this version."),
        (status = 412, description = "If-Match names other versions."),
        (status = 416, description = "Every range begins past the end."),
    ))]
pub(super) async fn get_object(
    State(app): State<Arc<AppState>>,
    PathParams((name, object)): PathParams<(String, String)>,
    request: Request,
) -> Result<Response, Problem> {
    // All tries together have the time of one request.
    let arrival = Instant::now();
    let (parts, _no_body) = request.into_parts();
    let connection = Connection::of(&parts.extensions);
    let context = RequestContext {
        arrived: Some(arrival),
        connection: connection.clone(),
        ..RequestContext::default()
    };
    let mut purpose = match parts.method {
        Method::HEAD => Purpose::Describe,
        _ => Purpose::Read,
    };
    for _ in 0..LOOK_UPS_MAX {
        let version = app.fetcher.object(&name, &object, purpose, &context).await;
        let version = version.map_err(|error| Problem::of_items(error, "object"))?;
        let answered = answer(
            &app.fetcher,
            version,
            &parts.method,
            &parts.headers,
            connection.clone(),
            arrival,
        );
        match answered.await {
            Err(FetchError::Changed) => purpose = Purpose::ReadAgain,
            answered => return Ok(answered?),
        }
    }
    Err(FetchError::Changed.into())
}

/// A page of objects.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ObjectList {
    /// In byte order of their names.
    objects: Vec<ObjectInfo>,
    /// The next page's `page_token`; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_page_token: Option<String>,
}

/// An object.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ObjectInfo {
    /// Relative to the dataset's directory, `/` between the parts.
    name: String,
    /// Bytes.
    length_bytes: u64,
}

/// Lists a dataset's objects, a page at a time.
#[utoipa::path(get, path = "/v1/datasets/{name}/objects", tag = "datasets", operation_id = "ListObjects",
    params(
        ("name" = String, Path, description = "The dataset, of kind objects."),
        ("page_size" = Option<u32>, Query, description = "At most this many. 0, more than 1000, or none: 1000."),
        ("page_token" = Option<String>, Query, description = "`next_page_token` of the page before, form-encoded as UTF-8: \
            `+` as `%2B`."),
    ),
    responses((status = 200, description = "A page of objects.", body = ObjectList)))]
pub(super) async fn list(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Json<ObjectList>, Problem> {
    // Before anything that may refuse it.
    note_dataset(&name);
    let page = page_of(request.uri())?;
    let context = RequestContext {
        connection: Connection::of(request.extensions()),
        ..RequestContext::default()
    };
    let page = app.fetcher.list_objects(&name, page, context).await?;
    let objects = page
        .objects
        .into_iter()
        .map(|(name, length_bytes)| ObjectInfo { name, length_bytes })
        .collect();
    Ok(Json(ObjectList {
        objects,
        next_page_token: page.next_page_token,
    }))
}
