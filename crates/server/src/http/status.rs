//! `GET /v1/status`: the daemon's status as JSON. It is collected at most once per [`FRESH`], so that its
//! cost does not grow with the number of open pages.

use super::AppState;
use crate::daemon_status::{StatusCollector, StatusView};
use crate::lifecycle::State as Life;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a collected status is reused.
const FRESH: Duration = Duration::from_millis(200);

#[derive(Debug, Clone)]
struct CachedStatus {
    at: Instant,
    state: Life,
    body: Bytes,
}

/// Collects the status and keeps the latest one.
#[derive(Debug)]
pub(super) struct StatusCache {
    collector: StatusCollector,
    latest: Mutex<Option<CachedStatus>>,
}

impl StatusCache {
    pub(super) fn new(collector: StatusCollector) -> Self {
        Self {
            collector,
            latest: Mutex::new(None),
        }
    }

    /// The latest status if it is fresh, otherwise a new one. Concurrent callers may both collect one;
    /// neither waits.
    fn answer(&self, app: &AppState) -> Bytes {
        let (now, state) = (Instant::now(), app.lifecycle.state());
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let fresh =
            |taken: &CachedStatus| taken.state == state && now.saturating_duration_since(taken.at) < FRESH;
        if let Some(taken) = latest.filter(fresh) {
            return taken.body;
        }
        let view = self.collector.collect(&app.fetcher, state);
        // Only strings and finite numbers, so it cannot fail.
        let body = Bytes::from(serde_json::to_vec(&view).unwrap_or_default());
        let taken = CachedStatus {
            at: now,
            state,
            body: body.clone(),
        };
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(taken);
        body
    }
}

/// The daemon's current status: counters since its start, and the state of its shards. Poll it to get rates; the page at `/`
/// does. Figures may be 200 ms old, `uptime_ms` says exactly when they were taken. Numbers beyond 2^53 lose their last
/// digits in JavaScript.
#[utoipa::path(get, path = "/v1/status", tag = "operation", operation_id = "GetStatus",
    responses((status = 200, description = "The figures, also while it is starting or draining.", body = StatusView)))]
pub(super) async fn status(State(app): State<Arc<AppState>>) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ),
    ];
    (headers, app.status.answer(&app)).into_response()
}
