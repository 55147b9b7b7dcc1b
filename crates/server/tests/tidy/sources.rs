//! Rules about source files: where things may be named, how files are headed, what is never left behind.

use super::lexer::{Keep, blank, lines_with_word};
use super::tree::{Source, at_lines, hold};

const HEADER_LINES_MAX: usize = 15;
const FILE_LINES_MAX: usize = 600;
const MODULE_NAMES_REFUSED: [&str; 11] = [
    "util", "utils", "common", "helper", "helpers", "misc", "manager", "managers", "handler", "handlers",
    "shared",
];

fn rust(path: &str, text: &str) -> Source {
    Source::new(path, text)
}

#[test]
fn the_ring_crate_is_named_only_in_its_adapter() {
    // Scenario: every Rust file, comments included. Expectation: the name only in crates/engine/src/backend/uring*.
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

#[test]
fn unsafe_code_is_in_the_engine_only() {
    // Scenario: every Rust file. Expectation: the keyword only in the engine.
    let rule = |source: &Source| {
        if !source.is_rust() || source.path.starts_with("crates/engine/") {
            return Vec::new();
        }
        at_lines(
            source,
            lines_with_word(&blank(&source.text, Keep::Code), "unsafe"),
            "unsafe outside the engine",
        )
    };
    hold(
        "Memory that a kernel writes to is the engine's business. Whoever reviews it must find all of it there.",
        rule,
        &[rust("crates/server/src/fetch.rs", "fn f() { unsafe { g() } }\n")],
        &[
            rust("crates/engine/src/buffer.rs", "fn f() { unsafe { g() } }\n"),
            rust(
                "crates/server/src/fetch.rs",
                "// unsafe is not used\n#![forbid(unsafe_code)]\nlet s = \"unsafe\";\n",
            ),
        ],
    );
}

#[test]
fn every_other_crate_root_forbids_unsafe_code() {
    // Scenario: lib.rs, main.rs and src/bin of every crate but the engine. Expectation: forbid(unsafe_code) stands there.
    let rule = |source: &Source| {
        let parts: Vec<&str> = source.path.split('/').collect();
        let is_root = matches!(parts[..], ["crates", name, "src", "lib.rs" | "main.rs"] if name != "engine")
            || matches!(parts[..], ["crates", name, "src", "bin", _] if name != "engine");
        if !is_root || blank(&source.text, Keep::Code).contains("#![forbid(unsafe_code)]") {
            return Vec::new();
        }
        vec![format!("{}: add #![forbid(unsafe_code)]", source.path)]
    };
    hold(
        "The compiler holds the rule above only where it is told to.",
        rule,
        &[
            rust("crates/client/src/lib.rs", "//! A client.\npub mod pool;\n"),
            rust(
                "crates/cli/src/main.rs",
                "//! #![forbid(unsafe_code)]\nfn main() {}\n",
            ),
        ],
        &[
            rust(
                "crates/client/src/lib.rs",
                "//! A client.\n#![forbid(unsafe_code)]\n",
            ),
            rust("crates/engine/src/lib.rs", "//! The engine.\n"),
        ],
    );
}

/// Lines of a file's header that a reader meets first: up to its first heading (the front page of a public crate may
/// go on), code examples left out. `None`: there is no header.
fn header_lines(text: &str) -> Option<usize> {
    let header = text
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .take_while(|line| !line.starts_with("//! # "));
    let mut in_example = false;
    let mut lines = 0;
    for line in header {
        in_example ^= line.starts_with("//! ```");
        lines += usize::from(!in_example);
    }
    (lines > 0).then_some(lines)
}

#[test]
fn every_file_opens_with_a_short_header() {
    // Scenario: every Rust file but a module's split-off tests. Expectation: a `//!` header of at most 15 lines.
    let rule = |source: &Source| {
        if !source.is_rust() || source.path.ends_with("/tests.rs") {
            return Vec::new();
        }
        match header_lines(&source.text) {
            None => vec![format!("{}: no `//!` header", source.path)],
            Some(lines) if lines > HEADER_LINES_MAX => {
                vec![format!("{}: a header of {lines} lines", source.path)]
            }
            Some(_) => Vec::new(),
        }
    };
    let example = format!(
        "//! A crate.\n//! ```\n{}//! ```\n//! # More\n{}",
        "//! a();\n".repeat(20),
        "//! b\n".repeat(20)
    );
    hold(
        "A reader must learn in one glance what a file owns, its invariants and what is deliberately absent; more \
         than 15 lines are a document and belong in docs/.",
        rule,
        &[
            rust("crates/x/src/a.rs", "use std::fs;\n"),
            rust("crates/x/tests/a.rs", &"//! line\n".repeat(16)),
        ],
        &[
            rust("crates/x/src/a.rs", "//! Owns a.\n"),
            rust("crates/x/src/b.rs", &"//! line\n".repeat(15)),
            rust("crates/x/src/lib.rs", &example),
            rust("crates/x/src/a/tests.rs", "use super::*;\n"),
        ],
    );
}

#[test]
fn no_file_is_longer_than_600_lines() {
    // Scenario: every file somebody wrote. Expectation: at most 600 lines.
    let rule = |source: &Source| {
        let written = [".rs", ".py", ".proto", ".sh"]
            .iter()
            .any(|ending| source.path.ends_with(ending));
        let lines = source.text.lines().count();
        if !written || lines <= FILE_LINES_MAX {
            return Vec::new();
        }
        vec![format!("{}: {lines} lines", source.path)]
    };
    hold(
        "A file this long hides more than one decision: split it by what each part hides.",
        rule,
        &[rust("crates/x/src/a.rs", &"\n".repeat(601))],
        &[
            rust("crates/x/src/a.rs", &"\n".repeat(600)),
            Source::new("docs/A.md", &"\n".repeat(9000)),
        ],
    );
}

#[test]
fn no_module_is_named_after_nothing() {
    // Scenario: every Rust file and directory, and inline modules. Expectation: no util, common, helpers and the like.
    let rule = |source: &Source| {
        if !source.is_rust() {
            return Vec::new();
        }
        let refused = |name: &str| MODULE_NAMES_REFUSED.contains(&name);
        let parts = source.path.trim_end_matches(".rs").split('/');
        let mut found: Vec<String> = parts
            .filter(|part| refused(part))
            .map(|part| format!("{}: {part}", source.path))
            .collect();
        for line in blank(&source.text, Keep::Code).lines() {
            let mut words = line.split_whitespace().skip_while(|word| *word != "mod");
            let name = words.nth(1).unwrap_or_default().trim_end_matches([';', '{']);
            if refused(name) {
                found.push(format!("{}: mod {name}", source.path));
            }
        }
        found
    };
    hold(
        "A module hides one decision and is named after it. These names say only that nobody decided.",
        rule,
        &[
            rust("crates/x/src/util.rs", "//! x\n"),
            rust("crates/x/tests/common/mod.rs", "//! x\n"),
            rust("crates/x/src/a.rs", "pub(crate) mod helpers {\n}\n"),
        ],
        &[rust("crates/x/src/geometry.rs", "//! x\nmod commons_license;\n")],
    );
}

#[test]
fn nothing_unfinished_is_left_behind() {
    // Scenario: every Rust and Python file. Expectation: no placeholder macros or notes to self; an ignored test says
    // what it needs, and `.ci/run` has that and runs it.
    let macros = [
        concat!("to", "do"),
        concat!("unimple", "mented"),
        concat!("db", "g"),
    ];
    let notes = [
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("TO", "DO"),
        concat!("HA", "CK"),
    ];
    let rule = |source: &Source| {
        let is_python = source.path.ends_with(".py");
        if !source.is_rust() && !is_python {
            return Vec::new();
        }
        let code = blank(&source.text, Keep::Code);
        let mut found = Vec::new();
        for name in macros {
            let calls = lines_with_word(&code, name).into_iter();
            let calls = calls.filter(|line| {
                code.lines()
                    .nth(line - 1)
                    .is_some_and(|l| l.contains(&format!("{name}!")))
            });
            found.extend(at_lines(source, calls.collect(), name));
        }
        let ignored = code
            .lines()
            .zip(source.text.lines())
            .enumerate()
            .filter(|(_, (code, line))| {
                code.trim_start().starts_with("#[ignore") && !line.contains("#[ignore = \"needs ")
            });
        found.extend(at_lines(
            source,
            ignored.map(|(number, _)| number + 1).collect(),
            "an ignored test that does not say what it needs",
        ));
        for note in notes {
            found.extend(at_lines(source, lines_with_word(&source.text, note), note));
        }
        found
    };
    let placeholder = format!("fn f() {{ {}!() }}\n", macros[0]);
    let note = format!("// {}: later\n", notes[0]);
    hold(
        "What is not done is not in the tree: a placeholder panics in production, a test that never runs holds nothing.",
        rule,
        &[
            rust("crates/x/src/a.rs", &placeholder),
            rust("crates/x/src/a.rs", &note),
            rust("crates/x/tests/a.rs", "    #[ignore = \"slow\"]\n"),
        ],
        &[
            rust(
                "crates/x/src/a.rs",
                "#![warn(clippy::todo)]\nlet s = \"todo!()\";\n",
            ),
            rust("crates/x/tests/a.rs", "    #[ignore = \"needs root\"]\n"),
        ],
    );
}

/// The lines (from 1) of a file that are tests: all of a tests directory's, else those after `#[cfg(test)]`.
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
    // Scenario: every test. Expectation: a sleep only as the pause of a poll whose deadline stands within 12 lines.
    let word = concat!("sle", "ep");
    let rule = |source: &Source| {
        let code = blank(&source.text, Keep::Code);
        let Some(first) = first_test_line(source, &code).filter(|_| source.is_rust()) else {
            return Vec::new();
        };
        // On tokio's paused clock a sleep is a statement about order and takes no time.
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
fn every_test_says_its_scenario_first() {
    // Scenario: every test function. Expectation: a comment as its first line, or a doc comment above it.
    let rule = |source: &Source| {
        if !source.is_rust() {
            return Vec::new();
        }
        let text = blank(&source.text, Keep::CodeAndComments);
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let is_test = |line: &str| line == "#[test]" || line.starts_with("#[tokio::test");
        let silent = |attribute: usize| {
            let above = lines[..attribute]
                .iter()
                .rev()
                .find(|line| !line.starts_with("#["))
                .copied()
                .unwrap_or_default();
            let body = lines[attribute..]
                .iter()
                .skip_while(|line| !line.ends_with('{'))
                .nth(1)
                .copied();
            !above.starts_with("///") && !body.is_some_and(|line| line.starts_with("//"))
        };
        let found = (0..lines.len())
            .filter(|at| is_test(lines[*at]) && silent(*at))
            .map(|at| at + 1);
        at_lines(
            source,
            found.collect(),
            "a test without its scenario and expectation",
        )
    };
    hold(
        "Who meets a failing test must read what was to happen, not work it out.",
        rule,
        &[rust(
            "crates/x/src/a.rs",
            "#[test]\nfn f() {\n    assert!(g());\n}\n",
        )],
        &[
            rust(
                "crates/x/src/a.rs",
                "#[test]\nfn f() {\n    // Scenario: g. Expectation: true.\n    assert!(g());\n}\n",
            ),
            rust(
                "crates/x/src/a.rs",
                "/// g is true.\n#[tokio::test]\nasync fn f() {\n    assert!(g());\n}\n",
            ),
        ],
    );
}

#[test]
fn no_file_names_somebodys_machine() {
    // Scenario: every text file. Expectation: no path below somebody's home or working directory.
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
                    // `https://host/home/x` and `.../work/x` are parts of longer paths and of URLs.
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
