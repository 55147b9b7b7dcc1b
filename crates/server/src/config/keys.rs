//! The keys outside `datasets`, their allowed values, and which of them contradict each other.
//!
//! Every section is checked, whichever backend is chosen, so that switching is one word. A default that would
//! contradict a smaller limit in the configuration is lowered to it; configured values are never changed.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use ringfetch_command::size;
use ringfetch_engine::config::{
    BackendKind, DirectIo, EngineConfig, MmapConfig, OnUnavailable, Placement, PlanConfig, PreadConfig,
    UringConfig,
};
use ringfetch_host::cpus::usable_cpus;

use super::layers::{self, Base, Inputs};
use super::problem::Problems;
use super::walk::{Section, Walk};
use super::{Config, Limits, LogConfig, LogFormat, access, access_log, datasets, timeouts, tls, tracing};
use crate::fetch::enough_for;

pub(super) const BACKEND_WORDS: [(&str, BackendKind); 4] = [
    ("uring", BackendKind::Uring),
    ("mmap", BackendKind::Mmap),
    ("auto", BackendKind::Auto),
    ("pread", BackendKind::Pread),
];
const ON_UNAVAILABLE_WORDS: [(&str, OnUnavailable); 2] =
    [("fail", OnUnavailable::Fail), ("mmap", OnUnavailable::Mmap)];
pub(super) const DIRECT_IO_WORDS: [(&str, DirectIo); 3] = [
    ("required", DirectIo::Required),
    ("preferred", DirectIo::Preferred),
    ("off", DirectIo::Off),
];
const PLACEMENT_WORDS: [(&str, Placement); 2] = [
    ("same_thread", Placement::SameThread),
    ("own_thread", Placement::OwnThread),
];
const FORMAT_WORDS: [(&str, LogFormat); 3] = [
    ("auto", LogFormat::Auto),
    ("text", LogFormat::Text),
    ("json", LogFormat::Json),
];

/// Default ports of the three listeners, on loopback, since clients are not authenticated by default.
pub(crate) const GRPC_PORT: u16 = 7410;
const HTTP_PORT: u16 = 7411;
const ADMIN_PORT: u16 = 7412;
const LOG_FILTER: &str = "info";
const LAME_DUCK_MS: u64 = 1000;
const DRAIN_TIMEOUT_MS: u64 = 10_000;
/// The same as in `Limits::default`.
const DEADLINE_MS: u64 = 60_000;
/// Longest list of `http.hosts`.
const HOSTS_MAX: usize = 64;
/// Device reads and the memory budget consist of pages of this size.
const PAGE_BYTES: u64 = 4096;

/// Reads the merged tree. Problems are in the walk; the configuration is valid only if there are none.
///
/// # Errors
/// The file cannot be read or is not YAML.
pub(super) fn examine(inputs: &Inputs) -> Result<(Walk, Config), Problems> {
    let mut problems = Vec::new();
    let (demo, directory) = match &inputs.base {
        Base::File(path) => (serde_yaml::Value::Null, path.parent().unwrap_or(Path::new(""))),
        Base::Demo(directory) => (crate::demo::dataset_list(directory), Path::new("")),
    };
    let tree = layers::merge(inputs, demo, &mut problems)?;
    let walk = Walk::new(problems);
    let config = read(&walk, tree, directory);
    Ok((walk, config))
}

