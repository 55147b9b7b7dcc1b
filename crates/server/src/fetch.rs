//! Reads for every transport. A request is checked completely before anything is queued (ADR 0014).
//!
//! All checks that may refuse a request are here, in this order: the size of the request and the memory for
//! it (`request_memory`, while it arrives), draining, the principal's requests per second, the right to the
//! dataset, the dataset, its kind, the lists, the number of items, the requests in flight, the deadline, the
//! bytes of the response, the principal's bytes per second, the queue and the memory (the engine). A request
//! counts as in flight before its objects are opened, so that a refused request costs no system call, and
//! until its response is ready (the memory budget bounds what is written after that). Datasets and limits are
//! one value, replaced atomically by a reload; a request keeps the dataset it found.
//!
//! `error_status` maps errors to codes. Nothing queues here: a request over a limit is refused at once.

mod deadline;
mod describe;
mod handle;
mod listing;
#[cfg(test)]
mod order;
mod planning;
mod rates;
mod rejection;
mod request;
mod request_memory;
mod scoring;
mod snapshot;
mod window;
mod windowed;

pub(crate) use self::deadline::{timeout_at, within};
pub(crate) use self::describe::backend_word;
pub use self::describe::{DatasetInfo, ReadPath, StorageInfo, VectorShape};
pub use self::handle::{DatasetHandle, Dtype, Kind, RequiredKind};
pub use self::listing::{ObjectPage, PAGE_NAMES_MAX, PageRequest};
pub(crate) use self::planning::past_the_end;
pub(crate) use self::rejection::Rejection;
#[cfg(test)]
pub(crate) use self::rejection::before_routing;
pub use self::request::{FetchError, Items, RateLimit, RequestContext};
pub(crate) use self::request_memory::{RequestMemory, enough_for};
pub use self::scoring::{ScoreQuery, Scoring};
pub(crate) use self::snapshot::LOOK_UPS_MAX;
pub use self::snapshot::{Purpose, ReadPhase, Snapshot};
pub(crate) use self::window::BodyPart;
pub(crate) use self::windowed::{SnapshotReader, WindowedBody};

use self::planning::{forget_lost, plan, plan_objects};
use self::rates::{charge_bytes, charge_request, count_bytes, give_back_bytes};
use self::rejection::RejectionCounters;
use self::request::{check, check_in_force, known, may_read};
use crate::caller::{Callers, Connection};
use crate::config::Limits;
use crate::record;
use crate::telemetry::LogLimiter;
use arc_swap::ArcSwap;
use ringfetch_engine::batch::Fetched;
use ringfetch_engine::cores::current as current_core;
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::{Engine, SubmitOptions};
use ringfetch_engine::error::{ItemError, ReadError, Resource, ResponseMax};
use ringfetch_engine::share::{Charge, Refused};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Longest possible dataset name; an error that repeats a longer one cuts it.
const NAME_CHARS_MAX: usize = 128;

/// The datasets being served, and the limits in force.
#[derive(Debug)]
struct Serving {
    /// By name: a clone for each core, after one for all other threads.
    datasets: BTreeMap<String, Box<[Arc<Dataset>]>>,
    limits: Limits,
}

impl Serving {
    fn new(datasets: Vec<Arc<Dataset>>, cores: usize, limits: Limits) -> Self {
        let named = |dataset: Arc<Dataset>| {
            let clones = (0..=cores).map(|_| Arc::new(Dataset::clone(&dataset)));
            (dataset.name().to_owned(), clones.collect())
        };
        let datasets = datasets.into_iter().map(named).collect();
        Self { datasets, limits }
    }

    fn dataset(&self, name: &str) -> Option<&Arc<Dataset>> {
        let clones = self.datasets.get(name)?;
        let of_core = current_core().and_then(|core| clones.get(core + 1));
        of_core.or(clones.first())
    }
}

