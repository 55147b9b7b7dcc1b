//! Commands that are stopped, or whose daemon is.

use crate::connections::{forward, listen};
use crate::flaw::Flaw;
use crate::load::{end_once, number};
use crate::server::{LONG_OBJECT, start};
use crate::{command, ended_by, http, program, started, word};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

#[test]
fn signals_end_a_run_early_and_it_is_reported() {
    // An open loop of a minute, ended by Ctrl-C, as containers and services are, and by the end of a login,
    // once its series has a response: arrivals still to come do not count as missed.
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let report = interrupted("", signal, || {});
        assert!(number(&report["seconds"]) < 50.0, "{report}");
        let (requests, missed) = (&report["requests"], &report["open_loop"]["missed"]);
        assert!(requests.as_u64() > Some(0), "{report}");
        assert!(missed.as_u64() < Some(100), "{report}");
        assert!(report["server_unknown"].is_null(), "{report}");
    }
}

/// As a server that stops in the middle of a response on connection 1; and when it has.
fn stalling(server: SocketAddr) -> (SocketAddr, Receiver<()>) {
    let (stalled, is_stalled) = channel();
    // The connection is kept, and nothing more comes from it.
    let stalling = end_once(server, move |number, _client, _server| {
        if number == 1 {
            stalled.send(()).unwrap();
            std::thread::park();
        }
    });
    (stalling, is_stalled)
}

#[test]
fn a_second_signal_waits_for_no_request() {
    // Scenario: a server that stops answering; two different signals, since equal ones may be one, while
    // requests are in flight. Expected: the run ends with exit code 1, one line that says why, and no report,
    // long before --timeout.
    let (stalling, is_stalled) = stalling(start(Flaw::NONE));
    let args = "--timeout 20s load --dataset blocks --batch 1 --seconds 600 --warmup-seconds 0";
    let run = started(&mut command(Some(stalling), args));
    is_stalled.recv().unwrap();
    let output = ended_by(run, &[Signal::INT, Signal::TERM]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("ringfetch: stopped a second time, "), "{error}");
    assert!(output.stdout.is_empty(), "{error}");
}

#[test]
fn a_signal_waits_for_no_page_of_counters() {
    // Scenario: an HTTP port that stops answering: before anything is sent, at the start of the window, and at its end; a
    // signal while it is waited for, in the window after some responses. Expected, long before --timeout: the end of the
    // run; a report without the server's figures, both times.
    let (read, has_read) = channel();
    let server = end_once(start(Flaw::NONE), move |number, client, server| {
        if number == 1 {
            read.send(()).unwrap();
            let _ = std::io::copy(&mut &server, &mut &client);
        }
    });
    let load = "--json --timeout 20s load --dataset blocks --batch 1 --warmup-seconds 0";
    // Connection 1 of the server is that of the load at the start of its window.
    for (pages, length) in [(1, "--seconds 600"), (0, "--seconds 600"), (2, "--requests 10")] {
        let (http, is_silent) = silent_after(pages);
        let args = format!("{load} {length} --http http://{http}");
        let run = started(&mut command(Some(server), &args));
        let _held = is_silent.recv().unwrap();
        if pages == 1 {
            has_read.recv().unwrap();
        }
        let output = ended_by(run, &[Signal::TERM]);
        let error = String::from_utf8(output.stderr).unwrap();
        if pages == 0 {
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert_eq!(error, "ringfetch: it was stopped\n");
            continue;
        }
        assert_eq!(output.status.code(), Some(0), "{error}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            report["server_unknown"], "stopped while the daemon's counters were read",
            "{report}"
        );
    }
}

