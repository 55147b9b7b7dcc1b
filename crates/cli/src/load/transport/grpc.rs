//! gRPC through the client crate, as its users call it: as calls, or pipelined on one stream per connection.
//! A broken stream is replaced by the first request that fails on it.

use super::response::{FailedItem, RequestError, Response};
use super::{Body, Endpoints};
use crate::args::Token;
use crate::load::args::ScoreAt;
use crate::load::workload::{Part, Target, name};
use futures_util::future::join_all;
use ringfetch_client::{
    Answer, ByteRange, Client, Error, FetchStream, ItemError, ObjectPart, Request, RetryPolicy, Scores,
};
use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

/// Connects all connections of a thread.
pub(super) async fn connect(
    endpoints: &Endpoints,
    connections: u32,
    slots: u32,
) -> Result<Client, RequestError> {
    let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
    let mut client = Client::builder(&endpoints.grpc)
        .connections(count(connections))
        .max_in_flight(count(slots))
        .timeout(endpoints.timeout)
        .connect_timeout(endpoints.timeout)
        .retry(RetryPolicy::none());
    if let Some(tls) = &endpoints.credentials.tls {
        client = client.tls(tls.clone());
    }
    if let Some(Token(token)) = &endpoints.credentials.token {
        client = client.token(token);
    }
    Ok(client.connect().await?)
}

/// One thread's streams.
#[derive(Debug)]
pub(in crate::load) struct Streams {
    client: Client,
    streams: Vec<Mutex<FetchStream>>,
}

impl Streams {
    pub(super) fn open(client: Client, connections: u32) -> Self {
        Self {
            streams: (0..connections).map(|_| Mutex::new(client.stream())).collect(),
            client,
        }
    }

    pub(super) async fn fetch(
        &self,
        slot: usize,
        part: &Part,
        items: &[u64],
    ) -> Result<Response, RequestError> {
        let held = &self.streams[slot % self.streams.len()];
        let stream = held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let answer = match part.scored_at(ScoreAt::Daemon) {
            Some(scoring) => stream
                .score_vectors(scoring.request(part.dataset(), items))
                .await
                .map(|scores| scored(scores, items)),
            None => stream
                .send(request(part, items))
                .await
                .map(|answer| check(answer, part)),
        };
        if let Err(Error::StreamBroken { .. }) = answer {
            let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
            if held.is_broken() {
                *held = self.client.stream();
            }
        }
        answer?
    }

    /// Ends them, so that the daemon does not take them for cancelled.
    pub(super) async fn end(self) {
        let streams = self.streams.into_iter().map(|held| held.into_inner());
        let ends = streams.map(|stream| stream.unwrap_or_else(PoisonError::into_inner).finish());
        join_all(ends).await;
    }
}

pub(super) async fn fetch(client: &Client, part: &Part, items: &[u64]) -> Result<Response, RequestError> {
    let Some(scoring) = part.scored_at(ScoreAt::Daemon) else {
        return check(client.fetch(request(part, items)).await?, part);
    };
    let request = scoring.request(part.dataset(), items);
    scored(client.score_vectors(request).await?, items)
}

fn scored(scores: Scores, items: &[u64]) -> Result<Response, RequestError> {
    let ranking = scores.results.into_iter().next();
    let ranking = ranking.ok_or_else(|| RequestError::protocol("a response without a result"))?;
    let failed = ranking.errors.iter().map(failed).collect();
    Ok(Response::ranked(items.len(), ranking.best, failed))
}

fn failed(error: &ItemError) -> FailedItem {
    FailedItem {
        label: Cow::Borrowed(error.label()),
        message: format!("item {}: {}", error.item, error.message),
    }
}

fn request(part: &Part, items: &[u64]) -> Request {
    let dataset = part.dataset();
    match part.target() {
        Target::Blocks { .. } => Request::blocks(dataset, items),
        Target::Vectors { .. } => Request::vectors(dataset, items),
        Target::Ranges { .. } | Target::Extents(_) => {
            let extents = items.iter().filter_map(|&item| part.target().extent(item));
            let ranges: Vec<_> = extents
                .map(|(offset, length)| ByteRange::new(offset, length))
                .collect();
            Request::ranges(dataset, ranges)
        }
        Target::Objects { names } => {
            let parts: Vec<_> = items
                .iter()
                .map(|&item| ObjectPart::whole(name(names, item)))
                .collect();
            Request::objects(dataset, parts)
        }
    }
}

/// The client checks a response against its request; this checks that the dataset is unchanged.
fn check(answer: Answer, part: &Part) -> Result<Response, RequestError> {
    let changed = match (&answer, part.target()) {
        (Answer::Blocks(blocks), Target::Blocks { block_bytes }) => blocks.block_bytes() != *block_bytes,
        (Answer::Vectors(vectors), Target::Vectors { dtype, dim }) => {
            (vectors.dtype(), vectors.dim()) != (*dtype, *dim)
        }
        _ => false,
    };
    if changed {
        return Err(RequestError::protocol(
            "the dataset has another shape than when the run began",
        ));
    }
    let items = answer.items();
    Ok(Response {
        items: items.len(),
        bytes: u64::try_from(items.data_bytes()).unwrap_or(u64::MAX),
        failed: items.errors().iter().map(failed).collect(),
        body: if part.keeps_bytes() {
            Body::Items(items.clone())
        } else {
            Body::None
        },
    })
}
