//! The threads that drive load: each has its own runtime, connections and slots, so that no read crosses
//! threads and the generator stays cheap. They are started once for any number of measurements.
//! Invariant: a request that starts inside the window is measured and waited for, so that a stall at the end
//! is not lost.

use super::args::{Load, TransportArg};
use super::recorder::Recorder;
use super::transport::{Endpoints, RequestError, Transport};
use super::workload::{Choice, Workload};
use crate::outcome::Failure;
use ringfetch_pace::Alarm;
use ringfetch_pace::{Gate, Pacer};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// There is always a timer at most this far ahead.
const TICK: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct LoadThreads {
    threads: Vec<Thread>,
    /// One report from each thread when it is connected, and for each measurement.
    reports: mpsc::Receiver<Result<(), Failure>>,
}

#[derive(Debug)]
struct Thread {
    measure: mpsc::Sender<Arc<Pacer>>,
    recorder: Arc<Recorder>,
}

impl LoadThreads {
    /// Starts the threads and waits until all of them are connected.
    pub(super) async fn start(
        args: &Load,
        endpoints: &Endpoints,
        workload: &Arc<Workload>,
    ) -> Result<Self, Failure> {
        let connections = args.connections();
        let count = args.threads;
        let (report, reports) = mpsc::channel(1024);
        let mut load_threads = Self {
            threads: Vec::new(),
            reports,
        };
        for thread in 0..count {
            let (measure, measurements) = mpsc::channel(1);
            let recorder = Arc::new(Recorder::default());
            let driver = Driver {
                thread,
                threads: count,
                endpoints: endpoints.clone(),
                connections: share(connections, count, thread),
                slots: share(args.outstanding, count, thread),
                seed: args.choice_seed,
                workload: Arc::clone(workload),
                recorder: Arc::clone(&recorder),
                report: report.clone(),
                measurements,
            };
            spawn(thread, report.clone(), move || driver.run())?;
            load_threads.threads.push(Thread { measure, recorder });
        }
        for _ in 0..count {
            load_threads.done().await?;
        }
        Ok(load_threads)
    }

    /// Waits until one of them has connected or made a measurement.
    ///
    /// # Errors
    /// Why it cannot connect, or that it panicked.
    ///
    /// # Cancel safety
    /// Loses no report.
    pub(super) async fn done(&mut self) -> Result<(), Failure> {
        self.reports.recv().await.unwrap_or_else(|| Err(panicked()))
    }

    pub(super) fn threads(&self) -> u32 {
        u32::try_from(self.threads.len()).unwrap_or(u32::MAX)
    }

    /// Starts a measurement on all threads.
    pub(super) async fn measure(&self, pacer: &Arc<Pacer>) {
        for thread in &self.threads {
            // A thread that has panicked has reported it.
            let _ = thread.measure.send(Arc::clone(pacer)).await;
        }
    }

    /// Ends the threads, which end their connections in order.
    ///
    /// # Cancel safety
    /// They end by themselves.
    pub(super) async fn end(&mut self) {
        self.threads.clear();
        // Also of a panic, which changes nothing: the results are complete.
        while self.reports.recv().await.is_some() {}
    }

    pub(super) fn recorders(&self) -> impl Iterator<Item = &Recorder> {
        self.threads.iter().map(|thread| &*thread.recorder)
    }
}

/// Starts a thread, whose panic is reported: the others go on, and the run would wait for it. Nobody waits for its end: it
/// may have requests in flight that nobody wants any more.
fn spawn(
    thread: u32,
    report: mpsc::Sender<Result<(), Failure>>,
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let work = move || {
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            // The receiver is gone if another thread has failed.
            let _ = report.blocking_send(Err(panicked()));
        }
    };
    let name = format!("load-{thread}");
    std::thread::Builder::new().name(name).spawn(work).map(drop)
}

fn panicked() -> Failure {
    Failure::Failed("a load thread panicked".to_owned())
}

/// Part `part` of `whole` split as evenly as possible: 10 over 4 is 3, 3, 2, 2.
fn share(whole: u32, parts: u32, part: u32) -> u32 {
    whole / parts + u32::from(part < whole % parts)
}

/// One seed from several numbers: every slot of every thread chooses its own items in each measurement. A run
/// with the same seed repeats them; a neighbouring seed gives others. Items of the previous step would be
/// cached.
fn mixed(numbers: &[u64]) -> u64 {
    numbers
        .iter()
        .fold(0, |seed, number| fastrand::Rng::with_seed(seed ^ number).u64(..))
}

/// One thread's work.
struct Driver {
    thread: u32,
    threads: u32,
    endpoints: Endpoints,
    connections: u32,
    slots: u32,
    seed: u64,
    workload: Arc<Workload>,
    recorder: Arc<Recorder>,
    report: mpsc::Sender<Result<(), Failure>>,
    measurements: mpsc::Receiver<Arc<Pacer>>,
}

