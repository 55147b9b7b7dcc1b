//! Reads as requests ask for them, whatever transport they came by: checks a request whole before anything is queued.
//!
//! The one door: every transport asks here, so whatever may refuse a request is here once, in this order: the size of the
//! request and the memory for it (`intake`, while it arrives), draining, the dataset, its kind, the lists, the number of
//! items, the requests in flight, the deadline, the bytes of the answer, the queue and the memory (the engine). A slot
//! among the requests in flight is taken before objects are opened, so that a refused request costs no system call; it is
//! given back when the answer is there (the memory budget bounds what is written out after that). Datasets and limits are
//! one value that is replaced whole while it serves; a request keeps the dataset it found.
//!
//! Codes and status are `status`'s. Nothing waits for room here: what is over a bound is refused at once.

mod backends;
mod deadline;
mod describe;
mod intake;
mod listing;
mod opened;
mod rejection;
mod request;
mod version;
mod window;
mod windowed;

pub use self::backends::Chosen;
pub(crate) use self::deadline::until;
pub(crate) use self::describe::backend_word;
pub use self::describe::{DatasetInfo, ReadPath, Reading, VectorShape};
pub(crate) use self::intake::Intake;
pub use self::listing::{PAGE_NAMES_MAX, Page, PageRequest};
pub use self::opened::{Dtype, Kind, Opened, Wanted};
pub use self::request::{CallContext, FetchError, Items};
pub use self::version::{Part, Version, VersionError};
pub(crate) use self::window::Piece;
#[cfg(test)]
pub(crate) use self::window::total_bytes;
pub(crate) use self::windowed::{Reader, WindowedBody};

use self::backends::Backends;
use self::opened::check_version;
use self::rejection::Rejections;
use self::request::{check, too_large};
use crate::caller::Callers;
use crate::config::Limits;
use arc_swap::ArcSwap;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesOrdered;
use ringfetch_engine::batch::{Batch, Fetched};
use ringfetch_engine::dataset::{Dataset, OpenFile};
use ringfetch_engine::engine::{Engine, SubmitOptions};
use ringfetch_engine::error::{ReadError, Resource};
use ringfetch_engine::share::{Charge, Refused};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::Semaphore;

/// Objects of one request that are opened at the same time. Misses go to the blocking pool, 512 threads by default:
/// one request must not take them all.
const OPENS_AT_ONCE: usize = 16;

/// Datasets that an error names.
const KNOWN_NAMES_MAX: usize = 16;

/// Longest dataset name there can be; a longer one that was asked for is cut where it is repeated.
const NAME_CHARS_MAX: usize = 128;

/// What is served now, and within which limits.
#[derive(Debug)]
struct Serving {
    datasets: BTreeMap<String, Arc<Dataset>>,
    limits: Limits,
}

impl Serving {
    fn new(datasets: Vec<Arc<Dataset>>, limits: Limits) -> Self {
        let named = |dataset: Arc<Dataset>| (dataset.name().to_owned(), dataset);
        let datasets = datasets.into_iter().map(named).collect();
        Self { datasets, limits }
    }
}

#[derive(Debug)]
struct Inner {
    engine: Engine,
    serving: ArcSwap<Serving>,
    backends: Backends,
    callers: Callers,
    draining: AtomicBool,
    rejections: Rejections,
    /// Directory walks.
    walks: Arc<Semaphore>,
}

/// What was read for a request.
#[derive(Debug)]
pub struct Answered {
    /// Its items.
    pub fetched: Fetched,
    /// Of objects, the version of each item; empty for one that could not be opened.
    pub etags: Vec<String>,
}

/// One way to read, shared by every transport. Clones share it.
#[derive(Debug, Clone)]
pub struct Fetcher {
    inner: Arc<Inner>,
}

impl Fetcher {
    /// A fetcher over open datasets.
    pub fn new(engine: Engine, datasets: Vec<Arc<Dataset>>, limits: Limits) -> Self {
        for dataset in &datasets {
            engine.introduce(dataset);
        }
        let callers = Callers::new(engine.clone(), &limits);
        Self {
            inner: Arc::new(Inner {
                engine,
                serving: ArcSwap::from_pointee(Serving::new(datasets, limits)),
                backends: Backends::default(),
                callers,
                draining: AtomicBool::new(false),
                rejections: Rejections::new(),
                walks: Arc::new(Semaphore::new(listing::WALKS_MAX)),
            }),
        }
    }