fn read(walk: &Walk, tree: layers::Node, directory: &Path) -> Config {
    let mut root = Section::root(walk, tree);
    let listen = |section: &mut Section<'_>, port: u16, off: bool| {
        section.address("listen", SocketAddr::from((Ipv4Addr::LOCALHOST, port)), off)
    };
    let mut section = root.section("grpc");
    let grpc_listen = listen(&mut section, GRPC_PORT, false);
    section.finish();
    let mut section = root.section("http");
    let http_listen = listen(&mut section, HTTP_PORT, false);
    let http_hosts = section.names_or_word("hosts", "auto", HOSTS_MAX, host_name);
    section.finish();
    let mut section = root.section("admin");
    let admin_listen = listen(&mut section, ADMIN_PORT, true);
    section.finish();
    ports_differ(
        walk,
        [
            ("grpc.listen", grpc_listen),
            ("http.listen", http_listen),
            ("admin.listen", admin_listen),
        ],
    );

    let tls = tls::read(root.section("tls"), directory);
    let listeners = [
        ("grpc", "grpc.listen", grpc_listen),
        ("http", "http.listen", http_listen),
        ("admin", "admin.listen", admin_listen),
    ];
    let access = access::read(root.section("access"), directory, tls.as_ref(), listeners);
    let (mut engine, direct_io) = engine(root.section("engine"));
    // The list is read last, since its entries are checked against the limits.
    let datasets = root.take("datasets");
    let limits = limits(root.section("limits"), &mut engine);
    let timeouts = timeouts::read(root.section("timeouts"));
    let log = log(root.section("log"));
    let access_log = access_log::read(root.section("access_log"), directory);
    let tracing = tracing::read(root.section("tracing"));
    let mut shutdown = root.section("shutdown");
    let lame_duck = Duration::from_millis(shutdown.integer("lame_duck_ms", LAME_DUCK_MS, 0..=600_000));
    let drain_timeout =
        Duration::from_millis(shutdown.integer("drain_timeout_ms", DRAIN_TIMEOUT_MS, 0..=3_600_000));
    shutdown.finish();
    let around = datasets::EntryContext {
        directory,
        direct_io,
        response_bytes: limits.response_bytes,
    };
    let (datasets, dataset_backends) = datasets::read(walk, datasets, &around);
    root.finish();

    // `grpc` and `http` cannot be off: a missing address is already reported as a problem.
    let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    Config {
        grpc_listen: grpc_listen.unwrap_or(nowhere),
        http_listen: http_listen.unwrap_or(nowhere),
        http_hosts,
        admin_listen,
        tls,
        access,
        engine,
        datasets,
        dataset_backends,
        limits,
        timeouts,
        log,
        access_log,
        tracing,
        lame_duck,
        drain_timeout,
    }
}

/// Checks a name as `http.hosts` accepts it: a host name, `*.` and a domain, or `*`. The dot of the root may end it.
fn host_name(name: &str) -> Result<(), String> {
    let plain = name.strip_prefix("*.").unwrap_or(name);
    let plain = plain.strip_suffix('.').unwrap_or(plain);
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let is_label = |label: &str| !label.is_empty() && label.chars().all(allowed);
    let is_name = plain.len() <= 253 && plain.split('.').all(is_label);
    if name == "*" || is_name {
        Ok(())
    } else {
        Err(format!("is {name:?}, which is not a host name"))
    }
}

/// Whether two listeners on one port would conflict: `[::]` covers IPv4 too, `0.0.0.0` does not cover IPv6.
fn overlap(a: IpAddr, b: IpAddr) -> bool {
    let covers = |wide: IpAddr, narrow: IpAddr| wide.is_unspecified() && (wide.is_ipv6() || narrow.is_ipv4());
    a == b || covers(a, b) || covers(b, a)
}

fn ports_differ(walk: &Walk, listeners: [(&str, Option<SocketAddr>); 3]) {
    for (index, (key, address)) in listeners.iter().enumerate() {
        for (other_key, other) in &listeners[..index] {
            let (Some(address), Some(other)) = (address, other) else {
                continue;
            };
            let same =
                address.port() == other.port() && address.port() != 0 && overlap(address.ip(), other.ip());
            let problem = format!("is {address}, but {other_key} is {other}: both cannot use one port");
            walk.report_conflict(
                key,
                other_key,
                same,
                problem,
                "give each listener a port of its own",
            );
        }
    }
}