#[derive(Debug)]
struct Inner {
    engine: Engine,
    serving: ArcSwap<Serving>,
    callers: Callers,
    draining: AtomicBool,
    rejections: RejectionCounters,
    /// Of responses that are cut short.
    cut_short: LogLimiter,
}

/// The result of a request.
#[derive(Debug)]
pub struct FetchResponse {
    /// Its items.
    pub fetched: Fetched,
    /// For objects, the version of each item; empty for one that could not be opened.
    pub etags: Vec<String>,
}

/// Reads datasets for every transport. Clones share their state.
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
        let cores = engine.core_count();
        Self {
            inner: Arc::new(Inner {
                engine,
                serving: ArcSwap::from_pointee(Serving::new(datasets, cores, limits)),
                callers,
                draining: AtomicBool::new(false),
                rejections: RejectionCounters::new(),
                cut_short: LogLimiter::default(),
            }),
        }
    }

    /// Registers `ringfetch_rejected_total{reason}` and `ringfetch_requests_refused_total{transport,reason}`.
    ///
    /// # Errors
    /// A name is taken in this registry.
    pub fn register_metrics(&self, registry: &prometheus::Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(self.inner.rejections.vec.clone()))?;
        registry.register(Box::new(self.refused_before_routing().clone()))
    }

    /// Counts what ports refuse before routing.
    pub(crate) fn refused_before_routing(&self) -> &prometheus::IntCounterVec {
        &self.inner.rejections.before_routing
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Everyone who is connected, and what they hold.
    pub fn callers(&self) -> &Callers {
        &self.inner.callers
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.inner.serving.load().limits
    }

    /// Serves these datasets within these limits from now on. Requests that already found their dataset keep
    /// it.
    pub fn replace(&self, datasets: Vec<Arc<Dataset>>, limits: Limits) {
        for dataset in &datasets {
            self.inner.engine.introduce(dataset);
        }
        self.inner.callers.set_limits(&limits);
        let cores = self.inner.engine.core_count();
        self.inner
            .serving
            .store(Arc::new(Serving::new(datasets, cores, limits)));
    }

    /// Every dataset, by name.
    pub fn datasets(&self) -> Vec<Arc<Dataset>> {
        let serving = self.inner.serving.load();
        serving
            .datasets
            .values()
            .filter_map(|clones| clones.first().cloned())
            .collect()
    }

    /// Looks a dataset up, for the daemon itself and for operators.
    ///
    /// # Errors
    /// `DatasetNotFound`.
    pub fn dataset(&self, name: &str) -> Result<Arc<Dataset>, FetchError> {
        self.dataset_for(name, None)
    }

    /// Looks a dataset up, for a request on this connection.
    ///
    /// # Errors
    /// `Revoked`; `Forbidden`, whether the dataset exists or not; or `DatasetNotFound`, which lists those that
    /// may be read.
    fn dataset_for(&self, name: &str, reader: Option<&Arc<Connection>>) -> Result<Arc<Dataset>, FetchError> {
        let shown = || name.chars().take(NAME_CHARS_MAX).collect();
        let serving = self.inner.serving.load();
        check_in_force(reader)?;
        if !may_read(reader, name) {
            return Err(FetchError::Forbidden { name: shown() });
        }
        let found = serving.dataset(name).cloned();
        found.ok_or_else(|| {
            let names = serving.datasets.keys().map(String::as_str);
            FetchError::DatasetNotFound {
                name: shown(),
                known: known(names.filter(|name| may_read(reader, name))),
            }
        })
    }

    /// Reads a batch. Errors of single items are in the response, unless `fail_fast`; an item larger than any
    /// response can be is such an error too. A deadline also ends the wait for the disk: reads in flight then
    /// finish unseen. All items are of one version of the dataset: `if_match`, or if that is empty any.
    ///
    /// # Errors
    /// Whatever fails the request as a whole.
    ///
    /// # Cancel safety
    /// Dropping the future abandons the batch; see [`ringfetch_engine::engine::Ticket`].
    pub async fn fetch(
        &self,
        dataset: &str,
        if_match: &str,
        items: &Items<'_>,
        context: &RequestContext,
    ) -> Result<(DatasetHandle, FetchResponse), FetchError> {
        let opened = self.open(dataset, items.required_kind(), context.connection.as_ref())?;
        opened.check_version(if_match)?;
        let fetched = self.fetch_of(&opened, items, context).await?;
        Ok((opened, fetched))
    }

    /// Looks up a dataset that must be of this kind, for a request on this connection.
    ///
    /// # Errors
    /// `Draining`, `OverRate`, `Revoked`, `Forbidden`, `DatasetNotFound`, `WrongKind`.
    pub fn open(
        &self,
        name: &str,
        wanted: RequiredKind,
        reader: Option<&Arc<Connection>>,
    ) -> Result<DatasetHandle, FetchError> {
        self.count_rejection(self.find(name, wanted, reader), reader)
    }

    fn find(
        &self,
        name: &str,
        wanted: RequiredKind,
        reader: Option<&Arc<Connection>>,
    ) -> Result<DatasetHandle, FetchError> {
        record::note_dataset(name);
        if self.is_draining() {
            return Err(ReadError::Draining.into());
        }
        charge_request(reader)?;
        self.look_up(name, wanted, reader)
    }

    /// As `find`, for a request that is charged already.
    fn look_up(
        &self,
        name: &str,
        wanted: RequiredKind,
        reader: Option<&Arc<Connection>>,
    ) -> Result<DatasetHandle, FetchError> {
        let dataset = self.dataset_for(name, reader)?;
        wanted.check(dataset.name(), dataset.kind())?;
        Ok(DatasetHandle(dataset))
    }

    /// Counts the request as in flight; also returns its deadline.
    fn admit(
        &self,
        limits: &Limits,
        context: &RequestContext,
    ) -> Result<(Charge, Option<Instant>), FetchError> {
        let entered = match &context.connection {
            Some(connection) => connection.shares().requests.charge(1),
            None => self.callers().budgets().requests.charge(1),
        };
        let entered = entered.map_err(|refused| match &context.connection {
            Some(connection) if refused == Refused::CallerLimit => FetchError::PrincipalRequests {
                max: connection.shares().requests.most(),
            },
            Some(_) | None => FetchError::TooManyRequests {
                max: limits.requests_in_flight,
                own: refused != Refused::Budget,
            },
        })?;
        let arrived = context.arrived.unwrap_or_else(Instant::now);
        let deadline = within(limits, arrived, context.deadline);
        // Of a client that is late, before its principal is charged for the bytes.
        if context
            .deadline
            .is_some_and(|deadline| deadline <= Instant::now())
        {
            return Err(ReadError::DeadlineExceeded.into());
        }
        Ok((entered, deadline))
    }

    /// Charges the objects that the request is about to hold open, before the first one is opened.
    fn charge_objects(&self, context: &RequestContext, objects: usize) -> Result<Charge, FetchError> {
        let amount = u64::try_from(objects).unwrap_or(u64::MAX);
        let held = match &context.connection {
            Some(connection) => connection.shares().objects.charge(amount),
            None => self.callers().budgets().objects.charge(amount),
        };
        held.map_err(|refused| {
            let resource = match refused {
                Refused::Budget => Resource::OpenObjects,
                Refused::Caller | Refused::CallerLimit | Refused::Connection => Resource::CallerObjects,
            };
            ReadError::Overloaded { resource }.into()
        })
    }

    /// Counts a refusal of a request on this connection.
    pub(crate) fn count_rejection<T>(
        &self,
        result: Result<T, FetchError>,
        connection: Option<&Arc<Connection>>,
    ) -> Result<T, FetchError> {
        if let Err(error) = &result {
            self.inner.rejections.count(error, connection);
        }
        result
    }

    /// The error of a request whose deadline passed before it had arrived completely. Counts the refusal.
    pub(crate) fn deadline_rejection(&self, connection: Option<&Arc<Connection>>) -> FetchError {
        let error = ReadError::DeadlineExceeded.into();
        self.inner.rejections.count(&error, connection);
        error
    }

    /// As [`Self::fetch`], for a dataset that was looked up before. A response that also contains the
    /// dataset's shape or version must be read from that same dataset, even if a reload has replaced it
    /// since.
    ///
    /// # Errors
    /// As [`Self::fetch`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch`].
    pub async fn fetch_of(
        &self,
        dataset: &DatasetHandle,
        items: &Items<'_>,
        context: &RequestContext,
    ) -> Result<FetchResponse, FetchError> {
        record::note(|facts| facts.add_items(items.len()));
        let result = self
            .fetch_within(&self.limits(), dataset, items, context, ReadPhase::BeforeHead)
            .await;
        self.count_rejection(result, context.connection.as_ref())
    }

    /// Reads a later part of a response whose head has been sent. Like [`Self::fetch_of`], but without counting
    /// refusals, since the caller retries, and without charging its bytes.
    ///
    /// # Errors
    /// As [`Self::fetch`].
    ///
    /// # Cancel safety
    /// As [`Self::fetch`].
    pub async fn fetch_further(
        &self,
        dataset: &DatasetHandle,
        items: &Items<'_>,
        context: &RequestContext,
    ) -> Result<FetchResponse, FetchError> {
        self.fetch_within(&self.limits(), dataset, items, context, ReadPhase::AfterHead)
            .await
    }

    /// Every request from now on fails with `Draining`.
    pub fn start_draining(&self) {
        self.inner.draining.store(true, Ordering::Release);
    }

    /// Whether the daemon drains.
    pub fn is_draining(&self) -> bool {
        self.inner.draining.load(Ordering::Acquire)
    }

    /// The largest item that a response can hold: bounded by the limit, by the memory, and by the 32 bits of
    /// the lengths.
    pub fn item_bytes_max(&self) -> u64 {
        self.item_bytes_within(&self.limits())
    }

    fn item_bytes_within(&self, limits: &Limits) -> u64 {
        limits
            .response_bytes
            .min(self.inner.engine.response_bytes_max())
            .min(u64::from(u32::MAX))
    }

    /// The longest response of a request on this connection.
    fn response_max(&self, limits: &Limits, connection: Option<&Arc<Connection>>) -> ResponseMax {
        let any = ResponseMax::of_any(self.item_bytes_within(limits));
        connection.map_or(any, |own| any.or_less(own.account().response_max()))
    }

    async fn fetch_within(
        &self,
        limits: &Limits,
        DatasetHandle(dataset): &DatasetHandle,
        items: &Items<'_>,
        context: &RequestContext,
        phase: ReadPhase,
    ) -> Result<FetchResponse, FetchError> {
        check(*items, limits)?;
        let (_in_flight, deadline) = match phase {
            ReadPhase::BeforeHead => {
                let (in_flight, deadline) = self.admit(limits, context)?;
                (Some(in_flight), deadline)
            }
            // A request in flight ends with its head. What follows is limited by the memory and the queue.
            ReadPhase::AfterHead => (None, within(limits, Instant::now(), context.deadline)),
        };
        let max = self.response_max(limits, context.connection.as_ref());
        // The deadline holds in every phase of the batch.
        let late = || FetchError::from(ReadError::DeadlineExceeded);
        let (batch, etags, _held);
        if let Items::Objects { names, .. } = items {
            _held = Some(self.charge_objects(context, names.len())?);
            // Boxed: it is larger than all other state of a request.
            let planning = Box::pin(plan_objects(dataset, items, max));
            (batch, etags) = timeout_at(deadline, planning).await.ok_or_else(late)?;
        } else {
            (batch, etags, _held) = (plan(dataset, items, max), Vec::new(), None);
        }
        let length = batch.data_bytes();
        if length > max.bytes {
            return Err(ReadError::ResponseTooLarge { length, max }.into());
        }
        let first_failed = |errors: &[ItemError]| match errors.first() {
            Some(first) if context.fail_fast => {
                record::note(|facts| facts.add_failed(1));
                Err(FetchError::of_item(first, items.len()))
            }
            Some(_) | None => Ok(()),
        };
        // Without a read, if it is known before.
        first_failed(batch.errors())?;
        if phase == ReadPhase::BeforeHead {
            charge_bytes(context, length)?;
        }
        let options = SubmitOptions {
            deadline,
            account: context
                .connection
                .as_ref()
                .map(|connection| Arc::clone(connection.account())),
        };
        let result = match self.inner.engine.submit(batch, options) {
            Ok(ticket) => timeout_at(deadline, ticket).await.ok_or_else(late)?,
            Err(error) => {
                if phase == ReadPhase::BeforeHead {
                    give_back_bytes(context, length);
                }
                Err(error)
            }
        };
        let fetched = result?;
        match items {
            Items::Objects { names, .. } => forget_lost(dataset, names, &fetched.errors),
            // Before its errors, which are of another version.
            Items::Pinned { object, lengths, .. } if object.has_changed(&fetched.errors) => {
                dataset.forget_object(object.name());
                if phase == ReadPhase::BeforeHead {
                    // Not kept from above, which would enlarge every request's state.
                    give_back_bytes(context, lengths.iter().sum());
                }
                return Err(FetchError::Changed);
            }
            Items::Pinned { .. } | Items::Blocks(_) | Items::Vectors(_) | Items::Ranges { .. } => {}
        }
        first_failed(&fetched.errors)?;
        record::note(|facts| {
            facts.add_read(&fetched);
            facts.add_failed(fetched.errors.len());
        });
        count_bytes(context, fetched.data.len());
        Ok(FetchResponse { fetched, etags })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ringfetch_engine::config::{BackendKind, DirectIo, EngineConfig};
    use ringfetch_engine::dataset::{DatasetSpec, KindSpec};
    use std::time::Duration;

    /// A fetcher without datasets, with these limits.
    pub(crate) fn without_datasets(limits: Limits) -> Fetcher {
        serving(Vec::new(), limits)
    }

    pub(crate) fn objects_of(directory: &std::path::Path) -> Arc<Dataset> {
        let kind = KindSpec::objects(16, Duration::from_secs(60));
        let spec = DatasetSpec::new("objects", directory, kind, DirectIo::Off);
        Arc::new(Dataset::open(&spec).unwrap())
    }

    pub(crate) fn serving(datasets: Vec<Arc<Dataset>>, limits: Limits) -> Fetcher {
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
        // Scenario: a caller opens an object again and again and reads nothing, on two connections; then it
        // requests a batch, and another caller requests an object and the largest batch. Expectation: the
        // first caller is refused because of its own share, both times; the other is served; and what is
        // released can be charged again.
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), "bytes").unwrap();
        let limits = Limits::default();
        let most = limits.items_per_request as usize;
        let fetcher = serving(vec![objects_of(directory.path())], limits);
        let of = |address: &str| RequestContext {
            connection: Some(fetcher.callers().connect(address.parse().unwrap(), u64::MAX)),
            ..RequestContext::default()
        };
        let own_share = FetchError::Read(ReadError::Overloaded {
            resource: Resource::CallerObjects,
        });
        let batch = async |context: RequestContext, objects: usize| {
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
                match fetcher
                    .object("objects", "a", Purpose::Read, &greedy[held.len() % 2])
                    .await
                {
                    Ok(version) => held.push(version),
                    Err(refused) => break refused,
                }
            };
            assert_eq!(refused, own_share);
            assert!(held.len() > most / 2, "{}", held.len());
            assert_eq!(batch(greedy[0].clone(), most).await, Err(own_share));
            let other = of("127.0.0.3");
            fetcher
                .object("objects", "a", Purpose::Read, &other)
                .await
                .unwrap();
            assert_eq!(batch(other, most).await, Ok(()));
            held.clear();
            assert_eq!(batch(greedy[1].clone(), most).await, Ok(()));
        });
    }
}
