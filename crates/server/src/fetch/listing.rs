//! Lists datasets and objects, a page at a time, for every transport.
//!
//! Listing objects walks the directory on threads for that. Only a few walks run at a time, and callers share
//! them. A walk is charged to its caller until it ends, which is soon if nobody waits for it. A page is limited by its number of names and by their bytes.

use super::handle::{DatasetHandle, RequiredKind};
use super::rates::charge_request;
use super::request::{check_in_force, may_read};
use super::{DatasetInfo, FetchError, Fetcher, RequestContext, timeout_at};
use crate::caller::{Connection, WALKS_MAX};
use ringfetch_engine::blocking::BlockingPool;
use ringfetch_engine::dataset::ObjectEntry;
use ringfetch_engine::error::ReadError;
use ringfetch_engine::share::{Charge, Refused};
use std::sync::Arc;

/// Most names of a page, and the default.
pub const PAGE_NAMES_MAX: usize = 1000;
/// Bytes of names on one page: clients refuse messages of more than 4 MiB by default, and a name can take 4
/// KiB.
pub(super) const PAGE_BYTES_MAX: usize = 1 << 20;

/// The threads that walk directories.
static WALKERS: BlockingPool = BlockingPool::new("rf-list", WALKS_MAX as usize);

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
    /// Charges a directory walk to this connection.
    ///
    /// # Errors
    /// `ListingsBusy`.
    fn charge_walk(&self, connection: Option<&Arc<Connection>>) -> Result<Charge, FetchError> {
        let walk = match connection {
            Some(connection) => connection.shares().walks.charge(1),
            None => self.callers().budgets().walks.charge(1),
        };
        walk.map_err(|refused| FetchError::ListingsBusy {
            max: WALKS_MAX.into(),
            own: refused != Refused::Budget,
        })
    }

    /// A page of the datasets that requests on this connection may read, by name, and the token of the next page.
    ///
    /// # Errors
    /// `OverRate`, `Revoked`.
    pub fn list_datasets(
        &self,
        page: &PageRequest,
        reader: Option<&Arc<Connection>>,
    ) -> Result<(Vec<DatasetInfo>, Option<String>), FetchError> {
        self.count_rejection(charge_request(reader), reader)?;
        let (size, mut datasets) = (page.names(), self.datasets());
        datasets.retain(|dataset| page.token.is_empty() || dataset.name() > page.token.as_str());
        datasets.retain(|dataset| may_read(reader, dataset.name()));
        let more = datasets.len() > size;
        datasets.truncate(size);
        let last = datasets.last().filter(|_| more);
        let next = last.map(|dataset| dataset.name().to_owned());
        let datasets = datasets.iter().map(|dataset| DatasetInfo::new(dataset)).collect();
        check_in_force(reader)?;
        Ok((datasets, next))
    }

    /// Lists a page of a dataset's objects.
    ///
    /// # Errors
    /// Whatever refuses a request, `ListingsBusy`, or `ListingFailed`.
    ///
    /// # Cancel safety
    /// Dropping the future abandons the page; the walk stops at the next entry.
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
            let (in_flight, deadline) = self.admit(&self.limits(), &context)?;
            let walking = self.charge_walk(context.connection.as_ref())?;
            // Dropped when the caller gives up or its deadline passes.
            let waits = Arc::new(());
            let waiting = Arc::downgrade(&waits);
            let walk = WALKERS.run(move || {
                // Held until the walk ends, even if nobody waits for it any more.
                let _held = (in_flight, walking);
                dataset.list_objects(&after, names + 1, &|| waiting.strong_count() > 0)
            });
            let failed = |problem: String, errno| FetchError::ListingFailed { problem, errno };
            let walk = walk.map_err(|error| failed(format!("no thread: {error}"), error.raw_os_error()))?;
            match timeout_at(deadline, walk).await {
                None => Err(ReadError::DeadlineExceeded.into()),
                Some(Err(_panicked)) => Err(failed("the walk panicked".to_owned(), None)),
                Some(Ok(Err(error))) => Err(failed(error.to_string(), error.raw_os_error())),
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
    use crate::access::Need;
    use crate::access::tests::{PrincipalsFile, User, headers_of, line};
    use crate::config::Limits;
    use crate::error_status::of_fetch;
    use crate::fetch::tests::{objects_of, serving};
    use std::future::poll_fn;
    use std::sync::{Barrier, Mutex, mpsc};
    use std::task::Poll;
    use tonic::Code;

    #[test]
    fn a_line_that_changes_makes_no_list_shorter() {
        // Scenario: a connection that a line of the principals file has admitted; then the line changes, and both versions
        // allow the dataset. Expectation: a request that was admitted before fails with UNAVAILABLE and is to be retried: its
        // list is not empty, and its dataset not forbidden; what the new line admits finds it again.
        let directory = tempfile::tempdir().unwrap();
        let fetcher = serving(vec![objects_of(directory.path())], Limits::default());
        let file = PrincipalsFile::new(&line("a", "objects,other"));
        let access = file.access();
        let headers = headers_of("a");
        let own = fetcher.callers().connect("192.0.2.1".parse().unwrap(), u64::MAX);
        let admit = || access.admit(&headers, Need::Known, &own, &Arc::new(User::default()));
        let found = |connection: &Arc<Connection>| {
            let reader = Some(connection);
            let listed = fetcher.list_datasets(&PageRequest::default(), reader);
            [
                listed.map(|(datasets, _)| assert_eq!(datasets.len(), 1)),
                fetcher.open("objects", RequiredKind::Objects, reader).map(drop),
                fetcher.describe("objects", reader).map(drop),
            ]
        };
        let before = admit().unwrap();
        assert_eq!(found(&before), [const { Ok(()) }; 3]);
        access.install(file.renewed(&access, &line("a", "objects")));
        assert_eq!(found(&before), [const { Err(FetchError::Revoked) }; 3]);
        let status = of_fetch(&FetchError::Revoked);
        assert_eq!((status.grpc, status.http.as_u16()), (Code::Unavailable, 503));
        assert!(status.retry_after.is_some());
        assert_eq!(found(&admit().unwrap()), [const { Ok(()) }; 3]);
    }

    /// Occupies all threads that walk, until the sender is dropped; returns once they are occupied.
    fn occupy_walkers() -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let (released, occupied) = (
            Arc::new(Mutex::new(released)),
            Arc::new(Barrier::new(WALKS_MAX as usize + 1)),
        );
        for _ in 0..WALKS_MAX {
            let (released, occupied) = (Arc::clone(&released), Arc::clone(&occupied));
            let _unawaited = WALKERS.run(move || {
                occupied.wait();
                released.lock().unwrap().recv().unwrap_err()
            });
        }
        occupied.wait();
        release
    }

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
    fn an_abandoned_walk_is_charged_until_it_ends() {
        // Scenario: all threads for walks are busy, and a caller gives up its listing, or its deadline passes.
        // Expectation: its request and its walk count until a thread has come to the walk and left it.
        let directory = tempfile::tempdir().unwrap();
        let fetcher = serving(vec![objects_of(directory.path())], Limits::default());
        let callers = fetcher.callers();
        let connection = callers.connect("192.0.2.1".parse().unwrap(), u64::MAX);
        let shares = connection.shares();
        let held = || (shares.requests.held(), shares.walks.held());
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        for deadline in [None, Some(std::time::Duration::from_millis(1))] {
            let release = occupy_walkers();
            runtime.block_on(async {
                let mut listing = loop {
                    let context = RequestContext {
                        connection: Some(Arc::clone(&connection)),
                        deadline: deadline.map(|after| std::time::Instant::now() + after),
                        ..RequestContext::default()
                    };
                    let listing = fetcher.list_objects("objects", PageRequest::default(), context);
                    let mut listing = Box::pin(listing);
                    match poll_fn(|cx| Poll::Ready(listing.as_mut().poll(cx))).await {
                        Poll::Pending => break listing,
                        // This thread had no CPU for as long.
                        Poll::Ready(late) => {
                            assert!(deadline.is_some() && late == Err(ReadError::DeadlineExceeded.into()));
                        }
                    }
                };
                if deadline.is_some() {
                    assert_eq!(listing.as_mut().await, Err(ReadError::DeadlineExceeded.into()));
                }
                drop(listing);
                assert_eq!(held(), (1, 1));
                drop(release);
                // Once all threads are in later calls, one has left the walk.
                drop(occupy_walkers());
                assert_eq!(held(), (0, 0));
            });
        }
    }

    #[test]
    fn callers_share_the_walks() {
        // Scenario: callers with one and with two connections walk as much as they may. Expectation: two walks on one
        // connection, three on two, and always one more for another caller, until all are in use; who holds some is
        // refused because of its own share.
        let fetcher = serving(Vec::new(), Limits::default());
        let mut held = Vec::new();
        let mut walk = |address: &str, connections: usize| {
            let connections: Vec<_> = (0..connections)
                .map(|_| fetcher.callers().connect(address.parse().unwrap(), u64::MAX))
                .collect();
            let before = held.len();
            for connection in connections.iter().cycle().take(16) {
                match fetcher.charge_walk(Some(connection)) {
                    Ok(walk) => held.push(walk),
                    Err(FetchError::ListingsBusy { own, .. }) => assert!(own, "{address}"),
                    Err(other) => panic!("{other}"),
                }
            }
            held.len() - before
        };
        assert_eq!(walk("192.0.2.1", 1), 2);
        assert_eq!(walk("192.0.2.2", 2), 2);
        assert_eq!(walk("192.0.2.3", 2), 1);
        assert_eq!(walk("192.0.2.4", 2), 1);
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
