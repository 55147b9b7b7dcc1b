//! The daemon's parts; `main` composes them.
#![forbid(unsafe_code)]

pub mod access;
pub mod access_log;
pub mod admin;
pub mod caller;
pub mod catalogue;
pub mod config;
mod daemon_status;
pub mod demo;
pub mod error_status;
pub mod fetch;
mod file_step;
mod gathering;
pub mod grpc;
pub mod host_memory;
pub mod http;
pub mod key_file;
pub mod lifecycle;
pub mod listener;
pub mod log_output;
mod rate;
pub mod reconfigure;
pub mod record;
pub mod rpc_metrics;
pub mod sd_notify;
pub mod spans;
pub mod telemetry;
pub mod tls;
mod trace_context;
