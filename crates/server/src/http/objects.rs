//! A dataset's bytes as one resource, objects as one resource each, and the listing of objects.
//!
//! An object is looked up when it is asked for, and may be replaced between the look-up and the first read. Then the
//! answer starts anew with the version that is there: an ETag never stands over another version's bytes.

use super::App;
use super::conditional::ETag;
use super::datasets::{Wanted, dataset_of_kind};
use super::problem::{Problem, Segments};
use super::representation::{Changed, Representation, answer};
use super::stream::Source;
use crate::fetch::Fetcher;
use axum::Json;
use axum::extract::{Query, Request, State};
use axum::response::Response;
use http::StatusCode;
use http::request::Parts;
use ringfetch_engine::buffer::Share;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use utoipa::ToSchema;

/// Look-ups of one request. An object that is replaced thrice between look-up and read is replaced all the time.
const LOOK_UPS_MAX: usize = 3;

/// Most names of a page, and how many there are without `limit`.
const PAGE_OBJECTS_MAX: usize = 1000;

/// Serves a dataset's address space.
#[utoipa::path(get, path = "/v1/datasets/{name}/bytes", tag = "data", operation_id = "GetBytes",
    params(
        ("name" = String, Path, description = "The dataset, of kind blocks or vectors."),
        ("Range" = Option<String>, Header, description = "`bytes=0-499`, `bytes=500-`, `bytes=-500`, or several."),
        ("If-Range" = Option<String>, Header, description = "A strong ETag: Range counts only if it still holds."),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header),
    ),
    responses(
        (status = 200, description = "All of it.", content_type = "application/octet-stream"),
        (status = 206, description = "The range, or multipart/byteranges for several, in the order asked for."),
        (status = 304, description = "If-None-Match names this version."),
        (status = 412, description = "If-Match names other versions."),
        (status = 416, description = "Every range begins past the end."),
    ))]
pub(super) async fn get_bytes(
    State(app): State<Arc<App>>,
    Segments(name): Segments<String>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, _no_body) = request.into_parts();
    bytes(&app.fetcher, &name, &parts, super::share_of(&parts.extensions)).await
}

/// The answer to a request for (a part of) a dataset's address space.
pub(super) async fn bytes(
    fetcher: &Fetcher,
    name: &str,
    parts: &Parts,
    share: Option<Arc<Share>>,
) -> Result<Response, Problem> {
    let dataset = dataset_of_kind(fetcher, name, Wanted::Space)?;
    let representation = Representation {
        length: dataset.length_bytes(),
        etag: ETag::new(dataset.etag()),
        source: Source::Space(dataset),
    };
    answer(fetcher, representation, &parts.method, &parts.headers, share)
        .await
        .map_err(|Changed| changing())
}

/// Serves an object.
#[utoipa::path(get, path = "/v1/datasets/{name}/objects/{object}", tag = "data", operation_id = "GetObject",
    params(
        ("name" = String, Path, description = "The dataset, of kind objects."),
        ("object" = String, Path, description = "The object's name; `/` between its parts may stand as it is."),
        ("Range" = Option<String>, Header, description = "As for bytes."),
        ("If-Range" = Option<String>, Header, description = "As for bytes."),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header),
    ),
    responses(
        (status = 200, description = "All of it.", content_type = "application/octet-stream"),
        (status = 206, description = "The range, or multipart/byteranges for several, in the order asked for."),
        (status = 304, description = "If-None-Match names this version."),
        (status = 412, description = "If-Match names other versions."),
        (status = 416, description = "Every range begins past the end."),
    ))]
pub(super) async fn get_object(
    State(app): State<Arc<App>>,
    Segments((name, object)): Segments<(String, String)>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, _no_body) = request.into_parts();
    let dataset = dataset_of_kind(&app.fetcher, &name, Wanted::Objects)?;
    for _ in 0..LOOK_UPS_MAX {
        let file = dataset.object(&object).await?;
        let representation = Representation {
            source: Source::Object {
                dataset: Arc::clone(&dataset),
                name: object.clone(),
                etag: file.etag().to_owned(),
            },
            length: file.length_bytes(),
            etag: ETag::new(file.etag()),
        };
        drop(file);
        let share = super::share_of(&parts.extensions);
        if let Ok(response) = answer(&app.fetcher, representation, &parts.method, &parts.headers, share).await
        {
            return Ok(response);
        }
    }
    Err(changing())
}

