//! ReadObject: an object of any length as a stream of its bytes. A call that breaks is continued by another one, from the first
//! byte that is missing. Invariants: what a caller gets is of one version, in order and without a gap; besides what HTTP/2 has
//! received, at most one message waits for the caller; every further call has brought at least one byte, so that their number
//! is bounded.

use crate::call::{CallOptions, accept, end, release};
use crate::code::Code;
use crate::connection::{Endpoint, Method};
use crate::core::Core;
use crate::error::Error;
use crate::message::{Data, Incoming, frame};
use crate::pool::{Avoid, HeldLease};
use crate::request::ObjectPart;
use crate::retry::{Retries, by, deadline_in};
use bytes::Bytes;
use futures_util::stream::{self, Stream};
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use ringfetch_proto::v1 as wire;
use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::time::Instant;

static READ_OBJECT: Method = Method::new("/ringfetch.v1.FetchService/ReadObject");

/// An object's bytes, in order, as they arrive: a stream of chunks of at most 256 KiB, none of them empty. See
/// [`crate::Client::read_object`].
///
/// It ends after its first error; without one, all bytes have been received. Dropping it cancels the call.
pub struct ObjectStream {
    etag: String,
    object_length_bytes: u64,
    length_bytes: u64,
    chunks: Pin<Box<dyn Stream<Item = Result<Bytes, Error>> + Send>>,
}

impl fmt::Debug for ObjectStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStream")
            .field("etag", &self.etag)
            .field("object_length_bytes", &self.object_length_bytes)
            .field("length_bytes", &self.length_bytes)
            .finish_non_exhaustive()
    }
}

impl ObjectStream {
    pub(crate) async fn open(
        core: &Arc<Core>,
        options: &CallOptions,
        dataset: &str,
        part: &ObjectPart,
    ) -> Result<Self, Error> {
        let request = wire::ReadObjectRequest {
            dataset: dataset.to_owned(),
            name: part.name.clone(),
            offset: part.offset,
            length: part.length_on_wire()?,
            if_match: part.if_match.clone(),
        };
        let mut reading = Reading {
            core: Arc::clone(core),
            options: options.clone(),
            request,
            end: part.offset,
            call: None,
            ready: VecDeque::new(),
        };
        let begun = reading.call(deadline_in(options.timeout()), None).await?;
        let object_length_bytes = begun.head.object_length_bytes;
        reading.end = match part.length {
            None => object_length_bytes,
            Some(length) => part.offset.saturating_add(length),
        };
        if part.offset > reading.end || reading.end > object_length_bytes {
            let problem = format!("a part that ends past the object's end, at {object_length_bytes}");
            return Err(Error::protocol(problem));
        }
        begun.head.etag.clone_into(&mut reading.request.if_match);
        reading.take_up(begun)?;
        Ok(Self {
            etag: reading.request.if_match.clone(),
            object_length_bytes,
            length_bytes: reading.end - part.offset,
            chunks: Box::pin(stream::try_unfold(reading, |mut reading| async move {
                let chunk = reading.next().await?;
                Ok(chunk.map(|chunk| (chunk, reading)))
            })),
        })
    }

    /// The object's version, of which all bytes are.
    pub fn etag(&self) -> &str {
        &self.etag
    }

    /// Length of the whole object.
    pub fn object_length_bytes(&self) -> u64 {
        self.object_length_bytes
    }

    /// How many bytes the stream has in all: less than the object if a part was requested.
    pub fn length_bytes(&self) -> u64 {
        self.length_bytes
    }
}

impl Stream for ObjectStream {
    type Item = Result<Bytes, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.chunks.as_mut().poll_next(cx)
    }
}

/// What is left of a read.
struct Reading {
    core: Arc<Core>,
    options: CallOptions,
    /// For what has not been received. Of any version only until the first call has begun.
    request: wire::ReadObjectRequest,
    /// Where the read ends in the object, once that is known.
    end: u64,
    /// `None`: there is nothing to come.
    call: Option<OpenCall>,
    /// Received, and not yet given to the caller.
    ready: VecDeque<Bytes>,
}

