//! `ringfetch backend` and `ringfetch reload`: what is asked for, what is told, and the exit codes.

use crate::server::{Flaw, start};
use crate::{failure, json, stdout};

#[test]
fn backends_are_shown_set_and_cleared() {
    // Scenario: which backend reads what; a switch of everything, of one dataset, back again; as text and as JSON.
    // Expectation: a line a dataset; what it is now, what it was, what the switch did not reach, and until when it holds.
    let server = start(Flaw::default());
    let table = stdout(server, "backend");
    for want in [
        "DATASET   BACKEND  ASKED FOR  BY",
        "(engine)  mmap     uring      -       seccomp forbids io_uring\n",
        "blocks    mmap     uring      engine",
    ] {
        assert!(table.contains(want), "{want:?} in:\n{table}");
    }
    let shown = json(server, "backend");
    assert_eq!(shown["engine"]["requested"], "uring");
    assert_eq!(
        (&shown["datasets"][2]["name"], &shown["datasets"][2]["own"]),
        (&"objects".into(), &false.into())
    );

    assert_eq!(
        stdout(server, "backend set auto"),
        "engine: auto (was: mmap); until the next reload\nas before, by a backend of their own: vectors\n"
    );
    assert_eq!(
        stdout(server, "backend set pread --dataset blocks"),
        "blocks: pread (was: mmap); until the next reload\n"
    );
    let told = json(server, "backend set mmap");
    assert_eq!(
        (&told["backend"], &told["dataset"]),
        (&"mmap".into(), &serde_json::Value::Null)
    );
    assert_eq!(
        stdout(server, "backend clear --dataset blocks"),
        "blocks: mmap, the engine's (was: pread); until the next reload\n"
    );
}

#[test]
fn a_switch_that_is_refused_is_a_failure() {
    // Scenario: a backend that cannot be had, a dataset that is not there, a word that is no backend, nothing to clear.
    // Expectation: exit code 1 with the daemon's words for the first two, 2 for wrong usage.
    let server = start(Flaw::default());
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
fn a_reload_tells_what_came_of_it() {
    // Scenario: a reload that changes some, one that is refused. Expectation: a line a change, what needs a restart last;
    // exit code 1 with what is wrong.
    let server = start(Flaw::default());
    assert_eq!(
        stdout(server, "reload"),
        "applied: limits.connections 4096 -> 100\ndataset added: new\ndataset removed: old\n\
         needs a restart: engine.cores 2 -> 4\n"
    );
    let told = json(server, "reload");
    assert_eq!(told["needs_restart"][0]["after"], "4");
    assert_eq!(told["datasets_unchanged"][1], "vectors");

    let flawed = start(Flaw {
        overloaded: true,
        ..Flaw::default()
    });
    let error = failure(Some(flawed), "reload", 1);
    assert!(error.contains("INVALID_ARGUMENT: engine.bakend"), "{error}");
}
