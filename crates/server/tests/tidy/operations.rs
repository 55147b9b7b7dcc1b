//! Rules that keep docs/OPERATIONS.md complete: it explains every alert and every log line at warn or error,
//! and no others. The end-to-end tests check metrics, for which they need a daemon.

use super::lexer::blank;
use super::tree::{Source, report, text_of, tree};

const HANDBOOK: &str = "docs/OPERATIONS.md";
const ALERTS: &str = "deploy/prometheus/rules.yml";
/// A row of the handbook may truncate a message after this many bytes.
const MESSAGE_BYTES_MIN: usize = 20;

/// A section of a document: from its heading to the next of the same level.
fn section<'a>(text: &'a str, heading: &str) -> &'a str {
    let begin = text
        .find(&format!("\n## {heading}\n"))
        .map_or(text.len(), |at| at + 1);
    let rest = &text[begin..];
    let end = rest[rest.len().min(3)..]
        .find("\n## ")
        .map_or(rest.len(), |at| at + 3);
    &rest[..end]
}

/// What a file logs at warn and error, without its tests. `Err`: a message that is not a constant.
fn messages(source: &Source) -> Vec<Result<String, String>> {
    let code = blank(&source.text);
    // A declaration of test code in another file may come before code that logs.
    let is_inline = |at: &usize| {
        let item = code[*at..].lines().nth(1).unwrap_or_default();
        item.contains("mod ") && item.contains('{')
    };
    let mut tests = code.match_indices("#[cfg(test)]").map(|(at, _)| at);
    let end = tests.find(is_inline).unwrap_or(code.len());
    let mut found = Vec::new();
    for call in ["tracing::warn!(", "tracing::error!("] {
        for (at, _) in code[..end].match_indices(call) {
            found.push(message(source, &code, at + call.len()));
        }
    }
    found
}

/// The message of a call whose arguments begin at `from`: the last literal that is an argument by itself.
fn message(source: &Source, code: &str, from: usize) -> Result<String, String> {
    let (mut depth, mut argument, mut last) = (0_u32, from, None);
    for (offset, c) in code[from..].char_indices() {
        let at = from + offset;
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth > 0 => depth -= 1,
            ',' | ')' if depth == 0 => {
                if let Ok(literal) = syn::parse_str::<syn::LitStr>(&source.text[argument..at]) {
                    last = Some(literal.value());
                }
                argument = at + 1;
                if c == ')' {
                    break;
                }
            }
            _ => {}
        }
    }
    let line = source.text[..from].lines().count();
    let place = format!("{}:{line}", source.path);
    match last {
        None => Err(format!("{place}: no message")),
        Some(text) if text.contains('{') => Err(format!(
            "{place}: {text:?} is made at run time: put what varies into a field"
        )),
        Some(text) => Ok(text),
    }
}

/// The first cells of a section's tables, if they are code.
fn keys(section: &str) -> Vec<&str> {
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = cells.filter_map(|rest| rest.split_once('`'));
    cells.map(|(key, _)| key).collect()
}

fn explains(key: &str, message: &str) -> bool {
    message == key || (key.len() >= MESSAGE_BYTES_MIN && message.starts_with(key))
}

/// Messages without a row, and rows without a message.
fn log_lines_wrong(handbook: &str, messages: &[String]) -> Vec<String> {
    let keys = keys(section(handbook, "Log lines"));
    let silent = messages
        .iter()
        .filter(|message| !keys.iter().any(|key| explains(key, message)));
    let stale = keys
        .iter()
        .filter(|key| !messages.iter().any(|message| explains(key, message)));
    silent
        .map(|message| format!("{HANDBOOK}, Log lines: nothing of {message:?}"))
        .chain(stale.map(|key| format!("{HANDBOOK}, Log lines: {key:?} is logged nowhere")))
        .collect()
}

