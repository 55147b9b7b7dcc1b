//! The daemon's commands about configurations, and their exit codes.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Command, Output};

use rustix::process::{Pid, Signal, kill_process};

use crate::{documented, manifest};

/// Runs the daemon's binary in an empty directory without this process's RINGFETCH variables.
fn ringfetchd(arguments: &[impl AsRef<OsStr>]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringfetchd"));
    command.args(arguments).current_dir(directory.path());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RINGFETCH") {
            command.env_remove(name);
        }
    }
    let output = command.output().unwrap();
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        0,
        "a check leaves nothing behind"
    );
    output
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn check_config_answers_by_its_exit_code() {
    // Scenario: the documented file; a bad file; a missing one; none, as an empty variable names; a bad flag over a good file; no file at all.
    // Expectation: exit code 0 and one line on stdout if valid, otherwise 2 with every problem on stderr.
    let documented = documented();
    let documented = documented.to_str().unwrap();
    let good = ringfetchd(&["--config", documented, "check-config"]);
    assert_eq!(good.status.code(), Some(0), "{}", text(&good.stderr));
    assert!(
        text(&good.stdout).starts_with("ok: backend uring, 4 datasets"),
        "{}",
        text(&good.stdout)
    );

    let bad = manifest().join("tests/bad-config/unknown-keys.yaml");
    let bad = ringfetchd(&["check-config", "--config", bad.to_str().unwrap()]);
    assert_eq!((bad.status.code(), text(&bad.stdout)), (Some(2), ""));
    let complaint = text(&bad.stderr);
    assert!(
        complaint.contains("7 problems") && complaint.lines().count() == 8,
        "{complaint}"
    );

    for missing in ["/nowhere/ringfetchd.yaml", ""] {
        let missing = (missing, ringfetchd(&["--config", missing]));
        let complaint = text(&missing.1.stderr);
        assert_eq!(missing.1.status.code(), Some(2), "{complaint}");
        assert!(
            complaint.contains(missing.0) && complaint.contains("RINGFETCH_CONFIG"),
            "{complaint}"
        );
    }

    let flags = [
        "--config",
        documented,
        "--backend",
        "fast",
        "--set",
        "engine.cores=0",
        "check-config",
    ];
    let flags = ringfetchd(&flags);
    assert_eq!(flags.status.code(), Some(2));
    let complaint = text(&flags.stderr);
    assert!(
        complaint.contains("(flag --backend)") && complaint.contains("(flag --set engine.cores)"),
        "{complaint}"
    );

    let demo = ringfetchd(&["check-config"]);
    assert_eq!(demo.status.code(), Some(0), "{}", text(&demo.stderr));
}

#[test]
fn check_config_can_open_the_datasets() {
    // Scenario: a well-formed file with one dataset that exists and two that do not. Expectation: valid by
    // itself; with --open exit code 2 and a line for each of the two.
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("a.bin"), [0; 8192]).unwrap();
    let path = directory.path().join("config.yaml");
    let entry =
        |name: &str| format!("  - {{ name: {name}, kind: blocks, path: {name}.bin, block_bytes: 4096 }}\n");
    std::fs::write(
        &path,
        ["datasets:\n".to_owned(), entry("a"), entry("b"), entry("c")].concat(),
    )
    .unwrap();
    let path = path.to_str().unwrap();
    assert_eq!(
        ringfetchd(&["--config", path, "check-config"]).status.code(),
        Some(0)
    );
    let output = ringfetchd(&["--config", path, "check-config", "--open"]);
    assert_eq!(output.status.code(), Some(2));
    let complaint = text(&output.stderr);
    assert!(
        complaint.contains("dataset b: path:") && complaint.contains("dataset c: path:"),
        "{complaint}"
    );
    assert!(!complaint.contains("dataset a"), "{complaint}");
}

