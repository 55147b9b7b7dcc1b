//! One version of some bytes: a dataset's address space or one object. What is read of it is of that version or is not
//! read: an ETag never stands over another version's bytes. An object's file is held open, so that one that is replaced or
//! removed is read to its end, and one that is written to is found out.

use super::handle::{DatasetHandle, RequiredKind, check_version};
use super::request::{FetchError, Items, RequestContext};
use super::{Fetcher, timeout_at};
use bytes::Bytes;
use ringfetch_engine::dataset::OpenFile;
use ringfetch_engine::error::ReadError;
use ringfetch_engine::share::Charge;
use std::sync::Arc;

/// Bytes in one version.
#[derive(Debug)]
pub struct Snapshot {
    dataset: DatasetHandle,
    /// None: the dataset's address space.
    object: Option<PinnedObject>,
    length_bytes: u64,
    etag: String,
}

/// An object that was looked up, and is read as it was then.
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

/// Why bytes of a version are not there.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// They could not be read.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// It was written to since it was looked up.
    #[error("the source was changed while it was read")]
    Changed,
}

/// Where a part stands in its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadPhase {
    /// The head is not sent: the part may be refused.
    BeforeHead,
    /// The head is sent: the answer is in flight, also while the daemon drains.
    AfterHead,
}

impl Snapshot {
    /// The dataset's name.
    pub fn dataset(&self) -> &str {
        self.dataset.name()
    }

    /// How many bytes there are.
    pub fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    /// The strong entity tag, unquoted.
    pub fn etag(&self) -> &str {
        &self.etag
    }

    /// Whether this is the version asked for; empty: any is.
    ///
    /// # Errors
    /// `VersionMismatch`.
    pub fn check(&self, if_match: &str) -> Result<(), FetchError> {
        check_version(&self.etag, if_match).map_err(FetchError::Read)
    }
}

impl Fetcher {
    /// The version that a dataset's address space has now. Touches no file.
    ///
    /// # Errors
    /// `DatasetNotFound`, `WrongKind`.
    pub fn space(&self, dataset: &str) -> Result<Snapshot, FetchError> {
        let dataset = self.open(dataset, RequiredKind::Space)?;
        Ok(Snapshot {
            length_bytes: dataset.0.length_bytes(),
            etag: dataset.etag().to_owned(),
            dataset,
            object: None,
        })
    }

    /// The version that an object has now. Looks it up, which may open a file, so it is admitted as a read is.
    ///
    /// # Errors
    /// Whatever refuses a request, and what looking the object up meets.
    ///
    /// # Cancel safety
    /// Dropping the future gives the look-up up.
    pub async fn object(
        &self,
        dataset: &str,
        name: &str,
        context: &RequestContext,
    ) -> Result<Snapshot, FetchError> {
        let looked_up = async {
            let dataset = self.find(dataset, RequiredKind::Objects)?;
            let (_in_flight, deadline) = self.admit(&self.limits(), context)?;
            let held = self.charge_objects(context, 1)?;
            let file = timeout_at(deadline, Box::pin(dataset.0.object(name)))
                .await
                .ok_or(ReadError::DeadlineExceeded)??;
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
        self.count_rejection(looked_up.await)
    }

    /// Reads extents of a version, back to back.
    ///
    /// # Errors
    /// `Changed`, or whatever reading meets.
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
    ) -> Result<Bytes, SnapshotError> {
        let dataset = &version.dataset;
        let Some(object) = &version.object else {
            let items = Items::Ranges { offsets, lengths };
            return Ok(self.read_part(dataset, &items, context, phase).await?);
        };
        let items = Items::Pinned {
            object,
            offsets,
            lengths,
        };
        let result = self.read_part(dataset, &items, context, phase).await;
        // Looked at after the read, and before its result is: a file that was cut short fails the read.
        if object.file.is_unchanged() {
            return Ok(result?);
        }
        dataset.0.forget_object(&object.name);
        Err(SnapshotError::Changed)
    }

    async fn read_part(
        &self,
        dataset: &DatasetHandle,
        items: &Items<'_>,
        context: &RequestContext,
        phase: ReadPhase,
    ) -> Result<Bytes, FetchError> {
        let answered = match phase {
            ReadPhase::BeforeHead => self.fetch_of(dataset, items, context).await?,
            ReadPhase::AfterHead => self.fetch_further(dataset, items, context).await?,
        };
        Ok(answered.fetched.data)
    }
}
