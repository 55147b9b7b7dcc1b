//! `ringfetch load` as people run it.

use crate::connections::listen;
use crate::flaw::Flaw;
use crate::server::start;
use crate::{assert_fields, failure, http, json, json_with, program, ringfetch, stdout, word};
use serde_json::{Value, json as value};
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

pub(crate) fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
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
            &value!({ "requests": 60, "reads": 600, "errors": 0, "wrong_bytes": 0 }),
        );
        if let Some(bytes) = bytes {
            assert_fields(&report, &value!({ "read_bytes": bytes }));
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
    // Read in the warm-up only.
    let warm_up = "load --verify --dataset blocks --pattern sequential --outstanding 1 --batch 1 --rate 40 \
                   --arrivals constant --warmup-seconds 0.5 --seconds 0.5";
    let report = json_with(start(Flaw::flipped(5)), warm_up, 1);
    assert_eq!(report["wrong_bytes"], 1);

    let report = json_with(
        start(Flaw::OVERLOADED),
        &format!("load {run} --dataset blocks"),
        1,
    );
    assert_eq!(report["latency_us"], Value::Null);
    assert_eq!(report["request_errors"]["RESOURCE_EXHAUSTED"], 60);
    // A window that is over before anything is read: the CPU's time is not that of the window.
    let report = json_with(
        server,
        "load --dataset blocks --seconds 1ns --warmup-seconds 0",
        1,
    );
    assert!(report["own_cpu"]["cores"].as_f64() < Some(1000.0), "{report}");
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
fn an_open_loop_holds_its_rate_and_writes_every_form_of_result() {
    // All arrivals accounted for, the rate held, latencies in JSON, .hgrm and CSV that agree; then a
    // ramp, and a number of requests, all of which are sent however late.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let run =
        "load --dataset blocks --batch 4 --outstanding 32 --connections 2 --threads 2 --warmup-seconds 0.1";
    for (arrivals, transport, low, high) in [
        ("constant", "grpc", 1500, 1500),
        ("poisson", "stream", 1350, 1650),
    ] {
        let outputs = format!(
            "--hgrm {} --csv {} --interval 0.25",
            word(file("x.hgrm")),
            word(file("x.csv"))
        );
        let how = format!("--rate 500 --seconds 3 --arrivals {arrivals} --transport {transport} --verify");
        let report = json(server, &format!("{run} {how} {outputs}"));
        let open = &report["open_loop"];
        let arrived = open["arrivals"].as_u64().unwrap();
        assert!((low..=high).contains(&arrived), "{report}");
        let sent = report["requests"].as_u64().unwrap();
        assert_eq!(sent + open["missed"].as_u64().unwrap(), arrived, "{report}");
        assert_fields(
            &report,
            &value!({ "loop_kind": "open", "errors": 0, "wrong_bytes": 0 }),
        );
        assert!(number(&open["lateness_us"]["max"]) > 0.0, "{report}");

        let hgrm = read(&file("x.hgrm"));
        assert!(hgrm.contains(&format!("Total count    = {sent:>12}]")), "{hgrm}");
        assert!(report["latency_histogram"].is_string(), "{report}");
        let csv = read(&file("x.csv"));
        let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(rows[0][0], "t");
        assert!(
            rows.len() >= 4 && rows.iter().all(|row| row.len() == rows[0].len()),
            "{csv}"
        );
        let times: Vec<f64> = rows[1..].iter().map(|row| row[0].parse().unwrap()).collect();
        assert!(times.is_sorted(), "{csv}");
    }
    let ramp = json(server, &format!("{run} --ramp 100:300 --seconds 1"));
    assert_eq!(ramp["open_loop"]["arrivals"], 200, "{ramp}");
    // Rates refer to the window, whose last quarter has no arrival.
    let slow = json(server, &format!("{run} --rate 4 --seconds 1"));
    let arrivals = &slow["open_loop"]["arrivals"];
    assert!(*arrivals == 4 && number(&slow["seconds"]) >= 1.0, "{slow}");
    // A number of requests arrives at its rate, whenever the last response comes.
    let counted = json(server, &format!("{run} --rate 1000 --requests 20"));
    let intended = number(&counted["open_loop"]["intended_per_second"]);
    assert!((intended - 1000.0).abs() < 1e-6, "{counted}");
    let text = stdout(server, &format!("{run} --rate 200 --requests 100"));
    for row in [
        "\nintended         200 requests/s, constant arrivals (100 in all)\n",
        "\nrate missed      0.0 requests/s (0 never sent)\n",
    ] {
        assert!(text.contains(row), "{text}");
    }
}

#[test]
fn http_reads_the_same_bytes_and_both_sides_count_the_same() {
    // Nothing listens at the address for gRPC. Exact counts and right bytes; then a batch of one to four, invalid connection
    // counts, an unreachable server, a dataset that does not exist, objects (whose names come in pages).
    let (server, http) = (SocketAddr::from(([127, 0, 0, 1], 1)), http::start());
    let run = format!(
        "load --transport http --http http://{http} --requests 50 --warmup-seconds 0.05 --outstanding 5 --verify"
    );
    for (what, reads, bytes) in [
        ("--dataset blocks --batch 1", 50, 50 * 512),
        ("--dataset blocks --batch 7", 350, 350 * 512),
        ("--dataset vectors --batch 1", 50, 50 * 48),
        ("--dataset vectors --batch 3", 150, 150 * 48),
        ("--dataset blocks --range-bytes 100 --batch 1", 50, 5000),
        ("--dataset blocks --range-bytes 100 --batch 2", 100, 10_000),
    ] {
        let report = json(server, &format!("{run} {what}"));
        let want =
            value!({ "reads": reads, "read_bytes": bytes, "errors": 0, "wrong_bytes": 0, "connections": 5 });
        assert_fields(&report, &want);
        let both = &report["reads_in_all"];
        assert!(both["client"].as_u64() >= Some(reads), "{what}: {report}");
        assert_eq!(both["client"], both["server"], "{what}: {report}");
    }
    let half = run.replace("--requests 50", "--seconds 0.5");
    let report = json(server, &format!("{half} --dataset blocks --batch 1"));
    assert_eq!(report["server"]["device_reads_per_read"], 2.0, "{report}");
    let mixed = json(server, &format!("{run} --dataset blocks --batch 1..4"));
    let reads = mixed["reads"].as_u64().unwrap();
    assert!((51..=199).contains(&reads), "{mixed}");
    let connections = failure(
        Some(server),
        &format!("{run} --dataset blocks --connections 2"),
        2,
    );
    assert!(connections.contains("--connections"), "{connections}");
    let grpc_port = "load --dataset blocks --requests 1 --warmup-seconds 0 --http http://127.0.0.1:1";
    assert!(failure(Some(start(Flaw::NONE)), grpc_port, 1).contains("--http"));
    let missing = failure(Some(server), &format!("{run} --dataset nowhere"), 1);
    assert!(missing.contains("/v1/datasets/nowhere: 404"), "{missing}");
    let report = json_with(server, &format!("{run} --dataset objects --batch 1"), 1);
    assert_fields(&report["request_errors"], &value!({ "HTTP_404": 50 }));
    assert_eq!(report["what"], "150 whole objects");
    let endless = failure(Some(server), &format!("{run} --dataset {}", http::ENDLESS), 1);
    assert!(endless.contains("names itself as the next one"), "{endless}");
}

#[test]
fn the_window_begins_after_the_counters_were_read() {
    // Scenario: a page of metrics that comes once another load, of twice the window, has ended; a window of 0.3 s, or as long as a
    // busy machine needs to send anything. Expected: the arrivals of the window are sent.
    let server = start(Flaw::NONE);
    let sends = |tenths: u32| {
        let window = Duration::from_millis(100) * tenths;
        let run = "--json load --dataset blocks --batch 1 --rate 100 --warmup-seconds 0";
        let run = move |window: Duration| format!("{run} --seconds {}", window.as_secs_f64());
        let http = http::start_with_held_metrics(move || drop(ringfetch(Some(server), &run(2 * window))));
        let args = format!("{} --http http://{http}", run(window));
        let output = ringfetch(Some(server), &args);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["open_loop"]["arrivals"], 10 * tenths, "{report}");
        report["requests"].as_u64() > Some(0)
    };
    assert!([3, 6, 12, 24].into_iter().any(sends), "no request in any window");
}