#[test]
fn check_config_opens_no_demo_that_is_not_made() {
    // Scenario: `--open` in an empty directory, without a file, where the daemon starts with a demo that it makes; then with a
    // demo that is complete, but for a file. Expectation: exit code 0, and nothing is made; then 2.
    let output = ringfetchd(&["check-config", "--open"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("a start makes the demo's data"),
        "{}",
        text(&output.stdout)
    );
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(".ringfetch-demo-complete"), "").unwrap();
    let path = directory.path().to_str().unwrap();
    let output = ringfetchd(&["--demo-dir", path, "check-config", "--open"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("blocks.bin: does not exist"));
}

#[test]
fn print_config_prints_what_is_in_force() {
    // Scenario: the documented file, with a flag that overrides a value. Expectation: the value and its
    // source on one line.
    let documented = documented();
    let output = ringfetchd(&[
        "print-config",
        "--config",
        documented.to_str().unwrap(),
        "--backend",
        "mmap",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("\n  backend: mmap # flag --backend\n"),
        "{}",
        text(&output.stdout)
    );
}

#[test]
fn healthcheck_says_when_nobody_answers() {
    // Scenario: a port without a listener. Expectation: exit code 1 and one line that names the address.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let output = ringfetchd(&["healthcheck", "--http-listen", &address]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains(&address),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(text(&output.stderr).lines().count(), 1);
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    // Scenario: the reader of a command's output closes the pipe before it is written. Expectation: exit code 0, nothing said.
    for arguments in [&["print-config"][..], &["check-config"], &["completions", "bash"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringfetchd"));
        command.args(arguments).env_clear().stdout(writer);
        let output = command.output().unwrap();
        assert_eq!(
            (output.status.code(), text(&output.stderr)),
            (Some(0), ""),
            "{arguments:?}"
        );
    }
}

#[test]
fn the_demo_can_be_made_without_serving_it() {
    // Scenario: `make-demo` into a new directory, twice. Expectation: exit 0 with the three datasets, and
    // nothing written the second time.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("demo");
    let make = || {
        let output = ringfetchd(&["make-demo", "--demo-dir", path.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let written = std::fs::metadata(path.join("blocks.bin")).unwrap();
        written.modified().unwrap()
    };
    let first = make();
    assert!(path.join("vectors.npy").is_file() && path.join("objects").is_dir());
    assert!(!path.join(".ringfetch-demo-partial").exists());
    assert_eq!(make(), first);
}

#[test]
fn a_demo_whose_path_no_configuration_can_have_is_not_made() {
    // Scenario: a path that is not UTF-8. Expectation: exit 2, the flag is named, and nothing is written.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(OsStr::from_bytes(b"\xe4"));
    for command in ["make-demo", "run", "check-config"] {
        let output = ringfetchd(&[OsStr::new(command), OsStr::new("--demo-dir"), path.as_os_str()]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command}: {error}");
        assert!(
            error.contains("--demo-dir") && error.contains("not UTF-8"),
            "{command}: {error}"
        );
    }
    assert!(!path.exists());
}

#[test]
fn a_demo_that_is_ended_while_it_is_made_is_made_anew() {
    // Scenario: SIGTERM and SIGINT as soon as `make-demo` has begun. Expectation: it ends itself, by an exit code, which the
    // kernel's default action would not do as process 1; nothing is where a daemon would serve it, and the next run makes all.
    let directory = tempfile::tempdir().unwrap();
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let demo = directory.path().join(code.to_string());
        let arguments = ["make-demo", "--demo-dir", demo.to_str().unwrap()];
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringfetchd"));
        let mut making = command.args(arguments).spawn().unwrap();
        while !demo.join(".ringfetch-demo-partial/blocks.bin").exists() {
            assert_eq!(making.try_wait().unwrap(), None);
            std::thread::yield_now();
        }
        kill_process(Pid::from_child(&making), signal).unwrap();
        assert_eq!(making.wait().unwrap().code(), Some(code));
        assert!(!demo.join("blocks.bin").exists());
        assert_eq!(ringfetchd(&arguments).status.code(), Some(0));
        assert!(demo.join("blocks.bin").is_file() && demo.join(".ringfetch-demo-complete").exists());
    }
}

#[test]
fn check_config_asks_whether_the_access_log_can_be_written() {
    // Scenario: an access log in a directory that does not exist, one that is a directory, and one that can
    // be created. Expectation: --open refuses the first two as startup does, with exit code 2, and creates
    // none.
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    for (path, complaint) in [
        (place("nowhere/log"), Some("cannot be written: No such file")),
        (place(""), Some("is a directory")),
        (place("log"), None),
    ] {
        let set = format!("access_log.path={path}");
        let demo = place("demo");
        std::fs::create_dir_all(&demo).unwrap();
        assert!(ringfetchd(&["make-demo", "--demo-dir", &demo]).status.success());
        // Any backend: a host may refuse io_uring.
        let backend = ["--backend", "pread"];
        let start = [&["--demo-dir", &demo, "--set", &set], &backend[..]].concat();
        let output = ringfetchd(&[&start[..], &["check-config", "--open"]].concat());
        let told = text(&output.stderr).to_owned();
        assert_eq!(
            output.status.code(),
            Some(if complaint.is_some() { 2 } else { 0 }),
            "{told}"
        );
        assert!(told.contains(complaint.unwrap_or_default()), "{told}");
    }
    assert!(!directory.path().join("log").exists());
}
