//! Metrics, liveness and readiness.

use super::AppState;
use super::problem::Problem;
use crate::lifecycle::State as Life;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use prometheus::Registry;
use serde::Serialize;
use std::sync::Arc;
use utoipa::ToSchema;

/// The state of the daemon.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Probe {
    /// `starting`, `serving` or `draining`.
    state: &'static str,
}

/// Every metric, in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", tag = "operation", operation_id = "Metrics",
    responses((status = 200, description = "Prometheus text format 0.0.4.", body = String, content_type = "text/plain")))]
pub(super) async fn metrics(State(app): State<Arc<AppState>>) -> Result<Response, Problem> {
    let registry = app.registry.clone();
    let text = app.scrapes.get(|_| true, move || write(&registry)).await;
    match text.map_err(str::to_owned).flatten() {
        Ok(text) => {
            let content_type = HeaderValue::from_static(prometheus::TEXT_FORMAT);
            Ok(([(header::CONTENT_TYPE, content_type)], text).into_response())
        }
        Err(problem) => Err(Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "metrics-failed",
            format!("the metrics cannot be written: {problem}"),
        )),
    }
}

fn write(registry: &Registry) -> Result<Bytes, String> {
    prometheus::TextEncoder::new()
        .encode_to_string(&registry.gather())
        .map(Bytes::from)
        .map_err(|error| error.to_string())
}

/// Whether the process is running.
#[utoipa::path(get, path = "/livez", tag = "operation", operation_id = "Livez",
    responses((status = 200, description = "It runs.", body = Probe)))]
pub(super) async fn livez(State(app): State<Arc<AppState>>) -> Json<Probe> {
    Json(Probe {
        state: app.lifecycle.state().as_str(),
    })
}

/// Whether the daemon is ready for requests.
#[utoipa::path(get, path = "/readyz", tag = "operation", operation_id = "Readyz",
    responses(
        (status = 200, description = "It is.", body = Probe),
        (status = 503, description = "Not ready: it is starting or draining.", body = Probe),
    ))]
pub(super) async fn readyz(State(app): State<Arc<AppState>>) -> (StatusCode, Json<Probe>) {
    let state = app.lifecycle.state();
    let status = if state == Life::Serving {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (
        status,
        Json(Probe {
            state: state.as_str(),
        }),
    )
}
