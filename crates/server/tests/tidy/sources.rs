//! Rules about source files: where names may occur, and how tests wait.

use super::lexer::{blank, lines_with_word};
use super::tree::{Source, at_lines, hold};

fn rust(path: &str, text: &str) -> Source {
    Source::new(path, text)
}

#[test]
fn the_ring_crate_is_named_only_in_its_adapter() {
    // Scenario: every Rust file, comments included. Expectation: the name occurs only in
    // crates/engine/src/backend/uring*.
    let name = concat!("tokio", "_uring");
    let rule = |source: &Source| {
        if !source.is_rust() || source.path.starts_with("crates/engine/src/backend/uring") {
            return Vec::new();
        }
        at_lines(
            source,
            lines_with_word(&source.text, name),
            "names the ring crate",
        )
    };
    let text = format!("use {name}::fs::File;\n");
    hold(
        "tokio-uring is unmaintained and will be replaced one day (ADR 0001): one adapter must be all there is to \
         rewrite. Elsewhere write tokio-uring in prose, and go through the Backend trait in code.",
        rule,
        &[
            rust("crates/engine/src/shard.rs", &text),
            rust("crates/server/src/main.rs", &text),
        ],
        &[
            rust("crates/engine/src/backend/uring.rs", &text),
            rust("crates/engine/src/backend/uring/ring.rs", &text),
        ],
    );
}

/// The first line (from 1) of a file's tests: line 1 in a tests directory or file, otherwise that of
/// `#[cfg(test)]`.
fn first_test_line(source: &Source, code: &str) -> Option<usize> {
    let whole = source.path.contains("/tests/")
        || source.path.ends_with("/tests.rs")
        || source.path.ends_with("_tests.rs");
    if whole {
        return Some(1);
    }
    code.lines()
        .position(|line| line.trim_start().starts_with("#[cfg(test)]"))
        .map(|index| index + 1)
}

#[test]
fn tests_do_not_sleep_to_wait_for_something() {
    // Scenario: every test. Expectation: a sleep is only the pause of a poll whose deadline is within 12
    // lines.
    let word = concat!("sle", "ep");
    let rule = |source: &Source| {
        if !source.is_rust() || !source.text.contains(word) {
            return Vec::new();
        }
        let code = blank(&source.text);
        let Some(first) = first_test_line(source, &code) else {
            return Vec::new();
        };
        // On tokio's paused clock a sleep only determines the order, and takes no time.
        if code.contains("start_paused = true") {
            return Vec::new();
        }
        let lines: Vec<&str> = code.lines().collect();
        let bounded = |line: usize| {
            let window = &lines[line.saturating_sub(12)..(line + 12).min(lines.len())];
            window
                .iter()
                .any(|l| l.to_lowercase().contains("deadline") || l.contains("timeout("))
        };
        let called = |line: usize| lines[line - 1].contains(&format!("{word}("));
        let found = lines_with_word(&code, word).into_iter();
        let found = found.filter(|line| *line >= first && called(*line) && !bounded(*line));
        at_lines(
            source,
            found.collect(),
            "sleeps without a condition and a deadline",
        )
    };
    let naps = format!("#[cfg(test)]\nmod tests {{ fn f() {{ std::thread::{word}(SECOND); }} }}\n");
    hold(
        "A sleep is too short on a busy machine and too long on every other: wait for the condition, up to a deadline.",
        rule,
        &[
            rust("crates/x/src/a.rs", &naps),
            rust("crates/x/tests/a.rs", &naps),
        ],
        &[
            rust("crates/x/src/a.rs", &naps.replace("#[cfg(test)]", "")),
            rust(
                "crates/x/tests/a.rs",
                &format!("while !ready() {{\n assert!(now() < deadline);\n {word}(MS);\n}}\n"),
            ),
        ],
    );
}

#[test]
fn no_file_names_somebodys_machine() {
    // Scenario: every text file. Expectation: no path below a home or working directory.
    let places = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
    ];
    let rule = |source: &Source| {
        let mut found = Vec::new();
        for place in places {
            let begins = |line: &str| {
                line.match_indices(place).any(|(at, _)| {
                    // After these it is part of a longer path or of a URL.
                    !line[..at].ends_with(|c: char| c.is_alphanumeric() || "_-.~}".contains(c))
                })
            };
            let lines = source.text.lines().enumerate().filter(|(_, line)| begins(line));
            found.extend(at_lines(
                source,
                lines.map(|(number, _)| number + 1).collect(),
                place,
            ));
        }
        found
    };
    hold(
        "A path of one machine is wrong on every other.",
        rule,
        &[
            Source::new("docs/A.md", &format!("cd {}me/ringfetch\n", places[0])),
            Source::new("a.yml", &format!("path: {}x\n", places[1])),
        ],
        &[Source::new(
            "docs/A.md",
            "https://example.org/home/page\npath: /var/lib/ringfetch\n",
        )],
    );
}
