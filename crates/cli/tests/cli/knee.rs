//! `load --step-to-knee`.

use crate::connections::listen;
use crate::flaw::Flaw;
use crate::load::number;
use crate::server::start;
use crate::{command, json, json_with};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;
use std::sync::mpsc;

#[test]
fn a_knee_is_found_where_the_slots_end() {
    // From 2/s on with a generous latency: it breaks because one slot cannot send all arrivals.
    let server = start(Flaw::NONE);
    let run = "load --dataset blocks --batch 512 --outstanding 1 --seconds 0.5 --warmup-seconds 0";
    let report = json(
        server,
        &format!("{run} --rate 2 --step-to-knee --objective p99=1s"),
    );
    let knee = number(&report["knee"]["rate"]);
    assert!(knee >= 2.0, "{report}");
    for step in report["knee"]["steps"].as_array().unwrap() {
        assert_eq!(
            step["broken"].is_null(),
            number(&step["rate"]) <= knee,
            "{report}"
        );
    }
    // The report is that of the knee's step.
    assert!(
        (number(&report["open_loop"]["rate_from"]) - knee).abs() < 1e-9,
        "{report}"
    );
}

#[test]
fn a_signal_between_two_steps_ends_the_search() {
    // Scenario: SIGTERM while the counters are read after the first step: before it, at its begin and at its end they are
    // read once each. Expected: no step is measured in full after that, and the first one is reported.
    let server = start(Flaw::NONE);
    let (reached, at_end) = mpsc::channel();
    let (resume, resumed) = mpsc::channel::<()>();
    let http = listen(move |read, mut connection| {
        let mut head = BufReader::new(&connection).lines();
        while !head.next().unwrap().unwrap().is_empty() {}
        if read == 2 {
            reached.send(()).unwrap();
            resumed.recv().unwrap();
        }
        let page = "ringfetch_build_info{version=\"0\"} 1\n";
        let length = page.len();
        // Nobody waits for what was asked for before the signal.
        let _ = write!(
            connection,
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{page}"
        );
    });
    let run = "--json load --dataset blocks --batch 1 --seconds 1 --warmup-seconds 0 --rate 2 --step-to-knee";
    let mut run = command(
        Some(server),
        &format!("{run} --objective p99=10s --http http://{http}"),
    );
    let run = run.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    at_end.recv().unwrap();
    rustix::process::kill_process(Pid::from_child(&run), Signal::TERM).unwrap();
    resume.send(()).unwrap();
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["knee"]["ended"], "it was stopped", "{report}");
    assert_eq!(number(&report["knee"]["rate"]), 2.0, "{report}");
}

#[test]
fn a_step_in_which_no_request_was_due_ends_a_search_downwards() {
    // Scenario: Poisson arrivals at rates that never hold the objective, down to less than one in the window. Expected: no
    // rate held, exit code 3, and the report of the last step with a request.
    let server = start(Flaw::NONE);
    let run = "load --dataset blocks --batch 1 --seconds 0.3 --warmup-seconds 0 --arrivals poisson";
    let report = json_with(
        server,
        &format!("{run} --rate 16 --step-to-knee --objective max=1us"),
        3,
    );
    let knee = &report["knee"];
    assert!(knee["rate"].is_null() && knee["ended"].is_null(), "{report}");
    assert!(report["requests"].as_u64() > Some(0), "{report}");
    let last = knee["steps"].as_array().unwrap().last().unwrap();
    assert_eq!(last["broken"], "no request was due in the window", "{report}");
}

#[test]
fn wrong_bytes_in_any_step_end_the_search() {
    // Scenario: only the first step reads the block with a wrong byte; no rate holds the objective. Expected: that step's
    // report, and exit code 1.
    let server = start(Flaw::flipped(5));
    let run =
        "load --dataset blocks --batch 1 --seconds 0.3 --warmup-seconds 0 --verify --pattern sequential";
    let report = json_with(
        server,
        &format!("{run} --rate 16 --step-to-knee --objective max=1us"),
        1,
    );
    assert_eq!(report["wrong_bytes"], 1, "{report}");
    assert_eq!(report["knee"]["ended"], "1 wrong bytes", "{report}");
}
