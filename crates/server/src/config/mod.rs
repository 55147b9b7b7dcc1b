//! Configuration: from YAML, environment and flags to validated types; all mistakes are reported at once.
//!
//! `layers` merges, `walk` reads with typed getters, `keys` knows the keys, `datasets` those of a dataset,
//! and `print` writes the effective configuration. No file except the configuration file is opened.

mod access;
mod access_log;
mod datasets;
mod document;
mod keys;
mod layers;
mod meant;
mod print;
mod problem;
mod timeouts;
mod tls;
mod tracing;
mod walk;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use ringfetch_engine::config::{BackendKind, EngineConfig};
use ringfetch_engine::dataset::DatasetSpec;

pub use access::{AccessConfig, Anonymous};
pub use access_log::{AccessLogConfig, AccessLogTarget};
pub(crate) use datasets::is_dataset_name;
pub(crate) use keys::GRPC_PORT;
pub use layers::{Base, ENVIRONMENT_PREFIX, Flag, Inputs};
pub use print::to_yaml;
pub use problem::{Problem, Problems, REPORTED_MAX, Source, listed};
pub use timeouts::Timeouts;
pub use tls::{ClientCertificates, TlsConfig, TlsVersion};
pub use tracing::TracingConfig;
pub use walk::Setting;

/// Limits on what clients may request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most items of one request.
    pub items_per_request: u32,
    /// Most bytes of one response.
    pub response_bytes: u64,
    /// Most bytes of one request message or HTTP body.
    pub request_bytes: u32,
    /// Most memory of all requests that are being received or decoded.
    pub request_memory_bytes: u64,
    /// Most requests in flight in the whole daemon.
    pub requests_in_flight: u32,
    /// Most requests in flight on one HTTP/2 connection.
    pub requests_per_connection: u32,
    /// Most requests in flight on one FetchStream; further ones are not read from the socket.
    pub stream_requests_in_flight: u32,
    /// Most open connections on each port. One more closes an idle connection.
    pub connections: u32,
    /// Most ranges of one HTTP request. More are refused: ignoring the header would send the whole resource,
    /// which may be huge.
    pub http_ranges: u32,
    /// Longest time until a request is answered; `None`: no limit.
    pub deadline: Option<Duration>,
}

/// Logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// A tracing filter, such as `info`.
    pub filter: String,
    /// Text or JSON.
    pub format: LogFormat,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise.
    Auto,
    /// For people.
    Text,
    /// For machines.
    Json,
}

/// The whole configuration, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The address that gRPC listens on.
    pub grpc_listen: SocketAddr,
    /// The address that HTTP listens on.
    pub http_listen: SocketAddr,
    /// Names by which clients may address HTTP and admin, besides loopback names; `None`: derived from the address.
    pub http_hosts: Option<Vec<String>>,
    /// The address that the admin service listens on; `None`: it is off.
    pub admin_listen: Option<SocketAddr>,
    /// TLS of the ports; `None`: plain text.
    pub tls: Option<TlsConfig>,
    /// Access control.
    pub access: AccessConfig,
    /// The engine's settings.
    pub engine: EngineConfig,
    /// The datasets to serve.
    pub datasets: Vec<DatasetSpec>,
    /// Datasets with their own backend, by name.
    pub dataset_backends: BTreeMap<String, BackendKind>,
    /// Limits.
    pub limits: Limits,
    /// Timeouts of connections.
    pub timeouts: Timeouts,
    /// Logs.
    pub log: LogConfig,
    /// The access log; `None`: there is none.
    pub access_log: Option<AccessLogConfig>,
    /// Spans; `None`: there are none.
    pub tracing: Option<TracingConfig>,
    /// How long requests are served after readiness has ended.
    pub lame_duck: Duration,
    /// How long a drain may take.
    pub drain_timeout: Duration,
}

impl Config {
    /// The backends that it requests, each with its key.
    pub fn backends(&self) -> impl Iterator<Item = (String, BackendKind)> {
        let own = self.dataset_backends.iter();
        let own = own.map(|(name, backend)| (format!("datasets.{name}.backend"), *backend));
        std::iter::once(("engine.backend".to_owned(), self.engine.backend)).chain(own)
    }
}

impl Default for Limits {
    /// The defaults that `config/ringfetchd.yaml` documents.
    fn default() -> Self {
        Self {
            items_per_request: 4096,
            // With the other fields of a message this stays below the 4 MiB that gRPC clients accept
            // (`grpc::convert`).
            response_bytes: 3 << 20,
            request_bytes: 4 << 20,
            request_memory_bytes: 64 << 20,
            requests_in_flight: 4096,
            requests_per_connection: 256,
            stream_requests_in_flight: 64,
            connections: 4096,
            http_ranges: 64,
            deadline: Some(Duration::from_secs(60)),
        }
    }
}

/// A valid configuration and the source of each of its values.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// Every key with its value and source, in the order in which they are read.
    pub settings: Vec<Setting>,
}

