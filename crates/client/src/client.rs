//! The client: calls over the pool, with a limit in flight, a deadline and retries. `items` and `vectors`
//! check the answers.

use crate::call::{self, CallOptions, exchange};
use crate::connection::{Endpoint, Method};
use crate::core::Core;
use crate::dataset::{Dataset, ObjectInfo};
use crate::error::Error;
use crate::items::{Blocks, Items};
use crate::message::{Data, Encoded, frame};
use crate::object::ObjectStream;
use crate::pool::Avoid;
use crate::request::{Answer, ByteRange, ObjectPart, Request};
use crate::retry::{Retries, Turn, by, deadline_in};
use crate::scores::{ScoreRequest, Scores};
use crate::stream::FetchStream;
use crate::vectors::Vectors;
use bytes::Bytes;
use futures_util::stream::{self, Stream, TryStreamExt as _};
use http::header::AUTHORIZATION;
use prost::Message;
use ringfetch_proto::v1 as wire;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;
use wire::fetch_stream_request::Request as WireRequest;
use wire::fetch_stream_response::Response as WireAnswer;

static FETCH_BLOCKS: Method = Method::new("/ringfetch.v1.FetchService/FetchBlocks");
static FETCH_VECTORS: Method = Method::new("/ringfetch.v1.FetchService/FetchVectors");
static FETCH_RANGES: Method = Method::new("/ringfetch.v1.FetchService/FetchRanges");
static FETCH_OBJECTS: Method = Method::new("/ringfetch.v1.FetchService/FetchObjects");

/// A pooled client of one server, or of several with the same data. Clones share its connections and are cheap.
#[derive(Debug, Clone)]
pub struct Client {
    core: Arc<Core>,
    options: CallOptions,
}