#[test]
fn a_second_signal_waits_for_no_page_of_counters() {
    // Scenario: an HTTP port that stops answering at the start of the window, which a signal in the warm-up begins, with
    // requests in flight; another signal then. Expected: as without counters.
    let (stalling, is_stalled) = stalling(start(Flaw::NONE));
    let (http, is_silent) = silent_after(1);
    let args =
        format!("--timeout 20s load --dataset blocks --batch 1 --warmup-seconds 600 --http http://{http}");
    let run = started(&mut command(Some(stalling), &args));
    is_stalled.recv().unwrap();
    kill_process(Pid::from_child(&run), Signal::INT).unwrap();
    let _held = is_silent.recv().unwrap();
    let output = ended_by(run, &[Signal::TERM]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert_eq!(
        error,
        "ringfetch: stopped a second time, while the daemon's counters were read\n"
    );
    assert!(output.stdout.is_empty(), "{error}");
}

/// The address of an HTTP server that answers this many connections, and the others, which it does not answer.
fn silent_after(answered: usize) -> (SocketAddr, Receiver<TcpStream>) {
    let server = http::start();
    let (silent, connections) = channel();
    let address = listen(move |number, client| {
        if number < answered {
            return forward(client, server);
        }
        // The test may be over.
        let _ = silent.send(client);
    });
    (address, connections)
}

#[test]
fn a_pipe_that_nobody_opens_does_not_outlive_a_signal() {
    // Scenario: results that go to a pipe without a reader, also beside a file; a signal once the command waits for a reader.
    // Expected: it ends, and leaves no part of a file.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let pipe = pipe_in(directory.path());
    let beside = format!("--hgrm {} --csv", word(directory.path().join("out")));
    for flag in ["--csv", "--hgrm", &beside] {
        let args = format!("load --dataset blocks {flag} {}", word(&pipe));
        let run = started(&mut command(Some(server), &args));
        let stat = format!("/proc/{}/stat", run.id());
        // `PID (ringfetch) S ...`
        while !std::fs::read_to_string(&stat).unwrap().contains("(ringfetch) S ") {
            std::thread::yield_now();
        }
        let output = ended_within_reason(run, &[Signal::TERM]);
        assert_eq!(
            output.status.signal(),
            Some(Signal::TERM.as_raw()),
            "{flag}: {output:?}"
        );
    }
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "only the pipe");
}

#[test]
fn a_pipe_that_nobody_reads_does_not_outlive_a_signal() {
    // Scenario: an object, longer than any pipe, goes to a pipe that is open and not read; a signal once the command
    // writes. Expected: it ends.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let path = pipe_in(directory.path());
    let unread = std::fs::File::options().read(true).write(true).open(&path);
    let unread = unread.unwrap();
    let args = format!("get object objects {LONG_OBJECT} --out {}", word(&path));
    let mut run = started(&mut command(Some(server), &args));
    while rustix::io::ioctl_fionread(&unread).unwrap() == 0 {
        assert_eq!(run.try_wait().unwrap(), None);
        std::thread::yield_now();
    }
    let output = ended_within_reason(run, &[Signal::TERM]);
    assert_eq!(output.status.signal(), Some(Signal::TERM.as_raw()), "{output:?}");
}

#[test]
fn a_second_signal_waits_for_no_reader() {
    // Scenario: a full pipe that nobody reads, for the series of a run with requests in flight, and for the distribution and
    // the report of one that is over; two signals. Expected: exit code 1, and one line that says why.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let (pipe, series) = (pipe_in(directory.path()), directory.path().join("series"));
    let mut full = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&pipe)
        .unwrap();
    fill(&mut full);
    let (stalling, is_stalled) = stalling(server);
    let load = "load --dataset blocks --batch 1 --warmup-seconds 0 --interval 0.01";
    for flag in ["--csv", "--hgrm", "stdout"] {
        let mut run = match flag {
            "--csv" => command(
                Some(stalling),
                &format!("{load} --seconds 600 --csv {}", word(&pipe)),
            ),
            _ => command(
                Some(server),
                &format!("{load} --requests 10 --csv {}", word(&series)),
            ),
        };
        run.stdout(Stdio::piped()).stderr(Stdio::piped());
        match flag {
            "--hgrm" => drop(run.arg(flag).arg(&pipe)),
            "stdout" => drop(run.stdout(std::fs::File::options().write(true).open(&pipe).unwrap())),
            _ => {}
        }
        let run = run.spawn().unwrap();
        if flag == "--csv" {
            is_stalled.recv().unwrap();
        } else {
            // The header, and the only line, which is written after the last response.
            while !std::fs::read_to_string(&series).is_ok_and(|text| text.lines().count() > 1) {
                std::thread::yield_now();
            }
        }
        let output = ended_within_reason(run, &[Signal::INT, Signal::TERM]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{flag}: {error}");
        assert!(
            error.starts_with("ringfetch: stopped a second time, "),
            "{flag}: {error}"
        );
        let _ = std::fs::remove_file(&series);
    }
}

