//! The client: calls over the pool, bounded in flight, with a deadline and retries. What an answer must look like is
//! checked in `items` and `vectors`, not here.

use crate::builder::Builder;
use crate::error::Error;
use crate::items::{Blocks, Items};
use crate::pool::Pool;
use crate::request::{Answer, Asked, ByteRange, ObjectPart, Request};
use crate::retry::{Retries, RetryPolicy};
use crate::stream::FetchStream;
use crate::vectors::Vectors;
use futures_util::stream::{self, Stream, TryStreamExt as _};
use ringfetch_proto::v1 as wire;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::Status;
use tonic::transport::Channel;
use wire::dataset_service_client::DatasetServiceClient;
use wire::fetch_service_client::FetchServiceClient;
use wire::fetch_stream_request::Request as WireRequest;
use wire::fetch_stream_response::Response as WireAnswer;

/// What all clones of a client share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) pool: Pool,
    pub(crate) permits: Semaphore,
    pub(crate) max_in_flight: usize,
    pub(crate) retry: RetryPolicy,
    pub(crate) max_answer_bytes: usize,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct CallOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) fail_fast: bool,
}

/// A pooled client of one server. Clones share its connections and are cheap.
#[derive(Debug, Clone)]
pub struct Client {
    core: Arc<Core>,
    options: CallOptions,
}

impl Client {
    /// A client of the server at `http://HOST:PORT`.
    pub fn builder(url: impl Into<String>) -> Builder {
        Builder::new(url)
    }

    pub(crate) fn from_parts(core: Arc<Core>, options: CallOptions) -> Self {
        Self { core, options }
    }

    /// The same client, whose calls may take this long in all (`None`: for ever).
    #[must_use]
    pub fn with_timeout(&self, timeout: impl Into<Option<Duration>>) -> Self {
        let options = CallOptions {
            timeout: timeout.into(),
            ..self.options
        };
        Self {
            core: Arc::clone(&self.core),
            options,
        }
    }

    /// The same client; with `true` the first item error fails its whole call.
    #[must_use]
    pub fn with_fail_fast(&self, fail_fast: bool) -> Self {
        Self {
            core: Arc::clone(&self.core),
            options: CallOptions {
                fail_fast,
                ..self.options
            },
        }
    }

    /// Fetches whole blocks by index.
    ///
    /// # Errors
    /// Whatever fails the call as a whole; a bad index alone is told by its item.
    ///
    /// # Cancel safety
    /// Dropping the future gives the call up; reads that are in flight at the server finish there and are dropped.
    pub async fn fetch_blocks(&self, dataset: &str, indices: &[u64]) -> Result<Blocks, Error> {
        let request = Request::Blocks {
            dataset: dataset.to_owned(),
            indices: indices.to_vec(),
        };
        self.fetch(request).await?.into_blocks()
    }

    /// Fetches vectors by id: elements only, without record headers.
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn fetch_vectors(&self, dataset: &str, ids: &[u64]) -> Result<Vectors, Error> {
        let request = Request::Vectors {
            dataset: dataset.to_owned(),
            ids: ids.to_vec(),
        };
        self.fetch(request).await?.into_vectors()
    }

    /// Fetches byte ranges of a dataset of kind blocks or vectors (there: of the files as they are).
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn fetch_ranges(&self, dataset: &str, ranges: &[ByteRange]) -> Result<Items, Error> {
        let request = Request::Ranges {
            dataset: dataset.to_owned(),
            ranges: ranges.to_vec(),
        };
        self.fetch(request).await?.into_items()
    }

