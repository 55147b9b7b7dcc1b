//! How the file is read, before its keys are.

use ringfetch_server::config::{load, to_yaml};

use crate::{lines, of_file};

#[test]
fn a_byte_order_mark_is_no_document() {
    // Scenario: a file that starts with a byte order mark, as some editors write it; an empty filter.
    // Expectation: the file is read; the filter is refused, since it would silence the log.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.yaml");
    let dataset = "datasets: [{ name: a, kind: blocks, path: a.bin, block_bytes: 4096 }]";
    std::fs::write(&path, format!("\u{feff}engine: {{ backend: mmap }}\n{dataset}\n")).unwrap();
    assert_eq!(
        load(&of_file(&path)).unwrap().config.engine.backend.as_str(),
        "mmap"
    );
    std::fs::write(&path, format!("log: {{ filter: '' }}\n{dataset}\n")).unwrap();
    let problems = lines(&load(&of_file(&path)).expect_err("an empty filter"));
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(
        problems[0].starts_with("log.filter: is \"\": it names no level"),
        "{problems:?}"
    );
}

#[test]
fn merges_nest() {
    // Scenario: a dataset that merges one that merges another, and one that merges two such. Expectation: all keys, each
    // from the nearest that has it.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("merges.yaml");
    let text = "datasets:
  - &a { name: a, kind: blocks, path: a.bin, block_bytes: 4096, partial_tail: ignore }
  - &b { <<: *a, name: b, path: b.bin }
  - { <<: *b, name: c }
  - &d { <<: { direct_io: off }, name: d, kind: blocks, path: d.bin, block_bytes: 512 }
  - { <<: [*d, *b], name: e }
";
    std::fs::write(&file, text).unwrap();
    let loaded = load(&of_file(&file)).unwrap_or_else(|problems| panic!("{problems}"));
    let printed = to_yaml(&loaded.settings).replace(&format!(" # {}", file.display()), "");
    let [.., c, _, e] = &printed.split("\n  - ").collect::<Vec<_>>()[..] else {
        panic!("{printed}");
    };
    for line in ["name: c", "/b.bin", "block_bytes: 4KiB", "partial_tail: ignore"] {
        assert!(c.contains(line), "{printed}");
    }
    for line in [
        "name: e",
        "/d.bin",
        "block_bytes: 512",
        "partial_tail: ignore",
        "direct_io: off",
    ] {
        assert!(e.contains(line), "{printed}");
    }
}

#[test]
fn aliases_that_stand_for_gigabytes_are_refused() {
    // Scenario: a list of 5,000 entries, and 3,000 aliases of it: 15 million values in 25 KiB. Expectation: one problem, which
    // says why.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("aliases.yaml");
    let (entries, aliases) = ("0,".repeat(5000), "*a,".repeat(3000));
    std::fs::write(&file, format!("datasets: [&a [{entries}], {aliases}]\n")).unwrap();
    let problems = lines(&load(&of_file(&file)).expect_err("too many values"));
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].contains("more than 1048576 values"), "{problems:?}");
}

#[test]
fn brackets_and_words_that_go_on_are_refused_at_once() {
    // Scenario: four megabytes of open brackets; a key and a value of a million letters. Expectation: one problem each, which says
    // why, within the time that a test has.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("long.yaml");
    let dataset = "datasets: [{ name: a, kind: blocks, path: a.bin, block_bytes: 4096 }]";
    let (brackets, letters) = ("[".repeat(4_000_000), "m".repeat(1_000_000));
    for (text, expected) in [
        (format!("a: {brackets}\n"), "more than 256 brackets"),
        (format!("? {letters}\n: 1\n{dataset}\n"), "is not a key here"),
        (
            format!("engine: {{ backend: {letters} }}\n{dataset}\n"),
            "allowed: uring, mmap",
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let problems = lines(&load(&of_file(&file)).expect_err(expected));
        assert_eq!(problems.len(), 1, "{expected}");
        assert!(problems[0].contains(expected), "{}", &problems[0][..100]);
    }
}