fn pipe_in(directory: &Path) -> PathBuf {
    let pipe = directory.join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    pipe
}

/// Fills a pipe, so that further writes wait.
fn fill(pipe: &mut std::fs::File) {
    rustix::io::ioctl_fionbio(&*pipe, true).unwrap();
    for part in [4096, 1] {
        let full = loop {
            if let Err(error) = pipe.write(&vec![b'x'; part]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
    }
}

/// As [`ended_by`], of a run that may not end.
fn ended_within_reason(mut run: Child, signals: &[Signal]) -> Output {
    for signal in signals {
        kill_process(Pid::from_child(&run), *signal).unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    while run.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            run.kill().unwrap();
        }
        std::thread::yield_now();
    }
    run.wait_with_output().unwrap()
}

#[test]
fn a_command_that_is_stopped_leaves_no_part_of_a_file() {
    // Scenario: a daemon that says nothing; a signal once a command that is to write a file has connected. Expected: exit
    // code 1, one line that says why, and nothing where the file would be.
    for args in ["get range blocks 0 5 --out", "load --dataset blocks --hgrm"] {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let directory = tempfile::tempdir().unwrap();
        let args = format!("{args} {}", word(directory.path().join("out")));
        let run = started(&mut command(Some(silent.local_addr().unwrap()), &args));
        let waiting = silent.accept().unwrap();
        let output = ended_by(run, &[Signal::TERM]);
        drop(waiting);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args}: {error}");
        assert_eq!(error, "ringfetch: stopped\n", "{args}");
        let left = std::fs::read_dir(directory.path()).unwrap();
        assert_eq!(left.count(), 0, "{args}");
    }
}