#[test]
fn every_warning_and_error_is_explained() {
    // Scenario: what server and engine log at warn and error, against the handbook's table. Expectation: a
    // row for each message, with its beginning or all of it, and a message for each row.
    let sample = Source::new(
        "crates/x/src/a.rs",
        "#[cfg(test)]\nmod order;\nfn f() { tracing::warn!(a = g(\"x, y\"), %b, \"a disk \\\n  (or two) is gone for good\"); }\n\
         fn g() { tracing::error!(\"short\"); }\n#[cfg(test)]\nmod tests { fn f() { tracing::warn!(\"not this\"); } }\n",
    );
    let found: Vec<String> = messages(&sample)
        .into_iter()
        .map(|found| found.expect("a message"))
        .collect();
    assert_eq!(found, ["a disk (or two) is gone for good", "short"], "self-check");
    let varying = Source::new("crates/x/src/a.rs", "tracing::warn!(\"{note}\");\n");
    assert!(messages(&varying)[0].is_err(), "self-check");
    let table = |rows: &str| {
        format!("# A\n\n## Log lines\n\n| line | means |\n|---|---|\n{rows}\n## More\n| `no` | x |\n")
    };
    let whole = table("| `a disk (or two) is gone` | x |\n| `short` | x |\n");
    assert_eq!(
        log_lines_wrong(&whole, &found),
        Vec::<String>::new(),
        "self-check"
    );
    assert_eq!(
        log_lines_wrong(&table("| `short` | x |\n"), &found).len(),
        1,
        "self-check"
    );
    assert_eq!(
        log_lines_wrong(&table("| `a disk` | x |\n| `short` | x |\n"), &found).len(),
        2,
        "self-check"
    );

    let tree = tree();
    let logs = |source: &&Source| {
        source.is_rust()
            && ["crates/server/src/", "crates/engine/src/"]
                .iter()
                .any(|top| source.path.starts_with(top))
            && !source.path.ends_with("/tests.rs")
    };
    let mut found: Vec<String> = Vec::new();
    let mut said: Vec<String> = Vec::new();
    for result in tree.iter().filter(logs).flat_map(messages) {
        match result {
            Ok(message) => said.push(message),
            Err(problem) => found.push(problem),
        }
    }
    assert!(said.len() > 10, "the messages were not found: {said:?}");
    found.extend(log_lines_wrong(text_of(&tree, HANDBOOK), &said));
    report(
        "Whoever is woken by a line in the log must find what it means and what to do.",
        &found,
    );
}

/// Alerts without a runbook, runbooks without an alert, and links that do not lead to one.
fn runbooks_wrong(handbook: &str, rules: &str) -> Vec<String> {
    let values = |key: &'static str| {
        rules
            .lines()
            .filter_map(move |line| line.trim_start().trim_start_matches("- ").strip_prefix(key))
    };
    let alerts: Vec<&str> = values("alert: ").map(str::trim).collect();
    let links: Vec<&str> = values("runbook_url: ").map(str::trim).collect();
    let part = section(handbook, "Alerts");
    let books: Vec<&str> = part
        .lines()
        .filter_map(|line| line.strip_prefix("### "))
        .collect();
    let mut found = Vec::new();
    for alert in &alerts {
        if !books.contains(alert) {
            found.push(format!("{HANDBOOK}, Alerts: no heading `### {alert}`"));
        }
        let anchor = format!("{HANDBOOK}#{}", alert.to_lowercase());
        if !links.contains(&anchor.as_str()) {
            found.push(format!("{ALERTS}: no runbook_url {anchor}"));
        }
    }
    for book in books.iter().filter(|book| !alerts.contains(book)) {
        found.push(format!("{HANDBOOK}, Alerts: {book} is no alert"));
    }
    for book in part.split("\n### ").skip(1) {
        for question in ["**Means.**", "**Look.**", "**Do.**", "**Wake.**"] {
            if !book.contains(question) {
                let name = book.lines().next().unwrap_or_default();
                found.push(format!("{HANDBOOK}, Alerts: {name} has no {question}"));
            }
        }
    }
    found
}

#[test]
fn every_alert_has_its_runbook() {
    // Scenario: the alerts and the handbook. Expectation: each alert has a heading with its name, which says
    // what it means, where to look, what to do and whom to wake, and a link to it; no runbook is without an
    // alert.
    let rules = "  - alert: AbcDown\n    annotations:\n      runbook_url: docs/OPERATIONS.md#abcdown\n";
    let book =
        "# A\n\n## Alerts\n\n### AbcDown\n**Means.** a **Look.** b **Do.** c **Wake.** d\n\n## B\n### Xyz\n";
    assert_eq!(runbooks_wrong(book, rules), Vec::<String>::new(), "self-check");
    assert!(
        !runbooks_wrong(&book.replace("AbcDown", "Abc"), rules).is_empty(),
        "self-check"
    );
    assert!(
        !runbooks_wrong(&book.replace("**Do.**", ""), rules).is_empty(),
        "self-check"
    );
    assert!(
        !runbooks_wrong(book, &rules.replace("#abcdown", "#abc")).is_empty(),
        "self-check"
    );

    let tree = tree();
    let rules = text_of(&tree, ALERTS);
    assert!(rules.contains("alert: "), "{ALERTS} has no alerts, or is gone");
    report(
        "An alert that nobody knows what to do about is noise at night.",
        &runbooks_wrong(text_of(&tree, HANDBOOK), rules),
    );
}
