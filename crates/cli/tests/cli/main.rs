//! The binary as people run it: arguments in; stdout, stderr and exit code out.
#![expect(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in tests, but does not see that these functions are only called by some"
)]

mod calibrate;
mod changes;
mod doctor;
mod http;
mod load;
#[path = "../../../server/tests/e2e/seccomp.rs"]
mod seccomp;
mod server;
mod tls;

use ringfetch_engine::dataset::Dtype;
use ringfetch_pattern as pattern;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use server::{Flaw, LONG_OBJECT, LONG_OBJECT_BYTES, SEED, start, start_for};
use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};

/// Runs `ringfetch` with arguments separated by spaces, against a server if there is one.
fn ringfetch(server: Option<SocketAddr>, args: &str) -> Output {
    command(server, args).output().unwrap()
}

fn command(server: Option<SocketAddr>, args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfetch"));
    command
        .args(args.split_ascii_whitespace())
        .env_remove("RINGFETCH_GRPC")
        .env_remove("RINGFETCH_HTTP")
        .env_remove("RINGFETCH_ADMIN");
    if let Some(address) = server {
        command.env("RINGFETCH_GRPC", format!("http://{address}"));
        command.env("RINGFETCH_ADMIN", format!("http://{address}"));
    }
    command
}

/// Stdout of a run that must succeed with nothing on stderr.
fn stdout(server: SocketAddr, args: &str) -> String {
    let output = ringfetch(Some(server), args);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && error.is_empty(), "{args}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The one line on stderr of a run that must end with this code.
fn failure(server: Option<SocketAddr>, args: &str, code: i32) -> String {
    let output = ringfetch(server, args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args}: {error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{args}: {error}");
    error
}

fn json(server: SocketAddr, args: &str) -> Value {
    serde_json::from_str(&stdout(server, &format!("--json {args}"))).unwrap()
}

/// The JSON of a run that ends with this code.
fn json_with(server: SocketAddr, args: &str, code: i32) -> Value {
    let output = ringfetch(Some(server), &format!("--json {args}"));
    assert_eq!(output.status.code(), Some(code), "{args}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asserts that a report has these fields.
#[track_caller]
fn assert_fields(report: &Value, fields: &Value) {
    for (field, want) in fields.as_object().unwrap() {
        assert_eq!(&report[field], want, "{field} in {report}");
    }
}

fn stream(offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    pattern::fill(SEED, offset, &mut bytes);
    bytes
}

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
    stdout(server, &format!("{vectors} {}", path.display()));
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
fn a_closed_stdout_is_no_failure_and_hides_none() {
    // Scenario: the reader of stdout has left, as `head` does; commands that succeed, that print and then fail,
    // and whose conditions are not met. Expected: nothing is said about the pipe, and the exit code and the
    // message are those of a run whose output was read.
    let server = start(Flaw::NONE);
    let load = "load --dataset blocks --batch 2 --requests 20 --warmup-seconds 0";
    for args in [
        "get block blocks 1".to_owned(),
        "get range blocks 0 100000 --format raw".to_owned(),
        "get block blocks 1 9999".to_owned(),
        "get block blocks 9999 --format raw".to_owned(),
        "--json get block blocks 9999".to_owned(),
        "status".to_owned(),
        "completions bash".to_owned(),
        "dataset verify blocks --all".to_owned(),
        "--json dataset verify blocks --all --seed 43".to_owned(),
        load.to_owned(),
        format!("{load} --require p50<=1us"),
        format!("doctor {}/none", env!("CARGO_TARGET_TMPDIR")),
    ] {
        let mut command = command(Some(server), &args);
        let read = command.output().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let closed = command.stdout(writer).output().unwrap();
        assert_eq!(closed.status.code(), read.status.code(), "{args}: {closed:?}");
        let [read, closed] = [read, closed].map(|output| String::from_utf8(output.stderr).unwrap());
        let message = |text: &str| text.split(": it is").next().unwrap().to_owned();
        assert_eq!(message(&closed), message(&read), "{args}");
    }
}

#[test]
fn a_file_keeps_its_bytes_if_nothing_could_be_read() {
    // Scenario: --out names a file; the items do not exist, or one of them does. Expected: without an item the
    // file is as it was, in every format; with one it has what could be read.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let keep = directory.path().join("keep");
    std::fs::write(&keep, "kept").unwrap();
    let out = keep.display();
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
    failure(Some(server), &format!("get block blocks 0 9999 --out {out}"), 1);
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
    assert_eq!(scores["best"][0], json!({ "id": 9, "score": 4.5 }));
    assert_fields(&scores, &json!({ "unscored": 1, "etag": "v1" }));
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
fn wrong_arguments_are_told_apart_from_failures() {
    for (args, word) in [
        ("", "Usage"),
        ("fetch", "fetch"),
        ("get block blocks", "INDEX"),
        ("get block blocks -- -1", "-1"),
        ("get range blocks 0 16MB", "16MB"),
        ("get block blocks 0 --format npy", "npy"),
        ("get block blocks 0 --format hex --json", "--json"),
        ("dataset make blocks /nowhere/x", "--size"),
        ("dataset make blocks /nowhere/x --size 0", "--size"),
        (
            "dataset make vectors /nowhere/x.fvecs --count 1 --dim 1 --dtype u8",
            "--dtype",
        ),
        ("dataset make vectors /nowhere/x --count 1 --dim 0", "--dim"),
        ("dataset make vectors /nowhere/x --count 1 --dim 1048577", "--dim"),
        ("dataset make blocks /nowhere/x --size 4095", "--size 4095"),
        (
            "dataset make blocks /nowhere/x --size 1GiB --block-bytes 257MiB",
            "--block-bytes",
        ),
        ("dataset verify blocks --all --sample 3", "--all"),
        ("dataset verify blocks --length-min 3", "--count"),
        ("dataset make blocks /nowhere/x --size 4KiB --name a/b", "--name"),
        ("score vectors 1 2", "--like"),
        ("load --dataset blocks --rate -5", "above 0"),
        ("--timeout 0s datasets", "--timeout"),
        ("load --dataset blocks --seconds 0", "--seconds"),
        ("load --dataset blocks --connections 0", "--connections"),
        ("load --dataset blocks --seconds 1 --requests 1", "--requests"),
        ("--grpc localhost:7410 datasets", "--grpc"),
        ("--timeout soon datasets", "soon"),
    ] {
        let output = ringfetch(None, args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args}: {error}");
        assert!(error.contains(word), "{args}: {error}");
        assert!(output.stdout.is_empty(), "{args}");
    }
}

#[test]
fn the_daemon_reports_about_itself() {
    // Aligned tables with the facts, a fallback that cannot be overlooked, the contract's field names.
    let server = start(Flaw::NONE);
    let table = stdout(server, "datasets");
    let want = "\
NAME     KIND     COUNT       SIZE  SHAPE
blocks   blocks   1 000  500.0 KiB  512 bytes
vectors  vectors    300   14.2 KiB  24 x f16 (npy)
objects  objects      -          -  -
";
    assert_eq!(table, want);
    assert_eq!(json(server, "datasets")["datasets"][1]["vectors"]["dtype"], "f16");

    let status = stdout(server, "status");
    for want in [
        "NAME     KIND     COUNT       SIZE  SHAPE           BACKEND  DIRECT\n",
        "vectors  vectors    300   14.2 KiB  24 x f16 (npy)  mmap     no: a mapping never is\n",
        "state    serving, up 1h 2m 3s\n",
        "backend  mmap, FALLBACK from uring: seccomp forbids io_uring\n",
        "memory   1.0 MiB of 256.0 MiB in use\n",
        "rate     91 235 reads/s, 374 MB/s over the last 1 s\n",
        "reads    1 234 567, 8 failed\n",
        "latency  p50 500 us, p99 20.0 ms, p99.9 50.0 ms",
        "config   RELOAD FAILED, nothing has changed: engine.bakend: is not a key here\n",
        "SHARD  BACKEND  IN FLIGHT  QUEUED  DEPTH  DEVICE READS  SUBMISSIONS\n    0  uring            0       0    128        12 345            0\n",
    ] {
        assert!(status.contains(want), "{want:?} in:\n{status}");
    }
    let status = json(server, "status");
    assert_fields(&status, &json!({ "fallback": true }));
    assert_fields(&status["shards"][0], &json!({ "queue_depth": 128 }));
    assert_fields(&status["datasets"][0], &json!({ "name": "blocks", "files": 1 }));
    assert_eq!(status["datasets"][0]["read_path"]["requested"], "uring");

    assert_eq!(
        stdout(server, "log-level debug"),
        "log filter: debug (was: info)\n"
    );
    let refused = failure(
        None,
        &format!("log-level wrong=filter --admin http://{server}"),
        1,
    );
    assert_eq!(refused, "ringfetch: INVALID_ARGUMENT: filter: does not parse\n");
}

#[test]
fn verify_finds_the_first_wrong_byte() {
    // All kinds of data as they should be; then one byte of block 700 flipped; then another seed.
    let server = start(Flaw::NONE);
    let whole = "blocks: 1 000 of 1 000 blocks (500.0 KiB) hold the pattern of seed 42\n";
    assert_eq!(stdout(server, "dataset verify blocks --all"), whole);
    let lengths = (0..server::OBJECTS).map(|index| pattern::object_length(SEED, index, 10, 3000));
    for (args, fields) in [
        ("blocks --sample 10", json!({ "bytes_checked": 5120 })),
        ("blocks --all --length 1025", json!({ "bytes_checked": 1025 })),
        ("vectors --all", json!({ "items_checked": 300 })),
        (
            "objects --all",
            json!({ "items_checked": 150, "bytes_checked": lengths.sum::<u64>(), "count_checked": false }),
        ),
        (
            "objects --count 150 --length-min 10 --length-max 3000",
            json!({ "items": 150, "count_checked": true }),
        ),
        ("blocks --count 1000", json!({ "items": 1000 })),
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
fn load_measures_what_it_read_and_checks_it() {
    // Every count exact and nothing wrong; then one byte flipped; then a server that refuses everything.
    let server = start(Flaw::NONE);
    let run =
        "--requests 60 --warmup-seconds 0 --outstanding 6 --batch 10 --connections 2 --threads 2 --verify";
    for (what, bytes) in [
        ("--dataset blocks", Some(600 * 512)),
        (
            "--dataset blocks --transport stream --pattern sequential",
            Some(600 * 512),
        ),
        ("--dataset blocks --range-bytes 100", Some(60_000)),
        ("--dataset vectors --transport stream", Some(600 * 48)),
        ("--dataset objects", None),
    ] {
        let pid = std::process::id();
        let report = json(server, &format!("load {run} {what} --server-pid {pid}"));
        assert_fields(
            &report,
            &json!({ "requests": 60, "reads": 600, "errors": 0, "wrong_bytes": 0 }),
        );
        if let Some(bytes) = bytes {
            assert_fields(&report, &json!({ "read_bytes": bytes }));
        }
        let us = |name: &str| report["latency_us"][name].as_f64().unwrap();
        let ascending = [0.0, us("min"), us("p50"), us("p99_9"), us("max")];
        assert!(
            us("min") > 0.0 && ascending.is_sorted() && us("mean") <= us("max"),
            "{what}: {report}"
        );
        let outstanding = report["outstanding_achieved"].as_f64().unwrap();
        assert!(outstanding > 0.0 && outstanding <= 6.01, "{what}: {report}");
        assert!(
            report["own_cpu"]["us_per_read"].as_f64().unwrap() > 0.0,
            "{what}: {report}"
        );
        assert!(report["server_cpu"]["seconds"].is_number(), "{what}: {report}");
    }
    let table = stdout(server, &format!("load {run} --dataset blocks"));
    assert!(
        table.contains("\nwrong bytes      0: every byte was checked\n"),
        "{table}"
    );

    let sequential = format!("load {run} --dataset blocks --pattern sequential");
    let report = json_with(start(Flaw::flipped(5)), &sequential, 1);
    assert_eq!(report["wrong_bytes"], 1);
    let first = report["first_wrong"].as_str().unwrap();
    assert!(first.starts_with("block 0, byte 5: expected 0x"), "{report}");

    let report = json_with(
        start(Flaw::OVERLOADED),
        &format!("load {run} --dataset blocks"),
        1,
    );
    assert_eq!(report["latency_us"], Value::Null);
    assert_eq!(report["request_errors"]["RESOURCE_EXHAUSTED"], 60);
    assert!(failure(Some(server), "load --dataset objects --range-bytes 10", 2).contains("--range-bytes"));
    let server = start(Flaw::NONE);
    let error = failure(Some(server), "load --dataset blocks --range-bytes 1GiB", 2);
    assert!(error.contains("blocks has 512000 bytes"), "{error}");
    let past_the_end = ringfetch(Some(server), "get range blocks 1000 200MiB --format raw");
    let error = String::from_utf8(past_the_end.stderr).unwrap();
    assert!(
        past_the_end.stdout.is_empty() && error.contains("at most 511000 bytes"),
        "{error}"
    );
}

#[test]
fn made_data_is_the_pattern_and_is_not_overwritten_by_mistake() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    let made = |args: &str| {
        let output = ringfetch(None, &args.replace("ROOT", root.to_str().unwrap()));
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
    assert_eq!(yaml, want);
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
        let mut run = Command::new(line.next().unwrap());
        let run = run
            .args(line)
            .arg(&path)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        while std::fs::read_dir(place.path()).unwrap().next().is_none() {
            std::thread::yield_now();
        }
        rustix::process::kill_process(Pid::from_child(&run), Signal::HUP).unwrap();
        run.wait_with_output().unwrap()
    };
    let output = made(&["env", "--default-signal=HUP"], "2GiB");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("interrupted; nothing was made"), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    let output = made(&["nohup"], "256MiB");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 256 << 20);
}

#[test]
fn a_token_is_sent_and_never_shown() {
    // Scenario: a daemon for clients with a token; reads, load on each transport and administration with its
    // file, without it, with another one, and with files that are empty, missing, or of two lines.
    // Expectation: only the first are served; no token is printed.
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let server = Some(start_for(Some("Bearer secret-7"), Flaw::NONE));
    let http = http::start_for(Some("bearer secret-7"));
    let good = file("good", "secret-7\n");
    let bad = [file("bad", "secret-8"), file("lines", "secret-7\nsecret-7\n")];
    let empty = file("empty", "\n");
    let load = "load --dataset blocks --requests 40";
    for command in [
        "get block blocks 3",
        "log-level info",
        load,
        &format!("{load} --transport stream"),
        &format!("{load} --transport http --http http://{http}"),
    ] {
        let output = ringfetch(server, &format!("{command} --token-file {good}"));
        assert!(output.status.success(), "{command}: {output:?}");
        let others = bad.iter().map(|file| format!("{command} --token-file {file}"));
        for args in others.chain([command.to_owned()]) {
            let output = ringfetch(server, &args);
            assert_eq!(output.status.code(), Some(1), "{args}");
            assert!(
                !String::from_utf8_lossy(&output.stderr).contains("secret"),
                "{output:?}"
            );
        }
    }
    let said = failure(server, &format!("get block blocks 3 --token-file {empty}"), 2);
    assert!(
        said.contains("--token-file") && said.contains("it is empty"),
        "{said}"
    );
    failure(server, "get block blocks 3 --token-file /nonexistent", 2);
}
