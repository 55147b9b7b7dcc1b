//! One version of a dataset's address space or of an object. A read returns bytes of that version or fails,
//! so an ETag never labels bytes of another version. An object's file is held open: reads continue after it
//! is replaced or removed, and detect when it is written to.

use super::handle::{DatasetHandle, RequiredKind, require_version};
use super::request::{FetchError, Items, RequestContext};
use super::{Fetcher, Rejection, timeout_at, within};
use crate::caller::Connection;
use crate::record::{self, Facts};
use bytes::Bytes;
use ringfetch_engine::batch::Batch;
use ringfetch_engine::dataset::OpenFile;
use ringfetch_engine::engine::SubmitOptions;
use ringfetch_engine::error::{ItemError, ReadError};
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
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn file(&self) -> &Arc<OpenFile> {
        &self.file
    }

    /// Whether what was just read of it, with these errors, may not be of the version that was looked up.
    pub(super) fn has_changed(&self, errors: &[ItemError]) -> bool {
        // A read of a truncated file fails.
        errors.iter().any(|failed| failed.error.is_of_lost_file()) || !self.file.is_unchanged()
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

/// Most look-ups per request: an object that changes between look-up and read this often is being written all the
/// time.
pub(crate) const LOOK_UPS_MAX: usize = 3;

/// What an object is looked up for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Its bytes: one that cannot be opened is a failed read.
    Read,
    /// Its bytes once more, for the same request, since it changed before they were read. The request is charged
    /// already.
    ReadAgain,
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
    /// As [`Self::open`].
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
            let reader = context.connection.as_ref();
            let dataset = if purpose == Purpose::ReadAgain {
                record::note(Facts::begin_again);
                self.look_up(dataset, RequiredKind::Objects, reader)?
            } else {
                self.find(dataset, RequiredKind::Objects, reader)?
            };
            let (_in_flight, deadline) = self.admit(&self.limits(), context)?;
            let held = self.charge_objects(context, 1)?;
            let opened = timeout_at(deadline, Box::pin(dataset.0.object(name)))
                .await
                .ok_or(ReadError::DeadlineExceeded)?;
            let file = match opened {
                Ok(file) => file,
                Err(error) if purpose == Purpose::Describe => return Err(error.into()),
                Err(error) => return Err(self.failed_item(&dataset, error).await),
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
        let items = match &version.object {
            None => Items::Ranges { offsets, lengths },
            Some(object) => Items::Pinned {
                object,
                offsets,
                lengths,
            },
        };
        let answered = match phase {
            ReadPhase::BeforeHead => self.fetch_of(dataset, &items, context).await,
            ReadPhase::AfterHead => self.fetch_further(dataset, &items, context).await,
        };
        match answered {
            Ok(answered) => Ok(answered.fetched.data),
            // Its items are parts of a window, of which the client does not know.
            Err(FetchError::Item { error, .. }) => Err(FetchError::Read(*error)),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::tests::User;
    use crate::access::{Grant, Principal, PrincipalLimits};
    use crate::config::Limits;
    use crate::fetch::tests::{objects_of, serving};
    use std::time::Duration;

    #[tokio::test]
    async fn an_object_that_changes_before_it_is_read_is_charged_once() {
        // Scenario: a principal with one request and one byte a second looks up an object of 4 KiB, which is rewritten
        // with 100 bytes before it is read; it is looked up again, and those are read. Expectation: one request is charged,
        // and 100 bytes.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        std::fs::write(&path, [1; 4096]).unwrap();
        let fetcher = serving(vec![objects_of(directory.path())], Limits::default());
        let principal = Principal::new("a");
        principal.set_limits(PrincipalLimits {
            requests_per_s: 1,
            bytes_per_s: 1,
            ..PrincipalLimits::NONE
        });
        let connection = fetcher.callers().connect("192.0.2.1".parse().unwrap(), u64::MAX);
        let grant = Grant::for_tests(&principal, 1);
        let context = RequestContext {
            connection: connection.granted(&grant, &Arc::new(User::default())),
            fail_fast: true,
            ..RequestContext::default()
        };
        let read = async |purpose, rewritten: Option<[u8; 100]>| {
            let version = fetcher.object("objects", "a", purpose, &context).await.unwrap();
            let length = version.length_bytes();
            if let Some(bytes) = rewritten {
                std::fs::write(&path, bytes).unwrap();
            }
            let phase = ReadPhase::BeforeHead;
            fetcher
                .read_snapshot(&version, &[0], &[length], &context, phase)
                .await
        };
        let lost = read(Purpose::Read, Some([2; 100])).await;
        assert_eq!(lost, Err(FetchError::Changed));
        assert_eq!(read(Purpose::ReadAgain, None).await.unwrap()[..], [2; 100]);
        assert_eq!(principal.bytes(), 100);
        let owed = principal.take_bytes(0).unwrap_err().retry_after;
        assert!(owed <= Duration::from_secs(100), "{owed:?}");
    }
}