/// A call that sends the bytes from `Reading::request` on.
struct OpenCall {
    /// Of its connection.
    lease: HeldLease,
    messages: Messages,
}

/// A call whose first bytes have arrived.
struct Begun {
    call: OpenCall,
    head: wire::ReadObjectResponse,
    /// `None`: there are none.
    first: Option<Message>,
}

impl Reading {
    /// The next chunk; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        let deadline = deadline_in(self.options.timeout());
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Ok(Some(chunk));
            }
            let Some(call) = &mut self.call else {
                return Ok(None);
            };
            let outcome = by(deadline, call.messages.next()).await.unwrap_or_else(|| {
                call.lease.slot.late();
                Err(Error::DeadlineExceeded)
            });
            match outcome {
                Ok(Some(message)) => self.receive(message)?,
                Ok(None) => self.end()?,
                Err(error @ Error::Status(_)) if !error.is_retryable() => return Err(self.if_lost(error)),
                // All bytes are here: how the connection ended does not matter.
                Err(_) if self.request.offset == self.end => self.call = None,
                Err(error) => self.resume(error, deadline).await?,
            }
        }
    }

    /// Goes on with another call, if there may be one after this error.
    async fn resume(&mut self, error: Error, deadline: Option<Instant>) -> Result<(), Error> {
        let Some(OpenCall { lease, .. }) = self.call.take() else {
            return Err(error);
        };
        if error.is_retryable() {
            lease.slot.refused(error.retry_after());
        }
        // Not 0, which would be to the object's end: something is missing.
        self.request.length = self.end - self.request.offset;
        let begun = self.call(deadline, Some((lease, error))).await;
        let begun = begun.map_err(|error| self.if_lost(error))?;
        self.take_up(begun)
    }

    /// Makes calls until one has brought its first bytes. To continue one that broke, its own server is asked first, and others
    /// only if that fails: elsewhere, copies of the same files are other versions.
    async fn call(
        &self,
        deadline: Option<Instant>,
        broken: Option<(HeldLease, Error)>,
    ) -> Result<Begun, Error> {
        let pool = &self.core.pool;
        let (mut retries, mut avoid) = (Retries::until(&self.core.retries, deadline), Avoid::default());
        let (home, error) = broken.unzip();
        if let (Some(home), Some(error)) = (&home, &error) {
            avoid.add(&home.slot, error.retry_after());
            avoid.begin_with(&home.slot);
        }
        let (mut outcome, mut refused_elsewhere) = (error.map(Err), None);
        loop {
            if let Some(outcome) = outcome {
                match retries.settle(outcome, pool.hint(&avoid)).await {
                    Ok(Some(begun)) => return Ok(begun),
                    Ok(None) => {}
                    Err(error) if error.is_retryable() => return Err(refused_elsewhere.unwrap_or(error)),
                    Err(error) => return Err(error),
                }
            }
            let message = frame(&self.request)?;
            let head = |endpoint: &Endpoint| self.options.stream(endpoint.uri(&READ_OBJECT));
            let begin = |response, body| begin(response, body, message, self.core.max_answer_bytes);
            let attempt = self.core.attempt(retries.turn(), &mut avoid, head, begin).await;
            outcome = Some(match attempt {
                Ok((lease, Ok((messages, head, first)))) => self.check(&head).map(|()| {
                    let lease = lease.hold();
                    let call = OpenCall { lease, messages };
                    Begun { call, head, first }
                }),
                Ok((lease, Err(error)))
                    if is_lost(&error)
                        && home.as_ref().is_some_and(|home| !home.slot.is_beside(lease.slot)) =>
                {
                    avoid.add(lease.slot, None);
                    refused_elsewhere = Some(error);
                    // Was sent: it takes of the budget, or this server would be asked at every attempt for nothing.
                    Err(Error::Transport {
                        message: "the server that was read from is gone".to_owned(),
                        sent: true,
                        refused: false,
                    })
                }
                Ok((_, Err(error))) | Err(error) => Err(error),
            });
        }
    }

    /// Checks the first message against the request.
    fn check(&self, head: &wire::ReadObjectResponse) -> Result<(), Error> {
        let wire::ReadObjectRequest { offset, if_match, .. } = &self.request;
        let is_other_version = !if_match.is_empty() && head.etag != *if_match;
        // Without a version, the read could not be continued.
        if head.etag.is_empty() || is_other_version || head.offset != *offset {
            let problem = format!(
                "bytes from {} of version {:?}, not from {offset} of {if_match:?}",
                head.offset, head.etag
            );
            return Err(Error::protocol(problem));
        }
        Ok(())
    }

    fn take_up(&mut self, begun: Begun) -> Result<(), Error> {
        self.call = Some(begun.call);
        match begun.first {
            Some(first) => self.receive(first),
            None => self.end(),
        }
    }

    fn receive(&mut self, (message, data): Message) -> Result<(), Error> {
        let offset = self.request.offset;
        let (length, left) = (u64::try_from(data.len()).unwrap_or(u64::MAX), self.end - offset);
        if message.offset != offset || !(1..=left).contains(&length) {
            let problem = format!(
                "{length} bytes from {}, where {left} from {offset} are missing",
                message.offset
            );
            return Err(Error::protocol(problem));
        }
        self.request.offset += length;
        self.ready.extend(data.pieces().cloned());
        Ok(())
    }

    /// The call has ended, and succeeded.
    fn end(&mut self) -> Result<(), Error> {
        self.call = None;
        let missing = self.end - self.request.offset;
        match missing {
            0 => Ok(()),
            _ => Err(Error::protocol(format!("it ends {missing} bytes too early"))),
        }
    }

    /// The error of a read that has begun.
    fn if_lost(&self, error: Error) -> Error {
        if !is_lost(&error) {
            return error;
        }
        let (offset, cause) = (self.request.offset, Arc::new(error));
        Error::VersionLost { offset, cause }
    }
}

