//! `ringfetch calibrate` as people run it, on a small file and for as short as possible: checks that every
//! step is made and every answer has its form, but never what is fast.

use crate::seccomp::{EPERM, without_io_uring};
use crate::{ended_by, failure, program, ringfetch, started, word};
use ringfetch_engine::probe;
use ringfetch_host::cpus;
use ringfetch_pattern as pattern;
use ringfetch_server::config::{self, Base, Inputs};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

/// A directory on the disk of the build, with a file of 24 MiB.
fn place() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("data.bin");
    let mut bytes = vec![0; 24 << 20];
    pattern::fill(7, 0, &mut bytes);
    fs::write(&file, bytes).unwrap();
    (directory, file)
}

/// Checks with the daemon itself a configuration made of this section and a dataset. Returns its backend.
fn accepted(directory: &Path, section: &str, data: &Path) -> String {
    let file = directory.join("ringfetchd.yaml");
    let dataset = format!(
        "datasets:\n  - name: data\n    kind: blocks\n    path: {}\n    block_bytes: 4KiB\n",
        data.display()
    );
    fs::write(&file, format!("{section}{dataset}")).unwrap();
    let inputs = Inputs {
        base: Base::File(file.clone()),
        environment: Vec::new(),
        flags: Vec::new(),
    };
    let loaded = config::load(&inputs).unwrap_or_else(|problems| panic!("{problems}\n{section}"));
    // A build of the whole workspace has the daemon next to the command line.
    let daemon = Path::new(env!("CARGO_BIN_EXE_ringfetch")).with_file_name("ringfetchd");
    if daemon.exists() {
        let mut check = program(daemon);
        let checked = check
            .arg("--config")
            .arg(&file)
            .args(["check-config", "--open"])
            .output()
            .unwrap();
        assert!(checked.status.success(), "{checked:?}\n{section}");
    }
    loaded.config.engine.backend.as_str().to_owned()
}

fn good(output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && error.is_empty(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The values of a column in all rows.
fn values<'a>(report: &'a Value, name: &str) -> BTreeSet<&'a str> {
    let rows = report["rows"].as_array().unwrap().iter();
    let pairs = rows.flat_map(|row| row["key"].as_array().unwrap());
    let of = pairs.filter(|pair| pair[0] == name);
    of.map(|pair| pair[1].as_str().unwrap()).collect()
}

#[test]
fn every_step_is_made_and_every_answer_has_its_form() {
    // Scenario: 3 s on a small file, as JSON with a file for the YAML and a directory for the report; then as text.
    // Expected: every stage that this host allows, every depth, valid figures; YAML that the daemon accepts, on its own and
    // with the tables above it; a plot with the knee; a second run replaces nothing without --force.
    let (directory, data) = place();
    let at = |name: &str| directory.path().join(name);
    let (yaml, out) = (at("engine.yaml"), at("a report"));
    let run = format!("calibrate {} --seconds 3 --out {}", word(&data), word(&yaml));
    // Forced: this may be a debug build.
    let forced = format!("--json {run} --force --report {}", word(&out));
    let report: Value = serde_json::from_str(&good(ringfetch(None, &forced))).unwrap();

    let has_ring = probe::probe().is_ok();
    let left_out = report["left_out"].to_string();
    assert_eq!(left_out.contains("uring and auto"), !has_ring, "{report}");
    let mut expected = BTreeSet::from(["depth", "mmap threads", "settings", "cold"]);
    if has_ring && cpus::usable_cpus().len() > 1 {
        expected.insert("rings");
    }
    let found = values(&report, "stage");
    assert!(found.is_superset(&expected), "{found:?} {expected:?}");
    let settings = values(&report, "setting");
    for depth in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] {
        assert!(settings.contains(depth.to_string().as_str()), "{settings:?}");
    }
    assert!(!has_ring || settings.contains("eager flush 0"), "{settings:?}");
    for row in report["rows"].as_array().unwrap() {
        let measures: Vec<(String, Value)> = serde_json::from_value(row["measures"].clone()).unwrap();
        let measures: BTreeMap<String, Value> = measures.into_iter().collect();
        for figure in [
            "reads_per_second",
            "cpu_us_per_read",
            "p50_us",
            "p99_us",
            "step_seconds",
        ] {
            assert_eq!(measures[figure]["count"], 5, "{figure}: {row}");
            assert!(
                measures[figure]["median"].as_f64().unwrap() > 0.0,
                "{figure}: {row}"
            );
        }
        let is_warm = row["key"].to_string().contains("[\"heat\",\"warm\"]");
        assert_eq!(
            is_warm,
            row["key"].to_string().contains("[\"stage\",\"warm\"]"),
            "{row}"
        );
    }
    let facts: BTreeMap<String, String> =
        serde_json::from_value::<Vec<(String, String)>>(report["facts"].clone())
            .unwrap()
            .into_iter()
            .collect();
    assert_eq!(facts["data"], "24.0 MiB");
    let quoted = format!(" --report {}", word(&out));
    assert!(facts["command line"].ends_with(&quoted), "{facts:?}");

    let written = fs::read_to_string(&yaml).unwrap();
    assert_eq!(report["yaml"], written.as_str());
    let advised = report["advice"].as_array().unwrap();
    assert!(
        advised.len() >= 8 && advised.iter().all(|line| line["why"] != ""),
        "{report}"
    );
    assert_eq!(accepted(directory.path(), &written, &data), advised[0]["value"]);
    let picture = fs::read_to_string(out.join("plot-depth-p99.svg")).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("knee: ") && picture.contains("latency p99"));
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("Recommended settings") && page.contains("When io_uring beats mmap"));

    assert!(failure(None, &run, 1).contains("--out: "));
    assert_eq!(fs::read_to_string(&yaml).unwrap(), written);

    let text = format!("calibrate {} --seconds 3 --force", word(&data));
    let text = good(ringfetch(None, &text));
    for part in [
        "# stage ",
        "# When io_uring beats",
        "\nengine:\n",
        "queue_depth: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    accepted(directory.path(), &text, &data);
    let left: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 4, "{left:?}");
}

