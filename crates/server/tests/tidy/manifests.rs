//! Rules about Cargo.toml: which crates may depend on which.

use super::tree::{Source, hold};

/// What crates must not depend on.
struct Rule {
    of: fn(&str) -> bool,
    not_on: fn(&str) -> bool,
    why: &'static str,
}

const OURS: &str = "ringfetch-";

/// cargo itself refuses cycles.
const RULES: [Rule; 5] = [
    Rule {
        of: |name| name == "ringfetch-engine",
        not_on: |on| on.starts_with(OURS) && on != "ringfetch-host",
        why: "the engine is read, tested and replaced without what stands above it",
    },
    Rule {
        of: |name| name == "ringfetch-engine",
        not_on: |on| NOT_IN_ENGINE.contains(&on),
        why: "the engine is the data plane, without transport, configuration format or command line",
    },
    Rule {
        of: |name| name == "ringfetch-client",
        not_on: |on| on.starts_with(OURS) && on != "ringfetch-proto",
        why: "a client carries no server",
    },
    Rule {
        of: |name| name != "ringfetch-pieces",
        not_on: |on| on == "ringfetch-server",
        why: "nothing stands on the server but the benchmark of its pieces",
    },
    Rule {
        of: |_| true,
        not_on: |on| matches!(on, "ringfetch-slowdisk" | "ringfetch-adversary"),
        why: "the disk and the clients for tests are dev-dependencies",
    },
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
fn crates_depend_only_on_those_below_them() {
    // Scenario: every crate's dependencies. Expectation: none that the rules forbid.
    let rule = |source: &Source| {
        if !is_crate_manifest(source) {
            return Vec::new();
        }
        let (name, found) = dependencies(&source.text);
        let broken = RULES.iter().filter(|rule| (rule.of)(&name));
        let broken = broken.flat_map(|rule| {
            let found = found.iter().filter(|on| (rule.not_on)(on));
            found.map(|on| format!("{}: {name} -> {on}: {}", source.path, rule.why))
        });
        broken.collect()
    };
    let of = |name: &str, body: &str| {
        Source::new(
            "crates/x/Cargo.toml",
            &format!("[package]\nname = \"{name}\"\n{body}"),
        )
    };
    hold(
        "A crate may stand only on those below it.",
        rule,
        &[
            of(
                "ringfetch-engine",
                "[dependencies]\nringfetch-proto.workspace = true\n",
            ),
            of("ringfetch-engine", "[dependencies]\ntonic.workspace = true\n"),
            of("ringfetch-engine", "[dependencies]\nserde_yaml = \"1\"\n"),
            of(
                "ringfetch-client",
                "[dependencies.ringfetch-engine]\nworkspace = true\n",
            ),
            of(
                "ringfetch-cli",
                "[dependencies]\nringfetch-server = { path = \"x\" }\n",
            ),
            of(
                "ringfetch-lab",
                "[dependencies]\nringfetch-slowdisk.workspace = true\n",
            ),
        ],
        &[
            of(
                "ringfetch-client",
                "[dependencies]\nringfetch-proto = { path = \"x\" }\n",
            ),
            of(
                "ringfetch-engine",
                "[dev-dependencies]\nringfetch-client.workspace = true\n",
            ),
            of("ringfetch-engine", "[dependencies]\nbytes.workspace = true\n"),
            of(
                "ringfetch-pieces",
                "[dependencies]\nringfetch-server.workspace = true\n",
            ),
        ],
    );
}
