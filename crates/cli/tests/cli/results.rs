//! The files that `load` writes, and `load-merge` reads.

use crate::flaw::Flaw;
use crate::load::number;
use crate::server::start;
use crate::{assert_fields, command, failure, json, stdout, word};
use serde_json::{Value, json as value};

#[test]
fn the_intended_rates_of_all_lines_add_up_to_all_arrivals() {
    // Scenario: 100 arrivals, in 1 s at a constant rate, and on a ramp from 0; in several lines, and in one. Expected:
    // each line has a rate, and rates times intervals add up to 100.
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("series.csv");
    for (rate, interval) in [
        ("--rate 100", "0.3"),
        ("--ramp 0:200", "0.3"),
        ("--rate 100", "5"),
    ] {
        let load = "load --dataset blocks --batch 1 --seconds 1 --warmup-seconds 0.2";
        let args = format!("{load} {rate} --interval {interval} --csv {}", word(&path));
        stdout(server, &args);
        let text = std::fs::read_to_string(&path).unwrap();
        let (mut sum, mut before) = (0.0, 0.0);
        for line in text.lines().skip(1) {
            let [at, intended] = [0, 1].map(|cell| line.split(',').nth(cell).unwrap().parse::<f64>());
            let at = at.unwrap();
            sum += intended.unwrap() * (at - before);
            before = at;
        }
        // The run ends with its last response, which is that of 99 of them or later; times have three digits, rates one.
        assert!((98.0..=101.0).contains(&sum), "{rate}: {sum}\n{text}");
    }
}

#[test]
fn a_full_disk_below_stdout_costs_only_the_report() {
    // Scenario: the distribution goes to a file, and the report to a device that is full. Expected: exit code 1, and the
    // distribution.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("latency.hgrm");
    let args = "load --dataset blocks --batch 1 --requests 10 --warmup-seconds 0";
    let mut run = command(Some(start(Flaw::NONE)), &format!("{args} --hgrm {}", word(&path)));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = run.stdout(full).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("ringfetch: stdout: No space left"), "{error}");
    assert!(std::fs::read_to_string(&path).unwrap().contains("#[Mean"));
}

#[test]
fn no_file_is_written_that_is_also_read_or_written_otherwise() {
    // Scenario: two names of one file, one of them through a link to its directory or to itself, for both results, for a
    // trace and a result, and for results to merge and one of them. Expected: exit code 2, both options, and what was there.
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("file"), "1\n2\n").unwrap();
    std::os::unix::fs::symlink("file", at("link")).unwrap();
    std::os::unix::fs::symlink(".", at("here")).unwrap();
    let load = "load --dataset blocks --requests 1 --warmup-seconds 0";
    for (run, first, second) in [
        (load, "--csv", "--hgrm"),
        (load, "--trace", "--csv"),
        (load, "--trace", "--hgrm"),
        ("load-merge", "", "--hgrm"),
    ] {
        for [one, other] in
            [["file", "link"], ["link", "here/file"], ["here/file", "file"]].map(|names| names.map(at))
        {
            let args = format!("{run} {first} {} {second} {}", word(&one), word(&other));
            let one = one.display().to_string();
            let first = if first.is_empty() { &one } else { first };
            let problem = format!("{first} and {second} name the same file");
            let error = failure(None, &args, 2);
            assert!(error.contains(&problem), "{args}: {error}");
        }
    }
    let new = format!("{load} --csv {} --hgrm {}", word(at("new")), word(at("here/new")));
    assert!(failure(None, &new, 2).contains("--csv and --hgrm name the same file"));
    assert_eq!(std::fs::read_to_string(at("file")).unwrap(), "1\n2\n");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 3);
}

