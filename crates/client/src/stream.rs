//! Requests pipelined on one FetchStream call. Invariant: every request that was sent is in `pending` until it is
//! answered or the stream ends, and then every one of them is told; its permit lives as long, also when its sender
//! has given up, so that what the server has in hand stays bounded.

use crate::client::{CallOptions, Core};
use crate::error::Error;
use crate::items::{Blocks, Items};
use crate::pool::Lease;
use crate::request::{Answer, Asked, ByteRange, ObjectPart, Request};
use crate::retry::{Retries, RetryPolicy};
use crate::vectors::Vectors;
use ringfetch_proto::v1 as wire;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;
use wire::fetch_service_client::FetchServiceClient;
use wire::fetch_stream_request::Request as WireRequest;
use wire::fetch_stream_response::Response as WireAnswer;

/// One gRPC stream with many requests in flight; clones send on the same one. Answers come in any order, each to its
/// own request. At most the builder's `max_in_flight` requests are in flight, further ones wait. When the last clone
/// is dropped the stream ends, after what is in flight has been answered.
///
/// Requests are retried as calls are. A stream that broke stays broken: every request that was in flight and every
/// later one gets [`Error::StreamBroken`]; open another with [`crate::Client::stream`].
#[derive(Debug, Clone)]
pub struct FetchStream {
    // Unbounded, but never longer than there are permits.
    outgoing: mpsc::UnboundedSender<wire::FetchStreamRequest>,
    shared: Arc<Shared>,
    permits: Arc<Semaphore>,
    retry: RetryPolicy,
    options: CallOptions,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    pending: HashMap<u64, Pending>,
    /// Why the stream ended, once it has.
    broken: Option<Arc<Error>>,
}

#[derive(Debug)]
struct Pending {
    answer: oneshot::Sender<Result<WireAnswer, Error>>,
    /// Held for its drop.
    _permit: OwnedSemaphorePermit,
}

impl FetchStream {
    pub(crate) fn open(core: &Arc<Core>, options: CallOptions) -> Self {
        let (outgoing, requests) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            state: Mutex::default(),
        });
        let reader = read(
            core.pool.lease(),
            core.max_answer_bytes,
            requests,
            Arc::clone(&shared),
        );
        tokio::spawn(reader);
        let permits = Arc::new(Semaphore::new(core.max_in_flight));
        Self {
            outgoing,
            shared,
            permits,
            retry: core.retry,
            options,
        }
    }

    /// Sends a request and returns its answer.
    ///
    /// # Errors
    /// As [`crate::Client::fetch`]; [`Error::StreamBroken`] if the stream ended before the answer.
    ///
    /// # Cancel safety
    /// Nothing is sent before the first poll. Dropped later, the answer is thrown away when it comes, and until then
    /// the request counts as in flight.
    pub async fn send(&self, request: Request) -> Result<Answer, Error> {
        let (request, expected) = request.into_wire(self.options.fail_fast)?;
        let asked = Asked::of(&request);
        let deadline = self
            .options
            .timeout
            .and_then(|timeout| Instant::now().checked_add(timeout));
        let mut retries = Retries::new(self.retry, deadline);
        loop {
            let attempt = self.attempt(request.clone(), deadline);
            let answer = match deadline {
                Some(deadline) => tokio::time::timeout_at(deadline, attempt)
                    .await
                    .unwrap_or(Err(Error::DeadlineExceeded)),
                None => attempt.await,
            };
            match answer.and_then(|answer| Answer::from_wire(&expected, asked, answer)) {
                Ok(answer) => return Ok(answer),
                Err(error) => retries.after(error).await?,
            }
        }
    }

    /// As [`crate::Client::fetch_blocks`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn fetch_blocks(&self, dataset: &str, indices: &[u64]) -> Result<Blocks, Error> {
        let request = Request::Blocks {
            dataset: dataset.to_owned(),
            indices: indices.to_vec(),
        };
        self.send(request).await?.into_blocks()
    }

    /// As [`crate::Client::fetch_vectors`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn fetch_vectors(&self, dataset: &str, ids: &[u64]) -> Result<Vectors, Error> {
        let request = Request::Vectors {
            dataset: dataset.to_owned(),
            ids: ids.to_vec(),
        };
        self.send(request).await?.into_vectors()
    }

    /// As [`crate::Client::fetch_ranges`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn fetch_ranges(&self, dataset: &str, ranges: &[ByteRange]) -> Result<Items, Error> {
        let request = Request::Ranges {
            dataset: dataset.to_owned(),
            ranges: ranges.to_vec(),
        };
        self.send(request).await?.into_items()
    }

    /// As [`crate::Client::fetch_objects`], on this stream.
    ///
    /// # Errors
    /// As [`Self::send`].
    ///
    /// # Cancel safety
    /// As [`Self::send`].
    pub async fn fetch_objects(&self, dataset: &str, parts: &[ObjectPart]) -> Result<Items, Error> {
        let request = Request::Objects {
            dataset: dataset.to_owned(),
            parts: parts.to_vec(),
        };
        self.send(request).await?.into_items()
    }

    /// Whether the stream has ended, so that only a new one is of use.
    pub fn is_broken(&self) -> bool {
        self.shared.lock().broken.is_some()
    }

    async fn attempt(&self, request: WireRequest, deadline: Option<Instant>) -> Result<WireAnswer, Error> {
        let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else {
            // Never closed, so that this cannot be.
            return Err(Error::protocol("the stream's permits are gone"));
        };
        let (answer, answered) = oneshot::channel();
        // From here to the send there is no await: an id is either pending and sent, or neither.
        let id = self.shared.insert(Pending {
            answer,
            _permit: permit,
        })?;
        let deadline_ms = deadline.map_or(0, |deadline| {
            millis(deadline.saturating_duration_since(Instant::now()))
        });
        if self
            .outgoing
            .send(wire::FetchStreamRequest {
                id,
                request: Some(request),
                deadline_ms,
            })
            .is_err()
        {
            self.shared
                .fail(Error::protocol("the server stopped taking requests"));
        }
        // A sender is only ever dropped unanswered when the runtime that read the stream is gone.
        answered
            .await
            .unwrap_or_else(|_| Err(Error::protocol("the task that reads the stream is gone")))
    }
}

