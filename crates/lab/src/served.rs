//! A running daemon that reads a study's data: finds it, calls it, and switches its backends.

use crate::Context;
use crate::args::OfDaemon;
use crate::drive::daemon::threads;
use crate::error::LabError;
use crate::job::ReadAt;
use crate::material::{DataFile, open};
use crate::study::{Key, pair};
use ringfetch_client::{
    AdminClient, Backend, Builder, ByteRange, Client, Code, Dataset, DatasetStatus, Error, Kind, Metric,
    ObjectPart, Request, RetryPolicy, ScoreRequest, Status,
};
use ringfetch_command::connect::remedy;
use ringfetch_host::process::cpu_time;
use ringfetch_pace::trace::TraceEntries;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The client takes no more.
const CONNECTIONS_MAX: usize = 1024;
/// Most names of objects to read: the first ones.
pub(crate) const OBJECTS_MAX: usize = 10_000;
/// Bytes at either end that tell one file from another.
const COMPARED_BYTES: u64 = 4096;
/// For calls that are not measured.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Makes clients of a daemon, with the caller's TLS and credentials.
#[derive(Clone)]
pub struct Clients(Arc<dyn Fn(&str) -> Builder + Send + Sync>);

impl Clients {
    /// `make` gets the address, such as `https://db1:7410`.
    pub fn new(make: impl Fn(&str) -> Builder + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    fn builder(&self, url: &str, timeout: Duration) -> Builder {
        (self.0)(url).timeout(timeout).retry(RetryPolicy::none())
    }

    /// Must be called within a runtime.
    fn client(&self, url: &str, timeout: Duration) -> Result<Client, Error> {
        self.builder(url, timeout).connect_lazy()
    }
}

impl Default for Clients {
    fn default() -> Self {
        Self::new(|url| Client::builder(url))
    }
}

/// A builder may hold a token.
impl std::fmt::Debug for Clients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Clients")
    }
}

/// What an item of a request is.
#[derive(Debug)]
pub(crate) enum Items {
    /// Byte ranges, as in the read.
    Ranges,
    /// Blocks or vectors by number.
    Numbers,
    /// Objects by name.
    Objects(Vec<String>),
    /// The entries of a trace, in its order.
    Trace(TraceEntries),
}

/// A dataset of a daemon.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) url: String,
    pub(crate) dataset: Dataset,
    pub(crate) items: Items,
    /// Connections that requests share, if as many are in flight.
    pub(crate) connections: usize,
    pid: Option<u32>,
    /// What the daemon's operator sees of how it is read.
    read_by: String,
    clients: Clients,
}

impl Served {
    /// The dataset that the arguments name; `None`: they name no daemon.
    pub(crate) fn find(args: &OfDaemon, context: &Context) -> Result<Option<Self>, LabError> {
        let (Some(url), Some(name)) = (&args.server, &args.dataset) else {
            return Ok(None);
        };
        let dataset = wait("server", url, async {
            context.clients.client(url, TIMEOUT)?.get_dataset(name).await
        })?;
        // Without the address, which may have a password.
        let mut read_by = "unknown: the service of --admin does not list this dataset".to_owned();
        // One connection uses one of the daemon's cores.
        let mut connections = threads();
        if let Some((backend, cores)) = backend_and_cores(context, &dataset) {
            read_by = format!("{backend}, cores: {cores}");
            connections = usize::try_from(cores)
                .unwrap_or(usize::MAX)
                .clamp(1, CONNECTIONS_MAX);
        }
        let served = Self {
            url: url.clone(),
            read_by,
            dataset,
            items: Items::Ranges,
            connections: args.connections.map_or(connections, usize::from),
            pid: args.server_pid,
            clients: context.clients.clone(),
        };
        if let (Some(pid), None) = (args.server_pid, served.cpu()) {
            return Err(LabError::Usage(format!(
                "--server-pid: there is no process {pid}"
            )));
        }
        Ok(Some(served))
    }

    pub(crate) fn objects(&self) -> Result<Vec<String>, LabError> {
        use futures_util::TryStreamExt as _;
        wait("server", &self.url, async {
            let client = self.clients.client(&self.url, TIMEOUT)?;
            let objects = client.list_objects(&self.dataset.name);
            let mut objects = std::pin::pin!(objects);
            let mut names = Vec::new();
            while let Some(object) = objects.try_next().await? {
                names.push(object.name);
                if names.len() == OBJECTS_MAX {
                    break;
                }
            }
            Ok(names)
        })
    }