#[test]
fn a_load_needs_no_right_to_the_metrics() {
    // Scenario: a principal that may read the data, and not /metrics; over HTTP, and over gRPC with --http.
    // Expected: the client's figures, and why the server's are unknown; a condition on them is not met.
    let (server, http) = (start(Flaw::NONE), http::start_without_metrics());
    let run = format!("load --dataset blocks --requests 50 --warmup-seconds 0 --http http://{http}");
    for transport in ["http", "grpc"] {
        let report = json(server, &format!("{run} --transport {transport}"));
        let want =
            value!({ "requests": 50, "errors": 0, "server": null, "server_cpu": null, "reads_in_all": null });
        assert_fields(&report, &want);
        let why = report["server_unknown"].as_str().unwrap();
        assert!(why.contains("403 Forbidden: no right to it"), "{why}");
    }
    failure(
        Some(server),
        &format!("{run} --require server_cpu_us_per_read<100"),
        3,
    );
}

#[test]
fn a_thread_that_cannot_start_ends_the_run() {
    // Scenario: fewer descriptors than the threads of a load need, of several numbers, since which of them
    // fails to get one is chance. Expected: exit code 1, and what to raise; it does not wait for the thread.
    let server = start(Flaw::NONE);
    let load = "load --dataset blocks --threads 64 --connections 64 --outstanding 64 --requests 64";
    for limit in (28..=60).step_by(4) {
        let limited = format!(
            "ulimit -n {limit}; exec timeout 120 {} {load}",
            word(env!("CARGO_BIN_EXE_ringfetch"))
        );
        let mut command = program("sh");
        command
            .args(["-c", &limited])
            .env("RINGFETCH_GRPC", format!("http://{server}"));
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{limit}: {error}");
        assert!(
            error.contains("Too many open files") && error.contains("ulimit -n"),
            "{limit}: {error}"
        );
    }
}

