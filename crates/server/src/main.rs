//! `ringfetchd`: the composition root. Starts configuration, datasets, engine, services and listeners, and drains them.
//!
//! Exit codes: 0 after a clean drain; 1 for a failure at run time; 2 for a mistake in the configuration, before any port is
//! bound; 3 if this host refuses what the configuration asks for. `cli.rs` documents them for users.

mod allocator;
mod check_config;
mod cli;
mod healthcheck;
mod manual;
mod start_errors;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use ringfetch_command::arguments;
use ringfetch_command::table::printable_lines;
use ringfetch_engine::blocking::BlockingPool;
use ringfetch_engine::config::{BackendKind, EngineConfig};
use ringfetch_engine::dataset::{Dataset, DatasetSpec};
use ringfetch_engine::engine::{Engine, StartError};
use ringfetch_host::View;
use ringfetch_host::block::{Device, Tags};
use ringfetch_server::access::Access;
use ringfetch_server::access_log::AccessLog;
use ringfetch_server::catalogue::Catalogue;
use ringfetch_server::config::{self, Base, Config, Inputs};
use ringfetch_server::fetch::Fetcher;
use ringfetch_server::key_file::FileError;
use ringfetch_server::lifecycle::{self, EndWhileStarting, Lifecycle, ShutdownSignals};
use ringfetch_server::listener::{
    self, Addresses, AllowedHosts, BoundSocket, ConnectionLimits, CorePool, Listener, Port, Role,
};
use ringfetch_server::reconfigure::{self, Reconfigurer, ReconfigurerParts};
use ringfetch_server::record::Recorder;
use ringfetch_server::rpc_metrics::RpcMetrics;
use ringfetch_server::sd_notify::Notifier;
use ringfetch_server::spans::{Spans, SpansError};
use ringfetch_server::telemetry::Telemetry;
use ringfetch_server::tls::Tls;
use ringfetch_server::{admin, demo, grpc, host_memory, http, log_output};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};

use cli::{Cli, Command};
use start_errors::{ConfigError, HostError, StartErrors};

const EXIT_FAILED: u8 = 1;
const EXIT_CONFIG: u8 = 2;
/// What may pass: a port in use, an unavailable engine, files that are being replaced, a clock that is not set. Distinct from a
/// crash.
const EXIT_HOST: u8 = 3;

/// Sends the last spans.
static FLUSHER: BlockingPool = BlockingPool::new("rf-flush", 1);

fn main() -> ExitCode {
    let cli = Cli::of(std::env::args_os()).unwrap_or_else(|error| arguments::exit("ringfetchd", &error));
    let outcome = match cli.command.clone().unwrap_or(Command::Run) {
        Command::Run => run(&cli.inputs(), cli.addresses_file.as_deref()),
        Command::CheckConfig { open } => check_config::run(&cli.inputs(), open),
        Command::PrintConfig => print_config(&cli.inputs()),
        Command::Healthcheck => check_health(&cli.inputs()),
        Command::MakeDemo => make_demo(&cli.demo_dir),
        Command::Completions { shell } => print(&manual::completions(shell)),
        Command::Man { directory } => manual::write_pages(&directory),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // To stderr for people: the log may be JSON, or not set up yet.
            log_output::tell(&printable_lines(&format!("{error:#}")));
            ExitCode::from(exit_code(&error))
        }
    }
}

/// A signal leaves a part that the next run removes.
fn make_demo(directory: &Path) -> anyhow::Result<()> {
    check_descriptors()?;
    lifecycle::end_on_signal().context("catching signals")?;
    Ok(demo::prepare(directory)?)
}

/// Distinguishes mistakes in the configuration, problems of the host, and failures.
fn exit_code(error: &anyhow::Error) -> u8 {
    let demo_error = error.downcast_ref::<demo::DemoError>();
    if error.is::<ConfigError>() || demo_error.is_some_and(|error| !error.is_temporary) {
        EXIT_CONFIG
    } else if error.is::<HostError>()
        || error.is::<listener::BindError>()
        || error.is::<StartError>()
        || matches!(error.downcast_ref(), Some(SpansError::Thread))
        || error.chain().any(is_out_of_descriptors)
    {
        EXIT_HOST
    } else {
        EXIT_FAILED
    }
}

