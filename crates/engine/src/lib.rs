//! Ringfetch's data plane: from item numbers to bytes in one aligned response buffer, over io_uring, a
//! mapping or pread. Independent of gRPC, HTTP, YAML and command lines.
#![allow(
    unsafe_code,
    reason = "reads land in memory that the kernel writes to; nobody else may"
)]

pub(crate) mod at_once;
pub(crate) mod backend;
pub mod batch;
#[doc(hidden)]
pub mod bench_hooks;
pub mod blocking;
pub mod buffer;
pub mod config;
pub mod cores;
pub mod dataset;
pub mod engine;
pub mod error;
pub mod geometry;
mod metrics;
mod plan;
mod planned_batch;
mod routing;
pub mod series;
mod shard;
pub mod share;
mod start;
pub mod sync;

pub use backend::probe;
#[cfg(any(test, feature = "sim"))]
pub use backend::sim;