#[test]
fn patterns_mixes_and_traces_are_read_as_asked() {
    let server = start(Flaw::NONE);
    let run = "load --requests 60 --warmup-seconds 0 --outstanding 6 --verify";
    for pattern in "uniform sequential zipfian zipfian:0.5 hotspot:0.1:0.9".split(' ') {
        let report = json(
            server,
            &format!("{run} --dataset blocks --batch 10 --pattern {pattern}"),
        );
        assert_fields(&report, &value!({ "reads": 600, "wrong_bytes": 0 }));
    }
    let report = json(server, &format!("{run} --mix blocks=3,vectors=1 --batch 1..8"));
    let parts = report["mix"].as_array().unwrap();
    let sum = |field: &str| {
        parts
            .iter()
            .map(|part| part[field].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(sum("requests"), 60, "{report}");
    assert_eq!(Some(sum("reads")), report["reads"].as_u64(), "{report}");
    assert!(
        parts[0]["requests"].as_u64() > parts[1]["requests"].as_u64(),
        "{report}"
    );
    assert_eq!(report["dataset"], "blocks=0.750,vectors=0.250");

    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let traced = |text: &str| {
        std::fs::write(&trace, text).unwrap();
        format!("{run} --dataset blocks --batch 3 --trace {}", word(&trace))
    };
    let report = json(server, &traced("# blocks\n0\n999\n\n7\n"));
    assert_fields(&report, &value!({ "reads": 180, "read_bytes": 180 * 512 }));
    let report = json(server, &traced("0 100\n5 1\n300 200\n"));
    assert_eq!(report["read_bytes"], 60 * 301, "{report}");
    assert!(failure(Some(server), &traced("0\n1000\n"), 2).contains("line 2: "));
    let missing = format!("{run} --dataset blocks --trace {}/no", word(&trace));
    assert!(failure(Some(server), &missing, 2).contains("--trace"));
}

#[test]
fn conditions_set_the_exit_code() {
    // Conditions that hold, one that does not, a search whose objective never holds, and invalid conditions.
    let server = start(Flaw::NONE);
    let run = "load --dataset blocks --batch 2 --requests 50 --warmup-seconds 0 --outstanding 4";
    stdout(server, &format!("{run} --require errors<1 --require p99<10s"));
    let error = failure(
        Some(server),
        &format!("{run} --require errors<1 --require p50<=1us"),
        3,
    );
    assert!(error.contains("p50<=1us: it is "), "{error}");
    // Failed reads fail the run, unless a condition allows them. Figures that a run cannot have are refused first.
    let failing = "load --dataset blocks --requests 1000 --warmup-seconds 0 --connections 2";
    let error = failure(Some(cut_once(server)), failing, 1);
    assert!(
        error.contains(" requests and 0 items failed, the first: "),
        "{error}"
    );
    stdout(cut_once(server), &format!("{failing} --require errors<90%"));
    for (condition, flags) in [
        ("missed<1%", "--rate"),
        ("late<1", "--rate"),
        ("server_cpu_us_per_read<5", "--http"),
        ("wrong_bytes<=0", "--verify"),
    ] {
        let error = failure(None, &format!("{run} --require {condition}"), 2);
        assert!(error.contains(flags), "{error}");
    }
    // A file that cannot be written costs no run, and a run without a result costs no file.
    let old = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&old, "old").unwrap();
    let gone = "127.0.0.1:1".parse().unwrap();
    for flag in ["--hgrm", "--csv"] {
        for path in ["/nonexistent/file", "/"] {
            let error = failure(None, &format!("{run} {flag} {path}"), 1);
            assert!(error.contains(&format!("{flag} {path}: ")), "{error}");
        }
        let error = failure(Some(gone), &format!("{run} {flag} {}", word(&old)), 1);
        assert!(error.contains("is ringfetchd there?"), "{error}");
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "old", "{flag}");
        stdout(server, &format!("{run} {flag} {}", word(&old)));
        let new = std::fs::read_to_string(&old).unwrap();
        assert!(
            !new.starts_with("old") && new.lines().count() > 0,
            "{flag}: {new}"
        );
        std::fs::write(&old, "old").unwrap();
    }
    let open = "load --dataset blocks --batch 1 --seconds 0.3 --warmup-seconds 0";
    let report = json_with(
        server,
        &format!("{open} --rate 64 --step-to-knee --objective max=1us"),
        3,
    );
    assert_fields(&report["knee"], &value!({ "rate": null }));
    // Merging a result without a knee demands nothing of it.
    let result = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&result, report.to_string()).unwrap();
    stdout(server, &format!("load-merge {}", word(&result)));
    let steps = report["knee"]["steps"].as_array().unwrap();
    assert!(
        steps.len() > 3 && steps.iter().all(|step| step["broken"].is_string()),
        "{report}"
    );
    for wrong in [
        "--require p99=5",
        "--rate 0",
        "--step-to-knee",
        "--arrivals poisson",
        "--mix blocks=1",
    ] {
        let output = ringfetch(None, &format!("{run} {wrong}"));
        assert_eq!(output.status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn a_series_that_nobody_reads_any_more_is_an_error() {
    // Scenario: --csv names a pipe whose reader leaves, long before the run is to end. Expected: the run ends with what was
    // measured until then, and exit code 1, which names the flag; it is not the end of stdout, which would be fine.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("series");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || drop(std::fs::File::open(pipe).unwrap())
    });
    let run = "load --dataset blocks --batch 1 --seconds 1h --warmup-seconds 0 --interval 0.5";
    let output = ringfetch(Some(server), &format!("--json {run} --csv {}", word(&pipe)));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("--csv ") && error.contains("Broken pipe"),
        "{error}"
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["reads"].as_u64().unwrap() > 0, "{report}");
    reader.join().unwrap();
}

