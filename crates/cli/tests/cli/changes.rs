//! `ringfetch backend` and `ringfetch reload`: output and exit codes.

use crate::connections::listen;
use crate::flaw::Flaw;
use crate::server::{start, start_with};
use crate::{assert_fields, failure, stdout};
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::mpsc::channel;

#[test]
fn backends_are_shown_set_and_cleared() {
    let server = start(Flaw::NONE);
    let table = stdout(server, "backend");
    for want in [
        "DATASET   BACKEND  ASKED FOR  BY",
        "(engine)  mmap     uring      -       seccomp forbids io_uring\n",
        "blocks    mmap     uring      engine",
    ] {
        assert!(table.contains(want), "{want:?} in:\n{table}");
    }
    let shown = crate::json(server, "backend");
    assert_eq!(shown["engine"]["requested"], "uring");
    assert_fields(&shown["datasets"][1], &json!({ "name": "objects", "own": false }));

    let engine =
        "engine: auto (was: mmap); until the next reload\nas before, by a backend of their own: vectors\n";
    assert_eq!(stdout(server, "backend set auto"), engine);
    let one = stdout(server, "backend set pread --dataset blocks");
    assert_eq!(one, "blocks: pread (was: mmap); until the next reload\n");
    let set = crate::json(server, "backend set mmap");
    assert_fields(&set, &json!({ "backend": "mmap", "dataset": null }));
    let cleared = stdout(server, "backend clear --dataset blocks");
    assert_eq!(
        cleared,
        "blocks: mmap, the engine's (was: pread); until the next reload\n"
    );
}

#[test]
fn a_switch_that_is_refused_is_a_failure() {
    let server = start(Flaw::NONE);
    let error = failure(Some(server), "backend set uring", 1);
    assert!(
        error.contains("FAILED_PRECONDITION") && error.contains("seccomp"),
        "{error}"
    );
    let error = failure(Some(server), "backend set mmap --dataset nothing", 1);
    assert!(error.contains("NOT_FOUND"), "{error}");
    for args in ["backend set aio", "backend set", "backend clear"] {
        let output = crate::ringfetch(Some(server), args);
        assert_eq!(output.status.code(), Some(2), "{args}");
        assert!(output.stdout.is_empty(), "{args}");
    }
}

#[test]
fn a_reload_lists_its_changes() {
    let server = start(Flaw::NONE);
    assert_eq!(
        stdout(server, "reload"),
        "applied: limits.connections 4096 -> 100\ndataset added: new\ndataset removed: old\n\
         needs a restart: engine.cores 2 -> 4\n"
    );
    let reloaded = crate::json(server, "reload");
    assert_eq!(reloaded["needs_restart"][0]["after"], "4");
    assert_eq!(reloaded["datasets_unchanged"][1], "vectors");

    let flawed = start(Flaw::OVERLOADED);
    let error = failure(Some(flawed), "reload", 1);
    assert!(error.contains("INVALID_ARGUMENT: engine.bakend"), "{error}");
}

#[test]
fn a_reload_may_take_as_long_as_a_daemon_waits_for_file_systems() {
    // Scenario: changes with and without --timeout, to a daemon that notes how long a call may take (`grpc-timeout`). Expected:
    // ten minutes for a reload, else ten seconds; what is given.
    let (noted, timeouts) = channel();
    let note = move |request: tonic::Request<()>| {
        let timeout = request.metadata().get("grpc-timeout").unwrap();
        noted.send(timeout.to_str().unwrap().to_owned()).unwrap();
        Ok(request)
    };
    let server = start_with(note, Flaw::NONE);
    for (args, seconds) in [
        ("reload", 600),
        ("reload --timeout 10s", 10),
        ("--timeout 3s reload", 3),
        ("backend set mmap", 10),
    ] {
        stdout(server, args);
        let timeout = timeouts.recv().unwrap();
        let (number, unit) = timeout.split_at(timeout.len() - 1);
        let second = match unit {
            "S" => 1,
            "m" => 1000,
            "u" => 1_000_000,
            _ => panic!("{timeout}"),
        };
        assert_eq!(number.parse(), Ok(seconds * second), "{args}: {timeout}");
    }
}

/// Takes each request, and hangs up without an answer.
fn start_silent() -> SocketAddr {
    listen(|_, mut connection| {
        // Empty SETTINGS; then the preface, and frames up to the request's DATA (RFC 9113).
        connection.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).unwrap();
        connection.read_exact(&mut [0; 24]).unwrap();
        let mut head = [0; 9];
        while head[3] != 0 || head[8] == 0 {
            connection.read_exact(&mut head).unwrap();
            let length = usize::from(head[1]) << 8 | usize::from(head[2]);
            connection.read_exact(&mut vec![0; length]).unwrap();
        }
    })
}

#[test]
fn a_change_without_an_answer_may_have_been_made() {
    // Scenario: a daemon that takes each request and hangs up; no daemon. Expected: every command that changes something
    // says that it may have, and how to see it; then that nothing is there.
    let silent = start_silent();
    for (args, look) in [
        ("reload", "`ringfetch status`"),
        ("backend set mmap", "`ringfetch backend`"),
        ("backend clear --dataset blocks", "`ringfetch backend`"),
        ("log-level info", "run it again"),
    ] {
        let error = failure(Some(silent), args, 1);
        assert!(
            error.contains("it may have been done") && error.contains(look) && !error.contains("reach"),
            "{args}: {error}"
        );
        let gone = "127.0.0.1:1".parse().unwrap();
        let error = failure(Some(gone), args, 1);
        assert!(error.contains("is ringfetchd there?"), "{args}: {error}");
    }
}