    /// Registers `ringfetch_rejected_total{reason}`.
    ///
    /// # Errors
    /// The name is taken in this registry.
    pub fn register_metrics(&self, registry: &prometheus::Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(self.inner.rejections.vec.clone()))
    }

    /// The engine beneath.
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Who is connected, and what they hold.
    pub fn callers(&self) -> &Callers {
        &self.inner.callers
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.inner.serving.load().limits
    }

    /// Serves these datasets within these limits from now on. Requests that found their dataset before keep it.
    pub fn replace(&self, datasets: Vec<Arc<Dataset>>, limits: Limits) {
        for dataset in &datasets {
            self.inner.engine.introduce(dataset);
        }
        self.inner.callers.set_limits(&limits);
        self.inner.serving.store(Arc::new(Serving::new(datasets, limits)));
    }

    /// Every dataset, by name.
    pub fn datasets(&self) -> Vec<Arc<Dataset>> {
        self.inner.serving.load().datasets.values().cloned().collect()
    }

    /// One dataset.
    ///
    /// # Errors
    /// `DatasetNotFound`.
    pub fn dataset(&self, name: &str) -> Result<Arc<Dataset>, FetchError> {
        let serving = self.inner.serving.load();
        let found = serving.datasets.get(name).cloned();
        found.ok_or_else(|| FetchError::DatasetNotFound {
            name: name.chars().take(NAME_CHARS_MAX).collect(),
            known: known(&serving.datasets),
        })
    }

    /// Reads a batch. What is wrong with one item is in the answer's errors, unless `fail_fast`; an item larger than
    /// any answer can be is such an error too. A deadline also ends the wait for the disk: the reads are given up, and
    /// what is in flight finishes unseen. All of it is of one version of the dataset: of `if_match`, unless that is empty.
    ///
    /// # Errors
    /// Whatever fails the request as a whole.
    ///
    /// # Cancel safety
    /// Dropping the future gives the batch up; see [`ringfetch_engine::engine::Ticket`].
    pub async fn fetch(
        &self,
        dataset: &str,
        if_match: &str,
        items: &Items<'_>,
        context: &CallContext,
    ) -> Result<(Opened, Answered), FetchError> {
        let opened = self.open(dataset, items.wanted())?;
        opened.check_version(if_match)?;
        let fetched = self.fetch_of(&opened, items, context).await?;
        Ok((opened, fetched))
    }

    /// A dataset for a request that wants it to be of some kind.
    ///
    /// # Errors
    /// `Draining`, `DatasetNotFound`, `WrongKind`.
    pub fn open(&self, name: &str, wanted: Wanted) -> Result<Opened, FetchError> {
        self.counted(self.find(name, wanted))
    }

    fn find(&self, name: &str, wanted: Wanted) -> Result<Opened, FetchError> {
        if self.is_draining() {
            return Err(ReadError::Draining.into());
        }
        let dataset = self.dataset(name)?;
        wanted.check(dataset.name(), dataset.kind())?;
        Ok(Opened(dataset))
    }

    /// A place among the requests in flight, and when the request has to be answered.
    fn admit(&self, limits: &Limits, context: &CallContext) -> Result<(Charge, Option<Instant>), FetchError> {
        let entered = match &context.connection {
            Some(connection) => connection.requests().charge(1),
            None => self.inner.callers.requests().charge(1),
        };
        let entered = entered.map_err(|refused| FetchError::TooManyRequests {
            max: limits.requests_in_flight,
            own: refused != Refused::Budget,
        })?;
        let arrived = context.arrived.unwrap_or_else(Instant::now);
        let deadline = within(limits, arrived, context.deadline);
        if deadline.is_some_and(|deadline| deadline <= arrived) {
            return Err(ReadError::DeadlineExceeded.into());
        }
        Ok((entered, deadline))
    }

    /// Places for objects among those that requests hold open: taken before the first one is opened.
    fn hold_objects(&self, context: &CallContext, objects: usize) -> Result<Charge, FetchError> {
        let amount = u64::try_from(objects).unwrap_or(u64::MAX);
        let held = match &context.connection {
            Some(connection) => connection.objects().charge(amount),
            None => self.inner.callers.objects().charge(amount),
        };
        held.map_err(|refused| {
            let resource = match refused {
                Refused::Budget => Resource::OpenObjects,
                Refused::Caller | Refused::Connection => Resource::CallerObjects,
            };
            ReadError::Overloaded { resource }.into()
        })
    }

    /// Counts a refusal.
    pub(crate) fn counted<T>(&self, result: Result<T, FetchError>) -> Result<T, FetchError> {
        if let Err(error) = &result {
            self.inner.rejections.count(error);
        }
        result
    }

    /// The error of a request whose deadline passed before it was there as a whole; counted as the refusal that it is.
    pub(crate) fn refused_late(&self) -> FetchError {
        let error = ReadError::DeadlineExceeded.into();
        self.inner.rejections.count(&error);
        error
    }

    /// As [`Self::fetch`], of a dataset that was found before: whoever tells its shape or its version beside the bytes
    /// must read that one, whatever is served by its name meanwhile.
    ///
    /// # Errors
    /// As [`Self::fetch`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch`].
    pub async fn fetch_of(
        &self,
        dataset: &Opened,
        items: &Items<'_>,
        context: &CallContext,
    ) -> Result<Answered, FetchError> {
        let result = if self.is_draining() {
            Err(ReadError::Draining.into())
        } else {
            self.fetch_within(&self.limits(), dataset, items, context).await
        };
        self.counted(result)
    }

    /// Reads a further part of an answer whose beginning is sent already. As [`Self::fetch_of`], but also while draining,
    /// since that answer is in flight; and a bound that is met is not counted as a refusal, since the caller waits.
    ///
    /// # Errors
    /// As [`Self::fetch`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch`].
    pub async fn fetch_further(
        &self,
        dataset: &Opened,
        items: &Items<'_>,
        context: &CallContext,
    ) -> Result<Answered, FetchError> {
        // The part was cut to size when the answer was planned; limits that a reload lowered since are for later answers.
        let limits = Limits {
            items_per_request: u32::MAX,
            response_bytes: u64::MAX,
            ..self.limits()
        };
        self.fetch_within(&limits, dataset, items, context).await
    }

    /// From now on every request is answered `Draining`.
    pub fn start_draining(&self) {
        self.inner.draining.store(true, Ordering::Release);
    }

    /// Whether it drains.
    pub fn is_draining(&self) -> bool {
        self.inner.draining.load(Ordering::Acquire)
    }

    /// The largest item an answer can hold: bounded by the limit, by the memory, and by the 32 bits of the lengths.
    pub fn item_bytes_max(&self) -> u64 {
        self.item_bytes_within(&self.limits())
    }

    fn item_bytes_within(&self, limits: &Limits) -> u64 {
        limits
            .response_bytes
            .min(self.inner.engine.response_bytes_max())
            .min(u64::from(u32::MAX))
    }

    async fn fetch_within(
        &self,
        limits: &Limits,
        Opened(dataset): &Opened,
        items: &Items<'_>,
        context: &CallContext,
    ) -> Result<Answered, FetchError> {
        check(*items, limits)?;
        let (_in_flight, deadline) = self.admit(limits, context)?;
        let max = self.item_bytes_within(limits);
        // Whoever gives a deadline does not wait longer, wherever the batch is by then.
        let late = || FetchError::from(ReadError::DeadlineExceeded);
        let (batch, etags, _held);
        if let Items::Objects { names, .. } = items {
            _held = Some(self.hold_objects(context, names.len())?);
            // In a box: it is larger than all other state of a request.
            let planning = Box::pin(plan_objects(dataset, items, max));
            (batch, etags) = until(deadline, planning).await.ok_or_else(late)?;
        } else {
            (batch, etags, _held) = (plan(dataset, items, max), Vec::new(), None);
        }
        if batch.data_bytes() > max {
            return Err(FetchError::ResponseTooLarge {
                bytes: batch.data_bytes(),
                max,
            });
        }
        let options = SubmitOptions {
            deadline,
            account: context
                .connection
                .as_ref()
                .map(|connection| Arc::clone(connection.account())),
            fail_fast: context.fail_fast,
        };
        let result = match self.inner.engine.submit(batch, options) {
            Ok(ticket) => until(deadline, ticket).await.ok_or_else(late)?,
            Err(error) => Err(error),
        };
        if let Items::Objects { names, .. } = items {
            forget_truncated(dataset, names, &result);
        }
        Ok(Answered {
            fetched: result?,
            etags,
        })
    }
}

