use super::super::trait_suite::{Read, Sample, WAIT, collect, make_all, unpark_waker};
use super::*;

/// The results of 300 reads of 1000 bytes each under a plan and a seed, in the order of their reports.
fn run(seed: u64, plan: FaultPlan) -> Vec<(u32, Result<u32, i32>)> {
    let sample = Sample::new(300_000);
    let control = SimControl::new(seed);
    control.set_faults(plan);
    let mut backend = SimBackend::new(&control);
    let mut reads: Vec<Read> = (0..300).map(|number| Read::new(number * 1000, 1000)).collect();
    for (slot, read) in reads.iter_mut().enumerate() {
        let attempt = read.attempt(slot, &sample.file);
        backend.start(attempt);
    }
    let finished = collect(&mut backend, &mut reads, 300);
    for read in &reads {
        let start = usize::try_from(read.offset).expect("small");
        let count = read.result.expect("reported").unwrap_or(0) as usize;
        assert!(
            read.memory[..count] == sample.bytes[start..start + count],
            "{control}"
        );
        assert!(read.memory[count..].iter().all(|&byte| byte == 0xDB), "{control}");
    }
    finished
        .iter()
        .map(|finished| (finished.slot, finished.result))
        .collect()
}

#[test]
fn a_seed_repeats_a_run() {
    // Scenario: every kind of random fault but stalls, and reordering, twice with one seed and once with
    // another. Expectation: the same results in the same order, then different ones; each kind occurs.
    let plan = FaultPlan {
        short_per_mille: 200,
        eio_per_mille: 200,
        eintr_per_mille: 200,
        eagain_per_mille: 200,
        reorder: true,
        ..FaultPlan::default()
    };
    let first = run(7, plan.clone());
    assert_eq!(first, run(7, plan.clone()));
    assert_ne!(first, run(8, plan));
    for expected in [Err(libc::EIO), Err(libc::EINTR), Err(libc::EAGAIN), Ok(1000)] {
        assert!(
            first.iter().any(|(_, result)| *result == expected),
            "{expected:?}"
        );
    }
    assert!(first.iter().any(|(_, result)| matches!(result, Ok(1..1000))));
    assert!(!first.is_sorted_by_key(|(slot, _)| *slot), "reordered");
}

#[test]
fn a_script_is_dealt_in_order() {
    // Scenario: a script of five fates, then at most two random faults. Expectation: those fates, then two
    // EIO, then none.
    let plan = FaultPlan {
        script: vec![
            Fault::None,
            Fault::Errno(libc::EIO),
            Fault::Short { bytes: 10 },
            Fault::Short { bytes: 0 },
            Fault::Short { bytes: 5000 },
        ],
        eio_per_mille: 1000,
        faults_max: Some(6),
        ..FaultPlan::default()
    };
    let results: Vec<_> = run(1, plan).into_iter().map(|(_, result)| result).collect();
    let eio = Err(libc::EIO);
    // The script's four faults count towards the six.
    assert_eq!(results[..7], [Ok(1000), eio, Ok(10), Ok(0), Ok(1000), eio, eio]);
    assert!(results[7..].iter().all(|result| *result == Ok(1000)));
}

#[test]
fn held_attempts_wait_for_their_release() {
    // Scenario: five attempts held, two released, then all; with a waker that counts. Expectation: nothing is
    // reported before its release, and the oldest is released first; the waiting task is woken; the gauges
    // follow.
    let sample = Sample::new(5000);
    let control = SimControl::new(3);
    let mut backend = SimBackend::new(&control);
    control.hold();
    let mut reads: Vec<Read> = (0..5).map(|number| Read::new(number * 1000, 1000)).collect();
    for (slot, read) in reads.iter_mut().enumerate() {
        let attempt = read.attempt(slot, &sample.file);
        backend.start(attempt);
    }
    assert_eq!(backend.flush(), 1);
    assert_eq!(
        (
            control.in_flight(),
            control.started_total(),
            control.max_in_flight()
        ),
        (5, 5, 5)
    );

    let waker = unpark_waker();
    let mut cx = Context::from_waker(&waker);
    let mut finished = Vec::new();
    assert_eq!(backend.poll_completions(&mut cx, &mut finished), Poll::Pending);
    let releaser = control.clone();
    let thread = std::thread::spawn(move || releaser.release(2));
    let reported = collect(&mut backend, &mut reads, 2);
    assert_eq!(thread.join().expect("no panic"), 2);
    assert_eq!(
        reported.iter().map(|finished| finished.slot).collect::<Vec<_>>(),
        [0, 1]
    );
    assert!(control.wait_in_flight(3, WAIT));
    assert_eq!(backend.poll_completions(&mut cx, &mut finished), Poll::Pending);

    assert_eq!(control.release_all(), 3);
    collect(&mut backend, &mut reads[..], 3);
    assert_eq!(control.in_flight(), 0);
    // The gate is open again.
    make_all(&mut backend, &sample.file, &mut [Read::new(0, 10)]);
    assert!(control.wait_started(6, WAIT));
    assert!(!control.wait_started(7, Duration::ZERO));
}

#[test]
fn a_stalled_attempt_is_held_alone() {
    // Scenario: the second of three attempts stalls; then the backend is dropped with it. Expectation: the
    // others are reported, and nothing is left in flight or held.
    let sample = Sample::new(3000);
    let control = SimControl::new(4);
    control.set_faults(FaultPlan::script(&[Fault::None, Fault::Stall]));
    let mut backend = SimBackend::new(&control);
    let mut reads: Vec<Read> = (0..3).map(|number| Read::new(number * 1000, 1000)).collect();
    for (slot, read) in reads.iter_mut().enumerate() {
        let attempt = read.attempt(slot, &sample.file);
        backend.start(attempt);
    }
    collect(&mut backend, &mut reads, 2);
    assert_eq!(reads[1].result, None);
    assert_eq!((control.in_flight(), control.faults_total()), (1, 1));
    drop(backend);
    assert_eq!(control.in_flight(), 0);
    assert_eq!(control.release_all(), 0);
}

#[test]
fn the_seed_is_said() {
    // Scenario: a control is formatted. Expectation: its seed, and how to repeat the run.
    let control = SimControl::new(42);
    assert_eq!(control.seed(), 42);
    assert!(control.to_string().contains("RINGFETCH_SIM_SEED=42"));
    assert!(format!("{control:?}").contains("42"));
}
