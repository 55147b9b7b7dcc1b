//! The daemon's parts; `main` composes them.
#![forbid(unsafe_code)]

pub mod admin;
pub mod caller;
pub mod catalogue;
pub mod config;
pub mod demo;
pub mod door;
mod figures;
pub mod grpc;
pub mod http;
pub mod lifecycle;
pub mod listener;
pub mod live;
pub mod rpc_metrics;
pub mod status;
pub mod supervisor;
pub mod telemetry;