/// Whole milliseconds, at least 1, since 0 means that there is no deadline.
fn millis(left: Duration) -> u32 {
    u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, pending: Pending) -> Result<u64, Error> {
        let mut state = self.lock();
        if let Some(cause) = &state.broken {
            return Err(Error::StreamBroken {
                cause: Arc::clone(cause),
            });
        }
        let id = state.next_id;
        state.next_id += 1;
        state.pending.insert(id, pending);
        Ok(id)
    }

    /// Hands an answer to its request.
    fn answer(&self, message: wire::FetchStreamResponse) -> Result<(), Error> {
        let id = message.id;
        // Before the request is taken off the list, so that it is told when the stream fails for this.
        let answer = message
            .response
            .ok_or_else(|| Error::protocol("an answer without content"))?;
        let Some(pending) = self.lock().pending.remove(&id) else {
            return Err(Error::protocol(format!(
                "an answer to request {id}, which is not in flight"
            )));
        };
        // The receiver is gone if the caller gave up.
        let _ = pending.answer.send(Ok(answer));
        Ok(())
    }

    /// Ends the stream: everything in flight and everything later gets the cause. The first cause stays.
    fn fail(&self, cause: Error) {
        let mut state = self.lock();
        let cause = Arc::clone(state.broken.get_or_insert_with(|| Arc::new(cause)));
        let pending = std::mem::take(&mut state.pending);
        drop(state);
        for (_, pending) in pending {
            let _ = pending.answer.send(Err(Error::StreamBroken {
                cause: Arc::clone(&cause),
            }));
        }
    }
}

/// Fails the stream however its reader ends, so that nobody waits for ever.
struct FailOnDrop(Arc<Shared>);

impl Drop for FailOnDrop {
    fn drop(&mut self) {
        self.0.fail(Error::protocol("the stream's reader was stopped"));
    }
}

/// Opens the call and reads answers until it ends.
async fn read(
    lease: Lease,
    max_answer_bytes: usize,
    requests: mpsc::UnboundedReceiver<wire::FetchStreamRequest>,
    shared: Arc<Shared>,
) {
    let shared = FailOnDrop(shared);
    let mut service = FetchServiceClient::new(lease.channel()).max_decoding_message_size(max_answer_bytes);
    let mut answers = match service.fetch_stream(UnboundedReceiverStream::new(requests)).await {
        Ok(response) => response.into_inner(),
        Err(status) => return shared.0.fail(Error::from_status(status)),
    };
    loop {
        let failure = match answers.message().await {
            Ok(Some(message)) => match shared.0.answer(message) {
                Ok(()) => continue,
                Err(error) => error,
            },
            Ok(None) => Error::Transport {
                message: "the server ended the stream".to_owned(),
            },
            Err(status) => Error::from_status(status),
        };
        return shared.0.fail(failure);
    }
}
