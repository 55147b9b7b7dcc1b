//! `GET /v1/status`: the daemon's figures as JSON. They are taken at most once in [`FRESH`], however many ask: their cost does
//! not grow with the number of open pages.

use super::App;
use crate::figures::{Figures, StatusView};
use crate::lifecycle::State as Life;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An answer is given to everybody who asks within this time.
const FRESH: Duration = Duration::from_millis(200);

#[derive(Debug, Clone)]
struct Taken {
    at: Instant,
    state: Life,
    body: Bytes,
}

/// The figures, and the latest answer.
#[derive(Debug)]
pub(super) struct Latest {
    figures: Figures,
    latest: Mutex<Option<Taken>>,
}

impl Latest {
    pub(super) fn new(figures: Figures) -> Self {
        Self {
            figures,
            latest: Mutex::new(None),
        }
    }

    /// The answer: the latest if it is fresh. Two callers may both make one; neither waits for the other.
    fn answer(&self, app: &App) -> Bytes {
        let (now, state) = (Instant::now(), app.lifecycle.state());
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let fresh = |taken: &Taken| taken.state == state && now.saturating_duration_since(taken.at) < FRESH;
        if let Some(taken) = latest.filter(fresh) {
            return taken.body;
        }
        let view = self.figures.take(&app.fetcher, state);
        // Strings and finite numbers only: it cannot fail.
        let body = Bytes::from(serde_json::to_vec(&view).unwrap_or_default());
        let taken = Taken {
            at: now,
            state,
            body: body.clone(),
        };
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(taken);
        body
    }
}

/// What the daemon does now: counters since its start, and the state of its shards. Poll it to get rates; the page at `/`
/// does. Figures may be 200 ms old, `uptime_ms` says exactly when they were taken. Numbers beyond 2^53 lose their last
/// digits in JavaScript.
#[utoipa::path(get, path = "/v1/status", tag = "operation", operation_id = "GetStatus",
    responses((status = 200, description = "The figures, also while it starts or drains.", body = StatusView)))]
pub(super) async fn status(State(app): State<Arc<App>>) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (
            header::X_CONTENT_TYPE_OPTIONS,
            HeaderValue::from_static("nosniff"),
        ),
    ];
    (headers, app.figures.answer(&app)).into_response()
}