/// Reads and checks everything.
///
/// # Errors
/// All problems, at least one.
pub fn load(inputs: &Inputs) -> Result<Loaded, Problems> {
    let (walk, config) = keys::examine(inputs)?;
    let (mut problems, settings, known) = walk.finish();
    problems.extend(single_underscores(inputs, &known));
    if problems.is_empty() {
        Ok(Loaded { config, settings })
    } else {
        Err(Problems(problems))
    }
}

/// What is known of a configuration with mistakes: each invalid value is replaced by its default, as is the
/// whole file if it is not YAML. A daemon that runs on an older configuration can probably be reached with
/// it.
pub fn despite_mistakes(inputs: &Inputs) -> Option<Config> {
    let without_file = || {
        keys::examine(&Inputs {
            base: Base::Demo(".".into()),
            ..inputs.clone()
        })
    };
    let (_, config) = keys::examine(inputs).or_else(|_| without_file()).ok()?;
    Some(config)
}

/// Every known key, without list indices: `engine.backend`, `datasets[].name`. Includes sections.
pub fn known_keys() -> BTreeSet<String> {
    let inputs = Inputs {
        base: Base::Demo(".".into()),
        environment: Vec::new(),
        flags: Vec::new(),
    };
    keys::examine(&inputs)
        .map(|(walk, _)| walk.finish().2)
        .unwrap_or_default()
}