fn is_out_of_descriptors(error: &(dyn std::error::Error + 'static)) -> bool {
    let errno = error.downcast_ref::<io::Error>().and_then(Errno::from_io_error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}

fn load(inputs: &Inputs) -> anyhow::Result<config::Loaded> {
    config::load(inputs).map_err(|problems| {
        let text = problems.to_string();
        if problems.is_refused_by_host() {
            HostError(text).into()
        } else {
            ConfigError(text).into()
        }
    })
}

fn print(text: &str) -> anyhow::Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        // A reader that leaves early, such as `head`, has what it wanted.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("writing to stdout"),
    }
}

fn print_config(inputs: &Inputs) -> anyhow::Result<()> {
    print(&config::to_yaml(&load(inputs)?.settings))
}

/// The daemon may run with an older configuration than the current file. If the file has become invalid, the
/// daemon is still healthy as long as it responds at the address that the valid parts of file, environment
/// and flags give.
fn check_health(inputs: &Inputs) -> anyhow::Result<()> {
    let ask = |config: Config| {
        let tls = config.tls.filter(|tls| tls.covers("http"));
        healthcheck::ask(config.http_listen, tls.as_ref())
    };
    let line = match load(inputs) {
        Ok(loaded) => ask(loaded.config).map_err(anyhow::Error::msg)?,
        Err(mistake) => {
            let config =
                config::despite_mistakes(inputs).ok_or_else(|| anyhow::Error::msg(mistake.to_string()))?;
            let invalid = format!("the current configuration is invalid: {mistake}");
            match ask(config) {
                Ok(line) => format!("{line}, but {invalid}"),
                // Not the exit code of a configuration mistake: orchestrators know only 0 and 1.
                Err(nobody) => anyhow::bail!("{nobody}; {invalid}"),
            }
        }
    };
    print(&format!("{line}\n"))
}

/// Memory beyond the host's would end in the OOM killer.
fn check_memory(config: &Config) -> Result<(), ConfigError> {
    host_memory::check(config.engine.memory_budget_bytes, &View::real()).map_err(ConfigError)
}

fn load_tls(config: &Config) -> Result<Option<Tls>, FileError> {
    config.tls.as_ref().map(Tls::load).transpose()
}

fn load_access(config: &Config) -> Result<Option<Access>, FileError> {
    let has_client_ca = config.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    Access::load(&config.access, has_client_ca)
}

/// The three ports, bound.
struct Ports {
    grpc: BoundSocket,
    http: BoundSocket,
    admin: Option<BoundSocket>,
}

impl Ports {
    fn bind(config: &Config) -> anyhow::Result<Self> {
        let mut errors = StartErrors::default();
        let mut bind = |key, address| errors.of_host(listener::bind(key, address));
        let grpc = bind("grpc.listen", config.grpc_listen);
        let http = bind("http.listen", config.http_listen);
        let admin = match config.admin_listen {
            Some(address) => bind("admin.listen", address).map(Some),
            None => Some(None),
        };
        match (grpc, http, admin) {
            (Some(grpc), Some(http), Some(admin)) => Ok(Self { grpc, http, admin }),
            _ => Err(errors.into_error()),
        }
    }

    fn addresses(&self) -> Addresses {
        let admin = self.admin.as_ref().map(BoundSocket::address);
        Addresses {
            grpc: self.grpc.address(),
            http: self.http.address(),
            admin,
        }
    }
}