#[test]
fn a_wait_for_a_rate_does_not_outlive_a_signal() {
    // Scenario: a read is refused for ten minutes; then a signal. Expected: the command ends, long before, with exit code 1 and
    // nothing where the file would be.
    let flaw = Flaw::refused_for(Duration::from_secs(600));
    let directory = tempfile::tempdir().unwrap();
    let args = format!("get block blocks 3 --out {}", word(directory.path().join("out")));
    let mut run = started(&mut command(Some(start(flaw)), &args));
    while flaw.reads() == 0 {
        assert_eq!(run.try_wait().unwrap(), None);
        std::thread::yield_now();
    }
    let output = ended_within_reason(run, &[Signal::TERM]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(output.stderr, b"ringfetch: stopped\n");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
#[ignore = "needs strace"]
fn a_second_signal_leaves_no_part_of_a_dataset() {
    // Scenario: the file system hangs while room for a file is reserved; two signals once there
    // is a part of it. Expected: exit code 1, and nothing where the file would be.
    let directory = tempfile::tempdir().unwrap();
    let files = || std::fs::read_dir(directory.path()).unwrap().count();
    let mut run = program("strace");
    // -D: the command stays a child of this process.
    run.args(["-D", "-f", "-qq", "-o", "/dev/null"])
        .args(["-e", "inject=fallocate:delay_enter=600s"])
        .arg(env!("CARGO_BIN_EXE_ringfetch"))
        .args(["dataset", "make", "blocks", "--size", "1MiB"])
        .arg(directory.path().join("blocks"));
    let mut run = started(&mut run);
    let deadline = Instant::now() + Duration::from_secs(30);
    while files() == 0 {
        assert!(Instant::now() < deadline, "no part of the file");
        std::thread::yield_now();
    }
    let pid = Pid::from_child(&run);
    for signal in [Signal::INT, Signal::TERM] {
        kill_process(pid, signal).unwrap();
    }
    let mut error = String::new();
    BufReader::new(run.stderr.take().unwrap())
        .read_line(&mut error)
        .unwrap();
    let left = files();
    // strace would keep the process until the delay has passed.
    let status = std::fs::read_to_string(format!("/proc/{}/status", run.id())).unwrap();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    let tracer = Pid::from_raw(tracer.unwrap().trim().parse().unwrap());
    kill_process(tracer.unwrap(), Signal::KILL).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(1), "{error}");
    assert!(error.starts_with("ringfetch: stopped a second time, "), "{error}");
    assert_eq!(left, 0, "{error}");
}

#[test]
fn a_second_signal_waits_for_no_step_of_a_study() {
    // Scenario: a daemon that says nothing; two signals once the study has connected. Expected: it ends with
    // exit code 1 and one line that says why, and how to see the daemon's backend; it does not wait for the daemon.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let (path, out) = (directory.path(), directory.path().join("out"));
    let args = format!(
        "--admin {url} lab flip --server {url} --dataset blocks --path {} --out {} --force",
        word(path),
        word(&out),
    );
    let run = started(&mut command(None, &args));
    let waiting = silent.accept().unwrap();
    let output = ended_by(run, &[Signal::INT, Signal::TERM]);
    drop(waiting);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("ringfetch: stopped a second time, "), "{error}");
    assert!(error.contains("`ringfetch backend` shows"), "{error}");
}

#[test]
fn a_server_that_ends_meanwhile_costs_its_own_figures_alone() {
    // Scenario: the process of --server-pid ends while the load runs. Expected: the report, and why its CPU
    // is unknown.
    let mut server = Command::new("sleep").arg("600").spawn().unwrap();
    let report = interrupted(&format!(" --server-pid {}", server.id()), Signal::INT, || {
        server.kill().unwrap();
        server.wait().unwrap();
    });
    assert!(report["requests"].as_u64() > Some(0), "{report}");
    assert!(report["server_cpu"].is_null(), "{report}");
    let problem = report["server_unknown"].as_str().unwrap();
    assert!(problem.starts_with("--server-pid"), "{problem}");
}

/// The report of an open loop of a minute, interrupted once its series has a response and `then` is done.
fn interrupted(more: &str, signal: Signal, then: impl FnOnce()) -> Value {
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let series = directory.path().join("series.csv");
    let args =
        "--json load --dataset blocks --rate 100 --batch 1 --seconds 60 --warmup-seconds 0 --interval 0.05";
    let args = format!("{args}{more}");
    // nohup, below which the tests may run, would have SIGHUP ignored.
    let mut run = program("env");
    run.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_ringfetch")])
        .args(args.split(' '))
        .arg("--csv")
        .arg(&series)
        .env("RINGFETCH_GRPC", format!("http://{server}"));
    let run = started(&mut run);
    let deadline = Instant::now() + Duration::from_secs(30);
    // A line's fifth field is a latency, or empty if the interval had no response.
    let answered = |text: String| {
        let mut lines = text.lines().skip(1);
        lines.any(|line| line.split(',').nth(4).is_some_and(|p50| !p50.is_empty()))
    };
    while !std::fs::read_to_string(&series).is_ok_and(answered) {
        assert!(Instant::now() < deadline, "no answer in the series");
        std::thread::yield_now();
    }
    then();
    let output = ended_by(run, &[signal]);
    assert_eq!(output.status.code(), Some(0));
    serde_json::from_slice(&output.stdout).unwrap()
}