/// The caller's deadline, or the limit's after the arrival where that is earlier.
pub(crate) fn within(limits: &Limits, arrived: Instant, deadline: Option<Instant>) -> Option<Instant> {
    let limit = limits.deadline.and_then(|limit| arrived.checked_add(limit));
    [deadline, limit].into_iter().flatten().min()
}

/// The batch of a checked request, whose items have at most `max` bytes. Objects are `plan_objects`'s.
fn plan(dataset: &Arc<Dataset>, items: &Items<'_>, max: u64) -> Batch {
    let mut batch = Batch::new(Arc::clone(dataset), items.len());
    match items {
        Items::Blocks(items) | Items::Vectors(items) => {
            let length = match dataset.kind() {
                Kind::Blocks { block_bytes, .. } => u64::from(block_bytes),
                Kind::Vectors { vector_bytes, .. } => u64::from(vector_bytes),
                Kind::Objects => 0,
            };
            let blocks = matches!(dataset.kind(), Kind::Blocks { .. });
            for item in *items {
                if length > max {
                    batch.push_failed(ReadError::ItemTooLarge { length, max });
                } else if blocks {
                    batch.push_block(*item);
                } else {
                    batch.push_vector(*item);
                }
            }
        }
        Items::Ranges { offsets, lengths } => {
            let end = dataset.length_bytes();
            for (offset, length) in offsets.iter().zip(*lengths) {
                match too_large(*offset, *length, end, max) {
                    Some(error) => batch.push_failed(error),
                    None => batch.push_range(*offset, *length),
                }
            }
        }
        Items::Pinned {
            object,
            offsets,
            lengths,
        } => {
            for (offset, length) in offsets.iter().zip(*lengths) {
                push_object(&mut batch, object.file(), *offset, Some(*length), max);
            }
        }
        Items::Objects { .. } => {}
    }
    batch
}

