//! The binary as people run it: arguments in; stdout, stderr and exit code out.
#![expect(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in tests, but does not see that these functions are only called by some"
)]

mod calibrate;
mod changes;
mod connections;
mod dataset;
mod doctor;
mod flaw;
mod get;
mod http;
mod knee;
mod lab;
mod load;
#[path = "../../../server/tests/e2e/loop_device.rs"]
mod loop_device;
mod results;
#[path = "../../../server/tests/e2e/seccomp.rs"]
mod seccomp;
mod server;
mod signals;
mod tls;

use flaw::Flaw;
use ringfetch_pattern as pattern;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use server::{SEED, start, start_for};
use std::ffi::OsStr;
use std::net::{Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// Runs `ringfetch` with arguments separated by spaces, against a server if there is one.
fn ringfetch(server: Option<SocketAddr>, args: &str) -> Output {
    command(server, args).output().unwrap()
}

/// A path as one word of a command line: any directory may have a space in its name.
fn word(path: impl AsRef<Path>) -> String {
    let path = path.as_ref().to_str().unwrap();
    shlex::try_quote(path).unwrap().into_owned()
}

/// A program that is ringfetch or runs it, without the variables of the developer's shell that would affect it.
fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("RINGFETCH_") {
            command.env_remove(variable);
        }
    }
    command
}

fn command(server: Option<SocketAddr>, args: &str) -> Command {
    let mut command = program(env!("CARGO_BIN_EXE_ringfetch"));
    command.args(shlex::split(args).unwrap());
    if let Some(address) = server {
        command.env("RINGFETCH_GRPC", format!("http://{address}"));
        command.env("RINGFETCH_ADMIN", format!("http://{address}"));
    }
    command
}

/// Starts a command whose output is read once it has ended.
fn started(command: &mut Command) -> Child {
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Sends signals to a run, and waits for its end.
fn ended_by(run: Child, signals: &[Signal]) -> Output {
    for signal in signals {
        rustix::process::kill_process(Pid::from_child(&run), *signal).unwrap();
    }
    run.wait_with_output().unwrap()
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
        format!(
            "doctor {}",
            word(Path::new(env!("CARGO_TARGET_TMPDIR")).join("none"))
        ),
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
#[ignore = "needs root"]
fn an_address_that_does_not_answer_leaves_time_for_the_next() {
    // Scenario: a name with ::1, which comes first (RFC 6724), and 127.0.0.1: nothing answers at the first, since its
    // backlog is full. Expected: every client goes on to the second, within its --timeout.
    const MOUNT: &str = "mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"";
    let hosts = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&hosts, "::1 both\n127.0.0.1 both\n").unwrap();
    let run = "load --dataset blocks --requests 10 --warmup-seconds 0";
    let (grpc, http) = (start(Flaw::NONE), http::start());
    let _silent = [grpc, http].map(|good| silent((Ipv6Addr::LOCALHOST, good.port()).into()));
    let http = format!("--http http://both:{}", http.port());
    for args in [
        "datasets".to_owned(),
        run.to_owned(),
        format!("{run} {http}"),
        format!("{run} --transport http {http}"),
    ] {
        let mut command = program("unshare");
        command
            .args(["--mount", "sh", "-c", MOUNT, "sh"])
            .args([hosts.path(), Path::new(env!("CARGO_BIN_EXE_ringfetch"))])
            .args([
                "--timeout",
                "30s",
                "--grpc",
                &format!("http://both:{}", grpc.port()),
            ])
            .args(shlex::split(&args).unwrap());
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && error.is_empty(), "{args}: {error}");
    }
}

/// A port that does not answer, while the sockets exist.
fn silent(address: SocketAddr) -> (socket2::Socket, TcpStream) {
    let full =
        socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None).unwrap();
    full.bind(&address.into()).unwrap();
    full.listen(0).unwrap();
    (full, TcpStream::connect(address).unwrap())
}