fn run(inputs: &Inputs, addresses_file: Option<&Path>) -> anyhow::Result<()> {
    allocator::return_memory_on_own_thread();
    let loaded = load(inputs)?;
    let config = &loaded.config;
    let telemetry = Telemetry::start(&config.log)?;
    raise_open_files();
    let runtime = runtime()?;
    // Before anything slow: a SIGHUP during startup must not end the daemon but wait until it serves.
    let hangups = {
        let _inside = runtime.enter();
        lifecycle::survive_file_size_limit().context("catching SIGXFSZ")?;
        signal(SignalKind::hangup()).context("catching SIGHUP")?
    };
    let notifier = Notifier::from_environment().map(Arc::new);
    let starting = EndWhileStarting::watch(notifier.clone()).context("catching signals")?;
    let opening = |dataset: &DatasetSpec| {
        let files: Vec<_> = dataset.paths.iter().map(|path| path.display()).collect();
        starting.begins(format!(
            "opening dataset {}: {}",
            dataset.name,
            config::listed(&files, ", ")
        ));
    };
    starting.begins("reading the files of tls and access, and opening the access log".to_owned());
    let mut errors = StartErrors::default();
    let memory = errors.of_config(check_memory(config));
    let limits = errors.of_host(host_memory::check_process_limits(
        config.engine.memory_budget_bytes,
    ));
    let tls = errors.of_key_file(load_tls(config));
    let access_log = errors.of_access_log(config, |log| AccessLog::start(log, telemetry.registry()));
    let access = errors.of_key_file(load_access(config));
    let addresses = addresses_file.map_or(Some(()), |path| {
        let (flag, remedy) = (
            format!("--addresses-file {}", path.display()),
            "name a file in a directory that the daemon may write to",
        );
        errors.of_file(Addresses::check(path), &flag, remedy)
    });
    // Ports before anything slow, so that a port in use is reported at once. Only datasets come first,
    // because a file that cannot be opened is a configuration mistake, which is reported before any port is
    // bound; the demo first has to make its files.
    let opened = match &inputs.base {
        Base::File(_) => errors.open(&config.datasets, opening).map(Some),
        Base::Demo(_) => Some(None),
    };
    let (Some(()), Some(()), Some(tls), Some(access_log), Some(access), Some(()), Some(opened)) =
        (memory, limits, tls, access_log, access, addresses, opened)
    else {
        return Err(errors.into_error());
    };
    // The guard lives to the end, so that the last lines are written.
    let (access_log, _flushed) = access_log.unzip();
    let ports = Ports::bind(config)?;
    let catalogue = match (opened, &inputs.base) {
        (Some(catalogue), _) => catalogue,
        (None, base) => {
            if let Base::Demo(directory) = base {
                starting.begins(format!("making the demo's files in {}", directory.display()));
                demo::prepare(directory)?;
            }
            match errors.open(&config.datasets, opening) {
                Some(catalogue) => catalogue,
                None => return Err(errors.into_error()),
            }
        }
    };
    starting.begins("starting the engine".to_owned());
    let datasets = catalogue.datasets();
    let engine = Engine::start(&EngineConfig {
        device_tags: device_tags(&datasets, config.engine.cores),
        ..config.engine.clone()
    })?;
    engine.register_metrics(telemetry.registry())?;
    let fetcher = Fetcher::new(engine, datasets, config.limits);
    reconfigure::start_own_backends(&fetcher, config)?;
    log_facts(config, &fetcher);
    let connection_limits = ConnectionLimits::new(&config.limits, config.engine.connection_bytes);
    connection_limits.set_timeouts(&config.timeouts);
    let parts = ReconfigurerParts {
        inputs: inputs.clone(),
        fetcher,
        lifecycle: Lifecycle::new(),
        telemetry,
        connection_limits,
        tls,
        access_log,
        access,
    };
    let served = runtime.block_on(serve(
        parts,
        loaded,
        catalogue,
        ports,
        (starting, hangups),
        notifier,
        addresses_file,
    ));
    // A look-up of the collector's name that gets no answer must not keep the process alive.
    runtime.shutdown_background();
    served
}

