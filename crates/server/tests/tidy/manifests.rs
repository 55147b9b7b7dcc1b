//! Rules about Cargo.toml: which crates may depend on which.

use super::tree::{Source, hold};

/// Our crates, and those of our crates that each may depend on.
const ARROWS: [(&str, &[&str]); 15] = [
    ("ringfetch-proto", &[]),
    ("ringfetch-command", &[]),
    ("ringfetch-host", &[]),
    ("ringfetch-engine", &["ringfetch-host"]),
    ("ringfetch-pattern", &["ringfetch-engine"]),
    ("ringfetch-score", &["ringfetch-engine"]),
    (
        "ringfetch-server",
        &[
            "ringfetch-command",
            "ringfetch-engine",
            "ringfetch-host",
            "ringfetch-pattern",
            "ringfetch-proto",
            "ringfetch-score",
        ],
    ),
    ("ringfetch-client", &["ringfetch-proto"]),
    ("ringfetch-pace", &[]),
    ("ringfetch-baselines", &[]),
    (
        "ringfetch-lab",
        &[
            "ringfetch-baselines",
            "ringfetch-client",
            "ringfetch-command",
            "ringfetch-engine",
            "ringfetch-host",
            "ringfetch-pace",
            "ringfetch-pattern",
            "ringfetch-score",
        ],
    ),
    (
        "ringfetch-cli",
        &[
            "ringfetch-client",
            "ringfetch-command",
            "ringfetch-engine",
            "ringfetch-host",
            "ringfetch-lab",
            "ringfetch-pace",
            "ringfetch-pattern",
            "ringfetch-score",
        ],
    ),
    // A disk for tests: allowed only among the dev-dependencies of others.
    ("ringfetch-slowdisk", &[]),
    // Clients for tests: the same.
    ("ringfetch-adversary", &["ringfetch-client", "ringfetch-proto"]),
    // Pieces of a read's path, for benchmarks.
    (
        "ringfetch-pieces",
        &["ringfetch-engine", "ringfetch-proto", "ringfetch-server"],
    ),
];

/// What the data plane must not depend on.
const NOT_IN_ENGINE: [&str; 9] = [
    "tonic",
    "tonic-prost",
    "prost",
    "axum",
    "hyper",
    "http",
    "serde_yaml",
    "serde_json",
    "clap",
];

fn is_crate_manifest(source: &Source) -> bool {
    source.path.starts_with("crates/") && source.path.ends_with("/Cargo.toml")
}

/// The package's name and its dependencies, except dev-dependencies.
fn dependencies(manifest: &str) -> (String, Vec<String>) {
    let mut section = "";
    let mut name = String::new();
    let mut found = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']');
            // `[dependencies.foo]` is another way to write it.
            let table = section
                .split_once("dependencies.")
                .filter(|(before, _)| !before.ends_with("dev-"));
            found.extend(table.map(|(_, dependency)| dependency.to_owned()));
        } else if section == "package" && line.starts_with("name") {
            name = line.split('"').nth(1).unwrap_or_default().to_owned();
        } else if section.ends_with("dependencies") && !section.ends_with("dev-dependencies") {
            let key = line.split(['=', '.', ' ']).next().unwrap_or_default();
            if !key.is_empty() && !key.starts_with('#') {
                found.push(key.to_owned());
            }
        }
    }
    (name, found)
}

#[test]
fn arrows_between_our_crates_point_one_way() {
    // Scenario: every crate's dependencies. Expectation: only the arrows of docs/ARCHITECTURE.md.
    let rule = |source: &Source| {
        if !is_crate_manifest(source) {
            return Vec::new();
        }
        let (name, found) = dependencies(&source.text);
        let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
            return vec![format!(
                "{}: {name} has no place in the arrows: give it one in this test",
                source.path
            )];
        };
        let ours = found
            .iter()
            .filter(|dependency| dependency.starts_with("ringfetch-"));
        ours.filter(|dependency| !allowed.contains(&dependency.as_str()))
            .map(|dependency| format!("{}: {name} -> {dependency}", source.path))
            .collect()
    };
    let manifest = |body: &str| Source::new("crates/x/Cargo.toml", body);
    hold(
        "A crate may stand only on those below it (engine -> host; pattern -> engine; server -> engine, proto; client -> proto; \
         cli -> client, engine, lab, pace; lab -> client, engine, pace, pattern, baselines), \
         so that the engine can be read, tested and replaced without the network, and a client carries no server.",
        rule,
        &[
            manifest(
                "[package]\nname = \"ringfetch-engine\"\n[dependencies]\nringfetch-proto.workspace = true\n",
            ),
            manifest(
                "[package]\nname = \"ringfetch-client\"\n[dependencies.ringfetch-engine]\nworkspace = true\n",
            ),
            manifest("[package]\nname = \"ringfetch-new\"\n"),
        ],
        &[
            manifest(
                "[package]\nname = \"ringfetch-client\"\n[dependencies]\nringfetch-proto = { path = \"x\" }\n",
            ),
            manifest(
                "[package]\nname = \"ringfetch-engine\"\n[dev-dependencies]\nringfetch-client.workspace = true\n",
            ),
        ],
    );
}

#[test]
fn the_engine_knows_no_transport_and_no_configuration_format() {
    // Scenario: the engine's dependencies. Expectation: no gRPC, HTTP, YAML, JSON or command line among them.
    let rule = |source: &Source| {
        let (name, found) = dependencies(&source.text);
        if !is_crate_manifest(source) || name != "ringfetch-engine" {
            return Vec::new();
        }
        let outside = found
            .iter()
            .filter(|dependency| NOT_IN_ENGINE.contains(&dependency.as_str()));
        outside
            .map(|dependency| format!("{}: {dependency}", source.path))
            .collect()
    };
    let engine = |body: &str| {
        Source::new(
            "crates/engine/Cargo.toml",
            &format!("[package]\nname = \"ringfetch-engine\"\n[dependencies]\n{body}"),
        )
    };
    hold(
        "The engine is the data plane: what speaks to people and networks stands above it, or every transport's \
         release would be the engine's too.",
        rule,
        &[engine("tonic.workspace = true\n"), engine("serde_yaml = \"1\"\n")],
        &[engine("bytes.workspace = true\n")],
    );
}