/// Whether a server that refuses the rest of a read so does not have its version: the object is being written to, was replaced,
/// or is gone, or its dataset.
fn is_lost(error: &Error) -> bool {
    matches!(
        error.code(),
        Some(Code::Aborted | Code::FailedPrecondition | Code::NotFound)
    )
}

type Message = (wire::ReadObjectResponse, Data);

/// Sends the request and waits for the first bytes, or for the end.
async fn begin(
    response: ResponseFuture,
    mut body: SendStream<Bytes>,
    message: Bytes,
    message_bytes_max: usize,
) -> Result<(Messages, wire::ReadObjectResponse, Option<Message>), Error> {
    // If the server does not take the message, its answer says why.
    let _ = body.send_data(message, true);
    drop(body);
    let mut messages = Messages {
        body: accept(response.await?)?,
        incoming: Incoming::new(message_bytes_max),
    };
    let head = messages.next().await?;
    let (head, _) = head.ok_or_else(|| Error::protocol("the answer has no first message"))?;
    let first = messages.next().await?;
    Ok((messages, head, first))
}

/// The messages of an answer.
struct Messages {
    body: RecvStream,
    incoming: Incoming,
}

impl Messages {
    /// The next message; `None` after the last one of an answer that succeeded, and not to be asked again then.
    async fn next(&mut self) -> Result<Option<Message>, Error> {
        loop {
            if let Some(encoded) = self.incoming.next()? {
                return encoded.decode().map(Some);
            }
            if let Some(chunk) = self.body.data().await {
                let chunk = release(&mut self.body, chunk?)?;
                self.incoming.push(chunk);
                continue;
            }
            return match end(&mut self.body).await? {
                Some(error) => Err(error),
                None if self.incoming.is_empty() => Ok(None),
                None => Err(Error::protocol("the answer is cut off")),
            };
        }
    }
}
