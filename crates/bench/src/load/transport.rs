//! How a request travels: as a call over a pool of connections, or pipelined on one stream a connection. Neither
//! retries: an overload is a result.

use crate::args::TransportArg;
use ringfetch_client::{Answer, Client, Error, FetchStream, Request, RetryPolicy};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// One thread's connections.
#[derive(Debug)]
pub(crate) enum Transport {
    Calls(Client),
    Streams {
        client: Client,
        streams: Vec<Mutex<FetchStream>>,
    },
}

impl Transport {
    /// Connects all of them.
    pub(crate) async fn connect(
        grpc: &str,
        transport: TransportArg,
        connections: u32,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let connections = usize::try_from(connections).unwrap_or(usize::MAX);
        let client = Client::builder(grpc)
            .connections(connections)
            // The number of slots is the bound.
            .max_in_flight(1 << 20)
            .timeout(timeout)
            .retry(RetryPolicy::none())
            .connect()
            .await?;
        Ok(match transport {
            TransportArg::Grpc => Self::Calls(client),
            TransportArg::Stream => {
                // Each takes the least busy connection, so each has one to itself.
                let streams = (0..connections).map(|_| Mutex::new(client.stream())).collect();
                Self::Streams { client, streams }
            }
        })
    }

    /// Sends one request of a slot and returns its answer.
    pub(crate) async fn fetch(&self, slot: u32, request: Request) -> Result<Answer, Error> {
        match self {
            Self::Calls(client) => client.fetch(request).await,
            Self::Streams { client, streams } => {
                let slot = usize::try_from(slot).unwrap_or(0);
                let stream = {
                    let mut stream = streams[slot % streams.len()]
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner);
                    if stream.is_broken() {
                        *stream = client.stream();
                    }
                    stream.clone()
                };
                stream.send(request).await
            }
        }
    }
}