#[test]
fn a_search_that_is_cut_short_says_so_and_keeps_its_steps() {
    // Scenario: the daemon is gone after the first step, of 2 requests of 32 KiB, and before the third. Half a second is
    // left after the last request of a step, so that a slow machine sends it, too.
    // Expected: the second did not hold, the third ends the search; all three are reported, and the search
    // fails.
    let server = cut_all(start(Flaw::NONE), 100_000);
    let run = "load --dataset blocks --batch 64 --seconds 1 --warmup-seconds 0";
    let report = json_with(
        server,
        &format!("{run} --rate 2 --step-to-knee --objective p99=10s"),
        1,
    );
    assert_fields(&report["knee"], &value!({ "rate": 2.0 }));
    let ended = report["knee"]["ended"].as_str().unwrap();
    assert!(ended.starts_with("no request was answered"), "{report}");
    let steps = report["knee"]["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 3, "{report}");
    let broken = |step: usize| steps[step]["broken"].as_str().unwrap_or("held");
    assert_eq!(broken(0), "held", "{report}");
    assert!(broken(1).ends_with(" errors"), "{report}");
    assert_eq!(broken(2), ended, "{report}");
}

/// Forwards connections to a server, and cuts the second one after 300 kB of responses.
fn cut_once(server: SocketAddr) -> SocketAddr {
    end_once(server, |_, client, server| {
        // The other direction may be closed already.
        let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
    })
}

/// Forwards connections to a server, numbered from 0: of number 1 only 300 kB of responses. What `end` does
/// with a connection then ends it.
pub(crate) fn end_once(
    server: SocketAddr,
    end: impl Fn(usize, TcpStream, TcpStream) + Clone + Send + 'static,
) -> SocketAddr {
    listen(move |number, client| {
        let server = TcpStream::connect(server).unwrap();
        let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let end = end.clone();
        std::thread::spawn(move || std::io::copy(&mut from_client, &mut to_server));
        std::thread::spawn(move || {
            let limit = if number == 1 { 300_000 } else { u64::MAX };
            let _ = std::io::copy(&mut (&server).take(limit), &mut &client);
            end(number, client, server);
        });
    })
}

/// Forwards connections to a server until this many bytes of responses have passed, and then closes them all.
fn cut_all(server: SocketAddr, bytes: u64) -> SocketAddr {
    let left = Arc::new(AtomicU64::new(bytes));
    listen(move |_, client| {
        let (server, left) = (TcpStream::connect(server).unwrap(), Arc::clone(&left));
        let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from_client, &mut to_server));
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(length @ 1..) = (&server).read(&mut part) {
                let taken = u64::try_from(length).unwrap();
                let enough = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    left.checked_sub(taken)
                });
                if enough.is_err() || (&client).write_all(&part[..length]).is_err() {
                    left.store(0, Ordering::Relaxed);
                    break;
                }
            }
            let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
        });
    })
}

