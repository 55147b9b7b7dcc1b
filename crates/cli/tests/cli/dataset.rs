//! Pattern data: made, and verified.

use crate::flaw::Flaw;
use crate::server::{self, SEED, start};
use crate::{
    assert_fields, command, ended_by, failure, json, json_with, ringfetch, started, stdout, stream, word,
};
use ringfetch_engine::dataset::Dtype;
use ringfetch_pattern as pattern;
use rustix::process::Signal;
use serde_json::{Value, json as value};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[test]
fn verify_finds_the_first_wrong_byte() {
    // All kinds of data as they should be; then one byte of block 700 flipped; then another seed.
    let server = start(Flaw::NONE);
    let whole = "blocks: 1 000 of 1 000 blocks (500.0 KiB) hold the pattern of seed 42\n";
    assert_eq!(stdout(server, "dataset verify blocks --all"), whole);
    let lengths = (0..server::OBJECTS).map(|index| pattern::object_length(SEED, index, 10, 3000));
    for (args, fields) in [
        ("blocks --sample 10", value!({ "bytes_checked": 5120 })),
        ("blocks --all --length 1025", value!({ "bytes_checked": 1025 })),
        ("vectors --all", value!({ "items_checked": 300 })),
        (
            "objects --all",
            value!({ "items_checked": 150, "bytes_checked": lengths.sum::<u64>(), "count_checked": false }),
        ),
        (
            "objects --count 150 --length-min 10 --length-max 3000",
            value!({ "items": 150, "count_checked": true }),
        ),
        ("blocks --count 1000", value!({ "items": 1000 })),
    ] {
        assert_fields(&json(server, &format!("dataset verify {args}")), &fields);
    }

    for (args, want) in [
        (
            "blocks --count 1001",
            "it has 1 000 blocks, expected 1 001 (--count)",
        ),
        ("vectors --count 1", "it has 300 vectors, expected 1 (--count)"),
        (
            "objects --count 151 --length-min 10 --length-max 3000",
            "object shard-01/object-000150 is missing",
        ),
        (
            "objects --count 149 --length-min 10 --length-max 3000",
            "object shard-01/object-000149 is not one of the 149 (--count)",
        ),
        ("objects --count 150", "object shard-00/object-000002 has "),
    ] {
        let error = failure(Some(server), &format!("dataset verify {args}"), 1);
        assert!(error.contains(want), "{error}");
    }
    let unchecked = stdout(server, "dataset verify objects");
    assert!(
        unchecked.ends_with("; missing objects and lengths are not checked (--count)\n"),
        "{unchecked}"
    );

    let flipped = 700 * 512 + 13;
    let server = start(Flaw::flipped(flipped));
    let right = stream(flipped, 1)[0];
    let error = failure(Some(server), "dataset verify blocks --all", 1);
    let want = format!(
        "ringfetch: blocks: offset 358413 (block 700, byte 13): expected 0x{right:02x}, got 0x{:02x} (seed 42)\n",
        right ^ 0xff
    );
    assert_eq!(error, want);
    assert!(failure(Some(server), "dataset verify vectors --seed 43", 1).contains("byte 0 of its elements"));
}

#[test]
fn what_is_replaced_meanwhile_is_not_called_wrong() {
    // Scenario: datasets that are replaced as soon as they are described; objects, between two of their parts. Expected: a
    // failure that says so, without a verdict on the data.
    let server = start(Flaw::REPLACED);
    for (dataset, what) in [
        ("blocks", "it"),
        ("vectors", "it"),
        ("objects", "object shard-00/"),
    ] {
        for json in ["", "--json "] {
            let error = failure(Some(server), &format!("{json}dataset verify {dataset} --all"), 1);
            let wanted = error.starts_with(&format!("ringfetch: {dataset}: {what}"));
            let wanted = wanted && error.ends_with(" was replaced while it was verified; try again\n");
            assert!(wanted, "{error}");
        }
    }
}

