//! Rules that keep documents true: the map of the code against the tree, links and paths, keys of the configuration, and the
//! metrics in dashboards and rules against those that the code registers.

use super::tree::{Source, report, root, text_of, tree};
use ringfetch_server::config::known_keys;
use std::collections::BTreeSet;

const MAP: &str = "docs/ARCHITECTURE.md";

/// Names in backticks that are paths of this repository.
fn paths_named(text: &str) -> Vec<&str> {
    const TOPS: [&str; 8] = [
        "crates/", "proto/", "docs/", "config/", "deploy/", "clients/", "bench/", ".ci/",
    ];
    let quoted = text.split('`').skip(1).step_by(2);
    let is_path =
        |name: &&str| TOPS.iter().any(|top| name.starts_with(top)) && !name.contains([' ', '*', '{', '<']);
    quoted
        .filter(is_path)
        .map(|name| name.trim_end_matches('/'))
        .collect()
}

/// Paths that a document names and that are not in the tree.
fn paths_missing(text: &str, tree: &[Source]) -> Vec<String> {
    let exists = |path: &str| {
        // A module may be `a.rs` or `a/mod.rs`; the map does not say which.
        let module = format!("{path}.rs");
        let inside = format!("{path}/");
        tree.iter()
            .any(|s| s.path == path || s.path == module || s.path.starts_with(&inside))
    };
    paths_named(text)
        .into_iter()
        .filter(|path| !exists(path))
        .map(str::to_owned)
        .collect()
}

/// Modules of our crates (first level, without roots) that a document does not name.
fn modules_unnamed(text: &str, tree: &[Source]) -> Vec<String> {
    let named = paths_named(text);
    let mut modules: Vec<String> = Vec::new();
    for source in tree.iter().filter(|s| s.is_rust()) {
        let Some((crate_path, inside)) = source.path.split_once("/src/") else {
            continue;
        };
        let first = inside.split('/').next().unwrap_or(inside).trim_end_matches(".rs");
        if !["lib", "main", "bin"].contains(&first) {
            modules.push(format!("{crate_path}/src/{first}"));
        }
    }
    modules.sort();
    modules.dedup();
    modules.retain(|module| !named.iter().any(|name| name.trim_end_matches(".rs") == module));
    modules
}

#[test]
fn the_map_of_the_code_is_true_and_whole() {
    // Scenario: ARCHITECTURE.md against the tree. Expectation: every path that it names exists, and it names
    // every module.
    let sample = [
        Source::new("crates/x/src/a.rs", "//! a\n"),
        Source::new("crates/x/src/b/mod.rs", "//! b\n"),
    ];
    let whole = "`crates/x/src/a.rs` and `crates/x/src/b`";
    assert_eq!(
        paths_missing("`crates/x/src/gone.rs`", &sample),
        ["crates/x/src/gone.rs"],
        "self-check"
    );
    assert_eq!(
        modules_unnamed("`crates/x/src/a.rs`", &sample),
        ["crates/x/src/b"],
        "self-check"
    );
    assert!(
        paths_missing(whole, &sample).is_empty() && modules_unnamed(whole, &sample).is_empty(),
        "self-check"
    );

    let tree = tree();
    let text = text_of(&tree, MAP);
    let missing = paths_missing(text, &tree).into_iter();
    let missing = missing.map(|path| format!("{MAP} names {path}: no such file"));
    let unnamed = modules_unnamed(text, &tree).into_iter();
    let unnamed = unnamed.map(|module| format!("{MAP} does not name `{module}`"));
    report(
        "A map that lies is worse than none: name each module of our crates, by its path, in the map.",
        &missing.chain(unnamed).collect::<Vec<_>>(),
    );
}

#[test]
fn every_document_names_files_that_exist() {
    // Scenario: README and everything below docs/ and clients/. Expectation: paths in backticks exist.
    let tree = tree();
    let sample = Source::new("README.md", "see `docs/GONE.md`");
    assert!(!paths_missing(&sample.text, &tree).is_empty(), "self-check");
    let missing = |source: &Source| {
        let path = source.path.clone();
        paths_missing(&source.text, &tree)
            .into_iter()
            .map(move |gone| format!("{path}: {gone}"))
    };
    let documents = tree.iter().filter(|source| source.is_document());
    let found: Vec<String> = documents.flat_map(missing).collect();
    report("A reader who follows a path must arrive somewhere.", &found);
}

/// Targets of a Markdown text's links and images, except in fenced code.
fn links(text: &str) -> Vec<&str> {
    let mut fenced = false;
    let mut found = Vec::new();
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        if !fenced {
            found.extend(line.split("](").skip(1).filter_map(|rest| rest.split(')').next()));
        }
    }
    found
}

/// The anchors that GitHub generates for a document's headings.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let kept = |c: char| c.is_alphanumeric() || " -_".contains(c);
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            title
                .chars()
                .filter(|c| kept(*c))
                .collect::<String>()
                .replace(' ', "-")
        })
        .collect()
}

