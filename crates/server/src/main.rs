//! `ringfetchd`: the composition root. Configuration, datasets, engine, services, listeners, and the way back down.
//!
//! Exit codes: 0 after a clean drain; 1 when something failed at run time; 2 when the configuration is at fault, in
//! which case no port was bound; 3 when this host refuses what the configuration asks for. `cli.rs` tells them to people.
#![forbid(unsafe_code)]

mod cli;
mod healthcheck;
mod manual;

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use ringfetch_engine::config::{BackendKind, EngineConfig};
use ringfetch_engine::dataset::Dataset;
use ringfetch_engine::engine::{Engine, StartError};
use ringfetch_host::block::Device;
use ringfetch_server::catalogue::{Catalogue, OpenErrors};
use ringfetch_server::config::{self, Base, Config, Inputs};
use ringfetch_server::door::Fetcher;
use ringfetch_server::lifecycle::{self, Hangups, Lifecycle, Signals};
use ringfetch_server::listener::{
    self, Addresses, Bound, ConnectionBounds, Cores, Hosts, Listener, Port, Role,
};
use ringfetch_server::live::{self, Live};
use ringfetch_server::rpc_metrics::RpcMetrics;
use ringfetch_server::supervisor::Supervisor;
use ringfetch_server::telemetry::Telemetry;
use ringfetch_server::{admin, demo, grpc, http};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use cli::{Cli, Command};

/// Chosen by measurement: docs/adr/0008.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const EXIT_FAILED: u8 = 1;
const EXIT_CONFIG: u8 = 2;
/// A port that is taken, an engine that is unavailable. As with 2, starting again as it is does not help, and whoever
/// restarts can tell it from a crash.
const EXIT_HOST: u8 = 3;

/// The configuration, or the files it names, are at fault. One line a problem.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Misconfigured(String);

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command.clone().unwrap_or(Command::Run) {
        Command::Run => run(&cli.inputs(), cli.addresses_file.as_deref()),
        Command::CheckConfig { open } => check_config(&cli.inputs(), open),
        Command::PrintConfig => print_config(&cli.inputs()),
        Command::Healthcheck => check_health(&cli.inputs(), cli.http_listen()),
        Command::MakeDemo => demo::prepare(&cli.demo_dir).map_err(Into::into),
        Command::Completions { shell } => say(&manual::completions(shell)),
        Command::Man { directory } => manual::write_pages(&directory),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The log may be JSON, or not set up yet; whoever started this reads stderr.
            let _stderr_is_gone = writeln!(std::io::stderr(), "ringfetchd: {error:#}");
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Who has to fix it: whoever wrote the configuration, whoever runs the host, or neither.
fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<Misconfigured>() {
        EXIT_CONFIG
    } else if error.is::<listener::BindError>() || error.is::<StartError>() {
        EXIT_HOST
    } else {
        EXIT_FAILED
    }
}

fn load(inputs: &Inputs) -> Result<config::Loaded, Misconfigured> {
    config::load(inputs).map_err(|problems| Misconfigured(problems.to_string()))
}

fn say(text: &str) -> anyhow::Result<()> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("writing to stdout")
}

fn check_config(inputs: &Inputs, open: bool) -> anyhow::Result<()> {
    let config = load(inputs)?.config;
    let names: Vec<&str> = config
        .datasets
        .iter()
        .map(|dataset| dataset.name.as_str())
        .collect();
    let opened = if open {
        Catalogue::open(&config.datasets).map_err(misconfigured)?;
        ", and they open"
    } else {
        ""
    };
    let backend = config.engine.backend;
    say(&format!(
        "ok: backend {backend}, {} datasets ({}){opened}\n",
        names.len(),
        names.join(", ")
    ))
}

fn print_config(inputs: &Inputs) -> anyhow::Result<()> {
    say(&config::to_yaml(&load(inputs)?.settings))
}

/// What runs may have been started from another configuration than the one there now: one that has become invalid makes
/// no running daemon unhealthy, as long as that one listens where --http-listen says, or on the default port.
fn check_health(inputs: &Inputs, flag: Option<SocketAddr>) -> anyhow::Result<()> {
    let line = match load(inputs) {
        Ok(loaded) => healthcheck::ask(loaded.config.http_listen).map_err(anyhow::Error::msg)?,
        Err(mistake) => match healthcheck::ask(flag.unwrap_or(config::HTTP_LISTEN_DEFAULT)) {
            Ok(line) => format!("{line}, but the configuration as it is now is not valid: {mistake}"),
            Err(_nobody) => return Err(mistake.into()),
        },
    };
    say(&format!("{line}\n"))
}

fn misconfigured(errors: OpenErrors) -> Misconfigured {
    Misconfigured(errors.to_string())
}

/// The three ports, taken.
struct Ports {
    grpc: Bound,
    http: Bound,
    admin: Option<Bound>,
}