#[test]
fn verify_asks_for_as_much_as_a_response_may_hold() {
    // Scenario: one response may hold 100 KiB; then 4 KiB, the least that a daemon can be limited to; then less than an item.
    // Expected: every item is checked, in parts where one is longer; a failure that names the item.
    for response_bytes in [100 << 10, 4 << 10] {
        let server = start(Flaw::limited(response_bytes));
        for (dataset, items) in [("blocks", 1000), ("vectors", 300), ("objects", server::OBJECTS)] {
            let report = json(server, &format!("dataset verify {dataset} --all"));
            assert_fields(&report, &value!({ "items_checked": items, "ok": true }));
        }
    }
    let server = start(Flaw::limited(40));
    let error = failure(Some(server), "dataset verify vectors", 1);
    assert!(
        error.contains("vector 0: RESOURCE_EXHAUSTED: 48 bytes, at most 40"),
        "{error}"
    );
}

#[test]
fn verify_asks_for_as_many_items_as_a_request_may_have() {
    // Scenario: a request may have 100 items; one. Expected: every item is checked.
    for items_max in [100, 1] {
        let server = start(Flaw::of_few_items(items_max));
        for (dataset, items) in [("blocks", 1000), ("vectors", 300), ("objects", server::OBJECTS)] {
            let report = json(server, &format!("dataset verify {dataset} --all"));
            assert_fields(&report, &value!({ "items_checked": items, "ok": true }));
        }
    }
}

#[test]
fn verify_waits_for_a_rate() {
    // Scenario: every other read is refused for a moment, more often than a client retries; once for longer than --timeout.
    // Expected: every item is checked.
    let server = start(Flaw::refused_for(Duration::from_millis(1)));
    for (dataset, items) in [("blocks", 1000), ("vectors", 300), ("objects", server::OBJECTS)] {
        let report = json(server, &format!("dataset verify {dataset} --all"));
        assert_fields(&report, &value!({ "items_checked": items, "ok": true }));
    }
    let server = start(Flaw::refused_for(Duration::from_millis(2100)));
    let report = json(server, "--timeout 2s dataset verify blocks --length 1");
    assert_fields(&report, &value!({ "bytes_checked": 1, "ok": true }));
}

#[test]
fn an_item_that_cannot_be_read_for_now_is_requested_again() {
    // Scenario: the first two reads have an item that cannot be read: UNAVAILABLE, then RESOURCE_EXHAUSTED. Expected: every
    // item is checked and a long object is got, with two requests more than of a server that can read it; so the requests
    // have their usual length.
    let reads = |failing: bool, args: &str| {
        let before = if failing { 0 } else { 2 };
        let flaw = Flaw::unreadable_at_first(before);
        let output = ringfetch(Some(start(flaw)), args);
        assert!(output.status.success(), "{args}: {output:?}");
        (flaw.reads() - before, output.stdout)
    };
    for args in [
        "dataset verify blocks --all",
        "dataset verify vectors --all",
        "dataset verify objects --all",
        "get object objects long --format raw",
        "get range blocks 0 5000 --format raw",
        "get block blocks 3",
        "get vector vectors 3 4",
    ] {
        let (usual, result) = reads(false, args);
        let again = reads(true, args);
        assert!(
            again == (usual + 2, result),
            "{args}: {} reads, usually {usual}",
            again.0
        );
    }
}

#[test]
fn a_dataset_without_objects_is_not_called_right() {
    // Scenario: a directory of objects that is empty; objects are expected. Expected: a failure that says so; one that names
    // the first that is missing.
    let server = start(Flaw::WITHOUT_OBJECTS);
    for (args, problem) in [
        ("--all", "it has no objects"),
        ("--count 3", "object shard-00/object-000000 is missing"),
    ] {
        let args = format!("dataset verify objects {args}");
        let error = failure(Some(server), &args, 1);
        assert_eq!(error, format!("ringfetch: objects: {problem}\n"));
        assert_fields(
            &json_with(server, &args, 1),
            &value!({ "ok": false, "problem": problem }),
        );
    }
}

