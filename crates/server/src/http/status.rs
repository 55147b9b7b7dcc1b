//! `GET /v1/status`: the daemon's status as JSON. It is gathered at most once per [`FRESH_FOR`], so that its
//! cost does not grow with the number of open pages.

use super::AppState;
use super::problem::Problem;
use crate::daemon_status::{StatusCollector, StatusView};
use crate::fetch::Fetcher;
use crate::gathering::Gathering;
use crate::lifecycle::State as Life;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use std::sync::Arc;
use std::time::Duration;

/// How long a status is reused.
const FRESH_FOR: Duration = Duration::from_millis(200);

/// The status as JSON, and the state that it shows.
#[derive(Debug)]
pub(super) struct StatusTexts {
    collector: Arc<StatusCollector>,
    texts: Gathering<(Life, Bytes)>,
}

impl StatusTexts {
    pub(super) fn new(fetcher: &Fetcher) -> Self {
        Self {
            collector: Arc::new(StatusCollector::of(fetcher)),
            texts: Gathering::new(FRESH_FOR),
        }
    }

    async fn get(&self, app: &AppState) -> Result<Bytes, &'static str> {
        let (collector, fetcher) = (Arc::clone(&self.collector), app.fetcher.clone());
        let lifecycle = app.lifecycle.clone();
        let gather = move || {
            let state = lifecycle.state();
            let view = collector.collect(&fetcher, state);
            // Only strings and finite numbers, so it cannot fail.
            (state, Bytes::from(serde_json::to_vec(&view).unwrap_or_default()))
        };
        let is_current = |(shown, _): &(Life, Bytes)| *shown == app.lifecycle.state();
        let (_, text) = self.texts.get(is_current, gather).await?;
        Ok(text)
    }
}

/// The daemon's current status: counters since its start, and the state of its shards. Poll it to get rates; the page at `/`
/// does. Figures may be 200 ms old, `uptime_ms` says exactly when they were taken. Numbers beyond 2^53 lose their last
/// digits in JavaScript.
#[utoipa::path(get, path = "/v1/status", tag = "operation", operation_id = "GetStatus",
    responses((status = 200, description = "The figures, also while it is starting or draining.", body = StatusView)))]
pub(super) async fn status(State(app): State<Arc<AppState>>) -> Result<Response, Problem> {
    let text = app.status.get(&app).await.map_err(|problem| {
        let problem = format!("the status cannot be written: {problem}");
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "status-failed", problem)
    })?;
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ),
    ];
    Ok((headers, text).into_response())
}
