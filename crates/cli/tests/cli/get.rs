//! Reads and scores: what comes out, and what cannot be read.

use crate::flaw::Flaw;
use crate::server::{LONG_OBJECT, LONG_OBJECT_BYTES, REPLACED, SEED, start};
use crate::{assert_fields, failure, json, ringfetch, stdout, stream, word};
use ringfetch_engine::dataset::Dtype;
use ringfetch_pattern as pattern;
use serde_json::json as value;
use std::time::Duration;

#[test]
fn items_come_out_in_every_format() {
    let server = start(Flaw::NONE);
    let raw = |args: &str| ringfetch(Some(server), &format!("get {args} --format raw")).stdout;
    assert_eq!(raw("block blocks 3"), stream(3 * 512, 512));

    let dump = stdout(server, "get block blocks 0 999");
    let lines: Vec<&str> = dump.lines().collect();
    assert_eq!((lines.len(), lines[0], lines[33]), (66, "block 0:", "block 999:"));
    // Word 0 of seed 42 is 0xbdd732262feb6e95, little-endian.
    assert!(lines[1].starts_with("00000000: 956e eb2f 2632 d7bd "), "{dump}");
    assert!(lines[65].starts_with("000001f0: "), "{dump}");

    let dump = stdout(server, "get range blocks 496 20");
    let offsets: Vec<&str> = dump.lines().map(|line| &line[..9]).collect();
    assert_eq!(offsets, ["000001f0:", "00000200:"]);

    let mut elements = [0; 48];
    pattern::fill_elements(SEED, Dtype::F16, 7 * 24, &mut elements);
    let halves = elements.as_chunks().0.iter();
    let want: Vec<f32> = halves
        .map(|bytes| half::f16::from_le_bytes(*bytes).to_f32())
        .collect();
    let text = stdout(server, "get vector vectors 7");
    assert!(
        text.split_whitespace()
            .map(|number| number.parse::<f32>().unwrap())
            .eq(want.clone()),
        "{text}"
    );
    let items = json(server, "get vector vectors 7 7");
    let values: Vec<f32> = serde_json::from_value(items["items"][1]["values"].clone()).unwrap();
    assert_eq!(values, want);

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.npy");
    let vectors = "get vector vectors 7 8 9 --format npy --out";
    stdout(server, &format!("{vectors} {}", word(&path)));
    let npy = std::fs::read(&path).unwrap();
    assert_eq!(npy.len(), 128 + 3 * 48);
    assert!(npy[10..].starts_with(b"{'descr': '<f2', 'fortran_order': False, 'shape': (3, 24), }"));
    assert_eq!(npy[128..176], elements);

    let name = pattern::object_name(5);
    let whole = raw(&format!("object objects {name}"));
    assert_eq!(
        pattern::first_difference(pattern::object_seed(SEED, &name), 0, &whole),
        None
    );
    let part = json(
        server,
        &format!("get object objects {name} --offset 2 --length 3"),
    );
    let hex = format!("{:02x}{:02x}{:02x}", whole[2], whole[3], whole[4]);
    assert_eq!(part["items"][0]["hex"], hex);
    // A file gets the bytes as they are.
    let path = directory.path().join("object");
    assert_eq!(
        stdout(
            server,
            &format!("get object objects {name} --out {}", word(&path))
        ),
        ""
    );
    assert_eq!(std::fs::read(&path).unwrap(), whole);
    let empty = pattern::object_name(0);
    assert_eq!(stdout(server, &format!("get object objects {empty}")), "");
    let long = raw(&format!("object objects {LONG_OBJECT}"));
    assert_eq!(long.len() as u64, LONG_OBJECT_BYTES);
    assert_eq!(
        pattern::first_difference(pattern::object_seed(SEED, LONG_OBJECT), 0, &long),
        None
    );
}

