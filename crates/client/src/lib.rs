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
//!         Ok(block) => println!("{} bytes", block.len()), // a slice of what arrived: nothing is copied
//!         Err(error) => eprintln!("{error}"),             // one bad index does not fail the others
//!     }
//! }
//! let vectors = client.fetch_vectors("vectors", &[3, 1, 4]).await?;
//! let first: Option<Vec<f32>> = vectors.as_f32(0);
//! # let _ = first; Ok(()) }
//! ```
//!
//! The crate is not on crates.io yet: depend on it in a checkout, as
//! `ringfetch-client = { path = "ringfetch/crates/client" }`. Calls need a Tokio runtime.
//!
//! # Batches, pipelines, connections
//! One call costs the server tens of microseconds whatever the disk does, so ask for many items at once; 64 is a
//! good start. Keep several calls in flight: a [`Client`] is cheap to clone and may be used from any number of
//! tasks. [`Client::stream`] pipelines requests on one gRPC stream, which costs less a request than calls do.
//! [`Builder::max_in_flight`] bounds the calls in flight; further ones wait their turn.
//!
//! # Long objects
//! A batch's response has a limit, 3 MiB by default. [`Client::read_object`] reads an object of any length as a stream of chunks,
//! all of one version, and goes on where it ended if the connection breaks.
//!
//! # What is retried
//! Every method only reads, so that a retry is always safe; those of [`AdminClient`] that change something say what they
//! changed, and are never retried. What is retried is UNAVAILABLE, a connection that fails, and RESOURCE_EXHAUSTED **with**
//! a hint (`google.rpc.RetryInfo`). Without one, a limit of a single request was exceeded and a retry cannot help. Retries
//! wait as long as the server that they go to has asked for, back off exponentially with jitter, and are bounded by
//! [`RetryPolicy::attempts_max`], by the call's deadline and by the client's [`RetryBudget`], so that a server in trouble
//! does not get a multiple of its load. By default a call outlives the restart of its only server, which takes seconds; where
//! nobody listens it fails after 4 to 8 s, or its timeout; where TLS is refused, at once. For an error at once in any case use
//! [`RetryPolicy::none`].
//!
//! # Several servers
//! [`Builder::endpoint`] adds servers with the same data: calls are spread over all of them, and a retry goes to another one
//! than the attempt before. One that cannot be reached gets no call until a connection to it is open again; one that refuses
//! calls, breaks connections or ends streams is passed over for up to a second; one that leaves a call unanswered, until it
//! has answered a ping. A stream stays with its server, and so do the retries of its requests. So does a read of
//! an object once it has begun, unless its server fails and another one has the same version.
//!
//! An etag belongs to the server that sent it: another one with copies of the same files has other etags, and answers
//! [`Request::if_match`] with FAILED_PRECONDITION, which is not retried. Read one version with requests on one
//! [`FetchStream`], the etag from its first answer, with one [`Client::read_object`], or with a client of one server.
//!
//! # TLS
//! Servers at `https://` URLs need a certificate that the host's authorities vouch for, or those given to [`Builder::tls`],
//! with the client's own certificate if they ask for one. [`Builder::token`] sends a bearer token with every call.
//!
//! # Memory
//! Items are slices of the buffers that their answer arrived in: nothing is copied but the few items that arrived in two.
//! A slice kept alive keeps its whole buffer, up to 256 KiB: copy what you keep.
//!
//! A call whose future is kept without being polled buffers up to 4 MiB of its answer (all of it, if the call had to wait for its
//! turn), and a connection at most 2 GiB. It delays no other call, but if it was sent at once, it counts towards
//! [`Builder::max_in_flight`] until it is polled to its end or dropped. An [`ObjectStream`] that is not polled buffers up to 5 MiB,
//! and does not count.
//!
//! # Features
//! `serde` makes the server's status and its datasets' descriptions serializable.
#![forbid(unsafe_code)]

mod admin;
mod builder;
mod call;
mod client;
mod code;
mod connection;
mod core;
mod dataset;
mod error;
mod items;
mod message;
mod object;
mod pool;
mod request;
mod retry;
mod scores;
mod status;
mod stream;
mod tls;
mod vectors;

pub use admin::AdminClient;
pub use builder::Builder;
pub use client::Client;
pub use code::Code;
pub use connection::{connect_tcp, is_loopback};
pub use dataset::{Dataset, Kind, ObjectInfo, VectorShape};
pub use error::{Error, FieldViolation, StatusError};
pub use items::{Blocks, ItemError, Items};
pub use object::ObjectStream;
pub use request::{Answer, ByteRange, ObjectPart, Request};
pub use retry::{RetryBudget, RetryPolicy};
pub use scores::{Metric, Ranking, ScoreRequest, Scores};
pub use status::{
    Backend, ConfigChange, DatasetStatus, LastReload, ReadPath, Reloaded, ShardStatus, Status, Switched,
};
pub use stream::FetchStream;
pub use tls::Tls;
pub use vectors::{Dtype, Vectors};
