//! Lists datasets and objects, a page at a time, for every transport.
//!
//! Listing objects walks the directory on the blocking pool. Only a few walks run at a time, so that listings
//! do not occupy the threads that open objects. A page is limited by its number of names and by their bytes.

use super::handle::{DatasetHandle, RequiredKind};
use super::{DatasetInfo, FetchError, Fetcher, RequestContext, may_read, timeout_at};
use crate::caller::Connection;
use ringfetch_engine::dataset::ObjectEntry;
use ringfetch_engine::error::ReadError;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Most names of a page, and the default.
pub const PAGE_NAMES_MAX: usize = 1000;
/// Bytes of names on one page: clients refuse messages of more than 4 MiB by default, and a name can take 4
/// KiB.
pub(super) const PAGE_BYTES_MAX: usize = 1 << 20;
/// Concurrent directory walks in the daemon.
pub(super) const WALKS_MAX: usize = 4;

/// A page to list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageRequest {
    /// At most this many names; 0, or more than the maximum: the maximum.
    pub size: u32,
    /// The token from the previous page; empty for the first.
    pub token: String,
}

impl PageRequest {
    fn names(&self) -> usize {
        match usize::try_from(self.size) {
            Ok(size @ 1..PAGE_NAMES_MAX) => size,
            Ok(_) | Err(_) => PAGE_NAMES_MAX,
        }
    }
}

/// A page of objects.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ObjectPage {
    /// (name, bytes), in byte order of the names.
    pub objects: Vec<(String, u64)>,
    /// The token of the next page: the name after which it begins. None on the last page.
    pub next_page_token: Option<String>,
}

impl Fetcher {
    /// A permit for a directory walk; `None` if as many as allowed are running.
    pub fn try_walk(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.inner.walks).try_acquire_owned().ok()
    }

    /// A page of the datasets that requests on this connection may read, by name, and the token of the next page.
    ///
    /// # Errors
    /// `OverRate`.
    pub fn list_datasets(
        &self,
        page: &PageRequest,
        reader: Option<&Arc<Connection>>,
    ) -> Result<(Vec<DatasetInfo>, Option<String>), FetchError> {
        self.count_rejection(Self::charge_request(reader), reader)?;
        let (size, mut datasets) = (page.names(), self.datasets());
        datasets.retain(|dataset| page.token.is_empty() || dataset.name() > page.token.as_str());
        datasets.retain(|dataset| may_read(reader, dataset.name()));
        let more = datasets.len() > size;
        datasets.truncate(size);
        let last = datasets.last().filter(|_| more);
        let next = last.map(|dataset| dataset.name().to_owned());
        let datasets = datasets.iter().map(|dataset| DatasetInfo::new(dataset));
        Ok((datasets.collect(), next))
    }

    /// Lists a page of a dataset's objects.
    ///
    /// # Errors
    /// Whatever refuses a request, `ListingsBusy`, or `ListingFailed`.
    ///
    /// # Cancel safety
    /// Dropping the future abandons the page; the walk continues to its end.
    pub async fn list_objects(
        &self,
        dataset: &str,
        page: PageRequest,
        context: RequestContext,
    ) -> Result<ObjectPage, FetchError> {
        let (names, after) = (page.names(), page.token);
        let listed = async {
            let DatasetHandle(dataset) =
                self.find(dataset, RequiredKind::Objects, context.connection.as_ref())?;
            let (_in_flight, deadline) = self.admit(&self.limits(), &context)?;
            let Some(permit) = self.try_walk() else {
                return Err(FetchError::ListingsBusy { max: WALKS_MAX });
            };
            let walk = tokio::task::spawn_blocking(move || {
                // Held until the walk ends, even if the caller gives up.
                let _permit = permit;
                dataset.list_objects(&after, names + 1)
            });
            let failed = |problem: String| FetchError::ListingFailed { problem };
            match timeout_at(deadline, walk).await {
                None => Err(ReadError::DeadlineExceeded.into()),
                Some(Err(error)) => Err(failed(error.to_string())),
                Some(Ok(Err(error))) => Err(failed(error.to_string())),
                Some(Ok(Ok(entries))) => Ok(page_of(entries, names)),
            }
        };
        let result = listed.await;
        self.count_rejection(result, context.connection.as_ref())
    }
}

/// The page that starts with these entries. There is a next page if they do not all fit.
fn page_of(entries: Vec<ObjectEntry>, names: usize) -> ObjectPage {
    let found = entries.len();
    let mut bytes = 0;
    let mut objects = Vec::with_capacity(found.min(names));
    for entry in entries.into_iter().take(names) {
        bytes += entry.name.len();
        if bytes > PAGE_BYTES_MAX && !objects.is_empty() {
            break;
        }
        objects.push((entry.name, entry.length_bytes));
    }
    let next_page_token = objects
        .last()
        .filter(|_| objects.len() < found)
        .map(|(name, _)| name.clone());
    ObjectPage {
        objects,
        next_page_token,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(count: usize, name_bytes: usize) -> Vec<ObjectEntry> {
        let name = |number| format!("{number:0name_bytes$}");
        (0..count)
            .map(|number| ObjectEntry {
                name: name(number),
                length_bytes: 1,
            })
            .collect()
    }

    #[test]
    fn a_page_has_a_bounded_size() {
        // Sizes that are 0, within bounds, and above: never more than the largest page.
        for (size, names) in [
            (0, 1000),
            (1, 1),
            (999, 999),
            (1000, 1000),
            (1001, 1000),
            (u32::MAX, 1000),
        ] {
            let page = PageRequest {
                size,
                ..PageRequest::default()
            };
            assert_eq!(page.names(), names, "{size}");
        }
    }

    #[test]
    fn a_page_ends_with_a_name_where_more_follows() {
        // One entry more than fits: the next page begins after the last name shown. Exactly as many as fit,
        // or none: no next page.
        let more = page_of(entries(4, 2), 3);
        assert_eq!(
            (more.objects.len(), more.next_page_token.as_deref()),
            (3, Some("02"))
        );
        let all = page_of(entries(3, 2), 3);
        assert_eq!((all.objects.len(), all.next_page_token), (3, None));
        assert_eq!(page_of(Vec::new(), 3), ObjectPage::default());
    }

    #[test]
    fn a_page_of_long_names_stays_below_what_clients_take() {
        // A thousand names of 4 KiB: the page ends at 1 MiB of names and the next one begins after the last name shown.
        let long = page_of(entries(1000, 4096), 1000);
        assert_eq!(long.objects.len(), 256);
        assert_eq!(long.next_page_token.as_ref(), Some(&long.objects[255].0));
    }
}