impl Ports {
    fn bind(config: &Config) -> Result<Self, listener::BindError> {
        Ok(Self {
            grpc: listener::bind("grpc.listen", config.grpc_listen)?,
            http: listener::bind("http.listen", config.http_listen)?,
            admin: config
                .admin_listen
                .map(|address| listener::bind("admin.listen", address))
                .transpose()?,
        })
    }

    fn addresses(&self) -> Addresses {
        let admin = self.admin.as_ref().map(Bound::address);
        Addresses {
            grpc: self.grpc.address(),
            http: self.http.address(),
            admin,
        }
    }
}

fn run(inputs: &Inputs, addresses_file: Option<&Path>) -> anyhow::Result<()> {
    let loaded = load(inputs)?;
    let config = &loaded.config;
    let telemetry = Telemetry::start(&config.log)?;
    raise_open_files();
    keep_to_small_pages();
    let runtime = runtime()?;
    // Before anything that takes time: a SIGHUP meanwhile must not end the daemon, but wait until it serves.
    let hangups = {
        let _inside = runtime.enter();
        Hangups::install().context("catching SIGHUP")?
    };
    // Ports before anything slow, so that a port in use is reported at once; but a configured file that does not open is
    // a mistake of the configuration, and those are reported before any port is bound.
    let open = || Catalogue::open(&config.datasets).map_err(misconfigured);
    let (ports, catalogue) = match &inputs.base {
        Base::File(_) => {
            let catalogue = open()?;
            (Ports::bind(config)?, catalogue)
        }
        Base::Demo(directory) => {
            let ports = Ports::bind(config)?;
            demo::prepare(directory)?;
            (ports, open()?)
        }
    };
    let datasets = catalogue.datasets();
    let engine = Engine::start(&EngineConfig {
        device_tags: fewest_tags(&datasets),
        ..config.engine.clone()
    })?;
    let most = engine.response_bytes_max();
    if config.limits.response_bytes > most {
        let asked = config.limits.response_bytes;
        return Err(Misconfigured(format!(
            "limits.response_bytes: is {asked} bytes, and engine.memory_budget has room for an answer of {most}; lower \
             it, or raise engine.memory_budget"
        ))
        .into());
    }
    engine.register_metrics(telemetry.registry())?;
    let fetcher = Fetcher::new(engine, datasets, config.limits);
    live::start_own_backends(&fetcher, config)?;
    log_facts(config, &fetcher);
    let start = Start {
        inputs,
        loaded,
        catalogue,
        fetcher,
        telemetry,
        ports,
        hangups,
        addresses_file,
    };
    let served = runtime.block_on(serve(start));
    // A change that hangs in the kernel, over a file system that does not answer, must not keep the process.
    runtime.shutdown_background();
    served
}

/// What a daemon starts with, once everything is there that takes time.
struct Start<'a> {
    inputs: &'a Inputs,
    loaded: config::Loaded,
    catalogue: Catalogue,
    fetcher: Fetcher,
    telemetry: Telemetry,
    ports: Ports,
    hangups: Hangups,
    addresses_file: Option<&'a Path>,
}