#[test]
fn a_file_that_cannot_be_written_costs_no_figures() {
    // Scenario: --out, with no room for a byte in any file. Expected: exit code 1, the flag, the file and the cause, and the
    // report on stdout.
    let (directory, data) = place();
    let yaml = directory.path().join("engine.yaml");
    let run = format!(
        "trap '' XFSZ; ulimit -f 0; exec {} calibrate {} --seconds 3 --force --out {}",
        word(env!("CARGO_BIN_EXE_ringfetch")),
        word(&data),
        word(&yaml)
    );
    let output = program("sh").args(["-c", &run]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let expected = format!(
        "ringfetch: --out: cannot write {}: File too large",
        yaml.display()
    );
    assert!(error.starts_with(&expected), "{error}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("When io_uring beats"), "{text}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn without_io_uring_the_rest_is_calibrated() {
    // Scenario: io_uring_setup fails with EPERM, as under a container's seccomp profile; reads of 512 bytes. Expected:
    // exit code 0, the reason reported, only mmap and pread measured, YAML that the daemon accepts.
    let (directory, data) = place();
    let mut command = program(env!("CARGO_BIN_EXE_ringfetch"));
    command
        .args(["--json", "calibrate", "--seconds", "3", "--force"])
        .args(["--block-bytes", "512"])
        .arg(&data);
    let output = without_io_uring(EPERM, || command.output()).unwrap();
    let report: Value = serde_json::from_str(&good(output)).unwrap();
    assert!(
        report["left_out"].to_string().contains("uring and auto"),
        "{report}"
    );
    assert_eq!(values(&report, "backend"), BTreeSet::from(["mmap", "pread"]));
    let found = values(&report, "stage");
    let expected = BTreeSet::from(["depth", "mmap threads", "settings", "cold"]);
    assert!(found.is_superset(&expected), "{found:?}");
    let yaml = report["yaml"].as_str().unwrap();
    assert!(yaml.contains("there is no io_uring here"), "{yaml}");
    assert!(
        yaml.contains("random reads of 512 bytes, medians of 5;"),
        "{yaml}"
    );
    let backend = accepted(directory.path(), yaml, &data);
    assert!(["mmap", "pread"].contains(&backend.as_str()), "{backend}");
}

/// The thread id of the first core of an engine in this process, if there is one now.
fn core_thread(pid: u32) -> Option<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    tasks.filter_map(Result::ok).find_map(|task| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        (name.trim() == "rf-core-0").then(|| task.file_name().to_string_lossy().into_owned())
    })
}

/// A calibration of ten minutes, interrupted once its second step has begun, by signals that all arrive at once.
fn interrupted(directory: &Path, data: &Path, more: &[&str], signals: &[Signal]) -> Output {
    let yaml = directory.join("cal.yaml");
    let mut command = program(env!("CARGO_BIN_EXE_ringfetch"));
    command
        .args(["--json", "calibrate", "--seconds", "600", "--force", "--out"])
        .args([&yaml, data])
        .args(more)
        .env("TMPDIR", directory);
    let child = started(&mut command);
    let deadline = Instant::now() + Duration::from_secs(120);
    // One engine is started to probe, and one for each step; a new one may reuse the core of the last.
    let mut engines = BTreeSet::new();
    while engines.len() < 4 {
        engines.extend(core_thread(child.id()));
        assert!(Instant::now() < deadline, "no second step: {engines:?}");
        std::thread::yield_now();
    }
    let output = ended_by(child, &[&[Signal::STOP], signals, &[Signal::CONT]].concat());
    assert!(Instant::now() < deadline);
    output
}

#[test]
fn ctrl_c_ends_it_with_what_was_measured() {
    // Scenario: SIGINT to a calibration without --report. Expected: it ends soon, with exit code 0, a note that
    // says so, and YAML that the daemon accepts.
    let (directory, data) = place();
    let output = good(interrupted(directory.path(), &data, &[], &[Signal::INT]));
    let report: Value = serde_json::from_str(&output).unwrap();
    let notes = report["notes"].to_string();
    assert!(
        notes.contains("STOPPED") && !notes.contains("--resume"),
        "{notes}"
    );
    let written = fs::read_to_string(directory.path().join("cal.yaml")).unwrap();
    assert_eq!(report["yaml"], written.as_str());
    assert!(written.contains("medians of at most 5;"), "{written}");
    accepted(directory.path(), &written, &data);
}

#[test]
fn a_second_signal_leaves_no_file() {
    // Scenario: SIGINT and SIGTERM at once: the second one ends the process while the steps still run. Expected: exit code
    // 1, and only the data where the results and temporary files would be.
    let (directory, data) = place();
    let output = interrupted(directory.path(), &data, &[], &[Signal::INT, Signal::TERM]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("ringfetch: stopped a second time"), "{error}");
    let left: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(left, [data]);
}

#[test]
fn ctrl_c_with_a_report_leaves_what_resume_continues() {
    // Scenario: the same with --out and a --report whose name has a space; then the same command with --resume, also interrupted.
    // Expected: exit code 1 and how to continue; the steps so far, and no results yet, so that the second run is
    // not refused because of them; it keeps the first one's steps.
    let (directory, data) = place();
    let out = directory.path().join("a report");
    let journal = || {
        fs::read_to_string(out.join("samples.jsonl"))
            .unwrap()
            .lines()
            .count()
    };
    let stopped = |more: &[&str]| {
        let output = interrupted(
            directory.path(),
            &data,
            &[&["--report", out.to_str().unwrap()], more].concat(),
            &[Signal::INT],
        );
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(output.stdout.is_empty(), "{output:?}");
        assert!(error.starts_with("ringfetch: stopped after "), "{error}");
        let remedy = format!("continue with --resume --report {}\n", word(&out));
        assert!(error.ends_with(&remedy), "{error}");
        assert!(!directory.path().join("cal.yaml").exists() && !out.join("report.json").exists());
    };
    stopped(&[]);
    let steps = journal();
    assert!((2..100).contains(&steps), "{steps}");
    stopped(&["--resume"]);
    assert!(journal() > steps);
}

#[test]
fn what_cannot_be_calibrated_is_refused_in_one_line() {
    // Scenario: no file, a directory, a character device, an empty and a small file, one in memory, an output that exists, is
    // the data or cannot be created, budgets and blocks out of bounds. Expected: exit code 1 (2 for the command line) and a
    // line that names the cause; no file left behind.
    let (directory, data) = place();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("empty"), "").unwrap();
    fs::write(at("tiny"), "1").unwrap();
    fs::write(at("small"), vec![1; 1 << 20]).unwrap();
    let memory = rustix::fs::memfd_create("ringfetch-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 32 << 20).unwrap();
    let in_memory = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let refused = |args: &str, word: &str| {
        let error = failure(None, &format!("calibrate {args}"), 1);
        assert!(error.contains(word), "{args}: {error}");
    };
    refused(&word(at("nothing")), "does not exist");
    refused(&word(&directory), "is a directory");
    refused("/dev/null", "a character device");
    refused(&word(at("empty")), "is empty");
    refused(&word(at("tiny")), "tiny has 1 B, too little to measure");
    refused(&word(at("small")), "at least 16.0 MiB");
    refused(&in_memory, "tmpfs");
    let data = word(&data);
    let directory_out = word(&directory);
    refused(&format!("{data} --out {}", word(at("small"))), "--force");
    refused(
        &format!("{data} --force --out {}", word(at("./data.bin"))),
        "the file that is measured",
    );
    fs::create_dir(at("done")).unwrap();
    fs::write(at("done/report.json"), "{}").unwrap();
    fs::create_dir(at("used--out")).unwrap();
    fs::write(at("used--out/report.csv"), "somebody's").unwrap();
    refused(&format!("{data} --out {directory_out}"), "not a regular file");
    refused(
        &format!("{data} --out {}", word(at("none/x.yaml"))),
        "cannot write",
    );
    for (args, word) in [
        (format!("{data} --seconds 2"), "at least 3"),
        (format!("{data} --block-bytes 100"), "512B"),
        (format!("{data} --quick --seconds 5"), "--quick"),
        (
            format!("{data} --force --report {}", word(at("done"))),
            "--report: ",
        ),
        (
            format!("{data} --report {}", word(at("used--out"))),
            "used--out is not empty",
        ),
        (String::new(), "<PATH>"),
    ] {
        let output = ringfetch(None, &format!("calibrate {args}"));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(2) && error.contains(word),
            "{args}: {error}"
        );
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 6);
    assert_eq!(fs::read_dir(at("used--out")).unwrap().count(), 1);
}