#[test]
fn what_is_not_utf8_is_named() {
    // Scenario: an argument, the value of a flag, and a variable that are not UTF-8. Expected: exit code 2, and which.
    let odd = OsStr::from_bytes(b"bl\xffcks");
    let ringfetch = || program(env!("CARGO_BIN_EXE_ringfetch"));
    for (command, want) in [
        (
            ringfetch().args(["get".as_ref(), "block".as_ref(), odd, "1".as_ref()]),
            r#"argument 3 ("bl\xFFcks")"#,
        ),
        (
            ringfetch().args([OsStr::from_bytes(b"--grpc=\xff"), "status".as_ref()]),
            r#"argument 1 ("--grpc=\xFF")"#,
        ),
        (
            ringfetch().arg("status").env("RINGFETCH_GRPC", odd),
            "RINGFETCH_GRPC",
        ),
    ] {
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.lines().next().unwrap().ends_with(want), "{error}");
    }
}

#[test]
fn an_error_cannot_control_the_terminal() {
    // Scenario: a path with a sequence that clears the screen, of which the error tells. Expected: it is escaped.
    let error = failure(None, "load-merge '/nowhere/\u{1b}[2J'", 1);
    assert!(error.contains("/nowhere/\\u{1b}[2J: No such file"), "{error}");
    assert!(!error.trim_end().contains(char::is_control), "{error}");
}

#[test]
fn wrong_arguments_cannot_control_the_terminal() {
    // Scenario: an unknown command, a value that is no number and an unknown flag, each with a sequence that clears the screen
    // and one that rings; colours are forced, as on a terminal. Expected: exit code 2, and no control character.
    for args in [
        &["\u{1b}[2J\u{7}"][..],
        &["--timeout", "\u{1b}[2J\u{7}", "status"],
        &["--\u{1b}[2J\u{7}"],
    ] {
        let output = program(env!("CARGO_BIN_EXE_ringfetch"))
            .args(args)
            .env("CLICOLOR_FORCE", "1")
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(
            error.starts_with("error: ") && error.contains("--help"),
            "{error:?}"
        );
        assert!(!error.replace('\n', "").contains(char::is_control), "{error:?}");
    }
}

#[test]
fn a_server_that_says_nothing_is_named() {
    // Scenario: a port that accepts connections, and no more. Expected: an error with the address and its flag.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap();
    let error = failure(Some(silent), "--timeout 100ms datasets", 1);
    assert!(
        error.contains(&format!("cannot reach http://{silent} (no connection within"))
            && error.contains("--grpc"),
        "{error}"
    );
}

