//! What is served, as JSON: the proto's fields by their proto names, enums as the words that the configuration uses.

use super::App;
use super::problem::{Problem, Segments};
use crate::fetch::DatasetInfo;
use axum::Json;
use axum::extract::State;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// Every dataset.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DatasetList {
    /// In the order of their names.
    datasets: Vec<DatasetInfo>,
}

/// Lists the datasets.
#[utoipa::path(get, path = "/v1/datasets", tag = "datasets", operation_id = "ListDatasets",
    responses((status = 200, description = "Every dataset, by name.", body = DatasetList)))]
pub(super) async fn list(State(app): State<Arc<App>>) -> Json<DatasetList> {
    Json(DatasetList {
        datasets: app.fetcher.describe_all(),
    })
}

/// Describes a dataset.
#[utoipa::path(get, path = "/v1/datasets/{name}", tag = "datasets", operation_id = "GetDataset",
    params(("name" = String, Path, description = "The dataset.")),
    responses((status = 200, description = "The dataset.", body = DatasetInfo)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    Segments(name): Segments<String>,
) -> Result<Json<DatasetInfo>, Problem> {
    Ok(Json(app.fetcher.describe(&name)?))
}
