//! grpc.health.v1, from the daemon's state: SERVING while it serves, NOT_SERVING before that and while it
//! drains.
//!
//! All services have the same health. A watch reports NOT_SERVING when the drain begins, and then ends, so
//! that it does not keep the connection open.

use crate::error_status::refused_call;
use crate::lifecycle::{Lifecycle, State};
use futures_util::Stream;
use std::pin::Pin;
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

#[derive(Debug, Clone)]
pub(crate) struct HealthService {
    lifecycle: Lifecycle,
    services: &'static [&'static str],
}

impl HealthService {
    /// Knows these services, and the empty name, which is the daemon as a whole.
    pub(crate) fn new(lifecycle: Lifecycle, services: &'static [&'static str]) -> Self {
        Self { lifecycle, services }
    }

    fn knows(&self, service: &str) -> bool {
        service.is_empty() || self.services.contains(&service)
    }
}

fn serving(state: State) -> ServingStatus {
    match state {
        State::Serving => ServingStatus::Serving,
        State::Starting | State::LameDuck | State::Draining | State::Ended => ServingStatus::NotServing,
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        if self.knows(&request.get_ref().service) {
            Ok(Response::new(response(serving(self.lifecycle.state()))))
        } else {
            let known = self.services.join(", ");
            let message = format!("service: unknown; known: \"\", {known}");
            Err(refused_call(Code::NotFound, "service-not-found", &message))
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let known = self.knows(&request.get_ref().service);
        let mut changes = self.lifecycle.subscribe();
        // The current state is the first message.
        changes.mark_changed();
        let stream = futures_util::stream::unfold((changes, None), move |(mut changes, last)| async move {
            if last >= Some(State::LameDuck) {
                return None;
            }
            changes.changed().await.ok()?;
            let state = *changes.borrow_and_update();
            // The protocol requires this for an unknown service: report it, and keep watching.
            let status = if known {
                serving(state)
            } else {
                ServingStatus::ServiceUnknown
            };
            Some((Ok(response(status)), (changes, Some(state))))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;
    use tonic_types::StatusExt as _;

    fn ask(service: &str) -> Request<HealthCheckRequest> {
        Request::new(HealthCheckRequest {
            service: service.to_owned(),
        })
    }

    #[tokio::test]
    async fn an_unknown_service_is_told_with_a_reason() {
        // A check of a service that the port does not have: NOT_FOUND, its reason, and the services that there are.
        let health = HealthService::new(Lifecycle::new(), &["ringfetch.v1.FetchService"]);
        let status = health.check(ask("nothing")).await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert!(
            status.message().contains("ringfetch.v1.FetchService"),
            "{status:?}"
        );
        assert_eq!(
            status.get_details_error_info().unwrap().reason,
            "SERVICE_NOT_FOUND"
        );
    }

    #[tokio::test]
    async fn a_watch_follows_the_daemon_to_its_end() {
        // Starting, serving, draining: each change is reported, and the watch ends after the drain began.
        let lifecycle = Lifecycle::new();
        let health = HealthService::new(lifecycle.clone(), &["ringfetch.v1.FetchService"]);
        let mut watch = health
            .watch(ask("ringfetch.v1.FetchService"))
            .await
            .unwrap()
            .into_inner();
        let mut next = async || watch.next().await.map(|answer| answer.unwrap().status());
        assert_eq!(next().await, Some(ServingStatus::NotServing));
        lifecycle.start_serving();
        assert_eq!(next().await, Some(ServingStatus::Serving));
        lifecycle.start_draining();
        assert_eq!(next().await, Some(ServingStatus::NotServing));
        assert_eq!(next().await, None);
    }
}
