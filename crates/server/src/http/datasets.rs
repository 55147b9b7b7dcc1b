//! Datasets as JSON: the proto's fields under their proto names, enums as in the configuration.

use super::AppState;
use super::problem::{PathParams, Problem};
use crate::caller::Connection;
use crate::fetch::{DatasetInfo, PageRequest};
use axum::Json;
use axum::extract::{Query, Request, State};
use http::Uri;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;

/// A page of datasets.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DatasetList {
    /// In byte order of their names.
    datasets: Vec<DatasetInfo>,
    /// The next page's `page_token`; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_page_token: Option<String>,
}

/// Lists the datasets, a page at a time.
#[utoipa::path(get, path = "/v1/datasets", tag = "datasets", operation_id = "ListDatasets",
    params(
        ("page_size" = Option<u32>, Query, description = "At most this many. 0, more than 1000, or none: 1000."),
        ("page_token" = Option<String>, Query, description = "`next_page_token` of the page before, form-encoded as UTF-8: \
            `+` as `%2B`."),
    ),
    responses((status = 200, description = "A page of datasets.", body = DatasetList)))]
pub(super) async fn list(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Json<DatasetList>, Problem> {
    let connection = Connection::of(request.extensions());
    let page = page_of(request.uri())?;
    let (datasets, next_page_token) = app.fetcher.list_datasets(&page, connection.as_ref())?;
    Ok(Json(DatasetList {
        datasets,
        next_page_token,
    }))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PageQuery {
    #[serde(default)]
    page_size: Option<String>,
    #[serde(default)]
    page_token: String,
}

/// The page that the query of a listing requests.
pub(super) fn page_of(uri: &Uri) -> Result<PageRequest, Problem> {
    let query = Query::<PageQuery>::try_from_uri(uri);
    let Query(query) = query.map_err(|error| Problem::malformed("query", error.body_text()))?;
    let size = query.page_size.map_or(Ok(0), |size| {
        // `parse` alone would accept a sign.
        let is_number = size.bytes().all(|byte| byte.is_ascii_digit());
        size.parse().ok().filter(|_| is_number).ok_or_else(|| {
            let problem = format!("{size:?} is not a number from 0 to {}", u32::MAX);
            Problem::malformed("page_size", problem)
        })
    });
    let size = size?;
    // Bytes that are no text became U+FFFD, after which a page would begin. Those of a name or a number are refused above.
    let is_text = |query| percent_decode_str(query).decode_utf8().is_ok();
    if query.page_token.contains('\u{fffd}') && !uri.query().is_none_or(is_text) {
        return Err(Problem::malformed(
            "page_token",
            "is not UTF-8; percent-encode UTF-8",
        ));
    }
    Ok(PageRequest {
        size,
        token: query.page_token,
    })
}

/// Describes a dataset.
#[utoipa::path(get, path = "/v1/datasets/{name}", tag = "datasets", operation_id = "GetDataset",
    params(("name" = String, Path, description = "The dataset.")),
    responses((status = 200, description = "The dataset.", body = DatasetInfo)))]
pub(super) async fn get(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Json<DatasetInfo>, Problem> {
    let connection = Connection::of(request.extensions());
    Ok(Json(app.fetcher.describe(&name, connection.as_ref())?))
}