/// The batch of a checked request for objects, and their versions. Opens them; touches nothing else.
async fn plan_objects(dataset: &Arc<Dataset>, items: &Items<'_>, max: u64) -> (Batch, Vec<String>) {
    let mut batch = Batch::new(Arc::clone(dataset), items.len());
    let mut etags = Vec::new();
    let Items::Objects {
        names,
        offsets,
        lengths,
        if_match,
    } = items
    else {
        return (batch, etags);
    };
    let (distinct, places) = distinct(names);
    // A plain loop where `buffered` would do: its closure over a borrowed name keeps the future from being
    // `Send` for every lifetime, which transports need.
    let mut waiting = distinct.iter();
    let mut opening = FuturesOrdered::new();
    let mut opened = Vec::with_capacity(distinct.len());
    etags.reserve_exact(names.len());
    for (item, place) in places.into_iter().enumerate() {
        while opened.len() <= place {
            while opening.len() < OPENS_AT_ONCE
                && let Some(name) = waiting.next()
            {
                opening.push_back(dataset.object(name));
            }
            let Some(object) = opening.next().await else { break };
            opened.push(object);
        }
        let offset = offsets.get(item).copied().unwrap_or(0);
        let length = lengths.get(item).copied().filter(|length| *length > 0);
        let if_match = if_match.get(item).map_or("", String::as_str);
        let Some(object) = opened.get(place) else { break };
        etags.push(
            object
                .as_ref()
                .map_or_else(|_| String::new(), |object| object.etag().to_owned()),
        );
        match object {
            Ok(object) => match check_version(object.etag(), if_match) {
                Ok(()) => push_object(&mut batch, object, offset, length, max),
                Err(error) => batch.push_failed(error),
            },
            Err(error) => batch.push_failed(error.clone()),
        }
    }
    (batch, etags)
}

/// Each name once, in the order of their first places, and for each item the place of its name among them: a batch reads
/// one version of an object, however often its name stands in it.
fn distinct(names: &[String]) -> (Vec<&str>, Vec<usize>) {
    let mut found = HashMap::with_capacity(names.len());
    let (mut distinct, mut places) = (Vec::with_capacity(names.len()), Vec::with_capacity(names.len()));
    for name in names {
        let place = *found.entry(name.as_str()).or_insert(distinct.len());
        if place == distinct.len() {
            distinct.push(name.as_str());
        }
        places.push(place);
    }
    (distinct, places)
}

fn push_object(batch: &mut Batch, object: &Arc<OpenFile>, offset: u64, length: Option<u64>, max: u64) {
    let end = object.length_bytes();
    let wanted = length.unwrap_or_else(|| end.saturating_sub(offset));
    match too_large(offset, wanted, end, max) {
        Some(error) => batch.push_failed(error),
        None => batch.push_object(object, offset, length),
    }
}

