//! Tests of the report: what merging keeps and what it adds up.

use super::super::histogram::tests::ramp;
use super::super::require::Requirement;
use super::*;

/// A closed loop's report with these latencies, one read per request.
pub(crate) fn report(latency: &Durations) -> Report {
    let cpu = Cpu::new(0.5, 0.5, latency.count());
    Report {
        instances: 1,
        transport: "grpc".into(),
        seconds: 1.0,
        requests: latency.count(),
        requests_per_second: approximate(latency.count()),
        reads: latency.count(),
        reads_per_second: approximate(latency.count()),
        latency_us: LatencyMicros::of(latency),
        latency_histogram: latency.encode(),
        own_cpu: cpu.clone(),
        server_cpu: Some(cpu),
        verified: true,
        latency: latency.clone(),
        ..Report::default()
    }
}

fn through_json(report: &Report) -> Report {
    Report::read(&serde_json::to_string(report).unwrap(), &mut 0.0).unwrap()
}

#[test]
fn two_results_merge_into_what_one_would_have_measured() {
    // Latencies of 1 to 1000 us in one result, and split over two that went through JSON. The clients' CPU
    // adds up, the server's does not.
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
    let right = report(&ramp(1..=10));
    let mut json = serde_json::to_value(&right).unwrap();
    let read = |text: &str| Report::read(text, &mut 0.0);
    assert!(read("{}").unwrap_err().contains("missing field"));
    assert!(read("reads/s 5").is_err());
    json["latency_histogram"] = "HISTFAAAA".into();
    let error = read(&json.to_string()).unwrap_err();
    assert!(error.starts_with("latency_histogram "), "{error}");
    json["latency_histogram"] = serde_json::Value::Null;
    let error = read(&json.to_string()).unwrap_err();
    assert!(error.contains("only one of"), "{error}");
}

#[test]
fn conditions_hold_or_say_what_was_measured() {
    // 1000 requests of 1 to 1000 us and 10 that failed; then a run without any answer.
    let mut result = report(&ramp(1..=1000));
    result.request_errors.insert("UNAVAILABLE".into(), 10);
    result.errors = 10;
    let unmet = |report: &Report, text: &str| {
        let requirement = Requirement::parse(text).unwrap();
        requirement.unmet(|figure| report.figure(figure))
    };
    for met in "p99<1ms p99>=990us max<=1ms errors<=10 errors<1% wrong_bytes<1".split(' ') {
        assert_eq!(unmet(&result, met), None, "{met}");
    }
    for (condition, problem) in [
        ("p99<900us", "it is 990 us"),
        ("errors<10", "it is 10"),
        ("errors<0.5%", "it is 0.9901 %"),
        ("missed<1", "this run has no such figure"),
        ("server_cpu_us_per_read<5", "this run has no such figure"),
    ] {
        assert_eq!(unmet(&result, condition), Some(format!("{condition}: {problem}")));
    }
    assert!(unmet(&report(&Durations::default()), "p99<1s").is_some());
    // Of 1500 arrivals a third was never sent: the slowest third.
    result.open_loop = Some(OpenLoop {
        arrivals_kind: Arrivals::Constant,
        rate_from: 1500.0,
        rate_to: 1500.0,
        arrivals: 1500,
        intended_per_second: 1500.0,
        missed: 500,
        missed_per_second: 500.0,
        late: 0,
        lateness_us: None,
    });
    let never = "it is unknown, and longer than any: arrivals were never sent, or requests timed out";
    for (condition, problem) in [
        ("p50<700us", "it is 750 us"),
        ("p99<1h", never),
        ("mean<1h", never),
        ("max<1h", never),
    ] {
        assert_eq!(unmet(&result, condition), Some(format!("{condition}: {problem}")));
    }
    assert_eq!(unmet(&result, "p66<1ms"), None);
    // So in the steps of a search.
    let step = result.step(1500.0, None);
    assert_eq!((step.p50_us.map(f64::floor), step.p99_us), (Some(750.0), None));
    // None was sent: the daemon was not even asked.
    let mut unsent = report(&Durations::default());
    unsent.open_loop = result.open_loop;
    for condition in ["p1<1h", "p99<1h", "mean<1h", "max<1h"] {
        assert_eq!(unmet(&unsent, condition), Some(format!("{condition}: {never}")));
    }
    assert_eq!(unsent.unreachable(), None);
    assert_eq!(Requirement::parse_objective("p99=5ms").unwrap().text(), "p99=5ms");
}

#[test]
fn a_shorter_timeout_meets_no_condition() {
    // Scenario: 96 latencies of 1 ms, and 4 requests that ended with their deadline, over gRPC and over HTTP; none that was
    // answered. Expected: conditions on latencies count them as slower than all others; the report has latencies of
    // answered requests only.
    let mut latency = Durations::default();
    (0..96).for_each(|_| latency.record(Duration::from_millis(1)));
    let unmet = |report: &Report, text: &str| {
        let requirement = Requirement::parse(text).unwrap();
        requirement.unmet(|figure| report.figure(figure)).is_some()
    };
    for code in ["DEADLINE_EXCEEDED", "HTTP_504"] {
        let with_errors = |latency| {
            let mut report = report(latency);
            report.request_errors.insert(code.to_owned(), 4);
            report
        };
        let result = with_errors(&latency);
        for condition in ["p97<1h", "p99<1h", "mean<1h", "max<1h"] {
            assert!(unmet(&result, condition), "{condition}");
        }
        for condition in ["p96<2ms", "min<2ms"] {
            assert!(!unmet(&result, condition), "{condition}");
        }
        assert!(result.latency_us.is_some_and(|us| us.p99 < 2000.0));
        assert!(unmet(&with_errors(&Durations::default()), "p1<1h"));
    }
}