/// `docs/a/../B.md` as `docs/B.md`.
fn joined(document: &str, target: &str) -> String {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in target.trim_end_matches('/').split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Links of a document that lead to no file, or to no heading in it.
fn links_broken(document: &Source, tree: &[Source]) -> Vec<String> {
    // Images that are not text are not in the tree.
    let on_disk = |path: &str| root().join(path).exists();
    let has =
        |text: &str, anchor: &str| anchor.is_empty() || anchors(text).iter().any(|known| known == anchor);
    let leads = |link: &str| {
        let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
        if target.is_empty() {
            return has(&document.text, anchor);
        }
        let path = joined(&document.path, target);
        let inside = || {
            tree.iter()
                .any(|source| source.path.starts_with(&format!("{path}/")))
        };
        match tree.iter().find(|source| source.path == path) {
            Some(source) => has(&source.text, anchor),
            None => anchor.is_empty() && (inside() || on_disk(&path)),
        }
    };
    let is_ours = |link: &&str| !link.contains("://") && !link.starts_with("mailto:");
    let broken = links(&document.text)
        .into_iter()
        .filter(is_ours)
        .filter(|link| !leads(link));
    broken.map(|link| format!("{}: {link}", document.path)).collect()
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    // Scenario: links between documents, with anchors. Expectation: each target exists.
    let tree_of_samples = [
        Source::new("docs/A.md", "# A b `c`\n"),
        Source::new("README.md", "## Try it, now\n"),
    ];
    let broken = |text: &str| links_broken(&Source::new("docs/X.md", text), &tree_of_samples).len();
    let good = "# Own\n[a](A.md#a-b-c) [b](../README.md#try-it-now) [c](#own) [d](https://example.org/x)\n";
    assert_eq!(broken(good), 0, "self-check");
    assert_eq!(
        broken("[a](GONE.md) [b](A.md#gone) [c](#gone)\n"),
        3,
        "self-check"
    );
    assert_eq!(broken("```\nf[0](x)\n```\n"), 0, "self-check");

    let tree = tree();
    let documents = tree.iter().filter(|source| source.path.ends_with(".md"));
    let found: Vec<String> = documents
        .flat_map(|document| links_broken(document, &tree))
        .collect();
    report(
        "Each fact is explained once and linked to: a link must arrive.",
        &found,
    );
}

/// Metric names in a text, without the suffixes that Prometheus adds for a histogram.
fn metrics_named(text: &str) -> Vec<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text
        .split(|c: char| !is_name(c))
        .filter(|word| word.starts_with("ringfetch_"));
    let base = |word: &str| {
        let endings = ["_bucket", "_sum", "_count"];
        endings
            .iter()
            .find_map(|ending| word.strip_suffix(ending))
            .unwrap_or(word)
            .to_owned()
    };
    words.map(base).collect()
}

#[test]
fn dashboards_and_rules_ask_for_metrics_that_exist() {
    // Scenario: metric names below deploy/. Expectation: each is a literal in the source of some crate.
    let unknown = |asked: &str, code: &str| -> Vec<String> {
        let known = |name: &String| code.contains(&format!("\"{name}\""));
        metrics_named(asked)
            .into_iter()
            .filter(|name| !known(name))
            .collect()
    };
    let sample = "sum(rate(ringfetch_a_seconds_bucket{stage=\"device\"}[1m])) / ringfetch_b_total";
    assert_eq!(
        unknown(sample, "\"ringfetch_a_seconds\""),
        ["ringfetch_b_total"],
        "self-check"
    );

    let tree = tree();
    let registers = |source: &&Source| source.is_rust() && source.path.contains("/src/");
    let code: String = tree
        .iter()
        .filter(registers)
        .map(|source| source.text.as_str())
        .collect();
    let asks = tree.iter().filter(|source| source.path.starts_with("deploy/"));
    let found: Vec<String> = asks
        .flat_map(|source| {
            unknown(&source.text, &code)
                .into_iter()
                .map(|name| format!("{}: {name}", source.path))
        })
        .collect();
    report(
        "A panel or an alert on a metric that nobody exports is silent for ever.",
        &found,
    );
}

/// Configuration keys, such as `log.filter`, with which a text in backticks begins; not of `grpc`, which begins other names.
fn config_keys_named<'a>(text: &'a str, known: &BTreeSet<String>) -> Vec<&'a str> {
    let is_key = |c: char| c.is_ascii_lowercase() || c == '_' || c == '.';
    let key = |quoted: &'a str| &quoted[..quoted.find(|c| !is_key(c)).unwrap_or(quoted.len())];
    let of_section = |key: &&str| match key.split_once('.') {
        Some(("grpc", _)) | None => false,
        Some((section, _)) => known.contains(section),
    };
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(key)
        .filter(of_section)
        .collect()
}

#[test]
fn documents_name_configuration_keys_that_exist() {
    // Scenario: keys of the configuration that documents name. Expectation: each exists, or is the id of a check of
    // `ringfetch doctor`.
    let sample: BTreeSet<String> = ["log", "log.filter"].map(str::to_owned).into();
    assert_eq!(
        config_keys_named("`log.filter: info` `log.gone` `blog.x` `login` log.no", &sample),
        ["log.filter", "log.gone"],
        "self-check"
    );

    let tree = tree();
    let known = known_keys();
    let checks = text_of(&tree, "docs/DOCTOR.md");
    let is_check = |key: &str| checks.contains(&format!("\n| `{key}` |"));
    let mut named = 0;
    let mut found = Vec::new();
    for document in tree.iter().filter(|source| source.is_document()) {
        for key in config_keys_named(&document.text, &known) {
            named += 1;
            if !known.contains(key) && !is_check(key) {
                found.push(format!("{}: {key}", document.path));
            }
        }
    }
    assert!(named > 100, "the keys were not found: {named}");
    report(
        "Who sets a key that a document names must not have it refused.",
        &found,
    );
}