#[test]
fn streams_are_ended_before_the_command_is() {
    // Scenario: 250 streams. Expected: the server sees all of them end, rather than their connections close, which a daemon
    // counts as CANCELLED.
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    let server = start(Flaw::counting_streams(&ENDED));
    let run = "--requests 100 --warmup-seconds 0 --connections 250 --outstanding 250";
    json(server, &format!("load --dataset blocks --transport stream {run}"));
    assert_eq!(ENDED.load(Ordering::Relaxed), 250);
}

#[test]
fn a_connection_that_breaks_costs_its_requests_and_not_the_run() {
    // One of two connections is cut in the middle of a response: requests in flight on it fail, the rest is
    // read over a new one.
    let server = start(Flaw::NONE);
    for transport in ["grpc", "stream"] {
        // Connection 0 looks up the dataset.
        let proxy = cut_once(server);
        let run = "load --dataset blocks --requests 1000 --warmup-seconds 0 --outstanding 4 --connections 2 --verify";
        let report = json(
            proxy,
            &format!("{run} --transport {transport} --require errors<=4"),
        );
        let failed = report["request_errors"]["TRANSPORT"].as_u64().unwrap();
        assert!((1..=4).contains(&failed), "{report}");
        let want = value!({ "errors": failed, "wrong_bytes": 0, "requests": 1000 - failed });
        assert_fields(&report, &want);
    }
}