#[test]
fn results_of_several_instances_merge() {
    let server = start(Flaw::NONE);
    let directory = tempfile::tempdir().unwrap();
    let mut results = Vec::new();
    for requests in [30, 70] {
        let path = directory.path().join(format!("{requests}.json"));
        let run = format!("--json load --dataset blocks --batch 2 --requests {requests} --warmup-seconds 0");
        std::fs::write(&path, stdout(server, &run)).unwrap();
        results.push(path);
    }
    let names = format!("{} {}", word(&results[0]), word(&results[1]));
    let merged = json(server, &format!("load-merge {names} --require errors<1"));
    assert_fields(
        &merged,
        &value!({ "requests": 100, "reads": 200, "instances": 2 }),
    );
    let parts = [0, 1].map(|part: usize| {
        serde_json::from_str::<Value>(&std::fs::read_to_string(&results[part]).unwrap()).unwrap()
    });
    let us = |report: &Value, name: &str| number(&report["latency_us"][name]);
    let of = |name: &str| [us(&parts[0], name), us(&parts[1], name)];
    let ([min, other_min], [max, other_max]) = (of("min"), of("max"));
    assert!((us(&merged, "min") - min.min(other_min)).abs() < 0.01, "{merged}");
    assert!((us(&merged, "max") - max.max(other_max)).abs() < 0.01, "{merged}");
    let text = stdout(server, &format!("load-merge {names}"));
    assert!(text.starts_with("merged           2 results"), "{text}");
    let copy = directory.path().join("copy.json");
    std::fs::copy(&results[0], &copy).unwrap();
    let first = results[0].display();
    for twice in [&results[0], &copy].map(|path| format!("{names} {}", word(path))) {
        let error = failure(None, &format!("load-merge {twice}"), 2);
        assert!(
            error.contains(&format!("is the same result as {first}")),
            "{error}"
        );
    }
    // Bytes that nobody compared are not right: a condition on them holds only if every result was verified.
    let verified = directory.path().join("verified.json");
    let run = "--json load --dataset blocks --batch 2 --requests 30 --warmup-seconds 0 --verify --seed 42";
    std::fs::write(&verified, stdout(server, run)).unwrap();
    let verified = word(&verified);
    stdout(server, &format!("load-merge {verified} --require wrong_bytes<1"));
    for some in [names.clone(), format!("{verified} {names}")] {
        let error = failure(None, &format!("load-merge {some} --require wrong_bytes<1"), 3);
        assert!(
            error.contains("wrong_bytes<1: this run has no such figure"),
            "{error}"
        );
    }
    // Sums that no counter holds, of one result and of two; a negative number; a seed may be any number.
    let other = &results[1];
    let with = |pointer: &str, number: Value| {
        let mut report = parts[0].clone();
        *report.pointer_mut(pointer).unwrap() = number;
        std::fs::write(&results[0], report.to_string()).unwrap();
        format!("load-merge {} {}", word(&results[0]), word(other))
    };
    for (pointer, field, number) in [
        ("/reads", "reads", value!(u64::MAX)),
        ("/request_errors", "request_errors.A", value!({ "A": u64::MAX })),
        ("/own_cpu/seconds", "own_cpu.seconds", value!(-1.5)),
        ("/latency_us/mean", "latency_us.mean", value!(1e300)),
        ("/requests", "latency_histogram", value!(31)),
    ] {
        let error = failure(None, &with(pointer, number), 1);
        assert!(error.contains(&format!("30.json: {field}")), "{error}");
    }
    json(server, &with("/choice_seed", value!(u64::MAX)));
    let many = json(server, &with("/instances", value!(u32::MAX)));
    assert_eq!(many["instances"], 1 + u64::from(u32::MAX));
    let half = with("/read_bytes", value!(1u64 << 59));
    std::fs::copy(&results[0], &copy).unwrap();
    with("/read_bytes", value!((1u64 << 59) + 4096));
    let error = failure(None, &format!("{half} {}", word(&copy)), 1);
    assert!(error.contains("copy.json: "), "{error}");
    std::fs::write(&results[0], "{}").unwrap();
    assert!(
        failure(None, &format!("load-merge {names}"), 1)
            .contains("30.json: is not a result of `ringfetch load --json`: missing field")
    );
}