#[test]
fn wrong_arguments_are_told_apart_from_failures() {
    for (args, word) in [
        ("", "Usage"),
        ("fetch", "fetch"),
        ("get block blocks", "INDEX"),
        ("get block blocks -- -1", "-1"),
        ("get range blocks 0 16MB", "16MB"),
        ("get range blocks 0 0", "<LENGTH>"),
        ("get object objects a --length 0", "--length"),
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
            "dataset make objects /nowhere/x --count 18446744073709551615",
            "--count <COUNT>': 18446744073709551615 is not in 1..=10000000",
        ),
        (
            "dataset make blocks /nowhere/x --size 1GiB --block-bytes 257MiB",
            "--block-bytes",
        ),
        ("dataset verify blocks --all --sample 3", "--all"),
        ("dataset verify blocks --length-min 3", "--count"),
        ("dataset verify blocks --length 0", "--length"),
        ("dataset make blocks /nowhere/x --size 4KiB --name a/b", "--name"),
        ("score vectors 1 2", "--like"),
        ("load --dataset blocks --rate -5", "above 0"),
        ("--timeout 0s datasets", "--timeout"),
        ("load --dataset blocks --seconds 0", "--seconds"),
        ("load --dataset blocks --connections 0", "--connections"),
        ("load --dataset blocks --seconds 1 --requests 1", "--requests"),
        ("--grpc localhost:7410 datasets", "--grpc"),
        ("load --dataset blocks --http localhost:7411", "http://HOST:PORT"),
        (
            "load --dataset blocks --http http://localhost:7411/metrics",
            "http://HOST:PORT",
        ),
        ("load --dataset blocks --seconds nan", "use seconds"),
        (
            "load --dataset blocks --threads 4",
            "--threads 4: each has a connection of its own: give --connections 4 or more",
        ),
        (
            "load --dataset blocks --threads 4 --connections 4 --outstanding 2",
            "--threads 4: each has requests of its own: give --outstanding 4 or more",
        ),
        (
            "load --dataset blocks --threads 4 --transport http --outstanding 2",
            "--outstanding 4 or more",
        ),
        (
            "load --dataset blocks --hgrm /nowhere/x --csv /nowhere/x",
            "--csv and --hgrm name the same file",
        ),
        ("--grpc http://localhost:7410/v1 datasets", "http://HOST:PORT"),
        ("--grpc http://localhost:7410?a=1 datasets", "http://HOST:PORT"),
        ("--grpc http://a:b@localhost:7410 datasets", "http://HOST:PORT"),
        ("--grpc http://localhost:74100 datasets", "http://HOST:PORT"),
        ("--admin http://localhost:7412/status status", "http://HOST:PORT"),
        ("load --dataset blocks --http http://h:1?a=1", "http://HOST:PORT"),
        ("load --dataset blocks --http http://h:74110", "http://HOST:PORT"),
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
fn no_error_shows_the_password_of_an_address() {
    // Scenario: addresses with a password, or a token as a query or a fragment, for every option that takes one: also where the user is
    // named as the host, and where the password has characters that a URL may not have. Expected: a usage error that names
    // the option, and nothing of the address.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [path, out] = ["data", "out"].map(|name| directory.path().join(name));
    std::fs::write(&path, stream(0, 1 << 20)).unwrap();
    for url in [
        "http://user:secret@127.0.0.1:1",
        "https://127.0.0.1:secret@127.0.0.1:1",
        "http://localhost:secret@localhost:1",
        "http://user:secret|@127.0.0.1:1",
        "http://127.0.0.1:1/?token=secret",
        "http://127.0.0.1:1/#secret",
        "user:secret@127.0.0.1:1",
    ] {
        for (command, option) in [
            ("get block blocks 0", "--grpc"),
            ("status", "--admin"),
            ("load --dataset blocks --requests 1", "--http"),
            ("load --dataset blocks --requests 1", "--grpc"),
            ("load --dataset blocks --requests 1 --transport http", "--http"),
        ] {
            let said = failure(None, &format!("{command} {option} {url}"), 2);
            assert!(said.contains(option) && !said.contains("secret"), "{said}");
        }
        let [path, out] = [word(&path), word(&out)];
        for study in ["act", "flip"] {
            let args =
                format!("lab {study} --force --path {path} --out {out} --dataset blocks --server {url}");
            let said = failure(None, &args, 2);
            assert!(said.contains("--server") && !said.contains("secret"), "{said}");
        }
    }
}

#[test]
fn a_file_without_an_end_is_refused_with_the_limit() {
    // Scenario: /dev/zero for every file that is read whole, and to a daemon, so that nothing else is wrong.
    // Expectation: one line that names the flag or the file, and the limit.
    let server = Some(start(Flaw::NONE));
    for (args, code, named) in [
        (
            "datasets --token-file /dev/zero",
            2,
            "--token-file: /dev/zero: it",
        ),
        ("datasets --ca /dev/zero", 2, "--ca: /dev/zero: it"),
        (
            "datasets --cert /dev/zero --key /dev/null",
            2,
            "--cert: /dev/zero: it",
        ),
        (
            "datasets --cert /dev/null --key /dev/zero",
            2,
            "--key: /dev/zero: it",
        ),
        (
            "load --dataset blocks --trace /dev/zero",
            2,
            "--trace /dev/zero: line 1: it",
        ),
        ("load-merge /dev/zero", 1, "/dev/zero: it"),
        ("lab compare /dev/zero /dev/null", 1, "/dev/zero: it"),
    ] {
        let said = failure(server, args, code);
        let (_, limit) = said.split_once(named).unwrap_or_else(|| panic!("{args}: {said}"));
        assert!(
            limit.starts_with(" has more than ") && limit.ends_with(", the limit\n"),
            "{said}"
        );
    }
}

#[test]
fn an_empty_variable_is_as_good_as_none() {
    // Scenario: each variable of a flag is there and empty. Expectation: the command runs as without it; those of the
    // addresses leave the default ones.
    let server = start(Flaw::NONE);
    let load = "load --dataset blocks --requests 4 --warmup-seconds 0";
    for variable in ["TOKEN_FILE", "CA", "CERT", "KEY", "HTTP"] {
        let mut command = command(Some(server), load);
        let output = command.env(format!("RINGFETCH_{variable}"), "").output().unwrap();
        assert!(output.status.success(), "{variable}: {output:?}");
    }
    for (variable, args, address) in [
        ("GRPC", "datasets", "http://127.0.0.1:7410"),
        ("ADMIN", "status", "http://127.0.0.1:7412"),
    ] {
        let mut command = command(None, &format!("{args} --timeout 1ns"));
        let output = command.env(format!("RINGFETCH_{variable}"), "").output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        let is_sent = error.contains("within --timeout") || error.contains(address);
        assert!(output.status.code() == Some(1) && is_sent, "{variable}: {error}");
    }
}

#[test]
fn a_full_disk_is_reported_with_what_could_not_be_written() {
    // Scenario: short and long results into a full device, by --out and by stdout. Expectation: exit code 1, and one line
    // that names the flag and the file, or stdout.
    let server = Some(start(Flaw::NONE));
    for args in ["get block blocks 1", "get range blocks 0 100000"] {
        let said = failure(server, &format!("{args} --out /dev/full"), 1);
        assert!(
            said.starts_with("ringfetch: --out: cannot write /dev/full: No space"),
            "{said}"
        );
    }
    for args in [
        "get range blocks 0 100000",
        "datasets",
        "--json status",
        "completions bash",
        "doctor",
        "get --help",
        "help",
        "--version",
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = command(server, args).stdout(full).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(
            error.starts_with("ringfetch: stdout: No space"),
            "{args}: {error}"
        );
        assert_eq!(
            (output.status.code(), error.lines().count()),
            (Some(1), 1),
            "{args}"
        );
    }
}

#[test]
fn a_message_that_cannot_be_written_leaves_the_exit_code() {
    // Scenario: stderr is a full disk, and a pipe without a reader. Expectation: the exit code of the failure.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    for stderr in [Stdio::from(full), writer.into()] {
        let mut command = command(None, "datasets --token-file /nonexistent");
        assert_eq!(command.stderr(stderr).status().unwrap().code(), Some(2));
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
objects  objects      -          -  -
vectors  vectors    300   14.2 KiB  24 x f16 (npy)
";
    assert_eq!(table, want);
    assert_eq!(json(server, "datasets")["datasets"][2]["vectors"]["dtype"], "f16");

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
        "SHARD  BACKEND  IN FLIGHT  STALLED  QUEUED  DEPTH  DEVICE READS  SUBMISSIONS\n    0  uring            0        9       0    128        12 345            0\n",
    ] {
        assert!(status.contains(want), "{want:?} in:\n{status}");
    }
    let status = json(server, "status");
    assert_fields(&status, &json!({ "fallback": true }));
    assert_fields(&status["shards"][0], &json!({ "queue_depth": 128, "stalled": 9 }));
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
    let elsewhere = failure(Some(server), "log-level elsewhere", 1);
    let said = "ringfetch: UNIMPLEMENTED: no such service; this port has another (--admin)\n";
    assert_eq!(elsewhere, said);
}

