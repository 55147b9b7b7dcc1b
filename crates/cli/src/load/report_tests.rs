//! Tests of the report: what merging keeps and what it adds up.

use super::super::histogram::tests::ramp;
use super::super::require::Requirement;
use super::*;

/// A closed loop's report of these latencies, a request each of one read.
pub(crate) fn report(latency: &Durations) -> Report {
    let cpu = Cpu::new(0.5, 0.5, latency.count());
    Report {
        instances: 1,
        dataset: "blocks".into(),
        what: "blocks of 8 bytes".into(),
        pattern: "uniform".into(),
        loop_kind: "closed".into(),
        transport: "grpc".into(),
        connections: 1,
        threads: 1,
        batch: 1,
        batch_min: 1,
        choice_seed: 1,
        warmup_seconds: 0.0,
        seconds: 1.0,
        requests: latency.count(),
        requests_per_second: approximate(latency.count()),
        reads: latency.count(),
        reads_per_second: approximate(latency.count()),
        read_bytes: latency.count() * 8,
        megabytes_per_second: approximate(latency.count()) * 8e-6,
        outstanding: 1,
        outstanding_achieved: 1.0,
        latency_us: LatencyMicros::of(latency),
        latency_histogram: latency.encode(),
        open_loop: None,
        errors: 0,
        request_errors: BTreeMap::new(),
        item_errors: BTreeMap::new(),
        first_error: None,
        verified: false,
        wrong_bytes: 0,
        first_wrong: None,
        mix: Vec::new(),
        own_cpu: cpu.clone(),
        server_cpu: Some(cpu),
        cpu_us_per_read: None,
        server_cpu_us_per_read: None,
        server: None,
        reads_in_all: None,
        knee: None,
        latency: latency.clone(),
    }
}

fn through_json(report: &Report) -> Report {
    Report::read(&serde_json::to_string(report).unwrap()).unwrap()
}

#[test]
fn two_results_merge_into_what_one_would_have_measured() {
    // Scenario: latencies of 1 to 1000 us in one result, and split over two that went through JSON and are merged.
    // Expected: the same counts, rates and latencies; the clients' CPU added up, the one server's not.
    use crate::load::histogram::tests::ramp;
    let whole = report(&ramp(1..=1000));
    let mut merged = through_json(&report(&ramp(1..=300)));
    merged.merge(&through_json(&report(&ramp(301..=1000))));
    assert_eq!(merged.latency(), whole.latency());
    assert_eq!(merged.latency_histogram, whole.latency_histogram);
    let json = |report: &Report| serde_json::to_value(report.latency_us.clone()).unwrap();
    assert_eq!(json(&merged), json(&whole));
    assert_eq!((merged.instances, merged.requests, merged.reads), (2, 1000, 1000));
    assert!((merged.reads_per_second - 1000.0).abs() < 1e-9);
    let server = merged.server_cpu.unwrap();
    assert!((merged.own_cpu.seconds - 1.0).abs() < 1e-9 && (server.seconds - 0.5).abs() < 1e-9);
    assert!((server.us_per_read.unwrap() - 500.0).abs() < 1e-9);
}

#[test]
fn a_result_that_is_none_says_what_is_wrong() {
    // Scenario: text that is no JSON, JSON of something else, a histogram that is cut off or missing.
    // Expected: an error that says so.
    let right = report(&ramp(1..=10));
    let mut json = serde_json::to_value(&right).unwrap();
    assert!(Report::read("{}").unwrap_err().contains("missing field"));
    assert!(Report::read("reads/s 5").is_err());
    json["latency_histogram"] = "HISTFAAAA".into();
    assert!(
        Report::read(&json.to_string())
            .unwrap_err()
            .starts_with("latency_histogram ")
    );
    json["latency_histogram"] = serde_json::Value::Null;
    assert!(
        Report::read(&json.to_string())
            .unwrap_err()
            .contains("only one of")
    );
}

#[test]
fn conditions_hold_or_say_what_was_measured() {
    // Scenario: a result of 1000 requests of 1 to 1000 us, 10 more that failed; and one without any answer.
    // Expected: what is true is met; what is not says the figure; a figure that is not there is not met.
    let mut result = report(&ramp(1..=1000));
    result.request_errors.insert("UNAVAILABLE".into(), 10);
    result.errors = 10;
    let unmet = |text: &str| {
        Requirement::parse(text)
            .unwrap()
            .unmet(|figure| result.figure(figure))
    };
    for met in [
        "p99<1ms",
        "p99>=990us",
        "max<=1ms",
        "errors<=10",
        "errors<1%",
        "wrong_bytes<1",
    ] {
        assert_eq!(unmet(met), None, "{met}");
    }
    for (not, got) in [
        ("p99<900us", "p99<900us: it is 990 us"),
        ("errors<10", "errors<10: it is 10"),
        ("errors<0.5%", "errors<0.5%: it is 0.9901 %"),
        ("missed<1", "missed<1: this run has no such figure"),
        (
            "server_cpu_us_per_read<5",
            "server_cpu_us_per_read<5: this run has no such figure",
        ),
    ] {
        assert_eq!(unmet(not).as_deref(), Some(got));
    }
    let nothing = report(&Durations::default());
    assert!(
        Requirement::parse("p99<1s")
            .unwrap()
            .unmet(|figure| nothing.figure(figure))
            .is_some()
    );
    assert_eq!(Requirement::parse_objective("p99=5ms").unwrap().text(), "p99=5ms");
}