#[test]
fn a_dump_of_a_long_object_has_whole_lines() {
    // Scenario: an object that comes in messages of an odd length. Expected: lines of 16 bytes, each at its offset; the same text
    // for a part, which is as long as a line is.
    let server = start(Flaw::NONE);
    let dump = stdout(server, &format!("get object objects {LONG_OBJECT}"));
    let lines: Vec<&str> = dump.lines().collect();
    assert_eq!(lines.len() as u64, LONG_OBJECT_BYTES.div_ceil(16));
    for (offset, line) in (0..).step_by(16).zip(&lines) {
        assert!(line.starts_with(&format!("{offset:08x}: ")), "{line}");
    }
    let (last, whole) = lines.split_last().unwrap();
    assert!(whole.iter().all(|line| line.len() == 67) && last.len() == 52);
    let part = format!("get object objects {LONG_OBJECT} --offset 300000 --length 16");
    assert_eq!(
        stdout(server, &part).lines().collect::<Vec<_>>(),
        [lines[300_000 / 16]]
    );
}

#[test]
fn parts_become_shorter_until_a_response_may_hold_them() {
    // Scenario: one response may hold 100 KiB; then 4 KiB, the least that a daemon can be limited to; then less than any
    // part. Expected: a range, and an object, whose messages are no responses; a failure that gives the reason.
    for response_bytes in [100 << 10, 4 << 10] {
        let server = start(Flaw::limited(response_bytes));
        let raw = |args: &str| {
            let output = ringfetch(Some(server), &format!("get {args} --format raw"));
            assert!(output.status.success(), "{args}: {output:?}");
            output.stdout
        };
        assert_eq!(raw("range blocks 7 400000"), stream(7, 400_000));
        let whole = raw(&format!("object objects {LONG_OBJECT}"));
        assert_eq!(whole.len() as u64, LONG_OBJECT_BYTES);
    }
    let server = start(Flaw::limited(100));
    let error = failure(Some(server), "get range blocks 0 400000", 1);
    assert!(
        error.contains("RESOURCE_EXHAUSTED: 4096 bytes, at most 100"),
        "{error}"
    );
}

#[test]
fn get_waits_for_a_rate() {
    // Scenario: every other read is refused for a moment, more often than a client retries; then for longer than --timeout.
    // Expected: all bytes of a range of many parts; items of every kind. What is refused for another reason is given up.
    let server = start(Flaw::refused_for(Duration::from_millis(1)));
    let output = ringfetch(Some(server), "get range blocks 0 100000 --format raw");
    assert!(output.status.success(), "{:?}", String::from_utf8(output.stderr));
    assert_eq!(output.stdout, stream(0, 100_000));

    let server = start(Flaw::refused_for(Duration::from_millis(2100)));
    let object = format!("object objects {}", pattern::object_name(5));
    for item in ["block blocks 3", "vector vectors 3", "range blocks 0 5", &object] {
        assert_ne!(stdout(server, &format!("--timeout 2s get {item}")), "");
    }

    // An overload may not pass.
    let server = start(Flaw::overloaded_for(Duration::from_millis(1)));
    let error = failure(Some(server), "get block blocks 3", 1);
    assert!(error.contains("over a limit"), "{error}");
}

#[test]
fn an_object_that_stops_is_asked_for_again() {
    // Scenario: an object stops midway for longer than --timeout, as for a rate, and goes on for who asks again. Expected: all its
    // bytes.
    let server = start(Flaw::STALLED);
    let args = format!("--timeout 2s get object objects {LONG_OBJECT} --format raw");
    let output = ringfetch(Some(server), &args);
    assert!(output.status.success(), "{:?}", String::from_utf8(output.stderr));
    assert_eq!(output.stdout.len() as u64, LONG_OBJECT_BYTES);
    let seed = pattern::object_seed(SEED, LONG_OBJECT);
    assert_eq!(pattern::first_difference(seed, 0, &output.stdout), None);
}

#[test]
fn items_that_can_be_read_are_shown_beside_one_that_cannot_for_now() {
    // Scenario: the last item of every read cannot be read for now, however often it is asked for. Expected: the others, and
    // why there is not that one; nothing in a form that holds all or nothing, and for a lone range.
    let server = start(Flaw::UNREADABLE);
    let shown = ringfetch(Some(server), "get block blocks 3 4 --format hex");
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(
        text.starts_with("block 3:\n") && !text.contains("block 4:"),
        "{text}"
    );
    assert_eq!(shown.status.code(), Some(1));
    assert!(String::from_utf8(shown.stderr).unwrap().contains("for now"));
    for nothing in ["get block blocks 3 4 --format raw", "get range blocks 0 5"] {
        let output = ringfetch(Some(server), nothing);
        assert_eq!(
            (output.status.code(), output.stdout.len()),
            (Some(1), 0),
            "{nothing}"
        );
        assert!(
            String::from_utf8(output.stderr).unwrap().contains("for now"),
            "{nothing}"
        );
    }
}