/// Reports variables such as `RINGFETCH_ENGINE_BACKEND` and `RINGFETCH_ENGINE__BACKEND`, which set nothing. Only those
/// that would name a key: Kubernetes, for example, sets other `RINGFETCH_...` variables for a service of that name.
fn single_underscores(inputs: &Inputs, known: &BTreeSet<String>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (name, _) in &inputs.environment {
        let Some(name) = name.to_str() else { continue };
        if name.starts_with(ENVIRONMENT_PREFIX) {
            continue;
        }
        if let Some((key, variable)) = layers::variable_meant(name, known) {
            let problem = "is not set by a name with single underscores";
            let remedy = format!("the variable is {variable}");
            let source = Source::Environment(name.to_owned());
            problems.push(Problem::new(key, problem, remedy, source));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt as _;

    #[test]
    fn a_variable_with_too_few_or_too_many_underscores_names_the_right_one() {
        // Scenario: variables that mean a key, with one underscore where there are two, before the section, before the
        // key or both, and with two where there is one; one of another program. Expectation: each is a problem that
        // names the right variable; the other program's is none.
        let backend = "RINGFETCH__ENGINE__BACKEND";
        for (name, right) in [
            ("RINGFETCH_ENGINE_BACKEND", backend),
            ("RINGFETCH_ENGINE__BACKEND", backend),
            ("RINGFETCH__ENGINE_BACKEND", backend),
            ("RINGFETCH__ACCESS_LOG_PATH", "RINGFETCH__ACCESS_LOG__PATH"),
            (
                "RINGFETCH__ENGINE__URING_QUEUE_DEPTH",
                "RINGFETCH__ENGINE__URING__QUEUE_DEPTH",
            ),
            (
                "RINGFETCH__ENGINE__MEMORY__BUDGET",
                "RINGFETCH__ENGINE__MEMORY_BUDGET",
            ),
        ] {
            let problems = load(&inputs(&[name, "RINGFETCH_SERVICE_PORT"], &[])).unwrap_err();
            let [Problem { remedy, source, .. }] = &problems.0[..] else {
                panic!("{problems}");
            };
            assert_eq!(*remedy, format!("the variable is {right}"));
            assert_eq!(*source, Source::Environment(name.to_owned()));
        }
    }

    #[test]
    fn a_variable_whose_name_is_not_utf_8_is_no_key() {
        // Scenario: a variable with the prefix, which no key can mean, and one of another program. Expectation: one problem, with
        // the name as far as it can be read.
        let named = |name: &[u8]| (OsString::from_vec(name.to_vec()), OsString::from("1"));
        let mut inputs = inputs(&[], &[]);
        inputs.environment = vec![named(b"RINGFETCH__LOG__\xe4"), named(b"OTHER\xe4")];
        let problems = load(&inputs).unwrap_err();
        let [Problem { key, source, .. }] = &problems.0[..] else {
            panic!("{problems}");
        };
        assert_eq!(key, "log.\u{fffd}");
        assert_eq!(
            *source,
            Source::Environment("RINGFETCH__LOG__\u{fffd}".to_owned())
        );
    }

    #[test]
    fn a_flag_with_underscores_between_the_parts_names_the_key() {
        // Scenario: --set access_log_path, which resembles the section access_log. Expectation: the key.
        let problems = load(&inputs(&[], &["access_log_path"])).unwrap_err();
        assert_eq!(problems.0[0].remedy, "did you mean access_log.path?");
    }

    #[test]
    fn no_problem_repeats_a_secret() {
        // Scenario: the text of a PEM file, a line of the principals file, or a token of hexadecimal digits as the value of each
        // key, by a variable and, for a dataset, in the file. Expectation: a problem of that key, which does not repeat it. A
        // dataset may have such digits as its name and path.
        let digits = format!("c0ffee{:058}", 0);
        for secret in [
            "-----BEGIN PRIVATE KEY-----\nc0ffee=\n-----END PRIVATE KEY-----\n",
            "search sha256:c0ffee *",
            &digits,
        ] {
            for key in known_keys() {
                if secret == digits && key.starts_with("datasets") {
                    continue;
                }
                let loaded = match key.strip_prefix("datasets[].") {
                    Some(name) => {
                        let (text, kind) = (serde_json::Value::from(secret), "kind: blocks, ");
                        let kind = if name == "kind" { "" } else { kind };
                        load_file(format!("datasets: [{{{kind}{name}: {text}}}]").as_bytes())
                    }
                    None => {
                        let variable = key.to_ascii_uppercase().replace('.', "__");
                        let mut inputs = inputs(&[], &[]);
                        inputs.environment = vec![(format!("RINGFETCH__{variable}").into(), secret.into())];
                        load(&inputs)
                    }
                };
                let problems = loaded.expect_err(&key);
                let printed = problems.0.iter().map(ToString::to_string).collect::<String>();
                assert!(!printed.contains("c0ffee"), "{key}: {printed}");
                assert!(
                    problems
                        .0
                        .iter()
                        .any(|problem| problem.key.replace("[0]", "[]") == key),
                    "{key}: {printed}"
                );
            }
        }
        let dataset =
            format!("datasets: [{{name: '{digits}', kind: blocks, path: '{digits}', block_bytes: 1}}]");
        assert_eq!(
            load_file(dataset.as_bytes()).unwrap().config.datasets[0].name,
            digits
        );
    }

    fn load_file(bytes: &[u8]) -> Result<Loaded, Problems> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        load(&Inputs {
            base: Base::File(file.path().to_owned()),
            ..inputs(&[], &[])
        })
    }

    #[test]
    fn a_file_of_another_encoding_is_said_to_be_one() {
        // Scenario: a comment in Latin-1 on the second line; UTF-16, as some editors save "Unicode". Expectation: the line,
        // and how to save it.
        for (bytes, line) in [
            (&b"engine: {}\n# M\xfcller\n"[..], 2),
            (&b"\xff\xfed\0a\0"[..], 1),
        ] {
            let Problems(problems) = load_file(bytes).unwrap_err();
            let [
                Problem {
                    key, problem, remedy, ..
                },
            ] = &problems[..]
            else {
                panic!("{problems:?}");
            };
            assert_eq!((key.as_str(), remedy.as_str()), ("config", "save it as UTF-8"));
            assert_eq!(*problem, format!("is not UTF-8 in line {line}"));
        }
    }

    #[test]
    fn of_very_many_problems_the_first_ones_are_reported() {
        // Scenario: 10,000 keys that do not exist. Expectation: all are found; printed are their number, the first twenty, one
        // a line, and how many more there are.
        let keys: String = (0..10_000).map(|key| format!("k{key}: 1\n")).collect();
        let problems = load_file((keys + "datasets: []\n").as_bytes()).unwrap_err();
        let printed = problems.to_string();
        let lines: Vec<&str> = printed.lines().collect();
        assert_eq!(lines[0], "the configuration has 10001 problems:");
        assert_eq!((lines.len(), lines[21]), (22, "  and 9981 more"));
    }

    #[test]
    fn a_dataset_of_very_many_files_is_read_at_once() {
        // Scenario: a dataset of 150,000 files, as many as a configuration file has room for; the last one is named again.
        // Expectation: that is the only problem. (Comparing each with all others would take hours.)
        let paths: Vec<String> = (0..150_000).map(|index| format!("d/{index}.bin")).collect();
        let text = |paths: &[String]| {
            let paths = paths.join(", ");
            format!("datasets: [{{name: a, kind: blocks, block_bytes: 4KiB, paths: [{paths}]}}]")
        };
        assert_eq!(
            load_file(text(&paths).as_bytes()).unwrap().config.datasets[0]
                .paths
                .len(),
            paths.len()
        );
        let twice = [
            &paths[..],
            &["d/../d/149999.bin".to_owned(), "d/149999.bin".to_owned()],
        ]
        .concat();
        let Problems(problems) = load_file(text(&twice).as_bytes()).unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(problems[0].problem, "names \"d/149999.bin\" twice");
    }

    fn inputs(variables: &[&str], keys: &[&str]) -> Inputs {
        let flag = |key: &&str| Flag {
            name: format!("--set {key}"),
            key: (*key).to_owned(),
            value: "1".to_owned(),
        };
        Inputs {
            base: Base::Demo("demo".into()),
            environment: variables
                .iter()
                .map(|name| ((*name).into(), "1".into()))
                .collect(),
            flags: keys.iter().map(flag).collect(),
        }
    }
}