    /// Fetches objects, whole or in part.
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`]; `Invalid` for a part of length 0.
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn fetch_objects(&self, dataset: &str, parts: &[ObjectPart]) -> Result<Items, Error> {
        let request = Request::Objects {
            dataset: dataset.to_owned(),
            parts: parts.to_vec(),
        };
        self.fetch(request).await?.into_items()
    }

    /// Fetches what a [`Request`] says: the four methods above in one.
    ///
    /// # Errors
    /// As [`Self::fetch_blocks`] and [`Self::fetch_objects`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn fetch(&self, request: Request) -> Result<Answer, Error> {
        let (request, expected) = request.into_wire(self.options.fail_fast)?;
        let asked = Asked::of(&request);
        let limit = self.core.max_answer_bytes;
        let service = move |channel| FetchServiceClient::new(channel).max_decoding_message_size(limit);
        let answer = match request {
            WireRequest::Blocks(request) => self
                .call(request, |channel, request| async move {
                    service(channel).fetch_blocks(request).await
                })
                .await
                .map(WireAnswer::Blocks),
            WireRequest::Vectors(request) => self
                .call(request, |channel, request| async move {
                    service(channel).fetch_vectors(request).await
                })
                .await
                .map(WireAnswer::Vectors),
            WireRequest::Ranges(request) => self
                .call(request, |channel, request| async move {
                    service(channel).fetch_ranges(request).await
                })
                .await
                .map(WireAnswer::Ranges),
            WireRequest::Objects(request) => self
                .call(request, |channel, request| async move {
                    service(channel).fetch_objects(request).await
                })
                .await
                .map(WireAnswer::Objects),
            WireRequest::Cancel(_) => Err(Error::invalid("request", "a cancel belongs on a stream")),
        }?;
        Answer::from_wire(&expected, asked, answer)
    }

    /// Opens a stream that pipelines requests; see [`FetchStream`]. Must be called inside a Tokio runtime. Returns
    /// at once: a server that cannot be reached is told to the requests.
    pub fn stream(&self) -> FetchStream {
        FetchStream::open(&self.core, self.options)
    }

    /// What the server has, by name.
    ///
    /// # Errors
    /// Whatever fails the call.
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn list_datasets(&self) -> Result<Vec<wire::Dataset>, Error> {
        let (mut datasets, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = wire::ListDatasetsRequest {
                page_size: 0,
                page_token,
            };
            let page = self
                .call(request, |channel, request| async move {
                    DatasetServiceClient::new(channel).list_datasets(request).await
                })
                .await?;
            let more = !page.datasets.is_empty();
            datasets.extend(page.datasets);
            page_token = page.next_page_token;
            if page_token.is_empty() || !more {
                return Ok(datasets);
            }
        }
    }

    /// One dataset: kind, lengths, shape, how it is read.
    ///
    /// # Errors
    /// NOT_FOUND for a name that the server does not have.
    ///
    /// # Cancel safety
    /// As [`Self::fetch_blocks`].
    pub async fn get_dataset(&self, name: &str) -> Result<wire::Dataset, Error> {
        let answer = self
            .call(wire::GetDatasetRequest { name: name.to_owned() }, |channel, request| async move {
                DatasetServiceClient::new(channel).get_dataset(request).await
            })
            .await?;
        answer
            .dataset
            .ok_or_else(|| Error::protocol("no dataset in the answer to GetDataset"))
    }

    /// The objects of a dataset of kind objects, in byte order of their names, fetched a page at a time as the
    /// stream is read. It ends after its first error.
    pub fn list_objects(
        &self,
        dataset: &str,
    ) -> impl Stream<Item = Result<wire::ObjectInfo, Error>> + Send + use<> {
        let (client, dataset) = (self.clone(), dataset.to_owned());
        let pages = stream::try_unfold(Some(String::new()), move |token| {
            let (client, dataset) = (client.clone(), dataset.clone());
            async move {
                let Some(page_token) = token else { return Ok(None) };
                let request = wire::ListObjectsRequest {
                    dataset,
                    page_size: 0,
                    page_token: page_token.clone(),
                };
                let page = client
                    .call(request, |channel, request| async move {
                        DatasetServiceClient::new(channel).list_objects(request).await
                    })
                    .await?;
                if page.next_page_token == page_token && !page_token.is_empty() {
                    return Err(Error::protocol(
                        "a page of ListObjects names itself as the next one",
                    ));
                }
                let next = Some(page.next_page_token).filter(|token| !token.is_empty());
                Ok(Some((stream::iter(page.objects.into_iter().map(Ok)), next)))
            }
        });
        pages.try_flatten()
    }

    /// Makes one call: waits for its turn, sends it on the least busy connection, retries what may be retried.
    pub(crate) async fn call<Req, Resp, F, Fut>(&self, request: Req, send: F) -> Result<Resp, Error>
    where
        Req: Clone,
        F: Fn(Channel, tonic::Request<Req>) -> Fut,
        Fut: Future<Output = Result<tonic::Response<Resp>, Status>>,
    {
        let deadline = self
            .options
            .timeout
            .and_then(|timeout| Instant::now().checked_add(timeout));
        let mut retries = Retries::new(self.core.retry, deadline);
        loop {
            let attempt = async {
                // Never closed, so that an error cannot be.
                let _permit = self.core.permits.acquire().await;
                let lease = self.core.pool.lease();
                let mut request = tonic::Request::new(request.clone());
                if let Some(deadline) = deadline {
                    request.set_timeout(deadline.saturating_duration_since(Instant::now()));
                }
                send(lease.channel(), request).await.map_err(Error::from_status)
            };
            let answer = match deadline {
                Some(deadline) => tokio::time::timeout_at(deadline, attempt)
                    .await
                    .unwrap_or(Err(Error::DeadlineExceeded)),
                None => attempt.await,
            };
            match answer {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(error) => retries.after(error).await?,
            }
        }
    }
}