#[test]
fn a_file_keeps_its_bytes_if_nothing_could_be_read() {
    // Scenario: --out names a file; the items do not exist, or one of them does. Expected: without an item the
    // file is as it was, in every format; with one, in hex, it has what could be read.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let keep = directory.path().join("keep");
    std::fs::write(&keep, "kept").unwrap();
    let out = word(&keep);
    for format in ["hex", "raw", "text"] {
        failure(
            Some(server),
            &format!("get block blocks 9999 --format {format} --out {out}"),
            1,
        );
    }
    failure(
        Some(server),
        &format!("--json get block blocks 9999 --out {out}"),
        1,
    );
    failure(Some(server), &format!("get object objects none --out {out}"), 1);
    assert_eq!(std::fs::read(&keep).unwrap(), b"kept");
    // Raw bytes would not say which block is missing.
    failure(Some(server), &format!("get block blocks 0 9999 --out {out}"), 1);
    assert_eq!(std::fs::read(&keep).unwrap(), b"kept");
    failure(
        Some(server),
        &format!("get block blocks 0 9999 --format hex --out {out}"),
        1,
    );
    assert!(std::fs::read_to_string(&keep).unwrap().starts_with("block 0:\n"));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn scores_are_ranked_and_what_has_none_is_counted() {
    let server = start(Flaw::NONE);
    let text = stdout(server, "score vectors 7 9 8 --like 3 --limit 2");
    let words: Vec<&str> = text.split_whitespace().collect();
    assert_eq!(words[..6], ["ID", "SCORE", "9", "4.5", "8", "4"], "{text}");
    assert!(text.ends_with("1 without a finite score\n"), "{text}");
    let scores = json(server, "score vectors 7 9 --like 3 --metric cosine");
    assert_eq!(scores["best"][0], value!({ "id": 9, "score": 4.5 }));
    assert_fields(&scores, &value!({ "unscored": 1, "etag": "v1" }));
    let failed = failure(Some(server), "score vectors 7 300 --like 3", 1);
    assert!(failed.contains("1 of 2 candidates could not be read"), "{failed}");
    let failed = failure(Some(server), "score vectors 7 --query -1.5", 1);
    assert!(failed.contains("queries[0].vector"), "{failed}");
    assert_eq!(ringfetch(Some(server), "score vectors 7").status.code(), Some(2));
}

#[test]
fn what_cannot_be_read_is_named_once_and_fails() {
    // Exit code 1 and one line that names it; hex shows the good ones, raw shows none.
    let server = start(Flaw::NONE);
    let error = failure(Some(server), "get block blocks 1 1000 2000", 1);
    assert_eq!(
        error,
        "ringfetch: block 1000: OUT_OF_RANGE: 1000 is past the end (and 1 more)\n"
    );
    let output = ringfetch(Some(server), "get block blocks 1 1000");
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 33);
    let raw = ringfetch(Some(server), "get block blocks 1 1000 --format raw");
    assert!(raw.stdout.is_empty());
    let error = failure(Some(server), "get range blocks 512000 3MiB", 1);
    assert_eq!(
        error,
        "ringfetch: offset 512000 is past the end of blocks: there are 512000 bytes\n"
    );
    assert!(failure(Some(server), "get object objects nothing", 1).contains("NOT_FOUND: there is no object"));
    assert!(failure(Some(server), "dataset verify nowhere", 1).contains("there is no dataset \"nowhere\""));
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let error = failure(Some(nobody), "datasets", 1);
    assert!(
        error.contains(&format!("cannot reach http://{nobody}")),
        "{error}"
    );
    assert!(error.contains("--grpc"), "{error}");
    assert!(failure(Some(nobody), "status", 1).contains("--admin"));
}

#[test]
fn a_long_range_is_of_one_version() {
    // Scenario: a range that comes in parts, of a dataset that is replaced between them. Expected: a failure that says
    // so, and no file.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out");
    let args = format!("get range {REPLACED} 0 5MiB --out {}", word(&path));
    let error = failure(Some(start(Flaw::NONE)), &args, 1);
    assert!(error.contains("FAILED_PRECONDITION") && !path.exists(), "{error}");
}
