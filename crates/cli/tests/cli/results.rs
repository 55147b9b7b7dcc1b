//! The files that `load` writes.

use crate::flaw::Flaw;
use crate::server::start;
use crate::{command, stdout, word};

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
