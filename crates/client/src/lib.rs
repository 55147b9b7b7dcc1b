//! A Rust client for Ringfetch: batched random reads over gRPC, pooled, pipelined, retried with care.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use ringfetch_client::Client;
//!
//! let client = Client::builder("http://127.0.0.1:7410").connections(2).connect().await?;
//! let blocks = client.fetch_blocks("blocks", &[17, 90_312, 5]).await?;
//! for item in blocks.iter() {
//!     match item {
//!         Ok(block) => println!("{} bytes", block.len()), // a slice of one buffer: nothing is copied
//!         Err(error) => eprintln!("{error}"),             // one bad index does not fail the others
//!     }
//! }
//! let vectors = client.fetch_vectors("vectors", &[3, 1, 4]).await?;
//! let first: Option<Vec<f32>> = vectors.as_f32(0);
//! # let _ = first; Ok(()) }
//! ```
//!
//! # Batches, pipelines, connections
//! One call costs the server tens of microseconds whatever the disk does, so ask for many items at once; 64 is a
//! good start. Keep several calls in flight: a [`Client`] is cheap to clone and may be used from any number of
//! tasks. [`Client::stream`] pipelines requests on one gRPC stream, which costs less a request than calls do.
//! [`Builder::max_in_flight`] bounds the calls in flight; further ones wait their turn.
//!
//! # What is retried
//! Every method only reads, or sets a value that can be set twice, so that a retry is always safe. What is retried is
//! UNAVAILABLE, a connection that fails, and RESOURCE_EXHAUSTED **with** a hint (`google.rpc.RetryInfo`). Without one, a
//! limit of a single request was exceeded and a retry cannot help. Retries wait at least as long as the hint, back
//! off exponentially with full jitter, and are bounded by [`RetryPolicy::attempts_max`] and the call's deadline.
//!
//! # Memory
//! Items are slices of their answer's one buffer. A slice kept alive keeps the whole buffer: copy what you keep.
#![forbid(unsafe_code)]

mod admin;
mod builder;
mod client;
mod error;
mod items;
mod pool;
mod request;
mod retry;
mod stream;
mod vectors;

pub use admin::AdminClient;
pub use builder::Builder;
pub use client::Client;
pub use error::{Error, FieldViolation, StatusError};
pub use items::{Blocks, ItemError, Items};
pub use request::{Answer, ByteRange, ObjectPart, Request};
pub use retry::RetryPolicy;
pub use stream::FetchStream;
pub use vectors::{Dtype, Vectors};

pub use ringfetch_proto::v1 as wire;
pub use tonic::Code;