#[test]
fn a_token_is_sent_and_never_shown() {
    // Scenario: a daemon for clients with a token; reads, load on each transport and administration with its
    // file, without it, with another one, and with files that are empty, missing, of two lines, or have more than the
    // token.
    // Expectation: only the first are served; no token is printed.
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        word(path)
    };
    let server = Some(start_for(Some("Bearer secret-7"), Flaw::NONE));
    let http = http::start_for(Some("bearer secret-7"));
    let good = file("good", "secret-7\n");
    let bad = file("bad", "secret-8");
    let (lines, empty) = (file("lines", "secret-7\nsecret-7\n"), file("empty", "\n"));
    let (scheme, marked) = (
        file("scheme", "Bearer secret-7\n"),
        file("marked", "\u{feff}secret-7\n"),
    );
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
        for args in [format!("{command} --token-file {bad}"), command.to_owned()] {
            let output = ringfetch(server, &args);
            assert_eq!(output.status.code(), Some(1), "{args}");
            assert!(
                !String::from_utf8_lossy(&output.stderr).contains("secret"),
                "{output:?}"
            );
        }
        for (file, problem) in [
            (&lines, "more than one line"),
            (&empty, "it is empty"),
            (&scheme, "blanks or a byte order mark"),
            (&marked, "blanks or a byte order mark"),
        ] {
            let said = failure(server, &format!("{command} --token-file {file}"), 2);
            assert!(
                said.contains("--token-file: ") && said.contains(problem) && !said.contains("secret"),
                "{said}"
            );
        }
    }
    failure(server, "get block blocks 3 --token-file /nonexistent", 2);
}
