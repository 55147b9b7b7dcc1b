//! `POST .../vectors:score`: the best of each query's candidates, in JSON. The fetcher computes the scores.

use super::AppState;
use super::batch::receive;
use super::batch_response::{ItemErrorView, item_error_views};
use super::bounded_list;
use super::conditional::ETag;
use super::negotiate::{require_json, require_json_accepted};
use super::parsing::parse_body;
use super::problem::{PathParams, Problem};
use super::representation::require_version;
use crate::caller::Connection;
use crate::error_status::ItemMessages;
use crate::fetch::{FetchError, RequestContext, RequiredKind, ScoreQuery, Scoring};
use crate::record::note_dataset;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::header;
use ringfetch_score::Metric;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use utoipa::ToSchema;

/// Queries, and candidates for each. Integers are written without fraction and exponent.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ScoreRequest {
    /// At least one.
    #[serde(deserialize_with = "bounded_list::objects")]
    queries: Vec<ScoreRequestQuery>,
    /// `dot` or `cosine`, where larger is better; `euclidean` or `manhattan`, where smaller is better.
    metric: String,
    /// Most results per query: from 1 to the largest number of ids in a query.
    limit: u32,
    /// Only results with this score or a better one.
    #[serde(default)]
    threshold: Option<f64>,
    /// Fail the request on an item error.
    #[serde(default)]
    fail_fast: bool,
    /// Deadline, milliseconds from the request's arrival; 0: only the daemon's (limits.deadline_ms).
    #[serde(default)]
    deadline_ms: u32,
}

/// A query and its candidates.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ScoreRequestQuery {
    /// As many elements as a vector of the dataset has.
    vector: Vec<f32>,
    /// Vector ids from 0, in any order, at least one. A repeated id has one score.
    ids: Vec<u64>,
}

/// The best candidates of each query.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ScoreAnswer)]
pub(super) struct ScoreResponse {
    /// One for each query, in request order.
    results: Vec<ScoreResult>,
}

/// The result of one query.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ScoreResult {
    /// The best candidates, best first; those with equal scores by id.
    ids: Vec<u64>,
    /// The score of each.
    scores: Vec<f64>,
    /// Candidates left out because their score is not a finite number.
    unscored: u32,
    /// Candidates that could not be read; `item` is the position in the query's `ids`.
    errors: Vec<ItemErrorView>,
}

/// Scores vectors.
#[utoipa::path(post, path = "/v1/datasets/{name}/vectors:score", tag = "data", operation_id = "ScoreVectors",
    params(("name" = String, Path, description = "The dataset, of kind vectors."),
        ("If-Match" = Option<String>, Header)), request_body = ScoreRequest,
    responses((status = 200, description = "The best candidates.", body = ScoreResponse),
        (status = 412, description = "If-Match names other versions of the dataset.")))]
pub(super) async fn score(
    State(app): State<Arc<AppState>>,
    PathParams(name): PathParams<String>,
    request: Request,
) -> Result<Response, Problem> {
    note_dataset(&name);
    let arrival = Instant::now();
    let (parts, body) = request.into_parts();
    require_json_accepted(&parts.headers)?;
    require_json(&parts.headers)?;
    let connection = Connection::of(&parts.extensions);
    let limits = app.fetcher.limits();
    let (body, mut request_memory) = receive(&app, connection.as_ref(), body, arrival).await?;
    // An id of one digit and its comma take 8 bytes once parsed, four times their length; a candidate takes
    // as much as two items.
    let items_max = usize::try_from(limits.items_per_request).unwrap_or(usize::MAX);
    let parsed_bytes = body.len().saturating_mul(4);
    let items = items_max.min(body.len()).saturating_mul(2);
    request_memory.whole(parsed_bytes, items)?;
    let (of, charge) = (connection.as_ref(), request_memory.into_charge());
    let (request, queries, _charge) =
        parse_body::<ScoreRequest>(&app.fetcher, of, body, items_max, charge, arrival).await?;
    let scoring = Scoring {
        queries: request
            .queries
            .iter()
            .map(|query| ScoreQuery {
                vector: &query.vector,
                ids: &query.ids,
            })
            .collect(),
        metric: Metric::from_word(&request.metric),
        limit: request.limit,
        threshold: request.threshold,
    };
    // Of too many queries, not all are stored.
    let items = scoring.items().max(queries);
    if items > items_max {
        let too_many = FetchError::TooManyItems {
            field: "queries.ids",
            items,
            max: limits.items_per_request,
        };
        app.fetcher.count_rejection(Err(too_many), connection.as_ref())?;
    }
    let dataset = app
        .fetcher
        .open(&name, RequiredKind::Vectors, connection.as_ref())?;
    let etag = ETag::new(dataset.etag());
    require_version(&parts.headers, &etag)?;
    let context = RequestContext {
        arrived: Some(arrival),
        deadline: (request.deadline_ms > 0)
            .then(|| arrival + Duration::from_millis(request.deadline_ms.into())),
        connection: connection.clone(),
        fail_fast: request.fail_fast,
    };
    let scored = app.fetcher.score_of(&dataset, &scoring, &context).await;
    let rankings = scored.map_err(|error| Problem::of_items(error, "queries.ids"))?;
    let mut messages = ItemMessages::default();
    let results = rankings.into_iter().map(|ranking| ScoreResult {
        ids: ranking.best.iter().map(|scored| scored.id).collect(),
        scores: ranking.best.iter().map(|scored| scored.score).collect(),
        unscored: ranking.unscored,
        errors: item_error_views(&ranking.errors, &mut messages),
    });
    let answer = ScoreResponse {
        results: results.collect(),
    };
    Ok(([(header::ETAG, etag.value())], Json(answer)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::batch_request::parse;
    use serde_json::json;

    #[test]
    fn a_threshold_is_the_number_that_was_sent() {
        // Scenario: scores of a response as thresholds, of every magnitude. Expectation: exactly these numbers, which the
        // candidates with these scores reach.
        let mut random = fastrand::Rng::with_seed(7);
        let others = (0..1000)
            .map(|_| f64::from_bits(random.u64(..)))
            .filter(|score| score.is_finite());
        for threshold in others.chain([0.945_270_695_553_922_3]) {
            let body =
                json!({"queries": [], "metric": "dot", "limit": 1, "threshold": threshold}).to_string();
            let (request, _) = parse::<ScoreRequest>(body.as_bytes(), 1).unwrap();
            assert_eq!(request.threshold, Some(threshold));
        }
    }
}
