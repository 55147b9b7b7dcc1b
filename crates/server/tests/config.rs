//! The configuration from outside: fixtures with every kind of mistake, the layers, the documented file, the
//! commands (`commands`).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use ringfetch_engine::config::{BackendKind, DirectIo};
use ringfetch_engine::dataset::{Dtype, KindSpec, Layout, PartialTail};
use ringfetch_server::config::{Base, Flag, Inputs, LogFormat, Problems, Source, known_keys, load, to_yaml};
use serde_yaml::Value;

mod config {
    mod commands;
    mod yaml;
}

fn manifest() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn documented() -> PathBuf {
    manifest().join("../../config/ringfetchd.yaml")
}

fn of_file(path: &Path) -> Inputs {
    Inputs {
        base: Base::File(path.to_owned()),
        environment: Vec::new(),
        flags: Vec::new(),
    }
}

fn demo() -> Inputs {
    Inputs {
        base: Base::Demo("demo".into()),
        environment: Vec::new(),
        flags: Vec::new(),
    }
}

fn environment(variables: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    variables
        .iter()
        .map(|(name, value)| ((*name).into(), (*value).into()))
        .collect()
}

fn flag(key: &str, value: &str) -> Flag {
    Flag {
        name: format!("--set {key}"),
        key: key.to_owned(),
        value: value.to_owned(),
    }
}

fn lines(problems: &Problems) -> Vec<String> {
    problems
        .0
        .iter()
        .map(|problem| format!("{}: {}; {}", problem.key, problem.problem, problem.remedy))
        .collect()
}

