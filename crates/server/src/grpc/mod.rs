//! The gRPC transport: the services on the public port.
//!
//! `service` is FetchService, written by hand to avoid copying responses; `datasets` and `health` implement
//! services that tonic generates, whose calls pass through `tonic_calls`. Other methods get UNIMPLEMENTED. `listener` has connections and HTTP/2
//! settings, `error_status` the codes.

#[doc(hidden)]
pub mod bench_hooks;
pub(crate) mod convert;
mod datasets;
mod deadline_body;
mod encode;
mod fetch_request;
mod frame;
mod health;
mod metadata;
mod read_object;
mod reflection;
mod service;
mod stream;
mod tonic_calls;
mod wire;

pub(crate) use metadata::is_grpc;
pub(crate) use service::{refuse_calls, refuse_other_protocols};

use crate::fetch::Fetcher;
use crate::lifecycle::{Lifecycle, State};
use crate::listener::FastPath;
use crate::rpc_metrics::RpcMetrics;
use ringfetch_proto::v1::dataset_service_server::DatasetServiceServer;
use std::sync::Arc;
use tonic::service::{Routes, RoutesBuilder};
use tonic_health::pb::health_server::HealthServer;

/// Services on the public port that health and reflection list.
pub(crate) const SERVICES: &[&str] = &[service::NAME, "ringfetch.v1.DatasetService"];

/// Everything that the public gRPC port serves: FetchService, DatasetService, health and reflection.
///
/// Requests must be gRPC calls: the listener refuses others. They should have their connection in their extensions;
/// without one they are not charged to a caller.
pub fn service(fetcher: Fetcher, lifecycle: Lifecycle, rpc: RpcMetrics) -> axum::Router {
    let mut routes = RoutesBuilder::default();
    routes.add_service(
        DatasetServiceServer::new(datasets::Datasets {
            fetcher: fetcher.clone(),
        })
        .max_encoding_message_size(usize::MAX),
    );
    let fetch = service::FetchService::new(fetcher.clone(), lifecycle.clone(), rpc.clone());
    let fetch_routes = axum::Router::new().route_service(&format!("/{}/{{method}}", service::NAME), fetch);
    fetch_routes.merge(finish(routes, fetcher, lifecycle, rpc, SERVICES, State::Draining))
}

/// FetchService without the router: the fast path for [`service`].
pub fn fast_path(fetcher: Fetcher, lifecycle: Lifecycle, rpc: RpcMetrics) -> Arc<dyn FastPath> {
    Arc::new(service::FetchService::new(fetcher, lifecycle, rpc))
}

/// Adds health and reflection for these services, and what every call of the services in `routes` needs. From `last` on, calls
/// that wait for their client's next request end.
pub(crate) fn finish(
    mut routes: RoutesBuilder,
    fetcher: Fetcher,
    lifecycle: Lifecycle,
    rpc: RpcMetrics,
    services: &'static [&'static str],
    last: State,
) -> axum::Router {
    routes.add_service(HealthServer::new(health::HealthService::new(
        lifecycle.clone(),
        services,
    )));
    // Only a broken build could make the descriptor set invalid; the port then serves without reflection.
    match reflected(services).build_v1() {
        Ok(reflection) => {
            routes.add_service(reflection);
        }
        Err(error) => tracing::error!(%error, "no reflection v1"),
    }
    match reflected(services).build_v1alpha() {
        Ok(reflection) => {
            routes.add_service(reflection);
        }
        Err(error) => tracing::error!(%error, "no reflection v1alpha"),
    }
    let router = Routes::into_axum_router(routes.routes());
    let state = tonic_calls::CallState {
        fetcher,
        lifecycle,
        rpc,
        services,
        last,
    };
    router.layer(axum::middleware::from_fn_with_state(state, tonic_calls::serve))
}

/// Lists only what this port serves: the descriptor set also has the admin service.
fn reflected(services: &[&str]) -> tonic_reflection::server::Builder<'static> {
    let builder = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(ringfetch_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .with_service_name("grpc.health.v1.Health");
    services
        .iter()
        .fold(builder, |builder, name| builder.with_service_name(*name))
}