impl Driver {
    fn run(self) {
        match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime.block_on(self.drive()),
            Err(error) => {
                let refused = RequestError::transport(error.to_string());
                // The receiver is gone if another thread has failed.
                let _ = self
                    .report
                    .blocking_send(Err(self.endpoints.unreachable(&refused)));
            }
        }
    }

    async fn drive(mut self) {
        let transport = Transport::connect(&self.endpoints, self.connections, self.slots).await;
        let transport = match transport {
            Ok(transport) => transport,
            Err(error) => {
                let _ = self.report.send(Err(self.endpoints.unreachable(&error))).await;
                return;
            }
        };
        let _ = self.report.send(Ok(())).await;
        // A timer that is due before those of all calls: whenever a timer becomes the earliest one, as each
        // call's does while few are in flight, tokio wakes its thread by a system call and polls for events
        // once more in vain.
        tokio::spawn(async {
            loop {
                tokio::time::sleep(TICK).await;
            }
        });
        let context = Arc::new(ThreadContext {
            transport,
            workload: Arc::clone(&self.workload),
            recorder: Arc::clone(&self.recorder),
        });
        let mut measurement = 0;
        while let Some(pacer) = self.measurements.recv().await {
            let seed = mixed(&[self.seed, measurement, self.thread.into()]);
            measurement += 1;
            let gate = Gate::new(
                Arc::clone(&pacer),
                self.thread,
                self.threads,
                mixed(&[seed, u64::MAX]),
                Alarm::precise(),
            );
            run_slots(Arc::clone(&context), pacer, gate, self.slots, seed).await;
            let _ = self.report.send(Ok(())).await;
        }
        if let Some(context) = Arc::into_inner(context) {
            context.transport.end(&self.endpoints).await;
        }
    }
}

/// State shared by the slots of one thread.
struct ThreadContext {
    transport: Transport,
    workload: Arc<Workload>,
    recorder: Arc<Recorder>,
}

/// One measurement of one thread.
async fn run_slots(context: Arc<ThreadContext>, pacer: Arc<Pacer>, gate: Gate, slots: u32, seed: u64) {
    let gate = Arc::new(gate);
    let mut tasks = tokio::task::JoinSet::new();
    for slot in 0..slots {
        let random = fastrand::Rng::with_seed(mixed(&[seed, slot.into()]));
        let (context, pacer, gate) = (Arc::clone(&context), Arc::clone(&pacer), Arc::clone(&gate));
        tasks.spawn(async move { run_slot(slot, random, &context, &pacer, &gate).await });
    }
    // Panics if one of them did.
    tasks.join_all().await;
}

/// Keeps one request in flight.
async fn run_slot(slot: u32, mut random: fastrand::Rng, context: &ThreadContext, pacer: &Pacer, gate: &Gate) {
    let slot = usize::try_from(slot).unwrap_or(0);
    let is_open = pacer.is_open();
    let (mut choice, mut free_since) = (Choice::default(), pacer.begin());
    while let Some(permit) = gate.next(free_since).await {
        context.workload.choose(&mut random, &mut choice);
        let sent = context.recorder.send(permit, is_open);
        let answer = context
            .transport
            .fetch(slot, context.workload.part(choice.part), &choice.items)
            .await;
        free_since = context
            .recorder
            .end(&context.workload, &choice, sent, is_open, &answer);
        if let Err(refused) = answer {
            pacer.pause(refused.retry_after).await;
        }
    }
}