fn engine(mut section: Section<'_>) -> (EngineConfig, DirectIo) {
    let walk = section.walk();
    let default = EngineConfig::default();
    let backend = section.word("backend", default.backend, &BACKEND_WORDS);
    let on_unavailable = section.word("on_unavailable", default.on_unavailable, &ON_UNAVAILABLE_WORDS);
    let usable = u32::try_from(usable_cpus().len()).unwrap_or(u32::MAX);
    let cores = match section.integer_or_word("cores", "auto", 1..=1024) {
        Some(cores) => u32::try_from(cores).unwrap_or(usable),
        None => {
            walk.note(format!("{usable} usable"));
            usable
        }
    };
    let pin = section.boolean("pin", default.pin);
    let memory_budget_bytes = section.bytes(
        "memory_budget",
        default.memory_budget_bytes,
        1 << 20..=1 << 40,
        PAGE_BYTES,
    );
    let direct_io = section.word("direct_io", DirectIo::Preferred, &DIRECT_IO_WORDS);

    let mut uring_section = section.section("uring");
    let uring = UringConfig {
        queue_depth: uring_section.small("queue_depth", default.uring.queue_depth, 1..=4096),
        placement: uring_section.word("placement", default.uring.placement, &PLACEMENT_WORDS),
        eager_flush_reads: uring_section.small(
            "eager_flush_reads",
            default.uring.eager_flush_reads,
            0..=4096,
        ),
        registered_buffers: uring_section.boolean("registered_buffers", default.uring.registered_buffers),
    };
    uring_section.finish();
    let mut mmap_section = section.section("mmap");
    let mmap = MmapConfig {
        threads: mmap_section.small("threads", default.mmap.threads, 1..=256),
        announce: mmap_section.boolean("announce", default.mmap.announce),
    };
    mmap_section.finish();
    let mut pread_section = section.section("pread");
    let pread = PreadConfig {
        threads: pread_section.small("threads", default.pread.threads, 1..=1024),
    };
    pread_section.finish();
    let mut plan_section = section.section("plan");
    let merge_gap = plan_section.bytes("merge_gap", default.plan.merge_gap_bytes.into(), 0..=16 << 20, 1);
    let max_read = plan_section.bytes(
        "max_read",
        default.plan.max_read_bytes.into(),
        PAGE_BYTES..=64 << 20,
        PAGE_BYTES,
    );
    plan_section.finish();
    section.finish();

    walk.report_conflict(
        "engine.plan.merge_gap",
        "engine.plan.max_read",
        merge_gap > max_read,
        format!("is {merge_gap} bytes, and one read has at most {max_read} (engine.plan.max_read)"),
        "lower it: a gap that large is never bridged",
    );
    walk.report_conflict(
        "engine.plan.max_read",
        "engine.memory_budget",
        max_read > memory_budget_bytes,
        format!(
            "is {max_read} bytes, and all reads together have {memory_budget_bytes} (engine.memory_budget)"
        ),
        "lower it, or raise engine.memory_budget",
    );
    let plan = PlanConfig {
        merge_gap_bytes: u32::try_from(merge_gap).unwrap_or(default.plan.merge_gap_bytes),
        max_read_bytes: u32::try_from(max_read).unwrap_or(default.plan.max_read_bytes),
    };
    let config = EngineConfig {
        backend,
        on_unavailable,
        cores,
        pin,
        memory_budget_bytes,
        // These two are keys of `limits`, which is read next.
        queued_reads: default.queued_reads,
        connection_bytes: default.connection_bytes,
        uring,
        mmap,
        pread,
        plan,
        device_tags: default.device_tags,
    };
    (config, direct_io)
}