    /// For the report, and to recognise a run.
    pub(crate) fn settings_of(served: Option<&Self>) -> Key {
        let Some(served) = served else {
            return vec![pair("daemon", "none")];
        };
        let counted = match served.pid {
            Some(_) => "counted",
            None => "not counted: no --server-pid",
        };
        let (connections, threads) = (served.connections, threads().min(served.connections));
        let most = format!(
            "{connections}, or as many as requests in flight if those are fewer; threads that drive them: {threads}"
        );
        vec![
            pair("daemon", served.shown()),
            pair("daemon's backend", &served.read_by),
            pair("daemon's CPU time", counted),
            pair("connections", most),
        ]
    }

    /// The dataset and its daemon.
    pub(crate) fn shown(&self) -> String {
        let (dataset, url) = (&self.dataset, &self.url);
        format!("{} of {url}, kind {}", dataset.name, dataset.kind.as_str())
    }

    /// That the dataset is not this file, and how that shows.
    pub(crate) fn unlike(&self, file: &Path, how: &str) -> String {
        let (shown, file) = (self.shown(), file.display());
        format!("--dataset: {shown}: this study needs {file}{how}")
    }

    /// Whether this file, as far as the dataset goes, begins and ends as the dataset does there.
    pub(crate) fn has_ends_of(&self, data: &DataFile) -> Result<bool, LabError> {
        let all = self.dataset.length_bytes.min(data.length_bytes);
        let file = open(&data.path)?;
        let length = all.min(COMPARED_BYTES);
        let ends = [0, all - length].map(|offset| ByteRange::new(offset, length));
        let answer = wait("server", &self.url, async {
            let client = self.clients.client(&self.url, TIMEOUT)?;
            client.fetch(Request::ranges(&self.dataset.name, ends)).await
        })?;
        for (end, item) in ends.iter().zip(answer.items().iter()) {
            let served = item.map_err(|error| LabError::at("--server", error))?;
            let mut found = vec![0; served.len()];
            let read = file.read_exact_at(&mut found, end.offset);
            if read.is_err() || found != *served {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A client for at most so many calls at a time, with all of its connections open.
    pub(crate) async fn connect(
        &self,
        timeout: Duration,
        connections: usize,
        calls: usize,
    ) -> Result<Client, LabError> {
        let builder = self.clients.builder(&self.url, timeout);
        let client = builder.connections(connections).max_in_flight(calls).connect();
        client.await.map_err(|error| told("server", &self.url, &error))
    }

    /// A call for these reads.
    pub(crate) fn request(&self, reads: &[ReadAt]) -> Request {
        let name = self.dataset.name.as_str();
        let numbers = || reads.iter().map(|read| read.offset);
        let places = || numbers().map(|number| usize::try_from(number).unwrap_or(usize::MAX));
        let by_number = |numbers: Vec<u64>| match self.dataset.kind {
            Kind::Vectors => Request::vectors(name, numbers),
            Kind::Blocks | Kind::Objects | Kind::Unknown | _ => Request::blocks(name, numbers),
        };
        let by_range = |ranges: Vec<(u64, u64)>| {
            let ranges = ranges.iter().map(|range| ByteRange::new(range.0, range.1));
            Request::ranges(name, ranges.collect::<Vec<_>>())
        };
        match &self.items {
            Items::Ranges => {
                let ranges = reads.iter().map(|read| (read.offset, read.length as u64));
                by_range(ranges.collect())
            }
            Items::Numbers => by_number(numbers().collect()),
            Items::Trace(TraceEntries::Items(items)) => {
                by_number(places().filter_map(|place| items.get(place).copied()).collect())
            }
            Items::Trace(TraceEntries::Ranges(listed)) => {
                by_range(places().filter_map(|place| listed.get(place).copied()).collect())
            }
            Items::Objects(names) => {
                let parts = places().filter_map(|place| names.get(place).map(ObjectPart::whole));
                Request::objects(name, parts.collect::<Vec<_>>())
            }
        }
    }

    /// A call for the scores of one query.
    pub(crate) fn scores(&self, query: &[f32], reads: &[ReadAt], limit: usize) -> ScoreRequest {
        let ids = reads.iter().map(|read| read.offset / read.length.max(1) as u64);
        let (ids, limit) = (ids.collect::<Vec<_>>(), u32::try_from(limit).unwrap_or(u32::MAX));
        ScoreRequest::new(&self.dataset.name, Metric::Dot, limit).query(query, ids)
    }

    /// Whether its process was named.
    pub(crate) fn has_process(&self) -> bool {
        self.pid.is_some()
    }

    /// CPU time of the daemon so far, user and system. `None`: its process is unknown.
    pub(crate) fn cpu(&self) -> Option<Duration> {
        cpu_time(self.pid?)
    }
}

/// The daemon's state, by its admin service.
fn status(context: &Context) -> Result<Status, LabError> {
    wait("admin", &context.admin, async {
        let client = context.clients.client(&context.admin, TIMEOUT)?;
        AdminClient::from(client).status().await
    })
}

/// What reads a dataset. `None`: the admin service does not say, or not of this dataset.
fn backend_and_cores(context: &Context, dataset: &Dataset) -> Option<(Backend, u32)> {
    let status = status(context).ok()?;
    let mut known = status.datasets.iter();
    let known = known.find(|known| known.dataset.as_ref() == Some(dataset))?;
    Some((known.read_path.as_ref()?.backend, status.cores))
}

/// A daemon whose dataset is switched between backends. Its previous backend is restored by [`Flip::back`],
/// or on drop.
#[derive(Debug)]
pub(crate) struct Flip {
    clients: Clients,
    admin: String,
    dataset: String,
    /// Files that make up the dataset; 0 for objects.
    pub(crate) files: u32,
    /// The dataset's own backend; `None`: it used the engine's.
    pub(crate) had: Option<Backend>,
    flipped: AtomicBool,
}

impl Flip {
    /// Records the backend to restore.
    pub(crate) fn prepare(context: &Context, dataset: &str) -> Result<Self, LabError> {
        let (status, admin) = (status(context)?, &context.admin);
        let named =
            |status: &&DatasetStatus| status.dataset.as_ref().is_some_and(|known| known.name == dataset);
        let found = status.datasets.iter().find(named);
        let path = found.and_then(|status| status.read_path.clone()).ok_or_else(|| {
            LabError::Usage(format!(
                "--admin: {admin} does not serve {dataset}: is it the daemon of --server?"
            ))
        })?;
        Ok(Self {
            clients: context.clients.clone(),
            admin: admin.clone(),
            dataset: dataset.to_owned(),
            files: found.map_or(0, |status| status.files),
            had: path.own_backend.then_some(path.requested),
            flipped: AtomicBool::new(false),
        })
    }

    /// Switches the dataset to a backend; returns the one that reads it then.
    pub(crate) fn to(&self, backend: Backend) -> Result<Backend, String> {
        self.flipped.store(true, Ordering::Relaxed);
        self.set(Some(backend)).map_err(|error| error.to_string())
    }

    /// Restores the dataset's backend.
    ///
    /// # Errors
    /// The failure, with the command that does it by hand.
    pub(crate) fn back(&self) -> Result<(), LabError> {
        if !self.flipped.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let by_hand = match self.had {
            Some(backend) => format!("set {backend}"),
            None => "clear".to_owned(),
        };
        let (admin, dataset) = (&self.admin, &self.dataset);
        self.set(self.had).map(drop).map_err(|error| {
            LabError::Failed(format!(
                "{error}; the daemon may still have the last backend: \
                 ringfetch backend {by_hand} --dataset {dataset} --admin {admin}"
            ))
        })
    }

    fn set(&self, backend: Option<Backend>) -> Result<Backend, LabError> {
        let switched = wait("admin", &self.admin, async {
            let admin = AdminClient::from(self.clients.client(&self.admin, TIMEOUT)?);
            match backend {
                Some(backend) => admin.set_backend(backend, Some(&self.dataset)).await,
                None => admin.clear_backend(&self.dataset).await,
            }
        })?;
        Ok(switched.backend)
    }
}

impl Drop for Flip {
    fn drop(&mut self) {
        // `back` has already reported an error where that was possible.
        let _returned = self.back();
    }
}

/// Calls the daemon at the address of this option, on a new runtime.
fn wait<T>(option: &str, url: &str, call: impl Future<Output = Result<T, Error>>) -> Result<T, LabError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| LabError::at("a runtime", error))?;
    runtime.block_on(call).map_err(|error| told(option, url, &error))
}

fn told(option: &str, url: &str, error: &Error) -> LabError {
    let problem = format!("--{option}: {url}: {error}");
    match error {
        Error::Transport {
            message, sent: false, ..
        } => {
            let remedy = remedy(message, option, url);
            LabError::Failed(format!("--{option}: cannot reach {url} ({message}); {remedy}"))
        }
        Error::Transport { .. } | Error::DeadlineExceeded => LabError::Failed(problem),
        // Does not show the address: it may have a password.
        Error::Invalid {
            field: "url",
            problem,
            ..
        } => LabError::Usage(format!("--{option}: {problem}")),
        _ if error.code() == Some(Code::NotFound) => LabError::Usage(format!("--dataset: {url}: {error}")),
        Error::Status(_)
        | Error::Protocol { .. }
        | Error::StreamBroken { .. }
        | Error::VersionLost { .. }
        | Error::Invalid { .. }
        | _ => LabError::Usage(problem),
    }
}