async fn serve(
    parts: ReconfigurerParts,
    loaded: config::Loaded,
    catalogue: Catalogue,
    ports: Ports,
    (starting, hangups): (EndWhileStarting, Signal),
    notifier: Option<Arc<Notifier>>,
    addresses_file: Option<&Path>,
) -> anyhow::Result<()> {
    let ReconfigurerParts {
        inputs,
        fetcher,
        lifecycle,
        telemetry,
        connection_limits,
        tls,
        access_log,
        access,
    } = parts.clone();
    let engine = fetcher.engine().clone();
    let registry = telemetry.registry();
    fetcher.register_metrics(registry)?;
    if let Some(tls) = &tls {
        tls.register_metrics(registry)?;
        tokio::spawn(tls.clone().watch());
    }
    let start_spans = |config| Spans::start(config, registry);
    let spans = loaded.config.tracing.as_ref().map(start_spans).transpose()?;
    if let Some(access) = &access {
        access.register_metrics(registry)?;
        tokio::spawn(access.clone().watch());
    }
    let tls_config = loaded.config.tls.clone();
    let tls_of = |port| {
        tls.clone()
            .filter(|_| tls_config.as_ref().is_some_and(|tls| tls.covers(port)))
    };
    let http_hosts = loaded.config.http_hosts.clone();
    let hosts = |bound: &BoundSocket| Some(AllowedHosts::of(bound.address(), http_hosts.as_deref()));
    let reconfigurer = Reconfigurer::new(parts, loaded, catalogue)?;
    let recorder = Recorder::new(access_log, spans.clone());
    let rpc = RpcMetrics::new(registry)?;
    let grpc = grpc::service(fetcher.clone(), lifecycle.clone(), rpc.clone());
    let http = http::service(fetcher.clone(), lifecycle.clone(), rpc.clone(), registry.clone());
    let grpc_fast_path = grpc::fast_path(fetcher.clone(), lifecycle.clone(), rpc.clone());
    let http_fast_path = http::fast_path(fetcher.clone(), rpc.clone());
    let admin = admin::service(
        fetcher.clone(),
        lifecycle.clone(),
        telemetry.clone(),
        rpc.clone(),
        reconfigurer.clone(),
    );

    let addresses = ports.addresses();
    let mut served = vec![
        Port {
            transport: "grpc",
            bound: ports.grpc,
            http2_only: true,
            router: grpc,
            fast_path: Some(grpc_fast_path),
            // Browsers use HTTP/2 only with TLS, whose certificate has to match the host.
            hosts: None,
            tls: tls_of("grpc"),
            access: access.clone(),
            role: Role::Data,
            recorder: recorder.clone(),
            rpc: rpc.clone(),
        },
        Port {
            transport: "http",
            hosts: hosts(&ports.http),
            tls: tls_of("http"),
            access: access.clone(),
            role: Role::DataAndProbes(http::is_operation),
            recorder: recorder.clone(),
            rpc: rpc.clone(),
            bound: ports.http,
            http2_only: false,
            router: http,
            fast_path: Some(http_fast_path),
        },
    ];
    served.extend(ports.admin.map(|bound| Port {
        transport: "admin",
        hosts: hosts(&bound),
        tls: tls_of("admin"),
        access,
        role: Role::Control,
        recorder,
        rpc,
        bound,
        http2_only: true,
        router: admin,
        fast_path: None,
    }));

    let signals = ShutdownSignals::install().context("catching signals")?;
    drop(starting);
    let cores = CorePool::new(&fetcher, registry)?;
    let listeners: Vec<Listener> = served
        .into_iter()
        .map(|port| Listener::open_port(port, &cores, &connection_limits, &lifecycle))
        .collect::<Result<_, _>>()?;
    let lame_duck = {
        let reconfigurer = reconfigurer.clone();
        move || reconfigurer.lame_duck()
    };
    tokio::spawn(signals.drain_on_signal(lifecycle.clone(), lame_duck));
    tokio::spawn(lifecycle::watch_engine(engine.clone(), lifecycle.clone()));
    tokio::spawn(lifecycle::tend_engine(engine.clone()));
    lifecycle.start_serving();
    tokio::spawn(reconfigurer.clone().reload_on_signal(hangups));
    if let Some(path) = addresses_file {
        addresses
            .write(path)
            .with_context(|| format!("--addresses-file {}", path.display()))?;
    }
    let notifier = notifier
        .map(|notifier| tokio::spawn(notifier.run(engine.clone(), lifecycle.clone(), reconfigurer.clone())));
    if let Base::Demo(_) = inputs.base {
        // A closed stdout is no reason to stop serving.
        let _stdout_is_gone = print(&demo::greeting(
            &fetcher.datasets(),
            &engine.backend(),
            &addresses,
        ));
    }

    let remaining = futures_util::future::join_all(listeners.into_iter().map(Listener::serve)).await;
    let drain_timeout = reconfigurer.drain_timeout();
    let drained = lifecycle::drain(&fetcher, &lifecycle, remaining, drain_timeout).await;
    if let Some(notifier) = notifier {
        // Sends STOPPING before the process exits, however short the drain was.
        let _ended = notifier.await;
    }
    if let Some(spans) = spans {
        // On another thread: the connection to the collector runs on this runtime.
        if let Ok(flushed) = FLUSHER.run(move || spans.flush()) {
            let _flushed = flushed.await;
        }
    }
    if let Some(reason) = lifecycle.failure() {
        anyhow::bail!("{reason}");
    }
    if !drained.is_clean() {
        let timeout_ms = u64::try_from(drain_timeout.as_millis()).unwrap_or(u64::MAX);
        let (connections, reads) = (drained.connections, drained.reads);
        tracing::error!(
            connections,
            reads,
            timeout_ms,
            "the drain aborted connections or reads"
        );
        anyhow::bail!(
            "shutdown.drain_timeout_ms ({timeout_ms}) passed with {connections} connections open whose clients had not \
             received all of their answers, and {reads} reads in flight"
        );
    }
    tracing::info!("drained");
    Ok(())
}