impl Client {
    pub(crate) fn from_parts(core: Arc<Core>, options: CallOptions) -> Self {
        Self { core, options }
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// The same client with another time limit for whole calls (`None`: no limit).
    #[must_use]
    pub fn with_timeout(&self, timeout: impl Into<Option<Duration>>) -> Self {
        let mut client = self.clone();
        client.options.set_timeout(timeout.into());
        client
    }

    /// The same client; with `true` the first item error fails its whole call.
    #[must_use]
    pub fn with_fail_fast(&self, fail_fast: bool) -> Self {
        let mut client = self.clone();
        client.options.fail_fast = fail_fast;
        client
    }

    /// The same client, on the same connections, with one more header for its calls and later streams. A second
    /// `authorization` replaces the first: `with_metadata("authorization", "Bearer NEW")` changes the token.
    ///
    /// # Errors
    /// `Invalid` for an impossible name or value, a name of gRPC's or HTTP/2's own, one that ends in `-bin`, or `authorization` that
    /// would be sent in plaintext to another host: see [`Builder::token`](crate::Builder::token).
    pub fn with_metadata(&self, name: &str, value: &str) -> Result<Self, Error> {
        let header = call::metadata(name, value)?;
        if header.0 == AUTHORIZATION {
            self.core().pool.check_private()?;
        }
        let mut client = self.clone();
        client.options.add_metadata(&[header]);
        Ok(client)
    }

    /// Fetches whole blocks by index.
    ///
    /// # Errors
    /// Whatever fails the call as a whole; a bad index alone is an error of its item.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the call; reads in flight at the server finish there and are dropped.
    pub async fn fetch_blocks(&self, dataset: &str, indices: &[u64]) -> Result<Blocks, Error> {
        self.fetch(Request::blocks(dataset, indices)).await?.into_blocks()
    }

    /// Fetches vectors by id: elements only, without record headers.
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn fetch_vectors(&self, dataset: &str, ids: &[u64]) -> Result<Vectors, Error> {
        self.fetch(Request::vectors(dataset, ids)).await?.into_vectors()
    }

    /// Fetches byte ranges of a dataset of kind blocks or vectors (for vectors: of the files as they are).
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn fetch_ranges(&self, dataset: &str, ranges: &[ByteRange]) -> Result<Items, Error> {
        self.fetch(Request::ranges(dataset, ranges)).await?.into_items()
    }

    /// Fetches objects, whole or in part.
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`]; `Invalid` for a part of length 0.
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn fetch_objects(&self, dataset: &str, parts: &[ObjectPart]) -> Result<Items, Error> {
        self.fetch(Request::objects(dataset, parts)).await?.into_items()
    }

    /// Reads an object of any length, or a part of it, as a stream of chunks. Returns once the first one is here; then the
    /// object's length and version are known, too.
    ///
    /// ```no_run
    /// # use ringfetch_client::{Client, Error, ObjectPart};
    /// use futures_util::TryStreamExt as _;
    /// use tokio::io::{AsyncWrite, AsyncWriteExt as _};
    ///
    /// async fn copy(client: &Client, mut to: impl AsyncWrite + Unpin) -> Result<(), Box<dyn std::error::Error>> {
    ///     let mut object = client.read_object("objects", &ObjectPart::whole("shard-00/a")).await?;
    ///     println!("{} bytes of version {}", object.length_bytes(), object.etag());
    ///     while let Some(chunk) = object.try_next().await? {
    ///         to.write_all(&chunk).await?; // while this waits, at most a few MiB arrive
    ///     }
    ///     Ok(to.flush().await?)
    /// }
    /// ```
    ///
    /// All bytes are of one version. If the connection breaks or the server fails, the stream goes on where it ended, by the
    /// rules for retries: with the same version, from the same server or, if that fails, from another one of the client that
    /// has these files (not copies). Otherwise it ends with an error, [`Error::VersionLost`] if the version is gone.
    ///
    /// The client's timeout is for each wait: until this returns, and for each chunk, with what it takes to go on after a
    /// failure. It does not count the time between, nor limit the whole: drop the stream for that, which cancels the read at
    /// the server. A read does not count towards [`Builder::max_in_flight`](crate::Builder::max_in_flight).
    ///
    /// # Errors
    /// As [`Self::fetch_objects`], but an error of the object is that of the call: NOT_FOUND, OUT_OF_RANGE, ...;
    /// FAILED_PRECONDITION if it is of another version than [`ObjectPart::if_match`].
    ///
    /// # Cancel safety
    /// Dropping the future cancels the read.
    pub async fn read_object(&self, dataset: &str, part: &ObjectPart) -> Result<ObjectStream, Error> {
        ObjectStream::open(&self.core, &self.options, dataset, part).await
    }

    /// Fetches what a [`Request`] describes: the four methods above `read_object` in one.
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`] and [`Self::fetch_objects`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn fetch(&self, request: Request) -> Result<Answer, Error> {
        let (request, wanted) = request.into_wire(self.options.fail_fast)?;
        type Decode = fn(Encoded) -> Result<(WireAnswer, Data), Error>;
        let (method, message, decode): (_, _, Decode) = match &request {
            WireRequest::Blocks(request) => (&FETCH_BLOCKS, frame(request)?, |answer| {
                decoded(answer, WireAnswer::Blocks)
            }),
            WireRequest::Vectors(request) => (&FETCH_VECTORS, frame(request)?, |answer| {
                decoded(answer, WireAnswer::Vectors)
            }),
            WireRequest::Ranges(request) => (&FETCH_RANGES, frame(request)?, |answer| {
                decoded(answer, WireAnswer::Ranges)
            }),
            WireRequest::Objects(request) => (&FETCH_OBJECTS, frame(request)?, |answer| {
                decoded(answer, WireAnswer::Objects)
            }),
            WireRequest::Scores(_) => {
                return Err(Error::invalid("request", "scores have a method of their own"));
            }
            WireRequest::Cancel(_) => return Err(Error::invalid("request", "a cancel belongs on a stream")),
        };
        // Freed now, while it is in the CPU's cache, rather than when the answer arrives.
        drop(request);
        let (answer, data) = decode(self.send(method, message).await?)?;
        Answer::from_wire(&wanted, answer, data)
    }

    /// Ranks vectors by their nearness to queries, on the server: the answer has ids and scores, but no
    /// vectors.
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn score_vectors(&self, request: ScoreRequest) -> Result<Scores, Error> {
        let (request, wanted) = request.into_wire(self.options.fail_fast);
        let answer = self
            .unary("/ringfetch.v1.FetchService/ScoreVectors", &request)
            .await?;
        Scores::check(&wanted, answer)
    }

    /// Opens a stream that pipelines requests; see [`FetchStream`]. Must be called inside a Tokio runtime.
    /// Returns at once: if the server is unreachable, the requests fail.
    pub fn stream(&self) -> FetchStream {
        FetchStream::open(&self.core, &self.options)
    }

    /// The server's datasets, by name. The timeout is for all pages together.
    ///
    /// # Errors
    /// Whatever fails the call.
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn list_datasets(&self) -> Result<Vec<Dataset>, Error> {
        let method = Method::new("/ringfetch.v1.DatasetService/ListDatasets");
        let deadline = deadline_in(self.options.timeout());
        let (mut datasets, mut listing) = (Vec::new(), Listing::default());
        loop {
            let request = wire::ListDatasetsRequest {
                page_size: 0,
                page_token: listing.page_token.clone(),
            };
            let retries = Retries::until(&self.core.retries, deadline);
            let answer = self.send_with(retries, &method, frame(&request)?).await?;
            let (page, _) = answer.decode::<wire::ListDatasetsResponse>()?;
            let names = page.datasets.iter().map(|dataset| &*dataset.name);
            let next = listing.next("ListDatasets", names, page.next_page_token)?;
            datasets.extend(page.datasets.into_iter().map(Dataset::from));
            match next {
                None => return Ok(datasets),
                Some(next) => listing = next,
            }
        }
    }

    /// One dataset: kind, lengths, shape.
    ///
    /// # Errors
    /// NOT_FOUND for a name that the server does not have.
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn get_dataset(&self, name: &str) -> Result<Dataset, Error> {
        let request = wire::GetDatasetRequest {
            name: name.to_owned(),
        };
        let answer: wire::GetDatasetResponse = self
            .unary("/ringfetch.v1.DatasetService/GetDataset", &request)
            .await?;
        answer
            .dataset
            .map(Dataset::from)
            .ok_or_else(|| Error::protocol("no dataset in the answer to GetDataset"))
    }

    /// The objects of a dataset of kind objects, in byte order of their names, fetched page by page as the
    /// stream is read. It ends after its first error.
    pub fn list_objects(
        &self,
        dataset: &str,
    ) -> impl Stream<Item = Result<ObjectInfo, Error>> + Send + use<> {
        let (client, dataset) = (self.clone(), dataset.to_owned());
        let pages = stream::try_unfold(Some(Listing::default()), move |listing| {
            let (client, dataset) = (client.clone(), dataset.clone());
            async move {
                let Some(listing) = listing else {
                    return Ok::<_, Error>(None);
                };
                let request = wire::ListObjectsRequest {
                    dataset,
                    page_size: 0,
                    page_token: listing.page_token.clone(),
                };
                let page: wire::ListObjectsResponse = client
                    .unary("/ringfetch.v1.DatasetService/ListObjects", &request)
                    .await?;
                let names = page.objects.iter().map(|object| &*object.name);
                let next = listing.next("ListObjects", names, page.next_page_token)?;
                let object = |object: wire::ObjectInfo| Ok(ObjectInfo::new(object.name, object.length_bytes));
                Ok(Some((stream::iter(page.objects.into_iter().map(object)), next)))
            }
        });
        pages.try_flatten()
    }

    pub(crate) async fn unary<M: Message + Default>(
        &self,
        path: &'static str,
        request: &impl Message,
    ) -> Result<M, Error> {
        let answer = self.send(&Method::new(path), frame(request)?).await?;
        answer.decode().map(|(message, _)| message)
    }

    /// A call whose answer says what it changed. It is made once, since the answer to a second one would say
    /// that nothing has changed.
    pub(crate) async fn change<M: Message + Default>(
        &self,
        path: &'static str,
        request: &impl Message,
    ) -> Result<M, Error> {
        let (method, message) = (Method::new(path), frame(request)?);
        let mut retries = Retries::new(&self.core.retries, self.options.timeout());
        retries.attempts_max = 1;
        let answer = self.send_with(retries, &method, message).await?;
        answer.decode().map(|(message, _)| message)
    }

    async fn send(&self, method: &Method, message: Bytes) -> Result<Encoded, Error> {
        let retries = Retries::new(&self.core.retries, self.options.timeout());
        self.send_with(retries, method, message).await
    }

    /// Makes one call: waits for its turn, sends it on the least busy connection, and retries if that is
    /// allowed.
    async fn send_with(
        &self,
        mut retries: Retries<'_>,
        method: &Method,
        mut message: Bytes,
    ) -> Result<Encoded, Error> {
        let mut avoid = Avoid::default();
        loop {
            let sent = retries.keep(&mut message);
            let outcome = self.attempt(method, sent, retries.turn(), &mut avoid).await;
            if let Some(answer) = retries.settle(outcome, self.core.pool.hint(&avoid)).await? {
                return Ok(answer);
            }
        }
    }

    async fn attempt(
        &self,
        method: &Method,
        message: Bytes,
        turn: Turn,
        avoid: &mut Avoid,
    ) -> Result<Encoded, Error> {
        match self.core.permits.try_acquire() {
            Ok(_permit) => self.attempt_now(method, message, turn, avoid).await,
            // Boxed, so that the future of a call is not enlarged by waiting.
            Err(_) => Box::pin(self.attempt_in_turn(method, message, turn, avoid)).await,
        }
    }

    /// As [`Self::attempt_now`], once fewer calls are in flight. In a task, which ends with this future: the semaphore hands over
    /// to who has waited longest, and a caller may not poll (TRAPS 37).
    async fn attempt_in_turn(
        &self,
        method: &Method,
        message: Bytes,
        mut turn: Turn,
        avoid: &mut Avoid,
    ) -> Result<Encoded, Error> {
        let (client, method, mut tried) = (self.clone(), method.clone(), std::mem::take(avoid));
        let mut task = JoinSet::new();
        task.spawn(async move {
            turn.late = turn.deadline;
            // Never closed, so acquiring cannot fail.
            let outcome = match by(turn.deadline, client.core.permits.acquire()).await {
                Some(_permit) => client.attempt_now(&method, message, turn, &mut tried).await,
                None => Err(turn.unsent(Error::DeadlineExceeded)),
            };
            (outcome, tried)
        });
        let Some(Ok((outcome, tried))) = task.join_next().await else {
            return Err(Error::protocol("the task that makes the call is gone"));
        };
        *avoid = tried;
        outcome
    }

    async fn attempt_now(
        &self,
        method: &Method,
        message: Bytes,
        turn: Turn,
        avoid: &mut Avoid,
    ) -> Result<Encoded, Error> {
        let late = turn.late;
        let head = |endpoint: &Endpoint| {
            let left = late.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            self.options.call(endpoint.uri(method), left)
        };
        let bytes_max = self.core.max_answer_bytes;
        let exchange = |response, body| exchange(response, body, message, bytes_max);
        let (_lease, outcome) = self.core.attempt(turn, avoid, head, exchange).await?;
        outcome
    }
}

/// A place in a list. Names ascend, as the contract says: pages that come again would make it endless.
#[derive(Default)]
struct Listing {
    /// Of the page that is due.
    page_token: String,
    /// Empty before the first name.
    last_name: String,
}

impl Listing {
    /// After the page that was due; `None`: that was the last.
    fn next<'a>(
        mut self,
        method: &str,
        names: impl Iterator<Item = &'a str>,
        page_token: String,
    ) -> Result<Option<Self>, Error> {
        for name in names {
            if name <= &*self.last_name {
                let problem = format!("{method} lists {name:?} after {:?}", self.last_name);
                return Err(Error::protocol(problem));
            }
            name.clone_into(&mut self.last_name);
        }
        if page_token == self.page_token && !page_token.is_empty() {
            let problem = format!("a page of {method} names itself as the next one");
            return Err(Error::protocol(problem));
        }
        self.page_token = page_token;
        Ok(Some(self).filter(|next| !next.page_token.is_empty()))
    }
}

/// Decodes an answer of this kind.
fn decoded<M: Message + Default>(
    answer: Encoded,
    kind: fn(M) -> WireAnswer,
) -> Result<(WireAnswer, Data), Error> {
    answer.decode().map(|(answer, data)| (kind(answer), data))
}
