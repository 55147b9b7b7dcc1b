//! Listing the objects of a dataset, a page at a time.
//!
//! A listing walks the directory on the blocking pool, a few walks at a time in the whole daemon: listings must not take
//! the threads that open objects. A page ends at its number of names or at a bound of bytes, whichever comes first.

use super::opened::{Opened, Wanted};
use super::{CallContext, FetchError, Fetcher, until};
use ringfetch_engine::dataset::ObjectEntry;
use ringfetch_engine::error::ReadError;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Most names of a page, and how many there are where none are asked for.
pub const PAGE_NAMES_MAX: usize = 1000;
/// Bytes of names on one page: clients refuse messages of more than 4 MiB by default, and a name can have 4 KiB.
const PAGE_BYTES_MAX: usize = 1 << 20;
/// Directory walks at a time in the whole daemon.
pub(super) const WALKS_MAX: usize = 4;

/// A page of objects.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// (name, bytes), in byte order of the names.
    pub objects: Vec<(String, u64)>,
    /// The name after which the next page begins; none on the last page.
    pub next_after: Option<String>,
}

impl Fetcher {
    /// Leave to walk a directory, for as long as what is returned lives; none: there are as many walks as there may be.
    pub fn try_walk(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.inner.walks).try_acquire_owned().ok()
    }

    /// Lists objects whose names come after `after`, at most `names` of them; 0: as many as a page has.
    ///
    /// # Errors
    /// Whatever refuses a request, `ListingsBusy`, or `ListingFailed`.
    ///
    /// # Cancel safety
    /// Dropping the future gives the page up; the walk goes on to its end.
    pub async fn list_objects(
        &self,
        dataset: &str,
        after: String,
        names: usize,
        context: CallContext,
    ) -> Result<Page, FetchError> {
        let names = match names {
            0 => PAGE_NAMES_MAX,
            some => some.min(PAGE_NAMES_MAX),
        };
        let listed = async {
            let Opened(dataset) = self.find(dataset, Wanted::Objects)?;
            let (_in_flight, deadline) = self.admit(&self.limits(), &context)?;
            let Some(permit) = self.try_walk() else {
                return Err(FetchError::ListingsBusy { max: WALKS_MAX });
            };
            let walk = tokio::task::spawn_blocking(move || {
                // Given back when the walk is over, not when the caller gives up.
                let _permit = permit;
                dataset.list_objects(&after, names + 1)
            });
            let failed = |problem: String| FetchError::ListingFailed { problem };
            match until(deadline, walk).await {
                None => Err(ReadError::DeadlineExceeded.into()),
                Some(Err(error)) => Err(failed(error.to_string())),
                Some(Ok(Err(error))) => Err(failed(error.to_string())),
                Some(Ok(Ok(entries))) => Ok(page(entries, names)),
            }
        };
        self.counted(listed.await)
    }
}

/// The page that begins with these entries. There is another one after it if they do not all fit.
fn page(entries: Vec<ObjectEntry>, names: usize) -> Page {
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
    let next_after = objects
        .last()
        .filter(|_| objects.len() < found)
        .map(|(name, _)| name.clone());
    Page { objects, next_after }
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
    fn a_page_ends_with_a_name_where_more_follows() {
        // One entry more than fits: the next page begins after the last name shown. As many as fit, or none: no next page.
        let more = page(entries(4, 2), 3);
        assert_eq!((more.objects.len(), more.next_after.as_deref()), (3, Some("02")));
        let all = page(entries(3, 2), 3);
        assert_eq!((all.objects.len(), all.next_after), (3, None));
        assert_eq!(page(Vec::new(), 3), Page::default());
    }

    #[test]
    fn a_page_of_long_names_stays_below_what_clients_take() {
        // A thousand names of 4 KiB: the page ends at 1 MiB of names and the next one begins after the last name shown.
        let long = page(entries(1000, 4096), 1000);
        assert_eq!(long.objects.len(), 256);
        assert_eq!(long.next_after.as_ref(), Some(&long.objects[255].0));
    }
}