/// Checks that the connections and slots of a run fit its transport and its threads.
pub(super) fn check(args: &Load) -> Result<(), Failure> {
    if args.transport == TransportArg::Http && args.connections() != args.outstanding {
        return Err(Failure::Usage(format!(
            "--connections {}: an HTTP/1.1 connection has one request in flight, so leave it out or make it \
             --outstanding's {}",
            args.connections(),
            args.outstanding
        )));
    }
    // A thread without a connection or a slot would only idle.
    let threads = args.threads;
    if threads > args.outstanding {
        return Err(Failure::Usage(format!(
            "--threads {threads}: each has requests of its own: give --outstanding {threads} or more"
        )));
    }
    if threads > args.connections() {
        return Err(Failure::Usage(format!(
            "--threads {threads}: each has a connection of its own: give --connections {threads} or more"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::recorder::Tally;
    use super::super::transport::fake::Fake;
    use super::*;
    use ringfetch_pace::{Arrivals, Ramp};
    use std::time::Duration;
    use tokio::time::Instant;

    #[tokio::test]
    async fn a_thread_that_panics_ends_the_run() {
        // Scenario: two threads: a slot of one panics, the other one goes on. Expected: a failure that says so.
        let (report, reports) = mpsc::channel(2);
        let mut load_threads = LoadThreads {
            threads: Vec::new(),
            reports,
        };
        let other = report.clone();
        spawn(0, report, || {
            let context = ThreadContext {
                transport: Transport::Fake(Fake {
                    takes: Duration::MAX,
                    stall: None,
                }),
                workload: Arc::new(Workload::of_blocks(1)),
                recorder: Arc::default(),
            };
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .build();
            runtime.unwrap().block_on(async {
                let pacer = Arc::new(Pacer::new(Instant::now(), ms(0), Ok(ms(1)), None));
                let gate = Gate::new(Arc::clone(&pacer), 0, 1, 3, Alarm::Coarse);
                run_slots(Arc::new(context), pacer, gate, 2, 3).await;
            });
        })
        .unwrap();
        let Err(Failure::Failed(problem)) = load_threads.done().await else {
            panic!("no failure");
        };
        assert_eq!(problem, "a load thread panicked");
        drop(other);
    }

    #[test]
    fn shares_are_even_and_whole() {
        assert_eq!([0, 1, 2, 3].map(|part| share(10, 4, part)), [3, 3, 2, 2]);
        assert_eq!([0, 1, 2].map(|part| share(3, 3, part)), [1, 1, 1]);
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// 10 s against a server that takes 2 ms and stalls from 4 s to 5 s.
    async fn through_a_stall(open: Option<(Ramp, Arrivals)>, slots: u32) -> (Tally, u64) {
        let begin = Instant::now();
        let stall = Some((begin + ms(4000), begin + ms(5000)));
        let recorder = Arc::new(Recorder::default());
        let context = ThreadContext {
            transport: Transport::Fake(Fake { takes: ms(2), stall }),
            workload: Arc::new(Workload::of_blocks(100)),
            recorder: Arc::clone(&recorder),
        };
        let pacer = Arc::new(Pacer::new(begin, ms(0), Ok(ms(10_000)), open));
        let gate = Gate::new(Arc::clone(&pacer), 0, 1, 3, Alarm::Coarse);
        run_slots(Arc::new(context), Arc::clone(&pacer), gate, slots, 3).await;
        (recorder.take(), pacer.missed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_stall_is_seen_by_every_request_that_it_kept_waiting() {
        // Scenario: 1000 requests a second for 10 s, 100 slots, and a server that stalls for 1 s. Expected:
        // all 10 000 are sent. About 1000 of them waited, evenly between 0 and 1 s: 100 in their slots, about
        // 900 without a slot; so p99 is near 0.9 s, and even p90 begins to show it. Nothing is missed.
        let open = Some((Ramp::constant(1000.0), Arrivals::Constant));
        let (tally, missed) = through_a_stall(open, 100).await;
        assert_eq!((tally.requests, missed), (10_000, 0));
        let slow = |percentile: f64| tally.latency.percentile(percentile).unwrap() / 1e6;
        assert!((850.0..=950.0).contains(&slow(99.0)), "{}", slow(99.0));
        assert!((450.0..=550.0).contains(&slow(95.0)), "{}", slow(95.0));
        assert!(slow(89.0) < 10.0, "{}", slow(89.0));
        assert!((850..=950).contains(&tally.late), "{}", tally.late);
        assert!(tally.lateness.max_ns() > Some(850_000_000));
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_loop_hides_the_same_stall() {
        // Scenario: the same server under a closed loop of 2 slots, which reaches about the same rate.
        // Expected: only two requests saw the stall, and p99 does not show it: the reason for the open loop.
        let (tally, _) = through_a_stall(None, 2).await;
        assert!(tally.requests > 8_000, "{}", tally.requests);
        assert!(tally.latency.percentile(99.0).unwrap() < 5e6);
        assert!(tally.latency.max_ns() >= Some(990_000_000));
        assert_eq!((tally.late, tally.lateness.count()), (0, 0));
    }

    #[test]
    fn no_two_slots_choose_the_same_items() {
        // Scenario: neighbouring seeds, in several measurements, on several threads with many slots and their
        // arrivals. Expectation: all seeds differ, and the same numbers give the same one.
        let mut seeds = std::collections::HashSet::new();
        for (run, measurement, thread) in
            (0..4).flat_map(|run| (0..4).flat_map(move |step| (0..4).map(move |of| (run, step, of))))
        {
            let of_thread = mixed(&[run, measurement, thread]);
            assert_eq!(of_thread, mixed(&[run, measurement, thread]));
            for slot in (0..256).chain([u64::MAX]) {
                assert!(
                    seeds.insert(mixed(&[of_thread, slot])),
                    "{run} {measurement} {thread} {slot}"
                );
            }
        }
    }
}