#[test]
fn what_could_not_be_read_is_not_called_wrong() {
    // Scenario: an item that cannot be read, one that is wrong, and one block less than expected; with --json. Expected: the
    // message is that without it, and the result has the code of the first.
    let wrong = Flaw::flipped(700 * 512);
    for (flaw, args, problem, code) in [
        (
            Flaw::limited(40),
            "vectors",
            "vector 0: RESOURCE_EXHAUSTED: 48 bytes, at most 40",
            value!("RESOURCE_EXHAUSTED"),
        ),
        (
            wrong,
            "blocks --all",
            "offset 358400 (block 700, byte 0): expected ",
            value!(null),
        ),
        (
            Flaw::NONE,
            "blocks --count 1001",
            "it has 1 000 blocks, expected 1 001 (--count)",
            value!(null),
        ),
    ] {
        let server = start(flaw);
        let output = ringfetch(Some(server), &format!("--json dataset verify {args}"));
        assert_eq!(output.status.code(), Some(1), "{args}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(error, failure(Some(server), &format!("dataset verify {args}"), 1));
        assert!(error.contains(problem), "{error}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_fields(&report, &value!({ "ok": false, "code": code }));
        assert!(
            report["problem"].as_str().unwrap().starts_with(problem),
            "{report}"
        );
    }
}

#[test]
fn made_data_is_the_pattern_and_is_not_overwritten_by_mistake() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let made = |args: &str| {
        let output = ringfetch(None, &args.replace("ROOT", &word(&root)));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code().unwrap(), text, error)
    };
    let (code, yaml, error) =
        made("dataset make blocks ROOT/b.bin --size 10KiB --block-bytes 4096 --seed 42");
    assert_eq!((code, error.as_str()), (0, ""));
    let want = format!(
        "# Made with seed 42. For `datasets:` in the daemon's configuration:\n  - name: b\n    kind: blocks\n    \
         path: {}/b.bin\n    block_bytes: 4KiB\n    partial_tail: ignore # the last 2048 bytes\n",
        root.display()
    );
    // A directory with a space in its name is quoted.
    assert_eq!(yaml.replace('"', ""), want);
    assert_eq!(std::fs::read(root.join("b.bin")).unwrap(), stream(0, 10_240));

    let again = "dataset make blocks ROOT/b.bin --size 4KiB --seed 7";
    let (code, _, error) = made(again);
    assert!(code == 1 && error.contains("--force"), "{error}");
    assert_eq!(std::fs::metadata(root.join("b.bin")).unwrap().len(), 10_240);
    assert_eq!(made(&format!("{again} --force")).0, 0);
    assert_eq!(std::fs::metadata(root.join("b.bin")).unwrap().len(), 4096);
    assert_eq!(made("dataset make blocks ROOT --size 4KiB --force").0, 1);

    assert_eq!(made("dataset make vectors ROOT/v.fvecs --count 3 --dim 5").0, 0);
    let fvecs = std::fs::read(root.join("v.fvecs")).unwrap();
    assert_eq!((fvecs.len(), &fvecs[24..28]), (3 * 24, &5i32.to_le_bytes()[..]));
    let mut elements = [0; 20];
    pattern::fill_elements(SEED, Dtype::F32, 5, &mut elements);
    assert_eq!(fvecs[28..48], elements);

    let objects = "dataset make objects ROOT/o --count 3 --length-min 5 --length-max 9";
    assert_eq!(made(objects).0, 0);
    let object = std::fs::read(root.join("o").join(pattern::object_name(2))).unwrap();
    assert!((5..=9).contains(&object.len()));
    assert_eq!(made("dataset make objects ROOT/o --count 3").0, 1);
    // Objects of an earlier run that are not part of the new one go.
    assert_eq!(made("dataset make objects ROOT/o --count 205 --force").0, 0);
    let (code, text, _) = made("dataset make objects ROOT/o --count 150 --force --seed 7");
    assert!(
        code == 0 && text.contains("ringfetch dataset verify o --all --seed 7 --count 150 "),
        "{text}"
    );
    let mut folders: Vec<_> = std::fs::read_dir(root.join("o"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    folders.sort_unstable();
    assert_eq!(folders, ["shard-00", "shard-01"]);
    assert_eq!(std::fs::read_dir(root.join("o/shard-01")).unwrap().count(), 50);
    let (code, _, error) =
        made("dataset make objects ROOT/more --count 2000 --length-min 100TiB --length-max 200TiB");
    assert!(code == 1 && error.contains(" needed, "), "{error}");
    let (code, _, error) = made("dataset make blocks ROOT/none/b.bin --size 4KiB");
    assert!(
        code == 1 && error.ends_with("b.bin: No such file or directory (os error 2)\n"),
        "{error}"
    );
    let mut names: Vec<_> = std::fs::read_dir(&root)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["b.bin", "o", "v.fvecs"]);
}

#[test]
fn what_no_configuration_can_name_is_not_made() {
    // Scenario: a file, a directory and a working directory whose names are not UTF-8, as configurations are. Expected: an
    // error that says so, and nothing made: the printed path would be another one.
    let directory = tempfile::tempdir().unwrap();
    let odd = directory.path().join(OsStr::from_bytes(b"\xe4"));
    std::fs::create_dir(&odd).unwrap();
    for (inside, path, kind) in [
        (directory.path(), odd.join("b"), "blocks --size 4096"),
        (directory.path(), odd.clone(), "objects --count 1"),
        (&odd, PathBuf::from("b"), "blocks --size 4096"),
    ] {
        let mut make = command(None, &format!("dataset make {kind}"));
        let output = make.arg(&path).current_dir(inside).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("is not UTF-8"), "{error}");
    }
    assert_eq!(std::fs::read_dir(odd).unwrap().count(), 0);
}