/// An object that was cut short, or replaced, is opened anew by the next request for it.
fn forget_truncated(dataset: &Dataset, names: &[String], result: &Result<Fetched, ReadError>) {
    match result {
        Ok(fetched) => {
            for failed in &fetched.errors {
                if let (ReadError::Truncated { .. }, Some(name)) =
                    (&failed.error, names.get(failed.item as usize))
                {
                    dataset.forget_object(name);
                }
            }
        }
        // With `fail_fast` nobody says which one it was.
        Err(ReadError::Truncated { .. }) => names.iter().for_each(|name| dataset.forget_object(name)),
        Err(_) => {}
    }
}

/// The datasets there are, for an error's message: a few of them, and how many more.
fn known<V>(datasets: &BTreeMap<String, V>) -> String {
    if datasets.is_empty() {
        return "none".to_owned();
    }
    let mut names = datasets
        .keys()
        .take(KNOWN_NAMES_MAX)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    if datasets.len() > KNOWN_NAMES_MAX {
        names.push_str(&format!(" and {} more", datasets.len() - KNOWN_NAMES_MAX));
    }
    names
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
    use ringfetch_engine::dataset::{DatasetSpec, KindSpec};
    use std::time::Duration;

    /// A fetcher without datasets, within these limits.
    pub(crate) fn without_datasets(limits: Limits) -> Fetcher {
        serving(Vec::new(), limits)
    }

    fn serving(datasets: Vec<Arc<Dataset>>, limits: Limits) -> Fetcher {
        let config = EngineConfig {
            backend: BackendKind::Pread,
            memory_budget_bytes: 1 << 20,
            pin: false,
            ..EngineConfig::default()
        };
        Fetcher::new(Engine::start(&config).unwrap(), datasets, limits)
    }

    #[test]
    fn a_caller_cannot_hold_all_objects_open() {
        // Scenario: a caller opens an object again and again and reads nothing, on two connections; then it asks for a batch,
        // and another caller for an object and for the largest batch. Expectation: the first is refused with its own share as
        // the reason, in both ways; the other is served; and what is given up can be had again.
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), "bytes").unwrap();
        let spec = DatasetSpec {
            name: "objects".to_owned(),
            paths: vec![directory.path().to_owned()],
            kind: KindSpec::Objects {
                max_open_files: 16,
                revalidate: Duration::from_secs(60),
            },
            direct_io: DirectIo::Off,
        };
        let limits = Limits::default();
        let most = limits.items_per_request as usize;
        let fetcher = serving(vec![Arc::new(Dataset::open(&spec).unwrap())], limits);
        let of = |address: &str| CallContext {
            connection: Some(fetcher.callers().connect(address.parse().unwrap(), u64::MAX)),
            ..CallContext::default()
        };
        let own_share = FetchError::Read(ReadError::Overloaded {
            resource: Resource::CallerObjects,
        });
        let batch = async |context: CallContext, objects: usize| {
            let items = Items::Objects {
                names: &vec!["a".to_owned(); objects],
                offsets: &[],
                lengths: &[],
                if_match: &[],
            };
            fetcher.fetch("objects", "", &items, &context).await.map(|_| ())
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async {
            let greedy = [of("127.0.0.2"), of("127.0.0.2")];
            let mut held = Vec::new();
            let refused = loop {
                match fetcher.object("objects", "a", &greedy[held.len() % 2]).await {
                    Ok(version) => held.push(version),
                    Err(refused) => break refused,
                }
            };
            assert_eq!(refused, own_share);
            assert!(held.len() > most / 2, "{}", held.len());
            assert_eq!(batch(greedy[0].clone(), most).await, Err(own_share));
            let other = of("127.0.0.3");
            fetcher.object("objects", "a", &other).await.unwrap();
            assert_eq!(batch(other, most).await, Ok(()));
            held.clear();
            assert_eq!(batch(greedy[1].clone(), most).await, Ok(()));
        });
    }

    #[test]
    fn an_error_names_some_datasets_and_counts_the_rest() {
        // Twenty datasets: sixteen are named, four are counted; without any it says so.
        let datasets: BTreeMap<String, ()> = (0..20).map(|number| (format!("d{number:02}"), ())).collect();
        let known_names = known(&datasets);
        assert!(
            known_names.starts_with("d00, d01, ") && known_names.ends_with("d15 and 4 more"),
            "{known_names}"
        );
        assert_eq!(known::<()>(&BTreeMap::new()), "none");
    }
}