/// What is asked for is replaced faster than it can be read.
fn changing() -> Problem {
    Problem::new(
        StatusCode::SERVICE_UNAVAILABLE,
        "changing",
        "what was asked for is being replaced again and again; retry after a moment",
    )
    .with_retry_after(Duration::from_secs(1))
}

/// A page of objects.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ObjectList {
    /// In byte order of their names.
    objects: Vec<ObjectInfo>,
    /// The next page's `after`; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_after: Option<String>,
}

/// An object.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ObjectInfo {
    /// Relative to the dataset's directory, `/` between the parts.
    name: String,
    /// Bytes.
    length_bytes: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    #[serde(default)]
    after: String,
    limit: Option<String>,
}

impl ListQuery {
    /// (names after this one, at most so many of them).
    fn page(self) -> Result<(String, usize), Problem> {
        let Some(limit) = self.limit else {
            return Ok((self.after, PAGE_OBJECTS_MAX));
        };
        match limit.parse() {
            Ok(limit @ 1..=PAGE_OBJECTS_MAX) => Ok((self.after, limit)),
            // As in the gRPC API: 0 means the default.
            Ok(0) => Ok((self.after, PAGE_OBJECTS_MAX)),
            Ok(_) | Err(_) => Err(Problem::malformed(
                "limit",
                format!("{limit:?} is not a number from 1 to {PAGE_OBJECTS_MAX}"),
            )),
        }
    }
}

/// Lists a dataset's objects, a page at a time.
#[utoipa::path(get, path = "/v1/datasets/{name}/objects", tag = "datasets", operation_id = "ListObjects",
    params(
        ("name" = String, Path, description = "The dataset, of kind objects."),
        ("after" = Option<String>, Query, description = "Names after this one; `next_after` of the page before."),
        ("limit" = Option<u32>, Query, description = "At most this many, up to 1000; 1000 without it."),
    ),
    responses((status = 200, description = "A page of objects.", body = ObjectList)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    Segments(name): Segments<String>,
    request: Request,
) -> Result<Json<ObjectList>, Problem> {
    let query = Query::<ListQuery>::try_from_uri(request.uri());
    let (after, limit) = query
        .map_err(|error| Problem::malformed("query", error.body_text()))?
        .0
        .page()?;
    let dataset = dataset_of_kind(&app.fetcher, &name, Wanted::Objects)?;
    // A walk holds a blocking thread for as long as the directory is large: few at a time, and the others are told.
    let Some(permit) = app.fetcher.try_walk() else {
        return Err(Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "overloaded",
            "other listings are under way; retry after a moment",
        )
        .with_retry_after(Duration::from_secs(1)));
    };
    let walk = tokio::task::spawn_blocking(move || {
        let listed = dataset.list_objects(&after, limit + 1);
        drop(permit);
        listed
    });
    let mut entries = match walk.await {
        Ok(Ok(entries)) => entries,
        Ok(Err(error)) => return Err(cannot_list(&error.to_string())),
        Err(error) => return Err(cannot_list(&error.to_string())),
    };
    let more = entries.len() > limit;
    entries.truncate(limit);
    let next_after = entries.last().filter(|_| more).map(|entry| entry.name.clone());
    let objects = entries
        .into_iter()
        .map(|entry| ObjectInfo {
            name: entry.name,
            length_bytes: entry.length_bytes,
        })
        .collect();
    Ok(Json(ObjectList { objects, next_after }))
}

fn cannot_list(error: &str) -> Problem {
    Problem::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "listing-failed",
        format!("the dataset's directory cannot be listed: {error}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(uri: &'static str) -> Result<(String, usize), String> {
        let query = Query::<ListQuery>::try_from_uri(&http::Uri::from_static(uri));
        query
            .map_err(|error| error.body_text())?
            .0
            .page()
            .map_err(|_| "limit".to_owned())
    }

    #[test]
    fn a_page_is_bounded() {
        // Queries with and without a limit: never more than the largest page, nonsense and unknown keys refused.
        assert_eq!(page("/x"), Ok((String::new(), PAGE_OBJECTS_MAX)));
        assert_eq!(page("/x?after=a%2Fb&limit=7"), Ok(("a/b".to_owned(), 7)));
        assert_eq!(page("/x?limit=0"), Ok((String::new(), PAGE_OBJECTS_MAX)));
        for uri in [
            "/x?limit=1001",
            "/x?limit=-1",
            "/x?limit=ten",
            "/x?limit=",
            "/x?page=1",
            "/x?limit=1&limit=2",
        ] {
            assert!(page(uri).is_err(), "{uri}");
        }
    }
}
