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
use ringfetch_engine::blocking::BlockingPool;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
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
    match app.scrapes.text(&app.registry).await {
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

/// Writes the metrics: a thousand datasets take 70 ms, for which a core would serve nobody.
static SCRAPER: BlockingPool = BlockingPool::new("rf-metrics", 1);

/// Scrapes: one text at a time is written, and given to all that were waiting when it was begun, so that nobody waits for more
/// than two.
#[derive(Debug, Default)]
pub(super) struct Scrapes {
    /// The last text, for those that wait, and when it was begun. Locked while one is being written.
    last: Arc<tokio::sync::Mutex<Option<(Instant, Bytes)>>>,
    waiting: Arc<AtomicUsize>,
}

/// One that waits for its turn.
struct Waits<'a>(&'a AtomicUsize);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Scrapes {
    async fn text(&self, registry: &Registry) -> Result<Bytes, String> {
        let asked = Instant::now();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let waits = Waits(&self.waiting);
        let mut turn = Arc::clone(&self.last).lock_owned().await;
        drop(waits);
        let waiting = Arc::clone(&self.waiting);
        let is_awaited = move || waiting.load(Ordering::Relaxed) > 0;
        let last = turn.take();
        if let Some((begun, text)) = last.filter(|(begun, _)| *begun >= asked) {
            *turn = is_awaited().then(|| (begun, text.clone()));
            return Ok(text);
        }
        let gathered = registry.clone();
        // The turn ends with the text, even if nobody waits for it any more.
        let written = SCRAPER.run(move || {
            let begun = Instant::now();
            let text = write(&gathered)?;
            *turn = is_awaited().then(|| (begun, text.clone()));
            Ok(text)
        });
        let text = match written {
            Ok(written) => written.await.map_err(|_panicked| "it panicked".to_owned())?,
            Err(_no_thread) => write(registry),
        };
        text.map_err(|error: prometheus::Error| error.to_string())
    }
}

fn write(registry: &Registry) -> prometheus::Result<Bytes> {
    let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather())?;
    Ok(text.into())
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

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::{FutureExt as _, join_all};
    use prometheus::core::{Collector, Desc};
    use prometheus::proto::MetricFamily;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Tells of each time that it is gathered, and waits until it may go on.
    struct Held {
        gathered: Sender<()>,
        release: Mutex<Receiver<()>>,
    }

    impl Collector for Held {
        fn desc(&self) -> Vec<&Desc> {
            Vec::new()
        }

        fn collect(&self) -> Vec<MetricFamily> {
            self.gathered.send(()).expect("the test");
            // An error: the test releases everything.
            let _released = self.release.lock().expect("the test").recv();
            Vec::new()
        }
    }

    #[tokio::test]
    async fn those_that_wait_get_one_text() {
        // Scenario: a scrape is being written; ten more come, of which one leaves; it ends. Expectation: one more is
        // written, for all of them, and not kept; a later one is written anew.
        let registry = Registry::new();
        let (gathered, gathers) = channel();
        let (release, held) = channel();
        let held = Held {
            gathered,
            release: Mutex::new(held),
        };
        registry.register(Box::new(held)).expect("no name");
        let scrapes = Scrapes::default();
        let mut first = Box::pin(scrapes.text(&registry));
        assert!(first.as_mut().now_or_never().is_none());
        gathers.recv().expect("it is gathered");
        let mut others: Vec<_> = (0..10).map(|_| Box::pin(scrapes.text(&registry))).collect();
        assert!(
            others
                .iter_mut()
                .all(|other| other.as_mut().now_or_never().is_none())
        );
        others.pop();
        drop(release);
        first.await.expect("a text");
        assert!(join_all(others).await.iter().all(Result::is_ok));
        assert!(scrapes.last.lock().await.is_none());
        assert_eq!(gathers.try_iter().count(), 1);
        scrapes.text(&registry).await.expect("a text");
        assert_eq!(gathers.try_iter().count(), 1);
    }
}
