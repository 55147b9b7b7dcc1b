//! gRPC's FetchStream straight on h2: one stream a connection, its requests pipelined, its answers paired by id.
//! Invariant: a request is in `waiting` from before it is sent until it is answered or the stream ends, and then every
//! one of them is told. A stream that ended is opened anew by the next request.

use super::answer::{Answer, Refused};
use super::calls::{Origin, broken, ended};
use super::message::{Streamed, encode_for_stream};
use crate::load::workload::Part;
use bytes::{Buf as _, Bytes};
use h2::{RecvStream, SendStream};
use http::Uri;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// One thread's streams.
#[derive(Debug)]
pub(in crate::load) struct Streams {
    origin: Origin,
    method: Uri,
    streams: Vec<tokio::sync::Mutex<Option<Stream>>>,
}

/// An open stream.
#[derive(Debug, Clone)]
struct Stream {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    send: SendStream<Bytes>,
    next_id: u64,
    waiting: HashMap<u64, oneshot::Sender<Streamed>>,
    /// Why it ended, once it has.
    over: Option<Refused>,
}

impl Streams {
    pub(super) async fn connect(origin: Origin, connections: usize) -> Result<Self, Refused> {
        let mut streams = Self {
            method: origin.method("FetchStream")?,
            origin,
            streams: Vec::new(),
        };
        for _ in 0..connections {
            let opened = tokio::time::timeout(streams.origin.timeout, streams.open())
                .await
                .unwrap_or(Err(Refused::timeout()))?;
            streams.streams.push(tokio::sync::Mutex::new(Some(opened)));
        }
        Ok(streams)
    }

    async fn open(&self) -> Result<Stream, Refused> {
        let mut sender = self.origin.open().await?.ready().await.map_err(broken)?;
        // Without a deadline: it lives as long as the run.
        let request = self.origin.request(&self.method, false);
        let (response, send) = sender.send_request(request, false).map_err(broken)?;
        let state = Arc::new(Mutex::new(State {
            send,
            next_id: 0,
            waiting: HashMap::new(),
            over: None,
        }));
        let reader = Arc::clone(&state);
        tokio::spawn(async move {
            // Kept, since a connection ends with its last sender.
            let _sender = sender;
            let why = match response.await {
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    match ended(&head.headers) {
                        Ok(()) => read(body, &reader).await,
                        Err(refused) => refused,
                    }
                }
                Err(error) => broken(error),
            };
            let mut state = lock(&reader);
            state.over = Some(why);
            // Their receivers find them gone and look why.
            state.waiting.clear();
        });
        Ok(Stream { state })
    }

    pub(super) async fn fetch(&self, slot: usize, part: &Part, items: &[u64]) -> Result<Answer, Refused> {
        let exchange = async {
            let stream = {
                let mut held = self.streams[slot % self.streams.len()].lock().await;
                match &*held {
                    Some(stream) if lock(&stream.state).over.is_none() => stream.clone(),
                    _ => held.insert(self.open().await?).clone(),
                }
            };
            let (tell, told) = oneshot::channel();
            stream.send(tell, part, items, self.origin.timeout_ms())?;
            match told.await {
                Ok(streamed) => streamed.decode(part, items),
                Err(_) => Err(stream.why()),
            }
        };
        tokio::time::timeout(self.origin.timeout, exchange)
            .await
            .unwrap_or(Err(Refused::timeout()))
    }
}

impl Stream {
    fn send(
        &self,
        tell: oneshot::Sender<Streamed>,
        part: &Part,
        items: &[u64],
        deadline_ms: u32,
    ) -> Result<(), Refused> {
        let mut state = lock(&self.state);
        if let Some(why) = &state.over {
            return Err(why.clone());
        }
        let id = state.next_id;
        state.next_id += 1;
        state.waiting.insert(id, tell);
        // Held back by h2 while the server's window is full; never more than there are slots.
        state
            .send
            .send_data(encode_for_stream(id, deadline_ms, part, items), false)
            .map_err(broken)
    }

    fn why(&self) -> Refused {
        lock(&self.state)
            .over
            .clone()
            .unwrap_or_else(|| Refused::transport("the stream ended"))
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands answers out until the stream ends, and says why it did.
async fn read(mut body: RecvStream, state: &Mutex<State>) -> Refused {
    let mut chunks: Vec<Bytes> = Vec::new();
    while let Some(chunk) = body.data().await {
        let chunk = match chunk {
            Ok(chunk) => chunk,
            Err(error) => return broken(error),
        };
        if let Err(error) = body.flow_control().release_capacity(chunk.len()) {
            return broken(error);
        }
        chunks.push(chunk);
        loop {
            match Streamed::next(&chunks) {
                Ok(Some((streamed, length))) => {
                    advance(&mut chunks, length);
                    let Some(tell) = lock(state).waiting.remove(&streamed.id) else {
                        return Refused::protocol(format!(
                            "an answer to request {}, which is none",
                            streamed.id
                        ));
                    };
                    // Nobody listens if the caller gave up.
                    let _ = tell.send(streamed);
                }
                Ok(None) => break,
                Err(refused) => return refused,
            }
        }
    }
    match body.trailers().await {
        Ok(trailers) => match ended(&trailers.unwrap_or_default()) {
            Ok(()) => Refused::transport("the server ended the stream"),
            Err(refused) => refused,
        },
        Err(error) => broken(error),
    }
}

/// Drops so many bytes from the front.
fn advance(chunks: &mut Vec<Bytes>, mut length: usize) {
    let mut spent = 0;
    for chunk in chunks.iter_mut() {
        let step = chunk.len().min(length);
        chunk.advance(step);
        length -= step;
        if !chunk.is_empty() {
            break;
        }
        spent += 1;
    }
    chunks.drain(..spent);
}