#[test]
fn what_killed_runs_left_is_removed() {
    // Scenario: partial files of runs that were killed: in a directory of objects, in one of its folders and in one that the new
    // dataset does not have, and next to a file; and one that another process writes. Then data are made there. Expected:
    // only that one is left besides the data.
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let make = |args: &str| {
        let output = ringfetch(None, &format!("dataset make {args}"));
        assert!(output.status.success(), "{args}: {output:?}");
    };
    let (blocks, objects) = (root.join("b.bin"), root.join("o"));
    make(&format!("objects {} --count 205", word(&objects)));
    let left = [
        root,
        &objects,
        &objects.join("shard-00"),
        &objects.join("shard-02"),
    ]
    .map(|directory| directory.join(".ringfetch-x.partial"));
    left.iter().for_each(|path| std::fs::write(path, "part").unwrap());
    let written = root.join(".ringfetch-y.partial");
    let writer = std::fs::File::create(&written).unwrap();
    writer.try_lock().unwrap();
    make(&format!("objects {} --count 150 --force", word(&objects)));
    make(&format!("blocks {} --size 4KiB", word(&blocks)));
    assert_eq!(left.iter().filter(|path| path.exists()).count(), 0);
    assert!(written.exists());
    let mut found = files(&objects);
    found.sort_unstable();
    let wanted: Vec<_> = (0..150)
        .map(|index| objects.join(pattern::object_name(index)))
        .collect();
    assert_eq!(found, wanted);
}

/// The files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] })
        .collect()
}

#[test]
fn a_hang_up_leaves_no_partial_file() {
    // Scenario: SIGHUP, as at the end of a login, while data are made; the same with SIGHUP ignored, as nohup
    // does (as it may be for the tests themselves). Expected: exit code 1 and an empty directory; the whole file.
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = place.path().join("data.bin");
    let made = |through: &[&str], size: &str| {
        let program = env!("CARGO_BIN_EXE_ringfetch");
        let mut line = [through, &[program, "dataset", "make", "blocks", "--size", size]]
            .concat()
            .into_iter();
        let mut run = crate::program(line.next().unwrap());
        let run = started(run.args(line).arg(&path));
        let deadline = Instant::now() + Duration::from_secs(30);
        while std::fs::read_dir(place.path()).unwrap().next().is_none() {
            assert!(Instant::now() < deadline, "no part of the file");
            std::thread::yield_now();
        }
        ended_by(run, &[Signal::HUP])
    };
    // If this thread has no CPU for as long, the file is made before the signal is sent: then once more.
    let interrupted = (0..20).find_map(|_| {
        let output = made(&["env", "--default-signal=HUP"], "2GiB");
        let is_made = output.status.success() && std::fs::metadata(&path).unwrap().len() == 2 << 30;
        if is_made {
            std::fs::remove_file(&path).unwrap();
        }
        (!is_made).then_some(output)
    });
    let output = interrupted.expect("a signal interrupts it");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("interrupted; nothing was made"), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    let output = made(&["nohup"], "256MiB");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 256 << 20);
}
