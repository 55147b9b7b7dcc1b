//! One version of some bytes: a dataset's address space or one object. What is read of it is of that version or is not
//! read: an ETag never stands over another version's bytes.

use super::opened::{Opened, Wanted};
use super::request::{CallContext, FetchError, Items};
use super::{Fetcher, until, within};
use bytes::Bytes;
use ringfetch_engine::error::ReadError;
use std::time::Instant;

/// Bytes in one version.
#[derive(Debug)]
pub struct Version {
    dataset: Opened,
    /// None: the dataset's address space.
    object: Option<String>,
    length_bytes: u64,
    etag: String,
}

/// Why bytes of a version are not there.
#[derive(Debug, thiserror::Error)]
pub enum VersionError {
    /// They could not be read.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// What is there now is another version than the one asked about.
    #[error("the source was replaced while it was read")]
    Changed,
}

/// Where a part stands in its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The head is not sent: the part may be refused.
    First,
    /// The head is sent: the answer is in flight, also while the daemon drains.
    Further,
}

impl Version {
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
}

impl Fetcher {
    /// The version that a dataset's address space has now. Touches no file.
    ///
    /// # Errors
    /// `DatasetNotFound`, `WrongKind`.
    pub fn space(&self, dataset: &str) -> Result<Version, FetchError> {
        let dataset = self.open(dataset, Wanted::Space)?;
        Ok(Version {
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
        context: &CallContext,
    ) -> Result<Version, FetchError> {
        let looked_up = async {
            let dataset = self.find(dataset, Wanted::Objects)?;
            let (_in_flight, deadline) = self.admit(&self.limits(), context)?;
            let file = until(deadline, dataset.0.object(name))
                .await
                .ok_or(ReadError::DeadlineExceeded)??;
            Ok(Version {
                length_bytes: file.length_bytes(),
                etag: file.etag().to_owned(),
                dataset,
                object: Some(name.to_owned()),
            })
        };
        self.counted(looked_up.await)
    }

    /// Reads extents of a version, back to back.
    ///
    /// # Errors
    /// `Changed`, or whatever reading meets.
    ///
    /// # Cancel safety
    /// As [`Fetcher::fetch`].
    pub async fn read_version(
        &self,
        version: &Version,
        offsets: &[u64],
        lengths: &[u64],
        context: CallContext,
        part: Part,
    ) -> Result<Bytes, VersionError> {
        let dataset = &version.dataset;
        let Some(name) = &version.object else {
            let items = Items::Ranges { offsets, lengths };
            return Ok(self.read_part(dataset, items, context, part).await?);
        };
        let names = vec![name.clone(); offsets.len()];
        let items = Items::Objects {
            names: &names,
            offsets,
            lengths,
        };
        let arrived = context.arrived.unwrap_or_else(Instant::now);
        let deadline = within(&self.limits(), arrived, context.deadline);
        let result = self.read_part(dataset, items, context, part).await;
        // Looked at after the read: versions only go forward, so if this is still the one asked about, the read was of it
        // too. Before the result is: a shorter successor shows as a range past the end.
        let now = until(deadline, dataset.0.object(name)).await;
        let now = now
            .unwrap_or(Err(ReadError::DeadlineExceeded))
            .map_err(FetchError::Read)?;
        if now.etag() == version.etag {
            Ok(result?)
        } else {
            Err(VersionError::Changed)
        }
    }

    async fn read_part(
        &self,
        dataset: &Opened,
        items: Items<'_>,
        context: CallContext,
        part: Part,
    ) -> Result<Bytes, FetchError> {
        let fetched = match part {
            Part::First => self.fetch_of(dataset, items, context).await?,
            Part::Further => self.fetch_further(dataset, items, context).await?,
        };
        Ok(fetched.data)
    }
}