async fn serve(start: Start<'_>) -> anyhow::Result<()> {
    let Start {
        inputs,
        loaded,
        catalogue,
        fetcher,
        telemetry,
        ports,
        hangups,
        addresses_file,
    } = start;
    let engine = fetcher.engine().clone();
    let lifecycle = Lifecycle::new();
    let registry = telemetry.registry();
    fetcher.register_metrics(registry)?;
    let bounds = ConnectionBounds::new(&loaded.config.limits, loaded.config.engine.connection_bytes);
    bounds.set_timeouts(&loaded.config.timeouts);
    let http_hosts = loaded.config.http_hosts.clone();
    let hosts = |bound: &Bound| Some(Hosts::of(bound.address(), http_hosts.as_deref()));
    let live = Live::new(live::Parts {
        inputs: inputs.clone(),
        loaded,
        catalogue,
        fetcher: fetcher.clone(),
        lifecycle: lifecycle.clone(),
        telemetry: telemetry.clone(),
        bounds: bounds.clone(),
    })?;
    let rpc = RpcMetrics::new(registry)?;
    let grpc = grpc::service(fetcher.clone(), lifecycle.clone(), rpc.clone());
    let http = http::service(fetcher.clone(), lifecycle.clone(), rpc.clone(), registry.clone());
    let grpc_shortcut = grpc::shortcut(fetcher.clone(), lifecycle.clone(), rpc.clone());
    let http_shortcut = http::shortcut(fetcher.clone(), rpc.clone());
    let admin = admin::service(
        fetcher.clone(),
        lifecycle.clone(),
        telemetry.clone(),
        rpc,
        live.clone(),
    );

    let addresses = ports.addresses();
    let mut served = vec![
        Port {
            transport: "grpc",
            bound: ports.grpc,
            http2_only: true,
            router: grpc,
            shortcut: Some(grpc_shortcut),
            // Browsers do not speak HTTP/2 without TLS.
            hosts: None,
            role: Role::Data,
        },
        Port {
            transport: "http",
            hosts: hosts(&ports.http),
            role: Role::DataAndProbes(http::is_operation),
            bound: ports.http,
            http2_only: false,
            router: http,
            shortcut: Some(http_shortcut),
        },
    ];
    served.extend(ports.admin.map(|bound| Port {
        transport: "admin",
        hosts: hosts(&bound),
        role: Role::Control,
        bound,
        http2_only: true,
        router: admin,
        shortcut: None,
    }));

    let signals = Signals::install().context("catching signals")?;
    let cores = Cores::new(engine.clone(), fetcher.callers().clone(), registry)?;
    let listeners: Vec<Listener> = served
        .into_iter()
        .map(|port| Listener::open_port(port, &cores, &bounds, &lifecycle))
        .collect::<Result<_, _>>()?;
    let lame_duck = {
        let live = live.clone();
        move || live.lame_duck()
    };
    tokio::spawn(signals.obey(lifecycle.clone(), lame_duck));
    tokio::spawn(lifecycle::watch_engine(engine.clone(), lifecycle.clone()));
    lifecycle.start_serving();
    tokio::spawn(live.clone().obey(hangups));
    if let Some(path) = addresses_file {
        addresses
            .write(path)
            .with_context(|| format!("--addresses-file {}", path.display()))?;
    }
    let supervisor = Supervisor::from_environment().map(|supervisor| {
        tokio::spawn(supervisor.accompany(engine.clone(), lifecycle.clone(), live.clone()))
    });
    if let Base::Demo(_) = inputs.base {
        // A closed stdout is no reason to stop serving.
        let _stdout_is_gone = say(&demo::greeting(
            &fetcher.datasets(),
            &engine.backend(),
            &addresses,
        ));
    }

    let remaining = futures_util::future::join_all(listeners.into_iter().map(Listener::serve)).await;
    let drain_timeout = live.drain_timeout();
    let drained = lifecycle::drain(&fetcher, &lifecycle, remaining, drain_timeout).await;
    if let Some(told) = supervisor {
        // However short the drain was: that the daemon stops is said before it is gone.
        let _told = told.await;
    }
    if let Some(reason) = lifecycle.failure() {
        anyhow::bail!("{reason}");
    }
    if !drained.is_clean() {
        let timeout_ms = drain_timeout.as_millis();
        let (connections, reads) = (drained.connections, drained.reads);
        tracing::error!(
            connections,
            reads,
            timeout_ms,
            "drain cut off what was still in flight"
        );
        anyhow::bail!(
            "shutdown.drain_timeout_ms ({timeout_ms}) passed with {connections} connections open and {reads} reads in flight"
        );
    }
    tracing::info!("drained");
    Ok(())
}

/// The main thread's runtime, which accepts connections and hears signals.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    // Tokio panics where it cannot have its descriptors for signals: at most eight of all kinds. So they are tried first.
    let tried: Result<Vec<_>, _> = (0..4).map(|_| UnixStream::pair()).collect();
    tried.context("out of file descriptors: raise the limit (ulimit -n, LimitNOFILE)")?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")
}

/// Tags of the device with the fewest: the rings together must stay below them (TRAPS 15).
fn fewest_tags(datasets: &[Arc<Dataset>]) -> Option<u32> {
    let paths = datasets.iter().flat_map(|dataset| &dataset.spec().paths);
    paths
        .filter_map(|path| Device::of_file(File::open(path).ok()?)?.queue_tags())
        .min()
}

/// Connections and open objects are files; the soft limit is 1024 on most systems, for the sake of programs that use
/// select(2).
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    ) {
        tracing::warn!(%error, limit = limit.current, "the limit of open files stays as it is");
    }
}

/// The allocator asks for huge pages (MADV_HUGEPAGE), which make a buffer of which little is written resident as a whole:
/// an idle HTTP/2 connection has 24 KiB of such buffers. Measured with 4,000 of them: 33 KiB resident each with huge pages,
/// 17 KiB without.
fn keep_to_small_pages() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::debug!(%error, "huge pages stay on");
    }
}

/// One line with everything that an operator asks first.
fn log_facts(config: &Config, fetcher: &Fetcher) {
    let engine = fetcher.engine();
    let status = engine.backend();
    let described: Vec<String> = fetcher
        .datasets()
        .iter()
        .map(|dataset| {
            let (name, direct) = (dataset.name(), dataset.direct());
            let alignment = direct.offset_alignment_bytes;
            match (fetcher.backend_of(dataset).status.backend, direct.direct) {
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