/// Tokio panics if it cannot get its descriptors for signals, at most eight in all, so try to open as many first; and
/// those that the start or the demo needs next, whose errors have no remedy.
fn check_descriptors() -> anyhow::Result<()> {
    let tried: Result<Vec<_>, _> = (0..6).map(|_| UnixStream::pair()).collect();
    tried.context("out of file descriptors: raise the limit (ulimit -n, LimitNOFILE)")?;
    Ok(())
}

/// The main thread's runtime, which accepts connections and handles signals.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    check_descriptors()?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")
}

/// The devices' tags: rings that share them must stay below them (TRAPS 15).
fn device_tags(datasets: &[Arc<Dataset>], rings: u32) -> Vec<Tags> {
    // Thousands of files have a few devices.
    let numbers: BTreeSet<u64> = datasets.iter().flat_map(|dataset| dataset.devices()).collect();
    let tags = |number| Device::numbered(&View::real(), number)?.0.tags_for(rings);
    numbers.into_iter().filter_map(tags).collect()
}

/// Connections and open objects need descriptors. The soft limit is 1024 on most systems, for the sake of
/// programs that use select(2).
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    ) {
        tracing::warn!(%error, limit = limit.current, "cannot raise the limit of open files");
    }
}

/// Logs the facts that operators need first.
fn log_facts(config: &Config, fetcher: &Fetcher) {
    let engine = fetcher.engine();
    let status = engine.backend();
    let described: Vec<String> = fetcher
        .datasets()
        .iter()
        .map(|dataset| {
            let (name, direct) = (dataset.name(), dataset.direct());
            let alignment = direct.offset_alignment_bytes;
            match (engine.backend_of(dataset).backend, direct.direct) {
                (BackendKind::Mmap, _) => format!("{name}: buffered (a mapping)"),
                (_, true) => format!("{name}: direct, aligned to {alignment} ({})", direct.reason),
                (_, false) => format!("{name}: buffered ({})", direct.reason),
            }
        })
        .collect();
    let queue_depth = engine.shards().first().map_or(0, |shard| shard.queue_depth);
    if status.is_fallback() {
        tracing::warn!(requested = %status.requested, backend = %status.backend, reason = status.reason, "fallback");
    }
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        cores = engine.core_count(),
        backend = %status.backend,
        requested = %status.requested,
        reason = status.reason,
        datasets = described.join("; "),
        queue_depth,
        memory_budget_bytes = config.engine.memory_budget_bytes,
        "started"
    );
}
