//! Sends requests: as gRPC calls, pipelined on one gRPC stream per connection, or as HTTP/1.1. None of them
//! retries: an overload is a result.

#[cfg(test)]
pub(super) mod fake;
mod grpc;
mod http;
mod response;

pub(super) use http::{Http, encode, get_text, is_site};
pub(super) use response::{Body, RequestError, Response};

use super::args::{ScoreAt, TransportArg};
use super::workload::Part;
use crate::args::Token;
use crate::connect::remedy;
use crate::outcome::Failure;
use grpc::Streams;
use ringfetch_client::{Client, Tls};
use std::time::Duration;
use tokio::time::timeout;

/// Credentials of this client, and whom it trusts.
#[derive(Debug, Clone)]
pub(super) struct Credentials {
    /// For https:// addresses; present if one of the two is such an address.
    pub(super) tls: Option<Tls>,
    pub(super) token: Option<Token>,
}

/// Where to connect, and how.
#[derive(Debug, Clone)]
pub(super) struct Endpoints {
    pub(super) grpc: String,
    /// Only needed by the HTTP transport.
    pub(super) http: String,
    pub(super) credentials: Credentials,
    pub(super) transport: TransportArg,
    pub(super) timeout: Duration,
}

impl Endpoints {
    /// Reports that a connection cannot be opened.
    pub(super) fn unreachable(&self, refused: &RequestError) -> Failure {
        let (flag, url) = match self.transport {
            TransportArg::Grpc | TransportArg::Stream => ("grpc", &self.grpc),
            TransportArg::Http => ("http", &self.http),
        };
        let remedy = remedy(&refused.message, flag, url);
        Failure::Failed(format!("cannot reach {url} ({}); {remedy}", refused.message))
    }
}

/// One thread's connections.
#[derive(Debug)]
pub(super) enum Transport {
    Calls(Client),
    Streams(Streams),
    Http(Http),
    #[cfg(test)]
    Fake(fake::Fake),
}

impl Transport {
    /// Opens all connections of a thread. At most `slots` requests will be in flight.
    pub(super) async fn connect(
        endpoints: &Endpoints,
        connections: u32,
        slots: u32,
    ) -> Result<Self, RequestError> {
        let client = grpc::connect(endpoints, connections, slots);
        Ok(match endpoints.transport {
            TransportArg::Grpc => Self::Calls(client.await?),
            TransportArg::Stream => Self::Streams(Streams::open(client.await?, connections)),
            TransportArg::Http => Self::Http(
                Http::connect(&endpoints.http, &endpoints.credentials, slots, endpoints.timeout).await?,
            ),
        })
    }

    /// Sends one request of a slot and returns its response. Slots are numbered from 0.
    pub(super) async fn fetch(
        &self,
        slot: usize,
        part: &Part,
        items: &[u64],
    ) -> Result<Response, RequestError> {
        let response = match self {
            Self::Calls(client) => grpc::fetch(client, part, items).await,
            Self::Streams(streams) => streams.fetch(slot, part, items).await,
            Self::Http(http) => http.fetch(slot, part, items).await,
            #[cfg(test)]
            Self::Fake(fake) => fake.fetch(items).await,
        }?;
        Ok(match part.scored_at(ScoreAt::Client) {
            Some(scoring) => response.rank(scoring, items),
            None => response,
        })
    }

    /// Ends its streams, on which no request is in flight, and waits for that, at most for the timeout of a request.
    pub(super) async fn end(self, endpoints: &Endpoints) {
        if let Self::Streams(streams) = self {
            // A daemon that does not answer takes them for cancelled.
            let _ = timeout(endpoints.timeout, streams.end()).await;
        }
    }
}