#[test]
fn every_bad_file_is_answered_with_all_its_problems() {
    // Scenario: each file in bad-config; its leading `#! ` lines list its mistakes. Expectation: exactly
    // these problems, all at once, each with the file as its source.
    let mut files: Vec<_> = std::fs::read_dir(manifest().join("tests/bad-config"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() >= 19, "fixtures are missing");
    let mut wrong = String::new();
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let expected: Vec<_> = text
            .lines()
            .map_while(|line| line.strip_prefix("#! "))
            .map(str::to_owned)
            .collect();
        let problems = load(&of_file(&path)).expect_err("a bad file");
        let (found, expected): (BTreeSet<_>, BTreeSet<_>) = (
            lines(&problems).into_iter().collect(),
            expected.into_iter().collect(),
        );
        if found != expected || found.len() != problems.0.len() {
            wrong += &format!("\n{}:\n", path.display());
            for line in expected.difference(&found) {
                wrong += &format!("missing  {line}\n");
            }
            for line in lines(&problems).iter().filter(|line| !expected.contains(*line)) {
                wrong += &format!("not expected\n#! {line}\n");
            }
        }
        for problem in &problems.0 {
            let told = problem.source == Source::File(path.clone());
            // A required key that is missing has the source `Default`.
            assert!(
                told || problem.source == Source::Default,
                "{}: {problem}",
                path.display()
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn flags_beat_the_environment_which_beats_the_file_which_beats_defaults() {
    // Scenario: one key set in every layer, others in fewer. Expectation: the highest layer wins, and each
    // setting names the layer that it came from.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.yaml");
    let dataset = "datasets: [{ name: a, kind: blocks, path: a.bin, block_bytes: 4096 }]";
    let text = format!("engine:\n  backend: uring\n  pin: false\n  uring: {{ queue_depth: 7 }}\n{dataset}\n");
    std::fs::write(&path, text).unwrap();
    let mut inputs = of_file(&path);
    inputs.environment = environment(&[
        ("RINGFETCH__ENGINE__BACKEND", "pread"),
        ("RINGFETCH__ENGINE__URING__QUEUE_DEPTH", "8"),
        ("RINGFETCH__LIMITS__RESPONSE_BYTES", "1MiB"),
        ("RINGFETCH__HTTP__LISTEN", "[::1]:7411"),
        ("RINGFETCH__ADMIN__LISTEN", "off"),
        ("RINGFETCH_SERVICE_HOST", "10.0.0.1"),
        ("PATH", "/bin"),
    ]);
    inputs.flags = vec![
        flag("engine.backend", "uring"),
        flag("engine.backend", "mmap"),
        flag("log.format", "json"),
    ];
    let loaded = load(&inputs).unwrap();
    let config = &loaded.config;
    assert_eq!(config.engine.backend, BackendKind::Mmap);
    assert_eq!(config.engine.uring.queue_depth, 8);
    assert!(!config.engine.pin);
    assert_eq!(config.limits.response_bytes, 1 << 20);
    assert_eq!(config.http_listen, "[::1]:7411".parse().unwrap());
    assert_eq!(config.admin_listen, None);
    assert_eq!(config.log.format, LogFormat::Json);
    assert_eq!(config.limits.items_per_request, 4096);
    let source = |key: &str| {
        loaded
            .settings
            .iter()
            .find(|setting| setting.key == key)
            .unwrap()
            .source
            .clone()
    };
    assert_eq!(
        source("engine.backend"),
        Source::Flag("--set engine.backend".to_owned())
    );
    let variable = "RINGFETCH__ENGINE__URING__QUEUE_DEPTH".to_owned();
    assert_eq!(source("engine.uring.queue_depth"), Source::Environment(variable));
    assert_eq!(source("engine.pin"), Source::File(path));
    assert_eq!(source("limits.items_per_request"), Source::Default);
}

#[test]
fn bad_variables_and_flags_are_named() {
    // Scenario: unknown keys, wrong values, sections and datasets set by environment and flags, single
    // underscores, one key by two variables, one of 100,000 parts. Expectation: each is a problem whose source is the variable or
    // the flag.
    let mut inputs = demo();
    let long = ["a"; 100_000].join(".");
    inputs.environment = environment(&[
        ("RINGFETCH__ENGINE__BACKND", "mmap"),
        ("RINGFETCH__ENGINE__BACKEND", "fast"),
        ("RINGFETCH__engine__Backend", "mmap"),
        ("RINGFETCH__ENGINE__PIN", ""),
        ("RINGFETCH__ENGINE", "mmap"),
        ("RINGFETCH__DATASETS__0__NAME", "a"),
        ("RINGFETCH__", "a"),
        ("RINGFETCH_LOG_FILTER", "debug"),
    ]);
    inputs.flags = vec![
        flag("limits", "5"),
        flag("limits.connections.most", "5"),
        flag("", "5"),
        flag("log.format", ""),
        flag("log.filter", "99999999999999999999"),
        flag(&long, "5"),
    ];
    inputs.flags.insert(0, flag("limits.connections", "0"));
    let problems = load(&inputs).unwrap_err();
    let found: BTreeSet<_> = problems
        .0
        .iter()
        .map(|problem| format!("{}: {problem}", problem.source))
        .collect();
    let expected = [
        (
            "environment RINGFETCH__ENGINE__BACKND",
            "engine.backnd: is not a key here; did you mean backend?",
        ),
        (
            "environment RINGFETCH__ENGINE__BACKEND",
            "engine.backend: is \"fast\"; allowed: uring, mmap, auto, pread",
        ),
        (
            "environment RINGFETCH__engine__Backend",
            "engine.backend: is also set by RINGFETCH__ENGINE__BACKEND; set one of the two",
        ),
        (
            "environment RINGFETCH__ENGINE__PIN",
            "engine.pin: has no value; allowed: true or false",
        ),
        ("environment RINGFETCH__ENGINE", "engine: is"),
        (
            "environment RINGFETCH__DATASETS__0__NAME",
            "datasets.0.name: cannot be set here",
        ),
        ("environment RINGFETCH__", ": is not a key path"),
        (
            "environment RINGFETCH_LOG_FILTER",
            "log.filter: is not set by a name with single underscores; the variable is RINGFETCH__LOG__FILTER",
        ),
        ("flag --set limits", "limits: is a section"),
        ("flag --set limits.connections", "limits.connections: is 0"),
        (
            "flag --set limits.connections.most",
            "limits.connections.most: is inside a value that is not a section",
        ),
        ("flag --set ", ": is not a key path"),
        (
            &format!("flag --set {long}"),
            &format!("{long}: is not a key path"),
        ),
        ("flag --set log.format", "log.format: has no value"),
        ("flag --set log.filter", "log.filter: is 1e20, which is not text"),
    ];
    for (source, problem) in expected {
        let wanted = format!("{source}: {problem}");
        assert!(
            found.iter().any(|found| found.starts_with(&wanted)),
            "no {wanted:?} in {found:#?}"
        );
    }
    assert_eq!(problems.0.len(), expected.len(), "{problems}");
}

#[test]
fn defaults_follow_a_smaller_limit_down() {
    // Scenario: only a small budget is set, then only few requests. Expectation: valid; defaults shrink to
    // fit.
    let mut inputs = demo();
    inputs.flags = vec![
        flag("engine.memory_budget", "1MiB"),
        flag("limits.requests_in_flight", "8"),
    ];
    let config = load(&inputs).unwrap().config;
    assert_eq!(config.limits.response_bytes, 256 << 10);
    assert_eq!(config.engine.connection_bytes, 1 << 20);
    assert_eq!(
        (
            config.limits.requests_per_connection,
            config.limits.stream_requests_in_flight
        ),
        (8, 8)
    );

    // Scenario: only the bounds of the queue and of a connection, as runbooks lower them. Expectation: the same; printed, too.
    inputs.flags = vec![
        flag("limits.queued_reads", "2000"),
        flag("limits.connection_bytes", "1MiB"),
    ];
    let lower = load(&inputs).unwrap_or_else(|problems| panic!("{problems}"));
    let limits = &lower.config.limits;
    assert_eq!((limits.items_per_request, limits.response_bytes), (2000, 1 << 20));
    let printed = to_yaml(&lower.settings);
    for line in [
        "items_per_request: 2000 # default",
        "response_bytes: 1MiB # default",
        "queued_reads: 2000 # flag",
    ] {
        assert!(printed.contains(line), "{printed}");
    }
    // Scenario: only more items. Expectation: the queue has room for them.
    inputs.flags = vec![flag("limits.items_per_request", "100000")];
    assert_eq!(load(&inputs).unwrap().config.engine.queued_reads, 100_000);
}

#[test]
fn datasets_are_read_whole() {
    // Scenario: every kind, several paths, suffixes, an inherited and an overridden direct_io. Expectation:
    // the types have the values of the file; relative paths start at the file's directory.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.yaml");
    let text = "
engine: { direct_io: required }
datasets:
  - { name: a, kind: blocks, paths: [a0.bin, /dev/a1], block_bytes: 64KiB, partial_tail: ignore, direct_io: off }
  - { name: b, kind: vectors, path: sub/b.FVECS, dim: 96 }
  - { name: c, kind: vectors, path: c.dat, layout: raw, dim: 3, dtype: f16, header_bytes: 1KiB }
  - { name: d, kind: objects, path: d, max_open_files: 5, revalidate_ms: 0 }
";
    std::fs::write(&path, text).unwrap();
    let datasets = load(&of_file(&path)).unwrap().config.datasets;
    let at = |name: &str| directory.path().join(name);
    assert_eq!(datasets[0].paths, [at("a0.bin"), "/dev/a1".into()]);
    assert_eq!(
        datasets[0].kind,
        KindSpec::Blocks {
            block_bytes: 65_536,
            partial_tail: PartialTail::Ignore
        }
    );
    assert_eq!(
        (datasets[0].direct_io, datasets[1].direct_io),
        (DirectIo::Off, DirectIo::Required)
    );
    assert_eq!(datasets[1].paths, [at("sub/b.FVECS")]);
    let fvecs = KindSpec::Vectors {
        layout: Layout::Fvecs,
        dim: Some(96),
        dtype: None,
        header_bytes: 0,
    };
    assert_eq!(datasets[1].kind, fvecs);
    let raw = KindSpec::raw_vectors(3, Dtype::F16, 1024);
    assert_eq!(datasets[2].kind, raw);
    let objects = KindSpec::objects(5, std::time::Duration::ZERO);
    assert_eq!(datasets[3].kind, objects);
}

/// Paths of all keys in a YAML value, without list indices.
fn keys_of(value: &Value, path: &str, keys: &mut BTreeSet<String>) {
    match value {
        Value::Mapping(entries) => {
            for (key, value) in entries {
                let key = key.as_str().unwrap();
                let path = if path.is_empty() {
                    key.to_owned()
                } else {
                    format!("{path}.{key}")
                };
                keys_of(value, &path, keys);
                keys.insert(path);
            }
        }
        Value::Sequence(items) => items
            .iter()
            .for_each(|item| keys_of(item, &format!("{path}[]"), keys)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Tagged(_) => {}
    }
}

#[test]
fn the_documented_file_has_every_key_with_its_default() {
    // Scenario: config/ringfetchd.yaml, unchanged. Expectation: it is valid, has exactly the known keys, and
    // its values are the defaults, except for `datasets` and dataset keys without a default.
    let value: Value = serde_yaml::from_str(&std::fs::read_to_string(documented()).unwrap()).unwrap();
    let mut keys = BTreeSet::new();
    keys_of(&value, "", &mut keys);
    let known = known_keys();
    assert_eq!(keys, known);
    assert!(known.len() > 50, "{}", known.len());

    let (written, default) = (load(&of_file(&documented())).unwrap(), load(&demo()).unwrap());
    let mut config = written.config.clone();
    config.datasets.clone_from(&default.config.datasets);
    assert_eq!(config, default.config);
    let value_of = |loaded: &ringfetch_server::config::Loaded, key: &str| {
        loaded
            .settings
            .iter()
            .find(|setting| setting.key == key)
            .map(|setting| setting.value.clone())
    };
    for setting in &default.settings {
        if !setting.key.starts_with("datasets") {
            assert_eq!(
                value_of(&written, &setting.key).as_ref(),
                Some(&setting.value),
                "{}",
                setting.key
            );
        }
    }
    // The demo does not set these, so there they have their defaults.
    for (here, there) in [
        ("datasets[0].partial_tail", "datasets[0].partial_tail"),
        ("datasets[0].direct_io", "datasets[0].direct_io"),
        ("datasets[3].max_open_files", "datasets[2].max_open_files"),
        ("datasets[3].revalidate_ms", "datasets[2].revalidate_ms"),
    ] {
        assert_eq!(value_of(&written, here), value_of(&default, there), "{here}");
    }
}

#[test]
fn what_is_printed_reads_back_as_the_same() {
    // Scenario: the documented file, the demo, and awkward text values, printed and read again. Expectation:
    // the same configuration, with sources in comments.
    let directory = tempfile::tempdir().unwrap();
    let odd = directory.path().join("odd.yaml");
    let text = r#"
admin: { listen: off }
engine: { cores: auto, memory_budget: 1048576, direct_io: off }
log: { filter: "info,ringfetch_engine[span{field=\"x # y\"}]=debug" }
datasets:
  - { name: "1e3", kind: blocks, path: "with # and: \"quotes\" \\ and ümlaut", block_bytes: 3000 }
  - { name: "true", kind: blocks, paths: ["a, b", "null", "[c]"], block_bytes: 1KiB }
  - { name: "c1", kind: blocks, path: "\x7f \x85 \u0090 \u2028 \ufeff \uffff \t \U0001f600", block_bytes: 1 }
"#;
    std::fs::write(&odd, text).unwrap();
    for inputs in [of_file(&documented()), demo(), of_file(&odd)] {
        let first = load(&inputs).unwrap();
        let printed = to_yaml(&first.settings);
        let copy = directory.path().join("copy.yaml");
        std::fs::write(&copy, &printed).unwrap();
        let second = load(&of_file(&copy)).unwrap_or_else(|problems| panic!("{problems}\n{printed}"));
        assert_eq!(first.config, second.config, "{printed}");
        assert!(printed.contains("# default"), "{printed}");
    }
}
