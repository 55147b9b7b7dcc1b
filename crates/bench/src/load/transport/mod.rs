//! How a request travels: as a gRPC call, pipelined on one gRPC stream a connection, or as an HTTP/1.1 request. None
//! of them retries: an overload is a result.

mod answer;
mod calls;
#[cfg(test)]
pub(super) mod fake;
mod http;
mod message;

pub(super) use answer::{Answer, Refused};
pub(super) use http::{Http, get_text};

use super::args::TransportArg;
use super::workload::Part;
use calls::Calls;
use ringfetch_client::{Client, FetchStream, RetryPolicy};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Where to connect, and how.
#[derive(Debug, Clone)]
pub(super) struct Endpoints {
    pub(super) grpc: String,
    /// Only needed by the HTTP transport.
    pub(super) http: String,
    pub(super) transport: TransportArg,
    pub(super) timeout: Duration,
}

/// One thread's connections.
#[derive(Debug)]
pub(super) enum Transport {
    Calls(Calls),
    Streams {
        client: Client,
        streams: Vec<Mutex<FetchStream>>,
    },
    Http(Http),
    #[cfg(test)]
    Fake(fake::Fake),
}

impl Transport {
    /// Makes all connections of a thread. `slots` requests will be in flight at most.
    pub(super) async fn connect(
        endpoints: &Endpoints,
        connections: u32,
        slots: u32,
    ) -> Result<Self, ConnectError> {
        let connections = usize::try_from(connections).unwrap_or(usize::MAX);
        if endpoints.transport == TransportArg::Http {
            let http = Http::connect(&endpoints.http, slots, endpoints.timeout).await;
            return http.map(Self::Http).map_err(ConnectError::Http);
        }
        if endpoints.transport == TransportArg::Grpc {
            let calls = Calls::connect(&endpoints.grpc, connections, endpoints.timeout).await;
            return calls.map(Self::Calls).map_err(ConnectError::Calls);
        }
        let client = Client::builder(&endpoints.grpc)
            .connections(connections)
            // The number of slots is the bound.
            .max_in_flight(1 << 20)
            .timeout(endpoints.timeout)
            .retry(RetryPolicy::none())
            .connect()
            .await
            .map_err(ConnectError::Grpc)?;
        // Each takes the least busy connection, so each has one to itself.
        let streams = (0..connections).map(|_| Mutex::new(client.stream())).collect();
        Ok(Self::Streams { client, streams })
    }

    /// Sends one request of a slot and returns its answer. Slots are numbered from 0.
    pub(super) async fn fetch(&self, slot: usize, part: &Part, items: &[u64]) -> Result<Answer, Refused> {
        let answer = match self {
            Self::Calls(calls) => return calls.fetch(slot, part, items).await,
            Self::Streams { client, streams } => {
                let stream = {
                    let mut stream = streams[slot % streams.len()]
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner);
                    if stream.is_broken() {
                        *stream = client.stream();
                    }
                    stream.clone()
                };
                stream.send(part.request(items)).await
            }
            Self::Http(http) => return http.fetch(slot, part, items).await,
            #[cfg(test)]
            Self::Fake(fake) => return fake.fetch(items).await,
        };
        Ok(Answer::Items(answer?))
    }
}

/// Why a thread has no connections.
#[derive(Debug)]
pub(super) enum ConnectError {
    Grpc(ringfetch_client::Error),
    Calls(Refused),
    Http(Refused),
}
