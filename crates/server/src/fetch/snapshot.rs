//! One version of a dataset's address space or of an object. A read returns bytes of that version or fails,
//! so an ETag never labels bytes of another version. An object's file is held open: reads continue after it
//! is replaced or removed, and detect when it is written to.

use super::handle::{DatasetHandle, RequiredKind, require_version};
use super::request::{FetchError, Items, RequestContext};
use super::{Fetcher, Rejection, timeout_at, within};
use crate::caller::Connection;
use crate::record;
use bytes::Bytes;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::dataset::OpenFile;
use ringfetch_engine::engine::SubmitOptions;
use ringfetch_engine::error::ReadError;
use ringfetch_engine::share::Charge;
use std::sync::Arc;
use std::time::Instant;

/// One version of some bytes.
#[derive(Debug)]
pub struct Snapshot {
    dataset: DatasetHandle,
    /// None: the dataset's address space.
    object: Option<PinnedObject>,
    length_bytes: u64,
    etag: String,
}

/// An object as it was when it was looked up.
#[derive(Debug)]
pub struct PinnedObject {
    name: String,
    file: Arc<OpenFile>,
    _held: Charge,
}

impl PinnedObject {
    pub(super) fn file(&self) -> &Arc<OpenFile> {
        &self.file
    }
}

/// Whether the response has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadPhase {
    /// The head is not sent: the request may be refused.
    BeforeHead,
    /// The head is sent: the response is completed even while the daemon drains.
    AfterHead,
}

/// What an object is looked up for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Its bytes: one that cannot be opened is a failed read.
    Read,
    /// Its version and length: nothing is read.
    Describe,
}

impl Snapshot {
    /// The dataset's name.
    pub fn dataset(&self) -> &str {
        self.dataset.name()
    }

    /// Its length.
    pub fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    /// The strong entity tag, unquoted.
    pub fn etag(&self) -> &str {
        &self.etag
    }

    /// Checks that this is the requested version; empty: any.
    ///
    /// # Errors
    /// `VersionMismatch`; `Malformed` for a tag in quotes.
    pub fn check(&self, if_match: &str) -> Result<(), FetchError> {
        require_version(&self.etag, if_match)
    }
}

impl Fetcher {
    /// The current version of a dataset's address space. Accesses no file.
    ///
    /// # Errors
    /// `Forbidden`, `DatasetNotFound`, `WrongKind`.
    pub fn space(&self, dataset: &str, reader: Option<&Arc<Connection>>) -> Result<Snapshot, FetchError> {
        let dataset = self.open(dataset, RequiredKind::Space, reader)?;
        Ok(Snapshot {
            length_bytes: dataset.0.length_bytes(),
            etag: dataset.etag().to_owned(),
            dataset,
            object: None,
        })
    }

    /// The current version of an object. May open a file, so it is admitted like a read.
    ///
    /// # Errors
    /// Whatever refuses a request, and errors of the look-up.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the look-up.
    pub async fn object(
        &self,
        dataset: &str,
        name: &str,
        purpose: Purpose,
        context: &RequestContext,
    ) -> Result<Snapshot, FetchError> {
        let looked_up = async {
            let dataset = self.find(dataset, RequiredKind::Objects, context.connection.as_ref())?;
            let (_in_flight, deadline) = self.admit(&self.limits(), context)?;
            let held = self.charge_objects(context, 1)?;
            let opened = timeout_at(deadline, Box::pin(dataset.0.object(name)))
                .await
                .ok_or(ReadError::DeadlineExceeded)?;
            let file = match opened {
                Ok(file) => file,
                Err(error) if purpose == Purpose::Read => {
                    return Err(self.failed_item(&dataset, error).await);
                }
                Err(error) => return Err(error.into()),
            };
            Ok(Snapshot {
                length_bytes: file.length_bytes(),
                etag: file.etag().to_owned(),
                dataset,
                object: Some(PinnedObject {
                    name: name.to_owned(),
                    file,
                    _held: held,
                }),
            })
        };
        let result = looked_up.await;
        self.count_rejection(result, context.connection.as_ref())
    }

    /// The error of a read that failed before anything was read. Counts it as an item of a batch.
    ///
    /// # Cancel safety
    /// Dropping the future counts the item as abandoned.
    pub async fn failed_read(&self, version: &Snapshot, error: ReadError) -> FetchError {
        self.failed_item(&version.dataset, error).await
    }

    async fn failed_item(&self, DatasetHandle(dataset): &DatasetHandle, error: ReadError) -> FetchError {
        // A refusal is counted as such.
        let error = FetchError::Read(error);
        if let (None, FetchError::Read(error)) = (Rejection::of(&error), &error) {
            record::note(|facts| {
                facts.add_items(1);
                facts.add_failed(1);
            });
            let mut batch = Batch::new(Arc::clone(dataset), 1);
            batch.push_failed(error.clone());
            // A batch without reads only passes a shard, which counts it. If the engine refuses it, it is not counted.
            if let Ok(ticket) = self.inner.engine.submit(batch, SubmitOptions::default()) {
                // A shard that hangs does not count it in time.
                let deadline = within(&self.limits(), Instant::now(), None);
                let _counted = timeout_at(deadline, Box::pin(ticket)).await;
            }
        }
        error
    }

    /// Reads extents of a snapshot, back to back.
    ///
    /// # Errors
    /// `Changed`, or errors of the read.
    ///
    /// # Cancel safety
    /// As [`Fetcher::fetch`].
    pub async fn read_snapshot(
        &self,
        version: &Snapshot,
        offsets: &[u64],
        lengths: &[u64],
        context: &RequestContext,
        phase: ReadPhase,
    ) -> Result<Bytes, FetchError> {
        let dataset = &version.dataset;
        let Some(object) = &version.object else {
            let items = Items::Ranges { offsets, lengths };
            return self.read_part(dataset, &items, context, phase).await;
        };
        let items = Items::Pinned {
            object,
            offsets,
            lengths,
        };
        let result = self.read_part(dataset, &items, context, phase).await;
        // Checked before the result of the read, which fails if the file was truncated.
        let is_lost = matches!(&result, Err(FetchError::Read(error)) if error.is_of_lost_file());
        if object.file.is_unchanged() && !is_lost {
            return result;
        }
        dataset.0.forget_object(&object.name);
        Err(FetchError::Changed)
    }

    async fn read_part(
        &self,
        dataset: &DatasetHandle,
        items: &Items<'_>,
        context: &RequestContext,
        phase: ReadPhase,
    ) -> Result<Bytes, FetchError> {
        let answered = match phase {
            ReadPhase::BeforeHead => self.fetch_of(dataset, items, context).await,
            ReadPhase::AfterHead => self.fetch_further(dataset, items, context).await,
        };
        match answered {
            Ok(answered) => Ok(answered.fetched.data),
            // Its items are parts of a window, of which the client does not know.
            Err(FetchError::Item { error, .. }) => Err(FetchError::Read(*error)),
            Err(error) => Err(error),
        }
    }
}