fn limits(mut section: Section<'_>, engine: &mut EngineConfig) -> Limits {
    let walk = section.walk();
    let default = Limits::default();
    let budget = engine.memory_budget_bytes;
    // Each of these two defaults follows the other key.
    let queue = |section: &mut Section<'_>, default| section.small("queued_reads", default, 1..=1 << 24);
    let queue_is_set = section.has("queued_reads");
    if queue_is_set {
        engine.queued_reads = queue(&mut section, engine.queued_reads);
    }
    let items_default = default.items_per_request.min(engine.queued_reads);
    let items_per_request = section.small("items_per_request", items_default, 1..=1 << 20);
    if !queue_is_set {
        engine.queued_reads = queue(&mut section, engine.queued_reads.max(items_per_request));
    }
    // A small budget lowers these two defaults, and the first one the second.
    let connection_default = engine.connection_bytes.min(budget);
    engine.connection_bytes = section.bytes("connection_bytes", connection_default, PAGE_BYTES..=1 << 40, 1);
    let response_default = default
        .response_bytes
        .min(budget / 4)
        .min(engine.connection_bytes);
    let response_bytes = section.bytes("response_bytes", response_default, PAGE_BYTES..=1 << 30, 1);
    let request_bytes = section.bytes(
        "request_bytes",
        default.request_bytes.into(),
        1 << 10..=256 << 20,
        1,
    );
    let enough = enough_for(request_bytes, items_per_request).next_multiple_of(1 << 20);
    let memory_default = default.request_memory_bytes.max(enough);
    // Less is not enough for a list, however small the requests are (`enough_for`).
    let request_memory_bytes = section.bytes("request_memory", memory_default, 3 << 20..=1 << 40, 1);
    // A caller may have half of what is free: of one, nobody would get any.
    let requests_in_flight = section.small("requests_in_flight", default.requests_in_flight, 2..=1 << 20);
    let per_connection_default = default.requests_per_connection.min(requests_in_flight);
    let requests_per_connection =
        section.small("requests_per_connection", per_connection_default, 1..=1 << 16);
    let per_stream_default = default.stream_requests_in_flight.min(requests_in_flight);
    let stream_requests_in_flight =
        section.small("stream_requests_in_flight", per_stream_default, 1..=1 << 16);
    let connections = section.small("connections", default.connections, 1..=1 << 20);
    let http_ranges = section.small("http_ranges", default.http_ranges, 1..=1024);
    let deadline_ms = section.integer("deadline_ms", DEADLINE_MS, 0..=86_400_000);
    section.finish();

    let at_most = |key: &str, value: u64, other_key: &str, other: u64, why: &str| {
        let problem = format!("is {value}, more than {other_key}, which is {other}: {why}");
        walk.report_conflict(
            key,
            other_key,
            value > other,
            problem,
            format!("lower it, or raise {other_key}"),
        );
    };
    let connection_bytes = engine.connection_bytes;
    let budget_key = "engine.memory_budget";
    // The engine's rule, see `Engine::response_bytes_max`.
    let problem = format!("is {response_bytes}, more than a quarter of {budget_key}, which is {budget}");
    let remedy = format!("lower it, or raise {budget_key}: one answer must leave room for others");
    walk.report_conflict(
        "limits.response_bytes",
        budget_key,
        response_bytes > budget / 4,
        problem,
        remedy,
    );
    at_most(
        "limits.connection_bytes",
        connection_bytes,
        budget_key,
        budget,
        "there is no more",
    );
    let why = "such an answer fits on no connection";
    at_most(
        "limits.response_bytes",
        response_bytes,
        "limits.connection_bytes",
        connection_bytes,
        why,
    );
    walk.report_conflict(
        "limits.request_bytes",
        "limits.request_memory",
        request_memory_bytes < enough,
        format!("is {request_bytes}, and limits.request_memory is {request_memory_bytes}: such a request would always be refused"),
        format!("lower it, or raise limits.request_memory to {}", size::exact(enough)),
    );
    let in_flight = u64::from(requests_in_flight);
    let why = "the rest would always be refused";
    let in_flight_key = "limits.requests_in_flight";
    at_most(
        "limits.requests_per_connection",
        requests_per_connection.into(),
        in_flight_key,
        in_flight,
        why,
    );
    at_most(
        "limits.stream_requests_in_flight",
        stream_requests_in_flight.into(),
        in_flight_key,
        in_flight,
        why,
    );
    let why = "such a batch would always be refused";
    let queued = engine.queued_reads.into();
    at_most(
        "limits.items_per_request",
        items_per_request.into(),
        "limits.queued_reads",
        queued,
        why,
    );

    Limits {
        items_per_request,
        response_bytes,
        request_bytes: u32::try_from(request_bytes).unwrap_or(default.request_bytes),
        request_memory_bytes,
        requests_in_flight,
        requests_per_connection,
        stream_requests_in_flight,
        connections,
        http_ranges,
        deadline: (deadline_ms > 0).then(|| Duration::from_millis(deadline_ms)),
    }
}

fn log(mut section: Section<'_>) -> LogConfig {
    let allowed = "a tracing filter, such as info or warn,ringfetch_engine=debug";
    let filter = section.text_or("filter", LOG_FILTER, allowed, |filter| {
        let parsed = crate::telemetry::parse(filter);
        parsed
            .map(|_| ())
            .map_err(|problem| format!("is {filter:?}: {problem}"))
    });
    let format = section.word("format", LogFormat::Auto, &FORMAT_WORDS);
    section.finish();
    LogConfig { filter, format }
}

#[cfg(test)]
mod tests {
    use super::host_name;

    #[test]
    fn a_host_name_has_no_empty_label() {
        // Scenario: names, also with the dot of the root, and what no Host can be. Expectation: the names are accepted.
        for name in [
            "*",
            "a",
            "a.example",
            "a.example.",
            "*.example",
            "*.example.",
            "a_b-c.1",
        ] {
            assert_eq!(host_name(name), Ok(()));
        }
        for name in [
            "",
            ".",
            "..",
            "*.",
            "*..",
            ".example",
            "*..example",
            "a..b",
            "a..",
            "a.*",
            "a b",
        ] {
            assert!(host_name(name).is_err(), "{name:?}");
        }
    }
}
